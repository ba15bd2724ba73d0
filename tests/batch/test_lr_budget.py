"""How a search for a learning rate divides its time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.batch.analysis.lr_budget import MIN_ITERATIONS, MIN_RACE_STEPS, SWEEP_SHARE, LrBudget


@given(seconds=st.floats(1, 600), step=st.floats(1e-4, 10), elapsed=st.floats(0, 600), candidates=st.integers(2, 20))
def test_what_fits_fits(seconds: float, step: float, elapsed: float, candidates: int) -> None:
    budget = LrBudget(seconds=seconds)
    iterations = budget.iterations(100, step)
    assert MIN_ITERATIONS <= iterations <= 100
    assert iterations == MIN_ITERATIONS or 2 * iterations * step <= SWEEP_SHARE * seconds + 1e-6
    race = budget.race_steps(80, elapsed, step, candidates)
    assert race == 0 or MIN_RACE_STEPS <= race <= 80
    assert race * candidates * step <= max(0.0, seconds - elapsed) + 1e-6
    assert not budget.has_time_to_sweep(seconds, step)


def test_without_a_limit_nothing_is_shorter() -> None:
    budget = LrBudget(seconds=None)
    assert (budget.iterations(100, 10), budget.race_steps(80, 1e6, 10, 8)) == (100, 80)
    assert budget.has_time_to_sweep(1e6, 1e6)
    assert not budget.is_spent(1e6)


def test_a_race_that_takes_longer_than_was_known_ends() -> None:
    budget = LrBudget(seconds=60)
    assert [budget.is_spent(seconds) for seconds in (0, 60, 74, 76)] == [False, False, False, True]
    assert budget.race_steps(10, 0, 0.1, 8) == pytest.approx(10)  # fewer than usual, as given
