"""Finds a model's repeated blocks, such as its layers: the units of activation checkpointing, of FSDP2's gathers and of torch.compile."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from workbench.runs.spec import SpecError
from workbench.runs.training_knobs import COMPILES, parse_call

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in order; empty if it has none.

    A block is an element of a ModuleList, Sequential or ModuleDict whose class occurs there at least twice in the model, and which consists
    of several operations: it has submodules, or its class is not torch's. Of nested blocks (a layer with a list of experts) the outer ones
    count, unless they differ in size: then they are stages, and the blocks are inside them.
    """
    elements: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, _CONTAINERS):
            elements |= {f"{name}.{child}".lstrip("."): element for child, element in part.named_children() if _is_composed(element)}
    repeated = _repeated({name: module for name, module in elements.items() if type(module) not in _CONTAINERS})
    stages = _stages(repeated)
    if stages:
        repeated = {name: module for name, module in repeated.items() if type(module) not in stages}
    if not repeated:
        repeated = _repeated(elements)
    return {name: module for name, module in repeated.items() if not any(_inside(name, outer) for outer in repeated)}


def compile_parts(model: nn.Module, knob: str) -> None:
    """Have torch compile a model or its blocks when they are first called, in place, so that names and state_dict stay.

    DDP must wrap the model afterwards: torch then cuts the graph at DDP's buckets, and reduces some while it computes others.

    Raises:
        SpecError: torch has no such backend, or the model no blocks.
    """
    what, options = parse_call("compile", knob, COMPILES, "blocks")
    if what == "none":
        return
    allowed = torch.compiler.list_backends(exclude_tags=())
    if options["backend"] not in (*allowed, "eager", "aot_eager"):
        raise SpecError(f'compile="{knob}": this torch has no backend {options["backend"]!r}; it has {", ".join(allowed)}')
    blocks = find_blocks(model)
    if what == "blocks" and not blocks:
        raise SpecError(f'compile="{knob}": the {type(model).__name__} has no blocks that repeat; try compile="model"')
    for part in blocks.values() if what == "blocks" else [model]:
        _compile(part, options["backend"])


def _compile(part: nn.Module, backend: str) -> None:
    """Have torch compile a module in place.

    Of a class of torch's own, such as Sequential, `module.compile()` compiles nothing: Dynamo skips torch's functions, unless another one
    calls them.
    """
    if not type(part).forward.__module__.startswith("torch.nn."):
        part.compile(backend=backend)
        return
    call: Any = part._call_impl

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    part._compiled_call_impl = torch.compile(compiled, backend=backend)


def _inside(name: str, outer: str) -> bool:
    return name.startswith(outer + ".")


def _is_composed(part: nn.Module) -> bool:
    if isinstance(part, nn.ModuleList | nn.ModuleDict):
        return False  # these have no forward
    made_here = not type(part).__module__.startswith("torch.nn.modules")
    return next(part.parameters(), None) is not None and (made_here or next(part.children(), None) is not None)


def _repeated(elements: dict[str, nn.Module]) -> dict[str, nn.Module]:
    counts = Counter(map(type, elements.values()))
    return {name: module for name, module in elements.items() if counts[type(module)] > 1}


def _stages(repeated: dict[str, nn.Module]) -> set[type]:
    """Classes of stages: their modules differ in size, and consist mostly of blocks of one other class, several in some."""
    named: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in repeated.items():
        named[type(module)][name] = module
    return {
        kind
        for kind, outer in named.items()
        if len({_size([module]) for module in outer.values()}) > 1
        and any(_consists_of(outer, inner) for other, inner in named.items() if other is not kind)
    }


def _consists_of(outer: dict[str, nn.Module], inner: dict[str, nn.Module]) -> bool:
    parts = {name: [block for path, block in inner.items() if _inside(path, name)] for name in outer}
    mostly = all(2 * _size(parts[name]) > _size([stage]) for name, stage in outer.items())
    return mostly and any(len(blocks) > 1 for blocks in parts.values())


def _size(modules: Iterable[nn.Module]) -> int:
    weights = {id(weight): weight.numel() for module in modules for weight in module.parameters()}
    return sum(weights.values())
