"""What each rule makes of a learning rate, over the batch; and where the one that was used leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.batch.choosing import factor_of
from workbench.batch.described import Described
from workbench.batch.scaled import LIGHTS, ScaledLr, number
from workbench.plot.canvas import prepared
from workbench.plot.colors import INK, LINE, PHASES
from workbench.plot.stack import PALE, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"linear": "--", "sqrt": "-.", "damped": "-", "none": ":"}
_WORDS = {"linear": "linear", "sqrt": "square root", "damped": "damped", "none": "none"}
_POINTS = 60
_BEYOND = 4.0  # times the larger batch, and below the smaller one


def scaled_lr(result: ScaledLr, ax: Axes | None = None) -> Axes:
    """The learning rate by each rule over the batch, through that of the base, a hollow diamond.

    The rule that was used is blue and leads to the full diamond. A vertical dotted line is the noise, where it is known.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ax = prepared(ax, WIDTH, 3.4)
    base, used = Described.of(result.base), "sqrt" if result.rule == "adam" else result.rule
    low, high = min(result.batch, result.to_batch) / _BEYOND, max(result.batch, result.to_batch) * _BEYOND
    batches = [low * (high / low) ** (place / (_POINTS - 1)) for place in range(_POINTS)]
    for rule, style in _STYLES.items():
        if rule == "damped" and result.noise is None:
            continue
        rates = [result.base_lr * factor_of(rule, base, result.batch, batch, result.noise) for batch in batches]
        look = {"color": LINE, "linewidth": 2.2} if rule == used else {"color": INK, "linewidth": 1.2, "alpha": PALE}
        label = f"{_WORDS[rule]}{', with betas and epsilon' if result.rule == 'adam' and rule == used else ''}"
        ax.plot(batches, rates, linestyle=style, label=label, **look)  # type: ignore[arg-type]
    ax.plot([result.batch], [result.base_lr], marker="D", color=LINE, markersize=6, markerfacecolor="none", linestyle="none")
    ax.plot([result.to_batch], [result.lr], marker="D", color=LINE, markersize=6, linestyle="none")
    words = f"{number(result.lr)} at {number(result.to_batch)}: {LIGHTS[result.valid]}"
    ax.annotate(words, (1, 0), (-4, 5), xycoords="axes fraction", textcoords="offset points", color=INK, ha="right")
    if result.noise is not None and low <= result.noise <= high:
        ax.axvline(result.noise, color=PHASES["other"], linestyle=":", linewidth=1.4, label="noise scale")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: number(int(value) if value >= 1 and float(value).is_integer() else value))
    ax.set_xlabel("global batch (samples)")
    ax.set_ylabel("learning rate")
    ax.grid(color=INK, alpha=0.18, linewidth=0.8)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, borderpad=0.2)
    return ax
