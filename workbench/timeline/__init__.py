"""Measuring a live training process: where the time of each step goes, at a few microseconds per step.

How a loop becomes a Timeline:

* `tape`: a border between two phases is one mark, a clock and a code, and nothing else happens in the loop.
* `loop`: one pass over a loader puts the marks of `next()` on its tape; loops may be nested or run side by side.
* `steps`: the arithmetic, later: marks → steps whose phases sum to the step exactly.
* `recording`: the steps of one timer, harvested by `ranklog`'s thread into `rank<r>.jsonl` or when its Timeline is asked for.
* `StepTimer` takes the marks you write, `watch` those that hooks find in an unedited loop, `auto` those of a whole unedited script.
"""
