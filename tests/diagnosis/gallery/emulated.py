"""Loops on an emulated GPU whose remedies can be proved: the host sleeps or computes while the device works behind its back."""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import COMPUTE, INPUT, Case
from parts import Loop
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.emulated_device import EmulatedDevice

HERE = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Small samples. Seconds per sample."""

    waits: float = 0.0
    computes: float = 0.0
    slow: float = 0.0
    """One sample in sixteen waits for so long."""
    length: int = 4_000

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.waits or (self.slow and index % 16 == 0):
            time.sleep(self.waits + self.slow * (index % 16 == 0))
        end = time.thread_time() + self.computes
        while time.thread_time() < end:
            sum(range(100))
        return torch.full((4,), float(index))


def loop(
    planted: bool = True,
    *,
    samples: Samples,
    batch: int = 16,
    fixed: float = 0.002,
    each: float = 0.0005,
    host: float = 0.0005,
    item: int = 10,
    autocast: float = 0.6,
    loader: dict[str, Any] | None = None,
) -> Loop:
    """A loop of the device.

    Args:
        planted: as in all cases.
        samples: of the loader.
        batch: samples in a batch.
        fixed: seconds of the device per step, however large its batch is.
        each: seconds of the device per sample.
        host: seconds of the host per step.
        item: the loss is read in each so many steps; 0 = never.
        autocast: how much of the device's time is left in mixed precision.
        loader: more arguments of the DataLoader.
    """
    device = EmulatedDevice().install(pytest.MonkeyPatch())
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    calls = 0

    def step(x: Tensor) -> None:
        nonlocal calls
        calls += 1
        time.sleep(host)
        device.compute((fixed + each * len(x)) * (autocast if torch.is_autocast_enabled() else 1.0), kernels=40)
        if item and calls % item == 0:
            device.item()

    data = DataLoader(samples if planted else Samples(), batch_size=batch, **(loader or {}))  # type: ignore[arg-type]
    return Loop(step=step, loader=data, model=model, optimizer=optimizer, samples=batch, named=False)


emulated_storage = partial(loop, samples=Samples(waits=0.001))
emulated_decode = partial(loop, samples=Samples(computes=0.001), each=0.0008)
emulated_one_slow_worker = partial(loop, samples=Samples(waits=0.0015), loader={"num_workers": 1})
emulated_slow_samples = partial(loop, samples=Samples(slow=0.02), batch=12, each=0.0003)
emulated_short_passes = partial(loop, samples=Samples(waits=0.0001, length=10 * 16), loader={"num_workers": 2}, item=1)
emulated_small_batch = partial(loop, samples=Samples(), fixed=0.01, each=0.0001, batch=8, item=25)
emulated_both = partial(loop, samples=Samples(waits=0.0006, computes=0.0004), each=0.0006, item=1)

# held out
emulated_deep_wait = partial(loop, samples=Samples(waits=0.004), batch=10, each=0.0004, fixed=0.004, item=50)
emulated_uneven_decode = partial(loop, samples=Samples(computes=0.0005, slow=0.01), batch=24, each=0.0004, item=0)

_NAMES = ("storage", "decode", "one_slow_worker", "slow_samples", "short_passes", "small_batch", "both")
_HELD_OUT = ("deep_wait", "uneven_decode")


def _case(name: str) -> Case:
    return Case(name=f"emulated_{name}", plants=name.replace("_", " "), answers={INPUT: (), COMPUTE: ()}, file=HERE)


EMULATED = {case.name: case for case in map(_case, _NAMES)}
HELD_OUT_EMULATED = {case.name: case for case in map(_case, _HELD_OUT)}
