"""Unpacking: the text of a gzip file, piece by piece, up to the byte where it is damaged."""

import zlib
from typing import Protocol

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
            try:
                part = self._unpack.decompress(packed, missing)
            except zlib.error as error:
                self.trouble = str(error)
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
