"""Knobs of the recipe: each schedule against its closed form and torch's own, wrong values, and combinations that are refused."""

import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import workbench
from workbench.runs.combinations import check_task
from workbench.runs.launch import environment, launch
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.spec import RunSpec, SpecError, parse_knob
from workbench.runs.training_knobs import SCHEDULES, UNEVALUATED, depends_on_steps, lr_factor, parse_schedule
from workbench.train.optimizers import build_scheduler

STEPS = 40
MIXTURE = "workbench.train.tasks:moe_gpt"


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "steps": STEPS, **knobs})


def factors(schedule: str, *, steps: int = STEPS, warmup_steps: int = 0) -> list[float]:
    return [lr_factor(step, steps=steps, warmup_steps=warmup_steps, schedule=schedule) for step in range(steps)]


def of_torch(make: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("cosine", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS)),
        ("cosine(end=0.1)", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.1)),
        ("polynomial", lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS)),
        ("polynomial(power=2)", lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS, power=2)),
        ("polynomial(end=0.1)", lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)),
        ("step(every=0.25)", lambda optimizer: lr_scheduler.StepLR(optimizer, STEPS // 4)),
        ("step(every=0.05, factor=0.5)", lambda optimizer: lr_scheduler.StepLR(optimizer, STEPS // 20, gamma=0.5)),
    ],
)
def test_schedules_are_torchs_own(schedule: str, make: Any) -> None:
    assert factors(schedule) == pytest.approx(of_torch(make), abs=1e-9)


def test_the_inverse_square_root_goes_on_where_the_warm_up_ends() -> None:
    found = factors("inverse_sqrt", warmup_steps=10)
    assert found[9] == 1.0
    assert found[10:] == pytest.approx([math.sqrt(10 / (step + 1)) for step in range(10, STEPS)])
    assert found == factors("inverse_sqrt", warmup_steps=10, steps=1000)[:STEPS]


def test_a_schedule_that_is_stable_decays_at_the_end_only() -> None:
    found = factors("warmup_stable_decay(decay=0.25, end=0.2)", warmup_steps=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[3:31] == [1.0] * 28
    assert found[30:] == pytest.approx([1.0] + [0.2 + 0.8 * (STEPS - step) / 10 for step in range(31, STEPS)])


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 300), st.integers(0, 400))
def test_every_step_of_every_schedule_moves_and_none_after_the_warm_up_rises(schedule: str, steps: int, warmup_steps: int) -> None:
    found = factors(schedule, steps=steps, warmup_steps=warmup_steps)
    assert all(0 < factor <= 1 for factor in found)
    assert all(a >= b for a, b in itertools.pairwise(found[warmup_steps:]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_scheduler_of_a_run_follows_and_goes_on_from_its_state(schedule: str) -> None:
    spec = spec_of(schedule=schedule, warmup_steps=3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    whole, expected = build_scheduler(optimizer, spec), [0.5 * factor for factor in factors(schedule, warmup_steps=3)]
    for step in range(20):
        assert whole.get_last_lr()[0] == expected[step]
        optimizer.step()
        whole.step()
    again = build_scheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5), spec)
    again.load_state_dict(whole.state_dict())
    assert again.get_last_lr()[0] == expected[20]


def test_which_schedules_need_to_know_the_number_of_steps() -> None:
    assert [name for name in SCHEDULES if not depends_on_steps(name)] == ["constant", "inverse_sqrt"]


def test_a_schedule_of_the_users_own_follows_the_warm_up_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the steps of the run alone: a list with a rate for each will do."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rates_of_mine.py").write_text(f"RATES = [1 / (1 + n) for n in range({STEPS})]\ndef rate(step):\n    return RATES[step]\n")
    spec = spec_of(schedule=f"{tmp_path}/rates_of_mine.py:rate", warmup_steps=3)
    assert "rates_of_mine" not in sys.modules
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    whole, found = build_scheduler(optimizer, spec), []
    for step in range(STEPS):
        if step == 20:
            again = build_scheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5), spec)
            again.load_state_dict(whole.state_dict())
            assert again.get_last_lr() == whole.get_last_lr()
        found.append(whole.get_last_lr()[0])
        optimizer.step()
        whole.step()
    assert found == pytest.approx([0.5 * (n + 1) / 3 for n in range(3)] + [0.5 / (1 + n) for n in range(3, STEPS)])
    assert not depends_on_steps(spec.schedule)
    with pytest.raises(SpecError, match="a function of your own, which only a run imports"):
        lr_factor(5, steps=10, warmup_steps=0, schedule=spec.schedule)


@pytest.mark.parametrize("schedule", ["rates.py:", ":rate", "my rates:rate", "a.b:c.d", "rates.py:cosine(end=0.1)"])
def test_a_name_that_is_no_name_of_a_function(schedule: str) -> None:
    with pytest.raises(SpecError, match=r'a function of your own is named "path/file.py:function" or "package.module:function"'):
        spec_of(schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("polynomal", 'did you mean "polynomial"'),
        ("polynomial(2)", r'expected a name, with options if you like: "polynomial\(power=2.0, end=0.1\)"'),
        ("polynomial(pow=2)", "polynomial has no option 'pow'; it has power, end"),
        ("constant(end=1)", "constant has no option 'end'; it has none"),
        ("polynomial(power=0)", "power=0: a number from 0.001 to 1000 is allowed"),
        ("cosine(end=1.5)", "end=1.5: a number from 0 to 1 is allowed"),
        ("step(every=0)", "every=0: a number from 1e-06 to 1 is allowed"),
        ("step(every=True)", "every=True: a number"),
        ("step(factor=1e999)", "factor=inf: a number"),
        ("step(factor=open('x'))", "factor is not a number"),
        ("__import__('os').system('x')", "expected a name"),
        ("cosine(**{})", "cosine has no option None"),
        ("cosine(end=0.1, end=0.2)", "'end' is given twice"),
        ("step(factor=1e300)", "factor=1e\\+300: a number from 0.001 to 10 is allowed"),
        ("step(every=1e-320)", "a number from 1e-06 to 1 is allowed"),
        ("(" * 5000, "expected a name"),
        ("", "expected a name"),
    ],
)
def test_wrong_schedules_say_what_is_allowed(schedule: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        spec_of(schedule=schedule)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"schedule": 3}, "schedule=3: a name is allowed: 'constant'"),
        ({"label_smoothing": 1}, "label_smoothing=1: a number from 0 to below 1 is allowed"),
        ({"label_smoothing": "0.1"}, "label_smoothing='0.1': a number"),
        ({"ema": 1.0}, "ema=1.0: a decay per step between 0 and 1 is allowed, such as 0.999, or None"),
        ({"ema": True}, "ema=True: a decay"),
        ({"gradient_compression": "int8"}, "gradient_compression='int8': allowed are 'none', 'fp16', 'bf16', 'powersgd'"),
        ({"gradient_compression": "fp16", "parallel": "fsdp"}, 'gradient_compression="fp16" with parallel="fsdp": it is a hook of DDP'),
        ({"static_graph": True, "find_unused_parameters": True}, "find_unused_parameters=True with static_graph=True: one says that all"),
        ({"static_graph": True, "accumulation": 2}, "accumulation=2 with static_graph=True: DDP looks at one whole backward"),
        ({"static_graph": True, "parallel": "fsdp"}, 'parallel="fsdp" with static_graph=True: it is a knob of DDP'),
        ({"static_graph": True, "micro_batch": "auto"}, 'micro_batch="auto" with static_graph=True: DDP looks at'),
        (
            {"static_graph": True, "pipeline_parallel": 2, "nproc_per_node": 2, "pipeline_schedule": "gpipe"},
            "pipeline_parallel=2 with static_graph=True: .* a stage has several in each",
        ),
        ({"weight_decay_on": "norms"}, "weight_decay_on='norms': allowed are 'all', 'matrices'"),
    ],
)
def test_values_and_combinations_that_are_refused_before_a_launch(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(**knobs)


def test_a_run_without_evaluations_has_no_knob_of_them() -> None:
    """Turned off alone, `evaluate` leaves knobs that need it, and the spec is refused."""
    spec = spec_of(evaluate="every(steps=5)", evaluate_batches=3, stop_when="accuracy(best=max)", checkpoint_every=5, best="accuracy")
    with pytest.raises(SpecError):
        spec.replace(evaluate=False)
    assert spec.replace(**UNEVALUATED) == spec_of(checkpoint_every=5)
    others = [path for path in Path(workbench.__file__).parent.rglob("*.py") if "evaluate=False, " in path.read_text()]
    assert not others  # a changed spec of the library itself


def test_a_parsed_schedule_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        parse_schedule("cosine")[1]["end"] = 1.0  # type: ignore[index]
    assert spec_of(ema=0.99, parallel="zero1", nproc_per_node=2).ema == 0.99


@pytest.mark.parametrize("knobs", [{}, {"device": "auto"}, {"device": "cuda", "backend": "gloo"}])
def test_gradients_in_bf16_are_refused_before_a_launch_without_nccl(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    with pytest.raises(
        LaunchError, match='gradient_compression="bf16": torch reduces gradients in bf16 on GPUs with NCCL only; try "fp16"'
    ):
        launch.check(spec_of(task="clipart-resnet", gradient_compression="bf16", **knobs))
    launch.check(spec_of(task="clipart-resnet", gradient_compression="fp16"))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"compile": "layers"}, "compile='layers': allowed are 'none', 'model', 'blocks'"),
        ({"compile": True}, "compile=True: a name is allowed"),
        ({"compile": "model(mode=fast)"}, "model has no option 'mode'; it has backend"),
        ({"compile": "model(backend=3)"}, "backend=3: a name is allowed"),
        ({"compile": "model", "parallel": "fsdp"}, 'compile="model" with parallel="fsdp": .*; try compile="blocks"'),
        ({"compile": "blocks", "bucket_cap_mb": 0.5}, "with bucket_cap_mb=0.5: torch.compile cuts the graph at DDP.s buckets"),
        ({"compile": "blocks", "checkpointing": "full"}, 'with checkpointing="full": torch.compile decides itself'),
        ({"compile": "blocks", "micro_batch": "auto"}, 'with micro_batch="auto": it is chosen for the step as it is'),
        ({"compile": "model", "tensor_parallel": 2, "nproc_per_node": 2}, "with tensor_parallel=2: split layers"),
        ({"torch_compile": True}, "here it is called compile"),
    ],
)
def test_what_cannot_be_compiled_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(**knobs)
    assert spec_of(compile="blocks(backend='eager')", parallel="fsdp").compile


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"stop_when": 3}, r'stop_when=3: a figure of the evaluation is allowed, such as "validation_loss\(patience=3\)", or None'),
        ({"stop_when": "loss(patience=0)"}, "stop_when: patience=0"),
        ({"stop_when": "loss(best=up)"}, "stop_when: best='up': allowed are 'min', 'max'"),
        ({"stop_when": "loss"}, 'stop_when="loss" with evaluate=False: .* try evaluate="epoch"'),
        ({"best": "accuracy"}, 'best="accuracy" with evaluate=False and checkpoint_every=None: .* try evaluate="checkpoint"'),
        ({"best": "accuracy", "evaluate": "end", "checkpoint_every": 5}, "with evaluate='end' and checkpoint_every=5"),
        ({"best": "score"}, r"evaluations of the workbench have validation_loss, .*: \"score\(max\)\" or \"score\(min\)\""),
        ({"best": "acuracy"}, "best='acuracy': did you mean 'accuracy'. evaluations of the workbench"),
        ({"best": "accuracy", "steps": 12}, 'try evaluate="checkpoint" and checkpoint_every=2$'),
        ({"evaluate": "checkpoint", "steps": 12}, "say after how many steps, as in checkpoint_every=2$"),
        ({"best": "score(up)"}, r'best=.score\(up\).: a figure of the evaluation is allowed, such as "accuracy" or "score\(max\)"'),
        ({"best": 3}, "best=3: a figure"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: a whole number"),
        ({"gradient_compression": "powersgd(rank=0)"}, "rank=0: a whole number"),
        ({"gradient_compression": "powersgd", "parallel": "fsdp"}, 'with parallel="fsdp": it is a hook of DDP'),
    ],
)
def test_recipes_that_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(**knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"optimizer": "nope"}, "optimizer='nope': no optimizer 'nope'; Allowed are adafactor"),
        ({"optimizer": "adamw(wrong=1)"}, "adamw has no option 'wrong'; it has betas, eps"),
        ({"optimizer": "adamw(0.1)"}, "give each option its name"),
        ({"optimizer": "sgd(differentiable=True)"}, "differentiable=True: the training steps outside of autograd; leave it out"),
        ({"optimizer": "adamw(fused=True, foreach=True)"}, "fused and foreach are two implementations; leave one of them out"),
        ({"optimizer": "muon", "parallel": "fsdp"}, 'optimizer="muon" with parallel="fsdp": it needs whole matrices.*; try parallel="ddp"'),
        ({"optimizer": "adafactor(lr=0.1)", "parallel": "zero2"}, 'with parallel="zero2": it needs the means of whole rows and columns'),
        ({"optimizer": "muon", "tensor_parallel": 2}, 'with tensor_parallel=2: it needs .*; leave one of them out, or try .*"adamw"'),
        ({"optimizer": "muon", "expert_parallel": 2}, "with expert_parallel=2: it needs whole"),
        (
            {"optimizer": "sgd(fused=True)", "parallel": "hsdp"},
            'with parallel="hsdp": for sharded parameters torch has fused steps of adam and adamw only',
        ),
    ],
)
def test_optimizers_that_are_refused_before_a_launch(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(nproc_per_node=2, **knobs)
    assert spec_of(nproc_per_node=2, optimizer="adamw(fused=True)", parallel="fsdp")
    assert spec_of(nproc_per_node=2, optimizer="muon", parallel="zero1")
    assert spec_of(nproc_per_node=2, optimizer="sgd(fused=True)", tensor_parallel=2)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"offload": "activations"}, 'offload="activations" on the CPU: there is nothing to offload from'),
        ({"optimizer": "adamw(capturable=True)"}, "capturable=True.* on the CPU: only GPUs can capture a step; leave capturable out"),
        ({"tf32": True, "device": "auto"}, "tf32=True on the CPU: only NVIDIA GPUs compute in TF32"),
        (
            {"gradient_compression": "powersgd", "bucket_cap_mb": 1.0},
            "bucket_cap_mb=1 .*: on CPUs .* in one bucket, .*; leave bucket_cap_mb out",
        ),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    spec = spec_of(**{"task": "text-gpt", "nproc_per_node": 2, **knobs})
    with pytest.raises(LaunchError, match=message):
        launch.check(spec)
    launch.check(spec.replace(device="cuda", nproc_per_node=1), here=False)


@pytest.mark.parametrize(
    ("task", "knobs", "message"),
    [
        ("text-gpt", {"expert_parallel": 2}, "expert_parallel=2 with task='text-gpt': its model has no layers of experts; leave it out"),
        (
            "workbench.train.tasks:moe_gpt",
            {"expert_parallel": 3, "nproc_per_node": 3},
            "does not divide its 4 experts; try expert_parallel=2",
        ),
        ("fashion-mlp", {"tensor_parallel": 2}, "tensor_parallel=2 with task='fashion-mlp': it has no plan of how its layers are split"),
        (
            "workbench.train.tasks:moe_gpt",
            {"pipeline_parallel": 2, "accumulation": 2},
            "pipeline_parallel=2 .*: it does not say how its model is cut",
        ),
        (
            "fashion-mlp",
            {"pipeline_parallel": 2, "accumulation": 2, "pipeline_schedule": "interleaved(chunks=2)"},
            'pipeline_schedule="interleaved.*needs 4 stages, and its model has 2 pieces with parameters; try pipeline_schedule="gpipe"',
        ),
        ("fashion-mlp", {"checkpointing": "full"}, 'checkpointing="full" with .*: its model has no blocks that repeat; leave it out'),
        ("fashion-mlp", {"compile": "blocks"}, 'compile="blocks" with .*: its model has no blocks that repeat; try compile="model"'),
        (
            "fashion-mlp",
            {"weight_decay_on": "matrices"},
            "its sgd has no weight decay; leave it out, or try",
        ),
        ("fashion-mlp", {"weight_decay_on": "matrices", "optimizer": "adam"}, "its adam has no weight decay"),
        ("fashion-mlp", {"optimizer": "fused", "parallel": "fsdp"}, "for sharded parameters torch has fused steps"),
        (
            "text-gpt",
            {"evaluate": "every(steps=1)", "stop_when": "accuracy"},
            'stop_when="accuracy" with .*: its evaluation has bits_per_byte and validation_loss; try stop_when="validation_loss"',
        ),
        (
            "text-gpt",
            {"evaluate": "checkpoint", "checkpoint_every": 1, "best": "ece"},
            'best="ece" with .*: its evaluation has bits_per_byte and validation_loss; try best="validation_loss"',
        ),
    ],
)
def test_what_a_sample_does_not_take_is_refused_before_a_launch(task: str, knobs: dict[str, Any], message: str) -> None:
    spec = spec_of(**{"task": task, "nproc_per_node": 2, **knobs})
    for ask in (launch.check, check_task):
        with pytest.raises(SpecError, match=message):
            ask(spec)
    check_task(spec.replace(task="my_task.py:build"))  # it is not known


def test_more_samples_than_a_sample_task_has_are_refused_before_a_launch() -> None:
    spec = spec_of(task="clipart-resnet", nproc_per_node=2, micro_batch=1024)
    with pytest.raises(
        SpecError, match="one optimizer step takes 2048 samples, and its dataset has 1027; try micro_batch=513, or fewer ranks"
    ):
        launch.check(spec)
    check_task(spec)  # an estimate takes any number
    launch.check(spec.replace(micro_batch=513))


def test_an_estimate_refuses_in_the_same_words() -> None:
    spec = spec_of(task="text-gpt", nproc_per_node=2, micro_batch=2)
    knobs: dict[str, Any] = {}
    for knobs, why in (
        ({"expert_parallel": 2}, "no layers of experts"),
        ({"gradient_compression": "powersgd", "bucket_cap_mb": 0.1}, "in one bucket"),
    ):
        with pytest.raises(ValueError, match=why) as of_launch:
            launch.check(spec.replace(**knobs))
        with pytest.raises(ValueError, match=why) as of_estimate:
            workbench.estimate_memory(spec, device="cpu", **knobs)
        assert str(of_estimate.value) == str(of_launch.value)
    assert workbench.estimate_memory(spec, device="H100", **knobs).total > 0  # a GPU has as many buckets as it is told


def test_samples_take_what_they_can() -> None:
    for task, knobs in (
        ("text-gpt", {"tensor_parallel": 2}),
        (MIXTURE, {"expert_parallel": 2}),
        ("fashion-mlp", {"pipeline_parallel": 2, "accumulation": 2}),
        ("fashion-mlp", {"weight_decay_on": "matrices", "optimizer": "adamw"}),
        ("text-gpt", {"evaluate": "checkpoint", "checkpoint_every": 1, "best": "validation_loss", "stop_when": "bits_per_byte"}),
        ("fashion-mlp", {"evaluate": "checkpoint", "checkpoint_every": 1, "best": "validation_loss", "stop_when": "loss"}),
        ("workbench.train.tasks:text_gpt", {"parallel": "fsdp", "optimizer": "fused"}),
    ):
        check_task(spec_of(task=task, nproc_per_node=2, **knobs))


def test_the_table_of_the_knobs_page_is_so() -> None:
    """Every pair of a row is refused, and each knob of it is taken alone."""
    page = (Path(workbench.__file__).parents[1] / "docs/pages/reference/knobs.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]

    def made(**knobs: Any) -> RunSpec:
        return spec_of(nproc_per_node=2, **({"accumulation": 4} if "pipeline_parallel" in knobs else {}), **knobs)

    pairs = 0
    for knobs, others in ([[parse_knob(word) for word in re.findall(r"`(\w+=[^`]+)`", cell)] for cell in row] for row in rows):
        for one, other in itertools.product(knobs, others):
            assert made(**dict([one]))
            assert made(**dict([other]))
            with pytest.raises(SpecError):
                made(**dict([one, other]))
            pairs += 1
    assert pairs > 60
