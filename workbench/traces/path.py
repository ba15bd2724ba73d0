"""Critical path: the one chain of work, launches and waits that the length of a step consists of."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench import display, units
from workbench.codec import JsonDataclass
from workbench.traces.ops import SHOWN, short

WAYS = {
    "data_wait": "blocked in next(loader)",
    "h2d": "copies to the device",
    "compute": "kernels; on a CPU operators",
    "communication": "collectives, with the wait for other ranks that is in them",
    "copy": "copies and memsets on the device",
    "host": "operators and calls that launch, on the host of a device",
    "python": "no recorded event: Python, locks, I/O or sleep",
    "launch": "from the call that launches to the work, which nothing else holds up",
    "queue": "between two pieces of work of a stream, or of one that waits for another stream",
    "waking": "from the end of what the host waits for to the end of its call",
}
"""Part of the path → what that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """One part of the path; mean seconds per step."""

    part: str
    seconds: float
    share: float
    """Fraction 0..1 of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPath:
    """All calls of an operator or kernel; seconds per step."""

    name: str
    part: str
    """"compute", "host", "communication", …"""
    seconds: float
    """On the path: what the step would be shorter by if it took no time, unless another chain is nearly as long."""
    own_seconds: float
    """In all of the step, without what it calls."""

    @property
    def on_path(self) -> float:
        """Fraction 0..1 of its time; the rest has something longer beside it, and making that faster gains nothing."""
        return min(1.0, self.seconds / self.own_seconds) if self.own_seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """The path of one step."""

    step: int
    parts: Mapping[str, float]
    """Part → seconds; they add up to the step."""
    handovers: int
    """How often it goes from one thread or stream to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath(display.Shown, JsonDataclass):
    """What each step's length consists of, from its end back to its beginning. Get it from `trace.critical_path()`.

    Of all that a piece of work waited for, the path goes on with what came last: the piece of work before it in its stream, its launch, or
    what another stream did; for a host that waits, the work it waits for. So it says what was critical in the trace as it ran. It is no
    forecast: with less on the path another chain may become the longest.
    """

    parts: tuple[PathPart, ...]
    """Mean of the steps, the longest first."""
    rows: tuple[OnPath, ...]
    """Operators and kernels, those with most time on the path first."""
    steps: tuple[StepPath, ...]
    step_seconds: float
    device: str
    """Who computes: "device" or "cpu"."""
    notes: tuple[str, ...] = ()

    def share(self, part: str) -> float:
        """Fraction 0..1 of the step.

        Raises:
            ValueError: there is no such part.
        """
        if part not in WAYS:
            raise ValueError(f"no part {part!r}: there are {', '.join(WAYS)}")
        return next((one.share for one in self.parts if one.part == part), 0.0)

    @property
    def table(self) -> display.Table:
        """The parts, then the 15 operators and kernels with most time on the path."""
        rows = [[one.part, units.seconds(one.seconds), units.percent(one.share), WAYS[one.part]] for one in self.parts]
        for one in self.rows[:SHOWN]:
            share = one.seconds / self.step_seconds if self.step_seconds else None
            told = f"{one.part}; {units.percent(one.on_path)} of its {units.seconds(one.own_seconds)} is on the path"
            rows.append([short(one.name), units.seconds(one.seconds), units.percent(share), told])
        title = f"The critical path of the step of {units.seconds(self.step_seconds)}"
        return display.Table(columns=("on the path", "time", "share", "what"), rows=rows, title=title, note="; ".join(self.notes) or None)

    to_frame = display.frame_method("rows", OnPath, "on_path")

    plot = display.plot_method("critical_path")

    def __repr__(self) -> str:
        first = f", {self.parts[0].part} {units.percent(self.parts[0].share)}" if self.parts else ""
        return f"CriticalPath({units.seconds(self.step_seconds)}{first})"
