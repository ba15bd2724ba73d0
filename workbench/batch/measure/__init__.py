"""Measures on a training step: learning-rate range test, gradient norms, per-sample gradients, the rates of a scheduler."""
