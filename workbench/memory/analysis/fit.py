"""Fit: whether memory fits a device, how much is left, and how certain that is; and how much of a device may be used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import system_load, units
from workbench.core.checks import whole_number
from workbench.core.device import MARGIN as MARGIN
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.memory.analysis.non_pytorch import NonPyTorchMemory

KNOWN_AS_RANGE = "memory outside of PyTorch's allocator is known as a range only"
NOT_CERTAIN = f"not certain, since {KNOWN_AS_RANGE}"
_PLAIN = {"cuda": "the GPU", "cpu": "main memory"}
"""Devices without a name of their own → in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(display.Shown):
    """True if it fits: `if breakdown.fits("H200"): …`."""

    device: str
    """Name of the device, or the given bytes in words."""
    capacity: int
    """Bytes of the device."""
    margin: float = 0.0
    """Fraction 0..1 of the capacity that is to stay free."""
    needed: int
    """Bytes in use at the peak: reserved and what is outside the allocator, else allocated."""
    low: int
    """The same with the lowest estimate of bytes outside the allocator."""
    high: int
    """The same with the highest estimate."""

    @property
    def room(self) -> int:
        """Bytes that may be used: the capacity less the margin."""
        return less_margin(self.capacity, self.margin)

    @property
    def spare(self) -> int:
        """Bytes left; negative = missing."""
        return self.room - self.needed

    @property
    def certain(self) -> bool:
        """Is the answer the same for the lowest and the highest estimate of bytes outside the allocator?"""
        return (self.low <= self.room) == (self.high <= self.room)

    @property
    def words(self) -> str:
        """The answer in a sentence."""
        between = f" ({units.bytes_(self.low)} … {units.bytes_(self.high)})" * (self.low != self.high)
        needs = f"{units.bytes_(self.needed)}{between}{f' on {self.device}' * bool(self.device)}"
        answer = f"{'fits' if self else 'does not fit'}: {needs}, {spare_words(self.room, self.spare, self.margin)}"
        return answer if self.certain else f"{answer}; {NOT_CERTAIN}"

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


def fit(held: int, outside: NonPyTorchMemory | None, name: str, capacity: int, margin: float) -> Fit:
    """Whether memory fits so many bytes.

    Args:
        held: bytes that the allocator reserves, else those that are allocated.
        outside: memory outside of the allocator there; None = nothing.
        name: of the device; "" = a number of bytes was given.
        capacity: bytes of the device.
        margin: fraction 0..1 of the capacity that is to stay free.

    Raises:
        ValueError: no such margin.
    """
    less_margin(capacity, margin)
    ends = (outside.low, outside.mid, outside.high) if outside else (0, 0, 0)
    low, needed, high = (held + end for end in ends)
    return Fit(device=name, capacity=capacity, margin=margin, needed=needed, low=low, high=high)


def is_unnamed(device: str | Device) -> bool:
    """No device in particular: any GPU, or a CPU."""
    return isinstance(device, str) and device in _PLAIN


def device_name(device: str | Device) -> str:
    """ "cpu", "cuda" or the name of a device in the table.

    Raises:
        ValueError: an unknown one.
    """
    if isinstance(device, Device):
        return device.name
    if not isinstance(device, str):
        raise ValueError(f'device={device!r}: "cuda" (any GPU), "cpu", a name such as "H200", or a wb.Device is allowed')
    if device in ("cpu", "cuda"):
        return device
    try:
        return Device.named(device).name
    except ValueError as error:
        error.args = (f'{error}. Also allowed: "cuda" (any GPU) and "cpu"',)
        raise


def ranks_here(target: Any, options: Mapping[str, Any]) -> int:
    """Ranks that share the memory of this machine, if a step is taken on its CPU."""
    given = options.get("world_size") or options.get("nproc_per_node") or getattr(target, "nproc_per_node", 1) or 1
    return int(given)


def usable_memory(device: str | Device, capacity: int | None, margin: float, *, ranks: int = 1) -> tuple[str, int]:
    """The device in words, and its bytes that a rank may use; of "cpu" without a capacity an equal share of this machine's memory."""
    if capacity is None and device == "cpu":
        whole = system_load.main_memory()
        capacity = whole // ranks if whole else None
    if capacity is None:
        known = device_of(device)
        return known.name, usable_bytes(known, margin)
    whole_number("capacity", capacity, least=1, what="a whole number of bytes per rank", also=", or None for the device's own")
    name = _PLAIN[str(device)] if is_unnamed(device) else device_of(device).name
    return name, less_margin(capacity, margin)


def device_of(device: str | Device) -> Device:
    if is_unnamed(device):
        raise ValueError(
            f"the device is {device!r}, whose memory is not known: name one, such as H200 or RTX-4090, or say how many bytes a rank may "
            "use (in Python capacity=…)"
        )
    return device if isinstance(device, Device) else Device.named(device)


def usable_bytes(device: Device, margin: float) -> int:
    """Bytes that may be used."""
    return less_margin(device.memory, margin)


def spare_words(capacity: int, spare: int, margin: float) -> str:
    """What is left of the bytes that may be used, or missing, and of how many.

    >>> spare_words(95 * 2**30, 2**30, 0.05), spare_words(95 * 2**30, -(2**30), 0.0)
    ('1.00 GiB to spare of the 95.0 GiB that may be used (5.0 % stays free)', '1.00 GiB more than the 95.0 GiB that may be used')
    """
    may = f"the {units.bytes_(capacity)} that may be used" + f" ({units.percent(margin)} stays free)" * bool(margin)
    return f"{units.bytes_(abs(spare))} {'to spare of' if spare >= 0 else 'more than'} {may}"


def usable_words(capacity: int, margin: float) -> str:
    """The bytes that may be used, for labels and titles, as in "95.0 GiB (5 % kept free)"."""
    return units.bytes_(capacity) + f" ({100 * margin:.3g} % kept free)" * bool(margin)


def less_margin(capacity: int, margin: float) -> int:
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin}: a fraction of the device's memory that is to stay free, from 0 to below 1 (0.1 is ten percent)")
    return int(capacity * (1 - margin))
