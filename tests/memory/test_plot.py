"""Pictures of memory, tested by their artists: the pieces of a bar, the areas over a step, and what the words say."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.memory_logs import Writer, training
from workbench import plot
from workbench.core.device import Device
from workbench.core.display import colors
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.non_pytorch import NonPyTorchMemory
from workbench.memory.plot import BESIDE

BATCH = 4096
MIB = 2**20


@pytest.fixture
def ax() -> Iterator[Axes]:
    before = pyplot.get_fignums()  # of other tests
    yield Figure().subplots()
    assert pyplot.get_fignums() == before


def breakdown(batch: int = BATCH, micros: int = 1, **fields: Any) -> MemoryBreakdown:
    return MemoryBreakdown.from_log(training(batch, micros=micros), **{"kind": "predicted", "title": f"batch {batch}", **fields})


def bars(ax: Axes) -> dict[str, list[float]]:
    """Name → the width of its piece in each bar."""
    return {container.get_label(): [piece.get_width() for piece in container] for container in ax.containers}


def labels(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> list[str]:
    found = ax.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def lines(ax: Axes) -> dict[str, float]:
    return {str(line.get_label()): float(line.get_xdata()[0]) for line in ax.get_lines()}  # type: ignore[index,arg-type]


# --- bars


def test_the_pieces_add_up_to_what_is_allocated(ax: Axes) -> None:
    found = breakdown()
    assert plot.memory(found, ax=ax) is ax
    assert sum(width for (width,) in bars(ax).values()) == pytest.approx(found.total / MIB)
    assert ax.get_xlabel() == "memory at the peak, predicted (MiB)"
    assert labels(ax) == [f"batch {BATCH}"]
    assert not set(BESIDE) & set(bars(ax))


def test_each_group_has_its_colour_and_what_is_not_there_none(ax: Axes) -> None:
    assert tuple(colors.GROUPS) == GROUPS
    plot.memory(breakdown(kind="measured"), ax=ax)
    shown = {container.get_label(): to_hex(container[0].get_facecolor()) for container in ax.containers}
    assert shown == {name: colors.GROUPS[name.replace(" ", "_")] for name in shown}
    assert "buffers" not in shown
    assert set(legend(ax)) <= set(shown)


def test_on_a_gpu_what_lies_beside_the_tensors_is_grey(ax: Axes) -> None:
    found = breakdown(device="H200")
    plot.memory(found, ax=ax)
    assert found.device_used is not None
    assert sum(width for (width,) in bars(ax).values()) * 2**30 == pytest.approx(found.device_used)
    greys = {container.get_label(): container[0].get_facecolor() for container in ax.containers if container.get_label() in BESIDE}
    assert set(greys) == set(BESIDE)
    assert all(red == green == blue for red, green, blue, _ in greys.values())
    assert any("…" in text for text in texts(ax))
    assert lines(ax) == {"H200: 131 GiB": pytest.approx(141e9 / 2**30)}


def test_what_is_known_exactly_has_no_range(ax: Axes) -> None:
    own = NonPyTorchMemory(low=MIB, mid=MIB, high=MIB, source="nvidia-smi")
    plot.memory(breakdown(device="cuda", outside=own), ax=ax)
    assert not any("…" in text for text in texts(ax))
    assert not lines(ax)


@pytest.mark.parametrize(
    ("device", "label"),
    [("L4", "L4: 22.0 GiB"), (Device.named("T4"), "T4: 14.6 GiB"), (3 * 2**30, "limit: 3.00 GiB")],
)
def test_a_capacity_is_a_line_within_the_axis(ax: Axes, device: Any, label: str) -> None:
    plot.memory(breakdown(device="cuda"), ax=ax, device=device)
    ((name, place),) = lines(ax).items()
    assert name == label
    assert place < ax.get_xlim()[1]


def test_several_stand_below_each_other_and_say_what_differs(ax: Axes) -> None:
    plot.memory([breakdown(1024), breakdown(2048)], ax=ax)
    assert labels(ax) == ["batch 1024", "batch 2048"]
    assert ax.yaxis_inverted()
    one, two = bars(ax)["inputs"]
    assert two == pytest.approx(2 * one)


def test_a_prediction_is_hatched_and_a_measurement_is_solid(ax: Axes) -> None:
    predicted = breakdown()
    plot.memory([predicted, replace(predicted, kind="measured")], ax=ax)
    assert labels(ax) == ["predicted", "measured"]
    assert ax.get_xlabel() == "memory at the peak, measured and predicted (MiB)"
    for container in ax.containers:
        assert container[0].get_hatch()
        assert not container[1].get_hatch()
    assert {"measured", "predicted"} <= set(legend(ax))


def test_a_difference_draws_both(ax: Axes) -> None:
    (breakdown() - breakdown(kind="measured")).plot(ax=ax)
    assert labels(ax) == ["predicted", "measured"]


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no breakdown to draw"):
        plot.memory([])
    with pytest.raises(ValueError, match="unknown device 'H2000'"):
        plot.memory(breakdown(), device="H2000")


# --- over time


def test_the_areas_reach_to_the_peak_and_its_moment_is_said(ax: Axes) -> None:
    found = breakdown()
    assert found.plot_timeline(ax=ax) is ax
    highest = max(area.get_paths()[0].vertices[:, 1].max() for area in ax.collections)
    assert highest * MIB == pytest.approx(found.total)
    (said,) = [text for text in texts(ax) if text.startswith("peak:")]
    assert said.replace("\n", " ") == f"peak: {found.peak_moment}"
    ring = ax.get_lines()[-1]
    assert ring.get_ydata()[0] * MIB == pytest.approx(found.total)  # type: ignore[index]
    assert ring.get_xdata()[0] == found.timeline.position[found.timeline.peak]  # type: ignore[index]


def test_steps_and_phases_are_named(ax: Axes) -> None:
    plot.memory_timeline(breakdown(), ax=ax)
    said = texts(ax)
    assert [text.strip() for text in said if text.startswith(" step")] == ["step 1", "step 2"]
    assert {"forward", "backward"} <= set(said)
    assert ax.get_ylabel() == "allocated, predicted (MiB)"
    held = breakdown().timeline.held
    assert {name.replace(" ", "_") for name in legend(ax)} == {group for group in GROUPS if max(held[group]) > 0.002 * breakdown().total}


def test_a_phase_is_named_once_per_step(ax: Axes) -> None:
    plot.memory_timeline(breakdown(micros=3).timeline, ax=ax)
    assert texts(ax).count("backward") <= 2
    assert ax.get_ylabel() == "allocated (MiB)"


def test_a_breakdown_without_a_log_has_no_timeline() -> None:
    with pytest.raises(ValueError, match="no timeline to draw: this breakdown was measured without a log"):
        plot.memory_timeline(replace(breakdown(), timeline=replace(breakdown().timeline, position=())))


def test_one_event_is_enough(ax: Axes) -> None:
    w = Writer()
    w.alloc(5, category="parameter")
    plot.memory_timeline(MemoryBreakdown.from_log(w.log, kind="measured", title="tiny"), ax=ax)
    assert ax.get_ylabel() == "allocated, measured (B)"


def test_a_new_figure_is_one_that_notebooks_show() -> None:
    for made in (breakdown().plot(), breakdown().plot_timeline()):
        assert made.figure.number in pyplot.get_fignums()
        pyplot.close(made.figure)
