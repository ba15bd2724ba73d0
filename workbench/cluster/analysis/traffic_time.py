"""Seconds of a step's collectives on a cluster, and how many of them computing could hide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collectives import BUS_FACTORS, CostError
from workbench.cluster.analysis.iteration import overlap
from workbench.cluster.analysis.sent import PHASES, Sent
from workbench.core import units
from workbench.core.display import table as display


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTime(display.Shown):
    """What the collectives of a step take on a cluster. Get one from `Traffic.on`."""

    calls: tuple[Sent, ...]
    """In their order."""
    each: tuple[float, ...]
    """Seconds of each."""
    cluster: Cluster
    """Where."""
    title: str = ""
    """Of what."""
    notes: tuple[str, ...] = ()
    """What the numbers leave out."""

    @property
    def seconds(self) -> float:
        """Of all of them, one after the other."""
        return sum(self.each)

    @property
    def waited(self) -> float:
        """Of those that nothing can hide."""
        return sum(seconds for one, seconds in zip(self.calls, self.each, strict=True) if one.waited)

    def exposed(self, *, forward: float, backward: float) -> float:
        """Seconds that the step waits, of a rank that computes so long; a lower bound.

        DDP's buckets: the closed form of `overlap`, with gradients that come at a steady pace of bytes. All other: those that nothing
        hides, and of the rest what is longer than the computing of its phase. Left out: that copies and reductions slow computing down.

        Args:
            forward: seconds of computing of all micro-batches' forwards.
            backward: of their backwards.

        Raises:
            CostError: seconds below 0.
        """
        if min(forward, backward) < 0:
            raise CostError(f"forward={forward!r}, backward={backward!r}: seconds of at least 0 are wanted")
        pairs = list(zip(self.calls, self.each, strict=True))
        buckets, rest = [pair for pair in pairs if _is_bucket(pair[0])], [pair for pair in pairs if not _is_bucket(pair[0])]
        found = sum(seconds for one, seconds in rest if one.waited or one.phase == "optimizer") + _after(buckets, backward)
        for phase, compute in (("forward", forward), ("backward", backward)):
            found += max(0.0, sum(seconds for one, seconds in rest if one.phase == phase and not one.waited) - compute)
        return found

    @property
    def table(self) -> display.Table:
        """A row for each phase, kind and group of ranks."""
        rows: dict[tuple[int, str, str, int], list[tuple[Sent, float]]] = {}
        for one, seconds in zip(self.calls, self.each, strict=True):
            rows.setdefault((PHASES.index(one.phase), one.kind, one.axis, one.ranks), []).append((one, seconds))
        cells = [
            [
                PHASES[phase],
                kind,
                axis,
                units.count(ranks),
                units.count(len(pairs)),
                units.seconds(sum(seconds for _, seconds in pairs)),
                units.seconds(sum(seconds for one, seconds in pairs if one.waited)),
            ]
            for (phase, kind, axis, ranks), pairs in sorted(rows.items())
        ]
        kind = self.cluster.how
        note = "\n".join(
            [f"predicted: {units.seconds(self.seconds)} in all, {units.seconds(self.waited)} that nothing hides; {kind}", *self.notes]
        )
        return display.Table(
            columns=("phase", "collective", "among", "ranks", "calls", "seconds", "that nothing hides"),
            rows=cells,
            title=f"{self.title} on {self.cluster.name}".strip(),
            note=note,
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per collective."""
        return display.frame([one.to_json() | {"seconds": seconds} for one, seconds in zip(self.calls, self.each, strict=True)])

    def __repr__(self) -> str:
        return f"TrafficTime({self.title!r}, {self.cluster.name!r}, {units.seconds(self.seconds)})"


def timed_on(calls: Sequence[Sent], cluster: Cluster, *, title: str, world_size: int, algorithm: str = "best") -> TrafficTime:
    """Seconds of collectives on a cluster, one by one."""
    each = tuple(one.seconds(cluster, algorithm) for one in calls)
    notes = []
    if unknown := sorted({one.kind for one in calls} - set(BUS_FACTORS)):
        notes.append(f"no formula for {', '.join(unknown)}: taken as no time")
    if world_size > cluster.gpus_per_node and world_size % cluster.gpus_per_node:
        notes.append(f"{world_size} ranks do not fill whole nodes of {cluster.gpus_per_node}")
    return TrafficTime(calls=tuple(calls), each=each, cluster=cluster, title=title, notes=tuple(notes))


def _is_bucket(one: Sent) -> bool:
    return one.axis == "data" and one.kind == "all_reduce" and one.phase == "backward"


def _after(buckets: Sequence[tuple[Sent, float]], backward: float) -> float:
    """Seconds that DDP's buckets take beyond the end of the backward; only those of the last micro-batch are reduced, in its part."""
    if not buckets:
        return 0.0
    share = backward / (buckets[-1][0].micro + 1)
    whole = sum(one.size for one, _ in buckets) or 1
    ready, size = [], 0
    for one, _ in buckets:
        size += one.size
        ready.append(share * size / whole)
    return overlap(ready, [seconds for _, seconds in buckets], share).exposed
