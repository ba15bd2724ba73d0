"""Notes on each rank the first step whose loss is NaN or infinite, and which weights are so by then."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LOOK_EVERY = 0.3
"""Seconds between two moments at which the host waits for the answer; between them the device counts alone."""


class FirstNotFinite:
    """The first bad step of this rank. A rank whose loss is sound writes nothing, so that no rank has to wait for another."""

    def __init__(self, module: nn.Module, say: Callable[[dict[str, Any]], None], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Watch no step yet.

        Args:
            module: that is trained.
            say: writes a row that is no step into the file of this rank.
            clock: gives the time in seconds.
        """
        self._module, self._say, self._clock = module, say, clock
        self._first: Tensor | None = None
        self._looked, self._done = clock(), False

    def step(self, step: int, loss: Tensor) -> None:
        """Take the loss of a step (from 1), on its device."""
        if self._done:
            return
        bad = torch.where(torch.isfinite(loss.detach()), 0, step)
        self._first = bad if self._first is None else torch.where(self._first == 0, bad, self._first)
        if self._clock() - self._looked > LOOK_EVERY:
            self.look()

    def look(self) -> None:
        """Write the first bad step, if there was one. Waits for the device."""
        if self._first is None or self._done:
            return
        self._looked, first = self._clock(), int(self._first)
        if first:
            self._done = True
            self._say({"not_finite": {"step": first, "weights": self._weights()}})

    def _weights(self) -> str:
        """Which weights, or their gradients, are not finite now."""
        bad, count = [], 0
        for name, weight in self._module.named_parameters():
            count += 1
            parts = [part for part in (weight.detach(), weight.grad) if part is not None]
            parts = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
            if not all(bool(torch.isfinite(part).all()) for part in parts):
                bad.append(name)
        return f"{len(bad)} of {count} weights are not finite, the first of them {bad[0]}" if bad else ""
