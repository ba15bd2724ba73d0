"""Digests are equal where values are, bit for bit, and differ where a bit does."""

from typing import Any

import numpy as np
import pytest
import torch

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


def test_minus_zero_is_not_zero() -> None:
    assert digest(torch.tensor(-0.0)) != digest(torch.tensor(0.0))
