"""Bytes that a rank sends per step under DDP, ZeRO, FSDP and HSDP."""

from dataclasses import dataclass

from workbench.cluster.analysis.collective_cost import CostError, checked_ranks
from workbench.core.checks import choice

SHARINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes that each rank sends, and as many receives, per optimizer step."""

    gathered: float
    """Bytes in all-gathers of parameters."""
    reduced: float
    """Bytes in reduce-scatters (or the first half of all-reduces) of gradients."""
    returned: float
    """Bytes in the second half of all-reduces of gradients."""

    @property
    def total(self) -> float:
        """All bytes."""
        return self.gathered + self.reduced + self.returned


def volume(
    parameters: float,
    ranks: int,
    sharing: str = "ddp",
    *,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    shard_ranks: int | None = None,
) -> Volume:
    """Bytes per rank and step, in rings, for Ψ parameters on n ranks; per element times (n−1)/n:

    * ddp: 2Ψ, an all-reduce of the gradients.
    * zero1, zero2: 2Ψ, their reduce-scatter and an all-gather of the new parameters. (torch's ZeroRedundancyOptimizer, which is what
      `RunSpec(parallel="zero1")` uses, all-reduces the gradients instead: 3Ψ.)
    * zero3, fsdp: 3Ψ, an all-gather each for forward and backward, and a reduce-scatter.
    * hsdp: 3Ψ inside a group of `shard_ranks`, and an all-reduce of the shard, 2Ψ/g · (k−1)/k, with the k other groups.

    Source: Rajbhandari et al. 2020, ZeRO, section 7; Zhao et al. 2023, PyTorch FSDP. Left out: padding, buffers, and that FSDP keeps the
    root's parameters from forward to backward.

    Args:
        parameters: Ψ, of the model.
        ranks: n that work on different samples.
        sharing: one of "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp".
        parameter_bytes: per element of what is gathered (2 in bf16).
        gradient_bytes: per element of what is reduced (4 in fp32).
        shard_ranks: of hsdp.

    Raises:
        CostError: an unknown kind of sharing, or ranks that the groups do not divide.

    >>> volume(1e9, 8, "fsdp", parameter_bytes=2).total / volume(1e9, 8, "ddp").total
    1.0
    """
    choice("sharing", sharing, SHARINGS, error=CostError)
    if not parameters > 0:
        raise CostError(f"parameters={parameters!r}: expected a number above 0")
    group = checked_ranks(ranks)
    if sharing == "hsdp":
        group = checked_ranks(shard_ranks if shard_ranks is not None else min(8, ranks))
        if ranks % group:
            raise CostError(f"shard_ranks={group} does not divide the {ranks} ranks: expected groups of one size")
    share = (group - 1) / group
    gradients, weights = gradient_bytes * parameters, parameter_bytes * parameters
    if sharing == "ddp":
        return Volume(gathered=0.0, reduced=gradients * share, returned=gradients * share)
    if sharing in ("zero1", "zero2"):
        return Volume(gathered=weights * share, reduced=gradients * share, returned=0.0)
    copies = ranks // group
    between = gradients / group * (copies - 1) / copies
    return Volume(gathered=2 * weights * share, reduced=gradients * share + between, returned=between)
