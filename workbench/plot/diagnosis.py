"""What a step is made of, and what each remedy would make of it: predicted, and measured where it was proved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench import units
from workbench.diagnosis.diagnosis import Diagnosis
from workbench.diagnosis.model import KNOBS
from workbench.diagnosis.parts import PARTS, Parts
from workbench.diagnosis.proof import Proof
from workbench.diagnosis.remedy import Remedy
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK
from workbench.plot.colors import PARTS as COLORS
from workbench.plot.stack import WIDTH, Bar, height, legend, lines_of, mark, stacked, wrapped
from workbench.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
