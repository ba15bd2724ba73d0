"""The brief of a result: plain JSON values for a program or an agent, of a size that is read whole."""

import json
from typing import Any

from workbench.core.codec import JsonDataclass, to_json
from workbench.core.statistics import Interval

BRIEF_BYTES = 2000
"""Most bytes of a brief as JSON."""


def fitted(brief: dict[str, Any], *lists: str, last: str = "") -> dict[str, Any]:
    """The brief, of which the ends of lists are left out until it takes at most BRIEF_BYTES as JSON; its `left_out` counts them.

    Args:
        brief: plain JSON values; its lists get shorter.
        lists: names of those, or of dicts, that may be cut: the longest is, each time.
        last: name of the one that is cut when all others are empty.
    """

    def size(value: Any) -> int:
        return len(json.dumps(value, ensure_ascii=False).encode())

    while size(brief) > BRIEF_BYTES and (full := [name for name in lists if brief[name]]):
        longest = brief[max(full, key=lambda name: (name != last, size(brief[name])))]
        longest.popitem() if isinstance(longest, dict) else longest.pop()
        brief["left_out"] = brief.get("left_out", 0) + 1
    return brief


def number(value: float, digits: int = 3) -> float | None:
    """So many digits of it; None if it is infinite or not known."""
    rounded: float | None = to_json(float(f"{value:.{digits}g}"))
    return rounded


def three(interval: Interval, digits: int = 3) -> list[float | None]:
    """Low, mid and high of an interval, so many digits of each."""
    return [number(value, digits) for value in (interval.low, interval.mid, interval.high)]


def short(text: str, most: int = 240) -> str:
    """A text of at most so many characters; where it is cut, it ends with "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class Briefed(JsonDataclass):
    """A result with a table whose note is the answer in words: it has a brief of that answer and of its fields."""

    __slots__ = ()

    @property
    def table(self) -> Any:
        """What was found, with the answer as its note."""
        raise NotImplementedError

    def brief(self) -> dict[str, Any]:
        """The answer in words, yes or no where there is one, and the fields, as plain JSON values that take at most BRIEF_BYTES as text.

        Long texts are cut, and the ends of lists are left out where they do not fit; `left_out` counts what was.
        """
        fields = {name: value for name, value in self.to_json().items() if name != "notes" and value not in (None, "", [])}
        ok = next((getattr(self, name) for name in ("exact", "same", "right") if hasattr(type(self), name)), None)
        value = {"answer": short(self.table.note, 700), **({} if ok is None else {"ok": ok}), **_short_texts(fields)}
        return fitted(value, *(name for name, each in value.items() if isinstance(each, list | dict)))


def _short_texts(value: Any) -> Any:
    """The value, the texts in it cut, and numbers to six digits."""
    if isinstance(value, dict):
        return {name: _short_texts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_short_texts(each) for each in value]
    return short(value, 120) if isinstance(value, str) else number(value, 6) if isinstance(value, float) else value
