"""Expert parallelism: divides the experts of a model's layers over ranks, which exchange the rows of their tokens by all-to-all.

A layer of experts is any module with `expert_parameters`, the names of its parameters whose first dimension counts the experts, and with an
`exchange`, None as long as the layer has them all. Where it is an `Exchange`, the layer sends the rows that it has for all experts, and
computes those of its own for all ranks. `models.Experts` is such a layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from workbench.runs.spec import SpecError
from workbench.train.ranks import Layout
from workbench.train.sharded_tensors import broadcast_parameters
from workbench.train.sharding import reduce_gradients


class Exchange:
    """Sends rows to the ranks that have their experts, and back."""

    def __init__(self, group: dist.ProcessGroup, hosts: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            group: the ranks that have all experts together.
            hosts: the same ranks, where `group` sends nothing that is in host memory; None = `group` does.
        """
        self._group, self._hosts, self.ranks = group, hosts or group, dist.get_world_size(group)

    def sizes(self, rows: Tensor) -> list[int]:
        """Rows that each rank has for an expert. Ranks may have batches of other sizes or lengths, so they tell each other: 8 bytes from
        host to host, which no device waits for. In a dry run, in which no other rank says it, all have as many.
        """
        if dist.get_backend(self._hosts) == "fake":
            return [rows.shape[1]] * self.ranks
        mine = torch.tensor([rows.shape[1]])
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self._hosts)
        return [int(size) for size in every]

    def to_experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """(experts, rows here, width) → (experts here, rows of all ranks, width)."""
        here, width = len(rows) // self.ranks, rows.shape[2]
        sent = [here * rows.shape[1] * width] * self.ranks
        got = _exchanged(rows.reshape(-1), sent, [here * size * width for size in sizes], self._group)
        parts = torch.split(got, [here * size * width for size in sizes])
        return torch.cat([part.view(here, size, width) for part, size in zip(parts, sizes, strict=True)], 1)

    def back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Inverse of `to_experts`."""
        here, _, width = rows.shape
        rank = dist.get_rank(self._group)
        parts = [part.reshape(-1) for part in torch.split(rows, list(sizes), 1)]
        taken = [here * sizes[rank] * width] * self.ranks
        got: Tensor = _exchanged(torch.cat(parts), [len(part) for part in parts], taken, self._group)
        return got.view(here * self.ranks, sizes[rank], width)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.about = sent, taken, group
        out = flat.new_empty(sum(taken))
        dist.all_to_all_single(out, flat.contiguous(), taken, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent, taken, group = ctx.about
        out = gradients[0].new_empty(sum(sent))
        dist.all_to_all_single(out, gradients[0].contiguous(), sent, taken, group=group)
        return out, None, None, None


_exchanged: Any = _AllToAll.apply


class DividedExperts:
    """The experts of a model on this rank."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        """Keep this rank's experts of each layer, in place; the first rank's values count. A collective.

        Args:
            module: the full model, which DistributedDataParallel is to wrap afterwards: it leaves these parameters out.

        Raises:
            SpecError: the model has no layers of experts, or their number cannot be divided.
        """
        assert layout.experts is not None
        self._ranks, self._copies = layout.experts.size(1), layout.experts.get_group(0)
        layers = dict(expert_layers(module))
        if not layers:
            raise SpecError(
                f"expert_parallel={self._ranks}: the {type(module).__name__} has no layers of experts; leave it out, or give such layers "
                "`expert_parameters`, the names of their parameters whose first dimension counts the experts, and an `exchange` as in "
                "workbench.train.models.Experts"
            )
        self.weights: list[nn.Parameter] = []
        for name, layer in layers.items():
            broadcast_parameters(layer, layout.data, device)
            for parameter in layer.expert_parameters:
                whole = getattr(layer, parameter)
                if len(whole) % self._ranks:
                    raise SpecError(
                        f"expert_parallel={self._ranks} does not divide the {len(whole)} experts of {name or 'the model'}; try "
                        f"expert_parallel={next(n for n in range(self._ranks, 0, -1) if len(whole) % n == 0)}"
                    )
                setattr(layer, parameter, _own_part(whole, layout.experts))
                self.weights.append(getattr(layer, parameter))
            layer.exchange = Exchange(layout.experts.get_group(1), layout.expert_hosts)
        mine = {id(weight) for weight in self.weights}
        names = [name for name, weight in module.named_parameters() if id(weight) in mine]
        leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        leave_out(module, names)

    def finish_gradients(self) -> None:
        """Make the gradients of a step those of the mean loss of all ranks: they are the sum of what the tokens of these ranks gave."""
        for weight in self.weights:
            if weight.grad is not None:
                weight.grad.div_(self._ranks)
        if dist.get_world_size(self._copies) > 1:
            reduce_gradients(self.weights, self._copies)


def expert_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of experts of a model, by name."""
    return ((name, part) for name, part in module.named_modules() if getattr(part, "expert_parameters", ()))


def _own_part(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The experts of this rank, as a plain parameter that knows which part of the whole it is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes long

    here = len(whole) // mesh.size(1)
    part = whole.detach()[here * mesh.get_local_rank(1) :][:here].clone()
    own = nn.Parameter(part, requires_grad=whole.requires_grad)
    own._dtensor_spec = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False)._spec  # type: ignore[attr-defined]
    return own


class ExpertBalance:
    """How the tokens of a rank's steps are spread over the experts: what each layer counts in its forward."""

    def __init__(self, module: nn.Module) -> None:
        """Count from now on.

        Args:
            module: whose layers have `routed`: since it was set to None, the choices of each expert, and behind them those dropped.
        """
        self._layers = [layer for _, layer in expert_layers(module) if hasattr(layer, "routed")]

    def take(self) -> Tensor | None:
        """Of the choices since the last call, the fraction that each expert got, as the mean of the layers, and behind them the fraction
        that was dropped, since an expert had no room. None = the model has no such layers, or was not called.
        """
        counts = [layer.routed for layer in self._layers if layer.routed is not None]
        for layer in self._layers:
            layer.routed = None
        if not counts or len({len(each) for each in counts}) > 1:
            return None
        table = torch.stack(counts).float()
        shares: Tensor = (table / table[:, :-1].sum(1, keepdim=True)).mean(0)
        return shares
