"""Blocks: the pieces that segments are cut into, and the pool of those that are free."""

import bisect


class Block:
    """A piece of a segment. `key` orders free blocks by size, then age of the segment, then place in it; None: in use."""

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
        """The smallest block of at least `size` bytes, taken out; what can grow counts as the largest of all."""
        at = bisect.bisect_left(self._free, ((size, -1, -1),))
        if at == len(self._free):
            return None
        if self._free[at][1] is self.tail and at + 1 < len(self._free):
            at += 1
        return self.take(self._free[at][1])

    def put(self, block: Block) -> None:
        """A block is free."""
        block.key = (block.size, block.segment, block.place)
        bisect.insort(self._free, (block.key, block))

    def take(self, block: Block) -> Block:
        """A free block is in use."""
        assert block.key is not None
        del self._free[bisect.bisect_left(self._free, (block.key,))]
        block.key = None
        return block

    def release(self, block: Block) -> None:
        """A block in use is free, together with its free neighbours."""
        if block.previous and block.previous.key:
            block = self._joined(block.previous, block)
        if block.next and block.next.key:
            block = self._joined(block, block.next)
        self.put(block)

    def split(self, block: Block, size: int) -> None:
        """What a block in use has beyond `size` bytes is free."""
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
        """Two neighbours as one that is not in the pool."""
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
    """(bytes, in use) of each block, per chain of neighbours, by the age of the segment and the place in it.

    Args:
        blocks: all of them, in any order.
    """
    heads = sorted((block.segment, block.place, block) for block in blocks if block.previous is None)
    found = []
    for _, _, head in heads:
        row, at = [], head
        while True:
            row.append((at.size, at.key is None))
            if at.next is None:
                break
            at = at.next
        found.append(row)
    return found
