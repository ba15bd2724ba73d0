"""Knobs: what they take, and what is said when they do not."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.runs.spec import KNOBS, RunSpec, ScriptSpec, SpecError, parse_knob, spec_from_json

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
        ({"precision": "bf16"}, r"precision='bf16': allowed are 'fp32', 'amp_bf16', 'amp_fp16' .*; did you mean \"amp_bf16\"\?"),
        ({"precision": "bf16"}, r"to keep them in bf16, build the model that way: lambda: build\(\)\.to\(torch\.bfloat16\)"),
        ({"precision": "int3"}, "allowed are 'fp32'"),
        ({"device": "gpu"}, 'did you mean "cuda"'),
        ({"schedule": "linear"}, "allowed are 'constant', 'cosine', 'polynomial', 'step', 'inverse_sqrt', 'warmup_stable_decay'$"),
        ({"device": "tpu"}, "device='tpu': allowed are 'auto', 'cpu', 'cuda'"),
        ({"schedule": "cosin"}, 'did you mean "cosine"'),
        ({"lr": 0}, "lr=0: a number above 0 is allowed, or None"),
        ({"lr": float("nan")}, "lr=nan: a number above 0"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm=inf"),
        ({"prefetch_factor": 4}, "prefetch_factor needs workers, and num_workers is 0: set num_workers to 1 or more"),
        ({"persistent_workers": True}, "persistent_workers needs workers"),
        ({"tf32": 1}, r"tf32=1: True, False or None \(as torch is set up\) is allowed"),
        ({"tf32": "yes"}, "tf32='yes': True, False or None"),
        ({"tf32": True, "device": "cpu"}, 'tf32=True with device="cpu": only GPUs compute in TF32; leave tf32 out, or try device="cuda"'),
        ({"pin_memory": 1}, "pin_memory=1: True or False"),
        ({"optimizer": ""}, "optimizer=''"),
        ({"device": "cpu", "backend": "nccl"}, "nccl reduces on GPUs only"),
        ({"task": ""}, "task=''"),
        ({"parallel": "ddpp"}, 'allowed are .*; did you mean "ddp"'),
        ({"parallel": "zero3"}, "parallel='zero3': allowed are 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp'; did you mean \"fsdp\""),
        ({"checkpointing": "some"}, "checkpointing='some': allowed are 'none', 'full', 'selective'"),
        ({"checkpointing": True}, "checkpointing=True: allowed are 'none', 'full', 'selective'"),
        ({"offload": "weights"}, "offload='weights': allowed are 'none', 'activations', 'optimizer'"),
        ({"gradient_as_bucket_view": 1}, "gradient_as_bucket_view=1: True or False"),
        ({"tensor_parallel": 0}, "tensor_parallel=0: a whole number of at least 1"),
        (
            {"nproc_per_node": 6, "tensor_parallel": 4},
            r"tensor_parallel=4 does not divide the 6 ranks \(nproc_per_node\): try tensor_parallel=3",
        ),
        ({"nproc_per_node": 2, "tensor_parallel": 2, "precision": "amp_fp16"}, 'try precision="amp_bf16", or parallel="fsdp"'),
        ({"shard_ranks": 0, "parallel": "hsdp"}, "shard_ranks=0: a whole number of at least 1"),
        ({"shard_ranks": 2}, 'shard_ranks=2 with parallel="ddp": only "hsdp" has groups that shard'),
        ({"nproc_per_node": 6, "parallel": "hsdp", "shard_ranks": 4}, "shard_ranks=4 does not divide the 6 ranks .*: try shard_ranks=3"),
        ({"nproc_per_node": 12, "parallel": "hsdp"}, r"shard_ranks=8 \(its default\) does not divide the 12 ranks .*: try shard_ranks=6"),
        ({"parallel": "fsdp", "find_unused_parameters": True}, 'find_unused_parameters=True with parallel="fsdp": it is a knob of DDP'),
        ({"parallel": "zero2", "gradient_as_bucket_view": True}, 'leave gradient_as_bucket_view out, or try parallel="ddp"'),
        ({"parallel": "hsdp", "bucket_cap_mb": 5}, 'bucket_cap_mb=5 with parallel="hsdp"'),
    ],
)
def test_a_value_that_is_not_allowed(knobs: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(SpecError, match=said):
        RunSpec(**{"task": "text-gpt", **knobs})


@pytest.mark.parametrize(
    ("given", "here"), [("batch_size", "micro_batch"), ("gpus", "nproc_per_node"), ("learning_rate", "lr"), ("workers", "num_workers")]
)
def test_a_knob_by_the_name_of_another_library_is_refused_with_its_name_here(given: str, here: str) -> None:
    with pytest.raises(SpecError, match=f"RunSpec has no knob '{given}': here it is called {here}"):
        RunSpec(task="text-gpt", **{given: 2})
    with pytest.raises(SpecError, match=f"here it is called {here}"):
        RunSpec(task="text-gpt").replace(**{given: 2})


def test_no_name_of_another_library_stands_for_two_knobs_or_is_a_knob_here() -> None:
    names = [name for knob in KNOBS.values() for name in knob.elsewhere]
    assert len(names) == len(set(names))
    assert not set(names) & set(KNOBS)


def test_the_text_of_a_spec_has_the_knobs_that_were_turned() -> None:
    assert repr(RunSpec(task="text-gpt")) == "RunSpec(task='text-gpt')"
    spec = RunSpec(task="text-gpt", micro_batch=8, num_workers=0, nproc_per_node=2)
    assert repr(spec) == "RunSpec(task='text-gpt', micro_batch=8, nproc_per_node=2)"
    assert eval(repr(spec)) == spec


def test_a_knob_that_does_not_exist() -> None:
    with pytest.raises(
        SpecError, match=r"RunSpec has no knob 'num_worker': did you mean 'num_workers'\? \(all: workbench launch --help\)$"
    ):
        RunSpec(task="text-gpt").replace(num_worker=2)
    with pytest.raises(SpecError, match=r"no knobs 'num_worker': did you mean 'num_workers'\? 'gpu': here it is called nproc_per_node \("):
        RunSpec(task="text-gpt", num_worker=2, gpu=3)
    with pytest.raises(SpecError, match=r"no knobs 'gpus': here it is called nproc_per_node; 'qqq' \(all: workbench launch --help\)$"):
        RunSpec(task="text-gpt", gpus=2, qqq=3)
    with pytest.raises(SpecError, match=r"no knob 'weights': the nearest are weight_decay_on.* \(all: workbench launch --help\)$"):
        RunSpec(task="text-gpt", weights=2)
    with pytest.raises(SpecError, match=r"RunSpec\('text-gpt'\): its arguments are given by name, RunSpec\(task=…\)"):
        RunSpec("text-gpt")
    with pytest.raises(SpecError, match="RunSpec: task=… is missing"):
        RunSpec(micro_batch=2)
    with pytest.raises(SpecError, match="a spec of kind 'cron': allowed are task, script"):
        spec_from_json({"kind": "cron"})
    with pytest.raises(SpecError, match="expected a list of words, such as"):
        ScriptSpec(script="train.py", args="--epochs 1")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="watch='yes'"):
        ScriptSpec(script="train.py", watch="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", ["true", "True", "TRUE"])
def test_true_is_typed_in_any_case(typed: str) -> None:
    assert RunSpec(task="text-gpt", **dict([parse_knob(f"gradient_as_bucket_view={typed}")])).gradient_as_bucket_view is True
    assert parse_knob("watch=false") == ("watch", False)


def test_a_what_if_is_a_changed_spec() -> None:
    spec = RunSpec(task="text-gpt")
    changed = spec.replace(num_workers=2, prefetch_factor=4)
    assert spec.num_workers == 0
    assert spec.changes(changed) == {"num_workers": (0, 2), "prefetch_factor": (None, 4)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.steps = 1  # type: ignore[misc]


def test_ranks_that_split_layers_read_the_same_samples() -> None:
    spec = RunSpec(task="text-gpt", micro_batch=4, accumulation=2, nproc_per_node=8, tensor_parallel=2)
    assert (spec.data_ranks, spec.global_batch) == (4, 32)


def test_a_spec_from_before_a_knob_was_made() -> None:
    old = {
        name: value for name, value in RunSpec(task="text-gpt").to_json().items() if name not in ("parallel", "offload", "checkpointing")
    }
    assert spec_from_json(old) == RunSpec(task="text-gpt")


def test_what_stands_beside_a_field_holds_of_it() -> None:
    assert list(KNOBS) == [field.name for field in dataclasses.fields(RunSpec)]
    for field in dataclasses.fields(RunSpec):
        about = KNOBS[field.name]
        assert set(about.panels) <= {"doctor", "memory"}
        assert not about.choices or field.default in about.choices
        assert field.default in (about.default, dataclasses.MISSING)
        assert not about.turned_in or about.predicted, f"{field.name} can be proved in a user's step, and is not predicted"
