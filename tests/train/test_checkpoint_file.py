"""Checkpoint files: whatever becomes of one, it is loaded as it was written, or passed over with the reason."""

import collections
import contextlib
import dataclasses
import enum
import errno
import functools
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from tests import toy_tasks
from tests.forked import Forks
from tests.train.test_checkpoints import spec_of, train
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.runs.spec import RunSpec
from workbench.runs.task import TaskError
from workbench.train import checkpoint_file, loop
from workbench.train.checkpoint_file import MARK, UnusableCheckpointError
from workbench.train.checkpoints import Checkpoints
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor
from workbench.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trainer(alone: Ranks) -> Trainer:
    return Trainer(RunSpec(task="toy", device="cpu", micro_batch=8, optimizer="adam(lr=0.01)"), toy_tasks.numbers(), alone)


@pytest.fixture
def checkpoints(alone: Ranks, trainer: Trainer, tmp_path: Path) -> Checkpoints:
    """With those of steps 6 and 12."""
    checkpoints = Checkpoints(tmp_path, alone, 6)
    for step in (6, 12):
        checkpoints.write(step, trainer)
    return checkpoints


def file_of(run_dir: Path, step: int) -> Path:
    return run_dir / run_directory.CHECKPOINTS / f"step{step:08d}.pt"


def without_checksum(data: bytes) -> bytes:
    """The file as an earlier workbench wrote it."""
    data = data[: data.index(MARK)]
    return data[:-2] + b"\0\0"


def same(one: Any, other: Any) -> bool:
    (leaves, tree), (others, of_other) = tree_flatten(one), tree_flatten(other)
    return tree == of_other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


def damaged(data: bytes, chance: random.Random) -> bytes:
    """What may become of a file: an end that is missing, zeros, bits turned over, blocks of something else, text behind it."""
    kind, size = chance.randrange(7), len(data)
    at = chance.randrange(size)
    length = min(size - at, chance.choice((1, 4, 512, 4096, size)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(size - at)  # the length was written, the content was not
    if kind == 2:
        return data[:at] + bytes(length) + data[at + length :]
    if kind == 3:
        return data[:at] + chance.randbytes(length) + data[at + length :]
    if kind == 4:
        return data + chance.randbytes(length)
    if kind == 5:
        return data[:at] + data[at + length :]
    bits = bytearray(data)
    for _ in range(chance.choice((1, 2, 32))):
        bits[chance.randrange(size)] ^= 1 << chance.randrange(8)
    return bytes(bits)


def check_damage(checkpoints: Checkpoints, alone: Ranks, tmp_path: Path, trials: int) -> None:
    """Damage the last checkpoint in many ways; neither is it loaded other than it was, nor does it stand in the way of the one before."""
    last, before = (checkpoint_file.load(file_of(tmp_path, step), CPU) for step in (12, 6))
    path = file_of(tmp_path, 12)
    new = path.read_bytes()
    chance, passed_over = random.Random(7), 0
    for number in range(trials):
        data = without_checksum(new) if number % 3 == 0 else new
        path.write_bytes(damaged(data, chance))
        latest = Checkpoints(tmp_path, alone, 6).latest()
        assert latest
        loaded, state = latest
        assert same(state, last if loaded == path else before), number
        passed_over += loaded != path
    assert passed_over > 0.8 * trials  # a bit of padding that is another, or text behind an old file, harms nobody


def test_a_damaged_one_is_never_loaded_and_never_in_the_way(checkpoints: Checkpoints, alone: Ranks, tmp_path: Path) -> None:
    check_damage(checkpoints, alone, tmp_path, 30)


@pytest.mark.slow
def test_a_damaged_one_is_never_loaded_and_never_in_the_way_in_200_trials(checkpoints: Checkpoints, alone: Ranks, tmp_path: Path) -> None:
    check_damage(checkpoints, alone, tmp_path, 200)


def test_four_bytes_of_a_weight_that_have_changed_are_noticed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = file_of(tmp_path, 12)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        name = max(archive.infolist(), key=lambda part: part.file_size).filename
        at = whole.index(archive.read(name)) + 8
    changed = whole[:at] + b"\0\0\0\x3f" + whole[at + 4 :]
    for data in (changed, without_checksum(changed)):
        path.write_bytes(data)
        torch.load(path, weights_only=True)  # which does not look
        with pytest.raises(UnusableCheckpointError, match="content has changed since it was written"):
            checkpoint_file.load(path, CPU)


def test_the_checksum_is_in_the_file_and_others_read_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = file_of(tmp_path, 12)
    with zipfile.ZipFile(path) as archive:
        told = json.loads(archive.comment.removeprefix(MARK))
        assert archive.testzip() is None
        assert told.keys() == {"format", "bytes", "crc32"}
        assert told["bytes"] == path.stat().st_size - len(archive.comment)
    state = checkpoint_file.load(path, CPU)
    assert same(torch.load(path, weights_only=True), state)
    path.write_bytes(without_checksum(path.read_bytes()))
    assert same(checkpoint_file.load(path, CPU), state)


def of_format_3(data: bytes) -> bytes:
    return data.replace(b'"format": 1', b'"format": 3')


def saved(value: Any) -> Callable[[bytes], bytes]:
    def of(_: bytes) -> bytes:
        import io

        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    return of


@pytest.mark.parametrize(
    ("become", "why", "kind"),
    [
        (lambda data: b"", "it is empty", "damaged"),
        (lambda data: bytes(len(data)), "it is not a zip file, as torch.save writes: it begins with zeros", "damaged"),
        (lambda data: b"no checkpoint", "it begins with b'no c'", "damaged"),
        (lambda data: data[: len(data) // 2], "its end is missing", "damaged"),
        (lambda data: data[:-3], "its checksum is damaged", "damaged"),
        (lambda data: data.replace(b"optimizer", b"0ptimizer", 1), "content has changed", "damaged"),
        (lambda data: data[:100] + data[101:], "bytes, and was written with", "damaged"),
        (of_format_3, "of format 3, of a newer workbench; this one reads formats up to 2", "newer"),
        (saved({"weights": torch.ones(3)}), "it is not a checkpoint of the workbench: it has no module, optimizer", "foreign"),
        (saved(torch.ones(3)), "it is not a checkpoint of the workbench: it holds a Tensor", "foreign"),
        (saved({"step": Path("/")}), "it holds objects other than tensors, numbers and strings", "foreign"),
    ],
)
def test_what_is_passed_over_says_why(
    checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    become: Callable[[bytes], bytes], why: str, kind: str,
) -> None:  # fmt: skip
    path = file_of(tmp_path, 12)
    path.write_bytes(become(path.read_bytes()))
    latest = checkpoints.latest()
    assert latest
    assert path.exists()  # until the run goes on
    assert checkpoints.resume(trainer, latest) == 6
    assert path.with_name(f"{path.name}.{kind}").exists()
    (row,) = run_directory.LineTail(tmp_path / run_directory.RESUMES).read()
    assert (row["step"], row["checkpoint"]) == (6, "step00000006.pt")
    assert why in row["passed_over"]["step00000012.pt"]
    assert f"step00000012.pt is {kind} and passed over: " in capsys.readouterr().out


def test_one_of_another_step_or_model_is_passed_over(checkpoints: Checkpoints, alone: Ranks, trainer: Trainer, tmp_path: Path) -> None:
    file_of(tmp_path, 18).write_bytes(file_of(tmp_path, 12).read_bytes())
    wider = toy_tasks.numbers(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
    Checkpoints(tmp_path, alone, 6).write(12, Trainer(RunSpec(task="toy", device="cpu", micro_batch=8), wider, alone))
    assert checkpoints.resume(trainer, checkpoints.latest()) == 6
    (row,) = run_directory.LineTail(tmp_path / run_directory.RESUMES).read()
    assert row["passed_over"] == {
        "step00000018.pt": "it is of step 12",
        "step00000012.pt": "it is of another model: its 0.weight has the shape (16, 4), this model's has (8, 4)",
    }


def test_a_buffer_that_grows_is_of_the_same_model(alone: Ranks, tmp_path: Path) -> None:
    """As those of torch's observers: the model itself knows what it can load."""

    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, batch: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, batch.detach().mean(0)])
            return batch

        def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
            self.seen = state[f"{prefix}seen"].clone()
            super()._load_from_state_dict(state, prefix, *more)

    task = toy_tasks.numbers()
    observed = dataclasses.replace(task, model=lambda: nn.Sequential(Observer(), task.model()))
    made, again = (Trainer(RunSpec(task="toy", device="cpu", micro_batch=8), observed, alone) for _ in range(2))
    made.step([next(iter(made.loader))])
    Checkpoints(tmp_path, alone, 1).write(1, made)
    checkpoints = Checkpoints(tmp_path, alone, 1)
    assert checkpoints.resume(again, checkpoints.latest()) == 1
    assert again.module[0].seen.numel() == 4  # type: ignore[index]


def test_where_none_fits_the_model_nothing_is_changed(checkpoints: Checkpoints, alone: Ranks, tmp_path: Path) -> None:
    other = Trainer(RunSpec(task="toy", device="cpu"), toy_tasks.numbers(model=lambda: torch.nn.Linear(4, 2)), alone)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(run_directory.DamagedRunError, match=r"it has no weight\). The run was not changed"):
        checkpoints.resume(other, checkpoints.latest())
    assert sorted(tmp_path.rglob("*")) == before


# --- the disk


class Disk:
    """A file on a disk with room for some bytes; what did not fit is refused when it is written, or when it is flushed."""

    def __init__(self, room: int, code: int, path: Path, mode: str) -> None:
        self._file, self._room, self._code = open(path, mode), room, code  # noqa: SIM115

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(self._code, os.strerror(self._code))
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Disk":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_a_full_disk_is_named_wherever_it_is_met_and_the_others_stay(
    checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reports its first failed write as "unexpected pos 3136 vs 3030"."""
    size = file_of(tmp_path, 12).stat().st_size
    for room in range(0, size, size // 20):
        monkeypatch.setattr(checkpoint_file, "open", functools.partial(Disk, room, errno.ENOSPC), raising=False)
        with pytest.raises(run_directory.DiskFullError, match=r"no space to write .*step00000018.pt \(free there: [\d,]+ bytes, and a ch"):
            checkpoints.write(18, trainer)
    monkeypatch.setattr(checkpoint_file, "open", functools.partial(Disk, size // 2, errno.EIO), raising=False)
    with pytest.raises(OSError, match="Input/output error") as raised:
        checkpoints.write(18, trainer)
    assert not isinstance(raised.value, run_directory.DiskFullError)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / run_directory.CHECKPOINTS).iterdir()) == ["step00000006.pt", "step00000012.pt"]
    assert checkpoints.latest()


def test_a_real_limit_of_files_is_named(checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path) -> None:
    size, limits = file_of(tmp_path, 12).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(run_directory.DiskFullError, match="files of this process have a limit"):
            checkpoints.write(18, trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoints.latest()


def test_an_interrupt_while_it_is_written_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch goes on writing after the exception, and ends with "unexpected pos 2048 vs 1942"."""
    calls, crc32 = iter(range(10**6)), zlib.crc32

    def interrupted(data: bytes, *more: int) -> int:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return crc32(data, *more)

    monkeypatch.setattr(checkpoint_file.zlib, "crc32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_file.save({"step": 1, "module": torch.zeros(4)}, tmp_path / "step00000001.pt")


@pytest.mark.parametrize(
    "entry", [{"random": [1]}, {"random": {0: 7}}, {"rows": "x"}, {"rows": {0: 1}}, {"best": [1.0]}, {"best": (1.0, "x")}]
)
def test_one_whose_entries_have_other_types_is_foreign(
    checkpoints: Checkpoints, alone: Ranks, tmp_path: Path, entry: dict[str, Any]
) -> None:
    path = file_of(tmp_path, 12)
    checkpoint_file.save(torch.load(path, weights_only=True) | entry, path)
    with pytest.raises(UnusableCheckpointError, match=f"its {next(iter(entry))} is") as raised:
        checkpoint_file.load(path, CPU)
    assert raised.value.kind == "foreign"
    latest = Checkpoints(tmp_path, alone, 6).latest()
    assert latest
    assert latest[0] == file_of(tmp_path, 6)


def train_on_a_disk_that_refuses(folder: str, how: str, spec: str) -> None:
    """The file system of the checkpoints is full, or read-only, from step 8 to step 14. On each rank."""
    path, given = Path(folder), RunSpec.from_json(json.loads(spec))
    disk = path / run_directory.CHECKPOINTS
    filler, ranks, steps = disk / "filler", Ranks.join(given), itertools.count(1)

    def refuse(now: bool) -> None:
        if how == "read-only":
            subprocess.run(["mount", "-o", f"remount,{'ro' if now else 'rw'}", disk], check=True)
        elif now:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(512))
        else:
            filler.unlink()

    def loss(model: nn.Module, batch: toy_tasks.Pair) -> Tensor:
        step = next(steps)
        if step in (8, 14) and not ranks.rank:
            while any(thread.name == f"checkpoint of step {step // 6 * 6}" for thread in threading.enumerate()):
                time.sleep(0.01)
            refuse(step == 8)
        return toy_tasks.squared_error(model, batch)

    loop.train(given, toy_tasks.numbers(loss=loss), ranks, path, held=held, noise_log=NoiseLog)
    Ranks.leave()


@pytest.mark.parametrize(
    ("how", "knobs"),
    [
        ("full", {}),
        ("full", {"parallel": "zero1", "nproc_per_node": 2}),
        ("read-only", {"nproc_per_node": 2}),
        ("read-only", {"parallel": "fsdp", "nproc_per_node": 2}),
    ],
    ids=str,
)
def test_a_disk_that_refuses_for_a_while_costs_one_checkpoint(
    forks: Forks, alone: Ranks, tmp_path: Path, how: str, knobs: dict[str, Any]
) -> None:
    """A real file system, which is filled, or mounted anew as read-only, while the training goes on."""
    disk = tmp_path / "run" / run_directory.CHECKPOINTS
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    spec = RunSpec(task="toy", device="cpu", micro_batch=8, steps=20, checkpoint_every=6, **knobs)
    code = f"from {__name__} import *\ntrain_on_a_disk_that_refuses({str(disk.parent)!r}, {how!r}, {json.dumps(spec.to_json())!r})"
    try:
        done = forks.ranks(spec.world_size, tmp_path, "-c", code)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in disk.glob("step????????.pt")) == ["step00000006.pt", "step00000018.pt"]
        assert not list(disk.glob("step00000012*"))
        rows = run_directory.LineTail(disk.parent / run_directory.METRICS).read()
        assert [row["step"] for row in rows if "lr" in row] == list(range(1, 21))
        notes = [row["note"] for row in run_directory.LineTail(disk.parent / "rank0.jsonl").read() if "note" in row]
        (note,) = [note for note in notes if "checkpoint" in note]
        assert "the checkpoint after step 12 could not be written, and the last is step00000006.pt: " in note
        assert ("make room, or start the run with runs_dir=" if how == "full" else f"make {disk} writable") in note
        assert note.endswith("The training goes on, and the next is tried after step 18")
        last = Checkpoints(disk.parent, alone, 6).latest()
        assert last
        assert last[1]["step"] == 18
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


class Kind(enum.IntEnum):
    FIRST = 1


class Text(str):
    pass


Size = collections.namedtuple("Size", "height width")


class OwnTensor(Tensor):
    pass


class Keeping(nn.Linear):
    """Has a state of its own."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


def keeping(kept: Any) -> nn.Module:
    last = Keeping(4, 2)
    last.kept = kept
    return nn.Sequential(nn.Linear(4, 4), last)


PLAIN = [
    (np.float64(0.1), 0.1),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (Kind.FIRST, 1),
    (Text("a"), "a"),
    (np.str_("b"), "b"),
    ([np.float64(1.0), (Kind.FIRST, None)], [1.0, (1, None)]),
    ({Kind.FIRST: np.float64(2.0)}, {1: 2.0}),
    (collections.OrderedDict(a=np.int64(1)), collections.OrderedDict(a=1)),
    (collections.Counter("aab"), collections.Counter("aab")),
    (collections.defaultdict(int, a=1), {"a": 1}),
    ({1, 2}, {1, 2}),
    (torch.Size((2, 3)), torch.Size((2, 3))),
    (torch.float16, torch.float16),
    (10**30, 10**30),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN)
@pytest.mark.parametrize("tensors", [True, False])
def test_what_a_checkpoint_holds_of_a_value_is_loaded(tmp_path: Path, value: Any, expected: Any, tensors: bool) -> None:
    checkpoint_file.save({"value": checkpoint_file.Copies(tensors=tensors)(value)}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)["value"]
    assert loaded == expected
    assert type(loaded) is type(expected)
    assert [type(each) for each in tree_leaves(loaded)] == [type(each) for each in tree_leaves(expected)]


def test_copies_of_tensors_are_as_many_as_there_were(tmp_path: Path) -> None:
    dense, sparse = torch.arange(4.0), torch.eye(3).to_sparse()
    copied = checkpoint_file.Copies()({"a": dense, "b": dense.view(4), "c": sparse, "d": torch.eye(3).to_sparse()})
    assert copied["a"] is copied["b"]
    assert copied["a"] is not dense
    assert copied["c"] is not copied["d"]
    checkpoint_file.save(copied, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["c"].to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [0, np.zeros(2)]}, r"module\.a\.1 could not be loaded again: it is a numpy\.ndarray"),
        (Path("/"), r"module could not be loaded again: it is a pathlib\.PosixPath"),
        ({"size": Size(1, 2)}, r"module\.size could .* it is a tests\.train\.test_checkpoint_file\.Size"),
        ({("m", "w", "step"): lambda: 0}, r"module\.m\.w\.step could .* it is a builtins\.function"),
        ({"w": OwnTensor([1.0])}, r"module\.w could .* it is a tests\.train\.test_checkpoint_file\.OwnTensor"),
        ({Path("/"): 0}, r"it is a pathlib\.PosixPath"),
    ],
)
@pytest.mark.parametrize("tensors", [True, False])
def test_what_cannot_be_loaded_again_is_refused_by_name(value: Any, said: str, tensors: bool) -> None:
    with pytest.raises(TaskError, match=said):
        checkpoint_file.Copies(tensors=tensors)(value, "module")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "zero1"])
def test_a_training_whose_checkpoints_could_not_be_loaded_ends_before_its_first_step(alone: Ranks, tmp_path: Path, parallel: str) -> None:
    """And one whose first state of that kind comes later, at the first checkpoint that would have it."""
    spec, task = spec_of(parallel=parallel), toy_tasks.numbers(model=lambda: keeping(None))
    steps = run_directory.LineTail(tmp_path / run_directory.METRICS)

    def later(model: nn.Module, batch: Any) -> Tensor:
        next(part for part in model.modules() if isinstance(part, Keeping)).kept = np.zeros(1)
        return toy_tasks.squared_error(model, batch)

    with pytest.raises(TaskError, match=r"module\.1\._extra_state\.kept .*numpy\.ndarray.* in get_extra_state\(\).* checkpoint_every=None"):
        train(spec, dataclasses.replace(task, loss=later), alone, tmp_path)
    assert len(steps.read()) == 6
    assert not list(tmp_path.glob("checkpoints/*.pt"))
    (tmp_path / "first").mkdir()
    with pytest.raises(TaskError, match=r"module\.1\._extra_state\.kept could not be loaded again"):
        train(spec, dataclasses.replace(task, model=lambda: keeping(np.zeros(1))), alone, tmp_path / "first")
    assert not (tmp_path / "first" / run_directory.METRICS).exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "zero1"])
@pytest.mark.parametrize("lr", [np.float64(0.01), np.float32(0.01)])
def test_a_learning_rate_of_numpy_goes_on_bit_for_bit(alone: Ranks, tmp_path: Path, parallel: str, lr: Any) -> None:
    task = toy_tasks.numbers(optimizer=lambda weights: torch.optim.AdamW(weights, lr=lr, betas=(np.float64(0.9), np.float64(0.99))))
    spec = spec_of(parallel=parallel, schedule="cosine")
    uninterrupted = train(spec, task, alone, tmp_path)
    for file in (tmp_path / run_directory.CHECKPOINTS).glob("step00000018*"):
        file.unlink()
    again = train(spec, task, alone, tmp_path)
    for one, other in zip(again.parameters(), uninterrupted.parameters(), strict=True):
        assert torch.equal(full_tensor(one), full_tensor(other))
