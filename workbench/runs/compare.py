"""Compares runs: knobs that differ, seconds per phase, throughput and speedup, side by side; and all else that they recorded."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import late, run_directory, units
from workbench.core.display import table as display
from workbench.core.run_directory import METRIC_KEYS, DamagedRunError, short
from workbench.core.statistics import Interval
from workbench.core.synonyms import accept_synonyms
from workbench.core.vocabulary import PHASES
from workbench.runs.rows import busy_note
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec


@dataclass(frozen=True, slots=True)
class Comparison(display.Shown):
    """A comparison of runs, in groups of launches of one program. The group of the first run is the baseline."""

    runs: tuple[Run, ...]
    """The runs, in the order in which they were given."""
    places: tuple[tuple[int, ...], ...]
    """Of each group the places of its runs in `runs`, counted from 0; where no run repeats another, each is a group."""

    @property
    def groups(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of each group; the first is the baseline. All figures below are one for each group."""
        return tuple(tuple(self.runs[place] for place in places) for places in self.places)

    @property
    def repeated(self) -> bool:
        """Has any group several runs?"""
        return len(self.places) < len(self.runs)

    @property
    def labels(self) -> list[str]:
        """The knobs in which each group differs, or a run's name if there are none; with numbers where runs were repeated or alike."""
        firsts = [group[0] for group in self.groups]
        specs = [run.spec.to_json() for run in firsts]
        numbers = [f" ({', '.join(str(place + 1) for place in places)})" for places in self.places]
        names = [name for name in specs[0] if any(spec.get(name) != specs[0][name] for spec in specs)]
        if not names or "kind" in names:  # equal specs, or a task beside a script
            return [f"{run.name}{number}" for run, number in zip(firsts, numbers, strict=True)]
        knobs = [", ".join(f"{name}={word(spec[name], name)}" for name in names) for spec in specs]
        return [f"{text}{number * (self.repeated or knobs.count(text) > 1)}" for text, number in zip(knobs, numbers, strict=True)]

    def seconds(self, phase: str | None = None) -> list[float]:
        """Mean seconds of a phase (None: of the step) of each group, over its runs and their ranks; the phases add up to the step."""
        means = [[_mean([rank.mean(phase) for rank in run.rank_means if rank.count]) for run in group] for group in self.groups]
        return [_mean(values) for values in means]

    def _sums(self, phases: Sequence[str]) -> list[float]:
        return [sum(values) for values in zip(*map(self.seconds, phases), strict=True)]

    @property
    def rates(self) -> list[float]:
        """Samples per second of each group: the mean over its runs."""
        return [_mean([run.samples_per_sec for run in group]) for group in self.groups]

    @property
    def speedups(self) -> list[float]:
        """How many times as fast each group was as the baseline, by the statistic of `ranges`; without a range, the ratio of the rates."""
        return self._speedups(self._changes)

    def _speedups(self, changes: Sequence[tuple[Interval, bool, str] | None]) -> list[float]:
        rates = self.rates
        return [1.0, *(change[0].mid if change else rate / rates[0] for change, rate in zip(changes[1:], rates[1:], strict=True))]

    @property
    def _changes(self) -> list[tuple[Interval, bool, str] | None]:
        """Of each group, its `change_in_time` against the baseline."""
        first, *others = self.groups
        return [None, *(late.load("change_in_time")((first, group)) for group in others)]

    @property
    def ranges(self) -> list[Interval | None]:
        """The interval of each speedup; None = the baseline itself, or too few steps.

        Of two single runs it is the interval that the variation of their own steps allows. If a group has several, it is the one of 90 %
        that the variation from launch to launch allows (Student's t of the logarithms). As in `wb.what_changed`, it is of the mean of the
        steps of the slowest rank, or of their 25 % quantile where that shows as much, since other processes disturb it least.
        """
        return [change and change[0] for change in self._changes]

    @property
    def within_noise(self) -> list[bool | None]:
        """Whether each group differs from the baseline by no more than `ranges` allows for chance, or by less than 1 %; None as there."""
        return [change and change[1] for change in self._changes]

    @property
    def speedup(self) -> float:
        """The last of the `speedups`."""
        return self.speedups[-1]

    @property
    def table(self) -> display.Table:
        """One row per group."""
        changes = self._changes
        ranges = [units.MISSING, *map(_range_as_text, changes[1:])]
        waits, computing = (self._sums(phases) for phases in (("data_wait",), ("forward", "backward", "optimizer")))
        rates = [
            f"{units.rate(rate)}{_ends([run.samples_per_sec for run in group])}"
            for rate, group in zip(self.rates, self.groups, strict=True)
        ]
        rows = [
            [label, *map(units.seconds, (step, wait, computes)), rate, units.times(up), left_open, loss]
            for label, step, wait, computes, rate, up, left_open, loss in zip(
                self.labels,
                self.seconds(),
                waits,
                computing,
                rates,
                self._speedups(changes),
                ranges,
                map(_loss_as_text, self.groups),
                strict=True,
            )
        ]
        lines = [
            "measured, one run after the other: a busy machine moves all columns of time; repeat before believing a small difference",
            "a step is the mean after the warm-up, of which forward, backward and optimizer compute",
        ]
        if self.repeated:
            lines.append(
                "launches that differ in nothing that was recorded share a row, as do those of a list: it has their means, and in "
                "parentheses the lowest and the highest"
            )
        if statistics := dict.fromkeys(change[2] for change in changes if change):
            less = ", which other programs disturb less than the mean" * any("quantile" in statistic for statistic in statistics)
            lines.append(f"speedup and range are by the {' or the '.join(statistics)}{less}, as in workbench what-changed")
            steps = "what the variation of the runs' own steps allows"
            lines.append(
                f"the range is the 90 % interval that the variation from launch to launch allows; between two single launches, {steps}"
                if self.repeated
                else f"the range is {steps}; two launches of one program may differ by more: launch each several times by turns, and "
                "compare all of them at once"
            )
        return display.Table(
            columns=("run", "step", "waits for data", "computes", "throughput", "speedup", "range", "last loss"),
            rows=rows,
            title="Before and after",
            note=display.notes((*lines, *self.notes)),
        )

    @property
    def differences(self) -> display.Table:
        """All recorded differences in spec, environment, versions, git, code, data and outcome, with a column for each run."""
        rows = [[section, name, *(text(value) for value in values)] for section, name, values in differences(self.runs)]
        places = [f"{run.name} ({number})" for number, run in enumerate(self.runs, 1)]
        note = f"the first difference: {rows[0][0]}, {rows[0][1]}" if rows else "nothing that was recorded differs"
        return display.Table(columns=("section", "what", *places), rows=rows, title="What differs", note=note)

    @property
    def notes(self) -> list[str]:
        """In what the first runs of the groups differ beside the spec, and what makes the comparison doubtful.

        Doubtful are busy machines, runs that did not finish, runs of different programs, and no repeat among many.
        """
        notes: list[str] = []
        firsts = [group[0] for group in self.groups]
        if apart := differing_sections(firsts):
            also = " also" * any(run.spec != firsts[0].spec for run in firsts)
            where = "the table .differences, or --differences in a terminal, has the values"
            notes.append(f"the runs{also} differ in {', '.join(apart)}: {where}")
        names = [f"run {number}" for number, _ in enumerate(self.runs, 1)] if self.repeated else self.labels
        for name, run in zip(names, self.runs, strict=True):
            if busy := busy_note(run.path):
                notes.append(f"{name}: {busy}")
            if not run.ok:
                done, steps = run.progress
                notes.append(f"{name}: {run.state} after {done}{f' of {steps}' if steps else ''} steps; the steps it took are compared")
        if len({type(run.spec) for run in self.runs}) > 1:
            notes.append("a task beside a script: where they do not train the same, a speedup says nothing")
        if len(self.runs) > 2 and not self.repeated and any(run.spec == self.runs[0].spec for run in self.runs[1:]):
            alike = len(_groups_of(self.runs)) == 1
            said = (
                "nothing that was recorded differs between these runs"
                if alike
                else "no two of these runs are alike in all that was recorded"
            )
            notes.append(f"{said}, so none counts as a repeat of another: name repeats with wb.compare([before, before2], [after, after2])")
        return notes

    def to_frame(self) -> Any:
        """A DataFrame with one row per group: seconds per phase, samples per second, speedup, ends of its range, whether it is noise."""
        columns, facts = {phase: self.seconds(phase) for phase in PHASES}, self.facts()
        taken = ("samples_per_sec", "speedup", "low", "high", "within_noise")
        return display.frame(
            [
                {"run": fact["differs"], **{p: values[i] for p, values in columns.items()}, **{name: fact[name] for name in taken}}
                for i, fact in enumerate(facts)
            ]
        )

    def facts(self) -> list[dict[str, Any]]:
        """One row per group as plain JSON values: its directories, how it differs, and the figures of the table; None = not known."""
        changes = self._changes  # reads the timelines of all runs
        ranges = [[change[0].low, change[0].high] if change else [None, None] for change in changes]
        within_noise = [change and change[1] for change in changes]
        names = ("run", "runs", "differs", "step", "samples_per_sec", "speedup", "low", "high", "within_noise")
        columns = (self.labels, self.seconds(), self.rates, self._speedups(changes), ranges, within_noise)
        return [
            dict(zip(names, (paths[0], paths, label, step, rate, up, *ends, noise), strict=True))
            for paths, label, step, rate, up, ends, noise in zip(
                [[str(run.path) for run in group] for group in self.groups], *columns, strict=True
            )
        ]

    plot = display.plot_method("compare")

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.labels)})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _ends(values: Sequence[float], show: Callable[[float], str] = units.digits) -> str:
    """The lowest and the highest of several values, in parentheses; nothing where they read the same."""
    ends = [show(end(values)) for end in (min, max)] if values else []
    return f" ({' … '.join(ends)})" if len({*ends}) > 1 else ""


def _loss_as_text(group: Sequence[Run]) -> str:
    losses = [loss for run in group if (loss := last_loss(run.metric_rows)) is not None]
    return f"{_mean(losses):.4g}{_ends(losses, '{:.4g}'.format)}" if losses else units.MISSING


def _range_as_text(change: tuple[Interval, bool, str] | None) -> str:
    if change is None:
        return "too few steps to tell"
    span, noise, _ = change
    return f"{units.times(span.low)} … {units.times(span.high)}{', within noise' * noise}"


def last_loss(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The last loss in a run's `metric_rows`; None = it reported none, as a script."""
    return next((float(row["loss"]) for row in reversed(rows) if row.get("loss") is not None and "lr" in row), None)


def word(value: object, name: str = "") -> str:
    """The value of a knob or an argument in a table; `name`: of the knob, of which some default to what the task has."""
    if value is None and name in ("lr", "optimizer"):
        return "the task's own"
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def without_steps(run: Run) -> str:
    """Why a run has no measured step, and what to choose instead."""
    if run.experiment:
        return f"it is a run of experiments ({run.experiment}), not a training; choose one that trained: workbench runs lists them"
    if run.state == "running":
        return "wait for it: run.wait()"
    return "a script's steps are measured with watch=True" if isinstance(run.spec, ScriptSpec) else "it took no step that counts"


@accept_synonyms
def compare(*runs: Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]]) -> Comparison:
    """Compare runs, or run directories, side by side; the first is the baseline.

    Launches of the same program count as one: `compare(a1, b1, a2, b2)` compares both launches of a with both of b, with one speedup and
    one range. They are runs that differ in nothing that was recorded (spec, variables, versions, commit, code, data, machine), or those of
    a list: `compare([a1, a2], [b1, b2])`.

    Raises:
        ValueError: fewer than two runs or lists, or a run without a measured step.
    """
    lists: list[list[Any]] = [list(given) if isinstance(given, list | tuple) else [given] for given in runs]
    for each in (each for some in lists for each in some):
        if not isinstance(each, Run | str | os.PathLike):
            raise ValueError(f"compare() got a {type(each).__name__}: expected runs, compare(before, after) or compare(*runs)")
    if len(runs) < 2 or not all(lists):
        what = units.several(len(runs), "run") if all(len(some) == 1 for some in lists) else "a list alone, or an empty one"
        raise ValueError(
            f"compare() got {what}: expected two or more, the baseline first, compare(before, after) or compare(*runs); a list holds "
            "launches of one program, compare([before, before2], [after, after2])"
        )
    loaded = tuple(given if isinstance(given, Run) else Run.load(given) for some in lists for given in some)
    for run in loaded:
        if not any(rank.count for rank in run.rank_means):
            raise ValueError(f"{run!r} has no measured step to compare ({run.state}): {run.error or without_steps(run)}")
    given = any(isinstance(each, list | tuple) for each in runs)
    if given:
        places = iter(range(len(loaded)))
        lists_of = [[next(places) for _ in some] for some in lists]
        if twice := next((loaded[i] for some in lists_of for i in some for j in some if i < j and loaded[i].path == loaded[j].path), None):
            raise ValueError(f"compare() got {twice!r} twice in a list: expected different launches of one program")
        return Comparison(loaded, tuple(map(tuple, lists_of)))
    groups = _groups_of(loaded) if len(loaded) > 2 else []
    return Comparison(loaded, tuple(map(tuple, groups)) if len(groups) > 1 else tuple((place,) for place in range(len(loaded))))


def _groups_of(runs: Sequence[Run]) -> list[list[int]]:
    """The places of runs that repeat each other, in their order: launches that differ in nothing that was recorded but the outcome."""
    groups: list[list[int]] = []
    for place, run in enumerate(runs):
        repeats = (group for group in groups if all(run.path != runs[one].path for one in group) and _is_repeat(runs[group[0]], run))
        group = next(repeats, None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    return groups


def _is_repeat(one: Run, other: Run) -> bool:
    """Two launches of one program: a restart of the machine, another branch at the same commit and late imports do not count."""
    if one.spec != other.spec:
        return False
    found = {(section, name) for section, name, _ in differences((one, other)) if section not in ("outcome", "imports")}
    return not found - {("environment", "boot"), ("git", "branch")}


SECTIONS = ("spec", "variables", "environment", "versions", "git", "code", "data", "outcome")
INSTALLED = ("python", "platform", "cuda", "cudnn", "workbench", "torch", "numpy")
"""Versions that are recorded of what is installed; others are of packages that a run has imported."""
SHOWN = 5
"""Files or packages that are named at most."""
ORDERS = ("seed", "micro_batch", "nproc_per_node", "nnodes", "num_workers", "tensor_parallel", "pipeline_parallel", "expert_parallel")
"""Knobs that decide which samples the first batch of rank 0 has and which random numbers augment them: its content then says nothing."""
_SET_BY = {
    "threads": ("threads", "OMP_NUM_THREADS"),
    "deterministic": ("deterministic algorithms", "cudnn.benchmark", "CUBLAS_WORKSPACE_CONFIG"),
    "tf32": ("products of matrices",),
    "device": ("device", "GPUs"),
}
"""Knob → names in the environment that differ where it does."""
Sections = dict[str, dict[str, Any]]


def provenance(run: Run) -> Sections:
    """By section, name → value; a section that the run has not recorded is empty."""
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    recorded, git = (read_or_none(run.path / name) for name in (run_directory.ENVIRONMENT, run_directory.GIT))
    spec = {name: value for name, value in run.spec.to_json().items() if name != "kind"}
    boot = _dict(info.get("machine")).get("boot")
    machine = {"host": info.get("host"), "cores": info.get("cores"), "GPUs": info.get("gpus"), **({"boot": boot} if boot else {})}
    rows = run.metric_rows
    loss = last_loss(rows)
    figures = {name: value for row in rows for name, value in row.items() if name not in METRIC_KEYS}
    outcome = {"state": run.state, "steps": run.progress[0], **({} if loss is None else {"last loss": loss}), **figures}
    return {
        "spec": spec,
        "variables": _dict(info.get("variables")) | _dict(recorded.get("variables")),
        "environment": machine | _dict(recorded.get("environment")),
        "versions": _dict(info.get("versions")) | _dict(recorded.get("versions")),
        "git": _dict(info.get("git")) | git,
        "code": _dict(recorded.get("code")),
        "data": _dict(recorded.get("data")),
        "outcome": outcome,
    }


def read_or_none(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a run; none where it is missing or damaged."""
    with contextlib.suppress(DamagedRunError):
        return run_directory.read_json(path)
    return {}


def variables_of(runs: Sequence[Run]) -> list[dict[str, str] | None]:
    """The environment variables that each run kept; None = it kept none, as a run of an earlier version.

    Those that only imported files name are left out where one of the runs did not keep them.
    """
    kept = [run_directory.read_json(run.path / run_directory.RUN_JSON).get("variables") for run in runs]
    imported = [read_or_none(run.path / run_directory.ENVIRONMENT).get("variables") for run in runs]
    more = imported if all(isinstance(each, Mapping) for each in imported) else [{}] * len(runs)
    return [_dict(one) | _dict(other) if isinstance(one, Mapping) else None for one, other in zip(kept, more, strict=True)]


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def differences(runs: Sequence[Run]) -> list[tuple[str, str, list[Any]]]:
    """Section, name and values by run of all that differs, in the order of SECTIONS; None = not recorded.

    Packages that only some of the runs have imported, all in one version, are one row of a section "imports" after the versions.
    """
    each = [provenance(run) for run in runs]
    for sections, variables in zip(each, variables_of(runs), strict=True):
        sections["variables"] = _dict(variables)
    found = []
    for section in SECTIONS:
        parts = [one[section] for one in each]
        names = list(dict.fromkeys(name for part in parts for name in part))
        apart: list[list[str]] = [[] for _ in runs]
        for name in names if all(parts) else ():  # what a run of an earlier version did not record says nothing
            values = [part.get(name) for part in parts]
            if section == "versions" and name not in INSTALLED and None in values and len({*map(str, values)}) == 2:
                for packages, version in zip(apart, values, strict=True):
                    packages += [name] if version else []
            elif any(value != values[0] and value == value for value in values):
                found.append((section, name, values))
        if any(apart):
            found.append(("imports", "not in each run", [several_of(packages) if packages else None for packages in apart]))
    ordered = any(section == "spec" and name in ORDERS for section, name, _ in found)
    return [row for row in found if not (ordered and row[:2] == ("data", "first samples"))]


def differing_sections(runs: Sequence[Run]) -> list[str]:
    """In what runs differ beside their specs, what these set, and their outcome: sections, each with the first few names.

    Of environment and versions, what the ranks of one of the runs did not write, as those of a script, is left out. If the tasks or
    scripts are others, so are their own files and the modules of their datasets.
    """
    found: dict[str, list[str]] = {}
    all_of, written = differences(runs), [read_or_none(run.path / run_directory.ENVIRONMENT) for run in runs]
    knobs = {name for section, name, _ in all_of if section == "spec"}
    left_out = {"branch", "boot", *(name for knob in knobs for name in _SET_BY.get(knob, ()))}
    for section, name, values in all_of:
        if section in ("spec", "imports", "outcome") or (section in ("git", "environment") and name in left_out):
            continue
        unknown = any(value is None and section not in kept for value, kept in zip(values, written, strict=True))
        if unknown and section in ("environment", "versions"):
            continue
        of_dataset = name == "type" and len({str(value).rpartition(".")[2] for value in values}) == 1
        if knobs & {"task", "script"} and (of_dataset or (section == "code" and None in values)):
            continue
        found.setdefault(section, []).append(name)
    return [f"{section} ({several_of(names)})" for section, names in found.items()]


def text(value: Any) -> str:
    """What was recorded, in a table."""
    if value is None or value == "":
        return units.MISSING
    return value[:60] if isinstance(value, str) else short(value)


def several_of(names: Sequence[str]) -> str:
    """The first few of some names."""
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
