"""LoaderCurve: loader and step over the number of workers, predicted, and measured where it was."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

TERMS = {
    "in turn": "loading and training in turn",
    "workers": "workers too few or too slow",
    "cores": "all cores busy",
    "hand-over": "taking batches from workers",
    "compute": "training: fed well",
}
"""What holds the step where it is, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Loader and step at one number of workers. Seconds."""

    num_workers: int
    loader: float
    """Per batch of the loader alone, predicted."""
    step: float
    """Per step, predicted."""
    binds: str
    """What holds it there, of TERMS."""
    measured_loader: float | None = None
    measured_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCurve(display.Shown, JsonDataclass):
    """Loader and step over the number of workers. Predicted and measured are the same quantities, so their difference is the error."""

    points: tuple[CurvePoint, ...]
    """One per number of workers."""
    recommended: int
    """The smallest number of workers within 5 % of the best step."""
    compute: float
    """Seconds per step of training on batches that are there already: no step is shorter."""
    current: int | None = None
    """What the loader has now."""
    persistent_workers: bool = True
    """Do those that it has now persist? Their point is predicted, and measured, as they are; those of all other points do persist."""

    def with_measured(self, *, loader: Mapping[int, float] | None = None, step: Mapping[int, float] | None = None) -> Self:
        """The same curve with measurements beside the prediction.

        Args:
            loader: seconds per batch of the loader alone, by number of workers.
            step: seconds per step, likewise.

        Raises:
            ValueError: a number of workers that is not on the curve.
        """
        loader, step = loader or {}, step or {}
        there = [point.num_workers for point in self.points]
        if odd := sorted({*loader, *step} - set(there)):
            raise ValueError(f"measured with {odd[0]} workers, but the curve goes from {there[0]} to {there[-1]}: try curve({odd[-1]})")
        return dataclasses.replace(
            self,
            points=tuple(
                dataclasses.replace(
                    point,
                    measured_loader=loader.get(point.num_workers, point.measured_loader),
                    measured_step=step.get(point.num_workers, point.measured_step),
                )
                for point in self.points
            ),
        )

    @property
    def errors(self) -> dict[int, float]:
        """Predicted over measured step, less 1, by number of workers, where it was measured."""
        return {point.num_workers: point.step / point.measured_step - 1 for point in self.points if point.measured_step}

    @property
    def table(self) -> display.Table:
        """One row per number of workers."""
        seen = any(value is not None for p in self.points for value in (p.measured_loader, p.measured_step))
        rows = []
        for p in self.points:
            marks = [name for name, count in (("now", self.current), ("recommended", self.recommended)) if count == p.num_workers]
            measured = (units.seconds(p.measured_loader), units.seconds(p.measured_step)) if seen else ()
            rows.append((p.num_workers, units.seconds(p.loader), units.seconds(p.step), *measured, TERMS[p.binds], ", ".join(marks)))
        return display.Table(
            columns=("workers", "loader alone", "step", *(("loader, measured", "step, measured") if seen else ()), "held by", ""),
            rows=rows,
            title="The loader over its workers",
            note=f"loader alone is per batch; predicted{'' if not seen else ', with measurements beside'}; "
            f"training alone takes {units.seconds(self.compute)}"
            + ("" if self.persistent_workers else "; workers of now start anew with each pass over the loader, all others persist"),
        )

    to_frame = display.frame_method("points", CurvePoint)

    plot = display.plot_method("loader_curve")

    def __repr__(self) -> str:
        return f"LoaderCurve({len(self.points)} points, recommended: num_workers={self.recommended})"
