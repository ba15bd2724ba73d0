"""Run directories from somebody else: what they say is shown, and neither executed, signalled nor followed out of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade
from tests.hostile import EVIL, harmful
from tests.runs.test_resume import ended
from workbench.core import run_directory
from workbench.core.run_directory import DamagedRunError
from workbench.runs import guards, slurm_queue
from workbench.runs.entrypoints import TRAIN, entrypoint
from workbench.runs.launch import environment, guard, new_run, nodes
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.rendezvous import Rendezvous
from workbench.runs.run import Run, RunGoneError

Make = Callable[..., HandMade]


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    assert process.poll() is None, "it was ended"
    process.kill()
    process.wait()


def pretended(run_dir: Path, run_id: str) -> "subprocess.Popen[bytes]":
    """A process with the command of the guard of a run."""
    config = json.dumps({"run_dir": str(run_dir), "id": run_id})
    code = f"import sys, time; sys.argv; time.sleep(600)  # {config}"
    process = subprocess.Popen([sys.executable, "-c", code, "/x/guard.py", config], start_new_session=True)
    limit = time.monotonic() + 30
    while b"guard.py" not in Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < limit:
        time.sleep(0.01)
    return process


def test_stop_signals_no_process_that_is_not_its_guard(
    by_hand: Make, victim: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "_APPEARS", 0.2)
    made = by_hand().alive()
    for text in (f"{victim.pid}", "-1", "1 or 2"):
        (made.path / run_directory.LOCK).write_text(text)
        with pytest.raises(ValueError, match="has no guard among the processes here"):
            Run.load(made.path).stop()


def test_what_others_call_a_guard_is_passed_over(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can give a process any command, and process 1 is nobody's to signal."""
    run = Run.load(by_hand(id="a").path)
    odd = [{"node": "x"}, {"node": [1]}, {"run_dir": 1}, {"node": 5, "id": "a", "run_dir": str(run.path)}, {}]
    commands = [*(f"guard.py {json.dumps(config)}" for config in odd), "guard.py {", "guard.py {" + '"":[' * 100_000]
    monkeypatch.setattr(guards, "_commands", lambda: ((os.getpid(), command) for command in commands))
    monkeypatch.setattr(os, "getsid", lambda pid: pid)
    assert guards.find_guard(run.path.resolve(), "a") == os.getpid()
    assert guards.find_guard(run.path.resolve(), "b") is None

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    monkeypatch.setattr(os, "kill", refuse)
    assert guards.end_guard(lambda: 1, lambda: True, 0.1) == "late"


def test_a_guard_is_known_by_its_run_and_directory(by_hand: Make) -> None:
    run, other = Run.load(by_hand(id="a").path), Run.load(by_hand(id="b").path)
    process = pretended(run.path, "a")
    try:
        assert guards.find_guard(run.path.resolve(), "a") == guards.find_guard(run.path.resolve(), None) == process.pid
        assert guards.find_guard(run.path.resolve(), "b") is None
        assert guards.find_guard(other.path.resolve(), "a") is None
        assert guards.end_guard(lambda: guards.find_guard(run.path.resolve(), "a"), lambda: process.poll() is None, 20) == "ended"
        assert process.poll() == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_directory_that_goes_away_while_the_run_goes_on(by_hand: Make) -> None:
    made = by_hand(id="gone", name="vanished").alive()
    run, again = Run.load(made.path), Run.load(made.path)
    process = pretended(made.path, "gone")
    try:
        shutil.rmtree(made.path)
        assert run.summary.endswith("was deleted or moved while it runs; its processes still run, and run.stop() ends them")
        assert "run.stop() ends them" in str(run)
        assert "run.stop() ends them" in run._repr_mimebundle_()["text/plain"]
        with pytest.raises(RunGoneError, match=r"run\.stop\(\) ends them"):
            run.wait()
        stopping = threading.Thread(target=run.stop)
        stopping.start()
        process.wait(30)
        stopping.join(30)
        assert run.state == "stopped"
        assert again.summary.endswith("was deleted or moved before its end was seen")
        assert again.stop(5).state == "lost"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("outside", ["../../../etc", "/etc", "../..", "000/../..", 5])
def test_no_path_leads_out_of_the_directory(by_hand: Make, outside: Any) -> None:
    with pytest.raises(DamagedRunError, match="launch_dir"):
        Run.load(by_hand(launch_dir=outside).path)


@pytest.mark.parametrize("number", ["", "a\0b", "a\nb", "x" * 300, 7, None])
def test_the_id_of_a_run_is_text(by_hand: Make, number: Any) -> None:
    with pytest.raises(DamagedRunError, match="its id is"):
        Run.load(by_hand(id=number).path)


@pytest.mark.parametrize("number", ["/../../home/x", "team/7"])
def test_an_id_with_a_slash_is_read_and_becomes_no_path(by_hand: Make, number: str) -> None:
    """Earlier versions took it from torchrun's --rdzv-id; torchrun names a folder of logs after it."""
    run = Run.load(by_hand(id=number).path)
    assert run.id == number
    command = environment.torchrun(1, run.path, ["train.py"], run.id)
    assert "/" not in command[command.index("--rdzv-id") + 1]


@pytest.mark.parametrize("number", ["/../../etc", "../x", "x/../y"])
def test_the_guard_deletes_no_folder_but_that_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: deleted.append(path))
    guard.remove_temporary({"id": number})
    guard.remove_temporary({"id": "0123456789abcdef"})
    assert {os.path.dirname(os.path.normpath(path)) for path in deleted} == {tempfile.gettempdir()}
    assert [os.path.basename(path)[:5] for path in deleted] == ["pymp-", "pymp-"]
    assert os.path.basename(deleted[1]) == "pymp-0123456789ab-0"


@pytest.mark.parametrize("job", ["--user=me", "7 8", "all", "7;rm", -7])
def test_a_job_is_a_number(by_hand: Make, job: Any) -> None:
    made = by_hand(batch={"system": "slurm"})
    run_directory.write_json(made.path / run_directory.JOB, {"job": job})
    with pytest.raises(DamagedRunError, match="is not a job number"):
        Run.load(made.path)


def test_the_job_of_another_directory_is_not_cancelled(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def call(program: str, *words: str, **more: Any) -> tuple[int, str]:
        called.append(program)
        return 0, f"JobId=7 JobState=RUNNING Command={script} WorkDir=/somewhere"

    monkeypatch.setattr(slurm_queue, "call", call)
    made = by_hand(batch={"system": "slurm"})
    run_directory.write_json(made.path / run_directory.JOB, {"job": "7"})
    script = "/home/you/your own/job.sh"
    with pytest.raises(ValueError, match=r"job 7 is not that of .*: it runs /home/you/your own/job.sh. Nothing was cancelled"):
        Run.load(made.path).stop()
    assert "scancel" not in called
    script = str(made.path / run_directory.JOB_SCRIPT)
    slurm_queue.Job(made.path, "7").cancel()
    assert "scancel" in called


# --- what is shown


def shown(run: Run) -> str:
    """All that a notebook shows of a run, as one text."""
    pytest.importorskip("anywidget")
    from workbench.runs.panel import html
    from workbench.runs.panel.panel import RunPanel

    assert run.error
    texts = [RunPanel(run)._repr_mimebundle_()["text/html"], wb.list_runs(run.path.parent)._repr_html_(), html.failure(run.error)]
    return "\n".join([*texts, *(timeline._repr_html_() for timeline in run.timelines)])


@pytest.mark.parametrize("place", ["name", "host", "message", "traceback", "note", "device", "log", "metric"])
def test_words_of_somebody_else_are_text_and_no_html(by_hand: Make, place: str) -> None:
    made = by_hand(**({place: EVIL} if place in ("name", "host") else {})).steps(20).steps(20, rank=1).losses(10)
    with open(made.path / run_directory.rank_file(0), "a") as rows:
        if place == "note":
            rows.write(json.dumps({"note": EVIL}) + "\n")
        if place == "device":
            rows.write(json.dumps({"rank": 0, "world_size": 2, "clock": "host", "pid": 1, "device": EVIL}) + "\n")
    if place == "metric":
        with open(made.path / run_directory.METRICS, "a") as rows:
            rows.write(json.dumps({"step": EVIL, "steps": EVIL, "loss": EVIL, EVIL: EVIL}) + "\n")
            rows.write(json.dumps({"step": 20, "steps": 20, EVIL: 1.0}) + "\n")
    if place == "log":
        made.log(0, f"{EVIL}\n", "stderr")
    (made.path / run_directory.ERRORS).mkdir()
    record = {"rank": 0, "time_ns": 1, "kind": "exception", "message": "ValueError: boom", "traceback": "Traceback", "consequence": False}
    if place in record:
        record[place] = EVIL
    run_directory.write_json(made.path / run_directory.ERRORS / "rank0.json", record)
    made.ended("failed", returncode=1)
    html = shown(Run.load(made.path))
    assert html
    assert harmful(html) == []


@pytest.mark.parametrize("state", [EVIL, "running away", "Finished", ""])
def test_a_state_that_there_is_not_is_damage(by_hand: Make, state: str) -> None:
    with pytest.raises(DamagedRunError, match="its outcome has no state"):
        Run.load(by_hand(outcome={"state": state, "seconds": 1.0}).path)


def test_what_is_read_changes_nothing_outside(by_hand: Make, tmp_path: Path) -> None:
    """Every file of a run directory is a link to the same file elsewhere, and the folders, too."""
    mine, evil = tmp_path / "mine", by_hand().steps(20).steps(20, rank=1).losses(20).log(0, "words").ended("finished").path
    shutil.copytree(evil, mine)
    for path in sorted(evil.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        path.symlink_to(mine / path.name)
    (evil / run_directory.CHECKPOINTS).symlink_to(mine)
    before = {path: path.read_bytes() for path in sorted(mine.rglob("*")) if path.is_file()}
    run = Run.load(evil)
    assert (run.state, len(run.timelines), len(run.metric_rows)) == ("finished", 2, 20)
    assert run.summary
    assert run.logs(0)
    assert {path: path.read_bytes() for path in sorted(mine.rglob("*")) if path.is_file()} == before


# --- to resume is to execute


def test_the_command_is_made_anew_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ended(tmp_path / "run", cwd=str(tmp_path))
    evil = ["/bin/sh", "-c", f"touch {tmp_path / 'executed'}", str(path)]
    info = run_directory.read_json(path / run_directory.RUN_JSON)
    run_directory.write_json(path / run_directory.RUN_JSON, info | {"command": evil, "environment": {"set": {"LD_PRELOAD": "evil.so"}}})
    started: list[tuple[dict[str, Any], dict[str, str]]] = []
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda self, info, environ, lock: started.append((info, environ)))
    wb.launch(resume=path)
    ((info, environ),) = started
    assert info["command"][0] == sys.executable
    assert "sh" not in info["command"]
    assert "LD_PRELOAD" not in environ


def test_who_joins_runs_the_spec_and_not_the_program_that_stands_there(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    evil = {"program": ["--no-python", "/bin/sh"], "path": str(path), "batch": None, "timeout": None}
    info = run_directory.read_json(path / run_directory.RUN_JSON) | evil
    config, environ = nodes._prepared(path, info, Rendezvous(nnodes=2, endpoint="127.0.0.1:9"), 1)
    assert config["command"][-4:] == entrypoint(TRAIN, path)
    assert "/bin/sh" not in config["command"]
    assert environ[run_directory.ENV_RUN_ID] == info["id"]
    assert run_directory.ENV_ALARM not in environ
    asked = info | {"environment": {"set": {run_directory.ENV_ALARM: "always", "LD_PRELOAD": "evil.so"}, "removed": []}}
    _, environ = nodes._prepared(path, asked, Rendezvous(nnodes=2, endpoint="127.0.0.1:9"), 1)
    assert environ[run_directory.ENV_ALARM] == "always"
    assert "LD_PRELOAD" not in environ


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("what", [".", run_directory.RUN_JSON])
def test_a_run_of_another_user_is_not_executed(tmp_path: Path, what: str) -> None:
    path = ended(tmp_path / "run")
    os.chown(path / what, 12345, -1)
    with pytest.raises(LaunchError, match=r"belongs to another user \(number 12345\).* would execute what the run names, text-gpt, as you"):
        wb.launch(resume=path)
    info = run_directory.read_json(path / run_directory.RUN_JSON) | {
        "outcome": None,
        "rendezvous": {"nnodes": 2, "endpoint": "127.0.0.1:9"},
    }
    (path / run_directory.RUN_JSON).write_text(json.dumps(info))
    with pytest.raises(LaunchError, match=r"belongs to another user \(number 12345\)"):
        nodes.join(path)


@pytest.mark.parametrize(
    ("task", "inside"), [("evil.py:build", "."), ("text-gpt", "."), ("text-gpt", "000"), ("{path}/evil.py:build", ".."), ("mod:build", ".")]
)
def test_code_that_came_with_the_directory_is_not_executed(tmp_path: Path, task: str, inside: str) -> None:
    path = tmp_path / "run"
    (path / "000").mkdir(parents=True)
    (path / "evil.py").write_text("raise SystemExit('executed')")
    spec = wb.RunSpec(task="text-gpt", device="cpu", checkpoint_every=5).replace(task=task.format(path=path))
    ended(path, spec, cwd=str(path / inside))
    with pytest.raises(LaunchError, match="inside its own run directory, where a launch never puts code"):
        wb.launch(resume=path)


@pytest.mark.parametrize("name", ["{name}", "/proc/self/cwd/{name}", "./{name}"])
def test_a_directory_is_known_by_the_name_that_its_launch_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = ended(tmp_path / "run", command=["torchrun", name.format(name="run")])
    with pytest.raises(LaunchError, match="was not launched as a run of its own in this place"):
        wb.launch(resume=path)


@pytest.mark.parametrize("name", [run_directory.RESERVE, run_directory.LOCK, run_directory.RUN_JSON, "rank0.jsonl"])
def test_no_file_outside_is_written_by_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = ended(tmp_path / "run", cwd=str(tmp_path))
    mine = tmp_path / "mine"
    mine.write_bytes((path / name).read_bytes() if (path / name).exists() else b"{}\n")
    before = mine.read_bytes()
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(mine)
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda self, info, environ, lock: None)
    if name == run_directory.LOCK:
        with pytest.raises(LaunchError, match="cannot be written to"):
            wb.launch(resume=path)
    elif name == "rank0.jsonl":
        with pytest.raises(OSError, match="symbolic links"):
            run_directory.LineWriter(path / name)
    else:
        wb.launch(resume=path)
    assert mine.read_bytes() == before


def test_what_is_no_run_is_not_resumed() -> None:
    with pytest.raises(LaunchError, match="resume=3: expected a run that has ended, or the path of its directory"):
        wb.launch(resume=3)  # type: ignore[call-overload, unused-ignore]


def test_a_run_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        made = new_run.NewRun(tmp_path / "runs", "x")
    finally:
        os.umask(before)
    assert made.path.stat().st_mode & 0o777 == 0o700


class Executed:
    """What a pickle of this would do to who unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_checkpoint_is_never_unpickled(tmp_path: Path) -> None:
    import torch

    from workbench.train import checkpoint_file

    path, mark = tmp_path / "step00000001.pt", tmp_path / "executed"
    torch.save({"step": 1, "model": Executed(mark)}, path)
    with pytest.raises(checkpoint_file.UnusableCheckpointError):
        checkpoint_file.load(path, torch.device("cpu"))
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # it would have
