"""The experiment: a training step is tried with one thing taken away at a time, and Evidence is what comes out."""

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.diagnosis.evidence import Arm, Evidence, Inside, Interval, Loading, RankEvidence, Stalls
from workbench.diagnosis.stalls import Call, find_stalls
from workbench.measure import arms, inside, loading
from workbench.measure.batches import padding_of, uses
from workbench.measure.blocks import Bench, DiagnoseError, length, paired
from workbench.measure.feed import Exhausted, Feed
from workbench.measure.found import Found, describe
from workbench.measure.gradients import reductions
from workbench.measure.keep import Keep
from workbench.measure.noise import Meter
from workbench.measure.peers import Peers
from workbench.measure.replay import versions
from workbench.measure.rounds import SHORT, Rounds
from workbench.measure.subject import autocast_seen, check, device_of, dtype_of, look_around, samples_of, weights_of
from workbench.measure.trials import NARROW, PAIRS, Trials, has_convolutions, treatments

SHARES = {"warm-up": 0.1, "rounds": 0.4, "inside": 0.5, "loading": 0.6, "trials": 0.9}
"""Until which fraction of the budget each part may go on, at most."""
LOADING_SECONDS, INSIDE_SECONDS = 5.0, 2.0
"""Most that these parts take of a large budget."""
CHEAP, CHEAP_SECONDS = 0.08, 2.0
"""Fraction of the step below which nobody would change the loader, and how long is looked at it then."""
CLEAR, ROUGHLY = 0.25, 0.12
"""A loader that costs more than CLEAR of the step is to blame: then, it does not matter whether it costs ROUGHLY more or less."""
SLOW = 0.7
"""Seconds: such steps are traced once."""
CALLS = 120
"""So many calls of step() should be seen, for stalls to show, unless they take more than a third of the budget."""
STALLS = 3
"""Stalls that are waited for once one was seen, for half of the budget at most."""
ALONE = ("alone", "no_sync")
"""Arms in which no rank waits for another."""
NOT_FOR_STALLS = ("warm-up", "loader", "first", "threads=")
"""Arms whose calls vary for reasons of their own: more threads than cores wait for each other."""
MOST_CALLS = 20_000
"""No more calls are searched for stalls: the last ones."""
MOST_STEPS = 400
"""Steps of the timeline of each rank that are kept."""


def experiment(
    step: Callable[[Any], Any],
    loader: Any,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    budget_s: float = 60.0,
    accumulation: int = 1,
) -> Evidence:
    """Find out what holds a training step up, by experiments in this process. Everything is left as it was.

    Where a process group is initialised, all of its ranks have to call it: they take part together.

    Args:
        step: `step(batch)` does one optimizer step. With `accumulation` it gets a tuple of so many batches.
        loader: gives the batches; a DataLoader or any iterable.
        model: the module that is trained, or several; None = those that the step's closure, `self` or globals hold.
        optimizer: likewise.
        budget_s: seconds that it may take, about.
        accumulation: batches per step.

    Returns:
        What was found out; the same on all ranks.

    Raises:
        DiagnoseError: step() cannot be called so, or raised an error.
        ValueError: the loader is empty, or is none.
    """
    check(step, budget_s, accumulation)
    notes: list[str] = []
    found = look_around(step, model, optimizer, loader, notes)
    with Peers.join() as peers, contextlib.ExitStack() as undo:
        keep = Keep(found)
        undo.callback(keep.restore)
        feed = undo.enter_context(Feed(loader, accumulation))
        bench = undo.enter_context(Bench(step, peers, device_of(found.models)))
        undo.enter_context(arms.schedules_at_rest(found.objects))
        if peers.world_size > 1 and max(peers.gather(feed.kind == "once")):
            raise DiagnoseError(
                "the loader can be read only once, and there are several ranks: if it ended on one of them, the others would wait for it "
                "for ever. Give a list, a DataLoader or another iterable that can be read again"
            )
        try:
            return _Experiment(bench, feed, keep, found, budget_s, notes).run()
        except Exhausted:
            raise DiagnoseError(too_few(feed)) from None


def too_few(feed: Feed) -> str:
    """The complaint about a loader that ended before anything was known."""
    return (
        f"the loader could be read only once, and gave {feed.batches} batches: too few to compare anything. Give a list, a "
        "DataLoader or another iterable that can be read again, or a generator of at least 30 batches"
    )


class _Experiment:
    """One experiment, on one rank. All ranks take the same way through it, by figures on which they agree."""

    def __init__(self, bench: Bench, feed: Feed, keep: Keep, found: Found, budget: float, notes: list[str]) -> None:
        self.bench, self.feed, self.keep, self.found, self.budget, self.notes = bench, feed, keep, found, budget, notes
        self.models, self.optimizers = found.models, found.optimizers
        self.peers = bench.peers
        self.precision = "fp32"
        self.samples: int | None = None
        self.rounds: Rounds
        self.trials: Trials
        self.inside: Inside | None = None
        self.loading: Loading | None = None

    def run(self) -> Evidence:
        """All of it."""
        meter = self.meter = Meter()
        try:
            self._warm_up()
            self._rounds()
            cached = self.bench.timings.typical("cached")
            self._look_inside(cached)
            self._probe_loader()
            self._trials(self.bench.timings.typical("full"))
            self._wait_for_stalls(cached)
            gradients = reductions(self.models, self.peers) if self.peers.world_size > 1 else None
            self.bench.tick()
            return replace(self._evidence(), noise=meter.noise(self._spread()), gradients=gradients)
        finally:
            meter.close()

    def _until(self, part: str) -> float:
        return SHARES[part] * self.budget

    # The parts

    def _warm_up(self) -> None:
        """First steps, until they do not get shorter any more; what can be seen of the step on the way."""
        batch = self.feed.next()
        self.samples = samples_of(batch, self.feed.accumulation)
        self.padding = padding_of(batch if self.feed.accumulation == 1 else batch[0])
        before = versions(batch)
        with autocast_seen(self.models, self.bench.device) as precisions:
            self.bench.warm([batch], self._watching_use(batch))
            written = versions(batch) != before
            times = [self._warm_step(first=batch, written=written)]
            while len(times) < 3 or (times[-1] < 0.8 * times[-2] and len(times) < 20):
                times.append(self._warm_step())
                if self.bench.tick() > self._until("warm-up"):
                    break
        self.precision = precisions[-1] if precisions else dtype_of(self.models)
        self.rounds = Rounds(self.bench, self.feed, self.keep, self.models, self.optimizers, written=written)

    def _watching_use(self, batch: Any) -> Callable[[Any], Any]:
        """The step, for once with an eye on whether it uses its batch."""

        def step(batch: Any) -> Any:
            if uses(self.bench.step, batch) is False:
                self.notes.append("step() does not use its batch: what the loader gives makes no difference to it")

        return step

    def _warm_step(self, first: Any = None, written: bool = False) -> float:
        source = [first] if first is not None and not written else [self.feed.next()]
        block = self.bench.run("warm-up", source, 1)
        if any(not laps.calls for laps in block.laps):
            raise Exhausted
        return max(laps.calls[0] + laps.tail for laps in block.laps)

    def _rounds(self) -> None:
        """The full loop, the loader alone and the cached step, until it is clear what the loader costs."""
        rounds, bench = self.rounds, self.bench
        rounds.prepare(self.budget / 8)
        while True:
            rounds.turn()
            if max(self.peers.gather(self.feed.exhausted)) or bench.elapsed + rounds.cost > self._until("rounds"):
                break
            pairs = self._pairs("full", "cached")
            if len(pairs) >= PAIRS and _clear(Arm(name="cached", baseline="full", pairs=pairs).saved):
                break
        if not rounds.watched:
            rounds.clocked(50)
        self._note_the_loader()

    def _note_the_loader(self) -> None:
        feed = self.feed
        if not self._pairs("full", "cached"):
            raise DiagnoseError(too_few(feed))
        if feed.kind == "once":
            self.notes.append(
                f"the loader can be read only once: {feed.batches} batches of it were used up and are gone, so what depends on the loader "
                f"comes from {len(self._pairs('full', 'cached'))} pairs of short blocks; a DataLoader, or a list, tells more"
            )
        elif feed.epoch == 1:
            self.notes.append("the loader has one batch: each step begins a new pass over it, and pays for that")

    def _look_inside(self, cached: float) -> None:
        """A short trace of the cached step."""
        bench, replay = self.bench, self.rounds.replay
        self.rounds.settle()
        seconds = min(INSIDE_SECONDS, max(0.0, self._until("inside") - bench.elapsed))
        traced, plain = inside.counts_for(cached, budget_s=seconds) if cached < SLOW else (1, 1)
        batches = chain.from_iterable(iter(lambda: replay.give(8), None))
        with bench.unsampled():
            self.inside, why = inside.look(
                lambda: bench.warm([next(batches)]),
                traced=traced,
                plain=plain,
                synchronize=bench.synchronize if bench.device.type == "cuda" else None,
                ranks=self.peers.world_size > 1,
            )
        self.notes += [why] if why else []
        bench.tick()

    def _probe_loader(self) -> None:
        """What making a batch takes: on rank 0, while the others rest."""
        costs = Arm(name="cached", baseline="full", pairs=self._pairs("full", "cached")).saved
        most = CHEAP_SECONDS if costs.high < CHEAP else LOADING_SECONDS
        seconds = min(most, max(1.0, self._until("loading") - self.bench.elapsed))
        if self.peers.rank == 0 and self.feed.exhausted:
            self.loading = Loading(kind="once", alone=self.bench.timings.typical("loader") / self.feed.accumulation)
        elif self.peers.rank == 0:
            self.loading, notes = loading.probe(self.feed.loader, self.feed, seconds)
            self.notes += notes
        self.bench.tick()

    def _trials(self, full: float) -> None:
        self.rounds.settle()
        self.trials = Trials(self.bench, self.rounds.replay, self.keep.rewind, full=full, alone=lambda: arms.without_reduction(self.models))
        gc_share = self.inside.gc / self.inside.step if self.inside and self.inside.step > 0 else 0.0
        some = treatments(
            self.models,
            self.optimizers,
            self.rounds.replay,
            device=self.bench.device,
            precision=self.precision,
            accumulation=self.feed.accumulation,
            world_size=self.peers.world_size,
            gc_share=self.peers.agree(gc_share),
            foreign=self.peers.agree(self.meter.noise().foreign),
        )
        everywhere = set[str].intersection(*(set(names) for names in self.peers.gather([one.name for one in some])))
        self.trials.run([one for one in some if one.name in everywhere], self._until("trials"))
        self.notes += self.trials.notes

    def _wait_for_stalls(self, cached: float) -> None:
        """More cached steps, where too few were seen, or one that stalled and no second one."""
        bench, replay = self.bench, self.rounds.replay
        count = replay.fitting(length(cached, 0.5, least=1))
        arm = arms.without_reduction(self.models) if self.peers.world_size > 1 else contextlib.nullcontext()
        name = "no_sync" if self.peers.world_size > 1 else "cached"
        with arm:
            while True:
                seen = max(self.peers.gather(self._outliers()))
                if seen and self.peers.world_size > 1:  # whose are they? A rank shows that only while it does not wait for the others
                    seen = max(self.peers.gather(len(self._stalls(self.peers.rank, only=ALONE).at))) or 1
                few = bench.called < CALLS and bench.elapsed < self.budget / 3
                if not few and (not 0 < seen < STALLS or bench.elapsed > self.budget / 2):
                    return
                bench.run(name, replay.give(count), count)

    # What they say

    def _outliers(self) -> int:
        return len(self._stalls(self.peers.rank).at)

    def _stalls(self, rank: int, only: tuple[str, ...] = ()) -> Stalls:
        """Those of one rank, among the calls of all arms but those that differ from step to step."""
        calls = [
            Call(number=block.first + i, seconds=laps.calls[i], arm=arm, delay=laps.delays[i], gc=laps.gcs[i])
            for arm, blocks in self.bench.timings.blocks.items()
            if not arm.startswith(NOT_FOR_STALLS) and (not only or arm in only)
            for block in blocks
            for laps in [block.laps[rank]]
            for i in range(len(laps.calls))
        ]
        calls.sort(key=lambda call: call.number)
        wait = _mean([wait for block in self.bench.timings.blocks.get("full", ()) for wait in block.laps[rank].waits])
        places = self.bench.sampler.places if rank == self.peers.rank else None
        return find_stalls(calls[-MOST_CALLS:], wait=wait, places=places)

    def _pairs(self, base: str, arm: str) -> tuple[tuple[float, float], ...]:
        """Neighbours of the rounds. What a new pass of the loader costs is spread over the steps of a pass."""
        timings, count = self.bench.timings, self.rounds.pairs
        extra = self._per_step_of_passes()
        left = [value + extra for value in timings.slowest(base)[:count]]
        right = [value + (extra if arm == "loader" else 0.0) for value in timings.slowest(arm)[:count]]
        return paired(left[: len(right)], right[: len(left)])

    def _per_step_of_passes(self) -> float:
        """Seconds per step that beginning new passes adds: blocks leave such steps out, or some would have one and others none."""
        if not SHORT <= self.rounds.steps_per_pass < math.inf:
            return 0.0
        waits = [
            block.laps[rank].waits[i]
            for rank in range(self.peers.world_size)
            for arm in ("full", "loader")
            for block in self.bench.timings.blocks.get(arm, ())
            for i in block.laps[rank].fresh
        ]
        usual = _mean([w for block in self.bench.timings.blocks.get("full", ()) for laps in block.laps for w in laps.waits])
        cost = (statistics.median(waits) if waits else self.feed.start_ups[0]) - usual
        return max(0.0, cost) / self.rounds.steps_per_pass

    def _spread(self) -> float:
        """Middle half over median of a cached block over the one before: slow changes do no harm to pairs of neighbours."""
        values = [value for value in self.bench.timings.slowest("cached") if value == value]
        ratios = [after / before for before, after in pairwise(values)]
        if len(ratios) < 4:
            return 0.0
        low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / mid / math.sqrt(2)

    def _evidence(self) -> Evidence:
        timings, peers = self.bench.timings, self.peers
        stalls = self._stalls(peers.rank)
        alone = self._stalls(peers.rank, only=ALONE) if peers.world_size > 1 else stalls
        mine = (self.rounds.timeline, stalls, alone, self.inside, self.loading, self.notes, self.samples)
        everyone = peers.gather(mine)
        timings.stalled = [frozenset(stalls.at) for _, stalls, *_ in everyone]
        together = max((stalls for _, stalls, *_ in everyone), key=lambda one: one.share)
        found = {
            "cached": Arm(name="cached", baseline="full", pairs=self._pairs("full", "cached")),
            "loader": Arm(name="loader", baseline="full", pairs=self._pairs("full", "loader")),
            **self.trials.results(),
        }
        steady = statistics.fmean(base for base, _ in found["cached"].pairs)
        _, _, _, look, load, _, _ = everyone[0]
        optimizers = [f"{describe(one)}({kind})" if (kind := arms.implementation_of(one)) else describe(one) for one in self.optimizers]
        weights = [weight for weight in weights_of(self.models) if weight.requires_grad]
        updated = {id(weight) for one in self.optimizers for group in one.param_groups for weight in group["params"]}
        samples = [one for *_, one in everyone if one is not None]
        return Evidence(
            step=steady / (1 - together.share) if together.share < 1 else steady,
            device=self.bench.device.type,
            world_size=peers.world_size,
            accumulation=self.feed.accumulation,
            threads=torch.get_num_threads(),
            samples=float(sum(samples)) if len(samples) == len(everyone) else None,
            parameters=sum(weight.numel() for weight in weights) if self.models else None,
            tensors=max(len(weights), len(updated)) if self.models or self.optimizers else None,
            convolutions=has_convolutions(self.models),
            optimizer=", ".join(optimizers) or None,
            precision=self.precision,
            arms=found,
            loading=load,
            inside=look,
            stalls=together,
            ranks=tuple(self._rank(rank, timeline, alone) for rank, (timeline, _, alone, *_) in enumerate(everyone)),
            padding=self.padding,
            seconds=self.bench.elapsed,
            steps=self.bench.called,
            notes=tuple(dict.fromkeys(note for *_, notes, _ in everyone for note in notes)),
        )

    def _rank(self, rank: int, timeline: Any, stalls: Stalls) -> RankEvidence:
        timings, parallel = self.bench.timings, self.peers.world_size > 1
        kept = timeline.steps[:MOST_STEPS]
        own, bare = ("alone", "no_sync") if parallel else ("full", "cached")
        return RankEvidence(
            rank=rank,
            timeline=replace(timeline, rank=rank, steps=kept, warmup=0),
            alone=_mean([row[rank] for row in timings.means(own)]) if own in timings.blocks else float("nan"),
            wait=_mean([wait for block in timings.blocks.get(own, ()) for wait in block.laps[rank].waits]),
            compute=_mean([row[rank] for row in timings.means(bare)]) if bare in timings.blocks else float("nan"),
            stalls=stalls,
        )


def _clear(saved: Interval) -> bool:
    """Is it known well enough what the loader costs?"""
    return saved.width <= NARROW or saved.high < CHEAP or (saved.low > CLEAR and saved.width <= ROUGHLY)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0
