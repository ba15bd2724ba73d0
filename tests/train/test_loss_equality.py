"""Every parallel mode on two gloo ranks has the losses of one process: a small version of benchmarks/loss_equality.py."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import loss_equality
from tests.forked import Forks


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_process(forks: Forks, tmp_path: Path) -> None:
    def measured(count: int) -> dict[str, list[float]]:
        path = tmp_path / f"{count}.json"
        done = forks.ranks(count, tmp_path, loss_equality.__file__, path, "3", env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, list[float]] = json.loads(path.read_text())
        return found

    alone = measured(1)
    assert set(alone) == set(loss_equality.ALONE)
    assert all(losses[-1] < losses[0] for losses in alone.values())
    found = measured(2)
    assert set(found) == set(loss_equality.ON_TWO)
    gaps = {name: loss_equality.difference(loss_equality.beside(alone, name), losses) for name, losses in found.items()}
    assert not {name: gap for name, gap in gaps.items() if gap > loss_equality.TOLERANCE}


def test_a_difference_is_the_largest_of_any_step() -> None:
    assert loss_equality.difference([5.0, 4.0, 3.0], [5.0, 4.5, 2.75]) == 0.5
