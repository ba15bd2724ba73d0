"""How results show themselves: `Table` as text, HTML and DataFrame, the mixin `Shown`, and methods `to_frame` and `plot`."""

import html
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from workbench.core.late import panel as panel
from workbench.core.late import picture as picture

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
"""Control characters, which would steer a terminal → the characters that picture them."""


def visible(value: object) -> str:
    """Text without control characters but tabs and line feeds: a name out of a file may hold any.

    >>> visible("\\x1b[2J")
    '␛[2J'
    """
    text = str(value)
    return text if text.isprintable() else text.translate(_PICTURES)


LONGEST_NOTE = 160
"""Letters of several notes on one line."""
POINT = "• "
"""Before each note of a list."""


def escape(value: object) -> str:
    """Text that is safe inside HTML."""
    return html.escape(visible(value))


def _is_number(text: str) -> bool:
    return bool(text) and (text[0].isdigit() or text[0] in "–-+.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns. Cells are shown as they are: make text of numbers with `units` first.

    >>> print(Table(columns=("phase", "mean"), rows=[("forward", "12.3 ms"), ("other", "1.20 ms")], title="Step", note="measured"))
    Step
    phase       mean
    forward  12.3 ms
    other    1.20 ms
    measured
    """

    columns: Sequence[str]
    """Heads of the columns."""
    rows: Sequence[Sequence[object]]
    """Cells, one sequence per row, as many as there are columns."""
    title: str | None = None
    """One line above."""
    note: str | None = None
    """What the numbers are, below: one line, or several (`notes`)."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells, the table has {len(self.columns)} columns: {', '.join(self.columns)}")

    def _right(self) -> list[bool]:
        """Is a column aligned right, since all its cells are numbers?"""
        return [bool(self.rows) and all(_is_number(str(row[i])) for row in self.rows) for i in range(len(self.columns))]

    def __str__(self) -> str:
        cells = [[visible(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = [r and not any("(" in str(row[i]) for row in self.rows) for i, r in enumerate(self._right())]  # ranges: left, as heads are
        lines = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip() for row in cells]
        return "\n".join([*([visible(self.title)] if self.title else []), *lines, *([visible(self.note)] if self.note else [])])

    @property
    def width(self) -> int:
        """Letters of its longest row as text, the heads of the columns included."""
        return max(map(len, str(replace(self, title=None, note=None)).split("\n")))

    def without(self, column: str) -> "Table":
        """The table without a column."""
        at = list(self.columns).index(column)
        left = [[*row[:at], *row[at + 1 :]] for row in (self.columns, *self.rows)]
        return replace(self, columns=[str(name) for name in left[0]], rows=left[1:])

    def wrapped(self, width: int) -> str:
        """As text, with its title and its notes in lines of at most so many letters; rows stay as they are."""
        title, note = (text and "\n".join(textwrap.fill(line, width) for line in text.split("\n")) for text in (self.title, self.note))
        return str(replace(self, title=title, note=note))

    def _repr_html_(self) -> str:
        right = self._right()

        def row(cells: Sequence[object], tag: str) -> str:
            made = (f'<{tag} style="text-align:{"right" if r else "left"}">{escape(c)}</{tag}>' for c, r in zip(cells, right, strict=True))
            return f"<tr>{''.join(made)}</tr>"

        title = f"<p><strong>{escape(self.title)}</strong></p>" if self.title else ""
        note = f"<p><em>{escape(self.note).replace(chr(10), '<br>')}</em></p>" if self.note else ""
        body = "".join(row(cells, "td") for cells in self.rows)
        return f"{title}<table><thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>{note}"

    def to_frame(self) -> Any:
        """The cells as a DataFrame."""
        return frame([dict(zip(self.columns, row, strict=True)) for row in self.rows], columns=self.columns)


def notes(parts: Iterable[str]) -> str:
    """Notes below a table as one text: on one line while that is short, else a list with a line for each.

    >>> notes(["measured", "2 steps left out"])
    'measured; 2 steps left out'
    >>> print(notes(["measured", "the machine was busy: " + "other processes took a core, " * 5])[:40])
    • measured
    • the machine was busy: other
    """
    lines = [line.removeprefix(POINT) for part in parts for line in part.split("\n")]
    whole = "; ".join(lines)
    return whole if len(whole) <= LONGEST_NOTE or len(lines) == 1 else "\n".join(POINT + line for line in lines)


def frame(rows: Iterable[Mapping[str, object]], columns: Sequence[str] | None = None) -> Any:
    """A DataFrame with one row per mapping. Only this function imports pandas, at its first call."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if columns is None else list(columns))


class Shown:
    """A result that shows itself as text and HTML by its `table`. Works with slotted and frozen dataclasses.

    >>> @dataclass(frozen=True, slots=True)
    ... class Speed(Shown):
    ...     name: str
    ...     seconds: float
    ...     @property
    ...     def table(self) -> Table:
    ...         return Table(columns=("name", "seconds"), rows=[(self.name, self.seconds)])
    >>> print(Speed("forward", 1.5))
    name     seconds
    forward      1.5
    """

    __slots__ = ()

    @property
    def table(self) -> Table:
        """The result as a table."""
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def to_frame(self) -> Any:
        """The cells of the table as a DataFrame."""
        return self.table.to_frame()


def frame_method(rows: str, kind: type, *derived: str) -> Callable[[Any], Any]:
    """A method `to_frame`: one row per item of the attribute `rows`, whose columns are the fields of `kind`, then `derived` properties.

    >>> @dataclass(frozen=True, slots=True)
    ... class Part:
    ...     name: str
    ...     seconds: float
    >>> @dataclass(frozen=True, slots=True)
    ... class Parts:
    ...     parts: tuple[Part, ...]
    ...     to_frame = frame_method("parts", Part)
    >>> Parts((Part("forward", 1.5),)).to_frame().to_dict("records")
    [{'name': 'forward', 'seconds': 1.5}]
    """
    columns = [*(field.name for field in fields(kind)), *derived]

    def to_frame(self: Any) -> Any:
        return frame(({**asdict(row), **{name: getattr(row, name) for name in derived}} for row in getattr(self, rows)), columns=columns)

    to_frame.__doc__ = f"One row per item of `{rows}`, base units: {', '.join(columns)}."
    return to_frame


def plot_method(name: str) -> Callable[..., Any]:
    """A method `plot` that draws the result with `workbench.plot.<name>`."""

    def plot(self: Any, ax: Any = None, **options: Any) -> Any:
        return picture(name)(self, ax=ax, **options)

    plot.__doc__ = (
        f"Draw it on `ax` (a new one by default) with `workbench.plot.{name}`, which takes the `options`; returns matplotlib's Axes, whose "
        '`.figure.savefig("picture.png")` saves the picture.'
    )
    return plot
