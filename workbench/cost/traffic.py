"""Traffic: all collectives of a training step of one rank, with their bytes; exact where a program's own calls were counted."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.cost.cluster import Cluster
from workbench.cost.collectives import CostError
from workbench.cost.sent import PHASES, Sent
from workbench.cost.traffic_lint import Finding, lint
from workbench.cost.traffic_time import TrafficTime, timed_on

SHOWN = 20
"""Rows of a table by module; what is smaller is one row. `to_frame` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Collectives that have something in common, summed."""

    name: str
    """What they have in common."""
    calls: tuple[Sent, ...]
    """They."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.calls)

    @property
    def size(self) -> int:
        """Their bytes, as `Sent.size`."""
        return sum(one.size for one in self.calls)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in them."""
        return sum(one.sent for one in self.calls)

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed."""
        needed = sum(one.size if one.needed is None else one.needed for one in self.calls)
        return self.size / needed - 1 if needed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(display.Shown, JsonDataclass):
    """The collectives of one optimizer step of one rank, in their order. Get one from `wb.collectives`; iterates over its `Sent`.

    >>> one = Sent(kind="all_reduce", size=4 * 10**6, ranks=8, phase="backward", waited=True)
    >>> traffic = Traffic(calls=(one,), world_size=8, parameters=10**6)
    >>> traffic.count("all_reduce"), traffic.size(), traffic.sent()
    (1, 4000000, 7000000.0)
    """

    calls: tuple[Sent, ...]
    """In the order in which they are made; of a forward and backward for each micro-batch, and the optimizer's step."""
    world_size: int
    """Ranks."""
    parameters: int
    """Elements of the whole model."""
    title: str = ""
    """What was counted."""
    parallel: str = "ddp"
    """As `RunSpec.parallel`."""
    blocks: int = 0
    """Repeated blocks of the model, such as its layers; 0 = not known."""
    unused: tuple[str, ...] = ()
    """Parameters that want a gradient and got none."""
    looks_for_unused: bool = False
    """Does DDP look for them (`find_unused_parameters`)?"""
    notes: tuple[str, ...] = ()
    """What a reader should know."""

    def __iter__(self) -> Iterator[Sent]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def of(self, kind: str | None = None, *, phase: str | None = None, axis: str | None = None) -> tuple[Sent, ...]:
        """Those of a kind, a phase, an axis; None = any."""
        return tuple(one for one in self.calls if kind in (None, one.kind) and phase in (None, one.phase) and axis in (None, one.axis))

    def count(self, kind: str | None = None) -> int:
        """How many of a kind; None = all."""
        return len(self.of(kind))

    def size(self, kind: str | None = None) -> int:
        """Their bytes, as `Sent.size`."""
        return sum(one.size for one in self.of(kind))

    def sent(self, kind: str | None = None) -> float:
        """Bytes that a rank sends in them, in rings."""
        return sum(one.sent for one in self.of(kind))

    @property
    def padding(self) -> float:
        """Bytes of padding over those that are needed, of all collectives."""
        return Row(name="", calls=self.calls).padding

    @property
    def rows(self) -> tuple[Row, ...]:
        """By phase, kind, axis and ranks, in the order of a step."""

        def key(one: Sent) -> tuple[int, str, str, int]:
            return PHASES.index(one.phase), one.kind, one.axis, one.ranks

        return tuple(Row(name=name[1], calls=tuple(calls)) for name, calls in itertools.groupby(sorted(self.calls, key=key), key=key))

    def by_module(self, depth: int | None = None) -> tuple[Row, ...]:
        """By module, the one that sends most first.

        Args:
            depth: names of a module's path that count; None = all.
        """
        return self._by(lambda one: one.module if depth is None else ".".join(one.module.split(".")[:depth]))

    def by_kind(self) -> tuple[Row, ...]:
        """By kind, the one that sends most first."""
        return self._by(lambda one: one.kind)

    def _by(self, name: Callable[[Sent], str]) -> tuple[Row, ...]:
        found: dict[str, list[Sent]] = {}
        for one in self.calls:
            found.setdefault(name(one), []).append(one)
        return tuple(sorted((Row(name=what, calls=tuple(calls)) for what, calls in found.items()), key=lambda row: -row.sent))

    @property
    def lint(self) -> tuple[Finding, ...]:
        """What could be saved, or would fail."""
        return lint(self)

    def on(self, cluster: Cluster | str, *, algorithm: str = "best") -> TrafficTime:
        """Seconds of it on a cluster.

        Args:
            cluster: one, or the name of one in the catalogue.
            algorithm: "ring", "tree" or "best".

        Raises:
            CostError: an unknown name or algorithm.
        """
        known = Cluster.named(cluster) if isinstance(cluster, str) else cluster
        if not isinstance(known, Cluster):
            raise CostError(f"cluster={cluster!r}: a Cluster or the name of one is wanted, such as 'DGX-H100'")
        return timed_on(self.calls, known, title=self.title, world_size=self.world_size, algorithm=algorithm)

    @property
    def table(self) -> display.Table:
        """A row for each phase, kind and group of ranks."""
        rows = [
            [
                row.calls[0].phase,
                row.name,
                row.calls[0].axis,
                units.count(row.calls[0].ranks),
                units.count(row.count),
                units.bytes_(row.size),
                units.bytes_(row.sent),
                units.percent(row.padding),
            ]
            for row in self.rows
        ]
        return display.Table(
            columns=("phase", "collective", "among", "ranks", "calls", "bytes", "sent by a rank", "padding"),
            rows=rows,
            title=f"Collectives of a step: {self.title}" if self.title else "Collectives of a step",
            note="\n".join(
                [f"{units.count(self.parameters)} parameters, {units.count(self.world_size)} ranks", *self.notes, *map(str, self.lint)]
            ),
        )

    def modules_table(self, depth: int | None = None) -> display.Table:
        """A row for each of the SHOWN modules that send most, and one for the rest."""
        rows = self.by_module(depth)
        shown, rest = rows[:SHOWN], rows[SHOWN:]
        if rest:
            shown = (*shown, Row(name=f"{len(rest)} others", calls=tuple(itertools.chain(*(row.calls for row in rest)))))
        cells = [
            [row.name or "(model)", units.count(row.count), units.bytes_(row.size), units.bytes_(row.sent), units.percent(row.padding)]
            for row in shown
        ]
        return display.Table(columns=("module", "calls", "bytes", "sent by a rank", "padding"), rows=cells)

    def to_frame(self) -> Any:
        """A DataFrame with one row per collective."""
        return display.frame([one.to_json() | {"sent": one.sent} for one in self.calls])

    plot = display.plot_method("traffic")

    def __repr__(self) -> str:
        return f"Traffic({self.title!r}, {len(self.calls)} collectives, {units.bytes_(self.sent())} sent by a rank)"
