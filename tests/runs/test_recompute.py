"""Were the steps of a run computed right? A bit that flips on one rank is found and its rank named, and no healthy run is blamed."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import workbench as wb
from tests import toy_tasks
from tests.conftest import HandMade
from tests.forked import Forks
from tests.train.test_checkpoints import spec_of, train
from workbench.core import run_directory
from workbench.runs.launch import recompute
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.recompute import Fault, first_fault, judge, record, within
from workbench.runs.run import Run
from workbench.train.ranks import Ranks

TASK = """
import os
from pathlib import Path

import torch
import workbench as wb

STEP = 8

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8.0) * (index + 1)) + torch.rand(8)
        return x, x.sum(0, keepdim=True)

def flip(tensor):
    tensor.view(torch.int32).view(-1)[3] ^= 1 << 20  # of the fraction

class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        flip(gradient)
        return gradient

class Net(torch.nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        wrong = self.calls == STEP and os.environ["RANK"] == "1" and Path("flip").exists() and Path("flip").read_text()
        if wrong:
            Path("flip").unlink()  # once
        if wrong == "weight":
            with torch.no_grad():
                flip(self[0].weight)
        hidden = self[1](self[0](x))
        return self[2](WrongBackward.apply(hidden) if wrong == "gradient" else hidden)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def build():
    model = lambda: Net(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return wb.Task(model=model, dataset=Data, loss=loss, optimizer="adamw(lr=0.01)")
"""
Trained = Callable[..., Run]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: Callable[..., HandMade], forks: Forks) -> Trained:
    """Train a spec on two ranks with checkpoints after each fifth step, in forks; repetitions are made so, too."""
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)

    def run(directory: HandMade, spec: wb.RunSpec) -> Run:
        done = forks.train(spec.world_size, tmp_path, directory.path)
        assert done.returncode == 0, done.stderr
        return Run.load(directory.ended("finished").path)

    def repeated(old: Run, spec: wb.RunSpec, begin: int, end: int, timeout: float | None, runs_dir: Any) -> Run:
        directory = by_hand(spec=spec.to_json(), cwd=str(tmp_path))
        recompute.prepare(directory, old, begin, end)
        return run(directory, spec)

    def train(flip: str = "", **knobs: Any) -> Run:
        if flip:
            (tmp_path / "flip").write_text(flip)
        knobs = {"micro_batch": 4, "steps": 12, "checkpoint_every": 5, "nproc_per_node": 2, **knobs}
        spec = wb.RunSpec(task="task.py:build", device="cpu", **knobs)
        old = run(by_hand(spec=spec.to_json(), cwd=str(tmp_path)), spec)
        assert not (tmp_path / "flip").exists()
        return old

    monkeypatch.setattr(recompute, "_start", repeated)
    return train


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    yield Ranks.join(spec_of())
    dist.destroy_process_group()


class Flipping:
    """A loss that lets a bit of a weight flip in its seventh call, once; and one that is never the same."""

    def __init__(self, flips: bool = False, astray: bool = False) -> None:
        self.flips, self.astray, self.calls = flips, astray, 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.flips and self.calls == 7:
            self.flips = False
            with torch.no_grad():
                next(model.parameters()).view(torch.int32).view(-1)[0] ^= 1 << 14
        noise = float(os.urandom(1)[0]) if self.astray else 0.0
        return toy_tasks.squared_error(model, batch) * (1 + noise)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(
    ("loss", "verdict", "repetitions"),
    [
        (Flipping(), "right", 1),
        (Flipping(flips=True), "wrong", 2),
        (Flipping(astray=True), "not repeatable", 2),
    ],
    ids=["healthy", "flips", "astray"],
)
def test_a_flip_is_found_and_no_other_training_is_blamed(
    alone: Ranks, by_hand: Callable[..., HandMade], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: bool, loss: Flipping,
    verdict: str, repetitions: int,
) -> None:  # fmt: skip
    loss = copy.copy(loss)
    monkeypatch.setattr(recompute, "check", lambda spec: None)
    monkeypatch.setattr(recompute, "_start", lambda old, spec, begin, end, *_: made(spec, old, begin, end))

    def made(spec: wb.RunSpec, old: Run | None = None, begin: int = 0, end: int = 0) -> Run:
        directory = by_hand(spec=spec.to_json(), cwd=str(tmp_path))
        if old:
            recompute.prepare(directory, old, begin, end)  # type: ignore[arg-type]
        loss.calls = begin
        train(spec, toy_tasks.numbers(loss=loss), alone, directory.path)
        return Run.load(directory.ended("finished").path)

    found = wb.recompute(made(spec_of(steps=10, checkpoint_every=5, nproc_per_node=1, step_digests=digests)), until=9)
    assert (found.verdict, len(found.repetitions), found.digests) == (verdict, repetitions, digests), found.explanation
    assert (found.since, found.until, found.right) == (5, 9, {"right": True, "wrong": False}.get(verdict))
    if verdict == "wrong":
        assert found.fault == Fault(step=7, part="loss", ranks=(0,))
        assert ("first in step 7, on rank 0, in the loss: the" if digests else "first in step 7, in the loss of rank 0") in str(found)
        assert found.blamed == (0,)
        assert ("taken for granted" in str(found)) == (not digests)
        assert wb.Recomputation.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flip", "knobs", "fault"),
    [
        ("gradient", {"step_digests": True}, Fault(step=8, part="own gradients", ranks=(1,))),
        ("weight", {"step_digests": True}, Fault(step=8, part="loss", ranks=(1,))),
        ("weight", {}, Fault(step=8, part="loss", ranks=(1,))),  # of losses alone
        ("gradient", {}, Fault(step=9, part="loss", ranks=(1,))),  # that it shows on rank 1 alone is chance: no rank is blamed
        ("weight", {"parallel": "zero1", "step_digests": True, "precision": "amp_bf16"}, Fault(step=8, part="loss", ranks=(1,))),
        ("gradient", {"parallel": "fsdp", "step_digests": True}, Fault(step=8, part="gradients", ranks=(0,))),  # it has that shard
    ],
)
def test_flips_of_all_kinds_are_found(trained: Trained, flip: str, knobs: dict[str, Any], fault: Fault) -> None:
    found = wb.recompute(trained(flip, **knobs), since=5)
    assert (found.verdict, found.fault) == ("wrong", fault), found
    assert found.blamed == (fault.ranks if knobs and fault.part != "gradients" else ())
    if fault.part == "own gradients":
        assert "in step 8, on rank 1, in the gradients of its own samples: the backward" in str(found)
    if not knobs:
        assert "which rank computed it, step_digests=True would say" in str(found)
    if fault.part == "gradients":
        assert "in step 8, in the gradients that rank 0 holds: the backward of some rank, or the reduction" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"step_digests": True, "nproc_per_node": 3}, {"step_digests": True, "parallel": "fsdp"}])
def test_a_healthy_run_is_not_blamed(trained: Trained, knobs: dict[str, Any]) -> None:
    run = trained(**knobs)
    for since, begin in ((None, 10), (0, 0)):
        found = wb.recompute(run, since=since)
        assert (found.verdict, found.right, found.fault) == ("right", True, None), found
        assert (found.since, found.until, len(found.repetitions)) == (begin, 12, 1)


# --- which of three computations is the odd one


def steps(**changes: Any) -> dict[tuple[int, int], dict[str, str]]:
    """Two ranks with four steps each; `changes` has values by part for rank 1 from step 3 on."""
    parts = {"weights": "w", "batch": "b", "loss": "l", "gradients": "g"}
    return {(step, rank): parts | (changes if rank and step >= 3 else {}) for step in range(1, 5) for rank in range(2)}


def test_the_first_part_of_the_first_step_is_named_with_all_of_its_ranks() -> None:
    assert first_fault(steps(), steps()) is None
    assert first_fault(steps(), steps(gradients="x", loss="y")) == Fault(step=3, part="loss", ranks=(1,))
    everywhere = {key: parts | ({"loss": "z"} if key[0] == 2 else {}) for key, parts in steps().items()}
    assert first_fault(steps(gradients="x"), everywhere) == Fault(step=2, part="loss", ranks=(0, 1))
    assert first_fault({(1, 0): {"loss": "1"}}, {(1, 0): {"own gradients": "2"}, (2, 0): {"loss": "3"}}) is None  # nothing that both have


@pytest.mark.parametrize(
    ("recorded", "first", "second", "conditions", "verdict", "fault"),
    [
        ({"loss": "x"}, {}, {}, [], "wrong", Fault(step=3, part="loss", ranks=(1,))),
        ({"loss": "x"}, {}, {}, ["torch: 2.12 in the run, 2.13 here"], "elsewhere", Fault(step=3, part="loss", ranks=(1,))),
        ({"batch": "x", "loss": "y"}, {}, {}, [], "inputs", Fault(step=3, part="batch", ranks=(1,))),
        ({}, {"weights": "x"}, {}, [], "wrong now", Fault(step=3, part="weights", ranks=(1,))),
        ({"loss": "x"}, {"loss": "y"}, {"loss": "z"}, [], "not repeatable", Fault(step=3, part="loss", ranks=(1,))),
        ({"loss": "x"}, {}, {"loss": "z"}, [], "not repeatable", Fault(step=3, part="loss", ranks=(1,))),
    ],
)
def test_nothing_is_blamed_unless_the_other_two_agree(
    recorded: Any, first: Any, second: Any, conditions: list[str], verdict: str, fault: Fault
) -> None:
    assert judge(steps(**recorded), steps(**first), steps(**second), conditions) == (verdict, fault)


def test_after_the_last_step_only_the_states_count() -> None:
    kept = within(steps(), 1, 3)
    assert min(kept) == (2, 0)
    assert kept[3, 1].keys() == {"weights", "batch", "loss", "gradients"}
    assert kept[4, 1].keys() == {"weights"}
    assert within({key: {"loss": "1"} for key in steps()}, 0, 3).keys() == {(step, rank) for step in (1, 2, 3) for rank in (0, 1)}


def test_losses_are_those_of_the_metrics_and_of_each_ranks_ring(by_hand: Callable[..., HandMade]) -> None:
    path = by_hand().losses(3).path
    run_directory.write_json(path / run_directory.ring_file(1), {"steps": [{"step": 2, "loss": "nan"}, {"step": 3, "samples": [1]}]})
    (path / run_directory.ring_file(0)).write_text("damaged")
    expected = {(1, 0): {"loss": "2.0"}, (2, 0): {"loss": "1.0"}, (3, 0): {"loss": repr(2 / 3)}, (2, 1): {"loss": "nan"}}
    assert record(path, 2, False) == expected


def test_digests_of_a_later_attempt_replace_those_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / run_directory.FINGERPRINTS
    folder.mkdir()
    for attempt, said in ((10, "late"), (9, "early"), (2, "first")):
        rows = [{"step": step, "parts": {"loss": said}} for step in range(1 if attempt == 2 else 3, 5)]
        (folder / f"rank0-{attempt}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [parts["loss"] for parts in record(tmp_path, 1, True).values()] == ["first", "first", "late", "late"]


# --- bad input


def test_what_cannot_be_repeated_is_refused(by_hand: Callable[..., HandMade], tmp_path: Path) -> None:
    spec = wb.RunSpec(task="clipart-resnet", steps=20).to_json()
    with pytest.raises(ValueError, match="it still runs"):
        wb.recompute(by_hand(spec=spec).alive().path)
    for changes, words in (
        ({"spec": {"kind": "script", "script": "train.py"}}, "this is one of a script"),
        ({"spec": {**spec, "micro_batch": "auto"}}, 'micro_batch="auto"'),
        ({"spec": {**spec, "nnodes": 2}}, "nnodes=2"),
        ({"spec": spec, "layout": {"nproc_per_node": 1}}, "it lost ranks"),
        ({"spec": spec, "experiment": {"kind": "diagnose"}}, "only a training"),
        ({"spec": spec, "cwd": str(tmp_path / "gone")}, "which is gone"),
    ):
        with pytest.raises(ValueError, match=words):
            wb.recompute(by_hand(**changes).ended("finished").path)
    with pytest.raises(ValueError, match="it has recorded no step"):
        wb.recompute(by_hand(spec=spec, cwd=str(tmp_path)).ended("finished").path)


def test_only_recorded_steps_after_a_checkpoint_can_be_repeated(by_hand: Callable[..., HandMade], tmp_path: Path) -> None:
    run = by_hand(cwd=str(tmp_path)).losses(12).ended("finished").path
    (run / run_directory.CHECKPOINTS).mkdir()
    (run / run_directory.CHECKPOINTS / "step00000005.pt").touch()
    for asked, words in (
        ({"since": 3}, "since=3.: it has no such checkpoint; kept are 5, and 0"),
        ({"since": -1}, "since=-1"),
        ({"until": 13}, "until=13"),
        ({"since": 5, "until": 5}, "until=5"),
        ({"timeout": -1}, "timeout=-1"),
    ):
        with pytest.raises((ValueError, LaunchError), match=words):
            wb.recompute(run, **asked)
