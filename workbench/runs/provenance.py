"""Reads what a run depended on and came to, section by section, and says in what runs differ: spec, machine, versions, git, code, data."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.core import run_directory
from workbench.core.display import table as display
from workbench.core.run_directory import METRIC_KEYS, DamagedRunError, short
from workbench.runs.run import Run

SECTIONS = ("spec", "environment", "versions", "git", "code", "data", "outcome")
Sections = dict[str, dict[str, Any]]


def provenance(run: Run) -> Sections:
    """By section, name → value; a section that the run has not recorded is empty."""
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    recorded, git = ({}, {})
    with contextlib.suppress(DamagedRunError):
        recorded = run_directory.read_json(run.path / run_directory.ENVIRONMENT)
    with contextlib.suppress(DamagedRunError):
        git = run_directory.read_json(run.path / run_directory.GIT)
    spec = {name: value for name, value in run.spec.to_json().items() if name != "kind"}
    machine = {"host": info.get("host"), "cores": info.get("cores"), "GPUs": info.get("gpus")}
    rows = run.metric_rows
    losses = [row["loss"] for row in rows if row.get("loss") is not None and "lr" in row]
    figures = {name: value for row in rows for name, value in row.items() if name not in METRIC_KEYS}
    outcome = {"state": run.state, "steps": run.progress[0], **({"last loss": losses[-1]} if losses else {}), **figures}
    return {
        "spec": spec,
        "environment": machine | _dict(recorded.get("environment")),
        "versions": _dict(info.get("versions")) | _dict(recorded.get("versions")),
        "git": _dict(info.get("git")) | git,
        "code": _dict(recorded.get("code")),
        "data": _dict(recorded.get("data")),
        "outcome": outcome,
    }


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def differences(runs: Sequence[Run]) -> list[tuple[str, str, list[Any]]]:
    """Section, name and values by run of all that differs, in the order of SECTIONS; None = not recorded."""
    each = [provenance(run) for run in runs]
    found = []
    for section in SECTIONS:
        parts = [one[section] for one in each]
        names = list(dict.fromkeys(name for part in parts for name in part))
        for name in names if all(parts) else ():  # what a run of an earlier version did not record says nothing
            values = [part.get(name) for part in parts]
            if any(value != values[0] and value == value for value in values):
                found.append((section, name, values))
    return found


def difference_table(runs: Sequence[Run]) -> display.Table:
    """A row for each thing that differs."""
    rows = [[section, name, *("–" if value is None else _text(value) for value in values)] for section, name, values in differences(runs)]
    places = [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]
    note = f"the first difference: {rows[0][0]}, {rows[0][1]}" if rows else "nothing that was recorded differs"
    return display.Table(columns=("section", "what", *places), rows=rows, title="What differs", note=note)


def _text(value: Any) -> str:
    return value[:60] if isinstance(value, str) else short(value)
