"""Traces: what torch's profiler wrote down, read fast, and the answers that it holds.

One way, from the file to the answer: `reading` (bytes → batches of typed events, whatever the state of the file) → `columns` (arrays, names
told once) → `kinds` (what an event is) → `windows` (where a step begins and ends) → answers, each in its own file and computed when it is
asked for: where the step goes (`breakdown`, `ops`, `overlap`, `collectives`, `copies`), what calls what (`modules`, `flame`, on the
`nesting` of calls), what holds it back (`critical`, `idle`, `launches`; the critical `path`, found by `walking` back over `threads` and
streams), what follows what (`sequences`, found by `repeating`), how near to the device's limits it comes (`roofline`, `mfu`, by the
`formulas` of operators; `kernels`, by `filling` and `tensor_cores`), what it allocates (`memory_curve`); `difference` and `explanation`
are made of those. Some need more of the file, which is read then (`details`). `loading` and `caching` get the columns from the file or
from what was kept beside it.

`Trace` is the noun that has the answers (`answers`), `TraceSet` that of several ranks; `intervals` is the arithmetic under them, exact on
whole nanoseconds. For panels, `scene` lays events out in rows, `tiles` says what a window on them shows, `ranking` ranks any part of them.

Nothing is imported before it is asked for: a training that writes a trace needs none of what reads one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.traces.breakdown import Breakdown
    from workbench.traces.collectives import Collectives
    from workbench.traces.copies import Copies
    from workbench.traces.critical import Critical
    from workbench.traces.difference import TraceDifference
    from workbench.traces.explanation import Explanation
    from workbench.traces.flame import Flame
    from workbench.traces.idle import Idle
    from workbench.traces.kernels import Kernels
    from workbench.traces.launches import Launches
    from workbench.traces.memory_curve import MemoryCurve
    from workbench.traces.mfu import Mfu
    from workbench.traces.modules import Modules
    from workbench.traces.ops import Operators
    from workbench.traces.overlap import Overlap
    from workbench.traces.path import CriticalPath
    from workbench.traces.ranks import TraceSet
    from workbench.traces.reading import TraceError
    from workbench.traces.roofline import Roofline
    from workbench.traces.sequences import Sequences
    from workbench.traces.trace import Trace

_HOMES = {
    "Breakdown": "breakdown",
    "Collectives": "collectives",
    "Copies": "copies",
    "Critical": "critical",
    "TraceDifference": "difference",
    "Explanation": "explanation",
    "Flame": "flame",
    "Idle": "idle",
    "Kernels": "kernels",
    "Launches": "launches",
    "MemoryCurve": "memory_curve",
    "Mfu": "mfu",
    "Modules": "modules",
    "Operators": "ops",
    "Overlap": "overlap",
    "CriticalPath": "path",
    "TraceSet": "ranks",
    "TraceError": "reading",
    "Roofline": "roofline",
    "Sequences": "sequences",
    "Trace": "trace",
}
"""Name → the file that it is in."""

__all__ = [
    "Trace",
    "TraceSet",
    "TraceError",
    "Breakdown",
    "Operators",
    "Overlap",
    "Collectives",
    "TraceDifference",
    "Explanation",
    "Flame",
    "Critical",
    "CriticalPath",
    "Kernels",
    "Copies",
    "Sequences",
    "Roofline",
    "Mfu",
    "MemoryCurve",
    "Launches",
    "Idle",
    "Modules",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
