"""One table, three faces that say the same."""

import html
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile import CONTROLS, EVIL, STEERING, assert_is_text
from workbench.core.display import table as display
from workbench.core.display.table import Table

CELLS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=8)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_text_html_and_frame_hold_the_same_cells(rows: list[list[str]]) -> None:
    table = Table(columns=[f"c{i}" for i in range(len(rows[0]))], rows=rows)
    cells = re.findall(r"<t[dh] [^>]*>(.*?)</t[dh]>", table._repr_html_(), re.S)
    assert [html.unescape(cell) for cell in cells] == [*table.columns, *(cell for row in rows for cell in row)]
    assert table.to_frame().values.tolist() == rows
    for row, line in zip(rows, str(table).splitlines()[1:], strict=True):
        assert "".join(line.split()) == "".join("".join(row).split())


def test_html_is_escaped_and_has_nothing_that_changes() -> None:
    table = Table(columns=("a",), rows=[["<script>"]], title="<b>", note="a & b")
    assert "<script>" not in table._repr_html_()
    assert "<b>" not in table._repr_html_()
    assert "id=" not in table._repr_html_()
    assert table._repr_html_() == Table(columns=("a",), rows=[["<script>"]], title="<b>", note="a & b")._repr_html_()


def test_columns_of_numbers_stand_right() -> None:
    assert str(Table(columns=("name", "n"), rows=[["a", "1"], ["b", "10"]])).splitlines() == ["name   n", "a      1", "b     10"]


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, the table has 2 columns: a, b"):
        Table(columns=("a", "b"), rows=[["x"]])


def test_an_empty_table_has_its_heads() -> None:
    assert str(Table(columns=("a", "b"), rows=[])) == "a  b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    seconds: float

    @property
    def milliseconds(self) -> float:
        return 1000 * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(display.Shown):
    """A result as the packages have them: rows, a table, the methods made for it."""

    parts: tuple[Part, ...]
    to_frame = display.frame_method("parts", Part, "milliseconds")
    plot = display.plot_method("of_parts")

    @property
    def table(self) -> Table:
        return Table(columns=("name", "seconds"), rows=[(one.name, one.seconds) for one in self.parts], title="Parts")


def test_a_result_shows_itself_by_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(parts=(Part(name="<a>", seconds=0.5), Part(name="b", seconds=2.0)))
    assert str(parts) == str(parts.table)
    assert parts._repr_html_() == parts.table._repr_html_()
    assert not hasattr(parts, "__dict__")
    assert parts.to_frame().to_dict("list") == {"name": ["<a>", "b"], "seconds": [0.5, 2.0], "milliseconds": [500.0, 2000.0]}
    assert list(Parts(parts=()).to_frame().columns) == ["name", "seconds", "milliseconds"]  # columns also without rows
    monkeypatch.setattr("workbench.plot.of_parts", lambda *given, **options: (given, options), raising=False)
    assert parts.plot() == ((parts,), {"ax": None})
    assert parts.plot(1, small=True) == ((parts,), {"ax": 1, "small": True})


def test_a_result_without_a_table_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Bare has no table"):
        str(type("Bare", (display.Shown,), {})())


def test_control_characters_reach_neither_a_terminal_nor_a_page() -> None:
    odd = EVIL + CONTROLS
    table = Table(columns=(odd, "b"), rows=[(odd, "a\tb\nc")], title=odd, note=odd)
    assert_is_text(table._repr_html_())
    text = str(table)
    assert not set(text) & set(STEERING)
    assert text.count("␛[2J␛]0;title␇␀\N{REPLACEMENT CHARACTER}␡") == 4
    assert "a\tb\nc" in text


def test_a_column_with_ranges_begins_below_its_head() -> None:
    rows = [["a", "1.62× (1.51× … 1.70×)", "1"], ["b", "1.2× (1.0× … 1.7×; may not help)", "10"]]
    lines = str(Table(columns=("name", "predicted", "n"), rows=rows)).splitlines()
    assert [line[6:10] for line in lines] == ["pred", "1.62", "1.2×"]
    assert len({len(line) for line in lines}) == 1
