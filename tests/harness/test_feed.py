"""Feed: batches without end, passes and their start-up counted; afterwards the loader, its workers and its order are as they were."""

import copy
import itertools
import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

from workbench.harness.feed import Exhausted, Feed
from workbench.harness.loaders import shut_down, unpicklable_attribute
from workbench.harness.observe import samples_of


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i."""

    def __init__(self, count: int = 20) -> None:
        self.count = count
        self.opened: int | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.opened = index
        return torch.tensor(index)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(torch.tensor, range(10))


class Once:
    """A loader that gives its batches only to the first who asks."""

    def __init__(self, count: int) -> None:
        self._batches = iter([torch.ones(2)] * count)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._batches


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def test_batches_go_on_at_the_end_of_a_pass() -> None:
    with Feed(DataLoader(Numbers(6), batch_size=2)) as feed:
        got = [feed.next().tolist() for _ in range(7)]
        assert got == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5], [0, 1]]
        assert (feed.passes, len(feed.start_ups), len(feed.ends), feed.epoch, feed.batches) == (3, 3, 2, 3, 7)
        assert (feed.kind, feed.queue, feed.num_workers, feed.worker_pids, feed.depth()) == ("DataLoader", 0, 0, (), None)


def test_a_step_of_several_batches_leaves_out_the_rest_of_a_pass() -> None:
    feed = Feed(DataLoader(Numbers(10), batch_size=2), accumulation=2)
    got = [[batch.tolist() for batch in feed.next()] for _ in range(3)]
    assert got == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]]]
    feed = Feed(DataLoader(Numbers(2), batch_size=2), accumulation=3)  # fewer batches than a step takes: then it takes several passes
    assert [batch.tolist() for batch in feed.next()] == [[0, 1]] * 3


def test_start_up_and_end_of_a_pass_are_timed() -> None:
    clock = itertools.count()
    feed = Feed([torch.ones(1)] * 2, clock=lambda: float(next(clock)))
    for _ in range(5):
        feed.next()
    assert feed.start_ups == [1.0] * 3
    assert feed.ends == [1.0] * 2


def test_a_loop_over_a_feed() -> None:
    assert [int(batch) for batch in itertools.islice(Feed([torch.tensor(1), torch.tensor(2)]), 5)] == [1, 2, 1, 2, 1]
    assert len(list(Feed(iter([torch.ones(1)] * 3)))) == 3


@pytest.mark.parametrize("loader", [iter([torch.ones(2)] * 3), (torch.ones(2) for _ in range(3)), Once(3)])
def test_what_can_be_read_only_once(loader: Any) -> None:
    feed = Feed(loader)
    for _ in range(3):
        feed.next()
    assert not feed.exhausted
    for _ in range(2):
        with pytest.raises(Exhausted, match="only once"):
            feed.next()
    assert (feed.kind, feed.exhausted, feed.epoch) == ("once", True, 3)


def test_an_iterator_that_starts_again_is_no_once() -> None:
    class Again:
        def __init__(self) -> None:
            self.left = 0

        def __iter__(self) -> "Again":
            self.left = 2
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    feed = Feed(Again())
    assert feed.kind == "once"
    assert [feed.next() for _ in range(5)] == [1, 0, 1, 0, 1]
    assert feed.kind == "iterable"


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(Numbers(0), batch_size=2), "over 0 samples with batch_size=2, drop_last=False gave no batch"),
        (DataLoader(Numbers(3), batch_size=4, drop_last=True), "over 3 samples with batch_size=4, drop_last=True gave no batch"),
        ([], "a list gave no batch"),
        (iter(()), "gave no batch"),
    ],
)
def test_an_empty_loader(loader: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Feed(loader).next()


@pytest.mark.parametrize("loader", [3, None, "batches"])
def test_no_loader(loader: Any) -> None:
    with pytest.raises(ValueError, match="gives no batches: it has to be a DataLoader or any other iterable"):
        Feed(loader)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_are_known_and_gone_after_close(persistent: bool) -> None:
    feed = Feed(DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"))
    first = feed.next()
    pids = feed.worker_pids
    assert first.tolist() == [0, 1]
    assert len(pids) == 2
    assert set(pids) <= children()
    assert feed.queue == 4
    limit = time.monotonic() + 20
    while feed.depth() != 4 and time.monotonic() < limit:
        time.sleep(0.01)
    assert feed.depth() == 4
    for _ in range(10):
        feed.next()
    assert (set(feed.worker_pids) == set(pids)) is persistent
    feed.close()
    feed.close()


def test_a_restart_begins_a_new_pass() -> None:
    with Feed(DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")) as feed:
        feed.next()
        feed.next()
        feed.restart()
        assert feed.next().tolist() == [0, 1]
        assert feed.passes == 2


def test_running_persistent_workers_of_the_user_go_on() -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    mine = iter(loader)
    assert next(mine).tolist() == [0, 1]
    with Feed(loader) as feed:
        for _ in range(15):
            feed.next()
        assert next(mine).tolist() == [2, 3]
    assert loader._iterator is mine
    assert [batch.tolist() for batch in mine] == [[i, i + 1] for i in range(4, 20, 2)]
    shut_down(mine)


class Positioned(Sampler[int]):
    """A sampler that knows where it is, as those of resumable loaders do."""

    def __init__(self, count: int) -> None:
        self.count, self.consumed, self.random = count, 0, random.Random(1)
        self.numpy = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            self.consumed += 1
            yield self.random.randrange(self.count) if self.numpy.random() < 0.5 else 0

    def __len__(self) -> int:
        return self.count


def orders(loader: "DataLoader[Any]") -> list[list[Any]]:
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda data, **more: DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3), **more),
        lambda data, **more: DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(4)), 4, False), **more
        ),
        lambda data, **more: DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 1, seed=5), **more),
        lambda data, **more: DataLoader(data, batch_size=4, sampler=Positioned(20), **more),
        lambda data, **more: DataLoader(Subset(data, [5, 3, 1]), batch_size=None, **more),
        lambda data, **more: DataLoader(Stream(), batch_size=4, **more),
    ],
)
def test_order_and_datasets_are_as_they_were(make: Any, workers: int) -> None:
    more = {"multiprocessing_context": "fork"} if workers else {}
    data = Numbers()
    loader, twin = (make(data, num_workers=workers, **more) for _ in range(2))
    before = copy.copy(vars(loader.sampler))
    feed = Feed(loader)
    for _ in range(7):
        feed.next()
    feed.close()
    assert vars(loader.sampler) == before
    assert data.opened is None  # as if it had never been used in this process
    torch.manual_seed(0)
    got = orders(loader)
    torch.manual_seed(0)
    assert got == orders(twin)


def test_a_loader_around_a_loader() -> None:
    class ToDevice:
        def __init__(self) -> None:
            self.loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")

        def __iter__(self) -> Iterator[torch.Tensor]:
            for batch in self.loader:
                yield batch + 1

    loader = ToDevice()
    feed = Feed(loader)
    assert [feed.next().tolist() for _ in range(2)] == [[1, 2], [3, 4]]
    assert feed.kind == "iterable"
    assert len(feed.worker_pids) == 1
    feed.close()
    assert loader.loader._iterator is None


def test_a_length_is_asked_without_a_trace() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return 3  # wrong: a loader that was asked would warn when it gives more

    loader = DataLoader(Sized(), batch_size=2)
    with Feed(loader) as feed:
        for _ in range(12):
            feed.next()
    assert loader._IterableDataset_len_called is None


class Holds(Numbers):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.inner = {"anything": 1}
        self.transform = what


@pytest.fixture
def spawning() -> Iterator[None]:
    """Spawned processes have a helper that lives as long as this one."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("spawning")
def test_workers_that_cannot_be_started_name_the_attribute() -> None:
    loader = DataLoader(Holds(lambda x: x), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ValueError, match=r"no worker could be started: dataset\.transform \(a function\) cannot be pickled"):
        Feed(loader).next()


def test_the_attribute_that_cannot_be_pickled() -> None:
    assert unpicklable_attribute(Holds(None)) is None
    with open(__file__, "rb") as file:
        assert unpicklable_attribute(Subset(Holds(file), [1])) == ".dataset.transform (a BufferedReader) cannot be pickled"


class Own:
    """A loader that is none of torch's, and knows where it is."""

    def __init__(self) -> None:
        self.epoch, self.order, self.at, self.random = 0, list(range(12)), (0, 0), random.Random(1)
        self.rows, self.sizes, self.cursor = np.arange(12), torch.arange(12), Cursor()

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch += 1
        self.random.shuffle(self.order)
        self.rows[:] = self.rows[::-1].copy()
        self.sizes.copy_(self.sizes.flip(0))
        self.begun = [self.epoch]
        for place, index in enumerate(self.order):
            self.at = (self.epoch, place)
            self.cursor.place += 1
            yield torch.tensor([index, int(self.rows[place]), int(self.sizes[place])])


class Cursor:
    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 0


def test_a_loader_that_is_none_of_torchs_is_as_it_was() -> None:
    loader, twin = Own(), Own()
    with Feed(loader) as feed:
        for _ in range(30):
            feed.next()
        assert (loader.epoch, loader.cursor.place) == (3, 30)
    assert (loader.epoch, loader.at, loader.order, loader.cursor.place, hasattr(loader, "begun")) == (0, (0, 0), list(range(12)), 0, False)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in twin]


def test_what_of_a_loader_cannot_be_put_back_is_named() -> None:
    assert Feed(Once(3)).unread == ["a list_iterator"]
    assert Feed(DataLoader(Numbers(), batch_size=2)).unread == []


def test_a_loader_leaves_alone_who_trains_and_what_is_drawn_elsewhere() -> None:
    class Linked(Own):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 1)

    loader = Linked()
    with Feed(loader) as feed:
        feed.next()
        with torch.no_grad():
            loader.model.weight.fill_(3)
        drawn = torch.rand(1)
    assert bool((loader.model.weight == 3).all())
    assert not torch.equal(torch.rand(1), drawn)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_samples_of_a_step_are_told_by_the_loader_not_by_the_tokens(accumulation: int) -> None:
    collate = lambda samples: (torch.zeros(90), torch.zeros(2, 70), torch.zeros(len(samples)))  # noqa: E731
    with Feed(DataLoader(Numbers(8), batch_size=4, collate_fn=collate), accumulation) as feed:
        assert samples_of(feed.next(), feed) == 4 * accumulation
    with Feed([collate([0] * 4)] * 2) as feed:
        assert (feed.batch_size, samples_of(feed.next(), feed)) == (None, 90)  # nothing tells
