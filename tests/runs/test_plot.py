"""Pictures are tested by their artists: where bars begin and end, what the text says. Nothing here looks at pixels."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from workbench import plot
from workbench.core.display import colors
from workbench.core.run_directory import METRICS, LineWriter
from workbench.core.vocabulary import PARTS, PHASES
from workbench.runs.page import run_text
from workbench.runs.run import Run
from workbench.timeline.timeline import Step, Timeline

ByHand = Callable[..., Any]


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


def timeline(rank: int = 0, scale: float = 1.0, **fields: Any) -> Timeline:
    phases = tuple(scale * value for value in (0.03, 0.0, 0.01, 0.02, 0.004, 0.001))
    return Timeline(rank=rank, steps=tuple(Step(index=i, phases=phases, samples=8) for i in range(20)), **fields)


def bars(ax: Axes) -> list[list[tuple[float, float]]]:
    """Begin and width of each piece: one list per phase, one entry per bar."""
    return [[(piece.get_x(), piece.get_width()) for piece in container] for container in ax.containers]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_bar_has_one_piece_per_phase_and_they_add_up_to_the_step(ax: Axes) -> None:
    plot.step_time(timeline(), ax=ax)
    pieces = [piece for (piece,) in bars(ax)]
    assert [container.get_label() for container in ax.containers] == list(PHASES)
    assert [width for _, width in pieces] == pytest.approx([30, 0, 10, 20, 4, 1])
    assert [begin for begin, _ in pieces] == pytest.approx([0, 30, 30, 40, 60, 64])
    assert texts(ax)[-1] == "65.0 ms"


def test_one_bar_per_rank_from_top_to_bottom_with_a_legend_of_all_phases(ax: Axes) -> None:
    plot.step_time([timeline(0), timeline(1, 1.5)], ax=ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert ax.yaxis_inverted()
    assert [width for _, width in bars(ax)[0]] == pytest.approx([30, 45])
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(PHASES)


@pytest.mark.parametrize(("scale", "unit", "width"), [(1, "ms", 30), (100, "s", 3)])
def test_the_unit_suits_the_step_and_stands_in_the_label(ax: Axes, scale: float, unit: str, width: float) -> None:
    plot.step_time(timeline(scale=scale), ax=ax)
    assert ax.get_xlabel() == f"mean step, measured ({unit})"
    assert bars(ax)[0][0][1] == pytest.approx(width)


def test_a_prediction_says_that_it_is_one(ax: Axes) -> None:
    plot.step_time([timeline(), timeline(predicted=True)], ax=ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0, measured", "rank 0, predicted"]
    assert ax.get_xlabel() == "mean step, measured and predicted (ms)"
    assert [bool(piece.get_hatch()) for piece in ax.containers[0]] == [False, True]
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {*PHASES, "measured", "predicted"}


def test_a_run_is_drawn_by_its_timelines(by_hand: ByHand, ax: Axes) -> None:
    run = Run.load(by_hand().steps(20).steps(20, rank=1, forward=0.02).ended("finished").path)
    assert run.plot(ax=ax) is ax
    assert [width for _, width in bars(ax)[PHASES.index("forward")]] == pytest.approx([10, 20])


def test_timelines_of_all_ranks_are_read_once(by_hand: ByHand, ax: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, timelines = list[Run](), Run.timelines
    monkeypatch.setattr(Run, "timelines", property(lambda run: (reads.append(run), timelines.__get__(run))[1]))
    run = Run.load(by_hand().steps(20).steps(20, rank=1).ended("finished").path)
    plot.step_time(run, ax=ax)
    assert len(reads) == 1
    assert run_text(run).count("rank 1") == 1
    assert len(reads) == 2


def test_a_picture_of_nothing_is_refused(by_hand: ByHand) -> None:
    with pytest.raises(ValueError, match=r"no measured step to draw \(running\): wait for its steps"):
        plot.step_time(Run.load(by_hand().alive().path))
    with pytest.raises(ValueError, match="no measured step to draw: a step is measured from"):
        plot.step_time(Timeline())
    with pytest.raises(ValueError, match=r"reported no loss to draw \(finished\): a script"):
        plot.metrics(Run.load(by_hand().ended("finished").path))


def test_runs_are_compared_with_their_speedups(by_hand: ByHand, ax: Axes) -> None:
    slow = by_hand().steps(20).ended("finished")
    fast = by_hand(name="fast").steps(20, data_wait=0.0).ended("finished")
    runs = [Run.load(slow.path), Run.load(fast.path)]
    plot.compare(runs, ax=ax)
    assert [width for _, width in bars(ax)[0]] == pytest.approx([30, 0])
    ends = [text for text in texts(ax) if "samples/s" in text]
    assert [end.split()[0] for end in ends] == ["baseline", "1.86×"]
    with pytest.raises(ValueError, match="expected two or more"):
        plot.compare(runs[:1])


def test_the_loss_is_drawn_and_a_constant_learning_rate_is_not(by_hand: ByHand, ax: Axes) -> None:
    plot.metrics(Run.load(by_hand().losses(10).ended("finished").path), ax=ax)
    (line,) = ax.get_lines()
    assert list(line.get_xdata()) == list(range(1, 11))
    assert list(line.get_ydata()) == pytest.approx([2 / (i + 1) for i in range(10)])
    assert len(ax.figure.axes) == 1
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer step", "training loss")


def test_a_varying_learning_rate_has_its_own_axis_and_evaluation_is_marked(by_hand: ByHand, ax: Axes) -> None:
    made = by_hand()
    writer = LineWriter(made.path / METRICS)
    writer.write({"step": i, "steps": 9, "loss": 1 / i, "lr": 0.1 / i} for i in range(1, 10))
    writer.write([{"step": 9, "steps": 9, "accuracy": 0.41312}])
    writer.close()
    plot.metrics(Run.load(made.ended("finished").path), ax=ax)
    twin = next(other for other in ax.figure.axes if other is not ax)
    assert twin.get_ylabel() == "learning rate"
    assert twin.get_lines()[0].get_ydata()[1] == pytest.approx(0.05)
    assert texts(ax) == ["accuracy 0.413"]


def test_a_new_figure_is_one_that_notebooks_show_and_its_words_hold_no_number() -> None:
    drawn = plot.step_time(timeline())
    try:
        assert pyplot.get_fignums()
        assert repr(drawn) == "<Axes: xlabel='mean step, measured (ms)'>"
        assert drawn.figure.get_facecolor()[3] == 1
        assert drawn.get_facecolor()[3] == 0
    finally:
        pyplot.close("all")


def test_nothing_global_is_changed(ax: Axes) -> None:
    before = dict(pyplot.rcParams)
    plot.step_time(timeline(), ax=ax)
    assert dict(pyplot.rcParams) == before
    assert not pyplot.get_fignums()


def test_every_phase_has_one_colour(ax: Axes) -> None:
    assert tuple(colors.PHASES) == PHASES
    assert tuple(colors.PARTS) == PARTS
    for part, phase in (("data_wait", "data_wait"), ("transfer", "h2d"), ("compute", "forward"), ("optimizer", "optimizer")):
        assert colors.PARTS[part] == colors.PHASES[phase]
    plot.step_time(timeline(), ax=ax)
    assert [to_hex(container[0].get_facecolor()) for container in ax.containers] == list(colors.PHASES.values())


# Machado, Oliveira, Fernandes: "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, severity 1.0; linear RGB
SEEN_BY = {
    "everyone": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopes": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(color: str, eyes: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of a colour as those eyes see it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in eyes)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("palette", [colors.PHASES, colors.PARTS, colors.GROUPS], ids=["phases", "parts", "groups"])
@pytest.mark.parametrize("eyes", SEEN_BY)
def test_colours_can_be_told_apart_by(eyes: str, palette: dict[str, str]) -> None:
    seen = {name: lab(color, SEEN_BY[eyes]) for name, color in palette.items()}
    for (one, a), (two, b) in itertools.combinations(seen.items(), 2):
        distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
        assert distance > 25, f"{one} and {two} look alike: {distance:.0f}"


def test_colours_are_there_without_matplotlib() -> None:
    code = "import sys, workbench.core.display.colors; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
