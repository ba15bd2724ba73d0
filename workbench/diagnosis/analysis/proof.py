"""Proof: a remedy that was run, predicted against measured. Ladder: the throughput after one proved remedy on top of another."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass, fields_to_json
from workbench.core.display import table as display
from workbench.core.package import near
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.remedy import NOT_PREDICTED, Remedy

MAX_ERROR = 0.25
"""A prediction this far off did not hold: the choice of a remedy could have been another one. Chosen. It decides a word in the text of a
proof."""
UNCLEAR = "not clear whether it helps"
"""How the word of a proof begins whose range has both a gain and none."""
NOTHING = "nothing to prove"
"""Name of the remedy of a proof that tried none."""
LITTLE_OF_CEILING = 0.25
"""A change that saved less than so much of what its ceiling named did not do its work. Chosen. It decides a word in the text of a proof."""
MIN_GAIN = 1.02
"""Least speedup that counts as a gain: below it, drift between neighbouring blocks looks the same. Chosen at the width of a proof's
interval. It decides a word in the text of a proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(display.Shown, JsonDataclass):
    """A remedy's prediction and the measured speedup, interleaved with the baseline."""

    remedy: Remedy
    """The remedy that was tried, with its prediction."""
    measured: Interval
    """Throughput in samples with the remedy over that without."""
    baseline: float = math.nan
    """Samples per second without it (steps per second where the samples of a batch are not known)."""
    notes: tuple[str, ...] = ()
    """Notes on the measurement."""
    choice: str = ""
    """Why this remedy was tried and not the first of the diagnosis; stands before the table. Empty = it is the first, or was asked for."""

    @classmethod
    def nothing(cls, why: str) -> "Proof":
        """What `prove()` gives if there is nothing to prove, with the reason: no speedup is known, and nothing gained."""
        remedy = Remedy(name=NOTHING, what=why, speedup=1.0, low=0.0, high=math.inf, formula=NOT_PREDICTED)
        return cls(remedy=remedy, measured=Interval(low=math.nan, mid=math.nan, high=math.nan), choice=f"{why[0].upper()}{why[1:]}")

    @property
    def predicted(self) -> Interval:
        """The remedy's speedup with its interval; nan where nothing was predicted."""
        return self.remedy.interval if self.remedy.predicted else Interval(low=math.nan, mid=math.nan, high=math.nan)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: 0.1 = the prediction was 10 % too high; nan where nothing was predicted."""
        return self.predicted.mid / self.measured.mid - 1

    @property
    def gained(self) -> bool:
        """Whether the step is faster beyond doubt."""
        return self.measured.low > 1 and self.measured.mid >= MIN_GAIN

    @property
    def held(self) -> bool:
        """Whether the prediction was right: the gain is there, and differs from the prediction by at most MAX_ERROR.

        A ceiling holds if it was not exceeded, a lower bound ("at least") if it was reached.
        """
        if self.remedy.ceiling:
            fair = self.measured.low <= self.remedy.high
        elif math.isinf(self.remedy.high) and self.remedy.predicted:
            fair = self.measured.high >= self.remedy.low
        else:
            fair = abs(self.error) <= MAX_ERROR
        return self.gained and fair

    @property
    def summary(self) -> str:
        """One line: what was predicted, what was measured, and whether they agree."""
        predicted = f"predicted {units.times(self.remedy.speedup)} ({between(self.predicted)})" if self.remedy.predicted else NOT_PREDICTED
        return f"{self.remedy.name}: {predicted}, measured {units.times(self.measured.mid)} ({between(self.measured)}): {self.word}"

    @property
    def word(self) -> str:
        """How the proof went, in words."""
        if math.isnan(self.measured.mid):
            return NOTHING if self.remedy.name == NOTHING else "it could not be run"
        if math.isinf(self.measured.low):
            return f"{UNCLEAR}: one pair has no range; give the proof a larger budget_s (--budget)"
        if not self.gained and self.measured.high > MIN_GAIN:
            return f"{UNCLEAR}: the measured range includes no gain"
        if not self.gained:
            return "it did not help"
        if not self.remedy.predicted:
            return "it helps"
        error = f"the prediction was {units.percent(abs(self.error))} too {'high' if self.error > 0 else 'low'}"
        if self.remedy.ceiling and (1 - 1 / self.measured.mid) < LITTLE_OF_CEILING * (1 - 1 / self.remedy.speedup):
            return "it helps a little, far below the predicted ceiling"
        if self.remedy.ceiling:
            return f"it helps; {'within the predicted ceiling' if self.held else 'more than the predicted ceiling'}"
        if math.isinf(self.remedy.high):
            return f"it helps; {'at least as much as predicted' if self.held else 'less than predicted'}"
        return f"it helps; {error}"

    @property
    def table(self) -> display.Table:
        """Two rows: predicted, measured."""
        predicted = self.predicted.cells(units.times) if self.remedy.predicted else [NOT_PREDICTED, units.MISSING, units.MISSING]
        return display.Table(
            columns=("", "speedup", "low", "high"),
            rows=[["predicted", *predicted], ["measured", *self.measured.cells(units.times)]],
            title=f"Proof of {self.remedy.name}",
            note=display.notes([self.word, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return display.frame([proof_row(self)])

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [self.choice, "" if self.remedy.name == NOTHING else str(self.table)]))

    def _repr_html_(self) -> str:
        table = "" if self.remedy.name == NOTHING else self.table._repr_html_()
        return (f"<p>{display.escape(self.choice)}</p>" if self.choice else "") + table

    plot = display.plot_method("proof")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**fields_to_json(self), "measured": self.measured.to_list()}

    def __repr__(self) -> str:
        return f"Proof({self.remedy.name!r}, predicted={units.times(self.predicted.mid)}, measured={units.times(self.measured.mid)})"


def proof_row(proof: Proof) -> dict[str, object]:
    """A proof as plain columns."""
    return {
        "remedy": proof.remedy.name,
        "predicted": proof.predicted.mid,
        "predicted_low": proof.predicted.low,
        "predicted_high": proof.predicted.high,
        "measured": proof.measured.mid,
        "measured_low": proof.measured.low,
        "measured_high": proof.measured.high,
        "error": proof.error,
        "gained": proof.gained,
        "held": proof.held,
    }


def remedy_table(remedies: Sequence[Remedy], proofs: Sequence[Proof], note: str) -> display.Table:
    """One row per remedy, with what its last proof measured."""
    rows = []
    for i, remedy in enumerate(remedies, 1):
        proved = [proof for proof in proofs if proof.remedy.name == remedy.name]
        measured = units.times(proved[-1].measured.mid) if proved else ("not yet" if remedy.provable else units.MISSING)
        rows.append([i, remedy.name, remedy.gain, measured, remedy.advice])
    return display.Table(columns=("", "remedy", "predicted", "measured", "what to do"), rows=rows, title="What would help", note=note)


def between(interval: Interval) -> str:
    """The ends of a speedup as text."""
    if math.isinf(interval.low):
        return "one pair: no range"
    if math.isinf(interval.high):
        return f"at least {units.times(interval.low)}"
    return f"{units.times(interval.low)} … {units.times(interval.high)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung(JsonDataclass):
    """One entry of a Ladder: what limited the step, what was tried, and the result."""

    verdict: str
    """Before the attempt."""
    cause: str
    """The cause under it."""
    proof: Proof
    """The remedy that was tried."""
    samples_per_sec: float
    """After it (as before, where it was dropped); steps per second where samples are not known."""

    @property
    def kept(self) -> bool:
        """Did the remedy help? Otherwise it is dropped, and the next is tried without it."""
        return self.proof.gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder(display.Shown, JsonDataclass):
    """Throughput after each proved remedy, from the start of the climb until no remedy with a sufficient predicted gain is left."""

    start: float
    """Samples per second before the first remedy."""
    rungs: tuple[Rung, ...] = ()
    """Every attempt, those that were dropped included."""
    verdict: str = "compute-bound"
    """At the end."""
    cause: str = "compute"
    """The cause at the end."""
    changes: Mapping[str, Any] | None = None
    """All knobs that were turned and kept; None = nothing was."""
    stopped: str = ""
    """Why the climb ended there."""

    @property
    def kept(self) -> tuple[Rung, ...]:
        """The attempts that helped."""
        return tuple(rung for rung in self.rungs if rung.kept)

    @property
    def speedup(self) -> float:
        """Throughput at the end over that at the start: the product of the measured speedups, each against its own baseline."""
        return math.prod(rung.proof.measured.mid for rung in self.kept)

    @property
    def samples_per_sec(self) -> float:
        """At the end."""
        return self.kept[-1].samples_per_sec if self.kept else self.start

    @property
    def table(self) -> display.Table:
        """One row per attempt, the start first."""
        rows: list[list[object]] = [["start", units.MISSING, units.MISSING, units.rate(self.start), "–"]]
        for rung in self.rungs:
            proof = rung.proof
            rows.append(
                [
                    proof.remedy.name,
                    units.times(proof.predicted.mid),
                    units.times(proof.measured.mid),
                    units.rate(rung.samples_per_sec) if rung.kept else units.MISSING,
                    f"{rung.verdict} ({rung.cause})" + ("" if rung.kept else f": {proof.word.partition(':')[0]}, and was dropped"),
                ]
            )
        note = f"measured rung by rung, each beside its own baseline: {units.times(self.speedup)} in all; now {self.verdict} ({self.cause})"
        return display.Table(
            columns=("remedy", "predicted", "measured", "throughput", "against"),
            rows=rows,
            title="The ladder",
            note=f"{note}; {self.stopped}" if self.stopped else note,
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per attempt: predicted and measured speedup, throughput after it."""
        return display.frame(
            [
                {**proof_row(r.proof), "kept": r.kept, "verdict": r.verdict, "cause": r.cause, "samples_per_sec": r.samples_per_sec}
                for r in self.rungs
            ]
        )

    plot = display.plot_method("ladder")

    def __repr__(self) -> str:
        return f"Ladder({len(self.rungs)} rungs)"


def how_to_prove(script: str) -> str:
    """How a change of a script can be tried, of which a run is there."""
    path = near(script)
    return (
        f"the run of a script is only observed. workbench diagnose {shlex.quote(path)} --prove launches the script, with and without a "
        "change that can be made from outside. To try others, put its model, dataset, loss and optimizer into a function that returns a "
        f"wb.Task, such as build() in the same file; then: workbench diagnose {shlex.quote(f'{path}:build')} --prove"
    )
