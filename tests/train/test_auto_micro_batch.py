"""micro_batch="auto": the number that is chosen, and the same training in parts where memory runs out all the same."""

import contextlib
import dataclasses
import functools
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import toy_tasks
from tests.forked import Forks
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.core.device import Device
from workbench.memory.analysis.fit import MARGIN
from workbench.memory.api import compare_memory, estimate_memory
from workbench.memory.ladder import memory_ladder
from workbench.memory.max_micro_batch import max_micro_batch
from workbench.memory.measure.at_oom import held
from workbench.programs.choose_micro_batch import choose_micro_batch
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task
from workbench.train import choose_micro_batch as choosing
from workbench.train import loop, split_on_oom
from workbench.train.ranks import Ranks
from workbench.train.split_on_oom import MicroBatchSplitter
from workbench.train.trainer import Trainer

train = functools.partial(loop.train, held=held, noise_log=NoiseLog)

CPU = torch.device("cpu")
HERE = Path(__file__)
MIB = 2**20


def spec_of(task: str = "toy", **knobs: Any) -> RunSpec:
    return RunSpec(**{"task": task, "device": "cpu", "micro_batch": 8, "steps": 4, **knobs})


def auto_of(task: str, **knobs: Any) -> RunSpec:
    return spec_of(f"{HERE}:{task}", micro_batch="auto", **knobs)


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """A process group of this process alone."""
    threads = torch.get_num_threads()
    yield Ranks.join(spec_of())
    dist.destroy_process_group()
    torch.set_num_threads(threads)


# --- models for which memory runs out


class Full(torch.autograd.Function):
    """Passes its input on, and raises in the backward if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradients[0], None


class Hungry(nn.Module):
    """As the toy network, with a buffer, which DDP sends around; it fails where `fails(samples, calls)` says so."""

    def __init__(self, where: str, fails: Callable[[int, int], bool]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(1))
        self.where, self.fails, self.calls = where, fails, 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        full = self.fails(len(x), self.calls)
        x = Full.apply(self.first(x).tanh() * self.scale, full and self.where == "backward")
        if full and self.where == "forward":
            torch.empty(2**50)
        out: Tensor = self.last(x)
        return out


def hungry(where: str, fails: Callable[[int, int], bool]) -> Task:
    """The loss may fail as well."""

    def loss(model: Any, batch: toy_tasks.Pair) -> Tensor:
        found = toy_tasks.squared_error(model, batch)
        if where == "loss" and fails(len(batch[0]), getattr(model, "module", model).calls):
            torch.empty(2**50)
        return found

    return toy_tasks.numbers(model=lambda: Hungry(where, fails), loss=loss)


def full_forward() -> Task:
    """Fails on rank 1 only, after its first call: in the model with more than ten samples, in the loss with more than five."""

    def on_rank_1(samples: int, calls: int) -> bool:
        return os.environ.get("RANK") == "1" and calls > 1 and samples > 5  # no fake run has that rank

    task = hungry("loss", on_rank_1)
    return dataclasses.replace(task, model=lambda: Hungry("forward", lambda samples, calls: samples > 10 and on_rank_1(samples, calls)))


def full_backward() -> Task:
    """In a first micro-batch, so that none waits in a reduction: its calls are odd, until one fails."""
    return hungry("backward", lambda samples, calls: os.environ.get("RANK") == "1" and calls == 3)


def never() -> Task:
    return hungry("", lambda samples, calls: False)


class Wide(nn.Module):
    """Holds 1 MiB per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, MIB // 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :1] * self.weight).square()


def wide() -> Task:
    return toy_tasks.numbers(model=Wide, loss=lambda model, batch: model(batch[0]).mean(), evaluate=None)


def streamed() -> Task:
    """Asks for its rank when it is read."""
    return toy_tasks.parted_stream()


# --- in parts


def trained(spec: RunSpec, task: Task, ranks: Ranks, *, halve: bool) -> tuple[Trainer, list[float], Tensor]:
    """The trainer after the spec's steps, the losses, and the weights."""
    trainer = Trainer(spec, task, ranks, split_on_oom=halve)
    batches = trainer.batches()
    losses = [trainer.step([next(batches) for _ in range(spec.accumulation)]).item() for _ in range(spec.steps)]
    return trainer, losses, torch.cat([weight.detach().flatten() for weight in trainer.module.parameters()])


@pytest.mark.parametrize("knobs", [{}, {"accumulation": 3}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_parts_train_as_the_whole_does(alone: Ranks, where: str, knobs: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(**knobs)
    _, expected, weights = trained(spec, never(), alone, halve=False)
    third = 3 if "accumulation" in knobs else 1
    trainer, losses, found = trained(spec, hungry(where, lambda samples, calls: samples > 4 and calls >= third), alone, halve=True)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(found, weights, atol=1e-7)
    assert trainer.splitter is not None
    assert trainer.splitter.largest == 4
    assert capsys.readouterr().out == "out of memory with 8 samples: split into 2 × 4 from now on\n"
    before = [8] * third
    again = [4] * 2 * third if where == "backward" else [4] * 2  # the step begins anew after a backward
    rest = spec.steps * spec.accumulation - third
    assert trainer.module.sizes == before + again + [4] * 2 * rest


def test_twice_in_a_row_and_parts_that_differ(alone: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(micro_batch=7, accumulation=2)
    _, expected, weights = trained(spec, never(), alone, halve=False)
    for where in ("forward", "backward"):
        trainer, losses, found = trained(spec, hungry(where, lambda samples, calls: samples > 2), alone, halve=True)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(found, weights, atol=1e-7)
        assert trainer.module.sizes[-4:] == [2, 2, 2, 1]
        assert capsys.readouterr().out.splitlines() == [
            "out of memory with 7 samples: split into 2 × up to 4 from now on",
            "out of memory with 4 samples: split into 4 × up to 2 from now on",
        ]


def test_without_an_error_nothing_is_different(alone: Ranks) -> None:
    for knobs in ({}, {"accumulation": 2, "find_unused_parameters": True}, {"precision": "amp_bf16", "gradient_as_bucket_view": True}):
        _, expected, weights = trained(spec_of(**knobs), never(), alone, halve=False)
        _, losses, found = trained(spec_of(**knobs), never(), alone, halve=True)
        assert losses == expected
        assert torch.equal(found, weights)


def test_what_is_raised_as_before(alone: Ranks) -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):  # one sample is too much
        trained(spec_of(), hungry("forward", lambda samples, calls: True), alone, halve=True)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):  # nobody asked for parts
        trained(spec_of(), hungry("forward", lambda samples, calls: samples > 4), alone, halve=False)
    with pytest.raises(ValueError, match="boom"):
        trained(spec_of(), toy_tasks.numbers(loss=_boom), alone, halve=True)
    assert Trainer(spec_of(parallel="fsdp"), toy_tasks.numbers(), alone, split_on_oom=True).splitter is None


@pytest.mark.parametrize(
    ("error", "splits"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (dist.DistBackendError("NCCL error …, unhandled cuda error …\nCuda failure 2 'out of memory'"), False),  # its peers are waiting
    ],
)
def test_which_errors_split_a_batch(alone: Ranks, error: RuntimeError, splits: bool) -> None:
    def loss(model: Any, batch: toy_tasks.Pair) -> Tensor:
        if len(batch[0]) > 4:
            raise error
        return toy_tasks.squared_error(model, batch)

    task = toy_tasks.numbers(loss=loss)
    with contextlib.nullcontext() if splits else pytest.raises(type(error)):
        trainer, _, _ = trained(spec_of(), task, alone, halve=True)
        assert trainer.splitter is not None
        assert trainer.splitter.largest == 4


def _boom(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("boom")


class ByHand:
    """A micro-step of plain functions, of which the second backward fails."""

    def __init__(self) -> None:
        self.module = self.model = nn.Linear(1, 1)
        self.backwards = 0

    def placed(self, batch: Tensor) -> Tensor:
        return batch

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch).mean()  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.backwards += 1
        if self.backwards == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss.backward()


def test_several_ranks_cannot_leave_a_reduction() -> None:
    steps = ByHand()
    halved = MicroBatchSplitter(steps, world_size=2)
    halved.micro_step(torch.ones(4, 1), last=False)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        halved.micro_step(torch.ones(4, 1), last=True)
    assert "other ranks wait in the reduction" in raised.value.__notes__[0]
    steps = ByHand()
    halved = MicroBatchSplitter(steps, world_size=2)
    halved.micro_step(torch.ones(4, 1), last=False)
    halved.micro_step(torch.full((4, 1), 2.0), last=False)  # nobody waits
    assert steps.module.weight.grad.item() == 3.0
    assert halved.largest == 2


@contextlib.contextmanager
def limited(spare: int) -> Iterator[None]:
    """Inside, this process gets no more than so many bytes of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_real_failed_allocation(alone: Ranks) -> None:
    spec = spec_of(micro_batch=64, steps=2)
    _, expected, weights = trained(spec, wide(), alone, halve=False)
    with limited(120 * MIB):
        trainer, losses, found = trained(spec, wide(), alone, halve=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(found, weights, atol=1e-6)
    assert trainer.splitter is not None
    assert trainer.splitter.largest is not None
    assert trainer.splitter.largest < 64


# --- parts of a batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    words: list[str]


@given(st.integers(2, 9), st.data())
def test_rows(count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    x, words = torch.arange(count * 3).view(count, 3), [str(i) for i in range(count)]

    def cut(batch: Any) -> Any:
        return split_on_oom.rows(batch, start, stop, count)

    assert torch.equal(cut(x), x[start:stop])
    assert torch.equal(cut(Pair(x, x + 1)).y, x[start:stop] + 1)
    record = cut(Record(x, words))
    assert (type(record), record.words) == (Record, words[start:stop])
    found = cut({"x": [x, x.numpy()], "scale": torch.tensor(2.0), "mask": torch.ones(1, 3), "name": "all", "none": None})
    assert np.array_equal(found["x"][1], x[start:stop].numpy())
    assert (found["scale"], found["mask"].shape, found["name"], found["none"]) == (2.0, (1, 3), "all", None)
    assert cut([x, torch.ones(count + 1)]) is None
    assert cut([x, object()]) is None


# --- the number


def test_the_chosen_number_is_the_largest_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    room, spec = 40 * MIB, auto_of("wide")
    monkeypatch.setattr(choosing, "available_memory", lambda device: room)
    ranks = Ranks.join(spec)
    train(spec, wide(), ranks, tmp_path)
    dist.destroy_process_group()  # fake runs have their own
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    chosen = rows[-1]["micro_batch"]
    limit = int(room * (1 - MARGIN))
    assert estimate_memory(spec, device="cpu", micro_batch=chosen).total <= limit
    assert estimate_memory(spec, device="cpu", micro_batch=chosen + 1).total > limit
    assert chosen == max_micro_batch(spec, "cpu", capacity=room).micro_batch
    assert rows[0]["samples"] == chosen < 64
    assert min(row["loss"] for row in rows[1:-1]) < rows[0]["loss"]
    assert f'micro_batch="auto": {chosen} samples, predicted to take' in (said := capfd.readouterr().out)
    assert "more would not fit" in said


def test_the_dataset_sets_a_limit() -> None:
    found = choose_micro_batch(auto_of("wide", accumulation=3), device="cpu", room=2**40)
    assert (found["micro_batch"], found["most"], found["stream"]) == (21, 21, False)
    assert "the dataset has no more for one optimizer step" in choosing.describe_choice(found)
    streams = choose_micro_batch(auto_of("streamed"), device="H200", room=2**40)
    assert (streams["micro_batch"], streams["stream"]) == (choosing.MAX_OF_STREAM, True)
    assert f"a stream gets no more than {choosing.MAX_OF_STREAM}" in choosing.describe_choice(streams)


def test_none_can_be_chosen() -> None:
    with pytest.raises(ValueError, match=r"one sample takes [\d,]+ bytes, and 950,000 may be used"):
        choose_micro_batch(auto_of("wide"), device="cpu", room=1_000_000)
    with pytest.raises(SpecError, match=r"one optimizer step takes at least 80 samples .*the dataset has 64"):
        choose_micro_batch(auto_of("wide", accumulation=80), device="cpu", room=2**40)


def test_a_choice_that_fails_says_why(alone: Ranks) -> None:
    with pytest.raises(SpecError, match=r'"auto": none could be chosen: .*has no function .nothing.*Give a number, such as micro_batch=32'):
        train(auto_of("nothing"), wide(), alone, Path("nowhere"))


def test_a_process_that_breaks_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert choosing.estimate_in_subprocess(auto_of("wide"), CPU, 1)["error"].startswith("the estimate broke down with exit code 1")


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = choosing.available_main_memory()
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = {"memory.max": "5000\n", "memory.current": "3000\n", "memory.stat": "anon 2000\ninactive_file 700\n"}
    monkeypatch.setattr(choosing, "control_groups", lambda controller, names, old: [tuple(files[name] for name in names)])
    assert choosing.available_main_memory() == 2700
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choosing.available_memory(CPU) == 1350
    files["memory.max"] = "max\n"
    assert abs((choosing.available_main_memory() or 0) - free) < free / 2
    monkeypatch.setattr(choosing, "available_main_memory", lambda: None)
    with pytest.raises(SpecError, match="does not tell how much memory is free; give a number"):
        choosing.available_memory(CPU)


@pytest.mark.parametrize(
    ("name", "hip", "capability", "flops"),
    [("NVIDIA A100-SXM4-40GB", None, (8, 0), 312e12), ("NVIDIA Z9", None, (8, 0), None), ("AMD Instinct MI300X", "6.4", None, 1307.4e12)],
)
def test_a_gpu_itself_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None, capability: tuple[int, int] | None, flops: float | None
) -> None:
    properties = SimpleNamespace(name=name, total_memory=42_000_000_000, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    fields = json.loads(json.dumps(choosing.described_device(torch.device("cuda", 0))))
    device = Device(**fields)
    assert (device.memory, device.capability, device.flops_per_sec.get("bf16")) == (42_000_000_000, capability, flops)
    assert choosing.described_device(CPU) == "cpu"


def test_the_capability_of_a_gpu_that_no_table_has_counts() -> None:
    given: dict[str, Any] = {"name": "NVIDIA Z9", "memory": 2**34, "bandwidth": 0.0, "flops_per_sec": {}, "source": "test"}
    hopper, turing = (Device(**given, capability=capability) for capability in ((9, 0), (7, 5)))
    spec = spec_of("text-gpt", micro_batch=2)
    totals = [estimate_memory(spec, device=device).total for device in (hopper, "H200", turing, "T4")]
    assert totals[0] == totals[1] > totals[2] == totals[3]
    assert choose_micro_batch(auto_of("wide"), device=hopper, room=2**40)["micro_batch"] == 64


# --- where a number is needed


def test_where_a_number_is_needed(alone: Ranks) -> None:
    spec = auto_of("wide")
    assert RunSpec.from_json(spec.to_json()) == spec
    assert spec.replace(micro_batch=4).changes(spec)["micro_batch"] == (4, "auto")
    with pytest.raises(SpecError, match='a whole number of at least 1 is allowed, or "auto"'):
        spec_of(micro_batch="most")
    for needs in (
        lambda: spec.global_batch,
        lambda: estimate_memory(spec),
        lambda: memory_ladder(spec, "H200"),
        lambda: compare_memory(spec, {"precision": ["amp_bf16"]}),
        lambda: Trainer(spec, wide(), alone),
    ):
        with pytest.raises(SpecError, match=r'"auto" is chosen when a run starts .*wb\.max_micro_batch\(spec, device\)'):
            needs()


# --- two ranks


@pytest.mark.slow
def test_one_of_two_ranks_runs_out_of_memory(by_hand: Callable[..., Any], forks: Forks, tmp_path: Path) -> None:
    """In a forward, after it in the loss, and in a backward that reduces nothing; with DDP's buffers going around all the time."""
    specs = [
        auto_of("full_forward", nproc_per_node=2),
        auto_of("full_backward", nproc_per_node=2, accumulation=2),
        spec_of(f"{HERE}:never", nproc_per_node=2, micro_batch=32),
    ]
    made = [by_hand(spec=spec.replace(evaluate=True).to_json()) for spec in specs]
    done = forks.train(2, tmp_path, *(directory.path for directory in made))
    assert done.returncode == 0, done.stderr
    runs = [Run.load(directory.path) for directory in made]
    assert [run.state for run in runs] == ["finished"] * 3, [run.error for run in runs]
    chosen = [run.metrics["micro_batch"].iloc[-1] for run in runs[:2]]
    assert chosen == [32, 16]
    ends = [[value for name, value in run.metric_rows[-1].items() if name[0] == "p"] for run in runs]
    for end in ends[:2]:
        assert end == pytest.approx(ends[2], abs=1e-6)
    said = [line for line in done.stdout.splitlines() if "out of memory with" in line]
    assert [line.partition("with ")[2] for line in said] == [
        "32 samples: split into 2 × 16 from now on",
        "16 samples: split into 4 × 8 from now on",
        "8 samples: split into 8 × 4 from now on",
        "16 samples: split into 2 × 8 from now on",
    ]
