"""The auto-watch: real little training scripts that know nothing of us, each in a process of its own."""

import contextlib
import functools
import gc
import importlib.util
import inspect
import json
import os
import pickle
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.forked import Forks
from workbench.core.system_load import usable_cores
from workbench.core.vocabulary import PHASES
from workbench.timeline import hooks
from workbench.timeline.watch_script import _framework, _line_of_dataset

BASE = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORKERS = int(sys.argv[1]) if len(sys.argv) > 1 else 0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        time.sleep(0.004)
        return self.layer(x)

dataset = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
loader = DataLoader(dataset, batch_size=8, num_workers=WORKERS)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())

def train_on(x, y, model=model, optimizer=optimizer):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_passes_without_a_step_are_let_go() -> None:
    with wb.watching() as watched:
        for _ in range(5):
            list(DataLoader([1, 2]))  # type: ignore[arg-type]
        assert not watched.timeline.steps  # asked, it reads what has ended
        gc.collect()
        assert watched._places is not None
        assert len(watched._places) == 0


def test_threads_and_the_load_are_those_of_the_loop() -> None:
    with wb.watching() as watched:
        made = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2):
            made(x).sum().backward()
            optimizer.step()
        assert watched.timeline.noise is not None
    ended = watched.timeline
    assert ended.threads == torch.get_num_threads()
    assert ended.noise is not None
    assert ended.noise.cores == usable_cores()
    assert watched.timeline.noise == ended.noise, "what comes after the loop does not count"
    assert watched._recording._meter is None
    loop = wb.watch([1, 2, 3])
    list(loop)
    assert loop.timeline.noise is not None
    assert loop._recording._meter is None


def test_what_is_trained_inside_a_with_is_watched() -> None:
    made, plain, wait = torch.nn.Linear(4, 2), DataLoader.__iter__, 0.005

    def train(batches: int) -> None:
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(2 * batches, 4)), batch_size=2):
            time.sleep(wait)
            made(x).sum().backward()
            optimizer.step()

    with wb.watching() as watched:
        train(4)
        with wb.watching() as inner:
            train(6)
    assert inner is watched
    train(3)
    timeline = watched.timeline
    assert [step.samples for step in timeline.steps] == [2] * 10
    assert all(min(step.phases[PHASES.index(phase)] for step in timeline.steps) > 0 for phase in ("forward", "data_wait", "optimizer"))
    assert min(timeline.values("other")) >= wait
    assert made._compiled_call_impl is None
    assert DataLoader.__iter__ is plain
    with contextlib.suppress(RuntimeError), wb.watching() as again:
        train(2)
        raise RuntimeError
    assert len(again.timeline.steps) == 2
    assert DataLoader.__iter__ is plain
    with wb.watching() as given_up:
        train(2)
        for (x,) in (loop := wb.watch([(torch.ones(2, 4),)] * 3, model=made)):
            made(x).sum().backward()
        train(2)
    assert (len(given_up.timeline.steps), len(loop.timeline.steps)) == (2, 3)
    assert DataLoader.__iter__ is plain


def test_evaluations_and_checkpoints_inside_a_loop_are_noted(tmp_path: Path) -> None:
    class Evaluated(torch.nn.Linear):
        def eval(self) -> "Evaluated":  # as Hugging Face's models: torch's own is not called
            return self.train(False)

    class Slow:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __reduce__(self) -> Any:
            time.sleep(self.seconds)
            return float, (self.seconds,)

    long = 0.5

    def pauses(model: torch.nn.Module, *, by_loader: bool) -> list[tuple[str, int]]:
        loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
        with wb.watching() as watched:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.eval()  # before the training: that is no pause
            torch.save(model.state_dict(), tmp_path / "begin.pt")
            for number, (x,) in enumerate(loader):
                model.train()
                model(x).sum().backward()
                optimizer.step()
                if number == 1:
                    model.eval()
                    for (y,) in loader if by_loader else [(x,)]:
                        model(y)
                    time.sleep(long)
                if number == 2:
                    model.train()
                    torch.save(Slow(long), tmp_path / "last.pt")
        assert {pause.line.split(":")[0] for pause in watched.timeline.pauses} == {Path(__file__).name}
        assert min(pause.seconds for pause in watched.timeline.pauses) >= long
        return sorted((pause.kind, pause.after) for pause in watched.timeline.pauses)

    plain = torch.save, torch.nn.Module.eval, torch.nn.Module.train
    assert pauses(torch.nn.Linear(4, 2), by_loader=False) == [("checkpoint", 3), ("evaluation", 2)]
    assert pauses(Evaluated(4, 2), by_loader=True) == [("checkpoint", 3), ("evaluation", 2)]
    assert pauses(torch.nn.Sequential(Evaluated(4, 2)), by_loader=True) == [("checkpoint", 3), ("evaluation", 2)]
    assert (torch.save, torch.nn.Module.eval, torch.nn.Module.train) == plain


def test_each_checkpoint_is_noted_however_short_it_is_beside_a_step(tmp_path: Path) -> None:
    """What is saved every few steps costs as much as what takes long now and then. Its wrapper is the function itself to all who look."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = torch.save
    with wb.watching() as watched:
        assert (torch.save.__name__, inspect.signature(torch.save)) == ("save", inspect.signature(plain))
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)):
            model(x).sum().backward()
            optimizer.step()
            time.sleep(0.05)
            if number % 3 == 2:
                torch.save([torch.zeros(10_000)] * 1000, tmp_path / "last.pt")
    assert torch.save is plain
    assert [(pause.kind, pause.after) for pause in watched.timeline.pauses] == [("checkpoint", 3 * i + 3) for i in range(4)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_are_noted_once_whatever_saves_them(tmp_path: Path) -> None:
    """Also what is loaded only during the training, and what saves by torch.save itself."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = dcp.save
    savers: list[Callable[[], Any]] = [
        lambda: dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True),
        lambda: dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp2", no_dist=True),
    ]
    if importlib.util.find_spec("safetensors"):
        savers.append(lambda: importlib.import_module("safetensors.torch").save_file(model.state_dict(), tmp_path / "a.safetensors"))
    with wb.watching() as watched:
        for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(8, 1000)), batch_size=2)):
            model(x).sum().backward()
            optimizer.step()
            if number < len(savers):
                savers[number]()
    assert dcp.save is plain
    assert [(pause.kind, pause.after) for pause in watched.timeline.pauses] == [("checkpoint", i + 1) for i in range(len(savers))]


def test_a_pause_has_the_number_of_its_step_however_many_optimizers_a_step_has() -> None:
    models = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    x, long = torch.ones(2, 4), 0.5

    def step(number: int) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).sum().backward()
            optimizer.step()
        if number == 10:
            models[0].eval()
            time.sleep(long)
            models[0].train()
            time.sleep(long)  # is no evaluation any more

    for batches in (DataLoader(range(20), batch_size=1), range(20)):  # type: ignore[arg-type]
        with wb.watching() as watched:
            for number, _ in enumerate(batches):
                step(number)
        (pause,) = watched.timeline.pauses
        (longest,) = [step.index for step in watched.timeline.steps if step.seconds >= 2 * long]
        assert longest in (pause.after - 1, pause.after)
        assert long <= pause.seconds < 2 * long


def test_what_is_evaluated_in_each_step_is_no_pause() -> None:
    """As in reinforcement learning: the model acts, and then it learns. One that is frozen for good is no evaluation either."""
    model, frozen = torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *frozen.parameters()], 0.1)
    x = torch.ones(2, 4)
    with wb.watching() as watched:
        for _ in DataLoader(range(3), batch_size=1):  # type: ignore[arg-type]
            for _ in DataLoader(range(10), batch_size=1):  # type: ignore[arg-type]
                model.eval()
                time.sleep(0.02)
                model.train()
                frozen(model(x)).sum().backward()
                time.sleep(0.02)
                optimizer.step()
                frozen.eval()
        assert len(watched.timeline.steps) == 30
        assert len(watched.timeline.pauses) < 6
        nested = hooks.OPEN_LOOPS
        for _ in DataLoader(range(1), batch_size=1):  # type: ignore[arg-type]
            model(x).sum().backward()
            optimizer.step()
            for _ in DataLoader(range(1), batch_size=1):  # type: ignore[arg-type]
                assert nested.top is not None
                assert not nested.top.evaluates
            model.eval()
            for _ in DataLoader(range(1), batch_size=1):  # type: ignore[arg-type]
                assert nested.top is not None
                assert nested.top.evaluates


@pytest.mark.parametrize("first", ["eval", "iter"])
def test_an_evaluation_that_was_not_closed_takes_no_step_of_the_training(first: str) -> None:
    """As Lightning has it ("iter"): the next batch is there before the step, and no evaluation asks for more batches than there are."""
    model, pause, kept = torch.nn.Linear(4, 2), 0.05, []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(26, 4)), batch_size=2)
    began = time.perf_counter()
    with wb.watching() as watched:
        batches = iter(loader)
        batch = next(batches)
        for number in range(12):
            following = next(batches, None)
            model(batch[0]).sum().backward()
            optimizer.step()
            if number % 4 == 3:
                if first == "eval":
                    model.eval()
                kept.append(iter(DataLoader(TensorDataset(torch.randn(2, 4)), batch_size=2)))
                model.eval()
                model(next(kept[-1])[0])
                time.sleep(pause)
                model.train()
            batch = following
        steps = watched.timeline.steps
    assert [step.index for step in steps] == list(range(11))  # the last one is not over
    assert sum(step.seconds for step in steps) < time.perf_counter() - began
    assert [step.index for step in steps if step.seconds > pause] == [3, 7]


def test_the_framework_is_the_one_whose_loop_the_user_has_called() -> None:
    def calls(module: str, called: Any) -> Any:
        code = compile("def train(inner):\n    return inner()", "/x/site-packages/somewhere.py", "exec")
        space: dict[str, Any] = {"__name__": module}
        exec(code, space)
        return functools.partial(space["train"], called)

    look = calls("torch.optim.optimizer", lambda: _framework(sys._getframe(1)))
    assert calls("transformers.trainer", calls("accelerate.optimizer", look))() == "transformers"
    assert calls("lightning.pytorch.trainer.trainer", look)() == "lightning"
    assert calls("accelerate.optimizer", look)() == calls("lightning.fabric.wrappers", look)() == ""  # the loop is the user's


def test_the_line_of_a_dataset_is_that_of_the_users_class() -> None:
    class Pictures(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    line = Pictures.__getitem__.__code__.co_firstlineno
    inner = torch.utils.data.Subset(Pictures(), [0])
    assert _line_of_dataset(Pictures()) == _line_of_dataset(inner) == f"test_watch_script.py:{line} Pictures.__getitem__"
    assert _line_of_dataset(TensorDataset(torch.ones(1))) == _line_of_dataset([1]) == _line_of_dataset(None) == ""


RUNNER = """
import runpy, sys
from workbench.timeline import watch_script
watch_script.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Watched:
    """What a watched script left; in a new process, or in one that has imported torch already."""

    def __init__(self, folder: Path, code: str, *args: str, forks: Forks | None = None, ranks: int = 0, expect: int = 0) -> None:
        script = folder / "train.py"
        script.write_text(BASE + textwrap.dedent(code))
        runner = folder / "runner.py"
        runner.write_text(RUNNER)
        env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"WORKBENCH_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        if forks:
            run = functools.partial(forks.ranks, ranks) if ranks else forks.run
            done = run(folder, runner, script, *args, env=env)
        else:
            command = [sys.executable, str(runner), str(script), *args]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == expect, done.stderr
        self.folder, self.stdout, self.stderr = folder, done.stdout, done.stderr

    def rows(self, rank: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"rank{rank}.jsonl").read_text().splitlines()]

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        return [row for row in self.rows(rank) if "step" in row]

    def notes(self) -> list[str]:
        return [row["note"] for row in self.rows() if "note" in row]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_training_and_validation(tmp_path: Path, forks: Forks, workers: str) -> None:
    code = """
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            train_on(x, y)
            if i == 1:
                with torch.no_grad():  # validation inside an epoch
                    for x, y in DataLoader(dataset, batch_size=16):
                        model(x)
        for x, y in loader:  # and between epochs
            model(x)
        time.sleep(1.5)
    """
    done = Watched(tmp_path, code, workers, forks=forks if workers == "0" else None)
    steps = done.steps()
    lines = [line.strip() for line in (tmp_path / "train.py").read_text().splitlines()]
    loop, step = (lines.index(text) + 1 for text in ("for i, (x, y) in enumerate(loader):", "optimizer.step()"))
    places = {"loop": f"train.py:{loop}", **({} if workers == "0" else {"workers": workers}), "step": f"train.py:{step} train_on"}
    assert [row["places"] for row in done.rows() if "places" in row] == [places]
    assert done.stderr == ""
    assert [step["step"] for step in steps] == list(range(8))
    assert [step["samples"] for step in steps] == [8] * 8
    for step in steps:
        assert step["forward"] > 0.004
        assert step["backward"] > 0
        assert step["optimizer"] > 0
        assert sum(step[phase] for phase in PHASES) < 1.5 or step["step"] in (0, 4)  # neither sleep nor evaluation between the epochs
    assert min(steps[1]["other"], steps[5]["other"]) > 0.008
    assert done.notes() == ["12 batches with no optimizer step after them are not steps (evaluation, or the rest of an accumulation)"]


def test_two_ranks_under_ddp(tmp_path: Path, forks: Forks) -> None:
    code = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    for x, y in loader:
        train_on(x, y, wrapped)
    dist.destroy_process_group()
    """
    done = Watched(tmp_path, code, forks=forks, ranks=2)
    for rank in (0, 1):
        header, steps = done.rows(rank)[0], done.steps(rank)
        assert (header["rank"], header["world_size"]) == (rank, 2)
        assert len(steps) == 4
        assert all(step["forward"] > 0.004 and step["backward"] > 0 for step in steps)
        assert [row["gradients"] for row in done.rows(rank) if "gradients" in row] == [4 * (4 * 2 + 2)], "bytes of a weight and a bias"


def test_a_loop_without_loader(tmp_path: Path, forks: Forks) -> None:
    code = """
    for i in range(12):
        train_on(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """
    done = Watched(tmp_path, code, forks=forks)
    steps = done.steps()
    assert len(steps) == 11  # the first one showed where the model and the optimizer are
    assert all(step["forward"] > 0.004 and step["backward"] > 0 and step["optimizer"] > 0 and step["data_wait"] == 0 for step in steps)
    assert done.notes() == ["no DataLoader was seen in the training loop: waiting for data, if any, is in other"]


def test_two_optimizers_in_turn_without_loader(tmp_path: Path, forks: Forks) -> None:
    code = """
    twin = Net()
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for i in range(6):
        x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        train_on(x, y)
        train_on(x, y, twin, other)
    """
    steps = Watched(tmp_path, code, forks=forks).steps()
    assert len(steps) == 5
    assert all(step["forward"] > 0.008 for step in steps)


def test_an_iterator_by_hand_with_accumulation(tmp_path: Path, forks: Forks) -> None:
    code = """
    it = iter(loader)
    time.sleep(2)  # the script has other things to do before its first batch
    assert len(it) == 4 and it._num_yielded == 0  # whatever the loader's own iterator offers
    for step in range(4):
        for micro in range(2):
            try:
                x, y = next(it)
            except StopIteration:
                it = iter(loader)
                x, y = next(it)
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    del it
    """
    done = Watched(tmp_path, code, forks=forks)
    steps = done.steps()
    assert [step["samples"] for step in steps] == [16] * 4
    assert steps[0]["data_wait"] < 2
    assert sum(steps[0][phase] for phase in PHASES) < 2


def test_models_used_by_other_threads_are_no_part_of_training(tmp_path: Path, forks: Forks) -> None:
    code = """
    import threading
    serving, stop = Net(), threading.Event()
    def serve():
        while not stop.is_set():
            serving(torch.ones(1, 4))
    thread = threading.Thread(target=serve)
    thread.start()
    for x, y in loader:
        time.sleep(0.1)
        train_on(x, y)
    for i in range(8):
        time.sleep(0.1)
        train_on(x, y)
    stop.set()
    thread.join()
    """
    steps = Watched(tmp_path, code, forks=forks).steps()
    assert len(steps) in (11, 12)
    assert 0.004 < statistics.median(step["forward"] for step in steps) < 0.09  # a busy machine may hold up some
    for number, step in enumerate(steps):
        assert step["backward"] > 0
        assert step["other"] > 0.09 or number == 4  # without a loader, the first step begins at its forward


def test_training_in_another_thread_is_followed(tmp_path: Path, forks: Forks) -> None:
    code = """
    import threading
    def train():
        for i in range(12):
            train_on(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    for _ in range(2):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    """
    steps = Watched(tmp_path, code, forks=forks).steps()
    assert len(steps) > 11
    assert all(step["forward"] > 0.004 for step in steps[:11])


def test_a_second_model_later_on_is_found(tmp_path: Path, forks: Forks) -> None:
    code = """
    for x, y in loader:
        train_on(x, y)
    class Later(Net):
        pass
    model = Later()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for x, y in loader:
            train_on(x, y, model, optimizer)
    """
    steps = Watched(tmp_path, code, forks=forks).steps()
    assert len(steps) == 16
    assert all(step["forward"] > 0.004 for step in steps[-8:])


def test_a_model_that_was_frozen_is_found(tmp_path: Path, forks: Forks) -> None:
    code = """
    import gc
    loss_function = nn.CrossEntropyLoss()
    gc.freeze()
    for x, y in loader:
        train_on(x, y)
    """
    steps = Watched(tmp_path, code, forks=forks).steps()
    assert all(step["forward"] > 0.004 for step in steps[-2:])


def test_what_the_script_measures_itself_wins(tmp_path: Path, forks: Forks) -> None:
    code = """
    import workbench as wb
    for x, y in wb.watch(loader, model=model, optimizer=optimizer):
        train_on(x, y)
    assert "watched" not in DataLoader.__iter__.__qualname__
    timer = wb.StepTimer()
    for x, y in timer.batches(loader):
        with timer("forward"):
            pass
        with timer("optimizer"):
            train_on(x, y)
    """
    steps = Watched(tmp_path, code, forks=forks).steps()
    assert [step["step"] for step in steps] == list(range(8))
    assert all(step["forward"] > 0.004 for step in steps[:4])
    assert all(step["optimizer"] > 0.004 for step in steps[4:])


@pytest.mark.parametrize(("last", "expect"), [("raise RuntimeError('boom')", 1), ("sys.exit(3)", 3)])
def test_the_steps_of_a_script_that_fails_are_written(tmp_path: Path, forks: Forks, last: str, expect: int) -> None:
    code = f"""
    for i, (x, y) in enumerate(loader):
        train_on(x, y)
        if i == 2:
            {last}
    """
    done = Watched(tmp_path, code, forks=forks, expect=expect)
    assert len(done.steps()) == 3
    assert ("RuntimeError: boom" in done.stderr) is (expect == 1)


def test_an_evaluation_script_has_no_steps(tmp_path: Path, forks: Forks) -> None:
    done = Watched(tmp_path, "for x, y in loader: model(x)", forks=forks)
    assert done.steps() == []
    assert done.rows()[0]["clock"] == "host"
    assert "4 batches with no optimizer step" in done.notes()[0]
