"""Dry runs and simulations that need torch but no GPUs."""
