"""Sweeps: the order of the plan, what is refused, and real ones: results in order, breakdowns on the way, an interrupt."""

import itertools
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.conftest import processes_with
from workbench.core import run_directory
from workbench.core.progress import Waiting
from workbench.runs.launch import sweep
from workbench.runs.launch.sweep import combinations, plan, run_all
from workbench.runs.spec import SpecError
from workbench.runs.task import TaskError

TASKS = Path(__file__).parents[1] / "scripts" / "tiny_task.py"
SPEC = wb.RunSpec(task=f"{TASKS}:build", device="cpu", micro_batch=4, steps=6)


@pytest.mark.parametrize(
    ("lists", "error", "said"),
    [
        ({}, SpecError, r"a sweep of nothing: give at least one knob a list of values"),
        ({"mikro_batch": [1]}, SpecError, r"no knob 'mikro_batch': did you mean 'micro_batch'\?"),
        ({"micro_batch": 16}, SpecError, r"micro_batch=16: expected a list of values, such as micro_batch=\[4\]"),
        ({"precision": "fp32"}, SpecError, r"precision='fp32': expected a list of values"),
        ({"micro_batch": []}, SpecError, r"micro_batch=\[\]: expected a list of values"),
        ({"micro_batch": [8, 16, 8]}, SpecError, r"micro_batch=\[8, 16, 8\] has a value twice: .* repeat=2"),
        ({"steps": [3], "precision": ["fp32", "fp8"]}, SpecError, r"precision='fp8': allowed are .* \(in steps=3 precision=fp8\)"),
        ({"repeat": 0, "steps": [3]}, SpecError, r"repeat=0: a whole number of at least 1"),
        ({"task": ["text-gpt", "nowhere.py:build"]}, TaskError, r"there is no file .*nowhere\.py"),
    ],
)
def test_refused_before_anything_starts(tmp_path: Path, lists: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        wb.sweep(SPEC, runs_dir=tmp_path / "runs", **lists)
    assert list(tmp_path.iterdir()) == []


def test_there_and_back_again() -> None:
    specs = combinations(SPEC, {"micro_batch": [1, 2], "nproc_per_node": [1, 2]})
    order = [(trial.spec.nproc_per_node, trial.spec.micro_batch) for trial in plan(specs, 2)]
    assert order == [(1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (2, 1), (1, 2), (1, 1)]


@given(
    st.integers(1, 4),
    st.sets(st.integers(1, 4), min_size=1),
    st.sets(st.integers(1, 3), min_size=1),
    st.sets(st.integers(1, 3), min_size=1),
)
def test_every_plan_is_complete_and_fair(repeat: int, batches: set[int], ranks: set[int], threads: set[int]) -> None:
    lists = {"micro_batch": list(batches), "nproc_per_node": list(ranks), "threads": list(threads)}
    specs = combinations(SPEC, lists)
    trials = plan(specs, repeat)
    assert sorted(trial.place for trial in trials) == list(range(len(specs) * repeat))
    for trial in trials:
        assert specs[trial.place // repeat] == (trial.name, trial.spec)
    rounds = [trials[i : i + len(specs)] for i in range(0, len(trials), len(specs))]
    for there, back in itertools.pairwise(rounds):
        assert [trial.spec for trial in there] == [trial.spec for trial in reversed(back)]
    for each in rounds:  # what can share a launch stands together
        changes = sum(a.shared != b.shared for a, b in itertools.pairwise(each))
        assert changes == len(ranks) * len(threads) - 1


@pytest.mark.parametrize("end", ["budget", "Ctrl-C"])
def test_what_has_ended_is_kept_where_the_budget_or_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    now, at = 0.0, 3
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now))

    def one_by_one(trials: list[Any], runs_dir: object, tick: Callable[[], object]) -> Iterator[tuple[Any, Any]]:
        nonlocal now
        for number, trial in enumerate(trials, 1):
            now += 40
            if end == "Ctrl-C" and number == at:
                raise KeyboardInterrupt
            tick()
            yield trial, f"run of {trial.name}"
        now += 40
        tick()

    monkeypatch.setattr(sweep, "in_turn", one_by_one)
    specs = combinations(SPEC, {"micro_batch": [4, 8, 16, 32]})
    done = run_all(specs, "sweep", budget_s=100 if end == "budget" else None)
    assert done == ["run of micro_batch=4", "run of micro_batch=8"]
    why = "the budget ended" if end == "budget" else "stopped by Ctrl-C"
    assert capsys.readouterr().err == f"sweep: {why} after 2 of 4 runs; missing: micro_batch=16, micro_batch=32\n"
    now, at = 0.0, 1
    if end == "budget":
        assert len(run_all(specs, "sweep", budget_s=10)) == 1, "one at least"
        now = 0.0
        assert len(run_all(specs, "sweep", budget_s=None)) == 4
        now = 0.0
        capsys.readouterr()
        assert len(run_all(specs, "sweep", budget_s=170)) == 4, "it ended when all had ended"
        assert capsys.readouterr().err == ""
    else:
        with pytest.raises(KeyboardInterrupt, match="sweep was stopped by Ctrl-C before it knew anything"):
            run_all(specs, "sweep", budget_s=None)


@pytest.mark.usefixtures("forked_ranks")
def test_one_launch_serves_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = wb.sweep(SPEC, runs_dir=tmp_path, repeat=2, micro_batch=[4, 8])
    assert [run.spec.micro_batch for run in runs] == [4, 4, 8, 8]  # type: ignore[union-attr]
    assert [run.state for run in runs] == ["finished"] * 4, [str(run) for run in runs]
    (launch,) = tmp_path.iterdir()
    assert [run.path.relative_to(launch).name for run in runs] == ["000", "003", "001", "002"]
    assert [run.name for run in runs[1:3]] == ["tiny_task-build micro_batch=4", "tiny_task-build micro_batch=8"]
    assert all(run.timelines[0].count > 0 for run in runs)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"[{i + 1}/4] micro_batch={batch}" for i, batch in enumerate((4, 8, 8, 4))]
    assert all("samples/s" in line for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_different_groups_run_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = wb.sweep(SPEC, runs_dir=tmp_path, quiet=True, nproc_per_node=[2, 1])
    assert [(run.state, len(run.timelines)) for run in runs] == [("finished", 2), ("finished", 1)]
    ends = [(run.created, run.created + run.seconds) for run in runs]
    assert ends[0][1] < ends[1][0] + 1
    assert capsys.readouterr().out == ""


def test_a_configuration_that_breaks_the_launch_does_not_take_the_others_along(tmp_path: Path) -> None:
    runs = wb.sweep(SPEC.replace(task=f"{TASKS}:deadly"), runs_dir=tmp_path, quiet=True, micro_batch=[4, 16, 8])
    assert [run.state for run in runs] == ["finished", "failed", "finished"], [str(run) for run in runs]
    assert runs[1].error is not None
    assert (runs[1].error.rank, runs[1].error.kind) == (0, "killed")
    assert Counter(len(list(launch.glob("00?"))) for launch in tmp_path.iterdir()) == {2: 1, 0: 1}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_task_that_does_not_import_fails_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nowhere\n\ndef build():\n    ...\n")
    runs = wb.sweep(SPEC.replace(task=f"{tmp_path / 'broken.py'}:build"), runs_dir=tmp_path / "runs", quiet=True, micro_batch=[4, 8, 16])
    assert [run.state for run in runs] == ["failed"] * 3
    assert {run.error.kind for run in runs if run.error} == {"task"}
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_an_interrupt_stops_everything(tmp_path: Path) -> None:
    code = (
        f"import workbench as wb; wb.sweep(wb.RunSpec.from_json({SPEC.to_json()!r}), runs_dir={str(tmp_path)!r}, steps=[100_000, 100_001])"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("*/000/rank0.jsonl")):
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=30)
    assert "KeyboardInterrupt: sweep was stopped by Ctrl-C before it knew anything" in said
    (launch,) = (wb.Run.load(path) for path in tmp_path.iterdir())
    assert launch.state == "stopped"
    end = time.monotonic() + 5
    while processes_with(run_directory.ENV_RUN_ID, launch.id):
        assert time.monotonic() < end
        time.sleep(0.02)
