"""The committed sample data are what their manifest says, and read as datasets; the recipe's own arithmetic."""

import hashlib
import importlib.util
import io
import json
import pickle
import tarfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Subset

from workbench.data.samples import ByteText, ClipArt, Fashion, FashionMnist, SamplesMissingError, random_crop
from workbench.data.shards import CorruptSampleError, Entry, read_entry, read_index

ROOT = Path(__file__).parents[2] / "data_samples"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    """`data_samples/build.py`, which is a script."""
    spec = importlib.util.spec_from_file_location("build_samples", ROOT / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_those_of_the_manifest() -> None:
    described = json.loads((ROOT / "manifest.json").read_text())["files"]
    there = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert there == {*described, "README.md", "build.py", "manifest.json"}
    for name, expected in described.items():
        data = (ROOT / name).read_bytes()
        assert {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} == expected, name
    assert sum((ROOT / name).stat().st_size for name in there) < 8_000_000
    for folder in ("openclipart", "fashion_mnist", "austen"):
        assert f"{folder}/LICENSE.txt" in described


def test_pictures_are_where_the_index_says() -> None:
    head, entries = read_index(ROOT / "openclipart")
    members = {}
    for shard in head["shards"]:
        path = ROOT / "openclipart" / shard["name"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
        with tarfile.open(path) as tar:  # a plain tar: any tool reads it
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                members[member.name] = file.read()
    assert len(members) == len(entries) == 1277
    pixels = defaultdict(list)
    for entry in entries:
        data = read_entry(ROOT / "openclipart" / head["shards"][entry.shard]["name"], entry)
        assert data == members[entry.name]
        image = Image.open(io.BytesIO(data))
        assert (image.size, image.mode) == ((64, 64), "RGB")
        assert head["classes"][entry.label] == entry.name.split("/")[0] == entry.source.split("/")[0]
        pixels[image.tobytes()].append(entry)
    doubled = [group for group in pixels.values() if len(group) > 1]
    assert (len(doubled), sum(len(g) - 1 for g in doubled), sum(len({e.label for e in g}) > 1 for g in doubled)) == (138, 157, 64)
    for group in pixels.values():
        assert len({(entry.group, entry.split) for entry in group}) == 1  # nothing leaks from one split into the other
    assert len({entry.group for entry in entries}) == len(pixels)


def test_splits_have_all_classes_in_like_shares() -> None:
    train, validation = ClipArt("train"), ClipArt("validation")
    assert (len(train), len(validation)) == (1027, 250)
    for label in range(10):
        held = sum(entry.label == label for entry in validation.entries)
        known = sum(entry.label == label for entry in train.entries)
        assert 0.1 < held / (held + known) < 0.3


def test_a_picture_is_a_normalised_tensor() -> None:
    image, label = ClipArt("validation")[0]
    assert (image.shape, image.dtype, label) == ((3, 64, 64), torch.float32, 0)
    data = ClipArt("validation")
    all_images = torch.stack([data[i][0] for i in range(len(data))])
    assert abs(float(all_images.mean())) < 0.1
    assert abs(float(all_images.std()) - 1) < 0.1
    assert ClipArt("validation", side=32)[0][0].shape == (3, 32, 32)


def test_augmentation_follows_the_seed() -> None:
    data = ClipArt("train")
    torch.manual_seed(0)
    first, second = data[5][0], data[5][0]
    torch.manual_seed(0)
    assert torch.equal(data[5][0], first)
    assert not torch.equal(first, second)
    plain = ClipArt("train", augment=False)
    assert torch.equal(plain[5][0], plain[5][0])


def test_predecoded_pictures_are_the_same() -> None:
    read, kept = ClipArt("validation"), ClipArt("validation", decode="predecoded")
    assert all(torch.equal(read[i][0], kept[i][0]) for i in range(0, 250, 25))


def test_slow_storage_waits_at_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("workbench.data.samples.time.sleep", waits.append)
    data = ClipArt("validation", storage_latency_s=0.25)
    kept = ClipArt("validation", storage_latency_s=0.25, decode="predecoded")
    for i in range(3):
        data[i], kept[i]
    assert waits == [0.25] * 3


def test_workers_and_pickles_read_the_same_pictures() -> None:
    data = ClipArt("validation")
    copy = pickle.loads(pickle.dumps(data))  # what a spawned worker gets
    expected = torch.stack([data[i][0] for i in range(64)])
    assert torch.equal(torch.stack([copy[i][0] for i in range(64)]), expected)
    (batch,) = DataLoader(Subset(data, range(64)), batch_size=64, num_workers=1)
    assert torch.equal(batch[0], expected)


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(b"\0" * 512 + b"hellp")
    entry = Entry(name="a/0.jpg", shard=0, offset=512, length=5, crc32=907060870, label=0, group=0, split="train", source="a.png")
    with pytest.raises(CorruptSampleError, match=r"a/0.jpg is damaged: bytes 512 to 517 of .*shard.tar .* restore the file"):
        read_entry(tmp_path / "shard.tar", entry)
    (tmp_path / "shard.tar").write_bytes(b"\0" * 512 + b"hello")
    assert read_entry(tmp_path / "shard.tar", entry) == b"hello"


def test_missing_data_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_DATA_SAMPLES", str(tmp_path))
    with pytest.raises(SamplesMissingError, match=r"not in .*openclipart: .*pip install -e .*WORKBENCH_DATA_SAMPLES"):
        ClipArt()


def test_unknown_choices_name_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"split='test': allowed are 'train', 'validation'"):
        ClipArt("test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decode='late': allowed are 'on-the-fly', 'predecoded'"):
        ClipArt(decode="late")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"split='test': allowed are 'train', 'validation'"):
        ByteText("test")  # type: ignore[arg-type]


@given(st.integers(8, 2000), st.integers(8, 2000), st.integers(0, 2**31))
def test_crops_lie_within_the_picture(width: int, height: int, seed: int) -> None:
    torch.manual_seed(seed)
    (left, top, right, bottom), _ = random_crop(width, height)
    assert 0 <= left < right <= width + 1e-6
    assert 0 <= top < bottom <= height + 1e-6
    assert 0.25 < (right - left) * (bottom - top) / (width * height) <= 1 + 1e-9


def test_fashion_mnist() -> None:
    data = FashionMnist()
    labels = torch.tensor([data[i][1] for i in range(len(data))])
    assert labels.bincount().tolist() == [1000] * 10
    images = torch.stack([data[i][0] for i in range(len(data))])
    assert images.shape == (10_000, 1, 28, 28)
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_small_fashion_comes_in_whole_batches() -> None:
    train, validation, whole = Fashion(), Fashion("validation"), FashionMnist()
    assert (len(train), len(validation)) == (8_000, 2_000)
    pooled, label = train[5]
    assert torch.allclose(pooled, torch.nn.functional.avg_pool2d(whole[5][0], 2).flatten(), atol=1e-6)
    assert label == whole[5][1]
    assert validation[0][1] == whole[8_000][1]
    loader = torch.utils.data.DataLoader(train, batch_size=4, collate_fn=Fashion.collate)
    inputs, labels = next(iter(loader))
    one_by_one, their_labels = Fashion.collate([train[i] for i in range(4)])
    assert torch.equal(inputs, one_by_one)
    assert torch.equal(labels, their_labels)
    with pytest.raises(ValueError, match=r"split='test': allowed are 'train', 'validation'"):
        Fashion("test")  # type: ignore[arg-type]


def test_text_in_windows() -> None:
    data = ByteText(length=64)
    first, second = data[0], data[1]
    assert bytes(first.tolist()).startswith(b"PRIDE AND PREJUDICE\n\nBy Jane Austen\n")
    assert first.shape == (65,)
    assert first[-1] == second[0]  # the last byte to predict is the next window's first to read
    assert data[len(data) - 1].shape == (65,)
    with pytest.raises(IndexError):
        data[len(data)]
    validation = ByteText("validation", length=64)
    assert len(data) + len(validation) == pytest.approx(684_768 / 64, abs=2)
    last_words = b"".join(bytes(validation[i].tolist()) for i in range(len(validation) - 3, len(validation)))
    assert b"warmest gratitude" in last_words


def test_r_character_vectors(recipe: ModuleType) -> None:
    def integer(value: int) -> bytes:
        return value.to_bytes(4, "big")

    head = b"X\n" + integer(3) + integer(0x40201) + integer(0x30500) + integer(5) + b"UTF-8"
    strings = b"".join(integer(0x40009) + integer(len(s)) + s for s in (b"one", b"", b"two"))
    assert recipe.r_strings(head + integer(16) + integer(3) + strings) == ["one", "", "two"]
    with pytest.raises(ValueError, match="not R's serialisation"):
        recipe.r_strings(b"A\n" + bytes(40))
    with pytest.raises(ValueError, match="not a character vector"):
        recipe.r_strings(head + integer(13) + integer(3) + bytes(12))


@given(st.lists(st.tuples(st.sampled_from(["animals", "food", "tools"]), st.sampled_from("abcdefghijklmnop")), max_size=60))
def test_a_group_is_held_out_whole(recipe: ModuleType, pictures: list[tuple[str, str]]) -> None:
    held = recipe.held_out([label for label, _ in pictures], [group for _, group in pictures])
    groups = {group for _, group in pictures}
    assert held <= groups
    assert len(held) == pytest.approx(len(groups) / 5, abs=1.5)
