"""The brief of a result: plain JSON values for a program or an agent, of a size that is read whole."""

import json
from typing import Any

from workbench.core.codec import to_json
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
