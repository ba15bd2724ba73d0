"""Throughput: samples per second against the micro-batch, given or measured by a short sweep, and what follows for any plan."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from workbench.core import units
from workbench.core.checks import is_number, is_whole
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

MOST_ONCE = 0.5
"""Share of a step that accumulation can save, at most: one more micro-batch costs a forward and a backward, whatever a noisy sweep says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(display.Shown, JsonDataclass):
    """Samples per second of some ranks together, at several micro-batches.

    Between them the seconds of a step are a straight line; beyond the largest the rate stays what it was. More ranks are as fast as these,
    each (the naive line: true only while they do not wait for each other).

    >>> curve = Throughput.of({8: 800.0, 32: 1600.0})
    >>> curve.samples_per_sec(micro_batch=16), curve.samples_per_sec(micro_batch=64, world_size=2)
    (1200.0, 3200.0)
    """

    micro_batches: tuple[int, ...]
    """Where it is known, ascending."""
    rates: tuple[float, ...]
    """Samples per second there, of all ranks, without accumulation."""
    world_size: int = 1
    """Ranks that reached them."""
    per_step: float = 0.0
    """Seconds of a step that are spent once, however many micro-batches it accumulates: the optimizer's, and the reduction's."""
    kind: Literal["measured", "given"] = "given"
    """Where the rates come from."""
    notes: tuple[str, ...] = ()
    """What the measurement has to say about itself."""

    def __post_init__(self) -> None:
        if not self.micro_batches or len(self.micro_batches) != len(self.rates):
            raise ValueError(f"{len(self.micro_batches)} micro-batches with {len(self.rates)} rates: give a rate for each, {{32: 1500.0}}")
        for micro, rate in zip(self.micro_batches, self.rates, strict=True):
            if not is_whole(micro, least=1):
                raise ValueError(f"throughput at a micro-batch of {micro!r}: a whole number of at least 1 is allowed")
            if not is_number(rate, above=0):
                raise ValueError(f"throughput of {rate!r} at a micro-batch of {micro}: samples per second above 0 are allowed")
        if list(self.micro_batches) != sorted(set(self.micro_batches)):
            raise ValueError(f"micro-batches {self.micro_batches}: each once and ascending is wanted")

    @classmethod
    def of(cls, given: Any, *, micro_batch: int = 1, world_size: int = 1) -> "Throughput":
        """From whatever says it.

        Args:
            given: a Throughput; micro-batch → samples per second of all ranks; runs of a sweep over micro_batch; or one number, the samples
                per second at `micro_batch`.
            micro_batch: of the one number.
            world_size: ranks that reached it, of a mapping or a number.

        Raises:
            ValueError: it is something else, or holds a rate that is none.
        """
        if isinstance(given, Throughput):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            given = {micro_batch: float(given)}
        if isinstance(given, Mapping):
            places = sorted(given)
            return cls(micro_batches=tuple(places), rates=tuple(given[place] for place in places), world_size=world_size)
        if isinstance(given, Sequence) and given and all(isinstance(one, Run) for one in given):
            return cls.from_runs(given)
        raise ValueError(
            f"throughput={given!r:.80}: allowed are micro-batch → samples per second, such as {{16: 900.0, 32: 1500.0}}, one number, or "
            "the runs of wb.sweep(spec, micro_batch=[…])"
        )

    @classmethod
    def from_runs(cls, runs: Sequence[Run]) -> Self:
        """From runs that differ in their micro-batch; of several with the same one, the fastest counts. One that
        accumulates tells `per_step`.

        Raises:
            ValueError: no run has a measured step, or they differ in their ranks.
        """
        steps: dict[tuple[int, int], float] = {}  # (micro-batch, accumulation) → seconds of a step
        ranks = set()
        for run in runs:
            if isinstance(run.spec, RunSpec) and run.samples_per_sec > 0:
                key = (int(run.spec.micro_batch), run.spec.accumulation)
                steps[key] = min(steps.get(key, math.inf), steady(run))
                ranks.add(run.spec.data_ranks)
        if len(ranks) != 1 or not any(accumulation == 1 for _, accumulation in steps):
            raise ValueError(
                f"throughput of {len(runs)} runs with {sorted(ranks) or 'no'} ranks: runs without accumulation that took steps are wanted, "
                "all with the same number of ranks: wb.sweep(spec, micro_batch=[16, 32, 64])"
            )
        world_size = ranks.pop()
        places = sorted(micro for micro, accumulation in steps if accumulation == 1)
        return cls(
            micro_batches=tuple(places),
            rates=tuple(micro * world_size / steps[micro, 1] for micro in places),
            world_size=world_size,
            per_step=_once(steps),
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
        once = min(self.per_step, MOST_ONCE * alone)
        return accumulation * (alone - once) + once

    def samples_per_sec(self, *, micro_batch: int, accumulation: int = 1, world_size: int | None = None) -> float:
        """Samples per second of all ranks.

        Args:
            micro_batch: samples per rank at once.
            accumulation: micro-batches per step.
            world_size: ranks; None = as many as measured.
        """
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
        """One row per micro-batch."""
        rows = [
            [micro, units.rate(rate), units.seconds(self.step(micro))] for micro, rate in zip(self.micro_batches, self.rates, strict=True)
        ]
        note = f"{self.kind}, {self.world_size} rank{'s' * (self.world_size != 1)}"
        if self.per_step:
            note += f"; {units.seconds(self.per_step)} of a step are spent once, however much it accumulates"
        return display.Table(
            columns=("micro_batch", "throughput", "step"), rows=rows, title="Throughput", note="; ".join([note, *self.notes])
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per micro-batch."""
        return display.frame(
            {"micro_batch": micro, "samples_per_sec": rate, "step": self.step(micro)}
            for micro, rate in zip(self.micro_batches, self.rates, strict=True)
        )

    def __repr__(self) -> str:
        return f"Throughput(micro_batches={self.micro_batches}, world_size={self.world_size}, {self.kind})"


SLOWEST = 0.1
"""Share of the steps, the slowest, that a rate leaves out: where a step takes a millisecond, one interruption outweighs all the others."""


def steady(run: Run) -> float:
    """Seconds of a step of a run, warm-up and the slowest tenth left out; of the slowest rank. nan without a measured step."""
    means = []
    for timeline in run.timelines:
        values = sorted(timeline.values())
        kept = values[: max(1, len(values) - int(SLOWEST * len(values)))]
        if kept:
            means.append(sum(kept) / len(kept))
    return max(means, default=math.nan)


def _once(steps: Mapping[tuple[int, int], float]) -> float:
    """What a step spends once, from a micro-batch that was run with and without accumulation: T(a) = a (T(1) − s) + s."""
    found = [
        (accumulation * steps[micro, 1] - seconds) / (accumulation - 1)
        for (micro, accumulation), seconds in steps.items()
        if accumulation > 1 and (micro, 1) in steps
    ]
    least = min(itertools.chain([seconds for (_, accumulation), seconds in steps.items() if accumulation == 1], found), default=0.0)
    return max(0.0, least) if found else 0.0


def _failures(runs: Sequence[Run]) -> tuple[str, ...]:
    """Runs that took no step, with the reason."""
    return tuple(
        f"micro_batch={run.spec.micro_batch} was {run.state}" + (f": {run.error.message}" if run.error else "")
        for run in runs
        if isinstance(run.spec, RunSpec) and not run.samples_per_sec > 0
    )
