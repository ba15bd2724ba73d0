"""The loader's probes: what is found where it was planted, whatever kind of loader it is; and loaders with other knobs."""

import collections
import dataclasses
import functools
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.made import World
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.evidence import Loading
from workbench.diagnosis.measure import fetch_meter
from workbench.diagnosis.measure.fetch_meter import BatchCost, FetchMeter, WorkerMeter, without_delay
from workbench.diagnosis.measure.loading import Steady, _cpu_here, probe, random_lines, slow_share
from workbench.harness.feed import Feed
from workbench.harness.loaders import with_knobs
from workbench.harness.stack_sampler import StackSampler

BATCH = 4


def spin(seconds: float) -> None:
    """Compute for so many seconds of CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Work(Dataset[torch.Tensor]):
    """Samples that take some sleep and some CPU, files that are opened, slow ones now and then."""

    def __init__(self, *, sleep: float = 0.0, cpu: float = 0.0, file: Path | None = None, slow: float = 0.0, size: int = 8) -> None:
        self.sleep, self.cpu, self.file, self.slow, self.size = sleep, cpu, file, slow, size

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sleep or (self.slow and index % 20 == 7):
            time.sleep(self.sleep + (self.slow if index % 20 == 7 else 0.0))
        spin(self.cpu)
        if self.file:
            (self.file / str(index % 64) if self.file.is_dir() else self.file).read_bytes()
        return torch.zeros(self.size)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, sleep: float) -> None:
        self.sleep = sleep

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for i in range(info.id if info else 0, 2000, info.num_workers if info else 1):
            time.sleep(self.sleep)
            yield torch.full((8,), float(i))


class Repeated(Stream):
    """Each worker gives all of it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(2000):
            time.sleep(self.sleep)
            yield torch.full((8,), float(i))


class Shuffled(Stream):
    """Each worker gives all of it, in an order of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in torch.randperm(2000).tolist():
            yield torch.full((8,), float(i))


class AtOnce(Work):
    """All samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.008)
        return [torch.zeros(8) for _ in indices]


def slow_collate(samples: Any) -> Any:
    spin(0.01)
    return default_collate(samples)


def loader_of(dataset: Any, **knobs: Any) -> "DataLoader[Any]":
    if knobs.get("num_workers"):
        knobs["multiprocessing_context"] = "fork"
    return DataLoader(dataset, **{"batch_size": BATCH, **knobs})


def probed(loader: Any, budget: float = 0.6) -> Loading:
    with Feed(loader) as feed:
        found, notes = probe(loader, feed, budget)
    assert not notes
    return found


@pytest.mark.parametrize(
    ("values", "steady"),
    [([0.02] * 5, False), ([0.02] * 16, True), ([0.02, 0.021] * 8, True), ([0.02, 0.04] * 8, False)],
)
def test_a_mean_is_known_when_enough_values_agree(values: list[float], steady: bool) -> None:
    known = Steady(16)
    for value in values:
        assert not known or steady
        known.add(value)
    assert bool(known) == steady


@pytest.mark.parametrize("workers", [0, 1])
def test_storage_is_blocked_not_computed(workers: int) -> None:
    found = probed(loader_of(Work(sleep=0.004), num_workers=workers))
    assert found.blocked is not None
    assert found.fetch_blocked is not None
    assert found.cpu is not None
    assert 0.9 * 0.016 < found.fetch_blocked <= found.blocked < 1.6 * 0.016
    assert found.cpu < 0.25 * found.blocked
    assert (found.num_workers, found.prefetch_factor) == ((1, 2) if workers else (0, None))
    assert (found.batch_size, found.batch_bytes, found.epoch, found.kind) == (BATCH, BATCH * 8 * 4, 1000, "DataLoader")


@pytest.mark.parametrize("workers", [0, 1])
def test_decoding_is_computed_not_blocked(workers: int) -> None:
    found = probed(loader_of(Work(cpu=0.003), num_workers=workers))
    assert found.cpu is not None
    assert found.fetch_cpu is not None
    assert found.worker_cpu is not None
    assert found.collate is not None
    assert 0.9 * 0.012 < found.fetch_cpu < 1.5 * 0.012
    assert found.collate < 0.2 * found.fetch_cpu
    assert (found.blocked or 0.0) < 0.5 * found.fetch_cpu
    assert found.worker_cpu > 0.9 * 0.012


@pytest.mark.parametrize("workers", [0, 1])
def test_the_line_that_takes_the_time_is_named(workers: int) -> None:
    found = probed(loader_of(Work(cpu=0.004), num_workers=workers))
    line, share = found.slow_lines[0]
    assert line.startswith("test_loading.py:")
    assert line.split()[-1] in ("spin", "__getitem__")  # which calls it
    assert share > 0.3


def test_the_meters_own_clocks_are_none_of_a_batchs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read files, at which the sampler gets to look: it took them for all that had passed since its last look."""
    sampler, read, called = StackSampler(), list[int | None](), list[int | None]()

    def noted(clock: Callable[[], Any]) -> Any:
        read.append(sampler.call)
        return clock()

    for name in ("clocks", "bytes_read"):
        monkeypatch.setattr(fetch_meter, name, functools.partial(noted, getattr(fetch_meter, name)))

    def collate(samples: list[Any]) -> list[Any]:
        called.append(sampler.call)
        return samples

    fetcher = iter(DataLoader([1, 2, 3], batch_size=3, collate_fn=collate))._dataset_fetcher  # type: ignore[attr-defined, arg-type]
    meter = FetchMeter(fetcher, sampler, alone=True)
    assert meter.fetch([0, 1, 2])[0] == [1, 2, 3]
    assert len(read) >= 6
    assert set(read) == {None}
    assert called == [0]


def test_the_meter_travels_to_spawned_workers() -> None:
    assert pickle.loads(pickle.dumps(WorkerMeter(slow_collate))).init is slow_collate


def test_collate_is_told_apart() -> None:
    found = probed(loader_of(Work(cpu=0.0005), collate_fn=slow_collate))
    assert found.collate is not None
    assert found.fetch_cpu is not None
    assert 0.009 < found.collate < 0.02
    assert found.fetch_cpu < 0.6 * found.collate


def test_transport_is_what_a_worker_computes_beyond_the_batch() -> None:
    # a list of samples is copied into shared memory when it is sent; torch's own collate functions write into it from the start
    found = [probed(loader_of(Work(size=size), num_workers=1, collate_fn=list)) for size in (8, 1_000_000)]
    transport = [(one.worker_cpu or 0.0) - (one.cpu or 0.0) for one in found]
    assert transport[1] > 2 * max(0.0, transport[0])  # 16 MB
    assert (found[1].handover or 0.0) > 2 * (found[0].handover or 0.0)


class Sample:
    """What torch's own collate function makes a batch of in 10 ms in a worker, and at once where the training runs."""


def collated(batch: list[Sample], **_: Any) -> torch.Tensor:
    if get_worker_info() is not None:
        spin(0.01)
    return torch.zeros(len(batch))


class Samples(Work):
    def __getitem__(self, index: int) -> Any:
        return Sample()


def test_what_a_batch_would_take_here_is_known_from_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker collates into new shared memory, page by page, which takes longer on many machines."""
    monkeypatch.setitem(default_collate_fn_map, Sample, collated)
    there = probed(loader_of(Samples(), num_workers=1))
    assert there.cpu is not None
    assert there.collate is not None
    assert there.collate >= 0.01
    assert there.cpu < 0.5 * there.collate  # that of the worker


@given(samples=st.lists(st.floats(0, 1), max_size=20), delay=st.floats(-0.1, 5))
def test_waiting_for_a_core_is_taken_from_the_longest_samples(samples: list[float], delay: float) -> None:
    less = without_delay(samples, delay)
    assert sum(less) >= sum(samples) - max(0.0, delay) - 1e-9
    assert all(after <= before for after, before in zip(less, samples, strict=True))
    assert all(after == before for after, before in zip(less, samples, strict=True) if before <= statistics.median(samples))


def test_samples_in_which_a_thread_was_interrupted_are_not_slow() -> None:
    batches = [[0.01] * 15 + [0.21]] * 20
    assert (slow_share([sample for batch in batches for sample in batch]) or 0.0) > 0.4
    assert slow_share([sample for batch in batches for sample in without_delay(batch, 0.2)]) == pytest.approx(0.0)


def test_collating_is_told_by_the_sample_whatever_size_batches_have() -> None:
    def made(size: int, collate: float) -> BatchCost:
        return BatchCost(
            wall=0.01, cpu=0.01, fetch_cpu=0.0, fetch_blocked=0.0, blocked=0.0, collate_here=collate, size=size, read_bytes=0, files=0,
            clock=0.0, samples=(), lines=(),
        )  # fmt: skip

    turn = [made(16, 0.009), made(16, 0.008), made(1, 0.002)]
    assert _cpu_here([turn, turn]) == pytest.approx(0.008 / 16 * 11)
    uneven = [made(8, 0.001), made(8, 0.0011), made(64, 0.009)]
    assert _cpu_here([uneven]) == pytest.approx(0.001 / 8 * 80 / 3)


def test_small_files_are_counted(tmp_path: Path) -> None:
    for index in range(64):
        (tmp_path / str(index)).write_bytes(b"x" * 1000)
    found = probed(loader_of(Work(file=tmp_path)))
    assert found.files == BATCH
    assert probed(loader_of(Work(file=tmp_path / "0"))).files == 1  # opened for each sample, but one file: a shard
    assert found.read_bytes is not None
    assert 1000 * BATCH <= found.read_bytes < 2000 * BATCH
    assert probed(loader_of(Work(cpu=0.001))).files == 0


def test_one_slow_sample_in_twenty() -> None:
    uneven = probed(loader_of(Work(cpu=0.0002, slow=0.02)), budget=2.0)
    assert uneven.slow_share is not None
    assert 0.5 < uneven.slow_share < 0.95


def test_the_share_of_slow_samples() -> None:
    assert slow_share([1.0] * 100) == 0.0
    assert slow_share([1.0] * 95 + [20.0] * 5) == pytest.approx(95 / 195)
    assert slow_share([1.0] * 10) is None
    assert slow_share([1.0] * 95 + [20.0] * 5, 1950.0) == pytest.approx(95 / 1950)  # where collating takes the time


@pytest.mark.parametrize(
    ("stream", "knobs", "said"),
    [
        (Repeated, {}, "each worker of this loader gives its whole stream"),
        (Shuffled, {}, "does not call get_worker_info: each worker seems to give all of it"),
        (Shuffled, {"worker_init_fn": print}, ""),  # which may split it
        (Stream, {}, ""),
    ],
)
def test_workers_that_would_repeat_a_stream_are_not_recommended(stream: Any, knobs: dict[str, Any], said: str) -> None:
    with Feed(loader := loader_of(stream(0.001), **knobs)) as feed:
        found, notes = probe(loader, feed, 0.3)
    assert [said in note for note in notes] == [True] * bool(said)
    slow = World(work=0.002, cpu=0.02).evidence()
    assert slow.loading
    slow = dataclasses.replace(slow, loading=dataclasses.replace(slow.loading, stream=found.stream))
    recommended = [remedy.name for remedy in Diagnosis.of(slow).remedies if "workers" in remedy.name]
    assert bool(recommended) == (not said)


def test_a_stream() -> None:
    found = probed(loader_of(Stream(0.004)))
    assert found.fetch_blocked is not None
    assert 0.9 * 0.016 < found.fetch_blocked < 1.6 * 0.016
    assert found.epoch is None
    assert found.worker_cpu is not None


def test_samples_fetched_all_at_once() -> None:
    found = probed(loader_of(AtOnce()))
    assert found.fetch_blocked is not None
    assert 0.9 * 0.008 < found.fetch_blocked < 1.6 * 0.008
    assert found.slow_share is None


def test_a_dataset_that_makes_its_own_batches() -> None:
    found = probed(loader_of(Work(sleep=0.005), batch_size=None))
    assert found.fetch_blocked is not None
    assert 0.9 * 0.005 < found.fetch_blocked < 1.8 * 0.005
    sampler = BatchSampler(SequentialSampler(range(4000)), 2, False)
    found = probed(DataLoader(Work(sleep=0.005), batch_sampler=sampler))
    assert found.fetch_blocked is not None
    assert 0.9 * 0.010 < found.fetch_blocked < 1.6 * 0.010


def test_a_loader_that_is_none_of_torchs() -> None:
    class Mine:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(500):
                time.sleep(0.004)
                yield torch.zeros(BATCH, 3)

    found = probed(Mine(), budget=0.4)
    assert found.kind == "iterable"
    assert 0.9 * 0.004 < found.alone < 3 * 0.004
    assert found.blocked is not None
    assert found.blocked > 0.9 * 0.004
    assert found.batch_size == BATCH
    assert (found.worker_cpu, found.fetch_cpu) == (None, None)


def test_of_an_iterator_only_a_few_batches_are_used_up() -> None:
    taken: collections.Counter[str] = collections.Counter()

    def generator() -> Iterator[torch.Tensor]:
        for _ in range(1000):
            taken["batches"] += 1
            yield torch.zeros(2, 2)

    found = probed(generator())
    assert found.kind == "once"
    assert 2 < taken["batches"] < 12


def test_an_iterator_shorter_than_the_probe() -> None:
    assert probed(iter([torch.zeros(2, 2)] * 2)).batch_size == 2


def test_the_loader_alone_is_faster_with_workers_that_wait() -> None:
    one, two = (probed(loader_of(Work(sleep=0.01), num_workers=n), budget=1.5) for n in (1, 2))
    assert two.alone < 0.75 * one.alone
    assert one.blocked == pytest.approx(two.blocked, rel=0.4)


def test_worker_start_up_is_not_in_the_time_per_batch() -> None:
    found = probed(loader_of(torch.utils.data.Subset(Work(sleep=0.002), range(6 * BATCH)), num_workers=1), budget=2.0)
    assert found.start_up is not None
    assert found.start_up > 0.005
    assert found.epoch == 6
    assert found.alone < 3 * 4 * 0.002


def test_what_cannot_be_had_from_workers_is_said() -> None:
    class Refuses(Work):
        def __getitem__(self, index: int) -> torch.Tensor:
            if torch.utils.data.get_worker_info():
                raise RuntimeError("no database in a worker")
            return torch.zeros(2)

    loader = loader_of(Refuses())
    with Feed(loader) as feed:
        found, notes = probe(loader, feed, 0.3)
    assert found.worker_cpu is None
    assert found.cpu is not None
    assert "no database in a worker" in notes[0]


def test_a_dataset_with_workers_is_not_used_here() -> None:
    dataset = Work()
    used: list[int] = []
    dataset.__dict__["used"] = used

    class Traced(Work):
        def __getitem__(self, index: int) -> torch.Tensor:
            used.append(index)
            return torch.zeros(2)

    probed(loader_of(Traced(), num_workers=1))
    assert not used


def test_the_users_worker_init_still_runs() -> None:
    class Needs(Work):
        def __getitem__(self, index: int) -> torch.Tensor:
            info = torch.utils.data.get_worker_info()
            assert info is None or info.dataset.ready  # type: ignore[attr-defined]
            return torch.zeros(2)

    def get_ready(_: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.ready = True  # type: ignore[attr-defined]

    assert probed(loader_of(Needs(), worker_init_fn=get_ready)).worker_cpu is not None


class Special(DataLoader[Any]):
    """A DataLoader with a constructor of its own."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2)
        self.mark = "mine"


class ByEpoch(Work):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("dataset", [Work, ByEpoch])
def test_the_probe_says_if_workers_that_stay_would_miss_the_epoch(dataset: type[Work]) -> None:
    loader = loader_of(dataset())
    with Feed(loader) as feed:
        assert probe(loader, feed, 0.1)[0].misses_epochs == (dataset is ByEpoch)


def test_rebuilt_changes_what_it_is_told_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = loader_of(Work(), num_workers=2, shuffle=True, generator=generator, persistent_workers=True, timeout=5.0)
    twin = with_knobs(loader, num_workers=1, prefetch_factor=3)
    assert (twin.num_workers, twin.prefetch_factor, twin.persistent_workers, twin.timeout) == (1, 3, True, 5.0)
    assert (twin.dataset, twin.sampler, twin.generator, twin.collate_fn) == (
        loader.dataset,
        loader.sampler,
        loader.generator,
        loader.collate_fn,
    )
    assert (loader.num_workers, loader.prefetch_factor) == (2, 2)
    plain = with_knobs(loader, num_workers=0)
    assert (plain.num_workers, plain.prefetch_factor, plain.persistent_workers, plain.multiprocessing_context) == (0, None, False, None)
    assert next(iter(plain)).shape == (BATCH, 8)
    again = with_knobs(plain, num_workers=1)
    assert again.prefetch_factor == 2


def test_rebuilt_keeps_the_kind_and_can_change_the_batch() -> None:
    loader = Special(Work())
    twin = with_knobs(loader, batch_size=6)
    assert isinstance(twin, Special)
    assert twin.mark == "mine"
    assert next(iter(twin)).shape == (6, 8)
    assert next(iter(loader)).shape == (2, 8)
    assert len(twin) == 667


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"num_workers": -1}, "num_workers=-1: it has to be 0 or more"),
        ({"prefetch_factor": 2}, "need workers: try num_workers=1"),
        ({"worker": 2}, "worker is not a knob of a loader: it has batch_size"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_knobs_that_cannot_be_turned(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        with_knobs(loader_of(Work()), **knobs)


def test_only_a_data_loader_can_be_rebuilt() -> None:
    with pytest.raises(ValueError, match=r"the loader is a list: only the knobs of a torch\.utils\.data\.DataLoader can be turned, here"):
        with_knobs([1, 2], num_workers=2)
    own_batches = DataLoader(Work(), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, False))
    assert next(iter(with_knobs(own_batches, batch_size=3))).shape == (3, 8)
    with pytest.raises(ValueError, match="this one has no batches: batch_size=None"):
        with_knobs(DataLoader(Work(), batch_size=None), batch_size=3)


class Origin(Dataset[torch.Tensor]):
    """Samples that name the process that made them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


def accelerates(loader: "DataLoader[Any]") -> Any:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate (pip install accelerate)")
    return accelerate.Accelerator(cpu=True).prepare_data_loader(loader)


def fabrics(loader: "DataLoader[Any]") -> Any:
    lightning = pytest.importorskip("lightning", reason="needs lightning (pip install lightning)")
    return lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [accelerates, fabrics])
def test_the_loaders_of_frameworks_are_those_of_torch(wrap: Any) -> None:
    wrapped = wrap(loader_of(Origin()))
    with Feed(wrapped) as feed:
        loading, notes = probe(wrapped, feed, 0.1)
    assert loading.kind == "DataLoader"
    assert loading.worker_cpu is not None, notes
    twin = with_knobs(wrapped, num_workers=1)
    assert type(twin) is type(wrapped)
    assert len(twin) == len(wrapped) == 16
    with Feed(twin) as feed:
        assert feed.num_workers == 1
        assert int(feed.next()[0]) not in (0, os.getpid())
    assert wrapped.num_workers == 0
    assert all(int(batch[0]) == os.getpid() for batch in wrapped)


class Augmented:
    def __init__(self, transform: object) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> float:
        value = random.uniform(-15, 15) + index
        value = sum(range(index))
        return self.transform(value)  # type: ignore[operator,no-any-return]


class RandomCrop:
    def __repr__(self) -> str:
        return "RandomCrop(size=8)"


def test_lines_that_draw_random_numbers_are_known() -> None:
    first = Augmented.__getitem__.__code__.co_firstlineno
    lines = [(f"test_loading.py:{first + i} __getitem__", 0.1 * i) for i in (1, 2, 3)]
    assert random_lines(Augmented(RandomCrop()), lines) == (lines[0], lines[2])
    assert random_lines(Augmented(abs), [*lines, ("cell:3 f", 0.1), ("odd", 0.1)]) == (lines[0],)


def test_a_loader_that_indexes_tensors_sample_by_sample_is_known() -> None:
    plain = TensorDataset(torch.zeros(64, 2))

    class Own(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)

    whole = DataLoader(plain, batch_size=None, sampler=BatchSampler(SequentialSampler(plain), 8, drop_last=True))
    single, own = DataLoader(plain, batch_size=8), DataLoader(Own(torch.zeros(64, 2)), batch_size=8)
    for loader, known in ((single, True), (own, False), (whole, False)):
        with Feed(loader) as feed:
            loading, _ = probe(loader, feed, 0.2)
        assert loading.tensors is known
