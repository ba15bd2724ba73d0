"""Trace: one file of torch's profiler, read; and everything that can be asked of it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from workbench import display, units
from workbench.traces import caching
from workbench.traces.answers import Answers
from workbench.traces.captured import Captured
from workbench.traces.columns import Columns
from workbench.traces.difference import Side, TraceDifference, difference
from workbench.traces.explanation import Explanation, explain
from workbench.traces.loading import Loaded, read


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
            from workbench.traces.ranks import TraceSet, files  # which has traces in it

            first, *others = files(where)
            if others:
                return cast("Trace", TraceSet.of(cls.load(one, cache=cache) for one in (first, *others)))
            where = first
        return cls._of(caching.load(where) if cache else read(where))

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
