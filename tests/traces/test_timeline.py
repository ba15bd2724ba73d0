"""Pictures of a trace, read from their artists."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest

from tests.traced import on_cpu, on_device, op, step, write
from workbench import plot
from workbench.traces.analysis.breakdown import PARTS
from workbench.traces.analysis.trace import Trace
from workbench.traces.plot.timeline import BINS, COLORS

matplotlib.use("Agg")


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "a.json", on_device()))


def test_bars_per_step_add_up(trace: Trace) -> None:
    ax = trace.breakdown().plot()
    assert tuple(COLORS) == PARTS
    widths = np.array([[bar.get_width() for bar in container] for container in ax.containers])
    assert widths.sum(axis=0) == pytest.approx([100, 100, 100])  # µs: two steps and their mean
    assert [label.get_text() for label in ax.get_yticklabels()] == ["step 4", "step 5", "mean of 2"]
    assert ax.get_xlabel() == "traced step (µs)"
    assert plot.breakdown(trace, ax) is ax


def test_lanes(trace: Trace, tmp_path: Path) -> None:
    ax = trace.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0 0", "1 1"]
    areas = {(area.get_label(), round(area.get_paths()[0].vertices[0, 1])): area for area in ax.collections}
    assert ("compute", 0) in areas
    assert ("host", 1) in areas
    vertices = areas["compute", 0].get_paths()[0].vertices
    assert len(vertices) < 5 * BINS
    height = np.abs(vertices[:, 1] - 0.36)
    assert height.max() == pytest.approx(0.72, abs=0.01)
    cpu = Trace.load(write(tmp_path / "b.json", on_cpu()))
    assert len(cpu.plot().get_yticklabels()) == 2


def test_as_many_dots_for_many_events(tmp_path: Path) -> None:
    many = Trace.load(write(tmp_path / "a.json", [step(0, 0, 50_000), *[op("aten::a", 10 * i, 5) for i in range(5_000)]]))
    (area,) = many.plot().collections
    vertices = area.get_paths()[0].vertices
    assert len(vertices) < 5 * BINS
    share = (0.36 - vertices[:, 1]) / 0.72
    assert np.mean(share[share > 0]) == pytest.approx(0.5, abs=0.1)


def test_a_part_of_the_time(trace: Trace) -> None:
    ax = plot.timeline(trace, start=150e-6, end=160e-6)
    assert {str(area.get_label()) for area in ax.collections} == {"compute"}
    with pytest.raises(ValueError, match="has to end after it begins"):
        plot.timeline(trace, start=1.0, end=0.5)
    assert ax.get_xlim() == pytest.approx((150, 160))
    one = plot.timeline(trace, step=4)
    assert one.get_xlim() == pytest.approx((120, 220))  # µs
    gap = trace.idle().gaps[0]  # of the same origin: what a table names can be found in the picture
    assert plot.timeline(trace, start=gap.start, end=gap.start + gap.seconds).get_xlim()[0] == pytest.approx(gap.start * 1e6)
    assert all(round(line.get_xdata()[0]) in (120, 220) for line in plot.timeline(trace).lines)
    assert one.get_xlabel() == "time since the first event of the trace (µs)"
    with pytest.raises(ValueError, match=r"timeline\(step=7\): the trace has the steps 4, 5"):
        plot.timeline(trace, step=7)
    with pytest.raises(ValueError, match="one trace is drawn"):
        plot.timeline({0: trace})  # type: ignore[arg-type]


def test_nothing_to_draw(tmp_path: Path) -> None:
    empty = Trace.load(write(tmp_path / "a.json", [step(0, 0, 0)]))
    with pytest.raises(ValueError, match="no step with a length"):
        plot.breakdown(empty)
