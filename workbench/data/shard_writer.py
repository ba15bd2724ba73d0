"""write_shards: writes samples as shards of equal counts, shuffled once, always with the same bytes; continues where it was killed.

Each shard is written under another name, and renamed when it is on the disk; then a row in the work folder says that it is done. The
manifest is written last. Which samples a shard has follows from the arguments alone, so shards can be written in parallel and in any order.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core import run_directory, units
from workbench.core.checks import whole_number
from workbench.core.progress import ProgressLine
from workbench.core.synonyms import accept_synonyms
from workbench.data import sample as samples
from workbench.data.adapters import IterableSource, as_source, open_source
from workbench.data.formats import extension, writer
from workbench.data.manifest import (
    INDEX,
    MANIFEST,
    Array,
    Manifest,
    about_shard,
    packed,
    read_manifest,
    store,
    sync_names,
    unpacked,
    write_json,
    write_whole,
)
from workbench.data.sample import KEY, NameCollisionError, Sample, checked_key, digest, encode, kind_of, plain, schema_of
from workbench.data.shard_file import FEWEST, Pairs, Written, how_many
from workbench.data.shard_plan import TARGET, ShardPlan, check_space, plan_shards, shuffled
from workbench.data.source import Source
from workbench.data.storage import Storage

PROBE = 256
"""Samples that sizes and kinds are estimated from."""
PROBE_BYTES = 8 << 20
"""Of those samples, about so many bytes are hashed, by which a resumed writer knows its data; more would take long for large samples."""
WORK, LOCK, PLAN = ".writing", "lock", "plan.json"
COPY = "__copy__"
"""Where `transform` finds the number of the copy."""
OVERHEAD = {"tar": 1024, "folder": 0, "tfrecord": 60, "lmdb": 40}
"""Bytes that a format adds to a field (tar: a header, and padding of half a block in the mean) or to a sample."""


class WriterBusyError(ValueError):
    """Another writer is at work in the folder."""


class UnfinishedError(ValueError):
    """The folder has an unfinished dataset of other arguments, or a finished one."""


@dataclass(slots=True, kw_only=True)
class Job:
    """What each process that writes shards knows."""

    source: Source
    out: Path
    format: str
    schema: dict[str, str]
    order: Array
    edges: list[int]
    numbered: bool
    transform: Callable[[Sample], Any] | None
    copies: int
    """Samples that are made of one of the source, one after the other."""
    names: list[str] = field(default_factory=list)
    probe: str = ""
    """Digest of some samples, by which a resumed writer knows that they are the same."""

    def blocks(self, shard: int) -> Iterator[tuple[Sequence[str], Sequence[Sample]]]:
        """The keys and samples of a shard, many at once where they are small."""
        numbers, many = iter(self.order[self.edges[shard] : self.edges[shard + 1]].tolist()), FEWEST
        while some := list(itertools.islice(numbers, many)):
            found: list[Sample] = self.source.__getitems__([number // self.copies for number in some] if self.copies > 1 else some)
            if len(found) != len(some):
                raise ValueError(f"{len(some) - len(found)} samples of {self.source!r} are damaged: {self.source.damaged[-1]}")
            keys, many = self._usual_keys(found), how_many(found)
            if keys is None:
                keys, found = map(list, zip(*map(self.made, some, found), strict=True))
                many = min(many, how_many(found))
            yield keys, found

    def _usual_keys(self, found: list[Sample]) -> list[str] | None:
        """The keys of samples that are written as they are: where nothing is to be done to them, which is seen at once; else None."""
        if self.transform is not None or self.numbered or self.copies > 1 or not self.schema:
            return None
        try:
            for name, kind in self.schema.items():
                if samples.USUAL_KINDS.get(*set(map(type, map(itemgetter(name), found)))) != kind:
                    return None
        except (KeyError, TypeError):  # a field is missing, or has several types
            return None
        if set(map(len, found)) != {len(self.schema) + 1}:  # the fields of the schema, a key, and no other
            return None
        keys = [sample.get(KEY, "") for sample in found]
        return keys if samples.are_usual(keys) else None

    def made(self, number: int, sample: Sample) -> tuple[str, Sample]:
        """Key and sample as they are written, of a sample of the source."""
        key = str(sample.get(KEY, f"{number:08d}"))
        if self.transform is not None:
            sample = self.transform({**sample, COPY: number % self.copies} if self.copies > 1 else dict(sample))
            sample = {name: plain(value, name) for name, value in sample.items() if name != COPY}
        if self.numbered:
            key = f"{number:08d}"
        elif "." in key:
            folder, slash, last = key.rpartition("/")
            key = folder + slash + last.replace(".", "_")
        if self.copies > 1 and not self.numbered:
            key = f"{key}-{number % self.copies}"
        for name, value in sample.items() if self.schema else ():
            if name == KEY or value is None or self.schema.get(name, "") == samples.USUAL_KINDS.get(type(value)):
                continue
            if name not in self.schema:
                raise ValueError(
                    f"sample {number} ({key:.60}) has a field {name!r} that the first {PROBE} samples of the source lack: "
                    f"give schema={{…, {name!r}: {kind_of(value, name)!r}}}"
                )
            if (kind := kind_of(value, name)) == "array":  # as every format gives it back
                sample[name] = np.asarray(value, value.dtype.newbyteorder("="), order="C")
            elif kind == "int" and self.schema[name] == "float":
                sample[name] = float(value)
            if kind != self.schema[name] and (kind, self.schema[name]) != ("int", "float"):
                raise ValueError(f"sample {number} ({key:.60}), field {name!r} is {kind}, and the schema says {self.schema[name]}")
        return checked_key(key, dots=False), sample


_job: Job | None = None  # of this worker process


def _begin(job: Job) -> None:
    global _job
    _job = job


def _write_in_worker(shard: int) -> int:
    assert _job is not None
    return len(write_one(_job, shard)["lengths"])


def write_one(job: Job, shard: int) -> dict[str, Array]:
    """Write a shard: under another name, then renamed, then noted as done. Its rows."""
    name, work = job.names[shard], job.out / WORK
    part = work / f"{name}.part"
    _remove(part)
    try:
        done = writer(job.format)(str(part), Pairs(job.blocks(shard)), job.schema)
    except OSError as error:
        _remove(part)
        run_directory.raise_if_full(job.out, error, "Finished shards stay: free some space and call again with the same arguments")
        raise
    except BaseException:
        _remove(part)
        raise
    target = job.out / name
    _remove(target)
    os.replace(part, target)
    rows = _rows(done)
    write_whole(work / f"{name}.done", packed(rows))
    return rows


def _rows(done: Written) -> dict[str, Array]:
    """The rows of a shard, with its bytes and SHA-256."""
    return {**done.rows.arrays(), "about": np.frombuffer(f"{done.bytes} {done.sha256}".encode(), np.uint8)}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@accept_synonyms
def write_shards(
    source: Any,
    out: str | os.PathLike[str],
    *,
    format: str = "tar",
    shard_bytes: int = TARGET,
    shards: int | None = None,
    readers: int = 1,
    seed: int | None = 0,
    keys: str = "source",
    transform: Callable[[Sample], Any] | None = None,
    copies: int = 1,
    schema: Mapping[str, str] | None = None,
    workers: int = 0,
    start_method: str = "forkserver",
    description: str = "",
    licence: str = "",
    provenance: str = "",
    preprocessing: Sequence[str] = (),
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    """Write samples as shards, with a manifest that has checksums of every shard and sample.

    The same samples and arguments give the same bytes, whatever the number of workers. Called again after a kill, it keeps finished shards
    and gives the same bytes as without the kill. Shards have equal numbers of samples, within one.

    Args:
        source: anything that `as_source` accepts.
        out: folder to write; it is created. It must not contain a finished dataset, unless `overwrite`.
        format: format of the shards: "tar" (WebDataset reads it), "tfrecord", "parquet", "parquet-untuned", "arrow", "hdf5", "lmdb", "npy"
            or "folder".
        shard_bytes: approximate bytes per shard.
        shards: number of shards; None = by `shard_bytes`, but at least four for each reader.
        readers: ranks × workers that will read them; their shares are made as equal as possible.
        seed: seed of a shuffle of all samples before they are written; None = keep the order. Then a source sorted by class gives shards of
            one class, and readers that shuffle shards get batches of few classes.
        keys: "source" = the samples' own keys, with dots replaced by "_"; "number" = their numbers.
        transform: a function from a sample to another (decode, resize, encode); with workers, it must be defined in a module.
        copies: number of samples made from each sample of the source; `transform` finds the number of the copy under "__copy__".
        schema: field → kind; None = the source's, or that of its first samples.
        workers: number of writing processes; 0 = this process writes.
        start_method: start method of the workers: "forkserver", "spawn" or "fork".
        description: what the data are, for the manifest.
        licence: licence of the data, such as "CC-BY-4.0".
        provenance: where the samples come from, for the manifest.
        preprocessing: what `transform` does, in words.
        overwrite: replace a finished dataset in `out`.
        quiet: show no progress.

    Returns:
        The manifest.

    Raises:
        ValueError: an argument is wrong, two keys are equal, or a sample cannot be stored.
        WriterBusyError: another writer is writing into the folder.
        UnfinishedError: the folder has a finished dataset, or an unfinished one with other arguments.
        DiskFullError: the predicted bytes do not fit, or the disk became full. Finished shards stay.
    """
    given = as_source(source)
    root = Path(out)
    for name, value in (("shard_bytes", shard_bytes), ("readers", readers), ("copies", copies)):
        whole_number(name, value, least=1)
    whole_number("workers", workers, least=0)
    if keys not in ("source", "number"):
        raise ValueError(f"keys={keys!r}: allowed are 'source', 'number'")
    end = extension(format)
    writer(format)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        if (root / MANIFEST).exists():
            for left in (root / WORK).iterdir():  # by a writer that was killed after it had written the manifest
                if left.name != LOCK:
                    _remove(left)
            if not overwrite:
                raise UnfinishedError(f"{root} has a finished dataset: give another folder, or overwrite=True")
            if given.path and root.resolve() in (place := Path(given.path).resolve(), *place.parents):
                raise ValueError(f"the source lies in {root}, which overwrite=True would remove: write into another folder")
        if isinstance(given, IterableSource):
            given = _spooled(given, root / WORK, keys == "number")
        if not len(given):
            raise ValueError(f"{given!r} has no sample to write")
        job = Job(
            source=given,
            out=root,
            format=format,
            schema=dict(schema or {}),
            order=np.arange(0),
            edges=[],
            numbered=keys == "number",
            transform=transform,
            copies=copies,
        )
        plan = _plan(job, schema, shard_bytes, readers, shards, seed)
        check_space(root, plan)
        if (root / MANIFEST).exists():
            _clear(root)
        job.names = [f"shard-{number:06d}{end}" for number in range(plan.shards)]
        made_by = getattr(transform, "__qualname__", type(transform).__name__) if transform else ""
        same = {"format": format, "count": plan.count, "shards": plan.shards, "schema": job.schema, "samples": job.probe}
        _resume(job, {**same, "seed": seed, "keys": keys, "copies": copies, "transform": made_by})
        return _finish(
            job,
            _write_all(job, workers, start_method, quiet),
            Manifest(
                format=format,
                count=plan.count,
                schema=job.schema,
                shards=(),
                payload_bytes=0,
                dataset_sha256="",
                index_sha256="",
                seed=seed,
                description=description,
                licence=licence,
                provenance=provenance,
                preprocessing=tuple(preprocessing),
                classes=tuple(getattr(given, "classes", ()) or ()),
            ),
        )


def _plan(job: Job, schema: Mapping[str, str] | None, target: int, readers: int, shards: int | None, seed: int | None) -> ShardPlan:
    """How the samples are cut, from some of them; sets the order, the edges and the schema of the job."""
    count = len(job.source) * job.copies
    some = min(PROBE, count)
    places = sorted({round(i * (count - 1) / max(1, some - 1)) for i in range(some)})
    probe = [job.made(place, job.source[place // job.copies])[1] for place in places]
    if not schema:
        found = {} if job.transform is not None else dict(getattr(job.source, "_schema", None) or {})
        job.schema = {**found, **schema_of(probe)}
    for name in job.schema:
        if not name or set(name) & set("/\\\0"):
            raise samples.UnsafeNameError(f"the field {name[:60]!r} cannot be part of a file's name: rename it")
    sizes = [sum(len(encode(value)) for name, value in sample.items() if name != KEY and value is not None) for sample in probe]
    payload = float(np.mean(sizes)) * count
    added = OVERHEAD.get(job.format, 16) * (len(job.schema) if job.format == "tar" else 1)
    plan = plan_shards(count, payload, target=target, readers=readers, shards=shards, stored=payload + added * count)
    job.order, job.edges = shuffled(count, seed), plan.edges
    job.probe = hashlib.sha256(b"".join(map(digest, probe[:: 1 + sum(sizes) // PROBE_BYTES]))).hexdigest()
    return plan


def _resume(job: Job, identity: dict[str, Any]) -> None:
    """Note what is being written, or check that an unfinished dataset is of the same samples and arguments."""
    work = job.out / WORK
    work.mkdir(exist_ok=True)
    path = work / PLAN
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if different := [name for name in identity if before.get(name) != identity[name]]:
            raise UnfinishedError(
                f"{job.out} has an unfinished dataset of other samples or arguments ({', '.join(different)} differ): call with those, "
                f"or remove {work} and the shards beside it"
            )
    else:
        write_json(path, identity)


def _done_of(job: Job, shards: Iterable[int]) -> dict[int, dict[str, Array]]:
    """The rows of those shards that are on the disk, as they were noted; the others have to be written."""
    found = {}
    for shard in shards:
        noted, target = job.out / WORK / f"{job.names[shard]}.done", job.out / job.names[shard]
        if noted.exists() and target.exists():
            rows = unpacked(noted.read_bytes(), str(noted))
            if not target.is_file() or target.stat().st_size == int(about_shard(rows)[0]):
                found[shard] = rows
    return found


def _write_all(job: Job, workers: int, start_method: str, quiet: bool) -> list[dict[str, Array]]:
    """Write the shards that are not done yet; the rows of all."""
    rows = _done_of(job, range(len(job.names)))
    waiting = [shard for shard in range(len(job.names)) if shard not in rows]
    began, total = time.monotonic(), job.edges[-1]
    written = total - sum(job.edges[shard + 1] - job.edges[shard] for shard in waiting)
    before = written

    def text() -> str:
        took = time.monotonic() - began
        speed = (written - before) / took if took else 0.0
        left = f", {units.seconds((total - written) / speed)} left" if speed else ""
        return f"write_shards: {written:,} of {total:,} samples, {units.rate(speed)}{left}"

    line = ProgressLine(text, notebook=not quiet) if not quiet else None
    if not workers:
        for shard in waiting:
            rows[shard] = write_one(job, shard)
            written += len(rows[shard]["lengths"])
            if line:
                line.show()
    else:
        with _pool(job, min(workers, max(1, len(waiting))), start_method) as pool:
            running = {pool.submit(_write_in_worker, shard) for shard in waiting}
            try:
                while running:
                    ready, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    written += sum(one.result() for one in ready)
                    if line:
                        line.show()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        rows |= _done_of(job, waiting)
    if line:
        line.close(text())
    return [rows[shard] for shard in range(len(job.names))]


def _pool(job: Job, workers: int, start_method: str) -> ProcessPoolExecutor:
    if start_method not in ("forkserver", "spawn", "fork"):
        raise ValueError(f"start_method={start_method!r}: allowed are 'forkserver', 'spawn', 'fork'")
    if start_method != "fork":
        for what, value in (("source", job.source), ("transform", job.transform)):
            try:
                pickle.dumps(value)
            except Exception as error:
                raise ValueError(
                    f"the {what} cannot be sent to workers ({error}): define it in a module, or use workers=0 or start_method='fork'"
                ) from None
    return ProcessPoolExecutor(workers, mp_context=get_context(start_method), initializer=_begin, initargs=(job,))


def _finish(job: Job, rows: list[dict[str, Array]], about: Manifest) -> Manifest:
    """Write index and manifest; the work folder goes."""
    try:
        manifest = store(job.out, job.names, rows, about)
    except NameCollisionError:
        for name in (WORK, *job.names):
            _remove(job.out / name)
        raise
    shutil.rmtree(job.out / WORK, ignore_errors=True)
    return manifest


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Inside, no other writer works in the folder."""
    (root / WORK).mkdir(exist_ok=True)
    for place in (root / WORK, root / WORK / LOCK, root / WORK / PLAN):
        if place.is_symlink():
            raise samples.UnsafeNameError(f"{place} is a symbolic link, which a writer would follow out of the folder: remove it")
    with open(root / WORK / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WriterBusyError(f"another writer is at work in {root}: wait until it has finished, or give another folder") from None
        try:
            yield
        finally:
            if not (root / WORK / PLAN).exists():
                shutil.rmtree(root / WORK, ignore_errors=True)


def _clear(root: Path) -> None:
    """Remove a finished dataset: what its manifest names, and nothing else."""
    storage = Storage(root)
    manifest = read_manifest(storage)
    (root / MANIFEST).unlink()
    sync_names(root)  # before the shards go: a manifest says that they are there
    for name in (INDEX, *(shard.name for shard in manifest.shards if manifest)) if manifest else ():
        _remove(Path(storage.path(name)))


def _spooled(source: Source, work: Path, numbered: bool) -> Source:
    """A source that can only be gone through, written once as a tar file in the order in which it comes."""
    folder = work / "spool"
    _remove(folder)
    folder.mkdir()
    schema = schema_of(itertools.islice(source, PROBE))
    if not schema:
        raise ValueError(f"{source!r} has no sample to write")

    def keyed() -> Iterator[tuple[str, Sample]]:
        for number, sample in enumerate(source):
            if strange := set(sample) - set(schema) - {KEY}:
                raise ValueError(f"a sample has a field {strange.pop()!r} that the first {PROBE} lack: give each sample the same fields")
            yield f"{number:08d}" if numbered else str(sample[KEY]), sample

    done = writer("tar")(str(folder / "spool.tar"), keyed(), schema)
    about = Manifest(format="tar", count=0, schema=schema, shards=(), payload_bytes=0, dataset_sha256="", index_sha256="")
    store(folder, ["spool.tar"], [_rows(done)], about)
    return open_source(folder)
