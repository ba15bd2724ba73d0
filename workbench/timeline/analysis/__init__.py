"""Arithmetic on the steps of a training that runs: `change_points.py` finds since when a phase takes longer."""
