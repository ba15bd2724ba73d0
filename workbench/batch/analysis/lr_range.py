"""Learning-rate range test: sweeps of growing learning rates, six published rules that choose a rate from their losses, and `LrFound`.

Rules differ, and each differs from seed to seed, so there are several sweeps, and `lr_race` decides between the suggestions.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workbench.core.checks import real_number, whole_number
from workbench.core.codec import JsonDataclass, OrInf
from workbench.core.display import table as display
from workbench.core.units import several

SWEEPS = 5
"""Seeds. A single one is no measurement: the steepest slope moves by a factor of 19 between seeds, at a batch of 8."""
ITERATIONS = 100
"""Steps of a sweep."""
BETA = 0.98
"""Weight of the past in the smoothed loss (fastai, Lightning)."""
DIVERGED = 4.0
"""A sweep ends where the smoothed loss is this many times the best one (fastai)."""
END, DIVERGES, NOT_FINITE = "end", "diverged", "not finite"
"""Why a sweep stopped: at its last learning rate; the loss grew beyond DIVERGED times its best; or it became NaN or infinite."""
MIN_ERRORS, MIN_FALL = 3.0, 0.005
"""Standard errors, and share of the loss, by which it has to fall at least."""
MIN_POINTS = 10
"""A sweep with fewer points left suggests nothing."""
AS_GOOD = 0.9
"""A candidate whose loss fell by this share of the winner's fall is as good: `low` and `high` are the outermost of them."""
AS_GOOD_LOSS = 1.5
"""And its loss is at most so many times the winner's, if that is above 0. It decides where the loss fell to less than a sixth of its start:
there most candidates reach nine tenths of the fall, though their losses differ by a factor of ten."""


class LrRangeError(ValueError):
    """The search for a learning rate cannot run; the message says what was given, what is allowed and what to try."""


def geometric(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` learning rates from `low` to `high`, with equal ratios between neighbours.

    >>> [round(lr, 3) for lr in geometric(0.001, 1.0, 4)]
    [0.001, 0.01, 0.1, 1.0]
    """
    return tuple(low * (high / low) ** (i / (count - 1)) for i in range(count))


def ema(values: Sequence[float], beta: float = BETA) -> tuple[float, ...]:
    """Exponential moving average with bias correction: sum of beta^(k-i)·x_i over the sum of the weights.

    >>> ema([2.0, 2.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = beta * mean + (1 - beta) * value, beta * weight + (1 - beta)
        out.append(mean / weight)
    return tuple(out)


def is_flat(losses: Sequence[float]) -> bool:
    """Has the loss moved by no more than its noise by the end? Too few losses count as flat.

    >>> is_flat([2.0, 2.1, 2.0, 2.1, 2.0, 2.1]), is_flat([2.0, 2.1, 2.0, 2.1, 1.5, 1.2])
    (True, False)
    """
    last = max(2, len(losses) // 5)
    head, tail = losses[:-last], losses[-last:]
    if len(head) < 2:
        return True
    error = statistics.stdev(head) * math.sqrt(1 / len(head) + 1 / last)
    return abs(statistics.fmean(tail) - statistics.fmean(head)) <= max(MIN_ERRORS * error, MIN_FALL * abs(statistics.fmean(head)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSweep(JsonDataclass):
    """The losses of one seed while the learning rate grows from step to step."""

    lrs: tuple[float, ...]
    """Learning rate of each step."""
    losses: tuple[OrInf, ...]
    """Loss of each step before its update; the last may be NaN or infinite."""
    planned: int = ITERATIONS
    """Steps of a sweep that does not stop early."""
    seed: int = 0
    """Seed of its random numbers."""
    stopped: str = END
    """"end", "diverged" or "not finite"."""

    def __post_init__(self) -> None:
        if len(self.lrs) != len(self.losses) or not self.lrs:
            raise ValueError(f"a sweep has a loss for each learning rate: got {len(self.lrs)} rates and {len(self.losses)} losses")
        if any(not 0 < lr < math.inf for lr in self.lrs) or any(a >= b for a, b in zip(self.lrs, self.lrs[1:], strict=False)):
            raise ValueError("the learning rates of a sweep are above 0 and grow from step to step")

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Exponential moving average of the losses, as in fastai and Lightning."""
        return ema(self.losses)

    @property
    def kept(self) -> slice:
        """The steps that rules use: without the first tenth, where the average has little data, and the last five, where it explodes."""
        finite = next((i for i, loss in enumerate(self.losses) if not math.isfinite(loss)), len(self.losses))
        return slice(self.planned // 10, max(0, min(finite, len(self.losses) - 5)))

    @property
    def start(self) -> float:
        """Mean loss of the first tenth, where the learning rate is too small to change anything."""
        return statistics.fmean(self.losses[: max(1, self.planned // 10)])

    @property
    def noise(self) -> float:
        """Standard deviation of the loss from batch to batch in the first fifth."""
        head = self.losses[: max(2, self.planned // 5)]
        return statistics.pstdev(head) if all(map(math.isfinite, head)) else math.nan

    @property
    def falls(self) -> bool:
        """Does the loss fall by more than its noise? The mean of a tenth of the steps has to be three standard errors below the start."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        window = max(2, self.planned // 10)
        if len(finite) < 2 * window:
            return False
        means = [statistics.fmean(finite[i : i + window]) for i in range(window, len(finite) - window + 1)]
        error = self.noise * math.sqrt(2 / window)
        return min(means) < self.start - max(MIN_ERRORS * error, MIN_FALL * abs(self.start))


def steep(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """Where the loss falls fastest over the logarithm of the learning rate: argmin of ΔL/Δln η.

    Source: fastai `callback/schedule.py`, `steep`.
    """
    slopes = [(b - a) / math.log(y / x) for a, b, x, y in zip(losses, losses[1:], lrs, lrs[1:], strict=False)]
    return lrs[_lowest(slopes)]


def minimum(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """A tenth of the learning rate at the lowest loss.

    Source: fastai `callback/schedule.py`, `minimum`.
    """
    return lrs[_lowest(losses)] / 10


def valley(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """The learning rate in the middle third of the longest valley (strictly falling subsequence of losses).

    Source: fastai `callback/schedule.py`, `valley` (its default).
    """
    begin, end = _longest_fall(losses)
    third = (end - begin) / 3
    return lrs[max(0, begin + int(third) + int(third / 2))]


def slide(lrs: Sequence[float], losses: Sequence[float], *, apart: int = 15, threshold: float = 0.005) -> float | None:
    """Slides down from the right until the slopes at two ends of an interval of `apart` steps differ by less than `threshold`.

    Source: fastai `callback/schedule.py`, `slide`. The threshold is in units of the loss: the rule is not invariant to its scale.
    """
    slopes = _gradient(losses)
    right, left = -1, -1 - apart
    if len(slopes) < apart + 1:
        return None
    lr = lrs[left]
    while left >= -len(slopes) and abs(slopes[right] - slopes[left]) > threshold:
        lr, right, left = lrs[left], right - 1, left - 1
    return lr


def lightning(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """Where the loss falls fastest over the learning rate itself: argmin of dL/dη, which favours the smallest ones.

    Source: Lightning `tuner/lr_finder.py` since 2.5.3 (pull request #21055; before, it was dL/dindex).
    """
    return lrs[_lowest(_gradient(losses, lrs))]


def index(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """Where the loss falls fastest over the number of the step: argmin of dL/di.

    Source: torch-lr-finder `LRFinder.plot(suggest_lr=True)`, which smooths with weight 0.05 for the new loss and no bias correction.
    """
    return lrs[_lowest(_gradient(losses))]


Rule = Callable[[Sequence[float], Sequence[float]], float | None]
RULES: Mapping[str, Rule] = MappingProxyType(
    {"steep": steep, "minimum/10": minimum, "valley": valley, "slide": slide, "lightning": lightning, "torch-lr-finder": index}
)
"""Rule → function of learning rates and smoothed losses; None = no suggestion."""


def suggestions(sweep: LrSweep) -> dict[str, float | None]:
    """The suggestion of each rule from one sweep; None = it has none. torch-lr-finder's rule has its own smoothing."""
    kept = sweep.kept
    lrs, smoothed, coarse = sweep.lrs[kept], sweep.smoothed[kept], _from_first(sweep.losses)[kept]
    if len(lrs) < MIN_POINTS or max(smoothed) == min(smoothed):
        return dict.fromkeys(RULES)
    return {name: rule(lrs, coarse if name == "torch-lr-finder" else smoothed) for name, rule in RULES.items()}


def _from_first(losses: Sequence[float], new: float = 0.05) -> tuple[float, ...]:
    """Exponential moving average that starts at the first loss, as in torch-lr-finder."""
    out = [losses[0]]
    for loss in losses[1:]:
        out.append(new * loss + (1 - new) * out[-1])
    return tuple(out)


def _lowest(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)


def _gradient(values: Sequence[float], at: Sequence[float] | None = None) -> list[float]:
    """Slopes as `numpy.gradient` gives them: of second order inside, also where points are unevenly spaced; one-sided at both ends."""
    at = range(len(values)) if at is None else at
    slopes = [(b - a) / (y - x) for a, b, x, y in zip(values, values[1:], at, at[1:], strict=False)]
    steps = [y - x for x, y in itertools.pairwise(at)]
    inside = [(h * left + g * right) / (g + h) for left, right, g, h in zip(slopes, slopes[1:], steps, steps[1:], strict=False)]
    return [slopes[0], *inside, slopes[-1]]


def _longest_fall(values: Sequence[float]) -> tuple[int, int]:
    """First index, as fastai counts it (one too small), and last index of the longest strictly falling subsequence."""
    length = [1] * len(values)
    for i in range(1, len(values)):
        length[i] = max((length[j] + 1 for j in range(i) if values[i] < values[j]), default=1)
    end = max(range(len(values)), key=length.__getitem__)
    return end - length[end], end


def check_options(*, low: Any, high: Any, sweeps: Any, iterations: Any, race_steps: Any) -> None:
    """Refuse options out of range.

    Raises:
        ValueError: says what is allowed.
    """
    for name, value in (("low", low), ("high", high)):
        if value is not None:
            real_number(name, value, above=0, what="a learning rate", also=", or None")
    if low is not None and high is not None and not 10 * low <= high:
        raise ValueError(f"low={low!r}, high={high!r}: high has to be at least ten times low, else there is nothing to sweep over")
    for name, value, least in (("sweeps", sweeps, 1), ("iterations", iterations, 30), ("race_steps", race_steps, 0)):
        whole_number(name, value, least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSuggestion:
    """The suggestion of one rule over several seeds."""

    rule: str
    """One of RULES."""
    lr: float | None
    """Median over the seeds; None = the rule could not tell."""
    low: float | None = None
    """Smallest."""
    high: float | None = None
    """Largest."""
    seeds: int = 0
    """Seeds with a suggestion."""

    @property
    def spread(self) -> float | None:
        """Largest over smallest."""
        return None if self.low is None or self.high is None else self.high / self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A learning rate in the race."""

    lr: float
    """Constant during the race."""
    name: str
    """Its origin: a rule, or how the race added it."""
    scores: tuple[OrInf, ...] = ()
    """Mean loss of the second half of the steps, per round; infinite = diverged. All candidates of a round see equal batches."""

    def mean(self, rounds: int) -> float:
        """Mean score of the first rounds."""
        return statistics.fmean(self.scores[:rounds]) if self.scores else math.inf


def suggestions_over_seeds(sweeps: Sequence[LrSweep]) -> tuple[RuleSuggestion, ...]:
    """What each rule suggests: the median over the sweeps, in logarithms, and the range."""
    by_sweep = [suggestions(sweep) for sweep in sweeps]
    known = {rule: sorted(lr for by_rule in by_sweep if (lr := by_rule[rule]) is not None) for rule in RULES}
    return tuple(
        RuleSuggestion(rule=rule, lr=math.exp(statistics.median(map(math.log, lrs))), low=lrs[0], high=lrs[-1], seeds=len(lrs))
        if lrs
        else RuleSuggestion(rule=rule, lr=None)
        for rule, lrs in known.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LrFound(JsonDataclass):
    """The learning rate that a search found, with its evidence."""

    lr: float | None
    """The learning rate to use; None = the losses do not determine it, and `why` says why."""
    low: float | None = None
    """Smallest candidate that did about as well (see AS_GOOD); without a race the smallest suggestion of all rules."""
    high: float | None = None
    """Largest."""
    verified: bool = False
    """Was it chosen by a race? Otherwise a rule suggests it."""
    why: str = ""
    """How it was chosen, or why none was."""
    race_steps: int = 0
    """Steps of a candidate in one round."""
    batch: int | None = None
    """Samples per step over all ranks, for which the learning rate holds; None = not known."""
    steps: int = 0
    """Optimizer steps of the whole search."""
    start: float = math.nan
    """Loss at the start."""
    suggestions: tuple[RuleSuggestion, ...] = ()
    """Suggestion of each rule."""
    race: tuple[Candidate, ...] = ()
    """All candidates, by learning rate."""
    sweeps: tuple[LrSweep, ...] = ()
    """One per seed."""
    notes: tuple[str, ...] = ()
    """Remarks."""

    def changes(self) -> dict[str, float]:
        """The change to a RunSpec, for `spec.replace(**found.changes())`; empty without a learning rate."""
        return {} if self.lr is None else {"lr": self.lr}

    @property
    def summary(self) -> str:
        """One line."""
        if self.lr is None:
            return f"no learning rate: {self.why}"
        span = f" ({lr_text(self.low)} … {lr_text(self.high)})" if self.low is not None else ""
        return f"learning rate {lr_text(self.lr)}{span}: {self.why}"

    @property
    def table(self) -> display.Table:
        """What each rule suggests."""
        rows = [
            [rule.rule, lr_text(rule.lr), lr_text(rule.low), lr_text(rule.high), "–" if rule.spread is None else f"{rule.spread:.3g}×"]
            for rule in self.suggestions
        ]
        return display.Table(
            columns=("rule", "suggests", "low", "high", "spread"),
            rows=rows,
            title=self.summary,
            note="\n".join([f"median and range over {several(len(self.sweeps), 'seed')}", *([] if self.race else self.notes)]),
        )

    @property
    def race_table(self) -> display.Table | None:
        """The candidates, by learning rate; None without a race."""
        if not self.race:
            return None
        rounds = max(len(candidate.scores) for candidate in self.race)
        rows = []
        for candidate in self.race:
            scores = [f"{loss:.4g}" if math.isfinite(loss) else "diverged" for loss in candidate.scores]
            rows.append([lr_text(candidate.lr), candidate.name, *scores, *["–"] * (rounds - len(scores))])
        return display.Table(
            columns=("learning rate", "from", *(f"loss, round {i + 1}" for i in range(rounds))),
            rows=rows,
            title=f"Race over {self.race_steps} steps, from a loss of {self.start:.3g}",
            note="\n".join(["mean loss of the second half; equal batches within a round", *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per rule, and one per candidate of the race."""
        rules = [{"kind": "rule", "name": rule.rule, "lr": rule.lr, "low": rule.low, "high": rule.high} for rule in self.suggestions]
        race = [{"kind": "race", "name": runner.name, "lr": runner.lr, "loss": runner.mean(len(runner.scores))} for runner in self.race]
        return display.frame([*rules, *race], columns=("kind", "name", "lr", "low", "high", "loss"))

    plot = display.plot_method("lr_range")

    def __repr__(self) -> str:
        return f"LrFound({lr_text(self.lr)}{'' if self.verified or self.lr is None else ', not verified'})"

    def __str__(self) -> str:
        return "\n\n".join(str(table) for table in (self.table, self.race_table) if table)

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in (self.table, self.race_table) if table)


def lr_text(lr: float | None) -> str:
    """A learning rate as text.

    >>> lr_text(0.10337), lr_text(3.1e-6), lr_text(None)
    ('0.103', '3.1e-06', '–')
    """
    return "–" if lr is None else f"{lr:.3g}"
