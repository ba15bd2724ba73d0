"""Starts runs: a RunSpec or a script becomes a Run, here, on several machines, or as a job of Slurm. Nothing here imports torch.

    this process -> guard.py -> torchrun -> ranks (`workbench.programs.start`, or an unedited script)

* `launch.py`: `launch()` checks what was given and starts it; `resume.py` lets a run go on from its last checkpoint.
* `new_run.py` makes the run directory and starts `guard.py`, which sees that nothing outlives the process that launched it.
* `environment.py`: torchrun's command and the variables of the ranks. `rendezvous.py`: where several machines meet.
* `nodes.py` runs one machine's part of such a run; `slurm.py` writes and submits a job, `kubernetes.py` writes a manifest.
* `sweep.py` runs many specs, several in one launch; `experiments.py` launches a program that measures something, and waits for it.
"""
