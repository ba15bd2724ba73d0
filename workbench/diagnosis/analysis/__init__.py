"""Judges evidence of a training step and predicts remedies; arithmetic only, nothing is run."""
