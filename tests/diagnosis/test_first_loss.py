"""The check of the first loss: what a loss is given is named, and what a fresh model returns by chance is not blamed."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.test_sanity_learning import checked, perceptron, points, task

WIDTH = 8


def deep(seed: int = 0, *last: nn.Module) -> nn.Module:
    """Narrow layers with torch's own initial weights: a fresh one returns little more than its last bias."""
    torch.manual_seed(seed)
    sizes = (WIDTH, 64, 64, 32)
    hidden = [part for before, after in pairwise(sizes) for part in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(32, 1), *last)


def binary(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), (batch[1] > 1).float())


def test_small_positive_logits_are_no_probabilities() -> None:
    """Half of all fresh models have a positive last bias."""
    figures = [checked(task(lambda seed=seed: deep(seed), binary), "initial loss")["initial loss"] for seed in range(8)]
    assert [found for found in figures if found.cause] == []


@pytest.mark.parametrize(
    ("last", "loss", "sure"),
    [
        (nn.Sigmoid, binary, True),
        (nn.Identity, lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).sigmoid()[:, 0].clamp(1e-6, 1), (b[1] > 1).float()), True),
        (nn.Identity, lambda m, b: F.binary_cross_entropy_with_logits(1 / (1 + (-6 * m(b[0])[:, 0]).exp()), (b[1] > 1).float()), False),
    ],
)
def test_a_sigmoid_before_a_loss_that_takes_it_itself(last: type[nn.Module], loss: Callable[..., Tensor], sure: bool) -> None:
    def model() -> nn.Module:
        made = deep(5, last())
        nn.init.zeros_(made[6].bias)
        nn.init.normal_(made[6].weight)
        return made

    found = checked(task(model, loss), "initial loss")["initial loss"]
    assert (found.passed, found.cause) == (False if sure else None, "sigmoid_before_logits_loss"), found


def softmaxed(outputs: Tensor) -> Tensor:
    return F.kl_div(outputs, torch.full_like(outputs, 0.25), reduction="batchmean")


@pytest.mark.parametrize(
    ("loss", "passed", "cause"),
    [
        (lambda m, b: softmaxed(m(b[0]).softmax(1)), False, "no_log_softmax"),
        (lambda m, b: softmaxed(m(b[0])), None, "no_log_softmax"),
        (lambda m, b: softmaxed(m(b[0]).log_softmax(1)), None, ""),
        (lambda m, b: (m(b[0])[:, :1] - b[0][:, 0]).square().mean(), None, "broadcast_targets"),
        (lambda m, b: (b[0][:, :1] - m(b[0])[:, 0]).abs().mean(), None, "broadcast_targets"),
        (lambda m, b: (m(b[0])[:, :1] - b[0][:, :1]).square().mean(), None, ""),
        (lambda m, b: (m(b[0])[:, :1] - m(b[0])[:, 0]).square().mean(), None, ""),  # differences of each two outputs
    ],
)
def test_losses_that_are_not_compared_with_chance_are_given_what_they_need(loss: Any, passed: bool | None, cause: str) -> None:
    found = checked(task(perceptron, loss), "initial loss")["initial loss"]
    assert (found.passed, found.cause) == (passed, cause), found


@pytest.mark.parametrize("double", [False, True])
def test_probabilities_are_held_against_their_targets(double: bool) -> None:
    """Labels that carry nothing are named where the model ends in a sigmoid, in fp64 as well: the check had failed with a TypeError."""

    def data() -> tuple[Tensor, Tensor]:
        inputs = points()[0].double() if double else points()[0]
        return inputs, (inputs[:, :4] > 0).to(inputs.dtype)[torch.randperm(len(inputs), generator=torch.Generator().manual_seed(7))]

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4), nn.Sigmoid())
        return made.double() if double else made

    found = checked(task(model, lambda m, b: F.binary_cross_entropy(m(b[0]), b[1]), data), "label alignment")["label alignment"]
    assert (found.passed, found.cause) == (False, "labels_carry_nothing"), found
