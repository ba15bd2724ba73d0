"""Draws samples of a dataset, and what its formats cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core.display.axes import ink, prepared
from workbench.data.data_card import DataCard, picture_of
from workbench.data.sample import CorruptSampleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
_GAP = 0.08  # of a cell, around a picture
_WORDS = 14  # characters below a picture


def samples(result: DataCard, ax: Axes | None = None) -> Axes:
    """Some samples of a dataset, each with its label below; texts and what cannot be decoded as words.

    Raises:
        ValueError: the dataset gave no sample to draw.
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
