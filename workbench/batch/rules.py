"""scale_lr: the learning rate for another batch, by a rule whose limits are known."""

import math
from collections.abc import Mapping
from typing import Any

from workbench.batch import companions
from workbench.batch.asked import check, known_noise, plain
from workbench.batch.choosing import EPS_DIGITS, choose, factor_of, limits, rounded, valid_light
from workbench.batch.described import Described
from workbench.batch.lights import worst
from workbench.batch.scaled import ScaledLr, number


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
    crowded = tuple(companions.data(to_batch, dataset_size))
    valid = by_rule = valid_light(used, rule, base, batch, to_batch, noise, critical=critical_batch is not None)
    if crowded:
        valid = "outside" if to_batch > (dataset_size or 0) else worst(valid, "edge")
    warmup_steps = warmup_steps or 0
    warmup, how = companions.warmup(warmup_steps, batch, to_batch, rises=factor > 1, dataset_size=dataset_size)
    notes = (
        *crowded,
        *limits(used, base, batch, to_batch, noise, by_rule),
        *([source] if source and used == "damped" else []),
        *doubts,
        how,
        *companions.decay(base, ratio, factor),
        *companions.momentum(base, ratio),
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
