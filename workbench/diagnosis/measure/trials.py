"""Runs the ablations that need no loader, each between two blocks of the unchanged step, until each is clearly above or below its limit."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.core.checks import number_in_environment
from workbench.core.gc import without_gc
from workbench.core.statistics import LOOKS, Interval, Spread, repeated_interval
from workbench.core.system_load import Noise, usable_cores
from workbench.core.units import several
from workbench.diagnosis.analysis.evidence import what_changes
from workbench.harness import ablations
from workbench.harness.ablations import Variant, thread_counts
from workbench.harness.batches import CachedBatches, bytes_of, doubled, map_tensors, padding_of, tensors_of, trimmed
from workbench.harness.blocks import BlockTimer, StepFailed, known_pairs, steps_for
from workbench.harness.observe import Replays, has_convolutions
from workbench.harness.results import VariantTimes
from workbench.harness.tf32 import has_tf32, tf32, uses_tf32

BLOCK_SECONDS = 0.12
"""Seconds of a block, where steps are not longer than that."""
MAX_MORE = 8
"""Times as many steps as of the unchanged step that a block of a quick variant has at most, to fill BLOCK_SECONDS."""
FEW_PAIRS = 3
"""Pairs that a variant near its limit takes at least, unless there is no time. Two are enough where intervals are clear of the limit, or as
narrow as a remedy needs: they allow for what few pairs do not show."""
VARIANTS_PER_BASELINE = 2
"""Variants tried between two blocks of the unchanged step on a CPU. Chosen: a block each takes a quarter of the time more, and with three a
variant is compared with blocks that are further from it. On a device each has its own: what a block costs depends on what is queued."""
NARROW_INTERVAL, CLEAR_INTERVAL = 0.06, 0.12
"""Widths at which the interval of the saved fraction of the full step is narrow enough: near its limit, and clear of it. Chosen by the
distance between the two numbers of most limits. With half, a diagnosis takes up to four times as long; with twice, more close cases are
inconclusive."""
MIN_SAVING = 0.05
"""A variant that saves no more than this fraction of the full step does not matter: it is dropped as soon as that is clear."""
MIN_BLAMED_SAVING = 0.1
"""A part of the step that takes no more than this does not matter either: no verdict names it."""
BLAMED_SAVING = {"no_sync": 0.15, "no_optimizer": 0.3, "device_batch": 0.15}
"""Variants that decide the verdict, and the savings from which on it names them, as `diagnosis.analysis.verdict.LIMITS` has them. The
others are remedies: whether they gain 10 or 15 % does not have to be known."""
NARROW_FOR_REMEDY = 0.1
"""The interval of a remedy's saving is narrow enough if it is no wider."""
MAX_PAIRS, MAX_REMEDY_PAIRS = LOOKS, 4
"""Of a part of the step, and of a remedy: with four, a gain is known to a fiftieth of the step where blocks vary by 4 %, less than formulas
err."""
MAX_POOLED = 8
"""Degrees of freedom that the spread of the other variants counts for, beside a variant's own."""
SETTLING_STEPS = 2
"""Steps after which idle threads sleep; they do within a step of a second."""
MAX_CORE_WAIT = 0.02
"""Share of the blocks of a pair in which the thread waited for a core, above which one pair decides nothing: it may be the wait. Chosen
below what equal blocks differ by. With half, busy machines take a pair more; with twice, a burst of other work may pass for a gain."""
LONG_STEP = 0.01
"""Seconds: before steps of that length on a CPU one does not count, since it reads more than caches hold; before shorter ones, two."""
MAX_WARM_UP_SLOWDOWN = 4.0
"""A variant whose steps warm up so many times slower takes no more of them, and its blocks have fewer steps, or two threads on a busy core
could take a minute. Chosen; it decides how long a variant takes."""
MAX_DOUBLED_BYTES = 2**29
"""Bytes: larger batches are not doubled."""
MIN_GC_SHARE = 0.02
"""Fraction of the step below which the garbage collector is not worth an ablation. Chosen below `remedy.MIN_SPEEDUP`."""


def treatments(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    replay: CachedBatches,
    *,
    device: torch.device,
    precision: str,
    micro_batches: int,
    world_size: int,
    gc_share: float,
    optimizer_share: float = 1.0,
    noise: Noise,
) -> list[Variant]:
    """The ablations that are possible for this step and might save something, the most informative first.

    Args:
        models: what the step trains.
        optimizers: what updates these models.
        replay: the batches that are used again.
        device: device on which the step computes.
        precision: precision of the step: "fp32", "amp_bf16" or "amp_fp16".
        micro_batches: batches in what step() takes; where there is one, it takes that, and else a list or tuple of them.
        world_size: number of ranks that train together.
        gc_share: fraction of the step that Python's garbage collector takes.
        optimizer_share: fraction of the full step that the optimizer takes at most; another implementation saves no more.
        noise: what other processes took so far.
    """
    first = replay.first
    each = _each(micro_batches)
    treatments: list[Variant] = []
    if world_size > 1:
        treatments.append(Variant(name="no_sync", on=partial(ablations.without_reduction, models)))
    if optimizers:
        treatments.append(Variant(name="no_optimizer", on=partial(ablations.without_optimizer, optimizers)))
    if device.type == "cuda" and any(not tensor.is_cuda for tensor in tensors_of(first)):
        treatments.append(Variant(name="device_batch", batch=partial(map_tensors, lambda tensor: tensor.to(device))))
    if bytes_of(first) < MAX_DOUBLED_BYTES and each(doubled)(first) is not None:
        treatments.append(Variant(name="doubled", batch=each(doubled), samples=2.0))
    if device.type == "cpu":  # are there too many?
        fewer = [_with_threads(count) for count in thread_counts() if count < torch.get_num_threads()]
        treatments = [*fewer, *treatments] if has_too_many_threads(noise, world_size) else [*treatments, *fewer]
    if gc_share > MIN_GC_SHARE:
        treatments.append(Variant(name="no_gc", on=without_gc))
    if each(padding_of)(first) is not None and each(trimmed)(first) is not None:
        treatments.append(Variant(name="trimmed", batch=each(trimmed)))
    if device.type == "cpu":  # threads wait for each other, and where others have a core, for them
        here = min(world_size, number_in_environment("LOCAL_WORLD_SIZE", world_size))
        more = [count for count in thread_counts() if torch.get_num_threads() < count <= usable_cores() / here]
        treatments += [_with_threads(count) for count in more if not noise.is_crowded(world_size * count)]
    treatments += [
        Variant(
            name=f"optimizer={name}",
            on=partial(ablations.optimizer_implementation, optimizers, name),
            instead_of="" if name == "fused" else "optimizer=fused",  # in the gallery it saves no more, but for noise
        )
        for name in ("fused", "foreach")
        if optimizer_share >= MIN_SAVING and ablations.has_unused_implementation(optimizers, name)
    ]
    if precision == "fp32" and models and has_tf32(device):
        strict = not uses_tf32() or (has_convolutions(models) and not uses_tf32(convolution=True))
        treatments += [Variant(name="tf32", on=tf32)] if strict else []
    if precision == "fp32" and models:
        name = "amp_bf16" if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False) else "amp_fp16"
        wrap = partial(ablations.in_precision, name=name, device=device)
        treatments.append(Variant(name=f"precision={name}", wrap=wrap, on=partial(ablations.overflows_skipped, optimizers, name)))
    if has_convolutions(models) and world_size == 1 and any(tensor.ndim == 4 for tensor in tensors_of(first)):
        treatments.append(
            Variant(name="channels_last", on=partial(ablations.channels_last, models, optimizers), batch=ablations.to_channels_last)
        )
    return treatments


CAPTURED = ("no_sync", "precision=", "tf32", "channels_last")
"""Variants that change how Python calls forward and backward."""
OPTIMIZER_ARMS = ("no_optimizer", "optimizer=")


def reaching(variants: Sequence[Variant], replays: Replays) -> tuple[list[Variant], str]:
    """The variants that have an effect on a step that launches captured CUDA graphs, and a note on the others: they would save 0 %."""
    out_of_reach = (CAPTURED if replays.optimizer else CAPTURED + OPTIMIZER_ARMS) if replays.graphs else ()
    left = [variant for variant in variants if not variant.name.startswith(out_of_reach)]
    lost = ", ".join(variant.name for variant in variants if variant.name.startswith(out_of_reach))
    if not lost:
        return left, ""
    return left, (
        f"step() launches {several(replays.graphs, 'captured CUDA graph')}, which no experiment can change, so {lost} "
        "could not be tried: diagnose the step without graphs, or capture them with the change"
    )


def has_too_many_threads(noise: Noise, world_size: int) -> bool:
    """Do others leave fewer cores than an operator has threads? Then little else gains as likely. Not of ranks: they keep to one order."""
    threads = torch.get_num_threads()
    return world_size == 1 and 1 < threads > noise.left_cores and noise.is_crowded(threads)


def _with_threads(count: int) -> Variant:
    return Variant(name=f"threads={count}", on=partial(ablations.threads, count))


def _each(micro_batches: int) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Does a function on batches to each of those that one step takes; None if it gives that for one of them."""

    def of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if micro_batches == 1:
            return function

        def on_all(batches: list[Any] | tuple[Any, ...]) -> Any:
            results = [function(batch) for batch in batches]
            return None if any(result is None for result in results) else type(batches)(results)

        return on_all

    return of


class Trials:
    """Runs the cached step under each variant in turn, between unchanged blocks, and keeps the pairs."""

    def __init__(
        self,
        bench: BlockTimer,
        replay: CachedBatches,
        rewind: Callable[[], None],
        *,
        full: float,
        lead: float = 0.0,
        few: int = 2,
        most: Mapping[str, float] | None = None,
        alone: ablations.Switch = contextlib.nullcontext,
        late: float = math.inf,
    ) -> None:
        """Prepare; nothing is run yet.

        Args:
            bench: times the blocks, on all ranks together.
            replay: the batches that are used again.
            rewind: puts the weights back.
            full: seconds of a full step.
            lead: fraction of it that the removal of a part saves which was tried before, for certain: a part that saves less is not blamed.
            few: pairs that each variant takes at least, unless it is hopeless.
            most: fractions of a full step that variants, by name, save at most, as a trace shows: one pair of a hopeless one is enough.
            alone: inside, no rank waits for another.
            late: seconds on the bench's clock: no block is begun that would probably not be over by then.
        """
        self.alone, self.few, self.most, self.late = alone, few, most or {}, late
        self.bench, self.replay, self.rewind, self.full, self.lead = bench, replay, rewind, full, lead
        self.notes: list[str] = []
        self.left_out: list[str] = []
        """Changes for which no time was left, in words."""
        self.enough = 0.0
        """Seconds of a budget that would probably suffice for all; 0 where none was left out."""
        self.begun: Callable[[str], object] = lambda name: None
        """Called with the name of a variant before each of its blocks."""
        self._pairs: dict[str, list[tuple[tuple[int, int], int]]] = {}  # cached blocks before and after, the arm's block
        self._treatments: dict[str, Variant] = {}
        self._failed = set[str]()
        step = bench.timings.typical("cached")
        self.worth = min(1.0, step / full)
        """Fraction of the full step that a variant affects. The cached step is a part of the full one, also where it was timed while other
        processes took more of the cores."""
        least = 4 if step < 0.03 else 3 if step < 0.06 else 2 if step < 0.6 else 1
        count = steps_for(step, BLOCK_SECONDS, least=least)
        if bench.peers.agree(replay.varied):
            count = max(count, bench.peers.agree(len(replay)))
        self.count = bench.peers.agree(replay.fitting(count), min)
        long = LONG_STEP if bench.device.type == "cpu" else 0.15  # a device's queue is empty at first
        self.warm = 2 if step < long else 1 if step < 1 else 0

    def run(self, treatments: Sequence[Variant], until: float, *, share: float = 1.0) -> None:
        """Try them until all are decided or the time is up: an arm that is decided gets no more blocks.

        Args:
            treatments: the most informative first; where time is short, the last are left out.
            until: seconds on the bench's clock. The first may take longer, but no longer than `late`.
            share: fraction of the budget that is over at `until`.
        """
        began, rest = self.bench.elapsed, [*treatments]
        first = bool(rest) and self.fits(rest[0])
        while rest and (first or self.bench.elapsed + self._cost * 2 <= until):
            first = False
            left = max(0.0, until - self.bench.elapsed)
            least = FEW_PAIRS if FEW_PAIRS * self._cost <= left / 2 else 2
            fit = max(1, int(left / max(self._cost * least, 1e-9)))
            self._try_all(rest[:fit], until, least)
            del rest[:fit]
        done = {*self._treatments, *self._failed}
        if rest := [treatment for treatment in treatments if treatment.name not in done and treatment.instead_of not in self._treatments]:
            self.left_out = [what_changes(treatment.name) for treatment in rest]
            each = FEW_PAIRS * self._cost
            self.enough = max(2 * began + len(treatments) * each, until + len(rest) * each) / share  # what went before may take longer, too
        self._clear_up(until)

    @property
    def _cost(self) -> float:
        """Seconds of a pair of blocks, about."""
        return 2.2 * (self.count + self.warm) * self.bench.timings.typical("cached")

    def fits(self, variant: Variant, *, after_baseline: bool = False) -> bool:
        """Is there time for a block of a variant, and for the unchanged step before it? A first block is taken to be as quick as that.

        `after_baseline`: a block of the unchanged step was made just now, so no other is needed.
        """
        typical, usual = self.bench.timings.typical, self.bench.timings.typical("cached")
        each = typical(variant.name) if variant.name in self._pairs else variant.samples * usual
        before = 0 if after_baseline or self._is_unchanged_last else self.count + self.warm
        return self.bench.elapsed + before * usual + (self.count + self._warm_up(variant)) * each <= self.late

    def _warm_up(self, variant: Variant) -> int:
        """Steps before a variant's block. Of those longer than a second, other numbers of threads need none, and the rest one."""
        if variant.name in self._treatments:
            return self.warm
        return self.warm + (self.warm > 0 or not variant.name.startswith("threads="))

    def _try_all(self, treatments: Sequence[Variant], until: float, least: int) -> None:
        """Try some until all are decided, each in at least so many pairs, or the time is up."""
        active, before = [*treatments], self._latest_baseline()
        for turn in range(MAX_PAIRS):
            before = self._turn(active, before, back=turn % 2 == 1)
            active = [treatment for treatment in active if not self._is_decided(treatment.name, least)]
            if not active or (turn + 1 >= least and self.bench.elapsed > until) or self.bench.elapsed > 1.3 * until:
                break

    def _clear_up(self, until: float) -> None:
        """Spend what is left of the time on the variants that may gain or not, those first that seem to gain most."""
        before = -1
        for turn in range(MAX_PAIRS):
            names = [name for name in self.tried if self._is_unclear(name)]
            names = sorted(names, key=lambda name: -self.saved(name).mid)[:VARIANTS_PER_BASELINE]
            if not names or self.bench.elapsed + self._cost * len(names) > until:
                break
            before = self._latest_baseline() if before < 0 else before
            before = self._turn([self._treatments[name] for name in names], before, back=turn % 2 == 1)

    def _turn(self, active: list[Variant], before: int, *, back: bool) -> int:
        """A block of each variant, some at a time between blocks of the unchanged step. What fails or has no time is taken off the list."""
        self.rewind()
        since: list[Variant] = []  # the last baseline
        for treatment in [*reversed(active)] if back else [*active]:
            if treatment.instead_of in self._treatments or not self.fits(treatment, after_baseline=not since):
                active.remove(treatment)
                continue
            self.begun(treatment.name)
            if not self._try(treatment):
                active.remove(treatment)
                continue
            since.append(treatment)
            threads = treatment.name.startswith("threads=")
            if threads or len(since) == (VARIANTS_PER_BASELINE if self.bench.device.type == "cpu" else 1):
                before = self._pair(since, before, more=SETTLING_STEPS if threads and self.warm else 0)
        return self._pair(since, before) if since else before

    def results(self) -> dict[str, VariantTimes]:
        """The variants that were tried."""
        arms = {}
        for name in self._pairs:
            if pairs := self._seconds(name):
                treatment = self._treatments[name]
                arms[name] = VariantTimes(name=name, baseline="cached", pairs=pairs, samples=treatment.samples, note=treatment.note)
        return arms

    def _seconds(self, name: str) -> tuple[tuple[float, float], ...]:
        cached, arm = self.bench.timings.slowest("cached"), self.bench.timings.slowest(name)
        between = [(cached[before] + cached[after]) / 2 for (before, after), _ in self._pairs[name]]
        return known_pairs(between, [arm[index] for _, index in self._pairs[name]])

    @property
    def tried(self) -> list[str]:
        """The variants of which something is known."""
        return [name for name in self._pairs if self._logarithms(name)]

    def saved(self, name: str, *, looks: int = LOOKS) -> Interval:
        """What a variant saves of the full step, as an interval that may be looked at after each pair; see `repeated_interval`."""
        spread = Spread()
        for other in self._pairs:
            spread = spread.with_values(self._logarithms(other)) if other != name else spread
        spread = Spread(spread.variance, min(spread.degrees, MAX_POOLED))
        return repeated_interval(self._logarithms(name), spread=spread, looks=looks).of(lambda ratio: self.worth * (1 - math.exp(ratio)))

    def _logarithms(self, name: str) -> list[float]:
        """Of the variant's seconds per sample over its baseline's: their errors are alike, whatever is saved."""
        samples = self._treatments[name].samples
        return [math.log(arm / base / samples) for base, arm in self._seconds(name) if arm > 0 < base]

    def _is_decided(self, name: str, least: int) -> bool:
        """Would more pairs change neither the verdict nor what is recommended?"""
        if not (count := len(self._logarithms(name))):
            return False
        saved, limit = self.saved(name), BLAMED_SAVING.get(name)
        if self.most.get(name, 1.0) < MIN_BLAMED_SAVING:
            return True
        if count == 1 and not self._had_its_core(name):
            return False
        if saved.high < (MIN_SAVING if limit is None else MIN_BLAMED_SAVING):
            return True
        if count == 1:  # a gain beyond doubt, unless a part of the step is to be blamed
            return self.few < FEW_PAIRS and limit is None and name != "doubled" and saved.low > MIN_SAVING
        if count < self.few:
            return False
        width = self.saved(name, looks=1).width  # how well a value is known is no decision that may be wrong
        if limit is None:
            return width <= NARROW_FOR_REMEDY or count >= MAX_REMEDY_PAIRS
        if saved.low > limit:
            return width <= CLEAR_INTERVAL
        if saved.high < max(limit, self.lead):  # not to blame, whatever it takes
            return True
        return count >= least and width <= NARROW_INTERVAL

    def _is_unclear(self, name: str) -> bool:
        """Is it a remedy that may gain or cost time, and gain so much that it matters? Not after MAX_PAIRS, or where it failed."""
        if name in BLAMED_SAVING or name == "doubled" or name in self._failed or len(self._pairs[name]) >= MAX_PAIRS:
            return False
        saved = self.saved(name, looks=1)
        return saved.low <= 0 and saved.high >= MIN_BLAMED_SAVING

    def _had_its_core(self, name: str) -> bool:
        """Did nobody take the core from the blocks of its only pair, on any rank? False where that is not known."""
        ((before, after), own) = self._pairs[name][0]
        cached = self.bench.timings.blocks["cached"]
        laps = [lap for block in (cached[before], self.bench.timings.blocks[name][own], cached[after]) for lap in block.laps]
        waits = all(sum(lap.delays) <= MAX_CORE_WAIT * sum(lap.calls) for lap in laps)
        return all(self.bench.peers.gather(waits and self.bench.knows_delays))

    def _pair(self, since: list[Variant], before: int, more: int = 0) -> int:
        """Time the unchanged step again, after some variants: each is compared with the mean of both blocks around them; without time for
        the second, with the first.
        """
        end = self.bench.elapsed + (self.count + self.warm + more) * self.bench.timings.typical("cached")
        after = self._baseline(more) if end <= self.late else before
        for variant in since:
            self._pairs.setdefault(variant.name, []).append(((before, after), len(self.bench.timings.blocks[variant.name]) - 1))
        since.clear()
        return after

    @property
    def _is_unchanged_last(self) -> bool:
        """Was the last step an unchanged one, and are steps so long that a pause since then does not matter?"""
        last = self.bench.timings.blocks["cached"][-1]
        return not self.warm and last.first + len(last.laps[0].calls) > self.bench.called

    def _latest_baseline(self) -> int:
        """A block of the unchanged step: the last one, where that was just now."""
        return len(self.bench.timings.blocks["cached"]) - 1 if self._is_unchanged_last else self._baseline()

    def _baseline(self, more: int = 0) -> int:
        self.bench.warm(self.replay.give(self.warm + more))
        self.bench.run("cached", self.replay.give(self.count), self.count)
        return len(self.bench.timings.blocks["cached"]) - 1

    def _try(self, treatment: Variant) -> bool:
        """Time a block of a variant; False if it fails, such as for want of memory."""
        bench, step = self.bench, treatment.wrap(self.bench.step)
        change = None if treatment.batch is ablations.unchanged else treatment.batch
        first = treatment.name not in self._treatments
        least, warm = min(2, self.warm + 1) if first else self.warm, self._warm_up(treatment)
        usual = bench.timings.typical("cached")
        if first and bench.peers.world_size > 1:
            # once without a reduction: a rank that fails (out of memory) would leave the others waiting in it
            with self._switched_on(treatment, self.alone) as failed:
                failed = failed or self._failure(lambda: bench.warm(self.replay.give(1, change), step))
                if failures := [failed for failed in bench.peers.gather(failed) if failed]:
                    return self._cannot(treatment, failures[0])
        with self._switched_on(treatment) as failed:
            batches: list[Any] = []
            start, taken = bench.clock(), 0

            def prepare() -> None:
                nonlocal taken
                for taken in range(1, warm + 1):
                    bench.warm(self.replay.give(1, change), step)
                    slow = bench.clock() - start > MAX_WARM_UP_SLOWDOWN * warm * usual
                    if slow and taken >= least and bench.peers.world_size == 1:  # ranks have to take equally many
                        break
                batches.extend(self.replay.give(self.count, change))

            failed = failed or self._failure(prepare)
            warmed = bench.peers.gather((failed, (bench.clock() - start) / taken if taken else 0.0))
            if failures := [failed for failed, _ in warmed if failed]:
                return self._cannot(treatment, failures[0])
            self._treatments[treatment.name] = treatment
            slowest = max(seconds for _, seconds in warmed)  # as on all ranks
            slower = slowest / usual
            count = self.count if slower < MAX_WARM_UP_SLOWDOWN else max(1, round(self.count / slower))
            if 0 < self.count * slowest < BLOCK_SECONDS / 2:  # of few quick steps, a single long one would decide
                more = self.count * round(min(MAX_MORE, BLOCK_SECONDS / (self.count * slowest)))
                count = bench.peers.agree(self.replay.fitting(more), min)
                batches.clear()
                failed = self._failure(lambda: batches.extend(self.replay.give(count, change)))
                if failures := [failed for failed in bench.peers.gather(failed) if failed]:
                    return self._cannot(treatment, failures[0])
            try:
                bench.run(treatment.name, batches[:count], count, step=step)
            except StepFailed as error:
                if bench.peers.world_size > 1:  # the others may wait in a reduction
                    raise
                return self._cannot(treatment, _described(error))
        return True

    @contextlib.contextmanager
    def _switched_on(self, treatment: Variant, *more: ablations.Switch) -> Iterator[str]:
        """Inside, the variant is on, unless switching it on fails on some rank: then gives why, on all, so that no rank trains alone."""
        with contextlib.ExitStack() as switches:
            failed = ""
            for switch in (treatment.on, *more):
                failed = failed or self._failure(partial(_enter, switches, switch))
            yield next(filter(None, self.bench.peers.gather(failed)), "")

    def _failure(self, act: Callable[[], object]) -> str:
        """Why something fails on this rank, whatever raises it: the step, the making of a batch, or the switch. Empty if it does not."""
        try:
            act()
            self.bench.synchronize()
        except Exception as error:
            return _described(error)
        return ""

    def _cannot(self, treatment: Variant, failure: str) -> bool:
        self._failed.add(treatment.name)
        self.replay.forget_changed()  # they may be as large as what did not fit
        self.notes.append(f"{treatment.name} could not be tried: {failure.splitlines()[0]:.200}")
        return False


def _enter(switches: contextlib.ExitStack, switch: ablations.Switch) -> None:
    switches.enter_context(switch())


def _described(error: Exception) -> str:
    cause = error.error if isinstance(error, StepFailed) else error
    return f"{type(cause).__name__}: {cause}"
