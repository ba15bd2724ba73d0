"""MemoryExplorer: a notebook panel whose knobs show what a step's memory becomes, and whether it fits."""

import threading
from typing import Any

import ipywidgets

from workbench.core.device import Device
from workbench.core.display.html import Style
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import MARGIN, Fit, usable_bytes
from workbench.memory.estimate_curves import Curves
from workbench.memory.estimator_process import SHARED, Estimator, EstimatorError, Question
from workbench.memory.panel import html as explorer_faces
from workbench.memory.panel.html import Row
from workbench.memory.panel.knobs import LENGTHS, ExplorerKnobs
from workbench.runs.panel import html as faces
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.target import read_spec

PATIENCE = 20.0
"""Seconds that a cell waits for the first estimate before it shows the explorer: what a stored notebook shows is what is there by then."""


class MemoryExplorer:
    """Knobs with the memory that is predicted for a step: against a device's capacity, by module, and over the steps.

    A changed knob starts a dry run in a separate process. For several micro-batches, and sequences or images once their slider was moved,
    dry runs are made in advance. Memory between them is known exactly, so moving the slider only draws.

    Attributes:
        spec: the given spec.
        result: the breakdown for the current knobs; None until it is estimated.
        measured: the measured memory of a run of `spec`, shown beside the prediction.
        between: True = `result` was computed from dry runs on both sides.
        micro_batch, sequence, image, accumulation, precision, optimizer, checkpointing, parallel, ranks, device: the knobs; `.value` turns
            one. `sequence` and `image` show where the batch has such a size.
        knobs: all of them.
        bars, verdict, details, problem, status: what is shown.
        widget: everything in one box.
    """

    def __init__(
        self,
        spec: RunSpec | str,
        *,
        device: str | Device = "H200",
        sequence: int | None = None,
        image: int | None = None,
        measured: MemoryBreakdown | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        """
        Args:
            spec: where the knobs stand at first; a text is the name of a task.
            device: to be fitted: a name, such as "A100-80GB", a Device, or "cpu".
            sequence: length of the batch's sequences; None = the sample's own.
            image: side of the batch's images in pixels; None = the sample's own.
            measured: what a run of the spec needed, from `wb.measure_memory`.
            estimator: the process that makes the dry runs; None = the one that all explorers share.

        Raises:
            ValueError: something else was given, or an unknown device.
        """
        spec = read_spec("MemoryExplorer", spec, because="whose task another process can build")
        _check(measured)
        if isinstance(device, str) and device != "cpu":
            device = Device.named(device).name
        self.spec, self.measured = spec, measured
        self.result: MemoryBreakdown | None = None
        self.between = False
        self._drawn: MemoryBreakdown | None = None
        self._estimator = estimator or SHARED
        self._curves, self._lock = Curves(), threading.RLock()
        self._asked = {"sequence": sequence, "image": image}
        self._axes, self._touched = ["micro_batch"], set[str]()
        self._thread: threading.Thread | None = None
        self._shown, self._last, self._crashed = threading.Event(), "", ""
        self._make_widgets(device)
        self._redraw()

    def _make_widgets(self, device: str | Device) -> None:
        self.knobs = ExplorerKnobs(self.spec, device, self._turned)
        widgets = self.knobs.widgets
        self.micro_batch, self.accumulation, self.sequence = widgets["micro_batch"], widgets["accumulation"], widgets["sequence"]
        self.image, self.precision, self.optimizer = widgets["image"], widgets["precision"], widgets["optimizer"]
        self.checkpointing, self.parallel, self.ranks = widgets["checkpointing"], widgets["parallel"], widgets["nproc_per_node"]
        self.device = widgets["device"]
        self.head, self.status, self.problem, self.verdict, self.bars, self.details = (ipywidgets.HTML() for _ in range(6))
        top = ipywidgets.HBox([self.head.add_class("wb-status"), self.status]).add_class("wb-top")
        shown = [top, self.knobs.box, self.problem, self.verdict, self.bars, self.details, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-explorer")

    # --- the question

    @property
    def chosen(self) -> RunSpec:
        """The spec with the current knobs.

        Raises:
            SpecError: the knobs do not go together.
        """
        return self.knobs.spec

    @property
    def fit(self) -> Fit | None:
        """Whether `result` fits the device; None without a result, or on a CPU."""
        return None if self.result is None or self._device is None else self.result.fits(self._device)

    @property
    def _device(self) -> Device | None:
        """The device that it should fit; None = a CPU."""
        chosen = self.knobs.device
        return None if chosen == "cpu" else chosen if isinstance(chosen, Device) else Device.named(chosen)

    def _question(self) -> Question:
        sizes = {axis: self.knobs.lengths.get(axis, self._asked[axis]) for axis in LENGTHS}
        return Question(spec=self.chosen, device=self.knobs.device, **sizes)

    def _turned(self, knob: str) -> None:
        """Called when a knob was changed: draws at once if the result is known, else has it estimated."""
        with self._lock:
            self._crashed = ""
            if knob in self._axes or knob in LENGTHS:
                self._axes = [knob, *(axis for axis in self._axes if axis != knob)]
                self._touched |= {knob} & set(LENGTHS)
            self._redraw()

    def wait(self, timeout: float = 120.0) -> "MemoryExplorer":
        """Wait until the current knobs are estimated; return the explorer itself.

        Raises:
            TimeoutError: it took longer.
        """
        if not self._shown.wait(timeout):
            raise TimeoutError(f"no estimate within {timeout:g} s; the explorer goes on, and wait(timeout=…) waits longer")
        return self

    def _words(self, question: Question) -> str:
        """A configuration in a line."""
        own = self.knobs.own
        sizes = [f"{axis}={question.along(axis)}" for axis in LENGTHS if question.along(axis) not in (None, own.get(axis))]
        return " · ".join([faces.essentials(question.spec), *sizes])

    # --- what is shown

    def _redraw(self) -> None:
        with self._lock:
            try:
                question = self._question()
            except SpecError as error:
                self._show_problem(str(error))
                return
            title = self._words(question)
            self.head.value = explorer_faces.head(title)
            if found := self._curves.estimate(question, self._axes, title):
                self._show(found.breakdown, found.between)
            elif complaint := self._curves.error(question) or self._crashed:
                self._show_problem(complaint)
            else:
                self._show_waiting()
            if not self._crashed:
                self._start()

    def _show(self, breakdown: MemoryBreakdown, between: bool) -> None:
        self.result, self.between = breakdown, between
        self.status.value = self.problem.value = ""
        self._draw(breakdown)
        self._shown.set()

    def _show_problem(self, complaint: str) -> None:
        self.result, self._drawn, self._last = None, None, complaint
        self.status.value, self.problem.value = "", faces.alert(complaint)
        self.verdict.value = self.bars.value = self.details.value = ""
        self._shown.set()

    def _show_waiting(self) -> None:
        """Show the last result paler while the next is estimated."""
        self._shown.clear()
        self.status.value, self.problem.value = explorer_faces.estimating(), ""
        self._drawn = self.result or self._drawn
        self.result = None
        if self._drawn is not None:
            self._draw(self._drawn, stale=True)

    def _draw(self, breakdown: MemoryBreakdown, *, stale: bool = False) -> None:
        if stale:
            self.verdict.value = ""
        else:
            self.verdict.value = explorer_faces.verdict(breakdown, self.fit)
        self.bars.value = explorer_faces.bars(self._rows(breakdown), self._capacity, self.device.value, stale=stale)
        self.details.value = explorer_faces.details(breakdown, stale=stale)

    def _rows(self, breakdown: MemoryBreakdown | None) -> list[Row]:
        rows = [Row(label="predicted", breakdown=breakdown)] if breakdown else []
        return [*rows, *([Row(label="measured", breakdown=self.measured)] if self.measured else [])]

    @property
    def _capacity(self) -> int | None:
        return usable_bytes(self._device, MARGIN) if self._device else None

    # --- what runs

    def _start(self) -> None:
        if self._thread is None and self._next() is not None:
            self._thread = threading.Thread(target=self._work, name="memory explorer", daemon=True)
            self._thread.start()

    def _next(self) -> Question | None:
        """The next question to run; None = all that the knobs may need is there."""
        try:
            question = self._question()
        except SpecError:
            return None
        axes = ["micro_batch", *(axis for axis in LENGTHS if axis in self._touched and axis in self.knobs.own)]
        return self._curves.wanted(question, {axis: self.knobs.places(axis) for axis in axes})

    def _work(self) -> None:
        """Make one dry run after another, each for the knobs at its start."""
        while True:
            with self._lock:
                question = self._next()
                if question is None or self._crashed:
                    self._thread = None
                    return
            self._run(question)

    def _run(self, question: Question) -> None:
        try:
            answer = self._estimator.ask(question)
        except ValueError as error:
            with self._lock:
                self._curves.fail(question, str(error))
        except EstimatorError as error:
            with self._lock:
                self._crashed = str(error)
        except Exception as error:  # belongs into the panel: nobody reads what a thread leaves behind
            with self._lock:
                self._crashed = f"{type(error).__name__}: {error}"
        else:
            with self._lock:
                self._curves.add(question, answer)
                for axis in LENGTHS:
                    own = getattr(answer, axis)
                    if own is not None and axis not in self.knobs.own:
                        self._axes.append(axis)
                        self.knobs.learn(axis, own, own)
        if not self._shown.is_set():
            self._redraw()

    # --- how it shows itself

    @property
    def title(self) -> str:
        """The current configuration, in one line."""
        return faces.essentials(self.spec)

    def __repr__(self) -> str:
        return f"MemoryExplorer({self.title!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        self._shown.wait(PATIENCE)
        with self._lock:
            bundle = self.widget._repr_mimebundle_(**options)
            shown = faces.essentials(self.spec) if self.result is None else self.result.title
            said = self._last if self.problem.value else ""
            html = explorer_faces.static(shown, self._rows(self.result), self.fit, self._capacity, self.device.value, said)
        return {**bundle, "text/plain": repr(self), "text/html": html}


def _check(measured: object) -> None:
    if measured is not None and not isinstance(measured, MemoryBreakdown):
        raise ValueError(f"measured={type(measured).__name__}: expected a MemoryBreakdown, as wb.measure_memory(spec) returns it")
