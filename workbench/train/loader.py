"""Builds the DataLoader of a spec, yields its micro-batches epoch after epoch, and moves them to the device."""

import hashlib
import itertools
from collections.abc import Callable, Generator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, IterableDataset

from workbench.harness.batches import map_tensors
from workbench.harness.loaders import shared_numbers, shut_down
from workbench.runs.spec import AUTO, RunSpec, SpecError
from workbench.runs.task import Task, TaskError, built
from workbench.timeline.reading import FirstBatches
from workbench.train.preemption import spare_worker, start_workers
from workbench.train.ranks import Ranks, choose_device
from workbench.train.sample_order import SampleOrder, SeededBatches, read_of_stream

ANEW = (
    "the dataset has set_epoch, which persistent workers would not see: in spite of persistent_workers=True they are started anew with "
    "each epoch. To keep them, hold the epoch in shared memory: a tensor of one number with share_memory_(), or a multiprocessing.Value"
)
"""Note of a training whose persistent workers are started anew."""


def build_loader(task: Task, spec: RunSpec, ranks: Ranks, seed: int) -> "DataLoader[Any]":
    """The loader of this rank.

    A dataset with a length is shuffled and split over the ranks in each epoch. An `IterableDataset` is read as it is: it has to give each
    rank, and each worker, its own part. Where checkpoints are written, or
    with `deterministic`, the random numbers of a worker begin anew with each batch.

    Raises:
        TaskError: what `dataset()` returned is no dataset.
        SpecError: it has too few samples for one optimizer step.
    """
    dataset = task.dataset()
    stream = isinstance(dataset, IterableDataset)
    if not stream and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TaskError(
            f"the task's dataset() returned a {type(dataset).__name__}; expected a dataset with __len__ and __getitem__, "
            "or a torch.utils.data.IterableDataset"
        )
    if not stream and not len(dataset):
        raise TaskError(
            f"the task's dataset() returned an empty {type(dataset).__name__}: it needs at least one sample; is its path right?"
        )
    need = spec.micro_batch * spec.accumulation * ranks.world_size
    if not stream and len(dataset) < need:
        raise SpecError(
            f"one optimizer step takes {need} samples (micro_batch={spec.micro_batch} × accumulation={spec.accumulation} × "
            f"{ranks.world_size} ranks), and the dataset has {len(dataset)}: try micro_batch="
            f"{max(1, len(dataset) // (spec.accumulation * ranks.world_size))}, or fewer ranks, or less accumulation"
        )
    workers: dict[str, Any] = {}
    if spec.num_workers:
        workers = {"prefetch_factor": spec.prefetch_factor, "persistent_workers": spec.persistent_workers}
    order = None if stream else SampleOrder(dataset, rank=ranks.rank, world_size=ranks.world_size, seed=spec.seed)
    if order and (spec.checkpoint_every or spec.deterministic) and spec.num_workers:
        order.batch, dataset = spec.micro_batch, SeededBatches(dataset)
    return DataLoader(
        dataset,
        batch_size=spec.micro_batch,
        sampler=order,
        num_workers=spec.num_workers,
        collate_fn=task.collate,
        pin_memory=spec.pin_memory and ranks.device.type == "cuda",  # there is nothing to pin for on a CPU, and torch would warn
        drop_last=True,
        worker_init_fn=worker_init(spec),
        generator=torch.Generator().manual_seed(seed),
        **workers,
    )


def named_loader(name: str, knobs: Mapping[str, Any]) -> "DataLoader[Any]":
    """The loader that a name stands for: what its function returns, or that of rank 0 where it returns a task.

    Args:
        name: a task's, or "path/file.py:function" of a function that returns a DataLoader.
        knobs: of a RunSpec, where it is a task.

    Raises:
        TaskError: there is no such function, or it returns neither.
        SpecError: the knobs do not fit, or micro_batch="auto", which only the device can choose.
    """
    made = built(name)
    if isinstance(made, DataLoader):
        if knobs:
            raise SpecError(f"{name} returns a DataLoader, which has its own knobs ({', '.join(knobs)} are given)")
        return made
    if not isinstance(made, Task):
        raise TaskError(f"{name} returned a {type(made).__name__}; expected a wb.Task, or a torch.utils.data.DataLoader")
    spec = RunSpec(task=name).replace(**knobs)
    if spec.micro_batch == AUTO:
        raise SpecError('micro_batch="auto" is chosen on the device when a run starts: give a number, such as --set micro_batch=16')
    ranks = Ranks(rank=0, world_size=spec.data_ranks, device=choose_device(spec, 0, 1), store=HashStore())
    return build_loader(made, spec, ranks, spec.seed)


def worker_init(spec: RunSpec) -> Callable[[int], None] | None:
    """What each worker of a loader of a training calls first."""
    return spare_worker if spec.checkpoint_every else None


def micro_batches(
    loader: "DataLoader[Any]",
    accumulation: int,
    ranks: Ranks,
    done: int = 0,
    warn: Callable[[str], None] = print,
    ready: Callable[[], None] | None = None,
) -> Generator[Any, None, None]:
    """Endless micro-batches, each epoch in another order. An epoch ends with a whole optimizer step and drops the rest (a stream is read to
    its end, and the step continues with the next epoch's batches). Workers that persist, and do not see the `set_epoch` of their dataset,
    are started anew with each epoch.

    Args:
        done: optimizer steps that were taken before, whose batches are left out (of a stream, and of a loader whose sampler is not a
            SampleOrder, they are read and dropped).
        warn: called with a warning where the workers of a stream give the same samples, or persistent ones are started anew.
        ready: called before the first batch that is not left out is read.

    Raises:
        TaskError: a stream has not one whole micro-batch, or gives two ranks the same samples.
    """
    stream = isinstance(loader.dataset, IterableDataset)
    whole = None if stream else len(loader) // accumulation * accumulation
    first, left_out = divmod(done * accumulation, whole) if whole else (0, done * accumulation)
    order = loader.sampler if whole and loader.batch_size and isinstance(loader.sampler, SampleOrder) else None
    per_step = accumulation * int(loader.batch_size or 1) * ranks.world_size
    begin = 0
    if stream:
        left_out = read_of_stream(loader, done, per_step) * accumulation // per_step
    if order:
        (first, begin), left_out = order.after(done, per_step), 0
    if ready and not left_out:
        ready()
    look = FirstBatches(warn=warn, say=lambda row: None, steps=lambda: 0)
    for epoch in itertools.count(first):
        for shuffled in (loader.sampler, loader.dataset):
            if hasattr(shuffled, "set_epoch"):
                shuffled.set_epoch(epoch)
        unseen = hasattr(loader.dataset, "set_epoch") and epoch not in shared_numbers(loader.dataset)
        if epoch > first and loader.persistent_workers and unseen:
            if epoch == first + 1:
                warn(ANEW)
            shut_down(loader._iterator)
            loader._iterator = None
        batch: Any = None
        count = whole
        if order:
            order.consumed = begin if epoch == first else 0
            count = (order.samples - order.consumed) // per_step * accumulation
        for i, batch in enumerate(look.of(loader) if stream and epoch == 0 else itertools.islice(start_workers(loader), count)):
            if stream and epoch == 0 and i == 0:
                _check_parts_differ(batch, ranks)
            if left_out:
                left_out -= 1
                if ready and not left_out:
                    ready()
                continue
            yield batch
        if batch is None:
            raise TaskError(
                f"the task's dataset, a stream ({type(loader.dataset).__name__}), ended before it had given rank {ranks.rank} "
                f"one micro-batch of {loader.batch_size} samples: try a smaller micro_batch, or a longer stream"
            )


def _check_parts_differ(batch: Any, ranks: Ranks) -> None:
    digest, tensors = hashlib.sha256(), 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal tensors
        tensors += 1
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        return tensor

    map_tensors(add, batch)
    first = ranks.share("first batch", digest.digest())
    if tensors and len(set(first)) < len(first):
        raise TaskError(
            "the task's dataset is a stream (IterableDataset) that gives several ranks the same samples, so they would learn the same "
            "thing: it must give each rank its own part. Try, in its __iter__: "
            "itertools.islice(samples, dist.get_rank(), None, dist.get_world_size())"
        )


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with all its tensors on a device.

    Args:
        batch: tensors in lists, tuples, named tuples, mappings and dataclasses, in any depth, or an object with a `to` of its own (a
            PackedSequence, a graph); other things stay as they are.
        device: the device on which the result lies.
        non_blocking: let the host go on while pinned memory is copied.
    """
    if callable(own := getattr(batch, "to", None)) and not isinstance(batch, Tensor | MutableMapping):
        return own(device)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)
