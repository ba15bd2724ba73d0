"""Noise: waiting for a core, foreign processes and the garbage collector, from a /proc made by hand and from this process."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.core.system_load import (
    MAX_FOREIGN_SHARE,
    TICKS,
    GcTimer,
    LoadMeter,
    Noise,
    RunQueueDelay,
    cpu_of_process,
    default_threads,
    usable_cores,
)

pytestmark = pytest.mark.alone

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


class Proc:
    """A /proc for this process, as far as it is read, with time that passes when told."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 100.0
        self.busy = dict.fromkeys([*CORES, 997], 50.0)
        """Seconds per core; the last one is none that we may use."""
        self.stolen = 0.0
        """Seconds that the host took of the first core."""
        self.waited: dict[int, float] = {}
        self.thread(threading.get_native_id())
        self.write()

    def thread(self, thread: int, on_core: float = 1.0, waited: float = 0.0) -> None:
        """A thread of this process, and what the scheduler says of it."""
        folder = self.root / str(os.getpid()) / "task" / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        text = f"{int(on_core * 1e9):020d} {int(waited * 1e9):020d} 7\n"
        with open(folder / "schedstat", "r+" if (folder / "schedstat").exists() else "w") as file:  # the same file, for who has it open
            file.write(text)

    def write(self) -> None:
        steal = {CORES[0]: round(self.stolen * TICKS)}
        lines = [f"cpu{core} {round(seconds * TICKS)} 0 0 9999 99 0 0 {steal.get(core, 0)} 0 0" for core, seconds in self.busy.items()]
        (self.root / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]))

    def clock(self) -> float:
        return self.now


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@linux
def test_delay_counts_the_waits_of_this_thread(proc: Proc) -> None:
    delay = RunQueueDelay(proc.root)
    assert delay.known
    before = delay.read()
    proc.thread(threading.get_native_id(), 1.1, 0.003)
    time.sleep(0.005)
    assert delay.read() - before == pytest.approx(0.003)
    assert delay.own() == pytest.approx(0.003)
    delay.close()
    assert delay.read() == 0.0


@linux
def test_delay_counts_helpers_too_but_no_more_than_the_time_that_passed(proc: Proc) -> None:
    delay = RunQueueDelay(proc.root)
    proc.thread(1_000_001, 0.9)
    proc.thread(1_000_002, 0.001)  # it computes nothing to speak of
    delay.read()
    before = delay.read()  # by now the helper is known
    proc.thread(1_000_001, 0.9, 0.004)
    proc.thread(1_000_002, 0.001, 0.5)
    time.sleep(0.01)
    after = delay.read()
    assert after - before == pytest.approx(0.004)
    proc.thread(1_000_001, 0.9, 900.0)
    start = time.perf_counter()
    assert 0 <= delay.read() - after < time.perf_counter() - start + 1
    assert delay.own() == 0.0
    delay.close()


def test_without_the_kernels_figures_the_delay_is_unknown(tmp_path: Path) -> None:
    delay = RunQueueDelay(tmp_path)
    assert not delay.known
    assert (delay.read(), delay.own()) == (0.0, 0.0)
    delay.close()


@linux
def test_a_thread_that_ends_is_forgotten_not_an_error() -> None:
    delay, over = RunQueueDelay(), threading.Event()
    helper = threading.Thread(target=lambda: [sum(range(10_000)) for _ in iter(over.is_set, True)])
    helper.start()
    delay.read()
    delay.read()
    over.set()
    helper.join()
    assert all(b >= a for a, b in [(delay.read(), delay.read()) for _ in range(600)])
    delay.close()


@linux
def test_cores_that_a_quota_keeps_from_us_may_be_busy(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.core.system_load.usable_cores", lambda: len(CORES) - 0.5)
    meter = LoadMeter(proc=proc.root, clock=proc.clock)
    proc.now += 100
    proc.busy[CORES[0]] += 60
    proc.write()
    assert meter.lap().foreign == pytest.approx(0.1, abs=0.02)
    meter.close()


@linux
def test_foreign_cores_are_what_is_busy_and_not_ours(proc: Proc) -> None:
    meter = LoadMeter(proc=proc.root, clock=proc.clock)
    proc.now += 100
    proc.busy[CORES[0]] += 60
    proc.busy[997] += 100  # not one of our cores
    proc.write()
    lap = meter.lap()
    assert lap.seconds == 100
    assert lap.foreign == pytest.approx(0.6, abs=0.02)  # this process has used a little of it
    proc.now += 100
    proc.write()
    assert meter.lap().foreign == 0.0
    assert meter.total().foreign == pytest.approx(0.3, abs=0.02)
    assert meter.noise(0.2).foreign == pytest.approx(0.3, abs=0.02)
    assert meter.noise(0.2).spread == 0.2
    meter.close()


@linux
def test_time_that_the_host_takes_is_not_sleep(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: cpu[0])
    meter = LoadMeter(proc=proc.root, clock=proc.clock)
    proc.now += 100
    cpu[0] += 60
    proc.busy[CORES[0]] += 60  # nothing else computes: all that was taken was taken from this thread
    proc.stolen += 30
    proc.write()
    alone = meter.lap()
    assert alone.stolen == pytest.approx(30)
    assert alone.blocked == pytest.approx(10)
    proc.now += 100
    cpu[0] += 20
    proc.busy[CORES[0]] += 80  # three quarters of it are another process's, which lost as much of what was taken
    proc.stolen += 20
    proc.write()
    shared = meter.lap()
    assert shared.stolen == pytest.approx(5)
    assert shared.blocked == pytest.approx(75)
    meter.close()


@linux
def test_others_that_need_our_cores_are_said(proc: Proc) -> None:
    meter = LoadMeter(proc=proc.root, clock=proc.clock)
    proc.now += 100
    proc.write()
    assert meter.crowding() == ""
    proc.busy[CORES[0]] += 100 * (0.5 + MAX_FOREIGN_SHARE * len(CORES))
    proc.write()
    assert re.fullmatch(r"other processes took \d+\.\d of \d+ cores", meter.crowding())
    meter.close()


BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that uses 0.4 s of CPU as soon as it is told to begin, says so, and stays."""
    command = [sys.executable, "-c", f"input()\n{BURN}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@linux
@pytest.mark.parametrize("ends", [False, True])
def test_the_cpu_of_descendants_is_ours(child: subprocess.Popen[bytes], ends: bool, proc: Proc) -> None:
    assert child.stdin
    assert child.stdout
    family = proc.root / str(os.getpid()) / "task" / str(threading.get_native_id()) / "children"
    family.write_text(f"{child.pid} ")
    meter = LoadMeter(proc=proc.root, clock=proc.clock)
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.stdout.readline()
    assert cpu_of_process(child.pid) > 0.35
    if ends:  # what has ended, and was waited for, keeps its CPU
        child.kill()
        child.wait()
        family.write_text("")
    proc.now += 1
    proc.busy[CORES[0]] += 1
    proc.write()
    assert meter.lap().foreign < 0.65
    meter.close()


def test_cpu_of_nobody_is_zero() -> None:
    assert cpu_of_process(2**22 + 1) == 0.0
    assert cpu_of_process(os.getpid()) <= time.process_time() + 0.1


def test_the_ranks_of_one_launch_are_not_foreign(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    parent = proc.root / str(os.getppid()) / "task" / "1"
    parent.mkdir(parents=True)
    (parent / "children").write_text(f"{os.getpid()}")
    meter = LoadMeter(proc=proc.root, clock=proc.clock)
    begun = time.process_time()
    while time.process_time() < begun + 0.3:
        pass
    proc.now += 1
    proc.busy[CORES[0]] += 1
    proc.write()
    assert meter.lap().foreign < 0.75
    meter.close()


def test_a_lap_tells_computing_from_sleeping() -> None:
    meter = LoadMeter()
    meter.lap()
    time.sleep(0.2)
    asleep = meter.lap()
    begun = time.thread_time()
    while time.thread_time() < begun + 0.1:
        pass
    awake = meter.lap()
    meter.close()
    assert asleep.blocked > 0.15
    assert asleep.thread_cpu < 0.1
    assert awake.thread_cpu > 0.09
    assert awake.blocked < 0.5 * awake.seconds


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "50000 100000", "a/cpu.max": "max 100000"}, 0.5),
        ({"cpu.max": "max 100000", "a/b/cpu.max": "25000 100000"}, 0.25),
    ],
)
def test_cores_of_a_container_with_a_quota(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    assert usable_cores(groups, proc) == min(cores, len(CORES))


def test_cores_of_a_container_with_a_quota_of_the_first_kind(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "cpu,cpuacct" / "docker"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/docker\n3:cpu,cpuacct:/docker\n")
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path / "cgroup", proc) == 0.5
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path / "cgroup", proc) == len(CORES)


def test_collections_are_timed() -> None:
    times = iter([1.0, 1.5, 9.0, 9.25])
    with GcTimer(clock=lambda: next(times)) as collections:
        gc.collect()
        gc.collect()
    gc.collect()
    assert collections.seconds == 0.75
    assert collections.count == 2


def test_others_never_take_all_cores() -> None:
    assert Noise(cores=2.0, foreign=0.5).left_cores == 1.5
    assert Noise(cores=2.0, foreign=3.0).left_cores == 0.25
    assert Noise(cores=128.0, foreign=128.0).left_cores == 16.0  # the scheduler gives everybody a turn


@pytest.mark.parametrize(
    ("given", "threads"), [("3", 3), (" 3,1", 3), ("0", None), ("", None), ("-1", None), ("x", None), ("9" * 5000, None)]
)
def test_threads_of_a_process_of_the_users_own(given: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert default_threads() == (threads or max(1, int(usable_cores())))
