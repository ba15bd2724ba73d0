"""The order of a training's samples: where a step is in it, also on other ranks than before, and a seed for each batch of a worker.

A resumed run so gets the batches that the undisturbed one would have got, with the same augmentation, however many samples came before.
On other ranks, or with other batches, it gets the samples of the epoch that are left.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from workbench.data.resumable_sampler import ResumableSampler, SampleIndex
from workbench.train.random_numbers import mixed_seed, seed_all

_STREAM = "_began_after"
"""Attribute of a loader of a stream: (step, samples) where this layout of ranks and batches began."""


class SampleOrder(ResumableSampler):
    """A ResumableSampler that counts in optimizer steps.

    Attributes:
        batch: samples of a batch where each batch of a worker gets a seed of its own; 0 = none does.
        given: where it is kept which samples were given: (epoch, position in the rank's part) → index; None = it is not.
        origin: (step, epoch, consumed) where this layout of ranks and batches began.
    """

    batch = 0
    given: dict[tuple[int, int], int] | None = None
    origin: tuple[int, int, int] = (0, 0, 0)

    def __len__(self) -> int:
        return self.samples // self.world_size  # of a whole epoch, wherever this one began

    def __iter__(self) -> Iterator[int]:
        order = super().__iter__()
        return order if self.given is None and not self.batch else self._marked(order, self.epoch, self.consumed // self.world_size)

    def _marked(self, order: Iterator[int], epoch: int, start: int) -> Iterator[int]:
        for position, index in enumerate(order, start):
            if self.given is not None:
                self.given[epoch, position] = index
            first = self.batch and (position - start) % self.batch == 0
            yield SampleIndex.of(index, mixed_seed(self.seed, self.rank, epoch, position)) if first else index

    def after(self, step: int, per_step: int) -> tuple[int, int]:
        """Epoch and consumed samples after some steps; an epoch ends where it has no whole step left.

        Args:
            step: how many were taken, at least those of `origin`.
            per_step: samples that all ranks take in a step.
        """
        begun, epoch, consumed = self.origin
        steps = step - begun
        if steps < (left := max(0, self.samples - consumed) // per_step):
            return epoch, consumed + steps * per_step
        further, within = divmod(steps - left, self.samples // per_step)
        return epoch + 1 + further, within * per_step


def go_on(loader: "DataLoader[Any]", state: Mapping[str, Any]) -> None:
    """Let a loader begin where a checkpoint was written, with its `step` and `position`.

    A checkpoint of an earlier workbench has no position: its steps count as of these ranks and batches.
    """
    if not (position := state.get("position")):
        return
    step, consumed = int(state["step"]), int(position["consumed"])
    if isinstance(loader.sampler, SampleOrder):
        loader.sampler.origin = step, int(position["epoch"]), consumed
    elif isinstance(loader.dataset, IterableDataset):
        vars(loader)[_STREAM] = step, consumed


def read_of_stream(loader: "DataLoader[Any]", step: int, per_step: int) -> int:
    """Samples that all ranks have read of a stream, in all epochs, after some steps: see `SampleOrder.after`."""
    begun, consumed = vars(loader).get(_STREAM, (0, 0))
    return int(consumed + (step - begun) * per_step)


def position_of(loader: "DataLoader[Any]", step: int, per_step: int) -> dict[str, int] | None:
    """What a checkpoint keeps of a loader's place after some steps: `epoch` and `consumed`, of a stream without `epoch`; None = nothing."""
    if isinstance(loader.dataset, IterableDataset):
        return {"consumed": read_of_stream(loader, step, per_step)}
    if not isinstance(loader.sampler, SampleOrder):
        return None
    begun, epoch, consumed = loader.sampler.origin
    if step > begun:  # not where the next step begins: smaller ones may use what the epoch has left
        epoch, consumed = loader.sampler.after(step - 1, per_step)
        consumed += per_step
    return {"epoch": epoch, "consumed": consumed}


class StepSamples:
    """Which samples a rank's steps have: their indices, as the sampler gave them."""

    def __init__(self, loader: "DataLoader[Any]", accumulation: int) -> None:
        """From now on the sampler keeps what it gives."""
        self._order = loader.sampler if isinstance(loader.sampler, SampleOrder) and loader.batch_size else None
        if self._order:
            self._order.given = {}
            self._of_rank = int(loader.batch_size or 1) * accumulation
        self._epoch = 0
        self._last: tuple[int, list[int]] | None = None

    def of(self, step: int) -> list[int] | None:
        """Those of a step, from 1, when its batches were given; each step is asked for in its turn. None = they have no indices."""
        if self._order is None or self._order.given is None:
            return None
        if self._last is None or self._last[0] != step:
            epoch, consumed = self._order.after(step - 1, self._of_rank * self._order.world_size)
            if epoch != self._epoch:  # what an epoch's end has dropped
                self._epoch = epoch
                self._order.given = {key: index for key, index in self._order.given.items() if key[0] >= epoch}
            first = consumed // self._order.world_size
            places = range(first, first + self._of_rank)
            self._last = step, [self._order.given.pop((epoch, place), -1) for place in places]
        return self._last[1]


class SeededBatches(Dataset[Any]):
    """A dataset whose random numbers begin anew with each batch, in a worker; everything else is that of the dataset inside."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        _seed(index)
        return self.dataset[int(index)]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return _seeded(value) if name == "__getitems__" else value


def _seeded(several: Any) -> Any:
    def getitems(indices: list[int]) -> Any:
        _seed(indices[0])
        return several([int(index) for index in indices])

    return getitems


def _seed(index: int) -> None:
    if isinstance(index, SampleIndex) and get_worker_info() is not None:  # in the training process, a checkpoint has its generators
        seed_all(index.seed)
