"""The command line: `python -m benchmarks.gpu_check [--parts timer,verdicts] [--rows TEXT] [--out DIR] [--again] [--budget-s 540]`.

On a machine with an NVIDIA GPU, torch, numpy, pandas and msgspec; nothing has to be installed: `PYTHONPATH=. python3 -m
benchmarks.gpu_check`. About 15 minutes for all parts. Its result is Markdown, and a JSON file for each part in the folder of `--out`; a
part that is there already, made by the same code, is not run again, and a part that was cut off goes on. Nothing else should run on the
GPU meanwhile: times are judged, and the part `oom` fills its memory for some seconds.

Exit code: 0 all is right, 1 something is wrong or was not run, 2 there is no GPU.
"""

import argparse
import contextlib
import ctypes
import json
import signal
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_check import machine, runner
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.report import Report, last_line

NO_GPU = 2
"""Exit code."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What was asked for; ends the program with a message for a part that does not exist."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="names with commas between them; none = all, in the order of --list")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results (default: gpu-check)")
    parser.add_argument("--again", action="store_true", help="run parts again that are there already")
    parser.add_argument("--budget-s", type=float, help="seconds for all parts; what is left over waits for the next run")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains this, made anew; the others stay")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # cpu: a trial, nothing is judged
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.names = [name.strip() for name in given.parts.split(",") if name.strip()] or list(PARTS)
    if unknown := [name for name in given.names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    return given


def run_here(name: str, folder: Path, device: str, rows: str = "") -> int:
    """Run a part in this process; what it raises is written into its report."""
    with contextlib.suppress(AttributeError, OSError):  # Linux: this process ends when the one that started it is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    report = Report.load(folder / f"{name}.json") or Report(path=folder / f"{name}.json", part=name, title=PARTS[name].title)
    report.only = rows
    try:
        PARTS[name].module.run(report, machine.Bench(device))
    except Exception as error:
        traceback.print_exc()
        report.error = last_line(error)
        report.save()
        return 1
    report.complete, report.error = not rows, f"only rows with {rows!r} were made" if rows else ""
    report.save()
    return 0


def no_gpu(facts: dict[str, object]) -> str:
    """Why nothing can be checked here; empty where it can."""
    if "torch" not in facts:
        return f"torch is not installed for {sys.executable}: the check needs torch, and an NVIDIA GPU."
    if "device" not in facts:
        return (
            "There is no NVIDIA GPU here that torch can use (torch.cuda.is_available() is False, "
            f"torch {facts['torch']}, built for CUDA {facts['cuda'] or 'none'}): nothing was checked. Run it on a machine with one."
        )
    return ""


def main(words: list[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    given = arguments(words)
    if given.list:
        for part in PARTS.values():
            print(f"{part.name:10} {part.seconds:4.0f} s  {part.title}")
        return 0
    if given.facts:
        print(json.dumps(machine.facts()))
        return 0
    folder = given.out.expanduser().absolute()
    if given.run:
        return run_here(given.run, folder, given.device, given.rows)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the part that runs is ended, too
    try:
        facts = runner.machine_facts()
    except RuntimeError as error:
        print(error)
        return 1
    if (reason := no_gpu(facts)) and given.device == "cuda":
        print(reason)
        return NO_GPU
    folder.mkdir(parents=True, exist_ok=True)
    print(f"## GPU check\n\n{machine.headline(facts)}, code {runner.code_version()}\n", flush=True)
    options = {"device": given.device, "again": given.again, "budget_s": given.budget_s, "rows": given.rows}
    reports = runner.run_all(given.names, folder, facts, **options)
    print(f"{runner.summary(reports, given.names)}\n\nDetails: {folder}/*.json")
    return 0 if len(reports) == len(given.names) and all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
