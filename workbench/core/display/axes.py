"""Draws on matplotlib Axes in the workbench's style: new figures, stacked horizontal bars with a legend and end labels, step curves."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.core import units
from workbench.core.display.colors import INK, INK_DARKER, text_on
from workbench.core.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container, ErrorbarContainer
    from numpy.typing import NDArray


def prepared(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the Axes of a new figure of `width` × `height` inches, in our style.

    A new figure is one of pyplot's, because those are what a notebook shows at the end of a cell.
    """
    if ax is None:
        from matplotlib import pyplot

        figure, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
        figure.set_facecolor("none")
    return style_axes(ax)


def style_axes(ax: Axes) -> Axes:
    """Style an Axes: mid-grey on a transparent ground, without a frame but for the two axes."""
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set_color(INK)
        spine.set_linewidth(0.8)
        spine.set_visible(side in ("left", "bottom"))
    ax.tick_params(axis="x", colors=INK, width=0.8)
    ax.tick_params(axis="y", colors=INK_DARKER, width=0.8)
    for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
        label.set_color(INK)
    return ax


WIDTH = 7.6
"""Inches of a picture: the width of a notebook's column."""
_WIDE_ENOUGH = 0.06  # of the axis: a share is written into a piece from here on
_LABEL = 26  # letters in a line of a label
_LINE, _HANDLE = 84, 5  # letters in a line of a legend; what a patch of colour takes, in letters
_LETTER = 0.0125  # of the axis: the width of a letter
PALE = 0.6
"""Opacity of what is predicted, or was there before."""


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
    pale: bool = False
    """Drawn paler: a prediction beside a measurement."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return sum(self.pieces)


def scale_of(longest: float) -> tuple[float, str]:
    """The factor from seconds to the unit of an axis that reaches to `longest` seconds, and that unit."""
    return (1e6, "µs") if longest < 1e-3 else (1e3, "ms") if longest < 1 else (1.0, "s")


def scale_of_bytes(most: float) -> tuple[float, str]:
    """Bytes of the unit that suits an axis that reaches to `most` bytes, and its name."""
    return next(((float(size), unit) for size, unit in _BYTES if most >= size), (1.0, "B"))


_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def stacked(ax: Axes, bars: Sequence[Bar], what: str, colors: Mapping[str, str]) -> float:
    """Draw bars from top to bottom: one container per colour, in their order.

    Args:
        ax: Axes in our style.
        bars: with as many pieces as there are colours.
        what: the axis label, without the unit.
        colors: name → colour of the pieces.

    Returns:
        The factor from seconds to places on the axis.
    """
    scale, unit = scale_of(max(bar.seconds for bar in bars))
    reaches, texts = [max(bar.seconds, bar.reach) * scale for bar in bars], [bar.end for bar in bars]
    wide = _WIDE_ENOUGH * _room(reaches, texts)
    places = range(len(bars))
    starts = [0.0] * len(bars)
    for column, (name, color) in enumerate(colors.items()):
        widths = [bar.pieces[column] * scale for bar in bars]
        drawn = ax.barh(places, widths, left=starts, height=0.62, color=color, label=name)
        for place, start, width, bar in zip(places, starts, widths, bars, strict=True):
            if bar.pale:
                drawn.patches[place].set_alpha(PALE)
            elif width >= wide:
                share = units.percent(bar.pieces[column] / bar.seconds)
                ax.text(start + width / 2, place, share, ha="center", va="center", fontsize=8.5, color=text_on(color))
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    end_labels(ax, reaches, texts)
    rows(ax, [bar.label for bar in bars])
    ax.set_xlabel(f"{what} ({unit})")
    return scale


def bar_chart(ax: Axes | None, bars: Sequence[Bar], what: str, colors: Mapping[str, str], *, row: float = 1.0, more: float = 0.0) -> Axes:
    """Stacked bars with their legend as a whole picture.

    Args:
        ax: the Axes to draw into; None makes a figure.
        bars: with as many pieces as there are colours.
        what: the axis label, without the unit.
        colors: name → colour of the pieces.
        row: of a new figure, its height as a fraction of the usual one.
        more: inches that are added to it.
    """
    ax = prepared(ax, WIDTH, height([bar.label for bar in bars]) * row + more)
    stacked(ax, bars, what, colors)
    legend(ax, ax.containers)
    return ax


def curves_over_time(
    ax: Axes | None, times: Sequence[float], curves: Sequence[tuple[str, Sequence[float] | NDArray[np.float64]]], colors: Sequence[str]
) -> tuple[Axes, str]:
    """Step curves over the time since the first of `times`, with a legend.

    Args:
        ax: the Axes to draw into; None makes a figure.
        times: edges of the curves' intervals, in seconds.
        curves: label and heights, one less than `times`.
        colors: of the curves; those beyond are not drawn.

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
    """Write a text at the right of each row, and lengthen the axis until all of them fit."""
    for place, (reach, text) in enumerate(zip(reaches, texts, strict=True)):
        ax.annotate(text, (reach, place), (7, 0), textcoords="offset points", va="center", color=INK)
    ax.margins(x=0)
    ax.set_xlim(0, _room(reaches, texts))


def _room(reaches: Sequence[float], texts: Sequence[str]) -> float:
    """Length of an axis on which a text fits behind each reach."""
    return max(reach / (1 - min(0.6, 0.03 + _LETTER * len(text))) for reach, text in zip(reaches, texts, strict=True))


def rows(ax: Axes, labels: Sequence[str]) -> None:
    """One row per label from top to bottom, with nothing but the label at its left."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def legend(ax: Axes, handles: Sequence[Container | Artist]) -> None:
    """What the colours mean, above the bars: in lines that are read from left to right."""
    columns = -(-len(handles) // lines_of([str(handle.get_label()) for handle in handles]))
    ax.legend(
        handles=[handle for column in range(columns) for handle in handles[column::columns]],  # matplotlib fills column by column
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0.2,
        borderpad=0.2,
    )


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
    return ax.errorbar(
        [interval.mid * scale],
        [place],
        xerr=reach,
        fmt="D",
        color=INK,
        markersize=5,
        markerfacecolor=INK if measured else "none",
        markeredgewidth=1.3,
        elinewidth=1.3,
        capsize=0 if measured else 2.5,
        label=label,
    )
