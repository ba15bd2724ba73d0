"""Measures what full garbage collections would cost a search that estimates memory many times, in interleaved pairs.

    python benchmarks/estimates.py [--pairs 8]

A full collection goes over all that lives in the process, and so takes longer in a notebook that holds much: the search is timed in a fresh
process, and beside a million lists.
"""

import argparse
import os
import statistics
import time

import workbench as wb
from workbench.core import gc as collector
from workbench.core import units
from workbench.runs.launch import environment

SPEC = wb.RunSpec(task="text-gpt", micro_batch=64, nproc_per_node=1)
BESIDE = 1_000_000


def seconds(generation: int) -> float:
    """Of one search, with a collection up to a generation before each estimate."""
    was, collector.RECENT = collector.RECENT, generation
    try:
        began = time.perf_counter()
        wb.max_micro_batch(SPEC, "RTX-4090")
        return time.perf_counter() - began
    finally:
        collector.RECENT = was


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="pairs to measure, after one that is thrown away")
    pairs = parser.parse_args().pairs
    print(", ".join(f"{name} {version}" for name, version in environment.versions().items()) + f", {os.cpu_count()} cores")
    for beside in (0, BESIDE):
        held = [[number] for number in range(beside)]
        kinds = (collector.RECENT, collector.EVERYTHING)
        taken = [[seconds(kind) for kind in (kinds if pair % 2 else kinds[::-1])][:: 1 if pair % 2 else -1] for pair in range(pairs + 1)][
            1:
        ]
        recent, full = (statistics.median(values) for values in zip(*taken, strict=True))
        ratios = [one / other for one, other in taken]
        print(
            f"wb.max_micro_batch beside {len(held):>9,} lists: {units.seconds(recent)}, with full collections {units.seconds(full)}; "
            f"ratio {statistics.median(ratios):.2f}, range {min(ratios):.2f} to {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
