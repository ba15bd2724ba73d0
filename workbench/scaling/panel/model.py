"""Predicts what a number of GPUs brings, from a measured curve or from plans: pure functions, fast enough to follow a slider."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.cluster.analysis.cluster import CLUSTERS, Cluster
from workbench.cluster.analysis.collective_cost import CostError
from workbench.cluster.analysis.energy import estimated
from workbench.cluster.analysis.plan.plans import Plans
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.transformer import Transformer
from workbench.cluster.plan import plan
from workbench.core import units
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit, CurveForecast

MAX_GPUS = 10_000
"""GPUs to which the slider goes; further where more were measured."""
BEYOND_MEASURED = 4
"""Times the largest measured point that it reaches at least."""
BAND_POINTS = 60
"""Places of the band."""
MIN_OWN_SHARE = 0.5
"""Efficiency from which on the larger part of a curve's step is what a process took in the smallest point."""
GPUS, PROCESSES = "GPUs", "processes"
_ONE = {GPUS: "GPU", PROCESSES: "process"}
OWN, LOST = "own work", "lost in scaling"
"""What limits, as far as a curve shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One number of GPUs."""

    gpus: int
    low: float
    """Samples per second of all GPUs, at least."""
    mid: float
    high: float
    naive: float
    """By the naive line: each GPU as fast as those of the base."""
    bound: str
    """"compute", "communication", "bubble" or "memory" of a plan; OWN or LOST of a curve; "" = not known."""
    sentence: str = ""
    """The same in a sentence; "" = as `BOUNDS` of plans has it."""
    layout: str = ""
    """Of a plan."""
    watts: float | None = None
    """Of all GPUs, estimated; None = not known."""
    device: str = ""
    """That has them."""
    counted: str = GPUS
    """What `gpus` counts: "processes" of a curve whose device is unknown."""

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
    """A curve or plans, from which Places are computed."""

    @property
    def kind(self) -> str:
        """What it is, as text."""

    @property
    def measured(self) -> Sequence[tuple[int, float]]:
        """(GPUs, samples per second) that were measured."""

    def sizes(self) -> list[int]:
        """Numbers of GPUs that the slider can have."""

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
        first, most = self.fit.points[0].world_size, max(MAX_GPUS, BEYOND_MEASURED * self.fit.points[-1].world_size)
        return [*(first * 2**power for power in range(math.ceil(math.log2(most / first))) if first * 2**power < most), most]

    def at(self, gpus: int) -> Place:
        return self.all([gpus])[0]

    def all(self, sizes: Sequence[int]) -> list[Place]:
        """Several at once, which takes little longer than one."""
        return [
            Place(
                gpus=forecast.world_size,
                low=forecast.low,
                mid=forecast.mid,
                high=forecast.high,
                naive=forecast.naive,
                bound=OWN if forecast.efficiency >= MIN_OWN_SHARE else LOST,
                sentence=_sentence(forecast),
                counted=PROCESSES if self.cluster is None else GPUS,
                **_power(self.cluster, forecast.world_size),
            )
            for forecast in self.fit.forecasts(sizes)
        ]


@dataclass(slots=True)
class Planned:
    """A model on a cluster: the fastest plan of each number of GPUs, computed on demand and kept."""

    model: Any
    cluster: Cluster
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = field(default="planned", init=False)
    measured: Sequence[tuple[int, float]] = field(default=(), init=False)
    places: dict[int, Place] = field(default_factory=dict, init=False)

    def sizes(self) -> list[int]:
        """Numbers of GPUs on which it fits."""
        self._fill()
        return sorted(self.places)

    def at(self, gpus: int) -> Place:
        """The fastest plan of them."""
        self._fill()
        return self.places[gpus]

    def _fill(self) -> None:
        if self.places:
            return
        made = (
            self.model
            if isinstance(self.model, Plans)
            else plan(self.model, self.cluster, global_batch=self.batch, most_gpus=2 * MAX_GPUS, top=1, **self.options)
        )
        self.places = places_of(made)


def places_of(made: Plans) -> dict[int, Place]:
    """The front of plans, as places; the naive line starts at the fewest GPUs."""
    base = made.front[0]
    rate = made.global_batch / base.seconds.mid / base.gpus
    return {
        layout.gpus: Place(
            gpus=layout.gpus,
            low=made.global_batch / layout.seconds.high,
            mid=made.global_batch / layout.seconds.mid,
            high=made.global_batch / layout.seconds.low,
            naive=rate * layout.gpus,
            bound=layout.bound,
            layout=layout.layout + ", memory tight" * layout.tight,
            **_power(made.cluster, layout.gpus),
        )
        for layout in made.front
    }


def source_of(target: Any, cluster: Cluster | None, batch: int | None, options: dict[str, Any]) -> Source:
    """The Source of a target; a curve needs no cluster.

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
            raise PlanError("ScalingExplorer(model): global_batch is needed, samples per step of all GPUs")
        return Planned(target, cluster, batch, options)
    raise PlanError(
        f"ScalingExplorer({type(target).__name__}): a ScalingCurve or its fit, Plans, or a Transformer with global_batch is needed"
    )


def band(source: Source) -> list[Place]:
    """Places over the whole range, fewest GPUs first."""
    if isinstance(source, Curve):
        sizes = source.sizes()
        first, last = sizes[0], sizes[-1]
        return source.all(sorted({max(1, round(first * (last / first) ** (i / (BAND_POINTS - 1)))) for i in range(BAND_POINTS)}))
    return [source.at(size) for size in source.sizes()]


def clusters(own: Cluster | None) -> dict[str, Cluster]:
    """Names that can be picked."""
    named = {cluster.name: cluster for cluster in CLUSTERS}
    return named if own is None or (own.name in named and named[own.name] == own) else {f"{own.name} (own)": own, **named}


def _sentence(forecast: CurveForecast) -> str:
    """What limits, as far as a curve shows it: it has no parts of a step."""
    own = units.percent(min(1.0, forecast.efficiency))
    larger = "" if forecast.efficiency >= MIN_OWN_SHARE else "it is the larger part; "
    lost = f"the rest is lost in scaling; {larger}the curve alone cannot say to what"
    return f"efficiency of {units.percent(forecast.efficiency)}: {own} of the step is what it takes on {forecast.base:,}, {lost}"


def _power(cluster: Cluster | None, gpus: int) -> dict[str, Any]:
    """Of all GPUs by the design power of one, and whose that is; nothing of unknown devices."""
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
