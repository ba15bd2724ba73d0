"""The gradient noise scale against the truth of single samples: error, coverage of its interval, the steps it promises, and what it costs.

    python benchmarks/noise_scale.py [--trials 120] [--skip-runs]

* Repeated trials: the gradients of 2,000 samples of `fashion-mlp`, at its first weights and after 300 steps, in their 200 leading
  directions, are a dataset of which the truth is known; steps are dealt out of it again and again. Beside ours: the ratio of two running
  means with a decay of 0.99, as gpt-neox and others have it, and the mean of the ratios of single steps.
* Real runs at weights that stay (lr=1e-12): DDP, FSDP2 and accumulation against the exact value.
* Cost: CPU time of blocks of steps with and without it, taking turns.
"""

import argparse
import math
import platform
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import workbench as wb
from workbench.batch.noise_scale import NoiseScale
from workbench.batch.noise_steps import ENOUGH
from workbench.measure.group_norms import GroupNorms
from workbench.measure.per_sample import per_sample_gradients
from workbench.measure.stride import Stride
from workbench.task import resolve
from workbench.train.trainer import build_model, loss_of, seed_all

SAMPLES, DIRECTIONS = 2000, 200
SETTINGS = ((2, 8), (2, 32), (2, 128), (4, 8), (4, 32), (4, 128))
STEPS = (30, 100, 300)
PROMISED_AFTER = 50


def population(trained: int) -> np.ndarray[Any, Any]:
    """Gradients of single samples, after so many steps: samples × directions."""
    task = resolve("fashion-mlp")
    seed_all(0)
    model, data = build_model(task), task.dataset()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = data.__getitems__(list(range(len(data))))
    inputs, labels = whole if isinstance(whole, tuple) else task.collate(whole)
    for _ in range(trained):
        chosen = torch.randint(0, len(inputs), (64,))
        optimizer.zero_grad()
        loss_of(task, model, (inputs[chosen], labels[chosen])).backward()
        optimizer.step()
    parts = []
    for start in range(0, SAMPLES, 200):
        batch = inputs[start : start + 200], labels[start : start + 200]
        found = per_sample_gradients(model, lambda module, one: loss_of(task, module, one), batch)
        parts.append(torch.cat([one.flatten(1) for one in found.values()], 1))
    rows = torch.cat(parts).double()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    return (vectors[:, -DIRECTIONS:] * values[-DIRECTIONS:].clamp(min=0).sqrt()).float().numpy()


def dealt(rng: np.random.Generator, rows: np.ndarray[Any, Any], groups: int, size: int, steps: int) -> list[tuple[float, float]]:
    """The two norms of steps, each dealt out without repetition."""
    found = []
    for _ in range(steps):
        chosen = rng.permutation(len(rows))[: groups * size]
        means = rows[chosen].reshape(groups, size, -1).mean(1, dtype=np.float64)
        found.append((float(np.square(means).sum(1).mean()), float(np.square(means.mean(0)).sum())))
    return found


def peers(pairs: list[tuple[float, float]], groups: int, size: int) -> tuple[float, float]:
    """Running means of both, decay 0.99, then their ratio; and the mean of the ratios."""
    small, big = np.array(pairs).T
    squares, noise = (groups * big - small) / (groups - 1), size * groups / (groups - 1) * (small - big)
    top = bottom = 0.0
    for one, other in zip(noise, squares, strict=True):
        top, bottom = 0.99 * top + 0.01 * one, 0.99 * bottom + 0.01 * other
    return top / bottom, float((noise / squares).mean())


def repeated(trials: int) -> None:
    """Error, coverage and promises."""
    print(f"{trials} trials; a dataset of {SAMPLES} samples")
    print(
        "weights | W × b | truth | median estimate ÷ truth (30, 100, 300 steps) | 90 % interval holds the truth "
        "| says enough | of them within 10 % | median error at 300: ours, ratio of running means, mean of ratios "
        "| steps promised after 50 ÷ right (median, 10–90 %)"
    )
    for trained in (0, 300):
        rows = population(trained)
        mean = rows.mean(0, dtype=np.float64)
        truth = float(np.square(rows - mean).sum(1).mean() / (mean @ mean))
        for groups, size in SETTINGS:
            rng = np.random.default_rng(groups * size)
            runs = [dealt(rng, rows, groups, size, max(STEPS)) for _ in range(trials)]
            kind = {"micro_batch": size, "groups": groups, "dataset_size": SAMPLES}
            found = {steps: [NoiseScale.of(run[:steps], **kind) for run in runs] for steps in STEPS}
            errors = [abs(one.b_simple / truth - 1) for one in found[max(STEPS)]]
            others = list(zip(*(peers(run, groups, size) for run in runs), strict=True))
            enough = [one for steps in STEPS for one in found[steps] if one.enough]
            spread = statistics.stdev(math.log(one.b_simple / truth) for one in found[max(STEPS)] if 0 < one.b_simple < math.inf)
            right = max(STEPS) * (1.645 * spread / ENOUGH) ** 2
            early = [NoiseScale.of(run[:PROMISED_AFTER], **kind) for run in runs]
            promise = sorted(
                (one.steps + one.steps_needed if one.steps_needed else one.steps * (one.relative_error / ENOUGH) ** 2) / right
                for one in early
            )
            within = sum(abs(one.b_simple / truth - 1) <= 0.1 for one in enough)
            print(
                f"{'first' if not trained else f'after {trained}'} | {groups} × {size} | {truth:.1f} | "
                + ", ".join(f"{statistics.median(one.b_simple for one in found[steps]) / truth:.2f}" for steps in STEPS)
                + " | "
                + ", ".join(f"{sum(one.low <= truth <= one.high for one in found[steps]) / trials:.0%}" for steps in STEPS)
                + f" | {len(enough) / trials / len(STEPS):.0%} | {f'{within / len(enough):.1%}' if enough else '–'} | "
                + ", ".join(
                    f"{statistics.median(abs(one / truth - 1) for one in values):.1%}"
                    for values in ([one.b_simple for one in found[max(STEPS)]], *others)
                )
                + f" | {promise[len(promise) // 2]:.2f} ({promise[len(promise) // 10]:.2f}–{promise[-len(promise) // 10]:.2f}); "
                f"right: {right:.0f}",
                flush=True,
            )
            assert len(errors) == trials


def real() -> None:
    """Runs at weights that stay, against the exact value."""
    base = wb.RunSpec(task="fashion-mlp", device="cpu", lr=1e-12)
    exact = wb.noise_scale(base, exact=True)
    print(f"exact, 8,000 samples: {exact.b_simple:.2f}")
    print("run | groups × samples | steps | estimate ÷ truth | interval ÷ truth | enough")
    with tempfile.TemporaryDirectory() as folder:
        for name, knobs, steps in (
            ("accumulation", {"micro_batch": 32, "accumulation": 4}, 120),
            ("DDP", {"micro_batch": 64, "nproc_per_node": 2}, 100),
            ("DDP + accumulation", {"micro_batch": 32, "nproc_per_node": 2, "accumulation": 2}, 100),
            ("FSDP2", {"micro_batch": 64, "nproc_per_node": 2, "parallel": "fsdp"}, 100),
            ("ZeRO-1, small groups", {"micro_batch": 8, "nproc_per_node": 2, "parallel": "zero1"}, 100),
        ):
            one = wb.noise_scale(base.replace(**knobs), steps=steps, runs_dir=folder)
            b = exact.b_simple
            print(
                f"{name} | {one.groups} × {one.micro_batch} | {one.steps} | {one.b_simple / b:.3f} | "
                f"{one.low / b:.2f}–{one.high / b:.2f} | {'yes' if one.enough else f'no, {one.steps_needed} more'}",
                flush=True,
            )


def cost(name: str, micro_batch: int, accumulation: int, blocks: int, steps: int, every: int | None) -> None:
    """CPU time with over that without, in pairs of blocks; looking at each so many-th step (None: as often as is cheap)."""
    task = resolve(name)
    seed_all(0)
    model: nn.Module = build_model(task)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loader = torch.utils.data.DataLoader(task.dataset(), batch_size=micro_batch, collate_fn=task.collate, drop_last=True)
    batches = [batch for batch, _ in zip(loader, range(accumulation), strict=False)]

    stride = Stride(every)

    def block(watched: bool) -> float:
        norms = GroupNorms(model, 1) if watched else None
        if norms:
            norms.looking = stride.looking
        rows = []
        start = time.process_time()
        for _ in range(steps):
            for batch in batches:
                (loss_of(task, model, batch) / accumulation).backward()
            if norms:
                if (row := norms.step()) is not None:
                    rows.append(row)
                norms.looking = stride.step()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.process_time() - start
        if norms:
            norms.close()
        return seconds

    for _ in range(1 if every else 8):  # until the stride is found
        block(True), block(False)
    ratios = []
    for number in range(blocks):
        order = (True, False) if number % 2 else (False, True)
        took = {watched: block(watched) for watched in order}
        ratios.append(took[True] / took[False])
    quartiles = statistics.quantiles(ratios, n=4)
    weights = sum(weight.numel() for weight in model.parameters())
    print(
        f"{name} | {weights:,} | {len(list(model.parameters()))} | {accumulation} × {micro_batch} | {stride.every} | "
        f"{statistics.median(ratios):.3f} ({quartiles[0]:.3f}–{quartiles[2]:.3f})",
        flush=True,
    )


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--skip-runs", action="store_true", help="arithmetic and cost only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {platform.machine()}, CPU")
    print("\nmodel | weights | tensors | step | looks at one of | CPU time with ÷ without (median, quartiles)")
    for name, size, steps in (("fashion-mlp", 64, 40), ("fashion-mlp", 512, 20), ("text-gpt", 16, 4), ("clipart-resnet", 16, 2)):
        cost(name, size, 2, 15, steps, every=1)
        cost(name, size, 2, 15, 8 * steps, every=None)
    print()
    repeated(given.trials)
    if not given.skip_runs:
        print()
        real()


if __name__ == "__main__":
    main()
