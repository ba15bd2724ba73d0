"""Samples and manifests of other programs, and of attackers: what cannot be kept is refused, nothing is lost, executed or followed."""

import hashlib
import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.hostile import EVIL, assert_is_text
from workbench.data.formats import tfrecord
from workbench.data.manifest import INDEX, MANIFEST, ManifestError, packed, unpacked
from workbench.data.sample import CorruptSampleError, UnsafeNameError
from workbench.data.shard_writer import WORK


def test_a_number_of_another_kind_is_refused_or_kept_as_the_schema_says(tmp_path: Path) -> None:
    wb.data.write_shards([{"x": 0.5}, {"x": 1}], tmp_path / "floats", seed=None, quiet=True)
    assert [sample["x"] for sample in wb.data.open_source(tmp_path / "floats")] == [0.5, 1.0]
    with pytest.raises(ValueError, match="'x'"):
        wb.data.write_shards([{"x": 1}, {"x": "a"}], tmp_path / "mixed", quiet=True)
    assert not (tmp_path / "mixed" / MANIFEST).exists()


def test_arrays_come_back_whatever_their_order_of_bytes(tmp_path: Path) -> None:
    values = [np.asfortranarray(np.arange(6.0).reshape(2, 3)).astype(">f4") for _ in range(3)]
    wb.data.write_shards([{"x": value} for value in values], tmp_path / "out", format="npy", seed=None, quiet=True)
    for sample, value in zip(wb.data.open_source(tmp_path / "out"), values, strict=True):
        np.testing.assert_array_equal(sample["x"], value)


def test_overwrite_never_removes_its_source_nor_what_cannot_be_replaced(tmp_path: Path) -> None:
    wb.data.write_shards([{"x": number} for number in range(5)], tmp_path / "a", quiet=True)
    with pytest.raises(ValueError, match="another folder"):
        wb.data.write_shards(tmp_path / "a", tmp_path / "a", overwrite=True, seed=3, quiet=True)
    with pytest.raises(ValueError, match=r"object|kind|type"):
        wb.data.write_shards([{"x": object()}], tmp_path / "a", overwrite=True, quiet=True)
    assert len(wb.data.open_source(tmp_path / "a")) == 5


def test_the_name_of_a_field_stays_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsafeNameError, match="rename"):
        wb.data.write_shards([{"x/../../../escaped": b"hi"}], tmp_path / "out", format="folder", quiet=True)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("name", ["", ".", "a/./b"])
def test_a_shard_that_is_the_folder_itself_is_refused(tmp_path: Path, name: str) -> None:
    wb.data.write_shards([{"x": 1}], tmp_path / "out", quiet=True)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["shards"][0]["name"] = name
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "out/precious").write_text("mine")
    with pytest.raises(ManifestError):
        wb.data.write_shards([{"x": 1}], tmp_path / "out", overwrite=True, quiet=True)
    assert (tmp_path / "out/precious").exists()


def test_a_generator_is_refused_since_it_loses_what_was_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only once"):
        wb.data.write_shards(({"x": number} for number in range(300)), tmp_path / "out", quiet=True)


def test_a_negative_size_in_a_tar_does_not_hang(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("folder"))
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[156:157] = b"5"
    data[124:136] = b"-0000001000\0"
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises((ValueError, OSError)):
        wb.data.open_source(tmp_path / "a.tar")


def test_a_mapped_source_can_be_converted(tmp_path: Path) -> None:
    wb.data.write_shards([{"x": number} for number in range(4)], tmp_path / "a", seed=None, quiet=True)
    mapped = wb.data.open_source(tmp_path / "a").map(lambda sample: {**sample, "x": sample["x"] + 1})
    wb.data.convert(mapped, tmp_path / "b", format="npy", seed=None, quiet=True)
    assert [int(sample["x"]) for sample in wb.data.open_source(tmp_path / "b")] == [1, 2, 3, 4]


# --- files from somebody else


class Executed:
    """What a pickle of this would do to who unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_no_sample_is_unpickled(tmp_path: Path) -> None:
    mark, objects = tmp_path / "executed", io.BytesIO()
    np.save(objects, np.array([Executed(mark), 1], object), allow_pickle=True)
    (tmp_path / "npy").mkdir()
    (tmp_path / "npy" / "x.npy").write_bytes(objects.getvalue())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1.npy").write_bytes(objects.getvalue())
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.npy", "1.pyd"):  # webdataset unpickles the second
            member = tarfile.TarInfo(name)
            member.size = len(objects.getvalue())
            tar.addfile(member, io.BytesIO(objects.getvalue()))
    for path, format in (("npy", "npy"), ("npy/x.npy", "npy"), ("folder", "folder"), ("a.tar", "tar")):
        with pytest.raises(CorruptSampleError):
            list(wb.data.open_source(tmp_path / path, format=format))
    assert not mark.exists()
    np.load(tmp_path / "npy" / "x.npy", allow_pickle=True)
    assert mark.exists()  # it would have


def test_an_extension_type_of_a_table_is_not_unpickled(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    mark = tmp_path / "executed"
    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Executed(mark))}
    table = pa.table([pa.array([1, 2, 3])], schema=pa.schema([pa.field("x", pa.int64(), metadata=about)]))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    for name in ("a.arrow", "a.parquet"):
        assert [sample["x"] for sample in wb.data.open_source(tmp_path / name)] == [1, 2, 3]
    assert not mark.exists()


def test_an_hdf5_file_reads_no_other_file(tmp_path: Path) -> None:
    """HDF5 may name any path: as a link, as the place of a dataset's bytes, or as the source of a virtual dataset."""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "data").mkdir()
    (tmp_path / "secret").write_bytes(b"a key of mine".ljust(64))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(8.0) + 100
    layout, inside = (h5py.VirtualLayout((8,), "f8") for _ in range(2))
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (8,))
    inside[:] = h5py.VirtualSource(".", "y", (8,))
    with h5py.File(tmp_path / "data" / "a.h5", "w") as file:  # what stays in it is read
        file["y"] = np.arange(8.0)
        file["w"] = h5py.SoftLink("/y")
        file.create_virtual_dataset("z", inside)
    sample = wb.data.open_source(tmp_path / "data" / "a.h5")[3]
    assert (sample["w"], sample["y"], sample["z"]) == (3.0, 3.0, 3.0)

    def linked(file: Any) -> None:
        file["x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")

    def linked_twice(file: Any) -> None:
        file["group/x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")
        file["x"] = h5py.SoftLink("/group/x")

    def stored(file: Any) -> None:
        file.create_dataset("x", (64,), dtype="u1", external=[(str(tmp_path / "secret"), 0, 64)])

    def virtual(file: Any) -> None:
        file.create_virtual_dataset("x", layout)

    for make, said in ((linked, "is a link to the file"), (linked_twice, "is in the file"), (stored, "secret"), (virtual, "other.h5")):
        path = tmp_path / "data" / f"{make.__name__}.h5"
        with h5py.File(path, "w") as file:
            make(file)
        for given in (path, tmp_path / "data"):
            with pytest.raises(UnsafeNameError, match=f"the field 'x' .*{said}"):
                wb.data.open_source(given, format="hdf5")
        path.unlink()


def test_places_in_an_arrow_file_beyond_its_end_are_damage(tmp_path: Path) -> None:
    """pyarrow follows them: it gives what lies there in the memory of the process, or is killed."""
    pa = pytest.importorskip("pyarrow")
    for kind in (pa.binary(), pa.string()):
        places = pa.py_buffer(np.array([0, 2, 2_000_000, 4, *[5] * 16, 8], "i4").tobytes())
        column = pa.Array.from_buffers(kind, 20, [None, places, pa.py_buffer(b"abcdefgh")])
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, pa.schema([("x", kind)])) as writer:
            writer.write_batch(pa.record_batch([column], names=["x"]))
        source = wb.data.open_source(tmp_path / "a.arrow")
        for read in (lambda source: source[1], lambda source: source[[0, 1]], list):
            with pytest.raises(CorruptSampleError, match=r"a\.arrow is damaged or truncated: .*offset"):
                read(source)


def test_a_number_of_any_length_in_a_record_costs_no_time(tmp_path: Path) -> None:
    record = b"\xff" * 3_000_000 + b"\x01"
    head = len(record).to_bytes(8, "little")
    parts = [head, tfrecord.masked(head).to_bytes(4, "little"), record, tfrecord.masked(record).to_bytes(4, "little")]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(parts))
    with pytest.raises(CorruptSampleError, match="more than 64 bits"):  # took minutes
        wb.data.open_source(tmp_path / "a.tfrecord")[0]


def test_the_schema_in_a_database_is_checked(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    for name, about in enumerate((b'{"schema": [1]}', b'{"schema": {"x": ["int"]}}', b"[]", b"{", b'{"schema": {"x": "int"}}')):
        path = tmp_path / f"{name}.mdb"
        with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"00000000", b"x")
            transaction.put(b"__meta__", about)
        with pytest.raises(CorruptSampleError):
            wb.data.open_source(path)[0]


@pytest.mark.parametrize("format", ["tar", "tfrecord", "npy"])
def test_an_index_that_leads_out_of_its_shards_is_refused(tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    wb.data.write_shards([{"x": number, "b": bytes(50)} for number in range(12)], out, shards=2, format=format, quiet=True)
    good, manifest = unpacked((out / INDEX).read_bytes(), ""), json.loads((out / MANIFEST).read_text())
    for name, array in good.items():
        wide = array.astype(np.int64)
        for bad in (wide - 10**6, wide + 2**62, array[:1], array.astype(np.float64), array[None], None):
            if bad is not None and bad.shape == array.shape and (bad.dtype == array.dtype) and (name == "lengths" or not array.size):
                continue  # lengths of formats without places only say which fields there are
            data = packed({**good, name: bad} if bad is not None else {key: value for key, value in good.items() if key != name})
            (out / INDEX).write_bytes(data)
            (out / MANIFEST).write_text(json.dumps({**manifest, "index_sha256": hashlib.sha256(data).hexdigest()}))
            with pytest.raises(ManifestError, match="does not describe the samples"):
                wb.data.open_source(out)


def test_a_writer_follows_no_link_of_its_folder(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    (mine / "inner").mkdir(parents=True)
    (mine / "precious").write_text("mine")
    for name in (f"{WORK}/lock", f"{WORK}/plan.json", WORK):
        out.mkdir()
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).symlink_to(mine / "inner" if name == WORK else mine / "precious")
        with pytest.raises(UnsafeNameError, match="is a symbolic link"):
            wb.data.write_shards([{"x": 1}], out, quiet=True)
        shutil.rmtree(out)
    out.mkdir()
    (out / f"{INDEX}.part").symlink_to(mine / "precious")
    wb.data.write_shards([{"x": 1}], out, quiet=True)
    (out / "link").symlink_to(mine)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["shards"][0]["name"] = "link/precious"
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="is not the name of a shard"):
        wb.data.write_shards([{"x": 1}], out, overwrite=True, quiet=True)
    assert {path.name: path.read_text() for path in mine.iterdir() if path.is_file()} == {"precious": "mine"}
    assert not list((mine / "inner").iterdir())


def test_words_of_a_dataset_are_text_and_no_html(tmp_path: Path) -> None:
    pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")
    odd = EVIL.replace("/", "|")  # no name of a file has it
    out = tmp_path / "out"
    samples = [{"__key__": f"{number}", "txt": f"{EVIL} {number}", odd: number, "cls": number % 2} for number in range(4)]
    wb.data.write_shards(samples, out, format="parquet", description=EVIL, licence=EVIL, provenance=EVIL, preprocessing=[EVIL], quiet=True)
    text = (out / MANIFEST).read_text()
    (out / MANIFEST).write_text(text.replace('"classes": []', f'"classes": {json.dumps([EVIL, EVIL + "2"])}'))
    card = wb.data.describe(out)
    assert set(card.classes) == {EVIL, EVIL + "2"}
    assert_is_text(card._repr_html_(), card.explore()._repr_mimebundle_()["text/html"], wb.data.verify(out)._repr_html_() + "alert(1)")
    assert_is_text(wb.data.audit(out, near=False)._repr_html_() + "alert(1)")
