"""find_lr on real steps: what it finds, that nothing is left changed, what it says where it cannot; in this process and in a launch."""

import contextlib
import copy
import io
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.forked import Forks
from workbench.batch.analysis.lr_range import LrFound, LrRangeError
from workbench.batch.api import find_lr
from workbench.batch.measure import lr_range
from workbench.batch.measure.lr_range import loss_in
from workbench.core import run_directory
from workbench.data.samples import Fashion
from workbench.harness.blocks import StepFailed
from workbench.programs.lr_range import tell

SHORT: dict[str, Any] = {"sweeps": 2, "iterations": 60, "race_steps": 20}
SCRIPT = Path(__file__).parents[1] / "scripts" / "two_ranks_lr.py"

ONE_RANK_FAILS = """
import torch.distributed as dist
from tests import toy_tasks


def loss(model, batch):
    if dist.get_rank():
        raise ValueError("a bad sample")
    return toy_tasks.squared_error(model, batch)


def build():
    return toy_tasks.numbers(loss=loss)
"""


class Training:
    """A regression whose step can be varied."""

    def __init__(self, *, batch: int = 32, kind: str = "sgd", samples: int = 256) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(samples, 8)
        self.data = TensorDataset(inputs, inputs @ torch.ones(8, 1) / 3 + 0.1 * torch.randn(samples, 1))
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        body, head = list(self.model[0].parameters()), list(self.model[4].parameters())
        groups: list[dict[str, Any]] = [{"params": body}, {"params": head, "lr": 0.02}]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(groups, lr=0.01, momentum=0.5) if kind == "sgd" else torch.optim.AdamW(groups, lr=0.01)
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=[0.1, 0.2], total_steps=50)
        self.loader = DataLoader(self.data, batch_size=batch, shuffle=True, drop_last=True)
        self.rates: list[tuple[float, ...]] = []
        self.after: Callable[[Tensor], Any] = Tensor.detach

    def step(self, batch: Any) -> Any:
        """One optimizer step, with its schedule."""
        self.optimizer.zero_grad()
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.rates.append(tuple(group["lr"] for group in self.optimizer.param_groups))
        self.scheduler.step()
        return self.after(loss)

    def state(self) -> dict[str, Any]:
        """Everything that training changes, as bytes."""
        return {
            "weights": {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()},
            "gradients": [None if weight.grad is None else weight.grad.numpy().tobytes() for weight in self.model.parameters()],
            "optimizer": repr(self.optimizer.state_dict()),
            "scheduler": repr(self.scheduler.state_dict()),
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": repr(np.random.get_state()),
            "python": random.getstate(),
            "hooks": len(self.optimizer._optimizer_step_pre_hooks),
        }


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    made.step(next(iter(made.loader)))  # states and gradients are there
    before = made.state()
    yield made
    assert made.state() == before  # whatever the test did


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_it_finds_one_and_puts_everything_back(kind: str) -> None:
    made = Training(kind=kind)
    made.step(next(iter(made.loader)))
    before = made.state()
    taken = len(made.rates)
    found = find_lr(made.step, made.loader, **SHORT)
    assert made.state() == before
    assert len(made.rates) == taken  # a list that the step fills is state, too
    assert found.verified
    assert found.lr is not None
    assert 1e-4 < found.lr < 3
    assert found.batch == 32
    assert any("OneCycleLR" in note for note in found.notes)
    assert found.steps <= 3 * 60 + 22 * 20


def test_groups_keep_their_ratio_and_schedules_do_not_matter(training: Training) -> None:
    def step(batch: Any) -> Any:
        loss = training.step(batch)
        print(*training.rates[-1])  # a list would be put back
        return loss

    ratio = training.optimizer.param_groups[1]["lr"] / training.optimizer.param_groups[0]["lr"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = find_lr(step, training.loader, model=training.model, optimizer=training.optimizer, low=1e-4, high=1.0, **SHORT)
    seen = [tuple(map(float, line.split())) for line in text.getvalue().splitlines()]
    assert all(high == pytest.approx(ratio * low) for low, high in seen)
    lrs = list(found.sweeps[0].lrs)
    assert [low for low, _ in seen[: len(lrs)]] == pytest.approx(lrs)


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_puts_everything_back(training: Training, how: type[BaseException]) -> None:
    calls = iter(range(90))

    def step(batch: Any) -> Any:
        loss = training.step(batch)
        if next(calls, None) is None:
            raise how("in the middle")
        return loss

    with pytest.raises(KeyboardInterrupt if how is KeyboardInterrupt else StepFailed, match="in the middle"):
        find_lr(step, training.loader, **SHORT)


def test_the_loss_is_needed(training: Training) -> None:
    training.after = lambda loss: None
    with pytest.raises(LrRangeError, match=r"returned nothing: the search for a learning rate needs its loss.*return loss"):
        find_lr(training.step, training.loader, **SHORT)


def test_a_loss_that_is_nan_from_the_first_step(training: Training) -> None:
    training.after = lambda loss: loss * float("nan")
    with pytest.raises(LrRangeError, match=r"the loss is nan in the first step.*isfinite.*set_detect_anomaly"):
        find_lr(training.step, training.loader, **SHORT)


@pytest.mark.parametrize("span", [{}, {"low": 1e-4, "high": 1.0}])
def test_a_loss_that_is_nan_whatever_the_rate(training: Training, span: dict[str, Any]) -> None:
    """Every seventh loss: neither more iterations nor another learning rate fixes that."""
    calls = [0]

    def step(batch: Any) -> Any:
        calls[0] += 1
        return training.step(batch) * (float("nan") if calls[0] == 7 else 1.0)

    with pytest.raises(LrRangeError, match=r"the loss is nan in step 7, at a learning rate of .*, which changes nothing.*isfinite"):
        find_lr(step, training.loader, **SHORT, **span)


def test_a_loss_that_is_nan_where_the_rate_is_too_large(training: Training) -> None:
    """At once, and flat before: the learning rate's doing all the same."""
    weight = next(training.model[4].parameters())
    before = weight.detach().clone()

    def step(batch: Any) -> Any:
        loss = training.step(batch)
        return loss if (weight.detach() - before).abs().max() < 1e-2 else loss * float("nan")

    assert find_lr(step, training.loader, **SHORT).sweeps[0].stopped == "not finite"


def test_a_group_that_the_step_adds() -> None:
    """Unfreezing: it keeps its learning rate's ratio to the one that the first group began with, in each sweep anew."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 16), nn.Linear(16, 1)
    model = nn.Sequential(body, nn.Tanh(), head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    data = Training().data
    calls = [0]

    def step(batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.001})
        optimizer.zero_grad()
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        print(*(group["lr"] for group in optimizer.param_groups))
        return loss.detach()

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = find_lr(step, DataLoader(data, batch_size=32, shuffle=True), model=model, optimizer=optimizer, **SHORT)
    rows = [tuple(map(float, line.split())) for line in text.getvalue().splitlines()]
    assert {len(row) for row in rows} == {1, 2}
    assert all(row[1] == pytest.approx(row[0] / 10) for row in rows if len(row) == 2)
    assert found.verified
    assert any("step() added a parameter group: its learning rate stays 0.1 times that of the first" in note for note in found.notes)
    assert len(optimizer.param_groups) == 1


def test_a_loss_below_zero(training: Training) -> None:
    plain = find_lr(training.step, training.loader, **SHORT)
    training.after = lambda loss: loss.detach() - 100
    found = find_lr(training.step, training.loader, **SHORT)
    assert found.verified
    assert found.sweeps[0].stopped in ("diverged", "not finite")
    assert plain.lr is not None
    assert found.lr is not None
    assert plain.lr / 5 < found.lr < 5 * plain.lr


def test_large_batches_are_used_again(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_range, "MOST_BYTES", 1)
    found = find_lr(training.step, training.loader, **SHORT)
    assert found.verified
    assert any("goes through 8 of them again and again" in note for note in found.notes)


@pytest.mark.slow
def test_a_good_learning_rate_for_a_sample() -> None:
    """Tuned on a grid it is 0.56 here; from 0.2 to 0.6 the target takes at most 1.5 times as many steps (`benchmarks/lr_finder.py`)."""
    data = Fashion()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = find_lr(step, DataLoader(data, batch_size=128, shuffle=True, collate_fn=data.collate, drop_last=True), sweeps=2)
    assert found.verified
    assert found.lr is not None
    assert 0.2 <= found.lr <= 0.6


def test_a_constant_loss(training: Training) -> None:
    training.after = lambda loss: 2.0
    found = find_lr(training.step, training.loader, **SHORT)
    assert found.lr is None
    assert "cannot tell: the loss is 2 in every step" in found.why


def test_an_optimizer_that_never_steps() -> None:
    made = Training()
    setattr(made.optimizer, "step", lambda *_: None)  # noqa: B010  # as a patch would
    with pytest.raises(LrRangeError, match="the optimizer never stepped"):
        find_lr(made.step, made.loader, **SHORT)


def test_no_optimizer() -> None:
    with pytest.raises(LrRangeError, match="no optimizer was found"):
        find_lr(lambda batch: 1.0, [1, 2, 3])


def test_a_generator_that_ends_leaves_what_was_learnt(training: Training) -> None:
    batches = [training.data[i : i + 16] for i in range(0, 256, 16)] * 9
    found = find_lr(
        training.step, (batch for batch in batches[:130]), model=training.model, low=1e-4, high=10.0, sweeps=2, iterations=60, race_steps=60
    )
    assert not found.verified
    assert len(found.sweeps) == 2
    assert found.lr is not None
    assert any("ended after" in note for note in found.notes)
    with pytest.raises(LrRangeError, match="too few"):
        find_lr(training.step, iter(batches[:20]), model=training.model, **SHORT)


def test_steps_left_out_by_a_scaler_do_not_count() -> None:
    """A scale of 2^127 overflows in fp32 as a smaller one in fp16: gradients are infinite until it has halved often enough."""
    made = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6)

    def step(batch: Any) -> Any:
        made.optimizer.zero_grad()
        loss = (made.model(batch[0]) - batch[1]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(made.optimizer)
        scaler.update()
        return loss.detach()

    def counted(batch: Any) -> Any:
        print("call")
        return step(batch)

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = find_lr(counted, made.loader, model=made.model, optimizer=made.optimizer, **SHORT)
    assert found.verified
    calls = text.getvalue().split()
    assert len(calls) > found.steps  # some were left out, in each sweep anew
    assert scaler.get_scale() == 2.0**127


@pytest.mark.parametrize(
    ("value", "loss"),
    [(1, 1.0), (2.5, 2.5), (torch.tensor([3.0]), 3.0), ({"loss": torch.tensor(4.0)}, 4.0), (np.float32(5), 5.0)],
)
def test_what_counts_as_a_loss(value: Any, loss: float) -> None:
    assert loss_in(value) == loss


@pytest.mark.parametrize("value", [None, "1", True, torch.ones(2), {}, (1.0,)])
def test_what_does_not(value: Any) -> None:
    with pytest.raises(LrRangeError, match="the search for a learning rate needs its loss"):
        loss_in(value)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((wb.Task(model=nn.Module, dataset=list, loss=max),), {}, "a task is tried by its spec"),
        ((wb.RunSpec(task="text-gpt"), [1]), {}, "was given a loader, which only goes with a step"),
        ((wb.RunSpec(task="text-gpt"),), {"sweeps": 0}, "sweeps=0"),
        ((nn.Linear(1, 1), [1]), {}, "a module goes into model="),
        ((7, [1]), {}, r"find_lr\(int, …\): allowed are"),
        ((print,), {}, "a step needs the loader"),
    ],
)
def test_what_cannot_be_searched(arguments: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_lr(*arguments, **options)


@pytest.mark.usefixtures("forked_ranks")
def test_a_spec_in_a_launch_of_its_own(tmp_path: Path) -> None:
    task = tmp_path / "regress.py"
    task.write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nimport workbench as wb\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    x = torch.randn(512, 8)\n"
        "    return wb.Task(model=lambda: nn.Linear(8, 1), dataset=lambda: TensorDataset(x, x.sum(1, keepdim=True)),\n"
        "                   loss=lambda m, b: (m(b[0]) - b[1]).square().mean(), optimizer='sgd')\n"
    )
    spec = wb.RunSpec(task=f"{task}:build", micro_batch=4, accumulation=2, nproc_per_node=2, precision="amp_bf16", warmup_steps=5)
    found = find_lr(spec, runs_dir=tmp_path / "runs", **SHORT)
    assert found.verified
    assert found.batch == spec.global_batch == 16
    assert found.lr is not None
    assert 0.003 < found.lr < 1
    assert spec.replace(**found.changes()).lr == found.lr
    (run,) = (tmp_path / "runs").iterdir()
    assert find_lr(run) == found
    with pytest.raises(ValueError, match="no search for a learning rate"):
        find_lr(_without(run))


@pytest.mark.usefixtures("forked_ranks")
def test_a_step_that_fails_on_one_rank_ends_the_search(tmp_path: Path) -> None:
    """The other rank waited in its backward for this one's gradients, and this one for the other's loss, until nobody waited any more."""
    (tmp_path / "task.py").write_text(ONE_RANK_FAILS)
    spec = wb.RunSpec(task=f"{tmp_path / 'task.py'}:build", device="cpu", micro_batch=4, nproc_per_node=2)
    with pytest.raises(wb.RunError, match="a bad sample"):
        find_lr(spec, runs_dir=tmp_path / "runs", **SHORT)


def _without(run: Path) -> Path:
    (run / "lr_range.json").unlink()
    return run


@pytest.mark.slow
def test_two_ranks_take_one_decision(tmp_path: Path, forks: Forks) -> None:
    done = forks.ranks(2, tmp_path, SCRIPT, tmp_path)
    assert not done.returncode, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one["found"] == other["found"]
    assert one["restored"]
    assert other["restored"]
    found = LrFound.from_json(one["found"])
    assert found.verified
    assert found.batch == 32
    assert "rank 1 failed: step() returned nothing" in one["trouble"]
    assert other["trouble"].startswith("step() returned nothing")
    assert len({copy.copy(sweep).losses for sweep in found.sweeps}) == 3  # each seed had other batches


def test_a_slow_step_takes_no_longer_than_its_budget(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake clock: 0.3 s a step, of which the whole search takes 1,500."""
    calls = itertools.count()  # a list, or an object of ours, would be put back
    monkeypatch.setattr(time, "monotonic", lambda: 0.3 * int(repr(calls).removeprefix("count(").removesuffix(")")))

    def step(batch: Any) -> Any:
        next(calls)
        return training.step(batch)

    found = find_lr(step, training.loader, model=training.model, optimizer=training.optimizer, budget_s=60)
    assert found.why.startswith("not found in this time: after one sweep the rules suggest "), found.why
    assert (found.low or 0.0) < (found.high or 0.0)
    assert found.steps * 0.3 < 75
    assert any(note.startswith("sweeps have 40 steps instead of 100") for note in found.notes)
    assert any("larger budget_s=" in note for note in found.notes)


def test_ctrl_c_while_the_batches_of_a_round_are_loaded_keeps_the_sweeps(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(search: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lr_range._Search, "_collect", interrupted)
    found = find_lr(training.step, training.loader, model=training.model, optimizer=training.optimizer, **SHORT)
    assert len(found.sweeps) == 2
    assert "stopped by Ctrl-C during the race: this is the result so far" in found.notes
    assert found.suggestions


def test_a_slow_first_step_does_not_shorten_the_search(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake clock: the first step starts workers and compiles for 5 s, and the others take 10 ms."""
    calls = itertools.count()  # a list, or an object of ours, would be put back

    def now() -> float:
        taken = int(repr(calls).removeprefix("count(").removesuffix(")"))
        return 0.01 * taken + (5.0 if taken else 0.0)

    monkeypatch.setattr(time, "monotonic", now)

    def step(batch: Any) -> Any:
        next(calls)
        return training.step(batch)

    found = find_lr(step, training.loader, model=training.model, optimizer=training.optimizer, budget_s=60)
    assert {sweep.planned for sweep in found.sweeps} == {100}
    assert not [note for note in found.notes if "budget" in note]


@pytest.mark.parametrize("at", [130, 330])
def test_a_launch_that_is_told_to_stop_ends_with_what_it_knows(training: Training, tmp_path: Path, at: int) -> None:
    """As rank 0 of a launch sees it: the file FINISH is there from some step on, and what is known is in the run directory."""
    known = partial(tell, tmp_path)
    asked = itertools.count()
    found = lr_range.find(
        training.step, training.loader, model=training.model, optimizer=training.optimizer, known=known, stop=lambda: next(asked) >= at,
        **SHORT,
    )  # fmt: skip
    assert any(note.startswith("stopped by Ctrl-C") for note in found.notes)
    assert found.suggestions
    assert (
        run_directory.read_json(tmp_path / run_directory.PROGRESS)["known"] == f"{len(found.sweeps)} of {SHORT['sweeps']} sweeps are made"
    )


def test_before_the_first_sweep_nothing_is_known(training: Training) -> None:
    with pytest.raises(KeyboardInterrupt):
        lr_range.find(training.step, training.loader, model=training.model, optimizer=training.optimizer, stop=lambda: True, **SHORT)


@pytest.mark.parametrize("at", [130, 330])
def test_after_ctrl_c_it_returns_what_it_has(training: Training, at: int) -> None:
    calls = itertools.count()

    def step(batch: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return training.step(batch)

    found = find_lr(step, training.loader, model=training.model, optimizer=training.optimizer, **SHORT)
    assert any(note.startswith("stopped by Ctrl-C") for note in found.notes)
    assert found.suggestions
