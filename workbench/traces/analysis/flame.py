"""Merges the calls of a thread by their path, with the time of each: the data of a flame graph."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.event_kinds import Kinds
from workbench.traces.analysis.intervals import Numbers, Spans, covered, mean_seconds, union
from workbench.traces.analysis.modules import MODULE
from workbench.traces.analysis.nesting import Merged, Nesting, merge_calls, name_numbers, nest_events
from workbench.traces.analysis.operators import CALLERS, SHOWN, short_name


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameNode:
    """All calls of one name under the same callers; mean seconds per step."""

    name: str
    depth: int
    parent: int
    """Position of its caller among the nodes; -1 = none."""
    start: float
    """Seconds left of it in the picture: callees lie within their caller, the longest first."""
    seconds: float
    """With what it calls."""
    self_seconds: float
    """Without."""
    calls: float
    """Per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flame(display.Shown, JsonDataclass):
    """The calls of a thread. Get one from `trace.flame()`."""

    nodes: tuple[FlameNode, ...]
    """Each before those that it calls."""
    thread: str
    threads: tuple[str, ...]
    """All threads that call something within the steps, the busiest first."""
    step_seconds: float
    """Mean length of a step on the host; what no node covers of it, this thread spends outside of every recorded call."""
    notes: tuple[str, ...] = ()

    def share(self, node: FlameNode) -> float:
        """Fraction 0..1 of the step."""
        return node.seconds / self.step_seconds if self.step_seconds else float("nan")

    def path(self, node: FlameNode) -> tuple[str, ...]:
        """Names from the outermost caller to the node."""
        around = () if node.parent < 0 else self.path(self.nodes[node.parent])
        return (*around, node.name)

    @property
    def table(self) -> display.Table:
        """The 15 nodes with the most self time."""
        most = sorted(self.nodes, key=lambda node: -node.self_seconds)[:SHOWN]
        rows = [
            [
                short_name(" › ".join(self.path(node)[-3:])),
                units.seconds(node.self_seconds),
                units.percent(node.self_seconds / self.step_seconds if self.step_seconds else None),
                units.seconds(node.seconds),
                units.count(node.calls),
            ]
            for node in most
        ]
        note = display.notes([f"{len(self.nodes)} nodes of {self.thread or 'no thread'}, those with the most self time", *self.notes])
        columns = ("call", "self", "share of the step", "total", "calls")
        return display.Table(columns=columns, rows=rows, title="Calls by their path, seconds per step", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row per node; seconds per step."""
        rows = [{**dataclasses.asdict(node), "path": "/".join(self.path(node))} for node in self.nodes]
        return display.frame(rows, columns=[*(field.name for field in dataclasses.fields(FlameNode)), "path"])

    plot = display.plot_method("flame")

    def __repr__(self) -> str:
        return f"Flame({len(self.nodes)} nodes of {self.thread!r})"


def flame(columns: Columns, kinds: Kinds, steps: Spans, thread: str | None, stacks: bool) -> Flame:
    """Merge the calls of a thread by the path of their names, as far as they lie within the steps.

    Args:
        thread: by its name; None = the one that marks the steps, else the busiest.
        stacks: with Python's frames, where they were recorded; without them, modules and record_function ranges are still there.

    Raises:
        ValueError: no such thread.
    """
    chosen = kinds.where(*CALLERS)
    frames = np.array([label.category == "python_function" and not MODULE.match(label.name) for label in columns.labels] or [False])
    of_python = frames[columns.label]
    if not stacks:
        chosen &= ~of_python
    cover = union(steps)
    lanes = _lanes(columns, kinds, np.flatnonzero(chosen), cover)
    names = [columns.lanes[lane].name for lane in lanes]
    if thread is not None and thread not in names:
        raise ValueError(f"flame(thread={thread!r}): no such thread; there are {', '.join(map(repr, names)) or 'none'}")
    mean = mean_seconds(steps)
    notes = [] if of_python.any() or not stacks else ["Python's frames were not recorded: profile with_stack=True"]
    if not lanes:
        notes.append("the trace has no calls of the host within a step")
        return Flame(nodes=(), thread="", threads=(), step_seconds=mean, notes=tuple(notes))
    lane = lanes[names.index(thread)] if thread is not None else _main(columns, kinds, lanes)
    calls = nest_events(columns, chosen & (columns.lane == lane))
    call_names, codes = name_numbers(columns)
    nodes = _nodes(calls, merge_calls(calls, codes[columns.label[calls.events]]), call_names, cover, max(1, len(steps)))
    return Flame(nodes=nodes, thread=columns.lanes[lane].name, threads=tuple(names), step_seconds=mean, notes=tuple(notes))


def _lanes(columns: Columns, kinds: Kinds, events: Numbers, cover: Spans) -> list[int]:
    """Threads with a call inside the steps, the busiest first."""
    time = covered(cover, columns.spans[events])
    sums = np.bincount(columns.lane[events], weights=time, minlength=len(columns.lanes))
    return [int(lane) for lane in np.argsort(-sums, kind="stable") if sums[lane] > 0]


def _main(columns: Columns, kinds: Kinds, lanes: list[int]) -> int:
    """The thread that marks the steps, or else the busiest."""
    marks = columns.lane[kinds.where("step")]
    most = int(np.bincount(marks).argmax()) if len(marks) else -1
    return most if most in lanes else lanes[0]


def _nodes(calls: Nesting, tree: Merged, names: list[str], cover: Spans, steps: int) -> tuple[FlameNode, ...]:
    total, own = calls.within(cover)
    totals, selfs = tree.summed(total), tree.summed(own)
    counts = tree.summed((total > 0).astype(np.int64))
    place: dict[int, int] = {}
    filled: dict[int, int] = {}
    rows: list[FlameNode] = []
    for node, depth in tree.walk(totals):
        parent = int(tree.parent[node])
        if not totals[node]:
            continue
        start = filled.get(parent, 0)
        filled[parent] = start + int(totals[node])
        filled[node] = start
        place[node] = len(rows)
        rows.append(
            FlameNode(
                name=names[tree.name[node]],
                depth=depth,
                parent=place.get(parent, -1),
                start=start / 1e9 / steps,
                seconds=float(totals[node]) / 1e9 / steps,
                self_seconds=float(selfs[node]) / 1e9 / steps,
                calls=float(counts[node]) / steps,
            )
        )
    return tuple(rows)
