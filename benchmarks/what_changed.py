"""Planted regressions and planted commits: is the right owner named, and with how many trainings?

Each of 20 pairs of runs differs in several things, of which one owns the regression: a knob, an environment variable, the code, a package
in a folder of PYTHONPATH, data, or the machine. 10 histories have one slow commit. Trainings are real: spec, code, variables, packages and
data are put back and read again; each is forked from a process that has imported torch, in the place of a launch, which takes seconds
longer. Their clock is not: `time.sleep` sets it forward, by 5 % more or less from step to step and 1.5 % from training to training, and the
machine becomes 0.2 % slower with each. So the result does not depend on what else this machine does. Histories are also searched by hand,
as with `git bisect run`: one training of a commit, which is bad above the middle of one of the good and one of the bad.

The last case is real in all: launches that compute, by the real clock, and other processes that want all cores while run B trains.

Run: python -m benchmarks.what_changed [CASES] [--seed 0]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Clock:
    """The real time, or in a training a time that only `time.sleep` sets forward."""

    def __init__(self) -> None:
        self.ns: int | None = None
        self.history, self.trainings = "", 0
        self.real, self.sleeping, self.chance, self.slow = time.perf_counter_ns, time.sleep, random.Random(), 1.0
        time.perf_counter_ns, time.perf_counter, time.sleep = self.now, lambda: self.now() / 1e9, self.sleep

    def begin(self) -> None:
        """From now on it is set forward; the training is one of many, on a machine that varies and becomes slower."""
        number, self.ns = self.trainings, 0
        self.chance = random.Random(f"{self.history} {number}")
        self.slow = self.chance.lognormvariate(0, 0.015) * 1.002**number

    def now(self) -> int:
        """Nanoseconds."""
        return self.real() if self.ns is None else self.ns

    def sleep(self, seconds: float) -> None:
        """Sleep, or set it forward."""
        if self.ns is None or threading.current_thread() is not threading.main_thread():
            self.sleeping(seconds)
        else:
            self.ns += int(1e9 * seconds * self.slow * self.chance.lognormvariate(0, 0.05))


CLOCK = Clock()  # before the modules that take `time.perf_counter_ns` when they are imported

import torch._dynamo  # noqa: E402, F401

import workbench as wb  # noqa: E402
from workbench.batch.measure.noise_watch import NoiseLog  # noqa: E402
from workbench.core import run_directory  # noqa: E402
from workbench.core.display import table as display  # noqa: E402
from workbench.diagnosis import regression, rerun  # noqa: E402
from workbench.diagnosis.rerun import Reruns  # noqa: E402
from workbench.memory.measure.at_oom import held  # noqa: E402
from workbench.programs.train import read_spec  # noqa: E402
from workbench.runs.launch import environment  # noqa: E402
from workbench.runs.launch.new_run import NewRun, Surroundings  # noqa: E402
from workbench.runs.run import Run  # noqa: E402
from workbench.runs.spec import RunSpec, Spec  # noqa: E402
from workbench.runs.task import resolve  # noqa: E402
from workbench.train import loop  # noqa: E402
from workbench.train.ranks import Ranks  # noqa: E402

TASK = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
import pace
import workbench as wb

CODE = 1.0


class Numbers(Dataset):
    def __init__(self):
        self.wait = 0.001 * float((Path(os.environ["DATA_DIR"]) / "wait").read_text())

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(self.wait)
        return torch.ones(4), torch.zeros(2)


def loss(model, batch):
    half = 1.25 if torch.is_autocast_enabled("cpu") else 1.0
    time.sleep(0.012 * half * CODE * pace.FACTOR * float(os.environ.get("PACE", "1")) * float(Path(os.environ["MACHINE"]).read_text()))
    return (model(batch[0]) - batch[1]).square().mean()


def build():
    return wb.Task(model=lambda: nn.Linear(4, 2), dataset=Numbers, loss=loss, optimizer="sgd(lr=0.1)")
"""
COMPUTING = """
import torch
from torch import nn
import workbench as wb


def loss(model, batch):
    return (model(batch[0]) - batch[0]).square().mean()


def build():
    model = lambda: nn.Sequential(*(nn.Linear(384, 384) for _ in range(8)))
    dataset = lambda: torch.utils.data.TensorDataset(torch.randn(4096, 384))
    return wb.Task(model=model, dataset=dataset, loss=loss, optimizer="sgd(lr=0.01)")
"""
DECOYS: Mapping[str, Any] = {"lr": 0.05, "seed": 3, "ema": 0.99, "clip_grad_norm": 1.0}
"""Knobs that cost nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What run B has that run A has not, and which of it owns the regression."""

    owner: str
    """The name of the difference; "over" or "still": it is the machine."""
    factor: float
    """By which the wait of a step is multiplied, where that can be said."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of both."""


CASES = (
    *(Case(owner="PACE", factor=factor) for factor in (1.02, 1.05, 1.1, 1.3, 2.0)),
    *(Case(owner="code", factor=factor) for factor in (1.04, 1.1, 1.3, 2.0)),
    *(Case(owner="PYTHONPATH", factor=factor) for factor in (1.05, 1.2, 1.5)),
    *(Case(owner="DATA_DIR", factor=factor) for factor in (1.5, 3.0)),
    Case(owner="precision", factor=1, knobs={"precision": "amp_bf16"}),
    Case(owner="micro_batch", factor=1, knobs={"micro_batch": 4}),
    Case(owner="accumulation", factor=1, knobs={"accumulation": 2, "micro_batch": 4}),
    *(Case(owner=owner, factor=factor) for owner, factor in (("over", 1.1), ("over", 1.4), ("still", 1.2))),
)


class Forked(Reruns):
    """Trainings in forks."""

    count = 0

    def train(self, spec: Spec, around: Surroundings, name: str) -> Run:
        """A training, when it has ended, well or not."""
        type(self).count += 1
        return train(spec, around, self.runs_dir, name)


def train(spec: Spec, around: Surroundings, runs_dir: Any, name: str) -> Run:
    """A run as a launch leaves it, trained in a fork."""
    new = NewRun(runs_dir, name, around)
    CLOCK.trainings += 1
    _, environ = new._write(spec, [], None, (), {"kind": "what_changed"})
    (new.path / run_directory.LOCK).touch()
    child = os.fork()
    if not child:
        code = 1
        try:
            for stream in (1, 2):
                os.dup2(os.open(new.path / f"stream{stream}", os.O_WRONLY | os.O_CREAT), stream)
            CLOCK.begin()
            os.environ.clear()
            os.environ.update(environ)
            folder = around.folder or Path.cwd()
            os.chdir(folder)
            sys.path[:0] = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            read = read_spec(new.path)
            loop.train(read, resolve(read.task), Ranks.join(read), new.path, held=held, noise_log=NoiseLog)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    info = run_directory.read_json(new.path / run_directory.RUN_JSON)
    outcome = {"state": "failed" if status else "finished", "seconds": 1.0}
    run_directory.write_json(new.path / run_directory.RUN_JSON, info | {"outcome": outcome})
    git_state = environment.git_state(around.folder or Path.cwd())
    run_directory.write_json(new.path / run_directory.GIT, git_state or {})
    return Run.load(new.path)


def git(folder: Path, *words: str) -> str:
    """What git prints."""
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@e", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(top: Path, name: str, text: str) -> str:
    """A commit that changes the task; its id."""
    (top / "task.py").write_text(text)
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", name)
    return git(top, "rev-parse", "HEAD")


@contextmanager
def world() -> Iterator[Path]:
    """A repository with the task, two versions of a package, two folders of data, and a file that says how slow the machine is."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder, "repository")
        top.mkdir()
        git(top, "init", "-q", "-b", "main")
        Path(folder, "machine").write_text("1")
        os.environ["MACHINE"] = str(Path(folder, "machine"))
        before = Path.cwd()
        os.chdir(top)
        try:
            yield top
        finally:
            os.chdir(before)


def played(case: Case) -> tuple[Any, str, int, float]:
    """The answer for one case, the verdict in words, how many trainings it took, and seconds."""
    with world() as top:
        for folder, pace, wait in (("1", 1.0, 0.5), ("2", case.factor, 0.5 * case.factor)):
            (top.parent / folder).mkdir()
            (top.parent / folder / "pace.py").write_text(f'__version__ = "{folder}.0"\nFACTOR = {pace}\n')
            (top.parent / folder / "wait").write_text(str(wait))
        first = commit(top, "first", TASK)
        os.environ |= {"PYTHONPATH": str(top.parent / "1"), "DATA_DIR": str(top.parent / "1"), "PACE": "1"}
        os.environ.pop("NCCL_ALGO", None)
        spec = RunSpec(task="task.py:build", micro_batch=8, steps=60, device="cpu").replace(**case.base)
        a = train(spec, Surroundings(), top.parent / "runs", "a")
        chance = random.Random(case.factor)
        changed = spec.replace(**dict(chance.sample(sorted(DECOYS.items()), 2)) | case.knobs)
        os.environ["NCCL_ALGO"] = "Ring"
        commit(top, "second", TASK.replace("CODE = 1.0", f"CODE = {case.factor if case.owner == 'code' else 1.0}  # changed"))
        if case.owner in ("PYTHONPATH", "DATA_DIR"):
            os.environ[case.owner] = str(top.parent / "2")
        if case.owner == "PACE":
            os.environ["PACE"] = str(case.factor)
        if case.owner in ("over", "still"):
            Path(os.environ["MACHINE"]).write_text(str(case.factor))
        b = train(changed, Surroundings(), top.parent / "runs", "b")
        if case.owner == "over":
            Path(os.environ["MACHINE"]).write_text("1")
        assert first
        began, Forked.count = time.monotonic(), 0
        result = wb.what_changed(a, b, budget_s=3600)
        return result, result.verdict, Forked.count, time.monotonic() - began


@contextmanager
def another_process() -> Iterator[None]:
    """Real processes that count for ever, two for each core, each in a session of its own: Linux shares cores out between sessions."""
    count = [sys.executable, "-c", "sum(iter(int, 1))"]
    others = [subprocess.Popen(count, start_new_session=True) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def disturbed() -> Any:
    """The answer where run B trained beside another process, and differs from run A in a commit, a variable and two knobs as well."""
    with world() as top:
        for name in ("DATA_DIR", "PACE", "PYTHONPATH", "NCCL_ALGO"):
            os.environ.pop(name, None)
        commit(top, "first", COMPUTING)
        spec = RunSpec(task="task.py:build", micro_batch=64, steps=400, device="cpu")
        a = wb.launch(spec, runs_dir=top.parent / "runs").wait(check=True)
        os.environ["NCCL_ALGO"] = "Ring"
        commit(top, "second", f"{COMPUTING}# changed\n")
        with another_process():
            b = wb.launch(spec.replace(seed=3, ema=0.99), runs_dir=top.parent / "runs").wait(check=True)
        return wb.what_changed(a, b, budget_s=600)


def right(case: Case, result: Any) -> bool:
    """Is the owner the planted one?"""
    if case.owner in ("over", "still"):
        return bool(result.kind == case.owner)
    wanted = {"micro_batch", "accumulation"} if case.owner == "accumulation" else {case.owner}
    return result.kind == "owner" and set(result.owner) <= wanted


def by_hand(ids: list[str], spec: RunSpec, top: Path) -> str:
    """The commit that is named by halving: one training each, which is bad above the middle of the good one's and the bad one's step."""

    def value(place: int) -> float:
        git(top, "checkout", "-q", ids[place])
        run = train(spec, Surroundings(folder=top), top.parent / "runs", f"hand {place}")
        return statistics.fmean(rerun.step_times(run))

    good, bad = 0, len(ids) - 1
    limit = (value(good) + value(bad)) / 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if value(middle) > limit else (middle, bad)
    git(top, "checkout", "-q", "main")
    return ids[bad]


def bisected(number: int) -> tuple[bool, int, int, bool]:
    """Is the planted commit of a history found? With how many commits, and trainings; and is it found by hand?"""
    chance = random.Random(number)
    count, factor = chance.randint(4, 24), chance.choice((1.1, 1.2, 1.5))
    place = chance.randrange(1, count)
    with world() as top:
        (top / "pace.py").write_text("FACTOR = 1\n")
        (top / "wait").write_text("0.5")
        os.environ |= {"DATA_DIR": str(top), "PACE": "1", "PYTHONPATH": ""}
        ids = [
            commit(top, f"change {i}", TASK.replace("CODE = 1.0", f"CODE = {factor if i >= place else 1.0}  # {i}")) for i in range(count)
        ]
        Forked.count = 0
        spec = RunSpec(task="task.py:build", micro_batch=8, device="cpu")
        result = wb.bisect(spec, good=ids[0], steps=60, budget_s=3600)
        if result.first_bad != (ids[place],):
            print(result)
        by_halving = by_hand(ids, spec.replace(steps=60), top) == ids[place]
        return result.first_bad == (ids[place],), count, Forked.count, by_halving


def main() -> None:
    """Print a row per case, and what comes of all."""
    rerun.MEASURED_S = 1.0  # the clock's noise is that of a training, so that more steps add nothing
    regression.Reruns = Forked  # type: ignore[misc]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=int, default=range(len(CASES) + 11), metavar="CASE")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    given = parser.parse_args()
    rows, found, named = [], [], []
    for number in given.cases:
        if number == len(CASES) + 10:
            regression.Reruns = Reruns  # type: ignore[misc]
            print(f"another process: {'right' if (answer := disturbed()).kind == 'over' else 'WRONG'}\n{answer}", flush=True)
            continue
        CLOCK.history, CLOCK.trainings = f"{given.seed} {number}", 0
        if number >= len(CASES):
            ok, count, trainings, hand = bisected(number)
            by = f"by hand {'found' if hand else 'NOT found'}"
            print(f"history {number}: {'found' if ok else 'NOT found'} among {count - 1} commits, {trainings} trainings; {by}", flush=True)
            found.append((ok, count, trainings, hand))
            continue
        case = CASES[number]
        result, verdict, trainings, seconds = played(case)
        ok = right(case, result)
        named.append((ok, trainings))
        rows.append(
            [case.owner, f"{result.ratio.mid:.3f}", str(len(result.changes)), "yes" if ok else "no", str(trainings), f"{seconds:.0f} s"]
        )
        print(f"{number} {case.owner} {'right' if ok else 'WRONG'}: {verdict}", flush=True)
        if not ok:
            print(json.dumps(result.brief(), ensure_ascii=False))
    print(display.Table(columns=("planted", "B over A", "differences tried", "right", "trainings", "took"), rows=rows))
    if named:
        print(f"owners: {sum(ok for ok, _ in named)} of {len(named)}, {sum(count for _, count in named) / len(named):.1f} trainings each")
    if found:
        print(f"commits: {sum(ok for ok, *_ in found)} of {len(found)}; {[(count - 1, trainings) for _, count, trainings, _ in found]}")
        print(f"by hand: {sum(hand for *_, hand in found)} of {len(found)}")


if __name__ == "__main__":
    main()
