"""Delays Ctrl-C while torch calls back into Python, until a moment at which an exception can pass through torch.

Within a dispatch mode torch calls Python at many places. At some of them an exception ends the process (C++'s `std::terminate`; seen with
torch 2.13, also where a mode's own `__torch_dispatch__` raised it). In the callbacks of weak references it is swallowed, and code that
restores state is left half done.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

PATIENCE = 5.0
"""Seconds after which a second Ctrl-C is delivered at once, at whatever risk."""
_LIBRARIES = {"torch", "workbench", "numpy", *sys.stdlib_module_names}
"""Packages whose code torch may call from where no exception may pass."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Inside, in the main thread, SIGTERM raises Terminated, so that what Ctrl-C ends ends in the same way.

    Raises:
        Terminated: it came.
    """

    def handle(*_: object) -> None:
        raise Terminated("SIGTERM")

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Block:
    """A block inside which interrupts are deferred. The main thread, which alone handles signals, is in one at most."""

    def __init__(self, before: Any) -> None:
        self._before = before  # the handler that was there
        self._since: float | None = None  # when the interrupt came that waits
        self.at_once = False

    def __enter__(self) -> None:
        global _waiting
        try:
            _waiting = self
            signal.signal(signal.SIGINT, self.note)
        except BaseException:  # one that came just before is handled here, as it would have been before
            _waiting = None
            raise

    def __exit__(self, *_: object) -> None:
        global _waiting
        try:
            if signal.getsignal(signal.SIGINT) == self.note:  # else the block has set a handler of its own, which is to stay
                signal.signal(signal.SIGINT, self._before)
        finally:
            _waiting = None
        self.deliver_pending(sys._getframe())

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        if self._may_come(frame):
            self._deliver(frame)
        elif self._since is None:
            self._since = time.monotonic()
            _tell()

    def _may_come(self, frame: FrameType | None) -> bool:
        if _waiting is not self:
            return True  # the block is over, and somebody has kept its handler
        package = _package(frame)
        if frame is None or frame.f_globals is globals():
            return False  # the block begins or ends
        if self._since is not None and time.monotonic() - self._since > PATIENCE:
            return True
        return not _in_callback(frame) if self.at_once else package not in _LIBRARIES

    def deliver_pending(self, frame: FrameType | None) -> None:
        """Deliver an interrupt that was deferred."""
        if self._since is not None:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None) -> None:
        """Call the handler that was there before; as a rule it raises KeyboardInterrupt."""
        self._since = None
        self._before(signal.SIGINT, frame)


_waiting: _Block | None = None


class _Within:
    """A part of a block in which interrupts come at once, or, nested in such a part, are deferred again."""

    def __init__(self, block: _Block, allow_interrupts: bool) -> None:
        self._block, self._at_once, self._before = block, allow_interrupts, block.at_once

    def __enter__(self) -> None:
        self._deliver()
        self._block.at_once = self._at_once

    def __exit__(self, *_: object) -> None:
        self._block.at_once = self._before
        self._deliver()

    def _deliver(self) -> None:
        if self._at_once:
            self._block.deliver_pending(sys._getframe(1))


def _package(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _in_callback(frame: FrameType | None) -> bool:
    """Does module `weakref` call this, a weak dictionary or a finalizer of it, so that an exception would be swallowed?

    What a plain `weakref.ref(object, callback)` calls is not seen: no frame tells it. Python itself ignores a KeyboardInterrupt there.
    """
    while frame is not None and _package(frame) != "weakref":
        frame = frame.f_back
    return frame is not None


def _tell() -> None:
    """Print that the interrupt was not lost; nothing is raised where that fails."""
    with contextlib.suppress(Exception):
        print(
            f"interrupt noted: it comes after the module that is running; another one after {PATIENCE:.0f} s comes at once",
            file=sys.stderr,
            flush=True,
        )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def defer_interrupts() -> AbstractContextManager[None]:
    """Inside, an interrupt waits for `deliver_interrupt`, for the user's own code or for the end of the block; a line on stderr says so.

    Nothing changes in other threads than the main one, or where interrupts are not handled in Python. A handler that is set inside is
    called at once, and stays. `asyncio.run` inside sets none, since it looks for Python's own: there an interrupt is deferred too.
    """
    before = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or (_waiting is None and not callable(before)):
        return contextlib.nullcontext()
    return _Block(before) if _waiting is None else _Within(_waiting, allow_interrupts=False)


def allow_interrupts() -> AbstractContextManager[None]:
    """Inside, interrupts come at once, one that was deferred too: for parts of `defer_interrupts` that do not call torch."""
    return _Within(_waiting, allow_interrupts=True) if _waiting is not None and _in_main_thread() else contextlib.nullcontext()


def deliver_interrupt() -> None:
    """Deliver an interrupt that was deferred. Call it where an exception may be raised, never within the call of an operator."""
    if _waiting is not None and _in_main_thread():
        _waiting.deliver_pending(sys._getframe(1))
