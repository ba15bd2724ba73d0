"""Near duplicates: planted copies are found, other pictures and texts are not, and groups do not chain."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from workbench.data.analysis.duplicates import JACCARD, look_of, near_pictures, near_texts, normalised, shingles, star_groups


def drawing(seed: int) -> Image.Image:
    """Random shapes on white."""
    rng = np.random.default_rng(seed)
    pixels = np.full((64, 64, 3), 255, np.uint8)
    for _ in range(6):
        x, y, w, h = rng.integers(4, 40, 4)
        pixels[y : y + h, x : x + w] = rng.integers(0, 220, 3)
    return Image.fromarray(pixels)


CHANGES = {
    "resized": lambda image: image.resize((40, 40)),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.7),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
    "cropped": lambda image: image.crop((2, 2, 62, 62)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def test_planted_copies_are_found_and_others_are_not() -> None:
    originals = [drawing(seed) for seed in range(60)]
    looks = [look_of(image.convert("L")) for image in originals]
    assert len(near_pictures(looks)) == 0
    for name, change in CHANGES.items():
        copies = [look_of(change(image).convert("L")) for image in originals]
        pairs = {tuple(pair) for pair in near_pictures([*looks, *copies]).tolist()}
        found = sum((i, i + 60) in pairs for i in range(60))
        assert found >= 54, f"{name}: {found} of 60"
        assert not {(a, b) for a, b in pairs if b - a != 60}, name


def test_flat_pictures_are_like_nothing() -> None:
    flat = [look_of(Image.new("L", (32, 32), shade)) for shade in (0, 128, 255, 255)]
    assert all(look.flat for look in flat)
    assert near_pictures(flat).shape == near_pictures([]).shape == (0, 2)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(lambda pair: pair[0] != pair[1]), max_size=60))
def test_groups_have_a_centre_and_share_no_member(pairs: list[tuple[int, int]]) -> None:
    groups = star_groups(pairs)
    known = {frozenset(pair) for pair in pairs}
    members = [member for group in groups for member in group]
    assert len(members) == len(set(members))
    assert all(frozenset((group[0], other)) in known for group in groups for other in group[1:])
    grouped = set(members)
    assert all(a in grouped or b in grouped for a, b in pairs)  # no pair is forgotten


def test_texts_are_near_by_their_shingles() -> None:
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(500)]
    texts = [[words[i] for i in rng.integers(0, 500, 120)] for _ in range(80)]
    copies = [[*text[:117], "one", "other", "end"] for text in texts[:40]]
    sets = [shingles(text) for text in (*texts, *copies)]
    pairs = {tuple(pair) for pair in near_texts(sets).tolist()}
    assert pairs == {(i, i + 80) for i in range(40)}
    for a, b in pairs:
        common = len(np.intersect1d(sets[a], sets[b]))
        assert common / (len(sets[a]) + len(sets[b]) - common) >= JACCARD
    assert normalised("Ｆine!  Café\n") == "fine café"
    assert len(shingles(["a", "b"])) == 1
