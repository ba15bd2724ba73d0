"""Fit: whether something fits a device, with what is to spare and how sure that is."""

from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.display import table as display
from workbench.memory.analysis.outside import Outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(display.Shown):
    """True if it fits: `if breakdown.fits("H200"): …`."""

    device: str
    """Name of the device, or the bytes that were asked about."""
    capacity: int
    """Bytes of the device."""
    margin: float = 0.0
    """Fraction 0..1 of the capacity that is to stay free."""
    needed: int
    """Bytes in use at the fullest moment: reserved and what is outside the allocator, else allocated."""
    low: int
    """The same with the least that may lie outside the allocator."""
    high: int
    """The same with the most."""

    @property
    def room(self) -> int:
        """Bytes that may be used: the capacity less the margin."""
        return int(self.capacity * (1 - self.margin))

    @property
    def spare(self) -> int:
        """Bytes left; negative: missing."""
        return self.room - self.needed

    @property
    def certain(self) -> bool:
        """The answer is the same whatever lies outside the allocator, between least and most."""
        return (self.low <= self.room) == (self.high <= self.room)

    @property
    def words(self) -> str:
        """The answer in a sentence."""
        of = f"{units.bytes_(self.capacity)} of {self.device}" if self.device else units.bytes_(self.capacity)
        if self.margin:
            of += f" less {units.percent(self.margin)} margin"
        needs = f"{units.bytes_(self.needed)} in {of}"
        if self.low != self.high:
            needs = f"{units.bytes_(self.needed)} ({units.bytes_(self.low)} … {units.bytes_(self.high)}) in {of}"
        missing = f"does not fit: {needs}, {units.bytes_(-self.spare)} missing"
        answer = f"fits: {needs}, {units.bytes_(self.spare)} to spare" if self else missing
        return answer if self.certain else f"{answer}; not certain, since what lies outside PyTorch's allocator is known as a range only"

    def __bool__(self) -> bool:
        return self.spare >= 0

    def __str__(self) -> str:
        return self.words

    @property
    def table(self) -> display.Table:
        """Capacity, what may be used of it, what is needed, what is left."""
        rows = [
            ["capacity", units.bytes_(self.capacity)],
            ["usable", units.bytes_(self.room)],
            ["needed", units.bytes_(self.needed)],
            ["at least", units.bytes_(self.low)],
            ["at most", units.bytes_(self.high)],
            ["spare", units.bytes_(self.spare)],
        ]
        return display.Table(columns=("memory", self.device or "bytes"), rows=rows, note=self.words)

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        names = ("device", "capacity", "margin", "needed", "low", "high", "spare", "certain")
        return display.frame([{**{name: getattr(self, name) for name in names}, "fits": bool(self)}])


def fit(held: int, outside: Outside | None, name: str, capacity: int, margin: float) -> Fit:
    """Whether memory fits so many bytes.

    Args:
        held: bytes that the allocator reserves, else those that are allocated.
        outside: what lies outside the allocator there; None = nothing.
        name: of the device; "" = bytes were asked about.
        capacity: its bytes.
        margin: fraction 0..1 of the capacity that is to stay free.

    Raises:
        ValueError: no such margin.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin}: a fraction of the device's memory that is to stay free, from 0 to below 1 (0.1 is ten percent)")
    ends = (outside.low, outside.mid, outside.high) if outside else (0, 0, 0)
    low, needed, high = (held + end for end in ends)
    return Fit(device=name, capacity=capacity, margin=margin, needed=needed, low=low, high=high)
