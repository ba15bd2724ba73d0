"""Explains the gap between N × one rank and N ranks: parts in seconds per step that add up to it, and what is not explained."""

import dataclasses
import math
import random
from collections.abc import Collection
from dataclasses import dataclass

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.gap_evidence import ArmSeconds, GapEvidence, Rounds, seconds_of

CAUSES = {
    "micro-batch": "each rank has a smaller batch than one process would have",
    "cores": "threads that are ready wait for a core that another rank uses",
    "memory": "the ranks share memory bandwidth, caches and clocks",
    "loaders": "the ranks' loaders share the machine",
    "slow rank": "one rank computes longer than the others",
    "uneven data": "one rank's data take longer than the others'",
    "uneven steps": "steps take longer now on one rank, now on another, and all ranks wait",
    "rare long steps": "steps are several times as long now and then, and all ranks wait",
    "many reductions": "starting the reductions of gradients",
    "large gradients": "sending the bytes of the gradients",
    "waits and reduction": "ranks wait for each other in the backward and send gradients, which whole launches do not tell apart",
    "other processes": "threads that are ready wait for a core that another process uses",
    "epochs": "starting the loader anew, which comes more often the more ranks share an epoch",
}
"""Part of the gap → what it is."""
UNEXPLAINED = "not explained"
"""What no experiment accounts for."""
REDUCTION = ("many reductions", "large gradients")
"""The two parts of the reduction of gradients."""
OTHERS, DISTURBED = "other processes", "other processes on this machine"
"""The part of the gap that is theirs, and what a verdict calls it."""
NO_CAUSE = (UNEXPLAINED, OTHERS)
"""Parts that are no property of the training."""
SAME = {
    "micro_batch": "each rank keeps its micro-batch, the global batch grows with the ranks",
    "global_batch": "the global batch stays, each rank has a part of it",
}
"""With what one process is compared."""
NAMED = 0.05
"""Fraction of the step from which on a part is named as a cause. Chosen: neighbouring blocks on a shared machine differ by 1 to 4 %, and a
part is the difference of several. With half, healthy trainings are blamed now and then; with twice, a tenth is lost unsaid."""
SURE = 0.5
"""Fraction of NAMED that the lower end of a part's interval has to reach as well. Chosen: an interval of few rounds is itself not exact."""
UNCLEAR = 0.2
"""Width of the interval of rare long steps, as a fraction of the step, from which on nothing is called close to linear. Chosen: four times
the share from which on a part is named."""
DRAWS, LEVEL = 200, 0.9
"""Resamples of the rounds, and the probability that a part's interval holds. Chosen as for other intervals here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPart(JsonDataclass):
    """One part of the gap. Below 0: N ranks do better there than one."""

    cause: str
    """One of CAUSES, or UNEXPLAINED."""
    seconds: Interval
    """Per step of N ranks."""
    predicted: bool = False
    """True: from formulas, for ranks that are not here."""

    @property
    def words(self) -> str:
        """What it is."""
        return CAUSES.get(self.cause, "what no experiment accounts for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(JsonDataclass):
    """From one rank to N: seconds per step in parts that add up."""

    linear: Interval
    """Seconds of a step if N ranks gave N times one."""
    step: Interval
    """Seconds of a step as it is."""
    parts: tuple[GapPart, ...]
    """In the order of CAUSES, those that could be measured; the last one is UNEXPLAINED."""
    same: str = "micro_batch"
    """One of SAME."""
    predicted: bool = False

    @property
    def seconds(self) -> float:
        """The gap: what a step takes longer than if scaling were linear."""
        return self.step.mid - self.linear.mid

    @property
    def efficiency(self) -> float:
        """Throughput over N times that of one."""
        return self.linear.mid / self.step.mid

    @property
    def residual(self) -> float:
        """What is not explained, as a fraction of the gap; of a gap below NAMED of the step, as a fraction of that."""
        rest = abs(self[UNEXPLAINED].mid)
        return rest / max(abs(self.seconds), NAMED * self.step.mid)

    def share(self, cause: str) -> float:
        """A part as a fraction of the step."""
        return self[cause].mid / self.step.mid

    def __getitem__(self, cause: str) -> Interval:
        """Seconds of a part; 0 if it was not measured."""
        return next((part.seconds for part in self.parts if part.cause == cause), Interval(low=0.0, mid=0.0, high=0.0))

    @property
    def named(self) -> tuple[GapPart, ...]:
        """The parts that are beyond doubt and large enough to be named, the largest first."""
        least, sure = NAMED * self.step.mid, SURE * NAMED * self.step.mid
        large = [p for p in self.parts if p.seconds.mid >= least and p.seconds.low >= sure and p.cause not in NO_CAUSE]
        return tuple(sorted(large, key=lambda part: -part.seconds.mid))

    @property
    def by_others(self) -> float:
        """Seconds per step that other processes take beyond doubt: 0 where their part's interval reaches 0."""
        return self[OTHERS].mid if self[OTHERS].low > 0 else 0.0

    @property
    def named_in_words(self) -> list[str]:
        """The named parts as shares of the step, the largest first; before them other processes, where they take more than the cause."""
        others = [part for part in self.parts if part.cause == OTHERS and self.by_others > self[self.cause].mid]
        what = {OTHERS: f"{DISTURBED}, no property of the training"}
        return [
            f"{units.percent(part.seconds.mid / self.step.mid)} of the step: {what.get(part.cause, part.words)}"
            for part in sorted([*self.named, *others], key=lambda part: -part.seconds.mid)
        ]

    @property
    def cause(self) -> str:
        """The largest part that can be named; "" where scaling is close to linear, UNEXPLAINED where the rest is larger than any part."""
        if self.step.mid - self.linear.mid < NAMED * self.step.mid:
            return ""
        reduction = sum(part.seconds.mid for part in self.named if part.cause in REDUCTION)  # one cause in two parts

        def weight(part: GapPart) -> tuple[float, float]:
            return reduction if part.cause in REDUCTION else part.seconds.mid, part.seconds.mid

        largest = max(self.named, key=weight, default=None)
        rest = self[UNEXPLAINED]
        if rest.mid > (largest.seconds.mid if largest else NAMED * self.step.mid) and rest.low > 0:
            return UNEXPLAINED
        return largest.cause if largest else ""

    @property
    def few_rare(self) -> str:
        """That there are rare long steps, too few to say whether they make a large part of the gap, in words; "" = they are known."""
        rare = self["rare long steps"]
        if self.cause or rare.width <= UNCLEAR * self.step.mid:
            return ""
        span = f"{units.seconds(rare.low)} … {units.seconds(rare.high)}"
        return f"Steps that are long now and then add {span} to the gap: too few of them were seen to tell"

    def without(self, causes: Collection[str]) -> "Gap":
        """What would be left if some parts were gone, all else as it is: predicted.

        Raises:
            ValueError: there is no such part.
        """
        gone = [part.seconds for part in self.parts if part.cause in causes]
        if len(gone) < len(set(causes)):
            raise ValueError(f"without({sorted(causes)}): the parts of this gap are {', '.join(part.cause for part in self.parts)}")
        mid = self.step.mid - math.fsum(part.mid for part in gone)
        down = math.hypot(self.step.mid - self.step.low, *(part.high - part.mid for part in gone))
        up = math.hypot(self.step.high - self.step.mid, *(part.mid - part.low for part in gone))
        step = Interval(low=min(mid, max(mid / 2, mid - down)), mid=mid, high=mid + up)
        parts = tuple(part for part in self.parts if part.cause not in causes)
        return dataclasses.replace(self, step=step, parts=parts, predicted=True)

    def gain(self, causes: Collection[str]) -> Interval:
        """Speedup if some parts were gone, with the interval of these parts."""
        gone = [self[cause] for cause in causes]

        def speedup(seconds: float) -> float:
            return self.step.mid / (self.step.mid - seconds) if seconds < self.step.mid else math.inf

        low, mid, high = (speedup(math.fsum(getattr(part, end) for part in gone)) for end in ("low", "mid", "high"))
        return Interval(low=low, mid=mid, high=high)

    def cost(self, cause: str, samples: float) -> float:
        """Samples per second that a part costs: losses are shared out as the seconds are, so they add up to the whole loss."""
        if not self.seconds:
            return 0.0
        return self[cause].mid / self.seconds * samples * (1 / self.linear.mid - 1 / self.step.mid)


def gap_of(evidence: GapEvidence, same: str = "micro_batch") -> Gap:
    """Explain the gap; `same` is one of SAME.

    Raises:
        ValueError: `same` is no such word, or not a round is complete.
    """
    if same not in SAME:
        raise ValueError(f"same={same!r}: allowed are " + " and ".join(f'"{name}" ({what})' for name, what in SAME.items()))
    if not evidence.count:
        raise ValueError("no round of experiments is complete, so nothing can be said of the gap: give it a larger budget_s")
    figures = Rounds.of(evidence)
    middle = _parts(evidence, figures.seconds(), same, rare=bool(figures.rare_count))
    drawn: dict[str, list[float]] = {name: [] for name in middle}
    chance, rounds = random.Random(0), evidence.count
    for _ in range(DRAWS if rounds > 1 else 0):
        picks = chance.choices(range(rounds), k=rounds)
        for name, value in _parts(evidence, figures.seconds(picks), same, rare=bool(figures.rare_count)).items():
            drawn[name].append(value)
    whole = middle["linear" if evidence.world_size == 1 else "step"]
    intervals = {name: _interval(name, value, drawn[name], whole) for name, value in middle.items()}
    if evidence.script:
        intervals = {name: _of_launches(evidence, name, value, middle["step"]) for name, value in intervals.items()}
    intervals |= {name: _at_least_own(evidence, intervals[name]) for name in REDUCTION if name in intervals}
    if rare := intervals.get("rare long steps"):  # rounds that happen to agree do not tell how often they come
        half = COUNTED * abs(rare.mid) / math.sqrt(figures.rare_count)
        intervals["rare long steps"] = Interval(low=min(rare.low, rare.mid - half), mid=rare.mid, high=max(rare.high, rare.mid + half))
    if evidence.world_size == 1:
        intervals["linear"] = _of_one_process(evidence, intervals["linear"])
    parts = tuple(GapPart(cause=name, seconds=intervals[name]) for name in (*CAUSES, UNEXPLAINED) if name in intervals)
    return Gap(linear=intervals["linear"], step=intervals["step"], parts=parts, same=same)


def _of_one_process(e: GapEvidence, linear: Interval) -> Interval:
    """The interval of a step of the one process that ran, from which others are predicted.

    A few rounds differ less among each other than from those of another minute, so it is not narrower than the error of one round over the
    square root of their number. Waits for cores that other processes took are in it: they may be gone a minute later, or twice as long.
    """
    least, others = ONE_ROUND * linear.mid / math.sqrt(e.count), (1 - e.own_share(1)) * seconds_of(e).one_waits
    down, up = (math.hypot(max(half, least), others) for half in (linear.mid - linear.low, linear.high - linear.mid))
    return _around("linear", linear.mid, down, up)


def _at_least_own(e: GapEvidence, reduction: Interval) -> Interval:
    """A part of the reduction whose lower end is what it would cost if its threads had got only what other processes left of the cores.

    The waits of the threads that reduce are not seen. Where others take 1.6 of two cores, a thread may get a fifth of what it wants, and a
    reduction that takes 0.4 ms on a quiet machine was seen to take 5 ms.
    """
    if not e.disturbed or not e.cores or reduction.mid <= 0:
        return reduction
    left = max(0.0, 1 - e.foreign / e.cores)
    return Interval(low=min(reduction.low, left * reduction.mid), mid=reduction.mid, high=reduction.high)


COUNTED = 1.64
"""Half of the interval of a count over its square root, as of events that come by chance. Derived: the normal quantile at LEVEL."""
ENDS = ("linear", "step")
"""What the parts lie between."""
ONE_ROUND = 0.05
"""Fraction of the step by which a part that was measured in one round may be off. Chosen: neighbouring blocks on a quiet machine differ by
3 % in standard deviation, so 9 of 10 by less."""
CHUNK_ERROR = 3.3
"""Half of the interval that four chunks of a launch give, over half of their bootstrap's. Derived: Student's t of 3 degrees over the normal
quantile at LEVEL; the square root of 4/3, since a bootstrap divides by the count; and 2, for the mean of four errs like one of them where a
load that changes between the chunks of a launch differs between launches, too."""


def _of_launches(e: GapEvidence, name: str, value: Interval, step: float) -> Interval:
    """The interval of a figure of a script, each of whose experiments is a launch, or several.

    Three errors are added as independent ones are: by how much launches of a program differ (an end of the gap is of one launch, a
    part is the difference of two), the steps of a launch, and the cores that other processes took, perhaps in one launch only. The first
    and the last are divided by the square root of how often each was launched.
    """
    launches = ONE_ROUND * step if name not in ENDS else ONE_ROUND / math.sqrt(2) * value.mid
    load, times = e.foreign / e.cores * step if e.cores else 0.0, math.sqrt(e.launches)
    down, up = (math.hypot(launches / times, CHUNK_ERROR * half, load / times) for half in (value.mid - value.low, value.high - value.mid))
    return _around(name, value.mid, down, up)


def _around(name: str, mid: float, down: float, up: float) -> Interval:
    """The interval of a figure, by its errors in seconds. A step takes more than 0 s, so its lower end is the figure divided by
    1 + down / mid, which a large error does not make negative.
    """
    low = mid / (1 + down / mid) if name in ENDS and mid > 0 else mid - down
    return Interval(low=low, mid=mid, high=mid + up)


def _interval(name: str, mid: float, drawn: list[float], step: float) -> Interval:
    if not drawn:
        return _around(name, mid, ONE_ROUND * step, ONE_ROUND * step)
    ordered = sorted(drawn)
    edge = round((1 - LEVEL) / 2 * (len(ordered) - 1))
    return Interval(low=min(ordered[edge], mid), mid=mid, high=max(ordered[-1 - edge], mid))


def _parts(e: GapEvidence, s: ArmSeconds, same: str, *, rare: bool) -> dict[str, float]:
    """Seconds of each part, of the step and of the linear step: linear + parts = step, exactly. `rare`: there are rare long steps."""
    parts: dict[str, float] = {}
    starts = _starts(e, s)
    linear = s.one + s.one_waits + starts[0] + s.rare_alone
    cached = _known(s.one_cached, s.strangers_cached)
    if same == "global_batch" and e.large and _known(s.one_large):
        base = s.one_cached if _known(s.one_cached) else s.one
        parts["micro-batch"] = base - s.one_large / e.large
        linear -= parts["micro-batch"]
    compute = s.strangers_cached - s.one_cached if cached else s.strangers - s.one
    own, own_alone, crowding, others = e.own_share(e.world_size), e.own_share(1), 0.0, 0.0
    if e.script and not e.knows_waits:  # they are in the compute, and nothing tells them from waits for memory
        crowding, others = (own * compute, (1 - own) * compute) if e.crowded or e.disturbed else (0.0, 0.0)
    elif e.crowded:  # threads that poll for each other do not wait, and take their core all the same
        crowding = max(0.0, compute)
    if e.crowded or not e.disturbed:
        parts["cores"] = own * s.waits - own_alone * s.one_waits + crowding
    parts["memory"] = compute - crowding - others
    if e.disturbed:
        parts["other processes"] = (1 - own) * s.waits - (1 - own_alone) * s.one_waits + others
    if cached:
        parts["loaders"] = (s.strangers - s.strangers_cached) - (s.one - s.one_cached)
    parts |= _uneven(s, cached)
    if rare:
        parts["rare long steps"] = s.rare - s.rare_alone
    if (reduction := _reduction(e, s)) is not None:
        parts |= reduction
        if e.disturbed:  # threads that reduce wait for cores as well, which nobody sees: what the fastest steps do not have is of others
            whole = sum(reduction.values())
            foreign = (1 - own) * max(0.0, whole - max(0.0, s.shift))
            parts |= {name: part * (1 - foreign / whole) for name, part in reduction.items()} if foreign else {}
            parts["other processes"] += foreign
    if e.steps_per_pass:
        parts["epochs"] = starts[1] - starts[0]
    step = s.together + s.waits + starts[1] + s.rare
    if e.script:
        parts = _of_script(e, s, parts)
    rest = step - linear - sum(parts.values())
    return {"linear": linear, "step": step, **parts, UNEXPLAINED: rest}


def _of_script(e: GapEvidence, s: ArmSeconds, parts: dict[str, float]) -> dict[str, float]:
    """The parts that whole launches tell.

    Of what the backward takes longer beside other ranks, only as much is the reduction as the gradients would take by themselves, if that
    is known. Waits for data are not seen, and are in the other parts. So are waits for a core where the kernel does not count them: where
    ranks and others want more cores than there are, they are taken for all that strangers compute longer, and elsewhere for none of it.
    """
    unseen = {"uneven data"} | (set() if e.knows_waits else {"memory"} if e.crowded or e.disturbed else {"cores"})
    parts = {name: seconds for name, seconds in parts.items() if name not in unseen}
    longer = max(0.0, s.backward - max(0.0, parts["uneven steps"]))
    if g := e.gradients:
        reduced, starts = min(longer, g.buckets * g.latency + g.size * g.per_byte), starting_share(e)
        parts |= {"many reductions": reduced * starts, "large gradients": reduced * (1 - starts)}
        longer -= reduced
    return parts | {"waits and reduction": longer}


def _uneven(s: ArmSeconds, cached: bool) -> dict[str, float]:
    """What the slowest rank takes longer than a typical one, and what all wait by chance."""
    slow = s.strangers_slowest - s.strangers
    computing = min(max(0.0, s.cached_slowest - s.strangers_cached), max(0.0, slow)) if cached else slow
    if cached and _known(s.same, s.same_slowest):  # with the same batches the rank itself is slow, or it is not
        computing = min(computing, max(0.0, s.same_slowest - s.same))
    return {"slow rank": computing, "uneven data": slow - computing, "uneven steps": s.pace - s.strangers_slowest}


def _reduction(e: GapEvidence, s: ArmSeconds) -> dict[str, float] | None:
    """What the reduction adds to the pace of the slowest rank, by what starts and what bytes cost; None = no such arm has run."""
    if not _known(s.together_cached, s.cached_pace):
        return None
    whole = s.together_cached - s.cached_pace
    starts = starting_share(e)
    return {"many reductions": whole * starts, "large gradients": whole * (1 - starts)}


def starting_share(e: GapEvidence) -> float:
    """Of the reduction: what its starts cost, the rest goes with the bytes."""
    g = e.gradients
    if g is None or not g.buckets * g.latency + g.size * g.per_byte > 0:
        return 0.0
    return g.buckets * g.latency / (g.buckets * g.latency + g.size * g.per_byte)


def _starts(e: GapEvidence, s: ArmSeconds) -> tuple[float, float]:
    """Seconds per step that the starts of the loader add: to one process, which has N times as many steps in an epoch, and to N."""
    if not e.steps_per_pass:
        return 0.0, 0.0
    alone = max(0.0, s.start_alone) if _known(s.start_alone) else 0.0
    together = max(0.0, s.start_together) if _known(s.start_together) else alone
    return alone / (e.steps_per_pass * e.world_size), together / e.steps_per_pass


def _known(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)
