"""Which rule to use, its factor, and what it assumes."""

import math
from collections.abc import Iterator

from workbench.batch import lights
from workbench.batch.described import Described
from workbench.batch.scaled import LIGHTS, Valid, number

MALLADI = ("adam", "adamw", "nadam", "radam", "rmsprop")
"""Optimizers that Malladi's square root rule is for; derived for Adam and RMSProp, their near kin are treated alike."""


def choose(rule: str, base: Described, ratio: float, noise: float | None, *, strict: bool) -> tuple[str, str]:
    """The rule to use, and why.

    Args:
        rule: that was asked for.
        base: the optimizer.
        ratio: the new batch over the old one.
        noise: samples; None = not known.
        strict: raise where Malladi's rule is not defined, instead of falling back to the square root alone.

    Raises:
        ValueError: the rule is not for this optimizer, or needs a noise that is not known.
    """
    defined = base.name in MALLADI and base.betas is not None and lights.fading(base.betas, ratio) != "outside"
    if rule == "adam":
        if base.name not in MALLADI:
            raise ValueError(
                f"rule='adam' is for {', '.join(MALLADI)}, and the optimizer is {base.name}: "
                f"try {'linear or damped' if base.kin == 'sgd' else 'sqrt or damped'}, or auto"
            )
        if defined:
            return rule, "adam, as you asked: Malladi's square root rule, with betas and epsilon, keeps the dynamics"
        ends = ", ".join(number(beta) for beta in base.betas or ())
        if strict:
            raise ValueError(
                f"rule='adam' at {number(ratio)} times the batch: kappa × (1 - beta) has to stay below 1 for each beta, "
                f"and they are {ends}: below {number(_reach(base))} times the batch it goes; try that, betas nearer to 1, or rule='sqrt'"
            )
        return "sqrt", "sqrt instead of adam, which is not defined here: the square root on the learning rate alone"
    if rule == "damped" and noise is None:
        raise ValueError(
            "rule='damped' needs the noise: give noise_scale=… (wb.noise_scale measures it in a run) or critical_batch=… "
            "(wb.steps_to_target finds it); without either try linear for SGD, adam or sqrt for Adam"
        )
    if rule != "auto":
        return rule, f"{rule}, as you asked"
    return _automatic(base, defined, noise)


def _automatic(base: Described, defined: bool, noise: float | None) -> tuple[str, str]:
    if defined:
        return "adam", f"adam, because {base.name} divides by the gradient's own size: Malladi's square root rule, with betas and epsilon"
    if noise is not None:
        cause = "noise is known: proportional to the batch far below it, constant far above"
        return "damped", f"damped, because the {cause}" + ("" if base.kin == "sgd" else f" (its square root, for {base.name})")
    if base.kin == "sgd":
        return "linear", "linear, because SGD's steps add up; how far that goes depends on the noise, which is not known"
    if base.kin == "adam":
        return "sqrt", "sqrt, because so large a factor leaves nothing of Adam's averages: the full rule is not defined here"
    return "sqrt", f"sqrt, which {base.name} is used with; no rule was derived for it"


def _reach(base: Described) -> float:
    return rounded(1 / (1 - min(base.betas or (0.0,))))


def rounded(value: float) -> float:
    """Without the dust of binary fractions: 1 - 4 × (1 - 0.9) is 0.6."""
    return float(f"{value:.14g}")


def factor_of(rule: str, base: Described, batch: float, to_batch: float, noise: float | None) -> float:
    """What a rule multiplies the learning rate with."""
    ratio = to_batch / batch
    if rule == "damped":
        assert noise is not None
        return lights.damped(batch, to_batch, noise, lights.power(base))
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "adam": math.sqrt(ratio), "none": 1.0}[rule]


def valid_light(used: str, asked: str, base: Described, batch: int, to_batch: int, noise: float | None, *, critical: bool) -> Valid:
    """Do the assumptions of the rule that is used hold at the new batch?

    Args:
        used: the rule.
        asked: the one that was asked for.
        base: the optimizer.
        batch: samples per step, before.
        to_batch: after.
        noise: samples; None = not known.
        critical: it is not that of gradients alone: the batch from which larger ones help no more was found.
    """
    if batch == to_batch:
        return "inside"
    exponent, found = lights.power(base), list[Valid]()
    if used == "damped":
        assert noise is not None
        found.append("inside" if critical else lights.doubtful(batch, to_batch, noise, exponent))
    else:
        found.append(lights.beside_law(factor_of(used, base, batch, to_batch, noise), batch, to_batch, noise, exponent))
    if used == "adam" and base.betas is not None:
        found.append(lights.fading(base.betas, to_batch / batch))
    if asked == "adam" and used != "adam":
        found.append("outside")
    return lights.worst(*found)


def limits(used: str, base: Described, batch: int, to_batch: int, noise: float | None, valid: Valid) -> Iterator[str]:
    """Why the light is what it is, and what else the rule leaves open."""
    ratio = to_batch / batch
    faded = lights.fading(base.betas or (), ratio) if base.name in MALLADI else "inside"
    vanishing = (used == "adam" and faded != "inside") or (used == "sqrt" and faded == "outside")
    least = min(base.betas or (0.0,))
    end = (
        f"kappa × (1 - beta) is {number(ratio * (1 - least))} for beta {number(least)}, and has to stay well below 1: "
        f"at {number(_reach(base))} times the batch nothing is left of that average"
    )
    if valid != "inside":
        because = vanishing and (used == "adam" or valid == "outside")
        yield f"{LIGHTS[valid]}: {end if because else _reason(used, base, batch, to_batch, noise)}"
        vanishing = vanishing and not because
    if vanishing:
        yield f"the betas stay as they are: {end}"
    if used == "adam" and base.name in ("nadam", "radam"):
        yield f"derived for Adam and RMSProp; {base.name} is treated like Adam"
    if base.name in ("lars", "lamb"):
        published = "linear" if base.name == "lars" else "the square root"
        yield f"no rule was derived for {base.name}: {published} with a warm-up is what was published"


def _reason(used: str, base: Described, batch: int, to_batch: int, noise: float | None) -> str:
    if used == "damped":
        return (
            "the noise scale of gradients can be several times the critical batch, and then this is too much; wb.steps_to_target finds it"
        )
    if noise is None:
        side = "above" if used == "none" else "below"
        return f"it assumes batches far {side} the noise scale, which is not known; wb.noise_scale measures it"
    law = lights.damped(batch, to_batch, noise, lights.power(base))
    excess = factor_of(used, base, batch, to_batch, noise) / law
    return f"at a noise of {number(noise)} samples this learning rate is {number(excess)} times the one of the damped rule"
