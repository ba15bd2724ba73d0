"""A bad step of a run is repeated: the planted cause is named, and the samples to blame."""

import functools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import workbench as wb
from tests.conftest import HandMade
from tests.forked import Forks
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.diagnosis.analysis.step_replay import StepReplay, first_bad_step, ordinary_losses
from workbench.diagnosis.measure import step_replay
from workbench.memory.measure.at_oom import held
from workbench.runs.run import Run
from workbench.train import step_ring
from workbench.train.fingerprints import digest
from workbench.train.loop import train
from workbench.train.random_numbers import random_state, restore_random_state
from workbench.train.ranks import Ranks
from workbench.train.sample_order import SampleOrder
from workbench.train.step_ring import StepRing, read_ring

COUNT, WIDTH, BATCH, BAD = 256, 6, 8, 12
"""Samples, values of each, samples of a step, and the step in which something is planted."""


def samples_of(step: int, seed: int = 0) -> list[int]:
    """Indices of a step's samples in the first epoch."""
    return list(SampleOrder(COUNT, seed=seed))[(step - 1) * BATCH : step * BATCH]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points on both sides of a plane, far from it."""

    def __init__(self, change: Callable[[Tensor, Tensor], object]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(2, (COUNT,), generator=generator)
        self.inputs = torch.randn(COUNT, WIDTH, generator=generator) * 0.3 + (self.labels[:, None] * 2.0 - 1)
        change(self.inputs, self.labels)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, 2)


class Halved(nn.Module):
    """A layer in bf16 and a norm in fp32, as weights that were loaded with dtype=torch.bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH, affine=False, momentum=0.0), nn.Linear(WIDTH, 2).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(self.norm(x).bfloat16()).float()
        return logits


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[0].sum(1))


def naive(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of enlarged logits, by exp: beyond 88 it overflows in fp32."""
    logits = model(batch[0]) * 30
    return (logits.exp().sum(1).log() - logits.gather(1, batch[1][:, None])[:, 0]).mean()


def planted(
    sample: float | None = None, storm: bool = False, stretch: float = 1.0, seed: int = 0, batch: str = "", at: int = BAD, **task: Any
) -> wb.Task:
    """Changes one sample of the bad step, or all: `batch` says how."""

    def change(inputs: Tensor, labels: Tensor) -> None:
        index, whole = samples_of(at, seed)[3], samples_of(at, seed)
        if batch == "duplicated":  # a sample that is labelled wrongly, as often as the batch has samples
            inputs[whole], labels[whole] = inputs[index].clone(), 1 - labels[index]
        if batch == "shifted":  # each label is that of the next sample of the data set
            labels[whole] = labels.roll(-1)[whole]
        if batch == "larger":
            inputs[whole] *= 1.6
        if batch == "no such class":
            labels[index] = 9
        if sample is not None:
            inputs[index, 2] = sample * (1 - 2 * float(labels[index]))  # on the wrong side
        inputs[index] *= stretch
        if storm:
            labels[whole] = 1 - labels[whole]

    made: dict[str, Any] = {"model": network, "loss": classify, "optimizer": "sgd(lr=0.3)"}
    return wb.Task(**made | {"dataset": lambda: Points(change)} | task)


nan_sample = functools.partial(planted, math.nan)
inf_sample = functools.partial(planted, math.inf)
huge_sample = functools.partial(planted, 3e4, model=linear, optimizer="sgd(lr=0.05)")
outlier = functools.partial(planted, 80.0, model=linear, loss=squares, optimizer="sgd(lr=0.01)")
label_storm = functools.partial(planted, storm=True)
rate = functools.partial(planted, model=linear, loss=squares, optimizer="sgd(lr=0.02)")
momentum = functools.partial(planted, model=linear, loss=squares, optimizer="sgd(lr=0.02, momentum=0.5)")
halved = functools.partial(planted, model=Halved, loss=squares, optimizer="sgd(lr=0.02)")
halved_outlier = functools.partial(planted, 80.0, model=Halved, loss=squares, optimizer="sgd(lr=0.01)")
duplicated = functools.partial(planted, batch="duplicated")
shifted = functools.partial(planted, batch="shifted")
scaled = functools.partial(planted, stretch=1000.0, model=linear, loss=squares, optimizer="sgd(lr=0.01)")
overflow = functools.partial(planted, stretch=20.0, seed=3, model=linear, loss=naive, optimizer="sgd(lr=0.0005)")
sound = functools.partial(planted)
far = functools.partial(planted, model=linear, loss=squares, optimizer="sgd(lr=1e6)")
far_adamw = functools.partial(planted, model=linear, loss=squares, optimizer="adamw(lr=1e4)")
both = functools.partial(planted, math.nan, at=1, model=linear, loss=squares, optimizer="sgd(lr=1e6)")
far_and_larger = functools.partial(planted, batch="larger", at=1, model=linear, loss=squares, optimizer="sgd(lr=0.5)")
no_such_class = functools.partial(planted, batch="no such class")
far_out = functools.partial(planted, stretch=20.0, seed=3, storm=True, model=linear, loss=naive, optimizer="sgd(lr=0.0005)")
ten_times = functools.partial(planted, model=linear, loss=squares, optimizer="sgd(lr=0.5)")
thousand_times = functools.partial(planted, model=linear, loss=squares, optimizer="sgd(lr=20.0, momentum=0.9)")
swinging = functools.partial(planted, model=linear, loss=squares, optimizer="sgd(lr=0.2, momentum=0.9)")
overflowing = functools.partial(planted, loss=lambda model, batch: classify(model, (batch[0] * 2e5, batch[1])))
steep = functools.partial(planted, loss=lambda model, batch: 30 * classify(model, batch), optimizer="sgd(lr=0.003)")


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """A sample whose third number is large counts a thousand times as much, downwards: its gradient stands out, and not its loss."""
    losses = F.cross_entropy(model(batch[0].clamp(-3, 3)), batch[1], reduction="none")
    return (
        losses * torch.where(batch[0][:, 2].abs() > 50, 1e3, 1.0) - torch.where(batch[0][:, 2].abs() > 50, 1e3, 0.0) * losses.detach()
    ).mean()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The points in their order, which have no indices here."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        points = Points(lambda inputs, labels: inputs[BATCH * (BAD - 1) + 3].fill_(math.nan))
        return (points[place] for place in range(COUNT))


def as_sets(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Joins samples as graphs are joined: each is one to three rows, and `of` says to which sample a row belongs."""
    sizes = torch.tensor([1 + int(label) + int(inputs[0] > 0) for inputs, label in samples])
    rows = torch.stack([inputs for inputs, _ in samples]).repeat_interleave(sizes, 0)
    of = torch.arange(len(samples)).repeat_interleave(sizes)
    return {"rows": rows, "of": of, "labels": torch.stack([label for _, label in samples]), "n": len(samples)}


def classify_sets(model: nn.Module, batch: Any) -> Tensor:
    sums = torch.zeros(batch["n"], WIDTH, dtype=batch["rows"].dtype).index_add(0, batch["of"], batch["rows"])
    return F.cross_entropy(model(sums), batch["labels"])


def classify_full(model: nn.Module, batch: Any) -> Tensor:
    """For batches of one size only."""
    return F.cross_entropy(model(batch[0].view(BATCH, WIDTH)), batch[1])


nan_in_set = functools.partial(planted, math.nan, collate=as_sets, loss=classify_sets)
far_in_set = functools.partial(planted, 80.0, collate=as_sets, loss=classify_sets, model=linear)
nan_in_full = functools.partial(planted, math.nan, loss=classify_full)
steep_sample = functools.partial(planted, 80.0, loss=weighted)
streamed = functools.partial(planted, dataset=Stream)
streamed_sets = functools.partial(planted, dataset=Stream, collate=as_sets, loss=classify_sets)
never_finite = functools.partial(planted, loss=lambda model, batch: classify(model, batch) * math.nan)


def grown() -> nn.Module:
    """Linear, with weights that are far too large."""
    made = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        made.weight.mul_(4.0)
    return made


def powers(model: nn.Module, batch: Any) -> Tensor:
    """The squares of what 40 passes through the model make of a batch."""
    values: Tensor = functools.reduce(lambda values, _: model(values), range(40), batch[0])
    return values.square().mean()


too_large_weights = functools.partial(planted, model=grown, loss=powers, optimizer="sgd(lr=0.01)")


def nan_once() -> wb.Task:
    """Has a loss that is NaN in the tenth step, unless a variable says that this is a replay."""
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return classify(model, batch) * (math.nan if len(calls) == 10 and "IN_REPLAY" not in os.environ else 1.0)

    return planted(loss=loss, optimizer="sgd(lr=0.0)")


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 2))


split = functools.partial(planted, math.nan, model=plain, tensor_parallel={"0": "colwise", "2": "rowwise"})

WARM = {"lr": 3.0, "schedule": "constant", "warmup_steps": 40}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nan_sample": ({}, "data"),
    "inf_sample": ({"checkpoint_every": 5, "steps": 14}, "data"),
    "huge_sample": ({}, "data"),
    "outlier": ({}, "data"),
    "label_storm": ({"checkpoint_every": 4, "steps": 14}, "data"),
    "duplicated": ({}, "data"),
    "shifted": ({}, "data"),
    "scaled": ({"checkpoint_every": 4, "steps": 14}, "data"),
    "rate": (WARM, "learning rate"),
    "momentum": (WARM, "learning rate"),
    "halved": (WARM, "learning rate"),
    "halved_outlier": ({}, "data"),
    "overflow": ({"seed": 3}, "numerics"),
}

HALF, LONG = {"precision": "amp_fp16"}, {"steps": 60}
ASKED: dict[str, tuple[str, dict[str, Any], int | None, str, int]] = {
    **{f"lr 1e6, sgd, step {step}": ("far", {"steps": 8}, step, "learning rate", 1) for step in (None, 1, 2, 3, 6)},
    **{f"lr 1e4, adamw, step {step}": ("far_adamw", {"steps": 8}, step, "learning rate", 1) for step in (None, 1, 2, 6)},
    "lr 10 times, sgd, step 6": ("ten_times", {}, 6, "learning rate", 1),
    "lr 1000 times, momentum": ("thousand_times", {}, None, "learning rate", 1),
    "loss rises over several steps, momentum": ("swinging", LONG, None, "learning rate", 57),
    "two steps before a NaN": ("nan_sample", {}, BAD - 2, "nothing", BAD - 2),
    "a step before a NaN": ("nan_sample", {}, BAD - 1, "nothing", BAD - 1),
    "a step after a NaN": ("nan_sample", {}, BAD + 1, "data", BAD),
    "eight steps after a NaN": ("nan_sample", {}, BAD + 8, "data", BAD),
    "a step before wrong labels": ("label_storm", {}, BAD - 1, "nothing", BAD - 1),
    "a step after wrong labels": ("label_storm", {}, BAD + 1, "nothing", BAD + 1),
    "fp16, each batch overflows": ("overflowing", HALF, None, "numerics", 1),
    "fp16, first scale too large": ("steep", HALF, 1, "nothing", 1),
    "fp16, NaN": ("nan_sample", HALF, None, "data", BAD),
    "fp16, sound": ("sound", HALF, 9, "nothing", 9),
    "no batch has a finite loss": ("never_finite", {}, None, "every batch", 1),
    **{f"sound, step {step}": ("sound", {}, step, "nothing", step) for step in (1, 5, 20)},
}
"""Case → task, knobs, the step that is asked for (None = none), what is to blame, and in which step."""

SHIFTED = {41, 81, 2}
"""Samples of the bad step that have another label than their own where labels are shifted."""


def rightly_blamed(task: str, samples: tuple[int, ...]) -> bool:
    """None alone where the whole batch is to blame; of shifted labels two of the wrong ones, which suffice; else the planted one."""
    if task == "shifted":
        return len(samples) == 2 and set(samples) < SHIFTED
    return samples == (() if task in ("label_storm", "duplicated") else (samples_of(BAD)[3],))


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    yield Ranks.join(wb.RunSpec(task="text-gpt", device="cpu"))
    dist.destroy_process_group()


def trained(path: Path, ranks: Ranks, task: str, **knobs: Any) -> Run:
    """The directory of a run that was trained in this process."""
    spec = wb.RunSpec(task=f"{__file__}:{task}", device="cpu", micro_batch=BATCH, **{"steps": 20} | knobs)
    (path / run_directory.ERRORS).mkdir(parents=True)
    outcome = {"state": "finished", "returncode": 0, "seconds": 1.0}
    info = {"format": run_directory.FORMAT, "id": "x", "name": task, "created": time.time(), "host": "here", "spec": spec.to_json()}
    run_directory.write_json(path / run_directory.RUN_JSON, info | {"launch_dir": ".", "timeout": None, "outcome": outcome})
    train(spec, globals()[task](), ranks, path, held=held, noise_log=NoiseLog)
    return Run.load(path)


@pytest.mark.parametrize("task", CASES)
def test_the_planted_cause_is_named(tmp_path: Path, alone: Ranks, task: str) -> None:
    knobs, cause = CASES[task]
    run = trained(tmp_path / "run", alone, task, **knobs)
    random = torch.get_rng_state()
    found = wb.replay(run)
    assert found.verdict == cause, found
    assert found.also == (("data",) if task == "overflow" else ())  # other batches do not overflow
    if cause == "data":
        assert found.step == BAD
        assert rightly_blamed(task, found.samples), found
    assert ("checkpoint" in found.start) == ("checkpoint_every" in knobs), found
    assert "not repeatable" not in str(found)
    assert torch.equal(random, torch.get_rng_state())
    assert StepReplay.from_json(json.loads(json.dumps(found.to_json()))).verdict == cause


@pytest.mark.parametrize("case", ASKED)
def test_the_cause_is_named_before_at_and_after_the_step_that_went_wrong(tmp_path: Path, alone: Ranks, case: str) -> None:
    task, knobs, asked, verdict, step = ASKED[case]
    found = wb.replay(trained(tmp_path / "run", alone, task, **knobs), asked)
    assert (found.verdict, found.step, found.also) == (verdict, step, ()), found
    assert asked in (None, found.asked)
    assert "does not make other batches worse" not in str(found)
    assert ("scaler left the update out" in found.why) == (task == "steep")
    if verdict == "learning rate":
        assert any(trial.name == "in fp64" for trial in found.trials), "its name was that of a parameter"
        plain, *_, smaller = [trial for trial in found.trials if "batch" not in trial.name]
        assert f" to {max(plain.others, found.usual):.4g}; with {smaller.name} it becomes {smaller.others:.4g}" in str(found)
        assert smaller.others < plain.others


def test_a_bad_batch_and_a_rate_that_is_too_large_are_both_named(tmp_path: Path, alone: Ranks) -> None:
    found = wb.replay(trained(tmp_path / "run", alone, "both", steps=4))
    assert (found.verdict, found.also, found.step, found.samples) == ("data", ("learning rate",), 1, (samples_of(1)[3],)), found
    assert "step 1, data and learning rate; samples" in str(found)
    rise = f"raises the loss of other batches from 40.36 to {found.trials[3].others:.4g}"
    assert "with other samples and the same weights the step does far less harm, and still too much: " in str(found)
    assert f"updates are too large as well, since the update with another batch {rise}" in str(found)


def test_a_rate_that_is_too_large_for_other_batches_as_well_is_to_blame_and_not_a_somewhat_unusual_batch(
    tmp_path: Path, alone: Ranks
) -> None:
    found = wb.replay(trained(tmp_path / "run", alone, "far_and_larger", steps=4), 1)
    assert found.trials[0].loss > 1.5 * found.usual
    assert (found.verdict, found.also, found.step, found.samples) == ("learning rate", (), 1, ()), found


def test_weights_with_which_every_batch_explodes_at_any_rate_are_no_matter_of_the_rate(tmp_path: Path, alone: Ranks) -> None:
    found = wb.replay(trained(tmp_path / "run", alone, "too_large_weights", steps=4))
    assert (found.verdict, found.step) == ("every batch", 1), found


def test_of_a_bad_sample_that_overflows_the_higher_precision_is_told(tmp_path: Path, alone: Ranks) -> None:
    found = wb.replay(trained(tmp_path / "run", alone, "far_out", seed=3))
    assert (found.verdict, found.also, found.step) == ("data", ("numerics",), BAD), found
    assert "it overflows as well, since in fp64 the same step has a loss of " in str(found)


def test_the_sample_whose_gradient_stands_out_is_named(tmp_path: Path, alone: Ranks) -> None:
    found = wb.replay(trained(tmp_path / "run", alone, "steep_sample"), BAD)
    assert found.trials[0].loss < 2, found
    assert (found.verdict, found.samples) == ("data", (samples_of(BAD)[3],)), found


def test_the_samples_of_a_stream_are_places_in_the_batch(tmp_path: Path, alone: Ranks) -> None:
    found = wb.replay(trained(tmp_path / "run", alone, "streamed"))
    assert (found.verdict, found.step, found.samples) == ("data", BAD, (3,)), found
    assert "a stream has no indices: samples are counted from 0 in the batch of the step" in str(found)


@pytest.mark.parametrize(("task", "accumulation"), [("nan_in_set", 1), ("far_in_set", 2)])
def test_a_bad_sample_is_named_where_the_collate_joins_samples(tmp_path: Path, alone: Ranks, task: str, accumulation: int) -> None:
    """A graph's nodes have rows, and not the graph: what is left of a batch is collated anew."""
    found = wb.replay(trained(tmp_path / "run", alone, task, accumulation=accumulation), BAD // accumulation)
    assert (found.verdict, found.samples) == ("data", (samples_of(BAD)[3],)), found
    assert "the task raised" not in str(found)


def test_samples_that_cannot_be_left_out_are_not_blamed_on_the_task(tmp_path: Path, alone: Ranks) -> None:
    found = wb.replay(trained(tmp_path / "stream", alone, "streamed_sets"))
    assert (found.verdict, found.step, found.samples) == ("data", BAD, ()), found
    assert "no sample was left out: the batch has no entry for each of its samples" in str(found)
    assert "the task raised" not in str(found)
    found = wb.replay(trained(tmp_path / "full", alone, "nan_in_full"))
    assert (found.verdict, found.step, found.samples) == ("data", BAD, (samples_of(BAD)[3],)), found
    assert "without a sample, the task raised RuntimeError (shape '[8, " in str(found), found
    assert "counts as not finite" not in str(found)


def test_code_that_has_changed_since_is_named_where_the_losses_differ(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run", alone, "sound")
    file = run.path / run_directory.ENVIRONMENT
    recorded = run_directory.read_json(file)
    run_directory.write_json(file, recorded | {"code": recorded["code"] | {Path(__file__).name: "another"}})
    assert "has changed" not in str(wb.replay(run, 9))  # and does the same
    monkeypatch.setattr(Run, "metric_rows", [row | {"loss": 2 * row["loss"]} for row in run.metric_rows])
    changed = str(wb.replay(run, 9))
    assert f"the code of run has changed since it was trained ({Path(__file__).name}), and the present code was repeated" in changed
    assert "not repeatable" not in changed


def test_a_replay_without_enough_memory_is_no_fault_of_the_data(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", alone, "far_out", seed=3)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(step_replay.Replayer, "trial", full)
    with pytest.raises(torch.OutOfMemoryError):
        wb.replay(run)


def test_the_sample_that_makes_the_task_raise_is_named(tmp_path: Path, alone: Ranks) -> None:
    with pytest.raises(IndexError):
        trained(tmp_path / "run", alone, "no_such_class")
    info = run_directory.read_json(tmp_path / "run" / run_directory.RUN_JSON)
    info["outcome"] = {"state": "failed", "returncode": 1, "seconds": 1.0}
    run_directory.write_json(tmp_path / "run" / run_directory.RUN_JSON, info)
    found = wb.replay(tmp_path / "run")
    assert (found.verdict, found.step, found.samples) == ("data", BAD, (samples_of(BAD)[3],)), found
    assert "the task raised IndexError (Target 9 is out of bounds.)" in str(found)
    spec = wb.RunSpec.from_json(info["spec"])
    with pytest.raises(ValueError, match=f"step {BAD + 1} is not reached, since step {BAD} fails here; the task raised IndexError"):
        step_replay.replay(tmp_path / "run", spec, BAD + 1, {}, lambda now: None, lambda: 60.0)


def test_nothing_is_only_said_where_the_replay_shows_it(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    once = trained(tmp_path / "once", alone, "nan_once")
    monkeypatch.setenv("IN_REPLAY", "1")
    found = wb.replay(once)
    assert (found.verdict, found.step) == ("unclear", 10), found
    assert "the loss was not finite in the run and is 0." in str(found)


def test_an_ordinary_step_and_what_the_ring_has(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ring, "RANDOM_EVERY_S", -1.0)
    run = trained(tmp_path / "run", alone, "sound")
    with pytest.raises(ValueError, match="no loss stands out among its 20 steps: name one"):
        wb.replay(run)
    found = wb.replay(tmp_path / "run", 9)
    assert (found.verdict, found.step, found.start) == ("nothing", 9, "the first step"), found
    assert found.recorded == pytest.approx(found.trials[0].loss, rel=1e-3)
    ring = read_ring(tmp_path / "run" / run_directory.ring_file(0))
    assert list(ring)[:1] == [5]
    assert ring[BAD]["samples"] == samples_of(BAD)
    kept = [row["random"] for row in ring.values() if row["random"]]
    assert kept
    before = random_state(torch.device("cpu"))
    restore_random_state(kept[0], torch.device("cpu"))
    assert digest(random_state(torch.device("cpu"))) == digest(kept[0])
    restore_random_state(before, torch.device("cpu"))
    path = tmp_path / "run" / run_directory.ring_file(0)
    short = path.read_text().replace('"torch": "', '"torch": "AAAA", "was": "')  # numbers that no generator takes
    for damaged in (short, "{", "{}", '{"steps": 5}', '{"steps": [5]}', '{"steps": [{"step": 1, "random": {"torch": "A"}}]}'):
        (tmp_path / "damaged.json").write_text(damaged)
        assert read_ring(tmp_path / "damaged.json") == {}
    with pytest.raises(ValueError, match="it has taken 20 steps, counted from 1"):
        wb.replay(run, 30)
    with pytest.raises(ValueError, match="no time was left after step 0"):
        wb.replay(run, 9, budget_s=1e-9)


def test_where_the_device_has_failed_the_ring_keeps_what_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a device-side assert each read of the device raises, and so does the one of the losses."""

    def failed(*_: object) -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(step_ring, "RANDOM_EVERY_S", -1.0)
    precision = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer: Any = SimpleNamespace(ranks=SimpleNamespace(device=torch.device("cpu")), precision=precision)
    samples: Any = SimpleNamespace(of=samples_of)
    ring = StepRing(tmp_path / "ring.json", trainer, samples, 0)
    for step in (1, 2):
        ring.step(step, torch.tensor(0.5))
    monkeypatch.setattr(torch, "stack", failed)
    ring.close()
    kept = read_ring(tmp_path / "ring.json")
    assert {step: row["samples"] for step, row in kept.items()} == {step: samples_of(step) for step in (1, 2, 3)}  # it failed in the third
    for step in (1, 2):
        assert kept[step]["scale"] == 8.0
        assert torch.equal(kept[step]["random"]["torch"], torch.get_rng_state())
        assert "loss" not in kept[step]


def test_a_run_that_goes_on_from_a_sharded_checkpoint(tmp_path: Path, alone: Ranks) -> None:
    sharded = trained(tmp_path / "sharded", alone, "label_storm", parallel="zero1", checkpoint_every=5, steps=5)
    there, here = (path / run_directory.CHECKPOINTS for path in (sharded.path, tmp_path / "run"))
    shutil.copytree(there, here)
    assert list(here.glob("step*.rank0.pt"))
    run = trained(tmp_path / "run", alone, "label_storm", steps=14)
    found = wb.replay(run)
    assert (found.verdict, found.step, found.start) == ("data", BAD, "the checkpoint of step 5"), found


def test_the_first_bad_step() -> None:
    assert first_bad_step({1: 2.0, 2: math.nan}) == 2
    assert first_bad_step({1: 2.0, 2: 2.2, 3: 1.8, 4: 2.4}) is None
    assert first_bad_step({1: 2.0, 2: 19.0, 3: 18.0}) is None
    assert first_bad_step({1: 2.0, 2: 1.7e10}) == 2  # far above those before it, though they are few
    assert first_bad_step({1: 2.0, 2: 9.0, 3: 2.0, 4: 2.1, 5: 80.0, 6: 900.0, 7: math.nan}) == 5  # where it began to rise to NaN
    draw = random.Random(0)
    noisy = [(2.0 * 0.95**step + 0.002) * math.exp(draw.gauss(0, 1)) for step in range(500)]
    assert any(noisy[step] > 1.5 * max(noisy[step - 20 : step]) for step in range(30, 500))  # as that of small batches does by chance
    assert first_bad_step(dict(enumerate(noisy, start=1))) is None
    assert first_bad_step(dict(enumerate([*noisy, math.nan], start=1))) == 501
    risen = dict(enumerate([2.0] * 20 + [9.0] * 25, start=1))
    assert (set(ordinary_losses(risen, 30)), set(ordinary_losses(risen, 45))) == ({2.0}, {9.0})


def test_a_sharded_run_is_repeated_whole(tmp_path: Path, alone: Ranks) -> None:
    run = trained(tmp_path / "run", alone, "split", parallel="fsdp", checkpoint_every=5, steps=14)
    found = wb.replay(run)
    assert (found.verdict, found.step, found.samples) == ("data", BAD, (samples_of(BAD)[3],)), found
    assert found.start == "the checkpoint of step 5"


def test_after_a_restart_the_ranks_that_were_left_are_repeated(tmp_path: Path, alone: Ranks) -> None:
    """Launched on two ranks, which shared a step; after step 5 one had it all."""
    run = trained(tmp_path / "run", alone, "split", steps=14)
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    layout = {"nproc_per_node": 1, "micro_batch": BATCH}
    info |= {"layout": layout, "spec": info["spec"] | {"nproc_per_node": 2, "micro_batch": BATCH // 2}}
    run_directory.write_json(run.path / run_directory.RUN_JSON, info)
    writer = run_directory.LineWriter(run.path / run_directory.RESTARTS)
    row = {"number": 1, "of": 1, "lost": [1], "why": "rank 1: was killed", "before": 2, "ranks": 1, "goes_on_from": 5, "seconds": 1.0}
    writer.write([row])
    writer.close()
    found = wb.replay(run.path)
    assert (found.verdict, found.step, found.samples) == ("data", BAD, (samples_of(BAD)[3],)), found
    assert "not repeatable" not in str(found)
    assert "had other samples" not in str(found)


def test_steps_in_which_ranks_have_parameters_of_their_own_are_refused(by_hand: Callable[..., HandMade]) -> None:
    spec = wb.RunSpec(task="clipart-resnet", steps=20, nproc_per_node=2, local_sgd="periodic(period=2, start=5)")
    run = by_hand(spec=spec.to_json()).losses(12).ended("finished").path
    with pytest.raises(ValueError, match=r"after step 5 each rank has parameters of its own, .*: steps up to 5 can be repeated"):
        wb.replay(run, 6)


@pytest.fixture
def on_two_ranks(by_hand: Callable[..., HandMade], forks: Forks, tmp_path: Path) -> Callable[[wb.RunSpec], Run]:
    """A run of a spec, trained in forks."""

    def trained(spec: wb.RunSpec) -> Run:
        made = by_hand(spec=spec.to_json())
        done = forks.train(2, tmp_path, made.path)
        assert done.returncode == 0, done.stderr
        return Run.load(made.ended("finished").path)

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "share",
    [
        {"parallel": "fsdp", "micro_batch": 4},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2, "micro_batch": 4, "accumulation": 2},
        {"local_sgd": f"periodic(period=2, start={BAD})", "micro_batch": 4},  # till then gradients are reduced in each step
    ],
    ids=["fsdp", "tensor parallel", "pipeline", "local sgd"],
)
def test_ranks_that_share_a_model_are_repeated_in_one_process(on_two_ranks: Callable[[wb.RunSpec], Run], share: dict[str, Any]) -> None:
    spec = wb.RunSpec(task=f"{__file__}:split", device="cpu", micro_batch=BATCH, nproc_per_node=2, steps=14, checkpoint_every=5)
    run = on_two_ranks(spec.replace(**share))
    found = wb.replay(run, BAD)
    assert (found.verdict, found.step, found.samples) == ("data", BAD, (samples_of(BAD)[3],)), found
    before = wb.replay(run, BAD - 4)
    assert before.verdict == "nothing"
    assert "not repeatable" not in str(before), before
    assert "had other samples" not in str(before), before


@pytest.mark.slow
def test_the_batches_of_all_ranks_are_repeated(on_two_ranks: Callable[[wb.RunSpec], Run]) -> None:
    spec = wb.RunSpec(task=f"{__file__}:label_storm", device="cpu", micro_batch=BATCH // 2, nproc_per_node=2, steps=9, checkpoint_every=4)
    run = on_two_ranks(spec)
    found = wb.replay(run, 8)
    assert "not repeatable" not in str(found), found
    assert "had other samples" not in str(found), found
    assert (found.verdict, found.start) == ("nothing", "the checkpoint of step 4"), found
