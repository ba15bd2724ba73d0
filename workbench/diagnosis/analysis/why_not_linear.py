"""WhyNotLinear: why N ranks give less than N times one, what would narrow the gap, what more ranks would bring, and what a sample costs."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workbench.core import late, units
from workbench.core.brief import fitted, number, short, three
from workbench.core.checks import real_number
from workbench.core.codec import NOT_STORED, JsonDataclass
from workbench.core.display import table as display
from workbench.core.package import near
from workbench.core.synonyms import accept_synonyms
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap import DISTURBED, OTHERS, REDUCTION, SAME, UNEXPLAINED, Gap, gap_of
from workbench.diagnosis.analysis.gap_evidence import GapEvidence
from workbench.diagnosis.analysis.gap_forecast import predict_gap
from workbench.diagnosis.analysis.gap_remedies import remedies_for_gap
from workbench.diagnosis.analysis.proof import Proof, remedy_table
from workbench.diagnosis.analysis.remedy import Choice, Remedy, find_remedy
from workbench.runs.spec import RunSpec, ScriptSpec, Spec
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveForecast
from workbench.scaling.analysis.curve.point import CurveError, ScalingPoint

HOURS = 3600
BUCKETS = {
    "first": ("first gradient", "of a step, before which nothing can be sent"),
    "exposed": ("after the last gradient", "of reduction, which no backward hides"),
    "last": ("last bucket", "by itself, with as many bytes as a bucket has on average"),
}
"""What is known of the buckets → its row under the reduction."""
CLOSE = 0.95
"""Efficiency above which scaling is called close to linear. Chosen: the parts that are named cost as much."""
APART = (
    "the two predictions differ: the first keeps what ranks lose by sharing a machine as it was measured, the curve lets all losses grow "
    "with each rank. Believe the first for further machines like this one, the curve for more ranks on this one; wb.scaling_curve measures"
)
FEW = (2, 4, 8)
"""Numbers of ranks that are predicted where one process was measured."""


@dataclass(kw_only=True, eq=False)
class WhyNotLinear(JsonDataclass):
    """The gap between N times one rank and N ranks, in parts that add up. `why_not_linear` returns it."""

    evidence: GapEvidence
    """What was measured."""
    spec: Spec | None = None
    """What was measured, if it was a spec or a script."""
    same: str = "micro_batch"
    """With what one process is compared, for verdict and remedies: one of SAME."""
    ranks: int = 0
    """Ranks that are asked about where one process was measured; 0 = those that were measured."""
    link: Gradients | None = None
    """What a reduction between two ranks is taken to cost: where it was not measured, or over another link than that of here."""
    subject: Any = field(default=None, metadata=NOT_STORED)
    """What `prove` needs to launch."""
    proofs: list[Proof] = field(default_factory=list)
    """What `prove` showed so far."""

    # --- the gap

    @property
    def world_size(self) -> int:
        """The number of ranks that is explained."""
        return self.ranks or self.evidence.world_size

    @cached_property
    def gap(self) -> Gap:
        """The gap at the same micro-batch, or global batch, as `same` says."""
        return self.gap_at(self.same)

    @cached_property
    def _measured(self) -> Gap:
        return gap_of(self.evidence)

    def gap_at(self, same: str) -> Gap:
        """The gap at "micro_batch" or at "global_batch".

        Raises:
            ValueError: another value.
        """
        if self.evidence.world_size == 1 or self.world_size > self.evidence.world_size or self.link is not None:
            return predict_gap(self.evidence, self.world_size, same=same, link=self.link)
        return gap_of(self.evidence, same)

    @property
    def cause(self) -> str:
        """The largest part of the gap that is certain; "" = scaling is close to linear, or no part stands out."""
        return self.gap.cause

    @property
    def headline(self) -> str:
        """The cause, preceded by other processes if they take more; without a cause: those, close to linear, or no single cause."""
        if self.cause:
            return f"{DISTURBED}, and {self.cause}" if self.gap.by_others > self.gap[self.cause].mid else self.cause
        if self.efficiency > CLOSE or self.gap.few_rare:
            return "not clear" if self.gap.few_rare else "close to linear"
        return DISTURBED if self.gap.by_others > self.gap.seconds / 2 else "no single cause"

    @property
    def in_doubt(self) -> bool:
        """Whether scaling is not known to be close to linear, and no part of the gap is certain."""
        return not self.cause and (self.efficiency <= CLOSE or bool(self.gap.few_rare))

    @property
    def efficiency(self) -> float:
        """Throughput over that of N times one rank."""
        return self.gap.efficiency

    @property
    def residual(self) -> float:
        """The fraction of the gap that is not explained."""
        return self.gap.residual

    @property
    def samples(self) -> float:
        """Samples in a step of all ranks; steps of ranks if their samples are not known."""
        return (self.evidence.samples or self.evidence.world_size) / self.evidence.world_size * self.world_size

    @property
    def unit(self) -> str:
        """What is counted: "samples", or "steps" of a rank if the samples of a batch are not known."""
        return "samples" if self.evidence.samples else "steps"

    def at(self, ranks: int) -> "WhyNotLinear":
        """The predicted answer for more ranks than were measured.

        Raises:
            ValueError: fewer ranks than were measured.
        """
        if ranks != self.evidence.world_size:
            predict_gap(self.evidence, ranks, same=self.same, link=self.link)  # raises where it cannot be predicted
        return WhyNotLinear(evidence=self.evidence, spec=self.spec, same=self.same, ranks=ranks, link=self.link, subject=self.subject)

    # --- words

    @property
    def why(self) -> str:
        """The reason, with its numbers."""
        gap, n = self.gap, self.world_size
        what = "would give" if gap.predicted else "give"
        head = (
            f"{n} ranks {what} {units.rate(self.samples / gap.step.mid, self.unit)}: {units.percent(gap.efficiency)} of {n} × one "
            f"({units.rate(self.samples / gap.linear.mid, self.unit)})."
        )
        if self.headline == DISTURBED:
            lost, whole = gap.cost(OTHERS, self.samples), self.samples / gap.linear.mid - self.samples / gap.step.mid
            taken = f"{units.rate(lost, self.unit)} of the {units.rate(whole, self.unit)} lost"
            return f"{head} {DISTURBED.capitalize()} take {taken}; that is no property of the training."
        if not self.cause:
            close = "Scaling is close to linear" if gap.efficiency > CLOSE else "No part of the gap stands out"
            return f"{head} {gap.few_rare or close}."
        if self.cause == UNEXPLAINED:
            return f"{head} No experiment accounts for most of the gap ({units.seconds(gap[UNEXPLAINED].mid)} per step)."
        parts = "; ".join(gap.named_in_words[:3])
        return f"{head} {parts[:1].upper()}{parts[1:]}.{self._details()}"

    def _details(self) -> str:
        e = self.evidence
        if self.cause in ("slow rank", "uneven data"):
            return f" It is rank {e.slowest}."
        if self.cause not in REDUCTION or e.gradients is None or not self.buckets:
            return ""
        g, buckets = e.gradients, self.buckets
        return (
            f" {units.bytes_(g.size)} in {units.several(g.buckets, 'reduction')}: nothing can be sent in the first "
            f"{units.seconds(buckets['first'])} of a step; after the last gradient {units.seconds(buckets['exposed'])} are left "
            f"(the last bucket alone takes {units.seconds(buckets['last'])})."
        )

    @property
    def buckets(self) -> dict[str, float]:
        """Seconds from the start of a step to the "first" gradient, of the "exposed" reduction after the last gradient, and of the "last"
        bucket by itself at the mean bucket size; empty if they were not measured or the gap is predicted.
        """
        tail, g = self.evidence.tail, self.evidence.gradients
        if tail is None or g is None or self.gap.predicted:
            return {}
        return {"first": tail.first, "exposed": tail.exposed, "last": g.latency + g.size / max(1, g.buckets) * g.per_byte}

    @property
    def next(self) -> str:
        """What to try first."""
        if self.evidence.script and self.cause in ("waits and reduction", UNEXPLAINED):
            return "Make the script a task and ask again: a task's reduction can be left out, which tells it from waits for each other."
        if self.in_doubt and (self.evidence.disturbed or not self.remedies):
            if self.headline == DISTURBED:
                return "Ask again on a machine that does nothing else."
            quiet = "on a machine that does nothing else: no part of the gap is beyond doubt"
            return f"Ask again with a larger budget_s, {'to see more of the rare long steps' if self.gap.few_rare else quiet}."
        if not self.remedies:
            return "There is no remedy here whose gain could be predicted." if self.cause else "Nothing: more ranks pay off here."
        best = self.remedies[0]
        costs = f" It costs: {best.costs}." if best.costs else ""
        return f"{best.advice} Predicted: {best.gain}.{costs}"

    @property
    def summary(self) -> str:
        """Cause, why, next."""
        return f"{self.headline}{' (predicted)' if self.gap.predicted else ''}\nWhy: {self.why}\nNext: {self.next}"

    # --- remedies

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """What would narrow the gap, first what removes its largest part. Their gains do not multiply."""
        return remedies_for_gap(self.evidence, self.gap, self.spec)

    def remedy(self, which: Choice = None) -> Remedy:
        """One of the remedies: the best that can be proved (None), by its number in the table (from 1), by its name, or itself.

        Raises:
            ValueError: there is no remedy, or none with that name or number.
        """

        def nothing(names: str) -> str:
            return f"the cause is {self.cause or 'none'}, its remedies are {names}. {self.next}"

        return find_remedy(self.remedies, which, of_knobs=_of_knobs, nothing=nothing, whose="here are")

    @accept_synonyms
    def prove(self, which: Choice = None, *, budget_s: float = 60.0) -> Proof:
        """Run a remedy, interleaved with the unchanged spec, on all its ranks; the proof is kept in `proofs`.

        For a script, launches with and without the remedy take turns. Without editing it, these can be changed: threads, nproc_per_node,
        the loaders' num_workers, prefetch_factor, persistent_workers and pin_memory, optimizer="fused" or "foreach", and DDP's
        bucket_cap_mb. For any other change, the error says where to make it.

        Args:
            which: a remedy, its number in the table or its name; or knobs with values; None = the best that can be proved.
            budget_s: seconds that it may take.

        Returns:
            The proof; without `which`, and if there is nothing to prove, one that says why, whose `gained` is False.

        Raises:
            ValueError: no such remedy, or it cannot be applied from here.
            RunError: one of the two launches failed.
        """
        try:
            remedy = self.remedy(which)
        except ValueError as nothing:
            if which is None:
                return Proof.nothing(str(nothing))
            raise
        if isinstance(self.spec, ScriptSpec):
            step, options = self._measured.step.mid, {"budget_s": budget_s, "runs_dir": self.subject}
            proof: Proof = late.load("prove_script")(self.spec, remedy, self.evidence, step=step, **options)
            self.proofs.append(proof)
            return proof
        if not remedy.provable or not isinstance(self.spec, RunSpec):
            raise ValueError(f"{remedy.name} cannot be changed from here: {remedy.what} Then ask again")
        proof = late.load("prove_spec")(self.spec, remedy, budget_s=budget_s, runs_dir=self.subject)
        self.proofs.append(proof)
        return proof

    # --- more ranks, and what they cost

    @cached_property
    def curve(self) -> ScalingCurve:
        """One rank and all, as a curve; its `fit()` predicts more, beside the linear extrapolation."""
        e = self.evidence
        each = self.samples / self.world_size
        points = [ScalingPoint(world_size=1, rates=_rates(e, "one", each), of_one_spec=True)]
        if e.world_size > 1:
            rates = _rates(e, "all", each * e.world_size)
            points.append(ScalingPoint(world_size=e.world_size, rates=rates, oversubscribed=e.crowded, of_one_spec=True))
        return ScalingCurve(points, unit=self.unit, notes=e.notes)

    def forecast(self, ranks: int) -> CurveForecast | None:
        """What the fitted curve predicts; None if it cannot be fitted, for example with more ranks than cores."""
        try:
            return self.curve.fit().predict(ranks)
        except CurveError:
            return None

    def worth(self, ranks: Sequence[int] | None = None, *, price_per_hour: float | None = None) -> display.Table:
        """Whether more ranks are worth it: throughput and cost per sample against the number of ranks.

        Args:
            ranks: numbers of ranks to list; None = one, the measured number, and twice and four times as many.
            price_per_hour: price of one rank's device, in any currency; None = costs relative to one rank's.

        Raises:
            ValueError: a price that is not above 0, or numbers of ranks that are not whole numbers of at least 1.
        """
        if price_per_hour is not None:
            real_number("price_per_hour", price_per_hour, above=0, what="money per hour of one device")
        e = self.evidence
        sizes = sorted({1, e.world_size, *(FEW if e.world_size == 1 else (2 * e.world_size, 4 * e.world_size))} if ranks is None else ranks)
        one = self._rate(1)[0]
        rows, last, apart = list[list[object]](), (1, one), False
        for size in sizes:
            rate, low, high, kind = self._rate(size)
            cost = size * one / rate
            money = f"{price_per_hour * size / HOURS / rate * 1e6:.4g}" if price_per_hour else units.times(cost)
            fit = self.forecast(size) if size > e.world_size else None
            added = (rate - last[1]) / (max(1, size - last[0]) * one)
            way = "brings" if added >= 0 else "costs"
            rows.append(
                [
                    size,
                    units.rate(rate, self.unit),
                    f"{units.rate(low, self.unit)} … {units.rate(high, self.unit)}",
                    units.times(rate / one),
                    money,
                    units.rate(fit.mid, self.unit) if fit else units.MISSING,
                    f"{kind}; each added rank {way} {units.percent(abs(added))} of what one gives" if size > last[0] else kind,
                ]
            )
            apart = apart or (fit is not None and not low <= fit.mid <= high)
            last = (size, rate)
        price = f"a million {self.unit} cost" if price_per_hour else "a sample costs"
        return display.Table(
            columns=("ranks", "throughput", "interval", "speedup", price, "by the fitted curve", ""),
            rows=rows,
            title="Is it worth it?",
            note=display.notes(
                [
                    "what is measured is of this machine; predicted: reductions by the ring's formula, waits by the measured steps, "
                    "and beside it the curve that is fitted to the measured points",
                    *([APART] if apart else []),
                    *([self._elsewhere] if self._exceeds(max(sizes)) else []),
                ]
            ),
        )

    def _rate(self, size: int) -> tuple[float, float, float, str]:
        e, each = self.evidence, self.samples / self.world_size
        if size in (1, e.world_size):
            step = self._measured.linear if size == 1 else self._measured.step
            return each * size / step.mid, each * size / step.high, each * size / step.low, "measured"
        if size > e.world_size:
            step = self.at(size).gap.step
            kind = f"predicted, on machines with {self._share} for each rank" if self._exceeds(size) else "predicted"
            return each * size / step.mid, each * size / step.high, each * size / step.low, kind
        step = self.gap.step.of(lambda seconds: self.gap.linear.mid + (seconds - self.gap.linear.mid) * (size - 1) / (e.world_size - 1))
        return each * size / step.mid, each * size / step.high, each * size / step.low, "between what was measured"

    def _exceeds(self, ranks: int) -> bool:
        """Are so many ranks predicted, and want more cores than this machine has?"""
        e = self.evidence
        wanted = ranks * (e.threads + e.num_workers)
        return e.device == "cpu" and e.cores is not None and e.world_size < ranks and wanted > e.cores + 0.5

    @property
    def _share(self) -> str:
        """Cores of a measured rank; of one alone, as many as it has threads and workers."""
        e = self.evidence
        each = (e.cores or 0.0) / e.world_size
        each = min(each, e.threads + e.num_workers) if e.world_size == 1 else each
        return f"{each:.3g} core{'s' * (each != 1)}"

    @property
    def _elsewhere(self) -> str:
        """What is taken of ranks for which this machine has too few cores."""
        return (
            f"ranks beyond this machine's {self.evidence.cores:.3g} cores are taken to be on others, with as many cores for each as here "
            f"({self._share}): on this machine they would share its cores and give less"
        )

    # --- how it shows itself

    @property
    def caption(self) -> str:
        """What the numbers are, and what to know of them."""
        e = self.evidence
        if self.gap.predicted:
            text = f"predicted from {units.several(e.world_size, 'rank')}"
        else:
            text = f"measured in {e.count} rounds of {len({block.arm for block in e.blocks})} experiments in {units.seconds(e.seconds)}"
        return display.notes([text, SAME[self.same], *([self._elsewhere] if self._exceeds(self.world_size) else []), *e.notes])

    @property
    def table(self) -> display.Table:
        """One row per part: seconds per step, and its cost in throughput; the first and last rows are N × one and what you get."""
        gap, n = self.gap, self.world_size
        rows: list[list[object]] = [
            [f"{n} × one", units.seconds(gap.linear.mid), units.MISSING, units.rate(self.samples / gap.linear.mid, self.unit), ""]
        ]
        for part in gap.parts:
            low, high = part.seconds.low, part.seconds.high
            lost = -gap.cost(part.cause, self.samples)
            rows.append(
                [
                    part.cause,
                    _signed(part.seconds.mid, units.seconds),
                    f"{_signed(low, units.seconds)} … {_signed(high, units.seconds)}",
                    _signed(lost, lambda value: units.rate(value, self.unit)),
                    part.words,
                ]
            )
            if part.cause == REDUCTION[-1]:
                rows += [[f"· {BUCKETS[name][0]}", units.seconds(s), "", "", BUCKETS[name][1]] for name, s in self.buckets.items()]
        rows.append(["what you get", units.seconds(gap.step.mid), units.MISSING, units.rate(self.samples / gap.step.mid, self.unit), ""])
        return display.Table(
            columns=("part", "per step", "90 % interval", "throughput", ""),
            rows=rows,
            title=f"From {n} × one to what {n} ranks {'would give' if gap.predicted else 'give'}",
            note=self.caption,
        )

    @property
    def remedy_table(self) -> display.Table:
        """One row per remedy, with its proof."""
        note = f"predicted throughput of {self.world_size} ranks over that of now, each alone: gains do not multiply"
        return remedy_table(self.remedies, self.proofs, note)

    @property
    def _tables(self) -> list[display.Table]:
        return [self.table, *([self.remedy_table] if self.remedies else []), self.worth()]

    def to_frame(self) -> Any:
        """A DataFrame with one row per part: seconds per step with their interval, and what it costs in throughput."""
        return display.frame(
            {
                "cause": part.cause,
                "seconds": part.seconds.mid,
                "low": part.seconds.low,
                "high": part.seconds.high,
                "share": part.seconds.mid / self.gap.step.mid,
                "lost": self.gap.cost(part.cause, self.samples),
                "predicted": part.predicted,
                "what": part.words,
            }
            for part in self.gap.parts
        )

    plot = display.plot_method("why_not_linear")

    def brief(self) -> dict[str, Any]:
        """The answer for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text."""
        gap = self.gap
        parts = {part.cause: three(part.seconds) for part in gap.parts if abs(gap.share(part.cause)) >= 0.005 or part.cause == UNEXPLAINED}
        remedies = [
            {"change": r.name, "speedup": three(r.interval), "at_most": r.ceiling, "provable": r.provable} for r in self.remedies[:4]
        ]
        value: dict[str, Any] = {
            "claim": {"cause": self.cause or None, "why": short(self.why)},
            "ranks": self.world_size,
            "kind": "predicted" if gap.predicted else "measured",
            "same": self.same,
            "efficiency": number(gap.efficiency),
            "linear_s": number(gap.linear.mid),
            "step_s": number(gap.step.mid),
            "parts_s": parts,
            **({"buckets_s": {name: number(seconds) for name, seconds in self.buckets.items()}} if self.buckets else {}),
            "residual": number(gap.residual),
            "predicted": remedies,
            "proved": [{"change": p.remedy.name, "measured": three(p.measured), "helps": p.gained} for p in self.proofs],
            "unknown": [short(note) for note in self.evidence.notes],
            "next": {"do": short(self.next), "command": self._command()},
        }
        return fitted(value, "unknown", "predicted", "proved", last="proved")

    def _command(self) -> str | None:
        if self.spec is None or not any(remedy.provable for remedy in self.remedies):
            return None
        if isinstance(self.spec, ScriptSpec):
            words = ["workbench", "why-not-linear", near(self.spec.script), "--nproc-per-node", str(self.spec.nproc_per_node), "--prove"]
            return None if self.spec.threads != 1 else shlex.join([*words, *(["--", *self.spec.args] if self.spec.args else [])])
        turned = [f"{name}={new}" for name, (_, new) in RunSpec(task=self.spec.task).changes(self.spec).items()]
        command = shlex.join(["workbench", "why-not-linear", self.spec.task, "--prove", *(["--set", *turned] if turned else [])])
        return command if len(command) <= 300 else None

    def __repr__(self) -> str:
        kind = "script" if isinstance(self.spec, ScriptSpec) else "spec"
        return f"WhyNotLinear({self.world_size} ranks of a {kind}, {units.percent(self.gap.efficiency)} of linear, cause={self.cause!r})"

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self._tables)])

    def _repr_html_(self) -> str:
        head = f"<p><strong>{display.escape(self.headline)}</strong></p><p>{display.escape(self.why)}</p>"
        return head + f"<p><strong>Next:</strong> {display.escape(self.next)}</p>" + "".join(t._repr_html_() for t in self._tables)


def _rates(e: GapEvidence, arm: str, samples: float) -> tuple[float, ...]:
    rates = [samples / block.whole for block in e.rounds(arm) if block.whole > 0]
    if not rates:
        return ()
    middle = statistics.median(rates)  # a burst of load in one round says nothing of scaling
    return tuple(rate for rate in rates if middle / 1.5 < rate < 1.5 * middle)


def _signed(value: float, show: Any) -> str:
    return f"{'–' if value < 0 else '+'}{show(abs(value))}"


def _of_knobs(knobs: Mapping[str, Any]) -> Remedy:
    """Knobs with values as a remedy of which nothing is predicted."""
    name = ", ".join(f"{knob}={value}" for knob, value in knobs.items())
    what, nothing = f"Set {name}.", "nothing"
    return Remedy(name=name, change=dict(knobs), what=what, speedup=1.0, low=0.0, high=math.inf, formula=nothing, scope="general")
