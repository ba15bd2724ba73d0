"""ThroughputDoctor: a panel that predicts the step for every knob, measures it, and proves remedies."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets

from workbench.core import units
from workbench.core.checks import check_budget
from workbench.core.display.html import Style
from workbench.diagnosis import api
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.proof import Ladder
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.step_model import Parts, StepModel
from workbench.diagnosis.panel import html
from workbench.diagnosis.panel.knobs import Knobs, WhatIf, knob_values, what_if
from workbench.diagnosis.panel.remedy_rows import RemedyRows
from workbench.runs.failure import RunError
from workbench.runs.panel import html as faces
from workbench.runs.run import Run, on_run_started
from workbench.runs.spec import RunSpec
from workbench.runs.target import Step

CLIMB = 10
"""A climb may take so many times the budget of a measurement: each of its attempts is a diagnosis and a proof."""


class ThroughputDoctor:
    """Knobs with the step that is predicted for them, beside the measured step; a verdict, its reason, and remedies that can be proved.

    Changing a knob computes a prediction and starts nothing. Measure, Prove and Climb run experiments, one at a time, in a separate thread.
    Stop ends their launches.

    Attributes:
        spec: what is measured now; None if the diagnosis is of a step in this process.
        result: the Diagnosis; None before the first measurement.
        what_if: the prediction for the current knobs; None while the knobs are as measured.
        ladder: the result of a climb.
        num_workers, prefetch_factor, micro_batch, precision, nproc_per_node: the knobs; set `.value`.
        knobs: all of them.
        measure, climb, stop: buttons.
        bars, verdict, remedies, ladder_view, problem, status: what is shown.
        widget: everything in one box.
    """

    def __init__(
        self, target: RunSpec | Diagnosis, *, budget_s: float = api.BUDGET, runs_dir: str | os.PathLike[str] | None = None
    ) -> None:
        """
        Args:
            target: a spec, or a diagnosis of one, of a script, or of a step of this process.
            budget_s: seconds that a measurement or a proof may take.
            runs_dir: where run directories go; None = `runs` in the current folder.

        Raises:
            ValueError: something else was given, or no budget.
        """
        if not isinstance(target, RunSpec | Diagnosis):
            raise ValueError(
                f"ThroughputDoctor({type(target).__name__}): a RunSpec or a Diagnosis is needed; "
                'try ThroughputDoctor(wb.RunSpec(task="clipart-resnet")) or ThroughputDoctor(wb.diagnose(step, loader))'
            )
        check_budget(budget_s, limited=True)
        self._budget, self._runs_dir = budget_s, runs_dir
        self.result: Diagnosis | None = None
        self.ladder: Ladder | None = None
        self.what_if: WhatIf | None = None
        self._earlier: WhatIf | None = None
        self._model: StepModel | None = None
        self._now: Parts | None = None
        given = target.spec if isinstance(target, Diagnosis) else target
        self.spec = given if isinstance(given, RunSpec) else None
        self._make_widgets()
        if isinstance(target, Diagnosis):
            self._take(target)
        else:
            self.knobs.set(knob_values(target))
            self.head.value = html.head(self.title)
            self._redraw()
        self._allow()

    def _make_widgets(self) -> None:
        self._background, self._holds = Background(self._allow), False
        self.status, self.problem, self.stop = self._background.status, self._background.problem, self._background.stop
        self.knobs = Knobs(self._turned)
        knobs = self.knobs.widgets
        self.num_workers, self.prefetch_factor, self.micro_batch = knobs["num_workers"], knobs["prefetch_factor"], knobs["micro_batch"]
        self.precision, self.nproc_per_node = knobs["precision"], knobs["nproc_per_node"]
        self.head, self.bars, self.verdict, self.ladder_view = (ipywidgets.HTML() for _ in range(4))
        self._rows = RemedyRows(self._prove)
        self.remedies = self._rows.box
        self.measure = ipywidgets.Button(
            description="Measure", tooltip="Run the step with the current knobs, remove its parts in turn, and measure the change"
        )
        self.climb = ipywidgets.Button(
            description="Climb", tooltip="Prove the best remedy, keep it, diagnose again, and so on until no worthwhile remedy is left"
        )
        for button, pressed in ((self.measure, self._measure), (self.climb, self._climb)):
            button.add_class("wb-go")
            button.on_click(pressed)
        buttons = ipywidgets.HBox([self.measure, self.climb, self.stop]).add_class("wb-buttons")
        top = ipywidgets.HBox([self.head.add_class("wb-status"), buttons]).add_class("wb-top")
        shown = [top, self.status, self.problem, self.knobs.box, self.bars, self.verdict, self.remedies, self.ladder_view, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-doctor")

    @property
    def proves(self) -> dict[str, ipywidgets.Button]:
        """The remedies' buttons, by name."""
        return self._rows.proves

    @property
    def chosen(self) -> RunSpec | None:
        """The spec with the current knobs; None if there is no spec."""
        return None if self.spec is None else self.knobs.turned(self.spec)

    def _turned(self) -> None:
        self._earlier = None
        self._redraw()

    # --- what is shown

    def _redraw(self) -> None:
        """Draw the bars for the current knobs: arithmetic and text only."""
        changes = self.knobs.changes
        self.what_if = None
        if changes and self._model is not None and self._now is not None:
            self.what_if = what_if(self._model, self._now, changes, self.knobs.samples)
        observed = self.result is not None and self.result.evidence.observed
        self.bars.value = html.bars(self._now, self.what_if, earlier=self._earlier, observed=observed)

    def _take(self, result: Diagnosis) -> None:
        """Show a diagnosis."""
        self.result, self._model, self._now = result, result.model, result.parts
        self.knobs.set(knob_values(self.spec) if self.spec else self._model.knobs)
        self.head.value = html.head(self.title)
        self._redraw()
        self.verdict.value = html.verdict(result)
        self._rows.show(result.remedies, result.proofs, busy=self._background.busy)

    # --- what runs

    def _measure(self, _button: object) -> None:
        self._earlier = self.what_if
        chosen = self.chosen
        here = getattr(self.result, "subject", None)

        def work() -> None:
            if chosen is not None:
                diagnosis = api.diagnose(chosen, budget_s=self._budget, runs_dir=self._runs_dir)
                self.spec = chosen
            else:
                assert isinstance(here, Step)
                diagnosis = api.diagnose(here.step, here.loader, model=here.model, optimizer=here.optimizer, budget_s=self._budget)
            self._take(diagnosis)

        self._start("measuring: parts of the step are removed in turn", work, self._budget, hold=True)

    def _prove(self, remedy: Remedy) -> None:
        work = self._rows.proof(remedy, lambda: self.result, self._budget)
        self._start(f"proving {remedy.name}, alternating with the step as it is", work, self._budget)

    def _climb(self, _button: object) -> None:
        chosen = self.chosen
        assert chosen is not None

        def work() -> None:
            ladder = api.climb(chosen, budget_s=CLIMB * self._budget, runs_dir=self._runs_dir)
            self._background.heed()  # a rung that was stopped is none that failed
            self.ladder = ladder
            self.ladder_view.value = html.ladder(self.ladder)

        self._start("climbing: the best remedy is proved and kept, repeatedly", work, CLIMB * self._budget)

    def _start(self, what: str, work: Callable[[], None], budget_s: float, *, hold: bool = False) -> None:
        """Run something, unless something runs; `hold`: the knobs are locked meanwhile."""
        if self._background.busy:
            return
        self._holds = hold
        here = isinstance(getattr(self.result, "subject", None), Step)
        endless = "" if not here else f"A step of this process cannot be stopped: it ends by itself, after about {units.seconds(budget_s)}"
        self._background.start(what, work, budget_s, endless=endless)

    def _allow(self) -> None:
        """Buttons can be pressed where there is something to run, and while nothing runs."""
        busy = self._background.busy
        here = isinstance(getattr(self.result, "subject", None), Step)
        self.measure.disabled = busy or not (self.spec or here)
        self.climb.disabled = busy or self.spec is None
        self._rows.hold(busy)
        self.knobs.hold(busy and self._holds)

    # --- how it shows itself

    @property
    def title(self) -> str:
        """What is diagnosed, in one line."""
        given = self.spec or (self.result.spec if self.result else None)
        return faces.essentials(given) if given else "a step and its loader"

    def __repr__(self) -> str:
        return f"ThroughputDoctor({self.title!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = self.widget._repr_mimebundle_(**options)
        static = html.static(self.title, self.result, self.what_if, self.ladder)
        return {**bundle, "text/plain": repr(self), "text/html": static}


TICK = 0.5
"""Seconds between two updates of the status."""
STOP = "End all processes of the current measurement, and discard what it has found"


class Stopped(BaseException):
    """Stop was pressed. Not an Exception: a climb would take that for a remedy that failed, and try the next."""


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
        """Run something, unless something runs."""
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
        """Raise Stopped if Stop was pressed; the work calls it where it can end.

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
            if self._asked:
                last = html.stopped(what)
            else:
                self.problem.value = faces.alert(str(error), f"{type(error).__name__}: ")
        finally:
            over.set()
            clock.join()
            with self._lock:
                self.busy, self.status.value = False, last
                self.stop.layout.display = "none"
                self._changed()

    def _launched(self, run: Run) -> None:
        """Remember the run that Stop has to end. Either this sees that Stop was pressed, or `_end` sees the run."""
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
