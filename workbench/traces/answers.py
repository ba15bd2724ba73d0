"""Answers: everything that can be asked of the events of one trace, each in its own file."""

from functools import cached_property
from pathlib import Path

from workbench.device import Device
from workbench.display import Shown
from workbench.traces import breakdown as parts
from workbench.traces import collectives as exchanged
from workbench.traces import copies as moved
from workbench.traces import critical as ceilings
from workbench.traces import flame as calls
from workbench.traces import idle as pauses
from workbench.traces import kernels as launched
from workbench.traces import launches as queues
from workbench.traces import memory_curve as filled
from workbench.traces import modules as tree
from workbench.traces import ops as operators
from workbench.traces import overlap as overlapping
from workbench.traces import repeating as repeated
from workbench.traces import roofline as roofs
from workbench.traces import walking as walked
from workbench.traces.breakdown import Breakdown
from workbench.traces.collectives import Collectives
from workbench.traces.columns import Columns
from workbench.traces.copies import Copies
from workbench.traces.counting import Counted, counted
from workbench.traces.critical import Critical
from workbench.traces.details import Details
from workbench.traces.details import details as detailed
from workbench.traces.flame import Flame
from workbench.traces.idle import Idle
from workbench.traces.intervals import Spans
from workbench.traces.kernels import Kernels
from workbench.traces.kinds import Kinds
from workbench.traces.launches import Launches
from workbench.traces.memory_curve import MemoryCurve
from workbench.traces.mfu import Mfu
from workbench.traces.mfu import mfu as utilization
from workbench.traces.modules import Modules
from workbench.traces.ops import Operators, Which
from workbench.traces.overlap import Overlap
from workbench.traces.path import CriticalPath
from workbench.traces.roofline import Roofline
from workbench.traces.sequences import Sequences
from workbench.traces.stream_idle import GAP
from workbench.traces.windows import Step, Windows, hosted, marked, windows


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
