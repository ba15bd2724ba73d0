"""Part `train`: trainings that wb.launch starts on the GPU, in three precisions; their clock, and their speed against the wall clock."""

import os
from pathlib import Path

import workbench as wb
from benchmarks.gpu_check import tasks
from benchmarks.gpu_check.machine import Bench, percent
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.runner import scratch_folder
from workbench.core import units

PATIENCE = 200.0
"""Seconds that a launch may take."""
FIRST, LAST = 60, 249
"""Steps between which a run's own times are set against the wall clock's."""
MAX_RATE_ERROR = 0.05
"""By how much they may differ over 189 steps: the wall clock is the host's, which runs ahead of the device by some steps."""


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""
    folder = scratch_folder() / "runs"
    spec = wb.RunSpec(task="text-gpt", device=bench.kind, steps=bench.pick(100, 12), num_workers=2, pin_memory=bench.gpu, micro_batch=32)
    if not report.has("wall clock"):
        with report.guard("wall clock"):
            _wall_clock(report, bench, spec, folder)
    precisions = bench.pick(("fp32", "amp_bf16", "amp_fp16"), ("fp32", "amp_bf16"))
    with report.guard("precisions"):
        for precision, run_ in zip(precisions, wb.sweep(spec, precision=precisions, runs_dir=folder, quiet=True), strict=True):
            _precision(report, bench, precision, run_)
    with report.guard("pictures"):
        pictures = spec.replace(task="clipart-resnet", precision="amp_bf16", channels_last=True)
        _precision(report, bench, "pictures, amp_bf16, channels_last", wb.launch(pictures, runs_dir=folder).wait(PATIENCE))


def _precision(report: Report, bench: Bench, name: str, run_: wb.Run) -> None:
    if run_.state != "finished":
        report.row(name, False, values={"error": str(run_.error)}, result=f"{run_.state}: {str(run_.error).splitlines()[0][:150]}")
        return
    timeline, peak = run_.timelines[0], run_.memory[0]
    phases = {phase: timeline.median(phase) for phase in ("data_wait", "h2d", "forward", "backward", "optimizer", "other")}
    right = timeline.clock == "device" and all(phases[phase] > 0 for phase in ("forward", "backward", "optimizer")) and bool(peak)
    report.row(
        name,
        right if bench.gpu else None,
        values={
            "phases": phases,
            "samples_per_sec": timeline.samples_per_sec,
            "memory": peak,
            "clock": timeline.clock,
            "notes": timeline.notes,
        },
        result=f"{timeline.samples_per_sec:,.0f} samples/s by the {timeline.clock}'s clock",
        step=units.seconds(timeline.median()),
        memory=units.bytes_(peak) if peak else "–",
        expected="finished, the device's clock, all phases, a peak",
    )


def _wall_clock(report: Report, bench: Bench, spec: wb.RunSpec, folder: Path) -> None:
    """The task notes the time of each call of its loss; the timeline has the length of each step."""
    path = scratch_folder() / "stamps.txt"
    os.environ[tasks.STAMPS] = str(path)
    first, last = bench.pick((FIRST, LAST), (20, 49))
    try:
        run_ = wb.launch(spec.replace(task=f"{Path(tasks.__file__)}:stamped", steps=last + 1), runs_dir=folder).wait(PATIENCE)
    finally:
        del os.environ[tasks.STAMPS]
    if run_.state != "finished":
        report.row("wall clock", False, values={"error": str(run_.error)}, result=f"{run_.state}: {str(run_.error)[:150]}")
        return
    stamps, timeline = [float(line) for line in path.read_text().split()], run_.timelines[0]
    seconds = sum(step.seconds for step in timeline.steps[first:last])
    wall = stamps[last] - stamps[first]
    error = seconds / wall - 1
    report.row(
        "wall clock",
        abs(error) <= MAX_RATE_ERROR and timeline.clock == "device" if bench.gpu else None,
        values={"wall": wall, "steps": seconds, "count": last - first, "clock": timeline.clock},
        result=f"{(last - first) * spec.micro_batch / wall:,.0f} samples/s by the wall clock; the timeline differs by {percent(error, 1)}",
        step=units.seconds(wall / (last - first)),
        expected=f"± {MAX_RATE_ERROR:.0%}, the device's clock",
    )
