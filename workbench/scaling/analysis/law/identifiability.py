"""Finds what a law cannot tell, because too little was varied or its intervals are too wide."""

from collections.abc import Mapping, Sequence

import numpy as np

from workbench.core import units
from workbench.core.statistics import Interval
from workbench.scaling.analysis.law.fit import BOUNDS, Five
from workbench.scaling.analysis.law.forecast import against
from workbench.scaling.analysis.law.points import Points

MIN_DISTINCT = 3
"""Sizes and amounts of data below which an exponent cannot be distinguished from the irreducible loss: such a curve has three numbers."""
MIN_RANGE = 4.0
"""Least ratio of largest to smallest: with an exponent of 0.35, a factor of 4 changes a part of the loss by a factor of 1.6."""
MAX_EXPONENT_WIDTH = 0.25
"""Widest interval of the exponent of N_opt that is still of use: over 100 times the compute, 0.25 is a factor of 3 in the size."""
MIN_EFFECT_OVER_SCATTER = 5.0
"""Least effect of a factor over the scatter of single runs: the means of four sizes that make no difference lie up to 3 apart by chance."""
MIN_EFFECT = 1e-4
"""Least effect as a share of the loss, however little the points scatter: exponents of less are the optimizer's, not the data's."""
MAX_CUT_SHARE = 0.05
"""Share of the drawings whose exponent ends at a bound, from which on it counts as cut off, not found."""
FAR_EXTRAPOLATION = 10.0
"""Extrapolation from which on a note warns; the published checks that are known go to some 40 times the compute."""


def not_identified(
    points: Points, bands: Mapping[str, Interval], exponent: Interval, *, draws: Sequence[Five], wanted: int, residuals: Sequence[float]
) -> tuple[str, ...]:
    """What the points do not determine, each with what to do; empty if they determine the law.

    Args:
        points: what the law was fitted to.
        bands: E, A, B, alpha, beta with their intervals.
        exponent: of N_opt over compute, with its interval.
        draws: laws of the bootstrap drawings that could be fitted.
        wanted: number of drawings that were requested.
        residuals: of each point, in log loss.
    """
    problems = []
    drawn, level = len(draws), float(np.median(points.loss))
    free = sorted(map(abs, residuals))[5:]  # the five numbers of the law have made the smallest so
    scatter = 1.48 * float(np.median(free)) if free else 0.0
    for what, values, part, name, place, remedy in (
        ("parameters", points.sizes, "A", "alpha", 3, "models"),
        ("tokens", points.amounts, "B", "beta", 4, "amounts of data"),
    ):
        factor, power = bands[part].mid, bands[name].mid
        effect = factor * (values[0] ** -power - values[-1] ** -power) / level
        cut = sum(not _inside(law[place]) for law in draws)
        ratio = values[-1] / values[0]
        if len(values) < MIN_DISTINCT:
            problems.append(
                f"only {len(values)} different numbers of {what}: {name} cannot be separated from E; "
                f"{MIN_DISTINCT} or more {remedy} are needed"
            )
        elif ratio < MIN_RANGE:
            problems.append(
                f"{what} vary by a factor of {ratio:.2g} only: {name} cannot be determined; a factor of {MIN_RANGE:.0f} or more is needed"
            )
        elif effect < max(MIN_EFFECT_OVER_SCATTER * scatter, MIN_EFFECT):
            problems.append(
                f"from the fewest to the most {what} the loss falls by {_share(effect)} of its median, and single runs scatter by "
                f"{_share(scatter)}: {name}, and with it the best size, cannot be determined; a wider range of {what} or several seeds of "
                "each are needed"
            )
        elif not _inside(power):
            problems.append(
                f"{name} has run to the end of what is looked for ({bands[name].mid:.3g}): the points do not show how the loss bends"
            )
        elif cut and cut >= MAX_CUT_SHARE * drawn:
            problems.append(
                f"{name} runs to the end of what is looked for in {cut} of {drawn} drawings: the points hardly show how the loss bends; "
                f"a wider range of {what} or several seeds of each are needed"
            )
    if not wanted:
        return (*problems, "no drawings were requested, so there are no intervals: draws=200 gives some")
    if drawn < wanted:
        problems.append(
            f"only {drawn} of {wanted} bootstrap drawings could be fitted: the intervals are not to be trusted; more points are needed"
        )
    width = exponent.high - exponent.low
    if not problems and width > MAX_EXPONENT_WIDTH:
        problems.append(
            f"the exponent of the best size lies anywhere from {exponent.low:.2f} to {exponent.high:.2f}: "
            "more sizes, more amounts of data or several seeds of each would narrow it"
        )
    return tuple(problems)


def varied_too_little(points: Points) -> tuple[str, str, str] | None:
    """What was varied too little for a law, whatever the losses: (what, its values, what is needed); None = nothing."""
    for what, values, name in (("parameters", points.sizes, "alpha"), ("tokens", points.amounts, "beta")):
        if len(values) < MIN_DISTINCT or values[-1] / values[0] < MIN_RANGE:
            given = f"{', '.join(f'{value:,.0f}' for value in values)} (a factor of {values[-1] / values[0]:.2g})"
            return what, given, f"{MIN_DISTINCT} or more over a factor of {MIN_RANGE:.0f} at least, or {name} cannot be determined"
    return None


def _inside(power: float) -> bool:
    """Is an exponent found, and not cut off at a bound?"""
    return BOUNDS[0] * 1.01 < power < BOUNDS[1] * 0.99


def _share(value: float) -> str:
    return units.percent(value) if value >= 0.0005 else "less than 0.1 %"


def extrapolation_notes(parameters: float, tokens: float, extrapolation: float, points: Points) -> tuple[str, ...]:
    """Notes on a prediction outside of what was measured."""
    loud = [f"{against(extrapolation)} the compute"] if extrapolation > FAR_EXTRAPOLATION else []
    quiet: list[str] = []
    for what, value, values in (("parameters", parameters, points.sizes), ("tokens", tokens, points.amounts)):
        above, below = value / values[-1], value / values[0]
        if above > 1:
            (loud if above > FAR_EXTRAPOLATION else quiet).append(f"{against(above)} the most {what} measured")
        elif below < 1:
            (loud if below < 1 / FAR_EXTRAPOLATION else quiet).append(f"{against(below)} the fewest {what} measured")
    if loud:
        return (f"far outside of what was measured ({', '.join(loud)}): the interval knows only this form of law", *quiet)
    return tuple(quiet)
