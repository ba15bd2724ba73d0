"""Places: the device to be fitted, its room, and the margin that stays free."""

from workbench.core.checks import whole_number
from workbench.core.device import Device

MARGIN = 0.05
"""Share of a device that stays free unless said otherwise: fragmentation grows over a run, and a driver's share of the memory varies."""


_PLAIN = {"cuda": "the GPU", "cpu": "main memory"}
"""Devices without a name of their own → in words."""


def any_of(device: str | Device) -> bool:
    """No device in particular: any GPU, or a CPU."""
    return isinstance(device, str) and device in _PLAIN


def place_of(device: str | Device, capacity: int | None, margin: float) -> tuple[str, int]:
    """What is to be fitted, in words, and the bytes of it that may be used."""
    if capacity is None:
        found = device_of(device)
        return found.name, room_on(found, margin)
    whole_number("capacity", capacity, least=1, what="a whole number of bytes per rank", also=", or None for the device's own")
    name = _PLAIN[str(device)] if any_of(device) else device_of(device).name
    return name, share_of(capacity, margin)


def device_of(device: str | Device) -> Device:
    if any_of(device):
        raise ValueError(
            f"device={device!r} has no capacity of its own: name one, such as 'H200' or 'RTX-4090', or make a wb.Device; or say how many "
            "bytes there are: capacity=…"
        )
    return device if isinstance(device, Device) else Device.named(device)


def room_on(device: Device, margin: float) -> int:
    """Bytes that may be used."""
    return share_of(device.memory, margin)


def share_of(capacity: int, margin: float) -> int:
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin}: a share from 0 to below 1 of the device is kept free; 0.05 is five percent")
    return int(capacity * (1 - margin))
