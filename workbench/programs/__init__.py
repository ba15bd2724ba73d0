"""What starts in another process: the programs that torchrun runs in a rank, and workers; `runs/entrypoints.py` names them all."""
