"""Filling: what part of a device's kernels operators launched that could use tensor cores, and how many multiprocessors were busy."""

import heapq
import json
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from workbench.traces.columns import Columns
from workbench.traces.details import Details
from workbench.traces.formulas import FORMATS, WIDTHS
from workbench.traces.intervals import Numbers, Spans
from workbench.traces.kinds import Kinds
from workbench.traces.launching import callers
from workbench.traces.nesting import nested
from workbench.traces.tensor_cores import eligible, uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Kernels that calls of one operator launched which could use tensor cores, by the type of its first input."""

    name: str
    dtype: str
    """As `Device.flops_per_sec` names it where it has one; empty where types were not recorded."""
    count: int
    """Kernels, transposing and the like included."""
    seconds: float
    on_tensor_cores: float
    """Seconds of those whose names say so."""

    @property
    def tensor_share(self) -> float | None:
        """Fraction 0..1 of their time; None where they take none."""
        return self.on_tensor_cores / self.seconds if self.seconds else None


def products(columns: Columns, kinds: Kinds, kernels: Numbers, details: Details) -> tuple[Products, ...]:
    """By operator and type: the innermost operator around the launch that could use tensor cores.

    Args:
        columns: the events.
        kinds: what they are.
        kernels: numbers of the events of the device.
        details: of the events, for types.
    """
    call = callers(columns, kinds, kernels)
    calls = nested(columns, kinds.where("operator", "backward", "runtime", "wait"))
    could = np.array([eligible(label.name) for label in columns.labels] or [False])[columns.label]
    owner = calls.nearest((could & kinds.where("operator"))[calls.events])
    place = np.full(len(columns), -1, dtype=np.int64)
    place[calls.events] = np.arange(len(calls.events))
    of = np.where(call >= 0, place[call], -1)
    of = np.where(of >= 0, owner[np.maximum(of, 0)], -1) if len(owner) else np.full(len(of), -1, dtype=np.int64)
    on = np.array([uses(label.name) for label in columns.labels] or [False])[columns.label]
    found: dict[tuple[str, str], list[int]] = {}
    lengths = (columns.end - columns.start)[kernels]
    for event, length, at in zip(kernels[of >= 0].tolist(), lengths[of >= 0].tolist(), calls.events[of[of >= 0]].tolist(), strict=True):
        key = columns.labels[columns.label[at]].name, _dtype(details.inputs[details.input[at]].types)
        sums = found.setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += length
        sums[2] += length if on[event] else 0
    rows = (
        Products(name=name, dtype=dtype, count=count, seconds=taken / 1e9, on_tensor_cores=there / 1e9)
        for (name, dtype), (count, taken, there) in found.items()
    )
    return tuple(sorted(rows, key=lambda one: -one.seconds))


def _dtype(types: str) -> str:
    """Of the first tensor, by "Input type" as the file has it."""
    try:
        told = json.loads(types) if types else []
    except (ValueError, RecursionError):
        return ""
    kind = next((one for one in told if isinstance(one, str) and one in WIDTHS), "") if isinstance(told, list) else ""
    return FORMATS.get(kind, kind)


def highest(spans: Spans, values: NDArray[np.float64]) -> tuple[Spans, NDArray[np.float64]]:
    """The highest value at any time, in pieces that do not overlap.

    >>> [one.tolist() for one in highest(np.array([[0, 4], [2, 6]]), np.array([0.5, 1.0]))]
    [[[0, 2], [2, 6]], [0.5, 1.0]]
    """
    order = np.argsort(spans[:, 0], kind="stable")
    rows = list(zip(spans[order, 0].tolist(), spans[order, 1].tolist(), values[order].tolist(), strict=True))
    times = sorted({time for start, end, _ in rows if end > start for time in (start, end)})
    running: list[tuple[float, int]] = []
    pieces: list[list[int]] = []
    tops: list[float] = []
    at = 0
    for time, until in pairwise(times):
        while at < len(rows) and rows[at][0] <= time:
            heapq.heappush(running, (-rows[at][2], rows[at][1]))
            at += 1
        while running and running[0][1] <= time:
            heapq.heappop(running)
        if not running:
            continue
        if pieces and pieces[-1][1] == time and tops[-1] == -running[0][0]:
            pieces[-1][1] = until
        else:
            pieces.append([time, until])
            tops.append(-running[0][0])
    return np.array(pieces, dtype=np.int64).reshape(-1, 2), np.array(tops, dtype=np.float64)
