"""What a notebook shows before any cell is run: the stored outputs of all panels, in one notebook that Jupyter does not trust."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser import test_batch_planner, test_doctor, test_explorer, test_trace_explorer
from tests.browser.lab import Notebook
from workbench.runs.run import Run

pytestmark = pytest.mark.browser
Open = Callable[..., Notebook]
DOCTOR = "doctor = wb.widgets.ThroughputDoctor(d)\ndoctor.num_workers.value = 2\ndoctor"
# fixtures of these files put their data beside the notebook
stored, traces = test_doctor.stored, test_trace_explorer.traces


def test_every_face_shows_before_anything_is_run_and_a_panel_after(open_notebook: Open, stored: None, traces: Path, finished: Run) -> None:
    cells = {
        "planner": [test_batch_planner.LOAD, test_batch_planner.SHOW],
        "explorer": [test_explorer.LOAD, 'wb.widgets.MemoryExplorer(spec, device="L4")'],
        "doctor": [test_doctor.LOAD, DOCTOR, "d.plot()"],
        "trace": [test_trace_explorer.SHOW],
        "run": [f"run = wb.Run.load({str(finished.path)!r})", "run", "run.plot()", "wb.plot.metrics(run)"],
    }
    sources = [source for group in cells.values() for source in group]
    nb = open_notebook(*sources, execute=True)

    def face(source: str) -> Locator:
        output = nb.output(sources.index(source))
        output.scroll_into_view_if_needed()
        return output

    expect(nb.page.locator(".wb-panel")).to_have_count(0)
    expect(nb.page.locator(".jp-RenderedImage img")).to_have_count(3)
    expect(nb.page.locator("[class*=jp-needs-]")).to_have_count(0)  # no slab behind a picture in either theme

    planner = face(test_batch_planner.SHOW)
    expect(planner).to_contain_text("Batch planner")
    expect(planner).to_contain_text("inside the rule's domain")
    expect(planner.locator("table")).to_contain_text("global batch")
    columns = planner.locator('[class^="wb-light-"]')
    assert columns.count() == 14 or planner.locator("[title*='learning rate']").count() == 14
    nb.see("planner-static")

    explorer = face(cells["explorer"][1])
    expect(explorer).to_contain_text("Memory explorer")
    expect(explorer).to_contain_text("to spare")
    expect(explorer.locator("table")).to_contain_text("optimizer states")
    expect(explorer).not_to_contain_text("at most")  # nothing of a picture that is left out
    nb.see("explorer-static")

    doctor = face(DOCTOR)
    expect(doctor).to_contain_text("input-bound (dataset code)")
    expect(doctor).to_contain_text("predicted with num_workers=2")
    expect(doctor.locator("table")).to_contain_text("precision=amp_bf16")
    nb.see("doctor-static")

    trace = face(test_trace_explorer.SHOW)
    expect(trace).to_contain_text("Trace explorer")
    expect(trace).to_contain_text("run the cell to zoom")
    expect(trace.locator("table").first).to_contain_text("data_wait")
    expect(trace.locator("table").last).to_contain_text("aten::addmm")
    assert trace.locator('[title*="gloo:all_reduce"]').count() > 10
    nb.see("trace-static")

    run = face("run")
    expect(run).to_contain_text("finished")
    expect(run).to_contain_text("24 of 24 steps")
    expect(run.locator("table")).to_contain_text("samples/s")
    nb.see("run-static")

    nb.run(0)
    nb.run(sources.index(cells["run"][0]))
    nb.run(sources.index("run"))
    expect(nb.page.locator(".wb-panel .wb-badge")).to_have_text(re.compile("finished"))
    expect(nb.page.locator(".wb-panel .wb-curve").first).to_be_visible()
    nb.see("panel-finished")
