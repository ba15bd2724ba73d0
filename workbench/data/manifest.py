"""The manifest of a dataset in shards: what is in it, where it comes from, and checksums of every shard and every sample.

`manifest.json` is for people and programs; `index.npz` beside it has a row per sample: key, CRC-32 of each field, and where the format has
offsets, those. The manifest is written last: where there is one, the dataset is whole.
"""

import io
import itertools
import json
import os
import zipfile
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from workbench.core import run_directory
from workbench.core.codec import JsonDataclass
from workbench.data.sample import NameCollisionError, Strings, digest, encode, of_each
from workbench.data.storage import Storage

MANIFEST, INDEX = "manifest.json", "index.npz"
VERSION_OF_LAYOUT = 1
LARGE = 8 << 10
"""Bytes of a field, in the mean, from which it is cheaper to hash it by itself than to join it with others."""
_UPDATE, _DIGEST = type(sha256()).update, type(sha256()).digest
Array = np.ndarray[Any, Any]


class ManifestError(ValueError):
    """A manifest is missing or damaged, or does not describe the files beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(JsonDataclass):
    """One file of a dataset."""

    name: str
    bytes: int
    count: int
    """Samples."""
    sha256: str
    """Of the file, in hexadecimal digits; of a folder, over the names and digests of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(JsonDataclass):
    """The manifest of a dataset in shards: format, fields, checksums, origin."""

    format: str
    count: int
    """Samples."""
    schema: Mapping[str, str]
    """Field → kind: "bytes", "int", "float", "str" or "array"."""
    shards: tuple[Shard, ...]
    payload_bytes: int
    """Bytes of the fields, without what the format adds."""
    dataset_sha256: str
    """Over the sorted digests of the samples: the same in any order, number of shards and format."""
    index_sha256: str
    """Of the index's file."""
    seed: int | None = None
    """Of the shuffle before writing; None = the order of the source was kept."""
    description: str = ""
    licence: str = ""
    provenance: str = ""
    """Where the data come from and what was done to them, in the words of whoever wrote them."""
    preprocessing: tuple[str, ...] = ()
    """What was done to each sample before it was written."""
    classes: tuple[str, ...] = ()
    """Names of the values of "cls", where the source had names."""
    written_with: str = "training-workbench"
    version: int = VERSION_OF_LAYOUT

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def imbalance(self, readers: int) -> float:
        """The slowest reader's number of samples over the mean, where whole shards are dealt to that many readers (ranks × workers)."""
        return imbalance([shard.count for shard in self.shards], readers)


def imbalance(counts: Sequence[int], readers: int) -> float:
    """The largest share over the mean where whole shards, numbers of samples, are dealt to readers in turn; 1 is even.

    >>> imbalance([100] * 10, 8)
    1.6
    """
    shares = [sum(counts[reader::readers]) for reader in range(readers)]
    return max(shares) * readers / sum(counts) if sum(counts) else 1.0


@dataclass(slots=True, kw_only=True)
class Index:
    """One row per sample, in the order of the shards."""

    shards: list[str]
    edges: Array
    """Number of the first sample of each shard, and of all samples."""
    keys: Strings
    schema: dict[str, str]
    offsets: Array
    """(samples, fields): where each field begins in its shard; (samples, 0) in formats that have no offsets."""
    lengths: Array
    """Bytes of each field; -1 = the sample has no such field."""
    crcs: Array | None
    """CRC-32 of each field as `sample.encode` writes it; None = not known."""


class Rows:
    """The part of an index that one shard gives while it is written."""

    def __init__(self, fields: Iterable[str], offsets_of: Callable[[Array], Array] | None = None) -> None:
        """`offsets_of`: lengths of fields (samples, fields) → where they begin, in formats where that follows."""
        self.fields, self.offsets_of = tuple(fields), offsets_of
        self._sorted = [(place, b"%d:%b" % (len(name), name.encode())) for name, place in sorted(zip(fields, range(10**9), strict=False))]
        self._keys, self._digests = bytearray(), bytearray()
        self._sizes, self._offsets = array("q"), array("q")
        self._lengths, self._crcs = [array("q") for _ in self.fields], [array("I") for _ in self.fields]

    def add_columns(
        self, keys: Sequence[str], columns: Sequence[Sequence[bytes]], lengths: Sequence[list[int]], offsets: Sequence[int] = ()
    ) -> None:
        """Several samples, field by field: of each field what `sample.encode` makes of it, and its bytes; b"" and -1 where there is none.

        `offsets`: where they begin in the shard, those of the first sample before those of the second, in formats that have offsets.
        """
        joined = "".join(keys)
        self._keys += joined.encode("utf-8", "surrogateescape")
        self._sizes.extend(map(len, keys if joined.isascii() else [key.encode("utf-8", "surrogateescape") for key in keys]))
        self._offsets.extend(offsets)
        for length, column, all_lengths, all_crcs in zip(lengths, columns, self._lengths, self._crcs, strict=True):
            all_lengths.extend(length)
            all_crcs.extend(map(crc32, column))
        self._digests += b"".join(self._hashed(len(keys), columns, lengths))

    def _hashed(self, count: int, columns: Sequence[Sequence[bytes]], lengths: Sequence[list[int]]) -> Iterable[bytes]:
        """The digest of each sample: what `sample.digest` gives. Small parts are joined, large ones hashed where they are."""
        hashes: list[Any] = [sha256() for _ in range(count)] if not self._sorted else []
        small: list[Iterable[bytes]] = []
        for number, (place, name) in enumerate(self._sorted, 1):
            heads = of_each((name.replace(b"%", b"%%") + b"%d:").__mod__, lengths[place])
            if -1 in lengths[place]:
                heads = [b"" if length < 0 else head for head, length in zip(heads, lengths[place], strict=True)]
            small.append(heads)
            large = sum(lengths[place]) > LARGE * count
            if not large:
                small.append(columns[place])
            if large or number == len(self._sorted):
                joined = map(b"".join, zip(*small, strict=True))
                hashes = _updated(hashes, joined) if hashes else list(map(sha256, joined))
                small = []
            if large:
                _updated(hashes, columns[place])
        return map(_DIGEST, hashes)

    def arrays(self) -> dict[str, Array]:
        """As arrays by name, to be saved."""
        count = len(self._sizes)
        lengths = np.array(self._lengths, np.int64).reshape(len(self.fields), count).T
        return {
            "keys": np.frombuffer(self._keys, np.uint8),
            "ends": np.concatenate([[0], self._sizes]).astype(np.int64).cumsum(),
            "offsets": self.offsets_of(lengths) if self.offsets_of else np.array(self._offsets).reshape(count, -1 if count else 0),
            "lengths": lengths,
            "crcs": np.array(self._crcs, np.uint32).reshape(len(self.fields), count).T,
            "digests": np.frombuffer(self._digests, np.uint8).reshape(count, 32),
        }


def _updated(hashes: list[Any], parts: Iterable[bytes]) -> list[Any]:
    """Each hash, after it was given another part."""
    deque(map(_UPDATE, hashes, parts), maxlen=0)
    return hashes


def merge(parts: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """The rows of several shards, one after the other."""
    parts = list(parts)
    names = ("keys", "offsets", "lengths", "crcs")
    merged = {name: np.concatenate([part[name] for part in parts]) for name in names}
    lengths = np.concatenate([np.diff(part["ends"]) for part in parts])
    return {**merged, "ends": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}


def packed(arrays: Mapping[str, Array]) -> bytes:
    """Arrays as the bytes of an .npz file, the same for equal arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            part = io.BytesIO()
            np.lib.format.write_array(part, np.ascontiguousarray(arrays[name]), version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), part.getbuffer())
    return file.getvalue()


def unpacked(data: bytes, where: str) -> dict[str, Array]:
    """Inverse of `packed`.

    Raises:
        ManifestError: the bytes are damaged.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ManifestError(f"{where} is damaged ({error}): write the dataset again, or restore the file") from None


def dataset_digest(digests: Array) -> str:
    """SHA-256 over sorted digests of samples: (samples, 32) of uint8."""
    return sha256(np.sort(np.ascontiguousarray(digests).view("S32").ravel()).tobytes()).hexdigest()


def digest_of(samples: Iterable[Mapping[str, Any]]) -> str:
    """The dataset digest of samples, however they are stored: equal to `Manifest.dataset_sha256` if they are those of the manifest."""
    return sha256(b"".join(sorted(map(digest, samples)))).hexdigest()


def read_manifest(storage: Storage) -> Manifest | None:
    """The manifest of a folder; None = it has none.

    Raises:
        ManifestError: it is damaged, or of a later version.
    """
    if not storage.remote and (storage.is_file() or not storage.exists(MANIFEST)):
        return None
    where = storage.path(MANIFEST)
    try:
        data = storage.read(MANIFEST)
    except FileNotFoundError:  # a server is asked for it, and not first whether it is there: each question waits
        return None
    try:
        value = json.loads(data)
        version = value.get("version") if isinstance(value, dict) else None
        if not isinstance(value, dict) or "dataset_sha256" not in value:
            return None  # of something else
        if version != VERSION_OF_LAYOUT:
            raise ManifestError(f"{where} is of version {version!r}: this workbench reads {VERSION_OF_LAYOUT}; use a newer one")
        manifest = Manifest.from_json(value)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is damaged: {error}. Restore it, or remove it to read the files without checksums") from None
    if sum(shard.count for shard in manifest.shards) != manifest.count:
        raise ManifestError(f"{where} is wrong: its shards have {sum(s.count for s in manifest.shards):,} samples, not {manifest.count:,}")
    for shard in manifest.shards:
        storage.path(shard.name)  # raises where a name leads out of the folder
        if "/" in shard.name or shard.name in ("", ".", MANIFEST, INDEX):  # below a link there may be anything
            raise ManifestError(f"{where} is wrong: {shard.name!r:.90} is not the name of a shard")
        if shard.count < 0 or shard.bytes < 0:
            raise ManifestError(f"{where} is wrong: {shard.name!r:.90} has {shard.count:,} samples and {shard.bytes:,} bytes")
    return manifest


def load_index(storage: Storage, kind: str, names: Sequence[str] | None = None) -> Index | None:
    """The index of a dataset with a manifest; None = the folder has no manifest of that format.

    Raises:
        ManifestError: manifest and index do not belong together.
    """
    with storage.fetched(MANIFEST, INDEX):
        manifest = read_manifest(storage)
        if manifest is None or manifest.format != kind:
            return None
        data = storage.read(INDEX)
    where = storage.path(INDEX)
    if sha256(data).hexdigest() != manifest.index_sha256:
        raise ManifestError(
            f"{where} is not the index that {MANIFEST} describes: one of them is damaged, or of another dataset; restore both"
        )
    arrays = unpacked(data, where)
    if wrong := _wrong_in_index(arrays, manifest):
        raise ManifestError(f"{where} does not describe the samples of {MANIFEST}: {wrong}")
    shards = list(manifest.shards)
    edges = np.cumsum([0, *(shard.count for shard in shards)], dtype=np.int64)
    keys = Strings.of(arrays["keys"], arrays["ends"])
    chosen = slice(None)
    if names is not None and list(names) != [shard.name for shard in shards]:
        numbers = {shard.name: number for number, shard in enumerate(shards)}
        if unknown := [name for name in names if name not in numbers]:
            raise ManifestError(f"{storage.path(unknown[0])} is not in {MANIFEST} beside it, which describes {len(shards)} shards")
        chosen = np.concatenate([np.arange(edges[numbers[name]], edges[numbers[name] + 1]) for name in names])  # type: ignore[assignment]
        keys = Strings(keys[int(i)] for i in chosen)  # type: ignore[attr-defined]
        shards = [shards[numbers[name]] for name in names]
        edges = np.cumsum([0, *(shard.count for shard in shards)], dtype=np.int64)
    return Index(
        shards=[shard.name for shard in shards],
        edges=edges,
        keys=keys,
        schema=dict(manifest.schema),
        offsets=arrays["offsets"][chosen],
        lengths=arrays["lengths"][chosen],
        crcs=arrays["crcs"][chosen],
    )


def _wrong_in_index(arrays: Mapping[str, Array], manifest: Manifest) -> str:
    """Which array of an index has not the form that its readers rely on; "" = none."""
    count, fields = manifest.count, len(manifest.schema)
    for name, kind in {"keys": np.uint8, "ends": np.int64, "offsets": np.int64, "lengths": np.int64, "crcs": np.uint32}.items():
        if name not in arrays:
            return f"it has no {name}"
        if arrays[name].dtype != kind or arrays[name].ndim != (1 if name in ("keys", "ends") else 2):
            return f"its {name} are of another type"
    keys, ends, offsets, lengths, crcs = (arrays[name] for name in ("keys", "ends", "offsets", "lengths", "crcs"))
    columns = {"tar": fields, "tfrecord": 2}.get(manifest.format, 0)
    if len(ends) != count + 1 or offsets.shape != (count, columns) or lengths.shape != (count, fields) or crcs.shape != (count, fields):
        return f"it has {len(ends) - 1:,} samples, and the manifest {count:,}, or other fields"
    if ends[0] or ends[-1] != len(keys) or (np.diff(ends) < 0).any():
        return "its keys overlap"
    sizes = np.repeat([shard.bytes for shard in manifest.shards], [shard.count for shard in manifest.shards])[:, None]
    if (offsets < 0).any() or (offsets > sizes).any() or (lengths < -1).any():
        return "a field lies outside of its shard"
    if manifest.format == "tar" and (lengths > sizes - offsets).any():
        return "a field is longer than its shard"
    return ""


def about_shard(rows: Mapping[str, Array]) -> list[str]:
    """Bytes and SHA-256 of a shard."""
    return rows["about"].tobytes().decode().split()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole, or not at all: its content is on the disk before it takes the place of what was there.

    Raises:
        DiskFullError: there is no room.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # of a writer that was killed; or a link, which would lead elsewhere
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        run_directory.raise_if_full(path, error)
        raise


def write_json(path: Path, value: object) -> None:
    """As `write_whole`, a value as JSON."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def sync_names(folder: Path) -> None:
    """Wait until the names of a folder's files, as they were made, replaced and removed until now, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def store(out: Path, names: Sequence[str], parts: Sequence[Mapping[str, Array]], about: Manifest) -> Manifest:
    """Write the index and the manifest of shards; the manifest last, when all that it describes is on the disk under its name.

    Raises:
        NameCollisionError: two samples have the same key.
    """
    rows = merge(parts)
    data = rows["keys"].tobytes()
    keys = [data[start:end] for start, end in itertools.pairwise(rows["ends"].tolist())]
    if len(set(keys)) < len(keys):
        twice = Counter(keys).most_common(1)[0][0].decode("utf-8", "surrogateescape")
        raise NameCollisionError(f'two samples have the key {twice!r}: give keys="number"')
    index = packed(rows)
    shards = []
    for name, part in zip(names, parts, strict=True):
        size, shard_sha256 = about_shard(part)
        shards.append(Shard(name=name, bytes=int(size), count=len(part["lengths"]), sha256=shard_sha256))
    manifest = replace(
        about,
        count=len(keys),
        shards=tuple(shards),
        payload_bytes=int(sum(part["lengths"][part["lengths"] > 0].sum() for part in parts)),
        dataset_sha256=dataset_digest(np.concatenate([part["digests"] for part in parts])),
        index_sha256=sha256(index).hexdigest(),
    )
    write_whole(out / INDEX, index)
    sync_names(out)
    write_json(out / MANIFEST, manifest.to_json())
    sync_names(out)
    return manifest


def check_sample(sample: Mapping[str, Any], crcs: Sequence[int], lengths: Sequence[int], fields: Iterable[str], what: str) -> str:
    """What is wrong with a sample by the index; "" = nothing."""
    for name, crc, length in zip(fields, crcs, lengths, strict=True):
        value = sample.get(name)
        if (length >= 0) != (value is not None):
            return f"{what}: field {name!r} is {'missing' if length >= 0 else 'there, and was not written'}"
        if value is not None and crc32(value if type(value) is bytes else encode(value)) != crc:
            return f"{what}, field {name!r}: its bytes are not those that were written; restore the file"
    return ""
