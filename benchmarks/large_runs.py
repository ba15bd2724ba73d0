"""Measures how long large runs take to open, to summarise, to show and to compare, and their memory, against json.loads of each line.

python benchmarks/large_runs.py [RANKS [STEPS]]

Without arguments: 64 and 1,024 ranks of 10,000 steps, with and without totals, and a folder of 1,000 runs. The run directories are made
in the temporary folder.
Each question is asked in a process of its own, whose CPU time and peak memory are printed; files are in the page cache.
"""

import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workbench.core import run_directory
from workbench.runs.spec import RunSpec
from workbench.timeline.rank_log import Totals, lines_of
from workbench.timeline.steps import Row

DISTINCT = 16
"""Files of steps that are written; those of further ranks are links to them."""
READ_EVERY = 6
"""Steps from one reading of memory and CPU time to the next: 0.3 s of 50 ms each."""
PHASE_MEANS = 2_000_000, 0, 15_000_000, 28_000_000, 4_000_000, 1_000_000
"""Nanoseconds of each phase in the mean."""
LINES = 100_000
"""Lines that json.loads reads; its figure for a run is as many times that as the run has lines."""


def rank_steps(steps: int, seed: int, with_totals: bool) -> str:
    """The lines of a rank's steps, as the workbench writes them; without totals, as it did before November 26, 2026."""
    random.seed(seed)
    lines, totals, at = list[str](), Totals(), 0
    for start in range(0, steps, READ_EVERY):
        rows: list[Row] = []
        for _ in range(start, min(steps, start + READ_EVERY)):
            wait, h2d, forward, backward, optimizer, other = [int(mean * random.uniform(0.9, 1.1)) for mean in PHASE_MEANS]
            rows.append((wait, h2d, forward, backward, optimizer, other, 32))
        totals.untold *= with_totals
        lines.append(lines_of(rows, start, totals, at=at, memory=10**9 + seed, cpu=0.06 * start))
        at += len(lines[-1])
    return "".join(lines)


def make(path: Path, ranks: int, steps: int, with_totals: bool = True) -> Path:
    """A run directory of a run that has finished."""
    path.mkdir(parents=True)
    spec = RunSpec(task="text-gpt", nproc_per_node=min(ranks, 8), nnodes=max(1, ranks // 8), steps=steps)
    for rank in range(ranks):
        file = path / run_directory.rank_file(rank)
        if rank < DISTINCT:
            file.write_text(rank_steps(steps, rank, with_totals))
        else:
            os.link(path / run_directory.rank_file(rank % DISTINCT), file)
    with open(path / run_directory.METRICS, "w") as metrics:
        for step in range(1, steps + 1):
            row = {"step": step, "steps": steps, "loss": 2 / step, "lr": 0.1, "samples": 32 * ranks * step, "seconds": 0.05 * step}
            metrics.write(json.dumps(row) + "\n")
    info = {"id": path.name, "name": path.name, "created": 0.0, "host": platform.node(), "launch_dir": ".", "format": run_directory.FORMAT}
    outcome = {"state": "finished", "returncode": 0, "seconds": 0.05 * steps}
    run_directory.write_json(path / run_directory.RUN_JSON, {**info, "spec": spec.to_json(), "outcome": outcome})
    return path


def asked(what: str, call: Callable[[], object]) -> object:
    """Print the CPU seconds of a call."""
    began, cpu = time.perf_counter(), time.process_time()
    value = call()
    print(f"  {what}: {time.process_time() - cpu:.3f} s of CPU, {time.perf_counter() - began:.3f} s", flush=True)
    return value


def question(name: str, folder: Path) -> None:
    """Ask one thing of the runs `a` and `b` of a folder, or of the folder of many, and print what it took."""
    import workbench as wb

    path = folder / "a"
    if name == "summary":
        run = wb.Run.load(path)
        asked("open and summary", lambda: (wb.Run.load(path), run.summary))
        asked("summary again", lambda: run.summary)
    elif name == "panel":
        panel = wb.widgets.RunPanel
        asked("panel", lambda: panel(wb.Run.load(path)))
    elif name == "compare":
        asked("compare", lambda: str(wb.compare(wb.Run.load(path), wb.Run.load(folder / "b"))))
    elif name == "rank 0":
        asked("timeline of rank 0", lambda: wb.Run.load(path).timelines[0].mean())
    elif name == "timelines":
        run = wb.Run.load(path)
        kept = asked("all timelines", lambda: list(run.timelines))
        assert kept
    elif name == "json":
        files = [path / run_directory.rank_file(rank) for rank in range(DISTINCT)]
        lines = [line for file in files for line in file.read_bytes().splitlines()][:LINES]
        asked(f"json.loads of {len(lines):,} lines", lambda: [json.loads(line) for line in lines])
    elif name == "list":
        wb.widgets.runs  # noqa: B018 (what it takes to import is no part)
        asked("list", lambda: str(wb.list_runs(folder)))
        shown = asked("panel of the list", lambda: wb.widgets.runs(folder))
        asked("refresh", shown.refresh)  # type: ignore[attr-defined]
    print(f"  peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)


def ask(name: str, folder: Path) -> None:
    """Ask in a process of its own."""
    subprocess.run([sys.executable, __file__, "--ask", name, str(folder)], check=True)


def main() -> None:
    """Make the runs and ask."""
    if sys.argv[1:2] == ["--ask"]:
        question(sys.argv[2], Path(sys.argv[3]))
        return
    given = [int(word) for word in sys.argv[1:]]
    steps = given[1] if len(given) > 1 else 10_000
    with tempfile.TemporaryDirectory(prefix="workbench-large-") as folder:
        for ranks, with_totals in [(given[0], True)] if given else [(64, True), (64, False), (1024, True), (1024, False)]:
            place = Path(folder, f"{ranks} {with_totals}")
            for name in "ab":
                make(place / name, ranks, steps, with_totals)
            print(f"{ranks} ranks of {steps:,} steps" + ", without totals" * (not with_totals), flush=True)
            for name in ("json", "summary", "panel", "compare", "rank 0", *(["timelines"] if ranks <= 64 else [])):
                ask(name, place)
        if not given:
            many = Path(folder, "many")
            for number in range(1000):
                make(many / f"{number:04d}", 1, 20)
            print("1,000 runs", flush=True)
            ask("list", many)


if __name__ == "__main__":
    main()
