"""Steps to a target, by training: real small launches, what an interrupt leaves, and requests that cannot be met."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.batch import steps_to_target
from workbench.batch.analysis.steps_to_target import TRIALS, StepsToTarget
from workbench.batch.analysis.trials import ExperimentPlan, Job, Target, TrialScheduler
from workbench.programs import steps_to_target as reach
from workbench.programs.steps_to_target import Journal, TrialRunner, run_trials
from workbench.runs.spec import SpecError
from workbench.runs.task import Task, TaskError

SPEC = wb.RunSpec(task="fashion-mlp", micro_batch=256, device="cpu", nproc_per_node=2)
"""Two ranks that take trials from one journal."""


@pytest.mark.usefixtures("forked_ranks")
def test_a_law_of_real_trainings(tmp_path: Path) -> None:
    found = wb.steps_to_target(
        SPEC, [64, 512], "sqrt", target_loss=0.7, retune=[1, 2], base_batch=64, budget_s=None, runs_dir=tmp_path, quiet=True
    )
    tuned = found.marks(rule="tuned")
    assert [mark.batch for mark in tuned] == [64, 512]
    assert all(mark.reached and mark.seeds == 2 for mark in tuned)
    assert tuned[0].steps > 1.5 * tuned[1].steps  # fewer steps
    assert tuned[0].samples < tuned[1].samples  # and more samples
    assert [mark.lr for mark in found.marks(rule="sqrt")] == [0.1, pytest.approx(0.1 * 8**0.5, rel=1e-5)]
    assert found.whole
    assert "fashion-mlp · sgd" in str(found)
    (run_dir,) = tmp_path.iterdir()
    again = wb.steps_to_target(run_dir)
    assert again == found
    rows = [json.loads(line) for line in (run_dir / TRIALS).read_text().splitlines()]
    claims = [json.dumps(row, sort_keys=True) for row in rows if row["kind"] == "claim"]
    assert len(claims) == len(set(claims)) == len(found.trials)  # no trial was made twice


INTERRUPTED = """
import signal, sys, threading, time, pathlib, os
import workbench as wb
runs = pathlib.Path(sys.argv[1])
def interrupt():
    while not any('"kind":"trial"' in file.read_text() for file in runs.glob("*/trials.jsonl")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
spec = wb.RunSpec(task="fashion-mlp", micro_batch=256, device="cpu")
print(wb.steps_to_target(spec, [64, 32, 16], "none", target_loss=0.8, base_batch=64, seeds=400, budget_s=None, runs_dir=runs))
"""


def test_an_interrupt_keeps_what_was_learnt(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    (run_dir,) = tmp_path.iterdir()
    assert done.returncode == 0, done.stderr
    assert "cut off after" in done.stdout
    found = StepsToTarget.of(wb.Run.load(run_dir))
    assert found.trials
    assert found.trials[0].outcome == "reached"
    assert f"cut off after {len(found.trials)} of {found.planned} trials" in str(found)
    assert found.planned > 400  # 400 seeds at each batch that has hope, not only the trials that could be begun
    assert wb.Run.load(run_dir).state != "running"


def test_a_batch_above_the_dataset_is_refused_before_any_trial() -> None:
    with pytest.raises(SpecError, match=r"batch 9,000 is above the dataset, which has 64 samples: .*try batches up to 64"):
        runner().check(9000)


def test_only_what_was_learnt_is_said_to_be_kept(tmp_path: Path) -> None:
    def notes() -> list[str]:
        error = RuntimeError("it ended")
        steps_to_target._say_where(error, SimpleNamespace(path=tmp_path))  # type: ignore[arg-type]
        return getattr(error, "__notes__", [])

    assert notes() == []  # refused, before there was a plan
    here = runner()
    target = reach.with_direction(here, Target(name="loss", value=0.5))
    order = ExperimentPlan(
        target=target, batches=(8,), rules=("none",), optimizers=("",), retune=(), seeds=2, base_batch=8, patience=3.0, max_steps=100,
        probe=16, budget_s=None, noise_scale=None, critical_batch=None,
    )  # fmt: skip
    scheduler, journal = TrialScheduler(order, {("", "none", 8): 0.05}), Journal(tmp_path)
    journal.begin(order, [], SPEC, {"": "sgd"})
    job, _ = journal.take(scheduler)
    assert job is not None
    assert notes() == []  # begun only
    journal.add(here.run(job, {"warmup_steps": 0}, target, lambda: 100, 100), scheduler)
    assert notes() == [f'The results so far are kept: wb.steps_to_target("{tmp_path}")']
    assert StepsToTarget.of(tmp_path).target.start == 1.0
    assert "cut off after 1 of 2 trials" in str(StepsToTarget.of(tmp_path))


@pytest.mark.parametrize(("lr", "patience"), [(1e-6, None), (1e-6, 3.0), (0.05, None)])
def test_the_budget_ends_a_trial_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lr: float, patience: float | None) -> None:
    """With 0.05 the first seed reaches the target at once, and the second rate never would; with 1e-6 none does.

    What the budget has cut is not hopeless: no other rate or target is advised.
    """
    calls = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 0.6 * next(calls))
    here = runner()
    order = ExperimentPlan(
        target=Target(name="loss", value=0.5), batches=(8, 16), rules=("none",), optimizers=("", "sgd(lr=1e-9)"), retune=(), seeds=1,
        base_batch=8, patience=patience, max_steps=10**9, probe=16, budget_s=60.0, noise_scale=None, critical_batch=None,
    )  # fmt: skip
    monkeypatch.setattr(reach, "TrialRunner", lambda *_, **__: here)
    run_trials(SPEC.replace(nproc_per_node=1, lr=lr), order, here.task, tmp_path)
    found = StepsToTarget.of(tmp_path)
    if lr == 0.05:
        assert [trial.outcome for trial in found.trials] == ["reached", "reached"]  # what was cut is left out
    else:
        assert [(trial.outcome, trial.steps) for trial in found.trials] == [("cut", None)]  # more than it took
        assert found.trials[0].after > 10
        assert f"the budget ended after {found.trials[0].after} steps, before loss 0.5 was reached" in str(found)
        assert "never reached" not in str(found)
    assert f"cut off after {len(found.trials)} of 4 trials: the results so far; budget_s=None makes all of them" in str(found)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no target": ({}, {}, r"no target was given: one is allowed, target_loss=0\.5"),
    "two targets": ({}, {"target_loss": 1.0, "target": {"accuracy": 0.5}}, "both target_loss and target were given"),
    "two figures": ({}, {"target": {"a": 1, "b": 2}}, "one figure of the task's evaluation is allowed"),
    "no number": ({}, {"target_loss": "low"}, "target loss='low': a number is allowed"),
    "no batches": ({}, {"target_loss": 1.0, "batches": []}, r"batches=\[\]: global batches in samples are allowed"),
    "half a sample": ({}, {"target_loss": 1.0, "batches": [0.5]}, r"batches=\[0\.5\]"),
    "no such rule": ({}, {"target_loss": 1.0, "rules": "cubic"}, "no rule 'cubic'; allowed are 'auto', 'linear'"),
    "a search is no rule": ({}, {"target_loss": 1.0, "rules": ["tuned"]}, "for a search set retune=True"),
    "factors": ({}, {"target_loss": 1.0, "retune": [0.0]}, r"retune=\[0\.0\]: True, or factors above 0"),
    "impatient": ({}, {"target_loss": 1.0, "patience": 0.5}, "patience=0.5: a number above 1"),
    "no seeds": ({}, {"target_loss": 1.0, "seeds": 0}, "seeds=0: a whole number of at least 1"),
    "shared": ({"parallel": "fsdp"}, {"target_loss": 1.0}, "parallel='fsdp': each trial is trained by one rank"),
    "cosine": ({"schedule": "cosine"}, {"target_loss": 1.0}, "schedule='cosine': it depends on the number of steps"),
    "averages": ({"local_sgd": "periodic"}, {"target_loss": 1.0}, 'local_sgd="periodic": each trial is trained by one rank'),
    "auto": ({"micro_batch": "auto"}, {"target_loss": 1.0}, 'micro_batch="auto": steps to a target need a number'),
}


@pytest.mark.parametrize(("knobs", "asked", "said"), CASES.values(), ids=CASES)
def test_what_cannot_be_asked(knobs: dict[str, Any], asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        wb.steps_to_target(SPEC.replace(**knobs), **{"batches": [8, 16], **asked}, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_spec(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run has tried its batches"):
        wb.steps_to_target(tmp_path, [8])
    with pytest.raises(ValueError, match=r"steps_to_target\(Task\): expected a RunSpec"):
        wb.steps_to_target(Task(model=int, dataset=list, loss=max), [8], target_loss=1.0)  # type: ignore[arg-type]


# --- one trial, in this process


class Line(torch.nn.Module):
    """Learns to give back its input; gets a batch's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(len(x))
        return self.weight * x


def runner(spec: wb.RunSpec = SPEC, target: str = "loss", scale: float = 1.0, **fields: Any) -> TrialRunner:
    made = {
        "model": Line,
        "dataset": lambda: [torch.ones(()) for _ in range(64)],
        "loss": lambda model, batch: scale * (model(batch) - batch).square().mean(),
        "optimizer": "sgd(lr=0.05)",
        **fields,
    }
    return TrialRunner(spec.replace(nproc_per_node=1), Task(**made), probe=16, target=target)


def test_a_trial_ends_at_the_crossing() -> None:
    """(1 − w)² falls by the factor (1 − 2 lr)² in each step: 0.81 at 0.05."""
    job = Job(batch=12, rule="none", optimizer="", lr=0.05, seed=0)
    plan = {"warmup_steps": 0}
    here = runner(SPEC.replace(micro_batch=8))
    trial = here.run(job, plan, Target(name="loss", value=0.5, rises=False), lambda: 100, 100)
    assert trial.outcome == "reached"
    assert trial.after == 4  # 0.81, 0.66, 0.53, 0.43
    assert trial.steps == pytest.approx(3 + (0.531441 - 0.5) / (0.531441 - 0.43046721))
    assert trial.best == pytest.approx(0.43046721)
    late = here.run(job, plan, Target(name="loss", value=1e-9, rises=False), lambda: 20, 20)
    assert (late.outcome, late.steps, late.after) == ("capped", None, 20)
    given_up = here.run(job, plan, Target(name="loss", value=1e-9, rises=False), lambda: 10, 20)
    assert (given_up.outcome, given_up.after) == ("stopped", 10)
    gone = here.run(
        Job(batch=12, rule="none", optimizer="", lr=5.0, seed=0), plan, Target(name="loss", value=0.5, rises=False), lambda: 100, 100
    )
    assert gone.outcome == "diverged"
    assert gone.after < 5


@pytest.mark.parametrize("evaluate", [None, lambda model, batch: {"validation_loss": (model(batch) - batch).square()}])
def test_a_figure_of_validation_data_is_a_target(evaluate: Any) -> None:
    """Once for all samples, of which the last batch has fewer: weights 1, 1, 1, 1, 4 of the squared errors."""
    samples = [torch.ones(())] * 4 + [torch.tensor(2.0)]
    here = runner(SPEC.replace(micro_batch=1), target="validation_loss", validation=lambda: samples, evaluate=evaluate)
    assert here.untrained() == pytest.approx(8 / 5)
    plan = {"warmup_steps": 0}
    job = Job(batch=12, rule="none", optimizer="", lr=0.05, seed=0)
    trial = here.run(job, plan, Target(name="validation_loss", value=0.8, rises=False), lambda: 100, 100)
    assert (trial.outcome, trial.after) == ("reached", 4)
    with pytest.raises(SpecError, match="the task's evaluate measures validation_loss"):
        runner(target="accuracy", validation=lambda: samples, evaluate=evaluate).untrained()


def test_micro_batches_are_no_larger_than_the_specs() -> None:
    made: list[Line] = []

    def build() -> Line:
        made.append(Line())
        return made[-1]

    here = runner(SPEC.replace(micro_batch=8), model=build)
    here.run(Job(batch=12, rule="none", optimizer="", lr=0.05, seed=0), {"warmup_steps": 0}, Target(name="loss", value=0.5), lambda: 2, 2)
    assert made[-1].seen == [6] * 4  # 12 = 2 × 6, for 8 does not divide it


def test_what_only_several_ranks_share_is_left_out() -> None:
    spec = SPEC.replace(parallel="zero1", noise_scale=True, micro_batch=8)
    here = TrialRunner(
        spec, Task(model=Line, dataset=lambda: [torch.ones(())] * 8, loss=lambda m, x: (m(x) - x).square().mean()), probe=4, target="loss"
    )
    trainer = here._trainer(Job(batch=8, rule="none", optimizer="", lr=0.02, seed=0), {"warmup_steps": 0})
    assert type(trainer.optimizer) is torch.optim.AdamW


def test_a_rule_may_change_more_than_the_rate() -> None:
    here = runner(optimizer="adam(lr=0.01)")
    trainer = here._trainer(Job(batch=8, rule="adam", optimizer="", lr=0.02, seed=3), {"warmup_steps": 5, "betas": [0.6, 0.9], "eps": 1e-7})
    (group,) = trainer.optimizer.param_groups
    assert (group["betas"], group["eps"], group["initial_lr"]) == ((0.6, 0.9), 1e-7, 0.02)
    assert trainer.lr == pytest.approx(0.02 / 5)
    assert trainer.spec.seed == SPEC.seed + 3
    lone = runner(optimizer="rmsprop(lr=0.01)")._trainer(
        Job(batch=8, rule="adam", optimizer="", lr=0.02, seed=0), {"warmup_steps": 0, "betas": [0.5]}
    )
    assert lone.optimizer.param_groups[0]["alpha"] == 0.5


def test_a_target_is_seen_from_the_untrained_model() -> None:
    assert reach.with_direction(runner(), Target(name="loss", value=0.5)).rises is False
    figures = runner(target="weight", evaluate=lambda model: {"weight": float(model.weight)})
    assert reach.with_direction(figures, Target(name="weight", value=0.5)).rises is True
    assert reach.with_direction(figures, Target(name="weight", value=-0.5)).rises is False
    with pytest.raises(SpecError, match=r"target loss 2: the untrained model has 1, and so reaches it without a step; try a smaller"):
        reach.with_direction(runner(), Target(name="loss", value=2.0))
    with pytest.raises(TaskError, match=r"the loss of the untrained model is nan: nothing can be learnt"):
        reach.with_direction(runner(scale=float("nan")), Target(name="loss", value=0.5))
    with pytest.raises(SpecError, match=r"target 'accuracy': the task's evaluate measures weight"):
        runner(target="accuracy", evaluate=lambda model: {"weight": 0.0}).untrained()
    with pytest.raises(SpecError, match=r"the task has neither evaluate= nor validation="):
        runner(target="accuracy").untrained()
    with pytest.raises(TaskError, match="a generator without length"):
        runner(dataset=lambda: (i for i in range(3)))


def test_a_recipe_has_the_rate_that_belongs_to_it() -> None:
    task = Task(model=Line, dataset=list, loss=max, optimizer="sgd(lr=0.05, momentum=0.9)")
    spec = wb.RunSpec(task="fashion-mlp", lr=0.3)
    assert reach.options_of(spec, task, "")["lr"] == 0.3
    assert reach.options_of(spec, task, "adam")["lr"] == 0.3
    assert reach.options_of(spec, task, "adam(lr=0.01)")["lr"] == 0.01  # its own goes before the spec's
    assert reach.options_of(spec.replace(lr=None), task, "")["momentum"] == 0.9
    assert reach.named(reach.options_of(spec, task, "")) == "sgd(momentum=0.9)"
    assert reach.named({"name": "Mine", "lr": 0.1}) == "Mine"
