"""The forms of scaling curves: how the time per sample may grow with the number of processes, and how each form is fitted.

All are about t(n) = n / throughput(n), the seconds that one process spends on a sample. Perfect scaling is a constant t. In weak scaling
it is the step's time over the samples of one process; in strong scaling, where the step gets shorter, n times its time over the batch.

Most forms are sums of terms with a factor of at least 0 each, so that exact non-negative least squares fits them, without a starting value.
No form lets a process get faster because there are more of them: where a measured curve does (caches, luck), that is not extrapolated.

Some forms need more than the points: exposed communication, the stages of a pipeline, or weights that are shared. A formula with the right
mechanism predicts better than a curve through the points, and needs fewer of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.core.checks import is_whole
from workbench.core.codec import JsonDataclass
from workbench.scaling.analysis.curve.point import CurveError

Kind = Literal["weak", "strong"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a form is fitted to, by ascending number of processes."""

    sizes: Floats
    """Processes."""
    times: Floats
    """Seconds per sample and process."""
    exposed: Floats
    """Share of the step that is nothing but communication; nan = not measured."""
    noise: float
    """Standard deviation of a time, as a fraction of it."""

    def shaken(self, chance: np.random.Generator, noise: Floats) -> "Data":
        """The same points with new random noise."""
        times = self.times * np.exp(noise * chance.standard_normal(len(self.times)))
        return Data(sizes=self.sizes, times=times, exposed=self.exposed, noise=self.noise)


Law = Callable[[Floats], Floats]
"""A fitted form: processes → seconds per sample and process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How(JsonDataclass):
    """What the processes of a curve do, as far as it says how throughput grows."""

    pipeline: int | None = None
    """They are the stages of a pipeline: micro-batches that go through it in a step × chunks of layers on each stage. None = they are no
    stages."""
    sharded: bool = False
    """They share the weights, and gather and scatter them in each step (ZeRO-3, FSDP)."""

    def __post_init__(self) -> None:
        if self.pipeline is not None and not is_whole(self.pipeline, least=1, numpy=True):
            raise CurveError(
                f"pipeline={self.pipeline!r}: the micro-batches of a step × chunks on each stage are needed, a whole number of at least 1, "
                "or None where the processes are not stages"
            )
        if not isinstance(self.sharded, bool):
            raise CurveError(f"sharded={self.sharded!r}: True or False is allowed")


def bubble(micro_batches: int) -> Callable[[Data], Law]:
    """t = a (1 + (n−1)/m): the bubble of GPipe and 1F1B with n stages, m = micro-batches × chunks (interleaved: Narayanan and others 2021).

    Left out: what the boundaries send, and stages that are not equally long.
    """

    def fit(data: Data) -> Law:
        lengths = 1 + (data.sizes - 1) / micro_batches
        a = float(np.exp(np.mean(np.log(data.times / lengths))))
        return lambda sizes: a * (1 + (sizes - 1) / micro_batches)

    return fit


def sharded(kind: Kind) -> Callable[[Data], Law]:
    """Weights are gathered while others are computed with: t = max(compute, b (1−1/n)) + c (n−1).

    All-gathers and reduce-scatters move (n−1)/n of the weights and pay n−1 latencies each. In strong scaling a
    process has less to compute, and gathers as much. Both sides of the maximum are fitted, and the better one is kept.
    """

    def parts(sizes: Floats) -> tuple[Floats, Floats, Floats]:
        per_step = sizes if kind == "strong" else np.ones_like(sizes)
        return np.ones_like(sizes), per_step * (1 - 1 / sizes), per_step * (sizes - 1)

    def fit(data: Data) -> Law:
        from scipy.optimize import nnls

        constant, moved, late = parts(data.sizes)
        alone, error_alone = nnls(np.stack([constant, late], 1) / data.times[:, None], np.ones_like(constant))
        several = data.sizes > 1
        bound = np.stack([moved, late], 1)[several] / data.times[several, None]
        waiting, error_waiting = nnls(bound, np.ones(int(several.sum())))
        if several.sum() > 2 and error_waiting < error_alone:  # two numbers pass through two points, whatever they are
            compute = float(data.times[~several][0]) if (~several).any() else 0.0
            a, b, c = compute, float(waiting[0]), float(waiting[1])
        else:
            a, b, c = float(alone[0]), 0.0, float(alone[1])

        def law(sizes: Floats) -> Floats:
            constant, moved, late = parts(sizes)
            return np.maximum(a * constant, b * moved) + c * late

        return law

    return fit


def exposed(kind: Kind, *, hidden: bool) -> Callable[[Data], Law]:
    """Compute and exposed communication apart: compute stays what it was, and only communication is extrapolated.

    A ring sends 2(n−1)/n of the gradient and pays 2(n−1) latencies: seconds of a step = b(1−1/n) + c(n−1). Buckets are sent
    while the backward goes on, and hide a part h of them: exposed = max(0, b(1−1/n) + c(n−1) − h). In strong scaling the backward, and
    with it what it can hide, gets shorter with the step.

    Args:
        kind: kind of scaling, "strong" or "weak".
        hidden: fit h too; else 0.
    """

    def terms(sizes: Floats) -> list[Floats]:
        per_step = sizes if kind == "strong" else np.ones_like(sizes)  # of one process' samples there are fewer in a step
        columns = [per_step * (1 - 1 / sizes), per_step * (sizes - 1)]
        return [*columns, -np.ones_like(sizes)] if hidden else columns

    def fit(data: Data) -> Law:
        from scipy.optimize import nnls

        known = np.isfinite(data.exposed)
        compute = float(np.exp(np.mean(np.log(data.times[known] * (1 - data.exposed[known])))))
        several = known & (data.sizes > 1)
        if hidden:
            several &= data.exposed > 0  # where nothing shows, all that is known is that h was enough
        waiting = data.times * np.where(known, data.exposed, 0)
        factors = nnls(np.stack(terms(data.sizes[several]), 1) / data.times[several, None], (waiting / data.times)[several])[0]
        return lambda sizes: compute + np.maximum(0, np.stack(terms(sizes), -1) @ factors)

    return fit


def shown(data: Data, *, hidden: bool) -> int:
    """Points that `exposed` can be fitted to."""
    several = np.isfinite(data.exposed) & (data.sizes > 1)
    return int((several & (data.exposed > 0)).sum() if hidden else several.sum())


NOTHING = How()
_ROUNDS = 8
"""Reweightings of the robust fit; on ten points the weights move by less than 1 % after five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One law before it is fitted."""

    name: str
    """Its name."""
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
    factors: Floats = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        factors = nnls(weights[:, None] * relative / scale, weights)[0] / scale
        off = np.abs(relative @ factors - 1)
        new = np.sqrt(np.minimum(1, 2 * noise / np.maximum(off, 1e-12)))
        if float(np.abs(new - weights).max()) < 1e-3:
            break
        weights = new
    return factors


def forms(kind: Kind, how: How = NOTHING) -> tuple[Form, ...]:
    """All laws for a kind of scaling; the first is the naive line. Mechanisms join where the curve has what they need.

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
        Form(
            name=NAIVE,
            words="each process goes on as in the largest measured point",
            fewest=1,
            fit=lambda data: lambda sizes: np.full_like(sizes, data.times[-1]),
        ),
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
    """The same for several numbers of processes."""
    return sizes / np.maximum(law(sizes), 1e-300)
