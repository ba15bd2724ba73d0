"""ROOT: the folder of the package `workbench`, to tell its own files from a user's."""

from pathlib import Path

ROOT = Path(__file__).parents[__name__.count(".") - 1]
"""The folder of the package `workbench`."""
