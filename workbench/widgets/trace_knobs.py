"""The knobs and views of the trace explorer, in one box; they know nothing of a trace."""

from collections.abc import Sequence
from typing import Any

import ipywidgets

from workbench.widgets.style import Style
from workbench.widgets.trace_view import RankedList, TraceView


class TraceKnobs:
    """Widgets.

    Attributes:
        rank, step, search, which: what is chosen; `.value` turns one.
        earlier, later, before, after: buttons for steps and for matches.
        operators, view: the table and the lanes.
        head, found, event, parts, label: what is written.
        widget: everything in one box.
    """

    def __init__(
        self, view: TraceView, ranks: Sequence[int | None], steps: Sequence[tuple[str, int | str]], step: int | str, device: bool
    ) -> None:
        """
        Args:
            view: the lanes.
            ranks: to choose from; the choice is shown where there are several.
            steps: words and number of each.
            step: which is chosen at first.
            device: are there kernels beside operators?
        """
        self.view = view
        self.rank = ipywidgets.Dropdown(options=list(ranks), value=ranks[0], description="rank")
        self.step = ipywidgets.Dropdown(options=steps, value=step, description="step")
        self.earlier, self.later = _button("‹ step", "the step before"), _button("step ›", "the next step")
        self.search = ipywidgets.Text(placeholder="part of a name", description="search")
        self.before, self.after = _button("‹ match", "the match before"), _button("match ›", "the next match")
        self.which = ipywidgets.ToggleButtons(options=["operator", "kernel"], value="kernel" if device else "operator")
        self.operators = RankedList()
        self.head, self.found, self.event, self.parts, self.label = (ipywidgets.HTML() for _ in range(5))
        picks = [self.step, self.earlier, self.later, self.search, self.before, self.after, self.found.add_class("wb-found")]
        if len(ranks) > 1:
            picks.insert(0, self.rank)
        table = [self.label, *([self.which] if device else []), self.operators]
        sides = ipywidgets.HBox([self.parts.add_class("wb-parts"), ipywidgets.VBox(table)]).add_class("wb-sides")
        shown = [self.head, ipywidgets.HBox(picks).add_class("wb-picks"), view, self.event, sides, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-trace")


def _button(words: str, tooltip: str) -> Any:
    return ipywidgets.Button(description=words, tooltip=tooltip)
