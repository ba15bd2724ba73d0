"""Tests of what is recorded of modules during a step."""

import torch
from torch import nn

from workbench.harness.module_use import recorded_calls


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.shape = nn.LSTMCell(3, 4), nn.Linear(4, 1), nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(self.shape(x[:, t]), state)
        assert state is not None
        return self.head(state[0])  # type: ignore[no-any-return]


def test_calls_of_innermost_modules_with_weights_are_counted() -> None:
    model = Looped()
    with recorded_calls([model], torch.device("cpu")) as seen:
        model(torch.ones(2, 5, 3))
        with torch.autocast("cpu", torch.bfloat16):
            model.head(torch.ones(2, 4))
    model(torch.ones(2, 5, 3))
    assert seen.counts == {(0, "cell", "LSTMCell"): 5, (0, "head", "Linear"): 2}
    assert seen.precisions == ["amp_bf16"]
