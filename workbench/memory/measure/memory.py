"""Measures real steps: every storage is recorded from allocation to free, and checked against what the allocator itself counts."""

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import wraps
from itertools import repeat
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.core import interrupts, units
from workbench.core.checks import whole_number
from workbench.core.gc import collected_before
from workbench.core.interrupts import defer_interrupts
from workbench.core.progress import INTERRUPTED, Waiting
from workbench.core.units import several
from workbench.harness.discover import ReachableState, name_of
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, device_of, discover_training
from workbench.harness.restore import SavedState
from workbench.memory.analysis.breakdown import CUDA_GRANULARITY, MemoryBreakdown
from workbench.memory.analysis.log import Mark, MemoryLog
from workbench.memory.analysis.replay import Replay
from workbench.memory.measure.allocator_counters import Allocations, allocations
from workbench.memory.measure.recorder import Recorder
from workbench.timeline.hooks import Patch

RESTING = ("data", "between", "optimizer", "end")
"""Phases after which a module's forward begins a new one."""


class Stepping:
    """Marks a recorder's phases while a step runs.

    Forward begins with the first call of a module, and goes on until backward begins, loss included; a step that calls no module before its
    backward is all forward. The optimizer's phase is the Recorder's own affair.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._phase = ""
        self._depth = 0
        self._running = False
        self._began = 0, 0  # number of records and of the last mark when the batch was there
        self._thread = get_ident()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, calls of modules and backwards are recorded."""
        handle = register_module_forward_pre_hook(self._called)
        patch = Patch(torch.autograd, "backward", self._wrap)
        try:
            yield
        finally:
            patch.remove()
            handle.remove()

    def step(self, number: int, fetch: Callable[[], Any], begin: Callable[[], None], step: Callable[[Any], Any]) -> None:
        """Fetch a batch and take one step with it."""
        recorder = self._recorder
        recorder.step = number
        self._mark("data")
        with interrupts.allow_interrupts():  # a loader may hang
            batch = fetch()  # without the recorder, which a worker that is forked here would inherit
        take_in(recorder, batch)
        self._began = len(recorder.log.records), len(recorder.log.marks) - 1
        begin()
        try:
            with recorder:
                self._running = True  # now: entering may try out a backward of its own
                step(batch)
        finally:
            self._running = False
        self._was_forward()
        self._mark("end")

    def _mark(self, phase: str) -> None:
        self._phase = phase
        self._recorder.mark(phase)

    def _called(self, _module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # it would become a part of the graph
        if self._running and self._phase in RESTING and not self._depth and get_ident() == self._thread:
            self._mark("forward")

    def _was_forward(self) -> None:
        """If no module was called, count all since the batch arrived as forward."""
        if self._phase != "data":
            return
        first, marked = self._began
        log = self._recorder.log
        log.marks[marked] = Mark("forward", *log.marks[marked][1:])
        for record in log.records[first:]:
            if record.phase == "data":
                record.phase = "forward"

    def _wrap(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self._running or self._depth or get_ident() != self._thread:  # reentrant checkpointing calls it from within
                return backward(*args, **kwargs)
            self._depth += 1
            self._was_forward()
            self._mark("backward")
            try:
                return backward(*args, **kwargs)
            finally:
                self._depth -= 1
                self._mark("between")
                self._recorder.micro += 1

        return marked


def take_in(recorder: Recorder, batch: Any) -> None:
    """Recognise the tensors of a batch."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            recorder.track(leaf, "input")


STEPS = 3
"""Steps that are measured by default: the optimizer makes its states in the first; the second and the third should agree."""
APART = 0.01
"""Fraction of the peak by which the record may exceed the allocator's count before a note says so."""


class Borders:
    """The positions at which a log and the allocator's record were aligned: from each on, both count from the same bytes."""

    def __init__(self, log: MemoryLog, truth: Allocations) -> None:
        self._log, self._truth = log, truth
        self._at: list[tuple[int, int]] = []  # position of the next event, step

    def begin(self, step: int) -> None:
        """Called in a step when its batch has arrived."""
        self._at.append((len(self._log.events), step))
        self._truth.begin()

    def excess(self, replay: Replay, *, drifts: bool) -> dict[int, int]:
        """Step → bytes by which the allocator's peak exceeds the record's; of the steps in which it is known."""
        at = [(position, step) for position, step in self._at if position < len(replay.total)]  # a step may have been interrupted
        ends = [position for position, _ in at[1:]] + [len(replay.total)]
        truth: dict[int, int] = {}
        record: dict[int, int] = {}
        first = int(replay.total[at[0][0] - 1]) if at else 0
        kept: Iterable[int | None] = self._truth.kept or repeat(None)
        for (position, step), end, peak, more in zip(at, ends, self._truth.peaks, kept, strict=False):
            before = int(replay.total[position - 1])
            truth[step] = max(truth.get(step, 0), peak + (before if more is None else first + more))
            record[step] = max(record.get(step, 0), before, int(replay.total[position:end].max(initial=0)))
        return {step: truth[step] - record[step] for step in truth if not (drifts and step == min(truth) and len(truth) > 1)}


def breakdown(
    recorder: Recorder,
    borders: Borders,
    truth: Allocations,
    *,
    title: str,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    drifts: bool = False,
    notes: Sequence[str] = (),
    cyclic: Collection[int] = (),
) -> MemoryBreakdown:
    """The record of the tensors and the allocator's counts, combined.

    Args:
        truth: the allocator's own counts of bytes.
        drifts: other threads give memory back, which a CPU's profiler does not see: it counts too much, and least in the step that is
            nearest to the truth.
        cyclic: records of storages that only Python's collector frees.
    """
    log, texts = recorder.log, list(notes)
    replay = Replay(log, CUDA_GRANULARITY if device.type == "cuda" else 1)
    excess = borders.excess(replay, drifts=drifts)
    if not excess:
        scratch = 0
    elif drifts:
        scratch = min(excess.values())
    else:
        scratch = excess.get(replay.phase_of(replay.peak).step, max(excess.values()))
    if truth.trouble:
        texts.append(truth.trouble)
    if scratch < -APART * int(replay.total[replay.peak]):
        texts.append(
            f"{units.bytes_(-scratch)} of it were not taken from torch's allocator (shared with workers or with numpy, mapped files)"
        )
    if drifts and world_size > 1 and scratch > APART * int(replay.total[replay.peak]):
        texts.append(
            f"{units.bytes_(scratch)} of it belong to no tensor: memory inside kernels, or what threads of the communication gave back "
            "without torch's profiler seeing it; more steps (steps=…) tell them apart, as the least is taken"
        )
    cycles = sum(log.records[index].size for index in cyclic if log.records[index].allocated_at <= replay.peak)
    if cycles > APART * int(replay.total[replay.peak]):
        texts.append(
            f"{units.bytes_(cycles)} of it lie in reference cycles: freed by gc only, which is off while this is measured, so that a run "
            "may hold more or less"
        )
    return MemoryBreakdown.from_log(
        log,
        kind="measured",
        title=title,
        device=device.type,
        scratch=max(0, scratch),
        reserved=truth.reserved,
        outside=truth.outside,
        retries=truth.retries,
        rank=rank,
        world_size=world_size,
        notes=tuple(texts),
    )


def measure(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    steps: int = STEPS,
    line: Waiting | None = None,
) -> MemoryBreakdown:
    """Take some real steps in this process, and return their breakdown. Everything is left as it was.

    Raises:
        DiagnoseError: step cannot be called so, or the loader ended too early.
        ValueError: the loader is empty, or is none; not a number of steps.
        KeyboardInterrupt: Ctrl-C came before the first step was over.
    """
    with recorded(step, loader, model=model, optimizer=optimizer, steps=steps, line=line) as (recorder, borders, truth, found, notes):
        cyclic = freed_by_collector(recorder)
    parallel, device = dist.is_available() and dist.is_initialized(), device_of(found.models)
    return breakdown(
        recorder,
        borders,
        truth,
        title=f"{name_of(step)}, {several(recorder.step + 1, 'step')}",
        device=device,
        rank=dist.get_rank() if parallel else 0,
        world_size=dist.get_world_size() if parallel else 1,
        drifts=parallel and device.type == "cpu",  # the counters of a GPU's allocator are exact
        notes=notes,
        cyclic=cyclic,
    )


@contextlib.contextmanager
def recorded(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    model: Any,
    optimizer: Any,
    steps: int,
    line: Waiting | None = None,
    least: int = 1,
) -> Iterator[tuple[Recorder, Borders, Allocations, ReachableState, list[str]]]:
    """Take the steps; yields the record while everything is as the steps left it, and restores the state on leaving.

    When the budget is spent, or at Ctrl-C, the record has the steps that are done, if they are enough to tell something. With several
    ranks, who must take equally many steps, all are taken, and Ctrl-C is raised.

    Raises:
        DiagnoseError: step cannot be called so.
        ValueError: the loader is empty, is none or ended; not a number of steps; the budget was spent before `least` steps.
        KeyboardInterrupt: Ctrl-C came before as many.
    """
    check_arguments(step, 1.0)
    check_steps(steps)
    notes: list[str] = []
    several_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    found = discover_training(step, model, optimizer, loader, notes)
    device = device_of(found.models)
    with defer_interrupts(), contextlib.ExitStack() as undo:
        undo.callback(SavedState(found).restore)
        feed = undo.enter_context(Feed(loader))
        for weight in {weight for model in found.models for weight in model.parameters()}:
            weight.grad = None  # what is kept of it for later must not count as held by the step
        undo.enter_context(collected_before())
        recorder = Recorder(device=device.type)
        _take_stock(recorder, found)
        with allocations(device) as truth:
            borders = Borders(recorder.log, truth)
            stepping = Stepping(recorder)
            with recorder.hooks(), stepping.hooks():
                for number in range(steps):
                    if line and number and line.left <= 0 and not several_ranks:
                        notes.append(_out_of_time(number, steps, least, line))
                        break
                    whole = len(recorder.log.events)
                    try:
                        if line:
                            line.say(f"step {number + 1} of {steps}", f"{several(number, 'step')} recorded" if number else None)
                        stepping.step(number, feed.next, lambda: borders.begin(recorder.step), step)
                    except Exhausted:
                        if not number:
                            raise ValueError(
                                "the loader could be read only once, and it has ended: give one that still has batches"
                            ) from None
                        notes.append(f"the loader ended after {number} of {steps} steps")
                        recorder.step = number - 1
                        break
                    except KeyboardInterrupt:
                        if line is None or number < least or several_ranks:
                            raise
                        notes.append(f"{INTERRUPTED} after {number} of {steps} steps{UNSEEN * (number == 1)}")
                        recorder.step = number - 1
                        recorder.forget(whole)
                        break
        yield recorder, borders, truth, found, notes


def _out_of_time(done: int, steps: int, least: int, line: Waiting) -> str:
    """The note of a record that the budget ended."""
    wanted = math.ceil(1.2 * line.seconds / done * max(steps, least))
    if done < least:
        raise ValueError(f"the budget ended after {done} of {steps} steps, and {least} are needed to tell anything: give budget_s={wanted}")
    return f"the budget ended after {done} of {steps} steps{UNSEEN * (done == 1)}: budget_s={wanted} is enough for all"


UNSEEN = ", in which the optimizer makes its states: a later step may hold more"
"""What is not known after a single step."""


def freed_by_collector(recorder: Recorder) -> set[int]:
    """Let Python's collector run after the steps: the records of what it frees, which the log does not show.

    That is held by reference cycles, not by a variable.
    """
    log = recorder.log
    over = len(log.events)
    gc.collect()
    freed = {event.index for event in log.events[over:]}
    del log.events[over:]
    for index in freed:
        log.records[index].freed_at = None
    return freed


def _take_stock(recorder: Recorder, found: ReachableState) -> None:
    """Record the tensors that exist already, as far as the step references them."""
    for model in found.models:
        recorder.attach(model, hooks=getattr(model, "_comm_hooks", ()))
    for optimizer in found.optimizers:
        for state in optimizer.state.values():
            for value in tree_leaves(state):
                if isinstance(value, Tensor):
                    recorder.track(value, "optimizer_state")
    for tensor in found.tensors:
        recorder.track(tensor)


def check_steps(steps: object) -> None:
    """Check a number of steps.

    Raises:
        ValueError: not a whole number of at least 1.
    """
    whole_number("steps", steps, least=1, also="; with 2 or more the optimizer's states are seen")
