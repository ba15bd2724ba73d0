"""Throughput: samples per second against the micro-batch, and the ways to make a batch (`BatchCandidate`) ranked by it."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from workbench.core import units
from workbench.core.checks import is_number, is_whole
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

MAX_SAVED = 0.5
"""Largest share of a step that accumulation can save: one more micro-batch costs a forward and a backward, whatever a noisy sweep says."""
SLOWEST = 0.1
"""Share of the steps, the slowest, that a rate leaves out: where a step takes a millisecond, one interruption outweighs all the others."""
SLACK = 0.05
"""Share of the best speed given up for a smaller batch: throughput varies by as much, and a noise scale is known far less well."""
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
"""Accumulations that are tried where the batch is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(display.Shown, JsonDataclass):
    """Samples per second of some ranks together, at several micro-batches.

    Between them a step's seconds are interpolated linearly; beyond the largest the rate stays the same. More ranks are taken to be as fast
    each (linear extrapolation: true only while they do not wait for each other).

    >>> curve = Throughput.of({8: 800.0, 32: 1600.0})
    >>> curve.samples_per_sec(micro_batch=16), curve.samples_per_sec(micro_batch=64, world_size=2)
    (1200.0, 3200.0)
    """

    micro_batches: tuple[int, ...]
    """Micro-batches with a known rate, ascending."""
    rates: tuple[float, ...]
    """Samples per second of all ranks, without accumulation."""
    world_size: int = 1
    """Ranks that reached these rates together."""
    per_step: float = 0.0
    """Seconds of a step that do not depend on accumulation: the optimizer's, and the reduction's."""
    kind: Literal["measured", "given"] = "given"
    """Origin of the rates."""
    notes: tuple[str, ...] = ()
    """Remarks on the measurement."""

    def __post_init__(self) -> None:
        if not self.micro_batches or len(self.micro_batches) != len(self.rates):
            raise ValueError(f"{len(self.micro_batches)} micro-batches with {len(self.rates)} rates: give a rate for each, {{32: 1500.0}}")
        for micro, rate in zip(self.micro_batches, self.rates, strict=True):
            if not is_whole(micro, least=1):
                raise ValueError(f"throughput at a micro-batch of {micro!r}: a whole number of at least 1 is allowed")
            if not is_number(rate, above=0):
                raise ValueError(f"throughput of {rate!r} at a micro-batch of {micro}: samples per second above 0 are allowed")
        if list(self.micro_batches) != sorted(set(self.micro_batches)):
            raise ValueError(f"micro-batches {self.micro_batches}: each once, ascending")

    @classmethod
    def of(cls, given: Any, *, micro_batch: int = 1, world_size: int = 1) -> "Throughput":
        """From any of its forms.

        Args:
            given: a Throughput; micro-batch → samples per second of all ranks; runs of a sweep over micro_batch; or one number, the samples
                per second at `micro_batch`.
            micro_batch: micro-batch at which a single number was measured.
            world_size: ranks that reached it, of a mapping or a number.

        Raises:
            ValueError: another form, or a rate that is not above 0.
        """
        if isinstance(given, Throughput):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            given = {micro_batch: float(given)}
        if isinstance(given, Mapping):
            micro_batches = tuple(sorted(given))
            return cls(micro_batches=micro_batches, rates=tuple(map(given.__getitem__, micro_batches)), world_size=world_size)
        if isinstance(given, Sequence) and given and all(isinstance(run, Run) for run in given):
            return cls.from_runs(given)
        raise ValueError(
            f"throughput={given!r:.80}: allowed are micro-batch → samples per second, such as {{16: 900.0, 32: 1500.0}}, one number, or "
            "the runs of wb.sweep(spec, micro_batch=[…])"
        )

    @classmethod
    def from_runs(cls, runs: Sequence[Run]) -> Self:
        """From runs that differ in their micro-batch; the fastest of equal ones counts. One with accumulation shows `per_step`.

        Raises:
            ValueError: no run has a measured step, or they differ in their ranks.
        """
        steps: dict[tuple[int, int], float] = {}  # (micro-batch, accumulation) → seconds of a step
        ranks = set()
        for run in runs:
            if isinstance(run.spec, RunSpec) and run.samples_per_sec > 0:
                key = (int(run.spec.micro_batch), run.spec.accumulation)
                steps[key] = min(steps.get(key, math.inf), steady_step(run))
                ranks.add(run.spec.data_ranks)
        if len(ranks) != 1 or not any(accumulation == 1 for _, accumulation in steps):
            raise ValueError(
                f"throughput of {len(runs)} runs with {sorted(ranks) or 'no'} ranks: only runs without accumulation that took steps, "
                "all with the same number of ranks: wb.sweep(spec, micro_batch=[16, 32, 64])"
            )
        world_size = ranks.pop()
        micro_batches = tuple(sorted(micro for micro, accumulation in steps if accumulation == 1))
        return cls(
            micro_batches=micro_batches,
            rates=tuple(micro * world_size / steps[micro, 1] for micro in micro_batches),
            world_size=world_size,
            per_step=_seconds_per_step(steps),
            kind="measured",
            notes=_failures(runs),
        )

    def step(self, micro_batch: int, accumulation: int = 1) -> float:
        """Seconds of an optimizer step.

        Args:
            micro_batch: samples per rank at once.
            accumulation: micro-batches per step.
        """
        alone = self._alone(micro_batch)
        once = min(self.per_step, MAX_SAVED * alone)
        return accumulation * (alone - once) + once

    def samples_per_sec(self, *, micro_batch: int, accumulation: int = 1, world_size: int | None = None) -> float:
        """Samples per second of all ranks; `world_size`: None = as many as measured."""
        return micro_batch * accumulation * (world_size or self.world_size) / self.step(micro_batch, accumulation)

    def _alone(self, micro: int) -> float:
        """Seconds of a step without accumulation: linear between what is known; outside the rate of the nearest, yet never faster steps."""
        known = [place * self.world_size / rate for place, rate in zip(self.micro_batches, self.rates, strict=True)]
        if micro >= self.micro_batches[-1]:
            return known[-1] * micro / self.micro_batches[-1]
        if micro <= self.micro_batches[0]:
            return self._below(micro, known)
        right = bisect_left(self.micro_batches, micro)
        left = right - 1
        share = (micro - self.micro_batches[left]) / (self.micro_batches[right] - self.micro_batches[left])
        return known[left] + share * (known[right] - known[left])

    def _below(self, micro: int, known: Sequence[float]) -> float:
        """Below the smallest: on the line through the two smallest, whose start is what a step costs without any sample."""
        if len(known) == 1:
            return known[0] * micro / self.micro_batches[0]
        slope = (known[1] - known[0]) / (self.micro_batches[1] - self.micro_batches[0])
        return max(known[0] + slope * (micro - self.micro_batches[0]), known[0] * micro / self.micro_batches[0])

    @property
    def points(self) -> dict[tuple[int, int], float]:
        """(ranks, global batch) → samples per second, as `StepsToTarget.time_to_target` takes it."""
        return {(self.world_size, micro * self.world_size): rate for micro, rate in zip(self.micro_batches, self.rates, strict=True)}

    @property
    def table(self) -> display.Table:
        """A row per micro-batch."""
        rows = [
            [micro, units.rate(rate), units.seconds(self.step(micro))] for micro, rate in zip(self.micro_batches, self.rates, strict=True)
        ]
        note = f"{self.kind}, {units.several(self.world_size, 'rank')}"
        if self.per_step:
            note += f"; {units.seconds(self.per_step)} of a step are spent once, however much it accumulates"
        return display.Table(
            columns=("micro_batch", "throughput", "step"), rows=rows, title="Throughput", note=display.notes([note, *self.notes])
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per micro-batch."""
        return display.frame(
            {"micro_batch": micro, "samples_per_sec": rate, "step": self.step(micro)}
            for micro, rate in zip(self.micro_batches, self.rates, strict=True)
        )

    def __repr__(self) -> str:
        return f"Throughput(micro_batches={self.micro_batches}, world_size={self.world_size}, {self.kind})"


def steady_step(run: Run) -> float:
    """Seconds of a step of a run, warm-up and the slowest tenth left out; of the slowest rank. nan without a measured step."""
    means = []
    for timeline in run.timelines:
        values = sorted(timeline.values())
        kept = values[: max(1, len(values) - int(SLOWEST * len(values)))]
        if kept:
            means.append(sum(kept) / len(kept))
    return max(means, default=math.nan)


def _seconds_per_step(steps: Mapping[tuple[int, int], float]) -> float:
    """Seconds s of a step that do not depend on accumulation, from a micro-batch run with and without: T(a) = a (T(1) − s) + s."""
    estimates = [
        (accumulation * steps[micro, 1] - seconds) / (accumulation - 1)
        for (micro, accumulation), seconds in steps.items()
        if accumulation > 1 and (micro, 1) in steps
    ]
    least = min(itertools.chain([seconds for (_, accumulation), seconds in steps.items() if accumulation == 1], estimates), default=0.0)
    return max(0.0, least) if estimates else 0.0


def _failures(runs: Sequence[Run]) -> tuple[str, ...]:
    """Runs that took no step, with the reason."""
    return tuple(
        f"micro_batch={run.spec.micro_batch} was {run.state}" + (f": {run.error.message}" if run.error else "")
        for run in runs
        if isinstance(run.spec, RunSpec) and not run.samples_per_sec > 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCandidate:
    """A way to make a batch, and its speed."""

    micro_batch: int
    """Samples per rank in one forward and backward."""
    accumulation: int
    """Micro-batches per step."""
    world_size: int
    """Ranks."""
    samples_per_sec: float
    """Of all ranks."""
    worth: float
    """Progress by a sample, as a share of that by a sample of a tiny batch: 1/(1 + B/B_noise); nan where the noise is not known.
    Source: McCandlish and others 2018, arXiv 1812.06162, E(B) = E_min (1 + B/B_crit)."""

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def useful(self) -> float:
        """Samples per second times their worth: the goodput of Pollux (Qiao and others 2021); nan where the worth is not known."""
        return self.samples_per_sec * self.worth


def relative_sample_worth(batch: int, noise: float | None) -> float:
    """Progress by a sample of a batch, as a share of that by a sample of a tiny batch; nan without a noise scale.

    >>> relative_sample_worth(64, 64.0), relative_sample_worth(192, 64.0)
    (0.5, 0.25)
    """
    return float("nan") if noise is None else 1 / (1 + batch / noise)


def candidates(
    throughput: Throughput, *, world_size: int, noise: float | None, largest: int | None, most: int | None, batch: int | None
) -> list[BatchCandidate]:
    """Every allowed way to make a batch.

    Args:
        throughput: against the micro-batch.
        world_size: number of ranks.
        noise: the noise scale, or critical batch, in samples; None = not known.
        largest: micro-batch that fits; None = no limit is known.
        most: most samples of a step; None = any.
        batch: required samples of a step; None = free.
    """
    top = throughput.micro_batches[-1]  # of larger ones nothing is known
    ways = _fixed(batch // world_size, min(top, largest or top)) if batch else _free(throughput.micro_batches, largest)
    return [
        BatchCandidate(
            micro_batch=micro,
            accumulation=accumulation,
            world_size=world_size,
            samples_per_sec=throughput.samples_per_sec(micro_batch=micro, accumulation=accumulation, world_size=world_size),
            worth=relative_sample_worth(micro * accumulation * world_size, noise),
        )
        for micro, accumulation in ways
        if most is None or micro * accumulation * world_size <= most
    ]


def _fixed(share: int, largest: int) -> Iterator[tuple[int, int]]:
    """Micro-batch and accumulation that make a rank's share of the batch."""
    for micro in range(1, min(share, largest) + 1):
        if share % micro == 0:
            yield micro, share // micro


def _free(measured: Sequence[int], largest: int | None) -> Iterator[tuple[int, int]]:
    """Accumulations of the measured micro-batches, and of the largest that fits."""
    allowed = {micro for micro in measured if largest is None or micro <= largest}
    if largest is not None and largest < measured[-1]:
        allowed.add(largest)
    for micro in sorted(allowed):
        for accumulation in ACCUMULATIONS:
            yield micro, accumulation


def best_candidate(candidates: Sequence[BatchCandidate]) -> BatchCandidate:
    """The candidate that reaches a loss soonest; of those within SLACK of it the smallest batch, with the least accumulation.

    Without a noise scale throughput alone decides.

    Raises:
        ValueError: there are no candidates.
    """
    if not candidates:
        raise ValueError("no way to make a batch is left")
    known = not any(math.isnan(candidate.worth) for candidate in candidates)
    speeds = [candidate.useful if known else candidate.samples_per_sec for candidate in candidates]
    near = [candidate for candidate, speed in zip(candidates, speeds, strict=True) if speed >= (1 - SLACK) * max(speeds)]
    return min(near, key=lambda candidate: (candidate.global_batch, candidate.accumulation))
