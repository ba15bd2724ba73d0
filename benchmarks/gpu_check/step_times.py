"""Part `step_times`: wb.estimate_time against the wall clock of plain loops, by the datasheet and at the level of one measured step."""

import itertools
import statistics
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import workbench as wb
from benchmarks.estimate_time import Gpt2
from benchmarks.gpu_check.machine import Bench, percent
from benchmarks.gpu_check.memory import Case, Training, cases, here
from benchmarks.gpu_check.report import Report
from benchmarks.memory_cases import loss, tokens
from workbench.core import units
from workbench.core.statistics import Interval

LEVEL = "GPT-2, AdamW, bf16"
"""Its measured step sets the level of the others: a usual training, with operators of each kind."""
AT_LEAST = 0.4
"""Seconds that a step is timed for, about."""


def run(report: Report, bench: Bench) -> None:
    """Add a row per case, and one with the medians."""
    warnings.simplefilter("ignore")
    every = [case for case in cases(bench) if not case.compiled]
    every.sort(key=lambda case: case.name != LEVEL)
    for share in (0.0, 0.1):
        name = f"nanoGPT of 2022, dropout {share}"
        every.append(Case(name=name, model=partial(_nanogpt, share, bench), batch=partial(_words, bench), precision="amp_bf16"))
    level: wb.StepTime | None = None
    errors = list[tuple[float, float]]()
    for case in every:
        if case.name != LEVEL and report.has(case.name):
            continue
        with report.guard(case.name):
            knobs: dict[str, Any] = {"precision": case.precision, "checkpointing": case.checkpointing, "accumulation": case.accumulation}
            knobs |= {"loss": loss, "optimizer": case.optimizer, "device": bench.pick(here(bench), "H100")}
            told = wb.estimate_time(case.model, case.batch(), **knobs)
            seconds = measured(case, bench)
            if case.name == LEVEL:
                level = told.calibrate(seconds)
            assert level is not None, f"{LEVEL} was not measured"
            after = replace(told, calibration=level.calibration).seconds
            error, then = told.seconds.mid / seconds - 1, after.mid / seconds - 1
            errors += [(error, then)] if case.name != LEVEL else []
            report.row(
                case.name,
                seconds in told.seconds if bench.gpu else None,
                values={
                    "measured": seconds,
                    "told": told.seconds.mid,
                    "at_level": after.mid,
                    "parts": told.parts,
                    "inside": seconds in after,
                },
                step=units.seconds(seconds),
                datasheet=f"{_text(told.seconds)} ({percent(error)})",
                **{"at the level of one step": "–" if case.name == LEVEL else f"{_text(after)} ({percent(then)})"},
                expected="inside the datasheet's interval",
            )
        bench.clear()
    if errors:
        typical = [percent(statistics.median(map(abs, each))).lstrip("+") for each in zip(*errors, strict=True)]
        report.row("median error", None, datasheet=typical[0], **{"at the level of one step": typical[1]})


def _text(seconds: Interval) -> str:
    low, mid, high = (f"{1e3 * each:.3g}" for each in (seconds.low, seconds.mid, seconds.high))
    return f"{mid} ms ({low} … {high})"


def _words(bench: Bench) -> tuple[Tensor, Tensor]:
    """As its bench.py has them."""
    given, next_ = tokens(bench.pick(8, 2), bench.pick(1024, 32), 50_257)
    return given, next_.flatten()


def _nanogpt(dropout: float, bench: Bench) -> nn.Module:
    model = Gpt2(bench.pick(12, 1), bench.pick(1024, 32))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
    return nn.Sequential(model, nn.Flatten(0, 1))


def measured(case: Case, bench: Bench) -> float:
    """Seconds of a step whose batch lies on the device, from sync to sync."""
    torch.manual_seed(0)
    training = Training(case, bench)
    batch = tuple(part.to(bench.kind) for part in case.batch())
    return bench.seconds_per_step(training.step, list(itertools.repeat(batch, bench.pick(20, 2))), at_least=bench.pick(AT_LEAST, 0.0))
