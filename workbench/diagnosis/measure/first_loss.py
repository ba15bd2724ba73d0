"""The check of the first loss of `wb.sanity`: whether it is that of chance, and whether the loss is given what it needs."""

import math

from torch import Tensor

from workbench.diagnosis.analysis.sanity import Check, judged
from workbench.diagnosis.measure.checked_training import Line, Seen, Training, Unjudged
from workbench.diagnosis.measure.watched_forward import ELEMENTWISE


def initial_loss(training: Training, seen: Seen, line: Line, done: dict[str, Check]) -> Check:
    loss, calls = seen.losses[0], seen.watched.losses
    for call in calls:
        if outside := call.outside():
            return judged(f"the targets of {call.name} lie in {outside}", "targets_out_of_range")
    if calls:
        call = calls[0]
        first, (low, high) = call.input.float(), (float(call.input.min()), float(call.input.max()))
        if call.name == "cross_entropy" and first.ndim > 1 and 0 <= low <= high <= 1:
            for dim, over in ((1, ""), (0, " over the batch, not over the classes")):
                if bool(((first.sum(dim) - 1).abs() < 1e-3).all()):
                    return judged(f"the logits lie in {low:.2g} … {high:.2g} and add up to 1{over}", "softmax_before_cross_entropy")
        if call.name == "nll_loss" and float(first.logsumexp(1).abs().max()) > 1e-2:
            return judged("the inputs of nll_loss are not log-probabilities", "no_log_softmax")
        sigmoid = call.source in ("Sigmoid", "Softmax")  # logits of a fresh model may lie between 0 and 1 as well
        if call.name == "binary_cross_entropy_with_logits" and (sigmoid or (first.numel() > 8 and 0 < low < 0.5 < high < 1)):
            return judged(f"all logits lie in {low:.2g} … {high:.2g}", "sigmoid_before_logits_loss", sure=sigmoid)
        if call.name in ELEMENTWISE and call.input.shape != call.target.shape:
            shapes = f"outputs of {list(call.input.shape)} and targets of {list(call.target.shape)}"
            if math.prod(whole := (first - call.target.float()).shape) > max(first.numel(), call.target.numel()):
                return judged(f"{call.name} is given {shapes}, and compares {list(whole)}", "broadcast_targets")
    if (given := seen.watched.divergence) is not None and float(given.max()) > 1e-3:
        sums = [given.float().sum(dim) for dim in (-1, 1) if given.ndim > 1]
        probabilities = float(given.min()) >= 0 and any(bool(((sum_ - 1).abs() < 1e-3).all()) for sum_ in sums)
        figure = f"the inputs of kl_div are {'probabilities' if probabilities else 'above 0'}, not log-probabilities"
        return judged(figure, "no_log_softmax", sure=probabilities)
    if seen.watched.broadcast:
        output, target = seen.watched.broadcast
        figure = f"the loss subtracts targets of {target} from outputs of {output}, and gets {[output[0]] * 2}"
        return judged(figure, "broadcast_targets", sure=False)
    if math.isinf(loss) or (math.isnan(loss) and training.loss is not None):
        return judged(f"the first loss is {loss}", "nonfinite_loss")
    if math.isnan(loss):
        raise Unjudged("the step returns no loss: end step(batch) with `return loss`")
    one = calls[0] if calls and len(calls) % len(seen.batches) == 0 and len(calls) == len(seen.batches) else None
    if one is None:
        raise Unjudged(f"{loss:.3g}; what chance gives is known only of a loss with a single call of torch's losses")
    mean, targets = one.mean(), one.targets
    ratio = loss / mean if mean else math.nan
    if targets and min(abs(ratio + 1), abs(ratio / targets + 1)) < 0.01:
        return judged(f"{loss:.4g}, and torch's {one.name} of the same outputs and targets is {mean:.4g}", "negated_loss")
    if targets > 1 and abs(ratio / targets - 1) < 0.01:
        return judged(f"{loss:.4g}, {ratio:.4g} times the mean of {targets} targets", "sum_reduction")
    if targets > 1 and abs(ratio * targets - 1) < 0.01:
        return judged(f"{loss:.4g}, the mean {mean:.4g} divided by {targets} again", "wrong_reduction")
    if one.name == "mse_loss" and one.input.shape == one.target.shape and one.target.ndim and len(one.target) > 1:
        return _beside_variance(mean, one.target.double())
    if one.name not in ("cross_entropy", "nll_loss") or one.input.ndim < 2:
        raise Unjudged(f"{loss:.3g}; what chance gives is known of cross entropy, and of the mean squared error of a batch, alone")
    chance = math.log(one.input.shape[1])
    figure = f"{mean:.3f}, chance is ln({one.input.shape[1]}) = {chance:.3f}"
    if mean > 1.5 * chance + 1:
        if seen.watched.normalises:
            raise Unjudged(f"{figure}: logits of normalised vectors have a scale that is chosen, and perhaps a margin")
        return judged(figure, "large_logits")
    if mean < 0.5 * chance:
        raise Unjudged(f"{figure}: the weights are trained already, or the inputs tell the labels")
    return judged(figure)


def _beside_variance(mean: float, targets: Tensor) -> Check:
    """The first mean squared error beside that of the targets' mean, the best that can be said without the inputs."""
    variance = float((targets - targets.mean(0)).square().mean())
    figure = f"{mean:.3g}, the variance of the targets is {variance:.3g}"
    if not mean >= 0.5 * variance:
        raise Unjudged(f"{figure}: the weights are trained already, or the inputs tell the targets")
    if mean > 10 * variance:
        raise Unjudged(f"{figure}: normalise the targets, or make the last layer's initial weights smaller")
    return judged(figure)
