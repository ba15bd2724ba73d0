"""Pictures of a search for a regression: `what_changed` between two runs, and `bisection` of a range of commits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import WIDTH, draw_bars, end_labels, height, ink, mark, prepared, rows, wrapped
from workbench.core.display.colors import LINE
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.bisection import Bisection
from workbench.diagnosis.analysis.what_changed import QUANTITIES, WhatChanged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THICK = 0.55
AS_RECORDED = "B over A, as recorded"


def what_changed(result: WhatChanged, ax: Axes | None = None) -> Axes:
    """Run A with some of B's differences, divided by run A, with intervals: a bar per set of differences that was tried, below that of the
    two runs as recorded (pale). The dotted line is no change.

    Raises:
        ValueError: there is no ratio to draw.
    """
    found = {AS_RECORDED: result.ratio}
    found |= {f"{wrapped(' + '.join(changes))}{' ←' * (changes == result.owner)}": seen for changes, seen in result.ratios.items()}
    return _ratios(found, f"{QUANTITIES[result.of]} over that of run A", ax, pale=1)


def bisection(result: Bisection, ax: Axes | None = None) -> Axes:
    """The tried commits divided by the good one, oldest first, with intervals. The dotted line is no change.

    Raises:
        ValueError: no commit was measured.
    """
    found = {
        f"{wrapped(commit.subject or commit.id[:10])}{' ←' * (commit.id in result.first_bad)}": seen
        for commit in result.commits
        if (seen := result.ratio(commit.id))
    }
    return _ratios(found, f"{QUANTITIES[result.of]} over that of the good commit", ax)


def _ratios(found: dict[str, Interval], what: str, ax: Axes | None, pale: int = 0) -> Axes:
    if not found or not all(math.isfinite(seen.mid) for seen in found.values()):
        raise ValueError(f"there is no {what} to draw: nothing was measured")
    labels, values = list(found), list(found.values())
    ax = prepared(ax, WIDTH, height(labels))
    rows(ax, labels)
    for bar in draw_bars(ax, [seen.mid for seen in values], None, LINE, height=_THICK).patches[:pale]:
        bar.set_alpha(0.35)
    for place, seen in enumerate(values):
        mark(ax, place, seen, measured=True)
    ax.axvline(1, color=ink(ax), linestyle=":", linewidth=1.2)
    end_labels(ax, [max(seen.mid, seen.high) for seen in values], [units.times(seen.mid) for seen in values])
    ax.set_xlabel(what)
    return ax
