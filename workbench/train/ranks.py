"""The processes of a run: who this one is, which device it has, and how all of them agree."""

import datetime
import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from workbench.runs.spec import RunSpec, SpecError

PATIENCE = datetime.timedelta(seconds=60)
"""How long a rank that has failed waits for the others, who may be waiting for it in a reduction that it will never join."""
LONG = datetime.timedelta(days=7)
"""How long the others wait: an evaluation may take its time, and if a rank dies, torchrun ends them."""


@dataclass(slots=True, kw_only=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    """Its number, from 0."""
    world_size: int
    """How many there are."""
    device: torch.device
    """Where it computes."""
    store: Any
    """A `torch.distributed` store, where the ranks tell each other things: it works whatever has become of a device or a reduction."""
    agreements: int = 0
    """How often they have agreed."""

    @classmethod
    def join(cls, spec: RunSpec) -> "Ranks":
        """Join the process group that torchrun's environment describes; without torchrun, one of this process alone.

        Raises:
            SpecError: this machine does not have the device, or not enough of them.
        """
        environment = os.environ
        device = choose_device(spec, int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1")))
        backend = choose_backend(spec, device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" in environment:
            store, rank, world_size = next(rendezvous("env://"))
        else:
            store, rank, world_size = HashStore(), 0, 1
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world_size)
        return cls(rank=rank, world_size=world_size, device=device, store=PrefixStore("ranks", store))

    @staticmethod
    def leave() -> None:
        """Leave the process group, and let its threads end while Python is there; whatever has used it has to be given up before.

        A thread of gloo may still hold the last tensor of a reduction that is over. If it frees it while Python shuts down, the process
        ends with "terminate called without an active exception".
        """
        gc.collect()  # what lies in cycles holds the group, and then its threads live on
        dist.destroy_process_group()

    def share(self, topic: str, value: bytes, timeout: datetime.timedelta = LONG) -> list[bytes]:
        """The values that all ranks give to a topic, in their order; a topic comes once between two agreements.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        keys = [f"{self.agreements}/{topic}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], value)
        self.store.wait(keys, timeout)
        return [self.store.get(key) for key in keys]

    def agree(self, ok: bool) -> bool:
        """Has it gone well on every rank? All of them ask, and all get the same answer.

        Raises:
            RuntimeError: this rank has failed and another does not come.
        """
        answers = self.share("end", b"ok" if ok else b"failed", LONG if ok else PATIENCE)
        self.agreements += 1
        return b"failed" not in answers


def choose_device(spec: RunSpec, local_rank: int, local_world_size: int) -> torch.device:
    """The device of a rank: on GPUs one for each rank, unless gloo lets them share; "auto" takes the CPUs where ranks outnumber GPUs.

    Raises:
        SpecError: there is no GPU, or there are fewer than ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.device == "cpu" or (spec.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise SpecError(
            'device="cuda": torch finds no GPU on this machine '
            f'(torch {torch.__version__}, built for CUDA {torch.version.cuda}); try device="cpu" or device="auto"'
        )
    if local_world_size > count and spec.backend != "gloo":
        if spec.device == "auto" and spec.backend == "auto":
            print(f"on the CPUs: {local_world_size} ranks here, and {count} GPU{'s' * (count > 1)}, of which each takes one")
            return torch.device("cpu")
        raise SpecError(
            f"nproc_per_node={local_world_size}, and this machine has {count} GPU{'s' * (count > 1)}: nccl takes one rank per GPU; try "
            f'nproc_per_node={count}, or backend="gloo", which lets ranks share a GPU (to try things out: it is slow), or device="cpu"'
        )
    return torch.device("cuda", local_rank % count)


def choose_backend(spec: RunSpec, device: torch.device) -> str:
    """The backend of the gradients' reduction.

    Raises:
        SpecError: nccl is asked for without a GPU, or this torch has none.
    """
    if spec.backend == "auto":
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if spec.backend == "nccl" and (device.type == "cpu" or not dist.is_nccl_available()):
        why = "this run computes on the CPU" if device.type == "cpu" else "this torch is built without it"
        raise SpecError(f'backend="nccl": it reduces between GPUs, and {why}; try backend="gloo" or backend="auto"')
    return spec.backend
