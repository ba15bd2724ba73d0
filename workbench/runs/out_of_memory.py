"""Explains why memory ran out: the numbers in the text of the error (OutOfMemory), and what the rank held at that moment (Held)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from workbench.core import units
from workbench.core.codec import JsonDataclass, fields_from_json
from workbench.core.vocabulary import GROUPS
from workbench.runs.errors import OUT_OF_DEVICE_MEMORY, OUT_OF_HOST_MEMORY

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
class Held(JsonDataclass):
    """The memory of all tensors that existed; each storage counts once."""

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
        largest = ", ".join(
            f"{held.name} ({held.group.replace('_', ' ')}, {units.bytes_(held.bytes)})" for held in self.holders[:MOST_LISTED]
        )
        return f"{self._where()}, with {parts}" + (f". The largest: {largest}" if largest else "") + "."

    def _where(self) -> str:
        module = f" of {self.module}" if self.module else ""
        line = f", at {self.line}" if self.line else ""
        return f"It was in the {self.phase or 'step'}{module}{line}"

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; groups that are not known become "other"."""
        groups: dict[str, int] = {}
        for group, size in value["groups"].items():
            name = group if group in GROUPS else "other"
            groups[name] = groups.get(name, 0) + size
        return fields_from_json(cls, {**value, "groups": groups})


_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "KB": 2**10, "MiB": 2**20, "MB": 2**20, "GiB": 2**30, "GB": 2**30, "TiB": 2**40, "TB": 2**40}
"""torch writes KB, MB and GB on Apple's GPUs and means binary units by them too."""
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|[KMGT]i?B)\b"
_DEVICE, _ON_HOST = re.compile(OUT_OF_DEVICE_MEMORY), re.compile(OUT_OF_HOST_MEMORY)
_NUMBERS = {
    "asked": rf"[Tt]ried to allocate {_SIZE}|Unable to allocate {_SIZE}",
    "capacity": rf"total capac(?:i)?ty of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free",
    "allowed": rf"{_SIZE} allowed|max allowed: {_SIZE}",
    "allocated": rf"allocated memory {_SIZE} is allocated|{_SIZE} already allocated|MPS allocated: {_SIZE}",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached\b",
    "private_pools": rf"with {_SIZE} allocated in private pools",
    "this_process": rf"this process has {_SIZE} memory in use",
}
"""Field → its place in the text: in c10/cuda/CUDACachingAllocator.cpp since torch 2.1 sentences, before that a list in brackets, where the
reserved memory is a sum; aten/src/ATen/mps/MPSAllocator.mm has a format of its own."""
_RESERVED = re.compile(rf"{_SIZE} reserved in total")
_BESIDE = re.compile(rf"other allocations: {_SIZE}")
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
HOST = "the host"
"""Where main memory is."""
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(JsonDataclass):
    """Why memory ran out. Sizes in bytes, as exact as the message gives them (two decimals of its unit); None = it does not say.

    >>> print(OutOfMemory.parse("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB "
    ... "is free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch but unallocated."))
    It asked for 2.00 GiB on GPU 0, where 1.00 GiB of 8.00 GiB was free.
    PyTorch held 4.00 GiB in tensors, and 2.50 GiB for reuse.
    Fragmentation: enough was kept for reuse, but in no piece that was large enough.
    """

    device: str
    """"GPU 0", "the GPU" or HOST."""
    asked: int | None = None
    """What could not be had."""
    capacity: int | None = None
    """Of the device."""
    free: int | None = None
    """On the device, whoever may take it."""
    allowed: int | None = None
    """A limit of PyTorch's own, below the capacity."""
    allocated: int | None = None
    """In tensors of this process."""
    unallocated: int | None = None
    """Held by PyTorch's allocator for reuse."""
    private_pools: int | None = None
    """Of `allocated`: in the pools of CUDA graphs."""
    this_process: int | None = None
    """All that this process has on the device."""
    processes: Mapping[int, int] = field(default_factory=dict)
    """Process number → what it has on the device. In a container one of them may be this process, by its number outside."""
    held: Held | None = None
    """What this rank held at that moment, where it could still be looked at."""

    @classmethod
    def parse(cls, message: str, held: Held | None = None) -> Self | None:
        """Read the text of an error; None if it is not one about memory.

        Args:
            message: type and text, or text alone, of torch's, numpy's or Python's error, in any of the wordings of torch 1 and 2.
            held: what was held at that moment.
        """
        text = " ".join(message.split())
        on_device = _DEVICE.search(text)
        if on_device is None and not _ON_HOST.search(text):
            return None
        sizes = {name: _size(re.search(pattern, text)) for name, pattern in _NUMBERS.items()}
        if sizes["asked"] is None and (plain := re.search(r"tried to allocate (\d+) bytes", text)):
            sizes["asked"] = int(plain[1])
        reserved, beside, allocated = _size(_RESERVED.search(text)), _size(_BESIDE.search(text)), sizes["allocated"]
        if reserved is not None and allocated is not None:
            sizes["unallocated"] = max(reserved - allocated, 0)  # both are rounded
        if beside is not None and allocated is not None:
            sizes["this_process"] = allocated + beside
        processes = {int(match[1]): _bytes(match[2], match[3]) for match in _PROCESS.finditer(text)}
        return cls(device=_device(text, on_device is not None), processes=processes, held=held, **sizes)

    @property
    def reserved(self) -> int | None:
        """Bytes that PyTorch's allocator has taken from the driver."""
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated

    @property
    def others(self) -> int | None:
        """Taken by other processes."""
        if self.this_process is not None:
            return sum(self.processes.values())
        ours = min((size for size in self.processes.values() if size >= (self.reserved or 0)), default=None)
        if ours is None:
            return None
        return sum(self.processes.values()) - ours  # in a container this process is listed under a number that it does not know

    @property
    def outside(self) -> int | None:
        """Taken by this process outside of PyTorch's allocator: the context of the device, libraries, communication."""
        if self.this_process is None or self.allocated is None:
            return None
        return max(self.this_process - self.allocated - (self.unallocated or 0), 0)

    @property
    def fragmented(self) -> bool:
        """Was enough kept for reuse, though not in one piece?"""
        return self.asked is not None and self.unallocated is not None and self.unallocated >= self.asked

    @property
    def hints(self) -> tuple[str, ...]:
        """What to do about it, by its numbers; the symptom's hint says what to change in the training."""
        hints = []
        if self.fragmented:
            hints.append(f"Against fragmentation: {EXPANDABLE} in the environment.")
        if self.others is not None and self.others >= (self.asked or 1):
            hints.append("End the other processes on the device, or take another one (CUDA_VISIBLE_DEVICES); one rank per device.")
        if self.asked is not None and self.capacity is not None and self.asked > self.capacity:
            hints.append("A tensor of this size cannot fit there: is its shape what you meant?")
        if self.allowed is not None and self.device != HOST and self.free is not None and self.free >= (self.asked or 0):
            hints.append("The limit is PyTorch's own (set_per_process_memory_fraction): raise it.")
        return tuple(hints)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        lines = [self._first_line()]
        if self.allocated is not None:
            kept = f", and {units.bytes_(self.unallocated)} for reuse" if self.unallocated else ""
            pools = f" (of which {units.bytes_(self.private_pools)} in the pools of CUDA graphs)" if self.private_pools else ""
            lines.append(f"PyTorch held {units.bytes_(self.allocated)} in tensors{pools}{kept}.")
        if self.device == HOST and self.this_process:
            lines.append(f"This process had {units.bytes_(self.this_process)} there.")
        if self.outside:
            lines.append(
                f"Outside of PyTorch's allocator this process had {units.bytes_(self.outside)}: context, libraries, communication."
            )
        if self.others:
            lines.append(f"Other processes had {units.bytes_(self.others)} of the device.")
        if self.fragmented:
            lines.append("Fragmentation: enough was kept for reuse, but in no piece that was large enough.")
        if self.held is not None:
            lines.append(str(self.held))
        return lines

    def _first_line(self) -> str:
        asked = "It asked for more" if self.asked is None else f"It asked for {units.bytes_(self.asked)}"
        limit = f", with a limit of {units.bytes_(self.allowed)}" if self.allowed is not None else ""
        if self.free is None and self.capacity is None:
            than = " than could be had" if self.asked is None else ""
            return f"{asked} on {self.device}{than}{limit}."
        if self.free is None:
            return f"{asked} on {self.device}, which has {units.bytes_(self.capacity)}{limit}."
        of = "" if self.capacity is None else f" of {units.bytes_(self.capacity)}"
        return f"{asked} on {self.device}, where {units.bytes_(self.free)}{of} was free{limit}."


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _size(match: "re.Match[str] | None") -> int | None:
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    return _bytes(number, unit)


def _device(text: str, on_device: bool) -> str:
    if not on_device:
        return HOST
    number = re.search(r"GPU +(\d+)", text)
    return f"GPU {number[1]}" if number else "the GPU"


def kernel_kills(lines: Iterable[str]) -> dict[int, int]:
    """Processes that the kernel killed because memory ran out, from its log: number → bytes that each had in main memory.

    >>> kernel_kills(["Memory cgroup out of memory: Killed process 29632 (python) total-vm:276144kB, anon-rss:56192kB, file-rss:6032kB, "
    ... "shmem-rss:0kB, UID:0 pgtables:172kB oom_score_adj:0"])
    {29632: 63717376}
    """
    kills = {}
    for line in lines:
        if process := re.search(r"Killed process (\d+)", line):
            kills[int(process[1])] = sum(1024 * int(size) for size in re.findall(r"(?:anon|file|shmem)-rss:(\d+)kB", line))
    return kills
