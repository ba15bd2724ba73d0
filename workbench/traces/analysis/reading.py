"""Reads a trace file of any size, even a damaged one, in batches of typed events, so that memory stays bounded.

The text is cut between two events, and each piece is decoded by itself. Whether a cut was right shows when the piece is decoded: text that
is a valid array up to a comma can only have been cut between two of its events. A gzip file is unpacked up to the byte where it is damaged.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol

import msgspec

from workbench.core import units
from workbench.traces.analysis import event_schema as wire
from workbench.traces.analysis.event_schema import E, EventDecoder, Header, boundary, end_behind, unclosed_brackets

BITES = (2**14, 2**7, 1)
"""Bytes of text that are unpacked at a time where a piece is damaged, finer and finer: an error loses the text of its call."""
RAW = 2**18
"""Packed bytes that are read at a time."""


class Readable(Protocol):
    """A file, packed or not."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


class Unpacked:
    """Reads a gzip file of one or several members. It never raises on damage: the text ends there, and `trouble` says why."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._unpack = zlib.decompressobj(wbits=31)
        self.trouble = ""
        """Why the text ends early, if it does."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, fewer only at the end."""
        parts: list[bytes] = []
        missing = size
        while missing and not self.trouble:
            packed = self._packed()
            if not packed:
                break
            before = self._unpack.copy()  # some tens of KiB per piece of text: a thousandth of the time of unpacking it
            try:
                part = self._unpack.decompress(packed, missing)
            except zlib.error as error:
                self.trouble = str(error)
                parts += _bites(before, packed, missing)
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _packed(self) -> bytes:
        if not self._unpack.eof:
            packed = self._unpack.unconsumed_tail or self._file.read(RAW)
            if not packed:
                self.trouble = "it ends within packed data"
            return packed
        left = self._unpack.unused_data.lstrip(b"\0") or self._file.read(RAW)  # padding may follow a member
        if left:
            self._unpack = zlib.decompressobj(wbits=31)
        return left


def _bites(unpack: "zlib._Decompress", packed: bytes, most: int) -> Iterator[bytes]:
    """The text of packed bytes up to where they are damaged."""
    for size in BITES:
        while most > 0:
            before = unpack.copy()
            try:
                part = unpack.decompress(packed, min(size, most))
            except zlib.error:
                unpack = before
                break
            if not part:
                return
            yield part
            most -= len(part)
            packed = unpack.unconsumed_tail


PIECE = 4 * 2**20
"""Bytes that are decoded at a time."""
MOST = 16 * PIECE
"""Bytes that the text before the events, or one event, may have."""
TRIES = 8
"""Cuts that are tried before a piece is taken for damaged."""
AHEAD = 2 * PIECE
"""Bytes behind events that lie in another value, in which those of the trace itself are looked for."""
CHECKS = tuple(f"Error -3 while decompressing data: incorrect {what} check" for what in ("data", "length"))
"""What zlib says where it has unpacked all, and checksum or length, which follow the text, do not fit."""
BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb'(?<=\})\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args)"\s*:)')
"""Between two events of a piece that is damaged."""


class TraceError(ValueError):
    """A file is no trace, or nothing of it can be read."""


@dataclass(slots=True, kw_only=True)
class Reading(Generic[E]):
    """The reading of one file: its `batches`, and afterwards what was met on the way."""

    path: Path
    words: EventDecoder[E]
    """What is read of an event."""
    header: Header = field(default_factory=Header)
    size: int = 0
    """Bytes of text read."""
    dropped: int = 0
    """Places at which nothing could be read."""
    bare: int = 0
    """Events whose args could not be read."""
    cut: str = ""
    """Why the file ends early, if it does."""
    changed: bool = False
    """Is the checksum of a packed file another one?"""
    inner: bool = False
    """Do the events lie in another value of the file?"""

    def batches(self) -> Iterator[list[E]]:
        """The events, in the order of the file.

        Raises:
            TraceError: no such file; it is not JSON, or has no events.
        """
        try:
            with self.path.open("rb") as file:
                zipped = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                yield from self._decoded(Unpacked(file) if zipped else file)
        except OSError as error:
            raise TraceError(
                f"{self.path}: {error.strerror or error}. A trace is a .json or .json.gz that torch.profiler exported"
            ) from None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what is missing."""
        notes = [self.cut] if self.cut else []
        if self.changed:
            notes.append("the checksum of the packed file does not fit its text: none of it is missing, but something in it was changed")
        if self.dropped:
            notes.append(f"the file is damaged at {self.dropped:,} place{'s' if self.dropped > 1 else ''}: the events there are missing")
        if self.inner:
            notes.append('"traceEvents" occurs only within another value of the file: are these the events of its trace?')
        if self.bare:
            notes.append(f"the args of {self.bare:,} events could not be read: they count without them")
        return tuple(notes)

    def _more(self, file: Readable) -> bytes:
        text = file.read(PIECE)
        self.size += len(text)
        if isinstance(file, Unpacked) and file.trouble in CHECKS:
            self.changed = True
        elif isinstance(file, Unpacked) and file.trouble:
            self.cut = (
                f"the file ends early or is damaged after {units.bytes_(self.size)} of text ({file.trouble}): later events are missing"
            )
        return text

    def _decoded(self, file: Readable) -> Iterator[list[E]]:
        head, text = self._start(file)
        tail: bytes | None = None
        ended = False
        while tail is None and not ended:
            more = self._more(file)
            ended = not more
            text += more
            if len(text) < PIECE and not ended:
                continue
            events, text, tail = self._last(text) if ended else self._piece(text)
            yield events
        self._look_at_header(head, (tail or b"")[:MOST] + (self._more(file) if tail is not None and not ended else b""))

    def _start(self, file: Readable) -> tuple[bytes, bytes]:
        """The text before the events, and the first behind their bracket."""
        text, seen, depth = b"", 0, 0
        first: re.Match[bytes] | None = None
        while len(text) <= (first.end() + AHEAD if first else MOST):
            more = self._more(file)
            text += more
            if text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                return b"", text[text.index(b"[") + 1 :]
            for match in BEGIN.finditer(text, seen):
                depth += unclosed_brackets(text[seen : match.start()])
                seen = match.start()
                if depth == 1:
                    return text[: match.start()], text[match.end() :]
                first = first or match
            if not more:
                break
        if first:  # none but in another value, or the text before it is damaged
            self.inner = True
            return text[: first.start()], text[first.end() :]
        raise TraceError(f"{self.path} {self._why_none(text)}")

    def _why_none(self, text: bytes) -> str:
        if not text.strip():
            return f"has no text: {self.cut}" if self.cut else "is empty: the profiler had not finished writing it, or a copy failed"
        if not text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return "is not JSON: a trace is what torch.profiler exports with export_chrome_trace or tensorboard_trace_handler"
        return (
            'has no list of "traceEvents": it is other JSON, or was cut before them. '
            "A trace is what torch.profiler exports with export_chrome_trace or tensorboard_trace_handler"
        )

    def _piece(self, text: bytes) -> tuple[list[E], bytes, bytes | None]:
        """The events of a piece, the text after them, and the text behind the array if it has ended."""
        at, damaged = len(text), False
        for _ in range(TRIES):
            at = boundary(text, at)
            if at < 0:
                break
            wrapped = b"[" + text[:at] + b"]"
            try:
                return self.words.several(wrapped), text[at + 1 :], None
            except msgspec.DecodeError as error:
                if (end := wire.end_of(error)) is not None:
                    return self._ended(text, end)
                if damaged := "truncated" not in str(error):
                    break
            except (UnicodeDecodeError, RecursionError):
                damaged = True
                break
        if not damaged and len(text) < MOST:
            return [], text, None  # one event is longer than that: wait for more of it
        at = boundary(text, len(text))
        if at >= 0:
            events, tail = self._salvaged(text[:at])
            return events, text[at + 1 :], tail
        self.dropped += 1
        return [], text[-1024:], None

    def _last(self, text: bytes) -> tuple[list[E], bytes, bytes | None]:
        """The events at the end of the file, with the same results as `_piece`."""
        try:
            return self.words.several(b"[" + text), b"", b""
        except msgspec.DecodeError as error:
            if (end := wire.end_of(error)) is not None:
                return self._ended(text, end)
            if "truncated" in str(error):
                self.cut = self.cut or "the file ends in the middle of its events: later ones are missing"
        except (UnicodeDecodeError, RecursionError):
            pass
        events, tail = self._salvaged(text, last=True)
        if tail is None and not self.cut:  # the last event cannot be read; the file may be whole all the same
            tail = end_behind(text)
        if tail is None:
            self.cut = self.cut or "the file ends in the middle of its events: later ones are missing"
        return events, b"", tail

    def _ended(self, text: bytes, end: int) -> tuple[list[E], bytes, bytes | None]:
        """Where the array ends within the text; `end` counts the bracket that was put in front."""
        try:
            return self.words.several(b"[" + text[: end - 1]), b"", text[end - 1 :]
        except wire.FAILURES:  # pragma: no cover - what was well-formed up to here has other types
            events, tail = self._salvaged(text, last=True)
            return events, b"", tail or b""

    def _salvaged(self, text: bytes, *, last: bool = False) -> tuple[list[E], bytes | None]:
        """Event by event, what can be read of a damaged piece; and the text behind the array, if its end is in it."""
        events: list[E] = []
        pieces = BETWEEN.split(text)
        for number, piece in enumerate(pieces):
            tail = None
            try:
                event, bare = self.words.single(piece)
            except wire.FAILURES as error:
                if (end := wire.end_of(error)) is not None and piece[end : end + 1] == b"]":
                    tail = piece[end + 1 :]
                    piece = piece[:end]
                    try:
                        event, bare = self.words.single(piece)
                    except wire.FAILURES:
                        self.dropped += 1
                        return events, tail
                else:
                    self.dropped += not (last and self.cut and number == len(pieces) - 1) and bool(piece.strip())
                    continue
            events.append(event)
            self.bare += bare
            if tail is not None:
                return events, tail
        return events, None

    def _look_at_header(self, head: bytes, tail: bytes) -> None:
        """Read the header from the text around the events; without it only the origin of the trace is unknown."""
        for text in (head + b'"traceEvents":[]' + tail, head.rstrip().rstrip(b",") + b"}"):
            try:
                self.header = wire.header(text)
                return
            except wire.FAILURES:
                continue
