"""Measures what timing every phase costs: CPU microseconds added to a training step, beside TraceML 0.5.0 (auto mode).

    python benchmarks/timer_cost.py [--rounds 200] [--steps 200]

TraceML is left out where it is not installed (`pip install traceml-ai==0.5.0`). "wb.watch + alarm" also takes the loss of each step, and
looks for changes. The alarm's thread wakes too seldom for blocks this short, so each block ends with a look at its own steps; what it
costs a training whose steps are steady is measured on steps that compute for a fixed CPU time, its thread by the thread's clock. Every tool
does its work on the same two steps with a DataLoader without workers: an empty one (a model of two empty layers, backward of one number, an
optimizer that does nothing), which shows the cost of the tool's code; and a small one (two linear layers, loss, backward, SGD), whose work
drives that code out of the caches, so that the same takes longer there.

Tools that patch torch for good (our auto-watch, TraceML) have a process of their own; blocks of steps take turns across all processes, in
an order that changes, and every block is compared with the block without a tool of the same round. Blocks are short, so that what else the
machine does hits both alike. The figure is the CPU time of the whole process, so the writer thread's share is in it; what TraceML does in
its separate aggregator process is not.
"""

import argparse
import importlib.util
import math
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ARMS = {
    "nothing": "plain",
    "StepTimer": "plain",
    "wb.watch": "plain",
    "wb.watch + rank log": "plain",
    "wb.watch + alarm": "plain",
    "auto-watch + rank log": "auto",
    "TraceML 0.5.0 auto": "peer",
}
"""What is compared, and the process it runs in."""
STEPS = ("an empty step", "a small step")
STEADY = {"steady, 1 ms": (1_000_000, 400, 30), "steady, 10 ms": (10_000_000, 40, 100)}
"""Kinds of steady steps: the CPU nanoseconds that their model computes, steps of a block, and blocks in which the alarm's thread has looked
several times (every 3 to 10 seconds)."""


def steady_arms(kind: str) -> dict[str, Callable[[], float]]:
    """Blocks of watched steps with the alarm and without; each returns the CPU microseconds a step that the process spends otherwise.

    Otherwise than in the model, which multiplies matrices until it has had its CPU time, so that the rest of the step runs with caches as
    such work leaves them, and than in the alarm's thread, which is measured by a clock of its own. The model's time varies by 3 % from
    step to step, and the loop's clock is its CPU time: other jobs on the machine do not make its steps unsteady.
    """
    import torch
    from torch import nn

    from workbench.timeline.hooks import Losses
    from workbench.timeline.marks import HostRecorder
    from workbench.timeline.watch import Watch

    torch.set_num_threads(1)
    length, steps, _ = STEADY[kind]
    computed, weight, matrix = [0], nn.Parameter(torch.ones(())), torch.randn(128, 128)

    class Busy(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            begun = now = time.thread_time_ns()
            enough = length * random.lognormvariate(0, 0.03)
            while now - begun < enough:
                torch.mm(matrix, matrix)
                now = time.thread_time_ns()
            computed[0] += now - begun
            return weight.sum()

    model, optimizer = Busy(), torch.optim.SGD([weight], 1e-6)
    recorder = partial(HostRecorder, time.thread_time_ns)

    def block(loop: Watch[torch.Tensor]) -> float:
        computed[0], begun, thread = 0, time.process_time_ns(), alarm_ns()
        for batch in loop:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        loop._recording.settle()
        return (time.process_time_ns() - begun - (alarm_ns() - thread) - computed[0]) / 1e3 / steps

    def loss_block() -> float:
        """Of every second loss that follows the work of a step, the µs in which it is taken; less what the clock takes in the others."""
        losses, spent = Losses(), ([], [])
        for number in range(steps):
            loss = model(batches[0])
            take = losses.add if number % 2 else id
            begun = time.perf_counter_ns()
            take(loss)
            spent[number % 2].append(time.perf_counter_ns() - begun)
            loss.backward()
        return (statistics.median(spent[1]) - statistics.median(spent[0])) / 1e3

    batches = [torch.zeros(4, 1)] * steps
    loops = {
        word: Watch(batches, model=model, optimizer=optimizer, alarm=word == "alarm", recorder=recorder) for word in ("plain", "alarm")
    }
    arms: dict[str, Callable[[], float]] = {f"{kind}: {word}": partial(block, loop) for word, loop in loops.items()}
    return arms | {f"{kind}: thread": lambda: alarm_ns() / 1e3, f"{kind}: loss": loss_block}


def alarm_ns() -> float:
    """CPU nanoseconds so far of the alarm's thread."""
    threads = [one.ident for one in threading.enumerate() if one.name == "workbench-alarm" and one.ident]
    return 1e9 * sum(time.clock_gettime(time.pthread_getcpuclockid(one)) for one in threads)


def arms_of(role: str, steps: int, folder: str) -> dict[str, Callable[[], Any]]:
    """What a process can run: a block of steps by their kind and tool, with whatever the tool has to do later for them."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import workbench as wb
    from workbench.timeline import watch_script

    torch.set_num_threads(1)
    if role == "auto":
        os.environ["WORKBENCH_RUN_DIR"] = folder
        watching = watch_script.install()
    if role == "peer":
        import traceml_ai

        traceml_ai.init(mode="auto")
    dataset = TensorDataset(torch.randn(4 * steps, 64), torch.randint(0, 10, (4 * steps,)))
    loader: Iterable[Any] = DataLoader(dataset, batch_size=4)

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.weight = nn.Sequential(nn.Identity(), nn.Identity()), nn.Parameter(torch.zeros(()))

        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layers(self.weight)
            return loss

    class Nothing(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            pass

    empty, small = Empty(), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizers = {empty: Nothing(empty.parameters()), small: torch.optim.SGD(small.parameters(), 1e-3)}
    losses = {empty: lambda y, _: y, small: nn.functional.cross_entropy}

    def train(model: nn.Module, loader: Iterable[Any]) -> None:
        optimizer, loss_of = optimizers[model], losses[model]
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()

    def train_marked(model: nn.Module, timer: wb.StepTimer) -> None:
        optimizer, loss_of = optimizers[model], losses[model]
        for x, y in timer.batches(loader):
            optimizer.zero_grad()
            with timer("forward"):
                loss = loss_of(model(x), y)
            with timer("backward"):
                loss.backward()
            with timer("optimizer"):
                optimizer.step()
        timer._recording.settle()

    def train_traced(model: nn.Module) -> None:
        optimizer, loss_of = optimizers[model], losses[model]
        for x, y in loader:
            with traceml_ai.trace_step(model):
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()

    def train_watched(model: nn.Module, loader: Any) -> None:
        train(model, loader)
        loader._recording.settle()

    def train_alarmed(model: nn.Module, loader: Any) -> None:
        train_watched(model, loader)
        loader._recording._alarm.look()

    def train_auto(model: nn.Module) -> None:
        train(model, loader)
        watching._recording.settle()

    arms: dict[str, Callable[[], Any]] = {}
    for kind, model in zip(STEPS, (empty, small), strict=True):
        if role == "peer":
            arms[f"{kind}: TraceML 0.5.0 auto"] = partial(train_traced, model)
        elif role == "auto":
            arms[f"{kind}: auto-watch + rank log"] = partial(train_auto, model)
        else:
            os.environ.pop("WORKBENCH_RUN_DIR", None)
            timer, watched = wb.StepTimer(), wb.watch(loader, model=model, optimizer=optimizers[model])
            alarmed = wb.watch(loader, model=model, optimizer=optimizers[model], alarm=True)
            os.environ["WORKBENCH_RUN_DIR"] = folder
            logged = wb.watch(loader, model=model, optimizer=optimizers[model])
            arms[f"{kind}: nothing"] = partial(train, model, loader)
            arms[f"{kind}: StepTimer"] = partial(train_marked, model, timer)
            arms[f"{kind}: wb.watch"] = partial(train_watched, model, watched)
            arms[f"{kind}: wb.watch + rank log"] = partial(train_watched, model, logged)
            arms[f"{kind}: wb.watch + alarm"] = partial(train_alarmed, model, alarmed)
    return arms


def worker(role: str, steps: int) -> None:
    """Run blocks of steps as asked for through a socket, and answer with the CPU microseconds per step."""
    with tempfile.TemporaryDirectory() as folder, socket.create_connection(("127.0.0.1", int(os.environ["BENCH_PORT"]))) as line:
        arms = steady_arms(role) if role in STEADY else arms_of(role, steps, folder)
        for block in arms.values():
            block()  # warm
        with line.makefile("rw") as talk:
            print("ready", file=talk, flush=True)
            for arm in talk:
                start = time.process_time_ns()
                found = arms[arm.strip()]()
                print((time.process_time_ns() - start) / 1e3 / steps if found is None else found, file=talk, flush=True)


class Worker:
    """A process that runs one block at a time."""

    def __init__(self, role: str, folder: Path, steps: int) -> None:
        words = ["--worker", role, "--steps", str(steps)]
        here, bin_dir, log = str(Path(__file__).resolve()), Path(sys.executable).parent, folder / f"{role}.log"
        command = [sys.executable, here, *words]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_dir}:{os.environ['PATH']}"}
        with socket.create_server(("127.0.0.1", 0)) as server, log.open("w") as output:
            env["BENCH_PORT"] = str(server.getsockname()[1])
            if role == "peer":
                with socket.create_server(("127.0.0.1", 0)) as probe:
                    port = str(probe.getsockname()[1])  # TraceML's own default is fixed, and refused if taken
                tool = [str(bin_dir / "traceml"), "run", here, "--mode", "summary", "--logs-dir", str(folder)]
                command = [*tool, "--aggregator-port", port, "--args", *words]
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            server.settimeout(60)
            try:
                self.line = server.accept()[0]
            except TimeoutError:
                self.process.kill()
                sys.exit(f"the process for {role} did not start:\n{log.read_text()}")
        self.talk = self.line.makefile("rw")
        if self.talk.readline() != "ready\n":
            self.close()  # a traceback is written after the line is closed
            sys.exit(f"the process for {role} ended:\n{log.read_text()}")

    def block(self, arm: str) -> float:
        """CPU microseconds per step of a block."""
        print(arm, file=self.talk, flush=True)
        return float(self.talk.readline())

    def close(self) -> None:
        """Let the process end."""
        self.talk.close()
        self.line.close()
        self.process.wait(60)


def interval(values: list[float]) -> tuple[float, float]:
    """The values between which the median lies with 95 % confidence: so many ranks to both sides, by the binomial distribution."""
    ordered, half, reach = sorted(values), len(values) / 2, math.sqrt(len(values)) * 0.98
    return ordered[max(0, math.floor(half - reach))], ordered[min(len(values) - 1, math.ceil(half + reach))]


def main() -> None:
    """Print a table for each kind of step."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rounds", type=int, default=200, help="of all tools on the same two steps, 2 or more; 0 = only steady steps")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--steady", type=int, default=300, help="pairs of blocks of each kind of steady steps")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        worker(given.worker, given.steps)
        return
    import workbench  # noqa: F401  # where it is not installed, this says so before a process does

    if given.rounds == 1:
        options.error("--rounds 1: an interval needs 2 rounds; 0 = only steady steps")
    if given.rounds:
        compare(given.rounds, given.steps)
    for kind in STEADY:
        show_steady(kind, given.steady)


def compare(rounds: int, steps: int) -> None:
    """Run all tools by turns, and print a table for each kind of step."""
    import torch

    there = importlib.util.find_spec("traceml_ai") is not None
    arms = {tool: role for tool, role in ARMS.items() if there or role != "peer"}
    spent: dict[str, list[float]] = {f"{kind}: {tool}": [] for kind in STEPS for tool in arms}
    with tempfile.TemporaryDirectory() as folder:
        workers = {role: Worker(role, Path(folder), steps) for role in dict.fromkeys(arms.values())}
        for _ in range(rounds):
            for kind in STEPS:
                for tool in random.sample(list(arms), len(arms)):
                    spent[f"{kind}: {tool}"].append(workers[arms[tool]].block(f"{kind}: {tool}"))
        for one in workers.values():
            one.close()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}, one thread;")
    print(f"{rounds} rounds of {steps} steps")
    for kind in STEPS:
        show(kind, {tool: spent[f"{kind}: {tool}"] for tool in arms})


def show_steady(kind: str, pairs: int) -> None:
    """Measure and print what the alarm adds to steady steps, after some looks that warm it up; and its thread's share of as many more."""
    _, steps, blocks = STEADY[kind]
    with tempfile.TemporaryDirectory() as folder:
        one = Worker(kind, Path(folder), steps)
        thread = []
        for _ in range(2):
            for _ in range(blocks):
                one.block(f"{kind}: alarm")
            thread.append(one.block(f"{kind}: thread") / (blocks * steps))
        found = [{word: one.block(f"{kind}: {word}") for word in random.sample(("plain", "alarm", "loss"), 3)} for _ in range(pairs)]
        one.close()
    added = [pair["alarm"] - pair["plain"] for pair in found]
    below, above = interval(added)
    print(
        f"\n{kind}: the alarm adds {statistics.median(added):.1f} µs ({below:.1f} … {above:.1f}) of CPU a step to the loop's "
        f"{statistics.median(pair['plain'] for pair in found):.1f} µs outside the model (to take a loss, "
        f"{statistics.median(pair['loss'] for pair in found):.1f}); its thread takes {thread[1] - thread[0]:.1f} µs a step"
    )


def show(kind: str, spent: dict[str, list[float]]) -> None:
    """Print one table."""
    added = {tool: [b - a for a, b in zip(spent["nothing"], values, strict=True)] for tool, values in spent.items()}
    peer = statistics.median(added.get("TraceML 0.5.0 auto", [math.nan]))
    print(f"\nadded to {kind} of {statistics.median(spent['nothing']):.1f} µs of CPU:\n")
    print("| tool | µs per step (median) | 95 % interval of the median | interquartile range | TraceML / tool |\n|---|---|---|---|---|")
    for tool in list(spent)[1:]:
        low, middle, high = statistics.quantiles(added[tool], n=4)
        below, above = interval(added[tool])
        print(f"| {tool} | {middle:.1f} | {below:.1f} … {above:.1f} | {low:.1f} … {high:.1f} | {peer / middle:.0f} × |")


if __name__ == "__main__":
    main()
