"""Short list: the plans that were chosen, and the fastest for every number of GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench import display, units
from workbench.cost import Cluster
from workbench.planning.plans import Plan
from workbench.planning.ranges import between
from workbench.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The fastest plan for one number of GPUs: a point of time against money."""

    gpus: int
    seconds: Interval
    """Of a step."""
    bound: str
    layout: str
    compute: float
    """Seconds of the middle that compute."""
    tight: bool
    """Does its memory not fit by its upper end?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans(Sequence[Plan]):
    """The short list, best first; `plans[0]` is the fastest."""

    plans: tuple[Plan, ...]
    front: tuple[Front, ...]
    """The fastest layout for every number of GPUs that was looked at, fewest first."""
    considered: int
    """Layouts that were looked at."""
    ruled_out: Mapping[str, int]
    """Reason → how many layouts it ruled out."""
    name: str
    """What is trained."""
    cluster: Cluster
    global_batch: int
    """Samples per step."""
    notes: tuple[str, ...] = ()
    """Where ranges come from, and what is left out."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, str):
            found = [one for one in self.plans if place in one.roles]
            if not found:
                raise KeyError(f"no plan is the {place!r} one: there are {', '.join(self.roles)}; a larger top= may list more")
            return found[0]
        return self.plans[place]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    @property
    def roles(self) -> list[str]:
        """Names by which a plan can be asked for: `plans["cheapest"]`."""
        return list(dict.fromkeys(role for one in self.plans for role in one.roles))

    @property
    def best(self) -> Plan:
        """The first."""
        return self.plans[0]

    def changes(self) -> dict[str, Any]:
        """The knobs of a RunSpec for the best plan; see `Plan.changes`."""
        return self.best.changes()

    @property
    def table(self) -> display.Table:
        """One row per plan, each figure with its ends; below, what was ruled out by what."""
        priced = any(one.money for one in self.plans)
        columns = ["plan", "GPUs", "layout", "micro-batch × accumulation", "step", "between", "throughput", "MFU", "memory"]
        columns += ["exposed", "bubble", f"money of {self.best.steps:,} steps" if priced else "GPU s a sample", "bound"]
        rows = [
            [
                ", ".join(one.roles),
                f"{one.gpus:,}",
                one.layout,
                one.batch,
                units.seconds(one.seconds.mid),
                f"{units.seconds(one.seconds.low)} … {units.seconds(one.seconds.high)}",
                between(one.samples_per_sec, units.rate),
                between(one.mfu, units.percent),
                between(one.needed, units.bytes_) + ", tight" * one.tight,
                between(one.shares["communication"], units.percent),
                between(one.shares["bubble"], units.percent),
                between(one.money, lambda value: f"{value:,.4g}") if one.money else f"{one.gpu_seconds:.3g}",
                one.bound,
            ]
            for one in self.plans
        ]
        lines = [f"{', '.join(one.roles)}: {one.why}" for one in self.plans]
        out = "; ".join(f"{count:,} by {reason}" for reason, count in self.ruled_out.items() if count)
        lines.append(f"{self.considered:,} layouts looked at; ruled out: {out or 'none'}")
        return display.Table(
            columns=columns,
            rows=rows,
            title=f"{self.name} on {self.cluster.name}, {self.global_batch:,} samples a step: predicted",
            note="\n".join([*lines, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per plan; seconds and bytes."""
        return display.frame([one.row() for one in self.plans])

    def plot(self, ax: Any = None) -> Any:
        """The stacked bars of `plot.plan`; returns the Axes."""
        return display.picture("plan")(self, ax=ax)

    def __repr__(self) -> str:
        return f"Plans({self.name!r} on {self.cluster.name}: {', '.join(repr(one)[5:-1] for one in self.plans[:2])} …)"

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()
