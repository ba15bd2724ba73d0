"""Why not linear, as a reader of a notebook meets it: keys move the number of ranks, a tick mends a part, and the waterfall follows."""

import json
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import Lab, Notebook
from tests.browser.test_doctor import slider, width
from tests.planted_gap import planted
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.runs.spec import RunSpec

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
LOAD = "import json\nimport workbench as wb\nanswer = wb.WhyNotLinear.from_json(json.load(open('answer.json')))"
SHOW = "panel = wb.widgets.WhyNotLinear(answer)\npanel"


@pytest.fixture
def stored(lab: Lab) -> None:
    """An answer of two ranks lies beside the notebook."""
    evidence = planted(slow=0.004, loaders=0.002, reduction=0.005, buckets=12, start=0.05)
    answer = WhyNotLinear(evidence=evidence, spec=RunSpec(task="text-gpt", nproc_per_node=2, device="cpu"))
    (lab.root / "answer.json").write_text(json.dumps(answer.to_json()))


def test_a_tick_mends_a_part_and_keys_move_the_ranks(open_notebook: Open, stored: None) -> None:
    nb = open_notebook(LOAD, SHOW, "print(panel.mended, panel.ranks.value)")
    nb.run(0)
    nb.run(1)
    panel = nb.page.locator(".wb-linear")

    def bar(name: str) -> Locator:
        return panel.locator(f'.wb-bar[aria-label^="{name}:"]')

    expect(bar("slow rank")).to_be_visible()
    row = panel.locator(".wb-line-of").filter(has=nb.page.locator('.wb-bar[aria-label^="slow rank:"]'))
    tick = row.locator("input[type=checkbox]")
    tick.focus()
    nb.page.keyboard.press("Space")
    expect(panel.locator(".wb-tiles")).to_contain_text("fixed, predicted")
    expect(bar("fixed")).to_be_visible()
    expect(tick).to_be_focused()
    assert width(bar("fixed")) > width(bar("2 ranks"))
    nb.see("linear-mended")
    slider(nb, "ranks").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(bar("4 ranks")).to_have_attribute("aria-label", re.compile("predicted"))
    expect(panel.locator(".wb-go")).to_be_visible()
    nb.run(2)
    expect(nb.output(2)).to_have_text("['slow rank'] 4")
    nb.see("linear-more")
