"""What a dry run does with parts of torch that torch does not promise: this torch can do all of it."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from workbench.memory.estimate import fake_process_group
from workbench.memory.estimate import fake_tensors as fakes
from workbench.memory.measure import module_tracker
from workbench.memory.measure.recorder import Recorder


def step_of(model: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], world: bool = False) -> Recorder:
    with fake_process_group.process_group(2, 0) if world else contextlib.nullcontext(), fakes.fake_tensors():
        recorder = Recorder()
        with recorder, fake_process_group.fake_data_parallel(lambda bucket: recorder.track(bucket, "bucket")):
            module = model()
            recorder.attach(module)
            steps = optimizer(list(module.parameters()))
            with recorder.hooks():
                with recorder.phase("forward"):
                    loss = module(torch.ones(4, 8)).sum()
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    steps.step()
        recorder.recognise_unsharded(module)
    return recorder


def bytes_of(recorder: Recorder, category: str) -> int:
    return sum(record.size for record in recorder.log.records if record.category == category)


def test_a_step_on_fake_tensors_is_recorded() -> None:
    recorder = step_of(lambda: nn.Linear(8, 4), lambda p: torch.optim.SGD(p, momentum=0.9))
    assert {name: bytes_of(recorder, name) for name in ("parameter", "gradient", "optimizer_state")} == {
        "parameter": 36 * 4,
        "gradient": 36 * 4,
        "optimizer_state": 36 * 4,
    }


def test_ddp_runs_on_fake_ranks() -> None:
    recorder = step_of(lambda: DistributedDataParallel(nn.Linear(8, 4)), torch.optim.SGD, world=True)
    assert bytes_of(recorder, "bucket") == 36 * 4


def test_fsdp2_runs_on_fake_ranks() -> None:
    def build() -> nn.Module:
        with fakes.real_tensors():
            mesh = init_device_mesh("cpu", (2,))
        module = nn.Linear(8, 4)
        fully_shard(module, mesh=mesh)
        return module

    recorder = step_of(build, torch.optim.SGD, world=True)
    assert bytes_of(recorder, "parameter") == 18 * 4
    assert bytes_of(recorder, "unsharded_parameter") == 36 * 4


def test_optimizers_take_multi_tensor_operators_for_fake_tensors() -> None:
    with fakes.foreach_on_fakes():
        recorder = step_of(lambda: nn.Linear(8, 4), lambda p: torch.optim.SGD(p, weight_decay=0.1, foreach=True))
    assert any("_foreach_" in record.op for record in recorder.log.records), "the optimizer took its loop"


def test_a_fake_model_can_be_moved() -> None:
    with fakes.fake_tensors(), fakes.movable_modules():
        assert nn.Linear(8, 4).to(torch.float64).weight.dtype == torch.float64


def test_backward_is_told_by_module() -> None:
    assert module_tracker.next_node() is not None
