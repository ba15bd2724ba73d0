"""Finds the tensors, bytes and padding of batches in any container; doubles and shortens batches; caches some of them."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from workbench.timeline.loops import samples_in

MIN_SEQUENCE = 8
"""A dimension with fewer positions is no sequence."""
MAX_FILLER_INSIDE = 0.03
"""The filler value is at no larger fraction of the positions before the padding: 0 among zeros and ones is no padding."""
MIN_PADDING = 0.03
"""A smaller fraction of padding is not reported."""


MAX_CACHED = 8
"""The most batches that are cached, unless they differ in shape."""
MAX_CACHED_VARIED = 64
"""The most if they differ in shape: they take different times, so many are needed for a fair mean."""
MAX_CACHED_BYTES = 2**28
"""The most bytes that are cached, unless a single batch is larger."""


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with `function` applied to each of its tensors; the containers are copied and keep their types."""
    return _map(lambda value: function(value) if isinstance(value, Tensor) else value, batch)


def _map(function: Callable[[Any], Any], batch: Any, whole: Callable[[Any], Any] | None = None) -> Any:
    """Likewise for everything in it that is no container; what `whole` gives for a container, if not None, takes its place."""
    if whole and (done := whole(batch)) is not None:
        return done
    if isinstance(batch, list | tuple):
        values = [_map(function, value, whole) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, MutableMapping):  # copied, not built: Hugging Face's mappings and defaultdict need more than the items
        mapping = copy.copy(batch)
        for key, value in batch.items():
            mapping[key] = _map(function, value, whole)
        return mapping
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        record = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(record, field.name, _map(function, getattr(batch, field.name), whole))  # frozen ones, too
        return record
    return function(batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch, those in objects that are no container (a PackedSequence, a graph) included."""
    tensors: list[Tensor] = []

    def look(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            tensors.extend(leaf for leaf in tree_leaves(vars(value)) if isinstance(leaf, Tensor))
        return value

    _map(look, batch)
    return tensors


def bytes_of(batch: Any) -> int:
    """Bytes of all tensors and arrays of a batch."""
    size = sum(tensor.nbytes for tensor in tensors_of(batch) if tensor.layout == torch.strided)

    def add(value: Any) -> Any:
        nonlocal size
        if not isinstance(value, Tensor) and hasattr(value, "__array_interface__"):
            size += int(getattr(value, "nbytes", 0))
        return value

    _map(add, batch)
    return size


def doubled(batch: Any) -> Any | None:
    """The batch joined to itself, so with each sample twice; None where it is not known how the samples are arranged in it."""
    record = dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    count = samples_in({field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} if record else batch)
    if count is None:
        return _doubled_lists(batch)

    def joined(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)([*part, *part])
        return torch.cat([part, part]) if isinstance(part, Tensor) else part.repeat(2, axis=0)

    return map_samples(joined, batch, count)


def map_samples(function: Callable[[Any], Any], batch: Any, count: int) -> Any | None:
    """The batch with `function` applied to what has an entry per sample; None where it is not known how the samples are arranged in it.

    Understood are tensors and arrays whose first dimension is the sample, and lists with one entry per sample. What goes for the whole
    batch stays: numbers, texts, tensors without dimensions or with a first one of 1.
    """

    def entries(part: Any) -> Any:
        if isinstance(part, Tensor) or hasattr(part, "__array_interface__"):
            if part.ndim == 0 or (part.shape[0] == 1 != count):
                return part
            if part.shape[0] == count:
                return function(part)
        elif part is None or isinstance(part, int | float | str | bytes):
            return part
        raise _InDoubt

    def one_each(part: Any) -> Any:
        if isinstance(part, list | tuple) and len(part) == count and not hasattr(part, "_fields"):
            stacked = any(tensor.ndim and tensor.shape[0] == count for tensor in tensors_of(part))
            return None if stacked else function(part)
        return None

    try:
        return _map(entries, batch, one_each)
    except (_InDoubt, RuntimeError, TypeError, ValueError):  # torch can neither join nor cut a nested or sparse tensor
        return None


class _InDoubt(Exception):
    """It is not known how the samples are arranged in this part."""


def micro_batches_in(batch: Any, backwards: int) -> int:
    """The micro-batches that a batch holds, a list or tuple of batches that are alike, where a step calls backward once for each; else 1.
    A tuple of two is taken for a pair of different batches, such as labelled ones and others.

    >>> x, y = torch.zeros(4, 3), torch.zeros(4)
    >>> micro_batches_in([(x, y), (x, y)], backwards=2), micro_batches_in((x, y), backwards=2), micro_batches_in([(x, y)] * 2, backwards=1)
    (2, 1, 1)
    """
    if batch.__class__ not in (list, tuple) or not 1 < len(batch) == backwards or any(isinstance(part, Tensor) for part in batch):
        return 1
    if batch.__class__ is tuple and len(batch) == 2:
        return 1
    shapes = [[(tensor.shape, tensor.dtype) for tensor in tensors_of(part)] for part in batch]
    alike = bool(shapes[0]) and shapes.count(shapes[0]) == len(shapes) and samples_in(batch[0]) is not None
    return len(batch) if alike else 1


def _doubled_lists(batch: Any) -> Any | None:
    """A batch of lists with one entry per sample (`tuple(zip(*samples))`), or a list of the samples themselves."""
    if not isinstance(batch, list | tuple) or not batch:
        return None
    if all(isinstance(part, Mapping) for part in batch):
        return type(batch)([*batch, *batch])
    if not all(isinstance(part, list | tuple) and part for part in batch) or len({len(part) for part in batch}) > 1:
        return None
    columns = all(_alike(part) for part in batch)
    rows = all(_alike(part) for part in zip(*batch, strict=True))
    if columns == rows:
        return None
    return type(batch)([type(part)([*part, *part]) for part in batch] if columns else [*batch, *batch])


def _alike(parts: Sequence[Any]) -> bool:
    """Are these the same thing of several samples?"""
    return len({(type(part), getattr(part, "ndim", None), getattr(part, "dtype", None)) for part in parts}) == 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Padding:
    """Rows of a tensor that are filled up to one length."""

    lengths: Tensor
    """Of the rows, without what they were filled up with."""
    width: int
    """Of all rows."""
    left: bool = False
    """Were they filled up on the left?"""

    @property
    def share(self) -> float:
        return 1 - float(self.lengths.double().mean()) / self.width

    @property
    def kept(self) -> int:
        """The mean length."""
        return max(1, round(float(self.lengths.double().mean())))


def padding_of(batch: Any) -> float | None:
    """The fraction of the positions of a batch's sequences that only fill them up to one length; None where no padding shows.

    It shows in an attention mask, in rows of integers that end (or begin) with the same one again and again, and in a tensor of lengths
    beyond which another tensor is constant.
    """
    paddings = _paddings(batch)
    if not paddings:
        return None
    longest = max(paddings.values(), key=lambda padding: padding.width * len(padding.lengths))
    return longest.share if longest.share >= MIN_PADDING else None


def trimmed(batch: Any) -> Any | None:
    """The batch with its sequences cut to their mean length, so that it holds as many positions as it would without padding; None if
    no padding shows.

    A cut batch is not right to learn from: it only shows what the padding costs.
    """
    paddings = {width: padding for width, padding in _paddings(batch).items() if padding.share >= MIN_PADDING}
    if not paddings:
        return None

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            padding = next((p for p in paddings.values() if tensor.shape == p.lengths.shape and bool((tensor == p.lengths).all())), None)
            return tensor.clamp(max=padding.kept) if padding else tensor
        square = tensor.shape[-1] == tensor.shape[-2] and tensor.shape[1] in (1, tensor.shape[-1])  # a mask of pairs of positions
        for dimension in range(1, tensor.ndim if square else 2):
            if padding := paddings.get(tensor.shape[dimension]):
                tensor = tensor.narrow(dimension, padding.width - padding.kept if padding.left else 0, padding.kept)
        return tensor.contiguous()

    return map_tensors(cut, batch)


def _paddings(batch: Any) -> dict[int, _Padding]:
    """What fills up the sequences of each width: by a mask, else by their content, else by a tensor of lengths."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.layout == torch.strided and tensor.device.type != "meta"]
    rows = [tensor for tensor in tensors if tensor.ndim == 2 and tensor.shape[1] >= MIN_SEQUENCE]
    paddings: dict[int, _Padding] = {}
    for tensor in _masks(batch):
        paddings.setdefault(tensor.shape[1], _by_mask(tensor))
    for tensor in rows:
        if tensor.dtype in (torch.int32, torch.int64) and tensor.shape[1] not in paddings and (padding := _by_content(tensor)):
            paddings[tensor.shape[1]] = padding
    for lengths in tensors:
        if lengths.ndim == 1 and lengths.dtype in (torch.int32, torch.int64) and len(lengths) and int(lengths.min()) >= 1:
            for tensor in tensors:
                if tensor.ndim >= 2 and tensor.shape[1] not in paddings and _ends_at(tensor, lengths):
                    paddings[tensor.shape[1]] = _Padding(lengths, tensor.shape[1])
    return paddings


def _masks(batch: Any) -> list[Tensor]:
    """Attention masks: what is called so, 1 = a position of the sequence. (A bare tensor of truth values may mean the contrary.)"""
    if not isinstance(batch, Mapping):
        parts = batch if isinstance(batch, list | tuple) else ()
        return [mask for part in parts if isinstance(part, Mapping) for mask in _masks(part)]
    named = [value for key, value in batch.items() if isinstance(key, str) and key.endswith("attention_mask") and isinstance(value, Tensor)]
    return [mask for mask in named if mask.ndim == 2 and mask.shape[1] >= MIN_SEQUENCE]


def _by_mask(mask: Tensor) -> _Padding:
    valid = mask != 0
    return _Padding(valid.sum(1), mask.shape[1], left=bool(valid[:, -1].sum() > valid[:, 0].sum()))


def _by_content(rows: Tensor) -> _Padding | None:
    for left in (False, True):
        values = rows.flip(1) if left else rows
        filler = values[:, -1].mode().values
        run = (values.flip(1) == filler).long().cumprod(1).sum(1)  # of the filler, at the end of each row
        run[run == 1] = 0  # a last sample that happens to be what others are filled up with
        inside = (values == filler).sum(1) - run
        rare = float(inside.sum()) <= MAX_FILLER_INSIDE * values.numel()
        filled = int((run > 1).sum()) >= 2 and float(run.double().mean()) >= MIN_PADDING * rows.shape[1]
        if rare and filled and int(run.max()) > int(run.min()):
            return _Padding(rows.shape[1] - run, rows.shape[1], left)
    return None


def _ends_at(tensor: Tensor, lengths: Tensor) -> bool:
    """Is each row of a tensor constant from its length on, and the longest one as long as the tensor?"""
    if tensor.shape[0] != len(lengths) or tensor.shape[1] < MIN_SEQUENCE or int(lengths.max()) != tensor.shape[1] or not bool(tensor.any()):
        return False
    beyond = torch.arange(tensor.shape[1], device=lengths.device) >= lengths[:, None]
    rest = tensor[beyond.to(tensor.device)]
    return bool(beyond.any()) and bool((rest == rest.flatten()[0]).all())


def tensor_versions(batch: Any) -> list[int]:
    """The version counters of a batch's tensors, which grow when a tensor is written to."""
    return [tensor._version for tensor in tensors_of(batch) if not tensor.is_inference()]


class CachedBatches:
    """Some batches to train on again and again, each time in new containers: a step may take things out of its batch."""

    def __init__(self, *, written: bool = False) -> None:
        """Start empty.

        Args:
            written: does the step write into the tensors of its batch? Then it is given copies.
        """
        self.written = written
        self._held: list[Any] = []
        self._changed: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def first(self) -> Any:
        """A cached batch."""
        return self.give(1)[0]

    @property
    def varied(self) -> bool:
        """Do they differ in shape?"""
        return len({tuple(tuple(tensor.shape) for tensor in tensors_of(batch)) for batch in self._held}) > 1

    def hold(self, batches: Sequence[Any]) -> None:
        """Cache these instead, as far as they fit. Tensors in shared memory are copied, since each takes a file descriptor of a worker."""
        self._held, self._changed = [], {}
        taken = 0
        for batch in reversed(batches):
            size = bytes_of(batch)
            if self._held and taken + size > MAX_CACHED_BYTES:
                break
            taken += size
            self._held.append(map_tensors(lambda tensor: tensor.clone() if tensor.is_shared() else tensor, batch))  # type: ignore[no-untyped-call]
        self._held.reverse()
        if not self.varied:
            del self._held[:-MAX_CACHED]

    def give(self, count: int, change: Callable[[Any], Any] | None = None) -> list[Any]:
        """Some batches to train on, the first always the same."""
        held = self._held
        if change is not None:
            if id(change) not in self._changed:
                self.forget_changed()  # one at a time: they may be twice as large
                self._changed = {id(change): [change, *map(change, held)]}
            held = self._changed[id(change)][1:]
        copied = torch.clone if self.written else lambda tensor: tensor
        return [map_tensors(copied, batch) for batch in islice(cycle(held), count)]

    def forget_changed(self) -> None:
        """Drop what `give` has made with a change."""
        self._changed = {}

    def fitting(self, count: int) -> int:
        """How many of `count` batches may be given at a time, if copies are needed."""
        if not self.written or not self._held:
            return count
        return max(1, min(count, MAX_CACHED_BYTES // max(1, bytes_of(self._held[0]))))
