"""The knobs of the ThroughputDoctor as widgets, and the step that is predicted for them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets

from workbench.core.vocabulary import PARTS
from workbench.diagnosis.analysis.step_model import Parts, StepModel
from workbench.runs.spec import KNOBS, RunSpec

PREFETCH = 2
"""torch's own prefetch_factor, which a spec calls None."""
NAMES = tuple(name for name, about in KNOBS.items() if "doctor" in about.panels)
"""Knobs that are shown."""
_MOST = 8
"""Sliders of whole numbers end here, or at the measured step's value if that is larger."""
_LARGEST_BATCH = 1024


class Knobs:
    """Widgets in a box, one for each of NAMES. `changes` is what was turned.

    Attributes:
        widgets: name → widget; `.value` turns it.
        box: all of them.
    """

    def __init__(self, on_turn: Callable[[], None]) -> None:
        """
        Args:
            on_turn: called after a knob was turned, by hand or by setting its value.
        """
        self._on_turn, self._quiet = on_turn, True
        self.widgets: dict[str, Any] = {name: _widget(name) for name in NAMES}
        for name, knob in self.widgets.items():
            knob.description = name
            knob.observe(self._turned, names="value")
        self.box = ipywidgets.Box(list(self.widgets.values())).add_class("wb-knobs")
        self._known, self._held = dict.fromkeys(self.widgets, False), False
        self.starts: dict[str, Any] = {}

    def set(self, values: Mapping[str, Any]) -> None:
        """Set the knobs to the values of the measured step; a knob whose value is not known is locked."""
        self._quiet = True
        for name, knob in self.widgets.items():
            value = values.get(name)
            self._known[name] = value is not None
            if value is None:
                continue
            if name == "micro_batch":
                knob.options = _sizes(value)
            elif hasattr(knob, "max"):
                knob.max = max(knob.max, value)
            knob.value = value
        self.starts = {name: knob.value for name, knob in self.widgets.items()}
        self._allow()
        self._quiet = False

    def hold(self, held: bool) -> None:
        """Lock all knobs, or unlock them."""
        self._held = held
        self._allow()

    def _allow(self) -> None:
        for name, knob in self.widgets.items():
            knob.disabled = self._held or not self._known[name]
        if not self.widgets["num_workers"].value:  # nothing is prefetched without workers
            self.widgets["prefetch_factor"].disabled = True

    @property
    def changes(self) -> dict[str, Any]:
        """Name → value of each knob that was changed."""
        workers = self.widgets["num_workers"].value
        return {
            name: knob.value
            for name, knob in self.widgets.items()
            if self._known[name] and knob.value != self.starts[name] and (workers or name != "prefetch_factor")
        }

    @property
    def samples(self) -> float:
        """Samples of a step, relative to the measured one."""
        changes = self.changes
        return float(math.prod(changes[name] / self.starts[name] for name in ("micro_batch", "nproc_per_node") if name in changes))

    def turned(self, spec: RunSpec) -> RunSpec:
        """A spec with the current knobs."""
        changes = self.changes
        if changes.get("num_workers") == 0:
            changes |= {"prefetch_factor": None, "persistent_workers": False}
        return spec.replace(**changes)

    def _turned(self, _change: object) -> None:
        if not self._quiet:
            self._allow()
            self._on_turn()


def knob_values(spec: RunSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in NAMES} | {"prefetch_factor": spec.prefetch_factor or PREFETCH}


def _widget(name: str) -> Any:
    """By the kind of the knob's values: names, True or False, or whole numbers from 1, or 0 where that is the default."""
    about = KNOBS[name]
    if name == "micro_batch":
        return ipywidgets.SelectionSlider(options=_sizes(1))
    if about.choices:
        return ipywidgets.Dropdown(options=about.choices)
    if isinstance(about.default, bool):
        return ipywidgets.Checkbox(value=about.default)
    start = PREFETCH if name == "prefetch_factor" else about.default
    return ipywidgets.IntSlider(min=min(start, 1), max=_MOST, value=start)


def _sizes(now: int) -> list[int]:
    """Batches to choose from: powers of two, and the one there is."""
    top = max(_LARGEST_BATCH, 8 * now)
    return sorted({2**power for power in range(top.bit_length()) if 2**power <= top} | {now})


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A predicted step beside the one it came from."""

    changes: Mapping[str, Any]
    """Knobs that were turned."""
    parts: Parts | None
    """Predicted; None if the model cannot."""
    speedup: float
    """Throughput in samples over that of now."""
    complaint: str = ""
    """Why the model cannot."""

    def pieces(self, now: Parts) -> dict[str, float]:
        """Seconds per part for as many samples as the step has now, so that a bar half as long is twice the throughput."""
        assert self.parts is not None
        scale = now.step / self.speedup / self.parts.step
        return {part: self.parts.seconds(part) * scale for part in PARTS}


def what_if(model: StepModel, now: Parts, changes: Mapping[str, Any], samples: float = 1.0) -> WhatIf:
    """Predict once; fast enough to follow a slider."""
    try:
        parts = model.parts(**changes)
    except ValueError as error:
        return WhatIf(changes=dict(changes), parts=None, speedup=float("nan"), complaint=str(error))
    if not parts.step > 0:
        return WhatIf(changes=dict(changes), parts=None, speedup=float("nan"), complaint="the model leaves nothing of the step")
    return WhatIf(changes=dict(changes), parts=parts, speedup=samples * now.step / parts.step)
