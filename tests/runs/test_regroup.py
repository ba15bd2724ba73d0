"""The machines that are left of a run agree on its next attempt: never on two, whoever is killed or paused, and when."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from benchmarks import random_kills
from tests.conftest import HandMade, processes_with
from tests.forked import Forks
from workbench.core import run_directory
from workbench.core.run_directory import BEAT, NEXT, NODE_JSON, NODES, RUN_JSON
from workbench.programs import restart
from workbench.runs.launch import guard, nodes, regroup
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.regroup import Agreement, Heartbeat, LeftBehindError, NoAgreementError, plan_file
from workbench.runs.restarts import resume_with
from workbench.runs.run import Run
from workbench.train import checkpoint_file

SPEC = wb.RunSpec(task="text-gpt", device="cpu", nnodes=3, micro_batch=8, steps=20, checkpoint_every=5)


class Machine:
    """A machine of a run, as far as it takes part in agreements: it beats, trains in an attempt, or agrees on the next."""

    def __init__(self, run_dir: Path, rank: int, count: int) -> None:
        self.run_dir, self.rank, self.now, self._beats = run_dir, rank, 1000.0 * rank, 0
        self.trains: int | None = 0
        self.node: dict[str, Any] = {"rank": rank, "members": list(range(count)), "attempt": 0, "silence": 20.0}
        self.agreement: Agreement | None = None
        self.plan: dict[str, Any] | None = None
        self.moved = 0
        self.dead = self.paused = self.left = False
        self.meanwhile: list[Machine] = []
        (run_dir / NODES / str(rank)).mkdir(parents=True)
        self.tick(0.0)

    @property
    def works(self) -> bool:
        return not (self.dead or self.paused or self.left)

    def propose(self, ready: Sequence[int]) -> dict[str, Any]:
        """Between the look at a plan that is not there and the writing of one, others may have done much."""
        others, self.meanwhile = self.meanwhile, []
        for other in 16 * others:
            if other.works and other is not self:
                other.tick(1.0)
        return {"members": list(ready), "ends": ""}

    def fail(self) -> None:
        """Its ranks have ended."""
        self.trains = None
        self.agreement = Agreement(self.run_dir, self.node, f"host{self.rank}:1", lambda ready: self.propose(ready), self.now)

    def tick(self, seconds: float) -> None:
        """A while passes on its clock: it beats, and takes a step of the agreement, if there is one."""
        self.now += seconds
        self._beats += 1
        (self.run_dir / NODES / str(self.rank) / BEAT).write_text(str(self._beats))
        if self.agreement is None:
            return
        try:
            plan = self.agreement.step(self.now)
            if plan != self.plan:
                self.plan, self.moved = plan, 0
            if plan is not None and self.rank == min(plan["members"]) and self.moved < 3:
                self.move(plan)  # one part of the run directory, which it prepares
            elif plan is not None:
                self.start(plan)
        except LeftBehindError:
            self.left = True

    def move(self, plan: dict[str, Any]) -> None:
        ready = [run_directory.read_json(self.run_dir / NODES / str(rank) / regroup.READY)["attempt"] for rank in plan["members"]]
        assert max(ready) == plan["attempt"]  # nobody has given the attempt up, or begun a later one
        assert not plan_file(self.run_dir, plan["attempt"] + 1).exists()
        self.moved += 1

    def start(self, plan: dict[str, Any]) -> None:
        if self.rank == min(plan["members"]):
            run_directory.write_json(self.run_dir / RUN_JSON, {"attempt": plan["attempt"]})
        assert self.rank in plan["members"]
        assert plan["attempt"] > self.node["attempt"]
        self.node |= {"members": plan["members"], "attempt": plan["attempt"]}
        self.trains, self.agreement, self.plan = plan["attempt"], None, None


def train_at_a_time(machines: Sequence[Machine]) -> list[int]:
    """The attempts that can take a step: all of their members are in them. One that is paused counts, for it may go on."""
    members = {0: list(range(len(machines)))}
    members |= {
        number: run_directory.read_json(file)["members"]
        for number in range(1, 99)
        if (file := plan_file(machines[0].run_dir, number)).exists()
    }
    for machine in machines:
        assert machine.trains is None or machine.node["members"] == members[machine.trains]
    return [
        number for number, ranks in members.items() if all(machines[rank].trains == number and not machines[rank].dead for rank in ranks)
    ]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 4), st.lists(st.tuples(st.sampled_from("ttttttffikpppcc"), st.integers(0, 3), st.floats(0.05, 20.0)), max_size=40))
def test_no_two_attempts_train(count: int, events: list[tuple[str, int, float]]) -> None:
    with TemporaryDirectory() as folder:
        machines = [Machine(Path(folder), rank, count) for rank in range(count)]
        for what, which, seconds in events:
            machine = machines[which % count]
            if what == "k":
                machine.dead = True
            elif what in "pc":
                machine.paused = what == "p"
            elif what == "i":
                machine.meanwhile = machines
            elif machine.works and what == "f" and machine.trains is not None:
                machine.fail()
            elif machine.works and what == "t":
                machine.tick(seconds)
            assert len(train_at_a_time(machines)) <= 1
        for machine in machines:
            machine.paused = False
        for _ in range(150):  # nothing happens any more: those that are left go on together
            working, training = [machine for machine in machines if machine.works], train_at_a_time(machines)
            if all(machine.trains in training for machine in working):
                break
            for machine in working:  # ranks end when a machine of their attempt does not take part in it any more
                others = [machines[rank] for rank in machine.node["members"]]
                gone = any(not other.works or (other.agreement and other.agreement.attempt > machine.node["attempt"]) for other in others)
                machine.fail() if machine.trains is not None and gone else machine.tick(1.0)
        working = [machine for machine in machines if machine.works]
        assert len({machine.trains for machine in working}) <= 1
        assert all(machine.trains is not None for machine in working)
        assert not working or train_at_a_time(machines) == [working[0].trains]


def both_fail(folder: Path, count: int = 2) -> list[Machine]:
    machines = [Machine(folder, rank, count) for rank in range(count)]
    for machine in machines:
        machine.fail()
    return machines


def test_machines_that_are_all_there_go_on_with_all(tmp_path: Path) -> None:
    one, two = both_fail(tmp_path)
    for machine in 6 * (two, one):
        machine.tick(0.2)
    assert (one.trains, two.trains, two.node["members"]) == (1, 1, [0, 1])


def test_one_that_still_ends_its_ranks_is_waited_for(tmp_path: Path) -> None:
    machines = [Machine(tmp_path, rank, 2) for rank in range(2)]
    machines[0].fail()
    for _ in range(100):
        for machine in machines:
            machine.tick(1.0)
    assert (machines[0].trains, plan_file(tmp_path, 1).exists()) == (None, False)
    machines[1].tick(1.0)
    with pytest.raises(NoAgreementError, match="the machines did not agree on attempt 1 within 180 s after machine 0 had ended its ranks"):
        machines[0].tick(100.0)


def test_a_first_machine_that_beats_but_never_ends_to_prepare_is_not_waited_for_without_end(tmp_path: Path) -> None:
    one, two = (Machine(tmp_path, rank, 2) for rank in range(2))
    one.move = lambda _: None  # type: ignore[method-assign]
    two.fail()
    for machine in 15 * (two, one):
        machine.tick(10.0)
    one.fail()  # 150 s later: the limit counts from when the machine that waits ended its ranks
    for machine in 160 * (one, two):
        machine.tick(10.0)
    assert (two.trains, two.agreement.attempt) == (None, 1)  # type: ignore[union-attr]
    one.tick(0.0)
    with pytest.raises(NoAgreementError, match="machine 0 has not prepared attempt 1 within 1800 s after machine 1 had ended its ranks"):
        two.tick(100.0)


def test_a_plan_that_cannot_be_read_once_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = both_fail(tmp_path)
    for machine in 2 * (two, one):
        machine.tick(0.2)
    assert one.agreement is not None
    assert one.plan is not None
    later, read, failed = one.now + 2 * regroup.LIMIT, run_directory.read_json, list[Path]()  # it moves many files

    def fails_once(path: Path) -> dict[str, Any]:
        if path == plan_file(tmp_path, 1) and not failed:
            failed.append(path)
            raise OSError(116, "Stale file handle")
        return read(path)

    monkeypatch.setattr(run_directory, "read_json", fails_once)
    monkeypatch.setattr(restart, "time", SimpleNamespace(monotonic=lambda: later, sleep=lambda _: None))
    restart._check(one.agreement, 1)
    assert (len(failed), one.agreement.attempt) == (1, 1)
    run_directory.write_json(tmp_path / NODES / "1" / regroup.READY, {"attempt": 2, "endpoint": "host1:1"})
    with pytest.raises(restart._GivenUpError):
        restart._check(one.agreement, 1)


def test_a_silence_is_not_counted_by_who_was_paused_itself(tmp_path: Path) -> None:
    (beat := tmp_path / BEAT).write_text("1")
    heart = Heartbeat(beat)
    for now in (0.0, 1.0, 2.5, 100.0):
        heart.look(now)
    assert heart.silent == 1.0 + regroup.ONE_LOOK + regroup.ONE_LOOK
    beat.write_text("2")
    heart.look(101.0)
    assert heart.silent == 0.0


def test_the_first_machine_is_lost_after_it_wrote_the_plan(tmp_path: Path) -> None:
    one, two, three = both_fail(tmp_path, 3)
    for machine in (one, two, three, one, two, three):
        machine.tick(0.2)
        if one.plan is not None:
            one.dead = True
            break
    for _ in range(40):
        two.tick(0.5)
        three.tick(0.5)
    assert (two.trains, three.trains, three.node["members"]) == (2, 2, [1, 2])
    one.tick(100.0)  # it was only paused
    assert one.left


@pytest.mark.parametrize("moved", [0, 2])
def test_a_first_machine_that_wakes_up_when_the_others_have_given_it_up_takes_part_in_the_next_attempt(tmp_path: Path, moved: int) -> None:
    one, two, _ = machines = both_fail(tmp_path, 3)
    for _ in range(1 + moved):
        for machine in machines:
            machine.tick(0.2)
    assert (plan_file(tmp_path, 1).exists(), one.moved) == (True, moved)
    while two.agreement is not None and two.agreement.attempt == 1:
        two.tick(0.5)  # the first is silent
    for machine in 8 * machines:
        machine.tick(0.2)
    assert [machine.trains for machine in machines] == [2, 2, 2]
    assert two.node["members"] == [0, 1, 2]


def test_a_plan_whose_writer_was_cut_off_is_given_up(tmp_path: Path) -> None:
    one, two, three = both_fail(tmp_path, 3)
    one.dead = True
    plan_file(tmp_path, 1).touch()
    for _ in range(80):
        two.tick(0.5)
        three.tick(0.5)
    assert (two.trains, three.trains, three.node["members"]) == (2, 2, [1, 2])
    config = {"run_dir": str(tmp_path), "node": {"lost": {}, **one.node}}
    assert guard.Peers(config).went_on  # the plan that cannot be read hides no other


def test_the_end_of_the_launching_process_is_no_loss(tmp_path: Path) -> None:
    one, two, three = both_fail(tmp_path, 3)
    for machine in (one, three):
        run_directory.write_json(tmp_path / NODES / str(machine.rank) / NODE_JSON, {"outcome": {"state": "abandoned"}})
    (tmp_path / NODES / "0" / regroup.READY).unlink()
    for _ in range(5):
        two.tick(0.2)
    assert not plan_file(tmp_path, 1).exists()  # its guard, which has seen that, ends its part


def test_a_longer_silence_is_allowed_where_the_run_allows_one(tmp_path: Path) -> None:
    _, two = (Machine(tmp_path, rank, 2) for rank in range(2))
    two.node["silence"] = 60.0
    two.fail()
    for _ in range(14):
        two.tick(1.0)
    assert not plan_file(tmp_path, 1).exists()
    two.tick(1.0)
    two.tick(1.0)
    assert run_directory.read_json(plan_file(tmp_path, 1))["members"] == [1]


def test_a_look_that_takes_long_says_nothing_of_a_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (beat := tmp_path / BEAT).write_text("1")
    heart = Heartbeat(beat)
    for now in range(4):
        heart.look(float(now))
    assert heart.silent == 3.0
    clock = iter((100.0, 102.0, 103.0, 103.1))
    monkeypatch.setattr(regroup, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    heart.look(6.0)
    assert heart.silent == 0.0
    heart.look(7.0)
    assert heart.silent == 1.0


def test_a_plan_is_written_once(tmp_path: Path) -> None:
    one, two = both_fail(tmp_path)
    two.tick(0.2)
    one.meanwhile = [two]  # while the first one works on its plan, it is silent for so long that the other makes one
    one.tick(0.2)
    assert (two.trains, two.node["members"]) == (1, [1])
    one.tick(0.2)
    assert one.left


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    one, two = both_fail(tmp_path)
    for _ in range(6):
        one.tick(0.2)
        two.tick(0.2)
    assert (one.trains, two.trains) == (1, 1)
    two.node["attempt"] = 0
    two.fail()
    before = plan_file(tmp_path, 1).read_text()
    two.agreement._claim({"members": [1]})  # type: ignore[union-attr]
    assert plan_file(tmp_path, 1).read_text() == before


# --- the run directory


@pytest.fixture
def lose(by_hand: Callable[..., HandMade], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, dict[int, Any]]]:
    """Lose machines of a run on three, and let the others regroup: its directory, and what each of them answers its guard."""
    monkeypatch.setattr(regroup, "LOST", 0.3)
    monkeypatch.setattr(restart, "PAUSE", 0.02)

    def lose(
        *lost: int, state: str | None = None, spec: wb.RunSpec = SPEC, ended: str = "failed", **elastic: Any
    ) -> tuple[Path, dict[int, Any]]:
        meeting = {"nnodes": 3, "endpoint": "127.0.0.1:29400", "timeout": 60.0, "silence": 60.0}
        more: dict[str, Any] = {
            "rendezvous": meeting,
            "elastic": {"max_restarts": 2, "min_ranks": 1, **elastic},
            "timeout": 500.0,
            "batch": None,
        }
        path = by_hand(spec=spec.to_json(), **more).steps(9).path
        for name in (run_directory.ERRORS, run_directory.LOGS):
            (path / name).mkdir()
        (path / run_directory.LAUNCHER_LOG).write_text("torchrun of machine 0\n")
        outcome = {"state": ended, "returncode": 1, "exits": {}, "stopped_ns": None}
        for rank in range(3):
            folder = path / NODES / str(rank)
            (folder / run_directory.LOGS).mkdir(parents=True)
            status = {
                "rank": rank,
                "members": [0, 1, 2],
                "attempt": 0,
                "lost": {},
                "name": f"host{rank}",
                "silence": 1.0,
                "clock": 0,
                "ranks": {"0": rank},
            }
            left = state and {**outcome, "state": state}
            if state != "absent" or rank not in lost:
                run_directory.write_json(
                    folder / NODE_JSON, {**status, "outcome": left if rank in lost else {**outcome, "state": "failed"}}
                )
            (folder / BEAT).write_text("1")
            (folder / run_directory.LAUNCHER_LOG).write_text(f"torchrun of machine {rank}\n")
            run_directory.write_json(folder / NEXT, outcome)
        answers: dict[int, Any] = {}
        ended_all = threading.Event()

        def beat() -> None:
            count = 1
            while not ended_all.wait(0.05):
                count += 1
                for rank in {0, 1, 2} - set(lost):
                    with contextlib.suppress(FileNotFoundError):  # of one that is passed over
                        (path / NODES / str(rank) / BEAT).write_text(str(count))

        def of_one(rank: int) -> None:
            try:
                answers[rank] = restart.regroup(path, rank)
            except LeftBehindError as error:
                answers[rank] = error

        threads = [threading.Thread(target=of_one, args=(rank,)) for rank in {0, 1, 2} - set(lost)]
        for thread in (beating := threading.Thread(target=beat), *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        ended_all.set()
        beating.join()
        return path, answers

    return lose


def test_two_machines_go_on_without_the_first(lose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, answers = lose(0)
    assert sorted(answers) == [1, 2]
    for index, rank in enumerate((1, 2)):
        command = answers[rank]["command"]
        assert command[command.index("--nnodes") + 1] == "2"
        assert f"rank={index}," in command[command.index("--rdzv-conf") + 1]
        assert answers[rank]["node"] == {
            "rank": rank,
            "members": [1, 2],
            "attempt": 1,
            "name": f"host{rank}",
            "silence": 1.0,
            "lost": {"0": {"name": "host0", "state": "silent"}},
        }
    endpoints = {answer["command"][answer["command"].index("--rdzv-endpoint") + 1] for answer in answers.values()}
    assert len(endpoints) == 1
    assert [answers[rank]["timeout"] for rank in (1, 2)] == [500.0, None]
    assert answers[1]["watchdog"] is not None
    info = run_directory.read_json(path / RUN_JSON)
    assert info["attempt"] == 1
    assert info["layout"] == {"nnodes": 2, "nproc_per_node": 1, "micro_batch": 6, "accumulation": 2}
    run = Run.load(path)
    assert str(run.restarts[0]) == (
        "restart 1 of 2: machine 0 (host0) died or was cut off; it goes on with 2 ranks of 3, micro_batch=6 and accumulation=2"
    )
    assert run.restarts[0].lost == (0,)
    assert capsys.readouterr().out.count(f"workbench: {run.restarts[0]}") == 2  # on each machine
    old = path / "attempts" / "0"
    assert sorted(folder.name for folder in (path / NODES).iterdir()) == ["1", "2", "attempt1.json", "attempt1.prepared-by"]
    assert (old / NODES / "0" / NODE_JSON).exists()
    assert (old / NODES / "2" / run_directory.LAUNCHER_LOG).read_text() == "torchrun of machine 2\n"
    assert (path / NODES / "2" / run_directory.LAUNCHER_LOG).read_text() == ""  # its guard goes on writing into it

    config = {"run_dir": str(path), "node": {"rank": 0, "members": [0, 1, 2], "attempt": 0, "lost": {}, "silence": 60.0}, "restart": ["x"]}
    back = guard.Peers(config)  # machine 0 was only paused
    assert back.went_on
    assert back.look(0.0, guard.Deaths(0, 0)) == "failed"
    first = guard.Peers({**config, "node": answers[1]["node"]})
    assert (first.leads, first.went_on, first.look(0.0, guard.Deaths(0, 0))) == (True, False, "")
    with pytest.raises(LaunchError, match="has restarted, and nobody can join it any more"):
        nodes.join(path)


def test_a_machine_that_cannot_take_its_share_is_passed_over(lose: Any) -> None:
    _, answers = lose(1, spec=SPEC.replace(micro_batch=3))  # of 9 samples
    assert isinstance(answers[2], LeftBehindError)
    assert answers[0]["node"]["members"] == [0]
    assert answers[0]["command"][answers[0]["command"].index("--nnodes") + 1] == "1"


@pytest.mark.parametrize(
    ("elastic", "why"),
    [
        ({"min_ranks": 3}, "it does not go on with fewer ranks: 2 of its 3 ranks are left, and min_ranks=3"),
        ({"min_ranks": None}, "it does not go on with fewer ranks: 2 of its 3 ranks are left, and without min_ranks it needs all"),
        ({"max_restarts": 0}, r"machine 1 \(host1\) died or was cut off; it was the last attempt, max_restarts=0"),
    ],
)
def test_where_it_ends_it_says_what_to_type(lose: Any, elastic: dict[str, Any], why: str) -> None:
    path, answers = lose(1, **elastic)
    typed = "wb.launch(run.spec.replace(nnodes=2, micro_batch=6, accumulation=2), resume=run)"
    for rank in (0, 2):
        assert re.fullmatch(f"{why}. A new run goes on with those that are left: {re.escape(typed)}", answers[rank])
        assert json.loads((path / NODES / str(rank) / NEXT).read_text())["node"]["members"] == [0, 2]
    assert resume_with(SPEC, 2) == typed
    assert "layout" not in run_directory.read_json(path / RUN_JSON)
    assert not (path / "attempts").exists()


def test_a_machine_whose_join_has_ended_is_lost_and_the_others_go_on_from_their_last_words(lose: Any) -> None:
    path, answers = lose(2, state="abandoned", ended="stopped")  # its end made all ranks write a checkpoint
    assert answers[0]["node"]["members"] == [0, 1]
    assert "machine 2 (host2) left, as its workbench join ended" in str(Run.load(path).restarts[0])


def test_a_machine_that_never_came_is_called_so(lose: Any) -> None:
    path, _ = lose(2, state="absent")
    assert "machine 2 never joined; it goes on" in str(Run.load(path).restarts[0])


def test_the_end_of_the_launching_process_ends_the_run(lose: Any) -> None:
    path, answers = lose(0, state="abandoned")
    assert set(answers.values()) == {"the process that launched it has ended, on machine 0"}
    assert not (path / run_directory.RESTARTS).exists()


def test_a_first_machine_that_wakes_up_late_leaves_the_next_attempt_alone(lose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = restart.archive_attempt

    def late(path: Path, **options: Any) -> None:  # the others have gone on meanwhile
        (path / NODES / "0" / run_directory.LAUNCHER_LOG).write_text("said now\n")
        run_directory.write_json(plan_file(path, 2), {"attempt": 2, "members": [1, 2], "ends": ""})
        archive(path, **options)

    monkeypatch.setattr(restart, "archive_attempt", late)
    path, answers = lose()
    assert isinstance(answers[0], LeftBehindError)
    assert (path / NODES / "0" / run_directory.LAUNCHER_LOG).read_text() == "said now\n"
    assert not (path / "attempts").exists()
    assert not (path / run_directory.RESTARTS).exists()
    assert "attempt" not in run_directory.read_json(path / RUN_JSON)


@pytest.mark.parametrize("allowed", range(7))
def test_it_looks_again_before_each_file_that_it_moves(lose: Any, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    archive = restart.archive_attempt
    path, _ = lose(max_restarts=0)
    seen: list[list[str]] = []

    def check() -> None:
        seen.append(sorted(str(file.relative_to(path)) for file in path.rglob("*") if "attempts" not in file.parts))
        if len(seen) > allowed:
            raise LeftBehindError

    with pytest.raises(LeftBehindError):
        archive(path, copy_log=True, machines=[0, 1], check=check)
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if "attempts" not in file.parts) == seen[-1]


def test_a_machine_that_is_left_behind_prints_no_empty_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(*_: object) -> None:
        raise LeftBehindError

    monkeypatch.setattr(restart, "regroup", left)
    monkeypatch.setattr(sys, "argv", ["restart", str(tmp_path), "1"])
    assert restart.main() == 1
    assert capsys.readouterr().out == ""


def test_a_run_directory_that_cannot_be_read_ends_no_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    looks: list[float] = []

    class Part:
        returncode: int | None = None

        def wait(self, seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 3:
                self.returncode = 0
                return
            raise subprocess.TimeoutExpired("guard", seconds)

    class Unreadable:
        @property
        def restarts(self) -> list[Any]:
            if len(looks) < 3:
                raise PermissionError
            return [SimpleNamespace(seconds=2.0), SimpleNamespace(seconds=None)]

    nodes._wait(Part(), Unreadable())  # type: ignore[arg-type]
    assert capsys.readouterr().out == "namespace(seconds=2.0)\n"
    assert min(looks) >= 1.0


def test_a_signal_ends_all_machines(lose: Any) -> None:
    _, answers = lose(ended="stopped")
    assert list(answers.values()) == ["a signal ended it, with a checkpoint"] * 3


def test_an_error_that_comes_again_ends_it_on_all_machines(lose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = restart.Failure(rank=1, kind="exception", message="ValueError: boom", traceback=None, hint=None)
    monkeypatch.setattr(restart, "first_failure", lambda *_: failure)
    monkeypatch.setattr(restart, "_steps", lambda _: 0)
    _, answers = lose()
    assert set(answers.values()) == {"rank 1: ValueError: boom; it would come again, as there was no further step since the launch"}


# --- real machines, which are processes here


@pytest.mark.slow
def test_whichever_machine_is_killed_the_others_train_the_same_to_the_end(
    by_hand: Callable[..., HandMade], forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three machines: the first is killed, where they meet, and the launching process with it; then one of the two that are left."""
    (tmp_path / "task.py").write_text(random_kills.TASK.format(samples=240, seconds=2e-3, inputs=8, hidden=16, lr=0.05))
    monkeypatch.chdir(tmp_path)
    spec = wb.RunSpec(task="task.py:build", device="cpu", nnodes=3, micro_batch=8, steps=400, checkpoint_every=10, schedule="cosine")
    launching = f"""
import workbench as wb
spec = wb.RunSpec.from_json({spec.to_json()!r})
run = wb.launch(spec, runs_dir="runs", rdzv_timeout=120, max_restarts=2, min_ranks=1)
print(run.path, flush=True)
run.wait()
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    machines = [subprocess.Popen([sys.executable, "-c", launching], **pipes)]
    path = Path(machines[0].stdout.readline().strip())  # type: ignore[union-attr]
    run = Run.load(path)
    machines += [subprocess.Popen([sys.executable, "-m", *run.join_command.split()], **pipes) for _ in range(2)]
    number = {0: machines[0]}
    wait_for(run, lambda: len(list(path.glob("nodes/*/node.json"))) == 3)
    for process in machines[1:]:
        number[int(process.stdout.readline().split()[1])] = process  # type: ignore[union-attr]
    for restarts, rank in enumerate((0, 2), 1):
        wait_for(run, lambda: run.progress[0] >= 26)
        for pid in (*guard.descendants(number[rank].pid, run.id), number[rank].pid):
            os.kill(pid, signal.SIGKILL)
        number[rank].communicate(timeout=60)
        wait_for(run, lambda: sum(one.seconds is not None for one in run.restarts) == restarts)  # noqa: B023
    for folder in Path(tempfile.gettempdir()).glob(f"pymp-{run.id[:12]}*-[02]"):  # of machines that are lost
        shutil.rmtree(folder)
    run.wait(240, check=True)
    said, _ = number[1].communicate(timeout=60)
    first, second = run.restarts
    assert (first.lost, first.ranks, second.lost, second.ranks) == ((0,), 2, (1,), 1)
    assert [line for line in said.splitlines() if line.startswith("restart")] == [str(first), str(second)]
    assert number[1].returncode == 0
    assert run.progress == (400, 400)
    assert [row["step"] for row in run.metric_rows] == list(range(1, 401))
    assert {row["samples"] // row["step"] for row in run.metric_rows} == {24}
    assert processes_with(run_directory.ENV_RUN_ID, run.id) == []
    whole = by_hand(spec=spec.replace(nnodes=1, nproc_per_node=3).to_json()).path
    done = forks.train(3, tmp_path, whole)
    assert done.returncode == 0, done.stderr
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(path)[name], weight, rtol=1e-4, atol=1e-5)


def wait_for(run: Run, there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 150
    while not there():
        assert time.monotonic() < limit, (run, run.logs())
        assert run.state == "running", run
        time.sleep(0.05)


def weights(path: Path) -> dict[str, torch.Tensor]:
    state = checkpoint_file.load(path / run_directory.CHECKPOINTS / "step00000400.pt", torch.device("cpu"))
    return dict(state["module"])
