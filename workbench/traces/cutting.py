"""Cutting: where the text of a trace can be cut between events, and where its events begin and end."""

import re

from workbench.traces import wire

BRACES = 100_000
"""Braces that are looked at for a cut: an event has far fewer."""
ENDS = 64
"""Brackets at the end of a damaged file of which one may be that of the events."""
NESTING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
"""A string, or what opens or closes a value."""


def nesting(text: bytes) -> int:
    """How many more values a text opens than it closes; brackets in strings are none.

    >>> nesting(b'{"a[": {"b": [1, 2]')
    2
    """
    return sum((one[:1] in b"[{") - (one[:1] in b"]}") for one in NESTING.findall(text))


def end_behind(text: bytes) -> bytes | None:
    """What stands behind the events, by the first of the last brackets behind which it can be the rest of a file; None if it has no end.

    >>> end_behind(b'?, {"a": [1]}], "b": [2]}')
    b', "b": [2]}'
    """
    at, found = len(text), None
    for _ in range(ENDS):
        at = text.rfind(b"]", 0, at)
        if at < 0:
            break
        rest = text[at + 1 :]
        try:
            if rest.strip():  # else it is an array with nothing around it
                wire.header(b'{"traceEvents":[]' + rest)
        except wire.FAILURES:
            continue
        found = rest
    return found


def boundary(text: bytes, before: int) -> int:
    """Where the comma of the last `}, {"` before a position is; -1 if there is none near."""
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
