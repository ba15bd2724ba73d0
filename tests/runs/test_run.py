"""A run read back from its directory: while it runs, after the end, damaged, too new."""

import contextlib
import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import STEP, HandMade
from workbench.core import run_directory
from workbench.runs.compare import compare
from workbench.runs.failure import RunError
from workbench.runs.launch.resume import archive_attempt
from workbench.runs.page import run_text
from workbench.runs.panel.follow import Follower
from workbench.runs.rows import RunRows, digest_files, digest_rows
from workbench.runs.run import Run, RunFormatError
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.runs.training_knobs import SpecError
from workbench.timeline.watch import watch

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


def test_a_folder_that_does_not_exist_and_what_may_be_meant(by_hand: Make) -> None:
    there = by_hand().ended("finished").path
    with pytest.raises(run_directory.DamagedRunError, match=r"is not a run directory: there is no such folder; did you mean ") as caught:
        Run.load(there.with_name(there.name[:-1]))
    assert f'"{there}"' in str(caught.value)
    with pytest.raises(run_directory.DamagedRunError, match=f'did you mean "{there}"'):
        Run.load(there.parent.parent / there.name)
    with pytest.raises(run_directory.DamagedRunError, match=r"there is no such folder$"):  # none that compare would take
        Run.load(there.with_name("@"))
    measured = by_hand(name="a").steps(1).path
    shutil.copytree(there, there.with_name("z"))
    with pytest.raises(run_directory.DamagedRunError, match=f'no such folder; the newest there is "{measured}"'):
        Run.load(there.with_name("@"))
    with pytest.raises(run_directory.DamagedRunError, match=r"no such folder$"):
        Run.load(there.parent / "a" / "b")


INFO = '{"format": 1, "id": "a", "name": "b", "created": 0, "host": "h", "launch_dir": ".", "spec": %s}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is missing: .* is not a run directory, or its launch was cut off"),
        ('{"format": 1, "outcome": {}}', "its outcome has no state"),
        ("{", "is damaged"),
        ("{}", "has no format number"),
        ('{"format": 1}', "is damaged: it has no id"),
        (INFO % '{"kind": "task", "task": "x", "steps": -1}', "steps=-1"),
        (INFO % '"text-gpt"', "is damaged: its spec is 'text-gpt', expected an object"),
        (INFO % ('{"kind": "task", "' + "k" * 10_000 + '": 1}'), "has no knob 'k{80}'"),
        (INFO.replace('"created": 0', '"created": "now"') % "{}", "its created is 'now', expected a number"),
        (INFO.replace('"created": 0', '"created": -Infinity') % "{}", "its created is -inf, expected a number"),
        (INFO.replace('"created": 0', '"created": 1' + "0" * 400) % "{}", "its created is 1000.*, expected a number"),
    ],
)
def test_a_damaged_directory(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(run_directory.DamagedRunError, match=said):
        Run.load(tmp_path)


def test_the_run_of_an_optimizer_that_is_refused_today_is_read_and_not_launched(by_hand: Make) -> None:
    for knobs in ({"optimizer": "muon", "parallel": "fsdp"}, {"optimizer": "adamw(fused=True, foreach=True)"}):
        spec = wb.RunSpec(task="text-gpt", nproc_per_node=2, device="cpu").to_json() | knobs
        run = by_hand(spec=spec).ended("failed").path
        assert Run.load(run).spec.optimizer == knobs["optimizer"]
        with pytest.raises(SpecError, match="optimizer="):
            wb.launch(Run.load(run).spec, runs_dir=run.parent)


@pytest.mark.parametrize(
    "row",
    ['{"step": 3, "forward": "x"}', '{"step": "x"}', '{"profiled": 3}', '{"step": 3, "forward": null}', '{"step": 3, "forward": -1}',
     '{"step": 3, "forward": -Infinity}', '{"step": 3, "forward": 1' + "0" * 400 + "}", '{"step": 1' + "0" * 400 + "}",
     '{"step": 3, "samples": NaN}',
     '{"step": 1' + "0" * 5000 + "}", '{"profiled": [0, 99999999999]}', "garbage", "[" * 100_000],
)  # fmt: skip
def test_a_row_that_is_no_step_is_left_out_and_the_others_stand(by_hand: Make, row: str) -> None:
    made = by_hand().steps(3).steps(3, rank=1).ended("finished")
    with open(made.path / "rank0.jsonl", "a") as file:
        file.write(f'{row}\n{{"step": 4}}\n')
    run = Run.load(made.path)
    assert [[step.index for step in timeline.steps] for timeline in run.timelines] == [[0, 1, 2, 4], [0, 1, 2]]
    (note,) = run.notes
    assert re.match(r"rank0\.jsonl: 1 (row is not a step and is left out|damaged row is left out): ", note)
    assert len(note) < 250
    assert f"\nnote: {note}" in run_text(run)
    (made.path / "rank1.jsonl").write_text('{"step": -1}\n')  # even its head is gone
    assert any(note.startswith("rank1.jsonl: 1 row is not a step") for note in Run.load(made.path).notes)
    assert "inf" not in run.summary.splitlines()[0]


@pytest.mark.parametrize(
    "row",
    ['{"loss": 3.0}', '{"step": "x"}', '{"step": 3, "loss": "low"}', '{"step": 3, "steps": []}', '{"step": 3, "samples": -Infinity}',
     '{"step": 3, "accuracy": [1]}', '{"step": 1' + "0" * 400 + "}", '{"step": 3, "loss": 1' + "0" * 400 + "}", "{}", "3"],
)  # fmt: skip
def test_a_row_of_figures_that_is_none_is_left_out(by_hand: Make, row: str) -> None:
    made = by_hand().losses(2)
    with open(made.path / "metrics.jsonl", "a") as file:
        file.write(f'{row}\n{{"step": 4, "loss": 0.25}}\n')
    run = Run.load(made.path)
    assert list(run.metrics["step"]) == [1, 2, 4]
    (note,) = run.notes
    assert note.startswith("metrics.jsonl: 1 damaged row is left out: ")
    assert run.progress[0] == 4
    assert "loss 0.250" in run.progress_words()


def test_whatever_is_damaged_the_rest_is_shown_or_the_file_is_named(by_hand: Make) -> None:
    """Bytes of one file at a time are overwritten, at random places."""
    chance, refused = random.Random(7), 0
    made = by_hand().steps(12).steps(12, rank=1).losses(12).ended("failed", returncode=1)
    (made.path / "errors").mkdir()
    record = {"rank": 0, "time_ns": 1, "kind": "exception", "message": "ValueError: boom", "traceback": None, "consequence": False}
    run_directory.write_json(made.path / "errors" / "rank0.json", record)
    names = ("run.json", "rank0.jsonl", "rank1.jsonl", "metrics.jsonl", "errors/rank0.json")
    for number in range(150):
        path = made.path / names[number % len(names)]
        whole = path.read_bytes()
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3, 10))):
            at = chance.randrange(len(data))
            data[at : at + 1] = chance.choice([b"-Infinity", b"9" * 400, b"null", b"[]", b"{", b"\0", b'"', b"x", b"\n", b"\xff"])
        path.write_bytes(bytes(data))
        try:
            text = run_text(run := Run.load(made.path))
        except (run_directory.DamagedRunError, RunFormatError) as error:
            text, refused = str(error), refused + 1
            assert path.name == "run.json"
        else:
            assert "inf samples/s" not in text
            _ = run.metrics, run.progress_words(), Follower(run).snapshot()
        assert len(text) < 4000
        path.write_bytes(whole)
    assert refused > 5


def test_losses_that_are_not_finite_are_said_and_written_as_json(by_hand: Make) -> None:
    def strict(constant: str) -> None:
        raise AssertionError(constant)

    made = by_hand().losses(2)
    writer = run_directory.LineWriter(made.path / "metrics.jsonl")
    writer.write({"step": 3 + i, "loss": loss} for i, loss in enumerate((math.nan, math.inf, -math.inf)))
    writer.close()
    for line in (made.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=strict)
    run = Run.load(made.path)
    assert [row["loss"] for row in run.metric_rows[3:]] == [math.inf, -math.inf]
    assert math.isnan(run.metric_rows[2]["loss"])
    (note,) = run.notes
    assert note.startswith("the loss is NaN or infinite from step 3 on: a smaller learning rate, ")
    assert Follower(run).snapshot().notes == (note,)
    (made.path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": NaN}\n')  # as earlier workbenches wrote it
    assert "from the first step on: " in Run.load(made.path).notes[0]
    (made.path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 2}\n')
    assert "in 1 of 2 steps, first in step 1" in Run.load(made.path).notes[0]


def test_a_clock_that_was_set_back_is_said(by_hand: Make) -> None:
    run = Run.load(by_hand(begun=time.time() + 3600).alive().path)
    assert run.seconds == 0
    assert "running · 0 of 20 steps · 0 s\nnote: the clock of this machine was set back" in run.summary


def test_digests_of_steps_are_read_by_attempt(tmp_path: Path) -> None:
    """Rank 1 has no third attempt: it was lost before it began; tenth attempts come after ninth ones, and other files are left alone."""
    folder = tmp_path / run_directory.FINGERPRINTS
    folder.mkdir()
    for name, steps in {"rank0-2": (3, 4), "rank0-1": (1, 2, 3), "rank1-1": (1, 2), "rank1-2": (3,), "rank0-10": (4, 5)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"step": step, "parts": {"loss": name}}) + "\n" for step in steps))
    for name in ("rankx-1.jsonl", "rank0-1.jsonl.part", "kill.json"):
        (folder / name).write_text("{}")
    assert [(attempt, rank) for attempt, rank, _ in digest_files(tmp_path)] == [(1, 0), (1, 1), (2, 0), (2, 1), (10, 0)]

    def losses(attempt: Any) -> dict[tuple[int, int], str]:
        return {key: row["parts"]["loss"] for key, row in digest_rows(tmp_path, attempt).items()}

    assert losses(2) == {(3, 0): "rank0-2", (4, 0): "rank0-2", (3, 1): "rank1-2"}
    assert losses("last") == {(4, 0): "rank0-10", (5, 0): "rank0-10", (3, 1): "rank1-2"}
    assert losses("all") == {
        (1, 0): "rank0-1",
        (2, 0): "rank0-1",
        (3, 0): "rank0-2",
        (4, 0): "rank0-10",
        (5, 0): "rank0-10",
        (1, 1): "rank1-1",
        (2, 1): "rank1-1",
        (3, 1): "rank1-2",
    }
    assert losses(7) == digest_rows(tmp_path / "none") == {}


def test_the_signal_of_an_earlier_attempt_does_not_say_how_to_go_on(by_hand: Make) -> None:
    """After a resume that failed, or finished, "resume it" would be the wrong advice, and it would be unclear which attempt was ended."""
    made = by_hand().ended("stopped")
    row = {"step": 28, "ended_by": "SIGTERM", "goes_on_from": 28}
    run_directory.write_json(made.path / run_directory.PREEMPTED, row)
    writer = run_directory.LineWriter(made.path / run_directory.RESUMES)
    writer.write([row])
    run = Run.load(made.path)
    follower, now = Follower(run), "SIGTERM ended it after step 28, with a checkpoint: wb.launch(resume=run) goes on"
    assert now in run.notes
    assert now in follower.snapshot().notes
    archive_attempt(made.path)  # as a resume does, which may fail before it has written anything
    earlier = "SIGTERM ended an earlier attempt after step 28"
    for notes in (Run.load(made.path).notes, follower.snapshot().notes):
        assert [note for note in notes if "SIGTERM" in note] == [earlier]
    again = {"step": 40, "ended_by": "SIGUSR1", "goes_on_from": 28}
    run_directory.write_json(made.path / run_directory.PREEMPTED, again)
    writer.write([{"step": 28, "checkpoint": "step00000028.pt", "passed_over": {}, "notes": []}, again])
    writer.close()
    for notes in (Run.load(made.path).notes, follower.snapshot().notes):
        assert [note for note in notes if "SIG" in note] == [
            earlier,
            "SIGUSR1 ended it after step 40, without a sound checkpoint: wb.launch(resume=run) goes on from step 28",
        ]


def test_after_a_signal_a_run_of_several_machines_goes_on_in_a_new_run(by_hand: Make) -> None:
    spec = RunSpec(task="text-gpt", device="cpu", nnodes=2)
    made = by_hand(spec=spec.to_json()).ended("stopped")
    row = {"step": 28, "ended_by": "SIGTERM", "goes_on_from": 28}
    run_directory.write_json(made.path / run_directory.PREEMPTED, row)
    with contextlib.closing(run_directory.LineWriter(made.path / run_directory.RESUMES)) as writer:
        writer.write([row])
    run = Run.load(made.path)
    call = "wb.launch(run.spec.replace(nnodes=…, accumulation=…), resume=run)"
    for notes in (run.notes, Follower(run).snapshot().notes):
        assert f"SIGTERM ended it after step 28, with a checkpoint: a new run, {call}, goes on" in notes


def test_what_was_passed_over_when_a_run_went_on_is_said(by_hand: Make) -> None:
    made = by_hand().steps(3)
    writer = run_directory.LineWriter(made.path / run_directory.RESUMES)
    writer.write([{"step": 6, "checkpoint": "step00000006.pt", "passed_over": {}, "notes": []}])
    assert Run.load(made.path).notes == ()
    words = "the dataset has 48 samples now"
    writer.write([{"step": 6, "passed_over": {"step00000012.pt": "it is empty"}, "notes": [words]}, {"notes": 3}])
    writer.close()
    run = Run.load(made.path)
    assert run.notes == (
        "it resumed from step 6, because a later checkpoint could not be used: step00000012.pt, it is empty",
        f"when it resumed from step 6: {words}",
    )
    now = Follower(run).snapshot()
    assert now.notes == run.notes
    pytest.importorskip("ipywidgets", reason="a panel needs Jupyter's packages (pip install '.[notebooks]')")
    from workbench.runs.panel.html import problem

    assert "step00000012.pt, it is empty" in problem(now)


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


def test_a_comparison_shows_the_losses_and_a_rate_that_is_the_tasks_own(by_hand: Make) -> None:
    spec = RunSpec(task="clipart-resnet")
    own = by_hand(spec=spec.to_json()).steps(20).losses(20).ended("finished")
    given = by_hand(spec=spec.replace(lr=0.1).to_json()).steps(20).ended("finished")
    found = compare(Run.load(own.path), Run.load(given.path))
    assert found.labels == ["lr=the task's own", "lr=0.1"]
    assert [row[-1] for row in found.table.rows] == ["0.1", "–"]


def test_a_comparison_says_what_is_within_the_noise_of_its_runs(by_hand: Make) -> None:
    """Two runs of one program were shown with 1.04×, and nothing said that their own steps vary by more."""
    chance = random.Random(1)

    def steps(made: HandMade, forward: float, spread: float) -> Run:
        made.steps(0)
        for i in range(60):
            write(made, i, forward * math.exp(chance.gauss(0, spread)))
        return Run.load(made.ended("finished").path)

    def write(made: HandMade, step: int, forward: float) -> None:
        with (made.path / run_directory.rank_file(0)).open("a") as file:
            file.write(json.dumps({"step": step, **STEP, "forward": forward}) + "\n")

    base, equal, faster = steps(by_hand(), 0.1, 0.2), steps(by_hand(), 0.1, 0.2), steps(by_hand(), 0.02, 0.2)
    found = compare(base, equal, faster)
    assert found.within_noise == [None, True, False]
    assert found.ranges[0] is None
    assert found.ranges[1] is not None
    assert 1 in found.ranges[1]
    assert found.ranges[2] is not None
    assert found.ranges[2].low > 1.5
    assert found.table.rows[0][-2] == "–"
    assert found.table.rows[1][-2].endswith("×, within noise")
    assert found.table.rows[2][-2].endswith("×")
    assert [up in span for up, span in zip(found.speedups[1:], found.ranges[1:], strict=True) if span] == [True, True]
    assert "as in workbench what-changed" in str(found)
    frame = found.to_frame()
    assert list(frame["within_noise"]) == [None, True, False]
    assert frame["low"][2] == found.ranges[2].low
    facts = json.loads(json.dumps(found.facts()))
    assert [fact["within_noise"] for fact in facts] == [None, True, False]
    assert facts[2]["low"] == pytest.approx(found.ranges[2].low)
    change = wb.what_changed(base, faster, rerun=False)
    assert found.ranges[2].high == pytest.approx(1 / change.ratio.low)
    short = compare(Run.load(by_hand().steps(8).ended("finished").path), base)
    assert short.within_noise == [None, None]
    assert short.table.rows[1][-2] == "too few steps to tell"
    assert short.facts()[1]["low"] is None


def test_the_facts_of_a_comparison_read_the_steps_of_each_run_once(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million steps each reading takes long; it was done twice."""
    found, read = compare(*(Run.load(by_hand().steps(20).ended("finished").path) for _ in range(3))), list[Run]()
    monkeypatch.setattr("workbench.diagnosis.rerun.change_in_time", lambda pair: read.extend(pair[1]))
    assert [fact["within_noise"] for fact in found.facts()] == [None] * 3
    assert read == [*found.runs[1:]]


def test_the_last_loss_is_the_same_wherever_it_is_shown(by_hand: Make) -> None:
    made, none = by_hand().steps(20).losses(3), by_hand().steps(20).ended("finished")
    with (made.path / run_directory.METRICS).open("a") as file:
        file.write('{"step": 4, "steps": 20, "loss": NaN, "lr": 0.1, "samples": 8, "seconds": 1.0}\n')
    made.ended("finished")
    found = compare(made.path, none.path)
    assert [row[-1] for row in found.table.rows] == ["nan", "–"]
    assert next(row for row in found.differences.rows if row[1] == "last loss")[:3] == ["outcome", "last loss", "nan"]


def test_a_run_that_did_not_finish_is_compared_with_a_note(by_hand: Make) -> None:
    whole, stopped = by_hand().steps(20).ended("finished"), by_hand().steps(20).ended("stopped")
    assert compare(whole.path, str(whole.path)).notes == []
    (note,) = compare(Run.load(whole.path), Run.load(stopped.path)).notes
    assert "stopped after 20" in note
    assert note in str(compare(Run.load(whole.path), Run.load(stopped.path)))


def test_a_comparison_says_on_which_run_the_machine_was_busy(by_hand: Make) -> None:
    quiet, busy = (by_hand(machine={"load": load}, cores=2).steps(20).ended("finished") for load in (1.9, 5.04))
    shared = by_hand(machine={"load": 5.04, "cores": 8}, cores=2).steps(20).ended("finished")  # it may use two of eight
    assert compare(quiet.path, shared.path).notes == []
    found = compare(Run.load(quiet.path), Run.load(busy.path))
    assert found.notes == [f"{found.labels[1]}: the machine was busy in the minute before it began (load 5.0, 2 cores): its times may vary"]


def test_what_cannot_be_compared(by_hand: Make) -> None:
    run = Run.load(by_hand().steps(20).ended("finished").path)
    with pytest.raises(ValueError, match=r"compare\(\) got 1 run: expected two or more"):
        compare(run)
    with pytest.raises(ValueError, match=r"compare\(\) got 1 run: .*compare\(before, after\)"):
        compare(str(run.path))
    with pytest.raises(ValueError, match=r"compare\(\) got a list alone, or an empty one: expected two or more, .* compare\(\*runs\)"):
        compare([run, run])
    with pytest.raises(ValueError, match=r"compare\(\) got a int: expected runs, compare\(before, after\) or compare\(\*runs\)"):
        compare([run, 3], run)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="has no measured step to compare"):
        compare(run, Run.load(by_hand().ended("stopped").path))
    experiments = Run.load(by_hand(experiment={"kind": "diagnose"}).ended("finished").path)
    with pytest.raises(ValueError, match=r"it is a run of experiments \(diagnose\), not a training; choose one that trained"):
        compare(run, experiments)
    script = Run.load(by_hand(spec=ScriptSpec(script="train.py").to_json()).ended("finished").path)
    with pytest.raises(ValueError, match="a script's steps are measured with watch=True"):
        compare(run, script)


def test_a_rank_that_starts_while_notes_are_read_is_left_for_the_next_time(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, names = by_hand().steps(3), RunRows.ranks

    def ranks(files: RunRows) -> list[str]:
        there: list[str] = names.__get__(files)
        if len(there) == 1:
            made.steps(3, rank=1)
        return there

    monkeypatch.setattr(RunRows, "ranks", property(ranks))
    run = Run.load(made.path)
    assert run.notes == ()
    assert len(run.rank_means) == 2


def test_an_attribute_that_a_run_does_not_have(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.load(by_hand().path)
    for name, near in (("timeline", "timelines"), ("log", "logs")):
        with pytest.raises(AttributeError, match=f"'Run' object has no attribute '{name}': did you mean '{near}'"):
            getattr(run, name)
    with pytest.raises(ValueError, match=r"a run is watched already: run shows it live in a notebook, run\.wait\(\) waits"):
        watch(run)  # type: ignore[arg-type]
    monkeypatch.setattr(Run, "memory", property(lambda self: [].nothing))  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'list' object has no attribute 'nothing'"):
        _ = run.memory
