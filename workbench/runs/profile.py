"""Says which steps of a run torch's profiler traces, on which ranks, and what it records: the Profile of a spec."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from workbench.core.checks import did_you_mean, is_whole, whole_number

STEPS = 5
"""Steps that are traced by default."""
WARM_UP = 5
"""First steps of a run that are neither traced nor compared with: memory, caches and the optimizer's states are new in them."""
PLAIN = 5
"""The most steps, before and after the traced ones each, with which these are compared."""
ALL: Literal["all"] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The steps of a run that are traced.

    >>> Profile.of(3).first(queue=0)
    9
    """

    steps: int = STEPS
    """How many optimizer steps are traced."""
    ranks: tuple[int, ...] | Literal["all"] = (0,)
    """Which ranks, or "all"."""
    wait: int | None = None
    """Steps before the profiler is started, which takes one more to warm up; None = past the run's own warm-up, and past the batches that
    lie ready in a loader's queue at the start, twice over, since they hide a slow loader."""
    shapes: bool = True
    """Record the shapes of operators' inputs."""
    stacks: bool = False
    """Record Python's frames: expensive."""
    memory: bool = False
    """Record every request for memory."""
    flops: bool = False
    """Let the profiler count FLOPs of operators."""

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, least=1)
        if self.wait is not None:
            whole_number("wait", self.wait, least=0)
        for name in ("shapes", "stacks", "memory", "flops"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: True or False is allowed")
        if self.ranks != ALL:
            object.__setattr__(self, "ranks", _ranks(self.ranks))

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """From what a user gives: None, a number of steps, a mapping of these fields, or a Profile.

        Raises:
            ValueError: it is none of them, or has a value that is not allowed.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(steps=value)
        if not isinstance(value, Mapping):
            raise ValueError(
                'allowed are a number of steps, a mapping such as {"steps": 5, "ranks": "all"}, or None'
                + (f"; try profile={STEPS}" if value is True else "; try profile=None" if value is False else "")
            )
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise ValueError(f"{name!r} is none of {', '.join(known)}; {did_you_mean(str(name), known)}".rstrip("; "))
        return cls(**value)

    def on(self, rank: int) -> bool:
        """Is this rank traced?"""
        return self.ranks == ALL or rank in self.ranks

    def start(self, queue: int) -> int:
        """After how many steps the profiler is started."""
        return WARM_UP + 2 * queue + min(PLAIN, self.steps) if self.wait is None else self.wait

    def first(self, queue: int) -> int:
        """The first traced step, counted from 0."""
        return self.start(queue) + 1

    def last(self, queue: int) -> int:
        """The last traced step."""
        return self.start(queue) + self.steps

    def least(self, queue: int) -> int:
        """Steps that a run needs at least."""
        return self.last(queue) + 1

    def good(self, queue: int) -> int:
        """Steps of a run in which the traced steps can be compared with steps before and after them."""
        return self.least(queue) + 1 + min(PLAIN, self.steps)

    def trouble(self, *, steps: int | None, queue: int, ranks: int) -> str | None:
        """Why a run cannot be traced like this; None if it can."""
        if self.ranks != ALL and max(self.ranks) >= ranks:
            return (
                f"profile of ranks {list(self.ranks)}, but there {'is one rank' if ranks == 1 else f'are {ranks} ranks'}, counted from 0: "
                'try "ranks": "all"'
            )
        if steps is None or steps >= (least := self.least(queue)):
            return None
        spare = steps - self.steps - 1
        wait = f', or profile={{"steps": {self.steps}, "wait": {spare}}}' if self.wait is None and spare >= 0 else ""
        return (
            f"profile of {self.steps} steps with steps={steps}: {self.start(queue)} come before the profiler is started, and it takes one "
            f"to warm up, so that a run needs {least} at least; try steps={self.good(queue)}{wait}"
        )


def _ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value,)
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        raise ValueError(f'ranks={value!r}: "all" is allowed, or a list of ranks such as [0, 1]')
    ranks = tuple(value)
    for rank in ranks:
        if not is_whole(rank, least=0):
            raise ValueError(f"ranks={list(ranks)!r}: {rank!r} is not a rank; they are counted from 0")
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks={list(ranks)!r}: at least one is needed, and each once")
    return tuple(sorted(ranks))
