"""FetchMeter: measures what a batch takes where it is made, in this process or in a worker, and sends that along with the batch."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from workbench.harness.stack_sampler import StackSampler

LINES_EVERY = 0.1
"""Seconds between two summaries of the sampled lines."""


class BatchCost(NamedTuple):
    """What one batch took. Seconds, bytes and counts; plain numbers, since it is sent with the batch."""

    wall: float
    cpu: float
    """Computing, own threads that were waited for included."""
    fetch_cpu: float
    """Of `cpu`: the dataset's."""
    fetch_blocked: float
    """Neither computing nor waiting for a core, in the dataset."""
    blocked: float
    """The same, collate included."""
    collate_here: float | None
    """CPU of collating it once more as the training process would, which does not do so into shared memory; None = not known."""
    size: int
    """Samples that were collated; 0 = not known."""
    read_bytes: int
    files: int
    """Opened since the last batch."""
    clock: float
    """CPU of the whole process so far."""
    samples: tuple[float, ...]
    """Of each sample, wall: nothing if they are fetched all at once."""
    lines: tuple[tuple[str, float], ...]
    """Where the time went so far: the user's lines and their shares."""


class Clocks(NamedTuple):
    """Clocks of a thread."""

    wall: float
    thread: float
    process: float
    delay: float
    """Ready, and waiting for a core; 0 where the system does not say."""


class FetchMeter:
    """Measures one of torch's fetchers, which make the batches of a DataLoader: its `fetch` then returns (batch, BatchCost)."""

    def __init__(self, fetcher: Any, sampler: StackSampler, *, alone: bool) -> None:
        """Replace the fetcher's `fetch`, dataset and collate function by timed ones.

        Args:
            fetcher: of a DataLoader's iterator, in this process.
            sampler: looks at the thread that fetches.
            alone: does nothing else run in the process? In a worker a thread sends the last batch while the next one is made.
        """
        self._fetch, self._collate, self._sampler, self._alone = fetcher.fetch, fetcher.collate_fn, sampler, alone
        self._again = not alone and _collates_as_torch(fetcher)
        self._raw: Any = None
        self._size = 0
        self._extra = 0.0
        self._lines: tuple[tuple[str, float], ...] = ()
        self._looked = 0.0
        sampler.call = None
        self._samples: list[float] = []
        self._fetched, self._read = clocks(), bytes_read()
        self._own_read = bytes_read() - self._read  # the clock's own
        fetcher.fetch, fetcher.collate_fn = self.fetch, self.collate
        if hasattr(fetcher, "dataset_iter"):
            fetcher.dataset_iter = _timed(fetcher.dataset_iter, self._samples)
        elif fetcher.auto_collation and not getattr(fetcher.dataset, "__getitems__", None):
            fetcher.dataset = _TimedItems(fetcher.dataset, self._samples)

    def fetch(self, index: Any) -> tuple[Any, BatchCost]:
        """What the fetcher fetches, with its BatchCost."""
        self._samples.clear()
        start, self._read = clocks(), bytes_read()
        self._sampler.call = 0
        try:
            data = self._fetch(index)
        finally:
            self._sampler.call = None
        end, fetched = clocks(), self._fetched
        fetch_cpu, fetch_blocked = self._split(start, fetched)
        collate_cpu, collate_blocked = self._split(fetched, end)
        clock = end.process - self._extra
        return data, BatchCost(
            wall=end.wall - start.wall,
            cpu=fetch_cpu + collate_cpu,
            fetch_cpu=fetch_cpu,
            fetch_blocked=fetch_blocked,
            blocked=fetch_blocked + collate_blocked,
            collate_here=self._collate_here(),
            size=self._size,
            read_bytes=max(0, self._read - self._own_read),
            files=_opened.take(),
            clock=clock,
            samples=without_delay(self._samples, fetched.delay - start.delay),
            lines=self._where(end.wall),
        )

    def collate(self, data: Any) -> Any:
        """What the fetcher's collate function makes of it."""
        self._sampler.call = None  # reading clocks lets the sampler look, which then saw the clocks for all the time since its last look
        self._read = bytes_read() - self._read
        self._raw, self._size = data if self._again else None, len(data) if isinstance(data, list) else 0
        self._fetched = clocks()
        self._sampler.call = 0
        return self._collate(data)

    def _collate_here(self) -> float | None:
        if self._raw is None:
            return None
        begun, start = time.process_time(), time.thread_time()
        with _no_worker():
            self._collate(self._raw)
        took, self._raw = time.thread_time() - start, None
        self._extra += time.process_time() - begun
        return took

    def _where(self, time: float) -> tuple[tuple[str, float], ...]:
        if time - self._looked > LINES_EVERY:
            self._lines, self._looked = self._sampler.lines(most=5, least=0.05), time
        return self._lines

    def _split(self, start: Clocks, end: Clocks) -> tuple[float, float]:
        """CPU and blocked seconds of an interval. Waiting for its own computing threads counts as computing."""
        cpu = end.thread - start.thread
        rest = max(0.0, end.wall - start.wall - cpu - (end.delay - start.delay))
        others = end.process - start.process - cpu
        if self._alone or others > 0.5 * rest:
            helped = min(rest, max(0.0, others))
            return cpu + helped, rest - helped
        return cpu, rest


class _TimedItems:
    """A dataset whose samples are timed."""

    def __init__(self, dataset: Any, samples: list[float]) -> None:
        self._dataset, self._samples = dataset, samples

    def __getitem__(self, index: Any) -> Any:
        start = time.perf_counter()
        item = self._dataset[index]
        self._samples.append(time.perf_counter() - start)
        return item


def _timed(items: Iterator[Any], samples: list[float]) -> Iterator[Any]:
    while True:
        start = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        samples.append(time.perf_counter() - start)
        yield item


def _collates_as_torch(fetcher: Any) -> bool:
    """With torch's own function, which may be called once more: it changes nothing."""
    from torch.utils.data import default_collate

    return bool(fetcher.auto_collation and fetcher.collate_fn is default_collate)


@contextlib.contextmanager
def _no_worker() -> Iterator[None]:
    """Inside, torch does not know that this is a worker, so it collates as in a process that is none."""
    from torch.utils.data._utils import worker

    info = getattr(worker, "_worker_info", None)
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


class WorkerMeter:
    """A `worker_init_fn` that measures in its worker: every batch then comes as (batch, BatchCost)."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        """Install the meter; called in the worker."""
        from torch.utils.data import _DatasetKind  # torch's own workers import it from there

        if self.init is not None:
            self.init(worker_id)
        sampler = StackSampler()
        sampler.__enter__()  # until the worker ends
        create: Any = _DatasetKind.create_fetcher

        def measured(*args: Any) -> Any:
            fetcher = create(*args)
            FetchMeter(fetcher, sampler, alone=False)
            return fetcher

        _DatasetKind.create_fetcher = staticmethod(measured)  # type: ignore[method-assign]
        sys.addaudithook(_opened.hear)


class _Opened:
    """Counts the different files that Python opens: an audit hook, which cannot be removed, so it is for workers only."""

    def __init__(self) -> None:
        self.paths = set[str]()

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(args[0], int) and not str(args[0]).startswith("/proc/"):  # there our own clocks are
            self.paths.add(str(args[0]))

    def take(self) -> int:
        paths, self.paths = self.paths, set()
        return len(paths)


_opened = _Opened()


def clocks() -> Clocks:
    return Clocks(time.perf_counter(), time.thread_time(), time.process_time(), _delay())


def _delay() -> float:
    """Seconds for which this thread was ready and waited for a core: exact, Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1]) / 1e9
    return 0.0


def without_delay(samples: Sequence[float], delay: float) -> tuple[float, ...]:
    """Seconds of a batch's samples without what the thread waited for a core: it is taken from the longest, down to the median.

    Otherwise an even loader has slow samples on a busy machine: those in which the thread was interrupted.

    >>> without_delay([1.0, 5.0, 2.0], 2.5)
    (1.0, 2.5, 2.0)
    """
    less, median = list(samples), statistics.median(samples) if samples else 0.0
    for longest in sorted(range(len(less)), key=less.__getitem__, reverse=True):
        taken = min(max(0.0, delay), max(0.0, less[longest] - median))
        less[longest], delay = less[longest] - taken, delay - taken
    return tuple(less)


def bytes_read() -> int:
    """By this process so far, the page cache's included (Linux; elsewhere 0)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/io", "rb", buffering=0) as file:
        return int(file.read(256).split()[1])  # "rchar: …"
    return 0
