"""Is a training repeatable? And in what do two runs differ: versions, git, code, data, outcome."""

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import workbench as wb
from tests import toy_tasks
from tests.hostile import CONTROLS, EVIL, assert_is_text
from tests.played_steps import Clock
from tests.train.test_checkpoints import spec_of, train
from tests.train.test_expert_parallel import MOE
from workbench.core import run_directory
from workbench.harness import ab_test
from workbench.harness.ab_test import CHANGEABLE, MIN_PAIRS, measure_change
from workbench.harness.deterministic import set_deterministic
from workbench.runs.launch import environment, prove_resume
from workbench.runs.rows import digest_rows
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec
from workbench.train.ranks import Ranks
from workbench.train.sample_order import SeededBatches
from workbench.train.trainer import Trainer


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    yield Ranks.join(spec_of())
    set_deterministic(False)
    dist.destroy_process_group()


def made(path: Path, task: wb.Task, alone: Ranks, **knobs: Any) -> Run:
    """A run directory as a launch makes it, trained in this process."""
    path.mkdir(parents=True)
    (path / run_directory.FINGERPRINTS).mkdir()
    spec = spec_of(**{"steps": 6, "checkpoint_every": None, **knobs})
    info = {"format": run_directory.FORMAT, "id": path.name, "name": path.name, "created": time.time(), "host": "h", "launch_dir": "."}
    info |= {"spec": spec.to_json(), "versions": environment.versions(), "git": {"commit": "1", "dirty": False}}
    run_directory.write_json(path / run_directory.RUN_JSON, info | {"outcome": {"state": "finished", "seconds": 1.0}})
    train(spec, task, alone, path)
    return Run.load(path)


class Astray:
    """Draws noise that no seed reaches from its fourth call on."""

    calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        noise = torch.tensor([float(os.urandom(1)[0])]) if self.calls > 3 else torch.zeros(1)
        return toy_tasks.squared_error(model, batch) * (1 + noise)


def test_what_differs_first_is_named(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_resume, "check", lambda spec: None)
    monkeypatch.setattr(prove_resume, "trained", lambda run, timeout: run)

    def proof(loss: Any, folder: Path) -> wb.RepeatProof:
        start = lambda spec, runs_dir, name: made(folder / name, toy_tasks.numbers(loss=loss() if loss is Astray else loss), alone)  # noqa: E731
        monkeypatch.setattr(prove_resume, "start", start)
        return wb.same_twice(spec_of(steps=6, checkpoint_every=None))

    same, other = proof(toy_tasks.noisy_error, tmp_path / "same"), proof(Astray, tmp_path / "other")
    assert same.same
    assert "equal bit for bit" in str(same)
    assert other.difference is not None
    assert (other.difference.step, other.difference.part) == (4, "loss")
    assert "differ first in step 4, on rank 0: the loss" in other.verdict
    assert "try deterministic=True" in other.verdict
    assert dict(other.table.rows)["the content of the batch"] == "equal"
    assert dict(other.table.rows)["the reduced gradients"] == "not compared"
    rows = dict(same.table.rows)
    assert rows["the averaged weights"] == rows["the gradients of the rank's own samples"] == "there are none"
    assert rows["the order of the samples"] == "equal"
    assert "averaged weights" not in same.verdict
    assert same.absent == ("ema", "compression", "own gradients")
    assert same.not_recorded == ()


def test_what_was_not_recorded_is_not_called_equal() -> None:
    proof = wb.RepeatProof(
        steps=4, ranks=2, difference=None, first="a", second="b", not_recorded=("samples", "own gradients"), absent=("ema",)
    )
    rows = dict(proof.table.rows)
    assert rows["the order of the samples"] == rows["the gradients of the rank's own samples"] == "not recorded"
    assert (rows["the averaged weights"], rows["the loss"]) == ("there are none", "equal")
    equal, left_out = proof.verdict.split(". Not recorded, so not compared: ")
    assert "samples" not in equal
    assert "averaged" not in proof.verdict
    assert left_out == "the order of the samples, the gradients of the rank's own samples."
    assert "Not recorded, so not compared" in proof._repr_html_()
    assert proof.brief()["not_recorded"] == ["samples", "own gradients"]
    assert wb.RepeatProof.from_json(proof.to_json()) == proof


NOISY = """
import os
from tests import toy_tasks

def loss(model, batch):
    return toy_tasks.larger_of_two(model, batch) * (1 + os.urandom(1)[0])

def build():
    return toy_tasks.any_knob(loss=loss)

def backward(model, batch):
    loss = toy_tasks.larger_of_two(model, batch)
    loss.register_hook(lambda gradient: gradient * (1 + os.urandom(1)[0]))
    return loss

def in_backward():
    return toy_tasks.any_knob(loss=backward)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "knobs",
    [
        {"parallel": "fsdp", "ema": 0.9},
        {"parallel": "hsdp", "shard_ranks": 2},
        {"parallel": "hsdp", "shard_ranks": 1},
        {"parallel": "zero2"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2, "accumulation": 2},
        {"task": MOE, "expert_parallel": 2},
    ],
    ids=["fsdp", "hsdp", "hsdp of one", "zero2", "tensor", "pipeline", "experts"],
)
def test_trainings_whose_ranks_share_the_model_are_compared(knobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's part of the model is digested; a loss that no seed reaches is found."""
    monkeypatch.chdir(tmp_path)
    spec = wb.RunSpec(**{"task": "tests.toy_tasks:any_knob", "micro_batch": 4, "device": "cpu", "nproc_per_node": 2, **knobs})
    proof = wb.same_twice(spec, steps=4)
    assert proof.same, proof
    rows = digest_rows(Path(proof.second), 1)
    assert set(rows) == {(step, rank) for step in range(1, 6) for rank in range(2)}
    weights, gradients = ([rows[3, rank]["parts"][part] for rank in range(2)] for part in ("weights", "gradients"))
    assert (weights[0] == weights[1]) == (gradients[0] == gradients[1]) == (knobs.get("shard_ranks") == 1)  # whole copies there
    shares = "parallel" in knobs
    assert ("own gradients" in proof.not_recorded) == shares
    assert (dict(proof.table.rows)["the gradients of the rank's own samples"] == "not recorded") == shares
    assert ("ema" in proof.absent) == ("ema" not in knobs)
    if "task" not in knobs:
        (tmp_path / "task.py").write_text(NOISY)
        other = wb.same_twice(spec, task="task.py:build", steps=2)
        assert other.difference is not None
        assert (other.difference.step, other.difference.part) == (1, "loss")
    if shares:
        other = wb.same_twice(spec, task="task.py:in_backward", steps=2)
        assert other.difference is not None
        assert (other.difference.step, other.difference.part) == (1, "gradients")


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="each training could choose another"):
        wb.same_twice(spec_of(micro_batch="auto"))


def test_deterministic_algorithms_come_and_go_with_the_knob(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.get_deterministic_debug_mode()
    plain, strict = (
        Trainer(spec_of(deterministic=on, num_workers=1, checkpoint_every=None), toy_tasks.numbers(), alone) for on in (False, True)
    )
    assert isinstance(strict.loader.dataset, SeededBatches)
    assert not isinstance(plain.loader.dataset, SeededBatches)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    plain.apply_process_settings()  # as where two trainings alternate
    assert torch.get_deterministic_debug_mode() == before
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, False)


def test_its_price_is_measured_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of any other knob of a step: what is in force only on the changed side is paid there only. Only steps move the clock."""
    clock = Clock()
    monkeypatch.setattr(ab_test, "run_ab_test", partial(ab_test.run_ab_test, clock=clock))
    assert CHANGEABLE["deterministic"] == "step"
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        clock.now += 0.004 if torch.are_deterministic_algorithms_enabled() else 0.001
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    times = measure_change(step, [torch.ones(2, 4)] * 8, {"deterministic": True}, budget_s=1000.0)
    assert len(times.pairs) == MIN_PAIRS
    assert times.speedup.mid == pytest.approx(0.25)
    assert times.speedup.width == pytest.approx(0)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_comparison_says_what_differs(alone: Ranks, tmp_path: Path) -> None:
    one = made(tmp_path / "one", toy_tasks.numbers(), alone)
    two = made(tmp_path / "two", toy_tasks.numbers(), alone)
    rows = {(row[0], row[1]): row[2:] for row in wb.compare(one, two).differences.rows}
    assert rows == {}
    assert wb.compare(one, two).differences.note == "nothing that was recorded differs"
    seeded = made(tmp_path / "seeded", toy_tasks.numbers(), alone, seed=5)
    recorded = {(row[0], row[1]) for row in wb.compare(one, seeded).differences.rows}
    assert ("spec", "seed") in recorded
    assert not any(section == "data" for section, _ in recorded)  # the first batch is another one
    three = made(tmp_path / "three", toy_tasks.numbers(dataset=lambda: toy_tasks.Numbers(128), evaluate=None), alone, lr=0.05)
    recorded = run_directory.read_json(three.path / run_directory.ENVIRONMENT)
    assert recorded["versions"]["torch"] == torch.__version__
    recorded["versions"]["numpy"], recorded["code"] = EVIL + CONTROLS, recorded["code"] | {"toy_tasks.py": "0", "by_variable.py": "1"}
    run_directory.write_json(three.path / run_directory.ENVIRONMENT, recorded)
    run_directory.write_json(three.path / run_directory.GIT, {"commit": "2", "dirty": True, "changes": "abc"})
    table = wb.compare(one, three).differences
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    assert table.note == "the first difference: spec, lr"
    assert rows["spec", "lr"] == ["–", "0.05"]
    assert rows["git", "commit"] == ["1", "2"]
    assert rows["code", "toy_tasks.py"][1] == "0"
    assert rows["code", "by_variable.py"] == ["–", "1"]  # what imports it need not differ
    assert rows["data", "samples"] == ["64", "128"]
    assert {("data", "first samples"), ("outcome", "last loss"), ("versions", "numpy"), ("git", "changes")} <= rows.keys()
    assert_is_text(table._repr_html_())


def test_a_package_that_one_run_did_not_import_is_no_difference_of_versions(by_hand: Any) -> None:
    """What a run imports depends on what it happens to do. Torch and cuDNN are there or not, without being imported."""
    runs = []
    for versions in ({"sympy": "1.13", "rich": "13"}, {"mpmath": "1.3", "cudnn": "9", "rich": "14"}, {"sympy": "1.14", "rich": "14"}):
        runs.append(by_hand().steps(20).ended("finished"))
        run_directory.write_json(runs[-1].path / run_directory.ENVIRONMENT, {"versions": {"torch": "2.13", **versions}})
    first, second, third = (run.path for run in runs)
    rows = [row[:4] for row in wb.compare(first, second).differences.rows if row[0] in ("versions", "imports")]
    assert rows == [
        ["versions", "rich", "13", "14"],
        ["versions", "cudnn", "–", "9"],
        ["imports", "not in each run", "sympy", "mpmath"],
    ]
    all_three = {row[1]: row[2:] for row in wb.compare(first, second, third).differences.rows}
    assert all_three["sympy"] == ["1.13", "–", "1.14"]
    assert all_three["not in each run"] == ["–", "mpmath", "–"]
    changed = wb.what_changed(first, second, rerun=False)
    assert {each.name for each in changed.differences if each.section == "versions"} == {"rich", "cudnn"}
    assert "mpmath" not in str(changed)


def launched(by_hand: Any, code: str, seconds: float, loss: float | None = None, samples: int = 8, **info: Any) -> Run:
    """A run of a program with this digest of its code, whose steps take this long."""
    made = by_hand(**info).steps(20, data_wait=0.0, forward=seconds / 2, backward=seconds / 2, optimizer=0.0, other=0.0, samples=samples)
    run_directory.write_json(made.path / run_directory.ENVIRONMENT, {"code": {"train.py": code}})
    if loss is not None:
        with contextlib.closing(run_directory.LineWriter(made.path / run_directory.METRICS)) as writer:
            writer.write([{"step": 20, "steps": 20, "loss": loss, "lr": 0.1, "samples": 1, "seconds": 1.0}])
    return Run.load(made.ended("finished").path)


def test_launches_by_turns_are_compared_before_against_after(by_hand: Any) -> None:
    """Each of four runs was compared with the first, and what the change is worth had to be computed by hand."""
    runs = [
        launched(by_hand, code, seconds, loss)
        for code, seconds, loss in (("a", 0.4, 2.0), ("b", 0.21, 1.0), ("a", 0.44, 2.2), ("b", 0.2, 1.1))
    ]
    found = wb.compare(*runs)
    assert found.groups == ((runs[0], runs[2]), (runs[1], runs[3]))
    assert found.labels == ["by-hand (1, 3)", "by-hand (2, 4)"]
    span = found.ranges[1]
    assert span is not None
    assert found.speedup == pytest.approx(((0.4 * 0.44) / (0.21 * 0.2)) ** 0.5)
    assert span.low < found.speedup < span.high
    assert span.low == pytest.approx(found.speedup**2 / span.high)
    assert found.within_noise == [None, False]
    assert found.seconds() == pytest.approx([0.42, 0.205])
    rows = [dict(zip(found.table.columns, row, strict=True)) for row in found.table.rows]
    assert rows[1]["speedup"] == "2.05×"
    assert [row["last loss"] for row in rows] == ["2.1 (2 … 2.2)", "1.05 (1 … 1.1)"]
    assert rows[0]["throughput"] == "19.1 samples/s (18.2 … 20.0)"
    assert "launches that differ in nothing that was recorded share a row" in str(found)
    assert [fact["runs"] for fact in found.facts()] == [[str(run.path) for run in group] for group in found.groups]
    assert list(found.to_frame()["speedup"]) == pytest.approx([1.0, found.speedup])
    assert len(found.differences.columns) == 6  # all runs


def test_the_range_of_repeated_launches_comes_from_how_the_launches_differ(by_hand: Any) -> None:
    """Steps of one launch may vary little, and another launch be 20 % slower."""
    before, after = [0.40, 0.48, 0.41], [0.37, 0.45, 0.39]
    found = wb.compare(
        *[launched(by_hand, code, each) for pair in zip(before, after, strict=True) for code, each in zip("ab", pair, strict=True)]
    )
    assert found.within_noise == [None, True]
    assert "within noise" in found.table.rows[1][6]
    one_after = wb.compare(*(launched(by_hand, "a", each) for each in before), launched(by_hand, "b", 0.1))
    assert one_after.within_noise == [None, False]
    assert one_after.labels == ["by-hand (1, 2, 3)", "by-hand (4)"]


def test_launches_whose_steps_have_other_sizes_are_compared_by_sample(by_hand: Any) -> None:
    small, large = (
        [launched(by_hand, code, seconds, samples=samples) for seconds in (0.1, 0.11)] for code, samples in (("a", 8), ("b", 32))
    )
    assert wb.compare(small, large).speedup == pytest.approx(4)
    unknown = launched(by_hand, "b", 0.1, samples=0)
    assert wb.compare(small, [*large, unknown]).speedup == pytest.approx(1, abs=0.1)


def test_what_counts_as_a_repeat(by_hand: Any) -> None:
    first = launched(by_hand, "a", 0.4)

    def groups(*others: Run) -> list[int]:
        return [len(group) for group in wb.compare(first, *others).groups]

    same, other = launched(by_hand, "a", 0.4, machine={"boot": "later"}), launched(by_hand, "b", 0.4)
    assert groups(other, same) == [2, 1]
    assert groups(other, launched(by_hand, "a", 0.4, host="elsewhere")) == [1, 1, 1]
    assert groups(other, first) == [1, 1, 1], "a run does not repeat itself"
    said = "the runs differ in code (train.py): the table .differences, or --differences in a terminal, has the values"
    alike = wb.compare(first, same, launched(by_hand, "a", 0.4))
    assert [len(group) for group in alike.groups] == [1, 1, 1], "with nothing to compare them with, each is a row"
    (note,) = alike.notes
    assert note.startswith("nothing that was recorded differs between these runs, so none counts as a repeat of another")
    third = launched(by_hand, "c", 0.4)
    differ, note = wb.compare(first, other, third).notes
    assert differ == said
    assert note.startswith("no two of these runs are alike in all that was recorded")
    assert wb.compare(first, other).notes == [said]
    assert wb.compare(first, same).notes == []
    with pytest.raises(ValueError, match="twice in a list: expected different launches of one program"):
        wb.compare([first, first], [third])
    assert [len(group) for group in wb.compare([first], [other], [third]).groups] == [1, 1, 1], "lists are not grouped anew"
    by_list = wb.compare([first, other], [third, same])
    assert by_list.table.rows[0][4] == "20.0 samples/s", "the ends of a range that read the same are left out"
    assert by_list.groups == ((first, other), (third, same))
    assert by_list.labels == ["by-hand (1, 2)", "by-hand (3, 4)"]


def test_a_comparison_names_what_differs_beside_the_knobs(by_hand: Any) -> None:
    """It showed times and losses of runs on other data, and only `.differences` said so."""

    def trained(samples: int, threads: int = 1, lr: float | None = None) -> Run:
        made = by_hand(spec=RunSpec(task="t.py:build", threads=threads, lr=lr).to_json(), variables={"N_SAMPLES": str(samples)}).steps(20)
        recorded = {"environment": {"threads": threads, "OMP_NUM_THREADS": str(threads)}, "data": {"samples": samples}}
        run_directory.write_json(made.path / run_directory.ENVIRONMENT, recorded)
        return Run.load(made.ended("finished").path)

    whole, less = trained(80), trained(64)
    found = wb.compare(whole, less)
    assert found.notes[0].startswith("the runs differ in variables (N_SAMPLES), data (samples): the table .differences")
    assert found.notes[0] in str(found)
    assert wb.compare(whole, trained(80, threads=2)).notes == [], "the recorded number of threads differs because the knob does"
    both = wb.compare(whole, trained(64, lr=0.1))
    assert both.notes[0].startswith("the runs also differ in variables (N_SAMPLES), data (samples): ")
    three = wb.compare(whole, trained(80, lr=0.1), less)
    assert three.labels == ["lr=the task's own (1)", "lr=0.1", "lr=the task's own (3)"], "two with one spec had the same label"
    assert three.notes[0].startswith("the runs also differ in variables (N_SAMPLES), data (samples): ")
    unknown = Run.load(by_hand(spec=RunSpec(task="t.py:build").to_json(), variables={"N_SAMPLES": "80"}).steps(20).ended("finished").path)
    assert wb.compare(whole, unknown).notes == [], "what one of the runs did not record says nothing"
    paths = []
    for name, shared in (("t", "1"), ("u", "2")):
        paths.append(by_hand(spec=RunSpec(task=f"{name}.py:build").to_json()).steps(20).ended("finished").path)
        recorded = {"code": {f"{name}.py": name, "net.py": shared}, "data": {"type": f"{name}.Numbers", "samples": 80}}
        run_directory.write_json(paths[-1] / run_directory.ENVIRONMENT, recorded)
    assert wb.compare(*paths).notes[0].startswith("the runs also differ in code (net.py): "), "each task has a file of its own"
    groups = wb.compare([whole, less], [trained(80, lr=0.1), trained(64, lr=0.1)])
    assert groups.notes == [], "the first launches of the groups have the same data"


def test_the_state_of_a_folder_in_git(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        environment.subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e", *words], check=True, capture_output=True
        )

    assert environment.git_state(tmp_path / "nowhere") is None
    git("init", "-b", "trunk")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-m", "first")
    clean = environment.git_state(tmp_path)
    (tmp_path / "a.py").write_text("2")
    changed = environment.git_state(tmp_path)
    assert clean is not None
    assert changed is not None
    assert (clean["branch"], clean["dirty"], changed["dirty"]) == ("trunk", False, True)
    assert "changes" not in clean
    assert len(changed["changes"]) == 16
