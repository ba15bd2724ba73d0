"""Fake process group: this process acts as one of many ranks that do not exist; DDP, ZeroRedundancyOptimizer and FSDP2 work in it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from workbench.memory.estimate.fake_tensors import real_tensors
from workbench.train.sharding import without_first_broadcast

MOST_RANKS = 8192
"""Most ranks with which the fake process group was tested."""


class ProcessGroupError(ValueError):
    """A process group that cannot be made; the message says why and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRank:
    """A rank of the fake process group."""

    rank: int
    """Its number."""
    world_size: int
    """Ranks."""
    device: torch.device
    """Device on which it makes tensors."""
    store: Any
    """A `torch.distributed` store of its own, in which no other rank answers."""


@contextlib.contextmanager
def fake_process_group(
    world_size: int, rank: int = 0, *, bucket_seen: Callable[[Tensor], None] = lambda bucket: None
) -> Iterator[FakeRank]:
    """Inside, this process is rank `rank` of `world_size`: collectives return at once, and DDP, ZeroRedundancyOptimizer and FSDP2 work.

    Args:
        world_size: ranks, 1 to 8192.
        rank: rank of this process, from 0.
        bucket_seen: called with each bucket of gradients that DDP reduces.

    Yields:
        The place of this rank.

    Raises:
        ProcessGroupError: the process has a process group already, or the numbers do not fit.
    """
    if dist.is_initialized():
        raise ProcessGroupError(
            "this process has a process group (torch.distributed is initialised), and an estimate needs one of its own: call it before "
            "init_process_group, after destroy_process_group, or in a process of its own"
        )
    if not 1 <= world_size <= MOST_RANKS:
        raise ProcessGroupError(f"world_size={world_size}: 1 to {MOST_RANKS} ranks are allowed")
    if not 0 <= rank < world_size:
        raise ProcessGroupError(f"rank={rank}: 0 to {world_size - 1} is allowed with world_size={world_size}")
    with process_group(world_size, rank), fake_data_parallel(bucket_seen), real_device_meshes(), lazy_chunks(), sent_tensors_are_kept():
        yield FakeRank(rank=rank, world_size=world_size, device=torch.device("cpu"), store=HashStore())


@contextlib.contextmanager
def process_group(world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is one rank of many, whose collectives return at once; values are not exchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts one in its place that writes the rank before each line, and leaves it there
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        _forget_groups()


def _forget_groups() -> None:
    """Clear what DTensor keeps of its operators: with them their process groups, which the next layout of the same shape would use."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    with contextlib.suppress(AttributeError):  # underscored: another torch may keep nothing, or elsewhere
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


class _NeverRebuilds:
    """DDP's reducer, but it keeps its buckets as they are: to put them into another order it would exchange indices as real tensors."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: False) if name == "_rebuild_buckets" else getattr(self._reducer, name)


_COMPRESSED = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}
"""Communication hook of torch → the type in which it sends gradients."""


class _Compression:
    """What a communication hook of torch allocates beside a bucket."""

    def __init__(self) -> None:
        self._types: list[torch.dtype] = []
        self._rank = 0
        self._kept: dict[int, list[Tensor]] = {}

    def learn(self, state: Any, hook: Callable[..., Any]) -> None:
        """Take a hook, as `register_comm_hook` does."""
        if hook.__name__ == "powerSGD_hook":
            self._rank = state.matrix_approximation_rank
        elif hook.__name__ != "post_localSGD_hook":  # which sends the bucket as it is
            self._types.append(_COMPRESSED[hook.__name__])

    def allocate(self, bucket: Any) -> None:
        """Allocate for a bucket; PowerSGD as it does from its start on, and keeps what it left out."""
        buffer = bucket.buffer()
        for kind in self._types:
            buffer.to(kind)  # there until it is reduced
        if not self._rank:
            return
        thin = 0
        for gradient in bucket.gradients():
            rows = len(gradient) if gradient.dim() > 1 else 1
            sides = self._rank * (rows + gradient.numel() // rows)
            thin += sides if rows > 1 and 2 * sides < gradient.numel() else 0
        kept = self._kept.setdefault(bucket.index(), [torch.zeros_like(buffer), buffer.new_empty(thin)])
        before = buffer.clone()
        kept[0] = before - buffer


@contextlib.contextmanager
def fake_data_parallel(bucket_seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, DistributedDataParallel can be built on fake tensors; its reducer is the real one, and so are its buckets.

    Left out are the first broadcast of the weights, the reduction itself (a hook answers at once) and the one reordering of the buckets.
    """
    build = DistributedDataParallel.__init__

    def reduced(compression: _Compression, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        bucket_seen(bucket.buffer())
        compression.allocate(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    @wraps(build)
    def build_fake(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        with without_first_broadcast() as without:
            build(self, *args, **options | without)
        compression = _Compression()
        self.register_comm_hook(compression, reduced)
        self.register_comm_hook = compression.learn  # type: ignore[method-assign]
        self.reducer = _NeverRebuilds(self.reducer)  # type: ignore[assignment]

    DistributedDataParallel.__init__ = build_fake  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = build  # type: ignore[method-assign]


class _Sent:
    """A message under way: as with gloo and NCCL, its tensor lives as long as this object."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def sent_tensors_are_kept() -> Iterator[None]:
    """Inside, messages keep what they send: torch's pipelines with several stages on a rank hold all of them until the end of a step."""
    places: tuple[Any, ...] = (dist, dist.distributed_c10d)
    usual = dist.isend

    @wraps(usual)
    def isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        work = usual(tensor, *args, **options)
        return work and _Sent(work, tensor)

    for place in places:
        place.isend = isend
    try:
        yield
    finally:
        for place in places:
            place.isend = usual


@contextlib.contextmanager
def real_device_meshes() -> Iterator[None]:
    """Inside, device meshes are built and sliced with real tensors: their ranks are read as numbers."""
    from torch.distributed.device_mesh import DeviceMesh

    before = {
        name: getattr(DeviceMesh, name) for name in ("__init__", "__getitem__", "_flatten", "_unflatten") if hasattr(DeviceMesh, name)
    }

    def apart(method: Any) -> Any:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with real_tensors():
                return method(*args, **kwargs)

        return call

    for name, method in before.items():
        setattr(DeviceMesh, name, apart(method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(DeviceMesh, name, method)


class LazyChunks:
    """What `torch.chunk` gives, empty tensors behind it up to `count`; each made when it is used.

    >>> import torch
    >>> [len(chunk) for chunk in (LazyChunks(torch.zeros(10), 4, 0)[place] for place in range(4))]
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
def lazy_chunks() -> Iterator[None]:
    """Inside, FSDP2 shards a parameter over 8,192 ranks as fast as over 8; does nothing in a torch without that function."""
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

    def chunks(tensor: Tensor, num_chunks: int, dim: int) -> LazyChunks:
        return LazyChunks(tensor, num_chunks, dim)

    setattr(home, name, chunks)
    try:
        yield
    finally:
        setattr(home, name, usual)
