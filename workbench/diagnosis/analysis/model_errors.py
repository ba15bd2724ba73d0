"""Widens the range of a predicted gain by the error of its formula: how far proofs lay from predictions, beyond the measured noise.

`with_model_error` applies that error to a remedy; `fit_errors` of `tests/diagnosis/test_model_errors.py` determined it. `with_errors` adds
what one step shows: how equal blocks scatter on a busy machine, and how far the loader's formula is from the step as it is.
"""

import dataclasses
import math
import statistics

from workbench.diagnosis.analysis.costs import IQR_SIGMAS, MAX_FRESH_COST, SIGMAS_90, is_crowded, noise_warnings
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.remedy import Remedy, gain_of
from workbench.diagnosis.analysis.step_model import StepModel

KINDS = {
    "num_workers": "loader",
    "persistent_workers": "loader",
    "epoch in shared memory": "loader",
    "prefetch_factor": "loader",
    "pin_memory": "loader",
    "micro_batch": "batch",
    "accumulation": "reductions",
    "bucket_cap_mb": "reductions",
}
"""Knob or remedy → the kind of formula that predicts its gain. All others are "training": an experiment made the change on replayed
batches."""
MODEL_ERRORS = {
    False: {"loader": 0.06, "batch": 0.06, "reductions": 0.06, "training": 0.13},
    True: {"loader": 0.11, "batch": 0.19, "reductions": 0.14, "training": 0.33},
}
"""Do other processes crowd the cores? → kind → half-width of log(proved / predicted) beyond the noise of the measurement.

`fit_errors` of a record of 110 proofs (2026-11-22 and 23, two cores of one x86 machine, torch 2.13): 32 while nothing else ran, 78 while
other processes of lower priority took one to two cores, 11 of those on an emulated GPU. Of the proofs of cases that were left out of the
fit, 91 % and 86 % lie in the range; of 14 on held-out cases, 13. Not covered: real GPUs, more than two cores or ranks."""


def kind_of(name: str) -> str:
    """The kind of formula that predicts a remedy.

    >>> kind_of("num_workers=2, persistent_workers=True"), kind_of("precision=amp_bf16")
    ('loader', 'training')
    """
    return KINDS.get(name.partition("=")[0].strip(), "training")


MAX_CURVE_ERROR = 0.33
"""Relative error of the loader's formula beyond which it does not describe the step. Measured: the worst of 36 settings, see `LoaderModel`.
With half, curves of healthy loaders recommend nothing; with twice, a loader's number is recommended from probes under another load."""


def with_model_error(remedy: Remedy, crowded: bool, more: float = 0.0) -> Remedy:
    """The remedy with a range that covers the error of its formula and the noise of its measurement; a ceiling is left as it is.

    Args:
        remedy: with the noise of its measurement only.
        crowded: did other processes take so many cores that ours had to wait?
        more: half-width, as a logarithm, of another error that is independent of both.
    """
    if remedy.ceiling:
        return remedy
    error = math.hypot(MODEL_ERRORS[crowded][kind_of(remedy.name)], more)
    low, high = widened(remedy.low, remedy.speedup, remedy.high, error)
    return dataclasses.replace(remedy, low=low, high=max(remedy.speedup, min(high, remedy.most)))


def with_errors(remedy: Remedy, model: StepModel) -> Remedy:
    """`with_model_error`, and what a formula does not know of this step. What an experiment tried was compared with blocks beside it, whose
    spread is in its range already, unless they were too few to have one.
    """
    kind, noise = kind_of(remedy.name), model.evidence.noise
    more = 0.0 if kind == "training" and noise and noise.spread else scatter(model.evidence)
    more = math.hypot(more, present_gap(model) if kind == "loader" else 0.0)
    return with_model_error(remedy, is_crowded(model.evidence), more)


def scatter(e: Evidence) -> float:
    """Half-width of log(seconds) that holds 90 % of the unchanged step's blocks on a busy machine, as a formula compares what was measured
    at different times; 0 on a quiet one.
    """
    if e.noise is None or not noise_warnings(e):
        return 0.0
    cached = [changed for _, changed in e.arms["cached"].pairs] if "cached" in e.arms else []
    cached += [base for arm in e.arms.values() if arm.baseline == "cached" for base, _ in arm.pairs]
    logs = [math.log(seconds) for seconds in cached if seconds > 0]
    return SIGMAS_90 * max(e.noise.spread / IQR_SIGMAS, statistics.stdev(logs) if len(logs) > 1 else 0.0)


def present_gap(model: StepModel) -> float:
    """|log(measured / predicted)| of the step with its loader as it is, where that is beyond what was measured and MAX_CURVE_ERROR;
    else 0, also where there is no formula.
    """
    c, feeding = model.costs, model.feeding
    if feeding is None:
        return 0.0
    measured = c.cached + c.data.mid
    predicted = measured - model.unexplained
    most = predicted * (1 + MAX_CURVE_ERROR) + (0.0 if feeding.num_workers else MAX_FRESH_COST * c.cached)
    if c.cached + c.data.low <= most and c.cached + c.data.high >= predicted / (1 + MAX_CURVE_ERROR):
        return 0.0
    return abs(math.log(measured / predicted)) if min(measured, predicted) > 0 else 0.0


def surely_gains(remedy: Remedy, crowded: bool) -> bool:
    """Is a predicted gain beyond its noise? Of a ceiling, whose range begins at no gain: is what is expected of it beyond the error of the
    loader's formula, since most ceilings are the loader's? More threads, which nobody tried, may gain nothing.

    Args:
        remedy: as `with_model_error` gave it.
        crowded: did other processes take cores, as for `with_model_error`?
    """
    if remedy.ceiling:
        return not remedy.name.startswith("threads=") and gain_of(remedy) > math.exp(MODEL_ERRORS[crowded]["loader"])
    return remedy.low > 1


def widened(low: float, mid: float, high: float, error: float) -> tuple[float, float]:
    """The ends of a range of ratios with one more independent relative error: the squares of half-widths, as logarithms, add up.

    >>> [round(end, 3) for end in widened(1.9, 2.0, 2.1, 0.1)]
    [1.787, 2.235]
    """
    down, up = (math.hypot(math.log(end), error) for end in (mid / low, high / mid))
    return mid * math.exp(-down), mid * math.exp(up)
