"""Scaling laws: final loss over parameters and tokens, fitted to runs, with intervals."""
