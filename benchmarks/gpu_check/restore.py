"""Part `restore`: diagnose, measure_memory, noise_scale, trace and find_leaks restore everything bit for bit."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from benchmarks.gpu_check.machine import Bench
from benchmarks.gpu_check.report import Report, last_line
from benchmarks.gpu_check.runner import scratch_folder

FAILS_AT = 2
"""Call of the step that raises, in the second row of each function."""


class Training:
    """A mixed-precision training whose state changes in every step: weights, statistics, moments, the loss scale, five generators."""

    def __init__(self, bench: Bench) -> None:
        torch.manual_seed(0)
        self.device = bench.kind
        layers = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Dropout(0.2))
        self.model = nn.Sequential(*layers, nn.Linear(2048, 256), nn.GELU(), nn.Linear(256, 10)).to(bench.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        # overflows now and then, so that the scale goes up and down
        self.scaler = torch.amp.GradScaler(bench.kind, init_scale=2.0**18, growth_interval=3)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(0, 10, (1024,)))
        self.loader = DataLoader(data, batch_size=64, shuffle=True, generator=generator)
        self.calls, self.fails, self.history = 0, False, list[float]()

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """One optimizer step of two micro-batches."""
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            x, y = x.to(self.device), y.to(self.device)
            with torch.autocast(self.device, torch.float16 if self.device == "cuda" else torch.bfloat16):
                loss = nn.functional.cross_entropy(self.model(x + 1e-3 * noise), y) / 2
            self.scaler.scale(loss).backward()
        if self.fails and self.calls % 100 == FAILS_AT:
            raise ZeroDivisionError("planted in the step")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.history.append(float(loss.detach()))

    def state(self) -> dict[str, Any]:
        """All of it by name, copied."""
        gradients = {name: weight.grad for name, weight in self.model.named_parameters()}
        options = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        tree = {
            "model": self.model.state_dict(),
            "gradients": gradients,
            "mode": self.model.training,
            "optimizer": self.optimizer.state_dict()["state"],
            "options": options,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "torch RNG": torch.get_rng_state(),
            "Python RNG": str(random.getstate()),
            "numpy RNG": str(np.random.get_state()),
            "loader's RNG": self.loader.generator.get_state(),
            "calls": self.calls,
            "history": list(self.history),
        }
        if self.device == "cuda":
            tree["CUDA RNG"] = torch.cuda.get_rng_state()
        leaves, _ = tree_flatten_with_path(tree)
        names = ("".join(str(key) for key in path) for path, _ in leaves)
        return {
            name: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf for name, (_, leaf) in zip(names, leaves, strict=True)
        }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs, bit for bit."""
    names = [name for name in before.keys() | after.keys() if (name in before) != (name in after)]
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        tensors = isinstance(a, Tensor), isinstance(b, Tensor)
        same = _same_bits(a, b) if all(tensors) else not any(tensors) and type(a) is type(b) and a == b
        if not same:
            names.append(name)
    return sorted(names)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (part.contiguous().reshape(-1).view(torch.uint8) for part in (a, b))
    return torch.equal(*flat)


def functions(training: Training, bench: Bench) -> dict[str, Callable[[], object]]:
    """What is called, by name."""
    step, loader = training.step, training.loader
    return {
        "diagnose": lambda: wb.diagnose(step, loader, budget_s=bench.pick(8.0, 4.0)),
        "measure_memory": lambda: wb.measure_memory(step, loader),
        "noise_scale": lambda: wb.noise_scale(step, loader, steps=8),
        "trace": lambda: wb.trace(step, loader, steps=3, into=scratch_folder() / "traces"),
        "find_leaks": lambda: wb.find_leaks(step, loader, steps=6),
    }


def run(report: Report, bench: Bench) -> None:
    """Add two rows for each function: with a step that works, and with one that raises."""
    for fails in (False, True):
        for name in functions(Training(bench), bench):
            title = f"{name}, the step raises" if fails else name
            if not report.has(title):
                with report.guard(title):
                    _restored(report, bench, name, title, fails)
            bench.clear()


def _restored(report: Report, bench: Bench, name: str, title: str, fails: bool) -> None:
    training = Training(bench)
    for batch, _ in zip(training.loader, range(3), strict=False):
        training.step(batch)
    training.calls, training.fails = 0, fails
    before, text = training.state(), ""
    try:
        functions(training, bench)[name]()
    except Exception as error:
        text = last_line(error)
    differs = changed(before, training.state())
    raised = bool(text) == fails and (not fails or "planted" in text)
    report.row(
        title,
        not differs and raised,
        values={"changed": differs, "text": text, "compared": len(before)},
        result=f"{len(before)} values compared, " + (f"changed: {', '.join(differs[:6])}" if differs else "all unchanged"),
        error=text[:100],
        expected="bit for bit" + (", and the step's own error" if fails else ""),
    )
