"""Launch: a spec or a script becomes a running Run. Nothing here imports torch, and nothing that is started outlives this process.

`launch` starts one run and returns at once, on this machine, on several, or as a job of `Slurm`; `kubernetes` writes a manifest; `sweep`
runs many, several in one launch where they can share it.

    this process -> guard (`guard.py`) -> torchrun -> ranks (`workbench.programs.start`, or an unedited script)
"""
