"""Doubt: what a law cannot tell, because too little was varied or because the intervals say so."""

from collections.abc import Mapping

from workbench import units
from workbench.laws.forecast import Band
from workbench.laws.objective import BOUNDS
from workbench.laws.points import Points

DISTINCT = 3
"""Sizes and amounts of data below which an exponent and its floor cannot be told apart: a curve with a floor has three numbers."""
RANGE = 4.0
"""Least ratio of largest to smallest: with an exponent of 0.35, a factor of 4 changes a part of the loss by a factor of 1.6."""
WIDE = 0.25
"""Widest interval of the exponent of N_opt that still tells something: over 100 times the compute, 0.25 is a factor of 3 in the size."""
FAR = 10.0
"""Extrapolation from which on it is said loudly; the published checks that are known go to some 40 times the compute."""


def doubts(points: Points, bands: Mapping[str, Band], exponent: Band, drawn: int, wanted: int) -> tuple[str, ...]:
    """What cannot be told, each with what to do; empty where nothing stands against the law.

    Args:
        points: what the law was fitted to.
        bands: E, A, B, alpha, beta with their intervals.
        exponent: of N_opt over compute, with its interval.
        drawn: bootstrap drawings that could be fitted.
        wanted: how many were asked for.
    """
    found = []
    for what, values, name, remedy in (
        ("parameters", points.sizes, "alpha", "models"),
        ("tokens", points.amounts, "beta", "amounts of data"),
    ):
        ratio = values[-1] / values[0]
        if len(values) < DISTINCT:
            found.append(
                f"only {len(values)} different numbers of {what}: {name} cannot be told from E; {DISTINCT} or more {remedy} are needed"
            )
        elif ratio < RANGE:
            found.append(f"{what} vary by a factor of {ratio:.2g} only: {name} cannot be told; a factor of {RANGE:.0f} or more is needed")
        elif not BOUNDS[0] * 1.01 < bands[name].mid < BOUNDS[1] * 0.99:
            found.append(
                f"{name} has run to the end of what is looked for ({bands[name].mid:.3g}): the points do not show how the loss bends"
            )
    if not wanted:
        return (*found, "no drawings were asked for, so there are no intervals: draws=200 makes some")
    if drawn < wanted:
        found.append(
            f"only {drawn} of {wanted} bootstrap drawings could be fitted: the intervals are not to be trusted; more points are needed"
        )
    width = exponent.high - exponent.low
    if not found and width > WIDE:
        found.append(
            f"the exponent of the best size lies anywhere from {exponent.low:.2f} to {exponent.high:.2f}: "
            "more sizes, more amounts of data or several seeds of each would narrow it"
        )
    return tuple(found)


def far(parameters: float, tokens: float, extrapolation: float, points: Points) -> tuple[str, ...]:
    """Notes on a prediction outside of what was measured."""
    found = []
    if extrapolation > FAR:
        found.append(
            f"far outside of what was measured ({units.times(extrapolation)} the compute): the interval knows only this form of law"
        )
    for what, value, values in (("parameters", parameters, points.sizes), ("tokens", tokens, points.amounts)):
        if value > values[-1]:
            found.append(f"{units.times(value / values[-1])} the most {what} measured")
        elif value < values[0]:
            found.append(f"{units.times(value / values[0])} the fewest {what} measured")
    return tuple(found)
