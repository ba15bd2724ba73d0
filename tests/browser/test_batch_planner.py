"""The batch planner, as a reader of a notebook meets it: keys move the batch; the light, the learning rate and the picture follow."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Notebook
from tests.browser.test_doctor import slider
from tests.browser.test_panel import tab_until

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
LOAD = """import workbench as wb
plan = wb.BatchPlan(micro_batch=32, world_size=2, lr=0.1, warmup_steps=20, optimizer="sgd(momentum=0.9)")
curve = {32: 5000.0, 128: 9000.0}"""
SHOW = "planner = wb.widgets.BatchPlanner(plan, noise_scale=400, throughput=curve)\nplanner"


def test_keys_move_the_batch_and_all_follows(open_notebook: Open) -> None:
    nb = open_notebook(LOAD, SHOW, "print(planner.result.lr, planner.result.world_size)")
    nb.run(0)
    nb.run(1)
    panel = nb.page.locator(".wb-planner")
    badge, product = panel.locator(".wb-badge"), panel.locator(".wb-product")
    expect(badge).to_have_text("inside the rule's domain")
    expect(product).to_have_text("32 × 1 × 2 = 64 samples per step")
    slider(nb, "batch").focus()
    for _ in range(2):
        nb.page.keyboard.press("ArrowRight")
    expect(product).to_have_text("128 × 1 × 2 = 256 samples per step")
    expect(badge).to_have_text("at the edge of the rule's domain")
    expect(panel.locator(".wb-tiles")).to_contain_text("was 0.1")
    expect(slider(nb, "batch")).to_be_focused()
    nb.see("planner-edge")

    slider(nb, "processes").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(product).to_have_text("64 × 1 × 4 = 256 samples per step")
    nb.run(2)
    expect(nb.output(2)).to_have_text(re.compile(r"^0\.28\d* 4\s*$"))

    panel.locator("select").select_option("adam")
    expect(badge).to_have_text("impossible")
    expect(panel).to_contain_text("the optimizer is sgd: try linear or damped")
    expect(panel.locator(".wb-schedule")).to_have_count(0)
    panel.locator("select").select_option("linear")
    expect(panel.locator(".wb-schedule")).to_be_visible()
    columns = panel.locator(".wb-columns > div")
    assert columns.count() == 14
    heights = [column.locator("div").nth(1).evaluate("box => box.getBoundingClientRect().height") for column in columns.all()]
    assert heights == sorted(heights)
    nb.see("planner-linear")
    tab_until(nb, ".wb-planner select")
