"""Noise: what else the machine did while something was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What else went on. Above the limits of the verdict it spoils the result."""

    cores: float
    """That this process may use (affinity, cgroup quota)."""
    foreign: float = 0.0
    """Cores taken by processes that are not ours, on average."""
    waiting: float = 0.0
    """Fraction of the time that the training thread was ready and waited for a core."""
    spread: float = 0.0
    """Middle half over median of the cached blocks."""
