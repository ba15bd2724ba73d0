"""Sequences of a trace: what follows what again and again, and the gaps between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.plot.colors import PHASES
from workbench.plot.stack import Bar, bar_chart, shortened
from workbench.traces.sequences import Sequences, brief, folded
from workbench.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST, LINES = 8, 4
"""Sequences that are drawn, and lines of a label."""
COLORS = {"the work itself": PHASES["forward"], "gaps between": PHASES["data_wait"]}


def sequences(result: Trace | Sequences, ax: Axes | None = None) -> Axes:
    """A bar per sequence: the time of its kernels or operators, and of the gaps between them.

    Args:
        result: a trace, or its sequences.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: no sequence comes again.
    """
    found = result.sequences() if isinstance(result, Trace) else result
    if not found.rows:
        raise ValueError(f"{found!r} has nothing to draw: {'; '.join(found.notes)}")
    bars = [Bar(label=_label(one.names), pieces=[one.seconds, one.gaps], end=f"{one.count:,} times") for one in found.rows[:MOST]]
    return bar_chart(ax, bars, "all occurrences", COLORS)


def _label(names: tuple[str, ...]) -> str:
    lines = [brief(name) for name in folded(names)]
    lines = lines if len(lines) <= LINES else [*lines[: LINES - 1], f"… {len(lines) - LINES + 1} more"]
    return "\n".join(map(shortened, lines))
