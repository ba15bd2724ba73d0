"""LogView: append-only text of many ranks in a notebook, with a tab per rank and one for all of them."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import anywidget
import traitlets

from workbench.core.display.style import sheet

_HERE = Path(__file__).parent
_SHORT, _LONG = 60, 600  # lines: sent along with new ones, so that nothing depends on one message; kept for a page that is opened later


class LogView(anywidget.AnyWidget):
    """Lines of many ranks. What is sent does not grow with what is already shown: a window on the newest lines, which the page puts
    together by their numbers. Lines that a page never got (it was closed meanwhile) are shown as a gap.
    """

    _esm = (_HERE / "log.js").read_text(encoding="utf-8")
    _css = sheet()

    window = traitlets.Dict({"at": 0, "lines": []}).tag(sync=True)
    """{"at": number of the first line, "lines": [[rank, text], …]}"""
    ranks = traitlets.List(traitlets.Int()).tag(sync=True)
    """Ranks that get a tab."""
    failed = traitlets.Int(None, allow_none=True).tag(sync=True)
    """The rank whose tab is marked as the one that failed first."""
    news = traitlets.Unicode("").tag(sync=True)
    """Spoken by screen readers when it changes, and not shown; the log itself is too fast to be read out."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=_LONG)
        self._count = 0
        super().__init__(ranks=list(ranks))
        self.add_class("wb-log")

    def append(self, lines: Iterable[tuple[int, str]], all_kept: bool = False) -> None:
        """Show more lines.

        Args:
            lines: (rank, text) of each.
            all_kept: send all lines that are kept, for pages that are opened later.
        """
        before = self._count
        for line in lines:
            self._lines.append(line)
            self._count += 1
        size = len(self._lines) if all_kept else min(len(self._lines), self._count - before + _SHORT)
        if self._count > before or all_kept:
            newest = list(self._lines)[len(self._lines) - size :]
            self.window = {"at": self._count - size, "lines": [list(line) for line in newest]}

    @property
    def text(self) -> str:
        """The kept lines, each with its rank in front."""
        return "\n".join(f"[{rank}] {line}" for rank, line in self._lines)

    def __repr__(self) -> str:
        return "LogView()"
