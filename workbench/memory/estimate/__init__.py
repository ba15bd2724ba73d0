"""Estimate: a training step on fake tensors, with CUDA's memory semantics and any number of ranks, on a machine without a GPU."""
