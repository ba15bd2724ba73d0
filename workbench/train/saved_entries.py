"""Reads what a script has saved as entries, tensors and numbers by their keys, and compares two results bit for bit."""

import contextlib
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._weights_only_unpickler import _get_allowed_globals  # underscored, and the same since torch 2.6

from workbench.train.checkpoint_file import plain
from workbench.train.fingerprints import digest


def entries_of(path: Path) -> dict[str, Any]:
    """The tensors, numbers and texts of a file of `torch.save` or safetensors, by their keys; another file is one entry, its bytes.

    NumPy's arrays are tensors. Objects of other classes are not made, and nothing of them is executed: their entries are what their
    pickle gives them. Without the package safetensors its files are bytes, too.

    Raises:
        FileNotFoundError: it is not there.
    """
    if path.suffix == ".safetensors":
        with contextlib.suppress(ImportError):
            return _tensors_of(path)
    if path.read_bytes()[:4] != b"PK\3\4":
        return {path.name: path.read_bytes()}
    entries: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as file:
            scripted = any(name.endswith("/constants.pkl") for name in file.namelist())  # torch.load would give it to torch.jit
        if scripted:
            return {path.name: path.read_bytes()}
        unpickler: Any = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
        parts = list(_flat(torch.load(path, map_location="cpu", pickle_module=unpickler, weights_only=False), ""))
    except Exception:  # damaged, or no file of torch.save
        return {path.name: path.read_bytes()}
    for name, part in parts:
        while name in entries:  # {"a.b": …, "a": {"b": …}}
            name += "'"
        entries[name] = part
    return entries


def _tensors_of(path: Path) -> dict[str, Any]:
    """Those of a file of safetensors, and the texts in its head; the bytes of one that is damaged."""
    import safetensors

    try:
        with safetensors.safe_open(path, "pt") as file:
            texts = {f"metadata.{key}": text for key, text in sorted((file.metadata() or {}).items())}
            return {name: file.get_tensor(name) for name in sorted(file.keys())} | texts
    except safetensors.SafetensorError:
        return {path.name: path.read_bytes()}


class _Object:
    """Stands for an object of a class that is not loaded, with what its pickle gives it."""

    def __new__(cls, *given: Any, **named: Any) -> "_Object":
        made = object.__new__(cls)
        made.content = {**dict(enumerate(given)), **named}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.content: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:
        self.content |= state if isinstance(state, dict) else {"state": state}

    def __call__(self, *given: Any) -> "_Object":
        return _Object(self, *given)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content[key] = value

    def append(self, value: Any) -> None:
        self.content[len(self.content)] = value

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)


_NUMPY: Mapping[str, Any] = {
    "_reconstruct": np.zeros(0).__reduce__()[0],
    "scalar": np.float64(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": np.dtype,
}
"""What NumPy's pickles name."""


_PythonUnpickler: Any = pickle._Unpickler  # whose instructions can be replaced


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Knows what torch's loading with `weights_only` knows, NumPy's arrays and paths; for all else it takes stand-ins."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def load_build(self) -> None:
        """Give an object its state; a class or function, which others in this process use, gets none."""
        given = self.stack[-2]
        if isinstance(given, type) or (not isinstance(given, _Object) and callable(given)):
            raise pickle.UnpicklingError("a state for a class or function")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("__builtin__", "builtins")
        if known := _get_allowed_globals().get(f"{module}.{name}"):
            return known
        if module.partition(".")[0] == "numpy" and name in _NUMPY:
            return _NUMPY[name]
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return lambda *parts: os.path.join("", *parts)
        return type(name, (_Object,), {"__module__": module})


def _flat(value: Any, name: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    value = plain(value)
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.array(value))
        except (TypeError, ValueError):  # of texts, objects or numbers that torch does not have
            value = value.tolist()
    inside: Any = None
    if isinstance(value, _Object):
        inside = value.content.items()
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    elif isinstance(value, set | frozenset):
        inside = enumerate(sorted(value, key=repr))
    if not inside or not (value.content if isinstance(value, _Object) else value) or id(value) in above:
        yield name, f"a {type(value).__qualname__}" if isinstance(value, _Object) else value
        return
    for key, part in inside:
        yield from _flat(part, f"{name}.{key}" if name else str(key), (*above, id(value)))


def differences(expected: Mapping[str, Any], entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of the entries that differ between two results, in their order, each with the difference in words."""
    for name in {**expected, **entries}:
        if name not in entries or name not in expected:
            yield name, "missing" if name in expected else "not in the undisturbed result"
        elif text := _difference(expected[name], entries[name]):
            yield name, text


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, bytes) and isinstance(other, bytes):
        return "" if one == other else f"the files differ ({len(one):,} and {len(other):,} bytes)"
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        same = type(one) is type(other) and repr(one) == repr(other)
        return "" if same else f"{one!r:.40} and {other!r:.40}"
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return f"{_described(one)} and {_described(other)}"
    if digest(one) == digest(other):
        return ""
    if one.is_complex() or one.layout != torch.strided:
        return "values differ"
    gap, most = (one.double() - other.double()).abs(), float(one.double().abs().nan_to_num().max())
    if not bool(gap.isfinite().all()):
        return f"NaN or infinity in {int((~gap.isfinite()).sum()):,} of {gap.numel():,} values"
    return f"by {float(gap.max()):.3g} at most, of {most:.3g}"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.layout == torch.strided else f' {tensor.layout}'}"
