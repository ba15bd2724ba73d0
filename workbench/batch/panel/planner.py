"""BatchPlanner: a panel with knobs for batch, processes and accumulation that shows the learning rate, its validity and the gain."""

from typing import Any

import ipywidgets

from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.scaled_lr import RULES
from workbench.batch.analysis.throughput import Throughput
from workbench.batch.facts import TaskFacts, checked_number, law_of
from workbench.batch.panel import html as planner_html
from workbench.batch.panel.model import Planned, PlannerInputs, batches, planned
from workbench.core.checks import is_number
from workbench.core.display.html import Style
from workbench.runs.panel import html as runs_html
from workbench.runs.spec import RunSpec
from workbench.runs.training_knobs import is_own_schedule, lr_factor

POINTS = 120
"""Columns of the schedule's picture."""
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
RANKS = tuple(2**power for power in range(9))
WARMUPS = 5
"""Length of the schedule's picture in warm-ups, where no spec says how long training is."""


class BatchPlanner:
    """Knobs, and the plan for them: its learning rate, whether the rule holds, and steps and time if they are known.

    Attributes:
        plan: the present plan.
        result: the BatchPlan for the current knobs; None if it is impossible.
        spec: the given spec with that plan; None without a spec, or if the plan is impossible.
        found: all numbers that are shown, a Planned.
        batch, processes, accumulation, rule: the knobs; `.value` reads or sets each.
        light, figures, ladder, schedule: the parts of the display.
        widget: everything in one box.
    """

    def __init__(
        self,
        target: BatchPlan | RunSpec,
        *,
        noise_scale: Any = None,
        steps: Any = None,
        throughput: Any = None,
        largest: Any = None,
        dataset_size: int | None = None,
    ) -> None:
        """
        Args:
            target: the present plan, or a RunSpec; learning rate, optimizer and dataset size then come from its task.
            noise_scale: in samples, or what `wb.noise_scale` gave.
            steps: a StepsToTarget or its fit, for the number of steps to the target.
            throughput: a Throughput; micro-batch → samples per second of all ranks of the plan; one number; or the runs of a sweep.
            largest: the largest micro-batch that fits, a number or what `wb.max_micro_batch` gave.
            dataset_size: samples of an epoch; None = that of the spec's task.

        Raises:
            ValueError: something else was given.
        """
        self._given = target if isinstance(target, RunSpec) else getattr(target, "spec", None)
        plan, known_size = _plan_of(target)
        self.plan = plan
        rates = throughput if throughput is not None else getattr(target, "throughput", None)
        self.known = PlannerInputs(
            plan=plan,
            noise=_samples(noise_scale if noise_scale is not None else getattr(target, "noise", None)),
            fit=law_of(steps),
            throughput=None if rates is None else Throughput.of(rates, micro_batch=plan.micro_batch, world_size=plan.world_size),
            dataset=known_size if dataset_size is None else checked_number("dataset_size", dataset_size, 1),
            largest=None if largest is None else checked_number("largest", getattr(largest, "micro_batch", largest), 1),
            samples=None if self._given is None else self._given.steps * getattr(target, "before", plan).global_batch,
        )
        self._make_widgets()
        self._redraw()

    def _make_widgets(self) -> None:
        plan = self.plan
        slider, own = ipywidgets.SelectionSlider, plan.global_batch
        self.batch = slider(options=batches(plan, self.known.dataset), value=own, description="batch")
        self.processes = slider(options=sorted({*RANKS, plan.world_size}), value=plan.world_size, description="processes")
        self.accumulation = slider(options=sorted({*ACCUMULATIONS, plan.accumulation}), value=plan.accumulation, description="accumulation")
        self.rule = ipywidgets.Dropdown(options=RULES, value="auto" if plan.optimizer else "linear", description="rule")
        knobs = (self.batch, self.processes, self.accumulation, self.rule)
        for knob in knobs:
            knob.observe(lambda _: self._redraw(), names="value")
        self.head, self.light, self.figures, self.ladder, self.schedule = (ipywidgets.HTML() for _ in range(5))
        box = ipywidgets.Box(knobs).add_class("wb-knobs")
        shown = [self.head, box, self.light, self.figures, self.ladder, self.schedule, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-planner")

    # --- what is planned

    @property
    def found(self) -> Planned:
        """All that is shown for the current knobs."""
        return planned(
            self.known, batch=self.batch.value, ranks=self.processes.value, accumulation=self.accumulation.value, rule=self.rule.value
        )

    @property
    def result(self) -> BatchPlan | None:
        """The plan for the current knobs; None if it is impossible."""
        return self.found.plan

    @property
    def spec(self) -> RunSpec | None:
        """The given spec with the plan's knobs; None without a spec, or if the plan is impossible."""
        plan = self.result
        return None if plan is None or self._given is None else self._given.replace(**plan.changes())

    # --- what is shown

    def _redraw(self) -> None:
        found = self.found
        self.head.value = planner_html.head(self.title)
        self.light.value = planner_html.validity(found)
        self.figures.value = planner_html.figures(found)
        self.ladder.value = planner_html.ladder(found)
        self.schedule.value = planner_html.schedule(
            found, *self._curves(found), own=self._given is not None and self._drawn != self._given.schedule
        )

    @property
    def _drawn(self) -> str:
        """The schedule of the spec; in the place of one of the user's own, which is not imported, a constant rate."""
        own = self._given is None or is_own_schedule(self._given.schedule)
        return "constant" if own else self._given.schedule  # type: ignore[union-attr]

    def _curves(self, found: Planned) -> tuple[list[list[float]], int]:
        """The learning rate over the samples of a run, before and as planned, and the number of these samples."""
        plans = [self.plan, found.plan or self.plan]
        schedule, steps = "constant", max(1, WARMUPS * max(plan.warmup_steps for plan in plans))
        samples = max(plan.global_batch for plan in plans) * steps
        if self._given is not None and self.known.samples is not None:
            schedule, samples = self._drawn, self.known.samples
        curves = []
        for plan in plans:
            steps = max(1, samples // plan.global_batch)
            places = [min(steps - 1, steps * point // POINTS) for point in range(POINTS)]
            shape = {"steps": steps, "warmup_steps": plan.warmup_steps, "schedule": schedule}
            curves.append([plan.lr * lr_factor(step, **shape) for step in places])  # type: ignore[arg-type]
        return curves, samples

    # --- display

    @property
    def title(self) -> str:
        """What is planned, in one line."""
        return (
            runs_html.essentials(self._given) if self._given is not None else repr(self.plan).removeprefix("BatchPlan(").removesuffix(")")
        )

    def __repr__(self) -> str:
        return f"BatchPlanner({self.title!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        found = self.found
        static = planner_html.static(self.title, found, *self._curves(found))
        return {**self.widget._repr_mimebundle_(**options), "text/plain": repr(self), "text/html": static}


def _plan_of(target: Any) -> tuple[BatchPlan, int | None]:
    """The plan, and the size of the dataset where it is known."""
    if isinstance(target, BatchPlan):
        return target, None
    if isinstance(target, RunSpec):
        task = TaskFacts.of(target)
        return task.plan(target), task.dataset_size
    raise ValueError(
        f"BatchPlanner({type(target).__name__}): a RunSpec or a BatchPlan is allowed; try BatchPlanner(spec), or "
        'BatchPlanner(wb.BatchPlan(micro_batch=32, world_size=8, lr=0.1, optimizer="sgd(momentum=0.9)"))'
    )


def _samples(noise: Any) -> float | None:
    value = getattr(noise, "b_simple", noise)
    if value is None or value == float("inf"):
        return None
    if not is_number(value, above=0):
        raise ValueError(f"noise_scale={noise!r:.60}: samples above 0 are allowed, or what wb.noise_scale gave")
    return float(value)
