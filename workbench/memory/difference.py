"""MemoryDifference: two breakdowns side by side. A prediction less a measurement says how wrong the prediction was, group by group."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench import display, units
from workbench.memory.log import GROUPS

if TYPE_CHECKING:
    from workbench.memory.breakdown import MemoryBreakdown

_SUMS = ("total", "reserved", "device_used")
_NAMES = {"total": "allocated", "device_used": "device used"}


@dataclass(frozen=True, slots=True)
class MemoryDifference(display.Shown):
    """`this - other`, in bytes."""

    this: "MemoryBreakdown"
    """What was subtracted from."""
    other: "MemoryBreakdown"
    """What was subtracted: the measure of percentages."""

    def __getitem__(self, name: str) -> int:
        """Bytes that `this` has more.

        Args:
            name: of GROUPS, or "total", "reserved", "device_used".

        Raises:
            KeyError: no such name, or one of both does not have it.
        """
        if name not in (*GROUPS, *_SUMS):
            raise KeyError(f"no {name!r} in a difference: there are {', '.join((*GROUPS, *_SUMS))}")
        mine, theirs = getattr(self.this, name), getattr(self.other, name)
        if mine is None or theirs is None:
            raise KeyError(f"{name!r} is not known on both sides: on a CPU nothing is reserved")
        return int(mine - theirs)

    @property
    def total(self) -> int:
        """Difference of what is allocated at the peak."""
        return self["total"]

    @property
    def error(self) -> float:
        """Difference of what is allocated, as a fraction of what `other` has; negative: less."""
        return self.total / self.other.total

    @property
    def table(self) -> display.Table:
        """One row per group that one of both has, then the sums that both have."""
        names = [group for group in GROUPS if getattr(self.this, group) or getattr(self.other, group)]
        names += [name for name in _SUMS if getattr(self.this, name) is not None and getattr(self.other, name) is not None]
        rows = [
            [
                _NAMES.get(name, name.replace("_", " ")),
                units.bytes_(getattr(self.this, name)),
                units.bytes_(getattr(self.other, name)),
                _signed(self[name]),
                f"{100 * self[name] / self.other.total:+.2f} %",
            ]
            for name in names
        ]
        mine, theirs = self.names
        note = f"{mine}: {self.this.title}, peak: {self.this.peak_moment}; {theirs}: {self.other.title}, peak: {self.other.peak_moment}"
        columns = ("group", mine, theirs, "difference", f"of all that is allocated, {theirs}")
        return display.Table(columns=columns, rows=rows, title=f"{mine} less {theirs}", note=note)

    @property
    def names(self) -> tuple[str, str]:
        """What each side is called: which of the two is predicted and which measured, or first and second of the same kind."""
        kinds = self.this.kind, self.other.kind
        return kinds if kinds[0] != kinds[1] else (f"{kinds[0]}, this", f"{kinds[1]}, other")

    def to_frame(self) -> Any:
        """A DataFrame with one row per group and sum, in bytes."""
        names = [name for name in (*GROUPS, *_SUMS) if None not in (getattr(self.this, name), getattr(self.other, name))]
        rows = [
            {"group": name, "this": getattr(self.this, name), "other": getattr(self.other, name), "difference": self[name]}
            for name in names
        ]
        return display.frame(rows, columns=("group", "this", "other", "difference"))

    def plot(self, ax: Any = None) -> Any:
        """Both as stacked bars, one below the other; returns the Axes."""
        return display.picture("memory")([self.this, self.other], ax=ax)

    def __repr__(self) -> str:
        return f"MemoryDifference({_signed(self.total)}, {100 * self.error:+.2f} %)"


def _signed(value: int) -> str:
    return f"{'+' if value > 0 else ''}{units.bytes_(value)}"
