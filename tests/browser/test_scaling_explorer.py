"""The scaling explorer, as a reader of a notebook meets it: keys move the number of GPUs, another cluster is planned at once."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Notebook
from tests.browser.test_doctor import slider

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
LOAD = """import workbench as wb
from workbench.cluster.analysis.transformer import Transformer
model = Transformer(layers=80, hidden=8192, vocabulary=32_000, sequence=2048)"""
SHOW = 'explorer = wb.widgets.ScalingExplorer(model, cluster="DGX-A100", global_batch=512, price=2.0)\nexplorer'


def test_keys_move_the_gpus_and_another_cluster_is_planned(open_notebook: Open) -> None:
    nb = open_notebook(LOAD, SHOW, "explorer.gpus.value = 64", "print(explorer.place.gpus, explorer.cluster.value)")
    for cell in range(3):
        nb.run(cell)
    panel = nb.page.locator(".wb-scaling")
    picture, tiles = panel.locator("svg.wb-scaling-curve"), panel.locator(".wb-tiles")
    expect(tiles).to_contain_text("money")
    expect(picture).to_have_attribute("aria-label", re.compile("; 64 GPUs: "))
    slider(nb, "GPUs").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(picture).to_have_attribute("aria-label", re.compile("; 128 GPUs: "))
    expect(slider(nb, "GPUs")).to_be_focused()
    nb.see("scaling-a100")
    panel.locator("select").select_option("DGX-B200")
    expect(panel.locator(".wb-head").first).to_contain_text("DGX-B200")
    nb.run(3)
    expect(nb.output(3)).to_contain_text("128 DGX-B200")
    expect(picture).to_be_visible()
    nb.see("scaling-b200")
