"""What `scale_lr` is asked: numbers that make sense, and the noise to damp by."""

from numbers import Integral, Real
from typing import Any

from workbench.batch.scaled import RULES, number
from workbench.checks import choice, is_number, real_number, whole_number


def known_noise(noise_scale: Any, critical_batch: Any) -> tuple[float | None, str, tuple[str, ...]]:
    """The noise to damp by, which one it is in words, and doubts about it.

    Args:
        noise_scale: samples, or what has them as `b_simple`.
        critical_batch: samples, or what has them as `b_crit`.

    Raises:
        ValueError: no number above 0.
    """
    known = {
        name: _samples(name, getattr(given, attribute, given))
        for name, attribute, given in (("noise scale", "b_simple", noise_scale), ("critical batch", "b_crit", critical_batch))
        if given is not None
    }
    doubts: tuple[str, ...] = ()
    if getattr(noise_scale, "enough", True) is False:
        doubts = (f"the noise scale was measured over too few steps: {number(known['noise scale'])} is not certain yet",)
    if not known:
        return None, "", doubts
    name = min(known, key=lambda one: known[one])
    text = f"damped by the {name}, {number(known[name])} samples"
    if len(known) > 1:
        text += f": the smaller of the two (noise scale {number(known['noise scale'])}, critical batch {number(known['critical batch'])})"
    return known[name], text, doubts


def plain(value: Any) -> Any:
    """A number as Python's own int or float, so that it can be written as JSON; anything else as it is.

    >>> plain(2), plain(0.5), plain(None)
    (2, 0.5, None)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _samples(name: str, given: Any) -> float:
    if not is_number(given, above=0, numpy=True):
        raise ValueError(
            f"{name} of {given!r}: a number of samples above 0 is wanted, or what measured it; leave it out if it is not known"
        )
    return float(given)


def check(lr: object, rule: object, **whole: object) -> None:
    """Refuse what makes no sense.

    Args:
        lr: learning rate.
        rule: one of RULES.
        whole: numbers by name; warm-up and dataset may be None.

    Raises:
        ValueError: says what is allowed.
    """
    real_number("lr", lr, above=0, numpy=True)
    for name, value in whole.items():
        least = 0 if name == "warmup_steps" else 1
        if value is None and name in ("warmup_steps", "dataset_size"):
            continue
        also = ": samples per optimizer step, micro_batch × accumulation × world_size" if name in ("batch", "to_batch") else ""
        whole_number(name, value, least=least, also=also, numpy=True)
    choice("rule", rule, RULES)
