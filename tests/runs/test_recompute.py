"""Were the steps of a run computed right? A bit that flips on one rank is found and its rank named, and no healthy run is blamed."""

import copy
import dataclasses
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
from workbench.runs.launch.recompute import Fault, first_fault, judge, record, restart_before, third_place, unrecorded, within
from workbench.runs.restarts import checkpoints_of
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
        if wrong and wrong != "sent":
            Path("flip").unlink()  # once
        if wrong == "weight":
            with torch.no_grad():
                flip(self[0].weight)
        hidden = self[1](self[0](x))
        return self[2](WrongBackward.apply(hidden) if wrong == "gradient" else hidden)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def loss_of_two(model, batch, message=False):
    # that of rank 0 also has what rank 1 computes, of which what is sent may be wrong
    given = model(batch[0])
    sent, model.sent = given.detach().clone(), getattr(model, "sent", 0) + 1
    wrong(model.sent, sent)
    parts = [torch.zeros_like(sent) for _ in range(2)]
    if not message:
        torch.distributed.all_gather(parts, sent)
    elif os.environ["RANK"] == "1":
        torch.distributed.isend(sent, 0).wait()
    else:
        torch.distributed.batch_isend_irecv([torch.distributed.P2POp(torch.distributed.irecv, parts[1], 1)])[0].wait()
    own = (given - batch[1]).square().mean()
    return own if os.environ["RANK"] == "1" else own + 0.1 * (given - parts[1]).square().mean()

class Weighted(torch.autograd.Function):
    # the gradient of rank 0 also has that of rank 1, of which what is sent may be wrong

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        sent = gradient.clone()
        Weighted.calls = getattr(Weighted, "calls", 0) + 1
        wrong(Weighted.calls, sent)
        parts = [torch.zeros_like(sent) for _ in range(2)]
        torch.distributed.all_gather(parts, sent)
        return gradient if os.environ["RANK"] == "1" else gradient + 0.1 * parts[1]

def wrong(calls, sent):
    if calls == STEP and os.environ["RANK"] == "1" and Path("flip").exists() and Path("flip").read_text() == "sent":
        Path("flip").unlink()
        flip(sent)

def loss_in_backward(model, batch):
    return (Weighted.apply(model(batch[0])) - batch[1]).square().mean()

def loss_by_message(model, batch):
    return loss_of_two(model, batch, message=True)

def build_of_two():
    return build(loss_of_two)

def build_in_backward():
    return build(loss_in_backward)

def build_by_message():
    return build(loss_by_message)

def build(loss=loss):
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
        knobs = {"task": "task.py:build", "micro_batch": 4, "steps": 12, "checkpoint_every": 5, "nproc_per_node": 2, **knobs}
        spec = wb.RunSpec(device="cpu", **knobs)
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


class Counting(torch.nn.Sequential):
    """A network whose result depends on how often this process has called it, which no checkpoint restores."""

    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * (1 + self.calls / 64)


def counting() -> torch.nn.Module:
    return Counting(*toy_tasks.network().children())


@pytest.fixture
def made(alone: Ranks, by_hand: Callable[..., HandMade], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Train a task in this process; repetitions are made so, too. With `resumed` the run goes on from its first checkpoint at its end."""

    def make(resumed: bool = False, loss: Any = toy_tasks.squared_error, too_slow: Any = None, **knobs: Any) -> Run:
        task = toy_tasks.numbers(loss=loss, model=knobs.pop("model", toy_tasks.network))

        def trained(spec: wb.RunSpec, old: Run | None = None, begin: int = 0, end: int = 0) -> Run:
            directory = by_hand(spec=spec.to_json(), cwd=str(tmp_path))
            if old and begin == too_slow:
                return Run.load(directory.ended("timeout").path)
            if old:
                recompute.prepare(directory, old, begin, end)  # type: ignore[arg-type]
            if isinstance(loss, Flipping):
                loss.calls = begin
            train(spec, task, alone, directory.path)
            if resumed and not old:
                checkpoints_of(directory.path)[-1].unlink()
                train(spec, task, alone, directory.path)
            return Run.load(directory.ended("finished").path)

        monkeypatch.setattr(recompute, "check", lambda spec: None)
        monkeypatch.setattr(recompute, "_start", lambda old, spec, begin, end, *_: trained(spec, old, begin, end))
        return trained(spec_of(**{"steps": 10, "checkpoint_every": 5, "nproc_per_node": 1, **knobs}))

    return make


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(
    ("loss", "verdict", "repetitions"),
    [
        (Flipping(), "right", 1),
        (Flipping(flips=True), "wrong", 3),
        (Flipping(astray=True), "not repeatable", 2),
    ],
    ids=["healthy", "flips", "astray"],
)
def test_a_flip_is_found_and_no_other_training_is_blamed(
    made: Callable[..., Run], digests: bool, loss: Flipping, verdict: str, repetitions: int
) -> None:
    found = wb.recompute(made(loss=copy.copy(loss), step_digests=digests), until=9)
    assert (found.verdict, len(found.repetitions), found.digests) == (verdict, repetitions, digests), found.explanation
    assert (found.since, found.until, found.right) == (5, 9, {"right": True, "wrong": False}.get(verdict))
    if verdict == "wrong":
        assert (found.fault, found.third) == (Fault(step=7, part="loss", ranks=(0,)), 0)
        assert ("first in step 7, on rank 0, in the loss: the" if digests else "first in step 7, in the loss of rank 0") in str(found)
        assert found.blamed == (0,)
        assert ("taken for granted" in str(found)) == (not digests)
        assert wb.Recomputation.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("knobs", "since", "third", "words"),
    [
        ({}, 5, 0, "from the start agrees with the run: its checkpoints leave something out"),
        ({"step_digests": True}, 5, 0, "from the start agrees with the run: its checkpoints leave something out"),
        ({"checkpoint_every": 3}, 9, 6, "from step 6 differs from all of them: either checkpoints leave something out"),
        ({"resumed": True}, 0, 5, "from step 5 agrees with the run: its checkpoints leave something out"),
        ({"too_slow": 0}, 5, None, "or took longer than timeout= allows"),
    ],
)
def test_a_training_that_does_not_resume_exactly_is_not_blamed(
    made: Callable[..., Run], knobs: dict[str, Any], since: int, third: int | None, words: str
) -> None:
    found = wb.recompute(made(model=counting, **knobs), since=since)
    first = since + 1 if since else 6  # the first step after the run went on
    assert (found.verdict, found.fault) == ("not restored", Fault(step=first, part="loss", ranks=(0,))), found
    assert (found.third, found.like_third, found.right, found.blamed) == (third, "agrees with the run" in words, None, ())
    assert words in str(found)
    assert len(found.repetitions) == (2 if third is None else 3)


def test_repetitions_that_begin_where_the_run_went_on_need_no_third(made: Callable[..., Run]) -> None:
    found = wb.recompute(made(model=counting, resumed=True), since=5)
    assert (found.verdict, len(found.repetitions)) == ("right", 1), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flip", "knobs", "since", "fault"),
    [
        ("gradient", {}, 5, Fault(step=8, part="own gradients", ranks=(1,))),
        ("weight", {}, 0, Fault(step=8, part="loss", ranks=(1,))),
        ("weight", {"parallel": "zero1", "precision": "amp_bf16"}, 0, Fault(step=8, part="loss", ranks=(1,))),
        ("gradient", {"parallel": "fsdp"}, 0, Fault(step=8, part="gradients", ranks=(0,))),  # it has that shard
    ],
)
def test_flips_of_all_kinds_are_found(trained: Trained, flip: str, knobs: dict[str, Any], since: int, fault: Fault) -> None:
    found = wb.recompute(trained(flip, step_digests=True, **knobs), since=since)
    assert (found.verdict, found.fault) == ("wrong", fault), found
    assert (len(found.repetitions), found.third) == ((3, 0) if since else (2, None))
    assert (found.alone, found.blamed) == ((False, ()) if fault.part == "gradients" else (True, fault.ranks))
    if fault.part == "own gradients":
        assert "in step 8, on rank 1, in the gradients of its own samples: the backward" in str(found)
    if fault.part == "gradients":
        assert "in step 8, in the gradients that rank 0 holds: the backward of some rank, or the reduction" in str(found)
    if not knobs:  # the same by losses alone: of a wrong gradient, a step later, on whichever rank's samples it shows
        losses = [within(record(Path(path), 2, False), since, 12) for path in (found.run, *found.repetitions[:2])]
        verdict, seen = judge(*losses, [])
        assert seen is not None
        assert (verdict, seen.step, seen.part) == ("wrong", 9 if flip == "gradient" else 8, "loss")
        assert flip == "gradient" or seen.ranks == (1,)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "part"), [("build_of_two", "loss"), ("build_by_message", "loss"), ("build_in_backward", "own gradients")])
def test_no_rank_is_blamed_where_ranks_exchange_what_they_compute(trained: Trained, task: str, part: str) -> None:
    """Rank 1 sends a wrong number, and it shows on rank 0 alone."""
    found = wb.recompute(trained("sent", task=f"task.py:{task}", step_digests=True), since=0)
    assert (found.verdict, found.fault) == ("wrong", Fault(step=8, part=part, ranks=(0,))), found
    assert (found.alone, found.blamed) == (False, ())
    assert "ranks exchange what they compute there, so which of them was wrong is not known" in str(found)


@pytest.mark.parametrize("how", ["forward", "backward", "message", ""])
def test_a_training_that_exchanges_something_is_noticed(made: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(dist.ProcessGroup, "send", lambda *_: None)  # there is nobody to send to

    def exchanging(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = toy_tasks.squared_error(model, batch)
        if how == "forward":
            dist.all_reduce(batch[0].mean())
        elif how == "message":
            dist.group.WORLD.send([batch[0]], 0, 0)
        elif how == "backward":
            loss.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
        return loss

    receive = vars(dist.ProcessGroup)["recv"]
    found = wb.recompute(made(loss=exchanging))
    assert (found.verdict, found.alone) == ("right", not how), found
    assert vars(dist.ProcessGroup)["recv"] is receive, "the next training of this process receives as before"


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"nproc_per_node": 3}, {"parallel": "fsdp"}])
def test_a_healthy_run_is_not_blamed(trained: Trained, knobs: dict[str, Any]) -> None:
    run = trained(step_digests=True, **knobs)
    for since, begin in ((None, 10), (0, 0)):
        found = wb.recompute(run, since=since)
        assert (found.verdict, found.right, found.fault) == ("right", True, None), found
        assert (found.since, found.until, len(found.repetitions)) == (begin, 12, 1)
        ranks = knobs.get("nproc_per_node", 2)
        losses = [within(record(Path(path), ranks, False), begin, 12) for path in (found.run, *found.repetitions)]
        assert first_fault(*losses) is None
        assert not any(unrecorded(each, begin, 12, [0]) for each in losses)


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
        ({}, {"batch": "x"}, {}, [], "not repeatable", Fault(step=3, part="batch", ranks=(1,))),
        ({"loss": "x"}, {"loss": "y"}, {"loss": "z"}, [], "not repeatable", Fault(step=3, part="loss", ranks=(1,))),
        ({"loss": "x"}, {}, {"loss": "z"}, [], "not repeatable", Fault(step=3, part="loss", ranks=(1,))),
    ],
)
def test_nothing_is_blamed_unless_the_other_two_agree(
    recorded: Any, first: Any, second: Any, conditions: list[str], verdict: str, fault: Fault
) -> None:
    assert judge(steps(**recorded), steps(**first), steps(**second), conditions) == (verdict, fault)


def test_a_third_repetition_begins_earlier_or_where_the_run_went_on() -> None:
    assert third_place(10, [0, 5, 10], 0) == 5
    assert third_place(5, [0, 5, 10], 0) == 0
    assert third_place(0, [0, 5, 10], 5) == 5
    assert third_place(0, [0, 10], 5) is None  # it is not kept
    assert third_place(105, [105, 110], 100) is None  # of a run that went on from another one


def test_processes_began_where_the_run_went_on_last_before_a_step(by_hand: Callable[..., HandMade]) -> None:
    path = by_hand().path
    assert restart_before(path, 3) == 0
    rows: list[dict[str, Any]] = [{"step": step, "checkpoint": f"step{step:08d}.pt"} for step in (5, 20, 15)]
    writer = run_directory.LineWriter(path / run_directory.RESUMES)
    writer.write([*rows, {"step": 17, "ended_by": "SIGTERM"}])
    writer.close()
    assert [restart_before(path, step) for step in (5, 6, 15, 16, 21, 30)] == [0, 5, 5, 15, 15, 15]


def test_a_step_counts_as_recorded_where_all_ranks_have_a_loss() -> None:
    assert unrecorded(steps(), 0, 4, range(2)) is None
    assert unrecorded(steps(), 2, 6, range(2)) == (5, 0)
    assert unrecorded(steps(), 0, 4, range(3)) == (1, 2)
    assert unrecorded({key: parts for key, parts in steps().items() if key != (3, 1)}, 1, 4, range(2)) == (3, 1)
    assert unrecorded({**steps(), (4, 0): {"weights": "w"}}, 3, 4, range(1)) == (4, 0)


FOUND = wb.Recomputation(
    run="runs/a", since=5, until=12, ranks=4, digests=True, alone=True, verdict="wrong", own_gradients=True,
    fault=Fault(step=8, part="loss", ranks=(1,)), conditions=(), third=0, like_third=False, repetitions=("runs/b", "runs/c", "runs/d"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "blamed", "words"),
    [
        ({}, (1,), "on rank 1, in the loss: the forward, or memory. Test that machine"),
        ({"verdict": "wrong now"}, (1,), "in the loss: the forward, or memory. Test that machine"),
        ({"fault": Fault(step=8, part="weights", ranks=(0, 1, 2, 3))}, (), "or memory; ranks exchange what they compute there"),  # zero1
        ({"alone": False}, (), "or memory; ranks exchange what they compute there, so which of them was wrong is not known"),  # pipelines
        ({"fault": Fault(step=8, part="gradients", ranks=(0, 1, 2, 3))}, (), "are the same: the reduction, or a link between the ranks"),
        ({"fault": Fault(step=8, part="gradients", ranks=(1,)), "own_gradients": False}, (), "the backward of some rank, or the reduction"),
        ({"digests": False}, (), "or in one before; with step_digests=True the rank would usually be known. It was not"),
        ({"digests": False, "alone": False}, (), "or in one before. It was not recorded"),
        ({"digests": False, "ranks": 1, "fault": Fault(step=8, part="loss", ranks=(0,))}, (0,), "or in one before. It was not recorded"),
        ({"verdict": "elsewhere", "conditions": ("torch: 2.12 in the run, 2.13 here",)}, (), "or memory. Other conditions: torch"),
        (
            {"verdict": "right", "fault": None},
            (),
            "bit for bit. Earlier steps were not repeated; since= says from which, 0 from the start.",
        ),
        ({"verdict": "not restored"}, (), "a step from 1 to 5 went wrong as well, which recompute(…, since=0) shows."),
        ({"verdict": "not restored", "third": 7}, (), "A repetition from step 7 differs from all of them: checkpoints leave something out"),
    ],
)
def test_a_rank_is_blamed_only_for_what_no_other_rank_can_have_caused(changes: dict[str, Any], blamed: tuple[int, ...], words: str) -> None:
    found = dataclasses.replace(FOUND, **changes)
    assert found.blamed == blamed
    assert words in found.explanation


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
    with pytest.raises(ValueError, match=r"it has recorded no step$"):
        wb.recompute(by_hand(spec=spec, cwd=str(tmp_path)).ended("finished").path)
    linked = by_hand(spec=spec, cwd=str(tmp_path)).ended("finished").path
    (linked / run_directory.CHECKPOINTS).symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="is a symbolic link"):
        wb.recompute(linked)


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


def test_steps_of_which_nothing_is_recorded_are_not_called_right(by_hand: Callable[..., HandMade], tmp_path: Path) -> None:
    path = by_hand(cwd=str(tmp_path)).losses(12).ended("finished").path
    lines = (path / run_directory.METRICS).read_text().splitlines(keepends=True)
    (path / run_directory.METRICS).write_text("".join([*lines[:6], "damaged\n", *lines[7:]]))
    with pytest.raises(ValueError, match="nothing is recorded of step 7 on rank 0: give since= and until= without it"):
        wb.recompute(path)
    folder = path / run_directory.FINGERPRINTS
    folder.mkdir()
    for rank, taken in ((0, range(1, 13)), (1, (1, 2, 3, 5, 6))):
        rows = [json.dumps({"step": step, "parts": {"loss": "x"}}) for step in taken]
        (folder / f"rank{rank}-1.jsonl").write_text("\n".join([*rows, ""]))
    with pytest.raises(ValueError, match="until=7: a whole number from 1 to 6"):  # what both have
        wb.recompute(path, until=7)
    with pytest.raises(ValueError, match="nothing is recorded of step 4 on rank 1"):
        wb.recompute(path)
    (folder / "rank1-1.jsonl").unlink()
    with pytest.raises(ValueError, match="it has recorded no step on all of its ranks"):
        wb.recompute(path)
