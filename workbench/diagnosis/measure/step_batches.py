"""The micro-batches of a step, of which samples can be left out: by their rows, or by collating anew those that are left."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.diagnosis.analysis.step_replay import Trial
from workbench.harness.batches import map_samples, tensors_of
from workbench.timeline.loops import samples_in

ALONE = 256
"""Most samples of a step that are left out one at a time."""

MOST_BLAMED = 4
"""Most samples that are left out together."""

Place = tuple[int, int]
"""A sample: the number of its micro-batch, and its place there."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Which samples of a step are to blame for what it did."""

    places: Sequence[Place] = ()
    """The samples; none = it takes more than a few, or they cannot be left out."""
    trials: Sequence[Trial] = ()
    """The step without the first of them, without the first two, and so on."""
    unknown: bool = False
    """Is it not known how the samples are arranged in a micro-batch?"""
    none_finite: bool = False
    """Was the step never finite, whichever sample was left out?"""


class StepBatches:
    """The micro-batches of a step.

    Attributes:
        counts: samples of each.
    """

    def __init__(
        self, batches: Sequence[Any], samples: Sequence[int], loaders: Sequence["DataLoader[Any]"], micro_batch: int, *, collated: bool
    ) -> None:
        """Read the samples again where the task collates them itself: a collate may join them, as graphs are joined.

        Args:
            batches: the micro-batches.
            samples: indices of the samples of all; those of a stream are not known.
            loaders: of each micro-batch.
            micro_batch: samples of each, as its loader takes them from the dataset.
            collated: has the task a collate of its own?
        """
        self._batches, self._loaders, self._indices = list(batches), list(loaders), list(samples)
        self._samples: list[list[Any] | None] = [None] * len(self._batches)
        if collated and len(samples) == micro_batch * len(batches) <= ALONE:
            parts = [samples[i * micro_batch : (i + 1) * micro_batch] for i in range(len(batches))]
            self._samples = [_read_again(*each) for each in zip(batches, parts, loaders, strict=True)]
        self.counts = [
            samples_in(batch, micro_batch) or 0 if known is None else micro_batch
            for batch, known in zip(batches, self._samples, strict=True)
        ]

    def number(self, place: Place) -> int:
        """The index of a sample in its dataset, or, if that is not known, where it is in the step."""
        at = sum(self.counts[: place[0]]) + place[1]
        return self._indices[at] if at < len(self._indices) else at

    def blame(
        self, trial: Callable[[Sequence[Place], Sequence[Any]], Trial], ordinary: Callable[[Trial], bool], time_left: Callable[[], float]
    ) -> Blame:
        """Find the samples without which the step is an ordinary one: leave out the one whose absence helps most, then further ones.

        Args:
            trial: (samples that are left out, micro-batches without them) → what the step does.
            ordinary: is that what steps do?
            time_left: seconds that are left.
        """
        out: list[Place] = []
        trials: list[Trial] = []
        if not self.separable:
            return Blame()
        for _ in range(MOST_BLAMED):
            left = self.left(out)
            best: tuple[tuple[bool, float], Place, Trial] | None = None
            for place in left:
                if time_left() <= 0:
                    return Blame(trials=trials)
                if (changed := self.without([*out, place])) is None:
                    return Blame(unknown=True)
                tried = trial([*out, place], changed)
                loss = math.inf if math.isnan(tried.loss) or math.isnan(tried.gradient) else tried.loss
                score = (not ordinary(tried), loss)  # a sample may stand out by its gradient alone
                if best is None or score < best[0]:
                    best = (score, place, tried)
            if best is None:
                return Blame()
            if math.isinf(best[0][1]):  # several are not finite: those that are not by themselves
                return Blame([place for place in left if not self.finite(*place)], trials, none_finite=True)
            out.append(best[1])
            trials.append(best[2])
            if ordinary(best[2]):
                return Blame(out, trials)
        return Blame()

    @property
    def separable(self) -> bool:
        """Are there few enough samples to leave each out, and several in each micro-batch?"""
        return sum(self.counts) <= ALONE and min(self.counts) > 1

    def left(self, out: Sequence[Place]) -> list[Place]:
        """The samples that could be left out beside those that are, so that no micro-batch becomes empty."""
        places = [[(part, place) for place in range(count) if (part, place) not in out] for part, count in enumerate(self.counts)]
        return [place for rest in places if len(rest) > 1 for place in rest]

    def without(self, out: Sequence[Place]) -> list[Any] | None:
        """The micro-batches without some samples; None where it is not known how the samples are arranged in one."""
        changed = list(self._batches)
        for part in {part for part, _ in out}:
            rest = [place for place in range(self.counts[part]) if (part, place) not in out]
            known = self._samples[part]
            if known is not None:
                try:
                    changed[part] = self._loaders[part].collate_fn(copy.deepcopy([known[place] for place in rest]))
                except Exception:  # the user's code, which need not take fewer samples
                    return None
            elif (cut := map_samples(lambda rows, rest=rest: _chosen(rows, rest), changed[part], self.counts[part])) is not None:  # type: ignore[misc]
                changed[part] = cut
            else:
                return None
        return changed

    def finite(self, part: int, place: int) -> bool:
        """Are all numbers of a sample finite?"""
        if (known := self._samples[part]) is not None:
            return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(known[place]))
        rows = [tensor for tensor in tensors_of(self._batches[part]) if tensor.ndim and len(tensor) == self.counts[part]]
        return all(bool(torch.isfinite(tensor[place]).all()) for tensor in rows)


def _chosen(rows: Any, places: list[int]) -> Any:
    """What a tensor, an array or a list has at some places."""
    return type(rows)(rows[place] for place in places) if isinstance(rows, list | tuple) else rows[places]


def _read_again(batch: Any, samples: Sequence[int], loader: "DataLoader[Any]") -> list[Any] | None:
    """The samples of a batch, read again; None where they make another batch, as by random augmentation."""
    dataset: Any = loader.dataset
    try:
        several = getattr(dataset, "__getitems__", None)
        known = list(several(list(samples))) if several else [dataset[index] for index in samples]
        again = tensors_of(loader.collate_fn(copy.deepcopy(known)))
    except Exception:  # the user's code
        return None
    before = tensors_of(batch)
    same = len(again) == len(before) and all(_equal(*pair) for pair in zip(again, before, strict=True))
    return known if same and len(known) == len(samples) else None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Are two tensors the same, with NaN in the same places?"""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout or one.layout != torch.strided:
        return False
    return bool(((one == other.to(one.device)) | ((one != one) & (other != other).to(one.device))).all())
