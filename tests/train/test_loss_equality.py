"""Every parallel mode on two gloo ranks has the losses of one process: a small version of benchmarks/loss_equality.py."""

import pytest

from benchmarks import loss_equality


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_process() -> None:
    alone = loss_equality.measured(1, steps=3)
    assert set(alone) == set(loss_equality.ALONE)
    assert all(losses[-1] < losses[0] for losses in alone.values())
    found = loss_equality.measured(2, steps=3)
    assert set(found) == set(loss_equality.ON_TWO)
    gaps = {name: loss_equality.difference(loss_equality.beside(alone, name), losses) for name, losses in found.items()}
    assert not {name: gap for name, gap in gaps.items() if gap > loss_equality.TOLERANCE}


def test_a_difference_is_the_largest_of_any_step() -> None:
    assert loss_equality.difference([5.0, 4.0, 3.0], [5.0, 4.5, 2.75]) == 0.5
