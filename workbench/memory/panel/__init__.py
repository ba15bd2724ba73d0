"""The memory explorer for notebooks."""
