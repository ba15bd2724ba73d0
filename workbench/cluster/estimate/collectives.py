"""Records every collective of a rank in a dry run, with its bytes, ranks and module, and rebuilds DDP's buckets as later steps have them.

Both kinds of `torch.distributed` operators are recorded: c10d's (DDP, FSDP2, optimizers) and the functional ones (DTensor).
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

from workbench.cluster.analysis.collective_call import MESSAGES, PHASES, CollectiveCall
from workbench.cluster.analysis.iteration import CAP, FIRST
from workbench.memory.estimate.fake_tensors import asked_device
from workbench.runs.training_knobs import COMPRESSIONS, parse_call

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's operators that are collectives."""
KINDS = {
    operator: kind
    for kind, operators in {
        "all_reduce": "allreduce allreduce_coalesced all_reduce all_reduce_coalesced",
        "all_gather": "allgather allgather_base allgather_coalesced allgather_into_tensor_coalesced all_gather_into_tensor "
        "all_gather_into_tensor_out all_gather_into_tensor_coalesced",
        "reduce_scatter": "reduce_scatter reduce_scatter_base reduce_scatter_tensor reduce_scatter_tensor_coalesced",
        "broadcast": "broadcast",
        "reduce": "reduce",
        "all_to_all": "alltoall alltoall_base all_to_all_single",
    }.items()
    for operator in operators.split()
}
"""Operator of torch, without underscores around it → kind of collective; others keep their names."""
_NOT_COLLECTIVE = ("wait_tensor", "wrap_tensor_autograd", "wait", "_wrap_tensor_autograd")
"""Operators of those namespaces that send nothing."""
_FUNCTIONAL = NAMESPACES[1:]


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the collectives made while it is active.

    Attributes:
        calls: collectives so far.
        buckets: positions in `calls` of DDP's buckets.
        phase: of the step: "forward", "backward" or "optimizer".
        micro: micro-batch, from 0.
    """

    def __init__(self, module_at_work: Callable[[], str], names: Callable[[nn.Module], str], axes: Sequence[tuple[str, Any]]) -> None:
        """Begin.

        Args:
            module_at_work: returns the name of the module that is computing.
            names: returns the name of a module.
            axes: name of an axis and the process group of the ranks along it; the first match counts.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []
        self.buckets: list[int] = []
        self.phase, self.micro = "forward", 0
        self._module_at_work, self._names = module_at_work, names
        self._messages: dict[int, tuple[str, int]] = {}
        self._axes = [(name, tuple(dist.get_process_group_ranks(group))) for name, group in axes]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors unwraps itself: those come back here
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in NAMESPACES:
            self._record(func, args, kwargs or {}, out)
        return out

    def announce(self, phase: str, micro: int, messages: Sequence[dist.P2POp]) -> None:
        """Learn to which phase and micro-batch the messages between stages belong that are sent next."""
        self._messages |= {id(message.tensor): (phase, micro) for message in messages}

    def bucket(self, bucket: Tensor, group: Any) -> None:
        """Record that DDP reduces a bucket of gradients among the ranks of a group; None = all."""
        self.buckets.append(len(self.calls))
        self.calls.append(self.reduced(_bytes(bucket), group))

    def reduced(self, size: int, group: Any) -> CollectiveCall:
        """A bucket of so many bytes, reduced in the backward of the current micro-batch."""
        ranks: Any = group or dist.group.WORLD
        return self._call("all_reduce", size, dist.get_process_group_ranks(ranks), phase="backward")

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func._overloadpacket._qualified_op_name.split("::")[1].strip("_")
        if packet in _NOT_COLLECTIVE:
            return
        size = max([_bytes(out) if func.namespace in _FUNCTIONAL else 0, *map(_bytes, args[:2])])
        ranks = _ranks((*args, *kwargs.values()))
        if packet in MESSAGES and (announced := self._messages.get(id(args[0][0]))):
            both = sorted((dist.get_rank(), ranks[args[2]]))
            about: dict[str, Any] = {"phase": announced[0], "micro": announced[1], "axis": "pipeline", "waited": packet == "recv"}
            self.calls.append(self._call(packet, size, both, **about))
            return
        if self.phase not in PHASES:
            return
        module, share = self._module_and_unpadded_share()
        needed = None if share is None else round(size * share)
        waited = func.namespace in _FUNCTIONAL
        self.calls.append(self._call(KINDS.get(packet, packet), size, ranks, module=module, needed=needed, waited=waited))

    def _call(self, kind: str, size: int, ranks: Sequence[int], **more: Any) -> CollectiveCall:
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        axis = next((name for name, known in self._axes if known == tuple(ranks)), "data")
        fields: dict[str, Any] = {"phase": self.phase, "axis": axis, "micro": self.micro, **more}
        fields["waited"] = fields.get("waited", False) or fields["phase"] == "optimizer"
        return CollectiveCall(kind=kind, size=size, ranks=len(ranks), stride=max(1, stride), **fields)

    def _module_and_unpadded_share(self) -> tuple[str, float | None]:
        """The module whose parameters FSDP2 gathers or reduces and their unpadded share; else the module that is computing."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            parameters = frame.f_locals.get("fsdp_params") if "fully_shard" in frame.f_code.co_filename else None
            if parameters:
                with contextlib.suppress(AttributeError):  # other torch versions may have other names
                    return self._owner(frame, parameters), unpadded_share(parameters)
            frame = frame.f_back
        return self._module_at_work(), None

    def _owner(self, frame: Any, parameters: Sequence[Any]) -> str:
        """Name of the module that was given to fully_shard."""
        while frame is not None:
            modules = getattr(frame.f_locals.get("self"), "modules", None)
            if isinstance(modules, tuple | list) and modules:
                return self._names(modules[0])
            frame = frame.f_back
        return self._names(parameters[0]._module_info.module)


def unpadded_share(parameters: Sequence[Any]) -> float:
    """Share of the bytes gathered by FSDP2 that is no padding, 0..1."""
    whole = sum(part._orig_size.numel() for part in parameters)
    padded = sum(part.padded_sharded_param_size.numel() * part.mesh_info.shard_mesh_size for part in parameters)
    return float(whole / padded) if padded else 1.0


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _ranks(args: Sequence[Any]) -> list[int]:
    """The ranks of the process group among the arguments: an object of c10d, or its name."""
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a reduction's operator is such an object, too
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
        if isinstance(arg, dist.ProcessGroup):
            return dist.get_process_group_ranks(arg)
        if isinstance(arg, str):
            with contextlib.suppress(LookupError, RuntimeError, ValueError):
                return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(arg))  # type: ignore[attr-defined, arg-type]
    return list(range(dist.get_world_size()))


@contextlib.contextmanager
def gradient_order(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Lists parameters in the order in which their gradients arrive inside the context, each once."""
    order: dict[int, nn.Parameter] = {}

    def came(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        order.setdefault(id(parameter), parameter)

    handles = [
        parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    arrived: list[nn.Parameter] = []
    try:
        yield arrived
        arrived += order.values()
    finally:
        for handle in handles:
            handle.remove()


def with_rebuilt_buckets(
    calls: Sequence[CollectiveCall],
    bucket_positions: Sequence[int],
    models: Sequence[nn.Module],
    order: Sequence[nn.Parameter],
    names: Mapping[int, str],
    *,
    like: CollectiveCall,
    find_unused: bool = False,
    static_graph: bool = False,
    compression: str = "none",
) -> list[CollectiveCall]:
    """Return the collectives of a later step: after the first one, DDP rebuilds its buckets in the order in which gradients arrived.

    torch's own function assigns the buckets. With find_unused_parameters DDP keeps the first buckets, in the order of the parameters, and
    reduces which parameters were used: 4 bytes for each. With static_graph, parameters without a gradient come first, and are reduced.

    Args:
        calls: the collectives of a first step, in their order.
        bucket_positions: places of the buckets in `calls`; none where a gradient was missing.
        models: each DDP, built without find_unused_parameters (a rank of a pipeline has one per stage); any other module has no buckets.
        order: parameters in the order in which gradients arrived.
        names: id of a parameter → name of its module.
        like: an example of a bucket's collective.
        find_unused: does the planned model use find_unused_parameters?
        static_graph: was DDP given static_graph=True?
        compression: the knob gradient_compression; of PowerSGD, the step comes after it has started to compress.
    """
    wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
    if not wrapped:
        return list(calls)
    later = next((index for index, call in enumerate(calls) if call.phase == "optimizer"), len(calls))
    begin = min(bucket_positions, default=later)
    rest = [call for index, call in enumerate(calls) if index not in set(bucket_positions)]
    made: list[CollectiveCall] = []
    for model in wrapped:
        reduced = {id(weight) for name, weight in model.module.named_parameters() if name not in model.parameters_to_ignore}
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        without = [weight for weight in trained if id(weight) not in set(map(id, order))] if static_graph else []
        known = trained if find_unused else [*without, *order]
        known = [weight for weight in known if id(weight) in reduced]
        for bucket in bucket_assignment(known, model, ordered=not find_unused):
            module = common_prefix([names.get(id(known[index]), "") for index in bucket])
            sizes = compressed([known[index] for index in bucket], compression)
            made += [replace(like, size=size, module=module) for size in sizes]
            last = len(made) - len(sizes)
        if find_unused:
            made.append(replace(like, size=4 * len(known)))
            last = len(made) - 1
    if made:  # the last bucket is complete when nothing is left to compute
        made[last:] = [replace(call, waited=True) for call in made[last:]]
    return [*rest[:begin], *made, *rest[begin:]]


def compressed(bucket: Sequence[nn.Parameter], compression: str) -> list[int]:
    """Bytes of the collectives that reduce a bucket of gradients; with PowerSGD these are what it leaves whole, and two thin matrices."""
    kind, options = parse_call("gradient_compression", compression, COMPRESSIONS, "fp16")
    if kind in ("fp16", "bf16"):
        return [sum(2 * weight.numel() for weight in bucket)]
    whole = left = right = 0
    for weight in bucket:
        rows = weight.shape[0] if weight.ndim else 1
        columns = weight.numel() // max(rows, 1)
        rank = min(rows, columns, options.get("rank", 0))
        if kind == "powersgd" and 2 * (rows + columns) * rank < weight.numel():  # its min_compression_rate
            left, right = left + rows * rank * weight.element_size(), right + columns * rank * weight.element_size()
        else:
            whole += weight.nbytes
    return [size for size in (whole, left, right) if size]


def bucket_assignment(known: Sequence[nn.Parameter], model: DistributedDataParallel, *, ordered: bool) -> list[list[int]]:
    """Indices of parameters by bucket, as torch assigns them, in the order of reduction.

    Args:
        known: the parameters that DDP reduces.
        model: whose bucket sizes to use.
        ordered: parameters are in the order in which their gradients arrive; else in that of the model.
    """
    if not known:
        return []
    given = None if getattr(model, "bucket_bytes_cap_default", True) else int(model.bucket_bytes_cap)
    limits = [given or FIRST, given or CAP]
    indices = [list(range(len(known)))] if ordered else []
    buckets, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        list(known), limits, [False] * len(known), *indices
    )
    in_turn = [list(bucket) for bucket in buckets]
    return in_turn if ordered else in_turn[::-1]


def common_prefix(names: Sequence[str]) -> str:
    """The common first part of names of modules.

    >>> common_prefix(["layers.3.mlp", "layers.3.attn"]), common_prefix(["a", "b"])
    ('layers.3', '')
    """
    shared: list[str] = []
    for words in zip(*(name.split(".") for name in names), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
