"""Reads what a script has saved as entries, tensors and numbers by their keys, and compares two results bit for bit."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.train.fingerprints import digest


def entries_of(path: Path) -> dict[str, Any]:
    """The tensors, numbers and texts of a file of `torch.save` or safetensors, by their keys; another file is one entry, its bytes.

    Without the package safetensors its files are bytes, too.

    Raises:
        FileNotFoundError: it is not there.
    """
    if path.suffix == ".safetensors":
        with contextlib.suppress(ImportError):
            return _tensors_of(path)
    if path.read_bytes()[:4] != b"PK\3\4":
        return {path.name: path.read_bytes()}
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # other objects are not unpickled: it may be anybody's
        return {path.name: path.read_bytes()}
    entries: dict[str, Any] = {}
    for name, part in _flat(value, ""):
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


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    inside: Any = None
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    if not inside or not len(value):
        yield name, value
        return
    for key, part in inside:
        yield from _flat(part, f"{name}.{key}" if name else str(key))


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
