"""The exact noise scale of a spec's task, with the weights that a run begins with."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from workbench.batch.noise_scale import NoiseScale
from workbench.checks import whole_number
from workbench.measure.per_sample import exact_noise_scale
from workbench.spec import RunSpec
from workbench.task import resolve
from workbench.train.loader import to_device
from workbench.train.ranks import choose_device
from workbench.train.trainer import build_model, loss_of, seed_all

CHUNK = 64
"""Samples whose gradients are held at once."""


def exact_noise_of(spec: RunSpec, *, samples: int | None = None) -> NoiseScale:
    """By the gradients of single samples, in fp32, in this process.

    Args:
        spec: its task and seed.
        samples: how many, drawn by chance; None = all of the dataset.

    Raises:
        NoiseScaleError: a sample's gradient depends on its batch (batch norm).
        TaskError: the task cannot be built.
        ValueError: not a number of samples, or a stream without one.
    """
    if samples is not None:
        whole_number("samples", samples, least=2, also=", or None for all of the dataset")
    task, device = resolve(spec.task), choose_device(spec, 0, 1)
    seed_all(spec.seed)
    model = build_model(task).to(device)
    dataset: Any = task.dataset()
    size: int | None = None
    if isinstance(dataset, IterableDataset):
        if samples is None:
            raise ValueError(
                "the task's dataset is a stream, which does not end by itself: say how many samples, noise_scale(…, samples=1000)"
            )
    else:
        size = len(dataset)
        if samples is not None and samples < size:
            dataset = Subset(dataset, torch.randperm(size)[:samples].tolist())
    loader = DataLoader(dataset, batch_size=min(CHUNK, samples or CHUNK), collate_fn=task.collate)

    def batches() -> Any:
        left = samples if size is None else size
        for batch in loader:
            if left is None or left <= 0:
                return
            left -= loader.batch_size or 1
            yield to_device(batch, device)

    return exact_noise_scale(model, lambda module, batch: loss_of(task, module, batch), batches(), dataset_size=size)
