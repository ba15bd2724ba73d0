"""A run read back from its directory: while it runs, after the end, damaged, too new."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.runs.compare import compare
from workbench.runs.failure import RunError
from workbench.runs.run import Run, RunFormatError
from workbench.runs.spec import RunSpec

Make = Callable[..., HandMade]


def test_a_run_while_it_runs_and_after(by_hand: Make) -> None:
    made = by_hand().alive().steps(4).losses(4)
    run = Run.load(made.path)
    assert (run.state, run.ok, run.error, run.progress) == ("running", False, None, (4, 20))
    made.losses(6)  # a second writer: six more lines
    made.ended("finished")
    assert (run.state, run.ok, run.error, run.seconds) == ("finished", True, None, 2.5)
    assert len(run.metric_rows) == 10
    assert list(run.metrics["step"]) == [1, 2, 3, 4, 5, 6]  # one row per step
    assert "finished" in str(run)


def test_figures_of_two_ranks(by_hand: Make) -> None:
    run = Run.load(by_hand().steps(20, 0).steps(20, 1, memory=2**30).ended("finished").path)
    assert [t.rank for t in run.timelines] == [0, 1]
    assert run.samples_per_sec == pytest.approx(2 * 8 / 0.065)
    assert run.memory == [None, 2**30]
    assert len(run.to_frame()) == 40


def test_an_evaluation_is_in_the_row_of_its_step(by_hand: Make) -> None:
    made = by_hand().losses(3)
    with open(made.path / run_directory.METRICS, "a") as file:
        file.write('{"step": 3, "steps": 3, "accuracy": 0.5}\n')
    last = Run.load(made.path).metrics.iloc[-1]
    assert (last["step"], last["accuracy"], last["loss"]) == (3, 0.5, pytest.approx(2 / 3))


def test_a_run_that_has_not_written_yet(by_hand: Make) -> None:
    run = Run.load(by_hand().alive().path)
    assert run.timelines == []
    assert math.isnan(run.samples_per_sec)
    assert run.progress == (0, 20)
    assert run.logs() == ""
    assert "loss" in run.metrics.columns
    with pytest.raises(TimeoutError, match=r"still runs after 10\.0 ms: wait longer, or run\.stop\(\)"):
        run.wait(timeout=0.01)


def test_a_run_whose_guard_was_killed_is_lost(by_hand: Make) -> None:
    run = Run.load(by_hand().steps(3).path)
    assert run.state == "lost"
    assert run.wait() is run
    assert run.stop() is run
    assert run.error is not None
    with pytest.raises(RunError):
        run.wait(check=True)


def test_the_clock_of_a_lost_run_stands_still(by_hand: Make) -> None:
    made = by_hand(created=time.time() - 1000).steps(3)
    for path in made.path.iterdir():
        os.utime(path, (0, time.time() - 990))
    assert Run.load(made.path).seconds == pytest.approx(10, abs=2)


def test_the_last_sign_of_a_lost_run_is_of_its_ranks(by_hand: Make) -> None:
    made = by_hand(created=time.time() - 1000)
    run = Run.load(made.path)
    assert run.seconds == 0  # they have not written anything, and run.json and the lock are not theirs
    made.log(0, "starting\n")
    for log in made.path.glob("logs/*/*/*/*"):
        os.utime(log, (0, run.created + 5))
    assert run.seconds == pytest.approx(5, abs=1e-3)
    (made.steps(3).path / "checkpoints").mkdir()
    (made.path / "checkpoints" / "step00000003.pt").touch()
    for path, seconds in ((made.path / "rank0.jsonl", 10), (made.path / "checkpoints" / "step00000003.pt", 9)):
        os.utime(path, (0, run.created + seconds))
    assert run.seconds == pytest.approx(10, abs=1e-3)


def test_a_run_of_another_machine_is_not_stopped_from_here(by_hand: Make) -> None:
    with pytest.raises(ValueError, match=r"runs on elsewhere, and this is .*: stop it there"):
        Run.load(by_hand(host="elsewhere").alive().path).stop()


def test_one_of_a_sweep_shares_the_end_of_its_launch(by_hand: Make) -> None:
    launch = by_hand().alive()
    info = json.loads((launch.path / "run.json").read_text())
    for name, outcome in (("000", {"state": "finished", "seconds": 1.0}), ("001", None)):
        (launch.path / name).mkdir()
        run_directory.write_json(launch.path / name / "run.json", {**info, "launch_dir": "..", "outcome": outcome})
    first, second = (Run.load(launch.path / name) for name in ("000", "001"))
    assert (first.state, second.state) == ("finished", "running")
    launch.ended("stopped")
    assert second.state == "stopped"


def test_logs(by_hand: Make) -> None:
    run = Run.load(by_hand().log(0, "hello\n").log(1, "5%\r9%\nbye").log(1, "oops\n", "stderr").ended("finished").path)
    assert run.logs(0) == "hello"
    assert run.logs().splitlines() == ["[0] hello", "[1] oops", "[1] 9%", "[1] bye"]
    with pytest.raises(ValueError, match="has no log of rank 2: it has ranks 0, 1"):
        run.logs(2)


def test_a_newer_format_is_refused(by_hand: Make) -> None:
    with pytest.raises(RunFormatError, match=r"format 99 by a newer workbench; this one reads formats up to 1\. Try: pip install"):
        Run.load(by_hand(format=99).path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is missing: .* is not a run directory"),
        ('{"format": 1, "outcome": {}}', "its outcome has no state"),
        ("{", "is damaged"),
        ("{}", "has no format number"),
        ('{"format": 1}', "is damaged: KeyError"),
        ('{"format": 1, "id": "a", "name": "b", "created": 0, "spec": {"kind": "task", "task": "x", "steps": -1}}', "steps=-1"),
    ],
)
def test_a_damaged_directory(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(run_directory.DamagedRunError, match=said):
        Run.load(tmp_path)


@pytest.mark.parametrize("row", ['{"step": 3, "forward": "x"}', '{"step": "x"}', '{"profiled": 3}', '{"step": 3, "forward": null}'])
def test_a_row_that_is_no_step(by_hand: Make, row: str) -> None:
    made = by_hand().steps(3)
    with open(made.path / "rank0.jsonl", "a") as file:
        file.write(row + "\n")
    with pytest.raises(run_directory.DamagedRunError, match=r"rank0\.jsonl is damaged: a row of it is no step"):
        _ = Run.load(made.path).timelines


def test_a_row_of_figures_without_a_step(by_hand: Make) -> None:
    made = by_hand()
    (made.path / "metrics.jsonl").write_text('{"loss": 3.0}\n')
    with pytest.raises(run_directory.DamagedRunError, match=r"metrics\.jsonl is damaged: a row of it has no number of its step: \{'loss'"):
        _ = Run.load(made.path).metrics


def test_an_unfinished_last_line_is_not_read(by_hand: Make) -> None:
    made = by_hand().steps(3)
    with open(made.path / "rank0.jsonl", "a") as file:
        file.write('{"step": 3, "forw')
    assert len(Run.load(made.path).timelines[0].steps) == 3


def test_reprs_do_not_change_between_executions(by_hand: Make) -> None:
    run = Run.load(by_hand().path)
    assert repr(run) == "Run('by-hand', nproc_per_node=2)"
    assert str(os.getpid()) not in repr(run)


def test_before_and_after(by_hand: Make) -> None:
    spec = RunSpec(task="clipart-resnet", nproc_per_node=2)
    before = by_hand(spec=spec.to_json()).steps(20).ended("finished")
    after = by_hand(spec=spec.replace(num_workers=2).to_json()).steps(20, data_wait=0.0).ended("finished")
    found = compare(Run.load(before.path), Run.load(after.path))
    assert found.labels == ["num_workers=0", "num_workers=2"]
    assert found.speedup == pytest.approx(0.065 / 0.035)
    assert found.seconds("data_wait") == pytest.approx([0.03, 0.0])
    assert "1.86×" in str(found)
    assert found.table.rows[0][0] == "num_workers=0"
    after.steps(0, rank=1)  # a rank that has only begun does not spoil the figures of the others
    assert found.seconds("forward") == pytest.approx([0.01, 0.01])
    assert list(found.to_frame()["speedup"]) == pytest.approx(found.speedups)


def test_what_cannot_be_compared(by_hand: Make) -> None:
    run = Run.load(by_hand().steps(20).ended("finished").path)
    with pytest.raises(ValueError, match=r"compare\(\) got 1 run: expected two or more"):
        compare(run)
    with pytest.raises(ValueError, match=r"compare\(\) got a list: expected runs, compare\(before, after\) or compare\(\*runs\)"):
        compare([run, run])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no measured step to compare"):
        compare(run, Run.load(by_hand().ended("stopped").path))
