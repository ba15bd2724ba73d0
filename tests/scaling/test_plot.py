"""The picture of a scaling curve, by its artists: points, band, naive line, and what is drawn as a cross."""

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from workbench import plot
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.point import ScalingPoint

CURVE = ScalingCurve([(8, 8 * 40150), (16, 16 * 37610), (16, 16 * 37810), (32, 32 * 35370)])


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


def line(ax: Axes, label: str) -> dict[float, float]:
    (found,) = [one for one in ax.get_lines() if one.get_label() == label]
    return dict(zip(found.get_xdata(), found.get_ydata(), strict=True))  # type: ignore[arg-type]


def dots(ax: Axes, label: str) -> Any:
    (found,) = [one for one in ax.containers if isinstance(one, ErrorbarContainer) and one.get_label() == label]
    return found.lines[0]


def test_points_band_and_naive_line_are_those_of_the_fit(ax: Axes) -> None:
    assert plot.scaling(CURVE, ax=ax) is ax
    found = CURVE.fit().predict(128)
    assert line(ax, "predicted: ensemble")[128] == pytest.approx(found.mid)
    assert line(ax, "naive: as the last point")[128] == pytest.approx(found.naive)
    assert line(ax, "naive: as the last point")[32] == pytest.approx(32 * 35370)
    assert line(ax, "perfect")[128] == pytest.approx(128 * 40150)
    assert list(dots(ax, "measured").get_ydata()) == pytest.approx(CURVE.samples_per_sec)
    (band,) = [one for one in ax.collections if isinstance(one, FillBetweenPolyCollection)]
    heights = [y for path in band.get_paths() for x, y in path.vertices if x == 128]  # type: ignore[misc, union-attr]
    assert (min(heights), max(heights)) == pytest.approx((found.low, found.high))
    assert band.get_label() == "90 % interval"


def test_both_axes_are_logarithmic_and_labelled(ax: Axes) -> None:
    plot.scaling(CURVE, ax=ax)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("processes", "throughput (samples/s)")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "16", "32", "64", "128"]
    legend = ax.get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} == {
        "perfect",
        "90 % interval",
        "predicted: ensemble",
        "naive: as the last point",
        "measured",
    }


def test_repeats_have_arms(ax: Axes) -> None:
    plot.scaling(CURVE, ax=ax)
    (container,) = [one for one in ax.containers if isinstance(one, ErrorbarContainer)]
    arms = [abs(segment[1][1] - segment[0][1]) for segment in container.lines[2][0].get_segments()]
    point = CURVE.points[1]
    assert arms == pytest.approx([0, point.high - point.low, 0])


def test_efficiency_is_of_the_smallest_point(ax: Axes) -> None:
    plot.scaling_efficiency(CURVE.fit(), ax=ax, to=64)
    assert list(line(ax, "perfect").values()) == pytest.approx([100, 100])
    assert list(dots(ax, "measured").get_ydata()) == pytest.approx([100 * share for share in CURVE.efficiency])
    assert line(ax, "predicted: ensemble")[64] == pytest.approx(100 * CURVE.fit().predict(64).efficiency)
    assert max(line(ax, "predicted: ensemble")) == 64
    assert ax.get_ylabel() == "efficiency (%)"


def test_oversubscribed_points_are_hollow_and_failed_ones_crossed(ax: Axes) -> None:
    curve = ScalingCurve([(1, 100), (2, 190), (4, 200), ScalingPoint(world_size=8, failed="lost")], slots=2)
    curve.plot(ax=ax)
    assert (dots(ax, "measured").get_marker(), dots(ax, "oversubscribed: no scaling").get_marker()) == ("o", "X")
    assert list(dots(ax, "oversubscribed: no scaling").get_xdata()) == [4]
    assert [text.get_text() for text in ax.texts] == ["failed"]
    assert min(line(ax, "naive: as the last point")) == 2  # from the last point that scaled


def test_one_point_has_no_band(ax: Axes) -> None:
    plot.scaling(ScalingCurve([(4, 100)]), ax=ax)
    assert not [one for one in ax.get_lines() if one.get_label() == "predicted: ensemble"]


def test_a_figure_of_its_own() -> None:
    from matplotlib import pyplot

    drawn = CURVE.fit().plot()
    assert drawn.get_figure() is not None
    pyplot.close(drawn.get_figure())


def test_what_cannot_be_drawn() -> None:
    lost = ScalingCurve([ScalingPoint(world_size=2, failed="lost")])
    for draw in (plot.scaling, plot.scaling_efficiency):
        with pytest.raises(ValueError, match="no point of this curve was measured"):
            draw(lost)
        with pytest.raises(ValueError, match="to=16: the largest measured point has 32"):
            draw(CURVE, to=16)


def test_what_hidden_communication_would_give(ax: Axes) -> None:
    curve = ScalingCurve([(1, 100, 0.0), (2, 180, 0.1), (4, 200, 0.5)], slots=2)
    plot.scaling(curve, ax=ax)
    assert line(ax, "if communication were hidden") == {2: pytest.approx(200)}


def by_knob(*values: Any) -> ScalingCurve:
    points = [ScalingPoint(world_size=2, rates=(100.0 + i, 120.0), value=value, oversubscribed=i == 1) for i, value in enumerate(values)]
    return ScalingCurve([*points, ScalingPoint(world_size=2, failed="lost", value=values[-1] * 2)], over="knob")


def test_any_knob_on_the_axis(ax: Axes) -> None:
    by_knob(8, 16, 32).plot(ax=ax)
    assert (ax.get_xlabel(), ax.get_xscale(), ax.get_yscale()) == ("knob", "log", "linear")
    assert list(dots(ax, "measured").get_xdata()) == [8, 32]
    assert list(dots(ax, "oversubscribed: no scaling").get_xdata()) == [16]
    assert [text.get_text() for text in ax.texts] == ["failed"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "16", "32", "64"]
    assert ax.yaxis.get_major_formatter()(140000.0, 0) == "140,000"


def test_words_on_the_axis(ax: Axes) -> None:
    curve = by_knob("fp32", "amp_bf16")
    plot.scaling(curve, ax=ax)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["fp32", "amp_bf16", "amp_bf16amp_bf16"]
    with pytest.raises(ValueError, match="a curve over knob has no efficiency"):
        plot.scaling_efficiency(curve)
    with pytest.raises(ValueError, match="to=8: a curve over knob has no law"):
        plot.scaling(curve, to=8)
