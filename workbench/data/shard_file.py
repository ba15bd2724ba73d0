"""Writes the file of a shard: a thread hashes and writes while the next samples are made; what was written is on the disk at the end."""

import hashlib
import itertools
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from workbench.data.manifest import Rows
from workbench.data.sample import Sample, encoded_columns

PIECE = 256 << 10
"""Bytes that the thread joins, hashes and writes at once, about: what it has joined is still in its core's cache when it is hashed."""
FEWEST, MOST, MOST_BYTES = 16, 256, 16 << 20
"""Samples that are taken at once: at least, at most, and so many that they have about so many bytes."""
SMALL = 8 << 10
"""Bytes of a part, in the mean, below which joining them is cheaper than hashing and writing each."""
QUEUE = 2
"""Batches of samples that wait for the thread at most."""


@dataclass(slots=True, kw_only=True)
class Written:
    """A shard that was written."""

    bytes: int
    sha256: str
    rows: Rows


class HashedFile:
    """A new file that is written in order; `finish` gives the SHA-256 of what was written, once it is on the disk.

    SHA-256 and the write leave Python's lock, so that the thread works beside the caller.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._parts: list[bytes] = []
        self._size = self._handed_over = 0
        self._hash = hashlib.sha256()
        self._queue: queue.Queue[tuple[list[bytes], int] | None] = queue.Queue(QUEUE)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="wb-write-shard", daemon=True)
        self._thread.start()

    def write(self, parts: Sequence[bytes], size: int) -> None:
        """Append some parts, with which the file has so many bytes; raises the OSError of an earlier piece that could not be written."""
        self._parts += parts
        self._size = size
        if size - self._handed_over >= PIECE:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give all that waits to the thread."""
        parts, self._parts = self._parts, []
        size, self._handed_over = self._size - self._handed_over, self._size
        if self._error is not None:
            raise self._error
        self._queue.put((parts, size))

    def _work(self) -> None:
        while (given := self._queue.get()) is not None:
            parts, size = given
            many = max(1, len(parts) * PIECE // max(size, 1))
            try:
                for first in range(0, len(parts) if self._error is None else 0, many):
                    self._write(parts[first : first + many], size < SMALL * len(parts))
            except BaseException as error:
                self._error = error

    def _write(self, parts: list[bytes], small: bool) -> None:
        if small:
            parts = [b"".join(parts)]
        size = sum(map(len, parts))
        for part in parts:
            self._hash.update(part)
        done = os.writev(self._descriptor, parts) if parts else 0
        rest = memoryview(b"".join(parts) if done < size else b"")[done:]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def finish(self) -> str:
        """Wait until all is on the disk; the SHA-256 of the file, in hexadecimal digits.

        Raises:
            OSError: it could not be written.
        """
        self._hand_over()
        self._end()
        if self._error is not None:
            raise self._error
        os.fsync(self._descriptor)
        return self._hash.hexdigest()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        os.close(self._descriptor)


def hash_file(path: str | Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file that a library has written, once it is on the disk; of a folder, over its files."""
    if os.path.isdir(path):
        total, size = hashlib.sha256(), 0
        for found in sorted(Path(path).rglob("*")):
            if found.is_file():
                length, inner = hash_file(found)
                total.update(f"{found.relative_to(path).as_posix()}\0{inner}\n".encode())
                size += length
        return size, total.hexdigest()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


class Pairs:
    """(key, sample) pairs that come many at once, as keys and samples."""

    def __init__(self, blocks: Iterable[tuple[Sequence[str], Sequence[Sample]]]) -> None:
        self.blocks = blocks

    def __iter__(self) -> Iterator[tuple[str, Sample]]:
        return itertools.chain.from_iterable(zip(*block, strict=True) for block in self.blocks)


def how_many(samples: Sequence[Sample]) -> int:
    """How many samples like these are taken at once."""
    size = max(sum(len(v) if type(v) in (bytes, str) else getattr(v, "nbytes", 64) for v in one.values()) for one in samples[::FEWEST])
    return min(MOST, max(FEWEST, MOST_BYTES // max(1, size)))


def several(samples: Iterable[tuple[str, Sample]]) -> Iterator[tuple[Sequence[str], Sequence[Sample]]]:
    """The keys and samples of (key, sample) pairs, many at once where they are small."""
    if isinstance(samples, Pairs):
        yield from samples.blocks
        return
    pairs, many = iter(samples), FEWEST
    while some := list(itertools.islice(pairs, many)):
        keys, found = zip(*some, strict=True)
        yield keys, found
        many = how_many(found)


def noted(samples: Iterable[tuple[str, Sample]], rows: Rows) -> Iterator[tuple[str, Sample]]:
    """Samples passed on, with a row for each in an index without offsets."""
    for keys, some in several(samples):
        rows.add_columns(keys, *encoded_columns(some, rows.fields))
        yield from zip(keys, some, strict=True)


def written(path: str, rows: Rows) -> Written:
    """What a library has written, hashed."""
    size, sha256 = hash_file(path)
    return Written(bytes=size, sha256=sha256, rows=rows)
