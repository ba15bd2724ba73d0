"""Does a rule hold at a batch: how far its learning rate is from the law's, which knows the noise; plain arithmetic."""

import math

from workbench.batch.described import Described
from workbench.batch.scaled import Valid

CLOSE, FAR = 1.25, 2.0
"""A learning rate this many times above or below the law's is still inside the rule's domain, or already outside of it. In trials with
SGD on small data a rate 1.3 times too high cost steps, one twice as high often never arrived."""
DOUBT = 3.0
"""The gradient noise scale may be so many times the batch from which larger ones help no more (1.6 to 3 in our trials)."""
_DUST = 1e-12  # of binary fractions: 1 - 10 × (1 - 0.9) is not quite 0
FADING = 0.5
"""A beta that falls below this averages fewer than two steps: the edge of Malladi's rule, whose end is 0."""
SHOWN = 128
"""Over so many times the batch linear scaling was shown to hold (64 to 8,192 samples, Goyal et al. 2017); the square root over half of that
(LAMB, 512 to 32,768, You et al. 2020, arXiv 1904.00962)."""
_BEYOND = 8 * SHOWN
"""Further apart than this no unknown noise is given the benefit of the doubt: it would have to be far above the larger batch."""
_ORDER: tuple[Valid, ...] = ("inside", "edge", "outside")


def power(optimizer: Described) -> float:
    """Exponent of the law: 1 for SGD; 1/2 for the adaptive ones, which agrees with the square root for small batches.

    McCandlish et al. 2018 find 0.5 to 1 for Adam.
    """
    return 1.0 if optimizer.family == "sgd" else 0.5


def damped(batch: float, to_batch: float, noise: float, exponent: float = 1.0) -> float:
    """The law's factor: ((1 + noise / batch) / (1 + noise / to_batch)) ** exponent; linear far below the noise, 1 far above.

    >>> damped(8, 8, 28.0), damped(8, 32, math.inf), damped(8, 32, 0.0)
    (1.0, 4.0, 1.0)

    Args:
        batch: samples per step, before.
        to_batch: after.
        noise: the batch at which noise and signal are equal; infinite = noise only.
        exponent: see `power`.

    Source: McCandlish et al. 2018, arXiv 1812.06162, section 2.2.
    """
    if math.isinf(noise):
        return float((to_batch / batch) ** exponent)
    return float(((1 + noise / batch) / (1 + noise / to_batch)) ** exponent)


def too_far(ratio: float) -> bool:
    """Are two batches too far apart for a rule that does not know the noise?

    >>> too_far(128), too_far(1e9), too_far(1e-9)
    (False, True, True)
    """
    return max(ratio, 1 / ratio) > _BEYOND


def light(excess: float) -> Valid:
    """What a learning rate `excess` times the law's means."""
    off = max(excess, 1 / excess)
    return "inside" if off <= CLOSE else "edge" if off <= FAR else "outside"


def worst(*lights: Valid) -> Valid:
    """The least favourable of some lights; "unknown" only where none is worse than inside."""
    known = [one for one in lights if one != "unknown"]
    found: Valid = max(known, key=_ORDER.index) if known else "unknown"
    return "unknown" if found == "inside" and len(known) < len(lights) else found


def beside_law(factor: float, batch: int, to_batch: int, noise: float | None, exponent: float) -> Valid:
    """How a rule's factor stands beside the law's, at a noise that is known, or else at any there could be.

    Args:
        factor: the rule's.
        batch: samples per step, before.
        to_batch: after.
        noise: see `damped`; None = not known.
        exponent: see `power`.
    """
    if noise is not None:
        return light(factor / damped(batch, to_batch, noise, exponent))
    ends = [light(factor / damped(batch, to_batch, end, exponent)) for end in (0.0, math.inf)]
    if "inside" not in ends:
        return min(ends, key=_ORDER.index)
    return "inside" if set(ends) == {"inside"} else "unknown"


def doubtful(batch: int, to_batch: int, noise: float, exponent: float) -> Valid:
    """How the law itself would stand if the noise scale were DOUBT times too large, as that of gradients can be."""
    return light(damped(batch, to_batch, noise, exponent) / damped(batch, to_batch, noise / DOUBT, exponent))


def fading(betas: tuple[float, ...], ratio: float) -> Valid:
    """Where the betas stand that the square root rule gives at `ratio` times the batch."""
    least = min((1 - ratio * (1 - beta) for beta in betas), default=1.0)
    return "outside" if least <= _DUST else "edge" if least < FADING and ratio > 1 else "inside"
