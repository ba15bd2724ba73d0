"""Near duplicates of pictures: recall and precision of wb.data.audit's two stages, beside a plain perceptual hash (PHash).

    python benchmarks/near_duplicates.py

Of the sample clip art, one picture of each group of equal ones is taken, and of every fifth a changed copy is planted: resized, JPEG at
quality 40, darker, less contrast, cropped by 5 % on each side, or mirrored. A pair is right if it is a copy and its original; pairs among
the originals are left out, since some are near duplicates themselves. PHash is this file's own implementation of imagehash's (32 × 32
grey, DCT, the 8 × 8 lowest frequencies against their median; 10 bits of 64 may differ, imagededup's default).
"""

import io
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance

from workbench.data.analysis.duplicates import look_of, near_pictures
from workbench.data.samples import folder
from workbench.data.shards import read_entry, read_index

EVERY, BITS = 5, 10


def jpeg(image: Image.Image) -> Image.Image:
    kept = io.BytesIO()
    image.save(kept, "JPEG", quality=40)
    return Image.open(kept).convert("RGB")


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "resized": lambda image: image.resize((38, 38)),
    "JPEG 40": jpeg,
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.8),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.8),
    "cropped": lambda image: image.crop((3, 3, image.width - 3, image.height - 3)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def originals() -> list[Image.Image]:
    """One picture of each group of equal ones."""
    where = folder("openclipart")
    head, entries = read_index(where)
    first = {entry.group: entry for entry in reversed(entries)}
    data = (read_entry(where / head["shards"][entry.shard]["name"], entry) for entry in first.values())
    return [Image.open(io.BytesIO(each)).convert("RGB") for each in data]


def phash_pairs(images: list[Image.Image]) -> set[tuple[int, int]]:
    """Pairs whose PHash differs in at most BITS bits."""
    n = np.arange(32)
    cosine = np.cos(np.pi * np.outer(np.arange(8), 2 * n + 1) / 64)
    low = np.stack([(cosine @ np.asarray(image.convert("L").resize((32, 32), 1), float) @ cosine.T).ravel() for image in images])
    bits = np.packbits(low > np.median(low, axis=1, keepdims=True), axis=1).view(np.uint64)[:, 0]
    pairs = np.argwhere(np.triu(np.bitwise_count(bits[:, None] ^ bits) <= BITS, 1))
    return set(map(tuple, pairs.tolist()))


def main() -> None:
    """Print recall for each change, and precision, of both."""
    images = originals()
    count, planted, kinds = len(images), {}, {}
    for number, place in enumerate(range(0, count, EVERY)):
        kind = list(CHANGES)[number % len(CHANGES)]
        planted[place, len(images)] = kind
        images.append(CHANGES[kind](images[place]))
    kinds = {kind: sum(each == kind for each in planted.values()) for kind in CHANGES}
    print(f"{count} different pictures, {len(planted)} planted copies")
    for name in ("workbench", "PHash"):
        begun = time.process_time()
        pairs = (
            phash_pairs(images) if name == "PHash" else set(map(tuple, near_pictures([look_of(i.convert("L")) for i in images]).tolist()))
        )
        seconds = time.process_time() - begun
        found: dict[str, int] = defaultdict(int)
        for pair, kind in planted.items():
            found[kind] += pair in pairs
        wrong = sum(1 for a, b in pairs if b >= count and (a, b) not in planted)
        right = sum(found.values())
        recalls = ", ".join(f"{kind} {found[kind] / kinds[kind]:.2f}" for kind in CHANGES)
        print(
            f"{name:10s} recall {right / len(planted):.2f}, precision {right / max(1, right + wrong):.2f}; {recalls}; {seconds:.1f} s CPU"
        )


if __name__ == "__main__":
    main()
