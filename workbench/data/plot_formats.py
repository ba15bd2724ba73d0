"""Draws samples of a dataset, and what its formats cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.display.axes import Bar, bar_chart, ink, prepared
from workbench.core.display.colors import SERIES
from workbench.data.analysis.format_costs import FormatComparison
from workbench.data.data_card import DataCard, picture_of
from workbench.data.sample import CorruptSampleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
_GAP = 0.08  # of a cell, around a picture
_WORDS = 14  # characters below a picture


def samples(result: DataCard, ax: Axes | None = None) -> Axes:
    """Some samples of a dataset, each with its label below; texts and undecodable samples are shown as words.

    Raises:
        ValueError: the dataset has no sample to draw.
    """
    if not result.examples:
        raise ValueError("there is no sample to draw: describe the dataset again, a card that was read from JSON has none")
    rows = -(-len(result.examples) // _COLUMNS)
    ax = prepared(ax, 1.5 * _COLUMNS, 1.7 * rows)
    for place, sample in enumerate(result.examples):
        left, top = place % _COLUMNS, place // _COLUMNS
        try:
            pixels, label = picture_of(sample)
        except CorruptSampleError:
            pixels, label = None, "cannot be decoded"
        if pixels is not None:
            height, width = pixels.shape[:2]
            room = 1 - 3 * _GAP
            scale = room / max(height, width)
            x, y = left + (1 - scale * width) / 2, top + _GAP + (room - scale * height) / 2
            extent = (x, x + scale * width, y + scale * height, y)
            ax.imshow(pixels, extent=extent, cmap="gray" if pixels.ndim == 2 else None, aspect="equal", interpolation="nearest")
        words = label if len(label) <= _WORDS else f"{label[: _WORDS - 1]}…"
        low = top + 1 - _GAP if pixels is not None else top + 0.5
        ax.text(left + 0.5, low, words, ha="center", va="center", fontsize=8, color=ink(ax))
    ax.set_xlim(0, _COLUMNS)
    ax.set_ylim(rows, 0)
    ax.set_axis_off()
    return ax


_WORDS_OF = {"cold": "cold", "warm": "from memory"}
_COLORS = {"CPU (measured)": SERIES[0], "waiting (measured)": SERIES[1]}


def formats(result: FormatComparison, ax: Axes | None = None) -> Axes:
    """Measured time per sample of each format, in the intended reading order: CPU and waiting; the fastest first.

    One bar per format: its slowest measurement (remote before local, cold before warm), as in the recommendation.
    """
    names = [stored.format for stored in result.formats]
    shown = sorted((r for name in names if (r := result.reading(name)) is not None), key=lambda reading: reading.seconds)
    bars = [
        Bar(
            label=f"{reading.format} ({reading.place}, {_WORDS_OF[reading.cache]})",
            pieces=(min(reading.cpu, reading.seconds), reading.blocked),
            end=units.seconds(reading.seconds),
        )
        for reading in shown
    ]
    return bar_chart(ax, bars, f"time per sample, read {'at random' if result.order == 'random' else 'in order'}", _COLORS)
