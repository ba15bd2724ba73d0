"""Remedy: one change of the step, with its predicted gain, how it was predicted, and what it costs.

`from_arm`, `from_formula` and `ceiling` make a Remedy of the three kinds of prediction; `apply_remedy` changes a RunSpec as a Remedy says.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass, OrInf
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.costs import Costs, saved_by
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.step_model import KNOBS as PREDICTED
from workbench.diagnosis.analysis.step_model import StepModel
from workbench.diagnosis.analysis.verdict import Judgement
from workbench.runs.spec import IMPLEMENTATIONS, KNOBS, RunSpec, ScriptSpec, Spec, check_names, parse_knob
from workbench.timeline.script_arguments import OF_DDP, OF_LOADER, OF_OPTIMIZER

OF_LAUNCH = ("threads", "nproc_per_node")
OUTSIDE = (*OF_LAUNCH, *OF_LOADER, *OF_OPTIMIZER, *OF_DDP)
"""Knobs of a script that can be set without an edit."""
NOT_PREDICTED = "not predicted"
SCOPES = {"cause": "", "part": "Another part: ", "general": "Whatever the cause: "}
"""Scope of a remedy → how its advice begins. "cause": it removes what the verdict names; "part": another part of the step; "general": it
shortens any step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(JsonDataclass):
    """A change and its predicted gain. Gains of several remedies do not multiply: they may remove the same waiting."""

    name: str
    """Short, and unique in a diagnosis: "num_workers=2"."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Knobs to turn: fields of RunSpec, and `optimizer` ("fused", "foreach"), `channels_last`, `gc`; empty = a change of the program."""
    what: str
    """What to do, in a sentence."""
    speedup: OrInf
    """Predicted throughput in samples over that of now."""
    low: OrInf
    """The same, at least."""
    high: OrInf
    """The same, at most; inf = only a lower bound is known."""
    formula: str
    """How the prediction was computed, with its inputs."""
    costs: str = ""
    """What it costs: memory, accuracy, convenience; empty = nothing that is known."""
    ceiling: bool = False
    """True: no more than this, since what replaces the removed part is taken to cost nothing."""
    most: OrInf = math.inf
    """What the cores allow at most, even on an idle machine: `high` is never more. inf = no such limit is known."""
    scope: str = "cause"
    """One of SCOPES: whether it removes what the verdict names."""
    vague: bool = False
    """True: it says what kind of work to look for, but no module, function or knob to change."""

    @property
    def interval(self) -> Interval:
        """Predicted speedup with its interval."""
        return Interval(low=self.low, mid=self.speedup, high=self.high)

    @property
    def predicted(self) -> bool:
        """Is anything known of its gain before it is tried?"""
        return self.low > 0 or math.isfinite(self.high)

    @property
    def provable(self) -> bool:
        """Can it be tried by changing knobs?"""
        return bool(self.change)

    @property
    def advice(self) -> str:
        """What to do, with a prefix unless it removes what the verdict names."""
        return f"{SCOPES[self.scope]}{self.what}"

    @property
    def gain(self) -> str:
        """The prediction as text: "1.62× (1.51× … 1.70×)", with a mark where it may not help; of a ceiling, as if the part cost nothing,
        "up to 1.62×"; without an upper end "1.62× (at least 1.51×)"; "not predicted" where nothing is known.
        """
        if self.ceiling:
            return f"up to {units.times(self.speedup)}"
        if not self.predicted:
            return NOT_PREDICTED
        if math.isinf(self.high):
            return f"{units.times(self.speedup)} (at least {units.times(self.low)})"
        doubt = "; may not help" if self.low < 1 else ""
        return f"{units.times(self.speedup)} ({units.times(self.low)} … {units.times(self.high)}{doubt})"

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.gain}",
            self.advice,
            f"Predicted from: {self.formula}.",
            f"It costs: {self.costs or 'nothing we know of'}.",
        ]
        return "\n".join(lines)


def of_knobs(model: StepModel, change: Mapping[str, Any]) -> Remedy:
    """A change that somebody asks about; where no experiment tried it, nothing is known of its gain before the proof.

    Raises:
        SpecError: no such knob.
    """
    check_names(RunSpec, change)
    name = ", ".join(f"{knob}={value}" for knob, value in change.items())
    predicted = PREDICTED if not model.evidence.observed else OF_LOADER[:3] if model.feeding else ()
    known = all(knob in predicted and knob != "deterministic" for knob in change) and not model.untried(change)
    gain = model.with_cores(**change) if known else Interval(low=0.0, mid=1.0, high=math.inf)
    formula = "the model of the step" if known else "nothing: no experiment has tried it"
    return Remedy(
        name=name,
        change=dict(change),
        what=f"Set {name}.",
        speedup=gain.mid,
        low=gain.low,
        high=gain.high,
        most=model.most_of_workers(**change) if known else math.inf,
        formula=formula,
        scope="general",
    )


Choice = Remedy | Mapping[str, Any] | int | str | None
"""How a user names a remedy; None = the best that can be proved."""


def find_remedy(
    remedies: Sequence[Remedy], which: Choice, *, of_knobs: Callable[[Mapping[str, Any]], Remedy], nothing: Callable[[str], str], whose: str
) -> Remedy:
    """One of some remedies: the best that can be proved (None), by its number from 1, by its name, or itself; or knobs with values, as a
    mapping or a text such as "num_workers=2".

    Args:
        remedies: the best first.
        which: what the user gave.
        of_knobs: knobs with values → a remedy.
        nothing: names and numbers of all → why none of them can be proved.
        whose: "this diagnosis has".

    Raises:
        ValueError: there is none, or none of that name or number.
    """
    if isinstance(which, Remedy):
        return which
    if isinstance(which, Mapping):
        return of_knobs(which)
    names = ", ".join(f"{i} ({remedy.name})" for i, remedy in enumerate(remedies, 1)) or "none"
    matching = [remedy for i, remedy in enumerate(remedies, 1) if (remedy.provable if which is None else which in (i, remedy.name))]
    if not matching and isinstance(which, str) and "=" in which:
        return of_knobs(dict(parse_knob(word) for word in which.replace(",", " ").split()))
    if not matching:
        raise ValueError(f"there is nothing to prove: {nothing(names)}" if which is None else f"no remedy {which!r}: {whose} {names}")
    return matching[0]


def gain_of(remedy: Remedy) -> float:
    """The predicted speedup by which remedies are compared. A ceiling counts half of its gain if `LEFT_SHARE` of the part is left, since
    what replaces the part is not free.
    """
    if not remedy.ceiling:
        return remedy.speedup
    left = LEFT_SHARE + (1 - LEFT_SHARE) / remedy.speedup
    return 1 + (1 / left - 1) / 2


LEFT_SHARE = 0.1
"""Fraction of a removed part that may remain. Chosen. With half or twice as much, a ceiling of 10× counts as 3.9× or 2.3× in the order of
remedies, instead of 3.1×."""


def sort_key(remedy: Remedy) -> tuple[bool, bool, float]:
    """Sort key of remedies: first those that remove what the verdict names, and of these that name what to change; then by gain, the
    largest first.
    """
    return remedy.scope != "cause", remedy.vague, -gain_of(remedy)


def surest_first(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Sorted remedies; a general one that is predicted to gain more than the first of the cause, and that is surer, goes before it.

    It is no larger batch, which changes what is trained.
    """
    general = (other for other in remedies[1:] if other.scope == "general" and not other.name.startswith("micro_batch="))
    more, best = max(general, key=gain_of, default=None), next(iter(remedies), None)
    if best is None or more is None or best.scope == "general" or gain_of(more) <= gain_of(best):
        return tuple(remedies)
    if more.low > gain_of(best) or best.low <= 1 < more.low:
        return (more, *(remedy for remedy in remedies if remedy is not more))
    return tuple(remedies)


MIN_SPEEDUP = 1.03
"""Smaller gains are not offered. Measured: two runs of one setting differ as much. With half or twice as much, more or fewer small remedies
are listed last."""
MIN_BATCH_SPEEDUP = 1.15
"""A larger batch changes what is trained, so it has to gain more. Chosen. It decides whether the remedy is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a remedy may be derived from."""

    evidence: Evidence
    judgement: Judgement
    model: StepModel
    spec: Spec | None = None
    outside: bool = False
    """Can the spec's script be launched with other arguments?"""

    @property
    def costs(self) -> Costs:
        return self.model.costs

    def turnable(self, change: Mapping[str, Any]) -> Mapping[str, Any]:
        """The change, if all of it can be applied from here; else nothing, and people have to make it."""
        if isinstance(self.spec, ScriptSpec):
            return dict(change) if self.outside and set(change) <= {*OUTSIDE} else {}
        if isinstance(self.spec, RunSpec):
            known = set(KNOBS)
        else:
            loading = self.evidence.loading
            places = ("loader", "step") if loading and loading.kind == "DataLoader" else ("step",)
            known = {name for name, about in KNOBS.items() if about.turned_in in places}
        return dict(change) if set(change) <= known else {}


def if_worthwhile(remedy: Remedy, least: float = MIN_SPEEDUP) -> Remedy | None:
    """The remedy, if its predicted gain is large enough."""
    return remedy if remedy.speedup >= least else None


SHORTEST_STEP = 0.02
"""Fraction of the step. A gain that may leave less of it has no upper bound: the noise of the measurement is larger than that. Chosen at
the noise of a long measurement; it decides whether a range ends at 50× or is open."""


def beside_loader(case: Case, speedup: Interval, saved: float) -> Interval:
    """The range of a measured change of training, widened by the uncertain time that the loader adds, which the change does not shorten.

    The full step is measured. If the loader takes d seconds more of it, training takes d seconds less, and the change saves less of them.

    Args:
        case: the step.
        speedup: put into the full step, with the uncertainty of the change alone.
        saved: fraction of training that the change saves.
    """
    if not speedup.mid > 0 or saved <= 0:
        return speedup
    data, after = case.costs.data, case.costs.step / speedup.mid
    longer, shorter = saved * (data.high - data.mid), saved * (data.mid - data.low)
    shortest = after - math.hypot(after - case.costs.step / max(speedup.high, speedup.mid), shorter)
    longest = after + math.hypot(case.costs.step / max(speedup.low, 1e-9) - after, longer)
    high = case.costs.step / shortest if shortest > SHORTEST_STEP * case.costs.step else math.inf
    return Interval(low=case.costs.step / longest, mid=speedup.mid, high=high)


def from_arm(case: Case, arm: str, change: Mapping[str, Any], what: str, costs: str) -> Remedy | None:
    """A remedy that an experiment tried: what its variant saved, put into the full step."""
    e, model = case.evidence, case.model
    if arm not in e.arms:
        return None
    seconds = saved_by(e, e.arms[arm], case.costs.replayed)
    if "optimizer" in change and case.costs.optimizer.high > 0:  # what it takes is all that another implementation can save
        whole = case.costs.optimizer
        seconds = Interval(low=min(seconds.low, whole.mid), mid=min(seconds.mid, whole.mid), high=min(seconds.high, whole.high))
    speedup = model.without(seconds.mid, **change)
    tried = Interval(low=model.without(seconds.low, **change), mid=speedup, high=model.without(seconds.high, **change))
    span = beside_loader(case, tried, seconds.mid / max(case.costs.replayed, 1e-12))
    remedy = Remedy(
        name=units.knobs(change),
        change=case.turnable(change),
        what=what,
        speedup=speedup,
        low=span.low,
        high=span.high,
        formula=f"measured: it saves {units.percent(e.arms[arm].saved.mid)} of the step without its loader; put into the full step",
        costs=costs,
    )
    return if_worthwhile(remedy) if tried.low >= 1.0 else None


def from_formula(
    case: Case,
    name: str,
    change: Mapping[str, Any],
    what: str,
    speedup: float,
    errors: tuple[float, float],
    formula: str,
    costs: str = "",
    least: float = MIN_SPEEDUP,
    most: float = math.inf,
) -> Remedy | None:
    """A remedy that a formula predicts.

    Args:
        errors: how far measurements lie from the prediction, as factors of the step: (0.95, 1.1) = 5 % less to 10 % more.
        least: speedup from which on it is offered.
        most: what the cores allow at most.
    """
    faster, slower = errors
    remedy = Remedy(
        name=name,
        change=case.turnable(change),
        what=what,
        speedup=speedup,
        low=speedup / slower,
        high=min(most, speedup / faster),
        most=most,
        formula=formula,
        costs=costs,
    )
    return if_worthwhile(remedy, least)


def ceiling(
    case: Case, name: str, what: str, saved: float | Interval, formula: str, costs: str = "", change: Mapping[str, Any] | None = None
) -> Remedy | None:
    """A remedy whose gain is at most that of removing a part, a fraction `saved` of the step: what replaces it is taken to be free."""
    most = saved.mid if isinstance(saved, Interval) else saved
    top = saved.high if isinstance(saved, Interval) else saved
    if most <= 0:
        return None
    speedup = 1 / max(1e-3, 1 - most)
    remedy = Remedy(
        name=name,
        change=case.turnable(change or {}),
        what=what,
        speedup=speedup,
        low=1.0,
        high=1 / max(1e-3, 1 - min(0.999, top)),
        formula=f"ceiling: {formula}",
        costs=costs,
        ceiling=True,
    )
    return if_worthwhile(remedy)


def apply_remedy(spec: RunSpec, remedy: Remedy) -> RunSpec:
    """The spec with a remedy's knobs turned, and those that depend on them: without workers nothing is prefetched.

    Raises:
        SpecError: a knob that a spec does not have, or a value it does not take.
    """
    change = dict(remedy.change)
    check_names(RunSpec, change)
    if change.get("num_workers") == 0:
        change = {"prefetch_factor": None, "persistent_workers": False} | change
    if spec.optimizer and spec.optimizer not in IMPLEMENTATIONS and change.get("optimizer") in IMPLEMENTATIONS:
        change["optimizer"] = _implemented(spec.optimizer, change["optimizer"])
    return spec.replace(**change)


def _implemented(optimizer: str, how: str) -> str:
    """An optimizer's name and options, with its implementation among them.

    >>> _implemented("adamw(betas=(0.9, 0.95), foreach=True)", "fused")
    'adamw(betas=(0.9, 0.95), fused=True)'
    """
    node = ast.parse(optimizer.strip(), mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    options = [option for option in call.keywords if option.arg not in IMPLEMENTATIONS]
    return ast.unparse(ast.Call(func=call.func, args=call.args, keywords=[*options, ast.keyword(how, ast.Constant(True))]))
