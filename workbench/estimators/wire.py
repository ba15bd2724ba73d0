"""What goes over the wire to a worker and back: one line of JSON for a question, one for its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from workbench.device import Device
from workbench.memory.log import Event, Mark, MemoryLog, Record
from workbench.spec import RunSpec

AXES = ("micro_batch", "sequence", "image")
"""Numbers that memory depends on smoothly: it is known between the fake runs at some values of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be run on fake tensors."""

    spec: RunSpec
    """Every knob; its nproc_per_node are the ranks."""
    device: str | Device = "cuda"
    """Whose memory behaviour, as `estimate_memory` takes it."""
    sequence: int | None = None
    """Length of the batch's sequences; None = the sample's own."""
    image: int | None = None
    """Side of the batch's images in pixels; None = the sample's own."""

    def along(self, axis: str) -> int | None:
        """Its number on one of AXES."""
        value: int | None = self.spec.micro_batch if axis == "micro_batch" else getattr(self, axis)
        return value

    def at(self, axis: str, value: int | None) -> "Question":
        """The same with another number on one of AXES."""
        if axis == "micro_batch":
            return replace(self, spec=self.spec.replace(micro_batch=value))
        return replace(self, sequence=value) if axis == "sequence" else replace(self, image=value)

    @property
    def key(self) -> str:
        """Equal for equal questions."""
        return repr(self)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        device = self.device if isinstance(self.device, str) else asdict(self.device)
        return {"spec": self.spec.to_json(), "device": device, "sequence": self.sequence, "image": self.image}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Question":
        """Inverse of `to_json`."""
        device = value["device"]
        if not isinstance(device, str):
            device = Device(**device)
        return cls(spec=RunSpec.from_json(value["spec"]), device=device, sequence=value["sequence"], image=value["image"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a fake run wrote."""

    log: MemoryLog
    """Every storage of its steps."""
    device: str
    """"cpu", "cuda" or a device's name."""
    rank: int = 0
    """Whose memory it is."""
    world_size: int = 1
    """Ranks."""
    sequence: int | None = None
    """Length of its batch's sequences; None = it has none."""
    image: int | None = None
    """Side of its batch's images; None = it has none, or none that are square."""
    first: bool = False
    """The first run of sharded layers of its kind in its process: torch fills caches in it, so its events are not those of later ones."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = {name: getattr(self, name) for name in ("device", "rank", "world_size", "sequence", "image", "first")}
        return {**plain, "log": log_to_json(self.log)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Answer":
        """Inverse of `to_json`."""
        return cls(**{**value, "log": log_from_json(value["log"])})


_WORDS = ("category", "phase", "module", "op")
_NUMBERS = ("size", "step", "micro", "born", "died")


def log_to_json(log: MemoryLog) -> dict[str, Any]:
    """A log in columns; words, of which there are few different ones, as places in a list."""
    places: dict[str | None, int] = {}
    records: dict[str, list[Any]] = {
        name: [places.setdefault(getattr(record, name), len(places)) for record in log.records] for name in _WORDS
    }
    records |= {name: [getattr(record, name) for record in log.records] for name in _NUMBERS}
    return {
        "words": list(places),
        "records": records,
        "events": [[event[column] for event in log.events] for column in range(3)],
        "marks": [list(mark) for mark in log.marks],
        "modules": log.modules,
        "notes": log.notes,
    }


def log_from_json(value: Mapping[str, Any]) -> MemoryLog:
    """Inverse of `log_to_json`."""
    words: Sequence[Any] = value["words"]
    columns = {name: [words[place] for place in value["records"][name]] for name in _WORDS}
    columns |= {name: value["records"][name] for name in _NUMBERS}
    rows = zip(*columns.values(), strict=True)
    return MemoryLog(
        records=[Record(**dict(zip(columns, row, strict=True))) for row in rows],
        events=list(map(Event, *value["events"])),
        marks=[Mark(*mark) for mark in value["marks"]],
        modules=dict(value["modules"]),
        notes=list(value["notes"]),
    )
