"""Builds the tree of a model's modules from a trace, with the time of a step that each takes, forward and backward."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.details import Details
from workbench.traces.analysis.event_kinds import DEVICE, Kinds, callers
from workbench.traces.analysis.intervals import Numbers, Spans, covered, mean_seconds, union
from workbench.traces.analysis.nesting import Merged, Nesting, merge_calls, name_numbers, nest_events
from workbench.traces.analysis.operators import CALLERS, short_name

MODULE = re.compile(r"nn\.Module: ")
"""What torch writes before the class of a module and a number that tells modules of one class apart, with_stack=True."""
SHOWN = 30
"""Rows of a table; a frame has all."""
NONE = (
    "the trace names no modules: profile with_stack=True (wb.trace(step, loader, stacks=True)), or put torch.profiler.record_function "
    "around what you want to see"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """One module, or one range of record_function; mean seconds per step."""

    path: str
    """Those around it and itself, as "Net_0/Block_1/Linear_3"."""
    depth: int
    calls: float
    """Per step."""
    self_seconds: float
    """On the host, without the modules that it calls."""
    total_seconds: float
    """With them."""
    backward_seconds: float | None
    """On the host, of the backward pass of all that was called in it; None where the file does not join the two."""
    device_seconds: float | None
    """Work of a device that it and its backward pass launched; None where no device worked."""

    @property
    def name(self) -> str:
        """The name without the modules around it."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules(display.Shown, JsonDataclass):
    """Modules as a tree, each before those that it calls, the longest first. Get them from `trace.modules()`."""

    rows: tuple[ModuleTime, ...]
    source: str
    """"module" (of with_stack), "range" (of record_function), or "" where there is neither."""
    step_seconds: float
    """Mean length of a step on the host, for shares."""
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """The first 30, indented."""
        rows = [
            [
                "  " * row.depth + short_name(row.name),
                units.count(row.calls),
                units.seconds(row.self_seconds),
                units.seconds(row.total_seconds),
                units.percent(row.total_seconds / self.step_seconds if self.step_seconds else None),
                units.seconds(row.backward_seconds),
                units.seconds(row.device_seconds),
            ]
            for row in self.rows[:SHOWN]
        ]
        more = [f"{len(self.rows) - SHOWN} more in to_frame()"] if len(self.rows) > SHOWN else []
        columns = (self.source or "module", "calls", "self", "total", "share", "backward", "device")
        return display.Table(
            columns=columns, rows=rows, title="Modules, seconds per step", note=display.notes([*more, *self.notes]) or None
        )

    to_frame = display.frame_method("rows", ModuleTime)

    plot = display.plot_method("modules")

    def __repr__(self) -> str:
        return f"Modules({len(self.rows)} of {self.source or 'nothing'})"


def modules(columns: Columns, kinds: Kinds, steps: Spans, details: Callable[[], Details]) -> Modules:
    """The tree, from the marks of modules or, where there are none, from ranges of record_function.

    A node of the backward graph belongs to the module that called the operator it differentiates: both carry a sequence number, and of
    several operators with one number the last made the node (so does Kineto join them: libkineto, `fwdbwd`). Work of a device belongs to
    the module in which it was launched, or to that of the node that launched it.

    Args:
        details: returns those of the events, for sequence numbers; called only where there is a tree.
    """
    source, mark, names = _marks(columns, kinds)
    count = max(1, len(steps))
    mean = mean_seconds(steps)
    if not source:
        return Modules(rows=(), source="", step_seconds=mean, notes=(NONE,))
    cover = union(steps)
    tree = nest_events(columns, mark)
    event_names, codes = name_numbers(columns)
    nodes = merge_calls(tree, codes[columns.label[tree.events]])
    total, own = tree.within(cover)
    calls = nodes.summed((covered(cover, tree.spans) > 0).astype(np.int64))
    owner, backward, notes = _owners(columns, kinds, mark, tree, nodes, details())
    behind = _behind(columns, kinds, owner, backward, cover, len(nodes.name))
    work = _work(columns, kinds, owner, cover, len(nodes.name))
    totals, selfs = nodes.summed(total), nodes.summed(own)
    behinds = nodes.rolled(behind) if backward.any() else None
    works = nodes.rolled(work) if kinds.device else None
    rows, path = [], ["" for _ in nodes.name]
    for node, depth in nodes.walk(totals):
        around = f"{path[nodes.parent[node]]}/" if nodes.parent[node] >= 0 else ""
        path[node] = around + names(event_names[nodes.name[node]])
        if totals[node]:
            rows.append(
                ModuleTime(
                    path=path[node],
                    depth=depth,
                    calls=float(calls[node]) / count,
                    self_seconds=float(selfs[node]) / 1e9 / count,
                    total_seconds=float(totals[node]) / 1e9 / count,
                    backward_seconds=None if behinds is None else float(behinds[node]) / 1e9 / count,
                    device_seconds=None if works is None else float(works[node]) / 1e9 / count,
                )
            )
    if source == "range":
        notes.insert(0, "ranges of record_function, as the trace names no modules (with_stack=True would)")
    return Modules(rows=tuple(rows), source=source, step_seconds=mean, notes=tuple(notes))


def _marks(columns: Columns, kinds: Kinds) -> tuple[str, NDArray[np.bool_], Any]:
    """Which events are modules, or else ranges, and how their names are shortened."""
    of_module = columns.where(lambda label: bool(MODULE.match(label.name))) & kinds.where("range")
    if of_module.any():
        return "module", of_module, lambda name: MODULE.sub("", name).replace("/", "∕")
    ranges = columns.where(lambda label: label.category == "user_annotation") & kinds.where("range")
    return "range" if ranges.any() else "", ranges, lambda name: name.replace("/", "∕")


def _owners(
    columns: Columns, kinds: Kinds, mark: NDArray[np.bool_], tree: Nesting, nodes: Merged, details: Details
) -> tuple[Numbers, NDArray[np.bool_], list[str]]:
    """Node of each event of the host, -1 where it has none; and which events of the backward pass could be given to one."""
    inner = nest_events(columns, kinds.where(*CALLERS) & (mark | ~kinds.where("range")))
    node_of = np.full(len(columns), -1, dtype=np.int64)
    node_of[tree.events] = nodes.node
    of_backward = kinds.where("backward")
    nearest = inner.nearest(mark[inner.events])
    node = np.full(len(columns), -1, dtype=np.int64)
    node[inner.events] = np.where(nearest >= 0, node_of[inner.events[nearest]], -1)
    behind = inner.nearest(of_backward[inner.events])
    forward = inner.events[(behind < 0) & kinds.where("operator")[inner.events] & (details.sequence[inner.events] >= 0)]
    forward = forward[np.argsort(columns.start[forward], kind="stable")[::-1]]
    keys, last = np.unique(details.sequence[forward], return_index=True)
    given = np.zeros(len(columns), dtype=np.bool_)
    if not of_backward.any():
        return node, given, []
    if not len(keys):
        return node, given, [*details.notes, "the file does not join operators and their backward pass: it counts for no module"]
    backward = np.flatnonzero(of_backward)
    place = np.minimum(np.searchsorted(keys, details.sequence[backward]), len(keys) - 1)
    joined = (keys[place] == details.sequence[backward]) & (details.sequence[backward] >= 0)
    node[backward] = np.where(joined, node[forward[last]][place], -1)
    given[backward] = node[backward] >= 0
    inside = behind >= 0
    node[inner.events[inside]] = node[inner.events[behind[inside]]]
    return node, given, []


def _behind(columns: Columns, kinds: Kinds, owner: Numbers, given: NDArray[np.bool_], cover: Spans, count: int) -> Numbers:
    """Nanoseconds of the backward pass by node."""
    sums = np.zeros(count, dtype=np.int64)
    events = np.flatnonzero(given)
    np.add.at(sums, owner[events], covered(cover, columns.spans[events]))
    return sums


def _work(columns: Columns, kinds: Kinds, owner: Numbers, cover: Spans, count: int) -> Numbers:
    """Nanoseconds of the device's work by the node that launched it, of launches inside the steps."""
    sums = np.zeros(count, dtype=np.int64)
    work = np.flatnonzero(kinds.where(*DEVICE))
    call = callers(columns, kinds, work)
    linked = call >= 0
    work, call = work[linked], call[linked]
    node = np.where(covered(cover, columns.spans[call]) > 0, owner[call], -1)
    np.add.at(sums, node[node >= 0], columns.lengths[work[node >= 0]])
    return sums
