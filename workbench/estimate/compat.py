"""What a dry run needs of torch that torch does not promise: context managers that put everything back, and a test of them all."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parallel import DistributedDataParallel

from workbench.estimate.discreet import unrecognised
from workbench.estimate.semantics_overrides import replaced
from workbench.measure import private
from workbench.measure.storages import Recorder


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have a shape and a type but no values; real ones, such as a mask that a module keeps, may take part.

    Who asks whether a tensor is a fake one is told that it is not (see `discreet`).
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        no_autocast(),
        quiet(),
        formatted(),
        unrecognised(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Inside, an autocast that the caller is in does not count."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch does not write a traceback to stderr where the shapes of an operator do not fit: the error itself says it."""

    def wanted(record: logging.LogRecord) -> bool:
        return "failed while attempting to run" not in str(record.msg)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextlib.contextmanager
def formatted() -> Iterator[None]:
    """Inside, `f"{loss:.3f}"` works on fake tensors: it asks for the value, as it does of real ones."""
    usual = Tensor.__format__

    def answer(self: Tensor, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else str(usual(self, spec))  # type: ignore[no-untyped-call]

    with replaced(FakeTensor, "__format__", answer):
        yield


def real_tensors() -> AbstractContextManager[Any]:
    """Inside, within `fake_tensors`, tensors have values again."""
    return unset_fake_temporarily()


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is one rank of many, whose collectives return at once; values are not exchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts one in its place that writes the rank before each line, and leaves it there
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class _NeverRebuilds:
    """DDP's reducer, but it keeps its buckets as they are: to put them into another order it would exchange indices as real tensors."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return _no if name == "_rebuild_buckets" else getattr(self._reducer, name)


def _no(*_args: Any) -> bool:
    return False


@contextlib.contextmanager
def fake_data_parallel(bucket_seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, DistributedDataParallel can be built on fake tensors; its reducer is the real one, and so are its buckets.

    Left out are the first broadcast of the weights, the reduction itself (a hook answers at once) and the one reordering of the buckets.

    Args:
        bucket_seen: called with each bucket when it is reduced.
    """
    build = DistributedDataParallel.__init__

    def reduced(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        bucket_seen(bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    @wraps(build)
    def build_fake(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        build(self, *args, **options | {"init_sync": False})
        self.register_comm_hook(None, reduced)
        self.reducer = _NeverRebuilds(self.reducer)  # type: ignore[assignment]

    DistributedDataParallel.__init__ = build_fake  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = build  # type: ignore[method-assign]


@contextlib.contextmanager
def real_device_meshes() -> Iterator[None]:
    """Inside, device meshes are built and sliced with real tensors: their ranks are read as numbers."""
    from torch.distributed.device_mesh import DeviceMesh

    before = {
        name: getattr(DeviceMesh, name) for name in ("__init__", "__getitem__", "_flatten", "_unflatten") if hasattr(DeviceMesh, name)
    }

    def apart(method: Any) -> Any:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with real_tensors():
                return method(*args, **kwargs)

        return call

    for name, method in before.items():
        setattr(DeviceMesh, name, apart(method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(DeviceMesh, name, method)


@contextlib.contextmanager
def movable_modules() -> Iterator[None]:
    """Inside, `module.to(…)` and the like work on fake parameters, which torch wants to swap with others and, being referred to, cannot."""
    apply = nn.Module._apply

    def replace(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        made: dict[int, nn.Parameter] = {}
        for module in self.modules() if recurse else (self,):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    with torch.no_grad():
                        moved = fn(tensor)
                    if moved is not tensor and isinstance(tensor, nn.Parameter):
                        moved = made.setdefault(id(tensor), nn.Parameter(moved, requires_grad=tensor.requires_grad))
                    table[name] = moved  # type: ignore[assignment]
        return self

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


@contextlib.contextmanager
def foreach_on_fakes() -> Iterator[None]:
    """Inside, gradient clipping and optimizers take multi-tensor operators for fake tensors where they would for real ones."""
    homes = [sys.modules[name] for name in ("torch.utils._foreach_utils", torch.optim.Optimizer.__module__)]
    lists = {id(home._foreach_supported_types): home._foreach_supported_types for home in homes}
    for types in lists.values():
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists.values():
            types.remove(FakeTensor)


def check() -> list[str]:
    """What a dry run cannot do with this torch, in words; empty where all is well. Takes about a second."""
    cannot = []
    for can, test in _TESTS.items():
        try:
            failed = test()
        except Exception as error:  # whatever a future torch may say
            failed = f"{type(error).__name__}: {error}"
        if failed:
            cannot.append(f"torch {torch.__version__}: {can}: {failed[:200]}")
    return cannot


def _step_of(model: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], world: bool = False) -> Recorder:
    with fake_process_group(2, 0) if world else contextlib.nullcontext(), fake_tensors():
        recorder = Recorder()
        with recorder, fake_data_parallel(lambda bucket: recorder.track(bucket, "bucket")):
            module = model()
            recorder.attach(module)
            steps = optimizer(list(module.parameters()))
            with recorder.hooks():
                with recorder.phase("forward"):
                    loss = module(torch.ones(4, 8)).sum()
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    steps.step()
        recorder.recognise_unsharded(module)
    return recorder


def _bytes(recorder: Recorder, category: str) -> int:
    return sum(record.size for record in recorder.log.records if record.category == category)


def _expect(found: int, expected: int, what: str) -> str:
    return "" if found == expected else f"{found} bytes of {what} instead of {expected}"


def _test_recorder() -> str:
    recorder = _step_of(lambda: nn.Linear(8, 4), lambda p: torch.optim.SGD(p, momentum=0.9))
    found = [_expect(_bytes(recorder, name), 36 * 4, name) for name in ("parameter", "gradient", "optimizer_state")]
    return next(filter(None, found), "")


def _test_data_parallel() -> str:
    recorder = _step_of(lambda: DistributedDataParallel(nn.Linear(8, 4)), torch.optim.SGD, world=True)
    return _expect(_bytes(recorder, "bucket"), 36 * 4, "buckets")


def _test_fully_shard() -> str:
    def build() -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with real_tensors():
            mesh = init_device_mesh("cpu", (2,))
        module = nn.Linear(8, 4)
        fully_shard(module, mesh=mesh)
        return module

    recorder = _step_of(build, torch.optim.SGD, world=True)
    sharded = _expect(_bytes(recorder, "parameter"), 18 * 4, "sharded parameters")
    return sharded or _expect(_bytes(recorder, "unsharded_parameter"), 36 * 4, "gathered parameters")


def _test_foreach() -> str:
    with foreach_on_fakes():
        recorder = _step_of(lambda: nn.Linear(8, 4), lambda p: torch.optim.SGD(p, weight_decay=0.1, foreach=True))
    return "" if any("_foreach_" in record.op for record in recorder.log.records) else "the optimizer took its loop"


def _test_movable() -> str:
    with fake_tensors(), movable_modules():
        module = nn.Linear(8, 4).to(torch.float64)
    return "" if module.weight.dtype == torch.float64 else "it stays as it is"


def _test_whose() -> str:
    return "" if private.next_node() is not None else "backward is not told by module"


_TESTS: dict[str, Callable[[], str]] = {
    "record a step on fake tensors": _test_recorder,
    "run multi-tensor optimizers": _test_foreach,
    "move a model": _test_movable,
    "say whose backward runs": _test_whose,
    "run DDP on fake ranks": _test_data_parallel,
    "run FSDP2 on fake ranks": _test_fully_shard,
}
"""What a dry run does → a test of it, "" if it can."""
