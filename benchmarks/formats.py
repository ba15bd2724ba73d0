"""Times reading and writing of stored samples beside webdataset, litdata, grain and Hugging Face datasets, on the same bytes.

    python benchmarks/formats.py [--samples 4000] [--bytes 3400] [--rounds 5] [--peers FOLDER] [--writing] [--cold] [--latency SECONDS]

Samples have 3.4 KB, if not said otherwise, and a label, written once; all read the same tar file (litdata, Arrow and array_record files of
their own), warm, without decoding. Each round reads with all of them in turn. The table has medians over rounds of the CPU and the wall
time per sample, and the ratio to that of our tar in the same round: of the CPU, and with --cold and --latency of the wall time, since then
it is waiting that counts. --cold: before each reading everything is closed, and the system is asked to forget the files; opening counts.
--latency: from a server of S3 that runs beside and waits so long before each answer; ours and litdata read at random, as torch's
DataLoader asks them to: ours 32 samples at once, litdata one by one. Peers that are not installed are left out; `--peers` names a folder
where they are, made by `pip install --target FOLDER webdataset litdata grain array-record datasets`.

Writing is compared with the least that this machine needs for the same, each stage timed alone, in one thread, in the order of writing,
which is not that of memory. For a shard: its bytes written by `os.write` and `fsync`; the checksums of a manifest, once each (CRC-32 of
each field, SHA-256 of each sample and of the shard); and the bytes put together: numbers as text, the headers of all files at once by
numpy, and one copy of all parts. For `write_shards`, which also reads the samples and leaves an index, a manifest and the rows by which a
killed writer resumes: those files, the digests of dataset and index, one look for equal keys, and one reading of each sample from the
source. In CPU time the least is the sum; in wall time the larger of that sum over the number of cores and the time of the writes alone, and
the table says which. The line before each least has sums, writes and reading alone, without what is put together and looked for.
"""

import argparse
import collections
import contextlib
import functools
import gc
import hashlib
import importlib.util
import itertools
import os
import random
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.display.table import Table

BYTES = 3400
Read = Callable[[], int]
Open = Callable[[], Read]


def samples(count: int, size: int = BYTES) -> list[dict[str, Any]]:
    """Random bytes, as incompressible as pictures, and a label."""
    rng = random.Random(0)
    return [{"__key__": f"{i:08d}", "jpg": rng.randbytes(size), "cls": i % 10} for i in range(count)]


def readers(data: list[dict[str, Any]], folder: Path, left_out: list[str]) -> dict[str, tuple[str, Open]]:
    """Name → (order, function that opens and gives a function that reads all samples and gives their number)."""
    import workbench as wb

    shuffled = list(range(len(data)))
    random.Random(1).shuffle(shuffled)
    found: dict[str, tuple[str, Open]] = {}
    tar = folder / "tar"
    wb.data.write_shards(data, tar, shards=1, seed=None, quiet=True)
    for name in ("tar", "arrow", "lmdb", "npy", "tfrecord"):
        if name != "tar":
            wb.data.write_shards(data, folder / name, format=name, shards=1, seed=None, quiet=True)
        for check in (True, False):
            made = functools.partial(wb.data.open_source, folder / name, check=check)
            label = f"workbench, {name}{'' if check else ', unchecked'}"
            found[f"{label}, in order"] = ("in order", functools.partial(_in_order, made))
            found[f"{label}, random"] = ("random", functools.partial(_at_random, made, shuffled))
    shard = tar / "shard-000000.tar"
    found["tarfile, in order"] = ("in order", lambda: lambda: _tarfile(shard))
    for name, make in (("webdataset", _webdataset), ("datasets", _datasets), ("litdata", _litdata), ("grain", _grain)):
        _try(name, lambda make=make: make(data, folder, shard, shuffled), found, left_out)
    return found


def _try(name: str, make: Callable[[], Iterator[Any]], found: dict[str, tuple[str, Open]], left_out: list[str]) -> None:
    if importlib.util.find_spec(name) is None:
        left_out.append(f"{name} is not installed")
        return
    try:
        for label, (order, opened) in make():
            opened()()  # what fails, fails here
            found[label] = order, opened
    except Exception as error:
        left_out.append(f"{name} failed: {type(error).__name__}: {str(error)[:200]}")


def _in_order(make: Callable[[], Any]) -> Read:
    source = make()
    return lambda: sum(1 for _ in source)


def _at_random(make: Callable[[], Any], shuffled: list[int], at_once: int = 1) -> Read:
    source = make()
    if at_once == 1:
        return lambda: sum(bool(source[i]) for i in shuffled)
    batches = [shuffled[at : at + at_once] for at in range(0, len(shuffled), at_once)]
    return lambda: sum(len(source.__getitems__(batch)) for batch in batches)


def _tarfile(shard: Path) -> int:
    with tarfile.open(shard) as tar:
        return sum(bool(tar.extractfile(member).read()) for member in tar) // 2  # type: ignore[union-attr]


def _webdataset(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Open]]]:
    import webdataset

    made = functools.partial(webdataset.WebDataset, str(shard), shardshuffle=False, empty_check=False)
    yield "webdataset, tar, in order", ("in order", functools.partial(_in_order, made))


def _datasets(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Open]]]:
    import datasets

    columns = {name: [sample[name] for sample in data] for name in ("jpg", "cls")}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "hf"))
    made = functools.partial(datasets.load_from_disk, str(folder / "hf"))
    yield "datasets, arrow, in order", ("in order", functools.partial(_in_order, made))
    yield "datasets, arrow, random", ("random", functools.partial(_at_random, made, shuffled))


def _litdata(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Open]]]:
    import litdata
    from litdata.streaming.writer import BinaryWriter

    out = folder / "litdata"
    writer = BinaryWriter(str(out), chunk_bytes="64MB")
    for number, sample in enumerate(data):
        writer.add_item(number, {"jpg": sample["jpg"], "cls": sample["cls"]})
    writer.done()
    writer.merge()
    made = functools.partial(litdata.StreamingDataset, str(out))
    yield "litdata, in order", ("in order", functools.partial(_in_order, made))
    yield "litdata, random", ("random", functools.partial(_at_random, made, shuffled))


def _grain(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Open]]]:
    import grain.python as grain
    from array_record.python.array_record_module import ArrayRecordWriter

    (folder / "grain").mkdir()
    path = str(folder / "grain" / "a.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for sample in data:
        writer.write(sample["jpg"])
    writer.close()
    made = functools.partial(grain.ArrayRecordDataSource, path)
    order = list(range(len(data)))
    yield "grain, array_record, in order", ("in order", functools.partial(_at_random, made, order))
    yield "grain, array_record, random", ("random", functools.partial(_at_random, made, shuffled))
    yield "grain, array_record, random, 32 at once", ("random", functools.partial(_at_random, made, shuffled, 32))


def remote_readers(data: list[dict[str, Any]], folder: Path, options: dict[str, Any], left_out: list[str]) -> dict[str, tuple[str, Open]]:
    """As `readers`, of files that are uploaded to a server of S3 first."""
    import fsspec

    import workbench as wb

    readers(data, folder, [])  # writes the files
    server = options["endpoint_url"]
    # in these words all clients of S3 understand where the server is: boto3, s3fs and obstore
    os.environ |= {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1"}
    files = fsspec.filesystem("s3", **options)
    files.mkdir("bucket")
    for name in ("tar", "arrow", "litdata", "hf", "grain"):
        if (folder / name).is_dir():
            files.put(str(folder / name), f"bucket/{name}", recursive=True)
    shuffled = list(range(len(data)))
    random.Random(1).shuffle(shuffled)
    found: dict[str, tuple[str, Open]] = {}
    for name in ("tar", "arrow"):
        made = functools.partial(wb.data.open_source, f"s3://bucket/{name}", storage_options=options)
        found[f"workbench, {name}, in order"] = ("in order", functools.partial(_in_order, made))
        found[f"workbench, {name}, random"] = ("random", functools.partial(_at_random, made, shuffled, 32))

    def webdataset() -> Iterator[tuple[str, tuple[str, Open]]]:
        import webdataset

        made = functools.partial(
            webdataset.WebDataset, f"pipe:curl -s '{files.sign('bucket/tar/shard-000000.tar')}'", shardshuffle=False, empty_check=False
        )
        yield "webdataset, tar, in order", ("in order", functools.partial(_in_order, made))

    def hugging_face() -> Iterator[tuple[str, tuple[str, Open]]]:
        import datasets

        def made() -> Any:
            url = "s3://bucket/tar/shard-000000.tar"
            return datasets.load_dataset("webdataset", data_files=url, streaming=True, split="train", cache_dir=str(folder / "hf-cache"))

        yield "datasets, tar, in order", ("in order", functools.partial(_in_order, made))

    def hugging_face_arrow() -> Iterator[tuple[str, tuple[str, Open]]]:
        import datasets

        def made() -> Any:
            url = "s3://bucket/hf/*.arrow"
            return datasets.load_dataset("arrow", data_files=url, streaming=True, split="train", cache_dir=str(folder / "hf-cache"))

        yield "datasets, arrow, in order", ("in order", functools.partial(_in_order, made))

    def litdata() -> Iterator[tuple[str, tuple[str, Open]]]:
        import litdata
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # it has no option for that

        def made() -> Any:
            return litdata.StreamingDataset("s3://bucket/litdata", cache_dir=tempfile.mkdtemp(dir=folder))

        yield "litdata, in order", ("in order", functools.partial(_in_order, made))
        yield "litdata, random", ("random", functools.partial(_at_random, made, shuffled))

    def grain() -> Iterator[tuple[str, tuple[str, Open]]]:
        import grain.python

        made = functools.partial(grain.python.ArrayRecordDataSource, "s3://bucket/grain/a.array_record")
        yield "grain, array_record, random", ("random", functools.partial(_at_random, made, shuffled, 32))

    peers = (
        ("webdataset", webdataset),
        ("datasets", hugging_face),
        ("datasets", hugging_face_arrow),
        ("litdata", litdata),
        ("grain", grain),
    )
    for name, make in peers:
        _try(name, make, found, left_out)
    return found


def timed(read: Read, count: int) -> tuple[float, float]:
    """Seconds of CPU (all threads) and of wall time per sample."""
    cpu, began = time.process_time(), time.perf_counter()
    done = read()
    assert done == count, f"{done} of {count} samples"
    return (time.process_time() - cpu) / count, (time.perf_counter() - began) / count


def compare(found: dict[str, tuple[str, Open]], count: int, rounds: int, *, before: Callable[[], None] | None = None) -> Table:
    """All readers in turn, round by round.

    Args:
        found: by `readers`.
        count: samples.
        rounds: one more is read first, to fill caches.
        before: called before each reading, for which everything is opened anew; None = opened once.
    """
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    opened = {name: make() for name, (_, make) in found.items()} if before is None else {}
    for number in range(rounds + 1):
        for name, (_, make) in found.items():
            if before is not None:
                gc.collect()
                before()
            once = timed(opened[name] if before is None else lambda make=make: make()(), count)
            if number:
                took[name].append(once)
    which = 0 if before is None else 1
    rows = []
    for order in ("in order", "random"):
        ours = [both[which] for both in took[f"workbench, tar, {order}"]]
        names = [name for name, (kind, _) in found.items() if kind == order]
        for name in sorted(names, key=lambda name: statistics.median(both[which] for both in took[name])):
            cpu, wall = (statistics.median(values) for values in zip(*took[name], strict=True))
            ratio = statistics.median(mine[which] / own for mine, own in zip(took[name], ours, strict=True))
            rows.append((name, units.seconds(cpu), units.seconds(wall), units.times(ratio)))
    return Table(columns=("reader", "CPU per sample", "wall per sample", f"{('CPU', 'wall')[which]}, times our tar's"), rows=rows)


def forget(folder: Path) -> None:
    """Ask the system to forget the contents of all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # pages that were not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def writing(data: list[dict[str, Any]], folder: Path, rounds: int) -> Table:
    """CPU and wall time of writing a tar shard beside what it cannot do without, in turn; medians per sample."""
    import workbench as wb
    from workbench.data.formats.tar import write
    from workbench.data.manifest import dataset_digest
    from workbench.data.shard_plan import shuffled

    once = folder / "once"
    digest = wb.data.write_shards(data, once, shards=1, quiet=True).dataset_sha256  # loads what is needed, too
    blob, manifest, index = (once.joinpath(name).read_bytes() for name in ("shard-000000.tar", "manifest.json", "index.npz"))
    numbers = shuffled(len(data), 0).tolist()
    ordered = [data[number] for number in numbers]
    keys, labels = [sample["__key__"] for sample in ordered], [sample["cls"] for sample in ordered]
    columns = {"jpg": [sample["jpg"] for sample in ordered], "cls": list(map(b"%d".__mod__, labels))}
    beginnings = [b"3:cls%d:%b3:jpg%d:" % (len(cls), cls, len(jpg)) for jpg, cls in zip(*columns.values(), strict=True)]
    digests = _sums(columns, beginnings, blob)
    assert hashlib.sha256(b"".join(sorted(digests))).hexdigest() == digest
    parts = _parts(columns, blob)
    lengths, templates = [list(map(len, column)) for column in columns.values()], parts[:6:3]
    assert [head.tobytes() for heads in _headers(keys, templates, lengths) for head in heads] == parts[::6] + parts[3::6]
    others = [manifest, index, index + b"".join(digests)]
    source = wb.data.as_source(data)
    took: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        out = folder / f"write-{number}"
        runs: dict[str, Callable[[], Any]] = {
            "write_shards": lambda out=out: wb.data.write_shards(data, out, shards=1, quiet=True),
            "shard": lambda out=out: write(f"{out}.tar", ((s["__key__"], s) for s in ordered), {"jpg": "bytes", "cls": "int"}),
            "disk": lambda out=out: _write(blob, f"{out}.raw"),
            "others": lambda out=out: [_write(other, f"{out}.raw{place}") for place, other in enumerate(others)],
            "sums": lambda: _sums(columns, beginnings, blob),
            "headers": lambda: (list(map(b"%d".__mod__, labels)), _headers(keys, templates, lengths)),
            "copy": lambda: [b"".join(parts[at : at + 300]) and None for at in range(0, len(parts), 300)],
            "all": lambda: (dataset_digest(np.frombuffer(b"".join(digests), np.uint8)), hashlib.sha256(index), len(set(keys))),
            "source": lambda: [source.__getitems__(numbers[at : at + 256]) and None for at in range(0, len(numbers), 256)],
        }
        for name, run in runs.items():
            cpu, began = time.process_time(), time.perf_counter()
            run()
            mark = (time.process_time() - cpu) / len(data), (time.perf_counter() - began) / len(data)
            took.setdefault(name, []).append(mark)
        for path in (f"{out}.tar", f"{out}.raw", out / "shard-000000.tar", *(f"{out}.raw{place}" for place in range(len(others)))):
            os.unlink(path)
    cores = len(os.sched_getaffinity(0))

    def least(*names: str) -> list[tuple[float, float]]:
        both = [[took[name][number] for name in names] for number in range(rounds)]
        sums = [sum(cpu for cpu, _ in parts) for parts in both]
        walls = [sum(took[name][number][1] for name in names if name in ("disk", "others")) for number in range(rounds)]
        return [(cpu, max(cpu / cores, wall)) for cpu, wall in zip(sums, walls, strict=True)]

    rows = []
    for name, words in (
        ("disk", "the same bytes, os.write and fsync"),
        ("sums", "the same checksums of samples and shard"),
        ("headers", "numbers as text, headers of files"),
        ("copy", "one copy of all parts"),
        ("source", "the samples, read once in the order of writing"),
        ("others", "index, manifest and rows to resume by, os.write and fsync"),
        ("all", "digests of dataset and index, a look for equal keys"),
    ):
        cpu, wall = (statistics.median(values) for values in zip(*took[name], strict=True))
        rows.append((words, units.seconds(cpu), "", units.seconds(wall), ""))
    for name, words, needs, more in (
        ("shard", "one shard", ("disk", "sums"), ("headers", "copy")),
        ("write_shards", "write_shards", ("disk", "sums", "source", "others"), ("headers", "copy", "all")),
    ):
        for bound, what in ((least(*needs), "sums, writes and reading alone"), (least(*needs, *more), "the least")):
            cpu, wall = (statistics.median(values) for values in zip(*bound, strict=True))
            binds = f"the CPU, on {cores} cores" if wall <= cpu / cores * 1.001 else "the disk"
            shares = [units.percent(statistics.median(a[i] / b[i] for a, b in zip(bound, took[name], strict=True))) for i in (0, 1)]
            rows.append(
                (f"for {words}: {what} ({binds}, limits the wall time)", units.seconds(cpu), shares[0], units.seconds(wall), shares[1])
            )
        cpu, wall = (statistics.median(values) for values in zip(*took[name], strict=True))
        rows.append((words, units.seconds(cpu), "", units.seconds(wall), ""))
    names = ("writing", "CPU per sample", "share of what was taken", "wall per sample", "share of what was taken")
    return Table(columns=names, rows=rows, title=f"{len(data):,} samples, {units.bytes_(len(blob))}")


def _write(blob: bytes, path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    view = memoryview(blob)
    for at in range(0, len(blob), 1 << 20):
        os.write(descriptor, view[at : at + (1 << 20)])
    os.fsync(descriptor)
    os.close(descriptor)


def _sums(columns: dict[str, list[bytes]], beginnings: list[bytes], blob: bytes) -> list[bytes]:
    """All checksums; the digests of the samples. `beginnings`: what is hashed before each sample's picture."""
    for column in columns.values():
        collections.deque(map(zlib.crc32, column), maxlen=0)
    hashes = list(map(hashlib.sha256, beginnings))
    collections.deque(map(type(hashes[0]).update, hashes, columns["jpg"]), maxlen=0)
    hashlib.sha256(blob).hexdigest()
    return list(map(type(hashes[0]).digest, hashes))


def _parts(columns: dict[str, list[bytes]], blob: bytes) -> list[bytes]:
    """The parts of a shard: of each file its header, its bytes and padding."""
    parts, at = [], 0
    for value in itertools.chain.from_iterable(zip(*columns.values(), strict=True)):
        parts += [blob[at : at + 512], value, bytes(-len(value) % 512)]
        at += sum(map(len, parts[-3:]))
    assert b"".join([*parts, bytes(1024)]) == blob
    return parts


def _headers(keys: list[str], templates: list[bytes], lengths: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """The headers of all files, (samples, 512) for each field: all at once, by one header of each field, as keys have one length."""
    made = []
    names = np.frombuffer("".join(keys).encode(), np.uint8).reshape(len(keys), -1)
    for template, sizes in zip(templates, lengths, strict=True):
        head = np.frombuffer(template, np.uint8).copy()
        head[: names.shape[1]] = head[124:135] = 0
        head[148:156] = list(b"        ")
        digits = (np.array(sizes)[:, None] >> np.arange(30, -1, -3) & 7) + 48
        total = names.sum(1, np.int64) + digits.sum(1) + int(head.sum())
        heads = np.empty((len(keys), 512), np.uint8)
        heads[:] = head
        heads[:, : names.shape[1]], heads[:, 124:135] = names, digits
        heads[:, 148:154], heads[:, 154] = (total[:, None] >> np.arange(15, -1, -3) & 7) + 48, 0
        made.append(heads)
    return made


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--bytes", type=int, default=BYTES, help="of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="", metavar="FOLDER", help="where the peers are installed")
    parser.add_argument("--writing", action="store_true", help="time writing only")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS", help="read from a server of S3 that answers so late")
    given = parser.parse_args()
    if given.peers:
        sys.path.append(given.peers)
    warnings.simplefilter("ignore")
    data = samples(given.samples, given.bytes)
    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if given.writing:
            print(writing(data, folder, given.rounds))
        elif given.latency:
            from tests.data.formats import s3_beside

            options = stack.enter_context(s3_beside(given.latency))
            found = remote_readers(data, folder, options, left_out)
            print(compare(found, given.samples, given.rounds, before=lambda: None), flush=True)
        else:
            found = readers(data, folder, left_out)
            before = (lambda: forget(folder)) if given.cold else None
            print(compare(found, given.samples, given.rounds, before=before), flush=True)
    for line in left_out:
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
