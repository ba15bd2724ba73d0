"""Part `oom`: every error message of memory that ran out is recognised; diagnose, would_fit and max_micro_batch survive it.

For seconds at a time the GPU's memory is filled to the last MiB: nothing else should run on it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from benchmarks.gpu_check import loops, provoke, tasks
from benchmarks.gpu_check.machine import Bench
from benchmarks.gpu_check.report import Report, last_line
from benchmarks.gpu_check.runner import scratch_folder
from workbench.core import units

PATIENCE = 150.0
"""Seconds that a provocation, or a launch, may take."""
ABOUT_MEMORY = re.compile(r"memory|alloc", re.IGNORECASE)
"""Texts without these words do not say that memory ran out."""
ROOM = 1.3
"""Of the memory that a step reserves, what PyTorch is allowed while it is diagnosed: twice the batch takes about 1.7."""
MAX_LEFT = 64 * 2**20
"""Bytes that a failed diagnosis may leave allocated beyond what there was: the workspaces of cuBLAS on two streams."""


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""
    for name in report.todo(provoke.SPELLINGS if bench.gpu else provoke.ON_CPU):
        with report.guard(name):
            _spelling(report, name)
    if not report.has("diagnose, a step that runs out of memory"):
        with report.guard("diagnose, a step that runs out of memory"):
            _failing_step(report, bench)
    bench.clear()
    if bench.gpu and not report.has("diagnose, no room for a larger batch"):
        with report.guard("diagnose, no room for a larger batch"):
            _no_room(report, bench)
    bench.clear()
    if bench.gpu and not report.has("launched, the largest that fits"):
        with report.guard("launched, the largest that fits"):
            _launched(report)


def _spelling(report: Report, name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check.provoke", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        report.row(name, False, result=f"its process ended with {done.returncode}: {tail[:150]}")
        return
    answer: dict[str, Any] = json.loads(lines[-1])
    message = answer.get("message", "")
    if not message:
        report.row(name, None, values=answer, result=answer.get("error") or "no error: there was enough for it")
        return
    known = answer["kind"] == "out-of-memory" and bool(answer["parsed"])
    report.row(
        name,
        known if ABOUT_MEMORY.search(message) else None,
        values=answer,
        result=f"kind {answer['kind'] or 'unknown'}{'' if answer['parsed'] else ', not explained'}",
        text=" ".join(message.split())[:110],
        expected="out-of-memory, explained",
    )


def _failing_step(report: Report, bench: Bench) -> None:
    """Memory runs out in the fourth call: an error that says so, weights as before, and nothing left behind."""
    step, loader = loops.plain(loops.sizes(bench), 20, item=1)
    calls = {"n": 0}

    def failing(batch: torch.Tensor) -> None:
        calls["n"] += 1
        step(batch)
        if calls["n"] == 4:
            torch.empty(provoke.HUGE, dtype=torch.uint8, device=bench.kind)

    model = next(cell.cell_contents for cell in step.__closure__ or () if isinstance(cell.cell_contents, torch.nn.Module))
    before = [weight.detach().clone() for weight in model.parameters()]
    bench.clear()
    held = torch.cuda.memory_allocated() if bench.gpu else 0
    text = "no error"
    try:
        wb.diagnose(failing, loader, budget_s=5)
    except Exception as error:
        text = last_line(error)
    bench.clear()
    left = torch.cuda.memory_allocated() - held if bench.gpu else 0
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    report.row(
        "diagnose, a step that runs out of memory",
        same and left <= MAX_LEFT and "memory" in text if bench.gpu else None,
        values={"text": text, "left": left, "same": same},
        result=f"weights {'as before' if same else 'changed'}, {units.bytes_(max(0, left))} left behind",
        text=text[:110],
        expected=f"an error about memory, weights as before, ≤ {units.bytes_(MAX_LEFT)}",
    )


def _no_room(report: Report, bench: Bench) -> None:
    """The step fits, twice its batch does not: the diagnosis goes on without that experiment."""
    step, loader = loops.plain(loops.sizes(bench), 40, item=10)
    bench.clear()
    torch.cuda.reset_peak_memory_stats()
    bench.seconds_per_step(step, loader, at_least=0.2)
    peak, (_, total) = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM * peak / total))
    try:
        diagnosis = wb.diagnose(step, loader, budget_s=8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    report.row(
        "diagnose, no room for a larger batch",
        diagnosis.verdict == "compute-bound",
        values={"text": str(diagnosis), "limit": ROOM * peak},
        result=f"{diagnosis.verdict} ({diagnosis.cause})",
        text="; ".join(diagnosis.evidence.notes)[:110],
        expected="compute-bound",
    )


def _launched(report: Report) -> None:
    """A run that takes twice what fits fails and is explained; a run with the largest micro-batch that would_fit names finishes."""
    folder = scratch_folder() / "runs"
    spec = wb.RunSpec(task=f"{Path(tasks.__file__)}:hungry", device="cuda", steps=4, micro_batch=8)
    free, total = torch.cuda.mem_get_info()
    size = 2 * wb.max_micro_batch(spec, "cuda", capacity=free).micro_batch
    run = wb.launch(spec.replace(micro_batch=size), runs_dir=folder).wait(PATIENCE)
    kind = run.error.kind if run.error else run.state
    report.row(
        f"launched with {size:,} samples",
        kind == "out-of-memory" and run.error is not None and run.error.memory is not None,
        values={"error": str(run.error), "free": free, "total": total},
        result=f"kind {kind}",
        text=" ".join(str(run.error.memory if run.error else "").split())[:110],
        expected="out-of-memory, explained",
    )
    answer = wb.would_fit(run)
    largest = answer.largest.micro_batch
    again = wb.launch(spec.replace(micro_batch=largest), runs_dir=folder).wait(PATIENCE)
    peak = again.memory[0] if again.memory else None
    report.row(
        "launched, the largest that fits",
        again.state == "finished",
        values={"answer": answer.word, "largest": largest, "error": str(again.error), "peak": peak, "changes": str(answer.changes)},
        result=f"{largest:,} samples: {again.state}" + (f", {units.bytes_(peak)} of {units.bytes_(total)}" if peak else ""),
        text=answer.word[:110],
        expected="finished",
    )
