"""The state of a training as tensors by name, of which each rank holds parts: checkpoints keep it, and any other layout can load it.

Torch's own `torch.distributed.checkpoint` is not used: its index (`.metadata`) is a pickle, and loading one can execute code. Here each
rank's parts are in a checkpoint file of the workbench, which is verified and loaded with `weights_only`, and the index is plain numbers.
`dcp` writes and reads such directories.
"""

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from workbench.runs.spec import IMPLEMENTATIONS, RunSpec
from workbench.runs.task import TaskError
from workbench.train import checkpoint_file
from workbench.train.checkpoint_file import UnusableCheckpointError
from workbench.train.offload import HostOptimizer
from workbench.train.ranks import Layout, Ranks
from workbench.train.sharded_tensors import dtensor_spec, from_local_part, is_dtensor, local_part, local_region

WEIGHTS_ALONE = "To take the weights alone: wb.import_weights in the task's model()"
"""What to do with a checkpoint whose optimizer does not fit."""
Key = tuple[str, str, str]
""""module", "optimizer" or "ema"; the parameter; the state of the optimizer, or ""."""


class Training(Protocol):
    """What is read here of a `Trainer`."""

    spec: RunSpec
    ranks: Ranks
    layout: Layout
    module: torch.nn.Module
    optimizer: Optimizer

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averages of the parameters by name."""
        ...

    @property
    def entries_elsewhere(self) -> Collection[str]:
        """Names in the state_dict of the whole model of which other ranks may have the tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a tensor."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins in it."""


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has this rank's states: that inside of ZeRO-1's, or the same."""
    return getattr(optimizer, "optim", optimizer)


def groups_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of the optimizer's groups in a whole state, with the `names` of their parameters."""
    return [{**group, "names": own} for group, own in zip(state["optimizer"]["param_groups"], state["names"], strict=True)]


def optimizer_groups(trainer: Training) -> list[dict[str, Any]]:
    """The options of the optimizer's groups, with the `names` of their parameters."""
    names = {id(weight): name for name, weight in trainer.module.named_parameters()}
    return [
        {option: value for option, value in group.items() if option != "params"}
        | {"names": [names[id(weight)] for weight in group["params"]]}
        for group in trainer.optimizer.param_groups
    ]


def other_entries(module: torch.nn.Module) -> dict[str, Any]:
    """What a module's state_dict has beside its parameters, such as buffers: each rank's own. It keeps the versions of the modules."""
    weights, entries = {id(weight) for weight in module.parameters()}, module.state_dict(keep_vars=True)
    for name in [name for name, value in entries.items() if id(value) in weights]:
        del entries[name]
    return entries


def versioned(entries: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """Entries for `module.load_state_dict`. If they do not record the versions of modules (`_version`), they get those of this module.

    A state_dict has them as `_metadata`. torch takes entries without versions for old ones, which some modules convert or refuse.
    """
    if hasattr(entries, "_metadata"):
        return entries
    named: Any = OrderedDict(entries)
    named._metadata = getattr(module.state_dict(), "_metadata", None)
    return named  # type: ignore[no-any-return]


def other_names(module: torch.nn.Module) -> dict[str, str]:
    """The further names of parameters that two modules share, as its state_dict has them, and the first name of each."""
    first = {id(weight): name for name, weight in module.named_parameters()}
    names = {name: first.get(id(value), name) for name, value in module.state_dict(keep_vars=True).items()}
    return {name: other for name, other in names.items() if name != other}


def parts_to_write(trainer: Training) -> tuple[dict[Key, Part], dict[Key, Any]]:
    """The parts of tensors, and the other values, that this rank writes; what several ranks hold, only the first of them writes.

    Raises:
        TaskError: a state of the optimizer cannot be put together from the ranks' parts.
    """
    parts, values = dict[Key, Part](), dict[Key, Any]()
    weights = dict(trainer.module.named_parameters())
    for section, tensors in (("module", weights), ("ema", trainer.averages)):
        for name, value in tensors.items():
            part = _part(value, dtensor_spec(value) or dtensor_spec(weights[name]))
            if _writes(trainer, weights[name]):
                parts[section, name, ""] = part
    shares = trainer.spec.parallel == "zero1"
    for name, weight, states in _states(trainer):
        for state, value in states.items():
            key = ("optimizer", name, state)
            if not isinstance(value, Tensor):
                if _writes(trainer, None, holder=shares):
                    values[key] = value
                continue
            sharded = is_dtensor(value) or value.shape == local_part(weight).shape
            if not sharded and dtensor_spec(weight) is not None and value.numel() > 1:
                raise TaskError(
                    f"checkpoint_every= with {type(trainer.optimizer).__name__}: its state {state!r} of {name} has the shape "
                    f"{tuple(value.shape)}, this rank's part of the parameter {tuple(local_part(weight).shape)}: a checkpoint cannot "
                    'put that together again; try parallel="ddp", or an optimizer such as adamw'
                )
            if _writes(trainer, weight if sharded else None, holder=shares):
                parts[key] = _part(value, (dtensor_spec(value) or dtensor_spec(weight)) if sharded else None)
    return {key: part for key, part in parts.items() if part.tensor.numel() or not math.prod(part.shape)}, values


def _states(trainer: Training) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """The optimizer's states on this rank: the parameter's name, the parameter as the optimizer has it, and the states by name."""
    states = local_optimizer(trainer.optimizer).state_dict()["state"]
    for index, (name, weight) in enumerate(_optimized(trainer)):
        if states.get(index):
            yield name, weight, states[index]


def _optimized(trainer: Training) -> list[tuple[str, Tensor]]:
    """The parameters of this rank's optimizer by the numbers that its state_dict gives them, and their names."""
    names = {id(weight): name for name, weight in trainer.module.named_parameters()}
    groups = local_optimizer(trainer.optimizer).param_groups
    return [(names[id(weight)], weight) for group in groups for weight in group["params"]]


def _part(value: Tensor, spec: Any) -> Part:
    part = local_part(value.detach())
    if spec is None:
        return Part(part, tuple(part.shape), (0,) * part.dim())
    return Part(part, tuple(spec.shape), local_region(spec)[0])


def _writes(trainer: Training, weight: Tensor | None, *, holder: bool = False) -> bool:
    """Does this rank write what it holds of a parameter, or of something that is not sharded? `holder`: no other replica has it."""
    if trainer.spec.local_sgd != "none":
        return True
    layout, spec = trainer.layout, None if weight is None else dtensor_spec(weight)
    tensor_rank = layout.tensor.get_local_rank() if layout.tensor else 0
    if spec is None:
        return (holder or not layout.readers.rank) and not tensor_rank
    axes = spec.mesh.mesh_dim_names or ("shard",)
    first = all(not at for at, placement in zip(spec.mesh.get_coordinate(), spec.placements, strict=True) if placement.is_replicate())
    of_data = axes != ("tensor",) or holder or not layout.readers.rank
    return first and of_data and ("tensor" in axes or not tensor_rank)


class Source:
    """Tensors by name in a checkpoint, whichever ranks wrote it."""

    def __init__(self, state: Mapping[str, Any], path_of: Callable[[int], Path], place: tuple[int, int] | None = None) -> None:
        """Nothing is read yet.

        Args:
            path_of: the file of a rank, verified.
            place: rank and number of ranks, for whose parameters it reads where each had its own (`local_sgd`); None = those of rank 0.

        Raises:
            UnusableCheckpointError: one file of an earlier workbench, which does not name the parameters of the optimizer; or each rank
                had parameters of its own, and there were more or fewer of them.
        """
        self._path_of, self._opened = path_of, dict[int, dict[str, Any]]()
        self._shards: Sequence[Mapping[str, Any]] = state.get("shards") or ()
        self.imported = bool(state.get("imported"))
        """Did another program write it?"""
        self._in_stages = state.get("layout", {}).get("pipeline_parallel", 1) > 1
        self._pieces: dict[Key, list[tuple[int | Tensor, tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self.values: dict[Key, Any] = {}
        self.groups: list[dict[str, Any]] = []
        self._other: dict[str, Any] = {}
        if self._shards:
            self.groups = state["optimizer"]["groups"]
            apart, (own, count) = has_own_parameters(state), place or (0, len(self._shards))
            if apart and count != len(self._shards):
                raise UnusableCheckpointError(
                    f"with local_sgd each of its {len(self._shards)} ranks has parameters of its own, and now there are {count}", "foreign"
                )
            for number, shard in enumerate(self._shards):
                if apart and number != own:
                    continue
                self.values |= shard["values"]
                for key, (shape, offset, size) in shard["parts"].items():
                    self._shapes[key] = tuple(shape)
                    self._pieces[key].append((number, tuple(offset), tuple(size)))
        else:
            self._take_whole(state)
        self.states: dict[str, list[str]] = defaultdict(list)
        """The optimizer's states of a parameter."""
        for section, name, kind in (*self._shapes, *self.values):
            if section == "optimizer":
                self.states[name].append(kind)

    def _take_whole(self, state: Mapping[str, Any]) -> None:
        if "names" not in state:
            raise UnusableCheckpointError('an earlier workbench wrote it: it can be loaded with parallel="ddp" only', "foreign")
        names = dict(enumerate(name for group in state["names"] for name in group))
        tensors: dict[Key, Any] = {("module", name, ""): value for name, value in state["module"].items()}
        tensors |= {("ema", name, ""): value for name, value in state.get("ema", {}).items()}
        for index, states in state["optimizer"]["state"].items():
            tensors |= {("optimizer", names[index], kind): value for kind, value in states.items()}
        for key, value in tensors.items():
            if isinstance(value, Tensor):
                self._shapes[key] = tuple(value.shape)
                self._pieces[key].append((value, (0,) * value.dim(), tuple(value.shape)))
            elif key[0] == "optimizer":
                self.values[key] = value
        self.groups = groups_of(state)
        self._other = state["module"]

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole tensors of a section by name."""
        return {name: shape for (of, name, _), shape in self._shapes.items() if of == section}

    def sizes(self) -> dict[Key, tuple[int, int]]:
        """How many values there are of each tensor, and how many it has."""
        return {
            key: (sum(math.prod(length) for _, _, length in self._pieces[key]), math.prod(shape)) for key, shape in self._shapes.items()
        }

    def shape(self, key: Key) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return self._shapes[key]

    def other(self, rank: int) -> dict[str, Any]:
        """What a rank's module had beside parameters; of a rank that there was not, what rank 0 had; of other stages, what those had."""
        if not self._shards:
            return self._other
        if self._in_stages:
            numbers = [*reversed(range(len(self._shards))), *([rank] if rank < len(self._shards) else [])]
            return _merged([self._open(number)["other"] for number in numbers])
        entries: dict[str, Any] = self._open(rank if rank < len(self._shards) else 0)["other"]
        return entries

    def compression(self, rank: int) -> dict[str, Any] | None:
        """What PowerSGD kept between two steps on a rank; None = it did not compress."""
        return self._open(rank).get("compression") if rank < len(self._shards) else None

    def same(self) -> dict[str, str]:
        """The further names of parameters that two modules share, and their first names; files of an earlier workbench have none."""
        return {name: first for number in range(len(self._shards)) for name, first in self._open(number).get("same", {}).items()}

    def read(self, key: Key, spec: Any = None) -> Tensor:
        """A tensor, or what a rank holds of it that shards it so.

        Raises:
            UnusableCheckpointError: a part of it is missing.
        """
        shape = self._shapes[key]
        begin, size = ((0,) * len(shape), shape) if spec is None else local_region(spec)
        wanted: Tensor | None = None
        got = 0
        for source, offset, length in self._pieces[key]:
            low = [max(a, b) for a, b in zip(begin, offset, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(begin, size, offset, length, strict=True)]
            empty = any(a >= b for a, b in zip(low, high, strict=True))
            if empty and wanted is not None:
                continue
            piece = source if isinstance(source, Tensor) else self._open(source)["parts"][key]
            wanted = torch.zeros(size, dtype=piece.dtype) if wanted is None else wanted
            if not empty:
                at = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
                wanted[at].copy_(piece[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))])
                got += math.prod(b - a for a, b in zip(low, high, strict=True))
        if wanted is None or got != math.prod(size):
            raise UnusableCheckpointError(
                f"it is partial: of {' '.join(filter(None, key))} it has {got:,} of {math.prod(size):,} values here"
            )
        return wanted

    def _open(self, number: int) -> dict[str, Any]:
        """A rank's file, mapped into memory: only what is used is read. Its checksum was compared before."""
        if number not in self._opened:
            self._opened[number] = checkpoint_file.load_part(self._path_of(number))
        return self._opened[number]


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries of state_dicts as one, with the versions of the modules if all have them; of a name that several have, the last counts."""
    merged: Any = OrderedDict(item for part in parts for item in part.items())
    versions: list[Any] = [getattr(part, "_metadata", None) for part in parts]
    if None not in versions:
        merged._metadata = {name: version for each in versions for name, version in each.items()}
    return merged  # type: ignore[no-any-return]


def has_own_parameters(state: Mapping[str, Any]) -> bool:
    """Has each rank parameters of its own in a checkpoint, between two averages of `local_sgd`?"""
    return bool(state.get("shards")) and (state.get("spec") or {}).get("local_sgd", "none") != "none"


def whole_tensors(state: Mapping[str, Any], path_of: Callable[[int], Path], *, average: bool = False) -> dict[str, Tensor]:
    """The weights and buffers in a checkpoint by their names in the module's state_dict; none without averages.

    Where each rank has parameters of its own, they are the mean over the ranks, as the training itself averages them.

    Args:
        state: content of the checkpoint file.
        path_of: the file of a rank, verified.
        average: averaged weights in the place of the weights.
    """
    if state.get("shards"):
        source = Source(state, path_of)
        count = len(state["shards"])
        every = [Source(state, path_of, (rank, count)) for rank in range(count)] if has_own_parameters(state) else [source]
        means = {name: _mean([one.read(("module", name, "")) for one in every]) for name in source.shapes("module")}
        entries = {**means, **source.other(0)}
        entries |= {name: entries[first] for name, first in source.same().items() if first in entries}
        averages = {name: source.read(("ema", name, "")) for name in source.shapes("ema")}
    else:
        entries, averages = state["module"], state.get("ema", {})
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if not average:
        return tensors
    names = {tensors[name].data_ptr(): name for name in averages}  # of a weight that two modules share, one name has an average
    return {name: averages.get(names.get(value.data_ptr(), name), value) for name, value in tensors.items()} if averages else {}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tuple(tensors)).mean(0)


def other_shapes(mine: Mapping[str, tuple[int, ...]], its: Mapping[str, tuple[int, ...]]) -> str:
    """The first weight of a model that a checkpoint lacks or has in another shape; "" = there is none."""
    for name, shape in mine.items():
        if name not in its:
            return f"it is of another model: it has no {name}"
        if its[name] != shape:
            return f"it is of another model: its {name} has the shape {its[name]}, this model's has {shape}"
    return ""


def difference(trainer: Training, source: Source) -> str:
    """In what a checkpoint differs from the model of a trainer; "" = it can be loaded."""
    mine = {name: tuple((dtensor_spec(weight) or weight).shape) for name, weight in trainer.module.named_parameters()}
    its, entries = source.shapes("module"), source.other(0)
    if other := other_shapes(mine, its):
        return other
    known = {*mine, *trainer.module.state_dict(), *trainer.entries_elsewhere}
    if strange := [name for name in (*its, *entries) if name not in known]:
        return f"it is of another model: this one has no {strange[0]}"
    for key, (has, size) in source.sizes().items():
        if has != size:
            return f"it is partial: of {' '.join(filter(None, key))} it has {has:,} of {size:,} values"
    grouped = {name for group in source.groups for name in group["names"]}
    if missing := [name for group in optimizer_groups(trainer) for name in group["names"] if name not in grouped]:
        return f"it is of another optimizer, which did not have {missing[0]}"
    if trainer.averages and not source.shapes("ema").keys() >= trainer.averages.keys():
        return f"it has no averaged weights, and ema={trainer.spec.ema} goes on with them; leave ema out"
    return _other_states(trainer, source) if source.imported and source.states else ""


def _other_states(trainer: Training, source: Source) -> str:
    """In what imported states differ from those that the optimizer has after a step; "" = it can go on with them."""
    optimizer = local_optimizer(trainer.optimizer)
    optimizer = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
    groups = [group for group in local_optimizer(trainer.optimizer).param_groups for _ in group["params"]]
    known: dict[tuple[int, int], dict[str, bool] | None] = {}
    for (name, weight), group in zip(_optimized(trainer), groups, strict=True):
        at = id(group), weight.dim()
        if at not in known:
            known[at] = states_after_a_step(optimizer, group, weight.dim())
        needed = known[at]
        if needed is None:
            continue
        keys: list[Key] = [("optimizer", name, kind) for kind in source.states.get(name, ())]
        has = {key[2] for key in keys if key not in source.values or source.values[key] is not None}
        if not has and needed and weight.requires_grad:
            return f"it has no states of {name}, and has those of other parameters. {WEIGHTS_ALONE}"
        if other := other_kinds(has, needed, type(optimizer).__name__):
            return other
        shape = tuple((dtensor_spec(weight) or weight).shape)
        for key in keys:
            if needed.get(key[2]) and key not in source.values and source.shape(key) != shape:
                return f"it is of another model: its {key[2]} of {name} has the shape {source.shape(key)}, the parameter has {shape}"
    return ""


def other_kinds(has: Collection[str], needed: Collection[str], optimizer: str) -> str:
    """Why states of these kinds are of another optimizer; "" = they are not, or there are none."""
    text = f"it is of another optimizer: it has {', '.join(sorted(has))}, and {optimizer}"
    if has and (missing := sorted(set(needed) - set(has))):
        return f"{text} needs {', '.join(missing)}. {WEIGHTS_ALONE}"
    return f"{text} uses none of them. {WEIGHTS_ALONE}" if has and not needed else ""


def states_after_a_step(optimizer: Optimizer, group: Mapping[str, Any], dims: int) -> dict[str, bool] | None:
    """The states that an optimizer gives to a parameter of so many dimensions, and whether they have its shape.

    It is found out with a parameter of a few numbers and the options of a group. None = the class cannot be used like this.
    """
    parameter = torch.nn.Parameter(torch.ones(tuple(range(2, 2 + dims))))
    parameter.grad = torch.ones_like(parameter)
    taken, plain = inspect.signature(type(optimizer)).parameters, dict.fromkeys((*IMPLEMENTATIONS, "capturable"), False)
    defaults, options = (
        {name: plain.get(name, value.item() if isinstance(value, Tensor) else value) for name, value in each.items() if name != "params"}
        for each in (optimizer.defaults, group)
    )
    try:
        probe: Any = type(optimizer)
        probe = probe([{**options, "params": [parameter]}], **{name: value for name, value in defaults.items() if name in taken})
        probe.step()
        states = probe.state_dict()["state"].get(0, {})
        return {kind: getattr(value, "shape", None) == parameter.shape for kind, value in states.items() if value is not None}
    except Exception:  # of a class of the task: it may need a closure, other arguments, or its own device
        return None


def refuse_import(state: Mapping[str, Any], why: UnusableCheckpointError) -> None:
    """Say why a run cannot begin with what was imported: it has no other checkpoint. Does nothing for a checkpoint of a run.

    Raises:
        TaskError: it was imported.
    """
    if folder := state.get("imported"):
        raise TaskError(f"the run cannot begin with {folder}: {why}. No step was taken") from why


@torch.no_grad()
def load(trainer: Training, source: Source) -> None:
    """Load the module, the optimizer's states and the averages into a trainer, however it is sharded.

    Raises:
        UnusableCheckpointError: a part is missing.
    """
    weights = dict(trainer.module.named_parameters())
    for section, tensors in (("module", weights), ("ema", trainer.averages)):
        for name, value in tensors.items():
            local_part(value).copy_(source.read((section, name, ""), dtensor_spec(weights[name])))
    state: Any = trainer.module.state_dict()
    other = source.other(trainer.ranks.rank)
    parameters = state.keys() - other_entries(trainer.module).keys()  # of two modules that share one: two names
    state.update({name: value for name, value in other.items() if name not in parameters})
    state._metadata = getattr(other, "_metadata", getattr(state, "_metadata", None))
    trainer.module.load_state_dict(state, strict=False)  # with the parameters: modules may convert those of an older version
    _load_optimizer(trainer, source)


def _load_optimizer(trainer: Training, source: Source) -> None:
    options = [next(its for its in source.groups if group["names"][0] in its["names"]) for group in optimizer_groups(trainer)]
    options = [{name: value for name, value in group.items() if name not in ("names", "params", *IMPLEMENTATIONS)} for group in options]
    inner, states = local_optimizer(trainer.optimizer), dict[int, dict[str, Any]]()
    for index, (name, weight) in enumerate(_optimized(trainer)):
        spec, states[index] = dtensor_spec(weight), {}
        for kind in source.states.get(name, ()):
            key = ("optimizer", name, kind)
            if key in source.values:
                states[index][kind] = source.values[key]
                continue
            sharded = spec is not None and source.shape(key) == tuple(spec.shape)
            value = source.read(key, spec if sharded else None)
            states[index][kind] = from_local_part(value.to(local_part(weight).device), spec) if sharded and is_dtensor(weight) else value
    numbers = iter(range(len(states)))
    groups = [
        {**group, **new, "params": [next(numbers) for _ in group["params"]]} for group, new in zip(inner.param_groups, options, strict=True)
    ]
    inner.load_state_dict({"state": {index: each for index, each in states.items() if each}, "param_groups": groups})
    for group, new in zip(trainer.optimizer.param_groups, options, strict=True):
        group.update(new)
