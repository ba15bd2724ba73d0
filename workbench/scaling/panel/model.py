"""What so many GPUs would bring, by a measured curve or by a plan: pure functions, cheap enough to follow a slider."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.cluster.analysis.cluster import CLUSTERS, Cluster
from workbench.cluster.analysis.collectives import CostError
from workbench.cluster.analysis.energy import estimated
from workbench.cluster.analysis.plan.plans import Plans
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.transformer import Transformer
from workbench.cluster.plan import plan
from workbench.core import units
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit
from workbench.scaling.analysis.curve.forecast import CurveForecast

MOST = 10_000
"""GPUs to which the slider goes; further where more were measured."""
FURTHER = 4
"""Times the largest measured point that it reaches at least."""
POINTS = 60
"""Places of the band."""
HALF = 0.5
"""Efficiency from which on the larger part of a curve's step is what a process took in the smallest point."""
GPUS, PROCESSES = "GPUs", "processes"
_ONE = {GPUS: "GPU", PROCESSES: "process"}
OWN, LOST = "own work", "lost in scaling"
"""What limits, as far as a curve can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One number of GPUs."""

    gpus: int
    low: float
    """Samples per second of all GPUs, at least."""
    mid: float
    high: float
    naive: float
    """As the base's GPUs go on."""
    bound: str
    """"compute", "communication", "bubble" or "memory" of a plan; OWN or LOST of a curve; "" = not known."""
    said: str = ""
    """The same in a sentence; "" = as `planning.plans.BOUNDS` has it."""
    layout: str = ""
    """Of a plan."""
    watts: float | None = None
    """Of all GPUs, estimated; None = not known."""
    device: str = ""
    """That has them."""
    counted: str = GPUS
    """What `gpus` counts: "processes" of a curve on devices that nobody named."""

    @property
    def each(self) -> str:
        """One of them, in words."""
        return _ONE[self.counted]

    def money(self, samples: float, price: float) -> float:
        """For so many samples at a price per GPU and hour."""
        return self.gpus * samples / self.mid / 3600 * price

    def kwh(self, samples: float) -> float | None:
        """For so many samples."""
        return None if self.watts is None else self.watts * samples / self.mid / 3.6e6


class Source(Protocol):
    """Where places come from."""

    @property
    def kind(self) -> str:
        """In words."""

    @property
    def measured(self) -> Sequence[tuple[int, float]]:
        """(GPUs, samples per second) that were measured."""

    def sizes(self) -> list[int]:
        """GPUs at which the slider can stand."""

    def at(self, gpus: int) -> Place:
        """One of them."""


@dataclass(slots=True)
class Curve:
    """A measured curve; the band is its fit's."""

    fit: CurveFit
    cluster: Cluster | None = None
    kind: str = field(default="measured curve, fitted", init=False)

    @property
    def measured(self) -> list[tuple[int, float]]:
        """What was measured."""
        return [(point.world_size, point.samples_per_sec) for point in self.fit.points]

    def sizes(self) -> list[int]:
        """Doublings of the smallest point, and the most: 10,000, or four times the largest point."""
        return _doublings(self.fit.points[0].world_size, max(MOST, FURTHER * self.fit.points[-1].world_size))

    def at(self, gpus: int) -> Place:
        """By all laws together."""
        return self.all([gpus])[0]

    def all(self, sizes: Sequence[int]) -> list[Place]:
        """Several at once, which costs little more than one."""
        return [
            Place(
                gpus=one.world_size,
                low=one.low,
                mid=one.mid,
                high=one.high,
                naive=one.naive,
                bound=OWN if one.efficiency >= HALF else LOST,
                said=_said(one),
                counted=PROCESSES if self.cluster is None else GPUS,
                **_power(self.cluster, one.world_size),
            )
            for one in self.fit.forecasts(sizes)
        ]


@dataclass(slots=True)
class Planned:
    """A model on a cluster: the fastest plan of each number of GPUs, computed when it is asked for and kept."""

    model: Any
    cluster: Cluster
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = field(default="planned", init=False)
    measured: Sequence[tuple[int, float]] = field(default=(), init=False)
    found: dict[int, Place] = field(default_factory=dict, init=False)

    def sizes(self) -> list[int]:
        """GPUs on which it fits."""
        self._fill()
        return sorted(self.found)

    def at(self, gpus: int) -> Place:
        """The fastest plan of them."""
        self._fill()
        return self.found[gpus]

    def _fill(self) -> None:
        if self.found:
            return
        made = (
            self.model
            if isinstance(self.model, Plans)
            else plan(self.model, self.cluster, global_batch=self.batch, most_gpus=2 * MOST, top=1, **self.options)
        )
        self.found = places_of(made)


def places_of(made: Plans) -> dict[int, Place]:
    """The front of plans, as places; the naive line starts at the fewest GPUs."""
    base = made.front[0]
    rate = made.global_batch / base.seconds.mid / base.gpus
    return {
        one.gpus: Place(
            gpus=one.gpus,
            low=made.global_batch / one.seconds.high,
            mid=made.global_batch / one.seconds.mid,
            high=made.global_batch / one.seconds.low,
            naive=rate * one.gpus,
            bound=one.bound,
            layout=one.layout + ", memory tight" * one.tight,
            **_power(made.cluster, one.gpus),
        )
        for one in made.front
    }


def source_of(target: Any, cluster: Cluster | None, batch: int | None, options: dict[str, Any]) -> Source:
    """What a target tells; a curve needs no cluster.

    Raises:
        PlanError: something else was given, or a model without a batch.
        CurveError: a curve of fewer than two usable points.
    """
    if isinstance(target, ScalingCurve):
        return Curve(target.fit(), cluster)
    if isinstance(target, CurveFit):
        return Curve(target, cluster)
    if isinstance(target, Plans):
        return Planned(target, target.cluster, target.global_batch)
    if isinstance(target, Transformer) and cluster is not None:
        if batch is None:
            raise PlanError("ScalingExplorer(model): global_batch is wanted, samples per step of all GPUs")
        return Planned(target, cluster, batch, options)
    raise PlanError(
        f"ScalingExplorer({type(target).__name__}): a ScalingCurve or its fit, Plans, or a cost.Transformer with global_batch is wanted"
    )


def band(source: Source) -> list[Place]:
    """Places over the whole range, fewest GPUs first."""
    if isinstance(source, Curve):
        sizes = source.sizes()
        first, last = sizes[0], sizes[-1]
        return source.all(sorted({max(1, round(first * (last / first) ** (i / (POINTS - 1)))) for i in range(POINTS)}))
    return [source.at(size) for size in source.sizes()]


def clusters(own: Cluster | None) -> dict[str, Cluster]:
    """Names that can be picked."""
    found = {one.name: one for one in CLUSTERS}
    return found if own is None or (own.name in found and found[own.name] == own) else {f"{own.name} (own)": own, **found}


def _doublings(first: int, most: int) -> list[int]:
    return [*(first * 2**power for power in range(math.ceil(math.log2(most / first))) if first * 2**power < most), most]


def _said(one: CurveForecast) -> str:
    """As far as a curve can tell, which has no parts of a step."""
    own = units.percent(min(1.0, one.efficiency))
    lost = f"the rest is lost in scaling; {'' if one.efficiency >= HALF else 'it is the larger part; '}the curve alone cannot say to what"
    return f"efficiency of {units.percent(one.efficiency)}: {own} of the step is what it takes on {one.base:,}, {lost}"


def _power(cluster: Cluster | None, gpus: int) -> dict[str, Any]:
    """Of all GPUs by the design power of one, and whose that is; nothing of devices that nobody named."""
    if cluster is None:
        return {}
    try:
        return {"watts": estimated(1.0, gpus, cluster.device.name).joules, "device": f"{cluster.device.name} ({cluster.name})"}
    except CostError:
        return {}


def words(place: Place) -> str:
    """One place in a sentence, for readers that cannot see the picture."""
    return (
        f"{place.gpus:,} {place.counted}: {units.rate(place.mid)} ({units.rate(place.low)} … {units.rate(place.high)}), "
        f"{units.percent(place.mid / place.naive)} of the naive line"
    )
