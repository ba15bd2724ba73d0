"""Collectives: every call that a rank makes to others in a dry run is written down, with its bytes, its ranks and its module.

Two ways lead to `torch.distributed`, and both pass here: c10d's operators (DDP, FSDP2, optimizers), and the functional ones (DTensor).

Rebuilt: the buckets that DDP has from its second step on, in which gradients lie in the order in which they came.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.cluster.analysis.iteration import CAP, FIRST
from workbench.cluster.analysis.sent import Sent

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Of torch's operators that are collectives."""
KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""Operator of torch, without underscores around it → kind of `cost`; others keep their names."""
_NONE = ("wait_tensor", "wrap_tensor_autograd", "wait", "_wrap_tensor_autograd")
"""Operators of those namespaces that send nothing."""
_FUNCTIONAL = NAMESPACES[1:]


class Collector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the collectives made while it is active.

    Attributes:
        calls: what was seen so far.
        buckets: places in it of DDP's buckets.
        phase: of the step; says what is being done ("forward", "backward", "optimizer").
        micro: micro-batch, from 0.
    """

    def __init__(self, module_at_work: Callable[[], str], names: Callable[[nn.Module], str], axes: Sequence[tuple[str, Any]]) -> None:
        """Begin.

        Args:
            module_at_work: the name of the module that is computing.
            names: the name of a module.
            axes: name of an axis and the process group of the ranks along it; the first that fits counts.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Sent] = []
        self.buckets: list[int] = []
        self.phase, self.micro = "forward", 0
        self._at_work, self._names = module_at_work, names
        self._axes = [(name, tuple(dist.get_process_group_ranks(group))) for name, group in axes]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors unwraps itself: those come back here
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in NAMESPACES and self.phase in ("forward", "backward", "optimizer"):
            self._saw(func, args, kwargs or {}, out)
        return out

    def bucket(self, bucket: Tensor, group: Any) -> None:
        """DDP reduces a bucket of gradients among the ranks of a group; None = all."""
        self.buckets.append(len(self.calls))
        self.calls.append(self.reduced(_bytes(bucket), group))

    def reduced(self, size: int, group: Any) -> Sent:
        """A bucket of so many bytes, reduced in the backward of the present micro-batch."""
        everyone: Any = group or dist.group.WORLD
        return self._sent("all_reduce", size, dist.get_process_group_ranks(everyone), phase="backward")

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func._overloadpacket._qualified_op_name.split("::")[1].strip("_")
        if packet in _NONE:
            return
        size = max([_bytes(out) if func.namespace in _FUNCTIONAL else 0, *(_bytes(one) for one in args[:2])])
        ranks = _ranks((*args, *kwargs.values()))
        module, share = self._whose()
        needed = None if share is None else round(size * share)
        waited = func.namespace in _FUNCTIONAL
        self.calls.append(self._sent(KINDS.get(packet, packet), size, ranks, module=module, needed=needed, waited=waited))

    def _sent(self, kind: str, size: int, ranks: Sequence[int], **more: Any) -> Sent:
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        axis = next((name for name, known in self._axes if known == tuple(ranks)), "data")
        fields: dict[str, Any] = {"phase": self.phase, "axis": axis, "micro": self.micro, **more}
        fields["waited"] = fields.get("waited", False) or fields["phase"] == "optimizer"
        return Sent(kind=kind, size=size, ranks=len(ranks), stride=max(1, stride), **fields)

    def _whose(self) -> tuple[str, float | None]:
        """The module whose parameters FSDP2 gathers or reduces, and the share of their bytes that is no padding; else the one at work."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            parameters = frame.f_locals.get("fsdp_params") if "fully_shard" in frame.f_code.co_filename else None
            if parameters:
                with contextlib.suppress(AttributeError):  # torch may call things otherwise
                    return self._owner(frame, parameters), share_needed(parameters)
            frame = frame.f_back
        return self._at_work(), None

    def _owner(self, frame: Any, parameters: Sequence[Any]) -> str:
        """Of the group of parameters: the module that was given to fully_shard."""
        while frame is not None:
            modules = getattr(frame.f_locals.get("self"), "modules", None)
            if isinstance(modules, tuple | list) and modules:
                return self._names(modules[0])
            frame = frame.f_back
        return self._names(parameters[0]._module_info.module)


def share_needed(parameters: Sequence[Any]) -> float:
    """Of the bytes that FSDP2 gathers of its parameters, those that are no padding, 0..1."""
    whole = sum(one._orig_size.numel() for one in parameters)
    padded = sum(one.padded_sharded_param_size.numel() * one.mesh_info.shard_mesh_size for one in parameters)
    return float(whole / padded) if padded else 1.0


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _ranks(args: Sequence[Any]) -> list[int]:
    """The ranks of the process group among the arguments: an object of c10d, or the name of one."""
    for one in reversed(args):
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a reduction's operator is such an object, too
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(one))
        if isinstance(one, dist.ProcessGroup):
            return dist.get_process_group_ranks(one)
        if isinstance(one, str):
            with contextlib.suppress(LookupError, RuntimeError, ValueError):
                return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(one))  # type: ignore[attr-defined, arg-type]
    return list(range(dist.get_world_size()))


@contextlib.contextmanager
def arrivals(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Inside, parameters are listed in the order in which their gradients come; one that comes again is not listed again."""
    order: dict[int, nn.Parameter] = {}

    def came(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        order.setdefault(id(parameter), parameter)

    handles = [
        parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    found: list[nn.Parameter] = []
    try:
        yield found
        found += order.values()
    finally:
        for handle in handles:
            handle.remove()


def rebuilt(
    calls: Sequence[Sent],
    places: Sequence[int],
    model: nn.Module,
    order: Sequence[nn.Parameter],
    names: Mapping[int, str],
    *,
    like: Sent,
    looking: bool = False,
) -> list[Sent]:
    """The collectives of a step with the buckets of all later ones in the place of the first's.

    torch's own function fills the buckets. DDP that looks for unused parameters keeps its first ones, in the order of the parameters, and
    tells all ranks which were used: 4 bytes for each.

    Args:
        calls: of a first step.
        places: of the buckets among them; none where a gradient was missing.
        model: whose they are; what is no DDP has no buckets. It does not look for unused parameters.
        order: parameters in the order in which gradients came.
        names: id of a parameter → name of its module.
        like: a bucket.
        looking: does the model that is meant look for unused parameters?
    """
    if not isinstance(model, DistributedDataParallel):
        return list(calls)
    later = next((place for place, one in enumerate(calls) if one.phase == "optimizer"), len(calls))
    begin = min(places, default=later)
    rest = [one for place, one in enumerate(calls) if place not in set(places)]
    known = [weight for weight in model.parameters() if weight.requires_grad] if looking else list(order)
    made = [
        replace(
            like,
            size=sum(known[place].numel() * known[place].element_size() for place in bucket),
            module=common([names.get(id(known[place]), "") for place in bucket]),
        )
        for bucket in filled(known, model, ordered=not looking)
    ]
    if looking:
        made.append(replace(like, size=4 * len(known)))
    if made:
        made[-1] = replace(made[-1], waited=True)  # what comes last is there when nothing is left to compute
    return [*rest[:begin], *made, *rest[begin:]]


def filled(known: Sequence[nn.Parameter], model: DistributedDataParallel, *, ordered: bool) -> list[list[int]]:
    """Places of parameters by bucket, as torch puts them there, by their turn.

    Args:
        known: parameters.
        model: whose limits to use.
        ordered: they stand in the order in which their gradients come; else in that of the model.
    """
    if not known:
        return []
    given = None if getattr(model, "bucket_bytes_cap_default", True) else int(model.bucket_bytes_cap)
    limits = [given or FIRST, given or CAP]
    indices = [list(range(len(known)))] if ordered else []
    buckets, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        list(known), limits, [False] * len(known), *indices
    )
    found = [list(bucket) for bucket in buckets]
    return found if ordered else found[::-1]


def common(names: Sequence[str]) -> str:
    """The part that names of modules begin with.

    >>> common(["layers.3.mlp", "layers.3.attn"]), common(["a", "b"])
    ('layers.3', '')
    """
    shared: list[str] = []
    for words in zip(*(name.split(".") for name in names), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
