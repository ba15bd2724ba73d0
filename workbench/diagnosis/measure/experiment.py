"""Runs the experiments on a training step: takes away one part at a time and returns Evidence."""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workbench.core.gpu_load import GpuLoad, load_nvml
from workbench.core.statistics import Interval
from workbench.core.system_load import LoadMeter
from workbench.diagnosis.analysis.evidence import Evidence, Gradients, Inside, Loading
from workbench.diagnosis.measure import inside, loading
from workbench.diagnosis.measure.evidence import EvidenceBuilder
from workbench.diagnosis.measure.trials import MIN_PAIRS, NARROW_INTERVAL, Trials, reaching, treatments
from workbench.harness import ablations
from workbench.harness.blocks import BlockTimer, DiagnoseError, steps_for
from workbench.harness.discover import ReachableState
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.interleave import InterleavedRounds
from workbench.harness.observe import StepFacts, check_arguments, discover_training, run_first_steps, timed_device_of
from workbench.harness.peers import Peers
from workbench.harness.restore import SavedState

BUDGET_SHARES = {"warm-up": 0.1, "rounds": 0.4, "inside": 0.5, "loading": 0.6, "trials": 0.9}
"""Until which fraction of the budget each part may go on, at most."""
LOADING_SECONDS, INSIDE_SECONDS = 5.0, 2.0
"""Most that these parts take of a large budget."""
CHEAP_LOADER, CHEAP_LOADER_SECONDS = 0.08, 2.0
"""Fraction of the step below which the loader does not matter, and seconds for which it is probed then."""
CLEAR_LOADER, CLEAR_LOADER_WIDTH = 0.25, 0.12
"""Fraction of the step from which on the loader is to blame for certain; its interval may be this wide then."""
SLOW_STEP = 0.7
"""Seconds: such steps are traced once."""
MIN_CALLS = 120
"""So many calls of step() should be seen, for stalls to show, unless they take more than a third of the budget."""
MIN_STALLS = 3
"""Stalls that are waited for once one was seen, for half of the budget at most."""


def experiment(
    step: Callable[[Any], Any],
    loader: Any,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    budget_s: float = 60.0,
    accumulation: int = 1,
) -> Evidence:
    """Find out what limits a training step, by experiments in this process. Everything is restored afterwards.

    Where a process group is initialised, all of its ranks have to call it: they take part together.

    Args:
        step: `step(batch)` does one optimizer step. With `accumulation` it gets a tuple of so many batches.
        loader: gives the batches; a DataLoader or any iterable.
        model: the module that is trained, or several; None = those that the step's closure, `self` or globals hold.
        optimizer: likewise.
        budget_s: seconds that it may take, about.
        accumulation: batches per step.

    Returns:
        The evidence, the same on all ranks.

    Raises:
        DiagnoseError: step() cannot be called with a batch, or raised an error.
        ValueError: the loader is empty, or cannot be iterated over.
    """
    check_arguments(step, budget_s, accumulation)
    notes: list[str] = []
    objects = discover_training(step, model, optimizer, loader, notes)
    with Peers.join() as peers, contextlib.ExitStack() as undo:
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
            return _Experiment(bench, feed, keep, objects, budget_s, notes).run()
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


class _Experiment:
    """One experiment, on one rank. All ranks take the same decisions, by figures on which they agree."""

    def __init__(self, bench: BlockTimer, feed: Feed, keep: SavedState, objects: ReachableState, budget: float, notes: list[str]) -> None:
        self.bench, self.feed, self.keep, self.found, self.budget, self.notes = bench, feed, keep, objects, budget, notes
        self.models, self.optimizers = objects.models, objects.optimizers
        self.peers = bench.peers
        self.seen: StepFacts
        self.rounds: InterleavedRounds
        self.sums: EvidenceBuilder
        self.trials: Trials
        self.inside: Inside | None = None
        self.loading: Loading | None = None

    def run(self) -> Evidence:
        """All of it."""
        meter = self.meter = LoadMeter()
        gpu = _gpu_load(self.bench.device) if self.peers.rank == 0 else None
        try:
            self._warm_up()
            self._rounds()
            cached = self.bench.timings.typical("cached")
            self._look_inside(cached)
            self._probe_loader()
            self._trials(self.bench.timings.typical("full"))
            self._wait_for_stalls(cached)
            reduced = self.peers.world_size > 1 and ablations.can_skip_reduction(self.models)
            gradients = measure_gradients(self.models, self.peers) if reduced else None
            self.bench.tick()
            evidence = self.sums.evidence(
                self.found,
                tried=self.trials.results(),
                inside=self.inside,
                loading=self.loading,
                samples=self.seen.samples,
                precision=self.seen.precision,
                padding=self.seen.padding,
                notes=self.notes,
            )
            return replace(evidence, noise=meter.noise(self.sums.spread(), gpu.notes() if gpu else ()), gradients=gradients)
        finally:
            meter.close()

    def _until(self, part: str) -> float:
        return BUDGET_SHARES[part] * self.budget

    # The parts

    def _warm_up(self) -> None:
        """Take the first steps, and observe the step meanwhile."""
        self.seen = run_first_steps(self.bench, self.feed, self.keep, self.found, self._until("warm-up"), self.notes)
        self.rounds = InterleavedRounds(self.bench, self.feed, self.keep, self.models, self.optimizers, written=self.seen.written)
        self.sums = EvidenceBuilder(self.bench, self.feed, self.rounds)

    def _rounds(self) -> None:
        """The full loop, the loader alone and the cached step, until it is clear what the loader costs."""
        rounds, bench = self.rounds, self.bench
        rounds.prepare(self.budget / 8)
        while True:
            rounds.turn()
            if max(self.peers.gather(self.feed.exhausted)) or bench.elapsed + rounds.cost > self._until("rounds"):
                break
            cached = self.sums.arm("cached")
            if self.peers.agree(len(cached.pairs) >= MIN_PAIRS and _clear(cached.saved), all):  # passes may have other lengths elsewhere
                break
        if not rounds.watched:
            rounds.clocked(50)
        self._note_the_loader()

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
        bench, replay = self.bench, self.rounds.replay
        self.rounds.settle()
        seconds = min(INSIDE_SECONDS, max(0.0, self._until("inside") - bench.elapsed))
        traced, plain = inside.step_counts(cached, budget_s=seconds) if cached < SLOW_STEP else (1, 1)
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
        costs = self.sums.arm("cached").saved
        most = CHEAP_LOADER_SECONDS if costs.high < CHEAP_LOADER else LOADING_SECONDS
        seconds = min(most, max(1.0, self._until("loading") - self.bench.elapsed))
        if self.peers.rank == 0 and self.feed.exhausted:
            self.loading = Loading(kind="once", alone=self.bench.timings.typical("loader") / self.feed.accumulation)
        elif self.peers.rank == 0:
            self.loading, notes = loading.probe(self.feed.loader, self.feed, seconds)
            self.notes += notes
        self.bench.tick()

    def _trials(self, full: float) -> None:
        self.rounds.settle()
        self.trials = Trials(
            self.bench, self.rounds.replay, self.keep.restore_weights, full=full, alone=lambda: ablations.without_reduction(self.models)
        )
        gc_share = self.inside.gc / self.inside.step if self.inside and self.inside.step > 0 else 0.0
        some = treatments(
            self.models,
            self.optimizers,
            self.rounds.replay,
            device=self.bench.device,
            precision=self.seen.precision,
            accumulation=self.feed.accumulation,
            world_size=self.peers.world_size,
            gc_share=self.peers.agree(gc_share),
            noise=self.meter.noise(),
        )
        some, note = reaching(some, self.seen.replays)
        self.notes += [note] if note else []
        everywhere = set[str].intersection(*(set(names) for names in self.peers.gather([treatment.name for treatment in some])))
        everywhere -= set() if self.seen.reduces else {"no_sync"}  # it would say that communication costs nothing
        self.trials.run([treatment for treatment in some if treatment.name in everywhere], self._until("trials"))
        self.notes += self.trials.notes

    def _wait_for_stalls(self, cached: float) -> None:
        """More cached steps, where too few were seen, or one that stalled and no second one."""
        bench, replay = self.bench, self.rounds.replay
        count = replay.fitting(steps_for(cached, 0.5, least=1))
        alone = self.peers.world_size > 1 and ablations.can_skip_reduction(self.models)
        arm = ablations.without_reduction(self.models) if alone else contextlib.nullcontext()
        name = "no_sync" if alone else "cached"
        with arm:
            while True:
                seen = max(self.peers.gather(len(self.sums.stalls().at)))
                if seen and alone:  # whose are they? A rank shows that only while it does not wait for the others
                    seen = max(self.peers.gather(len(self.sums.stalls(alone=True).at))) or 1
                few = bench.called < MIN_CALLS and bench.elapsed < self.budget / 3
                if not few and (not 0 < seen < MIN_STALLS or bench.elapsed > self.budget / 2):
                    return
                bench.run(name, replay.give(count), count)


def _clear(saved: Interval) -> bool:
    """Is the cost of the loader known well enough?"""
    return saved.width <= NARROW_INTERVAL or saved.high < CHEAP_LOADER or (saved.low > CLEAR_LOADER and saved.width <= CLEAR_LOADER_WIDTH)


LARGE_BYTES = 25 * 2**20
"""Bytes of the large reduction: a bucket of DDP's."""
REDUCTION_REPEATS = 9
"""Reductions of each size, the first of which warms up."""


def measure_gradients(models: Sequence[nn.Module], peers: Peers) -> Gradients | None:
    """What all ranks reduce in a step. Collective. None if no model is parallel and none has gradients.

    Args:
        models: what is trained.
        peers: who takes part.
    """
    parallel = [part for model in models for part in model.modules() if isinstance(part, DistributedDataParallel)]
    weights = {id(weight): weight for model in parallel or models for weight in model.parameters() if weight.requires_grad}
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    if not size:
        return None
    group = parallel[0].process_group if parallel else None
    device = next(iter(weights.values())).device
    large = min(LARGE_BYTES, max(size, 2**20))
    small = _seconds(1, device, group, peers)
    per_byte = max(0.0, _seconds(large // 4, device, group, peers) - small) / large
    buckets = sum(_buckets(model) for model in parallel) if parallel else len(weights)
    return Gradients(size=size, buckets=buckets, latency=small, per_byte=per_byte)


def _seconds(numbers: int, device: torch.device, group: Any, peers: Peers) -> float:
    values, times = torch.zeros(numbers, device=device), []
    for _ in range(REDUCTION_REPEATS):
        peers.barrier()
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return peers.agree(statistics.median(times[1:]))


def _buckets(model: DistributedDataParallel) -> int:
    """Pieces in which DDP reduces, as it logs them; else by their size."""
    try:
        data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        if buckets := [part for part in sizes.split(",") if part.strip()]:
            return len(buckets)
    except (AttributeError, RuntimeError):
        pass
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    return max(1, -(-size // int(model.bucket_bytes_cap)))
