"""Probes a loader: what its batches take as it is, made in this process, and made in a worker."""

import contextlib
import dataclasses
import itertools
import linecache
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from workbench.core.system_load import cpu_of_process
from workbench.diagnosis.analysis.evidence import Loading
from workbench.diagnosis.measure.fetch_meter import BatchCost, FetchMeter, WorkerMeter, clocks
from workbench.harness.batches import bytes_of, tensors_of
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.loaders import data_loader_of, misses_epochs, shut_down, with_knobs, without_known_warnings, worker_error
from workbench.harness.stack_sampler import StackSampler
from workbench.timeline.loops import samples_in
from workbench.timeline.reading import SPLIT_BY_WORKER, digest, is_stream, may_split

MIN_SAMPLES = 40
"""Samples: of fewer, a slowest twentieth says nothing."""
MAX_BATCHES = 200
"""Batches that a probe takes at most."""
MIN_BATCHES = 3
"""And at least, one for warming up not counted."""
ITERATOR_BATCHES = 8
"""Batches that a probe takes from an iterator which cannot be read again."""
TURNS = 4
"""In which batches are made here and in a worker."""
OVERDUE = 1.5
"""How many times its budget a probe in turns may take, the start of its worker aside, before it makes no further turn. Chosen: quick
batches keep to the budget, and of slow ones a turn has two."""
STEADY_ERROR = 0.02
"""A mean of what batches take is known well enough if its standard error is at most this fraction of it. Chosen below what equal blocks of
steps vary by; the rest of the time of a probe would not make a predicted gain better."""
STEADY_SECONDS, STEADY_BATCHES, STEADY_SAMPLES = 0.3, 16, 240
"""Seconds, batches, and samples where those are timed, after which a probe may end because its mean is known. Chosen: the kernel counts a
worker's time in hundredths of a second, and fewer samples hold too few of a slowest twentieth."""
WORKER_TIMEOUT = 30
"""Seconds to wait for a batch of a worker."""
DRAWS = re.compile(r"\brandom\b|\brand(n|int)?\(|\.uniform\(|\bRandom[A-Z]|ColorJitter|AutoAugment|RandAugment|TrivialAugment|AugMix")
"""What draws random numbers, in a line of source or in what a transform says of itself: of Python, numpy, torch or torchvision."""
LONGEST_REPR = 4000
"""Characters of what a transform says of itself that are looked at."""
PAGE = 4096
"""Bytes: to read one of each page is to map them all."""


def probe(loader: Any, feed: Feed, budget_s: float = 10.0) -> tuple[Loading, list[str]]:
    """What a loader's batches take.

    Three probes: the loader as it is, from `feed`; for a DataLoader its batches made by one worker that measures itself; and if it has no
    workers, made here. The dataset of a loader with workers is not used in this process, where it might open files that workers would
    then share.

    Args:
        loader: what `feed` was made of.
        feed: left within a pass. Its batches are used up.
        budget_s: seconds for all of it. A loader that starts or works slowly takes more: a few batches are needed.

    Returns:
        What was measured, and notes on what could not be measured.

    Raises:
        ValueError: the loader is empty.
    """
    notes: list[str] = []
    if (inner := data_loader_of(loader)) is not None:  # the truth of a loader is its length, which a stream lacks
        loader = inner
    looks = 1 + (feed.kind == "DataLoader") * (1 if feed.num_workers else 2)
    plain = _as_it_is(feed, budget_s / looks)
    batch = plain.last
    loading = Loading(
        kind=feed.kind,
        num_workers=feed.num_workers,
        prefetch_factor=loader.prefetch_factor if feed.num_workers else None,
        persistent_workers=bool(feed.num_workers and loader.persistent_workers),
        misses_epochs=misses_epochs(loader),
        pin_memory=bool(getattr(loader, "pin_memory", False)) if feed.kind == "DataLoader" else False,
        batch_size=samples_in(batch, feed.batch_size) or (loader.batch_size if feed.kind == "DataLoader" else None),
        batch_bytes=bytes_of(batch),
        epoch=feed.epoch,
        alone=plain.wall,
    )
    if is_stream(loader):
        loading = dataclasses.replace(loading, stream=stream_in_workers(loader))
        notes += [_STREAM_NOTES[loading.stream]] if loading.stream in _STREAM_NOTES else []
    if feed.kind == "DataLoader":
        return _probed(loader, feed, loading, budget_s * (1 - 1 / looks), notes), notes
    if plain.worker_cpu is None:
        loading = dataclasses.replace(loading, cpu=plain.cpu, blocked=plain.blocked)
    else:
        loading = dataclasses.replace(loading, worker_cpu=plain.worker_cpu, handover=plain.cpu)
    return dataclasses.replace(loading, start_up=start_up(feed, plain.wall)), notes


def stream_in_workers(loader: "DataLoader[Any]") -> str:
    """What two workers do with a stream: "split" it, give it "repeated", or "unknown".

    Their first batches are compared. Where those differ, the stream may be shuffled by each worker in its own way: it counts as split only
    if its code says so.
    """
    first: list[tuple[str, bool]] = []
    with contextlib.suppress(Exception), without_known_warnings():  # that no worker can start is said by the probe of one
        batches = iter(with_knobs(loader, num_workers=2, prefetch_factor=2, persistent_workers=False, timeout=WORKER_TIMEOUT))
        try:
            first = [digest(batch) for batch in itertools.islice(batches, 2)]
        finally:
            shut_down(batches)
    if len(first) == 2 and first[0][0] and first[0] == first[1] and first[0][1]:
        return "repeated"
    return "split" if may_split(loader) else "unknown"


_STREAM_NOTES = {
    "repeated": "each worker of this loader gives its whole stream (an IterableDataset that does not call get_worker_info), so several "
    f"workers give each sample several times, and no number of workers is recommended. Split it by worker, {SPLIT_BY_WORKER}",
    "unknown": "the loader's stream (an IterableDataset) does not call get_worker_info: each worker seems to give all of it, so no "
    f"number of workers is recommended. Split it by worker, {SPLIT_BY_WORKER}",
}


def _probed(loader: "DataLoader[Any]", feed: Feed, loading: Loading, budget: float, notes: list[str]) -> Loading:
    """The costs of batches made here and in a worker, interleaved, so that a machine that gets slower does so for both."""
    here, there = None if feed.num_workers else _LocalProbe(loader), None
    try:
        there = _WorkerProbe(loader)
        began = time.perf_counter()
        for turn in range(TURNS):
            if turn and time.perf_counter() - began - there.start > OVERDUE * budget:  # batches that take so long are known by a few
                break
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
        loading = dataclasses.replace(
            loading,
            worker_cpu=statistics.median(there.worker_cpu),
            handover=statistics.median(there.handover),
            files=_mean(there.made, lambda m: m.files),
            start_up=max(0.0, there.start - _mean(there.made, lambda m: m.wall)),
        )
    made = here.made if here and here.made else there.made if there else []
    if made:
        loading = dataclasses.replace(
            loading,
            cpu=_mean(made, lambda m: m.cpu) if here else _cpu_here(made),
            blocked=_mean(made, lambda m: m.blocked),
            fetch_cpu=_mean(made, lambda m: m.fetch_cpu),
            fetch_blocked=_mean(made, lambda m: m.fetch_blocked),
            collate=_mean(made, lambda m: m.cpu - m.fetch_cpu),
            slow_share=slow_share(
                [sample for turn in made for m in turn for sample in m.samples], sum(m.wall for turn in made for m in turn)
            ),
            read_bytes=_mean(made, lambda m: m.read_bytes),
            tensors=type(loader.dataset) is TensorDataset  # a subclass may compute, and so may a function of the user's
            and loader.batch_sampler is not None
            and loader.collate_fn is default_collate,
            slow_lines=made[-1][-1].lines,
            random_lines=random_lines(loader.dataset, made[-1][-1].lines),
        )
    elif not notes:
        notes.append("the loader gives too few batches to see what one takes")
    if feed.num_workers:
        loading = dataclasses.replace(loading, start_up=start_up(feed, _mean(made, lambda m: m.wall) if made else loading.alone))
    return loading


def random_lines(dataset: Any, lines: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Those of some lines ("file.py:12 function" and a share) that draw random numbers, or call a transform of the dataset that does."""
    files = {Path(file).name: file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    files |= {Path(file).name: file for file in [getattr(sys.modules.get(type(dataset).__module__), "__file__", None)] if file}

    def draws(label: str) -> bool:
        name, _, number = label.partition(" ")[0].rpartition(":")
        text = linecache.getline(files.get(name, ""), int(number)) if number.isdecimal() else ""
        called = [value for what, value in getattr(dataset, "__dict__", {}).items() if f".{what}(" in text]
        return any(DRAWS.search(each) for each in (text, *(repr(value)[:LONGEST_REPR] for value in called)))

    return tuple((label, share) for label, share in lines if draws(label))


def start_up(feed: Feed, making: float) -> float | None:
    """Seconds that a pass costs beyond its batches: to start the workers, to make the first batch where that is slower, and to end.

    Args:
        feed: the feed whose passes over the loader were counted.
        making: seconds to make one batch, which the first one takes in any case.
    """
    starts = feed.start_ups[1:] or feed.start_ups  # the very first imports, and fills caches
    if not starts:
        return None
    return max(0.0, statistics.median(starts) - making) + (statistics.median(feed.ends) if feed.ends else 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LoaderCost:
    """Batches taken from a feed, nothing else running. Seconds per batch."""

    last: Any
    wall: float
    cpu: float
    blocked: float
    worker_cpu: float | None


def _as_it_is(feed: Feed, budget: float) -> _LoaderCost:
    """Take batches: first those that lay ready, then those that are counted."""
    deadline = time.perf_counter() + budget
    last = feed.batch()
    if feed.kind == "once":
        return _taken(feed, last, ITERATOR_BATCHES, deadline)
    for _ in range(feed.queue + feed.num_workers):  # what was made before anybody measured
        last = feed.batch()
        if time.perf_counter() > deadline:
            break
    return _taken(feed, last, MAX_BATCHES, deadline)


def _taken(feed: Feed, last: Any, most: int, deadline: float) -> _LoaderCost:
    count, pids, passes, paid = 0, feed.worker_pids, feed.passes, sum(feed.start_ups) + sum(feed.ends)
    steady = Steady(STEADY_BATCHES)
    start, before = clocks(), [cpu_of_process(pid) for pid in pids]
    now = start.wall
    late = 2 * deadline - start.wall
    while (
        count < most
        and (now < deadline or count < (MIN_BATCHES if now < late else 1))
        and not (now - start.wall >= STEADY_SECONDS and steady)
    ):
        try:
            last = feed.batch()
        except Exhausted:
            break
        count, begun, now = count + 1, now, time.perf_counter()
        steady.add(now - begun)
    end, after = clocks(), [cpu_of_process(pid) for pid in pids]
    wall = end.wall - start.wall
    if (new := feed.passes - passes) and count > new:  # short passes: their first batches come with the start-up, which is apart
        wall = (wall - (sum(feed.start_ups) + sum(feed.ends) - paid)) * count / (count - new)
    own = end.process - start.process
    blocked = max(0.0, end.wall - start.wall - own - (end.delay - start.delay))
    known = bool(pids) and pids == feed.worker_pids and all(after)
    workers = sum(after) - sum(before) if known else None
    each = 1 / max(1, count)
    return _LoaderCost(
        last=last, wall=wall * each, cpu=own * each, blocked=blocked * each, worker_cpu=None if workers is None else workers * each
    )


class _LocalProbe:
    """Makes batches in this process, as a loader without workers does."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.made: list[list[BatchCost]] = []
        """In turns."""
        self._source: Iterator[Any] | None = iter(with_knobs(loader, num_workers=0))
        self._fetcher = getattr(self._source, "_dataset_fetcher", None)  # None: torch's names have changed
        self._sampler = StackSampler(fine=True)  # else it mostly gets to look where C code lets it, such as a line after a long call
        if self._fetcher is not None:
            FetchMeter(self._fetcher, self._sampler, alone=True)

    def turn(self, seconds: float) -> None:
        """Make some batches."""
        if self._fetcher is None or self._source is None:
            return
        end = time.perf_counter() + seconds
        with self._sampler:
            got = [cost for _, cost in itertools.islice(_until(self._source, end), MAX_BATCHES)]
        if got:
            self.made.append(got if self.made or len(got) == 1 else got[1:])  # the first of all opens files, and fills caches

    def close(self) -> None:
        """Drop the fetcher."""
        self._source = None


class _WorkerProbe:
    """Has batches made by one worker that measures itself. The pass is its own: it shares no iterator with the loader."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.made: list[list[BatchCost]] = []
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
            timeout=WORKER_TIMEOUT,  # a worker that was forked while another thread held a lock never answers
            worker_init_fn=WorkerMeter(loader.worker_init_fn),
        )
        self._source: Any = None
        self._clock: float | None = None

    def turn(self, seconds: float) -> None:
        """Take some batches.

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
        for batch, cost in _until(self._source, time.perf_counter() + seconds):
            touch(batch)
            got.append(cost)
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


class Steady:
    """Is a mean known so well that more values would not change it? False at first."""

    def __init__(self, count: int, error: float = STEADY_ERROR) -> None:
        """No value yet.

        Args:
            count: how many there have to be.
            error: largest standard error, as a fraction of the mean.
        """
        self._least, self._error = count, error
        self._count, self._sum, self._squares = 0, 0.0, 0.0  # sums only: this goes on between batches that are timed

    def add(self, value: float) -> None:
        self._count, self._sum, self._squares = self._count + 1, self._sum + value, self._squares + value * value

    def __bool__(self) -> bool:
        if (count := self._count) < max(2, self._least):
            return False
        variance = max(0.0, self._squares - self._sum**2 / count) / (count - 1)
        return math.sqrt(count * variance) <= self._error * self._sum


def _until(source: Iterator[tuple[Any, BatchCost]], deadline: float) -> Iterator[tuple[Any, BatchCost]]:
    """Batches until the time is up, or it is known what they take: at least two, and not endlessly."""
    steady, samples = Steady(STEADY_BATCHES // TURNS, math.sqrt(TURNS) * STEADY_ERROR), 0
    enough = time.perf_counter() + STEADY_SECONDS / TURNS
    for count, (batch, cost) in enumerate(source, 1):
        yield batch, cost
        steady.add(cost.wall)
        samples += len(cost.samples)
        now = time.perf_counter()
        known = now > enough and steady and not 0 < samples < STEADY_SAMPLES / TURNS
        if count >= MAX_BATCHES or (count > 1 and (known or now > deadline)):
            return


def _mean(turns: list[list[BatchCost]], value: Callable[[BatchCost], float]) -> float:
    """Median of the turns' means: slow samples count in full, a disturbed turn does not."""
    return statistics.median(statistics.fmean(map(value, turn)) for turn in turns)


def _cpu_here(turns: list[list[BatchCost]]) -> float:
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


def slow_share(samples: Sequence[float], seconds: float = 0.0) -> float | None:
    """Share of the time of making batches that the slowest twentieth of the samples takes beyond the median; None of too few."""
    if len(samples) < MIN_SAMPLES or not (total := max(seconds, sum(samples))):
        return None
    ordered, median = sorted(samples), statistics.median(samples)
    return sum(value - median for value in ordered[-max(1, len(ordered) // 20) :]) / total
