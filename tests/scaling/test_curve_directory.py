"""Curves that are measured: what is refused before anything starts, what a directory knows, and real ones that are interrupted and gone on
with.
"""

import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.runs.failure import RunError
from workbench.runs.launch.environment import versions
from workbench.runs.spec import SpecError
from workbench.runs.task import TaskError
from workbench.scaling.analysis.curve.point import CurveError
from workbench.scaling.api import crowded, missing_trials
from workbench.scaling.curve_directory import CurveDirectory, CurveSpec, Steps, exposed, in_launches, validate

TASKS = Path(__file__).parents[1] / "scripts" / "tiny_task.py"
SPEC = wb.RunSpec(task=f"{TASKS}:build", device="cpu", micro_batch=8, steps=12)
USUAL: dict[str, Any] = {"over": "nproc_per_node", "values": (1, 2), "kind": "weak", "repeat": 2, "communication": False}
Made = Callable[..., HandMade]


def curve_spec(spec: wb.RunSpec = SPEC, **options: Any) -> CurveSpec:
    return validate(spec, **USUAL | options)


# --- what is asked for


@given(st.integers(1, 64), st.integers(1, 4), st.lists(st.integers(1, 16), min_size=1, unique=True))
def test_strong_scaling_keeps_the_global_batch_or_is_refused(micro_batch: int, accumulation: int, values: list[int]) -> None:
    spec = SPEC.replace(micro_batch=micro_batch, accumulation=accumulation)
    divides = [micro_batch * accumulation % (accumulation * n) == 0 for n in values]
    if all(divides):
        points = curve_spec(spec, kind="strong", values=values).points
        assert {each.global_batch for _, each in points} == {spec.global_batch}
        assert [each.nproc_per_node for _, each in points] == values
    else:
        with pytest.raises(CurveError, match=rf"{values[divides.index(False)]} processes cannot share a global batch"):
            curve_spec(spec, kind="strong", values=values)


def test_numbers_that_divide_a_batch_are_named() -> None:
    with pytest.raises(CurveError, match=r"global batch of 12 evenly \(5 data ranks\): .* are 1, 2, 3, 4, 6; .* micro_batch, such as 15"):
        curve_spec(SPEC.replace(micro_batch=12), kind="strong", values=(1, 5))


def test_weak_scaling_turns_one_knob_only() -> None:
    points = curve_spec(over="precision", values=("fp32", "amp_bf16")).points
    assert [words for words, _ in points] == ["precision=fp32", "precision=amp_bf16"]
    assert SPEC.changes(points[1][1]) == {"precision": ("fp32", "amp_bf16")}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"over": "processes"}, SpecError, r"no knob 'processes'"),
        ({"kind": "both"}, CurveError, r"kind='both': allowed are \"weak\" \(each process keeps"),
        ({"kind": "strong", "over": "threads"}, CurveError, r"over threads: it is processes that share a batch"),
        ({"values": 4}, CurveError, r"values=4: give a list of values for nproc_per_node"),
        ({"values": ()}, CurveError, r"values=\(\): give a list"),
        ({"values": (1, 2, 1)}, CurveError, r"has one twice: .* repeat=3"),
        ({"values": (1, 0)}, SpecError, r"nproc_per_node=0: .* \(at nproc_per_node=0\)"),
        ({"over": "precision", "values": ("fp8",)}, SpecError, r"precision='fp8': allowed are .* \(at precision='fp8'\)"),
        ({"repeat": 0}, CurveError, r"repeat=0: a whole number of at least 1"),
        ({"resume": "nowhere"}, CurveError, r"nowhere is not the directory of a curve: it has no scaling.json"),
    ],
)
def test_refused_before_anything_starts(tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        wb.scaling_curve(SPEC, runs_dir=tmp_path / "runs", **options)
    assert not list(tmp_path.iterdir())


def test_what_is_no_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"scaling_curve\(int\): expected a RunSpec.* for a script: ScalingCurve.from_runs"):
        wb.scaling_curve(3)  # type: ignore[arg-type]
    with pytest.raises(CurveError, match=r"micro_batch=\"auto\" may be another number at each point"):
        wb.scaling_curve(SPEC.replace(micro_batch="auto"))
    with pytest.raises(CurveError, match=r"is not the directory of a curve"):
        wb.scaling_curve(tmp_path)
    with pytest.raises(TaskError, match=r"there is no file"):
        wb.scaling_curve(SPEC.replace(task="nowhere.py:build"), runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.py").write_text("import workbench as wb\ntask: wb.Task = wb.Task(model=int, dataset=list, loss=max)")
    with pytest.raises(TaskError, match=r"task is a Task, expected a function that returns one"):
        wb.scaling_curve(SPEC.replace(task=f"{tmp_path / 'mine.py'}:task"), runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_more_threads_than_cores_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.scaling.api.core_count", lambda: 4)
    monkeypatch.setattr("workbench.scaling.api.gpu_count", lambda: 2)
    assert not crowded(SPEC.replace(nproc_per_node=2, threads=2))
    assert crowded(SPEC.replace(nproc_per_node=3, threads=2))
    on_gpus = SPEC.replace(device="cuda", threads=8)
    assert not crowded(on_gpus.replace(nproc_per_node=2))
    assert crowded(on_gpus.replace(nproc_per_node=3))


# --- communication


def test_what_ddp_costs_without_any_peer_is_no_communication() -> None:
    def steps(processes: int, whole: float, without: float) -> Steps:
        return Steps(spec=SPEC.replace(nproc_per_node=processes), pairs=((whole, without),) * 3)

    measured = [steps(1, 1.0, 0.8), steps(2, 2.0, 1.0), steps(4, 4.0, 3.9)]
    assert exposed(measured, "nproc_per_node") == pytest.approx({1: 0.0, 2: 0.4, 4: 0.0})  # the last within its copies
    assert exposed(measured[1:], "nproc_per_node") == pytest.approx({2: 0.5, 4: 0.025})
    assert Steps.from_json(json.loads(json.dumps(dataclasses.asdict(measured[0])))) == measured[0]


def test_points_that_can_share_a_launch_do() -> None:
    specs = [SPEC, SPEC.replace(micro_batch=4), SPEC.replace(nproc_per_node=2), SPEC.replace(threads=2)]
    assert in_launches(specs) == [specs[:2], specs[2:3], specs[3:]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": "fsdp"}, "zero2, fsdp"),
        ({"tensor_parallel": 2, "nproc_per_node": 2}, "tensor"),
        ({"expert_parallel": 2, "nproc_per_node": 2}, "others' experts"),
        ({"local_sgd": "periodic"}, "averages parameters"),
    ],
)
def test_where_communication_cannot_be_taken_away(changes: dict[str, Any], said: str) -> None:
    asked = curve_spec(SPEC.replace(**changes), over="micro_batch", values=(1, 2))
    assert said in asked.why_no_communication
    assert curve_spec().why_no_communication == ""


# --- the directory


def by_hand_in(folder: CurveDirectory, by_hand: Made, spec: wb.RunSpec, state: str = "finished", **info: Any) -> Path:
    """A run by hand, in the directory of a curve."""
    here = {"host": platform.node(), "versions": versions(), "cores": 4}
    made = by_hand(spec=spec.to_json(), **here | info)
    if state == "finished":
        for rank in range(spec.nproc_per_node):
            made.steps(20, rank, data_wait=0.0, forward=0.01, backward=0.02, optimizer=0.0, other=0.0)
    return Path(made.ended(state).path).rename(folder.path / f"run{len(list(folder.path.iterdir()))}")


def test_only_what_is_missing_is_run_and_there_and_back_again(tmp_path: Path, by_hand: Made) -> None:
    folder = CurveDirectory.new(curve_spec(values=(1, 2, 4)), tmp_path)
    assert [trial.spec.nproc_per_node for trial in missing_trials(folder)] == [1, 2, 4, 4, 2, 1]
    points = [spec for _, spec in folder.curve_spec.points]
    by_hand_in(folder, by_hand, points[1])
    by_hand_in(folder, by_hand, points[0], "failed")
    by_hand_in(folder, by_hand, points[2].replace(seed=7))
    assert [trial.spec.nproc_per_node for trial in missing_trials(folder)] == [1, 4, 4, 2, 1]
    curve = wb.scaling_curve(folder.path)
    assert curve.world_sizes == [1, 2]
    assert curve.points[0].failed
    assert "1 of 3 points are not measured yet" in str(curve)
    by_hand_in(folder, by_hand, points[0])
    assert [point.failed for point in folder.curve().points] == ["", ""]  # tried again, and well


def test_the_newest_curve_of_a_spec_is_gone_on_with(tmp_path: Path) -> None:
    assert CurveDirectory.latest(curve_spec(), tmp_path) is None
    first = CurveDirectory.new(curve_spec(), tmp_path)
    CurveDirectory.new(curve_spec(SPEC.replace(seed=5)), tmp_path)
    wider = curve_spec(values=(1, 2, 3), repeat=5)
    found = CurveDirectory.latest(wider, tmp_path)
    assert found is not None
    assert found.path == first.path
    assert CurveDirectory.load(found.continued(wider).path).curve_spec == wider


def test_another_curve_is_not_gone_on_with(tmp_path: Path, by_hand: Made) -> None:
    folder = CurveDirectory.new(curve_spec(), tmp_path)
    for asked, said in (
        (curve_spec(SPEC.replace(seed=5)), r"its seed is 0, not 5"),
        (curve_spec(kind="strong"), r"kind='weak', not kind='strong'"),
        (curve_spec(over="threads"), r"over='nproc_per_node', not over='threads'"),
    ):
        with pytest.raises(CurveError, match=said):
            folder.continued(asked)
    with pytest.raises(CurveError, match=r"has no run that has ended"):
        wb.scaling_curve(folder.path)
    by_hand_in(folder, by_hand, SPEC, host="elsewhere")
    with pytest.raises(CurveError, match=r"made on elsewhere, and this is"):
        folder.continued(curve_spec())


# --- real ones


@pytest.mark.slow
def test_a_real_curve_is_measured_kept_and_not_measured_again_and_one_that_fails_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.scaling.api.COMMUNICATION_SECONDS", 1.0)
    spec = SPEC.replace(task=f"{TASKS.with_name('talkative_task.py')}:build", nproc_per_node=2)
    curve = wb.scaling_curve(spec, over="micro_batch", values=(16, 4), repeat=2, budget_s=None, runs_dir=tmp_path)  # 16 kills its ranks
    assert capsys.readouterr().out.count("samples/s") == 2
    assert curve.values == [4, 16]
    good, bad = curve.points
    assert (len(good.rates), good.failed) == (2, "")
    assert good.straggling is not None
    assert bad.failed
    assert curve.best == 4
    if not good.oversubscribed:  # there are two cores
        assert good.exposed is not None
        assert good.exposed > 0.05  # planted: most of it
    (folder,) = tmp_path.iterdir()
    failed = [run for run in CurveDirectory.load(folder).runs() if not run.ok]
    assert len(failed) == 1  # the launch broke down with it, and the next one leaves its repeat out
    assert wb.scaling_curve(folder) == curve
    before = set(tmp_path.glob("*/*"))
    again = wb.scaling_curve(spec, over="micro_batch", values=(4,), repeat=2, runs_dir=tmp_path, resume=True)
    assert again.points == (good,)
    assert set(tmp_path.glob("*/*")) == before
    assert capsys.readouterr().out == ""
    assert wb.scaling_curve(folder) == again


def test_an_interrupt_gives_what_has_ended_and_says_where(tmp_path: Path) -> None:
    options = {"over": "steps", "values": [6, 1_000_000], "repeat": 1, "budget_s": None, "runs_dir": str(tmp_path)}
    code = f"import workbench as wb; print(wb.scaling_curve(wb.RunSpec.from_json({SPEC.to_json()!r}), **{options!r}))"
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    end = time.monotonic() + 120
    while not list(tmp_path.glob("*/*/001/rank0.jsonl")):
        assert program.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    printed, said = program.communicate(timeout=60)
    (folder,) = tmp_path.iterdir()
    assert "2 trainings for 2 points: about" in printed
    assert f"stopped by Ctrl-C: resume='{folder}' goes on" in printed, said
    assert "1 of 2 points are not measured yet" in printed
    curve = wb.scaling_curve(folder)
    assert curve.values == [6]
    assert "1 of 2 points are not measured yet" in str(curve)
    (trial,) = missing_trials(CurveDirectory.load(folder))
    assert trial.spec.steps == 1_000_000
    assert run_directory.read_json(folder / run_directory.SCALING)["over"] == "steps"


def test_a_curve_ends_with_its_budget_or_says_that_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that a fake launch moves on; the runs are written by hand."""
    now = [0.0]
    monkeypatch.setattr("workbench.scaling.api.time.monotonic", lambda: now[0])

    def launched(trials: Any, folder: Path, tick: Callable[[], object], skip: object) -> Iterator[Any]:
        for number, trial in enumerate(trials):
            now[0] += 40.0
            tick()
            made = HandMade(folder / f"{number:03d}", spec=trial.spec.to_json(), versions=versions(), created=float(number))
            yield trial, wb.Run.load(made.steps(20).ended("finished").path)

    monkeypatch.setattr("workbench.scaling.api.in_turn", launched)
    options: dict[str, Any] = {"over": "num_workers", "values": (0, 1, 2), "repeat": 1, "runs_dir": tmp_path, "communication": False}
    curve = wb.scaling_curve(SPEC, **options, budget_s=100)
    assert curve.values == [0, 1]
    assert " points: about " in capsys.readouterr().out
    assert "the budget of 1 min 40 s was spent after 2 of 3 trainings: resume=" in str(curve)
    assert wb.scaling_curve(SPEC, **options).values == [0]  # a minute
    assert len(wb.scaling_curve(SPEC, **options, budget_s=10).values) == 1  # one run at least
    assert re.search(r" points: at most 10.0 s \(budget_s\), of about \S.* that all would take\n", capsys.readouterr().out)
    assert wb.scaling_curve(SPEC, **options, budget_s=None).values == [0, 1, 2]
    with pytest.raises(ValueError, match=r"budget_s=0: seconds above 0 are allowed; try budget_s=60, or None for no limit"):
        wb.scaling_curve(SPEC, **options, budget_s=0)

    def interrupted(*_: object) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("workbench.scaling.api.in_turn", interrupted)
    with pytest.raises(KeyboardInterrupt, match="scaling_curve was stopped by Ctrl-C before it knew anything"):
        wb.scaling_curve(SPEC, **options)


@pytest.mark.parametrize("stop", ["budget", "Ctrl-C"])
def test_notes_on_communication_are_kept_where_it_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    """The runs are there already: only communication is missing. Its first launch fails, and the second is cut off."""
    now = [0.0]
    monkeypatch.setattr("workbench.scaling.api.time.monotonic", lambda: now[0])
    monkeypatch.setattr("workbench.scaling.api.crowded", lambda spec: False)
    options: dict[str, Any] = {"over": "threads", "values": (1, 2), "repeat": 1}
    spec = SPEC.replace(nproc_per_node=2)
    folder = CurveDirectory.new(curve_spec(spec, **options, communication=True), tmp_path).path
    for threads in (1, 2):
        made = HandMade(
            folder / f"{threads:03d}", spec=spec.replace(threads=threads).to_json(), versions=versions(), created=float(threads)
        )
        made.steps(20).ended("finished")

    def launched(specs: list[wb.RunSpec], *, tick: Callable[[], object], **_: object) -> None:
        if specs[0].threads == 1:
            raise RunError("the ranks did not meet")
        if stop == "Ctrl-C":
            raise KeyboardInterrupt
        now[0] += 100.0
        tick()
        raise AssertionError("the budget was spent")

    monkeypatch.setattr("workbench.scaling.api.run_communication", launched)
    curve = wb.scaling_curve(spec, **options, resume=folder, budget_s=60, quiet=True)
    assert curve.values == [1, 2]
    assert "exposed communication could not be measured: the ranks did not meet" in str(curve)
    assert ("the budget of 1 min 00 s was spent" if stop == "budget" else "stopped by Ctrl-C") in str(curve)
