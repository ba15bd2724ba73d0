"""Layout: which ranks work on different samples, which share a copy of the model, and which split its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from workbench.runs.spec import SHARDED, RunSpec, SpecError, ranks_per_shard
from workbench.train.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class Layout:
    """This rank's place. Ranks that split a layer are neighbours, then those that share a copy of the model."""

    readers: Ranks
    """This rank among those that read different samples: its number, how many, and their store."""
    data: dist.ProcessGroup | None
    """Of those ranks, which reduce gradients; None = all ranks of the process group."""
    replicas: DeviceMesh | None = None
    """Of those ranks; of two axes under "hsdp": groups, and ranks in a group. None where no tensor is dealt out."""
    tensor: DeviceMesh | None = None
    """Of the ranks that split each layer; None where they do not."""

    @classmethod
    def of(cls, spec: RunSpec, ranks: Ranks, group: dist.ProcessGroup | None = None) -> Self:
        """The layout of a spec. All ranks of the launch have to come here, or to `stand_by`, in the same order of specs.

        Not under fake tensors: a mesh reads its numbers.

        Args:
            spec: its `parallel`, `shard_ranks` and `tensor_parallel`.
            ranks: this process among those of the spec.
            group: their process group; None = that of all.

        Raises:
            SpecError: the ranks cannot be dealt out so.
        """
        grid = _grid(spec, dist.get_process_group_ranks(group or dist.group.WORLD))
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


def stand_by(spec: RunSpec, members: Sequence[int]) -> None:
    """On a rank of the launch that a spec does not use: take part in making its process groups, as all ranks have to.

    Args:
        spec: that other ranks make a layout of.
        members: those ranks.
    """
    if _needs_a_mesh(spec):
        _groups(_grid(spec, members), spec, None)


def _needs_a_mesh(spec: RunSpec) -> bool:
    return spec.tensor_parallel > 1 or spec.parallel in SHARDED


def _grid(spec: RunSpec, members: Sequence[int]) -> torch.Tensor:
    """Ranks by (copy of the model, part of the copy, part of a layer); without "hsdp" there is one copy, which may also be one each."""
    count, rest = divmod(len(members), spec.tensor_parallel)
    if rest:
        raise SpecError(f"tensor_parallel={spec.tensor_parallel} does not divide the {len(members)} ranks of this launch")
    shard = ranks_per_shard(spec, count) if spec.parallel == "hsdp" else count
    return torch.tensor(members).view(count // shard, shard, spec.tensor_parallel)


_made: WeakKeyDictionary[dist.ProcessGroup, dict[Any, list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""Process groups by that of all ranks, and by what they are for. They stay until the end: torch keeps tensors' layouts in a cache, and with
them the process groups, so that the next spec of the same layout would use those of the last."""


def _groups(grid: torch.Tensor, spec: RunSpec, backend: Any) -> list[dist.ProcessGroup]:
    """This rank's process group along each axis that has a use; under "hsdp" with split layers one over two axes follows."""
    hsdp, split = spec.parallel == "hsdp", spec.tensor_parallel > 1
    everyone: Any = dist.group.WORLD
    known = _made.setdefault(everyone, {})
    key = (tuple(grid.shape), tuple(grid.flatten().tolist()), hsdp, split)
    if key not in known:
        axes = [axis for axis, used in enumerate((hsdp, True, split)) if used]
        sets = [grid.movedim(axis, -1).reshape(-1, grid.shape[axis]) for axis in axes]
        if hsdp and split:
            sets.append(grid.flatten(0, 1).T)
        made = [(line, dist.new_group(line, backend=backend)) for lines in sets for line in lines.tolist()]
        known[key] = [group for line, group in made if dist.get_rank() in line]
    return known[key]


def _readers(ranks: Ranks, split: int) -> Ranks:
    if split == 1:
        return ranks
    store = PrefixStore(f"part {ranks.rank % split}", ranks.store)
    return replace(ranks, rank=ranks.rank // split, world_size=ranks.world_size // split, store=store)
