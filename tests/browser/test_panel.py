"""The panel of a run, as a reader of a notebook meets it."""

import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Notebook
from tests.conftest import processes_with
from workbench.core import run_directory
from workbench.runs.run import Run

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]

IMPORT = "import time\nimport workbench as wb"
LAUNCH = 'run = wb.launch("train_slowly.py", nproc_per_node=2, watch=True)\nprint(run.id)'
BUSY = "while run.progress[0] < {0}: time.sleep(0.05)\nprint('done with', run.state)"


def launched(notebook: Notebook) -> str:
    """Run the first three cells (import, launch, show); the id of the run."""
    for cell in range(3):
        notebook.run(cell)
    return notebook.output(1).inner_text().strip()


def gone(run_id: str, within: float = 20) -> bool:
    """Has every process of a run ended?"""
    limit = time.monotonic() + within
    while (left := processes_with(run_directory.ENV_RUN_ID, run_id)) and time.monotonic() < limit:
        time.sleep(0.1)
    return not left


def test_a_run_is_live_while_a_later_cell_runs_and_stop_ends_it(open_notebook: Open) -> None:
    nb = open_notebook(IMPORT, LAUNCH, "run", BUSY.format(25))
    run_id = launched(nb)
    words, lines = nb.page.locator(".wb-words"), nb.page.locator(".wb-lines")
    nb.run(3, wait=False)
    expect(words).to_contain_text(re.compile(r"^[1-9]\d* steps"))
    before = words.inner_text()
    expect(words).not_to_have_text(before)
    expect(lines).to_contain_text("[1] rank 1 step 5 ")
    expect(nb.page.locator(".wb-row")).to_have_count(2)
    nb.until_run(3)
    expect(nb.output(3)).to_have_text("done with running")

    nb.page.get_by_role("tab", name="rank 1").click()
    expect(lines).to_contain_text("rank 1 step 25 ")
    expect(lines).not_to_contain_text("rank 0")
    nb.see("panel-running")

    nb.page.get_by_role("button", name="Stop").click()
    expect(nb.page.locator(".wb-badge")).to_have_text(re.compile("stopped"))
    expect(nb.page.locator(".wb-stop")).to_be_hidden()
    assert gone(run_id)


def test_keys_alone_choose_a_log_and_stop_the_run(open_notebook: Open) -> None:
    nb = open_notebook(IMPORT, LAUNCH, "run")
    run_id = launched(nb)
    expect(nb.page.locator(".wb-lines")).to_contain_text("[1] rank 1 step 1 ")
    nb.page.locator(".jp-Cell").nth(2).focus()
    tab_until(nb, ".wb-stop")
    tab_until(nb, ".wb-tabs button")
    nb.page.keyboard.press("ArrowRight")
    expect(nb.page.get_by_role("tab", name="rank 0")).to_be_focused()
    expect(nb.page.locator(".wb-lines")).not_to_contain_text("rank 1 step")
    tab_until(nb, ".wb-stop", key="Shift+Tab")
    nb.page.keyboard.press("Enter")
    expect(nb.page.locator(".wb-badge")).to_have_text(re.compile("stopped"))
    assert gone(run_id)


def focused(nb: Notebook, selector: str) -> bool:
    return bool(nb.page.evaluate("selector => document.activeElement.matches(selector)", selector))


def tab_until(nb: Notebook, selector: str, key: str = "Tab") -> None:
    """Press Tab until the focus is on `selector`."""
    for _ in range(20):
        nb.page.keyboard.press(key)
        if focused(nb, selector):
            return
    raise AssertionError(f"{key} does not reach {selector}")


def test_a_failed_run_names_the_rank_and_shows_its_traceback(open_notebook: Open) -> None:
    launch = 'run = wb.launch("train_slowly.py", args=["--fail-at", "12"], nproc_per_node=2, watch=True)\nprint(run.id)'
    nb = open_notebook(IMPORT, launch, "run")
    run_id = launched(nb)
    problem = nb.page.locator(".wb-alert")
    expect(problem).to_contain_text("rank 1 failed first: ValueError: a broken picture: <data/cat.jpg>")
    expect(problem.locator("pre")).to_contain_text("train_slowly.py")
    expect(nb.page.get_by_role("tab", name="rank 1")).to_contain_text("failed first")
    below = "() => (pre => pre.scrollHeight - pre.scrollTop - pre.clientHeight)(document.querySelector('.wb-lines'))"
    assert nb.page.evaluate(below) < 24, "the log does not follow its end"
    nb.see("panel-failed")
    assert gone(run_id)


def test_the_static_face_shows_before_anything_is_run_and_the_panel_after(open_notebook: Open, finished: Run) -> None:
    load = f"import workbench as wb\nrun = wb.Run.load({str(finished.path)!r})"
    nb = open_notebook(load, "run", "run.plot()", "wb.plot.metrics(run)", "wb.widgets.runs(run.path.parent)", execute=True)
    face = nb.output(1)
    expect(face).to_contain_text("finished")
    expect(face).to_contain_text("24 of 24 steps")
    expect(face.locator("table")).to_contain_text("samples/s")
    expect(nb.page.locator(".wb-panel")).to_have_count(0)
    expect(nb.page.locator(".jp-RenderedImage img")).to_have_count(2)
    expect(nb.page.locator("[class*=jp-needs-]")).to_have_count(0)  # no slab behind a picture in either theme
    nb.see("static-untrusted")
    nb.run(0)
    nb.run(1)
    expect(nb.page.locator(".wb-panel .wb-badge")).to_have_text(re.compile("finished"))
    expect(nb.page.locator(".wb-panel .wb-curve")).to_be_visible()
    nb.see("panel-finished")
    nb.run(4)
    rows = nb.output(4).locator(".wb-runs tbody tr")
    expect(rows).to_have_count(1)
    nb.output(4).get_by_label("filter").fill("nowhere")
    expect(rows).to_have_count(0)
    nb.output(4).get_by_label("filter").fill("finished")
    nb.output(4).get_by_role("button", name="steps").click()
    expect(nb.output(4).get_by_role("columnheader", name="steps")).to_have_attribute("aria-sort", "ascending")
    rows.get_by_role("button").press("Enter")
    expect(nb.output(4).locator(".wb-panel .wb-badge")).to_have_text(re.compile("finished"))
    expect(rows.get_by_role("button")).to_be_focused()
    nb.see("runs")


def test_a_kernel_restart_leaves_no_process(open_notebook: Open) -> None:
    nb = open_notebook(IMPORT, LAUNCH, "run")
    run_id = launched(nb)
    expect(nb.page.locator(".wb-lines")).to_contain_text("[0] rank 0 step 1 ")
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    nb.page.evaluate(f"() => {{ {kernel}.restart().then(() => {{ window.restarted = true }}) }}")
    assert gone(run_id)
    nb.until("() => window.restarted")
    nb.until("w => w.sessionContext.session?.kernel?.status === 'idle'")
