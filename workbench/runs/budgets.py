"""Checks a run against budgets: limits of its step, throughput, memory, waiting and loss, alone or beside another run; for a user's CI."""

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.core import units
from workbench.core.checks import did_you_mean
from workbench.core.codec import to_json
from workbench.core.display import table as display
from workbench.core.synonyms import accept_synonyms
from workbench.core.vocabulary import PHASES
from workbench.runs.compare import differing_sections, provenance, without_steps
from workbench.runs.run import ACTIVE, Run
from workbench.runs.spec import ScriptSpec

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BYTES = {"B": 1.0, "kB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30, "TB": 1e12, "TiB": 2**40}
_UNITS = {"": 1.0, "%": 0.01, **_SECONDS, **_BYTES}
_LIMIT = re.compile(r"\s*(?P<sign>[+-]?)\s*(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?)\s*(?P<unit>\S*)\s*", re.IGNORECASE)
_TIME, _MEMORY, _SHARE = tuple(_SECONDS), tuple(_BYTES), ("%", "")


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What a budget can limit."""

    read: Callable[[Run], float]
    """Its value in a run; nan = it was not measured."""
    units: tuple[str, ...]
    """The units in which a limit of its own is given; one relative to another run is in percent."""
    example: str
    text: Callable[[float | None], str]
    most: bool = True
    """Is the limit the most that is allowed, or the least?"""


def _slowest(run: Run) -> float:
    return max((rank.mean() for rank in run.rank_means if rank.count), default=math.nan)


def _peak(run: Run) -> float:
    return float(max((peak for peak in run.memory if peak is not None), default=math.nan))


def _share(phase: str) -> _Quantity:
    def read(run: Run) -> float:
        return max((rank.share(phase) for rank in run.rank_means if rank.count), default=math.nan)

    return _Quantity(read, _SHARE, '"5 %"', units.percent)


def _loss(run: Run) -> float:
    return next((float(row["loss"]) for row in reversed(run.metric_rows) if row.get("loss") is not None), math.nan)


def _number(value: float | None) -> str:
    return units.MISSING if value is None or math.isnan(value) else f"{value:.4g}"


QUANTITIES: Mapping[str, _Quantity] = {
    "step": _Quantity(_slowest, _TIME, '"120 ms"', units.seconds),
    "samples_per_sec": _Quantity(lambda run: run.samples_per_sec, ("",), "900", units.rate, most=False),
    "peak_memory": _Quantity(_peak, _MEMORY, '"38 GiB"', units.bytes_),
    "loss": _Quantity(_loss, ("",), "2.5", _number),
    **{phase: _share(phase) for phase in PHASES},
}
"""Name in a budget → what it limits: the mean step of the slowest rank, throughput of all ranks, peak memory of the fullest rank, the last
loss, and the share of the step that a phase takes on the rank where it takes most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit, and what was measured."""

    name: str
    """One of QUANTITIES."""
    given: str
    """The limit as it was given: "38 GiB", "+5 %"."""
    limit: float
    """The limit in seconds, bytes, samples per second or as a fraction; nan if the other run did not measure it."""
    measured: float
    """The run's value; nan if it was not measured."""

    @property
    def state(self) -> Literal["met", "exceeded", "not measured"]:
        """Is the limit met?"""
        if math.isnan(self.measured) or math.isnan(self.limit):
            return "not measured"
        met = self.measured <= self.limit if QUANTITIES[self.name].most else self.measured >= self.limit
        return "met" if met else "exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck(display.Shown):
    """A run checked against budgets."""

    run: Run
    """The run."""
    against: Run | None
    """The run that relative limits refer to."""
    budgets: tuple[Budget, ...]
    """The limits, in the order in which they were given."""

    @property
    def ok(self) -> bool:
        """Whether the run finished without an error and every limit is met. A limit on something that was not measured is not met."""
        return self.run.ok and all(budget.state == "met" for budget in self.budgets)

    @property
    def differences(self) -> str:
        """The knobs in which the two runs differ, such as "micro_batch=16 beside 32"; empty = none, or there is no other run."""
        if self.against is None:
            return ""
        mine, other = self.run.spec.to_json(), self.against.spec.to_json()
        changed = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
        return ", ".join(f"{name}={mine.get(name)} beside {other.get(name)}" for name in changed)

    @property
    def table(self) -> display.Table:
        """One row per limit."""
        rows = []
        for budget in self.budgets:
            text = QUANTITIES[budget.name].text
            limit = f"{budget.given} = {text(budget.limit)}" if budget.given.strip()[0] in "+-" else budget.given
            rows.append([budget.name, text(budget.measured), limit, budget.state])
        failed = [] if self.run.ok else [f"the run is {self.run.state}, not finished"]
        for run, lacking in ((self.run, "measured"), (self.against, "limit")):
            missing = [budget.name for budget in self.budgets if math.isnan(getattr(budget, lacking))]
            if run is not None and missing:
                why = "" if any(rank.count for rank in run.rank_means) else f": it has no measured step; {without_steps(run)}"
                if "loss" in missing and not why and isinstance(run.spec, ScriptSpec):
                    why = "; the loss of a script is not recorded: a limit on it is for tasks"
                which = "the run" if run is self.run else "the run to compare with"
                failed.append(f"{which}, {run.name}, has no {', '.join(missing)}{why}")
        names = {budget.name for budget in self.budgets}
        what = ["step: the mean of the slowest rank after its warm-up"] if "step" in names else []
        if "peak_memory" in names and provenance(self.run)["environment"].get("device") == "cpu":
            what.append(
                "peak_memory: the resident memory of the process, Python and libraries included, since it had no GPU; "
                "estimate_memory counts tensors alone"
            )
        beside = [] if self.against is None else [f"beside {self.against.name}: on a shared machine identical runs differ by 10 % or more"]
        recorded = differing_sections((self.against, self.run)) if self.against else []
        if apart := [*filter(None, [self.differences]), *recorded]:
            beside.append(f"the two differ in {', '.join(apart)}: a limit may be met or exceeded because of that")
        return display.Table(
            columns=("", "measured", "limit", ""),
            rows=rows,
            title=f"{self.run.name}: {'all limits are met' if self.ok else 'not all limits are met'}",
            note=display.notes([*what, *failed, *beside]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per limit."""
        return display.frame([{"name": b.name, "measured": b.measured, "limit": b.limit, "state": b.state} for b in self.budgets])

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; None = not measured."""
        rows = [
            {"name": b.name, "measured": to_json(b.measured), "limit": to_json(b.limit), "given": b.given, "state": b.state}
            for b in self.budgets
        ]
        return {"run": str(self.run.path), "state": self.run.state, "ok": self.ok, "budgets": rows, "differences": self.differences}

    def __repr__(self) -> str:
        return f"RunCheck({self.run.name!r}, ok={self.ok})"


@accept_synonyms
def check_run(
    run: Run | str | os.PathLike[str],
    budgets: Mapping[str, str | float] | str | os.PathLike[str],
    *,
    against: Run | str | os.PathLike[str] | None = None,
) -> RunCheck:
    """Check a finished run against budgets.

    Args:
        run: the run, or its directory.
        budgets: limits by name, or the path of a TOML file with them: "step" (mean step of the slowest rank: "120 ms"), "samples_per_sec"
            (a minimum: 900), "peak_memory" (of the fullest rank: "38 GiB"), "loss" (the last: 2.5), and "data_wait" or another phase (its
            share of the step: "5 %"). All but shares may be relative to `against`: "+5 %", or "-5 %" for samples_per_sec.
        against: the run, or its directory, to which relative limits refer.

    Raises:
        ValueError: no such limit, a limit that cannot be read, a relative limit without `against`, or a run that still runs.
        OSError: the file cannot be read.
    """
    run, against = _run(run), None if against is None else _run(against)
    limits = _read(budgets) if isinstance(budgets, str | os.PathLike) else budgets
    if not limits:
        raise ValueError(f"check_run: no budgets were given; allowed are {', '.join(QUANTITIES)}")
    return RunCheck(run=run, against=against, budgets=tuple(_budget(name, given, run, against) for name, given in limits.items()))


def _run(given: Run | str | os.PathLike[str]) -> Run:
    run = given if isinstance(given, Run) else Run.load(given)
    if run.state in ACTIVE:
        raise ValueError(f"{run!r} still runs: wait for it, run.wait()")
    return run


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The limits in a TOML file: its table `budgets`, or all of it."""
    try:
        values = tomllib.loads(Path(path).expanduser().read_text())
    except FileNotFoundError:
        raise ValueError(f'{os.fspath(path)} does not exist; expected a TOML file with lines such as step = "120 ms"') from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'{os.fspath(path)} is not TOML ({error}); expected lines such as step = "120 ms"') from None
    inner = values.get("budgets", values)
    return inner if isinstance(inner, dict) else {"budgets": inner}


def read_limit(name: str, given: object) -> tuple[float, bool]:
    """A limit, and whether it is relative.

    >>> read_limit("step", "120 ms"), read_limit("step", "+5 %"), read_limit("data_wait", "5 %")
    ((0.12, False), (1.05, True), (0.05, False))

    Returns:
        Seconds, bytes, samples per second or a fraction; or the factor of another run's value.

    Raises:
        ValueError: there is no such limit, or it cannot be read.
    """
    quantity = QUANTITIES.get(name)
    if quantity is None:
        raise ValueError(f"no budget {name!r}: {did_you_mean(name, QUANTITIES)}there are {', '.join(QUANTITIES)}")
    match = None if isinstance(given, bool) else _LIMIT.fullmatch(str(given))
    if match and match["sign"] and match["unit"] == "%":
        return 1 + float(f"{match['sign']}{match['number']}") / 100, True
    if match and not match["sign"] and match["unit"] in quantity.units:
        return float(match["number"]) * _UNITS[match["unit"]], False
    also = f', or "{"+" if quantity.most else "-"}5 %" of another run'
    raise ValueError(f"{name} = {given!r}: expected a limit such as {quantity.example}{also}")


def _budget(name: str, given: object, run: Run, against: Run | None) -> Budget:
    limit, relative = read_limit(name, given)
    read = QUANTITIES[name].read
    if relative:
        if against is None:
            raise ValueError(f"{name} = {given!r} is relative to another run: give it, check_run(run, budgets, against=…) or --against")
        other = read(against)
        limit = other + (limit - 1) * abs(other)  # a loss may be negative
    return Budget(name=name, given=str(given), limit=limit, measured=read(run))
