"""StepsToTarget: how many steps a target takes at each batch, by rule and optimizer, with the law that the best ones follow.

The nouns: a `Trial` is one training; a `Mark` is what the seeds of one configuration say; `CriticalBatch` is the law through the marks.

What trials that did not go well have to say, in words.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.batch.analysis.critical_batch import CriticalBatch, Point
from workbench.batch.analysis.time_to_target import TimeToTarget, rates_of
from workbench.batch.analysis.trials import Mark, Target, Trial, best_marks, marks_of
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display


def notes_of(trials: Sequence[Trial], target: Target, planned: int) -> tuple[str, ...]:
    """The notes of an experiment, most important first.

    Args:
        trials: that are done.
        target: of all of them.
        planned: how many there were to be.
    """
    if not trials:
        return ("no trial has ended yet",)
    found = []
    if all(trial.at_once for trial in trials):
        found.append(
            "every trial's loss was not a number after the first step: nothing was learnt about batches. Look for infinities in the data, "
            'try a learning rate 100 times smaller (lr=), clip_grad_norm=1.0, or precision="fp32"'
        )
    elif not any(trial.steps is not None for trial in trials):
        found.append(_never(trials, target))
    elif missed := sorted({trial.batch for trial in trials} - {trial.batch for trial in trials if trial.steps is not None}):
        found.append(f"not reached at batch {', '.join(map(units.count, missed))}")
    if len(trials) < planned:
        found.append(f"cut off after {len(trials)} of {planned} trials: what was learnt so far")
    return tuple(found)


def _never(trials: Sequence[Trial], target: Target) -> str:
    near = min(trials, key=target.rank)
    never = f"{target} was never reached{_direction(target)}"
    if near.outcome == "diverged":
        return f"{never}: every trial diverged; try a smaller learning rate (lr=)"
    came = f"batch {units.count(near.batch)} with {target.name} {near.best:.4g} after {units.count(near.after)} steps (lr {near.lr:.3g})"
    other = "lower" if target.rises else "higher"
    return (
        f"{never}: nearest came {came}; try a {other} target, max_steps= above {units.count(near.after)}, or other learning rates (retune=)"
    )


def _direction(target: Target) -> str:
    """How a figure's target was understood: whoever meant the other direction finds it here."""
    if target.name == "loss" or target.start is None:
        return ""
    way, other, side = ("rises", "fall", "below") if target.rises else ("falls", "rise", "above")
    return f" (taken as one that {way}, as the untrained model has {target.start:.4g}; one that is to {other} lies {side} that)"


TRIALS = "trials.jsonl"
"""Name of the file in a run directory that trials are written to while they are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsToTarget(display.Shown, JsonDataclass):
    """Trials at several batches, each until a target was reached, or until there was no hope."""

    task: str
    """What was trained."""
    target: Target
    """What was to be reached."""
    trials: tuple[Trial, ...]
    """In the order in which they ended."""
    base_batch: int
    """Where the learning rates that the rules began with belong."""
    rules: tuple[str, ...] = ()
    """Rules, as they were given; "tuned" among them, if learning rates were searched for."""
    planned: int = 0
    """Trials that there were to be."""
    seconds: float = 0.0
    """Between the first trial's start and the last one's end."""
    fitted: tuple[int, ...] | None = None
    """Batches that the law is fitted to; None = all."""

    @classmethod
    def of(cls, run: Any) -> "StepsToTarget":
        """What a launch has found so far: while it runs, after an interrupt or a failure, and at the end.

        Args:
            run: a Run, or the path of its directory.

        Raises:
            ValueError: no experiment of steps to a target.
        """
        path = Path(getattr(run, "path", run)) / TRIALS
        try:
            lines = path.read_bytes().split(b"\n")[:-1]  # the last one is empty, or not whole yet
        except OSError:
            raise ValueError(
                f"{os.fspath(path.parent)} has no {TRIALS}: no directory of wb.steps_to_target(spec, …), or no trial has begun"
            ) from None
        rows = [json.loads(line) for line in lines]
        plan = next((row for row in rows if row["kind"] == "plan"), None)
        if plan is None:
            raise ValueError(f"{path} has no plan: the experiment was cut off before its first trial")
        done = [row for row in rows if row["kind"] == "trial"]
        order = plan["order"]
        return cls(
            task=plan["spec"]["task"],
            target=Target(**order["target"]),
            trials=tuple(Trial.from_json({**row, "optimizer": plan["names"][row["optimizer"]]}) for row in done),
            base_batch=order["base_batch"],
            rules=(*(("tuned",) if order["retune"] else ()), *order["rules"]),
            planned=done[-1]["total"] if done else 0,
            seconds=done[-1]["at"] - plan["created"] if done else 0.0,
        )

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches that were tried, smallest first."""
        return tuple(sorted({trial.batch for trial in self.trials}))

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Optimizers that were tried, in the order of their first trials."""
        return tuple(dict.fromkeys(trial.optimizer for trial in self.trials))

    @property
    def whole(self) -> bool:
        """Were all trials made?"""
        return bool(self.trials) and len(self.trials) >= self.planned

    def marks(self, optimizer: str | None = None, rule: str | None = None) -> tuple[Mark, ...]:
        """What the seeds say at each batch.

        Args:
            optimizer: None = the first.
            rule: one of the rules, or "tuned"; None = the best of all that was tried at each batch.

        Raises:
            ValueError: no trials of that optimizer or rule.
        """
        optimizer = self._optimizer(optimizer)
        own = [trial for trial in self.trials if trial.optimizer == optimizer]
        if rule is None:
            return best_marks(own, self.target)
        known = tuple(dict.fromkeys(trial.rule for trial in own))
        if rule not in known:
            raise ValueError(f"rule={rule!r}: the rules that were tried are {', '.join(map(repr, known))}")
        return marks_of([trial for trial in own if trial.rule == rule], self.target)

    def best(self, batch: int, optimizer: str | None = None) -> Mark:
        """The configuration that took the fewest steps at a batch.

        Raises:
            ValueError: that batch was not tried.
        """
        found = {mark.batch: mark for mark in self.marks(optimizer)}
        if batch not in found:
            raise ValueError(f"best({batch!r}): batches that were tried are {', '.join(map(units.count, found))}; predict(batch) has any")
        return found[batch]

    def fit(self, optimizer: str | None = None, rule: str | None = None, batches: Sequence[int] | None = None) -> CriticalBatch:
        """The law of steps against batch. It is about the best learning rates: without `retune` it is the rules' curve that is fitted.

        Args:
            optimizer: None = the first.
            rule: None = the best of all that was tried at each batch.
            batches: those to fit to; None = those of `fitted_to`, or all.

        Raises:
            ValueError: the target was reached at fewer than two batches.
        """
        wanted = self.fitted if batches is None else tuple(batches)
        marks = [mark for mark in self.marks(optimizer, rule) if wanted is None or mark.batch in wanted]
        try:
            return CriticalBatch.fit([Point(batch=mark.batch, steps=mark.steps, reached=mark.reached) for mark in marks])
        except ValueError as error:
            raise ValueError("; ".join([str(error), *self.notes])) from None

    def fitted_to(self, batches: Sequence[int]) -> "StepsToTarget":
        """The same trials, with the law fitted to some batches only; the others are then predicted, in the table and in the picture.

        Raises:
            ValueError: a batch that was not tried.
        """
        if unknown := [batch for batch in batches if batch not in self.batches]:
            raise ValueError(f"fitted_to({list(batches)!r}): {unknown[0]} was not tried; there are {', '.join(map(str, self.batches))}")
        return dataclasses.replace(self, fitted=tuple(sorted(batches)))

    def errors(self, optimizer: str | None = None, rule: str | None = None) -> dict[int, float]:
        """Batches that the law was not fitted to → predicted steps over measured, less 1: 0.1 = predicted 10 % too high."""
        law = self.fit(optimizer, rule)
        return {m.batch: law.steps(m.batch) / m.steps - 1 for m in self.marks(optimizer, rule) if self._held_out(m.batch) and m.reached}

    def time_to_target(self, throughput: Any, *, micro_batch: int | None = None, optimizer: str | None = None) -> TimeToTarget:
        """Seconds to the target on given hardware, and with it the best batch for each number of processes.

        Args:
            throughput: samples per second: {batch: rate}, {(world_size, batch): rate}, runs of `wb.sweep`, a list of points with `batch`
                (or `global_batch`), `samples_per_sec` and perhaps `world_size`, or anything that has such `.points`.
            micro_batch: if given, the keys of a mapping are numbers of processes, each with this batch.
            optimizer: None = the first.

        Raises:
            ValueError: no such points, or no law.
        """
        return TimeToTarget.of(self.fit(optimizer), rates_of(throughput, micro_batch), target=str(self.target))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trials have to say about themselves: not reached, not a number, not all made."""
        return notes_of(self.trials, self.target, self.planned)

    @property
    def table(self) -> display.Table:
        """A row per configuration, a column per batch: steps; `> 300` was given up or ended there, `∞` diverged."""
        rows: list[list[object]] = []
        several = len(self.optimizers) > 1
        for optimizer in self.optimizers:
            for rule in dict.fromkeys(trial.rule for trial in self.trials if trial.optimizer == optimizer):
                found = {mark.batch: mark for mark in self.marks(optimizer, rule)}
                name = f"{optimizer} {rule}" if several else rule
                rows.append([name, *(found[batch].text if batch in found else units.MISSING for batch in self.batches)])
            rows += self._law_row(optimizer, several)
        title = f"Steps to {self.target} · {self.task}" + ("" if several or not self.optimizers else f" · {self.optimizers[0]}")
        return display.Table(columns=("batch", *map(units.count, self.batches)), rows=rows, title=title, note="; ".join(self._words()))

    def _law_row(self, optimizer: str, several: bool) -> list[list[object]]:
        try:
            law = self.fit(optimizer)
        except ValueError:
            return []
        cells = [f"{round(law.steps(batch)):,}" + ("*" if self._held_out(batch) else "") for batch in self.batches]
        return [[f"{optimizer} law" if several else "law", *cells]]

    def _words(self) -> list[str]:
        found = []
        for optimizer in self.optimizers:
            try:
                law = self.fit(optimizer)
            except ValueError:
                continue
            name = f"{optimizer}: " if len(self.optimizers) > 1 else ""
            found.append(f"{name}s_min {law.s_min:,.0f}, b_crit {law.words}" + (f" ({law.advice})" if law.advice else ""))
        if self.fitted is not None and set(self.batches) - set(self.fitted):
            found.append("* = not fitted to, predicted")
        return [*found, *self.notes, f"{len(self.trials)} trials in {units.seconds(self.seconds)}"]

    def _held_out(self, batch: int) -> bool:
        return self.fitted is not None and batch not in self.fitted

    def _optimizer(self, given: str | None) -> str:
        if not self.trials:
            raise ValueError("; ".join(self.notes))
        if given is None:
            return self.optimizers[0]
        if given not in self.optimizers:
            raise ValueError(f"optimizer={given!r}: those that were tried are {', '.join(map(repr, self.optimizers))}")
        return given

    to_frame = display.frame_method("trials", Trial, "samples")
    plot = display.plot_method("steps_to_target")

    def __repr__(self) -> str:
        return f"StepsToTarget({self.task!r}, {self.target}, {len(self.trials)} trials)"
