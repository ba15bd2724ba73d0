"""Learning-rate range test: one sweep from too small to too large, and six published rules that read a learning rate out of it.

What is done with the sweeps of several seeds, and whom to believe, is in `lr_range_found`.
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

ITERATIONS = 100
"""Steps of a sweep."""
BETA = 0.98
"""Weight of the past in the smoothed loss (fastai, Lightning)."""
DIVERGED = 4.0
"""A sweep ends where the smoothed loss is so many times the best one (fastai)."""
END, DIVERGES, NOT_FINITE = "end", "diverged", "not finite"
"""Why a sweep stopped: at its last learning rate; the loss grew beyond DIVERGED times its best; it was no number any more."""


class LrRangeError(ValueError):
    """No learning rate can be looked for; the message says what was given, what is allowed and what to try."""


def ladder(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` learning rates from `low` to `high`, each the same factor above the one before.

    >>> [round(lr, 3) for lr in ladder(0.001, 1.0, 4)]
    [0.001, 0.01, 0.1, 1.0]
    """
    return tuple(low * (high / low) ** (i / (count - 1)) for i in range(count))


def ema(values: Sequence[float], beta: float = BETA) -> tuple[float, ...]:
    """Exponential mean, bias-corrected: sum of beta^(k-i)·x_i over the same sum of weights, so that the first value is the first loss.

    >>> ema([2.0, 2.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = beta * mean + (1 - beta) * value, beta * weight + (1 - beta)
        out.append(mean / weight)
    return tuple(out)


def still(losses: Sequence[float]) -> bool:
    """Has the loss not moved by more than its noise by the end? A few losses cannot tell, and count as still.

    >>> still([2.0, 2.1, 2.0, 2.1, 2.0, 2.1]), still([2.0, 2.1, 2.0, 2.1, 1.5, 1.2])
    (True, False)
    """
    last = max(2, len(losses) // 5)
    head, tail = losses[:-last], losses[-last:]
    if len(head) < 2:
        return True
    error = statistics.stdev(head) * math.sqrt(1 / len(head) + 1 / last)
    return abs(statistics.fmean(tail) - statistics.fmean(head)) <= max(_ERRORS * error, _LEAST * abs(statistics.fmean(head)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSweep(JsonDataclass):
    """Losses of one seed while the learning rate grows from step to step."""

    lrs: tuple[float, ...]
    """Learning rate of each step that was taken."""
    losses: tuple[OrInf, ...]
    """Loss of each step's batch, before its update; the last may be no finite number."""
    planned: int = ITERATIONS
    """Steps that the sweep would have had without stopping."""
    seed: int = 0
    """Of its random numbers."""
    stopped: str = END
    """"end", "diverged" or "not finite"."""

    def __post_init__(self) -> None:
        if len(self.lrs) != len(self.losses) or not self.lrs:
            raise ValueError(f"a sweep has a loss for each learning rate: got {len(self.lrs)} rates and {len(self.losses)} losses")
        if any(not 0 < lr < math.inf for lr in self.lrs) or any(a >= b for a, b in zip(self.lrs, self.lrs[1:], strict=False)):
            raise ValueError("the learning rates of a sweep are above 0 and grow from step to step")

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Bias-corrected exponential mean of the losses, as fastai and Lightning smooth them."""
        return ema(self.losses)

    @property
    def kept(self) -> slice:
        """The steps that rules look at: without the first tenth, where the mean has seen little, and the last five, where it explodes."""
        finite = next((i for i, loss in enumerate(self.losses) if not math.isfinite(loss)), len(self.losses))
        return slice(self.planned // 10, max(0, min(finite, len(self.losses) - 5)))

    @property
    def start(self) -> float:
        """Mean loss of the first tenth, where the learning rate is too small to change anything."""
        return statistics.fmean(self.losses[: max(1, self.planned // 10)])

    @property
    def noise(self) -> float:
        """Standard deviation of the loss from batch to batch there; 0 with one batch."""
        head = self.losses[: max(2, self.planned // 5)]
        return statistics.pstdev(head) if all(map(math.isfinite, head)) else math.nan

    @property
    def falls(self) -> bool:
        """Does the loss fall by more than noise? The mean of ten steps in a row has to be three standard errors below the start."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        ten = max(2, self.planned // 10)
        if len(finite) < 2 * ten:
            return False
        means = [statistics.fmean(finite[i : i + ten]) for i in range(ten, len(finite) - ten + 1)]
        error = self.noise * math.sqrt(2 / ten)
        return min(means) < self.start - max(_ERRORS * error, _LEAST * abs(self.start))


_ERRORS, _LEAST = 3.0, 0.005
"""Standard errors, and share of the loss, by which it has to fall at least."""


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
    """In the middle of the longest valley (strictly falling subsequence of losses): a third and half of a third behind its start.

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
    found = lrs[left]
    while left >= -len(slopes) and abs(slopes[right] - slopes[left]) > threshold:
        found, right, left = lrs[left], right - 1, left - 1
    return found


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
"""Rule → what it makes of learning rates and smoothed losses."""
LEAST_POINTS = 10
"""A sweep of which fewer are left says nothing."""


def suggestions(sweep: LrSweep) -> dict[str, float | None]:
    """What each rule reads out of one sweep; None = it cannot tell.

    All look at the steps that `LrSweep.kept` leaves. The published rules smooth differently: torch-lr-finder's gets its own smoothing.
    """
    kept = sweep.kept
    lrs, smoothed, coarse = sweep.lrs[kept], sweep.smoothed[kept], _from_first(sweep.losses)[kept]
    if len(lrs) < LEAST_POINTS or max(smoothed) == min(smoothed):
        return dict.fromkeys(RULES)
    return {name: rule(lrs, coarse if name == "torch-lr-finder" else smoothed) for name, rule in RULES.items()}


def _from_first(losses: Sequence[float], new: float = 0.05) -> tuple[float, ...]:
    """Exponential mean that starts at the first loss, as torch-lr-finder's."""
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
    """Refuse what cannot be.

    Raises:
        ValueError: a learning rate that is not above 0, low above high, or a number that is too small.
    """
    for name, value in (("low", low), ("high", high)):
        if value is not None:
            real_number(name, value, above=0, what="a learning rate", also=", or None")
    if low is not None and high is not None and not 10 * low <= high:
        raise ValueError(f"low={low!r}, high={high!r}: high has to be at least ten times low, else there is nothing to sweep over")
    for name, value, least in (("sweeps", sweeps, 1), ("iterations", iterations, 30), ("race_steps", race_steps, 0)):
        whole_number(name, value, least=least)
