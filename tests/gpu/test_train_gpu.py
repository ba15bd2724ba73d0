"""The training program on a GPU: precision, copies that overlap, peaks that are each configuration's own, and running out of memory."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.core import run_directory
from workbench.runs.entrypoints import TRAIN, entrypoint
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]


def train(*directories: Path) -> list[Run]:
    """Train what the directories say in one launch of one rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", run_directory.ENV_RUN_DIR: str(directories[0].parent)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", *entrypoint(TRAIN)]
    done = subprocess.run([*command, *map(str, directories)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [Run.load(directory) for directory in directories]


Make = Callable[..., Any]


def test_a_sweep_over_precisions_and_batches(by_hand: Make) -> None:
    spec = RunSpec(task="text-gpt", device="cuda", steps=40, num_workers=2, pin_memory=True, evaluate=True)
    specs = [
        spec.replace(micro_batch=512),
        spec.replace(precision="amp_bf16"),
        spec.replace(precision="amp_fp16", clip_grad_norm=1.0),
        spec.replace(micro_batch=16, accumulation=2),
        RunSpec(task=f"{Path(__file__).parents[1] / 'toy_tasks.py'}:too_large", device="cuda", micro_batch=8),
        spec,
    ]
    runs = train(*(by_hand(spec=spec.to_json()).path for spec in specs))
    assert [run.state for run in runs] == ["finished"] * 4 + ["failed", "finished"]
    assert runs[4].error is not None
    assert runs[4].error.kind == "out-of-memory"
    for run in runs[:4]:
        assert run.metric_rows[-1]["bits_per_byte"] < 4.4
        (timeline,) = run.timelines
        assert timeline.clock == "device"
        assert timeline.mean("backward") > timeline.mean("h2d") > 0
    large, small = runs[0].memory[0], runs[5].memory[0]
    assert large is not None
    assert small is not None
    assert large > 4 * small  # the peak of a configuration is its own, not that of one before it


def test_recipes_of_many_knobs(by_hand: Make) -> None:
    """What a CPU cannot tell: gradients in bf16 by NCCL, fused optimizers of two groups, averages on the device."""
    spec = RunSpec(
        task="text-gpt", device="cuda", steps=40, warmup_steps=4, schedule="warmup_stable_decay", ema=0.9, label_smoothing=0.05,
        precision="amp_bf16", gradient_compression="bf16", optimizer="adamw(weight_decay=0.1, fused=True)", weight_decay_on="matrices",
        evaluate=True,
    )  # fmt: skip
    other = spec.replace(
        optimizer="adafactor", weight_decay_on="all", gradient_compression="fp16", precision="amp_fp16", schedule="polynomial"
    )
    runs = train(*(by_hand(spec=spec.to_json()).path for spec in (spec, other)))
    assert [run.state for run in runs] == ["finished"] * 2, [run.error for run in runs]
    assert runs[0].metric_rows[-1]["bits_per_byte"] < 6


def test_pictures_on_a_gpu(by_hand: Make) -> None:
    spec = RunSpec(task="clipart-resnet", device="cuda", steps=100, num_workers=4, persistent_workers=True, pin_memory=True, evaluate=True)
    (run,) = train(by_hand(spec=spec.to_json()).path)
    assert run.metric_rows[-1]["accuracy"] > 0.2


def test_a_run_that_goes_on_has_the_row_of_each_step_by_the_device_s_clock(by_hand: Make) -> None:
    spec = RunSpec(task="text-gpt", device="cuda", steps=12, checkpoint_every=4)
    directory = by_hand(spec=spec.to_json()).path
    train(directory)
    folder = directory / run_directory.CHECKPOINTS
    (folder / "step00000012.pt").unlink()  # as if it had been killed right after the one of step 8
    run_directory.keep_rows(directory / run_directory.rank_file(0), lambda row: row.get("step", 0) < 7)
    (run,) = train(directory)
    (timeline,) = run.timelines
    assert timeline.clock == "device"
    assert [step.index for step in timeline.steps] == list(range(12))
    assert timeline.steps[7].seconds > 0


def test_a_deterministic_evaluation(by_hand: Make) -> None:
    """Sums by class and by confidence, which torch adds up in any order on a GPU, and refuses to where only one order is allowed."""
    task = f"{Path(__file__).parents[1] / 'toy_tasks.py'}:validated"
    spec = RunSpec(task=task, device="cuda", steps=4, micro_batch=4, deterministic=True, evaluate="every(steps=2)")
    (run,) = train(by_hand(spec=spec.to_json()).path)
    assert [row["step"] for row in run.evaluations] == [2, 4]
    assert all(0 <= row["figures"]["accuracy"] <= 1 for row in run.evaluations)
