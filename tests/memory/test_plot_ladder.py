"""The picture of a memory ladder, by its artists: what each rung needs, and where the device's line is."""

import math
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from tests.memory_logs import training
from workbench import plot
from workbench.core import units
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.whatif import MemoryLadder, MemoryRung, needed
from workbench.memory.plot import pieces

GIB = 2**30


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


def breakdown(batch: int, device: str = "RTX-4090") -> MemoryBreakdown:
    return MemoryBreakdown.from_log(training(batch), kind="predicted", title="", device=device)


def ladder(capacity: int = 3 * GIB, slowdown: float = 1.3) -> MemoryLadder:
    changes: list[tuple[dict[str, Any], int]] = [({"precision": "amp_bf16"}, 400_000), ({"checkpointing": "full"}, 100_000)]
    rungs = tuple(MemoryRung(change=change, breakdown=breakdown(batch), slowdown=slowdown, price="") for change, batch in changes)
    return MemoryLadder(start=breakdown(800_000), rungs=rungs, device="RTX-4090", capacity=capacity, margin=0.05)


def lengths(ax: Axes) -> list[float]:
    return [
        sum(patch.get_width() for patch in row)
        for row in zip(*(bars.patches for bars in ax.containers if isinstance(bars, BarContainer)), strict=True)
    ]


@pytest.mark.parametrize("device", ["RTX-4090", "cpu"])
def test_pieces_add_up_to_what_is_needed(device: str) -> None:
    found = breakdown(1000, device)
    assert sum(pieces(found).values()) == needed(found)
    assert min(pieces(found).values()) >= 0


def test_each_rung_is_as_long_as_what_it_needs_and_the_line_is_the_capacity(ax: Axes) -> None:
    result = ladder()
    plot.memory_ladder(result, ax=ax)
    steps = [result.start, *(rung.breakdown for rung in result.rungs)]
    assert lengths(ax) == pytest.approx([needed(one) / GIB for one in steps])
    assert [label.get_text().replace("\n", " ") for label in ax.get_yticklabels()] == [
        "as it is",
        "+ precision=amp_bf16",
        "+ checkpointing=full",
    ]
    (line,) = ax.get_lines()
    assert list(line.get_xdata()) == pytest.approx([3, 3])  # type: ignore[arg-type]
    assert line.get_label() == "RTX-4090: 3.00 GiB (5 % kept free)"
    assert "(GiB)" in ax.get_xlabel()


def test_words_at_the_end_say_time_and_what_is_to_spare(ax: Axes) -> None:
    result = ladder()
    plot.memory_ladder(result, ax=ax)
    words = [text.get_text() for text in ax.texts]
    assert words[0] == units.bytes_(needed(result.start))
    assert "1.30× time" in words[1]
    assert words[2].endswith("to spare")
    assert all(text.xy[0] >= 3 for text in ax.texts if isinstance(text, Annotation))  # behind the line


def test_what_never_fits_says_how_much_is_too_much(ax: Axes) -> None:
    plot.memory_ladder(ladder(capacity=1000, slowdown=math.nan), ax=ax)
    words = [text.get_text() for text in ax.texts]
    assert words[2].endswith("too much")
    assert "time" not in words[1]


def test_a_ladder_without_rungs_is_one_bar_and_plot_draws_it() -> None:
    alone = MemoryLadder(start=breakdown(1000), rungs=(), device="RTX-4090", capacity=3 * GIB, margin=0.0)
    ax = alone.plot(ax=Figure().subplots())
    assert len(lengths(ax)) == 1
    assert ax.get_lines()[0].get_label() == "RTX-4090: 3.00 GiB"
