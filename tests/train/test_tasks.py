"""The sample tasks train for real, in seconds, on two ranks and two cores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.forked import Forks
from workbench.runs.combinations import KNOWN, Sample
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec
from workbench.runs.task import SAMPLES, resolve
from workbench.train.blocks import find_blocks
from workbench.train.expert_parallel import expert_layers
from workbench.train.models import Gpt, ResNet
from workbench.train.optimizers import build_optimizer, described
from workbench.train.trainer import evaluate


@pytest.mark.slow
def test_samples_learn(by_hand: Callable[..., Any], forks: Forks, tmp_path: Path) -> None:
    """60 steps beat the largest class (13 % of the pictures) and the frequencies of the bytes (4.46 bits)."""
    spec = RunSpec(task="clipart-resnet", nproc_per_node=2, steps=60, warmup_steps=5, schedule="cosine", evaluate=True, device="cpu")
    directories = [by_hand(spec=spec.replace(task=task).to_json()).path for task in ("clipart-resnet", "text-gpt")]
    done = forks.train(2, tmp_path, *directories)
    assert done.returncode == 0, done.stderr
    pictures, text = (Run.load(directory) for directory in directories)
    assert 0.2 < pictures.metric_rows[-1]["accuracy"] < 1
    assert 1 < text.metric_rows[-1]["bits_per_byte"] < 4.2
    for run in (pictures, text):
        losses = [row["loss"] for row in run.metric_rows if "loss" in row]
        assert len(losses) == 60
        assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
        assert [len(timeline.steps) for timeline in run.timelines] == [60, 60]


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_whole(name: str) -> None:
    task = resolve(name)
    assert task.name == name
    model, data = task.model(), task.dataset()
    batch = torch.utils.data.default_collate([data[i] for i in range(4)])
    assert task.loss(model, batch).shape == ()
    assert task.evaluate is not None
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 13_258 if name == "fashion-mlp" else 1e5 < parameters < 5e5


def test_the_cheap_sample_learns_and_judges_itself() -> None:
    task = resolve("fashion-mlp")
    torch.manual_seed(0)
    model, data = task.model(), task.dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert task.evaluate is not None
    with torch.no_grad():
        before = task.evaluate(model)
    for start in range(0, len(data), 32):
        optimizer.zero_grad()
        task.loss(model, data.__getitems__(list(range(start, start + 32)))).backward()
        optimizer.step()
    with torch.no_grad():
        after = task.evaluate(model)
    assert before["accuracy"] < 0.3 < 0.7 < after["accuracy"]
    assert after["loss"] < 1 < 2 < before["loss"]


def test_resnet_halves_the_sides_at_each_stage() -> None:
    model = ResNet(classes=7, width=4, blocks=(1, 2))
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert model.stages[:1](model.stem(torch.zeros(2, 3, 64, 64))).shape == (2, 4, 16, 16)
    assert model.stages(model.stem(torch.zeros(2, 3, 64, 64))).shape == (2, 8, 8, 8)


def test_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = Gpt(length=16, width=16, layers=2, heads=2)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0


@pytest.mark.parametrize("where", KNOWN)
def test_what_is_known_of_a_sample_without_building_it_is_so(where: str) -> None:
    task, known = resolve(where), KNOWN[where]
    model = task.model()
    pieces = task.pipeline(model) if task.pipeline else model if isinstance(model, nn.Sequential) else ()
    optimizer = described(build_optimizer(model, task.optimizer))
    experts = {len(getattr(layer, name)) for _, layer in expert_layers(model) for name in layer.expert_parameters}
    assert known == Sample(
        samples=len(task.dataset()),
        figures=tuple(evaluate(task, model)),
        optimizer=optimizer["name"],
        decays=bool(optimizer["weight_decay"]),
        blocks=bool(find_blocks(model)),
        pieces=sum(next(piece.parameters(), None) is not None for piece in pieces),
        experts=experts.pop() if experts else 0,
        plan=task.tensor_parallel is not None,
    )
    assert not experts


def test_the_text_model_learns_the_same_in_split_layers(by_hand: Callable[..., Any], forks: Forks, tmp_path: Path) -> None:
    spec = RunSpec(task="text-gpt", micro_batch=4, steps=3, device="cpu")
    alone, split = by_hand(spec=spec.to_json()), by_hand(spec=spec.replace(nproc_per_node=2, tensor_parallel=2).to_json())
    for ranks, run in ((1, alone), (2, split)):
        done = forks.train(ranks, tmp_path, run.path)
        assert done.returncode == 0, done.stderr
    losses = [[row["loss"] for row in Run.load(run.path).metric_rows] for run in (alone, split)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
