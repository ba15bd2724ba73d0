"""Near duplicates of pictures and texts: recall and precision of wb.data.audit, beside imagededup, cleanlab, datatrove and a plain hash.

    python benchmarks/near_duplicates.py [--texts] [--peers FOLDER]

Of the sample clip art, one picture of each group of equal ones is taken, and of every fifth a changed copy is planted: resized, JPEG at
quality 40, darker, less contrast, cropped by 5 % on each side, or mirrored. A pair is right if it is a copy and its original; pairs among
the originals are left out, since some are near duplicates themselves. PHash is this file's own implementation of imagehash's (32 × 32
grey, DCT, the 8 × 8 lowest frequencies against their median; 10 bits of 64 may differ, imagededup's default). `--peers` names a folder
with imagededup, made by `pip install --no-deps --target FOLDER imagededup PyWavelets scikit-learn joblib threadpoolctl cloudpickle
narwhals`; its hashes are used, and not its CNN, which needs torchvision. With cleanlab and Hugging Face datasets there, too (`pip install
cleanlab datasets`), Datalab looks for near duplicates among the grey pixels, 32 × 32, since it has no features of its own. What is not
there is left out.

Texts: passages of 150 words of the sample novel, and of every fifth a changed copy: other case and punctuation, one word in fifty or in
twenty replaced (which leaves 0.61 of the shingles in common, and by our limit of 0.7 no near duplicate), a sentence before it, or the
second half of another passage, which is none either. datatrove (`pip install --target FOLDER datatrove`) takes its first two stages with
its defaults (runs of 5 words, 14 buckets of 8 hashes), SHA-1 as its hash, and words that lie between spaces, since for its own way to
find them it needs spaCy.
"""

import argparse
import gzip
import importlib
import importlib.util
import io
import logging
import random
import re
import struct
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from workbench.data.analysis.duplicates import look_of, near_pictures, near_texts, normalised, shingles
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


WORDS = 150
"""Of a passage."""
NOT_NEAR = "half another's"


def passages() -> list[str]:
    """The sample novel, cut."""
    words = gzip.decompress((folder("austen") / "pride_and_prejudice.txt.gz").read_bytes()).decode().split()
    return [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS + 1, WORDS)]


def changed(text: str, other: str, kind: str, chance: random.Random) -> str:
    """A copy of a passage, changed in one of TEXT_CHANGES."""
    words = text.split()
    if kind == "case":
        return re.sub(r"[,;.]", " ", text).upper()
    if kind == "sentence before":
        return "It was on the morning after these events. " + text
    if kind == NOT_NEAR:
        return " ".join(words[: WORDS // 2] + other.split()[WORDS // 2 :])
    for at in chance.sample(range(WORDS), WORDS // (50 if kind == "2 % of words" else 20)):
        words[at] = "something"
    return " ".join(words)


TEXT_CHANGES = ("case", "2 % of words", "5 % of words", "sentence before", NOT_NEAR)


def our_text_pairs(texts: list[str]) -> set[tuple[int, int]]:
    """What `wb.data.audit` calls near."""
    return set(map(tuple, near_texts([shingles(normalised(text).split()) for text in texts]).tolist()))


def datatrove_pairs(texts: list[str]) -> set[tuple[int, int]]:
    """Pairs that datatrove's stages connect, with its defaults."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Spaces(WordTokenizer):
        """Words are what lies between spaces: datatrove has removed punctuation before."""

        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        sent_tokenize = span_tokenize = word_tokenize

    logger.remove()
    config, pairs = MinhashConfig(hash_config=HashConfig(hash_fc="sha1")), set()  # its default gives xxhash 4 texts, which it refuses
    with tempfile.TemporaryDirectory() as name:
        signatures = MinhashDedupSignature(f"{name}/signatures", config, language=Spaces())
        signatures.run([Document(text, str(number)) for number, text in enumerate(texts)])
        for rank in range(config.num_buckets):
            MinhashDedupBuckets(f"{name}/signatures", f"{name}/buckets", config=config).run(rank=rank, world_size=config.num_buckets)
        for path in Path(name, "buckets").iterdir():
            for _, one, _, other in struct.iter_unpack("<4I", path.read_bytes()):
                pairs.add((min(one, other), max(one, other)))
    return pairs


def score_texts(ways: dict[str, Callable[[list[str]], set[tuple[int, int]]]]) -> None:
    """Print recall for each change, and precision, of all."""
    texts, chance = passages(), random.Random(0)
    count, planted = len(texts), {}
    for number, place in enumerate(range(0, count, EVERY)):
        kind = TEXT_CHANGES[number % len(TEXT_CHANGES)]
        planted[place, len(texts)] = kind
        texts.append(changed(texts[place], texts[(place + count // 2) % count], kind, chance))
    wanted = {pair for pair, kind in planted.items() if kind != NOT_NEAR}
    print(f"{count} passages, {len(wanted)} planted copies, {len(planted) - len(wanted)} that share half")
    for name, find in ways.items():
        begun = time.process_time()
        pairs = find(texts)
        seconds = time.process_time() - begun
        each = ", ".join(
            f"{kind} {sum(pair in pairs for pair, of in planted.items() if of == kind) / list(planted.values()).count(kind):.2f}"
            for kind in TEXT_CHANGES
        )
        right = len(wanted & pairs)
        print(f"{name:18s} recall {right / len(wanted):.2f}, precision {right / max(1, len(pairs)):.2f}; {each}; {seconds:.1f} s CPU")


def main() -> None:
    """Print recall for each change, and precision, of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", metavar="FOLDER", help="where the peers are installed")
    parser.add_argument("--texts", action="store_true", help="texts instead of pictures")
    given = parser.parse_args()
    if given.texts:
        sys.path += [given.peers] if given.peers else []
        score_texts({"workbench": our_text_pairs} | ({"datatrove": datatrove_pairs} if importlib.util.find_spec("datatrove") else {}))
        return
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
