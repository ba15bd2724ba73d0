"""Data: a curve as columns, which laws are fitted to; and what a fitted law is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["weak", "strong"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a form is fitted to, by ascending number of processes."""

    sizes: Floats
    """Processes."""
    times: Floats
    """Seconds per sample and process."""
    exposed: Floats
    """Share of the step that is nothing but communication; nan = not measured."""
    noise: float
    """Standard deviation of a time, as a fraction of it."""

    def without_last(self) -> "Data":
        """All points but the largest."""
        return Data(sizes=self.sizes[:-1], times=self.times[:-1], exposed=self.exposed[:-1], noise=self.noise)

    def shaken(self, chance: np.random.Generator, noise: Floats) -> "Data":
        """The same points, measured once more."""
        times = self.times * np.exp(noise * chance.standard_normal(len(self.times)))
        return Data(sizes=self.sizes, times=times, exposed=self.exposed, noise=self.noise)


Law = Callable[[Floats], Floats]
"""A fitted form: processes → seconds per sample and process."""
