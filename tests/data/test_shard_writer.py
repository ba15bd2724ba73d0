"""Shards: the same bytes twice and after a kill, checks that find every flipped bit, errors that leave nothing half-written."""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import workbench as wb
from tests.data.formats import COUNT, SCHEMA, samples
from workbench.core.run_directory import DiskFullError
from workbench.data.data_card import decode_picture
from workbench.data.formats import FORMATS
from workbench.data.manifest import Manifest, ManifestError, digest_of
from workbench.data.sample import CorruptSampleError, NameCollisionError, UnsafeNameError, encode
from workbench.data.shard_plan import plan_shards, shuffled
from workbench.data.shard_writer import UnfinishedError, WriterBusyError
from workbench.data.storage import DataMissingError

SAMPLES = [sample for _, sample in samples()]
EXPECTED = digest_of(SAMPLES)
SHARD, INDEX = (
    "f5d4e8bbf2c1720a20818f26f70df9677ac49f51715d74d5cc67d60c922c5b16",
    "97b660fff8ac336e5652bd5c7060fdc17da4662e18e3a1ae2a49b22c9705b555",
)
SHARD_WITH_GAPS, INDEX_WITH_GAPS = (
    "a981b9ed86071984a899af0729f719cf11d03a81aaa92ffe2b6b6a48ea745d69",
    "a51e3182afe4e379964e52ddb0e0f0b5c415acf6ca4b43dcb7b8dd5daa7551ad",
)
LIBRARIES = {"parquet": "pyarrow", "parquet-untuned": "pyarrow", "arrow": "pyarrow", "hdf5": "h5py", "lmdb": "lmdb"}


def files(folder: Path) -> dict[str, str]:
    """File → digest of its bytes."""
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_samples_give_the_same_bytes_and_the_digest_survives_other_shards(tmp_path: Path, name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason="needs the extra formats")
    first = wb.data.write_shards(SAMPLES, tmp_path / "a", format=name, shards=3, licence="CC0-1.0", quiet=True)
    again = wb.data.write_shards(SAMPLES, tmp_path / "b", format=name, shards=3, licence="CC0-1.0", quiet=True)
    assert first == again
    assert files(tmp_path / "a") == files(tmp_path / "b")
    other = wb.data.write_shards(wb.data.open_source(tmp_path / "a"), tmp_path / "c", format=name, shards=2, seed=5, quiet=True)
    assert first.dataset_sha256 == other.dataset_sha256 == EXPECTED
    assert [shard.count for shard in first.shards] == [5, 6, 5]
    assert first.schema == SCHEMA
    assert Manifest.from_json(json.loads((tmp_path / "a/manifest.json").read_text())) == first
    source = wb.data.open_source(tmp_path / "a")
    assert digest_of(source) == EXPECTED
    assert sorted(source.keys()) == sorted(sample["__key__"] for sample in SAMPLES)
    assert list(source.keys()) == [sample["__key__"] for sample in source]
    assert list(source.keys()) != [sample["__key__"] for sample in SAMPLES]  # shuffled
    assert wb.data.verify(tmp_path / "a").ok
    full = wb.data.verify(tmp_path / "a", full=True)
    assert full.ok, full
    assert (full.samples, full.shards) == (COUNT, 3)


def with_gaps() -> list[dict[str, Any]]:
    """The samples, of which fields are missing here and there."""
    return [{name: v for name, v in s.items() if name == "__key__" or (i + len(name)) % 3} for i, s in enumerate(SAMPLES)]


def test_tar_shards_and_digests_are_those_of_every_version(tmp_path: Path) -> None:
    """Written one sample and field after the other by the version of 2026-11-24; now field by field for many samples."""
    for number, (data, shard, index) in enumerate(((SAMPLES, SHARD, INDEX), (with_gaps(), SHARD_WITH_GAPS, INDEX_WITH_GAPS))):
        manifest = wb.data.write_shards(data, tmp_path / str(number), schema=SCHEMA, quiet=True)
        assert (manifest.shards[0].sha256, manifest.index_sha256) == (shard, index)
        assert manifest.dataset_sha256 == digest_of(data)


def test_tarfile_reads_what_is_written_of_strange_samples(tmp_path: Path) -> None:
    """Long names, names with percent signs, gaps, empty values, and more samples than are written at once."""
    data = [
        {"__key__": f"{'folder' * (20 * (i % 3 == 1))}/{i:03d}".strip("/"), "%d": b"x" * (i % 700), "txt": "ä" * (i % 5), "cls": -i}
        for i in range(150)
    ]
    for sample in data[::7]:
        del sample["txt"]
    manifest = wb.data.write_shards(data, tmp_path / "a", seed=None, quiet=True)
    assert manifest.dataset_sha256 == digest_of(data)
    expected = [(f"{s['__key__']}.{name}", encode(value)) for s in data for name, value in s.items() if name != "__key__"]
    with tarfile.open(tmp_path / "a/shard-000000.tar") as tar:
        members = {member.name: (member.offset_data, tar.extractfile(member).read()) for member in tar}  # type: ignore[union-attr]
    assert sorted((name, value) for name, (_, value) in members.items()) == sorted(expected)
    source: Any = wb.data.open_source(tmp_path / "a")
    assert list(source) == data
    at = {name: place for name, (place, _) in members.items()}
    for i, sample in enumerate(data):
        for name, place in zip(source.fields, source._offsets[i].tolist(), strict=True):
            assert name not in sample or place == at[f"{sample['__key__']}.{name}"]


def flipped(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_every_flipped_bit_of_a_tar_shard_is_found_and_the_sample_is_named(tmp_path: Path) -> None:
    wb.data.write_shards(SAMPLES, tmp_path / "a", shards=2, quiet=True)
    rng, named = random.Random(0), 0
    for _ in range(60):
        path = tmp_path / "a" / f"shard-00000{rng.randrange(2)}.tar"
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flipped(path, at, bit)
        found = wb.data.verify(tmp_path / "a", full=True)
        flipped(path, at, bit)
        assert any(str(path) in problem for problem in found.problems)
        named += any("sample" in problem for problem in found.problems)
    assert named > 10  # the others are in headers and padding
    assert wb.data.verify(tmp_path / "a", full=True).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tar", "tfrecord", "parquet", "arrow", "hdf5", "lmdb", "npy", "folder"])
def test_a_thousand_flipped_bits_are_found_in_every_format(tmp_path: Path, name: str) -> None:
    """By the SHA-256 of the shard; 125 in each of eight formats."""
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason="needs the extra formats")
    manifest = wb.data.write_shards(SAMPLES, tmp_path / "a", format=name, shards=1, quiet=True)
    inside = [p for p in sorted((tmp_path / "a" / manifest.shards[0].name).rglob("*")) if p.is_file()] or [
        tmp_path / "a" / manifest.shards[0].name
    ]
    rng = random.Random(1)
    for _ in range(125):
        path = rng.choices(inside, [p.stat().st_size for p in inside])[0]
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flipped(path, at, bit)
        assert not wb.data.verify(tmp_path / "a", full=True).ok, (path, at, bit)
        flipped(path, at, bit)
    assert wb.data.verify(tmp_path / "a", full=True).ok


def test_damage_on_reading_is_raised_skipped_or_counted(tmp_path: Path) -> None:
    wb.data.write_shards(SAMPLES, tmp_path / "a", shards=1, quiet=True)
    source: Any = wb.data.open_source(tmp_path / "a")
    place = source._offsets[7].tolist()[source.fields.index("jpg")]
    flipped(tmp_path / "a/shard-000000.tar", place + 5, 3)
    with pytest.raises(CorruptSampleError, match=r"sample 7 .*field 'jpg'.*shard-000000\.tar"):
        source[7]
    source.on_error = "skip"
    with pytest.warns(UserWarning, match="left out"):
        assert len(source[[6, 7, 8]]) == 2
    source.on_error = "count"
    assert len(list(source)) == COUNT
    assert source[7]["__key__"]
    assert source.damaged_count == 3
    with pytest.raises(ValueError, match="on_error='ignore': allowed are 'raise', 'skip', 'count'"):
        wb.data.open_source(tmp_path / "a", on_error="ignore")
    flipped(tmp_path / "a/shard-000000.tar", place + 5, 3)
    (tmp_path / "a/shard-000000.tar").rename(tmp_path / "elsewhere.tar")
    with pytest.raises(DataMissingError, match=r"shard-000000\.tar is missing"):
        wb.data.open_source(tmp_path / "a")[0]
    assert "is missing" in str(wb.data.verify(tmp_path / "a"))


def test_a_wrong_manifest_is_refused(tmp_path: Path) -> None:
    wb.data.write_shards(SAMPLES, tmp_path / "a", quiet=True)
    wb.data.write_shards(SAMPLES[:9], tmp_path / "b", quiet=True)
    shutil.copy(tmp_path / "b/index.npz", tmp_path / "a/index.npz")
    with pytest.raises(ManifestError, match="is not the index that"):
        wb.data.open_source(tmp_path / "a")
    text = (tmp_path / "b/manifest.json").read_text()
    for wrong, said in (
        (text[:-30], "is damaged"),
        (text.replace('"count": 9', '"count": 8', 1), "its shards have 9 samples, not 8"),
        (text.replace('"version": 1', '"version": 2'), "this workbench reads 1"),
        (text.replace("shard-000000.tar", "../../secret.tar"), "leads out of"),
        (text.replace('"bytes"', '"bites"'), "is damaged"),
    ):
        (tmp_path / "b/manifest.json").write_text(wrong)
        with pytest.raises((ManifestError, UnsafeNameError), match=said):
            wb.data.open_source(tmp_path / "b", format="tar")
    (tmp_path / "b/manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"has no manifest\.json"):
        wb.data.verify(tmp_path / "b")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


def test_a_stream_is_written_too_and_names_are_checked(tmp_path: Path) -> None:
    manifest = wb.data.write_shards(Stream(), tmp_path / "a", shards=2, quiet=True)
    assert manifest.dataset_sha256 == EXPECTED
    assert not (tmp_path / "a/.writing").exists()
    same = [{"__key__": "a.b", "x": 1}, {"__key__": "a_b", "x": 2}]
    with pytest.raises(NameCollisionError, match=r"two samples have the key 'a_b': give keys=\"number\""):
        wb.data.write_shards(same, tmp_path / "b", quiet=True)
    assert not list((tmp_path / "b").iterdir())
    assert list(wb.data.open_source(write_by_number(same, tmp_path / "b")).keys()) == ["00000000", "00000001"]
    for key in ("../../x", "/etc/x", "a/../../x"):
        with pytest.raises(UnsafeNameError):
            wb.data.write_shards([{"__key__": key, "x": 1}], tmp_path / "c", format="folder", quiet=True)
    assert not (tmp_path / "x.x").exists()
    with pytest.raises(UnfinishedError, match="has a finished dataset"):
        wb.data.write_shards(SAMPLES, tmp_path / "a", quiet=True)
    (tmp_path / "a/notes.txt").write_text("mine")
    wb.data.write_shards(SAMPLES[:3], tmp_path / "a", overwrite=True, quiet=True)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["index.npz", "manifest.json", "notes.txt", "shard-000000.tar"]


def write_by_number(data: Any, folder: Path) -> Path:
    wb.data.write_shards(data, folder, keys="number", seed=None, quiet=True)
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"keys": "names"}, "allowed are 'source', 'number'"),
        ({"format": "zip"}, "format='zip': allowed are"),
        ({"workers": 1, "start_method": "thread"}, "allowed are 'forkserver', 'spawn', 'fork'"),
        ({"workers": 1, "transform": lambda sample: sample}, "the transform cannot be sent to workers"),
        ({"schema": {"jpg": "bytes"}}, "has a field 'cls' that the first"),
    ],
)
def test_arguments_that_are_wrong(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wb.data.write_shards(SAMPLES, tmp_path / "a", quiet=True, **arguments)
    assert not (tmp_path / "a/manifest.json").exists()


def test_two_writers_and_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(sample: Any) -> Any:
        with pytest.raises(WriterBusyError, match="another writer is at work"):
            wb.data.write_shards(SAMPLES, tmp_path / "a", quiet=True)
        return sample

    wb.data.write_shards(SAMPLES[:2], tmp_path / "a", transform=second, quiet=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (35_000, limits[1]))
    try:
        with pytest.raises(DiskFullError, match="may not grow any more"):
            wb.data.write_shards(SAMPLES, tmp_path / "b", shards=2, seed=None, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list((tmp_path / "b").rglob("*.part"))
    assert (tmp_path / "b/shard-000000.tar").exists()
    assert wb.data.write_shards(SAMPLES, tmp_path / "b", shards=2, seed=None, quiet=True).dataset_sha256 == EXPECTED
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: os.statvfs_result((512, 512, 10, 10, 10, 0, 0, 0, 0, 255)))
        with pytest.raises(DiskFullError, match=r"are needed and 5\.00 KiB are free"):
            wb.data.write_shards(SAMPLES, tmp_path / "c", quiet=True)


def test_the_manifest_is_on_the_disk_last_and_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the power fails: where there is a manifest, everything that it describes is on the disk under its name."""
    events: list[tuple[str, str]] = []
    sync, replace, unlink = os.fsync, os.replace, os.unlink

    def synced(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def renamed(old: Any, new: Any, **options: Any) -> None:
        events.append((f"{old} to", str(new)))
        replace(old, new, **options)

    def removed(path: Any, **options: Any) -> None:
        events.append(("remove", str(path)))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "unlink", removed)
    out = tmp_path / "a"
    for seed in (0, 1):
        events.clear()
        wb.data.write_shards(SAMPLES, out, shards=2, seed=seed, overwrite=bool(seed), quiet=True)
        places = {path: number for number, (what, path) in enumerate(events) if what.endswith(" to")}
        there = [out / name for name in ("shard-000000.tar", "shard-000001.tar", "index.npz", "manifest.json")]
        assert max(places[str(path)] for path in there) == places[str(out / "manifest.json")]
        for path in there:
            at = places[str(path)]
            under = events[at][0].removesuffix(" to")
            assert ("sync", under) in events[:at], path  # its content
            until = places[str(out / "manifest.json")] if path.name != "manifest.json" else len(events)
            assert ("sync", str(out)) in events[at:until], path  # its name
    first = events.index(("remove", str(out / "manifest.json")))
    shard = events.index(("remove", str(out / "shard-000000.tar")))
    assert ("sync", str(out)) in events[first:shard]


def test_a_writer_killed_after_the_manifest_leaves_a_finished_dataset(tmp_path: Path) -> None:
    """What it had not removed yet goes with the next call, and another dataset can be written over it."""
    wb.data.write_shards(SAMPLES, tmp_path, quiet=True)
    for overwrite in (False, True):
        (tmp_path / ".writing").mkdir()
        (tmp_path / ".writing/plan.json").write_text(json.dumps({"format": "tar", "count": COUNT, "seed": 0}))
        (tmp_path / ".writing/shard-000000.tar.done").write_bytes(b"")
        with contextlib.nullcontext() if overwrite else pytest.raises(UnfinishedError, match="has a finished dataset"):
            wb.data.write_shards(SAMPLES[:9], tmp_path, seed=3, overwrite=overwrite, quiet=True)
        assert not (tmp_path / ".writing").exists()
    assert wb.data.verify(tmp_path, full=True).samples == 9


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
import workbench as wb
from tests.data.formats import samples
def slow(sample):
    time.sleep(0.05)
    return sample
wb.data.write_shards([sample for _, sample in samples()], {out!r}, format={format!r}, shards=4, transform=slow, quiet=True)
"""


@pytest.mark.parametrize("name", ["tar"])
def test_a_writer_that_is_killed_goes_on_and_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    """SIGKILL after the first shard and in the middle of a later one."""
    root = Path(__file__).parents[2]
    programs = {out: PROGRAM.format(root=str(root), out=str(tmp_path / out), format=name) for out in ("killed", "whole")}
    child = subprocess.Popen([sys.executable, "-c", programs["killed"]])
    limit = time.monotonic() + 60
    while not (tmp_path / "killed/.writing/shard-000001.tar.done").exists():
        assert time.monotonic() < limit
        time.sleep(0.005)
    time.sleep(0.06)
    child.kill()
    child.wait()
    assert not (tmp_path / "killed/manifest.json").exists()
    kept = (tmp_path / "killed/shard-000000.tar").stat().st_mtime_ns
    with pytest.raises(UnfinishedError, match=r"of other samples or arguments \(seed differ\)"):
        write_like(tmp_path / "killed", seed=3)
    write_like(tmp_path / "killed")
    assert (tmp_path / "killed/shard-000000.tar").stat().st_mtime_ns == kept
    write_like(tmp_path / "whole")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def slow(sample: Any) -> Any:
    return sample


def write_like(folder: Path, **arguments: Any) -> None:
    with contextlib.suppress(AttributeError):
        slow.__qualname__ = "slow"
    wb.data.write_shards(SAMPLES, folder, shards=4, transform=slow, quiet=True, **arguments)


@pytest.mark.slow
def test_workers_write_the_same_bytes(tmp_path: Path) -> None:
    write_like(tmp_path / "one")
    for method in ("fork", "forkserver", "spawn"):
        write_like(tmp_path / method, workers=2, start_method=method)
        assert files(tmp_path / method) == files(tmp_path / "one")


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 4000))
def test_a_plan_has_every_sample_once_and_equal_counts(count: int, readers: int, target: int) -> None:
    plan = plan_shards(count, count * 100, readers=readers, target=target)
    counts = [b - a for a, b in zip(plan.edges, plan.edges[1:], strict=False)]
    assert sum(counts) == count
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1
    if readers > 1 and count >= 8 * readers and plan.shards < count:
        assert plan.shards % readers == 0
        assert plan.shards >= 4 * readers


@given(st.integers(0, 2000), st.integers())
def test_the_shuffle_is_a_permutation_that_the_seed_decides(count: int, seed: int) -> None:
    order = shuffled(count, seed).tolist()
    assert sorted(order) == list(range(count))
    assert order == shuffled(count, seed).tolist()
    assert shuffled(count, None).tolist() == list(range(count))


def test_the_shuffle_is_the_same_in_every_version() -> None:
    assert zlib.crc32(shuffled(1000, 0).astype("<i8").tobytes()) == 22849364


def test_a_card_says_what_a_dataset_is(tmp_path: Path) -> None:
    wb.data.write_shards(SAMPLES, tmp_path / "a", shards=8, licence="CC0-1.0", description="noise", quiet=True)
    card = wb.data.describe(tmp_path / "a")
    assert card.count == COUNT
    assert sum(card.classes.values()) == COUNT
    assert card.lengths["jpg"] == (100, 2500, 4600)
    assert "8 of " in str(card)
    assert "CC0-1.0" in str(card)
    assert type(card).from_json(json.loads(json.dumps(card.to_json()))) == card
    assert card.to_frame().shape[1] == 2
    assert wb.data.describe(Stream()).count == 0
    with pytest.raises(ValueError, match="no sample to draw"):
        type(card).from_json(card.to_json()).plot()


def test_pictures_that_cannot_be_decoded_are_named() -> None:
    with pytest.raises(CorruptSampleError, match="sample 3: the picture cannot be decoded"):
        decode_picture(b"\xff\xd8nothing", "sample 3")
    bomb = b"P6 100000 100000 255\n"
    with pytest.raises(CorruptSampleError, match="declares so many pixels"):
        decode_picture(bomb, "sample 3")
