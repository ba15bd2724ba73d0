"""Computes the exact noise scale of a small model from the gradient of each sample, by torch.func, or one by one where that fails."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset

from workbench.batch.analysis.noise_scale import LEVEL, NoiseScale
from workbench.batch.analysis.noise_scale_estimator import NoiseScaleError, fieller_interval
from workbench.core.checks import whole_number
from workbench.core.units import several
from workbench.runs.errors import is_out_of_memory
from workbench.runs.spec import RunSpec
from workbench.runs.task import resolve
from workbench.train.loader import to_device
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import choose_device
from workbench.train.trainer import build_model, loss_of

FOLDS = 20
"""Folds of the jackknife that gives the interval."""
CHUNK = 64
"""Samples whose gradients are held at once."""

Gradients = dict[str, Tensor]


def exact_noise_scale(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batches: Iterable[Any], *, dataset_size: int | None = None, level: float = LEVEL
) -> NoiseScale:
    """B = tr Σ / |G|² over samples, with the model's present weights, which do not change.

    Args:
        model: in the mode in which it trains.
        loss: `loss(model, batch)`, the mean over the batch.
        batches: of tensors whose first dimension is the sample; as many samples' gradients are held at once as a batch has.
        dataset_size: samples of the dataset; where the batches hold all of them, the result is exact. None = they are some of many.
        level: share of intervals that contain the true value.

    Raises:
        NoiseScaleError: a sample's gradient depends on its batch (batch norm), or fewer than two samples.
    """
    _check(model)
    folds = [_Fold() for _ in range(FOLDS)]
    notes: list[str] = []
    seen = 0
    for batch in batches:
        _check_batch(batch)
        gradients = per_sample_gradients(model, loss, batch, notes).values()
        rows = torch.cat([gradient.detach().flatten(1) for gradient in gradients], 1).double()
        for fold in range(FOLDS):
            folds[(fold + seen) % FOLDS].add(rows[fold::FOLDS])
        seen += len(rows)
    used = [fold for fold in folds if fold.count]
    count = sum(fold.count for fold in used)
    if count < 2:
        raise NoiseScaleError(f"{several(count, 'sample')}: at least 2 are needed")
    population = dataset_size if dataset_size and dataset_size >= count else None
    squares, trace = _estimate(used, population)
    if not (math.isfinite(squares) and math.isfinite(trace)):
        raise NoiseScaleError("gradients of single samples are NaN or inf: look at the loss of these weights")
    value = trace / squares if squares > 0 else math.inf
    low, high = (value, value) if population == count else _interval(used, population, level)
    return NoiseScale(
        b_simple=value,
        low=min(low, value),
        high=max(high, value),
        squares=squares,
        trace=trace,
        steps=1,
        steps_needed=0,
        micro_batch=1,
        groups=count,
        level=level,
        dataset_size=dataset_size,
        exact=True,
        notes=tuple(dict.fromkeys(notes)),
    )


def per_sample_gradients(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, notes: list[str] | None = None) -> Gradients:
    """The gradient of each sample of a batch, by parameter name; the first dimension is the sample.

    Args:
        model: its weights do not change.
        loss: `loss(model, batch)`, the mean over the batch.
        batch: tensors whose first dimension is the sample.
        notes: get a line if torch.func fails, and samples are taken one by one.
    """
    whole = _Loss(model, loss)
    weights = {name: weight.detach() for name, weight in whole.named_parameters() if weight.requires_grad}

    def loss_of_sample(values: Gradients, sample: Any) -> Tensor:
        value: Tensor = functional_call(whole, values, (tree_map(lambda part: part.unsqueeze(0), sample),))
        return value

    try:
        with sdpa_kernel(SDPBackend.MATH):  # the other backends do not support vmap
            gradients: Gradients = vmap(grad(loss_of_sample), in_dims=(None, 0), randomness="different")(weights, batch)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        if notes is not None:
            notes.append(f"one sample after the other, since torch.func cannot take them together ({str(error).splitlines()[0]:.80})")
        each = [_sample_gradient(whole, tree_map(lambda part, i=i: part[i : i + 1], batch)) for i in range(len(tree_leaves(batch)[0]))]
        gradients = {name: torch.stack([gradient[name] for gradient in each]) for name in weights}
    return gradients


def _sample_gradient(whole: "_Loss", batch: Any) -> Gradients:
    weights = {name: weight for name, weight in whole.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(whole(batch), list(weights.values()), allow_unused=True)
    pairs = zip(weights.items(), gradients, strict=True)
    return {name: torch.zeros_like(weight) if gradient is None else gradient for (name, weight), gradient in pairs}


class _Loss(nn.Module):
    """A model and its loss as one module, for functional_call: the loss sees the model with the given weights."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch).reshape(())


class _Fold:
    """A fold of the samples: their number, the sum of their gradients, and of the squares."""

    def __init__(self) -> None:
        self.count, self.squares, self.total = 0, 0.0, torch.zeros(())

    def add(self, rows: Tensor) -> None:
        self.count += len(rows)
        self.squares += float(rows.square().sum())
        self.total = self.total + rows.sum(0)


def _estimate(folds: list[_Fold], population: int | None) -> tuple[float, float]:
    """|G|² and tr Σ, unbiased; exact where the samples are the whole population."""
    count = sum(fold.count for fold in folds)
    small = sum(fold.squares for fold in folds) / count
    big = float((torch.stack([fold.total for fold in folds]).sum(0) / count).square().sum())
    squares, trace = (count * big - small) / (count - 1), count / (count - 1) * (small - big)
    if population:
        squares, trace = squares + trace / population, trace * (1 - 1 / population)
    return squares, trace


def _interval(folds: list[_Fold], population: int | None, level: float) -> tuple[float, float]:
    """Fieller's interval of the jackknife's pseudo-values, one per fold, with the correction for a finite population."""
    count = sum(fold.count for fold in folds)
    if len(folds) < 2 or any(count - fold.count < 2 for fold in folds):
        return 0.0, math.inf
    whole = np.array(_estimate(folds, population))
    without = np.array([_estimate([fold for fold in folds if fold is not left], population) for left in folds])
    missing = 1 - count / population if population else 1.0
    squares, trace = (whole + math.sqrt(missing) * (len(folds) - 1) * (without.mean(0) - without)).T
    return fieller_interval(trace, squares, level)


def _check(model: nn.Module) -> None:
    if not any(weight.requires_grad for weight in model.parameters()):
        raise NoiseScaleError("the model has no parameter that requires a gradient: nothing is trained, so there is no noise to measure")
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats):
            raise NoiseScaleError(
                f"the model has a batch norm ({name or type(part).__name__}): a sample's gradient depends on the others of its batch, so "
                "it has none of its own. Measure without exact=True, which compares whole batches; or put the model into eval mode, which "
                "uses the running statistics, and is another gradient"
            )


def _check_batch(batch: Any) -> None:
    if any(not isinstance(leaf, Tensor) or not leaf.dim() for leaf in tree_leaves(batch)):
        raise NoiseScaleError(
            "the gradients of single samples need batches of tensors whose first dimension is the sample, and this one holds something "
            "else: measure without exact=True"
        )


def exact_noise_of(spec: RunSpec, *, samples: int | None = None) -> NoiseScale:
    """The exact noise scale of a spec's task with the weights that a run begins with, in fp32, here; of all samples, or of some at random.

    Raises:
        NoiseScaleError: a sample's gradient depends on its batch (batch norm).
        TaskError: the task cannot be built.
        ValueError: not a number of samples, or none with a stream.
    """
    if samples is not None:
        whole_number("samples", samples, least=2, also=", or None for all of the dataset")
    task, device = resolve(spec.task), choose_device(spec, 0, 1)
    seed_all(spec.seed)
    model = build_model(task).to(device)
    dataset: Any = task.dataset()
    size: int | None = None
    if isinstance(dataset, IterableDataset):
        if samples is None:
            raise ValueError(
                "the task's dataset is a stream, which does not end by itself: say how many samples, noise_scale(…, samples=1000)"
            )
    else:
        size = len(dataset)
        if samples is not None and samples < size:
            dataset = Subset(dataset, torch.randperm(size)[:samples].tolist())
    loader = DataLoader(dataset, batch_size=min(CHUNK, samples or CHUNK), collate_fn=task.collate)

    def batches() -> Any:
        left = samples if size is None else size
        for batch in loader:
            if left is None or left <= 0:
                return
            left -= loader.batch_size or 1
            yield to_device(batch, device)

    return exact_noise_scale(model, lambda module, batch: loss_of(task, module, batch), batches(), dataset_size=size)
