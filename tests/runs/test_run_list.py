"""The panel of a folder's runs without a browser: what it shows, filters, sorts, opens and compares, and that its thread ends."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.runs import listing
from workbench.runs.panel import run_list
from workbench.runs.panel.run_list import SHOWN, RunListPanel, runs
from workbench.runs.spec import RunSpec

Make = Callable[..., HandMade]
SPEC = RunSpec(task="text-gpt", nproc_per_node=2, steps=20)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run_list, "TICK", 0.02)
    yield
    for thread in threading.enumerate():
        if thread.name == "follow runs":
            thread.join(10)


def until(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def three(by_hand: Make) -> Path:
    """Runs of three learning rates: 000 and 001 have finished, 002 has failed without a step."""
    by_hand(name="<b>first</b>", created=1.0, spec=SPEC.replace(lr=0.1).to_json()).steps(20).losses(20).ended("finished")
    by_hand(name="second", created=2.0, spec=SPEC.replace(lr=0.2).to_json()).steps(20, forward=0.11).losses(4).ended("finished")
    made = by_hand(name="third", created=3.0, spec=SPEC.replace(lr=0.3).to_json()).ended("failed")
    return made.path.parent


def names(panel: RunListPanel) -> list[str]:
    return [row[0] for row in panel.table.rows]


def test_rows_are_filtered_and_sorted(by_hand: Make) -> None:
    panel = RunListPanel(three(by_hand))
    assert names(panel) == ["002", "001", "000"]
    assert panel.table.rows[2] == ["000", "✔ finished", "20 of 20", "0.1", "123 samples/s", "lr=0.1"]
    assert panel.count.value == "3 runs"
    assert not panel.live
    panel.table.order = ["loss", False]
    assert names(panel) == ["000", "001", "002"]  # a run without a loss is last, in either order
    panel.table.order = ["loss", True]
    assert names(panel) == ["001", "000", "002"]
    panel.text.value = "FINISHED lr=0.2"
    assert (names(panel), panel.count.value) == (["001"], "1 of 3 runs")
    panel.text.value = "nothing like it"
    assert (names(panel), panel.count.value) == ([], "0 of 3 runs")


def test_a_click_opens_the_panel_of_the_run(by_hand: Make) -> None:
    panel = RunListPanel(three(by_hand))
    panel.table.opened = "000"
    (shown,) = panel.detail.children
    assert "&lt;b&gt;first&lt;/b&gt;" in shown.children[0].children[0].value
    panel.table.opened = ""
    assert panel.detail.children == ()
    panel.table.opened = "../../etc"  # a page can name only runs of the list
    assert panel.detail.children == ()
    assert "../../etc is no longer in the folder" in panel.problem.value
    shutil.rmtree(panel.runs[1].path)
    panel.table.opened = "001"
    assert "no such folder" in panel.problem.value


def test_two_ticks_compare(by_hand: Make) -> None:
    panel = RunListPanel(three(by_hand))
    panel.table.ticked = ["001"]
    assert panel.comparison.value == ""
    panel.table.ticked = ["001", "000"]
    assert panel.comparison.value.index("lr=0.2") < panel.comparison.value.index("lr=0.1")  # the first tick is the baseline
    assert "2.54×" in panel.comparison.value
    panel.table.ticked = ["001", "002"]
    assert panel.comparison.value == ""
    assert "has no measured step to compare" in panel.problem.value
    panel.table.ticked = []
    assert panel.problem.value == ""


def test_it_follows_runs_until_the_last_has_ended(by_hand: Make) -> None:
    made = by_hand(created=1.0, spec=SPEC.to_json()).steps(10).losses(10).alive()
    other = by_hand(created=2.0, spec=SPEC.replace(lr=0.2).to_json()).steps(10).ended("finished")
    panel = RunListPanel(made.path.parent)
    assert panel.live
    panel.table.ticked = [made.path.name, other.path.name]
    before = panel.comparison.value
    made.losses(12)
    made.steps(20, rank=1, forward=0.5)
    until(lambda: panel.table.rows[1][2] == "12 of 20")
    until(lambda: panel.comparison.value != before)
    by_hand(created=3.0, spec=SPEC.to_json()).ended("stopped")
    until(lambda: names(panel) == ["002", "001", "000"])
    made.ended("finished")
    until(lambda: not panel.live)
    assert panel.table.rows[2][1] == "✔ finished"
    again = by_hand(created=4.0).alive()
    panel.again.click()
    assert panel.live
    again.ended("failed")
    until(lambda: not panel.live)


def test_a_folder_that_goes_away_ends_the_thread_with_a_word(by_hand: Make) -> None:
    made = by_hand().alive()
    panel = RunListPanel(made.path.parent)
    shutil.rmtree(made.path.parent)
    until(lambda: not panel.live)
    assert "is not a folder; runs go to" in panel.problem.value
    made.path.parent.mkdir()
    assert len(panel.refresh()) == 0
    assert panel.problem.value == ""


def test_before_the_first_run_the_panel_says_so(by_hand: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback."""
    monkeypatch.chdir(tmp_path)
    panel = runs()
    assert f"{tmp_path / 'runs'} is not a folder; runs go to `runs` in the current folder" in unescape(panel.problem.value)
    assert "no runs here yet: the first launch makes the folder" in panel._repr_mimebundle_()["text/html"]
    assert by_hand().ended("finished").path.parent == tmp_path / "runs"
    assert runs() is panel
    assert len(panel.refresh()) == 1
    assert panel.problem.value == ""


def test_many_runs_are_sent_in_part_and_ended_ones_are_read_once(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    info = json.loads((by_hand(created=0.0).ended("finished").path / run_directory.RUN_JSON).read_text())
    folder = by_hand(created=999.0).alive().path.parent
    for number in range(SHOWN + 5):
        (folder / f"many{number:03d}").mkdir()
        run_directory.write_json(folder / f"many{number:03d}" / run_directory.RUN_JSON, {**info, "created": 1.0 + number})
    read, plain = list[str](), listing._read
    monkeypatch.setattr(listing, "_read", lambda path, run: (read.append(path.name), plain(path, run))[1])
    monkeypatch.setattr(run_list, "TICK", 2)
    panel = RunListPanel(folder)
    assert len(read) == len(panel.runs) == SHOWN + 7
    assert len(panel.table.rows) == SHOWN
    assert panel.count.value == f"{SHOWN + 7} runs, the first {SHOWN} are shown"
    read.clear()
    run_directory.write_json(folder / "many003" / run_directory.RUN_JSON, {**info, "name": "goes on"})
    panel.refresh()
    assert sorted(read) == ["001", "many003"]  # the one that runs, and the one whose run.json is new


def test_the_static_face_and_the_one_panel_of_a_folder(by_hand: Make) -> None:
    folder = three(by_hand)
    panel = runs(folder)
    assert runs(str(folder)) is panel
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == repr(panel) == "RunListPanel('runs', 3 runs)"
    assert "Runs in runs" in bundle["text/html"]
    assert "failed" in bundle["text/html"]
    assert str(folder) not in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_html_of_the_list_is_escaped(by_hand: Make) -> None:
    made = by_hand(spec={**SPEC.to_json(), "task": "<img src=x>"}).ended("finished")
    by_hand(spec={**SPEC.to_json(), "task": "<img src=x>", "optimizer": "adamw"}).ended("finished")
    made.path.rename(made.path.with_name("<script>alert(1)<"))
    listed = listing.list_runs(made.path.parent)
    assert "&lt;script&gt;" in listed._repr_html_()
    for html in (listed._repr_html_(), RunListPanel(made.path.parent)._repr_mimebundle_()["text/html"]):
        assert "<script" not in html
        assert "<img" not in html


def test_ticks_and_the_thread_do_not_compare_at_once(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "TICK", 2)
    by_hand(spec=SPEC.to_json()).steps(20).alive()
    panel = RunListPanel(by_hand(spec=SPEC.to_json()).steps(20).ended("finished").path.parent)
    panel.table.ticked = ["000", "001"]
    begun, inside, most, plain = threading.Event(), list[int](), list[int](), run_list.compare

    def compare(*compared: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        begun.set()
        time.sleep(0.1)
        inside.pop()
        return plain(*compared)

    monkeypatch.setattr(run_list, "compare", compare)
    thread = threading.Thread(target=panel.refresh)
    thread.start()
    begun.wait(20)
    panel.table.ticked = ["001", "000"]  # as the page sends it, on another thread
    thread.join(20)
    assert most == [1, 1]


def test_a_thread_that_has_decided_to_end_is_replaced(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = list[threading.Thread]()

    class Ending(threading.Thread):
        """Is still there a while after its last look."""

        def run(self) -> None:
            super().run()
            decided.append(self)

        def is_alive(self) -> bool:
            return True

    made = by_hand().alive()
    monkeypatch.setattr(threading, "Thread", Ending)
    panel = RunListPanel(made.path.parent)
    made.ended("finished")
    until(lambda: decided)
    again = by_hand().alive()
    panel.refresh()
    again.ended("finished")
    until(lambda: len(decided) == 2)
    assert not panel.live
