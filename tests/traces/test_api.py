"""Capturing traces in this process: past the queue, with marks, with what it cost, and leaving all as it was."""

import gzip
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from workbench.core.progress import Waiting
from workbench.traces.analysis.captured import Captured
from workbench.traces.measure.capture import FETCH
from workbench.traces.measure.profiler import why_no_profiler


class Slow(Dataset[torch.Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(8)


class Training:
    """A small model and its step."""

    def __init__(self, sleep: float = 0.0) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.sleep = sleep

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()
        time.sleep(self.sleep)


def test_a_trace_of_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    training = Training(sleep=0.002)
    before = [one.clone() for one in training.model.parameters()]
    trace = wb.trace(training.step, [torch.ones(4, 8)] * 3, steps=4, into=tmp_path)
    assert trace.path.parent == tmp_path
    assert trace.path.name.endswith(".pt.trace.json.gz")
    assert len(trace.steps) == 4
    assert trace.windows.marked
    assert trace.slowdown is None or trace.slowdown >= 0
    assert "slowed down" in str(trace) or "what the profiler costs is not known" in str(trace)
    assert "aten::linear" in {one.name for one in trace.ops(by_shape=True).rows}
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert not training.optimizer.state
    assert capfd.readouterr().err == ""


def test_torch_names_the_waiting_for_any_loader(tmp_path: Path) -> None:
    def batches() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02)
            yield torch.ones(4, 8)

    trace = wb.trace(Training().step, batches(), steps=3, into=tmp_path)
    assert FETCH in {label.name for label in trace.columns.labels}
    assert trace.explain().verdict == "input-bound"


def test_a_full_queue_hides_nothing(tmp_path: Path) -> None:
    """Two workers have 16 batches ready when a window after two steps of warm-up opens; the loader is far slower than the step."""
    loader = DataLoader(Slow(0.02), batch_size=4, num_workers=2, prefetch_factor=8)  # 40 ms a batch
    trace = wb.trace(Training().step, loader, steps=6, into=tmp_path)
    assert trace.breakdown().mean("data_wait") > 0.1 * trace.breakdown().mean()
    assert any("prefetch queue of 16 batches was emptied" in note for note in trace.notes)


@pytest.mark.parametrize("at", [6, 11], ids=["plain", "traced"])
@pytest.mark.parametrize("where", ["loader", "step"])
def test_one_long_pause_is_no_slowdown(tmp_path: Path, at: int, where: str) -> None:
    """A pass that begins, or an evaluation, in one of the stretches: batches 5 to 7 and 15 and 16 are plain, 9 to 13 are traced."""
    training, taken = Training(sleep=0.02), 0

    def batches() -> Iterator[torch.Tensor]:
        for number in itertools.count():
            time.sleep(1.5 * (where == "loader" and number == at))
            yield torch.ones(4, 8)

    def step(batch: torch.Tensor) -> None:
        nonlocal taken
        time.sleep(1.5 * (where == "step" and taken == at))
        taken += 1
        training.step(batch)

    trace = wb.trace(step, batches(), steps=5, into=tmp_path, model=training.model, optimizer=training.optimizer)
    assert trace.slowdown is None or 0 <= trace.slowdown < 8


def test_a_step_that_fails_behind_the_traced_ones(tmp_path: Path) -> None:
    training, taken = Training(), 0

    def step(batch: torch.Tensor) -> None:
        nonlocal taken
        taken += 1
        if taken == 12:  # 2 of warm-up, 3 to settle, 2 plain, 1 of the profiler's warm-up, 3 traced
            raise ZeroDivisionError
        training.step(batch)

    with pytest.raises(ZeroDivisionError):
        wb.trace(step, [torch.ones(4, 8)], steps=3, into=tmp_path, model=training.model, optimizer=training.optimizer)
    (path,) = tmp_path.glob("*.pt.trace.json.gz")
    assert Captured.beside(path).is_file()


@pytest.mark.parametrize(("budget", "traced"), [(130, 3), (20, 2), (None, 5)])
def test_the_budget_ends_a_trace_with_the_steps_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float | None, traced: int
) -> None:
    """50 s pass before any step counts; each of those that do needs 10 s, as does one without the profiler."""
    training, now = Training(), 0.0
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: now))

    def step(batch: torch.Tensor) -> None:
        nonlocal now
        now += 10
        training.step(batch)

    given: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    trace = wb.trace(step, [torch.ones(4, 8)], steps=5, into=tmp_path, budget_s=budget, **given)
    assert len(trace.steps) == traced
    said = f"{traced} of 5 steps were traced: the budget would not allow more"
    assert (said in trace.notes) == (traced < 5)


def test_ctrl_c_ends_a_trace_with_the_steps_so_far(tmp_path: Path) -> None:
    training, taken, at = Training(), 0, 0

    def step(batch: torch.Tensor) -> None:
        nonlocal taken
        taken += 1
        if taken == at:
            raise KeyboardInterrupt
        training.step(batch)

    given: dict[str, Any] = {"steps": 3, "into": tmp_path, "model": training.model, "optimizer": training.optimizer}
    # 2 of warm-up, 3 to settle, 2 plain, 1 of the profiler's warm-up, 3 traced, 1 of rest, 1 plain
    for at, traced in ((7, 0), (9, 0), (10, 1), (11, 2), (12, 3)):  # noqa: B007
        taken = 0
        if not traced:
            with pytest.raises(KeyboardInterrupt, match="trace was stopped by Ctrl-C before it knew anything"):
                wb.trace(step, [torch.ones(4, 8)], **given)
        else:
            trace = wb.trace(step, [torch.ones(4, 8)], **given)
            assert len(trace.steps) == traced
            assert any(note.endswith("stopped by Ctrl-C") for note in trace.notes)
            assert any("of 3 steps were traced" in note for note in trace.notes) == (traced < 3)
        assert why_no_profiler() is None
        assert not training.optimizer.state


def test_options(tmp_path: Path) -> None:
    trace = wb.trace(Training().step, [torch.ones(4, 8)], steps=2, into=tmp_path, shapes=False, stacks=True, memory=True)
    events = json.loads(gzip.decompress(trace.path.read_bytes()))["traceEvents"]
    assert any(one["name"] == "[memory]" for one in events)
    assert any(one.get("cat") == "python_function" for one in events)
    assert "not recorded" in " ".join(trace.ops(by_shape=True).notes)


def test_a_profiler_that_runs_already(tmp_path: Path) -> None:
    from workbench.traces.measure.profiler import without_kineto_lines

    with without_kineto_lines(), torch.autograd.profiler.profile(), pytest.raises(ValueError, match="a profiler is running already"):
        wb.trace(Training().step, [torch.ones(4, 8)], into=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trace.json",), r"read by wb.Trace.load"),
        ((torch.nn.Linear(1, 1), [1]), "goes into model="),
        (([1], print), "the other way round"),
        ((3, [1]), "allowed are a step function with its loader, a RunSpec"),
        ((print,), "needs the loader"),
        ((wb.Task,), "needs the loader"),
        ((lambda batch: None, []), "the loader is empty"),
    ],
)
def test_what_cannot_be_traced(tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wb.trace(*arguments, into=tmp_path)


@pytest.mark.parametrize("steps", [1, 0, True, 2.5, "3"])
def test_numbers_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="a whole number of at least 2"):
        wb.trace(print, [1], steps=steps)


@pytest.mark.parametrize(("name", "value"), [("shapes", "yes"), ("stacks", None), ("memory", 3), ("flops", 1)])
def test_options_are_true_or_false(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: True or False is allowed"):
        wb.trace(Training().step, [torch.ones(4, 8)], into=tmp_path, **{name: value})


def test_a_place_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"no traces can be put there .*: give a directory"):
            wb.trace(Training().step, [torch.ones(4, 8)], into=place)


def test_a_loader_that_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="could be read only once, and it ended after 4 batches"):
        wb.trace(Training().step, iter([torch.ones(4, 8)] * 4), into=tmp_path)
