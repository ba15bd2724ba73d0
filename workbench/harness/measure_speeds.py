"""Measures what basic operations cost on this machine, in about half a second. What is on file for the machine is not measured again."""

import datetime
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workbench.core.machine_speeds import MachineSpeeds, Speed

BLOCKS = 15
"""Timed blocks of each kind; their median counts."""
BLOCK_SECONDS = 1e-3
"""Length of a block of short calls: far above the timer's cost, and short enough to lie between two interruptions."""
COPY_BYTES = 2**25
"""Bytes of a copy: more than caches hold."""
MESSAGE_BYTES = 2**23
"""Bytes of a large reduction."""
LATENCIES, MESSAGES, COPIES = 50, 9, 9
"""Timed reductions of one number, of MESSAGE_BYTES, and copies."""
REDUCTION_SECONDS = 0.15
"""Seconds for those of one size, if three are done by then."""
PATIENCE = 5.0
"""Seconds within which two ranks of this machine connect and answer."""

HOST = ("timer", "call", "dispatch", "open", "copy")
GLOO = ("gloo", "gloo_rate")
GPU = ("launch", "event", "sync", "pageable", "pinned")
NCCL = ("nccl", "nccl_rate")


def machine_speeds(
    names: Collection[str],
    *,
    fresh: bool = False,
    budget_s: float = math.inf,
    measures: Mapping[tuple[str, ...], Callable[[], Mapping[str, Speed]]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> MachineSpeeds:
    """The speeds of this machine: those on file, and what they lack measured now. Never fails: what cannot be measured is noted.

    Nothing is measured while something slows down each call of Python or torch (see `slowed_by`), since the file is kept for good.

    Args:
        names: those that are needed, of `SPEEDS`.
        fresh: measure all of these anew.
        budget_s: seconds after which no further kind is begun; it is measured the next time.
        measures: for tests: in place of MEASURES.
        clock: for tests: in place of the real one.
    """
    known = MachineSpeeds.load()
    missing = list(names) if fresh else known.missing(names)
    if not missing:
        return known
    if slow := slowed_by():
        return known.with_measured({}, [*known.notes, f"{', '.join(missing)} were not measured, since {slow} slows each call down"])
    measured: dict[str, Speed] = {}
    notes, begin = list(known.notes), clock()
    for group, measure in (MEASURES if measures is None else measures).items():
        if set(group) & set(missing) and clock() - begin <= budget_s:
            try:
                with torch._C.DisableTorchFunction():  # a default device is a mode, which would be timed with each operator
                    measured.update(measure())
            except Exception as error:  # whatever a machine lacks: the limits stay as they were fitted
                notes.append(f"{', '.join(group)} could not be measured: {type(error).__name__}: {str(error).partition(chr(10))[0]:.120}")
    speeds = known.with_measured(measured, notes)
    failure = speeds.save() if measured else ""
    return speeds.with_measured({}, [*notes, failure]) if failure else speeds


def slowed_by() -> str:
    """What slows down each call of Python or torch in this thread now, such as a debugger; "" = nothing."""
    if sys.gettrace() is not None:
        return "a debugger or another tracer (sys.settrace)"
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on; cProfile uses it there
    if sys.getprofile() is not None or (monitoring and any(monitoring.get_tool(tool) and monitoring.get_events(tool) for tool in range(6))):
        return "a profiler of Python"
    if torch._C._autograd._profiler_enabled():
        return "torch's profiler"
    if torch.is_anomaly_enabled():
        return "anomaly detection"
    return "a dispatch mode of torch" if _get_current_dispatch_mode_stack() else ""


def per_call(
    call: Callable[[int], object], clock: Callable[[], float] = time.thread_time, *, before: Callable[[], object] = lambda: None
) -> Speed:
    """Seconds of something that takes little: the median over blocks of many calls.

    Args:
        call: does it so many times.
        clock: seconds; by default CPU of this thread, so that other processes that take its core do not count.
        before: done before each block, and not timed: waits until a queue is empty, since calls that fill one wait for the device.
    """
    count, taken = 1, 0.0
    while taken < BLOCK_SECONDS / 2:  # the first calls warm up
        count *= 2
        before()
        begin = clock()
        call(count)
        taken = clock() - begin
    count = max(1, round(count * BLOCK_SECONDS / taken))
    seconds = []
    for _ in range(BLOCKS):
        before()
        begin = clock()
        call(count)
        seconds.append((clock() - begin) / count)
    return Speed.of(seconds)


def rate(size: int, copy: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Speed:
    """Bytes per second of something that moves `size` bytes; the first time warms up."""
    rates = []
    for number in range(COPIES + 1):
        begin = clock()
        copy()
        if number:
            rates.append(size / max(clock() - begin, 1e-9))
    return Speed.of(rates)


def host_speeds() -> dict[str, Speed]:
    """Timer, Python, dispatch, files and memory."""
    clock, module, weight, values = (
        time.perf_counter,
        torch.nn.Identity(),
        torch.ones(16, requires_grad=True, device="cpu"),
        torch.ones(16, device="cpu"),
    )

    def read_clock(count: int) -> None:
        for _ in range(count):
            clock()

    def call(count: int) -> None:
        for _ in range(count):
            module(values)

    def dispatch(count: int) -> None:
        with torch.enable_grad():
            for _ in range(count):
                weight * values

    with tempfile.TemporaryDirectory(prefix="workbench-speeds-") as folder:
        path = os.path.join(folder, "small")
        Path(path).write_bytes(bytes(2048))

        def open_file(count: int) -> None:
            for _ in range(count):
                with open(path, "rb") as file:
                    file.read()

        opened = per_call(open_file)
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return {
        "timer": per_call(read_clock),
        "call": per_call(call),
        "dispatch": per_call(dispatch),
        "open": opened,
        "copy": rate(COPY_BYTES, lambda: np.copyto(target, source), time.thread_time),
    }


def gloo_speeds() -> dict[str, Speed]:
    """Latency and rate of a reduction over two ranks by gloo, over the loopback. Both ranks are threads of this process."""
    pair = _gloo_pair()
    try:
        return _reductions(lambda rank, values: pair[rank].allreduce([values]).wait(), lambda rank: pair[rank].barrier().wait())
    finally:
        pair.clear()


def _gloo_pair() -> dict[int, Any]:
    group: Any = dist.ProcessGroupGloo  # torch has no types for what follows
    store = HashStore()
    pair: dict[int, Any] = {}

    def join(rank: int) -> None:
        options = group._Options()
        options._devices = [group.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=PATIENCE)
        pair[rank] = group(store, rank, 2, options)

    with _beside(lambda: join(1)):
        join(0)
    return pair


def _reductions(reduce: Callable[[int, torch.Tensor], object], meet: Callable[[int], object]) -> dict[str, Speed]:
    """Speeds of reductions: `reduce(rank, values)` does one, `meet(rank)` lets both begin together."""
    seconds: dict[int, list[float]] = {4: [], MESSAGE_BYTES: []}
    more = True

    def rounds(rank: int) -> None:
        nonlocal more
        for size, count in ((4, LATENCIES), (MESSAGE_BYTES, MESSAGES)):
            values = torch.zeros(size // 4, device="cpu")
            until, done = time.perf_counter() + REDUCTION_SECONDS, -1  # the first one warms up
            while True:
                if rank == 0:
                    more = done < count and (done < 3 or time.perf_counter() < until)
                meet(rank)
                go = more
                meet(rank)  # before rank 0 decides on the next
                if not go:
                    break
                begin = time.perf_counter()
                reduce(rank, values)
                if rank == 0 and done >= 0:
                    seconds[size].append(time.perf_counter() - begin)
                done += 1

    with _beside(lambda: rounds(1)):
        rounds(0)
    return {"gloo": Speed.of(seconds[4]), "gloo_rate": Speed.of([MESSAGE_BYTES / each for each in seconds[MESSAGE_BYTES]])}


@contextmanager
def _beside(act: Callable[[], object]) -> Iterator[None]:
    """Run something in a thread meanwhile; raise what it raised, or a TimeoutError where it does not end."""
    errors: list[Exception] = []

    def guarded() -> None:
        try:
            act()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, name="workbench: second rank", daemon=True)
    thread.start()
    yield
    thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError(f"the second rank does not answer within {2 * PATIENCE:g} s")


def gpu_speeds() -> dict[str, Speed]:
    """Launches, events, waits and copies of the first GPU.

    Raises:
        RuntimeError: torch cannot use one.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU that it can use")
    device = torch.device("cuda", 0)
    values = torch.ones(16, device=device)
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(64)]  # type: ignore[no-untyped-call]

    def launch(count: int) -> None:
        for _ in range(count):
            values.add_(1)

    def record(count: int) -> None:
        for number in range(count):
            events[number % len(events)].record(stream)

    def wait(count: int) -> None:
        for _ in range(count):
            torch.cuda.synchronize(device)

    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cpu")
    pinned = pageable.pin_memory()

    def copied(source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return copy

    calls = {"launch": launch, "event": record, "sync": wait}
    speeds = {name: per_call(call, before=lambda: torch.cuda.synchronize(device)) for name, call in calls.items()}
    return {**speeds, "pageable": rate(COPY_BYTES, copied(pageable)), "pinned": rate(COPY_BYTES, copied(pinned))}


MEASURES: Mapping[tuple[str, ...], Callable[[], Mapping[str, Speed]]] = {HOST: host_speeds, GLOO: gloo_speeds, GPU: gpu_speeds}
"""What is measured together → how."""
