"""Finds where the steps of a trace begin and end."""

import re
from dataclasses import dataclass

import numpy as np

from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import DEVICE, Kinds, callers
from workbench.traces.analysis.intervals import NONE, Numbers, Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a trace."""

    index: int
    """The number in its mark, such as `ProfilerStep#7`; counted from 0 if there are no marks."""
    start: float
    """Seconds from the first event of the file on."""
    seconds: float
    """Its length in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Steps in order, none overlapping another."""

    spans: Spans
    numbers: Numbers
    marked: bool
    """Did the file have marks of steps?"""
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps as values."""
        rows = zip(self.numbers.tolist(), self.spans.tolist(), strict=True)
        return tuple(Step(index=number, start=start / 1e9, seconds=(end - start) / 1e9) for number, (start, end) in rows)


def windows(columns: Columns, kinds: Kinds) -> Windows:
    """Find the steps.

    On a CPU a step goes from its mark to the next one. A device works later than the host that launched the work, so that host marks would
    cut it in the wrong places: there a step goes from the end of the last work that the step before launched to the end of the last work
    that it launched itself, and the first one, whose beginning is not known, is left out.

    Without marks (a profiler without a schedule writes none) a step goes from the end of one `Optimizer.step` to the end of the next, and
    where there are none of these either, the whole file is one.
    """
    marks, numbers, notes = _marks(columns, kinds)
    if not len(marks):
        return _unmarked(columns, kinds)
    notes += kinds.notes
    host = np.stack([marks[:, 0], np.append(marks[1:, 0], max(marks[-1, 1], marks[-1, 0]))], axis=1)
    if not kinds.device or kinds.unrecorded:
        return Windows(spans=host, numbers=numbers, marked=True, notes=notes)
    return _on_device(columns, kinds, host, numbers, notes)


def _marks(columns: Columns, kinds: Kinds) -> tuple[Spans, Numbers, tuple[str, ...]]:
    """The marks of one thread, in order, with their numbers."""
    chosen = np.flatnonzero(kinds.where("step"))
    if not len(chosen):
        return NONE, np.empty(0, dtype=np.int64), ()
    lanes, counts = np.unique(columns.lane[chosen], return_counts=True)
    notes: tuple[str, ...] = ()
    if len(lanes) > 1:
        most = lanes[counts.argmax()]
        notes = (f"{len(lanes)} threads mark steps: those of {columns.lanes[most].name} count",)
        chosen = chosen[columns.lane[chosen] == most]
    chosen = chosen[np.argsort(columns.start[chosen], kind="stable")]
    _, first = np.unique(columns.start[chosen], return_index=True)
    chosen = chosen[first]
    matches = [re.search(r"#(\d{1,15})$", columns.labels[label].name) for label in columns.label[chosen]]
    numbers = [int(match[1]) if match else i for i, match in enumerate(matches)]
    return np.stack([columns.start[chosen], columns.end[chosen]], axis=1), np.array(numbers, dtype=np.int64), notes


def _unmarked(columns: Columns, kinds: Kinds) -> Windows:
    if not len(columns):
        return Windows(spans=NONE, numbers=np.empty(0, dtype=np.int64), marked=False, notes=("the trace has no events",))
    steps = np.array([label.name.startswith("Optimizer.step#") for label in columns.labels])[columns.label] & kinds.where("optimizer")
    ends = np.unique(columns.end[steps])
    if len(ends) >= 3 and len(np.unique(columns.label[steps])) == 1 and (not kinds.device or kinds.unrecorded):
        return Windows(
            spans=np.stack([ends[:-1], ends[1:]], axis=1),
            numbers=np.arange(1, len(ends)),
            marked=False,
            notes=("the trace has no step marks: a step goes from the end of one Optimizer.step to the end of the next", *kinds.notes),
        )
    whole = np.array([[columns.start.min(), columns.end.max()]])
    note = "the trace has no step marks (a profiler without a schedule writes none): all of it counts as one step"
    return Windows(spans=whole, numbers=np.zeros(1, dtype=np.int64), marked=False, notes=(note, *kinds.notes))


def _on_device(columns: Columns, kinds: Kinds, host: Spans, numbers: Numbers, notes: tuple[str, ...]) -> Windows:
    work = kinds.where(*DEVICE)
    devices = {columns.lanes[lane].process for lane in np.unique(columns.lane[work]).tolist()}
    if len(devices) > 1:
        notes = (*notes, f"{len(devices)} devices work in this file: a part counts while any of them is at it")
    ended = columns.end[work]
    call = callers(columns, kinds, np.flatnonzero(work))
    began = np.where(call >= 0, columns.start[call], -1)
    owner = np.where(began >= 0, np.searchsorted(host[:, 0], began, side="right") - 1, -1)
    owner = np.where((owner >= 0) & (began < host[np.maximum(owner, 0), 1]), owner, -1)
    if not (owner >= 0).any():
        note = "work of the device is not linked to the calls that launched it: steps go from mark to mark of the host"
        return Windows(spans=host, numbers=numbers, marked=True, notes=(*notes, note))
    last = np.full(len(host), -1, dtype=np.int64)
    np.maximum.at(last, owner[owner >= 0], ended[owner >= 0])
    busy = np.flatnonzero(last >= 0)
    ends = np.maximum.accumulate(last[busy])
    if len(ends) == 1:
        spans = np.array([[min(host[busy[0], 0], ends[0]), ends[0]]])
        return Windows(
            spans=spans, numbers=numbers[busy], marked=True, notes=(*notes, "there is one step only: its beginning is the host's")
        )
    kept = np.append(False, ends[1:] > ends[:-1])
    spans = np.stack([np.append(0, ends[:-1]), ends], axis=1)[kept]
    remarks = (*notes, f"step {numbers[busy[0]]} is left out: where the device began it is not known")
    return Windows(spans=spans, numbers=numbers[busy][kept], marked=True, notes=remarks)


def host_steps(columns: Columns, kinds: Kinds, device_steps: Windows) -> Spans:
    """The steps on the host's clock: their marks. In a trace with a device, `windows` gives the steps on the device instead."""
    if not kinds.device:
        return device_steps.spans
    marks, _, _ = _marks(columns, kinds)
    return marks if len(marks) else device_steps.spans


def mark_numbers(columns: Columns, kinds: Kinds) -> Numbers:
    """Numbers of the host's marks of steps, in order."""
    return _marks(columns, kinds)[1]
