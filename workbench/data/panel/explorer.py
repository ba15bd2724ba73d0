"""DataExplorer: a panel over what an audit has found, the samples and shards of a dataset, and the order of an epoch."""

from typing import Any

import ipywidgets

from workbench.core.checks import choice
from workbench.core.display.html import Style
from workbench.data.analysis.data_audit import DataAudit, Group
from workbench.data.data_card import DataCard
from workbench.data.panel import html

KINDS = ("all", "leaks between splits", "conflicting labels", "equal", "near")
"""What groups can be shown."""
PAGE = 8
"""Groups on a page."""


class DataExplorer:
    """Tabs with findings and classes, groups of equal and near samples, and the order of an epoch; or with samples and shards of a dataset.

    Attributes:
        audit: the result of an audit; None = the tabs "findings", "groups" and "epoch" are left out.
        card: the data card of a dataset; None = the tabs "samples" and "shards" are left out.
        kind: the groups that are shown; `.value` is one of "all", "leaks between splits", "conflicting labels", "equal", "near".
        page: the page of the groups, from 1.
        order: how the samples of the epoch are ordered: "shuffled", "as stored", "in blocks".
        block: samples in a block; window: number of blocks that are mixed.
        readers: ranks × workers among which the shards are shared.
        result: the groups that are shown.
        tabs: title → content of the tab.
        widget: everything in one box.
    """

    def __init__(self, data: DataAudit | DataCard, *, card: DataCard | None = None, kind: str = "all") -> None:
        """
        Args:
            data: what `wb.data.audit` or `wb.data.describe` gave.
            card: what `wb.data.describe` gave, beside an audit.
            kind: which groups are shown first.

        Raises:
            ValueError: something else was given.
        """
        if not isinstance(data, DataAudit | DataCard) or (card is not None and not isinstance(card, DataCard)):
            given = type(data if not isinstance(data, DataAudit | DataCard) else card).__name__
            raise ValueError(f"DataExplorer({given}): what wb.data.audit(data) gave is allowed, or wb.data.describe(data)")
        choice("kind", kind, KINDS)
        self.audit = data if isinstance(data, DataAudit) else None
        self.card = data if isinstance(data, DataCard) else card
        self.head, self.groups, self.health, self.epoch, self.samples, self.shards = (ipywidgets.HTML() for _ in range(6))
        self.kind = ipywidgets.Dropdown(options=KINDS, value=kind, description="groups")
        self.page = ipywidgets.BoundedIntText(value=1, min=1, max=1, description="page")
        self.order = ipywidgets.Dropdown(options=("shuffled", "as stored", "in blocks"), value="shuffled", description="order")
        largest = max(self.audit.samples.values()) if self.audit else 1
        self.block = ipywidgets.BoundedIntText(value=max(1, min(100, largest)), min=1, max=max(1, largest), description="block")
        self.window = ipywidgets.BoundedIntText(value=4, min=1, max=64, description="window")
        self.readers = ipywidgets.BoundedIntText(value=8, min=1, max=100_000, description="readers")
        self.tabs: dict[str, Any] = {}
        if self.audit is not None:
            knobs = ipywidgets.Box([self.kind, self.page]).add_class("wb-knobs")
            orders = ipywidgets.Box([self.order, self.block, self.window]).add_class("wb-knobs")
            self.tabs |= {"findings": self.health, "groups": ipywidgets.VBox([knobs, self.groups])}
            self.tabs["epoch"] = ipywidgets.VBox([orders, self.epoch])
        if self.card is not None:
            self.tabs["samples"] = self.samples
            if self.card.manifest is not None:
                self.tabs["shards"] = ipywidgets.VBox([ipywidgets.Box([self.readers]).add_class("wb-knobs"), self.shards])
        self.kind.observe(lambda _: self._first_page(), names="value")
        self.page.observe(lambda _: self._redraw(), names="value")
        self.readers.observe(lambda _: self._redraw_shards(), names="value")
        for knob in (self.order, self.block, self.window):
            knob.observe(lambda _: self._redraw_epoch(), names="value")
        box = ipywidgets.Tab(children=list(self.tabs.values()), titles=list(self.tabs))
        self.widget = ipywidgets.VBox([self.head, box, Style()]).add_class("wb-panel").add_class("wb-data")
        self.head.value = "".join(html.head(each) for each in (self.audit, self.card) if each is not None)
        self._first_page()
        self._redraw_epoch()
        self._redraw_shards()
        if self.card is not None:
            self.samples.value = html.samples(self.card)

    @property
    def result(self) -> tuple[Group, ...]:
        """The groups of the chosen kind and page."""
        return self._chosen()[(self.page.value - 1) * PAGE : self.page.value * PAGE]

    def _chosen(self) -> tuple[Group, ...]:
        audit = self.audit
        if audit is None:
            return ()
        kinds = {"all": audit.groups, "leaks between splits": audit.leaks, "conflicting labels": audit.conflicts}
        return (kinds | {"equal": audit.exact, "near": audit.near})[self.kind.value]

    def _first_page(self) -> None:
        self.page.max = max(1, -(-len(self._chosen()) // PAGE))
        self.page.value = 1
        self._redraw()

    def _redraw(self) -> None:
        if self.audit is not None:
            self.health.value = html.health(self.audit)
            self.groups.value = html.groups(self.result, len(self._chosen()))

    def _redraw_epoch(self) -> None:
        if self.audit is not None:
            self.epoch.value = html.epoch(self.audit, self.order.value, self.block.value, self.window.value)

    def _redraw_shards(self) -> None:
        if self.card is not None and self.card.manifest is not None:
            self.shards.value = html.shards(self.card.manifest, self.readers.value)

    def __repr__(self) -> str:
        return f"DataExplorer({self.audit.target if self.audit is not None else self.card.path if self.card is not None else ''!r})"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        static = "".join(part.value for part in (self.head, self.health, self.groups, self.epoch, self.samples, self.shards))
        return {**self.widget._repr_mimebundle_(**options), "text/plain": repr(self), "text/html": f'<div class="wb-panel">{static}</div>'}
