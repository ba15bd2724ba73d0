"""Widens the range of a predicted gain by the error of its formula: how far proofs lay from predictions, beyond the measured noise.

`with_model_error` applies that error to a remedy; `fit_errors` of `tests/diagnosis/test_model_errors.py` determined it.
"""

import dataclasses
import math

from workbench.diagnosis.analysis.remedy import Remedy, gain_of

KINDS = {
    "num_workers": "loader",
    "persistent_workers": "loader",
    "prefetch_factor": "loader",
    "pin_memory": "loader",
    "micro_batch": "batch",
    "accumulation": "reductions",
    "bucket_cap_mb": "reductions",
}
"""Knob → the kind of formula that predicts its gain. All others are "training": an experiment made the change on replayed batches."""
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


def with_model_error(remedy: Remedy, crowded: bool) -> Remedy:
    """The remedy with a range that covers the error of its formula and the noise of its measurement; a ceiling is left as it is.

    Args:
        remedy: with the noise of its measurement only.
        crowded: did other processes take so many cores that ours had to wait?
    """
    if remedy.ceiling:
        return remedy
    low, high = widened(remedy.low, remedy.speedup, remedy.high, MODEL_ERRORS[crowded][kind_of(remedy.name)])
    return dataclasses.replace(remedy, low=low, high=high)


def surely_gains(remedy: Remedy, crowded: bool) -> bool:
    """Is a predicted gain beyond its noise? Of a ceiling, whose range begins at no gain: is what is expected of it beyond the error of the
    loader's formula, since most ceilings are the loader's?

    Args:
        remedy: as `with_model_error` gave it.
        crowded: as there.
    """
    return gain_of(remedy) > math.exp(MODEL_ERRORS[crowded]["loader"]) if remedy.ceiling else remedy.low > 1


def widened(low: float, mid: float, high: float, error: float) -> tuple[float, float]:
    """The ends of a range of ratios with one more independent relative error: the squares of half-widths, as logarithms, add up.

    >>> [round(end, 3) for end in widened(1.9, 2.0, 2.1, 0.1)]
    [1.787, 2.235]
    """
    down, up = (math.hypot(math.log(end), error) for end in (mid / low, high / mid))
    return mid * math.exp(-down), mid * math.exp(up)
