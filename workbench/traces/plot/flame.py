"""Draws the calls of a thread as icicles: each below its caller, as wide as the share of the step that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.brief import short
from workbench.core.display.axes import WIDTH, ink, legend, prepared, scale_of
from workbench.core.display.colors import PARTS, PHASES, text_on
from workbench.traces.analysis.flame import Flame, FlameNode
from workbench.traces.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NARROW = 0.0008
"""Share of the step: narrower calls would be thinner than a line."""
DEEPEST = 24
"""Rows that are drawn."""
_ROW = 0.27  # inches
_LETTER = 0.0083  # of the axis: the width of a letter
KINDS = (
    ("loader", PHASES["data_wait"], ("enumerate(DataLoader)",)),
    ("optimizer", PHASES["optimizer"], ("Optimizer.",)),
    ("backward", PHASES["backward"], ("autograd::", "torch::autograd")),
    ("communication", PARTS["communication"], ("c10d::", "nccl:", "gloo:", "record_param_comms")),
    ("operators", PHASES["forward"], ("aten::",)),
    ("modules", PARTS["host"], ("nn.Module: ",)),
)
"""What a call is, its colour, and how its name begins; others are grey. What is called inside has the colour of its own name."""
OTHERS = ("others", PHASES["other"])


def flame(result: Trace | Flame, ax: Axes | None = None) -> Axes:
    """The calls of a thread as icicles: callers above, as wide as the mean seconds per step that they take with all they call.

    Args:
        result: a trace (then of the thread that marks the steps), or its flame.
        ax: the Axes to draw into; None makes a figure.

    Raises:
        ValueError: the thread calls nothing within a step.
    """
    answer = result.flame() if isinstance(result, Trace) else result
    shown = [node for node in answer.nodes if answer.share(node) >= NARROW and node.depth < DEEPEST]
    if not shown:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes) or 'its calls take no time'}")
    depth = max(node.depth for node in shown) + 1
    ax = prepared(ax, WIDTH, 1.1 + _ROW * depth)
    scale, unit = scale_of(answer.step_seconds)
    drawn: dict[str, object] = {}
    for kind in (*((name, color) for name, color, _ in KINDS), OTHERS):
        nodes = [node for node in shown if _kind(node.name) == kind]
        if nodes:
            drawn[kind[0]] = _boxes(ax, nodes, kind, scale)
    for node in shown:
        _label(ax, node, answer.share(node), scale)
    ax.set_xlim(0, answer.step_seconds * scale)
    ax.set_ylim(depth, 0)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"mean seconds per step on {_plain(answer.thread)} ({unit}); empty: outside of every call")
    legend(ax, list(drawn.values()))  # type: ignore[arg-type]
    return ax


def _boxes(ax: Axes, nodes: Sequence[FlameNode], kind: tuple[str, str], scale: float) -> object:
    """Draw the boxes as one collection per kind, which is fast for thousands."""
    from matplotlib.collections import PolyCollection

    corners = []
    for node in nodes:
        left, right = node.start * scale, (node.start + node.seconds) * scale
        corners.append([(left, node.depth + 0.04), (right, node.depth + 0.04), (right, node.depth + 0.96), (left, node.depth + 0.96)])
    boxes = PolyCollection(corners, facecolor=kind[1], edgecolor=ink(ax), linewidth=0.3, label=kind[0])
    ax.add_collection(boxes, autolim=False)
    return boxes


def _label(ax: Axes, node: FlameNode, share: float, scale: float) -> None:
    """The name, as far as it fits, and the share of a wide one."""
    letters = int(share / _LETTER) - 1
    text = _plain(node.name)
    if letters >= len(text) + 7:
        text = f"{text}  {units.percent(share)}"
    if letters < 4:
        return
    color = text_on(_kind(node.name)[1])
    text = f" {short(text, letters)}"
    ax.text(node.start * scale, node.depth + 0.5, text, va="center", ha="left", fontsize=7.5, color=color, clip_on=True)


def _kind(name: str) -> tuple[str, str]:
    for kind, color, beginnings in KINDS:
        if name.startswith(beginnings) or (kind == "backward" and "Backward" in name):
            return kind, color
    return OTHERS


def _plain(name: str) -> str:
    """Without what every name of its kind begins with."""
    for beginning in ("autograd::engine::evaluate_function: ", "nn.Module: ", "aten::"):
        name = name.removeprefix(beginning)
    return " ".join(name.split()).replace("$", r"\$")
