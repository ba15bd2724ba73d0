"""Records marks, a clock reading and a code each, where the phases of a training step begin and end; `steps.py` turns them into seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
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
    unread: bool
    """Has its pass ended, and the device not yet finished it?"""

    def now(self) -> Any:
        """The stamp of a mark. Nothing else runs inside a step."""

    def read(self, *, at_once: bool = False) -> None:
        """Read the times of the stamps that are known by now. Called on the training thread: each step, and `at_once` when a pass ends."""

    def take(self) -> tuple[list[int], bytes]:
        """Remove and return the marks whose time is known: nanoseconds and codes. Safe in another thread."""

    def settle(self) -> None:
        """Wait until the times of all marks are known."""


class HostRecorder:
    """Records marks by the host's clock: a stamp is the time in nanoseconds."""

    clock: Literal["host", "device"] = "host"
    device: int | None = None
    unread: bool = False

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now, self.marks = now, list[int]()

    def read(self, *, at_once: bool = False) -> None:
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


READ_STEPS, READ_SECONDS = 16, 0.05
"""Steps, or seconds of steps, that are read at once: one question to the driver serves all, and only the first finds cold caches."""


class DeviceRecorder:
    """Records marks on a device's current stream: a stamp is an event, so a phase is the time the device spent in it. The host never waits.

    The events of a whole step are read when its last one has happened, at some later `next()`, on the training thread: reading them from
    another thread would break a CUDA graph capture that goes on meanwhile. Events on a side stream may lie before their neighbour on the
    main stream (a copy hidden behind compute): such an interval is 0.

    Events of one stream happen in order, so the last one of several steps answers for all; of a step on several streams, all are asked.
    """

    clock: Literal["host", "device"] = "device"

    def __init__(
        self,
        new_event: Callable[[], Event],
        capturing: Callable[[], bool] = lambda: False,
        *,
        stream: "Callable[[int | None], torch.cuda.Stream | None]" = lambda device: None,
        device: int | None = None,
        kind: Any = None,
    ) -> None:
        """Start without marks.

        Args:
            new_event: Makes an event that notes the time.
            capturing: Is a CUDA graph being captured just now? Not asked on the default stream, on which nothing can be captured.
            stream: The current stream of a device, given by its index.
            device: The device to mark, which need not be the current one of this thread.
            kind: The type whose methods are called, one of which the events are; None = each event's own.
        """
        self._new_event, self._capturing, self._stream, self.device = new_event, capturing, stream, device
        self._record: Callable[[Event, Any], None] = kind.record if kind else lambda event, stream: event.record(stream)
        self._elapsed: Callable[[Event, Event], float] = kind.elapsed_time if kind else lambda event, end: event.elapsed_time(end)
        self.marks: list[Any] = []
        self._free: list[Event] = []
        self._turns: deque[tuple[list[Any], bool]] = deque()  # marks from one `next()` to the following one; on more than one stream?
        self._enough, self._read_at = READ_STEPS, 0.0  # the number of turns, and the time, from which on they are read
        self._on: Any = None
        self._switched, self._can_capture, self.unread = False, True, False
        self._last: Event | None = None
        self._raw = self._time = 0  # ns since the first event: as read, and never running backwards
        self._done: list[int] = []

    def now(self) -> Event | None:
        """Let the device note the time when it reaches this point of its stream."""
        stream = self._stream(self.device)
        if stream is not self._on:
            self._switched |= self._on is not None
            self._on, self._can_capture = stream, getattr(stream, "cuda_stream", None) != 0
        if self._can_capture and self._capturing():
            return None  # an event recorded into a CUDA graph has no time of its own
        event = self._free.pop() if self._free else self._new_event()
        self._record(event, stream)
        return event

    def read(self, *, at_once: bool = False) -> None:
        self._end_turn()
        if at_once or len(self._turns) >= self._enough or time.monotonic() >= self._read_at:
            for _ in range(0 if at_once and self._capturing() else self._over()):  # a pass may be left inside a capture
                self._read_turn()
            self.unread = at_once and bool(self._turns)
            self._enough, self._read_at = len(self._turns) + READ_STEPS, time.monotonic() + READ_SECONDS

    def _over(self) -> int:
        """The number of turns that are over on the device, which is asked and not waited for; found by bisection."""
        turns = [*self._turns]
        over, most = 0, len(turns)
        first = most  # where the device keeps up, the last turn answers for all
        while over < most:
            latest_first = (event for marks, _ in reversed(turns[over:first]) for event in marks[-2::-2] if event is not None)
            several = any(several for _, several in turns[over:first])
            if all(event.query() for event in islice(latest_first, None if several else 1)):
                over = first
            else:
                most = first - 1
            first = (over + most + 1) // 2
        return over

    def take(self) -> tuple[list[int], bytes]:
        return _take(self._done)

    def settle(self) -> None:
        self._end_turn()
        while self._turns:
            for event in filter(None, self._turns[0][0][::2]):
                event.synchronize()
            self._read_turn()
        self.unread = False

    def _end_turn(self) -> None:
        marks = self.marks[:]
        del self.marks[: len(marks)]
        self._turns.append((marks, self._switched))
        self._switched = False

    def _read_turn(self) -> None:
        marks, done, elapsed = self._turns.popleft()[0], list[int](), self._elapsed
        last, raw, now = self._last, self._raw, self._time
        for event, code in zip(marks[::2], marks[1::2], strict=True):
            if event is None:
                continue
            if last is not None:
                raw += round(elapsed(last, event) * 1e6)  # ms → ns
                now = max(now, raw)
                self._free.append(last)
            last = event
            done += (now, code)
        self._last, self._raw, self._time = last, raw, now
        self._done += done  # at once: another thread takes them


def _current_stream(torch: Any) -> "Callable[[int | None], torch.cuda.Stream | None]":
    """`torch.cuda.current_stream`, with each stream made once: making it anew is half the cost of a mark."""
    pointer = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if pointer is None:
        return torch.cuda.current_stream  # type: ignore[no-any-return]
    known: dict[int, Any] = {}

    def current(device: int | None) -> Any:
        device = torch.cuda.current_device() if device is None else device
        key = pointer(device) or ~device  # the default stream of each device is 0
        stream = known.get(key)
        if stream is None:
            stream = known[key] = torch.cuda.current_stream(device)
        return stream

    return current


def new_recorder(device: "torch.device | str | None" = None) -> MarkRecorder:
    """A recorder for work on `device`, without an index the current one; None = on the device's clock if this process uses CUDA already."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_initialized() if device is None else str(device).startswith("cuda")):
        return HostRecorder()
    cuda = torch.cuda
    index, below = torch.device(device or "cuda").index, cuda.Event.__mro__[1]
    return DeviceRecorder(
        lambda: cuda.Event(enable_timing=True),
        cuda.is_current_stream_capturing,
        stream=_current_stream(torch),
        device=cuda.current_device() if index is None else index,
        kind=below if hasattr(below, "elapsed_time") else cuda.Event,  # without torch's wrappers in Python
    )
