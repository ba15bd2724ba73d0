"""Knobs: what they take, and what is said when they do not."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.spec import RunSpec, ScriptSpec, SpecError, spec_from_json

WHOLE = st.integers(1, 10_000)


@given(WHOLE, WHOLE, WHOLE, st.sampled_from(["fp32", "amp_bf16", "amp_fp16"]), st.none() | st.floats(1e-9, 1e3))
def test_a_task_spec_survives_json(micro: int, accumulation: int, ranks: int, precision: str, lr: float | None) -> None:
    spec = RunSpec(task="a:b", micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks, precision=precision, lr=lr)
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.global_batch == micro * accumulation * ranks


def test_a_script_spec_survives_json() -> None:
    spec = ScriptSpec(script="train.py", args=["--epochs", 3], nproc_per_node=2, watch=True)  # type: ignore[list-item,arg-type]
    assert spec.args == ("--epochs", "3")
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"micro_batch": 0}, "micro_batch=0: a whole number of at least 1 is allowed"),
        ({"micro_batch": 2.5}, r"micro_batch=2\.5: a whole number"),
        ({"seed": 2**32}, "seed=4294967296: a whole number from 0 to 4294967295"),
        ({"steps": True}, "steps=True: a whole number"),
        ({"num_workers": -1}, "num_workers=-1: a whole number of at least 0"),
        ({"precision": "bf16"}, r"precision='bf16': allowed are 'fp32', 'amp_bf16', 'amp_fp16'; did you mean \"amp_bf16\"\?"),
        ({"precision": "int3"}, "allowed are 'fp32'"),
        ({"device": "gpu"}, 'did you mean "cuda"'),
        ({"schedule": "linear"}, "allowed are 'constant', 'cosine'$"),
        ({"device": "tpu"}, "device='tpu': allowed are 'auto', 'cpu', 'cuda'"),
        ({"schedule": "cosin"}, 'did you mean "cosine"'),
        ({"lr": 0}, "lr=0: a number above 0 is allowed, or None"),
        ({"lr": float("nan")}, "lr=nan: a number above 0"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm=inf"),
        ({"prefetch_factor": 4}, "prefetch_factor needs workers, and num_workers is 0: set num_workers to 1 or more"),
        ({"persistent_workers": True}, "persistent_workers needs workers"),
        ({"pin_memory": 1}, "pin_memory=1: True or False"),
        ({"optimizer": ""}, "optimizer=''"),
        ({"device": "cpu", "backend": "nccl"}, "nccl reduces on GPUs only"),
        ({"task": ""}, "task=''"),
    ],
)
def test_a_value_that_is_not_allowed(knobs: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(SpecError, match=said):
        RunSpec(**{"task": "text-gpt", **knobs})


def test_a_knob_that_does_not_exist() -> None:
    with pytest.raises(SpecError, match="RunSpec has no knob 'num_worker': did you mean 'num_workers'"):
        RunSpec(task="text-gpt").replace(num_worker=2)
    with pytest.raises(SpecError, match="a spec of kind 'cron': allowed are task, script"):
        spec_from_json({"kind": "cron"})
    with pytest.raises(SpecError, match="a list of words is wanted, such as"):
        ScriptSpec(script="train.py", args="--epochs 1")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="watch='yes'"):
        ScriptSpec(script="train.py", watch="yes")  # type: ignore[arg-type]


def test_a_what_if_is_a_changed_spec() -> None:
    spec = RunSpec(task="text-gpt")
    changed = spec.replace(num_workers=2, prefetch_factor=4)
    assert spec.num_workers == 0
    assert spec.changes(changed) == {"num_workers": (0, 2), "prefetch_factor": (None, 4)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.steps = 1  # type: ignore[misc]
