"""Where the time of each training step goes, measured inside the training process at a few microseconds per step.

The result is a `Timeline`: the steps of one rank, each in phases that sum to its length. In the loop a recorder notes a mark where a phase
begins or ends, a clock reading and a code, and nothing else (`marks.py`, `loops.py`); marks become steps later (`steps.py`), and a
background thread writes them into the run directory (`rank_log.py`). Three ways to get the marks: by hand with `StepTimer`, by hooks on the
model and optimizer of one loop with `watch`, and by hooks on all those of an unedited script (`watch_script.py`).
"""
