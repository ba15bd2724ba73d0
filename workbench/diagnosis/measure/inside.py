"""Looks inside a step: operators, collectives and synchronisations from a short trace, lines of Python from samples of the stack.

`Events` are the trace as columns; `read_events` computes from them what `Inside` says of a step.
"""

import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core.system_load import GcTimer, LoadMeter
from workbench.diagnosis.analysis.evidence import SMALL_OP, Inside
from workbench.harness.stack_sampler import StackSampler
from workbench.traces.analysis.columns import Label
from workbench.traces.analysis.event_kinds import DEVICE, kind_of
from workbench.traces.analysis.intervals import NONE, Spans, inside, intersection, length, subtract, union
from workbench.traces.measure.profiler import plain_profiler, why_no_profiler

OPERATORS = r"(?!autograd::engine::)(.*::|.*Backward\d+$|Torch-Compiled Region|CompiledFunctionBackward)"
"""The operators among what torch records as such: not the Python of an `autograd.Function`, which has no `::` and no number."""
ENGINE = "autograd::engine::"
"""Around each node of the backward graph, and around hooks, which may be Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events by label, thread and time."""

    labels: tuple[Label, ...]
    """Labels that occur."""
    codes: NDArray[np.int64]
    """Of each event: which of them."""
    threads: NDArray[np.int64]
    correlations: NDArray[np.int64]
    """The same number for a call and for the device's work that it launches; 0 = none."""
    spans: Spans
    training: int
    """The thread that takes the steps."""
    begin: int
    """Nanoseconds: where the steps that count begin."""
    end: int

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, int, int, int, int]], *, window: str) -> Self:
        """From rows (name, category, start, end, thread, correlation), cut to the annotation called `window`.

        Raises:
            ValueError: there is no such annotation.
        """
        names, categories, starts, ends, threads, correlations = zip(*rows, strict=True) if (rows := list(rows)) else ((),) * 6
        known: dict[tuple[str, str], int] = {}
        codes = np.array([known.setdefault(pair, len(known)) for pair in zip(names, categories, strict=True)], dtype=np.int64)
        if (code := known.get((window, "user_annotation"))) is None:
            raise ValueError(f"the trace has no annotation {window!r}")
        at = int(np.flatnonzero(codes == code)[0])
        begin, end = starts[at], ends[at]
        spans = np.array([starts, ends], dtype=np.int64).T
        kept = (spans[:, 0] < end) & (spans[:, 1] > begin) & (codes != code)
        return cls(
            labels=tuple(Label(name, category, False) for name, category in known),
            codes=codes[kept],
            threads=np.array(threads, dtype=np.int64)[kept],
            correlations=np.array(correlations, dtype=np.int64)[kept],
            spans=spans[kept].clip(begin, end),
            training=threads[at],
            begin=begin,
            end=end,
        )

    @classmethod
    def recorded(cls, events: Sequence[Any], *, window: str) -> Self:
        """From the events of Kineto's results."""
        category = (lambda event: event.activity_type()) if events and hasattr(events[0], "activity_type") else _category
        rows = (
            (e.name(), category(e), (start := e.start_ns()), start + e.duration_ns(), e.start_thread_id(), e.correlation_id())
            for e in events
        )
        return cls.of(rows, window=window)

    def where(self, *kinds: str, name: str = "") -> NDArray[np.bool_]:
        """Which events are of one of some kinds (none = of any) and have a name that a regular expression matches."""
        answers = [(not kinds or kind_of(label) in kinds) and re.match(name, label.name) is not None for label in self.labels]
        return np.array(answers, dtype=np.bool_)[self.codes]


def _category(event: Any) -> str:
    """The category of an event, for versions of torch that do not have it."""
    name = event.name()
    if event.is_user_annotation():
        return "user_annotation"
    if event.device_type() != type(event.device_type()).CPU:
        return "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    return "cuda_runtime" if re.match("cu(da)?[A-Z]|hip[A-Z]", name) else "cpu_op"


LAUNCH = r"(cuda|hip|cu)(LaunchKernel|GraphLaunch|MemcpyAsync|MemsetAsync)"
"""Calls that give a device work."""
TO_HOST = r"(?i).*(dtoh|device ?-> ?(host|pageable|pinned)|devicetohost)"
"""Names of copies from the device to the host."""
GRAPH_LAUNCH = r"(cuda|hip|cu)GraphLaunch"
OWN_WAIT = "workbench: wait for the device"
"""The mark in the trace around the wait at the end of the steps, which is not the loop's own."""
MAX_CLOCK_ERROR = 100_000
"""Nanoseconds by which the clocks of host and device differ at most in a trace that is read so; see `clock_error`. Chosen: 20 times what
Kineto's conversion leaves. What ends later after a wait was not what was waited for. With half or twice as much, nothing changes where
clocks are right."""


def read_events(events: Events, steps: int, *, ranks: bool = False, short: float = SMALL_OP) -> Inside:
    """Compute from the events of some traced steps what their time is made of.

    On a CPU an operator is what torch records as one, in whatever thread, backward nodes included; a Python function or hook in backward
    is not one. On a GPU it is a kernel or a copy.

    Args:
        events: events of the traced steps, as columns.
        steps: number of steps that were traced.
        ranks: do other ranks take part?
        short: seconds of an operator, on a CPU, that is mostly the cost of its call.
    """
    if events.where(*DEVICE).any():
        return _read_device(events, steps, ranks)
    return _read_cpu(events, steps, ranks, short)


def _read_device(events: Events, steps: int, ranks: bool) -> Inside:
    """The host causes idle time of the device. Short kernels are no sign of a slow host, since the queue may be full of them.

    Idle time that begins while the host waits for the device is due to that wait, which emptied the queue.
    """
    collective = events.where("communication")
    work = events.spans[events.where(*DEVICE) & ~collective]
    busy = union(work)
    both = union(busy, events.spans[collective])
    idle = subtract(np.array([[events.begin, events.end]], dtype=np.int64), both)
    optimizer = union(events.spans[events.where("optimizer", name=r"Optimizer\.step")])
    waits = events.where("wait")
    host_waits = (
        waits & ~inside(events.spans[:, 0], union(events.spans[events.where(name=f"{OWN_WAIT}$")])) & ~_waits_for_copies(events, waits)
    )
    after = union(_extended(events.spans[host_waits], clock_error(events) + 1))
    calling = union(events.spans[events.where("operator", "backward", "optimizer", "runtime", "collective_call")])
    calling = intersection(idle, subtract(calling, union(events.spans[waits])))
    nano = 1e-9 / steps
    return Inside(
        step=(events.end - events.begin) * nano,
        ops=length(busy) * nano,
        op_count=len(work) / steps,
        optimizer=length(optimizer) * nano if len(optimizer) else None,
        collectives=(length(both) - length(busy)) * nano if ranks else None,
        syncs=int(host_waits.sum()) / steps,
        sync_idle=length(idle[inside(idle[:, 0], after)]) * nano,
        launching=length(calling) * nano,
        waits=length(union(events.spans[waits & (events.threads == events.training)])) * nano,
        graphs=int(events.where("runtime", name=GRAPH_LAUNCH).sum()) / steps,
    )


def clock_error(events: Events) -> int:
    """Nanoseconds by which the device's clock is ahead of the host's in this trace, at least; 0 = nothing shows that it is.

    Measured on the trace itself: a wait ends after what it waits for. Where that ends later, by the device's clock, than the wait, the
    clocks differ by as much. It is known of what a thread launched before it waited for the whole device, and of a copy to the host that
    was launched just before the wait, as by `.item()`. Idle time that begins so long after a wait is the wait's.
    """
    calls = np.flatnonzero(events.where("runtime", "wait"))
    calls = calls[np.lexsort((events.spans[calls, 0], events.threads[calls]))]
    work = np.flatnonzero(events.where(*DEVICE) & (events.correlations > 0))
    ends = dict(zip(events.correlations[work].tolist(), events.spans[work, 1].tolist(), strict=True))
    copied = set(events.correlations[events.where("copy", name=TO_HOST)].tolist()) - {0}
    waits, whole = events.where("wait"), events.where("wait", name=".*(Device|Ctx)Synchronize")
    error, last, before, thread = 0, 0, 0, -1
    for call in calls.tolist():
        if events.threads[call] != thread:
            thread, last, before = int(events.threads[call]), 0, 0
        known = last if whole[call] else ends[before] if waits[call] and before in copied else 0
        late = known - int(events.spans[call, 1])
        error = max(error, late if late <= MAX_CLOCK_ERROR else 0)
        before = int(events.correlations[call])
        last = max(last, ends.get(before, 0))
    return error


def _extended(spans: Spans, by: int) -> Spans:
    """The spans with later ends."""
    longer: Spans = spans + np.array([0, by], dtype=np.int64)
    return longer


def _waits_for_copies(events: Events, waits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which waits end a copy to the device: PyTorch waits for every copy from pageable memory. They are the transfer's."""
    calls = np.flatnonzero(events.where("runtime", "wait") & (waits | (events.correlations > 0)))
    calls = calls[np.lexsort((events.spans[calls, 0], events.threads[calls]))]
    to_device = set(events.correlations[events.where("h2d")].tolist())
    answer = np.zeros(len(events), dtype=np.bool_)
    for before, call in itertools.pairwise(calls.tolist()):
        copied = events.correlations[before] > 0 and int(events.correlations[before]) in to_device
        answer[call] = waits[call] and copied and events.threads[before] == events.threads[call]
    return answer


def _read_cpu(events: Events, steps: int, ranks: bool, short: float) -> Inside:
    optimizer = union(events.spans[events.where("optimizer", name=r"Optimizer\.step")])
    collective = events.where("host_communication", "collective_call")  # gloo's run in threads of their own
    operators = events.where("operator", name=OPERATORS)
    nodes = events.where(name=ENGINE)
    tops, around = [NONE], []
    for thread in np.unique(events.threads[operators]):
        here = events.threads == thread
        tops.append(outermost(events.spans[operators & here]))
        around.append(_around(tops[-1], outermost(events.spans[nodes & here]), short))
    ops = np.concatenate(tops)
    busy = union(ops, *around)
    items = events.spans[events.where(name="aten::_local_scalar_dense$"), 0]
    lengths = (ops[:, 1] - ops[:, 0])[~inside(ops[:, 0], optimizer)]
    both = length(busy) + length(optimizer) - length(union(busy, optimizer))
    exposed = length(union(busy, events.spans[collective])) - length(busy)
    nano = 1e-9 / steps
    return Inside(
        step=(events.end - events.begin) * nano,
        ops=length(busy) * nano,
        op_count=len(ops) / steps,
        small_ops=int(lengths[lengths < short * 1e9].sum()) * nano,
        optimizer=length(optimizer) * nano if len(optimizer) else None,
        optimizer_ops=both * nano if len(optimizer) else None,
        collectives=exposed * nano if ranks else None,
        syncs=(len(items) - int(inside(items, optimizer).sum())) / steps,
    )


PYTHON_BETWEEN_NODES = 500_000
"""Nanoseconds: so long the thread of backward may be in Python between two operators; beyond, it sleeps or computes something else. Chosen:
20 times `causes.MAX_PYTHON_GAP`. With half as much, long hooks of backward count as sleeping; with twice, sleeping for less than 1 ms
between operators does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What the training thread does in no operator of its own, as a trace shows it; fractions 0..1 of the steps."""

    device: float
    """It waits for the device: `cudaStreamSynchronize` and the like."""
    backward: float
    """It waits while autograd's thread works through the backward graph: on a device there is such a thread."""
    unrecorded: float
    """Neither: Python, sleep, I/O."""

    def asleep(self, blocked: float, step: float, spinning: float) -> float:
        """Seconds in which it sleeps, reads or writes: what it was blocked for less what it waited for device and backward.

        Args:
            blocked: seconds per step in which it neither computed nor waited for a core, by clocks and without a trace.
            step: seconds of that step.
            spinning: fraction 0..1 of a wait for the device in which the thread polls, and so computes.
        """
        explained = (self.backward + (1 - spinning) * self.device) * step
        return max(0.0, min(blocked - explained, self.unrecorded * step))


def waiting_of(events: Events) -> Waiting:
    """What the training thread waits for."""
    own = events.threads == events.training
    calls = events.where("operator", "runtime", "wait", "collective_call")
    engines = np.unique(events.threads[events.where("backward") & ~own])
    longer = _extended(events.spans[calls & np.isin(events.threads, engines)], PYTHON_BETWEEN_NODES)
    recorded = union(events.spans[calls & own])
    backward = subtract(union(_extended(union(longer), -PYTHON_BETWEEN_NODES)), recorded)
    whole = max(1, events.end - events.begin)
    return Waiting(
        device=length(union(events.spans[events.where("wait") & own])) / whole,
        backward=length(backward) / whole,
        unrecorded=1 - (length(recorded) + length(backward)) / whole,
    )


def outermost(spans: Spans) -> Spans:
    """The spans of one thread that lie in no other one of it."""
    spans = spans[np.lexsort((-spans[:, 1], spans[:, 0]))]
    until: NDArray[np.int64] = np.maximum.accumulate(spans[:, 1])
    kept: Spans = spans[np.concatenate([[True], spans[1:, 0] >= until[:-1]])[: len(spans)]]
    return kept


def _around(ops: Spans, nodes: Spans, short: float) -> Spans:
    """Time around the operators of a node of the backward graph belongs to the node if it is short; else it is that of a hook."""
    edges = np.concatenate([ops, nodes[:, [0, 0]], nodes[:, [1, 1]]])  # the borders of a node, as operators of no length
    edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    gaps: Spans = np.stack([np.maximum.accumulate(edges[:-1, 1]), edges[1:, 0]], axis=1)
    lengths = gaps[:, 1] - gaps[:, 0]
    return gaps[(lengths > 0) & (lengths < short * 1e9) & inside(gaps[:, 0], nodes)]


MAX_OWN_LINES = 50
"""Lines of the step's own code that are kept: those of a function are added up."""
WINDOW = "workbench: look inside"
"""The mark in the trace around the steps that count."""
MAX_EVENTS = 60_000
"""At most so many events are traced, unless one step has more. Measured on two cores: each takes 8 µs to record and read. With twice as
many a look inside takes half a second longer."""


def step_counts(seconds: float, *, budget_s: float = 2.0) -> tuple[int, int]:
    """How many steps to trace, and how many to time without a trace (`look`'s `traced` and `plain`), if a step takes `seconds`."""
    return max(2, min(20, int(budget_s / 4 / seconds))), max(2, min(400, int(budget_s * 3 / 8 / seconds)))


def look(
    call: Callable[[], object],
    *,
    traced: int,
    plain: int,
    synchronize: Callable[[], object] | None = None,
    ranks: bool = False,
    short: float = SMALL_OP,
) -> tuple[Inside, str | None]:
    """Trace a step, time it without the trace, and sample its stack, to see what its time is made of.

    `call` is called 2 × `plain` + `traced` + 1 times, whatever happens, so that several ranks can look at the same time.

    Args:
        call: does one step on a batch that is there already.
        traced: number of steps to trace.
        plain: number of steps to time without a trace, half of them before it and half after it; and as many to sample afterwards.
        synchronize: waits for the device; None on a CPU.
        ranks: do other ranks take part? Then collectives are looked for.
        short: seconds of an operator, on a CPU, that is mostly the cost of its call.

    Returns:
        What was measured, and why there was no trace, if there was none: then `ops` is nan.
    """
    wait = synchronize or (lambda: None)
    early, late = (plain + 1) // 2, plain // 2
    before = _timed(call, early, wait)
    events, seconds, steps, why = _trace(call, traced, wait)
    after = _timed(call, late, wait)
    with StackSampler(fine=True, operators=False) as sampler:
        for _ in range(plain):
            call()
        wait()
    clocks = {name: (before[name] + after[name]) / plain for name in before}
    usual, waited, polled = (clocks.pop(name) for name in ("step", "waited", "polled"))
    if events and synchronize and not events.where(*DEVICE).any():
        why = _no_device(events, steps)
        events = None
    seen = read_events(events, steps, ranks=ranks, short=short) if events else Inside(step=usual, ops=math.nan)
    if events and synchronize:
        waiting = waiting_of(events)
        computing = usual - clocks["blocked"] - clocks["waiting"]
        polls = computing >= MIN_POLLING * waiting.device * usual  # else it cannot have polled in all those waits
        spinning = min(1.0, polled / waited) if waited * plain >= MIN_WAIT else float(polls)
        clocks["blocked"] = waiting.asleep(clocks["blocked"], usual, spinning)
    slowdown = seconds / steps / usual - 1 if events and usual > 0 else 0.0
    # beside a device, lines wait for what others have launched
    own, helpers = (() if synchronize else sampler.own_lines(helpers=each)[:MAX_OWN_LINES] for each in (False, True))
    return replace(seen, slowdown=slowdown, lines=sampler.lines(), own=own, helpers=helpers, **clocks), why


MIN_WAIT = 1e-3
"""Seconds of waiting for the device that tell whether the thread polls meanwhile; CUDA's default is that it does. Chosen: 1,000 times what
reading the clocks takes."""
MIN_POLLING = 0.9
"""A thread that polls while it waits for the device computes for at least this fraction of the wait. Chosen: a thread that sleeps hardly
computes, so half as much decides alike."""


def _no_device(events: Events, steps: int) -> str:
    """Why a trace of a device's steps says nothing about them."""
    launches = events.where("runtime", name=LAUNCH).sum() / steps
    return (
        f"no trace of the device: {launches:,.0f} launches per step were recorded, but no work of the device (another profiler may have "
        "it, or the driver does not let this user profile), so what the host holds up is not known"
    )


def _timed(call: Callable[[], object], steps: int, wait: Callable[[], object]) -> dict[str, float]:
    """Seconds that some steps take, by several clocks."""
    wait()
    with contextlib.closing(LoadMeter()) as meter, GcTimer() as collections:
        for _ in range(steps):
            call()
        start, busy = time.perf_counter(), time.thread_time()
        wait()
        waited, polled = time.perf_counter() - start, time.thread_time() - busy
        lap = meter.lap()
    clocks = {"step": lap.seconds, "cpu": lap.cpu, "blocked": lap.blocked, "waiting": lap.waiting, "gc": collections.seconds}
    return {**clocks, "waited": waited, "polled": polled}


def _trace(call: Callable[[], object], steps: int, wait: Callable[[], object]) -> tuple[Events | None, float, int, str | None]:
    """Call `steps` + 1 times, and trace as many as are not too much.

    Returns:
        The events, the seconds and the number of the steps they are of, or why there are none.
    """
    if why := why_no_profiler():
        for _ in range(steps + 1):
            call()
        return None, 0.0, 0, why
    first, _ = _cycle(call, 1, wait)  # which takes up to three times as long: memory for the events is new
    some = min(steps, max(1, MAX_EVENTS // max(1, len(first))))
    events, seconds = _cycle(call, some, wait)
    for _ in range(steps - some):
        call()
    return events, seconds, some, None


def _cycle(call: Callable[[], object], steps: int, wait: Callable[[], object]) -> tuple[Events, float]:
    """Trace some steps: their events, and their seconds."""
    wait()
    with plain_profiler() as profiler, torch.autograd.profiler.record_function(WINDOW):
        start = time.perf_counter()
        for _ in range(steps):
            call()
        with torch.autograd.profiler.record_function(OWN_WAIT):
            wait()
        seconds = time.perf_counter() - start
    return Events.recorded(profiler.kineto_results.events(), window=WINDOW), seconds
