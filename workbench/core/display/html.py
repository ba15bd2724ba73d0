"""The HTML that panels share: stacked bars styled in place, since JupyterLab's sanitizer keeps that, their legend, and the style sheet."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import anywidget

from workbench.core import units
from workbench.core.display.colors import CSS, text_on
from workbench.core.display.table import escape

LABEL = 60
"""Pixels of the label at the left of a bar."""
_WIDE_ENOUGH = 0.08  # of the bar: a share is written into a piece from here on


def bar(
    label: str,
    pieces: Mapping[str, float],
    colors: Mapping[str, str],
    *,
    longest: float,
    end: str,
    pale: bool = False,
    shares: bool = True,
    wide: int = LABEL,
    room: int = 76,
) -> str:
    """One bar: a label, a piece per name, a text at the end. The other arguments are those of `row`.

    Args:
        pieces: name → length, in seconds unless `shares` is False.
        colors: name → colour.
        longest: the length that fills the whole width.
        shares: each piece says what share of the bar it is, and how many seconds.
    """
    total = sum(pieces.values())
    made = []
    for name, seconds in pieces.items():
        share, color = units.percent(seconds / total if total else 0.0), colors[name]
        title = f"{name}: {units.seconds(seconds)} ({share})" if shares else ""
        text = share if shares and seconds / longest >= _WIDE_ENOUGH else ""
        made.append(piece(seconds / longest, color, text, title=title, predicted=pale))
    words = ", ".join(f"{name} {units.percent(seconds / total if total else 0.0)}" for name, seconds in pieces.items()) if shares else end
    return row(label, made, words, end, pale=pale, wide=wide, room=room)


def row(
    label: str, pieces: Iterable[str], words: str, end: str, *, pale: bool = False, wide: int = LABEL, room: int = 76, tall: int = 20
) -> str:
    """A bar of pieces that are HTML already.

    Args:
        label: what stands at its left.
        pieces: from left to right.
        words: what they say to somebody who does not see them.
        end: what stands at its right.
        pale: hatched, for a prediction.
        wide: pixels of the label.
        room: pixels of the text at the end.
        tall: pixels of the bar's height.
    """
    return (
        '<div class="wb-row" style="display:flex;align-items:center;margin-top:4px">'
        f'<span class="wb-rank" style="width:{wide}px;flex-shrink:0">{escape(label)}</span>'
        f'<div class="wb-bar{" wb-pale" * pale}" role="img" aria-label="{escape(f"{label}: {words}")}" style="display:flex;width:100%;'
        f'height:{tall}px;line-height:{tall}px;font-size:11px">{"".join(pieces)}</div>'
        f'<span class="wb-end" style="width:{room}px;flex-shrink:0;text-align:right">{escape(end)}</span></div>'
    )


def piece(share: float, color: str, text: str = "", *, title: str = "", style: str = "", predicted: bool = False) -> str:
    """A piece of a bar: a share of the whole width, its text, and the title that a pointer over it shows; `style` is a CSS class."""
    kind, said = f' class="{style}"' if style else "", f' title="{escape(title)}"' if title else ""
    hatch = f"background-image:repeating-linear-gradient(135deg,transparent 0 4px,{text_on(color)}59 4px 6px);" if predicted else ""
    if predicted and text:
        text = f'<span style="background-color:{color};padding:0 3px">{text}</span>'
    return (
        f'<div{kind}{said} style="width:{100 * share:.2f}%;{hatch}'
        f'background-color:{color};color:{text_on(color)};text-align:center;overflow:hidden;white-space:nowrap">{text}</div>'
    )


def legend(colors: Mapping[str, str], indent: int = LABEL, styles: Mapping[str, str] | None = None) -> str:
    """What the colours mean, below bars whose labels are `indent` pixels wide; `styles` are classes of the style sheet by name."""
    kinds = {name: f' class="{style}"' for name, style in (styles or {}).items()}
    keys = "".join(
        f'<span class="wb-key" style="margin-right:14px"><span{kinds.get(name, "")} style="display:inline-block;width:10px;height:10px;'
        f'background-color:{color};margin-right:5px"></span>{escape(name)}</span>'
        for name, color in colors.items()
    )
    return f'<div class="wb-legend" style="margin-top:4px;margin-left:{indent}px">{keys}</div>'


def tiles(boxes: Iterable[tuple[str, str, str]]) -> str:
    """Figures side by side, each from its label, its value and what is small below it."""
    drawn = (
        f'<div class="wb-tile"><span class="wb-label">{escape(label)}</span><span class="wb-value"> {escape(value)}</span>'
        f'<span class="wb-was" style="display:block;grid-column:1;font-size:12px"> {escape(small)}</span></div>'
        for label, value, small in boxes
    )
    return f'<div class="wb-tiles" style="display:flex;flex-wrap:wrap;gap:8px 36px">{"".join(drawn)}</div>'


def sheet() -> str:
    """The style sheet of all panels, with the variables that name the colours."""
    return CSS + Path(__file__).with_name("panels.css").read_text(encoding="utf-8")


class Style(anywidget.AnyWidget):
    """An invisible widget: where it is displayed, the style sheet of the panels applies. For panels without a script of their own."""

    _esm = "export default { render({ el }) { el.hidden = true } }"
    _css = sheet()

    def __repr__(self) -> str:
        return "Style()"
