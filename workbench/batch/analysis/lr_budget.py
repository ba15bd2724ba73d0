"""Divides the time of a search for a learning rate: how long sweeps and rounds of the race may be."""

from dataclasses import dataclass

from workbench.batch.analysis.lr_race import SURVIVORS

SWEEP_SHARE = 0.4
"""Share of the time in which sweeps begin; the race, which verifies, has the rest."""
MIN_ITERATIONS, MIN_RACE_STEPS = 30, 20
"""Steps below which a sweep, or a round of the race, says nothing."""
RESERVE = 1.25
"""The search may take so many times its budget before a round of the race is cut short: some rounds are added on the way."""
MORE_ROUNDS = SURVIVORS + 8
"""Rounds of a race, about, beside the first one of each candidate: those of survivors and of candidates that are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrBudget:
    """The seconds that a search may take; None = no limit."""

    seconds: float | None

    def iterations(self, planned: int, step: float) -> int:
        """Steps of a sweep, at most `planned`, so that two sweeps fit: the first, which looks for the range, and one more.

        >>> LrBudget(seconds=60).iterations(100, 0.02), LrBudget(seconds=60).iterations(100, 0.2), LrBudget(seconds=60).iterations(100, 5)
        (100, 60, 30)
        """
        if self.seconds is None or step <= 0:
            return planned
        return min(planned, max(MIN_ITERATIONS, int(SWEEP_SHARE / 2 * self.seconds / step)))

    def has_time_to_sweep(self, elapsed: float, sweep: float) -> bool:
        """May another sweep begin?"""
        return self.seconds is None or elapsed + sweep <= SWEEP_SHARE * self.seconds

    def race_steps(self, planned: int, elapsed: float, step: float, candidates: int) -> int:
        """Steps of a round of the race between so many candidates; 0 = there is no time for one.

        >>> [LrBudget(seconds=60).race_steps(80, elapsed, step, 8) for elapsed, step in ((20, 0.02), (20, 0.04), (20, 0.2), (50, 0.2))]
        [80, 50, 25, 0]
        """
        if self.seconds is None or step <= 0:
            return planned
        steps = (self.seconds - elapsed) / step
        for rounds in (candidates + MORE_ROUNDS, candidates):
            if steps / rounds >= min(planned, MIN_RACE_STEPS):
                return min(planned, int(steps / rounds))
        return 0

    def is_spent(self, elapsed: float) -> bool:
        """Has it taken longer than it may?"""
        return self.seconds is not None and elapsed > RESERVE * self.seconds
