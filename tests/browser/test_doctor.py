"""The throughput doctor, as a reader of a notebook meets it: a slider moves a bar, a button runs an experiment."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import Lab, Notebook
from tests.browser.test_panel import tab_until
from tests.slow_loader import diagnosis
from workbench.runs.run import Run

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
TASKS = Path(__file__).parents[1] / "scripts" / "slow_task.py"
LOAD = "import json\nimport workbench as wb\nwith open('diagnosis.json') as file:\n    d = wb.Diagnosis.from_json(json.load(file))"
MINUTES = 60_000  # milliseconds


@pytest.fixture
def stored(lab: Lab) -> None:
    """A diagnosis lies beside the notebook."""
    (lab.root / "diagnosis.json").write_text(json.dumps(diagnosis().to_json()))


def bar(nb: Notebook, kind: str) -> Locator:
    return nb.page.locator(f'.wb-steps .wb-bar[aria-label^="{kind}:"]')


def slider(nb: Notebook, name: str) -> Locator:
    """The handle of a knob that can be turned: while it is held, it takes the focus and no key."""
    row = nb.page.locator(".wb-knobs > .widget-inline-hbox").filter(has=nb.page.get_by_text(name, exact=True))
    return row.locator(".slider:not([disabled])").get_by_role("slider")


def width(bar: Locator) -> float:
    """Of all its pieces together, in pixels."""
    return float(bar.evaluate("bar => [...bar.children].reduce((sum, piece) => sum + piece.getBoundingClientRect().width, 0)"))


def test_keys_alone_turn_a_knob_and_the_bar_follows(open_notebook: Open, stored: None) -> None:
    nb = open_notebook(LOAD, "wb.widgets.ThroughputDoctor(d)")
    nb.run(0)
    nb.run(1)
    expect(bar(nb, "measured")).to_be_visible()
    expect(bar(nb, "predicted")).to_have_count(0)
    slider(nb, "num_workers").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(nb.page.locator(".wb-steps .wb-what").first).to_have_text("(predicted with num_workers=1)")
    nb.page.keyboard.press("ArrowRight")
    expect(nb.page.locator(".wb-steps .wb-what").first).to_have_text("(predicted with num_workers=2)")
    assert width(bar(nb, "predicted")) < 0.6 * width(bar(nb, "measured"))
    nb.see("doctor-knobs")
    expect(slider(nb, "num_workers")).to_be_focused()
    nb.page.keyboard.press("Home")
    expect(bar(nb, "predicted")).to_have_count(0)
    tab_until(nb, ".wb-prove")
    tab_until(nb, ".wb-go", key="Shift+Tab")


def test_measure_prove_and_what_they_say(open_notebook: Open, lab: Lab) -> None:
    shutil.copy(TASKS, lab.root)
    spec = 'import workbench as wb\nspec = wb.RunSpec(task="slow_task.py:slow_loader", micro_batch=16)'
    nb = open_notebook(spec, "doctor = wb.widgets.ThroughputDoctor(spec, budget_s=8)\ndoctor", "print(1 + 1)")
    nb.run(0)
    nb.run(1)
    expect(nb.page.locator(".wb-doctor")).to_contain_text("Nothing is measured yet")
    nb.page.get_by_role("button", name="Measure").click()
    expect(nb.page.locator(".wb-doctor [role=progressbar]")).to_be_visible()
    nb.page.get_by_role("button", name="Stop").click()
    expect(nb.page.locator(".wb-doctor")).to_contain_text("stopped while measuring")
    expect(nb.page.locator(".wb-doctor .wb-stop")).to_be_hidden()
    assert [Run.load(path).state for path in lab.root.glob("runs/*-slow_loader-diagnose")] == ["stopped"]
    nb.page.get_by_role("button", name="Measure").click()
    nb.run(2)  # the kernel is free meanwhile
    expect(nb.output(2)).to_have_text("2")
    expect(nb.page.locator(".wb-doctor .wb-badge")).to_have_text("input-bound", timeout=2 * MINUTES)
    expect(nb.page.locator(".wb-doctor")).to_contain_text(re.compile("Why.*Next", re.DOTALL))
    slider(nb, "num_workers").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(bar(nb, "predicted")).to_be_visible()
    choice = nb.page.locator(".wb-choice").filter(has_text="num_workers=").first
    choice.get_by_role("button", name="Prove").click()
    expect(choice).to_contain_text("it helps", timeout=2 * MINUTES)
    expect(choice.locator('.wb-bar[aria-label^="measured:"]')).to_be_visible()
    nb.see("doctor-proved")


def test_an_error_is_shown_in_the_panel(open_notebook: Open, lab: Lab) -> None:
    shutil.copy(TASKS, lab.root)
    nb = open_notebook('import workbench as wb\nwb.widgets.ThroughputDoctor(wb.RunSpec(task="slow_task.py:fails_to_build"))')
    nb.run(0)
    nb.page.get_by_role("button", name="Measure").click()
    expect(nb.page.locator(".wb-doctor .wb-alert")).to_contain_text("no such data", timeout=2 * MINUTES)
    expect(nb.page.get_by_role("button", name="Measure")).to_be_enabled()
    nb.see("doctor-error")
