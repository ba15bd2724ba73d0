"""Sweep: a collective measured at several sizes, for sizes between them and for other numbers of ranks."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.cost.collectives import CostError, Link, bus_factor, collective_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(display.Shown, JsonDataclass):
    """Seconds of one collective by size, measured on some ranks.

    Between sizes it interpolates (straight lines between logarithms): on a published sweep, each size left out in turn, that errs by 6 % in
    the median, latency and bandwidth fitted to all by 10 %. The latter are used beyond the measured sizes and for other numbers of ranks.

    >>> sweep = Sweep(points=[(2**20, 60e-6), (2**24, 150e-6), (2**28, 1.5e-3)], ranks=8)
    >>> round(sweep.seconds(2**24) * 1e6), sweep.seconds(2**24) < sweep.seconds(2**26) < sweep.seconds(2**28)
    (150, True)
    """

    points: Iterable[tuple[float, float]]
    """(bytes, seconds), kept by ascending size."""
    ranks: int
    """That took part."""
    collective: str = "all_reduce"
    """Which."""
    bandwidths: tuple[float, float] | None = None
    """Interval of the link's bandwidth, by repeats; None = not known."""
    link: Link = field(init=False)
    """Latency and bandwidth that explain the points best."""

    def __post_init__(self) -> None:
        rows = tuple(sorted((float(size), float(seconds)) for size, seconds in self.points))
        if len({size for size, _ in rows}) < len(rows):
            raise CostError("the sweep has a size twice: give one time for each, such as the median of its repeats")
        object.__setattr__(self, "points", rows)
        fitted = Link.from_sweep(rows, ranks=self.ranks, collective=self.collective)
        object.__setattr__(self, "link", replace(fitted, bandwidths=self.bandwidths))

    def seconds(self, size: float, ranks: int | None = None) -> float:
        """Of the collective at a size; on other ranks than measured, changed as latency and bandwidth say.

        Raises:
            CostError: bytes or ranks that there are none of.
        """
        if not 0 < size < math.inf:
            raise CostError(f"size={size!r}: bytes above 0 are wanted")
        here = collective_seconds(self.collective, size, self.ranks, self.link)
        other = here if ranks is None else collective_seconds(self.collective, size, ranks, self.link)
        return self._interpolated(size, here) * other / here

    def _interpolated(self, size: float, fitted: float) -> float:
        rows = list(self.points)
        sizes = [one for one, _ in rows]
        if not sizes[0] <= size <= sizes[-1]:
            return fitted
        place = max(1, bisect_left(sizes, size))
        (low, below), (high, above) = rows[place - 1], rows[place]
        share = math.log(size / low) / math.log(high / low)
        return float(below * (above / below) ** share)

    @property
    def table(self) -> display.Table:
        """A row per size: seconds, bus bandwidth, and what latency and bandwidth say."""
        factor = bus_factor(self.collective, self.ranks)
        rows = [
            [
                units.bytes_(size),
                units.seconds(seconds),
                units.count(factor * size / seconds, "B/s"),
                units.seconds(collective_seconds(self.collective, size, self.ranks, self.link)),
            ]
            for size, seconds in self.points
        ]
        note = f"fitted: {units.seconds(self.link.latency)} a hop, {units.count(self.link.bandwidth, 'B/s')} each way"
        title = f"{self.collective} of {self.ranks} ranks"
        return display.Table(columns=("size", "measured", "bus bandwidth", "fitted"), rows=rows, title=title, note=note)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        interval = {} if self.bandwidths is None else {"bandwidths": list(self.bandwidths)}
        return {"points": [list(point) for point in self.points], "ranks": self.ranks, "collective": self.collective, **interval}
