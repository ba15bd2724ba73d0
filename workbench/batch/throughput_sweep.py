"""Measures throughput at several micro-batches in a limited time: only as many steps as it needs, and no sizes that cannot gain."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence

from workbench.batch.analysis.throughput import Throughput, relative_sample_worth, steady_step
from workbench.core import units
from workbench.core.progress import BudgetError, Waiting
from workbench.runs.failure import RunError
from workbench.runs.launch.launch import check
from workbench.runs.launch.sweep import in_turn, plan
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec
from workbench.runs.training_knobs import UNEVALUATED

STEPS = 60
"""Optimizer steps at each micro-batch at most, warm-up included."""
MIN_STEPS, LOOK_STEPS = 5, 8
"""The fewest steps, and the steps while it is not known how long one takes."""
SECONDS = 4.0
"""Seconds of steps that are enough at a micro-batch."""
START = 8.0
"""Seconds that a launch takes before its first step, about."""
GAIN = 0.02
"""What a micro-batch must gain over the best so far."""
IDLE = 2
"""After so many in a row without a gain, larger (or smaller) ones are not tried."""
CONTENDER = 0.9
"""Share of the best from which on a micro-batch is measured a second time."""


def measure_throughput(
    spec: RunSpec,
    micro_batches: Sequence[int],
    *,
    steps: int = STEPS,
    noise: float | None = None,
    step: float | None = None,
    line: Waiting | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Throughput:
    """Measure samples per second at several micro-batches, and what accumulation saves.

    Without a limit of time each is measured twice, in opposite orders. With one, the nearest to the present micro-batch come first, each
    with as many steps as fit into a few seconds. In either direction it ends after two that gain nothing, and when the budget is spent or
    at Ctrl-C, what is known by then is returned. The time that is left goes into a second measurement of the best.

    Args:
        spec: the run, whose micro-batch is varied.
        micro_batches: to try; `notes` name those that fail or were left out.
        steps: optimizer steps of each, at most.
        noise: noise scale in samples, by which samples of a larger batch are worth less; None = they are worth the same.
        step: seconds of a step of the spec, about; None = not known.
        line: has the limit of time, and shows the progress; None = no limit.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: none of them took a step; the run directories stay.
        LaunchError, TaskError: the spec cannot run here.
    """
    line = line or Waiting("throughput", None)
    sweep = _Sweep(spec, micro_batches, steps, noise, step, line, runs_dir)
    sweep.run()
    failed = next((run.error for run in sweep.runs if run.error), None)
    if failed and not any(run.ok for run in sweep.runs if isinstance(run.spec, RunSpec) and run.spec.accumulation == 1):
        raise RunError(failed)
    curve = Throughput.from_runs(sweep.runs)
    return dataclasses.replace(curve, notes=(*curve.notes, *sweep.notes))


class _Sweep:
    """The runs at several micro-batches. Arguments as those of `measure_throughput`."""

    def __init__(
        self,
        spec: RunSpec,
        micro_batches: Sequence[int],
        steps: int,
        noise: float | None,
        step: float | None,
        line: Waiting,
        runs_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._plain = spec.replace(accumulation=1, warmup_steps=0, schedule="constant", profile=None, **UNEVALUATED)
        self._places, self._steps, self._noise, self._line, self._runs_dir = sorted(micro_batches), steps, noise, line, runs_dir
        self._present = min(micro_batches, key=lambda micro: abs(math.log(micro / int(spec.micro_batch))))
        self._taken: dict[int, float] = {self._present: step} if step else {}
        """Micro-batch → seconds of a step."""
        self._values: dict[int, float] = {}
        """Micro-batch → useful samples per second; 0 = it failed."""
        self.runs: list[Run] = []
        self.notes: list[str] = []
        self._stopped = False

    def run(self) -> None:
        """All of it."""
        limited = math.isfinite(self._line.left)
        middle = self._present if limited else self._places[len(self._places) // 2]
        if limited and not self._taken:
            self._launch([self._present])
        order = self._nearest_first() if limited else [*self._places]
        while not self._stopped and (left := [micro for micro in order if micro not in self._values and self._is_worth_it(micro)]):
            before = len(self._values)
            self._launch(left, twice=None if self._accumulated or self._values.get(middle) == 0 else middle)
            if len(self._values) == before:
                break
        again = [micro for micro in reversed(order) if not limited or self._is_contender(micro)]
        if again and not self._stopped and self._line.left > START + 1.2 * sum(map(self._seconds, again)):
            best = max(self._values, key=self._values.__getitem__)
            self._launch(again, twice=middle if not limited else None if self._accumulated else best, second=True)
        if untried := sorted(set(self._places) - self._values.keys()):
            for gains in (True, False):
                some = [str(micro) for micro in untried if self._may_gain(micro) == gains]
                why = "there was no time left" if gains else "those before gained nothing"
                self.notes += [f"micro_batch {', '.join(some)} not tried: {why}"] if some else []

    @property
    def _accumulated(self) -> bool:
        """Was a micro-batch run with accumulation as well?"""
        return any(isinstance(run.spec, RunSpec) and run.spec.accumulation > 1 for run in self.runs)

    def _nearest_first(self) -> list[int]:
        """The present micro-batch, the next larger, the next smaller, and so on."""
        above = [micro for micro in self._places if micro > self._present]
        below = [micro for micro in reversed(self._places) if micro < self._present]
        order = [self._present]
        for place in range(max(len(above), len(below))):
            order += [*above[place : place + 1], *below[place : place + 1]]
        return order

    def _is_worth_it(self, micro: int) -> bool:
        """May it gain, and is there the time for a few of its steps?"""
        most = min(2 * SECONDS, max(0.0, self._line.left - START) / 2)
        step = self._step(micro)
        fits = micro == self._present or not math.isfinite(self._line.left) or math.isnan(step) or MIN_STEPS * step <= most
        return fits and self._may_gain(micro)

    def _step(self, micro: int) -> float:
        """Seconds of a step at most, as far as is known: it grows with its samples, and a smaller one takes no longer."""
        known = [(place, seconds) for place, seconds in self._taken.items() if seconds > 0]
        return min((seconds * max(1.0, micro / place) for place, seconds in known), default=math.nan)

    def _count(self, micro: int, others: int) -> int:
        """Steps at a micro-batch."""
        if not math.isfinite(self._line.left):
            return self._steps
        step = self._step(micro)
        share = min(SECONDS, max(0.0, self._line.left - START) / (others + 1))
        return min(self._steps, LOOK_STEPS if math.isnan(step) else max(MIN_STEPS, int(share / step)))

    def _seconds(self, micro: int) -> float:
        return min(SECONDS, self._steps * self._step(micro))

    def _launch(self, order: Sequence[int], *, twice: int | None = None, second: bool = False) -> None:
        """Run micro-batches in one launch, and one of them with accumulation as well, which shows what a step costs once."""
        specs = [(micro, self._plain.replace(micro_batch=micro, steps=self._count(micro, len(order)))) for micro in order]
        if twice is not None:
            half = max(1, self._count(twice, len(order)) // 2)
            at = 1 if specs and specs[0][0] == twice else len(specs)
            specs.insert(at, (twice, self._plain.replace(micro_batch=twice, accumulation=2, steps=half)))
        for _, spec in specs:
            check(spec)
        names = [f"micro_batch={micro}" + " accumulation=2" * (spec.accumulation == 2) for micro, spec in specs]
        trials = plan([(name, spec) for name, (_, spec) in zip(names, specs, strict=True)], 1)
        self._line.say(names[0] if names else "")
        try:
            with contextlib.closing(in_turn(trials, self._runs_dir, tick=self._tick)) as ended:
                for number, (trial, run) in enumerate(ended, 1):
                    self._add(run, trial.spec)
                    self._line.say(names[number] if number < len(names) else "ending", self._known())
                    if not second and self._is_hopeless([micro for micro, _ in specs[number:]]):
                        break
        except BudgetError:
            self._stop("the budget was spent")
        except KeyboardInterrupt:
            if not self._known():
                raise
            self._stop("stopped by Ctrl-C")

    def _stop(self, why: str) -> None:
        self._stopped = True
        self.notes.append(
            f"{why} after {units.seconds(self._line.seconds)}: throughput is less certain: few steps, or some sizes were not measured"
        )

    def _tick(self) -> None:
        self._line.tick()
        if self._line.left <= 0 and self._known():
            raise BudgetError

    def _add(self, run: Run, spec: RunSpec) -> None:
        self.runs.append(run)
        if spec.accumulation > 1:
            return
        micro, seconds = int(spec.micro_batch), steady_step(run)
        if not seconds > 0:
            self._values.setdefault(micro, 0.0)
            return
        self._taken[micro] = min(self._taken.get(micro, math.inf), seconds) if micro in self._values else seconds
        batch = micro * spec.data_ranks
        worth = relative_sample_worth(batch, self._noise) if self._noise is not None else 1.0
        self._values[micro] = batch / self._taken[micro] * worth

    def _known(self) -> str:
        """The best so far, in words."""
        best = max(self._values, key=self._values.__getitem__, default=0)
        if not self._values.get(best):
            return ""
        return f"best of {len(self._values)}: micro_batch={best}, {units.rate(best * self._plain.data_ranks / self._taken[best])}"

    def _is_hopeless(self, left: Sequence[int]) -> bool:
        """Is it faster to launch those that may still gain without the others, or does none?"""
        lost = [micro for micro in left if not self._may_gain(micro)]
        return bool(lost) and (len(lost) == len(left) or sum(map(self._seconds, lost)) > START)

    def _is_contender(self, micro: int) -> bool:
        value = self._values.get(micro, 0.0)
        return value > 0 and value >= CONTENDER * max(self._values.values())

    def _may_gain(self, micro: int) -> bool:
        """Is it not beyond some that gained nothing, or above one that failed, from the present one on? Without a limit all are tried."""
        if not math.isfinite(self._line.left):
            return True
        way = sorted(
            (place for place in self._values if min(micro, self._present) <= place <= max(micro, self._present)),
            reverse=micro < self._present,
        )
        best, idle = 0.0, 0
        for place in way:
            if not self._values[place]:
                if micro > self._present:
                    return False
                continue  # a smaller one may fit
            idle = 0 if self._values[place] > (1 + GAIN) * best else idle + 1
            best = max(best, self._values[place])
        return idle < IDLE
