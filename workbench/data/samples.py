"""The repository's sample data as datasets: pictures to decode, pictures that cost nothing, and a novel.

What they are, where they come from and their licences: `data_samples/README.md`.
"""

import gzip
import io
import math
import os
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torch.utils.data import Dataset

from workbench.core.package import ROOT
from workbench.data.shards import read_entry, read_index

ENV_SAMPLES = "WORKBENCH_DATA_SAMPLES"
"""Environment variable: folder of the sample data, where it is not the checkout's."""

Split = Literal["train", "validation"]
Decode = Literal["on-the-fly", "predecoded"]


class SamplesMissingError(FileNotFoundError):
    """The sample data are not where they are looked for."""


def folder(name: str) -> Path:
    """A folder of the sample data, such as "openclipart".

    Raises:
        SamplesMissingError: it is not there; says where it was looked for and what to do.
    """
    root = Path(os.environ.get(ENV_SAMPLES) or ROOT.parent / "data_samples")
    if not os.path.isdir(root / name):  # Path.is_dir raises where a path is too long, or leads through another user's folder
        where = str(root / name)
        where = where if where.isprintable() and len(where) < 500 else f"{where!r:.80}"
        raise SamplesMissingError(
            f"the sample data are not in {where}: they are part of the repository, not of the installed package. "
            f"Try: pip install -e . in a checkout, or set {ENV_SAMPLES} to a checkout's data_samples"
        )
    return root / name


class ClipArt(Dataset[tuple[Tensor, int]]):
    """Pictures in 10 classes: (3 × side × side tensor, normalised; label).

    A sample costs as much as in a real training: a read from a shard, JPEG decoding by Pillow and, with `augment`, a random crop and flip.

    Args:
        split: "train" (1,027 pictures) or "validation" (250); equal pictures are never on both sides.
        augment: random resized crop and flip, drawn from torch's generator; None = for "train" only.
        side: pixels per side that come out; 64 go in.
        decode: "predecoded" decodes all pictures once, here, so that a sample costs the augmentation only.
        storage_latency_s: EMULATED seconds that each read waits, as if for a network file system or an object store. No CPU is used
            meanwhile, and nothing waits with "predecoded".
    """

    MEAN, STD = 0.83, 0.3  # of the pixels over all channels, 0..1: clip art is mostly white

    def __init__(
        self,
        split: Split = "train",
        *,
        augment: bool | None = None,
        side: int = 64,
        decode: Decode = "on-the-fly",
        storage_latency_s: float = 0.0,
    ) -> None:
        for given, allowed, what in ((split, ("train", "validation"), "split"), (decode, ("on-the-fly", "predecoded"), "decode")):
            if given not in allowed:
                raise ValueError(f"{what}={given!r}: allowed are {', '.join(map(repr, allowed))}")
        where = folder("openclipart")
        head, entries = read_index(where)
        self.classes: tuple[str, ...] = tuple(head["classes"])
        self.entries = [entry for entry in entries if entry.split == split]
        self.augment = split == "train" if augment is None else augment
        self.side = side
        self.storage_latency_s = storage_latency_s
        self._shards = [where / shard["name"] for shard in head["shards"]]
        self._pixels = np.stack([np.asarray(self._decode(i)) for i in range(len(self))]) if decode == "predecoded" else None

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._pixels is not None:
            image = Image.fromarray(self._pixels[index])
        else:
            if self.storage_latency_s:
                time.sleep(self.storage_latency_s)
            image = self._decode(index)
        size = (self.side, self.side)
        if self.augment:
            box, flip = random_crop(image.width, image.height)
            image = image.resize(size, Image.Resampling.BILINEAR, box)
            if flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        elif image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        return pixels.div_(255).sub_(self.MEAN).div_(self.STD), self.entries[index].label

    def _decode(self, index: int) -> Image.Image:
        entry = self.entries[index]
        return Image.open(io.BytesIO(read_entry(self._shards[entry.shard], entry))).convert("RGB")


def random_crop(
    width: int, height: int, area: tuple[float, float] = (0.35, 1.0), aspect: float = 4 / 3
) -> tuple[tuple[float, float, float, float], bool]:
    """The box (left, top, right, bottom; pixels) of a random resized crop, and whether to flip.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        area: range of the crop's area, as a fraction of the picture's.
        aspect: largest ratio of the crop's sides.
    """
    u = torch.rand(5).tolist()  # torch seeds its generator in every worker
    scale = math.sqrt(area[0] + (area[1] - area[0]) * u[0])
    stretch = aspect ** (u[1] - 0.5)
    w, h = width * min(1.0, scale * stretch), height * min(1.0, scale / stretch)
    left, top = (width - w) * u[2], (height - h) * u[3]
    return (left, top, left + w, top + h), u[4] < 0.5


def fashion_mnist() -> tuple[Tensor, Tensor]:
    """The pictures (10,000 × 1 × 28 × 28) and the labels (10,000), both uint8."""
    where = folder("fashion_mnist")
    images = gzip.decompress((where / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((where / "t10k-labels-idx1-ubyte.gz").read_bytes())
    # IDX: big-endian magic number and sizes, 16 and 8 bytes here, then the values
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)
    return torch.from_numpy(pixels.copy()), torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).copy())


class FashionMnist(Dataset[tuple[Tensor, int]]):
    """10,000 grey pictures, 28 × 28, in memory: (1 × 28 × 28 tensor, normalised; label). So cheap that workers cost time."""

    MEAN, STD = 0.2868, 0.3524  # of the pixels, 0..1

    def __init__(self) -> None:
        self._images, self._labels = fashion_mnist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index].float().div_(255).sub_(self.MEAN).div_(self.STD), int(self._labels[index])


class Fashion(Dataset[tuple[Tensor, int]]):
    """The Fashion-MNIST pictures pooled to 14 × 14, as one tensor: (196 values, normalised; label). A batch is one indexing.

    A `DataLoader` fetches whole batches through `__getitems__`, which gives them ready: its `collate_fn` has to be `Fashion.collate`.
    Memory: 6.3 MB for training.

    Args:
        split: "train" = the first 8,000 pictures, "validation" = the other 2,000 (they come in random order).
    """

    BORDER = 8_000

    def __init__(self, split: Split = "train") -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r}: allowed are 'train', 'validation'")
        pixels, labels = fashion_mnist()
        part = slice(self.BORDER) if split == "train" else slice(self.BORDER, None)
        pooled = avg_pool2d(pixels[part].float(), 2).flatten(1).div_(255)
        self.inputs = pooled.sub_(FashionMnist.MEAN).div_(FashionMnist.STD)
        self.labels = labels[part].long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        wanted = torch.as_tensor(indices)
        return self.inputs[wanted], self.labels[wanted]

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor] | list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """A batch of `__getitems__` as it is; a list of samples put together."""
        if isinstance(batch, tuple):
            return batch
        return torch.stack([inputs for inputs, _ in batch]), torch.tensor([label for _, label in batch])


class ByteText(Dataset[Tensor]):
    """*Pride and Prejudice* in windows of `length` + 1 bytes (int64): inputs are all but the last, targets all but the first.

    Args:
        split: "train" = the first nine tenths, "validation" = the rest.
        length: bytes to predict in each window; windows follow each other without overlap in their targets.
    """

    def __init__(self, split: Split = "train", *, length: int = 128) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r}: allowed are 'train', 'validation'")
        data = gzip.decompress((folder("austen") / "pride_and_prejudice.txt.gz").read_bytes())
        border = len(data) * 9 // 10
        self._bytes = np.frombuffer(data[:border] if split == "train" else data[border:], np.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        return torch.from_numpy(self._bytes[start : start + self.length + 1].astype(np.int64))
