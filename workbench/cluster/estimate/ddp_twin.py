"""Simulates a DDP step in one process: torch's own DDP with its real reducer, with simulated computing and a simulated network.

Real are the buckets, their order, their rebuilding after the first step, the moment at which each is handed to the network (a communication
hook), and that they are sent one after another. Simulated is how long computing and sending take: on a virtual clock, which is exact, or in
real time, in which layers and a network thread sleep for as long as the formula says.
"""

import gc
import queue
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.cluster.analysis.twin_run import TwinBucket, TwinLayer
from workbench.core.gc import RECENT, without_gc
from workbench.memory.estimate.fake_process_group import ProcessGroupError, process_group

WARM_UP = 2
"""Steps before the first that counts: DDP puts its buckets into the order of the first one's gradients before the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The times of one simulated step, in seconds since its backward began."""

    forward: float
    """Seconds of the forward."""
    backward: float
    """Seconds of computing in the backward."""
    end: float
    """When the last bucket and the backward were done."""
    buckets: list[TwinBucket]
    """In the order in which they were sent."""


class VirtualClock:
    """A clock that advances by computing and waiting only; the network is a queue of computed times."""

    def __init__(self, seconds_of: Callable[[float], float]) -> None:
        self._seconds_of = seconds_of
        self.now = self._free = 0.0

    def work(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds

    def send(self, size: int, tensor: Tensor, seen: Callable[[float, float, float], None]) -> torch.futures.Future[Tensor]:
        """Send a bucket; calls `seen` with the times at which it was ready, the network began, and it was done."""
        start = max(self.now, self._free)
        self._free = start + self._seconds_of(size)
        seen(self.now, start, self._free)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    def settle(self) -> None:
        """Wait for the network."""
        self.now = max(self.now, self._free)

    def close(self) -> None:
        """Nothing to do."""


class RealClock:
    """Time of this machine, `scale` seconds of it for each emulated one; the network is a thread that sleeps."""

    def __init__(self, seconds_of: Callable[[float], float], scale: float) -> None:
        self._seconds_of, self._scale = seconds_of, scale
        self._begin = time.perf_counter()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="emulated network", daemon=True)
        self._thread.start()

    @property
    def now(self) -> float:
        """Emulated seconds."""
        return (time.perf_counter() - self._begin) / self._scale

    def work(self, seconds: float) -> None:
        """Compute for so long."""
        time.sleep(seconds * self._scale)

    def send(self, size: int, tensor: Tensor, seen: Callable[[float, float, float], None]) -> torch.futures.Future[Tensor]:
        """As `VirtualClock.send`."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._jobs.put((size, tensor, seen, future, self.now))
        return future

    def settle(self) -> None:
        """Nothing to do: the backward has waited already."""

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            size, tensor, seen, future, ready = job
            start = self.now
            time.sleep(self._seconds_of(size) * self._scale)
            seen(ready, start, self.now)
            future.set_result(tensor)
            del job, tensor, future  # the bucket belongs to the reducer


class _EmulatedCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TwinLayer, clock: Any) -> Tensor:
        ctx.weight, ctx.layer, ctx.clock = weight, layer, clock
        clock.work(layer.forward)
        return x + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.work(ctx.layer.backward)
        return grad, torch.zeros_like(ctx.weight), None, None


class EmulatedLayer(nn.Module):
    """A TwinLayer as a module."""

    def __init__(self, layer: TwinLayer, clock: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layer.size // 4))
        self._layer, self._clock = layer, clock

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _EmulatedCompute.apply(x, self.weight, self._layer, self._clock)  # type: ignore[no-untyped-call]
        return out


def simulate_steps(
    layers: Sequence[TwinLayer],
    *,
    ranks: int,
    seconds_of: Callable[[float], float],
    bucket_cap_mb: float | None,
    scale: float | None,
    steps: int,
) -> list[Step]:
    """The steps of a simulation after its warm-up.

    Args:
        layers: in the order of the forward.
        ranks: number of simulated ranks, 2 or more.
        seconds_of: of an all-reduce of so many bytes.
        bucket_cap_mb: of DDP; None = torch's own.
        scale: seconds of this machine for each emulated one; None = a virtual clock.
        steps: number of steps that are returned.

    Raises:
        ProcessGroupError: this process has a process group already.
    """
    if dist.is_initialized():
        raise ProcessGroupError(
            "this process has a process group (torch.distributed is initialised), and the simulation needs one of its own: call it before "
            "init_process_group, after destroy_process_group, or in a process of its own"
        )
    clock: Any = VirtualClock(seconds_of) if scale is None else RealClock(seconds_of, scale)
    with process_group(ranks, 0), warnings.catch_warnings(), without_gc():
        warnings.simplefilter("ignore")
        twin = _DdpSimulator(layers, clock, bucket_cap_mb)
        try:
            simulated = [twin.step() for _ in range(WARM_UP + steps)][WARM_UP:]
        finally:
            clock.close()
            del twin
            gc.collect(RECENT)  # a reducer in a cycle would keep the process group
    backward = statistics.median(step.backward for step in simulated)
    return [replace(step, backward=backward) for step in simulated]


class _DdpSimulator:
    """DDP around simulated layers, and the times of its buckets."""

    def __init__(self, layers: Sequence[TwinLayer], clock: Any, bucket_cap_mb: float | None) -> None:
        self._clock = clock
        self._ddp = DistributedDataParallel(nn.Sequential(*(EmulatedLayer(layer, clock) for layer in layers)), bucket_cap_mb=bucket_cap_mb)
        self._began = 0.0
        self._seen: list[TwinBucket] = []

        def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
            tensor = bucket.buffer()
            size = tensor.numel() * tensor.element_size()

            def seen(*moments: float) -> None:
                ready, start, end = (moment - self._began for moment in moments)
                self._seen.append(TwinBucket(size=size, ready=ready, start=start, end=end))

            return clock.send(size, tensor, seen)  # type: ignore[no-any-return]

        self._ddp.register_comm_hook(None, hook)

    def step(self) -> Step:
        """A step with the network, and one without for the time of computing alone: sleeping takes longer than its nominal time."""
        with self._ddp.no_sync():
            _, alone = self._once()
        self._seen = []
        forward, end = self._once()
        return Step(forward=forward, backward=alone, end=end, buckets=self._seen)

    def _once(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward with what follows it."""
        x = torch.zeros(1, requires_grad=True)
        begin = self._clock.now
        loss = self._ddp(x).sum()
        self._began = self._clock.now
        loss.backward()
        self._clock.settle()
        end = self._clock.now - self._began
        self._ddp.zero_grad()
        return self._began - begin, end


def median_step(steps: Sequence[Step]) -> Step:
    """The step of median length; the shorter of the middle two where their number is even."""
    length = statistics.median_low(step.forward + step.end for step in steps)
    return next(step for step in steps if step.forward + step.end == length)
