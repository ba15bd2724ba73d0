"""Measures what N ranks cost each other: one alone, all without a reduction, all with it, with and without their loaders, in turns."""

import contextlib
import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import SyncBatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.core import units
from workbench.core.progress import INTERRUPTED
from workbench.core.system_load import LoadMeter, cpu_of_process, usable_cores
from workbench.diagnosis.analysis.gap import gap_of
from workbench.diagnosis.analysis.gap_evidence import MIN_FOREIGN, GapBlock, GapEvidence, Rounds, Tail
from workbench.diagnosis.measure.evidence import measure_gradients
from workbench.harness import ablations
from workbench.harness.batches import MAX_CACHED, CachedBatches, bytes_of, doubled
from workbench.harness.blocks import BlockTimer, DiagnoseError, StepTimes, steps_for
from workbench.harness.feed import Feed
from workbench.harness.interleave import MIN_STEPS_PER_PASS
from workbench.harness.loaders import misses_epochs
from workbench.harness.observe import samples_of, timed_device_of
from workbench.harness.peers import Peers

BLOCK_SECONDS = 0.3
"""Seconds of a block, about."""
LEAST_ROUNDS, MOST_ROUNDS, RARE_ROUNDS = 3, 12, 40
"""Rounds of all arms; the first for an interval at all, the second since more say little more, unless there are rare long steps, which need
many."""
NARROW = 0.02
"""Width of the interval of the gap and of each part, as a fraction of the step, at which no more rounds are taken. Chosen: well below the
share from which on a part is named."""
WARM_STEPS = 3
"""Steps before a block, after its arm has changed."""
CHOOSING_STEPS = 6
"""Steps of each rank from which a typical one is chosen."""
FED_STEPS = 3
"""The same with batches from the loader: as few as a median needs that one long wait does not move."""
UNEVEN = 0.05
"""Fraction of its step by which a rank with cached batches is slower than another one, from which on both get the same batches."""
MAX_SHARED_BYTES = 2**26
"""Most bytes of batches that a rank sends to all others for that."""
TAIL_STEPS = 12
"""Steps in which the moments of the gradients are written down."""


def measure_gap(
    step: Callable[[Any], Any],
    loader: Any,
    models: Sequence[nn.Module],
    *,
    budget_s: float,
    accumulation: int = 1,
    threads: int = 1,
    large: int = 0,
    progress: Callable[[str, str], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> GapEvidence:
    """Run the arms in turns until the gap is known closely enough; collective. Weights differ between ranks afterwards.

    Args:
        step: takes one optimizer step with a batch, or a tuple of `accumulation` batches.
        loader: gives the batches of this rank.
        models: the modules that are trained.
        budget_s: seconds that it may take, about; the same on all ranks.
        accumulation: batches per step.
        threads: of a rank, for one operator.
        large: batches that make up the batch of all ranks, for one rank alone; 0 = as many as there are ranks.
        progress: called with what is tried now and what is known; a KeyboardInterrupt that it raises on one rank ends all of them
            together, with what is known by then.
        clock: gives the time in seconds.

    Raises:
        DiagnoseError: ranks that cannot compute alone.
    """
    if not ablations.can_skip_reduction(models) or any(isinstance(part, SyncBatchNorm) for model in models for part in model.modules()):
        raise DiagnoseError(
            "the ranks cannot compute alone: SyncBatchNorm, or weights that are spread over the ranks (FSDP). Measure it with "
            'parallel="ddp" and plain BatchNorm, or compare whole runs: wb.scaling_curve(spec, values=(1, 2))'
        )
    with Peers.join() as peers, contextlib.ExitStack() as undo:
        feed = undo.enter_context(Feed(loader, accumulation))
        if max(peers.gather(feed.kind == "once")):
            raise DiagnoseError("the loader can be read only once: give a DataLoader, or another iterable that can be read again")
        bench = undo.enter_context(BlockTimer(step, peers, timed_device_of(models), clock=clock, helpers=threads > 1))
        undo.enter_context(bench.unsampled())
        arms = _Arms(bench, feed, models, large or peers.world_size)
        undo.callback(arms.meter.close)
        return arms.measure(budget_s, threads, progress or (lambda now, known: None))


class _Arms:
    """Runs arms; all ranks call the same methods in the same order."""

    def __init__(self, bench: BlockTimer, feed: Feed, models: Sequence[nn.Module], large: int) -> None:
        self.bench, self.feed, self.models, self.large = bench, feed, models, large
        self.peers = bench.peers
        self.cached, self.same = CachedBatches(), CachedBatches()
        self.joined: list[Any] = []
        self.blocks: list[GapBlock] = []
        self.starts: dict[str, list[float]] = {"alone": [], "together": []}
        self.notes: list[str] = []
        self.meter = LoadMeter()
        self.one = 0
        self.count = 1
        self.seconds = math.nan
        self.foreign = 0.0
        self.used: list[float] = []
        self.wanted: float | None = None

    @property
    def parallel(self) -> bool:
        return self.peers.world_size > 1

    def measure(self, budget: float, threads: int, progress: Callable[[str, str], object]) -> GapEvidence:
        """All of it; a stop on any rank ends it with what is known, if a round is complete."""
        self.prepare()
        rounds = 0
        while True:
            if self.stopped(progress, rounds):
                self.notes.append(f"{INTERRUPTED} after {units.seconds(self.bench.tick())}: this is the result so far")
                break
            began = self.bench.tick()
            self.turn(backwards=rounds % 2 == 1, first=not rounds)
            rounds += 1
            spent = self.bench.tick()
            if spent + 1.2 * (spent - began) > budget or rounds >= RARE_ROUNDS or (rounds >= MOST_ROUNDS and not self.rare()):
                break
            if rounds >= LEAST_ROUNDS and self.peers.agree(self.clear(), all):
                break
        if self.parallel and self.uneven() and self.bench.elapsed < budget:
            self.exchange()
        gradients = measure_gradients(self.models, self.peers) if self.parallel else self.weights()
        tail = self.tail() if self.parallel else None
        self.bench.tick()
        self.foreign = self.peers.agree(self.meter.noise().foreign, min)
        self.wanted = self.peers.agree(statistics.median(self.used), sum) if self.used else None
        if self.foreign > MIN_FOREIGN:
            self.notes.append(f"other processes took {self.foreign:.1f} of {usable_cores():.1f} cores meanwhile")
        return self.evidence(threads, gradients, tail)

    def stopped(self, progress: Callable[[str, str], object], rounds: int) -> bool:
        """Tell what is known; has any rank been asked to stop? Collective.

        Raises:
            KeyboardInterrupt: so it was, and nothing is known yet.
        """
        stop = False
        try:
            progress(f"round {rounds + 1}: one rank alone, independent processes, all together", self.known() if rounds else "")
        except KeyboardInterrupt:
            stop = True
        stop = any(self.peers.gather(stop))
        if stop and not rounds:
            raise KeyboardInterrupt
        return stop

    def known(self) -> str:
        """The gap so far, in words."""
        gap = gap_of(self.evidence(1, None, None))
        return f"{units.percent(gap.efficiency)} of linear" + (f"; the largest part of the gap so far: {gap.cause}" if gap.cause else "")

    def clear(self) -> bool:
        """Is every part known closely enough?"""
        gap = gap_of(self.evidence(1, None, None))
        return all(part.seconds.width <= NARROW * gap.step.mid for part in gap.parts)

    def rare(self) -> bool:
        """Are there rare long steps? The same answer on all ranks."""
        return bool(self.peers.agree(Rounds.of(self.evidence(1, None, None)).rare_count, max))

    def evidence(self, threads: int, gradients: Any, tail: Tail | None) -> GapEvidence:
        feed = self.feed
        loader = feed.epoch // feed.accumulation if feed.epoch else 0
        loader = loader if loader >= MIN_STEPS_PER_PASS else 0  # starts of shorter passes are in the blocks already: see `passes`
        samples = samples_of(self.cached.first, feed)
        return GapEvidence(
            blocks=tuple(self.blocks),
            world_size=self.peers.world_size,
            one=self.one,
            samples=samples * self.peers.world_size if samples else None,
            accumulation=feed.accumulation,
            device=self.bench.device.type,
            cores=usable_cores(),
            foreign=self.foreign,
            wanted=self.wanted,
            threads=threads,
            num_workers=feed.num_workers,
            persistent_workers=bool(getattr(feed.loader, "persistent_workers", False)),
            misses_epochs=misses_epochs(feed.loader),
            steps_per_pass=float(loader) if loader else None,
            starts_alone=tuple(self.starts["alone"]),
            starts_together=tuple(self.starts["together"]),
            gradients=gradients,
            tail=tail,
            large=self.large if self.joined else 0,
            seconds=self.bench.elapsed,
            notes=tuple(self.notes),
        )

    # Before the first round

    def prepare(self) -> None:
        """Warm up, cache batches, choose the rank that runs alone and the length of blocks."""
        bench = self.bench
        batches = [self.feed.next() for _ in range(MAX_CACHED)]
        self.cached.hold(batches)
        bench.warm(batches[:WARM_STEPS])
        with ablations.without_reduction(self.models):
            bench.warm(self.cached.give(2))
            laps = bench.run("first", self.cached.give(CHOOSING_STEPS), CHOOSING_STEPS).laps
        block = bench.run("first", self._fed(FED_STEPS), FED_STEPS, passes=self.passes)
        self.one = typical_rank(laps, block.laps)
        self.seconds = max((math.fsum(laps.waits) + math.fsum(laps.calls) + laps.tail) / max(1, len(laps.calls)) for laps in block.laps)
        workers = max(1, self.feed.num_workers)
        whole = workers if workers * self.seconds < 2 * BLOCK_SECONDS else 1
        self.count = self.peers.agree(
            steps_for(self.seconds, BLOCK_SECONDS, least=4 if self.seconds < 0.3 else 2, most=400, multiple=whole)
        )
        self.warm = 1 if self.seconds > 0.3 else max(WARM_STEPS, whole)
        self.join()

    def join(self) -> None:
        """The batch of all ranks, for one of them; nothing where it is not known how batches are joined."""
        joined, size = self.cached.first, 1
        parts = joined if self.feed.accumulation > 1 else (joined,)
        while size < self.large and parts:
            parts = tuple(doubled(part) for part in parts)
            if any(part is None for part in parts):
                self.notes.append("what a larger batch would cost one process is not known: it is not known how its samples are arranged")
                return
            size *= 2
        self.large = size
        if self.peers.agree(size * bytes_of(joined) > MAX_SHARED_BYTES, any):
            self.notes.append(f"what a batch {self.large} times as large would cost one process was not tried: it is too large")
            return
        self.joined = [parts if self.feed.accumulation > 1 else parts[0]]

    # A round

    def turn(self, *, backwards: bool, first: bool) -> None:
        """One round of all arms."""
        arms: list[Callable[[], object]] = [
            lambda: self.fed("one", alone=True, reduces=False),
            lambda: self.replayed("one, cached", self.cached, alone=True, reduces=False),
        ]
        if self.parallel:
            arms += [
                lambda: self.replayed("strangers, cached", self.cached, alone=False, reduces=False),
                lambda: self.fed("strangers", alone=False, reduces=False),
                lambda: self.fed("all", alone=False, reduces=True),
                lambda: self.replayed("all, cached", self.cached, alone=False, reduces=True),
            ]
        if self.joined:
            arms.append(self.one_large)
        arms.append(self.start_passes)
        for arm in reversed(arms) if backwards else arms:
            arm()

    def fed(self, arm: str, *, alone: bool, reduces: bool) -> None:
        """A block with batches from the loader."""
        active = self._active(alone)
        with self._reducing(reduces):
            if active:
                self.feed.drain()
            else:
                self._rest()
            self.peers.barrier()
            if active:
                self.bench.warm(self._fed(self.warm))
            self.add(arm, self._fed(self.count), self.count if active else 0, passes=self.passes)

    def replayed(self, arm: str, batches: CachedBatches, *, alone: bool, reduces: bool, count: int = 0) -> None:
        """A block with batches that are there already, while workers rest."""
        active, count = self._active(alone), count or self.count
        with self._reducing(reduces):
            self._rest()
            self.peers.barrier()
            if active:
                self.bench.warm(batches.give(min(2, self.warm)))
            self.add(arm, batches.give(count) if active else [], count if active else 0)

    def one_large(self) -> None:
        """One rank with the batch of all; left out from then on where that does not fit into memory."""
        count, active = max(1, self.count // self.large), self._active(True)
        failed = ""
        with self._reducing(False):
            self._rest()
            self.peers.barrier()
            try:
                self.bench.warm(self.joined if active else [])
            except DiagnoseError as error:  # no other rank waits for it within a step
                failed = str(error.__cause__ or error)
            if why := self.peers.agree(failed):
                self.joined = []
                self.notes.append(f"what a batch {self.large} times as large would cost one process is not known: {why.splitlines()[0]}")
                return
            self.add("one, large batch", self.joined * count if active else [], count if active else 0)

    def start_passes(self) -> None:
        """Begin a pass over the loader: on one rank while the others rest, then on all at once."""
        for name, alone in (("alone", True), ("together", False)):
            if name == "together" and not self.parallel:
                continue
            self._rest()
            self.peers.barrier()
            extra = self._restart() if self._active(alone) else 0.0
            self.starts[name].append(self.peers.agree(extra))

    def _restart(self) -> float:
        """Seconds that a new pass takes until its first batch is there, beyond a usual wait."""
        feed, clock = self.feed, self.bench.clock
        usual = []
        for _ in range(3):
            before = clock()
            feed.next()
            usual.append(clock() - before)
        feed.restart()
        ended = feed.ends[-1] if feed.ends else 0.0
        before = clock()
        feed.next()
        return max(0.0, clock() - before - statistics.median(usual)) + (ended if feed.num_workers else 0.0)

    def add(self, arm: str, source: Any, count: int, *, passes: Callable[[], int] = int) -> None:
        """Time a block."""
        before = self._cpu()
        block = self.bench.run(arm, source, count, passes=passes)
        if arm == "all":
            laps = block.laps[self.peers.rank]
            busy = math.fsum(laps.waits) + math.fsum(laps.calls) - math.fsum(laps.delays)
            self.used.append((self._cpu() - before) / busy if busy > 0 else 0.0)
        self.blocks.append(
            GapBlock(arm=arm, steps=tuple(_steps(laps) for laps in block.laps), delays=tuple(tuple(laps.delays) for laps in block.laps))
        )

    def _cpu(self) -> float:
        """CPU seconds of this rank and its loader's workers so far."""
        return time.process_time() + sum(map(cpu_of_process, self.feed.worker_pids))

    def passes(self) -> int:
        """Passes that have begun, where their beginnings can be left out of blocks."""
        feed = self.feed
        return feed.passes if feed.epoch and feed.epoch // feed.accumulation >= MIN_STEPS_PER_PASS else 0

    def _active(self, alone: bool) -> bool:
        return not alone or self.peers.rank == self.one

    def _rest(self) -> None:
        self.feed.wait_until_full(self.seconds)

    def _fed(self, count: int) -> Iterator[Any]:
        return islice(self.feed, count)

    @contextlib.contextmanager
    def _reducing(self, reduces: bool) -> Iterator[None]:
        with contextlib.nullcontext() if reduces else ablations.without_reduction(self.models):
            yield

    # After the rounds

    def uneven(self) -> bool:
        """Is a rank slower than another one although neither loads anything? The same answer on all ranks."""
        rows = [block.means for block in self.blocks if block.arm == "strangers, cached"]
        means = [statistics.median(column) for column in zip(*rows, strict=True)]
        return bool(max(means) > (1 + UNEVEN) * means[self.one])

    def exchange(self) -> None:
        """Give all ranks the same batches: is a rank slow, or are its data?"""
        own = self.cached.give(len(self.cached)) if self.peers.rank == self.one else []
        if self.peers.agree(sum(map(bytes_of, own)) > MAX_SHARED_BYTES, any):
            self.notes.append("whether a rank is slow, or only its data, was not tried: its batches are too large to be exchanged")
            return
        self.same.hold(self.peers.gather(own)[self.one])
        for _ in range(LEAST_ROUNDS):
            self.replayed("strangers, same batches", self.same, alone=False, reduces=False)

    def weights(self) -> Any:
        """What would be reduced if there were more ranks."""
        return measure_gradients(self.models, self.peers) if torch.distributed.is_initialized() else None

    def tail(self) -> Tail | None:
        """When gradients are ready, with and without reduction; None where a step has no optimizer or no gradient."""
        weights = list({id(weight): weight for model in self.models for weight in model.parameters() if weight.requires_grad}.values())
        moments = _Moments(self.bench.clock)
        count = max(2, min(TAIL_STEPS, self.count))
        seen = []
        with contextlib.ExitStack() as undo:
            undo.callback(register_optimizer_step_pre_hook(moments.stepping).remove)
            for weight in weights:
                undo.callback(weight.register_post_accumulate_grad_hook(moments.gradient).remove)  # type: ignore[no-untyped-call]
            for reduces in (True, False):
                with self._reducing(reduces):
                    self._rest()
                    self.peers.barrier()
                    rows = [moments.of(partial(self.bench.warm, [batch])) for batch in self.cached.give(count)]
                    seen.append(self.peers.gather([statistics.median(column) for column in zip(*rows, strict=True)]))
        if any(value != value for rows in seen for row in rows for value in row):
            return None
        full, silent = (min(rows, key=lambda row: row[2]) for rows in seen)  # others wait for the slowest rank
        return Tail(first=full[0], backward=full[1], after=full[2], silent=silent[2])


class _Moments:
    """Moments of a step: its first gradient, its last one, and the beginning of the optimizer's step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first = self._last = self._stepped = math.nan

    def gradient(self, _: Any) -> None:
        self._last = self._clock()
        if self._first != self._first:
            self._first = self._last

    def stepping(self, _optimizer: Optimizer, *_: Any) -> None:
        self._stepped = self._clock()

    def of(self, step: Callable[[], object]) -> tuple[float, float, float]:
        """Seconds of a step from its start to the first gradient, from there to the last, and from there to the optimizer."""
        self._first = self._last = self._stepped = math.nan
        start = self._clock()
        step()
        return self._first - start, self._last - self._first, self._stepped - self._last


def typical_rank(cached: Sequence[StepTimes], fed: Sequence[StepTimes]) -> int:
    """The rank that is neither the fastest nor the slowest by its compute and its wait for data; the faster one of two.

    Args:
        cached: steps of each rank with batches that are there already, without waiting for each other.
        fed: steps of each rank with batches from its loader.
    """
    seconds = []
    for steps, waiting in zip(cached, fed, strict=True):
        computing = min(call - delay for call, delay in zip(steps.calls, steps.delays, strict=True))
        seconds.append(computing + statistics.median(waiting.waits))
    return seconds.index(sorted(seconds)[(len(seconds) - 1) // 2])


def _steps(laps: StepTimes) -> tuple[float, ...]:
    """Seconds of each step; nan where a pass began."""
    tail = laps.tail / max(1, len(laps.calls))
    steps = array("d", (wait + call + tail for wait, call in zip(laps.waits, laps.calls, strict=True)))
    for place in laps.fresh:
        steps[place] = math.nan
    return tuple(steps)
