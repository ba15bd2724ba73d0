"""A clock that stands still while the thread waits for a core: the time that a program would take on a machine of its own (Linux)."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

SCHEDULER = "/proc/self/task/{}/schedstat"
"""The second number is the nanoseconds for which a thread waited for a core."""


class UndisturbedClock:
    """The time of the thread that makes it. Other threads may read it, too.

    The kernel counts a wait when it has ended: who reads the clock during the wait sees a later time than the thread does after it.
    So each thread has a latest reading of its own, and those of a sampler do not set the clock of the training thread forward.

    A program that waits for processes of its own, such as workers of a loader, goes by real time: they go on while it waits for a core.
    """

    def __init__(self, *, alone: bool = True) -> None:
        """Begin with what the thread has waited so far.

        Args:
            alone: is the program this process alone? Else this is the real clock.
        """
        self._alone = alone
        self._file = os.open(SCHEDULER.format(threading.get_native_id()), os.O_RDONLY)
        self._real, self._ahead = time.perf_counter_ns, 0
        self._last: dict[int, int] = {}

    def _waited(self) -> int:
        return int(os.pread(self._file, 64, 0).split()[1]) if self._alone else 0

    def _passed(self) -> int:
        waited = self._waited()
        while True:
            now, before = self._real(), waited
            if (waited := self._waited()) == before:
                return now - waited + self._ahead

    def nanoseconds(self) -> int:
        """Since some moment; never less than before in the same thread."""
        thread = threading.get_ident()
        self._last[thread] = latest = max(self._last.get(thread, 0), self._passed())
        return latest

    def seconds(self) -> float:
        return self.nanoseconds() / 1e9

    def advance(self, seconds: float) -> None:
        """Let it be no earlier than that."""
        self._ahead += max(0, round(seconds * 1e9) - self._passed())

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, it stands still."""
        before = self.nanoseconds()
        try:
            yield
        finally:
            self._ahead -= self._passed() - before
            self._last[threading.get_ident()] = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take this clock for the host's. Modules that keep `time.perf_counter` must not be imported yet."""
        patch.setattr(time, "perf_counter", self.seconds)
        patch.setattr(time, "perf_counter_ns", self.nanoseconds)


def undisturbed_machine(patch: pytest.MonkeyPatch, clock: UndisturbedClock) -> None:
    """Let the library measure as on a machine of its own: nobody takes a core, and the clocks of ranks that meet are equal."""
    from workbench.core.system_load import LoadMeter, Noise, RunQueueDelay, usable_cores
    from workbench.diagnosis.measure import fetch_meter
    from workbench.harness.peers import Peers

    def noise(self: LoadMeter, spread: float = 0.0, gpu: tuple[str, ...] = ()) -> Noise:
        return Noise(cores=usable_cores(), foreign=0.0, spread=spread, gpu=gpu)

    def gather(self: Peers, value: Any) -> list[Any]:
        with clock.stopped():  # ranks on cores of their own would come at these times
            both = usual(self, (value, clock.seconds()))
        clock.advance(max(seconds for _, seconds in both))
        return [value for value, _ in both]

    usual = Peers.gather
    for name in ("read", "own"):
        patch.setattr(RunQueueDelay, name, lambda self: 0.0)
    patch.setattr(fetch_meter, "_delay", lambda: 0.0)
    patch.setattr(LoadMeter, "noise", noise)
    patch.setattr(Peers, "gather", gather)
    patch.setattr(Peers, "barrier", lambda self: gather(self, None))
