"""Draws the kernels, modules or frequent sequences of a trace that take longest, one bar each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core import units
from workbench.core.brief import short
from workbench.core.display.axes import Bar, bar_chart, shortened
from workbench.core.display.colors import IDLE, PHASES, SERIES
from workbench.traces.analysis.kernels import Kernels
from workbench.traces.analysis.modules import Modules
from workbench.traces.analysis.sequences import Sequences, fold_repeats, short_kernel_name
from workbench.traces.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_KERNELS = 12
"""Kernels that are drawn: the longest."""
KERNEL_COLORS = {"on tensor cores": SERIES[0], "without": SERIES[1]}


def kernels(result: Trace | Kernels, ax: Axes | None = None) -> Axes:
    """A bar per kernel, as long as all its launches take; the text says how much of the device's multiprocessors they fill.

    Raises:
        ValueError: the trace has no kernels.
    """
    answer = result.kernels() if isinstance(result, Trace) else result
    if not answer.rows:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes)}")
    bars = [
        Bar(
            label=shortened(short_kernel_name(kernel.name)),
            pieces=[kernel.seconds, 0.0] if kernel.tensor_cores else [0.0, kernel.seconds],
            end=f"occupancy {units.percent(kernel.occupancy)}" if kernel.occupancy is not None else units.seconds(kernel.seconds),
        )
        for kernel in answer.rows[:MOST_KERNELS]
    ]
    ax = bar_chart(ax, bars, "all launches", KERNEL_COLORS, row=0.75, more=0.3)
    for text in list(ax.texts):
        if text.get_text() == "100 %":  # a bar has one colour only
            text.remove()
    return ax


MOST_MODULES = 24
"""Modules that are drawn: the longest."""
MODULE_COLORS = {"forward": PHASES["forward"], "backward": PHASES["backward"]}
ON_DEVICE = {"on the device": PHASES["forward"]}


def modules(result: Trace | Modules, ax: Axes | None = None) -> Axes:
    """A bar per module, including all that it calls: forward and backward on the host, or the device's work if a device computes.

    Raises:
        ValueError: the trace names no modules.
    """
    answer = result.modules() if isinstance(result, Trace) else result
    if not answer.rows:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes) or 'no module was called within a step'}")
    device = any(module.device_seconds for module in answer.rows)

    def pieces(at: int) -> list[float]:
        module = answer.rows[at]
        return [module.device_seconds or 0.0] if device else [module.total_seconds, module.backward_seconds or 0.0]

    longest = sorted(range(len(answer.rows)), key=lambda at: -sum(pieces(at)))[:MOST_MODULES]
    bars = [
        Bar(label="  " * answer.rows[at].depth + short(answer.rows[at].name, 28), pieces=pieces(at), end=units.seconds(sum(pieces(at))))
        for at in sorted(longest)
    ]
    ax = bar_chart(ax, bars, "mean step, with all that is called", ON_DEVICE if device else MODULE_COLORS, row=0.7, more=0.4)
    ax.set_yticks(ax.get_yticks(), [bar.label for bar in bars], ha="left")
    ax.tick_params(axis="y", pad=6 * max(len(bar.label) for bar in bars))
    return ax


MOST_SEQUENCES, LINES = 8, 4
"""Sequences that are drawn, and lines of a label."""
SEQUENCE_COLORS = {"the work itself": PHASES["forward"], "gaps between": IDLE}


def sequences(result: Trace | Sequences, ax: Axes | None = None) -> Axes:
    """A bar per sequence: the time of its kernels or operators, and of the gaps between them.

    Raises:
        ValueError: no sequence recurs.
    """
    answer = result.sequences() if isinstance(result, Trace) else result
    if not answer.rows:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes)}")
    bars = [
        Bar(label=_sequence_label(pattern.names), pieces=[pattern.seconds, pattern.gaps], end=f"{pattern.count:,} times")
        for pattern in answer.rows[:MOST_SEQUENCES]
    ]
    return bar_chart(ax, bars, "all occurrences", SEQUENCE_COLORS)


def _sequence_label(names: tuple[str, ...]) -> str:
    lines = [short_kernel_name(name) for name in fold_repeats(names)]
    lines = lines if len(lines) <= LINES else [*lines[: LINES - 1], f"… {len(lines) - LINES + 1} more"]
    return "\n".join(map(shortened, lines))
