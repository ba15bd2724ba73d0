"""Records marks, a clock reading and a code each, where the phases of a training step begin and end; `steps.py` turns them into seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch


DATA_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(6)
"""Codes that begin a phase, numbered as in `core.vocabulary.PHASES`."""
END_PHASE = 6
"""Back to the phase around."""
END_FORWARD = 7
"""Back to the phase around; what follows is the loss, and counts as forward, if a backward comes next."""
NEXT = 8
"""The loop asks its loader for a batch."""
BATCH = 9
"""The batch is there."""
AWAY = 10
"""Another loop begins inside this one. Its time is `other` here, and marks mean nothing until BACK."""
BACK = 11
"""The inner loop has ended."""
IDLE = 12
"""From here on time belongs to no step, until NEXT."""
END = 13
"""The loop has ended, or was left."""
BORDER = 14
"""Right after a NEXT: there is no loader, and so nothing was waited for."""
OWN_BACKWARD = 15
"""Begins backward, from a loss that the model returned: what came between the two is `other`, such as the next batch being made."""

Marks = list[Any] | deque[Any]
"""Stamp, code, stamp, code, … A stamp and its code are added at once, so that no thread and no signal handler sees half a mark:

    now = recorder.now  # Python 3.11 calls a local faster than an attribute
    recorder.marks.extend((now(), code))

These two lines are repeated where they run several times in a step: another function call would be a good part of their cost.
"""

NOWHERE: Marks = deque(maxlen=0)
"""Where marks go while no loop runs: none is kept."""


class MarkRecorder(Protocol):
    """The marks of one loop, in the order they were made."""

    clock: Literal["host", "device"]
    device: int | None
    """The index of the CUDA device whose clock this is, if known."""
    marks: list[Any]

    def now(self) -> Any:
        """The stamp of a mark. Nothing else runs inside a step."""

    def read(self) -> None:
        """Read the times of the stamps that are known by now. Called once per step, on the training thread."""

    def take(self) -> tuple[list[int], bytes]:
        """Remove and return the marks whose time is known: nanoseconds and codes. Safe in another thread."""

    def settle(self) -> None:
        """Wait until the times of all marks are known."""


class HostRecorder:
    """Records marks by the host's clock: a stamp is the time in nanoseconds."""

    clock: Literal["host", "device"] = "host"
    device: int | None = None

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now, self.marks = now, list[int]()

    def read(self) -> None:
        pass

    def take(self) -> tuple[list[int], bytes]:
        return _take(self.marks)

    def settle(self) -> None:
        pass


def _take(marks: list[int]) -> tuple[list[int], bytes]:
    count = len(marks)  # more may be added meanwhile
    times, codes = marks[:count:2], bytes(marks[1:count:2])
    del marks[:count]
    return times, codes


class Event(Protocol):
    """The methods used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: "Event") -> float: ...


class DeviceRecorder:
    """Records marks on a device's current stream: a stamp is an event, so a phase is the time the device spent in it. The host never waits.

    The events of a whole step are read when its last one has happened, at some later `next()`, on the training thread: reading them from
    another thread would break a CUDA graph capture that goes on meanwhile. Events on a side stream may lie before their neighbour on the
    main stream (a copy hidden behind compute): such an interval is 0.

    Events of one stream happen in order, so the last one of a step answers for all; where a step marks several streams, all are asked.
    """

    clock: Literal["host", "device"] = "device"

    def __init__(
        self,
        new_event: Callable[[], Event],
        capturing: Callable[[], bool] = lambda: False,
        *,
        stream: "Callable[[int | None], torch.cuda.Stream | None]" = lambda device: None,
        device: int | None = None,
    ) -> None:
        """Start without marks.

        Args:
            new_event: Makes an event that notes the time.
            capturing: Is a CUDA graph being captured just now?
            stream: The current stream of a device, given by its index.
            device: The device to mark, which need not be the current one of this thread.
        """
        self._new_event, self._capturing, self._stream, self.device = new_event, capturing, stream, device
        self.marks: list[Any] = []
        self._free: list[Event] = []
        self._turns: deque[list[tuple[Event, int]]] = deque()  # marks that are not read yet, from one `next()` to the following one
        self._several: deque[bool] = deque()  # of each of them: is it on more than one stream?
        self._on: Any = None
        self._switched = False
        self._last: Event | None = None
        self._raw = self._time = 0  # ns since the first event: as read, and never running backwards
        self._done: list[int] = []

    def now(self) -> Event | None:
        """Let the device note the time when it reaches this point of its stream."""
        if self._capturing():
            return None  # an event recorded into a CUDA graph has no time of its own
        event = self._free.pop() if self._free else self._new_event()
        stream = self._stream(self.device)
        if stream is not self._on:
            self._on, self._switched = stream, True
        event.record(stream)
        return event

    def read(self) -> None:
        self._end_turn()
        while self._turns and self._has_happened():
            self._read_turn()

    def _has_happened(self) -> bool:
        turn = self._turns[0] if self._several[0] else self._turns[0][-1:]
        return all(event.query() for event, _ in reversed(turn))  # asks, does not wait

    def take(self) -> tuple[list[int], bytes]:
        return _take(self._done)

    def settle(self) -> None:
        self._end_turn()
        while self._turns:
            for event, _ in self._turns[0]:
                event.synchronize()
            self._read_turn()

    def _end_turn(self) -> None:
        marks = self.marks[:]
        del self.marks[: len(marks)]
        self._turns.append([(event, code) for event, code in zip(marks[::2], marks[1::2], strict=True) if event])
        self._several.append(self._switched)
        self._switched = False

    def _read_turn(self) -> None:
        self._several.popleft()
        for event, code in self._turns.popleft():
            if self._last:
                self._raw += round(self._last.elapsed_time(event) * 1e6)  # ms → ns
                self._time = max(self._time, self._raw)
                self._free.append(self._last)
            self._last = event
            self._done.extend((self._time, code))


def _current_stream(torch: Any) -> "Callable[[int | None], torch.cuda.Stream | None]":
    """`torch.cuda.current_stream`, with each stream made once: making it anew is half the cost of a mark."""
    raw = getattr(torch._C, "_cuda_getCurrentStream", None)
    if raw is None:
        return torch.cuda.current_stream  # type: ignore[no-any-return]
    known: dict[tuple[int, int, int], Any] = {}

    def current(device: int | None) -> Any:
        key = raw(torch.cuda.current_device() if device is None else device)
        stream = known.get(key)
        if stream is None:
            stream = known[key] = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])
        return stream

    return current


def new_recorder(device: "torch.device | str | None" = None) -> MarkRecorder:
    """A recorder for work on `device`, without an index the current one; None = on the device's clock if this process uses CUDA already."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_initialized() if device is None else str(device).startswith("cuda")):
        return HostRecorder()
    cuda = torch.cuda
    index = torch.device(device or "cuda").index
    return DeviceRecorder(
        lambda: cuda.Event(enable_timing=True),
        cuda.is_current_stream_capturing,
        stream=_current_stream(torch),
        device=cuda.current_device() if index is None else index,
    )
