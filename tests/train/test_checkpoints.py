"""Checkpoints: a run that goes on ends where one that was never ended does, and no file is ever half there."""

import dataclasses
import errno
import functools
import os
import re
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import workbench as wb
from tests import toy_tasks
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec
from workbench.timeline.timeline import Timeline
from workbench.train import checkpoint_file, loop
from workbench.train.checkpoints import Checkpoints
from workbench.train.loader import micro_batches
from workbench.train.provenance import classes_of
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

train = functools.partial(loop.train, held=held, noise_log=NoiseLog)


def spec_of(**knobs: Any) -> RunSpec:
    return RunSpec(**{"task": "toy", "device": "cpu", "micro_batch": 8, "steps": 20, "checkpoint_every": 6, **knobs})


def weights(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


class HandMadeRun:
    """Follows the metrics as `Run` does."""

    def __init__(self, path: Path) -> None:
        info = {"format": run_directory.FORMAT, "id": "x", "name": "x", "created": 0.0, "host": "h", "launch_dir": ".", "outcome": None}
        run_directory.write_json(path / run_directory.RUN_JSON, info | {"spec": spec_of().to_json()})
        self.run = Run.load(path)
        self.before = self.steps()

    def steps(self) -> list[int]:
        return [row["step"] for row in self.run.metric_rows]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / run_directory.CHECKPOINTS).iterdir())


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"accumulation": 2, "schedule": "cosine", "warmup_steps": 3},
        {"optimizer": "adam(lr=0.01)"},
        {"optimizer": "adafactor", "gradient_compression": "fp16"},
    ],
)
def test_a_run_that_goes_on_ends_where_one_that_was_never_ended_does(alone: Ranks, tmp_path: Path, knobs: dict[str, Any]) -> None:
    spec, task = spec_of(**knobs), toy_tasks.numbers()
    whole = train(spec, task, alone, tmp_path)
    (tmp_path / "parts").mkdir()
    train(spec, task, alone, tmp_path / "parts")
    (tmp_path / "parts" / run_directory.CHECKPOINTS / "step00000018.pt").unlink()  # as if it had been ended after step 17
    follower = HandMadeRun(tmp_path / "parts")
    again = train(spec, task, alone, tmp_path / "parts")
    assert torch.equal(weights(again), weights(whole))
    rows = run_directory.LineTail(tmp_path / "parts" / run_directory.METRICS).read()
    assert [row["step"] for row in rows] == list(range(1, 21))  # none is twice
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert follower.steps() == list(range(1, 21))  # and none to who has read the file before
    steps = Timeline.from_lines(run_directory.LineTail(tmp_path / "parts" / run_directory.rank_file(0)).read()).steps
    assert [step.index for step in steps] == list(range(20))
    assert names(tmp_path / "parts") == ["step00000012.pt", "step00000018.pt"]


def test_a_run_that_was_at_its_end_has_nothing_to_do(alone: Ranks, tmp_path: Path) -> None:
    spec, task = spec_of(steps=6), toy_tasks.numbers()
    first = train(spec, task, alone, tmp_path)
    assert torch.equal(weights(train(spec, task, alone, tmp_path)), weights(first))


@pytest.mark.parametrize("damage", [b"", b"half of it", None])
def test_a_damaged_one_is_passed_over(alone: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes | None) -> None:
    spec, task = spec_of(), toy_tasks.numbers()
    whole = weights(train(spec, task, alone, tmp_path))
    last = tmp_path / run_directory.CHECKPOINTS / "step00000018.pt"
    data = last.read_bytes()
    last.write_bytes(data[: len(data) // 2] if damage is None else damage)
    assert torch.equal(weights(train(spec, task, alone, tmp_path)), whole)
    said = capsys.readouterr().out
    assert "step00000018.pt is damaged and passed over" in said
    assert "goes on from step 12: " in said
    assert [row["step"] for row in run_directory.LineTail(tmp_path / run_directory.METRICS).read()] == list(range(1, 21))


def test_damaged_ones_are_set_aside(alone: Ranks, tmp_path: Path) -> None:
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    (tmp_path / run_directory.CHECKPOINTS / "step00000018.pt").write_bytes(b"half of it")
    train(spec_of(steps=17), toy_tasks.numbers(), alone, tmp_path)  # as if it had been ended after step 17
    assert names(tmp_path) == ["step00000012.pt", "step00000018.pt.damaged"]


def test_one_of_a_later_step_does_not_drive_out_the_present_ones(alone: Ranks, tmp_path: Path) -> None:
    checkpoints, trainer = Checkpoints(tmp_path, alone, 6), Trainer(spec_of(), toy_tasks.numbers(), alone)
    for step in (30, 36, 6, 12, 18):
        checkpoints.write(step, trainer)
    assert names(tmp_path)[:2] == ["step00000012.pt", "step00000018.pt"]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(), OSError(errno.EIO, "Input/output error"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), None],
)  # fmt: skip
def test_what_cannot_be_read_now_takes_nothing_away(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """None: every file is damaged."""
    spec, task = spec_of(noise_scale=1, accumulation=2), toy_tasks.numbers()
    train(spec, task, alone, tmp_path)
    if error is None:
        for path in (tmp_path / run_directory.CHECKPOINTS).iterdir():
            path.write_bytes(path.read_bytes()[:600])

    def load(*_: object, **options: object) -> None:
        assert error
        raise error

    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    expected = type(error) if error else run_directory.DamagedRunError
    if error:
        monkeypatch.setattr(torch, "load", load)
    with pytest.raises(expected) as raised:
        train(spec, task, alone, tmp_path)
    assert "The run was not changed" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)

    def stale(path: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", stale)
    with pytest.raises(OSError, match="Stale"):
        train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    assert len(run_directory.LineTail(tmp_path / run_directory.METRICS).read()) == 20


def test_a_run_that_goes_on_keeps_the_micro_batch_that_was_chosen(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, task = spec_of(micro_batch="auto"), toy_tasks.numbers()
    for size in (8, 4):  # less memory is free the second time
        monkeypatch.setattr(loop, "choose", lambda spec, ranks, size=size: size)
        train(spec, task, alone, tmp_path)
        (tmp_path / run_directory.CHECKPOINTS / "step00000018.pt").unlink()
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert [row["samples"] for row in rows if "samples" in row] == [8 * step for step in range(1, 21)]
    assert {row["micro_batch"] for row in rows if "micro_batch" in row} == {8}


def test_one_that_does_not_say_its_micro_batch_is_not_there_while_one_is_chosen(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, task = spec_of(micro_batch="auto", steps=6), toy_tasks.numbers()
    monkeypatch.setattr(loop, "choose", lambda spec, ranks: 8)
    whole = weights(train(spec, task, alone, tmp_path))
    path = tmp_path / run_directory.CHECKPOINTS / "step00000006.pt"
    state = torch.load(path, weights_only=True)
    del state["micro_batch"]  # as an earlier version has written it
    torch.save(state, path)
    read, found = Checkpoints.read, []

    def noted(checkpoints: Checkpoints, path: Path) -> dict[str, Any]:
        state = read(checkpoints, path)
        found.extend(weakref.ref(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        return state

    def choose(spec: RunSpec, ranks: Ranks) -> int:
        assert found
        assert not any(tensor() is not None for tensor in found)
        return 8

    monkeypatch.setattr(Checkpoints, "read", noted)
    monkeypatch.setattr(loop, "choose", choose)
    assert torch.equal(weights(train(spec, task, alone, tmp_path)), whole)  # it goes on from there


def test_a_row_without_its_step_goes_away(alone: Ranks, tmp_path: Path) -> None:
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    with open(tmp_path / run_directory.METRICS, "a") as file:
        file.write('{"loss": 1.0}\n{"step": null}\n')
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    assert [row["step"] for row in run_directory.LineTail(tmp_path / run_directory.METRICS).read()] == list(range(1, 21))


def test_a_panel_that_follows_a_run_that_goes_on_counts_no_step_twice(alone: Ranks, tmp_path: Path) -> None:
    from workbench.runs.panel.follow import Follower

    spec, task = spec_of(), toy_tasks.numbers()
    train(spec, task, alone, tmp_path)
    follower = Follower(HandMadeRun(tmp_path).run)
    before = follower.snapshot()
    train(spec, task, alone, tmp_path)
    after = follower.snapshot()
    assert (after.done, after.ranks[0].steps) == (before.done, before.ranks[0].steps) == (20, 20)
    assert after.losses == before.losses


def test_without_any_it_begins_anew(alone: Ranks, tmp_path: Path) -> None:
    spec, task = spec_of(evaluate=False, noise_scale=1, accumulation=2), toy_tasks.numbers()
    train(spec, task, alone, tmp_path)
    for path in (tmp_path / run_directory.CHECKPOINTS).iterdir():
        path.unlink()
    train(spec, task, alone, tmp_path)
    for name in (run_directory.METRICS, run_directory.noise_file(0)):
        assert [row["step"] for row in run_directory.LineTail(tmp_path / name).read() if "step" in row] == list(range(1, 21))


def test_without_the_knob_nothing_is_written(alone: Ranks, tmp_path: Path) -> None:
    train(spec_of(checkpoint_every=None, steps=2), toy_tasks.numbers(), alone, tmp_path)
    assert not (tmp_path / run_directory.CHECKPOINTS).exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("PytorchStreamWriter failed writing file data/3")])
def test_a_full_disk_leaves_the_last_one(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    save, calls = torch.save, []

    def full(state: object, file: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            file.write(b"half of it")
            raise error
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)  # it goes on
    assert names(tmp_path) == ["step00000006.pt", "step00000018.pt"]
    (note,) = [note for note in HandMadeRun(tmp_path).run.notes if "checkpoint" in note]
    assert "the checkpoint after step 12 could not be written, and the last is step00000006.pt: " in note
    assert "make room" in note
    assert "The training goes on, and the next is tried after step 18" in note


def test_the_best_is_one_that_was_written(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, trainer, save = Checkpoints(tmp_path, alone, 6), Trainer(spec_of(), toy_tasks.numbers(), alone), checkpoint_file.save

    def broken(state: dict[str, Any], path: Path) -> str:
        if state["step"] == 12:
            raise OSError(errno.EIO, "Input/output error")
        return save(state, path)

    monkeypatch.setattr(checkpoint_file, "save", broken)
    for step, loss in ((6, 1.0), (12, 0.5), (18, 2.0), (24, 3.0), (30, 4.0)):
        checkpoints.write(step, trainer, wait=False, score=loss)
    checkpoints.finish()
    assert names(tmp_path) == [f"step000000{step}.pt" for step in ("06", 24, 30)]
    last = checkpoints.latest()
    assert last
    best = checkpoints.best(last)
    assert best
    assert (best[0].name, best[1]["best"]) == ("step00000006.pt", (1.0, 6))


@pytest.mark.parametrize(("last", "goes_on"), [(13, "goes on"), (6, "goes on from step 6"), (0, "")])
def test_a_signal_says_from_which_checkpoint_the_run_goes_on(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: int, goes_on: str
) -> None:
    ranks, save, update = dataclasses.replace(alone), checkpoint_file.save, Trainer.update
    updates: list[int] = []

    def broken(state: dict[str, Any], path: Path) -> str:
        if state["step"] > last:
            raise OSError(errno.EIO, "Input/output error")
        return save(state, path)

    def signalled(trainer: Trainer) -> None:
        update(trainer)
        updates.append(1)
        if len(updates) == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint_file, "save", broken)
    monkeypatch.setattr(Trainer, "update", signalled)
    train(spec_of(), toy_tasks.numbers(), ranks, tmp_path, preemptible=True)
    assert ranks.preempted == "SIGTERM"
    words = f"wb.launch(resume={str(tmp_path)!r}) {'goes on from there' if last == 13 else goes_on}"
    words = words if last else "there is no checkpoint, so it begins anew"  # and `resume=` would be refused
    assert f"ended by SIGTERM after step 13 of 20: {words}\n" in capsys.readouterr().out
    (note,) = [note for note in HandMadeRun(tmp_path).run.notes if "SIGTERM" in note]
    how = "with a checkpoint" if last == 13 else "without a sound checkpoint"
    words = f"wb.launch(resume=run) {goes_on}" if last else "there is none before it, so it begins anew"
    assert note == f"SIGTERM ended it after step 13, {how}: {words}"


def test_a_last_checkpoint_that_cannot_be_written_is_a_note(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint_file.save

    def broken(state: dict[str, Any], path: Path) -> str:
        if state["step"] == 18:
            raise OSError(errno.EIO, "Input/output error")
        return save(state, path)

    monkeypatch.setattr(checkpoint_file, "save", broken)
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    (note,) = [note for note in HandMadeRun(tmp_path).run.notes if "checkpoint" in note]
    assert "the checkpoint after step 18 could not be written, and the last is step00000012.pt: [Errno 5] Input/output error" in note
    assert "The training goes on" not in note


def test_a_disk_that_stays_full_is_told_a_few_times(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint_file.save

    def broken(state: dict[str, Any], path: Path) -> str:
        if state["step"] < 18:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(state, path)

    monkeypatch.setattr(checkpoint_file, "save", broken)
    train(spec_of(checkpoint_every=1), toy_tasks.numbers(), alone, tmp_path)
    run = HandMadeRun(tmp_path).run
    told = [re.findall(r"after step (\d+) could not be written", note) for note in run.notes]
    assert [int(step) for steps in told for step in steps] == [1, 2, 4, 8, 16]
    assert sum("after step 18 was written, after 17 that could not be" in note for note in run.notes) == 1
    assert "17 that could not be" in str(wb.health(run))


def test_a_folder_that_cannot_be_listed_ends_no_training(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def broken(*given: Any) -> Any:
        tried.append(given)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_file, "save", broken)
    monkeypatch.setattr("workbench.train.checkpoints.checkpoints_of", lambda run_dir: broken() if tried else [])
    train(spec_of(steps=6), toy_tasks.numbers(), alone, tmp_path)
    (note,) = [note for note in HandMadeRun(tmp_path).run.notes if "checkpoint" in note]
    assert "could not be written, and their folder cannot be listed: " in note


def test_the_last_step_may_be_the_best(alone: Ranks, tmp_path: Path) -> None:
    values = iter([3.0, 2.0, 1.0, 9.0])
    task = toy_tasks.numbers(evaluate=lambda model: {"validation_loss": next(values)})
    train(spec_of(steps=18, evaluate="checkpoint"), task, alone, tmp_path)
    checkpoints = Checkpoints(tmp_path, alone, 6)
    last = checkpoints.latest()
    assert last
    assert last[1]["best"] == (1.0, 18)
    assert next(values) == 9.0  # the last step was evaluated once
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert [row["validation_loss"] for row in rows if "validation_loss" in row] == [3.0, 2.0, 1.0]


def test_a_folder_that_may_not_be_written_ends_no_training(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(state: object, path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    train(spec_of(steps=6, parallel="fsdp"), toy_tasks.numbers(), alone, tmp_path)
    before = names(tmp_path)
    monkeypatch.setattr(checkpoint_file, "save", refused)  # root may write everywhere
    train(spec_of(steps=18, parallel="fsdp"), toy_tasks.numbers(), alone, tmp_path)
    assert names(tmp_path) == before
    (note,) = [note for note in HandMadeRun(tmp_path).run.notes if "after step 12" in note]
    assert "could not be written, and the last is step00000006.pt: [Errno 13] Permission denied" in note


def test_what_is_written_is_the_state_of_the_step(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the training goes on meanwhile; a rank that never comes is not waited for when the training fails."""
    trainer, begin = Trainer(spec_of(), toy_tasks.numbers(), alone), threading.Event()
    save = checkpoint_file.save
    monkeypatch.setattr(checkpoint_file, "save", lambda *arguments: begin.wait(30) and save(*arguments))
    before = weights(trainer.module).clone()
    with Checkpoints(tmp_path, alone, 6) as checkpoints:
        checkpoints.write(6, trainer, wait=False)
        trainer.step([next(trainer.batches())])
        assert not torch.equal(weights(trainer.module), before)
        begin.set()
    checkpoints.resume(trainer, checkpoints.latest())
    assert torch.equal(weights(trainer.module), before)
    waiting = Checkpoints(tmp_path, dataclasses.replace(alone, world_size=2), 6)
    waiting.write(12, trainer, wait=False)
    waiting.__exit__(KeyError, None, None)
    assert names(tmp_path) == ["step00000006.pt"]


@pytest.mark.parametrize("done", [0, 1, 3, 4, 9])
def test_the_order_of_samples_goes_on(alone: Ranks, done: int) -> None:
    def first(done: int, count: int) -> list[Tensor]:
        trainer = Trainer(spec_of(accumulation=2, micro_batch=16), toy_tasks.numbers(), alone)
        batches = micro_batches(trainer.loader, 2, alone, done)
        return [next(batches)[0] for _ in range(count)]

    want, got = first(0, 2 * done + 4)[2 * done :], first(done, 4)
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))


def test_no_row_is_missing_where_the_run_was_killed_at_a_checkpoint(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, task, write = spec_of(noise_scale=1, accumulation=2, checkpoint_every=5), toy_tasks.numbers(), Checkpoints.write

    def killed_after(checkpoints: Checkpoints, step: int, *arguments: Any, **_: Any) -> None:
        write(checkpoints, step, *arguments)
        shutil.copytree(tmp_path, tmp_path.with_name(f"killed{step}"))  # what would be there, had the machine been switched off now

    monkeypatch.setattr(Checkpoints, "write", killed_after)
    train(spec, task, alone, tmp_path)
    monkeypatch.undo()
    for step in (5, 10, 15):
        killed = tmp_path.with_name(f"killed{step}")
        train(spec, task, alone, killed)
        rows = {name: run_directory.LineTail(killed / name).read() for name in (run_directory.METRICS, "rank0.jsonl", "noise0.jsonl")}
        assert [row["step"] for row in rows[run_directory.METRICS]] == list(range(1, 21))
        steps = Timeline.from_lines(rows["rank0.jsonl"]).steps
        assert [(at.index, at.samples) for at in steps] == [(number, 16) for number in range(20)]
        assert all(at.seconds > 0 for at in steps)
        assert [row["step"] for row in rows["noise0.jsonl"] if "step" in row] == list(range(1, 21))


def test_a_checkpoint_waits_for_the_rows_of_all_ranks(alone: Ranks, tmp_path: Path) -> None:
    trainer = Trainer(spec_of(), toy_tasks.numbers(), alone)
    ranks = [dataclasses.replace(alone, rank=rank, world_size=3) for rank in range(3)]
    for rank in (2, 1):
        Checkpoints(tmp_path, ranks[rank], 6).write(6, trainer, f"row of {rank}\n")
        assert not (tmp_path / run_directory.CHECKPOINTS).exists()
    Checkpoints(tmp_path, ranks[0], 6).write(6, trainer, "row of 0\n")
    assert Checkpoints(tmp_path, alone, 6).read(tmp_path / run_directory.CHECKPOINTS / "step00000006.pt")["rows"] == {
        rank: f"row of {rank}\n" for rank in range(3)
    }


def test_a_dataset_that_has_changed_is_said(alone: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(spec_of(), toy_tasks.numbers(), alone, tmp_path)
    train(spec_of(steps=22), toy_tasks.numbers(), alone, tmp_path)
    assert "note: the dataset" not in capsys.readouterr().out
    train(spec_of(steps=24), toy_tasks.numbers(dataset=lambda: toy_tasks.Numbers(48)), alone, tmp_path)
    words = "the dataset has 48 samples now, and had 64 samples before: the order of the samples differs"
    assert f"note: {words}" in capsys.readouterr().out
    assert [row["notes"] for row in run_directory.LineTail(tmp_path / run_directory.RESUMES).read()] == [[], [words]]


def test_what_powersgd_keeps_is_in_a_checkpoint_and_of_no_use_on_other_ranks(alone: Ranks, tmp_path: Path) -> None:
    wide = toy_tasks.numbers(model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)))
    spec = spec_of(gradient_compression="powersgd(start=2)", steps=13)
    whole = train(spec, wide, alone, tmp_path)
    part = torch.load(tmp_path / run_directory.CHECKPOINTS / "step00000012.rank0.pt", weights_only=True)["compression"]
    assert part["iter"] == 12
    assert float(part["error_dict"][0].abs().sum()) > 0
    assert torch.equal(weights(train(spec, wide, alone, tmp_path)), weights(whole))  # from step 12
    train(spec.replace(micro_batch=2, steps=14), wide, alone, tmp_path)
    rows = run_directory.LineTail(tmp_path / run_directory.RESUMES).read()
    assert [any("PowerSGD goes on compressing, without what it" in note for note in row["notes"]) for row in rows] == [False, True]


def test_an_interrupt_while_the_thread_starts_is_not_hidden(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(spec_of(), toy_tasks.numbers(), alone)
    checkpoints = Checkpoints(tmp_path, alone, 6)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.write(6, trainer, wait=False)
    checkpoints.finish()
    started = threading.Thread.start
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: (started(thread), signal.raise_signal(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.write(6, trainer, wait=False)
    checkpoints.finish()
    assert names(tmp_path) == ["step00000006.pt"]


class Named(toy_tasks.Numbers):
    """Numbers of two classes."""

    def __init__(self, classes: list[str] | dict[str, int], root: str = "here") -> None:
        super().__init__()
        self.root = root
        if isinstance(classes, dict):
            self.class_to_idx = classes
        else:
            self.classes = classes


def test_a_checkpoint_of_other_classes_is_refused_and_other_data_are_said(
    alone: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What target 1 means is not in the weights: a model would go on with cats that it has learnt as dogs."""
    train(spec_of(steps=12), toy_tasks.numbers(dataset=lambda: Named(["cat", "dog"])), alone, tmp_path)
    with pytest.raises(
        run_directory.DamagedRunError, match=r"it is of other classes: target 0 was 'cat', and is 'dog' now.*: undo that change, or"
    ):
        train(spec_of(), toy_tasks.numbers(dataset=lambda: Named(["dog", "cat"])), alone, tmp_path)
    with pytest.raises(run_directory.DamagedRunError, match="target 2 was 'none', and is 'emu' now"):
        train(spec_of(), toy_tasks.numbers(dataset=lambda: Named({"dog": 1, "emu": 2, "cat": 0})), alone, tmp_path)
    capsys.readouterr()
    train(spec_of(), toy_tasks.numbers(dataset=lambda: Named({"dog": 1, "cat": 0}, "there")), alone, tmp_path)
    said = capsys.readouterr().out
    assert "note: the data's .root is 'there' now, and was 'here' before" in said
    assert "goes on from step 12" in said


class Augmented(torch.utils.data.Dataset[Any]):
    """A dataset of the user's own around another."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@pytest.mark.parametrize(
    "around",
    [
        lambda data: torch.utils.data.Subset(data, range(32)),
        lambda data: torch.utils.data.random_split(data, [0.5, 0.5], torch.Generator().manual_seed(0))[1],
        lambda data: torch.utils.data.ConcatDataset([toy_tasks.Numbers(), data, data]),
        lambda data: Augmented(torch.utils.data.Subset(data, range(32))),
    ],
)
def test_the_classes_of_a_part_of_a_dataset_are_those_of_the_whole(alone: Ranks, tmp_path: Path, around: Any) -> None:
    train(spec_of(steps=6), toy_tasks.numbers(dataset=lambda: around(Named(["cat", "dog"]))), alone, tmp_path)
    with pytest.raises(run_directory.DamagedRunError, match="it is of other classes: target 0 was 'cat', and is 'dog' now"):
        train(spec_of(), toy_tasks.numbers(dataset=lambda: around(Named(["dog", "cat"]))), alone, tmp_path)
    train(spec_of(), toy_tasks.numbers(dataset=lambda: around(Named({"dog": 1, "cat": 0}))), alone, tmp_path)


def test_datasets_of_several_kinds_have_the_classes_of_each() -> None:
    held = Augmented(None)
    held.dataset = held
    assert classes_of(held) is None
    both = torch.utils.data.ConcatDataset([Named(["cat", "dog"]), Named(["emu"]), Named(["cat", "dog"])])
    assert classes_of(both) == ["cat", "dog", "emu"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_old_checkpoints_that_cannot_be_deleted_are_said_once_and_are_not_a_failed_save(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name == "step00000006.pt":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    train(spec_of(parallel=parallel, steps=36), toy_tasks.numbers(), alone, tmp_path)
    notes = [row["note"] for row in run_directory.LineTail(tmp_path / run_directory.rank_file(0)).read() if "note" in row]
    assert [note for note in notes if "deleted" in note] == [note for note in notes if "checkpoint" in note]
    (note,) = (note for note in notes if "checkpoint" in note)
    assert note.removeprefix("warning: ").startswith(
        "the checkpoint after step 18 was written, but older ones could not be deleted: [Errno 30] Read-only file system"
    )
    there = {6, 30, 36}  # the others were deleted
    assert {int(name[4:12]) for name in names(tmp_path)} == there


WIDE = """
import torch
import workbench as wb


def build() -> wb.Task:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    layers = [torch.nn.Linear(4, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2)]
    return wb.Task(
        model=lambda: torch.nn.Sequential(*layers),
        dataset=lambda: data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
"""


def test_powersgd_of_a_model_with_more_than_one_bucket_ends(tmp_path: Path) -> None:
    """Its hook waits in gloo's two threads: with two buckets, both waited for ever."""
    (tmp_path / "wide.py").write_text(WIDE)
    spec = RunSpec(
        task=f"{tmp_path / 'wide.py'}:build",
        device="cpu",
        nproc_per_node=2,
        steps=8,
        micro_batch=4,
        gradient_compression="powersgd(start=2)",
    )
    run = wb.launch(spec, runs_dir=tmp_path / "runs")
    try:
        assert run.wait(timeout=120).ok
    finally:
        run.stop()
    with pytest.raises(LaunchError, match="one bucket"):
        wb.launch(spec.replace(bucket_cap_mb=1.0), runs_dir=tmp_path / "runs")
