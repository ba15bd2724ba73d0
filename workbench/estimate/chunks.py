"""Chunks: FSDP2 cuts each parameter into one part per rank to keep one of them; here only that one is cut."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Chunks:
    """What `torch.chunk` gives, empty tensors behind it up to `count`; each made when it is asked for.

    >>> import torch
    >>> [len(one) for one in (Chunks(torch.zeros(10), 4, 0)[place] for place in range(4))]
    [3, 3, 3, 1]
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        if not 0 <= place < self._count:
            raise IndexError(place)
        size = self._tensor.size(self._dim)
        rows = -(-size // self._count)
        start = place * rows
        if start >= size and place:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(rows, size - start))


@contextlib.contextmanager
def made_when_asked() -> Iterator[None]:
    """Inside, FSDP2 takes no longer to deal a parameter out to 8,192 ranks than to 8; where torch has no such function, as always."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param as home
    except ImportError:
        yield
        return
    name = "_chunk_with_empty"
    usual: Any = getattr(home, name, None)
    if usual is None:
        yield
        return

    def chunks(tensor: Tensor, num_chunks: int, dim: int) -> Chunks:
        return Chunks(tensor, num_chunks, dim)

    setattr(home, name, chunks)
    try:
        yield
    finally:
        setattr(home, name, usual)
