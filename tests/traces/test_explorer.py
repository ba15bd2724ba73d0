"""The trace explorer without a browser: knobs are turned by their values, and what the page would draw is read from what it is sent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

from tests.hostile import CONTROLS, EVIL, STEERING, assert_is_text, harmful
from tests.traced import event, launched, on_cpu, on_device, op, step, write
from workbench.traces.analysis.event_kinds import KINDS
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet
from workbench.traces.panel import html as trace_html
from workbench.traces.panel.explorer import TraceExplorer
from workbench.traces.plot.timeline import COLORS, kind_colors


@pytest.fixture
def cpu(tmp_path: Path) -> Path:
    return write(tmp_path / "cpu.pt.trace.json.gz", on_cpu())


@pytest.fixture
def explorer(cpu: Path) -> TraceExplorer:
    return TraceExplorer(cpu)


def sent(explorer: TraceExplorer, name: str, kind: str = "<i4") -> list[Any]:
    """A column of what the page draws."""
    return np.frombuffer(explorer.view.tiles[name], kind).tolist()


def words(explorer: TraceExplorer) -> str:
    return "".join(one.value for one in (explorer._head, explorer._found, explorer._event, explorer._parts))


def test_it_opens_at_a_step_with_its_parts_and_operators(explorer: TraceExplorer) -> None:
    assert repr(explorer) == "TraceExplorer('cpu.pt.trace.json.gz · 16 events · 2 steps')"
    assert explorer.step.value in (5, 6)
    assert [one.step for one in explorer.result.steps] == [explorer.step.value]
    assert ["aten::addmm", "1", "10.0 µs", "17 %", "10.0 µs"] in explorer.operators.rows
    assert explorer.view.window["end"] - explorer.view.window["start"] == 100_000
    for word in ("16 events", "data_wait", "30.0 µs", "mean of 2"):
        assert word in words(explorer)
    assert "Where the traced step goes" in str(explorer)
    assert "aten::addmm" in str(explorer)


def test_another_step(explorer: TraceExplorer) -> None:
    explorer.step.value = 6
    assert explorer.view.step == [100_000, 200_000]
    assert "step 6" in explorer._label.value
    explorer.go(-1)
    assert (explorer.step.value, explorer.chosen.start) == (5, 0)
    explorer.go(-5)
    assert (explorer.step.value, explorer.number) == ("all", None)
    assert explorer.view.step == []
    assert ["aten::addmm", "2", "20.0 µs", "17 %", "20.0 µs"] in explorer.operators.rows
    assert (explorer.view.window["start"], explorer.view.window["end"]) == (0, 200_000)
    explorer.go(9)
    assert explorer.step.value == 6


def test_the_page_is_sent_what_is_to_be_drawn(explorer: TraceExplorer) -> None:
    explorer.step.value = "all"
    assert sum(sent(explorer, "count")) == 16
    assert set(sent(explorer, "row")) == {0, 1, 2, 3}
    explorer.view.window = {"start": 40_000.5, "end": 60_000.0, "first": 1, "rows": 3, "dots": 100}
    names = [explorer.view.tiles["names"][code] for code in sent(explorer, "name")]
    assert sorted(names) == [
        "aten::addmm",
        "aten::linear",
        "autograd::engine::evaluate_function: AddmmBackward0",
    ]  # a bit beyond the window
    assert not explorer.view.tiles["choosing"]
    explorer.zoom(0, 30e-6)
    assert explorer.view.window["end"] == 30_000
    scene = explorer.view.scene
    assert [strip["rows"] for strip in scene["strips"]] == [3, 1]
    assert scene["steps"] == [[5, 0, 100_000], [6, 100_000, 200_000]]
    assert len(scene["colors"]) == len(scene["inks"]) == len(scene["kinds"]) == len(KINDS)
    with pytest.raises(ValueError, match="has to end after it begins"):
        explorer.zoom(1, 0.5)


def test_search_lights_up_and_goes_from_match_to_match(explorer: TraceExplorer) -> None:
    explorer.search.value = "LINEAR"
    assert explorer.lit == ("aten::linear",)
    assert "2 matches" in words(explorer)
    assert explorer.view.tiles["choosing"]
    first, second, again = explorer.next(), explorer.next(), explorer.next()
    assert first is not None
    assert second is not None
    assert (first.step, second.step, again) == (5, 6, first)
    assert first.shapes == "[[32, 8], [8, 8]]"
    assert first.own == pytest.approx(10e-6)
    assert explorer.previous() == second
    start, end = explorer.view.window["start"], explorer.view.window["end"]
    assert start <= 140_000 < 160_000 <= end
    assert explorer.view.marked == {"row": 1, "start": 140_000, "end": 160_000}
    assert "aten::linear" in words(explorer)
    explorer.search.value = "<nobody>"
    assert explorer.next() is None
    assert "no name contains that" in words(explorer)
    assert sum(sent(explorer, "chosen")) == 0
    explorer.search.value = ""
    assert not explorer.view.tiles["choosing"]


def test_an_operator_lights_up_and_takes_the_place_of_a_search(explorer: TraceExplorer) -> None:
    explorer.step.value = "all"
    explorer.search.value = "linear"
    explorer.operators.chosen = "aten::addmm"
    assert (explorer.search.value, explorer.lit) == ("", ("aten::addmm",))
    assert sum(sent(explorer, "chosen")) == 2
    assert sum(sent(explorer, "lit", "<f8")) == 20_000
    explorer.search.value = "stack"
    assert (explorer.operators.chosen, explorer.lit) == ("", ("aten::stack",))


def test_what_the_page_asks_for(explorer: TraceExplorer) -> None:
    explorer._on_message({"ask": "pick", "row": 2, "time": 50_000.0, "within": 10.0})
    assert explorer.picked is not None
    assert (explorer.picked.name, explorer.operators.chosen) == ("aten::addmm", "aten::addmm")
    assert explorer.picked.calls == 1
    explorer._on_message({"ask": "next"})
    assert explorer.picked.step == 6
    explorer._on_message({"ask": "previous"})
    explorer._on_message({"ask": "step", "by": 9})
    assert (explorer.picked.step, explorer.step.value) == (5, 6)
    explorer._on_message({"ask": "nothing"})
    assert (explorer.picked, explorer.lit, explorer.view.marked) == (None, (), {})
    explorer._on_message({"ask": "pick", "row": 3, "time": 5.0, "within": 1.0})
    assert explorer.picked is None
    explorer._on_message({"ask": "something else"})


def test_kernels_of_a_device(tmp_path: Path) -> None:
    explorer = TraceExplorer(Trace.load(write(tmp_path / "a.json", on_device())))
    assert explorer.which.value == "kernel"
    assert "the host runs ahead" in words(explorer)
    assert explorer.operators.rows[0][0] == "sgemm_128x64"
    explorer.which.value = "operator"
    assert explorer.operators.rows[0][0] == "aten::mm"
    assert explorer.operators.heads[0] == "operator"
    assert kind_colors(True)["kernel"] == kind_colors(False)["operator"] == COLORS["compute"]
    assert set(kind_colors(True)) == set(KINDS)
    assert kind_colors(True)["range"] not in COLORS.values(), "a user's range stands out from the rest"


def test_ranks_below_each_other(tmp_path: Path) -> None:
    for rank, name in ((0, "aten::slow"), (1, "aten::fast")):
        job = {"rank": rank, "world_size": 2}
        write(tmp_path / f"rank{rank}.pt.trace.json", [step(1, 7 * rank, 50), op(name, 7 * rank + 5, 5)], distributedInfo=job)
    explorer = TraceExplorer(tmp_path)
    assert [strip["name"] for strip in explorer.view.scene["strips"]] == ["rank 0 · 1 1", "rank 1 · 1 1"]
    assert "ranks&#x27; clocks are not compared" in words(explorer)
    assert explorer.operators.rows[0][0] == "aten::slow"
    explorer.rank.value = 1
    assert explorer.operators.rows[0][0] == "aten::fast"
    assert explorer.chosen.start == 0
    explorer.search.value = "fast"
    found = explorer.next()
    assert found is not None
    assert found.rank == 1
    assert "rank 1" in explorer._event.value
    assert TraceExplorer(TraceSet.load(tmp_path)).traces.keys() == {0, 1}
    assert "TraceExplorer('2 ranks" in repr(explorer)


def test_what_it_shows_survives_as_text(explorer: TraceExplorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == repr(explorer)
    for word in ("Trace explorer", "run the cell to zoom", "data_wait", "aten::addmm", "gloo:all_reduce", "collective on the CPU"):
        assert word in bundle["text/html"]
    for word in ("<svg", "<canvas", "id="):
        assert word not in bundle["text/html"]


def test_the_static_face_stays_small_whatever_the_file(tmp_path: Path) -> None:
    many = [step(1, 0, 50_000), *[op(f"aten::a{i % 7}", 10 * i, 5, lane=i % 9) for i in range(5_000)]]
    explorer = TraceExplorer(write(tmp_path / "a.json", many))
    face = explorer._repr_mimebundle_()["text/html"]
    assert len(face) < 200_000
    assert "5 more threads and streams" in face


def test_names_in_a_trace_are_text_and_no_html(tmp_path: Path) -> None:
    odd = EVIL + CONTROLS
    lane = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": odd}}
    events = [lane, step(1, 0, 100), op(odd, 0, 90, args={"Input Dims": odd, "Input type": [odd]}), event(odd, odd, 20, 30)]
    events += launched(odd, 2, 10, 40, 7, args={"device": odd})
    path = write(tmp_path / f"{'<img src=x onerror=alert(1)>'}.json", events, deviceProperties=[{"id": 0, "name": odd}], traceId=odd)
    explorer = TraceExplorer(path)
    explorer.search.value = "alert"
    explorer.next()
    assert_is_text(explorer._repr_mimebundle_()["text/html"], words(explorer))
    assert_is_text(trace_html.head(odd) + trace_html.notes([odd]))
    trace = Trace.load(path)
    assert_is_text(trace_html.operators(explorer.ranked, odd), trace.ops()._repr_html_(), trace.ops("kernel")._repr_html_())
    for result in (trace, trace.breakdown(), trace.kernels(), trace.explain(), trace.diff(trace)):
        assert harmful(result._repr_html_()) == []
        assert not set(str(result)) & set(STEERING)


def test_files_without_steps_and_with_nothing_to_show(tmp_path: Path) -> None:
    explorer = TraceExplorer(write(tmp_path / "a.json", [op("aten::a", 0, 5)]))
    assert (explorer.step.value, explorer.number) == ("all", None)
    assert "no step marks" in words(explorer)
    empty = TraceExplorer(write(tmp_path / "b.json", [op("aten::a", 0, 0)]))
    assert "no step with a length" in words(empty)
    assert "Trace explorer" in empty._repr_mimebundle_()["text/html"]


def test_what_it_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int given: allowed are a Trace"):
        TraceExplorer(3)  # type: ignore[arg-type]
    with pytest.raises(TraceError):
        TraceExplorer(tmp_path / "missing.json")
