"""What always-on phase timing costs: CPU microseconds added to a training step, beside TraceML 0.5.0 (auto mode) in the same run.

    python benchmarks/timer_cost.py [--rounds 200] [--steps 200]

Needs `pip install traceml-ai==0.5.0`. Every tool does its work on the same small step (forward, loss, backward, SGD, a DataLoader without
workers). Tools that patch torch for good (our auto-watch, TraceML) have a process of their own; blocks of steps take turns across all
processes, in an order that changes, and every block is compared with the block without a tool of the same round. Blocks are short, so that
what else the machine does hits both alike. The figure is the CPU time of the whole process, so the writer thread's share is in it; what
TraceML does in its separate aggregator process is not.
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
    "auto-watch + rank log": "auto",
    "TraceML 0.5.0 auto": "peer",
}
"""What is compared, and the process it runs in."""


def arms_of(role: str, steps: int, folder: str) -> dict[str, Callable[[], None]]:
    """What a process can run: a block of steps by the name of its tool, with whatever the tool has to do later for them."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import workbench as wb
    from workbench.measure import auto

    torch.set_num_threads(1)
    if role == "auto":
        os.environ["WORKBENCH_RUN_DIR"] = folder
        watching = auto.install()
    if role == "peer":
        import traceml_ai

        traceml_ai.init(mode="auto")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    dataset = TensorDataset(torch.randn(4 * steps, 64), torch.randint(0, 10, (4 * steps,)))
    loader: Iterable[Any] = DataLoader(dataset, batch_size=4)

    def train(loader: Iterable[Any]) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    def train_marked(timer: wb.StepTimer) -> None:
        for x, y in timer.batches(loader):
            optimizer.zero_grad()
            with timer("forward"):
                loss = nn.functional.cross_entropy(model(x), y)
            with timer("backward"):
                loss.backward()
            with timer("optimizer"):
                optimizer.step()
        timer._recording.settle()

    def train_traced() -> None:
        for x, y in loader:
            with traceml_ai.trace_step(model):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

    def train_watched(loader: wb.measure.watched.Watch[Any]) -> None:
        train(loader)
        loader._recording.settle()

    def train_auto() -> None:
        train(loader)
        watching._recording.settle()

    if role == "peer":
        return {"TraceML 0.5.0 auto": train_traced}
    if role == "auto":
        return {"auto-watch + rank log": train_auto}
    timer, watched = wb.StepTimer(), wb.watch(loader, model=model, optimizer=optimizer)
    os.environ["WORKBENCH_RUN_DIR"] = folder
    logged = wb.watch(loader, model=model, optimizer=optimizer)
    return {
        "nothing": partial(train, loader),
        "StepTimer": partial(train_marked, timer),
        "wb.watch": partial(train_watched, watched),
        "wb.watch + rank log": partial(train_watched, logged),
    }


def worker(role: str, steps: int) -> None:
    """Run blocks of steps as asked for through a socket, and answer with the CPU microseconds per step."""
    with tempfile.TemporaryDirectory() as folder, socket.create_connection(("127.0.0.1", int(os.environ["BENCH_PORT"]))) as line:
        arms = arms_of(role, steps, folder)
        for block in arms.values():
            block()  # warm
        with line.makefile("rw") as talk:
            print("ready", file=talk, flush=True)
            for arm in talk:
                start = time.process_time_ns()
                arms[arm.strip()]()
                print((time.process_time_ns() - start) / 1e3 / steps, file=talk, flush=True)


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
        assert self.talk.readline() == "ready\n", log.read_text()

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
    """Print one table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--worker", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        worker(given.worker, given.steps)
        return
    if importlib.util.find_spec("traceml_ai") is None:
        sys.exit("traceml-ai not installed: pip install traceml-ai==0.5.0")
    import torch

    spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        workers = {role: Worker(role, Path(folder), given.steps) for role in dict.fromkeys(ARMS.values())}
        for _ in range(given.rounds):
            for arm in random.sample(list(ARMS), len(ARMS)):
                spent[arm].append(workers[ARMS[arm]].block(arm))
        for one in workers.values():
            one.close()
    added = {arm: [b - a for a, b in zip(spent["nothing"], values, strict=True)] for arm, values in spent.items()}
    peer = statistics.median(added["TraceML 0.5.0 auto"])
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}, one thread;")
    print(f"{given.rounds} rounds of {given.steps} steps; without a tool {statistics.median(spent['nothing']):.1f} µs of CPU per step\n")
    print("| tool | added µs per step (median) | 95 % interval of the median | middle half | TraceML / tool |\n|---|---|---|---|---|")
    for arm in list(ARMS)[1:]:
        low, middle, high = statistics.quantiles(added[arm], n=4)
        below, above = interval(added[arm])
        print(f"| {arm} | {middle:.1f} | {below:.1f} … {above:.1f} | {low:.1f} … {high:.1f} | {peer / middle:.0f} × |")


if __name__ == "__main__":
    main()
