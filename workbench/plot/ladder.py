"""What remedies brought: `ladder`, the throughput after one on top of another; `proof`, one of them, predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench import units
from workbench.diagnosis.proof import Ladder, Proof
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE
from workbench.plot.stack import PALE, WIDTH, ends, height, legend, mark, rows, wrapped
from workbench.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import Container

_THICK = 0.5  # of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A rung as it is drawn. Samples per second."""

    label: str
    before: float
    after: float
    kept: bool
    end: str
    predicted: Interval | None = None


def ladder(result: Ladder, ax: Axes | None = None) -> Axes:
    """Throughput after each rung: pale what was there before, solid what the remedy added, a hollow diamond where it was predicted to lead.
    A remedy that did not help and was dropped is an empty frame.

    Raises:
        ValueError: there is no throughput to draw.
    """
    if math.isnan(result.start):
        raise ValueError(f"{result!r} has no throughput to draw: the one at the start is not known")
    found = list(_rows(result))
    places = range(len(found))
    ax = prepared(ax, WIDTH, height([row.label for row in found]))
    lasting = [min(row.before, row.after) if row.kept else row.after for row in found]
    before = ax.barh(places, lasting, height=_THICK, color=LINE, alpha=PALE, label="before")
    added = [row.after - base if row.kept else 0.0 for row, base in zip(found, lasting, strict=True)]
    handles: list[Container] = [before, ax.barh(places, added, left=lasting, height=_THICK, color=LINE, label="added, measured")]
    reaches = []
    for place, row in enumerate(found):
        if not row.kept:
            before.patches[place].set(facecolor="none", edgecolor=INK, linestyle="--", alpha=1.0)
        reach = row.after
        if row.predicted is not None:
            drawn = mark(ax, place, row.predicted, label="predicted")
            handles = [*handles[:2], drawn]
            reach = max(value for value in (row.after, row.predicted.mid, row.predicted.high) if math.isfinite(value))
        reaches.append(reach)
    ends(ax, reaches, [row.end for row in found])
    rows(ax, [row.label for row in found])
    ax.set_xlabel("throughput (samples/s)")
    if result.rungs:
        legend(ax, handles)
    return ax


def _rows(result: Ladder) -> Iterator[_Row]:
    now = result.start
    yield _Row(label="start", before=now, after=now, kept=True, end=units.rate(now))
    for rung in result.rungs:
        proof, before = rung.proof, now if math.isnan(rung.proof.baseline) else rung.proof.baseline
        failed = math.isnan(proof.measured.mid)  # it did not even run
        after = 0.0 if failed else before * proof.measured.mid
        if rung.kept:
            now = after = after if math.isnan(rung.samples_per_sec) else rung.samples_per_sec
        measured = units.times(proof.measured.mid)
        yield _Row(
            label=f"{wrapped(proof.remedy.name)}\nagainst {rung.verdict}",
            before=before,
            after=after,
            kept=rung.kept,
            end=f"{measured}  ·  {units.rate(after)}" if rung.kept else f"{'failed' if failed else measured}: dropped",
            predicted=Interval(**{end: before * getattr(proof.predicted, end) for end in ("low", "mid", "high")}),
        )


def proof(result: Proof, ax: Axes | None = None) -> Axes:
    """Predicted and measured speedup, one above the other, each with its interval; the line is a step that the remedy does nothing for."""
    labels = ["predicted", "measured"]
    ax = prepared(ax, WIDTH, height(labels))
    found = [result.predicted, result.measured]
    drawn = ax.barh(range(2), [one.mid for one in found], height=_THICK, color=LINE)
    drawn.patches[0].set_alpha(PALE)
    for place, one in enumerate(found):
        mark(ax, place, one, measured=bool(place))
    ax.axvline(1, color=INK, linestyle=":", linewidth=1.2)
    reaches = [max(value for value in (one.mid, one.high) if math.isfinite(value)) for one in found]
    ends(ax, reaches, [result.remedy.gain, f"{units.times(result.measured.mid)}: {result.word}"])
    rows(ax, labels)
    ax.set_xlabel(f"throughput with {result.remedy.name} over that without")
    return ax
