"""TimeToTarget: steps to a target times seconds per step, and so the best batch for a number of processes."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

_FORMS = (
    "{batch: samples_per_sec}, {(world_size, batch): samples_per_sec}, runs of wb.sweep, or points with batch, samples_per_sec and perhaps "
    "world_size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast some processes are at a batch."""

    batch: int
    """Samples per optimizer step over all processes."""
    world_size: int
    """Processes."""
    samples_per_sec: float
    """Of all processes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBatch:
    """The time to the target at one batch on so many processes. Seconds, but for what is said."""

    batch: int
    world_size: int
    samples_per_sec: float
    steps: float
    """By the law."""
    low: float
    """90 % interval of `seconds`, from that of the steps; the throughput is taken as given."""
    seconds: float
    """Batch × steps / samples_per_sec."""
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget(display.Shown, JsonDataclass):
    """Time to a target over batches and numbers of processes."""

    target: str
    """What is reached."""
    law: CriticalBatch
    """Steps against batch."""
    rows: tuple[TimedBatch, ...]
    """By world_size, then batch."""

    @classmethod
    def of(cls, law: CriticalBatch, rates: Iterable[Rate], *, target: str = "the target") -> "TimeToTarget":
        """Join a law with throughput."""
        rows = []
        for rate in sorted(rates, key=lambda one: (one.world_size, one.batch)):
            found = law.predict(rate.batch)
            low, mid, high = (samples / rate.samples_per_sec for samples in found.samples)
            rows.append(TimedBatch(**dataclasses.asdict(rate), steps=found.mid, low=low, seconds=mid, high=high))
        return cls(target=target, law=law, rows=tuple(rows))

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of processes that there is a throughput of."""
        return tuple(sorted({row.world_size for row in self.rows}))

    def best(self, world_size: int | None = None) -> TimedBatch:
        """The batch that reaches the target soonest.

        Args:
            world_size: with so many processes; None = with any.

        Raises:
            ValueError: there is no throughput of that number.
        """
        rows = [row for row in self.rows if world_size in (None, row.world_size)]
        if not rows:
            raise ValueError(f"best({world_size!r}): throughput is known of world_size {', '.join(map(str, self.world_sizes))}")
        return min(rows, key=lambda row: (row.seconds, row.batch))

    @property
    def table(self) -> display.Table:
        """One row per batch and number of processes; the best of each number has a star."""
        best = {size: self.best(size) for size in self.world_sizes}
        rows = [
            [
                row.world_size,
                f"{row.batch:,}" + (" *" if row == best[row.world_size] else ""),
                units.rate(row.samples_per_sec),
                f"{round(row.steps):,}",
                units.seconds(row.seconds),
                f"{units.seconds(row.low)}–{units.seconds(row.high)}",
            ]
            for row in self.rows
        ]
        note = f"steps by the law (s_min {self.law.s_min:,.0f}, b_crit {self.law.words}); * = soonest with so many processes"
        return display.Table(
            columns=("world_size", "batch", "throughput", "steps", "time", "90 %"), rows=rows, title=f"Time to {self.target}", note=note
        )

    to_frame = display.frame_method("rows", TimedBatch)
    plot = display.plot_method("time_to_target")

    def __repr__(self) -> str:
        return f"TimeToTarget({self.target}, {len(self.rows)} batches)"


def rates_of(given: Any, micro_batch: int | None = None) -> list[Rate]:
    """Throughput in any of its forms.

    >>> rates_of({32: 1000.0})[0].samples_per_sec, rates_of({(2, 64): 1900.0})[0].world_size, rates_of({4: 3800.0}, 32)[0].batch
    (1000.0, 2, 128)

    Args:
        given: see `StepsToTarget.time_to_target`.
        micro_batch: if given, the keys of a mapping are numbers of processes, each with this batch.

    Raises:
        ValueError: none of these forms, or figures that make no sense.
    """
    points = getattr(given, "points", given)
    points = points() if callable(points) else points
    if isinstance(points, Mapping):
        points = [_keyed(key, rate, micro_batch) for key, rate in points.items()]
    elif hasattr(points, "spec") or not isinstance(points, Iterable) or isinstance(points, str | bytes):
        points = [points]
    found = [_rate(point) for point in points]
    if not found:
        raise ValueError(f"time_to_target({given!r}): no throughput; wanted are {_FORMS}")
    return found


def _keyed(key: Any, rate: Any, micro_batch: int | None) -> dict[str, Any]:
    if isinstance(key, tuple) and len(key) == 2:
        return {"world_size": key[0], "batch": key[1], "samples_per_sec": rate}
    if micro_batch is not None:
        return {"world_size": key, "batch": key * micro_batch, "samples_per_sec": rate}
    return {"batch": key, "samples_per_sec": rate}


def _rate(point: Any) -> Rate:
    if isinstance(point, Rate):
        return point
    spec = getattr(point, "spec", None)
    batch = next(
        (value for source in (point, spec) for name in ("batch", "global_batch") if (value := _get(source, name)) is not None), None
    )
    ranks = next((value for source, name in ((point, "world_size"), (spec, "world_size")) if (value := _get(source, name)) is not None), 1)
    try:
        found = Rate(batch=int(batch), world_size=int(ranks), samples_per_sec=float(_get(point, "samples_per_sec")))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"time_to_target: {point!r:.100} has no batch with samples_per_sec; wanted are {_FORMS}") from None
    if not (found.batch > 0 and found.world_size > 0 and 0 < found.samples_per_sec < math.inf):
        raise ValueError(
            f"time_to_target: {point!r:.100}: batch, world_size and samples_per_sec above 0 are wanted (did that run end well?)"
        )
    return found


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
