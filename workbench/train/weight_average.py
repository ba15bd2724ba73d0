"""Keeps an exponential moving average of a model's parameters, and puts it in their place for an evaluation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from workbench.train.sharded_tensors import is_dtensor, local_part
from workbench.train.sharding import reshard


class WeightAverage:
    """average = decay × average + (1 - decay) × parameters after each step, from the parameters of the start, as torch computes it.

    Where parameters are sharded, each rank averages its parts. Buffers, such as the statistics of batch norms, are not averaged: the
    evaluation has the model's own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._update = module, get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.tensors = {name: local_part(weight.detach()).clone() for name, weight in module.named_parameters()}
        """The averages by name of the parameter, of this rank's part of it; a parameter that several modules share has one."""

    def update(self) -> None:
        """Take in the parameters after a step."""
        self._update(list(self.tensors.values()), [local_part(weight.detach()) for weight in self._module.parameters()], None)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module has the averages as its parameters.

        Nothing is copied but parts of sharded parameters, one by one: FSDP2 has views of them.
        """
        self._swap()
        try:
            yield
        finally:
            reshard(self._module)  # what was gathered inside is of the averages
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._module.named_parameters():
            if is_dtensor(weight):
                part = local_part(weight.detach())
                kept = part.clone()
                part.copy_(self.tensors[name])
                self.tensors[name].copy_(kept)
            else:
                weight.data, self.tensors[name] = self.tensors[name], weight.data

    def state_dict(self) -> dict[str, Any]:
        """The averages by name of the parameter."""
        return dict(self.tensors)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with averages that were kept."""
        for name, average in self.tensors.items():
            average.copy_(state[name])
