"""Captures traces of torch's profiler, reads them, and answers where their steps go.

`wb.trace` (`api`) takes some steps under the profiler (`measure/capture`), or launches a run that does (`measure/profiled_run`). A trace
file is read piece by piece (`analysis/reading`, `event_schema`, `loading`) into arrays (`columns`); each event gets a kind (`event_kinds`),
and the marks of steps become windows (`windows`). A `Trace` (`trace`) has these, and computes each answer when its method is called:

* where the step goes: `breakdown` (with the overlap of communication), `operators`, `collectives`, `copies`, `modules` and `flame` (both on
  the `nesting` of calls), `memory_curve`
* what holds it back: `bottleneck`, `critical_path`, `idle`, `launch_queue`, `sequences`
* how near it comes to the device's limits: `kernels`, `roofline` with MFU, on `flops`
* in words: `explanation`; against another trace: `difference`

A `TraceSet` (`trace_set`) is the traces of several ranks: their steps side by side, and who makes the others wait (`stragglers`), and how
they arrive at collectives (`arrivals`). `captured` has facts that the trace file lacks, mainly the cost of the profiler; `details` are
fields that only some answers need, read in a second pass. `intervals` is exact arithmetic on nanoseconds, `layout` arranges events in rows
for the explorer in `panel/`.

Nothing is imported here: a training that writes a trace needs none of what reads it.
"""
