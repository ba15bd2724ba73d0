"""wb.report: one page of HTML about a run that stands alone. It loads nothing and executes nothing; all text in it is escaped.

`run_text` and `run_facts` describe a run in plain text, and as facts for a program.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from workbench.core import late, run_directory, units
from workbench.core.checks import is_number, real_number
from workbench.core.device import Device
from workbench.core.display.colors import LINE, PHASES, text_on
from workbench.core.display.table import Table, escape
from workbench.core.synonyms import accept_synonyms
from workbench.runs.compare import SECTIONS, provenance, word
from workbench.runs.health import health, new_faults
from workbench.runs.rank_ends import extremes
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec
from workbench.timeline.analysis.alarm_events import ONE_ALARM
from workbench.timeline.timeline import LEFT_OUT, WARNING, Timeline

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em}h2{margin-top:2em}"
    "table{border-collapse:collapse;margin:.5em 0}th,td{padding:.2em .8em;border-bottom:1px solid #8888;vertical-align:top}"
    "figure{display:inline-block;margin:.5em 1em .5em 0}svg{border:1px solid #8888}pre{white-space:pre-wrap;border-left:3px solid #d0342c;"
    "padding-left:1em}.bar{display:flex;height:20px}.bar div{overflow:hidden;white-space:nowrap;font-size:11px;line-height:20px;"
    "text-align:center}"
)
_SIZE = (360, 120)
_POINTS = 400
"""Points of a curve at most."""
_FORMATS = {"amp_bf16": "bf16", "amp_fp16": "fp16"}


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a run; `save` writes it as a self-contained HTML page."""

    run: Run
    flops_per_sample: float | None = None
    """Floating-point operations of a sample's forward and backward; None = not known."""

    @property
    def mfu(self) -> tuple[float | None, str]:
        """Model FLOPs utilisation, 0..1, and how it was computed; None and the reason where it cannot be said.

        Observed throughput × FLOPs per sample over the dense peak of all GPUs. Source: PaLM, arXiv:2204.02311, appendix B.
        """
        if self.flops_per_sample is None:
            count = 'wb.report(run, flops_per_sample="count") counts them in a dry run of its task; '
            give = f"{count * isinstance(self.run.spec, RunSpec)}wb.report(run, flops_per_sample=…) takes their number"
            return None, f"the FLOPs of a sample are not known: {give}"
        (peak, words), rate = dense_peak(self.run), self.run.samples_per_sec
        if not peak or not rate > 0:
            return None, words if not peak else "no step was measured"
        used = rate * self.flops_per_sample / peak
        if used > 1:
            return None, f"{units.percent(used)} of the peak is impossible: flops_per_sample={self.flops_per_sample:g} is too large"
        return used, f"{units.rate(rate)} × {units.count(self.flops_per_sample, 'FLOP')}, over {words}"

    @property
    def pipeline_idle(self) -> Any:
        """What part of a step each stage of a pipeline waits for the others, measured and predicted: a PipelineIdle; None = no pipeline, or
        no step of it was measured.
        """
        return pipeline_idle(self.run)

    @property
    def html(self) -> str:
        """The page."""
        run = self.run
        parts = [
            f'<h1>{escape(run.name)}</h1><p style="white-space:pre-line">{escape(run.summary)}</p>',
            *(("<h2>Failure</h2>", f"<pre>{escape(run.error.traceback or run.error)}</pre>") if run.error else ()),
            _resumes(run),
            "<h2>Where a step goes</h2>",
            _bars(run),
            "" if self.pipeline_idle is None else self.pipeline_idle._repr_html_(),
            "<h2>Curves</h2>",
            *(_curve(*each) for each in _series(run)),
            self._figures(),
            *_evaluations(run.evaluations),
            *self._tables(),
        ]
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            f"<title>{escape(run.name)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
        )

    def _figures(self) -> str:
        used, why = self.mfu
        memory = max((peak for peak in self.run.memory if peak is not None), default=None)
        rows = [
            ["throughput", units.rate(self.run.samples_per_sec), "samples of all ranks per second, warm-up left out"],
            ["peak memory", "–" if memory is None else units.bytes_(memory), "of the fullest rank"],
            ["MFU", "–" if used is None else units.percent(used), why],
        ]
        try:
            energy = self.run.energy()
            kind = "measured" if energy.measured else "estimated"
            rows.append(
                ["energy", units.count(energy.joules, "J"), f"{kind}, {units.count(energy.watts, 'W')} on average: {energy.source}"]
            )
        except ValueError as error:
            rows.append(["energy", "–", str(error)])
        return f"<h2>Figures</h2>{Table(columns=('what', 'value', 'how'), rows=rows)._repr_html_()}"

    def _tables(self) -> Iterable[str]:
        sections = provenance(self.run)
        for section in SECTIONS:
            of_spec = section == "spec"
            rows = [[name, (word(value, name) if of_spec else str(value))[:300]] for name, value in sections[section].items()]
            yield f"<h2>{section.capitalize()}</h2>{Table(columns=('what', 'value'), rows=rows)._repr_html_()}" if rows else ""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, and return its path."""
        Path(path).write_text(self.html, encoding="utf-8")
        return Path(path)

    def __str__(self) -> str:
        return run_text(self.run) + (f"\n\n{self.mfu_text}" if self.flops_per_sample is not None else "")

    @property
    def mfu_text(self) -> str:
        """The MFU and how it was computed, or why it cannot be said, in a line."""
        used, how = self.mfu
        return f"MFU: not known, since {how}" if used is None else f"MFU: {units.percent(used)}: {how}"

    def __repr__(self) -> str:
        return f"Report({self.run!r})"


def dense_peak(run: Run) -> tuple[float | None, str]:
    """Dense peak of all GPUs of a run in its number format, in FLOP/s, and its factors; None and the reason where it is not known."""
    name, spec, wanted = str(provenance(run)["environment"].get("device", "unknown")), run.spec, "fp32"
    if (device := Device.known(name)) is None:
        return None, f"the peak of {name:.80} is not known"
    if isinstance(spec, RunSpec):
        wanted = _FORMATS.get(spec.precision, "tf32" if spec.tf32 else "fp32")
    if not (peak := device.flops_per_sec.get(wanted)):
        return None, f"the peak of {name} in {wanted} is not known"
    return peak * spec.world_size, f"{units.count(peak, 'FLOP/s')} ({wanted}) × {spec.world_size}"


def flops_of(run: Run, flops_per_sample: float | Literal["count"] | None) -> float | None:
    """The FLOPs of a sample as they are given, or counted in a dry run of the run's task.

    Raises:
        ValueError: an invalid number, a run of a script, or the dry run needs values.
    """
    if flops_per_sample is None:
        return None
    if flops_per_sample != "count":
        real_number("flops_per_sample", flops_per_sample, above=0, also=', or "count"', error=ValueError)
        return float(flops_per_sample)
    if not isinstance(run.spec, RunSpec):
        raise ValueError('flops_per_sample="count": the FLOPs of a script are not counted; give a number')
    return float(late.load("flops_per_sample")(run.spec))


@accept_synonyms
def report(run: Run | str | os.PathLike[str], *, flops_per_sample: float | Literal["count"] | None = None) -> Report:
    """Make a report of a run: spec, environment, curves, step times, evaluations, failures. `print` shows the text, `save` writes the page.

    Args:
        run: a Run in any state, or its directory.
        flops_per_sample: floating-point operations of forward and backward for one sample, for the MFU; "count" = count them in a dry run
            of its task, which is imported for that.

    Raises:
        ValueError: not a run, an invalid number, or what cannot be counted.
    """
    if not isinstance(run, Run | str | os.PathLike):
        raise ValueError(f"report() got a {type(run).__name__}: expected a run or its directory, report(run) or report('runs/…')")
    run = run if isinstance(run, Run) else Run.load(run)
    return Report(run, flops_of(run, flops_per_sample))


def _resumes(run: Run) -> str:
    rows = run_directory.LineTail(run.path / run_directory.RESUMES).read(salvage=True)
    shown = [[row.get("step", "–"), row.get("checkpoint", row.get("ended_by", "–"))] for row in rows]
    return "<h2>Resumed</h2>" + Table(columns=("after step", "from, or ended by"), rows=shown)._repr_html_() if shown else ""


def _bars(run: Run) -> str:
    timelines = run.timelines
    ranks = [timelines[place] for place in extremes(run.rank_means)]
    ranks = [timeline for timeline in ranks if timeline.count]
    longest, bars = max((timeline.mean() for timeline in ranks), default=0.0), []
    for timeline in ranks:
        pieces = "".join(
            f'<div title="{phase}: {units.seconds(timeline.mean(phase))}" style="width:{100 * timeline.mean(phase) / longest:.2f}%;'
            f'background:{color};color:{text_on(color)}">{phase}</div>'
            for phase, color in PHASES.items()
        )
        more = f", {len(timeline.validations)} evaluations between the steps: {units.seconds(sum(timeline.validations))}"
        text = f"rank {timeline.rank}: {units.seconds(timeline.mean())}" + more * bool(timeline.validations)
        bars.append(f'<p>{text}</p><div class="bar" role="img" aria-label="{text}">{pieces}</div>')
    return "".join(bars) or "<p>no step was measured</p>"


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _series(run: Run) -> Iterable[tuple[str, list[tuple[float, float]], Callable[[float], str]]]:
    """Name, points and how a value is written, of each curve."""
    rows = run.metric_rows
    for name in ("loss", "lr"):
        yield name, [(row["step"], row[name]) for row in rows if row.get(name) is not None and "lr" in row], _figure
    yield "throughput", [(row["step"], value) for row, value in throughput(rows)], units.rate
    timeline = next(iter(run.timelines), None)
    if timeline:
        yield "time of a step, rank 0", [(step.index, step.seconds) for step in timeline.steps], units.seconds
        yield "peak memory, rank 0", [(step.index, step.memory) for step in timeline.steps if step.memory is not None], units.bytes_
    for name, words in USAGE.items():
        yield words, [(row["step"], usage_of(row)[name]) for row in run.usage if name in usage_of(row)], _usage_text(name)
    layers = dict.fromkeys(layer for row in run.gradient_norms for layer in norms_of(row))
    for layer in list(layers)[:24]:
        yield (
            f"gradient norm of {layer}",
            [(row["step"], norms_of(row)[layer]) for row in run.gradient_norms if layer in norms_of(row)],
            _figure,
        )
    figures = dict.fromkeys(name for row in run.evaluations for name in figures_of(row))
    for name in list(figures)[:12]:
        yield name, [(row["step"], figures_of(row)[name]) for row in run.evaluations if name in figures_of(row)], _figure


def throughput(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Samples per second between a row of METRICS and the next."""
    known = [row for row in rows if row.get("samples") is not None and row.get("seconds") is not None]
    return [
        (after, (after["samples"] - before["samples"]) / (after["seconds"] - before["seconds"]))
        for before, after in itertools.pairwise(known)
        if after["seconds"] > before["seconds"]
    ]


def bytes_per_second(value: float) -> str:
    """Bytes per second as text."""
    return f"{units.bytes_(value)}/s"


USAGE: Mapping[str, str] = {
    "cpu": "share of rank 0's cores that were busy",
    "memory": "memory of its machine in use",
    "network_in": "received from the network",
    "network_out": "sent to the network",
    "disk_read": "read from disks",
    "disk_write": "written to disks",
    "gpu": "share of the time in which its GPUs computed",
    "watts": "power of processors, memory and GPUs",
}
"""What a row of USAGE may have: fractions, bytes, bytes per second and watts; and what it is."""


def _usage_text(name: str) -> Callable[[float], str]:
    """How a value of USAGE is written."""
    if name in ("cpu", "gpu"):
        return units.percent
    return units.bytes_ if name == "memory" else (lambda value: units.count(value, "W")) if name == "watts" else bytes_per_second


def usage_of(row: Mapping[str, Any]) -> dict[str, float]:
    """What could be read of a machine, in a row of USAGE."""
    sound = is_number(row.get("step"), least=0)
    return {name: float(row[name]) for name in USAGE if is_number(row.get(name), least=0)} if sound else {}


def norms_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The norms of a row of GRADIENTS, by layer; one may be infinite or NaN."""
    norms = row.get("norms")
    sound = isinstance(norms, Mapping) and is_number(row.get("step"), least=0)
    return {str(layer): float(value) for layer, value in norms.items() if isinstance(value, int | float)} if sound and norms else {}


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row of EVALUATIONS that are numbers."""
    figures = row.get("figures")
    sound = isinstance(figures, Mapping) and is_number(row.get("step"), least=0)
    return {str(name): float(value) for name, value in figures.items() if is_number(value)} if sound and figures else {}


def _curve(name: str, points: Sequence[tuple[float, float]], text: Callable[[float], str] = _figure) -> str:
    """A curve as SVG, with its first and its last value in words; "" below two finite points."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) < 2:
        return ""
    points = [*points[: -1 : -(-len(points) // _POINTS)], points[-1]]
    (width, height), xs, ys = _SIZE, [x for x, _ in points], [y for _, y in points]
    wide, tall = max(xs) - min(xs) or 1, max(ys) - min(ys) or 1
    places = " ".join(f"{width * (x - min(xs)) / wide:.1f},{2 + (height - 4) * (1 - (y - min(ys)) / tall):.1f}" for x, y in points)
    words = f"{name}: {text(ys[0])} at step {xs[0]:,.0f}, {text(ys[-1])} at step {xs[-1]:,.0f}; "
    words += f"least {text(min(ys))}, most {text(max(ys))}"
    return (
        f'<figure><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}">'
        f'<polyline points="{places}" fill="none" stroke="{LINE}" stroke-width="1.6"/></svg>'
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not rows:
        return
    last = rows[-1]
    shown = [[name, f"{value:.4g}"] for name, value in figures_of(last).items()]
    yield f"<h2>Evaluation</h2>{Table(columns=('figure', 'after the last'), rows=shown)._repr_html_()}"
    classes, worst = last.get("classes"), last.get("worst")
    if isinstance(classes, Mapping):
        columns = ("count", "recall", "precision")
        table = [[name, *(_short(entry.get(each)) for each in columns)] for name, entry in classes.items() if isinstance(entry, Mapping)]
        yield f"<h3>Classes</h3>{Table(columns=('class', *columns), rows=table[:100])._repr_html_()}"
    if isinstance(worst, list):
        fields = ("index", "loss", "target", "predicted", "confidence")
        table = [[_short(entry.get(each)) for each in fields] for entry in worst if isinstance(entry, Mapping)]
        yield f"<h3>Worst examples</h3>{Table(columns=fields, rows=table)._repr_html_()}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)[:80]


def run_text(run: Run) -> str:
    """A run as text: how it ended, what went wrong, and where the time went on each rank; of very many on the first and the extremes."""
    timelines = run.timelines
    faults = "\n".join(f"fault: {fault}" for fault in new_faults(run))
    idle = pipeline_idle(run)
    ranks = [str(told_once(timelines[place])) for place in extremes(run.rank_means)] if any(each.steps for each in timelines) else []
    return "\n\n".join(filter(None, [str(run), faults, *ranks, "" if idle is None else str(idle)]))


def told_once(timeline: Timeline) -> Timeline:
    """The steps of a rank without the notes that stand above them, in those of its run: warnings, such as alarms, and rows left out."""
    kept = [note for note in timeline.notes if not note.startswith((WARNING, LEFT_OUT)) and note != ONE_ALARM]
    return replace(timeline, notes=tuple(kept))


def pipeline_idle(run: Run) -> Any:
    """What part of a step each stage of a pipeline waits for the others, measured and predicted: a PipelineIdle; None = no pipeline."""
    return late.load("pipeline_idle")(run.spec, run.rank_means) if getattr(run.spec, "pipeline_parallel", 1) > 1 else None


def run_facts(run: Run) -> dict[str, Any]:
    """The main facts about a run, for a program."""
    done, steps = run.progress
    return {
        "run": str(run.path),
        "name": run.name,
        "state": run.state,
        "steps_done": done,
        "steps": steps,
        "seconds": run.seconds,
        "samples_per_sec": run.samples_per_sec,
        "spec": run.spec,
        "notes": run.notes,
        "memory": run.memory,
        "faults": [str(fault) for fault in health(run).faults],
        "error": None if run.error is None else str(run.error),
        "ranks": [{"rank": mean.rank, "step": mean.mean(), **{phase: mean.mean(phase) for phase in PHASES}} for mean in run.rank_means],
    }
