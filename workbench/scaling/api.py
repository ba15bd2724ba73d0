"""Growing: a scaling curve is measured, by launches that take turns, kept as it grows, and gone on with another day.

An `Order` says what is measured (`order`); its `Folder` keeps the runs (`folder`); `curves` makes those that are missing, and has the share
of communication measured beside them (`sharing`). What comes of it is a `scaling.ScalingCurve`.

`scaling_curve`: throughput by number of processes, or by any knob, measured in turns, kept, shown as it grows.
"""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from workbench.core import units
from workbench.core.progress import ProgressLine
from workbench.runs.failure import RunError
from workbench.runs.launch.environment import core_count, gpu_count
from workbench.runs.launch.experiments import run_communication
from workbench.runs.launch.launch import check, label
from workbench.runs.launch.sweep import Trial, in_brief, in_turn, plan
from workbench.runs.spec import RunSpec
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.curve_directory import Folder, in_launches
from workbench.scaling.curve_order import Order, ordered

SECONDS = 6.0
"""For which each point trains with and without its reduction, in turns: ten pairs of blocks, about."""
LAUNCH = 8.0
"""Seconds that the start of a launch takes, about: until one is over, the time left is told by it."""
_CELLS = 20


def scaling_curve(
    target: RunSpec | str | os.PathLike[str],
    *,
    over: str = "nproc_per_node",
    values: Sequence[Any] = (1, 2),
    kind: str = "weak",
    repeat: int = 3,
    communication: bool = True,
    resume: bool | str | os.PathLike[str] = False,
    runs_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> ScalingCurve:
    """Measure throughput by number of processes, or by any other knob; points take turns, there and back again (A B B A).

    Each point is a training with a run directory of its own: from its timelines come throughput, straggling and CPU seconds per sample.
    Neighbours that can share a launch do. Which part of a step is nothing but communication is measured afterwards, in launches of their
    own: steps with and without the reduction of gradients, in turns. Points with more processes × threads than cores (or processes than
    GPUs) are labelled as oversubscribed, and no fit uses them. A point that fails is kept and shown, and its repeats are left out.

    An interrupt stops what runs; what was measured is kept, and the exception says where. The same call with `resume=True` goes on.

    Args:
        target: the spec that all points have in common; or the directory of a curve, to read what is there and measure nothing.
        over: the knob that is turned: "nproc_per_node", or "micro_batch", "num_workers", "precision", "threads", …
        values: what it is turned to.
        kind: "weak": each process keeps its micro-batch. "strong": the spec's global batch is divided among the processes.
        repeat: how often each point is measured; two or more for an interval.
        communication: measure exposed communication too, where a point has more than one process and is not oversubscribed.
        resume: go on with the newest curve of this spec in `runs_dir`, or with the one in this directory: what has ended is not run
            again. Other values and more repeats may be wanted than before.
        runs_dir: where the curve's directory goes; None = `runs` in the current folder.
        quiet: show no progress.

    Raises:
        SpecError: no such knob, or a value it does not take. Nothing was started.
        CurveError: values that make no curve, a batch that cannot be divided, or nothing to go on with. Nothing was started.
        LaunchError, TaskError: a point cannot run here. Nothing was started.
    """
    if isinstance(target, str | os.PathLike):
        return Folder.load(target).curve()
    order = ordered(target, over=over, values=values, kind=kind, repeat=repeat, communication=communication)
    for _, spec in order.points:
        check(spec)
    growth = _Growth(_folder(order, resume, runs_dir), quiet)
    try:
        growth.train()
        notes = growth.communicate() if order.communication else ()
    except BaseException as error:
        error.add_note(f'What was measured so far is kept: wb.scaling_curve(spec, …, resume="{growth.folder.path}") goes on with it')
        raise
    return growth.folder.curve(notes)


def _folder(order: Order, resume: bool | str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None) -> Folder:
    if resume is False:
        return Folder.new(order, runs_dir)
    found = Folder.latest(order, runs_dir) if resume is True else Folder.load(resume)
    return Folder.new(order, runs_dir) if found is None else found.continued(order)


class _Growth:
    """A curve while it is measured."""

    def __init__(self, folder: Folder, quiet: bool) -> None:
        """Nothing is started yet.

        Args:
            folder: of the curve, with what it has already.
            quiet: show no progress.
        """
        self.folder, self.quiet = folder, quiet
        self._trials = missing(folder)
        self._done, self._failed = 0, set[RunSpec]()
        self._start = time.monotonic()
        self._doing = ""
        self._line = ProgressLine(self._words)

    def train(self) -> None:
        """Make the runs that are missing."""
        total = len(self._trials)
        try:
            with contextlib.closing(in_turn(self._trials, self.folder.path, self._tick, lambda trial: trial.spec in self._failed)) as ended:
                for trial, run in ended:
                    self._done += 1
                    if not run.ok:
                        self._failed.add(trial.spec)
                    self._doing = f"{trial.name}: {in_brief(run)}"
                    if not self.quiet:
                        print(f"[{self._done}/{total}] {self._doing} · about {units.seconds(self._left)} left", flush=True)
        finally:
            self._line.close(self._words())

    def communicate(self) -> tuple[str, ...]:
        """Measure what is not known yet of exposed communication; what to keep in mind about it."""
        order, known = self.folder.order, {steps.spec for steps in self.folder.steps()}
        wanted = [spec for _, spec in order.points if self._measurable(spec)]
        if not any(spec.nproc_per_node > 1 for spec in wanted):
            return ()
        if order.why_no_communication:
            return (order.why_no_communication,)
        notes = []
        for specs in in_launches([spec for spec in wanted if spec not in known]):
            self._doing = f"communication of {len(specs)} points"
            try:
                run_communication(specs, seconds=SECONDS, runs_dir=self.folder.path, tick=self._tick)
            except RunError as error:
                notes.append(f"exposed communication could not be measured: {str(error).splitlines()[0]}")
            finally:
                self._line.close(self._words())
        return tuple(notes)

    def _measurable(self, spec: RunSpec) -> bool:
        """Has it trained, and is it no matter of too few cores?"""
        return spec not in self._failed and not crowded(spec) and any(run.ok and run.spec == spec for run in self.folder.runs())

    @property
    def _left(self) -> float:
        """Seconds until all is measured, about."""
        points = self.folder.order.points
        paired = 0.0
        if self.folder.order.communication and any(spec.nproc_per_node > 1 for _, spec in points):
            paired = sum(LAUNCH + SECONDS * len(specs) for specs in in_launches([spec for _, spec in points if not crowded(spec)]))
        each = (time.monotonic() - self._start) / self._done if self._done else LAUNCH
        return each * (len(self._trials) - self._done) + paired

    def _tick(self) -> None:
        if not self.quiet:
            self._line.show()

    def _words(self) -> str:
        done, total = self._done, max(1, len(self._trials))
        bar = f"{'█' * (_CELLS * done // total):░<{_CELLS}} {done}/{total} runs"
        return " · ".join(filter(None, [f"{label(self.folder.order.spec)} {bar}", self._doing, f"about {units.seconds(self._left)} left"]))


def missing(folder: Folder) -> list[Trial]:
    """The trainings that an order has not got yet, in the order of a sweep."""
    done = [run.spec for run in folder.runs() if run.ok]
    have = {spec: done.count(spec) for _, spec in folder.order.points}
    found = []
    for trial in plan(folder.order.points, folder.order.repeat):
        if have[trial.spec]:
            have[trial.spec] -= 1
        else:
            found.append(trial)
    return found


def crowded(spec: RunSpec) -> bool:
    """Would it run with more processes × threads than cores, or processes than GPUs?"""
    gpus = 0 if spec.device == "cpu" else gpu_count()
    if gpus and (spec.device == "cuda" or spec.nproc_per_node <= gpus):
        return spec.nproc_per_node > gpus
    return spec.nproc_per_node * spec.threads > (core_count() or math.inf)
