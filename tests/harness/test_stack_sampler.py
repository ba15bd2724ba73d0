"""The sampler: which line of the user's is named, what is seen to be done there, and what looking costs."""

import itertools
import json
import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from workbench.core.package import users_line
from workbench.harness.results import Place
from workbench.harness.stack_sampler import StackSampler, place_of

pytestmark = pytest.mark.alone

NET = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
OPTIMIZER = torch.optim.AdamW(NET.parameters())
X = torch.randn(16, 64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step() -> Tensor:
    """A small healthy step."""
    loss = NET(X).square().mean()
    OPTIMIZER.zero_grad()
    loss.backward()
    OPTIMIZER.step()
    return loss


def sampled(work: Callable[[], object], seconds: float = 0.5) -> StackSampler:
    """The sampler after a while of work, in a thread of its own: the test's name and pytest are not on its stack."""
    sampler = StackSampler(fine=True)

    def run() -> None:
        torch.set_num_threads(1)  # OpenMP has a figure for each thread
        work()
        with sampler:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return sampler


def places(sampler: StackSampler) -> dict[str | None, float]:
    """Seconds by kind."""
    found = dict[str | None, float]()
    for place, seconds in sampler.places(0).items():
        found[place.kind] = found.get(place.kind, 0.0) + seconds
    return found


class Sleepy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


def sleeps() -> None:
    Sleepy()(step())


def loops() -> None:
    step()
    total = 0
    for i in range(300_000):
        total += i * i


def metrics() -> None:
    loss = step()
    for _ in range(20_000):
        loss.item()


SINK = open(os.devnull, "w")  # noqa: SIM115


def prints() -> None:
    step()
    for i in range(10_000):
        print("loss", i, 0.5, file=SINK)


LOGGER = logging.getLogger("sampled")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(SINK))


def logs() -> None:
    step()
    for i in range(2000):
        LOGGER.error("loss %s", i)


TREE = {str(i): [*range(20)] for i in range(10_000)}


def dumps() -> None:
    step()
    json.dumps(TREE)


def keeps(path: str = f"/tmp/sampled-{os.getpid()}.pt") -> None:
    step()
    torch.save({str(i): torch.zeros(100) for i in range(1000)}, path)


def save_curves() -> None:
    step()
    text = ""
    for i in range(20_000):
        text += f"{i},{i * i};"


def scores() -> None:
    step()
    NET.eval()
    with torch.no_grad():
        for _ in range(200):
            NET(X)
    NET.train()


@pytest.mark.parametrize(
    ("work", "function", "kind"),
    [
        (sleeps, "forward", None),
        (loops, "loops", None),
        (metrics, "metrics", None),
        (prints, "prints", "logging"),
        (logs, "logs", "logging"),
        (dumps, "dumps", "logging"),
        (keeps, "keeps", "checkpoint"),
        (save_curves, "save_curves", None),
        (scores, "scores", "evaluation"),
    ],
)
def test_the_line_that_takes_the_time_is_named(work: Callable[[], object], function: str, kind: str | None) -> None:
    try:
        sampler = sampled(work)
    finally:
        Path(f"/tmp/sampled-{os.getpid()}.pt").unlink(missing_ok=True)
    lines = dict[str, float]()
    for line, share in sampler.lines():
        file, name = line.split(" ")
        assert file.startswith("test_stack_sampler.py:")
        lines[name] = lines.get(name, 0.0) + share
    assert max(lines, key=lambda name: lines[name]) == function, sampler.lines()
    kinds = places(sampler)
    assert max(kinds, key=lambda one: kinds[one]) == kind, kinds


def mixes(batch: torch.Tensor) -> torch.Tensor:
    for row in range(len(batch)):
        batch[row] = batch[row] * 0.5 + batch[-row] * 0.5
    return batch


def test_the_steps_own_lines_are_those_outside_of_model_backward_and_optimizer() -> None:
    optimizer = torch.optim.SGD(NET.parameters(), 1e-9)

    def step() -> None:
        loss = torch.nn.functional.mse_loss(NET(mixes(X.clone())), X[:, :10])
        loss.backward()
        optimizer.step()

    with StackSampler(fine=True, operators=False) as sampler:
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            step()
    names = [line.partition(" ")[2] for line, _ in sampler.own_lines(looks=5)]
    assert names[0] == "mixes"
    assert "forward" not in names
    assert not sampler.own_lines(looks=10**6)
    with StackSampler() as usual:
        step()
    assert not usual.own_lines(looks=0)


def pairwise(x: Tensor) -> Tensor:
    return torch.stack([((x - row) ** 2).sum(1).argsort() for row in x])


class Neighbours(nn.Module):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return x[[row.argmax() for row in x]] + pairwise(x).float().mean()


def test_lines_of_functions_that_a_forward_calls_are_those_of_helpers() -> None:
    model, x = Neighbours(), torch.rand(40, 3)
    model.register_forward_hook(lambda *_: None)  # its forward is called from a function of torch then
    with StackSampler(fine=True, operators=False) as sampler:
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            model(x)
    helpers = sampler.own_lines(helpers=True, looks=5)
    own = [line for line, _ in sampler.own_lines(looks=5)]
    assert helpers
    number = pairwise.__code__.co_firstlineno + 1
    assert all(line.startswith(f"test_stack_sampler.py:{number} ") for line, _ in helpers)
    assert not any("pairwise" in line or "forward" in line for line in own)


def test_the_optimizer_is_seen() -> None:
    many = [nn.Parameter(torch.zeros(4)) for _ in range(300)]
    for weight in many:
        weight.grad = torch.ones(4)
    optimizer = torch.optim.AdamW(many, foreach=False)
    kinds = places(sampled(optimizer.step, 0.3))
    assert kinds["optimizer"] > 0.9 * sum(kinds.values())


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return torch.zeros(3)


def test_lines_of_a_loader_are_seen() -> None:
    loader = DataLoader(Slow(), batch_size=8)
    sampler = sampled(lambda: [batch.sum() for batch in loader], 0.3)
    (line, share), *_ = sampler.lines()
    assert line.endswith("__getitem__")
    assert share > 0.8


def test_looking_costs_less_than_two_percent() -> None:
    start = time.perf_counter()
    sampler = sampled(step, 1.0)
    assert sampler.spent < 0.02 * (time.perf_counter() - start)
    assert sampler.looks > 20


def test_a_look_that_costs_much_once_does_not_blind_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in which garbage is collected: it had no second look within this test. What always costs much is done seldom."""
    spent: Iterator[float] = itertools.chain([0.0], itertools.repeat(100.0))
    monkeypatch.setattr("workbench.harness.stack_sampler.time", SimpleNamespace(thread_time=lambda: next(spent)))
    with StackSampler() as sampler:
        while sampler.looks < 5:
            time.sleep(0.01)
    spent = itertools.count(0.0, 100.0)
    with StackSampler() as sampler:
        time.sleep(0.3)
    assert sampler.looks <= 2


def test_seconds_belong_to_the_call_that_runs() -> None:
    sampler = StackSampler()
    with sampler:
        for call in (3, None, 5):
            sampler.call = call
            time.sleep(0.1)
    assert sampler.places(4) == {}
    assert 0.05 < sum(sampler.places(3).values()) < 0.5
    assert 0.05 < sum(sampler.places(5).values()) < 0.5
    assert sum(share for _, share in sampler.lines([3, 5])) == pytest.approx(1.0)
    assert sampler.lines([4]) == ()
    looks = sampler.looks
    time.sleep(0.05)
    assert sampler.looks == looks  # it is over


def test_it_can_be_entered_again_and_leaves_the_interpreter_as_it_was() -> None:
    before, sampler = sys.getswitchinterval(), StackSampler(fine=True)
    for _ in range(2):
        with sampler:
            assert sys.getswitchinterval() < before
        assert sys.getswitchinterval() == before
    assert threading.active_count() == len([thread for thread in threading.enumerate() if thread.name != "workbench-sampler"])


@pytest.mark.parametrize(("owner", "name"), [(threading.Thread, "start"), (sys, "setswitchinterval")])
def test_a_start_that_fails_leaves_the_interpreter_as_it_was(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, sampler, real, calls = sys.getswitchinterval(), StackSampler(fine=True), getattr(owner, name), list[object]()

    def interrupted(*arguments: Any) -> None:
        if name != "start":
            real(*arguments)
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.__enter__()
    monkeypatch.undo()
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)
    assert (after, sampler._over.locked()) == (before, False)
    with sampler:
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def frame_in(path: str, source: str, function: str, *arguments: Any) -> FrameType:
    """The stack in a function of a file, at its call of `here()`."""
    frames: list[FrameType] = []
    names: dict[str, Any] = {"here": lambda *_: frames.append(sys._getframe(1))}
    exec(compile(textwrap.dedent(source), path, "exec"), names)
    thread = threading.Thread(target=names[function], args=arguments)
    thread.start()
    thread.join()
    return frames[0]


SITE = f"{Path(torch.__file__).parents[1]}"


@pytest.mark.parametrize(
    ("path", "name", "place"),
    [
        ("/home/me/train.py", "work", Place("train.py:3 work")),
        ("/tmp/ipykernel_77/123.py", "work", Place("cell:3 work")),
        ("<stdin>", "work", Place("<stdin>:3 work")),
        (f"{SITE}/transformers/trainer.py", "work", Place("trainer.py:3 work")),  # nothing of the user's is nearer
        (f"{SITE}/torch/nn/modules/linear.py", "work", None),
        ("/tmp/torchinductor_me/ab/cab.py", "work", None),
        ("<eval_with_key>.3", "work", None),
        (f"{Path(threading.__file__).parent}/json/encoder.py", "work", None),
        ("/home/me/train.py", "save_checkpoint", Place("train.py:3 save_checkpoint", "checkpoint")),
        ("/home/me/train.py", "saveCheckpoint", Place("train.py:3 saveCheckpoint", "checkpoint")),
        ("/home/me/train.py", "save_best_model", Place("train.py:3 save_best_model", "checkpoint")),
        ("/home/me/train.py", "saveState", Place("train.py:3 saveState", "checkpoint")),
        ("/home/me/train.py", "save_picture", Place("train.py:3 save_picture")),
        (f"{SITE}/matplotlib/figure.py", "savefig", Place("figure.py:3 savefig", "drawing")),
        (f"{SITE}/matplotlib/backends/backend_agg.py", "print_png", Place("backend_agg.py:3 print_png", "drawing")),
        (f"{SITE}/PIL/Image.py", "save", Place("Image.py:3 save")),
        ("/home/me/train.py", "validate", Place("train.py:3 validate", "evaluation")),
        ("/home/me/train.py", "log_metrics", Place("train.py:3 log_metrics", "logging")),
        ("/home/me/train.py", "dialogue", Place("train.py:3 dialogue")),
    ],
)
def test_whose_a_line_is_and_what_its_function_is_called(path: str, name: str, place: Place | None) -> None:
    assert place_of(frame_in(path, f"\ndef {name}():\n    here()", name)) == place


def test_the_users_line_is_named_though_a_package_and_torch_are_further_in() -> None:
    mine = compile("\ndef mine(): theirs()", "/home/me/train.py", "exec")
    inner = frame_in(
        f"{SITE}/timm/layers.py", "\ndef theirs(): here()\ndef start(mine): exec(mine, globals()); globals()['mine']()", "start", mine
    )
    assert place_of(inner) == Place("train.py:2 mine")


def test_what_lies_around_the_engine_is_not_looked_at() -> None:
    import workbench.harness

    engine = f"{Path(workbench.harness.__file__).parent}/blocks.py"
    source = compile("\ndef work(): here()", "/home/me/train.py", "exec")
    outer = "\ndef run(source): exec(source, globals()); globals()['work']()\ndef save(source): run(source)"
    frame = frame_in(engine, outer, "save", source)
    assert place_of(frame) == Place("train.py:2 work")
    assert place_of(frame.f_back) is None


def test_an_instruction_without_a_line_belongs_to_its_function() -> None:
    """Such as the end of a loop's body in Python 3.11; the thread that looked ended with a TypeError there."""
    frame = frame_in("/home/me/train.py", "\ndef work():\n    here()", "work")
    assert place_of(SimpleNamespace(f_code=frame.f_code, f_back=None, f_lineno=None)) == Place("train.py:2 work")  # type: ignore[arg-type]
    assert users_line(SimpleNamespace(f_code=frame.f_code, f_back=None, f_lineno=None)) == "train.py:2 work"  # type: ignore[arg-type]


def test_a_frame_that_is_half_made_is_passed_over() -> None:
    sampler = StackSampler()
    sampler._note(SimpleNamespace(f_code=CellType(1), f_back=None, f_lineno=1))  # type: ignore[arg-type]
    sampler._note(sys._getframe())
    (line,) = sampler.lines()
    assert line[0].endswith("test_a_frame_that_is_half_made_is_passed_over")


@pytest.mark.parametrize("file", ["programs/experiment.py", "train/trainer.py", "train/precision.py"])
def test_a_line_of_the_workbench_is_nobodys(file: str) -> None:
    """A task whose model is tiny was told that its step is spent in experiment.py."""
    path = str(Path(wb.__file__).parent / file)
    assert place_of(frame_in(path, "\ndef step():\n    here()", "step")) is None
    sample = str(Path(wb.__file__).parent / "train" / "models.py")
    assert place_of(frame_in(sample, "\ndef forward():\n    here()", "forward")) == Place("models.py:3 forward")
