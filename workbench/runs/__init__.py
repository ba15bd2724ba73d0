"""What is run and what came of it: a Task says what is trained, a RunSpec turns its knobs, a Run reads what came of it.

* `task.py`, `spec.py`, `profile.py`: Task, RunSpec (every knob is a field), and which steps of it are traced. `target.py` tells apart what
  a user gives to a public function: a step with its loader, a RunSpec, a Task, a script, a run or its directory.
* `launch/` starts runs; `entrypoints.py` names what starts in their processes.
* `run.py`: Run, a view on a run directory (`core/run_directory.py`), live or years later; `slurm_queue.py`: its job in Slurm's queue.
* `failure.py`: why a run failed, as each rank records it; `errors.py` knows common errors by their text, `root_cause.py` finds the
  rank that failed first, `out_of_memory.py` reads what an out-of-memory error says.
* `compare.py`: runs side by side. `plot.py` draws runs, `panel/` shows one live in a notebook.
"""
