"""The storage formats: one file each, found by the names of files.

A format is a subclass of `Source` and, where it can be written, a function `write(path, samples, schema)` for one shard.
"""

import glob
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.core.checks import choice
from workbench.data.manifest import MANIFEST
from workbench.data.sample import Sample
from workbench.data.source import Source
from workbench.data.storage import DataMissingError, Storage

FORMATS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "folder": ("folder", "FolderSource", ()),
    "tar": ("tar", "TarSource", (".tar",)),
    "tfrecord": ("tfrecord", "TFRecordSource", (".tfrecord", ".tfrecords")),
    "lmdb": ("lmdb", "LmdbSource", (".mdb",)),
    "parquet": ("tables", "ParquetSource", (".parquet",)),
    "parquet-untuned": ("tables", "UntunedParquetSource", ()),
    "arrow": ("tables", "ArrowSource", (".arrow", ".feather")),
    "hdf5": ("columns", "Hdf5Source", (".h5", ".hdf5")),
    "npy": ("columns", "NpySource", (".npy",)),
}
"""Name → module, class, and extensions of its files; the first extension is the one that is written."""
_BY_EXTENSION = {end: name for name, (_, _, ends) in FORMATS.items() for end in ends}
Write = Callable[..., Any]


def format_class(name: str) -> type[Source]:
    """The class that reads a format.

    Raises:
        ValueError: there is no such format.
    """
    choice("format", name, FORMATS)
    module, cls, _ = FORMATS[name]
    found: type[Source] = getattr(importlib.import_module(f"{__name__}.{module}"), cls)
    return found


def writer(name: str) -> Callable[[str, Iterable[tuple[str, Sample]], Mapping[str, str]], Any]:
    """The function that writes a shard of a format: (path, (key, sample) pairs, schema).

    Raises:
        ValueError: there is no such format.
    """
    choice("format", name, FORMATS)
    module = importlib.import_module(f"{__name__}.{FORMATS[name][0]}")
    found: Write = module.writers()[name] if hasattr(module, "writers") else module.write
    return found


def extension(name: str) -> str:
    """What the names of a format's files end with.

    Raises:
        ValueError: there is no such format.
    """
    choice("format", name, FORMATS)
    return {"parquet-untuned": ".parquet", "npy": ""}.get(name, next(iter(FORMATS[name][2]), ""))


def by_name(path: str) -> str:
    """The format that the extension of a path says; "" = none."""
    return next((name for end, name in _BY_EXTENSION.items() if path.rstrip("/").endswith(end)), "")


def find_format(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: Mapping[str, Any] | None = None) -> type[Source]:
    """The class that reads what is at a path.

    Raises:
        DataMissingError: nothing is there.
    """
    if not isinstance(path, str | os.PathLike):
        return format_class("tar")
    text, by_extension = os.fspath(path), _BY_EXTENSION
    if told := by_name(text):
        return format_class(told)
    storage = Storage(text, options)
    if storage.remote and (told := _in_manifest(storage)) in FORMATS:  # a server is asked once, and not whether it is worth to ask
        return format_class(told)
    if not storage.exists():
        close = sorted(glob.glob(f"{glob.escape(os.path.dirname(text) or '.')}/*"))[:5] if not storage.remote else []
        beside = f"; beside it are {', '.join(os.path.basename(name) for name in close)}" if close else ""
        raise DataMissingError(f"there is nothing at {text!r:.200}{beside}")
    if storage.is_file():
        raise ValueError(f"{text}: no format is known for its name; known are {', '.join(sorted(by_extension))}, or give format=")
    if not storage.remote and storage.exists(MANIFEST) and (told := _in_manifest(storage)) in FORMATS:
        return format_class(told)
    names = [name for name, _, _ in _some(storage)]
    found = {by_extension[end] for name in names if (end := os.path.splitext(name)[1]) in by_extension and not name.startswith(".")}
    if len(found) > 1:
        raise ValueError(f"{text} has files of several formats ({', '.join(sorted(found))}): give format=")
    inside = [name for folder in names[:1] if not found and not os.path.splitext(folder)[1] for name in _inside(storage, folder)]
    if inside and all(name.endswith(".npy") for name in inside):
        found.add("npy")
    return format_class(found.pop() if found else "folder")


def _inside(storage: Storage, folder: str) -> list[str]:
    """The names of files in a folder of the folder."""
    try:
        if storage.remote:
            return [about["name"] for about in storage.file_system.ls(storage.path(folder), detail=True)[:100]]
        return os.listdir(storage.path(folder))[:100]
    except OSError:
        return []


def _in_manifest(storage: Storage) -> str:
    """The format that the manifest of a folder says; "" = it has none."""
    try:
        head = storage.read(MANIFEST, 0, 1 << 16)
    except FileNotFoundError:
        return ""
    match = re.search(rb'"format": *"([a-z0-9-]+)"', head)
    return match[1].decode() if match else ""


def _some(storage: Storage) -> list[tuple[str, int, bool]]:
    """The files right below the folder, at most a thousand of them."""
    if storage.remote:
        found = storage.file_system.ls(storage.root, detail=True)
        return [(os.path.basename(about["name"].rstrip("/")), 0, False) for about in found[:1000]]
    with os.scandir(storage.root) as entries:
        return [(entry.name, 0, False) for entry, _ in zip(entries, range(1000), strict=False)]
