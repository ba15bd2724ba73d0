"""Traces: what torch's profiler wrote down, read fast, and the answers that it holds.

One way, from the file to the answer: `reading` (bytes → batches of typed events, whatever the state of the file) → `columns` (arrays, names
told once) → `kinds` (what an event is) → `windows` (where a step begins and ends) → answers: `breakdown`, `ops`, `overlap`, `collectives`,
`difference`, `explanation`. `Trace` is the noun that has them all; `intervals` is the arithmetic under them, exact on whole nanoseconds.
"""

from workbench.traces.breakdown import Breakdown
from workbench.traces.collectives import Collectives
from workbench.traces.difference import TraceDifference
from workbench.traces.explanation import Explanation
from workbench.traces.ops import Operators
from workbench.traces.overlap import Overlap
from workbench.traces.reading import TraceError
from workbench.traces.trace import Trace

__all__ = ["Trace", "TraceError", "Breakdown", "Operators", "Overlap", "Collectives", "TraceDifference", "Explanation"]
