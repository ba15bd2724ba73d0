"""Draws what changes over the time of a trace: bytes copied per second, launches in the queue, allocated memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.core import units
from workbench.core.brief import short
from workbench.core.display.axes import WIDTH, area, curves_over_time, legend, prepared, ring, scale_of, scale_of_bytes
from workbench.core.display.colors import SERIES
from workbench.traces.analysis.copies import Copies, Copy
from workbench.traces.analysis.launch_queue import Launches
from workbench.traces.analysis.memory_curve import DeviceMemory, MemoryCurve
from workbench.traces.analysis.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def copies(result: Trace | Copies, ax: Axes | None = None) -> Axes:
    """Bytes per second from the first copy to the end of the last, pauses included, a curve for each kind of copy that takes long.

    Raises:
        ValueError: nothing is copied, or the file has no bytes of copies.
    """
    answer = result.copies() if isinstance(result, Trace) else result
    shown = [(row, curve) for row, curve in zip(answer.rows, answer.curves, strict=True) if row.bytes]
    if not shown:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes) or 'no bytes are copied'}")
    curves = [(_label(row), np.array(curve) / 1e9) for row, curve in shown]
    ax, unit = curves_over_time(ax, answer.times, curves, SERIES)
    ax.set_xlabel(f"time since the first copy ({unit})")
    ax.set_ylabel("copied (GB/s)")
    return ax


def _label(row: Copy) -> str:
    name = f"{row.kind} ({row.memory})" if row.memory else row.kind
    return f"{name}: {units.count(row.bandwidth, 'B/s')} while it copies"


def launches(result: Trace | Launches, ax: Axes | None = None) -> Axes:
    """The number of launches that wait for the device over time, a curve for each of the streams with most of them.

    Raises:
        ValueError: nothing is launched.
    """
    answer = result.launches() if isinstance(result, Trace) else result
    if not answer.rows:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes)}")
    labels = [f"{row.stream.strip()}: {units.count(row.queue_mean)} on average" for row in answer.rows]
    ax, unit = curves_over_time(ax, answer.times, list(zip(labels, answer.queues, strict=False)), SERIES)
    ax.set_xlabel(f"time of the steps ({unit})")
    ax.set_ylabel("launches that wait")
    return ax


_LETTERS = 40


def memory_curve(result: Trace | MemoryCurve, ax: Axes | None = None) -> Axes:
    """Allocated memory over time, a curve per device; the peak is marked, with what holds most of it.

    Raises:
        ValueError: memory was not recorded.
    """
    answer = result.memory_curve() if isinstance(result, Trace) else result
    shown = [device for device in answer.devices if device.peak > 0][: len(SERIES)]
    if not shown:
        raise ValueError(f"{answer!r} has nothing to draw: {'; '.join(answer.notes) or 'nothing was allocated'}")
    ax = prepared(ax, WIDTH, 3.4)
    scale, unit = scale_of_bytes(shown[0].peak)
    times, seconds = scale_of(max(device.times[-1] for device in shown) or 1.0)
    drawn = []
    for device, color in zip(shown, SERIES, strict=False):
        places, heights = np.array(device.times) * times, np.array(device.allocated) / scale
        drawn += ax.step(places, heights, where="post", color=color, linewidth=1.2, label=device.device)
        ax.fill_between(places, heights, step="post", **area(ax, color, pale=True) | {"linewidth": 0})
        ring(ax, device.at * times, device.peak / scale, _peak_words(device))
    ax.set_ylim(0, 1.32 * shown[0].peak / scale)
    ax.set_xlabel(f"time since the first event of the trace ({seconds})")
    ax.set_ylabel(f"allocated ({unit})")
    legend(ax, drawn)
    return ax


def _peak_words(device: DeviceMemory) -> str:
    """The peak, and who holds most of it."""
    first = device.holders[0] if device.holders else None
    name = short(first.name.rpartition(": ")[2], _LETTERS) if first else ""
    return f"peak {units.bytes_(device.peak)}" + (f"\n{units.percent(first.bytes / device.peak)}: {name}" if first else "")
