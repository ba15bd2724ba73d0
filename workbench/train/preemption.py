"""Ends a training after a step that all ranks agree on, when SIGTERM or SIGUSR1 says that the machine is needed or the run is to stop.

A signal may reach one rank only, and ranks may be steps apart: while one is at the end of a step, others may wait for it in a reduction.
So a thread of each rank promises a step at whose end the rank waits, and all ranks go on to the last of these steps.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch.utils.data import DataLoader

from workbench.core import run_directory
from workbench.train.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What Slurm, Kubernetes and `run.stop()` send before they kill, and what Slurm can send earlier (`--signal=USR1@60`)."""
GONE_S = 3.0
"""Seconds in which all ranks promise a step, or one of them is dead: torchrun sends SIGTERM to the others then, and they end at once."""
POLL_S = 0.5
"""Seconds between two looks whether another rank got a signal."""
WAIT_S = 0.01
"""Seconds between two looks for the promises of the others."""
_entered: "list[Preemption]" = []
"""What a process that is forked now gives up."""
_forking = threading.local()


class Preemption:
    """Signals of this process, while it is entered, and what all ranks make of them."""

    def __init__(self, ranks: Ranks, done: int, steps: int) -> None:
        self._ranks, self._step, self._steps = ranks, done, steps
        self._key = f"{ranks.agreements}/preemption"
        self._asked, self._decided, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._lock, self._before = threading.Lock(), dict[signal.Signals, Any]()
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1
        self._promised: int | None = None
        self._last = steps
        self.signal = ""
        """Name of the signal that came first to any rank, once the ranks have agreed."""

    def __enter__(self) -> Self:
        atexit.register(_end_workers)  # runs before multiprocessing's own, which was registered earlier
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be handled; another rank may get one
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            _entered.append(self)
            if self._ranks.world_size > 1:  # the handler would wait for the main thread, which may wait for another rank or a device
                self._pipe = os.pipe()
                os.set_blocking(self._pipe[1], False)
                self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if self._ranks.world_size > 1:
            threading.Thread(target=self._follow, name="preemption", daemon=True).start()
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name
        self._asked.set()

    def reached(self, step: int) -> bool:
        """Called at the end of each step, with its number: is it the last, because of a signal?"""
        if self._ranks.world_size == 1:
            return self._asked.is_set() and step < self._steps
        with self._lock:
            self._step, promised = step, self._promised
        if promised is None or step < promised or step >= self._steps:
            return False
        self._decided.wait()
        return step >= self._last

    def end(self, run_dir: Path, step: int, kept: int) -> None:
        """Say that the training ends here, and goes on from the step `kept` of the last checkpoint: an earlier one if none was written."""
        self._ranks.preempted = self.signal
        if not self._ranks.rank:
            where = "goes on from there" if kept == step else f"goes on from step {kept}"
            how = f"wb.launch(resume={str(run_dir)!r}) {where}" if kept else "there is no checkpoint, so it begins anew"
            print(f"ended by {self.signal} after step {step} of {self._steps}: {how}")
            row = {"step": step, "ended_by": self.signal, "goes_on_from": kept, "time": time.time()}
            run_directory.write_json(run_dir / run_directory.PREEMPTED, row)
            writer = run_directory.LineWriter(run_dir / run_directory.RESUMES)
            writer.write([row])
            writer.close()

    def _follow(self) -> None:
        self._agree()
        self._closed.wait()
        if self._pipe:
            os.close(self._pipe[0])

    def _agree(self) -> None:
        """Promise a step when a rank got a signal, and find out the last."""
        store, ranks = self._ranks.store, range(self._ranks.world_size)
        with contextlib.suppress(RuntimeError):  # the store is gone: another rank has failed
            while not self._was_asked(POLL_S) and not store.check([self._key]):
                if self._closed.is_set():
                    return
            if self._asked.is_set():
                store.set(self._key, self.signal)
            with self._lock:
                self._promised = self._step + 1  # the step that is under way
            self._promise(self._promised)
            keys, limit = [f"{self._key}/{rank}" for rank in ranks], time.monotonic() + GONE_S
            while not store.check(keys):  # not wait(): it would keep the store from the training
                if self._closed.wait(WAIT_S):
                    return
                if time.monotonic() > limit:  # as if there was no handler: Python lets only the main thread, which may wait, take it back
                    ctypes.CDLL(None).signal(signal.SIGTERM, None)
                    os.kill(os.getpid(), signal.SIGTERM)
            self._last = max(int(store.get(key)) for key in keys)
            self.signal = store.get(self._key).decode()
        self._decided.set()

    def _was_asked(self, timeout: float) -> bool:
        """Did this rank get a signal? Waits for one for so long, and does not need the main thread for it."""
        if self._pipe is None:
            return self._asked.wait(timeout)
        if select.select([self._pipe[0]], [], [], timeout)[0]:
            for number in os.read(self._pipe[0], 512):
                if number in SIGNALS:
                    self._handle(number, None)
        return self._asked.is_set()

    def _promise(self, step: int) -> None:
        self._ranks.store.set(f"{self._key}/{self._ranks.rank}", str(step))

    def _restore(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self in _entered:
            _entered.remove(self)
        if self._pipe:
            signal.set_wakeup_fd(self._wakeup)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
        self._closed.set()
        if self._pipe:
            os.close(self._pipe[1])  # wakes the thread, which may still read
        with self._lock:
            unpromised, self._promised = self._promised is None, self._steps
        if unpromised and self._ranks.world_size > 1 and kind is None:
            with contextlib.suppress(RuntimeError):
                self._promise(self._steps)  # others may have got a signal after this rank's last step


def spare_worker(worker: int) -> None:
    """In a worker of a loader: ignore the signals that its rank answers with a checkpoint. Torchrun and Slurm send them to it, too.

    The rank ends it without them (`_end_workers`); if the rank is killed, torch's own look at the parent does.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the programs that a worker starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def start_workers(loader: "DataLoader[Any]") -> Iterator[Any]:
    """The batches of a loader, whose workers are started with the signals held back until they ignore them (`spare_worker`)."""
    _forking.workers = getattr(loader, "worker_init_fn", None) is spare_worker
    try:
        return iter(loader)
    finally:
        _forking.workers = False


spare_worker.splits_streams = False  # type: ignore[attr-defined]


def _end_workers() -> None:
    """At the rank's exit: kill the workers that are left. Multiprocessing would send them SIGTERM, and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call it an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _before_fork() -> None:
    """Hold signals back: Python would forget one that comes to the new process before it has its handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _entered else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """A process that the training forked is no rank: SIGTERM ends it, else multiprocessing would wait for it for ever at exit."""
    for preemption in list(_entered):
        preemption._restore()
    if not getattr(_forking, "workers", False):
        _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
