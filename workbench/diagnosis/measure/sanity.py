"""Makes the checks of `wb.sanity` in this process, and restores the training: each check tries it and measures one figure."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core import units
from workbench.diagnosis.analysis.sanity import CHECKS, Check, judged
from workbench.diagnosis.measure.checked_training import FEW, Line, Seen, Training, Unjudged, observe, plain_name
from workbench.diagnosis.measure.first_loss import initial_loss
from workbench.diagnosis.measure.sanity_learning import LARGE_RMS, label_alignment, not_finite, overfitting
from workbench.diagnosis.measure.token_targets import LEAK
from workbench.diagnosis.measure.watched_forward import Watched, module_outputs
from workbench.harness.batches import map_tensors, tensors_of
from workbench.harness.discover import discover
from workbench.harness.feed import Exhausted
from workbench.harness.observe import uncompiled
from workbench.harness.restore import SavedState
from workbench.timeline.loops import samples_in
from workbench.train.random_numbers import seed_all

DEAD, MANY_DEAD = 0.9, 0.5
"""Fractions of a layer's ReLUs that are never active, from which on it is a fault, and from which on it is doubtful. A fresh layer on
normalised inputs has few; but in a deep one with torch's default weights activations hardly depend on the input, so about half of its units
are off whatever the input is, and most of them become active while it learns."""
COPIES = 0.25
"""Fraction of a batch's samples that are exact copies of others."""
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
                with _without_named_warnings():
                    seen = observe(training, seconds=line.left / 4)
            except (KeyboardInterrupt, Exhausted):
                raise
            except Exception as error:
                if "does not require grad and does not have a grad_fn" in str(error):
                    yield Check(name="gradient flow", passed=False, figure="the loss does not depend on any parameter", cause="detached")
                else:
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
                    with _without_named_warnings():
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


@contextlib.contextmanager
def _without_named_warnings() -> Iterator[None]:
    """Inside, torch does not warn of what a check names, targets of another shape, nor of the nested tensors that its own encoders make."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a target size")
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        yield


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _inputs(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    batches = [tensor for batch in seen.batches for tensor in tensors_of(batch)]
    values = [tensor.detach().double() for tensor in batches if tensor.is_floating_point() and tensor.numel()]
    bad = sum(map(not_finite, seen.batches))
    if bad:
        return judged(f"{bad} values are NaN or infinite in {len(seen.batches)} batches", "nonfinite_inputs")
    given = tensors_of(seen.watched.root or ())
    fed = [tensor.detach().double() for tensor in given if tensor.is_floating_point() and tensor.numel() > 1] or values
    scales = [(float(tensor.square().mean().sqrt()), float(tensor.std()) if tensor.numel() > 1 else 0.0) for tensor in fed]
    used = list(seen.watched.scales.values()) or [(0.0, float(tensor.std())) for tensor in values if tensor.numel() > 1]
    if values and used and max(map(Tensor.numel, fed)) > 1 and not any(spread for _, spread in (*scales, *used)):
        return judged(f"all are {float(fed[0].flatten()[0]):.3g}", "constant_inputs")
    places = seen.watched.scales or dict.fromkeys([""], max(scales, default=(0.0, 0.0)))
    place, (rms, spread) = max(places.items(), key=lambda each: each[1])
    if not rms:
        return judged("whole numbers")
    figure = f"root mean square {rms:.3g}, deviation {spread:.3g}"
    return judged(figure, *(("input_scale", place) if rms > LARGE_RMS else ()))


def _duplicates(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    worst = 0.0
    for batch in seen.batches:
        count = samples_in(batch, training.batch_size)
        tensors = [tensor for tensor in tensors_of(batch) if tensor.ndim and len(tensor) == count]
        if not count or count < 4 or not tensors:
            raise Unjudged("the samples of a batch cannot be told apart" if not tensors else "batches have fewer than 4 samples")
        distinct = {hash(tuple(_content(tensor[row]) for tensor in tensors if tensor[row].numel())) for row in range(count)}
        worst = max(worst, 1 - len(distinct) / count)
    figure = f"{units.percent(worst)} of a batch are copies"
    if worst > COPIES and all(not tensor.is_floating_point() and tensor[0].numel() < 4 for tensor in tensors):
        raise Unjudged(f"{figure}: samples of a few whole numbers are often equal")
    return judged(figure, "duplicate_samples" if worst > COPIES else "")


def _content(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _active_units(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    dead = {place: 1 - float(active.float().mean()) for place, active in seen.watched.active.items()}
    if not dead:
        raise Unjudged("no ReLU was seen")
    place, worst = max(dead.items(), key=lambda each: each[1])
    figure = f"{units.percent(worst)} of the units are never active" if worst else "each unit is active"
    many = worst > MANY_DEAD
    return judged(figure, "dead_units" * many, place * many, sure=worst > DEAD)


def _gradient_flow(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    faults: dict[str, list[str]] = {}
    held = {id(weight) for optimizer in training.optimizers for group in optimizer.param_groups for weight in group["params"]}
    count, fixed, outside_trains = 0, list[str](), False
    for number, model in enumerate(training.models):
        which = training.prefix(number)
        own = {id(weight) for weight in model.parameters()}
        if which and own and held and not own & held:
            if not own & (seen.got | seen.arrived):
                fixed.append(which[:-1])
                continue
            if not any(training.is_frozen(which, name) for name, _ in model.named_parameters()):
                count += len(own)
                faults.setdefault("model_not_in_optimizer", []).append(which[:-1])
                outside_trains = outside_trains or any(part.training for part in model.modules())
                continue
        for path, part in model.named_modules():
            for name, weight in part.named_parameters(recurse=False):
                full = plain_name(f"{path}.{name}")
                if training.is_frozen(which, full):
                    continue
                count += 1
                if cause := _fault(weight, part, seen, held):
                    faults.setdefault(cause, []).append(which + full)
    if not count:
        raise Unjudged("every parameter is frozen on purpose" if training.models else "no model was found: give model=")
    if not faults and (lost := seen.unregistered):  # a fixed network, as of a perceptual loss, may be kept so on purpose
        return judged(f"{units.several(len(lost), 'module')} with weights in no model", "not_registered", _first(lost), sure=False)
    if not faults:
        apart = f"; {', '.join(fixed)} in no optimizer and without a gradient, as a teacher or an averaged copy" if fixed else ""
        return judged(f"all {count} parameters get one{apart}")
    order = (
        *("nonfinite_gradient", "gradients_add_up", "never_stepped", "detached", "frozen", "unused"),
        *("zero_gradient", "not_in_optimizer", "model_not_in_optimizer", "same_units", "cancelled_bias"),
    )
    cause = min(faults, key=order.index)
    names = faults[cause]
    if cause == "gradients_add_up":
        return judged("the gradients of an update are the sum of those of all steps so far", cause)
    of = (
        f"{len(training.models)} models with gradients, but in no optimizer" if cause == "model_not_in_optimizer" else f"{count} parameters"
    )
    figure = f"{len(names)} of {of}" + "".join(f"; {len(rest)} {kind}" for kind, rest in faults.items() if kind != cause)
    doubts = {"never_stepped": not seen.stepped, "cancelled_bias": True, "model_not_in_optimizer": not outside_trains}
    sure = not doubts.get(cause)
    return judged(figure.replace("_", " "), cause, _first(names), sure=sure)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def _fault(weight: Tensor, part: nn.Module, seen: Seen, held: set[int]) -> str:
    if not weight.requires_grad:
        return "frozen"
    if id(weight) in seen.nonfinite:
        return "nonfinite_gradient"
    if id(weight) not in seen.nonzero and id(weight) in seen.arrived:
        return "" if id(weight) in seen.changed - seen.got else "never_stepped"
    if id(weight) not in seen.got:
        return "detached" if id(part) in seen.watched.ran else "unused"
    if id(weight) not in seen.nonzero:
        others = [other for name, other in part.named_parameters(recurse=False) if name != "bias"]
        cancelled = weight is getattr(part, "bias", None) and any(id(other) in seen.nonzero for other in others)
        return "cancelled_bias" if cancelled else "zero_gradient"
    if id(weight) in seen.added_up:
        return "gradients_add_up"
    if held and id(weight) not in held:
        return "not_in_optimizer"
    return "same_units" if id(weight) in seen.same_units else ""


def _rows(value: Any, count: int, sample: int) -> list[Tensor]:
    """What belongs to a sample in a module's output."""
    rows = []
    for tensor in tensors_of(value):
        if tensor.is_nested:
            rows += [row.detach().clone() for row in tensor.unbind()[sample : sample + 1]]
        elif (where := _batch_dim(tensor, count)) is not None:
            rows.append(tensor.detach().select(where, sample).clone())
        elif tensor.ndim and len(tensor) and len(tensor) % count == 0:
            rows.append(tensor.detach().reshape(count, -1, *tensor.shape[1:])[sample].clone())
    return rows


def _batch_dim(tensor: Tensor, count: int) -> int | None:
    return next((dim for dim, size in enumerate(tensor.shape) if size == count), None)


def _change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest relative difference of tensors; infinite where only one of two is NaN or infinite."""
    worst = 0.0
    for old, new in zip(before, after, strict=False):
        if old.is_floating_point() and old.shape == new.shape and old.numel():
            finite = old.isfinite()
            if not torch.equal(finite, new.isfinite()):
                return math.inf
            first, second = (tensor.double().where(finite, 0.0) for tensor in (old, new))
            worst = max(worst, float((first - second).abs().max()) / max(float(first.abs().max()), 1e-12))
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
        with watched.on():
            training.loss(batch)  # it may take gradients of its inputs
        root, samples = watched.root, count
    if root is None or not samples or samples < 2:
        raise Unjudged("the samples of a batch cannot be told apart")
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
    state = SavedState(discover(model))  # each call begins with it: a model may update a codebook or a hidden state

    def rows(value: Any) -> list[Tensor]:
        return _rows(value, count, chosen)

    before = _outputs(model, args, kwargs, 0, rows)
    if not before or not before[-1][1]:
        raise Unjudged("the model's output does not say which part belongs to which sample")
    values = [output for output in before[-1][1] if output.is_floating_point() and output.numel()]
    if values and not any(bool(output.isfinite().any()) for output in values):
        if training.few and math.isfinite(seen.losses[0]):  # they are the first samples of the first batch
            figure = f"the output of {count} samples is NaN or infinite, though the loss of a batch is finite"
            return judged(figure, "batch_leak", before[-1][0])
        raise Unjudged("the model's output is NaN or infinite")
    if _compares_samples(model, args, kwargs, count):
        raise Unjudged("the model compares the samples: its output has a value for each two of them")
    state.restore()
    place, change = _first_change(before, _outputs(model, others, named, 0, rows), LEAK)
    exception = f"; batch norm in {units.several(len(norms), 'module')} mixes samples in training mode, as it should" if norms else ""
    if change > LEAK:
        how = f"changes by {change:.2g} of its size with the others" if math.isfinite(change) else "is NaN or infinite beside copies of it"
        state.restore()
        model.eval()
        before = _outputs(model, args, kwargs, 0, rows)
        state.restore()
        model.eval()
        _, evaluated = _first_change(before, _outputs(model, others, named, 0, rows), LEAK)
        trained = "" if evaluated > LEAK else " in training mode alone, as it should where it updates statistics or a codebook"
        return judged(f"a sample's output {how}{trained}{exception}", "batch_leak", place, sure=not trained)
    return judged(f"changes by {change:.2g} of its size{exception}")


def _compares_samples(model: nn.Module, args: Any, kwargs: Any, count: int) -> bool:
    """Whether an output is [count, count], and with a sample fewer has one fewer both ways, as similarities of samples have."""

    def square(samples: int) -> bool:
        def first(tensor: Tensor) -> Tensor:
            where = _batch_dim(tensor, count)
            return tensor if where is None else tensor.narrow(where, 0, samples)

        with torch.no_grad():
            outputs = tensors_of(model(*map_tensors(first, list(args)), **map_tensors(first, dict(kwargs))))
        return any(tensor.shape[:2] == (samples, samples) for tensor in outputs if not tensor.is_nested)

    return square(count) and square(count - 1)


class _Enough(Exception):
    pass


def _strided(value: Any) -> list[Tensor]:
    """The tensors of a module's output; the parts of a nested one, as torch's encoders make of padding, as a single one."""
    tensors = tensors_of(value)
    return [torch.cat([row.flatten() for row in tensor.unbind()]) if tensor.is_nested else tensor for tensor in tensors]


def _modes(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    if seen.modes:
        return judged("a step changes the mode", "mode_not_restored", seen.modes[0])
    args, kwargs, _ = _inputs_of_model(training, seen, 5)
    model = training.models[0].eval()
    with (watched := Watched([])):  # both: torch's encoders take another path while functions are watched
        before, after = (_outputs(model, args, kwargs, seed, _strided) for seed in (0, 1))
    place, change = _first_change(before, after, 1e-6)
    if change > 1e-6:
        figure = f"two forwards in evaluation mode differ by {change:.2g}"
        meant = watched.noise or ([] if watched.compared else watched.uniform)
        if meant and not watched.dropped:
            return judged(f"{figure}: the model calls {meant[0]}", "random_in_eval", place, sure=False)
        return judged(figure, "random_in_eval", place)
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
        except (KeyboardInterrupt, Exhausted):
            raise
        except Exception as error:
            return judged(f"evaluate fails: {_short(error)}", "error")
        finally:
            handle.remove()
        if any(modes):
            return judged("evaluate runs in training mode", "evaluates_in_train_mode")
        figure += "; evaluate runs in evaluation mode"
    return judged(figure)


def _accumulation(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    if training.loss is None or training.few is None or training.part is None:
        raise Unjudged("a step takes whole batches: give a Task to have this checked")
    model = training.models[0].eval()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    count, parts = FEW, 4
    size = count // parts

    def gradient(batch: Any, seed: int = 0) -> tuple[Tensor, Watched, float, float]:
        watched = Watched(training.models)
        seed_all(seed)
        with watched.on():
            loss = training.loss(batch)  # type: ignore[misc]
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
        flat = torch.cat([(torch.zeros_like(w) if g is None else g).flatten().double() for w, g in zip(weights, grads, strict=True)])
        return flat, watched, training.weight(batch) if training.weight else 1.0, float(loss.detach())

    if not weights or samples_in(training.few(count)) != count:
        raise Unjudged(f"there are no {count} samples")
    whole, watched, _, loss = gradient(training.few(count))
    several = [gradient(training.part(first, first + size)) for first in range(0, count, size)]
    shares = [weight for _, _, weight, _ in several]
    if not sum(shares):
        raise Unjudged(f"none of {count} samples has a target")
    total = torch.stack([part * share for (part, *_), share in zip(several, shares, strict=True) if share]).sum(0) / sum(shares)
    norm = float(whole.norm())
    if not norm or not math.isfinite(norm):
        raise Unjudged("the gradient is zero or not finite")
    if not bool(total.isfinite().all()):
        raise Unjudged(f"the gradient of a micro-batch of {size} samples is not finite")
    difference = float((total - whole).norm()) / norm
    norms = any(isinstance(part, NORMS) for part in model.modules())
    mode = "in evaluation mode" + "; in training mode batch norm makes them differ" * norms
    figure = f"{parts} micro-batches of {size} differ from the batch of {count} by {difference:.2g}, {mode}"
    limit = max(UNEQUAL, *(4 * torch.finfo(weight.dtype).eps for weight in weights))  # bf16 rounds to 0.008
    if difference < limit:
        return judged(figure)
    if float((gradient(training.few(count), seed=1)[0] - whole).norm()) / norm > limit:
        raise Unjudged("model or loss draw random numbers in evaluation mode, too, and others for parts of a batch")
    slope = float(total @ whole) / norm**2
    if float((total - slope * whole).norm()) / norm < limit * 10 and abs(slope * parts - 1) < 0.05:
        several_samples, of_batch = samples_in(seen.batches[0], training.batch_size) or 0, abs(seen.losses[0])
        if several_samples >= 2 * count and of_batch < abs(loss) * several_samples / count / 2:  # it is divided by a number that was 0 or 1
            figure += f"; but the loss of {several_samples} samples is {of_batch:.3g}, of {count} it is {abs(loss):.3g}"
            return judged(figure, "unequal_micro_batches", sure=False)
        return judged(figure, "sum_reduction")
    targets = [sum(call.targets for call in part.losses) for _, part, *_ in several]
    if len(set(targets)) > 1:
        if not all(math.isclose(share * sum(targets), own * sum(shares), rel_tol=1e-6) for share, own in zip(shares, targets, strict=True)):
            return judged(figure, "unequal_micro_batches")
        if any(_lengths(part) != _lengths(watched) for _, part, *_ in several):
            call, independent = watched.losses[0], done.get("batch independence")
            plain = len(watched.losses) == 1 and call.options.get("weight") is None and math.isclose(call.mean(), loss, rel_tol=1e-3)
            certain = plain and independent is not None and independent.passed is True
            return judged(figure, "padding_leak", sure=certain or training.accumulates)
    return judged(figure, "batch_statistics", sure=training.accumulates)


def _lengths(watched: Watched) -> list[torch.Size]:
    """Sizes of one sample in what the model is given: they differ where a batch is padded to another length."""
    return [tensor.shape[1:] for tensor in tensors_of(watched.root or ())]


_JUDGES: dict[str, Callable[[Training, Seen, Line, dict[str, Check]], Check]] = {
    "inputs": _inputs,
    "duplicates": _duplicates,
    "initial loss": initial_loss,
    "active units": _active_units,
    "gradient flow": _gradient_flow,
    "batch independence": _batch_independence,
    "modes": _modes,
    "accumulation": _accumulation,
    "overfitting": overfitting,
    "label alignment": label_alignment,
}
assert list(_JUDGES) == list(CHECKS)
