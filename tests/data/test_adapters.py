"""Datasets of webdataset, litdata and Hugging Face are sources: the same samples by number, in order and as shards."""

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.data.adapters import IterableSource
from workbench.data.manifest import digest_of

COUNT = 20


def samples() -> list[dict[str, Any]]:
    return [{"__key__": f"{n:04d}", "jpg": bytes(range(n, n + 40)), "cls": n % 3, "txt": f"ä {n}"} for n in range(COUNT)]


# webdataset 1.0.2 opens each tar file and never closes it (url_opener in its tariterators.py): Python does, and warns
@pytest.mark.filterwarnings("ignore:unclosed file .*tar'>:ResourceWarning")
def test_a_webdataset_is_gone_through_and_written_as_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    wb.data.write_shards(samples(), tmp_path / "a", shards=2, quiet=True)
    shards = [str(path) for path in sorted((tmp_path / "a").glob("*.tar"))]
    source = wb.data.as_source(webdataset.WebDataset(shards, shardshuffle=False).decode())
    assert isinstance(source, IterableSource)
    assert sorted(source, key=lambda sample: sample["__key__"]) == samples()
    assert source.schema == {"jpg": "bytes", "cls": "int", "txt": "str"}
    again = wb.data.write_shards(source, tmp_path / "b", quiet=True)
    assert (again.count, again.dataset_sha256) == (COUNT, digest_of(samples()))


def test_a_dataset_of_hugging_face_is_read_by_number(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {name: [sample[name] for sample in samples()] for name in ("jpg", "cls", "txt")}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "hf"))
    source = wb.data.as_source(datasets.load_from_disk(str(tmp_path / "hf")))
    expected = [{**sample, "__key__": f"{n:08d}"} for n, sample in enumerate(samples())]
    assert source[[3, 17, 3]] == [expected[3], expected[17], expected[3]]
    assert list(source) == expected
    assert wb.data.write_shards(source, tmp_path / "b", format="npy", quiet=True).dataset_sha256 == digest_of(samples())
    own = wb.data.open_source(tmp_path / "hf")  # its Arrow files, without the library
    assert [own[n] for n in (0, 19)] == [expected[0], expected[19]]


def test_a_dataset_of_litdata_is_read_by_number(tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(tmp_path / "lit"), chunk_bytes="1MB")
    for number, sample in enumerate(samples()):
        writer.add_item(number, {name: sample[name] for name in ("jpg", "cls", "txt")})
    writer.done()
    writer.merge()
    source = wb.data.as_source(litdata.StreamingDataset(str(tmp_path / "lit")))
    expected = [{**sample, "__key__": f"{n:08d}"} for n, sample in enumerate(samples())]
    assert [source[n] for n in (3, 17, 0)] == [expected[3], expected[17], expected[0]]
    assert list(source) == expected
    assert wb.data.write_shards(source, tmp_path / "b", quiet=True).dataset_sha256 == digest_of(samples())
