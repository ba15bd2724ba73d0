"""Loading: from a file to columns, and what the file says of itself; from its cache where that is wanted and still true."""

from dataclasses import dataclass
from pathlib import Path

from workbench.traces import wire
from workbench.traces.columns import Columns, gathered
from workbench.traces.reading import Reading, TraceError

TRACES = "traces"
"""Folder of a run directory."""
NAMES = (".pt.trace.json", ".pt.trace.json.gz", "trace.json", "trace.json.gz")
"""How files of traces end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A file that was read."""

    path: Path
    columns: Columns
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is missing of the file."""


def read(path: Path) -> Loaded:
    """Read a file from its text.

    Raises:
        TraceError: there is no such file, it is none, or it has no event that can be read.
    """
    reading = Reading(path=path, words=wire.EVENTS)
    found = gathered(reading.batches())
    columns = found.columns()
    notes = list(reading.notes)
    if found.impossible:
        notes.append(f"{found.impossible:,} events have times that cannot be (no number, or a negative length): they are left out")
    if found.unpaired:
        notes.append(f"{found.unpaired:,} events are beginnings or ends only, which torch.profiler does not write: they are left out")
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
    found = _traces_in(where) or (_traces_in(where / TRACES) if (where / TRACES).is_dir() else [])
    if not found:
        raise TraceError(f"{where} has no traces: such files end in {' or '.join(NAMES[:2])}")
    return found


def _traces_in(folder: Path) -> list[Path]:
    """The files of a directory that are traces by their names; hidden ones are not."""
    return sorted(one for one in folder.iterdir() if one.name.endswith(NAMES) and not one.name.startswith("."))


def _ranks(value: object) -> tuple[int | None, int | None]:
    if not isinstance(value, dict):
        return None, None
    rank, size = value.get("rank"), value.get("world_size")
    return (rank if isinstance(rank, int) else None), (size if isinstance(size, int) else None)


def _devices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(str(one["name"]) for one in value if isinstance(one, dict) and "name" in one)
