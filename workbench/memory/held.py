"""Held: what a rank held at the moment at which memory ran out, as far as it could be seen."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from workbench import units
from workbench.memory.log import GROUPS

MOST_LISTED = 3
"""Holders that are named in text; all of them are in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBy:
    """Bytes with one name."""

    group: str
    """Of `vocabulary.GROUPS`."""
    name: str
    """Of a module, of the operator that keeps it for the backward, or of a tensor's shape."""
    bytes: int
    count: int = 1
    """Tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What was held, by looking at the living tensors: each storage counts once."""

    groups: Mapping[str, int]
    """Bytes per group (of `vocabulary.GROUPS`), those that hold nothing left out."""
    holders: Sequence[HeldBy] = ()
    """The largest first."""
    module: str | None = None
    """Innermost module whose forward was running, by name and class."""
    phase: str | None = None
    """"forward", "backward" or "optimizer", where the stack tells."""
    line: str | None = None
    """Line of the user's code that was running: file, number and text."""
    available: int | None = None
    """Main memory that was left, in bytes; by the limit of the process or its container where that is smaller."""

    @property
    def total(self) -> int:
        """Bytes in all groups."""
        return sum(self.groups.values())

    def __str__(self) -> str:
        if not self.total:
            return self._where() + "."
        order = sorted(self.groups, key=lambda group: -self.groups[group])
        parts = ", ".join(f"{group.replace('_', ' ')} {units.bytes_(self.groups[group])}" for group in order)
        largest = ", ".join(f"{one.name} ({one.group.replace('_', ' ')}, {units.bytes_(one.bytes)})" for one in self.holders[:MOST_LISTED])
        return f"{self._where()}, with {parts}" + (f". The largest: {largest}" if largest else "") + "."

    def _where(self) -> str:
        module = f" of {self.module}" if self.module else ""
        line = f", at {self.line}" if self.line else ""
        return f"It was in the {self.phase or 'step'}{module}{line}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"groups": dict(self.groups), "holders": [asdict(one) for one in self.holders]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; groups that are not known become "other"."""
        groups: dict[str, int] = {}
        for group, size in value["groups"].items():
            name = group if group in GROUPS else "other"
            groups[name] = groups.get(name, 0) + size
        return cls(**{**value, "groups": groups, "holders": tuple(HeldBy(**one) for one in value.get("holders") or ())})
