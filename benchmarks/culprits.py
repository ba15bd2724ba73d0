"""Counts how often `run.error`, and torchrun's "Root Cause", name the rank that failed first: six ways to fail, 20 launches each.

python benchmarks/culprits.py [trials]          about 10 s per trial of all six ways, on two cores
"""

import platform
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import workbench as wb
from workbench.core.display.table import Table
from workbench.core.run_directory import LAUNCHER_LOG

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "failing.py"
WAYS = ("teardown", "slow exit", "sys.exit(3)", "os._exit(3)", "segfault", "SIGKILL")


def named(way: str, runs: str) -> tuple[int | None, int | None]:
    """The rank that we name, and the one that torchrun names, in one launch of a script that knows nothing of us."""
    run = wb.launch(SCRIPT, args=[way], nproc_per_node=2, runs_dir=runs).wait()
    root = re.search(r"Root Cause.*?rank\s*: (\d+)", (run.path / LAUNCHER_LOG).read_text(), re.DOTALL)
    return run.error.rank if run.error else None, int(root[1]) if root else None


def main(trials: int) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as runs, ThreadPoolExecutor(max_workers=2) as pool:
        for way in WAYS:
            found = list(pool.map(lambda _, way=way: named(way, runs), range(trials)))  # type: ignore[misc]
            rows.append([way, *(f"{sum(pair[i] == 1 for pair in found)} of {trials}" for i in (0, 1))])
            print(*rows[-1], file=sys.stderr, flush=True)
    note = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, two gloo ranks, two launches at a time"
    print(Table(columns=("rank 1 fails by", "workbench names it", "torchrun names it"), rows=rows, title="The right rank", note=note))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
