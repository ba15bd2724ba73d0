"""Where the workbench's own files are."""

from pathlib import Path

ROOT = Path(__file__).parents[__name__.count(".") - 1]
"""The folder of the package `workbench`."""
