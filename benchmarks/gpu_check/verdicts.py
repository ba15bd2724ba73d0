"""Part `verdicts`: verdicts of wb.diagnose on planted and healthy loops, and its length of a step against the wall clock."""

import math
from collections.abc import Mapping

import workbench as wb
from benchmarks.gpu_check import loops
from benchmarks.gpu_check.loops import CASES, Case, Sizes
from benchmarks.gpu_check.machine import Bench, percent, spread
from benchmarks.gpu_check.report import Report

BUDGET_S = 12.0
"""Seconds of each diagnosis."""
CLEAR = 0.25
"""From this fraction of the step on, by the wall clock, the planted cause has to be named; the library blames from 15 % on, ± noise."""
FAINT = 0.10
"""Below this fraction it must not be named; in between either is right."""
MAX_STEP_ERROR = 0.05
"""By how much the diagnosis may take a step for longer or shorter than it is, beside what the wall clock's own two times differ."""
MAX_DRIFT = 0.10
"""Most of that difference that is granted."""
MAX_PAUSED_ERROR = 0.15
"""The same for loops that save files, whose time varies."""


def run(report: Report, bench: Bench) -> None:
    """Add a row per case."""
    sizes = loops.sizes(bench)
    names = ("width", "rows", "seconds")
    report.row(
        "a plain step",
        None,
        values={name: getattr(sizes, name) for name in names},
        step=f"{sizes.seconds * 1e3:.1f} ms",
        **{"planted cause costs": ""},
        result=f"{loops.LAYERS} layers of {sizes.width}², {sizes.rows:,} rows, fp32",
        **{"step error": ""},
        expected="",
    )
    for case in report.todo(CASES.values(), name=lambda case: case.name):
        with report.guard(case.name):
            _judge(report, bench, sizes, case)
        bench.clear()
    loops.checkpoint_file().unlink(missing_ok=True)


def _judge(report: Report, bench: Bench, sizes: Sizes, case: Case) -> None:
    clean = None
    if case.planted and not case.unproved:
        step, loader = case.build(sizes, False)
        clean = bench.seconds_per_step(step, loader)
        del step, loader
        bench.clear()
    step, loader = case.build(sizes, True)
    true = [bench.seconds_per_step(step, loader)]
    diagnosis = wb.diagnose(step, loader, budget_s=bench.pick(BUDGET_S, 4.0))
    true.append(bench.seconds_per_step(step, loader))
    seconds = sum(true) / len(true)
    saved = 0.0 if clean is None else 1 - clean / seconds
    error = diagnosis.evidence.step / seconds - 1
    allowed = (MAX_PAUSED_ERROR if case.pauses else MAX_STEP_ERROR) + min(MAX_DRIFT, spread(true))
    named, timed = is_right(case, diagnosis.verdict, diagnosis.cause, saved), abs(error) <= allowed
    report.row(
        case.name,
        named and timed if bench.gpu else None,
        values={
            "true": true,
            "clean": clean,
            "saved": saved,
            "verdict": diagnosis.verdict,
            "cause": diagnosis.cause,
            "step": diagnosis.evidence.step,
            "error": error,
            "named": named,
            "timed": timed,
            "seconds": diagnosis.evidence.seconds,
            "remedies": [[remedy.name, remedy.low, remedy.speedup, remedy.high, remedy.ceiling] for remedy in diagnosis.remedies],
            "text": str(diagnosis),
        },
        step=f"{seconds * 1e3:.2f} ms",
        **{"planted cause costs": "–" if clean is None else f"{saved:.0%}"},
        result=f"{'✓' if named else '✗'} {diagnosis.verdict} ({diagnosis.cause})",
        **{"step error": f"{'✓' if timed else '✗'} {percent(error, 1)}"},
        expected=f"{words(case, saved)}; ± {allowed:.0%}",
    )


def answers(case: Case, saved: float) -> list[Mapping[str, tuple[str, ...]]]:
    """What is right to say, where taking away what was planted saves that fraction of the step."""
    if not case.planted or case.unproved:
        return [case.answers]
    clear, faint = [case.answers] * (saved >= FAINT), [case.otherwise] * (saved < CLEAR)
    return clear + faint


def is_right(case: Case, verdict: str, cause: str, saved: float) -> bool:
    """Is the verdict right, and its cause?"""
    for right in answers(case, saved):
        causes = right.get(verdict)
        if causes is not None and (not causes or cause.startswith(causes)):
            return True
    return False


def words(case: Case, saved: float) -> str:
    """What is right to say, for the table."""
    if math.isnan(saved):
        return "–"
    rights: list[str] = []
    for right in answers(case, saved):
        rights += [f"{verdict} ({', '.join(causes)})" if causes else verdict for verdict, causes in right.items()]
    return " or ".join(dict.fromkeys(rights))
