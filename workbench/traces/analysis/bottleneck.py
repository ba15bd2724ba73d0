"""Finds the resource that holds the step back: for each one, what the step would take at least if that one took no time."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.event_kinds import Kinds
from workbench.traces.analysis.intervals import Spans, covered, intersection, subtract, union
from workbench.traces.analysis.windows import Windows

CLOSE = 0.05
"""Fraction of the step: resources whose ceilings are as near as that are called even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource; mean seconds per step."""

    name: str
    """* `data`: the loop is blocked in `next(loader)`.
    * `host`: Python, operators and launches, whatever the host does but wait; on a CPU only what is outside of operators.
    * `transfer`: copies from host to device.
    * `device`: kernels and copies on the device; on a CPU the operators, which compute there.
    * `communication`: collectives."""
    busy: float
    """Time in which it works, alone or not."""
    alone: float
    """Time in which no other resource works: the step would be at most so much shorter if this one took no time."""
    ceiling: float
    """The step without that: no remedy for this resource alone makes it shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck(display.Shown, JsonDataclass):
    """The resources of a step. Get it from `trace.critical()`.

    A ceiling is no prediction: it leaves the other resources as they were in the trace, but they may begin earlier, or slow each other.
    Ceilings do not add up either: time in which two resources work is lost with neither.
    """

    rows: tuple[Resource, ...]
    """The resource with the longest time alone first."""
    step_seconds: float
    nothing: float
    """Mean seconds of a step in which none of them is at work."""
    device: str
    """Who computes: "device" or "cpu"."""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The critical resource; "" where the trace has no step, or none is ever alone at work."""
        return self.rows[0].name if self.rows and self.rows[0].alone > 0 else ""

    @property
    def speedup(self) -> float:
        """How many times as fast the step could be at most if the critical resource took no time; nan without one."""
        first = self.rows[0] if self.name else None
        return self.step_seconds / first.ceiling if first and first.ceiling > 0 else float("inf") if first else float("nan")

    def __getitem__(self, name: str) -> Resource:
        """A resource by its name.

        Raises:
            KeyError: no such resource.
        """
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise KeyError(f"no resource {name!r}: there are {', '.join(rows) or 'none'}")
        return rows[name]

    @property
    def caption(self) -> str:
        """What the numbers mean."""
        if not self.name:
            return display.notes(["no resource is ever alone at work in a step", *self.notes])
        first = f"{self.name} is critical: were it free, the step would be at most {units.times(self.speedup)} as fast"
        even = [row.name for row in self.rows[1:] if self.rows[0].alone - row.alone < CLOSE * self.step_seconds and row.alone > 0]
        parts = [first, *([f"{' and '.join(even)} could gain about as much"] if even else [])]
        if self.nothing > CLOSE * self.step_seconds:
            parts.append(f"for {units.seconds(self.nothing)} of the step nothing recorded is at work")
        return display.notes([*parts, "ceilings, not forecasts: they do not add up", *self.notes])

    @property
    def table(self) -> display.Table:
        """One row per resource."""
        rows = [
            [
                row.name,
                units.seconds(row.busy),
                units.seconds(row.alone),
                units.percent(row.alone / self.step_seconds if self.step_seconds else None),
                units.seconds(row.ceiling),
            ]
            for row in self.rows
        ]
        columns = ("resource", "at work", "alone", "share", "step without it")
        title = f"What holds back the step of {units.seconds(self.step_seconds)}"
        return display.Table(columns=columns, rows=rows, title=title, note=self.caption)

    to_frame = display.frame_method("rows", Resource)

    plot = display.plot_method("critical")

    def __repr__(self) -> str:
        return f"Bottleneck({self.name!r}, at most {units.times(self.speedup)} as fast)"


def bottleneck(kinds: Kinds, windows: Windows, notes: Sequence[str] = ()) -> Bottleneck:
    """Find the critical resource.

    With U the union of all resources' times and U_r that without r: alone = |U| − |U_r| inside the steps, ceiling = step − alone.
    """
    spans = windows.spans
    count = max(1, len(spans))
    step = int((spans[:, 1] - spans[:, 0]).sum())
    covers = resources(kinds, windows)
    whole = int(covered(union(*covers.values()), spans).sum())
    rows = []
    for name, cover in covers.items():
        busy = int(covered(cover, spans).sum())
        alone = whole - int(covered(union(*(other for key, other in covers.items() if key != name)), spans).sum())
        if busy:
            rows.append(Resource(name=name, busy=busy / 1e9 / count, alone=alone / 1e9 / count, ceiling=(step - alone) / 1e9 / count))
    remarks = list(windows.notes)
    if kinds.unrecorded:
        rows.clear()
    elif kinds.device and not kinds.where("operator", "runtime").any():
        remarks.append("the file has no events of the host: whether it holds the device back is not known")
    return Bottleneck(
        rows=tuple(sorted(rows, key=lambda row: -row.alone)),
        step_seconds=step / 1e9 / count,
        nothing=(step - whole) / 1e9 / count,
        device="device" if kinds.device else "cpu",
        notes=(*remarks, *notes),
    )


def resources(kinds: Kinds, windows: Windows) -> dict[str, Spans]:
    """The time in which each resource works. Work inside the loader's `next()` is data; a host that waits for others does not work."""
    data = kinds.cover("data_wait")
    if kinds.device:
        active = kinds.cover("operator", "backward", "optimizer", "runtime", "range", "collective_call")
        return {
            "data": data,
            "host": subtract(active, union(data, kinds.cover("wait"))),
            "transfer": kinds.cover("h2d"),
            "device": kinds.cover("kernel", "copy"),
            "communication": kinds.cover("communication", "host_communication"),
        }
    communication = kinds.cover("host_communication", "collective_call")
    computing = subtract(kinds.cover("operator", "backward", "optimizer"), union(data, kinds.cover("collective_call")))
    marked = union(windows.spans)
    busy = union(data, computing, communication)
    return {"data": data, "host": subtract(marked, busy), "device": computing, "communication": intersection(communication, marked)}
