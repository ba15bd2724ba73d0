"""Spy: what a single call of the step gives away: does it use its batch, which optimizers step, which collectives are called?"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.measure.batches import tensors_of
from workbench.measure.interrupts import here, waiting


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inside, a compiled model runs as it was written: it would be compiled again, or hide what it does."""
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


LOOKS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset", "element_size", "data_ptr"}
LOOKS |= {"untyped_storage", "is_floating_point", "is_complex", "is_contiguous", "is_pinned", "get_device", "__hash__", "__repr__"}
"""Functions of a tensor that do not ask for its numbers."""


def uses(step: Callable[[Any], object], batch: Any) -> bool | None:
    """Does `step(batch)` use what is in the batch? It is called once, for that. None: there is no tensor in it that could be followed."""
    tensors = tensors_of(batch)
    spy = _Reader({id(tensor) for tensor in tensors})
    with as_written(), spy:
        step(batch)
    return spy.seen if tensors else None


class _Reader(TorchFunctionMode):
    """Sees whether a function of torch gets one of some tensors."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self._watched = watched
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.seen and getattr(func, "__name__", "") not in LOOKS:
            self.seen = any(id(leaf) in self._watched for leaf in tree_leaves((args, kwargs)))
        return func(*args, **kwargs)


@contextlib.contextmanager
def meeting(known: Sequence[Optimizer], meet: Callable[[Optimizer], None]) -> Iterator[None]:
    """Inside, `meet` is told of each optimizer that is about to step and is neither known nor part of one that is."""
    met = {id(one) for one in known} | {id(part) for one in known for part in vars(one).values()}
    alive = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in met:
            met.add(id(optimizer))
            alive.append(optimizer)
            meet(optimizer)

    with as_written():
        handle = register_optimizer_step_pre_hook(before)
        try:
            yield
        finally:
            handle.remove()


COLLECTIVES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""As torch.distributed calls them, by how its operators begin; the first that fits."""


@contextlib.contextmanager
def collectives() -> Iterator[set[str]]:
    """Inside, the names of the collectives that are called gather: DDP's, FSDP's, an optimizer's and the step's own."""
    listener = _Listener()
    with waiting(), as_written(), listener:
        handle = register_module_forward_pre_hook(lambda *_: here())  # between modules an interrupt may come
        try:
            yield listener.heard
        finally:
            handle.remove()


class _Listener(TorchDispatchMode):
    """Hears operators of process groups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if "c10d" in space:
            plain = name.replace("_", "")
            self.heard |= set([word for start, word in COLLECTIVES.items() if plain.startswith(start)][:1])
        return func(*args, **(kwargs or {}))
