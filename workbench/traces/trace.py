"""Trace: one file of torch's profiler, read; and everything that can be asked of it."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench import display, units
from workbench.traces import breakdown as parts
from workbench.traces import collectives as exchanged
from workbench.traces import ops as operators
from workbench.traces import overlap as overlapping
from workbench.traces.breakdown import Breakdown
from workbench.traces.collectives import Collectives
from workbench.traces.columns import Columns, gathered
from workbench.traces.difference import Side, TraceDifference, difference
from workbench.traces.explanation import Explanation, explain
from workbench.traces.kinds import Kinds
from workbench.traces.ops import Operators, Which
from workbench.traces.overlap import Overlap
from workbench.traces.reading import Reading, TraceError
from workbench.traces.shown import Shown
from workbench.traces.windows import Step, Windows, windows


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Trace(Shown):
    """Events of some training steps of one process, as torch's profiler saw them.

    Every number in it is of steps under the profiler, which slows them down; `slowdown` says how much, where that was measured.
    """

    path: Path
    columns: Columns = field(repr=False)
    """The events."""
    rank: int | None = None
    """Rank of the process in its job, where the file tells."""
    world_size: int | None = None
    """Ranks of the job, where the file tells."""
    devices: tuple[str, ...] = ()
    """Names of the devices that the file lists."""
    slowdown: float | None = None
    """How much longer a traced step takes than one of the same run that is not: 0.1 = 10 %; None where it was not measured."""
    notes: tuple[str, ...] = ()
    """What is missing of the file."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read a file that `torch.profiler` exported (Chrome's JSON, plain or gzip), of any size, whatever its name.

        A file that is damaged or ends early gives what can be read of it, and `notes` that say what is missing.

        Args:
            path: the file, or a directory that has one trace in it.

        Raises:
            TraceError: there is no such file, it is none, or it has no event that can be read.
        """
        reading = Reading(path=_file(Path(path)))
        found = gathered(reading.batches())
        columns = found.columns()
        notes = list(reading.notes)
        if found.impossible:
            notes.append(f"{found.impossible:,} events have times that cannot be (no number, or a negative length): they are left out")
        if found.unpaired:
            notes.append(f"{found.unpaired:,} events are beginnings or ends only, which torch.profiler does not write: they are left out")
        if not len(columns):
            raise TraceError(
                f"{reading.path} has no events{f': {notes[0]}' if notes else ''}. "
                "A profiler with a schedule writes them when its active steps are over: was step() called often enough?"
            )
        rank, world_size = _ranks(reading.header.distributed)
        return cls(
            path=reading.path,
            columns=columns,
            rank=rank,
            world_size=world_size,
            devices=_devices(reading.header.devices),
            notes=tuple(notes),
        )

    @cached_property
    def kinds(self) -> Kinds:
        """What each event is."""
        return Kinds(self.columns)

    @cached_property
    def windows(self) -> Windows:
        """Where the steps begin and end."""
        return windows(self.columns, self.kinds)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return self.windows.steps

    @property
    def seconds(self) -> float:
        """From the first event to the end of the last."""
        return float(self.columns.end.max()) / 1e9

    def breakdown(self) -> Breakdown:
        """Each step in parts that exclude each other and add up to it."""
        return parts.breakdown(self.kinds, self.windows, self.notes)

    def ops(self, which: Which = "operator", *, by_shape: bool = False) -> Operators:
        """Operators of the host, or kernels of the device: calls, time of their own, time with what they call.

        Args:
            which: "operator" or "kernel".
            by_shape: apart by the shapes of the inputs, where those were recorded.

        Raises:
            ValueError: neither of them.
        """
        return operators.ops(self.columns, self.kinds, which, by_shape)

    def overlap(self) -> Overlap:
        """How much of communication and copies hides behind computing, per step."""
        return overlapping.overlap(self.kinds, self.windows, self.notes)

    def collectives(self) -> Collectives:
        """Collectives with bytes and bus bandwidth, as far as the file tells them."""
        return exchanged.collectives(self.columns, self.kinds)

    def diff(self, other: "Trace") -> TraceDifference:
        """What the other trace has otherwise, per step.

        Raises:
            ValueError: it is no trace.
        """
        if not isinstance(other, Trace):
            raise ValueError(f"diff({type(other).__name__}): a trace is wanted, such as wb.Trace.load(…) gives")
        return difference(self._side(), other._side())

    def _side(self) -> Side:
        marks = int(self.kinds.where("step").sum()) or len(self.steps)
        return self.breakdown(), self.ops(), self.ops("kernel"), marks

    def explain(self) -> Explanation:
        """What the trace says in words, and what it cannot say."""
        return explain(self.breakdown(), self.overlap(), marked=self.windows.marked, ranks=self.world_size)

    def plot(self, ax: Any = None) -> Any:
        """The lanes of `plot.timeline`; returns the Axes."""
        return display.picture("timeline")(self, ax=ax)

    @property
    def table(self) -> display.Table:
        """What the file is."""
        rows = [
            ["events", f"{len(self.columns):,} on {len(self.columns.lanes)} threads and streams"],
            ["time", units.seconds(self.seconds)],
            ["steps", f"{len(self.steps)}" if self.windows.marked else "no marks"],
            ["computes", ", ".join(dict.fromkeys(self.devices)) or ("a device" if self.kinds.device else "the CPU")],
        ]
        if self.rank is not None:
            rows.append(["rank", f"{self.rank} of {self.world_size or units.MISSING}"])
        if self.slowdown is not None:
            rows.append(["slowed down", f"by {units.percent(self.slowdown)}, against steps of the same run without the profiler"])
        note = "; ".join([*self.windows.notes, *self.notes]) or None
        return display.Table(columns=("trace", self.path.name), rows=rows, note=note)

    def __repr__(self) -> str:
        return f"Trace({self.path.name!r}, {len(self.columns):,} events, {len(self.steps)} steps)"


def _file(path: Path) -> Path:
    """The trace in a directory, or the path as it is."""
    if not path.is_dir():
        return path
    found = sorted(
        one for one in path.iterdir() if one.name.endswith((".pt.trace.json", ".pt.trace.json.gz", "trace.json", "trace.json.gz"))
    )
    if len(found) == 1:
        return found[0]
    raise TraceError(
        f"{path} has {len(found)} traces{': ' + ', '.join(one.name for one in found[:5]) if found else ''}. Load one file of it"
    )


def _ranks(value: object) -> tuple[int | None, int | None]:
    if not isinstance(value, dict):
        return None, None
    rank, size = value.get("rank"), value.get("world_size")
    return (rank if isinstance(rank, int) else None), (size if isinstance(size, int) else None)


def _devices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(str(one["name"]) for one in value if isinstance(one, dict) and "name" in one)
