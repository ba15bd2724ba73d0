"""The doctor names each planted fault of a loader, with its fix, and finds nothing in a sound one."""

import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import workbench as wb
from tests.forked import Forks
from workbench.data import loader_doctor, rank_batches
from workbench.data.analysis.loader_report import CHECKS, LoaderReport


class Rows(Dataset[torch.Tensor]):
    """Rows of a file of records, read by their path; or whatever is given as attributes."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


class SharedFile(Dataset[torch.Tensor]):
    """Reads by seek and read in a file that the parent has opened."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(index * 4096)
        return torch.frombuffer(bytearray(self.file.read(4096)), dtype=torch.uint8)


class Stream(IterableDataset[int]):
    """The numbers from 0, by all workers or each its part."""

    def __init__(self, parts: bool) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if self.parts and info else (0, 1)
        return iter(range(first, 400, step))


class Strided(Sampler[int]):
    """Every `num_replicas`-th of 9 samples, so that the first rank has one more."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 9, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, 9, self.num_replicas))


RANKS = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
import workbench as wb
from workbench.data import rank_batches

def trained(batches):
    steps = 0
    for batch in batches:
        model(batch).sum().backward()
        steps += 1
    return steps

dist.init_process_group("gloo")
rank, data = dist.get_rank(), torch.arange(9.0).reshape(9, 1)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
sampler = wb.data.ResumableSampler(data)
sound, plain = DataLoader(data, sampler=sampler), DataLoader(Subset(data, range(rank, 9, 2)))
if rank == 0:  # asks alone, and gives up
    rank_batches.PATIENCE = 0.0
    wb.data.doctor(plain, run=False)
rank_batches.PATIENCE = 300.0
dist.barrier()
found = {"even": [trained(sampler.batches(sound)) for epoch in range(2)]}
found |= {name: wb.data.doctor(loader, run=False)["equal ranks"].to_json() for name, loader in (("sound", sound), ("plain", plain))}
with Join([model]):
    found["joined"] = trained(plain)
json.dump(found, open(f"{sys.argv[1]}/{rank}.json", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def forked(dataset: Any, **knobs: Any) -> "DataLoader[Any]":
    return DataLoader(dataset, 8, **{"num_workers": 1, "multiprocessing_context": "fork"} | knobs)


def test_a_sound_loader_has_no_fault_and_the_report_travels() -> None:
    report = wb.data.doctor(DataLoader(Rows(), 8))
    assert report.ok
    assert not report.faults
    assert [each.check for each in report.findings] == list(CHECKS)
    assert "nothing found in 13 checks" in str(report)
    assert report["equal ranks"].figure == "nothing in the loader says which rank it is for: call doctor on all ranks"
    assert LoaderReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert "<table>" in report._repr_html_()
    assert len(report.to_frame()) == len(CHECKS)
    assert report["runs"].proved
    with pytest.raises(KeyError, match=r"'lunch': allowed are runs, pickling"):
        report["lunch"]
    with pytest.raises(ValueError, match=r"doctor looks at a torch.utils.data.DataLoader, and this is a list"):
        wb.data.doctor([1, 2])  # type: ignore[arg-type]


def test_what_cannot_be_pickled_is_named_by_its_place() -> None:
    found = wb.data.doctor(forked(Rows(steps={"crop": lambda x: x})), run=False)
    assert found["pickling"].severity == "breaks"
    assert found["pickling"].figure.startswith("dataset.steps['crop'] cannot be pickled")
    assert "under Python 3.14" in found["pickling"].figure
    assert "instead of a lambda" in found["pickling"].fix
    assert wb.data.doctor(DataLoader(Rows(), 8, collate_fn=lambda x: x), run=False)["pickling"].severity == "fine"  # nothing is sent


def test_a_memory_map_is_sent_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_doctor, "LARGE_PICKLE", 100_000)
    np.save(tmp_path / "x.npy", np.zeros(50_000))
    found = wb.data.doctor(forked(Rows(pixels=np.load(tmp_path / "x.npy", mmap_mode="r"))), run=False)["pickling"]
    assert found.severity == "slow"
    assert "dataset.pixels is a memory map, and is sent as a whole" in found.figure


def test_a_file_that_workers_share_is_read_wrongly_and_shown_to_be(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(np.repeat(np.arange(200, dtype=np.uint8), 4096).tobytes())
    data = SharedFile(tmp_path / "records")
    found = wb.data.doctor(forked(data))
    assert found["open handles"].severity == "wrong"
    assert "dataset.file is an open file" in found["open handles"].figure
    assert "os.getpid()" in found["open handles"].fix
    spawned = wb.data.doctor(DataLoader(data, 8, num_workers=1, multiprocessing_context="spawn"), run=False)
    assert (spawned["open handles"].severity, spawned["pickling"].severity) == ("breaks", "breaks")
    assert "with this start method" in spawned["pickling"].figure
    assert "nothing shares it" in wb.data.doctor(DataLoader(data, 8), run=False)["open handles"].figure
    data.file.close()
    assert wb.data.doctor(DataLoader(data, 8), run=False)["open handles"].figure == "the dataset holds none"


def test_reads_that_fail_in_workers_only_show_a_shared_file_as_those_that_differ_do(tmp_path: Path) -> None:
    """As where a read of another worker has moved the position behind the end."""

    class Fails(SharedFile):
        def __getitem__(self, index: int) -> torch.Tensor:
            info = get_worker_info()
            if info and info.id and not index % 20:
                raise ValueError("there is no byte at the end")
            return super().__getitem__(0)

    (tmp_path / "records").write_bytes(bytes(4096))
    data = Fails(tmp_path / "records")
    found = wb.data.doctor(forked(data))["open handles"]
    data.file.close()
    assert (found.severity, found.proved) == ("wrong", True)
    assert "of 2000 reads of workers differ or fail" in found.figure


def test_workers_of_a_stream_that_give_the_same_are_found() -> None:
    same = wb.data.doctor(forked(Stream(parts=False), num_workers=2))["stream parts"]
    assert (same.severity, same.proved) == ("wrong", True)
    assert "2 of 2 workers give the same samples" in same.figure
    assert wb.data.doctor(forked(Stream(parts=True), num_workers=2))["stream parts"].severity == "fine"


def test_samplers_that_repeat_samples_or_orders_are_found() -> None:
    sampler = DistributedSampler[Any](Rows(), 5, 0)
    found = wb.data.doctor(DataLoader(Rows(), 8, sampler=sampler), run=False)
    assert "repeats 1 of 64 samples" in found["padding"].figure
    assert found["set_epoch"].severity == "wrong"
    assert "sampler.set_epoch(epoch)" in found["set_epoch"].fix
    mine = wb.data.ResumableSampler(64, rank=0, world_size=5)
    sound = wb.data.doctor(DataLoader(Rows(), 8, sampler=mine), run=False)
    assert sound["padding"].severity == sound["set_epoch"].severity == "fine"
    assert found["set_epoch"].fix.startswith("call loader.sampler.set_epoch(epoch)")
    assert wb.data.doctor(forked(Rows(), in_order=False), run=False)["in_order"].severity == "wrong"


def test_padding_and_set_epoch_look_through_batch_samplers() -> None:
    """Where a batch sampler is given, `loader.sampler` is another one, which torch makes and does not use."""
    inner: Any = DistributedSampler(Rows(), num_replicas=5, rank=0)
    found = wb.data.doctor(DataLoader(Rows(), batch_sampler=BatchSampler(inner, batch_size=4, drop_last=False)), run=False)
    assert found["padding"].severity == "wrong"
    assert "repeats 1 of 64 samples" in found["padding"].figure
    assert found["set_epoch"].severity == "wrong"
    assert found["set_epoch"].proved
    assert found["set_epoch"].fix.startswith("call loader.batch_sampler.sampler.set_epoch(epoch)")
    by_batches: Any = BatchSampler(inner, batch_size=4, drop_last=False)
    unbatched = wb.data.doctor(DataLoader(Rows(), sampler=by_batches, batch_size=None), run=False)
    assert unbatched["set_epoch"].fix.startswith("call loader.sampler.sampler.set_epoch(epoch)")
    outer: Any = BatchSampler(BatchSampler(inner, 2, False), 2, False)  # type: ignore[arg-type]
    nested = wb.data.doctor(DataLoader(Rows(), batch_sampler=outer), run=False)
    assert "loader.batch_sampler.sampler.sampler.set_epoch" in nested["set_epoch"].fix
    own: Any = wb.data.ResumableSampler(Rows(), rank=1, world_size=3, tail="repeat")
    declared = wb.data.doctor(DataLoader(Rows(), batch_sampler=BatchSampler(own, 4, False)), run=False)
    assert "repeated, as declared" in declared["padding"].figure
    assert declared["set_epoch"].severity == "fine"
    whole: Any = DistributedSampler(Rows(), num_replicas=4, rank=0, shuffle=False)
    fine = wb.data.doctor(DataLoader(Rows(), batch_sampler=BatchSampler(whole, 4, False)), run=False)
    assert fine["padding"].severity == fine["set_epoch"].severity == "fine"


def test_a_batch_sampler_that_shuffles_by_its_epoch_is_found() -> None:
    """One that makes the batches itself, as a sampler by lengths does."""

    class Buckets(Sampler[list[int]]):
        shuffle, epoch = True, 0
        batches = ()  # a name that ours has as well

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 16

        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            return iter([order[at : at + 4] for at in range(0, 64, 4)])

    found = wb.data.doctor(DataLoader(Rows(), batch_sampler=Buckets()), run=False)["set_epoch"]
    assert found.severity == "wrong"
    assert found.fix.startswith("call loader.batch_sampler.set_epoch(epoch)")


def test_ranks_that_would_wait_for_a_batch_are_found_from_one_of_them() -> None:
    found = wb.data.doctor(DataLoader(Rows(), sampler=Strided(1, 2)), run=False)["equal ranks"]
    assert (found.severity, found.proved) == ("breaks", False)  # only its len() was read
    assert "rank 1 of 2 gets 4 batches and rank 0 5 (by the len() of Strided): with DDP, rank 0 waits for it without an end" in found.figure
    assert "ResumableSampler" in found.fix
    for sampler, knobs, said in (
        (Strided(1, 2), {"batch_size": 5}, "2 ranks have 1 batch each (by the len() of Strided)"),
        (Strided(1, 2), {"batch_size": 4, "drop_last": True}, "2 ranks have 1 batch each (by the len() of Strided)"),
        (DistributedSampler[Any](Rows(), 5, 0), {"batch_size": 8}, "5 ranks have 2 batches each"),
        (wb.data.ResumableSampler(64, rank=0, world_size=1), {}, "its sampler is for one rank"),
    ):
        fine = wb.data.doctor(DataLoader(Rows(), sampler=sampler, **knobs), run=False)["equal ranks"]
        assert (fine.severity, fine.figure) == ("fine", said)
    assert wb.data.doctor(DataLoader(Rows(), 5, sampler=Strided(1, 2), drop_last=True), run=False)["equal ranks"].severity == "breaks"


def test_batch_samplers_and_unbatched_loaders_are_looked_through() -> None:
    for loader in (
        DataLoader(Rows(), batch_sampler=BatchSampler(Strided(1, 2), 1, drop_last=False)),
        DataLoader(Rows(), batch_size=None, sampler=Strided(1, 2)),
    ):
        found = wb.data.doctor(loader, run=False)["equal ranks"]
        assert found.severity == "breaks"
        assert "rank 1 of 2 gets 4 batches and rank 0 5" in found.figure
    even = DataLoader(Rows(), batch_sampler=BatchSampler(DistributedSampler[Any](Rows(), 2, 0), 5, drop_last=True))
    assert wb.data.doctor(even, run=False)["equal ranks"].figure == "2 ranks have 6 batches each"


def test_what_the_loader_does_not_say_of_ranks_is_not_judged() -> None:
    class Indices(Strided):
        def __init__(self, rank: int, num_replicas: int) -> None:
            super().__init__(rank, num_replicas)
            self.indices = list(super().__iter__())

        def __len__(self) -> int:
            return len(self.indices)

    for loader, said in (
        (DataLoader(Stream(parts=True)), "nothing says which part of the stream a rank gets: call doctor on all ranks"),
        (
            DataLoader(Rows(), sampler=Indices(1, 2)),
            "2 ranks have 4 batches each by the len() of Indices, which may not follow the rank: call doctor on all ranks",
        ),
    ):
        found = wb.data.doctor(loader, run=False)["equal ranks"]
        assert (found.severity, found.figure) == ("not judged", said)


def test_a_rank_that_asked_alone_is_answered_when_all_ask() -> None:
    store = torch.distributed.HashStore()
    for _ in range(2):
        assert rank_batches.told_by_all(store, 0, 2, "alone", 0.0) == {0: "alone"}
    with ThreadPoolExecutor(2) as ranks:
        for answers in ({0: "a", 1: "b"}, {0: "c", 1: "d"}):
            told = [ranks.submit(rank_batches.told_by_all, store, rank, 2, answer, 60.0) for rank, answer in answers.items()]
            assert [each.result() for each in told] == [answers] * 2


class Before:
    """A store in which something happens right before a rank writes how a question ends."""

    def __init__(self, store: Any, happens: Callable[..., object]) -> None:
        self._store, self._happens = store, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, *given: str) -> bytes:
        self._happens(*given)
        end: bytes = self._store.compare_set(*given)
        return end


def test_a_rank_that_gives_up_while_the_other_answers_ends_the_question_as_the_other_does() -> None:
    ask, store = rank_batches.told_by_all, torch.distributed.HashStore()
    other: list[dict[int, str]] = []

    def answers(*_: str) -> None:
        other.append(ask(store, 1, 2, "b", 60.0))

    assert ask(Before(store, answers), 0, 2, "a", -1.0) == {0: "a", 1: "b"}  # rank 1 was first: all have answered

    def gives_up_first(*end: str) -> None:
        other.append(ask(Before(store, lambda *_: store.compare_set(*end)), 1, 2, "d", 60.0))

    assert ask(Before(store, gives_up_first), 0, 2, "c", -1.0) == {0: "c"}
    assert other == [{0: "a", 1: "b"}, {1: "d"}]
    with ThreadPoolExecutor(2) as ranks:
        told = [ranks.submit(ask, store, rank, 2, answer, 60.0) for rank, answer in enumerate("ef")]
        assert [each.result() for each in told] == [{0: "e", 1: "f"}] * 2


def test_ranks_finish_uneven_data_or_the_doctor_says_that_they_hang(forks: Forks, tmp_path: Path) -> None:
    """9 samples on two ranks under DDP: a plain loader has a batch more on one of them."""
    done = forks.ranks(2, tmp_path, "-c", RANKS, tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["even"] for rank in ranks] == [[4, 4], [4, 4]]
    assert [rank["joined"] for rank in ranks] == [5, 4]
    for rank in ranks:
        assert rank["sound"]["severity"] == "fine"
        assert rank["plain"]["severity"] == "breaks"
        assert "rank 1 of 2 gets 4 batches and rank 0 5" in rank["plain"]["figure"]


@pytest.fixture
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a process group in which this process is rank 1, and waits for nobody."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(rank_batches, "PATIENCE", 0.0)
    monkeypatch.setattr(rank_batches.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rank_batches.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_batches.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(rank_batches.dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def test_a_rank_whose_others_are_not_examined_or_ask_about_another_loader_goes_on(rank_1_of_2: Any) -> None:
    found = wb.data.doctor(DataLoader(Rows(), 8), run=False)["equal ranks"]
    assert (found.severity, found.figure) == ("not judged", "1 of 2 ranks have been asked: call doctor on all of them")
    rank_1_of_2.set(f"{rank_batches.KEY}/1/0", json.dumps(["Rows, batch_size=4, SequentialSampler", 16]))
    found = wb.data.doctor(DataLoader(Rows(), 8), run=False)["equal ranks"]
    about = "rank 0 about Rows, batch_size=4, SequentialSampler; rank 1 about Rows, batch_size=8, SequentialSampler"
    assert found.severity == "not judged"
    assert f"ranks were asked about different loaders ({about})" in found.figure


class Batches(Sampler[list[int]]):
    """Batches of one sample each; None = nobody knows how many."""

    def __init__(self, batches: int | None) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]] * (self.batches or 0))

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("nobody knows how many batches there are")
        return self.batches


@pytest.mark.parametrize(
    ("batches", "severity", "figure"),
    [
        (0, "breaks", "rank 1 of 2 gets 0 batches and rank 0 4"),
        (1, "breaks", "rank 1 of 2 gets 1 batch and rank 0 4"),
        (None, "not judged", "a loader without a length may end sooner on one rank than on another"),
    ],
)
def test_ranks_name_a_batch_sampler_alike_whatever_its_length(rank_1_of_2: Any, batches: int | None, severity: str, figure: str) -> None:
    rank_1_of_2.set(f"{rank_batches.KEY}/0/0", json.dumps(["Rows, batch_size=None, Batches", 4]))
    found = wb.data.doctor(DataLoader(Rows(), batch_sampler=Batches(batches)), run=False)["equal ranks"]
    assert found.severity == severity
    assert figure in found.figure


def test_budgets_of_shared_memory_and_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 64

    monkeypatch.setattr(loader_doctor.os, "statvfs", lambda folder: Full())
    monkeypatch.setattr(loader_doctor.resource, "getrlimit", lambda kind: (16, 16))
    found = wb.data.doctor(forked(Rows()))
    assert found["shared memory"].severity == "breaks"
    assert "3 batches of 96 B take 288 B of 64 B" in found["shared memory"].figure
    assert found["descriptors"].severity == "breaks"
    assert "7 for 1 tensors in 3 batches" in found["descriptors"].figure
    assert "ulimit -n" in found["descriptors"].fix


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's smaps_rollup")
def test_growing_memory_of_workers_is_measured() -> None:
    class Names(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            mine = self.names[index * 2500 : (index + 1) * 2500]  # type: ignore[attr-defined]
            return torch.tensor(sum(name[1] for name in mine))

    found = wb.data.doctor(forked(Names(names=[(f"folder/{i:09d}.jpg", i) for i in range(160_000)])))["copy-on-write"]
    assert (found.severity, found.proved) == ("slow", True)
    assert "dataset.names has 480,000 Python objects" in found.figure
    packed = wb.data.doctor(forked(Rows(names=np.zeros(400_000, "S20"))))["copy-on-write"]
    assert packed.severity == "fine"


def test_pinning_cores_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wb.data.doctor(DataLoader(Rows(), 8, pin_memory=True), run=False)["pin_memory"]
    assert torch.accelerator.is_available() or found.severity == "slow"
    loader = forked(Rows())
    monkeypatch.setattr(loader_doctor, "usable_cores", lambda: 0.5)
    many = wb.data.doctor(loader, run=False)["cores"]
    assert many.severity == "slow"

    class Broken(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError("the disk is gone")

    broken = wb.data.doctor(DataLoader(Broken(), 8))["runs"]
    assert (broken.severity, broken.figure) == ("breaks", "OSError: the disk is gone")
    assert wb.data.doctor(DataLoader(Rows(), 100, drop_last=True))["runs"].severity == "wrong"


def test_a_class_of_a_notebook_cannot_be_imported_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Rows):
        __module__ = "__main__"

    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # as in a kernel, it has no file
    now = wb.data.doctor(forked(Mine(), multiprocessing_context="spawn"), run=False)["main class"]
    later = wb.data.doctor(forked(Mine()), run=False)["main class"]
    assert (now.severity, later.severity) == ("breaks", "slow")
    assert "dataset is defined in a notebook or a prompt, which workers cannot import" in now.figure
    assert "%%writefile" in now.fix
    assert wb.data.doctor(DataLoader(Mine(), 8), run=False)["main class"].fix == ""
