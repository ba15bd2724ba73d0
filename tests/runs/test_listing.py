"""The list of runs: what each row says, what differs, and what is in the folder besides."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.runs import listing, slurm_queue
from workbench.runs.listing import RunFolder
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec

Make = Callable[..., HandMade]
SPEC = wb.RunSpec(task="text-gpt", steps=20)


def test_what_a_row_says(by_hand: Make, capsys: pytest.CaptureFixture[str]) -> None:
    old = by_hand(name="old", created=1.0, spec=SPEC.to_json()).losses(20).ended("finished")
    by_hand(name="new", created=3.0, spec=SPEC.replace(lr=0.5, micro_batch=4).to_json()).losses(4).alive()
    by_hand(name="other task", created=2.0).ended("failed")
    with open(old.path / run_directory.METRICS, "a") as file:
        file.write('{"step": 20, "accuracy": 0.5}\n{"step": 21, "los')
    runs = wb.list_runs(old.path.parent)
    assert [run.name for run in runs] == ["old", "other task", "new"]
    assert [run.state for run in runs] == ["finished", "failed", "running"]
    assert [(run.done, run.steps) for run in runs] == [(20, 20), (None, 20), (4, 20)]
    assert runs[0].loss == pytest.approx(0.1)
    assert runs[0].samples_per_sec == pytest.approx(16 * 20 / (0.065 * 19))
    usual = wb.RunSpec(task="text-gpt")
    assert [run.differs for run in runs] == [
        f"micro_batch={usual.micro_batch}, lr=the task's own",
        "task=clipart-resnet",
        "micro_batch=4, lr=0.5",
    ]
    assert repr(runs).endswith(", 3 runs)")
    assert list(runs.to_frame()["state"]) == ["finished", "failed", "running"]
    assert main(["runs", str(old.path.parent)]) == 0
    assert capsys.readouterr().out == f"{runs}\n"


def test_runs_of_a_script_differ_in_ranks_and_options(by_hand: Make) -> None:
    for options in ({}, {"nproc_per_node": 2}, {"args": ("--lr", "1")}):
        made = by_hand(spec=ScriptSpec(script="/x/train.py", **options).to_json()).ended("finished")
    differ = [run.differs for run in wb.list_runs(made.path.parent)]
    assert differ == ["args=none, nproc_per_node=1", "args=none, nproc_per_node=2", "args=--lr 1, nproc_per_node=1"]


def test_a_loss_that_is_none_hides_no_progress(by_hand: Make) -> None:
    made = by_hand(spec=SPEC.to_json()).losses(2)
    writer = run_directory.LineWriter(made.path / run_directory.METRICS)
    writer.write([{"step": 3, "steps": 20, "loss": float("nan"), "samples": 48, "seconds": 1.0}])
    writer.close()
    (run,) = wb.list_runs(made.path.parent)
    assert (run.done, run.loss) == (3, None)


def test_private_runs_of_others_in_a_shared_folder_are_not_there(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, private = by_hand(), by_hand()
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and Path(path).parent == private.path:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert [run.path for run in wb.list_runs(made.path.parent)] == [made.path]


def test_runs_of_a_sweep_are_listed_one_by_one(by_hand: Make) -> None:
    launch = by_hand().ended("finished")
    info = json.loads((launch.path / "run.json").read_text())
    for name, lr in (("000", 0.1), ("001", 0.2)):
        (launch.path / name).mkdir()
        spec = SPEC.replace(lr=lr).to_json()
        run_directory.write_json(launch.path / name / "run.json", {**info, "launch_dir": "..", "name": f"lr={lr}", "spec": spec})
    runs = wb.list_runs(launch.path.parent)
    assert [(run.name, run.differs) for run in runs] == [("lr=0.1", "lr=0.1"), ("lr=0.2", "lr=0.2")]
    assert f"{launch.path.name}/001" in str(runs)


def test_what_cannot_be_read_is_damaged_and_what_is_no_run_is_not_there(by_hand: Make, tmp_path: Path) -> None:
    made = by_hand(spec=ScriptSpec(script="/x/train.py", args=("--lr", "1")).to_json()).ended("stopped")
    by_hand(spec=ScriptSpec(script="/x/train.py").to_json(), format=99)
    torn = by_hand()
    (torn.path / "run.json").write_text("{")
    (made.path.parent / "notes").mkdir()
    (made.path.parent / "file").touch()
    runs = wb.list_runs(made.path.parent)
    assert sorted(run.state for run in runs) == ["damaged", "damaged", "stopped"]
    (made.path / run_directory.METRICS).write_text('{"step": 3, "loss": NaN, "samples": "x"}\n{"step": 2, "loss": Infinity}\n[]\n\n')
    (stopped,) = [run for run in wb.list_runs(made.path.parent) if run.state == "stopped"]
    assert (stopped.done, stopped.loss) == (2, None)
    assert "<script>" not in wb.list_runs(made.path.parent)._repr_html_()


def test_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="runs is not a folder; runs go to"):
        wb.list_runs()
    with pytest.raises(ValueError, match=r"list_runs\(3\): expected the path of a folder"):
        wb.list_runs(3)  # type: ignore[arg-type]
    (tmp_path / "runs").mkdir()
    assert str(wb.list_runs()).endswith("no runs here")


def test_a_folder_above_that_of_the_runs(by_hand: Make, tmp_path: Path) -> None:
    """It said "no runs here", with no word about where they are."""
    run = by_hand().ended("finished").path
    above = tmp_path / "above"
    above.mkdir()
    assert str(wb.list_runs(above)).endswith("no runs here")
    shutil.copytree(run.parent, above / "runs")
    there = str(above / "runs")
    assert str(wb.list_runs(above)).endswith(f"no runs here, but 1 run in {there}")
    assert "1 run in" in wb.list_runs(above)._repr_html_()


def test_a_run_is_not_read_to_be_listed(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a whole file was read")

    made = by_hand().steps(2000).losses(2000).ended("finished")
    monkeypatch.setattr(run_directory.LineTail, "read", refuse)
    monkeypatch.setattr(run_directory.BytesTail, "read", refuse)
    (run,) = wb.list_runs(made.path.parent)
    assert run.done == 2000


def test_a_run_list_is_filtered_and_sorted(by_hand: Make, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand(name="first", created=1.0, spec=SPEC.replace(lr=0.1).to_json()).losses(20).ended("finished")
    by_hand(name="second", created=2.0, spec=SPEC.replace(lr=0.2).to_json()).losses(4).ended("finished")
    listed = wb.list_runs(by_hand(created=3.0).path.parent)
    assert [run.name for run in listed.filter("finished").sort("throughput")] == ["first", "second"]
    assert "2 of 3 runs match" in str(listed.filter("finished"))
    assert str(listed.filter("nowhere")).endswith("0 of 3 runs match.")
    assert listed.filter(" ") is listed
    with pytest.raises(ValueError, match=r"sort\('los'\): did you mean 'loss'\? runs can be sorted by created, run, state"):
        listed.sort("los")
    many = dataclasses.replace(listed, runs=listed.runs * 50)
    assert "the newest 100 of 150" in str(many)
    assert "the first 100 of 150" in str(many.sort("state"))
    assert main(["runs", str(listed.folder), "--filter", "lr=0.", "--sort", "loss"]) == 0
    assert capsys.readouterr().out == f"{listed.filter('lr=0.').sort('loss')}\n"


def test_a_job_is_asked_for_rarely_and_never_once_it_has_ended(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's controller is shared by all users, and a panel looks at its folder every two seconds."""
    calls, answer = list[str](), ["JobId=7 JobState=PENDING Reason=Priority"]
    monkeypatch.setattr(slurm_queue, "call", lambda *words, **more: (calls.append(words[0]), (0, answer[0]))[1])
    monkeypatch.setattr(slurm_queue, "POLL", 3600)
    made = by_hand(batch={"system": "slurm"})
    run_directory.write_json(made.path / run_directory.JOB, {"job": "7"})
    folder = RunFolder(made.path.parent)
    assert [folder.read()[0].state for _ in range(3)] == ["queued"] * 3
    assert len(calls) == 1
    made.ended("finished")
    loaded = list[Path]()
    load = Run.load
    monkeypatch.setattr(Run, "load", lambda path: (loaded.append(path), load(path))[1])
    assert [folder.read()[0].state for _ in range(3)] == ["finished"] * 3
    assert (len(calls), len(loaded)) == (1, 1)
    made.ended("failed")  # its job may be in the queue again
    answer[0] = "JobId=7 JobState=RUNNING Restarts=1 Reason=None"
    info = json.loads((made.path / "run.json").read_text())
    run_directory.write_json(made.path / "run.json", {**info, "batch": {"system": "slurm", "requeue": True}})
    assert folder.read()[0].state == "running"


@pytest.mark.parametrize("state", ["finished", "running"])
def test_a_read_that_fails_is_tried_again(by_hand: Make, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    made = by_hand().losses(3)
    made.ended("finished") if state == "finished" else made.alive()
    folder, last = RunFolder(made.path.parent), listing._last_metric

    def refuse(path: Path) -> dict[str, Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(listing, "_last_metric", refuse)
    assert folder.read()[0].state == "damaged"
    monkeypatch.setattr(listing, "_last_metric", last)
    assert folder.read()[0].state == state


def test_a_script_has_the_steps_of_its_timelines_and_experiments_can_be_hidden(by_hand: Make, capsys: pytest.CaptureFixture[str]) -> None:
    script = ScriptSpec(script="/train.py", nproc_per_node=2, watch=True).to_json()
    made = by_hand(created=1.0, spec=script).steps(40).steps(40, rank=1).ended("finished")
    by_hand(created=2.0, name="tried", experiment={"kind": "diagnose"}).ended("finished")
    runs = wb.list_runs(made.path.parent)
    assert (runs[0].done, runs[0].loss) == (40, None)
    assert runs[0].samples_per_sec == pytest.approx(Run.load(made.path).samples_per_sec)
    assert [run.experiment for run in runs] == ["", "diagnose"]
    assert "the loss of a script is not recorded" in str(runs)
    assert main(["runs", str(made.path.parent)]) == 0
    shown = capsys.readouterr().out
    assert "1 experiment of the workbench hidden (--all" in shown
    assert len(wb.list_runs(made.path.parent, experiments=False)) == 1
    assert main(["runs", str(made.path.parent), "--all"]) == 0
    assert "not shown" not in capsys.readouterr().out


def test_the_list_and_the_report_have_one_throughput(by_hand: Make) -> None:
    made = by_hand(spec=SPEC.to_json()).steps(40).losses(20).ended("finished")
    (listed,) = wb.list_runs(made.path.parent)
    run = Run.load(made.path)
    assert listed.samples_per_sec == run.samples_per_sec
    assert listed.samples_per_sec != pytest.approx(run.metric_rows[-1]["samples"] / run.metric_rows[-1]["seconds"])
    assert "warm-up left out" in str(wb.list_runs(made.path.parent))


def test_a_run_that_was_cut_before_its_first_metrics_has_the_steps_of_its_timelines(by_hand: Make) -> None:
    made = by_hand().steps(7).losses(0).ended("stopped")
    (listed,) = wb.list_runs(made.path.parent)
    assert (listed.done, listed.steps) == wb.Run.load(made.path).progress == (7, 20)
