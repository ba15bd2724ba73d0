"""scale_lr: the learning rate for another batch, by a rule whose limits are known.

Which rule to use, its factor, and what it assumes.

Does a rule hold at a batch: how far its learning rate is from the law's, which knows the noise; plain arithmetic.

What goes along with a learning rate when the batch changes: warm-up, momentum, weight decay, the size of the data.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.batch.analysis.optimizer import Described
from workbench.batch.analysis.scaled_lr import LIGHTS, ScaledLr, Valid, check, known_noise, number, plain
from workbench.core.optimizer_table import OPTIMIZERS

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
    defined = base.family == "adam" and base.betas is not None and fading(base.betas, ratio) != "outside"
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
        return damped(batch, to_batch, noise, power(base))
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "adam": math.sqrt(ratio), "none": 1.0}[rule]


def _beside_law(used: str, base: Described, batch: int, to_batch: int, noise: float | None) -> Valid:
    """How the learning rate of a rule other than the damped one stands beside that one's."""
    if used in ("linear", "sqrt") and noise is None and too_far(to_batch / batch):
        return "outside"
    return beside_law(factor_of(used, base, batch, to_batch, noise), batch, to_batch, noise, power(base))


def _excess(used: str, base: Described, batch: int, to_batch: int, noise: float) -> float:
    return factor_of(used, base, batch, to_batch, noise) / damped(batch, to_batch, noise, power(base))


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
        found.append("inside" if critical else doubtful(batch, to_batch, noise, power(base)))
    else:
        found.append(_beside_law(used, base, batch, to_batch, noise))
    if used == "adam" and base.betas is not None:
        found.append(fading(base.betas, to_batch / batch))
    if asked == "adam" and used != "adam":
        found.append("outside")
    return worst(*found)


def limits(used: str, base: Described, batch: int, to_batch: int, noise: float | None, valid: Valid) -> Iterator[str]:
    """Why the light is what it is, and what else the rule leaves open."""
    ratio = to_batch / batch
    faded = fading(base.betas or (), ratio) if base.family == "adam" else "inside"
    vanishing = (used == "adam" and faded != "inside") or (used == "sqrt" and faded == "outside")
    least = min(base.betas or (0.0,))
    end = (
        f"kappa × (1 - beta) is {number(ratio * (1 - least))} for beta {number(least)}, and has to stay well below 1: "
        f"at {number(_reach(base))} times the batch nothing is left of that average"
    )
    if valid != "inside":
        by_noise = "inside" if used == "damped" else _beside_law(used, base, batch, to_batch, noise)
        because = vanishing and (worst(by_noise, faded) != by_noise if used == "adam" else valid == "outside" != by_noise)
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
    if noise is None and used in ("linear", "sqrt") and too_far(to_batch / batch):
        return (
            f"batches {number(apart)} times apart; linear was shown to hold over {SHOWN} times (Goyal et al. 2017), the square root "
            "over half of that (You et al. 2020), and here the noise scale, which is not known, would have to be far above "
            f"{number(max(batch, to_batch))} samples"
        )
    if noise is None:
        side = "above" if used == "none" else "below"
        return f"it assumes batches far {side} the noise scale, which is not known; wb.noise_scale measures it"
    excess = _excess(used, base, batch, to_batch, noise)
    return f"at a noise of {number(noise)} samples this learning rate is {number(excess)} times the one of the damped rule"


WARMUP_EPOCHS = 5
"""Over which Goyal et al. 2017 (arXiv 1706.02677, section 2.2) raise the learning rate of a large batch."""
FEW_STEPS = 10
"""An epoch of fewer steps than this is no longer "batch far below the data", which all of the rules assume (Smith et al. 2018)."""


def scaled_warmup(given: int | None, batch: int, to_batch: int, *, rises: bool, dataset_size: int | None) -> tuple[int, str]:
    """Steps of the warm-up at the new batch, and why.

    A warm-up that there is keeps its length in samples. Where there is none and the learning rate rises it takes WARMUP_EPOCHS, if it is
    known how long an epoch is.

    Args:
        given: steps at the old batch; None or 0 = no warm-up.
        batch: samples per step, before.
        to_batch: after.
        rises: the learning rate becomes larger.
        dataset_size: samples of an epoch; None = not known.
    """
    if given:
        steps = max(1, math.ceil(given * batch / to_batch - 1e-9))
        return steps, f"warm-up: {number(given * batch)} samples as before, which are {number(steps)} steps now"
    if not rises:
        return 0, "warm-up: none, as before"
    if dataset_size is None:
        return 0, (
            f"warm-up: none, as before; a larger learning rate is safer with one: {WARMUP_EPOCHS} epochs are usual (give dataset_size=…), "
            "or your own warmup_steps"
        )
    steps = max(1, math.ceil(WARMUP_EPOCHS * dataset_size / to_batch))
    return steps, f"warm-up: {WARMUP_EPOCHS} epochs of {number(dataset_size)} samples (Goyal et al. 2017) are {number(steps)} steps"


def momentum(optimizer: Described, ratio: float) -> Iterator[str]:
    """What becomes of momentum: nothing; but it averages over more samples."""
    kept = optimizer.get("momentum")
    if not kept or ratio == 1:
        return
    if optimizer.name == "lars":
        yield f"momentum={number(kept)} is kept; the learning rate stands inside its average here, so a change takes some steps to arrive"
    elif optimizer.name == "sgd":
        yield (
            f"momentum={number(kept)} is kept: torch's SGD multiplies with the learning rate outside of the average, so no momentum "
            "correction is needed when it changes (Goyal et al. 2017). What counts is lr / (1 - momentum): more momentum would be more "
            "learning rate (Smith et al. 2018)"
        )
    else:
        yield f"momentum={number(kept)} is kept; the rule was derived without it"


def decay(optimizer: Described, ratio: float, factor: float) -> Iterator[str]:
    """What becomes of the time over which weights are forgotten: batch / (lr × weight_decay) samples."""
    kept, longer = optimizer.get("weight_decay"), ratio / factor
    if not kept or math.isclose(longer, 1, rel_tol=0.01):
        return
    decoupled = OPTIMIZERS[optimizer.name].decoupled
    if decoupled or optimizer.name == "sgd":
        source = " (Wang and Aitchison 2024)" if decoupled else ""
        yield (
            f"weight_decay={number(kept)} is kept: weights are forgotten over {number(longer)} times as many samples "
            f"(batch / (lr × weight_decay)); weight_decay={number(kept * longer)} would keep that time{source}"
        )


def data(batch: int, dataset_size: int | None) -> Iterator[str]:
    """What a batch means beside the data."""
    if dataset_size is None or batch * FEW_STEPS <= dataset_size:
        return
    if batch > dataset_size:
        yield (
            f"a batch of {number(batch)} is more than the {number(dataset_size)} samples there are: no step takes fresh samples only; "
            "no rule reaches here"
        )
    else:
        yield (
            f"an epoch of {number(dataset_size)} samples is {dataset_size / batch:.1f} steps: the rules assume a batch far below the data"
        )


def scale_lr(
    lr: float,
    *,
    batch: int,
    to_batch: int,
    optimizer: str | Mapping[str, Any] = "sgd",
    rule: str = "auto",
    noise_scale: Any = None,
    critical_batch: Any = None,
    warmup_steps: int | None = None,
    dataset_size: int | None = None,
    strict: bool = False,
) -> ScaledLr:
    """Take a learning rate from one batch to another.

    With kappa = to_batch / batch:

    * "linear": lr × kappa, for SGD while kappa small steps see about the gradient of one big one: batches far below the noise scale
      (Goyal et al. 2017, arXiv 1706.02677, with a warm-up).
    * "sqrt": lr × sqrt(kappa), and nothing else changes.
    * "adam": lr × sqrt(kappa), beta → 1 - kappa (1 - beta), eps / sqrt(kappa), for Adam and RMSProp while kappa (1 - beta) < 1 for each
      beta and noise dominates the gradient (Malladi et al. 2022, arXiv 2205.10287). It keeps the dynamics, sample for sample.
    * "damped": lr × (1 + noise / batch) / (1 + noise / to_batch), which is linear far below the noise scale and constant far above
      (McCandlish et al. 2018, arXiv 1812.06162); for Adam its square root.
    * "none": lr as it is.
    * "auto": SGD "damped" where the noise is known, else "linear"; Adam and its kin "adam" where that is defined and a known noise does not
      forbid it; else "damped" or "sqrt".

    Every rule carries the error of the learning rate it starts from: tune that first.

    >>> scale_lr(0.1, batch=32, to_batch=128, rule="linear").lr
    0.4
    >>> scaled = scale_lr(1e-3, batch=64, to_batch=256, optimizer="adam(betas=(0.9, 0.99))")
    >>> scaled.rule, scaled.lr, scaled.optimizer()
    ('adam', 0.002, 'adam(betas=(0.6, 0.96), eps=5e-09)')

    Args:
        lr: (peak) learning rate at `batch`.
        batch: samples per optimizer step over all ranks and micro-batches: micro_batch × accumulation × world_size.
        to_batch: the same, of the new batch.
        optimizer: name with options, as a spec writes it, or a mapping of what a built one has.
        rule: one of RULES.
        noise_scale: the gradient noise scale, in samples: a number, or what `wb.noise_scale` gives. None = not known.
        critical_batch: B_crit, in samples, from `wb.steps_to_target`. Where both are known the smaller counts.
        warmup_steps: of the old batch; None or 0 = none so far.
        dataset_size: samples of an epoch; None = not known.
        strict: raise where the rule does not hold, instead of saying so in `notes`.

    Returns:
        The learning rate with everything that goes along, the light `valid`, and why.

    Raises:
        ValueError: a number, rule or optimizer that makes no sense; the rule is not for this optimizer; or, if `strict`, it does not hold.
    """
    check(lr, rule, batch=batch, to_batch=to_batch, warmup_steps=warmup_steps, dataset_size=dataset_size)
    lr, batch, to_batch, warmup_steps, dataset_size = map(plain, (lr, batch, to_batch, warmup_steps, dataset_size))
    base, ratio = Described.of(optimizer), to_batch / batch
    noise, source, doubts = known_noise(noise_scale, critical_batch)
    used, why = choose(rule, base, batch, to_batch, noise, strict=strict)
    betas, eps = base.betas, base.get("eps")
    factor = factor_of(used, base, batch, to_batch, noise)
    if used == "adam" and betas is not None and ratio != 1:
        betas = tuple(rounded(1 - ratio * (1 - beta)) for beta in betas)
        eps = None if eps is None else rounded(eps / math.sqrt(ratio), EPS_DIGITS)
    crowded = tuple(data(to_batch, dataset_size))
    valid = by_rule = valid_light(used, rule, base, batch, to_batch, noise, critical=critical_batch is not None)
    if crowded:
        valid = "outside" if to_batch > (dataset_size or 0) else worst(valid, "edge")
    warmup_steps = warmup_steps or 0
    warmup, how = scaled_warmup(warmup_steps, batch, to_batch, rises=factor > 1, dataset_size=dataset_size)
    notes = (
        *crowded,
        *limits(used, base, batch, to_batch, noise, by_rule),
        *([source] if source and used == "damped" else []),
        *doubts,
        how,
        *decay(base, ratio, factor),
        *momentum(base, ratio),
    )
    if strict and valid == "outside":
        raise ValueError(
            f"rule={rule!r} from batch {number(batch)} to {number(to_batch)} with {base.text}: {notes[0]}; "
            "try another rule, a smaller step, or strict=False to get it with a warning"
        )
    return ScaledLr(
        lr=rounded(lr * factor),
        base_lr=lr,
        betas=betas,
        eps=eps,
        momentum=base.get("momentum"),
        weight_decay=base.get("weight_decay"),
        warmup_steps=warmup,
        rule=used,
        batch=batch,
        to_batch=to_batch,
        factor=factor,
        valid=valid,
        why=why,
        notes=notes,
        base=base.text,
        base_warmup_steps=warmup_steps,
        noise=noise,
    )
