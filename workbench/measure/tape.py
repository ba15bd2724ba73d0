"""Tapes: the borders between phases as bare marks, a clock and a code each; `steps` turns them into seconds later."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

DATA_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(6)
"""Codes that begin a phase, numbered as in `timeline.PHASES`."""
END_PHASE = 6
"""Back to the phase around."""
END_FORWARD = 7
"""Back to the phase around; what follows is the loss, and counts as forward, if a backward comes next."""
NEXT = 8
"""The loop asks its loader for a batch."""
BATCH = 9
"""The batch is there."""
AWAY = 10
"""Another loop begins inside this one: its time is `other` here, and marks mean nothing until BACK."""
BACK = 11
"""The inner loop is over."""
IDLE = 12
"""From here on time belongs to no step, until NEXT."""
END = 13
"""The loop is over, or was left."""
BORDER = 14
"""Right after a NEXT: there is no loader, and so nothing was waited for."""

Mark = Callable[[int], None]
NOWHERE: Mark = deque[int](maxlen=0).append
"""The mark of a loop that is not running: it keeps nothing."""


class Tape(Protocol):
    """Marks of one loop in the order they were made."""

    clock: Literal["host", "device"]

    def mark(self, code: int, /) -> None:
        """Note the time under a code: the only thing that happens inside a step."""

    def take(self) -> tuple[list[int], bytes]:
        """Hand over, once, the marks whose time is known: nanoseconds and codes. Safe in another thread than `mark`."""

    def settle(self) -> None:
        """Wait until the times of all marks are known."""


class HostTape:
    """Marks by the host's clock, in nanoseconds."""

    clock: Literal["host", "device"] = "host"

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._marks: list[int] = []  # time, code, time, code, … (half the cost of two arrays)
        add = self._marks.append

        def mark(code: int) -> None:
            add(now())
            add(code)

        self.mark: Mark = mark

    def take(self) -> tuple[list[int], bytes]:
        whole = len(self._marks) // 2 * 2  # a mark may be half written
        marks = self._marks[:whole]
        del self._marks[:whole]
        return marks[::2], bytes(marks[1::2])

    def settle(self) -> None:
        pass


class Event(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: "Event") -> float: ...


class DeviceTape:
    """Marks as events on the device's current stream: a phase is the time the device spent in it, and the host never waits.

    The events of a whole step are read when its last one has happened, at some later `next()`, on the training thread: reading them from
    another thread would break a CUDA graph capture that goes on meanwhile. Events on a side stream may lie before their neighbour on the
    main stream (a copy hidden behind compute): such an interval is 0.
    """

    clock: Literal["host", "device"] = "device"

    def __init__(self, new_event: Callable[[], Event], capturing: Callable[[], bool] = lambda: False) -> None:
        self._new_event, self._capturing = new_event, capturing
        self._free: list[Event] = []
        self._queue: deque[tuple[Event, int]] = deque()
        self._groups: deque[int] = deque()  # numbers of queued marks that end with a NEXT
        self._open = 0  # marks behind the last of them
        self._last: Event | None = None
        self._raw = self._time = 0  # ns since the first event: as read, and never running backwards
        self._done = HostTape(lambda: self._time)

    def mark(self, code: int, /) -> None:
        if self._capturing():
            return  # an event recorded into a CUDA graph has no time of its own
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._queue.append((event, code))
        self._open += 1
        if code == NEXT:
            self._groups.append(self._open)
            self._open = 0
            while self._groups and self._queue[self._groups[0] - 1][0].query():  # asks, does not wait
                if not self._read(self._groups[0]):
                    break
                self._groups.popleft()

    def _read(self, count: int) -> bool:
        """Move the first `count` queued marks to the readable ones, unless one of them has not happened yet on its stream."""
        if not all(self._queue[i][0].query() for i in range(count)):
            return False
        for _ in range(count):
            event, code = self._queue.popleft()
            if self._last is not None:
                self._raw += round(self._last.elapsed_time(event) * 1e6)  # ms → ns
                self._time = max(self._time, self._raw)
                self._free.append(self._last)
            self._last = event
            self._done.mark(code)
        return True

    def take(self) -> tuple[list[int], bytes]:
        return self._done.take()

    def settle(self) -> None:
        for event, _ in self._queue:
            event.synchronize()
        self._read(len(self._queue))
        self._groups.clear()
        self._open = 0


def new_tape(device: str | None = None) -> Tape:
    """A tape for work on `device` ("cpu", "cuda", …); None: the device's clock if this process uses CUDA already."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_initialized() if device is None else device.startswith("cuda")):
        return HostTape()
    return DeviceTape(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)
