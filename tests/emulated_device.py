"""An emulated GPU: works behind the host's back, in real time, under the names of torch that the library asks.

It has streams, a launch queue of bounded depth, events, copies from pageable and from page-locked memory, an allocator that runs out of
memory, collectives of several processes, and kernels for the profiler. Its tensors are in main memory; what they take is what a test says.
"""

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from tests.emulated_profiler import Record, profiler_of
from tests.emulated_ranks import POLL, Moment, Ranks, at, latest, plus

QUEUE_DEPTH = 1024
"""Kernels that may wait in a stream's queue before a launch blocks the host, as with CUDA."""
PIECES = 4
"""Kernels of one call, where each launch takes the host some time, are launched in so many groups."""
MIB = 2**20

USUAL_TO, REAL = Tensor.to, time.perf_counter
USUAL_FACTORIES = {name: getattr(torch, name) for name in ("zeros", "ones", "empty", "randn", "tensor")}


class Stream:
    """Kernels run one after another."""

    def __init__(self, device: "EmulatedDevice") -> None:
        self.device, self.done = device, at(0.0)
        """When the last one that was launched will have ended."""
        self.number = len(device.streams)
        self._queue: deque[tuple[Moment, int]] = deque()
        self._queued = 0

    def launch(self, seconds: float, kernels: int, depth: int) -> tuple[Moment, Moment]:
        """Queue kernels, and wait for room before. Returns when they start and end."""
        while self._queue:
            if not self.device.is_past(self._queue[0][0]):
                if self._queued + kernels <= depth:
                    break
                self.device.wait_until(self._queue[0][0])
            self._queued -= self._queue.popleft()[1]
        start = latest(self.done, at(time.perf_counter()))
        if (moment := self.device.known(start)) is not None:
            start = at(moment)
        self.done = plus(start, seconds)
        self._queue.append((self.done, kernels))
        self._queued += kernels
        return start, self.done

    def synchronize(self) -> None:
        with self.device.call("cudaStreamSynchronize"):
            self.device.wait_until(self.done)

    def wait_stream(self, other: "Stream") -> None:
        """Let what is queued from now on wait for what the other stream has queued."""
        self.done = latest(self.done, other.done)

    def wait_event(self, event: Any) -> None:
        self.done = latest(self.done, event.moment)

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.device.is_past(self.done)


class DeviceTensor(Tensor):
    """A tensor on the device."""

    device = property(lambda _: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None: ...


class PinnedTensor(Tensor):
    """A tensor in page-locked memory."""


class Work:
    """An asynchronous collective."""

    def __init__(self, device: "EmulatedDevice", end: Moment) -> None:
        self._device, self._end = device, end

    def wait(self, *_: object) -> bool:
        """Let the current stream wait for it."""
        stream = self._device.current
        stream.done = latest(stream.done, self._end)
        return True

    def is_completed(self) -> bool:
        return self._device.is_past(self._end)


class Memory:
    """The device's memory under a caching allocator.

    Blocks that were freed stay reserved; a request gets one of them if it is not much larger. Where no memory is left, the device is waited
    for and all that is cached goes back to it, as in PyTorch's allocator.
    """

    def __init__(self, device: "EmulatedDevice", total: int, malloc: float) -> None:
        self._device, self.total, self._malloc = device, total, malloc
        self.allocated = self.reserved = self.retries = self.ooms = 0
        self.peaks = [0, 0]
        self._cached: list[int] = []

    def allocate(self, size: int) -> int:
        """Bytes of the block that a request gets.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """
        block = -(-size // (2 * MIB)) * 2 * MIB
        fitting = [cached for cached in self._cached if block <= cached <= 1.25 * block]
        if fitting:
            block = min(fitting)
            self._cached.remove(block)
        else:
            if self.reserved + block > self.total and self._cached:
                self.retries += 1
                self.release()
            if self.reserved + block > self.total:
                self.ooms += 1
                free = (self.total - self.reserved) / 2**30
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total capacity of "
                    f"{self.total / 2**30:.2f} GiB of which {free:.2f} GiB is free."
                )
            with self._device.call("cudaMalloc"):
                time.sleep(self._malloc)
            self.reserved += block
        self.allocated += block
        self.peaks = [max(self.peaks[0], self.allocated), max(self.peaks[1], self.reserved)]
        return block

    def free(self, block: int) -> None:
        """Give a block back to the allocator."""
        self.allocated -= block
        self._cached.append(block)

    def release(self) -> None:
        """What `empty_cache` does: wait for the device, and free each cached block."""
        self._device.synchronize()
        with self._device.call("cudaFree"):
            time.sleep(self._malloc * len(self._cached))
        self.reserved -= sum(self._cached)
        self._cached.clear()

    def reset_peaks(self) -> None:
        self.peaks = [self.allocated, self.reserved]

    def stats(self) -> dict[str, int]:
        """Those of `torch.cuda.memory_stats` that are asked for."""
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peaks[0],
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peaks[1],
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }


class EmulatedDevice:
    """The device, and what torch says of it."""

    def __init__(
        self,
        *,
        depth: int = QUEUE_DEPTH,
        pageable: float = 6e9,
        pinned: float = 5e10,
        launch: float = 0.0,
        network: float = 1e10,
        memory: int = 80 * 10**9,
        malloc: float = 1e-3,
        polls: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """An idle device.

        Args:
            depth: of a stream's queue, in kernels.
            pageable: bytes per second of copies from memory that is not page-locked.
            pinned: bytes per second of those from page-locked memory.
            launch: seconds of the host per kernel.
            network: bytes per second of a collective.
            memory: bytes.
            malloc: seconds of `cudaMalloc` and of `cudaFree`.
            polls: does a thread that waits for the device keep its core, as with CUDA unless `cudaDeviceScheduleBlockingSync` is set?
            ranks: the processes that take part in collectives.
        """
        self.depth, self.pageable, self.pinned, self.launch, self.network = depth, pageable, pinned, launch, network
        self.polls, self.ranks = polls, ranks or Ranks()
        self.streams: list[Stream] = []
        self.default = self.current = self.new_stream()
        self._communicates = self.new_stream()
        self.memory = Memory(self, memory, malloc)
        self.records: list[Record] | None = None
        """What a profiler records; None while none runs."""
        self.clocks: list[tuple[float, float]] = []
        """Moments on the real clock and on the program's, which may be another one."""
        self._correlation = 0

    # Time

    def wait_until(self, moment: Moment) -> None:
        """Let the host sleep until then."""
        while (end := self.known(moment)) is None:
            with self.ranks.not_counted():
                time.sleep(POLL)
        if (left := end - time.perf_counter()) > 0 and not self.polls:
            time.sleep(left)
        while time.perf_counter() < end:
            sum(range(200))

    def known(self, moment: Moment) -> float | None:
        """As `Ranks.known`. To find out what other ranks have launched takes a program no time."""
        if moment.keys() <= {-1}:
            return self.ranks.known(moment)
        with self.ranks.not_counted():
            return self.ranks.known(moment)

    def is_past(self, moment: Moment) -> bool:
        end = self.known(moment)
        return end is not None and end <= time.perf_counter()

    def compare_clocks(self) -> float:
        """The time; beside it a profiler has that of its own clock."""
        now = time.perf_counter()
        if self.records is not None:
            self.clocks.append((REAL(), now))
        return now

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[int]:
        """A call of the runtime, in the trace. Gives its correlation."""
        self._correlation += 1
        correlation = self._correlation
        start = self.compare_clocks()
        yield correlation
        end = self.compare_clocks()
        if self.records is not None:
            self.records.append(Record(name=name, category="cuda_runtime", start=at(start), end=at(end), correlation=correlation))

    def _work(self, stream: Stream, seconds: float, kernels: int, call: str, name: str, category: str = "kernel") -> None:
        with self.call(call) as correlation:
            time.sleep(self.launch * kernels) if self.launch else None
            start, end = stream.launch(seconds, kernels, self.depth)
        if self.records is not None:
            number = stream.number
            self.records.append(Record(name=name, category=category, start=start, end=end, stream=number, correlation=correlation))

    # What programs do

    def compute(self, seconds: float, kernels: int = 1, stream: Stream | None = None) -> None:
        """Launch kernels that take so long together."""
        groups = min(kernels, PIECES) if self.launch or self.records is not None else 1
        for group in range(groups):
            count = kernels * (group + 1) // groups - kernels * group // groups
            self._work(stream or self.current, seconds * count / kernels, count, "cudaLaunchKernel", "gemm")

    def copy(self, size: int, *, pinned: bool = False, stream: Stream | None = None) -> None:
        """A copy to the device: from pageable memory the host waits for its end, behind all that was queued."""
        name = f"Memcpy HtoD ({'Pinned' if pinned else 'Pageable'} -> Device)"
        to = stream or self.current
        self._work(to, size / (self.pinned if pinned else self.pageable), 1, "cudaMemcpyAsync", name, "gpu_memcpy")
        if not pinned:
            to.synchronize()

    def item(self) -> None:
        """What `loss.item()` does: wait for all that was queued in the current stream."""
        self._work(self.current, 0.0, 1, "cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", "gpu_memcpy")
        self.current.synchronize()

    def all_reduce(self, tensor: Tensor, *_: object, async_op: bool = False, **__: object) -> Work | None:
        """A collective on a stream of its own, behind what the current one has queued; no host waits for it."""
        stream = self._communicates
        stream.wait_stream(self.current)
        with self.call("cudaLaunchKernel") as correlation:
            ready, _ = stream.launch(0.0, 1, self.depth)
            number = self.ranks.launch(ready, tensor.nbytes / self.network)
            stream.done = {number: 0.0}
        if self.records is not None:
            record = Record(
                name="ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                category="kernel",
                start=ready,
                end=stream.done,
                stream=stream.number,
                correlation=correlation,
            )
            self.records.append(record)
        work = Work(self, stream.done)
        if async_op:
            return work
        work.wait()
        return None

    def new_stream(self, *_: object, **__: object) -> Stream:
        """A side stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Inside, it is the current stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *_: object) -> None:
        """Wait for all streams."""
        with self.call("cudaDeviceSynchronize"):
            for stream in self.streams:
                self.wait_until(stream.done)

    # What torch says

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Let torch speak of this device."""
        device, process = self, os.getpid()

        class Event:
            """A real one takes the host a microsecond; that this one takes more does not count."""

            def __init__(self, **_: object) -> None:
                self.moment: Moment = at(0.0)

            def record(self, stream: Any = None) -> None:
                now = time.perf_counter()
                with device.ranks.not_counted():
                    self.moment = latest(at(now), (stream or device.current).done)

            def query(self) -> bool:
                with device.ranks.not_counted():
                    return device.is_past(self.moment)

            def synchronize(self) -> None:
                device.wait_until(self.moment)

            def elapsed_time(self, end: "Event") -> float:
                with device.ranks.not_counted():
                    first, last = (device.ranks.known(event.moment) for event in (self, end))
                if first is None or last is None:
                    raise RuntimeError("Both events must be completed before calculating elapsed time.")
                return 1e3 * (last - first)

        memory = self.memory
        names: dict[Any, dict[str, Any]] = {
            torch.cuda: {
                "Event": Event,
                "Stream": self.new_stream,
                "stream": self.on,
                "synchronize": self.synchronize,
                "current_stream": lambda *_: self.current,
                "default_stream": lambda *_: self.default,
                "is_available": lambda: True,
                "is_initialized": lambda: True,
                "is_current_stream_capturing": lambda: False,
                "device_count": lambda: 1,
                "current_device": lambda: 0,
                "set_device": lambda *_: None,
                "_is_in_bad_fork": lambda: os.getpid() != process,
                "default_generators": (torch.Generator(),),
                "is_bf16_supported": lambda *_, **__: True,
                "memory_allocated": lambda *_: memory.allocated,
                "memory_reserved": lambda *_: memory.reserved,
                "max_memory_allocated": lambda *_: memory.peaks[0],
                "max_memory_reserved": lambda *_: memory.peaks[1],
                "memory_stats": lambda *_: memory.stats(),
                "mem_get_info": lambda *_: (memory.total - memory.reserved, memory.total),
                "empty_cache": memory.release,
                "reset_peak_memory_stats": lambda *_: memory.reset_peaks(),
                "get_device_name": lambda *_: "an emulated GPU",
                "get_device_capability": lambda *_: (9, 0),
                "get_device_properties": lambda *_: SimpleNamespace(name="an emulated GPU", major=9, minor=0, total_memory=memory.total),
            },
            torch.accelerator: {
                "is_available": lambda: True,
                "current_accelerator": lambda *_, **__: torch.device("cuda"),
                "current_device_index": lambda: 0,
                "set_device_index": lambda *_: None,
            },
            Tensor: {
                "to": self._moved(USUAL_TO),
                "pin_memory": lambda tensor, *_: tensor.detach().clone().as_subclass(PinnedTensor),
                "is_pinned": lambda tensor, *_: isinstance(tensor, PinnedTensor),
            },
            torch.autograd.profiler: {"profile": profiler_of(self)},
            torch: {name: _made(usual) for name, usual in USUAL_FACTORIES.items()},
        }
        for owner, values in names.items():
            for name, value in values.items():
                monkeypatch.setattr(owner, name, value, raising=owner is not torch.accelerator)
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
        if self.ranks.world_size > 1:
            _install_collectives(self, monkeypatch)
        return self

    def _moved(self, usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def to(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            place = options.get("device", arguments[0] if arguments else None)
            on_device = str(place).startswith("cuda")
            if isinstance(tensor, DeviceTensor) or not on_device:
                return tensor if on_device else usual(tensor.as_subclass(Tensor), *arguments, **options)
            self.copy(tensor.nbytes, pinned=isinstance(tensor, PinnedTensor) and bool(options.get("non_blocking")))
            return tensor.as_subclass(DeviceTensor)

        return to


@functools.cache
def _operator() -> Callable[[Tensor], None]:
    """An operator that says that a collective was launched, as those of process groups do."""
    library = torch.library.Library("emulated_c10d", "DEF")
    library.define("allreduce_(Tensor tensor) -> ()")
    library.impl("allreduce_", lambda tensor: None, "CompositeExplicitAutograd")
    call = torch.ops.emulated_c10d.allreduce_
    return lambda tensor, _library=library: call(tensor)  # which lives as long


def _made(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors, also on the device."""

    def make(*arguments: Any, **options: Any) -> Tensor:
        on_device = str(options.get("device")).startswith("cuda")
        tensor = usual(*arguments, **{**options, "device": "cpu"} if on_device else options)
        return tensor.as_subclass(DeviceTensor) if on_device else tensor

    return make


def _install_collectives(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `all_reduce` of tensors on the device be the device's. Operators of torch record what is launched."""
    import torch.distributed as dist

    usual, launched = dist.all_reduce, _operator()

    def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if not isinstance(tensor, DeviceTensor):
            return usual(tensor, *arguments, **options)
        launched(tensor.as_subclass(Tensor))
        return device.all_reduce(tensor, *arguments, **options)

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "all_reduce", all_reduce)
