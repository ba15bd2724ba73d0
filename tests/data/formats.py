"""A few samples with a field of each kind, and the same in every format; and a server of S3 with latency."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from workbench.data.formats import extension, writer

COUNT = 16
SCHEMA = {"jpg": "bytes", "cls": "int", "npy": "array"}


@functools.cache
def samples() -> list[tuple[str, dict[str, Any]]]:
    """(key, sample) pairs: bytes of several lengths, a label, an array."""
    rng = np.random.default_rng(0)
    keys = [f"folder{i % 3}/{i:04d}" for i in range(COUNT)]
    return [
        (key, {"__key__": key, "jpg": rng.bytes(100 + 300 * i), "cls": i % 5, "npy": rng.integers(0, 9, (2, 3), dtype=np.int16)})
        for i, key in enumerate(keys)
    ]


def write(format: str, folder: Path, name: str = "", some: list[tuple[str, dict[str, Any]]] | None = None) -> Path:
    """One shard of a format, in a folder of its own; the path to open."""
    if not name:
        folder = folder / f"{format}-set"
        folder.mkdir()
    writer(format)(str(folder / (name or f"shard-0{extension(format)}")), samples() if some is None else iter(some), SCHEMA)
    return folder if format != "folder" else folder / (name or "shard-0")


def first(folder: Path) -> Path:
    """The first file of a folder."""
    return sorted(folder.iterdir())[0]
