"""Times blocks of successive training steps: each step by itself, on the clock of the device that computes it."""

import contextlib
import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from workbench.core import system_load
from workbench.core.system_load import GcTimer, RunQueueDelay
from workbench.harness import device_clock
from workbench.harness.feed import Exhausted
from workbench.harness.peers import Peers
from workbench.harness.stack_sampler import StackSampler
from workbench.runs.errors import LESS_MEMORY, is_out_of_memory

STALL_FACTOR = 2.5
"""A call of step() has stalled if it takes so many times the usual. Chosen: steps of similar batches vary far less, lengths of sequences by
up to 3. A stalled call is left out of its block's mean. With half, the long tail of uneven steps is left out, and they seem shorter; with
twice, a pause of four steps lengthens one block."""
STALL_SECONDS = 1e-3
"""And if it takes at least so much longer: shorter delays are interrupts of the operating system. Chosen. It matters for steps below 1 ms,
which are averaged over hundreds."""
MAX_STALLED_SHARE = 0.15
"""Stalls are rare. Where a larger share of calls is so long, the step has two speeds, such as an update at every fourth call. Chosen
between a pause at every tenth call and an update at every fourth."""

MAX_PASS_SECONDS = 1.0
"""On a device that runs behind the host, blocks are whole passes where these are no longer: what a pass costs depends on the work queued
when it begins, and a block of its own begins with less. Chosen: three usual blocks. With half, passes of 0.5 to 1 s are spread over their
steps by a formula; with twice, a diagnosis of such a loop takes longer."""


class DiagnoseError(ValueError):
    """Something that cannot be diagnosed; the message says what was given, what is allowed and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The steps of one block on one rank. Seconds.

    Where the device runs behind the host, a step takes what passes on the device from the end of the one before to its own end. Of that,
    `waits` is what the device waited for data, and `calls` the rest.
    """

    waits: "array[float]"
    """In the loader."""
    calls: "array[float]"
    """In step()."""
    delays: "array[float]"
    """Of `calls`: the thread was ready and waited for a core; 0 where that cannot be read. On a device at most what a call took longer than
    the block's median."""
    gcs: "array[float]"
    """Of `calls`: in Python's cyclic garbage collector."""
    fresh: tuple[int, ...] = ()
    """Steps at which the loader began a new pass."""
    tail: float = 0.0
    """Until the device was done with all of them, where that is not in `calls`."""
    faults: float = 0.0
    """Times per step that the kernel gave the thread pages of memory."""
    kernel: float = 0.0
    """Per step in the kernel."""

    def mean(self, left_out: Iterable[int] = ()) -> float | None:
        """Mean seconds of a step, without those that are left out and those at which a pass began; None if none remains."""
        skip = {*left_out, *self.fresh}
        kept = [wait + call for i, (wait, call) in enumerate(zip(self.waits, self.calls, strict=True)) if i not in skip]
        return statistics.fmean(kept) + self.tail / len(self.calls) if kept else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block, on all ranks."""

    arm: str
    """The name of the variant that ran."""
    first: int
    """Number of its first call of step(), from 1."""
    laps: tuple[StepTimes, ...]
    """Of each rank."""


@dataclass(slots=True)
class Timings:
    """All blocks so far, by variant."""

    blocks: dict[str, list[Block]] = field(default_factory=dict)
    stalled: list[frozenset[int]] = field(default_factory=list)
    """Of each rank the calls of step() that are known to have stalled."""

    def add(self, block: Block) -> None:
        self.blocks.setdefault(block.arm, []).append(block)

    def limit(self, arm: str, rank: int) -> float:
        """Seconds above which a call of this variant has stalled."""
        calls = sorted(call for block in self.blocks[arm] for call in block.laps[rank].calls)
        if len(calls) < 4:
            return float("inf")
        usual = calls[len(calls) // 2]
        limit = max(STALL_FACTOR * usual, usual + STALL_SECONDS)
        longer = sum(call > limit for call in reversed(calls))
        return limit if longer <= max(1, MAX_STALLED_SHARE * len(calls)) else float("inf")

    def means(self, arm: str) -> list[list[float | None]]:
        """Mean seconds per step of each block of a variant on each rank, stalled steps left out."""
        rows: list[list[float | None]] = [[] for _ in self.blocks[arm]]
        for rank in range(len(self.blocks[arm][0].laps)):
            limit = self.limit(arm, rank)
            known = self.stalled[rank] if self.stalled else frozenset[int]()
            for row, block in zip(rows, self.blocks[arm], strict=True):
                laps = block.laps[rank]
                row.append(laps.mean(i for i, call in enumerate(laps.calls) if call > limit or block.first + i in known))
        return rows

    def slowest(self, arm: str) -> list[float]:
        """Mean seconds per step of each block of a variant on the slowest rank, so of the job; nan if all steps stalled."""
        return [max((mean for mean in row if mean is not None), default=float("nan")) for row in self.means(arm)]

    def typical(self, arm: str) -> float:
        """Median of `slowest`."""
        known = [value for value in self.slowest(arm) if value == value]
        return statistics.median(known) if known else float("nan")


class BlockTimer:
    """Times blocks: counts the calls of step(), keeps the time, and shares with all ranks what each has measured."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        peers: Peers,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        helpers: bool = True,
    ) -> None:
        """Nothing runs yet.

        Args:
            step: does one optimizer step with the batch, or batches, that it is given.
            peers: the ranks that take part.
            device: device on which the step computes.
            clock: gives the time in seconds.
            helpers: count waits for a core of all threads of the process; False = of the calling one alone, which is right where
                operators run in it and the other threads (of gloo, say) work beside it.
        """
        self.step, self.peers, self.device, self._helpers = step, peers, device, helpers
        self.timings = Timings()
        self.called = 0
        """Calls of step() so far."""
        self.elapsed = 0.0
        """Seconds since the start, as all ranks last agreed."""
        self.clock = clock
        """Seconds."""
        self._start = clock()
        self.sampler = StackSampler()
        """Samples the stack of step()."""
        self._delay = RunQueueDelay()
        self._collections = GcTimer()

    def __enter__(self) -> Self:
        self.sampler.call = None
        self.sampler.__enter__()
        self._collections.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._collections.__exit__(None, None, None)
        self.sampler.__exit__(None, None, None)
        self._delay.close()

    @property
    def knows_delays(self) -> bool:
        """Is it known how long calls wait for a core?"""
        return self._delay.known

    @contextlib.contextmanager
    def unsampled(self) -> Iterator[None]:
        """Inside, the stack is not sampled."""
        self.sampler.__exit__(None, None, None)
        try:
            yield
        finally:
            self.sampler.__enter__()

    def tick(self) -> float:
        """Read the clock, on all ranks together."""
        self.elapsed = self.peers.agree(self.clock() - self._start)
        return self.elapsed

    def warm(self, batches: Iterable[Any], step: Callable[[Any], Any] | None = None) -> None:
        """Take steps without timing them.

        Raises:
            StepFailed: step() raised an error.
        """
        for batch in batches:
            self._call(step or self.step, batch)

    def run(
        self, arm: str, source: Iterable[Any], count: int, *, step: Callable[[Any], Any] | None = None, passes: Callable[[], int] = int
    ) -> Block:
        """Time a block, on all ranks. A source that ends makes it shorter.

        Args:
            arm: name of the variant.
            source: gives what step() takes; the time for that is a wait.
            count: number of steps in the block.
            step: a step function in place of the usual one.
            passes: how many passes of the loader have begun.

        Raises:
            StepFailed: step() raised an error.
        """
        first = self.called + 1
        self.peers.barrier()
        laps = self._time(source, count, step or self.step, passes)
        measured = self.peers.gather((laps, self.clock() - self._start))
        self.elapsed = max(elapsed for _, elapsed in measured)
        block = Block(arm=arm, first=first, laps=tuple(laps for laps, _ in measured))
        self.timings.add(block)
        return block

    def _time(self, source: Iterable[Any], count: int, step: Callable[[Any], Any], passes: Callable[[], int]) -> StepTimes:
        now, collections = self.clock, self._collections
        delay = self._delay.read if self._helpers else self._delay.own
        waits, calls, delays, gcs, fresh = array("d"), array("d"), array("d"), array("d"), []
        begun = passes()
        batches = iter(source)
        queued = step is not no_step and device_clock.is_asynchronous(self.device)
        if not queued:
            self.synchronize()
        on_device = device_clock.DeviceClock(self.device) if queued else None
        faults, kernel = system_load.page_faults()
        waited, collected, start = delay(), collections.seconds, now()
        try:
            for i in range(count):
                try:
                    batch = next(batches)
                except (StopIteration, Exhausted):
                    break
                between = now()
                if on_device:
                    on_device.mark()
                self._call(step, batch)
                if on_device:
                    on_device.mark()
                end = now()
                waits.append(between - start)
                calls.append(end - between)
                waited, before = delay(), waited
                delays.append(waited - before)
                collected, before = collections.seconds, collected
                gcs.append(collected - before)
                if (so_far := passes()) != begun:
                    begun = so_far
                    fresh.append(i)
                start = now()
            parts, whole = on_device.read() if on_device else ([], 0.0)
            self.synchronize()
            tail = 0.0 if on_device else now() - start
            more_faults, more_kernel = system_load.page_faults()
        finally:
            if close := getattr(batches, "close", None):
                close()
        if on_device and calls:
            steps = len(calls)
            waits = array("d", parts[::2] or [0.0] * steps)
            calls = array("d", parts[1::2] or [whole / steps] * steps)
            usual = statistics.median(calls)  # the host's delays hide behind queued work, but for what makes a step longer
            delays = array("d", (min(delay, max(0.0, call - usual)) for delay, call in zip(delays, calls, strict=True)))
        steps = max(1, len(calls))
        faults_per_step, kernel_per_step = (more_faults - faults) / steps, (more_kernel - kernel) / steps
        return StepTimes(
            waits=waits, calls=calls, delays=delays, gcs=gcs, fresh=tuple(fresh), tail=tail, faults=faults_per_step, kernel=kernel_per_step
        )

    def _call(self, step: Callable[[Any], Any], batch: Any) -> None:
        if step is no_step:
            return
        self.called += 1
        self.sampler.call = self.called
        try:
            step(batch)
        except Exception as error:
            raise StepFailed(self.called, error) from error
        finally:
            self.sampler.call = None

    def synchronize(self) -> None:
        """Wait for the device."""
        device_clock.synchronize(self.device)


def no_step(_: Any) -> None:
    """The step of a variant without training."""


class StepFailed(DiagnoseError):
    """step() raised `error`, which is also this exception's cause."""

    def __init__(self, call: int, error: BaseException) -> None:
        advice = f". {LESS_MEMORY}" if is_out_of_memory(error) else ""
        super().__init__(
            f"step() raised {type(error).__name__} at its call number {call}: {error}. "
            f"Experiments call it many times, also with a batch that it has seen before; its state has been put back{advice}"
        )
        self.call, self.error = call, error


def steps_for(seconds: float, target: float, *, least: int = 1, most: int = 2000, multiple: int = 1) -> int:
    """How many steps of so many seconds fill a block of `target` seconds: at least `least`, and a multiple of `multiple`.

    >>> steps_for(0.05, 0.2), steps_for(1.0, 0.2), steps_for(0.05, 0.2, multiple=3)
    (4, 1, 6)
    """
    if not math.isfinite(seconds):  # nothing was measured: a loader that ended
        return least
    count = max(least, min(most, round(target / max(seconds, 1e-6))))
    return -(-count // multiple) * multiple


def common_length(steps_per_pass: float, peers: Peers) -> float:
    """The steps of a pass over the loader, where all ranks that know it have the same number; else infinite. Collective.

    A pass with fewer batches than a step takes has no whole step: that is infinite, too.
    """
    lengths = {steps for steps in peers.gather(steps_per_pass) if steps < math.inf}
    return (lengths.pop() or math.inf) if len(lengths) == 1 else math.inf


def known_pairs(base: Sequence[float], arm: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The pairs of neighbours in which both are known."""
    return tuple((b, a) for b, a in zip(base, arm, strict=True) if b == b and a == a)
