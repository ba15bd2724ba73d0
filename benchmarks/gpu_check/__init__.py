"""Checks on one NVIDIA GPU what cannot be checked without one: `python -m benchmarks.gpu_check`, or `make gpu-check`.

Each part is a module with a function `run(report, bench)`, listed in `parts.py`; it runs in a process of its own, so that memory that
ran out or a broken context harms no other part. A part adds rows to a `Report` (`report.py`), which is written after each row: a part
that was cut off goes on where it ended. `runner.py` starts the parts, `machine.py` says on what they ran, `loops.py` has the training
loops in which something was planted.

A row is right (✓), wrong (✗) or for information. What is expected of it is a constant of its module, with its reason. The tables are
Markdown, as in `benchmarks/RESULTS.md`.
"""
