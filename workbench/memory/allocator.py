"""CachingAllocator: CUDA's caching allocator in arithmetic. From births and deaths of storages to the segments taken from the driver.

Source: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of torch 2.13. Left out: several streams (`record_stream` delays
frees), private pools of CUDA graphs, `garbage_collection_threshold`. Addresses are not modelled between segments: where several free blocks
have the best size, that of the oldest segment is taken, and in it the lowest.
"""

from collections.abc import Iterable
from typing import Self

from workbench import units
from workbench.memory.blocks import Block, Pool, rows
from workbench.memory.log import ALLOC, FREE, RESIZE, Event
from workbench.memory.replay import canonical

MIB = 2**20
MIN_BLOCK = 512
"""Bytes that every request is rounded up to a multiple of (kMinBlockSize)."""
SMALL = MIB
"""Largest request that goes to the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
"""Segment of the small pool (kSmallBuffer); physical pages of an expandable one."""
LARGE_SEGMENT = 20 * MIB
"""Segment for requests below MIN_LARGE (`large_segment_size_mb`, by default); physical pages of an expandable one."""
MIN_LARGE = 10 * MIB
"""Requests from here on get a segment of their own size (kMinLargeAlloc),"""
ROUND_LARGE = 2 * MIB
"""rounded up to a multiple of this (kRoundLarge)."""


class OutOfMemory(Exception):
    """A request that did not fit under the limit, even after free segments were given back."""

    def __init__(self, asked: int, allocator: "CachingAllocator") -> None:
        self.asked = asked
        limit = allocator.limit or 0
        super().__init__(
            f"{units.bytes_(asked)} asked for, {units.bytes_(max(0, limit - allocator.reserved))} left of {units.bytes_(limit)}: "
            f"{units.bytes_(allocator.allocated)} allocated, {units.bytes_(allocator.fragmentation)} reserved but free in pieces. "
            "Ask for less at once, or raise the limit"
        )


class CachingAllocator:
    """One device, one stream.

    Args:
        limit: bytes that the segments may take together; None: no limit.
        large_segment: bytes of a segment for requests between 1 and 10 MiB.
        expandable_segments: one segment per pool that grows by pages (PYTORCH_ALLOC_CONF=expandable_segments:True): 2 MiB for small
            requests, `large_segment` for others ("Note [Expandable Segments]" of the source). At the limit free pages are given back.

    Attributes:
        allocated: bytes in use now, rounded.
        reserved: bytes of all segments now.
        peak_allocated: the most that was in use.
        peak_reserved: the most that was reserved.
        retries: times that the limit was met and the cache given back (`num_alloc_retries`).
        history: `allocated` after each event of `run`; what is not split off a block counts, as it does for torch.
        failed_at: position of the event that ran out of memory; None: none did.
        failure: what it says.

    Raises:
        ValueError: a limit or a segment that is not positive.
    """

    def __init__(self, limit: int | None = None, large_segment: int = LARGE_SEGMENT, *, expandable_segments: bool = False) -> None:
        if limit is not None and limit <= 0:
            raise ValueError(f"limit={limit}: bytes that may be reserved; None for no limit")
        if large_segment < LARGE_SEGMENT or large_segment % SMALL_SEGMENT:
            raise ValueError(f"large_segment={large_segment}: bytes, at least {LARGE_SEGMENT} (20 MiB) and a multiple of 2 MiB")
        self.limit, self.large_segment, self.expandable_segments = limit, large_segment, expandable_segments
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self.failed_at: int | None = None
        self.history: list[int] = []
        self.failure: OutOfMemory | None = None
        self._small, self._large = Pool(expandable_segments), Pool(expandable_segments)
        self._owner: dict[int, tuple[Block, Pool]] = {}
        self._segments = 0

    @property
    def fragmentation(self) -> int:
        """Bytes that are reserved and not in use, now."""
        return self.reserved - self.allocated

    def alloc(self, handle: int, size: int) -> None:
        """Give `size` bytes to a handle; nothing for 0 bytes.

        Raises:
            OutOfMemory: it does not fit under the limit.
        """
        assert handle not in self._owner, f"handle {handle} has memory already"
        if size <= 0:
            return
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        pool = self._small if size <= SMALL else self._large
        block = pool.best(size) or self._grown(size, pool)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool is self._small or self.expandable_segments else rest > SMALL:
            pool.split(block, size)
        self._owner[handle] = block, pool
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, handle: int) -> None:
        """Take back what a handle has, and merge it with free neighbours; nothing for a handle that has none."""
        if handle in self._owner:
            block, pool = self._owner.pop(handle)
            self.allocated -= block.size
            pool.release(block)

    def run(self, events: Iterable[Event]) -> Self:
        """Go through the events of a log, in canonical order; at the first that runs out of memory stop (`failed_at`, `failure`)."""
        for position, (kind, handle, size) in enumerate(canonical(events)):
            if kind in (FREE, RESIZE):
                self.release(handle)
            if kind in (ALLOC, RESIZE):
                try:
                    self.alloc(handle, size)
                except OutOfMemory as error:
                    self.failed_at, self.failure = position, error
                    break
            self.history.append(self.allocated)
        return self

    def segments(self) -> list[list[tuple[int, bool]]]:
        """(bytes, in use) of each block, per segment from the oldest on: what a snapshot would show."""
        return rows([*(block for block, _ in self._owner.values()), *self._small.free, *self._large.free])

    def _grown(self, size: int, pool: Pool) -> Block:
        """A block of at least `size` bytes in memory that is new from the driver; at the limit after giving back what is free."""
        for attempt in range(2):
            more = self._more(size - (pool.tail.size if pool.tail else 0), pool)
            if self.limit is None or self.reserved + more <= self.limit:
                return self._from_driver(more, pool)
            if attempt == 0:
                self.retries += 1
                self._give_back()
        raise OutOfMemory(size, self)

    def _more(self, size: int, pool: Pool) -> int:
        """Bytes to ask the driver for."""
        if pool.growing:
            return -(-size // self._page(pool)) * self._page(pool)
        if pool is self._small:
            return SMALL_SEGMENT
        return self.large_segment if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool is self._small else self.large_segment

    def _from_driver(self, more: int, pool: Pool) -> Block:
        self.reserved += more
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments += 1
        return pool.grow(more, self._segments) if pool.growing else Block(more, self._segments, 0)

    def _give_back(self) -> None:
        """Whole free segments to the driver; of growing ones the free pages."""
        for pool in (self._small, self._large):
            for block in pool.free:
                if pool.growing:
                    self.reserved -= pool.unmap(block, self._page(pool))
                elif block.previous is None and block.next is None:
                    self.reserved -= pool.take(block).size
