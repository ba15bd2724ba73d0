"""Checks the gradient noise scale against its exact value: error, coverage of its interval, predicted number of steps, and cost.

    python benchmarks/noise_scale.py [--trials 120] [--skip-runs]
    python benchmarks/noise_scale.py --cost 0 3 --seconds 30    # what it costs in these settings only

* Repeated trials: the gradients of 2,000 samples of `fashion-mlp`, at its first weights and after 300 steps, in their 200 leading
  directions, are a dataset whose noise scale is known; steps are drawn from it again and again. Peers: the ratio of two running
  means with a decay of 0.99, as gpt-neox and others have it, and the mean of the ratios of single steps.
* Real runs at weights that stay (lr=1e-12): DDP, FSDP2 and accumulation against the exact value.
* Cost: CPU time (of all ranks) and wall time of blocks of a run's steps with and without it, taking turns; without, nothing is attached.
"""

import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import workbench as wb
from workbench.batch.analysis.noise_scale import NoiseScale
from workbench.batch.analysis.noise_scale_estimator import ENOUGH
from workbench.batch.measure.gradient_norms import SamplingInterval
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.batch.measure.per_sample import per_sample_gradients
from workbench.runs.task import resolve
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer, build_model, loss_of, seed_all

SAMPLES, DIRECTIONS = 2000, 200
SETTINGS = ((2, 8), (2, 32), (2, 128), (4, 8), (4, 32), (4, 128))
STEPS = (30, 100, 300)
PROMISED_AFTER = 50
COSTS = (
    ("fashion-mlp", 64, 2, 1),
    ("fashion-mlp", 512, 2, 1),
    ("text-gpt", 16, 2, 1),
    ("clipart-resnet", 16, 2, 1),
    ("fashion-mlp", 64, 1, 2),
    ("text-gpt", 16, 1, 2),
)
"""Task, samples of a backward, backwards of a step, ranks."""


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
        "weights | W × b | true value | median estimate ÷ true value (30, 100, 300 steps) | coverage of the 90 % interval "
        "| reports enough steps | of these within 10 % | median error at 300: ours, ratio of running means, mean of ratios "
        "| predicted steps after 50 ÷ correct number (median, 10–90 %)"
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
                f"correct: {right:.0f}",
                flush=True,
            )
            assert len(errors) == trials


def real() -> None:
    """Runs at weights that stay, against the exact value."""
    base = wb.RunSpec(task="fashion-mlp", device="cpu", lr=1e-12)
    exact = wb.noise_scale(base, exact=True)
    print(f"exact, 8,000 samples: {exact.b_simple:.2f}")
    print("run | groups × samples | steps | estimate ÷ exact | interval ÷ exact | enough")
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


def cost(setting: tuple[str, int, int, int], every: int | None, seconds: float) -> None:
    """A line: what it costs to look at each so many-th step (None: as often as is cheap)."""
    name, micro_batch, accumulation, ranks = setting
    task = resolve(name)
    weights = list(build_model(task).parameters())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_cost, (setting, every, seconds, folder), nprocs=ranks)
        found = json.loads((Path(folder) / "found.json").read_text())
    columns = [_interval(found[kind]) for kind in ("cpu", "wall")]
    print(
        f"{name} | {sum(one.numel() for one in weights):,}, {len(weights)} | {ranks} × {accumulation} × {micro_batch} | "
        f"{found['every']} | {' | '.join(columns)} | {len(found['cpu'])} × {found['steps']}, {found['seconds']:.3g} s each",
        flush=True,
    )


def _interval(ratios: list[float]) -> str:
    """The median, and a 90 % interval of it by drawing again."""
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return f"{np.median(ratios):.3f} ({np.quantile(drawn, 0.05):.3f}–{np.quantile(drawn, 0.95):.3f})"


def _cost(rank: int, setting: tuple[str, int, int, int], every: int | None, seconds: float, folder: str) -> None:
    """Of one rank."""
    name, micro_batch, accumulation, world_size = setting
    if world_size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {key: str(value) for key, value in numbers.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
    knobs = {"micro_batch": micro_batch, "accumulation": accumulation, "nproc_per_node": world_size, "lr": 1e-4}
    spec = wb.RunSpec(task=name, device="cpu", noise_scale=every or True, **knobs)
    ranks = Ranks.join(spec)
    try:
        (own := Path(folder) / str(rank)).mkdir()
        found = _pairs(Trainer(spec, resolve(name), ranks), own, every, seconds)
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found))
    finally:
        gc.unfreeze()
        ranks.leave()


def _pairs(trainer: Trainer, own: Path, every: int | None, seconds: float) -> dict[str, Any]:
    """Blocks of steps with and without it, in turns, of a tenth of a second or more and of whole strides."""
    batches = list(itertools.islice(trainer.batches(), trainer.spec.accumulation))
    paused, done = 0.0, 0
    log = NoiseLog(trainer, own)
    log._stride = stride = SamplingInterval(every, clock=lambda: time.perf_counter() - paused)

    def block(watched: bool, steps: int) -> tuple[float, float]:
        nonlocal paused, done
        log._norms.look(watched and stride.looking)
        began = time.process_time(), time.perf_counter()
        for _ in range(steps):
            for batch in batches:
                trainer.micro_step(batch, last=batch is batches[-1])
            if watched:
                done += 1
                log.step(done)
            trainer.update()
        took = time.process_time() - began[0], time.perf_counter() - began[1]
        if not watched:
            paused += took[1]
        return took

    def agreed(value: float) -> float:
        """The largest of all ranks."""
        dist.all_reduce(most := torch.tensor(float(value), dtype=torch.float64), dist.ReduceOp.MAX)
        return float(most)

    start, step = time.perf_counter(), 0.0
    gc.collect()
    gc.freeze()
    while done < 64 if every else done < 1024 and agreed(time.perf_counter() - start) < seconds / 4:  # until the stride is found
        step = agreed(block(True, 16)[1] / 16)
    start, pairs, steps, longest = time.perf_counter(), [], 0, 0
    while agreed(time.perf_counter() - start) < seconds:
        longest = int(agreed(stride.every))
        steps = longest * math.ceil(0.1 / step / longest)
        order = (True, False) if len(pairs) % 2 else (False, True)
        took = {watched: block(watched, steps) for watched in order}
        pairs.append((took[True], took[False]))
    log.close()
    times = torch.tensor(pairs, dtype=torch.float64)  # pairs × with, without × CPU, wall
    dist.all_reduce(times)
    ratios = times[:, 0] / times[:, 1]
    without = float(times[:, 1, 1].median()) / dist.get_world_size()
    return {"cpu": ratios[:, 0].tolist(), "wall": ratios[:, 1].tolist(), "every": longest, "steps": steps, "seconds": without}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--skip-runs", action="store_true", help="arithmetic and cost only")
    parser.add_argument("--cost", type=int, nargs="+", metavar="SETTING", help="of these settings only, and nothing else")
    parser.add_argument("--each", action="store_true", help="… looking at each step")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a setting's cost is measured for")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {platform.machine()}, CPU")
    print(
        "\nmodel | weights, tensors | ranks × backwards × samples | looks at one of | CPU time with ÷ without (90 % interval) | wall time "
        "| pairs × steps"
    )
    for number in given.cost or range(len(COSTS)):
        for each in (True, False) if not given.cost else (given.each,):
            cost(COSTS[number], 1 if each else None, given.seconds)
    if given.cost:
        return
    print()
    repeated(given.trials)
    if not given.skip_runs:
        print()
        real()


if __name__ == "__main__":
    main()
