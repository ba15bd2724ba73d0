"""How well a window of shards of one class each can mix the classes of a batch, and how often a flipped bit is noticed."""

import io
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from workbench.core.display.axes import prepared


def window_quality(window: int, classes: int, batch: int, draws: int = 2000) -> float:
    """What `wb.data.shuffle_quality` should say where a batch comes from `window` shards, each of one class that chance has chosen.

    Such a batch has the classes of as many random samples as there are shards: the mean entropy of those, over that of a whole batch.
    """
    rng = np.random.default_rng(0)

    def entropy(counts: np.ndarray) -> float:
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def mean(make: Iterable[np.ndarray]) -> float:
        return float(np.mean([entropy(counts) for counts in make]))

    even = np.full(classes, 1 / classes)
    mixed = (rng.multinomial(batch, rng.multinomial(window, even) / window) for _ in range(draws))
    return mean(mixed) / mean(rng.multinomial(batch, even) for _ in range(draws))


def flip_bits(shard: str | Path, places: Iterable[tuple[int, int]], seed: int = 0) -> int:
    """Flip a random bit in each of some ranges (begin, end) of a file; how many."""
    draw = random.Random(seed)
    count = 0
    with open(shard, "r+b") as file:
        for begin, end in places:
            at, count = draw.randrange(begin, end), count + 1
            file.seek(at)
            byte = file.read(1)[0] ^ 1 << draw.randrange(8)
            file.seek(at)
            file.write(bytes([byte]))
    return count


def decodes(data: bytes) -> bool:
    """Does Pillow decode it without an error?"""
    try:
        Image.open(io.BytesIO(data)).load()
    except OSError:
        return False
    return True


def places(source: Any, count: int) -> list[tuple[int, int]]:
    """Where the pictures of some samples lie in their shard, evenly over it; behind the head of each, which any decoder would miss."""
    chosen = np.linspace(0, len(source) - 1, count).astype(int)
    lengths = [len(source[int(index)]["jpg"]) for index in chosen]
    return [(int(source.starts[index]), int(source.starts[index]) + length) for index, length in zip(chosen, lengths, strict=True)]


def _pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int16)


def most_changed(before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]], count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pictures (as they were, as they are) that changed most of those that are decoded without an error."""
    pairs = [
        (_pixels(old["jpg"]), _pixels(new["jpg"]))
        for old, new in zip(before, after, strict=True)
        if old["jpg"] != new["jpg"] and decodes(new["jpg"])
    ]
    same = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    return sorted(same, key=lambda pair: -float(np.abs(pair[0] - pair[1]).mean()))[:count]


def draw(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Axes:
    """Draw pictures in two rows: as they were, and below as they are."""
    ax = prepared(None, 1.5 * len(pairs), 3.2)
    for column, pair in enumerate(pairs):
        for row, pixels in enumerate(pair):
            ax.imshow(pixels.astype(np.uint8), extent=(column + 0.03, column + 0.97, -row - 0.97, -row - 0.03))
    ax.set_xlim(0, len(pairs))
    ax.set_ylim(-2, 0)
    ax.set_axis_off()
    return ax
