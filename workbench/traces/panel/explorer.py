"""TraceExplorer: threads and streams as lanes to zoom into, with a step to choose, names to search and operators to highlight."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from workbench.core.display.html import Style
from workbench.traces.analysis.breakdown import Breakdown
from workbench.traces.analysis.operators import Ranked
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet
from workbench.traces.panel import html
from workbench.traces.panel.model import ALL, Described, Explored, Stretch

_HERE = Path(__file__).parent


class TraceView(anywidget.AnyWidget):
    """Lanes of events. The page sends the visible part (`window`), and the kernel answers with the rectangles in it (`tiles`)."""

    _esm = (_HERE / "trace_view.js").read_text(encoding="utf-8")

    scene = traitlets.Dict({"strips": [], "span": [0, 1], "steps": [], "colors": [], "inks": [], "kinds": []}).tag(sync=True)
    """Threads and streams with their rows, all of the time, the steps; colour, colour of text and word of each kind of event."""
    window = traitlets.Dict({"start": 0, "end": 1, "first": 0, "rows": 0, "dots": 450}).tag(sync=True)
    """Where the reader looks: nanoseconds, rows, and how many pieces of time can be distinguished."""
    tiles = traitlets.Dict({}).tag(sync=True)
    """What is to be drawn there: `Tiles.packed`, and `choosing`: are some events highlighted?"""
    step = traitlets.List(traitlets.Int()).tag(sync=True)
    """Nanoseconds of the chosen step; empty for all."""
    marked = traitlets.Dict({}).tag(sync=True)
    """Row, start and end of an event that has a frame; empty for none."""

    def __init__(self, on_message: Callable[[dict[str, Any]], None], **values: Any) -> None:
        """
        Args:
            on_message: called with the page's messages: {"ask": "pick", "row": …, "time": …}, or "next", "previous", "step", "nothing".
            values: initial values of the traits.
        """
        super().__init__(**values)
        self.on_msg(lambda _view, content, _buffers: on_message(content))
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
        """Show other rows. The chosen row stays chosen, even if it is not among them."""
        self.heads, self.rows = list(heads), [list(row) for row in rows]

    def __repr__(self) -> str:
        return f"RankedList({len(self.rows)} rows)"


def _button(words: str, tooltip: str, action: Callable[[], object]) -> Any:
    button = ipywidgets.Button(description=words, tooltip=tooltip)
    button.on_click(lambda _: action())
    return button


class TraceExplorer:
    """Lanes by thread, stream and rank, with the parts of the chosen step and its operators; a click on an operator highlights it in the
    lanes.

    A page gets at most some thousands of rectangles, however many events there are: events that are too narrow to see are merged, and
    separated when the reader zooms in.

    Attributes:
        traces: the traces, by rank; a single trace has the key None.
        step: the chosen step; `.value` is its number, or "all".
        search: text that a name must contain; set `.value`.
        rank: the rank whose step and operators are shown; visible if there are several.
        which: "operator" or "kernel"; visible if a device computes.
        operators: the table; `.chosen` is the highlighted name.
        view: the lanes; `.window` is the visible part.
        picked: the selected event, which has a frame, a Described; None without one.
        widget: everything in one box.
    """

    def __init__(self, trace: Trace | TraceSet | str | os.PathLike[str]) -> None:
        """
        Args:
            trace: a Trace, a TraceSet, or the path of a file or directory that torch.profiler wrote.

        Raises:
            ValueError: something else was given.
            TraceError: the path has no trace that can be read.
        """
        self._model = Explored.of(trace)
        self.traces = self._model.traces
        self.picked: Described | None = None
        self._lock, self._quiet = threading.RLock(), True
        self._place: int | None = None
        self._make_widgets()
        self._quiet = False
        self._choose_step()

    def _make_widgets(self) -> None:
        model, first, ranks = self._model, self._model.first, list(self.traces)
        self.rank = ipywidgets.Dropdown(options=ranks, value=first, description="rank")
        self.step = ipywidgets.Dropdown(options=model.choices(first), value=model.usual(first), description="step")
        self.search = ipywidgets.Text(placeholder="part of a name", description="search")
        self.which = ipywidgets.ToggleButtons(options=["operator", "kernel"], value="kernel" if model.device else "operator")
        self.operators = RankedList()
        self.view = TraceView(self._on_message, scene=html.scene(model))
        self._head, self._found, self._event, self._parts, self._label = (ipywidgets.HTML() for _ in range(5))
        self._head.value = html.head(model.title) + html.notes(model.notes)
        actions = {
            self.rank: self._choose_rank,
            self.step: self._choose_step,
            self.search: self._choose_text,
            self.which: self._show_operators,
        }
        for widget, action in actions.items():
            widget.observe(lambda _change, action=action: self._react(action), names="value")
        self.operators.observe(lambda _: self._react(self._choose_operator), names="chosen")
        self.view.observe(lambda _: self._react(self._redraw), names="window")
        steps = [_button("‹ step", "the previous step", lambda: self.go(-1)), _button("step ›", "the next step", lambda: self.go(1))]
        matches = [_button("‹ match", "the previous match", self.previous), _button("match ›", "the next match", self.next)]
        choices = [self.step, *steps, self.search, *matches, self._found.add_class("wb-found")]
        if len(ranks) > 1:
            choices.insert(0, self.rank)
        table = [self._label, *([self.which] if model.device else []), self.operators]
        sides = ipywidgets.HBox([self._parts.add_class("wb-parts"), ipywidgets.VBox(table)]).add_class("wb-sides")
        rows = [self._head, ipywidgets.HBox(choices).add_class("wb-picks"), self.view, self._event, sides, Style()]
        self.widget = ipywidgets.VBox(rows).add_class("wb-panel").add_class("wb-trace")

    # --- what is known

    @property
    def number(self) -> int | None:
        """Number of the chosen step; None for all."""
        return None if self.step.value == ALL else self.step.value

    @property
    def chosen(self) -> Stretch:
        """The chosen step, in nanoseconds of the lanes; the whole file if no step is chosen."""
        return self._model.step(self.rank.value, self.number)

    @property
    def result(self) -> Breakdown:
        """The breakdown of the chosen step, or of all."""
        return self._model.breakdown(self.rank.value, self.number)

    @property
    def ranked(self) -> tuple[Ranked, ...]:
        """Operators or kernels of the chosen step, or of all."""
        return self._model.ranked(self.rank.value, self.number, self.which.value)

    @property
    def lit(self) -> tuple[str, ...]:
        """The names that are highlighted, by search or by choice; empty without either."""
        if self.operators.chosen:
            return (self.operators.chosen,)
        return tuple(self._model.layout.names[code] for code in self._model.layout.find(self.search.value).tolist())

    # --- what is chosen

    def _react(self, action: Any) -> None:
        with self._lock:
            if not self._quiet:
                action()

    def _choose_rank(self) -> None:
        number = self.step.value
        self._quiet = True
        self.step.options = self._model.choices(self.rank.value)
        self.step.value = number if number in [value for _, value in self.step.options] else ALL
        self._quiet = False
        self._choose_step()

    def _choose_step(self) -> None:
        stretch = self.chosen
        everything = self._model.breakdown(self.rank.value, None)
        self._parts.value = html.parts(self.result, everything)
        self.view.step = [] if self.number is None else [stretch.start, stretch.end]
        self._show_operators()
        self._look(stretch.start, stretch.end)

    def _choose_text(self) -> None:
        self._quiet = True
        self.operators.chosen = ""
        self._quiet = False
        self._show_found()

    def _choose_operator(self) -> None:
        self._quiet = True
        self.search.value = ""
        self._quiet = False
        self._show_found()

    def _show_found(self) -> None:
        layout = self._model.layout
        calls = int(layout.chosen(layout.called(self.lit)).sum())
        self._found.value = html.found(self.search.value or self.operators.chosen, calls)
        self._redraw()

    def _show_operators(self) -> None:
        self._label.value = html.label(self.which.value, self.number)
        self.operators.show((self.which.value, *html.HEADS), html.cells(self.ranked))

    # --- where one looks

    def zoom(self, start: float, end: float) -> None:
        """Show a part of the time, in seconds from the first event.

        Raises:
            ValueError: the end is before the start.
        """
        if not start < end:
            raise ValueError(f"zoom({start!r}, {end!r}): seconds are allowed, and it has to end after it begins")
        with self._lock:
            self._look(int(start * 1e9), int(end * 1e9))

    def go(self, by: int) -> None:
        """Go to the next step, or with -1 to the previous step; at the ends nothing changes."""
        numbers = [value for _, value in self.step.options]
        here = numbers.index(self.step.value)
        self.step.value = numbers[min(max(here + by, 0), len(numbers) - 1)]

    def next(self) -> Described | None:
        """Go to the next highlighted event; None without any."""
        return self._follow(1)

    def previous(self) -> Described | None:
        """Go to the previous highlighted event."""
        return self._follow(-1)

    def _follow(self, way: int) -> Described | None:
        with self._lock:
            layout = self._model.layout
            place = layout.following(layout.chosen(layout.called(self.lit)), self._place, way)
            if place is not None:
                self._pick(place)
                self._show(place)
            return self.picked if place is not None else None

    def _show(self, place: int) -> None:
        """Move the window to an event that is outside of it or too small in it."""
        start, end = int(self._model.layout.start[place]), int(self._model.layout.end[place])
        window = self.view.window
        length = window["end"] - window["start"]
        if not (window["start"] <= start and end <= window["end"]) or end - start < length / 200:
            width = max(20 * (end - start), 1_000) if end - start < length / 200 or end - start > length else length
            self._look(int(start + end - width) // 2, int(start + end + width) // 2)

    def _look(self, start: int, end: int) -> None:
        window = self.view.window
        rows = {"first": window["first"], "rows": window["rows"] or self._model.layout.rows}
        self.view.window = {"start": start, "end": max(end, start + 1), **rows, "dots": window["dots"]}

    def _pick(self, place: int | None) -> None:
        layout = self._model.layout
        self._place = place
        self.picked = None if place is None else self._model.described(place)
        self._event.value = "" if self.picked is None else html.described(self.picked)
        self.view.marked = (
            {} if place is None else {"row": int(layout.row[place]), "start": int(layout.start[place]), "end": int(layout.end[place])}
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        """Answer a message of the page."""
        with self._lock:
            match message.get("ask"):
                case "pick":
                    place = self._model.layout.at(int(message["row"]), float(message["time"]), float(message["within"]))
                    self._pick(place)
                    if self.picked is not None:
                        self.operators.chosen = self.picked.name
                case "next":
                    self.next()
                case "previous":
                    self.previous()
                case "step":
                    self.go(int(message["by"]))
                case "nothing":
                    self._pick(None)
                    self.operators.chosen = self.search.value = ""

    def _redraw(self) -> None:
        """Make what the page draws."""
        self.view.tiles = self._model.drawn(self.view.window, self.lit, choosing=bool(self.lit or self.search.value.strip()))

    # --- how it shows itself

    def __str__(self) -> str:
        rows = [f"{name:<60.60}  {calls:>8}  {own:>9}  {share:>7}" for name, calls, own, share, _ in html.cells(self.ranked)]
        return "\n".join([f"Trace explorer: {self._model.title}", str(self.result), *rows])

    def __repr__(self) -> str:
        return f"TraceExplorer({self._model.title!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        with self._lock:
            bundle = self.widget._repr_mimebundle_(**options)
            static = html.static(self._model, self.rank.value, self.number, self.which.value)
        return {**bundle, "text/plain": repr(self), "text/html": static}
