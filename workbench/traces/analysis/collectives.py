"""Counts the collectives of a trace: bytes, time and bus bandwidth by kind and size."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.brief import short
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.details import Details
from workbench.traces.analysis.event_kinds import HOST_COLLECTIVE, Kinds
from workbench.traces.analysis.event_schema import Args
from workbench.traces.analysis.flops import WIDTHS

BYTES = {re.sub("c10::|[<>]", "", name).lower(): width for name, width in WIDTHS.items()} | {"byte": 1}
"""Bytes per element, by the names that torch gives types in "dtype" of a collective, in small letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All collectives of one kind and size in one process group."""

    name: str
    """"all_reduce" and so on; the name of the kernel where the file tells no more."""
    count: int
    bytes: int | None
    """Of one message: the larger of what goes in and what comes out; None where the file does not tell."""
    ranks: int | None
    group: str | None
    """The process group: what it is for ("tp"), or its number; None where the file does not tell."""
    seconds: float
    """Sum; waiting for the slowest rank is in it."""
    median: float
    """Seconds of one."""
    best: float
    """Of the shortest, which waited least."""
    bus_bandwidth: float | None
    """Bytes per second and rank that the link has to carry, of the shortest; None where bytes or ranks are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives(display.Shown, JsonDataclass):
    """The collectives, those that take longest first. Get them from `trace.collectives()`."""

    rows: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """One row per kind, size and process group."""
        grouped = len({row.group for row in self.rows}) > 1
        cells = [
            [
                short(row.name, 49),
                f"{row.count:,}",
                units.bytes_(row.bytes),
                row.ranks or units.MISSING,
                *([row.group or units.MISSING] if grouped else []),
                units.seconds(row.seconds),
                units.seconds(row.median),
                units.count(row.bus_bandwidth, "B/s"),
            ]
            for row in self.rows
        ]
        columns = (
            "collective",
            "calls",
            "bytes",
            "ranks",
            *(["group"] if grouped else []),
            "all",
            "median",
            "bus bandwidth of the fastest",
        )
        return display.Table(columns=columns, rows=cells, title="Collectives", note=display.notes(self.notes) or None)

    to_frame = display.frame_method("rows", Collective)

    def __repr__(self) -> str:
        return f"Collectives({sum(row.count for row in self.rows)} of {len(self.rows)} kinds)"


def bus_factor(name: str, ranks: int) -> float:
    """Bytes that the link carries per byte of the message, per rank.

    Source: nccl-tests, doc/PERFORMANCE.md: all-reduce 2 (n − 1) / n; all-gather, reduce-scatter and all-to-all (n − 1) / n, with the size
    of the larger side; broadcast, reduce and point-to-point 1.
    """
    plain = re.sub(r"[^a-z]", "", name.lower())
    if "allreduce" in plain:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if any(kind in plain for kind in ("allgather", "reducescatter", "alltoall")) else 1.0


def collectives(columns: Columns, kinds: Kinds, details: Callable[[], Details], world_size: int | None) -> Collectives:
    """Count the collectives of a whole file: kernels on a device; on a CPU the work of gloo or MPI in threads of their own.

    NCCL's events say their sizes and ranks. gloo's have shapes and types of what goes in, and no group: it is taken for that of all ranks.
    """
    chosen = kinds.where("communication") if kinds.where("communication").any() else kinds.where("host_communication")
    args_of = {message.event: message.args for message in columns.messages}
    groups: dict[tuple[str, int | None, int | None, str | None], list[int]] = defaultdict(list)
    shaped = False
    for event in np.flatnonzero(chosen).tolist():
        name = columns.name(event)
        if (args := args_of.get(event)) is not None:
            groups[_named(args, name), _size(args), args.ranks, _group(args)].append(event)
            continue
        shape = columns.shapes[columns.shape[event]] if HOST_COLLECTIVE.match(name) else ""
        size = _shaped(name, shape, details().inputs[details().input[event]].types, world_size) if shape else None
        shaped = shaped or size is not None
        groups[_named(None, name), size, None if size is None else world_size, None].append(event)
    lengths = columns.lengths / 1e9
    rows = [_row(*key, lengths[events]) for key, events in groups.items()]
    notes = (
        ["a duration has in it the wait for the slowest rank; the bandwidth is that of the shortest, which waited least"] if rows else []
    )
    if not rows:
        notes.append("the trace has no collectives")
    elif shaped and world_size:
        notes.append(f"the file does not say which ranks take part in gloo's: they are taken for the default group, all {world_size}")
    if any(row.bytes is None for row in rows):
        notes.append("where bytes are missing, the file does not give them (torch writes them for NCCL, from 2.1 on)")
    return Collectives(rows=tuple(sorted(rows, key=lambda row: -row.seconds)), notes=tuple(notes))


def _named(args: Args | None, name: str) -> str:
    return args.collective if args and args.collective else name.split("(", 1)[0]


def _group(args: Args) -> str | None:
    """What the process group is for, or else its name, which is a number mostly."""
    named = args.purpose if args.purpose not in (None, "", "undefined") else args.group
    return None if named in (None, "") else str(named)


def _size(args: Args | None) -> int | None:
    if args is None or args.dtype is None or (width := BYTES.get(args.dtype.lower())) is None:
        return None
    counts = [count for count in (args.sent, args.received) if count is not None]
    return max(counts) * width if counts else None


def _shaped(name: str, dims: str, types: str, ranks: int | None) -> int | None:
    """Bytes of a message by what goes in; of an all-gather as many times that come out as there are ranks."""
    try:
        names = json.loads(types)
        if not isinstance(names, list):
            return None
        sizes = [math.prod(shape) * WIDTHS[name] for shape, name in zip(json.loads(dims), names, strict=True)]
    except (ValueError, KeyError, TypeError, RecursionError):  # a list of tensors, or an unknown type
        return None
    whole = sum(sizes)
    if "all_gather" not in name:
        return whole or None
    return whole * ranks or None if ranks else None


def _row(name: str, size: int | None, ranks: int | None, group: str | None, seconds: "np.ndarray[Any, np.dtype[np.float64]]") -> Collective:
    best = float(seconds.min())
    complete = size and ranks and ranks > 1 and best > 0
    return Collective(
        name=name,
        count=len(seconds),
        bytes=size,
        ranks=ranks,
        group=group,
        seconds=float(seconds.sum()),
        median=float(np.median(seconds)),
        best=best,
        bus_bandwidth=size * bus_factor(name, ranks) / best if complete and size and ranks else None,
    )
