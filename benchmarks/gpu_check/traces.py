"""Part `traces`: wb.trace records kernels, its busy and idle time agree with the wall clock, and its explanation is right."""

from typing import Any

import workbench as wb
from benchmarks.gpu_check import loops
from benchmarks.gpu_check.loops import CASES, Sizes
from benchmarks.gpu_check.machine import Bench, percent, spread
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.runner import scratch_folder
from workbench.core import units

STEPS = 6
MAX_STEP_ERROR = 0.10
"""By how much a traced step, less the slowdown that the trace itself reports, may differ from the wall clock's."""
MAX_DRIFT = 0.10
"""Most that is granted for what the wall clock's times before and after the trace differ, as they do where the host sets the pace."""
MIN_BUSY = 0.9
"""Of a healthy step the GPU computes at least this fraction, also under the profiler, which slows the host only."""
MAX_SUM_ERROR = 1e-6
"""The parts of a step add up to it: they are counted in nanoseconds."""
EXPECTED: dict[str, tuple[str, ...]] = {
    "healthy, loss read each 10 steps": ("compute-bound",),
    "loader sleeps": ("input-bound",),
    "large pageable batches": ("transfer-bound",),
    "many small kernels": ("host-bound", "idle"),
    ".item() after each layer": ("host-bound", "idle", "compute-bound"),
}
"""Case of `loops` → verdicts of `trace.explain()` that are right."""


def run(report: Report, bench: Bench) -> None:
    """Add a row per case."""
    sizes = loops.sizes(bench)
    for name in report.todo(EXPECTED):
        with report.guard(name):
            _trace(report, bench, sizes, name)
        bench.clear()


def _trace(report: Report, bench: Bench, sizes: Sizes, name: str) -> None:
    step, loader = CASES[name].build(sizes, True)
    wall = [bench.seconds_per_step(step, loader)]
    trace = wb.trace(step, loader, steps=STEPS, into=scratch_folder() / "traces" / name.replace(" ", "-"))
    parts, explanation, idle = trace.breakdown(), trace.explain(), trace.idle()
    wall.append(bench.seconds_per_step(step, loader))
    seconds, allowed = sum(wall) / 2, MAX_STEP_ERROR + min(MAX_DRIFT, spread(wall))
    slowdown = trace.slowdown or 0.0
    plain = parts.mean() / (1 + slowdown)
    error = plain / seconds - 1
    gap = max(abs(sum(getattr(one, part) for part in explanation.shares) - one.total) for one in parts.steps)
    launches = trace.launches()
    kernels = sum(row.count for row in trace.ops("kernel").rows) / len(parts.steps)
    causes = sorted(idle.causes, key=lambda cause: -cause.seconds)[:2]
    checks = {
        "kernels": kernels > 0 and parts.device == "device",
        "step": abs(error) <= allowed,
        "parts": gap <= MAX_SUM_ERROR,
        "explanation": explanation.verdict in EXPECTED[name],
        "busy": not name.startswith("healthy") or parts.share("compute") >= MIN_BUSY,
    }
    values: dict[str, Any] = {
        "checks": checks,
        "wall": wall,
        "traced": parts.mean(),
        "slowdown": trace.slowdown,
        "shares": dict(explanation.shares),
        "kernels": kernels,
        "explanation": str(explanation),
        "launches": str(launches),
        "idle": str(idle),
        "copies": str(trace.copies()),
        "notes": trace.notes,
    }
    wrong = [check for check, right in checks.items() if not right]
    report.row(
        name,
        not wrong if bench.gpu else None,
        values=values,
        wall=units.seconds(seconds),
        traced=f"{units.seconds(parts.mean())}, the profiler adds {units.percent(slowdown)}: {percent(error, 1)}",
        kernels=f"{kernels:.0f} per step",
        busy=units.percent(parts.share("compute")),
        idle=", ".join(f"{cause.cause} {units.percent(cause.share)}" for cause in causes if cause.share > 0.01),
        result=explanation.verdict + (f" (wrong: {', '.join(wrong)})" if wrong else ""),
        expected=f"{' or '.join(EXPECTED[name])}; ± {allowed:.0%}",
    )
