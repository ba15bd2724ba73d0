"""The training program: exact equivalences, schedules, precision, batches, metrics, and what it says when a task is wrong."""

import collections
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import toy_tasks
from tests.forked import Forks
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.programs import train as program
from workbench.runs.root_cause import first_failure
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task, TaskError
from workbench.runs.training_knobs import lr_factor, parse_optimizer
from workbench.train import loop, sharding
from workbench.train.loader import to_device
from workbench.train.optimizers import build_optimizer, build_scheduler
from workbench.train.precision import Precision
from workbench.train.ranks import Ranks, choose_backend, choose_device, why_no_gpu

train = functools.partial(loop.train, held=held, noise_log=NoiseLog)

CPU = torch.device("cpu")
TOYS = Path(toy_tasks.__file__)


def spec_of(task: str = "numbers", **knobs: Any) -> RunSpec:
    return RunSpec(task=f"{TOYS}:{task}", **{"device": "cpu", "micro_batch": 8, "steps": 6, **knobs})


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """A process group of this process alone."""
    yield Ranks.join(spec_of())
    dist.destroy_process_group()


Make = Callable[..., Any]


def metrics(path: Path) -> list[dict[str, Any]]:
    return run_directory.LineTail(path / run_directory.METRICS).read()


def parameters(path: Path) -> list[float]:
    """The parameters that a run of the toy task ended with."""
    return [value for name, value in metrics(path)[-1].items() if name[0] == "p"]


def train_alone(spec: RunSpec, ranks: Ranks, run_dir: Path, task: Task | None = None) -> Path:
    run_dir.mkdir()
    train(spec, task or toy_tasks.numbers(), ranks, run_dir)
    return run_dir


# --- equivalences


@pytest.mark.slow
def test_a_sweep_of_two_ranks(by_hand: Make, tmp_path: Path, alone: Ranks, forks: Forks) -> None:
    """One launch: two ranks equal one, a stream must be dealt out, and a configuration that fails leaves the next alone."""
    specs = [
        spec_of(evaluate=True),
        spec_of("shared_stream"),
        spec_of("parted_stream", evaluate=True),
        spec_of("too_large"),
        spec_of(micro_batch=64),
        spec_of(micro_batch=4, accumulation=2, num_workers=1, evaluate=True),
        *[spec_of("validated", micro_batch=4, evaluate=True, parallel=parallel) for parallel in ("ddp", "fsdp")],
        spec_of("validated", micro_batch=4, evaluate="every(steps=2)", ema=0.9),
        spec_of("validated", micro_batch=4, evaluate="every(steps=2)"),
        *[spec_of(task, micro_batch=2, steps=9) for task in ("uneven", "uneven_stream")],
    ]
    made = [by_hand(spec=spec.replace(nproc_per_node=2).to_json()) for spec in specs]
    done = forks.train(2, tmp_path, *(directory.path for directory in made))
    assert done.returncode == 0, done.stderr
    runs = [Run.load(directory.path) for directory in made]
    assert [run.state for run in runs] == ["finished", "failed", "finished", "failed", "failed", *["finished"] * 7]
    errors = [run.error for run in runs if run.error]
    assert "gives several ranks the same samples" in errors[0].message
    assert errors[1].kind == "out-of-memory"
    assert "dataset has 64: try micro_batch=32" in errors[2].message
    assert [len(timeline.steps) for timeline in runs[0].timelines] == [6, 6]

    expected = parameters(train_alone(spec_of(micro_batch=16, evaluate=True), alone, tmp_path / "one"))
    accumulated = parameters(train_alone(spec_of(micro_batch=8, accumulation=2, evaluate=True), alone, tmp_path / "two"))
    assert len(expected) == 58
    assert accumulated == pytest.approx(expected, abs=1e-5)
    assert parameters(runs[0].path) == pytest.approx(expected, abs=1e-5)
    assert parameters(runs[5].path) == pytest.approx(expected, abs=1e-5)
    check_validations(runs[6:10])
    for run in runs[10:]:  # no rank waits for a batch that another does not have: three epochs of 3 steps, or of 4 and 3
        assert [len(timeline.steps) for timeline in run.timelines] == [9, 9]
    start = torch.cat([p.flatten() for p in toy_tasks.network().parameters()]).tolist()
    assert expected != pytest.approx(start, abs=1e-2)  # it has gone somewhere


def check_validations(runs: list[Run]) -> None:
    """13 samples in batches of 4 on two ranks: one has 8, the other 5. Each counts once."""
    ddp, fsdp, average, often = runs
    for run in (ddp, average, often):
        *_, row = run_directory.LineTail(run.path / run_directory.EVALUATIONS).read()
        figures = row["figures"]
        model = toy_tasks.network()
        values = torch.tensor([figures[f"p{i}"] for i in range(58)])
        torch.nn.utils.vector_to_parameters(values, model.parameters())
        expected = toy_tasks.classify(model.eval(), torch.utils.data.default_collate(list(toy_tasks.Numbers(13))))
        assert row["samples"] == sum(entry["count"] for entry in row["classes"].values()) == 13
        assert figures["error"] == pytest.approx(expected["error"].mean().item(), rel=1e-5)
        right = (expected["logits"].argmax(1) == expected["targets"]).double()
        assert figures["accuracy"] == pytest.approx(right.mean().item())
        of_ranks = [right[[0, 1, 2, 3, 8, 9, 10, 11]].mean().item(), right[[4, 5, 6, 7, 12]].mean().item()]
        assert figures["accuracy"] != pytest.approx(sum(of_ranks) / 2)  # the average of the ranks' averages is wrong
        losses = torch.nn.functional.cross_entropy(expected["logits"], expected["targets"], reduction="none")
        assert [each["index"] for each in row["worst"]] == losses.topk(10).indices.tolist()
        assert len(row["seconds"]) == 2
    shared, whole = (run_directory.LineTail(run.path / run_directory.EVALUATIONS).read()[-1] for run in (fsdp, ddp))
    assert shared["samples"] == 13
    assert shared["figures"] == pytest.approx({name: whole["figures"][name] for name in shared["figures"]}, abs=1e-6)
    assert parameters(often.path) == parameters(ddp.path)  # bit for bit
    assert parameters(average.path) != pytest.approx(parameters(ddp.path), abs=1e-4)
    assert [row["step"] for row in metrics(often.path) if "accuracy" in row] == [2, 4, 6]
    assert [len(timeline.validations) for timeline in often.timelines] == [3, 3]


@pytest.mark.slow
def test_a_launch_ends_when_ranks_cannot_agree(by_hand: Make, forks: Forks, tmp_path: Path) -> None:
    """One rank fails, the other waits for its gradients: the one at fault is on record, and no configuration can follow."""
    made = [by_hand(spec=spec_of(task, nproc_per_node=2).to_json()).path for task in ("numbers", "boom_on_rank_1", "numbers")]
    done = forks.train(2, tmp_path, *made)
    assert done.returncode != 0
    assert Run.load(made[0]).ok
    found = first_failure(made[0].parent, {"state": "failed"})
    assert found is not None
    assert (found.rank, found.message) == (1, "ValueError: boom")
    assert not metrics(made[2])


def test_gradients_are_reduced_once_per_step(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = []

    class Counting(DistributedDataParallel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.register_comm_hook(None, self.hook)

        @staticmethod
        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            reduced.append(bucket.index())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

    monkeypatch.setattr(sharding, "_WithAttributes", Counting)
    train_alone(spec_of(accumulation=4, micro_batch=4, steps=3), alone, tmp_path / "run")
    assert reduced == [0, 0, 0]


def test_each_epoch_has_its_own_order_and_repeats_nothing(alone: Ranks, tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: toy_tasks.Pair) -> Tensor:
        seen.extend(int((toy_tasks.Numbers().inputs == row).all(1).nonzero()) for row in batch[0])
        return toy_tasks.squared_error(model, batch)

    train_alone(spec_of(steps=16), alone, tmp_path / "run", toy_tasks.numbers(loss=loss))
    first, second = seen[:64], seen[64:]
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


def test_an_epoch_ends_with_a_whole_step(alone: Ranks, tmp_path: Path) -> None:
    counts: collections.Counter[float] = collections.Counter()

    def loss(model: nn.Module, batch: toy_tasks.Pair) -> Tensor:
        counts.update(batch[0][:, 0].tolist())
        return toy_tasks.squared_error(model, batch)

    task = toy_tasks.numbers(loss=loss, dataset=lambda: toy_tasks.Numbers(44))  # 5 micro-batches of 8; two steps of 2 fit
    train_alone(spec_of(accumulation=2, steps=2), alone, tmp_path / "run", task)
    assert len(counts) == 32
    assert set(counts.values()) == {1}


def test_the_seed_decides(alone: Ranks, tmp_path: Path) -> None:
    ends = [parameters(train_alone(spec_of(seed=seed, evaluate=True), alone, tmp_path / f"{i}")) for i, seed in enumerate((1, 1, 2))]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


# --- learning rate, optimizers, precision


@given(st.integers(1, 300), st.integers(0, 100))
def test_schedule_in_closed_form(steps: int, warmup_steps: int) -> None:
    spec = spec_of(steps=steps, warmup_steps=warmup_steps, schedule="cosine")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = build_scheduler(optimizer, spec)
    for step in range(steps):
        if step < warmup_steps:
            expected = 0.5 * (step + 1) / warmup_steps
        else:
            expected = 0.25 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)
        assert expected > 0  # no step is wasted
        optimizer.step()
        scheduler.step()


def test_constant_schedule_stays_at_its_peak() -> None:
    assert [lr_factor(step, steps=5, warmup_steps=2, schedule="constant") for step in range(5)] == [0.5, 1, 1, 1, 1]


def test_the_report_has_the_learning_rate_of_each_step(alone: Ranks, tmp_path: Path) -> None:
    rows = metrics(train_alone(spec_of(lr=0.2, warmup_steps=4, schedule="cosine"), alone, tmp_path / "run"))
    assert [row["lr"] for row in rows] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.1])
    assert [(row["step"], row["steps"], row["samples"]) for row in rows] == [(i, 6, 8 * i) for i in range(1, 7)]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(rows))


def test_optimizers_by_name() -> None:
    model = toy_tasks.network()
    sgd = build_optimizer(model, "adamw", override="sgd(lr=0.5, momentum=0.9, nesterov=True)")
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.5, 0.9)
    assert build_optimizer(model, "AdamW(betas=(0.5, 0.6))", lr=0.25).defaults["betas"] == (0.5, 0.6)
    assert build_optimizer(model, "sgd(lr=1.0)", lr=0.25).param_groups[0]["lr"] == 0.25
    own = build_optimizer(model, lambda parameters: torch.optim.Adam(parameters, lr=9.0), lr=0.25)
    assert own.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sdg", r"no optimizer 'sdg'; did you mean 'sgd'\? Allowed are adafactor, adagrad, adam,"),
        ("sgd(momentun=0.9)", r"sgd has no option 'momentun'; it has momentum, dampening,"),
        ("sgd(0.1)", r"give each option its name"),
        ("sgd(lr=open('x'))", r"lr=open\('x'\) is not a plain value"),
        ("sgd(lr=0.1", r'expected a name, with options if you like: "sgd\(lr=0.1, momentum=0.9\)"'),
        ("torch.optim.SGD()", r"expected a name"),
        ("sgd(lr=-1.0)", r"sgd refuses it: Invalid learning rate: -1.0"),
        ("sgd(**{})", r"sgd has no option None"),
    ],
)
def test_wrong_optimizers_say_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_optimizer(toy_tasks.network(), text)


@given(st.floats(allow_nan=False, allow_infinity=False), st.booleans())
def test_options_are_read_back(lr: float, nesterov: bool) -> None:
    assert parse_optimizer(f" sgd(lr={lr!r}, nesterov={nesterov}) ") == ("sgd", {"lr": lr, "nesterov": nesterov})


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    precision = Precision("amp_fp16", CPU)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision.backward(model(torch.ones(1)) * torch.finfo(torch.float32).max)
    assert not precision.step(optimizer, model)
    assert model.weight.item() == 1
    assert precision.skipped == 1
    precision.backward(model(torch.ones(1)).sum())
    assert precision.step(optimizer, model)
    assert model.weight.item() == 0
    assert precision.skipped == 1


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_clipping_sees_unscaled_gradients(name: str) -> None:
    precision = Precision(name, CPU)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision.backward(model(torch.full((1,), 3.0)).sum())
    norms: list[Tensor] = []
    precision.on_norm = norms.append
    assert precision.step(optimizer, model, clip_grad_norm=2.0)
    assert model.weight.item() == pytest.approx(-2, rel=1e-3)
    precision.backward(model(torch.full((1,), 0.5)).sum())
    precision.step(optimizer, model, clip_grad_norm=2.0)
    assert model.weight.item() == pytest.approx(-2.5, rel=1e-3)  # below the limit nothing is clipped
    assert [norm.item() for norm in norms] == pytest.approx([3.0, 0.5], rel=1e-2)  # as they were, without the scale


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)])
def test_all_precisions_train(name: str, dtype: torch.dtype, alone: Ranks, tmp_path: Path) -> None:
    seen = set()

    def loss(model: nn.Module, batch: toy_tasks.Pair) -> Tensor:
        output: Tensor = model(batch[0])
        seen.add(output.dtype)
        return (output - batch[1]).square().mean()

    rows = metrics(train_alone(spec_of(precision=name, steps=160, lr=0.8), alone, tmp_path / "run", toy_tasks.numbers(loss=loss)))
    assert seen == {dtype}
    assert sum(row["loss"] for row in rows[-8:]) < 0.9 * sum(row["loss"] for row in rows[:8])


# --- machines


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(spec_of(device="auto"), 0, 2) == CPU
    with pytest.raises(SpecError, match=r'device="cuda": torch finds no GPU .*try device="cpu"'):
        choose_device(spec_of(device="cuda"), 0, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(spec_of(device="auto"), 0, 1) == torch.device("cuda", 0)
    assert choose_device(spec_of(device="cuda", backend="gloo"), 1, 2) == torch.device("cuda", 0)
    assert choose_device(spec_of(device="cpu"), 1, 2) == CPU
    with pytest.raises(SpecError, match=r'nproc_per_node=2, and this machine has 1 GPU: .*try nproc_per_node=1, or backend="gloo"'):
        choose_device(spec_of(device="cuda"), 1, 2)
    assert choose_device(spec_of(device="auto"), 1, 2) == CPU


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process cannot be reset here")
def test_a_peak_begins_anew(tmp_path: Path, forks: Forks) -> None:
    """In a process of its own: a big block, given back, is no longer the peak."""
    code = """
import torch
from workbench.timeline.rank_log import peak_bytes
from workbench.programs.train import reset_peak
block = torch.ones(2**26)
before = peak_bytes()
del block
reset_peak(torch.device("cpu"))
print(before - peak_bytes() > 2**27)
"""
    assert forks.run(tmp_path, "-c", code).stdout.strip() == "True"


def test_a_batch_that_knows_how_to_move_moves_itself() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device(packed, torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_backends() -> None:
    assert choose_backend(spec_of(device="auto"), CPU) == "gloo"
    with pytest.raises(SpecError, match=r'backend="nccl": it reduces between GPUs, and this run computes on the CPU; try backend="gloo"'):
        choose_backend(spec_of(device="auto", backend="nccl"), CPU)


def test_a_gpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(SpecError, match=r'precision="amp_bf16": Tesla T4 has no bf16 units .*try precision="amp_fp16"'):
        Precision("amp_bf16", torch.device("cuda", 0))


# --- batches


class Point(NamedTuple):
    x: Tensor
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    x: Tensor
    inner: list[Tensor]


class Encoding(collections.UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: a mapping that is not a dict."""


def test_tensors_move_wherever_they_are() -> None:
    x = torch.ones(1)
    counts: dict[str, Any] = collections.defaultdict(list, {"x": x})
    batch = {"point": Point(x, "a"), "record": Record(x, [x]), "encoding": Encoding(x=x), "counts": counts, "pair": (x, 3), "none": None}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["point"], Point)
    assert moved["point"].name == "a"
    assert type(moved["encoding"]) is Encoding
    assert moved["counts"]["missing"] == []
    assert moved["pair"][1] == 3
    found = [moved["point"].x, moved["record"].x, moved["record"].inner[0], moved["encoding"]["x"], moved["counts"]["x"], moved["pair"][0]]
    assert all(tensor.is_meta for tensor in found)
    assert not batch["record"].x.is_meta  # type: ignore[attr-defined]
    assert to_device("text", torch.device("meta")) == "text"


def test_a_dict_batch_and_its_own_collate(alone: Ranks, tmp_path: Path) -> None:
    def collate(samples: list[toy_tasks.Pair]) -> dict[str, Tensor]:
        return {"inputs": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

    class Output(NamedTuple):
        loss: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = toy_tasks.network()

        def forward(self, inputs: Tensor, labels: Tensor) -> Output:
            return Output(loss=(self.net(inputs) - labels).square().mean())

    task = toy_tasks.numbers(model=Model, collate=collate, loss=lambda model, batch: model(**batch).loss)
    same = train_alone(spec_of(evaluate=True), alone, tmp_path / "dict", task)
    assert parameters(same) == parameters(train_alone(spec_of(evaluate=True), alone, tmp_path / "tuple"))


# --- what a task can get wrong


@pytest.mark.parametrize(
    ("changes", "knobs", "message"),
    [
        (
            {"model": lambda: nn.Linear},
            {},
            r"model\(\) returned a type; expected a torch.nn.Module; write model=Net, not",
        ),
        ({"dataset": lambda: 3}, {}, r"dataset\(\) returned a int; expected a dataset with __len__ and __getitem__, or .*IterableDataset"),
        ({"dataset": lambda: toy_tasks.Stream(count=5)}, {}, r"a stream \(Stream\), ended before it had given rank 0 one micro-batch of 8"),
        ({"loss": lambda model, batch: 0.5}, {}, r"returned a float; expected a tensor with one number"),
        ({"loss": lambda model, batch: model(batch[0])}, {}, r"returned a tensor of shape \(8, 2\); .* try loss.mean\(\)"),
        ({"loss": lambda model, batch: type("Output", (), {"loss": 1})()}, {}, r"returned a Output; .*model's output has it as .loss"),
        ({"loss": lambda model, batch: model(batch[0]).detach().mean()}, {}, r"has no gradient: .* Is it cut off by \.detach\(\)"),
        ({"dataset": lambda: toy_tasks.Numbers(0)}, {}, r"dataset\(\) returned an empty Numbers: it needs at least one sample"),
        ({"optimizer": lambda parameters: None}, {}, r"optimizer function returned a NoneType; .*lambda parameters: torch.optim.SGD"),
        ({"evaluate": None}, {"evaluate": True}, r"has no evaluation: try wb.Task\(…, evaluate=…\), or evaluate=False"),
        ({"evaluate": lambda model: 0.5}, {"evaluate": True}, r"evaluate\(model\) returned 0.5; expected numbers by name"),
    ],
)
def test_wrong_tasks_say_what_is_wanted(changes: dict[str, Any], knobs: dict[str, Any], message: str, alone: Ranks, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        train_alone(spec_of(**knobs), alone, tmp_path / "run", toy_tasks.numbers(**changes))


def test_too_few_samples(alone: Ranks, tmp_path: Path) -> None:
    message = r"takes 80 samples \(micro_batch=40 × accumulation=2 × 1 ranks\), and the dataset has 64: try micro_batch=32"
    with pytest.raises(SpecError, match=message):
        train_alone(spec_of(micro_batch=40, accumulation=2), alone, tmp_path / "run")


# --- the program


def test_without_torchrun(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = by_hand(spec=spec_of(evaluate=True).to_json()).path
    program.main([str(directory)])
    run = Run.load(directory)
    assert run.progress == (6, 6)
    (timeline,) = run.timelines
    assert len(timeline.steps) == 6
    assert all(step.samples == 8 for step in timeline.steps)
    assert timeline.mean("backward") > 0
    assert not dist.is_initialized()


THREADS = """
import sys
from pathlib import Path
from workbench.programs import experiment, memory
from workbench.programs import train as program
train, first, second, diagnosed, measured = sys.argv[1:]
for main, directories in (program, [train]), (program, [first, second]), (experiment, [diagnosed]), (memory, [measured]):
    main.main(directories)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print("left:", *(name for name in names if "gloo" in name))
"""


def test_no_thread_of_gloo_outlives_its_group(by_hand: Make, tmp_path: Path, forks: Forks) -> None:
    """Of a training, a sweep, an experiment, a measurement: one that frees the last tensor of a reduction while Python shuts down aborts a
    process that had gone well.
    """
    orders: list[dict[str, Any] | None] = [
        None,
        None,
        None,
        {"kind": "diagnose", "budget_s": 4},
        {"kind": "memory", "budget_s": 60, "steps": 2},
    ]
    made = [by_hand(spec=spec_of().to_json(), experiment=order).path for order in orders]
    done = forks.run(tmp_path, "-c", THREADS, *made)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "left:" in line] == ["left:"] * 4


def test_errors_are_recorded_and_raised(by_hand: Make) -> None:
    directory = by_hand(spec=spec_of("numbrs").to_json()).path
    with pytest.raises(TaskError, match="did you mean 'numbers'"):
        program.main([str(directory)])
    record = run_directory.read_json(directory / run_directory.ERRORS / "rank0.json")
    assert record["kind"] == "task"
    assert not dist.is_initialized()


def test_a_script_is_not_for_this_program(by_hand: Make) -> None:
    directory = by_hand(spec={"kind": "script", "script": "x.py"}).path
    with pytest.raises(SpecError, match=r"holds the spec of a script: python -m workbench.programs.script"):
        program.main([str(directory)])


def test_specs_of_one_launch_agree(alone: Ranks, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"backend='auto', 'gloo' in one launch: specs of one launch must agree on it"):
        program.train_all([spec_of(), spec_of(backend="gloo")], [tmp_path, tmp_path], alone)


@pytest.mark.parametrize(("backend", "minutes"), [("nccl", 10), ("gloo", 30)])
def test_nccl_knows_its_gpu_and_every_collective_has_a_limit(monkeypatch: pytest.MonkeyPatch, backend: str, minutes: int) -> None:
    options: dict[str, Any] = {}
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **given: options.update(given))
    monkeypatch.setattr("workbench.train.ranks.choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr("workbench.train.ranks.choose_backend", lambda *_: backend)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    Ranks.join(spec_of(device="cuda"))
    assert options["timeout"].total_seconds() == 60 * minutes
    assert options.get("device_id") == (torch.device("cuda", 0) if backend == "nccl" else None)


def test_a_rank_says_why_it_does_not_use_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update …")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert why_no_gpu(tmp_path) == ""
    (tmp_path / "nvidia0").touch()
    assert why_no_gpu(tmp_path).startswith("The NVIDIA driver on your system is too old (found version 11040). (torch 2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_gpu(tmp_path) == ""
    monkeypatch.setattr("workbench.train.ranks.why_no_gpu", lambda: "too old")
    assert choose_device(spec_of(device="auto"), 0, 1) == torch.device("cpu")
    assert capsys.readouterr().out == "on the CPU, although this machine has NVIDIA GPUs: too old\n"


class OnGpus(Ranks):
    """Ranks of which the others do as this one does."""

    def agree(self, ok: bool) -> bool:
        return ok


@pytest.fixture
def gpu_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces what the training program calls on a GPU, and lists the calls."""
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    return calls


def trained_on_gpus(by_hand: Make, alone: Ranks, monkeypatch: pytest.MonkeyPatch, world_size: int, fails: Sequence[int]) -> list[str]:
    """How each of four configurations ended, "" = it did not run, and the error of the launch. Those with the seeds in `fails` fail."""

    def fake_train(spec: RunSpec, *_: Any, **__: Any) -> None:
        if spec.seed in fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(program, "train", fake_train)
    specs = [spec_of(seed=seed) for seed in range(4)]
    paths = [by_hand(spec=spec.to_json()).path for spec in specs]
    ranks = OnGpus(rank=0, world_size=world_size, device=torch.device("cuda", 0), store=alone.store)
    error = ""
    try:
        program.train_all(specs, paths, ranks)
    except program.LaunchOverError as raised:
        error = str(raised)
    outcomes = [run_directory.read_json(path / run_directory.RUN_JSON)["outcome"] or {"state": ""} for path in paths]
    assert all(outcome["error"]["kind"] == "out-of-memory" for outcome in outcomes if outcome["state"] == "failed")
    return [*(outcome["state"] for outcome in outcomes), error]


def test_after_a_failure_a_single_gpu_goes_on(by_hand: Make, alone: Ranks, monkeypatch: pytest.MonkeyPatch, gpu_calls: list[str]) -> None:
    assert trained_on_gpus(by_hand, alone, monkeypatch, 1, [1]) == ["finished", "failed", "finished", "finished", ""]
    assert gpu_calls.count("empty_cache") == 5  # the failed one is followed by empty memory, too


def test_after_a_failure_several_gpus_may_wait(by_hand: Make, alone: Ranks, monkeypatch: pytest.MonkeyPatch, gpu_calls: list[str]) -> None:
    *states, error = trained_on_gpus(by_hand, alone, monkeypatch, 2, [1])
    assert states == ["finished", "failed", "", ""]
    assert error == (
        "configuration 001 has failed, and other GPUs may wait for ever in a reduction that it did not join; these did not run in this "
        "launch, and need a new one: 002, 003"
    )
    assert "synchronize" not in gpu_calls  # it would wait for ever, too


def test_a_warm_up_that_fails_on_gpus_is_the_failure_of_the_first(
    by_hand: Make, alone: Ranks, monkeypatch: pytest.MonkeyPatch, gpu_calls: list[str]
) -> None:
    assert trained_on_gpus(by_hand, alone, monkeypatch, 2, [0])[:4] == ["failed", "", "", ""]
    assert trained_on_gpus(by_hand, alone, monkeypatch, 1, [0]) == ["failed", "finished", "finished", "finished", ""]


def test_a_gpu_that_refuses_everything_after_a_failure(
    by_hand: Make, alone: Ranks, monkeypatch: pytest.MonkeyPatch, gpu_calls: list[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be …")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    *states, error = trained_on_gpus(by_hand, alone, monkeypatch, 1, [2])
    assert states == ["finished", "finished", "failed", ""]
    assert "left the GPU unusable for this process (CUDA error: device-side assert triggered); these" in error
    *states, error = trained_on_gpus(by_hand, alone, monkeypatch, 1, [3])
    assert states == ["finished", "finished", "finished", "failed"]
    assert error.endswith("it was the last one of this launch")


def test_a_full_disk_fails_the_run_and_leaves_whole_lines(by_hand: Make, tmp_path: Path, forks: Forks) -> None:
    directory = by_hand(spec=spec_of(steps=5_000).to_json()).path
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (25_000,) * 2); from workbench.programs import train as m; m.main()"
    )
    done = forks.run(tmp_path, "-c", limited, directory)
    assert done.returncode != 0
    assert run_directory.read_json(directory / run_directory.ERRORS / "rank0.json")["kind"] == "disk-full"
    for name in (run_directory.METRICS, "rank0.jsonl"):
        data = (directory / name).read_bytes()
        assert not data or data.endswith(b"}\n")
    assert not list(directory.glob("*.part"))
