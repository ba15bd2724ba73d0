"""Trace: one file of torch's profiler, read. Its methods answer questions about it; each answer is a type with a module of its own."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from workbench.core import late, units
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.core.display.table import Shown
from workbench.traces.analysis.bottleneck import Bottleneck, bottleneck
from workbench.traces.analysis.breakdown import Breakdown, Overlap, breakdown, overlap
from workbench.traces.analysis.captured import Captured
from workbench.traces.analysis.collectives import Collectives, collectives
from workbench.traces.analysis.columns import Columns, Label
from workbench.traces.analysis.copies import Copies, copies
from workbench.traces.analysis.critical_path import CriticalPath, critical_path
from workbench.traces.analysis.details import Details, read_details
from workbench.traces.analysis.difference import Side, TraceDifference, difference
from workbench.traces.analysis.event_kinds import Kinds, kinds_by
from workbench.traces.analysis.explanation import Explanation, explain
from workbench.traces.analysis.flame import Flame, flame
from workbench.traces.analysis.flops import FlopCounts, count_flops
from workbench.traces.analysis.idle import GAP, Idle, idle
from workbench.traces.analysis.intervals import Spans, mean_seconds
from workbench.traces.analysis.kernels import Kernels, kernels
from workbench.traces.analysis.launch_queue import Launches, launches
from workbench.traces.analysis.loading import Loaded, files, load, read_trace_file
from workbench.traces.analysis.memory_curve import MemoryCurve, memory_curve
from workbench.traces.analysis.modules import Modules, modules
from workbench.traces.analysis.operators import Operators, Which, ops
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.roofline import Mfu, Roofline, known_device, mfu, roofline
from workbench.traces.analysis.sequences import Sequences, sequences
from workbench.traces.analysis.windows import Step, Windows, host_steps, mark_numbers, windows

MOST_NAMES = 12
"""Names of annotations that an error lists."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Trace(Shown):
    """Events of some training steps of one process, as torch's profiler recorded them. Results are computed on demand.

    Every number describes steps under the profiler, which slows them down. `slowdown` says by how much, if that was measured.
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
    marked_by: str | None = None
    """Pattern of the names of the events that mark steps; None = the profiler's own, `ProfilerStep#…`."""
    communication: tuple[str, ...] = ()
    """Patterns of the names of kernels that are communication, besides those that are known."""

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, cache: bool = False, steps: str | None = None, communication: str | Sequence[str] = ()
    ) -> "Trace":
        """Read a file that `torch.profiler` exported (Chrome's JSON, plain or gzip), of any size, whatever its name.

        Of a damaged or truncated file, what can be read is loaded, and `notes` say what is missing.

        Args:
            path: the file; or a directory with one trace, or with those of all ranks (then a `TraceSet` is returned).
            cache: keep what was read beside the file (`.name.columns.npz`; if that cannot be written, in $WORKBENCH_CACHE or the user's
                cache), and read it from there while the file's content is the same. Off by default: most traces are read in a fraction of a
                second, and reading should not write files.
            steps: a pattern of the names of the annotations that mark steps, such as "execute_*" (in a server's traces); None = the
                profiler's own.
            communication: patterns of the names of kernels that exchange data between devices, such as "*my_all_gather*", in addition to
                those of NCCL and other known libraries.

        Raises:
            TraceError: no such file, not a trace, no readable event, or no event that `steps` matches.
        """
        where = Path(path)
        if where.is_dir():
            first, *others = files(where)
            if others:
                several: Trace = late.load("TraceSet").of(
                    cls.load(path, cache=cache, steps=steps, communication=communication) for path in (first, *others)
                )
                return several
            where = first
        exchanges = (communication,) if isinstance(communication, str) else tuple(communication)
        return cls._of(load(where) if cache else read_trace_file(where), steps, exchanges)

    @classmethod
    def _of(cls, loaded: Loaded, steps: str | None = None, communication: tuple[str, ...] = ()) -> "Trace":
        captured = Captured.of(loaded.path)
        trace = cls(
            path=loaded.path,
            columns=loaded.columns,
            rank=loaded.rank,
            world_size=loaded.world_size,
            host=loaded.host,
            devices=loaded.devices,
            slowdown=captured.slowdown if captured and captured.slowdown == captured.slowdown else None,
            notes=(*loaded.notes, *(captured.all_notes if captured else ())),
            marked_by=steps,
            communication=communication,
        )
        if steps is not None and not trace.kinds.where("step").any():
            names = dict.fromkeys(label.name for label in loaded.columns.labels if label.category == "user_annotation")
            there = f"it has {', '.join(list(names)[:MOST_NAMES])}" if names else "it has none"
            raise TraceError(f"steps={steps!r} names no annotation of {loaded.path}: {there}")
        return trace

    @cached_property
    def kind_of(self) -> Callable[[Label], str]:
        """The kind of an event by its label."""
        return kinds_by(self.marked_by, self.communication)

    @cached_property
    def kinds(self) -> Kinds:
        """The kind of each event."""
        return Kinds(self.columns, self.kind_of)

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
        """Seconds from the first event to the end of the last."""
        return float(self.columns.end.max()) / 1e9

    def breakdown(self) -> Breakdown:
        """Each step in parts that exclude each other and add up to it."""
        return breakdown(self.kinds, self.windows, self.notes)

    def ops(self, which: Which = "operator", *, by_shape: bool = False) -> Operators:
        """Operators of the host, or kernels of the device: calls, self time, and total time with their callees.

        Args:
            which: "operator" or "kernel".
            by_shape: one row per shape of the inputs, if shapes were recorded.

        Raises:
            ValueError: `which` has another value.
        """
        return ops(self.columns, self.kinds, which, by_shape)

    def per_step(self, which: Which = "operator") -> dict[str, tuple[float, float]]:
        """Self time and calls per step of each operator or kernel, within the steps, so that traces of different lengths can be compared.

        Args:
            which: "operator" or "kernel".

        Raises:
            ValueError: `which` has another value.
        """
        steps = self.windows.spans if which == "kernel" else self.host_steps
        count = max(1, len(steps))
        rows = ops(self.columns, self.kinds, which, False, steps).rows
        return {row.name: (row.self_seconds / count, row.count / count) for row in rows}

    def overlap(self) -> Overlap:
        """How much communication and copying hides behind computing, per step."""
        return overlap(self.kinds, self.windows, self.notes)

    def collectives(self) -> Collectives:
        """Collectives with bytes and bus bandwidth, as far as the file has them."""
        return collectives(self.columns, self.kinds, lambda: self.details, self.world_size)

    @cached_property
    def host_steps(self) -> Spans:
        """The steps on the host, nanoseconds: from mark to mark."""
        return host_steps(self.columns, self.kinds, self.windows)

    @cached_property
    def details(self) -> Details:
        """Details that only some answers need, read in a second pass over the file when the first of them is computed."""
        return read_details(self.path, self.columns)

    def modules(self) -> Modules:
        """The tree of the model's modules: seconds per step on the host, of the backward pass, and on the device.

        The trace must name the modules: profile with `with_stack=True` (`wb.trace(step, loader, stacks=True)`). Otherwise the ranges of
        `record_function` form the tree.
        """
        return modules(self.columns, self.kinds, self.host_steps, lambda: self.details)

    def flame(self, thread: str | None = None, *, stacks: bool = False) -> Flame:
        """The calls of one thread merged by their path: the data of `plot.flame`.

        Args:
            thread: name of the thread; None = the thread that marks the steps, or else the busiest.
            stacks: include Python's frames, if they were recorded.

        Raises:
            ValueError: no such thread.
        """
        return flame(self.columns, self.kinds, self.host_steps, thread, stacks)

    def critical(self) -> Bottleneck:
        """Which resource limits the step: at least how long the step would take if one resource took no time."""
        return bottleneck(self.kinds, self.windows, self.notes)

    def critical_path(self) -> CriticalPath:
        """The chain of work, launches and waits that makes up each step's length, from its end back to its start."""
        return critical_path(self.columns, self.kinds, self.windows, self.notes)

    def kernels(self) -> Kernels:
        """How well kernels fill the device: occupancy, blocks per multiprocessor, tensor cores, and which operators could use those."""
        return kernels(self.columns, self.kinds, self.windows, self.details)

    def copies(self) -> Copies:
        """Copies between host and device and within it: bytes, bandwidth over time, and how much hides behind computing."""
        return copies(self.columns, self.kinds)

    def sequences(self, operator: str | None = None, *, length: int = 3) -> Sequences:
        """Recurring sequences of kernels (on a CPU, of operators), and the gaps between them.

        Args:
            operator: only sequences within the outermost calls whose names contain this; None = consecutive work, whatever launches it.
            length: length of a sequence; within an operator, the smallest length.

        Raises:
            ValueError: the length is below 2, or no operator's name contains `operator`.
        """
        return sequences(self.columns, self.kinds, self.windows.spans, operator, length)

    def roofline(self, device: str | Device | None = None) -> Roofline:
        """FLOPs, bytes and speed of each operator and shape, compared with the device's roofline.

        The trace must have shapes (`record_shapes=True`). FLOPs are computed from them, so `with_flops` is not needed (torch does not write
        those counts into the file).

        Args:
            device: its name in the workbench's table, or a Device; None = the device that the trace names. CPUs are not in the table, so
                their FLOP/s have no roof.

        Raises:
            ValueError: no such device.
        """
        return roofline(self._flop_counts, *known_device(device, self.devices))

    def mfu(self, device: str | Device | None = None) -> Mfu:
        """Model FLOPs utilisation (MFU) of the traced step; arguments as in `roofline`.

        Raises:
            ValueError: no such device.
        """
        return mfu(self.roofline(device), mean_seconds(self.windows.spans))

    @cached_property
    def _flop_counts(self) -> FlopCounts:
        return count_flops(self.columns, self.kinds, self.host_steps, self.details)

    def launches(self) -> Launches:
        """How far the host is ahead of the device: delays from launch to execution, and queue lengths, per stream."""
        return launches(self.columns, self.kinds, self.windows.spans, self.notes)

    def idle(self, gap: float = GAP) -> Idle:
        """When the device (on a CPU, the training thread) is idle, and what the host does meanwhile.

        Args:
            gap: seconds; shorter pauses between two pieces of a stream's work that were launched in time count as `kernel_wait`.

        Raises:
            ValueError: gap is not a number of seconds.
        """
        return idle(self.columns, self.kinds, self.windows, self.notes, gap)

    def memory_curve(self) -> MemoryCurve:
        """Allocated bytes over time per device, and the calls that allocated what is held at the peak.

        Memory must be recorded: profile with `profile_memory=True` (`wb.trace(step, loader, memory=True)`).
        """
        return memory_curve(self.columns, self.kinds, self.details, self._numbered)

    @property
    def _numbered(self) -> list[tuple[int, int, int]]:
        """Number, start and end of each step as the host has it."""
        marks = mark_numbers(self.columns, self.kinds)
        numbers = marks if self.kinds.device and len(marks) else self.windows.numbers
        return [(number, *span) for number, span in zip(numbers.tolist(), self.host_steps.tolist(), strict=False)]

    def diff(self, other: "Trace") -> TraceDifference:
        """Compare with another trace, per step.

        Raises:
            ValueError: the argument is not a Trace.
        """
        if not isinstance(other, Trace):
            raise ValueError(f"diff({type(other).__name__}): a Trace is needed, such as wb.Trace.load(…) returns")
        return difference(self._side(), other._side())

    def _side(self) -> Side:
        seconds = [{name: own for name, (own, _) in self.per_step(which).items()} for which in ("operator", "kernel")]
        return self.breakdown(), seconds[0], seconds[1]

    def explain(self) -> Explanation:
        """Explain in words where the step's time goes, and what a trace cannot show."""
        stacks = any(label.category == "python_function" for label in self.columns.labels)
        return explain(self.breakdown(), self.overlap(), marked=self.windows.marked, ranks=self.world_size, stacks=stacks)

    plot = display.plot_method("timeline")

    @property
    def table(self) -> display.Table:
        """The main facts about the file."""
        rows = [
            ["events", f"{len(self.columns):,} on {len(self.columns.lanes)} threads and streams"],
            ["time", units.seconds(self.seconds)],
            ["steps", f"{len(self.steps)}" if self.windows.marked else "no marks"],
            ["computes", self._computes],
        ]
        if self.rank is not None:
            rows.append(["rank", f"{self.rank} of {self.world_size or units.MISSING}"])
        if self.slowdown is not None:
            rows.append(["slowed down", f"by {units.percent(self.slowdown)}, against steps of the same run without the profiler"])
        note = display.notes([*self.windows.notes, *self.notes]) or None
        return display.Table(columns=("trace", self.path.name), rows=rows, note=note)

    @property
    def _computes(self) -> str:
        if not self.kinds.device:
            return "the CPU"
        return f"{', '.join(dict.fromkeys(self.devices)) or 'a device'}{' (not recorded)' * bool(self.kinds.unrecorded)}"

    def __repr__(self) -> str:
        return f"Trace({self.path.name!r}, {len(self.columns):,} events, {len(self.steps)} steps)"
