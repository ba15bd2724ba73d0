"""LrFound: what sweeps of several seeds suggest, how far they agree, and which candidate won a short race."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.batch.analysis.lr_range import RULES, LrSweep, suggestions
from workbench.core.codec import JsonDataclass, OrInf
from workbench.core.display import table as display

NEAR = 0.9
"""A candidate whose loss fell at least so much of what the winner's fell is as good: `low` and `high` are the outermost of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSays:
    """One rule's suggestion over several seeds."""

    rule: str
    """Of `lr_range.RULES`."""
    lr: float | None
    """Median over the seeds; None = no seed told."""
    low: float | None = None
    """Smallest."""
    high: float | None = None
    """Largest."""
    seeds: int = 0
    """Of how many seeds."""

    @property
    def spread(self) -> float | None:
        """Largest over smallest."""
        return None if self.low is None or self.high is None else self.high / self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A learning rate in the race."""

    lr: float
    """Constant through it."""
    name: str
    """Where it comes from."""
    scores: tuple[OrInf, ...] = ()
    """Of each round the mean loss over the second half of its steps; infinite = it diverged. In a round all see equal batches."""

    def mean(self, rounds: int) -> float:
        """Mean score of the first rounds."""
        return statistics.fmean(self.scores[:rounds]) if self.scores else math.inf


def says(sweeps: Sequence[LrSweep]) -> tuple[RuleSays, ...]:
    """What each rule suggests: the median over the sweeps, in logarithms, and its range."""
    found = [suggestions(sweep) for sweep in sweeps]
    out = []
    for rule in RULES:
        known = sorted(lr for one in found if (lr := one[rule]) is not None)
        if not known:
            out.append(RuleSays(rule=rule, lr=None))
            continue
        middle = math.exp(statistics.median(map(math.log, known)))
        out.append(RuleSays(rule=rule, lr=middle, low=known[0], high=known[-1], seeds=len(known)))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LrFound(JsonDataclass):
    """A learning rate, and what speaks for it."""

    lr: float | None
    """The one to take; None = cannot tell, and `why` says why."""
    low: float | None = None
    """Smallest candidate that did about as well (see NEAR); without a race the smallest that the rule said."""
    high: float | None = None
    """Largest."""
    verified: bool = False
    """Was it chosen by a race? Else it is only what a rule suggests."""
    why: str = ""
    """How it was chosen, or why none was."""
    race_steps: int = 0
    """Of one round."""
    batch: int | None = None
    """Samples per step over all ranks, where they could be told: the learning rate is one for this batch."""
    steps: int = 0
    """Taken for all of it."""
    start: float = math.nan
    """Loss before."""
    suggestions: tuple[RuleSays, ...] = ()
    """Of each rule."""
    race: tuple[Candidate, ...] = ()
    """All candidates, by learning rate."""
    sweeps: tuple[LrSweep, ...] = ()
    """One per seed."""
    notes: tuple[str, ...] = ()
    """What a reader should know."""

    def changes(self) -> dict[str, float]:
        """The knob of a RunSpec, so that `spec.replace(**found.changes())` trains with it; empty where none was found."""
        return {} if self.lr is None else {"lr": self.lr}

    @property
    def summary(self) -> str:
        """One line."""
        if self.lr is None:
            return f"no learning rate: {self.why}"
        span = f" ({figure(self.low)} … {figure(self.high)})" if self.low is not None else ""
        return f"learning rate {figure(self.lr)}{span}: {self.why}"

    @property
    def table(self) -> display.Table:
        """What each rule suggests."""
        rows = [
            [one.rule, figure(one.lr), figure(one.low), figure(one.high), "–" if one.spread is None else f"{one.spread:.3g}×"]
            for one in self.suggestions
        ]
        return display.Table(
            columns=("rule", "suggests", "low", "high", "spread"),
            rows=rows,
            title=self.summary,
            note="\n".join([f"median and range over {len(self.sweeps)} seeds", *([] if self.race else self.notes)]),
        )

    @property
    def race_table(self) -> display.Table | None:
        """The candidates, in the order of their learning rates; None without a race."""
        if not self.race:
            return None
        rows = [
            [figure(one.lr), one.name, *(_score(one.scores[i]) if i < len(one.scores) else "–" for i in range(self._rounds))]
            for one in self.race
        ]
        return display.Table(
            columns=("learning rate", "from", *(f"loss, round {i + 1}" for i in range(self._rounds))),
            rows=rows,
            title=f"Race over {self.race_steps} steps, from a loss of {self.start:.3g}",
            note="\n".join(["mean loss of the second half; equal batches within a round", *self.notes]),
        )

    @property
    def _rounds(self) -> int:
        return max((len(one.scores) for one in self.race), default=0)

    def to_frame(self) -> Any:
        """A DataFrame with one row per rule, and one per candidate of the race."""
        rules = [{"kind": "rule", "name": one.rule, "lr": one.lr, "low": one.low, "high": one.high} for one in self.suggestions]
        race = [{"kind": "race", "name": one.name, "lr": one.lr, "loss": one.mean(len(one.scores))} for one in self.race]
        return display.frame([*rules, *race], columns=("kind", "name", "lr", "low", "high", "loss"))

    plot = display.plot_method("lr_range")

    def __repr__(self) -> str:
        return f"LrFound({figure(self.lr)}{'' if self.verified or self.lr is None else ', not verified'})"

    def __str__(self) -> str:
        return "\n\n".join(str(table) for table in (self.table, self.race_table) if table)

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in (self.table, self.race_table) if table)


def figure(lr: float | None) -> str:
    """A learning rate as text.

    >>> figure(0.10337), figure(3.1e-6), figure(None)
    ('0.103', '3.1e-06', '–')
    """
    return "–" if lr is None else f"{lr:.3g}"


def _score(loss: float) -> str:
    return f"{loss:.4g}" if math.isfinite(loss) else "diverged"
