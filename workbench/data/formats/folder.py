"""A folder of files: those that differ only in their extension are fields of one sample, and a folder per class gives the label."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from workbench.data.manifest import Index, Rows, load_index, read_manifest
from workbench.data.sample import KEY, PICTURES, CorruptSampleError, NameCollisionError, Sample, Strings, UnsafeNameError, decode, encode
from workbench.data.sample import kind_of_field as by_extension
from workbench.data.shard_file import Written, noted, written
from workbench.data.source import Damage, OnError, Source, corrupt
from workbench.data.storage import DataMissingError, Range, Storage

LABEL = "cls"


class FolderSource(Source):
    """Samples in a folder of files.

    `cats/1.jpg` and `cats/1.txt` are one sample, "cats/1", with the fields "jpg" and "txt". Where all files lie in folders and none
    is a label (`1.cls`), the number of the folder is the label "cls"; `classes` has their names. Files whose names begin with a dot are
    left out.

    Args:
        path: path or URL of the folder.
        check: compare with the checksums of a manifest, where there is one.
        on_error: see `Source`.
        follow_links: read symbolic links to files inside the folder as further files. They are left out otherwise, since they are
            often a second copy: `links_left_out` counts them.
        storage_options: for fsspec.

    Raises:
        NameCollisionError: two pictures would be the same sample, such as `1.jpg` and `1.png`.
        UnsafeNameError: with `follow_links`, a link leads out of the folder.
    """

    format = "folder"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        check: bool = True,
        on_error: OnError = "raise",
        follow_links: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, check=check, on_error=on_error)
        self.storage = Storage(self.path, storage_options)
        self._index: Index | None = load_index(self.storage, "folder")
        self.links_left_out = 0
        self.classes: tuple[str, ...] = ()
        rows = self._rows(follow_links)
        self.fields = tuple(dict.fromkeys(field for row in rows.values() for field in row))
        self._files = Strings(row[field][0] for row in rows.values() for field in self.fields if field in row)
        """Names of the files, sample by sample."""
        there = np.array([[field in row for field in self.fields] for row in rows.values()], bool).reshape(len(rows), len(self.fields))
        self._place = np.where(there, np.cumsum(there).reshape(there.shape) - 1, -1)
        """(samples, fields): number of the file; -1 = there is none."""
        self._sizes = np.array([row[field][1] for row in rows.values() for field in self.fields if field in row], np.int64)
        self._keys = Strings(rows)
        kinds = dict(self._index.schema) if self._index else {}
        self._schema = {field: kinds.get(field) or by_extension(field) for field in self.fields}
        self._labels: np.ndarray[Any, Any] | None = None
        if LABEL not in self.fields and rows and all("/" in key for key in rows) and self._index is None:
            self.classes = tuple(sorted({key.split("/", 1)[0] for key in rows}))
            numbers = {name: number for number, name in enumerate(self.classes)}
            self._labels = np.array([numbers[key.split("/", 1)[0]] for key in rows], np.int64)
            self._schema[LABEL] = "int"
        if not rows:
            left_out = f", and {self.links_left_out} symbolic links, which follow_links=True would read" if self.links_left_out else ""
            raise DataMissingError(f"there is no file with an extension in {self.path}{left_out}")

    def _rows(self, follow_links: bool) -> dict[str, dict[str, tuple[str, int]]]:
        """Key → field → (file, bytes)."""
        rows: dict[str, dict[str, tuple[str, int]]] = {}
        manifest = read_manifest(self.storage) if self._index is not None else None
        inside = {shard.name for shard in manifest.shards} if manifest else set()
        for name, size, link in self.storage.files():
            folder, slash, last = name.rpartition("/")
            stem, dot, field = (last.partition if manifest else last.rpartition)(".")
            if not dot or not stem or any(part.startswith(".") for part in name.split("/")):
                continue
            if manifest and name.split("/", 1)[0] not in inside:
                continue
            if link and not follow_links:
                self.links_left_out += 1
                continue
            if link:
                if not self.storage.link_inside(name):
                    raise UnsafeNameError(f"{self.storage.path(name)} is a symbolic link that leads out of the folder: it is not followed")
                size = self.storage.size(name)
            key, field = folder + slash + stem, field if manifest else field.lower()
            row = rows.setdefault(key.split("/", 1)[1] if manifest else key, {})
            other = next((there for there in row if field == there or (not manifest and field in PICTURES and there in PICTURES)), None)
            if other is not None:
                raise NameCollisionError(
                    f"{self.storage.path(row[other][0])} and {last} would be two fields of the sample {key!r}: a sample has one picture. "
                    "Rename one of them"
                )
            row[field] = (name, size)
        if self._index is not None:  # in the order in which they were written
            return {key: rows.get(key, {}) for key in self._index.keys}
        return rows

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self) -> Strings:
        """The names of all samples."""
        return self._keys

    def stored_bytes(self) -> int:
        """Bytes of all files; a file system needs more: whole blocks, usually of 4 KiB."""
        return int(self._sizes.sum())

    def _read(self, index: int) -> Sample:
        found = next(iter(self._read_many([index])))
        if isinstance(found, dict):
            return found
        raise found

    def _read_many(self, indices: list[int]) -> Iterator[Sample | Damage]:
        places = [[place for place in row if place >= 0] for row in self._place[indices].tolist()]
        if self.storage.remote:
            ranges = [Range(self._files[place], 0, int(self._sizes[place])) for row in places for place in row]
            try:
                found = iter(self.storage.read_ranges(ranges))
            except DataMissingError:
                found = iter(())
                ranges = []
            read = (lambda _: next(found)) if ranges else self._file
        else:
            read = self._file
        for index, row in zip(indices, places, strict=True):
            try:
                yield self._sample(index, [read(place) for place in row])
            except (CorruptSampleError, DataMissingError) as error:
                yield error

    def _file(self, place: int) -> bytes:
        """The bytes of a file, which is opened for this read."""
        name = self._files[place]
        if self.storage.remote:
            return self.storage.read(name)
        try:
            descriptor = os.open(self.storage.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataMissingError(f"{self.storage.path(name)} is missing: it was there when the folder was opened") from None
        try:
            size = int(self._sizes[place])
            data = os.read(descriptor, size + 1)
            while len(data) < size and (more := os.read(descriptor, size - len(data))):
                data += more
        finally:
            os.close(descriptor)
        return data

    def _sample(self, index: int, found: list[bytes]) -> Sample:
        sample: Sample = {KEY: self._keys[index]}
        parts = iter(found)
        damage = ""
        crcs = self._index.crcs[index].tolist() if self._index is not None and self._index.crcs is not None and self.check else None
        schema = list(self._index.schema) if self._index is not None else []
        for field, place in zip(self.fields, self._place[index].tolist(), strict=True):
            if place < 0:
                continue
            data = next(parts)
            sample[field] = data
            if (crcs is not None and crc32(data) != crcs[schema.index(field)]) or (len(data) != int(self._sizes[place]) and crcs is None):
                damage = field
            elif (kind := self.schema[field]) != "bytes":
                try:
                    sample[field] = decode(kind, data)
                except CorruptSampleError:
                    damage = field
        if self._index is not None:
            lengths = self._index.lengths[index].tolist()
            if gone := [field for field, length in zip(schema, lengths, strict=True) if length >= 0 and field not in sample]:
                raise DataMissingError(f"sample {index}: the file {sample[KEY]}.{gone[0]} below {self.path} is missing; restore it")
        if damage:
            raise corrupt(
                f"sample {index} ({sample[KEY]:.90}), field {damage!r}: the file below {self.path} is not as it was; restore it", sample
            )
        if self._labels is not None:
            sample[LABEL] = int(self._labels[index])
        return sample

    def close(self) -> None:
        """Close what this process has opened."""
        self.storage.close()


def write(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """Write a folder of files, one for each field of each sample."""
    rows = Rows(schema)
    root = Path(path)
    root.mkdir()
    folders: set[Path] = set()
    for key, sample in noted(samples, rows):
        for field in schema:
            if (value := sample.get(field)) is not None:
                file = root / f"{key}.{field}"
                if file.parent not in folders:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    folders.add(file.parent)
                with open(file, "xb") as opened:
                    opened.write(encode(value))
    return written(path, rows)
