"""Measures what else the machine does while something is timed: waiting for a core, other processes, Python's garbage collector.

`LoadMeter` measures it around the calling thread and sums it up as `Noise`, which a diagnosis keeps. What it reads is Linux's: the
run-queue delay of threads, the CPU time of processes, and the limits of control groups (version 1 or 2). Elsewhere the figures are 0.
"""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from workbench.core.checks import number_or_default

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MAX_THREADS = 8
"""Threads whose delay is followed."""
MAX_READS_BETWEEN_LISTINGS = 256
"""New threads are looked for at least every so many readings."""


MAX_FOREIGN_SHARE = 0.3
"""Of the cores that our processes leave free (of one core, if they leave none): from there on others spoil a close decision. Measured on
two cores with one busy thread: the errors of predicted loaders explode there. With half, a browser in the background counts; with twice,
ranges on a shared machine are too narrow."""


MIN_LEFT_SHARE = 0.125
"""Share of the cores that the training gets however busy the machine is. Chosen: the scheduler gives each process its turn. Nothing but
predictions on a machine that is overloaded eight times depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What else the machine did during an experiment. Above the limits of the verdict it spoils the result."""

    cores: float
    """That this process may use (affinity, cgroup quota)."""
    foreign: float = 0.0
    """Cores taken by processes that are not ours, on average."""
    waiting: float = 0.0
    """Fraction of the time that the training thread was ready and waited for a core."""
    spread: float = 0.0
    """Interquartile range over median of the cached blocks."""
    gpu: tuple[str, ...] = ()
    """What else happened on the GPU, in words: clocks that were held down, other processes (see `core.gpu_load`)."""

    @property
    def left_cores(self) -> float:
        """Cores that others leave to our processes."""
        return max(MIN_LEFT_SHARE * self.cores, self.cores - self.foreign)

    def is_crowded(self, busy: float) -> bool:
        """Do other processes take so many cores that ours have to wait for one now and then?

        Args:
            busy: cores that ours keep busy.
        """
        return self.foreign > MAX_FOREIGN_SHARE * max(1.0, self.cores - busy)


def usable_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> float:
    """Cores that this process may use: those it may run on, or fewer where a container's quota says so."""
    return min(float(len(affinity())), _quota(cgroup, proc))


def default_threads() -> int:
    """Threads per operator that torch uses in a process of the user's own: as OMP_NUM_THREADS says, else one per core."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(given) if given.isdecimal() and len(given) < 6 and int(given) else max(1, int(usable_cores()))


def affinity() -> set[int]:
    """Numbers of the cores that this process may run on; what a container's quota allows of them is left out."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota(cgroup: Path, proc: Path) -> float:
    """Cores of the tightest quota on the way up to the root; infinite without one."""
    quotas = [float("inf")]
    for texts in control_groups("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"], root=cgroup, proc=proc):
        numbers = " ".join(texts).split()
        if len(numbers) == 2 and all(number.isdigit() and int(number) for number in numbers):  # "max" and -1 are none
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas)


def page_faults() -> tuple[int, float]:
    """How many times the kernel gave the calling thread pages of memory so far, and seconds that the thread spent in the kernel.

    Linux only; elsewhere (0, 0.0).
    """
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return 0, 0.0
    return usage.ru_minflt, usage.ru_stime


class RunQueueDelay:
    """How long the threads that compute have been ready to run and waited for a core: the kernel's run-queue delay, in seconds.

    Linux only; elsewhere, and on kernels that do not count it, `known` is False and every answer 0.
    """

    def __init__(self, proc: Path = PROC) -> None:
        """Follow the calling thread and those that help it: operators may run in several threads, and the slowest decides."""
        self._tasks = proc / str(os.getpid()) / "task"
        self._own = threading.get_native_id()
        self._files: dict[int, int] = {}
        """Thread → open schedstat file: to read one again costs 1 µs, to open it 10."""
        self._waited: dict[int, int] = {}
        """Thread → nanoseconds at the last reading."""
        self._total, self._at = 0, time.perf_counter_ns()
        self._reads, self._refresh = 0, 1
        self.known = self._open(self._own)

    def read(self) -> float:
        """Seconds so far; the difference of two readings is a delay.

        The delays of all threads are added up, but to no more than the time that passed. Where two threads share a core, the faster
        one polls for the other, and each waits for the core in turn.
        """
        if not self.known:
            return 0.0
        if self._reads == self._refresh:  # helpers start at the first operator that is large enough
            self._refresh += min(self._refresh, MAX_READS_BETWEEN_LISTINGS)
            self._list()
        self._reads += 1
        added, before = 0, self._at
        for thread, file in self._files.items():
            waited = self._look(file)[1]
            added += max(0, waited - self._waited[thread])
            self._waited[thread] = waited
        self._at = time.perf_counter_ns()
        self._total += min(added, self._at - before)
        return self._total / 1e9

    def own(self) -> float:
        """Seconds that the thread which made this has waited since it began."""
        return self._look(self._files[self._own])[1] / 1e9 if self.known else 0.0

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self.known = False

    def _open(self, thread: int) -> bool:
        with contextlib.suppress(OSError):
            file = os.open(self._tasks / str(thread) / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
            on_core, waited = self._look(file)
            if on_core:
                self._files[thread], self._waited[thread] = file, waited
                return True
            os.close(file)
        return False

    def _list(self) -> None:
        """Look for threads that compute, and follow the busiest."""
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(self._tasks)):
                if thread not in self._files:
                    self._open(thread)
        busy = {thread: self._look(file)[0] for thread, file in self._files.items()}
        kept = sorted(busy, key=lambda thread: busy[thread], reverse=True)[:MAX_THREADS]
        for thread in busy:
            if thread != self._own and (thread not in kept or busy[thread] < 0.01 * busy[self._own]):
                os.close(self._files.pop(thread))

    @staticmethod
    def _look(file: int) -> tuple[int, int]:
        """Nanoseconds on a core, and nanoseconds waiting for a core."""
        try:
            on_core, waited, _ = os.pread(file, 80, 0).split()
        except (OSError, ValueError):  # the thread is over
            return 0, 0
        return int(on_core), int(waited)


class GcTimer:
    """Adds up the time that Python's cyclic garbage collector takes: `with GcTimer() as timer: … timer.seconds`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begun = clock, 0.0
        self.seconds = 0.0
        """So far, in all threads."""
        self.count = 0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._begun = self._clock()
        elif self._begun:
            self.seconds += self._clock() - self._begun
            self.count += 1
            self._begun = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load during some time. Seconds, except for `foreign`."""

    seconds: float
    cpu: float
    """CPU of this process, all threads."""
    thread_cpu: float
    """CPU of the thread that is measured."""
    waiting: float
    """That thread was ready and waited for a core; 0 where the kernel does not tell."""
    foreign: float
    """Cores taken by processes that are not ours, on average, or by the host of a virtual machine, beyond those that a quota keeps from us;
    0 where the kernel does not tell."""
    ours: float = 0.0
    """Cores that our processes kept busy, on average."""
    stolen: float = 0.0
    """The host of a virtual machine had the core of that thread, which would have computed (steal in `/proc/stat`). It is known for all
    processes together: that thread gets the share that it has of their CPU time."""

    @property
    def blocked(self) -> float:
        """Seconds in which that thread neither computed, nor waited for a core, nor had its core taken away by the host."""
        return max(0.0, self.seconds - self.thread_cpu - self.waiting - self.stolen)


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    cpu: float
    thread_cpu: float
    waiting: float
    busy: float | None
    stolen: float
    ours: float


class LoadMeter:
    """Measures the load around the calling thread, from its creation on.

    Processes are ours if they descend from this process or from the launcher of its ranks: other ranks are not foreign.
    """

    def __init__(self, *, proc: Path = PROC, clock: Callable[[], float] = time.perf_counter, root: int | None = None) -> None:
        """Begin to measure.

        Args:
            proc: for tests: in place of `/proc`.
            clock: for tests: in place of the real one.
            root: the process whose descendants, and which itself, are ours; None = this one, or torchrun if it started it.
        """
        self._proc, self._clock = proc, clock
        launched = "TORCHELASTIC_RUN_ID" in os.environ and number_or_default("LOCAL_WORLD_SIZE", 1) > 1
        self._root = root or (os.getppid() if launched else os.getpid())
        self.delay = RunQueueDelay(proc)
        self._spare = len(affinity()) - usable_cores()  # which a quota leaves to others in any case
        self._first = self._last = self._now()

    def lap(self) -> Load:
        """The load since the last lap, or since the start."""
        before, self._last = self._last, self._now()
        return self._between(before, self._last)

    def total(self) -> Load:
        """The load since the start."""
        return self._between(self._first, self._now())

    def noise(self, spread: float = 0.0, gpu: tuple[str, ...] = ()) -> Noise:
        """The load since the start, as evidence.

        Args:
            spread: interquartile range over median of blocks that should be alike.
            gpu: what else happened on the GPU.
        """
        total = self.total()
        waiting = total.waiting / total.seconds if total.seconds > 0 else 0.0
        return Noise(cores=usable_cores(), foreign=total.foreign, waiting=waiting, spread=spread, gpu=gpu)

    def crowding(self) -> str:
        """That others needed the cores of our processes since the start, in words; "" = they did not."""
        total = self.total()
        noise = Noise(cores=usable_cores(), foreign=total.foreign)
        return f"other processes took {noise.foreign:.1f} of {noise.cores:.0f} cores" if noise.is_crowded(total.ours) else ""

    def doubt(self) -> str:
        """That a proof beside others may be wrong, in words; "" = others did not need the cores."""
        crowding = self.crowding()
        return f"the machine was busy: {crowding}, so the measured gain may be wrong; prove it again when it is quiet" if crowding else ""

    def close(self) -> None:
        """Close the files it reads."""
        self.delay.close()

    def _between(self, before: _Moment, after: _Moment) -> Load:
        seconds, thread_cpu, stolen = after.at - before.at, after.thread_cpu - before.thread_cpu, after.stolen - before.stolen
        ours = after.ours - before.ours
        foreign = 0.0
        if before.busy is not None and after.busy is not None and seconds > 0:
            busy = after.busy - before.busy
            foreign = max(0.0, (busy - ours) / seconds - self._spare)
            stolen *= min(1.0, thread_cpu / (busy - stolen)) if busy > stolen else 1.0
        return Load(
            seconds=seconds,
            cpu=after.cpu - before.cpu,
            thread_cpu=thread_cpu,
            waiting=after.waiting - before.waiting,
            foreign=foreign,
            ours=ours / seconds if seconds > 0 else 0.0,
            stolen=stolen,
        )

    def _now(self) -> _Moment:
        ours = cpu_of_tree(self._root, self._proc)
        return _Moment(self._clock(), time.process_time(), time.thread_time(), self.delay.own(), *self._busy(), ours)

    def _busy(self) -> tuple[float | None, float]:
        """Seconds that the cores we may use were busy, or taken away by the host of a virtual machine, and these alone; None off Linux."""
        cores = {f"cpu{number}" for number in affinity()}
        busy, stolen = None, 0.0
        for line in text_of(self._proc / "stat").splitlines():
            name, *ticks = line.split()
            if name in cores:
                user, nice, system, _idle, _iowait, irq, softirq, steal = [int(tick) for tick in ticks[:8]]
                busy = (busy or 0.0) + (user + nice + system + irq + softirq + steal) / TICKS  # guests are in user already
                stolen += steal / TICKS
        return busy, stolen


def cpu_of_tree(root: int, proc: Path = PROC) -> float:
    """CPU seconds so far of a process and its descendants, ended ones that this process has waited for included."""
    import resource  # there is none on Windows

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(cpu_of_process(pid) for pid in descendants(root, proc))


def cpu_of_process(pid: int) -> float:
    """CPU seconds of a process of this user, ended threads included; 0 if there is no such process, or off Linux."""
    try:
        return time.clock_gettime_ns(~pid << 3 | 2) / 1e9  # the kernel's name for the clock of a process
    except (AttributeError, OSError, OverflowError):
        return 0.0


def waited_for_core(pid: int, proc: Path = PROC) -> float | None:
    """Seconds that the main thread of a process was ready to run and waited for a core; None = there is no such process, or off Linux."""
    counts = text_of(proc / str(pid) / "schedstat").split()
    return int(counts[1]) / 1e9 if len(counts) == 3 and int(counts[0]) else None


def descendants(root: int, proc: Path = PROC) -> Iterator[int]:
    """A process and its descendants."""
    yield root
    with contextlib.suppress(OSError):
        for thread in os.listdir(proc / str(root) / "task"):
            for line in text_of(proc / str(root) / "task" / thread / "children").splitlines():
                for child in line.split():
                    yield from descendants(int(child), proc)


def control_groups(
    controller: str, in_version_2: Sequence[str], in_version_1: Sequence[str], *, root: Path = CGROUP, proc: Path = PROC
) -> list[tuple[str, ...]]:
    """The texts of some files of every control group (Linux) that has them all, from this process's own group up to the root.

    The guard of a run reads them by itself: it runs as a file, without this package.

    Args:
        controller: "cpu" or "memory".
        in_version_2: names of the files in version 2.
        in_version_1: names of those that say the same in version 1.
        root: where control groups are mounted.
        proc: folder of the processes' files, such as `/proc`.
    """
    groups = []
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers  # version 2 has no controllers here, and one tree for all
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):  # inside a container the path may be that of the host, and not be there
            texts = tuple(text_of(folder / name) for name in (in_version_1 if controllers else in_version_2))
            if all(texts):
                groups.append(texts)
            if folder == base:
                break
    return groups


def text_of(path: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def main_memory() -> int | None:
    """Bytes of main memory that this process may use: of its control group, or of the machine if that is less; None = not known."""
    limits = [int(limit) for (limit,) in control_groups("memory", ["memory.max"], ["memory.limit_in_bytes"]) if limit.strip().isdigit()]
    with contextlib.suppress(ValueError, IndexError):
        limits.append(1024 * int(text_of(PROC / "meminfo").split("MemTotal:")[1].split()[0]))
    return min(limits, default=None)
