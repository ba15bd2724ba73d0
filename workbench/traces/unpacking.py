"""Unpacking: the text of a gzip file, piece by piece, up to the byte where it is damaged."""

import zlib
from collections.abc import Iterator
from typing import Protocol

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
            found = self._unpack.unconsumed_tail or self._file.read(RAW)
            if not found:
                self.trouble = "it ends within packed data"
            return found
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
