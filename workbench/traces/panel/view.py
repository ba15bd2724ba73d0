"""TraceView and RankedList: a window on a trace's events, drawn in the page; and a table whose rows can be chosen."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

_HERE = Path(__file__).parent


class TraceView(anywidget.AnyWidget):
    """Lanes of events. The page says where the reader looks (`window`), the kernel answers with what is to be drawn there (`tiles`)."""

    _esm = (_HERE / "trace_view.js").read_text(encoding="utf-8")

    scene = traitlets.Dict({"strips": [], "span": [0, 1], "steps": [], "colors": [], "inks": [], "kinds": []}).tag(sync=True)
    """Threads and streams with their rows, all of the time, the steps; colour, colour of text and word of each kind of event."""
    window = traitlets.Dict({"start": 0, "end": 1, "first": 0, "rows": 0, "dots": 450}).tag(sync=True)
    """Where the reader looks: nanoseconds, rows, and how many pieces of time can be told apart."""
    tiles = traitlets.Dict({}).tag(sync=True)
    """What is to be drawn there: `Tiles.packed`, and `choosing`: are some events told from the others?"""
    step = traitlets.List(traitlets.Int()).tag(sync=True)
    """Nanoseconds of the chosen step; empty for all."""
    marked = traitlets.Dict({}).tag(sync=True)
    """Row, start and end of an event that has a frame; empty for none."""

    def __init__(self, asked: Callable[[dict[str, Any]], None], **values: Any) -> None:
        """
        Args:
            asked: called with what the page asks for: {"ask": "pick", "row": …, "time": …}, or "next", "previous", "step", "nothing".
            values: of the traits.
        """
        super().__init__(**values)
        self.on_msg(lambda _view, content, _buffers: asked(content))
        self.add_class("wb-trace-view")

    def __repr__(self) -> str:
        return "TraceView()"


class RankedList(anywidget.AnyWidget):
    """A table; one row at most is chosen."""

    _esm = (_HERE / "trace_ranking.js").read_text(encoding="utf-8")

    heads = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """Heads of the columns."""
    rows = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    """Cells; the first of a row is what is chosen."""
    chosen = traitlets.Unicode("").tag(sync=True)
    """The first cell of the chosen row; empty for none."""

    def show(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show other rows. What was chosen stays so, whether it is among them or not."""
        self.heads, self.rows = list(heads), [list(row) for row in rows]

    def __repr__(self) -> str:
        return f"RankedList({len(self.rows)} rows)"
