"""Pictures of a diagnosis: `diagnosis`, `ladder` and `proof` of remedies, `loader_curve` and `unprepared` of the loader.

Predictions are hatched or hollow, measurements solid.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from workbench.core import units
from workbench.core.display import axes
from workbench.core.display.axes import (
    WIDTH,
    Bar,
    draw_bars,
    end_labels,
    halo,
    height,
    ink,
    legend,
    lines_of,
    mark,
    marker_look,
    prepared,
    rows,
    scale_of,
    stacked,
    wrapped,
)
from workbench.core.display.colors import LINE, OUTSIDE
from workbench.core.display.colors import PARTS as COLORS
from workbench.core.statistics import Interval
from workbench.core.vocabulary import PARTS
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.loader_model import APART, LoaderCurve, LoaderModel
from workbench.diagnosis.analysis.proof import Ladder, Proof
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.step_model import KNOBS, Parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import Container


UNKNOWN = "parts unknown"
"""The piece of a bar whose parts the model does not predict: its length is known, what it is made of is not."""
MIN_SHARE = 0.01
"""Fraction of the step that a part may take at the least for the step to be drawn without it. Chosen; a matter of the picture."""


def diagnosis(result: Diagnosis, ax: Axes | None = None) -> Axes:
    """The step as it is, and with each remedy alone: one stacked bar each, in seconds per step. A remedy that changes the batch is drawn
    for the present number of samples, so that a bar half as long means twice the throughput. Without remedies: the step as it is, and
    without each part that takes time.

    A hollow diamond is a prediction with its interval; a solid one was measured by a proof. `ax.figure.savefig("diagnosis.png")`, with the
    Axes that are returned, saves the picture.

    Raises:
        ValueError: the step has no length.
    """
    parts = result.parts
    if not parts.step > 0:
        raise ValueError(f"{result!r} has no step to draw: not a second of it is known")
    proofs = {proof.remedy.name: proof for proof in result.proofs}
    bars = [Bar(label="as it is", pieces=[*_pieces(parts), 0.0], end=_end(parts))]
    bars += [_bar(result, remedy, parts, proofs.get(remedy.name)) for remedy in result.remedies]
    without = {} if result.remedies else _without(result)
    bars += [_bar_without(part, seconds, parts) for part, seconds in without.items()]
    colors = {name: color for i, (name, color) in enumerate({**COLORS, UNKNOWN: OUTSIDE}.items()) if any(bar.pieces[i] for bar in bars)}
    columns = [i for i, name in enumerate([*PARTS, UNKNOWN]) if name in colors]
    bars = [replace(bar, pieces=[bar.pieces[i] for i in columns]) for bar in bars]
    keys = [*colors, *(["predicted"] if bars[1:] else []), *(["measured"] if proofs else [])]
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) + 0.2 * (lines_of(keys) - 1))
    kind = "observed" if result.evidence.observed else "measured"
    length = "time for the samples of one step" if any("micro_batch" in remedy.change for remedy in result.remedies) else "step time"
    change = "with one remedy" if result.remedies else "without one part"
    what = f"{length}, {kind}{f'; hatched: predicted {change}' if bars[1:] else ''}"
    scale = stacked(ax, bars, what, colors)
    ax.set_xlabel(ax.get_xlabel(), loc="right")  # it is longer than the axis
    handles = {handle.get_label(): handle for handle in ax.containers}
    for place, remedy in enumerate(result.remedies, 1):
        proof = proofs.get(remedy.name)
        shift = 0.0 if proof is None else 0.14  # of a row: both marks beside each other
        handles["predicted"] = mark(ax, place - shift, _seconds(parts, remedy.interval), scale, label="predicted")
        if proof is not None:
            handles["measured"] = mark(ax, place + shift, _seconds(parts, proof.measured), scale, measured=True, label="measured")
    for place, seconds in enumerate(without.values(), 1):
        handles["predicted"] = mark(ax, place, seconds, scale, label="predicted")
    legend(ax, [handles[key] for key in keys])
    return ax


def _without(result: Diagnosis) -> dict[str, Interval]:
    """Part → seconds of the step if that part took no time, the shortest first; parts that take next to nothing are left out."""
    step = result.parts.step
    shares = sorted(result.judgement.shares.items(), key=lambda item: -item[1].mid)
    return {
        part: Interval(low=step * (1 - saved.high), mid=step * (1 - saved.mid), high=step * (1 - saved.low))
        for part, saved in shares
        if saved.high >= MIN_SHARE
    }


def _bar_without(part: str, seconds: Interval, now: Parts) -> Bar:
    """The bar of the step without a part."""
    others = [max(0.0, now.seconds(other)) * (other != part) for other in PARTS]
    shown = [piece / sum(others) * seconds.mid for piece in others] if sum(others) > 0 else [0.0] * len(PARTS)
    return Bar(
        label=f"without {part}",
        pieces=[*shown, seconds.mid - sum(shown)],
        end=f"up to {units.times(now.step / seconds.mid)}" if seconds.mid > 0 else "",
        reach=seconds.high,
        predicted=True,
        marked=(seconds.low, seconds.high),
    )


def _bar(result: Diagnosis, remedy: Remedy, now: Parts, proof: Proof | None) -> Bar:
    """The bar of the step with one remedy, long enough for its marks."""
    marks = [_seconds(now, speedup) for speedup in (remedy.interval, *([] if proof is None else [proof.measured]))]
    return Bar(
        label=wrapped(remedy.name),
        pieces=_predicted_pieces(result, remedy, now),
        end=_gain(remedy, proof),
        reach=max(seconds.high for seconds in marks),
        predicted=True,
        marked=(min(seconds.low for seconds in marks), max(seconds.high for seconds in marks)),
    )


def _pieces(parts: Parts) -> list[float]:
    return [max(0.0, parts.seconds(part)) for part in PARTS]


def _predicted_pieces(result: Diagnosis, remedy: Remedy, now: Parts) -> list[float]:
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


def _seconds(parts: Parts, speedup: Interval) -> Interval:
    """What a speedup makes of the step: its ends change places. One that has none is drawn without an interval."""
    if math.isinf(speedup.low):
        speedup = Interval(low=speedup.mid, mid=speedup.mid, high=speedup.mid)
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
    """An attempt as it is drawn. Samples per second."""

    label: str
    before: float
    after: float
    kept: bool
    end: str
    predicted: Interval | None = None


def ladder(result: Ladder, ax: Axes | None = None) -> Axes:
    """Throughput after each attempt: the pale part was there before, the full part is what the remedy added, and a hollow diamond is the
    prediction. An empty frame is a remedy that did not help and was dropped.

    Raises:
        ValueError: there is no throughput to draw.
    """
    if math.isnan(result.start):
        raise ValueError(f"{result!r} has no throughput to draw: the one at the start is not known")
    rungs = list(_rows(result))
    ax = prepared(ax, WIDTH, height([row.label for row in rungs]))
    lasting = [min(row.before, row.after) if row.kept else row.after for row in rungs]
    rows(ax, [row.label for row in rungs])
    before = draw_bars(ax, lasting, None, LINE, label="before", pale=True, height=_THICK)
    added = [row.after - base if row.kept else 0.0 for row, base in zip(rungs, lasting, strict=True)]
    handles: list[Container] = [before, draw_bars(ax, added, lasting, LINE, label="added, measured", height=_THICK)]
    reaches = []
    for place, row in enumerate(rungs):
        if not row.kept:
            before.patches[place].set(facecolor="none", linestyle=":", linewidth=1.0)
        reach = row.after
        if row.predicted is not None:
            drawn = mark(ax, place, row.predicted, label="predicted")
            handles = [*handles[:2], drawn]
            reach = max(value for value in (row.after, row.predicted.mid, row.predicted.high) if math.isfinite(value))
        reaches.append(reach)
    end_labels(ax, reaches, [row.end for row in rungs])
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
    """Predicted and measured speedup, one above the other, each with its interval; the line is a speedup of 1. A remedy that could not be
    run has no measured bar, and one whose gain nobody predicted no predicted bar.
    """
    labels = ["predicted", "measured"]
    ax = prepared(ax, WIDTH, height(labels))
    intervals = [result.predicted, result.measured]
    rows(ax, labels)
    failed = math.isnan(result.measured.mid)  # it did not even run
    known = [0.0 if math.isnan(interval.mid) else interval.mid for interval in intervals]
    draw_bars(ax, known, None, LINE, predicted=[True, False], height=_THICK)
    for place, interval in enumerate(intervals):
        if known[place]:
            mark(ax, place, interval, measured=bool(place))
    ax.axvline(1, color=ink(ax), linestyle=":", linewidth=1.2)
    reaches = [max((value for value in (interval.mid, interval.high) if math.isfinite(value)), default=0.0) for interval in intervals]
    end_labels(ax, reaches, [result.remedy.gain, "failed" if failed else f"{units.times(result.measured.mid)}: {result.word}"])
    ax.set_xlabel(f"throughput with {result.remedy.name} over that without")
    return ax


TERMS = {"in turn": "load, then train", "workers": "workers", "cores": "cores", "hand-over": "hand-over", "compute": "training"}
"""What limits the step, in few words, by the `binds` of a CurvePoint."""


def loader_curve(result: LoaderCurve, ax: Axes | None = None) -> Axes:
    """Seconds per step (blue, circles), and per batch of the loader alone (orange, triangles), against the number of workers: dashed lines
    with hollow markers are predicted, full markers measured.

    The dotted line is the step on cached batches, which no number of workers can beat. The text at the top says what limits the step; a
    ring marks the recommended number of workers. The text below says why a measured point may differ from the predicted one.

    Raises:
        ValueError: the curve has no point.
    """
    points = result.points
    if not points:
        raise ValueError("a curve of no points: predict it for some numbers of workers first")
    ax = prepared(ax, WIDTH, 3.8)
    counts = [point.num_workers for point in points]
    seen = [value for p in points for value in (p.measured_step, p.measured_loader) if value is not None]
    highest = max(value for value in (*(p.step for p in points), *(p.loader for p in points), *seen) if math.isfinite(value))
    scale, unit = scale_of(highest)
    for name, color, marker, predicted, measured in (
        ("step", LINE, "o", [p.step for p in points], [p.measured_step for p in points]),
        ("loader alone, per batch", COLORS["data_wait"], "^", [p.loader for p in points], [p.measured_loader for p in points]),
    ):
        label = f"{name}, predicted" if any(value is not None for value in measured) else name
        ax.plot(
            counts,
            [scale * v for v in predicted],
            linewidth=1.8,
            marker=marker,
            markersize=5.5,
            label=label,
            **marker_look(ax, color, predicted=True),
        )
        there = [(count, scale * value) for count, value in zip(counts, measured, strict=True) if value is not None]
        if there:
            ax.plot(
                *zip(*there, strict=True),
                color=color,
                linestyle="none",
                marker=marker,
                markersize=7.5,
                path_effects=halo(ax),
                zorder=4,
                label=f"{name.split(',')[0]}, measured",
            )
    ax.axhline(scale * result.compute, color=ink(ax), linestyle=":", linewidth=1.4, label="step without loading")
    ax.set_xticks(counts)
    ax.set_xlim(counts[0] - 0.5, counts[-1] + 0.5)
    ax.set_ylim(0, 1.4 * scale * highest)  # space for the words at the top
    ax.grid(axis="y", color=ink(ax), alpha=0.18, linewidth=0.8)
    _terms(ax, result)
    _recommended(ax, result, scale)
    ax.set_xlabel("num_workers of each rank" + f"\n{APART}" * bool(seen))
    ax.set_ylabel(f"predicted{' and measured' if seen else ''} ({unit})")
    legend(ax, [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")])
    return ax


def _terms(ax: Axes, result: LoaderCurve) -> None:
    """What limits the step, above the numbers of workers for which it does."""
    for number, (term, group) in enumerate(itertools.groupby(result.points, key=lambda point: point.binds)):
        counts = [point.num_workers for point in group]
        left, right = counts[0] - 0.5, counts[-1] + 0.5
        ax.axvspan(left, right, color=ink(ax), alpha=0.1 if number % 2 else 0.04, linewidth=0)
        words = TERMS.get(term, term)
        ax.annotate(
            words.replace(", ", ",\n") if len(counts) == 1 else words,
            ((left + right) / 2, 1),
            (0, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8.5,
            color=ink(ax),
        )


def _recommended(ax: Axes, result: LoaderCurve, scale: float) -> None:
    """A ring around the step that is recommended, a square around the one there is now, each with its word."""
    for point in result.points:
        if words := result.marks(point.num_workers):
            here = (point.num_workers, scale * point.step)
            shape = "o" if "recommended" in words else "s"
            ax.plot(*here, marker=shape, markersize=14, markerfacecolor="none", markeredgecolor=ink(ax), linestyle="none")
            ax.annotate(", ".join(words), here, (9, 7), textcoords="offset points", fontsize=9, color=ink(ax), path_effects=halo(ax))


LEVELS = (1.1, 1.5, 2, 3, 5, 7, 10, 20)
CLAIM = 7
"""The claim that is often heard: "not preprocessing offline costs 7 times". Its contour is the bold one."""
_POINTS = 60


def unprepared(raw: LoaderModel, prepared: LoaderModel, *, num_workers: int = 0, ax: Axes | None = None) -> Axes:
    """Predicted speedup of a step by preparing its data beforehand, against the time to train on a batch and the time to make one.

    The contours are `raw.step / prepared.step` by the formulas of `LoaderModel`, both with `num_workers` workers. The diamond is the
    measured step. Only time is compared: prepared data take more space, and their augmentation is frozen.

    Args:
        raw: model of the loader that does all the work in each epoch.
        prepared: model of a loader that reads prepared data.
        num_workers: number of workers of both loaders.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: making a batch takes no time, so there is nothing to prepare.
    """
    cost = raw.cpu + raw.blocked
    if not cost > 0 or not raw.compute > 0:
        raise ValueError(f"making a batch takes {cost} s and training on it {raw.compute} s: both have to be measured, and above 0")
    ax = axes.prepared(ax, 7.0, 4.2)
    computes = np.geomspace(min(1e-3, raw.compute / 4), max(0.2, 4 * raw.compute), _POINTS)
    costs = np.geomspace(min(1e-3, cost / 4), max(0.4, 4 * cost), _POINTS)
    ratio = np.array([[_speedup(raw, prepared, num_workers, compute, made / cost) for compute in computes] for made in costs])
    levels = [level for level in LEVELS if ratio.min() < level < ratio.max()]
    ax.set_xscale("log")  # before the labels: the gap of a line for its label is measured on the screen
    ax.set_yscale("log")
    lines = ax.contour(
        1e3 * computes,
        1e3 * costs,
        ratio,
        levels=levels,
        colors=LINE,
        linestyles="dashed",
        linewidths=[2.6 if level == CLAIM else 1.2 for level in levels],
    )
    labels = ax.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9, colors=ink(ax))
    for label in labels:
        label.set(path_effects=halo(ax, 4), rotation=0)
    ax.plot([1e3 * raw.compute], [1e3 * cost], marker="D", markersize=8, color=ink(ax), linestyle="none", label="measured here")
    ax.set_xlabel("training on a batch (ms)")
    ax.set_ylabel("making a batch (ms on one core)")
    workers = units.several(num_workers, "worker") if num_workers else "no workers"
    ax.set_title(f"predicted speedup by data prepared beforehand, {workers}", fontsize=10, color=ink(ax), loc="left")
    ax.legend(loc="lower right", frameon=False, labelcolor=ink(ax), fontsize=9)
    return ax


def _speedup(raw: LoaderModel, prepared: LoaderModel, num_workers: int, compute: float, times: float) -> float:
    """At one point of the plane: another compute time, and making a batch from raw data `times` as expensive as measured."""
    busy = 1.0 if raw.compute_cpu is None else raw.compute_cpu / raw.compute
    worker = None if raw.worker_cpu is None else raw.worker_cpu + (times - 1) * raw.cpu
    slow = dataclasses.replace(
        raw,
        cpu=raw.cpu * times,
        blocked=raw.blocked * times,
        worker_cpu=None if worker is None else max(worker, 0.0),
        compute=compute,
        compute_cpu=compute * busy,
    )
    fast = dataclasses.replace(prepared, compute=compute, compute_cpu=compute * busy)
    return slow.step(num_workers, persistent_workers=True) / fast.step(num_workers, persistent_workers=True)
