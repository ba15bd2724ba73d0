"""Checks predicted steps to a target loss at larger batches, learning-rate rules, optimizers, and what giving up early saves.

    python benchmarks/steps_to_target.py [law] [text] [rules] [optimizers] [patience] [--ranks 2]

* law: SGD on `fashion-mlp`, tuned at each batch; the law is fitted to the small ones. Peers: perfect scaling from the largest small batch
  ("twice the batch, half the steps"), and no change ("as many steps as there").
* text: AdamW on `text-gpt`, the same.
* rules: steps by each rule from the tuned base, beside those of a tuned rate.
* optimizers: LARS and LAMB beside SGD and AdamW, all tuned.
* patience: the same search with trials given up after three times the best, and without.

At most six minutes each on two cores. Nothing is timed but the last, whose figure is a ratio.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from workbench.batch.analysis.steps_to_target import StepsToTarget
from workbench.core.display.table import Table
from workbench.runs.spec import RunSpec

FASHION = RunSpec(task="fashion-mlp", micro_batch=4096, device="cpu", lr=0.1)
TEXT = RunSpec(task="text-gpt", micro_batch=64, device="cpu", lr=0.01)
ADAM = "adamw(betas=(0.9, 0.99), weight_decay=0.0)"


def predicted(found: StepsToTarget, small: list[int]) -> Table:
    """The larger batches: measured, and what the law and the peers make of the small ones."""
    last = found.best(small[-1])
    split = found.fitted_to(small)
    law, rows = split.fit(), []
    for mark in split.marks():
        if mark.batch in small:
            continue
        guesses = law.steps(mark.batch), last.steps * last.batch / mark.batch, last.steps
        ends = law.predict(mark.batch)
        rows.append(
            [
                f"{mark.batch:,}",
                mark.text,
                *(f"{guess:,.0f} ({guess / mark.steps - 1:+.0%})" for guess in guesses),
                f"{ends.low:,.0f}–{ends.high:,.0f}",
            ]
        )
    title = f"{found.task}: law fitted to {', '.join(map(str, small))} (b_crit {law.words})"
    return Table(columns=("batch", "measured", "law", "perfect scaling", "no change", "law's 90 %"), rows=rows, title=title)


def law(folder: Path, ranks: int) -> None:
    batches = [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    spec = FASHION.replace(nproc_per_node=ranks)
    found = wb.steps_to_target(spec, batches, retune=True, target_loss=0.5, base_batch=32, seeds=5, budget_s=None, runs_dir=folder)
    print(found, predicted(found, batches[:5]), sep="\n\n")


def text(folder: Path, ranks: int) -> None:
    batches = [2, 4, 8, 16, 32, 64]
    spec = TEXT.replace(nproc_per_node=ranks, optimizer=ADAM)
    found = wb.steps_to_target(
        spec, batches, retune=True, target_loss=2.6, base_batch=16, seeds=2, probe=128, budget_s=None, runs_dir=folder
    )
    print(found, predicted(found, batches[:4]), sep="\n\n")


def rules(folder: Path, ranks: int) -> None:
    common: dict[str, Any] = {"retune": True, "target_loss": 0.5, "base_batch": 32, "seeds": 3, "budget_s": None, "runs_dir": folder}
    sgd = FASHION.replace(nproc_per_node=ranks, lr=0.2)
    adam = sgd.replace(optimizer="adam(betas=(0.9, 0.99))", lr=0.002)
    print(wb.steps_to_target(sgd, [8, 32, 128, 512, 2048], ["damped", "sqrt", "linear", "none"], critical_batch=130, **common), "\n")
    print(wb.steps_to_target(adam, [8, 32, 128, 512], ["adam", "sqrt", "linear", "none"], **common))


def optimizers(folder: Path, ranks: int) -> None:
    kinds = ["sgd(lr=0.1, momentum=0.9)", "lars(lr=1.0, momentum=0.9)", "adamw(lr=0.002)", "lamb(lr=0.01)"]
    common: dict[str, Any] = {"retune": True, "target_loss": 0.5, "base_batch": 32, "seeds": 3, "budget_s": None, "runs_dir": folder}
    print(wb.steps_to_target(FASHION.replace(nproc_per_node=ranks, lr=None), [32, 128, 512, 2048], optimizers=kinds, **common))


def patience(folder: Path, ranks: int) -> None:
    took: list[list[float]] = []
    factors = [0.125, 0.25, 0.5, 1, 2, 4]
    common: dict[str, Any] = {
        "retune": factors,
        "target_loss": 0.5,
        "base_batch": 32,
        "seeds": 1,
        "max_steps": 3000,
        "budget_s": None,
        "runs_dir": folder,
    }
    for limit in (3.0, None):
        began = time.monotonic()
        found = wb.steps_to_target(FASHION, [32, 128, 512, 2048], ["linear", "none"], patience=limit, **common)
        took.append([time.monotonic() - began, sum(one.seconds for one in found.trials), sum(one.after for one in found.trials)])
        print(found, "\n")
    wall, inside, steps = (whole / short for short, whole in zip(*took, strict=True))
    print(f"given up after 3 × the best: {wall:.1f} × faster ({inside:.1f} × in the trials, {steps:.1f} × fewer steps)")


PARTS: dict[str, Callable[[Path, int], None]] = {"law": law, "text": text, "rules": rules, "optimizers": optimizers, "patience": patience}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{date.today()} · torch {torch.__version__} · Python {platform.python_version()} · {machine}\n")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.parts or PARTS:
            began = time.monotonic()
            PARTS[name](Path(folder), given.ranks)
            print(f"\n[{name}: {time.monotonic() - began:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
