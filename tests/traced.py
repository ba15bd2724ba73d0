"""Traces for tests: written by hand in the format that Kineto documents, and made by torch.profiler of small real steps.

No GPU was at hand: device events are written by hand, in the words that files of CUDA machines have.
"""

import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAIN, BACKWARD, DEVICE = 1, 2, 0
"""Lanes: the thread that trains, autograd's on a GPU, the device."""


def event(name: str, category: str, start: float, length: float, lane: int = MAIN, **args: Any) -> dict[str, Any]:
    """A complete event, in microseconds; what args has no Python name for goes by `args={...}`."""
    args |= args.pop("args", {})
    return {"ph": "X", "cat": category, "name": name, "pid": lane, "tid": lane, "ts": start, "dur": length, "args": args}


def step(number: int, start: float, length: float) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", "user_annotation", start, length)


def data(start: float, length: float) -> dict[str, Any]:
    return event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", start, length)


def op(name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return event(name, "cpu_op", start, length, **args)


def launched(name: str, at: float, start: float, length: float, number: int, category: str = "kernel", **args: Any) -> list[dict[str, Any]]:
    """A call that launches at `at`, and the work that it launches."""
    return [
        event("cudaLaunchKernel", "cuda_runtime", at, 2, correlation=number, args={"External id": number}),
        event(name, category, start, length, DEVICE, correlation=number, stream=7, args={"External id": number, **args}),
    ]


def write(path: Path, events: Sequence[Any], **header: Any) -> Path:
    """As Kineto does: the events among what is said of the file; packed if its name says so."""
    text = json.dumps({"schemaVersion": 1, **header, "traceEvents": list(events), "traceName": str(path)}).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def on_cpu() -> list[dict[str, Any]]:
    """Two steps of 100 µs: 30 of loader (with an operator inside), 40 of operators, 5 of gloo that nothing hides, 25 of Python."""
    found = []
    for number, at in ((5, 0), (6, 100)):
        found += [
            step(number, at, 100),
            data(at, 30),
            op("aten::stack", at + 10, 10),
            op("aten::linear", at + 40, 20, args={"Input Dims": [[32, 8], [8, 8]]}),
            op("aten::addmm", at + 45, 10, args={"Input Dims": [[8], [32, 8], [8, 8]]}),
            event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", at + 60, 10),
            event("gloo:all_reduce", "user_annotation", at + 65, 10, lane=9),
            event("Optimizer.step#SGD.step", "user_annotation", at + 80, 10),
        ]
    return found


def on_device(new: bool = True) -> list[dict[str, Any]]:
    """Three steps of 100 µs whose device work ends 20 µs after the mark.

    Of each: 40 µs of a kernel, 20 µs of NCCL of which the kernel hides 10, a copy of 10 to the device, a memset of 5, the launches, and
    nothing else; what is between belongs to the host while it launches, else it is idle.

    Args:
        new: with the names and arguments of torch 2.1 and later; else with the older names.
    """
    kernel = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        if new
        else "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)"
    )
    told = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2, "dtype": "Float"} if new else {}
    found = []
    for number, at in ((3, 0), (4, 100), (5, 200)):
        found += [
            step(number, at, 100),
            event("## backward ##", "gpu_user_annotation", at + 20, 90, DEVICE),
            *launched("Memcpy HtoD (Pinned -> Device)", at + 10, at + 20, 10, 10 * number, "gpu_memcpy", bytes=4096),
            *launched("Memset (Device)", at + 12, at + 30, 5, 10 * number + 1, "gpu_memset"),
            op("aten::mm", at + 14, 10, args={"External id": 10 * number + 2}),
            *launched("sgemm_128x64", at + 15, at + 50, 40, 10 * number + 2),
            *launched(kernel, at + 30, at + 80, 20, 10 * number + 3, **told),
            *launched("multi_tensor_apply_kernel", at + 40, at + 110, 10, 10 * number + 4),
        ]
    return found


def profiled(path: Path, *, steps: int = 3, wait: float = 0.0, sleep: float = 0.0, marks: bool = True) -> Path:
    """A trace that torch.profiler makes of small real steps on this CPU.

    Args:
        path: where it goes.
        steps: how many are in it.
        wait: seconds that the loader takes for each sample.
        sleep: seconds asleep after each step.
        marks: with a schedule; else without, and without marks of steps.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule
    from torch.utils.data import DataLoader, Dataset

    from workbench.traces.measure.profiler import without_kineto_lines

    class Slow(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4 * (steps + 2)

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(wait)
            return torch.ones(8)

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = schedule(wait=1, warmup=1, active=steps, repeat=1) if marks else None
    with without_kineto_lines():
        with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
            for batch in DataLoader(Slow(), batch_size=4):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                time.sleep(sleep)
                profiler.step()
        profiler.export_chrome_trace(str(path))
    return path


def torn(path: Path, change: Callable[[bytes], bytes], events: Sequence[Any]) -> Path:
    """A file whose text was changed."""
    write(path, events)
    path.write_bytes(change(path.read_bytes()))
    return path
