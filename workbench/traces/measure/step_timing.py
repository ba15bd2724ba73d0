"""Laps: what single steps take without the waiting for their batches, on the device's clock where there is one."""

import time

import torch

Mark = tuple[float, torch.cuda.Event | None]


class Lap:
    """One step, in pieces: each from where a batch is there to where the next one is asked for, or to where the step ends.

    A device works later than the host that gives it its work, so that there its own events are the clock: from the end of the work before
    the piece to the end of the work in it, or as long as the host takes where that is longer.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Nothing is marked yet.

        Args:
            device: that computes; None = the current one, if this process uses CUDA.
        """
        self._device = device
        self._begun: Mark | None = None
        self._pieces: list[tuple[Mark, Mark]] = []

    def begin(self) -> None:
        """A batch is there."""
        self._begun = self._mark()

    def pause(self) -> None:
        """The next batch is asked for, or the step is over."""
        if self._begun is not None:
            self._pieces.append((self._begun, self._mark()))
            self._begun = None

    @property
    def seconds(self) -> float | None:
        """Of all pieces, when the device is through with them; None without any."""
        return sum(_between(*piece) for piece in self._pieces) if self._pieces else None

    def _mark(self) -> Mark:
        event = None
        if torch.cuda.is_initialized() and (self._device is None or self._device.type == "cuda"):  # type: ignore[no-untyped-call]
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return time.perf_counter(), event


def seconds_of(laps: list[Lap]) -> list[float]:
    """Of those in which something was marked; waits for the device."""
    return [seconds for lap in laps if (seconds := lap.seconds) is not None]


def _between(start: Mark, end: Mark) -> float:
    (begun, first), (ended, last) = start, end
    if first is None or last is None:
        return ended - begun
    try:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    except (RuntimeError, ValueError):  # they are of two devices
        return ended - begun
