"""Interrupts: Ctrl-C while torch asks Python what to do waits for a moment at which an exception can pass through torch.

Within a dispatch mode torch calls Python at many places. At some of them an exception ends the process (C++'s `std::terminate`; seen with
torch 2.13, also where a mode's own `__torch_dispatch__` raised it), in the callbacks of weak references it is swallowed, and in code that
puts things back it leaves them as they are.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

PATIENCE = 5.0
"""Seconds after which a second Ctrl-C is heard at once, whatever comes of it: no moment came."""
_NOT_THEIRS = {"torch", "workbench", "numpy", *sys.stdlib_module_names}
"""Packages whose code may be called by torch from where no exception may come."""


class _Waiting:
    """The interrupt that waits, of which there is one in a process; signals are handled in its main thread."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.since: float | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        impatient = self.since is not None and time.monotonic() - self.since > PATIENCE
        if impatient or (frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THEIRS):
            self.deliver(frame)
        elif self.since is None:
            self.since = time.monotonic()

    def deliver(self, frame: FrameType | None) -> None:
        """Let the handler that was there before have it; as a rule it raises KeyboardInterrupt."""
        self.since = None
        self.handler(signal.SIGINT, frame)


_waiting = _Waiting()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, an interrupt waits for `here`, for code of the user's own, or for the end of the block; elsewhere than in the main thread
    nothing is changed, and where interrupts are not handled in Python.
    """
    before = signal.getsignal(signal.SIGINT)
    if _waiting.handler is not None or threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    _waiting.handler = before
    signal.signal(signal.SIGINT, _waiting.note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _waiting.handler, came, _waiting.since = None, _waiting.since is not None, None
        if came:
            before(signal.SIGINT, sys._getframe())


def here() -> None:
    """A moment at which an exception may be raised: an interrupt that waits is delivered. Within the call of an operator there is none."""
    if _waiting.since is not None and threading.current_thread() is threading.main_thread():
        _waiting.deliver(sys._getframe(1))
