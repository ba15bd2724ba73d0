"""Follows allocated memory over a trace, per device, and names the calls that allocated what is held at the peak."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.columns import Columns
from workbench.traces.analysis.details import Details, Requests
from workbench.traces.analysis.event_kinds import Kinds
from workbench.traces.analysis.intervals import Numbers
from workbench.traces.analysis.modules import MODULE
from workbench.traces.analysis.nesting import Nesting, nest_events
from workbench.traces.analysis.operators import CALLERS, short_name

POINTS = 1_500
"""Points of a curve: the highest of each piece of time."""
SHOWN = 12
"""Holders in a table."""
BEFORE = "held since before the trace"
NOBODY = "outside of every recorded call"
NONE = "memory was not recorded: profile with profile_memory=True (wb.trace(step, loader, memory=True))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A call that allocated memory which is held at the peak."""

    name: str
    """The innermost operator around the request; or a module around it, and the operator."""
    bytes: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The allocated memory of one device over time."""

    device: str
    peak: int
    """Bytes allocated at the peak."""
    at: float
    """When: seconds from the first event of the file on."""
    step: int | None
    """In which step; None outside of all."""
    first: int
    """Bytes allocated at the first request."""
    last: int
    requests: int
    holders: tuple[Holder, ...]
    """What holds the peak, the most first; the bytes add up to it, as far as the trace has the requests."""
    times: tuple[float, ...]
    """Seconds from the first event on."""
    allocated: tuple[int, ...]
    """Bytes from that time on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve(display.Shown, JsonDataclass):
    """Allocated memory over time. Get it from `trace.memory_curve()`."""

    devices: tuple[DeviceMemory, ...]
    """That with the highest peak first."""
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """Peak and its holders, per device."""
        rows: list[list[object]] = []
        for device in self.devices:
            when = f"at {units.seconds(device.at)}, {f'in step {device.step}' if device.step is not None else 'outside of the steps'}"
            rows.append([device.device, "peak", units.bytes_(device.peak), when])
            for held in device.holders[:SHOWN]:
                share = units.percent(held.bytes / device.peak if device.peak else None)
                rows.append(["", short_name(held.name), units.bytes_(held.bytes), f"{share} of the peak, {held.requests:,} requests"])
            rest = device.holders[SHOWN:]
            if rest:
                rows.append(["", f"{len(rest)} others", units.bytes_(sum(held.bytes for held in rest)), ""])
        note = display.notes(self.notes) or None
        return display.Table(columns=("device", "who", "bytes", "what"), rows=rows, title="Memory at its fullest", note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row per device and point of its curve: seconds and bytes."""
        rows = [
            {"device": device.device, "seconds": time, "allocated": size}
            for device in self.devices
            for time, size in zip(device.times, device.allocated, strict=True)
        ]
        return display.frame(rows, columns=("device", "seconds", "allocated"))

    plot = display.plot_method("memory_curve")

    def __repr__(self) -> str:
        peaks = ", ".join(f"{device.device} {units.bytes_(device.peak)}" for device in self.devices)
        return f"MemoryCurve({peaks or 'not recorded'})"


def memory_curve(columns: Columns, kinds: Kinds, details: Details, steps: Sequence[Any]) -> MemoryCurve:
    """Per device, from the `[memory]` events."""
    requests = details.requests
    if not len(requests):
        return MemoryCurve(devices=(), notes=details.notes or (NONE,))
    calls = nest_events(columns, kinds.where(*CALLERS))
    devices = [_device(columns, calls, requests, number, steps) for number in range(len(requests.devices))]
    notes = list(details.notes)
    if any(held.name == BEFORE for device in devices for held in device.holders):
        notes.append(f"{BEFORE}: parameters, and what else was allocated when the profiler began; it did not see who allocated that")
    if any(device.device == "CPU" for device in devices):
        notes.append("on the CPU the profiler counts from its own beginning: what was there before is missing, and its end goes unseen")
    return MemoryCurve(devices=tuple(sorted(devices, key=lambda device: -device.peak)), notes=tuple(notes))


def _device(columns: Columns, calls: Nesting, requests: Requests, number: int, steps: Sequence[Any]) -> DeviceMemory:
    of = np.flatnonzero(requests.device == number)
    time, size, reported = requests.time[of], requests.size[of], requests.allocated[of]
    summed = np.cumsum(size)
    held = reported if (reported >= 0).all() else summed - min(0, int(summed.min(initial=0)))
    peak = int(held.argmax())
    at = int(time[peak])
    live = _live(requests.address[of], size, peak)
    holders = _holders(columns, calls, time[live], requests.lane[of][live], size[live])
    explained = sum(holder.bytes for holder in holders)
    if held[peak] > explained:
        holders.append(Holder(name=BEFORE, bytes=int(held[peak]) - explained, requests=0))
    points = _points(time, held)
    return DeviceMemory(
        device=requests.devices[number],
        peak=int(held[peak]),
        at=at / 1e9,
        step=next((int(step) for step, start, end in steps if start <= at < end), None),
        first=int(held[0]),
        last=int(held[-1]),
        requests=len(of),
        holders=tuple(sorted(holders, key=lambda holder: -holder.bytes)),
        times=tuple((time[points] / 1e9).tolist()),
        allocated=tuple(held[points].tolist()),
    )


def _live(address: Numbers, size: Numbers, peak: int) -> Numbers:
    """Requests up to the peak that were not given back before it."""
    live: dict[int, int] = {}
    for i, (where, amount) in enumerate(zip(address[: peak + 1].tolist(), size[: peak + 1].tolist(), strict=True)):
        if amount > 0:
            live[where] = i
        else:
            live.pop(where, None)
    return np.array(sorted(live.values()), dtype=np.int64)


def _holders(columns: Columns, calls: Nesting, times: Numbers, lanes: NDArray[np.int32], sizes: Numbers) -> list[Holder]:
    """The innermost call around each request, with its bytes."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    lane = columns.lane[calls.events]
    borders = {
        int(number): (int(np.searchsorted(lane, number)), int(np.searchsorted(lane, number, side="right"))) for number in np.unique(lanes)
    }
    for time, on, size in zip(times.tolist(), lanes.tolist(), sizes.tolist(), strict=True):
        begin, end = borders[on]
        place = begin + int(np.searchsorted(calls.spans[begin:end, 0], time, side="right")) - 1 if on >= 0 else -1
        while place >= max(begin, 0) and calls.spans[place, 1] <= time:
            place = int(calls.parent[place])
        entry = sums[_who(columns, calls, place)]
        entry[0] += size
        entry[1] += 1
    return [Holder(name=name, bytes=size, requests=count) for name, (size, count) in sums.items()]


def _who(columns: Columns, calls: Nesting, place: int) -> str:
    """The outermost operator around a request, which is in the user's code, and the innermost module around that."""
    operator = module = ""
    while place >= 0:
        label = columns.labels[columns.label[calls.events[place]]]
        if MODULE.match(label.name):
            module = module or MODULE.sub("", label.name)
        elif label.category != "python_function":
            operator = label.name if not module else operator
        place = int(calls.parent[place])
    return " › ".join(name for name in (module, operator) if name) or NOBODY


def _points(time: Numbers, held: Numbers) -> Numbers:
    """The highest point of each piece of time, and the first and the last point of all."""
    if len(time) <= POINTS:
        return np.arange(len(time))
    piece = (time - time[0]) * POINTS // max(1, int(time[-1] - time[0]) + 1)
    order = np.lexsort((-held, piece))
    _, first = np.unique(piece[order], return_index=True)
    return np.unique(np.concatenate([[0], order[first], [len(time) - 1]]))
