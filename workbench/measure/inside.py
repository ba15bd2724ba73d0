"""Inside a step: operators, collectives and synchronisations from a short trace, Python's lines from looks at the stack."""

import contextlib
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from workbench.diagnosis.evidence import Inside
from workbench.measure.events import Events, read
from workbench.measure.noise import Collections, Meter
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


def hindrance() -> str | None:
    """Why a step cannot be traced, if it cannot."""
    autograd: Any = torch.autograd
    if not autograd.kineto_available():
        return "no trace of the step: this torch is built without Kineto"
    if autograd._profiler_enabled():
        return "no trace of the step: a profiler is running already, and torch has only one"
    try:
        with _profiler():
            pass
    except (RuntimeError, AssertionError) as error:
        return f"no trace of the step: torch's profiler does not start ({error})"
    return None


def _cycle(call: Callable[[], object], steps: int, wait: Callable[[], object]) -> tuple[Events, float]:
    """Trace some steps: their events, and their seconds."""
    wait()
    with _profiler() as profiler, torch.autograd.profiler.record_function(WINDOW):
        start = time.perf_counter()
        for _ in range(steps):
            call()
        wait()
        seconds = time.perf_counter() - start
    return Events.recorded(profiler.kineto_results.events(), window=WINDOW), seconds


@contextlib.contextmanager
def _profiler() -> Iterator[Any]:
    profiler: Any = torch.autograd.profiler
    profile = profiler.profile(use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None)
    with without_kineto_lines():
        profile.__enter__()
    try:
        yield profile
    finally:
        with without_kineto_lines():
            profile.__exit__(None, None, None)


KINETO_LINE = re.compile(rb"(USDT|VERBOSE|INFO|WARNING|ERROR|STAGE):\d{4}-\d\d-\d\d .*\.(cpp|h|cu):\d+\] ")
"""What Kineto says on stderr when a trace begins and ends; a notebook would show it."""


@contextlib.contextmanager
def without_kineto_lines() -> Iterator[None]:
    """Keep Kineto's lines off stderr. It reads `KINETO_LOG_LEVEL` once, at its first trace in a process; after that only a filter helps.

    All else that is written to stderr meanwhile follows when the filter ends.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    try:
        own = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            del os.environ["KINETO_LOG_LEVEL"]
            file.seek(0)
            for line in file:
                if not KINETO_LINE.match(line):
                    os.write(2, line)
