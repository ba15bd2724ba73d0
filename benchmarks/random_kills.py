"""Kills processes of small trainings at random, resumes these, and checks that nothing survives, is lost or differs in the end.

python benchmarks/random_kills.py [KILLS [FILE]] [--at-once N] [--seed N] [--parallel fsdp tp …] [--ranks N] [--moments checkpoint …]
                                  [--several-ranks]    about 10 s per kill

A second call with the same FILE goes on. Each chain is a training of one or two ranks, without or with a worker per loader, that is killed
up to five times and resumed each time. Two ranks share the model ("zero1", "fsdp", "tp"), average it now and then ("local_sgd"), or follow
a learning-rate schedule from a file ("schedule").
Killed are ranks, workers of loaders, torchrun, the guard, its keeper and the launching program; by KILL, TERM, INT, SEGV, or STOP and later
KILL; alone and in bursts, or with `--several-ranks` two ranks or more at the same moment, each by KILL or TERM; while processes start,
while it trains, while a checkpoint or a row of the timeline is written, and while `wb.launch` itself runs. After each kill: no process that
carries the mark of the trial is left, and the culprit that is named was hit.
At the end of a chain: weights, optimizer and losses are bit for bit those of an undisturbed training, and every rank has every step once.

Exit code: 0 all was well, 1 something was not (FILE says what, and the run directories are kept).
"""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from workbench.core import run_directory
from workbench.core.display.table import Table
from workbench.runs import entrypoints
from workbench.runs.restarts import checkpoints_of
from workbench.runs.run import Run
from workbench.train import checkpoint_file

ROOT = Path(__file__).parents[1]
MARK = "RANDOM_KILLS"
"""All that a trial starts carries RANDOM_KILLS=<its mark> in its environment, whatever its parent, session or name."""
STEPS, EVERY = 48, 4
"""Optimizer steps of a training, and between two checkpoints."""
READY, ENDED, GONE = 600.0, 120.0, 20.0
"""Seconds that a run may take until it trains, to end, and until its last process is gone."""
TASK = """
import time, torch
import workbench as wb

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return {samples}

    def __getitem__(self, index):
        time.sleep({seconds})
        x = torch.sin(torch.arange({inputs}.0) * (index + 1))
        return x, x.sum(0, keepdim=True)

def build():
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    model = lambda: torch.nn.Sequential(torch.nn.Linear({inputs}, {hidden}), torch.nn.Tanh(), torch.nn.Linear({hidden}, 1))
    return wb.Task(model=model, dataset=Slow, loss=loss, optimizer="sgd(lr={lr}, momentum=0.9)",
                   tensor_parallel={{"0": "colwise", "2": "rowwise"}})
"""
"""A file with a small task that takes its time; `tests/runs/test_resume.py` trains it, too."""
LOCAL = "periodic(period=6, start=3)"
"""Most checkpoints are written between two averages, where ranks have parameters of their own."""
RATES = "def rate(step):\n    return 1 / (1 + 0.1 * step) if step % 7 else 0.5\n"
"""A learning-rate schedule of the user's own."""
LAUNCH = f"""
import sys, time
import workbench as wb
resume, ranks, workers, mode = sys.argv[1:]
modes = {{"tp": {{"tensor_parallel": int(ranks)}}, "local_sgd": {{"local_sgd": "{LOCAL}"}}, "schedule": {{"schedule": "rates.py:rate"}}}}
spec = wb.RunSpec(task="task.py:build", device="cpu", micro_batch=2, steps={STEPS}, checkpoint_every={EVERY}, nproc_per_node=int(ranks),
                  num_workers=int(workers), **{{"schedule": "cosine", **modes.get(mode, {{"parallel": mode}})}})
run = wb.launch(resume=resume) if resume else wb.launch(spec, runs_dir="runs")
print(run.path, flush=True)
time.sleep(600)
"""
SIGNALS = ("KILL", "TERM", "INT", "SEGV", "STOP+KILL")
MODES = ("ddp", "zero1", "fsdp", "tp", "local_sgd", "schedule")
"""How two ranks share the model: not, their optimizer, in shards, in split layers, by an average now and then; or not, with `RATES`."""
Kind = tuple[int, int, str]
"""Ranks, workers of each, and mode of a training."""
MOMENTS = ("launching", "starting", "training", "checkpoint", "row")
PROGRAM, GUARD, KEEPER, TORCHRUN = "launching program", "guard", "keeper", "torchrun"
MOST = 5
"""Kills of one training, at most."""
WEIGHTS = {"rank ": 4, "worker of rank ": 4, TORCHRUN: 2}
"""How often a role is hit, compared with the others."""
RESUMABLE = ("failed", "lost", "stopped", "abandoned")


@dataclass(kw_only=True)
class Kill:
    """One attempt of a run, and how it was ended."""

    moment: str
    sent: list[tuple[str, str]] = field(default_factory=list)
    """To whom, and which signal."""
    state: str = ""
    said: str = ""
    """What the run says of it."""
    right: bool = True
    """Was the culprit that is named hit?"""
    gone: float = 0.0
    """Seconds from the first signal until no process was left."""
    survivors: list[str] = field(default_factory=list)
    counted: bool = True
    """False where the launching program ended before this attempt of the run had begun."""


@dataclass(kw_only=True)
class Chain:
    """A training that was killed and resumed until it ended."""

    number: int
    ranks: int
    workers: int
    parallel: str = "ddp"
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Attempts that were ended."""
        return sum(kill.counted for kill in self.kills)


# --- processes


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of a trial."""

    pid: int
    parent: int
    command: str
    rank: int | None


def processes(mark: str) -> list[Process]:
    """All that carry a mark."""
    wanted, there = f"{MARK}={mark}".encode(), list[Process]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended while we looked
            environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if wanted in environ:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                rank = next((int(entry[5:]) for entry in environ if entry.startswith(b"RANK=")), None)
                there.append(Process(pid=int(name), parent=parent, command=command, rank=rank))
    return there


def roles(mark: str, program: int) -> dict[str, int]:
    """Who is who among the processes of a trial: the role → the process."""
    there = processes(mark)
    who = {PROGRAM: program}
    guards = {process.pid: process for process in there if "guard.py {" in process.command}
    for process in guards.values():
        who[GUARD if process.parent in guards else KEEPER] = process.pid
    launched = [process for process in there if process.pid not in guards]
    for process in launched:
        if process.rank is None and entrypoints.TORCHRUN in process.command and process.parent == who.get(GUARD):
            who[TORCHRUN] = process.pid
    ranks = {process.pid: process.rank for process in launched if process.rank is not None and process.parent == who.get(TORCHRUN)}
    who |= {f"rank {rank}": pid for pid, rank in ranks.items()}
    for process in launched:
        if process.parent in ranks and "resource_tracker" not in process.command:
            who[f"worker of rank {ranks[process.parent]}"] = process.pid
    return who


def send(who: dict[str, int], sent: list[tuple[str, str]], pauses: list[float]) -> None:
    """Send each signal, with a pause before it."""
    for (role, name), pause in zip(sent, pauses, strict=True):
        time.sleep(pause)
        with contextlib.suppress(ProcessLookupError):
            if name == "STOP+KILL":
                os.kill(who[role], signal.SIGSTOP)
                time.sleep(0.3)
            os.kill(who[role], getattr(signal, f"SIG{name.removeprefix('STOP+')}"))


# --- one attempt


class Interrupted(RuntimeError):
    """The run ended before its moment came."""


def until(condition: Callable[[], Any], run: Run, limit: float, pause: float = 0.0005) -> None:
    """Wait for a condition while a run goes on.

    Raises:
        Interrupted: the run ended.
    """
    end = time.monotonic() + limit
    looked = 0
    while not condition():
        looked += 1
        if looked % 100 == 0 and run.state != "running":
            raise Interrupted
        if time.monotonic() > end:
            raise TimeoutError(f"{run!r} does not get that far in {limit:g} s")
        time.sleep(pause)


def size(path: Path) -> int:
    """Of a file; 0 where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def await_moment(moment: str, run: Run, rng: random.Random, choose: Callable[[], object]) -> None:
    """Wait for the moment to kill; `choose` is called as soon as all processes are there, since later there is no time."""
    if moment == "starting":
        time.sleep(rng.uniform(0.0, 6.0))
        choose()
        return
    rows = run.path / run_directory.rank_file(0)
    before = size(rows)
    until(lambda: size(rows) != before, run, READY, 0.02)
    choose()
    if moment == "training":
        time.sleep(rng.uniform(0.0, 0.8))
        return
    parts = run.path / run_directory.CHECKPOINTS
    for _ in range(rng.randint(1, 3)):
        if moment == "row":
            before = size(rows)
            until(lambda: size(rows) != before, run, READY)  # noqa: B023
        else:
            until(lambda: not list(parts.glob("*.part")), run, READY)
            until(lambda: list(parts.glob("*.part")), run, READY)
    if moment == "checkpoint":
        time.sleep(rng.choice((0.0, 0.0, rng.uniform(0.0, 0.02))))


OF_RANK = {
    "KILL": r"{0}: was killed \(SIGKILL\)",
    "TERM": "{0}: was ended from outside by SIGTERM",
    "INT": "{0}: was ended from outside by SIGINT",
    "SEGV": r"{0}: crashed \(SIGSEGV\)",
}
OF_WORKER = r": (RuntimeError: DataLoader worker \(pid.* (is killed by signal|exited unexpectedly)|.*\(a worker of the DataLoader ended)"
LOST, STOPPED, ABANDONED = r"its guard was killed", r"stopped($|: SIGTERM)", "stopped because the process that launched it ended"
PREEMPTED = "stopped: SIGTERM led to a checkpoint"
"""Said where a rank got SIGTERM, from torchrun or from outside, and checkpoints are written."""


def expected(role: str, name: str) -> str:
    """A pattern of the truth after this signal alone; "" = it changes nothing."""
    name = name.removeprefix("STOP+")
    if role.startswith("worker"):
        if name == "TERM":  # its rank may be about to write a checkpoint
            return ""
        return role.removeprefix("worker of ") + OF_WORKER
    if role.startswith("rank"):
        return OF_RANK[name].format(role) + (f"|{PREEMPTED}" if name == "TERM" else "")
    if role == TORCHRUN:
        passed_on = f"|{PREEMPTED}" if name == "TERM" else ""
        return r"torchrun crashed \(SIGSEGV\)" if name == "SEGV" else f"torchrun was ended from outside by SIG{name}{passed_on}"
    if role == PROGRAM:
        return ABANDONED
    return {"TERM": STOPPED, "INT": ""}.get(name, LOST)


def said_of(run: Run) -> str:
    """What a run says of its end."""
    if run.error:
        return str(run.error)
    path = run.path / run_directory.PREEMPTED
    return f"{run.state}: {run_directory.read_json(path)['ended_by']} led to a checkpoint" if path.exists() else run.state


def draw(who: dict[str, int], rng: random.Random, *, several_ranks: bool = False) -> list[tuple[str, str]]:
    """Whom to send which signals: mostly one, else a burst to several; with `several_ranks`, KILL or TERM to two ranks or more."""
    ranks = sorted(role for role in who if role.startswith("rank "))
    if several_ranks and len(ranks) > 1:
        return [(role, rng.choice(("KILL", "TERM"))) for role in rng.sample(ranks, rng.randint(2, len(ranks)))]
    kinds: dict[str, list[str]] = {}
    for role in sorted(who):
        kinds.setdefault(role.rstrip("0123456789"), []).append(role)
    weights = [WEIGHTS.get(kind, 1) for kind in kinds]
    sent = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 4))):
        (kind,) = rng.choices(list(kinds), weights)
        sent.append((rng.choice(kinds[kind]), rng.choice(SIGNALS)))
    return sent if any(expected(*pair) for pair in sent) else [(PROGRAM, "KILL")]


def gone(mark: str, program: int) -> tuple[list[str], float]:
    """What is left of a run after some patience, and the seconds until nothing was."""
    began = time.monotonic()
    while left := [process for process in processes(mark) if process.pid != program]:
        if time.monotonic() - began > GONE:
            break
        time.sleep(0.02)
    return [f"{process.pid} {process.command:.100}" for process in left], time.monotonic() - began


class Trial:
    """The attempts of one chain, in a folder of its own."""

    def __init__(self, chain: Chain, folder: Path, rng: random.Random, *, several_ranks: bool = False) -> None:
        self.chain, self.folder, self.rng, self.mark = chain, folder, rng, uuid.uuid4().hex
        self.several_ranks = several_ranks
        self.path: Path | None = None
        """The run directory, once there is one."""
        folder.mkdir(parents=True)
        (folder / "rates.py").write_text(RATES)
        (folder / "task.py").write_text(TASK.format(samples=4096, seconds=8e-3, inputs=64, hidden=4096, lr=0.001))

    @contextlib.contextmanager
    def launched(self) -> Iterator["subprocess.Popen[str]"]:
        """A program that launches the training, or resumes it where it has a checkpoint."""
        resume = self.path if self.path and checkpoints_of(self.path) else None
        if not resume:
            self.path = None
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.folder / "stderr", "a") as errors:
            program = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(resume or ""), str(self.chain.ranks), str(self.chain.workers), self.chain.parallel],
                cwd=self.folder,
                env={**os.environ, MARK: self.mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert program.stdout
        try:
            yield program
        finally:
            program.kill()
            program.wait()
            program.stdout.close()
            left, _ = gone(self.mark, program.pid)
            if left:
                self.chain.problems.append(f"left behind: {left}")
            for process in processes(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def begun(self, program: "subprocess.Popen[str]") -> Run:
        """The run that the program has launched."""
        assert program.stdout
        line = program.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the launch failed: {(self.folder / 'stderr').read_text()[-2000:]}")
        self.path = Path(line)
        return Run.load(self.path)

    def kill(self, moment: str) -> bool:
        """Let the run go on, and kill at a moment; returns whether it was killed before its end."""
        kill = Kill(moment=moment)
        with self.launched() as program:
            if moment == "launching":
                self._kill_launch(kill, program)
            else:
                run = self.begun(program)
                who, pauses = dict[str, int](), list[float]()

                def choose() -> None:
                    who.update(roles(self.mark, program.pid))
                    kill.sent = draw(who, self.rng, several_ranks=self.several_ranks)
                    for number in range(len(kill.sent)):
                        pauses.append(self.rng.uniform(0.0, 0.05) if number and not self.several_ranks else 0.0)

                try:
                    await_moment(moment, run, self.rng, choose)
                except Interrupted:  # it ended before its moment came
                    kill.sent, pauses = [], []
                send(who, kill.sent, pauses)
                began = time.monotonic()
                while run.state == "running" and time.monotonic() - began < ENDED:
                    time.sleep(0.02)
                kill.survivors, _ = gone(self.mark, program.pid)
                kill.gone = time.monotonic() - began
                kill.state, kill.said = run.state, said_of(run)
                kill.right = any(re.match(pattern, kill.said) for pair in kill.sent if (pattern := expected(*pair)))
        if kill.state == "finished":
            return False
        self.chain.kills.append(kill)
        self._judge(kill)
        return True

    def _kill_launch(self, kill: Kill, program: "subprocess.Popen[str]") -> None:
        """Kill the launching program while `wb.launch` makes the run directory and starts the guard, or resumes."""
        places, end = ("runs/*", "runs/*/attempts/*"), time.monotonic() + READY
        before = [list(self.folder.glob(place)) for place in places]
        begun = self._begun()
        while [list(self.folder.glob(place)) for place in places] == before and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, 0.02), self.rng.uniform(0.0, 0.3))))
        kill.sent = [(PROGRAM, self.rng.choice(SIGNALS))]
        send({PROGRAM: program.pid}, kill.sent, [0.0])
        began = time.monotonic()
        program.wait()
        kill.survivors, kill.gone = gone(self.mark, program.pid)
        directories = sorted((self.folder / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
        if directories:
            self.path = directories[-1].parent
            run = Run.load(self.path)
            while run.state == "running" and time.monotonic() - began < ENDED:
                time.sleep(0.02)
            kill.state, kill.said = run.state, said_of(run)
        else:
            kill.state, kill.said = "none", "there is no run"
        kill.counted = self._begun() != begun

    def _begun(self) -> list[float]:
        """When the attempts of all runs here have begun."""
        infos = [run_directory.read_json(path) for path in sorted((self.folder / "runs").glob("*/run.json"))]
        return [info.get("begun", info["created"]) for info in infos]

    def _judge(self, kill: Kill) -> None:
        problems = self.chain.problems
        where = f"{kill.moment} {kill.sent}"
        if kill.survivors:
            problems.append(f"{where}: survivors {kill.survivors}")
        if not kill.right:
            problems.append(f"{where}: named {kill.said!r:.300}")
        if kill.state not in (*RESUMABLE, "none"):
            problems.append(f"{where}: the run is {kill.state}")
        if not {GUARD, KEEPER} <= {role for role, _ in kill.sent}:  # else nobody tidies up until it is resumed
            problems.extend(f"{where}: {what}" for what in self._left())

    def _left(self) -> list[str]:
        """What of multiprocessing's is left of the run."""
        left = self.path and list(Path(tempfile.gettempdir()).glob(f"pymp-{Run.load(self.path).id[:12]}*"))
        return ["a folder of multiprocessing is left"] if left else []

    def finish(self) -> Run:
        """Let the run go on to its end."""
        with self.launched() as program:
            run = self.begun(program).wait(READY, check=True)
        self.chain.problems.extend(f"{END}: {what}" for what in self._left())
        return run


END = "the end"
"""How a problem begins that shows when a chain has ended, and not after a kill."""


def content(run: Run) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Weights and optimizer after the last step, and the losses of all steps."""
    path = run.path / run_directory.CHECKPOINTS / f"step{STEPS:08d}.pt"
    state = checkpoint_file.load(path, torch.device("cpu"))
    kept = {name: state[name] for name in ("module", "optimizer", "scheduler")}
    shards = [torch.load(part, weights_only=True) for part in sorted(path.parent.glob(f"{path.stem}.rank*.pt"))]
    return kept | {"shards": shards}, [(row["step"], row["loss"]) for row in run.metric_rows]


def equal(left: Any, right: Any) -> bool:
    """Bit for bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return isinstance(right, list | tuple) and len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def differences(run: Run, reference: Any, ranks: int) -> Iterator[str]:
    """In what a run is not as the undisturbed one."""
    state, losses = content(run)
    if not equal(state, reference[0]):
        yield "weights or optimizer differ"
    if losses != reference[1]:
        yield f"losses differ: {[pair for pair in losses if pair not in reference[1]][:3]}, {len(losses)} rows"
    timelines = run.timelines
    if len(timelines) != ranks:
        yield f"{len(timelines)} timelines"
    for timeline in timelines:
        steps = [step.index for step in timeline.steps]
        if steps != list(range(STEPS)):
            missing = sorted(set(range(STEPS)) - set(steps))
            yield f"the timeline of a rank has {len(steps)} steps, lacks {missing}, twice {[s for s, n in Counter(steps).items() if n > 1]}"


def played(
    number: int, seed: int, folder: Path, references: dict[Kind, Any], *, moments: Sequence[str] = MOMENTS, several_ranks: bool = False
) -> Chain:
    """One chain, from its first launch to the comparison at its end."""
    rng = random.Random(f"{seed} {number}")
    ranks, workers, parallel = rng.choice(sorted(references))
    chain = Chain(number=number, ranks=ranks, workers=workers, parallel=parallel)
    trial = Trial(chain, folder, rng, several_ranks=several_ranks)
    try:
        for _ in range(rng.randint(1, MOST)):
            if not trial.kill(rng.choice(moments)):
                break
        ended = trial.path is not None and Run.load(trial.path).state == "finished"  # before its moment came
        run = Run.load(trial.path) if trial.path and ended else trial.finish()
        chain.problems += (f"{END}: {problem}" for problem in differences(run, references[ranks, workers, parallel], ranks))
    except Exception as error:
        chain.problems.append(f"{END}: {type(error).__name__}: {error}")
    return chain


def reference(ranks: int, workers: int, parallel: str, folder: Path) -> Any:
    """What an undisturbed training leaves."""
    chain = Chain(number=-1, ranks=ranks, workers=workers, parallel=parallel)
    run = Trial(chain, folder, random.Random(0)).finish()
    kept = content(run)
    assert not chain.problems, chain.problems
    assert not list(differences(run, kept, ranks))
    return kept


def kinds_of(modes: Sequence[str], ranks: int | None = None) -> list[Kind]:
    """Trainings in these modes, without and with a worker per loader; None = of two ranks, and in "ddp" also of one."""
    counts = {mode: (1, 2) if mode == "ddp" else (2,) for mode in modes} if ranks is None else dict.fromkeys(modes, (ranks,))
    return [(count, workers, mode) for mode in modes for count in counts[mode] for workers in (0, 1)]


def play(kills: int, file: Path | None, at_once: int, seed: int, kinds: Sequence[Kind], **how: Any) -> list[Chain]:
    """Chains until there are so many kills, each of one of these kinds; those that stand in the file count. `how`: as for `played`."""
    chains = []
    if file and file.exists():
        for line in file.read_text().splitlines():
            value = json.loads(line)
            chains.append(Chain(**value | {"kills": [Kill(**kill) for kill in value["kills"]]}))
    known = {chain.number for chain in chains}
    numbers = iter(number for number in range(10 * kills + 10) if number not in known)
    folder, gate = Path(tempfile.mkdtemp(prefix="random-kills-")), threading.Lock()

    def more(_: int) -> None:
        while True:
            with gate:
                if sum(chain.count for chain in chains) >= kills:
                    return
                number = next(numbers)
            chain = played(number, seed, folder / str(number), references, **how)
            if not chain.problems:
                shutil.rmtree(folder / str(number))
            with gate:
                chains.append(chain)
                if file:
                    with open(file, "a") as lines:
                        lines.write(json.dumps(asdict(chain)) + "\n")
                done = sum(chain.count for chain in chains)
                print(f"{done} of {kills} kills; chain {number}: {chain.problems or 'well'}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        made = pool.map(lambda kind: reference(*kind, folder / f"reference-{kind[0]}-{kind[1]}-{kind[2]}"), kinds)
        references = dict(zip(kinds, made, strict=True))
        list(pool.map(more, range(at_once)))
    if not any(chain.problems for chain in chains):
        shutil.rmtree(folder)
    return chains


def table(chains: list[Chain]) -> Table:
    """By who was hit, and at which moment."""
    kinds: dict[str, Callable[[Kill], bool]] = {
        **{
            f"{who}, alone": lambda kill, who=who: len(kill.sent) == 1 and kill.sent[0][0].startswith(who)  # type: ignore[misc]
            for who in ("rank", "worker", TORCHRUN, GUARD, KEEPER, PROGRAM)
        },
        "a burst to several": lambda kill: len(kill.sent) > 1,
        "ranks alone, two or more": lambda kill: len({role for role, _ in kill.sent if role.startswith("rank")}) == len(kill.sent) > 1,
        **{f"by {name}": lambda kill, name=name: any(pair[1] == name for pair in kill.sent) for name in SIGNALS},  # type: ignore[misc]
        **{f"moment: {moment}": lambda kill, moment=moment: kill.moment == moment for moment in MOMENTS},  # type: ignore[misc]
        "all": lambda kill: True,
    }
    rows = []
    of_modes = {f"mode: {mode}": [chain for chain in chains if chain.parallel == mode] for mode in sorted({c.parallel for c in chains})}
    every = [(name, chains, chosen) for name, chosen in kinds.items()]
    for name, some, chosen in [*((mode, some, kinds["all"]) for mode, some in of_modes.items()), *every]:
        kills = [kill for chain in some for kill in chain.kills if kill.counted and chosen(kill)]
        if kills:
            latest = max(kill.gone for kill in kills)
            rows.append(
                [
                    name,
                    len(kills),
                    sum(bool(k.survivors) for k in kills),
                    f"{sum(k.right for k in kills)} of {len(kills)}",
                    f"{latest:.1f} s",
                ]
            )
    well = sum(not any(problem.startswith(END) for problem in chain.problems) for chain in chains)
    note = (
        f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{well} of {len(chains)} trainings ended bit for bit as an undisturbed one, with every step of every rank once"
    )
    columns = ("killed", "kills", "with survivors", "named right", "gone after at most")
    return Table(columns=columns, rows=rows, title="Random kills", note=note)


def main() -> int:
    """Play, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=200)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", nargs="+", choices=MODES, default=["ddp"], metavar="MODE", help=f"of {', '.join(MODES)} (ddp)")
    parser.add_argument("--ranks", type=int, help="of each training (2; in ddp 1 or 2)")
    parser.add_argument(
        "--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS), metavar="MOMENT", help=f"of {', '.join(MOMENTS)} (all)"
    )
    parser.add_argument("--several-ranks", action="store_true", help="each time two ranks or more at the same moment, by KILL or TERM")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and children would inherit that
    kinds, how = kinds_of(given.parallel, given.ranks), {"moments": given.moments, "several_ranks": given.several_ranks}
    chains = play(given.kills, given.file, given.at_once, given.seed, kinds, **how)
    print(table(chains))
    for chain in chains:
        for problem in chain.problems:
            print(f"chain {chain.number}: {problem}")
    return int(any(chain.problems for chain in chains))


if __name__ == "__main__":
    sys.exit(main())
