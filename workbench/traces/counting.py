"""Counting: FLOPs, bytes and time of the operators of a trace that have a formula, per step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.traces.columns import Columns
from workbench.traces.details import Details
from workbench.traces.formulas import FORMATS, FORMULAS, OTHERWISE, WIDTHS, work
from workbench.traces.intervals import Numbers, Spans, covered, union
from workbench.traces.kinds import Kinds
from workbench.traces.launching import callers
from workbench.traces.nesting import Nesting, nested

BUSY = ("operator", "backward", "optimizer", "collective_call")
"""Kinds of the host whose time is that of operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoofPoint:
    """All calls of an operator on inputs of one shape and type; per step."""

    name: str
    shapes: str
    """Of the inputs, as the file has them."""
    dtype: str
    """Number format of the first input, as `Device.flops_per_sec` names it where it has one."""
    calls: float
    seconds: float
    """Of kernels where a device computes, else of the operator on the CPU with all that it calls."""
    flops: float
    bytes: float | None
    """Of inputs and output, each once: the least that has to move; None where types were not recorded."""
    matrix: bool
    """Is it one of the operators that MFU counts: products of matrices, convolutions, attention?"""
    peak: float | None = None
    """FLOP/s that the device can do in this format at best; None where that is not known."""

    @property
    def flops_per_sec(self) -> float:
        """Reached; nan where it took no time."""
        return self.flops / self.seconds if self.seconds else float("nan")

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """All of them."""

    rows: tuple[RoofPoint, ...]
    unaccounted: float | None
    """Fraction 0..1 of the time of operators (of kernels, where a device computes) outside of these; None where there is none."""
    notes: tuple[str, ...]


def counted(columns: Columns, kinds: Kinds, steps: Spans, details: Details) -> Counted:
    """Count what lies within the steps.

    Where operators with a formula call others with one, the outermost counts. On a device its time is that of the kernels it launched,
    itself or by what it calls; communication counts for nobody.

    Args:
        columns: the events.
        kinds: what they are.
        steps: of the host.
        details: of the events, for types and what is no tensor.
    """
    cover = union(steps)
    calls = nested(columns, kinds.where(*BUSY, "data_wait", "runtime", "wait"))
    inside = covered(cover, calls.spans) > 0
    keys, code = _signatures(columns, details, calls)
    found = [work(*key) for key in keys]
    chosen = _outermost(calls, [key[0] for key in keys], np.array([one is not None for one in found], dtype=np.bool_), code)
    owner = calls.nearest(chosen)
    time, other = _device_time(columns, kinds, calls, owner, inside) if kinds.device else _host_time(columns, kinds, calls, owner, cover)
    rows: list[RoofPoint] = []
    count = max(1, len(steps))
    picked = np.flatnonzero(chosen & inside)
    for at in np.unique(code[picked]).tolist():
        result = found[at]
        assert result is not None
        done, call = result
        places = picked[code[picked] == at]
        read = call.read
        moved = None if read is None else read + done.elements * WIDTHS[call.dtype]
        each = len(places) / count
        rows.append(
            RoofPoint(
                name=keys[at][0],
                shapes=keys[at][1],
                dtype=FORMATS.get(call.dtype, call.dtype),
                calls=each,
                seconds=float(time[places].sum()) / 1e9 / count,
                flops=done.flops * each,
                bytes=None if moved is None else moved * each,
                matrix=done.matrix,
            )
        )
    spent = float(time[picked].sum())
    whole = spent + other
    return Counted(rows=tuple(rows), unaccounted=other / whole if whole else None, notes=_notes(columns, details, rows))


def _signatures(columns: Columns, details: Details, calls: Nesting) -> tuple[list[tuple[str, str, str, str]], Numbers]:
    """Name, shapes, types and values of the different calls, and which one each place is."""
    events = calls.events
    name = columns.label[events].astype(np.int64)
    wide, deep = len(columns.shapes), len(details.inputs)
    keys, code = np.unique((name * wide + columns.shape[events]) * deep + details.input[events], return_inverse=True)
    found = []
    for key in keys.tolist():
        inputs = details.inputs[key % deep]
        label = columns.labels[key // deep // wide]
        found.append((label.name, columns.shapes[key // deep % wide], inputs.types, inputs.concrete))
    return found, code


def _outermost(calls: Nesting, names: list[str], has: NDArray[np.bool_], code: Numbers) -> NDArray[np.bool_]:
    """Places with a formula that no other with one is around."""
    first = (has & np.array([name in FORMULAS for name in names], dtype=np.bool_))[code]
    second = (has & np.array([name in OTHERWISE for name in names], dtype=np.bool_))[code]
    above = calls.nearest(first)
    outer: NDArray[np.bool_] = first & (above == np.arange(len(first)))
    parents = calls.parent[outer]
    outer[outer] = np.where(parents >= 0, above[np.maximum(parents, 0)] < 0, True)
    if second.any():
        holders = calls.nearest(second)
        filled = np.unique(holders[outer & (holders >= 0)])
        second[filled] = False
        outer |= second
    return outer


def _host_time(columns: Columns, kinds: Kinds, calls: Nesting, owner: Numbers, cover: Spans) -> tuple[Numbers, float]:
    """Nanoseconds of each place with all it calls, and of all operators that none of them is around."""
    total, own = calls.within(cover)
    loader = calls.nearest(kinds.where("data_wait")[calls.events]) >= 0
    rest = (owner < 0) & ~loader & kinds.where(*BUSY)[calls.events]
    return total, float(own[rest].sum())


def _device_time(columns: Columns, kinds: Kinds, calls: Nesting, owner: Numbers, inside: NDArray[np.bool_]) -> tuple[Numbers, float]:
    """Nanoseconds of the kernels that each place launched, itself or by what it calls, and of all kernels that none of them launched."""
    kernels = np.flatnonzero(kinds.where("kernel"))
    lengths = (columns.end - columns.start)[kernels]
    call = callers(columns, kinds, kernels)
    place = np.full(len(columns), -1, dtype=np.int64)
    place[calls.events] = np.arange(len(calls.events))
    at = np.where(call >= 0, place[call], -1)
    of = np.where(at >= 0, owner[at], -1)
    found = np.zeros(len(calls.events), dtype=np.int64)
    np.add.at(found, of[of >= 0], lengths[of >= 0])
    seen = (of < 0) & (at >= 0)
    seen[seen] = inside[at[seen]]
    return found, float(lengths[seen].sum())


def _notes(columns: Columns, details: Details, rows: list[RoofPoint]) -> tuple[str, ...]:
    said = list(details.notes)
    if not any(columns.shapes):
        said.append("shapes were not recorded, and without them there are no FLOPs: profile with record_shapes=True")
    elif not rows:
        said.append("no operator of the steps has a formula")
    elif any(one.bytes is None for one in rows) and not details.notes:
        said.append("types of some inputs were not recorded: their bytes are not known")
    return tuple(said)
