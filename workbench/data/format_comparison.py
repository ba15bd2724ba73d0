"""compare_formats: stores some of the user's samples in every format and times how they are read, cold and warm, in order and at random."""

import contextlib
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.core.checks import check_budget, choice, whole_number
from workbench.core.progress import Waiting
from workbench.core.synonyms import accept_synonyms
from workbench.data.adapters import as_source, open_source
from workbench.data.analysis.format_costs import AS_IT_IS, PREPARED, FormatComparison, Reading, StoredFormat, fastest
from workbench.data.conversion import Prepare
from workbench.data.data_card import decode_picture
from workbench.data.formats import FORMATS
from workbench.data.sample import KEY, PICTURES, CorruptSampleError, Sample, encode
from workbench.data.shard_writer import write_shards
from workbench.data.source import MappedSource, Source, take
from workbench.data.storage import MissingPackageError, Storage

ORDERS = ("random", "sequential")
FORGET = 100_000
"""Files of a folder that the system is asked to forget at most: it takes 10 µs each."""
TRANSFORMED = 64
"""Samples on which a transformation is timed, at most."""
NEEDS = {"lmdb": "lmdb", "parquet": "pyarrow", "parquet-untuned": "pyarrow", "arrow": "pyarrow", "hdf5": "h5py"}


@accept_synonyms
def compare_formats(
    source: Any,
    formats: Sequence[str] | None = None,
    *,
    order: str = "random",
    samples: int = 500,
    batch_size: int = 32,
    rounds: int = 3,
    folder: str | os.PathLike[str] | None = None,
    remote: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    resize: int | None = None,
    transform: Callable[[Sample], Any] | None = None,
    budget_s: float = 60.0,
    quiet: bool = False,
    **options: Any,
) -> FormatComparison:
    """Measure on this machine what reading your samples costs in each format, and recommend a format.

    Some samples are written in each format into a temporary folder, and read in random batches and in order, cold and warm. Cold means that
    the system was asked to drop the files from its cache (`posix_fadvise` after `fsync`, which a network file system may ignore). Rounds of
    all formats are interleaved, and the fastest counts. The source itself is read too.

    Args:
        source: anything that `as_source` accepts. For a mapped source (`source.map(function)`), the stored samples are compared, and the
            function is timed.
        formats: names of formats; None = all whose packages are installed.
        order: the order in which you will read, "random" or "sequential", for which the recommendation is made.
        samples: number of samples to compare with; they are kept in memory while they are written.
        batch_size: samples in a random batch. Use your loader's batch size, since a server answers a batch in one round of requests.
        rounds: number of rounds of reading.
        folder: a folder on the disk to measure; None = the temporary directory, which may be in memory.
        remote: also measure a URL such as "s3://bucket/folder": each format is uploaded, read and removed there.
        storage_options: options of fsspec, with `remote`.
        resize: shorter side in pixels of the pictures stored as "decoded".
        transform: what your dataset does with a sample after reading it (decoding, augmentation). Its CPU time is measured, from which a
            diagnosis learns how much of a loader's work is reading.
        budget_s: seconds after which no further round starts.
        quiet: show no progress.
        options: arguments of `open_source`, if a path is given.

    Raises:
        ValueError: an argument is wrong, or there is no sample.
    """
    choice("order", order, ORDERS)
    whole_number("samples", samples, least=1)
    whole_number("batch_size", batch_size, least=1)
    whole_number("rounds", rounds, least=1)
    check_budget(budget_s, limited=True)
    given, functions = as_source(source, **options), [transform] if transform is not None else []
    while isinstance(given, MappedSource):
        functions = [given.function, *functions]
        given = given.source
    notes: list[str] = []
    part, kept = _kept(given, samples)
    payload = sum(len(encode(value)) for sample in kept for name, value in sample.items() if name != KEY) / len(kept)
    root = Path(tempfile.mkdtemp(prefix="wb-formats-", dir=folder))
    sources: dict[tuple[str, str], Source] = {}
    try:
        with Waiting("compare_formats", budget_s, begin="writing") if not quiet else contextlib.nullcontext(_Silent()) as line:
            stored = _write(kept, formats, root, resize, notes, line, sources)
            if part is not None:
                size = given.stored_bytes()
                sources[AS_IT_IS, "local"] = part
                rows = float(given.facts().get("rows_read_for_one", 1.0))
                each = size / len(given) if size else payload
                stored.insert(0, StoredFormat(format=AS_IT_IS, stored_bytes=each, write_seconds=0.0, rows_read_for_one=rows))
            if remote is not None:
                _upload(root, remote, storage_options, sources, notes, line)
            readings = _measure(sources, batch_size, rounds, budget_s, line)
    finally:
        for one in sources.values():
            one.close()
        shutil.rmtree(root, ignore_errors=True)
        if remote is not None:
            _remove_remote(remote, storage_options)
    return FormatComparison(
        samples=len(kept),
        payload_bytes=payload,
        readings=tuple(readings),
        formats=tuple(stored),
        order=order,
        batch_size=batch_size,
        decode_cpu=_decode_cpu(kept),
        transform_cpu=_transform_cpu(kept, functions, rounds) if functions else None,
        notes=tuple(notes),
    )


class _Silent:
    """A line of progress that nobody sees."""

    def say(self, now: str) -> None:
        """What comes now."""


def _kept(source: Source, samples: int) -> tuple[Source | None, list[Sample]]:
    """The part of the source that is compared, if it can be read by number, and its samples."""
    try:
        part = source if len(source) <= samples else take(source, samples)
        return part, part.__getitems__(list(range(len(part))))
    except TypeError:  # it can only be gone through
        found = [sample for sample, _ in zip(source, range(samples), strict=False)]
        if not found:
            raise ValueError(f"{source!r} has no sample") from None
        return None, found


def _write(
    kept: list[Sample],
    formats: Sequence[str] | None,
    root: Path,
    resize: int | None,
    notes: list[str],
    line: Any,
    sources: dict[tuple[str, str], Source],
) -> list[StoredFormat]:
    stored: list[StoredFormat] = []
    wanted = list(FORMATS if formats is None else formats)
    pictures = any(name.rpartition(".")[2] in PICTURES for name in kept[0])
    for name in [*wanted, *([PREPARED] if pictures else [])]:
        line.say(f"writing {name}")
        prepare = Prepare(resize=resize) if name == PREPARED else None
        began = time.perf_counter()
        try:
            manifest = write_shards(
                kept, root / name, format="npy" if prepare else name, shards=1, keys="number", transform=prepare, quiet=True
            )
        except MissingPackageError as error:
            if formats is not None:
                raise
            notes.append(f"{name} was left out: {error}")
            continue
        except CorruptSampleError as error:
            notes.append(f"pictures were not stored decoded: {error}")
            continue
        took = (time.perf_counter() - began) / len(kept)
        made = open_source(root / name, format="npy" if prepare else name)
        sources[name, "local"] = made
        rows = min(float(made.facts().get("rows_read_for_one", 1.0)), len(kept))
        needs, size = NEEDS.get(name, ""), manifest.stored_bytes / len(kept)
        stored.append(StoredFormat(format=name, stored_bytes=size, write_seconds=took, rows_read_for_one=rows, needs=needs))
    return stored


def _upload(
    root: Path, remote: str, options: Mapping[str, Any] | None, sources: dict[tuple[str, str], Source], notes: list[str], line: Any
) -> None:
    target = Storage(remote, options)
    for name, _ in list(sources):
        if name == AS_IT_IS:
            continue
        if name == "lmdb":
            notes.append("lmdb cannot be read from a server")
            continue
        line.say(f"uploading {name}")
        for path in sorted((root / name).rglob("*")):
            if path.is_file():
                target.file_system.pipe_file(target.path(f"{name}/{path.relative_to(root / name).as_posix()}"), path.read_bytes())
        kind = "npy" if name == PREPARED else name
        sources[name, "remote"] = open_source(f"{target.root}/{name}", format=kind, storage_options=options)


def _remove_remote(remote: str, options: Mapping[str, Any] | None) -> None:
    target = Storage(remote, options)
    for name in (*FORMATS, PREPARED):
        if target.exists(name):
            target.file_system.rm(target.path(name), recursive=True)


def _measure(sources: Mapping[tuple[str, str], Source], batch_size: int, rounds: int, budget_s: float, line: Any) -> list[Reading]:
    """The fastest reading of each way, over rounds in which all sources are read in turn."""
    found: dict[tuple[str, str, str, str], list[Reading]] = {}
    began = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - began > budget_s:
            break
        for (name, place), source in sources.items():
            line.say(f"reading {name}, {place}, round {number + 1}")
            for way in ORDERS:
                for cache in ("cold", "warm") if place == "local" else ("cold",):
                    if cache == "cold":
                        forget(source)
                    reading = timed(source, name, place, way, cache, seed=number, batch_size=batch_size)
                    found.setdefault((name, place, way, cache), []).append(reading)
    return [fastest(readings) for readings in found.values()]


def timed(source: Source, name: str, place: str, order: str, cache: str, *, seed: int = 0, batch_size: int = 32) -> Reading:
    """Read all samples of a source once; what one costs."""
    count = len(source)
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    disk = _disk_bytes()
    cpu, began = time.process_time(), time.perf_counter()
    done = 0
    for batch in _batches(source, numbers if order == "random" else None, batch_size):
        done += len(batch)
    wall, spent, after = time.perf_counter() - began, time.process_time() - cpu, _disk_bytes()
    read = (after - disk) / done if disk is not None and after is not None and place == "local" else None
    return Reading(
        format=name,
        place=place,
        order=order,
        cache=cache,
        seconds=wall / done,
        cpu=spent / done,
        disk_bytes=read if cache == "cold" else None,
    )


def _batches(source: Source, numbers: list[int] | None, batch_size: int) -> Iterator[list[Any]]:
    if numbers is None:
        yield from ([sample] for sample in source)
        return
    for first in range(0, len(numbers), batch_size):
        yield source.__getitems__(numbers[first : first + batch_size])


def forget(source: Source) -> None:
    """Close a source and ask the system to forget the contents of its files, so that the next reading comes from the disk."""
    source.close()
    path = Path(source.path)
    if "://" in source.path or not source.path or not path.exists():
        return
    for file in itertools.islice(path.rglob("*"), FORGET) if path.is_dir() else (path,):
        if file.is_file() and hasattr(os, "posix_fadvise"):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that were not written yet would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _disk_bytes() -> int | None:
    """Bytes that this process has read from disks; None = the system does not say."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return next((int(row.split()[1]) for row in text.splitlines() if row.startswith("read_bytes")), None)


def _decode_cpu(kept: Sequence[Sample]) -> float:
    """CPU seconds that decoding the picture of a sample takes; 0 = there are none."""
    found = [value for sample in kept[:64] for name, value in sample.items() if name.rpartition(".")[2] in PICTURES]
    pictures = [value for value in found if isinstance(value, bytes)]
    began = time.process_time()
    for picture in pictures:
        try:
            decode_picture(picture, "a sample")
        except CorruptSampleError:
            continue
    return (time.process_time() - began) / len(pictures) if pictures else 0.0


def _transform_cpu(kept: Sequence[Sample], functions: Sequence[Callable[[Any], Any]], rounds: int) -> float:
    """CPU seconds per sample of functions that are called one after the other, in the round that was disturbed least."""
    took = []
    for _ in range(rounds):
        copies: list[Any] = [dict(sample) for sample in kept[:TRANSFORMED]]  # which they may change
        began = time.process_time()
        for sample in copies:
            for function in functions:
                sample = function(sample)
        took.append((time.process_time() - began) / len(copies))
    return min(took)
