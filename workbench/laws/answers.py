"""What a law answers: the loss of a run, the best use of a budget, how it would have done on runs it has not seen; with their intervals."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.laws import doubt
from workbench.laws.forecast import Allocation, Forecast
from workbench.laws.formula import losses, optimum
from workbench.laws.held_out import HeldOut
from workbench.laws.points import FEWEST, PointsError
from workbench.statistics import Interval

if TYPE_CHECKING:
    from workbench.laws.law import ScalingLaw


def band(mid: float, drawn: Iterable[float], level: float) -> Interval:
    """A number with the interval that holds `level` of `drawn`, and the number itself; without drawings it is endless."""
    values = [one for one in drawn if math.isfinite(one)]
    if not values:
        return Interval(low=-math.inf, mid=mid, high=math.inf)
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return Interval(low=float(min(low, mid)), mid=mid, high=float(max(high, mid)))


def forecast(law: "ScalingLaw", parameters: float, tokens: float) -> Forecast:
    """See `ScalingLaw.predict`. The interval: every drawing's loss, each with every residual as the luck of a single run."""
    budget = law.flops_per * parameters * tokens
    drawn = np.log([float(losses(one, parameters, tokens)) for one in law.draws])
    extrapolation = budget / max(law.compute)
    return Forecast(
        parameters=parameters,
        tokens=tokens,
        flops=budget,
        loss=law.band(float(losses(law.five, parameters, tokens)), np.exp(np.add.outer(drawn, _luck(law)).ravel())),
        naive=min(law.points.loss),
        extrapolation=extrapolation,
        level=law.level,
        notes=(*_warning(law), *doubt.far(parameters, tokens, extrapolation, law.points)),
    )


def allocation(law: "ScalingLaw", flops: float) -> Allocation:
    """See `ScalingLaw.allocation`."""
    work = flops / law.flops_per
    found = optimum(law.five, work)
    drawn = [optimum(one, work) for one in law.draws]
    parameters, tokens, loss = (law.band(mid, [one[i] for one in drawn]) for i, mid in enumerate(found))
    extrapolation = flops / max(law.compute)
    return Allocation(
        flops=flops,
        parameters=parameters,
        tokens=tokens,
        loss=loss,
        naive=min(law.points.loss),
        extrapolation=extrapolation,
        level=law.level,
        notes=(*_warning(law), *doubt.far(parameters.mid, tokens.mid, extrapolation, law.points)),
    )


def held_out(law: "ScalingLaw", limit: float) -> HeldOut:
    """See `ScalingLaw.held_out`.

    Raises:
        PointsError: too few runs have at most `limit` FLOPs, or none has more.
    """
    small = [one <= limit for one in law.compute]
    if sum(small) < FEWEST or all(small):
        raise PointsError(
            f"{sum(small)} of {len(small)} runs have at most {limit:.3g} FLOPs: at least {FEWEST} to fit to are wanted, and at least "
            f"one larger to hold out; the runs have {min(law.compute):.3g} … {max(law.compute):.3g} FLOPs"
        )
    fitted = law.refitted(law.points.where(small))
    rest = law.points.where(not one for one in small)
    forecasts = tuple(fitted.predict(n, d) for n, d in zip(rest.parameters, rest.tokens, strict=True))
    return HeldOut(limit=max(fitted.compute), fitted=len(fitted.points), forecasts=forecasts, measured=rest.loss)


def _luck(law: "ScalingLaw") -> Any:
    """Residuals, as wide as those of points that the law was not fitted to: five numbers have followed these."""
    count = len(law.points)
    return np.asarray(law.residuals) * math.sqrt(count / max(1, count - 5))


def _warning(law: "ScalingLaw") -> tuple[str, ...]:
    return () if law.enough else (f"cannot tell: {law.cannot_tell[0]}",)
