"""Observes a user's training step before experiments: what it trains, on which device, in which precision, whether it uses its batch.

`check_arguments` and `discover_training` come before any call. `run_first_steps` warms the step up and observes it from outside: the modes
of autocast, optimizers that were not known, collectives, writes into the batch. What cannot be restored afterwards is noted.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.core.checks import objects, real_number, whole_number
from workbench.core.interrupts import defer_interrupts, deliver_interrupt
from workbench.harness import ablations, device_clock
from workbench.harness.batches import micro_batches_in, padding_of, tensor_versions, tensors_of
from workbench.harness.blocks import BlockTimer, DiagnoseError
from workbench.harness.discover import ReachableState, describe, discover, name_of
from workbench.harness.feed import Feed
from workbench.harness.module_use import DenseTables, recorded_calls, recorded_tables
from workbench.harness.restore import SavedState
from workbench.harness.results import NOT_FINITE, UNTRAINED
from workbench.timeline.loops import samples_in


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled models run eagerly: they would be compiled again, or hide what they do."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext():
        yield


METADATA = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset", "element_size", "data_ptr"}
METADATA |= {"untyped_storage", "is_floating_point", "is_complex", "is_contiguous", "is_pinned", "get_device", "__hash__", "__repr__"}
"""Functions of a tensor that do not read its values."""


def uses_batch(step: Callable[[Any], object], batch: Any) -> bool | None:
    """Does `step(batch)` use what is in the batch? It is called once, for that. None = the batch has no tensor to follow."""
    tensors = tensors_of(batch)
    spy = _Reader({id(tensor) for tensor in tensors})
    with uncompiled(), spy:
        step(batch)
    return spy.seen if tensors else None


class _Reader(TorchFunctionMode):
    """Notices whether a function of torch is called with one of some tensors."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self._watched = watched
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.seen and getattr(func, "__name__", "") not in METADATA:
            self.seen = any(id(leaf) in self._watched for leaf in tree_leaves((args, kwargs)))
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_new_optimizer(known: Sequence[Optimizer], meet: Callable[[Optimizer], None]) -> Iterator[None]:
    """Inside, `meet` is called with each optimizer that is about to step and is neither known nor part of a known one."""
    met = {id(optimizer) for optimizer in known} | {id(part) for optimizer in known for part in vars(optimizer).values()}
    alive = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in met:
            met.add(id(optimizer))
            alive.append(optimizer)
            meet(optimizer)

    with uncompiled():
        handle = register_optimizer_step_pre_hook(before)
        try:
            yield
        finally:
            handle.remove()


@dataclass(slots=True)
class Replays:
    """What a step replays, so that no change to its Python has an effect."""

    graphs: int = 0
    """CUDA graphs that the program captured and launches again."""
    optimizer: bool = False
    """Does an optimizer step beside them?"""


@contextlib.contextmanager
def recorded_replays() -> Iterator[Replays]:
    """Inside, launches of CUDA graphs are counted. While compiled models run eagerly, these are the program's own.

    torch.compile's are no obstacle: it captures anew what has changed.
    """
    seen, replay = Replays(), torch.cuda.CUDAGraph.replay

    def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
        seen.graphs += 1
        return replay(graph, *args, **kwargs)

    def stepped(*_: Any) -> None:
        seen.optimizer = True

    handle = register_optimizer_step_pre_hook(stepped)
    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
        handle.remove()


COLLECTIVES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier")},
}
"""As torch.distributed calls them, by how its operators begin; the first that fits."""


@contextlib.contextmanager
def recorded_collectives() -> Iterator[set[str]]:
    """Inside, the names of the collectives that are called are collected: DDP's, FSDP's, an optimizer's and the step's own."""
    listener = _Listener()
    with defer_interrupts(), uncompiled(), listener:
        handle = register_module_forward_pre_hook(lambda *_: deliver_interrupt())  # between modules an interrupt may come
        try:
            yield listener.heard
        finally:
            handle.remove()


class _Listener(TorchDispatchMode):
    """Records operators of process groups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if "c10d" in space:
            plain = name.replace("_", "")
            self.heard |= set([word for start, word in COLLECTIVES.items() if plain.startswith(start)][:1])
        return func(*args, **(kwargs or {}))


def check_arguments(step: Any, budget_s: float, accumulation: int = 1) -> None:
    """Raise for arguments that cannot work, before anything is started.

    Raises:
        DiagnoseError: no function of one argument; no time; no whole number of batches.
    """
    if not callable(step):
        raise DiagnoseError(f"step is a {type(step).__name__}: it has to be a function, step(batch), that does one optimizer step")
    try:
        signature = inspect.signature(step)
    except ValueError:  # functions written in C have none
        signature = None
    if signature is not None:
        try:
            signature.bind(None)
        except TypeError as error:
            raise DiagnoseError(
                f"step cannot be called with one argument, the batch: {name_of(step)}{signature}, {error}. "
                "Try lambda batch: …, or functools.partial for the other arguments"
            ) from None
    real_number("budget_s", budget_s, above=0, what="seconds", also="; try budget_s=60", error=DiagnoseError, finite=False)
    whole_number("accumulation", accumulation, least=1, error=DiagnoseError)


def discover_training(step: Any, model: Any, optimizer: Any, loader: Any, notes: list[str]) -> ReachableState:
    """The models and optimizers that are given, and everything else that the step reaches; what was found without being given is noted.

    Raises:
        DiagnoseError: no module, no optimizer; or a model whose weights have no values.
    """
    models = objects("model=", model, nn.Module, what="a torch.nn.Module", error=DiagnoseError)
    optimizers = objects("optimizer=", optimizer, Optimizer, what="a torch.optim.Optimizer", error=DiagnoseError)
    state = discover(step, *models, *optimizers, but=[loader])
    if models:
        state.models[:] = models
    elif state.models:
        notes.append(f"found behind step: the model {', '.join(map(describe, state.models))}")
    else:
        notes.append("no model was found behind step: it could not be put back to what it was before. Try model=…")
    meta = [model for model in state.models if any(weight.is_meta for weight in model.parameters())]
    if meta and (models or len(meta) == len(state.models)):
        raise DiagnoseError(
            f"the weights of {describe(meta[0])} are on the device meta: they have shapes but no values, so no step can be measured. "
            'Build the model on a real device, such as torch.device("cpu"). wb.estimate_memory(model, batch=…) needs shapes alone'
        )
    if optimizers:
        state.optimizers[:] = [*optimizers, *(found for found in state.optimizers if found not in optimizers)]
    elif state.optimizers:
        notes.append(f"found behind step: the optimizer {', '.join(map(describe, state.optimizers))}")
    return state


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """Where the models are; without one, the current CUDA device if that is in use."""
    weight = next((weight for model in models for weight in model.parameters()), None)
    if weight is not None:
        return weight.device
    return device_clock.current_device()


def timed_device_of(models: Sequence[nn.Module]) -> torch.device:
    """Where the models are, if steps can be timed there.

    Raises:
        DiagnoseError: the host runs ahead of that device, and its clock is not read here (MPS, XPU and others).
    """
    device = device_of(models)
    if device.type not in ("cpu", "cuda", "meta"):
        raise DiagnoseError(
            f"the model is on {device}: experiments time steps with CUDA events or the host's clock. The host runs ahead of "
            f"{device.type.upper()}, so its times say nothing. Try the model and its batches on a CPU; wb.watch works on any device"
        )
    return device


def has_convolutions(models: Sequence[nn.Module]) -> bool:
    """Is there a 2d convolution in them?"""
    return any(isinstance(part, nn.Conv2d) for model in models for part in model.modules())


def weights_of(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Their parameters, each once."""
    return list({id(weight): weight for model in models for weight in model.parameters()}.values())


def samples_of(batch: Any, feed: Feed) -> int | None:
    """Samples in one step's batches, which a feed gave; None if not known."""
    sizes = [samples_in(part, feed.batch_size) for part in (batch if feed.accumulation > 1 else [batch])]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def dtype_of(models: Sequence[nn.Module]) -> str:
    """The precision of the weights."""
    dtypes = {weight.dtype for weight in weights_of(models)}
    return "fp32" if not dtypes or torch.float32 in dtypes else ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


@contextlib.contextmanager
def counted_backwards() -> Iterator[list[None]]:
    """Inside, a list gets an entry for each call of backward()."""
    calls: list[None] = []
    backward = torch.autograd.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        backward(*args, **kwargs)

    torch.autograd.backward = counted
    try:
        yield calls
    finally:
        torch.autograd.backward = backward


MAX_FIRST_STEPS = 20
"""The most first steps, even if they still get shorter."""
WARM_RATIO = 0.8
"""A step is warm if it takes at least this fraction of the one before it. Chosen: blocks vary by up to 8 % on quiet machines. With less,
the first steps end while caches still fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What the first steps showed."""

    samples: int | None
    """That one step takes on this rank."""
    padding: float | None
    """Fraction of the first batch."""
    precision: str
    """In which modules were called."""
    written: bool
    """Does the step write into its batch?"""
    reduces: bool
    """Does the variant without reductions take any communication away?"""
    replays: Replays
    """CUDA graphs that one step launches."""
    tables: DenseTables
    """What the optimizer's first step showed of embedding tables."""
    most_called: tuple[tuple[int, str, str], int] | None
    """(Number of a model, name of a module in it, its class), and how often the first step called it: the one called most often."""
    micro_batches: int
    """Batches that one step takes: `accumulation`, or those in a list that the loader gives as one."""


def run_first_steps(bench: BlockTimer, feed: Feed, saved: SavedState, state: ReachableState, until: float, notes: list[str]) -> StepFacts:
    """Step until steps do not get shorter any more, or until `until` on the bench's clock; `notes` gets what a user should know.

    Raises:
        Exhausted: the loader ended.
    """
    batch = feed.next()
    samples, padding = samples_of(batch, feed), padding_of(batch if feed.accumulation == 1 else batch[0])
    before, late = tensor_versions(batch), list[Optimizer]()
    weights = weights_of(state.models)
    at_first = tensor_versions(weights), _sums(state.models)
    each = [_sums([model]) for model in state.models] if len(state.models) > 1 else []

    def meet(optimizer: Optimizer) -> None:
        late.append(optimizer)
        saved.add(discover(optimizer))

    with recorded_calls(state.models, bench.device) as calls:
        with (
            on_new_optimizer(state.optimizers, meet),
            counted_backwards() as backwards,
            recorded_replays() as replays,
            recorded_tables(state.models) as tables,
        ):
            bench.warm([batch], _watching_use(bench.step, notes))
        most_called = max(calls.counts.items(), key=lambda item: item[1], default=None)
        written = tensor_versions(batch) != before
        times = [_seconds(bench, feed.next() if written else batch)]
        while len(times) < 3 or (times[-1] < WARM_RATIO * times[-2] and len(times) < MAX_FIRST_STEPS):
            if bench.tick() > until:
                break
            times.append(_seconds(bench, feed.next()))
    sums = _sums(state.models)
    changed = not weights or replays.graphs > 0 or (tensor_versions(weights), sums) != at_first
    backward = any(weight.grad is not None for weight in weights)
    untrained = "" if changed else untrained_note(backward=backward, optimizer=bool(state.optimizers or late))
    _note_what_stays(feed, saved, state, late, notes, untrained)
    _note_numbers(sums, notes)
    _note_unused_gradients(state.models, each, notes)
    return StepFacts(
        samples=samples,
        padding=padding,
        precision=calls.precisions[-1] if calls.precisions else dtype_of(state.models),
        most_called=most_called,
        written=written,
        replays=replays,
        tables=tables,
        micro_batches=feed.accumulation if feed.accumulation > 1 else micro_batches_in(batch, len(backwards)),
        reduces=bench.peers.world_size > 1 and _reduces(bench, feed, state, notes),
    )


def _seconds(bench: BlockTimer, batch: Any) -> float:
    block = bench.run("warm-up", [batch], 1)
    return max(laps.calls[0] + laps.tail for laps in block.laps)


def _watching_use(step: Callable[[Any], Any], notes: list[str]) -> Callable[[Any], None]:
    """The step, watched for whether it uses its batch."""

    def watched(batch: Any) -> None:
        if uses_batch(step, batch) is False:
            notes.append("step() does not use its batch: what the loader gives makes no difference to it")

    return watched


def _note_what_stays(feed: Feed, saved: SavedState, state: ReachableState, late: list[Optimizer], notes: list[str], untrained: str) -> None:
    """Note what cannot be restored, or that nothing is trained."""
    if untrained:
        notes.append(untrained)
    elif late:
        notes.append(
            f"{', '.join(map(describe, late))} was found only as it stepped: it was put back, but gradients may differ, and what it takes "
            "is in the rest of the step. Try optimizer=…"
        )
    elif state.models and not state.optimizers:
        notes.append(
            "no optimizer was found behind step: what it takes is in the rest of the step, and if it remembers anything, that was not put "
            "back. Try optimizer=…"
        )
    if saved.left_out:
        notes.append(f"step() reaches what could not be put back to what it was before: {', '.join(saved.left_out)}")
    if feed.unread and feed.kind != "once":
        notes.append(f"the loader holds what could not be put back to what it was before: {', '.join(feed.unread)}")


def _note_unused_gradients(models: Sequence[nn.Module], before: Sequence[Mapping[str, float]], notes: list[str]) -> None:
    """Note that a whole model gets gradients but stays as it is while another one is trained, as a teacher that is not called in
    `torch.no_grad()`.

    Args:
        models: of the step.
        before: `_sums` of each before the first step; none = there is one model.
        notes: get the note.
    """
    stay = [_sums([model]) == sums for model, sums in zip(models, before, strict=False)]
    for number, model in enumerate(models):
        if before and stay[number] and not all(stay) and any(weight.grad is not None for weight in model.parameters()):
            notes.append(
                f"a backward computes gradients of {type(model).__name__} (model {number + 1} of {len(models)}), whose weights stay as "
                "they are: requires_grad_(False) saves that, and, if no gradient has to pass through it to another one (a teacher), "
                "calling it in torch.no_grad() saves its whole backward"
            )


def untrained_note(*, backward: bool, optimizer: bool) -> str:
    """A note on first steps that changed no weight; "" where they may accumulate gradients, or skip an update."""
    if backward and optimizer:
        return ""
    unseen = "no optimizer step was seen" if backward else "neither a backward nor an optimizer step was seen"
    return (
        f"{UNTRAINED} in the first calls, and {unseen}: is it the whole step of a training, forward, backward and optimizer.step()? "
        "If it is, give model=… and optimizer=…"
    )


def _sums(models: Sequence[nn.Module]) -> dict[str, float]:
    """Name → sum of a weight's values; nothing for weights of which there is none."""
    named = {name: getattr(weight, "_local_tensor", weight).detach() for model in models for name, weight in model.named_parameters()}
    named = {name: weight for name, weight in named.items() if weight.is_floating_point() and weight.device.type != "meta"}
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a kind of tensor that cannot be added up
        return {name: float(weight.sum(dtype=torch.float32)) for name, weight in named.items()}  # needs no memory, unlike a mask
    return {}


def _note_numbers(sums: Mapping[str, float], notes: list[str]) -> None:
    """Note weights that are NaN or infinite: such a training has failed, however fast it is."""
    if bad := [name for name, value in sums.items() if not math.isfinite(value)]:
        notes.append(
            f"after the first steps {len(bad)} of {len(sums)} weights are {NOT_FINITE}, such as {bad[0]}: look at the data, or try "
            "a smaller learning rate, a warm-up, clipped gradients, or for fp16 a GradScaler or bf16"
        )


def _reduces(bench: BlockTimer, feed: Feed, state: ReachableState, notes: list[str]) -> bool:
    """Does the variant without reductions remove any communication? If some remains, a note says that not all of its cost was measured."""
    heard = []
    for arm in (contextlib.nullcontext(), ablations.without_reduction(state.models)):
        batch = feed.next()
        with arm, recorded_collectives() as called:
            bench.warm([batch])
        heard.append(set[str]().union(*bench.peers.gather(called)))
    usual, left = heard
    if left:
        notes.append(
            "communication's true cost was not measured: no_sync is DDP's, and all that could be taken away besides is the step's own "
            f"all_reduce; this step also calls {' and '.join(sorted(left))}, so ranks waited for each other in all variants"
        )
    return usual != left
