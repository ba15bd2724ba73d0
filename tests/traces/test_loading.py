"""The cache beside a trace: the same answers, gone stale with the content, and never in the way."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traced import on_cpu, on_device, torn, write
from workbench.traces.analysis import loading
from workbench.traces.analysis.loading import load_cache
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where caches go that cannot lie beside their file."""
    found = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("WORKBENCH_CACHE", str(found))
    return found


def beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.columns.npz")


def check_same(one: Trace, other: Trace) -> None:
    for name in ("label", "lane", "shape", "start", "end", "correlation", "external"):
        a, b = getattr(one.columns, name), getattr(other.columns, name)
        assert a.dtype == b.dtype
        assert (a == b).all()
    for name in ("labels", "lanes", "shapes"):
        assert getattr(one.columns, name) == getattr(other.columns, name)
    for name in ("path", "rank", "world_size", "devices", "notes", "slowdown"):
        assert getattr(one, name) == getattr(other, name)
    for ask in (
        "breakdown",
        "ops",
        "overlap",
        "collectives",
        "modules",
        "flame",
        "critical",
        "idle",
        "launches",
        "roofline",
        "memory_curve",
    ):
        assert getattr(one, ask)() == getattr(other, ask)()


@pytest.mark.parametrize("gpu", [True, False])
def test_the_same_answers(tmp_path: Path, gpu: bool) -> None:
    header = {"distributedInfo": {"rank": 1, "world_size": 2}, "deviceProperties": [{"name": "A <GPU>"}]}
    path = write(tmp_path / "a.json.gz", on_device() if gpu else on_cpu(), **header)
    first = Trace.load(path, cache=True)
    assert beside(path).is_file()
    before = beside(path).stat().st_mtime_ns
    second = Trace.load(path, cache=True)
    assert beside(path).stat().st_mtime_ns == before
    check_same(first, second)
    check_same(Trace.load(path), second)
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith(".npz")] == [beside(path).name]


def test_nothing_is_left_by_default(tmp_path: Path, home: Path) -> None:
    Trace.load(write(tmp_path / "a.json", on_cpu()))
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert list(home.iterdir()) == []


def test_the_text_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", on_cpu())
    Trace.load(path, cache=True)
    monkeypatch.setattr(loading, "read_trace_file", lambda path: pytest.fail("read again"))
    assert len(Trace.load(path, cache=True).steps) == 2


def test_another_content_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", on_cpu())
    Trace.load(path, cache=True)
    told = path.stat()
    write(path, on_device())
    assert Trace.load(path, cache=True).kinds.device
    same = path.read_bytes().replace(b"sgemm_128x64", b"sgemm_64x128")
    told = path.stat()
    path.write_bytes(same)
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))  # as large and as old as before
    assert "sgemm_64x128" in {label.name for label in Trace.load(path, cache=True).columns.labels}


def test_another_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", on_cpu())
    Trace.load(path, cache=True)
    monkeypatch.setattr(loading, "FORMAT", loading.FORMAT + 1)
    assert load_cache(path) is None
    Trace.load(path, cache=True)
    assert load_cache(path) is not None


def test_notes_of_a_damaged_file_are_kept(tmp_path: Path) -> None:
    path = torn(tmp_path / "a.json", lambda text: text.replace(b'"aten::addmm"', b'"aten::\x00\x00mm', 1), on_cpu())
    assert Trace.load(path, cache=True).notes == Trace.load(path, cache=True).notes == Trace.load(path).notes != ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_cache_is_none(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happened to it, the trace is as it was, and its cache whole again."""
    path = write(tmp_path / "a.json", on_cpu())
    fresh = Trace.load(path, cache=True)
    text = bytearray(beside(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 300))] = data.draw(st.binary(max_size=8))
    beside(path).write_bytes(bytes(text))
    check_same(fresh, Trace.load(path, cache=True))
    assert load_cache(path) is not None


@pytest.mark.parametrize("change", [{"label": 99}, {"lane": -1}, {"end": -5}, {"start": None}])
def test_a_cache_with_numbers_that_cannot_be(tmp_path: Path, change: dict[str, int | None]) -> None:
    path = write(tmp_path / "a.json", on_cpu())
    Trace.load(path, cache=True)
    with np.load(beside(path)) as found:
        arrays = dict(found)
    for name, value in change.items():
        arrays[name] = arrays[name][:-1] if value is None else np.full_like(arrays[name], value)
    np.savez(beside(path), **arrays)
    assert load_cache(path) is None
    assert len(Trace.load(path, cache=True).steps) == 2


def test_a_cache_that_would_run_code(tmp_path: Path) -> None:
    """Pickles are not opened."""
    path = write(tmp_path / "a.json", on_cpu())
    np.savez(beside(path), head=np.array([{"key": 1}], dtype=object))
    assert load_cache(path) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache then lies in the user's."""
    path = write(tmp_path / "a.json", on_cpu())
    whole = loading.tempfile.mkstemp

    def refused(prefix: str, dir: Path) -> tuple[int, str]:
        if dir == tmp_path:
            raise PermissionError(13, "Permission denied")
        return whole(prefix=prefix, dir=dir)

    monkeypatch.setattr(loading.tempfile, "mkstemp", refused)
    Trace.load(path, cache=True)
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    (only,) = (home / "traces").iterdir()
    assert only.suffix == ".npz"
    monkeypatch.setattr(loading, "read_trace_file", lambda path: pytest.fail("read again"))
    assert len(Trace.load(path, cache=True).steps) == 2


def test_no_place_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", on_cpu())

    def refused(prefix: str, dir: Path) -> tuple[int, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(loading.tempfile, "mkstemp", refused)
    assert len(Trace.load(path, cache=True).steps) == 2


def test_writing_that_fails_leaves_nothing(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", on_cpu())

    def full(file: object, **arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading.np, "savez", full)
    assert len(Trace.load(path, cache=True).steps) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert list((home / "traces").iterdir()) == []


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.json", on_cpu())
    read = loading.read_trace_file

    def meanwhile(path: Path) -> loading.Loaded:
        found = read(path)
        write(path, on_device())
        return found

    monkeypatch.setattr(loading, "read_trace_file", meanwhile)
    assert not Trace.load(path, cache=True).kinds.device
    assert load_cache(path) is None


def test_the_ranks_of_a_directory(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.pt.trace.json", on_device(), distributedInfo={"rank": rank, "world_size": 2})
    for _ in range(2):
        found = Trace.load(tmp_path, cache=True)
        assert isinstance(found, TraceSet)
        assert found.ranks == (0, 1)
    assert len([one for one in tmp_path.iterdir() if one.name.endswith(".npz")]) == 2


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        Trace.load(tmp_path / "a.json", cache=True)
    (tmp_path / "b.json").write_text("hello")
    with pytest.raises(TraceError, match="is not JSON"):
        Trace.load(tmp_path / "b.json", cache=True)
    assert [one.name for one in tmp_path.iterdir()] == ["b.json"]
