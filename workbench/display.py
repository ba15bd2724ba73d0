"""Table: one table with three faces (text, HTML, DataFrame)."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.late import panel as panel
from workbench.late import picture as picture


def escape(value: object) -> str:
    """Text that is safe inside HTML."""
    return html.escape(str(value))


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
    """One line below: what the numbers are."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells, the table has {len(self.columns)} columns: {', '.join(self.columns)}")

    def _right(self) -> list[bool]:
        """Columns of numbers stand right: those whose cells all look like one."""
        return [bool(self.rows) and all(_is_number(str(row[i])) for row in self.rows) for i in range(len(self.columns))]

    def __str__(self) -> str:
        cells = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = self._right()
        lines = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip() for row in cells]
        return "\n".join([*([self.title] if self.title else []), *lines, *([self.note] if self.note else [])])

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


def frame(rows: Iterable[Mapping[str, object]], columns: Sequence[str] | None = None) -> Any:
    """A DataFrame with one row per mapping. The home of pandas: it is imported at the first call."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if columns is None else list(columns))
