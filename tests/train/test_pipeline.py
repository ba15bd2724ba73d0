"""Pipelines: how a model is cut into stages, what is refused before a launch, and what a loss may do with a model in stages."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import toy_tasks
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task, TaskError
from workbench.train import pipeline
from workbench.train.models import Gpt, ResNet
from workbench.train.pipeline import _arguments, _ModelCall
from workbench.train.ranks import changed_layout, layout_knobs
from workbench.train.stages import StageModule, as_tensors, cut, even_parts, keep_only


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "nproc_per_node": 2, "pipeline_parallel": 2, "accumulation": 4, **knobs})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_the_largest_part_is_as_small_as_possible(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    parts = even_parts(sizes, count)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert len(parts) == count
    assert all(map(len, parts))

    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *ends, len(sizes))))

    best = min(largest(ends) for ends in itertools.combinations(range(1, len(sizes)), count - 1))
    assert max(sum(sizes[place] for place in part) for part in parts) == best


@pytest.mark.parametrize(
    ("make", "batch", "knobs"),
    [
        (lambda: Gpt(length=16, width=32, layers=6, heads=4), torch.arange(32).view(2, 16), {"pipeline_schedule": "interleaved(chunks=4)"}),
        (lambda: ResNet(classes=4, width=8, blocks=(2, 1, 1, 1)), torch.randn(2, 3, 32, 32), {"pipeline_schedule": "zero_bubble"}),
        (toy_tasks.network, torch.randn(3, 4), {}),
    ],
)
def test_stages_one_after_the_other_are_the_model(make: Callable[[], nn.Module], batch: Tensor, knobs: dict[str, Any]) -> None:
    model = make()
    knobs |= {"accumulation": 8}
    stages = cut(model, toy_tasks.numbers(pipeline=getattr(type(model), "pieces", None)), spec_of(**knobs))
    modules = [StageModule(pieces) for pieces in stages.pieces]
    out = modules[0](given=((batch,), {}))
    for module in modules[1:]:
        out = module(out)
    assert torch.equal(out, model(batch))
    names = {id(weight): name for name, weight in model.named_parameters()}
    whole = set(names.values())
    mine = [[names[id(weight)] for weight in module.parameters()] for module in modules]
    assert sorted(itertools.chain(*mine)) == sorted(whole)
    assert all(mine)
    placed = {"zero_bubble": (0, 1, 1, 0), "1f1b": (0, 1), "interleaved(chunks=4)": (0, 1) * 4}
    assert stages.ranks == placed[spec_of(**knobs).pipeline_schedule]
    keep_only(model, stages.pieces[0])
    assert [name for name, _ in model.named_parameters()] == [name for name in names.values() if name in mine[0]]
    assert stages.entries >= whole
    assert set(model.state_dict()) <= stages.entries


class Twice(nn.Module):
    """Uses one layer at both ends, and keeps one for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.middle, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


def test_schedules_of_an_older_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pipeline.SCHEDULES, "1f1b", lambda stages, n_microbatches, loss_fn: None)
    nothing: Any = None
    with pytest.raises(SpecError, match=r"pipeline_parallel=2: torch .* is too old for it; take 2\.7 or newer"):
        pipeline.Pipeline(spec_of(), nothing, nothing, nothing, nothing, seed=0, loss=nothing)


@pytest.mark.parametrize(
    ("task", "knobs", "error", "said"),
    [
        (
            {"model": Gpt},
            {},
            SpecError,
            r"does not say how its Gpt is cut, and it is not an nn.Sequential; try wb.Task\(…, pipeline=lambda",
        ),
        ({}, {"pipeline_schedule": "interleaved"}, SpecError, "needs 4 stages, and the model has 2 pieces with parameters; try a model"),
        ({"pipeline": lambda model: []}, {}, TaskError, "gave nothing; expected modules"),
        ({"pipeline": lambda model: [model, "head"]}, {}, TaskError, "gave a str; expected modules"),
        ({"pipeline": lambda model: [model[0]]}, {}, TaskError, "leaves out 2.weight, 2.bias: each parameter has to be in a piece"),
        ({"pipeline": lambda model: [*model, nn.Linear(2, 2)]}, {}, TaskError, "has parameters that the model has not: weight, bias"),
        (
            {"model": Twice, "pipeline": lambda model: [model.ends, model.middle, model.other, model.ends]},
            {},
            TaskError,
            r"ends.weight is used in stage 0 and in stage 1, .* untie them",
        ),
    ],
)
def test_a_model_that_cannot_be_cut(task: dict[str, Any], knobs: dict[str, Any], error: type[ValueError], said: str) -> None:
    given = toy_tasks.numbers(**task)
    with pytest.raises(error, match=said):
        cut(given.model(), given, spec_of(**knobs))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"pipeline_parallel": 3}, r"pipeline_parallel=3 does not divide the 2 ranks \(nproc_per_node\): try pipeline_parallel=2"),
        ({"pipeline_parallel": 0}, "pipeline_parallel=0"),
        ({"pipeline_schedule": "2f2b"}, "pipeline_schedule='2f2b': expected a name"),
        ({"pipeline_schedule": "zigzag"}, "pipeline_schedule"),
        ({"pipeline_schedule": "interleaved(chunks=1)"}, r"chunks=1"),
        (
            {"accumulation": 1},
            'accumulation=1 with pipeline_parallel=2 and pipeline_schedule="1f1b".* takes 2 or more of them; try accumulation=2',
        ),
        ({"accumulation": 3, "pipeline_schedule": "interleaved"}, "takes a multiple of 2 of them; try accumulation=4, or pipeline_sch"),
        ({"accumulation": 2, "pipeline_schedule": "zero_bubble"}, "takes 4 or more of them; try accumulation=4"),
        ({"parallel": "fsdp"}, 'parallel="fsdp" with pipeline_parallel=2: stages that are sharded are not built here'),
        (
            {"nproc_per_node": 4, "tensor_parallel": 2},
            "tensor_parallel=2 with pipeline_parallel=2: stages of split layers are not built here",
        ),
        ({"precision": "amp_fp16"}, 'try precision="amp_bf16"'),
        ({"compile": "model"}, 'compile="model" with pipeline_parallel=2'),
        ({"offload": "activations"}, 'offload="activations" with pipeline_parallel=2'),
        ({"micro_batch": "auto"}, 'micro_batch="auto" with pipeline_parallel=2: .* give a number'),
        ({"gradient_compression": "fp16"}, 'gradient_compression="fp16" with pipeline_parallel=2'),
        ({"find_unused_parameters": True}, "find_unused_parameters=True with pipeline_parallel=2"),
        ({"noise_scale": True}, "noise_scale=True with pipeline_parallel=2"),
    ],
)
def test_what_does_not_combine_is_refused_before_the_launch(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec_of(**knobs)


def test_stages_share_samples() -> None:
    spec = spec_of(nproc_per_node=4, micro_batch=8, parallel="zero1")
    assert (spec.data_ranks, spec.global_batch, spec.whole_models) == (2, 64, False)


def test_what_a_loss_may_do_with_a_model_that_is_in_stages() -> None:
    batch = (torch.zeros(2, 4), torch.zeros(2, 2))
    assert _arguments(toy_tasks.numbers(), batch) == ((batch[0],), {})
    output = torch.ones(2, 2)
    assert toy_tasks.squared_error(_ModelCall(output), batch).item() == 1.0  # type: ignore[arg-type]
    losses: dict[str, Callable[[Any, Any], Any]] = {
        "does not call its model": lambda model, batch: batch[0].sum(),
        r"uses model.head; there it can be called, and nothing else": lambda model, batch: model.head(batch[0]),
    }
    for said, loss in losses.items():
        with pytest.raises(TaskError, match=said):
            _arguments(Task(model=toy_tasks.network, dataset=list, loss=loss), batch)
    with pytest.raises(TaskError, match="calls its model twice"):
        (lambda model: model(1) + model(2))(_ModelCall(output))
    with pytest.raises(TaskError, match=r"a stage gives torch.int64, NoneType to the next; only floating-point tensors"):
        as_tensors((torch.zeros(1, dtype=torch.int64), None))


def test_checkpoints_of_earlier_workbenches_had_one_stage() -> None:
    spec = spec_of(pipeline_parallel=1)
    before = {name: value for name, value in layout_knobs(spec).items() if not name.startswith("pipeline")}
    assert changed_layout(spec, before) == ""
    said = changed_layout(spec_of(), before)
    assert said.startswith("it goes on with pipeline_parallel=2 (it was 1): weights, optimizer and schedule are those of the checkpoint")
    assert "takes 128 samples now, and took 256" in said
