"""WhyNotLinear: a panel of the gap between N × one rank and N, with knobs for ranks and links, parts to be mended, and proofs."""

import dataclasses
import math
import os
from typing import Any

import ipywidgets

from workbench.core import units
from workbench.core.checks import check_budget, real_number
from workbench.core.display.html import Style
from workbench.core.system_load import usable_cores
from workbench.diagnosis import api
from workbench.diagnosis import why_not_linear as measuring
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap import CAUSES
from workbench.diagnosis.analysis.gap_forecast import link_of
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear as Answer
from workbench.diagnosis.panel import linear_html as html
from workbench.diagnosis.panel.doctor import Background
from workbench.diagnosis.panel.remedy_rows import RemedyRows
from workbench.diagnosis.plot_gap import COLORS
from workbench.runs.launch.environment import gpu_count
from workbench.runs.panel import html as faces
from workbench.runs.spec import RunSpec, ScriptSpec, Spec

MOST_RANKS = 1024
"""Ranks to which the slider goes."""
AS_IT_IS = "as it is"
"""The setting of a link's knob that changes nothing."""
LATENCIES = tuple(factor * 10.0**power for power in range(-6, -1) for factor in (1, 2, 5))
"""Seconds of a reduction of nothing between two ranks."""
BANDWIDTHS = tuple(factor * 10.0**power for power in range(7, 12) for factor in (1, 2, 5))
"""Bytes per second between two ranks."""


class WhyNotLinear:
    """A waterfall from N × one rank down to N ranks, with knobs for more ranks and other links, and with checkboxes that remove parts.

    Changing a knob computes a prediction and starts nothing. Measure launches the chosen number of ranks if they fit this machine, and
    Prove runs a remedy, one at a time, in a separate thread. Stop ends their launches.

    Attributes:
        spec: what is measured; None if the result's subject cannot be launched.
        result: the answer of `wb.why_not_linear`; None before the first measurement.
        answer: the same for the chosen ranks, batch and link; None before the first measurement.
        ranks: the slider of ranks; set `.value`. `same`: what the one process and the ranks have in common.
        latency, bandwidth: latency and bandwidth of the link between two ranks.
        price: price of a device per hour.
        mend: cause → checkbox that removes this part.
        measure, stop: buttons.
        proves: the remedies' buttons, by name.
        head, verdict, tiles, problem, status: what is shown.
        widget: everything in one box.
    """

    def __init__(
        self,
        target: Spec | Answer,
        *,
        budget_s: float = api.BUDGET,
        price_per_hour: float = 0.0,
        runs_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            target: a spec, or what `wb.why_not_linear` answered.
            budget_s: seconds that a measurement or a proof may take.
            price_per_hour: of one device; 0 = costs are relative to those of one rank.
            runs_dir: where run directories go; None = `runs` in the current folder.

        Raises:
            ValueError: something else was given, a spec whose ranks cannot be set beside one, no budget or no price.
        """
        if not isinstance(target, RunSpec | ScriptSpec | Answer):
            raise ValueError(
                f"WhyNotLinear({type(target).__name__}): a spec or an answer of wb.why_not_linear is needed; "
                'try WhyNotLinear(wb.RunSpec(task="text-gpt", nproc_per_node=2)) or WhyNotLinear(wb.why_not_linear("train.py"))'
            )
        check_budget(budget_s, limited=True)
        real_number("price_per_hour", price_per_hour, least=0, what="money per hour of one device")
        self._budget, self._runs_dir = budget_s, runs_dir
        self.spec: Spec | None = target.spec if isinstance(target, Answer) else target
        if isinstance(self.spec, RunSpec):
            measuring.check(self.spec)
        self.result: Answer | None = None
        self.answer: Answer | None = None
        self._earlier: float | None = None
        self._quiet = False
        self._make_widgets(price_per_hour)
        if isinstance(target, Answer):
            self._take(target)
        else:
            most = max(self._places, self.spec.world_size if self.spec else 1)
            self._sizes(range(2, int(most) + 1), self.spec.world_size if self.spec else 2)
            self._redraw()
        self._allow()

    def _make_widgets(self, price: float) -> None:
        self._background = Background(self._allow)
        self.status, self.problem, self.stop = self._background.status, self._background.problem, self._background.stop
        self.ranks = ipywidgets.SelectionSlider(options=[2], value=2, description="ranks")
        self.same = ipywidgets.Dropdown(
            options=[("equal micro-batch", "micro_batch"), ("equal global batch", "global_batch")], description="beside one rank"
        )
        self.latency = ipywidgets.SelectionSlider(
            options=[(AS_IT_IS, 0.0), *((units.seconds(value), value) for value in LATENCIES)], value=0.0, description="latency"
        )
        self.bandwidth = ipywidgets.SelectionSlider(
            options=[(AS_IT_IS, 0.0), *((units.count(value, "B/s"), value) for value in BANDWIDTHS)], value=0.0, description="bandwidth"
        )
        self.price = ipywidgets.BoundedFloatText(value=price, min=0, max=1e6, description="price per hour")
        knobs = [self.ranks, self.same, self.latency, self.bandwidth, self.price]
        for knob in knobs:
            knob.observe(self._turned, names="value")
        self.mend = {cause: ipywidgets.Checkbox(value=False, indent=False) for cause in CAUSES}
        self._rows = {cause: ipywidgets.HTML() for cause in COLORS}
        self._lines: dict[str, ipywidgets.HBox] = {}
        for cause, row in self._rows.items():
            box = self.mend.get(cause) or ipywidgets.HTML()
            self._lines[cause] = ipywidgets.HBox([box.add_class("wb-mend"), row.add_class("wb-part")]).add_class("wb-line-of")
        for cause, box in self.mend.items():
            box.tooltip = f"What if nothing were lost to {cause}?"
            box.observe(self._turned, names="value")
        self.head, self.verdict, self.tiles, self._first, self._last, self._note = (ipywidgets.HTML() for _ in range(6))
        ends = [ipywidgets.HBox([ipywidgets.HTML().add_class("wb-mend"), end.add_class("wb-part")]) for end in (self._first, self._last)]
        self._ends = [end.add_class("wb-line-of") for end in ends]
        self.waterfall = ipywidgets.VBox().add_class("wb-waterfall")
        self._remedies = RemedyRows(self._prove)
        self.remedies = self._remedies.box
        self.measure = ipywidgets.Button(description="Measure").add_class("wb-go")
        self.measure.on_click(self._measure)
        buttons = ipywidgets.HBox([self.measure, self.stop]).add_class("wb-buttons")
        top = ipywidgets.HBox([self.head.add_class("wb-status"), buttons]).add_class("wb-top")
        box = ipywidgets.Box(knobs).add_class("wb-knobs")
        shown = [top, self.status, self.problem, box, self.tiles, self.waterfall, self._note, self.verdict, self.remedies, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-doctor").add_class("wb-linear")

    @property
    def proves(self) -> dict[str, ipywidgets.Button]:
        """The remedies' buttons, by name."""
        return self._remedies.proves

    @property
    def mended(self) -> list[str]:
        """The removed parts."""
        return [cause for cause, box in self.mend.items() if box.value]

    # --- what is shown

    def _sizes(self, sizes: range | list[int], value: int) -> None:
        """Other numbers of ranks to choose from."""
        self._quiet = True
        self.ranks.options = [(f"{size:,}", size) for size in sorted({*sizes, value})]
        self.ranks.value = value
        self._quiet = False

    def _take(self, result: Answer) -> None:
        """Show an answer."""
        self.result = result
        measured = result.evidence.world_size
        sizes = [size for power in range(11) if 1 < (size := measured * 2**power) <= MOST_RANKS]
        self._sizes(sizes, result.world_size)
        self._quiet = True
        self.same.value, self.latency.value, self.bandwidth.value = result.same, 0.0, 0.0
        for box in self.mend.values():
            box.value = False
        self._quiet = False
        self._redraw()
        self._remedies.show(result.remedies, result.proofs, busy=self._background.busy)

    def _turned(self, _change: object) -> None:
        if not self._quiet:
            self._earlier = None
            self._redraw()

    @property
    def link(self) -> Gradients | None:
        """The link that the knobs describe; None = as it is."""
        result = self.result
        if result is None or not (self.latency.value or self.bandwidth.value):
            return None if result is None else result.link
        now = link_of(result.evidence) or result.link
        if now is None:
            return None
        per_byte = 1 / self.bandwidth.value if self.bandwidth.value else now.per_byte
        return dataclasses.replace(now, latency=self.latency.value or now.latency, per_byte=per_byte)

    def _asked(self, result: Answer) -> Answer:
        """The result for the picked ranks, batch and link."""
        same, link = self.same.value, self.link
        asked = 0 if self.ranks.value == result.evidence.world_size else self.ranks.value
        if (same, link, asked) == (result.same, result.link, result.ranks):
            return result
        return dataclasses.replace(result, same=same, link=link, ranks=asked)

    def _redraw(self) -> None:
        """Arithmetic and text only."""
        self.head.value = html.head(self.title)
        result = self.result
        if result is None:
            self._note.value = '<div class="wb-what">Nothing is measured yet: press Measure, and every part of the gap appears.</div>'
            self._allow()
            return
        self.answer = self._asked(result)
        drawn = html.Waterfall(self.answer, self.mended)
        self.tiles.value = html.tiles(self.answer, drawn, self.price.value, self._earlier)
        self._first.value, self._last.value = drawn.first(), drawn.last()
        for part in drawn.parts:
            self._rows[part.cause].value = drawn.part(part.cause)
            if box := self.mend.get(part.cause):
                box.disabled = part.seconds.mid <= 0 and not box.value  # nothing is lost there
        children = (self._ends[0], *(self._lines[part.cause] for part in drawn.parts), self._ends[1])
        if self.waterfall.children != children:  # else what has the focus would lose it
            self.waterfall.children = children
        self._note.value, self.verdict.value = html.legend(drawn), html.verdict(self.answer)
        self._allow()

    # --- what runs

    def _measure(self, _button: object) -> None:
        spec, ranks = self.spec, self.ranks.value
        assert spec is not None
        answer, same, turned = self.answer, self.same.value, self.latency.value or self.bandwidth.value  # a link that is not here
        predicted = answer.samples / answer.gap.step.mid if answer and answer.gap.predicted and not turned else None
        chosen = spec.replace(nproc_per_node=ranks // spec.nnodes)

        def work() -> None:
            options: dict[str, Any] = {"same": same, "budget_s": self._budget, "runs_dir": self._runs_dir}
            result = measuring.why_not_linear(chosen, **options)
            self._background.heed()  # what was stopped half way is no result
            self.spec, self._earlier = chosen, predicted
            self._take(result)

        self._background.start(f"measuring {ranks} ranks beside one", work, self._budget)

    def _prove(self, remedy: Remedy) -> None:
        work = self._remedies.proof(remedy, lambda: self.result, self._budget)
        self._background.start(f"proving {remedy.name}, alternating with the spec as it is", work, self._budget)

    @property
    def _on_gpus(self) -> bool:
        return bool(gpu_count()) and getattr(self.spec, "device", "auto") != "cpu"

    @property
    def _places(self) -> int:
        """Ranks that this machine has room for."""
        return (gpu_count() or 0) if self._on_gpus else math.floor(usable_cores())

    @property
    def why_not_here(self) -> str:
        """Why the chosen ranks cannot be measured; "" = they can."""
        if self.spec is None:
            return "there is no spec that could be launched"
        if self.ranks.value > max(self._places, self.spec.world_size):
            places = f"{units.count(self._places)} {'GPUs' if self._on_gpus else 'cores'}"
            return f"{self.ranks.value} ranks do not fit on {places}, so they are only predicted"
        if self.ranks.value % self.spec.nnodes:
            return f"{self.ranks.value} ranks cannot be divided evenly over {self.spec.nnodes} machines"
        return ""

    def _allow(self) -> None:
        """Buttons can be pressed where there is something to run, and while nothing runs; knobs turned where they change something."""
        busy, why = self._background.busy, self.why_not_here
        self.measure.disabled = busy or bool(why)
        self.measure.tooltip = why or "Launch one rank alone, all ranks without reductions, and all ranks, alternately, and explain the gap"
        self._remedies.hold(busy)
        known = self.result is not None and (link_of(self.result.evidence) or self.result.link) is not None
        self.latency.disabled = self.bandwidth.disabled = not known

    # --- how it shows itself

    @property
    def title(self) -> str:
        """What is examined, in one line."""
        return faces.essentials(self.spec) if self.spec else f"{self.ranks.value} ranks"

    def __repr__(self) -> str:
        return f"WhyNotLinear({self.title!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        answer = self.answer
        drawn = html.Waterfall(answer, self.mended) if answer else None
        tiles = html.tiles(answer, drawn, self.price.value, self._earlier) if answer and drawn else ""
        static = html.static(self.title, answer, drawn, tiles)
        return {**self.widget._repr_mimebundle_(**options), "text/plain": repr(self), "text/html": static}
