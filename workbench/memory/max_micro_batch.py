"""Finds the largest micro-batch that fits a device, from dry runs at two sizes and exact interpolation between them."""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.checks import check_budget
from workbench.core.device import Device
from workbench.core.progress import predicts, tick
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.family import Family
from workbench.memory.analysis.fit import MARGIN, ranks_here, spare_words, usable_memory
from workbench.memory.analysis.whatif import MaxMicroBatch, needed, needed_at_most
from workbench.memory.api import estimate_memory
from workbench.runs.spec import RunSpec
from workbench.runs.target import device_or_batch
from workbench.runs.task import Task, resolve

NODES = (7, 11)
"""Micro-batches of the two dry runs that tell all others; small ones are avoided, since programs and kernels treat them specially."""
ATTEMPTS = 3
"""Pairs of runs, each near the answer of the one before, until one is right; after them the answer is looked for by single runs."""
BUDGET = 60.0
"""Default of `budget_s`: seconds after which no further step of a bisection begins."""
LOOPED = 0.5
"""Growth of a dry run's time, as a fraction of that of the number of samples, from which on the step is said to loop over these. Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WholeDataset(MaxMicroBatch):
    """A MaxMicroBatch where the device could hold more than a rank's share of the dataset, which therefore sets the limit."""

    by_memory: int = 0
    """Samples that the device could hold, from the two dry runs; 0 = not known, since the program depends on the batch."""

    @property
    def word(self) -> str:
        """In a line."""
        return f"micro_batch={self.micro_batch} is the largest that can be trained: the dataset has no more for one optimizer step"

    @property
    def reason(self) -> str:
        """What is left of the memory, and how many samples it would hold, in a line."""
        return f"it fits {self.device}: {self.room}; memory alone would allow " + (
            f"about micro_batch={self.by_memory}" if self.by_memory else "more"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UnfinishedSearch(MaxMicroBatch):
    """A MaxMicroBatch whose budget ended first: `micro_batch` is the largest number tried that fits, and larger ones may fit, too.

    If none was seen not to fit, `next` is `breakdown`.
    """

    budget_s: float
    """Seconds that were given."""
    tried: tuple[int, ...]
    """Numbers of samples of which there was a dry run, ascending."""
    too_many: int = 0
    """The smallest of them that does not fit; 0 = all fit."""
    by_line: int = 0
    """The largest micro-batch by a line through the memory of two of them, which no dry run has checked; 0 = not known. A peak is the
    largest of several lines: beyond the two, the answer is at most that, and between what fits and what does not, at least."""
    looped: bool = False
    """Do dry runs take longer the more samples there are, as where the step loops over them in Python?"""

    @property
    def word(self) -> str:
        """In a line."""
        beyond = f", and micro_batch={self.too_many} does not; numbers between them" if self.too_many else "; larger ones"
        over = f"were not tried, since the budget of {units.seconds(self.budget_s)} is over"
        return f"micro_batch={self.micro_batch} fits {self.device}{beyond} {over}{self.doubt}"

    @property
    def reason(self) -> str:
        """What is left of the memory, what a line predicts, and why dry runs take long, in a line."""
        said = [spare_words(self.capacity, self.spare, self.margin)]
        if self.by_line:
            few, many, most = (self.micro_batch, self.too_many, "at least") if self.too_many else (*self.tried[-2:], "at most")
            line = f"a line through the memory of {few} and {many} samples predicts {most} about micro_batch={self.by_line}"
            said.append(f"{line}, which no dry run has checked")
        if self.looped:
            said.append("a dry run takes longer the more samples there are: the step seems to loop over them in Python")
        return "; ".join([*said, "budget_s=None searches to the end"])


@accept_synonyms
@device_or_batch
@predicts("dry runs of a step with several batches")
def max_micro_batch(
    target: Any,
    device: str | Device,
    *,
    capacity: int | None = None,
    margin: float = MARGIN,
    budget_s: float | None = BUDGET,
    **options: Any,
) -> MaxMicroBatch:
    """Find the largest micro-batch that fits a device, without the device.

    Two dry runs give the memory of every batch size; the answer and the next larger batch size are checked by dry runs. If the program
    depends on the batch, every step of the bisection is a dry run. If the bytes outside the allocator are known only as a range, one more
    finds the largest micro-batch that is certain to fit. For a spec or a task, the answer never exceeds what the dataset has for one
    optimizer step, as with `micro_batch="auto"`; if the dataset sets the limit, the result is a WholeDataset. There is no such limit if a
    batch is given or the dataset is a stream.

    Args:
        target: as in `estimate_memory`.
        device: a name, such as "A100-80GB", a Device, or "cpu"; with a capacity also "cuda" (any GPU).
        capacity: bytes available to one rank; None = the device's memory, of "cpu" this machine's, in equal shares for the ranks.
        margin: share of the device's memory that stays free.
        budget_s: seconds after which no further step of the bisection begins, nor one that would probably end later; None = no limit. Then
            the result is an UnfinishedSearch: the largest number tried that fits, and what a line through those that were tried predicts.
            The few dry runs of a program that does not depend on the batch are all made.
        options: as in `estimate_memory`. As there, the batch may be the second argument, if `device=` is given by name.

    Raises:
        ValueError: an unknown device, a target that cannot be estimated, or a dataset that is too small for one optimizer step.
    """
    check_budget(budget_s)
    name, limit = usable_memory(device, capacity, margin, ranks=ranks_here(target, options))
    runs = _Runs(target, device, options, budget_s)
    most = _most(target, options)
    nodes = NODES
    if runs.compiled:  # what is fused depends on the batch where it is small: the runs are near the answer for the eager step
        eager = _Runs(target, device, {**options, "compile": "none"}, budget_s)
        nodes = _around(_largest(eager, limit, most, NODES))
        runs.count += eager.count
    largest = _largest(runs, limit, most, nodes)
    if runs.cut and budget_s is not None:
        return runs.unfinished(largest, limit, most, device=name, margin=margin, budget_s=budget_s)
    next_one = runs.at(largest + 1)
    shown, surely = runs.at(max(1, largest)), runs.surely(largest, limit)
    kind: Callable[..., MaxMicroBatch] = MaxMicroBatch
    if largest == most and needed(next_one) <= limit:
        kind = functools.partial(WholeDataset, by_memory=runs.by_memory(limit))
    return kind(
        micro_batch=largest,
        breakdown=shown,
        next=next_one,
        device=name,
        capacity=limit,
        runs=runs.count,
        margin=margin,
        surely=surely,
    )


def _most(target: Any, options: Mapping[str, Any]) -> int:
    """Samples that the dataset has for a rank's micro-batch; any number where there is no dataset, or one that does not say."""
    if not isinstance(target, RunSpec | Task) or options.get("batch") is not None:
        return sys.maxsize
    from workbench.train.choose_micro_batch import max_samples

    spec, task = (target, resolve(target.task)) if isinstance(target, RunSpec) else (RunSpec(task=target.name or "task"), target)
    ways = {item.name for item in dataclasses.fields(RunSpec)} - {"optimizer", "steps", "micro_batch"}
    knobs = {name: value for name, value in options.items() if name in ways}
    if options.get("world_size") is not None:
        knobs |= {"nproc_per_node": options["world_size"], "nnodes": 1}
    most, stream = max_samples(task.dataset(), spec.replace(**knobs))
    return sys.maxsize if stream else most


class _Runs:
    """Dry runs at several micro-batches, each made once.

    Attributes:
        count: how many were made.
        cut: did the budget end before the search?
    """

    def __init__(self, target: Any, device: str | Device, options: Mapping[str, Any], budget_s: float | None) -> None:
        self._target, self._device, self._options = target, device, options
        self._seen: dict[int, MemoryBreakdown] = {}
        self._family: Family | None = None
        self._seconds: dict[int, float] = {}
        self._end = math.inf if budget_s is None else time.monotonic() + budget_s
        self.count, self.cut = 0, False

    @property
    def compiled(self) -> bool:
        """Does torch.compile compile the step?"""
        knob = self._options.get("compile", self._target.compile if isinstance(self._target, RunSpec) else "none")
        return knob != "none" and self._device == "cpu"

    def at(self, batch: int) -> MemoryBreakdown:
        """The memory with so many samples."""
        if batch not in self._seen:
            self.count += 1
            tick(f"dry run {self.count}: micro_batch={batch}")
            began = time.monotonic()
            self._seen[batch] = estimate_memory(self._target, device=self._device, **{**self._options, "micro_batch": batch})
            self._seconds[batch] = time.monotonic() - began
        return self._seen[batch]

    def affords(self, batch: int) -> bool:
        """Will a run with so many samples probably end within the budget? Its time grows with the batch as that of the largest two did."""
        if len(self._seconds) > 1:
            (few, fast), (many, slow) = sorted(self._seconds.items())[-2:]
            growth = max(0.0, (slow - fast) / (many - few))
            self.cut = self.cut or time.monotonic() + max(0.0, slow + growth * (batch - many)) > self._end
        return not self.cut

    def unfinished(self, largest: int, limit: int, most: int, *, budget_s: float, **about: Any) -> UnfinishedSearch:
        """What is known when the budget ends, of a search that has found so many samples to fit."""
        tried = sorted(self._seen)
        fitting, too_many = self.bracket(limit)
        need = {batch: needed(self._seen[batch]) for batch in (fitting, too_many) if batch}
        if too_many:
            slope = (need[too_many] - need[fitting]) / (too_many - fitting)
        else:  # by tensors alone, since the allocator reserves in steps
            slope = (self._seen[tried[-1]].total - self._seen[tried[-2]].total) / (tried[-1] - tried[-2])
        (few, fast), (many, slow) = sorted(self._seconds.items())[-2:]
        return UnfinishedSearch(
            micro_batch=largest,
            breakdown=self._seen[fitting],
            next=self._seen[too_many or fitting],
            capacity=limit,
            runs=self.count,
            surely=self.surely(largest, limit),
            budget_s=budget_s,
            tried=tuple(tried),
            too_many=too_many or 0,
            by_line=min(most, fitting + int((limit - need[fitting]) / slope)) if slope > 0 else 0,
            looped=slow > fast * (1 + LOOPED * (many / few - 1)),
            **about,
        )

    def family(self, batches: Sequence[int]) -> Family | None:
        """That of every batch, from runs at two; None where they did not do the same."""
        self.count += len(batches)
        tick(f"{len(batches)} dry runs: micro_batch={' and '.join(map(str, batches))}")
        self._family = batch_family(self._target, batches, device=self._device, **self._options)
        return self._family

    def by_memory(self, limit: int) -> int:
        """The largest number whose memory is within so many bytes, as the last family tells; 0 where there is none."""
        largest = max(self._seen)
        return max(largest, self._family.largest(limit, needs(self._family, self._seen[largest]))) if self._family else 0

    def surely(self, largest: int, limit: int) -> int:
        """The largest number, of those that were run, that fits with the highest estimate of bytes outside the allocator; 0 = none.

        Args:
            largest: what fits with the middle one; where it does not surely fit, the number that should is run, if the family tells it.
            limit: bytes that may be used.
        """
        if largest and self._family and needed_at_most(self.at(largest)) > limit:
            like = self.at(largest)
            more = needed_at_most(like) - needed(like)
            if guess := min(largest, self._family.largest(limit - more, needs(self._family, like))):
                self.at(guess)
        return max((batch for batch, run in self._seen.items() if batch <= largest and needed_at_most(run) <= limit), default=0)

    def bracket(self, limit: int) -> tuple[int, int | None]:
        """The largest number seen to fit (0: none) and the smallest above it seen not to (None: none)."""
        fitting = max((batch for batch, found in self._seen.items() if needed(found) <= limit), default=0)
        return fitting, min((batch for batch in self._seen if batch > fitting), default=None)


def _around(batch: int) -> tuple[int, int]:
    """Micro-batches of two dry runs, near a batch."""
    return max(2, batch), max(2, batch) + NODES[1] - NODES[0]


def _largest(runs: _Runs, limit: int, most: int, nodes: tuple[int, int]) -> int:
    """The largest micro-batch within so many bytes, and so many samples; 0 if not even 1 is. `nodes`: of the first two dry runs."""

    def fits(batch: int) -> bool:
        return needed(runs.at(batch)) <= limit

    for _ in range(ATTEMPTS):
        family = runs.family(nodes)
        if family is None:
            break
        guess = min(most, family.largest(limit, needs(family, runs.at(nodes[0]))))
        if (not guess or fits(guess)) and (guess == most or not fits(guess + 1)):
            return guess
        nodes = _around(guess)  # the program is another there: ask it there
    low, high = runs.bracket(limit)
    low = min(low, most)
    if high is None:
        high = max(1, 2 * low)
        while high <= most and runs.affords(high) and fits(high):
            low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1 and (not low or runs.affords((low + high) // 2)) and not runs.cut:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def batch_family(target: Any, batches: Sequence[int] = NODES, *, device: str | Device = "cuda", **options: Any) -> Family | None:
    """The memory of every micro-batch, from two dry runs; None where the program depends on the batch.

    Raises:
        ValueError: as `estimate_memory`.
    """
    from workbench.memory.api import record
    from workbench.memory.estimate.plan import plan_of

    logs = {batch: record(plan_of(target, device=device, **{**options, "micro_batch": batch}))[0] for batch in batches}
    try:
        return Family(logs)
    except ValueError:
        return None


def needs(family: Family, like: MemoryBreakdown) -> Callable[[int], int]:
    """Micro-batch → bytes that a device must have for it, with as much outside of the allocator as one of the family."""
    if like.reserved is None:
        return family.peak
    beside = like.outside.mid if like.outside else 0
    return lambda batch: family.reserved(batch) + beside
