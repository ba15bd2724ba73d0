"""The panel of a run, as a reader of a notebook meets it."""

import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Notebook
from tests.conftest import processes_with
from workbench.core import run_directory

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


def test_a_run_is_live_while_a_later_cell_runs_and_keys_choose_a_log_and_stop_it(open_notebook: Open) -> None:
    nb = open_notebook(IMPORT, LAUNCH, "run", BUSY.format(25), "wb.widgets.runs()")
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

    nb.page.locator(".jp-Cell").nth(2).focus()
    tab_until(nb, ".wb-stop")
    tab_until(nb, ".wb-tabs button")
    nb.page.keyboard.press("ArrowLeft")
    expect(nb.page.get_by_role("tab", name="rank 0")).to_be_focused()
    expect(lines).not_to_contain_text("rank 1 step")
    tab_until(nb, ".wb-stop", key="Shift+Tab")
    nb.page.keyboard.press("Enter")
    expect(nb.page.locator(".wb-badge")).to_have_text(re.compile("stopped"))
    expect(nb.page.locator(".wb-stop")).to_be_hidden()
    assert gone(run_id)

    nb.run(4)
    folder = nb.output(4)
    rows, word = folder.locator(".wb-runs tbody tr"), folder.get_by_label("filter")
    word.fill("nowhere")
    expect(rows).to_have_count(0)
    word.fill("stopped")
    folder.get_by_role("button", name="state").click()
    expect(folder.get_by_role("columnheader", name="state")).to_have_attribute("aria-sort", "ascending")
    key = rows.first.get_by_role("button").get_attribute("data-key")
    opens = folder.locator(f'.wb-runs [data-key="{key}"]')  # another run may stop meanwhile, and come first
    opens.press("Enter")
    expect(folder.locator(".wb-badge")).to_have_text(re.compile("stopped"))
    expect(opens).to_be_focused()
    nb.see("runs")


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


def test_a_kernel_restart_leaves_no_process(open_notebook: Open) -> None:
    nb = open_notebook(IMPORT, LAUNCH, "run")
    run_id = launched(nb)
    expect(nb.page.locator(".wb-lines")).to_contain_text("[0] rank 0 step 1 ")
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    nb.page.evaluate(f"() => {{ {kernel}.restart().then(() => {{ window.restarted = true }}) }}")
    assert gone(run_id)
    nb.until("() => window.restarted")
    nb.until("w => w.sessionContext.session?.kernel?.status === 'idle'")
