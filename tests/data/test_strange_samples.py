"""Samples and manifests of other programs: what cannot be kept is refused at writing, and nothing is lost or written elsewhere."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from workbench.data.manifest import MANIFEST, ManifestError
from workbench.data.sample import UnsafeNameError


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
    with pytest.raises(ValueError, match="once only"):
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
