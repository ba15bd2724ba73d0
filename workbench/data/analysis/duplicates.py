"""Finds near duplicates: pictures by two stages, a perceptual hash and a comparison of small grey pictures; texts by MinHash and Jaccard.

Both compare all pairs that the first stage proposes by a second, exact measure, and make groups around a centre: each member is like the
centre itself. Chains (a like b, b like c, …) would end in one group of everything that is drawn on white.
"""

import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HASH_BITS = 20
"""Bits of 128 in which the hashes of two pictures may differ to be compared: the first stage is to miss few."""
GREY = 0.15
"""Mean difference of two grey pictures up to which they are near duplicates, in units of a picture's mean deviation from its mean."""
SIDE = 16
"""Pixels per side of the grey pictures that are compared."""
VIEWS = (1.0, 0.94, 0.88)
"""Centre crops of a picture that are compared with the whole of another: a copy may have lost its edges."""
FLAT = 1.5
"""Mean deviation of the grey values (0 to 255) below which a picture is flat: it is like every other flat one, and left out."""
SHINGLE, PERMUTATIONS, BANDS = 5, 128, 32
"""Words of a shingle; minima of a signature; bands of it, of which one has to be equal for two texts to be compared."""
JACCARD = 0.7
"""Share of common shingles from which on two texts are near duplicates. With 32 bands of 4, 99.9 % of such pairs are compared."""
_PRIME = (1 << 61) - 1

Pairs = NDArray[np.int64]
GoOn = Callable[[float], bool]
"""Called with the share of the pictures or texts that were compared; false = leave it at that."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is kept of a picture to compare it."""

    hashes: NDArray[np.uint64]
    """dHash of rows and columns, 128 bits: of each view, and of each mirrored view."""
    greys: NDArray[np.float16]
    """SIDE × SIDE grey values, standardised: of each view, and of each mirrored view."""
    flat: bool
    """Has it nothing that could be compared?"""


def look_of(grey: Any) -> Look:
    """What is kept of a grey picture of Pillow (mode "L")."""
    width, height = grey.size
    hashes, greys = [], []
    flat = False
    for share in VIEWS:
        dx, dy = width * (1 - share) / 2, height * (1 - share) / 2
        box = (dx, dy, width - dx, height - dy)
        rows = np.asarray(grey.resize((9, 8), 2, box), np.int16)
        columns = np.asarray(grey.resize((8, 9), 2, box), np.int16)
        small = np.asarray(grey.resize((SIDE, SIDE), 2, box), np.float32)
        centred = small - small.mean()
        deviation = float(np.abs(centred).mean())
        flat |= share == 1.0 and deviation < FLAT
        for flip in (1, -1):
            r, c = rows[:, ::flip], columns[:, ::flip]
            bits = np.concatenate([(r[:, 1:] > r[:, :-1]).ravel(), (c[1:] > c[:-1]).ravel()])
            hashes.append(np.packbits(bits).view(np.uint64))
            greys.append((centred[:, ::flip] / max(deviation, 1e-6)).astype(np.float16).ravel())
    return Look(np.stack(hashes), np.stack(greys), flat)


def near_pictures(looks: Sequence[Look], block: int = 512, *, go_on: GoOn = lambda share: True) -> Pairs:
    """Pairs (i < j) of near duplicates among pictures: views of either, mirrored too, against the whole of the other.

    All pairs are compared by hash: 16 s for 100,000 pictures on a core, for each view. `go_on` is asked before each block.
    """
    use = np.array([number for number, look in enumerate(looks) if not look.flat], np.int64)
    if len(use) < 2:
        return np.empty((0, 2), np.int64)
    hashes = np.stack([looks[i].hashes for i in use])
    greys = np.stack([looks[i].greys for i in use]).astype(np.float32)
    whole = np.ascontiguousarray(hashes[:, 0])
    near: set[tuple[int, int]] = set()
    for first in range(0, len(use), block):
        if not go_on(first / len(use)):
            break
        for view in range(hashes.shape[1]):
            mine = hashes[first : first + block, view]
            distance = np.bitwise_count(mine[:, None, 0] ^ whole[:, 0])
            distance += np.bitwise_count(mine[:, None, 1] ^ whole[:, 1])
            a, b = np.nonzero(distance <= HASH_BITS)
            a += first
            keep = a < b if view == 0 else a != b
            a, b = a[keep], b[keep]
            for begin in range(0, len(a), 65536):
                x, y = a[begin : begin + 65536], b[begin : begin + 65536]
                close = np.abs(greys[x, view] - greys[y, 0]).mean(1) < GREY
                pairs = np.sort(np.stack([use[x[close]], use[y[close]]], 1), axis=1)
                near.update(map(tuple, pairs.tolist()))
    return np.array(sorted(near), np.int64).reshape(-1, 2)


def star_groups(pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Groups around centres: what has most free neighbours takes them, and so on; every member is a neighbour of the first.

    >>> star_groups([(0, 1), (1, 2), (2, 3)])
    [[1, 0, 2]]
    """
    neighbours: dict[int, set[int]] = defaultdict(set)
    for a, b in pairs:
        neighbours[int(a)].add(int(b))
        neighbours[int(b)].add(int(a))
    free, groups = set(neighbours), []
    for centre in sorted(neighbours, key=lambda i: (-len(neighbours[i]), i)):
        members = sorted(neighbours[centre] & free)
        if centre in free and members:
            groups.append([centre, *members])
            free -= {centre, *members}
    return groups


def normalised(text: str) -> str:
    """A text without what does not make it another: case, accents' encoding, punctuation and spaces.

    >>> normalised("It  is a TRUTH,\\nuniversally…")
    'it is a truth universally'
    """
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def shingles(words: Sequence[object]) -> NDArray[np.uint32]:
    """Digests of all runs of SHINGLE words or tokens, each once; a shorter text is one run."""
    runs = range(max(1, len(words) - SHINGLE + 1))
    return np.unique(np.array([zlib.crc32("\0".join(map(str, words[i : i + SHINGLE])).encode()) for i in runs], np.uint32))


def near_texts(sets: Sequence[NDArray[np.uint32]], *, go_on: GoOn = lambda share: True) -> Pairs:
    """Pairs (i < j) of texts that share JACCARD of their shingles.

    Source: A. Broder, On the resemblance and containment of documents, 1997 (MinHash); the bands: Leskovec, Rajaraman, Ullman, Mining of
    massive datasets, chapter 3. `go_on` is asked before each text.
    """
    rng = np.random.Generator(np.random.Philox(key=7))
    factor = rng.integers(1, 1 << 31, PERMUTATIONS).astype(np.uint64) | np.uint64(1)
    offset = rng.integers(0, 1 << 31, PERMUTATIONS).astype(np.uint64)
    rows = PERMUTATIONS // BANDS
    buckets: dict[bytes, list[int]] = defaultdict(list)
    near: list[tuple[int, int]] = []
    for number, digests in enumerate(sets):
        if not go_on(number / len(sets)):
            break
        signature = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, np.uint64)
        for first in range(0, len(digests), 4096):
            mixed = digests[first : first + 4096].astype(np.uint64) * factor[:, None] + offset[:, None]
            np.minimum(signature, (mixed % np.uint64(_PRIME)).min(1), out=signature)
        before: set[int] = set()
        for band in range(BANDS):
            bucket = buckets[band.to_bytes(1, "big") + signature[band * rows : (band + 1) * rows].tobytes()]
            before.update(bucket)
            bucket.append(number)
        for other in before:
            common = len(np.intersect1d(sets[other], digests, assume_unique=True))
            if common >= JACCARD * (len(sets[other]) + len(digests) - common):
                near.append((other, number))
    return np.array(sorted(near), np.int64).reshape(-1, 2)
