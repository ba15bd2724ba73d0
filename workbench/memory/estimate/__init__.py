"""Predicts a step's memory by running it on fake tensors."""
