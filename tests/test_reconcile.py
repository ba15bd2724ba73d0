"""Predicted against measured: the same spec on fake tensors, and in real processes with the profiler's record of every allocation."""

from pathlib import Path
from typing import Any

import pytest

import workbench as wb

NEAR = 0.1 * 2**20
"""Bytes."""


@pytest.mark.parametrize(
    "knobs",
    [
        {"precision": "amp_bf16", "accumulation": 2, "optimizer": "sgd(momentum=0.9)"},
        {"checkpointing": "full"},
        {"nproc_per_node": 2},
        {"nproc_per_node": 2, "parallel": "zero1"},
        {"nproc_per_node": 2, "parallel": "fsdp"},
    ],
    ids=lambda knobs: ", ".join(map(str, knobs.values())),
)
def test_what_is_predicted_is_what_is_measured(knobs: dict[str, Any], tmp_path: Path) -> None:
    spec = wb.RunSpec(task="text-gpt", micro_batch=32, device="cpu", **knobs)
    predicted = wb.estimate_memory(spec, device="cpu")
    measured = wb.measure_memory(spec, runs_dir=tmp_path)
    assert (predicted.kind, measured.kind) == ("predicted", "measured")
    assert abs(measured.total - predicted.total) < NEAR, str(measured - predicted)
    assert measured.peak_moment == predicted.peak_moment
    assert "measured less predicted" in str(measured - predicted)
