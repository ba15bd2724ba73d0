"""The ground that pictures are drawn on: a figure where none is given, and one calm style for every Axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.plot.colors import INK, INK_DARKER

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def prepared(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the Axes of a new figure of `width` × `height` inches, in our style.

    A new figure is one of pyplot's, because those are what a notebook shows at the end of a cell.
    """
    if ax is None:
        from matplotlib import pyplot

        figure, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
        figure.set_facecolor("none")
    return calm(ax)


def calm(ax: Axes) -> Axes:
    """Mid-grey ink on a transparent ground, and no frame but the two axes."""
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
