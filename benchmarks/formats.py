"""Times reading and writing of stored samples beside webdataset, litdata, grain and Hugging Face datasets, on the same bytes.

    python benchmarks/formats.py [--samples 4000] [--bytes 3400] [--rounds 5] [--peers FOLDER] [--writing]

Samples have 3.4 KB, if not said otherwise, and a label, written once; all read the same tar file (litdata, Arrow and array_record files of
their own), warm, without decoding. Each round reads with all of them in turn. The table has medians over rounds of the CPU and the wall
time per sample, and the ratio of the CPU to that of our tar in the same round. Peers that are not installed are left out; `--peers` names
a folder where they are, made by `pip install --target FOLDER webdataset litdata grain array-record datasets`. Writing is compared with
what it cannot do without, in CPU time of all threads: the same bytes written by `os.write` and `fsync`, and the same checksums.
"""

import argparse
import contextlib
import hashlib
import importlib.util
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

from workbench.core import units
from workbench.core.display.table import Table

BYTES = 3400
Read = Callable[[], int]


def samples(count: int, size: int = BYTES) -> list[dict[str, Any]]:
    """Random bytes, as incompressible as pictures, and a label."""
    rng = random.Random(0)
    return [{"__key__": f"{i:08d}", "jpg": rng.randbytes(size), "cls": i % 10} for i in range(count)]


def readers(data: list[dict[str, Any]], folder: Path, left_out: list[str]) -> dict[str, tuple[str, Read]]:
    """Name → (order, function that reads all samples and gives their number)."""
    import workbench as wb

    shuffled = list(range(len(data)))
    random.Random(1).shuffle(shuffled)
    found: dict[str, tuple[str, Read]] = {}
    tar = folder / "tar"
    wb.data.write_shards(data, tar, shards=1, seed=None, quiet=True)
    for name in ("tar", "arrow", "lmdb", "npy", "tfrecord"):
        if name != "tar":
            wb.data.write_shards(data, folder / name, format=name, shards=1, seed=None, quiet=True)
        for check in (True, False):
            source = wb.data.open_source(folder / name, check=check)
            label = f"workbench, {name}{'' if check else ', unchecked'}"
            found[f"{label}, in order"] = ("in order", lambda source=source: sum(1 for _ in source))
            found[f"{label}, random"] = ("random", lambda source=source: sum(len(source[i]) > 2 for i in shuffled))
    shard = tar / "shard-000000.tar"
    found["tarfile, in order"] = ("in order", lambda: _tarfile(shard))
    for name, make in (("webdataset", _webdataset), ("datasets", _datasets), ("litdata", _litdata), ("grain", _grain)):
        if importlib.util.find_spec(name) is None:
            left_out.append(f"{name} is not installed")
            continue
        try:
            found.update(make(data, folder, shard, shuffled))
        except Exception as error:
            left_out.append(f"{name} failed: {type(error).__name__}: {str(error)[:200]}")
    return found


def _tarfile(shard: Path) -> int:
    with tarfile.open(shard) as tar:
        return sum(bool(tar.extractfile(member).read()) for member in tar) // 2  # type: ignore[union-attr]


def _webdataset(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Read]]]:
    import webdataset

    def read() -> int:
        return sum(1 for _ in webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False))

    yield "webdataset, tar, in order", ("in order", read)


def _datasets(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Read]]]:
    import datasets

    columns = {name: [sample[name] for sample in data] for name in ("jpg", "cls")}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "hf"))
    made = datasets.load_from_disk(str(folder / "hf"))
    yield "datasets, arrow, in order", ("in order", lambda: sum(1 for _ in made))
    yield "datasets, arrow, random", ("random", lambda: sum(len(made[i]) == 2 for i in shuffled))


def _litdata(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Read]]]:
    import litdata
    from litdata.streaming.writer import BinaryWriter

    out = folder / "litdata"
    writer = BinaryWriter(str(out), chunk_bytes="64MB")
    for number, sample in enumerate(data):
        writer.add_item(number, {"jpg": sample["jpg"], "cls": sample["cls"]})
    writer.done()
    writer.merge()
    made = litdata.StreamingDataset(str(out))
    yield "litdata, in order", ("in order", lambda: sum(1 for _ in made))
    again = litdata.StreamingDataset(str(out))
    yield "litdata, random", ("random", lambda: sum(len(again[i]) == 2 for i in shuffled))


def _grain(data: Any, folder: Path, shard: Path, shuffled: list[int]) -> Iterator[tuple[str, tuple[str, Read]]]:
    import grain.python as grain
    from array_record.python.array_record_module import ArrayRecordWriter

    path = str(folder / "a.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for sample in data:
        writer.write(sample["jpg"])
    writer.close()
    made = grain.ArrayRecordDataSource(path)
    yield "grain, array_record, in order", ("in order", lambda: sum(bool(made[i]) for i in range(len(made))))
    yield "grain, array_record, random", ("random", lambda: sum(bool(made[i]) for i in shuffled))


def timed(read: Read, count: int) -> tuple[float, float]:
    """Seconds of CPU (all threads) and of wall time per sample."""
    cpu, began = time.process_time(), time.perf_counter()
    done = read()
    assert done == count, f"{done} of {count} samples"
    return (time.process_time() - cpu) / count, (time.perf_counter() - began) / count


def compare(found: dict[str, tuple[str, Read]], count: int, rounds: int) -> Table:
    """All readers in turn, round by round."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, (_, read) in found.items():
            once = timed(read, count)
            if number:  # the first one fills caches
                took[name].append(once)
    rows = []
    for order in ("in order", "random"):
        ours = [cpu for cpu, _ in took[f"workbench, tar, {order}"]]
        names = [name for name, (kind, _) in found.items() if kind == order]
        for name in sorted(names, key=lambda name: statistics.median(cpu for cpu, _ in took[name])):
            cpu, wall = (statistics.median(values) for values in zip(*took[name], strict=True))
            ratio = statistics.median(mine[0] / own for mine, own in zip(took[name], ours, strict=True))
            rows.append((name, units.seconds(cpu), units.seconds(wall), units.times(ratio)))
    return Table(columns=("reader", "CPU per sample", "wall per sample", "CPU, times our tar's"), rows=rows)


def writing(data: list[dict[str, Any]], folder: Path, rounds: int) -> Table:
    """CPU of writing tar shards beside what it cannot do without, in turn; medians per sample."""
    import workbench as wb
    from workbench.data.formats.tar import write
    from workbench.data.sample import encode

    took: dict[str, list[float]] = {"disk": [], "cpu": [], "shard": [], "write_shards": []}
    size = 0
    for number in range(rounds):
        out = folder / f"write-{number}"
        began = time.process_time()
        wb.data.write_shards(data, out, shards=1, quiet=True)
        took["write_shards"].append(time.process_time() - began)
        blob = (out / "shard-000000.tar").read_bytes()
        size = len(blob)
        began = time.process_time()
        write(str(folder / f"one-{number}.tar"), ((sample["__key__"], sample) for sample in data), {"jpg": "bytes", "cls": "int"})
        took["shard"].append(time.process_time() - began)
        began = time.process_time()
        descriptor = os.open(folder / f"raw-{number}", os.O_WRONLY | os.O_CREAT)
        for at in range(0, size, 1 << 20):
            os.write(descriptor, blob[at : at + (1 << 20)])
        os.fsync(descriptor)
        os.close(descriptor)
        took["disk"].append(time.process_time() - began)
        began = time.process_time()
        for sample in data:
            for name in ("jpg", "cls"):
                part = encode(sample[name])
                zlib.crc32(part)
            hashlib.sha256(sample["jpg"]).digest()
        hashlib.sha256(blob).hexdigest()
        took["cpu"].append(time.process_time() - began)
        with contextlib.suppress(OSError):
            os.unlink(folder / f"raw-{number}")
    bound = [disk + cpu for disk, cpu in zip(took["disk"], took["cpu"], strict=True)]
    rows = []
    for name, words in (("disk", "the same bytes, os.write and fsync"), ("cpu", "the same checksums alone"), ("shard", "one shard"),
                        ("write_shards", "write_shards: plan, shuffle, shard, index, manifest")):  # fmt: skip
        share = statistics.median(least / own for least, own in zip(bound, took[name], strict=True))
        rows.append((words, units.seconds(statistics.median(took[name]) / len(data)), units.percent(share)))
    return Table(columns=("writing", "CPU per sample", "bound (both of the first) / own"), rows=rows, title=f"{units.bytes_(size)}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--bytes", type=int, default=BYTES, help="of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="", metavar="FOLDER", help="where the peers are installed")
    parser.add_argument("--writing", action="store_true", help="time writing only")
    given = parser.parse_args()
    if given.peers:
        sys.path.append(given.peers)
    warnings.simplefilter("ignore")
    data = samples(given.samples, given.bytes)
    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        print(writing(data, Path(folder), given.rounds), flush=True)
        if not given.writing:
            print(compare(readers(data, Path(folder), left_out), given.samples, given.rounds), flush=True)
    for line in left_out:
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
