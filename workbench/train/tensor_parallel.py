"""Tensor parallelism: splits linear layers and embeddings over several ranks, by a plan of module names."""

import difflib
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.runs.spec import SpecError
from workbench.runs.task import Task, TaskError
from workbench.train.ranks import Layout
from workbench.train.sharded_tensors import broadcast_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

STYLES: dict[str, tuple[str, str | None]] = {
    "colwise": ("ColwiseParallel", None),
    "rowwise": ("RowwiseParallel", None),
    "colwise_rep": ("ColwiseParallel", "output_layouts"),
    "colwise_gather_output": ("ColwiseParallel", "output_layouts"),
    "embedding_rowwise": ("RowwiseParallel", "input_layouts"),
}
"""How a layer can be split: "colwise" by its outputs, which stay split; "rowwise" by its inputs, which are already split, and the partial
results are summed; "colwise_rep" (newer Hugging Face plans: "colwise_gather_output") by its outputs, which are gathered;
"embedding_rowwise" by the vocabulary. Values are torch's class and which side of the layer is not split."""


def split_layers(module: nn.Module, task: Task, layout: Layout, device: torch.device) -> None:
    """Split the layers of a model over the ranks of `layout.tensor`, in place.

    Args:
        module: the full model, the same on each rank.
        task: with a plan; without one, a Hugging Face model's own is used.
        layout: layout of the ranks.
        device: device of this rank.

    Raises:
        SpecError: there is no plan.
        TaskError: the plan does not fit the model.
    """
    if layout.tensor is None:
        return
    from torch.distributed.tensor import parallel  # takes long

    plan = task.tensor_parallel or _own_plan(module)
    if not plan:
        raise SpecError(
            f"tensor_parallel={layout.tensor.size()}: the task has no plan, and its {type(module).__name__} brings none of its own; say "
            'which layers are split and how: wb.Task(…, tensor_parallel={"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}), '
            "or leave tensor_parallel out"
        )
    styles = styles_of(module, plan, layout.tensor.size())
    broadcast_parameters(module, layout.tensor.get_group(), device)
    parallel.parallelize_module(module, layout.tensor, styles)


def _own_plan(module: nn.Module) -> dict[str, str]:
    """The plan of a Hugging Face model, without layers with tied weights; some of its names are relative to the base model."""
    plan = getattr(module, "_tp_plan", None) or getattr(module, "tp_plan", None) or {}
    names, inner = [name for name, _ in module.named_modules()], f"{getattr(module, 'base_model_prefix', '')}."
    shared = _shared(module)
    tied = [name for name, part in module.named_modules() if any(id(weight) in shared for weight in part._parameters.values())]
    absolute = {
        pattern if any(fnmatchcase(name, pattern) for name in names) or pattern.startswith(inner) else inner + pattern: style
        for pattern, style in plan.items()
    }
    return {pattern: style for pattern, style in absolute.items() if not any(fnmatchcase(name, pattern) for name in tied)}


def _shared(module: nn.Module) -> set[int]:
    """The parameters, by `id`, that several modules have."""
    uses = Counter(weight for part in module.modules() for weight in part._parameters.values() if weight is not None)
    return {id(weight) for weight, count in uses.items() if count > 1}


def styles_of(module: nn.Module, plan: Mapping[str, str], ranks: int) -> "dict[str, ParallelStyle]":
    """The plan with its patterns resolved: name of a module → how it is split.

    Args:
        module: the model whose layers are split.
        plan: pattern of module names ("*" matches anything) → one of STYLES.
        ranks: over which a layer is split.

    Raises:
        TaskError: a pattern without a module, an unknown style, or a layer that cannot be split.
    """
    named = dict(module.named_modules())
    shared = _shared(module)
    styles = dict[str, Any]()
    for pattern, style in plan.items():
        if style not in STYLES:
            raise TaskError(f"tensor_parallel plan {pattern!r}: {style!r}: allowed are {', '.join(map(repr, STYLES))}")
        names = [name for name in named if name and fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or [name for name in named if name][:3]
            raise TaskError(f"tensor_parallel plan {pattern!r}: the model has no such module; near are {', '.join(map(repr, near))}")
        for name in names:
            _check(name, named[name], style, ranks, shared)
            styles[name] = _torch_style(style)
    return styles


def _torch_style(name: str) -> Any:
    from torch.distributed.tensor import Replicate, parallel

    kind, whole = STYLES[name]
    return getattr(parallel, kind)(**{whole: Replicate()} if whole else {})


def _check(name: str, part: nn.Module, style: str, ranks: int, shared: set[int]) -> None:
    if not isinstance(part, nn.Linear | nn.Embedding):
        raise TaskError(f"tensor_parallel plan {name!r}: a {type(part).__name__}; a Linear or an Embedding can be split")
    if id(part.weight) in shared:
        raise TaskError(
            f"tensor_parallel plan {name!r}: its weight is also that of another module, and would be split in one place only; "
            "leave it out of the plan"
        )
    axis = int(("row" in style) == isinstance(part, nn.Linear))
    size = part.weight.shape[axis]
    if size % ranks:
        raise TaskError(
            f"tensor_parallel plan {name!r}: {style} splits axis {axis} of its weight, {tuple(part.weight.shape)}, and {ranks} ranks do "
            f"not divide {size}; leave it out of the plan, or take another tensor_parallel"
        )
