"""Computes the seconds of each part of a step from the evidence, and what the removal of each part would save.

An ablation is measured as a ratio to its baseline, pair by pair. This module turns the ratios into seconds of the unchanged step. The
verdict, the remedies and StepModel use these seconds.
"""

import math
import statistics
from dataclasses import dataclass

from workbench.core import units
from workbench.core.statistics import Interval
from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis.evidence import Evidence, RankEvidence
from workbench.diagnosis.analysis.stalls import stalled_phases
from workbench.harness.results import VariantTimes

MIN_EXCESS_WAIT = 0.5
"""Least fraction of a rank's wait for data by which it exceeds the others', for the rank to be the reason why the step waits. Chosen. With
half or twice as much, a rank whose wait is a quarter longer is blamed, or one whose wait is twice as long is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The slowest rank compared with a typical one, in seconds per step without reductions."""

    ranks: tuple[int, ...]
    """The ranks that are slow."""
    input: float
    """Seconds that the slowest rank waits longer for data than a typical one."""
    compute: float
    """Seconds that it computes longer than a typical one."""
    alone: float
    """Its step, in seconds."""
    typical: float
    """The step of a typical rank, in seconds."""
    odd: float = 0.0
    """The fraction of its wait for data that a typical rank does not have. The step would save that fraction of its wait if the rank were
    like the others. 0 if the rank waits hardly longer than they do."""

    @property
    def excess(self) -> float:
        return self.input + self.compute


def slow_rank(ranks: tuple[RankEvidence, ...]) -> SlowRank | None:
    """The slow ranks; None with one rank, if all are equal, or if they were not timed separately.

    The typical rank is the lower median, so that it is not a slow one even if half of the ranks are slow.
    """
    known = sorted((rank for rank in ranks if math.isfinite(rank.alone)), key=lambda rank: rank.alone)
    if len(known) < 2:
        return None
    worst, typical = known[-1], known[(len(known) - 1) // 2]
    excess = worst.alone - typical.alone
    if excess <= 0:
        return None
    waits = [0.0 if math.isnan(rank.wait) else rank.wait for rank in (worst, typical)]
    by_input = max(0.0, waits[0] - waits[1])
    by_compute = max(0.0, (worst.alone - waits[0]) - (typical.alone - waits[1]))
    both = by_input + by_compute or 1.0
    odd = by_input / waits[0] if waits[0] > 0 and by_input > by_compute else 0.0
    limit = typical.alone + excess / 2
    return SlowRank(
        ranks=tuple(sorted(rank.rank for rank in known if rank.alone > limit)),
        input=excess * by_input / both,
        compute=excess * by_compute / both,
        alone=worst.alone,
        typical=typical.alone,
        odd=odd if odd >= MIN_EXCESS_WAIT else 0.0,
    )


THREADS_BESIDE_DEVICE = 2
"""Threads of a rank that each keep a core busy while a GPU computes: the training thread, and autograd's. Derived from how torch runs
backward. With one more or fewer, other processes count as noise one core earlier or later."""
MAX_BLOCK_SPREAD = 0.25
"""Interquartile range over median of equal blocks. Above it, close decisions are doubtful. Chosen: 1 to 8 % on quiet machines, up to 40 %
on a shared one with two cores. With half, most diagnoses on a shared machine warn; with twice, few do. Clear verdicts stay."""
IQR_SIGMAS = 1.35
"""Interquartile range of a normal distribution, in standard deviations."""
SIGMAS_90 = 1.645
"""Standard deviations to each side that hold 90 % of normal values."""
MAX_FRESH_COST = 0.2
"""Most that training slows down on fresh batches, as a fraction of the step on replayed ones. Measured on two cores of the machine of
`FITTED_ON`: 0.1 to 0.2 where batches are cheap to make. It only cuts what paired blocks measured: with half, the loader may be given a
tenth of the step too little; with twice, noise as large counts as the loader's."""
MAX_OPTIMIZER_COST = 2.0
"""Most that an optimizer takes of a step on a CPU, as a multiple of its time in a trace: its writes push other data out of the caches.
Derived: they cannot cost more than to read it all again. It decides which variants are tried, and caps what the optimizer seems to take."""


def scaled(interval: Interval, by: float) -> Interval:
    """The interval times a positive number."""
    return Interval(low=interval.low * by, mid=interval.mid * by, high=interval.high * by)


def at_least_0(interval: Interval) -> Interval:
    """The interval without what is below 0, since no part takes less than no time; if all of it is, 0 with the upper half of its width."""
    high = interval.high if interval.high > 0 else interval.high - interval.mid
    return Interval(low=max(0.0, interval.low), mid=max(0.0, interval.mid), high=high)


def subtract(interval: Interval, by: float) -> Interval:
    """The interval minus a number, cut off at 0."""
    return Interval(low=max(0.0, interval.low - by), mid=max(0.0, interval.mid - by), high=max(0.0, interval.high - by))


def add(first: Interval, two: Interval) -> Interval:
    """The sum of two parts with independent errors."""
    down, up = math.hypot(first.mid - first.low, two.mid - two.low), math.hypot(first.high - first.mid, two.high - two.mid)
    mid = first.mid + two.mid
    return Interval(low=mid - down, mid=mid, high=mid + up)


def capped(interval: Interval, most: float) -> Interval:
    """The interval without what is above `most`."""
    return Interval(low=min(interval.low, most), mid=min(interval.mid, most), high=min(interval.high, most))


def is_crowded(e: Evidence) -> bool:
    """Do other processes take so many cores that noise may spoil a close decision?"""
    threads = e.threads if e.device == "cpu" else THREADS_BESIDE_DEVICE
    workers = e.loading.num_workers if e.loading else 0
    return e.noise is not None and e.noise.is_crowded(e.world_size * (threads + workers))


def noise_warnings(e: Evidence) -> list[str]:
    """The kinds of noise that make close decisions doubtful, in words."""
    if e.noise is None:
        return []
    warnings = []
    if is_crowded(e):
        warnings.append(f"Other processes took {e.noise.foreign:.1f} of {e.noise.cores:.0f} cores.")
    if e.noise.spread > MAX_BLOCK_SPREAD:
        reasons = f" ({', '.join(e.noise.gpu)})" if e.noise.gpu else ""
        spread = units.percent(e.noise.spread) if e.noise.spread <= 1 else f"{e.noise.spread:.3g} times their median"
        warnings.append(f"Equal blocks vary by {spread}{reasons}.")
    return warnings


def beside_others(e: Evidence, saved: Interval) -> Interval:
    """Lower the low end of the fraction that reductions, or waiting for a slow rank, take, if other processes need the ranks' cores.

    While another process has the core of one rank, the other ranks wait for that rank in the reduction. This adds up to
    `crowded / cores × (1 − 1 / ranks)` of the rest of the step. (Measured: with other processes on 0.6 of 2 cores, the reductions of two
    ranks took 18 % of a step instead of 9 %. The formula gives 13 %.)
    """
    if e.noise is None or e.device != "cpu" or not is_crowded(e):
        return saved
    crowded = max(0.0, min(e.noise.foreign, e.world_size * e.threads + e.noise.foreign - e.noise.cores))
    waited = crowded / e.noise.cores * (1 - 1 / e.world_size) * (1 - saved.mid)
    return Interval(low=saved.low - waited, mid=saved.mid, high=saved.high)


def serial_loader(data: Interval, loader: float, clean: float) -> Interval:
    """Seconds that a loader without workers adds: its own time, plus up to `MAX_FRESH_COST` of training.

    Its own time is less noisy than the difference of two long steps.
    """
    more = MAX_FRESH_COST * (clean - data.mid)
    return Interval(low=min(data.low, loader), mid=min(data.mid, loader + more / 2), high=min(data.high, loader + more))


def between_sources(arm: Interval, traced: float) -> Interval:
    """An interval that covers two sources which disagree because of noise.

    Noise changes the share of an operator in a trace little. But a trace does not count what the optimizer's writes evict from the caches.
    To read that again takes at most as long as the optimizer, so the interval ends at twice the traced time.
    """
    low, mid, high = min(arm.low, traced), (arm.mid + traced) / 2, max(arm.high, traced)
    return capped(Interval(low=low, mid=mid, high=high), MAX_OPTIMIZER_COST * traced)


def widened(e: Evidence, arm: VariantTimes) -> Interval:
    """The fraction that an ablation saves, with an interval no narrower than the noise of equal blocks: few pairs can agree by chance."""
    saved = arm.saved
    block = (e.noise.spread if e.noise else 0.0) / IQR_SIGMAS
    loose = SIGMAS_90 * block * math.sqrt(1.5 / len(arm.pairs)) * max(0.0, 1 - saved.mid)  # one block beside the mean of two
    return Interval(low=min(saved.low, saved.mid - loose), mid=saved.mid, high=max(saved.high, saved.mid + loose))


NOTHING = Interval(low=0.0, mid=0.0, high=0.0)
CHEAP_LOADER = 0.08
"""Fraction of the step below which the loader does not matter, whatever blocks with and without it seem to say. Chosen: half of what is
blamed. With half, noisy steps with small loaders take longer to judge; with twice, a loader near its limit is judged by few blocks."""
MIN_CERTAIN_LOADER = 0.15
"""Fraction of the step. A loader whose interval begins above it costs much, whatever the noise is. That of `verdict.USUAL`, which says
where it comes from."""
MIN_EXPECTED_STALLS, FEWER_STALLS = 10, 4
"""Stalls count as communication if each rank on its own should have had at least 10, and had at most a quarter of the expected number.
Derived: 2 or fewer where 10 are expected have a chance of 0.3 %; 1 or none where 5 are, of 4 %."""
PYTHON_IN_OPTIMIZER = 0.5
"""Fraction of an optimizer's step in which no operator runs, assumed where the trace does not show it. It belongs to the optimizer, not to
the host. Measured on the machine of `FITTED_ON`: 0.3 to 0.6 for torch's loops over tensors, about 0.1 for fused optimizers. The host's
interval covers 0 to 1; a factor of two moves its middle, by half of the optimizer's time at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds per step. Those with an interval come from paired experiments or from a trace."""

    step: float
    """The unchanged step, with its stalls."""
    clean: float
    """The step without stalls. Stalls of reductions are included, where experiments distinguish them."""
    cached: float
    """`clean` without the loader."""
    replayed: float
    """The step on a replayed batch, without stalls: the baseline of most ablations, and the step of the trace. It is shorter than `cached`
    where reductions of fresh batches take longer or stall."""
    loader: float
    """The loader's own time for the batches of a step."""
    overlap: float
    """How far loader and training overlap: 0 = they take turns, 1 = completely."""
    data: Interval
    """What the loader adds to the step, without what only a slow rank adds."""
    transfer: Interval
    optimizer: Interval
    communication: Interval
    straggler: Interval
    host: Interval
    """The time in which no operator runs, without that of the optimizer, of collectives and of stalls."""
    sleeping: float
    """The part of `host` in which the training thread sleeps, reads or writes."""
    called: Interval
    """`host`, plus the short operators of forward and backward, whose cost is mostly that of the call."""
    fixed: float
    """The part of forward and backward that does not grow with the batch. nan if no doubled batch was tried."""
    stalls: Interval
    slow: SlowRank | None = None
    doubt: str = ""
    """What was measured of the loader and is not believed; `data` has what a loader can cost."""

    @classmethod
    def of(cls, e: Evidence) -> "Costs":
        """Compute the costs of the parts from evidence."""
        if e.observed:
            return _observed(e)
        clean = e.step * (1 - e.stalls.share)
        ratio = e.arms["cached"].saved_at_few_pairs if "cached" in e.arms else NOTHING
        data = at_least_0(scaled(ratio, clean))
        loader = _loader(e)
        if ratio.high <= 0 and math.isfinite(loader):  # noise: the step without its loader was slower
            data = capped(data, loader)
        noise, met = (e.noise.spread if e.noise else 0.05) / 2, NOTHING
        noisy = bool(noise_warnings(e))
        if not noisy:
            met = _met(e, data, loader, noise)
        serial = e.loading is not None and not e.loading.num_workers
        waits = (rank.timeline.mean("data_wait") for rank in e.ranks if rank.timeline.count)
        own, doubt = max(loader, *waits, 0.0), ""  # a loader may be slower in the loop than alone
        most = own + MAX_FRESH_COST * (clean - data.mid)
        if serial and _is_cheap(e, own, clean) and data.mid > most:
            faster = f"without the loader, blocks were faster by {units.seconds(data.mid)} per step"
            doubt = f"{faster}, which a loader that takes {units.seconds(own)} cannot explain: other processes or threads"
            data = Interval(low=min(data.low, own), mid=own, high=min(data.high, most))
        if serial and (noisy or _is_cheap(e, loader, clean)) and loader < data.mid and data.low < MIN_CERTAIN_LOADER * clean:
            data = serial_loader(data, loader, clean)
        if e.device == "cpu" and e.world_size == 1 and serial and loader <= data.high:
            data = Interval(low=data.low, mid=max(data.mid, loader), high=data.high)  # nothing hides it
        if noisy and not doubt and data.mid >= MIN_CERTAIN_LOADER * clean and (clock := e.serial_wait) is not None:
            data = Interval(low=min(data.low, clock * clean), mid=data.mid, high=max(data.high, clock * clean))
        data, replayed = subtract(data, met.mid), clean - data.mid
        slow = slow_rank(e.ranks)
        by_input = min(max(slow.input, slow.odd * data.mid), data.mid) if slow else 0.0
        straggler = NOTHING
        if slow:
            late = by_input + slow.compute
            straggler = at_least_0(Interval(low=late - noise * slow.alone, mid=late, high=late + noise * slow.alone))
        optimizer = _saved(e, "no_optimizer", replayed)
        if e.inside and e.inside.optimizer is not None and e.inside.step:
            traced = e.inside.optimizer / e.inside.step * replayed
            if "no_optimizer" not in e.arms:
                most = MAX_OPTIMIZER_COST if e.device == "cpu" else 1.0
                optimizer = Interval(low=max(0.0, traced * (1 - max(noise, e.inside.slowdown))), mid=traced, high=most * traced)
            elif e.device == "cpu" and (noise_warnings(e) or len(e.arms["no_optimizer"].pairs) == 1):
                optimizer = between_sources(optimizer, traced)
        communication = _saved(e, "no_sync", replayed)
        transfer = _saved(e, "device_batch", replayed)
        host, sleeping, called = _host(e, replayed, optimizer.mid, communication.mid)
        rest = replayed - transfer.mid - optimizer.mid - communication.mid - (slow.compute if slow else 0.0)
        host, called = capped(host, max(0.0, rest)), capped(called, max(0.0, rest))
        stuck = _stuck(e)
        more = add(met, stuck)
        return cls(
            step=e.step,
            clean=clean + stuck.mid,
            cached=replayed + more.mid,
            replayed=replayed,
            loader=loader,
            overlap=_overlap(clean - met.mid, replayed, loader),
            data=subtract(data, by_input),
            transfer=transfer,
            optimizer=optimizer,
            communication=add(communication, more),
            straggler=straggler,
            host=host,
            sleeping=sleeping,
            called=called,
            fixed=_fixed(e, replayed, optimizer.mid, communication.mid),
            stalls=subtract(_stalls(e, e.step * e.stalls.share), stuck.mid),
            slow=slow,
            doubt=doubt,
        )

    def saves(self, seconds: Interval) -> Interval:
        """Seconds that the step saves if training gets this much faster: 0 if the step would only wait longer for its loader."""
        spare = max(0.0, self.clean - self.loader)
        hidden = capped(seconds, spare)
        keep = 1 - self.overlap
        ends = (keep * getattr(seconds, end) + self.overlap * getattr(hidden, end) for end in ("low", "mid", "high"))
        low, mid, high = ends
        return Interval(low=low, mid=mid, high=high)

    def share(self, seconds: Interval) -> Interval:
        """Seconds as a fraction of the step."""
        return scaled(seconds, 1 / self.step) if self.step else NOTHING

    @property
    def compute(self) -> float:
        """The operators of forward and backward: `cached` without all other parts."""
        late = self.slow.compute if self.slow else 0.0
        return max(0.0, self.cached - self.transfer.mid - self.optimizer.mid - self.communication.mid - self.host.mid - late)


def _observed(e: Evidence) -> Costs:
    """Compute the costs from timelines alone, by the means of the phases over the ranks, each without what stalls add to it.

    Timelines do not show the host's time and communication. The phase `other` counts as host.
    """
    stalled = stalled_phases(e)
    stalls = sum(stalled.values())
    clean = e.step - stalls
    slow = slow_rank(e.ranks)
    waits = sorted(rank.wait for rank in e.ranks)
    wait = min(waits[(len(waits) - 1) // 2], clean)
    means = {phase: statistics.fmean(rank.timeline.mean(phase) for rank in e.ranks) - stalled[phase] for phase in PHASES}
    working = sum(means.values()) - means["data_wait"]
    fair = (clean - wait) / working if working > 0 else 0.0  # what ranks wait for each other lies in the phases
    late = min(slow.excess, clean - wait) if slow else 0.0
    beside = bool(e.loading and e.loading.num_workers) and wait > 0.05 * clean
    cached = clean - wait - min(slow.input if slow else 0.0, late)
    return Costs(
        step=e.step,
        clean=clean,
        cached=cached,
        replayed=cached,
        loader=clean if beside else math.nan,  # whatever training saved, it would wait for its loader
        overlap=1.0 if beside else 0.0,
        data=_roughly(wait),
        transfer=_roughly(means["h2d"] * fair),
        optimizer=_roughly(means["optimizer"] * fair),
        communication=NOTHING,
        straggler=_roughly(late),
        host=_roughly(means["other"] * fair),
        sleeping=0.0,
        called=NOTHING,
        fixed=math.nan,
        stalls=_stalls(e, stalls),
        slow=slow,
    )


def _roughly(seconds: float) -> Interval:
    """The interval of a part that only timelines show. It costs less if another part overlaps with it, and seldom costs more."""
    return Interval(low=0.8 * seconds, mid=seconds, high=1.1 * seconds)


def mean_saved(arm: VariantTimes) -> float:
    """`arm.saved.mid`, without computing its interval."""
    base = sum(base for base, _ in arm.pairs)
    return 1 - sum(changed for _, changed in arm.pairs) / base if base else 0.0


def saved_by(e: Evidence, arm: VariantTimes, replayed: float) -> Interval:
    """Seconds that an ablation saves of its baseline, the replayed step; negative where it costs time."""
    return scaled(widened(e, arm), replayed)


def _saved(e: Evidence, name: str, replayed: float) -> Interval:
    return at_least_0(saved_by(e, e.arms[name], replayed)) if name in e.arms else NOTHING


def _loader(e: Evidence) -> float:
    alone = e.loading.alone * e.accumulation if e.loading else math.nan
    arm = e.arms["loader"].seconds if "loader" in e.arms else math.nan
    if e.world_size > 1 and not math.isnan(alone) and not math.isnan(arm):
        return max(alone, arm)  # `loading` is one rank's; the arm is the slowest one's
    return arm if math.isnan(alone) else alone


def _is_cheap(e: Evidence, loader: float, clean: float) -> bool:
    """Does the loader of a single rank, which works while training waits, take so little that few pairs with and without it were timed?"""
    return e.world_size == 1 and e.loading is not None and e.loading.kind == "DataLoader" and loader < CHEAP_LOADER * clean


def _overlap(clean: float, cached: float, loader: float) -> float:
    """Where the step without stalls is between `cached + loader` (no overlap: 0) and the larger of the two (full overlap: 1)."""
    smaller = min(cached, loader)
    if math.isnan(loader) or smaller <= 0:
        return 0.0
    return min(1.0, max(0.0, (cached + loader - clean) / smaller))


def _stalls(e: Evidence, seconds: float) -> Interval:
    """Seconds per step of the stalls. The interval is narrow for regular stalls, and n ± √n for irregular ones that were seen n times."""
    loose = 0.1 if e.stalls.every else 1 / math.sqrt(len(e.stalls.at) or 1)
    return Interval(low=seconds * (1 - min(1.0, loose)), mid=seconds, high=seconds * (1 + loose))


def _met(e: Evidence, data: Interval, loader: float, noise: float) -> Interval:
    """Seconds by which reductions take longer on fresh batches than on a replayed one, if the ranks load data without workers.

    Ranks that replay a batch run in step. On fresh batches they wait for each other. That wait is the additional cost of fresh batches,
    without the time of the slowest loader, and without the cost that a rank has on its own because a fresh batch is not in the caches.
    """
    if "no_sync" not in e.arms or e.loading is None or e.loading.num_workers or not e.ranks:
        return NOTHING
    if math.isnan(loader + sum(rank.alone + rank.compute for rank in e.ranks)):
        return NOTHING
    alone = max(rank.alone - rank.wait for rank in e.ranks)
    colder = max(0.0, alone - max(rank.compute for rank in e.ranks))
    more = subtract(data, max(loader, e.longest_wait) + colder)
    if not more.mid:
        return NOTHING
    return at_least_0(Interval(low=more.low - noise * alone, mid=more.mid, high=more.high + noise * alone))


def _stuck(e: Evidence) -> Interval:
    """Seconds per step of the stalls of reductions: stalls that no rank has on its own."""
    s, alone = e.stalls, [rank.stalls for rank in e.ranks]
    if "no_sync" not in e.arms or not s.steps or s.every or s.kind or not alone:
        return NOTHING
    for stalls in alone:
        expected = len(s.at) / s.steps * stalls.steps
        if expected < MIN_EXPECTED_STALLS or len(stalls.at) > expected / FEWER_STALLS:
            return NOTHING
    unevenly = max(0.0, e.longest_wait - min(rank.wait for rank in e.ranks))  # and the others wait for who waits for data
    own = sum(stalls.extra * len(stalls.at) / stalls.steps for stalls in alone)
    return subtract(_stalls(e, e.step * s.share), own + unevenly)


def _fixed(e: Evidence, cached: float, optimizer: float, communication: float) -> float:
    """The constant a of `a + m × samples`, which forward and backward take; from a batch of another size."""
    arm = e.arms.get("doubled")
    if arm is None or arm.samples <= 1:
        return math.nan
    other = optimizer + communication
    single = max(0.0, cached - other)
    more = max(0.0, cached * (1 - arm.saved.mid) - other)
    return min(single, max(0.0, (arm.samples * single - more) / (arm.samples - 1)))


def _host(e: Evidence, cached: float, optimizer: float, communication: float) -> tuple[Interval, float, Interval]:
    """`Costs.host`, `Costs.sleeping` and `Costs.called`, from the trace of a step.

    Tracing lengthens short operators and the gaps between operators. The interval is as wide as tracing slowed the whole step.
    """
    inside = e.inside
    if inside is None or not inside.step or math.isnan(inside.ops):  # nan: no trace could be taken
        return NOTHING, 0.0, NOTHING
    idle = max(0.0, 1 - (inside.ops + (inside.collectives or 0.0)) / inside.step)
    slower = max(0.0, inside.slowdown) / (1 + max(0.0, inside.slowdown))
    if e.world_size > 1:  # what ranks wait for each other is not the host's
        idle = max(0.0, idle - max(0.0, communication / cached - (inside.collectives or 0.0) / inside.step) if cached else idle)
    loose = max(slower, -inside.slowdown)  # a trace makes nothing faster: that was noise
    gaps = Interval(low=max(0.0, idle - loose), mid=max(0.0, idle - slower / 2), high=idle)
    seconds = scaled(gaps, cached)
    if inside.optimizer and inside.optimizer_ops is not None:
        python = max(0.0, inside.optimizer - inside.optimizer_ops) / inside.step * cached
        host = subtract(seconds, python)
    else:
        host = at_least_0(
            Interval(
                low=seconds.low - optimizer, mid=seconds.mid - PYTHON_IN_OPTIMIZER * min(optimizer, 2 * seconds.mid), high=seconds.high
            )
        )
    # all that the trace adds falls on what it writes down, so that the share of both shrinks without it
    small = max(0.0, inside.small_ops) / inside.step
    alone = (host.high / cached if cached else 0.0) + small
    bare = max(0.0, (alone - slower) / (1 - slower))
    called = scaled(Interval(low=min(bare, alone), mid=(min(bare, alone) + alone) / 2, high=alone), cached)
    untraced = inside.step / (1 + inside.slowdown)  # which `blocked` belongs to
    asleep = inside.blocked / untraced * cached - communication if inside.blocked else 0.0
    return host, min(host.mid, max(0.0, asleep)), called
