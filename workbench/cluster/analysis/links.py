"""Measured collectives: a `Sweep` is one of them at several sizes, `Links` all of them with intervals of latency and bandwidth."""

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.cluster.analysis.collective_cost import CostError, Link, bus_factor, collective_seconds
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display


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
    """Ranks that took part."""
    collective: str = "all_reduce"
    """Kind of collective."""
    bandwidths: tuple[float, float] | None = None
    """Interval of the link's bandwidth, from repeats; None = unknown."""
    link: Link = field(init=False)
    """Latency and bandwidth that fit the points best."""

    def __post_init__(self) -> None:
        rows = tuple(sorted((float(size), float(seconds)) for size, seconds in self.points))
        if len({size for size, _ in rows}) < len(rows):
            raise CostError("the sweep has a size twice: give one time for each, such as the median of its repeats")
        object.__setattr__(self, "points", rows)
        fitted = Link.from_sweep(rows, ranks=self.ranks, collective=self.collective)
        object.__setattr__(self, "link", replace(fitted, bandwidths=self.bandwidths))

    def seconds(self, size: float, ranks: int | None = None) -> float:
        """Seconds of the collective at a size; for other ranks than measured, scaled by latency and bandwidth.

        Raises:
            CostError: impossible bytes or ranks.
        """
        if not 0 < size < math.inf:
            raise CostError(f"size={size!r}: expected bytes above 0")
        here = collective_seconds(self.collective, size, self.ranks, self.link)
        other = here if ranks is None else collective_seconds(self.collective, size, ranks, self.link)
        return self._interpolated(size, here) * other / here

    def _interpolated(self, size: float, fitted: float) -> float:
        rows = list(self.points)
        sizes = [measured for measured, _ in rows]
        if not sizes[0] <= size <= sizes[-1]:
            return fitted
        index = max(1, bisect_left(sizes, size))
        (low, below), (high, above) = rows[index - 1], rows[index]
        share = math.log(size / low) / math.log(high / low)
        return float(below * (above / below) ** share)

    @property
    def table(self) -> display.Table:
        """A row per size: seconds, bus bandwidth, and seconds by the fitted link."""
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
        """Plain JSON values."""
        interval = {} if self.bandwidths is None else {"bandwidths": list(self.bandwidths)}
        return {"points": [list(point) for point in self.points], "ranks": self.ranks, "collective": self.collective, **interval}


BOOTSTRAP_DRAWS = 200
"""Number of resamplings for an interval."""
CONFIDENCE = 0.9
"""Confidence of the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """One collective at one size."""

    kind: str
    """Kind, such as "all_reduce"."""
    size: int
    """Bytes, as `CollectiveCall.size`."""
    seconds: tuple[float, ...]
    """Seconds of one collective, per repeat: the mean over a block of them on the slowest rank."""

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links(display.Shown, JsonDataclass):
    """Measured collectives between some ranks. Get one from `wb.measure_collectives`; `links["all_reduce"]` is a `Sweep`."""

    points: tuple[LinkPoint, ...]
    """The measured points, by kind and ascending size."""
    ranks: int
    """Ranks that took part."""
    backend: str
    """Backend, such as "nccl"."""
    device: str
    """Device of a rank."""
    host: str = ""
    """Name of the machine."""
    notes: tuple[str, ...] = ()
    """Notes for the reader."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Measured kinds, in order."""
        return tuple(dict.fromkeys(point.kind for point in self.points))

    def __getitem__(self, kind: str) -> Sweep:
        repeated = any(len(point.seconds) > 1 for point in self._of(kind))
        sweep = self._sweep(kind)
        return replace(sweep, bandwidths=self.intervals(kind)[1]) if repeated else sweep

    def _sweep(self, kind: str) -> Sweep:
        if kind not in self.kinds:
            raise CostError(f"{kind!r} was not measured: there are {', '.join(self.kinds)}")
        return Sweep(points=[(point.size, point.median) for point in self._of(kind)], ranks=self.ranks, collective=kind)

    def _of(self, kind: str) -> list[LinkPoint]:
        return [point for point in self.points if point.kind == kind]

    @property
    def link(self) -> Link:
        """Latency, bandwidth and its interval by the all-reduces; without them, by the first kind. For `Cluster.with_links(intra=…)`."""
        return self["all_reduce" if "all_reduce" in self.kinds else self.kinds[0]].link

    def intervals(self, kind: str = "all_reduce") -> tuple[tuple[float, float], tuple[float, float]]:
        """Intervals (CONFIDENCE) of latency in seconds and bandwidth in bytes per second, by resampling the repeats of each size.

        They tell how much the measurement varies, not how well a ring fits it.
        """
        self._sweep(kind)  # raises if nothing can be fitted
        points, rng, fits = self._of(kind), random.Random(0), []
        for _ in range(BOOTSTRAP_DRAWS):
            rows = [(float(point.size), statistics.median(rng.choices(point.seconds, k=len(point.seconds)))) for point in points]
            try:
                fits.append(Link.from_sweep(rows, ranks=self.ranks, collective=kind))
            except CostError:  # a draw whose seconds do not grow
                continue
        if not fits:
            raise CostError(f"{kind}: the seconds do not grow with the bytes; measure larger messages")
        ends = [sorted(getattr(link, name) for link in fits) for name in ("latency", "bandwidth")]
        low = int((1 - CONFIDENCE) / 2 * len(fits))
        return (ends[0][low], ends[0][-1 - low]), (ends[1][low], ends[1][-1 - low])

    @property
    def table(self) -> display.Table:
        """A row for each kind and size: the median, the interquartile range of the repeats, and the bus bandwidth."""
        rows = [
            [
                point.kind,
                units.bytes_(point.size),
                units.seconds(point.median),
                _interquartile_range(point.seconds),
                units.count(bus_factor(point.kind, self.ranks) * point.size / point.median, "B/s"),
            ]
            for point in self.points
        ]
        notes = [
            f"{len(self.points[0].seconds)} repeats, taking turns" if self.points else "",
            *map(self._describe, self.kinds),
            *self.notes,
        ]
        return display.Table(
            columns=("collective", "size", "measured", "interquartile range", "bus bandwidth"),
            rows=rows,
            title=f"Collectives of {self.ranks} ranks ({self.backend}, {self.device})",
            note="\n".join(filter(None, notes)),
        )

    def _describe(self, kind: str) -> str:
        try:
            link, (alpha, beta) = self._sweep(kind).link, self.intervals(kind)
        except CostError as error:
            return f"{kind}: {error}"
        return (
            f"{kind}: {units.seconds(link.latency)} a hop ({units.seconds(alpha[0])} to {units.seconds(alpha[1])}), "
            f"{units.count(link.bandwidth, 'B/s')} ({units.count(beta[0], 'B/s')} to {units.count(beta[1], 'B/s')})"
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per repeat, in bytes and seconds."""
        return display.frame(
            [
                {"kind": point.kind, "size": point.size, "repeat": repeat, "seconds": seconds}
                for point in self.points
                for repeat, seconds in enumerate(point.seconds)
            ],
            columns=("kind", "size", "repeat", "seconds"),
        )

    plot = display.plot_method("links")

    def __repr__(self) -> str:
        return f"Links({self.ranks} ranks, {self.backend}, {', '.join(self.kinds)})"


def _interquartile_range(values: tuple[float, ...]) -> str:
    if len(values) < 2:
        return units.MISSING
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{units.seconds(low)} … {units.seconds(high)}"
