"""GapEvidence: what experiments measured of N ranks and of one of them alone, before it is explained. Seconds and bytes only.

Each experiment is an arm, and arms take turns in rounds, so that neighbours in time are compared. A step is one optimizer step.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from workbench.core.codec import JsonDataclass
from workbench.diagnosis.analysis.evidence import Gradients

T = TypeVar("T")

ARMS = {
    "one": "one rank alone, as a training with one process",
    "one, cached": "one rank alone, with batches that it has already",
    "one, large batch": "one rank alone, with the batch of all ranks at once",
    "strangers": "all ranks at once, and no gradient is reduced",
    "strangers, cached": "the same with batches that they have already",
    "strangers, same batches": "the same with the batches of one of them on all",
    "all, cached": "all ranks reduce their gradients, with batches that they have already",
    "all": "the training as it is",
}
"""Arm → what runs in it."""
FED = ("one", "strangers", "all")
"""Arms with batches from the loader."""
CROWDED = 0.85
"""Part of the cores from which on ranks that use so much get into each other's way. Chosen: threads that wake up at the same moment do so
well before all cores are busy all the time. It decides how waits for a core are divided between the ranks and other processes."""
FOREIGN = 0.1
"""Share of the cores taken by others from which on a part of the waits for a core is theirs. Chosen; it decides the name of a part."""
MIN_FOREIGN = 0.1
"""Cores taken by other processes from which on a note says so. Chosen."""
LONG, RARE = 3.0, 0.2
"""Times the median step of its arm from which on a step is long, and the fraction of steps up to which such steps are rare. Chosen: one
in five may be long. Medians over rounds would leave rare ones out, or count them eightfold, so they are counted apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapBlock(JsonDataclass):
    """Some successive steps of an arm.

    For how long threads were ready and waited for a core is kept apart (see `core.system_load.RunQueueDelay`): what other processes take
    of the machine would disturb every part otherwise.
    """

    arm: str
    """One of ARMS."""
    steps: tuple[tuple[float, ...], ...]
    """Of each rank: seconds of its steps, nan where a pass over the loader began; empty for a rank that idled."""
    delays: tuple[tuple[float, ...], ...] = ()
    """Of each rank and step: of these, waiting for a core; empty = not known."""
    backward: tuple[float, ...] = ()
    """Of each rank of a script: mean seconds of the backward, in which ranks wait for each other and reduce; empty = not known."""

    def busy(self, rank: int) -> tuple[float, ...]:
        """Seconds of a rank's steps without waiting for a core; nan where a pass began."""
        if not self.delays:
            return self.steps[rank]
        return tuple(step - delay for step, delay in zip(self.steps[rank], self.delays[rank], strict=True))

    def mean(self, rank: int) -> float:
        """Mean of `busy`; nan if the rank idled."""
        return mean_of(self.busy(rank))

    def of_rank(self, rank: int) -> "GapBlock":
        """The steps of one rank alone."""
        return replace(self, steps=(self.steps[rank],), delays=self.delays[rank : rank + 1], backward=self.backward[rank : rank + 1])

    @property
    def means(self) -> list[float]:
        """Of all ranks."""
        return [self.mean(rank) for rank in range(len(self.steps))]

    @property
    def joint(self) -> float:
        """Mean seconds of a step that ranks take together, without the longest wait of any of them for a core."""
        return mean_of(self.joint_steps)

    @property
    def joint_steps(self) -> list[float]:
        """Of each step: seconds of the slowest rank, less the longest wait of any of them for a core."""
        return [largest(steps) - longest for steps, longest in zip(self._rows(self.steps), self._longest(), strict=True)]

    @property
    def waits(self) -> float:
        """Mean seconds per step that the ranks that took part waited for a core, the longest of each step.

        Steps with a start of the loader do not count: what starts take is measured by the clock, waits included.
        """
        known = mean_of([longest for longest, step in zip(self._longest(), self._rows(self.steps), strict=True) if largest(step) > 0])
        return known if known == known else 0.0

    @property
    def whole(self) -> float:
        """Mean seconds of a step of the slowest rank, waits for a core included."""
        return mean_of(list(map(largest, self._rows(self.steps))))

    @property
    def pace(self) -> float:
        """Mean seconds of the slowest rank of each step: what a step would take if ranks that run at their own pace met after each."""
        return mean_of(self.paces)

    @property
    def paces(self) -> list[float]:
        """Of each step: seconds of the slowest rank, without waiting for a core."""
        return [largest(row) for row in self._rows([self.busy(rank) for rank in range(len(self.steps))])]

    @property
    def known_paces(self) -> list[float]:
        """Those that are known: without steps in which a pass began."""
        return [pace for pace in self.paces if pace == pace]

    def _longest(self) -> list[float]:
        if not self.delays:
            return [0.0] * len(self._rows(self.steps))
        return [max(row) for row in self._rows(self.delays)]

    @staticmethod
    def _rows(values: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """Step by step, of the ranks that took part."""
        return list(zip(*(row for row in values if row), strict=False))


def largest(values: Sequence[float]) -> float:
    """The largest; nan if one is not known."""
    return max(values) if all(value == value for value in values) else math.nan


def mean_of(values: Sequence[float]) -> float:
    """Their mean without nan; nan if none is left."""
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail(JsonDataclass):
    """When gradients are ready within a step, as a hook at each parameter sees it. Mean seconds of the rank that waits least."""

    first: float
    """From the start of the step to its first gradient: before it nothing can be sent."""
    backward: float
    """From the first gradient to the last."""
    after: float
    """From the last gradient to the optimizer's step, with reduction: what of it nothing hides."""
    silent: float
    """The same without reduction."""

    @property
    def exposed(self) -> float:
        """Seconds of reduction after the last gradient."""
        return max(0.0, self.after - self.silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class GapEvidence(JsonDataclass):
    """All that was measured of N ranks beside one of them."""

    blocks: tuple[GapBlock, ...]
    """In the order in which they ran; the n-th of an arm is of the n-th round."""
    world_size: int
    one: int = 0
    """The rank that ran alone: a typical one."""
    samples: float | None = None
    """Per step over all ranks; None = not known."""
    accumulation: int = 1
    device: str = "cpu"
    cores: float | None = None
    """That the ranks share; None = not known."""
    foreign: float = 0.0
    """Cores that other processes took meanwhile."""
    wanted: float | None = None
    """Cores that all ranks and their loaders would use together if none waited for one; None = not known."""
    threads: int = 1
    """Of each rank, for one operator."""
    num_workers: int = 0
    """Of each rank's loader."""
    persistent_workers: bool = False
    misses_epochs: bool = False
    """As in `Loading`."""
    steps_per_pass: float | None = None
    """Steps of each rank from one start of its loader to the next; None = it has no end, or it is not known."""
    starts_alone: tuple[float, ...] = ()
    """Seconds that the start of a pass adds to a step, one rank alone."""
    starts_together: tuple[float, ...] = ()
    """The same where all ranks begin one at once: of the slowest rank."""
    gradients: Gradients | None = None
    """What is reduced, and what bare reductions cost between these ranks; None = nothing, or not known."""
    tail: Tail | None = None
    large: int = 0
    """How many times as large the batch of "one, large batch" was; 0 = not tried."""
    script: bool = False
    """Were whole processes compared, since a script cannot be taken apart?"""
    launches: int = 1
    """How often each arm of a script was launched."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Lines of a script: of its "loop" and optimizer "step", and that which makes its "ddp"; those that are known."""
    seconds: float = 0.0
    """What the experiments took."""
    notes: tuple[str, ...] = ()

    def rounds(self, arm: str) -> list[GapBlock]:
        """The blocks of an arm."""
        return [block for block in self.blocks if block.arm == arm]

    @property
    def count(self) -> int:
        """Rounds that are complete."""
        named = {block.arm for block in self.blocks} & {"one", "strangers", "all"}
        return min((len(self.rounds(arm)) for arm in named), default=0)

    @property
    def knows_waits(self) -> bool:
        """Is it known how long threads waited for a core?"""
        return any(block.delays for block in self.blocks)

    @property
    def crowded(self) -> bool:
        """Do the ranks want more cores than there are? By what they use, or where that is not known by their threads and workers."""
        if self.cores is None:
            return False
        if self.wanted is not None:
            return self.wanted > CROWDED * self.cores
        return self.device == "cpu" and self.world_size * (self.threads + self.num_workers) > self.cores + 0.5

    @property
    def disturbed(self) -> bool:
        """Did other processes take so much of the machine that a part of the waits for a core is theirs?"""
        return self.cores is not None and self.foreign > FOREIGN * self.cores

    def own_share(self, ranks: int) -> float:
        """Which fraction of the waits for a core so many of the ranks cause themselves; the rest is of other processes.

        All waits come from what ranks and others want beyond CROWDED of the cores. What the ranks alone want beyond that is their part. Of
        others only what they got is known, not what they wanted, so their part may be larger.
        """
        if self.cores is None or not self.disturbed:
            return 1.0
        if not self.crowded:
            return 0.0
        wanted = self.world_size * (self.threads + self.num_workers) if self.wanted is None else self.wanted
        excess = max(0.0, wanted * ranks / self.world_size - CROWDED * self.cores)
        return excess / (excess + self.foreign)

    @property
    def slowest(self) -> int:
        """The rank whose steps take longest without a reduction; the one that ran alone where none is known."""
        known = {rank: typical([block.mean(rank) for block in self.rounds("strangers")]) for rank in range(self.world_size)}
        known = {rank: seconds for rank, seconds in known.items() if seconds == seconds}
        return max(known, key=known.__getitem__, default=self.one)


@dataclass(frozen=True, slots=True)
class ArmSeconds:
    """Seconds per step of each arm, typical of some rounds, without waits for a core. nan = that arm did not run."""

    one: float
    one_cached: float
    one_large: float
    strangers: float
    """Of the rank that ran alone, as all below unless they say otherwise."""
    strangers_cached: float
    strangers_slowest: float
    """Of the slowest rank."""
    cached_slowest: float
    """Of that rank, with cached batches."""
    same_slowest: float
    """Of that rank, with the batches of the other one."""
    same: float
    pace: float
    cached_pace: float
    """Of strangers that meet after each step: see `GapBlock.pace`."""
    together: float
    """All ranks, with reduction."""
    together_cached: float
    shift: float
    """By how much a step of all that reduce, with cached batches, is longer than the pace, in the fastest quarter of the steps."""
    one_waits: float
    waits: float
    """For a core: one rank alone, and all that reduce."""
    start_alone: float
    start_together: float
    backward: float
    """What the backward of the slowest rank takes longer with the others than beside strangers; 0 where that is not known."""
    rare_alone: float
    rare: float
    """What rare long steps add to the mean step: one rank alone, and the slowest of all in each step. No other figure has them."""


@dataclass(frozen=True, slots=True)
class _Figures:
    """Of a block; computed once, since a bootstrap asks for them again and again."""

    means: list[float]
    pace: float
    joint: float
    waits: float
    low_pace: float
    low_joint: float
    backward: tuple[float, ...]
    rare: tuple[float, int, int]
    """Seconds that rare long steps take beyond the median one, the number of all steps, and that of these."""
    rare_alone: tuple[float, int, int]
    """The same of the rank that ran alone, as long as it waits for no other."""


@dataclass(slots=True)
class Rounds:
    """The figures of all blocks, by arm and round."""

    evidence: GapEvidence
    slowest: int
    arms: Mapping[str, list[_Figures]]

    @classmethod
    def of(cls, evidence: GapEvidence) -> "Rounds":
        """Of all blocks."""

        counted = [_long_steps(evidence.rounds(arm)) for arm in FED]

        def figures(arm: str) -> list[_Figures]:
            blocks, beside = evidence.rounds(arm), counted if arm in FED else []
            long, own = RareSteps.of(blocks, beside), [block.of_rank(evidence.one) for block in blocks] if arm in FED[:2] else []
            alone = RareSteps.of(own, beside).all_seconds(own) if own else [(0.0, 0, 0)] * len(blocks)
            found = []
            for block, rare, rare_alone in zip(map(long.without, blocks), long.all_seconds(blocks), alone, strict=True):
                lows = (lower_quartile(block.paces), lower_quartile(block.joint_steps))
                found.append(_Figures(block.means, block.pace, block.joint, block.waits, *lows, block.backward, rare, rare_alone))
            return found

        return cls(evidence, evidence.slowest, {arm: figures(arm) for arm in ARMS})

    @property
    def rare_count(self) -> int:
        """How many rare long steps were seen."""
        return sum(block.rare[2] for arm in FED for block in self.arms[arm])

    def seconds(self, picks: Sequence[int] | None = None) -> ArmSeconds:
        """The medians over rounds of each arm.

        Args:
            picks: numbers of the rounds, as often as they count; None = each once. A bootstrap gives others.
        """
        e, one, slow = self.evidence, self.evidence.one, self.slowest
        chosen = {arm: _picked(blocks, picks) for arm, blocks in self.arms.items()}

        def of(arm: str, rank: int = one) -> float:
            return typical([block.means[rank] for block in chosen[arm]])

        def rare(known: Sequence[tuple[float, int, int]]) -> float:
            steps = sum(count for _, count, _ in known)
            return math.fsum(seconds for seconds, *_ in known) / steps if steps else 0.0

        def waits(arm: str) -> float:
            return statistics.fmean(block.waits for block in chosen[arm]) if chosen[arm] else 0.0

        def backward(arm: str) -> float:
            return typical([block.backward[slow] for block in chosen[arm] if block.backward] or [0.0])

        return ArmSeconds(
            one=of("one"),
            one_cached=of("one, cached"),
            one_large=of("one, large batch"),
            strangers=of("strangers"),
            strangers_cached=of("strangers, cached"),
            strangers_slowest=of("strangers", slow),
            cached_slowest=of("strangers, cached", slow),
            same_slowest=of("strangers, same batches", slow),
            same=of("strangers, same batches"),
            pace=typical([block.pace for block in chosen["strangers"]]),
            cached_pace=typical([block.pace for block in chosen["strangers, cached"]]),
            together=typical([block.joint for block in chosen["all"]]),
            together_cached=typical([block.joint for block in chosen["all, cached"]]),
            shift=typical([block.low_joint for block in chosen["all, cached"]])
            - typical([block.low_pace for block in chosen["strangers, cached"]]),
            one_waits=waits("one"),
            waits=waits("all"),
            start_alone=typical(_picked(e.starts_alone, picks)),
            start_together=typical(_picked(e.starts_together, picks)),
            backward=backward("all") - backward("strangers"),
            rare_alone=rare([block.rare_alone for block in (*chosen["one"], *chosen["strangers"])]),
            rare=rare([block.rare for block in (*chosen["strangers"], *chosen["all"])]),
        )


def _long_steps(blocks: Sequence[GapBlock]) -> tuple[float, int, int]:
    """Seconds of the median step, how many steps are long, and how many there are."""
    paces = [pace for block in blocks for pace in block.known_paces]
    usual = statistics.median(paces) if paces else math.nan
    return usual, sum(pace > LONG * usual for pace in paces), len(paces)


@dataclass(frozen=True, slots=True)
class RareSteps:
    """Which steps of an arm are long and rare, by the seconds of the slowest rank without waits for a core."""

    usual: float
    """Seconds of the median step."""
    limit: float
    """Seconds from which on a step is one of them; inf = there are none."""

    @classmethod
    def of(cls, blocks: Sequence[GapBlock], beside: Sequence[tuple[float, int, int]] = ()) -> "RareSteps":
        """Of the blocks of an arm; by its `_long_steps` and those of the arms `beside` is known whether long steps are rare."""
        usual, long, count = _long_steps(blocks)
        longs, counts = (sum(column) for column in zip((long, count), *(other[1:] for other in beside), strict=True))
        return cls(usual, LONG * usual if 0 < longs <= RARE * counts else math.inf)

    def without(self, block: GapBlock) -> GapBlock:
        """The block with nan in place of these steps, on all ranks."""
        if math.isinf(self.limit):
            return block
        long = [pace > self.limit for pace in block.paces]
        steps = tuple(tuple(math.nan if gone else step for step, gone in zip(row, long, strict=False)) for row in block.steps)
        return replace(block, steps=steps)

    def all_seconds(self, blocks: Sequence[GapBlock]) -> list[tuple[float, int, int]]:
        """Of each block: what these steps take beyond the usual one, how many steps it has, and how many of them are these."""
        found = []
        for paces in (block.known_paces for block in blocks):
            beyond = [pace - self.usual for pace in paces if pace > self.limit]
            found.append((math.fsum(beyond), len(paces), len(beyond)))
        return found


def ranks_with_rare_steps(evidence: GapEvidence) -> list[int]:
    """The ranks that have rare long steps while none waits for another; all of them where it is not known."""
    blocks = evidence.rounds("strangers") or evidence.rounds("all")
    found = []
    for rank in range(evidence.world_size):
        own = [block.of_rank(rank) for block in blocks if block.steps[rank]]
        found += [rank] if math.isfinite(RareSteps.of(own).limit) else []
    return found or list(range(evidence.world_size))


def lower_quartile(values: Sequence[float]) -> float:
    """Below it lies a quarter of the values; nan if none is known.

    >>> lower_quartile([3.0, 1.0, 2.0, 4.0, 5.0])
    2.0
    """
    known = sorted(value for value in values if value == value)
    return known[len(known) // 4] if known else math.nan


def seconds_of(evidence: GapEvidence) -> ArmSeconds:
    """The medians over rounds of each arm."""
    return Rounds.of(evidence).seconds()


def _picked(values: Sequence[T], picks: Sequence[int] | None) -> list[T]:
    if picks is None or not values:
        return list(values)
    return [values[pick % len(values)] for pick in picks]


def typical(values: Sequence[float]) -> float:
    """Their median without nan; nan if none is left.

    >>> typical([1.0, math.nan, 3.0, 10.0]), typical([])
    (3.0, nan)
    """
    known = [value for value in values if value == value]
    return statistics.median(known) if known else math.nan


def expected_largest(values: Sequence[float], ranks: int) -> float:
    """The mean of the largest of so many draws from measured values.

    >>> expected_largest([1.0, 3.0], 1), expected_largest([1.0, 3.0], 2)
    (2.0, 2.5)
    """
    ordered = sorted(values)
    count = len(ordered)
    return sum(value * (((i + 1) / count) ** ranks - (i / count) ** ranks) for i, value in enumerate(ordered))
