"""HTML of the WhyNotLinear panel: pure functions for the live panel and for its static form."""

from collections.abc import Collection, Sequence

from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import LINE, OUTSIDE
from workbench.core.display.table import Table, escape
from workbench.diagnosis.analysis.gap import UNEXPLAINED, Gap, GapPart
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.diagnosis.plot_gap import COLORS

LABEL, ROOM = 130, 210
"""Pixels of what stands at the left of a bar, and at its right."""
SEEN = 0.005
"""Fraction of N × one below which a part has no row, as in `wb.plot.why_not_linear`."""


def head(title: str) -> str:
    """What is examined."""
    return f'<div class="wb-head"><strong class="wb-name">Why not linear</strong><span class="wb-spec">{escape(title)}</span></div>'


def verdict(answer: WhyNotLinear) -> str:
    """Cause, why, next; what the numbers are, below."""
    tint = "stopped" if answer.cause else "finished"
    predicted = '<span class="wb-what">predicted</span>' if answer.gap.predicted else ""
    return (
        f'<div role="status"><div class="wb-head"><span class="wb-badge wb-is-{tint}">{escape(answer.headline)}</span>{predicted}</div>'
        f'<div class="wb-said"><strong>Why</strong> {escape(answer.why)}</div>'
        f'<div class="wb-said"><strong>Next</strong> {escape(answer.next)}</div>'
        f'<div class="wb-what">{escape(answer.caption)}</div></div>'
    )


def shown(gap: Gap, samples: float) -> list[GapPart]:
    """The parts that have a row."""
    full = samples / gap.linear.mid
    return [part for part in gap.parts if abs(gap.cost(part.cause, samples)) >= SEEN * full or part.cause == UNEXPLAINED]


class Waterfall:
    """The rows of a gap, on one scale: from N × one rank, part by part, down to what N ranks give, some parts mended."""

    def __init__(self, answer: WhyNotLinear, mended: Collection[str] = ()) -> None:
        self._answer, self._gap, self._samples = answer, answer.gap, answer.samples
        self.parts = shown(self._gap, self._samples)
        self.mended = [part.cause for part in self.parts if part.cause in mended]
        self.then = self._gap.without(self.mended)
        self.full, self.now = self._samples / self._gap.linear.mid, self._samples / self._gap.step.mid
        self.after = self._samples / self.then.step.mid
        lost = [self.then.cost(part.cause, self._samples) for part in self.then.parts]
        self._widest = max([self.full, self.now, self.after, self.full - sum(loss for loss in lost if loss < 0)])

    def first(self) -> str:
        """N × one."""
        text = units.rate(self.full, self._answer.unit)
        return self._row(f"{self._answer.world_size} × one", 0.0, self.full, LINE, text, predicted=False)

    def part(self, cause: str) -> str:
        """A part: where the bar above it ends, this one begins. One that is mended has no bar."""
        now = next(part for part in self.parts if part.cause == cause)
        share = units.percent(abs(now.seconds.mid) / self._gap.step.mid)
        if cause in self.mended:
            return self._row(cause, 0.0, 0.0, LINE, f"fixed (was {share})", predicted=True)
        level = self.full - sum(self.then.cost(part.cause, self._samples) for part in self._gap.parts if part not in self.parts)
        for part in self.parts:
            lost = self.then.cost(part.cause, self._samples) if part.cause not in self.mended else 0.0
            if part.cause == cause:
                break
            level -= lost
        color = COLORS.get(cause, OUTSIDE)
        text = f"{'–' if lost >= 0 else '+'}{share} of the step"
        return self._row(cause, min(level, level - lost), abs(lost), color, text, predicted=now.predicted)

    def last(self) -> str:
        """What N ranks give, and below it what they would give with the parts mended."""
        answer, gap = self._answer, self._gap
        text = f"{units.rate(self.now, answer.unit)}: {units.percent(gap.efficiency)}"
        rows = self._row(f"{answer.world_size} ranks", 0.0, self.now, LINE, text, predicted=gap.predicted)
        if self.mended:
            text = f"{units.rate(self.after, answer.unit)}: {units.percent(self.then.efficiency)}"
            rows += self._row("fixed", 0.0, self.after, LINE, text, predicted=True)
        return rows

    @property
    def all(self) -> str:
        """All rows, for pages without widgets."""
        return f'<div class="wb-steps">{self.first()}{"".join(self.part(part.cause) for part in self.parts)}{self.last()}</div>'

    def _row(self, label: str, start: float, length: float, color: str, text: str, *, predicted: bool) -> str:
        before = f'<div class="wb-free" style="width:{100 * start / self._widest:.2f}%;background:transparent"></div>'
        bar = stack.piece(length / self._widest, color, title=f"{label}: {text}", predicted=predicted) if length else ""
        kind = "predicted" if predicted else "measured"
        return stack.row(label, [before, bar], f"{kind}, {text}", text, wide=LABEL, room=ROOM, tall=16)


def tiles(answer: WhyNotLinear, drawn: Waterfall, price: float, earlier: float | None) -> str:
    """Throughput, what mended parts would bring, and the price of a sample.

    Args:
        answer: for the ranks that are picked.
        drawn: the waterfall, whose rows are the parts.
        price: money per hour of a device; 0 = relative to one rank.
        earlier: throughput that was predicted before it was measured; None = it was not.
    """
    gap, n, unit = answer.gap, answer.world_size, answer.unit
    low, high = (units.rate(answer.samples / end, unit) for end in (gap.step.high, gap.step.low))
    kind = "predicted" if gap.predicted else "measured"
    boxes = [(f"{n} ranks, {kind}", units.rate(drawn.now, unit), f"{low} … {high}")]
    if earlier is not None:
        error = earlier / drawn.now - 1
        word = f"{units.percent(abs(error))} too {'high' if error > 0 else 'low'}"
        boxes.append(("predicted before", units.rate(earlier, unit), word))
    boxes.append((f"of {n} × one", units.percent(gap.efficiency), units.rate(drawn.full, unit)))
    if drawn.mended:
        gain = gap.gain(drawn.mended)
        words = f"{units.times(gain.mid)} ({units.times(gain.low)} … {units.times(gain.high)})"
        boxes.append(("fixed, predicted", units.rate(drawn.after, unit), words))
    boxes.append((*_price(answer, drawn, price), ""))
    return stack.tiles(boxes)


def _price(answer: WhyNotLinear, drawn: Waterfall, price: float) -> tuple[str, str]:
    rate = drawn.after if drawn.mended else drawn.now
    if price > 0:
        return f"a million {answer.unit} cost", f"{price * answer.world_size / 3600 / rate * 1e6:,.4g}"
    return "cost of a sample, relative to one rank", units.times(drawn.full / rate)


def legend(drawn: Waterfall) -> str:
    """What the hatch means, and that mended parts are taken one by one."""
    words = "filled: measured; hatched: predicted; a fixed part is taken away in full; another may then become visible"
    return f'<div class="wb-what">{escape(words if drawn.parts else "")}</div>'


def static(title: str, answer: WhyNotLinear | None, drawn: Waterfall | None, tiles_: str) -> str:
    """The static form, which needs no kernel."""
    begin = f"<p><strong>Why not linear</strong> · {escape(title)}"
    if answer is None or drawn is None:
        return f"<div>{begin}<br><em>nothing is measured yet: run this cell and press Measure</em></p></div>"
    tables: Sequence[Table] = [answer.remedy_table] if answer.remedies else []
    text = f"<p><strong>{escape(answer.cause or 'no cause stands out')}</strong><br>{escape(answer.why)}<br>Next: {escape(answer.next)}</p>"
    words = "".join(table._repr_html_() for table in tables)
    note = f'<p style="white-space:pre-line"><em>{escape(answer.caption)}</em></p>'
    return f"<div>{begin}</p>{text}{tiles_}{drawn.all}{legend(drawn)}{words}{note}</div>"
