"""Pictures in HDF5 files with chunks of several sizes, and the bytes that reading some of them takes out of the file."""

import io
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np


class Counted(io.FileIO):
    """A file that counts the bytes that are read."""

    taken = 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer."""
        found = super().readinto(buffer)
        self.taken += found
        return found


def write(path: str | Path, pictures: np.ndarray, chunk: int | None) -> Path:
    """Write pictures (samples, …): so many samples in each chunk; None = contiguous, without chunks."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("image", data=pictures, chunks=None if chunk is None else (chunk, *pictures.shape[1:]), track_times=False)
    return Path(path)


def bytes_read(path: str | Path, batches: Sequence[Sequence[int]]) -> int:
    """Bytes that leave the file while batches are read, each in the order of storage; with a cache of one MiB, HDF5's usual one."""
    with Counted(path) as raw, h5py.File(raw, "r", rdcc_nbytes=1 << 20) as file:
        images = file["image"]
        images[0]  # what describes the file is read now
        before = raw.taken
        for batch in batches:
            for row in sorted(batch):
                images[row]
        return raw.taken - before
