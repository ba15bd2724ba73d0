"""TraceSet: the traces of several ranks of one run, who makes the others wait, and on which operators."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.display import table as display
from workbench.traces.analysis.arrivals import Arrivals, Seen, arrivals
from workbench.traces.analysis.breakdown import PARTS
from workbench.traces.analysis.captured import SLOWED
from workbench.traces.analysis.explanation import CLEAR, Explanation
from workbench.traces.analysis.loading import files
from workbench.traces.analysis.operators import short_name
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.stragglers import RankParts, Stragglers, rank_parts, stragglers
from workbench.traces.analysis.trace import Trace

NAMED = 3
"""Operators that are named at most."""
ALIKE = 0.1
"""Calls per step that differ by less than that fraction are as many."""
EXCHANGE = ("communication", "host_communication", "collective_call")
"""Kinds that are no computing."""
TRIED = {
    "data_wait": "the same number of workers and equally fast storage on every rank, and samples that are divided evenly",
    "h2d": "pinned memory, and the same slot or link for every device",
    "compute": "equal shapes on every rank (lengths of sequences, sizes of pictures), and a device or core that nothing else uses",
    "host": "look for what only this rank does: logging, checkpoints, metrics, another program on its cores",
    "idle": "look for what only this rank does between its operators: files, locks, sleep",
    "other": "look at what only this rank does outside of its steps",
}
"""Part that is longer → what is commonly tried."""


def slower(traces: Mapping[int, Trace], slow: Sequence[int]) -> tuple[str, ...]:
    """Operators, or kernels, that take longest in comparison on slow ranks, in words; nothing where no operator does."""
    device = all(trace.kinds.device for trace in traces.values())
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    calls: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, trace in traces.items():
        exchange = {label.name for label in trace.columns.labels if trace.kind_of(label) in EXCHANGE}
        for name, (own, count) in trace.per_step("kernel" if device else "operator").items():
            if name not in exchange:  # waiting in them is what a slow rank does least, and none of its own work
                seconds[name][rank], calls[name][rank] = own, count
    others = [rank for rank in traces if rank not in slow]

    def more(values: Mapping[int, float]) -> float:
        return float(np.mean([values.get(r, 0.0) for r in slow]) - np.median([values.get(r, 0.0) for r in others]))

    longer = sorted(((more(of), name) for name, of in seconds.items()), reverse=True)
    whole = sum(extra for extra, _ in longer if extra > 0)
    texts = []
    for extra, name in longer[:NAMED]:
        if extra <= CLEAR * whole:
            break
        usual = float(np.median([calls[name].get(rank, 0.0) for rank in others]))
        often = "called as often" if abs(more(calls[name])) <= ALIKE * usual else f"{usual:.3g} calls a step on the others"
        texts.append(f"{short_name(name)} +{units.seconds(extra)} ({often})")
    return tuple(texts)


def explain_ranks(parts: RankParts, straggler: Stragglers, each: Mapping[int, Explanation], met: Arrivals) -> Explanation:
    """Explain a straggler, or else the trace of the slowest rank. Its time in collectives is split into waiting and exchange."""
    whole = float(parts.values().sum())
    shares = {part: float(parts.values(part).sum()) / whole for part in PARTS} if whole else {}
    cannot = tuple(
        dict.fromkeys(limit for explained in each.values() for limit in explained.cannot if "waiting for a slower rank" not in limit)
    )
    if straggler.ranks and straggler.share >= CLEAR:
        tried = TRIED[straggler.phase] if straggler.phase else "the same work on every rank"
        return Explanation(
            verdict="straggler",
            why=f"{straggler.verdict}; {straggler.why}",
            next=f"Commonly tried: {tried}. wb.diagnose proves what it gains",
            cannot=cannot,
            shares=shares,
        )
    slowest = max(parts.ranks, key=lambda rank: parts.mean(rank) if parts.steps else 0.0)
    own, next_ = each[slowest], each[slowest].next
    waiting = [f"Straggler: {straggler.verdict}"] if len(parts.ranks) > 1 else []
    if own.verdict == "communication-bound" and met.waiting > met.exchanging:
        each_way = f"the exchange takes {units.seconds(met.exchanging)}, and waiting for the last rank {units.seconds(met.waiting)}"
        waiting.insert(0, f"of all collectives {each_way}")
        next_ = f"Commonly tried: {TRIED['compute']}; fewer bytes would not help. arrivals() says which rank comes last in which collective"
    return Explanation(
        verdict=own.verdict,
        why="; ".join([f"rank {slowest}: {own.why}" if len(parts.ranks) > 1 else own.why, *waiting]),
        next=next_,
        cannot=cannot,
        shares=shares,
    )


RANK = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TraceSet(display.Shown, Mapping[int, Trace]):
    """Traces of the ranks of one run, by rank. Get one from `TraceSet.load(directory)`."""

    traces: Mapping[int, Trace]
    notes: tuple[str, ...] = ()
    """What is missing."""

    @classmethod
    def load(
        cls,
        where: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        cache: bool = False,
        steps: str | None = None,
        communication: str | Sequence[str] = (),
    ) -> TraceSet:
        """Read the traces of a directory, or of the given paths.

        A file's rank is read from its content, or else from the number after "rank" in its name.

        Args:
            where: a directory, or paths of files.
            cache: keep what was read in a file, as `Trace.load` does.
            steps: pattern of the steps' annotations, as in `Trace.load`.
            communication: patterns of further communication kernels, as in `Trace.load`.

        Raises:
            TraceError: there is no trace, a file cannot be read or has no rank, or two files have the same rank.
        """
        paths = files(Path(where)) if isinstance(where, str | os.PathLike) else [Path(name) for name in where]
        if not paths:
            raise TraceError(
                f"no traces: {where!s} names none. A trace is a .pt.trace.json or .pt.trace.json.gz that torch.profiler exported"
            )
        return cls.of(Trace.load(path, cache=cache, steps=steps, communication=communication) for path in paths)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> TraceSet:
        """Make a set from traces that are already loaded.

        Raises:
            TraceError: there is no trace, a trace has no rank, or two have the same.
        """
        by_rank: dict[int, Trace] = {}
        given = list(traces)
        for trace in given:
            rank = rank_of(trace) if len(given) > 1 else rank_of(trace) or 0
            if rank is None:
                raise TraceError(
                    f"{trace.path} does not say of which rank it is (no distributedInfo, and no rank in its name): load it alone, or name "
                    f"it rank0_{trace.path.name}"
                )
            if rank in by_rank:
                raise TraceError(
                    f"two traces of rank {rank}: {by_rank[rank].path.name} and {trace.path.name}. Name the files of one capture: "
                    "TraceSet.load([path, path])"
                )
            by_rank[rank] = trace
        if not by_rank:
            raise TraceError("no traces: at least one is needed")
        sizes = {trace.world_size for trace in by_rank.values() if trace.world_size}
        notes = []
        if len(sizes) > 1:
            notes.append(f"the files are of jobs with {', '.join(map(str, sorted(sizes)))} ranks: are they of one run?")
        elif missing := sorted(set(range(max(sizes, default=0))) - set(by_rank)):
            shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            notes.append(f"{len(missing)} of {max(sizes)} ranks have no trace here: {shown}")
        return cls(traces=dict(sorted(by_rank.items())), notes=tuple(notes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a trace."""
        return tuple(self.traces)

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job, if the files have it."""
        return next((trace.world_size for trace in self.traces.values() if trace.world_size), None)

    @property
    def slowdown(self) -> float | None:
        """How much longer a traced step takes, on the rank where it is most; None if it was not measured."""
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
        """The steps that all ranks have, divided into parts that exclude each other and add up to the step, side by side."""
        breakdowns = {rank: trace.breakdown() for rank, trace in self.traces.items()}
        most = max(self.traces, key=lambda rank: self.traces[rank].slowdown or 0.0)  # the cost of the profiler is named once
        remarks = _merged_notes(
            {
                rank: [note for note in breakdown.notes if rank == most or not note.startswith(SLOWED)]
                for rank, breakdown in breakdowns.items()
            }
        )
        return rank_parts(breakdowns, marked=all(trace.windows.marked for trace in self.traces.values()), notes=(*self.notes, *remarks))

    def stragglers(self) -> Stragglers:
        """Which rank makes the others wait, by how much, and in which part of its step: the rank that waits least itself."""
        result = stragglers(self.breakdown())
        if result.phase == "compute":
            result = dataclasses.replace(result, details=slower(self.traces, result.ranks))
        return result

    def arrivals(self) -> Arrivals:
        """Each collective on all ranks: which rank arrived last, how long the others waited, and how far apart they arrived."""
        return arrivals(
            {
                rank: Seen(columns=trace.columns, kinds=trace.kinds, windows=trace.windows, host=trace.host)
                for rank, trace in self.traces.items()
            }
        )

    def explain(self) -> Explanation:
        """Explain in words what the traces show together, and what they cannot show."""
        each = {rank: trace.explain() for rank, trace in self.traces.items()}
        return explain_ranks(self.breakdown(), self.stragglers(), each, self.arrivals())

    plot = display.plot_method("ranks")

    @property
    def table(self) -> display.Table:
        """One row per rank."""
        rows = [
            [rank, trace.path.name, f"{len(trace.columns):,}", len(trace.steps), units.percent(trace.slowdown)]
            for rank, trace in self.traces.items()
        ]
        columns = ("rank", "file", "events", "steps", "slowed down by")
        return display.Table(columns=columns, rows=rows, title="Traces of a run", note=display.notes(self.notes) or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row per rank."""
        rows = [
            {"rank": rank, "path": str(trace.path), "events": len(trace.columns), "steps": len(trace.steps), "slowdown": trace.slowdown}
            for rank, trace in self.traces.items()
        ]
        return display.frame(rows, columns=("rank", "path", "events", "steps", "slowdown"))

    def __repr__(self) -> str:
        return f"TraceSet(ranks={list(self.ranks)})"


def _merged_notes(notes: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Notes that all ranks have stay as they are; others name their ranks."""
    of: dict[str, list[int]] = {}
    for rank, each in notes.items():
        for note in dict.fromkeys(each):
            of.setdefault(note, []).append(rank)
    texts = []
    for note, ranks in of.items():
        whose = "" if len(ranks) == len(notes) else f"rank {ranks[0]}: " if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}: "
        texts.append(f"{whose}{note}")
    return tuple(texts)


def rank_of(trace: Trace) -> int | None:
    """The rank from the file, or from its name."""
    if trace.rank is not None:
        return trace.rank
    match = RANK.search(trace.path.name)
    return int(match[1]) if match else None
