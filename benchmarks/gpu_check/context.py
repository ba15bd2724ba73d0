"""Part `context`: memory of a process outside of the allocator, against what the library assumes; estimates do not touch the GPU.

A helper process (`python -m benchmarks.gpu_check.context`) does one thing after the other, and this one, which holds a context of its own,
sees by the driver's count how much less memory is free after each.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_check.machine import Bench
from benchmarks.gpu_check.report import Report
from workbench.core import units

PATIENCE = 90.0
"""Seconds that the helper may take for one thing."""
SETTLED = 4 * 2**20
"""Bytes by which the driver's count may differ when nothing was done: its own book-keeping."""


# The helper: it reads a stage's name from each line, does it, and answers with what it knows of itself


def _nothing() -> None:
    """Only torch is imported."""


def _context() -> None:
    torch.zeros(1, device="cuda")


def _matmul() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1024, 1024, device="cuda", dtype=dtype)
        (x @ x).sum().item()


def _convolution() -> None:
    layer = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    layer(torch.randn(8, 16, 64, 64, device="cuda")).sum().backward()


def _attention() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 8, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def _training() -> None:
    layers = [part for _ in range(4) for part in (torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512))]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(
                model(torch.randn(256, 512, device="cuda")), torch.zeros(256, dtype=torch.long, device="cuda")
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _estimate(**options: Any) -> Callable[[], None]:
    def estimate() -> None:
        import workbench as wb

        wb.estimate_memory(lambda: torch.nn.Linear(256, 256), (torch.randn(8, 256), torch.randn(8, 256)), **options)

    return estimate


def _conv_estimate() -> None:
    import workbench as wb

    wb.estimate_memory(
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10)),
        (torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)),
        device="H100",
        precision="amp_bf16",
    )


def _batch() -> None:
    import workbench as wb

    wb.max_micro_batch(wb.RunSpec(task="text-gpt", precision="amp_bf16"), "H100")


def _collectives() -> None:
    import workbench as wb

    wb.collectives(wb.RunSpec(task="text-gpt"), world_size=8, parallel="fsdp")


STAGES: dict[str, dict[str, Callable[[], object]]] = {
    "outside": {
        "torch is imported": _nothing,
        "the context": _context,
        "matrix products (cuBLAS)": _matmul,
        "a convolution (cuDNN)": _convolution,
        "attention": _attention,
        "a training under autocast": _training,
    },
    "estimates": {
        "torch.cuda.is_available()": torch.cuda.is_available,
        "estimate, AdamW": _estimate(device="H100"),
        "estimate, AdamW fused": _estimate(optimizer="adamw(fused=True)", device="H100"),
        "estimate, AdamW without foreach": _estimate(optimizer="adamw(foreach=False)", device="H100"),
        "estimate, SGD": _estimate(optimizer="sgd(momentum=0.9)", device="cuda"),
        "estimate, fp16 with a scaler": _estimate(precision="amp_fp16", device="H100"),
        "estimate, a convolution in bf16": _conv_estimate,
        "max_micro_batch": _batch,
        "collectives of 8 ranks": _collectives,
    },
}


def helper() -> None:
    """Do what the lines of standard input name."""
    cpu = "cpu" in sys.argv
    print("ready", flush=True)
    for line in sys.stdin:
        group, _, stage = line.strip().partition("/")
        error = ""
        try:
            if not cpu or group == "estimates":
                STAGES[group][stage]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        initialized = torch.cuda.is_initialized()
        reserved = torch.cuda.memory_reserved() if initialized else 0
        print("answer " + json.dumps({"initialized": initialized, "reserved": reserved, "error": error[:300]}), flush=True)


# The part


class Helper:
    """The process, and how much memory was free before it did anything."""

    def __init__(self, free: Callable[[], int], kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_check.context", kind]
        self.free, self.before = free, free()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def do(self, group: str, stage: str) -> tuple[int, dict[str, Any]]:
        """Bytes that the device has less than before, and the answer."""
        assert self.process.stdin
        print(f"{group}/{stage}", file=self.process.stdin, flush=True)
        answer = json.loads(self._answer("answer").removeprefix("answer "))
        return self.before - self.free(), answer

    def _answer(self, first: str) -> str:
        """Its next line that begins so; libraries may print others."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(first):
                return line.strip()
        raise RuntimeError(f"the helper process ended with {self.process.wait(PATIENCE)}")

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""

    def free() -> int:
        if not bench.gpu:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    if bench.gpu:
        torch.zeros(1, device="cuda")
    with report.guard("estimates"):
        _estimates(report, bench, free)
    with report.guard("outside"):
        _outside(report, bench, free)


def _estimates(report: Report, bench: Bench, free: Callable[[], int]) -> None:
    process = Helper(free, bench.kind)
    before = 0
    try:
        for stage in STAGES["estimates"]:
            taken, answer = process.do("estimates", stage)
            touched = answer["initialized"] or taken - before > SETTLED
            report.row(
                stage,
                not touched and not answer["error"] if bench.gpu else None,
                values={**answer, "taken": taken, "more": taken - before},
                result=answer["error"]
                or f"{units.bytes_(max(0, taken - before))} more of the device, CUDA {'' if answer['initialized'] else 'not '}initialised",
                expected="no context, not initialised",
            )
            before = taken
    finally:
        process.close()


def _outside(report: Report, bench: Bench, free: Callable[[], int]) -> None:
    from workbench.memory.analysis.non_pytorch import cublas_workspace, non_pytorch_memory

    name = torch.cuda.get_device_name() if bench.gpu else "cuda"
    assumed = non_pytorch_memory(name)
    process = Helper(free, bench.kind)
    reserved = 0
    try:
        for stage in STAGES["outside"]:
            taken, answer = process.do("outside", stage)
            beside, more = taken - answer["reserved"], answer["reserved"] - reserved
            reserved = answer["reserved"]
            cells = {"outside": units.bytes_(max(0, beside)), "reserved": f"{units.bytes_(reserved)} (+{units.bytes_(max(0, more))})"}
            report.row(stage, False if answer["error"] else None, values={**answer, "outside": beside}, **cells, result=answer["error"])
        report.row(
            "outside of the allocator, in the end",
            assumed.low <= beside <= assumed.high if bench.gpu else None,
            values={"measured": beside, "low": assumed.low, "mid": assumed.mid, "high": assumed.high, "source": assumed.source},
            outside=units.bytes_(max(0, beside)),
            result=f"assumed {units.bytes_(assumed.mid)} for {name}",
            expected=f"{units.bytes_(assumed.low)} … {units.bytes_(assumed.high)}",
        )
    finally:
        process.close()
    if bench.gpu:
        _workspace(report, cublas_workspace(torch.cuda.get_device_capability()))


def _workspace(report: Report, assumed: int) -> None:
    """What the first matrix product leaves in the allocator, its operands aside."""
    x = torch.randn(256, 256, device="cuda")
    y = torch.empty(256, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    report.row(
        "workspace of cuBLAS",
        kept == assumed,
        values={"measured": kept, "assumed": assumed},
        result=f"{units.bytes_(kept)}, assumed {units.bytes_(assumed)}",
        expected="equal",
    )


if __name__ == "__main__":
    helper()
