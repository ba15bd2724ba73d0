"""The lengths of a dataset's samples in the order of a training: which steps do not fit, what padding costs, and what-ifs; arithmetic."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core import units
from workbench.core.checks import choice
from workbench.core.codec import NOT_STORED, JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import Interval
from workbench.data.analysis.packing import pack

WINDOW = 50
"""Micro-batches whose samples are sorted by length before they are cut into batches, as loaders that bucket do."""
OF_TEXT = (
    "lengths count what a text has, no tokens: texts of one length may need other memory and time; tokenizer= or length= counts tokens"
)
"""Note on lengths of texts."""
FAR = 0.25
"""Share of the measured gain by which a prediction may miss it and still be said to hold."""


class LengthsError(ValueError):
    """Lengths that cannot be read or planned with; the message says what was given, what is allowed and what to try."""


def parts_of(sample: Any) -> Sequence[Any]:
    """What a sample consists of: the values of a mapping, the parts of a tuple, or itself."""
    return list(sample.values()) if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else [sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan(JsonDataclass):
    """One way to make batches of the same samples."""

    name: str
    """"as it is", "bucketed" or "packed"."""
    longest: int
    """Length of a sample in the longest batch."""
    tokens: int
    """Places in all batches, padding included."""
    padding: float
    """Share of the token positions that are padding."""
    seconds: float
    """Of the micro-batches of all steps by the roofline, on average over the ranks."""
    needed: int
    """Bytes of the longest batch."""
    fits: bool
    """Does it fit?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsProof(JsonDataclass, display.Shown):
    """Batches made in another way, predicted and measured beside those as they are: the same samples, in turns."""

    name: str
    """Of the plan."""
    device: str
    """Where it was measured."""
    micro_batches: int
    """As they are; the plan has the same samples."""
    predicted: float
    """Times as fast, of these very batches."""
    measured: Interval
    """Times as fast; 90 % interval."""
    places: float
    """Places of all batches, padding included, over those as they are: predicted."""
    measured_places: float
    """The same, counted in the batches that were trained on."""
    held_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Length of a batch → bytes that a step with it holds at its peak where this was measured: predicted, and as the allocator counted
    them; of the middle batch as it is, and of the longest."""
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured.mid - 1

    @property
    def held(self) -> bool:
        """Is the prediction inside the measured interval, or within FAR of its middle?"""
        return self.predicted in self.measured or abs(self.error) <= FAR

    @property
    def word(self) -> str:
        """What was predicted, what was measured, and whether they agree."""
        ends = f"{units.times(self.measured.low)} … {units.times(self.measured.high)}"
        ends = "one pair: no range" if math.isinf(self.measured.low) else ends
        gained = "a gain" if self.measured.low > 1 else "no slower beyond doubt" if self.measured.high > 1 else "slower"
        off = "held" if self.held else f"the prediction was {units.percent(abs(self.error))} too {'high' if self.error > 0 else 'low'}"
        return (
            f"{self.name}: predicted {units.times(self.predicted)}, measured {units.times(self.measured.mid)} "
            f"({ends}) on {self.device}: {gained}; {off}"
        )

    @property
    def table(self) -> display.Table:
        """Predicted beside measured."""
        return display.Table(
            columns=("", "predicted", "measured"),
            rows=[
                ["speed over that as it is", units.times(self.predicted), units.times(self.measured.mid)],
                ["token positions, padding included, over those as it is", units.times(self.places), units.times(self.measured_places)],
                *([f"memory of a step of length {length:,}", *map(units.bytes_, both)] for length, both in self.held_bytes.items()),
            ],
            title=f"Proof of {self.name} batches, {self.micro_batches} alternating micro-batches",
            note="\n".join([self.word, *self.notes]),
        )

    def __repr__(self) -> str:
        return f"LengthsProof({self.word})"


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
    """Longest of the dataset's batches that is known to fit; 0 = none."""
    unsure: int = 0
    """Longest of which the budget left no time to find out whether its batch fits; 0 = it is known of all."""
    plans: tuple[LengthPlan, ...]
    """As it is, and the what-ifs."""
    notes: tuple[str, ...] = ()
    """What the budget left out."""
    unit: str = "tokens"
    """What lengths count: "tokens", "characters", "bytes", or of tensors of floats "values" or "rows"."""
    prover: Callable[..., LengthsProof] | None = field(default=None, metadata=NOT_STORED, compare=False, repr=False)
    """What `prove` calls: it knows the samples."""

    @property
    def first_over(self) -> int | None:
        """The first step, from 1, whose batch does not fit; None = there is none."""
        return next((step for step, length in enumerate(self.lengths, 1) if self.fits(length) is False), None)

    @property
    def first_unsure(self) -> int | None:
        """The first step, from 1, for whose batch it is not known whether it fits; None = there is none."""
        return next((step for step, length in enumerate(self.lengths, 1) if self.fits(length) is None), None)

    @property
    def over(self) -> int:
        """Steps that do not fit."""
        return sum(self.fits(length) is False for length in self.lengths)

    def fits(self, length: int) -> bool | None:
        """Whether a micro-batch whose longest sample has this length fits; None = there was no time to find out."""
        return length <= self.fitting or (None if length <= self.unsure else False)

    def __getitem__(self, name: str) -> LengthPlan:
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise KeyError(f"no plan {name!r}: there are {', '.join(plan.name for plan in self.plans)}")

    def gain(self, name: str) -> float:
        """Speedup of an epoch over the batches as they are.

        Args:
            name: name of a plan in `plans`.
        """
        return self["as it is"].seconds / self[name].seconds

    @property
    def best(self) -> LengthPlan:
        """The fastest way that fits; as it is, if none does."""
        return max((plan for plan in self.plans if plan.fits), key=lambda plan: self.gain(plan.name), default=self["as it is"])

    def prove(self, which: str | None = None, *, budget_s: float = 60.0) -> LengthsProof:
        """Train alternately on batches made in another way and on those as they are, on one rank of this machine.

        The same samples are taken by both, up to WINDOW micro-batches from the start of the training; those that are too long for the
        device are left out of both. Predicted is the time of these very batches, and the memory that steps with the middle and with the
        longest of them hold on this machine.

        Args:
            which: "bucketed" or "packed"; None = the fastest that fits.
            budget_s: seconds it may take, about.

        Raises:
            LengthsError: no such way, none that is faster, samples that cannot be packed, or a result that was read from JSON.
        """
        names = [plan.name for plan in self.plans if plan.name != "as it is"]
        name = self.best.name if which is None else which
        if name == "as it is" and which is None:
            raise LengthsError(
                f"there is nothing to prove: of {' and '.join(names)} none is faster and fits; prove({names[0]!r}) runs it all the same"
            )
        choice("which", name, names, error=LengthsError)
        if self.prover is None:
            raise LengthsError("these lengths were read from JSON, without their samples: call wb.batch_lengths again, and prove that")
        return self.prover(name, fitting=self.fitting, budget_s=budget_s)

    @property
    def word(self) -> str:
        """What happens first."""
        longest = max(self.lengths)
        if (step := self.first_unsure) and step < (self.first_over or math.inf):
            text = (
                f"step {step:,} may run out of memory: its longest batch has {self.lengths[step - 1]:,} {self.unit} a sample, "
                f"{self.fitting:,} fit {self.device}, and there was no time to try longer ones; "
                f"{self.over:,} of {self.steps:,} steps will not fit"
            )
        elif self.first_over is None:
            text = f"all {self.steps:,} steps fit: the longest batch has {longest:,} {self.unit} a sample, at step "
            text += f"{self.lengths.index(longest) + 1:,}"
        else:
            length = self.lengths[self.first_over - 1]
            fitting = f"{self.fitting:,} is the longest in the data that fits" if self.fitting else "none in the data fits"
            more = f"so will {self.over - 1:,} more" if self.over > 1 else "it is the only one"
            text = (
                f"step {self.first_over:,} will run out of memory: its longest batch has {length:,} {self.unit} a sample, and {fitting} "
                f"{self.device}; {more} of {self.steps:,} steps"
            )
        waste = self["as it is"].padding
        best = self.best
        gain = f"; {best.name}: {units.times(self.gain(best.name))} faster" if best.name != "as it is" else ""
        return f"{text}. {units.percent(waste)} of all positions are padding{gain}"

    @property
    def table(self) -> display.Table:
        """A row per way to make batches."""
        rows = [
            [
                plan.name,
                f"{plan.longest:,}",
                units.percent(plan.padding),
                units.bytes_(plan.needed),
                "yes" if plan.fits else "NO",
                units.times(self.gain(plan.name)),
            ]
            for plan in self.plans
        ]
        return display.Table(
            columns=("batches", f"longest ({self.unit})", "padding", "memory of the longest", "fits", "predicted speed"),
            rows=rows,
            title=f"{self.title} on {self.device}: predicted from the lengths of its samples",
            note="\n".join([self.word, *([OF_TEXT] if self.unit in ("characters", "bytes") else []), *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per step: its longest batch, and whether it fits, None where that is not known."""
        return display.frame({"step": step, "length": each, "fits": self.fits(each)} for step, each in enumerate(self.lengths, 1))

    plot = display.plot_method("batch_lengths")

    def __repr__(self) -> str:
        known = "all fit" if self.first_unsure is None else f"whether step {self.first_unsure} fits is not known"
        return f"BatchLengths({self.title!r}: {known if self.first_over is None else f'step {self.first_over} does not fit'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRuns:
    """What dry runs say of micro-batches by the length of their longest sample."""

    nodes: Mapping[int, float]
    """Length → seconds of a micro-batch."""
    bytes_at: Callable[[int], int]
    """Length → bytes of a step with such a batch."""
    held_alone: Callable[[Any, Any, str], int] | None = None
    """Spec, batch and kind of device → bytes that tensors of a step with it hold at the peak, of one rank without DDP; a proof asks."""

    def seconds(self, lengths: Any) -> float:
        """Of micro-batches of these lengths together; between the nodes by a parabola, since attention is one in the length."""
        nodes = sorted(self.nodes)
        factors = np.polyfit(nodes, [self.nodes[size] for size in nodes], min(2, len(nodes) - 1))
        return float(np.maximum(np.polyval(factors, lengths), 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGrid:
    """The lengths of all samples in the order in which the ranks take them: epoch, rank, step, micro-batch, sample."""

    sizes: Any
    places: Any
    """Index of each sample in the dataset."""

    @classmethod
    def of(cls, sizes: Sequence[int], orders: Sequence[Sequence[int]], *, ranks: int, accumulation: int, micro_batch: int) -> "LengthGrid":
        """Of samples and the indices that each rank takes in each epoch, rank after rank; what makes no whole step is left out.

        Args:
            sizes: length of each sample.
            orders: indices of each rank in the first epoch, then in the second …
            ranks: number of ranks that share the samples.
            accumulation: micro-batches of a step.
            micro_batch: samples of each.
        """
        per_rank = accumulation * micro_batch
        whole = len(orders[0]) // per_rank
        taken = np.array([list(order)[: whole * per_rank] for order in orders])
        places = taken.reshape(-1, ranks, whole, accumulation, micro_batch)
        return cls(sizes=np.array(sizes)[places], places=places)

    @property
    def in_order(self) -> list[int]:
        """Indices of the samples, step after step over all ranks."""
        order: list[int] = np.moveaxis(self.places, 1, 2).reshape(-1).tolist()
        return order

    def read(self, lengths: Mapping[int, int]) -> "LengthGrid":
        """With these lengths of samples, by index; where some are missing, the first epoch up to the step that has one of those."""
        sizes = np.array([lengths.get(place, -1) for place in range(1 + int(self.places.max()))])[self.places]
        known = (sizes >= 0).all((1, 3, 4))
        epochs, steps = len(known) if known.all() else 1, int(known[0].cumprod().sum())
        return LengthGrid(sizes=sizes[:epochs, :, :steps], places=self.places[:epochs, :, :steps])

    @property
    def longest(self) -> list[int]:
        """Of each micro-batch, without repetition, rising."""
        found: list[int] = np.unique(self.sizes.max(-1)).tolist()
        return found

    def of_steps(self, count: int) -> tuple[int, ...]:
        """Longest sample of the first steps, over ranks and micro-batches."""
        return tuple(map(int, self.sizes.max((1, 3, 4)).reshape(-1)[:count]))

    def plans(self, count: int, dry: DryRuns, room: int) -> tuple[LengthPlan, ...]:
        """As it is, and the what-ifs in `room` bytes, of the first `count` steps of all ranks, rank after rank."""
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
    again = np.take(samples.reshape(-1), bucketed_order(samples.reshape(-1), samples.shape[1])).reshape(samples.shape)
    return again.max(1), again


def bucketed_order(sizes: Any, micro_batch: int) -> Any:
    """Places of samples by their length, window after window of WINDOW micro-batches."""
    window = WINDOW * micro_batch
    return np.concatenate([start + np.argsort(sizes[start : start + window], kind="stable") for start in range(0, len(sizes), window)])


def _packed(samples: Any, micro: int, dry: DryRuns, room: int) -> LengthPlan:
    """Whole samples in rows as long as the longest of them, as many rows in a batch as keep its number of positions."""
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
