"""Chooses the micro-batch of a run with micro_batch="auto": the largest that is predicted to fit the free memory.

The prediction takes dry runs, which must not disturb the training process (it may have joined its peers, and holds a GPU), so rank 0 starts
another process for them. All ranks take the same number: what fits the rank with the least free memory.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import IterableDataset

from workbench.core import units
from workbench.core.checks import number_in_environment
from workbench.core.device import Device
from workbench.core.system_load import control_groups
from workbench.runs.entrypoints import CHOOSE_MICRO_BATCH, START
from workbench.runs.spec import RunSpec, SpecError
from workbench.train.ranks import Ranks

MAX_OF_STREAM = 1024
"""Largest micro-batch of a stream, whose number of samples is not known."""
_ERROR_LINES = 3
"""Last lines of a failed process's output that an error shows."""


def choose(spec: RunSpec, ranks: Ranks) -> int:
    """The micro-batch for a spec with micro_batch="auto"; rank 0 prints it, and why. A collective: all ranks must call it.

    It is the largest that is predicted to fit with a margin (`workbench.memory.analysis.fit.MARGIN`) and for which the dataset has one
    optimizer step.

    Args:
        spec: spec of the run.
        ranks: this process among the others, before the run has allocated anything on its device.

    Raises:
        SpecError: none could be chosen; the message says why.
    """
    free = [int(room) for room in ranks.share("room", str(available_memory(ranks.device)).encode())]
    answer = estimate_in_subprocess(spec, ranks.device, min(free)) if ranks.rank == 0 else {}
    choice = json.loads(ranks.share("micro-batch", json.dumps(answer).encode())[0])
    if "error" in choice:
        raise SpecError(f'micro_batch="auto": none could be chosen: {choice["error"]}. Give a number, such as micro_batch=32')
    if ranks.rank == 0:
        print(f'micro_batch="auto": {describe_choice(choice)}', flush=True)
    return int(choice["micro_batch"])


def describe_choice(choice: dict[str, Any]) -> str:
    """What was chosen, and why, from an answer of `workbench.programs.choose_micro_batch`."""
    size = choice["micro_batch"]
    need = f"predicted to take {units.bytes_(choice['bytes'])} of {units.bytes_(choice['limit'])} that may be used"
    if size < choice["most"]:
        return f"{size} samples, {need}; more would not fit"
    why = f"a stream gets no more than {size}" if choice["stream"] else "the dataset has no more for one optimizer step"
    return f"{size} samples, {need}; {why}"


def estimate_in_subprocess(spec: RunSpec, device: torch.device, room: int) -> dict[str, Any]:
    """The answer of `workbench.programs.choose_micro_batch`, run as a subprocess, or an "error"."""
    question = json.dumps({"spec": spec.to_json(), "device": described_device(device), "room": room})
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # it must not use the GPU's memory
    done = subprocess.run(
        [sys.executable, "-m", START, CHOOSE_MICRO_BATCH], input=question, env=environment, capture_output=True, text=True
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = " / ".join(done.stderr.strip().splitlines()[-_ERROR_LINES:])
        return {"error": f"the estimate broke down with exit code {done.returncode}: {last}"}
    return answer


def available_memory(device: torch.device) -> int:
    """Bytes that are free for a rank: on its GPU, beside the context; of main memory an equal share of each rank here.

    Raises:
        SpecError: this machine does not report it.
    """
    local_ranks = number_in_environment("LOCAL_WORLD_SIZE", 1, least=1)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) // math.ceil(local_ranks / torch.cuda.device_count())
    free_here = available_main_memory()
    if free_here is None:
        raise SpecError('micro_batch="auto": this machine does not tell how much memory is free; give a number, such as micro_batch=32')
    return free_here // local_ranks


def available_main_memory() -> int | None:
    """Bytes of main memory that are free on the machine, or in its control group if that is less; None where neither is known."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits.append(1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]))
    in_version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    for limit, used, detail in control_groups("memory", ("memory.max", "memory.current", "memory.stat"), in_version_1):
        with contextlib.suppress(ValueError):
            figures = {name: int(value) for name, value in (line.split() for line in detail.splitlines())}
            cache = figures.get("total_inactive_file", figures.get("inactive_file", 0))  # given back when it is needed
            limits.append(max(0, int(limit) - int(used) + cache))
    return min(limits, default=None)


def described_device(device: torch.device) -> str | dict[str, Any]:
    """The device whose memory to predict: "cpu", or the fields of a Device, with what the GPU itself says before what the table says."""
    if device.type == "cpu":
        return "cpu"
    gpu = torch.cuda.get_device_properties(device)
    known = Device.known(gpu.name) or Device(
        name=gpu.name, memory=0, bandwidth=0.0, flops_per_sec={}, source="torch, which asked its driver"
    )
    capability = None if torch.version.hip else (gpu.major, gpu.minor)  # AMD's numbers mean something else
    return asdict(replace(known, memory=gpu.total_memory, capability=capability))


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    """Inside, this process is a process group of its own."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def max_samples(dataset: Any, spec: RunSpec) -> tuple[int, bool]:
    """The largest micro-batch with which the dataset gives one optimizer step, and whether the dataset is a stream.

    Raises:
        SpecError: the dataset has too few samples.
    """
    if isinstance(dataset, IterableDataset):
        return MAX_OF_STREAM, True
    most = len(dataset) // spec.accumulation // spec.data_ranks
    if not most:
        raise SpecError(
            f"one optimizer step takes at least {spec.accumulation * spec.data_ranks} samples (accumulation={spec.accumulation} × "
            f"{spec.data_ranks} ranks), and the dataset has {len(dataset)}"
        )
    return most, False
