"""Curves of a run over its steps: the loss, the learning rate if it varies, evaluation where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.plot.canvas import calm, prepared
from workbench.plot.colors import INK, LINE
from workbench.plot.stack import WIDTH
from workbench.run import Run
from workbench.rundir import METRIC_KEYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def metrics(run: Run, ax: Axes | None = None) -> Axes:
    """The loss against the optimizer step; the learning rate on a second axis if it varies; evaluation figures at their step.

    Raises:
        ValueError: the run has not reported a loss.
    """
    rows = run.metric_rows
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not losses:
        hint = str(run.error) if run.error else "a script launched with watch=True has timelines only; a RunSpec reports its loss"
        raise ValueError(f"{run!r} has reported no loss to draw ({run.state}): {hint}")
    ax = prepared(ax, WIDTH, 3.0)
    ax.plot(*zip(*losses, strict=True), color=LINE, linewidth=1.8, label="loss", marker="o" if len(losses) < 3 else None)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("training loss")
    ax.grid(axis="y", color=INK, alpha=0.18, linewidth=0.8)
    ax.margins(x=0.01)
    _mark_evaluation(ax, rows)
    rates = [(row["step"], row["lr"]) for row in rows if row.get("lr") is not None]
    if len({rate for _, rate in rates}) > 1:
        _draw_rates(ax, rates)
    return ax


def _mark_evaluation(ax: Axes, rows: list[dict[str, float]]) -> None:
    """A dotted line where the model was evaluated, with the figures in words beside it."""
    last = max(row["step"] for row in rows if "step" in row)
    for row in rows:
        figures = {name: value for name, value in row.items() if name not in METRIC_KEYS}
        if not figures:
            continue
        left = row["step"] > last / 2  # the text stands on the side that has room
        ax.axvline(row["step"], color=INK, linestyle=":", linewidth=1.2)
        ax.annotate(
            "\n".join(f"{name} {value:.3g}" for name, value in figures.items()),
            (row["step"], 1),
            (-6 if left else 6, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if left else "left",
            va="top",
            color=INK,
        )


def _draw_rates(ax: Axes, rates: list[tuple[float, float]]) -> None:
    """The learning rate, dashed, on an axis of its own at the right."""
    twin = calm(ax.twinx())
    twin.plot(*zip(*rates, strict=True), color=INK, linewidth=1.2, linestyle="--", label="learning rate")
    twin.set_ylabel("learning rate")
    twin.set_ylim(bottom=0)
    twin.spines["right"].set_visible(True)
    twin.spines["left"].set_visible(False)
    ax.legend(
        handles=[*ax.get_lines()[:1], *twin.get_lines()],
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        borderaxespad=0.2,
        borderpad=0.2,
    )
