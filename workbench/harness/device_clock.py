"""Times steps on the clock of the device that computes them. If kernels are queued, the host's times are not those of the steps.

A step on a GPU returns as soon as its kernels are queued. What the host's clock shows is then when the queue was full, or when a line such
as `loss.item()` waited for all that was queued: that one call seems to take many steps, the others nothing. An event at the end of each
step says when the device got there, and two of them how long a step took.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

COVERED, COVERED_SECONDS = 0.9, 1e-3
"""The events of a block cover its time on the device. Where they cover less than this fraction, and so many seconds are missing, the work
runs on streams that the current one does not wait for, and no single step can be timed. Chosen: to wait for an idle device takes some 20
µs. With half as much missing, few more blocks have no single steps, in which stalls would show; with twice, a step may be measured a fifth
too short."""


def is_asynchronous(device: torch.device) -> bool:
    """Does the host run ahead of this device?"""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if is_asynchronous(device):
        torch.cuda.synchronize(device)


class StepClock(Protocol):
    """Times successive steps."""

    def mark(self) -> None:
        """Mark the end of a part of a step."""

    def read(self) -> tuple[list[float], float]:
        """Seconds between successive marks, the start being the first, and their sum. The list is empty if they cannot be distinguished."""


class HostClock:
    """Times steps of a device that does not run behind the host."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._marks = now, [now()]

    def mark(self) -> None:
        """Mark the end of a part of a step."""
        self._marks.append(self._now())

    def read(self) -> tuple[list[float], float]:
        """Seconds between successive marks, from the start on, and the total seconds."""
        return [end - start for start, end in pairwise(self._marks)], self._marks[-1] - self._marks[0]


class DeviceClock:
    """Times successive steps by events on the device's current stream. The host does not wait before `read`.

    Time runs from where the device has done what was queued before: neither filling the queue nor emptying it counts. A wait for data that
    is hidden behind queued work takes no time here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._events = [self._now()]

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def mark(self) -> None:
        """Queue an event, which records the time when the device has done all earlier work."""
        self._events.append(self._now())

    def read(self) -> tuple[list[float], float]:
        """Wait for the device. Nothing else may wait for it before, or work on other streams is not seen.

        That work is what the device still does when the last mark has passed: a host that sleeps until then may get its core late, and
        whatever it recorded from there on would count its delay as the device's. So the time without marks begins when the host is awake.

        Returns:
            Seconds up to each mark from the one before, or from the start; none where the work ran on streams that the current one did not
            wait for. And the seconds of all.
        """
        self._events[-1].synchronize()
        awake = self._now()
        synchronize(self._device)
        last = self._now()
        last.synchronize()
        *marks, begin, end = [self._events[0].elapsed_time(event) / 1e3 for event in [*self._events, awake, last]]  # ms → s
        if end - begin > max((1 - COVERED) * end, COVERED_SECONDS):
            return [], end
        return [max(0.0, end - start) for start, end in pairwise(marks)], marks[-1]


def current_device() -> torch.device:
    """The CUDA device in use by this process, or the CPU."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")


def step_clock(device: torch.device, now: Callable[[], float]) -> StepClock:
    """The clock for steps on this device: CUDA events, or the host's clock on a CPU."""
    return DeviceClock(device) if is_asynchronous(device) else HostClock(now)
