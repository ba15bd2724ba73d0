"""Runs two trainings step by step in this process, and again in fp64, and finds the first result that differs beyond rounding."""

import contextlib
import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from workbench.core.progress import INTERRUPTED
from workbench.diagnosis.analysis.divergence import EXACT, LOSS, VANISHED, Divergence, Point, in_other_modes, scale_of
from workbench.diagnosis.measure.operator_recorder import Entry, Recorder
from workbench.harness.batches import map_tensors, tensors_of
from workbench.harness.discover import discover, is_compiled
from workbench.harness.restore import SavedState, process_settings
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import Layout, Ranks, choose_device
from workbench.train.trainer import Trainer, build_model

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
        trainer.phase = recorder.phase_of_step
        with contextlib.closing(trainer.batches()) as batches, in_fp64(double):
            recorder.step = 0
            for name, value in tensors_in(module).items():
                recorder.value("start", name, value)
            for step in range(1, steps + 1):
                if step > 1 and enough():
                    break
                recorder.begin(step)
                taken = [next(batches) for _ in range(spec.accumulation)]
                taken = [doubled(batch) for batch in taken] if double else taken
                for name, tensors in batch_values([tensors_of(batch) for batch in taken], int(spec.micro_batch)).items():
                    recorder.value("start", name, tensors)
                with recorder.on():
                    total: Any = 0.0
                    for left, batch in zip(reversed(range(len(taken))), taken, strict=True):
                        total = total + trainer.micro_step(batch, last=not left)
                scale = trainer.precision.loss_scale()
                _finish(recorder, module, total, trainer.update, trainer.optimizer, 1.0 if scale is None else float(scale))
    return recorder.entries


def of_pair(pair: Pair, seed: int, steps: int, double: bool, enough: Enough = lambda: False) -> list[Entry]:
    """What a model computes of a batch, its gradients and, with an optimizer, its update; no further step from when there is `enough`."""
    model, batch = pair.model, pair.batch
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("diverge: a module of torch.jit cannot be recorded, as it takes no hooks: give the module that it was made from")
    keep = SavedState(discover(model))
    dtypes = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    seed_all(seed)
    try:
        with in_fp64(double):
            if double:
                model.double()
                batch = doubled(batch)
            optimizer = pair.optimizer(model.parameters()) if pair.optimizer else None
            recorder = Recorder(model, operators=not is_compiled(model))
            recorder.step = 0
            for name, value in tensors_in(model).items():
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
                _finish(recorder, model, loss.detach(), optimizer.step if optimizer else lambda: None, optimizer)
    finally:
        for tensor, data in dtypes:
            tensor.grad = None
            tensor.data = data
        keep.restore()
    return recorder.entries


def tensors_in(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's state_dict, which may have other states (`get_extra_state`), too."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _finish(recorder: Recorder, model: nn.Module, loss: Tensor, update: Callable[[], object], optimizer: Any, scale: float = 1.0) -> None:
    """Record loss and gradients, let the optimizer step, and record what it leaves."""
    recorder.value("forward", LOSS, loss)
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None:
            recorder.value("backward", name.replace("_orig_mod.", ""), weight.grad / scale)
    before = {name: value.detach().clone() for name, value in tensors_in(model).items()}
    with recorder.update(optimizer):
        update()
    for name, value in tensors_in(model).items():
        changed = value.detach() - before[name] if value.is_floating_point() else value
        recorder.value("optimizer", CHANGE + name.replace("_orig_mod.", ""), changed)
    for name, buffer in model.named_buffers():
        recorder.value("after", name.replace("_orig_mod.", ""), buffer, recorder.takers.get(id(buffer), ""))


def batch_norms(task: Task) -> list[str]:
    """The names of the batch norms in the model of a task."""
    with process_settings():
        return [name for name, part in build_model(task).named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


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


NOT_JOINED = torch.ones((1,) * 9)
"""Stands for tensors that cannot be joined, so that the others keep their places; nothing else has its shape."""


def batch_values(batches: Sequence[Sequence[Tensor]], samples: int, ranks: int = 1) -> dict[str, list[Tensor]]:
    """What is compared of the tensors of a step's micro-batches: name → tensors.

    A tensor with a row per sample is joined with its like of the others, and compared with the same of any other split of the step. What
    goes for the whole of a micro-batch, such as the numbers of nodes in graphs that a collate joins, is compared only with the same split.

    Args:
        batches: the tensors of each micro-batch, of all ranks together.
        samples: of each, on all ranks.
        ranks: how many ranks they are of.
    """
    if len(batches) * ranks == 1:
        return {"the batch": [tensor if tensor.ndim else NOT_JOINED for tensor in batches[0]]}
    rows: list[Tensor] = []
    others: list[Tensor] = []
    for column in zip(*batches, strict=False):
        by_sample = all(tensor.ndim and len(tensor) == samples for tensor in column) and len({tensor.shape[1:] for tensor in column}) == 1
        rows.append(torch.cat(column) if by_sample else NOT_JOINED)
        if not by_sample and all(tensor.layout == torch.strided for tensor in column):
            others.append(torch.cat([tensor.reshape(-1) for tensor in column]))
    rest = {f"the rest of the batch (micro-batches: {len(batches)}, ranks: {ranks})": others}
    return {"the batch": rows, **(rest if others else {})}


WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}
"""Type of numbers → the one that stands for it in fp64."""


class _Widened(TorchFunctionMode):
    """Inside, code that asks for a type of `WIDER` gets the wider one: `softmax(x, dtype=torch.float32)`, `x.float()`, `x.to("cpu", half)`.

    Many models compute a softmax or a norm in fp32 whatever they are given, and would round in the rerun in fp64 as well.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        if func is not torch.Tensor.view:  # which reads the same bits as another type
            args = tuple(WIDER.get(value, value) if isinstance(value, torch.dtype) else value for value in args)
            kwargs = {name: WIDER.get(value, value) if isinstance(value, torch.dtype) else value for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


_WIDENED = _Widened()  # the same each time: a compiled model is compiled anew under another


@contextlib.contextmanager
def in_fp64(double: bool) -> Iterator[None]:
    """Inside, where `double` is true, tensors are made in fp64, and casts to a type of fewer bits cast to fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        with _WIDENED if double else contextlib.nullcontext():
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
        names: names of the two trainings.
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
    notes = tuple(note.format(taken, steps) for note in cut) + _other_shapes(first, second)
    result = Divergence(
        a=names[0], b=names[1], verdict="identical", first=seen, exact=0.0, largest=largest, compared=len(points), by=by, notes=notes
    )
    if seen is None:
        return result
    if seen.phase == "start":
        return dataclasses.replace(result, verdict="start", exact=None)
    if seen.phase == "optimizer":
        seen = _placed_in_update(first, second, seen, 0.0)
        result = dataclasses.replace(result, first=seen, notes=(*notes, *_options_that_differ(first, second, seen)))
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
        return dataclasses.replace(result, verdict=verdict, exact=None, notes=(*result.notes, note))
    exact, by = _points(exact_first, exact_second)
    largest_exact = max((point.difference for point in exact), default=0.0)
    before = _largest_at_each_place(points)
    wrong = next((point for point in exact if point.difference > max(EXACT, VANISHED * before.get(_place(point), 0.0))), None)
    if wrong is None:
        overflow = ("one of the two overflows in its own precision",) if math.isinf(largest) else ()
        return dataclasses.replace(result, verdict="rounding", exact=largest_exact, notes=result.notes + overflow)
    verdict = "start" if wrong.phase == "start" else "bug"
    modes = _other_modes(exact_first, exact_second, wrong.step)
    notes += modes
    if wrong.phase == "optimizer":
        notes += _options_that_differ(exact_first, exact_second, wrong)
        wrong = _placed_in_update(exact_first, exact_second, wrong, EXACT)
    elif by == "modules":  # where both run the same operators, they draw the same random numbers
        mine, its = _operators_of(exact_first, exact_second, wrong)
        recorded = all(any(entry.kind == "operator" for entry in entries) for entries in (exact_first, exact_second))
        drawn = _both_draw(mine, its) if recorded else _drawn_before(exact_first, wrong) or _drawn_before(exact_second, wrong)
        verdict = "random" if verdict == "bug" and drawn and wrong.phase == "forward" and not modes else verdict
        wrong = dataclasses.replace(wrong, operator=_other_operator(mine, its) if recorded else "")
    if verdict == "bug" and left() > 0:
        say(f"{names[0]} in fp64, once more", f"they differ in step {wrong.step}, {wrong.phase}")
        try:
            again, _ = _points(exact_first, run(0, True, taken, lambda: False))
            changing = [point for point in again if point.difference > EXACT]
            if any(_place(point) == _place(wrong) for point in changing):
                verdict = "unrepeatable"
            if changing:
                itself = (
                    f"{names[0]} differs from itself when it is repeated: it depends on something that is not restored, such as the time"
                )
                notes = (itself, *notes)
        except OutOfTime:
            pass
        except KeyboardInterrupt:
            notes += (f"{INTERRUPTED} while {names[0]} was repeated in fp64: whether it differs from itself is not known",)
    return dataclasses.replace(result, verdict=verdict, first=wrong, exact=largest_exact, by=by, compared=len(exact), notes=notes)


def _place(point: Point) -> tuple[int, str, str, str]:
    return point.step, point.phase, point.module, point.operator


def _largest_at_each_place(points: Sequence[Point]) -> dict[tuple[int, str, str, str], float]:
    """The largest finite difference of the results of each operator of a module."""
    largest: dict[tuple[int, str, str, str], float] = {}
    for point in points:
        if math.isfinite(point.difference):
            largest[_place(point)] = max(point.difference, largest.get(_place(point), 0.0))
    return largest


def _other_shapes(first: Sequence[Entry], second: Sequence[Entry]) -> tuple[str, ...]:
    """A note about parameters and buffers that have the same name in two recordings, but not the same shape."""
    shapes = [
        {entry.module: entry.sketches[0].shape for entry in entries if (entry.step, entry.phase) == (0, "start") and entry.sketches}
        for entries in (first, second)
    ]
    names = [name for name, shape in shapes[0].items() if shapes[1].get(name, shape) != shape]
    listed = "; ".join(f"{name}, {shapes[0][name]} and {shapes[1][name]}" for name in names[:3]) + "; …" * (len(names) > 3)
    return (f"not compared, since their shapes differ: {listed}",) if names else ()


def _other_modes(first: Sequence[Entry], second: Sequence[Entry], step: int) -> tuple[str, ...]:
    """Notes about modules that are in training mode in one of two recordings only when a step begins."""
    modes = [json.loads(entry.operator) for entries in (first, second) for entry in entries if entry.key == (step, "modes")]
    return tuple(in_other_modes(*modes)) if len(modes) == 2 else ()


def _points(first: Sequence[Entry], second: Sequence[Entry]) -> tuple[list[Point], str]:
    """What both have, in the order of the first, and by what the two were aligned."""
    first, second = ([entry for entry in each if entry.kind in ("operator", "module", "value")] for each in (first, second))
    sizes = {phase: scale_of([_norm(entry) for entry in first if entry.phase == phase]) for phase in PHASES}

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
        worst = _difference(entry, other, 1e-6 * sizes[entry.phase])
        if worst is not None:
            places: dict[str, Any] = {"step": entry.step, "phase": entry.phase, "module": entry.module, "operator": entry.operator}
            points.append(Point(**places, difference=worst))
    points.sort(key=lambda point: (point.step, PHASES.index(point.phase)))
    return points, "operators" if aligned else "modules"


def _norm(entry: Entry) -> float:
    """The largest finite norm in it."""
    return max((sketch.norm for sketch in entry.sketches if math.isfinite(sketch.norm)), default=0.0)


def _difference(entry: Entry, other: Entry, floor: float) -> float | None:
    """The largest difference of two results, as a fraction of their norms or of `floor`; None = they cannot be compared."""
    differences = [
        distance if not (distance := mine.distance(its)) or math.isinf(distance) else distance / max(mine.norm, its.norm, floor)
        for mine, its in zip(entry.sketches, other.sketches, strict=False)
        if mine.shape == its.shape
    ]
    return max(differences, default=None)


def _placed_in_update(first: Sequence[Entry], second: Sequence[Entry], point: Point, limit: float) -> Point:
    """Where the updates of a parameter part, or where an operator's results first differ by more than `limit`.

    That may be in a step before the one whose update of the parameter differs: a moment of Adam differs before what it leads to.
    """
    for step in range(1, point.step + 1):
        mine, its = (_of_the_update("update", entries, point, step) for entries in (first, second))
        floor = 1e-6 * max(map(_norm, mine), default=0.0)
        for entry, other in zip(mine, its, strict=False):
            difference = _difference(entry, other, floor) or 0.0
            if entry.operator == other.operator and difference > limit:
                return dataclasses.replace(point, step=step, operator=entry.operator, difference=difference)
            if entry.operator != other.operator:
                break
        if parted := _where_they_part([entry.operator for entry in mine], [entry.operator for entry in its]):
            return dataclasses.replace(point, step=step, operator=parted)
    return point


def _options_that_differ(first: Sequence[Entry], second: Sequence[Entry], point: Point) -> tuple[str, ...]:
    """A note about the options of the optimizer with which the two update the parameter, where they differ."""
    both = [[json.loads(entry.operator) for entry in _of_the_update("options", entries, point, point.step)] for entries in (first, second)]
    if not all(both):
        return ()
    mine, its = (options[0] for options in both)
    differ = [f"{name}: {mine[name]} and {its[name]}" for name in mine if name in its and mine[name] != its[name]]
    parameter = point.module.removeprefix(CHANGE)
    return (f"options of the optimizer that differ for {parameter}: {', '.join(differ)}",) if differ else ()


def _of_the_update(kind: str, entries: Sequence[Entry], point: Point, step: int) -> list[Entry]:
    parameter = point.module.removeprefix(CHANGE)
    return [entry for entry in entries if (entry.kind, entry.step, entry.module) == (kind, step, parameter)]


def _operators_of(first: Sequence[Entry], second: Sequence[Entry], point: Point) -> list[list[Entry]]:
    """The operators of a module in two recordings; of a place between two modules, those after the first one's result."""
    keys = [
        entry.key
        for entry in first
        if (entry.kind, entry.step, entry.phase, entry.module) == ("module", point.step, point.phase, point.module)
    ]
    both = []
    for entries in (first, second):
        chosen = [entry for entry in entries if entry.module == point.module and (entry.step, entry.phase) == (point.step, point.phase)]
        if keys and keys[0][1] == "input":
            at = next(place for place, entry in enumerate(entries) if entry.key == keys[0])
            begin = max((place for place in range(at) if entries[place].kind == "module"), default=-1)
            chosen = [*entries[begin + 1 : at]]
        both.append([entry for entry in chosen if entry.kind == "operator"])
    return both


def _both_draw(mine: Sequence[Entry], its: Sequence[Entry]) -> bool:
    """Whether two lists of operators both draw random numbers, as far as can be seen: if only one does, they compute different things."""
    surely, perhaps = ([any(getattr(entry, how) for entry in each) for each in (mine, its)] for how in ("random", "perhaps_random"))
    return any(surely) and all(perhaps)


def _drawn_before(entries: Sequence[Entry], point: Point) -> bool:
    """Whether random numbers were drawn before a point, in a recording that has operators."""
    places = [at for at, entry in enumerate(entries) if (entry.step, entry.phase, entry.module) == (point.step, point.phase, point.module)]
    return any(entry.random for entry in entries[: max(places, default=-1) + 1] if entry.kind == "operator")


def _other_operator(mine: Sequence[Entry], its: Sequence[Entry]) -> str:
    """The operator whose results differ first, or at which two lists of them part; "" = they are the same."""
    for entry, other in zip(mine, its, strict=False):
        if entry.operator != other.operator:
            break
        if (_difference(entry, other, 0.0) or 0.0) > EXACT:
            return entry.operator
    return _where_they_part([entry.operator for entry in mine], [entry.operator for entry in its])


def _where_they_part(mine: Sequence[str], its: Sequence[str]) -> str:
    """The operator at which two lists of operators part first; "" = they are the same."""
    blocks = difflib.SequenceMatcher(None, mine, its, autojunk=False).get_opcodes()
    return next(((mine[a:b] or its[c:d])[0] for kind, a, b, c, d in blocks if kind != "equal"), "")
