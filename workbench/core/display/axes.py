"""Draws on matplotlib Axes in the workbench's style. Every picture takes its marks from here, so that all speak one language.

* **Measured** is solid: filled areas, solid lines, filled markers.
* **Predicted** is hatched or hollow: hatched areas, dashed lines, hollow markers. A legend, a row or the axis says which of the two it is.
* A **limit** of a device is a solid red line with its name; a **reference** (perfect scaling, no change) is dotted.
* **Pale** is context: what was there before, or works beside. A ring points at something.
* Areas have an outline, and marks a halo, so that they read on every colour and in grey.
* A picture has a ground of its own, matplotlib's `figure.facecolor`; text is dark on a light ground and light on a dark one.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core import units
from workbench.core.display.colors import INK, LIMIT, contrast, mixed, text_on
from workbench.core.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer, Container, ErrorbarContainer
    from matplotlib.patches import Patch
    from numpy.typing import NDArray


def prepared(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the Axes of a new figure of `width` × `height` inches, in our style.

    A new figure is one of pyplot's, because those are what a notebook shows at the end of a cell.
    """
    if ax is None:
        from matplotlib import pyplot

        figure, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
        figure.set_facecolor(_solid(figure.get_facecolor()) or "#ffffff")
    return style_axes(ax)


def style_axes(ax: Axes) -> Axes:
    """Style an Axes: without a frame but for the two axes, in ink that reads on its ground."""
    color = ink(ax)
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set_color(color)
        spine.set_linewidth(0.8)
        spine.set_visible(side in ("left", "bottom"))
    ax.tick_params(axis="both", which="both", colors=color, width=0.8)
    for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
        label.set_color(color)
    return ax


def _solid(color: Any) -> str | None:
    """The colour as "#rrggbb"; None if one sees through it."""
    from matplotlib.colors import to_hex, to_rgba

    return to_hex(color) if to_rgba(color)[3] > 0.5 else None


def ground(ax: Axes) -> str:
    """The colour that a picture is drawn on, "#rrggbb": that of the Axes or the figure, white where both are transparent."""
    return _solid(ax.get_facecolor()) or _solid(ax.figure.get_facecolor()) or "#ffffff"


def tone(ax: Axes) -> str:
    """Is the ground "light" or "dark"?"""
    return max(INK, key=lambda name: contrast(INK[name], ground(ax)))


def ink(ax: Axes) -> str:
    """The colour of text and axes that reads on the ground."""
    return INK[tone(ax)]


HATCH = "///"
"""Of an area that is predicted."""
DASHES = (0, (4.5, 2))
"""Of a line that is predicted."""


def area(ax: Axes, color: str, *, predicted: bool = False, pale: bool = False) -> dict[str, Any]:
    """How an area is filled: solid where measured, hatched where predicted, pale where it is only context; always with an outline."""
    filled = mixed(color, ground(ax), 0.3 if pale else 0.5) if predicted or pale else color
    return {"facecolor": filled, "edgecolor": ink(ax), "linewidth": 0.6, "hatch": HATCH if predicted else None}


def marker_look(ax: Axes, color: str, *, predicted: bool = False) -> dict[str, Any]:
    """How markers and their line look: solid and filled where measured, dashed and hollow where predicted."""
    return {"color": color, "linestyle": DASHES if predicted else "-", "markerfacecolor": ground(ax) if predicted else color}


def band(ax: Axes, places: Any, low: Any, high: Any, color: str, *, predicted: bool = True, label: str = "_band") -> Artist:
    """The range around a line: hatched where predicted, pale where it is the range of a measurement."""
    look = area(ax, color, predicted=predicted, pale=True) | {"edgecolor": mixed(color, ground(ax), 0.6), "linewidth": 0.0}
    shown: Artist = ax.fill_between(places, low, high, label=label, **look)
    return shown


def note_beside(ax: Axes, x: float, text: str, *, left: bool, **look: Any) -> None:
    """A dotted line over all of the height at `x`, and at its top a text, on its left or its right."""
    ax.axvline(x, color=ink(ax), linestyle=":", linewidth=1.2, label="_note")
    offset, side = ((-6, -2), "right") if left else ((6, -2), "left")
    where: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": side, "va": "top"}
    ax.annotate(text, (x, 1), offset, **where, color=ink(ax), **look)


def halo(ax: Axes, width: float = 2.6) -> list[Any]:
    """Path effects that set a mark or text off from what is below it."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=width, foreground=ground(ax))]


def ring(ax: Axes, place: float, height: float, words: str, *, size: float = 8.5) -> None:
    """A ring around a point, and words about it on the side with more space."""
    ax.plot(
        [place],
        [height],
        marker="o",
        markersize=8,
        markerfacecolor="none",
        markeredgecolor=ink(ax),
        markeredgewidth=1.4,
        path_effects=halo(ax),
    )
    left, right = ax.get_xlim()
    late = place > (left + right) / 2
    ax.annotate(
        words,
        (place, height),
        (-9 if late else 9, 3),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        fontsize=size,
        color=ink(ax),
        path_effects=halo(ax),
    )


def limit(ax: Axes, place: float, label: str) -> Artist:
    """The most that a device has, as an upright line across the rows."""
    line: Artist = ax.axvline(place, color=LIMIT, linewidth=1.8, label=label, path_effects=halo(ax), zorder=3)
    return line


def kinds(ax: Axes, *, of_lines: bool = False) -> list[Artist]:
    """What a legend says where a picture has both: solid is measured, hatched or dashed is predicted."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if of_lines:
        look: dict[str, Any] = {"color": ink(ax), "markersize": 5}
        return [
            Line2D([], [], marker="o", linestyle="none", label="measured", **look),
            Line2D([], [], linestyle=DASHES, label="predicted", **look),
        ]
    return [Patch(label=word, **area(ax, ink(ax), predicted=word == "predicted")) for word in ("measured", "predicted")]


def draw_bars(
    ax: Axes,
    widths: Sequence[float],
    starts: Sequence[float] | None,
    color: str | Sequence[str],
    *,
    label: str = "",
    predicted: Sequence[bool] | bool = False,
    pale: bool = False,
    height: float = 0.62,
    rows: Sequence[float] | None = None,
) -> BarContainer:
    """A row of horizontal bars in our style, one per place from 0 on; those without a length leave no trace. Predicted ones are hatched."""
    colors = [color] * len(widths) if isinstance(color, str) else list(color)
    hatched = [predicted] * len(widths) if isinstance(predicted, bool) else list(predicted)
    drawn = ax.barh(range(len(widths)) if rows is None else rows, widths, left=starts, height=height, label=label)
    for patch, own, guess in zip(drawn.patches, colors, hatched, strict=True):
        patch.set(**area(ax, own, predicted=guess, pale=pale))
        if not patch.get_width():
            patch.set_linewidth(0)
    return drawn


WIDTH = 7.6
"""Inches of a picture: the width of a notebook's column."""
_WIDE_ENOUGH = 0.06  # of the axis: a share is written into a piece from here on
_LABEL = 26  # letters in a line of a label
_LINE, _HANDLE = 84, 6  # letters in a line of a legend; what a patch of colour takes, in letters
_LETTER = 0.083  # inches: the width of a letter of 10 points


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar, from left to right."""

    label: str
    """Text at its left."""
    pieces: Sequence[float]
    """Seconds, one per colour."""
    end: str
    """Text at its right."""
    reach: float = 0.0
    """Seconds that something else in its row reaches to; the text goes behind it."""
    predicted: bool = False
    """Hatched."""
    marked: tuple[float, float] | None = None
    """Seconds between which a mark is drawn over it; shares are written beside."""

    @property
    def seconds(self) -> float:
        return sum(self.pieces)


def scale_of(longest: float) -> tuple[float, str]:
    """The factor from seconds to the unit of an axis that reaches to `longest` seconds, and that unit."""
    return (1e6, "µs") if longest < 1e-3 else (1e3, "ms") if longest < 1 else (1.0, "s")


def scale_of_bytes(most: float) -> tuple[float, str]:
    """Bytes of the unit that suits an axis that reaches to `most` bytes, and its name."""
    return next(((float(size), unit) for size, unit in _BYTES if most >= size), (1.0, "B"))


_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def stacked(ax: Axes, shown: Sequence[Bar], what: str, colors: Mapping[str, str]) -> float:
    """Draw bars from top to bottom: one container per colour, in their order.

    Returns:
        The factor from seconds to places on the axis.
    """
    scale, unit = scale_of(max(bar.seconds for bar in shown))
    reaches, texts = [max(bar.seconds, bar.reach) * scale for bar in shown], [bar.end for bar in shown]
    rows(ax, [bar.label for bar in shown])
    wide = _WIDE_ENOUGH * _room(ax, reaches, texts)
    starts = [0.0] * len(shown)
    for column, (name, color) in enumerate(colors.items()):
        widths = [bar.pieces[column] * scale for bar in shown]
        drawn = draw_bars(ax, widths, starts, color, label=name, predicted=[bar.predicted for bar in shown])
        for place, (start, width, bar) in enumerate(zip(starts, widths, shown, strict=True)):
            left, right = _unmarked(start, start + width, bar.marked, scale, 0.2 * wide)
            if wide <= right - left and width < bar.seconds * scale:  # a bar of one piece needs no share
                share_in(ax, drawn.patches[place], (left + right) / 2, place, units.percent(bar.pieces[column] / bar.seconds))
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    end_labels(ax, reaches, texts)
    ax.set_xlabel(f"{what} ({unit})")
    return scale


def _unmarked(start: float, end: float, marked: tuple[float, float] | None, scale: float, gap: float) -> tuple[float, float]:
    """The longer side of a piece beside a mark, with a gap to it; the whole piece if it has none."""
    if marked is None:
        return start, end
    left, right = marked[0] * scale - gap, marked[1] * scale + gap
    return max((start, min(end, left)), (max(start, right), end), key=lambda side: side[1] - side[0])


def share_in(ax: Axes, patch: Patch, place: float, row: float, text: str) -> None:
    """A share, written into a piece of a bar; on a patch of its own where the piece is hatched."""
    color = _solid(patch.get_facecolor()) or ground(ax)
    behind = {"facecolor": color, "edgecolor": "none", "pad": 1.0} if patch.get_hatch() else None
    ax.text(place, row, text, ha="center", va="center", fontsize=8.5, color=text_on(color), bbox=behind, zorder=5)


def bar_chart(ax: Axes | None, shown: Sequence[Bar], what: str, colors: Mapping[str, str], *, row: float = 1.0, more: float = 0.0) -> Axes:
    """What `stacked` draws, with its legend, as a whole picture: in a new figure, unless Axes are given, whose height is `row` times the
    usual one and `more` inches.
    """
    ax = prepared(ax, WIDTH, height([bar.label for bar in shown]) * row + more)
    stacked(ax, shown, what, colors)
    both = len({bar.predicted for bar in shown}) == 2
    legend(ax, [*ax.containers, *(kinds(ax) if both else [])])
    return ax


def curves_over_time(
    ax: Axes | None, times: Sequence[float], curves: Sequence[tuple[str, Sequence[float] | NDArray[np.float64]]], colors: Sequence[str]
) -> tuple[Axes, str]:
    """Step curves over the time since the first of `times`, edges of intervals in seconds, with a legend.

    Returns:
        The Axes, and the unit of its time axis.
    """
    ax = prepared(ax, WIDTH, 3.2)
    since = np.array(times) - times[0]
    scale, unit = scale_of(float(since[-1]) or 1.0)
    places = since * scale
    drawn = [
        ax.stairs(heights, places, baseline=None, color=color, linewidth=1.1, label=label)
        for (label, heights), color in zip(curves, colors, strict=False)
    ]
    ax.set_xlim(0, float(places[-1]) or 1.0)
    ax.set_ylim(bottom=0)
    legend(ax, drawn)
    return ax, unit


def end_labels(ax: Axes, reaches: Sequence[float], texts: Sequence[str]) -> None:
    """Write a text at the right of each row, and lengthen the axis until all of them fit. The rows must have their labels."""
    for place, (reach, text) in enumerate(zip(reaches, texts, strict=True)):
        ax.annotate(text, (reach, place), (7, 0), textcoords="offset points", va="center", color=ink(ax))
    ax.margins(x=0)
    ax.set_xlim(0, _room(ax, reaches, texts))


def _room(ax: Axes, reaches: Sequence[float], texts: Sequence[str]) -> float:
    """Length of an axis on which a text fits behind each reach."""
    return max(reach / share_beside(ax, text) for reach, text in zip(reaches, texts, strict=True)) or 1.0


def share_beside(ax: Axes, text: str) -> float:
    """Share of the axis that is left beside a text at its right end."""
    labels = [_inches(label.get_text()) for label in ax.get_yticklabels()]
    place = ax.get_subplotspec()
    columns = place.get_gridspec().ncols if place else 1
    width = max(1.0, ax.figure.get_figwidth() / columns - max(labels, default=0.0) - 0.35)  # type: ignore[union-attr]
    return max(0.25, 1 - (_inches(text) + 0.16) / width)


def _inches(text: str) -> float:
    """About the width of a text of 10 points."""
    return _LETTER * max(map(len, text.splitlines()), default=0)


def rows(ax: Axes, labels: Sequence[str]) -> None:
    """One row per label from top to bottom, with nothing but the label at its left."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def legend(ax: Axes, handles: Sequence[Container | Artist], *, markerscale: float = 1.0) -> None:
    """What the colours mean, above the picture: in lines that are read from left to right."""
    columns = -(-len(handles) // lines_of([str(handle.get_label()) for handle in handles]))
    ordered = [handle for column in range(columns) for handle in handles[column::columns]]  # matplotlib fills column by column
    ax.legend(
        handles=[_key(handle) for handle in ordered],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        labelcolor=ink(ax),
        fontsize=9,
        handlelength=1.6,
        handleheight=1.0,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0.4,
        borderpad=0.2,
        markerscale=markerscale,
    )


def _key(handle: Container | Artist) -> Container | Artist:
    """What stands for bars in a legend: a patch like the first that has a length, a measured one if there is any."""
    from matplotlib.patches import Patch

    patches = [patch for patch in getattr(handle, "patches", ()) if patch.get_width()]
    if not patches:
        return handle
    like = min(patches, key=lambda patch: bool(patch.get_hatch()))
    key = Patch()
    key.update_from(like)
    key.set_label(str(handle.get_label()))
    return key


def lines_of(names: Sequence[str]) -> int:
    """Lines that a legend of these names takes, whose columns are as wide as their longest name.

    >>> lines_of(["compute", "idle"]), lines_of(["perfect", "if communication were hidden", "laws together", "as the last point"])
    (1, 2)
    """
    for lines in range(1, len(names)):
        columns = -(-len(names) // lines)
        if sum(max(map(len, names[column::columns])) + _HANDLE for column in range(columns)) <= _LINE:
            return lines
    return max(1, len(names))


def shortened(name: str) -> str:
    """A kernel's name cut to 34 letters: its beginning and its end."""
    return name if len(name) <= 34 else f"{name[:20]}…{name[-13:]}"


def wrapped(label: str) -> str:
    """A label broken into lines, so that it leaves space for the bars."""
    return textwrap.fill(label, _LABEL, break_long_words=False, break_on_hyphens=False)


def height(labels: Sequence[str]) -> float:
    """Inches for rows with these labels, legend and axis included."""
    lines = max(label.count("\n") for label in labels) + 1
    return 1.05 + max(0.46, 0.1 + 0.19 * lines) * len(labels)


def mark(
    ax: Axes, place: float, interval: Interval, scale: float = 1.0, *, measured: bool = False, label: str | None = None
) -> ErrorbarContainer:
    """A diamond with its interval, in a row: hollow for a prediction, full for a measurement. An endless side is left out."""
    reach = [[abs(interval.mid - end) * scale if math.isfinite(end) else 0.0] for end in (interval.low, interval.high)]
    color = ink(ax)
    drawn = ax.errorbar(
        [interval.mid * scale],
        [place],
        xerr=reach,
        fmt="D",
        color=color,
        markersize=5.5,
        markerfacecolor=color if measured else ground(ax),
        markeredgewidth=1.3,
        elinewidth=1.3,
        capsize=0 if measured else 2.5,
        label=label,
        zorder=4,
    )
    for artist in drawn.get_children():
        artist.set_path_effects(halo(ax))
    return drawn
