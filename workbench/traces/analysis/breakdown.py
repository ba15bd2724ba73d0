"""Splits each step of a trace into disjoint parts that add up to it, and measures how much communication overlaps with computing."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.event_kinds import Kinds
from workbench.traces.analysis.intervals import NONE, Spans, covered, union
from workbench.traces.analysis.windows import Windows

PARTS = ("data_wait", "h2d", "compute", "communication", "host", "idle", "other")
"""The parts of a step of a trace. Each moment counts for one part only, the first that applies in the order of ON_DEVICE or ON_CPU.

* `data_wait`: the loop is blocked in `next(loader)`.
* `h2d`: copies from host to device, as far as nothing hides them.
* `compute`: kernels; on a CPU operators, nodes of the backward graph and the optimizer's step.
* `communication`: collectives, as far as computing does not hide them.
* `host`: Python or operators of the host, while the device has nothing to do; on a CPU all of the step outside of operators.
* `idle`: the device has nothing to do, and the host shows nothing either (0 on a CPU, where a trace cannot tell it from Python).
* `other`: the device's other copies; on a CPU, the time outside of the steps' marks."""

ON_DEVICE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("compute", ("kernel",)),
    ("data_wait", ("data_wait",)),
    ("communication", ("communication", "host_communication")),
    ("h2d", ("h2d",)),
    ("other", ("copy",)),
    ("host", ("runtime", "wait", "operator", "backward", "optimizer", "collective_call", "range")),
)
"""Highest priority first. Waiting for data comes before collectives: a collective that runs meanwhile waits for the data of some rank.
Source: the order of openxla/xprof, utils/event_span.h."""

ON_CPU: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("data_wait", ("data_wait",)),
    ("compute", ("operator", "backward", "optimizer", "kernel")),
    ("communication", ("host_communication", "collective_call")),
    ("host", ("range", "step")),
)
"""Highest priority first. Data comes before computing, as the operators that collate a batch belong to the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """One step; its parts in seconds."""

    step: int
    """The number in its mark."""
    data_wait: float
    h2d: float
    compute: float
    communication: float
    host: float
    idle: float
    other: float
    total: float
    """Length of the step: the sum of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown(display.Shown, JsonDataclass):
    """The parts of the steps of a trace. Get it from `trace.breakdown()`."""

    steps: tuple[StepParts, ...]
    device: str
    """What computes: "device" or "cpu"."""
    notes: tuple[str, ...] = ()
    """What the file lacks, and what the numbers do not show."""
    unrecorded: int = 0
    """Number of launches whose work on the device is not in the file."""

    def mean(self, part: str = "total") -> float:
        """Mean seconds of a part, or of the step.

        Raises:
            ValueError: no such part.
        """
        if part not in (*PARTS, "total"):
            raise ValueError(f"no part {part!r}: a step is made of {', '.join(PARTS)}; 'total' is all of it")
        return sum(getattr(step, part) for step in self.steps) / len(self.steps) if self.steps else float("nan")

    def share(self, part: str) -> float:
        """Fraction 0..1 of the steps' time that a part takes."""
        whole = self.mean()
        return self.mean(part) / whole if whole else float("nan")

    @property
    def caption(self) -> str:
        """What the numbers mean."""
        what = "a device computes" if self.device == "device" else "the CPU computes"
        return display.notes([f"from a trace of {units.several(len(self.steps), 'step')}, taken under the profiler; {what}", *self.notes])

    @property
    def table(self) -> display.Table:
        """One row per part: mean, share, least and most of a step."""
        rows: list[list[object]] = []
        for part in (*PARTS, "total"):
            values = [getattr(step, part) for step in self.steps] or [float("nan")]
            ends = [units.seconds(min(values)), units.seconds(max(values))]
            rows.append([part, units.seconds(self.mean(part)), units.percent(self.share(part)), *ends])
        return display.Table(
            columns=("part", "mean", "share", "least", "most"), rows=rows, title="Where the traced step goes", note=self.caption
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per step, in seconds."""
        return display.frame([dataclasses.asdict(step) for step in self.steps], columns=("step", *PARTS, "total"))

    plot = display.plot_method("breakdown")

    def __repr__(self) -> str:
        return f"Breakdown({len(self.steps)} steps, {units.seconds(self.mean())} each)"


def breakdown(kinds: Kinds, windows: Windows, notes: Sequence[str] = ()) -> Breakdown:
    """Split every step by priority.

    With U_k the union of the layers 0 … k, the part of layer k is |U_k| − |U_(k−1)| inside the step: every moment counts once, and the
    parts add up to the step exactly, in whole nanoseconds.
    """
    spans = windows.spans
    lengths = spans[:, 1] - spans[:, 0]
    nanoseconds = {part: np.zeros(len(spans), dtype=np.int64) for part in PARTS}
    cover, below = NONE, np.zeros(len(spans), dtype=np.int64)
    for part, layer in ON_DEVICE if kinds.device else ON_CPU:
        cover = union(cover, kinds.cover(*layer))
        upto = covered(cover, spans)
        nanoseconds[part] += upto - below
        below = upto
    nanoseconds["idle" if kinds.device else "other"] += lengths - below
    columns = [(nanoseconds[part] / 1e9).tolist() for part in PARTS]
    steps = tuple(
        StepParts(step=number, total=total / 1e9, **dict(zip(PARTS, parts, strict=True)))
        for number, total, *parts in zip(windows.numbers.tolist(), lengths.tolist(), *columns, strict=True)
    )
    return Breakdown(steps=steps, device="device" if kinds.device else "cpu", notes=(*windows.notes, *notes), unrecorded=kinds.unrecorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverlap:
    """Seconds of a step in which a collective, or a copy to the device, runs."""

    step: int
    communication: float
    """At least one collective runs."""
    overlapped: float
    """… and so does a kernel (on a CPU: an operator)."""
    exposed: float
    """… and no kernel does: communication = overlapped + exposed."""
    h2d: float
    """At least one copy from host to device runs."""
    h2d_exposed: float
    """… and no kernel does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(display.Shown, JsonDataclass):
    """Communication of the steps of a trace. Get one from `trace.overlap()`."""

    steps: tuple[StepOverlap, ...]
    notes: tuple[str, ...] = ()

    def mean(self, part: str = "exposed") -> float:
        """Mean seconds per step of one of the columns.

        Raises:
            ValueError: no such column.
        """
        names = [field.name for field in dataclasses.fields(StepOverlap)][1:]
        if part not in names:
            raise ValueError(f"no column {part!r}: there are {', '.join(names)}")
        return sum(getattr(step, part) for step in self.steps) / len(self.steps) if self.steps else float("nan")

    @property
    def hidden(self) -> float:
        """Fraction 0..1 of the communication that computing hides; nan without any."""
        whole = self.mean("communication")
        return self.mean("overlapped") / whole if whole else float("nan")

    @property
    def table(self) -> display.Table:
        """One row per column: mean seconds per step."""
        rows = [[field.name, units.seconds(self.mean(field.name))] for field in dataclasses.fields(StepOverlap)[1:]]
        text = (
            f"{units.percent(self.hidden)} of the communication hides behind computing"
            if self.hidden == self.hidden
            else "no communication"
        )
        note = display.notes([text, *self.notes])
        return display.Table(columns=("time in which it runs", "mean per step"), rows=rows, title="What hides behind computing", note=note)

    to_frame = display.frame_method("steps", StepOverlap)

    def __repr__(self) -> str:
        return f"Overlap({units.seconds(self.mean('communication'))} of communication a step, {units.seconds(self.mean())} exposed)"


WHAT_IT_CANNOT = (
    "exposed is not what communication costs: computing that runs beside it is slowed down, and a collective waits for the slowest rank"
)


def overlap(kinds: Kinds, windows: Windows, notes: Sequence[str] = ()) -> Overlap:
    """Measure the overlap in every step: exposed = |A ∪ B| − |B|, with A the communication and B the computing."""
    layers = dict(ON_DEVICE if kinds.device else ON_CPU)
    busy = kinds.cover(*layers["compute"])

    def both(of: Spans) -> tuple[list[float], list[float]]:
        """Seconds in which it runs, and of them the seconds without computing."""
        total = covered(of, windows.spans)
        exposed = covered(union(of, busy), windows.spans) - covered(busy, windows.spans)
        return (total / 1e9).tolist(), (exposed / 1e9).tolist()

    total, exposed = both(kinds.cover(*layers["communication"]))
    copies, bare = both(kinds.cover("h2d"))
    hidden = (np.array(total) - np.array(exposed)).tolist()
    rows = zip(windows.numbers.tolist(), total, hidden, exposed, copies, bare, strict=True)
    names = [field.name for field in dataclasses.fields(StepOverlap)]
    steps = tuple(StepOverlap(**dict(zip(names, row, strict=True))) for row in rows)
    caveats = (WHAT_IT_CANNOT,) if any(total) else ()
    return Overlap(steps=steps, notes=(*windows.notes, *notes, *caveats))
