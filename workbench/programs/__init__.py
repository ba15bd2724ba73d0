"""Programs that start in another process: those that torchrun runs in a rank, and workers. `runs/entrypoints.py` names them all."""
