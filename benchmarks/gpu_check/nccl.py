"""Part `nccl`: one rank over NCCL, two ranks that share the GPU over gloo, and the error where NCCL refuses that."""

import re
from pathlib import Path

import torch

import workbench as wb
from benchmarks.gpu_check import nccl_script
from benchmarks.gpu_check.machine import Bench
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.runner import scratch_folder
from workbench.core import units

PATIENCE = 120.0
"""Seconds that a launch may take."""
PLAINLY = re.compile(r"duplicate gpu|same gpu|one rank per|ranks? .* both on", re.IGNORECASE)
"""What an error has to say where two ranks are on one GPU."""


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""
    folder = scratch_folder() / "runs"
    gpus = torch.cuda.device_count()
    spec = wb.RunSpec(task="text-gpt", device=bench.kind, steps=bench.pick(40, 10))
    if bench.gpu and not report.has("more ranks than GPUs"):
        with report.guard("more ranks than GPUs"):
            _too_many(report, spec.replace(nproc_per_node=gpus + 1))
    trainings = {
        "one rank, NCCL": spec.replace(backend=bench.pick("nccl", "gloo")),
        "two ranks on one GPU, gloo": spec.replace(backend="gloo", nproc_per_node=2),
    }
    if gpus > 1:
        trainings["two ranks on two GPUs, NCCL"] = spec.replace(backend="nccl", nproc_per_node=2)
    for name in report.todo(trainings):
        with report.guard(name):
            _training(report, bench, name, wb.launch(trainings[name], runs_dir=folder, timeout=PATIENCE).wait())
    if bench.gpu:
        script = Path(nccl_script.__file__)
        for name, ranks in (("a script, one rank, NCCL", 1), ("a script, two ranks on one GPU, NCCL", 2)):
            if not report.has(name):
                with report.guard(name):
                    _script(report, name, wb.launch(script, nproc_per_node=ranks, runs_dir=folder, timeout=PATIENCE).wait(), ranks)


def _too_many(report: Report, spec: wb.RunSpec) -> None:
    text = "it was launched"
    try:
        wb.launch(spec, runs_dir=scratch_folder() / "runs").stop()
    except ValueError as error:
        text = str(error)
    report.row("more ranks than GPUs", "one rank per" in text, result=text[:200], expected="refused, and says how many there are")


def _training(report: Report, bench: Bench, name: str, run: wb.Run) -> None:
    if run.state != "finished":
        report.row(name, False, values={"error": str(run.error)}, result=f"{run.state}: {' '.join(str(run.error).split())[:200]}")
        return
    clocks = {timeline.clock for timeline in run.timelines}
    timeline = run.timelines[0]
    report.row(
        name,
        clocks == {"device"} if bench.gpu else None,
        values={"clocks": sorted(clocks), "step": timeline.median(), "backward": timeline.median("backward")},
        result=f"finished, {units.seconds(timeline.median())} per step, {units.seconds(timeline.median('backward'))} of it backward",
        expected="finished, the device's clock",
    )


def _script(report: Report, name: str, run: wb.Run, ranks: int) -> None:
    if run.state == "finished":
        text = "" if ranks == 1 else "; this NCCL allows two ranks on one GPU"
        report.row(name, True, result=f"finished{text}", expected="finished" if ranks == 1 else "finished, or refused with a clear error")
        return
    text = str(run.error)
    report.row(
        name,
        ranks > 1 and PLAINLY.search(text) is not None,
        values={"error": text, "kind": run.error.kind if run.error else "", "state": run.state},
        result=" ".join(text.split())[:250],
        expected="finished" if ranks == 1 else "finished, or refused with a clear error",
    )
