"""Keeps an exponential moving average of a model's parameters, and puts it in their place for an evaluation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """average = decay × average + (1 - decay) × parameters after each step, from the parameters of the start, as torch computes it.

    Buffers, such as the statistics of batch norms, are not averaged: the evaluation has the model's own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._update = module, get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.tensors = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        """The averages by name of the parameter; a parameter that several modules share has one."""

    def update(self) -> None:
        """Take in the parameters after a step."""
        self._update(list(self.tensors.values()), [weight.detach() for weight in self._module.parameters()], None)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module has the averages as its parameters. Nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self._module.named_parameters():
            weight.data, self.tensors[name] = self.tensors[name], weight.data

    def state_dict(self) -> dict[str, Any]:
        """The averages by name of the parameter."""
        return dict(self.tensors)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with averages that were kept."""
        for name, average in self.tensors.items():
            average.copy_(state[name])
