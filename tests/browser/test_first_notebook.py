"""The first notebook with a live panel, run in JupyterLab as a reader would, to the picture of its first run."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.lab import Lab, Notebook

pytestmark = pytest.mark.browser
FOLDER = Path(__file__).parents[2] / "notebooks"
LAST = "before.plot()"
"""The last cell that is run here: what comes after it, more runs among it, `make notebooks` executes and compares."""
MINUTES = 60_000  # milliseconds
WATCH = """() => { window.ran = false; window.seen = new Set(); window.watching = setInterval(() => {
    for (const bar of document.querySelectorAll('.wb-progress')) window.seen.add(bar.getAttribute('aria-valuenow')) }, 100) }"""
RUN = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ran = true }) }"
ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets.flatMap(cell => (cell.model.toJSON().outputs ?? [])
    .filter(output => output.output_type === 'error')
    .map(output => `${output.ename}: ${output.evalue} in:\\n${cell.model.sharedModel.getSource()}`))"""


def test_it_begins_and_its_panel_moves(open_notebook: Callable[..., Notebook], lab: Lab) -> None:
    root = Path(tempfile.mkdtemp(dir=lab.root))  # its own: its times are judged, so that it may be run a second time
    there = shutil.copytree(FOLDER, root / "notebooks", ignore=shutil.ignore_patterns("runs", ".*", "__pycache__"))
    (root / "data_samples").symlink_to(FOLDER.parent / "data_samples")
    path = next(there.glob("01_*.ipynb"))
    notebook = json.loads(path.read_text())
    last = next(place for place, cell in enumerate(notebook["cells"]) if LAST in "".join(cell["source"]))
    path.write_text(json.dumps(notebook | {"cells": notebook["cells"][: last + 1]}))
    nb = open_notebook(path)
    nb.page.evaluate(WATCH)
    nb.page.evaluate(RUN)
    nb.page.wait_for_function("() => window.ran", timeout=5 * MINUTES)
    errors = [error for error in nb.page.evaluate(ERRORS) if "A busy machine does that" not in error]  # here other tests make it busy
    assert errors == []
    moved = {value for value in nb.page.evaluate("() => [...window.seen]") if value not in (None, "0", "100")}
    assert len(moved) >= 3, f"the progress bar stood at {moved}"
    nb.page.locator(".wb-panel").first.scroll_into_view_if_needed()
    nb.see("first-notebook")
