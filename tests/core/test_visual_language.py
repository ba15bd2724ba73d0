"""All pictures speak one visual language: solid is measured, hatched or hollow is predicted, a colour has one meaning, everything reads."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from tests.drawn import PICTURES, draw
from workbench import plot
from workbench.core.display import axes, colors
from workbench.core.display.colors import contrast

BOTH = frozenset(
    [
        "critical_batch",
        "diagnosis",
        "ladder",
        "links",
        "loader_curve",
        "memory",
        "plan_proof",
        "proof",
        "scaled_lr",
        "scaling",
        "scaling_efficiency",
        "scaling_law",
        "steps_to_target",
        "unprepared",
    ]
)
"""Pictures with measurements and predictions."""
PREDICTED = BOTH | frozenset(
    ["batch_lengths", "estimated_time", "memory_ladder", "memory_timeline", "plan", "plan_front", "plan_memory", "time_to_target", "twin"]
)
"""Pictures with predictions."""
RINGS = frozenset(["loader_curve", "memory_curve", "memory_timeline", "scaling_law", "steps_to_target", "time_to_target"])
"""Pictures in which a ring points at something."""
MEANINGS = {
    colors.PHASES["data_wait"]: {"data_wait", "data", "loader", "loader alone, per batch, predicted", "loader alone, measured"},
    colors.PHASES["h2d"]: {"h2d", "transfer", "inputs"},
    colors.PHASES["forward"]: {
        "forward",
        "compute",
        "device",
        "activations",
        "operators",
        "something is computed",
        "on the device",
        "the work itself",
    },
    colors.PHASES["backward"]: {"backward", "gradients"},
    colors.PHASES["optimizer"]: {"optimizer", "optimizer states"},
    colors.PHASES["other"]: {"other", "others", "unrecorded"},
    colors.PARTS["host"]: {"host", "modules", "operators"},
    colors.PARTS["communication"]: {"communication", "all-reduce, predicted"},
    colors.PARTS["straggler"]: {"straggler", "waiting", "queue"},
    colors.IDLE: {"stalls", "idle", "bubble", "gaps between"},
    colors.GROUPS["parameters"]: {"parameters", "weights"},
    colors.GROUPS["temporaries"]: {"temporaries"},
    colors.GROUPS["buffers"]: {"buffers"},
    colors.TRACED["python"]: {"python"},
    colors.TRACED["launch"]: {"launch", "launching"},
    colors.TRACED["copy"]: {"copy"},
    colors.RESERVED: {"reserved, not allocated"},
    colors.OUTSIDE: {"outside the allocator", "outside", "parts unknown", "alone"},
}
"""Colour → what legends call it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@pytest.fixture(params=PICTURES, scope="module")
def picture(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Axes]]:
    """A picture on matplotlib's usual white ground, laid out."""
    ax = draw(request.param, folder)
    ax.figure.draw_without_rendering()
    yield request.param, ax
    pyplot.close("all")


def texts(ax: Axes) -> list[Text]:
    """Whatever can be read."""
    found = [text for text in ax.figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    shown = {id(label) for other in ax.figure.axes for axis in (other.xaxis, other.yaxis) for label in _labels(axis)}
    ticks = {
        id(label)
        for axis_ in ax.figure.findobj(lambda one: hasattr(one, "get_ticklabels"))
        for tick in axis_.get_major_ticks()
        for label in (tick.label1, tick.label2)
    }
    return [text for text in found if id(text) not in ticks or id(text) in shown]


def _labels(axis: Any) -> list[Text]:
    """The labels of the ticks that lie on the axis."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    inside = [tick for tick in axis.get_major_ticks() if low - slack <= tick.get_loc() <= high + slack]
    return [label for tick in inside for label in (tick.label1, tick.label2) if label.get_visible()]


def areas(ax: Axes) -> list[Patch | PolyCollection]:
    """Filled areas of the picture and of its legend."""
    legend = ax.get_legend()
    patches = [patch for patch in ax.patches if not isinstance(patch, Rectangle) or patch.get_width()]
    bands = [one for one in ax.collections if isinstance(one, PolyCollection)]
    return [*patches, *bands, *(handle for handle in (legend.legend_handles if legend else ()) if isinstance(handle, Patch))]


def lines(ax: Axes) -> list[Line2D]:
    return [line for line in ax.get_lines() if len(line.get_xdata())]  # type: ignore[arg-type]


def hollow(line: Line2D, ground: str) -> bool:
    """Markers that one sees through or that have the colour of the ground."""
    marker = line.get_marker() not in ("None", "none", "", None, "|", "x")
    return marker and (to_rgba(line.get_markerfacecolor())[3] == 0 or to_hex(line.get_markerfacecolor()) == ground)


def hatched(area: Patch | PolyCollection) -> bool:
    return bool(area.get_hatch())


def words(ax: Axes) -> str:
    return " ".join(text.get_text() for text in texts(ax))


def test_every_picture_has_an_example() -> None:
    assert set(PICTURES) == set(plot.__all__)


def test_solid_is_measured_and_hatched_or_hollow_is_predicted(picture: tuple[str, Axes]) -> None:
    name, ax = picture
    guessed = [area for area in areas(ax) if hatched(area)]
    rings = [line for line in lines(ax) if hollow(line, "none") and name in RINGS]
    open_ = [line for line in lines(ax) if hollow(line, axes.ground(ax)) and line not in rings]
    dashes = [line for line in lines(ax) if line.get_linestyle() == "--"]
    contours = [one for one in ax.collections if type(one).__name__ == "QuadContourSet"]
    marks = [*guessed, *open_, *dashes, *contours]
    assert bool(marks) == (name in PREDICTED), marks
    assert ("predict" in words(ax)) == (name in PREDICTED)
    if name in BOTH:
        assert any(word in words(ax) for word in ("measured", "as it is", "batch 32"))
    for area in guessed:
        for color in [to_hex(area.get_facecolor())] if isinstance(area, Patch) else map(to_hex, area.get_facecolor()):
            assert color not in set(MEANINGS) | set(colors.SERIES), f"{name}: a hatched area is as full as a measured one"


def test_everything_reads_on_its_ground(picture: tuple[str, Axes]) -> None:
    check_contrast(*picture)


@pytest.mark.parametrize("name", PICTURES)
def test_everything_reads_on_a_dark_ground(name: str, folder: Path) -> None:
    with pyplot.style.context("dark_background"):
        ax = draw(name, folder)
        ax.figure.draw_without_rendering()
        assert axes.ground(ax) == "#000000"
        check_contrast(name, ax)
    pyplot.close("all")


def check_contrast(name: str, ax: Axes) -> None:
    ground = axes.ground(ax)
    for text in texts(ax):
        behind = text.get_bbox_patch()
        under = to_hex(behind.get_facecolor()) if behind is not None else ground if text.get_path_effects() else _below(text, ax, ground)
        assert contrast(to_hex(text.get_color()), under) >= 4.5, f"{name}: {text.get_text()!r}"
    for area in areas(ax):
        faces = [area.get_facecolor()] if isinstance(area, Patch) else list(area.get_facecolor())
        edges = [area.get_edgecolor()] if isinstance(area, Patch) else list(area.get_edgecolor())
        shown = [to_hex(color) for color in (*faces, *edges) if len(color) and to_rgba(color)[3] > 0.5]
        if shown and not _context(area):
            assert max(contrast(color, ground) for color in shown) >= 3, f"{name}: an area is as pale as its ground"
    for line in lines(ax):
        color = to_hex(line.get_markeredgecolor() if line.get_linestyle() == "None" else line.get_color())
        if color != colors.LINE_PALE:
            assert contrast(color, ground) >= 3, f"{name}: {line.get_label()}"


def _below(text: Text, ax: Axes, ground: str) -> str:
    """The colour of the areas under the middle of a text."""
    box = text.get_window_extent()
    middle, color = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2), ground
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and patch.get_window_extent().contains(*middle):
            *_, opacity = to_rgba(patch.get_facecolor())
            color = colors.mixed(to_hex(patch.get_facecolor()), color, opacity)
    for shapes in (one for one in ax.collections if isinstance(one, PolyCollection)):
        move = shapes.get_transform()
        if any(move.transform_path(path).contains_point(middle) for path in shapes.get_paths()):
            color = to_hex(shapes.get_facecolor()[0])
    return color


def _context(area: Patch | PolyCollection) -> bool:
    """A band around a line, or a shade behind it, which a line or words say again."""
    return area.get_linewidth() == 0 if isinstance(area, Patch) else not max(area.get_linewidth(), default=0.0)


def test_a_colour_has_one_meaning(picture: tuple[str, Axes]) -> None:
    name, ax = picture
    legend = ax.get_legend()
    named = [(handle, text.get_text()) for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True)] if legend else []
    for handle, label in named:
        if isinstance(handle, Patch):
            full = {axes.area(ax, color, predicted=hatched(handle))["facecolor"]: color for color in MEANINGS}
            color = full.get(to_hex(handle.get_facecolor()))
        else:
            face = handle.get_facecolor() if isinstance(handle, PathCollection | PolyCollection) else [handle.get_color()]
            color = to_hex(face[0]) if len(face) else None
        if color in MEANINGS:
            assert label in MEANINGS[color] or label == "predicted", f"{name}: {color} is {label!r}"


def test_the_palette_has_no_colour_twice() -> None:
    own = [*MEANINGS, *colors.SERIES, colors.LIMIT, *colors.INK.values()]
    assert len({color.lower() for color in own}) == len(own)
    assert {*colors.PHASES.values(), *colors.PARTS.values(), *colors.GROUPS.values(), *colors.TRACED.values()} <= set(MEANINGS)
    for color in (*colors.SERIES, colors.LIMIT):  # lines, which have no outline
        assert min(contrast(color, "#ffffff"), contrast(color, "#111111")) >= 2.9
    for color in own:
        assert contrast(colors.text_on(color), color) >= 4.5
    for ground, tone in (("#ffffff", "light"), ("#111111", "dark")):
        assert contrast(colors.INK[tone], ground) >= 7
        assert contrast(colors.OUTLINE, ground) >= 3


def test_no_words_overlap_or_leave_the_picture(picture: tuple[str, Axes]) -> None:
    name, ax = picture
    page = ax.figure.bbox
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(ax)]
    for text, box in boxes:
        assert box.x0 >= page.x0 - 1, f"{name}: {text!r} leaves the picture at the left"
        assert box.x1 <= page.x1 + 1, f"{name}: {text!r} leaves the picture at the right"
        assert page.y0 - 1 <= box.y0, f"{name}: {text!r} leaves the picture below"
        assert box.y1 <= page.y1 + 1, f"{name}: {text!r} leaves the picture above"
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        wide, tall = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide < 2 or tall < 3, f"{name}: {one!r} and {two!r} overlap"


def test_a_limit_of_a_device_has_one_look_and_its_name(folder: Path) -> None:
    for name in ("batch_lengths", "memory", "memory_ladder", "plan_memory", "roofline"):
        ax = draw(name, folder)
        limits = [line for line in ax.get_lines() if to_hex(line.get_color()) == colors.LIMIT]
        assert limits, name
        assert {line.get_linestyle() for line in limits} == {"-"}
        assert any(word in words(ax) for word in ("RTX-4090: 2", "may be used: ", "A100-80GB: 2.04 TB/s"))
        pyplot.close("all")


def test_a_picture_has_a_ground_of_its_own_unless_the_reader_gave_one(folder: Path) -> None:
    ax = draw("proof", folder)
    assert axes.ground(ax) == "#ffffff"
    assert axes.ink(ax) == colors.INK["light"]
    with pyplot.rc_context({"figure.facecolor": "none"}):  # as some notebooks set it
        assert to_rgba(draw("proof", folder).figure.get_facecolor())[3] == 1
    own = pyplot.figure(facecolor="#202020").subplots()
    assert axes.ink(draw("proof", folder, own)) == colors.INK["dark"]
    pyplot.close("all")


def test_panels_hatch_what_is_predicted_and_keep_its_text_readable() -> None:
    pytest.importorskip("anywidget")
    from workbench.core.display import html

    colored = {"data_wait": 0.03, "host": 0.02}
    predicted, measured = (html.bar("predicted", colored, colors.PARTS, longest=0.05, end="50 ms", pale=pale) for pale in (True, False))
    assert predicted.count("repeating-linear-gradient") == 2
    assert "gradient" not in measured
    for color in (colors.PARTS["data_wait"], colors.PARTS["host"]):
        stripes = colors.mixed(colors.text_on(color), color, 0x59 / 255)
        assert contrast(stripes, color) >= 1.5
        assert f'<span style="background-color:{color}' in predicted  # no stripe crosses the letters
    assert "--wb-outline" in html.sheet()
    assert not re.search(r"\.wb-(slack|outside)[^}]*background", html.sheet()), "hatched is predicted, and nothing else"
