"""Compares learning-rate finders: steps to a target loss at the suggested rate, over those at a tuned rate.

    python benchmarks/lr_finder.py [--seeds 3] [--peers] [--text]

Eight settings: SGD and Adam × batch 8, 32, 128, 512, on a perceptron (Fashion-MNIST pooled to 14 × 14, 196-64-10), until the loss on
1,000 validation pictures is below 0.55. Tuned: the best of a grid of learning rates a factor 10^0.25 apart that is walked from its middle
until both sides are worse. Each finder searches with several seeds; its median suggestion is scored, of ours also the worst seed's.
∞ = not within six times the tuned steps.

`--peers` adds the packages themselves with their own settings, one sweep each: fastai, pytorch-lightning, torch-lr-finder (those that are
installed); without it, the published rules are applied to the workbench's own sweeps. `--text`: also the sample GPT with AdamW at batch 16.
"""

import argparse
import contextlib
import io
import logging
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.batch.analysis.lr_range import LrFound
from workbench.batch.api import find_lr
from workbench.data.samples import ByteText, Fashion
from workbench.runs.task import resolve

APART = 0.25
"""Of the grid, in decades."""
MOST = 6
"""Times the tuned steps after which a run counts as one that never gets there."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
PEERS = ("fastai", "pytorch-lightning", "torch-lr-finder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, and until when."""

    name: str
    optimizer: str
    batch: int
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: Any
    """Dataset of tensors, all in memory."""
    held_out: Any
    """A batch to evaluate."""
    target: float
    middle: float
    """Where the grid begins, as a power of ten."""
    cap: int = 3000
    every: int = 5

    def steps(self, lr: float, seed: int, cap: int) -> float:
        """Steps until the held-out loss is below the target; infinite if it is not."""
        torch.manual_seed(seed)
        model = self.model()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters(), lr=lr)
        batches = forever(self.data, self.batch, seed + 10)
        for step in range(1, cap + 1):
            optimizer.zero_grad()
            self.loss(model, next(batches)).backward()
            optimizer.step()
            if not step % self.every:
                with torch.no_grad():
                    loss = self.loss(model, self.held_out).item()
                if loss < self.target:
                    return step
                if not math.isfinite(loss) or loss > 100:
                    break
        return math.inf

    def mean_steps(self, lr: float, cap: int, seeds: tuple[int, ...] = (0, 1)) -> float:
        """Mean over seeds; infinite if one does not get there."""
        total = 0.0
        for seed in seeds:
            total += self.steps(lr, seed, cap)
            if math.isinf(total):
                break
        return total / len(seeds)

    def tuned(self) -> tuple[float, float]:
        """Fewest steps on the grid, and at which learning rate. Runs are cut at twice the best so far."""
        known = {self.middle: self.mean_steps(10**self.middle, self.cap)}
        for side in (1, -1):
            place = self.middle
            for _ in range(10):
                place += side * APART
                best = min(known.values())
                known[place] = self.mean_steps(10**place, int(min(self.cap, 2 * best)))
                if known[place] > 1.7 * best:
                    break
        place = min(known, key=known.__getitem__)
        return known[place], 10**place


def forever(data: Any, batch: int, seed: int) -> Iterator[Any]:
    """Batches drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = data[torch.randint(0, len(data), (batch,), generator=generator)]
        yield drawn if len(drawn) > 1 else drawn[0]


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of (inputs, labels)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def perceptron() -> nn.Module:
    """The model of the sample task "fashion-mlp"."""
    return nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))


def settings(text: bool) -> Iterator[Setting]:
    """All that are asked for."""
    train, validation = Fashion("train"), Fashion("validation")
    known: dict[str, Any] = {
        "model": perceptron,
        "loss": classify,
        "data": TensorDataset(train.inputs, train.labels),
        "held_out": (validation.inputs[:1000], validation.labels[:1000]),
        "target": 0.55,
    }
    for optimizer, middle in (("sgd", -0.75), ("adam", -2.25)):
        for batch in (8, 32, 128, 512):
            yield Setting(name=f"{optimizer} {batch}", optimizer=optimizer, batch=batch, middle=middle, **known)
    if text:
        task = resolve("text-gpt")
        windows = {split: torch.stack([ByteText(split, length=64)[i] for i in range(count)]) for split, count in _WINDOWS.items()}
        yield Setting(
            name="text-gpt adamw 16", optimizer="adamw", batch=16, model=task.model, loss=task.loss, data=TensorDataset(windows["train"]),
            held_out=windows["validation"], target=2.4, middle=-2.0, cap=800, every=10,
        )  # fmt: skip


_WINDOWS: dict[Any, int] = {"train": 4000, "validation": 64}


class Batches:
    """A loader: batches in a new order in each pass."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def __iter__(self) -> Iterator[Any]:
        for chosen in torch.randperm(len(self.setting.data)).split(self.setting.batch):
            if len(chosen) == self.setting.batch:
                drawn = self.setting.data[chosen]
                yield drawn if len(drawn) > 1 else drawn[0]


def ours(setting: Setting, seed: int) -> LrFound:
    """wb.find_lr."""
    torch.manual_seed(seed)
    model = setting.model()
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters(), lr=1e-3)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = setting.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return find_lr(step, Batches(setting), model=model, optimizer=optimizer)


def fastai(setting: Setting, seed: int) -> dict[str, float]:
    """`Learner.lr_find()` with its four rules, 100 iterations from 1e-7 to 10."""
    from fastai.callback.schedule import minimum, slide, steep, valley
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD, Adam

    torch.manual_seed(seed)
    loader = DataLoader(setting.data, batch_size=setting.batch, shuffle=True, drop_last=True)
    opt_func = SGD if setting.optimizer == "sgd" else Adam
    learner = Learner(DataLoaders(loader, loader), setting.model(), loss_func=F.cross_entropy, opt_func=opt_func)
    with learner.no_bar(), learner.no_logging():
        found = learner.lr_find(suggest_funcs=(steep, minimum, valley, slide), show_plot=False)
    return {f"fastai {rule}": float(lr) for rule, lr in zip(("steep", "minimum", "valley", "slide"), found, strict=True)}


def lightning(setting: Setting, seed: int) -> dict[str, float]:
    """`Tuner.lr_find()`, 100 iterations from 1e-8 to 1."""
    import pytorch_lightning as pl
    from pytorch_lightning.tuner import Tuner

    torch.manual_seed(seed)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lr = setting.model(), 1e-3

        def training_step(self, batch: Any, _: int) -> Tensor:
            return setting.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return OPTIMIZERS[setting.optimizer](self.parameters(), lr=self.lr)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        max_epochs=50, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(setting.data, batch_size=setting.batch, shuffle=True, drop_last=True)
    found = Tuner(trainer).lr_find(Module(), train_dataloaders=loader)
    suggestion = found.suggestion() if found else None
    return {"pytorch-lightning": math.nan if suggestion is None else float(suggestion)}


def davidtvs(setting: Setting, seed: int) -> dict[str, float]:
    """`LRFinder.range_test()` of torch-lr-finder, 100 iterations from 1e-7 to 10."""
    import matplotlib
    from torch_lr_finder import LRFinder

    matplotlib.use("Agg")
    torch.manual_seed(seed)
    model = setting.model()
    finder = LRFinder(model, OPTIMIZERS[setting.optimizer](model.parameters(), lr=1e-7), F.cross_entropy, device="cpu")
    loader = DataLoader(setting.data, batch_size=setting.batch, shuffle=True, drop_last=True)
    finder.range_test(loader, end_lr=10, num_iter=100)
    _, lr = finder.plot(ax=matplotlib.figure.Figure().subplots(), suggest_lr=True)
    return {"torch-lr-finder": math.nan if lr is None else float(lr)}


def quietly(finder: Callable[[Setting, int], dict[str, float]], setting: Setting, seed: int) -> dict[str, float]:
    """What a peer suggests, without what it prints; nothing where it is not installed or cannot do this setting."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return finder(setting, seed)
        except ImportError:
            return {}


def suggested(setting: Setting, seeds: int, peers: bool) -> tuple[dict[str, list[float]], list[float]]:
    """Finder → its suggestions, one per seed; and the seconds of ours."""
    found: dict[str, list[float]] = {}
    seconds = []
    for seed in range(seeds):
        began = time.perf_counter()
        one = ours(setting, seed)
        seconds.append(time.perf_counter() - began)
        rates = {"wb.find_lr": math.nan if one.lr is None else one.lr}
        rates |= {f"our sweeps, {rule.rule}": math.nan if rule.lr is None else rule.lr for rule in one.suggestions}
        for peer in (fastai, lightning, davidtvs) if peers and setting.loss is classify else ():
            rates |= quietly(peer, setting, seed)
        for name, lr in rates.items():
            found.setdefault(name, []).append(lr)
    return found, seconds


def main() -> None:
    """Print a table per setting, then who is within 1.5 times how often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, workbench {wb.__version__}", end="")
    for peer in PEERS if options.peers else ():
        with contextlib.suppress(PackageNotFoundError):
            print(f", {peer} {version(peer)}", end="")
    print()
    scores: dict[str, dict[str, float]] = {}
    for setting in settings(options.text):
        best, at = setting.tuned()
        found, seconds = suggested(setting, options.seeds, options.peers)
        took = statistics.median(seconds)
        print(f"\n{setting.name}: tuned {best:.0f} steps at {at:.3g}; wb.find_lr took {took:.1f} s", flush=True)
        for name, rates in found.items():
            known = [lr for lr in rates if math.isfinite(lr) and lr > 0]
            each = known if name == "wb.find_lr" else ()
            worst = max((setting.mean_steps(lr, int(MOST * best)) / best for lr in each), default=math.nan)
            middle = setting.mean_steps(statistics.median(known), int(MOST * best)) / best if known else math.nan
            scores.setdefault(name, {})[setting.name] = middle
            spread = max(known) / min(known) if known else math.nan
            print(f"   {name:28s} {statistics.median(known) if known else math.nan:9.3g}  ×{middle:5.2f}  worst seed ×{worst:5.2f}  "
                  f"spread ×{spread:.3g}", flush=True)  # fmt: skip
    names = list(next(iter(scores.values())))
    print("\n| finder |", " | ".join(names), "| within 1.5 × |")
    print("|---|" + "---|" * (len(names) + 1))
    for name, row in scores.items():
        cells = [
            f"{value:.2f}" if math.isfinite(value) else "∞" if value == math.inf else "–"
            for value in (row.get(one, math.nan) for one in names)
        ]
        print(f"| {name} |", " | ".join(cells), f"| {sum(value <= 1.5 for value in row.values())} of {len(row)} |")


if __name__ == "__main__":
    main()
