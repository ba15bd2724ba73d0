"""Choosing: the micro-batch of a run that leaves it to the machine: the largest that is predicted to fit what is free there.

The prediction takes fake runs, which must not disturb the process that is to train (it may have joined its peers, and holds a GPU), so a
process of its own makes them, for rank 0. All ranks take the same number: what fits the rank with the least room.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import IterableDataset

from workbench.core import units
from workbench.core.device import Device
from workbench.core.system_load import control_groups
from workbench.runs.programs import CHOOSE_MICRO_BATCH
from workbench.runs.spec import RunSpec, SpecError
from workbench.train.ranks import Ranks

STREAM_MOST = 1024
"""Samples that are chosen at most where the dataset is a stream, which does not say how many it has."""
_LAST_LINES = 3
"""Of what a process that broke down has said."""


def choose(spec: RunSpec, ranks: Ranks) -> int:
    """The micro-batch for a spec that leaves it open; rank 0 prints it, and why. All ranks have to come here.

    It is the largest that is predicted to fit with a margin (`workbench.memory.analysis.fit.MARGIN`) and for which the dataset has one
    optimizer step.

    Args:
        spec: of the run.
        ranks: this process among the others, before anything of the run lies on its device.

    Raises:
        SpecError: none could be chosen; the message says why.
    """
    rooms = [int(room) for room in ranks.share("room", str(available_memory(ranks.device)).encode())]
    answer = ask(spec, ranks.device, min(rooms)) if ranks.rank == 0 else {}
    found = json.loads(ranks.share("micro-batch", json.dumps(answer).encode())[0])
    if "error" in found:
        raise SpecError(f'micro_batch="auto": none could be chosen: {found["error"]}. Give a number, such as micro_batch=32')
    if ranks.rank == 0:
        print(f'micro_batch="auto": {words(found)}', flush=True)
    return int(found["micro_batch"])


def words(found: dict[str, Any]) -> str:
    """What was chosen, and why; of an answer of `workbench.programs.choose_micro_batch`."""
    size = found["micro_batch"]
    need = f"predicted to take {units.bytes_(found['bytes'])} of {units.bytes_(found['limit'])} that may be used"
    if size < found["most"]:
        return f"{size} samples, {need}; more would not fit"
    why = f"a stream gets no more than {size}" if found["stream"] else "the dataset has no more for one optimizer step"
    return f"{size} samples, {need}; {why}"


def ask(spec: RunSpec, device: torch.device, room: int) -> dict[str, Any]:
    """What `workbench.programs.choose_micro_batch` finds in a process of its own, or an "error".

    Args:
        spec: of the run.
        device: of this rank.
        room: bytes that can be had there.
    """
    asked = json.dumps({"spec": spec.to_json(), "device": device_name(device), "room": room})
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # it must not take a part of the GPU's memory
    done = subprocess.run([sys.executable, "-m", CHOOSE_MICRO_BATCH], input=asked, env=environment, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = " / ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        return {"error": f"the estimate broke down with exit code {done.returncode}: {last}"}
    return found


def available_memory(device: torch.device) -> int:
    """Bytes that a rank can still have: on its GPU, beside the context; of main memory its share, if all ranks here want the same.

    Raises:
        SpecError: this machine does not tell.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) // math.ceil(local_ranks / torch.cuda.device_count())
    free_here = available()
    if free_here is None:
        raise SpecError('micro_batch="auto": this machine does not tell how much memory is free; give a number, such as micro_batch=32')
    return free_here // local_ranks


def available() -> int | None:
    """Bytes of main memory that can be had: on the machine, or in the control group where that is less; None where nobody says."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        found.append(1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]))
    in_version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    for limit, used, detail in control_groups("memory", ("memory.max", "memory.current", "memory.stat"), in_version_1):
        with contextlib.suppress(ValueError):
            figures = {name: int(value) for name, value in (line.split() for line in detail.splitlines())}
            cache = figures.get("total_inactive_file", figures.get("inactive_file", 0))  # given back when it is needed
            found.append(max(0, int(limit) - int(used) + cache))
    return min(found, default=None)


def device_name(device: torch.device) -> str:
    """Whose memory behaviour to predict: "cpu", a GPU in the table of `workbench.core.device`, or "cuda" for another one."""
    if device.type == "cpu":
        return "cpu"
    try:
        return Device.named(torch.cuda.get_device_name(device)).name
    except ValueError:
        return "cuda"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, there is a process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def most_samples(dataset: Any, spec: RunSpec) -> tuple[int, bool]:
    """Samples that a micro-batch can have at most, so that there is one optimizer step; and whether the dataset is a stream.

    Args:
        dataset: of the task.
        spec: whose accumulation and ranks to use.

    Raises:
        SpecError: it has too few for any.
    """
    if isinstance(dataset, IterableDataset):
        return STREAM_MOST, True
    most = len(dataset) // spec.accumulation // spec.data_ranks
    if not most:
        raise SpecError(
            f"one optimizer step takes at least {spec.accumulation * spec.data_ranks} samples (accumulation={spec.accumulation} × "
            f"{spec.data_ranks} ranks), and the dataset has {len(dataset)}"
        )
    return most, False
