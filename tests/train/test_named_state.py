"""Checkpoints of models that ranks share: parts in files of their own, which any layout loads, and nothing of which is executed."""

import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import toy_tasks
from tests.forked import Forks
from tests.train.test_checkpoints import names, spec_of, train, weights
from workbench.core import run_directory
from workbench.train import checkpoint_file, named_state
from workbench.train.checkpoints import Checkpoints
from workbench.train.fingerprints import digest
from workbench.train.offload import DryRunHooks, HostOptimizer, offloading_dry_run
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor
from workbench.train.trainer import Trainer

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[1] / "scripts" / "checkpoint_ranks.py"


def whole(module: nn.Module) -> torch.Tensor:
    return torch.cat([full_tensor(weight).detach().flatten() for weight in module.parameters()])


@pytest.fixture(scope="module")
def written(alone: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of an FSDP model after 12 and 18 of 20 steps."""
    run_dir = tmp_path_factory.mktemp("fsdp")
    train(spec_of(parallel="fsdp", optimizer="adam(lr=0.01)"), toy_tasks.numbers(), alone, run_dir)
    return run_dir


@pytest.fixture
def here(written: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoints."""
    folder = tmp_path / run_directory.CHECKPOINTS
    folder.mkdir()
    for path in (written / run_directory.CHECKPOINTS).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def made(alone: Ranks, **knobs: Any) -> Trainer:
    return Trainer(spec_of(**{"optimizer": "adam(lr=0.01)", **knobs}), toy_tasks.numbers(), alone)


def resumed(alone: Ranks, folder: Path, trainer: Trainer) -> int:
    checkpoints = Checkpoints(folder.parent, alone, 6)
    return checkpoints.resume(trainer, checkpoints.latest())


def test_two_files_are_rotated_together(written: Path) -> None:
    both = ["step00000012.pt", "step00000012.rank0.pt", "step00000018.pt", "step00000018.rank0.pt"]
    assert names(written) == both


@pytest.mark.slow
def test_other_modes_load_the_same_and_say_that_the_training_is_another(
    alone: Ranks, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fsdp, ddp = made(alone, parallel="fsdp"), made(alone)
    assert resumed(alone, here, fsdp) == resumed(alone, here, ddp) == 18
    assert torch.equal(whole(fsdp.module), weights(ddp.module))
    for (_, one), (_, other) in zip(fsdp.optimizer.state.items(), ddp.optimizer.state.items(), strict=True):
        assert all(torch.equal(full_tensor(one[kind]), other[kind]) for kind in other)
    assert ddp.lr == fsdp.lr
    said = capsys.readouterr().out
    assert said.count("note: ") == 1
    assert "it goes on with parallel=ddp (it was fsdp): weights, optimizer and schedule are those of the checkpoint" in said
    assert "not bit for bit" in said
    Checkpoints(here.parent, alone, 6).write(19, ddp)  # one file, which FSDP loads
    assert resumed(alone, here, again := made(alone, parallel="fsdp")) == 19
    assert torch.equal(whole(again.module), weights(ddp.module))
    capsys.readouterr()
    resumed(alone, here, made(alone, parallel="fsdp", micro_batch=4))
    assert (
        "; a step takes 4 samples now, and took 8: the epoch goes on with the samples it has left, a stream after as many"
        in capsys.readouterr().out
    )


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = checkpoint_file.load(path, CPU)
    change(state)
    checkpoint_file.save(state, path)


class Bomb:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def swapped(folder: Path) -> None:
    (folder / "step00000018.rank0.pt").write_bytes((folder / "step00000012.rank0.pt").read_bytes())


def turned_over(folder: Path) -> None:
    path = folder / "step00000018.rank0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def hostile(folder: Path) -> None:
    part = folder / "step00000018.rank0.pt"
    checksum = checkpoint_file.save({"parts": {}, "other": {}, "bomb": Bomb(folder / "bang")}, part)
    edit(folder / "step00000018.pt", lambda state: state["shards"][0].update(crc32=checksum))


def hostile_index(folder: Path) -> None:
    checkpoint_file.save({"step": 18, "shards": [Bomb(folder / "bang")]}, folder / "step00000018.pt")


def torch_index(folder: Path) -> None:
    """As torch.distributed.checkpoint keeps it."""
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(folder / "bang")))
    (folder / "step00000018.rank0.pt").unlink()


def shorter(folder: Path) -> None:
    def cut(state: dict[str, Any]) -> None:
        parts = state["shards"][0]["parts"]
        key = next(key for key in parts if key[0] == "module")
        shape, offset, size = parts[key]
        parts[key] = (tuple(2 * length for length in shape), offset, size)

    edit(folder / "step00000018.pt", cut)


def unnamed(folder: Path) -> None:
    edit(folder / "step00000018.pt", lambda state: state["shards"][0].update(parts=7))


def no_list(folder: Path) -> None:
    edit(folder / "step00000018.pt", lambda state: state.update(shards={"0": "../../elsewhere"}))


def wider(folder: Path) -> None:
    def widen(state: dict[str, Any]) -> None:
        parts = state["shards"][0]["parts"]
        parts["module", "more", ""] = ((1,), (0,), (1,))

    edit(folder / "step00000018.pt", widen)


@pytest.mark.parametrize(
    ("become", "why", "kind"),
    [
        (swapped, "step00000018.rank0.pt: it is of another checkpoint than the others", "damaged"),
        (turned_over, "step00000018.rank0.pt: its content has changed", "damaged"),
        (hostile, "step00000018.rank0.pt: it holds objects other than tensors", "foreign"),
        (hostile_index, "it holds objects other than tensors", "foreign"),
        (torch_index, "step00000018.rank0.pt is missing", "partial"),
        (shorter, "it is of another model: its", "foreign"),
        (unnamed, "its parts have no names", "foreign"),
        (no_list, "not a list of them", "foreign"),
        (wider, "this one has no more", "foreign"),
    ],
)
def test_what_is_passed_over_says_why_and_executes_nothing(
    alone: Ranks, here: Path, capsys: pytest.CaptureFixture[str], become: Callable[[Path], None], why: str, kind: str
) -> None:
    become(here)
    assert resumed(alone, here, made(alone, parallel="fsdp")) == 12
    assert f"step00000018.pt is {kind} and passed over: " in (said := capsys.readouterr().out)
    assert why in said
    assert not (here / "bang").exists()
    assert (here / f"step00000018.pt.{kind}").exists()


def test_one_of_a_newer_workbench_is_kept_whole(alone: Ranks, here: Path) -> None:
    """Its parts are neither deleted nor overwritten while the training goes on, takes the same step again and rotates its checkpoints."""
    index, part = here / "step00000018.pt", here / "step00000018.rank0.pt"
    index.write_bytes(index.read_bytes().replace(b'"format": 2', b'"format": 3'))
    newer, its_part = index.read_bytes(), part.read_bytes()
    spec = spec_of(parallel="fsdp", optimizer="adam(lr=0.01)")
    train(spec.replace(steps=18), toy_tasks.numbers(), alone, here.parent)
    assert index.exists()  # taken again
    checkpoint_file.set_aside(index, "newer")
    train(spec.replace(steps=40), toy_tasks.numbers(), alone, here.parent)
    assert (here / f"{index.name}.newer").read_bytes() == newer
    assert (here / f"{part.name}.newer").read_bytes() == its_part
    assert (here / f"{index.name}.newer1").exists()
    assert (here / f"{part.name}.newer1").exists()


def test_a_training_on_one_rank_goes_on_bit_for_bit(alone: Ranks, written: Path, here: Path) -> None:
    """And a checkpoint that is not whole is not there."""
    (here / "step00000018.pt").unlink()  # the machine was switched off before it was written
    spec = spec_of(parallel="fsdp", optimizer="adam(lr=0.01)")
    again = train(spec, toy_tasks.numbers(), alone, here.parent)
    other = made(alone, parallel="fsdp")
    resumed(alone, written / run_directory.CHECKPOINTS, other)
    batches = other.batches(18)
    for _ in range(2):
        other.step([next(batches)])
    assert digest(list(again.parameters())) == digest(list(other.module.parameters()))


class Converting(nn.Sequential):
    """Converts weights of version 1 when it loads them, as modules with a `_version` do; the weight has to be there."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        factor = 1.0 if local_metadata.get("version", 1) == self._version else 10.0
        state_dict[f"{prefix}0.weight"] = state_dict[f"{prefix}0.weight"] * factor
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Counting(Converting):
    """Has a state of its own beside the tensors."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.calls: Counter[str] = Counter()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls["training" if self.training else "evaluation"] += 1
        return super().forward(inputs)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "of training": np.int64(self.calls["training"])}

    def set_extra_state(self, state: Any) -> None:
        self.calls = Counter(state["calls"])
        assert state["calls"]["anything"] == 0  # it is a Counter still
        assert state["of training"] == self.calls["training"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("ddp", "ddp"), ("fsdp", "fsdp"), ("zero1", "zero1"), ("fsdp", "ddp"), ("ddp", "fsdp")])
def test_modules_with_versions_load_what_is_of_the_same_version_and_convert_what_is_older(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """And a state of the module's own goes on."""
    task, spec = toy_tasks.numbers(model=Counting), spec_of(optimizer="adam(lr=0.01)", evaluate=True)
    uninterrupted = train(spec.replace(parallel=before), task, alone, tmp_path)
    folder, again = tmp_path / run_directory.CHECKPOINTS, Trainer(spec.replace(parallel=after), task, alone)
    assert resumed(alone, folder, again) == 18
    first = full_tensor(again.module[0].weight).clone()
    batches = again.batches(18)
    for _ in range(2):
        again.step([next(batches)])
    assert torch.equal(whole(again.module), whole(uninterrupted))
    assert again.module.calls["training"] == 20
    assert list(again.figures().values()) == whole(again.module).tolist()  # of the full model, which loads the weights
    monkeypatch.setattr(Converting, "_version", 3)  # the code changes, and says how older weights become newer ones
    newer = Trainer(spec.replace(parallel=after), task, alone)
    resumed(alone, folder, newer)
    assert torch.equal(full_tensor(newer.module[0].weight), first * 10)


def test_checkpoints_without_versions_are_of_the_present_ones(alone: Ranks, tmp_path: Path) -> None:
    """Those of an earlier workbench, and imported ones."""
    task = toy_tasks.numbers(model=Counting)
    for parallel in ("ddp", "fsdp"):
        trainer, again = (Trainer(spec_of(parallel=parallel), task, alone) for _ in range(2))
        folder = tmp_path / parallel / run_directory.CHECKPOINTS
        folder.mkdir(parents=True)
        Checkpoints(tmp_path / parallel, alone, 6).write(6, trainer)
        if parallel == "ddp":
            edit(folder / "step00000006.pt", lambda state: state.update(module=dict(state["module"])))
        else:
            part = torch.load(folder / "step00000006.rank0.pt", weights_only=True)
            checksum = checkpoint_file.save({**part, "other": dict(part["other"])}, folder / "step00000006.rank0.pt")
            edit(folder / "step00000006.pt", lambda state, crc=checksum: state["shards"][0].update(crc32=crc))
        assert resumed(alone, folder, again) == 6
        assert torch.equal(whole(again.module), whole(trainer.module))


def test_the_versions_of_the_modules_of_all_stages_are_together(alone: Ranks, tmp_path: Path) -> None:
    for stage in range(2):
        other = named_state.other_entries(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))[stage : stage + 1])
        checkpoint_file.save({"parts": {}, "other": checkpoint_file.Copies()(other)}, tmp_path / f"{stage}.pt")
    shards = [{"parts": {}, "values": {}}] * 2
    state = {"shards": shards, "optimizer": {"groups": []}, "layout": {"pipeline_parallel": 2}}
    entries: Any = named_state.Source(state, lambda stage: tmp_path / f"{stage}.pt").other(0)
    assert {name: version["version"] for name, version in entries._metadata.items()} == {"": 1, "0": 2, "1": 2}


@pytest.mark.slow
def test_four_ranks_two_and_one(tmp_path: Path, forks: Forks) -> None:
    names, others = (
        [
            "hsdp",
            "split, fsdp",
            "stages, zero1",
            "experts of 4",
            "experts",
            "averages",
            "static graph",
            "static graph, after one",
            "powersgd, zero1",
        ],
        [
            ("stages, zero1", 2, "stages"),
            ("stages, zero1", 3, "fsdp"),
            ("hsdp", 2, "fsdp"),
            ("hsdp", 1, "ddp"),
            ("split, fsdp", 3, "fsdp"),
            ("split, fsdp", 1, "fsdp"),
            ("experts of 4", 2, "experts"),
            ("experts of 4", 1, "experts, ddp"),
            ("experts", 2, "experts"),
            ("powersgd, zero1", 3, "powersgd"),
        ],
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forks.ranks(4, tmp_path, SCRIPT, tmp_path / "out.json", json.dumps(names), json.dumps(others), env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == len(names) + len(others)
    assert not {name: text for name, text in found.items() if text}


def test_where_each_rank_has_its_own_parameters_it_gets_them_and_their_mean_is_that_of_all(tmp_path: Path) -> None:
    key, own = ("module", "weight", ""), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    shard = {"parts": {key: ((2,), (0,), (2,))}, "values": {}}
    state = {"shards": [shard, shard], "optimizer": {"groups": []}, "spec": {"local_sgd": "periodic(period=4)"}}
    for rank, value in enumerate(own):
        checkpoint_file.save({"parts": {key: value}, "other": {"count": torch.tensor(7 + rank)}}, tmp_path / f"{rank}.pt")

    def path_of(rank: int) -> Path:
        return tmp_path / f"{rank}.pt"

    assert all(torch.equal(named_state.Source(state, path_of, (rank, 2)).read(key), own[rank]) for rank in range(2))
    everywhere = named_state.whole_tensors(state, path_of)
    assert (everywhere["weight"].tolist(), everywhere["count"].item()) == ([2.0, 4.0], 7)
    with pytest.raises(checkpoint_file.UnusableCheckpointError, match="each of its 2 ranks has parameters of its own, and now there are 3"):
        named_state.Source(state, path_of, (0, 3))


def test_a_file_of_an_earlier_workbench_has_no_names(alone: Ranks, tmp_path: Path) -> None:
    ddp = made(alone)
    Checkpoints(tmp_path, alone, 6).write(6, ddp)
    edit(tmp_path / run_directory.CHECKPOINTS / "step00000006.pt", lambda state: state.pop("names"))
    with pytest.raises(run_directory.DamagedRunError, match='with parallel="ddp" only'):
        resumed(alone, tmp_path / run_directory.CHECKPOINTS, made(alone, parallel="fsdp"))
    assert resumed(alone, tmp_path / run_directory.CHECKPOINTS, made(alone)) == 6


def test_an_optimizer_on_the_host_goes_on_with_the_weights_of_the_checkpoint() -> None:
    nothing = DryRunHooks(on_host=lambda tensor: None, host_computes=torch.enable_grad)
    with offloading_dry_run(nothing):
        weight = nn.Parameter(torch.ones(3))
        optimizer = HostOptimizer([{"params": [weight]}], torch.optim.SGD, lr=0.5)
        state = optimizer.state_dict()
        with torch.no_grad():
            weight.fill_(7.0)  # those of a checkpoint
        optimizer.load_state_dict(state)
        weight.grad = torch.ones(3)
        optimizer.step()
    assert weight.tolist() == [6.5] * 3
