"""Runs as jobs of a real Slurm: two virtual nodes on this machine, which are started, killed and ended here."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import workbench as wb
from tests.conftest import processes_with
from tests.slurm_cluster import NoSlurm, SlurmCluster, missing
from workbench.core import run_directory
from workbench.runs.launch.new_run import LaunchError

SCRIPTS = Path(__file__).parents[1] / "scripts"
SPEC = wb.RunSpec(task=f"{SCRIPTS / 'tiny_task.py'}:build", device="cpu", steps=20, micro_batch=8)
FOR_EVER = 10_000_000
PATIENCE = 180.0


@pytest.fixture
def cluster(slurm: SlurmCluster) -> SlurmCluster:
    """A Slurm whose nodes n1 and n2 are idle, whatever the test before (or this one's first try) has left of it."""
    slurm.make_whole()
    return slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm with the nodes n1 and n2."""
    if absent := missing():
        how = f"Slurm's {', '.join(absent)} is not here: apt-get install --no-install-recommends slurm-wlm munge"
        pytest.fail(how) if os.environ.get("CI") else pytest.skip(how)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, pytest.MonkeyPatch.context() as patch:
        found = SlurmCluster(Path(folder))
        try:
            found.start()
            for name in ("SLURM_CONF", "PATH"):
                patch.setenv(name, found.environ[name])
            yield found
        except NoSlurm as why:
            left_out(why)
        finally:
            found.stop()


def left_out(why: NoSlurm) -> None:
    """No cluster: in CI, where these tests are the proof, that is a failure, unless a container does not let a daemon run."""
    how = f"Slurm's daemons cannot run here: {why}"
    pytest.fail(how) if os.environ.get("CI") and not why.forbidden else pytest.skip(how)


@pytest.mark.parametrize(
    ("ci", "why", "outcome"),
    [
        ("", NoSlurm("the nodes did not come up: slurmctld: still starting"), pytest.skip.Exception),
        ("1", NoSlurm("the nodes did not come up: slurmctld: still starting"), pytest.fail.Exception),
        ("1", NoSlurm("munged: Permission denied"), pytest.fail.Exception),
        ("1", NoSlurm("n1 ended: slurmd: Operation not permitted", forbidden=True), pytest.skip.Exception),
    ],
)
def test_in_ci_a_cluster_that_does_not_come_up_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, ci: str, why: NoSlurm, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=re.escape(str(why))):
        left_out(why)


def test_a_daemon_that_may_not_run_says_so(tmp_path: Path) -> None:
    cluster = SlurmCluster(tmp_path)
    for words, forbidden in (("slurmd: error: chown: Operation not permitted", True), ("slurmd: fatal: no such node", False)):
        cluster._start("slurmd", ["sh", "-c", f"echo '{words}'; exit 1"])
        with pytest.raises(NoSlurm, match=words) as found:
            cluster._until(lambda: False, "the nodes")
        assert found.value.forbidden is forbidden
        (tmp_path / "slurmd.out").unlink()


def until(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.1)


def training(run: wb.Run) -> None:
    """Wait until a run takes steps."""
    until(lambda: run.metric_rows or run.state not in ("queued", "running"), f"no step: {run.queue}")
    assert run.state == "running", (run, (run.path / run_directory.JOB_LOG).read_text())


def gone(run: wb.Run) -> None:
    until(lambda: not processes_with(run_directory.ENV_RUN_ID, run.id), "processes are left")


@pytest.mark.slow
def test_one_spec_on_two_machines(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = wb.launch(SPEC, on=wb.Slurm(nodes=2, partition="debug", time="10"), runs_dir=tmp_path)
    assert run.spec == SPEC.replace(nnodes=2)
    assert (run.spec.world_size, run.spec.global_batch) == (2, 16)
    assert run.queue.startswith("Slurm job ")
    run.wait(PATIENCE)
    assert run.ok, (run, (run.path / run_directory.JOB_LOG).read_text(), run.logs())
    assert [timeline.rank for timeline in run.timelines] == [0, 1]
    assert run.metric_rows[-1]["samples"] == 20 * 16
    assert sorted(node["name"] for node in run.nodes) == ["n1", "n2"]
    assert sorted(rank for node in run.nodes for rank in node["ranks"].values()) == [0, 1]
    assert all(run.logs(rank).startswith(f"rank {rank} of 2 on cpu") for rank in range(2))
    assert "srun --ntasks=2 " in (run.path / run_directory.JOB_SCRIPT).read_text()
    assert wb.Run.load(run.path).state == "finished"
    gone(run)


def test_a_job_that_waits_is_queued_and_can_be_stopped(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = wb.launch(SPEC, on=wb.Slurm(options=["--hold"]), runs_dir=tmp_path)
    assert (run.state, run.ok, run.error) == ("queued", False, None)
    assert "pending (JobHeldUser)" in run.summary
    with pytest.raises(TimeoutError, match="still runs"):
        run.wait(0.1)
    assert run.stop().state == "stopped"
    assert run.error is None
    assert wb.Run.load(run.path).state == "stopped"


@pytest.mark.slow
def test_cancelled_from_outside(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = wb.launch(SPEC, on=wb.Slurm(), runs_dir=tmp_path, steps=FOR_EVER)
    training(run)
    cluster.ask("scancel", run_directory.read_json(run.path / run_directory.JOB)["job"])
    assert run.wait(PATIENCE).state == "failed"
    assert "was cancelled from outside (scancel), not by run.stop()" in str(run.error)
    gone(run)


def test_what_slurm_refuses_is_said_in_its_words(cluster: SlurmCluster, tmp_path: Path) -> None:
    for on, said in (
        (wb.Slurm(partition="gpus"), r"Slurm refuses the job: .*invalid partition specified: gpus.* Its partitions are debug"),
        (wb.Slurm(gpus=1), r"Slurm refuses the job: .*[Ii]nvalid generic resource"),
    ):
        with pytest.raises(LaunchError, match=said):
            wb.launch(SPEC, on=on, runs_dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_job_that_is_put_back_goes_on_from_its_checkpoint(cluster: SlurmCluster, tmp_path: Path) -> None:
    spec = SPEC.replace(steps=FOR_EVER, checkpoint_every=50)
    run = wb.launch(spec, on=wb.Slurm(nodes=2, requeue=True), runs_dir=tmp_path)
    training(run)
    until(lambda: list((run.path / run_directory.CHECKPOINTS).glob("step*.pt")), "no checkpoint")
    job = run_directory.read_json(run.path / run_directory.JOB)["job"]
    cluster.ask("scontrol", "requeue", job)
    until(lambda: run.state == "queued", "not queued again")
    until(lambda: cluster.ask("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING", "not pending")
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # else Slurm waits two minutes
    until(lambda: "goes on from step" in run.logs() or run.state not in ("queued", "running"), run.state)
    resumed = int(run.logs().split("goes on from step ")[1].split(":")[0])
    assert resumed >= 50
    until(
        lambda: (
            run.metric_rows[-1]["step"] > resumed
            and [any(step.index == resumed for step in timeline.steps) for timeline in run.timelines] == [True, True]
        ),
        "no step after it that both ranks have written down",
    )
    assert run.stop().state == "stopped"
    for seen in (run, wb.Run.load(run.path)):  # one that has followed it all the time, and one that looks now
        steps = [row["step"] for row in seen.metric_rows]
        assert steps == list(range(1, len(steps) + 1))  # none is missing, none is twice
        seconds = [row["seconds"] for row in seen.metric_rows]
        assert seconds == sorted(seconds)
        for timeline in seen.timelines:
            numbers = [step.index for step in timeline.steps]
            assert numbers == sorted(set(numbers))
            assert resumed in numbers  # the first after the checkpoint, from 0
            assert abs(numbers[-1] + 1 - len(steps)) < 1000  # both are written a few times a second
    assert run.error is None
    gone(run)
    assert cluster.ask("squeue", "-h", "-t", "RUNNING").strip() == ""


@pytest.mark.slow
def test_a_machine_that_dies_is_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = wb.launch(SPEC, on=wb.Slurm(nodes=2), runs_dir=tmp_path, steps=FOR_EVER)
    training(run)
    dead = next(node["name"] for node in run.nodes if node["rank"] == 1)
    cluster.kill_node(dead)
    run.wait(PATIENCE)
    assert run.state == "failed"
    assert run.error.kind == "node"
    assert f"machine 1 ({dead}) died or was cut off" in run.error.message
    gone(run)
