"""Promises: from a change of the step to a Remedy with its predicted gain; and what can be turned, and where."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench import units
from workbench.diagnosis.costs import Costs, saved_by
from workbench.diagnosis.evidence import Evidence
from workbench.diagnosis.judgement import Judgement
from workbench.diagnosis.model import StepModel
from workbench.diagnosis.remedy import Remedy
from workbench.spec import KNOBS, RunSpec, ScriptSpec, Spec
from workbench.statistics import Interval

WORTH = 1.03
"""Smaller gains are not offered: two runs of one setting differ as much."""
WORTH_A_BATCH = 1.15
"""A larger batch changes what is trained, so it has to gain more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a remedy may be derived from."""

    evidence: Evidence
    judgement: Judgement
    model: StepModel
    spec: Spec | None = None

    @property
    def costs(self) -> Costs:
        return self.model.costs

    def turnable(self, change: Mapping[str, Any]) -> Mapping[str, Any]:
        """The change, if all of it can be turned from here; else nothing, and the remedy is for people."""
        if isinstance(self.spec, ScriptSpec):
            return {}
        if isinstance(self.spec, RunSpec):
            known = set(KNOBS)
        else:
            loading = self.evidence.loading
            places = ("loader", "step") if loading and loading.kind == "DataLoader" else ("step",)
            known = {name for name, about in KNOBS.items() if about.turned_in in places}
        return dict(change) if set(change) <= known else {}


def worth(remedy: Remedy, least: float = WORTH) -> bool:
    """Is it predicted to help, and not only perhaps?"""
    return remedy.speedup >= least and remedy.low >= 1.0


def tried(case: Case, arm: str, change: Mapping[str, Any], what: str, costs: str) -> Remedy | None:
    """A change that an experiment made itself: its saving, put into the full step."""
    e, model = case.evidence, case.model
    if arm not in e.arms:
        return None
    seconds = saved_by(e, e.arms[arm], case.costs.replayed)
    remedy = Remedy(
        name=", ".join(f"{name}={value}" for name, value in change.items()),
        change=case.turnable(change),
        what=what,
        speedup=model.without(seconds.mid, **change),
        low=model.without(seconds.low, **change),
        high=model.without(seconds.high, **change),
        formula=f"measured: it saves {units.percent(e.arms[arm].saved.mid)} of the step without its loader; put into the full step",
        costs=costs,
    )
    return remedy if worth(remedy) else None


def predicted(
    case: Case, name: str, change: Mapping[str, Any], what: str, speedup: float, errors: tuple[float, float], formula: str, costs: str = ""
) -> Remedy:
    """A formula's prediction; `errors` = how far measurements lie from it, as factors of the step: (0.95, 1.1) = 5 % less to 10 % more."""
    faster, slower = errors
    return Remedy(
        name=name,
        change=case.turnable(change),
        what=what,
        speedup=speedup,
        low=max(min(1.0, speedup), speedup / slower),
        high=speedup / faster,
        formula=formula,
        costs=costs,
    )


def ceiling(
    case: Case,
    name: str,
    what: str,
    saved: float | Interval,
    formula: str,
    costs: str = "",
    change: Mapping[str, Any] | None = None,
) -> Remedy | None:
    """What the removal of a part would gain, whatever replaces it taken to be free.

    Args:
        case: the step.
        name: of the remedy.
        what: to do.
        saved: fraction of the step.
        formula: what is removed.
        costs: of the remedy.
        change: knobs, where there are any.
    """
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
    return remedy if worth(remedy) else None
