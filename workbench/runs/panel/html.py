"""Makes HTML of a Snapshot, for the live panel and for its static form.

Bars, tiles and texts are styled in place, so that it survives JupyterLab's sanitizer (which drops SVG, roles and style sheets from a
notebook that is not trusted yet); the style sheet of the panel only adds comfort. No ids, addresses or moments in time.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import PHASES as COLORS
from workbench.core.display.table import Table, escape
from workbench.core.vocabulary import PHASES
from workbench.runs.failure import Failure
from workbench.runs.panel.follow import RankShare, Snapshot
from workbench.runs.rank_ends import extremes
from workbench.runs.run import ACTIVE, Run
from workbench.runs.spec import ScriptSpec, Spec

SIGNS = {"queued": "⏸", "running": "▶", "finished": "✔", "stopped": "■", "failed": "✘", "timeout": "✘", "abandoned": "✘", "lost": "✘"}
"""State → the sign before its word, so that colour is never alone."""
_CURVE = (240, 44)  # view box of the loss curve
_POINTS = 120  # drawn at most


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def essentials(spec: Spec) -> str:
    """The spec in a line: the program, the ranks, and each knob that was turned."""
    ranks = _many(spec.world_size, "rank")
    if isinstance(spec, ScriptSpec):
        words = " ".join([Path(spec.script).name, *spec.args])
        return " · ".join([words, ranks, *(["watched"] if spec.watch else [])])
    usual = {f.name: f.default for f in dataclasses.fields(spec)}
    turned = [f"{name}={value}" for name, value in spec.to_json().items() if name in usual and value != usual[name]]
    shown = [knob for knob in turned if not knob.startswith(("task=", "nproc_per_node=", "steps="))]
    return " · ".join([spec.task, ranks, *shown])


def status(run: Run, now: Snapshot) -> str:
    """Title, state and progress bar. Without the time, so that a page replaces it only when there is progress."""
    if now.steps:
        percent = 100 * min(1.0, now.done / now.steps)
        values = f' aria-valuenow="{percent:.0f}" aria-valuemin="0" aria-valuemax="100"'
    else:
        percent, values = (0.0 if now.state in ACTIVE else 100.0), ""
    moving = " wb-unknown" if now.state in ACTIVE and not now.steps else ""
    badge = f'<span aria-hidden="true">{SIGNS[now.state]}</span> {now.state}'
    return (
        f'<div class="wb-head"><span class="wb-badge wb-is-{now.state}">{badge}</span>'
        f'<strong class="wb-name">{escape(run.name)}</strong><span class="wb-spec">{escape(essentials(run.spec))}</span></div>'
        f'<div class="wb-progress{moving}" role="progressbar" aria-label="steps done"{values}>'
        f'<div class="wb-done wb-is-{now.state}" style="width:{percent:.1f}%"></div></div>'
    )


def words(now: Snapshot) -> str:
    """Steps done, time passed, time left."""
    parts = [f"{now.done} of {_many(now.steps, 'step')}" if now.steps else _many(now.done, "step") if now.done else ""]
    parts.append(units.seconds(now.seconds) if math.isfinite(now.seconds) else "")
    if now.left is not None:
        parts.append(f"about {units.seconds(round(now.left))} left" if now.left >= 1 else "nearly done")
    elif now.state in ACTIVE and not now.done:
        parts.append("starting: Python, torch, the model, the data")
    return escape(" · ".join(part for part in parts if part))


def figures(now: Snapshot) -> str:
    """Throughput, loss with its curve, memory, evaluation: one tile each, only those there is something to say about."""
    tiles = []
    if math.isfinite(now.samples_per_sec):
        tiles.append(_tile("throughput", units.rate(now.samples_per_sec), "samples of all ranks per second, warm-up left out"))
    if now.losses:
        tiles.append(_tile("loss", f"{now.losses[-1][1]:.4g}", "of the last reported step", curve(now.losses)))
    if now.memory is not None:
        tiles.append(_tile("peak memory", units.bytes_(now.memory), "of the fullest rank"))
    tiles += [_tile(name, f"{value:.4g}", "found by the evaluation") for name, value in now.figures.items()]
    if now.evaluations:
        text = f"{len(now.evaluations)} × {units.seconds(sum(now.evaluations) / len(now.evaluations))}"
        tiles.append(_tile("validation", text, "evaluations and their mean time on the slowest rank, beside the steps"))
    return f'<div class="wb-tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(label: str, value: str, title: str, more: str = "") -> str:
    return (
        f'<div class="wb-tile" title="{escape(title)}"><span class="wb-label">{escape(label)}</span>'
        f'<span class="wb-value">{escape(value)}</span>{more}</div>'
    )


def curve(losses: Iterable[tuple[int, float]]) -> str:
    """A small SVG curve of the loss; nothing below two finite points."""
    points = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if len(points) < 2:
        return ""
    stride = -(-len(points) // _POINTS)
    points = [*points[:-1:stride], points[-1]]
    (left, *_, right), values = [step for step, _ in points], [loss for _, loss in points]
    low, high = min(values), max(values)
    width, height = _CURVE
    places = [
        (width * (step - left) / (right - left or 1), 2 + (height - 4) * (1 - (loss - low) / (high - low or 1))) for step, loss in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    label = f"loss from {values[0]:.4g} at step {left} to {values[-1]:.4g} at step {right}"
    return (
        f'<svg class="wb-curve" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'<polyline points="{line}" fill="none" stroke-width="1.6" stroke-linejoin="round" vector-effect="non-scaling-stroke"/></svg>'
    )


def chosen(ranks: Sequence[RankShare]) -> Sequence[RankShare]:
    """The ranks that are shown: all, or of very many the first, and those with the extreme values."""
    return [ranks[place] for place in extremes(ranks)]


def phases(now: Snapshot) -> str:
    """Where a step goes: one stacked bar per rank on a common scale, and the legend."""
    measured = [rank for rank in now.ranks if math.isfinite(rank.seconds) and rank.seconds > 0]
    if not measured:
        return ""
    shown = chosen(measured)
    longest = max(rank.seconds for rank in measured)
    steps, left_out = measured[0].steps - measured[0].left_out, measured[0].left_out
    what = f"mean of {_many(steps, 'step')}" + (f", the first {left_out} left out as warm-up" if left_out else "")
    if len(shown) < len(measured):
        what = f"last {_many(steps, 'step')}; {len(shown)} of {len(measured):,} ranks: the first, and those with the extreme values"
    rows = "".join(
        stack.bar(
            f"rank {rank.rank}", dict(zip(PHASES, rank.phases, strict=True)), COLORS, longest=longest, end=units.seconds(rank.seconds)
        )
        for rank in shown
    )
    return (
        f'<div class="wb-steps"><div class="wb-label">where a step goes <span class="wb-what">({what})</span></div>'
        f"{rows}{stack.legend(COLORS)}</div>"
    )


def problem(now: Snapshot, traceback: bool = True) -> str:
    """What went wrong, if anything did, see `failure`; and what to know about the figures."""
    notes = "".join(f'<div class="wb-hint">note: {escape(note)}</div>' for note in now.notes)
    return ("" if now.error is None else failure(now.error, traceback)) + notes


def failure(error: Failure, traceback: bool = True) -> str:
    """Rank, message, hint and, folded away, the traceback of the rank that failed first."""
    first = "" if error.rank is None else f"rank {error.rank} failed first: "
    more = f'<div class="wb-hint">{escape(error.hint)}</div>' if error.hint else ""
    if traceback and error.traceback:
        more += f"<details open><summary>traceback</summary><pre>{escape(error.traceback.rstrip())}</pre></details>"
    return alert(error.message, first, more)


def alert(message: str, first: str = "", more: str = "") -> str:
    """A prominent message: bold words first, more HTML below."""
    return f'<div class="wb-alert" role="alert"><strong>{escape(first)}</strong>{escape(message)}{more}</div>'


def static(run: Run, now: Snapshot) -> str:
    """The static form, without a kernel: state, figures and where the step went, as text, bars and a table."""
    if now.state in ACTIVE:
        return (
            f"<p><strong>{escape(run.name)}</strong>: {escape(essentials(run.spec))}<br><em>running: run this cell to see it live</em></p>"
        )
    parts = [f"{now.done} of {_many(now.steps, 'step')}" if now.steps else _many(now.done, "step")]
    parts += [units.rate(now.samples_per_sec)] if math.isfinite(now.samples_per_sec) else []
    parts += [f"loss {now.losses[0][1]:.4g} → {now.losses[-1][1]:.4g}"] if now.losses else []
    parts += [f"{name} {value:.4g}" for name, value in now.figures.items()]
    parts += [f"peak memory {units.bytes_(now.memory)}"] if now.memory is not None else []
    parts += [units.seconds(now.seconds)] if math.isfinite(now.seconds) else []
    head = (
        f"<p><strong>{SIGNS[now.state]} {now.state}</strong> · <strong>{escape(run.name)}</strong> · {escape(essentials(run.spec))}<br>"
        f"{escape(' · '.join(parts))}</p>"
    )
    table = Table(
        columns=("rank", "step", *PHASES, "throughput"),
        rows=[
            [r.rank, units.seconds(r.seconds), *map(units.seconds, r.phases), units.rate(r.samples_per_sec)]
            for r in chosen([rank for rank in now.ranks if math.isfinite(rank.seconds)])
        ],
    )
    return f"<div>{head}{problem(now, traceback=False)}{phases(now)}{table._repr_html_() if table.rows else ''}</div>"
