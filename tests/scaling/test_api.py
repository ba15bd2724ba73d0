"""Laws of scale from real runs: of the sample task in several widths, of a user's own tasks; what is refused before anything starts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.programs.counting import count_task
from workbench.runs.spec import SpecError
from workbench.runs.task import TaskError, resolve
from workbench.scaling import api
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import PointsError

OWN = Path(__file__).parents[1] / "scripts" / "sized_task.py"
SPEC = wb.RunSpec(task="text-gpt", device="cpu", micro_batch=4, schedule="cosine", warmup_steps=1)
TASKS = [f"{OWN}:{name}" for name in ("small", "medium", "large", "failing")]


@pytest.mark.usefixtures("forked_ranks")
def test_the_sample_task_in_three_widths(tmp_path: Path) -> None:
    law = wb.scaling_law(SPEC, sizes=[8, 16, 24], samples=[8, 16, 32], runs_dir=tmp_path, quiet=True, draws=5)
    assert law.points.sizes == (5760, 13568, 23424)
    assert law.points.amounts == (8 * 64, 16 * 64, 32 * 64)
    assert all(3 < loss < 8 for loss in law.points.loss)  # nats of a byte, hardly trained: log 256 is 5.5
    launches = [path for path in tmp_path.iterdir() if (path / "guard.lock").exists()]
    assert len(launches) == 1, "all runs share one launch"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_own_tasks_one_of_which_fails(tmp_path: Path) -> None:
    spec = SPEC.replace(task=TASKS[0], schedule="constant")
    law = wb.scaling_law(spec, tasks=TASKS, samples=[8, 40, 160], seeds=2, runs_dir=tmp_path, quiet=True, draws=5)
    assert law.points.sizes == (13, 49, 193)
    assert law.points.amounts == (8, 40, 160)
    assert len(law.points) == 18
    notes = " ".join(law.notes)
    assert "data are counted in samples" in notes
    assert "constant learning rate" in notes
    assert "the longest runs see their 64 samples 2.5 times" in notes
    assert "was failed and is left out: " in notes
    assert "this one never trains" in notes
    assert "mean of the training loss over the last 10%" in notes


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({}, SpecError, r"neither of sizes= and tasks= given: give one of them, sizes=\[16, 32, 64\] or tasks="),
        ({"sizes": [8], "tasks": TASKS}, SpecError, r"both of sizes= and tasks= given"),
        ({"sizes": [8, 20]}, SpecError, r"sizes=\[8, 20\]: widths that are multiples of 8"),
        ({"sizes": [8, 8]}, SpecError, r"has one twice: for several runs of each there is seeds=2"),
        ({"tasks": [TASKS[0]] * 2}, SpecError, r"give a list of different names"),
        (
            {"sizes": [8, 16], "samples": [2, 40]},
            SpecError,
            r"samples=\[2, 40\]: .* at least one batch \(4\) is needed, such as \[200, 400, 800\]",
        ),
        ({"sizes": [8, 16], "samples": [40, 41]}, SpecError, r"samples=\[40, 41\] are \[10, 10\] steps of 4: two are the same"),
        ({"sizes": [8, 16], "seeds": 0}, SpecError, r"seeds=0: a whole number"),
        ({"sizes": [8, 16], "samples": [40, 80]}, PointsError, r"4 points were given, and the law"),
        (
            {"sizes": [8, 16], "samples": [100, 200, 400]},
            PointsError,
            r"the parameters of these runs are 5,760, 13,568 \(a factor of 2.4\): 3 or more over a factor of 4 .* try sizes=\[8, 16, 32\]",
        ),
        (
            {"sizes": [8, 16, 32], "samples": [128, 256]},
            PointsError,
            r"the tokens of these runs are 8,192, 16,384 \(a factor of 2\): 3 or more .* try samples=\[128, 256, 512\]",
        ),
        ({"sizes": [8, 16, 32], "samples": [40, 60, 80]}, PointsError, r"the tokens .* \(a factor of 2\)"),
        ({"tasks": [f"{OWN}:tiny"]}, TaskError, r"no function 'tiny'"),
        ({"tasks": [f"{OWN}:broken"]}, TaskError, r"broken\(\) raised OSError: no such checkpoint"),
    ],
)
def test_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    if error is PointsError:  # of counts, which need no process of their own here
        monkeypatch.setattr(api, "count", lambda tasks: {name: count_task(name) for name in tasks})
    with pytest.raises(error, match=said):
        wb.scaling_law(SPEC, runs_dir=tmp_path / "runs", **{"samples": [8, 16, 24, 32, 40], **changes})
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_those_of_the_sample_task(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r'sizes= are those of "text-gpt", and the task is \'clipart-resnet\': name a task for each size'):
        wb.scaling_law(SPEC.replace(task="clipart-resnet"), sizes=[8, 16], samples=[40, 80, 160])


def test_a_sized_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = resolve("workbench.train.sized:gpt_24").model()
    assert sum(weight.numel() for weight in model.parameters()) == 23_424
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.isclose(before[:, 12:16], after[:, 12:16]).all(-1).any()


@pytest.mark.parametrize(
    ("name", "said"), [("gpt_20", r"gpt_20: expected a width that is a multiple of 8, such as gpt_16"), ("mlp_8", r"mlp_8")]
)
def test_sizes_that_there_are_not(name: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        resolve(f"workbench.train.sized:{name}")


def finished(by_hand: Callable[..., HandMade], steps: int, figures: dict[str, float] | None = None) -> wb.Run:
    """A run of 16 samples per step whose training loss at step i is 2/i."""
    made = by_hand(name=f"{steps} steps").losses(steps)
    if figures:
        writer = run_directory.LineWriter(made.path / run_directory.METRICS)
        writer.write([{"step": steps, "steps": steps, **figures}])
        writer.close()
    return wb.Run.load(made.ended("finished").path)


def test_runs_that_were_made_before(by_hand: Callable[..., HandMade]) -> None:
    runs = [finished(by_hand, steps, {"loss": 3.0 / steps, "parameters": n}) for n in (10, 100, 1000) for steps in (4, 8)]
    law = ScalingLaw.from_runs(runs, tokens_per_sample=2, draws=0)
    assert law.points.sizes == (10, 100, 1000)
    assert law.points.amounts == (4 * 32, 8 * 32)
    assert law.points.loss[:2] == (0.75, 0.375)  # the evaluation's loss, not that of the training
    assert len(set(law.points.run)) == 6
    training = ScalingLaw.from_runs(runs, loss="training loss", draws=0)
    assert training.points.loss[0] == 0.5
    given = ScalingLaw.from_runs(runs, parameters=[1, 1, 2, 2, 3, 3], draws=0)
    assert given.points.sizes == (1, 2, 3)


def test_runs_that_do_not_say_what_is_needed(by_hand: Callable[..., HandMade]) -> None:
    runs = [finished(by_hand, steps) for steps in (4, 8, 12)]
    with pytest.raises(PointsError, match=r"how many parameters Run\('4 steps'.*is not known: give parameters=\["):
        ScalingLaw.from_runs(runs)
    with pytest.raises(PointsError, match=r"parameters has 2 numbers for 3 runs"):
        ScalingLaw.from_runs(runs, parameters=[1, 2])
    with pytest.raises(PointsError, match=r"parameters has no entry for the task 'clipart-resnet': it has text-gpt"):
        ScalingLaw.from_runs(runs, parameters={"text-gpt": 1.0})
    with pytest.raises(PointsError, match=r"has no figure 'nats': its evaluation gave none \(evaluate=False\?\)"):
        ScalingLaw.from_runs(runs, parameters=[1, 2, 3], loss="nats")
    with pytest.raises(PointsError, match=r"3 points were given"):
        ScalingLaw.from_runs(runs, parameters=[1, 2, 3])
    several = finished(by_hand, 4, {"train_loss": 1.0, "validation_loss": 2.0})
    with pytest.raises(PointsError, match=r"has several losses, train_loss, validation_loss: choose one with loss="):
        ScalingLaw.from_runs([several], parameters=[1])
    mixed = [finished(by_hand, 4, {"validation_loss": 2.0}), *runs]
    with pytest.raises(PointsError, match=r"the runs report different losses \(training loss, validation_loss\)"):
        ScalingLaw.from_runs(mixed, parameters=[1, 2, 3, 4])
    lost = wb.Run.load(by_hand().losses(3).ended("failed").path)
    with pytest.raises(PointsError, match=r"0 of 1 runs have a loss, and 5 are needed: .* was failed and is left out"):
        ScalingLaw.from_runs([lost], parameters=[1])


def test_a_law_of_the_runs_that_have_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that a fake launch makes, each 10 s long; then the budget is spent, or Ctrl-C comes."""
    now, interrupt_at = [0.0], [99]
    monkeypatch.setattr("workbench.scaling.api.time.monotonic", lambda: now[0])
    monkeypatch.setattr(api, "count", lambda tasks: {name: count_task(name) for name in tasks})

    def launched(trials: Any, folder: Any, tick: Callable[[], object]) -> Iterator[Any]:
        for number, trial in enumerate(trials):
            if number == interrupt_at[0]:
                raise KeyboardInterrupt
            now[0] += 10.0
            tick()
            yield trial, SimpleNamespace(spec=trial.spec, ok=True, seconds=10.0, samples_per_sec=1.0, state="finished")

    got = list[Any]()

    def law_of(runs: Any, notes: Any, **_: object) -> Any:
        got.append((len(runs), notes))
        if len(runs) < 5:
            raise PointsError("too few runs")
        return SimpleNamespace(notes=notes)

    monkeypatch.setattr(api, "in_turn", launched)
    monkeypatch.setattr(api.ScalingLaw, "from_runs", law_of)
    law = wb.scaling_law(SPEC, sizes=[8, 16, 24], samples=[8, 16, 32], budget_s=65)
    assert "the budget of 1 min 05 s was spent after 6 of 9 runs" in law.notes
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("9 trainings, ")
    assert said[0].endswith("steps in all; at most 1 min 05 s")
    assert said[1].endswith("about 1 min 20 s left")
    interrupt_at[0] = 3
    with pytest.raises(PointsError) as raised:
        wb.scaling_law(SPEC, sizes=[8, 16, 24], samples=[8, 16, 32], quiet=True)
    assert raised.value.__notes__ == ["stopped by Ctrl-C after 3 of 9 runs"]
    interrupt_at[0] = 0
    with pytest.raises(KeyboardInterrupt, match="scaling_law was stopped by Ctrl-C before it knew anything"):
        wb.scaling_law(SPEC, sizes=[8, 16, 24], samples=[8, 16, 32], quiet=True)
