"""HTML of stacked bars: how every panel draws a step. Styled in place, so that it survives JupyterLab's sanitizer."""

from collections.abc import Mapping

from workbench import units
from workbench.display import escape
from workbench.plot.colors import text_on

LABEL = 60
"""Pixels of what stands at the left of a bar."""
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
    """One bar: a label, a piece per name, a text at the end.

    Args:
        label: what stands at its left.
        pieces: name → length, in seconds unless `shares` is False.
        colors: name → colour.
        longest: the length that fills the whole width.
        end: what stands at its right.
        pale: hatched, for a prediction.
        shares: each piece says what share of the bar it is, and for how many seconds it stands.
        wide: pixels of the label.
        room: pixels of the text at the end.
    """
    total = sum(pieces.values())
    made = []
    for name, seconds in pieces.items():
        share, color = units.percent(seconds / total if total else 0.0), colors[name]
        title = f' title="{escape(name)}: {units.seconds(seconds)} ({share})"' if shares else ""
        text = share if shares and seconds / longest >= _WIDE_ENOUGH else ""
        made.append(
            f'<div{title} style="width:{100 * seconds / longest:.2f}%;'
            f'background-color:{color};color:{text_on(color)};text-align:center;overflow:hidden;white-space:nowrap">{text}</div>'
        )
    words = ", ".join(f"{name} {units.percent(seconds / total if total else 0.0)}" for name, seconds in pieces.items()) if shares else end
    return (
        '<div class="wb-row" style="display:flex;align-items:center;margin-top:4px">'
        f'<span class="wb-rank" style="width:{wide}px;flex-shrink:0">{escape(label)}</span>'
        f'<div class="wb-bar{" wb-pale" * pale}" role="img" aria-label="{escape(f"{label}: {words}")}" style="display:flex;width:100%;'
        f'height:20px;line-height:20px;font-size:11px">{"".join(made)}</div>'
        f'<span class="wb-end" style="width:{room}px;flex-shrink:0;text-align:right">{escape(end)}</span></div>'
    )


def legend(colors: Mapping[str, str], indent: int = LABEL) -> str:
    """What the colours mean, below bars whose labels are `indent` pixels wide."""
    keys = "".join(
        f'<span class="wb-key" style="margin-right:14px"><span style="display:inline-block;width:10px;height:10px;'
        f'background-color:{color};margin-right:5px"></span>{escape(name)}</span>'
        for name, color in colors.items()
    )
    return f'<div class="wb-legend" style="margin-top:4px;margin-left:{indent}px">{keys}</div>'
