"""Every knob of RunSpec is turned in a run that is really launched, so that a new one fails here until it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toy_tasks
from tests.forked import Forks
from workbench.core import run_directory
from workbench.runs.launch import environment
from workbench.runs.launch.sweep import run_all
from workbench.runs.restarts import checkpoints_of
from workbench.runs.run import Run
from workbench.runs.spec import KNOBS, RunSpec
from workbench.train import checkpoint_file

ROOT = Path(__file__).parents[2]
TOY = f"{toy_tasks.__file__}:any_knob"
MIXTURE = f"{ROOT}/tests/scripts/sharing.py:mixture"
RATES = "def rate(step):\n    return 1 / (1 + step)\n"
ALL: dict[str, Any] = {"device": "cpu", "backend": "gloo", "threads": 2, "nproc_per_node": 2, "steps": 4, "micro_batch": 4}
"""What the processes of one launch have in common, and small sizes."""
LAUNCHED: dict[str, dict[str, Any]] = {
    "many at once": {
        "accumulation": 2,
        "precision": "amp_bf16",
        "tf32": False,
        "num_workers": 1,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": True,
        "optimizer": "sgd(momentum=0.5, weight_decay=0.1)",
        "lr": 0.2,
        "warmup_steps": 1,
        "schedule": "rates.py:rate",
        "weight_decay_on": "matrices",
        "ema": 0.9,
        "label_smoothing": 0.1,
        "clip_grad_norm": 0.5,
        "bucket_cap_mb": 1.0,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "gradient_compression": "fp16",
        "parallel": "zero1",
        "compile": "model(backend=eager)",
        "channels_last": True,
        "gc": False,
        "deterministic": True,
        "seed": 3,
        "evaluate": "every(steps=1)",
        "evaluate_batches": 1,
        "stop_when": "validation_loss(patience=100)",
        "checkpoint_every": 1,
        "keep_checkpoints": 3,
        "best": "validation_loss(max)",
        "gradient_norms": 1,
        "step_digests": True,
        "noise_scale": 1,
        "profile": {"steps": 1, "wait": 1},
    },
    "in shards": {"parallel": "hsdp", "shard_ranks": 1, "checkpointing": "full"},
    "in split layers": {"tensor_parallel": 2},
    "in stages": {"pipeline_parallel": 2, "pipeline_schedule": "gpipe", "accumulation": 2},
    "experts": {"task": MIXTURE, "expert_parallel": 2},
    "averages": {"local_sgd": "periodic(period=2, start=1)"},
    "one graph": {"static_graph": True},
}
"""One launch trains all of them."""
ELSEWHERE = {
    "nnodes": ("tests/runs/test_nodes.py", "wb.launch(SPEC, nnodes=2, nproc_per_node=1"),
    "offload": ("tests/runs/test_training_knobs.py", '({"offload": "activations"}'),
}
"""Knob → the test that has it, and how: two machines take a launch of their own, and `offload`, which needs a GPU, is refused on a CPU."""


def test_each_knob_is_turned_in_a_launched_run() -> None:
    turned = {knob for knobs in LAUNCHED.values() for knob, value in {"task": TOY, **ALL, **knobs}.items() if value != KNOBS[knob].default}
    assert sorted(KNOBS.keys() - turned - ELSEWHERE.keys()) == []  # add it to LAUNCHED
    assert not turned & ELSEWHERE.keys()
    assert all(text in (ROOT / file).read_text() for file, text in ELSEWHERE.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("every_knob")
    (folder / "rates.py").write_text(RATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(environment, "torchrun", forks.torchrun)
        specs = [(name, RunSpec(**{"task": TOY, **ALL, **knobs})) for name, knobs in LAUNCHED.items()]
        return dict(zip(LAUNCHED, run_all(specs, "sweep", budget_s=None, runs_dir=folder / "runs"), strict=True))


def test_a_launched_run_does_what_its_knobs_say(runs: dict[str, Run]) -> None:
    states = {name: run.state for name, run in runs.items()}
    assert states == dict.fromkeys(LAUNCHED, "finished"), [run.error for run in runs.values()]
    assert all(len(timeline.steps) == 4 for run in runs.values() for timeline in run.timelines)

    many = runs["many at once"]
    rows = run_directory.LineTail(many.path / run_directory.METRICS).read()
    assert [row["lr"] for row in rows if "lr" in row] == pytest.approx([0.2, 0.1, 0.2 / 3, 0.05])  # one step of warm-up, then rate(step)
    assert sum("validation_loss" in row for row in rows) >= 4
    assert rows[-1]["first_step_seconds"] > 0
    about = run_directory.read_json(many.path / run_directory.ENVIRONMENT)
    assert about["environment"]["threads"] == 2
    assert about["environment"]["deterministic algorithms"] is True
    assert about["environment"]["products of matrices"] == "highest"
    assert {"rates.py", "toy_tasks.py"} <= about["code"].keys()
    assert many.gradient_norms
    assert many.noise_scale
    assert [*(many.path / run_directory.TRACES).iterdir()]
    assert [int(path.stem.removeprefix("step")) for path in checkpoints_of(many.path)][-3:] == [2, 3, 4]
    state = checkpoint_file.load(checkpoints_of(many.path)[-1], torch.device("cpu"))
    assert "ema" in {section for shard in state["shards"] for section, *_ in shard["parts"]}
