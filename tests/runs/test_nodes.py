"""Runs on several machines: who joins, how they meet or do not, what is said when one is lost. The machines are processes here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade, processes_with
from workbench.core import run_directory
from workbench.runs import slurm_queue
from workbench.runs.launch import guard, nodes
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.rendezvous import Rendezvous, RendezvousError, free_endpoint
from workbench.runs.root_cause import first_failure
from workbench.runs.spec import ScriptSpec, SpecError

SCRIPTS = Path(__file__).parents[1] / "scripts"
SPEC = wb.RunSpec(task=f"{SCRIPTS / 'tiny_task.py'}:build", device="cpu", steps=12, micro_batch=8)


def joined(run: wb.Run) -> "subprocess.Popen[str]":
    """The second machine."""
    words = [sys.executable, "-m", *run.join_command.split()]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def gone(run: wb.Run) -> None:
    limit = time.monotonic() + 20
    while processes_with(run_directory.ENV_RUN_ID, run.id) and time.monotonic() < limit:
        time.sleep(0.05)
    assert processes_with(run_directory.ENV_RUN_ID, run.id) == []
    assert not list(Path(tempfile.gettempdir()).glob(f"pymp-{run.id[:12]}*"))


# --- the numbers


def test_the_world_is_all_machines() -> None:
    spec = wb.RunSpec(task="text-gpt", nnodes=3, nproc_per_node=4, micro_batch=2, accumulation=5, tensor_parallel=2)
    assert (spec.world_size, spec.data_ranks, spec.global_batch) == (12, 6, 60)
    assert wb.RunSpec.from_json(spec.to_json()) == spec
    assert ScriptSpec(script="x.py", nnodes=2, nproc_per_node=2).world_size == 4
    old = {name: value for name, value in spec.to_json().items() if name not in ("nnodes", "checkpoint_every")}
    assert wb.RunSpec.from_json(old).nnodes == 1


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"nnodes": 0}, "nnodes=0: a whole number of at least 1"),
        ({"nnodes": 3, "nproc_per_node": 1, "tensor_parallel": 2}, r"does not divide the 3 ranks \(nnodes × nproc_per_node\)"),
        ({"checkpoint_every": 0}, "checkpoint_every=0: a whole number of at least 1"),
    ],
)
def test_knobs_that_are_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        SPEC.replace(**knobs)


@pytest.mark.parametrize("endpoint", ["host", "host:", ":29400", "host:0", "host:port", "host:70000"])
def test_an_endpoint_that_is_none(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="expected host:port"):
        wb.launch(SPEC, nnodes=2, rdzv_endpoint=endpoint, runs_dir=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rdzv_endpoint": "a:1"}, "rdzv_endpoint='a:1' with one machine"),
        ({"nnodes": 2, "rdzv_timeout": 0}, "rdzv_timeout=0: seconds above 0 are allowed$"),
        ({"on": wb.Slurm(nodes=2), "nnodes": 3}, r"nnodes=3 with Slurm\(nodes=2\)"),
        ({"on": wb.Slurm(requeue=True)}, "add checkpoint_every=100"),
        ({"on": wb.Slurm(), "rdzv_endpoint": "a:1"}, "the job chooses one"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=said):
        wb.launch(SPEC, runs_dir=tmp_path / "runs", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_works_on_one_machine_says_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"nnodes=2: several machines are for wb.launch.* nproc_per_node=2"):
        wb.sweep(SPEC.replace(nnodes=2), micro_batch=[4, 8], runs_dir=tmp_path)


def test_torchrun_is_told_who_hosts_and_where_it_listens() -> None:
    meeting = Rendezvous(nnodes=2, endpoint="127.0.0.1:29400", timeout=9)
    words = meeting.flags(1)
    assert words[:6] == ["--nnodes", "2", "--rdzv-backend", "workbench", "--rdzv-endpoint", "127.0.0.1:29400"]
    assert words[6:] == ["--rdzv-conf", "rank=1,timeout=9"]
    assert meeting.flags(0)[-1] == "rank=0,timeout=9,listen=127.0.0.1"
    assert Rendezvous(nnodes=2, endpoint="[::1]:5").host == "::1"
    assert int(free_endpoint("x").removeprefix("x:")) > 0


# --- machines that meet


def test_two_machines_train_one_spec(tmp_path: Path) -> None:
    run = wb.launch(SPEC, nnodes=2, nproc_per_node=1, runs_dir=tmp_path, rdzv_timeout=120, checkpoint_every=4)
    assert run.join_command == f"workbench join {run.path}"
    assert "machines are here; on each of the others: workbench join" in run.summary
    assert repr(run) == "Run('tiny_task-build', nnodes=2, nproc_per_node=1)"
    other = joined(run)
    run.wait(180)
    said, _ = other.communicate(timeout=60)
    assert run.ok, (run, run.logs(), said)
    assert other.returncode == 0
    assert "machine 1 of 2 of tiny_task-build: meeting at " in said
    assert [timeline.rank for timeline in run.timelines] == [0, 1]
    assert run.metric_rows[-1]["samples"] == 12 * 16
    assert all(run.logs(rank).startswith(f"rank {rank} of 2 on cpu") for rank in (0, 1))
    assert sorted(rank for node in run.nodes for rank in node["ranks"].values()) == [0, 1]
    assert sorted(path.name for path in (run.path / run_directory.CHECKPOINTS).iterdir()) == ["step00000008.pt", "step00000012.pt"]
    gone(run)
    with pytest.raises(LaunchError, match=r"has ended \(finished\)"):
        nodes.join(run.path)


def test_a_machine_that_does_not_come(tmp_path: Path) -> None:
    run = wb.launch(SPEC, nnodes=2, runs_dir=tmp_path, rdzv_timeout=2).wait(180)
    assert run.state == "failed"
    assert run.error.kind == "rendezvous"
    assert "machine 1 did not come within 2 s (rdzv_timeout)" in run.error.message
    assert f"workbench join {run.path}" in run.error.hint
    gone(run)


@pytest.mark.slow
def test_an_end_on_one_machine_is_an_end_on_all(tmp_path: Path) -> None:
    run = wb.launch(SPEC, nnodes=2, runs_dir=tmp_path, steps=10_000_000, rdzv_timeout=120)
    other = joined(run)
    limit = time.monotonic() + 180
    while not run.metric_rows and run.state == "running" and time.monotonic() < limit:
        time.sleep(0.1)
    assert run.state == "running", run
    with pytest.raises(LaunchError, match="has all of its 2 machines"):
        nodes.join(run.path)
    run.stop(60)
    assert run.state == "stopped"
    other.communicate(timeout=60)
    assert other.returncode == 1
    assert json.loads((run.path / "nodes" / "1" / "node.json").read_text())["outcome"]["state"] in ("stopped", "failed")
    gone(run)


@pytest.mark.slow
def test_when_a_machine_is_lost_a_new_run_goes_on_with_the_other(tmp_path: Path) -> None:
    run = wb.launch(SPEC, nnodes=2, runs_dir=tmp_path, steps=10_000_000, rdzv_timeout=120, checkpoint_every=20)
    other = joined(run)
    limit = time.monotonic() + 180
    while len(list(run.path.glob("checkpoints/step*.pt"))) < 2 and run.state == "running" and time.monotonic() < limit:
        time.sleep(0.1)
    assert run.state == "running", run
    for pid in (*guard.descendants(other.pid, run.id), other.pid):
        os.kill(pid, signal.SIGKILL)
    other.communicate(timeout=60)
    run.wait(120)
    assert run.state == "failed"
    for folder in Path(tempfile.gettempdir()).glob(f"pymp-{run.id[:12]}*"):  # of the machine that is lost
        shutil.rmtree(folder)
    gone(run)
    left = wb.launch(run.spec.replace(nnodes=1, accumulation=2), resume=run, runs_dir=tmp_path)
    limit = time.monotonic() + 180
    while not left.metric_rows and left.state == "running" and time.monotonic() < limit:
        time.sleep(0.1)
    left.stop(60)
    assert left.metric_rows, (left, left.logs())
    first = left.metric_rows[0]
    assert first["step"] > 20
    assert first["step"] % 20 == 1
    assert first["samples"] == first["step"] * 16  # as many in a step as on two machines


def test_nobody_to_join(tmp_path: Path, by_hand: Any) -> None:
    with pytest.raises(LaunchError, match="is a run of one machine"):
        nodes.join(by_hand().path)
    with pytest.raises(run_directory.DamagedRunError, match="is not a run directory"):
        nodes.join(tmp_path)


# --- guards that hear each other


class Places:
    """A run directory with what guards of other machines have said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for rank in range(3):
            (path / "nodes" / str(rank)).mkdir(parents=True)

    def peers(self, rank: int = 0, silence: float = 60.0, **more: Any) -> guard.Peers:
        node = {"rank": rank, "members": [0, 1, 2], "name": f"host{rank}", "silence": silence, "attempt": 0, "lost": {}}
        return guard.Peers({"run_dir": str(self.path), "node": node, **more})

    def say(self, rank: int, state: str | None, beat: int = 1, **more: Any) -> None:
        outcome = state and {"state": state, "exits": {}, **more}
        value = {"rank": rank, "name": f"host{rank}", "clock": 1000 * rank, "ranks": {"0": rank}, "outcome": outcome}
        (self.path / "nodes" / str(rank) / "node.json").write_text(json.dumps(value))
        (self.path / "nodes" / str(rank) / "beat").write_text(f"{beat}\n")


def test_a_guard_goes_on_while_the_others_beat(tmp_path: Path) -> None:
    places, deaths = Places(tmp_path), guard.Deaths(0, 0)
    peers = places.peers()
    for second in range(200):
        places.say(1, None, beat=second)
        assert peers.look(float(second), deaths) == ""  # machine 2 has not come: that is torchrun's to say
    assert (tmp_path / "nodes" / "0" / "beat").read_text() == "200\n"


@pytest.mark.parametrize(("state", "at"), [("stopped", 0), ("timeout", 0), ("failed", guard.LEAVE)])
def test_a_guard_stops_when_another_part_has_ended_badly(tmp_path: Path, state: str, at: float) -> None:
    places, deaths = Places(tmp_path), guard.Deaths(0, 0)
    peers = places.peers(rank=1)
    places.say(0, state)
    seen = {second: peers.look(float(second), deaths) for second in range(30)}
    assert peers.cause == (None if state == "failed" else 0)
    first = min(second for second, why in seen.items() if why)
    assert seen[first] == state
    assert at <= first <= at + 2


def test_a_guard_stops_when_a_machine_is_silent(tmp_path: Path) -> None:
    places, deaths = Places(tmp_path), guard.Deaths(0, 0)
    peers = places.peers(silence=20.0)
    places.say(1, "finished")  # who has ended well need not beat
    places.say(2, None)
    assert [peers.look(float(second), deaths) for second in (0, 10, 20)] == ["", "", ""]
    assert peers.look(22.0, deaths) == "failed"


def test_a_guard_of_a_run_that_restarts_survives_the_end_of_a_join(tmp_path: Path) -> None:
    places, deaths = Places(tmp_path), guard.Deaths(0, 0)
    places.say(1, "abandoned")
    peers = places.peers(rank=2, restart=["program"])
    seen = [peers.look(float(second), deaths) for second in range(12)]
    assert (seen[0], seen[-1], peers.cause) == ("", "failed", None)  # not "abandoned", which ends the run
    peers.regrouping = True
    assert peers.look(20.0, deaths) == ""  # that is the program's to judge now
    places.say(0, "stopped")
    assert peers.look(30.0, deaths) == "stopped"


def test_what_a_machine_said_in_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    places, deaths = Places(tmp_path), guard.Deaths(0, 0)
    node = {"rank": 0, "members": [0, 1], "name": "host0", "silence": 60.0, "attempt": 1, "lost": {}}
    peers = guard.Peers({"run_dir": str(tmp_path), "node": node})
    places.say(1, "failed")
    assert {peers.look(float(second), deaths) for second in range(60)} == {""}
    assert peers.look(70.0, deaths) == "failed"  # but it has to beat


def test_alone_nothing_is_written(tmp_path: Path) -> None:
    peers = guard.Peers({"run_dir": str(tmp_path)})
    peers.publish(ranks={0: 0})
    assert peers.look(1e9, guard.Deaths(0, 0)) == ""
    assert peers.conclude({"state": "finished"}) == {"state": "finished"}
    assert list(tmp_path.iterdir()) == []


def test_the_last_words_of_all_become_one_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "QUIET", 0.2)
    places = Places(tmp_path)
    peers = places.peers()
    places.say(1, "failed", exits={"1": 50})
    places.say(2, None)
    found = peers.conclude({"state": "finished", "exits": {"0": 70}})
    assert found["state"] == "failed"
    assert {rank: node["state"] for rank, node in found["nodes"].items()} == {1: "failed", 2: "silent"}
    shift = 1000 - peers._status["clock"]
    assert found["exits"] == {"0": 70, "1": 50 + shift}
    assert found["clocks"] == {"1": shift, "2": shift + 1000}


def test_errors_are_ordered_over_machines_whose_clocks_differ(by_hand: Any) -> None:
    run: HandMade = by_hand()
    (run.path / "errors").mkdir()
    for rank, time_ns in ((0, 5_000), (1, 900_000)):
        value = {
            "rank": rank,
            "time_ns": time_ns,
            "kind": "exception",
            "message": f"ValueError: {rank}",
            "traceback": "",
            "consequence": False,
        }
        run_directory.write_json(run.path / "errors" / f"rank{rank}.json", value)
    assert first_failure(run.path, {"state": "failed"}).rank == 0
    assert first_failure(run.path, {"state": "failed", "clocks": {"1": -899_000}}).rank == 1


def test_the_machine_whose_join_ended_is_named(tmp_path: Path, by_hand: Any) -> None:
    places = Places(tmp_path / "shared")
    places.say(1, "abandoned", cause=2)  # it has heard of the end of machine 2 before this one did
    peers = places.peers()
    assert peers.look(0.0, guard.Deaths(0, 0)) == "abandoned"
    assert peers.cause == 2
    run = by_hand()
    nodes = {"1": {"name": "node06", "state": "abandoned"}, "2": {"name": "node07", "state": "abandoned"}}
    found = first_failure(run.path, {"state": "abandoned", "nodes": nodes, "cause": 2})
    assert found.message == "stopped because workbench join ended on machine 2 (node07)"
    assert "process that launched it ended" in first_failure(run.path, {"state": "abandoned", "nodes": nodes}).message


def test_a_machine_without_a_last_word_is_to_blame(by_hand: Any) -> None:
    run: HandMade = by_hand()
    (run.path / "errors").mkdir()
    message = "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:35211"
    run_directory.write_json(
        run.path / "errors" / "rank0.json",
        {"rank": 0, "time_ns": 1, "kind": "exception", "message": message, "traceback": "…", "consequence": True},
    )
    outcome = {"state": "failed", "nodes": {"1": {"name": "node07", "state": "silent"}}}
    found = first_failure(run.path, outcome)
    assert (found.rank, found.kind) == (None, "node")
    assert found.message.startswith("machine 1 (node07) died or was cut off")
    assert "Connection closed by peer" in found.message
    outcome["nodes"]["1"]["state"] = "failed"
    assert first_failure(run.path, outcome).rank == 0


# --- what Slurm says, by programs that stand in for it


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make Slurm say something: `slurm(scontrol="echo …")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(slurm_queue, "POLL", 0.0)

    def make(**programs: str) -> None:
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return make


def batch_run(by_hand: Any, **info: Any) -> HandMade:
    run: HandMade = by_hand(batch={"system": "slurm", "requeue": False, "rdzv_timeout": 600}, **info)
    run_directory.write_json(run.path / run_directory.JOB, {"job": "7"})
    return run


@pytest.mark.parametrize(
    ("said", "state", "message"),
    [
        ("JobState=CANCELLED Reason=None", "failed", "Slurm job 7 was cancelled from outside"),
        ("JobState=TIMEOUT Reason=TimeLimit TimeLimit=00:01:00", "timeout", r"reached its time limit \(00:01:00\)"),
        ("JobState=NODE_FAIL Reason=NodeDown NodeList=n[1-2]", "failed", r"one of its machines \(n\[1-2\]\) died"),
        ("JobState=PREEMPTED Reason=None", "failed", "had to make way"),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory", "failed", "took more memory than it may"),
        ("JobState=FAILED Reason=NonZeroExitCode", "failed", r"ended as FAILED \(NonZeroExitCode\) before a guard could say why"),
    ],
)
def test_how_a_job_ended_that_left_no_word(by_hand: Any, slurm: Any, said: str, state: str, message: str) -> None:
    slurm(scontrol=f"echo 'JobId=7 {said}'")
    path = batch_run(by_hand).path
    run = wb.Run.load(path)
    assert run.state == state
    assert re.search(message, str(run.error)), str(run.error)
    slurm(scontrol="exit 1")
    assert wb.Run.load(path).state == state  # it is kept


def test_a_guards_stop_is_explained_by_slurm(by_hand: Any, slurm: Any) -> None:
    slurm(scontrol="echo 'JobId=7 JobState=TIMEOUT Reason=TimeLimit TimeLimit=00:01:00'")
    made = batch_run(by_hand)
    made.ended("stopped")
    assert wb.Run.load(made.path).state == "timeout"
    made = batch_run(by_hand)
    made.ended("finished")
    slurm(scontrol="exit 1")
    assert wb.Run.load(made.path).state == "finished"  # nobody is asked


@pytest.mark.parametrize("state", ["failed", "stopped", "timeout", "finished"])
def test_where_slurm_does_not_answer_the_guards_word_counts(by_hand: Any, slurm: Any, state: str) -> None:
    made = batch_run(by_hand)
    assert wb.Run.load(made.path).state == "queued"
    made.ended(state, exits={}, stopped_ns=None)
    run = wb.Run.load(made.path)
    assert run.state == state
    assert run.wait(5).state == state
    assert "None" not in run.queue
    slurm(scontrol="echo 'JobId=7 JobState=RUNNING'")
    if state != "finished":  # it was not the last word: the job may have been put back
        made.ended("stopped")
        assert wb.Run.load(made.path).state == "running"
        assert run.state == "running"


@pytest.mark.parametrize(("state", "said"), [("failed", "FAILED"), ("timeout", "TIMEOUT")])
def test_what_slurm_has_confirmed_is_kept(by_hand: Any, slurm: Any, state: str, said: str) -> None:
    slurm(scontrol=f"echo 'JobId=7 JobState={said} Reason=None'")
    made = batch_run(by_hand)
    made.ended(state, exits={}, stopped_ns=None)
    assert wb.Run.load(made.path).state == state
    assert run_directory.read_json(made.path / run_directory.RUN_JSON)["outcome"]["settled"] is True
    slurm(scontrol="echo 'JobId=7 JobState=PENDING'")
    assert wb.Run.load(made.path).state == state  # nobody is asked any more


@pytest.mark.parametrize("reason", ["PartitionConfig", "BadConstraints"])
def test_a_job_that_can_never_run_says_so(by_hand: Any, slurm: Any, reason: str) -> None:
    slurm(scontrol=f"echo 'JobId=7 JobState=PENDING Reason={reason}'")
    assert f"({reason}): as it was requested it can never run" in wb.Run.load(batch_run(by_hand).path).summary


@pytest.mark.parametrize(
    ("said", "requeue", "outcome", "state"),
    [
        ("PENDING", False, None, "queued"),
        ("RUNNING", False, None, "running"),
        ("COMPLETING", False, "failed", "failed"),
        ("COMPLETING", True, "failed", "running"),
        ("PENDING", True, "stopped", "queued"),
        ("COMPLETING", False, "stopped", "running"),
    ],
)
def test_a_job_that_has_not_ended(by_hand: Any, slurm: Any, said: str, requeue: bool, outcome: str | None, state: str) -> None:
    slurm(scontrol=f"echo 'JobId=7 JobState={said} Reason=Priority'")
    made = by_hand(batch={"system": "slurm", "requeue": requeue, "rdzv_timeout": 600})
    run_directory.write_json(made.path / run_directory.JOB, {"job": "7"})
    if outcome:
        made.ended(outcome)
    assert wb.Run.load(made.path).state == state


def test_a_job_that_slurm_has_forgotten(by_hand: Any, slurm: Any) -> None:
    slurm(scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", sacct="echo 'CANCELLED by 0|None'")
    assert "was cancelled from outside" in str(wb.Run.load(batch_run(by_hand).path).error)
    slurm(sacct="exit 1")
    assert "is not known to Slurm any more" in str(wb.Run.load(batch_run(by_hand).path).error)


def test_slurm_does_not_let_a_job_be_cancelled(by_hand: Any, slurm: Any) -> None:
    slurm(scontrol="echo 'JobId=7 JobState=RUNNING'", scancel="echo 'scancel: error: Access denied' >&2; exit 1")
    run = wb.Run.load(batch_run(by_hand).path)
    with pytest.raises(ValueError, match="Slurm job 7 cannot be cancelled: scancel: error: Access denied"):
        run.stop()


def test_without_slurm(tmp_path: Path, slurm: Any) -> None:
    with pytest.raises(LaunchError, match=r"there is no sbatch on PATH.* without Slurm"):
        wb.launch(SPEC, on=wb.Slurm(), runs_dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_sbatch_refuses_in_its_own_words(tmp_path: Path, slurm: Any) -> None:
    slurm(sbatch="echo 'sbatch: error: Batch job submission failed: Requested time limit is invalid' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"refuses the job: Batch job submission failed: Requested time limit is invalid. Ask for less"):
        wb.launch(SPEC, on=wb.Slurm(time="9-0"), runs_dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_that_cannot_be_written_down_is_cancelled(tmp_path: Path, slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(sbatch="echo 77", scancel=f"echo $1 > {tmp_path}/cancelled")
    write = run_directory.write_json

    def full(path: Path, value: object) -> None:
        if path.name == run_directory.JOB:
            raise run_directory.DiskFullError(28, "no space")
        write(path, value)

    monkeypatch.setattr(run_directory, "write_json", full)
    with pytest.raises(LaunchError, match="is full"):
        wb.launch(SPEC, on=wb.Slurm(), runs_dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []
    assert (tmp_path / "cancelled").read_text() == "77\n"


def test_what_a_job_starts_says_nothing_of_its_own(tmp_path: Path) -> None:
    run_directory.write_json(tmp_path / run_directory.RUN_JSON, {"outcome": None})
    words = [sys.executable, "-m", "workbench.runs.launch.nodes", "begin", str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert found.stderr == ""  # a RuntimeWarning of runpy, in every slurm.log
    assert ":" in found.stdout


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nodes": 0}, r"Slurm\(nodes=0\): a whole number of at least 1"),
        ({"gpus": -1}, r"Slurm\(gpus=-1\): a whole number of at least 0"),
        ({"partition": "a b"}, "a name without spaces"),
        ({"time": "2 hours"}, r'Slurm reads "30" \(minutes\)'),
        ({"setup": "module load cuda"}, "expected a list of lines"),
        ({"options": ["--nodes=3"]}, "it is set by the launch itself"),
        ({"options": ["mem=3"]}, r"expected an option such as \"--mem=64G\""),
    ],
)
def test_what_slurm_is_not_asked_for(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        wb.Slurm(**fields)


@pytest.mark.parametrize(
    ("asked", "cores"),
    [
        (wb.Slurm(), 12),
        (wb.Slurm(cpus=5), 5),
        (wb.Slurm(cpus=0), None),
        (wb.Slurm(options=["--exclusive"]), None),
        (wb.Slurm(options=["--cpus-per-gpu=8"]), None),
    ],
)
def test_a_job_gets_the_cores_that_its_ranks_and_workers_need(asked: wb.Slurm, cores: int | None) -> None:
    spec = wb.RunSpec(task="text-gpt", nproc_per_node=2, threads=2, num_workers=4)
    script = asked.script(spec, "runs/x", "x")
    assert re.findall(r"--cpus-per-task=(\d+)", script) == ([] if cores is None else [str(cores)] * 2)  # for sbatch, and for srun


def test_the_script_asks_for_what_was_said() -> None:
    asked = wb.Slurm(partition="gpu", cpus=8, account="me", requeue=True, setup=["module load cuda"], options=["--mem=64G"])
    spec = SPEC.replace(device="cuda", nproc_per_node=4, nnodes=2)
    lines = asked.script(spec, "/runs/two words", "a name", python="/py").splitlines()
    wanted = {
        "--job-name=a-name",
        "--nodes=2",
        "--partition=gpu",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--account=me",
        "--requeue",
        "--mem=64G",
    }
    assert wanted <= {line.removeprefix("#SBATCH ") for line in lines}
    assert lines.index("module load cuda") < lines.index(next(line for line in lines if line.startswith("srun ")))
    assert lines[-1].startswith("srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 ")
    assert lines[-1].endswith("/py -m workbench.runs.launch.nodes step '/runs/two words'")


# --- a run that goes on


def test_a_new_life_keeps_steps_and_puts_words_aside(tmp_path: Path) -> None:
    run_directory.write_json(tmp_path / run_directory.RUN_JSON, {"outcome": {"state": "stopped"}})
    for name in (run_directory.ERRORS, run_directory.LOGS):
        (tmp_path / name).mkdir()
    assert int(nodes.begin(tmp_path).rpartition(":")[2]) > 0
    assert run_directory.read_json(tmp_path / run_directory.RUN_JSON)["outcome"] is None
    (tmp_path / run_directory.ERRORS / "rank0.json").write_text("{}")
    (tmp_path / run_directory.METRICS).write_text('{"step": 1}\n{"step": 2, "lo')
    nodes.begin(tmp_path)
    assert list((tmp_path / run_directory.ERRORS).iterdir()) == []
    assert (tmp_path / "attempts" / "0" / run_directory.ERRORS / "rank0.json").exists()
    assert (tmp_path / run_directory.METRICS).read_text() == '{"step": 1}\n'


# --- two virtual hosts


def test_a_slower_wire_costs_what_the_wire_costs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import two_hosts

    wire = two_hosts.PAYLOAD * 1e9 / 8  # a link on which hosts cost nothing
    link = two_hosts.slowed(two_hosts.Link(latency=1e-4, bandwidth=wire), 1000, 100)
    assert link.bandwidth == pytest.approx(wire / 10)
    assert link.latency == 1e-4
    found = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "gradients": [4_000_000], "cap": 1}
    sending = 4_000_000 / link.bandwidth
    assert two_hosts.step(found, link) == pytest.approx(3.5 + sending + 2e-4)  # one bucket, which is full when the backward ends


def test_hosts_that_cannot_be_made_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import two_hosts

    monkeypatch.setattr(two_hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["two_hosts.py"])
    monkeypatch.setattr(two_hosts.signal, "signal", lambda *_: None)
    assert two_hosts.main() == 0
    assert "left out: hosts are network namespaces here: that takes root, ip and tc" in capsys.readouterr().out
