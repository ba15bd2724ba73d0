"""The checks of `wb.sanity` that train: are a few samples learnt by heart, and do true labels teach more than shuffled ones?"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.core import units
from workbench.diagnosis.analysis.sanity import Check, judged
from workbench.diagnosis.measure.checked_training import FEW, Line, Seen, Training, Unjudged, loss_value
from workbench.diagnosis.measure.token_targets import given_targets, of_tokens, reads_its_target
from workbench.diagnosis.measure.watched_forward import ELEMENTWISE, LossCall, Watched
from workbench.harness.batches import bytes_of, tensors_of
from workbench.harness.discover import discover
from workbench.harness.restore import SavedState
from workbench.timeline.loops import samples_in
from workbench.train.random_numbers import seed_all

STEPS_BY_HEART, STEPS_WITH_LABELS = 200, 150
"""Most steps with a few samples; most with true labels, and as many with shuffled ones."""
LARGE_RMS = 30.0
"""Root mean square from which on inputs or targets are not normalised: bytes of pixels have 100 to 150, normalised values about 1."""
LEARNT = 0.2
"""The loss that is left, as a fraction of the first, when samples are learnt by heart."""
RISEN = 1.1
"""Factor by which all later losses exceed the first if the learning rate ruins the training; labels that carry nothing leave it
at chance."""
NOT_EVEN_THE_MEAN = 1.5
"""With more times the loss of the best constant output, a model has not even learnt the mean of its targets; else the factor is about 1."""
FALLEN_RATE = 0.01
"""Fraction of a learning rate that is left when a schedule has ended the training."""
LEAST_STEPS = 50
"""Steps with true and with shuffled labels from which on it is a fault that they do not differ, or twice as many as learning a few samples
by heart took, if that is less: a model needs time to learn anything."""
MOST_PASSES = 4
"""Most passes over the batches if the first one teaches nothing, as with embeddings, which learn slowly. Chosen: in more, wrong labels are
learnt by heart as well."""


def overfitting(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    """Whether the training learns a few samples by heart, else whether Adam does, from the same weights."""
    batch = training.few(FEW) if training.few else seen.batches[0]
    count = samples_in(batch, None if training.few else training.batch_size) or FEW
    keep = SavedState(discover(training.step, *training.models, *training.optimizers))
    rate, updates = _largest_rate(training), list[Any]()
    counter = register_optimizer_step_pre_hook(lambda *given: updates.append(given[0]))
    try:
        first, left, known, steps = _by_heart(training.step, training, batch, line)
    finally:
        counter.remove()
    least = known or 0.0
    figure = f"the loss of {count} samples falls from {first:.3g} to {left:.3g} in {steps} steps"
    if math.isnan(first):
        raise Unjudged("the step returns no loss, or NaN")
    if first <= 0 or left < 0:
        raise Unjudged(f"{figure}: how far a loss that may be negative can fall is not known")
    if least > 0.02 * first:
        figure += f", and with these targets it cannot fall below {least:.3g}"
    if left - least <= LEARNT * (first - least):
        seen.steps_by_heart = steps
        return judged(figure)
    if training.few and count < FEW and left < 0.9 * first:
        raise Unjudged(f"{figure}: they are all of the data")
    if training.loss is None:
        if left < 0.9 * first:
            raise Unjudged(f"{figure}: not finished")
        if training.optimizers and not updates and steps == STEPS_BY_HEART:
            return judged(figure, "never_stepped")
        if training.optimizers and len(updates) < STEPS_BY_HEART / 2 and len(updates) < steps / 2:
            raise Unjudged(f"{figure}, and {f'only {len(updates)}' if updates else 'none'} of them updated the weights")
        if (last := _largest_rate(training)) < FALLEN_RATE * rate:
            raise Unjudged(f"{figure}, in which the learning rate falls from {rate:.3g} to {last:.3g}: does a schedule step too often?")
        _has_taken_enough(steps, left, first, figure)
        return _does_not_fall(figure, known)
    maximizes = any(group.get("maximize") for optimizer in training.optimizers for group in optimizer.param_groups)
    loss, left_by_adam, fewest = training.loss, math.inf, steps
    for rate in (1e-2, 1e-3):
        keep.restore()
        weights = [weight for weight in training.models[0].parameters() if weight.requires_grad]
        adam = torch.optim.Adam(weights, lr=rate)

        def step(batch: Any, adam: Any = adam) -> Tensor:
            adam.zero_grad()
            value = loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
            adam.step()
            return value.detach()

        _, other, _, tried = _by_heart(step, training, batch, line)
        fewest = min(fewest, tried)
        left_by_adam = min(left_by_adam, other)
        if other - least <= LEARNT * (first - least):
            cause = "maximizes" if maximizes else "" if left <= 0.5 * first else "learning_rate"
            return judged(f"{figure}; to {other:.3g} with adam(lr={rate:g})", cause, sure=left > 0.9 * first)
    if line.left <= 0:
        raise Unjudged(f"{figure}: no time was left")
    size = max(
        (float(call.target.double().square().mean().sqrt()) for call in seen.watched.losses if call.name in ELEMENTWISE), default=0.0
    )
    if size > LARGE_RMS:
        return judged(f"{figure}; the root mean square of the targets is {size:.3g}", "target_scale")
    if known is None and left > 0.99 * first and left_by_adam < 0.5 * first:
        return judged(f"{figure}; to {left_by_adam:.3g} with Adam", "maximizes" if maximizes else "learning_rate")
    if known is None and min(left, left_by_adam) < 0.9 * first:
        raise Unjudged(f"{figure}, {left_by_adam:.3g} with Adam; how far this loss can fall is not known")
    _has_taken_enough(fewest, min(left, left_by_adam), first, figure)
    return _does_not_fall(figure, known)


def _does_not_fall(figure: str, known: float | None) -> Check:
    """A fault if it is known how far the loss can fall, and else doubtful: parts of a loss may work against each other, as in a GAN."""
    return judged(figure, "does_not_overfit", sure=known is not None)


def _has_taken_enough(steps: int, left: float, first: float, figure: str) -> None:
    """Raise Unjudged where time ended so early that a loss might have fallen further: slow steps are no fault."""
    if steps < STEPS_BY_HEART / 2 or (steps < STEPS_BY_HEART and left < 0.9 * first):
        raise Unjudged(f"{figure}: {steps} of {STEPS_BY_HEART} steps fitted into the budget; give a larger budget_s")


def _largest_rate(training: Training) -> float:
    return max((float(group["lr"]) for optimizer in training.optimizers for group in optimizer.param_groups if "lr" in group), default=0.0)


def _by_heart(step: Callable[[Any], Any], training: Training, batch: Any, line: Line) -> tuple[float, float, float | None, int]:
    """The first loss, the lowest, the least that the targets allow (None = not known), and how many steps it took.

    All steps draw the same random numbers: noise that a model or loss adds, as of a diffusion model, belongs to what is learnt.
    """
    first, lowest, number = math.nan, math.inf, 0
    known: float | None = None
    limit = line.left / 2
    watched = Watched(training.models)
    for number in range(1, STEPS_BY_HEART + 1):
        seed_all(0)
        if number == 1:
            with watched.on():
                loss = first = loss_value(step(batch))
            if len(watched.losses) == 1 and abs(watched.losses[0].mean() - first) < 0.01 * abs(first):
                known = _least(watched.losses[0])
        else:
            loss = loss_value(step(batch))
        lowest = min(lowest, loss) if math.isfinite(loss) else lowest
        line.say(f"learning {FEW} samples by heart, step {number}")
        if math.isnan(first):
            break
        if lowest - (known or 0.0) <= 0.1 * (first - (known or 0.0)) or line.left < limit:
            break
    return first, lowest, known, number


def _least(call: LossCall) -> float:
    """The least value that one of torch's losses can take with these targets: not zero if they are probabilities, or smoothed."""
    target, smoothing = call.target, float(call.options.get("label_smoothing") or 0.0)
    if call.name == "cross_entropy" and call.input.ndim > 1 and (smoothing or target.is_floating_point()):
        classes = call.input.shape[1]
        hard = target if target.is_floating_point() else F.one_hot(target.clamp(0, classes - 1), classes).movedim(-1, 1)
        ideal = (hard * (1 - smoothing) + smoothing / classes).clamp_min(1e-12).log()
    elif call.name.startswith("binary_cross_entropy"):
        chance = target.double().clamp(1e-7, 1 - 1e-7)
        ideal = chance if call.name == "binary_cross_entropy" else chance.logit()
    else:
        return 0.0
    return max(0.0, replace(call, input=ideal).mean())


def label_alignment(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    """Whether the training learns more from the true targets than from those of other samples of the batch."""
    if not seen.watched.losses:
        raise Unjudged("none of torch's losses is called: labels are not known")
    if all(math.isnan(loss) for loss in seen.losses):
        raise Unjudged("the step returns no loss, or NaN")
    keep = SavedState(discover(training.step, *training.models, *training.optimizers))
    tokens = of_tokens(seen)
    if tokens == "same":
        return judged("each target is the token that the model is given at its own position", "targets_are_inputs")
    if tokens == "next but one":
        return judged("each target is the token two positions after the last that the model may read", "shifted_twice")
    if not tokens and (given := given_targets(seen)) is not None and reads_its_target(training, seen, given):
        return judged("each target is the token that the decoder is given at its own position", "targets_are_inputs")
    if tokens == "next" and reads_its_target(training, seen):
        return judged("predictions of earlier tokens change with a later one that they are to predict", "sees_its_targets")
    learns = done.get("overfitting")
    if learns is not None and (learns.passed is False or learns.cause == "does_not_overfit"):
        raise Unjudged("the training does not even learn a few samples")
    keep.restore()  # the mode, if the model was asked for what it reads
    began, until, more = time.monotonic(), line.left * 0.6, ""
    batches: list[Any] = []

    def collected() -> Iterator[Any]:
        nonlocal more
        size = 0
        for batch in itertools.islice(training.stream(), STEPS_WITH_LABELS):
            batches.append(batch)
            size += bytes_of(batch)
            yield batch
            more = ": give a larger budget_s" if line.left < until else more
            if more or size > 2**28:
                return

    rate = _largest_rate(training)
    true, _, _ = _labelled(training, line, collected(), shuffled=False)
    last = _largest_rate(training)
    keep.restore()
    other, moved, targets = _labelled(training, line, batches, shuffled=True)
    keep.restore()
    count, took = len(true), time.monotonic() - began
    more = ": give a larger budget_s" if line.left <= 0 else more
    if moved < len(other) / 2:
        values = torch.cat([target.flatten().double() for target in targets])
        if len(seen.watched.losses) == len(seen.batches) and len(values) > 1 and bool((values == values[0]).all()):
            return judged(f"all {len(values)} targets of {len(targets)} batches are {values[0]:g}", "constant_targets")
        # as those of a GAN, of which each call has targets that are all equal
        raise Unjudged("the targets of most batches are all the same, so that shuffling changes nothing: is the data sorted by class?")
    broken = next((step for step, losses in enumerate(zip(true, other, strict=False)) if not all(map(math.isfinite, losses))), None)
    if broken is not None:
        if bad := not_finite(batches[broken]):
            figure = f"the loss becomes NaN or infinite with batch {broken + 1}, which has {units.several(bad, 'such value')}"
            return judged(figure, "nonfinite_inputs")
        if all(map(math.isfinite, true)):
            raise Unjudged("the loss becomes NaN or infinite with shuffled labels alone")
        return judged(f"within {count} steps the loss becomes NaN or infinite", "rate_too_high", sure=False)
    if len(other) - count // 3 < 5:
        raise Unjudged(f"{units.several(count, 'step')} {'is' if count == 1 else 'are'} too few to tell{more}")
    call = seen.watched.losses[0]
    least = _least(call) if len(seen.watched.losses) == len(seen.batches) else 0.0
    gain = _Gain.of(true[count // 3 :], other[count // 3 :], least)
    steps = min(LEAST_STEPS, 2 * (seen.steps_by_heart or LEAST_STEPS))
    samples = count * max(1, len(call.target) if call.target.ndim else 1)
    figure = f"the loss is {gain} lower than with shuffled labels"
    if gain.sure:
        return judged(figure)
    late = true[count // 3 :]
    if min(late) > RISEN * true[0] > 0:
        rise = f"from {true[0]:.3g} to {statistics.fmean(late):.3g}"
        return judged(f"the loss rises {rise}, even with the true labels", "rate_too_high", sure=False)
    needed = 30 * call.input.shape[1] if call.name in ("cross_entropy", "nll_loss") and call.input.ndim > 1 else 500
    figure += f", after {samples} targets"
    alone = len(seen.watched.losses) == len(seen.batches) and math.isclose(call.mean(), seen.losses[0], rel_tol=0.01)
    if alone and (constant := _of_constant(call, targets)):
        times = statistics.fmean(other[-5:]) / constant
        if times > NOT_EVEN_THE_MEAN:
            advice = ": normalise the targets" if call.name in ELEMENTWISE else ""
            raise Unjudged(f"{figure}: the loss is still {times:.2g} times that of an output that is always the same{advice}{more}")
    rare = None if (counts := _counts(call, targets)) is None else int(counts.sum() - counts.max())
    enough = samples >= needed / 3 and (rare is None or rare >= needed / 6)
    small, learnt = 0.05 * gain.usual, 0.0
    if not enough or gain.mean > 3 * gain.error or max(gain.mean, 0.0) + 2 * gain.error > small:
        raise Unjudged(f"{figure}: too few to tell{more}")
    if not more and (passes := min(MOST_PASSES, int(0.8 * line.left / max(took, 1e-6)))) > 1:
        arms = []
        for shuffled in (False, True):
            arms.append(_labelled(training, line, batches, shuffled=shuffled, passes=passes)[0])
            keep.restore()
        if min(map(len, arms)) == count and all(map(math.isfinite, itertools.chain(*arms))):
            learnt, gain = gain.usual, _Gain.of(arms[0], arms[1], least)
            learnt -= gain.usual  # of shuffled labels by heart, which true ones must surpass by half
            figure += f", and {gain} after {passes} passes over them"
            if gain.sure and gain.mean > learnt / 2:
                return judged(figure)
    most = max(gain.mean, 0.0) + 2 * gain.error
    if most > learnt / 4 and (gain.mean > 2 * gain.error or most > small):
        raise Unjudged(f"{figure}: too few to tell{more}")
    if last < FALLEN_RATE * rate:
        raise Unjudged(f"{figure}, in which the learning rate falls from {rate:.3g} to {last:.3g}: does a schedule step too often?")
    lacks = f"{needed} targets" if samples < needed else f"{steps} steps" if count < steps else ""
    if not lacks and rare is not None and rare < needed // 2:
        figure, lacks = f"{figure}, of which {rare} are not of the most frequent class", f"{needed // 2} of these"
    return judged(figure + f"; with {lacks} this would be a fault{more}" * bool(lacks), "labels_carry_nothing", sure=not lacks)


class _Gain(NamedTuple):
    """By how much the loss is lower with true labels than with shuffled ones."""

    mean: float
    error: float
    """Its standard error."""
    usual: float
    """The loss with shuffled labels, above the least that these targets allow."""

    @classmethod
    def of(cls, true: Sequence[float], other: Sequence[float], least: float) -> "_Gain":
        gains = [second - first for first, second in zip(true, other, strict=False)]
        return cls(statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains)), abs(statistics.fmean(other) - least))

    @property
    def sure(self) -> bool:
        return self.mean > 3 * self.error and self.mean > 0.01 * self.usual

    def __str__(self) -> str:
        lower, about = (units.percent(value / (self.usual or math.inf)) for value in (self.mean, 2 * self.error))
        return f"{lower} (± {about})"


def _labelled(
    training: Training, line: Line, batches: Iterable[Any], *, shuffled: bool, passes: int = 1
) -> tuple[list[float], int, list[Tensor]]:
    """The losses of the last pass over the batches, how many calls of losses the shuffling has changed, and the targets.

    Each pass shuffles the labels in the same way, so that they can be learnt by heart as true ones can.
    """
    order = torch.Generator()
    watched = Watched(training.models, shuffle=order if shuffled else None)
    losses, targets = list[float](), list[Tensor]()
    with watched.on():
        for number in range(1, passes + 1):
            order.manual_seed(1)
            losses.clear()
            for batch in batches:
                losses.append(loss_value(training.step(batch)))
                latest = [_kept(call) for call in watched.losses]
                targets = [*(targets[-4:] if any(map(torch.is_floating_point, latest)) else targets), *latest]
                watched.losses.clear()
                line.say(f"learning from {'shuffled' if shuffled else 'true'} labels, pass {number}, step {len(losses)}")
                if line.left <= 0:
                    return losses, watched.moved, targets
    return losses, watched.moved, targets


def _kept(call: LossCall) -> Tensor:
    """Its targets, as bool if they are labels of 0 and 1."""
    labels = call.target.bool()
    return labels if call.name.startswith("binary") and bool((labels == call.target).all()) else call.target


def not_finite(batch: Any) -> int:
    """How many values in a batch are NaN or infinite."""
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors_of(batch) if tensor.is_floating_point())


def _counts(call: LossCall, targets: Sequence[Tensor]) -> Tensor | None:
    """How many of the targets are of each class, or are 0 and 1; None = they are neither."""
    known = torch.cat([part.flatten() for part in targets])
    if known.dtype == torch.bool:
        return torch.stack([(~known).sum(), known.sum()])
    if call.name not in ("cross_entropy", "nll_loss") or known.is_floating_point():
        return None
    return known[(known != call.options.get("ignore_index", -100)) & (known >= 0)].bincount(minlength=1)


def _of_constant(call: LossCall, targets: Sequence[Tensor]) -> float:
    """The loss of the best output that is always the same, for these targets of such calls; 0 = not known."""
    if any(call.options.get(name) is not None for name in ("weight", "pos_weight")) or call.options.get("label_smoothing"):
        return 0.0
    rows = [
        part.flatten(1) if part.ndim > 1 and call.name not in ("cross_entropy", "nll_loss") else part.reshape(-1, 1) for part in targets
    ]
    known = torch.cat(rows if len({part.shape[1] for part in rows}) == 1 else [part.reshape(-1, 1) for part in rows]).double()
    if call.name in ("cross_entropy", "nll_loss"):
        counts = _counts(call, targets)
        shares = torch.zeros(0) if counts is None else counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())
    best = known.mean(0) if call.name.startswith(("mse", "binary")) else known.median(0).values
    if call.name == "binary_cross_entropy_with_logits":
        best = best.clamp(1e-6, 1 - 1e-6).logit()
    options = {name: value for name, value in call.options.items() if name in ("delta", "beta")}
    return LossCall(call.name, best.expand_as(known), known, options).mean()
