"""ScalingExplorer: a slider of GPUs up to 10,000 with predicted throughput, its limits, money and energy."""

import inspect
from collections.abc import Mapping
from typing import Any

import ipywidgets

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import CostError
from workbench.cluster.analysis.plan.plans import Plans
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.transformer import Transformer
from workbench.cluster.plan import plan
from workbench.core import units
from workbench.core.checks import did_you_mean, real_number
from workbench.core.display.html import Style
from workbench.runs.panel import html as faces
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit
from workbench.scaling.panel import html as drawn
from workbench.scaling.panel.model import Place, Source, band, clusters, source_of

OWN_OPTIONS = ("cluster", "global_batch", "samples", "price", "intensity")
"""Options of the explorer itself."""
_PLAN_OPTIONS_LEFT_OUT = ("model", "gpus", "most_gpus", "top", "batch", "steps", "electricity", "pue", "watts", "knobs")
"""Arguments of `wb.plan` that the explorer sets itself, does not show, or that do not belong to a Transformer."""


def checked_options(target: Any, global_batch: object, options: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored.

    Raises:
        PlanError: a name that is not allowed here; the message lists those that are.
    """
    planned = isinstance(target, Transformer)
    if not planned and global_batch is not None:
        raise PlanError(f"global_batch={global_batch!r}: known for a model; a curve, and plans, have their own")
    of_plan = [name for name in inspect.signature(plan).parameters if planned and name not in (*_PLAN_OPTIONS_LEFT_OUT, *OWN_OPTIONS)]
    allowed = [*(name for name in OWN_OPTIONS if planned or name != "global_batch"), *of_plan]
    for name in options:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            what = "a model" if planned else f"a {type(target).__name__}"
            raise PlanError(f"ScalingExplorer has no option {name!r}: {hint}For {what} there are {', '.join(allowed)}")


DEFAULT_CLUSTER = "DGX-H100"
"""The cluster that a model is planned for at first."""
NO_CLUSTER = "not said"
"""The cluster of a curve, unless one was given."""


class ScalingExplorer:
    """A slider for the number of GPUs, on a measured curve, on plans, or on a model that is planned for the chosen cluster.

    Attributes:
        gpus: the slider; set `.value`.
        cluster: the cluster, if a model is planned; for a curve it only sets the power of a GPU.
        place: what is known at the slider's position, a Place.
        head, light, figures, curve, limits: what is shown.
        widget: everything in one box.
    """

    def __init__(
        self,
        target: Any,
        *,
        cluster: Cluster | str | None = None,
        global_batch: int | None = None,
        samples: float = 1e6,
        price: float | None = None,
        intensity: float | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            target: a ScalingCurve or its fit, what `wb.plan` gave without `gpus`, or a `Transformer`.
            cluster: picked at first; plans have their own. None = "DGX-H100" for a model, and no energy for a curve.
            global_batch: samples per step, of a model.
            samples: that time, money and energy are of.
            price: money per GPU and hour.
            intensity: gCO2e per kWh.
            options: of `wb.plan`, for a model.

        Raises:
            PlanError: something else was given, or no layout of the model fits.
        """
        checked_options(target, global_batch, options)
        real_number("samples", samples, above=0, also=": time, money and energy are of so many samples", error=PlanError)
        for name, value, words in (("price", price, "money per GPU and hour"), ("intensity", intensity, "gCO2e per kWh")):
            if value is not None:
                real_number(name, value, least=0, also=f": {words}", error=PlanError)
        own = _own(target, cluster)
        self._target, self._batch, self._options = target, global_batch, options
        self._samples, self._price, self._intensity = samples, price, intensity
        self._known: dict[str, Cluster | None] = {**({NO_CLUSTER: None} if own is None else {}), **clusters(own)}
        self._sources: dict[str, Source] = {}
        self._bands: dict[str, list[Place]] = {}
        self._problem = ""
        first = next(name for name, known in self._known.items() if known == own)
        self._name = first
        source = self._source(first)
        sizes = source.sizes()
        self.gpus = ipywidgets.SelectionSlider(options=_labelled(sizes), value=sizes[len(sizes) // 2], description="GPUs")
        self.cluster = ipywidgets.Dropdown(
            options=list(self._known), value=first, description="cluster", disabled=isinstance(target, Plans)
        )
        self.gpus.observe(lambda _: self._redraw(), names="value")
        self.cluster.observe(lambda _: self._picked(), names="value")
        self.head, self.light, self.figures, self.curve, self.limits = (ipywidgets.HTML() for _ in range(5))
        box = ipywidgets.Box([self.gpus, self.cluster]).add_class("wb-knobs")
        shown = [self.head, box, self.light, self.figures, self.curve, self.limits, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-planner").add_class("wb-scaling")
        self._redraw()

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            source = source_of(self._target, self._known[name], self._batch, self._options)
            self._bands[name] = band(source)
            self._sources[name] = source
        return self._sources[name]

    def _picked(self) -> None:
        """Another cluster: the slider stays as near as that cluster's numbers of GPUs let it."""
        name = self.cluster.value
        try:
            sizes = self._source(name).sizes()
        except (PlanError, CostError) as error:
            self._problem = str(error)
            self.light.value = faces.alert(self._problem)
            return
        self._name, self._problem = name, ""
        nearest = min(sizes, key=lambda size: abs(size - self.gpus.value))
        if tuple(self.gpus.options) != _labelled(sizes):
            self.gpus.options = _labelled(sizes)  # ipywidgets then turns it to the first
        self.gpus.value = nearest
        self._redraw()

    @property
    def place(self) -> Place:
        return self._sources[self._name].at(self.gpus.value)

    def _redraw(self) -> None:
        place, source = self.place, self._sources[self._name]
        self.gpus.description = place.counted
        self.head.value = drawn.head(self.title)
        self.light.value = drawn.light(place)
        self.figures.value = drawn.figures(place, self._samples, self._price, self._intensity)
        self.curve.value = drawn.picture(self._bands[self._name], source.measured, place)
        self.limits.value = drawn.limits(self._bands[self._name])

    @property
    def title(self) -> str:
        """What is explored, in one line."""
        target = self._target
        kind = self._sources[self._name].kind
        if isinstance(target, ScalingCurve | CurveFit):
            return f"{kind}, {target.points[0].world_size} … {target.points[-1].world_size} processes"
        name = target.name if isinstance(target, Plans) else f"{units.count(target.parameters)} parameters"
        return f"{kind}, {name} on {self._name}"

    @property
    def notes(self) -> str:
        """Notes on what is shown."""
        curve = isinstance(self._target, ScalingCurve | CurveFit)
        return "beyond what was measured, the band is the laws' spread" if curve else "predicted by closed forms; nothing was run"

    def __repr__(self) -> str:
        return f"ScalingExplorer({self.title!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        place = self.place
        places, measured = self._bands[self._name], self._sources[self._name].measured
        tiles = drawn.figures(place, self._samples, self._price, self._intensity)
        shown = tiles + drawn.picture(places, measured, place) + drawn.limits(places)
        static = drawn.static(self.title, place, places, shown, self.notes)
        return {**self.widget._repr_mimebundle_(**options), "text/plain": repr(self), "text/html": static}


def _own(target: Any, cluster: Cluster | str | None) -> Cluster | None:
    """The cluster that is picked at first; None = none."""
    if isinstance(target, Plans):
        return target.cluster
    if cluster is None:
        return Cluster.named(DEFAULT_CLUSTER) if isinstance(target, Transformer) else None
    return cluster if isinstance(cluster, Cluster) else Cluster.named(cluster)


def _labelled(sizes: list[int]) -> tuple[tuple[str, int], ...]:
    return tuple((f"{size:,}", size) for size in sizes)
