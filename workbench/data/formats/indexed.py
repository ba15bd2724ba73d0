"""Reads formats whose samples are ranges of bytes in large files: an index says where each begins and ends.

At random, a sample is one `os.pread`; from a server, a batch is one round of requests that wait together. In order, pieces of a megabyte
are read into one buffer, and from a server the next pieces are fetched while the present ones are used.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from workbench.data.sample import CorruptSampleError, Sample
from workbench.data.source import Damage, OnError, Source
from workbench.data.storage import DataMissingError, Range, Storage

PIECE, REMOTE_PIECE = 1 << 20, 8 << 20
"""Bytes that are read at once in order: as much as a core's cache holds, and as much as hides the latency of a server."""
AHEAD = 4
"""Pieces that are fetched from a server at once."""
GAP = 64 << 10
"""Bytes between two ranges of a server below which one request for both is cheaper: 64 KiB take 1 ms at 64 MB/s, a request 10 to 100 ms."""

Array = np.ndarray[Any, Any]


class IndexedSource(Source):
    """A source whose samples are ranges in shards.

    A format sets `shards`, `edges`, `starts` and `ends` and says what a range holds, in `_parse`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        *,
        check: bool = True,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, check=check, on_error=on_error)
        self.storage = Storage(self.path, storage_options)
        self.shards: list[str] = []
        """Names of the files."""
        self.edges: Array = np.zeros(1, np.int64)
        """Number of the first sample of each shard, and of all samples."""
        self.starts: Array = np.zeros(0, np.int64)
        self.ends: Array = np.zeros(0, np.int64)
        """Where each sample begins and ends in its shard."""

    def __len__(self) -> int:
        return len(self.starts)

    def _parse(self, first: int, last: int, data: memoryview, base: int) -> Iterator[Sample | Damage]:
        """The samples from `first` to before `last`, out of the bytes of their shard from byte `base` on; `data` may end too early."""
        raise NotImplementedError

    def shard_of(self, index: int) -> int:
        """The number of the shard that has a sample."""
        return int(self.edges.searchsorted(index, "right")) - 1

    def where(self, index: int) -> str:
        """The shard and the bytes of a sample, for messages."""
        shard = self.shards[self.shard_of(index)]
        return f"bytes {int(self.starts[index]):,} to {int(self.ends[index]):,} of {self.storage.path(shard)}"

    def _read(self, index: int) -> Sample:
        start = int(self.starts[index])
        data = self.storage.read(self.shards[self.shard_of(index)], start, int(self.ends[index]) - start)
        found = next(iter(self._parse(index, index + 1, memoryview(data), start)))
        if isinstance(found, dict):
            return found
        raise found

    def _read_many(self, indices: list[int]) -> Iterator[Sample | Damage]:
        if not self.storage.remote or len(indices) < 2:
            yield from super()._read_many(indices)
            return
        places = np.asarray(indices, np.int64)
        shard_of = self.edges.searchsorted(places, "right") - 1
        ranges: list[Range] = []
        part_of = np.zeros(len(indices), np.int64)
        for position in np.lexsort((self.starts[places], shard_of)).tolist():
            name, start, end = self.shards[shard_of[position]], int(self.starts[places[position]]), int(self.ends[places[position]])
            last = ranges[-1] if ranges else None
            if last and last.name == name and start <= last.offset + last.length + GAP and last.length < REMOTE_PIECE:
                ranges[-1] = Range(name, last.offset, max(last.length, end - last.offset))
            else:
                ranges.append(Range(name, start, end - start))
            part_of[position] = len(ranges) - 1
        found = self._ranges(ranges)
        for index, part in zip(indices, part_of.tolist(), strict=True):
            data = found[part]
            yield (
                data
                if isinstance(data, FileNotFoundError)
                else next(iter(self._parse(index, index + 1, memoryview(data), ranges[part].offset)))
            )

    def _ranges(self, ranges: list[Range]) -> list[bytes | DataMissingError]:
        """The bytes of ranges, or that their file is missing."""
        try:
            return list(self.storage.read_ranges(ranges))
        except DataMissingError:
            found: list[bytes | DataMissingError] = []
            for part in ranges:
                try:
                    found.append(self.storage.read(part.name, part.offset, part.length))
                except DataMissingError as error:
                    found.append(error)
            return found

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, Range]]:
        """(first, last, range): runs of samples that follow each other in a shard, of a megabyte or of one sample."""
        size = REMOTE_PIECE if self.storage.remote else PIECE
        for shard in range(self.shard_of(start), len(self.shards)) if stop > start else ():
            first, end = max(start, int(self.edges[shard])), min(stop, int(self.edges[shard + 1]))
            while first < end:
                base = int(self.starts[first])
                last = max(first + 1, min(end, int(self.ends[:end].searchsorted(base + size, "right"))))
                if last > first + 1 and int(self.starts[first:last].min()) < base:  # an index that is not in the order of the file
                    last = first + 1
                yield first, last, Range(self.shards[shard], base, int(self.ends[first:last].max()) - base)
                first = last

    def _scan(self, start: int, stop: int) -> Iterator[Sample | Damage]:
        pieces = self._pieces(start, stop)
        if self.storage.remote:
            yield from self._scan_ahead(pieces)
            return
        buffer = bytearray(PIECE)
        for first, last, part in pieces:
            try:
                descriptor = self.storage.descriptor(part.name)
            except DataMissingError as error:
                yield from (error for _ in range(first, last))
                continue
            length = max(0, min(part.length, os.fstat(descriptor).st_size - part.offset))  # what is there, whatever an index says
            if length > len(buffer):
                buffer = bytearray(length)
            view = memoryview(buffer)[:length]
            done = 0
            while done < length and (more := os.preadv(descriptor, [view[done:]], part.offset + done)):
                done += more
            yield from self._parse(first, last, view[:done], part.offset)

    def _scan_ahead(self, pieces: Iterator[tuple[int, int, Range]]) -> Iterator[Sample | Damage]:
        """Those of a server: while samples are used, a thread fetches the next pieces."""

        def some() -> list[tuple[int, int, Range]]:
            return [piece for piece, _ in zip(pieces, range(AHEAD), strict=False)]

        with ThreadPoolExecutor(1, "wb-read-ahead") as thread:
            wanted = some()
            coming = thread.submit(self._ranges, [part for _, _, part in wanted])
            while wanted:
                present, found = wanted, coming.result()
                if wanted := some():
                    coming = thread.submit(self._ranges, [part for _, _, part in wanted])
                for (first, last, part), data in zip(present, found, strict=True):
                    if isinstance(data, FileNotFoundError):
                        yield from (data for _ in range(first, last))
                    else:
                        yield from self._parse(first, last, memoryview(data), part.offset)

    def stored_bytes(self) -> int:
        """Bytes of all shards that are there."""
        total = 0
        for name in self.shards:
            try:
                total += self.storage.size(name)
            except DataMissingError:
                continue
        return total

    def close(self) -> None:
        """Close what this process has opened."""
        self.storage.close()


def truncated(source: IndexedSource, index: int, found: int) -> CorruptSampleError:
    """The error for a shard that ends inside a sample."""
    return CorruptSampleError(f"sample {index}: {source.where(index)} end after {found:,} bytes: the file is truncated; restore it")
