"""Conversions: pictures decoded, resized, augmented and encoded, texts packed; size and time predicted beside measured."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import workbench as wb
from workbench.data.conversion import Packed, Prepare, resized
from workbench.data.sample import CorruptSampleError
from workbench.data.samples import folder


def pictures(count: int = 24) -> wb.data.Source:
    """Clip art of the repository, as files in a tar shard."""
    return wb.data.as_source(wb.data.open_source(folder("openclipart") / "*.tar")[list(range(count))])


def crop(pixels: Any, numbers: random.Random) -> Any:
    at = numbers.randrange(8)
    return pixels[at : at + 16, at : at + 16]


def test_pictures_are_prepared_once_and_their_size_is_predicted(tmp_path: Path) -> None:
    source = pictures(200)
    done = wb.data.convert(source, tmp_path / "a", format="npy", resize=32, quiet=True)
    assert done.manifest.schema["image"] == "array"
    found = wb.data.open_source(tmp_path / "a")
    assert found[0]["image"].shape == (32, 32, 3)
    assert done.predicted_bytes == pytest.approx(done.bytes, rel=0.1)
    assert done.predicted_seconds is not None
    assert "shorter side resized to 32 pixels" in str(done.manifest.preprocessing)
    assert type(done).from_json(done.to_json()) == done
    assert "predicted" in str(done)
    assert done.to_frame().shape == (2, 3)
    again = wb.data.convert(source, tmp_path / "b", format="tar", resize=32, encode="jpeg", quality=80, quiet=True)
    assert again.bytes < done.bytes
    sample = wb.data.open_source(tmp_path / "b")[0]
    assert Image.open(io.BytesIO(sample["jpg"])).size == (32, 32)


def test_copies_are_augmented_by_key_and_copy_alone(tmp_path: Path) -> None:
    source = pictures(8)
    for name, seed in (("a", 0), ("b", 7)):
        done = wb.data.convert(source, tmp_path / name, augment=crop, copies=3, encode="png", seed=seed, quiet=True)
        assert done.manifest.count == 24
    found = {name: {s["__key__"]: s["png"] for s in wb.data.open_source(tmp_path / name)} for name in ("a", "b")}
    assert found["a"] == found["b"]
    groups = {key.rpartition("-")[0] for key in found["a"]}
    assert len(groups) == 8
    assert any(len({found["a"][f"{key}-{copy}"] for copy in range(3)}) > 1 for key in groups)


def test_texts_are_packed_to_one_length(tmp_path: Path) -> None:
    texts = [{"txt": "abc"}, {"txt": "defgh"}, {"txt": ""}, {"txt": "ij"}]
    done = wb.data.convert(texts, tmp_path / "a", tokenise=lambda text: list(text.encode()), length=4, end_token=0, seed=None, quiet=True)
    windows = [bytes(s["tokens"].tolist()) for s in wb.data.open_source(tmp_path / "a")]
    assert windows == [b"abc\0", b"defg", b"h\0\0i"]
    assert done.predicted_bytes is None
    with pytest.raises(ValueError, match="has no text"):
        list(Packed(wb.data.as_source([{"x": 1}]), list, 4, None))


@given(st.lists(st.text("ab", max_size=9)), st.integers(1, 7))
def test_no_token_is_lost_or_repeated_but_the_tail(texts: list[str], length: int) -> None:
    packed = list(Packed(wb.data.as_source([{"txt": text} for text in texts]), lambda text: list(text.encode()), length, 0))
    whole = b"".join(text.encode() + b"\0" for text in texts)
    assert b"".join(bytes(sample["tokens"].tolist()) for sample in packed) == whole[: len(whole) // length * length]


def test_arguments_and_pictures_that_are_wrong(tmp_path: Path) -> None:
    for arguments, said in (
        ({"encode": "gif"}, "allowed are 'jpeg', 'png', 'webp'"),
        ({"resize": 0}, "resize=0"),
        ({"length": 5}, "belong together"),
        ({"copies": 0}, "copies=0"),
    ):
        with pytest.raises(ValueError, match=said):
            wb.data.convert([{"x": 1}], tmp_path / "a", **arguments)  # type: ignore[arg-type]
    with pytest.raises(CorruptSampleError, match="the picture cannot be decoded"):
        wb.data.convert([{"jpg": b"nothing"}], tmp_path / "a", decode=True, quiet=True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".wb-probe")] == []
    assert resized(np.zeros((10, 20, 3), np.uint8), 4).shape == (4, 4, 3)
    assert Prepare(resize=4).words()[0] == "decoded"
