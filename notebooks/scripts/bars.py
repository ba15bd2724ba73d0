"""Draws bytes that were predicted and counted, in two bars for each way of sharing a model (notebook 16)."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from workbench.core.display.axes import WIDTH, area, ink, legend, prepared
from workbench.core.display.colors import LINE


def bytes_of_ranks(measured: Mapping[str, float], predicted: Mapping[str, float], what: str) -> Axes:
    """Draw two bars for each way of sharing: what was counted, solid, and what was predicted, hatched.

    Args:
        measured: way → bytes.
        predicted: the same.
        what: the label of the axis, in MiB.
    """
    ax = prepared(None, WIDTH, 0.9 + 0.5 * len(measured))
    for move, sizes, word in ((-0.19, predicted, "predicted here"), (0.19, measured, "measured")):
        places, values = [place + move for place in range(len(measured))], [sizes[name] / 2**20 for name in measured]
        ax.barh(places, values, height=0.36, label=word, **area(ax, LINE, predicted=word != "measured"))
        for place, value in zip(places, values, strict=True):
            ax.annotate(f"{value:.3g}", (value, place), xytext=(5, 0), textcoords="offset points", va="center", color=ink(ax), fontsize=8.5)
    ax.set_yticks(range(len(measured)), list(measured))
    ax.invert_yaxis()
    ax.set_xlabel(what)
    ax.margins(x=0.12)
    legend(ax, ax.get_legend_handles_labels()[0])
    return ax
