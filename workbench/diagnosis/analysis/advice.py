"""Says what to do next about a step: which remedy to try first, what it is predicted to gain, or what to find out before."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core import units
from workbench.core.package import near
from workbench.core.system_load import default_threads
from workbench.diagnosis.analysis.costs import Costs, capped, is_crowded, noise_warnings, saved_by
from workbench.diagnosis.analysis.evidence import Evidence, what_changes
from workbench.diagnosis.analysis.model_errors import kind_of, present_gap, surely_gains
from workbench.diagnosis.analysis.observed import fewer_threads
from workbench.diagnosis.analysis.remedy import Remedy, gain_of
from workbench.diagnosis.analysis.script_remedies import SETTINGS_OF, TRAINER_PAGE
from workbench.diagnosis.analysis.step_model import StepModel
from workbench.diagnosis.analysis.verdict import HIDDEN_REDUCTION, UNMARKED, Judgement
from workbench.harness.results import BUSY, NOT_FINITE, OTHERS, UNTRAINED
from workbench.runs.spec import RunSpec, ScriptSpec, Spec

EXPERIMENT = "wb.diagnose(step, loader) experiments, with the body of the loop as step(batch): docs, how-to/low-utilisation."
"""How to experiment with what was only observed."""
FIND_NAN = (
    "First find where the numbers become NaN or infinite: wb.sanity(step, loader), or of a task wb.sanity(task), looks at data and "
    "gradients; wb.replay(run) repeats the step of a run in which it began. Fix that, then diagnose again."
)
TO_COMPARE = (
    "To prove it, launch the training before and after the change, several times by turns, and compare all of the runs at once: "
    "`workbench compare A1 B1 A2 B2`, or wb.compare(a1, b1, a2, b2). It takes the launches of each together. On a busy machine two single "
    "launches differ by more than many changes gain."
)
"""How a change is proved that only the user can make."""
MIN_TRAINING = 0.25
"""Fraction of the step that training takes at the least for fewer threads to be named. Chosen: of less, they change little. It decides
whether a sentence is there."""
ONCE = (
    "Diagnose again with batches that can be read more than once, such as list(itertools.islice(batches, 64)), when the machine is quieter."
)
"""Where the loader was a generator."""
QUIETER = "Diagnose again when the machine is quieter."
MORE_STEPS = f"Record more steps, while the machine is quiet, or find out by experiment: {EXPERIMENT}"
TO_LEARN_MORE = {
    "too few measurements": "Diagnose again with a larger budget_s, for more measurements.",
    "not enough was tried": "Diagnose again with a larger budget_s.",
    UNMARKED: f"Let the loop be measured, for batch in wb.watch(batches, model=model): …, and diagnose it again. Or {EXPERIMENT} "
    "Where a function gives the batches: docs, how-to/training-loops.",
    HIDDEN_REDUCTION: f"Find out by experiment. {EXPERIMENT}",
}
"""Cause of an inconclusive verdict → what to do; the rest: QUIETER, and a larger budget only where it was used up."""
TRIED = "tried, but not clear whether it gains"
"""How a list of changes begins of which the measurements vary too much."""
MIN_UNCLEAR_GAIN = 0.1
"""Fraction of the step that a change may save at the least for it to be named where it is not clear whether it gains. Chosen: an interval
that ends below is narrow enough, and is measured no longer (`measure.trials.NARROW_FOR_REMEDY`). It decides what a note names."""
LEAST_OF_BEST = 0.3
"""A sure gain that is less than so much of the gain that is expected of the best remedy is not proved in its place: a proof says what the
noise leaves open. Chosen: 1.09× is not tried instead of an expected 1.9×, but instead of 1.2×. It decides what `prove()` runs."""
TRIED_CHANGES = {
    "precision": "",
    "optimizer": "",
    "threads": "",
    "tf32": "tf32=True",
    "channels_last": "channels_last=True",
    "no_gc": "gc=False",
}
"""Kind of a variant that is a change to make, not a part of the step that is left out → what `prove` calls it; "" = the variant's name."""


def unclear_changes(e: Evidence, c: Costs) -> dict[str, str]:
    """Changes that an experiment tried, and of which the measurements vary too much to tell whether they gain: what `prove` calls them → in
    words. Those that may gain most come first.
    """
    found: dict[str, tuple[float, str]] = {}
    for name, arm in e.arms.items():
        kind = name.partition("=")[0]
        if kind not in TRIED_CHANGES:
            continue
        saved = c.share(saved_by(e, arm, c.replayed))
        if kind == "optimizer" and c.optimizer.high > 0:  # no other implementation saves more than all of it
            saved = capped(saved, c.share(c.optimizer).mid)
        if saved.low < 0 and saved.high >= MIN_UNCLEAR_GAIN:
            found[TRIED_CHANGES[kind] or name] = saved.mid, what_changes(name)
    return {change: words for change, (_, words) in sorted(found.items(), key=lambda item: -item[1][0])}


def busy_words(e: Evidence) -> list[str]:
    """How other processes may have spoiled the measurements, in words; of what was only observed also by the notes of its run."""
    return noise_warnings(e) or ([f"{note[0].upper()}{note[1:]}." for note in busy_notes(e)] if e.observed else [])


def busy_notes(e: Evidence) -> list[str]:
    """The notes of a run on what other processes took."""
    return [note for note in e.notes if note.startswith(BUSY) or OTHERS in note]


def script_command(verb: str, spec: ScriptSpec, *options: str, threads: int) -> str:
    """A shell's command that diagnoses or launches a script as it was launched, but for the number of threads.

    >>> script_command("diagnose", ScriptSpec(script="train.py", args=["--lr", "0.1"]), threads=2)
    'workbench diagnose train.py --set threads=2 -- --lr 0.1'
    """
    words = ["workbench", verb, near(spec.script), *options]
    words += ["--nproc-per-node", str(spec.nproc_per_node)] if spec.nproc_per_node > 1 else []
    words += ["--set", f"threads={threads}"] if threads > 1 else []
    return shlex.join([*words, *(["--", *spec.args] if spec.args else [])])


def void_notes(e: Evidence) -> list[str]:
    """The notes that put all the rest in doubt, whatever is the fastest."""
    return [note for note in e.notes if NOT_FINITE in note or UNTRAINED in note]


def surer_remedy(remedies: Sequence[Remedy]) -> Remedy | None:
    """The general remedy that the list begins with, before those of the cause; see `surest_first`."""
    first, *others = remedies or (None,)
    return first if first and first.scope == "general" and any(other.scope == "cause" for other in others) else None


def loader_misfit(model: StepModel) -> str:
    """That the loader's formula does not give the step as it is, in words; "" = it does."""
    if not present_gap(model):
        return ""
    c = model.costs
    measured, predicted = (units.seconds(c.cached + c.data.mid - less) for less in (0.0, model.unexplained))
    return f"the step as it is was measured at {measured}, and the formula of the loader gives {predicted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do next, from evidence, judgement and remedies."""

    evidence: Evidence
    judgement: Judgement
    remedies: Sequence[Remedy]
    """The best first."""
    model: StepModel
    spec: Spec | None = None
    """What was diagnosed, if it was a spec or a run."""
    names_gain: bool = True
    """Does the text say what the recommended remedy is predicted to gain? False = that stands beside it."""

    @property
    def text(self) -> str:
        """What to try first, and what it is predicted to gain; where numbers are NaN or infinite, to find out why."""
        return f"{self._first} {self._fewer_threads or self._threads_alone}".strip()

    @property
    def unclear(self) -> dict[str, str]:
        """What an experiment tried without it getting clear whether it gains; see `unclear_changes`."""
        return {} if self.evidence.observed else unclear_changes(self.evidence, self.model.costs)

    @property
    def note(self) -> list[str]:
        """A note on these."""
        return [f"{TRIED}: {', '.join(self.unclear.values())}"] if self.unclear else []

    @property
    def _fewer_threads(self) -> str:
        """On a busy CPU, to try one thread per operator where no experiment had time to; "" = no, or the loop waits for something else."""
        training = self.model.costs.cached / self.model.costs.step
        if self.evidence.observed and self.judgement.verdict in ("input-bound", "transfer-bound", "straggler"):
            return ""
        return fewer_threads(self.evidence) if self.evidence.observed or training >= MIN_TRAINING else ""

    @property
    def _threads_alone(self) -> str:
        """Of a script that the workbench started with another number of threads than python gives it: which, and how to compare the two."""
        e, alone = self.evidence, default_threads()
        if not e.observed or not isinstance(self.spec, ScriptSpec) or e.device != "cpu" or e.world_size > 1 or e.threads >= alone:
            return ""
        if self.judgement.verdict in ("input-bound", "transfer-bound") or any(
            remedy.name.startswith("threads=") for remedy in self.remedies
        ):
            return ""
        here = units.several(e.threads, "thread")
        busy = f" Beside other processes fewer are often faster: torch.set_num_threads({e.threads}) keeps them." if busy_words(e) else ""
        return (
            f"Without the workbench, your script uses {alone} threads per operator, unless it sets them; here it ran with {here}.{busy} "
            f"`{script_command('diagnose', self.spec, threads=alone)}` shows its step with {alone}."
        )

    @property
    def recommended(self) -> Remedy | None:
        """The remedy that `text` says to try first; None = it says to try none, or only that a gain is within the noise."""
        void = any(NOT_FINITE in note for note in void_notes(self.evidence))
        if void or self.judgement.verdict == "inconclusive" or not self.remedies:
            return None
        first = surer_remedy(self.remedies)
        return None if self._within_noise(self.remedies[1 if first else 0]) else first or self.remedies[0]

    def _within_noise(self, best: Remedy) -> bool:
        return bool(busy_words(self.evidence) or self._misfit(best)) and not surely_gains(best, is_crowded(self.evidence))

    @property
    def _first(self) -> str:
        if any(NOT_FINITE in note for note in void_notes(self.evidence)):
            return FIND_NAN
        if self.judgement.verdict == "inconclusive":
            unsure = self.evidence.observed and self.judgement.cause in ("noise", "too few measurements")
            once = self.evidence.loading is not None and self.evidence.loading.kind == "once"
            usual = TO_LEARN_MORE.get(self.judgement.cause, ONCE if once else f"{QUIETER} {self._larger_budget}".strip())
            enough = self._larger_budget if self.judgement.cause == "not enough was tried" else ""
            return self._sure_before + (self._more_steps if unsure else enough or usual)
        if not self.remedies:
            return self._without_remedies
        first = surer_remedy(self.remedies)
        best, *others = self.remedies[1:] if first else self.remedies
        if self._within_noise(best):
            return self._when_quiet(best)
        costs = f" It costs: {best.costs}." if best.costs else ""
        how = f" {EXPERIMENT}" if self.evidence.observed and "by experiment" in best.advice else ""
        costs += "" if how or best.provable else f" {TO_COMPARE}"
        if first:
            price = f" It costs: {first.costs}." if first.costs else ""
            return (
                f"First try {first.name}: it is predicted to gain {first.gain} whatever the cause. {first.what}{price} "
                f"Then: {best.advice}{how} Predicted: {best.gain}.{costs}"
            )
        more = max(others, key=gain_of, default=best)
        also = f" Whatever the cause: {more.name}, {more.gain}." if more.scope == "general" and gain_of(more) > gain_of(best) else ""
        predicted = f" Predicted: {best.gain}." if self.names_gain else ""
        return f"{best.advice}{how}{predicted}{costs}{also}"

    @property
    def _without_remedies(self) -> str:
        """What to do where nothing is predicted to gain: to try what was not tried, or not long enough."""
        more = self._larger_budget
        if first := next(iter(self.unclear), ""):
            listed = f"{TRIED.capitalize()}: {', '.join(self.unclear.values())}."
            return f"{listed} {more or QUIETER} prove({first!r}) tries one of them, for as long as you say."
        if more:
            return more
        if self.judgement.verdict != "compute-bound":
            return "There is no remedy here whose gain could be predicted."
        if self.evidence.observed:
            how = "wb.diagnose(run.spec) experiments." if isinstance(self.spec, RunSpec) else EXPERIMENT
            if self.evidence.places.get("framework") in SETTINGS_OF:
                how = f"wb.diagnose(step, loader) experiments. How to give it the step and loader of a Trainer: docs, {TRAINER_PAGE}."
            return "" if self._fewer_threads else f"It computes, and nothing was tried to make it faster: {how}"
        return "Nothing we know of would make this step faster here: it computes. More or faster devices would."

    @property
    def _larger_budget(self) -> str:
        """Which budget would do for what was left out; "" where nothing was."""
        e = self.evidence
        return f"Diagnose again with budget_s={e.enough}: {e.shortage}." if e.enough else ""

    @property
    def _more_steps(self) -> str:
        """What to do where too little was observed."""
        return MORE_STEPS + f" Of a Trainer: docs, {TRAINER_PAGE}." * (self.evidence.places.get("framework") in SETTINGS_OF)

    @property
    def sure_gain(self) -> Remedy | None:
        """Where the gain of the best remedy is within the noise: the one with the largest gain beyond it; None = there is none that is
        expected to gain at least `LEAST_OF_BEST` of what the best one is.
        """
        if self.judgement.verdict == "inconclusive" or not self.remedies or not self._within_noise(self.remedies[0]):
            return None
        crowded = is_crowded(self.evidence)
        sure = max((other for other in self.remedies if surely_gains(other, crowded)), key=gain_of, default=None)
        return sure if sure and gain_of(sure) - 1 >= LEAST_OF_BEST * (gain_of(self.remedies[0]) - 1) else None

    def _when_quiet(self, best: Remedy) -> str:
        """What to do where the gain of the best remedy is within the noise of a busy machine."""
        sure = self.sure_gain
        also = f" Whatever the cause, this gain is beyond the noise: {sure.name}, {sure.gain}." if sure else ""
        again = self._more_steps if self.evidence.observed else f"{QUIETER} {self._larger_budget}".strip()
        if misfit := self._misfit(best):
            return f"What {best.name} gains is not known, predicted are {best.gain}: {misfit}.{also} {again}"
        tries = f" prove({best.name!r}) tries it now." if best.provable and not self.evidence.observed else ""
        return f"What {best.name} is predicted to gain, {best.gain}, is within the noise.{tries}{also} {again}"

    @property
    def sure_whatever(self) -> Remedy | None:
        """Of an inconclusive verdict: what gained most of the changes that an experiment tried and that surely gain; None = none."""
        tried = self.judgement.verdict == "inconclusive" and self.judgement.cause != UNMARKED
        return next((remedy for remedy in self.remedies if remedy.provable and remedy.low > 1), None) if tried else None

    @property
    def _sure_before(self) -> str:
        """That change, as a sentence before another."""
        if (sure := self.sure_whatever) is None:
            return ""
        return f"First {sure.name}, which gains whatever the cause, {sure.gain}: {sure.what} prove() tries it. Then: "

    def _misfit(self, best: Remedy) -> str:
        """`loader_misfit`, if the remedy is one of the loader's."""
        return loader_misfit(self.model) if kind_of(best.name) == "loader" else ""
