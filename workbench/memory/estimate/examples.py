"""Makes an example batch with the shapes of a run, and a loss for a model that has none."""

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from workbench.harness.batches import map_tensors, tensors_of
from workbench.memory.estimate.errors import EstimateError, described
from workbench.memory.estimate.values import LIMIT, tells
from workbench.runs.task import Task
from workbench.timeline.loops import samples_in

_TARGET = re.compile("target|label|class|^y$")
"""Parts of names of arguments that hold targets."""
SAMPLES = 16
"""Different samples that are made for a batch; they repeat in it, since only shapes matter."""
COLLATED = 1009
"""Samples that are collated at most; a larger batch gets its shapes from one of so many. A prime: no other dimension is likely to be it."""


def sample_batch(task: Task, count: int) -> Any:
    """A batch of a task's dataset, collated as its loader would; of more than COLLATED samples only the shapes.

    Raises:
        EstimateError: the dataset has no sample, or its samples cannot be collated.
    """
    dataset = task.dataset()
    if isinstance(dataset, IterableDataset):
        samples = list(itertools.islice(dataset, min(count, SAMPLES)))
    else:
        samples = [dataset[i] for i in range(min(count, SAMPLES, len(dataset)))]
    if not samples:
        raise EstimateError(f"the task's dataset, a {type(dataset).__name__}, has no sample: an estimate needs one for its shape")

    def collated(size: int) -> Any:
        return (task.collate or default_collate)([samples[i % len(samples)] for i in range(size)])

    try:
        few = collated(min(count, COLLATED))
        if count <= COLLATED:
            return few
        flat = any(tensor.dim() and tensor.shape[0] > COLLATED for tensor in tensors_of(few))  # tokens of all samples, for instance
        return resized(few, samples=count) if samples_in(few) == COLLATED and not flat else collated(count)
    except Exception as error:
        raise EstimateError(f"the samples of the task's dataset cannot be collated: {type(error).__name__}: {error}") from error


def resized(batch: Any, *, samples: int | None = None, sequence: int | None = None, image: int | None = None) -> Any:
    """A batch of the same kind with other shapes; tensors in it that change have shapes only (torch's meta device) or, where values may
    decide what is done (lengths, masks), the values of samples that repeat, with as much of each sequence filled as before.

    Args:
        batch: of tensors in any containers.
        samples: size of the first dimension.
        sequence: size of each dimension that is as long as the batch's sequences: the second one of its first integer tensor, or of the
            first tensor with three dimensions.
        image: side in pixels: the last two dimensions of tensors with four.

    Raises:
        EstimateError: the batch has no such dimension, or it is flat: its first tensor has the tokens of all samples, for instance.
    """
    tensors = tensors_of(batch)
    count, length = samples_in(batch), _length(tensors)
    if samples is not None and count is None:
        raise EstimateError(f"micro_batch={samples}: cannot determine which dimension of the batch counts samples ({described(batch)})")
    if samples is not None and count is not None and samples != count and tensors[0].dim() and tensors[0].shape[0] > count:
        raise EstimateError(
            f"micro_batch={samples}: the batch has {count} samples, and its first tensor more rows ({described(batch)}), such as the "
            "tokens of all of them; how many it would have is not known: give a batch of that size"
        )
    if sequence is not None and length is None:
        raise EstimateError(f"sequence={sequence}: the batch ({described(batch)}) has no tensor of shape (samples, sequence)")
    if image is not None and not any(tensor.dim() == 4 for tensor in tensors):
        raise EstimateError(f"image={image}: the batch ({described(batch)}) has no tensor of shape (samples, channels, height, width)")

    def other(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if samples is not None and shape and shape[0] == count:
            shape[0] = samples
        if sequence is not None:
            shape[1:] = [sequence if size == length else size for size in shape[1:]]
        if image is not None and len(shape) == 4:
            shape[2:] = [image, image]
        values_matter = tells(tensor)
        if values_matter and sequence is not None and length is not None and _is_lengths(tensor, length):
            tensor = (tensor.long() * sequence // length).to(tensor.dtype)
        if shape == list(tensor.shape):
            return tensor
        return _stretched(tensor, shape) if values_matter else torch.empty(shape, dtype=tensor.dtype, device="meta")

    return map_tensors(other, batch)


def _is_lengths(tensor: Tensor, length: int) -> bool:
    """The lengths of sequences, of which the longest is the batch's? (Or classes, whose values decide nothing.)"""
    return tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64) and int(tensor.max()) == length


def _positions(new: int, old: int, *, repeat: bool) -> Tensor:
    places = torch.arange(new, device="cpu")
    return places % old if repeat else places * old // new


def _stretched(tensor: Tensor, shape: list[int]) -> Tensor:
    """Repeat its rows, each stretched to its new length; more than are worth tracking have shapes only."""
    if math.prod(shape) > LIMIT:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    sides = zip(shape, tensor.shape, strict=True)
    rows, *places = (_positions(new, old, repeat=not dim) for dim, (new, old) in enumerate(sides))
    tensor = tensor.cpu()[rows]
    for dim, index in enumerate(places, 1):
        tensor = tensor.index_select(dim, index)
    return tensor


def _length(tensors: list[Tensor]) -> int | None:
    whole = [tensor for tensor in tensors if tensor.dim() == 2 and not tensor.dtype.is_floating_point]
    deep = [tensor for tensor in tensors if tensor.dim() == 3]
    first = next(iter(whole + deep), None)
    return None if first is None else first.shape[1]


class DefaultLoss:
    """A loss for a model that has none.

    The model gets the batch as its arguments (a mapping by name) or, where it takes fewer, the parts that it takes. The loss is
    `output.loss` or `output["loss"]` if there is one, the output itself if it is one number; the cross-entropy with whole numbers that are
    left over of the batch and fit, the squared error with others that fit; else the mean of the output.

    Attributes:
        how: what it was when it was last computed, in words.
        optimizer: name of the optimizer that the model itself made when it was last trained; "" = none.
    """

    def __init__(self) -> None:
        self.how = self.optimizer = ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        rest: list[Any] = []
        if isinstance(batch, Mapping):
            named = _named(getattr(model, "module", model), batch)
            output, rest = model(**{name: batch[name] for name in named}), [part for name, part in batch.items() if name not in named]
        elif isinstance(batch, list | tuple):
            taken = _taken(getattr(model, "module", model), batch)
            output, rest = model(*batch[:taken]), list(batch[taken:])
        else:
            output = model(batch)
        loss, self.how = _one_number(output, rest)
        return loss


def _named(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Parts of a batch that the model's forward takes by name; all where it takes any name, or none of them."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return list(batch)
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(batch)
    return [name for name in batch if name in parameters] or list(batch)


def _taken(model: nn.Module, batch: list[Any] | tuple[Any, ...]) -> int:
    """Leading parts of a batch that the model's forward takes; one class per sample at the end it takes only by such a name."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return len(batch)
    if any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return len(batch) if len(parameters) > 1 or len(batch) < 2 else 1
    places = [
        parameter
        for parameter in parameters
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    taken = min(len(batch), len(places))
    if 1 < taken == len(batch) and isinstance(batch[-1], Tensor) and batch[-1].dim() == 1 and not batch[-1].dtype.is_floating_point:
        last = places[taken - 1]
        taken -= last.default is not inspect.Parameter.empty and not _TARGET.search(last.name)
    return taken


def _one_number(output: Any, rest: list[Any]) -> tuple[Tensor, str]:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own.mean(), "the one in the model's output"
    floats = [tensor for tensor in _outputs(output) if tensor.dtype.is_floating_point]
    if not floats:
        raise EstimateError(
            f"the model's output, a {type(output).__name__}, has no tensor to make a loss of: give loss=lambda model, batch: …"
        )
    first = floats[0]
    if first.numel() == 1:
        return first.reshape(()), "the output itself"
    for target in rest:
        if not isinstance(target, Tensor):
            continue
        if not target.dtype.is_floating_point and first.shape[:-1] == target.shape and first.dim() > 1:
            return F.cross_entropy(first.flatten(0, -2), target.flatten()), "the cross-entropy of the output and the batch's last part"
        if target.dtype.is_floating_point and first.shape == target.shape:
            return F.mse_loss(first, target), "the squared error of the output and the batch's last part"
    shape = tuple(first.shape)
    if first is output:
        return first.mean(), f"the mean of the output {shape}; loss=lambda model, batch: … gives yours"
    which = f"the first of {len(floats)} tensors of floats" if len(floats) > 1 else "the only tensor of floats"
    return first.mean(), f"the mean of {which} in the output, a {type(output).__name__}: {shape}; loss=lambda model, batch: … gives yours"


def _outputs(output: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping | type):
        return tensors_of([getattr(output, field.name) for field in dataclasses.fields(output)])
    return tensors_of(list(output.values()) if isinstance(output, Mapping) else output)
