"""Augmentation of pictures, whole batches at once: crop, flip, colour, RandAugment's operations, erasing; and mixup and cutmix.

What happens to a sample follows from its seed alone, so it is the same in every batch, worker or resumed run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from workbench.core.checks import choice, real_number, whole_number
from workbench.core.synonyms import accept_synonyms
from workbench.data.analysis.orders import uniforms
from workbench.data.resumable_sampler import SampleIndex

OPERATIONS = ("rotate", "shear x", "shear y", "move x", "move y", "brightness", "contrast", "saturation", "posterize", "solarize")
"""Those that `random_ops` draws from. Source: Cubuk et al., RandAugment, 2020; without those of histograms and sharpness."""
MOST = {"rotate": math.radians(30), "shear x": 0.3, "shear y": 0.3, "move x": 0.45, "move y": 0.45}
"""Operation → its size at magnitude 1."""
_DRAWS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """An augmentation of pictures, N × 3 × H × W, of bytes or of numbers from 0 to 1; a batch is resampled only once."""

    crop: tuple[float, float] = (0.35, 1.0)
    """Range of a crop's share of the area; (1, 1) = none. It is resized to the size of the picture."""
    aspect: float = 4 / 3
    """Largest ratio of a crop's sides, relative to the picture's."""
    flip: float = 0.5
    """Share of pictures that are mirrored."""
    colour: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a number in 1 ± colour."""
    random_ops: int = 0
    """RandAugment: operations for each picture, drawn from `OPERATIONS`."""
    magnitude: float = 0.3
    """Their size: 0 to 1."""
    erase: float = 0.0
    """Share of pictures of which a rectangle of 2 to 20 % of the area becomes grey."""

    def __post_init__(self) -> None:
        low, high = self.crop
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop={self.crop!r}: two shares of the area are allowed, such as (0.35, 1.0)")
        for name in ("flip", "erase", "magnitude", "colour"):
            if not 0 <= real_number(name, getattr(self, name), least=0) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: a number from 0 to 1 is allowed")
        real_number("aspect", self.aspect, least=1)
        whole_number("random_ops", self.random_ops, least=0)

    def __call__(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """The augmented pictures, in the type of the pictures.

        Args:
            images: N × 3 × H × W (one channel: colour and saturation are left out), bytes or numbers from 0 to 1.
            seeds: of each picture, such as `SampleIndex.seed`.

        Raises:
            ValueError: the shapes do not fit.
        """
        if images.dim() != 4 or len(seeds) != len(images):
            raise ValueError(
                f"pictures of shape {tuple(images.shape)} and {len(seeds)} seeds: N × channels × height × width and N are allowed"
            )
        if not len(images):
            return images
        draws = uniforms(seeds, _DRAWS + 3 * self.random_ops)
        is_bytes = images.dtype == torch.uint8
        x = images.float().div(255) if is_bytes else images.float()
        chosen = (draws[:, _DRAWS : _DRAWS + self.random_ops] * len(OPERATIONS)).astype(int)
        signs = np.where(draws[:, _DRAWS + self.random_ops : _DRAWS + 2 * self.random_ops] < 0.5, -1.0, 1.0)
        x = _resample(x, self._affine(draws, chosen, signs))
        x = self._colours(x, draws, chosen, signs)
        if self.erase:
            x = _erased(x, draws[:, 9:14], self.erase)
        return x.mul(255).round_().clamp_(0, 255).to(torch.uint8) if is_bytes else x.to(images.dtype)

    def _affine(self, draws: NDArray[np.float64], chosen: NDArray[Any], signs: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each picture the 2 × 3 matrix from places of the result to places of the picture, both from -1 to 1."""
        low, high = self.crop
        scale = np.sqrt(low + (high - low) * draws[:, 0])
        stretch = self.aspect ** (draws[:, 1] - 0.5)
        wide, tall = np.minimum(1, scale * np.sqrt(stretch)), np.minimum(1, scale / np.sqrt(stretch))
        mirrored = np.where(draws[:, 4] < self.flip, -1.0, 1.0)
        matrix = np.zeros((len(draws), 3, 3))
        matrix[:, 0, 0], matrix[:, 1, 1], matrix[:, 2, 2] = wide * mirrored, tall, 1
        matrix[:, 0, 2], matrix[:, 1, 2] = (1 - wide) * (2 * draws[:, 2] - 1), (1 - tall) * (2 * draws[:, 3] - 1)
        for column in range(self.random_ops):
            size = signs[:, column] * self.magnitude
            step = np.tile(np.eye(3), (len(draws), 1, 1))
            for name, most in MOST.items():
                here, value = chosen[:, column] == OPERATIONS.index(name), size * most
                if name == "rotate":
                    step[here, 0, 0] = step[here, 1, 1] = np.cos(value[here])
                    step[here, 0, 1], step[here, 1, 0] = -np.sin(value[here]), np.sin(value[here])
                else:
                    row, place = {"shear x": (0, 1), "shear y": (1, 0), "move x": (0, 2), "move y": (1, 2)}[name]
                    step[here, row, place] = value[here]
            matrix = matrix @ step
        return matrix[:, :2]

    def _colours(self, x: Tensor, draws: NDArray[np.float64], chosen: NDArray[Any], signs: NDArray[np.float64]) -> Tensor:
        factors = np.ones((3, len(draws))) if not self.colour else 1 + self.colour * (2 * draws[:, 5:8].T - 1)
        for column in range(self.random_ops):
            for row, name in enumerate(("brightness", "contrast", "saturation")):
                here = chosen[:, column] == OPERATIONS.index(name)
                factors[row] = np.where(here, factors[row] * (1 + 0.9 * self.magnitude * signs[:, column]), factors[row])
        bright, contrast, saturation = (torch.from_numpy(each).float().view(-1, 1, 1, 1) for each in factors)
        if self.colour or self.random_ops:
            x = (x * bright).clamp(0, 1)
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (mean + (x - mean) * contrast).clamp(0, 1)
            if x.shape[1] == 3:
                grey = (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
                x = (grey + (x - grey) * saturation).clamp(0, 1)
        for column in range(self.random_ops):
            levels = float(2 ** max(1, round(8 - 6 * self.magnitude)) - 1)
            for name in ("posterize", "solarize"):
                here = torch.from_numpy(chosen[:, column] == OPERATIONS.index(name)).view(-1, 1, 1, 1)
                if here.any():
                    light = x > 1 - 0.5 * self.magnitude
                    changed = (x * levels).floor() / levels if name == "posterize" else torch.where(light, 1 - x, x)
                    x = torch.where(here, changed, x)
        return x


def _resample(x: Tensor, matrix: NDArray[np.float64]) -> Tensor:
    if np.array_equal(matrix, np.tile(np.eye(3)[:2], (len(matrix), 1, 1))):
        return x
    grid = functional.affine_grid(torch.from_numpy(matrix).float(), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _erased(x: Tensor, draws: NDArray[np.float64], share: float) -> Tensor:
    height, width = x.shape[-2:]
    area, stretch = 0.02 + 0.18 * draws[:, 1], 3.0 ** (2 * draws[:, 2] - 1)
    tall, wide = np.minimum(1, np.sqrt(area * stretch)), np.minimum(1, np.sqrt(area / stretch))
    top, left = (1 - tall) * draws[:, 3], (1 - wide) * draws[:, 4]
    rows, columns = (np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width
    inside_rows = (rows >= top[:, None]) & (rows < (top + tall)[:, None])
    inside_columns = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    mask = (draws[:, 0] < share)[:, None, None] & inside_rows[:, :, None] & inside_columns[:, None, :]
    return torch.where(torch.from_numpy(mask)[:, None], x.new_tensor(0.5), x)


@accept_synonyms
def mix(images: Tensor, labels: Tensor, classes: int, *, seed: int, kind: str = "mixup", alpha: float = 0.2) -> tuple[Tensor, Tensor]:
    """Mix each picture of a batch with the next one, and their labels alike.

    Source: Zhang et al., mixup, 2018; Yun et al., CutMix, 2019.

    Args:
        images: N × channels × H × W.
        labels: N classes.
        classes: number of classes.
        seed: seed of the mixture, such as that of the batch's first sample.
        kind: "mixup" adds the pictures, "cutmix" takes a rectangle of the next one.
        alpha: parameter of the Beta distribution of the shares.

    Returns:
        The pictures, and N × classes shares of the labels, for `cross_entropy`.

    Raises:
        ValueError: the kind is unknown, or alpha is not above 0.
    """
    choice("kind", kind, ("mixup", "cutmix"))
    real_number("alpha", alpha, above=0)
    share = float(np.random.Generator(np.random.Philox(key=seed)).beta(alpha, alpha))
    other = images.roll(-1, 0)
    if kind == "mixup":
        mixed = images * share + other * (1 - share)
    else:
        height, width = images.shape[-2:]
        tall, wide = (round(side * math.sqrt(1 - share)) for side in (height, width))
        across = uniforms([seed], 2)[0]
        top, left = int(across[0] * (height - tall + 1)), int(across[1] * (width - wide + 1))
        mixed = images.clone()
        mixed[..., top : top + tall, left : left + wide] = other[..., top : top + tall, left : left + wide]
        share = 1 - tall * wide / (height * width)
    whole = functional.one_hot(labels.long(), classes).float()
    return mixed, whole * share + whole.roll(-1, 0) * (1 - share)


class Augmented(Dataset[Any]):
    """A dataset of (picture, …) whose pictures are augmented with the seeds of a `ResumableSampler(seeded=True)`.

    A DataLoader asks for whole batches, which are augmented at once. Indices without a seed draw one from torch's generator.
    """

    def __init__(self, dataset: Any, augmentation: Augmentation) -> None:
        self.dataset, self.augmentation = dataset, augmentation

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = [self.dataset[int(index)] for index in indices]
        seeds = [index.seed if isinstance(index, SampleIndex) else int(torch.randint(2**62, ())) for index in indices]
        images = self.augmentation(torch.stack([sample[0] for sample in samples]), seeds)
        return [(image, *sample[1:]) for image, sample in zip(images, samples, strict=True)]
