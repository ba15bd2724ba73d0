"""Widens the range of a predicted gain by the error of its formula: how far proofs lay from predictions, beyond the measured noise.

`fit_errors` determines that error from a record of predictions and proofs, `with_model_error` applies it to a remedy.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.diagnosis.analysis.remedy import Remedy

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
LEVEL = 0.85
"""Share of the recorded errors that a half-width covers. As the range also covers the noise, it contains more of the proofs. Chosen; the
proofs of cases that were left out lie inside as often as `MODEL_ERRORS` says."""
MIN_ERRORS = 5
"""With fewer errors of a kind, those of all kinds together are used."""


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


def widened(low: float, mid: float, high: float, error: float) -> tuple[float, float]:
    """The ends of a range of ratios with one more independent relative error: the squares of half-widths, as logarithms, add up.

    >>> [round(end, 3) for end in widened(1.9, 2.0, 2.1, 0.1)]
    [1.787, 2.235]

    Args:
        low: end, above 0.
        mid: the prediction.
        high: end; inf stays inf.
        error: half-width as a logarithm, 0 or more.
    """
    down, up = (math.hypot(math.log(end), error) for end in (mid / low, high / mid))
    return mid * math.exp(-down), mid * math.exp(up)


def error_beside_noise(pair: Mapping[str, Any]) -> float:
    """The least `error` with which `widened` makes the range of a pair reach its proof.

    Args:
        pair: "low", "speedup" and "high" as predicted, with the noise of measurements only, and "proved".
    """
    error = math.log(pair["proved"] / pair["speedup"])
    noise = math.log(pair["high"] / pair["speedup"] if error > 0 else pair["speedup"] / pair["low"])
    return math.sqrt(max(0.0, error**2 - noise**2))


def fit_errors(pairs: Sequence[Mapping[str, Any]], level: float = LEVEL) -> dict[bool, dict[str, float]]:
    """`MODEL_ERRORS` of a record: the quantile of `error_beside_noise` by kind, separately for crowded machines.

    Args:
        pairs: as for `error_beside_noise`, and "remedy", "crowded".
        level: share of the errors that are covered. The quantile is that of a further proof: rank (n + 1) × level of n.
    """
    errors: dict[bool, dict[str, list[float]]] = {crowded: defaultdict(list) for crowded in (False, True)}
    for pair in pairs:
        errors[pair["crowded"]][kind_of(pair["remedy"])].append(error_beside_noise(pair))
    fitted: dict[bool, dict[str, float]] = {}
    for crowded, by_kind in errors.items():
        together = [error for some in by_kind.values() for error in some]
        fitted[crowded] = {
            kind: _quantile(by_kind[kind] if len(by_kind[kind]) >= MIN_ERRORS else together, level)
            for kind in sorted({*KINDS.values(), "training"})
        }
    return fitted


def _quantile(values: Sequence[float], level: float) -> float:
    """The value that a further one exceeds with probability 1 − level; 0 of none."""
    ordered = sorted(values)
    return ordered[min(math.ceil(level * (len(ordered) + 1)), len(ordered)) - 1] if ordered else 0.0
