"""The parts of the check: their modules, in the order in which they run, and the time that each takes and may take."""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part; its module in this package has the same name and a function `run(report, bench)`."""

    name: str
    title: str
    seconds: float
    """What it takes on an H100 with 16 cores, about. A part is not begun with less than half of that left of the budget."""
    limit: float
    """Seconds after which it is ended; the rows that it has by then stay."""

    @property
    def module(self) -> ModuleType:
        """Its module. Importing it loads torch."""
        return importlib.import_module(f"benchmarks.gpu_check.{self.name}")


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(name="timer", title="Cost of the timers, and whether phases add up", seconds=30, limit=150),
        Part(name="speeds", title="Speeds of the machine against plain loops", seconds=15, limit=90),
        Part(name="context", title="Memory outside of the allocator; estimates touch no GPU", seconds=40, limit=150),
        Part(name="oom", title="Running out of memory is recognised and survived", seconds=110, limit=300),
        Part(name="restore", title="Everything is restored bit for bit", seconds=60, limit=240),
        Part(name="traces", title="Traces against the wall clock", seconds=60, limit=240),
        Part(name="memory", title="Estimated memory against the allocator", seconds=90, limit=300),
        Part(name="step_times", title="Estimated times of steps against the wall clock", seconds=60, limit=240),
        Part(name="train", title="Launched trainings", seconds=60, limit=240),
        Part(name="nccl", title="Processes that communicate", seconds=50, limit=200),
        Part(name="survive", title="Killed, resumed, repeated; hangs named", seconds=170, limit=480),
        Part(name="verdicts", title="Verdicts on planted bottlenecks", seconds=330, limit=570),
        Part(name="proofs", title="Predicted gains against proofs and the wall clock", seconds=240, limit=420),
    )
}
"""Short parts come first: with a small budget most questions are answered."""
