"""Runs the parts, each in a process of its own with a time limit, and leaves out what has been run already with the same code."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.report import Report

ROOT = Path(__file__).parents[2]
"""The checkout."""
ENDING = 10.0
"""Seconds that a part has to end after it was asked to, before it is killed."""


def code_version(part: str = "") -> str:
    """A short hash of the library and of this check, the modules of other parts aside: results of other code are not kept."""
    others = {f"{name}.py" for name in PARTS if part and name != part}
    own = [path for path in Path(__file__).parent.glob("*.py") if path.name not in others]
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "workbench").rglob("*.py"), *own]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def environment(scratch: Path) -> dict[str, str]:
    """Of a part's process: our own library, no cache of earlier proofs, and a folder for what is only needed meanwhile."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "KINETO_LOG_LEVEL": "6",
        "WORKBENCH_CACHE": str(scratch / "cache"),
        "GPU_CHECK_SCRATCH": str(scratch),
    }
    return {**os.environ, **own}


def scratch_folder() -> Path:
    """Where a part may leave files; it is deleted when the part has ended."""
    folder = os.environ.get("GPU_CHECK_SCRATCH")
    return Path(folder) if folder else Path(tempfile.mkdtemp(prefix="gpu-check-"))


def machine_facts() -> dict[str, Any]:
    """The machine as a process of its own sees it; this one never makes a CUDA context, whose memory would be in the way.

    Raises:
        RuntimeError: that process failed.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--facts"]
        done = subprocess.run(command, cwd=ROOT, env=environment(Path(folder)), capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def finished(folder: Path, part: Part, version: str) -> Report | None:
    """The report of a part that has come to its end with this code."""
    report = Report.load(folder / f"{part.name}.json")
    return report if report and report.complete and report.version == version else None


def prepared(folder: Path, part: Part, version: str, machine: dict[str, Any], *, again: bool, rows: str = "") -> Report:
    """The report that a part goes on with: that of an attempt with this code that was cut off, else an empty one.

    With `rows` those whose name contains it are made anew, and the others stay.
    """
    path = folder / f"{part.name}.json"
    report = None if again else Report.load(path)
    if report is None or report.version != version or (report.complete and not rows):
        report = Report(path=path, part=part.name)
    if rows:
        report.rows = [row for row in report.rows if rows not in row.name]
    report.title, report.version, report.machine = part.title, version, machine
    report.complete, report.error = False, ""
    report.save()
    return report


def run_part(part: Part, folder: Path, report: Report, *, device: str, seconds: float, rows: str = "") -> Report:
    """Run a part in a process of its own, and return what it has written.

    Args:
        part: to run.
        folder: of the reports.
        report: prepared; its file is what the process goes on with.
        device: "cuda", or "cpu" for a trial.
        seconds: after which it is ended.
        rows: only those whose name contains this.
    """
    before, start = report.seconds, time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run", part.name, "--out", str(folder), "--device", device, "--rows", rows]
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch,
        (folder / f"{part.name}.log").open("w") as log,
    ):
        # a session of its own: what it has started ends with it
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(Path(scratch)),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    ended = Report.load(report.path) or report
    ended.seconds = before + time.monotonic() - start
    if code is None:
        ended.error = f"ended after its time limit of {seconds:.0f} s"
    elif code and not ended.error:
        last = (folder / f"{part.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        ended.error = f"its process ended with {code}: {last[-1][:200] if last else 'no output'}"
    ended.save()
    return ended


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)


def run_all(
    names: Sequence[str], folder: Path, machine: dict[str, Any], *, device: str, again: bool, budget_s: float | None, rows: str = ""
) -> list[Report]:
    """Run parts in turn, print each one's table, and return their reports; those for which no time is left are missing."""
    start = time.monotonic()
    reports, left_over = [], []
    for part in (PARTS[name] for name in names):
        version = code_version(part.name)
        if not again and not rows and (kept := finished(folder, part, version)):
            reports.append(kept)
            print(f"{kept.markdown()[:-1]}, kept from {kept.machine.get('date', 'before')})\n", flush=True)
            continue
        left = float("inf") if budget_s is None else budget_s - (time.monotonic() - start)
        if left < part.seconds / 2:
            left_over.append(part.name)
            continue
        report = prepared(folder, part, version, machine, again=again, rows=rows)
        print(f"{part.name}: {part.title.lower()} …", file=sys.stderr, flush=True)
        reports.append(run_part(part, folder, report, device=device, seconds=min(part.limit, left), rows=rows))
        print(f"{reports[-1].markdown()}\n", flush=True)
    if left_over:
        print(f"No time was left for {', '.join(left_over)}: run again with the same --out, and the rest is kept.", flush=True)
    return reports


def summary(reports: Sequence[Report], names: Sequence[str]) -> str:
    """A line per part, in Markdown."""
    lines = ["| | part | right | seconds |", "| --- | --- | --- | --- |"]
    for report in reports:
        right, judged = report.score
        state = "" if report.complete else f" ({report.error or 'not complete'})"
        lines.append(f"| {'✓' if report.passed else '✗'} | {report.part}{state} | {right} of {judged} | {report.seconds:.0f} |")
    ran = {report.part for report in reports}
    lines += [f"| · | {name} (not run) | – | – |" for name in names if name not in ran]
    return "\n".join(lines)
