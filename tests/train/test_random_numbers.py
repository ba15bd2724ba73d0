"""States of generators are saved as a checkpoint can hold them, and restored exactly."""

import io
import random

import numpy as np
import torch

from workbench.train.random_numbers import mixed_seed, random_state, restore_random_state, seed_all, seeded

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [float(torch.randn(())), float(np.random.randn()), random.gauss(0, 1), random.random(), float(np.random.rand())]


def test_all_generators_go_on_where_they_were() -> None:
    seed_all(7)
    draw()  # numpy and Python keep the second of two normal numbers for the next call
    torch.save(random_state(CPU), file := io.BytesIO())
    expected = [draw() for _ in range(3)]
    seed_all(8)
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_seed_for_a_while() -> None:
    seed_all(7)
    expected = [draw() for _ in range(2)]
    seed_all(7)
    found = [draw()]
    with seeded(5, CPU):
        inside = draw()
    found.append(draw())
    assert found == expected
    seed_all(5)
    assert draw() == inside


def test_seeds_of_neighbours_differ() -> None:
    seeds = {mixed_seed(0, rank, epoch, position) for rank in range(4) for epoch in range(4) for position in range(100)}
    assert len(seeds) == 1600
    assert mixed_seed(1, 23) != mixed_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
