"""ExplorerKnobs: widgets for the knobs that decide most about a step's memory, and the values that their sliders offer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from workbench.core.device import DEVICES, Device
from workbench.core.optimizer_table import OFFERED
from workbench.runs.spec import KNOBS, RunSpec

LENGTHS = ("sequence", "image")
"""Knobs for sizes of a sample; one is shown only if the batch has such a size."""
NAMES = tuple(name for name, about in KNOBS.items() if "memory" in about.panels)
"""Knobs of a RunSpec that are shown."""
PARALLELS = {"zero1": "zero1 (ZeRO-1)", "zero2": "zero2 (ZeRO-2)", "fsdp": "fsdp (ZeRO-3)"}
"""`parallel` → its usual name."""
IMPLEMENTED = (("the task's own", ""), ("the task's own, fused", "fused"), ("the task's own, foreach", "foreach"))
ACCUMULATIONS = (1, 2, 4, 8, 16)
RANKS = tuple(2**power for power in range(11))
PER_OCTAVE = 4
"""Values of a slider between a number and its double."""
LARGEST_BATCH = 4096


def places(low: float, high: int, *own: int, unit: int = 1) -> list[int]:
    """Whole numbers from `low` to `high` that are spread evenly in their logarithm, multiples of `unit`; and some of one's own.

    >>> places(1, 16)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    """
    values = set(own)
    for octave in range(max(0, math.floor(math.log2(high / low))) + 1):
        values |= {unit * round(low * 2**octave * (1 + part / PER_OCTAVE) / unit) for part in range(PER_OCTAVE)}
    return sorted(x for x in values if low <= x <= high or x in own)


def places_of(axis: str, own: int) -> list[int]:
    """The values of a number's slider, its own value included."""
    if axis == "micro_batch":
        return places(1, max(LARGEST_BATCH, 8 * own), own)
    if axis == "sequence":
        return places(max(2, own / 16), 32 * own, own)
    unit = next(unit for unit in (32, 16, 8, 4, 2, 1) if own % unit == 0)
    return places(unit, 8 * own, own, unit=unit)


class ExplorerKnobs:
    """Widgets in a box: those of NAMES, of LENGTHS, and the device.

    Attributes:
        widgets: name → widget; `.value` turns it.
        box: all of them.
        own: the sizes of the task's own sample, as far as they are known.
    """

    def __init__(self, spec: RunSpec, device: str | Device, on_turn: Callable[[str], None]) -> None:
        self._on_turn, self._quiet = on_turn, False
        self._spec = spec
        name = device if isinstance(device, str) else device.name
        self.devices: dict[str, str | Device] = {**{device.name: device.name for device in DEVICES}, "cpu": "cpu", name: device}
        optimizers = [
            *IMPLEMENTED,
            *(
                (optimizer, optimizer)
                for optimizer in dict.fromkeys([*OFFERED, spec.optimizer])
                if optimizer not in (None, "fused", "foreach")
            ),
        ]
        special = {
            "micro_batch": (places_of("micro_batch", spec.micro_batch), ipywidgets.SelectionSlider),
            "accumulation": (sorted({*ACCUMULATIONS, spec.accumulation}), ipywidgets.SelectionSlider),
            "nproc_per_node": (sorted({*RANKS, spec.nproc_per_node}), ipywidgets.SelectionSlider),
            "optimizer": (optimizers, ipywidgets.Dropdown),
            "parallel": ([(PARALLELS.get(way, way), way) for way in KNOBS["parallel"].choices], ipywidgets.Dropdown),
        }
        self.widgets: dict[str, Any] = {}
        for knob in NAMES:
            options, kind = special.get(knob, (KNOBS[knob].choices or (False, True), ipywidgets.Dropdown))
            value = getattr(spec, knob)
            self.widgets[knob] = kind(options=options, value="" if value is None else value)
            if knob == "micro_batch":
                self.widgets |= {length: ipywidgets.SelectionSlider(options=[1]) for length in LENGTHS}
        self.widgets["device"] = ipywidgets.Dropdown(options=list(self.devices), value=name)
        self.own: dict[str, int] = {}
        for knob in LENGTHS:
            self.widgets[knob].layout.display = "none"
        for knob, widget in self.widgets.items():
            widget.description = "ranks" if knob == "nproc_per_node" else knob
            widget.observe(lambda _, knob=knob: self._turned(knob), names="value")
        self.box = ipywidgets.Box(list(self.widgets.values())).add_class("wb-knobs")

    def learn(self, axis: str, own: int, now: int) -> None:
        """Show the knob of a size that the batch turned out to have."""
        self._quiet = True
        self.own[axis] = own
        widget = self.widgets[axis]
        widget.options = sorted({*places_of(axis, own), now})
        widget.value = now
        widget.layout.display = None
        self._quiet = False

    @property
    def spec(self) -> RunSpec:
        """The spec with the present knobs.

        Raises:
            SpecError: they do not go together.
        """
        changes = {name: self.widgets[name].value for name in NAMES}
        changes["optimizer"] = changes["optimizer"] or None
        return self._spec.replace(**{name: value for name, value in changes.items() if value != getattr(self._spec, name)})

    @property
    def device(self) -> str | Device:
        return self.devices[self.widgets["device"].value]

    @property
    def lengths(self) -> dict[str, int]:
        """The present sizes of the batch, of those it has."""
        return {axis: self.widgets[axis].value for axis in self.own}

    def places(self, axis: str) -> Sequence[int]:
        """The values of a number's slider."""
        found: Sequence[int] = self.widgets[axis].options
        return found

    def _turned(self, knob: str) -> None:
        if not self._quiet:
            self._on_turn(knob)
