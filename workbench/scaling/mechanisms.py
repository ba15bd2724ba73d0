"""Mechanisms: laws for curves that say more of themselves: exposed communication measured, a pipeline's stages, weights that are shared.

A formula with the right mechanism foretells better than a curve through the points, and asks for fewer of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.checks import is_whole
from workbench.codec import JsonDataclass
from workbench.scaling.data import Data, Floats, Kind, Law
from workbench.scaling.point import CurveError


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
                f"pipeline={self.pipeline!r}: the micro-batches of a step × chunks on each stage are wanted, a whole number of at least 1, "
                "or None where the processes are no stages"
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

    All-gathers and reduce-scatters move (n−1)/n of the weights and pay n−1 latencies each (see `cost.volumes`). In strong scaling a
    process has less to compute, and gathers as much. Both sides of the maximum are fitted, and the better one is kept.
    """

    def parts(sizes: Floats) -> tuple[Floats, Floats, Floats]:
        per_step = sizes if kind == "strong" else np.ones_like(sizes)
        return np.ones_like(sizes), per_step * (1 - 1 / sizes), per_step * (sizes - 1)

    def fit(data: Data) -> Law:
        from scipy.optimize import nnls

        one, moved, late = parts(data.sizes)
        alone, error_alone = nnls(np.stack([one, late], 1) / data.times[:, None], np.ones_like(one))
        several = data.sizes > 1
        bound = np.stack([moved, late], 1)[several] / data.times[several, None]
        waiting, error_waiting = nnls(bound, np.ones(int(several.sum())))
        if several.sum() > 2 and error_waiting < error_alone:  # two numbers pass through two points, whatever they are
            compute = float(data.times[~several][0]) if (~several).any() else 0.0
            a, b, c = compute, float(waiting[0]), float(waiting[1])
        else:
            a, b, c = float(alone[0]), 0.0, float(alone[1])

        def law(sizes: Floats) -> Floats:
            one, moved, late = parts(sizes)
            return np.maximum(a * one, b * moved) + c * late

        return law

    return fit


def exposed(kind: Kind, *, hidden: bool) -> Callable[[Data], Law]:
    """Compute and exposed communication apart: compute stays what it was, and only communication is extrapolated.

    A ring sends 2(n−1)/n of the gradient and pays 2(n−1) latencies (see `cost`): seconds of a step = b(1−1/n) + c(n−1). Buckets are sent
    while the backward goes on, and hide a part h of them: exposed = max(0, b(1−1/n) + c(n−1) − h). In strong scaling the backward, and
    with it what it can hide, gets shorter with the step.

    Args:
        kind: of scaling.
        hidden: fit h too; else 0.
    """

    def terms(sizes: Floats) -> list[Floats]:
        per_step = sizes if kind == "strong" else np.ones_like(sizes)  # of one process' samples there are fewer in a step
        found = [per_step * (1 - 1 / sizes), per_step * (sizes - 1)]
        return [*found, -np.ones_like(sizes)] if hidden else found

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
