"""The first step whose loss is not finite is noted on the rank that saw it, without a wait in each step."""

import math
from typing import Any

import torch

from workbench.train.loop import LOOK_EVERY, FirstNotFinite


def test_notes_the_first_bad_step_and_the_weights_that_are_bad_by_then_and_a_sound_training_notes_nothing() -> None:
    said: list[dict[str, Any]] = []
    now = [0.0]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    watch = FirstNotFinite(model, said.append, clock=lambda: now[0])
    for step in range(1, 5):
        now[0] += LOOK_EVERY
        watch.step(step, torch.tensor(0.5))
    watch.look()
    assert said == []

    for step, loss in enumerate((0.4, math.inf, 0.3, math.nan), 5):
        watch.step(step, torch.tensor(loss))
    with torch.no_grad():
        model[1].weight.fill_(math.nan)
    watch.look()
    watch.step(9, torch.tensor(math.nan))
    watch.look()

    assert said == [{"not_finite": {"step": 6, "weights": "1 of 4 weights are not finite, the first of them 1.weight"}}]
