"""A training is killed and resumed: whether it ends bit for bit as an undisturbed one, and what differs first if it does not."""

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.conftest import HandMade
from tests.forked import Forks
from workbench.core import run_directory
from workbench.core.progress import Waiting
from workbench.runs.launch import prove_layout_resume, prove_resume
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.prove_resume import Kill, _prepared
from workbench.runs.launch.resume import archive_attempt
from workbench.runs.rows import PARTS, Difference, first_difference
from workbench.train import checkpoint_file
from workbench.train.checkpoints import part_path

TASK = """
import random

import numpy as np
import torch
import workbench as wb

OWN = np.random.default_rng(3)

class Data(torch.utils.data.Dataset):
    def __init__(self, own=False):
        self.own = own

    def __len__(self):
        return 100

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8.0) * (index + 1)) + torch.rand(8) + random.random() + np.random.rand()
        return x + self.own * OWN.random(), x.sum(0, keepdim=True)

class Still(Data):
    def __getitem__(self, index):
        x = torch.sin(torch.arange(8.0) * (index + 1))
        return x, x.sum(0, keepdim=True)

class Net(torch.nn.Sequential):
    calls = None

    def forward(self, x):
        if self.calls is not None:
            self.calls += 1
            x = x * (1 + 0.001 * self.calls)
        return super().forward(x)

def net(calls=None):
    model = Net(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    model.calls = calls
    return model

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def build():
    return wb.Task(model=net, dataset=Data, loss=loss, optimizer="adamw(lr=0.01)")

def plain():
    model = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return wb.Task(model=model, dataset=Still, loss=loss, optimizer="adamw(lr=0.01)")

def dropping():
    return wb.Task(model=net, dataset=Still, loss=loss, optimizer="adamw(lr=0.01)")

def own_generator():
    return wb.Task(model=net, dataset=lambda: Data(own=True), loss=loss, optimizer="adamw(lr=0.01)")

def counting():
    return wb.Task(model=lambda: net(calls=0), dataset=Data, loss=loss, optimizer="adamw(lr=0.01)")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(task: str = "build", **knobs: Any) -> wb.RunSpec:
    return wb.RunSpec(task=f"task.py:{task}", device="cpu", **{"micro_batch": 4, "schedule": "cosine", **knobs})


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")  # new processes: test_random_kills.py
def test_dropout_and_augmentation_of_workers_go_on_exactly(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = set[str]()
    monkeypatch.setattr(Waiting, "say", lambda self, now, known=None: said.add(now))
    knobs = {"nproc_per_node": 2, "num_workers": 1, "accumulation": 2, "precision": "amp_bf16", "persistent_workers": True, "ema": 0.9}
    proof = wb.prove_resume(spec(**knobs), steps=16, kills=1)
    assert proof.exact, proof
    assert (proof.steps, proof.ranks) == (16, 2)
    (kill,) = proof.kills
    assert "the undisturbed training, 0 of 16 steps" in said
    assert f"rank {kill.rank} is killed in step {kill.step} (kill 1 of 1), 0 of 16 steps" in said
    assert any(words.startswith("resumed after kill 1 of 1, ") for words in said)
    assert 3 < kill.step <= 16
    assert kill.resumed_from == (kill.step - 1) // 3 * 3
    assert kill.restart_s > 0
    interrupted = wb.Run.load(proof.interrupted)
    assert interrupted.ok
    assert len(list((interrupted.path / "attempts").iterdir())) == 1
    assert "bit for bit as the undisturbed one" in str(proof)
    assert wb.ResumeProof.from_json(json.loads(json.dumps(proof.to_json()))) == proof


RECIPE: dict[str, Any] = {
    "schedule": "warmup_stable_decay(decay=0.5, end=0.1)", "warmup_steps": 3, "ema": 0.9, "optimizer": "adamw(weight_decay=0.1)",
    "weight_decay_on": "matrices", "gradient_compression": "fp16", "clip_grad_norm": 1.0, "precision": "amp_bf16",
}  # fmt: skip
Prove = Callable[[wb.RunSpec, int], tuple[Path, int, Difference | None]]


@pytest.fixture
def prove(here: Path, by_hand: Callable[..., HandMade], forks: Forks) -> Prove:
    """As `wb.prove_resume` does with one kill, of rank 0, but in forks and without launches.

    A spec and the step of the kill → the run directory of the training that was killed, the step from which it went on, what differs.
    """

    def proved(spec: wb.RunSpec, kill: int) -> tuple[Path, int, Difference | None]:
        every = math.ceil(spec.steps / 6)
        undisturbed, interrupted = (by_hand(spec=spec.replace(checkpoint_every=every).to_json()).path for _ in range(2))
        for path, step in ((undisturbed, None), (interrupted, kill), (interrupted, None)):
            attempt(forks, here, path, step, spec.world_size)
        (again,) = (interrupted / run_directory.FINGERPRINTS).glob("rank0-2*")
        went_on = json.loads(again.read_text().partition("\n")[0])["step"] - 1
        assert 0 < went_on < kill
        return interrupted, went_on, first_difference(undisturbed, interrupted, spec.world_size)

    return proved


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"nproc_per_node": 2, "parallel": "fsdp", "precision": "amp_bf16", "ema": 0.9},
        {"nproc_per_node": 3, "micro_batch": 2, "num_workers": 1, "precision": "amp_fp16"},
        {"nproc_per_node": 2, **RECIPE},
        {"nproc_per_node": 2, **RECIPE, "optimizer": "adafactor", "weight_decay_on": "all"},
        {"nproc_per_node": 2, "gradient_compression": "powersgd(rank=2, start=4)"},
        {"nproc_per_node": 3, "micro_batch": 2, "gradient_compression": "powersgd", "accumulation": 2},
    ],
    ids=["fsdp", "three ranks", "a recipe of many knobs", "adafactor", "powersgd", "powersgd on three ranks"],
)
def test_trainings_of_all_kinds_go_on_exactly(prove: Prove, knobs: dict[str, Any]) -> None:
    """Ranks that share a model; three, which must add their gradients in the same order; averages, schedules, compression."""
    path, _, difference = prove(spec(steps=30, **knobs), 23)  # the first ten steps of fp16 are passed over, until the scale fits
    assert difference is None
    rows = [json.loads(line) for line in next((path / run_directory.FINGERPRINTS).glob("rank0*")).read_text().splitlines()]
    assert all(("ema" in row["parts"]) == ("ema" in knobs) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "part"), [("own_generator", "batch"), ("counting", "loss")])
def test_what_no_checkpoint_has_is_named(prove: Prove, task: str, part: str) -> None:
    _, went_on, difference = prove(spec(task, steps=12), 8)
    assert difference == Difference(step=went_on + 1, rank=0, part=part, kills=1)


LOST: dict[str, Callable[[dict[str, Any]], object]] = {
    "weights": lambda state: state["module"]["0.weight"].add_(0.1),
    "buffers": lambda state: state["module"]["2.running_mean"].zero_(),
    "optimizer": lambda state: state["optimizer"]["state"][0]["exp_avg"].zero_(),
    "schedule": lambda state: state["scheduler"].update(last_epoch=0),
    "scaler": lambda state: state["scaler"].update(_growth_tracker=0),
    "ema": lambda state: state["ema"]["0.weight"].zero_(),
    "samples": lambda state: state["position"].update(consumed=state["position"]["consumed"] + 8),
    "random": lambda state: state["random"].clear(),
}
"""Part → how a checkpoint loses it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knobs", "lost"),
    [
        ({"precision": "amp_fp16", "ema": 0.9}, LOST),
        (
            {"gradient_compression": "powersgd(start=4)"},
            {"compression": lambda part: [error.zero_() for error in part["compression"]["error_dict"].values()]},
        ),
    ],
    ids=["fp16", "powersgd"],
)
def test_each_part_that_a_real_checkpoint_has_lost_is_named(
    here: Path, by_hand: Callable[..., HandMade], forks: Forks, knobs: dict[str, Any], lost: dict[str, Callable[[dict[str, Any]], object]]
) -> None:
    trained = spec("dropping", nproc_per_node=2, steps=24, checkpoint_every=8, **knobs)
    undisturbed, killed = (by_hand(spec=trained.to_json()).path for _ in range(2))
    for path, step in ((undisturbed, None), (killed, 20)):
        attempt(forks, here, path, step)
    found = {}
    for part, lose in {"nothing": lambda content: None, **lost}.items():
        resumed = by_hand(spec=trained.to_json()).path
        shutil.copytree(killed, resumed, dirs_exist_ok=True)
        spoil(resumed / run_directory.CHECKPOINTS / "step00000016.pt", lose)
        attempt(forks, here, resumed, None)
        difference = first_difference(undisturbed, resumed, 2)
        found[part] = difference and (difference.step, difference.part)
    assert found == {"nothing": None, **{part: (17, part) for part in lost}}


def attempt(forks: Forks, here: Path, path: Path, step: int | None, ranks: int = 2) -> None:
    """Train what a run directory says, and kill rank 0 in a step, if one is given."""
    (prints := path / run_directory.FINGERPRINTS).mkdir(exist_ok=True)
    run_directory.write_json(prints / run_directory.KILL, {"step": step, "rank": 0})
    done = forks.train(ranks, here, path)
    assert done.returncode == (-signal.SIGKILL if step else 0), done.stderr
    if step:
        archive_attempt(path)


def spoil(path: Path, lose: Callable[[dict[str, Any]], object]) -> None:
    """Take something out of a checkpoint, or out of the files of its ranks, and make the checksums right."""
    state = torch.load(path, weights_only=True)
    for rank, shard in enumerate(state.get("shards", ())):
        part = torch.load(part_path(path, rank), weights_only=True)
        lose(part)
        shard["crc32"] = checkpoint_file.save(part, part_path(path, rank))
    if not state.get("shards"):
        lose(state)
    checkpoint_file.save(state, path)


# --- what differs first, of fingerprints that are given


def written(path: Path, rank: int, attempt: int, rows: Mapping[int, Mapping[str, str]]) -> None:
    folder = path / run_directory.FINGERPRINTS
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "time": 0.0, "parts": dict(parts)}) for step, parts in rows.items()]
    (folder / f"rank{rank}-{attempt}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def rows(steps: range, **changes: int) -> dict[int, dict[str, str]]:
    """Rows in which parts differ from a step on."""
    return {step: {part: f"{part}{step}{'!' * (step >= changes.get(part, 99))}" for part in PARTS} for step in steps}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, None),
        ({}, {"weights": 6, "loss": 5}, Difference(step=5, rank=1, part="loss", kills=1)),
        ({}, {"gradients": 5, "batch": 5, "loss": 5}, Difference(step=5, rank=1, part="batch", kills=1)),
        ({"random": 3}, {"weights": 5}, Difference(step=3, rank=1, part="random", kills=0)),
    ],
)
def test_the_first_part_of_the_first_step_is_named(
    tmp_path: Path, first: dict[str, int], second: dict[str, int], expected: Difference | None
) -> None:
    before, after = tmp_path / "a", tmp_path / "b"
    for rank in range(2):
        written(before, rank, 1, rows(range(1, 10)))
        written(after, rank, 1, rows(range(1, 7), **(first if rank else {})))
        written(after, rank, 2, rows(range(5, 10), **(second if rank else {})))
    assert first_difference(before, after, ranks=2) == expected


def test_a_row_that_the_undisturbed_training_lacks_is_a_difference(tmp_path: Path) -> None:
    written(tmp_path / "a", 0, 1, rows(range(1, 4)))
    written(tmp_path / "b", 0, 1, rows(range(1, 5)))
    found = first_difference(tmp_path / "a", tmp_path / "b", ranks=1)
    assert found == Difference(step=4, rank=0, part="weights", kills=0)


def proof(difference: Difference | None) -> wb.ResumeProof:
    kills = tuple(Kill(step=step, rank=0, resumed_from=step - 2, restart_s=2.0) for step in (7, 17))
    return wb.ResumeProof(steps=20, ranks=1, kills=kills, difference=difference, undisturbed="a", interrupted="b")


def test_the_verdict_says_what_happened() -> None:
    assert not proof(Difference(step=2, rank=0, part="batch", kills=0)).exact
    assert "Not repeatable: two trainings with the same seed differ" in str(proof(Difference(step=2, rank=0, part="batch", kills=0)))
    assert "the initial weights are not repeatable" in str(proof(Difference(step=1, rank=0, part="weights", kills=0)))
    assert "what was loaded is not what was saved" in str(proof(Difference(step=16, rank=0, part="weights", kills=2)))
    assert "an optimizer with a state beside its state_dict" in str(proof(Difference(step=17, rank=0, part="weights", kills=2)))
    after = proof(Difference(step=16, rank=0, part="samples", kills=2))
    assert "Not exact: killed 2 times in 20 steps on 1 rank" in str(after)
    assert dataclasses.replace(after, checkpoint_every=2).table.title == f"{after.table.title}; a checkpoint every 2 steps"
    assert PARTS["samples"] in str(after)
    assert "first in step 16, on rank 0, after it went on from step 15: the order of the samples" in str(after)
    assert [row[-1] for row in after.table.rows] == ["equal", "differs"]
    for part in ("loss", "batch"):
        assert "hash() of a string or the order of a set of strings" in str(proof(Difference(step=2, rank=0, part=part, kills=0)))
    assert "at the end, on rank 0" in str(proof(Difference(step=21, rank=0, part="optimizer", kills=1)))
    assert [row[-1] for row in proof(Difference(step=6, rank=0, part="loss", kills=1)).table.rows] == ["differs", "not compared"]


# --- bad input


@pytest.mark.parametrize(
    ("given", "knobs", "error", "words"),
    [
        (7, {}, ValueError, "expected a RunSpec"),
        ("build", {"kills": 0}, ValueError, "kills=0"),
        ("build", {"kills": 5, "steps": 6, "checkpoint_every": 3}, ValueError, "a kill needs a checkpoint before it"),
        ("build", {"micro_batch": "auto"}, LaunchError, "give prove_resume"),
        ("build", {"timeout": -1}, LaunchError, "timeout=-1"),
        ("build", {"stepz": 3}, ValueError, "steps"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    here: Path, given: Any, knobs: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wb.prove_resume(spec() if given == "build" else given, **knobs)
    assert not (here / "runs").exists()


# --- resumed in another layout


def printed(spec: wb.RunSpec, steps: range, **changes: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows of fingerprints: a step's samples are 10 × step and the next seven, shared by the ranks that read different ones; losses are
    those of rank 0 and one more on each further reader.
    """
    found = {}
    alike = spec.world_size // spec.data_ranks
    for step in steps:
        for rank in range(spec.world_size):
            own = range(10 * step + rank // alike, 10 * step + 8, spec.data_ranks)
            parts = {part: f"{part} {step}" for part in prove_layout_resume.STATES}
            value = 2.0 + rank // alike - (spec.data_ranks - 1) / 2
            row = {"parts": parts, "samples": str(sum(own)), "value": value}
            found[step, rank] = row | (changes if step == steps[-1] else {})
    return found


ON_TWO, ON_ONE = (wb.RunSpec(task="task.py:build", nproc_per_node=ranks, micro_batch=8 // ranks) for ranks in (2, 1))
SPLIT = wb.RunSpec(task="task.py:build", nproc_per_node=2, micro_batch=8, tensor_parallel=2)


@pytest.mark.parametrize("layout", [{}, {"resumed": {"nproc_per_node": 2, "micro_batch": 4}}], ids=["as it was", "another layout"])
@pytest.mark.usefixtures("here")
def test_a_proof_that_is_interrupted_says_so(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(prove_resume, "start", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^prove_resume was stopped by Ctrl-C before it knew anything"):
        wb.prove_resume(spec(micro_batch=8), steps=12, kills=1, **layout)


@pytest.mark.parametrize("other", [ON_ONE, SPLIT, wb.RunSpec(task="task.py:build", nproc_per_node=4, micro_batch=2, parallel="fsdp")])
def test_samples_and_losses_are_those_of_all_ranks(other: wb.RunSpec) -> None:
    mine = ON_TWO, printed(ON_TWO, range(1, 7))
    find = prove_layout_resume.first_difference
    assert find(mine, (other, printed(other, range(4, 7))), 1e-4) == ("", None, 0)
    part, step, most = find(mine, (other, printed(other, range(4, 7), value=2.1)), 1e-4)
    assert (part, step, most) == ("loss", 6, pytest.approx(0.05))
    assert find(mine, (other, printed(other, range(4, 7), samples="7")), 1e-4)[:2] == ("samples", 6)
    assert find(mine, (other, printed(other, range(4, 5), parts={"schedule": "other"})), 1e-4)[1] == 4
    nothing = find((ON_TWO, printed(ON_TWO, range(4, 7), samples=None)), (other, printed(other, range(4, 7), samples=None)), 1e-4)
    assert nothing == ("", None, 0)  # a stream has no indices


def test_losses_count_as_much_as_the_task_says() -> None:
    """One rank had three times the targets of the other; in the last step one had none, and repeated its loss."""
    mine, its = printed(ON_TWO, range(1, 5)), printed(ON_ONE, range(3, 5))
    for (step, rank), row in mine.items():
        row["count"] = (0.0 if step == 4 else 1.0) if rank else 3.0
    for step, mean in ((3, 1.75), (4, 1.5)):
        its[step, 0] |= {"value": mean, "count": 4.0}
    assert prove_layout_resume.first_difference((ON_TWO, mine), (ON_ONE, its), 1e-4) == ("", None, 0)


def test_a_state_that_is_not_restored_comes_before_what_follows_from_it() -> None:
    mine, its = printed(ON_TWO, range(1, 7)), printed(ON_ONE, range(4, 7))
    its[4, 0]["parts"]["optimizer"] = "lost"
    its[4, 0]["value"] = math.nan
    part, step, most = prove_layout_resume.first_difference((ON_TWO, mine), (ON_ONE, its), 1e-4)
    assert (part, step) == ("optimizer", 4)
    assert math.isnan(most)


def test_a_first_loss_of_the_same_weights_and_samples_is_nearer() -> None:
    mine = ON_TWO, printed(ON_TWO, range(1, 7))
    find = prove_layout_resume.first_difference
    assert find(mine, (ON_ONE, printed(ON_ONE, range(4, 5), value=2.0001)), 1e-4)[0] == "loss"
    assert find(mine, (ON_ONE, printed(ON_ONE, range(4, 6), value=2.0001)), 1e-4)[0] == ""


def judged(other: wb.RunSpec, part: str = "", ema: bool = False, **last: Any) -> wb.LayoutResumeProof:
    """The proof of a training that went on from two ranks as `other`, with these changes in the rows of its last step."""
    mine, its = printed(ON_TWO, range(1, 7), **last), printed(other, range(4, 7), **last)
    for row in (*mine.values(), *its.values()) if not ema else ():
        row["parts"] = {name: value for name, value in row["parts"].items() if name != "ema"}
    compared, left_out = prove_layout_resume.comparable((ON_TWO, mine), (other, its))
    return wb.LayoutResumeProof(
        steps=6, ranks=(2, other.world_size), layout={"nproc_per_node": other.world_size}, killed_in=5, resumed_from=3, restart_s=1.0,
        part=part, step=6 if part else None, losses=1e-7, weights=1e-6, tolerance=1e-4, compared=compared, not_compared=left_out,
        undisturbed="a", resumed="b",
    )  # fmt: skip


def test_what_was_not_compared_is_not_called_the_same() -> None:
    whole = judged(ON_ONE, ema=True)
    states = "weights, buffers, optimizer states, learning-rate schedule, gradient scaler, averaged weights"
    assert f"the training goes on with the same {states} and samples; losses differ by" in whole.verdict
    assert "Not compared" not in whole.verdict
    assert [row[1] for row in whole.table.rows] == ["the same"] * 10

    shared = judged(wb.RunSpec(task="task.py:build", nproc_per_node=4, micro_batch=2, parallel="fsdp"), samples=None)
    killed = "killed in step 5 on 2 ranks and resumed from step 3 with nproc_per_node=4"
    assert f"{killed}, the training goes on with the same learning-rate schedule and gradient scaler; losses" in shared.verdict
    assert (
        "Not compared: weights, buffers and optimizer states right after the resume (ranks share the model or the optimizer); samples "
        "(they have no indices, like those of a stream)."
    ) in shared.verdict
    rows, names = {row[0]: row[1] for row in shared.table.rows}, prove_layout_resume.STATES | prove_layout_resume.OTHERS
    assert all(rows[names[part]] == "not compared" for part in ("weights", "buffers", "optimizer", "samples"))
    assert all(rows[names[part]] == "the same" for part in ("repeatable", "schedule", "scaler", "loss", "final weights"))
    assert names["ema"] not in rows  # the training has none

    loss = judged(SPLIT, part="loss")
    assert [row[1] for row in loss.table.rows][-3:] == ["the same", "differs first", "not compared"]
    assert "Not compared: weights, buffers and optimizer states" in loss.verdict


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"nproc_per_node": 1}, "a step would have 4 samples, and has 8"),
        ({"lr": 0.1}, "expected another value of some of parallel, nproc_per_node"),
        ({"nproc_per_node": 2}, "expected another value"),
        ({}, r"resumed=\{\}: expected another value"),
    ],
)
def test_a_layout_that_does_not_go_on_is_refused(here: Path, layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wb.prove_resume(spec(nproc_per_node=2), steps=12, resumed=layout)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("knobs", "given", "better"),
    [
        ({"steps": 12, "checkpoint_every": 5}, "steps=12 with checkpoint_every=5", 15),
        ({"steps": 12, "checkpoint_every": 20}, "steps=12 with checkpoint_every=20", 40),
        ({"steps": 13}, "steps=13", 18),
        ({"steps": 1}, "steps=1", 12),
    ],
)
def test_steps_without_a_checkpoint_before_the_kill_and_at_the_end_are_refused(
    here: Path, knobs: dict[str, int], given: str, better: int
) -> None:
    on_two, layout = spec(nproc_per_node=2), {"nproc_per_node": 1, "micro_batch": 8}
    with pytest.raises(ValueError, match=f"{given}: a checkpoint before the kill and one at the end are needed; try steps={better}, or"):
        wb.prove_resume(on_two, resumed=layout, **knobs)
    assert not (here / "runs").exists()
    every = knobs.get("checkpoint_every")
    tried = on_two.replace(steps=better, checkpoint_every=every or better // 6)
    assert prove_layout_resume.resumed_spec(tried, layout, every) == tried.replace(**layout)


@pytest.mark.parametrize(
    ("own", "knobs", "every"),
    [
        (4, {}, 4),
        (None, {}, 2),
        (4, {"checkpoint_every": 3}, 3),
        (100, {}, 2),
        (100, {"steps": 60}, 10),
    ],
)
def test_a_specs_own_checkpoints_are_kept_where_they_leave_room_for_kills(own: int | None, knobs: dict[str, Any], every: int) -> None:
    asked = wb.RunSpec(task="text-gpt", steps=10 if own == 4 else 12, checkpoint_every=own)
    assert _prepared(asked, knobs, 2).checkpoint_every == every
    evaluated = asked.replace(evaluate="checkpoint", best="accuracy") if own else asked  # which need checkpoints
    assert _prepared(evaluated, knobs, 2).checkpoint_every == every


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("train.py", {"resumed": {"nproc_per_node": 1}}, r"'train.py', resumed=…\): a script's layout is in its own arguments"),
        ("train.py", {"resumed": {}, "args": ["{out}"], "result": "last.pt"}, "only a RunSpec takes it"),
        ("task.py:build", {"resumed": {"micro_batch": 8}, "args": ["--out", "{out}"]}, "args=…. with a RunSpec: only a script takes it"),
        ("task.py:build", {"resumed": {"micro_batch": 8}, "result": "last.pt"}, "result=…. with a RunSpec"),
    ],
)
def test_what_the_target_does_not_take_is_refused(here: Path, target: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wb.prove_resume(target, **given)
    assert not (here / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "knobs", "layout", "part"),
    [
        ("plain", {"parallel": "fsdp"}, {"nproc_per_node": 1, "micro_batch": 4, "accumulation": 2, "parallel": "ddp"}, ""),
        ("build", {}, {"nproc_per_node": 1, "micro_batch": 8}, "loss"),  # dropout, batch norm
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_trainings_go_on_in_another_layout(here: Path, task: str, knobs: dict[str, Any], layout: dict[str, Any], part: str) -> None:
    proof = wb.prove_resume(spec(task, nproc_per_node=2, **knobs), steps=12, resumed=layout)
    assert isinstance(proof, wb.LayoutResumeProof)
    assert (proof.part, proof.same) == (part, not part), proof
    assert proof.ranks == (2, 1)
    assert 0 < proof.resumed_from < proof.killed_in <= 12
    assert wb.LayoutResumeProof.from_json(json.loads(json.dumps(proof.to_json()))) == proof
    assert ("weights" in proof.compared, "weights" in proof.not_compared) == (task == "build", task == "plain")
    assert ("The same but for rounding" if not part else "dropout and augmentation draw other random numbers") in str(proof)
