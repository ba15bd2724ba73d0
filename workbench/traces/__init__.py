"""Captures traces of torch's profiler, reads them, and answers where their steps go.

`wb.trace` (`api`) takes some steps under the profiler (`measure/capture`), or launches a run that does (`measure/profiled_run`). A trace
file is read piece by piece (`analysis/reading`, `event_schema`, `loading`) into arrays (`columns`); each event gets a kind (`event_kinds`),
and the marks of steps become windows (`windows`). A `Trace` has these, and computes each answer when its method is called, where the step
goes, what holds it back and how near it comes to the device's limits, each in a file of its name in `analysis/`.

A `TraceSet` is the traces of several ranks: their steps side by side, and who makes the others wait (`stragglers`, `arrivals`). `captured`
has facts that the trace file lacks, mainly the cost of the profiler.

Nothing is imported here: a training that writes a trace needs none of what reads it.
"""
