"""verify checks the files of a dataset against its manifest; describe says what the dataset is, with a picture of samples."""

import hashlib
import io
import os
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.codec import NOT_STORED, JsonDataclass
from workbench.core.display.table import Shown, Table, frame, panel, plot_method
from workbench.core.synonyms import accept_synonyms
from workbench.data.adapters import as_source
from workbench.data.manifest import INDEX, MANIFEST, Manifest, ManifestError, digest_of, read_manifest
from workbench.data.sample import KEY, PICTURES, CorruptSampleError
from workbench.data.shard_file import hash_file
from workbench.data.source import Source
from workbench.data.storage import DataMissingError, Storage

SPOT = 100
"""Samples that a quick check reads."""
PICTURED = 12
"""Samples in the picture."""
PROBLEMS_KEPT = 100
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Shown, JsonDataclass):
    """What a check of a dataset found."""

    path: str
    full: bool
    samples: int
    """That were read and compared with their checksums."""
    shards: int
    """That were looked at."""
    problems: tuple[str, ...] = ()
    """Each names a file, and the sample and bytes where it knows them; the first hundred."""
    problem_count: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problem_count

    @property
    def table(self) -> Table:
        """The problems."""
        looked = f"{self.shards:,} shards {'hashed' if self.full else 'measured'}, {self.samples:,} samples compared with their checksums"
        title = f"{self.path}: {'nothing is wrong' if self.ok else f'{self.problem_count:,} problems'}; {looked}"
        return Table(columns=("problem",), rows=[(problem,) for problem in self.problems], title=title)

    def to_frame(self) -> Any:
        """One row per problem."""
        return frame([{"problem": problem} for problem in self.problems], columns=["problem"])


@accept_synonyms
def verify(path: str | os.PathLike[str], *, full: bool = False, storage_options: Mapping[str, Any] | None = None) -> Verification:
    """Check that the files of a dataset match its manifest.

    Args:
        path: folder or URL of a dataset with a manifest (`write_shards`).
        full: False = check names and sizes of all shards, the index, and the checksums of 100 samples; True = check the SHA-256 of every
            shard, the checksum of every sample, and the digest of the dataset, which any flipped bit changes.
        storage_options: options of fsspec.

    Raises:
        ManifestError: there is no manifest, or it is damaged.
    """
    storage = Storage(path, storage_options)
    manifest = read_manifest(storage)
    if manifest is None:
        raise ManifestError(f"{storage.root} has no {MANIFEST}: only datasets that write_shards has written can be checked")
    problems: list[str] = []
    for shard in manifest.shards:
        where = storage.path(shard.name)
        if not storage.exists(shard.name):
            problems.append(f"{where} is missing")
        elif storage.remote or os.path.isfile(where):
            if (size := storage.size(shard.name)) != shard.bytes:
                problems.append(f"{where} has {size:,} bytes, and {MANIFEST} says {shard.bytes:,}")
            elif full and _sha256(storage, shard.name, size) != shard.sha256:
                problems.append(f"{where}: its SHA-256 is not that of {MANIFEST}; restore it")
        elif full and hash_file(where) != (shard.bytes, shard.sha256):
            problems.append(f"{where}: its files are not those of {MANIFEST}; restore it")
    listed = {shard.name for shard in manifest.shards}
    extra = [name for name, _, _ in storage.files() if name.split("/")[0] not in (*listed, INDEX, MANIFEST) and not name.startswith(".")]
    problems += [f"{storage.path(name)} is not in {MANIFEST}" for name in extra if name.startswith("shard-")]
    read = 0
    try:
        source = as_source(path, format=manifest.format, on_error="count", storage_options=storage_options)
        read = _read(source, manifest, full, problems)
        source.close()
    except (CorruptSampleError, DataMissingError, ManifestError) as error:
        problems.append(str(error))
    return Verification(
        path=storage.root,
        full=full,
        samples=read,
        shards=len(manifest.shards),
        problems=tuple(problems[:PROBLEMS_KEPT]),
        problem_count=len(problems),
    )


def _read(source: Source, manifest: Manifest, full: bool, problems: list[str]) -> int:
    """Read samples, all or some, and note what is wrong; how many were read."""
    count = len(source)
    if not full:
        wanted = sorted(random.Random(0).sample(range(count), min(SPOT, count)))
        source.__getitems__(wanted)
        problems += source.damaged
        return len(wanted)
    found = digest_of(source)
    problems += source.damaged
    if not source.damaged_count and found != manifest.dataset_sha256:
        problems.append(f"the digest of the samples is not that of {MANIFEST}: it is of other data")
    return count


def _sha256(storage: Storage, name: str, size: int) -> str:
    total = hashlib.sha256()
    for at in range(0, size, _PIECE):
        total.update(storage.read(name, at, min(_PIECE, size - at)))
    return total.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCard(Shown, JsonDataclass):
    """What a dataset is: size, fields, checksums, origin, and some samples for the picture."""

    path: str
    format: str
    count: int
    """Samples; 0 = it can only be gone through."""
    stored_bytes: int | None
    schema: Mapping[str, str]
    """Field → kind."""
    classes: Mapping[str, int] = field(default_factory=dict)
    """Value of "cls", or its name → samples of it among those that were looked at."""
    looked_at: int = 0
    """Samples that were read for this card."""
    lengths: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Field of bytes or text → smallest, median and largest length, in bytes or characters."""
    manifest: Manifest | None = None
    rows_read_for_one: float = 1.0
    """Samples that the format reads for one at random: those of a row group or a chunk."""
    examples: tuple[Any, ...] = field(default=(), metadata=NOT_STORED, compare=False)
    """Some samples as they were read."""
    plot = plot_method("samples")

    @property
    def table(self) -> Table:
        """A row per fact."""
        rows: list[tuple[str, str]] = [("format", self.format), ("samples", f"{self.count:,}"), ("stored", units.bytes_(self.stored_bytes))]
        for name, kind in self.schema.items():
            least, middle, most = self.lengths.get(name, (0, 0, 0))
            size = f", {least:,} to {most:,}, median {middle:,}" if most else ""
            rows.append((f"field {name}", f"{kind}{size}"))
        if self.classes:
            counts = list(self.classes.values())
            rows.append(("classes", f"{len(counts)}, with {min(counts):,} to {max(counts):,} of the {self.looked_at:,} samples looked at"))
        if self.rows_read_for_one > 1:
            rows.append(("read at random", f"{self.rows_read_for_one:,.0f} samples are read for one: read in order, or another format"))
        if (told := self.manifest) is not None:
            each = units.bytes_(told.stored_bytes / len(told.shards))
            rows += [
                ("shards", f"{len(told.shards):,} of {each}"),
                (
                    "imbalance",
                    ", ".join(f"{units.times(told.imbalance(r))} on {r} readers" for r in (8, 64) if r <= len(told.shards)) or "–",
                ),
                ("order", "as in the source" if told.seed is None else f"shuffled, seed {told.seed}"),
                ("digest", told.dataset_sha256[:16]),
            ]
            said = {"description": told.description, "licence": told.licence, "provenance": told.provenance}
            rows += [(name, text or "not given") for name, text in said.items()]
            rows += [("preprocessing", step) for step in told.preprocessing]
        else:
            rows.append(("checksums", "none: wb.data.write_shards makes a dataset with them"))
        return Table(columns=("what", "is"), rows=rows, title=self.path or "dataset")

    def explore(self) -> Any:
        """A panel of samples and shards: `wb.widgets.DataExplorer`."""
        return panel("DataExplorer")(self)


@accept_synonyms
def describe(data: Any, *, look_at: int = 1000, **options: Any) -> DataCard:
    """Describe a dataset: format, size, fields, classes, shards, checksums, licence; `.plot()` shows some samples.

    Args:
        data: a dataset in any form that `as_source` takes.
        look_at: number of samples to read for classes and lengths.
        options: arguments of `open_source`.
    """
    source = as_source(data, **options)
    manifest = getattr(source, "storage", None) and read_manifest(source.storage)  # type: ignore[attr-defined]
    try:
        count = len(source)
        places = range(count) if count <= look_at else sorted(random.Random(0).sample(range(count), look_at))
        samples = source.__getitems__(list(places))
    except TypeError:  # it can only be gone through
        count, samples = 0, [sample for sample, _ in zip(source, range(look_at), strict=False)]
    schema = dict(source.schema)
    lengths: dict[str, tuple[int, int, int]] = {}
    for name, kind in schema.items():
        found = sorted(len(sample[name]) for sample in samples if name in sample) if kind in ("bytes", "str") else []
        if found:
            lengths[name] = (found[0], found[len(found) // 2], found[-1])
    names = tuple(getattr(source, "classes", ()) or (manifest.classes if manifest else ()))
    classes: dict[str, int] = {}
    for sample in samples:
        if isinstance(label := sample.get("cls", sample.get("label")), int):
            name = names[label] if 0 <= label < len(names) else str(label)
            classes[name] = classes.get(name, 0) + 1
    step = max(1, len(samples) // PICTURED)
    return DataCard(
        path=source.path,
        format=source.format,
        count=count,
        stored_bytes=manifest.stored_bytes if manifest else source.stored_bytes(),
        schema=schema,
        classes=dict(sorted(classes.items())),
        looked_at=len(samples),
        lengths=lengths,
        manifest=manifest or None,
        rows_read_for_one=float(source.facts().get("rows_read_for_one", 1.0)),
        examples=tuple(samples[::step][:PICTURED]),
    )


def picture_of(sample: Mapping[str, Any]) -> tuple[Any, str]:
    """The pixels of a sample (height × width × 3 or height × width), or None, and a word below: its label, or the beginning of its text.

    Raises:
        CorruptSampleError: the picture cannot be decoded, or declares more pixels than Pillow takes.
    """
    label = next((str(sample[name]) for name in ("cls", "label") if name in sample), str(sample.get(KEY, ""))[-12:])
    for name, value in sample.items():
        if name.rpartition(".")[2] in PICTURES and isinstance(value, bytes):
            return decode_picture(value, f"sample {sample.get(KEY, '')}"), label
        if isinstance(value, np.ndarray) and value.ndim in (2, 3) and value.dtype == np.uint8:
            return (value if value.ndim == 2 or value.shape[-1] in (3, 4) else value[0]), label
    text = next((value for value in sample.values() if isinstance(value, str) and value != sample.get(KEY)), "")
    return None, text[:80] or label


def decode_picture(data: bytes, what: str) -> np.ndarray[Any, Any]:
    """The pixels of an encoded picture: (height, width, 3), uint8.

    Raises:
        CorruptSampleError: it cannot be decoded, or declares so many pixels that decoding would fill the memory.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                return np.asarray(image.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CorruptSampleError(f"{what}: the picture declares so many pixels that it is not decoded ({error})") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise CorruptSampleError(f"{what}: the picture cannot be decoded ({error}): restore the file, or leave the sample out") from None
