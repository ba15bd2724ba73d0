"""Loops that train on the same samples several times: in workers, on ranks, in each epoch; and those that must not be blamed."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import workbench as wb
from tests.conftest import HandMade
from tests.forked import Forks
from workbench.core import run_directory
from workbench.runs.panel.follow import Follower
from workbench.runs.run import Run
from workbench.timeline.reading import FirstBatches, digest, may_split, rank_notes
from workbench.train.loader import micro_batches
from workbench.train.ranks import Ranks


class Stream(IterableDataset[torch.Tensor]):
    """Each worker gives all of it."""

    def __init__(self, constant: bool = False) -> None:
        self.constant = constant

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((3,), 0.0 if self.constant else float(i)) for i in range(64))


class Split(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.islice(super().__iter__(), *part())


def part() -> tuple[int, None, int]:
    info = get_worker_info()
    return (info.id, None, info.num_workers) if info else (0, None, 1)


class Mapped(IterableDataset[torch.Tensor]):
    """Around another stream."""

    def __init__(self, inner: IterableDataset[torch.Tensor]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (sample + 1 for sample in self.inner)


def said_of(passes: int, loader: Any, monkeypatch: pytest.MonkeyPatch, between: Callable[[int], object] = lambda epoch: None) -> Any:
    """Warnings and rows of rank 0 of two, whose loop trains on each batch."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    warnings, rows = list[str](), list[dict[str, Any]]()
    look = FirstBatches(warn=warnings.append, say=rows.append, steps=itertools.count().__next__)
    for epoch in range(passes):
        between(epoch)
        plain, seen = len(list(loader)), len(list(look.of(loader)))
        assert plain == seen
    return warnings, rows


@pytest.mark.parametrize(
    ("stream", "workers", "repeated"),
    [(Stream(), 2, True), (Mapped(Stream()), 2, True), (Split(), 2, False), (Stream(), 1, False), (Stream(constant=True), 2, False)],
)
def test_workers_that_repeat_a_stream_are_said_once(
    stream: IterableDataset[torch.Tensor], workers: int, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(stream, batch_size=4, num_workers=workers, multiprocessing_context="fork")
    warnings, rows = said_of(2, loader, monkeypatch)
    assert len(warnings) == repeated
    if repeated:
        assert warnings[0].startswith(
            f"the {workers} workers of the loader give the same samples, as each reads the whole stream. Split it"
        )
        assert "get_worker_info()" in warnings[0]
    assert [row["reads"]["group"] for row in rows] == [False]


@pytest.mark.parametrize(("stream", "splits"), [(Stream(), False), (Split(), True), (Mapped(Stream()), False), (Mapped(Split()), True)])
def test_code_that_splits_by_worker_is_seen(stream: IterableDataset[torch.Tensor], splits: bool) -> None:
    assert may_split(DataLoader(stream)) == splits
    assert may_split(DataLoader(stream, num_workers=1, worker_init_fn=print))


def test_epochs_in_the_same_order_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(32.0))
    sampler = DistributedSampler[Any](data, 2, 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    assert said_of(3, loader, monkeypatch)[0] == [
        "each epoch has the samples in the same order: call loader.sampler.set_epoch(epoch) before each pass"
    ]
    assert said_of(3, loader, monkeypatch, sampler.set_epoch)[0] == []
    assert said_of(1, loader, monkeypatch)[0] == []
    assert said_of(3, DataLoader(data, batch_size=4, sampler=DistributedSampler[Any](data, 2, 0, shuffle=False)), monkeypatch)[0] == []


def test_datasets_of_which_each_rank_has_a_part_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Files(Dataset[Any]):
        def __init__(self, paths: list[str]) -> None:
            self.paths = paths

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> Any:
            return torch.ones(2)

    def identity(dataset: Any) -> Any:
        (row,) = said_of(1, DataLoader(dataset, batch_size=2), monkeypatch)[1]
        return row["reads"]["data"]

    paths, numbers = [f"{i}.jpg" for i in range(10)], TensorDataset(torch.arange(20.0))
    assert identity(Files(paths)) == identity(Files(paths[:])) != identity(Files(paths[::-1]))
    assert identity(numbers) == identity(TensorDataset(torch.arange(20.0))) != identity(TensorDataset(torch.arange(20.0) + 1))
    assert identity(Subset(numbers, range(10))) != identity(Subset(numbers, range(10, 20)))  # type: ignore[arg-type]
    assert identity(Subset(numbers, [1, 2, 3])) != identity(Subset(numbers, [4, 5, 6]))
    assert identity(Stream()) == ""


def test_nothing_that_a_loader_is_made_of_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a data set of h5py, which has a type and a shape, and no more of an array."""

    @dataclass
    class Epochs(Sampler[int]):  # it has no hash
        epoch: int = 0
        shuffle: bool = True

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    class Odd(torch.Tensor):
        def detach(self) -> Any:
            raise ValueError("not by you")

    class File(Dataset[Any]):
        def __init__(self) -> None:
            self.file = SimpleNamespace(dtype="float32", shape=(4,))

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.ones(2)

    loader = DataLoader(File(), sampler=Epochs(), collate_fn=lambda rows: torch.stack(rows).as_subclass(Odd))
    warnings, (row,) = said_of(3, loader, monkeypatch)
    assert warnings == []
    assert (row["reads"]["first"], row["reads"]["data"]) == ("", "")


def test_a_sampler_that_knows_of_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(8.0))
    sharded = BatchSampler(SequentialSampler(data), 2, False)
    sharded.process_index = 1  # type: ignore[attr-defined]  # as Accelerate's has
    distributed = DataLoader(data, sampler=DistributedSampler[Any](data, 2, 0))
    loaders = [DataLoader(data, batch_size=2), distributed, DataLoader(data, batch_sampler=sharded)]
    assert [said_of(1, loader, monkeypatch)[1][0]["reads"]["split"] for loader in loaders] == [False, True, True]


def test_digests() -> None:
    one, other = (
        {"x": torch.arange(8.0).reshape(4, 2), "y": [torch.ones(4)]},
        {"x": torch.arange(8.0).reshape(4, 2) + 1, "y": [torch.ones(4)]},
    )
    assert digest(one) == digest({"x": one["x"].clone(), "y": one["y"]}) != digest(other)
    assert digest(one)[1]
    assert not digest(torch.zeros(4, 2))[1]
    assert digest(["text", 3]) == ("", False)
    assert digest(torch.zeros(4, 2, device="meta")) == ("", False)
    assert digest(torch.ones((), dtype=torch.bfloat16))[0]


def reads(first: str, group: bool, split: bool = False, data: str = "") -> dict[str, Any]:
    return {"first": first, "group": group, "split": split, "data": data}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({0: reads("a", False), 1: reads("a", False)}, "are in no process group, so each trains a model of its own, all on the same"),
        ({0: reads("a", False), 1: reads("b", False)}, "each trains a model of its own, and none of them learns from the others"),
        ({0: reads("", False), 1: reads("", False)}, "so each trains a model of its own, and none"),
        ({0: reads("a", True), 1: reads("a", True)}, "all 2 ranks train on the same samples, .* sampler=DistributedSampler"),
        ({0: reads("a", True, True), 1: reads("a", True, True)}, "its DistributedSampler has the same rank on all"),
        ({0: reads("a", True), 1: reads("b", True)}, ""),
        ({0: reads("", True), 1: reads("", True)}, ""),
        ({0: reads("a", True, data="x"), 1: reads("b", True, data="x")}, "no loader has a DistributedSampler: each of the 2 ranks reads"),
        ({0: reads("a", True, True, "x"), 1: reads("b", True, True, "x")}, ""),
        ({0: reads("a", True, data="x"), 1: reads("b", True, data="y")}, ""),
        ({0: reads("a", False)}, ""),
    ],
)  # fmt: skip
def test_ranks_are_compared(ranks: dict[int, dict[str, Any]], said: str) -> None:
    notes = rank_notes(ranks, 2)
    assert len(notes) == bool(said)
    assert not said or re.search(said, notes[0])
    assert rank_notes(ranks, 1) == []


def test_a_run_says_what_its_ranks_have_seen(by_hand: Callable[..., HandMade]) -> None:
    made = by_hand()
    for rank in range(2):
        writer = run_directory.LineWriter(made.path / run_directory.rank_file(rank))
        writer.write(
            [{"rank": rank}, {"reads": reads("a", False)}, {"note": "warning: each epoch is alike"}, {"note": "how it was measured"}]
        )
        writer.close()
    run = Run.load(made.path)
    assert [note[:20] for note in run.notes] == ["the 2 ranks are in n", "each epoch is alike"]
    assert Follower(run).snapshot().notes == run.notes


@pytest.mark.parametrize("reads", [7, [], {"first": ["a"], "group": {}}, {"first": {}, "split": 1}, {"first": "", "data": [1], "group": 1}])
def test_a_rank_that_says_nonsense_says_nothing(by_hand: Callable[..., HandMade], reads: Any) -> None:
    made = by_hand(nproc_per_node=2)
    for rank in range(2):
        (made.path / run_directory.rank_file(rank)).write_text(json.dumps({"reads": reads}) + "\n")
    assert Run.load(made.path).notes == Follower(Run.load(made.path)).snapshot().notes == ()


def test_a_watched_loop_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = wb.watch(DataLoader(Stream(), batch_size=4, num_workers=2, multiprocessing_context="fork"), model=model, optimizer=optimizer)
    for batch in watched:
        model(batch).sum().backward()
        optimizer.step()
    assert len(watched.timeline.steps) == 32
    assert any(note.startswith("warning: the 2 workers of the loader give the same samples") for note in watched.timeline.notes)
    assert "workbench: warning: the 2 workers" in capsys.readouterr().err
    rows = run_directory.LineTail(tmp_path / "rank0.jsonl").read()
    assert [row["note"][:20] for row in rows if "note" in row] == ["warning: the 2 worke"]  # at once, in case the process is killed
    assert "rank" in rows[0]
    watched.close()
    rows = run_directory.LineTail(tmp_path / "rank0.jsonl").read()
    assert sum("note" in row for row in rows) == 1


def test_a_trainer_warns() -> None:
    ranks, warnings = Ranks(rank=0, world_size=1, device=torch.device("cpu"), store=HashStore()), list[str]()
    for stream in (Stream(), Split()):
        loader = DataLoader(stream, batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert len([*itertools.islice(micro_batches(loader, 1, ranks, warn=warnings.append), 40)]) == 40
    assert len(warnings) == 1
    assert warnings[0].startswith("the 2 workers of the loader give the same samples")


SCRIPT = """
import sys, torch
from workbench.timeline import watch_script
watch_script.install()
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(data, batch_size=16):  # an evaluation, which may read the same on all
    model(x)
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=8, shuffle=True):
        model(x).sum().backward()
        optimizer.step()
"""


def test_two_ranks_that_never_communicate_are_noticed(tmp_path: Path, forks: Forks) -> None:
    """As torchrun starts them; nothing joins a process group, and both seed alike."""
    info = {"format": run_directory.FORMAT, "id": "x", "name": "x", "created": 0.0, "host": "h", "launch_dir": "."}
    spec = {"kind": "script", "script": "train.py", "nproc_per_node": 2, "watch": True}
    run_directory.write_json(tmp_path / run_directory.RUN_JSON, info | {"spec": spec, "outcome": {"state": "finished", "seconds": 1.0}})
    for rank in ("0", "1"):
        env = os.environ | {"RANK": rank, "WORLD_SIZE": "2", run_directory.ENV_RUN_DIR: str(tmp_path)}
        assert forks.run(tmp_path, "-c", SCRIPT, env=env).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert sum("step" in row for row in rows) == 16
    run = Run.load(tmp_path)
    assert run.notes[0].startswith(
        "the 2 ranks are in no process group, so each trains a model of its own, all on the same samples: nothing"
    )
    assert "note: the 2 ranks are in no process group" in run.summary
