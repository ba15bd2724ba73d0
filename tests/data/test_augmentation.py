"""Augmentation follows from the seed of a sample alone, does what its name says, and mixes labels as it mixes pictures."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from workbench.data.augmentation import OPERATIONS, Augmentation, Augmented, mix

ALL = Augmentation(colour=0.4, random_ops=2, magnitude=0.5, erase=0.5)


def pictures(count: int = 16, side: int = 16) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(10)), st.integers(1, 10))
def test_a_sample_is_augmented_alike_in_any_batch(order: list[int], count: int) -> None:
    images, seeds = pictures(10), [100 + i for i in range(10)]
    whole = ALL(images, seeds)
    chosen = order[:count]
    part = ALL(images[chosen], [seeds[i] for i in chosen])
    assert torch.allclose(part, whole[chosen], atol=1e-6)
    assert 0 <= float(whole.min()) <= float(whole.max()) <= 1
    assert not torch.allclose(ALL(images[:1], [5]), ALL(images[:1], [6]))


def test_each_part_does_what_it_says() -> None:
    images = pictures(400, 8)
    none = Augmentation(crop=(1, 1), aspect=1, flip=0)
    assert torch.equal(none(images, range(400)), images)
    mirrored = Augmentation(crop=(1, 1), aspect=1, flip=0.25)(images, range(400))
    same = [bool(torch.allclose(a, b, atol=1e-5)) for a, b in zip(mirrored, images, strict=True)]
    turned = [bool(torch.allclose(a, b.flip(-1), atol=1e-5)) for a, b in zip(mirrored, images, strict=True)]
    assert all(a != b for a, b in zip(same, turned, strict=True))
    assert sum(turned) == pytest.approx(100, abs=35)
    dark = Augmentation(crop=(1, 1), aspect=1, flip=0, colour=0.5)(torch.full((300, 3, 4, 4), 0.5), range(300))
    assert 0.25 <= float(dark.min()) < 0.3 < 0.7 < float(dark.max()) <= 0.75
    erased = Augmentation(crop=(1, 1), aspect=1, flip=0, erase=0.3)(torch.zeros(300, 3, 32, 32), range(300))
    shares = (erased == 0.5).float().mean((1, 2, 3))
    assert int((shares > 0).sum()) == pytest.approx(90, abs=35)
    assert float(shares.max()) < 0.25
    ramp = torch.linspace(0, 1, 64).expand(200, 3, 64, 64)
    cropped = Augmentation(crop=(0.25, 0.25), aspect=1, flip=0)(ramp, range(200))
    reach = cropped[:, 0, 0, -1] - cropped[:, 0, 0, 0]
    assert torch.allclose(reach, torch.full_like(reach, 0.5), atol=0.02)  # half of each side
    strong = Augmentation(crop=(1, 1), aspect=1, flip=0, random_ops=1, magnitude=1.0)(images, range(400))
    changed = [not torch.allclose(a, b, atol=1e-4) for a, b in zip(strong, images, strict=True)]
    assert sum(changed) > 300
    assert len(OPERATIONS) == 10


def test_bytes_stay_bytes() -> None:
    images = (pictures(4) * 255).to(torch.uint8)
    assert ALL(images, range(4)).dtype == torch.uint8
    assert torch.equal(Augmentation(crop=(1, 1), aspect=1, flip=0)(images, range(4)), images)
    assert ALL(images[:0], []).shape == (0, 3, 16, 16)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_mixed_as_pictures_are(kind: str) -> None:
    labels = torch.arange(4)
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 20, 20)
    seen = []
    for seed in range(30):
        mixed, shares = mix(images, labels, 4, seed=seed, kind=kind, alpha=1.0)
        assert torch.allclose(shares.sum(1), torch.ones(4))
        assert torch.allclose(mixed.mean((1, 2, 3)), shares @ torch.arange(4.0), atol=1e-4)
        seen.append(float(shares[0, 0]))
        assert torch.equal(mixed, mix(images, labels, 4, seed=seed, kind=kind, alpha=1.0)[0])
    assert min(seen) < 0.3 < 0.7 < max(seen)
    with pytest.raises(ValueError, match=r"kind='mix': allowed are 'mixup', 'cutmix'"):
        mix(images, labels, 4, seed=0, kind="mix")


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """Pictures with their numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return pictures(24, 8)[index], index


def test_augmentation_resumes_on_other_ranks_and_workers() -> None:
    data = Augmented(Squares(), ALL)

    def seen(world_size: int, batch: int, workers: int, consumed: int) -> dict[int, torch.Tensor]:
        given: dict[int, torch.Tensor] = {}
        for rank in range(world_size):
            sampler = wb.data.ResumableSampler(data, rank=rank, world_size=world_size, seed=3, seeded=True)
            sampler.consumed = consumed
            context = "fork" if workers else None
            for images, numbers in DataLoader(data, batch, sampler=sampler, num_workers=workers, multiprocessing_context=context):
                given |= dict(zip(numbers.tolist(), images, strict=True))
        return given

    whole, rest = seen(1, 6, 0, 0), seen(2, 4, 1, 8)
    assert len(rest) == 16
    assert all(torch.allclose(image, whole[number], atol=1e-6) for number, image in rest.items())
    assert len(data) == 24
    assert not torch.equal(data[3][0], data[3][0])  # without a seed it draws one


def test_what_does_not_fit_is_refused() -> None:
    for knobs, message in (
        ({"crop": (0.5, 2)}, r"crop=\(0.5, 2\): two shares of the area"),
        ({"flip": 1.5}, r"flip=1.5: a number from 0 to 1"),
        ({"aspect": 0.5}, r"aspect=0.5: a number of at least 1"),
        ({"random_ops": -1}, r"random_ops=-1: a whole number of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Augmentation(**knobs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pictures of shape \(3, 16, 16\) and 3 seeds"):
        ALL(pictures()[0], range(3))
