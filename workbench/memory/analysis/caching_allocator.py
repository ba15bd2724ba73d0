"""Simulates CUDA's caching allocator: from allocations and frees of storages to the segments taken from the driver.

Source: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of torch 2.13. Left out: several streams (`record_stream` delays
frees), private pools of CUDA graphs, `garbage_collection_threshold`. Addresses are not modelled between segments: where several free blocks
have the best size, that of the oldest segment is taken, and in it the lowest. Segments are cut into Blocks; a Pool has those that are free.
"""

import bisect
from collections.abc import Iterable
from typing import Self

from workbench.core import units
from workbench.memory.analysis.log import ALLOC, FREE, RESIZE, Event
from workbench.memory.analysis.replay import canonical


class Block:
    """A piece of a segment. `key` orders free blocks by size, then age of the segment, then place in it; None = in use."""

    __slots__ = ("key", "next", "place", "previous", "segment", "size")

    def __init__(self, size: int, segment: int, place: int) -> None:
        self.size, self.segment, self.place = size, segment, place
        self.previous: Block | None = None
        self.next: Block | None = None
        self.key: tuple[int, int, int] | None = None

    @property
    def end(self) -> int:
        """Where in the segment it ends."""
        return self.place + self.size


class Pool:
    """Free blocks by size, and the end of the one segment that can grow, if there is one.

    Args:
        growing: there is one segment that grows.
    """

    def __init__(self, growing: bool) -> None:
        self.growing = growing
        self.last: Block | None = None
        self._free: list[tuple[tuple[int, int, int], Block]] = []

    @property
    def free(self) -> list[Block]:
        """Free blocks, the smallest first."""
        return [block for _, block in self._free]

    @property
    def tail(self) -> Block | None:
        """The free block at the end of the growing segment."""
        return self.last if self.last and self.last.key else None

    def best(self, size: int) -> Block | None:
        """Remove and return the smallest block of at least `size` bytes; a block that can grow counts as the largest."""
        at = bisect.bisect_left(self._free, ((size, -1, -1),))
        if at == len(self._free):
            return None
        if self._free[at][1] is self.tail and at + 1 < len(self._free):
            at += 1
        return self.take(self._free[at][1])

    def put(self, block: Block) -> None:
        """Add a block that is free."""
        block.key = (block.size, block.segment, block.place)
        bisect.insort(self._free, (block.key, block))

    def take(self, block: Block) -> Block:
        """Remove a free block, which is now in use."""
        assert block.key is not None
        del self._free[bisect.bisect_left(self._free, (block.key,))]
        block.key = None
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        if block.previous and block.previous.key:
            block = self._joined(block.previous, block)
        if block.next and block.next.key:
            block = self._joined(block, block.next)
        self.put(block)

    def split(self, block: Block, size: int) -> None:
        """Split a block in use: what it has beyond `size` bytes is free."""
        rest = Block(block.size - size, block.segment, block.place + size)
        rest.previous, rest.next = block, block.next
        if block.next:
            block.next.previous = rest
        block.next, block.size = rest, size
        if self.last is block:
            self.last = rest
        self.put(rest)

    def grow(self, more: int, segment: int) -> Block:
        """A block in use at the end of the growing segment, with `more` bytes that are new; the free tail is in it."""
        if tail := self.tail:
            self.take(tail).size += more
            return tail
        block = Block(more, segment, 0)
        if self.last:
            block.segment, block.place = self.last.segment, self.last.end
            block.previous, self.last.next = self.last, block
        self.last = block
        return block

    def unmap(self, block: Block, page: int) -> int:
        """Take the whole pages out of a free block; what is left and right of the hole never meets again.

        Returns:
            Their bytes.
        """
        first, behind = -(-block.place // page) * page, block.end // page * page
        if behind <= first:
            return 0
        self.take(block)
        left = Block(first - block.place, block.segment, block.place) if first > block.place else None
        right = Block(block.end - behind, block.segment, behind) if block.end > behind else None
        if block.previous:
            block.previous.next = left
        if block.next:
            block.next.previous = right
        if left:
            left.previous = block.previous
            self.put(left)
        if right:
            right.next = block.next
            self.put(right)
        if self.last is block:
            self.last = right or left or block.previous
        return behind - first

    def _joined(self, left: Block, right: Block) -> Block:
        """Merge two neighbours into one block that is not in the pool."""
        for block in (left, right):
            if block.key:
                self.take(block)
        left.size += right.size
        left.next = right.next
        if right.next:
            right.next.previous = left
        if self.last is right:
            self.last = left
        return left


def rows(blocks: list[Block]) -> list[list[tuple[int, bool]]]:
    """(bytes, in use) of each block, per chain of neighbours, by the age of the segment and the place in it."""
    heads = sorted((block.segment, block.place, block) for block in blocks if block.previous is None)
    listed = []
    for _, _, head in heads:
        row, at = [], head
        while True:
            row.append((at.size, at.key is None))
            if at.next is None:
                break
            at = at.next
        listed.append(row)
    return listed


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
    """A simulated request that does not fit under the limit, even after free segments were returned to the driver."""

    def __init__(self, asked: int, allocator: "CachingAllocator") -> None:
        self.asked = asked
        limit = allocator.limit or 0
        super().__init__(
            f"{units.bytes_(asked)} asked for, {units.bytes_(max(0, limit - allocator.reserved))} left of {units.bytes_(limit)}: "
            f"{units.bytes_(allocator.allocated)} allocated, {units.bytes_(allocator.fragmentation)} reserved but free in pieces. "
            "Ask for less at once, or raise the limit"
        )


class CachingAllocator:
    """Simulates the allocator of one device with one stream.

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
        """Bytes that are reserved and not in use."""
        return self.reserved - self.allocated

    def alloc(self, handle: int, size: int) -> None:
        """Allocate `size` bytes for a handle; nothing for 0 bytes.

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
        """Free the bytes of a handle, and merge them with free neighbours; nothing for a handle without bytes."""
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
        """Bytes to request from the driver."""
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
        """Return free segments to the driver; of growing ones the free pages."""
        for pool in (self._small, self._large):
            for block in pool.free:
                if pool.growing:
                    self.reserved -= pool.unmap(block, self._page(pool))
                elif block.previous is None and block.next is None:
                    self.reserved -= pool.take(block).size
