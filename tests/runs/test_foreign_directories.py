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


EVIL = "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\ndef rate(step):\n    return 1.0\n"


def test_a_schedule_of_somebody_else_is_text_until_the_run_goes_on(by_hand: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that reads, shows, compares, draws or estimates imports it, and a directory that has it inside does not go on."""
    spec = wb.RunSpec(task="fashion-mlp", device="cpu", steps=20, schedule="{path}/evil.py:rate", checkpoint_every=5)
    made = [by_hand(spec=spec.replace(schedule=f"{tmp_path}/evil.py:rate").to_json()).steps(20).losses(20) for _ in range(2)]
    (tmp_path / "evil.py").write_text(EVIL)
    run = Run.load(made[0].path)
    assert "evil.py:rate" in repr(run.spec)
    assert "evil" in shown(run) + str(run.spec)
    assert wb.compare(run, made[1].path) is not None
    with pytest.raises(ValueError, match=r"is a function of your own, and drawing a spec, .* imports nothing"):
        wb.plot.schedule(run.spec)
    assert wb.estimate_memory(run.spec, device="H100").total > 0
    path = ended(tmp_path / "run", spec.replace(schedule=f"{tmp_path}/run/evil.py:rate"), cwd=str(tmp_path))
    (path / "evil.py").write_text(EVIL)
    with pytest.raises(LaunchError, match=r"would run code from .*evil\.py, inside its own run directory"):
        wb.launch(resume=path)
    ours = by_hand(spec=spec.replace(schedule=f"{tmp_path}/runs/002/evil.py:rate").to_json()).steps(20)
    (ours.path / "evil.py").write_text(EVIL)
    with pytest.raises(LaunchError, match="inside its own run directory"):
        wb.sanity(ours.path)
    assert not [*tmp_path.rglob("executed")]


@pytest.mark.parametrize("name", ["{name}", "/proc/self/cwd/{name}", "./{name}"])
def test_a_directory_is_known_by_the_name_that_its_launch_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = ended(tmp_path / "run", command=["torchrun", name.format(name="run")])
    with pytest.raises(LaunchError, match="is a directory that was moved or copied"):
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
    with pytest.raises(LaunchError, match=f"{name} is a symbolic link to .*/mine: a run that goes on would write there"):
        wb.launch(resume=path)
    if name == "rank0.jsonl":
        with pytest.raises(OSError, match="symbolic links"):
            run_directory.LineWriter(path / name)
    assert mine.read_bytes() == before


@pytest.mark.parametrize(
    "name", [run_directory.CHECKPOINTS, run_directory.NEXT, run_directory.FINGERPRINTS, "run.json.guard.part", "attempts"]
)
def test_a_run_with_links_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its guard writes into next.json, and its ranks write and delete checkpoints: through a link, those of somebody else."""
    started = list[Any]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda self, info, environ, lock: started.append(info))
    path = ended(tmp_path / "run", cwd=str(tmp_path))
    mine = tmp_path / "mine"
    if (path / name).exists():
        (path / name).rename(mine)
    else:
        mine.mkdir()
    (path / name).symlink_to(mine)
    with pytest.raises(LaunchError, match=f"{name} is a symbolic link to {mine}: .* runs_dir="):
        wb.launch(resume=path)
    info = {
        **run_directory.read_json(path / run_directory.RUN_JSON),
        "outcome": None,
        "rendezvous": {"nnodes": 2, "endpoint": "127.0.0.1:9"},
    }
    run_directory.write_json(path / run_directory.RUN_JSON, info)
    with pytest.raises(LaunchError, match="is a symbolic link"):
        nodes.join(path)
    assert not started


@pytest.mark.parametrize(
    "name",
    [
        f"{run_directory.CHECKPOINTS}/step00000004.pt",
        f"{run_directory.FINGERPRINTS}/rank0-1.jsonl",
        f"{run_directory.LOGS}/none/attempt_0/0/stdout.log",
        f"attempts/0/{run_directory.ERRORS}",
    ],
)
def test_links_in_the_folders_of_a_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A checkpoint or a file of digests that lies elsewhere is not what the run has written."""
    started = list[Any]()
    monkeypatch.setattr(new_run.NewRun, "_start_guard", lambda self, info, environ, lock: started.append(info))
    path = ended(tmp_path / "run", cwd=str(tmp_path))
    mine = tmp_path / "mine"
    mine.mkdir()
    link = path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(mine)
    for take in (lambda: wb.launch(resume=path), lambda: wb.recompute(path), lambda: wb.replay(path, 1)):
        with pytest.raises(LaunchError, match=f"{name} is a symbolic link to {mine}: .* or read what lies there"):
            take()
    link.unlink()
    of_task = path / "wandb" / "latest-run"  # a task may keep what it likes in folders of its own
    of_task.parent.mkdir()
    of_task.symlink_to(mine)
    wb.launch(resume=path)
    assert len(started) == 1


# --- to repeat a run, or to ask its task, is to execute, too


def repeats(path: Path) -> dict[str, Callable[[], object]]:
    """What executes the task that a run names, beside `launch(resume=…)` and `join`."""
    return {
        "replay": lambda: wb.replay(path, 1),
        "sanity": lambda: wb.sanity(path),
        "would_fit": lambda: wb.would_fit(path),
        "what_changed": lambda: wb.what_changed(path, path.with_name("other")),
    }


def repeatable(by_hand: Make, **more: Any) -> Path:
    """A run that could be repeated, and asked what would have fitted; and another, slower one."""
    slow = by_hand(**more, outcome={"state": "finished", "seconds": 1.0}).steps(20, forward=0.5)
    made = by_hand(**more, outcome={"state": "failed", "returncode": 1, "seconds": 1.0}).steps(20).losses(20)
    slow.path.rename(slow.path.with_name("other"))
    (made.path / run_directory.ERRORS).mkdir()
    said = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free."  # noqa: E501
    record = {"rank": 0, "time_ns": 1, "kind": "oom", "message": said, "traceback": None, "consequence": False}
    run_directory.write_json(made.path / run_directory.ERRORS / "rank0.json", record)
    return made.path


@pytest.mark.parametrize("call", ["replay", "sanity", "would_fit", "what_changed"])
def test_code_that_came_with_a_run_is_not_executed_to_repeat_it(by_hand: Make, tmp_path: Path, call: str) -> None:
    path = repeatable(by_hand, spec=wb.RunSpec(task=f"{tmp_path}/runs/001/evil.py:build", device="cpu", steps=20).to_json())
    (path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef build(): pass\n")
    with pytest.raises(LaunchError, match="inside its own run directory, where a launch never puts code"):
        repeats(path)[call]()
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("call", ["replay", "sanity", "would_fit", "what_changed"])
def test_a_run_of_another_user_is_not_repeated(by_hand: Make, call: str) -> None:
    path = repeatable(by_hand, spec=wb.RunSpec(task="text-gpt", device="cpu", steps=20).to_json())
    os.chown(path, 12345, -1)
    with pytest.raises(LaunchError, match="belongs to another user"):
        repeats(path)[call]()


def test_the_interpreter_of_a_run_directory_is_not_executed(by_hand: Make, tmp_path: Path) -> None:
    path = repeatable(by_hand, command=[f"{tmp_path}/runs/001/python"])
    (path / "python").symlink_to("/bin/true")
    with pytest.raises(LaunchError, match=r"would run code from .*/001/python"):
        wb.what_changed(path, path.with_name("other"))


def test_comparing_two_runs_asks_no_repository(by_hand: Make, tmp_path: Path) -> None:
    """git executes what the settings of a repository name, and a run names the folder."""
    repository, mark = tmp_path / "repository", tmp_path / "executed"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@e"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"], ["config", "core.fsmonitor", f"touch {mark}; false"]):
        subprocess.run([*git, *words], check=True)
    mark.unlink(missing_ok=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    path = repeatable(by_hand, cwd=str(repository), git={"commit": commit, "dirty": False}, spec=wb.RunSpec(task="t.py:build").to_json())
    found = wb.what_changed(path, path.with_name("other"), rerun=False)
    assert found.kind == "not run"
    assert not mark.exists()
    subprocess.run([*git, "status"], check=True, capture_output=True)
    assert mark.exists()  # it would have


# --- values of other types


@pytest.mark.parametrize(
    ("name", "value"),
    [("exits", "x"), ("exits", {"x": 1}), ("exits", {"0": "x"}), ("stopped_ns", {}), ("seconds", {}), ("seconds", "x"), ("nodes", {"1": 5}),
     ("kernel", [1]), ("kernel", "x"), ("oom_kills", "x"), ("memory_limit", []), ("error", "x"), ("clocks", {"0": None})],
)  # fmt: skip
def test_an_outcome_of_other_types_is_damage(by_hand: Make, name: str, value: Any) -> None:
    with pytest.raises(DamagedRunError, match=f"the {name} of its outcome is "):
        Run.load(by_hand(outcome={"state": "failed", "seconds": 1.0, name: value}).path)


@pytest.mark.parametrize("layout", [5, {"nproc_per_node": "x"}, {"micro_batch": None}])
def test_a_layout_of_other_types_is_damage(by_hand: Make, layout: Any) -> None:
    with pytest.raises(DamagedRunError, match="its layout is "):
        Run.load(by_hand(layout=layout).path)


def test_what_an_outcome_says_of_an_error_and_of_machines_is_taken_as_far_as_it_is_sound(by_hand: Make) -> None:
    error = {"rank": [], "kind": 7, "message": "boom", "memory": {"a": 1}, "b": 2}
    made = by_hand(outcome={"state": "failed", "seconds": 1.0, "error": error})
    assert str(Run.load(made.path).error) == "boom"
    made = by_hand(outcome={"state": "failed", "seconds": 1.0, "nodes": {"1": {"state": "silent"}, "2": {}}})
    for node, text in (("x", "{}"), ("1", '{"ranks": 5}'), ("2", "[]")):
        (made.path / run_directory.NODES / node).mkdir(parents=True)
        (made.path / run_directory.NODES / node / run_directory.NODE_JSON).write_text(text)
    (made.path / "logs" / "none" / "attempt_0" / "x").mkdir(parents=True)
    (made.path / "logs" / "none" / "attempt_0" / "x" / "stdout.log").write_text("words")
    run = Run.load(made.path)
    assert "machine 1 (None) died or was cut off" in str(run.error)
    assert run.summary
    assert run.logs() == ""


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
