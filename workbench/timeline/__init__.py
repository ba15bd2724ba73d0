"""Where the time of each training step goes, measured inside the training process at a few microseconds per step.

The result is a `Timeline` (`timeline.py`): the steps of one rank, each in phases that sum to its length. How it is made of a loop:

* `marks.py`: where a phase begins or ends, a recorder notes a mark, which is a clock reading and a code. Nothing else happens in the loop.
  Recorders read the host's clock or, by CUDA events, the device's.
* `loops.py`: a `Loop` is one pass over a loader and marks each `next()`. `OpenLoops` knows which of several open loops runs.
* `steps.py`: arithmetic, later: marks become steps.
* `recording.py`: a `Recording` holds the steps of one timer, from all of its loops.
* `rank_log.py`: a background thread writes them to `rank<r>.jsonl` in the run directory, if there is one.

Three ways to get the marks: by hand with `StepTimer` (`step_timer.py`); by hooks on the model and optimizer of one loop with `watch`
(`watch.py`, `hooks.py`); and by hooks on all loaders, models and optimizers of an unedited script (`watch_script.py`).
"""
