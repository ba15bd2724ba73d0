"""Tar shards, as WebDataset names them: `key.jpg` and `key.cls` are fields of one sample. Read by an index, written byte for byte alike.

The headers are read and written here and not by `tarfile`, which takes 20 times as long for them as a small picture takes to read.
"""

import functools
import glob
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.data.formats.indexed import IndexedSource, truncated
from workbench.data.manifest import Array, Index, Rows, load_index
from workbench.data.sample import (
    KEY,
    CorruptSampleError,
    NameCollisionError,
    Sample,
    Strings,
    UnsafeNameError,
    checked_key,
    decode,
    encoded_columns,
    kind_of_field,
    of_each,
)
from workbench.data.shard_file import HashedFile, Written, several
from workbench.data.source import Damage, OnError, corrupt
from workbench.data.storage import Storage

BLOCK = 512
NAMES = 1 << 20
"""Bytes that a long name may have."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class TarSource(IndexedSource):
    """Samples in tar files.

    Args:
        path: a folder of tar files, one file, several, or a pattern with `*` or `{000..012}` in its last part.
        check: compare each field with its CRC-32. Only shards with a manifest have one (`write_shards`); in others damage is not seen.
        on_error: see `Source`.
        storage_options: for fsspec.
    """

    format = "tar"

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        check: bool = True,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        root, names = _shards(path, storage_options)
        super().__init__(root, check=check, on_error=on_error, storage_options=storage_options)
        index = load_index(self.storage, "tar", names)
        if index is None and names is None:
            names = [name for name, _, _ in self.storage.files() if name.endswith(".tar") and not name.startswith(".")]
        self._index = index if index is not None else scan(self.storage, names or [])
        if not len(self._index.keys):
            raise CorruptSampleError(f"{self.path}: there is no sample in {len(self._index.shards)} tar files")
        self.shards, self.edges = self._index.shards, self._index.edges
        self._offsets, self._lengths = self._index.offsets, self._index.lengths
        there = self._lengths >= 0
        self.starts = np.where(there, self._offsets, np.iinfo(np.int64).max).min(1)
        self.ends = np.where(there, self._offsets + self._lengths, 0).max(1)
        self._crcs = self._index.crcs if check else None
        self.fields = tuple(self._index.schema)
        self._schema = dict(self._index.schema)
        self._kinds = tuple(None if kind == "bytes" else kind for kind in self._schema.values())

    def keys(self) -> Strings:
        """The names of all samples."""
        return self._index.keys

    def _parse(self, first: int, last: int, data: memoryview, base: int) -> Iterator[Sample | Damage]:
        offsets = (self._offsets[first:last] - base).tolist()
        lengths = self._lengths[first:last].tolist()
        crcs = self._crcs[first:last].tolist() if self._crcs is not None else [[None] * len(self.fields)] * len(offsets)
        keys = self._index.keys.some(first, last)
        crc32, parts = zlib.crc32, tuple(zip(self.fields, self._kinds, strict=True))
        for row, key in enumerate(keys):
            sample: Sample = {KEY: key}
            damage = ""
            for (field, kind), offset, length, crc in zip(parts, offsets[row], lengths[row], crcs[row], strict=True):
                if length < 0:
                    continue
                value = bytes(data[offset : offset + length])
                if len(value) != length:
                    damage = "truncated"
                    break
                if crc is not None and crc32(value) != crc:
                    damage = field
                elif kind is not None:
                    try:
                        sample[field] = int(value) if kind == "int" else decode(kind, value)
                        continue
                    except ValueError:
                        damage = field
                sample[field] = value
            if not damage:
                yield sample
            elif damage == "truncated":
                yield truncated(self, first + row, max(0, len(data) - offsets[row][0]))
            else:
                place = f"{self.where(first + row)} are not those that were written"
                yield corrupt(f"sample {first + row} ({key!r:.90}), field {damage!r}: {place}; restore the file", sample)


def _shards(path: Any, options: Mapping[str, Any] | None) -> tuple[str, list[str] | None]:
    """The folder, and the names of the files in it; None = all in it."""
    if not isinstance(path, str | os.PathLike):
        paths = [os.fspath(one) for one in path]
    else:
        text = os.fspath(path)
        folder, _, last = text.rpartition("/")
        if found := _RANGE.search(last):
            digits, numbers = len(found[1]), range(int(found[1]), int(found[2]) + 1)
            paths = [f"{folder + '/' if folder else ''}{last[: found.start()]}{i:0{digits}d}{last[found.end() :]}" for i in numbers]
        elif "*" in last or "?" in last:
            paths = sorted(glob.glob(text) if "://" not in text else _remote_glob(text, options))
            if not paths:
                raise FileNotFoundError(f"no file is named like {text}")
        elif text.endswith(".tar"):
            paths = [text]
        else:
            return text, None
    folders = {one.rpartition("/")[0] for one in paths}
    if len(folders) != 1:
        raise ValueError(f"the tar files lie in {len(folders)} folders ({', '.join(sorted(folders)[:3])}): those of one folder are allowed")
    return folders.pop() or ".", [one.rpartition("/")[2] for one in paths]


def _remote_glob(text: str, options: Mapping[str, Any] | None) -> list[str]:
    protocol = text.partition("://")[0]
    return [f"{protocol}://{found}" for found in Storage(text, options).file_system.glob(text)]


def scan(storage: Storage, names: Sequence[str]) -> Index:
    """The index of tar files, from their headers.

    Raises:
        CorruptSampleError: a file is truncated, or a header is damaged.
        UnsafeNameError: a name leads out of the folder.
        NameCollisionError: a sample has a field twice, or occurs in two places.
    """
    rows: list[dict[str, tuple[int, int]]] = []
    keys: list[str] = []
    edges, schema = [0], dict[str, str]()
    for name in names:
        key, seen = None, set[str]()
        for member, offset, length in members(storage, name):
            folder, slash, last = member.rpartition("/")
            stem, dot, field = last.partition(".")
            if not dot or not stem or not field:
                continue  # as WebDataset does: files without an extension belong to no sample
            field = field.lower()
            if (here := checked_key(folder + slash + stem)) != key:
                key = here
                if key in seen:  # in another shard it may, as where each numbers its own samples
                    raise NameCollisionError(f"{storage.path(name)}: sample {key!r} occurs twice; the files of a sample follow each other")
                seen.add(key)
                keys.append(key)
                rows.append({})
            if field in rows[-1]:
                raise NameCollisionError(f"{storage.path(name)}: {member!r} occurs twice")
            rows[-1][field] = (offset, length)
            schema.setdefault(field, kind_of_field(field))
        edges.append(len(rows))
    places = np.array([[row.get(field, (0, -1)) for field in schema] for row in rows], np.int64).reshape(len(rows), len(schema), 2)
    return Index(
        shards=list(names),
        edges=np.array(edges, np.int64),
        keys=Strings(keys),
        schema=schema,
        offsets=np.ascontiguousarray(places[:, :, 0]),
        lengths=np.ascontiguousarray(places[:, :, 1]),
        crcs=None,
    )


def members(storage: Storage, name: str) -> Iterator[tuple[str, int, int]]:
    """(name, offset, length) of the regular files in a tar file; links, folders and devices are left out.

    Raises:
        CorruptSampleError: a header is damaged, or the file ends too early.
        UnsafeNameError: a name leads out of the folder.
    """
    size, at, long_name, path = storage.size(name), 0, "", storage.path(name)
    window = _Window(storage, name)
    pax: dict[str, str] = {}
    while at < size:
        head = window.get(at, BLOCK)
        if not head.strip(b"\0"):
            return
        if len(head) < BLOCK or not _sum_fits(head):
            raise CorruptSampleError(f"{path}: there is no header at byte {at:,}: the file is damaged or truncated, or is not a tar file")
        length = _number(head[124:136], path, at)
        kind, start = head[156:157], at + BLOCK
        if "size" in pax:
            length = int(pax["size"]) if pax["size"].isdecimal() else -1
        if length < 0 or start + length > size:
            raise CorruptSampleError(
                f"{path}: the file at byte {at:,} is said to have {length:,} bytes, and {max(0, size - start):,} are left: "
                "the tar file is truncated, or the header is wrong; restore it"
            )
        at = start + -(-length // BLOCK) * BLOCK
        if kind in (b"L", b"x", b"g", b"K"):
            if length > NAMES:
                raise CorruptSampleError(f"{path}: a name of {length:,} bytes is declared at byte {start - BLOCK:,}")
            more = window.get(start, length)
            if kind == b"L":
                long_name = more.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == b"x":
                pax = _pax(more)
            continue
        prefix = head[345:500].split(b"\0", 1)[0] if head[257:263] == b"ustar\0" else b""
        short = (prefix + b"/" * bool(prefix) + head[:100].split(b"\0", 1)[0]).decode("utf-8", "surrogateescape")
        member = pax.get("path") or long_name or short
        long_name, pax = "", {}
        if kind not in (b"0", b"\0", b"7"):
            continue
        if member.startswith("/") or ".." in member.split("/"):
            raise UnsafeNameError(f"{path} has a file {member!r:.90}, which leads out of the folder; it is not read")
        yield member, start, length


class _Window:
    """Reads small parts of a file that follow each other: on this machine one by one, from a server in large pieces."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name, self.data, self.base = storage, name, b"", 0

    def get(self, at: int, length: int) -> bytes:
        if not self.storage.remote:
            return self.storage.read(self.name, at, length)
        if not self.base <= at <= at + length <= self.base + len(self.data):
            self.base, self.data = at, self.storage.read(self.name, at, max(length, 8 << 20))
        return self.data[at - self.base : at - self.base + length]


def _sum_fits(head: bytes) -> bool:
    """Is the checksum of a header right?"""
    try:
        return int(head[148:156].strip(b"\0 ") or b"-1", 8) == sum(head[:148]) + 256 + sum(head[156:])
    except ValueError:
        return False


def _number(field: bytes, path: str, at: int) -> int:
    """A size in a header: octal, or binary where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise CorruptSampleError(f"{path}: the header at byte {at:,} has no size: {field!r}") from None


def _pax(data: bytes) -> dict[str, str]:
    """The records of an extended header: "27 path=…\\n"."""
    found = {}
    while data:
        length = int(data.split(b" ", 1)[0] or b"0") if data[:1].isdigit() else 0
        if not length:
            break
        name, _, value = data[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        found[name.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


_HEAD = bytearray(BLOCK)
_HEAD[100:108], _HEAD[108:116], _HEAD[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
_HEAD[136:148], _HEAD[156:157], _HEAD[257:265] = b"00000000000\0", b"0", b"ustar\x0000"
_BEFORE, _BETWEEN, _AFTER = bytes(_HEAD[100:124]), bytes(_HEAD[136:148]), bytes(_HEAD[156:])
_SUM = sum(_BEFORE) + sum(_BETWEEN) + sum(_AFTER) + 8 * ord(" ")
_PADDING = [bytes(n) for n in range(BLOCK)]
_LARGEST = 8**11


def header(name: bytes, length: int) -> bytes:
    """The header of a regular file: mode 644, owner 0, time 0, so that equal files make equal archives.

    Raises:
        UnsafeNameError: the name is longer than the format takes (100 bytes, or 155 for folders and 100 for the rest).
    """
    if len(name) > 100:
        return _long(name, length)
    if length >= _LARGEST:
        raise ValueError(f"{name!r} has {length:,} bytes: a tar file takes up to {_LARGEST - 1:,} per field")
    size, of_size, _ = _size(length)
    return b"".join((name, _PADDING[100 - len(name)], size, _end(of_size + sum(name))))


@functools.lru_cache(maxsize=65536)
def _size(length: int) -> tuple[bytes, int, bytes]:
    """By the size of a file: what its header has between name and checksum, the sum of all of that but the name, and the padding."""
    size = b"%011o\0" % length
    return _BEFORE + size + _BETWEEN, _SUM + sum(size), _PADDING[-length % BLOCK]


@functools.lru_cache(maxsize=8192)
def _end(total: int) -> bytes:
    """What a header has from its checksum on."""
    return b"%06o\0 " % total + _AFTER


def _long(name: bytes, length: int) -> bytes:
    cut = name.rfind(b"/", 0, 156)
    if cut <= 0 or len(name) - cut - 1 > 100:
        raise UnsafeNameError(
            f"the name {name.decode(errors='replace'):.60}… has {len(name)} bytes: a tar file takes 100, or 255 with folders"
        )
    head = bytearray(header(name[cut + 1 :], length))
    head[345 : 345 + cut] = name[:cut]
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def write(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """Write a tar shard, which must not exist: the fields of each sample one after the other, in the order of the schema.

    Samples are taken some at a time and their fields as columns: one by one, Python would take longer than the checksums of a small sample.
    """
    rows, at, endings = Rows(schema, _offsets), 0, [b"." + field.encode() for field in schema]
    with HashedFile(path) as file:
        for keys, some in several(samples):
            columns, lengths = encoded_columns(some, schema)
            rows.add_columns(keys, columns, lengths)
            parts, size = _files(list(map(str.encode, keys)), endings, columns, lengths)
            at += size
            file.write(parts, at)
        file.write([bytes(2 * BLOCK)], at + 2 * BLOCK)
        return Written(bytes=at + 2 * BLOCK, sha256=file.finish(), rows=rows)


def _offsets(lengths: Array) -> Array:
    """Where each field of each sample begins, by their lengths (samples, fields); -1 = there is no such file."""
    ends = np.where(lengths < 0, 0, BLOCK + lengths + -lengths % BLOCK).ravel().cumsum()
    return (np.concatenate([[0], ends])[:-1] + BLOCK).reshape(lengths.shape)


def _files(stems: list[bytes], endings: list[bytes], columns: list[list[bytes]], lengths: list[list[int]]) -> tuple[list[bytes], int]:
    """The files of some samples, in parts to be joined (name, rest of the header, bytes, padding), and their size; no file of length -1."""
    parts: list[Sequence[bytes]] = []
    sums, long, total = list(map(sum, stems)), list(map(len, stems)), 0
    for ending, column, length in zip(endings, columns, lengths, strict=True):
        if min(length) < 0 or max(length) >= _LARGEST or max(long) + len(ending) > 100:
            heads = [header(stem + ending, size) if size >= 0 else b"" for stem, size in zip(stems, length, strict=True)]
            paddings = tuple(_PADDING[-size % BLOCK if size > 0 else 0] for size in length)
            parts += heads, column, paddings
        else:
            more, rests = sum(ending), [ending + _PADDING[n] for n in range(101 - len(ending))][::-1]
            middles, rest_sums, paddings = zip(*of_each(_size, length), strict=True)
            ends = [_end(one + other + more) for one, other in zip(sums, rest_sums, strict=True)]
            parts += stems, of_each(rests.__getitem__, long), middles, ends, column, paddings
        total += BLOCK * (len(length) - length.count(-1)) + sum(map(len, column)) + sum(map(len, paddings))
    return list(itertools.chain.from_iterable(zip(*parts, strict=True))), total
