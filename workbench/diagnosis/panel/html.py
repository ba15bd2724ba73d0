"""HTML of a diagnosis: pure functions for the live panel and for its static form."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import LINE, LINE_PALE
from workbench.core.display.colors import PARTS as COLORS
from workbench.core.display.table import escape
from workbench.core.vocabulary import PARTS
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.proof import Ladder, Proof, between
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.step_model import Parts
from workbench.diagnosis.panel.knobs import WhatIf

_LABEL, _WIDE_LABEL = 84, 170  # pixels of what stands at the left of a bar
_ROOM, _LADDER_ROOM = 190, 345  # pixels of what stands at its right
_SEEN = 0.004  # of the longest bar: what is shorter is no piece of it
_TINTS = {"compute-bound": "finished", "inconclusive": "running"}
"""Verdict → the state whose colour its badge has; all others ask for something, as a run that was stopped does."""


def bars(now: Parts | None, then: WhatIf | None, *, earlier: WhatIf | None = None, observed: bool = False) -> str:
    """The measured step, and below it the predicted one, on one scale: seconds for the samples of one step.

    Args:
        now: measured; None before there is a measurement.
        then: predicted for the current knobs; None = no knob is turned.
        earlier: what had been predicted for the step that is measured now, if it was.
        observed: nothing but a run was observed; no experiment.
    """
    if now is None or not now.step > 0:
        return '<div class="wb-what">Nothing is measured yet: press Measure, and every knob shows what it would change.</div>'
    kind = "observed" if observed else "measured"
    rows: list[tuple[str, dict[str, float], str, bool]] = []
    if earlier is not None and earlier.parts is not None and then is None:
        error = earlier.parts.rate / now.rate - 1
        words = f"{units.percent(abs(error))} too {'fast' if error > 0 else 'slow'}" if round(error, 3) else "exact"
        scale = now.rate / earlier.parts.rate * now.step / earlier.parts.step
        rows.append(("predicted", {part: earlier.parts.seconds(part) * scale for part in PARTS}, words, True))
    rows.append((kind, {part: max(0.0, now.seconds(part)) for part in PARTS}, _rate(now), False))
    if then is not None and then.parts is not None:
        rows.append(("predicted", then.pieces(now), f"{units.times(then.speedup)} · {_rate(then.parts)}", True))
    longest = max(sum(pieces.values()) for _, pieces, _, _ in rows)
    shown = [part for part in PARTS if any(pieces[part] >= _SEEN * longest for _, pieces, _, _ in rows)]
    wide = max(len(end) for _, _, end, _ in rows)
    drawn = "".join(
        stack.bar(label, {part: pieces[part] for part in shown}, COLORS, longest=longest, end=end, pale=pale, wide=_LABEL, room=8 * wide)
        for label, pieces, end, pale in rows
    )
    changed = "" if then is None else f' <span class="wb-what">(predicted with {escape(units.knobs(then.changes))})</span>'
    return (
        f'<div class="wb-steps"><div class="wb-label">time for the samples of one step'
        f"{changed}</div>"
        f"{drawn}{stack.legend({part: COLORS[part] for part in shown}, _LABEL)}{_remarks(then)}</div>"
    )


def _rate(parts: Parts) -> str:
    rate = "" if math.isnan(parts.samples_per_sec) else f" · {units.rate(parts.samples_per_sec)}"
    return f"{units.seconds(parts.step)}{rate}"


def _remarks(then: WhatIf | None) -> str:
    """What the prediction leaves out, or why there is none."""
    if then is None:
        return ""
    return _notes([then.complaint] if then.parts is None else then.parts.notes)


def _notes(notes: Iterable[str]) -> str:
    return "".join(f'<div class="wb-what">{escape(note)}</div>' for note in notes)


def head(title: str) -> str:
    """What is examined."""
    return f'<div class="wb-head"><strong class="wb-name">Throughput doctor</strong><span class="wb-spec">{escape(title)}</span></div>'


def verdict(result: Diagnosis) -> str:
    """Verdict, why, next; what the numbers are, below."""
    tint = _TINTS.get(result.verdict, "stopped")
    return (
        f'<div role="status"><div class="wb-head"><span class="wb-badge wb-is-{tint}">{escape(result.verdict)}</span>'
        f'<strong class="wb-name">{escape(result.cause)}</strong></div>'
        f'<div class="wb-said"><strong>Why</strong> {escape(result.why)}</div>'
        f'<div class="wb-said"><strong>Next</strong> {escape(result.next)}</div>'
        f'<div class="wb-what">{escape(result.caption)}</div></div>'
    )


def remedy(remedy: Remedy, proof: Proof | None, scale: float) -> str:
    """Return a remedy as HTML, with its predicted gain and, once it was proved, the measured one beside it.

    Args:
        remedy: the remedy with its predicted gain.
        proof: its proof, if there is one.
        scale: speedup that fills the whole width, the same for all remedies of a list.
    """
    rows = [_gain("predicted", remedy.speedup, remedy.gain, scale, pale=True)]
    if proof is not None:
        measured = f"{units.times(proof.measured.mid)} ({between(proof.measured)})"
        rows.append(_gain("measured", proof.measured.mid, measured, scale, pale=False))
    notes = [f"costs: {remedy.costs}"] if remedy.costs else []
    notes += [] if proof is None else [proof.word, *proof.notes]
    head = f"<strong>{escape(remedy.name)}</strong> <span>{escape(remedy.advice)}</span>"
    return f'<div class="wb-remedy">{head}{"".join(rows)}{_notes(notes)}</div>'


def _gain(label: str, speedup: float, words: str, scale: float, *, pale: bool) -> str:
    """A bar from nothing to a speedup: what there is without the remedy, and what comes on top."""
    whole = min(speedup, scale) if math.isfinite(speedup) else scale
    pieces = {"without it": min(1.0, whole), "gained": max(0.0, whole - 1)}
    return stack.bar(
        label, pieces, {"without it": LINE_PALE, "gained": LINE}, longest=scale, end=words, pale=pale, wide=_LABEL, room=_ROOM, shares=False
    )


def ladder(result: Ladder) -> str:
    """Throughput after each attempt, the start first."""
    longest = max([result.start, *(rung.samples_per_sec for rung in result.rungs)], default=math.nan)
    if not longest > 0:
        return ""
    colors = {"before": LINE_PALE, "added": LINE}
    rows = [_rung("start", result.start, 0.0, units.rate(result.start), longest)]
    now = result.start
    for rung in result.rungs:
        proof = rung.proof
        measured = "failed" if math.isnan(proof.measured.mid) else f"{units.times(proof.measured.mid)} measured"
        gain = f"{measured}, {units.times(proof.remedy.speedup)} predicted"
        if rung.kept:
            rows.append(_rung(proof.remedy.name, now, rung.samples_per_sec - now, f"{units.rate(rung.samples_per_sec)} · {gain}", longest))
            now = rung.samples_per_sec
        else:
            rows.append(_rung(proof.remedy.name, now, 0.0, f"dropped · {gain}", longest))
    changes = f" with {escape(units.knobs(result.changes))}" if result.changes else ""
    end = f"{units.times(result.speedup)} in all{changes}; now {escape(result.verdict)} ({escape(result.cause)}); {escape(result.stopped)}"
    return (
        f'<div class="wb-steps"><div class="wb-label">the ladder: throughput after one remedy on top of another</div>{"".join(rows)}'
        f'{stack.legend(colors, _WIDE_LABEL)}<div class="wb-what">{end}</div></div>'
    )


def _rung(label: str, before: float, added: float, end: str, longest: float) -> str:
    pieces = {"before": min(before, before + added), "added": max(0.0, added)}
    return stack.bar(
        label, pieces, {"before": LINE_PALE, "added": LINE}, longest=longest, end=end, wide=_WIDE_LABEL, room=_LADDER_ROOM, shares=False
    )


def waiting(what: str, seconds: float, budget_s: float) -> str:
    """What runs, for how long, and its budget."""
    percent = min(100.0, 100 * seconds / budget_s)
    return (
        f'<div class="wb-what" role="status">{escape(what)}</div><div class="wb-progress" role="progressbar" aria-label="of its budget" '
        f'aria-valuenow="{percent:.0f}" aria-valuemin="0" aria-valuemax="100">'
        f'<div class="wb-done wb-is-running" style="width:{percent:.0f}%"></div></div>'
        f'<div class="wb-what">{units.seconds(math.floor(seconds))} of about {units.seconds(budget_s)}</div>'
    )


def stopped(what: str) -> str:
    """That Stop was pressed."""
    return f'<div class="wb-what" role="status">stopped while {escape(what)}</div>'


def static(title: str, result: Diagnosis | None, then: WhatIf | None, climbed: Ladder | None) -> str:
    """The static form, which needs no kernel."""
    head = f"<p><strong>Throughput doctor</strong> · {escape(title)}"
    if result is None:
        return f"<div>{head}<br><em>nothing is measured yet: run this cell and press Measure</em></p></div>"
    text = (
        f"<p><strong>{escape(result.verdict)}</strong> ({escape(result.cause)})<br>{escape(result.why)}<br>Next: {escape(result.next)}</p>"
    )
    tables: Sequence[Any] = [result.remedy_table] if result.remedies else []
    tables = [*tables, *([climbed.table] if climbed else [])]
    return (
        f"<div>{head}</p>{text}{bars(result.parts, then, observed=result.evidence.observed)}"
        f"{''.join(table._repr_html_() for table in tables)}</div>"
    )
