"""TraceSet: the traces of several ranks of one run, and what only all of them together tell."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import display, units
from workbench.traces.arrivals import Arrivals, Seen, arrivals
from workbench.traces.captured import DEARER
from workbench.traces.explanation import Explanation
from workbench.traces.loading import NAMES, traces_in
from workbench.traces.rank_parts import RankParts, rank_parts
from workbench.traces.rank_words import explain_ranks, slower
from workbench.traces.reading import TraceError
from workbench.traces.stragglers import Stragglers, stragglers
from workbench.traces.trace import Trace

TRACES = "traces"
"""Folder of a run directory."""
RANK = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TraceSet(display.Shown, Mapping[int, Trace]):
    """Traces of the ranks of one run, by rank. Get one from `TraceSet.load(directory)`."""

    traces: Mapping[int, Trace]
    notes: tuple[str, ...] = ()
    """What is missing."""

    @classmethod
    def load(cls, where: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, cache: bool = False) -> "TraceSet":
        """Read the files of a directory, or those that are named.

        A file's rank is what it says of its job; where it says nothing, the number behind "rank" in its name.

        Args:
            where: a directory, or paths of files.
            cache: as in `Trace.load`.

        Raises:
            TraceError: there is none, one cannot be read or has no rank, or two are of the same rank.
        """
        paths = files(Path(where)) if isinstance(where, str | os.PathLike) else [Path(one) for one in where]
        if not paths:
            raise TraceError(
                f"no traces: {where!s} names none. A trace is a .pt.trace.json or .pt.trace.json.gz that torch.profiler exported"
            )
        return cls.of(Trace.load(path, cache=cache) for path in paths)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> "TraceSet":
        """Of traces that are read already.

        Raises:
            TraceError: there is none, one has no rank, or two have the same.
        """
        found: dict[int, Trace] = {}
        given = list(traces)
        for trace in given:
            rank = rank_of(trace) if len(given) > 1 else rank_of(trace) or 0
            if rank is None:
                raise TraceError(
                    f"{trace.path} does not say of which rank it is (no distributedInfo, and no rank in its name): load it alone, or name "
                    f"it rank0_{trace.path.name}"
                )
            if rank in found:
                raise TraceError(
                    f"two traces of rank {rank}: {found[rank].path.name} and {trace.path.name}. Name the files of one capture: "
                    "TraceSet.load([path, path])"
                )
            found[rank] = trace
        if not found:
            raise TraceError("no traces: at least one is wanted")
        sizes = {trace.world_size for trace in found.values() if trace.world_size}
        notes = []
        if len(sizes) > 1:
            notes.append(f"the files are of jobs with {', '.join(map(str, sorted(sizes)))} ranks: are they of one run?")
        elif missing := sorted(set(range(max(sizes, default=0))) - set(found)):
            shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            notes.append(f"{len(missing)} of {max(sizes)} ranks have no trace here: {shown}")
        return cls(traces=dict(sorted(found.items())), notes=tuple(notes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a trace."""
        return tuple(self.traces)

    @property
    def world_size(self) -> int | None:
        """Ranks of the job, where the files tell."""
        return next((trace.world_size for trace in self.traces.values() if trace.world_size), None)

    @property
    def slowdown(self) -> float | None:
        """The largest of the ranks': how much longer a traced step takes; None where it was not measured."""
        return max((trace.slowdown for trace in self.traces.values() if trace.slowdown is not None), default=None)

    def __getitem__(self, rank: int) -> Trace:
        try:
            return self.traces[rank]
        except KeyError:
            raise KeyError(f"no trace of rank {rank!r}: there are those of {', '.join(map(str, self.traces))}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self.traces)

    def __len__(self) -> int:
        return len(self.traces)

    def breakdown(self) -> RankParts:
        """The steps that all ranks have, in parts that exclude each other and add up to them, side by side."""
        found = {rank: trace.breakdown() for rank, trace in self.traces.items()}
        most = max(self.traces, key=lambda rank: self.traces[rank].slowdown or 0.0)  # what the profiler costs is said once
        said = _said({rank: [note for note in one.notes if rank == most or not note.startswith(DEARER)] for rank, one in found.items()})
        return rank_parts(found, marked=all(trace.windows.marked for trace in self.traces.values()), notes=(*self.notes, *said))

    def stragglers(self) -> Stragglers:
        """Which rank makes the others wait, by how much, and in which part of its step: the one that waits least itself."""
        found = stragglers(self.breakdown())
        if found.phase == "compute":
            found = dataclasses.replace(found, details=slower(self.traces, found.ranks))
        return found

    def arrivals(self) -> Arrivals:
        """The same collective on every rank: who came last, how long the others waited there, and how far apart they came."""
        return arrivals(
            {rank: Seen(columns=one.columns, kinds=one.kinds, windows=one.windows, host=one.host) for rank, one in self.traces.items()}
        )

    def explain(self) -> Explanation:
        """What the traces say together in words, and what they cannot say."""
        return explain_ranks(self.breakdown(), self.stragglers(), {rank: trace.explain() for rank, trace in self.traces.items()})

    plot = display.plot_method("ranks")

    @property
    def table(self) -> display.Table:
        """One row per rank."""
        rows = [
            [rank, trace.path.name, f"{len(trace.columns):,}", len(trace.steps), units.percent(trace.slowdown)]
            for rank, trace in self.traces.items()
        ]
        columns = ("rank", "file", "events", "steps", "slowed down by")
        return display.Table(columns=columns, rows=rows, title="Traces of a run", note="; ".join(self.notes) or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row per rank."""
        rows = [
            {"rank": rank, "path": str(trace.path), "events": len(trace.columns), "steps": len(trace.steps), "slowdown": trace.slowdown}
            for rank, trace in self.traces.items()
        ]
        return display.frame(rows, columns=("rank", "path", "events", "steps", "slowdown"))

    def __repr__(self) -> str:
        return f"TraceSet(ranks={list(self.ranks)})"


def files(where: Path) -> list[Path]:
    """The traces in a directory, or in the folder for them of a run directory; a file is itself.

    Raises:
        TraceError: the directory has none.
    """
    if not where.is_dir():
        return [where]
    found = traces_in(where) or (traces_in(where / TRACES) if (where / TRACES).is_dir() else [])
    if not found:
        raise TraceError(f"{where} has no traces: such files end in {' or '.join(NAMES[:2])}")
    return found


def _said(notes: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Notes that all ranks have as they are; others with their ranks."""
    of: dict[str, list[int]] = {}
    for rank, each in notes.items():
        for note in dict.fromkeys(each):
            of.setdefault(note, []).append(rank)
    found = []
    for note, ranks in of.items():
        whose = "" if len(ranks) == len(notes) else f"rank {ranks[0]}: " if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}: "
        found.append(f"{whose}{note}")
    return tuple(found)


def rank_of(trace: Trace) -> int | None:
    """What the file says, or its name."""
    if trace.rank is not None:
        return trace.rank
    told = RANK.search(trace.path.name)
    return int(told[1]) if told else None
