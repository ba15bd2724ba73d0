"""Trace: one file of torch's profiler, read; and everything that can be asked of it.

Answers: everything that can be asked of the events of one trace, each in its own file.
"""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from workbench.core import late, units
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.core.display.table import Shown
from workbench.traces.analysis import bottleneck as ceilings
from workbench.traces.analysis import breakdown as parts
from workbench.traces.analysis import collectives as exchanged
from workbench.traces.analysis import copies as moved
from workbench.traces.analysis import critical_path as walked
from workbench.traces.analysis import flame as calls
from workbench.traces.analysis import idle as pauses
from workbench.traces.analysis import kernels as launched
from workbench.traces.analysis import launch_queue as queues
from workbench.traces.analysis import loading, operators
from workbench.traces.analysis import memory_curve as filled
from workbench.traces.analysis import modules as tree
from workbench.traces.analysis import overlap as overlapping
from workbench.traces.analysis import roofline as roofs
from workbench.traces.analysis import sequences as repeated
from workbench.traces.analysis.bottleneck import Critical
from workbench.traces.analysis.breakdown import Breakdown
from workbench.traces.analysis.captured import Captured
from workbench.traces.analysis.collectives import Collectives
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.copies import Copies
from workbench.traces.analysis.critical_path import CriticalPath
from workbench.traces.analysis.details import Details
from workbench.traces.analysis.details import details as detailed
from workbench.traces.analysis.difference import Side, TraceDifference, difference
from workbench.traces.analysis.explanation import Explanation, explain
from workbench.traces.analysis.flame import Flame
from workbench.traces.analysis.flops import Counted, counted
from workbench.traces.analysis.idle import GAP, Idle
from workbench.traces.analysis.intervals import Spans
from workbench.traces.analysis.kernels import Kernels
from workbench.traces.analysis.kinds import Kinds
from workbench.traces.analysis.launch_queue import Launches
from workbench.traces.analysis.loading import Loaded, files, read
from workbench.traces.analysis.memory_curve import MemoryCurve
from workbench.traces.analysis.modules import Modules
from workbench.traces.analysis.operators import Operators, Which
from workbench.traces.analysis.overlap import Overlap
from workbench.traces.analysis.roofline import Mfu, Roofline
from workbench.traces.analysis.roofline import mfu as utilization
from workbench.traces.analysis.sequences import Sequences
from workbench.traces.analysis.windows import Step, Windows, hosted, marked, windows


class Answers(Shown):
    """The questions; who has events answers them. Nothing is computed before it is asked for."""

    path: Path
    columns: Columns
    world_size: int | None
    devices: tuple[str, ...]
    notes: tuple[str, ...]

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

    def per_step(self, which: Which = "operator") -> dict[str, tuple[float, float]]:
        """Own seconds and calls per step of each operator or kernel, of what lies in the steps: traces of other lengths compare.

        Args:
            which: "operator" or "kernel".

        Raises:
            ValueError: neither of them.
        """
        steps = self.windows.spans if which == "kernel" else self.host_steps
        found = operators.ops(self.columns, self.kinds, which, False, steps)
        count = max(1, len(steps))
        return {one.name: (one.self_seconds / count, one.count / count) for one in found.rows}

    def overlap(self) -> Overlap:
        """How much of communication and copies hides behind computing, per step."""
        return overlapping.overlap(self.kinds, self.windows, self.notes)

    def collectives(self) -> Collectives:
        """Collectives with bytes and bus bandwidth, as far as the file tells them."""
        return exchanged.collectives(self.columns, self.kinds, lambda: self.details, self.world_size)

    @cached_property
    def host_steps(self) -> Spans:
        """The steps as the host has them, nanoseconds: from mark to mark."""
        return hosted(self.columns, self.kinds, self.windows)

    @cached_property
    def details(self) -> Details:
        """What only some answers need: read in a second pass over the file when one of them is asked for."""
        return detailed(self.path, self.columns)

    def modules(self) -> Modules:
        """The tree of the model's modules: seconds per step on the host, of the backward pass, and on the device.

        The trace has to name them: profile `with_stack=True` (`wb.trace(step, loader, stacks=True)`). Without that, the ranges of
        `record_function` make the tree.
        """
        return tree.modules(self.columns, self.kinds, self.host_steps, lambda: self.details)

    def flame(self, thread: str | None = None, *, stacks: bool = False) -> Flame:
        """The calls of one thread merged by their path: the data of `plot.flame`.

        Args:
            thread: by its name; None = the one that marks the steps, else the busiest.
            stacks: with Python's frames, where they were recorded.

        Raises:
            ValueError: no such thread.
        """
        return calls.flame(self.columns, self.kinds, self.host_steps, thread, stacks)

    def critical(self) -> Critical:
        """Which resource holds the step back: what the step would take, at least, if one of them took no time."""
        return ceilings.critical(self.kinds, self.windows, self.notes)

    def critical_path(self) -> CriticalPath:
        """Of what each step's length consists: the chain of work, launches and waits from its end back to its beginning."""
        return walked.critical_path(self.columns, self.kinds, self.windows, self.notes)

    def kernels(self) -> Kernels:
        """How well the kernels fill the device: occupancy, blocks per multiprocessor, tensor cores, and who could use those."""
        return launched.kernels(self.columns, self.kinds, self.windows, self.details)

    def copies(self) -> Copies:
        """Copies between host and device and within it: bytes, bandwidth over time, and how much hides behind computing."""
        return moved.copies(self.columns, self.kinds)

    def sequences(self, operator: str | None = None, *, length: int = 3) -> Sequences:
        """Kernels (on a CPU: operators) that follow each other again and again, and the gaps between them.

        Args:
            operator: of the calls whose names have this in them, the outermost; None = of consecutive ones, wherever they come from.
            length: how many make a sequence; of an operator's calls, at least.

        Raises:
            ValueError: the length is below 2, or no operator has that in its name.
        """
        return repeated.sequences(self.columns, self.kinds, self.windows.spans, operator, length)

    def roofline(self, device: str | Device | None = None) -> Roofline:
        """FLOPs, bytes and speed of each operator and shape, under the roof of the device.

        The trace has to have shapes (`record_shapes=True`); FLOPs are counted from them, so `with_flops` is not needed (torch writes what
        that counts into no file).

        Args:
            device: its name in the workbench's table, or a Device; None = the one that the trace names. A CPU is in no table: FLOP/s are
                there without a roof.

        Raises:
            ValueError: no such device.
        """
        found, notes = roofs.known(device, self.devices)
        return roofs.roofline(self._counted, found, notes)

    def mfu(self, device: str | Device | None = None) -> Mfu:
        """Model FLOPs utilization of the traced step; arguments as those of `roofline`.

        Raises:
            ValueError: no such device.
        """
        steps = self.windows.spans
        mean = float((steps[:, 1] - steps[:, 0]).sum()) / 1e9 / max(1, len(steps))
        return utilization(self.roofline(device), mean)

    @cached_property
    def _counted(self) -> Counted:
        return counted(self.columns, self.kinds, self.host_steps, self.details)

    def launches(self) -> Launches:
        """How far the host is ahead of the device: delays from launch to work, and queues, per stream."""
        return queues.launches(self.columns, self.kinds, self.windows.spans, self.notes)

    def idle(self, gap: float = GAP) -> Idle:
        """When the device, or on a CPU the thread that trains, has nothing to do, and what the host does meanwhile.

        Args:
            gap: seconds; shorter pauses between two pieces of a stream's work that were launched in time are called `kernel_wait`.

        Raises:
            ValueError: gap is no time.
        """
        return pauses.idle(self.columns, self.kinds, self.windows, self.notes, gap)

    def memory_curve(self) -> MemoryCurve:
        """Allocated bytes over time per device, and who asked for what is held at the peak.

        The trace has to have that: profile `profile_memory=True` (`wb.trace(step, loader, memory=True)`).
        """
        return filled.memory_curve(self.columns, self.kinds, self.details, self._numbered)

    @property
    def _numbered(self) -> list[tuple[int, int, int]]:
        """Number, start and end of each step as the host has it."""
        marks = marked(self.columns, self.kinds)
        numbers = marks if self.kinds.device and len(marks) else self.windows.numbers
        return [(number, *span) for number, span in zip(numbers.tolist(), self.host_steps.tolist(), strict=False)]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Trace(Answers):
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
    host: str | None = None
    """Name of the machine, where the file tells; ranks of one machine share a clock."""
    devices: tuple[str, ...] = ()
    """Names of the devices that the file lists."""
    slowdown: float | None = None
    """How much longer a traced step takes than one of the same run that is not: 0.1 = 10 %; None where it was not measured."""
    notes: tuple[str, ...] = ()
    """What is missing of the file."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, cache: bool = False) -> "Trace":
        """Read a file that `torch.profiler` exported (Chrome's JSON, plain or gzip), of any size, whatever its name.

        A file that is damaged or ends early gives what can be read of it, and `notes` that say what is missing.

        Args:
            path: the file; or a directory: of the one trace in it or, if there are several, of all ranks (then a `TraceSet` is returned).
            cache: keep what was read beside the file (`.name.columns.npz`; where that cannot be written, in $WORKBENCH_CACHE or the user's
                cache), and read it from there as long as the file has the same content. Off by default: who reads a file does not expect
                another one beside it, and most traces are read in a fraction of a second.

        Raises:
            TraceError: there is no such file, it is none, or it has no event that can be read.
        """
        where = Path(path)
        if where.is_dir():
            first, *others = files(where)
            if others:
                several: Trace = late.load("TraceSet").of(cls.load(path, cache=cache) for path in (first, *others))
                return several
            where = first
        return cls._of(loading.load(where) if cache else read(where))

    @classmethod
    def _of(cls, loaded: Loaded) -> "Trace":
        kept = Captured.of(loaded.path)
        return cls(
            path=loaded.path,
            columns=loaded.columns,
            rank=loaded.rank,
            world_size=loaded.world_size,
            host=loaded.host,
            devices=loaded.devices,
            slowdown=kept.slowdown if kept and kept.slowdown == kept.slowdown else None,
            notes=(*loaded.notes, *(kept.said if kept else ())),
        )

    def diff(self, other: "Trace") -> TraceDifference:
        """What the other trace has otherwise, per step.

        Raises:
            ValueError: it is no trace.
        """
        if not isinstance(other, Trace):
            raise ValueError(f"diff({type(other).__name__}): a trace is wanted, such as wb.Trace.load(…) gives")
        return difference(self._side(), other._side())

    def _side(self) -> Side:
        seconds = [{name: own for name, (own, _) in self.per_step(which).items()} for which in ("operator", "kernel")]
        return self.breakdown(), seconds[0], seconds[1]

    def explain(self) -> Explanation:
        """What the trace says in words, and what it cannot say."""
        stacks = any(label.category == "python_function" for label in self.columns.labels)
        return explain(self.breakdown(), self.overlap(), marked=self.windows.marked, ranks=self.world_size, stacks=stacks)

    plot = display.plot_method("timeline")

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
