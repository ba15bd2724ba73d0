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

Nothing is imported here: a training that writes a trace needs none of what reads one.
"""
