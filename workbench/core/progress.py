"""Shows the progress of a run as one line in a terminal that is written over itself."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.core import units

PAUSE = 0.25
"""Seconds between two looks."""
_CELLS = 20


class ProgressLine:
    """A line that is rewritten while something runs. Where stderr is not a terminal, nothing is written."""

    def __init__(self, text: Callable[[], str]) -> None:
        """
        Args:
            text: gives the line; called only when the line is shown.
        """
        self._text, self._next, self._shown = text, 0.0, False
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def show(self) -> None:
        """Write the line, unless that was done a moment ago."""
        if self._live and time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + PAUSE, True
            _write(self._text())

    def close(self, last: object) -> None:
        """Replace the line, if one was shown, by a last one."""
        if self._shown:
            _write(f"{last}\n")


def _write(text: str) -> None:
    sys.stderr.write(f"\r\x1b[2K{text}")
    sys.stderr.flush()


def progress_text(name: str, done: int, steps: int | None, seconds: float, rows: Sequence[Mapping[str, Any]]) -> str:
    """The progress of a run in one line.

    Args:
        name: of the run.
        done: steps.
        steps: how many there will be; None = not known.
        seconds: since its start.
        rows: what it reported, oldest first: loss, samples and seconds.

    >>> progress_text("gpt", 5, 20, 3.0, [{"loss": 2.5, "samples": 80, "seconds": 2.0}])
    'gpt █████░░░░░░░░░░░░░░░ 5/20 · 40.0 samples/s · loss 2.500 · 3.00 s'
    """
    bar = f"{'█' * (_CELLS * done // steps):░<{_CELLS}} {done}/{steps}" if steps else f"{done} steps"
    last: Mapping[str, Any] = next((row for row in reversed(rows) if row.get("loss") is not None), {})
    pace = f" · {units.rate(last['samples'] / last['seconds'])}" if last.get("seconds") and last.get("samples") is not None else ""
    loss = f" · loss {last['loss']:.3f}" if last else ""
    return f"{name} {bar}{pace}{loss} · {units.seconds(seconds)}"
