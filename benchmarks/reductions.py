"""Compares what a diagnosis says of the reductions of two ranks with what `no_sync` truly saves, in one program.

    python benchmarks/reductions.py [CASE…] [--runs 3] [--seconds 12]

glibc keeps freed memory, as in launched experiments; otherwise the true share changes while a process runs, and cannot be measured twice.
It is measured before and after `wb.diagnose` in the same processes, since the rhythm of gloo changes from time to time: the difference says
how well the true share is known. About 80 seconds per case and run. Nothing else should run.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.display.table import Table
from workbench.runs.launch import environment

GALLERY = Path(__file__).parents[1] / "tests" / "diagnosis" / "gallery"
sys.path.insert(0, str(GALLERY))
CASES = ("big_gradients", "small_buckets", "reduced_too_often")
RANKS, BLOCK, LIMIT = 2, 0.3, 240
"""Ranks; seconds of a block of steps; seconds that a case may take."""


class Turns:
    """Blocks of steps with and without a reduction, in turn, all ranks the same."""

    def __init__(self, loop: Any, seconds: float) -> None:
        import torch
        import torch.distributed as dist

        self.loop, self.batches = loop, loop.batches()
        step = self.block(20, reduced=True)
        told = torch.tensor([max(5, int(BLOCK / step)), 0])
        told[1] = 2 + int(seconds / (1.6 * step * int(told[0])))
        dist.broadcast(told, 0)
        self.count, self.rounds = told.tolist()

    def block(self, count: int, *, reduced: bool) -> float:
        """Seconds per step, on the slower rank."""
        import torch.distributed as dist

        dist.barrier()
        began = time.perf_counter()
        with contextlib.nullcontext() if reduced else self.loop.model.no_sync():
            for _ in range(count):
                self.loop.step(next(self.batches))
        dist.barrier()
        return (time.perf_counter() - began) / count

    def saved(self) -> float:
        """Fraction of the step that goes with its reductions."""
        took: dict[bool, list[float]] = {True: [], False: []}
        for number in range(self.rounds):
            for reduced in (True, False) if number % 2 else (False, True):
                took[reduced].append(self.block(self.count, reduced=reduced))
        return 1 - statistics.fmean(took[False]) / statistics.fmean(took[True])


def rank(case: str, seconds: float, out: Path) -> None:
    """One of the ranks that torchrun has started."""
    import judge
    import torch
    import torch.distributed as dist

    import workbench as wb

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = judge.build(judge.find(case))
    turns = Turns(loop, seconds)
    before = turns.saved()
    found = wb.diagnose(loop.step, loop.loader, model=loop.model, optimizer=loop.optimizer, budget_s=30)
    after = turns.saved()
    if dist.get_rank() == 0:
        share = found.judgement.shares["communication"]
        values = {"before": before, "after": after, "share": [share.low, share.mid, share.high], "verdict": found.verdict}
        out.write_text(json.dumps({**values, "arm": found.evidence.arms["no_sync"].saved.mid}))
    dist.destroy_process_group()


def run(case: str, seconds: float) -> dict[str, Any]:
    """A case in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
        command += [case, "--seconds", str(seconds), "--out", str(out)]
        env = {**os.environ, **environment.steady_malloc(), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
        if (done := subprocess.run(command, env=env, timeout=LIMIT, capture_output=True, text=True)).returncode:
            sys.exit(f"{case} failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    """Run them all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none = all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12, help="of turns, before the diagnosis and after it")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    if given.out:
        rank(given.cases[0], given.seconds, given.out)
        return
    rows, off, arms, apart = [], list[float](), list[float](), list[float]()
    for _ in range(given.runs):
        for case in given.cases or CASES:
            found = run(case, given.seconds)
            before, after, (low, mid, high) = found["before"], found["after"], found["share"]
            truth = (before + after) / 2
            off.append(mid / truth - 1)
            arms.append(found["arm"] / truth - 1)
            apart.append(abs(before - after) / truth)
            said = f"{units.percent(mid)} ({units.percent(low)} … {units.percent(high)})"
            rows.append([case, units.percent(before), units.percent(after), said, f"{off[-1]:+.1%}", found["verdict"]])
            print(*rows[-1], sep=" | ", flush=True)
    print(Table(columns=("case", "true share, before", "true share, after", "diagnosis (interval)", "error", "verdict"), rows=rows))
    repeats = f"the two true shares differ by {statistics.median(apart):.1%} in the median, {max(apart):.1%} at most"
    print(
        f"diagnosis against the mean of both true shares: median {statistics.median(off):+.1%} ({min(off):+.1%} … {max(off):+.1%}), "
        f"within 10 %: {sum(abs(one) <= 0.1 for one in off)} of {len(off)}; the arm alone: median {statistics.median(arms):+.1%} "
        f"({min(arms):+.1%} … {max(arms):+.1%}); {repeats}"
    )


if __name__ == "__main__":
    main()
