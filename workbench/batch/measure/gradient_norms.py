"""Measures the norms of a step's micro-batch gradients and of their mean by hooks of autograd, without waiting for the device.

An attached hook costs time even if it returns at once, and a removed one as much, since torch goes on calling the empty list of them. So
`GroupNorms` restores the weights completely for steps that it skips, and `SamplingInterval` decides which those are.
"""

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.batch.analysis.noise_scale_estimator import NoiseScaleError
from workbench.harness.peers import wait_for_gloo_at_exit
from workbench.memory.measure.recorder import is_dense
from workbench.train.sharded_tensors import is_dtensor

LARGE_TENSOR, ROW = 2**14, 1024
"""Elements from which on a CPU the squares of a tensor are added up row by row, and elements of a row."""
MAX_SHARE = 0.04
"""Share of the time of all steps that measuring may take. All of it may cost a twentieth: the rest is for costs that appear in other steps,
such as cold caches in the next one."""
FIRST_INTERVAL, LAST_INTERVAL = 4, 64
"""Intervals to begin and to end with."""
WARM_UP = 8
"""Steps that are not compared."""
MIN_COMPARED, MAX_COMPARED = 8, 1024
"""Measured steps, each compared with the one before it: decisions are made at 8, 16, 32, … of them, since a test repeated at every step
would be passed by chance in the end; after MAX_COMPARED they are counted anew."""

_norm: Any = torch.linalg.vector_norm

_watched: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_engine: Any = torch.autograd.Variable._execution_engine


class Row:
    """A step's norms on the device, not squared yet; each part of `big` with the number of ranks that hold it."""

    __slots__ = ("big", "count", "scale", "small")

    def __init__(self, small: Tensor, big: Sequence[tuple[Tensor, float]], count: int, scale: Tensor | None) -> None:
        self.small, self.big, self.count, self.scale = small, big, count, scale


class GroupNorms:
    """Records the norms of the gradient of each micro-batch, and of the mean gradient at the end of a backward.

    `small` squared is the sum of the squares of a step's micro-batches' gradients on this rank; `big` squared is this rank's share of the
    square of the mean gradient, which is their sum over the ranks.
    """

    def __init__(self, model: nn.Module, world_size: int, backwards: int = 1) -> None:
        """Attach to a model, and measure its next step.

        Args:
            model: whose gradients; in its DDP, sharded by FSDP2, or plain.
            world_size: ranks that reduce their gradients.
            backwards: the least number of a step; the mean gradient is not measured earlier.

        Raises:
            NoiseScaleError: nothing is trained, another watch is attached, or a layer is split over ranks.
        """
        self._model, self._world_size, self._backwards = model, world_size, backwards
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._check()
        if world_size > 1:
            wait_for_gloo_at_exit()
        self._norms: list[Tensor] = []
        self._fired: set[int] = set()
        self._count = 0
        self._forwards = 0
        self._queued = False
        self._big: list[tuple[Tensor, float]] = []
        self._parts: dict[tuple[torch.device, float], list[Tensor]] = {}
        for weight in self._weights:
            self._parts.setdefault((weight.device, self._holders(weight)), []).append(weight)
        self._hooked: dict[int, Tensor] = {}
        self._bare: list[Tensor] = []
        self._handles: list[Any] = []
        self._looking = self._closed = False
        _watched.add(model)
        self.look(True)

    @property
    def looking(self) -> bool:
        """Is this step measured?"""
        return self._looking

    def look(self, measured: bool) -> None:
        """Set, between two steps, whether the next steps are measured."""
        if measured is not self._looking and not self._closed:
            self._looking = measured
            self._attach() if measured else self._detach()

    def close(self) -> None:
        """Detach finally."""
        self.look(False)
        self._closed = True
        _watched.discard(self._model)

    def step(self, scale: Tensor | None = None) -> Row | None:
        """The norms of a step, whose gradients are complete; None = it had none.

        The count is 0 where gradients came more often than the model was called: some came in parts, as those of a weight that two
        reentrant checkpoints share, or of two backwards through one forward, and the norms are not those of groups.

        Args:
            scale: factor of the loss; None = 1.
        """
        norms, big, count = self._norms, self._big, self._count
        if 0 < self._forwards < count:
            count = 0
        self._norms, self._big, self._count, self._forwards = [], [], 0, 0
        self._fired.clear()
        return Row(_norm_of(norms), big, count, scale) if norms and big else None

    def _check(self) -> None:
        if not self._weights:
            raise NoiseScaleError(
                "the model has no parameter that requires a gradient: nothing is trained, so there is no noise to measure"
            )
        if self._model in _watched:
            raise NoiseScaleError(
                "this model is watched already: leave the other watch (its with block, or watch.close()) before a new one"
            )
        for weight in self._weights:
            split = is_dtensor(weight) and weight.device_mesh.size() != self._world_size
            if split or hasattr(weight, "_dtensor_spec"):
                raise NoiseScaleError(
                    "a layer is split over ranks (tensor parallel), and its gradient is on no single one of them: the noise scale is "
                    "measured under DDP, FSDP2 and accumulation; measure it without tensor_parallel (it does not depend on that)"
                )

    def _attach(self) -> None:
        self._handles.append(self._model.register_forward_pre_hook(self._forward))
        for weight in self._weights:
            if not is_dtensor(weight):
                self._hook(weight)
        if any(is_dtensor(weight) for weight in self._weights):
            self._handles += [part.register_forward_pre_hook(self._gathered) for part in self._model.modules()]

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for weight in self._bare:
            if not weight._backward_hooks:  # nobody else has come
                weight._backward_hooks = None
        for kept in (self._handles, self._bare, self._hooked):
            kept.clear()

    def _forward(self, *_: Any) -> None:
        self._forwards += torch.is_grad_enabled()

    def _gathered(self, part: nn.Module, *_: Any) -> None:
        """Before a module's forward: FSDP2 has replaced its shards by whole tensors."""
        for weight in part._parameters.values():
            if weight is not None and weight.requires_grad and not is_dtensor(weight):
                self._hook(weight)

    def _hook(self, weight: Tensor) -> None:
        key = id(weight)
        if key in self._hooked or not weight.is_leaf or not weight.requires_grad:  # some are frozen during training
            return
        self._hooked[key] = weight
        if weight._backward_hooks is None:
            self._bare.append(weight)
        reference = weakref.ref(self)

        def record(gradient: Tensor) -> None:
            if (norms := reference()) is not None:
                norms._record(key, gradient)

        self._handles.append(weight.register_hook(record))  # type: ignore[no-untyped-call]

    def _record(self, key: int, gradient: Tensor) -> None:
        fired = self._fired
        if key in fired or not fired:  # the next micro-batch
            self._count += 1
            fired.clear()
            self._queued = False
        fired.add(key)
        self._norms.append(norm(gradient if type(gradient) is Tensor and not gradient.is_sparse else _values(gradient)))
        if not self._queued and self._count >= self._backwards:
            self._queued = True
            _engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        """All gradients of the backward are computed, and DDP and FSDP2 have queued the end of their reduction: run after that."""
        _engine.queue_callback(self._reduced)

    @torch.no_grad()
    def _reduced(self) -> None:
        self._queued = False
        if isinstance(self._model, DistributedDataParallel) and not self._model.require_backward_grad_sync:
            return  # not the last micro-batch
        self._big = [
            (_norm_of(_norms(values)), holders)
            for (_, holders), weights in self._parts.items()
            if (values := [_values(weight.grad) for weight in weights if weight.grad is not None])  # of FSDP2, after the last micro-batch
        ]

    def _holders(self, weight: Tensor) -> float:
        """The number of ranks that hold the same part of a gradient."""
        if not is_dtensor(weight):
            return float(self._world_size)
        from torch.distributed.tensor import Partial, Replicate

        holders = 1
        for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
            assert not isinstance(placement, Partial)
            holders *= size if isinstance(placement, Replicate) else 1
        return float(holders)


def _values(gradient: Tensor) -> Tensor:
    """The part of a gradient on this rank, without zeros of a sparse one."""
    mine = gradient.to_local() if is_dtensor(gradient) else gradient
    return mine.coalesce().values() if mine.is_sparse else mine


def norm(values: Tensor) -> Tensor:
    """The Euclidean norm, exact to 6 digits or more: in fp64, on a CPU in fp32.

    Sums in fp32 over many elements are wrong in the fourth digit, and on a CPU those in fp64 take several times as long: there, large
    tensors are added up row by row.
    """
    if values.device.type != "cpu" or values.dtype is torch.float64:
        exact: Tensor = _norm(values, dtype=torch.float64)
        return exact
    if values.numel() <= LARGE_TENSOR:
        short: Tensor = _norm(values, dtype=torch.float32)
        return short
    flat = values.as_strided((values.numel(),), (1,), values.storage_offset()) if is_dense(values) else values.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = _norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32)
    if whole < flat.numel():
        rows = torch.cat([rows, _norm(flat[whole:], dtype=torch.float32).reshape(1)])
    return norm(rows)


def _norms(values: list[Tensor]) -> list[Tensor]:
    """The norms of tensors on one device, in one call as far as they are small."""
    on_cpu = values[0].device.type == "cpu"
    small, others = list[Tensor](), list[Tensor]()
    for value in values:
        (small if value.dtype is torch.float32 and (value.numel() <= LARGE_TENSOR or not on_cpu) else others).append(value)
    norms: list[Tensor] = list(torch._foreach_norm(small, 2, None if on_cpu else torch.float64)) if small else []
    return [*norms, *map(norm, others)]


def _norm_of(norms: list[Tensor]) -> Tensor:
    whole: Tensor = _norm(torch.stack(norms), dtype=torch.float64)
    return whole


def read_norms(rows: Iterable[Row]) -> list[tuple[float, float, int]]:
    """Per step: the mean square of a micro-batch's gradient on this rank, its share of the mean gradient's square, and the micro-batches.

    Waits for the device once. Assumes that the loss of a micro-batch is divided by their number.
    """
    rows = list(rows)
    if not rows:
        return []
    small = torch.stack([_unscaled(row.small, row.scale) for row in rows]).square().tolist()
    parts = torch.stack([_unscaled(norm.to(row.small.device), row.scale) for row in rows for norm, _ in row.big]).square().tolist()
    steps, rest = [], iter(parts)
    for row, square in zip(rows, small, strict=True):
        big = math.fsum(next(rest) / holders for _, holders in row.big)
        steps.append((row.count * square, big, row.count))
    return steps


def _unscaled(norm: Tensor, scale: Tensor | None) -> Tensor:
    return norm if scale is None else norm / scale.to(norm.device, torch.float64)


class SamplingInterval:
    """Measures every n-th step, and doubles n while that costs more than MAX_SHARE of the time.

    As n only doubles, the steps that a rank measures are among those of any rank that measures more often.
    """

    def __init__(self, every: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every = every or FIRST_INTERVAL
        self._fixed, self._clock = every is not None, clock
        self._steps = 0
        self._began: float | None = None
        self._plain: float | None = None
        self._pairs: list[tuple[float, float]] = []
        self._due = MIN_COMPARED
        self.looking = True

    def step(self) -> bool:
        """A step is over; is the next one to be measured?"""
        self._steps += 1
        place = self._steps % self.every
        if not self._fixed and (self.looking or place == 0 or place == self.every - 1):
            self._note(place)
        self.looking = place == 0
        return self.looking

    def _note(self, place: int) -> None:
        """Time a measured step and the one before it."""
        now = self._clock()
        took = now - self._began if self._began is not None else None
        self._began = now if place in (0, self.every - 1) else None
        if not self.looking:
            self._plain = took
        elif took is not None and self._plain is not None and self._steps > WARM_UP and self.every < LAST_INTERVAL:
            self._pairs.append((self._plain, took))
            if len(self._pairs) == self._due:
                self._adapt()

    def _adapt(self) -> None:
        usual = statistics.median(plain for plain, _ in self._pairs)
        if statistics.median(took - plain for plain, took in self._pairs) > MAX_SHARE * self.every * usual:
            self.every *= 2
            self._pairs, self._due = [], MIN_COMPARED
        elif self._due < MAX_COMPARED:
            self._due *= 2
        else:
            self._pairs = []
