"""Sources: samples by number, many at once and in order, after pickling, with damaged files, and from datasets of other libraries."""

import io
import os
import pickle
import random
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import workbench as wb
from tests.data.formats import COUNT, SCHEMA, first, samples, write
from workbench.data.adapters import NoRandomAccessError
from workbench.data.formats.tar import _files, header, members
from workbench.data.manifest import digest_of, imbalance
from workbench.data.sample import (
    CorruptSampleError,
    NameCollisionError,
    Strings,
    UnsafeNameError,
    checked_key,
    decode,
    digest,
    encode,
    plain,
)
from workbench.data.storage import DataMissingError, Storage


def test_a_picture_of_the_samples_is_read_from_a_folder_of_classes(tmp_path: Path) -> None:
    for name in ("cats/1.jpg", "cats/2.b.JPG", "dogs/3.jpg", "dogs/3.txt", "dogs/.hidden.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "dogs" / "link.jpg").symlink_to(tmp_path / "cats/1.jpg")
    source = wb.data.open_source(tmp_path)
    assert list(source.keys()) == ["cats/1", "cats/2.b", "dogs/3"]
    assert source[-1] == {"__key__": "dogs/3", "jpg": b"dogs/3.jpg", "txt": "dogs/3.txt", "cls": 1}
    assert source.schema == {"jpg": "bytes", "txt": "str", "cls": "int"}
    assert source.classes == ("cats", "dogs")  # type: ignore[attr-defined]
    assert source.links_left_out == 1  # type: ignore[attr-defined]
    assert len(wb.data.open_source(tmp_path, follow_links=True)) == 4


def test_links_and_names_that_collide_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.jpg").write_bytes(b"1")
    (tmp_path / "secret.jpg").write_bytes(b"2")
    (tmp_path / "in/2.jpg").symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(UnsafeNameError, match="leads out of the folder"):
        wb.data.open_source(tmp_path / "in", follow_links=True)
    (tmp_path / "in/1.png").write_bytes(b"1")
    with pytest.raises(NameCollisionError, match=r"1\.png.*one picture"):
        wb.data.open_source(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissingError, match="no file with an extension"):
        wb.data.open_source(tmp_path / "empty")
    with pytest.raises(DataMissingError, match=r"there is nothing at '/.*'; beside it are empty, in"):
        wb.data.open_source(tmp_path / "missing")
    with pytest.raises(ValueError, match="format='tra': allowed are"):
        wb.data.open_source(tmp_path, format="tra")
    with pytest.raises(ValueError, match="cheque=: FolderSource takes check, on_error"):
        wb.data.open_source(tmp_path / "in", cheque=True)


def test_a_tar_file_of_tarfile_is_read_and_ours_is_read_by_tarfile(tmp_path: Path) -> None:
    for name, style in (("gnu", tarfile.GNU_FORMAT), ("pax", tarfile.PAX_FORMAT), ("ustar", tarfile.USTAR_FORMAT)):
        (tmp_path / name).mkdir()
        folder = "a" * 60 + "/" + "b" * 60  # more than the 100 bytes of a plain header
        with tarfile.open(tmp_path / name / "0.tar", "w", format=style) as tar:
            for key, data in ((f"./{folder}/1.jpg", b"x" * 700), (f"./{folder}/1.cls", b"3"), ("README", b"no sample"), ("2.jpg", b"")):
                info = tarfile.TarInfo(key)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            link = tarfile.TarInfo("3.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        source = wb.data.open_source(tmp_path / name)
        assert list(source) == [{"__key__": f"{folder}/1", "jpg": b"x" * 700, "cls": 3}, {"__key__": "2", "jpg": b""}]
    path = write("tar", tmp_path)
    with tarfile.open(first(path)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert found == {f"{key}.{field}": encode(sample[field]) for key, sample in samples() for field in SCHEMA}


@pytest.mark.parametrize("pattern", ["shard-0.tar", "shard-*.tar", "shard-{0..1}.tar", None])
def test_tar_files_are_given_by_name_pattern_or_list(tmp_path: Path, pattern: str | None) -> None:
    for number in (0, 1):
        write("tar", tmp_path, f"shard-{number}.tar", samples()[number * 8 : number * 8 + 8])
    given_path: Any = [tmp_path / "shard-1.tar"] if pattern is None else tmp_path / pattern
    assert len(wb.data.as_source(given_path)) == (8 if pattern in ("shard-0.tar", None) else 16)


@pytest.mark.parametrize("name", ["folder", "tar"])
def test_samples_are_the_same_by_number_in_batches_in_order_and_pickled(tmp_path: Path, name: str) -> None:
    source = wb.data.open_source(write(name, tmp_path), format=name)
    expected = dict(samples())
    order = list(range(COUNT))
    random.Random(1).shuffle(order)
    assert source[3]["__key__"] == source.keys()[3]
    by_number = {source.keys()[i]: source[i] for i in order}
    again = pickle.loads(pickle.dumps(source))
    for found in (by_number, {s["__key__"]: s for s in source[order]}, {s["__key__"]: s for s in source}, {s["__key__"]: s for s in again}):
        assert digest_of(found.values()) == digest_of(expected.values())
        assert {key: digest(sample) for key, sample in found.items()} == {key: digest(sample) for key, sample in expected.items()}
    assert [s["__key__"] for s in source.iterate(5, 9)] == [source[i]["__key__"] for i in range(5, 9)]
    with pytest.raises(IndexError, match=f"from -{COUNT} to {COUNT - 1} is allowed"):
        source[COUNT]
    assert source.map(len)[2] == len(source[2])
    assert list(source.map(len)) == [4] * COUNT


def test_what_is_open_stays_in_its_process(tmp_path: Path) -> None:
    source = wb.data.open_source(write("tar", tmp_path))
    assert source[0]
    mine = dict(source.storage._open)  # type: ignore[attr-defined]
    child = os.fork()
    if not child:  # another descriptor in the child, and the parent's stays open
        good = source[1]["__key__"] == source.keys()[1] and len(source.storage._open) == 2  # type: ignore[attr-defined]
        source.close()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert dict(source.storage._open) == mine  # type: ignore[attr-defined]
    assert source[2]
    assert b"_open" in pickle.dumps(source)
    assert not pickle.loads(pickle.dumps(source)).storage._open


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_truncated_tar_file_is_named_and_what_is_whole_can_be_read(tmp_path: Path) -> None:
    path = first(write("tar", tmp_path))
    source = wb.data.open_source(path)
    os.truncate(path, int(source.ends[-1]) - 10)  # type: ignore[attr-defined]
    with pytest.raises(CorruptSampleError, match="truncated, or the header is wrong"):
        wb.data.open_source(path)
    with pytest.raises(CorruptSampleError, match=r"sample 15: bytes .* the file is truncated"):
        source[15]
    with pytest.raises(CorruptSampleError, match="truncated"):
        list(source)
    source.on_error = "skip"
    with pytest.warns(UserWarning, match=r"truncated.*left out"):
        assert len(list(source)) == COUNT - 1
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        assert len(source.__getitems__([0, 15, 3])) == 2
    assert source.damaged_count == 2
    assert len(source.damaged) == 2
    path.unlink()
    source.close()
    assert source.__getitems__([0, 1]) == []
    with pytest.raises(DataMissingError, match="is missing: restore the file"):
        source[1]


def test_headers_that_lie_are_refused_without_reading_what_they_declare(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for head, said in (
        (header(b"1.jpg", 8**11 - 1), r"is said to have 8,589,934,591 bytes, and 0 are left"),
        (header(b"../../1.jpg", 0), "leads out of the folder"),
        (header(b"/etc/1.jpg", 0), "leads out of the folder"),
        (b"nonsense" * 64, "there is no header at byte 0"),
    ):
        path.write_bytes(head)
        with pytest.raises(ValueError, match=said):
            list(members(Storage(tmp_path), "a.tar"))
    path.write_bytes(header(b"1.jpg", 0) * 2)
    with pytest.raises(NameCollisionError, match="occurs twice"):
        wb.data.open_source(path)
    with pytest.raises(UnsafeNameError, match="255 with folders"):
        header(b"a" * 101, 1)


def test_headers_of_many_files_are_those_of_each() -> None:
    stems = [b"a", b"cats/0001", b"x" * 85, "süß".encode(), b"folder/" + b"y" * 88]
    for ending in (b".jpg", b".a", b".longer.npy"):  # with the last the longest names need two fields
        for lengths in ([0, 1, 512, 3400, 8**11 - 1], [3, -1, 0, -1, 2], [513] * 5):
            heads = [header(stem + ending, length) if length >= 0 else b"" for stem, length in zip(stems, lengths, strict=True)]
            column = [bytes(length if 0 < length < 8**10 else 0) for length in lengths]
            each = [head + value + bytes(-max(0, n) % 512) for head, value, n in zip(heads, column, lengths, strict=True)]
            parts, size = _files(stems, [ending], [column], [lengths])
            assert b"".join(parts) == b"".join(each)
            assert size == sum(map(len, each))


@pytest.mark.parametrize("key", ["", "/a", "../a", "a//b", "a/../../b", "a\0b", "a\\b", "a" * 300, "x/" * 600 + "a"])
def test_keys_that_cannot_be_paths_are_refused(key: str) -> None:
    with pytest.raises(UnsafeNameError, match='keys="number"'):
        checked_key(key)
    with pytest.raises(UnsafeNameError):
        Storage("/tmp/x").path("../a")


VALUES = st.one_of(
    st.binary(max_size=50), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=20),
    st.sampled_from([np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros((0, 2), np.float32), np.array(3.5), np.array([True, False])]),
)  # fmt: skip


@given(VALUES)
def test_every_value_becomes_bytes_and_is_read_back(value: Any) -> None:
    kind = {bytes: "bytes", int: "int", float: "float", str: "str"}.get(type(value), "array")
    found = decode(kind, encode(value))
    assert type(found) is type(value)
    assert np.array_equal(found, value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert found.shape == value.shape


@given(
    dtype=st.sampled_from(["u1", "<i4", ">i4", "<f8", "<c8", "?", "<f2"]),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    order=st.sampled_from(["C", "F", "slice"]),
)
def test_an_array_is_stored_as_numpy_stores_it(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    array = np.zeros(shape, dtype, order="F" if order == "F" else "C")
    array.fill(1)
    if order == "slice" and array.ndim:
        array = array[::2]
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    assert encode(array) == file.getvalue()


def test_what_a_list_of_samples_gives_is_no_part_of_the_list() -> None:
    given = [{"__key__": 7, "cls": 1, "__url__": "x"}, {"__key__": "b", "cls": 2}, {"__key__": "c", "cls": True}]
    source = wb.data.as_source(given)
    assert [source[i] for i in range(3)] == [{"__key__": "7", "cls": 1}, {"__key__": "b", "cls": 2}, {"__key__": "c", "cls": 1}]
    source[1]["cls"] = 9
    assert given[1] == {"__key__": "b", "cls": 2}


@given(st.lists(st.text(max_size=9)))
def test_packed_texts_are_a_list(texts: list[str]) -> None:
    packed = Strings(texts)
    assert list(packed) == texts
    assert [packed[i] for i in range(len(texts))] == texts
    assert packed[1:3] == texts[1:3]


def test_values_that_are_not_what_they_say_are_damage() -> None:
    for kind, data in (("int", b"x"), ("float", b""), ("str", b"\xff"), ("array", b"x"), ("array", encode(np.arange(9))[:-1])):
        with pytest.raises(CorruptSampleError, match="is not of kind"):
            decode(kind, data)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"__key__": "a", "__url__": "x", "jpg": b"1"}, {"__key__": "b", "jpg": b"2"}])


def test_datasets_of_others_are_sources() -> None:
    source = wb.data.as_source(TensorDataset(torch.arange(6).reshape(3, 2), torch.tensor([5, 6, 7])))
    assert source[1]["label"] == 6
    assert source[1]["input"].tolist() == [2, 3]
    assert source.schema == {"input": "array", "label": "int"}
    named = wb.data.as_source([(Image.new("L", (2, 1)), "cat", None)], fields=["image", "word", "none"])
    assert named[0]["image"].tolist() == [[0, 0]]
    assert set(named[0]) == {"__key__", "image", "word"}
    stream = wb.data.as_source(Stream())
    assert list(stream) == [{"__key__": "a", "jpg": b"1"}, {"__key__": "b", "jpg": b"2"}]
    assert wb.data.as_source(stream) is stream
    with pytest.raises(NoRandomAccessError, match="write it once as shards"):
        stream[0]
    with pytest.raises(ValueError, match="a path or URL, a dataset"):
        wb.data.as_source(3)
    with pytest.raises(ValueError, match="check: allowed for paths only"):
        wb.data.as_source([1], check=True)
    with pytest.raises(ValueError, match="field 'x' is a object"):
        wb.data.as_source([{"x": object()}])[0]
    with pytest.raises(ValueError, match="has 2 parts"):
        wb.data.as_source([(1, 2)], fields=["a"])[0]
    assert plain({"bytes": b"x", "path": None}) == b"x"  # a picture of Hugging Face datasets


def test_a_loader_reads_a_source_with_workers(tmp_path: Path) -> None:
    source = wb.data.open_source(write("tar", tmp_path))
    assert source[0]
    loader: DataLoader[Any] = DataLoader(source, batch_size=5, num_workers=2, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    assert digest_of(sample for batch in loader for sample in batch) == digest_of(sample for _, sample in samples())


def test_the_imbalance_is_that_of_whole_shards() -> None:
    assert imbalance([100] * 10, 8) == 1.6
    assert imbalance([10] * 16, 8) == 1
    assert imbalance([], 2) == 1
