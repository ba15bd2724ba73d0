"""Compares rules that scale Adam's learning rate to a larger batch: samples to a target, and distance from the base's loss curve.

    python benchmarks/adam_rule.py [--seeds 5]

A perceptron on 8,000 small pictures of clothes (the task "fashion-mlp"), Adam with betas (0.99, 0.999), base batch 8. The learning rate of
the base is chosen first, from a grid. Then batches of 32, 128 and 512 with four rules: the unchanged rate, the square-root rule on the rate
alone, Malladi's full rule (with betas and epsilon), and linear. Every batch sees its samples in the same order. Printed are

* samples to the target divided by those of the base: 1 = as many as the base, less = fewer;
* the distance of the loss curve from the base's at equal numbers of samples: the root mean square of ln(loss / loss of the base), by
  seed; beside it, what two seeds of the base differ by. The full rule promises that this is small, not that it takes fewest samples.
"""

import argparse
import datetime
import functools
import itertools
import math
import platform
import statistics

import torch
from torch import nn

from workbench.batch.analysis.lr_scaling_rules import scale_lr
from workbench.batch.analysis.scaled_lr import ScaledLr
from workbench.data.samples import Fashion
from workbench.runs.task import resolve
from workbench.train.optimizers import build_optimizer

BASE, RATIOS = 8, (4, 16, 64)
GRID = (0.0005, 0.001, 0.002, 0.004)
OPTIMIZER = "adam(betas=(0.99, 0.999))"
RULES = {"none": "unchanged rate", "sqrt": "square root, rate alone", "adam": "square root, full", "linear": "linear"}
EVERY, POINTS = 1024, 40
"""Samples between two looks at the loss, and how many looks there are at the base."""
LAST = 4
"""Times the base's samples after which a run that has not reached the target is given up."""


@functools.cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    found = Fashion("train")
    return found.inputs, found.labels


def curve(batch: int, lr: float, optimizer: str, seed: int, target: float | None = None) -> list[float]:
    """The training loss (of 2,000 pictures) after each EVERY samples; given a target, until it is reached or given up."""
    inputs, labels = data()
    torch.manual_seed(seed)
    model = resolve("fashion-mlp").model()
    stepper = build_optimizer(model, optimizer, lr=lr)
    stream = torch.Generator().manual_seed(1000 + seed)
    orders = (torch.randperm(len(inputs), generator=stream) for _ in itertools.count())
    wanted, losses = torch.empty(0, dtype=torch.long), []
    for _ in range(POINTS if target is None else LAST * POINTS):
        for _ in range(EVERY // batch):
            while len(wanted) < batch:
                wanted = torch.cat([wanted, next(orders)])
            chosen, wanted = wanted[:batch], wanted[batch:]
            stepper.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            stepper.step()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(inputs[:2000]), labels[:2000]).item())
        if not math.isfinite(losses[-1]) or (target is not None and len(losses) >= POINTS and smoothed(losses)[-1] < target):
            break
    return losses


def smoothed(losses: list[float]) -> list[float]:
    """The mean of three neighbouring looks: a single one jumps."""
    return [statistics.fmean(losses[max(0, i - 2) : i + 1]) for i in range(len(losses))]


def samples_to(losses: list[float], target: float) -> float:
    """Samples until the smoothed loss is below the target; infinite = never."""
    return next((EVERY * (i + 1) for i, loss in enumerate(smoothed(losses)) if loss < target), math.inf)


def distance(one: list[float], other: list[float]) -> float:
    """Root mean square of the logarithm of the quotient, without the first quarter."""
    pairs = list(zip(smoothed(one), smoothed(other), strict=False))[POINTS // 4 : POINTS]
    if len(pairs) < POINTS - POINTS // 4 or not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return math.sqrt(statistics.fmean(math.log(a / b) ** 2 for a, b in pairs))


def scaled(lr: float, ratio: int, rule: str) -> ScaledLr:
    return scale_lr(lr, batch=BASE, to_batch=BASE * ratio, optimizer=OPTIMIZER, rule=rule)


def main() -> None:
    """Print one table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seeds", type=int, default=5)
    seeds = range(options.parse_args().seeds)
    torch.set_num_threads(1)
    ends = {lr: statistics.fmean(smoothed(curve(BASE, lr, OPTIMIZER, seed))[-1] for seed in (100, 101)) for lr in GRID}
    lr = min(ends, key=lambda one: ends[one])
    base = {seed: curve(BASE, lr, OPTIMIZER, seed) for seed in seeds}
    target = statistics.median(smoothed(losses)[POINTS * 3 // 4] for losses in base.values())
    reached = statistics.fmean(samples_to(losses, target) for losses in base.values() if samples_to(losses, target) < math.inf)
    apart = statistics.median(distance(base[a], base[b]) for a, b in itertools.combinations(seeds, 2))
    print(
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}; {len(seeds)} seeds;"
    )
    print(f"base: batch {BASE}, lr {lr} (of {', '.join(map(str, GRID))}), loss {target:.3f} after {reached:,.0f} samples;")
    print(f"two seeds of the base are {apart:.3f} apart\n")
    print("| rule | " + " | ".join(f"samples ÷ base, {BASE * k} | distance, {BASE * k}" for k in RATIOS) + " |")
    print("|---" * (1 + 2 * len(RATIOS)) + "|")
    for rule, text in RULES.items():
        cells = []
        for ratio in RATIOS:
            now = scaled(lr, ratio, rule)
            assert now.rule == rule, now
            curves = {seed: curve(BASE * ratio, now.lr, now.optimizer(), seed, target) for seed in seeds}
            ratios = [samples_to(losses, target) / reached for losses in curves.values()]
            far = statistics.median(distance(losses, base[seed]) for seed, losses in curves.items())
            missed = sum(map(math.isinf, ratios))
            middle = statistics.median(ratios)
            given_up = LAST * POINTS * EVERY / reached
            shown = f"over {given_up:.1f}" if math.isinf(middle) else f"{middle:.2f}" + (f" ({missed} given up)" if missed else "")
            cells.append(f"{shown} | {far:.3f}")
        print(f"| {text} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
