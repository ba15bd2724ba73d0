"""Cuts a model into the stages of a pipeline: consecutive pieces, of which a rank keeps its own and frees the rest."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task, TaskError
from workbench.runs.training_knobs import parse_pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a model, before any rank lets go of some."""

    pieces: tuple[tuple[nn.Module, ...], ...]
    """Of each stage, in order: what one gives, the next is called with; a tuple is spread over its arguments."""
    ranks: tuple[int, ...]
    """The rank of each stage within the pipeline."""
    entries: frozenset[str]
    """Names in the state_dict of the whole model."""


class StageModule(nn.Module):
    """The pieces of a stage, called one after the other."""

    def __init__(self, pieces: Sequence[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, *inputs: Any, given: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Any:
        """What the last piece gives.

        Args:
            *inputs: what the stage before gave.
            given: arguments of the whole model, for the first stage.
        """
        args, named = given or (inputs, {})
        out: Any = None
        for piece in self.pieces:
            out = piece(*args, **named)
            args, named = out if isinstance(out, tuple) else (out,), {}
        if isinstance(out, tuple):
            return tuple(value.contiguous() if isinstance(value, Tensor) else value for value in out)
        return out.contiguous() if isinstance(out, Tensor) else out  # images in channels_last could not be sent


def cut(model: nn.Module, task: Task, spec: RunSpec) -> Stages:
    """The stages of a model; the largest has as few parameters as possible.

    Raises:
        SpecError: there are too few pieces, or it is not known which there are.
        TaskError: the pieces are not those of the model.
    """
    name, chunks = parse_pipeline(spec.pipeline_schedule)
    ranks, count = spec.pipeline_parallel, spec.pipeline_parallel * chunks
    pieces = _pieces(model, task, spec)
    own = [{id(weight): weight for weight in piece.parameters()} for piece in pieces]
    _check_owned(model, pieces)
    units: list[list[int]] = []  # pieces without parameters go with the piece before them
    for place, weights in enumerate(own):
        if weights and (not units or any(own[other] for other in units[-1])):
            units.append([place])
        elif units:
            units[-1].append(place)
        else:
            units = [[place]]
    if len(units) < count:
        raise SpecError(
            f'pipeline_parallel={ranks} with pipeline_schedule="{spec.pipeline_schedule}" needs {count} stages, and the model has '
            f"{len(units)} pieces with parameters; try "
            + (f"pipeline_parallel={len(units) // chunks}" if len(units) >= 2 * chunks else "a model that is cut into more")
        )
    sizes = [sum(weight.numel() for place in unit for weight in own[place].values()) for unit in units]
    stages = [[place for unit in part for place in units[unit]] for part in even_parts(sizes, count)]
    _check_untied(model, [[pieces[place] for place in stage] for stage in stages])
    loop = [stage % ranks for stage in range(count)]
    return Stages(
        pieces=tuple(tuple(pieces[place] for place in stage) for stage in stages),
        ranks=tuple([*range(ranks), *reversed(range(ranks))] if name == "zero_bubble" else loop),
        entries=frozenset(model.state_dict()),
    )


def even_parts(sizes: Sequence[int], count: int) -> list[range]:
    """Consecutive parts, none of them empty, of which the largest is as small as possible.

    >>> even_parts([4, 1, 1, 1, 3], 3)
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    whole = len(sizes)
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    best = {(0, 0): (0, 0)}  # parts, items → the largest of these parts, where the last of them begins
    for parts in range(1, count + 1):
        for end in range(parts, whole - (count - parts) + 1):
            best[parts, end] = min(
                (max(best[parts - 1, start][0], before[end] - before[start]), start)
                for start in range(parts - 1, end)
                if (parts - 1, start) in best
            )
    ends, end = [whole], whole
    for parts in range(count, 0, -1):
        end = best[parts, end][1]
        ends.append(end)
    ends.reverse()
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def keep_only(model: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Take all parameters and buffers out of a model that these pieces do not use; their names and those of all modules stay."""
    mine = {id(tensor) for piece in kept for tensor in (*piece.parameters(), *piece.buffers())}
    for part in model.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name in [name for name, tensor in table.items() if tensor is not None and id(tensor) not in mine]:
                del table[name]


def _pieces(model: nn.Module, task: Task, spec: RunSpec) -> list[nn.Module]:
    if task.pipeline is None:
        if isinstance(model, nn.Sequential):
            return list(model)
        raise SpecError(
            f"pipeline_parallel={spec.pipeline_parallel}: the task does not say how its {type(model).__name__} is cut, and it is not "
            "an nn.Sequential; try wb.Task(…, pipeline=lambda model: [model.embedding, *model.layers, model.head]), modules, each of which "
            "is called with what the one before gave"
        )
    pieces = list(task.pipeline(model))
    strange = [piece for piece in pieces if not isinstance(piece, nn.Module)]
    if strange or not pieces:
        raise TaskError(
            f"the task's pipeline(model) gave {f'a {type(strange[0]).__name__}' if strange else 'nothing'}; expected modules in the order "
            "in which they are called, each with what the one before gave; several steps can be one module: nn.Sequential(norm, head)"
        )
    return pieces


def _check_owned(model: nn.Module, pieces: Sequence[nn.Module]) -> None:
    named = {id(tensor): name for name, tensor in _tensors(model)}
    used = {id(tensor): name for piece in pieces for name, tensor in _tensors(piece)}
    if missing := [name for key, name in named.items() if key not in used]:
        raise TaskError(f"the task's pipeline(model) leaves out {', '.join(missing[:3])}: each parameter has to be in a piece")
    if strange := [name for key, name in used.items() if key not in named]:
        raise TaskError(f"the task's pipeline(model) has parameters that the model has not: {', '.join(strange[:3])}")


def _check_untied(model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> None:
    names = {id(tensor): name for name, tensor in _tensors(model)}
    seen: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for tensor in {id(tensor): tensor for piece in stage for _, tensor in _tensors(piece)}:
            if seen.setdefault(tensor, number) != number:
                raise TaskError(
                    f"pipeline_parallel: {names[tensor]} is used in stage {seen[tensor]} and in stage {number}, which are on different "
                    "ranks: a weight that two layers share cannot be cut; untie them, or make both one piece"
                )


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def as_tensors(out: Any) -> tuple[Tensor, ...]:
    """What a stage gives, as a tuple.

    Raises:
        TaskError: it is something else than floating-point tensors.
    """
    tensors = out if isinstance(out, tuple) else (out,)
    if not all(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors):
        kinds = ", ".join(str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__ for tensor in tensors)
        raise TaskError(
            f"pipeline_parallel: a stage gives {kinds} to the next; only floating-point tensors, or a tuple of them, are sent: cut the "
            "model at other places (Task.pipeline)"
        )
    return tensors
