"""Measures what reading a trace costs in CPU time, wall time and memory, beside torch-tb-profiler and HolisticTraceAnalysis.

    python benchmarks/traces.py [--sizes 1 15 150] [--rounds 3] [--hta /path/of/a/python/that/has/it]

A file is read and the exclusive breakdown (ours), the overview (torch-tb-profiler 0.4.3) or the temporal breakdown (HTA) is made of it,
each in a process of its own, in turns; counting begins when its modules are loaded. "workbench, cached" does the same with what an
earlier load has kept beside the file. One file is real, from torch.profiler on this
CPU; the others are synthetic, in the format of a CUDA training with two ranks. HTA cannot read files of a CPU.
"""

import argparse
import datetime
import gzip
import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPERATORS = 400
"""Operators of a step of the files that are made; each is 7 events."""


def event(name: str, category: str, start: float, length: float, lane: int, args: str) -> str:
    """As Kineto lays it out."""
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {0 if lane < 100 else 4321}, "tid": {lane},\n'
        f'    "ts": {start:.3f}, "dur": {length:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def step(number: int, at: float) -> Iterator[str]:
    """The events of one training step, which begins at some microseconds."""
    yield event(f"ProfilerStep#{number}", "user_annotation", at, 20_000, 4321, f'"External id": {number}, "Ev Idx": 0')
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    yield event(name, "user_annotation", at + 5, 900, 4321, '"External id": 1, "Ev Idx": 1')
    for i in range(OPERATORS):
        key, start = number * 10 * OPERATORS + i, at + 1000 + 40 * i
        dims = f'"External id": {key}, "Record function id": 0, "Input Dims": [[32, {i}, 64], [64, 64], []], "Ev Idx": {key}'
        yield event("aten::linear", "cpu_op", start, 30, 4321, dims)
        yield event("aten::addmm", "cpu_op", start + 5, 20, 4321, dims)
        link = f'"External id": {key}, "cbid": 211, "correlation": {key}'
        yield event("cudaLaunchKernel", "cuda_runtime", start + 8, 6, 4321, link)
        yield f'  {{\n    "ph": "s", "id": {key}, "pid": 4321, "tid": 4321, "ts": {start + 8:.3f},\n    "cat": "ac2g", "name": "ac2g"\n  }}'
        work = (
            f'"External id": {key}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {key}, "registers per thread": 96'
        )
        work += ', "shared memory": 0, "blocks per SM": 9.5, "warps per SM": 151.7, "grid": [1024, 1, 1], "block": [512, 1, 1]'
        yield event(f"ampere_sgemm_128x{32 * (i % 4)}_tn", "kernel", start + 60, 25, 7, work)
        yield f'  {{\n    "ph": "f", "id": {key}, "pid": 0, "tid": 7, "ts": {start + 60:.3f},\n    "cat": "ac2g", "name": "ac2g"\n  }}'
        if i % 20 == 0:
            key += 5 * OPERATORS
            link = f'"External id": {key}, "cbid": 430, "correlation": {key}'
            yield event("cudaLaunchKernelExC", "cuda_runtime", start + 20, 5, 4321, link)
            told = f'"External id": {key}, "device": 0, "stream": 40, "correlation": {key}, "Collective name": "allreduce"'
            told += ', "In msg nelems": 6637568, "Out msg nelems": 6637568, "Group size": 2, "dtype": "Float", "Process Group Name": "0"'
            yield event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", start + 70, 300, 40, told)


def made(path: Path, megabytes: int) -> Path:
    """A file of about so many MB."""
    head = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000, "computeMajor": 8, "computeMinor": 0}
        ],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    with path.open("w") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        number, comma = 0, ""
        while file.tell() < megabytes * 1e6:
            for one in step(number, 1000.0 + 20_000 * number):
                file.write(comma + one)
                comma = ",\n"
            number += 1
        file.write(f'\n  ],\n  "traceName": "{path}"\n}}')
    return path


def real(path: Path) -> Path:
    """What torch.profiler writes of 12 steps of a small net on this CPU."""
    import torch

    import workbench as wb

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)])
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    trace = wb.trace(train, [torch.ones(16, 64)] * 8, steps=12, into=path.parent / "real")
    path.write_bytes(gzip.decompress(trace.path.read_bytes()))
    return path


# What is judged: each loads its modules, then gives what to call.


def ours() -> Any:
    """The breakdown."""
    import workbench as wb

    load = wb.Trace.load
    return lambda path: f"{load(path).breakdown().mean() * 1e3:.2f} ms a step"


def cached() -> Any:
    """The breakdown, from what was kept when the file was loaded before."""
    import workbench as wb

    load = wb.Trace.load
    return lambda path: f"{load(path, cache=True).breakdown().mean() * 1e3:.2f} ms a step"


def tensorboard() -> Any:
    """What the plugin does before it shows its overview."""
    from torch_tb_profiler.profiler.data import RunProfileData

    def judge(path: str) -> str:
        found = RunProfileData.parse("worker0", None, path, tempfile.gettempdir())
        return f"{found.avg_costs.costs[-1] / 1e3:.2f} ms a step"

    return judge


def hta() -> Any:
    """The temporal breakdown of HolisticTraceAnalysis."""
    from hta.trace_analysis import TraceAnalysis

    def judge(path: str) -> str:
        found = TraceAnalysis(trace_files={0: path}).get_temporal_breakdown(visualize=False)
        return f"busy {float(found.loc[0, 'compute_time(us)']) / 1e3:.2f} ms of kernels"

    return judge


JUDGES = {"workbench": ours, "workbench, cached": cached, "torch-tb-profiler": tensorboard, "HolisticTraceAnalysis": hta}


def judged(name: str, path: str) -> dict[str, Any]:
    """In this process."""
    judge = JUDGES[name]()
    idle, cpu, wall = _peak(), time.process_time(), time.perf_counter()
    says = judge(path)
    return {"says": says, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "peak": _peak(), "idle": idle}


def _peak() -> float:
    """MB that this process had at most so far, by itself."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def ask(python: str, name: str, path: Path) -> dict[str, Any]:
    """In a process of its own."""
    done = subprocess.run([python, __file__, "--judge", name, str(path)], capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(path: Path, pythons: dict[str, str], rounds: int) -> None:
    """Rows of a table: each judge on a file, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    if "workbench, cached" in pythons:  # so that there is something kept
        ask(pythons["workbench, cached"], "workbench, cached", path)
    for _ in range(rounds):
        for name, python in pythons.items():
            if not (runs[name] and "error" in runs[name][-1]):
                runs[name].append(ask(python, name, path))
    base = runs["workbench"]
    size = f"{path.stem}, {path.stat().st_size / 1e6:.0f} MB"
    for name, found in runs.items():
        if "error" in found[-1]:
            print(f"| {size} | {name} | {found[-1]['error'][:90]} | | | | | |")
            continue
        cpu, wall, peak = (statistics.median(one[key] for one in found) for key in ("cpu", "wall", "peak"))
        ratios = [statistics.median(a[key] / b[key] for a, b in zip(found, base, strict=True)) for key in ("cpu", "wall", "peak")]
        times = " / ".join(f"{ratio:.2g} ×" for ratio in ratios)
        print(f"| {size} | {name} | {cpu:.2f} s | {wall:.2f} s | {peak:.0f} MB | {times} | {found[0]['says']} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 15, 150])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hta", help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--only", nargs="*", choices=list(JUDGES), default=list(JUDGES))
    parser.add_argument("--judge", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.judge:
        print(json.dumps(judged(*given.judge)))
        return
    pythons = dict.fromkeys(("workbench", "workbench, cached", "torch-tb-profiler"), sys.executable)
    if given.hta:
        pythons["HolisticTraceAnalysis"] = given.hta
    pythons = {name: python for name, python in pythons.items() if name in given.only or name == "workbench"}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "msgspec", "torch-tb-profiler"))
    print(f"{datetime.date.today()}, {platform.platform()}, Python {platform.python_version()}, {versions}; rounds: {given.rounds}\n")
    print("| file | read by | CPU | wall | peak memory | CPU / wall / peak over workbench's | result |\n|---|---|---|---|---|---|---|")
    folder = Path(tempfile.mkdtemp(prefix="traces-"))
    try:
        compare(real(folder / "real.json"), pythons, given.rounds)
        for size in given.sizes:
            compare(path := made(folder / f"made{size}.json", size), pythons, given.rounds)
            path.unlink()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
