"""convert: writes a dataset in another format and does once what need not be done in every epoch; predicts size and time before."""

import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display.table import Shown, Table
from workbench.core.synonyms import accept_synonyms
from workbench.data.adapters import IterableSource, as_source
from workbench.data.data_card import decode_picture
from workbench.data.manifest import Manifest
from workbench.data.sample import KEY, PICTURES, Sample
from workbench.data.shard_writer import COPY, write_shards
from workbench.data.source import Source, take

PROBE = 64
"""Samples that are converted first, to predict size and time."""
ENCODINGS = {"jpeg": ("jpg", "JPEG"), "png": ("png", "PNG"), "webp": ("webp", "WEBP")}
IMAGE = "image"
"""The field of decoded pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """What is done to a sample before it is written: decode its pictures, resize, augment, encode again. Can be sent to workers."""

    resize: int | None = None
    """Pixels of the shorter side; the middle square is kept."""
    augment: Callable[[Any, random.Random], Any] | None = None
    """(pixels, random numbers) → pixels; the numbers depend on the key and the copy alone."""
    encode: str | None = None
    """"jpeg", "png", "webp", or None = arrays."""
    quality: int = 90
    seed: int = 0

    def __call__(self, sample: Sample) -> Sample:
        """The prepared sample."""
        copy = sample.pop(COPY, 0)
        prepared: Sample = {}
        for name, value in sample.items():
            is_picture = isinstance(value, bytes) and name.rpartition(".")[2] in PICTURES
            if not is_picture and name != IMAGE:
                prepared[name] = value
                continue
            pixels = decode_picture(value, f"sample {sample.get(KEY, '')}") if is_picture else value
            if self.resize:
                pixels = resized(pixels, self.resize)
            if self.augment is not None:
                pixels = np.asarray(self.augment(pixels, random.Random(f"{self.seed} {sample.get(KEY, '')} {copy}")))
            target = ENCODINGS[self.encode][0] if self.encode else IMAGE
            if target in prepared:
                raise ValueError(f"{name!r} would replace another picture of the sample as {target!r}: one picture per sample is allowed")
            if self.encode is None:
                prepared[IMAGE] = np.ascontiguousarray(pixels)
            else:
                field, kind = ENCODINGS[self.encode]
                prepared[field] = encoded(pixels, kind, self.quality)
        return prepared

    def words(self) -> tuple[str, ...]:
        """The steps, for the manifest."""
        steps = ["decoded"]
        if self.resize:
            steps.append(f"shorter side resized to {self.resize} pixels, middle square kept")
        if self.augment is not None:
            steps.append(f"augmented by {getattr(self.augment, '__qualname__', 'a function')}, seed {self.seed}")
        if self.encode:
            steps.append(f"encoded as {self.encode}, quality {self.quality}")
        return tuple(steps)


def resized(pixels: np.ndarray[Any, Any], side: int) -> np.ndarray[Any, Any]:
    """The middle square of a picture, side × side × channels."""
    from PIL import Image

    image = Image.fromarray(pixels)
    short = min(image.size)
    left, top = (image.width - short) / 2, (image.height - short) / 2
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, (left, top, left + short, top + short)))


def encoded(pixels: np.ndarray[Any, Any], kind: str, quality: int) -> bytes:
    """A picture as the bytes of a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=quality)
    return file.getvalue()


class Packed:
    """Texts as tokens, one after the other, cut into windows of one length: (length,) int32 each. The last, shorter one is left out."""

    def __init__(self, source: Source, tokenise: Callable[[str], Any], length: int, end: int | None) -> None:
        self.source, self.tokenise, self.length, self.end = source, tokenise, length, end

    def __iter__(self) -> Iterator[Sample]:
        rest = np.zeros(0, np.int32)
        number = 0
        for sample in self.source:
            text = next((value for name, value in sample.items() if isinstance(value, str) and name != KEY), None)
            if text is None:
                raise ValueError(
                    f"sample {sample.get(KEY, '')} has no text: fields are {', '.join(name for name in sample if name != KEY)}"
                )
            tokens = np.asarray([*self.tokenise(text), *([] if self.end is None else [self.end])], np.int32)
            rest = np.concatenate([rest, tokens])
            for start in range(0, len(rest) - self.length + 1, self.length):
                yield {KEY: f"{number:08d}", "tokens": rest[start : start + self.length]}
                number += 1
            rest = rest[len(rest) // self.length * self.length :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Shown, JsonDataclass):
    """The predicted and the actual cost of a conversion."""

    manifest: Manifest = field(repr=False)
    source_bytes: int | None
    predicted_bytes: int | None
    """From some samples that were converted first; None = the source can only be gone through."""
    predicted_seconds: float | None
    bytes: int
    seconds: float

    @property
    def table(self) -> Table:
        """Predicted beside measured."""
        rows = [
            ("bytes", units.bytes_(self.predicted_bytes), units.bytes_(self.bytes)),
            ("time", units.seconds(self.predicted_seconds), units.seconds(self.seconds)),
        ]
        before = f" from {units.bytes_(self.source_bytes)}" if self.source_bytes else ""
        title = f"{self.manifest.count:,} samples as {self.manifest.format}{before}"
        return Table(columns=("what", "predicted", "measured"), rows=rows, title=title)


@accept_synonyms
def convert(
    source: Any,
    out: str | os.PathLike[str],
    *,
    format: str = "tar",
    decode: bool = False,
    resize: int | None = None,
    encode: str | None = None,
    quality: int = 90,
    augment: Callable[[Any, random.Random], Any] | None = None,
    copies: int = 1,
    tokenise: Callable[[str], Any] | None = None,
    length: int | None = None,
    end_token: int | None = None,
    workers: int = 0,
    quiet: bool = False,
    **options: Any,
) -> Conversion:
    """Write a dataset in another format, and do work once that would otherwise be repeated in each epoch.

    Args:
        source: anything that `as_source` accepts.
        out: folder to write.
        format: see `write_shards`.
        decode: store pictures as arrays (height × width × 3, uint8) in the field "image": about 14 times the bytes of JPEG.
        resize: shorter side in pixels; the central square is kept. This decodes the pictures; without `encode` the result is an array.
        encode: "jpeg", "png" or "webp": encode the decoded pictures again.
        quality: quality of the encoding.
        augment: (pixels, random.Random) → pixels, computed once; the random numbers depend on key and copy. This freezes the augmentation:
            with few copies, a model sees the same crops in each epoch.
        copies: number of samples to make from each one.
        tokenise: text → sequence of token numbers; the tokens of all texts are packed into windows of `length`.
        length: tokens per window; None = not packed, needs `tokenise` to be None.
        end_token: token to append to each text.
        workers: number of processes; see `write_shards`.
        quiet: show no progress and no prediction.
        options: arguments of `write_shards`.

    Raises:
        ValueError: an argument is wrong; see also `write_shards`.
        CorruptSampleError: a picture cannot be decoded.
    """
    given = as_source(source)
    if encode is not None and encode not in ENCODINGS:
        raise ValueError(f"encode={encode!r}: allowed are {', '.join(map(repr, ENCODINGS))}, or None for arrays")
    if resize is not None:
        whole_number("resize", resize, least=1, what="a number of pixels")
    if (tokenise is None) != (length is None):
        raise ValueError("tokenise= and length= belong together: give both, or neither")
    whole_number("copies", copies, least=1)
    prepare: Prepare | None = None
    if decode or resize or encode or augment is not None:
        prepare = Prepare(resize=resize, augment=augment, encode=encode, quality=quality)
        options = {"preprocessing": prepare.words(), **options}
    made: Source = given
    if tokenise is not None:
        size = whole_number("length", length, least=1, what="a number of tokens")
        made = IterableSource(Packed(given, tokenise, size, end_token))
        options = {"preprocessing": (f"tokenised and packed to {size} tokens",), "keys": "number", **options}
    source_bytes = given.stored_bytes()
    predicted = None if isinstance(made, IterableSource) else predict(made, Path(out), format, prepare, copies, workers)
    if predicted and not quiet and os.isatty(2):
        print(f"convert: about {units.bytes_(predicted[0])} in {units.seconds(predicted[1])}", flush=True)
    began = time.perf_counter()
    manifest = write_shards(made, out, format=format, transform=prepare, copies=copies, workers=workers, quiet=quiet, **options)
    return Conversion(
        manifest=manifest,
        source_bytes=source_bytes,
        predicted_bytes=predicted[0] if predicted else None,
        predicted_seconds=predicted[1] if predicted else None,
        bytes=manifest.stored_bytes,
        seconds=time.perf_counter() - began,
    )


def predict(source: Source, out: Path, format: str, prepare: Prepare | None, copies: int, workers: int) -> tuple[int, float]:
    """Bytes and seconds of a conversion, from some samples that are written beside `out` and removed."""
    some = take(source, PROBE)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".wb-probe-", dir=out.parent))
    try:
        marks = []
        for number, part in enumerate((take(some, max(1, len(some) // 4)), some)):  # two sizes: what each costs, and what comes once
            began = time.perf_counter()
            manifest = write_shards(part, folder / str(number), format=format, transform=prepare, copies=copies, keys="number", quiet=True)
            marks.append((len(part) * copies, time.perf_counter() - began, manifest.stored_bytes))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (few, short, small), (many, long, large) = marks
    total = len(source) * copies
    if many == few:
        return round(large * total / many), long * total / many
    each = max((long - short) / (many - few), 0.2 * long / many)
    bytes_each = max((large - small) / (many - few), 0.0)
    return round(large + bytes_each * (total - many)), long + each * (total - many) / max(1, workers)
