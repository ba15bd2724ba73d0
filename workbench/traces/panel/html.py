"""Makes the HTML of the trace explorer, live and static, by pure functions."""

from collections.abc import Iterable, Sequence
from typing import Any

from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import text_on
from workbench.core.display.table import Table, escape
from workbench.traces.analysis.breakdown import PARTS, Breakdown
from workbench.traces.analysis.event_kinds import KINDS
from workbench.traces.analysis.layout import Layout, Strip, tiles
from workbench.traces.analysis.operators import Ranked, Which, short_name
from workbench.traces.panel.model import WORDS, Described, Explored
from workbench.traces.plot.timeline import COLORS, kind_colors

SHOWN = 15
"""Rows of a table of operators."""
_BINS, _MOST = 150, 500  # of the picture that needs no kernel
_STRIPS, _ROWS = 4, 4  # of it, at most
_NAMED = 0.09  # of its width: an event says its name from here on
_LABEL, _ROOM, _NAME = 92, 76, 172


def head(title: str) -> str:
    """The heading: which trace is explored."""
    return f'<div class="wb-head"><strong class="wb-name">Trace explorer</strong> <span class="wb-spec">{escape(title)}</span></div>'


def scene(model: Explored) -> dict[str, Any]:
    """The data that a page needs before it draws: see `TraceView.scene`."""
    colors = kind_colors(model.device)
    return {
        "strips": [{"name": _named(strip), "rows": strip.rows} for strip in model.layout.strips],
        "span": list(model.layout.span),
        "steps": [[step.number, step.start, step.end] for step in model.steps(model.first)],
        "colors": [colors[kind] for kind in KINDS],
        "inks": [text_on(colors[kind]) for kind in KINDS],
        "kinds": [WORDS.get(kind, kind) for kind in KINDS],
    }


def _named(strip: Strip) -> str:
    return strip.name if strip.rank is None else f"rank {strip.rank} · {strip.name}"


def notes(lines: Iterable[str]) -> str:
    """Notes, such as what is missing from the file."""
    text = "; ".join(lines)
    return f'<div class="wb-what">{escape(text)}</div>' if text else ""


def parts(chosen_steps: Breakdown, everything: Breakdown) -> str:
    """The chosen step, and the mean of all, in parts that add up to each."""
    chosen = [step for step in chosen_steps.steps if step.total > 0]
    if not chosen:
        return '<div class="wb-what">no step with a length</div>'
    steps = len(everything.steps)
    bars = [(f"mean of {steps}", everything)] if steps > 1 else []
    if len(chosen) == 1:
        bars.insert(0, (f"step {chosen[0].step}", chosen_steps))
    longest = max(breakdown.mean() for _, breakdown in bars)
    shown = [part for part in PARTS if any(breakdown.mean(part) for _, breakdown in bars)]
    drawn = "".join(
        stack.bar(
            label,
            {part: breakdown.mean(part) for part in shown},
            COLORS,
            longest=longest,
            end=units.seconds(breakdown.mean()),
            wide=_LABEL,
            room=_ROOM,
        )
        for label, breakdown in bars
    )
    label = '<div class="wb-label">where the step goes <span class="wb-what">(under the profiler)</span></div>'
    rows = [[part, units.seconds(chosen_steps.mean(part)), units.percent(chosen_steps.share(part))] for part in (*shown, "total")]
    table = Table(columns=("part", "time", "share"), rows=rows)._repr_html_()
    legend = stack.legend({part: COLORS[part] for part in shown}, _LABEL)
    return f'<div class="wb-steps">{label}{drawn}{legend}</div>{table}'


def cells(rows: Sequence[Ranked]) -> list[list[str]]:
    """Cells of a table of operators: name, calls, own time, its share, time with what they call."""
    return [
        [row.name, f"{row.count:,}", units.seconds(row.self_seconds), units.percent(row.share), units.seconds(row.total_seconds)]
        for row in rows[:SHOWN]
    ]


HEADS = ("calls", "self", "share", "total")
"""Headings of a table of operators, after the name."""


def label(which: str, number: int | None) -> str:
    """The label above a table of operators."""
    words = f"{which}s of {'all steps' if number is None else f'step {number}'}, by self time"
    return f'<div class="wb-label">{words} <span class="wb-what">(choose a row to highlight it)</span></div>'


def described(event: Described) -> str:
    """Text for one event."""
    where = f"step {event.step}, {units.seconds(event.at)} after its start" if event.step is not None else f"at {units.seconds(event.at)}"
    lane = event.lane if event.rank is None else f"rank {event.rank}, {event.lane}"
    calls = f"{event.calls:,} call{'s' * (event.calls != 1)} of this name in {'the step' if event.step is not None else 'the file'}"
    facts = [event.kind, units.seconds(event.seconds), f"{units.seconds(event.own)} self time", where, lane, calls]
    shapes = f'<div class="wb-what">inputs: {escape(short_name(event.shapes))}</div>' if event.shapes else ""
    return (
        f'<div class="wb-said" role="status"><strong>{escape(short_name(event.name))}</strong> '
        f"{escape(' · '.join(fact for fact in facts if fact))}{shapes}</div>"
    )


def found(text: str, calls: int) -> str:
    """The number of matches of a search."""
    if not text.strip():
        return ""
    message = f"{calls:,} match{'es' * (calls != 1)} in the file" if calls else "no name contains that"
    return f'<span class="wb-what" role="status">{message}</span>'


def lanes(shown: Layout, start: int, end: int, device: bool) -> str:
    """The static picture, which needs no kernel: the first rows of the first threads and streams, without controls."""
    drawn = "".join(_lane(shown, strip, start, end, kind_colors(device)) for strip in shown.strips[:_STRIPS])
    left = len(shown.strips) - _STRIPS
    more = f'<div class="wb-what">{left} more threads and streams in the live panel</div>' if left > 0 else ""
    return f'<div class="wb-still">{drawn}{more}</div>'


def _lane(shown: Layout, strip: Strip, start: int, end: int, colors: dict[str, str]) -> str:
    rows = range(strip.first, strip.first + min(strip.rows, _ROWS))
    made = tiles(shown, start, end, rows=(rows.start, rows.stop), bins=_BINS, most=_MOST // _STRIPS)
    pieces: dict[int, list[str]] = {row: [] for row in rows}
    reached = dict.fromkeys(rows, start)
    for row, begin, until, count, place in zip(
        *(column.tolist() for column in (made.row, made.start, made.end, made.count, made.place)), strict=True
    ):
        if begin > reached[row]:
            pieces[row].append(f'<div style="width:{100 * (begin - reached[row]) / (end - start):.2f}%"></div>')
        pieces[row].append(_piece(shown, place, (until - begin) / (end - start), count, (until - begin) / 1e9, colors))
        reached[row] = until
    lines = "".join(f'<div style="display:flex;height:15px;margin-bottom:1px">{"".join(column)}</div>' for column in pieces.values())
    name = escape(_named(strip))
    return (
        f'<div style="display:flex;margin-top:5px"><span title="{name}" style="width:{_NAME}px;flex-shrink:0;overflow:hidden;'
        f'white-space:nowrap;text-overflow:ellipsis;font-size:11px">{name}</span>'
        f'<div style="width:100%;overflow:hidden">{lines}</div></div>'
    )


def _piece(shown: Layout, place: int, share: float, count: int, seconds: float, colors: dict[str, str]) -> str:
    name, kind = shown.names[int(shown.name[place])], KINDS[int(shown.kind[place])]
    color = colors[kind]
    words = short_name(name) if count == 1 else f"{count:,} events, the longest {short_name(name)}"
    title = f"{words}: {units.seconds(seconds)}, {WORDS.get(kind, kind)}"
    text = escape(short_name(name)[: int(share * 120)]) if count == 1 and share > _NAMED else ""
    return (
        f'<div title="{escape(title)}" style="width:{100 * share:.2f}%;background-color:{color};color:{text_on(color)};font-size:10px;'
        f'line-height:15px;overflow:hidden;white-space:nowrap">{text}</div>'
    )


def operators(rows: Sequence[Ranked], which: str) -> str:
    """The static table of operators, which needs no kernel."""
    named = [[short_name(name), *rest] for name, *rest in cells(rows)]
    return Table(columns=(which, *HEADS), rows=named, title=f"{which.capitalize()}s by self time")._repr_html_()


def static(model: Explored, rank: int | None, number: int | None, which: Which) -> str:
    """The static HTML, which needs no kernel: the lanes of a step, its parts, its operators."""
    step = model.step(rank, number)
    what = "all steps" if number is None else f"step {number}, {units.seconds(step.seconds)}"
    pieces = [
        head(model.title),
        notes(model.notes),
        f"<div>{what}; run the cell to zoom, search and choose</div>",
        lanes(model.layout, step.start, step.end, model.device),
        parts(model.breakdown(rank, number), model.breakdown(rank, None)),
        operators(model.ranked(rank, number, which), which),
    ]
    return f"<div>{''.join(pieces)}</div>"
