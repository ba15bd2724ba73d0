"""Fits scaling laws to the published Chinchilla points, and predicts larger runs from smaller ones, beside the naive procedure.

    python benchmarks/scaling_law.py PATH

PATH is the CSV file that Besiroglu et al. 2024 (arXiv 2404.10102) digitised from figure 4 of Hoffmann et al. 2022 (arXiv 2203.15556), less
the five highest losses, as they leave them out; columns parameters, training_tokens, loss. It is not part of this repository: theirs is
github.com/epoch-research/analyzing-chinchilla.
"""

import sys
import time

import numpy as np
from scipy.optimize import minimize

from workbench.scaling.analysis.law.fit import Columns, exponent, losses, misfit
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import Points, read_points

PUBLISHED = {"E": 1.817, "A": 482.0, "B": 2086.0, "alpha": 0.3478, "beta": 0.3659}
"""Besiroglu et al. 2024, table 1."""
LIMITS = (1e20, 3e20, 1e21)
"""FLOPs up to which runs are fitted; the larger ones are held out."""
COMMON_START = (5.0, 5.0, 0.5, 0.5, 0.5)
"""log A, log B, log E, alpha, beta where the peer begins: the middle of Hoffmann et al.'s grid of starts."""


def common(points: Points) -> tuple[tuple[float, ...], str]:
    """The peer: the same Huber loss as a mean, from one start, with scipy's own tolerances."""
    n, d, loss = (np.log(column) for column in (points.parameters, points.tokens, points.loss))
    whole = Columns(n, d, loss, 0.0, 0.0)

    def mean(place: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = misfit(place, whole)
        return value / len(points), slope / len(points)

    found = minimize(mean, COMMON_START, jac=True, method="L-BFGS-B")
    return whole.outward(found.x), f"after {found.nit} iterations it says: {found.message}"


def error(law: tuple[float, ...], points: Points) -> float:
    """Mean size of predicted over measured, less 1."""
    return float(np.abs(losses(law, points.parameters, points.tokens) / np.asarray(points.loss) - 1).mean())  # type: ignore[arg-type]


def main(path: str) -> None:
    """Print the tables of RESULTS.md."""
    points = read_points(path)
    began = time.perf_counter()
    law = ScalingLaw.fit(points, level=0.8)
    seconds = time.perf_counter() - began
    peer, said = common(points)
    print(f"{len(points)} points; fit and {len(law.draws)} drawings: {seconds:.1f} s; the peer: {said}\n")
    print("| | published | the workbench | 80 % interval | published inside | mean, one start |\n|---|---|---|---|---|---|")
    for (name, published), own, theirs in zip(PUBLISHED.items(), law.intervals.values(), peer, strict=True):
        inside = "yes" if published in own else "no"
        print(f"| {name} | {published:g} | {own.mid:.4g} | {own.low:.4g} … {own.high:.4g} | {inside} | {theirs:.4g} |")
    size = law.exponent
    print(f"| N_opt ∝ C^ | 0.513 | {size.mid:.3f} | {size.low:.3f} … {size.high:.3f} | | {exponent(peer):.3f} |\n")  # type: ignore[arg-type]
    print("| fitted to | runs | held out | error | naive: best loss so far | mean, one start | inside the 90 % interval |")
    print("|---|---|---|---|---|---|---|")
    for limit in LIMITS:
        held = ScalingLaw.fit(points, draws=200).held_out(flops=limit)
        small = [one <= limit for one in law.compute]
        theirs_held = error(common(points.where(small))[0], points.where(not one for one in small))
        print(
            f"| C ≤ {limit:.0e} | {held.fitted} | {len(held.measured)} | {100 * held.error:.2f} % | {100 * held.naive_error:.1f} % "
            f"| {100 * theirs_held:.2f} % | {100 * held.covered:.0f} % |"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").split("\n\n", 1)[1])
    main(sys.argv[1])
