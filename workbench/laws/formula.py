"""The law itself, and its compute-optimal use in closed form."""

import math
from typing import Any

import numpy as np

from workbench.laws.bootstrap import Five

_REACH = 300.0  # of the logarithm of N or D: a law with hardly an exponent puts its optimum beyond what a float holds


def losses(law: Five, parameters: Any, tokens: Any) -> Any:
    """E + A/N^α + B/D^β, of numbers or of columns."""
    e, a, b, alpha, beta = law
    return e + a * np.asarray(parameters, float) ** -alpha + b * np.asarray(tokens, float) ** -beta


def exponent(law: Five) -> float:
    """β/(α+β): the best N grows as this power of the compute.

    >>> round(exponent((1.69, 406.4, 410.7, 0.34, 0.28)), 3)
    0.452
    """
    return law[4] / (law[3] + law[4])


def optimum(law: Five, work: float) -> tuple[float, float, float]:
    """N, D and the loss of the best use of N · D = work: N = G · work^a, G = (αA/βB)^(1/(α+β)), a = β/(α+β) (Hoffmann et al. 2022, eq. 4).

    >>> n, d, loss = optimum((1.69, 406.4, 410.7, 0.34, 0.28), 5.76e23 / 6)
    >>> f"{n:.3g} {d:.3g} {loss:.3f}"
    '3.22e+10 2.98e+12 1.931'
    """
    _, a, b, alpha, beta = law
    log_g = (math.log(alpha * a) - math.log(beta * b)) / (alpha + beta)
    log_n = log_g + exponent(law) * math.log(work)
    log_d = math.log(work) - log_n
    n, d = (math.exp(min(max(one, -_REACH), _REACH)) for one in (log_n, log_d))
    with np.errstate(over="ignore"):
        return n, d, float(losses(law, n, d))
