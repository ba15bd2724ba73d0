"""Joins the ranks of an experiment, so that all of them decide by the same numbers and in step."""

import atexit
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")


EXIT_DELAY = 0.1
"""Seconds from the end of the program to the shutdown of Python."""


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Let gloo's threads finish before Python ends.

    A thread that frees the last tensor of a reduction while Python shuts down aborts the process, which had gone well ("terminate called
    without an active exception"). Measurements, which reduce more, meet this race more often.
    """
    atexit.register(time.sleep, EXIT_DELAY)


@dataclass(slots=True, kw_only=True)
class Peers:
    """This process among those that compute together.

    They communicate over a gloo group of their own, which does not disturb the training's collectives and works on the host.
    """

    rank: int = 0
    """Its number, from 0."""
    world_size: int = 1
    """How many there are."""
    group: Any = None
    """Their own process group; None = alone."""
    owned: bool = False
    """Was the group made here?"""

    @classmethod
    def join(cls) -> Self:
        """All processes of the default process group; alone where there is none. Collective: all of them call it."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        wait_for_gloo_at_exit()
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), group=dist.new_group(backend="gloo"), owned=True)

    def barrier(self) -> None:
        if self.group is not None:
            self.group.barrier().wait()  # not dist.barrier: a variant may have replaced that

    def gather(self, value: T) -> list[T]:
        """The values of all, in the order of their ranks; every process gets the same list."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.group)
        return values

    def agree(self, value: T, how: Callable[[list[T]], T] = max) -> T:  # type: ignore[assignment]
        """One value for all: the largest, or what `how` makes of them."""
        return how(self.gather(value))

    def close(self) -> None:
        """Destroy the group, if it was made here."""
        if self.group is not None and self.owned:
            import torch.distributed as dist

            dist.destroy_process_group(self.group)
        self.group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
