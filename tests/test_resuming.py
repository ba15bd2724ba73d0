"""A run that was killed goes on from its last checkpoint as if nothing had been, or says why it cannot."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import rundir
from workbench.launcher import LaunchError
from workbench.launcher.start import open_lock
from workbench.spec import ScriptSpec

TASK = """
import time, torch
import workbench as wb

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(2e-3)
        x = torch.sin(torch.arange(8.0) * (index + 1))
        return x, x.sum(0, keepdim=True)

def build():
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    model = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return wb.Task(model=model, dataset=Slow, loss=loss, optimizer="sgd(lr=0.05, momentum=0.9)")
"""


def ranks_of(run: wb.Run) -> list[int]:
    """Processes of its ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended while we looked, or not ours
            continue
        if f"{rundir.ENV_RUN_ID}={run.id}".encode() in environ and b"RANK=0" in environ:
            found.append(int(folder.name))
    return found


def test_a_killed_run_goes_on_and_ends_where_one_that_was_never_killed_does(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK)
    spec = wb.RunSpec(task=f"{task}:build", device="cpu", micro_batch=4, steps=300, checkpoint_every=20, schedule="cosine")
    run = wb.launch(spec, runs_dir=tmp_path / "runs")
    limit = time.monotonic() + 120
    while not list(run.path.glob(f"{rundir.CHECKPOINTS}/step*.pt")):
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
    again = wb.launch(spec, resume=run).wait(120, check=True)
    assert (again.path, again.id, again.state, again.progress) == (run.path, run.id, "finished", (300, 300))
    whole = wb.launch(spec, runs_dir=tmp_path / "whole").wait(120, check=True)
    losses = {row["step"]: row["loss"] for row in again.metric_rows}
    assert len(again.metric_rows) == len(losses)
    assert losses == {row["step"]: row["loss"] for row in whole.metric_rows}
    seen = [step.index for step in again.timelines[0].steps]  # times that were not on disk yet when it was killed are gone
    assert seen == sorted(set(seen))
    assert seen[-1] == 299
    assert "goes on from step" in again.logs(0)
    assert (run.path / "attempts" / "0" / rundir.LOGS).is_dir()
    assert wb.Run.load(run.path).error is None
    with pytest.raises(LaunchError, match="has finished: there is nothing left"):
        wb.launch(resume=run.path)


SPEC = wb.RunSpec(task="text-gpt", device="cpu", checkpoint_every=5)


def ended(path: Path, of: wb.RunSpec = SPEC, **more: Any) -> Path:
    """A run that was stopped after its first checkpoint."""
    (path / rundir.CHECKPOINTS).mkdir(parents=True)
    (path / rundir.CHECKPOINTS / "step00000005.pt").touch()
    info = {"format": 1, "id": "x", "name": "x", "created": 0.0, "host": "h", "launch_dir": ".", "command": ["torchrun", str(path)]}
    outcome = {"state": "stopped", "returncode": None, "seconds": 1.0}
    rundir.write_json(path / rundir.RUN_JSON, info | {"spec": of.to_json(), "outcome": outcome} | more)
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch": {"requeue": False}}, "is a job of Slurm"),
        ({"alone": True}, "was not launched as a run of its own in this place"),
        ({"experiment": {"kind": "links"}}, "was not launched as a run of its own"),
        ({"command": ["torchrun", "/elsewhere"]}, "was not launched as a run of its own"),
        ({"spec": ScriptSpec(script="train.py").to_json()}, "is a script, whose checkpoints are its own"),
        ({"spec": SPEC.replace(nnodes=2).to_json()}, "is of 2 machines"),
        ({"outcome": {"state": "finished", "seconds": 1.0}}, "has finished"),
    ],
)
def test_what_cannot_go_on(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    path = ended(tmp_path / "run", **more)
    before = (path / rundir.RUN_JSON).read_text()
    with pytest.raises(LaunchError, match=said):
        wb.launch(resume=path)
    assert (path / rundir.RUN_JSON).read_text() == before


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    for name, spec, said in (
        ("a", SPEC, r"ended before its first one \(every 5 steps\)"),
        ("b", SPEC.replace(checkpoint_every=None), "keep none"),
    ):
        path = ended(tmp_path / name, spec)
        (path / rundir.CHECKPOINTS / "step00000005.pt").unlink()
        with pytest.raises(LaunchError, match=said):
            wb.launch(resume=path)


def test_a_run_goes_on_as_it_was_launched(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    with pytest.raises(LaunchError, match=r"with lr=None and not 0\.5: leave the spec out"):
        wb.launch(SPEC.replace(lr=0.5), resume=path)
    with pytest.raises(LaunchError, match=r"'train\.py' is not its spec"):
        wb.launch("train.py", resume=path)
    with pytest.raises(LaunchError, match="steps=900 with resume=…: a run goes on as it was launched"):
        wb.launch(resume=path, steps=900)
    with pytest.raises(LaunchError, match=r"launch\(\) of what\?"):
        wb.launch()


def test_a_run_that_somebody_else_holds_does_not_begin_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.launcher.resuming.PATIENCE", 0.0)
    path = ended(tmp_path / "run")
    lock = open_lock(path)
    try:
        with pytest.raises(LaunchError, match="is that of a run that is still running"):
            wb.launch(resume=path)
    finally:
        os.close(lock)
    assert not (path / "attempts").exists()
