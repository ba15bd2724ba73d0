"""Part `speeds`: what `workbench doctor` measures of the GPU, against plain loops on the wall clock and on the device's."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_check.machine import Bench, percent
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.runner import scratch_folder
from workbench.core import units
from workbench.core.machine_speeds import SPEEDS, MachineSpeeds
from workbench.harness.measure_speeds import COPY_BYTES, GPU, HOST, machine_speeds

MAX_APART = {"launch": 0.5, "event": 0.5, "sync": 0.5, "pageable": 0.3, "pinned": 0.15}
"""Fraction by which a speed may differ from a plain loop. Those of the host are a thread's CPU time there, and wall time here."""
MAX_SECONDS = 3.0
"""For all of them: a second for torch's first kernel, and some hundred copies."""
QUEUED = 500
"""Calls of a plain loop: fewer than CUDA's queue holds."""
ROUNDS = 9


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""
    os.environ["WORKBENCH_CACHE"] = str(Path(scratch_folder()) / "speeds")  # nothing is on file
    names = HOST + GPU if bench.gpu else HOST
    start = time.perf_counter()
    speeds = machine_speeds(names, fresh=True)
    seconds = time.perf_counter() - start
    missing = [name for name in names if name not in speeds.speeds]
    report.row(
        "all are measured",
        (not missing and not speeds.notes and seconds <= MAX_SECONDS) if bench.gpu else None,
        values={"seconds": seconds, "missing": missing, "notes": list(speeds.notes)},
        result=f"{len(names) - len(missing)} of {len(names)} in {units.seconds(seconds)}{'; '.join(['', *speeds.notes])}",
        expected=f"all, within {units.seconds(MAX_SECONDS)}",
    )
    noisy = [name for name, speed in speeds.speeds.items() if speed.noisy]
    report.row("none is noisy", not noisy if bench.gpu else None, result=", ".join(noisy) or "none", expected="none")
    kept = MachineSpeeds.load()
    report.row(
        "they are kept", kept.speeds == speeds.speeds, result=f"{len(kept.speeds)} on file for {', '.join(kept.machine.gpus) or 'no GPU'}"
    )
    for name, plain in plain_loops().items() if bench.gpu else ():
        with report.guard(name):
            _compare(report, name, speeds, plain())


def _compare(report: Report, name: str, speeds: MachineSpeeds, plain: float) -> None:
    measured = speeds.speeds[name]
    apart = measured.median / plain - 1
    show = units.seconds if SPEEDS[name][0] == "s" else lambda rate: f"{units.bytes_(rate)}/s"
    report.row(
        name,
        abs(apart) <= MAX_APART[name],
        values={"measured": measured.median, "spread": measured.spread, "plain": plain},
        result=f"{show(measured.median)} (± {units.percent(measured.spread / 2)}) to {SPEEDS[name][1]}",
        plain=f"{show(plain)}: {percent(apart)}",
        expected=f"± {units.percent(MAX_APART[name])}",
    )


def plain_loops() -> dict[str, Callable[[], float]]:
    """The same speeds by plain loops: those of the host by its clock, rates of copies by events on the device."""
    values = torch.ones(16, device="cuda")
    event, stream = torch.cuda.Event(enable_timing=True), torch.cuda.current_stream()
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")

    def host(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(QUEUED):
                call()
            seconds.append((time.perf_counter() - start) / QUEUED)
        return statistics.median(seconds)

    def rate(source: torch.Tensor) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        rates = []
        for _ in range(ROUNDS):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(COPY_BYTES / (begin.elapsed_time(end) / 1e3))  # ms → s
        return statistics.median(rates)

    return {
        "launch": lambda: host(lambda: values.add_(1)),
        "event": lambda: host(lambda: event.record(stream)),  # asking for the stream takes longer
        "sync": lambda: host(torch.cuda.synchronize),
        "pageable": lambda: rate(pageable),
        "pinned": lambda: rate(pageable.pin_memory()),
    }
