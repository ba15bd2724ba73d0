"""Measures the copies of a trace: bytes, bandwidth over time, and how much of them hides behind kernels."""

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns, floats, integers
from workbench.traces.analysis.event_kinds import Kinds
from workbench.traces.analysis.event_schema import NO_ARGS
from workbench.traces.analysis.intervals import Numbers, Spans, covered

POINTS = 600
"""Pieces of time that a curve has."""
DIRECTION = re.compile(r"\b([HDAP])to([HDAP])\b")
SPELT = re.compile(r"Copy(Host|Device)To(Host|Device)", re.IGNORECASE)
"""As older files of ROCm have it."""
MEMORY = re.compile(r"\((.*)\)\s*$")
NONE = "the trace has no copies of a device"
WAITS = "a copy from or to pageable memory goes through a pinned buffer and occupies the host: DataLoader(pin_memory=True)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """All copies of one kind."""

    kind: str
    """"HtoD", "DtoH", "DtoD", "PtoP" between devices, "HtoH", or "memset"."""
    memory: str
    """From where to where, "Pinned → Device"; as much as the name tells."""
    count: int
    bytes: int | None
    """Of all that tell; None where none does (ROCm's files do not)."""
    seconds: float
    """Sum."""
    overlapped: float
    """Seconds of these while a kernel computes."""
    bandwidth: float | None
    """Bytes per second while it copies: all bytes over all time."""
    median: float | None
    """Of single copies; small ones are slow."""
    best: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies(display.Shown, JsonDataclass):
    """Copies and memsets, the kinds that take longest first. Get them from `trace.copies()`."""

    rows: tuple[Copy, ...]
    times: tuple[float, ...] = ()
    """Seconds from the first event on: where the pieces of the curves begin, and the end of the last."""
    curves: tuple[tuple[float, ...], ...] = ()
    """Bytes per second in each piece, pauses included, a curve for each row."""
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """One row per kind."""
        rows = [
            [
                f"{row.kind} ({row.memory})" if row.memory else row.kind,
                f"{row.count:,}",
                units.bytes_(row.bytes),
                units.seconds(row.seconds),
                units.percent(row.overlapped / row.seconds if row.seconds else None),
                *(units.count(value, "B/s") for value in (row.bandwidth, row.median, row.best)),
            ]
            for row in self.rows
        ]
        columns = ("copy", "copies", "bytes", "time", "behind kernels", "bandwidth", "median", "fastest")
        return display.Table(columns=columns, rows=rows, title="Copies", note=display.notes(self.notes) or None)

    to_frame = display.frame_method("rows", Copy)

    plot = display.plot_method("copies")

    def __repr__(self) -> str:
        return f"Copies({sum(row.count for row in self.rows):,} of {len(self.rows)} kinds)"


def kind_of(name: str) -> tuple[str, str]:
    """Kind and memory of a copy, by its name.

    >>> kind_of("Memcpy HtoD (Pinned -> Device)"), kind_of("Memset (Device)")
    (('HtoD', 'Pinned → Device'), ('memset', 'Device'))
    """
    memory = (MEMORY.search(name) or ["", ""])[1].replace("->", "→")
    if "memset" in name.lower():
        return "memset", memory
    if direction := DIRECTION.search(name):
        return direction[0], memory
    spelt = SPELT.search(name)
    return (f"{spelt[1][0].upper()}to{spelt[2][0].upper()}", memory) if spelt else (name.split(" (")[0], memory)


def copies(columns: Columns, kinds: Kinds) -> Copies:
    """Measure the copies of a whole file. A bandwidth is the file's own where it has one: lengths in whole microseconds are worse."""
    events = np.flatnonzero(kinds.where("h2d", "copy"))
    if not len(events):
        return Copies(rows=(), notes=(NONE,))
    args_of = {message.event: message.args for message in columns.messages}
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in events.tolist():
        groups[kind_of(columns.name(event))].append(event)
    edges = np.linspace(columns.start[events].min(), columns.end[events].max(), POINTS + 1)
    pairs = []
    for (kind, memory), many in groups.items():
        args = [args_of.get(event, NO_ARGS) for event in many]
        sizes, rates = integers([arg.bytes for arg in args]), floats([arg.bandwidth for arg in args])
        pairs.append(_row(columns, kinds, kind, memory, np.array(many), sizes, rates, edges))
    pairs.sort(key=lambda pair: -pair[0].seconds)
    rows = tuple(row for row, _ in pairs)
    notes = [WAITS] if any("Pageable" in row.memory and row.kind in ("HtoD", "DtoH") for row in rows) else []
    if any(row.bytes is None for row in rows):
        notes.append("where bytes are missing, the file does not give them")
    times = tuple((edges / 1e9).tolist())
    return Copies(rows=rows, times=times, curves=tuple(tuple(curve.tolist()) for _, curve in pairs), notes=tuple(notes))


def _row(
    columns: Columns,
    kinds: Kinds,
    kind: str,
    memory: str,
    events: Numbers,
    sizes: Numbers,
    rates: NDArray[np.float64],
    edges: NDArray[np.float64],
) -> tuple[Copy, NDArray[np.float64]]:
    """The numbers of copies of one kind, and their curve."""
    spans = columns.spans[events]
    lengths = (spans[:, 1] - spans[:, 0]) / 1e9
    has_size = sizes >= 0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rates = rates * 1e9
        rates = np.where(np.isfinite(rates) & (rates > 0), rates, sizes / lengths)
    moved = has_size & (sizes > 0) & np.isfinite(rates) & (rates > 0)
    took = float((sizes[moved] / rates[moved]).sum())
    row = Copy(
        kind=kind,
        memory=memory,
        count=len(events),
        bytes=sum(sizes[has_size].tolist()) if has_size.any() else None,
        seconds=float(lengths.sum()),
        overlapped=float(covered(kinds.cover("kernel"), spans).sum()) / 1e9,
        bandwidth=float(sizes[moved].sum(dtype=np.float64)) / took if took else None,
        median=float(np.median(rates[moved])) if moved.any() else None,
        best=float(rates[moved].max()) if moved.any() else None,
    )
    return row, curve(spans[has_size], sizes[has_size], edges)


def curve(spans: Spans, sizes: Numbers, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes per second between edges, of copies that each move their bytes evenly.

    >>> curve(np.array([[0, 4]]), np.array([8]), np.array([0.0, 2.0, 4.0, 6.0])).tolist()
    [2000000000.0, 2000000000.0, 0.0]
    """
    ends = np.maximum(spans[:, 1], spans[:, 0] + 1)
    slope = sizes / (ends - spans[:, 0])
    upto = _ramps(spans[:, 0], slope, edges) - _ramps(ends, slope, edges)
    return np.maximum(np.diff(upto) / np.maximum(np.diff(edges), 1e-9), 0.0) * 1e9


def _ramps(starts: Numbers, slopes: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """At each time the sum of slope × (time − start) over all that have begun."""
    order = np.argsort(starts, kind="stable")
    begun = np.searchsorted(starts[order], times, side="right")
    steep = np.concatenate([[0.0], np.cumsum(slopes[order])])
    offset = np.concatenate([[0.0], np.cumsum(slopes[order] * starts[order])])
    sums: NDArray[np.float64] = times * steep[begun] - offset[begun]
    return sums
