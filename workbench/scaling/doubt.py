"""Doubt: what stands against a prediction of throughput, and which measurement would narrow its interval."""

import itertools
import math
from typing import TYPE_CHECKING

from workbench import units
from workbench.scaling.forecast import times
from workbench.scaling.forms import COMMUNICATION, LINEAR, NAIVE, at
from workbench.scaling.point import CONTRADICTION, CurveError, ScalingPoint

if TYPE_CHECKING:
    from workbench.scaling.fitting import CurveFit

FAR = 4.0
"""Extrapolation from which on it is said loudly: published curves are known to about twice their measured part."""


def too_few(points: tuple[ScalingPoint, ...]) -> str:
    """Why a curve of fewer than two points is not fitted."""
    if not points:
        return "the curve has no usable point: all are oversubscribed or have failed. Measure at two or more numbers of processes that fit"
    one = points[0]
    return (
        f"a curve of one point ({one.world_size} processes, {units.rate(one.samples_per_sec)}): how throughput changes with the number of "
        f"processes cannot be told from it. Measure {2 * one.world_size} processes as well; failed and oversubscribed points do not count"
    )


def check_possible(points: tuple[ScalingPoint, ...]) -> None:
    """Refuse points that no machine can have given; those of runs that differ in nothing else are noisy at worst.

    Raises:
        CurveError: throughput per process doubles from one point to the next.
    """
    for before, after in itertools.pairwise(points):
        if after.per_process > CONTRADICTION * before.per_process and not (before.of_one_spec and after.of_one_spec):
            more = units.times(after.per_process / before.per_process)
            raise CurveError(
                f"the points contradict each other: {before.world_size} processes reach {units.rate(before.samples_per_sec)} and "
                f"{after.world_size} reach {units.rate(after.samples_per_sec)}, {more} as much each. "
                "The throughput of all processes together is wanted in every point, of one model, batch and precision"
            )


def notes(fit: "CurveFit", size: int) -> tuple[str, ...]:
    """What to keep in mind about a prediction for `size` processes."""
    largest = fit.points[-1].world_size
    found = []
    if size / largest >= FAR:
        found.append(
            f"far outside of what was measured ({times(size / largest)} the largest): "
            "another switch, another algorithm of the collectives or a slow node are in no law"
        )
    if fit.points[-1].samples_per_sec < fit.points[0].samples_per_sec:
        mixed = "if these are rates per process, multiply them by their number"
        slower = "what they do for each other costs more than they bring"
        found.append(f"all processes together do less than the fewest did: {slower if _of_one_spec(fit) else mixed}")
    if len(fit.points) == 2:
        found.append(f"two points: {_through(fit)}, and none could be tried")
    if _rises(fit):
        found.append("throughput per process rises with their number somewhere: no law carries that on; look at batch sizes and caches")
    return tuple(found)


def _of_one_spec(fit: "CurveFit") -> bool:
    return all(point.of_one_spec for point in fit.points)


def _through(fit: "CurveFit") -> str:
    """How many laws pass through all points."""
    count = sum(
        all(math.isclose(at(one.law, point.world_size), point.samples_per_sec, rel_tol=1e-6) for point in fit.points) for one in fit.fitted
    )
    if not count:
        return "no law passes through both"
    return "every law passes through both" if count == len(fit.fitted) else f"{count} of {len(fit.fitted)} laws pass through both"


def _rises(fit: "CurveFit") -> bool:
    return any(after.per_process > before.per_process * (1 + 2 * fit.noise) for before, after in itertools.pairwise(fit.points))


def narrowing(fit: "CurveFit", size: int) -> tuple[str, ...]:
    """Measurements that would narrow the interval, the most useful first."""
    largest = fit.points[-1].world_size
    if size <= largest:
        return () if fit.noise_source != "assumed" else ("measure each point twice or more: the noise is an assumption",)
    laws = {one.form.name: one.law for one in fit.fitted}
    apart = {n: abs(math.log(at(laws[NAIVE], n) / at(laws[LINEAR], n))) for n in (2 * largest, size)}
    found = []
    if size > 2 * largest and apart[size] > 2 * fit.noise:
        found.append(
            f"measure {2 * largest} processes: the laws lie {units.percent(math.expm1(apart[2 * largest]))} apart there, "
            f"the noise of a measurement is {units.percent(fit.noise)}"
        )
    elif len(fit.points) == 2:
        found.append("measure a third number of processes, so that each law can be tried on the last point")
    if COMMUNICATION not in laws:
        known = any(point.exposed is not None for point in fit.points)
        where = "two or more numbers of processes above 1" if known else "each point"
        found.append(f"measure the exposed communication of {where} (steps with and without no_sync, interleaved)")
    if fit.noise_source == "assumed" or apart[size] <= 2 * fit.noise:
        found.append(
            f"repeat each measurement: {'the noise is an assumption' if fit.noise_source == 'assumed' else 'noise is most of the interval'}"
        )
    return tuple(found)
