"""Hierarchy: an all-reduce over nodes of several GPUs, fast links inside and slower ones between."""

from workbench.cost.collectives import CostError, Link, all_gather, all_reduce, checked_ranks, reduce_scatter


def hierarchical_all_reduce(size: float, *, nodes: int, per_node: int, intra: Link, inter: Link, algorithm: str = "ring") -> float:
    """Seconds of an all-reduce in three parts: reduce-scatter inside each node, all-reduce of each GPU's part with its like in the other
    nodes, all-gather inside.

    Bytes per GPU: 2(g−1)/g · S inside, 2(k−1)/k · S/g between; every GPU has a network card, and all of them work at once.

    Args:
        size: bytes that each GPU has.
        nodes: k.
        per_node: GPUs of each, g.
        intra: the link of two GPUs of a node.
        inter: the link of two GPUs of different nodes.
        algorithm: between the nodes, "ring" or "tree".

    Raises:
        CostError: a number of nodes or GPUs below 1, or a size below 0.
    """
    for name, value in (("nodes", nodes), ("per_node", per_node)):
        try:
            checked_ranks(value)
        except CostError as error:
            raise CostError(f"{name}: {error}") from None
    inside = reduce_scatter(size, per_node, intra) + all_gather(size, per_node, intra)
    return inside + all_reduce(size / per_node, nodes, inter, algorithm)
