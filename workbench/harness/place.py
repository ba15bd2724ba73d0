"""Place: where in the user's code a thread was when its stack was looked at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where the training thread was when it was looked at."""

    line: str
    """The innermost line of the user's: "train.py:41 save_checkpoint"."""
    kind: str | None = None
    """"checkpoint", "evaluation", "logging", "optimizer" or None, as the functions that it was in tell."""
