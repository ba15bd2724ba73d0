"""An emulated GPU: works behind the host's back, in real time, under the names of torch.cuda that the library asks."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

QUEUE_DEPTH = 1024
"""Kernels that may wait in a stream's queue before a launch blocks the host, as with CUDA."""


class Stream:
    """Kernels run one after another."""

    def __init__(self) -> None:
        self.done = 0.0
        """When the last one that was launched will have ended, on the host's clock."""
        self.pending: deque[tuple[float, int]] = deque()

    def launch(self, seconds: float, kernels: int, depth: int) -> None:
        while True:
            now = time.perf_counter()
            while self.pending and self.pending[0][0] <= now:
                self.pending.popleft()
            if not self.pending or sum(count for _, count in self.pending) + kernels <= depth:
                break
            time.sleep(max(0.0, self.pending[0][0] - now))
        self.done = max(self.done, time.perf_counter()) + seconds
        self.pending.append((self.done, kernels))

    def synchronize(self) -> None:
        _sleep_until(self.done)


def _sleep_until(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class EmulatedDevice:
    """The device, and what torch.cuda says of it."""

    def __init__(self, *, depth: int = QUEUE_DEPTH, pageable: float = 6e9, pinned: float = 5e10) -> None:
        """An idle device.

        Args:
            depth: of a stream's queue, in kernels.
            pageable: bytes per second of copies from memory that is not page-locked.
            pinned: bytes per second of those from page-locked memory.
        """
        self.depth, self.pageable, self.pinned = depth, pageable, pinned
        self.default = Stream()
        self.streams = [self.default]
        self.index = torch.device("cuda", 0)

    def compute(self, seconds: float, kernels: int = 1, stream: Stream | None = None) -> None:
        """Launch kernels that take so long together."""
        (stream or self.default).launch(seconds, kernels, self.depth)

    def copy(self, size: int, *, pinned: bool = False, stream: Stream | None = None) -> None:
        """A copy to the device: from pageable memory the host waits for its end, behind all that was queued."""
        self.compute(size / (self.pinned if pinned else self.pageable), stream=stream)
        if not pinned:
            (stream or self.default).synchronize()

    def item(self) -> None:
        """What `loss.item()` does: wait for all that was queued in the current stream."""
        self.default.synchronize()

    def new_stream(self) -> Stream:
        """A side stream."""
        self.streams.append(Stream())
        return self.streams[-1]

    def synchronize(self, *_: object) -> None:
        """Wait for all streams."""
        for stream in self.streams:
            stream.synchronize()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Let torch.cuda speak of this device."""
        device = self

        class Event:
            def __init__(self, **_: object) -> None:
                self.time = 0.0

            def record(self, stream: Any = None) -> None:
                self.time = max(time.perf_counter(), (stream or device.default).done)

            def query(self) -> bool:
                return time.perf_counter() >= self.time

            def synchronize(self) -> None:
                _sleep_until(self.time)

            def elapsed_time(self, end: "Event") -> float:
                return 1e3 * (end.time - self.time)

        for name, value in {
            "Event": Event,
            "synchronize": self.synchronize,
            "current_stream": lambda *_: self.default,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "current_device": lambda: 0,
            "default_generators": (),
            "is_bf16_supported": lambda **_: True,
            "max_memory_allocated": lambda *_: 0,
            "get_device_name": lambda *_: "an emulated GPU",
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: SimpleNamespace(name="an emulated GPU", major=9, minor=0, total_memory=8 * 10**10),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return self
