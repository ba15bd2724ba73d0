"""A signal ends a training after a step that all ranks agree on."""

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

import workbench as wb
from tests import toy_tasks
from workbench.core import run_directory
from workbench.core.package import ROOT
from workbench.timeline.reading import may_split
from workbench.train import preemption
from workbench.train.loader import build_loader
from workbench.train.preemption import Preemption
from workbench.train.ranks import Ranks


class Rank(threading.Thread):
    """Takes steps, each of which ends when all ranks have begun it, as a reduction does."""

    def __init__(self, number: int, world: int, store: Any, begun: list[int], steps: int, asked_at: int | None) -> None:
        super().__init__(daemon=True)
        ranks = Ranks(rank=number, world_size=world, device=torch.device("cpu"), store=store)
        self.number, self.begun, self.steps, self.asked_at, self.last = number, begun, steps, asked_at, 0
        self.preemption = Preemption(ranks, 0, steps)

    def run(self) -> None:
        with self.preemption:
            for step in range(1, self.steps + 1):
                self.begun[self.number] = step
                while min(self.begun) < step:
                    time.sleep(0.001)
                if step == self.asked_at:
                    self.preemption._handle(signal.SIGUSR1, None)
                time.sleep(0.002 * (self.number + 1))
                self.last = step
                if self.preemption.reached(step):
                    return


@pytest.mark.parametrize("asked", [{0: 5}, {2: 5}, {0: 5, 1: 5, 2: 6}, {1: 400}, {}])
def test_all_ranks_end_after_the_same_step(monkeypatch: pytest.MonkeyPatch, asked: dict[int, int]) -> None:
    monkeypatch.setattr(preemption, "POLL_S", 0.02)
    store, begun, steps = HashStore(), [0, 0, 0], 100 if asked != {1: 400} else 400
    ranks = [Rank(number, 3, store, begun, steps if asked else 10, asked.get(number)) for number in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert not any(rank.is_alive() for rank in ranks)
    assert len({rank.last for rank in ranks}) == 1
    if asked in ({}, {1: 400}):
        assert ranks[0].last == (400 if asked else 10)
    else:
        assert 5 <= ranks[0].last < 100
        assert {rank.preemption.signal for rank in ranks} == {"SIGUSR1"}


def test_a_rank_learns_of_a_signal_while_its_main_thread_waits_for_another() -> None:
    store, before = HashStore(), signal.set_wakeup_fd(-1)
    store.set("0/preemption/1", "3")  # what the other rank promises
    with Preemption(Ranks(rank=0, world_size=2, device=torch.device("cpu"), store=store), 1, 10) as entered:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        store.wait(["0/preemption/0"], datetime.timedelta(seconds=20))  # no Python handler runs in here
        assert store.get("0/preemption") == b"SIGUSR1"
        assert not entered.reached(2)
        assert entered.reached(3)
    assert signal.set_wakeup_fd(before) == -1


def test_a_rank_that_waits_for_the_answers_of_all_leaves_the_store_to_other_threads() -> None:
    """One thread of a store's connection waits in C as long as it likes, and all others wait for it."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    ranks = Ranks(rank=0, world_size=2, device=torch.device("cpu"), store=store)
    answers: list[bytes] = []
    waiting = threading.Thread(target=lambda: answers.extend(ranks.share("x", b"mine")), daemon=True)
    waiting.start()
    looked = threading.Event()
    threading.Thread(target=lambda: (time.sleep(0.2), store.check(["0/preemption"]), looked.set()), daemon=True).start()
    assert looked.wait(20)
    assert not answers
    server.set("0/x/1", "theirs")
    waiting.join(20)
    assert answers == [b"mine", b"theirs"]
    with pytest.raises(RuntimeError, match=r"no answer in 0\.01 s of rank 1"):
        ranks.share("y", b"mine", datetime.timedelta(seconds=0.01))


def test_sigterm_ends_a_process_that_the_training_forked() -> None:
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"), store=None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test may have left a handler
    with Preemption(alone, 0, 10) as entered:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,), daemon=True)
        child.start()
        child.terminate()
        child.join(10)
        code = child.exitcode
        child.kill()
        os.kill(os.getpid(), signal.SIGTERM)
        assert entered.reached(1)  # here it is handled as before
    signal.signal(signal.SIGTERM, before)
    assert code == -signal.SIGTERM


def test_a_worker_of_a_loader_outlives_sigterm_while_its_rank_trains() -> None:
    """Torchrun sends the signal to the whole process group of a rank, whose last steps need the worker."""
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"), store=None)
    spec = wb.RunSpec(task="toy", device="cpu", micro_batch=4, steps=9, num_workers=1, checkpoint_every=3)
    loader = build_loader(toy_tasks.numbers(), spec, alone, seed=0)
    with Preemption(alone, 0, 10):
        batches = iter(loader)
        (worker,) = batches._workers  # type: ignore[attr-defined]
        next(batches)
        os.kill(worker.pid, signal.SIGTERM)
        assert len(list(batches)) == len(loader) - 1
    assert not may_split(torch.utils.data.DataLoader(range(8), worker_init_fn=loader.worker_init_fn))  # type: ignore[arg-type]


STUCK = """
import ctypes, sys, time
import torch
from workbench.train.preemption import Preemption, spare_worker
from workbench.train.ranks import Ranks

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex), lock(mutex)

with Preemption(Ranks(rank=0, world_size=1, device=torch.device("cpu"), store=None), 0, 10):
    batches = iter(torch.utils.data.DataLoader(Stuck(), num_workers=1, worker_init_fn=spare_worker))
    time.sleep(1)
sys.exit(7)
"""


@pytest.mark.slow  # torch gives the worker five seconds
def test_a_worker_that_is_stuck_does_not_keep_its_rank_from_its_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], timeout=60, capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert ended.returncode == 7, ended.stderr


TASK = """
import os, signal, time
import torch
import workbench as wb

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.sin(torch.arange(8.0) * (index + 1)), torch.ones(1)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def build():
    return wb.Task(model=lambda: torch.nn.Linear(8, 1), dataset=Data, loss=loss, optimizer="adamw(lr=0.01)")
"""


def rank_process(run: wb.Run, rank: int) -> int:
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):  # a rank is older than its workers
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{run_directory.ENV_RUN_ID}={run.id}".encode() in environ and f"RANK={rank}".encode() in environ:
            return int(folder.name)
    raise AssertionError(f"no rank {rank}")


@pytest.mark.slow
def test_a_signal_to_one_rank_and_a_stop_leave_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    spec = wb.RunSpec(
        task=f"{tmp_path}/task.py:build", device="cpu", micro_batch=4, steps=150, nproc_per_node=2, checkpoint_every=150, num_workers=1
    )
    run = wb.launch(spec, runs_dir=tmp_path / "runs")

    def stepped(count: int) -> None:
        limit = time.monotonic() + 90
        while len(run.metric_rows) < count:
            assert time.monotonic() < limit
            assert run.state == "running", run.logs()
            time.sleep(0.05)

    stepped(3)
    os.kill(rank_process(run, 1), signal.SIGUSR1)
    assert run.wait(60).state == "stopped"
    (first,) = (run.path / run_directory.CHECKPOINTS).iterdir()
    done = int(first.stem.removeprefix("step"))
    assert any(f"SIGUSR1 ended it after step {done}, with a checkpoint: wb.launch(resume=run) goes on" in note for note in run.notes)
    assert f"ended by SIGUSR1 after step {done} of 150" in run.logs()
    assert [row["step"] for row in run.metric_rows] == list(range(1, done + 1))
    run = wb.launch(resume=run)
    stepped(done + 3)
    run.stop()  # SIGTERM
    assert run.state == "stopped"
    assert max(int(path.stem.removeprefix("step")) for path in (run.path / run_directory.CHECKPOINTS).iterdir()) > done
    assert any("SIGTERM ended it" in note for note in run.notes)
    run = wb.launch(resume=run).wait(90, check=True)
    assert run.state == "finished"
    assert [row["step"] for row in run.metric_rows if "loss" in row] == list(range(1, 151))
