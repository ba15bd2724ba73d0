"""Runs two trainings step by step in this process, and again in fp64, and finds the first result that differs beyond rounding."""

import contextlib
import copy
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from workbench.core.progress import INTERRUPTED
from workbench.diagnosis.analysis.divergence import EXACT, Divergence, Point
from workbench.diagnosis.measure.operator_recorder import Entry, Recorder
from workbench.harness.batches import map_tensors, tensors_of
from workbench.harness.discover import discover, is_compiled
from workbench.harness.restore import SavedState, process_settings
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import Layout, Ranks, choose_device
from workbench.train.trainer import Trainer

CHANGE = "the change of "
"""With the name of a parameter: what an update adds to it."""
PHASES = ("start", "forward", "backward", "optimizer", "after")
Say = Callable[[str, str], object]
Enough = Callable[[], bool]


class OutOfTime(Exception):
    """The budget ended before a training in fp64."""


@dataclass(frozen=True)
class Pair:
    """A model and a batch, with what makes a loss of them."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Callable[[Any], Any] | None = None


def of_spec(spec: RunSpec, task: Task, steps: int, double: bool, enough: Enough = lambda: False) -> list[Entry]:
    """What the first steps of a spec compute, on one rank; no further step is taken from when there is `enough`."""
    ranks = Ranks(rank=0, world_size=1, device=choose_device(spec, 0, 1), store=HashStore())
    spec = spec.replace(precision="fp32") if double else spec
    with process_settings():
        trainer = Trainer(spec, task, ranks, layout=Layout(readers=ranks, data=None), alone=True)
        module = trainer.module.double() if double else trainer.module
        compiled = trainer.model is not module or is_compiled(module) or spec.compile != "none"
        recorder = Recorder(module, operators=not compiled)
        with contextlib.closing(trainer.batches()) as batches, default_dtype(double):
            recorder.step = 0
            for name, value in module.state_dict().items():
                recorder.value("start", name, value)
            for step in range(1, steps + 1):
                if step > 1 and enough():
                    break
                recorder.begin(step)
                taken = [next(batches) for _ in range(spec.accumulation)]
                taken = [doubled(batch) for batch in taken] if double else taken
                recorder.value("start", "the batch", joined(taken))
                with recorder.on():
                    total: Any = 0.0
                    for batch in taken:
                        recorder.phase = "forward"
                        loss = trainer.forward(trainer.placed(batch))
                        recorder.phase = "backward"
                        trainer.backward(loss)
                        total = total + loss.detach()
                scale = trainer.precision.loss_scale()
                _finish(recorder, module, total, trainer.update, 1.0 if scale is None else float(scale))
    return recorder.entries


def of_pair(pair: Pair, seed: int, steps: int, double: bool, enough: Enough = lambda: False) -> list[Entry]:
    """What a model computes of a batch, its gradients and, with an optimizer, its update; no further step from when there is `enough`."""
    model, batch = pair.model, pair.batch
    keep = SavedState(discover(model))
    dtypes = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    seed_all(seed)
    try:
        with default_dtype(double):
            if double:
                model.double()
                batch = doubled(batch)
            optimizer = pair.optimizer(model.parameters()) if pair.optimizer else None
            recorder = Recorder(model, operators=not is_compiled(model))
            recorder.step = 0
            for name, value in model.state_dict().items():
                recorder.value("start", name.replace("_orig_mod.", ""), value)
            for step in range(1, steps + 1 if optimizer else 2):
                if step > 1 and enough():
                    break
                recorder.begin(step)
                model.zero_grad()
                given = copy.deepcopy(batch)
                recorder.value("start", "the batch", given)
                with recorder.on():
                    loss = pair.loss(model, given) if pair.loss else _squares(_call(model, given))
                    recorder.phase = "backward"
                    if loss.requires_grad:
                        loss.backward()  # type: ignore[no-untyped-call]
                _finish(recorder, model, loss.detach(), optimizer.step if optimizer else lambda: None)
    finally:
        for tensor, data in dtypes:
            tensor.grad = None
            tensor.data = data
        keep.restore()
    return recorder.entries


def _finish(recorder: Recorder, model: nn.Module, loss: Tensor, update: Callable[[], object], scale: float = 1.0) -> None:
    """Record loss and gradients, let the optimizer step, and record what it leaves."""
    recorder.value("forward", "the loss", loss)
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None:
            recorder.value("backward", name.replace("_orig_mod.", ""), weight.grad / scale)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    recorder.phase = "optimizer"
    update()
    for name, value in model.state_dict().items():
        changed = value.detach() - before[name] if value.is_floating_point() else value
        recorder.value("optimizer", CHANGE + name.replace("_orig_mod.", ""), changed)
    for name, buffer in model.named_buffers():
        recorder.value("after", name.replace("_orig_mod.", ""), buffer, recorder.takers.get(id(buffer), ""))


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _squares(output: Any) -> Tensor:
    """A loss of any output, in which each value counts differently."""
    total = torch.zeros(())
    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype, device=tensor.device).view(tensor.shape)
            total = total + (weights * tensor.square()).mean()
    return total


def doubled(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)


def joined(batches: Sequence[Any]) -> list[Tensor]:
    """The tensors of several micro-batches, joined."""
    columns = zip(*(tensors_of(batch) for batch in batches), strict=False)
    return [torch.cat(column) for column in columns if column[0].ndim and len({tensor.shape[1:] for tensor in column}) == 1]


@contextlib.contextmanager
def default_dtype(double: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(
    names: tuple[str, str],
    run: Callable[[int, bool, int, Enough], list[Entry]],
    say: Say,
    *,
    steps: int = 2,
    left: Callable[[], float] = lambda: math.inf,
) -> Divergence:
    """Compare two trainings as they are and in fp64.

    Args:
        names: of the two.
        run: (0 or 1, in fp64?, steps, is that enough?) → what that training computes; may raise OutOfTime in fp64.
        say: told what comes now, and what is known.
        steps: of each training, at most.
        left: seconds that are left. The first training may take a quarter of them, and all take as many steps.
    """
    cut, whole = list[str](), left()

    def enough() -> bool:
        if left() < 0.75 * whole:
            cut.append("the budget ended after {} of {} steps: a larger budget_s= compares all")
        return bool(cut)

    say(f"{names[0]}, as it is", "")
    first = run(0, False, steps, enough)
    taken = max((entry.step for entry in first), default=steps)
    say(f"{names[1]}, as it is", "")
    second = run(1, False, taken, lambda: False)
    points, by = _points(first, second)
    largest = max((point.difference for point in points), default=0.0)
    seen = next((point for point in points if point.difference > 0), None)
    notes = tuple(note.format(taken, steps) for note in cut)
    result = Divergence(
        a=names[0], b=names[1], verdict="identical", first=seen, exact=0.0, largest=largest, compared=len(points), by=by, notes=notes
    )
    if seen is None:
        return result
    if seen.phase == "start":
        return dataclasses.replace(result, verdict="start", exact=None)
    say("both in fp64", f"they differ from step {seen.step}, {seen.phase} on")
    try:
        exact_first, exact_second = run(0, True, taken, lambda: False), run(1, True, taken, lambda: False)
    except (Exception, KeyboardInterrupt) as error:
        usual = torch.finfo(torch.float32).eps * 1e3
        verdict = "bug" if seen.difference > usual else "rounding"
        why = (
            INTERRUPTED
            if isinstance(error, KeyboardInterrupt)
            else "the budget ended; a larger budget_s= tells rounding from a bug"
            if isinstance(error, OutOfTime)
            else f"{type(error).__name__}: {error!s:.120}"
        )
        note = f"not run in fp64 ({why}): judged by the size of the first difference alone"
        return dataclasses.replace(result, verdict=verdict, exact=None, notes=(*notes, note))
    exact, by = _points(exact_first, exact_second)
    largest_exact = max((point.difference for point in exact), default=0.0)
    wrong = next((point for point in exact if point.difference > EXACT), None)
    if wrong is None:
        notes += ("one of the two overflows in its own precision",) if math.isinf(largest) else ()
        return dataclasses.replace(result, verdict="rounding", exact=largest_exact, notes=notes)
    verdict = "start" if wrong.phase == "start" else "bug"
    if by == "modules":  # where both run the same operators, they draw the same random numbers
        drawn = any(entry.random and entry.module == wrong.module and entry.step == wrong.step for entry in (*exact_first, *exact_second))
        verdict = "random" if verdict == "bug" and drawn and wrong.phase == "forward" else verdict
        wrong = dataclasses.replace(wrong, operator=_other_operator(exact_first, exact_second, wrong))
    return dataclasses.replace(result, verdict=verdict, first=wrong, exact=largest_exact, by=by, compared=len(exact))


def _points(first: Sequence[Entry], second: Sequence[Entry]) -> tuple[list[Point], str]:
    """What both have, in the order of the first, and by what the two were aligned."""
    sizes: dict[str, float] = {}
    for entry in first:
        norms = [sketch.norm for sketch in entry.sketches if math.isfinite(sketch.norm)]
        sizes[entry.phase] = max([sizes.get(entry.phase, 0.0), *norms])

    def signature(entries: Sequence[Entry]) -> list[Any]:
        return [(entry.kind, entry.key, tuple(s.shape for s in entry.sketches)) for entry in entries if entry.kind != "module"]

    aligned = any(entry.kind == "operator" for entry in first) and signature(first) == signature(second)
    if aligned:
        chosen = [entry for entry in first if entry.kind != "module"]
        pairs = list(zip(chosen, (entry for entry in second if entry.kind != "module"), strict=True))
    else:
        others = {(entry.kind, entry.key): entry for entry in second if entry.kind != "operator"}
        pairs = [(entry, others[entry.kind, entry.key]) for entry in first if (entry.kind, entry.key) in others]
    points = []
    for entry, other in pairs:
        floor = 1e-6 * sizes[entry.phase]
        differences = [
            distance if not (distance := mine.distance(its)) or math.isinf(distance) else distance / max(mine.norm, its.norm, floor)
            for mine, its in zip(entry.sketches, other.sketches, strict=False)
            if mine.shape == its.shape
        ]
        if differences:
            worst = max(differences)
            places: dict[str, Any] = {"step": entry.step, "phase": entry.phase, "module": entry.module, "operator": entry.operator}
            points.append(Point(**places, difference=worst))
    points.sort(key=lambda point: (point.step, PHASES.index(point.phase)))
    return points, "operators" if aligned else "modules"


def _other_operator(first: Sequence[Entry], second: Sequence[Entry], point: Point) -> str:
    """Of a module's operators in two recordings the one at which the two lists part first; "" = they are the same."""

    def operators(entries: Sequence[Entry]) -> list[str]:
        mine = (entry for entry in entries if entry.kind == "operator" and entry.step == point.step and entry.module == point.module)
        return [entry.operator for entry in mine if entry.phase == point.phase]

    mine, its = operators(first), operators(second)
    blocks = difflib.SequenceMatcher(None, mine, its, autojunk=False).get_opcodes()
    return next(((mine[a:b] or its[c:d])[0] for kind, a, b, c, d in blocks if kind != "equal"), "")
