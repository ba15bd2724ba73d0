"""Writes a checkpoint as a directory of torch.distributed.checkpoint (DCP), and reads such directories without executing what they hold.

The index of a directory, `.metadata`, is a pickle. Here nothing that it names is imported or called: of the classes of DCP's metadata only
the fields are read, from which torch's own classes are made anew, and an index that names anything else is refused. The values are read by
torch's `FileSystemReader` with `weights_only`.
"""

import errno
import inspect
import io
import math
import pickle
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo  # the latter is underscored, and in every index
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from workbench.core import run_directory
from workbench.runs.errors import is_out_of_memory
from workbench.runs.export import DCP_INDEX
from workbench.runs.spec import IMPLEMENTATIONS, RunSpec
from workbench.train import checkpoint_file
from workbench.train.checkpoint_file import UnusableCheckpointError
from workbench.train.named_state import WEIGHTS_ALONE, Key, Source, has_own_parameters, other_kinds
from workbench.train.optimizers import build_optimizer

_CLASSES = frozenset(
    {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "PosixPath", "WindowsPath"),
    }
)
"""What an index may name beside dtypes and sizes; stand-ins take their place."""
_MODULES = frozenset(
    {
        *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "torch.serialization"),
        *("torch.distributed._shard.sharded_tensor.metadata", "pathlib", "pathlib._local"),
    }
)
_ALONE = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
"""This process reads and writes alone; earlier versions of torch do that where there is no process group, and else all ranks take part."""
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError),
    *(OverflowError, MemoryError, RecursionError),
)
"""What reading a damaged index raises; MemoryError, too, since a damaged size can ask for any amount."""
_PREFIXES = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What DDP and torch.compile put before the names of parameters."""
_OPTIMIZERS = ("optimizer", "optim", "opt")
"""Names under which scripts keep the optimizer's state_dict."""
_USUAL = ("model", "module", "state_dict")
"""Names under which scripts keep the model's state_dict."""


def write(tensors: Mapping[str, Tensor], state: Mapping[str, Any], source: Source, folder: Path) -> None:
    """Write a checkpoint as scripts save it: "model" and "optimizer" as `get_state_dict` gives them, and what else has plain values.

    Args:
        tensors: weights and buffers by name, whole.
        state: content of the checkpoint.
        source: where the tensors come from, by name.
        folder: directory of the checkpoint.
    """
    entries: dict[str, Any] = {"model": dict(tensors), "step": state["step"]}
    if not has_own_parameters(state):  # each rank has states of its own, and they have no mean
        states = {name: {kind: _state(source, ("optimizer", name, kind)) for kind in kinds} for name, kinds in source.states.items()}
        entries["optimizer"] = {"state": states, "param_groups": _groups(source.groups)}
    entries["ema"] = {name: source.read(("ema", name, "")) for name in source.shapes("ema")}
    entries |= {name: state[name] for name in ("scheduler", "scaler", "spec") if state.get(name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process only
        save(entries, checkpoint_id=folder, **_ALONE)


def _state(source: Source, key: Key) -> Any:
    return source.values[key] if key in source.values else source.read(key)


def _groups(groups: Collection[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of an optimizer with names of parameters; those of the stages of a pipeline are one again."""
    merged: list[dict[str, Any]] = []
    for group in groups:
        options = {name: value for name, value in group.items() if name not in ("names", "params")}
        same = next((each for each in merged if {**each, "params": 0} == {**options, "params": 0}), None)
        if same is None:
            merged.append(same := {**options, "params": []})
        same["params"] += [name for name in group["names"] if name not in same["params"]]
    return merged


class Directory:
    """What a directory of DCP holds, as its index says.

    Attributes:
        weights: keys of the tensors of the model's state_dict by name.
        states: keys of the optimizer's states by parameter and state; none if it holds no optimizer.
        nested: those of them, as parameter and state, that are lists or dicts.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            UnusableCheckpointError: it names something else than the classes of an index, is damaged, or what it says is not there; or
                there are several models or optimizers.
            FileNotFoundError: there is none.
        """
        self._folder = folder
        with open(folder / DCP_INDEX, "rb") as file:
            try:
                self._index = _metadata(_IndexReader(file).load().state)
                self._check_files()
                head, self.states, self.nested = self._states()
                self.weights = self._model(head)
                self._remove_prefix()
            except _DAMAGE as error:
                if isinstance(error, UnusableCheckpointError):
                    raise
                raise UnusableCheckpointError(f"its index, {DCP_INDEX}, cannot be read: {error!r:.100}") from error

    def _states(self) -> tuple[tuple[str, ...] | None, dict[tuple[str, str], str], list[tuple[str, str]]]:
        """Where the optimizer is, if there is any, the keys of its states, and those of them that are lists or dicts.

        It is where options of groups are, numbers and texts: a module may be called param_groups as well, but has tensors. Without them,
        its name tells.
        """
        entries = self._index.state_dict_metadata
        heads = set[tuple[str, ...]]()
        for key, entry in entries.items():
            path = self._path(key)
            for at, part in enumerate(path):
                option = f"{part}.".startswith("param_groups.") and not isinstance(entry, TensorStorageMetadata)
                if option or (f"{part}.".startswith("state.") and at and path[at - 1] in _OPTIMIZERS):
                    heads.add(tuple(path[:at]))
        if len(heads) > 1:
            found = ", ".join(sorted(".".join(head) for head in heads))
            raise UnusableCheckpointError(f"it has several optimizers: {found}", "foreign")
        states, nested = dict[tuple[str, str], str](), list[tuple[str, str]]()
        if not heads:
            return None, states, nested
        head = heads.pop()
        for key in entries:
            path = self._path(key)
            if not _is_of_optimizer(path, head) or not f"{path[len(head)]}.".startswith("state."):
                continue
            rest = path[len(head) + 1 :]
            if not rest:  # flattened: "state.0.weight.exp_avg"; an empty dict has a key in directories of torch 2.3
                name, _, kind = path[-1].removeprefix("state").removeprefix(".").rpartition(".")
                rest = [name, kind] if kind else []
            if len(rest) > 1:
                states[rest[0], ".".join(rest[1:])] = key
            nested += [(rest[0], rest[1])] if len(rest) > 2 else []
        return head, states, nested

    def _path(self, key: str) -> list[str]:
        """Where a value was in the nested dict that was saved."""
        paths = self._index.planner_data
        return [str(part) for part in (isinstance(paths, dict) and paths.get(key)) or (key,)]

    def _model(self, optimizer: tuple[str, ...] | None) -> dict[str, str]:
        sections: dict[tuple[str, ...], dict[str, str]] = {}
        for key, entry in self._index.state_dict_metadata.items():
            *section, name = path = self._path(key)
            if isinstance(entry, TensorStorageMetadata) and (optimizer is None or not _is_of_optimizer(path, optimizer)):
                sections.setdefault(tuple(section), {})[name] = key
        optimized = {name for name, _ in self.states}
        candidates = [section for section, names in sections.items() if _prefix(optimized, names) is not None]
        if len(candidates) != 1:
            candidates = [section for section in candidates or sections if section and section[-1] in _USUAL]
        if len(candidates) == 1:
            return sections[candidates[0]]
        found = ", ".join(repr(".".join(section)) for section in sections) or "none"
        raise UnusableCheckpointError(f"which of its entries is the model? It has tensors in {found}; save it as 'model'", "foreign")

    def _remove_prefix(self) -> None:
        """Give states the names that the weights have, if a wrapper was around the model where those were taken."""
        length = len(_prefix({name for name, _ in self.states}, self.weights) or "")
        self.states = {(name[length:], kind): key for (name, kind), key in self.states.items()}

    def _check_files(self) -> None:
        """Compare the index with the files."""
        sizes = dict[str, int]()
        for info in self._index.storage_data.values():
            name = info.relative_path
            if name not in sizes:
                if Path(name).name != name or name == "..":
                    raise UnusableCheckpointError(f"its index names a file elsewhere: {name!r:.80}", "foreign")
                try:
                    sizes[name] = (self._folder / name).stat().st_size
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                        raise
                    raise UnusableCheckpointError(f"{name:.80} is missing", "partial") from None
            if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
                raise UnusableCheckpointError(f"{name} has {sizes[name]:,} bytes; its end is missing")
        for key, entry in self._index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._check_chunks(key, entry)

    def _check_chunks(self, key: str, entry: TensorStorageMetadata) -> None:
        """Compare the parts of a tensor with its size, with each other, and with the bytes that are stored."""
        for chunk in entry.chunks:
            bounds = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if not all(0 <= begin <= begin + size <= whole for begin, size, whole in bounds):
                raise UnusableCheckpointError(f"its index is damaged: a part of {key} lies outside of it")
        chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
        has, size = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(entry.size)
        if _overlap(chunks):
            raise UnusableCheckpointError(f"its index is damaged: parts of {key} overlap")
        if has != size:
            raise UnusableCheckpointError(f"it has {has:,} of {size:,} values of {key}", "partial")
        for chunk in chunks:
            info = self._index.storage_data.get(MetadataIndex(key, chunk.offsets))
            if info is None:
                raise UnusableCheckpointError(f"nothing is stored of {key} from {', '.join(map(str, chunk.offsets))}", "partial")
            needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if info.length < needed and not getattr(info, "transform_descriptors", None):  # those may compress
                raise UnusableCheckpointError(f"it stores {info.length:,} bytes of {key}, which has {needed:,} there", "partial")

    def read(self, keys: Collection[str]) -> dict[str, Any]:
        """Values by key: tensors whole, in host memory.

        Raises:
            UnusableCheckpointError: torch cannot read them, or they are other objects than tensors, numbers and strings.
            OSError, MemoryError: they could not be read now.
        """
        entries = self._index.state_dict_metadata
        values: dict[str, Any] = {}
        for key in keys:
            entry = entries[key]
            values[key] = io.BytesIO()
            if isinstance(entry, TensorStorageMetadata):
                try:
                    values[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise MemoryError(f"{key} of {tuple(entry.size)} values does not fit into memory") from error
                    raise UnusableCheckpointError(f"torch cannot read it: {key} has the dtype {entry.properties.dtype}") from error
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is one process only
                load(values, storage_reader=_Reader(self._folder, self._index), planner=planner, **_ALONE)
        except CheckpointException as error:
            why = next((each[0] for each in error.failures.values()), error)
            if isinstance(why, OSError | MemoryError):
                raise why from None
            raise UnusableCheckpointError(f"torch cannot read it: {why!s:.200}") from error
        return values


def _prefix(optimized: Collection[str], names: Collection[str]) -> str | None:
    """What wrappers put before the names of a model's parameters; None = they are of another model."""
    return next(
        (prefix for prefix in _PREFIXES if all(name.startswith(prefix) and name[len(prefix) :] in names for name in optimized)), None
    )


def _is_of_optimizer(path: Sequence[str], head: tuple[str, ...]) -> bool:
    """Is a value in the section of the optimizer, as its state or an option of its groups?"""
    begins = tuple(path[: len(head)]) == head and len(path) > len(head)
    return begins and f"{path[len(head)]}.".startswith(("state.", "param_groups."))


def _overlap(chunks: Collection[ChunkStorageMetadata]) -> bool:
    """Do parts of a tensor overlap? They are compared along the dimension in which most of them begin at different places."""
    dims = len(next(iter(chunks)).sizes) if chunks else 0
    along = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if along is None:
        return len(chunks) > 1
    beside: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        beside = [other for other in beside if other.offsets[along] + other.sizes[along] > chunk.offsets[along]]
        for other in beside:
            both = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(begin < its + length and its < begin + size for begin, size, its, length in both):
                return True
        beside.append(chunk)
    return False


class _IndexReader(pickle.Unpickler):
    """Unpickles an index into stand-ins that keep what they are given."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            return tuple if name == "Size" else dict
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if module in _MODULES and name in _CLASSES:
            return type(name, (_StandIn,), {})  # a new one: a pickle can set what a class has
        raise UnusableCheckpointError(
            f"its index, {DCP_INDEX}, names {module}.{name}, which no index of torch.distributed.checkpoint does. "
            "Nothing of it was executed",
            "foreign",
        )


class _StandIn:
    def __init__(self, *given: Any) -> None:
        self.state: Any = given

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _metadata(index: Mapping[str, Any]) -> Metadata:
    entries: dict[str, Any] = {}
    for key, entry in index["state_dict_metadata"].items():
        if type(entry).__name__ != "TensorStorageMetadata":
            entries[str(key)] = BytesStorageMetadata()
            continue
        dtype, chunks = entry.state["properties"].state[0], [chunk.state for chunk in entry.state["chunks"]]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{key} has the dtype {dtype!r:.40}")
        entries[str(key)] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(entry.state["size"]),
            chunks=[ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in chunks],
        )
    places = {MetadataIndex(**at.state): _StorageInfo(**info.state) for at, info in index["storage_data"].items()}
    return Metadata(entries, planner_data=index.get("planner_data"), storage_data=places)


class _Reader(FileSystemReader):
    """Reads with an index that was read before."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index


class _Planner(DefaultLoadPlanner):
    """Loads what is no tensor with `weights_only`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model's state_dict in a directory of DCP, by name.

    Raises:
        UnusableCheckpointError: it cannot be used.
    """
    directory = Directory(folder)
    values = directory.read(directory.weights.values())
    return {name: values[key] for name, key in directory.weights.items()}


def begin_with(folder: Path, run_dir: Path, spec: RunSpec) -> None:
    """Give a new run the weights of a directory of DCP, and the states of its optimizer if there are any, as a checkpoint after 0 steps.

    Args:
        folder: directory of the checkpoint.
        run_dir: run directory of the new run.
        spec: of the run: the options of its optimizer, its schedule and its order of samples hold.

    Raises:
        UnusableCheckpointError: it cannot be used, or its states are of another optimizer.
        OSError, MemoryError: it could not be read now, or the disk is full.
    """
    directory = Directory(folder)
    _check_states(directory, spec)
    values = directory.read([*directory.weights.values(), *directory.states.values()])
    weights = {name: values[key] for name, key in directory.weights.items()}
    sections = ("module", "ema") if spec.ema else ("module",)
    named: dict[Key, Any] = {(section, name, ""): value for section in sections for name, value in weights.items()}
    named |= {("optimizer", name, kind): values[key] for (name, kind), key in directory.states.items()}
    parts = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    shard = {
        "parts": {key: (tuple(value.shape), (0,) * value.dim(), tuple(value.shape)) for key, value in parts.items()},
        "values": {key: value for key, value in named.items() if key not in parts},
    }
    checkpoints = run_dir / run_directory.CHECKPOINTS
    checkpoints.mkdir()
    checksum = checkpoint_file.save({"parts": parts, "other": weights}, checkpoints / "step00000000.rank0.pt")
    what = "weights and states of the optimizer" if directory.states else "weights"
    state = {"step": 0, "module": {}, "optimizer": {"groups": [{"names": list(weights)}]}, "scheduler": {}, "scaler": {}}
    state |= {
        "origin": f"it took {what} from {folder.absolute()}",
        "imported": str(folder.absolute()),
        "shards": [{**shard, "crc32": checksum}],
    }
    checkpoint_file.save(state, checkpoints / "step00000000.pt")


def _check_states(directory: Directory, spec: RunSpec) -> None:
    for name, kind in directory.nested:
        raise UnusableCheckpointError(
            f"the state {kind} of {name} is a list or a dict, of which nothing is read here. {WEIGHTS_ALONE}", "foreign"
        )
    strange = [name for name, _ in directory.states if name not in directory.weights]
    if strange and all(name.isdecimal() for name in strange):
        raise UnusableCheckpointError(
            "the states of its optimizer have numbers in the place of names, as optimizer.state_dict() gives them: save what "
            "torch.distributed.checkpoint.state_dict.get_state_dict gives",
            "foreign",
        )
    if strange:
        raise UnusableCheckpointError(
            f"its optimizer has states of {strange[0]}, which is no name in its model, such as {next(iter(directory.weights))}. "
            f"{WEIGHTS_ALONE}",
            "foreign",
        )
    if not directory.states or spec.optimizer in (None, *IMPLEMENTATIONS):
        return
    probe = nn.Linear(2, 2)
    optimizer = build_optimizer(probe, spec.optimizer, override=spec.optimizer)
    probe(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    needed = {kind for states in optimizer.state_dict()["state"].values() for kind, value in states.items() if value is not None}
    if other := other_kinds({kind for _, kind in directory.states}, needed, spec.optimizer):
        raise UnusableCheckpointError(other, "foreign")
