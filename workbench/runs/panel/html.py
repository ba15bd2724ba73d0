"""Makes HTML of a Snapshot, for the live panel and for its static form.

Bars, tiles and texts are styled in place, so that it survives JupyterLab's sanitizer (which drops SVG, roles and style sheets from a
notebook that is not trusted yet); the style sheet of the panel only adds comfort. No ids, addresses or moments in time.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from workbench.core import units
from workbench.core.display import html as stack
from workbench.core.display.colors import LIMIT
from workbench.core.display.colors import PHASES as COLORS
from workbench.core.display.table import Table, escape
from workbench.core.vocabulary import PHASES
from workbench.runs.failure import Failure
from workbench.runs.page import bytes_per_second
from workbench.runs.panel.follow import RankShare, Series, Snapshot
from workbench.runs.rank_ends import extremes
from workbench.runs.run import ACTIVE, Run
from workbench.runs.spec import ScriptSpec, Spec

SIGNS = {"queued": "⏸", "running": "▶", "finished": "✔", "stopped": "■", "failed": "✘", "timeout": "✘", "abandoned": "✘", "lost": "✘"}
"""State → the sign before its word, so that colour is never alone."""
_CURVE = (240, 44)  # view box of the loss curve
_POINTS = 120  # drawn at most
_LAYERS = 16
"""Layers whose norms are shown: of more, those with the largest and the smallest."""


_MACHINE: Mapping[str, tuple[Mapping[str, str], Callable[[float], str], str]] = {
    "cores": ({"cpu": ""}, units.percent, "of rank 0's machine that were busy"),
    "GPUs": ({"gpu": ""}, units.percent, "share of the time in which the GPUs of rank 0's machine computed"),
    "memory of the machine": ({"memory": ""}, units.bytes_, "in use on rank 0's machine"),
    "network": ({"network_in": "in", "network_out": "out"}, bytes_per_second, "of rank 0's machine"),
    "disks": ({"disk_read": "read", "disk_write": "written"}, bytes_per_second, "of rank 0's machine"),
    "power": ({"watts": ""}, lambda watts: units.count(watts, "W"), "of processors, memory and GPUs of rank 0's machine"),
}
"""Label of a tile → the names of `page.USAGE` in it with a word for each, how a value is written, and what it is."""


def essentials(spec: Spec) -> str:
    """The spec in a line: the program, the ranks, and each knob that was turned."""
    ranks = units.several(spec.world_size, "rank")
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
    parts = [f"{now.done} of {units.several(now.steps, 'step')}" if now.steps else units.several(now.done, "step") if now.done else ""]
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
    if now.mfu is not None:
        tiles.append(_tile("MFU", units.percent(now.mfu), "FLOPs of the model over the dense peak of all GPUs"))
    if now.losses:
        tiles.append(_tile("loss", f"{now.losses[-1][1]:.4g}", "of the last reported step", curve(now.losses)))
    if now.memory is not None:
        tiles.append(_tile("peak memory", units.bytes_(now.memory), "of the fullest rank"))
    tiles += [_tile(name, f"{value:.4g}", "found by the evaluation") for name, value in now.figures.items()]
    if now.evaluations:
        text = f"{len(now.evaluations)} × {units.seconds(sum(now.evaluations) / len(now.evaluations))}"
        tiles.append(_tile("validation", text, "evaluations and their mean time on the slowest rank, beside the steps"))
    tiles += _machine(now.usage)
    return f'<div class="wb-tiles">{"".join(tiles)}</div>' if tiles else ""


def _machine(usage: Series) -> Iterable[str]:
    """A tile for each thing of the machine that could be read, with its last value; the curve is the sum of those in a tile."""
    for label, (parts, text, title) in _MACHINE.items():
        if not (there := {name: usage[name] for name in parts if usage.get(name)}):
            continue
        value = ", ".join(f"{text(points[-1][1])} {parts[name]}".rstrip() for name, points in there.items())
        together = zip(*there.values(), strict=False)
        sums = [(points[0][0], sum(value for _, value in points)) for points in together]
        yield _tile(label, value, title, curve(sums, label, text))


def gradients(now: Snapshot) -> str:
    """The last norm of each layer's gradients as a bar on a logarithmic scale, and how it compares with those before it."""
    last = {layer: points[-1] for layer, points in now.norms.items() if points}
    if not last:
        return ""
    finite = {layer: norm for layer, (_, norm) in last.items() if math.isfinite(norm) and norm > 0}
    low = math.floor(min(map(math.log10, finite.values()), default=0))
    high = max(math.ceil(max(map(math.log10, finite.values()), default=1)), low + 1)
    by_size = sorted(last, key=lambda layer: (math.isfinite(last[layer][1]), last[layer][1]))
    extreme = {*by_size[: _LAYERS // 2], *by_size[-_LAYERS // 2 :]} if len(last) > _LAYERS else set(last)
    what = f"step {max(step for step, _ in last.values()):,}; logarithmic, from 1e{low} to 1e{high}; × the median of those before"
    if len(last) > len(extreme):
        what += f"; {len(extreme)} of {len(last):,} layers: the largest and the smallest"
    rows = []
    for layer, (_, norm) in last.items():
        if layer not in extreme:
            continue
        before = [value for _, value in now.norms[layer][:-1] if math.isfinite(value)]
        usual = median(before) if before else 0.0
        end = "not finite" if not math.isfinite(norm) else f"{norm:.2g}" + (f" ({units.times(norm / usual)})" if usual else "")
        share = (math.log10(norm) - low) / (high - low) if layer in finite else 0.0 if norm == 0 else 1.0
        color = COLORS["backward"] if math.isfinite(norm) else LIMIT
        rows.append(stack.row(layer, [stack.piece(share, color, title=f"{layer}: {end}")], end, end, wide=150, room=120, tall=12))
    return (
        f'<div class="wb-steps"><div class="wb-label">norm of each layer\'s gradients <span class="wb-what">({what})</span></div>'
        f"{''.join(rows)}</div>"
    )


def _tile(label: str, value: str, title: str, more: str = "") -> str:
    return (
        f'<div class="wb-tile" title="{escape(title)}"><span class="wb-label">{escape(label)}</span>'
        f'<span class="wb-value">{escape(value)}</span>{more}</div>'
    )


def curve(values: Iterable[tuple[int, float]], name: str = "loss", text: Callable[[float], str] = lambda value: f"{value:.4g}") -> str:
    """A small SVG curve of the loss, or of something else; nothing below two finite points."""
    points = [(step, value) for step, value in values if math.isfinite(value)]
    if len(points) < 2:
        return ""
    stride = -(-len(points) // _POINTS)
    points = [*points[:-1:stride], points[-1]]
    (left, *_, right), heights = [step for step, _ in points], [value for _, value in points]
    low, high = min(heights), max(heights)
    width, height = _CURVE
    places = [
        (width * (step - left) / (right - left or 1), 2 + (height - 4) * (1 - (value - low) / (high - low or 1))) for step, value in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    label = escape(f"{name} from {text(heights[0])} at step {left} to {text(heights[-1])} at step {right}")
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
    what = f"mean of {units.several(steps, 'step')}" + (
        f", the first {left_out if left_out > 1 else 'one'} left out as warm-up" if left_out else ""
    )
    if len(shown) < len(measured):
        what = f"last {units.several(steps, 'step')}; {len(shown)} of {len(measured):,} ranks: the first, and those with the extreme values"
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
    parts = [f"{now.done} of {units.several(now.steps, 'step')}" if now.steps else units.several(now.done, "step")]
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
    return f"<div>{head}{problem(now, traceback=False)}{phases(now)}{gradients(now)}{table._repr_html_() if table.rows else ''}</div>"
