"""Draws the steps of a trace in parts, those of several ranks side by side, and which thread or stream works when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.brief import short
from workbench.core.display.axes import WIDTH, Bar, bar_chart, ink, legend, prepared, rows, scale_of
from workbench.core.display.colors import PARTS as OF_PARTS
from workbench.core.display.colors import PHASES, SERIES, TRACED
from workbench.traces.analysis.breakdown import ON_CPU, ON_DEVICE, PARTS, Breakdown
from workbench.traces.analysis.event_kinds import KINDS
from workbench.traces.analysis.intervals import Spans, covered, union
from workbench.traces.analysis.stragglers import RankParts
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet
from workbench.traces.analysis.windows import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLORS = {
    "data_wait": PHASES["data_wait"],
    "h2d": PHASES["h2d"],
    "compute": OF_PARTS["compute"],
    "communication": OF_PARTS["communication"],
    "host": OF_PARTS["host"],
    "idle": OF_PARTS["stalls"],
    "other": PHASES["other"],
}
"""Part of a traced step → colour; the same as everywhere else."""
_DEVICE = {"kernel": COLORS["compute"], "communication": COLORS["communication"], "h2d": COLORS["h2d"], "copy": TRACED["copy"]}
_HOST = {
    "data_wait": COLORS["data_wait"],
    "backward": PHASES["backward"],
    "optimizer": PHASES["optimizer"],
    "host_communication": COLORS["communication"],
    "collective_call": COLORS["communication"],
    "runtime": TRACED["launch"],
    "wait": COLORS["idle"],
}
RANGE = SERIES[3]
"""Colour of a user's ranges, which have no meaning of their own: that of nothing else, so that they stand out."""
MOST_BARS = 24
"""Steps that get a bar of their own."""
BINS = 1_200
"""Pieces that the time of a picture is cut into: more than it has dots."""
MOST_LANES = 16
"""Threads and streams that are drawn: the busiest."""


def kind_colors(device: bool) -> dict[str, str]:
    """Kind of event → colour, for pictures that show single events.

    Args:
        device: does a device compute? Then operators are pale, as they only launch.
    """
    operator = COLORS["host"] if device else COLORS["compute"]
    return {kind: {**_DEVICE, **_HOST, "operator": operator, "range": RANGE}.get(kind, COLORS["other"]) for kind in KINDS}


def breakdown(result: Trace | Breakdown, ax: Axes | None = None) -> Axes:
    """Each step in parts that add up to it: one stacked bar per step, and their mean.

    Raises:
        ValueError: it has no step with a length.
    """
    answer = result.breakdown() if isinstance(result, Trace) else result
    steps = [step for step in answer.steps if step.total > 0]
    if not steps:
        raise ValueError(f"{answer!r} has no step with a length to draw: trace some with a schedule, wb.trace(step, loader)")
    bars = [
        Bar(label=f"step {step.step}", pieces=[getattr(step, part) for part in PARTS], end=units.seconds(step.total))
        for step in steps[:MOST_BARS]
    ]
    pieces = [sum(getattr(step, part) for step in steps) / len(steps) for part in PARTS]
    bars.append(Bar(label=f"mean of {len(steps)}", pieces=pieces, end=units.seconds(sum(pieces))))
    return bar_chart(ax, bars, "traced step", COLORS)


def timeline(
    trace: Trace, ax: Axes | None = None, *, step: int | None = None, start: float | None = None, end: float | None = None
) -> Axes:
    """When each thread or stream worked: one lane each, the busiest first, in the colours of the parts.

    The time is cut into BINS pieces; the height of a colour in a lane is the share of a piece in which that part runs there, so that a
    picture of 400,000 events takes hardly longer than one of 400. To zoom into it: `widgets.TraceExplorer(trace)`.

    Args:
        trace: the trace that is drawn.
        ax: the Axes to draw into; None makes a figure.
        step: the number of a step to draw alone.
        start: where the picture begins, in seconds from the first event; None = at the first step, or at the beginning of `step`.
        end: where it ends; None = with the last step, or with `step`.

    Raises:
        ValueError: the end is before the start, there is no such step, or several traces were given.
    """
    steps = _steps(trace, step)
    begin = steps[0].start if start is None else start
    until = steps[-1].start + steps[-1].seconds if end is None else end
    if not begin < until:
        raise ValueError(
            f"timeline(start={begin}, end={until}): it has to end after it begins; the trace lasts {units.seconds(trace.seconds)}"
        )
    edges = np.linspace(begin * 1e9, until * 1e9, BINS + 1).astype(np.int64)
    lanes = _busiest(trace, int(edges[0]), int(edges[-1]))
    ax = prepared(ax, WIDTH, 1.1 + 0.42 * max(1, len(lanes)))
    scale, unit = scale_of(until - begin)
    places = edges / 1e9 * scale
    drawn: dict[str, object] = {}
    for row, lane in enumerate(lanes):
        base = np.full(BINS, row + 0.36)
        for part, share in _shares(trace, lane, edges).items():
            if share.any():
                top = base - 0.72 * share
                area = ax.fill_between(
                    np.repeat(places, 2)[1:-1],
                    np.repeat(base, 2),
                    np.repeat(top, 2),
                    facecolor=COLORS[part],
                    edgecolor=ink(ax),
                    linewidth=0.3,
                    label=part,
                )
                drawn.setdefault(part, area)
                base = top
    for number in steps:
        if begin <= number.start <= until:
            ax.axvline(number.start * scale, color=ink(ax), linewidth=0.6, linestyle=":", zorder=0)
    rows(ax, [short(trace.columns.lanes[lane].name, 24) for lane in lanes])
    ax.set_xlim(float(places[0]), float(places[-1]))
    ax.set_xlabel(f"time since the first event of the trace ({unit})")
    if drawn:
        legend(ax, [drawn[part] for part in PARTS if part in drawn])  # type: ignore[misc]
    return ax


def _steps(trace: Trace, number: int | None) -> Sequence[Step]:
    """All steps, or the chosen one."""
    if not isinstance(trace, Trace):
        raise ValueError(f"timeline({trace!r:.60}): one trace is drawn, such as traces[0]; widgets.TraceExplorer(traces) shows several")
    steps = [step for step in trace.steps if number is None or step.index == number]
    if not steps:
        raise ValueError(f"timeline(step={number!r}): the trace has the steps {', '.join(str(step.index) for step in trace.steps[:12])}")
    return steps


def _busiest(trace: Trace, begin: int, end: int) -> list[int]:
    """Lanes with an event between, those with most first, at most MOST_LANES."""
    columns = trace.columns
    layers = [kind for _, kinds in _layers(trace) for kind in kinds if kind != "step"]
    seen = (columns.start < end) & (columns.end > begin) & trace.kinds.where(*layers)
    counts = np.bincount(columns.lane[seen], minlength=len(columns.lanes))
    order = np.argsort(-counts, kind="stable")[:MOST_LANES]
    return [int(lane) for lane in order if counts[lane]]


def _layers(trace: Trace) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Parts and the kinds of events in them; the host's operators have a colour of their own where a device computes."""
    return ON_DEVICE if trace.kinds.device else ON_CPU


def _shares(trace: Trace, lane: int, edges: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Part → share of each piece of time in which it runs on a lane and none before it does."""
    columns = trace.columns
    here = np.flatnonzero((columns.lane == lane) & (columns.start < edges[-1]) & (columns.end > edges[0]))
    spans, codes = np.stack([columns.start[here], columns.end[here]], axis=1), trace.kinds.codes[here]
    windows = np.stack([edges[:-1], edges[1:]], axis=1)
    lengths = np.maximum(windows[:, 1] - windows[:, 0], 1)
    cover: Spans = np.empty((0, 2), dtype=np.int64)
    below = np.zeros(BINS, dtype=np.int64)
    shares: dict[str, NDArray[np.float64]] = {}
    for part, layer in _layers(trace):
        cover = union(cover, spans[np.isin(codes, [KINDS.index(kind) for kind in layer if kind != "step"])])
        upto = covered(cover, windows)
        shares[part] = (upto - below) / lengths
        below = upto
    return shares


MOST_RANKS = 32
"""Ranks that get a bar."""


def ranks(result: TraceSet | RankParts, ax: Axes | None = None) -> Axes:
    """The mean step of each rank in parts that add up to it, one stacked bar per rank; stragglers are named beside theirs.

    Raises:
        ValueError: there is no step that all ranks have.
    """
    parts = result.breakdown() if isinstance(result, TraceSet) else result
    slow = result.stragglers().ranks if isinstance(result, TraceSet) else ()
    if not parts.steps:
        raise ValueError(f"{parts!r} has no step that all ranks have: trace the same ones on each, wb.trace(spec, ranks='all')")
    bars = [
        Bar(
            label=f"rank {rank}" + (" (straggler)" if rank in slow else ""),
            pieces=[parts.mean(rank, part) for part in PARTS],
            end=units.seconds(parts.mean(rank)),
        )
        for rank in parts.ranks[:MOST_RANKS]
    ]
    return bar_chart(ax, bars, "traced step", COLORS)
