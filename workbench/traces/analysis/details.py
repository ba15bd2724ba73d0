"""Reads the details of events that only some answers need, in a second pass over the file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.core.gc import without_gc
from workbench.traces.analysis.columns import Codes, Columns, floats, integers, with_valid_times
from workbench.traces.analysis.event_schema import DETAILS, NO_DETAIL, Detailed
from workbench.traces.analysis.intervals import Numbers
from workbench.traces.analysis.reading import Reading, TraceError

DEVICE_TYPES = {0: "CPU", 1: "CUDA", 6: "HIP", 12: "XPU", 13: "MPS", 20: "PrivateUse1"}
"""Source: torch, c10/core/DeviceType.h."""


class Inputs(NamedTuple):
    """The arguments of an operator, as in the file; empty where they were not recorded."""

    types: str
    concrete: str
    """Values of what is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Requests for memory, in order of time."""

    time: Numbers
    """Nanoseconds from the first event of the file on."""
    lane: NDArray[np.int32]
    """Number of the thread; -1 for one that has no events."""
    size: Numbers
    """Bytes; negative = freed."""
    allocated: Numbers
    """Bytes that the device's allocator has given out afterwards; -1 where the file does not tell."""
    address: Numbers
    device: NDArray[np.int32]
    """Number of the device."""
    devices: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Details:
    """Details of the events of a trace, one place each in every array."""

    sequence: Numbers
    """Joins an operator and its part of the backward pass; -1 = none."""
    input: NDArray[np.int32]
    inputs: tuple[Inputs, ...]
    requests: Requests
    occupancy: NDArray[np.float64]
    """Of kernels, "est. achieved occupancy %"; nan = unknown."""
    blocks: NDArray[np.float64]
    """Of kernels, "blocks per SM"; likewise."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _DetailsBuilder:
    lanes: dict[tuple[object, object], int]
    inputs: Codes = field(default_factory=lambda: Codes({(b"", b""): 0}))
    devices: Codes = field(default_factory=Codes)
    events: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    requests: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    origin: float | None = None
    first: int = 2**62

    def add(self, batch: Sequence[Detailed]) -> None:
        """Add some events, as `ColumnsBuilder.add` does."""
        events, start, _ = with_valid_times([e for e in batch if e.ph == "X"])
        if events:
            if self.origin is None:
                self.origin = float(start.min())
            self.first = min(self.first, int(np.rint((start - self.origin) * 1e3).min()))
            args = [e.args or NO_DETAIL for e in events]
            codes = [self.inputs[bytes(a.types), bytes(a.concrete)] for a in args]
            of_kernels = floats([a.occupancy for a in args]), floats([a.blocks for a in args])
            self.events.append((integers([a.sequence for a in args]), np.array(codes, dtype=np.int32), *of_kernels))
        if len(events) < len(batch):
            self._requests([e for e in batch if e.name == "[memory]" and e.args and e.args.size is not None])

    def _requests(self, batch: list[Detailed]) -> None:
        requests, start, _ = with_valid_times(batch)
        args = [e.args or NO_DETAIL for e in requests]
        devices = [self.devices[_device(a.device_type, a.device)] for a in args]
        lanes = [self.lanes.get((e.pid, e.tid), -1) for e in requests]
        numbers = [integers([a.size for a in args]), integers([a.allocated for a in args]), integers([a.address for a in args])]
        self.requests.append((start, np.array(lanes, dtype=np.int32), *numbers, np.array(devices, dtype=np.int32)))

    def all_requests(self) -> Requests:
        """All requests, in order of time."""
        empty: list[NDArray[Any]] = [np.empty(0, dtype=kind) for kind in (np.float64, np.int32, np.int64, np.int64, np.int64, np.int32)]
        parts: list[NDArray[Any]] = [np.concatenate(column) for column in zip(*self.requests, strict=True)] if self.requests else empty
        time = np.rint((parts[0] - (self.origin or 0.0)) * 1e3).astype(np.int64) - self.first
        order = np.argsort(time, kind="stable")
        lane, size, allocated, address, device = (part[order] for part in parts[1:])
        return Requests(
            time=time[order], lane=lane, size=size, allocated=allocated, address=address, device=device, devices=tuple(self.devices)
        )


def read_details(path: Path, columns: Columns) -> Details:
    """Read the details. If the file cannot be read any more there are none, and `notes` say why."""
    reading = Reading(path=path, words=DETAILS)
    gathering = _DetailsBuilder({(lane.process, lane.thread): i for i, lane in enumerate(columns.lanes)})
    why = "the file has changed since it was loaded, or is damaged"
    try:
        with without_gc():
            for batch in reading.batches():
                gathering.add(batch)
                batch.clear()
    except TraceError as error:
        gathering, why = _DetailsBuilder({}), str(error)
    if sum(len(part[0]) for part in gathering.events) != len(columns):
        nothing, unknown = np.full(len(columns), -1, dtype=np.int64), np.full(len(columns), np.nan)
        note = f"shapes' types, sequence numbers, memory and occupancy could not be read ({why})"
        bare = (Inputs("", ""),)
        return Details(
            sequence=nothing,
            input=np.zeros(len(columns), dtype=np.int32),
            inputs=bare,
            requests=_DetailsBuilder({}).all_requests(),
            occupancy=unknown,
            blocks=unknown,
            notes=(note,),
        )
    sequence, codes, occupancy, blocks = (np.concatenate(column) for column in zip(*gathering.events, strict=True))
    inputs = tuple(Inputs(types.decode("utf-8", "replace"), concrete.decode("utf-8", "replace")) for types, concrete in gathering.inputs)
    return Details(sequence=sequence, input=codes, inputs=inputs, requests=gathering.all_requests(), occupancy=occupancy, blocks=blocks)


def _device(kind: int | None, number: int | None) -> str:
    name = DEVICE_TYPES.get(kind, f"device {kind}") if kind is not None else "an unknown device"
    return name if number is None or number < 0 else f"{name} {number}"
