"""Loading: what the batches of a loader take, found out by two short probes.

What one batch takes to make, measured where it is made: in this process, or in a worker that sends it along with the batch.
"""

import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from workbench.core.system_load import cpu_of_process
from workbench.diagnosis.analysis.evidence import Loading
from workbench.harness.batches import bytes_of, tensors_of
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.loaders import shut_down, with_knobs, without_known_warnings, worker_error
from workbench.harness.stack_sampler import StackSampler
from workbench.timeline.loops import samples_in

LINES = 0.1
"""Seconds after which the lines are worth adding up again."""
FEW = 40
"""Samples: of fewer, a slowest twentieth says nothing."""


class Made(NamedTuple):
    """What one batch took. Seconds, bytes and counts; as plain as can be, as it travels with the batch."""

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


class Moment(NamedTuple):
    """Clocks of a thread."""

    wall: float
    thread: float
    process: float
    delay: float
    """Ready, and waiting for a core; 0 where the system does not tell."""


class FetchMeter:
    """Measures one of torch's fetchers, which makes the batches of a DataLoader: replaces its `fetch` by one that returns (batch, Made)."""

    def __init__(self, fetcher: Any, sampler: StackSampler, *, alone: bool) -> None:
        """Put itself into a fetcher.

        Args:
            fetcher: of a DataLoader's iterator, in this process.
            sampler: looks at the thread that fetches.
            alone: does the process do nothing else? In a worker a thread sends the last batch while the next one is made.
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
        self._fetched, self._read = now(), bytes_read()
        self._own_read = bytes_read() - self._read  # the clock's own
        fetcher.fetch, fetcher.collate_fn = self.fetch, self.collate
        if hasattr(fetcher, "dataset_iter"):
            fetcher.dataset_iter = _timed(fetcher.dataset_iter, self._samples)
        elif fetcher.auto_collation and not getattr(fetcher.dataset, "__getitems__", None):
            fetcher.dataset = _TimedItems(fetcher.dataset, self._samples)

    def fetch(self, index: Any) -> tuple[Any, Made]:
        """What the fetcher fetches, and what it took."""
        self._samples.clear()
        start, self._read = now(), bytes_read()
        self._sampler.call = 0
        try:
            data = self._fetch(index)
        finally:
            self._sampler.call = None
        end, fetched = now(), self._fetched
        fetch_cpu, fetch_blocked = self._split(start, fetched)
        collate_cpu, collate_blocked = self._split(fetched, end)
        clock = end.process - self._extra
        return data, Made(
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
            samples=tuple(self._samples),
            lines=self._where(end.wall),
        )

    def collate(self, data: Any) -> Any:
        """What the fetcher's collate function makes of it."""
        self._read = bytes_read() - self._read
        self._raw, self._size = data if self._again else None, len(data) if isinstance(data, list) else 0
        self._fetched = now()
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
        if time - self._looked > LINES:
            self._lines, self._looked = self._sampler.lines(most=5, least=0.05), time
        return self._lines

    def _split(self, start: Moment, end: Moment) -> tuple[float, float]:
        """CPU and blocked seconds of a stretch. Waiting for threads of its own that compute is computing."""
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


class InWorker:
    """A `worker_init_fn` that measures in its worker: every batch then comes as (batch, Made)."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker; nothing of it is seen by the training process."""
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


def now() -> Moment:
    """The clocks of this thread."""
    return Moment(time.perf_counter(), time.thread_time(), time.process_time(), _delay())


def _delay() -> float:
    """Seconds for which this thread was ready and waited for a core: exact, Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1]) / 1e9
    return 0.0


def bytes_read() -> int:
    """By this process so far, the page cache's included (Linux; elsewhere 0)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/io", "rb", buffering=0) as file:
        return int(file.read(256).split()[1])  # "rchar: …"
    return 0


def slow_share(samples: Sequence[float]) -> float | None:
    """Share of the time of all samples beyond the median that the slowest twentieth takes; None of too few."""
    if len(samples) < FEW or not (total := sum(samples)):
        return None
    ordered, median = sorted(samples), statistics.median(samples)
    return sum(value - median for value in ordered[-max(1, len(ordered) // 20) :]) / total


MOST = 200
"""Batches that a probe takes at most."""
LEAST = 3
"""And at least, one for warming up not counted."""
ONCE = 8
"""Batches that a probe takes from an iterator which cannot be read again."""
TURNS = 4
"""In which batches are made here and in a worker."""
PATIENCE = 30
"""Seconds to wait for a batch of a worker."""
PAGE = 4096
"""Bytes: to read one of each page is to map them all."""


def probe(loader: Any, feed: Feed, budget_s: float = 10.0) -> tuple[Loading, list[str]]:
    """What a loader's batches take.

    Three looks: the loader as it is, from `feed`; for a DataLoader its batches made by one worker that measures itself; and if it has no
    workers, made here. The dataset of a loader with workers is not used in this process, where it might open files that workers would
    then share.

    Args:
        loader: what `feed` was made of.
        feed: left within a pass. Its batches are used up.
        budget_s: seconds for all of it. A loader that starts or works slowly takes more: a few batches are needed.

    Returns:
        What was found, and what could not be found, in words.

    Raises:
        ValueError: the loader is empty.
    """
    notes: list[str] = []
    looks = 1 + (feed.kind == "DataLoader") * (1 if feed.num_workers else 2)
    plain = _as_it_is(feed, budget_s / looks)
    batch = plain.last
    found = Loading(
        kind=feed.kind,
        num_workers=feed.num_workers,
        prefetch_factor=loader.prefetch_factor if feed.num_workers else None,
        persistent_workers=bool(feed.num_workers and loader.persistent_workers),
        pin_memory=bool(getattr(loader, "pin_memory", False)) if feed.kind == "DataLoader" else False,
        batch_size=samples_in(batch) or (loader.batch_size if feed.kind == "DataLoader" else None),
        batch_bytes=bytes_of(batch),
        epoch=feed.epoch,
        alone=plain.wall,
    )
    if feed.kind == "DataLoader":
        return _probed(loader, feed, found, budget_s * (1 - 1 / looks), notes), notes
    if plain.worker_cpu is None:
        found = dataclasses.replace(found, cpu=plain.cpu, blocked=plain.blocked)
    else:
        found = dataclasses.replace(found, worker_cpu=plain.worker_cpu, handover=plain.cpu)
    return dataclasses.replace(found, start_up=start_up(feed, plain.wall)), notes


def _probed(loader: "DataLoader[Any]", feed: Feed, found: Loading, budget: float, notes: list[str]) -> Loading:
    """What is found where batches are made, here and in a worker, in turns: a machine that gets slower for a while does so for both."""
    here, there = None if feed.num_workers else _Here(loader), None
    try:
        there = _There(loader)
        for _ in range(TURNS):
            for look in (there, here):
                if look:
                    look.turn(budget / TURNS / (2 if here else 1))
    except Exception as error:
        notes.append(f"no batch could be made in a worker process, so nothing is known about more workers: {worker_error(loader, error)}")
        if here:
            here.turn(budget)
    finally:
        for look in (there, here):
            if look:
                look.close()
    if there and there.made:
        found = dataclasses.replace(
            found,
            worker_cpu=statistics.median(there.worker_cpu),
            handover=statistics.median(there.handover),
            files=_mean(there.made, lambda m: m.files),
            start_up=max(0.0, there.start - _mean(there.made, lambda m: m.wall)),
        )
    made = here.made if here and here.made else there.made if there else []
    if made:
        found = dataclasses.replace(
            found,
            cpu=_mean(made, lambda m: m.cpu) if here else _cpu_here(made),
            blocked=_mean(made, lambda m: m.blocked),
            fetch_cpu=_mean(made, lambda m: m.fetch_cpu),
            fetch_blocked=_mean(made, lambda m: m.fetch_blocked),
            collate=_mean(made, lambda m: m.cpu - m.fetch_cpu),
            slow_share=slow_share([sample for turn in made for m in turn for sample in m.samples]),
            read_bytes=_mean(made, lambda m: m.read_bytes),
            slow_lines=made[-1][-1].lines,
        )
    elif not notes:
        notes.append("the loader gives too few batches to see what one takes")
    if feed.num_workers:
        found = dataclasses.replace(found, start_up=start_up(feed, _mean(made, lambda m: m.wall) if made else found.alone))
    return found


def start_up(feed: Feed, making: float) -> float | None:
    """Seconds that a pass costs beyond its batches: to start the workers, to make the first batch where that is slower, and to end.

    Args:
        feed: which counted them.
        making: seconds to make one batch, which the first one takes in any case.
    """
    starts = feed.start_ups[1:] or feed.start_ups  # the very first imports, and fills caches
    if not starts:
        return None
    return max(0.0, statistics.median(starts) - making) + (statistics.median(feed.ends) if feed.ends else 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """Batches taken from a feed, nothing else running. Seconds per batch."""

    last: Any
    wall: float
    cpu: float
    blocked: float
    worker_cpu: float | None


def _as_it_is(feed: Feed, budget: float) -> _Plain:
    """Take batches: first those that lay ready, then those that are counted."""
    deadline = time.perf_counter() + budget
    last = feed.batch()
    if feed.kind == "once":
        return _taken(feed, last, ONCE, deadline)
    for _ in range(feed.queue + feed.num_workers):  # what was made before anybody measured
        last = feed.batch()
        if time.perf_counter() > deadline:
            break
    return _taken(feed, last, MOST, deadline)


def _taken(feed: Feed, last: Any, most: int, deadline: float) -> _Plain:
    count, pids, passes, paid = 0, feed.worker_pids, feed.passes, sum(feed.start_ups) + sum(feed.ends)
    start, before = now(), [cpu_of_process(pid) for pid in pids]
    while count < most and (count < LEAST or time.perf_counter() < deadline):
        try:
            last = feed.batch()
        except Exhausted:
            break
        count += 1
    end, after = now(), [cpu_of_process(pid) for pid in pids]
    wall = end.wall - start.wall
    if (new := feed.passes - passes) and count > new:  # short passes: their first batches come with the start-up, which is apart
        wall = (wall - (sum(feed.start_ups) + sum(feed.ends) - paid)) * count / (count - new)
    own = end.process - start.process
    blocked = max(0.0, end.wall - start.wall - own - (end.delay - start.delay))
    known = bool(pids) and pids == feed.worker_pids and all(after)
    workers = sum(after) - sum(before) if known else None
    each = 1 / max(1, count)
    return _Plain(
        last=last, wall=wall * each, cpu=own * each, blocked=blocked * each, worker_cpu=None if workers is None else workers * each
    )


class _Here:
    """Makes batches in this process, as a loader without workers does."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.made: list[list[Made]] = []
        """In turns."""
        self._source: Iterator[Any] | None = iter(with_knobs(loader, num_workers=0))
        self._fetcher = getattr(self._source, "_dataset_fetcher", None)  # None: torch's names have changed
        self._sampler = StackSampler()
        if self._fetcher is not None:
            FetchMeter(self._fetcher, self._sampler, alone=True)

    def turn(self, seconds: float) -> None:
        """Make some."""
        if self._fetcher is None or self._source is None:
            return
        end = time.perf_counter() + seconds
        with self._sampler:
            got = [one for _, one in itertools.islice(_until(self._source, end), MOST)]
        if got:
            self.made.append(got if self.made or len(got) == 1 else got[1:])  # the first of all opens files, and fills caches

    def close(self) -> None:
        """Drop it."""
        self._source = None


class _There:
    """Has batches made by one worker that measures itself. The pass is its own: nothing the loader shares with it is in the middle."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.made: list[list[Made]] = []
        self.worker_cpu: list[float] = []
        """Of a batch, mean of each turn."""
        self.handover: list[float] = []
        self.start = 0.0
        """Seconds to the first batch."""
        self._worker = with_knobs(
            loader,
            num_workers=1,
            prefetch_factor=2,
            persistent_workers=False,
            timeout=PATIENCE,  # a worker that was forked while another thread held a lock never answers
            worker_init_fn=InWorker(loader.worker_init_fn),
        )
        self._source: Any = None
        self._clock: float | None = None

    def turn(self, seconds: float) -> None:
        """Take some.

        Raises:
            Exception: whatever workers, or the dataset in them, raise.
        """
        if self._source is None:
            begun = time.perf_counter()
            with without_known_warnings():
                self._source = iter(self._worker)
            for _, first in itertools.islice(self._source, 1):
                self._clock, self.start = first.clock, time.perf_counter() - begun
        if self._clock is None:
            return
        got, before = [], self._clock
        own = time.process_time()
        for batch, one in _until(self._source, time.perf_counter() + seconds):
            touch(batch)
            got.append(one)
            del batch
        if got:
            self.made.append(got)
            self.handover.append((time.process_time() - own) / len(got))
            self.worker_cpu.append((got[-1].clock - before) / len(got))
            self._clock = got[-1].clock

    def close(self) -> None:
        """End the worker."""
        if self._source is not None:
            shut_down(self._source)


def _until(source: Iterator[Any], deadline: float) -> Iterator[Any]:
    """Batches until the time is up, but two of them, and not without end."""
    for count, batch in enumerate(source, 1):
        yield batch
        if count >= MOST or (count > 1 and time.perf_counter() > deadline):
            return


def _mean(turns: list[list[Made]], value: Callable[[Made], float]) -> float:
    """Median of the turns' means: slow samples count in full, a turn that somebody disturbed does not."""
    return statistics.median(statistics.fmean(map(value, turn)) for turn in turns)


def _cpu_here(turns: list[list[Made]]) -> float:
    """CPU of making a batch in the training process, from a worker. The least that collating a sample took counts: there, memory is used
    again, and nothing sends the last batch beside it.
    """
    if turns[0][0].collate_here is None:
        return _mean(turns, lambda m: m.cpu)
    each = statistics.median(min((m.collate_here or 0.0) / max(1, m.size) for m in turn) for turn in turns)
    return _mean(turns, lambda m: m.fetch_cpu) + each * statistics.fmean(max(1, m.size) for turn in turns for m in turn)


def touch(batch: Any) -> None:
    """Read a byte of every page of a batch: memory that another process wrote is mapped when it is first used, and that takes time."""
    for tensor in tensors_of(batch):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.nbytes > PAGE and tensor.is_contiguous():
            tensor.detach().reshape(-1).view(torch.uint8).numpy()[::PAGE].max()  # by numpy: without torch's threads
