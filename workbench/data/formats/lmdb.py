"""LMDB: a B+ tree in a memory-mapped file, one per shard; the fastest to write and read at random on a local disk.

A file of ours has the number of a sample (8 digits) as key; the value begins with the lengths of the sample's key and fields, each as
four bytes. Of others' files the value is the field "value".
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.data.formats.library import LibrarySource
from workbench.data.manifest import Rows
from workbench.data.sample import KEY, CorruptSampleError, Sample, decode, encoded_columns, stored_schema
from workbench.data.shard_file import Written, several, written
from workbench.data.storage import need

META = b"__meta__"
MAP = 1 << 40
"""Address space that a file may grow to while it is written; only pages that are written take memory or disk."""
COMMIT = 1000
"""Samples per transaction."""
_NONE = 0xFFFFFFFF


class LmdbSource(LibrarySource):
    """Samples in LMDB files (`*.mdb`), or in a folder that is one (`data.mdb`)."""

    format = "lmdb"
    package = "lmdb"
    endings = (".mdb",)
    local_only = True

    def _names(self) -> list[str]:
        return [name for name in super()._names() if name.rpartition("/")[2] != "lock.mdb"]

    def _open(self, name: str) -> Any:
        environment = _environment(os.path.realpath(self.storage.path(name)))
        last = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if (size := self.storage.size(name)) < last:  # reading pages beyond the end would kill the process
            raise CorruptSampleError(f"{self.storage.path(name)} has {size:,} bytes of {last:,}: it is truncated; restore it")
        with environment.begin(buffers=False) as transaction:
            meta = transaction.get(META)
            about = json.loads(meta) if meta is not None else {}
            fields = stored_schema(about.get("schema") if isinstance(about, dict) else about) if meta is not None else None
            keys = None if fields is not None else list(transaction.cursor().iternext(values=False))
        return environment, fields, keys

    def _count(self, handle: Any) -> int:
        environment, fields, keys = handle
        return len(keys) if fields is None else int(environment.stat()["entries"]) - 1

    def _get(self, handle: Any, rows: Sequence[int], base: int) -> list[Sample]:
        environment, fields, keys = handle
        with environment.begin(buffers=True) as transaction:
            if fields is None:
                return [{KEY: keys[row].decode("utf-8", "replace"), "value": bytes(transaction.get(keys[row]))} for row in rows]
            return [self._unpack(transaction.get(b"%08d" % row), fields, base + row) for row in rows]

    def _unpack(self, value: Any, fields: Mapping[str, str], index: int) -> Sample:
        if value is None:
            raise CorruptSampleError(f"sample {index} is not in its LMDB file, which is damaged; restore it")
        lengths = struct.unpack_from(f"<{1 + len(fields)}I", value)
        at = 4 * len(lengths)
        sample: Sample = {KEY: bytes(value[at : at + lengths[0]]).decode()}
        at += lengths[0]
        for (field, kind), length in zip(fields.items(), lengths[1:], strict=True):
            if length != _NONE:
                data = bytes(value[at : at + length])
                sample[field] = data if kind == "bytes" else decode(kind, data)
                at += length
        return sample

    def _shut(self, handle: Any) -> None:
        _let_go(handle[0])


_environments: dict[tuple[int, str], list[Any]] = {}
"""(process, file) → the environment and its number of users: a process may open a file only once."""


def _environment(path: str) -> Any:
    import lmdb

    slot = (os.getpid(), path)
    if slot not in _environments:
        for other in [other for other in _environments if other[1] == path]:  # a copy of the parent's, in a forked worker
            _environments.pop(other)[0].close()
        try:  # no lock file: nobody writes, and a folder that is read only could not hold one
            opened = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=2)
        except lmdb.Error as error:
            raise CorruptSampleError(f"{path} is damaged or no LMDB file: {error}; restore it") from None
        _environments[slot] = [opened, 0]
    _environments[slot][1] += 1
    return _environments[slot][0]


def _let_go(environment: Any) -> None:
    for slot, entry in list(_environments.items()):
        if entry[0] is environment and slot[0] == os.getpid():
            entry[1] -= 1
            if not entry[1]:
                del _environments[slot]
                environment.close()


def write(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """Write an LMDB file.

    Raises:
        MissingPackageError: lmdb is not installed.
    """
    need("lmdb", "the format lmdb")
    import lmdb

    rows, count = Rows(schema), 0
    environment = lmdb.open(path, subdir=False, map_size=MAP, lock=False, sync=False, meminit=True)
    transaction = environment.begin(write=True)
    try:
        for keys, some in several(samples):
            columns, lengths = encoded_columns(some, schema)
            rows.add_columns(keys, columns, lengths)
            for at, name in enumerate(map(str.encode, keys)):
                sizes = (_NONE if length[at] < 0 else length[at] for length in lengths)
                head = struct.pack(f"<{1 + len(lengths)}I", len(name), *sizes)
                transaction.put(b"%08d" % count, b"".join((head, name, *(column[at] for column in columns))), append=True)
                count += 1
                if count % COMMIT == 0:
                    transaction.commit()
                    transaction = environment.begin(write=True)
        transaction.put(META, json.dumps({"schema": dict(schema)}).encode(), append=True)
        transaction.commit()
    except lmdb.Error as error:
        raise OSError(28 if "No space" in str(error) else 5, f"{path}: {error}") from None
    finally:
        environment.close()
    return written(path, rows)
