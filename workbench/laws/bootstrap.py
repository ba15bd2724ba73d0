"""How sure a fitted law is: it is fitted again to points drawn with replacement, one by one or run by run."""

from typing import Any

import numpy as np

from workbench.checks import choice, real_number, whole_number
from workbench.laws.objective import DELTA, Columns, best
from workbench.laws.points import VARIED, Points, PointsError

Five = tuple[float, float, float, float, float]
"""E, A, B, α, β."""
WAYS = ("pairs", "run")
"""What is drawn: each point by itself, or all points of a run together."""
_TRIES = 20  # drawings in which something varies are looked for this many times as long as needed


def draws(points: Points, law: Five, *, count: int, by: str = "pairs", seed: int = 0, delta: float = DELTA) -> tuple[Five, ...]:
    """Laws of drawings with replacement.

    A drawing in which only one size or one amount of data is left is drawn again: it has nothing to say about the exponents.

    Args:
        points: what the law was fitted to.
        law: the fitted law; each fit begins there: other starts were never seen to end lower.
        count: drawings.
        by: one of `WAYS`.
        seed: of the drawings.
        delta: of the Huber loss.

    Returns:
        `count` laws; fewer where hardly any drawing varies.
    """
    rng = np.random.default_rng(seed)
    table = np.array([points.parameters, points.tokens, points.loss])
    groups = _groups(points, by)
    found: list[Five] = []
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        drawn = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
        parameters, tokens, loss = table[:, drawn]
        if min(len(set(parameters)), len(set(tokens))) < VARIED:
            continue
        columns = Columns.of(parameters, tokens, loss)
        found.append(columns.outward(best(columns, delta=delta, near=columns.inward(law), starts=0)))
    return tuple(found)


def _groups(points: Points, by: str) -> list[Any]:
    """Places of the points that are drawn together."""
    if by == "pairs":
        return [np.array([place]) for place in range(len(points))]
    return [np.array([place for place, run in enumerate(points.run) if run == name]) for name in dict.fromkeys(points.run)]


def check(count: Any, level: Any, by: Any, seed: Any) -> tuple[int, float, int]:
    """The number of drawings, the level and the seed as plain numbers, whatever kind they came as; refused is what cannot be drawn.

    Raises:
        PointsError: a number of drawings, a level, a way or a seed that is not allowed.
    """
    choice("by", by, WAYS, error=PointsError)
    return (
        whole_number("draws", count, least=0, also=", 200 or more for intervals, 0 for none", error=PointsError, numpy=True),
        real_number("level", level, above=0, below=1, also=", such as 0.9", error=PointsError, numpy=True),
        whole_number("seed", seed, least=0, error=PointsError, numpy=True),
    )
