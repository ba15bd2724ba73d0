"""Part `survive`: kills and resumes with dropout, GradScaler and FSDP, repeated steps, hangs, and the flight recorder of NCCL."""

import json
import re
import time
from pathlib import Path

import torch

import workbench as wb
from benchmarks.gpu_check import hang_script, tasks
from benchmarks.gpu_check.machine import Bench
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.runner import scratch_folder
from workbench.core import units

PATIENCE = 120.0
"""Seconds that a launch may take."""
HANG_WITHIN = 15.0
"""Seconds after which a hang has to be named."""


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""
    folder, gpus = scratch_folder() / "runs", torch.cuda.device_count()
    spec = wb.RunSpec(task=f"{tasks.__file__}:dropping", device=bench.kind, steps=12, micro_batch=8, deterministic=True)
    several = {"nproc_per_node": gpus} if gpus > 1 else {}
    resumes = {
        "a resume, dropout": spec,
        "a resume, dropout, amp_fp16 with a GradScaler": spec.replace(precision=bench.pick("amp_fp16", "fp32"), clip_grad_norm=1.0),
        "a resume, FSDP": spec.replace(parallel="fsdp", precision="amp_bf16", backend=bench.pick("nccl", "gloo"), **several),
    }
    for name in report.todo(resumes):
        with report.guard(name):
            proof = wb.prove_resume(resumes[name], kills=1, timeout=PATIENCE, runs_dir=folder)
            assert isinstance(proof, wb.ResumeProof)
            report.row(name, proof.exact, result=proof.verdict[:250], expected="exact, bit for bit")
    if not report.has("steps repeated"):
        with report.guard("steps repeated"):
            trained = wb.launch(spec, step_digests=True, checkpoint_every=5, runs_dir=folder).wait(PATIENCE, check=True)
            found = wb.recompute(trained, timeout=PATIENCE, runs_dir=folder)
            report.row("steps repeated", found.right is True, result=found.explanation[:250], expected="the same, bit for bit")
    scripts = {"the flight recorder of NCCL": ("recorder", 1)} if bench.gpu else {}
    scripts |= {"a hang of two ranks on one device, gloo": ("gloo", 2)}
    scripts |= {"a hang of two ranks on two GPUs, NCCL": ("nccl", 2)} if gpus > 1 else {}
    for name in report.todo(scripts):
        with report.guard(name):
            what, ranks = scripts[name]
            started = wb.launch(hang_script.__file__, args=[what, bench.kind], nproc_per_node=ranks, timeout=PATIENCE, runs_dir=folder)
            (_recorder if what == "recorder" else _hang)(report, name, started)


def _recorder(report: Report, name: str, run_: wb.Run) -> None:
    """What NCCL's flight recorder has of a reduction that has ended, and of one that the device has not begun."""
    run_.wait()
    rows = [row for line in run_.logs(0).splitlines() if line.startswith("[") for row in json.loads(line)]
    source = Path(hang_script.__file__).read_text().splitlines()
    named = all(
        any(Path(file).name == "hang_script.py" and "all_reduce" in source[line - 1] for file, line, _ in row["frames"]) for row in rows
    )
    seen = [(row["op"], row["number"], row["pending"]) for row in rows]
    report.row(
        name,
        named and seen == [("all_reduce", 45, False), ("all_reduce", 46, True)],
        values={"rows": rows},
        result=str(seen if rows else run_.error)[:250],
        expected="two all_reduce, the second pending, and the lines that called them",
    )


def _hang(report: Report, name: str, run_: wb.Run) -> None:
    """Which rank is named, and how soon."""
    limit, began = time.monotonic() + PATIENCE, None
    try:
        while not began and time.monotonic() < limit and run_.state == "running":
            time.sleep(0.1)
            began = re.search(r"HANG ([\d.]+)", run_.logs())
        since = float(began[1]) if began else time.time()
        while not run_.hang and time.time() < since + 2 * HANG_WITHIN and run_.state == "running":
            time.sleep(0.1)
        seconds, found = time.time() - since, run_.hang
    finally:
        run_.stop()
    right = found is not None and found.rank == 1 and "sleeps in hang()" in found.message and seconds <= HANG_WITHIN
    said = found.message if found else f"nothing was said: {run_.state}, {run_.error or ''}"
    report.row(name, right, values={"seconds": seconds}, result=f"after {units.seconds(seconds)}: {said[:200]}",
               expected=f"rank 1 sleeps in hang(), within {units.seconds(HANG_WITHIN)}")  # fmt: skip
