"""Blocks: the parts that a model repeats, such as its layers; what is computed anew in the backward, or gathered, goes by them."""

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in their order; empty if it has none.

    A block is an element of a ModuleList, Sequential or ModuleDict whose class occurs there at least twice in the model, and which is made
    of several operations: it has parts of its own, or is of a class that is not torch's. Of blocks in blocks (a layer with a list of
    experts) the outer ones count, unless they differ in size: then they are stages, and the blocks are inside them.

    Args:
        model: any.
    """
    elements: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, _CONTAINERS):
            elements |= {_under(name, child): element for child, element in part.named_children() if _is_composed(element)}
    repeated = _repeated({name: one for name, one in elements.items() if type(one) not in _CONTAINERS})
    stages = _stages(repeated)
    if stages:
        repeated = {name: one for name, one in repeated.items() if type(one) not in stages}
    if not repeated:
        repeated = _repeated(elements)
    return {name: one for name, one in repeated.items() if not any(_inside(name, outer) for outer in repeated)}


def _under(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _inside(name: str, outer: str) -> bool:
    return name.startswith(outer + ".")


def _is_composed(part: nn.Module) -> bool:
    if isinstance(part, nn.ModuleList | nn.ModuleDict):
        return False  # these have no forward
    made_here = not type(part).__module__.startswith("torch.nn.modules")
    return next(part.parameters(), None) is not None and (made_here or next(part.children(), None) is not None)


def _repeated(elements: dict[str, nn.Module]) -> dict[str, nn.Module]:
    counts: dict[type, int] = defaultdict(int)
    for one in elements.values():
        counts[type(one)] += 1
    return {name: one for name, one in elements.items() if counts[type(one)] > 1}


def _stages(repeated: dict[str, nn.Module]) -> set[type]:
    """Classes whose modules differ in size and hold blocks of one other class, several in some, that make up most of each."""
    named: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    for name, one in repeated.items():
        named[type(one)][name] = one
    return {
        kind
        for kind, outer in named.items()
        if len({_size([one]) for one in outer.values()}) > 1
        and any(_is_made_of(outer, inner) for other, inner in named.items() if other is not kind)
    }


def _is_made_of(outer: dict[str, nn.Module], inner: dict[str, nn.Module]) -> bool:
    parts = {name: [one for place, one in inner.items() if _inside(place, name)] for name in outer}
    mostly = all(2 * _size(parts[name]) > _size([one]) for name, one in outer.items())
    return mostly and any(len(some) > 1 for some in parts.values())


def _size(modules: Iterable[nn.Module]) -> int:
    weights = {id(weight): weight.numel() for module in modules for weight in module.parameters()}
    return sum(weights.values())
