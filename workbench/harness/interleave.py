"""Times the loader alone, the full loop and the same batches cached, interleaved in rounds, so that neighbours are compared."""

import contextlib
import math
import os
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from workbench.core import run_directory
from workbench.harness import ablations, device_clock
from workbench.harness.batches import MAX_CACHED, MAX_CACHED_VARIED, CachedBatches
from workbench.harness.blocks import MAX_PASS_SECONDS, Block, BlockTimer, common_length, no_step, steps_for
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.restore import SavedState
from workbench.timeline.timeline import Timeline
from workbench.timeline.watch import Watch

BLOCK_SECONDS, SHORT_BLOCK_SECONDS = 0.35, 0.25
"""Seconds of a block of the full loop, where steps are not longer than that: usually, and on one CPU whose loader has no queue that a block
begins with."""
LONGEST_BLOCK = 4
"""A block of a single process on a CPU ends, once it has taken so many times its planned seconds, after the step it is in. Chosen: equal
blocks on a busy machine differ by less. With half, blocks end early that noise makes longer; with twice, a block that was planned by steps
of a quiet moment takes up to 3 s."""
MIN_WATCHED_SECONDS = 1e-3
"""Shorter steps run without the clocks of `wb.watch`, except in a block of their own. Chosen: the clocks take 5 µs a step on the machine of
`FITTED_ON`, half a percent of it."""

STEPS_OF_ITERATOR = 6
"""Steps of a block of an iterator, whose batches cannot be read again."""
FEW_STEPS = 12
"""If there is time for no more steps than this, the first round counts: a round, a trace and a trial take 11 (counted)."""
MIN_STEPS_PER_PASS = 4
"""Where a pass over the loader has fewer steps, the start of a pass belongs to every block."""


class InterleavedRounds:
    """Runs and times the variants that need the loader."""

    def __init__(
        self,
        bench: BlockTimer,
        feed: Feed,
        saved: SavedState,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        written: bool,
    ) -> None:
        self.bench, self.feed, self.saved = bench, feed, saved
        self.replay = CachedBatches(written=written)
        self.pairs = 0
        """Rounds so far, each a pair of neighbouring blocks per variant."""
        self.steps = self.loads = self.warm = 1
        self._planned = math.inf
        """Seconds of a block, as long as steps take what they took in the first round."""
        self.whole_passes = False
        """Is a block of the full loop a whole number of passes?"""
        self.recent: deque[Any] = deque(maxlen=MAX_CACHED)  # more of them may hold too many of the workers' file descriptors
        self._models, self._optimizers = models, optimizers
        self._watches = {arm: _watch(_Source(self, arm), models, optimizers) for arm in ("full", "cached")}
        self._replayed: list[Any] = []
        self.watched = False

    @property
    def parallel(self) -> bool:
        """Do several ranks train together?"""
        return self.bench.peers.world_size > 1

    @property
    def timeline(self) -> Timeline:
        """The steps of the full loop on this rank, as the clocks of `wb.watch` saw them."""
        return self._watches["full"].timeline

    def prepare(self, most: float, left: float) -> float:
        """A first round, to see how long blocks should be, in about `most` seconds at most. It is not counted, unless there is time for no
        more than FEW_STEPS. A round that takes longer than what is `left` has as few steps as possible.

        Returns:
            Seconds of a full step.
        """
        bench, feed = self.bench, self.feed
        workers = max(1, feed.num_workers)
        self.drain()
        counts = not self.parallel and FEW_STEPS * bench.timings.typical("warm-up") > left
        load = self.load(1, arm="loader" if counts else "first loader")
        quick = max(bench.timings.typical(load.arm), bench.timings.typical("warm-up") / 4) <= most / 8
        few = 2 if quick and not counts else 1
        self.recent.clear()
        self.watched = counts
        full = self.full(few, arm="full" if counts else "first full")
        step, alone = bench.timings.typical(full.arm), bench.timings.typical(load.arm)
        self.watched = step >= MIN_WATCHED_SECONDS
        least = 4 if step < 0.25 else 3 if step < 0.7 else 2 if step < 1.5 else 1
        whole = workers if workers * step < 3 * BLOCK_SECONDS else 1
        per_pass = common_length(self.steps_per_pass, bench.peers) if device_clock.is_asynchronous(bench.device) else math.inf
        self.whole_passes = per_pass * step <= MAX_PASS_SECONDS
        behind = feed.queue or self.parallel or device_clock.is_asynchronous(bench.device)
        block = BLOCK_SECONDS if behind else SHORT_BLOCK_SECONDS
        self.steps = steps_for(step, block, least=least, multiple=int(per_pass) if self.whole_passes else whole)
        some = (min(least, 3), workers if workers * alone < 2 * BLOCK_SECONDS else 1) if feed.queue else (1, 1)
        self.loads = steps_for(alone, block / 2, least=some[0], most=self.steps, multiple=some[1])
        long = 0.05 if bench.device.type == "cpu" else 0.25
        self.warm = 0 if least == 1 else max(1 if step > long else 2, whole if feed.queue and self.steps > whole else 1)
        if feed.kind == "once":
            self.steps, self.loads, self.warm = min(self.steps, STEPS_OF_ITERATOR), 1, 1
        if self._seconds(step, alone) > left:
            self.steps, self.loads, self.warm = int(per_pass) if self.whole_passes else 1, 1, 0
        self.cost = self._seconds(step, alone)
        """Seconds of a round, about."""
        if bench.device.type == "cpu" and not self.parallel:  # ranks have to take equally many steps
            self._planned = max(block, self.steps * step, self.loads * alone)
        self._agree_on_start_up()
        return step

    def _seconds(self, step: float, alone: float) -> float:
        return self.steps * 2 * step + self.loads * alone + self.warm * 2 * step

    def _agree_on_start_up(self) -> None:
        starts = self.feed.start_ups[1:] or self.feed.start_ups  # the very first imports, and fills caches
        self.start_up = self.bench.peers.agree(statistics.median(starts) if starts else 0.0)
        """Seconds from a new pass to its first batch, on the slowest rank."""

    def turn(self) -> None:
        """One round. Blocks with and without the loader swap places each time, unless batches differ in shape: then the same are used."""
        begun = self.bench.clock()
        self.saved.restore_weights()
        varied = self.bench.peers.agree(self.replay.varied)  # ranks have batches of their own, and have to keep one order
        swapped = self.pairs % 2 == 1 and not varied and self.feed.kind != "once"
        if not self.pairs and self.bench.timings.blocks.get("full"):
            self._hold()
            self._without_loader(swapped)
        else:
            for part in (self._without_loader, self._with_loader) if swapped else (self._with_loader, self._without_loader):
                part(swapped)
        self._agree_on_start_up()
        self.pairs += 1
        if math.isfinite(self._planned):
            self.cost = max(self.cost, self.bench.clock() - begun)

    def passes(self) -> int:
        """How many passes over the loader have begun, unless they are so short that every block has some."""
        return self.feed.passes if self.steps_per_pass >= MIN_STEPS_PER_PASS else 0

    @property
    def steps_per_pass(self) -> float:
        """Steps from one beginning of the loader to the next; infinite if none was seen."""
        return self.feed.epoch // self.feed.accumulation if self.feed.epoch else float("inf")

    def _with_loader(self, swapped: bool) -> None:
        with contextlib.suppress(Exhausted):
            self.drain()
            self.load(self.loads)
            self.bench.warm(self._taken(self.warm))
        if self.feed.kind != "once":
            self.recent.clear()
        kinds = ("alone", "full") if swapped else ("full", "alone")
        for kind in kinds if self.parallel else ("full",):
            if kind == "full":
                self.full(self.steps)
            else:
                with ablations.without_reduction(self._models):
                    self.bench.warm(self._taken(1))
                    self.full(self.steps, arm="alone")
        if not swapped or not len(self.replay):
            self._hold()

    def _hold(self) -> None:
        """Cache batches: the ones just trained on, or fresh ones if the step writes into its batch. Nothing is timed meanwhile."""
        if self.replay.written:
            with contextlib.suppress(Exhausted):
                for _ in range(min(self.steps, MAX_CACHED)):
                    self.recent.append(self.feed.next())
        self.replay.hold(list(self.recent))
        if self.replay.varied and self.recent.maxlen != MAX_CACHED_VARIED:
            self.recent = deque(self.recent, maxlen=MAX_CACHED_VARIED)

    def _without_loader(self, swapped: bool) -> None:
        self.settle()
        self.cached(self.bench.peers.agree(self.replay.fitting(self.steps), min))

    # Blocks

    def load(self, count: int, arm: str = "loader") -> Block:
        """Batches, and nothing is done with them."""
        return self.bench.run(arm, self._taken(count), count, step=no_step, passes=self.passes)

    def full(self, count: int, arm: str = "full") -> Block:
        source: Any = self._watches["full"] if self.watched and arm == "full" else self._taken(count)
        return self.bench.run(arm, source, count, passes=int if self.whole_passes else self.passes)

    def cached(self, count: int) -> Block:
        """The batches of the last full block, again."""
        self.bench.warm(self.replay.give(self.warm))
        self._replayed = self.replay.give(count)
        return self.bench.run("cached", self._watches["cached"] if self.watched else self._timely(self._replayed), count)

    def clocked(self, count: int) -> None:
        """A block of full steps for the clocks of `wb.watch` only, where they would have disturbed the other blocks."""
        if not self.watched:
            self.watched = True
            self.full(count)
            self.watched = False
            self.bench.timings.blocks["full"].pop()

    def _timely(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, until they take LONGEST_BLOCK times as long as was planned."""
        begun = self.bench.clock()
        for batch in batches:
            yield batch
            if self.bench.clock() - begun > LONGEST_BLOCK * self._planned:
                return

    def _taken(self, count: int) -> Iterator[Any]:
        for _ in self._timely(range(count)):
            batch = self.feed.next()
            if not self.replay.written:
                self.recent.append(batch)
            yield batch

    def source(self, arm: str) -> Iterator[Any]:
        """What a watched loop is given."""
        return self._timely(self._replayed) if arm == "cached" else self._taken(self.steps)

    def drain(self) -> None:
        """Take the batches that are ready in the loader's queue."""
        self.feed.drain()

    def settle(self) -> None:
        """Wait until the loader's queue is full, so that its workers rest."""
        if self.bench.timings.blocks.get("loader"):
            self.feed.wait_until_full(self.bench.timings.typical("loader"))


class _Source:
    """The loader of a watched loop: what the rounds give it."""

    def __init__(self, rounds: InterleavedRounds, arm: str) -> None:
        self._rounds, self._arm = rounds, arm

    def __iter__(self) -> Iterator[Any]:
        return self._rounds.source(self._arm)


def _watch(source: _Source, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> "Watch[Any]":
    with _no_run_directory():
        return Watch(source, model=list(models), optimizer=list(optimizers))


@contextlib.contextmanager
def _no_run_directory() -> Iterator[None]:
    """Inside, no run directory is set: the steps of an experiment do not belong into a rank's file."""
    before = os.environ.pop(run_directory.ENV_RUN_DIR, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[run_directory.ENV_RUN_DIR] = before
