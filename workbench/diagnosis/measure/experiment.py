"""Runs the experiments on a training step: takes away one part at a time and returns Evidence."""

import contextlib
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.core import units
from workbench.core.gpu_load import GpuLoad, load_nvml
from workbench.core.machine_speeds import Machine, MachineSpeeds, slowness
from workbench.core.statistics import LOOKS, Interval, repeated_interval
from workbench.core.system_load import LoadMeter, Noise
from workbench.diagnosis.analysis.costs import CHEAP_LOADER, MAX_OPTIMIZER_COST
from workbench.diagnosis.analysis.evidence import SMALL_OP, TRACE, Evidence, Inside, Loading, what_changes
from workbench.diagnosis.analysis.stalls import is_loose, is_open, stalled_at_least
from workbench.diagnosis.measure import inside, loading
from workbench.diagnosis.measure.evidence import EvidenceBuilder, measure_gradients, new_pages_note, repeated_of, tables_of
from workbench.diagnosis.measure.trials import (
    CLEAR_INTERVAL,
    FEW_PAIRS,
    MIN_BLAMED_SAVING,
    NARROW_INTERVAL,
    Trials,
    has_too_many_threads,
    reaching,
    treatments,
)
from workbench.harness import ablations
from workbench.harness.ablations import Variant
from workbench.harness.blocks import BlockTimer, DiagnoseError, steps_for
from workbench.harness.discover import ReachableState
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.interleave import InterleavedRounds
from workbench.harness.measure_speeds import GLOO, HOST, machine_speeds
from workbench.harness.observe import StepFacts, check_arguments, discover_training, run_first_steps, timed_device_of
from workbench.harness.peers import Peers
from workbench.harness.restore import SavedState

BUDGET_SHARES = {"warm-up": 0.1, "rounds": 0.4, "inside": 0.5, "loading": 0.6, "trials": 0.9}
"""Until which fraction of the budget each part may go on, at most."""
LOADING_SECONDS, INSIDE_SECONDS, INSIDE_DEVICE_SECONDS = 3.0, 0.9, 1.2
"""Most that these parts take of a large budget: the loader, and a look inside the step on a CPU and on a device."""
HIDDEN_LOADER_SECONDS, CHEAP_LOADER_SECONDS = 1.0, 0.5
"""Seconds for which the loader is probed where it adds no more than CHEAP_LOADER to the step, and where all of its work is no more."""
BLAMED = 0.15
"""Fraction of the step from which on the loader, or stalls, are to blame; see `diagnosis.analysis.verdict.USUAL`."""
SLOW_STEP, LOOK_CALLS = 0.7, 7
"""Seconds: such steps are traced once. So are those of which the calls of a usual look take twice the time that is left for it."""
LOOK_LEAST, TRY_LEAST = 4, 3
"""Calls of step() that a look inside takes at the least, and those to try one variant of a step of a second or more. Counted."""
LATE_SECONDS = 0.5
"""What begins may probably end so many seconds after the budget. Chosen. With half, more is left out of diagnoses with small budgets; with
twice, they exceed their budgets further."""
LOADING_SHARE = 0.1
"""Fraction of the budget in which the loader may be probed, even where it is over. Chosen: it is known for little else whether workers are
missing."""
MIN_CALLS = 120
"""So many calls of step() should be seen, for stalls to show, unless they take more than a third of the budget."""
STALLS_UNTIL, OWNERS_UNTIL = 0.5, 0.75
"""Fractions of the budget until which more stalls are waited for: so that their share gets clear, and to see which rank has them."""


def experiment(
    step: Callable[[Any], Any],
    loader: Any,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    budget_s: float = 60.0,
    accumulation: int = 1,
    progress: Callable[[str, str], object] | None = None,
) -> Evidence:
    """Find out what limits a training step, by experiments in this process. Everything is restored afterwards.

    Where a process group is initialised, all of its ranks have to call it: they take part together.

    Args:
        step: `step(batch)` does one optimizer step. With `accumulation` it gets a tuple of so many batches.
        loader: gives the batches; a DataLoader or any iterable.
        model: the module that is trained, or several; None = those that the step's closure, `self` or globals hold.
        optimizer: what updates it, or several; None = found in the same places.
        budget_s: seconds that it may take, about.
        accumulation: batches per step.
        progress: called with what is tried now, and what is known so far.

    Returns:
        The evidence, the same on all ranks. After Ctrl-C, that of the experiments so far, if the loader was tried; of several ranks only
        where it is `progress` that raises the KeyboardInterrupt, at which all of them stop together.

    Raises:
        DiagnoseError: step() cannot be called with a batch, or raised an error.
        ValueError: the loader is empty, or cannot be iterated over.
    """
    check_arguments(step, budget_s, accumulation)
    notes: list[str] = []
    objects = discover_training(step, model, optimizer, loader, notes)
    with Peers.join() as peers, contextlib.ExitStack() as undo:
        budget_s = peers.agree(budget_s, min)  # what is left of it may differ
        keep = SavedState(objects)
        undo.callback(keep.restore)
        feed = undo.enter_context(Feed(loader, accumulation))
        bench = undo.enter_context(BlockTimer(step, peers, timed_device_of(objects.models)))
        undo.enter_context(ablations.frozen_schedules(objects.objects))
        if peers.world_size > 1 and max(peers.gather(feed.kind == "once")):
            raise DiagnoseError(
                "the loader can be read only once, and there are several ranks: if it ended on one of them, the others would wait for it "
                "for ever. Give a list, a DataLoader or another iterable that can be read again"
            )
        try:
            return _Experiment(bench, feed, keep, objects, budget_s, notes, progress).run()
        except Exhausted:
            raise DiagnoseError(too_few(feed)) from None


def too_few(feed: Feed) -> str:
    """The error about a loader that ended before anything was known."""
    return (
        f"the loader could be read only once, and gave {feed.batches} batches: too few to compare anything. Give a list, a "
        "DataLoader or another iterable that can be read again, or a generator of at least 30 batches"
    )


def _gpu_load(device: torch.device) -> GpuLoad | None:
    """What to ask for what else happens on a device, from now on; None where that is no GPU of NVIDIA's with a name."""
    if device.type != "cuda" or torch.version.hip:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return GpuLoad(f"GPU-{uuid}", nvml=load_nvml()) if uuid else None


def _allocator_retries(device: torch.device) -> int:
    """How often PyTorch's allocator has given back its cached memory because no more was left."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


class _StopTogether(KeyboardInterrupt):
    """Ctrl-C, of which all ranks know at the same point."""


class _Experiment:
    """One experiment, on one rank. All ranks take the same decisions, by figures on which they agree."""

    def __init__(
        self,
        bench: BlockTimer,
        feed: Feed,
        keep: SavedState,
        objects: ReachableState,
        budget: float,
        notes: list[str],
        progress: Callable[[str, str], object] | None,
    ) -> None:
        self.bench, self.feed, self.keep, self.found, self.budget, self.notes = bench, feed, keep, objects, budget, notes
        self.progress = progress or (lambda now, known: None)
        self.models, self.optimizers = objects.models, objects.optimizers
        self.peers = bench.peers
        self.seen: StepFacts
        self.rounds: InterleavedRounds
        self.sums: EvidenceBuilder
        self.trials: Trials | None = None
        self.inside: Inside | None = None
        self.loading: Loading | None = None
        self.retries = 0.0
        self.speeds: MachineSpeeds | None = None
        self.too_short = ""
        self.left_out = list[str]()
        self.enough = 0.0

    def run(self) -> Evidence:
        with self.bench.unsampled():  # the sampler slows Python down
            self.speeds = speeds_for(self.peers, self.bench.device, self.budget)
        self.notes += self.speeds.notes
        meter = self.meter = LoadMeter()
        gpu = _gpu_load(self.bench.device) if self.peers.rank == 0 else None
        try:
            self._warm_up()
            try:
                self._rounds()
                cached = self.bench.timings.typical("cached")
                self._try_fewer_threads()
                self._look_inside(cached)
                self._probe_loader()
                self._wait_for_stalls(cached, calls=0)
                self._try_variants(cached)
                self._wait_for_stalls(cached, calls=MIN_CALLS)
            except KeyboardInterrupt as stop:  # of one rank alone: the others wait for it somewhere
                if not self.rounds.pairs or (self.peers.world_size > 1 and not isinstance(stop, _StopTogether)):
                    raise
                self.notes.append(f"stopped by Ctrl-C after {units.seconds(self.bench.tick())}: this is the result so far")
            self.notes += new_pages_note([block.laps[self.peers.rank] for block in self.bench.timings.blocks["cached"]])
            reduced = self.peers.world_size > 1 and ablations.can_skip_reduction(self.models)
            gradients = measure_gradients(self.models, self.peers) if reduced else None
            self.bench.tick()
            evidence = self.sums.evidence(
                self.found,
                tried=self.trials.results() if self.trials else {},
                inside=self.inside,
                loading=self.loading,
                samples=self.seen.samples,
                micro_batches=self.seen.micro_batches,
                precision=self.seen.precision,
                padding=self.seen.padding,
                tables=tables_of(self.seen.tables),
                repeated=repeated_of(self.seen),
                notes=self.notes,
            )
            noise, retries = meter.noise(self.sums.spread(), gpu.notes() if gpu else ()), self.peers.agree(self.retries)
            evidence = replace(evidence, noise=noise, gradients=gradients, alloc_retries=retries, speeds=self.speeds)
            if not self.left_out:
                return evidence
            evidence = replace(evidence, left_out=tuple(self.left_out), enough=math.ceil(self.enough))
            shortage = (
                f"with steps of {units.seconds(evidence.step)} {evidence.shortage}: budget_s={evidence.enough} would probably suffice"
            )
            return replace(evidence, notes=(*evidence.notes, shortage))
        finally:
            meter.close()

    def _say(self, now: str) -> None:
        """Tell what is tried now, and what saves most of all that was tried. Collective."""
        known = {"no loader": saved_by_caching(self.sums.arm("cached").pairs)} if self.rounds.pairs > 1 else {}
        if self.trials:
            known |= {what_changes(name): self.trials.saved(name) for name in self.trials.tried}
        stop = False
        now = f"{now} ({self.too_short})" if self.too_short else now
        try:
            self.progress(now, max(((saved.mid, as_words(what, saved)) for what, saved in known.items()), default=(0.0, ""))[1])
        except KeyboardInterrupt:
            stop = True
        if any(self.peers.gather(stop)):
            raise _StopTogether

    # The parts

    def _warm_up(self) -> None:
        """Take the first steps, and observe the step meanwhile."""
        self.progress("the first steps", "")
        self.seen = run_first_steps(self.bench, self.feed, self.keep, self.found, BUDGET_SHARES["warm-up"] * self.budget, self.notes)
        self.rounds = InterleavedRounds(self.bench, self.feed, self.keep, self.models, self.optimizers, written=self.seen.written)
        self.sums = EvidenceBuilder(self.bench, self.feed, self.rounds)

    def _rounds(self) -> None:
        """The full loop, the loader alone and the cached step, until it is clear what the loader costs."""
        rounds, bench = self.rounds, self.bench
        step = rounds.prepare(self.budget / 8, self.budget - bench.elapsed)
        if (least := bench.elapsed + rounds.cost + (LOOK_LEAST + TRY_LEAST) * step) > self.budget:
            self.too_short = (
                f"with steps of {units.seconds(step)}, not all experiments fit: the first of each kind take about {units.seconds(least)}"
            )
        retries, called = _allocator_retries(bench.device), bench.called
        while True:
            self._say("no loader")
            rounds.turn()
            if max(self.peers.gather(self.feed.exhausted)) or bench.elapsed + rounds.cost > BUDGET_SHARES["rounds"] * self.budget:
                break
            pairs, loads = self.sums.arm("cached").pairs, self.sums.arm("loader").pairs
            cheap = self.feed.kind == "DataLoader" and not self.feed.queue and max(load / full for full, load in loads) < CHEAP_LOADER
            if self.peers.agree(_is_decided(pairs, least=self._few_pairs(), cheap=cheap), all):  # passes may have other lengths elsewhere
                break
        if not rounds.watched:
            rounds.clocked(50)
        self.retries = (_allocator_retries(bench.device) - retries) / max(1, bench.called - called)
        self._note_the_loader()

    def _few_pairs(self) -> int:
        """Pairs that are enough where their interval is clear.

        More, where it has to be known as well which rank is slow or what stalls, and on a device, whose blocks depend on what is queued.
        """
        several = self.peers.world_size > 1 or self.bench.device.type != "cpu"
        return FEW_PAIRS if several or self.sums.stalls().at else 2

    def _note_the_loader(self) -> None:
        feed = self.feed
        if not self.sums.pairs("full", "cached"):
            raise DiagnoseError(too_few(feed))
        if feed.kind == "once":
            self.notes.append(
                f"the loader can be read only once: {feed.batches} batches of it were used up and are gone, so what depends on the loader "
                f"comes from {len(self.sums.pairs('full', 'cached'))} pairs of short blocks; a DataLoader, or a list, tells more"
            )
        elif feed.epoch == 1:
            self.notes.append("the loader has one batch: each step begins a new pass over it, and pays for that")

    def _look_inside(self, cached: float) -> None:
        """A short trace of the cached step."""
        if self.bench.elapsed + LOOK_LEAST * cached > self.budget + LATE_SECONDS:
            self.left_out.append(TRACE)
            return
        self._say("a trace of a step")
        bench, replay = self.bench, self.rounds.replay
        self.rounds.settle()
        most = INSIDE_SECONDS if bench.device.type == "cpu" else INSIDE_DEVICE_SECONDS
        seconds = min(most, max(0.0, BUDGET_SHARES["inside"] * self.budget - bench.elapsed))
        short = cached < SLOW_STEP and LOOK_CALLS * cached < 2 * max(seconds, 0.1)
        traced, plain = inside.step_counts(cached, budget_s=seconds) if short else (1, 1)
        batches = chain.from_iterable(iter(lambda: replay.give(8), None))
        with bench.unsampled():
            self.inside, why = inside.look(
                lambda: bench.warm([next(batches)]),
                traced=traced,
                plain=plain,
                synchronize=bench.synchronize if bench.device.type == "cuda" else None,
                ranks=self.peers.world_size > 1,
                short=SMALL_OP * slowness(self.speeds, "dispatch"),
            )
        self.notes += [why] if why else []
        bench.tick()

    def _probe_loader(self) -> None:
        """What making a batch takes: on rank 0, while the others rest."""
        self._say("the loader by itself")
        adds, works = self.sums.arm("cached").saved.mid, 1 - self.sums.arm("loader").saved.high
        most = LOADING_SECONDS if adds > CHEAP_LOADER else HIDDEN_LOADER_SECONDS if works > CHEAP_LOADER else CHEAP_LOADER_SECONDS
        left = self.budget - self.bench.elapsed
        seconds = min(most, max(min(1.0, left), LOADING_SHARE * self.budget, BUDGET_SHARES["loading"] * self.budget - self.bench.elapsed))
        if self.peers.rank == 0 and self.feed.exhausted:
            self.loading = Loading(kind="once", alone=self.bench.timings.typical("loader") / self.feed.accumulation)
        elif self.peers.rank == 0:
            self.loading, notes = loading.probe(self.feed.loader, self.feed, seconds)
            self.notes += notes
        self.bench.tick()

    def _try_fewer_threads(self) -> None:
        """Prepare the trials; where other processes take the cores, begin with fewer threads, before anything else takes the time."""
        self.trials = trials = Trials(
            self.bench,
            self.rounds.replay,
            self.keep.restore_weights,
            full=self.bench.timings.typical("full"),
            alone=lambda: ablations.without_reduction(self.models),
            late=self.budget + LATE_SECONDS,
        )
        trials.begun = lambda name: self._say(what_changes(name))
        noise = self.meter.noise()
        if self.bench.device.type == "cpu" and has_too_many_threads(noise, self.peers.world_size):
            first = self._possible_variants(noise)[0]
            if trials.fits(first):
                self.rounds.settle()
                trials.run([first], BUDGET_SHARES["inside"] * self.budget)

    def _possible_variants(self, noise: Noise, gc_share: float = 0.0, optimizer: float = 1.0) -> list[Variant]:
        return treatments(
            self.models,
            self.optimizers,
            self.rounds.replay,
            device=self.bench.device,
            precision=self.seen.precision,
            micro_batches=self.seen.micro_batches,
            world_size=self.peers.world_size,
            gc_share=gc_share,
            optimizer_share=optimizer,
            noise=noise,
        )

    def _try_variants(self, cached: float) -> None:
        assert self.trials
        self.rounds.settle()
        trials, full = self.trials, self.bench.timings.typical("full")
        look = self.inside if self.inside and self.inside.step > 0 else None
        gc_share, optimizer = look.gc / look.step if look else 0.0, 1.0
        if look and look.optimizer is not None and self.bench.device.type == "cpu":
            optimizer = MAX_OPTIMIZER_COST * look.optimizer / look.step * cached / full
        optimizer = self.peers.agree(optimizer)
        known = (saved_by_caching(self.sums.arm("cached").pairs).low, stalled_at_least(self.sums.stalls()))
        trials.lead = self.peers.agree(max((low for low in known if low > BLAMED), default=0.0), min)
        trials.few, trials.most = self._few_pairs(), {"no_optimizer": optimizer}
        some = self._possible_variants(self.meter.noise(), self.peers.agree(gc_share), optimizer)
        some, note = reaching(some, self.seen.replays)
        self.notes += [note] if note else []
        everywhere = set[str].intersection(*(set(names) for names in self.peers.gather([treatment.name for treatment in some])))
        everywhere -= set() if self.seen.reduces else {"no_sync"}  # it would say that communication costs nothing
        there = [treatment for treatment in some if treatment.name in everywhere and treatment.name not in trials.tried]
        trials.run(there, BUDGET_SHARES["trials"] * self.budget, share=BUDGET_SHARES["trials"])
        self.notes += trials.notes
        self.enough = max(trials.enough, self.bench.elapsed) + LOOK_LEAST * cached * len(self.left_out)
        self.left_out += trials.left_out

    def _wait_for_stalls(self, cached: float, calls: int) -> None:
        """More cached steps: until so many calls were seen, and it is clear what stalls cost and which ranks have them.

        Of several ranks, steps in which none waits for another: only these show whose the stalls are.
        """
        bench, replay = self.bench, self.rounds.replay
        alone = self.peers.world_size > 1 and ablations.can_skip_reduction(self.models)
        arm = ablations.without_reduction(self.models) if alone else contextlib.nullcontext()
        name, until = ("no_sync", OWNERS_UNTIL) if alone else ("cached", STALLS_UNTIL)
        count = replay.fitting(steps_for(cached, 0.5, least=1))
        self._say("more steps, to look for stalls")
        with arm:
            while True:
                everyone = self.peers.gather((self.sums.stalls(), self.sums.stalls(alone=True) if alone else None))
                stalls = max((stalls for stalls, _ in everyone), key=lambda stalls: stalls.share)
                few = (bench.called < calls or (calls and is_loose(stalls))) and bench.elapsed < self.budget / 3
                if not few and not (is_open(stalls, [own for _, own in everyone if own]) and bench.elapsed < until * self.budget):
                    return
                bench.run(name, replay.give(count), count)


def saved_by_caching(pairs: Sequence[tuple[float, float]], *, looks: int = LOOKS) -> Interval:
    """What cached batches save of the full step, as an interval that may be looked at after each pair; see `repeated_interval`."""
    known = [math.log(cached / full) for full, cached in pairs if full > 0 < cached]
    return repeated_interval(known or [0.0], looks=looks).of(lambda ratio: 1 - math.exp(ratio))


def as_words(what: str, saved: Interval) -> str:
    """What is saved by a change, in a few words. Without its range, which few pairs give too narrow: the result often lies outside.

    >>> as_words("no loader", Interval(low=0.55, mid=0.61, high=0.67))
    'no loader: 61 % less so far'
    >>> as_words("no loader", Interval(low=-0.2, mid=-0.15, high=-0.1))
    'no loader: 15 % more so far'
    >>> as_words("no optimizer step", Interval(low=0.1, mid=0.5, high=0.9))
    'no optimizer step: less, how much is not clear yet'
    >>> as_words("no optimizer step", Interval(low=-0.1, mid=0.3, high=0.7))
    'no optimizer step: not clear yet'
    """
    if saved.high - saved.low > MAX_TOLD_WIDTH and saved.low > 0:
        return f"{what}: less, how much is not clear yet"
    if saved.high - saved.low > MAX_TOLD_WIDTH:
        return f"{what}: not clear yet"
    return f"{what}: {100 * abs(saved.mid):.0f} % {'less' if saved.mid >= 0 else 'more'} so far"


def _is_decided(pairs: Sequence[tuple[float, float]], *, least: int = 2, cheap: bool = False) -> bool:
    """Is it clear whether the loader is to blame, and if so, what it costs? After LOOKS, more would not make it so.

    Where it is cheap, since making batches while training waits takes next to nothing, what cached batches seem to save is noise.
    """
    if not least <= len(pairs) < LOOKS:
        return len(pairs) >= LOOKS
    if cheap and len(pairs) >= FEW_PAIRS and sum(arm for _, arm in pairs) > (1 - MIN_BLAMED_SAVING) * sum(full for full, _ in pairs):
        return True
    saved, width = saved_by_caching(pairs), saved_by_caching(pairs, looks=1).width
    if BLAMED not in saved and width <= CLEAR_INTERVAL:
        return True
    return saved.high < MIN_BLAMED_SAVING or (len(pairs) >= FEW_PAIRS and width <= NARROW_INTERVAL)


MAX_TOLD_WIDTH = 0.4
"""Fractions of the step: while an interval is wider, the progress line tells no figure, since the diagnosis will not go by it. Chosen."""
SPEEDS_BUDGET = 20.0
"""Seconds: experiments with a smaller budget take the machine's speeds from file, and do not measure what is not there."""
SPEEDS_SECONDS = 0.5
"""Seconds after which no further kind of speed is measured; all take less on an idle machine."""


def speeds_for(peers: Peers, device: torch.device, budget: float) -> MachineSpeeds:
    """The machine's speeds, by rank 0 for all of them: from file, or measured in about half a second. Collective."""
    speeds = None
    if peers.rank == 0:
        names = HOST + GLOO if device.type == "cpu" and peers.world_size == 1 else HOST
        try:
            speeds = machine_speeds(names, budget_s=SPEEDS_SECONDS) if budget >= SPEEDS_BUDGET else MachineSpeeds.load()
        except Exception as error:  # such as a cache that cannot be made: the other ranks wait for what is sent
            note = f"the speeds of this machine are not known ({type(error).__name__}: {error!s:.120})"
            speeds = MachineSpeeds(machine=Machine(host=platform.node()), notes=(note,))
    known = peers.gather(speeds)[0]
    assert known is not None
    return known
