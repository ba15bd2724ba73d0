"""Loads a trace file into columns, from the file itself or from a cache beside it.

The cache says of which content it is: version of the format, size, time of the last change, and a hash of the beginning and the end. One
that does not fit, is damaged or was written by something else is ignored and written anew.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.core.cache import cache_folder
from workbench.traces.analysis import event_schema
from workbench.traces.analysis.columns import Columns, Label, Lane, Message, gather_columns
from workbench.traces.analysis.event_schema import NO_SHAPES, Args
from workbench.traces.analysis.reading import Reading, TraceError

TRACES = "traces"
"""Folder of a run directory."""
NAMES = (".pt.trace.json", ".pt.trace.json.gz", "trace.json", "trace.json.gz")
"""How files of traces usually end."""
OTHER_NAMES = (".json", ".json.gz")
"""How others end: whether these are traces their text tells."""
HEADER = 2**20
"""Bytes of a file in which its events begin, if it is a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A trace file that was read."""

    path: Path
    columns: Columns
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is missing of the file."""


def read_trace_file(path: Path) -> Loaded:
    """Read a file from its text.

    Raises:
        TraceError: there is no such file, it is no trace, or it has no event that can be read.
    """
    reading = Reading(path=path, words=event_schema.EVENTS)
    gathering = gather_columns(reading.batches())
    columns = gathering.columns()
    notes = list(reading.notes)
    if gathering.impossible:
        notes.append(f"{gathering.impossible:,} events have invalid times (no number, or a negative length): they are left out")
    if gathering.unpaired:
        notes.append(f"{gathering.unpaired:,} events are beginnings or ends only, which torch.profiler does not write: they are left out")
    if not len(columns):
        raise TraceError(
            f"{reading.path} has no events{f': {notes[0]}' if notes else ''}. "
            "A profiler with a schedule writes them when its active steps are over: was step() called often enough?"
        )
    rank, world_size = _ranks(reading.header.distributed)
    host = reading.header.host if isinstance(reading.header.host, str) else None
    return Loaded(
        path=path,
        columns=columns,
        rank=rank,
        world_size=world_size,
        host=host,
        devices=_devices(reading.header.devices),
        notes=tuple(notes),
    )


def files(where: Path) -> list[Path]:
    """The traces in a directory, or in the folder for them of a run directory; a file is itself.

    Raises:
        TraceError: the directory has none.
    """
    if not where.is_dir():
        return [where]
    paths = _traces_in(where) or (_traces_in(where / TRACES) if (where / TRACES).is_dir() else [])
    if not paths:
        raise TraceError(f"{where} has no traces: such files end in {' or '.join(OTHER_NAMES)}, and have traceEvents")
    return paths


def _traces_in(folder: Path) -> list[Path]:
    """The files of a directory that are traces by their names or else, if there are none, by their text; hidden ones are not."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(OTHER_NAMES) and not path.name.startswith("."))
    return [path for path in paths if path.name.endswith(NAMES)] or [path for path in paths if _has_events(path)]


def _has_events(path: Path) -> bool:
    """Does a file begin as a trace does?"""
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        text = file.read(HEADER)
        return b'"traceEvents"' in text or (text.lstrip().startswith(b"[") and b'"ph"' in text)
    return False


def _ranks(value: object) -> tuple[int | None, int | None]:
    if not isinstance(value, dict):
        return None, None
    rank, size = value.get("rank"), value.get("world_size")
    return (rank if isinstance(rank, int) else None), (size if isinstance(size, int) else None)


def _devices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(str(device["name"]) for device in value if isinstance(device, dict) and "name" in device)


FORMAT = 6
"""Version: a number up whenever columns change, or what is read into them."""
ENDS = 2**16
"""Bytes of the beginning and of the end that are hashed."""
CODES, NUMBERS = ("label", "lane", "shape"), ("start", "end", "correlation", "external")
FIELDS = [field.name for field in dataclasses.fields(Loaded) if field.name not in ("path", "columns")]
ARGS = [name for name in Args.__struct_fields__ if name != "shapes"]


def cache_key(path: Path) -> str:
    """The key of a file's cache, from its size, time of change and content.

    Raises:
        OSError: there is no such file.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256(file.read(ENDS))
        file.seek(max(0, status.st_size - ENDS))
        digest.update(file.read(ENDS))
    return f"{FORMAT} {status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"


def load(path: Path) -> Loaded:
    """Load a trace from its cache, or from its file and then write the cache.

    Raises:
        TraceError: there is no such file, it is no trace, or it has no event that can be read.
    """
    if (loaded := load_cache(path)) is not None:
        return loaded
    with contextlib.suppress(OSError):
        key = cache_key(path)
        loaded = read_trace_file(path)
        write_cache(loaded, key)
        return loaded
    return read_trace_file(path)


def load_cache(path: Path) -> Loaded | None:
    """The trace from its cache; None without a readable cache of this content."""
    try:
        key = cache_key(path)
    except OSError:
        return None
    for place in _places(path):
        with contextlib.suppress(Exception):  # whatever is wrong with it: then it is no cache
            if place.is_file():
                with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    if (head := json.loads(arrays["head"].tobytes()))["key"] == key:
                        return _loaded(path, head, arrays)
    return None


def write_cache(loaded: Loaded, key: str) -> Path | None:
    """Write the cache atomically: beside the file or, where that cannot be written, into the user's cache.

    Args:
        loaded: the trace as it was read.
        key: what its file was before it was read; if that has changed since, nothing is written.

    Returns:
        Where it is; None where it could not be written.
    """
    for place in _places(loaded.path):
        with contextlib.suppress(OSError):
            if cache_key(loaded.path) != key:
                return None
            place.parent.mkdir(parents=True, exist_ok=True)
            with _whole(place) as file:
                np.savez(file, **_arrays(loaded, key))
            return place
    return None


def _places(path: Path) -> Iterator[Path]:
    """Where a cache may be, the best place first."""
    yield path.with_name(f".{path.name}.columns.npz")
    yield cache_folder() / "traces" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.npz"


@contextlib.contextmanager
def _whole(place: Path) -> Iterator[Any]:
    """A file that is renamed to its name when all of it was written."""
    handle, name = tempfile.mkstemp(prefix=f"{place.name}.", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _arrays(loaded: Loaded, key: str) -> dict[str, Any]:
    columns = loaded.columns
    head = {
        "key": key,
        "file": {name: getattr(loaded, name) for name in FIELDS},
        "origin": columns.origin,
        "labels": columns.labels,
        "lanes": columns.lanes,
        "shapes": columns.shapes,
        "messages": [[message.event, *(getattr(message.args, name) for name in ARGS)] for message in columns.messages],
    }
    text = np.frombuffer(json.dumps(head).encode("utf-8", "surrogatepass"), dtype=np.uint8)
    return {"head": text, **{name: _narrow(getattr(columns, name)) for name in (*CODES, *NUMBERS)}}


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """The integers in the smallest type that holds them."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    kind = next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return values.astype(kind)


def _loaded(path: Path, head: dict[str, Any], arrays: Any) -> Loaded:
    """The trace; an exception of any kind says that the arrays are no valid one."""
    codes = {name: arrays[name].astype(np.int32) for name in CODES}
    numbers = {name: arrays[name].astype(np.int64) for name in NUMBERS}
    columns = Columns(
        labels=tuple(Label(*label) for label in head["labels"]),
        lanes=tuple(Lane(*lane) for lane in head["lanes"]),
        shapes=tuple(head["shapes"]),
        origin=None if head["origin"] is None else float(head["origin"]),
        messages=tuple(Message(event, Args(**dict(zip(ARGS, args, strict=True)), shapes=NO_SHAPES)) for event, *args in head["messages"]),
        **codes,
        **numbers,
    )
    of = {"label": columns.labels, "lane": columns.lanes, "shape": columns.shapes}
    if {len(column) for column in (*codes.values(), *numbers.values())} != {len(columns)} or not len(columns):
        raise ValueError("columns of different lengths")
    if any(code.min() < 0 or code.max() >= len(of[name]) for name, code in codes.items()) or (columns.end < columns.start).any():
        raise ValueError("invalid numbers")
    if any(not 0 <= message.event < len(columns) for message in columns.messages):
        raise ValueError("messages of no event")
    stored = head["file"]
    return Loaded(path=path, columns=columns, **{**stored, "devices": tuple(stored["devices"]), "notes": tuple(stored["notes"])})
