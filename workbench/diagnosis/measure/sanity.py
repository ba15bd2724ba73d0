"""Makes the checks of `wb.sanity` in this process, and restores the training: each check tries it and measures one figure."""

import contextlib
import fnmatch
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core import units
from workbench.diagnosis.analysis.sanity import CHECKS, Check
from workbench.diagnosis.measure.checked_training import FEW, Line, Seen, Training, Unjudged, loss_value, observe
from workbench.diagnosis.measure.watched_forward import LossCall, Watched, module_outputs
from workbench.harness.batches import bytes_of, map_tensors, tensors_of
from workbench.harness.discover import discover
from workbench.harness.feed import Exhausted
from workbench.harness.observe import uncompiled
from workbench.harness.restore import SavedState
from workbench.timeline.loops import samples_in
from workbench.train.random_numbers import seed_all

STEPS_BY_HEART, STEPS_WITH_LABELS = 200, 150
"""Most steps with a few samples; most with true labels, and as many with shuffled ones."""
LARGE_RMS = 30.0
"""Root mean square of inputs from which on they are not normalised: bytes of pixels have 100 to 150, normalised values about 1."""
DEAD = 0.5
"""Fraction of a layer's ReLUs that are never active. A fresh layer on normalised inputs has few."""
COPIES = 0.25
"""Fraction of a batch's samples that are exact copies of others."""
LEARNT = 0.2
"""The loss that is left, as a fraction of the first, when samples are learnt by heart."""
LEAK = 1e-4
"""Relative change of a sample's output from which on it depends on other samples; rounding changes it by 1e-6."""
UNEQUAL = 1e-3
"""Relative difference of summed gradients from which on they are not those of the whole batch; rounding makes 1e-6."""
NORMS = (nn.modules.batchnorm._BatchNorm,)


def check(training: Training, line: Line, wanted: Iterable[str]) -> Iterator[Check]:
    """Make the checks, one after the other, as long as there is time. The training is restored after each."""
    keep = SavedState(discover(training.step, *training.models, *training.optimizers))
    try:
        with uncompiled():
            line.say("the first steps")
            try:
                seen = observe(training)
            except (KeyboardInterrupt, Exhausted):
                raise
            except Exception as error:
                yield Check(name="inputs", passed=False, figure=_short(error), cause="error")
                return
            finally:
                keep.restore()
            results: dict[str, Check] = {}
            for name in wanted:
                if line.left <= 0:
                    yield Check(name=name, passed=None, figure="no time was left: give a larger budget_s")
                    continue
                line.say(CHECKS[name])
                try:
                    results[name] = replace(_JUDGES[name](training, seen, line, results), name=name)
                except Unjudged as why:
                    results[name] = Check(name=name, passed=None, figure=str(why))
                except Exception as error:
                    results[name] = Check(name=name, passed=None, figure=f"could not be tried: {_short(error)}")
                finally:
                    keep.restore()
                yield results[name]
    finally:
        keep.restore()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _judged(figure: str, cause: str = "", place: str = "") -> Check:
    """What a check has shown, which is failed if there is a cause. `check` gives it its name."""
    return Check(name="", passed=not cause, figure=figure, cause=cause, place=place)


def _inputs(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    batches = [tensor for batch in seen.batches for tensor in tensors_of(batch)]
    values = [tensor.double() for tensor in batches if tensor.is_floating_point() and tensor.numel()]
    if not values:
        return _judged("whole numbers")
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in values)
    if bad:
        return _judged(f"{bad} values are NaN or infinite in {len(seen.batches)} batches", "nonfinite_inputs")
    given = tensors_of(seen.watched.root or ())
    fed = [tensor.double() for tensor in given if tensor.is_floating_point() and tensor.numel() > 1] or values
    rms = max(float(tensor.square().mean().sqrt()) for tensor in fed)
    spread = max(float(tensor.std()) if tensor.numel() > 1 else 0.0 for tensor in fed)
    figure = f"root mean square {rms:.3g}, deviation {spread:.3g}"
    cause = "input_scale" if rms > LARGE_RMS else "constant_inputs" if not spread and max(map(Tensor.numel, fed)) > 1 else ""
    return _judged(figure, cause)


def _duplicates(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    worst = 0.0
    for batch in seen.batches:
        count = samples_in(batch, training.batch_size)
        tensors = [tensor for tensor in tensors_of(batch) if tensor.ndim and len(tensor) == count]
        if not count or count < 4 or not tensors:
            raise Unjudged("the samples of a batch are not told apart" if not tensors else "batches have fewer than 4 samples")
        distinct = {hash(tuple(_content(tensor[row]) for tensor in tensors if tensor[row].numel())) for row in range(count)}
        worst = max(worst, 1 - len(distinct) / count)
    return _judged(f"{units.percent(worst)} of a batch are copies", "duplicate_samples" if worst > COPIES else "")


def _content(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _initial_loss(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    loss, calls = seen.losses[0], seen.watched.losses

    if calls:
        call = calls[0]
        first, (low, high) = call.input.float(), (float(call.input.min()), float(call.input.max()))
        if call.name == "cross_entropy" and first.ndim > 1 and 0 <= low <= high <= 1 and bool(((first.sum(1) - 1).abs() < 1e-3).all()):
            return _judged(f"the logits lie in {low:.2g} … {high:.2g} and add up to 1", "softmax_before_cross_entropy")
        if call.name == "nll_loss" and float(first.logsumexp(1).abs().max()) > 1e-2:
            return _judged("what nll_loss is given are not log-probabilities", "no_log_softmax")
        if call.name == "binary_cross_entropy_with_logits" and first.numel() > 8 and 0 < low <= high < 1:
            return _judged(f"all logits lie in {low:.2g} … {high:.2g}", "sigmoid_before_logits_loss")
    if math.isinf(loss) or (math.isnan(loss) and training.loss is not None):
        return _judged(f"the first loss is {loss}", "nonfinite_loss")
    if math.isnan(loss):
        raise Unjudged("the step returns no loss: end step(batch) with `return loss`")
    one = calls[0] if calls and len(calls) % len(seen.batches) == 0 and len(calls) == len(seen.batches) else None
    if one is None:
        raise Unjudged(f"{loss:.3g}; what chance gives is known only of a loss with a single call of torch's losses")
    mean, targets = _mean(one)
    ratio = loss / mean if mean else math.nan
    if targets > 1 and abs(ratio / targets - 1) < 0.01:
        return _judged(f"{loss:.4g}, {ratio:.4g} times the mean of {targets} targets", "sum_reduction")
    if targets > 1 and abs(ratio * targets - 1) < 0.01:
        return _judged(f"{loss:.4g}, the mean {mean:.4g} divided by {targets} again", "wrong_reduction")
    if one.name == "mse_loss" and one.input.shape == one.target.shape and one.target.ndim and len(one.target) > 1:
        return _beside_variance(mean, one.target.double())
    if one.name not in ("cross_entropy", "nll_loss") or one.input.ndim < 2:
        raise Unjudged(f"{loss:.3g}; what chance gives is known of cross entropy, and of the mean squared error of a batch, alone")
    chance = math.log(one.input.shape[1])
    figure = f"{mean:.3f}, chance is ln({one.input.shape[1]}) = {chance:.3f}"
    if mean > 1.5 * chance + 1:
        return _judged(figure, "large_logits")
    if mean < 0.5 * chance:
        raise Unjudged(f"{figure}: the weights are trained already, or the inputs tell the labels")
    return _judged(figure)


def _beside_variance(mean: float, targets: Tensor) -> Check:
    """The first mean squared error beside that of the targets' mean, the best that can be said without the inputs."""
    variance = float((targets - targets.mean(0)).square().mean())
    figure = f"{mean:.3g}, the variance of the targets is {variance:.3g}"
    if not mean >= 0.5 * variance:
        raise Unjudged(f"{figure}: the weights are trained already, or the inputs tell the targets")
    if mean > 10 * variance:
        raise Unjudged(f"{figure}: normalise the targets, or make the last layer's initial weights smaller")
    return _judged(figure)


def _mean(call: LossCall) -> tuple[float, int]:
    """The mean loss of a call of one of torch's losses, and over how many targets it goes."""
    options = {name: value for name, value in call.options.items() if name not in ("reduction", "size_average", "reduce")}
    function: Any = getattr(F, call.name)
    value = float(function(call.input.float(), call.target, reduction="mean", **options))
    ignored = options.get("ignore_index")
    whole = call.target if call.name in ("cross_entropy", "nll_loss") else call.input
    count = whole.numel()
    if ignored is not None and not call.target.is_floating_point():
        count = int((call.target != ignored).sum())
    elif call.name == "cross_entropy" and call.target.is_floating_point():
        count = len(call.target)
    return value, count


def _active_units(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    dead = {place: 1 - float(active.float().mean()) for place, active in seen.watched.active.items()}
    if not dead:
        raise Unjudged("no ReLU was seen")
    place, worst = max(dead.items(), key=lambda each: each[1])
    figure = f"{units.percent(worst)} of the units are never active" if worst else "each unit is active"
    failed = worst > DEAD
    return _judged(figure, "dead_units" * failed, place * failed)


def _gradient_flow(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    faults: dict[str, list[str]] = {}
    held = {id(weight) for optimizer in training.optimizers for group in optimizer.param_groups for weight in group["params"]}
    count = 0
    for model in training.models:
        for path, part in model.named_modules():
            for name, weight in part.named_parameters(recurse=False):
                full = f"{path}.{name}".lstrip(".").replace("_orig_mod.", "")
                count += 1
                if any(fnmatch.fnmatch(full, pattern) for pattern in training.frozen):
                    continue
                if cause := _fault(weight, part, seen, held):
                    faults.setdefault(cause, []).append(full)
    if not count:
        raise Unjudged("no model was found: give model=")
    if not faults:
        return _judged(f"all {count} parameters get one")
    order = ("nonfinite_gradient", "detached", "frozen", "unused", "zero_gradient", "not_in_optimizer")
    cause = min(faults, key=order.index)
    names = faults[cause]
    figure = f"{len(names)} of {count} parameters" + "".join(f"; {len(rest)} {kind}" for kind, rest in faults.items() if kind != cause)
    place = ", ".join(names[:3]) + ", …" * (len(names) > 3)
    return _judged(figure.replace("_", " "), cause, place)


def _fault(weight: Tensor, part: nn.Module, seen: Seen, held: set[int]) -> str:
    if not weight.requires_grad:
        return "frozen"
    if id(weight) in seen.nonfinite:
        return "nonfinite_gradient"
    if id(weight) not in seen.got:
        return "detached" if id(part) in seen.watched.ran else "unused"
    if id(weight) not in seen.nonzero:
        return "zero_gradient"
    return "" if not held or id(weight) in held else "not_in_optimizer"


def _rows(value: Any, count: int, sample: int) -> list[Tensor]:
    """What belongs to a sample in a module's output."""
    rows = []
    for tensor in tensors_of(value):
        if (where := _batch_dim(tensor, count)) is not None:
            rows.append(tensor.detach().select(where, sample).clone())
        elif tensor.ndim and len(tensor) and len(tensor) % count == 0:
            rows.append(tensor.detach().reshape(count, -1, *tensor.shape[1:])[sample].clone())
    return rows


def _batch_dim(tensor: Tensor, count: int) -> int | None:
    return next((dim for dim, size in enumerate(tensor.shape) if size == count), None)


def _change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest relative difference of tensors."""
    worst = 0.0
    for old, new in zip(before, after, strict=False):
        if old.is_floating_point() and old.shape == new.shape and old.numel():
            size = max(float(old.abs().max()), 1e-12)
            worst = max(worst, float((old.double() - new.double()).abs().max()) / size)
    return worst


def _outputs(model: nn.Module, args: Any, kwargs: Any, seed: int, keep: Callable[[Any], Any]) -> list[tuple[str, Any]]:
    seed_all(seed)
    with torch.no_grad(), module_outputs(model, keep) as outputs:
        model(*args, **kwargs)
    return outputs


def _first_change(before: list[tuple[str, Any]], after: list[tuple[str, Any]], limit: float) -> tuple[str, float]:
    """The module that differs first, and by how much the model's own output differs."""
    changes = [(name, _change(old, new)) for (name, old), (_, new) in zip(before, after, strict=False)]
    place = next((name for name, change in changes if change > limit), "")
    return place, changes[-1][1] if changes else 0.0


def _inputs_of_model(training: Training, seen: Seen, count: int) -> tuple[Any, Any, int]:
    """Arguments of the model's forward, and how many samples are in them."""
    if not training.models:
        raise Unjudged("no model was found: give model=")
    if training.few is None or training.loss is None:
        root, samples = seen.watched.root, samples_in(seen.batches[0], training.batch_size)
    else:
        watched = Watched(training.models)
        batch = training.few(count)
        with torch.no_grad(), watched.on():
            training.loss(batch)
        root, samples = watched.root, count
    if root is None or not samples or samples < 2:
        raise Unjudged("the samples of a batch are not told apart")
    return *root, samples


def _batch_independence(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    args, kwargs, count = _inputs_of_model(training, seen, 5)
    model = training.models[0]
    chosen = 1

    def alone(tensor: Tensor) -> Tensor:
        where = _batch_dim(tensor, count)
        return tensor if where is None else tensor.index_select(where, torch.full((count,), chosen, device=tensor.device))

    others, named = map_tensors(alone, list(args)), map_tensors(alone, dict(kwargs))
    norms = [part for part in model.modules() if isinstance(part, NORMS) and part.training]
    for part in norms:
        part.eval()

    def keep(value: Any) -> list[Tensor]:
        return _rows(value, count, chosen)

    before = _outputs(model, args, kwargs, 0, keep)
    if not before or not before[-1][1]:
        raise Unjudged("the model's output does not say which part belongs to which sample")
    after = _outputs(model, others, named, 0, keep)
    place, change = _first_change(before, after, LEAK)
    exception = f"; batch norm in {units.several(len(norms), 'module')} mixes samples in training mode, as it should" if norms else ""
    if change > LEAK:
        return _judged(f"a sample's output changes by {change:.2g} of its size with the others{exception}", "batch_leak", place)
    return _judged(f"changes by {change:.2g} of its size{exception}")


class _Enough(Exception):
    pass


def _modes(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    if seen.modes:
        return _judged("after a step the mode is another one", "mode_not_restored", seen.modes[0])
    args, kwargs, _ = _inputs_of_model(training, seen, 5)
    model = training.models[0].eval()
    before = _outputs(model, args, kwargs, 0, tensors_of)
    after = _outputs(model, args, kwargs, 1, tensors_of)
    place, change = _first_change(before, after, 1e-6)
    if change > 1e-6:
        return _judged(f"two forwards in evaluation mode differ by {change:.2g}", "random_in_eval", place)
    figure = "two forwards in evaluation mode are equal"
    if training.evaluate:
        modes: list[bool] = []

        def called(module: nn.Module, inputs: Any) -> None:
            modes.append(module.training)
            if len(modes) == 3:
                raise _Enough

        handle = model.register_forward_pre_hook(called)
        try:
            with torch.no_grad(), contextlib.suppress(_Enough):
                training.evaluate()
        finally:
            handle.remove()
        if any(modes):
            return _judged("evaluate runs in training mode", "evaluates_in_train_mode")
        figure += "; evaluate runs in evaluation mode"
    return _judged(figure)


def _accumulation(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    if training.loss is None or training.few is None or training.part is None:
        raise Unjudged("a step takes whole batches: give a Task to have this checked")
    model = training.models[0].eval()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    count, parts = FEW, 4
    size = count // parts

    def gradient(batch: Any) -> tuple[Tensor, int, float]:
        watched = Watched(training.models)
        with watched.on():
            loss = training.loss(batch)  # type: ignore[misc]
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
        flat = torch.cat([(torch.zeros_like(w) if g is None else g).flatten().double() for w, g in zip(weights, grads, strict=True)])
        return flat, sum(_mean(call)[1] for call in watched.losses), training.weight(batch) if training.weight else 1.0

    if not weights or samples_in(training.few(count)) != count:
        raise Unjudged(f"there are no {count} samples")
    whole, *_ = gradient(training.few(count))
    several = [gradient(training.part(first, first + size)) for first in range(0, count, size)]
    total = torch.stack([part * weight for part, _, weight in several]).sum(0) / sum(weight for _, _, weight in several)
    norm = float(whole.norm())
    if not norm or not math.isfinite(norm):
        raise Unjudged("the gradient is zero or not finite")
    difference = float((total - whole).norm()) / norm
    norms = any(isinstance(part, NORMS) for part in model.modules())
    mode = "in evaluation mode" + "; in training mode batch norm makes them differ" * norms
    figure = f"{parts} micro-batches of {size} differ from the batch of {count} by {difference:.2g}, {mode}"
    if difference < UNEQUAL:
        return _judged(figure)
    slope = float(total @ whole) / norm**2
    if float((total - slope * whole).norm()) / norm < UNEQUAL * 10 and abs(slope * parts - 1) < 0.05:
        return _judged(figure, "sum_reduction")
    cause = "unequal_micro_batches" if len({targets for _, targets, _ in several}) > 1 else "batch_statistics"
    return _judged(figure, cause)


def _overfitting(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    batch = training.few(FEW) if training.few else seen.batches[0]
    count = samples_in(batch, None if training.few else training.batch_size) or FEW
    first, left, steps = _by_heart(training.step, training, batch, line)
    figure = f"the loss of {count} samples falls from {first:.3g} to {left:.3g} in {steps} steps"
    if math.isnan(first):
        raise Unjudged("the step returns no loss")
    if left <= LEARNT * first:
        return _judged(figure)
    if training.loss is None:
        if left < 0.9 * first:
            raise Unjudged(f"{figure}: not finished")
        return _judged(figure, "does_not_overfit")
    loss = training.loss
    for rate in (1e-2, 1e-3):
        weights = [weight for weight in training.models[0].parameters() if weight.requires_grad]
        adam = torch.optim.Adam(weights, lr=rate)

        def step(batch: Any, adam: Any = adam) -> Tensor:
            adam.zero_grad()
            value = loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
            adam.step()
            return value.detach()

        keep = SavedState(discover(training.models[0]))
        _, other, _ = _by_heart(step, training, batch, line)
        keep.restore()
        if other <= LEARNT * first:
            return _judged(f"{figure}; to {other:.3g} with adam(lr={rate:g})", "" if left <= 0.5 * first else "learning_rate")
    if line.left <= 0:
        raise Unjudged(f"{figure}: no time was left")
    return _judged(figure, "does_not_overfit")


def _by_heart(step: Callable[[Any], Any], training: Training, batch: Any, line: Line) -> tuple[float, float, int]:
    """The first loss, the lowest, and how many steps it took."""
    first, lowest, number = math.nan, math.inf, 0
    limit = line.left / 2
    for number in range(1, STEPS_BY_HEART + 1):
        loss = loss_value(step(batch))
        first = loss if number == 1 else first
        lowest = min(lowest, loss) if math.isfinite(loss) else lowest
        line.say(f"learning {FEW} samples by heart, step {number}")
        if lowest <= 0.1 * first or line.left < limit:
            break
    return first, lowest, number


def _label_alignment(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    if not seen.watched.losses:
        raise Unjudged("none of torch's losses is called: labels are not known")
    if all(math.isnan(loss) for loss in seen.losses):
        raise Unjudged("the step returns no loss")
    learns = done.get("overfitting")
    if learns is not None and learns.passed is False:
        raise Unjudged("the training does not even learn a few samples")
    keep = SavedState(discover(training.step, *training.models, *training.optimizers))
    batches: list[Any] = []
    size = 0
    until, more = line.left * 0.6, ""
    arms: list[list[float]] = []
    for shuffled in (None, torch.Generator().manual_seed(1)):
        watched = Watched(training.models, shuffle=shuffled)
        losses: list[float] = []
        with watched.on():
            for batch in itertools.islice(training.stream(), STEPS_WITH_LABELS) if shuffled is None else batches:
                if shuffled is None:
                    batches.append(batch)
                    size += bytes_of(batch)
                losses.append(loss_value(training.step(batch)))
                watched.losses.clear()
                line.say(f"learning from {'true' if shuffled is None else 'shuffled'} labels, step {len(losses)}")
                more = ": give a larger budget_s" if line.left <= 0 or (shuffled is None and line.left < until) else more
                if (shuffled is None and (more or size > 2**28)) or line.left <= 0:
                    break
        keep.restore()
        arms.append(losses)
    true, other = arms
    gains = [second - first for first, second in zip(true, other, strict=False)][len(true) // 3 :]
    if len(gains) < 5 or not all(map(math.isfinite, gains)):
        raise Unjudged(f"{len(true)} steps are too few to tell{more}")
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    usual = abs(statistics.fmean(other[len(true) // 3 :]))
    call = seen.watched.losses[0]
    samples = len(true) * max(1, len(call.target) if call.target.ndim else 1)
    lower, about = (units.percent(value / (usual or math.inf)) for value in (mean, 2 * error))
    figure = f"the loss is {lower} (± {about}) lower than with shuffled labels"
    if mean > 3 * error and mean > 0.01 * usual:
        return _judged(figure)
    needed = 30 * call.input.shape[1] if call.name in ("cross_entropy", "nll_loss") and call.input.ndim > 1 else 500
    figure += f", after {samples} targets"
    if samples >= needed / 3 and mean + 2 * error < 0.05 * usual:
        sure, few = _judged(figure, "labels_carry_nothing"), f"{figure}; with {needed} targets this would be a fault{more}"
        return sure if samples >= needed else replace(sure, passed=None, figure=few)
    raise Unjudged(f"{figure}: too few to tell{more}")


_JUDGES: dict[str, Callable[[Training, Seen, Line, dict[str, Check]], Check]] = {
    "inputs": _inputs,
    "duplicates": _duplicates,
    "initial loss": _initial_loss,
    "active units": _active_units,
    "gradient flow": _gradient_flow,
    "batch independence": _batch_independence,
    "modes": _modes,
    "accumulation": _accumulation,
    "overfitting": _overfitting,
    "label alignment": _label_alignment,
}
assert list(_JUDGES) == list(CHECKS)
