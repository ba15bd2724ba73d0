"""An emulated object store: files of this disk behind a network that answers late. It counts requests and bytes.

Requests that are made together wait together, up to `TOGETHER` of them. Nothing but the waiting is emulated.
"""

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

import workbench as wb

TOGETHER = 16
"""Requests that a client has under way at once."""


class Store(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system for fsspec, as "store://FOLDER".

    Args:
        latency: seconds that a request waits for its answer; 0 = count only.
    """

    protocol = "store"

    def __init__(self, latency: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.latency = latency
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests = self.rounds = self.bytes = 0

    def _wait(self, requests: int) -> None:
        rounds = math.ceil(requests / TOGETHER)
        self.requests, self.rounds = self.requests + requests, self.rounds + rounds
        time.sleep(self.latency * rounds)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a folder; listing is free here."""
        found = [self.info(f"{path}/{each.name}") for each in sorted(Path(self._strip_protocol(path)).iterdir())]
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """What fsspec wants to know of a path."""
        local = Path(self._strip_protocol(path))
        kind = "directory" if local.is_dir() else "file"
        return {"name": str(local), "size": local.stat().st_size, "type": kind}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes of a file: one request."""
        self._wait(1)
        return self._bytes(path, start, end)

    def cat_ranges(self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], **_: Any) -> list[bytes]:  # type: ignore[override]
        """Ranges of files: a request for each, which wait together."""
        self._wait(len(paths))
        return [self._bytes(*each) for each in zip(paths, starts, ends, strict=True)]

    def _bytes(self, path: str, start: int | None, end: int | None) -> bytes:
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            data = file.read(-1 if end is None else end - (start or 0))
        self.bytes += len(data)
        return data


fsspec.register_implementation("store", Store, clobber=True)


def store(latency: float = 0.0) -> Store:
    """The store with that latency, as the sources use it that are opened with `storage_options={"latency": latency}`."""
    found: Store = fsspec.filesystem("store", latency=latency)
    found.forget()
    return found


class Epoch(NamedTuple):
    """What reading all samples of a dataset once asked of the store."""

    requests: int
    rounds: int
    """Waits for an answer; requests made together wait once."""
    bytes: int
    seconds: float


def epoch(path: str | Path, latency: float = 0.0, *, shuffled: bool = False, batch: int = 32) -> Epoch:
    """Read a dataset from the store, in the order of storage, or in batches of samples that are drawn at random."""
    counted = store(latency)
    source = wb.data.open_source(f"store://{Path(path).resolve()}", storage_options={"latency": latency})
    order = list(range(len(source)))
    random.Random(0).shuffle(order)
    counted.forget()  # opening has read the manifest and the index
    begun = time.perf_counter()
    if shuffled:
        for first in range(0, len(order), batch):
            source[order[first : first + batch]]
    else:
        assert sum(1 for _ in source) == len(order)
    return Epoch(counted.requests, counted.rounds, counted.bytes, time.perf_counter() - begun)
