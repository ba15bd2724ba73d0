"""Runs of trainings: a Task says what is trained, a RunSpec has every knob, a Run reads the results of a launch.

* `task.py`, `spec.py`, `profile.py`: Task, RunSpec (every knob is a field), and which steps of it are traced. `target.py` checks what
  a public function is given: a step with its loader, a RunSpec, a Task, a script, a run or its directory.
* `launch/` starts runs; `entrypoints.py` names the programs of their processes.
* `run.py`: Run, a view on a run directory (`core/run_directory.py`), live or years later; `slurm_queue.py`: its job in Slurm's queue.
* `failure.py`: why a run failed, as each rank records it; `errors.py` knows common errors by their text, `root_cause.py` finds the
  rank that failed first, `out_of_memory.py` explains an out-of-memory error.
* `compare.py`: runs side by side. `plot.py` draws runs, `panel/` shows one live in a notebook.
"""
