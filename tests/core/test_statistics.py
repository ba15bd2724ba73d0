"""Intervals that may be looked at after each measurement: how often they are wrong, and how soon they are clear."""

import random
import statistics

import pytest

from workbench.core.statistics import LOOKS, Spread, repeated_interval, student_t


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.08])
def test_an_interval_that_is_looked_at_again_and_again_is_seldom_wrong(spread: float) -> None:
    """Looked at so often, a plain 90 % interval calls every fourth series different from 0."""
    chance = random.Random(3)

    def wrong(looks: int) -> float:
        count = 0
        for _ in range(300):
            values = [chance.gauss(0, spread)]
            for _ in range(LOOKS - 1):
                values.append(chance.gauss(0, spread))
                if 0 not in repeated_interval(values, looks=looks):
                    count += 1
                    break
        return count / 300

    assert wrong(LOOKS) <= 0.1
    assert spread < 0.03 or wrong(1) > 0.2


def test_a_true_effect_is_seen_after_few_looks() -> None:
    chance = random.Random(4)
    needed = []
    for _ in range(50):
        values = [chance.gauss(0.2, 0.03) for _ in range(2)]
        while repeated_interval(values).low <= 0.1:
            values.append(chance.gauss(0.2, 0.03))
        needed.append(len(values))
    assert statistics.median(needed) <= 4


def test_the_spread_of_others_makes_an_interval_of_few_values_narrower() -> None:
    chance = random.Random(5)
    others = Spread().with_values([chance.gauss(0, 0.01) for _ in range(12)])
    assert repeated_interval([0.0, 0.001], spread=others).width < repeated_interval([0.0, 0.001]).width / 2
    assert Spread().with_values([1.0]) == Spread()


@pytest.mark.parametrize(("outside", "degrees", "value"), [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.1, 9, 1.833), (0.01, 30, 2.750)])
def test_students_t(outside: float, degrees: int, value: float) -> None:
    assert student_t(outside, degrees) == pytest.approx(value, abs=6e-4)


def test_the_quantile_is_that_of_scipy() -> None:
    from scipy.special import stdtrit

    for degrees in range(1, 41):
        for outside in (0.5, 0.1, 0.05, 0.1 / LOOKS, 0.001):
            assert student_t(outside, degrees) == pytest.approx(stdtrit(degrees, 1 - outside / 2), rel=1e-6)
