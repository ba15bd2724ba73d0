"""What formats have in common whose files a library reads: shards, keys, handles that each process opens for itself, and checksums."""

import contextlib
import os
import struct
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from workbench.data.manifest import Index, check_sample, load_index
from workbench.data.sample import CorruptSampleError, Sample, UnsafeNameError
from workbench.data.source import Damage, OnError, Source, corrupt
from workbench.data.storage import DataMissingError, Storage, need

RUN = 256
"""Samples that are read at once in order."""


class LibrarySource(Source):
    """A source whose shards a library reads. A format says how to open a shard, how many samples it has, and reads some of them."""

    package: ClassVar[str] = ""
    """That has to be installed."""
    endings: ClassVar[tuple[str, ...]] = ()
    local_only: ClassVar[bool] = False
    damage: ClassVar[tuple[type[Exception], ...]] = (
        *(OSError, ValueError, LookupError, RuntimeError, OverflowError),
        *(SyntaxError, tokenize.TokenError, struct.error),
    )
    """What the library raises for damaged files."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        check: bool = True,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if self.package:
            need(self.package, f"the format {self.format}")
        super().__init__(path, check=check, on_error=on_error)
        self.storage = Storage(self.path, storage_options)
        if self.storage.remote and self.local_only:
            raise ValueError(
                f"{self.path}: {self.format} is read through memory maps, which need a local disk; copy it, or convert it: "
                'wb.data.convert(local, out, format="tar")'
            )
        names: list[str] | None = None
        if self.path.rstrip("/").endswith(self.endings):
            folder, _, last = self.storage.root.rpartition("/")
            self.storage, names = Storage(folder or ".", storage_options), [last]
        self._handles: dict[tuple[int, int], Any] = {}
        self._index: Index | None = load_index(self.storage, self.format, names)
        if self._index is not None:
            self.shards, self.edges, self._schema = self._index.shards, self._index.edges, dict(self._index.schema)
            return
        self.shards = names or self._names()
        if not self.shards:
            raise DataMissingError(f"there is no file {' or '.join(f'*{end}' for end in self.endings)} in {self.path}")
        self.edges = np.cumsum([0, *(self._try(shard, self._count) for shard in range(len(self.shards)))], dtype=np.int64)

    def _names(self) -> list[str]:
        return [name for name, _, _ in self.storage.files() if name.endswith(self.endings) and not name.startswith(".")]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}

    # --- what a format gives

    def _open(self, name: str) -> Any:
        """A handle of a shard, for this process."""
        raise NotImplementedError

    def _count(self, handle: Any) -> int:
        """The samples of a shard."""
        raise NotImplementedError

    def _get(self, handle: Any, rows: Sequence[int], base: int) -> list[Sample]:
        """Some samples of a shard, whose first sample has the number `base`."""
        raise NotImplementedError

    def _shut(self, handle: Any) -> None:
        """Close a handle."""

    # --- the source

    def __len__(self) -> int:
        return int(self.edges[-1])

    def keys(self) -> Sequence[str]:
        """The names of all samples: those of the manifest, else their numbers."""
        return self._index.keys if self._index is not None else super().keys()

    def handle(self, shard: int) -> Any:
        """The handle of a shard that belongs to this process."""
        slot = (os.getpid(), shard)
        if slot not in self._handles:
            if not self.storage.exists(self.shards[shard]):
                raise DataMissingError(f"{self.storage.path(self.shards[shard])} is missing: restore it, or make the dataset again")
            self._handles[slot] = self._open(self.shards[shard])
        return self._handles[slot]

    def _try(self, shard: int, call: Any, *arguments: Any) -> Any:
        """Something that is done with a handle; what the library raises becomes damage of the shard."""
        try:
            return call(self.handle(shard), *arguments)
        except (CorruptSampleError, DataMissingError, UnsafeNameError):
            raise
        except self.damage as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = self.storage.path(self.shards[shard])
            raise CorruptSampleError(f"{where} is damaged or truncated: {said:.200}; restore it") from error

    def _read(self, index: int) -> Sample:
        shard = int(self.edges.searchsorted(index, "right")) - 1
        base = int(self.edges[shard])
        samples: list[Sample] = self._try(shard, self._get, [index - base], base)
        found = self._checked(index, samples[0])
        if isinstance(found, dict):
            return found
        raise found

    def _read_many(self, indices: list[int]) -> Iterator[Sample | Damage]:
        shard_of = (self.edges.searchsorted(indices, "right") - 1).tolist()
        found: dict[int, Sample | Damage] = {}
        for shard in dict.fromkeys(shard_of):
            base = int(self.edges[shard])
            places = [place for place, other in enumerate(shard_of) if other == shard]
            rows = [indices[place] - base for place in places]
            try:
                got: list[Sample | Damage] = list(self._try(shard, self._get, rows, base))
            except (CorruptSampleError, DataMissingError) as error:
                got = [error] if len(rows) == 1 else [self._alone(shard, row, base) for row in rows]
            found.update(zip(places, got, strict=True))
        yield from (self._checked(indices[place], found[place]) for place in range(len(indices)))

    def _alone(self, shard: int, row: int, base: int) -> Sample | Damage:
        try:
            samples: list[Sample] = self._try(shard, self._get, [row], base)
            return samples[0]
        except (CorruptSampleError, DataMissingError) as error:
            return error

    def _scan(self, start: int, stop: int) -> Iterator[Sample | Damage]:
        for first in range(start, stop, RUN):
            yield from self._read_many(list(range(first, min(stop, first + RUN))))

    def _checked(self, index: int, found: Sample | Damage) -> Sample | Damage:
        """A sample as it is, or as damage where it is not what the manifest's index says."""
        if not isinstance(found, dict) or self._index is None or self._index.crcs is None or not self.check:
            return found
        crcs, lengths = self._index.crcs[index].tolist(), self._index.lengths[index].tolist()
        wrong = check_sample(found, crcs, lengths, self._index.schema, f"sample {index} of {self.path}")
        return corrupt(wrong, found) if wrong else found

    def stored_bytes(self) -> int:
        """Bytes of all shards that are there."""
        return sum(self.storage.size(name) for name in self.shards if self.storage.exists(name))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Close what this process has opened."""
        for (pid, _), handle in self._handles.items():
            if pid == os.getpid():
                self._shut(handle)
        self._handles = {}
        self.storage.close()
