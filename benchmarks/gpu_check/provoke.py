"""Provokes one spelling of "out of memory" and prints type, text and the library's classification: `python -m …provoke NAME`.

Each takes a process of its own, since some fill the GPU's memory to the last MiB for a moment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

EXPANDABLE = "expandable segments"
if __name__ == "__main__" and EXPANDABLE in sys.argv:  # before torch reads it
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import torch  # noqa: E402

HUGE = 2**46
"""Bytes that no GPU and no page-locked memory has."""
BEYOND = 2**60
"""Bytes that no process can address: with overcommitment, less of main memory is granted."""
MIB = 2**20


def fill() -> list[torch.Tensor]:
    """Take all memory of the GPU: pieces of half the size whenever one cannot be had."""
    torch.zeros(1, device="cuda")
    held, (size, _) = [], torch.cuda.mem_get_info()
    while size >= MIB:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def _full(work: Callable[[], Any]) -> None:
    """Do something when no memory is left."""
    held = fill()
    work()
    torch.cuda.synchronize()
    del held


def _too_much() -> None:
    torch.empty(HUGE, dtype=torch.uint8, device="cuda")


def _no_more() -> None:
    _full(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))


def _limited() -> None:
    torch.cuda.set_per_process_memory_fraction(0.01)
    torch.empty(torch.cuda.mem_get_info()[1] // 2, dtype=torch.uint8, device="cuda")


def _second_process() -> None:
    """Another process makes its context, or its first tensor, on a full GPU."""
    held = fill()
    command = [sys.executable, "-m", "benchmarks.gpu_check.provoke", "the first tensor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    del held
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print(lines[-1] if lines else json.dumps({"error": f"no answer: {done.stderr.strip()[-300:]}"}))
    sys.exit()


def _first_tensor() -> None:
    torch.zeros(1, device="cuda")


def _matmul() -> None:
    x = torch.ones(512, 512, device="cuda")
    _full(lambda: torch.mm(x, x))


def _convolution() -> None:
    x, weight = torch.ones(4, 16, 64, 64, device="cuda"), torch.ones(16, 16, 3, 3, device="cuda")
    _full(lambda: torch.nn.functional.conv2d(x, weight))


def _solver() -> None:
    x = torch.eye(512, device="cuda")
    _full(lambda: torch.linalg.cholesky(x))


def _fourier() -> None:
    x = torch.ones(1 << 20, device="cuda", dtype=torch.complex64)
    _full(lambda: torch.fft.fft(x))


def _code() -> None:
    """Kernels whose code is loaded at their first use."""
    x = torch.ones(1024, device="cuda")
    _full(lambda: (x.erfinv_(), x.lgamma_(), x.digamma_(), x.cumsum_(0), x.sort()))


def _pinned() -> None:
    torch.empty(HUGE, dtype=torch.uint8, pin_memory=True)


def _host() -> None:
    torch.empty(BEYOND, dtype=torch.uint8)


def _reduction() -> None:
    """NCCL takes its buffers from the driver, not from the allocator."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(1 << 20, device="cuda")
    _full(lambda: dist.all_reduce(x))


SPELLINGS: dict[str, Callable[[], None]] = {
    "more than there is": _too_much,
    "no memory is left": _no_more,
    "a limit of PyTorch's own": _limited,
    EXPANDABLE: _no_more,
    "another process on a full GPU": _second_process,
    "cuBLAS on a full GPU": _matmul,
    "cuDNN on a full GPU": _convolution,
    "cuSOLVER on a full GPU": _solver,
    "cuFFT on a full GPU": _fourier,
    "kernels' code on a full GPU": _code,
    "NCCL on a full GPU": _reduction,
    "page-locked memory": _pinned,
    "main memory": _host,
}
ON_CPU = ("main memory",)
"""What can be provoked without a GPU."""


def classified(error: BaseException) -> dict[str, Any]:
    """What the library says of it."""
    from workbench.runs.errors import is_out_of_memory, symptom_of
    from workbench.runs.failure import describe
    from workbench.runs.out_of_memory import OutOfMemory

    message = describe(error)
    symptom, parsed = symptom_of(message), OutOfMemory.parse(message)
    answer = {"type": type(error).__name__, "message": message[:2000], "kind": symptom.kind if symptom else "", "parsed": str(parsed or "")}
    return answer | {"split": is_out_of_memory(error)}


def main(name: str) -> None:
    """Provoke, and print an object of JSON."""
    answer: dict[str, Any] = {"type": "", "message": ""}
    try:
        {**SPELLINGS, "the first tensor": _first_tensor}[name]()
    except Exception as error:
        answer = classified(error)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
