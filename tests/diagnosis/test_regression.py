"""what_changed and bisect: what is read from two run directories, what is put back, and real trainings with a planted owner."""

import contextlib
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.drawn import bisected, changed
from workbench.__main__ import main
from workbench.core import run_directory, units
from workbench.core.brief import BRIEF_BYTES
from workbench.core.progress import BudgetError, Waiting
from workbench.core.variables import kept_variables
from workbench.diagnosis import regression, swaps
from workbench.diagnosis.analysis.bisection import Bisection
from workbench.diagnosis.analysis.what_changed import RunDifference, WhatChanged
from workbench.diagnosis.regression import announced
from workbench.diagnosis.rerun import QUICK, Arm, Code, Measured, RerunError, Reruns, measured, step_times, surroundings_of
from workbench.runs.launch import environment, worktrees
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec

TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import Dataset
import workbench as wb

SLOW = 1.0
BALLAST = torch.ones(int(os.environ.get("BALLAST_MIB", "0")) << 18)


class Numbers(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.001 * SLOW * float(os.environ.get("SLOW_FACTOR", "1")))
        return torch.ones(4), torch.zeros(2)


def build():
    return wb.Task(
        model=lambda: nn.Linear(4, 2),
        dataset=Numbers,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer="sgd(lr=0.1)",
    )
"""


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@e", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def made(
    path: Path, spec: Any = None, *, step: float = 0.01, loss: float = 1.0, memory: int = 2**30, waves: float = 0.0, **info: Any
) -> Run:
    """A run directory as a launch leaves it, of forty steps that vary by 2 %, and in waves of ten steps by more."""
    path.mkdir(parents=True)
    spec = spec or RunSpec(task="task.py:build", steps=40)
    about = {"format": run_directory.FORMAT, "id": path.name, "name": path.name, "created": 1.0, "host": "here", "launch_dir": "."}
    about |= {
        "spec": spec.to_json(),
        "cwd": str(path.parent),
        "variables": {"PYTHONPATH": ""},
        "outcome": {"state": "finished", "seconds": 1.0},
    }
    run_directory.write_json(path / run_directory.RUN_JSON, about | info)
    (path / run_directory.LOCK).touch()
    with contextlib.closing(run_directory.LineWriter(path / run_directory.rank_file(0))) as writer:
        writer.write([{"rank": 0, "world_size": 1, "clock": "host", "pid": 1, "device": "cpu"}])
        writer.write(
            {"step": i, "samples": 32, "forward": step * (1 + 0.02 * (i % 3) + waves * (i // 5 % 2)), "memory": memory + 1000 * i}
            for i in range(40)
        )
    with contextlib.closing(run_directory.LineWriter(path / run_directory.METRICS)) as writer:
        writer.write(
            {"step": i + 1, "steps": 40, "loss": loss if i > 10 else 1.0, "lr": 0.1, "samples": 32, "seconds": 1} for i in range(40)
        )
    return Run.load(path)


class Emulated:
    """Trainings that take what a function of their Arm says."""

    def __init__(self, seconds: Any, path: Path) -> None:
        self.seconds, self.path, self.arms = seconds, path, list[Arm]()

    def __call__(self, reruns: Reruns, arm: Arm, name: str) -> tuple[float, Run]:
        self.arms.append(arm)
        reruns.seconds.append(1.0)
        value = self.seconds(arm)
        if value is None:
            raise RerunError("ImportError: no module")
        return value, made(self.path / uuid.uuid4().hex, arm.spec, step=value)


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(seconds: Any) -> Emulated:
        trainings = Emulated(seconds, tmp_path / "reruns")
        monkeypatch.setattr(Reruns, "measure", lambda self, arm, name: trainings(self, arm, name))
        return trainings

    return use


def test_a_variable_among_knobs_is_named_and_each_arm_has_what_it_should(
    tmp_path: Path, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")
    spec = RunSpec(task="clipart-resnet", steps=40)
    a = made(tmp_path / "a", spec, variables={"PYTHONPATH": ""})
    b = made(
        tmp_path / "b",
        spec.replace(num_workers=2, prefetch_factor=4, lr=0.2),
        step=0.014,
        variables={"PYTHONPATH": "", "NCCL_ALGO": "Ring"},
    )
    trainings = emulated(lambda arm: 0.014 if arm.variables.get("NCCL_ALGO") else 0.01)
    result = wb.what_changed(a, b)
    assert (result.kind, result.owner) == ("owner", ("NCCL_ALGO",))
    assert result.changes == ("prefetch_factor, num_workers", "lr", "NCCL_ALGO")
    assert "Run B's step is 1.40× that of run A, and NCCL_ALGO is the reason: today run A's step with it is 1.40× (" in str(result)
    said = "the time per step of a run is the 25 % quantile over its steps after the warm-up, of the slowest rank; the mean, which other "
    mean = "programs disturb more, is 10.2 ms and 14.3 ms, as in workbench check (in compare it is that of all ranks)"
    assert result.notes[-1] == said + mean
    assert result.table.title == "What changed: step (25 % quantile) 10.0 ms in A, 14.0 ms in B"
    assert result.brief()["statistic"] == "25 % quantile"
    assert "10.2 ms" in str(wb.compare(a, b))
    assert "10.2 ms" in str(wb.check_run(a, {"step": "1 s"}))
    assert trainings.arms[0].spec == a.spec
    assert trainings.arms[0].variables["NCCL_PROTO"] is None  # it is set now, and was not then
    assert trainings.arms[1].spec == b.spec
    assert WhatChanged.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert result.to_frame().iloc[0].to_dict() == {"changes": "run A", "value": 0.01, "error": ""}
    assert result.ratio.mid == pytest.approx(1.4, rel=0.01)


def with_steps(path: Path, seconds: Callable[[int], float]) -> Run:
    """A run of 400 steps that take so long each."""
    run = made(path)
    rows = [{"rank": 0, "world_size": 1, "clock": "host", "pid": 1, "device": "cpu"}]
    rows += [{"step": i, "samples": 32, "forward": seconds(i)} for i in range(400)]
    (path / run_directory.rank_file(0)).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run.load(run.path)


def test_load_that_fools_the_mean_does_not_choose_it_and_stalls_do(tmp_path: Path) -> None:
    chance = random.Random(1)

    def steps(usual: float, *, loaded: float = 0.0, stalled: float = 0.0) -> Callable[[int], float]:
        """Other processes make some steps longer by any time; a stall makes every twentieth so."""
        return lambda i: (
            usual * chance.lognormvariate(0, 0.02) + (chance.random() < loaded) * chance.expovariate(1 / 0.012) + stalled * (i % 20 == 0)
        )

    quiet = with_steps(tmp_path / "a", steps(0.0073))
    slower = with_steps(tmp_path / "b", steps(0.0082))
    loaded = with_steps(tmp_path / "c", steps(0.0073, loaded=0.4))
    stalls = with_steps(tmp_path / "d", steps(0.0073, stalled=0.05))
    assert statistics.fmean(step_times(loaded)) > statistics.fmean(step_times(slower)), "the mean says that it became faster"
    assert measured([loaded, slower], "time").part == QUICK
    assert measured([quiet, slower], "time").part == QUICK
    assert measured([quiet, stalls], "time").part is None
    assert measured([stalls, quiet], "time").part is None
    assert measured([loaded, stalls], "time").part is None, "the fastest steps show no change"


def test_a_loader_that_holds_up_every_second_step_is_compared_by_the_mean(tmp_path: Path) -> None:
    """Two workers made the step 2.24 times as fast; the range beside it, of the fastest quarter of the steps, was 6.69 to 8.81."""
    chance = random.Random(1)
    alone = with_steps(tmp_path / "a", lambda i: 0.155 * chance.lognormvariate(0, 0.02))
    for fast, slow in ((0.02, 0.119), (0.035, 0.118)):
        by_turns = with_steps(tmp_path / f"{fast}", lambda i, each=(fast, slow): each[i % 2] * chance.lognormvariate(0, 0.02))
        assert measured([alone, by_turns], "time").part is measured([by_turns, alone], "time").part is None
    found = wb.compare(alone, by_turns)
    assert found.ranges[1] is not None
    assert found.speedup in found.ranges[1]


def test_a_good_commit_that_does_not_run_ends_a_bisection_at_once(tmp_path: Path, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a task that is in no commit."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    for number in range(3):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", f"change {number}")
    trainings = emulated(lambda arm: None)
    result = wb.bisect("task.py:build", good="HEAD~2", budget_s=1e-3)
    assert len(trainings.arms) == 1
    assert (result.kind, result.why) == ("cannot run", "the good commit does not run: ImportError: no module")
    assert "more are" not in str(result)
    assert result.table.rows[0][1:] == ("0", units.MISSING, "does not run: ImportError: no module")


def test_the_options_of_a_script_that_differ_are_named(tmp_path: Path, emulated: Any) -> None:
    script = ScriptSpec(script=str(tmp_path / "train.py"), args=("--lr", "0.1"), watch=True)
    a, b = made(tmp_path / "a", script), made(tmp_path / "b", script.replace(args=("--lr", "0.1", "--slow", "decode")), step=0.09)
    emulated(lambda arm: 0.09 if "--slow" in arm.spec.args else 0.01)
    result = wb.what_changed(a, b)
    assert [(each.name, each.a, each.b) for each in result.differences if each.section == "spec"] == [("--slow", "none", "decode")]
    assert result.owner == ("--slow (none → decode)",)
    assert "Run B's step is 9.00× that of run A, and --slow (none → decode) is the reason" in result.verdict


@pytest.mark.parametrize(
    ("mine", "theirs", "owner"),
    [
        ("--seed 0 --size 1 2", "--seed 1 --size 1 2 --workers 0", "--workers (none → 0)"),
        ("data --workers 2 --seed=0", "data --workers 0 --seed=1", "--workers (2 → 0)"),
        ("--seed 0 --fast", "--seed 1 --workers 0", "--workers (none → 0)"),
        ("--seed 0 data", "--workers 0 --seed 1 more", "--workers (none → 0)"),
        ("--seed 0 data", "data --workers 0 --seed 1", "--seed, argument 1, --workers"),
    ],
)
def test_the_options_of_a_script_are_tried_one_by_one(mine: str, theirs: str, owner: str, tmp_path: Path, emulated: Any) -> None:
    script = ScriptSpec(script=str(tmp_path / "train.py"), args=tuple(mine.split()), watch=True)
    a, b = made(tmp_path / "a", script), made(tmp_path / "b", script.replace(args=tuple(theirs.split())), step=0.02)

    emulated(lambda arm: 0.02 if "--workers 0" in " ".join(arm.spec.args) else 0.01)
    result = wb.what_changed(a, b)
    assert (result.kind, result.owner) == ("owner", (owner,))


def test_equal_runs_of_which_one_was_slow_show_the_machine(tmp_path: Path, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, busy = RunSpec(task="clipart-resnet", steps=40), {"load": 7.0, "MHz": 2400, "boot": "2"}
    a = made(tmp_path / "a", spec, machine={"load": 0.5, "MHz": 3000, "boot": "1"})
    b = made(tmp_path / "b", spec, step=0.013, machine=busy)
    monkeypatch.setattr(Run, "usage", property(lambda run: [{"cpu": 0.75}] if run.path == b.path else []))
    emulated(lambda arm: 0.01)
    recorded = wb.what_changed(a, b, rerun=False)
    assert recorded.notes[-1] == (
        "the machine: when A began, its load was 0.5; while A ran, the busy share of its cores was not recorded; "
        "when B began, its load was 7.0; while B ran, the busy share of its cores was 75 % (each run's own work included)"
    )
    assert "short trainings may (without --recorded" in recorded.verdict
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: a.path.stat().st_uid + 1)
        assert "says no more; another user's runs are not repeated." in wb.what_changed(a, b, rerun=False).verdict
    over = wb.what_changed(a, b)
    assert (over.kind, over.changes) == ("over", ())
    said = "the machine as it was while B ran, or something that was not recorded, such as the imported code, an environment variable that "
    assert f"the reason is {said}only an imported file names, " in over.verdict
    assert "or a file that the code reads: run A is today as it was itself (" in over.verdict
    rows = {each.name: (each.a, each.b) for each in over.differences}
    assert rows["processes that want a core"] == ("0.5", "7")
    assert rows["clock of the cores in MHz"] == ("3000", "2400")
    assert rows["boot"] == ("1", "2")
    emulated(lambda arm: 0.013)
    still = wb.what_changed(a, b)
    assert "and the reason is the machine, or something that was not recorded, such as " in still.verdict
    assert "a file that the code reads: run A is today as run B was (" in still.verdict


def test_what_was_recorded_on_another_load_does_not_hide_what_todays_trainings_show(tmp_path: Path, emulated: Any) -> None:
    spec = RunSpec(task="clipart-resnet", steps=40)
    a, b = made(tmp_path / "a", spec, step=0.458), made(tmp_path / "b", spec.replace(lr=0.2), step=0.317)
    emulated(lambda arm: 0.398 if arm.spec.lr else 0.176)
    result = wb.what_changed(a, b)
    assert (result.kind, result.owner) == ("owner", ("lr",))
    said = "Run B's step is 0.692× that of run A as recorded, but today's alternating trainings on one machine show the contrary: "
    assert result.verdict.startswith(f"{said}run A's step with lr is 2.26× (")
    assert (
        "that without. So lr raises it, and the machine, or something that was not recorded, was different when A or B ran (17"
        in result.verdict
    )
    emulated(lambda arm: 0.176)
    still = wb.what_changed(a, b)
    assert "and the reason is the machine, or something " in still.verdict
    assert ": run A's step is today below that of both (17" in still.verdict
    for of in ("loss", "memory"):
        verdict = dataclasses.replace(result, of=of).verdict
        assert f"So lr raises it in trainings of {result.steps} steps, which may end differently from the recorded ones (" in verdict
        assert "the machine" not in verdict


def test_runs_that_differ_within_their_noise_are_tried_where_something_else_differs(tmp_path: Path, emulated: Any) -> None:
    spec = RunSpec(task="clipart-resnet", steps=40)
    a, b = made(tmp_path / "a", spec, waves=0.05), made(tmp_path / "b", spec.replace(lr=0.3), step=0.0102, waves=0.05)
    trainings = emulated(lambda arm: 0.0105 if arm.spec.lr else 0.01)
    result = wb.what_changed(a, b)
    assert 0 in result.change
    assert (result.kind, result.owner) == ("owner", ("lr",))
    assert re.fullmatch(
        r"What was recorded leaves open whether run B's step is another \(1.02\d× .*\); today's trainings do not, and lr is the reason: "
        r"today run A's step with it is 1.05\d× \(.* that without\.",
        result.verdict,
    )
    emulated(lambda arm: 0.01)
    equal = wb.what_changed(a, b)
    assert equal.kind == "nothing"
    assert "and its step with B's lr is 1.000× (" in equal.verdict
    before = len(trainings.arms)
    assert (
        wb.what_changed(a, b, rerun=False).kind == wb.what_changed(a, made(tmp_path / "c", spec, step=0.0102, waves=0.05)).kind == "nothing"
    )
    assert len(trainings.arms) == before


def test_what_nobody_put_back_is_named_beside_the_machine(tmp_path: Path, emulated: Any) -> None:
    runs = [made(tmp_path / name, RunSpec(task="clipart-resnet"), step=step) for name, step in (("a", 0.01), ("b", 0.02))]
    for run, version in zip(runs, ("1.26", "2.0"), strict=True):
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"versions": {"numpy": version}, "data": {"samples": 5}})
    emulated(lambda arm: 0.02)
    result = wb.what_changed(*runs)
    assert (result.kind, result.left_over) == ("still", ("numpy (1.26 → 2.0)",))
    assert "the reason is numpy (1.26 → 2.0), which could not be put back, or the machine, or something that was not" in result.verdict
    assert main(["what-changed", *(str(run.path) for run in runs)]) == 1  # of several reasons none is named
    with_paths = wb.what_changed(*runs, also={"numpy": ({"PYTHONPATH": "/old"}, {"PYTHONPATH": "/new"})})
    assert with_paths.changes == ("numpy",)
    trainings = emulated(lambda arm: 0.02 if arm.variables["PYTHONPATH"] == "/new" else 0.01)
    assert wb.what_changed(*runs, also={"numpy": ({"PYTHONPATH": "/old"}, {"PYTHONPATH": "/new"})}).owner == ("numpy",)
    assert trainings.arms[0].variables["PYTHONPATH"] == "/old"


def test_memory_and_loss_are_compared_after_as_many_steps_as_show_it(tmp_path: Path, emulated: Any) -> None:
    spec = RunSpec(task="clipart-resnet", steps=40)
    a, b = made(tmp_path / "a", spec), made(tmp_path / "b", spec.replace(lr=0.3), loss=2.0, memory=2**31)
    assert measured((a, b), "loss").steps == 17  # it shows from the twelfth on, and in the mean of five from the fourteenth
    emulated(lambda arm: 2.0 if arm.spec.lr else 1.0)
    loss = wb.what_changed(a, b, of="loss")
    assert (loss.owner, loss.recorded) == (("lr",), (1.0, 2.0))
    assert "Run B's loss after 17 steps is 2.00× that of run A" in loss.verdict
    assert "trainings of 17 steps show the difference between the losses; after 40 steps they are 1 and 2" in loss.notes
    memory = wb.what_changed(a, b, of="memory", rerun=False)
    assert memory.recorded == pytest.approx((2**30, 2**31), rel=1e-4)
    assert (memory.kind, memory.reruns) == ("not run", ())
    assert wb.what_changed(a, made(tmp_path / "c", spec)).kind == "nothing"


def with_losses(path: Path, losses: Callable[[int], float], spec: Any) -> Run:
    """A run of 600 steps with such losses."""
    made(path, spec)
    rows = ({"step": i + 1, "steps": 600, "loss": losses(i), "lr": 0.1, "samples": 32, "seconds": 1} for i in range(600))
    (path / run_directory.METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Run.load(path)


def noisy(seed: int, times: float = 1.0) -> Callable[[int], float]:
    """Losses that fall to 0.5, of batches that vary by 40 %."""
    chance = random.Random(seed)
    noise = [chance.lognormvariate(0, 0.4) for _ in range(600)]
    return lambda i: times * (0.5 + 0.9 * 0.98**i) * noise[i]


def test_a_loss_that_single_batches_explain_is_no_regression(tmp_path: Path, emulated: Any) -> None:
    """Two seeds: the first step at which single batches differ by half as much as the last ones decided, and seed was "the reason"."""
    spec = RunSpec(task="clipart-resnet", steps=600)
    a = with_losses(tmp_path / "a", noisy(1), spec)
    trainings = emulated(lambda arm: 1.0)
    for seed in range(2, 8):
        b = with_losses(tmp_path / f"b{seed}", noisy(seed), spec.replace(seed=seed))
        result = wb.what_changed(a, b, of="loss")
        assert result.steps == 600
        assert result.kind == "nothing"
        assert "and the steps of the runs themselves vary as much (" in result.verdict
    assert not trainings.arms


def test_a_loss_that_batches_do_not_explain_is_compared_where_it_shows(tmp_path: Path, emulated: Any) -> None:
    spec = RunSpec(task="clipart-resnet", steps=600)
    a = with_losses(tmp_path / "a", noisy(1), spec)
    same_batches = with_losses(tmp_path / "b", noisy(1, 1.02), spec.replace(lr=0.2))
    emulated(lambda arm: 1.02 if arm.spec.lr else 1.0)
    result = wb.what_changed(a, same_batches, of="loss")
    assert (result.owner, result.ratio.mid) == (("lr",), pytest.approx(1.02))  # step by step it is sure
    both = with_losses(tmp_path / "c", noisy(3, 1.6), spec.replace(lr=0.2, seed=3))
    emulated(lambda arm: (1.55 if arm.spec.lr else 1.0) * (1.03 if arm.spec.seed else 1.0))
    result = wb.what_changed(a, both, of="loss")
    assert result.owner == ("lr",)
    assert 1.3 < result.ratio.mid < 2
    emulated(lambda arm: 1.6 if arm.spec.seed == 3 else 1.0)
    assert "Another seed gives another loss by chance." in wb.what_changed(a, both, of="loss").verdict


def test_a_loss_is_not_compared_while_it_is_much_further_apart_than_at_the_end(tmp_path: Path) -> None:
    spec = RunSpec(task="clipart-resnet", steps=600)
    a = with_losses(tmp_path / "a", lambda i: 0.7, spec)
    b = with_losses(tmp_path / "b", lambda i: 1.76 + 10 * 0.9**i, spec.replace(lr=0.3))
    result = wb.what_changed(a, b, of="loss", rerun=False)
    assert 1.76 / 0.7 < result.ratio.mid < (1.76 / 0.7) ** 2
    assert result.steps < 100
    assert "after 600 steps they are 0.7 and 1.76" in result.notes[-1]


def test_a_verdict_on_runs_whose_steps_differ_in_size_speaks_of_samples(tmp_path: Path) -> None:
    """A step of B takes 2.4 times as long, and a sample 1.2 times: "Run B's step is 1.20×" was false."""
    a, b = with_steps(tmp_path / "a", lambda i: 0.01 + 1e-5 * (i % 3)), with_steps(tmp_path / "b", lambda i: 0.024 + 1e-5 * (i % 3))
    rows = b.path / run_directory.rank_file(0)
    rows.write_text(rows.read_text().replace('"samples": 32', '"samples": 64'))
    result = wb.what_changed(a, Run.load(b.path), rerun=False)
    assert result.verdict.startswith("Run B's time per sample is 1.20× that of run A")
    assert result.table.title.startswith("What changed: time per sample (")
    assert result.brief()["per"] == "sample"


def test_a_change_that_is_beyond_noise_and_too_small_is_no_noise(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b", memory=2**30 + 400_000)
    verdict = wb.what_changed(a, b, of="memory", rerun=False).verdict
    assert re.search(r"^Nothing to explain: .* that of run A, which is too little to look for a reason \(1.000× \(1 to 1\)\)", verdict)
    pages = made(tmp_path / "pages", RunSpec(task="clipart-resnet", accumulation=8), memory=int(2**30 * 1.002))
    assert "which is too little to look for a reason (1.002×" in wb.what_changed(a, pages, of="memory").verdict


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = made(tmp_path / "a")
    with pytest.raises(ValueError, match="a task beside a script"):
        wb.what_changed(a, made(tmp_path / "s", ScriptSpec(script="/x.py")))
    with pytest.raises(ValueError, match="of='speed': allowed are 'time', 'memory', 'loss'"):
        wb.what_changed(a, a, of="speed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget_s=0"):
        wb.what_changed(a, a, budget_s=0)
    with pytest.raises(ValueError, match="expected the environment variables of run A and of run B"):
        wb.what_changed(a, a, also={"data": "/old"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="has no loss to compare"):
        wb.what_changed(a, made(tmp_path / "n", loss=-1.0), of="loss")


def test_variables_are_kept_where_libraries_or_the_task_read_them_and_secrets_never() -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "y",
        "DATA_DIR": "/d",
        "HOME": "/h",
        "MY_PASSWORD": "z",
        "LD_PRELOAD": "m",
    }
    kept = kept_variables(environ, """os.environ["DATA_DIR"], os.environ["MY_PASSWORD"], os.getenv('WANDB_API_KEY')""")
    assert kept == {"PYTHONPATH": "", "DATA_DIR": "/d", "LD_PRELOAD": "m", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    "name", ["HF_PAT", "TORCH_DSN", "HF_TOKENS", "MINIO_PASS", "HF_COOKIE", "CUDA_AUTH_X", "TORCH_PASSPHRASE", "HF_MYPASSWORD", "TF_APIKEY"]
)
def test_no_name_of_a_secret_is_kept(name: str) -> None:
    assert name not in kept_variables({name: "x"}, f"""os.environ["{name}"]""")


def test_a_password_within_an_address_is_not_kept() -> None:
    kept = kept_variables({"HF_ENDPOINT": "https://me:hidden@host.example/", "HF_HOME": "https://host.example/a:b"}, "")
    assert kept == {"PYTHONPATH": "", "HF_HOME": "https://host.example/a:b"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    top = tmp_path / "repo"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    (top / ".gitignore").write_text("data/\nruns/\n__pycache__/\n")
    (top / "data").mkdir()
    (top / "data" / "x.txt").write_text("kept")
    for number in range(4):
        (top / "task.py").write_text(TASK.replace("SLOW = 1.0", f"SLOW = {2.0 if number >= 2 else 1.0}  # {number}"))
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", f"change {number}")
    return top


def test_a_commit_is_in_a_folder_of_its_own_and_the_checkout_stays(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\ntouch hooked\n")
    hook.chmod(0o755)
    (repository / "task.py").write_text("work in progress")
    before = git(repository, "status", "--porcelain")
    first, *_ = git(repository, "rev-list", "--reverse", "HEAD").split()
    with worktrees.checkout(repository, first) as made:
        assert "SLOW = 1.0  # 0" in (made.folder / "task.py").read_text()
        assert (made.folder / "data" / "x.txt").read_text() == "kept"
        assert made.path(repository / "task.py") == made.folder / "task.py"
        assert made.path(Path("/elsewhere/x.py")) == Path("/elsewhere/x.py")
        monkeypatch.syspath_prepend(str(repository))
        assert made.search_path("/mine").split(os.pathsep) == ["/mine", str(made.folder)]
        folder = made.folder
    assert not folder.parent.exists()
    assert (repository / "data" / "x.txt").read_text() == "kept"
    assert git(repository, "status", "--porcelain") == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not (repository / "hooked").exists()
    assert len(worktrees.commits_between(repository, "HEAD~3", "HEAD")) == 3
    for good, bad, said in (
        ("HEAD", "HEAD~1", "not an ancestor"),
        ("v9", "HEAD", "'v9' is not a commit"),
        ("--all", "HEAD", "is not a commit"),
    ):
        with pytest.raises(worktrees.GitError, match=said):
            worktrees.commits_between(repository, good, bad)


def test_code_is_a_commit_what_is_in_the_folder_or_gone(repository: Path, tmp_path: Path) -> None:
    ids = git(repository, "rev-list", "--reverse", "HEAD").split()

    def run(name: str, state: dict[str, Any], folder: Path = repository) -> Run:
        return made(tmp_path / name, RunSpec(task="task.py:build"), cwd=str(folder), git=state)

    old, new = run("old", {"commit": ids[0], "dirty": False}), run("new", {"commit": ids[3], "dirty": False})
    found = swaps.swaps_of(old, new, {})
    assert found.base.code.commit == ids[0]
    (change,) = found.changes
    assert change.name == "code"
    assert change.code is not None
    assert change.code.commit is None  # it is checked out
    lost = swaps.swaps_of(run("dirty", {"commit": ids[1], "dirty": True, "changes": "0"}), new, {})
    notes = ("code: that of run A cannot be had: it had changes that were not committed, in files that it did not record",)
    assert (lost.changes, lost.notes, lost.code) == ((), notes, ("task.py line 8 (SLOW = 1.0  # 1 → SLOW = 2.0  # 3)",))
    gone = swaps.swaps_of(old, run("gone", {"commit": ids[3], "dirty": False}, tmp_path / "nowhere"), {})
    assert "is gone" in gone.notes[0]
    assert next(each.why_not for each in gone.differences if each.section == "git") in gone.notes[0]


def test_code_that_a_script_imports_is_compared_without_git_too(tmp_path: Path, emulated: Any) -> None:
    spec = ScriptSpec(script=str(tmp_path / "train.py"), watch=True)
    a, b = made(tmp_path / "a", spec), made(tmp_path / "b", spec, step=0.02)
    result = wb.what_changed(a, b, rerun=False)
    assert "code: without git, and since these runs did not record what the script imports, it may have changed" in result.notes
    for run, digest in ((a, "12"), (b, "34")):
        code = {"train.py": "1", "common.py": digest}
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"code": code})
    result = wb.what_changed(a, b, rerun=False)
    assert [(each.name, each.a, each.b) for each in result.differences] == [("common.py", "12", "34")]
    assert "they differ in the code of common.py; what was recorded says no more" in result.verdict
    emulated(lambda arm: 0.02)
    still = wb.what_changed(a, b).verdict
    assert "the reason is the code of common.py (12 → 34), which could not be put back, or the machine, or something that was not " in still
    assert "such as an environment variable that only an imported file names, a package other than torch and numpy, the data or a " in still


def test_an_edit_that_was_reverted_is_named_before_the_machine(repository: Path, tmp_path: Path, emulated: Any) -> None:
    head = git(repository, "rev-parse", "HEAD")
    edited = {"commit": head, "dirty": True, "uncommitted": ["lr.yaml", "task.py"], "changes": "1"}
    a = made(tmp_path / "a", RunSpec(task="task.py:build"), cwd=str(repository), git={"commit": head, "dirty": False})
    b = made(tmp_path / "b", RunSpec(task="task.py:build"), step=0.02, cwd=str(repository), git=edited)
    for run, digest in ((a, "12"), (b, "34")):
        recorded = {"code": {"task.py": digest}, "variables": {}, "versions": {"numpy": "2"}, "data": {"samples": 1}}
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, recorded)
    emulated(lambda arm: 0.01)
    result = wb.what_changed(a, b)
    assert (result.kind, result.left_over) == ("over", ("the code of task.py (12 → 34)", "changes that were not committed (lr.yaml)"))
    assert (
        "the reason is the code of task.py (12 → 34) and changes that were not committed (lr.yaml), which could not be put back, or the "
        "machine as it was while B ran, or something that was not recorded, such as a file that the code reads: run A is today as it was "
    ) in result.verdict
    assert main(["what-changed", str(a.path), str(b.path)]) == 1


def test_a_switch_or_an_interpreter_that_nothing_puts_back_is_named(tmp_path: Path, emulated: Any) -> None:
    runs = [made(tmp_path / name, RunSpec(task="clipart-resnet"), step=step) for name, step in (("a", 0.01), ("b", 0.02))]
    for run, precision, python in zip(runs, ("high", "highest"), (sys.executable, "/gone/python"), strict=True):
        state = {"products of matrices": precision, "host": run.name}
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"environment": state})
        info = run_directory.read_json(run.path / run_directory.RUN_JSON)
        run_directory.write_json(run.path / run_directory.RUN_JSON, info | {"command": [python]})
    emulated(lambda arm: 0.02)
    left = wb.what_changed(*runs).left_over
    assert left == ("products of matrices (high → highest)", f"python ({sys.executable} → /gone/python)"[:200])


def test_a_variable_that_only_an_imported_file_names_is_tried(tmp_path: Path, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "helper.py").write_text('import os\nSLOW = os.environ.get("HELPER_SLOW")\nMORE = os.environ.get("HELPER_MORE")\n')
    monkeypatch.setenv("HELPER_MORE", "1")
    a, b = made(tmp_path / "a"), made(tmp_path / "b", step=0.02)
    for run, kept in ((a, {}), (b, {"HELPER_SLOW": "1"})):
        recorded = {"code": {"deep/helper.py": "12"}, "variables": kept}
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, recorded)
    trainings = emulated(lambda arm: 0.02 if arm.variables.get("HELPER_SLOW") else 0.01)
    assert wb.what_changed(a, b).owner == ("HELPER_SLOW",)
    assert trainings.arms[0].variables["HELPER_MORE"] is None  # it is set now, and was not then
    run_directory.write_json(a.path / run_directory.ENVIRONMENT, {"code": {"deep/helper.py": "12"}})
    earlier = wb.what_changed(a, b)
    assert earlier.changes == ()
    assert "such as an environment variable that only an imported file names, " in earlier.verdict


def test_imported_files_that_cannot_be_read_or_lie_elsewhere_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user ended `what_changed`; and the names come from a run directory, which may be anybody's."""
    for name in ("locked.py", "open.py", "elsewhere.py"):
        (tmp_path / name).write_text(f"import os\nos.environ.get('MY_{name[:-3].upper()}')\n")
        monkeypatch.setenv(f"MY_{name[:-3].upper()}", "1")
    (tmp_path / "project").mkdir()
    for name in ("locked.py", "open.py"):
        (tmp_path / name).rename(tmp_path / "project" / name)
    read = Path.read_bytes

    def reading(path: Path) -> bytes:
        if path.name == "locked.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", reading)
    imported = ("locked.py", "open.py", str(tmp_path / "elsewhere.py"), "../elsewhere.py")
    _, variables, _ = surroundings_of({"cwd": str(tmp_path / "project")}, RunSpec(task="fashion-mlp"), {}, imported)
    assert {name for name in variables if name.startswith("MY_")} == {"MY_OPEN"}


def test_what_is_not_committed_stops_no_experiment_where_it_is_documentation_or_leads_to_data(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (repository / "images").symlink_to(tmp_path / "images")
    git(repository, "add", "images")
    state = environment.git_state(repository)
    assert state is not None
    assert (state["dirty"], state["uncommitted"]) == (True, ["images"])
    git(repository, "commit", "-q", "-m", "data")
    ids = git(repository, "rev-list", "--reverse", "HEAD").split()

    def run(name: str, state: dict[str, Any]) -> Run:
        run = made(tmp_path / name, RunSpec(task="task.py:build"), cwd=str(repository), git=state)
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"code": {"task.py": name}})
        return run

    new = run("new", {"commit": ids[4], "dirty": False})
    found = swaps.swaps_of(run("linked", {"commit": ids[0], "dirty": True, "uncommitted": ["images"]}), new, {})
    assert found.base.code.commit == ids[0]
    assert [change.name for change in found.changes] == ["code"]
    assert found.notes == ("not committed in run A: images",)
    documented = run("documented", {"commit": ids[0], "dirty": True, "uncommitted": ["images", "notebooks/look.ipynb", "README.md"]})
    assert swaps.swaps_of(documented, new, {}).notes == found.notes, "no training reads a notebook"
    assert found.code == ("task.py line 8 (SLOW = 1.0  # 0 → SLOW = 2.0  # 3)", "images")
    with worktrees.checkout(repository, ids[0]) as checkout:
        assert (checkout.folder / "images").is_dir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "task.py").touch()
    (repository / "package").symlink_to(tmp_path / "package")
    (repository / "again").symlink_to("data")
    (repository / "loop").symlink_to("loop")
    (tmp_path / "one.yaml").write_text("lr: 1")
    (repository / "one.yaml").symlink_to(tmp_path / "one.yaml")
    (tmp_path / "train.bin").write_bytes(bytes(8))
    (repository / "train.bin").symlink_to(tmp_path / "train.bin")
    harmless = ["README.md", "docs/usage.txt", "notebooks/look.ipynb", "images", "train.bin"]
    many = [f"{i}.md" for i in range(environment.UNCOMMITTED)]
    for number, (names, named) in enumerate(
        (
            (harmless, ""),
            ([*harmless, "src/task.py"], "src/task.py"),
            (["config.yaml"], "config.yaml"),
            (["conf/train.yaml", "kernel.cu", "requirements.txt"], "conf/train.yaml, kernel.cu, requirements.txt"),
            (links := ["package", "again", "one.yaml", "loop", "photos"], ", ".join(links)),  # code, inside, text, nothing, gone
            (many, "0.md, 1.md, 2.md, 3.md, 4.md and 45 more, perhaps others"),
        )
    ):
        lost = swaps.swaps_of(run(f"edited{number}", {"commit": ids[0], "dirty": True, "uncommitted": names}), new, {})
        said = f"code: that of run A cannot be had: it had changes that were not committed in {named}"
        assert (lost.notes[0] == said, bool(lost.changes)) == (bool(named), not named), (names, lost.notes)
    relinked = swaps.swaps_of(new, run("relinked", {"commit": ids[4], "dirty": True, "uncommitted": ["images"]}), {})
    assert relinked.notes[0].endswith("not committed in images"), "the commit has a link of that name, which leads elsewhere"


def test_bisect_needs_a_repository_and_a_range(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(ValueError, match="is not in a git repository"):
        wb.bisect("task.py:build", good="HEAD~1")
    monkeypatch.chdir(repository)
    with pytest.raises(ValueError, match="are the same commit"):
        wb.bisect("task.py:build", good="HEAD")


def test_bisect_tries_commits_beside_the_good_one(
    repository: Path, monkeypatch: pytest.MonkeyPatch, emulated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository)
    ids = git(repository, "rev-list", "--reverse", "HEAD").split()
    trainings = emulated(lambda arm: 0.02 if ids.index(arm.code.commit) >= 2 else 0.01)
    result = wb.bisect("task.py:build", good="HEAD~3", lr=0.3)
    assert (result.kind, result.first_bad) == ("commit", (ids[2],))
    assert f"The step became 2.00× that of the good commit with {ids[2][:7]} change 2 (1.000× before it, 2.00× with it)." in result.verdict
    assert {arm.spec.lr for arm in trainings.arms} == {0.3}
    assert Bisection.from_json(json.loads(json.dumps(result.to_json()))) == result
    words = ["bisect", "task.py:build", "--good", "HEAD~3", "--set", "lr=0.2", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["first_bad"] == result.brief()["first_bad"]
    assert {arm.spec.lr for arm in trainings.arms} == {0.3, 0.2}
    assert main([*words, "--bad", "HEAD~2"]) == 1, "no commit in between is worse"
    assert json.loads(capsys.readouterr().out)["kind"] != "commit"


def test_a_bisection_that_is_stopped_names_the_commits_that_are_left(
    repository: Path, monkeypatch: pytest.MonkeyPatch, emulated: Any
) -> None:
    monkeypatch.chdir(repository)
    ids = git(repository, "rev-list", "--reverse", "HEAD").split()
    tried = list[str]()

    def some(arm: Arm) -> float:
        tried.append(arm.code.commit or "")
        if ids[2] in tried:
            raise KeyboardInterrupt
        return 0.02 if ids.index(tried[-1]) >= 2 else 0.01

    emulated(some)
    result = wb.bisect("task.py:build", good="HEAD~3")
    assert (result.kind, result.in_doubt) == ("unclear", (ids[2], ids[3]))
    assert f"2 of 3 commits are still in doubt: {ids[2][:10]} to {ids[3][:10]}." in result.verdict
    assert announced(1) == "1 commit: the last is trained alternately with the good one, each several times"


def test_a_search_that_the_budget_ends_says_what_was_not_swapped(tmp_path: Path, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(task="clipart-resnet", steps=40)
    a, b = made(tmp_path / "a", spec), made(tmp_path / "b", spec.replace(lr=0.2, channels_last=True, gc=False), step=0.02)
    now, shown = [0.0], list[str]()
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now[0]))
    monkeypatch.setattr(Waiting, "tick", lambda self: shown.append(self.words(now[0])))

    def takes_ten_seconds(arm: Arm) -> float:
        now[0] += 10
        return 0.02 if arm.spec.lr else 0.01

    emulated(takes_ten_seconds)
    result = wb.what_changed(a, b)
    assert result.kind == "unclear"
    assert len(result.reruns) == 6  # a minute is the default; two of the three still fit beside run A
    assert result.untried == result.changes[2:]
    assert len(result.changes) == 3
    assert "Together they bring it: today run A's step with all 3 differences is 2.00× (" in result.verdict
    assert "Not swapped one by one yet: " in result.verdict
    named = re.search(r"6 trainings, of 10.0 s each; about \d+ more are likely to suffice: budget_s=(\d+), --budget \1$", result.notes[-1])
    assert named, result.notes
    assert shown[0].startswith("what_changed: run A as it was, beside it with 3 differences of run B, ")
    assert any("trainings, with all differences it is 2.00× that of run A" in line for line in shown)
    now[0] = 0.0
    assert wb.what_changed(a, b, budget_s=float(named[1])).owner == ("lr",)
    now[0] = 0.0
    few = wb.what_changed(a, b, budget_s=25)
    assert re.search(r"the budget ended the search after 3 trainings, of 10.0 s each; about \d+ more", few.notes[-1]), few.notes
    assert "not yet clear why: 3 trainings are too few. Together" in few.verdict

    def longer_than_all(arm: Arm) -> float:
        now[0] += 50
        raise BudgetError("A")

    now[0] = 0.0
    emulated(longer_than_all)
    none = wb.what_changed(a, b, budget_s=50)
    assert "the budget ended training 1; a training takes about 50.0 s; about " in none.notes[-1]
    assert "not yet clear why: no training has ended." in none.verdict


def test_what_is_tried_as_one_is_one_row_and_what_was_tried_together_another(repository: Path, tmp_path: Path, emulated: Any) -> None:
    ids = git(repository, "rev-list", "--reverse", "HEAD").split()

    def run(name: str, commit: str, step: float, **knobs: Any) -> Run:
        spec, state = RunSpec(task="task.py:build", steps=40, **knobs), {"commit": commit, "dirty": False}
        run = made(tmp_path / name, spec, step=step, cwd=str(repository), git=state)
        run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"code": {"task.py": commit[:16]}})
        return run

    a, b = run("a", ids[0], 0.01), run("b", ids[2], 0.02, lr=0.2)
    trainings = emulated(lambda arm: 0.02 if arm.code.commit == ids[2] else 0.01)
    result = wb.what_changed(a, b)
    rows = [tuple(row) for row in result.table.rows]
    assert [row[:4] for row in rows] == [
        ("spec", "lr", "–", "0.2"),
        ("code", "commit, task.py", ids[0][:10], ids[2][:10]),
        ("together", "all of the above that can be tried", "", ""),
    ]
    assert [row[4][:6] for row in rows] == ["1.000×", "2.00× ", "2.00× "]
    assert [row[4][-1] for row in rows] == [")", "←", ")"]
    assert len(result.brief()["differs"]) == 2
    assert "With it comes task.py line 8 (SLOW = 1.0  # 0 → SLOW = 2.0  # 2)." in result.verdict
    assert "differs in" not in str(result)

    def interrupted(arm: Arm) -> float:
        if len(trainings.arms) == 3:
            raise KeyboardInterrupt
        return 0.02 if arm.code.commit == ids[2] else 0.01

    trainings = emulated(interrupted)
    few = wb.what_changed(a, b)
    assert [row[4][:15] for row in few.table.rows] == ["not tried alone", "not tried alone", few.table.rows[2][4][:15]]
    assert "the code differs in task.py line 8 (SLOW = 1.0  # 0 → SLOW = 2.0  # 2)" in str(few)
    assert f"2 trainings of {few.steps} steps in" in str(few)


def test_the_lines_that_two_commits_or_the_folder_change_are_said(repository: Path) -> None:
    assert worktrees.changes(repository, "HEAD~3", "HEAD~2") == ["task.py line 8 (SLOW = 1.0  # 0 → SLOW = 1.0  # 1)"]
    assert worktrees.changes(repository, "HEAD~3", "HEAD~2", reverse=True) == ["task.py line 8 (SLOW = 1.0  # 1 → SLOW = 1.0  # 0)"]
    (repository / "a.bin").write_bytes(bytes(range(9)))
    (repository / "new.py").write_text("x = 1\n")
    git(repository, "add", ".")
    text = (repository / "task.py").read_text()
    (repository / "task.py").write_text(text.replace("SLOW = 2.0  # 3\n", ""))
    gone = "task.py line 8 (SLOW = 2.0  # 3 → nothing)"
    assert worktrees.changes(repository, "HEAD") == ["a.bin", "new.py", gone]
    assert worktrees.changes(repository, "HEAD", first=["task.py"]) == [gone, "a.bin", "new.py"]
    (repository / "task.py").write_text(text.replace("SLOW", "FAST"))
    assert worktrees.changes(repository, "HEAD", first=["task.py"])[0] == "task.py (+2 −2 lines)"
    with pytest.raises(worktrees.GitError):
        worktrees.changes(repository, "HEAD~99")


def test_ctrl_c_in_the_first_training_ends_the_search(repository: Path, monkeypatch: pytest.MonkeyPatch, emulated: Any) -> None:
    monkeypatch.chdir(repository)

    def interrupted(arm: Arm) -> float:
        raise KeyboardInterrupt

    trainings = emulated(interrupted)
    result = wb.bisect("task.py:build", good="HEAD~3")
    assert (result.kind, result.notes[0], len(trainings.arms)) == ("unclear", "stopped by Ctrl-C", 1)


def test_the_budget_ends_a_training_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    arm = Arm(ScriptSpec(script=str(tmp_path / "sleeps.py")), Code(tmp_path, tmp_path), {}, None)
    began = time.monotonic()
    with Reruns(Measured(of="time", steps=10), kind="what_changed", runs_dir=None, left=lambda: 0.5) as reruns, pytest.raises(BudgetError):
        reruns.measure(arm, "A")
    assert time.monotonic() - began < 60
    assert len(reruns.seconds) == 1


def test_answers_for_programs_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], emulated: Any
) -> None:
    rows = tuple(RunDifference(section="versions", name=f"package{i}" * 9, a="1" * 60, b="2" * 60, change=str(i)) for i in range(200))
    long = WhatChanged.from_json(changed(tmp_path).to_json() | {"differences": [row.to_json() for row in rows], "notes": ["é" * 999] * 9})
    for result in (long, bisected(tmp_path), changed(tmp_path)):
        assert len(json.dumps(result.brief(), ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert long.brief()["left_out"] > 100
    spec = RunSpec(task="clipart-resnet", steps=40)
    made(tmp_path / "a", spec)
    made(tmp_path / "b", spec.replace(lr=0.2), step=0.014)
    emulated(lambda arm: 0.014 if arm.spec.lr else 0.01)
    assert main(["what-changed", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["owner"] == ["lr"]
    (tmp_path / "limits.toml").write_text('step = "+5 %"')
    words = ["check", str(tmp_path / "b"), "--budgets", str(tmp_path / "limits.toml"), "--against", str(tmp_path / "a")]
    assert main([*words, "--why", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["why"]["owner"] == ["lr"]
    assert main([*words, "--why"]) == 1
    assert "and lr is the reason" in capsys.readouterr().out
    assert regression.BUDGET == 60


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_variable_and_a_commit_own_real_trainings(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping steps of 8 ms against 16: by a variable that only the task names, as is memory; then by the commit that doubles them."""
    monkeypatch.chdir(repository)
    git(repository, "checkout", "-q", "HEAD~2")
    spec = RunSpec(task="task.py:build", micro_batch=8, steps=30)
    a = wb.launch(spec).wait(check=True)
    monkeypatch.setenv("SLOW_FACTOR", "2")
    b = wb.launch(spec).wait(check=True)
    monkeypatch.delenv("SLOW_FACTOR")
    result = wb.what_changed(a, b, budget_s=600)
    assert result.owner == ("SLOW_FACTOR",), result
    monkeypatch.setenv("BALLAST_MIB", "64")
    large = wb.launch(spec.replace(lr=0.2)).wait(check=True)
    monkeypatch.delenv("BALLAST_MIB")
    memory = wb.what_changed(a, large, of="memory", budget_s=600)
    assert (memory.kind, memory.owner) == ("owner", ("BALLAST_MIB",)), memory
    assert memory.recorded[1] - memory.recorded[0] == pytest.approx(64 << 20, rel=0.3)
    git(repository, "checkout", "-q", "main")
    found = wb.bisect("task.py:build", good="HEAD~2", bad="HEAD~1", micro_batch=8, steps=20)
    assert found.first_bad == (git(repository, "rev-parse", "HEAD~1"),), found
    assert git(repository, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        ("train --lr 0.1", "--lr 0.1 train", {}),
        ("--amp --lr 0.1", "--lr 0.1 --amp", {}),
        ("--lr 0.1 --decay 0.2", "--lr 0.2 --decay 0.1", {"--lr": ("0.1", "0.2"), "--decay": ("0.2", "0.1")}),
        ("--train a b --val c d", "--train a d --val c b", {"--train": ("a b", "a d"), "--val": ("c d", "c b")}),
        ("from to", "to from", {"argument 1": ("from", "to"), "argument 2": ("to", "from")}),
    ],
)
def test_options_in_another_order_do_not_differ_but_exchanged_values_do(a: str, b: str, differ: dict[str, tuple[str, str]]) -> None:
    assert swaps.differing_options(a.split(), b.split()) == differ
