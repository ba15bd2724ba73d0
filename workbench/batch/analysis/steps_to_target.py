"""StepsToTarget: steps to a target at each batch, measured by trials, with their law; TimeToTarget: the same in seconds, by throughput."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.batch.analysis.critical_batch import CriticalBatch, Point
from workbench.batch.analysis.trials import Mark, Target, Trial, marks_of
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

ALLOWED_RATES = (
    "{batch: samples_per_sec}, {(world_size, batch): samples_per_sec}, runs of wb.sweep, or points with batch, samples_per_sec and perhaps "
    "world_size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The throughput of some processes at a batch."""

    batch: int
    """Samples per optimizer step over all processes."""
    world_size: int
    """Processes."""
    samples_per_sec: float
    """Of all processes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBatch:
    """The time to the target at one batch and number of processes; times in seconds."""

    batch: int
    world_size: int
    samples_per_sec: float
    steps: float
    """Steps by the law."""
    low: float
    """Lower end of the 90 % interval of `seconds`, by that of the steps."""
    seconds: float
    """Batch × steps / samples_per_sec."""
    high: float
    """Its upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget(display.Shown, JsonDataclass):
    """Time to a target over batches and numbers of processes."""

    target: str
    """As text."""
    law: CriticalBatch
    """Steps against batch."""
    rows: tuple[TimedBatch, ...]
    """By world_size, then batch."""

    @classmethod
    def of(cls, law: CriticalBatch, rates: Iterable[Rate], *, target: str = "the target") -> "TimeToTarget":
        """Join a law with throughput."""
        rows = []
        for rate in sorted(rates, key=lambda rate: (rate.world_size, rate.batch)):
            predicted = law.predict(rate.batch)
            low, mid, high = (samples / rate.samples_per_sec for samples in predicted.samples)
            rows.append(TimedBatch(**dataclasses.asdict(rate), steps=predicted.mid, low=low, seconds=mid, high=high))
        return cls(target=target, law=law, rows=tuple(rows))

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of processes with a known throughput."""
        return tuple(sorted({row.world_size for row in self.rows}))

    def best(self, world_size: int | None = None) -> TimedBatch:
        """The batch that reaches the target soonest.

        Args:
            world_size: number of processes; None = any.

        Raises:
            ValueError: the throughput of that number is not known.
        """
        rows = [row for row in self.rows if world_size in (None, row.world_size)]
        if not rows:
            raise ValueError(f"best({world_size!r}): throughput is known of world_size {', '.join(map(str, self.world_sizes))}")
        return min(rows, key=lambda row: (row.seconds, row.batch))

    @property
    def table(self) -> display.Table:
        """A row per batch and number of processes; the best of each number has a star."""
        best = {size: self.best(size) for size in self.world_sizes}
        rows = [
            [
                row.world_size,
                f"{row.batch:,}" + (" *" if row == best[row.world_size] else ""),
                units.rate(row.samples_per_sec),
                f"{round(row.steps):,}",
                units.seconds(row.seconds),
                f"{units.seconds(row.low)}–{units.seconds(row.high)}",
            ]
            for row in self.rows
        ]
        note = f"steps by the law (s_min {self.law.s_min:,.0f}, b_crit {self.law.words}); * = soonest with so many processes"
        return display.Table(
            columns=("world_size", "batch", "throughput", "steps", "time", "90 %"), rows=rows, title=f"Time to {self.target}", note=note
        )

    to_frame = display.frame_method("rows", TimedBatch)
    plot = display.plot_method("time_to_target")

    def __repr__(self) -> str:
        return f"TimeToTarget({self.target}, {len(self.rows)} batches)"


def rates_of(given: Any, micro_batch: int | None = None) -> list[Rate]:
    """Read throughput in any of its forms.

    >>> rates_of({32: 1000.0})[0].samples_per_sec, rates_of({(2, 64): 1900.0})[0].world_size, rates_of({4: 3800.0}, 32)[0].batch
    (1000.0, 2, 128)

    Args:
        given: see `StepsToTarget.time_to_target`.
        micro_batch: if given, a mapping's keys are numbers of processes, each with this batch.

    Raises:
        ValueError: another form, or numbers that are not above 0.
    """
    points = getattr(given, "points", given)
    points = points() if callable(points) else points
    if isinstance(points, Mapping):
        points = [_keyed(key, rate, micro_batch) for key, rate in points.items()]
    elif hasattr(points, "spec") or not isinstance(points, Iterable) or isinstance(points, str | bytes):
        points = [points]
    rates = [_rate(point) for point in points]
    if not rates:
        raise ValueError(f"time_to_target({given!r}): no throughput; allowed are {ALLOWED_RATES}")
    return rates


def _keyed(key: Any, rate: Any, micro_batch: int | None) -> dict[str, Any]:
    if isinstance(key, tuple) and len(key) == 2:
        return {"world_size": key[0], "batch": key[1], "samples_per_sec": rate}
    if micro_batch is not None:
        return {"world_size": key, "batch": key * micro_batch, "samples_per_sec": rate}
    return {"batch": key, "samples_per_sec": rate}


def _rate(point: Any) -> Rate:
    if isinstance(point, Rate):
        return point
    spec = getattr(point, "spec", None)
    batch = next(
        (value for source in (point, spec) for name in ("batch", "global_batch") if (value := _get(source, name)) is not None), None
    )
    ranks = next((value for source, name in ((point, "world_size"), (spec, "world_size")) if (value := _get(source, name)) is not None), 1)
    try:
        rate = Rate(batch=int(batch), world_size=int(ranks), samples_per_sec=float(_get(point, "samples_per_sec")))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"time_to_target: {point!r:.100} has no batch with samples_per_sec; allowed are {ALLOWED_RATES}") from None
    if not (rate.batch > 0 and rate.world_size > 0 and 0 < rate.samples_per_sec < math.inf):
        raise ValueError(
            f"time_to_target: {point!r:.100}: batch, world_size and samples_per_sec above 0 are allowed (did that run end well?)"
        )
    return rate


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def notes_of(trials: Sequence[Trial], target: Target, planned: int) -> tuple[str, ...]:
    """Notes on trials that failed or are missing, most important first; `planned` is the number of all trials."""
    if not trials:
        return ("no trial has ended yet",)
    notes = []
    if all(trial.at_once for trial in trials):
        notes.append(
            "every trial's loss was not a number after the first step: no batch was compared. Look for infinities in the data, "
            'try a learning rate 100 times smaller (lr=), clip_grad_norm=1.0, or precision="fp32"'
        )
    elif not any(trial.steps is not None for trial in trials):
        cut = [units.count(trial.after) for trial in trials if trial.outcome == "cut"]
        notes.append(f"the budget ended after {', '.join(cut)} steps, before {target} was reached" if cut else _never(trials, target))
    elif missed := sorted({trial.batch for trial in trials} - {trial.batch for trial in trials if trial.steps is not None}):
        notes.append(f"not reached at batch {', '.join(map(units.count, missed))}")
    if len(trials) < planned:
        notes.append(f"cut off after {len(trials)} of {planned} trials: the results so far; budget_s=None makes all of them")
    return tuple(notes)


def _never(trials: Sequence[Trial], target: Target) -> str:
    near = min(trials, key=target.rank)
    never = f"{target} was never reached{_direction(target)}"
    if near.outcome == "diverged":
        return f"{never}: every trial diverged; try a smaller learning rate (lr=)"
    nearest = f"batch {units.count(near.batch)} with {target.name} {near.best:.4g} after {units.count(near.after)} steps (lr {near.lr:.3g})"
    other = "lower" if target.rises else "higher"
    steps = f"max_steps= above {units.count(near.after)}"
    return f"{never}: nearest came {nearest}; try a {other} target, {steps}, or other learning rates (retune=)"


def _direction(target: Target) -> str:
    """Says whether a figure's target was taken as a maximum or a minimum."""
    if target.name == "loss" or target.start is None:
        return ""
    way, other, side = ("rises", "falls", "below") if target.rises else ("falls", "rises", "above")
    return f" (taken as a figure that {way}, as the untrained model has {target.start:.4g}; a target for one that {other} is {side} that)"


TRIALS = "trials.jsonl"
"""File of the trials in a run directory, which grows while they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsToTarget(display.Shown, JsonDataclass):
    """Trials at several batches, each until a target was reached or out of reach."""

    task: str
    """Name of the task."""
    target: Target
    """The loss or figure to reach."""
    trials: tuple[Trial, ...]
    """In the order in which they ended."""
    base_batch: int
    """Batch of the learning rates that the rules scale."""
    rules: tuple[str, ...] = ()
    """The requested rules, and "tuned" if learning rates were searched."""
    planned: int = 0
    """Number of all trials."""
    seconds: float = 0.0
    """From the first trial's start to the last one's end."""
    fitted: tuple[int, ...] | None = None
    """Batches that the law is fitted to; None = all."""

    @classmethod
    def of(cls, run: Any) -> "StepsToTarget":
        """The trials of a launch so far, while it runs, after an interrupt or failure, or at the end.

        Args:
            run: a Run, or the path of its directory.

        Raises:
            ValueError: it has no such trials.
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
        """Batches that were tried, ascending."""
        return tuple(sorted({trial.batch for trial in self.trials}))

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Optimizers that were tried, in the order of their first trials."""
        return tuple(dict.fromkeys(trial.optimizer for trial in self.trials))

    @property
    def whole(self) -> bool:
        """Whether all trials were run."""
        return bool(self.trials) and len(self.trials) >= self.planned

    def marks(self, optimizer: str | None = None, rule: str | None = None) -> tuple[Mark, ...]:
        """The mark of the seeds at each batch.

        Args:
            optimizer: None = the first.
            rule: one of the rules, or "tuned"; None = the best configuration at each batch.

        Raises:
            ValueError: no trials of that optimizer or rule.
        """
        optimizer = self._optimizer(optimizer)
        own = [trial for trial in self.trials if trial.optimizer == optimizer]
        if rule is None:
            return marks_of(own, self.target)
        known = tuple(dict.fromkeys(trial.rule for trial in own))
        if rule not in known:
            raise ValueError(f"rule={rule!r}: the rules that were tried are {', '.join(map(repr, known))}")
        return marks_of([trial for trial in own if trial.rule == rule], self.target)

    def best(self, batch: int, optimizer: str | None = None) -> Mark:
        """The configuration that took the fewest steps at a batch.

        Raises:
            ValueError: that batch was not tried.
        """
        marks = {mark.batch: mark for mark in self.marks(optimizer)}
        if batch not in marks:
            raise ValueError(f"best({batch!r}): batches that were tried are {', '.join(map(units.count, marks))}; predict(batch) has any")
        return marks[batch]

    def fit(self, optimizer: str | None = None, rule: str | None = None, batches: Sequence[int] | None = None) -> CriticalBatch:
        """Fit the law of steps against batch. It holds for the best learning rates; without `retune` the rules' curve is fitted.

        Args:
            optimizer: None = the first.
            rule: None = the best configuration at each batch.
            batches: those to fit to; None = those of `fitted_to`, or all.

        Raises:
            ValueError: the target was reached at fewer than two batches.
        """
        fitted = self.fitted if batches is None else tuple(batches)
        marks = [mark for mark in self.marks(optimizer, rule) if fitted is None or mark.batch in fitted]
        try:
            return CriticalBatch.fit([Point(batch=mark.batch, steps=mark.steps, reached=mark.reached) for mark in marks])
        except ValueError as error:
            raise ValueError("; ".join([str(error), *self.notes])) from None

    def fitted_to(self, batches: Sequence[int]) -> "StepsToTarget":
        """The same trials with the law fitted to some batches only; the table and the picture then predict the others.

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
        """Seconds to the target by a throughput, and the best batch for each number of processes.

        Args:
            throughput: samples per second: {batch: rate}, {(world_size, batch): rate}, runs of `wb.sweep`, a list of points with `batch`
                (or `global_batch`), `samples_per_sec` and perhaps `world_size`, or anything that has such `.points`.
            micro_batch: if given, a mapping's keys are numbers of processes, each with this batch.
            optimizer: None = the first.

        Raises:
            ValueError: not a throughput, or no law.
        """
        return TimeToTarget.of(self.fit(optimizer), rates_of(throughput, micro_batch), target=str(self.target))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks: target not reached, losses not finite, trials missing."""
        return notes_of(self.trials, self.target, self.planned)

    @property
    def table(self) -> display.Table:
        """Steps in a row per configuration and a column per batch; `> 300` = not reached by then, `∞` = diverged."""
        rows: list[list[object]] = []
        several = len(self.optimizers) > 1
        for optimizer in self.optimizers:
            for rule in dict.fromkeys(trial.rule for trial in self.trials if trial.optimizer == optimizer):
                marks = {mark.batch: mark for mark in self.marks(optimizer, rule)}
                name = f"{optimizer} {rule}" if several else rule
                rows.append([name, *(marks[batch].text if batch in marks else units.MISSING for batch in self.batches)])
            rows += self._law_row(optimizer, several)
        title = f"Steps to {self.target} · {self.task}" + ("" if several or not self.optimizers else f" · {self.optimizers[0]}")
        return display.Table(
            columns=("batch", *map(units.count, self.batches)), rows=rows, title=title, note=display.notes(self._remarks())
        )

    def _law_row(self, optimizer: str, several: bool) -> list[list[object]]:
        try:
            law = self.fit(optimizer)
        except ValueError:
            return []
        cells = [f"{round(law.steps(batch)):,}" + ("*" if self._held_out(batch) else "") for batch in self.batches]
        return [[f"{optimizer} law" if several else "law", *cells]]

    def _remarks(self) -> list[str]:
        remarks = []
        for optimizer in self.optimizers:
            try:
                law = self.fit(optimizer)
            except ValueError:
                continue
            name = f"{optimizer}: " if len(self.optimizers) > 1 else ""
            remarks.append(f"{name}s_min {law.s_min:,.0f}, b_crit {law.words}" + (f" ({law.advice})" if law.advice else ""))
        if self.fitted is not None and set(self.batches) - set(self.fitted):
            remarks.append("* = not fitted to, predicted")
        return [*remarks, *self.notes, f"{len(self.trials)} trials in {units.seconds(self.seconds)}"]

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
