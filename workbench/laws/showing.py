"""How a law shows itself: its five numbers, and its points."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench import display, units
from workbench.laws.forecast import flops
from workbench.laws.formula import losses
from workbench.statistics import Interval

if TYPE_CHECKING:
    from workbench.laws.law import ScalingLaw

PARTS = ("E", "A", "B")
"""Those of which nothing beside any loss is shown as 0: the fit works in logarithms, and finds 1e-7 where a part is not needed."""


def table(law: "ScalingLaw") -> display.Table:
    """A row for each of the five numbers, and for the exponents of the best size and amount of data."""
    size, least = law.exponent, 1e-5 * min(law.points.loss)
    rows = {**law.intervals, "N_opt ∝ C^": size, "D_opt ∝ C^": Interval(low=1 - size.high, mid=1 - size.mid, high=1 - size.low)}
    what = (
        f"fitted to {len(law.points)} runs of {len(law.points.sizes)} sizes, {min(law.compute):.2g} … {flops(max(law.compute))}; "
        f"{units.percent(law.level)} intervals from {len(law.draws)} drawings of {'points' if law.by == 'pairs' else 'runs'}; "
        f"typical residual {units.percent(float(np.median(np.abs(law.residuals))))}"
    )
    warning = f"CANNOT TELL: {'; '.join(law.cannot_tell)}" if law.cannot_tell else ""
    return display.Table(
        columns=("", "fitted", "low", "high"),
        rows=[[name, *one.cells(partial(_number, least=least if name in PARTS else 0.0))] for name, one in rows.items()],
        title="Loss = E + A/parameters^alpha + B/tokens^beta",
        note="; ".join(filter(None, [warning, what, *law.notes])),
    )


def _number(value: float, least: float) -> str:
    """Four digits; 0 below the least that counts."""
    return "0" if value < least else f"{value:.4g}"


def frame(law: "ScalingLaw") -> Any:
    """A DataFrame with one row per point: measured and fitted loss."""
    fitted = losses(law.five, law.points.parameters, law.points.tokens)
    rows = zip(law.points.rows, law.compute, fitted, law.residuals, strict=True)
    return display.frame(
        [
            {"parameters": n, "tokens": d, "flops": c, "loss": loss, "fitted": float(fit), "residual": off, "run": run}
            for (n, d, loss, run), c, fit, off in rows
        ]
    )
