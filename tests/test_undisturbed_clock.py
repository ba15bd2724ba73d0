"""The clock of the emulated GPU stands still while its thread waits for a core, whoever reads it meanwhile."""

import sys
import threading

import pytest

from tests.undisturbed_clock import UndisturbedClock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited for a core")


class Thread:
    """The clock of a thread whose times of running and of waiting are played. Milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.waited = 0
        self.clock = UndisturbedClock()
        monkeypatch.setattr(self.clock, "_real", lambda: self.now * 10**6)
        monkeypatch.setattr(self.clock, "_waited", lambda: self.waited * 10**6)

    @property
    def milliseconds(self) -> float:
        return self.clock.nanoseconds() / 10**6

    def seen_by_another(self) -> float:
        seen: list[float] = []
        other = threading.Thread(target=lambda: seen.append(self.milliseconds))
        other.start()
        other.join()
        return seen[0]


def test_another_thread_that_reads_the_clock_during_a_wait_does_not_set_it_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts a wait when it has ended: who reads the clock before sees a later time than the thread itself does afterwards."""
    thread = Thread(monkeypatch)
    thread.now = 5
    assert thread.milliseconds == 5
    thread.now = 105
    assert thread.seen_by_another() == 105
    thread.waited = 100  # and gets its core
    assert thread.milliseconds == 5
    thread.now = 106
    assert thread.milliseconds == 6


def test_a_program_with_workers_goes_by_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = UndisturbedClock(alone=False)
    monkeypatch.setattr(clock, "_real", lambda: 7 * 10**6)
    assert clock.nanoseconds() == 7 * 10**6


def test_the_clock_of_each_thread_never_goes_back_and_can_be_set_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = Thread(monkeypatch)
    thread.now = 10
    assert thread.milliseconds == 10
    thread.waited = 3
    assert thread.milliseconds == 10
    thread.clock.advance(0.02)
    assert thread.milliseconds == 20
    with thread.clock.stopped():
        thread.now = 500
    assert thread.milliseconds == 20
    thread.now = 501
    assert thread.milliseconds == 21
