"""Trial: one training until its target, and how it ended; Target: what is to be reached."""

import math
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["reached", "stopped", "diverged", "capped"]
"""How a trial ended: at the target; given up, for it took much longer than the best; not a number, or far above where it began; or at the
largest number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model is to reach.

    >>> str(Target(name="loss", value=0.5)), Target(name="accuracy", value=0.8, rises=True).met(0.81)
    ('loss 0.5', True)
    """

    name: str
    """"loss", on a fixed part of the training data; or a figure of the task's evaluation."""
    value: float
    """Where it is reached."""
    rises: bool | None = None
    """Is more better? None = the untrained model tells: a figure that begins below the target has to rise."""
    start: float | None = None
    """What the untrained model has; None = nobody has looked yet."""

    def met(self, value: float) -> bool:
        """Is it reached?"""
        return value >= self.value if self.rises else value <= self.value

    def crossing(self, before: tuple[int, float], after: tuple[int, float]) -> float:
        """Steps at which the line between two looks (steps, value) meets the target; the second has met it, the first has not."""
        (start, low), (end, high) = before, after
        return start + (end - start) * (self.value - low) / (high - low) if high != low else float(end)

    def rank(self, trial: "Trial") -> tuple[bool, bool, float]:
        """To order trials by, best first: steps, where the target was reached; else how near it came, what diverged last."""
        if trial.steps is not None:
            return False, False, trial.steps
        near = trial.best if trial.best is not None else math.inf
        return True, trial.outcome == "diverged", trial.lr if trial.outcome == "diverged" else -near if self.rises else near

    def __str__(self) -> str:
        return f"{self.name} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One training from the start until its target."""

    batch: int
    """Samples per optimizer step."""
    rule: str
    """What gave it its learning rate: a rule, or "tuned"."""
    lr: float
    """Peak learning rate."""
    optimizer: str
    """As a spec writes it."""
    seed: int
    """Of the model's weights and the samples' order."""
    steps: float | None
    """Optimizer steps to the target, interpolated between two looks; None = it was not reached."""
    after: int
    """Optimizer steps that were taken."""
    outcome: Outcome
    """How it ended."""
    best: float | None
    """The value nearest the target that was seen; None = none was a number."""
    seconds: float = 0.0
    """It took."""

    @property
    def samples(self) -> float | None:
        """Samples to the target; None = it was not reached."""
        return None if self.steps is None else self.steps * self.batch

    @property
    def at_once(self) -> bool:
        """Was it not a number from the first step on?"""
        return self.outcome == "diverged" and self.after <= 1

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Trial":
        """From plain JSON values."""
        return cls(**{name: value[name] for name in cls.__slots__ if name in value})
