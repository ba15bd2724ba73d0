"""Whether the targets of a language model are its own input tokens or the next ones, and whether it reads what it is to predict."""

from typing import Any, Literal

import torch
from torch import Tensor

from workbench.diagnosis.measure.checked_training import Seen, Training
from workbench.harness.batches import map_tensors, tensors_of
from workbench.train.random_numbers import seed_all

LEAK = 1e-4
"""Relative change of an output from which on it depends on another token or sample; rounding changes it by 1e-6."""


def of_tokens(seen: Seen) -> Literal["same", "next", "next but one", ""]:
    """Whether the targets of the first loss are the model's own input tokens, those one or two positions later, or others ("")."""
    tokens, call = _tokens(seen), seen.watched.losses[0]
    if tokens is None or call.name not in ("cross_entropy", "nll_loss") or call.target.is_floating_point():
        return ""
    count, length = tokens.shape
    if call.target.numel() not in (count * length, count * (length - 1)):
        return ""
    target = call.target.reshape(count, -1)
    judged = target != call.options.get("ignore_index", -100)

    def equal(first: Tensor, second: Tensor, where: Tensor) -> bool:
        return bool(where.sum() > 1) and bool((first == second)[where].all())

    if bool((tokens == tokens[0, 0]).all()):
        return ""
    if target.shape == tokens.shape and equal(target, tokens, judged):
        return "same"
    if equal(target[:, : length - 1], tokens[:, 1:], judged[:, : length - 1]):
        return "next"
    several = len(seen.watched.losses) > len(seen.batches)  # a head of its own may predict the token after the next
    return "next but one" if not several and equal(target[:, : length - 2], tokens[:, 2:], judged[:, : length - 2]) else ""


def _tokens(seen: Seen) -> Tensor | None:
    """Whole numbers [sequences, positions] that the model is called with."""
    args, kwargs = seen.watched.root or ((), {})
    given = kwargs.get("input_ids")
    found = [given] if isinstance(given, Tensor) else tensors_of(list(args)) + tensors_of(kwargs)
    return next((x for x in found if x.ndim == 2 and x.dtype in (torch.int32, torch.int64) and x.shape[1] > 2), None)


@torch.no_grad()
def reads_its_target(training: Training, seen: Seen) -> bool:
    """Whether the predictions of earlier tokens change with the last one, which one of them is to predict.

    The model runs twice in evaluation mode, with equal random numbers. False where its outputs do not tell their positions.
    """
    tokens = _tokens(seen)
    if tokens is None or not training.models or seen.watched.root is None:
        return False
    model = training.models[0].eval()
    length = tokens.shape[1]
    other = tokens.clone()
    other[:, -1] = torch.where(tokens[:, -1] == tokens.max(), tokens.min(), tokens.max())

    def outputs(given: Tensor) -> list[Tensor]:
        args, kwargs = (map_tensors(lambda x: given if x is tokens else x, part) for part in _unlabelled(seen.watched.root))
        seed_all(0)
        found = [x for x in tensors_of(model(*args, **kwargs)) if x.is_floating_point()]
        return [x[:, : length - 1] for x in found if x.ndim > 2 and x.shape[:2] == tokens.shape]

    return any(
        float((before.double() - after.double()).abs().max()) > LEAK * float(before.abs().max())
        for before, after in zip(outputs(tokens), outputs(other), strict=True)
    )


def _unlabelled(root: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a model's call, without the labels that it may use for a loss of its own."""
    args, kwargs = root
    return list(args), {name: value for name, value in kwargs.items() if name != "labels"}
