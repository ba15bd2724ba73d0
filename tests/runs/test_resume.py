"""A run that was killed goes on from its last checkpoint as if nothing had been, or says why it cannot."""

import ast
import errno
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from benchmarks import random_kills
from tests.conftest import HandMade
from tests.forked import Forks
from workbench.core import run_directory
from workbench.runs.entrypoints import TRAIN, entrypoint
from workbench.runs.launch import environment, new_run
from workbench.runs.launch.new_run import LaunchError, open_lock
from workbench.runs.launch.resume import _Attempt
from workbench.runs.restarts import checkpoints_of
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec
from workbench.timeline.timeline import WARNING

TASK = random_kills.TASK.format(samples=200, seconds=2e-3, inputs=8, hidden=16, lr=0.05)


def ranks_of(run: wb.Run) -> list[int]:
    """Processes of its ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended while we looked, or not ours
            continue
        if f"{run_directory.ENV_RUN_ID}={run.id}".encode() in environ and b"RANK=0" in environ:
            found.append(int(folder.name))
    return found


def test_a_killed_run_goes_on_and_ends_where_one_that_was_never_killed_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "task.py").write_text("def build():\n    raise RuntimeError('another file')\n")
    monkeypatch.chdir(tmp_path)
    spec = wb.RunSpec(task="task.py:build", device="cpu", micro_batch=4, steps=300, checkpoint_every=20, schedule="cosine")
    run = wb.launch(spec, runs_dir=tmp_path / "runs")
    assert run_directory.read_json(run.path / run_directory.RUN_JSON)["command"][-4:] == entrypoint(TRAIN, run.path)
    limit = time.monotonic() + 120
    while not list(run.path.glob(f"{run_directory.CHECKPOINTS}/step*.pt")):
        assert run.state == "running", run
        assert time.monotonic() < limit
        time.sleep(0.02)
    with pytest.raises(LaunchError, match="is still running: it goes on anyway"):
        wb.launch(resume=run)
    for pid in ranks_of(run):
        os.kill(pid, signal.SIGKILL)
    run.wait(120)
    assert run.state == "failed"
    done = run.progress[0]
    assert 0 < done < 300
    seconds = run.seconds
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(environment, "torchrun", forks.torchrun)
    again = wb.launch(spec, resume=run).wait(120, check=True)
    assert (run.state, run.seconds) == ("finished", again.seconds)  # the same run, looked at by who had seen it end
    assert again.seconds == pytest.approx(seconds + run_directory.read_json(run.path / run_directory.RUN_JSON)["outcome"]["seconds"])
    monkeypatch.chdir(tmp_path)
    assert (again.path, again.id, again.state, again.progress) == (run.path, run.id, "finished", (300, 300))
    whole = wb.launch(spec, runs_dir=tmp_path / "whole").wait(120, check=True)
    losses = {row["step"]: row["loss"] for row in again.metric_rows}
    assert len(again.metric_rows) == len(losses)
    assert losses == {row["step"]: row["loss"] for row in whole.metric_rows}
    seen = [step.index for step in again.timelines[0].steps]  # times that were not on disk yet when it was killed are gone
    assert seen == sorted(set(seen))
    assert seen[-1] == 299
    assert "goes on from step" in again.logs(0)
    assert (run.path / "attempts" / "0" / run_directory.LOGS).is_dir()
    assert wb.Run.load(run.path).error is None
    with pytest.raises(
        LaunchError, match=r"has finished: there is nothing left.*wb\.launch\(run\.spec\.replace\(steps=600\), resume=run\)"
    ):
        wb.launch(resume=run.path)


SPEC = wb.RunSpec(task="text-gpt", device="cpu", checkpoint_every=5)


def ended(path: Path, of: wb.RunSpec = SPEC, **more: Any) -> Path:
    """A run that was stopped after its first checkpoint."""
    (path / run_directory.CHECKPOINTS).mkdir(parents=True)
    with zipfile.ZipFile(path / run_directory.CHECKPOINTS / "step00000005.pt", "w") as file:
        file.writestr("data.pkl", "")
    info = {"format": 1, "id": "x", "name": "x", "created": 0.0, "host": "h", "launch_dir": ".", "command": ["torchrun", str(path)]}
    outcome = {"state": "stopped", "returncode": None, "seconds": 1.0}
    run_directory.write_json(path / run_directory.RUN_JSON, info | {"spec": of.to_json(), "outcome": outcome} | more)
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch": {"requeue": False}}, "is a job of Slurm"),
        ({"alone": True}, "was not launched as a run of its own: only"),
        ({"experiment": {"kind": "links"}}, "was not launched as a run of its own"),
        ({"command": ["torchrun", "/elsewhere"]}, "is a directory that was moved or copied"),
        ({"command": None}, "is a directory that was moved or copied"),
        ({"command": []}, "is a directory that was moved or copied"),
        ({"cwd": "/was/deleted"}, "was launched in /was/deleted, which is gone"),
        ({"spec": ScriptSpec(script="train.py").to_json()}, "is a script, whose checkpoints are its own"),
        ({"spec": SPEC.replace(nnodes=2).to_json()}, "is of 2 machines"),
        ({"outcome": {"state": "finished", "seconds": 1.0}}, "has finished"),
    ],
)
def test_what_cannot_go_on(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    path = ended(tmp_path / "run", **more)
    before = (path / run_directory.RUN_JSON).read_text()
    with pytest.raises(LaunchError, match=said):
        wb.launch(resume=path)
    assert (path / run_directory.RUN_JSON).read_text() == before


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    failed = "the checkpoint after step 10 could not be written (the 2 latest all failed), and there is none yet: [Errno 28] No space left"
    path = ended(tmp_path / "disk", SPEC)
    (path / run_directory.CHECKPOINTS / "step00000005.pt").unlink()
    notes = [failed.replace("10", "5") + ". The training goes on, and the next is tried after step 10", failed]
    (path / "rank0.jsonl").write_text("".join(json.dumps({"note": WARNING + note}) + "\n" for note in notes))
    with pytest.raises(
        LaunchError, match=rf"has no checkpoint to go on from: {re.escape(failed)}\. Launch it anew: wb\.launch\(run\.spec\)$"
    ):
        wb.launch(resume=path)
    part = f"{run_directory.CHECKPOINTS}/step00000005.rank1.pt"  # of ranks that share the model, before the file that names their parts
    for name, spec, left, said in (
        ("a", SPEC, None, r"ended before its first one was written \(every 5 steps, and it had taken 3\)\. Launch it anew: wb\.launch\("),
        ("b", SPEC.replace(parallel="fsdp"), part, r"ended while its first one was written \(every 5 steps, and it had taken 3\)"),
        (
            "c",
            SPEC.replace(checkpoint_every=None),
            None,
            r"keeps no checkpoints, so it cannot go on.*wb\.launch\(run\.spec, checkpoint_every=",
        ),
    ):
        path = ended(tmp_path / name, spec)
        whole = path / run_directory.CHECKPOINTS / "step00000005.pt"
        assert checkpoints_of(path) == [whole]
        whole.unlink()
        (path / run_directory.METRICS).write_text('{"step": 3, "steps": 10}\n')
        if left:
            (path / left).touch()
        with pytest.raises(LaunchError, match=said):
            wb.launch(resume=path)
        assert checkpoints_of(path) == []


LAST_WORDS = """
import pathlib, sys, time, zipfile
time.sleep(1.0)
with zipfile.ZipFile(sys.argv[1] + ".part", "w") as file:
    file.writestr("data.pkl", "")
pathlib.Path(sys.argv[1] + ".part").rename(sys.argv[1])
"""
"""A rank whose guard was killed: it still writes a checkpoint, upon SIGTERM from torchrun."""


def test_ranks_whose_guard_was_killed_write_their_checkpoint_before_the_run_goes_on(
    tmp_path: Path, begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ended(tmp_path / "run", id=f"lost-{os.getpid()}", outcome=None, host=platform.node())
    (first := checkpoints_of(path)[0]).unlink()
    environ = {**os.environ, run_directory.ENV_RUN_ID: f"lost-{os.getpid()}", "RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", LAST_WORDS, str(first)], env=environ) as rank:
        wb.launch(resume=path)  # was refused: it "ended before its first one"
        assert rank.poll() == 0
    assert [info["path"] for info in begun] == [path]
    monkeypatch.setattr("workbench.runs.launch.resume.PATIENCE", 0.05)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environ) as rank:
        try:
            ended(tmp_path / "other", id=f"lost-{os.getpid()}", outcome=None, host=platform.node())
            with pytest.raises(LaunchError, match=rf"still run, though its guard was killed: end them first \(kill {rank.pid}\)"):
                wb.launch(resume=tmp_path / "other")
        finally:
            rank.kill()
    assert len(begun) == 1


def test_a_run_goes_on_as_it_was_launched(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    with pytest.raises(LaunchError, match=r"with lr=None and not 0\.5: leave the spec out"):
        wb.launch(SPEC.replace(lr=0.5), resume=path)
    with pytest.raises(LaunchError, match=r"'train\.py' is not its spec"):
        wb.launch("train.py", resume=path)
    with pytest.raises(
        LaunchError, match=r"steps=900 with resume=…: a run goes on as it was launched.*spec\.replace\(steps=900\), resume=run"
    ):
        wb.launch(resume=path, steps=900)
    with pytest.raises(LaunchError, match=r"launch a new run for another$"):
        wb.launch(resume=path, lr=0.5)
    with pytest.raises(LaunchError, match=r"launch\(\) needs a RunSpec"):
        wb.launch()


@pytest.mark.parametrize(
    "knob",
    [
        "gc=False",
        "evaluate=False",
        "lr=0.0",
        "checkpoint_every=None",
        "no_such_knob=0",
        "rdzv_timeout=5",
        "nproc_per_node=0",
        "args=['-v']",
    ],
)
def test_nothing_that_was_asked_for_is_passed_over(tmp_path: Path, knob: str) -> None:
    path, (name, value) = ended(tmp_path / "run"), knob.split("=")
    knobs: dict[str, Any] = {name: ast.literal_eval(value)}
    with pytest.raises(LaunchError, match=re.escape(f"{knob} with resume=…: a run goes on as it was launched")):
        wb.launch(resume=path, **knobs)


def test_damaged_checkpoints_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    (path / run_directory.CHECKPOINTS / "step00000005.pt").write_bytes(b"")
    with pytest.raises(LaunchError, match=r"has no whole checkpoint to go on from: step00000005\.pt in .* cannot be read"):
        wb.launch(resume=path)
    assert not (path / "attempts").exists()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the guards of lives would have started from: none starts."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(_Attempt, "_start_guard", lambda again, info, environ, lock: found.append(info | {"path": again.path}))
    return found


def test_a_new_run_begins_with_the_checkpoint_of_one_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[dict[str, Any]]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: begun.append(info))
    path = ended(tmp_path / "run", SPEC.replace(parallel="fsdp", nproc_per_node=2))
    before = (path / run_directory.RUN_JSON).read_text()
    run = wb.launch(SPEC.replace(micro_batch=16), resume=path, runs_dir=tmp_path / "runs")
    assert run.path != path
    assert run.spec == SPEC.replace(micro_batch=16)
    assert (run.path / run_directory.CHECKPOINTS / "step00000005.pt").samefile(path / run_directory.CHECKPOINTS / "step00000005.pt")
    assert len(begun) == 1
    assert (path / run_directory.RUN_JSON).read_text() == before
    with pytest.raises(LaunchError, match=r"with lr=None and not 0\.5: leave the spec out"):
        wb.launch(SPEC.replace(lr=0.5, parallel="fsdp", nproc_per_node=2), resume=path)


@pytest.mark.parametrize(("was", "now"), [("whole", "task.py"), ("task.py", "whole"), ("whole", "../here/task.py")])
def test_a_task_is_the_same_by_another_path_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[dict[str, Any]], was: str, now: str
) -> None:
    """A run that began with the checkpoint of another has the whole path in its spec."""
    begun_anew = list[dict[str, Any]]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: begun_anew.append(info))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("task.py", "other.py"):
        Path(name).write_text(TASK + "\n\ndef rate(step):\n    return 1.0\n")

    def of(file: str, name: str = "build") -> wb.RunSpec:
        file = str(tmp_path / "here" / "task.py") if file == "whole" else file
        return SPEC.replace(task=f"{file}:{name}", schedule=f"{file}:rate")

    path = ended(tmp_path / "run", of(was), cwd=str(tmp_path / "here"))
    for others in (of("other.py"), of(now, "rate"), of("missing.py")):
        with pytest.raises(LaunchError, match="goes on as it was launched, with task="):
            wb.launch(others, resume=path)
    run = wb.launch(of(now).replace(micro_batch=16), resume=path, runs_dir=tmp_path / "runs")
    assert run.spec == of("whole").replace(micro_batch=16)
    wb.launch(of(now), resume=path)
    assert [info["path"] for info in begun] == [path]
    assert len(begun_anew) == 1


def test_a_new_run_begins_with_the_checkpoint_of_a_directory_that_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is that of the spec that is given, found from here, and never that of the folder that the directory names."""
    begun = list[dict[str, Any]]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: begun.append(info))
    for folder in ("there", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(TASK)
    spec = SPEC.replace(task="task.py:build", steps=12)
    path = ended(tmp_path / "run", spec, cwd=str(tmp_path / "there")).rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(LaunchError, match=r"a directory that was moved or copied.*: wb\.launch\(run\.spec, resume=run\)"):
        wb.launch(resume=path)
    with pytest.raises(LaunchError, match="moved or copied"):
        wb.launch(spec.replace(lr=0.5), resume=path)
    for _ in range(2):
        for given in (spec, spec.replace(steps=24)):
            run = wb.launch(given, resume=path, runs_dir=tmp_path / "runs")
            assert (run.spec, begun.pop()["cwd"]) == (given, str(tmp_path / "here"))
            assert (run.path / run_directory.CHECKPOINTS / "step00000005.pt").exists()
        shutil.rmtree(tmp_path / "there", ignore_errors=True)  # as on another machine
    assert not begun


FINISHED = {"state": "finished", "returncode": 0, "seconds": 1.0}


def test_a_new_run_takes_more_steps_than_one_that_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[dict[str, Any]]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: begun.append(info))
    spec = SPEC.replace(steps=12, nproc_per_node=2, local_sgd="periodic(period=2, start=4)")
    path = ended(tmp_path / "run", spec, outcome=FINISHED)
    run = wb.launch(spec.replace(steps=24), resume=path, runs_dir=tmp_path / "runs")
    assert (run.path != path, run.spec) == (True, spec.replace(steps=24))
    assert (run.path / run_directory.CHECKPOINTS / "step00000005.pt").exists()
    with pytest.raises(LaunchError, match=r"steps=5 with resume=…: the last checkpoint of .* is of step 5; give more steps"):
        wb.launch(spec.replace(steps=5), resume=path)
    with pytest.raises(LaunchError, match=r"each rank of .* has parameters of its own"):
        wb.launch(spec.replace(steps=24, nproc_per_node=1), resume=path)
    plain = SPEC.replace(steps=12)
    stopped = ended(tmp_path / "stopped", plain)
    assert wb.launch(plain.replace(steps=8), resume=stopped, runs_dir=tmp_path / "runs").spec.steps == 8
    without = ended(tmp_path / "without", plain.replace(checkpoint_every=None), outcome=FINISHED)
    (without / run_directory.CHECKPOINTS / "step00000005.pt").unlink()
    with pytest.raises(LaunchError, match="keeps no checkpoints, so it cannot go on"):
        wb.launch(plain.replace(checkpoint_every=None, steps=24), resume=without)
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"checkpoint_every": 100}, "checkpoint_every=100 with steps=12: no checkpoint is due; try checkpoint_every=2"),
        ({"warmup_steps": 12}, "warmup_steps=12 with steps=12: the warm-up takes all of them; try warmup_steps=1"),
        ({"checkpoint_every": None, "keep_checkpoints": 5}, "keep_checkpoints=5 with checkpoint_every=None: no checkpoints are written"),
    ],
)
def test_a_launch_warns_of_knobs_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], said: str) -> None:
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: None)
    with pytest.warns(UserWarning, match=said) as warned:
        wb.launch(SPEC.replace(steps=12, **knobs), runs_dir=tmp_path)
    assert [Path(each.filename).name for each in warned] == ["test_resume.py"]


def test_a_new_run_goes_on_with_the_machines_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[dict[str, Any]]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: begun.append(info))
    path = ended(tmp_path / "run", SPEC.replace(nnodes=4))
    with pytest.raises(LaunchError, match=r"is of 4 machines: .* wb\.launch\(run\.spec\.replace\(nnodes=…, accumulation=…\), resume=run\)"):
        wb.launch(resume=path)
    for left, meeting in ((2, 2), (1, None)):
        run = wb.launch(SPEC.replace(nnodes=left, accumulation=4 // left), resume=path, runs_dir=tmp_path / "runs")
        assert (run.path / run_directory.CHECKPOINTS / "step00000005.pt").exists()
        assert begun[-1].get("rendezvous", {}).get("nnodes") == meeting
        assert bool(run.join_command) == (left > 1)
    where: dict[str, Any] = {"resume": path, "runs_dir": tmp_path / "runs", "rdzv_endpoint": "localhost:29400", "rdzv_timeout": 30}
    wb.launch(SPEC.replace(nnodes=2, accumulation=2), **where)
    assert begun[-1]["rendezvous"] == {"nnodes": 2, "endpoint": "localhost:29400", "timeout": 30, "silence": 60.0}
    with pytest.raises(LaunchError, match="rdzv_endpoint='localhost:29400' with one machine"):
        wb.launch(SPEC.replace(nnodes=1, accumulation=4), **where)


def test_a_run_that_somebody_else_has_resumed_meanwhile_does_not_begin_twice(tmp_path: Path, begun: list[dict[str, Any]]) -> None:
    path = ended(tmp_path / "run")
    lock = open_lock(path)

    def finish() -> None:
        time.sleep(0.3)  # by now it has been looked at; where it has not, it is refused, too, as finished
        run_directory.write_json(
            path / run_directory.RUN_JSON, run_directory.read_json(path / run_directory.RUN_JSON) | {"outcome": {"state": "finished"}}
        )
        os.close(lock)

    other = threading.Thread(target=finish)
    other.start()
    with pytest.raises(LaunchError, match=r"was meanwhile resumed by another process, and is finished now|has finished"):
        wb.launch(resume=path)
    other.join()
    assert not begun
    assert not (path / "attempts").exists()


def test_a_lost_run_of_another_machine_goes_on_there(tmp_path: Path, begun: list[dict[str, Any]]) -> None:
    path = ended(tmp_path / "run", outcome=None)
    (path / run_directory.LOCK).touch()
    with pytest.raises(LaunchError, match=r"was launched on h, and this is .*: from here nobody can see whether it still runs there"):
        wb.launch(resume=path)
    (path / run_directory.LOCK).unlink()  # the way out that it names
    wb.launch(resume=path)
    assert len(begun) == 1


def test_alarms_and_determinism_stay_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environs = list[dict[str, str]]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda new, info, environ, lock: environs.append(environ))
    for name, alarm, known in (("a", "experiments", True), ("b", "anything", False)):
        path = ended(
            tmp_path / name, SPEC.replace(deterministic=True), environment={"set": {run_directory.ENV_ALARM: alarm}, "removed": []}
        )
        wb.launch(resume=path)
        wb.launch(Run.load(path).spec.replace(micro_batch=16), resume=path, runs_dir=tmp_path / "runs")  # another run, by another layout
        for environ in environs:
            assert (environ.get(run_directory.ENV_ALARM) == alarm) == known
            assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        environs.clear()


def test_another_life_says_what_it_runs_on_and_counts_the_time_of_those_before(
    tmp_path: Path, begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Git:
        def __init__(self, folder: Path) -> None:
            asked.append(folder)

        def answer(self, timeout: float) -> dict[str, Any]:
            return {"commit": "new", "dirty": False}

    monkeypatch.setattr(environment, "GitQuery", Git)
    path = ended(tmp_path / "run", cwd=str(tmp_path), git={"commit": "old", "dirty": False}, seconds_before=2.0, begun=100.0)
    run = Run.load(path)
    assert run.seconds == 3.0
    before = time.time()
    wb.launch(resume=run)
    info = begun[0]
    assert (info["git"], asked, info["cwd"]) == ({"commit": "new", "dirty": False}, [tmp_path], str(tmp_path))
    assert info["seconds_before"] == 3.0
    assert before <= info["begun"] <= time.time()
    lock = open_lock(path, wait=False)
    assert run.state == "running"  # the run that was given goes on
    assert 3.0 <= run.seconds <= 3.0 + time.time() - before
    os.close(lock)


def test_a_link_leads_to_the_run(tmp_path: Path, begun: list[dict[str, Any]]) -> None:
    path = ended(tmp_path / "run")
    (tmp_path / "link").symlink_to(path)
    assert wb.launch(resume=tmp_path / "link").path == path
    assert begun[0]["path"] == path


def test_a_life_whose_folder_was_deleted_leaves_its_number(tmp_path: Path, begun: list[dict[str, Any]]) -> None:
    path = ended(tmp_path / "run")
    (path / "attempts" / "1").mkdir(parents=True)
    wb.launch(resume=path)
    assert sorted(folder.name for folder in (path / "attempts").iterdir()) == ["1", "2"]
    assert len(begun) == 1


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    (path / run_directory.LOCK).mkdir()  # nothing else keeps root from writing
    with pytest.raises(LaunchError, match=f"{path} cannot be written to, and a run goes on in its own directory"):
        wb.launch(resume=path)


def test_a_lock_that_cannot_be_written_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ended(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(LaunchError, match="No space left on device"):
            wb.launch(resume=path)
    assert not run_directory.is_locked(path / run_directory.LOCK)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("where", "error", "expected"),
    [
        ("workbench.runs.launch.new_run.subprocess.Popen", OSError(errno.EAGAIN, "Resource temporarily unavailable"), LaunchError),
        ("workbench.runs.launch.new_run.subprocess.Popen", KeyboardInterrupt(), KeyboardInterrupt),
        ("workbench.runs.launch.resume.run_directory.cut_to_whole_lines", run_directory.DiskFullError(errno.ENOSPC, "full"), LaunchError),
        ("workbench.runs.launch.new_run.threading.Thread", KeyboardInterrupt(), KeyboardInterrupt),  # the guard is there already
        ("workbench.runs.launch.new_run.threading.Thread", RuntimeError("can't start new thread"), RuntimeError),
    ],
)
def test_a_life_that_cannot_begin_leaves_the_run_as_it_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException, expected: type[BaseException]
) -> None:
    path = tmp_path / "run"
    outcome = {"state": "failed", "returncode": 1, "seconds": 1.0, "exits": {}, "stopped_ns": None}
    ended(path, outcome=outcome, command=["/bin/sh", "-c", "sleep 60", str(path)], id=f"resumed-{tmp_path.name}")
    for name in (run_directory.ERRORS, run_directory.LOGS):
        (path / name).mkdir()
        (path / name / "rank0").write_text(name)
    (path / run_directory.LAUNCHER_LOG).write_text("what torchrun said\n")
    (path / run_directory.METRICS).write_text('{"step": 1}\n')
    before = files_of(path)
    monkeypatch.setattr(environment, "GitQuery", lambda folder: NoGit())
    with monkeypatch.context() as patch:
        patch.setattr(where, raising(error))
        with pytest.raises(expected):
            wb.launch(resume=path)
    assert files_of(path) == before
    assert (Run.load(path).state, run_directory.is_locked(path / run_directory.LOCK)) == ("failed", False)
    assert not new_run.guards
    assert not (path / "attempts").exists()


class NoGit:
    """In the place of `GitQuery`, which starts a process, too."""

    def answer(self, timeout: float) -> None:
        return None


def test_a_life_that_does_not_begin_leaves_the_time_of_a_lost_run(
    by_hand: Callable[..., HandMade], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = by_hand(created=time.time() - 1000, spec=SPEC.to_json()).steps(3).log(0, "hello\n").path
    run_directory.write_json(
        path / run_directory.RUN_JSON, run_directory.read_json(path / run_directory.RUN_JSON) | {"command": ["torchrun", str(path)]}
    )
    ended(path.with_name("other"))
    (path.with_name("other") / run_directory.CHECKPOINTS).rename(path / run_directory.CHECKPOINTS)
    with open(path / run_directory.rank_file(0), "a") as file:
        file.write('{"step": 3, "forw')  # it is cut off
    for file_or_folder in path.rglob("*"):
        os.utime(file_or_folder, (0, time.time() - 900))
    assert Run.load(path).seconds == pytest.approx(100, abs=5)
    monkeypatch.setattr(_Attempt, "_start_guard", raising(OSError(errno.ENOSPC, "full")))
    with pytest.raises(LaunchError, match="could not go on"):
        wb.launch(resume=path)
    assert Run.load(path).seconds == pytest.approx(100, abs=5)
    os.close(open_lock(path, wait=False))
    assert Run.load(path).seconds == pytest.approx(100, abs=5)


def files_of(path: Path) -> dict[Path, Any]:
    """Their contents; of run.json its values, and nothing of the lock."""
    found: dict[Path, Any] = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != run_directory.LOCK}
    return found | {path / run_directory.RUN_JSON: run_directory.read_json(path / run_directory.RUN_JSON)}


def test_a_run_that_somebody_else_holds_does_not_begin_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.runs.launch.resume.PATIENCE", 0.0)
    path = ended(tmp_path / "run")
    lock = open_lock(path)
    try:
        with pytest.raises(LaunchError, match="is that of a run that is still running"):
            wb.launch(resume=path)
    finally:
        os.close(lock)
    assert not (path / "attempts").exists()


def test_who_asks_whether_a_run_lives_is_waited_for(tmp_path: Path, begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    path = ended(tmp_path / "run")
    tried: list[bool] = []

    def lock_of(folder: Path, *, wait: bool = True) -> int:
        with open(folder / run_directory.LOCK, "a") as asking:
            if not tried:  # just then somebody asks
                fcntl.flock(asking, fcntl.LOCK_SH)
            tried.append(True)
            return open_lock(folder, wait=wait)

    monkeypatch.setattr("workbench.runs.launch.resume.open_lock", lock_of)
    wb.launch(resume=path)
    assert (len(tried), len(begun)) == (2, 1)


def test_a_run_that_goes_on_has_a_panel_that_is_live_again(by_hand: Callable[..., HandMade]) -> None:
    made = by_hand().ended("stopped")
    pytest.importorskip("ipywidgets", reason="a panel needs Jupyter's packages (pip install '.[notebooks]')")
    from workbench.runs.panel.panel import run_panel

    before = run_panel(Run.load(made.path))
    run_directory.write_json(
        made.path / run_directory.RUN_JSON, run_directory.read_json(made.path / run_directory.RUN_JSON) | {"outcome": None}
    )
    made.alive()
    again = run_panel(Run.load(made.path))
    assert (before.now.state, before.stop.layout.display) == ("stopped", "none")
    assert (again.now.state, again.stop.layout.display) == ("running", None)
    made.ended("stopped")
    limit = time.monotonic() + 20
    while again.now.state == "running":  # its thread looks
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert run_panel(Run.load(made.path)) is again


def test_the_time_of_a_life_that_nobody_saw_end_ends_with_its_last_sign(by_hand: Callable[..., HandMade]) -> None:
    made = by_hand(created=time.time() - 1e6, begun=time.time() - 1000, seconds_before=50.0).steps(3)
    for path in made.path.iterdir():
        os.utime(path, (0, time.time() - 990))
    assert Run.load(made.path).seconds == pytest.approx(60, abs=5)
