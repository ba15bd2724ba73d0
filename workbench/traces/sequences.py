"""Sequences: what comes after what again and again, on a device or among the operators of a CPU, and what lies between."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.traces.ops import SHOWN, short

LEAST = 2
"""Times that a sequence has to occur."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One sequence of names, wherever it occurs."""

    names: tuple[str, ...]
    """In the order of their beginnings."""
    count: int
    seconds: float
    """Of the kernels or operators themselves, in all occurrences."""
    gaps: float
    """Seconds between them in which none of them runs: what starting them as one saves at most."""
    host_seconds: float | None
    """Of the host: of the operators whose sequence it is, or of the calls that launch it; None on a CPU, where that is `seconds`."""
    share: float
    """Fraction 0..1 of the time of all kernels (operators) that were looked at."""

    @property
    def ceiling(self) -> float:
        """Fraction 0..1 of its time that its gaps are."""
        return self.gaps / (self.seconds + self.gaps) if self.seconds + self.gaps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences(display.Shown, JsonDataclass):
    """Frequent sequences, those that take longest first. Get them from `trace.sequences()`.

    Gaps are a ceiling of what launching a sequence as one (a CUDA graph, `torch.compile`) saves, not a forecast: some are there because the
    host is late. Fused kernels save more than gaps, since what one writes the next need not read; how much, no trace tells.
    """

    rows: tuple[Pattern, ...]
    operator: str | None
    """Whose sequences they are; None: of consecutive ones, wherever they come from."""
    device: str
    """Of what: "device" or "cpu"."""
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> display.Table:
        """The first 15."""
        what = "kernels" if self.device == "device" else "operators"
        rows = [
            [
                " › ".join(brief(name) for name in folded(one.names)),
                f"{one.count:,}",
                units.seconds(one.seconds),
                units.percent(one.share),
                units.seconds(one.gaps),
                *([units.seconds(one.host_seconds)] if self.device == "device" else []),
            ]
            for one in self.rows[:SHOWN]
        ]
        title = f"{what.capitalize()} in sequence{f' of {self.operator}' if self.operator else ''}"
        more = [f"{len(self.rows) - SHOWN} more in to_frame()"] if len(self.rows) > SHOWN else []
        columns = (what, "times", "time", "share", "gaps between", *(["on the host"] if self.device == "device" else []))
        return display.Table(columns=columns, rows=rows, title=title, note="; ".join([*more, *self.notes]) or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row per sequence; seconds."""
        rows = [{**dataclasses.asdict(one), "names": " › ".join(one.names), "ceiling": one.ceiling} for one in self.rows]
        return display.frame(rows, columns=[*(field.name for field in dataclasses.fields(Pattern)), "ceiling"])

    plot = display.plot_method("sequences")

    def __repr__(self) -> str:
        return f"Sequences({len(self.rows)} of {self.operator or 'consecutive ones'})"


def brief(name: str) -> str:
    """The part of a name that tells most: no types of templates, no arguments, no namespaces."""
    times, _, rest = name.partition(" × ")
    if rest and times.isdigit():
        return f"{times} × {brief(rest)}"
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    outer, _, inner = plain.partition("<")
    if outer.endswith("::Kernel") and inner:  # CUTLASS: what it is says its first argument
        outer = inner
    outer = re.split(r"[<(>,]", outer)[0]
    return short(outer.rpartition("::")[2] or outer)


def folded(names: Sequence[str]) -> list[str]:
    """With a number before what comes several times in a row."""
    found: list[tuple[int, str]] = []
    for name in names:
        if found and found[-1][1] == name:
            found[-1] = (found[-1][0] + 1, name)
        else:
            found.append((1, name))
    return [name if times == 1 else f"{times} × {name}" for times, name in found]
