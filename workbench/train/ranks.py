"""The processes of a run: `Ranks` is this process among the others, `Layout` says which ranks shard the model and which split layers."""

import datetime
import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from workbench.core.checks import number_in_environment
from workbench.core.units import several
from workbench.runs.combinations import ranks_per_shard
from workbench.runs.spec import SHARDED, RunSpec, SpecError
from workbench.runs.training_knobs import parse_local_sgd

FAILED_TIMEOUT = datetime.timedelta(seconds=60)
"""How long a failed rank waits for the others, which may be waiting for it in a reduction that it will never join."""
NCCL_TIMEOUT, GLOO_TIMEOUT = datetime.timedelta(minutes=10), datetime.timedelta(minutes=30)
"""How long a collective waits for a rank that does not come, such as one that waits for its data; then the waiting ones fail."""
POLL_S = 0.005
"""Seconds between two looks whether all ranks have evaluated."""
SLOW_POLL_S = 0.1
"""The same, at most, while a rank waits for the answers of all: rank 0's store serves the looks of every rank."""
TIMEOUT = datetime.timedelta(days=7)
"""How long the others wait: an evaluation may be slow, and if a rank dies, torchrun ends them."""


@dataclass(slots=True, kw_only=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    """Its number, from 0."""
    world_size: int
    """Number of ranks."""
    device: torch.device
    """Device on which it computes."""
    store: Any
    """A `torch.distributed` store for messages between ranks: it works whatever has become of a device or a reduction."""
    preempted: str = ""
    """Name of the signal that ended the training before its last step."""
    agreements: int = 0
    """Calls of `agree` so far."""

    @classmethod
    def join(cls, spec: RunSpec) -> "Ranks":
        """Join the process group that torchrun's environment describes; without torchrun, one of this process alone.

        Raises:
            SpecError: this machine does not have the device, or not enough of them.
        """
        environment = os.environ
        device = choose_device(spec, number_in_environment("LOCAL_RANK", 0), number_in_environment("LOCAL_WORLD_SIZE", 1, least=1))
        backend = choose_backend(spec, device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" in environment:
            store, rank, world_size = next(rendezvous("env://"))
        else:
            store, rank, world_size = HashStore(), 0, 1
        bound = {"timeout": NCCL_TIMEOUT, "device_id": device} if backend == "nccl" else {"timeout": GLOO_TIMEOUT}
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world_size, **bound)
        return cls(rank=rank, world_size=world_size, device=device, store=PrefixStore("ranks", store))

    @staticmethod
    def leave() -> None:
        """Leave the process group, and end its threads before Python shuts down. Drop everything that has used it before.

        A thread of gloo may still hold the last tensor of a finished reduction. If it frees it while Python shuts down, the process ends
        with "terminate called without an active exception".
        """
        gc.collect()  # a reference cycle would keep the group and its threads alive
        dist.destroy_process_group()

    def share(self, topic: str, value: bytes, timeout: datetime.timedelta = TIMEOUT) -> list[bytes]:
        """The values that all ranks give for a topic, by rank. Each topic is used once between two calls of `agree`.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        keys = [f"{self.agreements}/{topic}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], value)
        end, pause = time.monotonic() + timeout.total_seconds(), POLL_S
        for key in keys:
            while not self.store.check([key]):  # not wait(): it would keep the store from the thread that learns of signals
                if time.monotonic() > end:
                    missing = ", ".join(str(rank) for rank, other in enumerate(keys) if not self.store.check([other]))
                    raise RuntimeError(f"no answer in {timeout.total_seconds():g} s of rank {missing or key.rpartition('/')[2]}")
                time.sleep(pause)
                pause = min(1.5 * pause, SLOW_POLL_S)
        return [self.store.get(key) for key in keys]

    def collect(self, topic: str, value: bytes) -> list[bytes]:
        """The values of all ranks, by rank, on rank 0; the others wait until it has them and get none. Each topic is used once."""
        if self.world_size == 1:
            return [value]
        keys = [f"{self.agreements}/{topic}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], value)
        awaited = [f"{self.agreements}/{topic}"] if self.rank else keys
        while not self.store.check(awaited):  # not wait(): it would keep the store from other threads
            time.sleep(POLL_S)
        if self.rank:
            return []
        values = [self.store.get(key) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        self.store.set(f"{self.agreements}/{topic}", b"")
        return values

    def agree(self, ok: bool) -> bool:
        """Did every rank succeed? All ranks must call it, and all get the same answer.

        Raises:
            RuntimeError: this rank has failed and another does not answer.
        """
        answers = self.share("end", b"ok" if ok else b"failed", TIMEOUT if ok else FAILED_TIMEOUT)
        self.agreements += 1
        return b"failed" not in answers


def choose_device(spec: RunSpec, local_rank: int, local_world_size: int) -> torch.device:
    """The device of a rank: a GPU for each rank, unless gloo lets them share; "auto" uses the CPU where ranks outnumber GPUs.

    Raises:
        SpecError: there is no GPU, or there are fewer than ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.device == "cpu" or (spec.device == "auto" and count == 0):
        if spec.device == "auto" and (why := why_no_gpu()):
            print(f"on the CPU, although this machine has NVIDIA GPUs: {why}", flush=True)
        return torch.device("cpu")
    if count == 0:
        raise SpecError(
            'device="cuda": torch finds no GPU on this machine '
            f'(torch {torch.__version__}, built for CUDA {torch.version.cuda}); try device="cpu" or device="auto"'
        )
    if local_world_size > count and spec.backend != "gloo":
        if spec.device == "auto" and spec.backend == "auto":
            print(f"on the CPUs: {local_world_size} ranks here, and {several(count, 'GPU')}, of which each takes one")
            return torch.device("cpu")
        raise SpecError(
            f"nproc_per_node={local_world_size}, and this machine has {several(count, 'GPU')}: nccl takes one rank per GPU; try "
            f'nproc_per_node={count}, or backend="gloo", which lets ranks share a GPU (to try things out: it is slow), or device="cpu"'
        )
    return torch.device("cuda", local_rank % count)


def why_no_gpu(dev: Path = Path("/dev")) -> str:
    """Why torch cannot use the NVIDIA GPUs that are here, in the words of torch; empty if there are none, or they are hidden on purpose."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or not any(dev.glob("nvidia[0-9]*")):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"{str(error).strip().splitlines()[0]} (torch {torch.__version__}, built for CUDA {torch.version.cuda})"
    return f"torch {torch.__version__} sees none of them"


def choose_backend(spec: RunSpec, device: torch.device) -> str:
    """The backend that reduces gradients.

    Raises:
        SpecError: nccl without a GPU, or a torch built without nccl.
    """
    if spec.backend == "auto":
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if spec.backend == "nccl" and (device.type == "cpu" or not dist.is_nccl_available()):
        why = "this run computes on the CPU" if device.type == "cpu" else "this torch is built without it"
        raise SpecError(f'backend="nccl": it reduces between GPUs, and {why}; try backend="gloo" or backend="auto"')
    return spec.backend


@dataclass(slots=True, kw_only=True)
class Layout:
    """The process groups and meshes of this rank. Ranks that split a layer are neighbours, then those that share a copy of the model."""

    readers: Ranks
    """This rank among the data-parallel ranks, which read different samples."""
    data: dist.ProcessGroup | None
    """Process group of the data-parallel ranks, which reduces gradients; None = all ranks."""
    replicas: DeviceMesh | None = None
    """Mesh of the data-parallel ranks; two axes under "hsdp": groups, and ranks in a group. None where nothing is sharded."""
    tensor: DeviceMesh | None = None
    """Mesh of the ranks that split each layer; None without tensor parallelism."""
    pipeline: dist.ProcessGroup | None = None
    """Process group of the ranks that have the stages of one copy of the model; None without pipeline parallelism."""
    neighbours: dist.ProcessGroup | None = None
    """Process group of the ranks that reduce gradients under "local_sgd"; None = each is alone."""
    experts: DeviceMesh | None = None
    """Mesh of two axes: copies of the experts, and ranks that divide one copy among them; None without expert parallelism."""
    expert_hosts: dist.ProcessGroup | None = None
    """Process group of the ranks that divide one copy of the experts, for what is in host memory; None = that of the mesh sends it."""

    @classmethod
    def of(cls, spec: RunSpec, ranks: Ranks, group: dist.ProcessGroup | None = None) -> Self:
        """The layout of a spec. A collective: all ranks of the launch must call it, or `join_group_creation`, in the same order of specs.

        It does not work under fake tensors: a mesh reads its numbers.

        Args:
            spec: its `parallel`, `shard_ranks`, `tensor_parallel`, `pipeline_parallel` and `expert_parallel`.
            ranks: this process among those of the spec.
            group: their process group; None = that of all.

        Raises:
            SpecError: the number of ranks does not fit the spec.
        """
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if spec.pipeline_parallel > 1:
            made = _pipeline_groups(spec, members, dist.get_backend(group))
            return cls(readers=_readers(ranks, spec.pipeline_parallel, outer=True), data=made[0], pipeline=made[1])
        if spec.expert_parallel > 1:
            copies, own, *hosts = _expert_groups(spec, members, dist.get_backend(group))
            numbers = torch.tensor(members).view(-1, spec.expert_parallel)
            mesh = DeviceMesh.from_group([copies, own], ranks.device.type, mesh=numbers, mesh_dim_names=("copy", "expert"))
            return cls(readers=ranks, data=group, experts=mesh, expert_hosts=hosts[0] if hosts else None)
        if parse_local_sgd(spec.local_sgd)["local_ranks"] > 1:
            return cls(readers=ranks, data=group, neighbours=_neighbours(spec, members, dist.get_backend(group))[0])
        grid = _grid(spec, members)
        layout = cls(readers=_readers(ranks, spec.tensor_parallel), data=group)
        device = ranks.device.type
        if not _needs_a_mesh(spec):
            return layout
        made = _groups(grid, spec, dist.get_backend(group))
        if len(made) == 1:
            layout.data, layout.replicas = made[0], DeviceMesh.from_group(made[0], device)
        elif spec.tensor_parallel == 1:
            layout.replicas = DeviceMesh.from_group(made, device, mesh=grid[:, :, 0], mesh_dim_names=("replica", "shard"))
        elif spec.parallel == "hsdp":
            names = ("replica", "shard", "tensor")
            whole = DeviceMesh.from_group(made[:3], device, mesh=grid, mesh_dim_names=names)
            layout.data, layout.replicas, layout.tensor = made[3], whole["replica", "shard"], whole["tensor"]
        else:
            whole = DeviceMesh.from_group(made, device, mesh=grid[0], mesh_dim_names=("shard", "tensor"))
            layout.data, layout.replicas, layout.tensor = made[0], whole["shard"], whole["tensor"]
        return layout


LAYOUT_KNOBS = (
    *("parallel", "tensor_parallel", "pipeline_parallel", "pipeline_schedule", "expert_parallel", "shard_ranks"),
    *("nproc_per_node", "nnodes", "micro_batch", "accumulation"),
)
"""Knobs that say which rank holds what of the model, and which samples it works on."""
ONE_STAGE: Mapping[str, Any] = {"pipeline_parallel": 1, "pipeline_schedule": "1f1b", "expert_parallel": 1}
"""Those that checkpoints of earlier workbenches lack."""


def layout_knobs(spec: RunSpec) -> dict[str, Any]:
    """Those knobs of a spec, as a checkpoint keeps them."""
    return {name: getattr(spec, name) for name in LAYOUT_KNOBS}


def changed_layout(spec: RunSpec, before: Mapping[str, Any] | None) -> str:
    """What it means that a checkpoint was written by other ranks; "" = by the same.

    Args:
        spec: of the run that goes on.
        before: what `layout_knobs` gave when it was written; None = not known, taken to be the same.
    """
    now = layout_knobs(spec)
    before = {**ONE_STAGE, **(before or now)}
    if before == now:
        return ""
    changes = ", ".join(f"{name}={now[name]} (it was {before.get(name)})" for name in now if now[name] != before.get(name))
    ranks = before["nproc_per_node"] * before["nnodes"] // (before["tensor_parallel"] * before["pipeline_parallel"])
    samples = before["micro_batch"] * before["accumulation"] * ranks
    order = ""
    if samples != spec.global_batch:
        order = (
            f"; a step takes {spec.global_batch} samples now, and took {samples}: the epoch goes on with the samples it has left, a stream "
            "after as many samples as it had given"
        )
    return (
        f"it goes on with {changes}: weights, optimizer and schedule are those of the checkpoint; random numbers begin anew, and sums are "
        f"added in another order, so the further training is not bit for bit that of before{order}"
    )


def join_group_creation(spec: RunSpec, members: Sequence[int]) -> None:
    """On a rank that a spec does not use: take part in creating its process groups, as all ranks of the launch must."""
    if spec.pipeline_parallel > 1:
        _pipeline_groups(spec, members, None)
    elif spec.expert_parallel > 1:
        _expert_groups(spec, members, None)
    elif parse_local_sgd(spec.local_sgd)["local_ranks"] > 1:
        _neighbours(spec, members, None)
    elif _needs_a_mesh(spec):
        _groups(_grid(spec, members), spec, None)


def _needs_a_mesh(spec: RunSpec) -> bool:
    return spec.tensor_parallel > 1 or spec.parallel in SHARDED


def _grid(spec: RunSpec, members: Sequence[int]) -> torch.Tensor:
    """Ranks by (copy of the model, shard, part of a layer); without "hsdp" the first axis has length 1."""
    count, rest = divmod(len(members), spec.tensor_parallel)
    if rest:
        raise SpecError(f"tensor_parallel={spec.tensor_parallel} does not divide the {len(members)} ranks of this launch")
    shard = ranks_per_shard(spec, count) if spec.parallel == "hsdp" else count
    return torch.tensor(members).view(count // shard, shard, spec.tensor_parallel)


_created: WeakKeyDictionary[dist.ProcessGroup, dict[Any, list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""Process groups by that of all ranks, and by their use. They are kept until the end: torch caches the specs of sharded tensors and
their process groups with them, so that the next spec of the same layout would use the groups of the last."""


def _groups(grid: torch.Tensor, spec: RunSpec, backend: Any) -> list[dist.ProcessGroup]:
    """This rank's process group along each axis in use; under "hsdp" with tensor parallelism also one over the first two axes."""
    hsdp, split = spec.parallel == "hsdp", spec.tensor_parallel > 1
    world: Any = dist.group.WORLD
    known = _created.setdefault(world, {})
    key = (tuple(grid.shape), tuple(grid.flatten().tolist()), hsdp, split)
    if key not in known:
        axes = [axis for axis, used in enumerate((hsdp, True, split)) if used]
        sets = [grid.movedim(axis, -1).reshape(-1, grid.shape[axis]) for axis in axes]
        if hsdp and split:
            sets.append(grid.flatten(0, 1).T)
        made = [(line, dist.new_group(line, backend=backend)) for lines in sets for line in lines.tolist()]
        known[key] = [group for line, group in made if dist.get_rank() in line]
    return known[key]


def _pipeline_groups(spec: RunSpec, members: Sequence[int], backend: Any) -> list[dist.ProcessGroup]:
    """The process groups of this rank's stage and of its pipeline. The ranks of a stage are neighbours: little passes between stages."""
    count, rest = divmod(len(members), spec.pipeline_parallel)
    if rest:
        raise SpecError(f"pipeline_parallel={spec.pipeline_parallel} does not divide the {len(members)} ranks of this launch")
    return _lines("pipeline", torch.tensor(members).view(spec.pipeline_parallel, count), backend)


def _expert_groups(spec: RunSpec, members: Sequence[int], backend: Any) -> list[dist.ProcessGroup]:
    """The process groups of the ranks with this rank's experts, and of those that have all experts together, which are neighbours; with
    NCCL, which sends nothing that is in host memory, also the latter with gloo.
    """
    if len(members) % spec.expert_parallel:
        raise SpecError(f"expert_parallel={spec.expert_parallel} does not divide the {len(members)} ranks of this launch")
    grid = torch.tensor(members).view(-1, spec.expert_parallel).T
    made = _lines("experts", grid, backend)
    return made + (_lines("experts, hosts", grid, "gloo")[1:] if (backend or dist.get_backend()) == "nccl" else [])


def _neighbours(spec: RunSpec, members: Sequence[int], backend: Any) -> list[dist.ProcessGroup]:
    """The process group of the ranks that reduce gradients with this rank, first; none where this rank is no member."""
    if len(members) % parse_local_sgd(spec.local_sgd)["local_ranks"]:
        raise SpecError(f'local_sgd="{spec.local_sgd}": local_ranks does not divide the {len(members)} ranks of this launch')
    return _lines("neighbours", torch.tensor(members).view(-1, parse_local_sgd(spec.local_sgd)["local_ranks"]), backend)


def _lines(use: str, grid: torch.Tensor, backend: Any) -> list[dist.ProcessGroup]:
    """This rank's process group among those of the rows of a grid of ranks, and among those of its columns."""
    world: Any = dist.group.WORLD
    known, key = _created.setdefault(world, {}), (use, tuple(grid.shape), tuple(grid.flatten().tolist()))
    if key not in known:
        made = [(line, dist.new_group(line, backend=backend)) for lines in (grid, grid.T) for line in lines.tolist()]
        known[key] = [group for line, group in made if dist.get_rank() in line]
    return known[key]


def _readers(ranks: Ranks, split: int, *, outer: bool = False) -> Ranks:
    """This rank among those with other samples; `outer`: those with the same samples are no neighbours."""
    if split == 1:
        return ranks
    count = ranks.world_size // split
    rank, part = (ranks.rank % count, ranks.rank // count) if outer else (ranks.rank // split, ranks.rank % split)
    return replace(ranks, rank=rank, world_size=count, store=PrefixStore(f"part {part}", ranks.store))
