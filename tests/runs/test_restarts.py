"""A run that loses a rank goes on by itself, with all ranks or with those that are left, or says why it does not."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from benchmarks import random_kills
from tests.conftest import HandMade
from tests.forked import Forks
from tests.runs.test_resume import TASK
from workbench.core import run_directory
from workbench.programs import restart
from workbench.runs.launch import guard
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.restarts import RESHAPED, Restart, check, first_step, present_spec, restarts_of, with_fewer
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, SpecError
from workbench.train import checkpoint_file

Make = Callable[..., HandMade]
SPEC = RunSpec(task="text-gpt", device="cpu", nproc_per_node=4, micro_batch=8, steps=20, checkpoint_every=5)


@given(
    ranks=st.integers(2, 12),
    micro=st.integers(1, 32),
    accumulation=st.integers(1, 6),
    lost=st.integers(1, 11),
    least=st.integers(1, 12),
    tensor=st.sampled_from([1, 2]),
)
def test_fewer_ranks_keep_the_batch(ranks: int, micro: int, accumulation: int, lost: int, least: int, tensor: int) -> None:
    ranks *= tensor
    spec = SPEC.replace(nproc_per_node=ranks, micro_batch=micro, accumulation=accumulation, tensor_parallel=tensor)
    left = max(0, ranks - lost)
    fewer, why = with_fewer(spec, left, least)
    if fewer is None:
        assert len(why) == max(0, left - least + 1)
        return
    assert fewer.global_batch == spec.global_batch
    assert least <= fewer.nproc_per_node <= left
    assert fewer.micro_batch <= micro  # it fits into the memory that there is
    assert len(why) == left - fewer.nproc_per_node
    assert fewer.replace(**{name: getattr(spec, name) for name in ("nproc_per_node", "micro_batch", "accumulation")}) == spec


def test_what_fewer_ranks_cannot_do_is_said() -> None:
    assert with_fewer(SPEC, 3, 3) == (None, ["3 ranks cannot share the 32 samples of a step evenly"])
    assert with_fewer(SPEC.replace(tensor_parallel=2), 3, 3) == (None, ["tensor_parallel=2 does not divide 3 ranks"])
    prime = SPEC.replace(nproc_per_node=2, micro_batch=31)
    assert with_fewer(prime.replace(nproc_per_node=3, micro_batch=14), 2, 2)[0] is not None
    assert with_fewer(prime.replace(nproc_per_node=4, micro_batch=22), 2, 2)[0] is not None
    fewer, why = with_fewer(prime.replace(nproc_per_node=6, micro_batch=7, accumulation=1), 3, 1)
    assert fewer is not None
    assert (fewer.nproc_per_node, fewer.micro_batch, fewer.accumulation, why) == (3, 7, 2, [])
    _, why = with_fewer(SPEC.replace(nproc_per_node=38, micro_batch=5), 10, 10)
    assert why == ["with 10 ranks a micro-batch would have 1 samples instead of 5"]
    _, why = with_fewer(SPEC.replace(parallel="hsdp", shard_ranks=4), 2, 2)
    assert "shard_ranks=4 does not divide the 2 ranks" in why[0]


@pytest.mark.parametrize(
    ("spec", "restarts", "least", "said"),
    [
        (SPEC, -1, None, "max_restarts=-1"),
        (SPEC, 1, 5, "min_ranks=5"),
        (SPEC, 0, 1, "min_ranks=1 without max_restarts"),
        (SPEC.replace(checkpoint_every=None), 1, None, "try checkpoint_every=100"),
        (SPEC.replace(nnodes=2), 1, 9, "min_ranks=9"),
        (SPEC.replace(micro_batch="auto"), 1, 1, "share a known batch"),
        (SPEC.replace(noise_scale=True), 1, 1, "leave one of them out"),
        (SPEC.replace(local_sgd="periodic"), 1, 1, 'min_ranks=1 with local_sgd="periodic": each rank has parameters of its own'),
        (
            SPEC.replace(pipeline_parallel=4, accumulation=4),
            1,
            1,
            r"min_ranks=1: the run could not go on with fewer ranks, since pipeline_parallel=4 .* 3 ranks; .*; try no min_ranks",
        ),
        (SPEC.replace(tensor_parallel=2), 1, 3, r"tensor_parallel=2 does not divide 3 ranks; try min_ranks=2, or no min_ranks"),
        (ScriptSpec(script="train.py"), 1, None, "whose checkpoints are its own"),
    ],
)
def test_what_does_not_restart_is_refused(spec: Any, restarts: int, least: int | None, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check(spec, restarts, least)


def test_a_launch_refuses_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="it would begin anew each time"):
        wb.launch("text-gpt", max_restarts=1, runs_dir=tmp_path / "runs")
    with pytest.raises(LaunchError, match="max_restarts=1 with on="):
        wb.launch(SPEC, max_restarts=1, on=wb.Slurm(), runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def failed(
    by_hand: Make, rank: int = 1, message: str = "ValueError: boom", *, kind: str = "exception", steps: int = 9, **elastic: Any
) -> Path:
    """A run of four ranks, one of which has failed."""
    run = by_hand(spec=SPEC.to_json(), elastic={"max_restarts": 2, "min_ranks": None, **elastic}).steps(steps)
    record = {"rank": rank, "time_ns": 5, "kind": kind, "message": message, "traceback": None, "consequence": False, "memory": None}
    for name in (run_directory.ERRORS, run_directory.LOGS):
        (run.path / name).mkdir()
    run_directory.write_json(run.path / run_directory.ERRORS / f"rank{rank}.json", record)
    (run.path / run_directory.LAUNCHER_LOG).write_text("torchrun says\n")
    return run.path


OUTCOME = {"state": "failed", "returncode": 1, "exits": {}, "stopped_ns": None}


def test_an_error_that_comes_again_ends_the_run(by_hand: Make) -> None:
    path = failed(by_hand)
    row = restart.decide(path, OUTCOME)
    assert isinstance(row, dict)
    assert (row["number"], row["lost"], row["why"], row["ranks"]) == (1, [1], "rank 1: ValueError: boom", 4)
    writer = run_directory.LineWriter(path / run_directory.RESTARTS)
    writer.write([row])
    assert (
        restart.decide(path, OUTCOME)
        == "rank 1: ValueError: boom; it would come again, as there was no further step since the last restart"
    )
    writer.write([{"number": 1, "goes_on_from": 5, "seconds": 3.0}])
    writer.close()
    lines = run_directory.LineWriter(path / run_directory.rank_file(0))
    lines.write([{"step": 9}])
    lines.close()
    assert isinstance(restart.decide(path, OUTCOME), dict)  # it has come further


def test_an_error_before_the_first_step_ends_the_run_and_a_kill_does_not(by_hand: Make) -> None:
    assert "no further step since the launch" in restart.decide(failed(by_hand, steps=0), OUTCOME)
    killed = failed(by_hand, 0, "was killed", kind="killed", steps=0)
    assert isinstance(restart.decide(killed, OUTCOME), dict)


def test_restarts_are_counted(by_hand: Make) -> None:
    path = failed(by_hand, kind="killed", max_restarts=1)
    row = restart.decide(path, OUTCOME)
    assert isinstance(row, dict)
    restart.go_on(path, row)
    assert (path / "attempts" / "0" / run_directory.LAUNCHER_LOG).read_text() == "torchrun says\n"
    assert (path / run_directory.LAUNCHER_LOG).read_text() == ""  # the guard goes on writing into it
    assert not list((path / run_directory.ERRORS).iterdir())
    assert restart.decide(path, OUTCOME) == "torchrun ended with exit code 1; it was the last attempt, max_restarts=1"


def test_the_ranks_that_are_left_go_on(by_hand: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = failed(by_hand, 3, "was killed", kind="killed", min_ranks=2)
    run_directory.write_json(path / run_directory.NEXT, OUTCOME)
    monkeypatch.setattr("sys.argv", ["restart", str(path)])
    assert restart.main() == 0
    answer = run_directory.read_json(path / run_directory.NEXT)
    assert answer["nproc"] == 2
    assert answer["command"][answer["command"].index("--nproc-per-node") + 1] == "2"
    now = present_spec(run_directory.read_json(path / run_directory.RUN_JSON))
    assert (now["nproc_per_node"], now["micro_batch"], now["accumulation"]) == (2, 8, 2)
    run = Run.load(path)
    assert run.spec == SPEC  # what was asked for
    (one,) = run.restarts
    assert (one.lost, one.before, one.ranks, one.seconds) == ((3,), 4, 2, None)
    assert "3 ranks cannot share the 32 samples of a step evenly" in str(one)
    assert str(one) in capsys.readouterr().out
    assert run.notes[0] == str(one)
    assert first_step(path, done=5, now=json.loads((path / run_directory.RESTARTS).read_text())["lost_at"] + 4.0) == run.restarts[0]
    assert run.restarts[0].seconds == 4.0
    assert first_step(path, done=5, now=time.time()) is None
    assert Restart.from_json(run.restarts[0].to_json()) == run.restarts[0]
    assert restarts_of([{"number": 1}, {"odd": 1}, {"number": 2, "of": "x"}]) == []


def test_too_few_ranks_end_the_run(by_hand: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = failed(by_hand, 3, "was killed", kind="killed", min_ranks=3)
    before = run_directory.read_json(path / run_directory.RUN_JSON)
    run_directory.write_json(path / run_directory.NEXT, OUTCOME)
    monkeypatch.setattr("sys.argv", ["restart", str(path)])
    assert restart.main() == 1
    assert "3 ranks cannot share the 32 samples" in capsys.readouterr().out
    run_directory.write_json(path / run_directory.RUN_JSON, before | {"outcome": OUTCOME | {"seconds": 1.0}})
    assert (
        Run.load(path).notes[0].startswith("there was no restart: it does not go on with fewer ranks: 3 ranks cannot share the 32 samples")
    )
    assert Run.load(path).restarts == []
    run_directory.write_json(path / run_directory.RUN_JSON, before)
    assert run_directory.read_json(path / run_directory.RUN_JSON) == before
    assert not (path / run_directory.NEXT).exists()
    assert not (path / "attempts").exists()


def test_the_guard_has_the_names_of_the_files() -> None:
    assert guard.NEXT == run_directory.NEXT


def kill_rank(run: Run, rank: int) -> None:
    """SIGKILL to a rank once there is a checkpoint and some steps after it."""
    limit = time.monotonic() + 120
    while len(run.metric_rows) < 26:
        assert run.state == "running", run
        assert time.monotonic() < limit
        time.sleep(0.02)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{run_directory.ENV_RUN_ID}={run.id}".encode() in environ and f"RANK={rank}".encode() in environ:
            os.kill(int(folder.name), signal.SIGKILL)


TWO = RunSpec(task="task.py:build", device="cpu", micro_batch=4, steps=120, checkpoint_every=10, schedule="cosine", nproc_per_node=2)


def weights(run: Run) -> dict[str, torch.Tensor]:
    state = checkpoint_file.load(run.path / run_directory.CHECKPOINTS / f"step{TWO.steps:08d}.pt", torch.device("cpu"))
    return dict(state["module"])


def test_a_lost_rank_is_made_up_for_by_those_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    run = wb.launch(TWO, runs_dir="runs", max_restarts=1, min_ranks=1)
    kill_rank(run, 1)
    run.wait(120, check=True)
    (one,) = run.restarts
    assert (one.lost, one.why, one.ranks, one.accumulation) == ((1,), "rank 1: was killed (SIGKILL)", 1, 2)
    assert one.goes_on_from is not None
    assert one.goes_on_from >= 20
    assert one.seconds is not None
    assert 0 < one.seconds < 120
    assert str(one) in run.notes
    assert str(one) in run.logs(0)
    assert run.error is None
    assert run.progress == (120, 120)
    assert [row["step"] for row in run.metric_rows] == list(range(1, 121))
    assert [row["samples"] for row in run.metric_rows] == list(range(8, 961, 8))
    kept, lost = run.timelines
    assert [step.index for step in kept.steps] == list(range(120))
    assert [step.index for step in lost.steps] == list(range(one.goes_on_from))
    assert run.samples_per_sec == pytest.approx(run.rank_means[0].samples_per_sec)


@pytest.mark.slow
def test_a_restart_with_all_ranks_is_exact_and_one_with_fewer_is_the_same_training(
    by_hand: Make, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch whose rank is killed, beside trainings in forks: an undisturbed one, and one that goes on with the rank that is left."""
    (tmp_path / "task.py").write_text(random_kills.TASK.format(samples=200, seconds=2e-3, inputs=8, hidden=16, lr=0.05))
    monkeypatch.chdir(tmp_path)
    same = wb.launch(TWO, runs_dir="launched", max_restarts=2)
    kill_rank(same, 0)
    whole, fewer = (Run.load(by_hand(spec=TWO.to_json()).path) for _ in range(2))
    done = forks.train(2, tmp_path, whole.path)
    assert done.returncode == 0, done.stderr
    same.wait(120, check=True)
    assert same.restarts[0].lost == (0,)
    assert [(row["step"], row["loss"]) for row in same.metric_rows] == [(row["step"], row["loss"]) for row in whole.metric_rows]
    assert all(torch.equal(weights(same)[name], weight) for name, weight in weights(whole).items())

    (prints := fewer.path / run_directory.FINGERPRINTS).mkdir()
    run_directory.write_json(prints / run_directory.KILL, {"step": 26, "rank": 1})
    assert forks.train(2, tmp_path, fewer.path).returncode == -signal.SIGKILL
    left, _ = with_fewer(TWO, 1, 1)
    for name in (run_directory.ERRORS, run_directory.LOGS):
        (fewer.path / name).mkdir(exist_ok=True)
    (fewer.path / run_directory.LAUNCHER_LOG).touch()
    restart.go_on(fewer.path, {"number": 1, "layout": {name: getattr(left, name) for name in RESHAPED}})
    (prints / run_directory.KILL).unlink()
    done = forks.train(1, tmp_path, fewer.path)
    assert done.returncode == 0, done.stderr
    assert "goes on from step 20" in done.stdout
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(fewer)[name], weight, rtol=1e-4, atol=1e-5)
