"""Shows a run in a notebook, live while later cells run: RunPanel, and LogView for what the ranks print."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import anywidget
import ipywidgets
import traitlets

from workbench.core.display.html import sheet
from workbench.core.run_directory import DamagedRunError
from workbench.runs.page import flops_of
from workbench.runs.panel import html as faces
from workbench.runs.panel.follow import Follower, Snapshot
from workbench.runs.rank_ends import MANY_RANKS
from workbench.runs.run import ACTIVE, Run

TICK = 0.25
"""Seconds between two looks at a run."""


class RunPanel:
    """Progress, throughput, loss, machine usage, time per phase, gradient norms, the ranks' output, and a Stop button.

    It holds widgets, and is not a widget itself. A thread reads the run's directory until the run ends, and changes only traits of the
    widgets.

    Attributes:
        run: the Run that is shown.
        widget: everything below, in one box.
        status, words, problem, figures, phases, gradients: HTML; the last is empty without `gradient_norms=`.
        stop: the button.
        log: the output of the ranks.
        now: the run as it was last read.
    """

    def __init__(self, run: Run | str | os.PathLike[str], *, flops_per_sample: float | Literal["count"] | None = None) -> None:
        """A Run, or the path of its directory; `flops_per_sample`, as `wb.report` takes it, adds the MFU."""
        self.run = run = run if isinstance(run, Run) else Run.load(run)
        self._follower, self._complaint, self._lock = Follower(run, flops_of(run, flops_per_sample)), "", threading.Lock()
        self.status, self.words, self.problem, self.figures, self.phases, self.gradients = (ipywidgets.HTML() for _ in range(6))
        self.stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End all processes of this run. While a cell waits for the run, interrupt the kernel."
        )
        many = run.spec.world_size / MANY_RANKS
        self._tick = TICK * max(1.0, 2 * many)  # each look takes the longer, the more files there are
        self.log = LogView(range(run.spec.world_size) if many <= 1 else [0])
        for name in ("status", "words", "problem", "figures", "phases", "gradients", "stop"):
            getattr(self, name).add_class(f"wb-{name}")
        self.stop.on_click(self._stop)
        top = ipywidgets.HBox([self.status, self.stop]).add_class("wb-top")
        parts = [top, self.words, self.problem, self.figures, self.phases, self.gradients, self.log]
        self.widget = ipywidgets.VBox(parts).add_class("wb-panel")
        self.now = self.refresh()
        self._thread = threading.Thread(target=self._follow, name=f"follow {run.name}", daemon=True)
        if self.now.state in ACTIVE:
            self._thread.start()

    @property
    def live(self) -> bool:
        """Does it still follow the run? False after the run's end, or after its directory could not be read."""
        return self.now.state in ACTIVE and self._thread.is_alive()

    def refresh(self) -> Snapshot:
        """Look at the run and show what is new.

        Raises:
            DamagedRunError: its directory can no longer be read.
        """
        with self._lock:
            return self._refresh()

    def _refresh(self) -> Snapshot:
        now = self._follower.snapshot()
        running = now.state in ACTIVE
        self.log.append(self._follower.log_lines(last=not running), all_kept=not running)
        self.status.value = faces.status(self.run, now)
        self.words.value = faces.words(now)
        self.figures.value = faces.figures(now)
        self.phases.value = faces.phases(now)
        self.gradients.value = faces.gradients(now)
        self.problem.value = faces.problem(now) + (self._complaint if now.error is None else "")
        if not running:
            self.stop.layout.display = "none"
            self.log.failed = now.error.rank if now.error else None
            if self.log.failed is not None and self.log.failed not in self.log.ranks:
                self.log.ranks = [*self.log.ranks, self.log.failed]
            self.log.news = f"{self.run.name} {now.state}. {now.error or ''}"
        return now

    def _follow(self) -> None:
        try:
            while self.now.state in ACTIVE:
                time.sleep(self._tick)
                self.now = self.refresh()
        except (DamagedRunError, OSError) as error:  # the directory was removed while we looked
            self._complain(str(error))

    def _stop(self, _button: object) -> None:
        """A callback returns at once: it may be on the thread that every cell of the notebook waits for."""
        self.stop.disabled, self.stop.description = True, "Stopping"
        threading.Thread(target=self._stop_run, daemon=True).start()

    def _stop_run(self) -> None:
        try:
            self.run.stop()
        except (TimeoutError, ValueError, OSError) as error:
            self._complain(str(error))
            self.stop.disabled, self.stop.description = False, "Stop"
        else:
            if not self.run.path.exists():
                self.stop.description = "Stopped"

    def _complain(self, message: str) -> None:
        """Show an error of the panel itself; the error of the run, once there is one, replaces it."""
        self.problem.value = self._complaint = faces.alert(message)

    def __repr__(self) -> str:
        return f"RunPanel({self.run!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        self.now = self.refresh()  # the notebook stores its present state
        bundle = self.widget._repr_mimebundle_(**options)
        return {**bundle, "text/plain": repr(self.run), "text/html": faces.static(self.run, self.now)}


_panels: dict[tuple[Path, str], RunPanel] = {}


def run_panel(run: Run) -> RunPanel:
    """Return the panel of a run: always the same one, however often the run is shown; a new one if it no longer follows the run."""
    key, state = (run.path, run.id), run.state
    if key not in _panels or (not _panels[key].live and state in ACTIVE):
        _panels[key] = RunPanel(run)
    return _panels[key]


_RESENT, _KEPT = 60, 600
"""Lines that are sent again with new ones, so that nothing depends on a single message; and kept for a page that is opened later."""


class LogView(anywidget.AnyWidget):
    """Log lines of many ranks. Only a window of the newest lines is sent, however many are already shown, and the page assembles them by
    their numbers. Lines that a page missed because it was closed are shown as a gap.
    """

    _esm = Path(__file__).with_name("log.js").read_text(encoding="utf-8")
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
        self._lines: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._count = 0
        super().__init__(ranks=list(ranks))
        self.add_class("wb-log")

    def append(self, lines: Iterable[tuple[int, str]], all_kept: bool = False) -> None:
        """Show more lines.

        Args:
            lines: (rank, text) of each.
            all_kept: send all kept lines, for pages that are opened later.
        """
        before = self._count
        for line in lines:
            self._lines.append(line)
            self._count += 1
        size = len(self._lines) if all_kept else min(len(self._lines), self._count - before + _RESENT)
        if self._count > before or all_kept:
            newest = list(self._lines)[len(self._lines) - size :]
            self.window = {"at": self._count - size, "lines": [list(line) for line in newest]}

    @property
    def text(self) -> str:
        """The kept lines, each with its rank in front."""
        return "\n".join(f"[{rank}] {line}" for rank, line in self._lines)

    def __repr__(self) -> str:
        return "LogView()"
