"""Inside a step: operators, collectives and synchronisations from a short trace, Python's lines from looks at the stack."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.diagnosis.evidence import Inside
from workbench.measure.events import Events, read
from workbench.measure.noise import Collections, Meter
from workbench.measure.profiler import hindrance, plain_profiler
from workbench.measure.sampler import StackSampler

WINDOW = "workbench.inside"
"""The mark in the trace around the steps that count."""
MOST_EVENTS = 60_000
"""More of them are not traced, unless one step has more: each takes 8 µs to write down and read."""


def counts_for(seconds: float, *, budget_s: float = 2.0) -> tuple[int, int]:
    """How many steps to trace, and how many to look at without a trace (`look`'s `traced` and `plain`), if a step takes so long.

    Args:
        seconds: of a step.
        budget_s: for all of it.
    """
    return max(2, min(20, int(budget_s / 4 / seconds))), max(2, min(400, int(budget_s * 3 / 8 / seconds)))


def look(
    call: Callable[[], object], *, traced: int, plain: int, synchronize: Callable[[], object] | None = None, ranks: bool = False
) -> tuple[Inside, str | None]:
    """Look inside a step.

    `call` is called 2 × `plain` + `traced` + 1 times, whatever happens, so that several ranks can look at the same time.

    Args:
        call: does one step on a batch that is there already.
        traced: steps to trace.
        plain: steps to time without a trace, half of them before it and half after it; and as many to sample afterwards.
        synchronize: waits for the device; None on a CPU.
        ranks: do others compute along? Then collectives are looked for.

    Returns:
        What was seen, and why there was no trace, if there was none: then `ops` is nan.
    """
    wait = synchronize or _nothing
    early, late = (plain + 1) // 2, plain // 2
    before = _timed(call, early, wait)
    events, seconds, steps, why = _trace(call, traced, wait)
    after = _timed(call, late, wait)
    with StackSampler(fine=True, operators=False) as sampler:
        for _ in range(plain):
            call()
        wait()
    clocks = {name: (before[name] + after[name]) / plain for name in before}
    usual = clocks.pop("step")
    seen = read(events, steps, ranks=ranks) if events else Inside(step=usual, ops=math.nan)
    slowdown = seconds / steps / usual - 1 if events and usual > 0 else 0.0
    return replace(seen, slowdown=slowdown, lines=sampler.lines(), **clocks), why


def _nothing() -> None: ...


def _timed(call: Callable[[], object], steps: int, wait: Callable[[], object]) -> dict[str, float]:
    """Seconds that some steps take, by several clocks."""
    wait()
    with contextlib.closing(Meter()) as meter, Collections() as collections:
        for _ in range(steps):
            call()
        wait()
        lap = meter.lap()
    return {"step": lap.seconds, "cpu": lap.cpu, "blocked": lap.blocked, "waiting": lap.waiting, "gc": collections.seconds}


def _trace(call: Callable[[], object], steps: int, wait: Callable[[], object]) -> tuple[Events | None, float, int, str | None]:
    """Call `steps` + 1 times, and trace as many as are not too much.

    Returns:
        The events, the seconds and the number of the steps they are of, or why there are none.
    """
    if why := hindrance():
        for _ in range(steps + 1):
            call()
        return None, 0.0, 0, why
    first, _ = _cycle(call, 1, wait)  # which takes up to three times as long: memory for the events is new
    some = min(steps, max(1, MOST_EVENTS // max(1, len(first))))
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
        wait()
        seconds = time.perf_counter() - start
    return Events.recorded(profiler.kineto_results.events(), window=WINDOW), seconds
