"""Measures what `wb.launch` costs over bare torchrun: interleaved pairs of a two-rank script, and of a training, from call to end.

    python benchmarks/launch_overhead.py [--pairs 10]

Prints the medians of the pairs' ratios with their ranges; the aim is at most 1.15. The training's peer is its own program, started by
torchrun without a guard and without `workbench.programs.start`, which keeps Python's collector away from what torch has loaded.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import workbench as wb
from workbench.core import run_directory, units
from workbench.runs import entrypoints
from workbench.runs.launch import environment

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "hello.py"
SPEC = wb.RunSpec(task="clipart-resnet", device="cpu", nproc_per_node=2, steps=2)
RANKS, WANTED = 2, 1.15
Launch = Callable[[Path], object]


def torchrun(*program: str, **variables: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *program]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, capture_output=True, check=True)


def script(folder: Path) -> None:
    wb.launch(SCRIPT, nproc_per_node=RANKS, runs_dir=folder).wait(check=True)


def training(folder: Path) -> Path:
    return wb.launch(SPEC, runs_dir=folder).wait(check=True).path


def bare_training(order: Path) -> Launch:
    """Train what a run directory says, in a copy of it."""

    def train(folder: Path) -> None:
        here = Path(tempfile.mkdtemp(dir=folder))
        shutil.copy(order / run_directory.RUN_JSON, here)
        torchrun("-m", entrypoints.TRAIN, str(here), **{run_directory.ENV_RUN_DIR: str(here)})

    return train


def seconds(call: Launch, folder: Path) -> float:
    began = time.perf_counter()
    call(folder)
    return time.perf_counter() - began


def compared(label: str, ours: Launch, bare: Launch, folder: Path, pairs: int) -> bool:
    """Print what `pairs` say, after one that is thrown away; is the aim met?"""
    taken: dict[Launch, list[float]] = {bare: [], ours: []}
    for pair in range(pairs + 1):
        for call in (bare, ours) if pair % 2 else (ours, bare):
            spent = seconds(call, folder)
            taken[call] += [spent] if pair else []
    ratios = [a / b for a, b in zip(taken[ours], taken[bare], strict=True)]
    middle, base, own = (statistics.median(values) for values in (ratios, taken[bare], taken[ours]))
    print(
        f"{label:9} bare torchrun {units.seconds(base)}, wb.launch {units.seconds(own)} in the median of {pairs}; "
        f"ratio {middle:.3f}, range {min(ratios):.3f} to {max(ratios):.3f}; aim: at most {WANTED}"
    )
    return middle <= WANTED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs to measure, after one that is thrown away")
    pairs = parser.parse_args().pairs
    print(
        ", ".join(f"{name} {version}" for name, version in environment.versions().items() if name != "platform")
        + f", {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = [
            compared("a script", script, lambda _: torchrun(str(SCRIPT)), folder, pairs),
            compared("a spec", training, bare_training(training(folder)), folder, pairs),
        ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
