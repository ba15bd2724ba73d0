"""HTML of the ScalingExplorer: pure functions for the live panel and for its static form."""

import math
from collections.abc import Sequence

from workbench.cluster.analysis.plan.plans import BOUNDS
from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import LIMIT, LINE, PARTS, PHASES
from workbench.core.display.table import Table, escape
from workbench.scaling.panel.model import LOST, OWN, Place, words

COLORS = {
    "compute": PARTS["compute"],
    "communication": PARTS["communication"],
    "bubble": PARTS["stalls"],
    "memory": LIMIT,
    OWN: PARTS["compute"],
    LOST: PARTS["communication"],
    "": PHASES["other"],
}
"""What limits → colour; its name is always shown beside."""
WIDE, HIGH, LEFT, LOW = 720, 260, 64, 34
"""Pixels of the picture, and of its left and lower margins."""


def head(title: str) -> str:
    """What is explored."""
    return f'<div class="wb-head"><strong class="wb-name">Scaling explorer</strong><span class="wb-spec">{escape(title)}</span></div>'


def light(place: Place) -> str:
    """What limits this number of GPUs, in a word and a sentence."""
    color = COLORS[place.bound]
    border = f"border:2px solid {color};border-radius:10px;padding:1px 9px;margin-right:8px"
    sentence = place.sentence or BOUNDS.get(place.bound, "")
    layout = f'<span class="wb-product">{escape(place.layout)}</span>' if place.layout else ""
    return (
        f'<div role="status"><div class="wb-head"><span class="wb-badge" style="{border}">{escape(place.bound or "not known")}</span>'
        f'{layout}</div><div class="wb-said">{escape(sentence)}</div></div>'
    )


def figures(place: Place, samples: float, price: float | None, intensity: float | None) -> str:
    """Throughput, efficiency, time, money, energy and carbon of so many samples."""
    kwh = place.kwh(samples)
    tiles = [
        (place.counted, f"{place.gpus:,}", ""),
        ("throughput", units.rate(place.mid), f"{units.rate(place.low)} … {units.rate(place.high)}"),
        ("of the naive line", units.percent(place.mid / place.naive), f"naive {units.rate(place.naive)}"),
        (
            f"time of {units.count(samples)} samples",
            units.seconds(samples / place.mid),
            f"{units.seconds(samples / place.high)} … {units.seconds(samples / place.low)}",
        ),
        (f"{place.each} hours", f"{place.gpus * samples / place.mid / 3600:,.4g}", ""),
    ]
    if price is not None:
        tiles.append(("money", f"{place.money(samples, price):,.4g}", f"at {price:g} per {place.each} and hour"))
    if kwh is not None:
        tiles.append(("energy", units.count(1000 * kwh, "Wh"), f"estimated by design power of {place.device}"))
    if kwh is not None and intensity is not None:
        tiles.append(("carbon", f"{units.count(kwh * intensity, 'g')} CO2e", f"at {intensity:g} g per kWh"))
    return stack.tiles(tiles)


def picture(places: Sequence[Place], measured: Sequence[tuple[int, float]], now: Place) -> str:
    """Throughput against GPUs or processes, logarithmic: predicted dashed, naive dash-dotted, measured dots, and the slider's place."""
    across, up = _scales(places, measured)

    def line(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)

    edge = [(place.gpus, place.high) for place in places] + [(place.gpus, place.low) for place in reversed(places)]
    mid, naive = [(place.gpus, place.mid) for place in places], [(place.gpus, place.naive) for place in places]
    dots = "".join(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="4" fill="{LINE}"/>' for x, y in measured)
    x, y = across(now.gpus), up(now.mid)
    shown = (
        f'<polygon points="{line(edge)}" fill="{LINE}" fill-opacity="0.25"/>'
        f'<polyline points="{line(naive)}" fill="none" stroke="currentColor" stroke-width="1.4" stroke-dasharray="7 3 1.5 3"/>'
        f'<polyline points="{line(mid)}" fill="none" stroke="{LINE}" stroke-width="2.2" stroke-dasharray="7 3"/>{dots}'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{HIGH - LOW}" stroke="currentColor" stroke-width="1"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5" fill="{COLORS[now.bound]}" stroke="currentColor"/>'
    )
    label = f"throughput against {now.counted}; {words(now)}"
    keys = {"predicted, with its band (dashed)": LINE, f"naive: every further {now.each} adds as much (dash-dotted)": "currentColor"}
    legend = stack.legend(keys | ({"measured (dots)": LINE} if measured else {}), 0)
    return (
        f'<div class="wb-steps"><div class="wb-label">samples per second against {now.counted}</div>'
        f'<svg class="wb-scaling-curve" viewBox="0 0 {WIDE} {HIGH}" width="100%" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{WIDE}px;height:auto">{_axes(places, measured, across, up)}{shown}</svg>{legend}</div>'
    )


def _scales(places: Sequence[Place], measured: Sequence[tuple[int, float]]) -> tuple["_Scale", "_Scale"]:
    xs = [*(place.gpus for place in places), *(x for x, _ in measured)]
    ys = [
        *(place.low for place in places),
        *(place.naive for place in places),
        *(place.high for place in places),
        *(y for _, y in measured),
    ]
    return _Scale(min(xs), max(xs), LEFT, WIDE - 12), _Scale(min(ys), max(ys), HIGH - LOW, 10)


class _Scale:
    """A logarithmic axis."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = math.log(low), math.log(max(high, low * 1.01))
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        return self._start + (self._end - self._start) * (math.log(value) - self.low) / (self.high - self.low)


def _axes(places: Sequence[Place], measured: Sequence[tuple[int, float]], across: _Scale, up: _Scale) -> str:
    low, high = math.exp(across.low), math.exp(across.high)
    ticks = [10**power for power in range(12) if low * 0.999 <= 10**power <= high * 1.001] or [round(low), round(high)]
    base = HIGH - LOW
    style, anchors = 'fill="currentColor" font-size="12"', ("middle", "end")
    text = "".join(
        f'<text x="{across(tick):.1f}" y="{base + 18}" text-anchor="{anchors[across(tick) > WIDE - 40]}" {style}>{units.count(tick)}</text>'
        for tick in ticks
    )
    bottom, top = math.exp(up.low), math.exp(up.high)
    rates = [10.0**power for power in range(-6, 13) if bottom <= 10.0**power <= top] or [bottom, top]
    text += "".join(f'<text x="{LEFT - 6}" y="{up(rate) + 4:.1f}" text-anchor="end" {style}>{units.count(rate)}</text>' for rate in rates)
    return (
        f'<line x1="{LEFT}" x2="{WIDE - 12}" y1="{base}" y2="{base}" stroke="currentColor"/>'
        f'<line x1="{LEFT}" x2="{LEFT}" y1="10" y2="{base}" stroke="currentColor"/>{text}'
        f'<text x="{WIDE - 12}" y="{HIGH - 2}" text-anchor="end" {style}>{places[0].counted}</text>'
    )


def limits(places: Sequence[Place]) -> str:
    """A row of colours: what limits, by number of GPUs."""
    pieces: list[tuple[str, list[int]]] = []
    for place in places:
        if not pieces or pieces[-1][0] != place.bound:
            pieces.append((place.bound, []))
        pieces[-1][1].append(place.gpus)
    sentence = "; ".join(f"{bound or 'not known'} from {sizes[0]:,} {places[0].counted} on" for bound, sizes in pieces)
    blocks = "".join(
        f'<span style="flex:{len(sizes)} 1 0;background-color:{COLORS[bound]};height:10px" title="{escape(bound)}"></span>'
        for bound, sizes in pieces
    )
    return (
        f'<div class="wb-steps"><div class="wb-label">what limits: {escape(sentence)}</div><div role="img" aria-label="{escape(sentence)}" '
        f'style="display:flex;max-width:{WIDE}px">{blocks}</div></div>'
    )


def table(places: Sequence[Place], rows: int = 8) -> Table:
    """Some of the places, for pages that show no drawings."""
    some = [*places[: -1 : max(1, -(-len(places) // rows))], places[-1]]
    return Table(
        columns=(places[0].counted, "throughput", "between", "naive", "of naive", "limited by"),
        rows=[
            [
                f"{place.gpus:,}",
                units.rate(place.mid),
                f"{units.rate(place.low)} … {units.rate(place.high)}",
                units.rate(place.naive),
                units.percent(place.mid / place.naive),
                place.bound or units.MISSING,
            ]
            for place in some
        ],
    )


def static(title: str, place: Place, places: Sequence[Place], shown: str, notes: str) -> str:
    """The static form, which needs no kernel."""
    begin = f"<p><strong>Scaling explorer</strong> · {escape(title)}</p>"
    return f"<div>{begin}{light(place)}{shown}{table(places)._repr_html_()}<p><em>{escape(notes)}</em></p></div>"
