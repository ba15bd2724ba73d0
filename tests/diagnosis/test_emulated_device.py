"""Verdicts on loops of a device that works behind the host's back, on an emulated GPU; the truth is the time from sync to sync."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import workbench as wb
from tests.emulated_device import QUEUE_DEPTH, EmulatedDevice

pytestmark = pytest.mark.alone  # they compare times


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training loop. Seconds."""

    name: str
    verdict: str = "compute-bound"
    host: float = 0.0005
    """Of the host per step: Python and launches."""
    compute: float = 0.01
    """Of the device per step."""
    kernels: int = 50
    depth: int = QUEUE_DEPTH
    item: int = 0
    """`loss.item()` at each so many steps."""
    loading: float = 0.0
    """To make a batch."""
    steps_per_pass: int = 100
    start: float = 0.0
    """To start a pass over the loader."""
    save_every: int = 0
    save: float = 0.25
    """A checkpoint: waits for the device, then writes."""
    lengths: tuple[float, ...] = (1.0,)
    """Of successive steps, relative."""


HEALTHY = [
    Case(name="no item"),
    Case(name="item at each step", item=1),
    Case(name="item at each 10th step", item=10),
    Case(name="item at each 50th step", item=50),
    Case(name="item at each 100th step", item=100),
    Case(name="deep queue", depth=10**6, item=100),
    Case(name="shallow queue", depth=60),
    Case(name="hidden loader", loading=0.006, item=25),
    Case(name="hidden start of passes", steps_per_pass=40, start=0.12),
    Case(name="uneven lengths", lengths=(0.7, 1.0, 1.3, 0.8, 1.2), item=10),
    Case(name="long steps", compute=0.03, host=0.01, item=10),
]
PLANTED = [
    Case(name="slow loader", verdict="input-bound", loading=0.024, item=10),
    Case(name="checkpoints", verdict="stalled", save_every=25),
    Case(name="starts of passes", verdict="input-bound", steps_per_pass=12, start=0.1, item=5),
]


class Loop:
    """The case on a device."""

    def __init__(self, case: Case, device: EmulatedDevice) -> None:
        self.case, self.device, self.calls = case, device, 0

    def __len__(self) -> int:
        return self.case.steps_per_pass

    def __iter__(self) -> Iterator[int]:
        time.sleep(self.case.start)
        for i in range(len(self)):
            time.sleep(self.case.loading)
            yield i

    def step(self, _: object) -> None:
        case, device = self.case, self.device
        self.calls += 1
        time.sleep(case.host)
        device.compute(case.compute * case.lengths[self.calls % len(case.lengths)], kernels=case.kernels)
        if case.item and self.calls % case.item == 0:
            device.item()
        if case.save_every and self.calls % case.save_every == 0:
            device.item()
            time.sleep(case.save)

    def seconds_per_step(self) -> float:
        """From sync to sync, over a whole number of passes that begin with a filled queue."""
        count, done, start = max(1, round(1.5 / (len(self) * self.case.compute))) * len(self), 0, 0.0
        while True:
            for batch in self:
                if done == len(self) // 2:
                    self.device.synchronize()
                    start = time.perf_counter()
                if done == len(self) // 2 + count:
                    self.device.synchronize()
                    return (time.perf_counter() - start) / count
                self.step(batch)
                done += 1


def judge(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(case, EmulatedDevice(depth=case.depth).install(monkeypatch))
    truth = loop.seconds_per_step()
    diagnosis = wb.diagnose(loop.step, loop, budget_s=5)
    assert diagnosis.verdict == case.verdict, str(diagnosis)
    assert diagnosis.evidence.step == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("case", [HEALTHY[2], PLANTED[0]], ids=lambda case: case.name)
def test_the_verdict_goes_by_the_clock_of_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*HEALTHY, *PLANTED], ids=lambda case: case.name)
def test_the_gallery_on_an_emulated_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(case, monkeypatch)
