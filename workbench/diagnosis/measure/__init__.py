"""Runs experiments on a training step in this process and returns Evidence."""
