"""The knob `compile`: what is compiled, that the training is the same, that its first step counts in no mean."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests import toy_tasks
from tests.train.test_checkpoints import names, spec_of, train, weights
from workbench.core import run_directory
from workbench.runs.spec import SpecError
from workbench.timeline.timeline import Timeline
from workbench.train.blocks import compile_parts
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks for it


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2))


def compiled(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if part._compiled_call_impl is not None]


def test_blocks_or_the_model_are_compiled_in_place() -> None:
    model = Gpt(length=8, width=8, layers=2, heads=2)
    before = list(model.state_dict())
    compile_parts(model, "none")
    assert compiled(model) == []
    compile_parts(model, "blocks(backend=eager)")
    assert compiled(model) == ["layers.0", "layers.1"]
    compile_parts(model, "model(backend=eager)")
    assert compiled(model) == ["", "layers.0", "layers.1"]
    assert list(model.state_dict()) == before
    with pytest.raises(SpecError, match=r"this torch has no backend 'gpu'; it has .*inductor"):
        compile_parts(model, "model(backend=gpu)")
    with pytest.raises(SpecError, match='the Linear has no blocks that repeat; try compile="model"'):
        compile_parts(nn.Linear(2, 2), "blocks(backend=eager)")


def test_modules_of_torchs_own_classes_are_compiled_too() -> None:
    from torch._dynamo.utils import counters

    for knob, graphs in (("model(backend=eager)", 1), ("blocks(backend=eager)", 1)):
        torch._dynamo.reset()
        counters.clear()
        model = blocks()
        compile_parts(model, knob)
        model(torch.zeros(3, 4))
        assert counters["stats"]["unique_graphs"] == graphs, "the blocks share what was compiled"


def test_a_compiled_run_learns_the_same_is_resumed_and_its_first_step_is_left_out(alone: Ranks, tmp_path: Path) -> None:
    task = toy_tasks.numbers(model=blocks, evaluate=toy_tasks.parameters)
    ends = []
    for kind in ("none", "model(backend=eager)", "blocks(backend=eager)"):
        (folder := tmp_path / kind).mkdir()
        spec = spec_of(compile=kind, evaluate=True, accumulation=2)
        ends.append(weights(train(spec, task, alone, folder)))
        figures = run_directory.LineTail(folder / run_directory.METRICS).read()[-1]
        timeline = Timeline.from_lines(run_directory.LineTail(folder / run_directory.rank_file(0)).read(), warmup=0)
        assert timeline.profiled == (() if kind == "none" else (0,))
        assert ("first_step_seconds" in figures) is (kind != "none")
        assert figures["p0"] == float(ends[-1][0])
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert names(folder)[-1] == "step00000018.pt"
    (folder / run_directory.CHECKPOINTS / "step00000018.pt").unlink()
    assert torch.equal(weights(train(spec, task, alone, folder)), ends[0])
