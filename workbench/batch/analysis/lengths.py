"""The lengths of a dataset's samples in the order of a training: which steps do not fit, what padding costs, and what-ifs; arithmetic."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.data.analysis.packing import pack

WINDOW = 50
"""Micro-batches whose samples are sorted by length before they are cut into batches, as loaders that bucket do."""


class LengthsError(ValueError):
    """Lengths that cannot be read or planned with; the message says what was given, what is allowed and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan(JsonDataclass):
    """One way to make batches of the same samples."""

    name: str
    """"as it is", "bucketed" or "packed"."""
    longest: int
    """Tokens of a sample in the longest batch."""
    tokens: int
    """Places in all batches, padding included."""
    padding: float
    """Share of the places that no token has."""
    seconds: float
    """Of the micro-batches of all steps by the roofline, on average over the ranks."""
    needed: int
    """Bytes of the longest batch."""
    fits: bool
    """Does it fit?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLengths(JsonDataclass, display.Shown):
    """What the lengths of a dataset's samples do to the steps of a training: predicted, nothing was trained."""

    title: str
    device: str
    capacity: int
    """Bytes that a rank may use."""
    micro_batch: int
    steps: int
    """Optimizer steps that were looked at, from the first."""
    lengths: tuple[int, ...]
    """Longest micro-batch of each step, over all ranks; padded to it."""
    memory: Mapping[int, int]
    """Length → predicted bytes of a step with such a micro-batch, by a dry run each."""
    fitting: int
    """Longest of the dataset's batches that fits; 0 = none."""
    plans: tuple[LengthPlan, ...]
    """As it is, and the what-ifs."""

    @property
    def first_over(self) -> int | None:
        """The first step, from 1, whose batch does not fit; None = all fit."""
        return next((step for step, length in enumerate(self.lengths, 1) if length > self.fitting), None)

    @property
    def over(self) -> int:
        """Steps that do not fit."""
        return sum(length > self.fitting for length in self.lengths)

    def __getitem__(self, name: str) -> LengthPlan:
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise KeyError(f"no plan {name!r}: there are {', '.join(plan.name for plan in self.plans)}")

    def gain(self, name: str) -> float:
        """How many times faster an epoch is than as it is.

        Args:
            name: of a plan.
        """
        return self["as it is"].seconds / self[name].seconds

    @property
    def word(self) -> str:
        """What happens first."""
        longest = max(self.lengths)
        if self.first_over is None:
            text = f"all {self.steps:,} steps fit: the longest batch has {longest:,} tokens a sample, at step "
            text += f"{self.lengths.index(longest) + 1:,}"
        else:
            length = self.lengths[self.first_over - 1]
            text = (
                f"step {self.first_over:,} will run out of memory: its longest batch has {length:,} tokens a sample, and {self.fitting:,} "
                f"fit {self.device}; so will {self.over - 1:,} more of {self.steps:,} steps"
            )
        waste = self["as it is"].padding
        best = max((plan for plan in self.plans if plan.fits), key=lambda plan: self.gain(plan.name), default=self["as it is"])
        gain = f"; {best.name}: {units.times(self.gain(best.name))} faster" if best.name != "as it is" else ""
        return f"{text}. {units.percent(waste)} of all places are padding{gain}"

    @property
    def table(self) -> display.Table:
        """A row per way to make batches."""
        rows = [
            [plan.name, f"{plan.longest:,}", units.percent(plan.padding), units.bytes_(plan.needed), "yes" if plan.fits else "NO",
             units.times(self.gain(plan.name))]
            for plan in self.plans
        ]  # fmt: skip
        return display.Table(
            columns=("batches", "longest", "padding", "memory of the longest", "fits", "predicted speed"),
            rows=rows,
            title=f"{self.title} on {self.device}: predicted from the lengths of its samples",
            note=self.word,
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per step: its longest batch, and whether it fits."""
        return display.frame({"step": step, "length": each, "fits": each <= self.fitting} for step, each in enumerate(self.lengths, 1))

    def __repr__(self) -> str:
        return f"BatchLengths({self.title!r}: {'all fit' if self.first_over is None else f'step {self.first_over} does not fit'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRuns:
    """What dry runs say of micro-batches by the length of their longest sample."""

    nodes: Mapping[int, float]
    """Length → seconds of a micro-batch."""
    bytes_at: Callable[[int], int]
    """Length → bytes of a step with such a batch."""

    def seconds(self, lengths: Any) -> float:
        """Of micro-batches of these lengths together; between the nodes by a parabola, since attention is one in the length."""
        nodes = sorted(self.nodes)
        factors = np.polyfit(nodes, [self.nodes[size] for size in nodes], min(2, len(nodes) - 1))
        return float(np.maximum(np.polyval(factors, lengths), 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGrid:
    """The lengths of all samples in the order in which the ranks take them: epoch, rank, step, micro-batch, sample."""

    sizes: Any

    @classmethod
    def of(cls, sizes: Sequence[int], orders: Sequence[Sequence[int]], *, ranks: int, accumulation: int, micro_batch: int) -> "LengthGrid":
        """Of samples and the indices that each rank takes in each epoch, rank after rank; what makes no whole step is left out.

        Args:
            sizes: length of each sample.
            orders: indices of each rank in the first epoch, then in the second …
            ranks: that share the samples.
            accumulation: micro-batches of a step.
            micro_batch: samples of each.
        """
        per_rank = accumulation * micro_batch
        whole = len(orders[0]) // per_rank
        taken = np.array([list(order)[: whole * per_rank] for order in orders])
        return cls(sizes=np.array(sizes)[taken].reshape(-1, ranks, whole, accumulation, micro_batch))

    @property
    def longest(self) -> list[int]:
        """Of each micro-batch, without repetition, rising."""
        found: list[int] = np.unique(self.sizes.max(-1)).tolist()
        return found

    def of_steps(self, count: int) -> tuple[int, ...]:
        """Longest sample of the first steps, over ranks and micro-batches."""
        return tuple(map(int, self.sizes.max((1, 3, 4)).reshape(-1)[:count]))

    def plans(self, count: int, dry: DryRuns, room: int) -> tuple[LengthPlan, ...]:
        """As it is, and the what-ifs, of the first steps of all ranks, rank after rank.

        Args:
            count: of steps.
            dry: memory and seconds over the length.
            room: bytes that may be used.
        """
        _, ranks, _, accumulation, micro = self.sizes.shape
        own = np.moveaxis(self.sizes, 1, 0).reshape(ranks, -1, accumulation, micro)[:, :count].reshape(-1, micro)
        bucketed = _bucketed(own)
        plans = (
            _plan("as it is", own.max(1), own, dry, room),
            _plan("bucketed", *bucketed, dry, room),
            _packed(own, own.shape[1], dry, room),
        )
        return tuple(dataclasses.replace(plan, seconds=plan.seconds / ranks) for plan in plans)


def _plan(name: str, longest: Any, samples: Any, dry: DryRuns, room: int) -> LengthPlan:
    places = int(longest.sum()) * samples.shape[1]
    memory = dry.bytes_at(int(longest.max()))
    return LengthPlan(
        name=name,
        longest=int(longest.max()),
        tokens=places,
        padding=1 - float(samples.sum()) / places,
        seconds=dry.seconds(longest),
        needed=memory,
        fits=memory <= room,
    )


def _bucketed(samples: Any) -> tuple[Any, Any]:
    """Longest samples of micro-batches, and these, if each window of them is sorted by length."""
    micro = samples.shape[1]
    flat = samples.reshape(-1)
    sorted_ = np.concatenate([np.sort(flat[start : start + WINDOW * micro]) for start in range(0, len(flat), WINDOW * micro)])
    again = sorted_.reshape(-1, micro)
    return again.max(1), again


def _packed(samples: Any, micro: int, dry: DryRuns, room: int) -> LengthPlan:
    """Whole samples in rows as long as the longest of them, as many rows in a batch as keep its places."""
    row = int(samples.max())
    rows = pack(samples.reshape(-1).tolist(), row).rows
    batches = math.ceil(rows / micro)
    memory = dry.bytes_at(row)
    places = rows * row
    return LengthPlan(
        name="packed",
        longest=row,
        tokens=places,
        padding=1 - float(samples.sum()) / places,
        seconds=dry.seconds(np.full(batches, row)) * rows / (batches * micro),
        needed=memory,
        fits=memory <= room,
    )
