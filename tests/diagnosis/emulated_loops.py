"""Training loops on an emulated GPU: some with a planted cause, which can be taken away, others healthy.

The truth is the time from sync to sync.
"""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.emulated_device import MIB, QUEUE_DEPTH, DeviceTensor, EmulatedDevice, Ranks

COLUMNS = 1000
BUCKETS = 4
"""In which several ranks reduce gradients during backward."""
NETWORK = 1e8
"""Bytes per second."""
FORWARD = 1 / 3
"""Of the compute."""
FIRST_STEPS = 20
"""At most so many steps of a pass are taken before a loop is timed: by then workers read ahead."""
AMP, TF32 = 0.45, 0.6
"""Of the time of products of matrices in fp32."""
TENSOR_SECONDS, TENSOR_KERNELS = 2e-5, 10
"""Of an optimizer's loop over tensors: of the device per tensor, and kernels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training loop. Seconds."""

    name: str
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"compute-bound": ()})
    """Right verdicts, and how the cause of each may begin; () = any cause."""
    clean: Mapping[str, Any] = field(default_factory=dict)
    """Fields that take away what was planted; {} = the loop is healthy."""
    host: float = 0.0005
    """In which the host sleeps, per step."""
    python: float = 0.0
    """In which it computes, per step."""
    compute: float = 0.01
    """Of the device per step."""
    fixed: float = 0.0
    """Of `compute`: what does not depend on the batch."""
    kernels: int = 50
    launch: float = 0.0
    """Of the host per kernel."""
    depth: int = QUEUE_DEPTH
    item: int = 0
    """`loss.item()` at each so many steps."""
    items: int = 0
    """`.item()` so many times in each step, the host's work being spread between them."""
    samples: int = 8
    """In a batch."""
    loading: float = 0.0
    """To make a batch, asleep."""
    decoding: float = 0.0
    """To make a batch, computing."""
    workers: int | None = None
    """Of a DataLoader; None = the loader is no DataLoader."""
    steps_per_pass: int = 100
    start: float = 0.0
    """To start a pass over the loader."""
    save_every: int = 0
    save: float = 0.25
    """A checkpoint: waits for the device, then writes."""
    lengths: tuple[float, ...] = (1.0,)
    """Of successive steps, relative."""
    transfer: str = ""
    """How batches get to the device: "" (they are there), "pageable", "pinned" or "prefetched" (on a stream of their own)."""
    rate: float = 6e9
    """Bytes per second of copies from pageable memory."""
    tensors: int = 0
    """Of the optimizer."""
    foreach: bool = False
    accumulation: int = 1
    """The optimizer steps at each so many calls."""
    ranks: int = 1
    gradients: float = 0.0
    """To reduce them over the ranks."""
    slow_rank: Mapping[str, Any] = field(default_factory=dict)
    """Fields of rank 1 that differ."""
    memory: int = 80 * 2**10
    """MiB of the device."""
    activations: tuple[int, ...] = ()
    """MiB, of which each step gets a random block."""
    malloc: float = 1e-3
    polls: bool = False
    """Does the host compute while it waits for the device?"""

    @property
    def healthy(self) -> bool:
        return not self.clean

    @property
    def shortest(self) -> float:
        """What a step takes at least."""
        return max(self.compute, self.host + self.python, self.loading / (self.workers or 1) + self.decoding)

    def cleaned(self) -> "Case":
        """The loop without what was planted."""
        return replace(self, **self.clean)

    def right(self, verdict: str, cause: str) -> bool:
        """Is that the right verdict, with the right cause?"""
        causes = self.answers.get(verdict)
        return causes is not None and (not causes or cause.startswith(causes))

    def device(self, ranks: Ranks | None = None) -> EmulatedDevice:
        """On which it runs."""
        return EmulatedDevice(
            depth=self.depth,
            pageable=self.rate,
            launch=self.launch,
            memory=self.memory * MIB,
            malloc=self.malloc,
            network=NETWORK,
            polls=self.polls,
            ranks=ranks,
        )


INPUT, HOST = "input-bound", "host-bound"
HEALTHY = (
    Case(name="no item"),
    Case(name="item at each step", item=1, compute=0.02),
    Case(name="item at each 10th step", item=10),
    Case(name="item at each 50th step", item=50),
    Case(name="item at each 100th step", item=100),
    Case(name="deep queue", depth=10**6, item=100),
    Case(name="shallow queue", depth=60),
    Case(name="hidden loader", loading=0.006, item=25),
    Case(name="hidden workers", loading=0.012, workers=2, steps_per_pass=400, item=20),
    Case(name="hidden start of passes", steps_per_pass=40, start=0.12),
    Case(name="uneven lengths", lengths=(0.7, 1.0, 1.3, 0.8, 1.2), item=10),
    Case(name="long steps", compute=0.03, host=0.01, item=10),
    Case(name="prefetched copies", transfer="prefetched", item=10),
    Case(name="gradient accumulation", accumulation=4, tensors=100, foreach=True, item=20),
    Case(name="activations of many sizes", activations=(300, 500, 700, 900), memory=20 * 2**10, item=10),
    Case(name="two ranks, reductions hidden", ranks=2, gradients=0.004, item=10),
    Case(name="two ranks, item at each step", ranks=2, gradients=0.002, item=1, compute=0.02),
)
PLANTED = (
    Case(name="slow loader", answers={INPUT: ("loader",)}, decoding=0.02, item=10, clean={"decoding": 0.0}),
    Case(name="slow storage", answers={INPUT: ("storage",)}, loading=0.024, item=10, clean={"loading": 0.0}),
    Case(name="slow storage of a DataLoader", answers={INPUT: ("storage",)}, loading=0.02, workers=0, item=10, clean={"loading": 0.0}),
    Case(name="one worker too few", answers={INPUT: ("storage",)}, loading=0.02, workers=1, steps_per_pass=400, clean={"loading": 0.0}),
    Case(name="starts of passes", answers={INPUT: ()}, steps_per_pass=12, start=0.1, item=5, clean={"start": 0.0}),
    Case(name="Python works in the step", answers={HOST: ("python",)}, python=0.018, item=10, clean={"python": 0.0}),
    Case(name="host sleeps in the step", answers={HOST: ("sleeping or I/O",)}, host=0.02, item=10, clean={"host": 0.0005}),
    Case(
        name="many small kernels",
        answers={HOST: ("launches",)},
        fixed=0.004,
        compute=0.005,
        kernels=500,
        launch=2e-5,
        workers=0,
        clean={"launch": 0.0},
    ),
    Case(name="item in a loop", answers={HOST: ("syncs",)}, python=0.005, items=5, polls=True, clean={"items": 0}),
    Case(name="pageable copies", answers={"transfer-bound": ("pageable copy",)}, transfer="pageable", rate=4e6, workers=0, item=10,
         clean={"transfer": ""}),
    Case(name="optimizer with many tensors", answers={"optimizer-bound": ("many tensors",)}, tensors=400, item=10,
         clean={"foreach": True}),
    Case(name="checkpoints", answers={"stalled": ("checkpoint",)}, save_every=25, clean={"save_every": 0}),
    Case(
        name="allocator retries in most steps",
        answers={HOST: ("allocator retries",), "stalled": ("allocator retries",)},
        activations=(300, 500, 700, 900),
        memory=1000,
        malloc=0.006,
        clean={"memory": 20 * 2**10},
    ),
    Case(
        name="allocator retries now and then",
        answers={"stalled": ("allocator retries",)},
        activations=tuple(range(100, 900, 8)),
        memory=3000,
        malloc=0.008,
        clean={"memory": 200 * 2**10},
    ),
    Case(name="two ranks, reductions exposed", answers={"communication-bound": ("gradient volume",)}, ranks=2, gradients=0.03, item=10,
         clean={"gradients": 0.0}),
    Case(name="two ranks, one computes longer", answers={"straggler": ("slow rank 1: compute",)}, ranks=2, gradients=0.002, item=10,
         slow_rank={"compute": 0.02}, clean={"slow_rank": {}}),
    Case(name="two ranks, storage of one slow", answers={"straggler": ("slow rank 1: input",)}, ranks=2, gradients=0.002, item=10,
         slow_rank={"loading": 0.025}, clean={"slow_rank": {}}),
)  # fmt: skip
CASES = {case.name: case for case in (*HEALTHY, *PLANTED)}


def spin(seconds: float) -> None:
    """Keep Python busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(200))


class AdamW(torch.optim.Optimizer):
    """An optimizer that launches a few kernels for each tensor, or, with foreach or fused, few for all."""

    def __init__(self, weights: Iterable[nn.Parameter], device: EmulatedDevice, foreach: bool) -> None:
        super().__init__(weights, {"foreach": foreach, "fused": None})
        self.device = device

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        seconds = len(group["params"]) * TENSOR_SECONDS
        if group["fused"] or group["foreach"] or len(group["params"]) <= BUCKETS:
            self.device.compute((0.05 if group["fused"] else 0.1) * seconds, kernels=1 if group["fused"] else TENSOR_KERNELS)
            return
        for _ in range(TENSOR_KERNELS):
            self.device.compute(seconds / TENSOR_KERNELS, kernels=len(group["params"]))


LATE = 0.02
"""Seconds: who comes later than that for the next sample had nothing to do before, and did not wait for a core."""


class Samples(Dataset[Tensor]):
    """Samples that take time to make: of a worker, one comes at a fixed time after the one before, however late its process wakes up.

    The loop's own process sleeps by the loop's clock, which stands still while it waits for a core.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.ready = case, 0.0

    def __len__(self) -> int:
        return self.case.samples * self.case.steps_per_pass

    def __getitem__(self, index: int) -> Tensor:
        if self.case.loading:
            pause = self.case.loading / self.case.samples
            if self.case.workers:
                now = time.monotonic()
                self.ready = (self.ready if now - self.ready < LATE else now) + pause
                pause = max(0.0, self.ready - now)
            time.sleep(pause)
        return torch.zeros(COLUMNS)


class Batches:
    """A loader of its own kind."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return self.case.steps_per_pass

    def __iter__(self) -> Iterator[Tensor]:
        time.sleep(self.case.start)
        for _ in range(len(self)):
            time.sleep(self.case.loading)
            spin(self.case.decoding)
            batch = torch.zeros(self.case.samples, COLUMNS)
            yield batch.as_subclass(DeviceTensor) if not self.case.transfer else batch


class Loop:
    """The case on a device."""

    def __init__(self, case: Case, device: EmulatedDevice) -> None:
        if device.ranks.rank == 1:
            case = replace(case, **case.slow_rank)
        self.case, self.device, self.calls = case, device, 0
        self.model = nn.Module()
        size = round(case.gradients * device.network / BUCKETS / 4) or 2
        for i in range(BUCKETS if case.gradients else max(1, case.tensors)):
            self.model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(size).as_subclass(DeviceTensor)))
        self.optimizer = AdamW(self.model.parameters(), device, case.foreach)
        self.loader: Any = Batches(case)
        if case.workers is not None:
            self.loader = DataLoader(Samples(case), batch_size=case.samples, num_workers=case.workers)
        self.side = device.new_stream()
        self.take = self.step

    def step(self, batch: Tensor) -> None:
        case, device = self.case, self.device
        self.calls += 1
        block = device.memory.allocate(random.Random(self.calls).choice(case.activations) * MIB) if case.activations else 0
        self._transfer(batch)
        time.sleep(case.host)
        for _ in range(case.items):
            self._compute(batch, 1 / case.items)
            device.item()
            spin(case.python / case.items)
        if not case.items:
            spin(case.python)
            self._forward_and_backward(batch)
        if case.activations:
            device.memory.free(block)
        if self.calls % case.accumulation == 0:
            self.optimizer.step()
        if case.item and self.calls % case.item == 0:
            device.item()
        if case.save_every and self.calls % case.save_every == 0:
            self.save_checkpoint()

    def _transfer(self, batch: Tensor) -> None:
        if self.case.transfer == "prefetched":
            self.device.copy(batch.nbytes, pinned=True, stream=self.side)
            self.device.current.wait_stream(self.side)
        elif self.case.transfer:
            batch.to("cuda", non_blocking=True)

    def _compute(self, batch: Tensor, share: float) -> None:
        case = self.case
        seconds = case.fixed + (case.compute - case.fixed) * batch.shape[0] / case.samples
        seconds *= share * case.lengths[self.calls % len(case.lengths)]
        faster = AMP if torch.is_autocast_enabled("cuda") else TF32 if torch.backends.cuda.matmul.allow_tf32 else 1.0
        self.device.compute(seconds * faster, kernels=max(1, round(case.kernels * share)))

    def _forward_and_backward(self, batch: Tensor) -> None:
        if not self.case.gradients:
            self._compute(batch, 1.0)
            return
        self._compute(batch, FORWARD)
        works = []
        for weight in self.model.parameters():
            self._compute(batch, (1 - FORWARD) / BUCKETS)
            works.append(dist.all_reduce(weight.detach(), async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def save_checkpoint(self) -> None:
        self.device.item()
        time.sleep(self.case.save)

    def seconds_per_step(self, at_least: float = 1.5) -> float:
        """From sync to sync, over a whole number of passes that begin with a filled queue."""
        length = len(self.loader)
        first = min(FIRST_STEPS, length // 2)
        count, done, start = max(1, round(at_least / (length * CASES[self.case.name].shortest))) * length, 0, 0.0
        while True:
            for batch in self.loader:
                if done == first:
                    self._together()
                    start = time.perf_counter()
                if done == first + count:
                    self._together()
                    return (time.perf_counter() - start) / count
                self.take(batch)
                done += 1

    def with_parts(self, step: Callable[[Tensor], None], loader: Any) -> "Loop":
        """The same loop with another step and loader around it."""
        other = copy.copy(self)
        other.take, other.loader = step, loader
        return other

    def _together(self) -> None:
        self.device.synchronize()  # until the last collective has ended, the same moment on all ranks
        if self.device.ranks.world_size > 1:
            with self.device.ranks.not_counted():  # a rank that has slept through what others computed is behind them in real time
                dist.barrier()
