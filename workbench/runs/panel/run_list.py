"""Shows the runs of a folder in a notebook: RunListPanel, with a filter, columns to sort by, and the panel of a run that is clicked."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from workbench.core.display.html import sheet
from workbench.core.display.table import escape
from workbench.runs.compare import compare
from workbench.runs.listing import COLUMNS, ListedRun, RunFolder, RunList
from workbench.runs.panel import html as faces
from workbench.runs.panel.panel import run_panel
from workbench.runs.run import ACTIVE, Run

TICK = 2.0
"""Seconds between two looks at the folder while runs are running."""
SHOWN = 200
"""The most rows in the table; the filter and the order choose them."""
_STATE = list(COLUMNS).index("state")


class RunTable(anywidget.AnyWidget):
    """A table of runs. A click on a row opens the run, a tick puts it into a comparison, a click on a head sorts."""

    _esm = Path(__file__).with_name("run_table.js").read_text(encoding="utf-8")
    _css = sheet()

    heads = traitlets.List(traitlets.Unicode(), default_value=list(COLUMNS)).tag(sync=True)
    """Heads of the columns."""
    rows = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    """Cells of each row; the first names the run."""
    order = traitlets.List(default_value=["created", True]).tag(sync=True)
    """The column that it is sorted by, and whether the largest comes first."""
    opened = traitlets.Unicode("").tag(sync=True)
    """The run that is shown below; empty for none."""
    ticked = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """The runs that are compared, in the order of their ticks; the first is the baseline."""

    def show(self, rows: Sequence[Sequence[str]]) -> None:
        """Show other rows. Runs that are opened or ticked stay so, even if they are not among them."""
        self.rows = [list(row) for row in rows]

    def __repr__(self) -> str:
        return f"RunTable({len(self.rows)} rows)"


class RunListPanel:
    """The runs of a folder: those that match a text, sorted, kept up to date while one of them runs. It contains widgets, but is none.

    Attributes:
        text: the filter.
        table: the runs; see `RunTable`.
        again: the button that looks at the folder again.
        count: how many runs are shown, as HTML.
        problem: what could not be shown, as HTML.
        comparison: the ticked runs side by side, as HTML.
        detail: a box with the panel of the opened run.
        widget: all of it in one box.
        runs: the RunList of the folder when it was last looked at.
    """

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        """
        Args:
            folder: the folder of the run directories. If there is none yet, the panel says so until there is.

        Raises:
            ValueError: it is no path.
        """
        self._folder = RunFolder(folder)
        self._reading, self._lock = threading.Lock(), threading.RLock()  # the second for what is shown; never held while files are listed
        self.runs = RunList(self._folder.path, ())
        self.text = ipywidgets.Text(placeholder="filter: failed lr=0.1", description="filter", continuous_update=True)
        self.again = ipywidgets.Button(description="Refresh", icon="refresh", tooltip="Look at the folder again")
        self.count, self.problem, self.comparison = (ipywidgets.HTML() for _ in range(3))
        self.table, self.detail = RunTable().add_class("wb-run-table"), ipywidgets.VBox([])
        self._complaints: dict[str, str] = {}
        self._compared: dict[str, Run] = {}
        self._thread: threading.Thread | None = None
        self.text.observe(self._locked(self._show), names="value")
        self.table.observe(self._locked(self._show), names="order")
        self.table.observe(self._locked(self._open), names="opened")
        self.table.observe(self._locked(self._compare), names="ticked")
        self.again.on_click(lambda _: self.refresh())
        top = ipywidgets.HBox([self.text, self.again, self.count]).add_class("wb-picks")
        shown = [top, self.problem, self.table, self.comparison, self.detail]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-trace")
        self._show()
        self.refresh()

    @property
    def live(self) -> bool:
        """Does it look at the folder by itself? Only while one of its runs has not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def shown(self) -> RunList:
        """The runs in the table, and those for which it has no room: filtered and sorted."""
        column, descending = self.table.order
        return self.runs.filter(self.text.value).sort(column, descending=bool(descending))

    def refresh(self) -> RunList:
        """Look at the folder, and show what has changed."""
        with self._reading:
            try:
                runs = self._folder.read()
            except (ValueError, OSError) as error:
                with self._lock:
                    self._complain("folder", str(error))
                return self.runs
            with self._lock:
                self.runs = runs
                self._complain("folder", "")
                self._show()
                if any(run.state in ACTIVE for run in runs if runs.label(run) in self.table.ticked):
                    self._compare()
        self._follow()
        return self.runs

    def _show(self) -> None:
        shown = self.shown
        self.table.show([_row(shown, run) for run in shown.runs[:SHOWN]])
        of = f" of {len(self.runs):,}" if len(shown) < len(self.runs) else ""
        words = f"{len(shown):,}{of} run{'s' * (len(self.runs) != 1)}"
        self.count.value = escape(words + (f", the first {SHOWN} are shown" if len(shown) > SHOWN else ""))

    def _locked(self, call: Callable[[], None]) -> Callable[[object], None]:
        """A callback that does not run beside `refresh`, which the thread calls."""

        def called(_change: object) -> None:
            with self._lock:
                call()

        return called

    def _follow(self) -> None:
        """Look at the folder from time to time, in a thread that ends with the last run."""
        with self._lock:
            if not self.live and any(run.state in ACTIVE for run in self.runs):
                self._thread = threading.Thread(target=self._look, name=f"follow {self._folder.path.name}", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while self._goes_on():
            time.sleep(TICK)
            self.refresh()

    def _goes_on(self) -> bool:
        """Is there something to follow? If not, the thread ends, and counts as ended from here on."""
        with self._lock:
            if any(run.state in ACTIVE for run in self.runs) and not self._complaints.get("folder"):
                return True
            self._thread = None
            return False

    def _open(self) -> None:
        self._complain("opened", "")
        if not self.table.opened:
            self.detail.children = ()
            return
        try:
            self.detail.children = (run_panel(self._load(self.table.opened)).widget,)
        except (ValueError, OSError) as error:  # damaged, deleted, or of a newer workbench
            self.detail.children = ()
            self._complain("opened", str(error))

    def _compare(self) -> None:
        """Each run is loaded once, so that only what is new is read when it goes on."""
        html, problem = "", ""
        if len(self.table.ticked) >= 2:
            try:
                self._compared = {label: self._compared.get(label) or self._load(label) for label in self.table.ticked}
                html = compare(*self._compared.values())._repr_html_()
            except (ValueError, OSError) as error:
                problem = str(error)
        self.comparison.value = html
        self._complain("ticked", problem)

    def _load(self, label: str) -> Run:
        """A run of the list by what its row is called. What a page sends is looked up, not followed."""
        path = next((run.path for run in self.runs if self.runs.label(run) == label), None)
        if path is None:
            raise ValueError(f"{label} is no longer in the folder")
        return Run.load(path)

    def _complain(self, about: str, message: str) -> None:
        self._complaints[about] = message
        self.problem.value = "".join(faces.alert(text) for text in self._complaints.values() if text)

    def __repr__(self) -> str:
        return f"RunListPanel({self._folder.path.name!r}, {len(self.runs)} runs)"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        self.refresh()
        table = dataclasses.replace(self.shown.table, title=f"Runs in {self._folder.path.name}")
        return {**self.widget._repr_mimebundle_(**options), "text/plain": repr(self), "text/html": table._repr_html_()}


def _row(runs: RunList, run: ListedRun) -> list[str]:
    cells = runs.cells(run)
    cells[_STATE] = f"{faces.SIGNS.get(run.state, '?')} {run.state}"
    return cells


_panels: dict[Path, RunListPanel] = {}


def runs(folder: str | os.PathLike[str] = "runs") -> RunListPanel:
    """Return the panel of the runs in a folder: always the same one, however often it is shown.

    Args:
        folder: the folder of the run directories. If there is none yet, the panel says so until there is.

    Raises:
        ValueError: it is no path.
    """
    path = RunFolder(folder).path
    if path not in _panels:
        _panels[path] = RunListPanel(folder)
    return _panels[path]
