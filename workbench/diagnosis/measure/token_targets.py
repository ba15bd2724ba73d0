"""Whether the targets of a language model are its own input tokens or the next ones, and whether it reads what it is to predict."""

from typing import Any, Literal

import torch
from torch import Tensor

from workbench.diagnosis.measure.checked_training import Seen, Training
from workbench.diagnosis.measure.watched_forward import Watched
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


def given_targets(seen: Seen) -> Tensor | None:
    """Whole numbers that the model is called with after its first tokens, as its decoder is, and that are the targets of the first loss."""
    call = seen.watched.losses[0]
    if call.name not in ("cross_entropy", "nll_loss") or call.target.is_floating_point():
        return None
    target = call.target.flatten()
    judged = target != call.options.get("ignore_index", -100)

    def equal(tokens: Tensor) -> bool:
        varied = tokens.numel() == len(target) and bool((tokens != tokens[0, 0]).any())
        return varied and bool(judged.sum() > 1) and bool((tokens.flatten() == target)[judged].all())

    return next(filter(equal, _all_tokens(seen)[1:]), None)


def _tokens(seen: Seen) -> Tensor | None:
    """Whole numbers [sequences, positions] that the model is called with."""
    return next(iter(_all_tokens(seen)), None)


def _all_tokens(seen: Seen) -> list[Tensor]:
    args, kwargs = seen.watched.root or ((), {})
    given = kwargs.get("input_ids")
    found = tensors_of(list(args)) + tensors_of(kwargs)
    found = [given, *(x for x in found if x is not given)] if isinstance(given, Tensor) else found
    return [x for x in found if x.ndim == 2 and x.dtype in (torch.int32, torch.int64) and x.shape[1] > 2]


@torch.no_grad()
def reads_its_target(training: Training, seen: Seen, targets: Tensor | None = None) -> bool:
    """Whether the predictions of earlier tokens change with a later one, which one of them is to predict; or, of `targets` that the model
    is called with, whether a prediction changes with its own target.

    The model runs three times in evaluation mode, with equal random numbers. False where neither its outputs nor what it gives to a loss
    tell their positions, and where the same tokens do not give the same outputs, as in a model that keeps a state from call to call.
    """
    tokens = _tokens(seen) if targets is None else targets
    if tokens is None or not training.models or seen.watched.root is None:
        return False
    model = training.models[0].eval()
    count, length = tokens.shape
    place = length - 2  # a model that shifts its targets itself does not read the last token
    other = tokens.clone()
    other[:, place] = torch.where(tokens[:, place] == tokens.max(), tokens.min(), tokens.max())

    def outputs(given: Tensor) -> list[Tensor]:
        args, kwargs = (map_tensors(lambda x: given if x is tokens else x, part) for part in _unlabelled(seen.watched.root))
        seed_all(0)
        with (watched := Watched([])):
            found = [x for x in tensors_of(model(*args, **kwargs)) if x.is_floating_point() and x.shape[:2] == tokens.shape]
        given_to_losses = [call.input.movedim(1, -1) for call in watched.losses if call.input.ndim > 1]
        found += [x.reshape(count, -1, x.shape[-1]) for x in given_to_losses if x[..., 0].numel() in (count * length, count * (length - 1))]
        judged = slice(place) if targets is None else slice(place, place + 1)
        return [x[:, judged].double() for x in found if x.ndim > 2]

    before, again, after = outputs(tokens), outputs(tokens), outputs(other)

    def differ(several: list[Tensor]) -> bool:
        return any(float((old - new).abs().max()) > LEAK * float(old.abs().max()) for old, new in zip(before, several, strict=True))

    return differ(after) and not differ(again)


def _unlabelled(root: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a model's call, without the labels that it may use for a loss of its own."""
    args, kwargs = root
    return list(args), {name: value for name, value in kwargs.items() if name != "labels"}
