"""A proof on a GPU on which both of its trainings do not fit at once."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import toy_tasks
from workbench.programs.experiment import Training, enter_training
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.device_turns import DeviceTurns
from workbench.train.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]

SPEC = RunSpec(task="numbers", device="cuda", micro_batch=8, optimizer="adamw(lr=0.001)")


def large() -> Task:
    """0.5 GiB of weights, as much of gradients and of DDP's buckets, 1 GiB of Adam's state, and 0.5 GiB while the optimizer steps: 3 GiB.

    Of that 2 GiB stay between steps, where nothing is moved, so that two such trainings need 5 GiB, 1.7 times what one needs. A resting
    one that is moved leaves nothing.
    """

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 2))

    return toy_tasks.numbers(model=model)


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """A process group of this process alone."""
    threads = torch.get_num_threads()
    yield Ranks.join(SPEC)
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def need(alone: Ranks) -> int:
    """Bytes that the allocator reserves for one such training, which has its final buckets from its second step on."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with enter_training(SPEC, large(), alone, 0, DeviceTurns(alone.device)) as training:
        assert isinstance(training, Training)
        training.drain()  # its turn
        for _ in range(2):
            training.step()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


@pytest.mark.parametrize("share", [None, 1.4], ids=["room for both", "room for one"])
def test_two_trainings_take_turns_on_the_device(alone: Ranks, share: float | None) -> None:
    """1.4: less than the 1.7 of two; the 0.4 beyond one, 1.2 GiB, are for blocks of memory between which gaps remain.

    What NCCL and the context of the device have outside of the allocator is there before what is free is read: `need` trains in the
    process group of all, and later trainings make none.
    """
    left = int(share * need(alone)) if share else None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - left if left else 0, dtype=torch.uint8, device="cuda")
    turns = DeviceTurns(alone.device)
    with enter_training(SPEC, large(), alone, 0, turns) as one, enter_training(SPEC, large(), alone, 1, turns) as other:
        losses = []
        for training in (one, other, one, other):
            assert isinstance(training, Training)
            training.drain()
            for _ in range(2):
                training.step()
            torch.cuda.synchronize()
            losses.append(sum(float(weight.detach().double().sum()) for weight in training.trainer.module.parameters()))
    assert losses[:2] == pytest.approx(losses[0:1] * 2)  # both train alike
    assert losses[2:] == pytest.approx(losses[2:3] * 2)
    assert (turns.note is None) == (share is None)
    del ballast
