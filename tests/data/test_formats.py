"""One conformance suite for all formats: the same samples by number, in batches, in order and from workers; damage is found; S3."""

import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import workbench as wb
from tests.data.formats import COUNT, SCHEMA, Latency, first, s3_options, s3_server, samples, write
from workbench.data.formats import FORMATS
from workbench.data.formats.tfrecord import build_example, crc32c, parse_example
from workbench.data.manifest import digest_of
from workbench.data.sample import CorruptSampleError, digest
from workbench.data.storage import DataMissingError, MissingPackageError, need

LIBRARIES = {"parquet": "pyarrow", "parquet-untuned": "pyarrow", "arrow": "pyarrow", "hdf5": "h5py", "lmdb": "lmdb"}
EXPECTED = digest_of(sample for _, sample in samples())


def source_of(name: str, folder: Path) -> Any:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason="needs the extra formats")
    path = write(name, folder)
    if name == "parquet-untuned":
        return wb.data.open_source(path, format=name)
    return wb.data.open_source(path)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_samples(tmp_path: Path, name: str) -> None:
    source = source_of(name, tmp_path)
    assert source.format == name
    order = list(range(COUNT))
    random.Random(1).shuffle(order)
    one = [source[i] for i in order]
    assert digest_of(one) == EXPECTED
    assert sorted(sample["__key__"] for sample in one) == sorted(key for key, _ in samples())
    for sample in one[:3]:
        expected = dict(samples())[sample["__key__"]]
        assert set(sample) == set(expected)
        assert all(type(sample[name]) is type(expected[name]) for name in expected)
        assert sample["npy"].dtype == np.int16
    assert [digest(sample) for sample in source[order]] == [digest(sample) for sample in one]
    assert [digest(sample) for sample in source.__getitems__([3, 3, 1])] == [digest(source[i]) for i in (3, 3, 1)]
    assert digest_of(source) == EXPECTED
    assert digest_of(pickle.loads(pickle.dumps(source))) == EXPECTED
    assert source.schema == SCHEMA or set(source.schema) == set(SCHEMA)
    assert source.stored_bytes() > 5000
    source.close()
    assert digest(source[order[0]]) == digest(one[0])  # it opens again
    child = os.fork()
    if not child:
        os._exit(0 if digest_of(source) == EXPECTED else 1)
    assert os.waitpid(child, 0)[1] == 0


def batches(source: Any, method: str | None, workers: int) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(
        source, batch_size=5, num_workers=workers, shuffle=True, collate_fn=list, multiprocessing_context=method if workers else None
    )
    return (sample for batch in loader for sample in batch)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_format_is_right_in_workers_however_they_start(tmp_path: Path, method: str) -> None:
    """All formats in one dataset, so that each start method starts its workers twice and not eighteen times."""
    sources = [source_of(name, tmp_path) for name in FORMATS]
    assert all(source[0] for source in sources)  # opened here, before the workers are started
    for workers in (0, 1, 2):
        found: dict[int, list[Any]] = {}
        for number, sample in batches(Numbered(sources), method, workers):
            found.setdefault(number, []).append(sample)
        assert {number: digest_of(some) for number, some in found.items()} == dict.fromkeys(range(len(sources)), EXPECTED)


class Numbered:
    """Several sources as one dataset; each sample with the number of its source."""

    def __init__(self, sources: list[Any]) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return COUNT * len(self.sources)

    def __getitem__(self, index: int) -> Any:
        return index // COUNT, self.sources[index // COUNT][index % COUNT]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("folder", "npy")])
def test_a_truncated_file_is_damage_and_one_that_is_gone_is_missing(tmp_path: Path, name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason="needs the extra formats")
    path = first(write(name, tmp_path))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptSampleError, match=str(path)):
        list(wb.data.open_source(path.parent, format=name))
    path.unlink()
    (path.parent / "other.txt").write_text("x")
    if name != "tar":
        with pytest.raises((DataMissingError, IndexError)):
            wb.data.open_source(path.parent, format=name)[0]


def test_a_flipped_bit_of_a_record_is_found(tmp_path: Path) -> None:
    path = first(write("tfrecord", tmp_path))
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(CorruptSampleError):
            list(wb.data.open_source(path))
    path.write_bytes(whole)
    assert len(list(wb.data.open_source(path, check=False))) == COUNT


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=80), st.integers(0, 300))
def test_the_crc_is_that_of_its_definition(data: bytes, repeat: int) -> None:
    assert crc32c(data * repeat) == slow_crc32c(data * min(repeat, 300))


@pytest.mark.parametrize("length", [0, 1, 31, 33, 35, 4095, 4096, 4097, 4099, 9000])
def test_the_crc_at_the_borders_of_its_blocks(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert crc32c(data) == slow_crc32c(data)


@given(
    st.dictionaries(
        st.text(max_size=5), st.one_of(st.binary(max_size=9), st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False))
    )
)
def test_an_example_is_read_back(features: dict[str, Any]) -> None:
    assert parse_example(build_example(features)) == features


def test_files_of_others_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12).reshape(4, 3))
    single = wb.data.open_source(tmp_path / "x.npy")
    assert single[2]["input"].tolist() == [6, 7, 8]
    np.save(tmp_path / "y.npy", np.arange(4))
    both = wb.data.open_source(tmp_path)
    assert both[3]["y"] == 3
    assert both[3]["x"].tolist() == [9, 10, 11]


def test_tables_and_databases_of_others_are_read(tmp_path: Path) -> None:
    pa, lmdb = pytest.importorskip("pyarrow"), pytest.importorskip("lmdb")
    import pyarrow.parquet as pq

    table = pa.table({"image": [{"bytes": b"x", "path": "a"}, {"bytes": b"y", "path": None}], "n": [1, None], "tokens": [[1, 2], [3]]})
    pq.write_table(table, tmp_path / "0.parquet")
    source = wb.data.open_source(tmp_path / "0.parquet")
    assert source[0]["image"] == b"x"
    assert "n" not in source[1]
    assert source[0]["tokens"].tolist() == [1, 2]
    assert source.facts() == {"rows_read_for_one": 2.0, "unit": "row group"}
    with pa.OSFile(str(tmp_path / "0.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:  # as Hugging Face datasets
        stream.write_table(table)
    assert [s["image"] for s in wb.data.open_source(tmp_path / "0.arrow")] == [b"x", b"y"]
    with lmdb.open(str(tmp_path / "set"), map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"k", b"v")
    assert wb.data.open_source(tmp_path / "set")[0] == {"__key__": "k", "value": b"v"}


def test_columns_of_any_type_and_with_gaps_are_read_from_an_arrow_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    values: dict[str, tuple[Any, list[Any]]] = {
        "txt": (pa.string(), ["ä", "", "ccc", "d"]),
        "long": (pa.large_string(), ["a", "bb", "", "d"]),
        "jpg": (pa.binary(), [b"", b"\0", b"xyz", b"w"]),
        "large": (pa.large_binary(), [b"1", b"22", b"333", b""]),
        "cls": (pa.int64(), [-(1 << 63), 0, 1, (1 << 63) - 1]),
        "small": (pa.int8(), [-128, 0, 1, 127]),
        "x": (pa.float64(), [0.5, -1e300, 3.0, 4.0]),
        "gaps": (pa.int64(), [1, None, None, 4]),
        "holes": (pa.string(), [None, "b", None, None]),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in values.items()])
    batch = pa.record_batch([pa.array(given, kind) for kind, given in values.values()], schema=schema)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch.slice(1, 2))
    source = wb.data.open_source(tmp_path / "a.arrow")
    rows = [0, 1, 2, 3, 1, 2]
    expected = [{name: given[row] for name, (_, given) in values.items() if given[row] is not None} for row in rows]
    for read in ([source[i] for i in range(6)], source[[5, 4, 3, 2, 1, 0]][::-1], list(source)):
        assert [{name: value for name, value in sample.items() if name != "__key__"} for sample in read] == expected
    assert [type(value) for value in source[0].values()] == [str, str, str, bytes, bytes, int, int, float, int]


def test_chunks_of_hdf5_are_named_before_they_hurt(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((128, 50)), chunks=(64, 50), compression="gzip")
        file.create_dataset("y", data=np.arange(128))
    with pytest.warns(UserWarning, match=r"costs its chunk of 64 \(25\.0 KiB, decompressed by gzip\)"):
        source = wb.data.open_source(tmp_path / "a.h5")
    assert source[100]["y"] == 100
    assert source.facts()["rows_read_for_one"] == 64


def test_a_missing_package_is_named_with_its_line() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install nopackage, or pip install 'training-workbench\[formats\]'"):
        need("nopackage", "the format x")


def test_lmdb_is_not_read_from_a_server() -> None:
    pytest.importorskip("lmdb")
    pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match="need a local disk"):
        wb.data.open_source("memory://x/a.mdb")


def test_every_format_is_read_through_fsspec(tmp_path: Path) -> None:
    """Its file system in memory, which counts the requests."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in FORMATS:
        if name == "lmdb" or (name in LIBRARIES and pytest.importorskip(LIBRARIES[name]) is None):
            continue
        path = write(name, tmp_path)
        for file in path.rglob("*"):
            if file.is_file():
                memory.pipe(f"/{name}/{file.relative_to(path).as_posix()}", file.read_bytes())
        source = wb.data.open_source(f"memory://{name}", format=name)
        assert digest_of(source) == EXPECTED, name
        assert digest_of(source[list(range(COUNT))[::-1]]) == EXPECTED, name
        assert digest(source[5]) == digest(source[[5]][0])


def test_manifest_and_index_of_a_server_are_fetched_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is missing is named when it is read, not when it is fetched."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    wb.data.write_shards([sample for _, sample in samples()], tmp_path / "whole", shards=1, quiet=True)
    memory.pipe({f"/together/{file.name}": file.read_bytes() for file in (tmp_path / "whole").iterdir()})
    rounds: list[list[str]] = []
    together = type(memory).cat_ranges

    def counted(self: Any, paths: list[str], starts: list[int], ends: list[int], **more: Any) -> Any:
        rounds.append(paths)
        assert len(paths) == len(starts) == len(ends)  # one number for all is for fsspec's own file systems alone
        return together(self, paths, starts, ends, **more)

    monkeypatch.setattr(type(memory), "cat_ranges", counted)
    source = wb.data.open_source("memory://together")
    assert rounds == [["memory://together/manifest.json", "memory://together/index.npz"]]
    assert source.storage._made, "connected where it is opened, not anew in a thread that reads"
    assert digest_of(source) == EXPECTED
    rounds.clear()
    memory.pipe("/alone/part-00000", first(write("tfrecord", tmp_path)).read_bytes())
    source = wb.data.open_source("memory://alone/part-00000", format="tfrecord")
    assert rounds == [["memory://alone/manifest.json", "memory://alone/index.npz"]], "nothing lies below a file"
    assert digest_of(source) == EXPECTED
    memory.rm("/together/index.npz")
    with pytest.raises(DataMissingError, match=r"memory://together/index\.npz is missing"):
        wb.data.open_source("memory://together")
    memory.rm("/together/manifest.json")
    assert len(wb.data.open_source("memory://together")) == COUNT  # by the headers of the tar file
    monkeypatch.setattr(type(memory), "cat_ranges", lambda self, paths, starts, ends, **_: [self.cat_file(path) for path in paths])
    assert len(wb.data.open_source("memory://together")) == COUNT  # though this one raises where a file is missing


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[dict[str, Any], Latency]]:
    """Options for fsspec, and the latency of a server of S3 that runs here."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    server, latency = s3_server(0.0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield s3_options(server.server_port), latency
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_a_server_of_s3_gives_the_same_samples_and_a_batch_waits_once(tmp_path: Path, bucket: Any) -> None:
    import fsspec

    options, latency = bucket
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = fsspec.filesystem("s3", **options)
        files.mkdir("bucket")
        for name in ("tar", "tfrecord", "parquet", "arrow", "hdf5", "npy", "folder"):
            path = write(name, tmp_path)
            files.put(str(path), f"bucket/{name}", recursive=True)
            source = wb.data.open_source(f"s3://bucket/{name}", format=name, storage_options=options)
            assert digest_of(source) == EXPECTED, name
        source = wb.data.open_source("s3://bucket/tar", storage_options=options)
        latency.seconds = 0.1
        before, began = latency.requests, time.monotonic()
        some = source.__getitems__([0, 7, 15])
        took = time.monotonic() - began
        latency.seconds = 0.0
        assert len(some) == 3
        assert latency.requests - before <= 3
        assert took < 0.1 * 3  # together, not one after the other
        loader = batches(wb.data.open_source("s3://bucket/tar", storage_options=options), "spawn", 2)
        assert digest_of(loader) == EXPECTED
        wb.data.write_shards([sample for _, sample in samples()], tmp_path / "whole", shards=1, quiet=True)
        files.put(str(tmp_path / "whole"), "bucket/whole", recursive=True)
        latency.seconds = 0.5  # long enough that requests which are sent together wait together on a busy machine, too
        for path in ("whole", "whole/shard-000000.tar"):
            before, rounds = latency.requests, latency.rounds
            assert digest_of(wb.data.open_source(f"s3://bucket/{path}", storage_options=options)) == EXPECTED
            assert latency.requests - before == 3  # manifest and index together, then the shard
            assert latency.rounds - rounds == 2
