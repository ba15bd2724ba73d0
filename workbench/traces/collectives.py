"""Collectives of a trace: how often, how much, how long, at which bus bandwidth."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench import display, units
from workbench.traces.columns import Columns, Message
from workbench.traces.kinds import Kinds
from workbench.traces.shown import Shown
from workbench.traces.wire import Args

BYTES = {
    "float": 4, "half": 2, "bfloat16": 2, "double": 8, "long": 8, "int": 4, "short": 2, "byte": 1, "char": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
"""Bytes per element, by the names that torch writes into traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All collectives of one kind and size."""

    name: str
    """"all_reduce" and so on; the name of the kernel where the file tells no more."""
    count: int
    bytes: int | None
    """Of one message: the larger of what goes in and what comes out; None where the file does not tell."""
    ranks: int | None
    seconds: float
    """Sum; waiting for the slowest rank is in it."""
    median: float
    """Seconds of one."""
    best: float
    """Of the shortest, which waited least."""
    bus_bandwidth: float | None
    """Bytes per second and rank that the link has to carry, of the shortest; None where bytes or ranks are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives(Shown):
    """The collectives, those that take longest first. Get them from `trace.collectives()`."""

    rows: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """One row per kind and size."""
        cells = [
            [
                one.name if len(one.name) < 50 else f"{one.name[:48]}…",
                f"{one.count:,}",
                units.bytes_(one.bytes),
                one.ranks or units.MISSING,
                units.seconds(one.seconds),
                units.seconds(one.median),
                units.count(one.bus_bandwidth, "B/s"),
            ]
            for one in self.rows
        ]
        columns = ("collective", "calls", "bytes", "ranks", "all", "median", "bus bandwidth of the fastest")
        return display.Table(columns=columns, rows=cells, title="Collectives", note="; ".join(self.notes) or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row each; seconds and bytes."""
        return display.frame([dataclasses.asdict(one) for one in self.rows], columns=[f.name for f in dataclasses.fields(Collective)])

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; seconds and bytes."""
        return {"rows": [dataclasses.asdict(one) for one in self.rows], "notes": list(self.notes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Collectives":
        """Inverse of `to_json`."""
        return cls(rows=tuple(Collective(**one) for one in value["rows"]), notes=tuple(value["notes"]))

    def __repr__(self) -> str:
        return f"Collectives({sum(one.count for one in self.rows)} of {len(self.rows)} kinds)"


def bus_factor(name: str, ranks: int) -> float:
    """What the link carries over what the message has, per rank.

    Source: nccl-tests, doc/PERFORMANCE.md: all-reduce 2 (n − 1) / n; all-gather, reduce-scatter and all-to-all (n − 1) / n, with the size
    of the larger side; broadcast, reduce and point-to-point 1.
    """
    plain = re.sub(r"[^a-z]", "", name.lower())
    if "allreduce" in plain:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if any(one in plain for one in ("allgather", "reducescatter", "alltoall")) else 1.0


def collectives(columns: Columns, kinds: Kinds) -> Collectives:
    """Of a whole file. On a device its kernels, on a CPU what gloo or MPI ran in threads of their own."""
    chosen = kinds.where("communication") if kinds.where("communication").any() else kinds.where("host_communication")
    told = {message.event: message for message in columns.messages}
    groups: dict[tuple[str, int | None, int | None], list[int]] = defaultdict(list)
    for event in np.flatnonzero(chosen).tolist():
        message: Message | None = told.get(event)
        name = columns.labels[columns.label[event]].name
        args = message.args if message else None
        groups[_named(args, name), _size(args), args.ranks if args else None].append(event)
    lengths = (columns.end - columns.start) / 1e9
    rows = [_row(*key, lengths[events]) for key, events in groups.items()]
    notes = (
        ["a duration has in it the wait for the slowest rank; the bandwidth is that of the shortest, which waited least"] if rows else []
    )
    if not rows:
        notes.append("the trace has no collectives")
    elif any(one.bytes is None for one in rows):
        notes.append("where bytes are missing the file does not tell them (torch writes them for NCCL, from 2.1 on)")
    return Collectives(rows=tuple(sorted(rows, key=lambda one: -one.seconds)), notes=tuple(notes))


def _named(args: Args | None, name: str) -> str:
    return args.collective if args and args.collective else name.split("(", 1)[0]


def _size(args: Args | None) -> int | None:
    if args is None or args.dtype is None or (width := BYTES.get(args.dtype.lower())) is None:
        return None
    counts = [one for one in (args.sent, args.received) if one is not None]
    return max(counts) * width if counts else None


def _row(name: str, size: int | None, ranks: int | None, seconds: "np.ndarray[Any, np.dtype[np.float64]]") -> Collective:
    best = float(seconds.min())
    known = size and ranks and ranks > 1 and best > 0
    return Collective(
        name=name,
        count=len(seconds),
        bytes=size,
        ranks=ranks,
        seconds=float(seconds.sum()),
        median=float(np.median(seconds)),
        best=best,
        bus_bandwidth=size * bus_factor(name, ranks) / best if known and size and ranks else None,
    )
