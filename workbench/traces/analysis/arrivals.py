"""Matches collectives across the traces of several ranks: which rank came last, and how long the others waited."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.brief import short
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import Kinds
from workbench.traces.analysis.intervals import Numbers
from workbench.traces.analysis.windows import Windows

AGREE = 1e-3
"""Seconds: ends of the same collectives that are as close as that on two ranks were read off the same clock."""
FAR = 0.1
"""Seconds: clocks that differ by more are not one, although machines have the same name ("localhost")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """All collectives of one name; seconds of one of them, means unless noted."""

    name: str
    count: int
    """How many were found on every rank."""
    exchange: float
    """On the rank that waits least: the exchange itself."""
    wait: float
    """What the rank that waits most has more."""
    skew: float
    """From the first rank's beginning to the last rank's."""
    worst: float
    """The largest of these."""
    last: Mapping[int, int]
    """Rank → how often it came last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals(display.Shown, JsonDataclass):
    """Collectives, matched across ranks, those that cost the most waiting first. Get them from `trace_set.arrivals()`."""

    rows: tuple[Arrival, ...]
    apart: float | None
    """Seconds by which the clocks of two ranks differ at most, by the ends of collectives, as a median; None without any."""
    shared: bool
    """Were they read off one clock, as on one machine? Else they are aligned by the ends of collectives."""
    notes: tuple[str, ...] = ()

    @property
    def exchanging(self) -> float:
        """Seconds of all of them in which numbers are exchanged."""
        return sum(row.exchange * row.count for row in self.rows)

    @property
    def waiting(self) -> float:
        """Seconds of all of them in which the rank that waits most waits for the last one."""
        return sum(row.wait * row.count for row in self.rows)

    @property
    def table(self) -> display.Table:
        """One row per name."""
        rows = [
            [
                short(row.name, 49),
                f"{row.count:,}",
                units.seconds(row.exchange),
                units.seconds(row.wait),
                units.seconds(row.skew),
                units.seconds(row.worst),
                ", ".join(f"rank {rank} {times}×" for rank, times in list(row.last.items())[:3]),
            ]
            for row in self.rows
        ]
        columns = ("collective", "calls", "exchange", "longest wait", "arrivals apart", "at most", "came last")
        return display.Table(columns=columns, rows=rows, title="Arrivals at collectives", note=display.notes(self.notes) or None)

    to_frame = display.frame_method("rows", Arrival)

    def __repr__(self) -> str:
        return f"Arrivals({sum(row.count for row in self.rows)} of {len(self.rows)} kinds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The collectives in the trace of one rank."""

    columns: Columns
    kinds: Kinds
    windows: Windows
    host: str | None = None
    """Its machine, where the file tells."""

    def calls(self) -> dict[tuple[int, str], Numbers]:
        """Step and name → numbers of the events, in the order of their beginnings."""
        chosen = np.flatnonzero(self.kinds.where("communication"))
        if not len(chosen):
            chosen = np.flatnonzero(self.kinds.where("host_communication"))
        chosen = chosen[np.argsort(self.columns.start[chosen], kind="stable")]
        spans, start = self.windows.spans, self.columns.start[chosen]
        place = np.searchsorted(spans[:, 0], start, side="right") - 1
        inside = (place >= 0) & (start < spans[np.maximum(place, 0), 1]) if len(spans) else np.zeros(len(start), dtype=np.bool_)
        calls: dict[tuple[int, str], list[int]] = defaultdict(list)
        for event, at in zip(chosen[inside].tolist(), place[inside].tolist(), strict=True):
            calls[int(self.windows.numbers[at]), self.columns.name(event).partition("(")[0]].append(event)
        return {key: np.array(events, dtype=np.int64) for key, events in calls.items()}


def arrivals(seen: Mapping[int, Seen]) -> Arrivals:
    """Match the n-th collective of a name in a step of one rank with the n-th of the others, where all have as many."""
    calls = {rank: trace.calls() for rank, trace in seen.items()}
    keys = dict.fromkeys(key for by_key in calls.values() for key in by_key)
    matched: dict[str, list[tuple[Numbers, ...]]] = defaultdict(list)
    left = 0
    for key in keys:
        events = [by_key.get(key, np.empty(0, dtype=np.int64)) for by_key in calls.values()]
        if len({len(numbers) for numbers in events}) == 1:
            matched[key[1]].append(tuple(events))
        else:
            left += max(map(len, events))
    ranks = list(seen)
    names = {name: [np.concatenate(column) for column in zip(*parts, strict=True)] for name, parts in matched.items()}
    apart, shared, offsets = _clocks(seen, names)
    notes = [f"{left:,} collectives are not on every rank as often: they are left out"] if left else []
    if not names:
        notes.append("no collective is in the same step of every rank")
    elif apart is not None:
        text = f"the ranks' clocks agree within {units.seconds(apart)}, by the ends of collectives"
        notes.append(
            text if shared else f"{text} after they were aligned by them: the files are of different machines or have no common clock"
        )
    rows = [_row(name, ranks, _times(seen, events, offsets)) for name, events in names.items()]
    return Arrivals(rows=tuple(sorted(rows, key=lambda row: -row.wait * row.count)), apart=apart, shared=shared, notes=tuple(notes))


def _times(seen: Mapping[int, Seen], events: list[Numbers], offsets: list[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Begin and length of each collective, in seconds: a row per rank."""
    columns = [trace.columns for trace in seen.values()]
    start = [c.start[at] / 1e9 - offset for c, at, offset in zip(columns, events, offsets, strict=True)]
    length = [(c.end[at] - c.start[at]) / 1e9 for c, at in zip(columns, events, strict=True)]
    return np.array(start), np.array(length)


def _clocks(seen: Mapping[int, Seen], names: Mapping[str, list[Numbers]]) -> tuple[float | None, bool, list[float]]:
    """The difference between the clocks, whether they are one clock, and what to subtract from the times of each rank.

    All ranks end an all-reduce at about the same moment, whenever they arrived. Ranks of one machine have one clock. Where the files do not
    name the machine, it is one if the ends agree at least once, or if different ranks are ahead at different times (on a busy machine).
    """
    none = [0.0] * len(seen)
    if not names:
        return None, False, none
    columns = [trace.columns for trace in seen.values()]
    ends = np.array([np.concatenate([c.end[events[place]] for events in names.values()]) / 1e9 for place, c in enumerate(columns)])
    origins = [c.origin for c in columns if c.origin is not None]
    if len(origins) == len(columns):
        offsets = [(origins[0] - origin) / 1e6 for origin in origins]
        ahead = ends - np.array(offsets)[:, None]
        ahead = ahead - ahead[0]
        hosts = {trace.host for trace in seen.values()}
        same = len(hosts) == 1 and None not in hosts and float(np.median(np.abs(ahead))) <= FAR
        if same or ((np.abs(ahead).min(axis=1) <= AGREE) | ((ahead.min(axis=1) < 0) & (ahead.max(axis=1) > 0))).all():
            return float(np.median(np.abs(ahead), axis=1).max()), True, offsets
    ahead = ends - ends[0]
    medians = np.median(ahead, axis=1)
    return float(np.median(np.abs(ahead - medians[:, None]), axis=1).max()), False, medians.tolist()


def _row(name: str, ranks: list[int], times: tuple[NDArray[np.float64], NDArray[np.float64]]) -> Arrival:
    start, length = times
    shortest = length.min(axis=0)
    apart = start.max(axis=0) - start.min(axis=0)
    counts = np.bincount(length.argmin(axis=0), minlength=len(ranks))
    last = {rank: int(counts[place]) for place, rank in enumerate(ranks) if counts[place]}
    return Arrival(
        name=name,
        count=length.shape[1],
        exchange=float(shortest.mean()),
        wait=float((length.max(axis=0) - shortest).mean()),
        skew=float(apart.mean()),
        worst=float(apart.max()),
        last=dict(sorted(last.items(), key=lambda item: -item[1])),
    )
