"""What a step is made of, and what each remedy would make of it: predicted, and measured where it was proved.

What remedies brought: `ladder`, the throughput after one on top of another; `proof`, one of them, predicted beside measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import PALE, WIDTH, Bar, ends, height, legend, lines_of, mark, prepared, rows, stacked, wrapped
from workbench.core.display.colors import INK, LINE
from workbench.core.display.colors import PARTS as COLORS
from workbench.core.statistics import Interval
from workbench.core.vocabulary import PARTS
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.parts import Parts
from workbench.diagnosis.analysis.proof import Ladder, Proof
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.step_model import KNOBS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import Container


UNKNOWN = "not taken apart"
"""The piece of a bar whose parts the model does not predict: its length is known, what it is made of is not."""


def diagnosis(result: Diagnosis, ax: Axes | None = None) -> Axes:
    """The step as it is, and with each remedy alone: a stacked bar each, in seconds per step; a remedy that changes the batch is drawn
    per as many samples as the step has now, so that a bar half as long is twice the throughput.

    A hollow diamond is a prediction with its interval; a full one is what a proof measured.

    Raises:
        ValueError: the step has no length.
    """
    parts = result.parts
    if not parts.step > 0:
        raise ValueError(f"{result!r} has no step to draw: not a second of it is known")
    proofs = {proof.remedy.name: proof for proof in result.proofs}
    bars = [Bar(label="as it is", pieces=[*_pieces(parts), 0.0], end=_end(parts))]
    bars += [_bar(result, remedy, parts, proofs.get(remedy.name)) for remedy in result.remedies]
    colors = {name: color for i, (name, color) in enumerate({**COLORS, UNKNOWN: INK}.items()) if any(bar.pieces[i] for bar in bars)}
    columns = [i for i, name in enumerate([*PARTS, UNKNOWN]) if name in colors]
    bars = [replace(bar, pieces=[bar.pieces[i] for i in columns]) for bar in bars]
    keys = [*colors, *(["predicted"] if result.remedies else []), *(["measured"] if proofs else [])]
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) + 0.2 * (lines_of(keys) - 1))
    kind = "observed" if result.evidence.observed else "measured"
    what = f"time for the samples of one step: as it is, {kind}{'; with one remedy, predicted' if result.remedies else ''}"
    scale = stacked(ax, bars, what, colors)
    handles = {handle.get_label(): handle for handle in ax.containers}
    for place, remedy in enumerate(result.remedies, 1):
        proof = proofs.get(remedy.name)
        shift = 0.0 if proof is None else 0.14  # of a row: both marks beside each other
        handles["predicted"] = mark(ax, place - shift, _seconds(parts, _promise(remedy)), scale, label="predicted")
        if proof is not None:
            handles["measured"] = mark(ax, place + shift, _seconds(parts, proof.measured), scale, measured=True, label="measured")
    legend(ax, [handles[key] for key in keys])
    return ax


def _bar(result: Diagnosis, remedy: Remedy, now: Parts, proof: Proof | None) -> Bar:
    """The step with one remedy, and room for its marks."""
    marks = [_promise(remedy), *([] if proof is None else [proof.measured])]
    return Bar(
        label=wrapped(remedy.name),
        pieces=_promised(result, remedy, now),
        end=_gain(remedy, proof),
        reach=max(_seconds(now, one).high for one in marks),
        pale=True,
    )


def _pieces(parts: Parts) -> list[float]:
    return [max(0.0, parts.seconds(part)) for part in PARTS]


def _promised(result: Diagnosis, remedy: Remedy, now: Parts) -> list[float]:
    """Pieces of the step with a remedy, per as many samples as now; they add up to what its speedup says."""
    length = now.step / remedy.speedup
    if not remedy.change or not set(remedy.change) <= set(KNOBS):
        return [*([0.0] * len(PARTS)), length]
    try:
        pieces = _pieces(result.model.parts(**remedy.change))
    except ValueError:  # it is predicted from its arm alone
        pieces = []
    if not sum(pieces) > 0:
        return [*([0.0] * len(PARTS)), length]
    return [*(piece / sum(pieces) * length for piece in pieces), 0.0]


def _promise(remedy: Remedy) -> Interval:
    return Interval(low=remedy.low, mid=remedy.speedup, high=remedy.high)


def _seconds(parts: Parts, speedup: Interval) -> Interval:
    """What a speedup makes of the step: its ends change places."""
    return Interval(low=parts.step / speedup.high, mid=parts.step / speedup.mid, high=parts.step / speedup.low)


def _end(parts: Parts) -> str:
    rate = "" if math.isnan(parts.samples_per_sec) else f"  ·  {units.rate(parts.samples_per_sec)}"
    return f"{units.seconds(parts.step)}{rate}"


def _gain(remedy: Remedy, proof: Proof | None) -> str:
    predicted = f"{'up to ' if remedy.ceiling else ''}{units.times(remedy.speedup)}"
    return predicted if proof is None else f"{predicted}  ·  measured {units.times(proof.measured.mid)}"


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
