"""Real hangs of real ranks: the rank and its line are named while the run goes on, and where that is asked for the run is ended."""

import contextlib
import json
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import workbench as wb
from benchmarks import hangs
from workbench.core import run_directory
from workbench.programs.watchdog import Watchdog, _usage
from workbench.runs.hang import IDLE_START, Hang


@pytest.mark.slow
def test_a_lock_that_is_taken_twice_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    run = hangs.start("lock", tmp_path)
    try:
        named = hangs.follow("lock", run, tmp_path)
        assert named.hang is not None, named.wrong
        assert not named.wrong or named.wrong.startswith("it took")  # how soon is judged by the slow test
        assert run.state == "running"
        assert run.error is None
        assert any("waits for a lock" in note and "all_reduce number" in note for note in run.notes)
        assert "in hang" in named.hang.stacks[1]
        assert "_engine_run_backward" in named.hang.stacks[0]
    finally:
        run.stop()
    assert run.state == "stopped"


HANGS = ("worker", "gil", "barrier of four", "before step 1, sleep", "before step 1, lock")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("forked_ranks")  # new processes: the lock above
def test_planted_hangs_are_named_within_15_seconds(tmp_path: Path) -> None:
    """At once, since they mostly wait; one that is named late beside the others hangs once more, alone."""

    def hung(name: str) -> hangs.Named:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        run = hangs.start(name, folder)
        try:
            return hangs.follow(name, run, folder)
        finally:
            run.stop()

    with ThreadPoolExecutor(len(HANGS)) as pool:
        found = dict(zip(HANGS, pool.map(hung, HANGS), strict=True))
    for name, named in found.items():
        again = hung(name) if named.wrong.startswith("it took") else named
        assert not again.wrong, (name, named, again)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_hang_ends_the_run_if_that_is_asked_for(tmp_path: Path) -> None:
    run = hangs.start("gil", tmp_path, on_hang="stop")
    try:
        named = hangs.follow("gil", run, tmp_path)
        assert named.hang is not None, named.wrong
        run.wait(90)
        assert run.state == "failed"
        assert run.error is not None
        assert (run.error.rank, run.error.kind) == (1, "hang")
        assert "holds Python's lock" in str(run.error)
    finally:
        run.stop()


SLOW_START = """
import os, socket, subprocess, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    print(len(open(sys.argv[1], "rb", buffering=0).read()))
if dist.get_rank() == 2:
    peer, got = socket.create_connection(("127.0.0.1", int(sys.argv[2]))), 0
    while data := peer.recv(4096):
        got += len(data)
    print(got)
if dist.get_rank() == 3:
    subprocess.run([sys.executable, "-c", "import sys, time; n = sys.stdin.read()"], stdin=open(sys.argv[3], "rb"))
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_slow_files_downloads_and_programs_before_the_first_step_are_no_hang(tmp_path: Path) -> None:
    """A few kB each second, for twice as long as a rank may do nothing there; data comes from outside the run."""
    (tmp_path / "train.py").write_text(SLOW_START)
    files = [tmp_path / "file", tmp_path / "input"]
    for file in files:
        os.mkfifo(file)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = [stack.enter_context(open(os.open(file, os.O_RDWR), "wb", buffering=0)) for file in files]
        arguments = [str(files[0]), str(server.getsockname()[1]), str(files[1])]
        run = wb.launch(tmp_path / "train.py", args=arguments, nproc_per_node=4, runs_dir=tmp_path / "runs")
        try:
            server.settimeout(60)
            peer = stack.enter_context(server.accept()[0])
            until = time.monotonic() + 2 * IDLE_START + 4
            while time.monotonic() < until:
                for send in (ends[0].write, ends[1].write, peer.sendall):
                    send(bytes(400))
                time.sleep(0.1)
                assert run.hang is None
            stack.close()
            assert run.wait(60).ok, run.error
            assert run.hang is None
        finally:
            run.stop()


def hang_after(run: wb.Run, ranks: int) -> Hang:
    """The hang of a run that goes on until each rank has printed that it hangs, and no sooner."""
    until = time.monotonic() + 120
    hung = found = False
    while not found:
        assert run.state == "running"
        assert time.monotonic() < until
        time.sleep(0.2)
        found = run.hang is not None
        assert hung or not found
        hung = hung or run.logs().count("HANG") == ranks
    assert run.hang is not None
    return run.hang


MESSAGES = """
import time
import torch, torch.distributed as dist

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            weights.mm(weights)

dist.init_process_group("gloo")
rank, weights, x = dist.get_rank(), torch.rand(100, 100), torch.ones(1 << 20)
if rank == 0:  # a pipeline with a slow first stage
    compute(14)
    dist.send(x, 1)
elif rank == 1:
    dist.irecv(x, 0).wait()
    dist.send(x, 2)
else:
    dist.recv(x, 1)
request = dist.irecv(x, 2) if rank == 1 else None  # backward, with a slow last stage; the second one computes at first
compute(14 * (rank == 2) + 4 * (rank == 1))
if rank == 0:
    dist.recv(x, 1)
elif rank == 1:
    request.wait()
    dist.send(x, 0)
else:
    dist.send(x, 1)
print("HANG", flush=True)
dist.send(x, (rank + 1) % 3)  # a ring in which all send first
dist.recv(x, (rank + 2) % 3)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_messages_that_no_rank_takes_are_a_hang_and_those_of_a_slow_stage_are_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MESSAGES)
    run = wb.launch(tmp_path / "train.py", nproc_per_node=3, runs_dir=tmp_path / "runs")
    try:
        hang = hang_after(run, 3)
        assert hang.rank is None
        assert "wait for each other's messages" in hang.message
        line = 1 + MESSAGES.splitlines().index("dist.send(x, (rank + 1) % 3)  # a ring in which all send first")
        assert f"rank 2 waits in send to rank 0, train.py:{line}" in hang.message
    finally:
        run.stop()


ONLY_MESSAGES = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(100)
for exchange in range(60):
    time.sleep(0.4 + (3 if rank and exchange % 20 == 19 else 0))
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
    else:
        dist.recv(x, 1)
        dist.send(x, 1)
print("HANG", flush=True)
if rank == 0:
    time.sleep(1000)
dist.recv(x, 0)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_only_send_messages_make_progress_until_one_never_sends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ONLY_MESSAGES)
    run = wb.launch(tmp_path / "train.py", nproc_per_node=2, runs_dir=tmp_path / "runs")
    try:
        hang = hang_after(run, 2)
        assert hang.rank == 0
        assert "sleeps" in hang.doing
        assert hang.line == f"train.py:{1 + ONLY_MESSAGES.splitlines().index('    time.sleep(1000)')}"
    finally:
        run.stop()


def report(rank: int, *, quiet: float, steps: int) -> dict[str, object]:
    stack = [["/me/train.py", 5 + rank, "train", "time.sleep(9)" if rank else "dist.barrier()", True]]
    pending = {"group": "0", "number": 9, "op": "barrier", "sizes": [], "dtype": "", "pending": True, "frames": []}
    more = {"rank": rank, "pid": os.getpid(), "time": time.time(), "quiet": quiet, "usual": 0.1, "steps": steps, "works": False}
    more |= {"numbers": {"0": 9 - rank}, "repeats": False, "threads": [{"name": "MainThread", "main": True, "frames": stack}]}
    return more | {"collectives": [] if rank else [pending], "groups": {}, "no_recorder": ""}


def test_writes_who_holds_up_the_run_and_that_it_went_on(tmp_path: Path) -> None:
    (tmp_path / run_directory.HANG).mkdir()
    spec = {"nproc_per_node": 2}
    (tmp_path / run_directory.RUN_JSON).write_text(json.dumps({"id": "none", "spec": spec}))
    for on_hang in ("report", "stop"):
        watchdog = Watchdog(tmp_path, on_hang)

        assert not watchdog.look({rank: report(rank, quiet=5, steps=9) for rank in range(2)})
        assert not watchdog.look({rank: report(rank, quiet=9, steps=9) for rank in range(2)})
        named = Hang.load(tmp_path)
        assert named is not None
        assert (named.rank, named.line, named.over) == (1, "train.py:6", None)
        if on_hang == "report":
            assert not watchdog.look({rank: report(rank, quiet=1, steps=10) for rank in range(2)})
            over = Hang.load(tmp_path)
            assert over is not None
            assert "then the run went on: rank 1 sleeps in train()" in str(over)
        assert watchdog.look({rank: report(rank, quiet=31, steps=9) for rank in range(2)}) is (on_hang == "stop")
    assert (tmp_path / run_directory.HANG / run_directory.STOP).exists()

    stopped = Hang.load(tmp_path)
    run_directory.write_json(tmp_path / run_directory.HANG / "rank0.json", report(0, quiet=31, steps=9))
    Watchdog(tmp_path, "stop").run()  # the ranks that end now, one after another, are not judged any more
    assert Hang.load(tmp_path) == stopped


def test_a_message_after_a_pause_shows_that_the_run_went_on(tmp_path: Path) -> None:
    (tmp_path / run_directory.HANG).mkdir()
    (tmp_path / run_directory.RUN_JSON).write_text(json.dumps({"id": "none", "spec": {"nproc_per_node": 2}}))
    watchdog = Watchdog(tmp_path, "report")
    for messages, quiet, over in ((4, 9, False), (4, 10, False), (5, 1, True)):
        watchdog.look({rank: report(rank, quiet=quiet, steps=9) | {"messages": messages} for rank in range(2)})
        named = Hang.load(tmp_path)
        assert named is not None
        assert (named.over is not None) == over


def test_a_rank_that_does_not_answer_and_gets_no_core_is_not_said_to_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / run_directory.HANG).mkdir()
    (tmp_path / run_directory.RUN_JSON).write_text(json.dumps({"id": "none", "spec": {"nproc_per_node": 2}}))
    monkeypatch.setattr(Watchdog, "_ranks", lambda self: iter([(1, os.getpid())]))
    monkeypatch.setattr(Watchdog, "_dump", lambda self, rank, pid: "")
    for waited, cpu, steps, named in (
        (0.6, 0.0, 9, False),
        (0.0, 0.9, 1, False),
        (0.0, 0.0, 1, False),
        (0.0, 0.9, 9, True),
        (0.0, 0.0, 9, True),
    ):
        readings = ((0.4 * look, 0.4 * look * cpu, 0.4 * look * waited) for look in range(100))
        watchdog = Watchdog(tmp_path, "stop", usage=lambda pid, readings=readings: next(readings))  # type: ignore[misc]
        watchdog._asked -= 10

        looks = [watchdog.look({0: report(0, quiet=8 + 0.4 * look, steps=steps)}) for look in range(12)]

        assert not any(looks)
        assert (watchdog._named is not None) == named, (waited, cpu, steps)
    busy = _usage(os.getpid())
    while time.process_time() - busy[1] < 0.02:
        pass
    assert _usage(os.getpid())[1] > busy[1]
