"""An audit finds all that is planted in data of any kind, and nothing else; its splits do not leak."""

import io
import itertools
import json
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

import workbench as wb
from workbench.core.progress import Waiting
from workbench.data.analysis.data_audit import DataAudit
from workbench.data.quality import audit, shuffle_quality
from workbench.data.samples import ByteText, ClipArt, folder
from workbench.data.shards import read_index


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    kept = io.BytesIO()
    image.save(kept, "JPEG", quality=quality)
    return kept.getvalue()


def png(image: Image.Image, level: int = 6) -> bytes:
    kept = io.BytesIO()
    image.save(kept, "PNG", compress_level=level)
    return kept.getvalue()


def noise(seed: int, side: int = 32) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def bomb() -> bytes:
    """A PNG of a few bytes whose head declares 60,000 × 60,000 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def clip_art() -> DataAudit:
    return audit(folder("openclipart"))


def test_the_equal_pictures_of_the_sample_data_are_all_found_and_no_others(clip_art: DataAudit) -> None:
    head, entries = read_index(folder("openclipart"))
    truth = defaultdict(set)
    for entry in entries:
        truth[entry.group].add(entry.name.removesuffix(".jpg"))
    expected = {frozenset(names) for names in truth.values() if len(names) > 1}
    assert {frozenset(member.key for member in group.members) for group in clip_art.exact} == expected
    assert (len(expected), clip_art.redundant, len(clip_art.conflicts)) == (138, 157, 64)
    assert set(clip_art.classes[""]) == set(head["classes"])
    assert sum(clip_art.samples.values()) == 1277
    assert clip_art.kinds == {"picture": 1277}
    assert not clip_art.unusable


def test_a_result_shows_itself_and_travels(clip_art: DataAudit) -> None:
    text = str(clip_art)
    assert "157" in text
    assert "146 conflicting labels, 75 duplicate" in clip_art.verdict
    assert "near duplicates are for review" in clip_art.verdict
    assert "<table>" in clip_art._repr_html_()
    again = DataAudit.from_json(json.loads(json.dumps(clip_art.to_json())))
    assert again == clip_art
    frame = clip_art.to_frame()
    assert frame[frame.kind == "bytes"].group.nunique() == 138
    assert len(clip_art.plot().texts) == 8
    with pytest.raises(ValueError, match=r"no group of pictures was found"):
        audit([(bytes([i]) * 9, 0) for i in range(3)]).plot()


@pytest.mark.parametrize("seed", range(3))
def test_a_split_keeps_groups_together_and_classes_alike(clip_art: DataAudit, seed: int) -> None:
    train, validation = clip_art.split(0.2, seed=seed)
    assert sorted(train + validation) == list(range(1277))
    assert len(validation) == pytest.approx(255, abs=15)
    held = set(validation)
    for group in clip_art.groups:
        assert len({member.index in held for member in group.members}) == 1
    labels = np.array(clip_art.order[""])
    shares = np.bincount(labels[validation]) / np.bincount(labels)
    assert shares.min() > 0.12 < shares.max() < 0.28
    assert clip_art.split(0.2, seed=seed) == (train, validation)
    assert clip_art.split(0.2, seed=seed + 10) != (train, validation)
    with pytest.raises(ValueError, match=r"validation=1: a number between 0.0 and 1.0"):
        clip_art.split(1)
    with pytest.raises(ValueError, match=r"split='test': allowed are ''"):
        clip_art.split(split="test")


def test_what_is_planted_in_a_folder_is_found(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / ("cats" if number % 2 else "dogs")).mkdir(exist_ok=True)
        (tmp_path / ("cats" if number % 2 else "dogs") / f"{number}.png").write_bytes(png(noise(number)))
    (tmp_path / "cats/same.png").write_bytes((tmp_path / "cats/1.png").read_bytes())
    (tmp_path / "dogs/repacked.png").write_bytes(png(noise(3), level=1))  # other bytes, the same pixels, another label
    (tmp_path / "dogs/cut.jpg").write_bytes(jpeg(noise(9))[:-300])
    (tmp_path / "dogs/empty.jpg").write_bytes(b"")
    (tmp_path / "dogs/bomb.png").write_bytes(bomb())
    (tmp_path / "dogs/near.jpg").write_bytes(jpeg(noise(0), quality=40))
    (tmp_path / "dogs/link.png").symlink_to(tmp_path / "dogs/0.png")
    found = audit(tmp_path)
    by_kind = {group.kind: {member.key for member in group.members} for group in found.groups}
    assert by_kind == {
        "bytes": {"cats/1", "cats/same"}, "pixels": {"cats/3", "dogs/repacked"}, "near pictures": {"dogs/0", "dogs/near"}
    }  # fmt: skip
    assert {(each.member.key, each.reason) for each in found.unusable} == {
        ("dogs/cut", "unreadable"), ("dogs/empty", "unreadable"), ("dogs/bomb", "huge")
    }  # fmt: skip
    assert "3600000000 pixels" in next(each.why for each in found.unusable if each.reason == "huge")
    reasons = {drop.member.key: drop.reason for drop in found.drop_list}
    assert reasons == {
        "dogs/cut": "unreadable", "dogs/empty": "unreadable", "dogs/bomb": "huge",
        "cats/3": "conflicting labels", "dogs/repacked": "conflicting labels", "cats/same": "duplicate",
    }  # fmt: skip
    assert "1 symbolic links were not followed" in str(found)
    assert not found.ok
    assert found.figures["huge"] == 1
    assert len(found.kept()) == found.samples[""] - 6
    assert len(found.kept(without=["duplicate"])) == found.samples[""] - 1
    with pytest.raises(ValueError, match=r"without='ugly': allowed are 'unreadable'"):
        found.kept(without=["ugly"])


class Broken(torch.utils.data.Dataset[Any]):
    """Its third sample raises."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise OSError("the disk is gone")
        return torch.full((3, 16, 16), float(index)) + torch.arange(16.0), index


def test_leaks_between_splits_are_found_and_the_copy_in_training_goes() -> None:
    text = [("It is a truth universally acknowledged, that a single man", 0), ("Call me Ishmael. Some years ago", 1)]
    found = audit({"train": [*text, ("IT IS A TRUTH universally acknowledged that a single man!", 0)], "validation": [text[1]]})
    assert {frozenset(m.where for m in group.members) for group in found.exact} == {
        frozenset({"train: 00000000", "train: 00000002"}), frozenset({"train: 00000001", "validation: 00000000"})
    }  # fmt: skip
    assert len(found.leaks) == 1
    assert {(d.member.where, d.reason) for d in found.drop_list} == {("train: 00000002", "duplicate"), ("train: 00000001", "leak")}
    assert "validation figures are too good" in found.verdict
    assert found.kept("validation") == [0]
    broken = audit(Broken())
    assert [(each.member.index, each.why) for each in broken.unusable] == [(2, "the disk is gone")]
    with pytest.raises(ValueError, match=r"give at least one split"):
        audit({})


def test_tokens_and_random_augmentation() -> None:
    found = audit(ByteText("validation", length=256))
    assert found.kinds == {"tokens": len(ByteText("validation", length=256))}
    assert found.ok
    assert "is another each time: give the dataset without random augmentation" in str(audit(ClipArt("train"), near=False, budget_s=0.01))
    assert re.search(
        r"0.01 s of the budget of 0.01 s were over after \d+ of 1,027", str(audit(ClipArt("train"), near=False, budget_s=0.01))
    )


def test_an_audit_shares_its_budget_among_splits_and_says_what_it_did_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = [0.0], list[str]()
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now[0]))
    monkeypatch.setattr(Waiting, "tick", lambda self: shown.append(self.words(now[0])))

    class Slow:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            if index >= 100:
                raise IndexError
            now[0] += self.seconds
            return np.full(4, index % 50), 0

    found = audit({"train": Slow(1.0), "validation": Slow(0.1)}, near=False)
    assert found.samples["validation"] == 100
    assert 20 < found.samples["train"] < 40
    assert (
        f"30 s of the budget of 60 s were over after {found.samples['train']} of 100 samples of train; budget_s=None reads all"
        in found.notes
    )
    assert any({member.split for member in group.members} == {"train", "validation"} for group in found.groups)
    assert shown[0] == "audit: reading 200 samples once, then comparing them … 0 s of at most 60 s"
    now[0] = 0.0
    assert audit(Slow(1.0), near=False, budget_s=None).samples == {"": 100}

    class Interrupted(Slow):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            if index == 70:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    now[0] = 0.0
    found = audit({"train": Interrupted(0.0), "validation": Slow(0.0)}, near=False)
    assert found.samples == {"train": 70, "validation": 0}
    assert "stopped by Ctrl-C after 70 of 100 samples of train: nothing is known of the others" in found.notes
    with pytest.raises(ValueError, match="budget_s=0: seconds above 0 are allowed; try budget_s=60, or None for no limit"):
        audit(Slow(0.0), budget_s=0)


@pytest.mark.parametrize("end", ["budget", "Ctrl-C"])
def test_an_audit_says_what_it_did_not_compare(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    now = 0.0
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now))

    def say(self: Waiting, doing: str, known: str = "") -> None:
        nonlocal now
        if doing.startswith("comparing near texts"):
            now += 10.0
            if end == "Ctrl-C":
                raise KeyboardInterrupt

    monkeypatch.setattr(Waiting, "say", say)
    words = "the same words in the same order with one more at the end of each of them which is its number"
    texts = [{"txt": f"{words} {number}", "label": 0} for number in range(20)]
    found = audit(texts)
    if end == "budget":
        assert "the budget ended when near texts were looked for: only the first 25 % of 20 were compared with each other" in found.notes
        assert len(found.near[0].members) == 5
        assert len(audit(texts, budget_s=None).near[0].members) == 20
    else:
        assert "stopped by Ctrl-C when near texts were looked for: only the first 0 % of 20 were compared with each other" in found.notes
        assert not found.near
    assert found.samples == {"": 20}


def test_a_stream_without_an_end_is_audited_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts it first."""
    now = [0.0]
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now[0]))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
            for index in itertools.count():
                now[0] += 1.0
                yield np.full(4, index % 50), 0

    found = audit(Stream(), near=False)
    assert 55 < found.samples[""] < 65
    assert f"60 s of the budget of 60 s were over after {found.samples['']} samples; budget_s=None reads all" in found.notes


def test_shuffling_is_as_good_as_its_batches_are_mixed() -> None:
    """Shards of a source that is sorted by class: shuffling them alone mixes nothing, and shuffling before sharding mixes all."""
    labels = np.repeat(np.arange(10), 400)
    sampler = wb.data.ResumableSampler
    full = shuffle_quality(sampler(4000), labels, 32)
    shards = shuffle_quality(sampler(4000, blocks=200, window=1), labels, 32)
    few = shuffle_quality(sampler(4000, blocks=200, window=4), labels, 32)
    before = shuffle_quality(sampler(4000, blocks=200, window=1), np.random.default_rng(0).permutation(labels), 32)
    assert full == pytest.approx(1, abs=0.02)
    assert shards < 0.1
    assert 0.3 < few < 0.75
    assert before > 0.97
    assert shuffle_quality(range(100), [3] * 100, 10) == 1
    with pytest.raises(ValueError, match=r"batch_size=32: the order has 10 samples, not one whole batch"):
        shuffle_quality(range(10), [0, 1] * 5, 32)
