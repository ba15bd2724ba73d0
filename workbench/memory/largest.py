"""The largest micro-batch that fits a device: MaxMicroBatch."""

from dataclasses import dataclass

from workbench import display, units
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.whatif import needed


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxMicroBatch:
    """The largest micro-batch that fits a device, and what stands against the next larger one. `int()` of it is the number."""

    micro_batch: int
    """Samples; 0 = not even one fits."""
    breakdown: MemoryBreakdown
    """With that many; with one, where not even one fits."""
    next: MemoryBreakdown
    """With one sample more, which is too much."""
    device: str
    """To be fitted."""
    capacity: int
    """Its bytes, less the margin."""
    runs: int
    """Fake runs that were made."""

    def __int__(self) -> int:
        return self.micro_batch

    __index__ = __int__

    @property
    def spare(self) -> int:
        """Bytes left."""
        return self.capacity - needed(self.breakdown)

    @property
    def word(self) -> str:
        """In a line."""
        if not self.micro_batch:
            over = units.bytes_(-self.spare)
            return f"not even one sample fits {self.device}: {over} too much; try wb.memory_ladder(spec, device={self.device!r})"
        over = units.bytes_(needed(self.next) - self.capacity)
        return (
            f"micro_batch={self.micro_batch} is the largest that fits {self.device}: {units.bytes_(self.spare)} to spare; "
            f"one more is {over} too much, at the {self.next.peak_moment}"
        )

    def __str__(self) -> str:
        return self.word

    def __repr__(self) -> str:
        return f"MaxMicroBatch({self.micro_batch}, device={self.device!r})"

    def _repr_html_(self) -> str:
        return f"<p>{display.escape(self.word)}</p>"
