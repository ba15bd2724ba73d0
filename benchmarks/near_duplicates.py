"""Near duplicates of pictures: recall and precision of wb.data.audit's two stages, beside perceptual hashes and imagededup.

    python benchmarks/near_duplicates.py [--peers FOLDER]

Of the sample clip art, one picture of each group of equal ones is taken, and of every fifth a changed copy is planted: resized, JPEG at
quality 40, darker, less contrast, cropped by 5 % on each side, or mirrored. A pair is right if it is a copy and its original; pairs among
the originals are left out, since some are near duplicates themselves. PHash is this file's own implementation of imagehash's (32 × 32
grey, DCT, the 8 × 8 lowest frequencies against their median; 10 bits of 64 may differ, imagededup's default). `--peers` names a folder
with imagededup, made by `pip install --no-deps --target FOLDER imagededup PyWavelets scikit-learn joblib threadpoolctl cloudpickle
narwhals`; its hashes are used, and not its CNN, which needs torchvision. With cleanlab and Hugging Face datasets there, too (`pip install
cleanlab datasets`), Datalab looks for near duplicates among the grey pixels, 32 × 32, since it has no features of its own. What is not
there is left out.
"""

import argparse
import importlib
import importlib.util
import io
import logging
import sys
import time
import types
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


def our_pairs(images: list[Image.Image]) -> set[tuple[int, int]]:
    """Pairs that the stages of `wb.data.audit` call near."""
    return set(map(tuple, near_pictures([look_of(image.convert("L")) for image in images]).tolist()))


def imagededup_pairs(method: str) -> Callable[[list[Image.Image]], set[tuple[int, int]]]:
    """What imagededup's hash of that name finds, as it comes."""
    for name in ("imagededup.methods.cnn", "imagededup.utils.models"):  # they import torchvision
        sys.modules[name] = empty = types.ModuleType(name)
        empty.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    hasher = getattr(importlib.import_module("imagededup.methods"), method)(verbose=False)

    def pairs(images: list[Image.Image]) -> set[tuple[int, int]]:
        codes = {str(number): hasher.encode_image(image_array=np.asarray(image)) for number, image in enumerate(images)}
        found = hasher.find_duplicates(encoding_map=codes, max_distance_threshold=BITS, num_dist_workers=0, num_enc_workers=0)
        return {(int(one), int(other)) for one, others in found.items() for other in others if int(one) < int(other)}

    return pairs


def cleanlab_pairs(images: list[Image.Image]) -> set[tuple[int, int]]:
    """What cleanlab's Datalab calls near duplicates, by its defaults, with pixels as features."""
    from cleanlab import Datalab

    features = np.stack([np.asarray(image.convert("L").resize((32, 32), 1), np.float32).ravel() / 255 for image in images])
    lab = Datalab(data={"number": list(range(len(images)))}, verbosity=0)
    lab.find_issues(features=features, issue_types={"near_duplicate": {}})
    sets = lab.get_info("near_duplicate")["near_duplicate_sets"]
    return {(min(one, int(other)), max(one, int(other))) for one, others in enumerate(sets) for other in others}


def main() -> None:
    """Print recall for each change, and precision, of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", metavar="FOLDER", help="where imagededup is installed")
    given = parser.parse_args()
    ways: dict[str, Callable[[list[Image.Image]], set[tuple[int, int]]]] = {"workbench": our_pairs, "PHash": phash_pairs}
    if given.peers:
        sys.path.append(given.peers)
        logging.disable(logging.WARNING)
        if importlib.util.find_spec("imagededup"):
            ways |= {f"imagededup {method}": imagededup_pairs(method) for method in ("PHash", "DHash", "AHash", "WHash")}
        if importlib.util.find_spec("cleanlab"):
            ways["cleanlab, pixels"] = cleanlab_pairs
    images = originals()
    count, planted, kinds = len(images), {}, {}
    for number, place in enumerate(range(0, count, EVERY)):
        kind = list(CHANGES)[number % len(CHANGES)]
        planted[place, len(images)] = kind
        images.append(CHANGES[kind](images[place]))
    kinds = {kind: sum(each == kind for each in planted.values()) for kind in CHANGES}
    print(f"{count} different pictures, {len(planted)} planted copies")
    for name, find in ways.items():
        begun = time.process_time()
        pairs = find(images)
        seconds = time.process_time() - begun
        found: dict[str, int] = defaultdict(int)
        for pair, kind in planted.items():
            found[kind] += pair in pairs
        wrong = sum(1 for a, b in pairs if b >= count and (a, b) not in planted)
        right = sum(found.values())
        recalls = ", ".join(f"{kind} {found[kind] / kinds[kind]:.2f}" for kind in CHANGES)
        print(
            f"{name:18s} recall {right / len(planted):.2f}, precision {right / max(1, right + wrong):.2f}; {recalls}; {seconds:.1f} s CPU"
        )


if __name__ == "__main__":
    main()
