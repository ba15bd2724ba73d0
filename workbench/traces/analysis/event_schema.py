"""Declares which fields of Kineto's JSON are decoded, with types, and finds where its text can be cut between events."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

Name = str | int | float | None

Number = float | str | None
"""What Kineto writes as text where it is no number: "N/A" for a rate of what took no time, "inf" blocks of no multiprocessors.

Source: libkineto, `bandwidth` in CuptiActivity.cpp and in XPU's plugin.
"""

NO_SHAPES = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The fields of an event's `args` that every trace needs. Files of all versions use these names; a missing field is None."""

    correlation: int | None = None
    external: int | None = msgspec.field(default=None, name="External id")
    stream: int | str | None = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    sent: int | None = msgspec.field(default=None, name="In msg nelems")
    received: int | None = msgspec.field(default=None, name="Out msg nelems")
    ranks: int | None = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: Name = msgspec.field(default=None, name="Process Group Name")
    purpose: Name = msgspec.field(default=None, name="Process Group Description")
    bytes: int | None = None
    bandwidth: Number = msgspec.field(default=None, name="memory bandwidth (GB/s)")
    shapes: msgspec.Raw = msgspec.field(default=NO_SHAPES, name="Input Dims")
    label: Name = msgspec.field(default=None, name="name")


NO_ARGS = Args()


class Bare(msgspec.Struct, gc=False):
    """An event whose args cannot be read; times in microseconds. It holds no container, so the garbage collector need not track it."""

    ph: str = ""
    name: Name = ""
    cat: str | None = ""
    ts: float | None = 0.0
    dur: float | None = 0.0
    pid: Name = 0
    tid: Name = 0


class Event(Bare, gc=False):
    """One event."""

    args: Args | None = None


class Detail(msgspec.Struct, gc=False, frozen=True):
    """The fields of an event's `args` that only some answers need; they are read when one of these is computed."""

    sequence: int | None = msgspec.field(default=None, name="Sequence number")
    types: msgspec.Raw = msgspec.field(default=NO_SHAPES, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=NO_SHAPES, name="Concrete Inputs")
    size: int | None = msgspec.field(default=None, name="Bytes")
    """Bytes that are allocated; negative = freed."""
    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    device_type: int | None = msgspec.field(default=None, name="Device Type")
    device: int | None = msgspec.field(default=None, name="Device Id")
    address: int | None = msgspec.field(default=None, name="Addr")
    occupancy: Number = msgspec.field(default=None, name="est. achieved occupancy %")
    blocks: Number = msgspec.field(default=None, name="blocks per SM")


NO_DETAIL = Detail()


class Detailed(Bare, gc=False):
    """An event with its details."""

    args: Detail | None = None


class Header(msgspec.Struct):
    """The fields of the file around its events."""

    version: Any = msgspec.field(default=None, name="schemaVersion")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    host: Any = msgspec.field(default=None, name="host_name")


E = TypeVar("E", Event, Detailed)


@dataclass(frozen=True, slots=True)
class EventDecoder(Generic[E]):
    """Decodes events: the fields that every trace needs, or their details."""

    event: type[E]
    several: Callable[[bytes], list[E]]
    """An array of them."""
    one: Callable[[bytes], E]

    def single(self, text: bytes) -> tuple[E, bool]:
        """One event, and whether its args were left out because they cannot be read.

        Raises:
            FAILURES: it cannot be read at all.
        """
        try:
            return self.one(text), False
        except UnicodeDecodeError:
            return self.single(text.decode("utf-8", "replace").encode())
        except msgspec.ValidationError:
            bare = _bare(text)
            return self.event(bare.ph, bare.name, bare.cat, bare.ts, bare.dur, bare.pid, bare.tid), True


EVENTS: EventDecoder[Event] = EventDecoder(
    Event, msgspec.json.Decoder(list[Event], strict=False).decode, msgspec.json.Decoder(Event, strict=False).decode
)
DETAILS: EventDecoder[Detailed] = EventDecoder(
    Detailed, msgspec.json.Decoder(list[Detailed], strict=False).decode, msgspec.json.Decoder(Detailed, strict=False).decode
)
header: Callable[[bytes], Header] = msgspec.json.Decoder(Header, strict=False).decode
_bare: Callable[[bytes], Bare] = msgspec.json.Decoder(Bare, strict=False).decode

FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding may raise: damage, other types; text that is not UTF-8; values nested too deep."""


def end_of(error: Exception) -> int | None:
    """The position where a value ended, if the only error is that text follows it."""
    message = str(error)
    if "trailing characters" not in message:
        return None
    return int(message.rpartition("(byte ")[2].rstrip(")")) - 1  # counted from 1


BRACES = 100_000
"""Braces that are looked at for a cut: an event has far fewer."""
ENDS = 64
"""Brackets at the end of a damaged file of which one may be that of the events."""
NESTING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
"""A string, or what opens or closes a value."""


def unclosed_brackets(text: bytes) -> int:
    """How many more values a text opens than it closes; brackets in strings are none.

    >>> unclosed_brackets(b'{"a[": {"b": [1, 2]')
    2
    """
    return sum((token[:1] in b"[{") - (token[:1] in b"]}") for token in NESTING.findall(text))


def end_behind(text: bytes) -> bytes | None:
    """The text behind the events: behind the first of the last brackets after which it can be the rest of a file; None without one.

    >>> end_behind(b'?, {"a": [1]}], "b": [2]}')
    b', "b": [2]}'
    """
    at, last = len(text), None
    for _ in range(ENDS):
        at = text.rfind(b"]", 0, at)
        if at < 0:
            break
        rest = text[at + 1 :]
        try:
            if rest.strip():  # else it is an array with nothing around it
                header(b'{"traceEvents":[]' + rest)
        except FAILURES:
            continue
        last = rest
    return last


def boundary(text: bytes, before: int) -> int:
    """Where the comma of the last `}, {"` before a position is; -1 without one nearby."""
    at = before
    for _ in range(BRACES):
        at = text.rfind(b"{", 0, at)
        if at < 0:
            break
        if not text[at + 1 : at + 64].lstrip().startswith(b'"'):
            continue
        left = text[max(0, at - 64) : at].rstrip()
        if left.endswith(b",") and left[:-1].rstrip().endswith(b"}"):
            return max(0, at - 64) + len(left) - 1
    return -1
