"""The memory explorer, as a reader of a notebook meets it: keys move a slider and the bar follows, a device moves its line."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import Notebook
from tests.browser.test_doctor import slider
from tests.browser.test_panel import tab_until

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
LOAD = 'import workbench as wb\nspec = wb.RunSpec(task="text-gpt", micro_batch=4096)'
FULL = 'wb.widgets.MemoryExplorer(spec.replace(micro_batch=32768), device="T4")'
MINUTE = 60_000  # milliseconds


def bar(nb: Notebook) -> Locator:
    return nb.page.locator('.wb-explorer .wb-bar[aria-label^="predicted:"]').first


def held(nb: Notebook) -> float:
    """Length of everything before the capacity's line that is not free, in pixels."""
    return float(
        bar(nb).evaluate(
            "bar => [...bar.children].filter(piece => !piece.matches('.wb-free, .wb-capacity'))"
            ".reduce((sum, piece) => sum + piece.getBoundingClientRect().width, 0)"
        )
    )


def line(nb: Notebook) -> float:
    """Where the capacity's line is, as a share of the bar."""
    return float(
        bar(nb).evaluate(
            "bar => { const all = bar.getBoundingClientRect(), line = bar.querySelector('.wb-capacity').getBoundingClientRect();"
            " return (line.left + line.width / 2 - all.left) / all.width }"
        )
    )


def test_keys_move_the_batch_and_a_device_its_line_until_it_does_not_fit(open_notebook: Open) -> None:
    nb = open_notebook(
        LOAD, 'explorer = wb.widgets.MemoryExplorer(spec, device="L4")\nexplorer', "explorer.wait()\nprint(explorer.result.total)", FULL
    )
    nb.run(0)
    nb.run(1)
    panel = nb.page.locator(".wb-explorer")
    expect(panel.locator(".wb-badge")).to_have_text("fits", timeout=MINUTE)
    expect(panel).to_contain_text("Peak")
    full = held(nb)
    slider(nb, "micro_batch").focus()
    for key in ("ArrowLeft",) * 4:  # an octave
        nb.page.keyboard.press(key)
    expect(panel.locator('[role="status"]')).to_have_count(0, timeout=MINUTE)
    expect(panel.locator(".widget-readout").first).to_have_text("2048")
    expect(panel.locator(".wb-icicle")).to_be_visible()
    expect(slider(nb, "micro_batch")).to_be_focused()
    nb.run(2)
    assert held(nb) < 0.8 * full
    before = line(nb)
    text = panel.locator(".wb-memory").inner_text()
    assert "L4: 20.9 GiB (5 % kept free)" in text
    nb.see("explorer-batch")
    panel.locator("select").last.select_option("T4")
    expect(panel.locator(".wb-memory")).to_contain_text("T4: 13.8 GiB (5 % kept free)")
    expect(panel.locator('[role="status"]')).to_have_count(0, timeout=MINUTE)
    assert before > 0.99
    assert line(nb) > 0.99
    tab_until(nb, ".wb-explorer select")

    nb.command("notebook:clear-all-cell-outputs")
    nb.run(3)
    expect(panel.locator(".wb-badge")).to_have_text("does not fit", timeout=MINUTE)
    assert 0.1 < line(nb) < 0.95
    nb.see("explorer-full")
    panel.locator("select").last.select_option("H200")
    expect(panel.locator(".wb-badge")).to_have_text("fits", timeout=MINUTE)
    assert line(nb) > 0.99
