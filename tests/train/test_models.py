"""The mixture of experts: what it computes and needs, and that a sample adds the same to the gradient in whatever batch it comes."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import workbench as wb
from tests.train.test_checkpoints import spec_of
from workbench.data.samples import ByteText
from workbench.runs.task import Task, resolve
from workbench.train.models import Experts, MoeGpt
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

MOE = "workbench.train.tasks:moe_gpt"


def small() -> Task:
    task = resolve(MOE)
    model = partial(MoeGpt, length=16, width=16, layers=2, heads=2)
    return Task(model=model, dataset=partial(ByteText, length=16), loss=task.loss, optimizer="sgd(lr=0.3)", name="moe")


def test_its_memory_is_predicted() -> None:
    dense, sparse = (wb.estimate_memory(wb.RunSpec(task=name, micro_batch=4, device="cpu"), device="cpu") for name in ("text-gpt", MOE))
    assert sparse.parameters == 4 * sum(weight.numel() for weight in resolve(MOE).model().parameters())
    assert sparse.total > dense.total


@pytest.mark.parametrize("spare", [4.0, 0.5])
def test_each_token_gets_its_experts_as_long_as_they_have_room(spare: float) -> None:
    torch.manual_seed(0)
    layer, x = Experts(8, 4, 2, spare), torch.randn(3, 6, 8)
    shares, chosen = layer.router(x).softmax(2).topk(2, dim=2)
    shares = shares / shares.sum(2, keepdim=True)
    capacity = -(-spare * 2 * 6 // 4)

    def expected(sample: int) -> Tensor:
        taken, rows = [0] * 4, []
        for token in range(6):
            row = torch.zeros(8)
            for share, expert in zip(shares[sample, token], chosen[sample, token].tolist(), strict=True):
                taken[expert] += 1
                if taken[expert] <= capacity:
                    row = row + share * (F.gelu(x[sample, token] @ layer.up[expert]) @ layer.down[expert])
            rows.append(row)
        return torch.stack(rows)

    assert torch.allclose(layer(x), torch.stack([expected(sample) for sample in range(3)]), atol=1e-5)
    assert 0.5 < layer.imbalance.item() <= 4


def test_micro_batches_that_add_up_to_a_batch_train_as_it_does(alone: Ranks) -> None:
    """Of the experts too, which count their capacity and balance in each sequence; also across the border of an epoch."""
    losses, weights = [], []
    for micro_batch, accumulation in ((8, 1), (2, 4)):
        task = small()
        data = [task.dataset()[i] for i in range(20)]  # two steps an epoch, and four samples that are dropped
        whole = Task(model=task.model, dataset=lambda data=data: data, loss=task.loss, optimizer=task.optimizer)  # type: ignore[misc]
        trainer = Trainer(spec_of(micro_batch=micro_batch, accumulation=accumulation, checkpoint_every=None), whole, alone)
        batches = trainer.batches()
        losses.append([trainer.step([next(batches) for _ in range(accumulation)]).item() for _ in range(5)])
        weights.append(torch.cat([weight.detach().flatten() for weight in trainer.module.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.allclose(*weights, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
