"""Digests are equal where values are, bit for bit, and differ where a bit does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import Forks
from workbench.train.fingerprints import digest

STATE = {"step": 3, "weights": {"a": torch.arange(4.0), "b": torch.zeros(0)}, "rates": [0.1, (1, None)], "name": "x"}


def changed(**parts: Any) -> dict[str, Any]:
    return {**STATE, **parts}


def test_equal_values_have_equal_digests() -> None:
    again = dict(reversed(changed(weights={"b": torch.zeros(0), "a": torch.arange(8.0)[:4].clone()}).items()))
    assert digest(again) == digest(STATE)


@pytest.mark.parametrize(
    "other",
    [
        changed(step=4),
        changed(weights={"a": torch.arange(4.0), "b": torch.zeros(1)}),
        changed(weights={"a": torch.arange(4.0).nextafter(torch.tensor(9.0)), "b": torch.zeros(0)}),
        changed(weights={"a": torch.arange(4.0).double(), "b": torch.zeros(0)}),
        changed(weights={"a": torch.arange(4.0).reshape(2, 2), "b": torch.zeros(0)}),
        changed(rates=[0.1, (1, 0)]),
        changed(rates=[0.1, 1, None]),
        changed(name=np.arange(3)),
        changed(more=None),
    ],
)
def test_different_values_have_different_digests(other: dict[str, Any]) -> None:
    assert digest(other) != digest(STATE)


TWO_OPTIMIZERS = """
import sys
from pathlib import Path

import torch
from torch import nn

from workbench.train.fingerprints import follow_script

follow_script(Path(sys.argv[1]))
for change in sys.argv[2:]:
    torch.manual_seed(0)
    made, judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    judge[0].requires_grad_(False)
    evaluated = nn.Linear(4, 4)
    for part in (made, judge, evaluated):
        part.register_buffer("cache", torch.zeros(1), persistent=False)
    judge.register_buffer("edges", torch.eye(4).to_sparse())
    judge.unused = nn.LazyLinear(4)
    judge.forward = lambda inputs: judge[1](judge[0](inputs))
    judges = torch.optim.SGD(judge[1].parameters(), 0.1)
    with torch.no_grad():
        {
            "maker": lambda: made[2].weight.add_(1),
            "frozen": lambda: judge[0].weight.add_(1),
            "statistics": lambda: made[1].running_mean.add_(1),
            "cache": lambda: made.cache.add_(1),
            "evaluation": lambda: evaluated(torch.ones(2, 4)),
            "nothing": lambda: None,
            "weights": lambda: judge[1].weight.add_(1),
        }[change]()
    judge(made(torch.ones(2, 4)).detach()).mean().backward()
    judges.step()
"""


def test_a_step_of_a_script_depends_on_weights_that_another_optimizer_updates(forks: Forks, tmp_path: Path) -> None:
    """Also on frozen ones and on statistics; not on what is evaluated between the steps, nor on a cache that no checkpoint has."""
    changes = ("nothing", "evaluation", "cache", "maker", "frozen", "statistics", "weights")
    done = forks.run(tmp_path, "-c", TWO_OPTIMIZERS, tmp_path, *changes)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rank0-1.jsonl").read_text().splitlines()]
    others = {change: row["modules"] for change, row in zip(changes, rows, strict=True)}
    assert {change for change in changes if others[change] != others["nothing"]} == {"maker", "frozen", "statistics"}
    assert [row["weights"] == rows[0]["weights"] for row in rows] == [True] * 6 + [False]


def test_minus_zero_is_not_zero() -> None:
    assert digest(torch.tensor(-0.0)) != digest(torch.tensor(0.0))
