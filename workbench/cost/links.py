"""Links: collectives timed between real ranks, and the latency and bandwidth that explain them, with intervals."""

import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.cost.collectives import CostError, Link, bus_factor
from workbench.cost.sweep import Sweep

DRAWS = 200
"""Resamplings of the repeats that an interval comes from."""
LEVEL = 0.9
"""Of the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """One collective at one size."""

    kind: str
    """Such as "all_reduce"."""
    size: int
    """Bytes, as `cost.Sent.size`."""
    seconds: tuple[float, ...]
    """Of one collective, of each repeat: the mean over a block of them, of the slowest rank."""

    @property
    def median(self) -> float:
        """Of the repeats."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links(display.Shown, JsonDataclass):
    """What joins some ranks, as measured. Get one from `wb.measure_collectives`; `links["all_reduce"]` is a `Sweep`."""

    points: tuple[LinkPoint, ...]
    """By kind, by ascending size."""
    ranks: int
    """That took part."""
    backend: str
    """Such as "nccl"."""
    device: str
    """Of a rank."""
    host: str = ""
    """Where."""
    notes: tuple[str, ...] = ()
    """What a reader should know."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was measured, in its order."""
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
        """Intervals (LEVEL) of latency in seconds and bandwidth in bytes per second: the repeats of each size, drawn again DRAWS times.

        They tell how much the measurement varies, not how well a ring explains it.
        """
        self._sweep(kind)  # what cannot be fitted at all says so
        points, rng, found = self._of(kind), random.Random(0), []
        for _ in range(DRAWS):
            rows = [(float(point.size), statistics.median(rng.choices(point.seconds, k=len(point.seconds)))) for point in points]
            try:
                found.append(Link.from_sweep(rows, ranks=self.ranks, collective=kind))
            except CostError:  # a draw whose seconds do not grow
                continue
        if not found:
            raise CostError(f"{kind}: the seconds do not grow with the bytes; measure larger messages")
        ends = [sorted(getattr(one, name) for one in found) for name in ("latency", "bandwidth")]
        low = int((1 - LEVEL) / 2 * len(found))
        return (ends[0][low], ends[0][-1 - low]), (ends[1][low], ends[1][-1 - low])

    @property
    def table(self) -> display.Table:
        """A row for each kind and size: the median, the middle half of the repeats, and the bus bandwidth."""
        rows = [
            [
                point.kind,
                units.bytes_(point.size),
                units.seconds(point.median),
                _middle_half(point.seconds),
                units.count(bus_factor(point.kind, self.ranks) * point.size / point.median, "B/s"),
            ]
            for point in self.points
        ]
        notes = [f"{len(self.points[0].seconds)} repeats, taking turns" if self.points else "", *map(self._words, self.kinds), *self.notes]
        return display.Table(
            columns=("collective", "size", "measured", "middle half", "bus bandwidth"),
            rows=rows,
            title=f"Collectives of {self.ranks} ranks ({self.backend}, {self.device})",
            note="\n".join(filter(None, notes)),
        )

    def _words(self, kind: str) -> str:
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
                {"kind": point.kind, "size": point.size, "repeat": place, "seconds": seconds}
                for point in self.points
                for place, seconds in enumerate(point.seconds)
            ],
            columns=("kind", "size", "repeat", "seconds"),
        )

    plot = display.plot_method("links")

    def __repr__(self) -> str:
        return f"Links({self.ranks} ranks, {self.backend}, {', '.join(self.kinds)})"


def _middle_half(values: tuple[float, ...]) -> str:
    if len(values) < 2:
        return units.MISSING
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{units.seconds(low)} … {units.seconds(high)}"
