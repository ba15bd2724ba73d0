"""What the times of a variant say: how often the interval of a saving holds the truth with few pairs."""

import random
from collections.abc import Sequence

import pytest

from workbench.core.statistics import Interval
from workbench.harness.results import MANY_PAIRS, VariantTimes


def times(chance: random.Random, count: int, *, saved: float = 0.2, noise: float = 0.035) -> VariantTimes:
    pairs = tuple((chance.gauss(1, noise), (1 - saved) * chance.gauss(1, noise)) for _ in range(count))
    return VariantTimes(name="cached", baseline="full", pairs=pairs)


def _intervals(some: Sequence[VariantTimes]) -> tuple[list[Interval], list[Interval]]:
    return [arm.saved_at_few_pairs for arm in some], [arm.saved for arm in some]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_an_interval_of_few_pairs_holds_the_truth_more_often_than_the_bootstraps(count: int) -> None:
    chance = random.Random(count)
    some = [times(chance, count) for _ in range(150)]
    right, bootstrap = (sum(0.2 in saved for saved in each) / len(some) for each in _intervals(some))
    assert right >= 0.82
    assert bootstrap < 0.79
    assert all(arm.saved_at_few_pairs.mid == arm.saved.mid for arm in some)


def test_with_many_pairs_the_interval_is_the_bootstraps() -> None:
    arm = times(random.Random(0), MANY_PAIRS)
    assert arm.saved_at_few_pairs == arm.saved


def test_pairs_without_times_have_an_interval_as_well() -> None:
    arm = VariantTimes(name="cached", baseline="full", pairs=((1.0, 0.0),))
    assert arm.saved_at_few_pairs == arm.saved
