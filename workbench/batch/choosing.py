"""Which rule to use, its factor, and what it assumes."""

import math
from collections.abc import Iterator

from workbench.batch import lights
from workbench.batch.described import Described
from workbench.batch.scaled import LIGHTS, Valid, number
from workbench.optimizer_table import OPTIMIZERS

EPS_DIGITS = 6
"""Significant digits of a new epsilon: more of them say nothing."""


def choose(rule: str, base: Described, batch: int, to_batch: int, noise: float | None, *, strict: bool) -> tuple[str, str]:
    """The rule to use, and why.

    Args:
        rule: that was asked for.
        base: the optimizer.
        batch: samples per step, before.
        to_batch: after.
        noise: samples; None = not known.
        strict: raise where Malladi's rule is not defined, instead of falling back to the square root alone.

    Raises:
        ValueError: the rule is not for this optimizer, or needs a noise that is not known.
    """
    ratio = to_batch / batch
    defined = base.family == "adam" and base.betas is not None and lights.fading(base.betas, ratio) != "outside"
    if rule == "adam":
        if base.family != "adam":
            kin = ", ".join(row.name for row in OPTIMIZERS.values() if row.family == "adam")
            raise ValueError(
                f"rule='adam' is for {kin}, and the optimizer is {base.name}: "
                f"try {'linear or damped' if base.family == 'sgd' else 'sqrt or damped'}, or auto"
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
    return _automatic(base, defined, batch, to_batch, noise)


def _automatic(base: Described, defined: bool, batch: int, to_batch: int, noise: float | None) -> tuple[str, str]:
    if defined and noise is not None and _beside_law("adam", base, batch, to_batch, noise) == "outside":
        return "damped", (
            f"damped (its square root, for {base.name}), because the noise is known, and the learning rate of the rule for Adam would be "
            f"{number(_excess('adam', base, batch, to_batch, noise))} times this one: it assumes that noise dominates the gradient"
        )
    if defined:
        return "adam", f"adam, because {base.name} divides by the gradient's own size: Malladi's square root rule, with betas and epsilon"
    if noise is not None:
        cause = "noise is known: proportional to the batch far below it, constant far above"
        return "damped", f"damped, because the {cause}" + ("" if base.family == "sgd" else f" (its square root, for {base.name})")
    if base.name == "lars":
        return "linear", (
            "linear, which lars is used with; it takes each layer's step in proportion to its weights, so no rule was derived for it, and "
            "how far linear goes depends on the noise, which is not known"
        )
    if base.family == "sgd":
        return "linear", "linear, because SGD's steps add up; how far that goes depends on the noise, which is not known"
    if base.family == "adam":
        return "sqrt", "sqrt, because so large a factor leaves nothing of Adam's averages: the full rule is not defined here"
    return "sqrt", f"sqrt, which {base.name} is used with; no rule was derived for it"


def _reach(base: Described) -> float:
    return rounded(1 / (1 - min(base.betas or (0.0,))))


def rounded(value: float, digits: int = 14) -> float:
    """Without the dust of binary fractions: 1 - 4 × (1 - 0.9) is 0.6."""
    return float(f"{value:.{digits}g}")


def factor_of(rule: str, base: Described, batch: float, to_batch: float, noise: float | None) -> float:
    """What a rule multiplies the learning rate with."""
    ratio = to_batch / batch
    if rule == "damped":
        assert noise is not None
        return lights.damped(batch, to_batch, noise, lights.power(base))
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "adam": math.sqrt(ratio), "none": 1.0}[rule]


def _beside_law(used: str, base: Described, batch: int, to_batch: int, noise: float | None) -> Valid:
    """How the learning rate of a rule other than the damped one stands beside that one's."""
    if used in ("linear", "sqrt") and noise is None and lights.too_far(to_batch / batch):
        return "outside"
    return lights.beside_law(factor_of(used, base, batch, to_batch, noise), batch, to_batch, noise, lights.power(base))


def _excess(used: str, base: Described, batch: int, to_batch: int, noise: float) -> float:
    return factor_of(used, base, batch, to_batch, noise) / lights.damped(batch, to_batch, noise, lights.power(base))


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
    found = list[Valid]()
    if used == "damped":
        assert noise is not None
        found.append("inside" if critical else lights.doubtful(batch, to_batch, noise, lights.power(base)))
    else:
        found.append(_beside_law(used, base, batch, to_batch, noise))
    if used == "adam" and base.betas is not None:
        found.append(lights.fading(base.betas, to_batch / batch))
    if asked == "adam" and used != "adam":
        found.append("outside")
    return lights.worst(*found)


def limits(used: str, base: Described, batch: int, to_batch: int, noise: float | None, valid: Valid) -> Iterator[str]:
    """Why the light is what it is, and what else the rule leaves open."""
    ratio = to_batch / batch
    faded = lights.fading(base.betas or (), ratio) if base.family == "adam" else "inside"
    vanishing = (used == "adam" and faded != "inside") or (used == "sqrt" and faded == "outside")
    least = min(base.betas or (0.0,))
    end = (
        f"kappa × (1 - beta) is {number(ratio * (1 - least))} for beta {number(least)}, and has to stay well below 1: "
        f"at {number(_reach(base))} times the batch nothing is left of that average"
    )
    if valid != "inside":
        by_noise = "inside" if used == "damped" else _beside_law(used, base, batch, to_batch, noise)
        because = vanishing and (lights.worst(by_noise, faded) != by_noise if used == "adam" else valid == "outside" != by_noise)
        yield f"{LIGHTS[valid]}: {end if because else _reason(used, base, batch, to_batch, noise)}"
        if because and by_noise in ("edge", "outside"):
            yield f"besides, {_reason(used, base, batch, to_batch, noise)}"
        vanishing = vanishing and not because
    if vanishing:
        yield f"{'besides' if used == 'adam' else 'the betas stay as they are'}: {end}"
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
    apart = max(to_batch / batch, batch / to_batch)
    if noise is None and used in ("linear", "sqrt") and lights.too_far(to_batch / batch):
        return (
            f"batches {number(apart)} times apart; linear was shown to hold over {lights.SHOWN} times (Goyal et al. 2017), the square root "
            "over half of that (You et al. 2020), and here the noise scale, which is not known, would have to be far above "
            f"{number(max(batch, to_batch))} samples"
        )
    if noise is None:
        side = "above" if used == "none" else "below"
        return f"it assumes batches far {side} the noise scale, which is not known; wb.noise_scale measures it"
    excess = _excess(used, base, batch, to_batch, noise)
    return f"at a noise of {number(noise)} samples this learning rate is {number(excess)} times the one of the damped rule"
