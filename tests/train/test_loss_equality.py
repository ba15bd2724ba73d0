"""On two gloo ranks every parallel mode, and on four three of them, has the losses of one process: benchmarks/loss_equality.py, smaller."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import loss_equality
from tests.forked import Forks

Losses = dict[str, list[float]]
ON_FOUR = ("ZeRO-1", "FSDP × TP", "DDP × PP 1f1b")


def measured(forks: Forks, folder: Path, count: int, *only: str) -> Losses:
    path = folder / f"{count}.json"
    done = forks.ranks(count, folder, loss_equality.__file__, path, "3", *only, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: Losses = json.loads(path.read_text())
    return found


def too_far(alone: Losses, found: Losses) -> dict[str, float]:
    """The modes beyond the tolerance."""
    gaps = {name: loss_equality.difference(loss_equality.beside(alone, name), losses) for name, losses in found.items()}
    return {name: gap for name, gap in gaps.items() if gap > loss_equality.TOLERANCE}


@pytest.mark.slow
def test_ranks_have_the_losses_of_one_process(forks: Forks, tmp_path: Path) -> None:
    alone = measured(forks, tmp_path, 1)
    assert set(alone) == set(loss_equality.ALONE)
    assert all(losses[-1] < losses[0] for losses in alone.values())
    found = measured(forks, tmp_path, 2)
    assert set(found) == set(loss_equality.ON_TWO)
    assert not too_far(alone, found)
    found = measured(forks, tmp_path, 4, *ON_FOUR)
    assert set(found) == set(ON_FOUR)
    assert not too_far(alone, found)


def test_a_difference_is_the_largest_of_any_step() -> None:
    assert loss_equality.difference([5.0, 4.0, 3.0], [5.0, 4.5, 2.75]) == 0.5
