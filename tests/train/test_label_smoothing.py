"""Label smoothing of a task that knows nothing of it: exact, in training only, and refused where it would do nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from tests.train.test_checkpoints import spec_of
from workbench.runs.task import Task, TaskError
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(32)]


class Inside(nn.Linear):
    """Computes its loss itself, as models of Hugging Face do."""

    def loss(self, batch: Any) -> Tensor:
        return nn.CrossEntropyLoss()(self(batch[0]), batch[1])


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "by name": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    "imported": lambda model, batch: cross_entropy(model(batch[0]), target=batch[1]),
    "module": lambda model, batch: nn.CrossEntropyLoss()(model(batch[0]), batch[1]),
    "model's own": lambda model, batch: getattr(model, "module", model).loss(batch),
}


def task_of(loss: Callable[[Any, Any], Any]) -> Task:
    evaluate = lambda model: {"loss": float(functional.cross_entropy(model(DATA[0][0][None]), torch.tensor([DATA[0][1]])))}  # noqa: E731
    return Task(model=lambda: Inside(4, 3), dataset=lambda: DATA, loss=loss, optimizer="sgd(lr=0.1)", evaluate=evaluate)


@pytest.mark.parametrize("way", LOSSES)
def test_it_is_torchs_own(alone: Ranks, way: str) -> None:
    trainer = Trainer(spec_of(label_smoothing=0.2), task_of(LOSSES[way]), alone)
    batch = next(trainer.batches())
    expected = cross_entropy(trainer.module(batch[0]), batch[1], label_smoothing=0.2)
    plain = cross_entropy(trainer.module(DATA[0][0][None]), torch.tensor([DATA[0][1]]))
    assert trainer.figures()["loss"] == pytest.approx(plain.item())  # what is evaluated is not smoothed
    trainer.module.train()
    assert trainer.step([batch]).item() == expected.item()


@pytest.mark.parametrize("own", [0.1, 0.4])
def test_a_smoothing_of_the_tasks_own_stays(alone: Ranks, own: float) -> None:
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1], label_smoothing=own)  # noqa: E731
    trainer = Trainer(spec_of(label_smoothing=0.2), task_of(loss), alone)
    batch = next(trainer.batches())
    expected = loss(trainer.module, batch)
    assert trainer.step([batch]).item() == expected.item()


def test_a_loss_without_cross_entropy_is_refused(alone: Ranks) -> None:
    trainer = Trainer(spec_of(label_smoothing=0.2), task_of(lambda model, batch: model(batch[0]).square().mean()), alone)
    with pytest.raises(TaskError, match=r"label_smoothing=0.2: the task's loss does not call torch.nn.functional.cross_entropy"):
        trainer.step([next(trainer.batches())])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of dynamo, about the tensors it is given
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_loss_that_was_compiled_before_is_smoothed_in_training_alone(alone: Ranks, backend: str) -> None:
    compiled = torch.compile(cross_entropy_of, backend=backend)
    outputs, labels = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
    plain = compiled(outputs, labels).item()
    both = lambda model, batch: compiled(model(batch[0]), batch[1]) + cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    trainer = Trainer(spec_of(label_smoothing=0.2), task_of(both), alone)
    batch = next(trainer.batches())
    for _ in range(2):
        expected = 2 * cross_entropy(trainer.module(batch[0]), batch[1], label_smoothing=0.2).item()
        assert trainer.step([batch]).item() == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert compiled(outputs, labels).item() == plain


def cross_entropy_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels)


def test_outside_of_a_training_nothing_is_smoothed(alone: Ranks) -> None:
    def fails(model: Any, batch: Any) -> Tensor:
        cross_entropy(model(batch[0]), batch[1])
        raise KeyError

    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    before = cross_entropy(outputs, labels)
    trainer = Trainer(spec_of(label_smoothing=0.2), task_of(fails), alone)
    with pytest.raises(KeyError):
        trainer.step([next(trainer.batches())])
    assert torch.equal(cross_entropy(outputs, labels), before)
