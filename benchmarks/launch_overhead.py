"""What a guarded launch costs over bare torchrun: the same two-rank script, in interleaved pairs, from call to end.

    python benchmarks/launch_overhead.py [--pairs 10]

Prints the median of the pairs' ratios with their range; at most 1.15 is wanted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import workbench as wb
from workbench import units
from workbench.launcher import environment

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "hello.py"
RANKS, WANTED = 2, 1.15


def bare(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), str(SCRIPT)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=True)


def ours(folder: Path) -> None:
    wb.launch(SCRIPT, nproc_per_node=RANKS, runs_dir=folder).wait(check=True)


def seconds(call: Callable[[Path], None], folder: Path) -> float:
    began = time.perf_counter()
    call(folder)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs to measure, after one that is thrown away")
    pairs = parser.parse_args().pairs
    taken: dict[Callable[[Path], None], list[float]] = {bare: [], ours: []}
    with tempfile.TemporaryDirectory() as name:
        for pair in range(pairs + 1):
            for call in (bare, ours) if pair % 2 else (ours, bare):
                spent = seconds(call, Path(name))
                taken[call] += [spent] if pair else []
    ratios = [a / b for a, b in zip(taken[ours], taken[bare], strict=True)]
    print(
        ", ".join(f"{name} {version}" for name, version in environment.versions().items() if name != "platform")
        + f", {os.cpu_count()} cores"
    )
    for call, label in ((bare, "bare torchrun"), (ours, "launch().wait()")):
        print(f"{label:16} median {units.seconds(statistics.median(taken[call]))} of {pairs}")
    middle = statistics.median(ratios)
    print(f"ratio            median {middle:.3f}, range {min(ratios):.3f} to {max(ratios):.3f}; wanted: at most {WANTED}")
    return 0 if middle <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
