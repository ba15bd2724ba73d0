"""TFRecord without TensorFlow: framing, masked CRC-32C and tf.train.Example; an index of offsets gives random access.

A record is: length (8 bytes) | masked CRC-32C of these 8 bytes (4) | data | masked CRC-32C of the data (4), little endian.
Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/example.proto.
"""

import functools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from workbench.data.formats.indexed import Array, IndexedSource, truncated
from workbench.data.manifest import Rows, load_index
from workbench.data.sample import KEY, CorruptSampleError, Sample, Strings, decode, encode, encoded_columns, kind_of_field
from workbench.data.shard_file import HashedFile, Written, several
from workbench.data.source import Damage, OnError, corrupt
from workbench.data.storage import Storage

HEAD, FRAME = 12, 16
"""Bytes before the data of a record, and around them."""
ENDINGS = (".tfrecord", ".tfrecords")
_BLOCK = 4096
_INT64 = range(-(1 << 63), 1 << 63)


@functools.cache
def _tables() -> tuple[Array, tuple[int, ...]]:
    """What a byte adds to the CRC by its value and by how many bytes follow it, flat; and the table of one byte."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, first >> 1 ^ np.uint32(0x82F63B78), first >> 1).astype(np.uint32)
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[0] = first
    for follow in range(1, _BLOCK):
        tables[follow] = tables[follow - 1] >> 8 ^ first[tables[follow - 1] & 0xFF]
    return tables[::-1].reshape(-1), tuple(first.tolist())


@functools.cache
def _places() -> Array:
    return np.arange(_BLOCK, dtype=np.int64) * 256


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of some bytes: by tables in numpy, 2 µs per KB.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    flat, one = _tables()
    if len(data) <= 32:
        for byte in bytes(data):
            crc = crc >> 8 ^ one[(crc ^ byte) & 0xFF]
        return crc ^ 0xFFFFFFFF
    for at in range(0, len(data), _BLOCK):
        part = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - at), at).astype(np.int64)
        part[:4] ^= np.frombuffer(crc.to_bytes(4, "little"), np.uint8)[: len(part)]
        shifted = crc >> 8 * len(part) if len(part) < 4 else 0  # what the CRC before has beyond these bytes
        places = _places()[_BLOCK - len(part) :]
        crc = int(np.bitwise_xor.reduce(flat[part + places])) ^ shifted
    return crc ^ 0xFFFFFFFF


def masked(data: bytes | memoryview) -> int:
    """The CRC as a record has it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift >= 70:
            raise CorruptSampleError("a number in the Example has more than 64 bits")


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 2:
            length, at = _varint(data, at)
            if at + length > end:
                raise CorruptSampleError("a part of the Example is longer than the record")
            yield tag >> 3, data[at : at + length]
            at += length
        elif wire == 0:
            number, at = _varint(data, at)
            yield tag >> 3, number
        elif wire == 5:
            yield tag >> 3, data[at : at + 4]
            at += 4
        else:
            raise CorruptSampleError(f"a tf.train.Example has no parts of wire type {wire}")


def parse_example(data: bytes | memoryview) -> dict[str, Any]:
    """The features of a tf.train.Example: bytes, an int or a float where a list has one value, else an array (or a list of bytes).

    Raises:
        CorruptSampleError: the bytes are no Example.
    """
    found: dict[str, Any] = {}
    try:
        for _, features in _fields(memoryview(data)):
            for _, entry in _fields(features):
                name, feature = "", memoryview(b"")
                for number, part in _fields(entry):
                    if number == 1:
                        name = bytes(part).decode()
                    else:
                        feature = part
                found[name] = _value(feature)
    except (IndexError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise CorruptSampleError(f"the record is not a tf.train.Example: {error}") from None
    return found


def _value(feature: memoryview) -> Any:
    for kind, listing in _fields(feature):
        values: list[Any] = []
        for _, item in _fields(listing):
            if kind == 1:
                values.append(bytes(item))
            elif kind == 2:
                values += struct.unpack(f"<{len(item) // 4}f", item)
            elif isinstance(item, int):
                values.append(item - (1 << 64) if item >> 63 else item)
            else:
                at = 0
                while at < len(item):
                    number, at = _varint(item, at)
                    values.append(number - (1 << 64) if number >> 63 else number)
        if len(values) == 1:
            return values[0]
        return values if kind == 1 else np.array(values, np.float32 if kind == 2 else np.int64)
    return None


def _encoded(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def _block(field: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return b"".join((bytes([field << 3 | 2]), _encoded(len(data)), data))


def build_example(features: Mapping[str, bytes | int | float]) -> bytes:
    """A tf.train.Example with one value per feature; the same features always give the same bytes.

    Numbers that its lists cannot hold exactly (beyond 64 bits, or more precise than 32 bits) are stored as text.
    """
    entries = []
    for name in sorted(features):
        value = features[name]
        if isinstance(value, int) and value in _INT64:
            listing = _block(3, _block(1, _encoded(value)))
        elif isinstance(value, float) and _fits(value):
            listing = _block(2, _block(1, struct.pack("<f", value)))
        else:
            listing = _block(1, _block(1, encode(value)))
        entries.append(_block(1, _block(1, name.encode()), _block(2, listing)))
    return _block(1, *entries)


def _fits(value: float) -> bool:
    try:
        found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return False
    return found == value


class TFRecordSource(IndexedSource):
    """Samples in TFRecord files of tf.train.Example.

    Args:
        path: of a folder or a file.
        check: compare each record with its CRC-32C: 2 µs per KB.
        on_error: see `Source`.
        storage_options: for fsspec.

    Raises:
        CorruptSampleError: a file is truncated, or a length is damaged.
    """

    format = "tfrecord"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        check: bool = True,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, check=check, on_error=on_error, storage_options=storage_options)
        names: list[str] | None = None
        if self.storage.is_file():
            folder, _, last = self.storage.root.rpartition("/")
            self.storage, names = Storage(folder or ".", storage_options), [last]
        index = load_index(self.storage, "tfrecord", names)
        self._keys: Strings | None = None
        self._schema = None
        if index is not None:
            self.shards, self.edges, self._keys, self._schema = index.shards, index.edges, index.keys, dict(index.schema)
            self.starts, self.ends = index.offsets[:, 0], index.offsets[:, 1]
            return
        self.shards = names or [name for name, _, _ in self.storage.files() if name.endswith(ENDINGS) and not name.startswith(".")]
        spans = [list(records(self.storage, name)) for name in self.shards]
        self.edges = np.cumsum([0, *map(len, spans)], dtype=np.int64)
        places = np.array([span for some in spans for span in some], np.int64).reshape(-1, 2)
        self.starts, self.ends = np.ascontiguousarray(places[:, 0]), np.ascontiguousarray(places[:, 1])

    def keys(self) -> Any:
        """The names of all samples: those of the manifest, else their numbers."""
        return self._keys if self._keys is not None else super().keys()

    def _parse(self, first: int, last: int, data: memoryview, base: int) -> Iterator[Sample | Damage]:
        for index in range(first, last):
            start, end = int(self.starts[index]) - base, int(self.ends[index]) - base
            record = data[start + HEAD : end - 4]
            if end > len(data):
                yield truncated(self, index, max(0, len(data) - start))
                continue
            damage = ""
            if self.check and int.from_bytes(data[end - 4 : end], "little") != masked(record):
                damage = "the data do not match their CRC-32C"
            sample: Sample = {}
            try:
                sample = self._sample(index, parse_example(record))
            except CorruptSampleError as error:
                damage = damage or str(error)
            yield corrupt(f"sample {index}: {self.where(index)}: {damage}; restore the file", sample or None) if damage else sample

    def _sample(self, index: int, features: dict[str, Any]) -> Sample:
        key = features.pop(KEY, None)
        sample: Sample = {KEY: key.decode("utf-8", "replace") if isinstance(key, bytes) else f"{index:08d}"}
        for name, value in features.items():
            if isinstance(value, list):
                raise ValueError(f"sample {index}: the feature {name!r} has {len(value)} byte strings: one per feature is allowed")
            if value is None:
                continue
            kind = self._schema.get(name, "bytes") if self._schema else "array" if kind_of_field(name) == "array" else "bytes"
            sample[name] = decode(kind, value) if kind != "bytes" and isinstance(value, bytes) else value
        return sample


def records(storage: Storage, name: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each record with its frame, from the lengths alone.

    Raises:
        CorruptSampleError: a length is damaged, or the file ends inside a record.
    """
    size, at, path, number = storage.size(name), 0, storage.path(name), 0
    window, base = b"", 0
    piece = 8 << 20 if storage.remote else 0
    while at < size:
        if not base <= at <= at + HEAD <= base + len(window):
            window, base = storage.read(name, at, max(HEAD, piece)), at
        head = window[at - base : at - base + HEAD]
        if len(head) < HEAD or int.from_bytes(head[8:], "little") != masked(head[:8]):
            raise CorruptSampleError(f"{path}: the length of record {number} at byte {at:,} is damaged, or the file is truncated")
        end = at + FRAME + int.from_bytes(head[:8], "little")
        if end > size:
            raise CorruptSampleError(f"{path}: record {number} at byte {at:,} ends at {end:,}, and the file at {size:,}: it is truncated")
        yield at, end
        at, number = end, number + 1


def write(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """Write a TFRecord file: each sample as a tf.train.Example with a feature per field, and its key under "__key__"."""
    rows, at = Rows(schema), 0
    with HashedFile(path) as file:
        for keys, some in several(samples):
            offsets: list[int] = []
            columns, lengths = encoded_columns(some, schema)
            for key, sample, *parts in zip(keys, some, *columns, strict=True):
                features: dict[str, bytes | int | float] = {KEY: key.encode()}
                for field, part in zip(schema, parts, strict=True):
                    if (value := sample.get(field)) is not None:
                        features[field] = value if isinstance(value, int | float) else part
                data = build_example(features)
                head = struct.pack("<Q", len(data))
                offsets += at, at + FRAME + len(data)
                at += FRAME + len(data)
                file.write([head, struct.pack("<I", masked(head)), data, struct.pack("<I", masked(data))], at)
            rows.add_columns(keys, columns, lengths, offsets)
        return Written(bytes=at, sha256=file.finish(), rows=rows)
