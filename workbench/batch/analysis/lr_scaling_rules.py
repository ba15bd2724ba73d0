"""scale_lr: takes a learning rate from one batch size to another by a rule, and says whether the rule's assumptions hold there.

In order: the factor of each rule, whether it is valid at the new batch, which rule "auto" chooses, what becomes of warm-up, momentum and
weight decay, and `scale_lr` itself. A rule is judged by the law of McCandlish et al. (`damped_factor`), which knows the gradient noise.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.batch.analysis.scaled_lr import (
    KEEPS_BETAS,
    VALIDITY_TEXT,
    ScaledLr,
    Validity,
    check_arguments,
    noise_to_damp_by,
    number,
    python_number,
)
from workbench.core.optimizer_table import OPTIMIZERS
from workbench.core.synonyms import accept_synonyms

EDGE_EXCESS, OUTSIDE_EXCESS = 1.25, 2.0
"""A learning rate up to the first times above or below the law's is inside the rule's domain, beyond the second outside of it. In trials
with SGD on small data a rate 1.3 times too high cost steps, and with one twice as high training often never reached its target."""
NOISE_EXCESS = 3.0
"""The gradient noise scale may be so many times the critical batch (1.6 to 3 in our trials)."""
SHOWN_RATIO = 128
"""Ratio of batches over which linear scaling was shown to hold (64 to 8,192 samples, Goyal et al. 2017); the square root over half of that
(LAMB, 512 to 32,768, You et al. 2020, arXiv 1904.00962)."""
MAX_RATIO = 8 * SHOWN_RATIO
"""Beyond this ratio a rule does not hold where the noise is unknown: it would have to be far above the larger batch."""
SHORT_AVERAGE = 0.5
"""A beta below this averages fewer than two steps: the edge of Malladi's rule, whose end is 0."""
ROUNDING = 1e-12
"""Error of binary fractions: 1 - 10 × (1 - 0.9) is not quite 0."""
EPS_DIGITS = 6
"""Significant digits of a new epsilon."""
WARMUP_EPOCHS = 5
"""Over which Goyal et al. 2017 (arXiv 1706.02677, section 2.2) raise the learning rate of a large batch."""
MIN_STEPS_PER_EPOCH = 10
"""With fewer steps an epoch, the batch is no longer far below the data, as all of the rules assume (Smith et al. 2018)."""
_ORDER: tuple[Validity, ...] = ("inside", "edge", "outside")


def law_exponent(optimizer: OptimizerDescription) -> float:
    """Exponent of the law: 1 for SGD; 1/2 for adaptive optimizers, which agrees with the square root for small batches.

    McCandlish et al. 2018 find 0.5 to 1 for Adam.
    """
    return 1.0 if optimizer.family == "sgd" else 0.5


def damped_factor(batch: float, to_batch: float, noise: float, exponent: float = 1.0) -> float:
    """The law's factor: ((1 + noise / batch) / (1 + noise / to_batch)) ** exponent; linear far below the noise, 1 far above.

    >>> damped_factor(8, 8, 28.0), damped_factor(8, 32, math.inf), damped_factor(8, 32, 0.0)
    (1.0, 4.0, 1.0)

    Args:
        batch: samples per step, before.
        to_batch: samples per step, afterwards.
        noise: the batch at which noise and signal are equal; infinite = noise only.
        exponent: exponent of the law; see `law_exponent`.

    Source: McCandlish et al. 2018, arXiv 1812.06162, section 2.2.
    """
    if math.isinf(noise):
        return float((to_batch / batch) ** exponent)
    return float(((1 + noise / batch) / (1 + noise / to_batch)) ** exponent)


def rule_factor(rule: str, base: OptimizerDescription, batch: float, to_batch: float, noise: float | None) -> float:
    """Factor of the learning rate by a rule; "damped" needs the noise."""
    ratio = to_batch / batch
    if rule == "damped":
        assert noise is not None
        return damped_factor(batch, to_batch, noise, law_exponent(base))
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "adam": math.sqrt(ratio), "none": 1.0}[rule]


def rounded(value: float, digits: int = 14) -> float:
    """Round off the error of binary fractions: 1 - 4 × (1 - 0.9) becomes 0.6."""
    return float(f"{value:.{digits}g}")


def is_too_far(ratio: float) -> bool:
    """Are two batches too far apart for a rule where the noise is unknown?

    >>> is_too_far(128), is_too_far(1e9), is_too_far(1e-9)
    (False, True, True)
    """
    return max(ratio, 1 / ratio) > MAX_RATIO


def validity_of(excess: float) -> Validity:
    """The validity of a learning rate that is `excess` times the law's."""
    factor = max(excess, 1 / excess)
    return "inside" if factor <= EDGE_EXCESS else "edge" if factor <= OUTSIDE_EXCESS else "outside"


def worst_validity(*validities: Validity) -> Validity:
    """The least favourable validity; "unknown" only where all others are "inside"."""
    known = [validity for validity in validities if validity != "unknown"]
    worst: Validity = max(known, key=_ORDER.index) if known else "unknown"
    return "unknown" if worst == "inside" and len(known) < len(validities) else worst


def factor_validity(factor: float, batch: int, to_batch: int, noise: float | None, exponent: float) -> Validity:
    """The validity of a rule's factor, compared with the law's at a known noise, or else at any possible noise."""
    if noise is not None:
        return validity_of(factor / damped_factor(batch, to_batch, noise, exponent))
    extremes = [validity_of(factor / damped_factor(batch, to_batch, extreme, exponent)) for extreme in (0.0, math.inf)]
    if "inside" not in extremes:
        return min(extremes, key=_ORDER.index)
    return "inside" if set(extremes) == {"inside"} else "unknown"


def damped_validity(batch: int, to_batch: int, noise: float, exponent: float) -> Validity:
    """The validity of the law itself if the noise scale were NOISE_EXCESS times too large, as that of gradients can be."""
    return validity_of(damped_factor(batch, to_batch, noise, exponent) / damped_factor(batch, to_batch, noise / NOISE_EXCESS, exponent))


def betas_validity(betas: tuple[float, ...], ratio: float) -> Validity:
    """The validity of Malladi's rule by the betas that it gives at `ratio` times the batch."""
    least = min((1 - ratio * (1 - beta) for beta in betas), default=1.0)
    return "outside" if least <= ROUNDING else "edge" if least < SHORT_AVERAGE and ratio > 1 else "inside"


def _validity_by_law(rule: str, base: OptimizerDescription, batch: int, to_batch: int, noise: float | None) -> Validity:
    """The validity of a rule other than "damped", by its factor alone."""
    if rule in ("linear", "sqrt") and noise is None and is_too_far(to_batch / batch):
        return "outside"
    return factor_validity(rule_factor(rule, base, batch, to_batch, noise), batch, to_batch, noise, law_exponent(base))


def _excess(rule: str, base: OptimizerDescription, batch: int, to_batch: int, noise: float) -> float:
    return rule_factor(rule, base, batch, to_batch, noise) / damped_factor(batch, to_batch, noise, law_exponent(base))


def _max_ratio(base: OptimizerDescription) -> float:
    """The ratio of batches at which Malladi's rule makes a beta 0."""
    return rounded(1 / (1 - min(base.betas or (0.0,))))


def rule_validity(
    rule: str, requested: str, base: OptimizerDescription, batch: int, to_batch: int, noise: float | None, *, critical: bool
) -> Validity:
    """Do the assumptions of a rule hold at the new batch?

    Args:
        rule: the rule that is used, one of RULES.
        requested: the one that the caller named.
        noise: samples; None = not known.
        critical: is the noise a critical batch that was measured, not only the noise scale of gradients?
    """
    if batch == to_batch:
        return "inside"
    validities = list[Validity]()
    if rule == "damped":
        assert noise is not None
        validities.append("inside" if critical else damped_validity(batch, to_batch, noise, law_exponent(base)))
    else:
        validities.append(_validity_by_law(rule, base, batch, to_batch, noise))
    if rule == "adam" and base.betas is not None:
        validities.append(betas_validity(base.betas, to_batch / batch))
    if requested == "adam" and rule != "adam":
        validities.append("outside")
    return worst_validity(*validities)


def validity_notes(rule: str, base: OptimizerDescription, batch: int, to_batch: int, noise: float | None, valid: Validity) -> Iterator[str]:
    """Notes on why a rule has its validity, and on its limits."""
    ratio = to_batch / batch
    by_betas = betas_validity(base.betas or (), ratio) if base.family == "adam" else "inside"
    vanishing = (rule == "adam" and by_betas != "inside") or (rule == "sqrt" and by_betas == "outside")
    least = min(base.betas or (0.0,))
    end = (
        f"kappa × (1 - beta) is {number(ratio * (1 - least))} for beta {number(least)}, and has to stay well below 1: "
        f"at {number(_max_ratio(base))} times the batch nothing is left of that average{f'; {KEEPS_BETAS}' if rule == 'adam' else ''}"
    )
    if valid != "inside":
        by_noise = "inside" if rule == "damped" else _validity_by_law(rule, base, batch, to_batch, noise)
        because = vanishing and (worst_validity(by_noise, by_betas) != by_noise if rule == "adam" else valid == "outside" != by_noise)
        yield f"{VALIDITY_TEXT[valid]}: {end if because else _reason(rule, base, batch, to_batch, noise)}"
        if because and by_noise in ("edge", "outside"):
            yield f"besides, {_reason(rule, base, batch, to_batch, noise)}"
        vanishing = vanishing and not because
    if vanishing:
        yield f"{'besides' if rule == 'adam' else 'the betas stay as they are'}: {end}"
    if rule == "adam" and base.name in ("nadam", "radam"):
        yield f"derived for Adam and RMSProp; {base.name} is treated like Adam"
    if base.name in ("lars", "lamb"):
        published = "linear" if base.name == "lars" else "the square root"
        yield f"no rule was derived for {base.name}: {published} with a warm-up is what was published"


def _reason(rule: str, base: OptimizerDescription, batch: int, to_batch: int, noise: float | None) -> str:
    if rule == "damped":
        return (
            "the noise scale of gradients can be several times the critical batch, and then this is too much; wb.steps_to_target finds it"
        )
    apart = max(to_batch / batch, batch / to_batch)
    if noise is None and rule in ("linear", "sqrt") and is_too_far(to_batch / batch):
        return (
            f"batches {number(apart)} times apart; linear was shown to hold over {SHOWN_RATIO} times (Goyal et al. 2017), the square root "
            "over half of that (You et al. 2020), and here the noise scale, which is not known, would have to be far above "
            f"{number(max(batch, to_batch))} samples"
        )
    if noise is None:
        side = "above" if rule == "none" else "below"
        return f"it assumes batches far {side} the noise scale, which is not known; wb.noise_scale measures it"
    excess = _excess(rule, base, batch, to_batch, noise)
    return f"at a noise of {number(noise)} samples this learning rate is {number(excess)} times the one of the damped rule"


def choose_rule(rule: str, base: OptimizerDescription, batch: int, to_batch: int, noise: float | None, *, strict: bool) -> tuple[str, str]:
    """The rule to use, and why.

    Args:
        rule: the rule that the caller named: one of RULES, or "auto".
        noise: samples; None = not known.
        strict: raise where Malladi's rule is not defined, instead of falling back to the square root alone.

    Raises:
        ValueError: the rule is not for this optimizer, or needs a noise that is not known.
    """
    ratio = to_batch / batch
    defined = base.family == "adam" and base.betas is not None and betas_validity(base.betas, ratio) != "outside"
    if rule == "adam":
        if base.family != "adam":
            family = ", ".join(row.name for row in OPTIMIZERS.values() if row.family == "adam")
            raise ValueError(
                f"rule='adam' is for {family}, and the optimizer is {base.name}: "
                f"try {'linear or damped' if base.family == 'sgd' else 'sqrt or damped'}, or auto"
            )
        if defined:
            return rule, "adam, as requested: Malladi's square root rule, with betas and epsilon, keeps the dynamics"
        ends = ", ".join(number(beta) for beta in base.betas or ())
        if strict:
            raise ValueError(
                f"rule='adam' at {number(ratio)} times the batch: kappa × (1 - beta) has to stay below 1 for each beta, "
                f"and they are {ends}: below {number(_max_ratio(base))} times the batch it works; try that, betas nearer to 1, "
                "or rule='sqrt'"
            )
        return "sqrt", "sqrt instead of adam, which is not defined here: the square root on the learning rate alone"
    if rule == "damped" and noise is None:
        raise ValueError(
            "rule='damped' needs the noise: give noise_scale=… (wb.noise_scale measures it in a run) or critical_batch=… "
            "(wb.steps_to_target finds it); without either try linear for SGD, adam or sqrt for Adam"
        )
    if rule != "auto":
        return rule, f"{rule}, as requested"
    return _choose_automatically(base, defined, batch, to_batch, noise)


def _choose_automatically(base: OptimizerDescription, defined: bool, batch: int, to_batch: int, noise: float | None) -> tuple[str, str]:
    if defined and noise is not None and _validity_by_law("adam", base, batch, to_batch, noise) == "outside":
        return "damped", (
            f"damped (its square root, for {base.name}), because the noise is known, and the learning rate of the rule for Adam would be "
            f"{number(_excess('adam', base, batch, to_batch, noise))} times this one: it assumes that noise dominates the gradient"
        )
    if defined:
        return "adam", (
            f"adam, since {base.name} divides each step by the gradients' size: the learning rate grows with the square root of the batch, "
            "and betas and epsilon change with it (Malladi et al. 2022)"
        )
    if noise is not None:
        grows = "in proportion to the batch" if base.family == "sgd" else f"with the batch's square root, for {base.name},"
        return (
            "damped",
            f"damped, because the noise is known: it grows {grows} while the batch is far below the noise scale, then levels off",
        )
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


def scale_warmup(given: int | None, batch: int, to_batch: int, *, rises: bool, dataset_size: int | None) -> tuple[int, str]:
    """Steps of the warm-up at the new batch, and why.

    An existing warm-up keeps its length in samples. Without one, if the learning rate rises, it takes WARMUP_EPOCHS where the length of an
    epoch is known.

    Args:
        given: steps at the old batch; None or 0 = no warm-up.
        batch: samples per step, before.
        to_batch: samples per step, afterwards.
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


def momentum_notes(optimizer: OptimizerDescription, ratio: float) -> Iterator[str]:
    """Notes on momentum, which is kept and then averages over more samples."""
    kept = optimizer.get("momentum")
    if not kept or ratio == 1:
        return
    if optimizer.name == "lars":
        yield f"momentum={number(kept)} is kept; the learning rate is inside its average here, so a change takes some steps to arrive"
    elif optimizer.name == "sgd":
        yield (
            f"momentum={number(kept)} is kept: torch's SGD multiplies by the learning rate outside the average, so no momentum "
            "correction is needed when it changes (Goyal et al. 2017). What counts is lr / (1 - momentum): more momentum would be more "
            "learning rate (Smith et al. 2018)"
        )
    else:
        yield f"momentum={number(kept)} is kept; the rule was derived without it"


def weight_decay_notes(optimizer: OptimizerDescription, ratio: float, factor: float) -> Iterator[str]:
    """Notes on the timescale of weight decay, batch / (lr × weight_decay) samples."""
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


def dataset_notes(batch: int, dataset_size: int | None) -> Iterator[str]:
    """Notes on a batch that is large compared with the dataset."""
    if dataset_size is None or batch * MIN_STEPS_PER_EPOCH <= dataset_size:
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


@accept_synonyms
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
    """Transfer a learning rate from one batch size to another.

    With kappa = to_batch / batch:

    * "linear": lr × kappa, for SGD at batch sizes far below the noise scale, where kappa small steps have about the effect of one large
      step (Goyal et al. 2017, arXiv 1706.02677, with a warm-up).
    * "sqrt": lr × sqrt(kappa), and nothing else changes.
    * "adam": lr × sqrt(kappa), beta → 1 - kappa (1 - beta), eps / sqrt(kappa), for Adam and RMSProp while kappa (1 - beta) < 1 for each
      beta and noise dominates the gradient (Malladi et al. 2022, arXiv 2205.10287). It preserves the training dynamics as a function of
      samples.
    * "damped": lr × (1 + noise / batch) / (1 + noise / to_batch), which is linear far below the noise scale and constant far above
      (McCandlish et al. 2018, arXiv 1812.06162); for Adam its square root.
    * "none": lr unchanged.
    * "auto": for SGD "damped" if the noise scale is known, otherwise "linear"; for the Adam family "adam" if it is defined and a known
      noise scale does not rule it out, otherwise "damped" or "sqrt".

    Every rule inherits the error of the learning rate it starts from: tune that first.

    >>> scale_lr(0.1, batch=32, to_batch=128, rule="linear").lr
    0.4
    >>> scaled = scale_lr(1e-3, batch=64, to_batch=256, optimizer="adam(betas=(0.9, 0.99))")
    >>> scaled.rule, scaled.lr, scaled.optimizer()
    ('adam', 0.002, 'adam(betas=(0.6, 0.96), eps=5e-09)')

    Args:
        lr: (peak) learning rate at `batch`.
        batch: samples per optimizer step over all ranks and micro-batches: micro_batch × accumulation × world_size.
        to_batch: the same for the new batch.
        optimizer: name with options, as in a RunSpec, or a mapping of an optimizer's settings.
        rule: one of RULES.
        noise_scale: the gradient noise scale in samples: a number, or the result of `wb.noise_scale`; None = not known.
        critical_batch: B_crit in samples, from `wb.steps_to_target`. If both are known, the smaller counts.
        warmup_steps: warm-up at the old batch size; None or 0 = none.
        dataset_size: samples of an epoch; None = not known.
        strict: raise an error if the rule does not hold, instead of saying so in `notes`.

    Returns:
        The learning rate with all other settings that change, and whether the rule holds (`valid`) and why.

    Raises:
        ValueError: an invalid number, rule or optimizer; a rule that is not for this optimizer; or, if `strict`, a rule that does not hold.
    """
    check_arguments(lr, rule, batch=batch, to_batch=to_batch, warmup_steps=warmup_steps, dataset_size=dataset_size)
    lr, batch, to_batch, warmup_steps, dataset_size = map(python_number, (lr, batch, to_batch, warmup_steps, dataset_size))
    base, ratio = OptimizerDescription.of(optimizer), to_batch / batch
    noise, noise_source, doubts = noise_to_damp_by(noise_scale, critical_batch)
    used, why = choose_rule(rule, base, batch, to_batch, noise, strict=strict)
    betas, eps = base.betas, base.get("eps")
    factor = rule_factor(used, base, batch, to_batch, noise)
    if used == "adam" and betas is not None and ratio != 1:
        betas = tuple(rounded(1 - ratio * (1 - beta)) for beta in betas)
        eps = None if eps is None else rounded(eps / math.sqrt(ratio), EPS_DIGITS)
    dataset = tuple(dataset_notes(to_batch, dataset_size))
    valid = by_rule = rule_validity(used, rule, base, batch, to_batch, noise, critical=critical_batch is not None)
    if dataset:
        valid = "outside" if to_batch > (dataset_size or 0) else worst_validity(valid, "edge")
    warmup_steps = warmup_steps or 0
    warmup, why_warmup = scale_warmup(warmup_steps, batch, to_batch, rises=factor > 1, dataset_size=dataset_size)
    notes = (
        *dataset,
        *validity_notes(used, base, batch, to_batch, noise, by_rule),
        *([noise_source] if noise_source and used == "damped" else []),
        *doubts,
        why_warmup,
        *weight_decay_notes(base, ratio, factor),
        *momentum_notes(base, ratio),
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
