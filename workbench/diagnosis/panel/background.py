"""Runs one experiment at a time in a thread, with a clock that shows how long it runs and a button that stops it."""

import threading
import time
from collections.abc import Callable

import ipywidgets

from workbench.diagnosis.panel import html
from workbench.runs.failure import RunError
from workbench.runs.panel import html as faces
from workbench.runs.run import Run, on_run_started

TICK = 0.5
"""Seconds between two words about what runs."""
STOP = "End all processes of what runs now, and forget what it found so far"


class Stopped(BaseException):
    """Stop was pressed. No Exception: else a climb would take it for a remedy that failed, and try the next one."""


class Background:
    """Runs experiments in a thread, one at a time: a callback returns at once, since the cells of a notebook may wait for its thread.

    Attributes:
        busy: something runs.
        status, problem: HTML: what runs and for how long; what went wrong.
        stop: the button; it shows while something runs.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        """
        Args:
            changed: called when something begins and when it has ended.
        """
        self._changed, self._lock = changed, threading.RLock()
        self.busy, self._asked, self._runs = False, False, list[Run]()
        self.status, self.problem = ipywidgets.HTML(), ipywidgets.HTML()
        self.stop = ipywidgets.Button(description="Stop", icon="stop", tooltip=STOP).add_class("wb-stop")
        self.stop.layout.display = "none"
        self.stop.on_click(self._stop)

    def start(self, what: str, work: Callable[[], None], budget_s: float, *, endless: str = "") -> None:
        """Run something, unless something runs.

        Args:
            what: for people.
            work: it.
            budget_s: seconds it may take, about.
            endless: why it cannot be stopped; empty = it can.
        """
        with self._lock:
            if self.busy:
                return
            self.busy, self._asked, self._runs = True, False, []
            self.problem.value, self.status.value = "", html.waiting(what, 0.0, budget_s)
            self.stop.description, self.stop.disabled, self.stop.tooltip = "Stop", bool(endless), endless or STOP
            self.stop.layout.display = None
            self._changed()
        threading.Thread(target=self._run, args=(what, work, budget_s), name="doctor", daemon=True).start()

    def heed(self) -> None:
        """To be called by what runs, where it can end.

        Raises:
            Stopped: Stop was pressed.
        """
        if self._asked:
            raise Stopped

    def _run(self, what: str, work: Callable[[], None], budget_s: float) -> None:
        over = threading.Event()

        def show_time() -> None:
            begin = time.monotonic()
            while not over.wait(TICK):
                self.status.value = html.waiting(what, time.monotonic() - begin, budget_s)

        clock = threading.Thread(target=show_time, name="doctor's clock", daemon=True)
        clock.start()
        last = ""
        try:
            with on_run_started(self._launched):
                work()
        except Stopped:
            last = html.stopped(what)
        except RunError as error:
            if self._runs and self._runs[-1].state == "stopped":
                last = html.stopped(what)
            else:
                self.problem.value = faces.failure(error.failure)
        except Exception as error:  # whatever a user's step raises belongs into the panel: nobody reads what a thread leaves behind
            self.problem.value = faces.alert(str(error), f"{type(error).__name__}: ")
        finally:
            over.set()
            clock.join()
            with self._lock:
                self.busy, self.status.value = False, last
                self.stop.layout.display = "none"
                self._changed()

    def _launched(self, run: Run) -> None:
        """Remember what is to be stopped. Either this sees that Stop was pressed, or `_end` sees the run."""
        self._runs.append(run)
        if self._asked:
            run.stop()
            raise Stopped

    def _stop(self, _button: object) -> None:
        self._asked = True
        self.stop.disabled, self.stop.description = True, "Stopping"
        threading.Thread(target=self._end, args=(self._runs,), name="doctor's stop", daemon=True).start()

    def _end(self, runs: list[Run]) -> None:
        try:
            for run in tuple(runs):
                run.stop()
        except (TimeoutError, OSError) as error:
            self.problem.value = faces.alert(str(error))
            self.stop.disabled, self.stop.description = False, "Stop"
