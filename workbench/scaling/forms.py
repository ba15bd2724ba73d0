"""Forms: the laws by which the time per sample may grow with the number of processes, and how each is fitted.

All speak of t(n) = n / throughput(n), the seconds that one process spends on a sample. Perfect scaling is a constant t. In weak scaling
it is the step's time over the samples of one process; in strong scaling, where the step gets shorter, n times its time over the batch.

Most forms are sums of terms with a factor of at least 0 each, so that exact non-negative least squares fits them, without a starting value.
No form lets a process get faster because there are more of them: where a measured curve does (caches, luck), that is not carried on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from workbench.scaling.data import Data, Floats, Kind, Law
from workbench.scaling.mechanisms import How, bubble, exposed, sharded, shown

NOTHING = How()
_ROUNDS = 8
"""Reweightings of the robust fit; on ten points the weights move by less than 1 % after five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One law before it is fitted."""

    name: str
    """In a word."""
    words: str
    """Its formula and where it comes from."""
    fewest: int
    """Points below which it is not fitted."""
    fit: Callable[[Data], Law]
    counts: Callable[[Data], int] = lambda data: len(data.sizes)
    """Points that it can use."""

    def fits(self, data: Data) -> bool:
        """Can it be fitted to these points?"""
        return self.counts(data) >= self.fewest


NAIVE, LINEAR, COMMUNICATION, OVERLAP = "naive", "a + b(n−1)", "measured communication", "measured overlap"
BUBBLE, SHARDED = "pipeline bubble", "ZeRO-3"
FORMULAS_ARE: Mapping[Kind, str] = {"weak": "time per sample and process", "strong": "time of a step"}
"""What the formulas in `Form.words` give; a step of strong scaling takes t(n)/n times its samples."""
_SAMPLE = {
    LINEAR: "a + b(n−1): Amdahl, as time in weak scaling",
    "logarithm": "a + b log₂ n: trees, stragglers",
    "power law": "a nᵇ",
    "USL": "a + b(n−1) + c n(n−1): universal scalability law",
    COMMUNICATION: "compute + b(1−1/n) + c(n−1), from the exposed share measured",
    OVERLAP: "compute + max(0, b(1−1/n) + c(n−1) − h), h hidden behind the backward",
    BUBBLE: "a (1 + (n−1)/m), m micro-batches × chunks",
    SHARDED: "max(compute, b(1−1/n)) + c(n−1): weights gathered meanwhile",
}
_STEP = {
    LINEAR: "a/n + c: Amdahl",
    "logarithm": "a/n + b log₂ n: trees, stragglers",
    "power law": "a nᵇ/n",
    "USL": "(a + b(n−1) + c n(n−1))/n: universal scalability law",
    COMMUNICATION: "compute/n + b(1−1/n) + c(n−1), from the exposed share measured",
    OVERLAP: "compute/n + max(0, b(1−1/n) + c(n−1) − h/n), h hidden behind the backward",
    BUBBLE: "a/n (1 + (n−1)/m), m micro-batches × chunks",
    SHARDED: "max(compute/n, b(1−1/n)) + c(n−1): weights gathered meanwhile",
}
Terms = Callable[[Floats], Sequence[Floats]]


def _naive(data: Data) -> Law:
    last = float(data.times[-1])
    return lambda sizes: np.full_like(sizes, last)


def _power(data: Data) -> Law:
    """Least squares in logarithms; an exponent below 0 becomes 0."""
    x, y = np.log(data.sizes), np.log(data.times)
    off = x - x.mean()
    slope = max(0.0, float(off @ y / (off @ off)))
    start = float(np.mean(y - slope * x))
    return lambda sizes: np.exp(start + slope * np.log(sizes))


def _sum(terms: Terms) -> Callable[[Data], Law]:
    """The fit of a sum of terms with factors of at least 0: relative errors, and points further off than noise explains count less."""

    def fit(data: Data) -> Law:
        factors = _non_negative(np.stack(list(terms(data.sizes)), 1), data.times, data.noise)
        return lambda sizes: np.stack(list(terms(sizes)), -1) @ factors

    return fit


def _non_negative(columns: Floats, times: Floats, noise: float) -> Floats:
    """Huber's robust fit by iteratively reweighted non-negative least squares of columns @ x ≈ times, errors as fractions of the times."""
    from scipy.optimize import nnls

    relative = columns / times[:, None]
    scale = np.abs(relative).max(0)  # n (n−1) beside 1: columns of like size keep the arithmetic exact
    weights = np.ones(len(times))
    found: Floats = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        found = nnls(weights[:, None] * relative / scale, weights)[0] / scale
        off = np.abs(relative @ found - 1)
        new = np.sqrt(np.minimum(1, 2 * noise / np.maximum(off, 1e-12)))
        if float(np.abs(new - weights).max()) < 1e-3:
            break
        weights = new
    return found


def forms(kind: Kind, how: How = NOTHING) -> tuple[Form, ...]:
    """All laws for a kind of scaling; the first is the naive line. Those of `mechanisms` come where the curve has what they need.

    Amdahl 1967 gives the serial share; Gunther 1993 (universal scalability law) adds n(n−1) for what every process agrees with every other.
    log n is the depth of a tree of messages, and about how the slowest of n processes falls behind.
    """
    strong = kind == "strong"  # what does not get shorter with the step counts n times per sample

    def linear(n: Floats) -> Sequence[Floats]:
        return np.ones_like(n), n if strong else n - 1

    def logarithm(n: Floats) -> Sequence[Floats]:
        return np.ones_like(n), np.log2(n) * (n if strong else 1)

    def usl(n: Floats) -> Sequence[Floats]:
        return np.ones_like(n), n - 1, n * (n - 1)

    words = _STEP if strong else _SAMPLE
    return (
        Form(name=NAIVE, words="each process goes on as in the largest measured point", fewest=1, fit=_naive),
        Form(name=LINEAR, words=words[LINEAR], fewest=2, fit=_sum(linear)),
        Form(name="logarithm", words=words["logarithm"], fewest=2, fit=_sum(logarithm)),
        Form(name="power law", words=words["power law"], fewest=2, fit=_power),
        Form(name="USL", words=words["USL"], fewest=4, fit=_sum(usl)),
        Form(
            name=COMMUNICATION, words=words[COMMUNICATION], fewest=2, fit=exposed(kind, hidden=False), counts=partial(shown, hidden=False)
        ),
        Form(name=OVERLAP, words=words[OVERLAP], fewest=3, fit=exposed(kind, hidden=True), counts=partial(shown, hidden=True)),
        *([Form(name=BUBBLE, words=words[BUBBLE], fewest=1, fit=bubble(how.pipeline))] if how.pipeline else []),
        *([Form(name=SHARDED, words=words[SHARDED], fewest=2, fit=sharded(kind))] if how.sharded else []),
    )


def at(law: Law, size: float) -> float:
    """Samples per second of all processes that a law gives for a number of them."""
    return float(rates(law, np.array([float(size)]))[0])


def rates(law: Law, sizes: Floats) -> Floats:
    """The same for several numbers of them."""
    return sizes / np.maximum(law(sizes), 1e-300)
