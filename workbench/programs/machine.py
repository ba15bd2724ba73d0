"""Finds out what needs torch: GPUs, speeds, disks, and whether ranks reach each other; prints JSON: `python -m workbench.programs.machine`.

Options: `fresh` measures all speeds anew, not only what is missing on file; `links` also those between two GPUs.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from workbench.core.machine_speeds import MachineSpeeds, Speed
from workbench.harness.measure_speeds import GLOO, GPU, HOST, MESSAGE_BYTES, NCCL, machine_speeds
from workbench.harness.measure_speeds import MEASURES as HERE

DISK_BYTES = 2**25
"""Bytes that are written to try a disk."""


def facts(*options: str) -> dict[str, Any]:
    gpus, error = gpus_seen()
    names = HOST + GLOO * dist.is_gloo_available() + GPU * bool(gpus) + NCCL * ("links" in options and len(gpus) > 1)
    speeds = machine_speeds(names, fresh="fresh" in options, measures={**HERE, NCCL: nccl_speeds})
    found: dict[str, Any] = {
        "gpus": gpus,
        "gpu_error": error,
        "speeds": speeds.to_json(),
        "gloo": gloo_answer(speeds),
        "disk": {str(folder): rate for folder in {Path.cwd(), Path(tempfile.gettempdir())} if (rate := write_rate(folder))},
    }
    return found | ({"nccl": nccl_answer()} if gpus and dist.is_nccl_available() else {})


def gpus_seen() -> tuple[list[dict[str, Any]], str]:
    """The GPUs that torch can use, and why it cannot use them."""
    try:
        if not torch.cuda.is_available():
            return [], ""
        about = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{"name": gpu.name, "memory": gpu.total_memory, "capability": [gpu.major, gpu.minor]} for gpu in about], ""
    except RuntimeError as error:
        return [], str(error).partition("\n")[0][:200]


def gloo_answer(speeds: MachineSpeeds) -> dict[str, str]:
    """Could two ranks reduce something by gloo? The speeds tell."""
    if not dist.is_gloo_available():
        return {"here": "not built into torch", "trouble": "several ranks on CPUs need it, and so does the workbench to coordinate ranks"}
    if "gloo" in speeds.speeds:
        return {"here": "works"}
    return {"trouble": "; ".join(note for note in speeds.notes if note.startswith("gloo")) or "two ranks do not reach each other"}


def nccl_answer() -> dict[str, str]:
    """Can NCCL reduce something on the first GPU?"""
    try:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        try:
            value = torch.ones(1, device="cuda")
            dist.all_reduce(value)
            torch.cuda.synchronize()
        finally:
            dist.destroy_process_group()
    except Exception as error:  # whatever a broken installation raises
        return {"trouble": f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.160}"}
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"here": f"works with one rank, version {version}"}


def nccl_speeds() -> Mapping[str, Speed]:
    """Latency and rate of reductions over two GPUs, by a launch of two ranks."""
    from workbench.cluster.api import measure_collectives

    with tempfile.TemporaryDirectory(prefix="workbench-links-") as folder:
        links = measure_collectives(2, sizes=[8, MESSAGE_BYTES], kinds=["all_reduce"], device="cuda", budget_s=1.0, runs_dir=folder)
    small, large = links.points
    return {"nccl": Speed.of(small.seconds), "nccl_rate": Speed.of([large.size / seconds for seconds in large.seconds])}


def write_rate(folder: Path) -> float | None:
    """Bytes per second of a file that is written to its disk; None if it cannot be."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            file.write(os.urandom(2**20) * (DISK_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
            return DISK_BYTES / (time.perf_counter() - begin)
    except OSError:
        return None


def main() -> None:
    """Print the facts as JSON, in the last line."""
    print(json.dumps(facts(*sys.argv[1:])), flush=True)


if __name__ == "__main__":
    main()
