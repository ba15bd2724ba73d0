"""Lets trainings of one process take turns on a device. If they do not fit together, the tensors of a resting one are in main memory."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from workbench.core import units
from workbench.core.checks import number_in_environment
from workbench.core.device import MARGIN
from workbench.train.sharding import distribute
from workbench.train.trainer import Trainer


class GpuMemory:
    """The memory of a GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self) -> int:
        """Peak bytes of tensors since the last `reset`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        """Forget the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def room(self) -> int:
        """Bytes that tensors of this process can take in total: ranks that share the GPU get equal parts of what is free."""
        free, _ = torch.cuda.mem_get_info(self._device)
        sharing = math.ceil(number_in_environment("LOCAL_WORLD_SIZE", 1, least=1) / max(1, torch.cuda.device_count()))
        return int(free) // sharing + torch.cuda.memory_reserved(self._device)

    def release(self) -> None:
        """Give memory that no tensor uses back to the device."""
        torch.cuda.empty_cache()


class DeviceTurns:
    """Decides which trainings are on the device. All ranks of a launch must make the same calls in the same order.

    At first only one is, so that each can use all of the memory. Once all have had a turn, their peaks are known: if they fit together,
    they stay there, and otherwise those that rest are moved to main memory between turns. The buckets of DDP, which have the size of the
    gradients and cannot be reached from Python, are dropped with the DistributedDataParallel, and made anew at the next turn: its first
    step has one bucket for all gradients, as the first step of a training has. Where `_can_be_wrapped_again` says no, they stay on the
    device, and so does the error that PowerSGD keeps.

    Attributes:
        note: says that trainings are moved, and why; None as long as they are not.
    """

    def __init__(self, device: torch.device, memory: GpuMemory | None = None, *, all_agree: Callable[[bool], bool] = bool) -> None:
        """
        Args:
            device: on which the trainings compute.
            memory: its memory; None = that of a GPU. Main memory does not need turns.
            all_agree: gives whether all ranks of the launch say yes; a collective.
        """
        self._device = device
        self._memory = memory or (GpuMemory(device) if device.type == "cuda" else None)
        self._all_agree = all_agree
        self._all: list[Trainer | None] = []
        self._resting: dict[Trainer, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._unwrapped: set[Trainer] = set()  # resting ones whose DistributedDataParallel is to be made anew
        self._copies: dict[int, Tensor] = {}  # in main memory, by storage: they serve each turn, since new memory is slow at first
        self._peaks: dict[Trainer | None, int] = {}
        self._sizes: dict[Trainer | None, int] = {}
        self._active: Trainer | None = None
        self._begun = False
        self._together: bool | None = None
        self.note: str | None = None

    def add(self, trainer: Trainer | None) -> None:
        """Add a training, which was just built; None = that of other ranks, in which this one idles. It rests until its first turn."""
        self._all.append(trainer)
        if self._memory is not None and trainer is not None:
            self._rest(trainer)

    def enter(self, trainer: Trainer | None) -> None:
        """Begin a training's turn; None = that of other ranks."""
        if self._memory is None or (self._begun and self._active is trainer):
            return
        if self._begun:
            self._end_turn(self._active)
        for storage, copy in self._resting.pop(trainer, []) if trainer is not None else ():
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
        if trainer in self._unwrapped:
            self._unwrapped.remove(trainer)
            trainer.model = distribute(trainer.module, trainer.spec, trainer.layout, trainer.ranks.device, again=True)
        if self._together:
            self._copies.clear()
        self._active, self._begun = trainer, True
        self._memory.reset()

    def _end_turn(self, trainer: Trainer | None) -> None:
        assert self._memory is not None
        self._peaks[trainer] = max(self._peaks.get(trainer, 0), self._memory.peak())
        if trainer is not None:
            buckets = [weight for weight in trainer.module.parameters() if weight.requires_grad] if _can_be_wrapped_again(trainer) else []
            self._sizes[trainer] = sum(kept.nbytes() for kept in storages_of(trainer, self._device)) + sum(each.nbytes for each in buckets)
        if self._together is None and self._peaks.keys() == {*self._all}:
            self._decide()
        if not self._together and trainer is not None:
            self._rest(trainer)

    def _decide(self) -> None:
        """Do all fit together, each with its peak while the others rest there?"""
        assert self._memory is not None
        total, room = sum(self._sizes.values()), self._memory.room()
        needed = max(peak + total - self._sizes.get(trainer, 0) for trainer, peak in self._peaks.items())
        fit = needed <= (1 - MARGIN) * room
        self._together = self._all_agree(fit)
        if not self._together:
            where = "of another rank" if fit else f"({units.bytes_(needed)} of {units.bytes_(room)})"
            self.note = f"the two do not fit on the device together {where}: between blocks the resting one was moved to main memory"

    def _rest(self, trainer: Trainer) -> None:
        assert self._memory is not None
        if _can_be_wrapped_again(trainer):
            wrapper = weakref.ref(trainer.model)
            trainer.model = trainer.module
            if wrapper() is not None:  # in a reference cycle; the buckets live as long
                gc.collect()
            self._unwrapped.add(trainer)
        resting = []
        for storage in storages_of(trainer, self._device):
            size, copy = storage.nbytes(), self._copies.get(storage._cdata)
            if copy is None or copy.nbytes != size:
                copy = self._copies[storage._cdata] = torch.empty(size, dtype=torch.uint8)
            copy.copy_(_bytes_of(storage))
            storage.resize_(0)
            resting.append((storage, copy))
        self._resting[trainer] = resting
        self._memory.release()


def _can_be_wrapped_again(trainer: Trainer) -> bool:
    """Can its DistributedDataParallel be made anew between two steps, as if nothing had been? Not if it has learned something.

    A static graph and the state of PowerSGD and of local SGD would begin anew, and parameters that ranks split are wrapped once.
    """
    spec = trainer.spec
    learns = spec.static_graph or spec.local_sgd != "none" or spec.gradient_compression.startswith("powersgd")
    return isinstance(trainer.model, DistributedDataParallel) and trainer.layout.tensor is None and not learns


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(trainer: Trainer, device: torch.device) -> list[torch.UntypedStorage]:
    """What a training keeps on a device between its steps: weights, their averages, buffers, gradients and the optimizer's states.

    Each storage once, without the buckets of DDP.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in _kept(trainer):
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: what lies here
        if local.device.type == device.type and local.layout == torch.strided:
            storage = local.untyped_storage()
            storages[storage._cdata] = storage
    return [storage for storage in storages.values() if storage.nbytes()]


def _kept(trainer: Trainer) -> Iterator[Tensor]:
    for weight in trainer.module.parameters():
        yield weight.detach()
        if weight.grad is not None:
            yield weight.grad
    yield from trainer.module.buffers()
    yield from trainer.averages.values()
    optimizers: list[Any] = [trainer.optimizer, getattr(trainer.optimizer, "optim", None)]  # the latter: ZeRO-1's
    for optimizer in optimizers:
        for leaf in tree_leaves(list(optimizer.state.values())) if optimizer is not None else ():
            if isinstance(leaf, Tensor):
                yield leaf
