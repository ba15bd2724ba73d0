"""DataExplorer: a panel over what an audit has found, the samples of a dataset, and the order of an epoch."""

from typing import Any

import ipywidgets

from workbench.core.checks import choice
from workbench.core.display.html import Style
from workbench.data.analysis.data_audit import DataAudit, Group
from workbench.data.panel import html

KINDS = ("all", "leaks between splits", "conflicting labels", "equal", "near")
"""What groups can be shown."""
PAGE = 8
"""Groups on a page."""


class DataExplorer:
    """A panel of the findings, the groups of equal and near samples with their pictures, the classes, and the order of an epoch.

    Attributes:
        audit: what is shown.
        kind: which groups; `.value` is one of "all", "leaks between splits", "conflicting labels", "equal", "near".
        page: which of their pages, from 1.
        order: how the samples of the epoch are ordered: "shuffled", "as stored", "in blocks".
        block: samples of a block; window: blocks that are mixed.
        result: the groups that are shown.
        widget: everything in one box.
    """

    def __init__(self, audit: DataAudit, *, kind: str = "all") -> None:
        """
        Args:
            audit: what `wb.data.audit` gave.
            kind: which groups are shown first.

        Raises:
            ValueError: something else was given.
        """
        if not isinstance(audit, DataAudit):
            raise ValueError(f"DataExplorer({type(audit).__name__}): what wb.data.audit(data) gave is allowed")
        choice("kind", kind, KINDS)
        self.audit = audit
        self.kind = ipywidgets.Dropdown(options=KINDS, value=kind, description="groups")
        self.page = ipywidgets.BoundedIntText(value=1, min=1, max=1, description="page")
        self.order = ipywidgets.Dropdown(options=("shuffled", "as stored", "in blocks"), value="shuffled", description="order")
        largest = max(audit.samples.values())
        self.block = ipywidgets.BoundedIntText(value=max(1, min(100, largest)), min=1, max=largest, description="block")
        self.window = ipywidgets.BoundedIntText(value=4, min=1, max=64, description="window")
        self.head, self.groups, self.health, self.epoch = (ipywidgets.HTML() for _ in range(4))
        self.kind.observe(lambda _: self._first_page(), names="value")
        self.page.observe(lambda _: self._redraw(), names="value")
        for knob in (self.order, self.block, self.window):
            knob.observe(lambda _: self._redraw_epoch(), names="value")
        knobs = ipywidgets.Box([self.kind, self.page]).add_class("wb-knobs")
        orders = ipywidgets.Box([self.order, self.block, self.window]).add_class("wb-knobs")
        shown = [self.head, self.health, knobs, self.groups, orders, self.epoch, Style()]
        self.widget = ipywidgets.VBox(shown).add_class("wb-panel").add_class("wb-data")
        self._first_page()
        self._redraw_epoch()

    @property
    def result(self) -> tuple[Group, ...]:
        """The groups of the kind and page that are chosen."""
        return self._chosen()[(self.page.value - 1) * PAGE : self.page.value * PAGE]

    def _chosen(self) -> tuple[Group, ...]:
        audit = self.audit
        kinds = {"all": audit.groups, "leaks between splits": audit.leaks, "conflicting labels": audit.conflicts}
        return (kinds | {"equal": audit.exact, "near": audit.near})[self.kind.value]

    def _first_page(self) -> None:
        self.page.max = max(1, -(-len(self._chosen()) // PAGE))
        self.page.value = 1
        self._redraw()

    def _redraw(self) -> None:
        self.head.value = html.head(self.audit)
        self.health.value = html.health(self.audit)
        self.groups.value = html.groups(self.result, len(self._chosen()))

    def _redraw_epoch(self) -> None:
        self.epoch.value = html.epoch(self.audit, self.order.value, self.block.value, self.window.value)

    def __repr__(self) -> str:
        return f"DataExplorer({self.audit.target!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        static = "".join(part.value for part in (self.head, self.health, self.groups, self.epoch))
        return {**self.widget._repr_mimebundle_(**options), "text/plain": repr(self), "text/html": f'<div class="wb-panel">{static}</div>'}
