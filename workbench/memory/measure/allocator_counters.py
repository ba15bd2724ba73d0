"""Allocations: what the allocator itself counts in each step, against which a record of tensors is checked.

On a CPU it is the running sum of what torch's profiler notes at every request and every return. It sees what no operator shows, such as the
scratch of a convolution's kernel. It does not know what was taken before it began, when that is given back, and misses what other threads
give back (gloo's); so each step is counted from what lives when it begins, and the sum cannot drift from step to step. On CUDA it is the
allocator's own counters, which are exact: steps are counted from what lived when the first began. What cuBLAS keeps from one step to the
next is no tensor of the record, but is counted in this way.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Self

import torch

from workbench.memory.analysis.non_pytorch import NonPyTorchMemory
from workbench.traces.measure.profiler import without_kineto_lines

STEP = "workbench memory step"
"""Name under which the profiler finds the beginning of a step."""
BUSY = "a profiler was running already, and torch has only one: memory that kernels take for themselves is not counted"
BLIND = "this torch is built without Kineto: memory that kernels take for themselves is not counted"


class Allocations:
    """What the allocator takes while this is entered. Say where the steps begin, with `begin`; ask when it has been left.

    Attributes:
        peaks: step → the most that was held in it, in bytes above what was held when it began.
        kept: step → of what was held when it began, the bytes that came since the first began.
        trouble: why there are none, where there are none.
        reserved: the most that the allocator had from the driver; None on a CPU.
        retries: times that the allocator was at the limit, gave back what it kept for reuse and tried again.
        outside: what lay on the device beside it; None on a CPU.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.kept: list[int] | None = None
        self.trouble: str | None = None
        self.reserved: int | None = None
        self.retries = 0
        self.outside: NonPyTorchMemory | None = None

    def begin(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


def allocations(device: torch.device) -> Allocations:
    return OnDevice(device) if device.type == "cuda" else OnHost()


class OnHost(Allocations):
    """By torch's profiler."""

    def __init__(self) -> None:
        super().__init__()
        self._profile: Any = None

    def begin(self) -> None:
        with torch.autograd.profiler.record_function(STEP):
            pass

    def __enter__(self) -> Self:
        autograd: Any = torch.autograd
        if autograd._profiler_enabled():
            self.trouble = BUSY
        elif not autograd.kineto_available():
            self.trouble = BLIND
        else:
            self._profile = autograd.profiler.profile(use_kineto=True, profile_memory=True)
            with without_kineto_lines():
                self._profile.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is None:
            return
        with without_kineto_lines():
            self._profile.__exit__(None, None, None)
        events = self._profile.kineto_results.events()
        starts = sorted(event.start_ns() for event in events if event.name() == STEP)
        taken = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]" and _on_host(event))
        self.peaks = peaks_of(taken, starts)


def _on_host(event: Any) -> bool:
    return str(event.device_type()).endswith("CPU")


def peaks_of(taken: Sequence[tuple[int, int]], starts: Sequence[int]) -> list[int]:
    """The most that was held in each step, above what was held when it began.

    Args:
        taken: (time, bytes) of every request, and of every return with negative bytes, by time.
        starts: time at which each step begins, rising.

    >>> peaks_of([(1, 8), (3, 4), (4, -4), (6, 2)], starts=[2, 5])
    [4, 2]
    """
    held, peaks, floor = 0, [0] * len(starts), 0
    step = -1
    for time, size in taken:
        while step + 1 < len(starts) and time >= starts[step + 1]:
            step, floor = step + 1, held
        held += size
        if step >= 0:
            peaks[step] = max(peaks[step], held - floor)
    return peaks


class OnDevice(Allocations):
    """By the counters of CUDA's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._floors: list[int] = []
        self._before = 0
        self.reserved = 0

    def begin(self) -> None:
        self._close()
        torch.cuda.synchronize(self._device)
        if not self._floors and (clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)):
            clear()  # or what cuBLAS keeps since before would be in no peak
        torch.cuda.reset_peak_memory_stats(self._device)
        self._floors.append(torch.cuda.memory_allocated(self._device))
        self.kept = [floor - self._floors[0] for floor in self._floors]

    def _close(self) -> None:
        self.reserved = max(self.reserved or 0, torch.cuda.max_memory_reserved(self._device))
        if self._floors:
            self.peaks.append(torch.cuda.max_memory_allocated(self._device) - self._floors[-1])

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._retries()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # after an error of the device nothing can be asked, and that error is the one to see
            torch.cuda.synchronize(self._device)
            self._close()
            self.retries = self._retries() - self._before
            free, total = torch.cuda.mem_get_info(self._device)
            beside = max(0, total - free - torch.cuda.memory_reserved(self._device))
            source = "measured: what the driver counts beyond the allocator's segments, other processes on the device included"
            self.outside = NonPyTorchMemory(low=beside, mid=beside, high=beside, source=source)

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
