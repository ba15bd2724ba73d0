"""What a rank writes about itself while it makes no progress."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.core import run_directory
from workbench.runs import flight_recorder, rank_watchdog
from workbench.runs.rank_watchdog import QUIET, TICK, IdleTime, RankWatchdog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    numbers = {"0": 0}
    monkeypatch.setattr(flight_recorder, "numbers", lambda: dict(numbers))
    monkeypatch.setattr(flight_recorder, "messages", lambda: 0)
    monkeypatch.setattr(flight_recorder, "by_name", dict)  # other tests of this process may have recorded calls
    monkeypatch.setattr(rank_watchdog.rank_log, "steps_written", lambda: None)
    return numbers


def pass_time(watchdog: RankWatchdog, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds / TICK)):
        clock.now += TICK
        watchdog.tick()


def test_a_recorder_that_cannot_be_read_any_more_is_no_progress(tmp_path: Path, counts: dict[str, int]) -> None:
    clock, folder = Clock(), tmp_path / run_directory.HANG
    counts |= {"0": 16, "0 (nccl)": 9}
    watchdog = RankWatchdog(folder, 3, clock=clock)
    pass_time(watchdog, clock, QUIET * 0.75)
    del counts["0 (nccl)"]
    pass_time(watchdog, clock, QUIET / 2)
    assert json.loads((folder / "rank3.json").read_text())["numbers"] == {"0": 16, "0 (nccl)": 9}


def test_writes_nothing_while_there_is_progress_and_its_stacks_when_there_is_none(tmp_path: Path, counts: dict[str, int]) -> None:
    clock, folder = Clock(), tmp_path / run_directory.HANG
    watchdog = RankWatchdog(folder, 3, clock=clock)
    for _ in range(8):
        counts["0"] += 2
        pass_time(watchdog, clock, QUIET / 2)
    assert not folder.exists()

    pass_time(watchdog, clock, QUIET)

    written = json.loads((folder / "rank3.json").read_text())
    assert written["rank"] == 3
    assert written["quiet"] == pytest.approx(QUIET, abs=2 * TICK)
    assert written["numbers"] == {"0": 16}
    assert written["usual"] == pytest.approx(QUIET / 2, abs=TICK)
    main = written["threads"][0]
    assert main["main"]
    assert any(name == "test_writes_nothing_while_there_is_progress_and_its_stacks_when_there_is_none" for _, _, name, *_ in main["frames"])
    counts["0"] += 1
    pass_time(watchdog, clock, TICK)
    assert not (folder / "rank3.json").exists()
    (folder / run_directory.ASK).touch()
    pass_time(watchdog, clock, 1)
    assert (folder / "rank3.json").exists()  # whoever is asked answers


def test_one_long_gap_is_not_usual_and_a_single_rank_without_steps_is_not_judged(
    tmp_path: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    counts["0"] = rank_watchdog.FIRST_COLLECTIVES - 1
    watchdog = RankWatchdog(tmp_path, 0, clock=clock)
    for seconds in (30, 1, 20, 1, 1):  # the start, a step, a compilation, two steps
        pass_time(watchdog, clock, seconds)
        counts["0"] += 1
    pass_time(watchdog, clock, QUIET + 1)
    assert json.loads((tmp_path / "rank0.json").read_text())["usual"] == pytest.approx(1, abs=2 * TICK)

    monkeypatch.setattr(flight_recorder, "numbers", dict)
    other = RankWatchdog(tmp_path / "other", 0, clock=clock)
    pass_time(other, clock, 60)
    assert not (tmp_path / "other").exists()


def test_a_message_is_progress_where_there_are_neither_steps_nor_collectives(
    tmp_path: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, clock, folder = 0, Clock(), tmp_path / run_directory.HANG
    counts.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(flight_recorder, "messages", lambda: sent)
    watchdog = RankWatchdog(folder, 0, clock=clock)
    for seconds in (3, 1, 1, 1, 1, 1, 1, 3, 1, 3):
        pass_time(watchdog, clock, seconds)
        sent += 1
    pass_time(watchdog, clock, QUIET / 2)
    assert not folder.exists()
    pass_time(watchdog, clock, QUIET)
    written = json.loads((folder / "rank0.json").read_text())
    assert written["messages"] == 10
    assert written["quiet"] < QUIET + 3
    assert written["usual"] == pytest.approx(3, abs=2 * TICK)


MESSAGES = """
def send(work, dst=None, group=None, tag=0, group_dst=None):
    work.wait()

def get_global_rank(group, rank):
    return group[rank]
"""


@pytest.mark.parametrize("given", [{"dst": 5, "tag": 2}, {"group": [4, 5], "group_dst": 1, "tag": 2}])
def test_a_rank_in_send_says_to_whom_and_for_how_long_nothing_has_come(
    tmp_path: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    class Idle:
        looks = 0

        def look(self) -> float:
            self.looks += 1
            return float(self.looks)

    file, scope, lock, clock = tmp_path / "torch" / "distributed" / "distributed_c10d.py", dict[str, Any](), threading.Lock(), Clock()
    file.parent.mkdir(parents=True)
    file.write_text(MESSAGES)
    exec(compile(MESSAGES, str(file), "exec"), scope)
    switches = 1
    monkeypatch.setattr(rank_watchdog, "IdleTime", Idle)
    monkeypatch.setattr(rank_watchdog, "_switches", lambda thread: switches)
    counts["0"] = 400
    watchdog = RankWatchdog(tmp_path / "hang", 0, clock=clock)
    lock.acquire()
    watchdog._main = threading.Thread(target=scope["send"], args=[SimpleNamespace(wait=lock.acquire)], kwargs=given)
    watchdog._main.start()
    try:
        time.sleep(0.2)
        pass_time(watchdog, clock, QUIET + 2)
        written = json.loads((tmp_path / "hang" / "rank0.json").read_text())
        assert written["message"] == {"op": "send", "peer": 5, "tag": 2}
        assert written["idle"] >= 6
        switches = 2  # a message came, and it waits for the next one in the same line
        pass_time(watchdog, clock, 2 * TICK)
        assert json.loads((tmp_path / "hang" / "rank0.json").read_text())["idle"] <= 2
    finally:
        lock.release()
        watchdog._main.join()
    assert rank_watchdog._switches(threading.get_native_id()) > 0


def sample(**more: Any) -> dict[str, Any]:
    return {"where": ((1, 2),), "state": "S", "loop": None, "threads": 0.0, "children": 0.0, "io": 0} | more


@pytest.mark.parametrize(
    ("samples", "works", "repeats"),
    [
        ([sample() for _ in range(10)], False, False),
        ([sample(state="R", where=((1, i),)) for i in range(10)], True, False),
        ([sample(where=((1, i),)) for i in range(10)], True, False),  # a download: other lines all the time
        ([sample(state="D") for _ in range(10)], True, False),
        ([sample(children=0.4 * i) for i in range(10)], True, False),  # its loader's workers decode
        ([sample(threads=0.4 * i) for i in range(10)], True, False),
        ([sample(io=10**6 * i) for i in range(10)], True, False),
        ([sample(state="R", loop=(((1, i % 2),), ("same",))) for i in range(10)], True, True),
        ([sample(state="R", loop=(((1, 1),), (f"x{i}",))) for i in range(10)], True, False),
        ([sample(), sample()], True, False),  # too early to say
    ],
)
def test_tells_work_from_waiting(tmp_path: Path, samples: list[dict[str, Any]], works: bool, repeats: bool) -> None:
    watchdog = RankWatchdog(tmp_path, 0)
    watchdog._samples = deque(one | {"time": TICK * i} for i, one in enumerate(samples))

    assert watchdog._works() == (works, repeats)


def _spin(done: threading.Event) -> None:
    n = 0
    while not done.is_set():
        n += 1


def _count(done: threading.Event) -> None:
    for _ in range(10**12):
        if done.is_set():
            return


def test_what_the_watchdog_reads_itself_is_no_work_of_its_rank(tmp_path: Path) -> None:
    """Its first report reads the sources of all frames, megabytes: for five seconds the rank seemed to work."""
    file = tmp_path / "source"
    file.write_bytes(bytes(2**20))
    before = rank_watchdog._bytes_moved()
    file.read_bytes()
    assert rank_watchdog._bytes_moved() - before < 2**16
    reader = threading.Thread(target=file.read_bytes)
    reader.start()
    reader.join()
    assert rank_watchdog._bytes_moved() - before >= 2**20


@pytest.mark.parametrize(("function", "kind"), [(_spin, True), (_count, False)])
def test_knows_a_while_loop_from_a_for_loop(function: Any, kind: bool) -> None:
    done = threading.Event()
    thread = threading.Thread(target=function, args=(done,))
    thread.start()
    try:
        time.sleep(0.02)
        answers = [rank_watchdog._repeats_while(rank_watchdog._frames(sys._current_frames()[thread.ident or 0])[:-3]) for _ in range(5)]
    finally:
        done.set()
        thread.join()
    assert answers == [kind] * 5


# --- a process that only waits is told from one that does anything at all, by real processes

LOOKS = 12
SCRIPT = """
import fcntl, hashlib, os, queue, socket, subprocess, sys, threading, time
from workbench.runs.rank_watchdog import IdleTime

def watch():
    idle = IdleTime()
    for _ in range(LOOKS):
        time.sleep(0.25)
        print(idle.look(), flush=True)

def in_thread(call):
    thread = threading.Thread(target=lambda: [call() for _ in range(10**9)])
    thread.start()
    thread.join()

peer = socket.socket(fileno=int(sys.argv[2]))
file = os.open(sys.argv[3], os.O_RDWR)
threading.Thread(target=watch, daemon=True).start()
exec(sys.argv[1])
time.sleep(100)
"""
WAITS = {
    "sleeps": "time.sleep(100)",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a queue": "queue.Queue().get()",
    "looks once a second": "while True: time.sleep(1)",
    "another program": "subprocess.run(['sleep', '100'])",
    "input": "sys.stdin.read()",
    "a peer": "peer.recv(10)",
    "a thread that waits": "in_thread(lambda: peer.recv(100))",
    "a file lock": "fcntl.flock(file, fcntl.LOCK_EX)",
}
WORKS = {
    "computes": "while True: sum(range(1000))",
    "compiles in another program": f"subprocess.run([{sys.executable!r}, '-c', 'while True: sum(range(1000))'])",
    "compiles with one program after another": "while True: subprocess.run(['true']); time.sleep(0.2)",
    "another program waits for data": "subprocess.run(['cat'], stdout=subprocess.DEVNULL)",
    "a slow file": "sys.stdin.buffer.read(10**9)",
    "a download": "while True: peer.recv(100)",
    "a download in a thread": "in_thread(lambda: peer.recv(100))",
    "a server that has not answered yet": (
        "server = socket.create_server(('127.0.0.1', 0)); socket.create_connection(server.getsockname()).recv(1)"
    ),
    "a thread computes": "in_thread(lambda: hashlib.md5(bytes(10**6)))",
    "reads a file over and over": "while True: os.pread(file, 5000, 0); time.sleep(0.3)",
}


@contextlib.contextmanager
def running(code: str, lock: Path, *, fed: bool) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs code, whose input and peer are fed slowly, if at all: 800 bytes a second for the peer, 10 kB for the input."""
    ours, theirs = socket.socketpair()
    lock.write_bytes(bytes(8000))
    command = [sys.executable, "-c", SCRIPT.replace("LOOKS", str(LOOKS)), code, str(theirs.fileno()), str(lock)]
    done = threading.Event()

    def feed(stdin: int) -> None:
        while not done.wait(0.1):
            with contextlib.suppress(OSError):  # nobody reads
                os.write(stdin, bytes(1000))
                ours.send(bytes(80))

    with open(lock, "rb") as held, ours, theirs:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True
        )
        assert process.stdin
        for end in (process.stdin.fileno(), ours.fileno()):
            os.set_blocking(end, False)
        feeder = threading.Thread(target=feed, args=(process.stdin.fileno(),))
        try:
            if fed:
                feeder.start()
            yield process
        finally:
            done.set()
            if fed:
                feeder.join()
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("cases", "idle"), [(WAITS, True), (WORKS, False)], ids=["waits", "works"])
def test_waiting_is_told_from_anything_else(cases: dict[str, str], idle: bool, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        together = {name: stack.enter_context(running(code, tmp_path / name, fed=not idle)) for name, code in cases.items()}
        for name, process in together.items():
            assert process.stdout
            seconds = [float(process.stdout.readline()) for _ in range(LOOKS)]
            assert seconds[0] == 0.0, name
            assert (seconds[-1] >= 1.0) == idle, (name, seconds)
            assert idle or max(seconds[3:]) < 1.0, (name, seconds)


def test_what_proc_does_not_tell_is_not_idle(tmp_path: Path) -> None:
    look = IdleTime(tmp_path).look
    assert [look() for _ in range(3)] == [0.0] * 3
