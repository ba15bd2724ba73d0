"""Writes a trace of a GPU that does not exist: a model of a host that launches and a device that computes, in the profiler's format.

Nothing here was recorded. Notebook 08 learns on it to read files of GPUs where there is none; times follow from the constants below.
"""

import json
from pathlib import Path
from typing import Any

HOST, DEVICE, STREAM = 1, 0, 7
LAUNCH = 5.0
"""Microseconds of cudaLaunchKernel on the host."""
OPERATOR = 11.0
"""Microseconds of the host per operator, the launch included."""
SHORTEST = 2.0
"""Microseconds of the shortest kernel."""
LAYERS = 6
GEMM = {"fp32": "ampere_sgemm_128x64_tn", "bf16": "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn"}
"""Names of kernels, as cuBLAS has them on an A100: the second one computes on tensor cores."""
PER_SAMPLE = {"fp32": 0.30, "bf16": 0.06}
"""Microseconds of a product of matrices for each sample of the batch."""
FORMATS = {"fp32": "float", "bf16": "c10::BFloat16"}


class _Model:
    """The time on the host, the time at which the device is free, and the events so far."""

    def __init__(self, batch: int, precision: str, pinned: bool) -> None:
        self.batch, self.precision, self.pinned = batch, precision, pinned
        self.now = self.free = 0.0
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def event(self, name: str, category: str, start: float, end: float, lane: int = HOST, **args: Any) -> None:
        thread = STREAM if lane == DEVICE else HOST
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": lane, "tid": thread, "ts": start, "dur": end - start, "args": args}
        )

    def launch(self, operator: str, kernel: str, seconds: float, blocks: float) -> None:
        """An operator on the host, and its kernel: behind all that was launched before."""
        self.number += 1
        start, called = self.now, self.now + (OPERATOR - LAUNCH) / 2
        self.now += OPERATOR
        types = [FORMATS[self.precision], FORMATS[self.precision]]
        self.event(operator, "cpu_op", start, self.now, **{"External id": self.number, "Input type": types})
        self.event("cudaLaunchKernel", "cuda_runtime", called, called + LAUNCH, correlation=self.number, **{"External id": self.number})
        begins = max(self.free, called + LAUNCH)
        self.free = begins + max(SHORTEST, seconds)
        about = {"correlation": self.number, "stream": STREAM, "device": 0, "External id": self.number}
        fill = {"blocks per SM": blocks, "est. achieved occupancy %": min(100.0, 25 * blocks)}
        self.event(kernel, "kernel", begins, self.free, DEVICE, **about, **fill)

    def product(self, operator: str) -> None:
        self.launch(operator, GEMM[self.precision], PER_SAMPLE[self.precision] * self.batch, self.batch / 64)

    def elementwise(self, operator: str) -> None:
        self.launch(operator, f"vectorized_elementwise_kernel<4, {operator}>", 0.02 * self.batch, self.batch / 16)

    def copy(self, name: str, size: float, per_microsecond: float, *, waits: bool) -> None:
        """A copy; the host goes on at once, or waits for its end."""
        self.number += 1
        begins = max(self.free, self.now + LAUNCH)
        self.free = begins + max(SHORTEST, size / per_microsecond)
        end = self.free if waits else self.now + LAUNCH
        self.event("cudaMemcpyAsync", "cuda_runtime", self.now, self.now + LAUNCH, correlation=self.number)
        if waits:
            self.event("cudaStreamSynchronize", "cuda_runtime", self.now + LAUNCH, end)
        self.now = end
        about = {"correlation": self.number, "stream": STREAM, "device": 0, "bytes": int(size)}
        self.event(name, "gpu_memcpy", begins, self.free, DEVICE, **about)

    def step(self, index: int, item: bool) -> None:
        start = self.now
        self.event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation", start, start + 15)
        self.now += 20
        memory, speed = ("Pinned", 20_000.0) if self.pinned else ("Pageable", 4_000.0)
        self.copy(f"Memcpy HtoD ({memory} -> Device)", 4096.0 * self.batch, speed, waits=not self.pinned)
        for _ in range(LAYERS):
            self.product("aten::addmm")
            self.elementwise("aten::gelu")
        self.elementwise("aten::log_softmax")
        for _ in range(LAYERS):
            self.elementwise("aten::gelu_backward")
            self.product("aten::mm")
            self.product("aten::mm")
        begun = self.now
        self.launch("aten::_foreach_add_", "multi_tensor_apply_kernel", 12.0, 4.0)
        self.event("Optimizer.step#SGD.step", "user_annotation", begun, self.now)
        if item:
            self.copy("Memcpy DtoH (Device -> Pageable)", 4.0, 4_000.0, waits=True)
        self.event(f"ProfilerStep#{index}", "user_annotation", start, self.now)


def write(path: str | Path, *, batch: int = 16, precision: str = "fp32", item: bool = True, pinned: bool = False, steps: int = 4) -> Path:
    """A file of some steps of an imagined network.

    Args:
        path: where it goes.
        batch: samples; what the device computes takes longer with more, what the host does takes as long.
        precision: "fp32" or "bf16".
        item: does each step end with `loss.item()`, which waits for the device?
        pinned: are batches in page-locked memory?
        steps: how many.
    """
    model = _Model(batch, precision, pinned)
    for index in range(steps):
        model.step(index, item)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = (
        ("process_name", HOST, HOST, "python"),
        ("thread_name", HOST, HOST, "thread 1 (python)"),
        ("process_name", DEVICE, STREAM, "GPU"),
    )
    names += (("thread_name", DEVICE, STREAM, f"stream {STREAM}"),)
    model.events += [{"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}} for what, pid, tid, name in names]
    device = {"id": 0, "name": "an imagined GPU", "computeMajor": 8, "computeMinor": 0, "numSms": 108}
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [device], "traceEvents": model.events}))
    return path
