"""Pictures of what a trace answers, read from their artists."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from tests.traced import event, launched, on_cpu, on_device, op, step, write
from workbench import plot
from workbench.traces.analysis.trace import Trace

matplotlib.use("Agg")


@pytest.fixture
def cpu(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "cpu.json", on_cpu()))


@pytest.fixture
def device(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "device.json", on_device()))


def texts(ax: Any) -> list[str]:
    return [one.get_text().strip() for one in ax.texts]


def test_icicles(cpu: Trace) -> None:
    """A box per call, as wide as its share of the step and below its caller."""
    ax = cpu.flame().plot()
    boxes = {str(one.get_label()): [path.get_extents() for path in one.get_paths()] for one in ax.collections}
    assert {name: sorted(round(box.width) for box in found) for name, found in boxes.items()} == {
        "loader": [30],
        "optimizer": [10],
        "backward": [10],
        "operators": [10, 10, 20],
    }
    assert sum(box.width for found in boxes.values() for box in found if box.y0 < 1) == pytest.approx(70)
    assert ax.get_xlim() == (0, pytest.approx(100))
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "callers above"
    assert "linear  20 %" in texts(ax)
    assert all("$" not in one for one in texts(ax))
    assert plot.flame(cpu, ax) is ax


def test_narrow_calls_are_not_drawn(tmp_path: Path) -> None:
    rows = [step(0, 0, 1_000_000), op("aten::large", 0, 500_000), *[op(f"aten::o{i}", 600_000 + 100 * i, 50) for i in range(500)]]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    assert sum(len(one.get_paths()) for one in trace.flame().plot().collections) == 1


def test_modules(tmp_path: Path) -> None:
    rows = [step(0, 0, 100), event("nn.Module: Net_0", "python_function", 0, 60), event("nn.Module: Linear_0", "python_function", 10, 20)]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    ax = trace.modules().plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["Net_0", "  Linear_0"]
    assert [bar.get_width() for bar in ax.containers[0]] == pytest.approx([60, 20])
    assert plot.modules(trace, ax) is ax


def test_resources(device: Trace) -> None:
    ax = device.critical().plot()
    alone, beside = ([bar.get_width() for bar in container] for container in ax.containers)
    assert alone == pytest.approx([38, 10, 6, 2])
    assert np.add(alone, beside) == pytest.approx([55, 20, 10, 13])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["device", "communication", "transfer", "host"]
    assert "step without it ≥ 62.0 µs" in texts(ax)


def test_pauses(cpu: Trace, device: Trace) -> None:
    ax = device.idle().plot()
    assert sum(bar.get_width() for container in ax.containers for bar in container) == pytest.approx(100)
    assert str(ax.containers[-1].get_label()) == "something is computed"
    assert [round(container[0].get_width()) for container in cpu.idle().plot().containers] == [30, 5, 25, 40]


def test_a_critical_path(cpu: Trace) -> None:
    ax = cpu.critical_path().plot()
    first = {str(container.get_label()): round(container[0].get_width()) for container in ax.containers[:3]}
    assert first == {"compute": 40, "data_wait": 30, "python": 30}
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["the step", "enumerate(DataLoader…Iter.__next__"]
    assert "30.0 µs" in texts(ax), "the time of the loader"
    assert "on the path" not in " ".join(texts(ax)), "where everything is on it, ten rows do not say so"
    assert "all of it is on the critical path" in ax.get_xlabel()


def test_a_critical_path_that_work_runs_beside(device: Trace) -> None:
    ax = device.critical_path().plot()
    assert any(text.endswith("on the path") and "100 %" not in text for text in texts(ax))
    assert "pale: beside the path" in ax.get_xlabel()


def test_kernels_and_copies(tmp_path: Path) -> None:
    told = {"blocks per SM": 1.0, "est. achieved occupancy %": 25}
    rows = [
        *launched("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64>(…)", 0, 10, 30, 1, **told),
        *launched("add", 2, 50, 10, 2),
        *launched("Memcpy HtoD (Pinned -> Device)", 4, 60, 10, 3, "gpu_memcpy", bytes=20_000),
    ]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    ax = plot.kernels(trace)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "cutlass_80_tensorop_…688gemm_64x64",
        "add",
    ]
    assert [[round(bar.get_width()) for bar in container] for container in ax.containers] == [[30, 0], [0, 10]]
    assert texts(ax) == ["occupancy 25 %", "10.0 µs"]


def test_copies_over_time(tmp_path: Path) -> None:
    """A copy at each end and a pause between, from the very beginning to the very end, and each where it is."""
    rows = [
        one for i, at in enumerate((60, 90)) for one in launched("Memcpy HtoD (Pinned -> Device)", i, at, 10, i, "gpu_memcpy", bytes=20_000)
    ]
    ax = plot.copies(Trace.load(write(tmp_path / "a.json", rows)))
    (line,) = ax.patches
    heights, edges, _ = line.get_data()
    assert len(heights) == len(edges) - 1 == 600
    assert (edges[0], edges[-1]) == (0, pytest.approx(40)) == ax.get_xlim()
    assert heights[[0, 149, 450, 599]] == pytest.approx([2, 2, 2, 2])
    assert heights[[150, 449]] == pytest.approx([0, 0], abs=1e-6)
    assert ax.get_xlabel() == "time since the first copy (µs)"
    assert "HtoD (Pinned → Device): 2.00 GB/s while it copies" in str(line.get_label())
    (key,) = ax.get_legend().get_texts()
    assert key.get_text() == line.get_label()


def test_sequences(tmp_path: Path) -> None:
    rows = [one for i in range(4) for one in launched("ab"[i % 2], 2 * i, 100 + 15 * i, 10, i)]
    ax = Trace.load(write(tmp_path / "a.json", rows)).sequences(length=2).plot()
    assert [round(container[0].get_width()) for container in ax.containers] == [40, 10]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a\nb"]
    assert "2 times" in texts(ax)


def test_queues(device: Trace) -> None:
    ax = device.launches().plot()
    (line,) = ax.patches
    heights, edges, _ = line.get_data()
    assert len(heights) == len(edges) - 1
    assert (edges[0], edges[-1]) == (0, pytest.approx(200)) == ax.get_xlim()
    calls, starts = (np.array([at + one for at in (0, 100, 200) for one in ones]) for ones in ((10, 12, 15, 30, 40), (20, 30, 50, 80, 110)))
    waiting = [((calls <= moment) & (starts > moment)).sum() for moment in np.arange(120, 320) + 0.5]
    assert heights[1::3] == pytest.approx(waiting), "three pieces a microsecond"
    assert ax.get_ylabel() == "launches that wait"


def test_a_roof(tmp_path: Path) -> None:
    told = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["float", "float"]}
    rows = [step(0, 0, 100), op("aten::mm", 0, 50, args=told), op("aten::add", 60, 10, args=told)]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    ax = trace.roofline("A10").plot()
    (roof,) = ax.lines
    assert max(roof.get_ydata()) == pytest.approx(31.2e12)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert {str(one.get_label()) for one in ax.collections} == {"matrices, convolutions, attention", "elementwise"}
    assert {"mm", "add", "fp32: 31.2 TFLOP/s", "A10: 600 GB/s"} == set(texts(ax))
    assert trace.roofline().plot().lines == [] or not list(trace.roofline().plot().lines)


def test_memory(tmp_path: Path) -> None:
    told = {"Bytes": 2048, "Total Allocated": 2048, "Addr": 1, "Device Type": 0, "Device Id": -1}
    asked = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 10, "args": told}
    given = {**asked, "ts": 50, "args": {**told, "Bytes": -2048, "Total Allocated": 0}}
    trace = Trace.load(write(tmp_path / "a.json", [step(0, 0, 100), op("aten::a", 0, 30), asked, given]))
    ax = trace.memory_curve().plot()
    assert ax.lines[0].get_ydata().tolist() == [2, 0]
    assert texts(ax) == ["peak 2.00 KiB\n100 %: aten::a"] or "aten::a" in texts(ax)[0]
    assert ax.get_ylabel() == "allocated (KiB)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modules", "with_stack=True"),
        ("launches", "nothing is launched"),
        ("kernels", "has no kernels"),
        ("copies", "no copies of a device"),
        ("sequences", "come twice"),
        ("roofline", "no operator with FLOPs"),
        ("memory_curve", "profile_memory=True"),
    ],
)
def test_nothing_to_draw(cpu: Trace, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(plot, name)(cpu)


@pytest.mark.parametrize(
    ("name", "message"),
    [("flame", "nothing to draw"), ("critical", "nothing works within a step"), ("critical_path", "no step"), ("idle", "no step")],
)
def test_no_step_to_draw(tmp_path: Path, name: str, message: str) -> None:
    empty = Trace.load(write(tmp_path / "empty.json", [step(0, 0, 0)]))
    with pytest.raises(ValueError, match=message):
        getattr(plot, name)(empty)
