"""Part `timer`: what StepTimer and wb.watch add to a step; phases add up to the wall time; nothing synchronises."""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import workbench as wb
from benchmarks.gpu_check import loops
from benchmarks.gpu_check.machine import Bench, percent
from benchmarks.gpu_check.report import Report, last_line

MAX_GPU_BOUND = 0.01
"""Fraction by which a GPU-bound loop may get longer: the host has time to spare there, so all that could cost is a synchronisation."""
MAX_HOST_BOUND = {"StepTimer": 60e-6, "wb.watch": 120e-6}
"""Seconds that a host-bound step may get longer: ten marks at 5 µs each, CUDA's event included; watch has twice as many, and hooks. That
is 0.6 and 1.2 % of a step of 10 ms."""
MAX_HOST_BOUND_SHARE = 0.10
"""The same as a fraction of the bare step, some 30 launches, for hosts on which all Python is slow; the larger counts."""
MAX_APART = 0.01
"""Fraction by which the sum of all phases may differ from the wall time from sync to sync: a sync itself takes some 20 µs."""
MAX_HOST_SHARE = 0.5
"""The host takes less than this fraction of a GPU-bound step to launch it, unless something waits inside."""
ROUNDS = 15
AHEAD = 10
"""Steps that the host may launch before the first is done: CUDA's queue holds about 1,000 kernels and events, a step has some 60."""

Loop = Callable[[Iterable[Any]], object]


def run(report: Report, bench: Bench) -> None:
    """Add the rows."""
    sizes = loops.sizes(bench)
    width, rows = (sizes.width, sizes.rows // 4)
    heavy = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(bench.kind)
    light = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(bench.kind)
    for name, model, batch, steps in (
        ("GPU-bound", heavy, torch.randn(rows, width, device=bench.kind), 30),
        ("host-bound", light, torch.randn(8, 64, device=bench.kind), 150),
    ):
        names = [f"{tool}, {name}" for tool in MAX_HOST_BOUND]
        if not all(map(report.has, names)):
            with report.guard(f"cost, {name}"):
                _cost(report, bench, name, model, [batch] * steps)
    with report.guard("phases add up"):
        _adds_up(report, bench, heavy, torch.randn(rows, width, device=bench.kind))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> float:
    """A plain loop; returns when its last step had been launched."""
    launched = time.perf_counter()
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        launched = time.perf_counter()
    return launched


def _train_marked(model: nn.Module, optimizer: torch.optim.Optimizer, timer: Any, batches: Iterable[Any]) -> float:
    """The same, marked for a StepTimer."""
    launched = time.perf_counter()
    for x in timer.batches(batches):
        optimizer.zero_grad()
        with timer("forward"):
            loss = model(x).square().mean()
        with timer("backward"):
            loss.backward()
        with timer("optimizer"):
            optimizer.step()
        launched = time.perf_counter()
    return launched


def _cost(report: Report, bench: Bench, name: str, model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Interleave blocks of the bare loop and of those with a timer."""
    optimizer = loops.adamw(model)
    arms: dict[str, Callable[[], object]] = {
        "bare": lambda: _train(model, optimizer, batches),
        "StepTimer": lambda: _train_marked(model, optimizer, wb.StepTimer(), batches),
        "wb.watch": lambda: _train(model, optimizer, wb.watch(batches, model=model, optimizer=optimizer)),
    }
    for arm in arms.values():
        arm()
    wall: dict[str, list[float]] = {arm: [] for arm in arms}
    host: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm in random.sample(list(arms), len(arms)):
            bench.sync()
            start, cpu = time.perf_counter(), time.thread_time()
            arms[arm]()
            host[arm].append((time.thread_time() - cpu) / len(batches))
            bench.sync()
            wall[arm].append((time.perf_counter() - start) / len(batches))
    bare = statistics.median(wall["bare"])
    for tool, most in MAX_HOST_BOUND.items():
        low, longer, high = statistics.quantiles([ours - plain for ours, plain in zip(wall[tool], wall["bare"], strict=True)], n=4)
        thread = statistics.median(ours - plain for ours, plain in zip(host[tool], host["bare"], strict=True))
        if name == "GPU-bound":
            ok, expected = longer <= MAX_GPU_BOUND * bare, f"≤ {MAX_GPU_BOUND:.0%} longer"
        else:
            most = max(most, MAX_HOST_BOUND_SHARE * bare)
            ok, expected = longer <= most, f"≤ {most * 1e6:.0f} µs longer"
        report.row(
            f"{tool}, {name}",
            ok if bench.gpu else None,
            values={"bare": bare, "longer": longer, "quartiles": [low, high], "thread": thread},
            bare=f"{bare * 1e6:,.0f} µs",
            result=f"{longer * 1e6:+.1f} µs per step ({percent(longer / bare, 2)}; middle half {low * 1e6:+.1f} … {high * 1e6:+.1f})",
            host=f"{thread * 1e6:+.1f} µs of the thread's CPU",
            expected=expected,
        )


def _adds_up(report: Report, bench: Bench, model: nn.Module, batch: torch.Tensor) -> None:
    """Phases against the wall time from sync to sync; how far the host runs ahead; and that PyTorch sees no synchronisation."""
    optimizer = loops.adamw(model)
    _train(model, optimizer, [batch] * 3)
    for tool in MAX_HOST_BOUND:
        timeline, seconds, _ = _timed(tool, model, optimizer, [batch] * 40, bench)
        total = sum(sum(step.phases) for step in timeline.steps)
        apart = total / seconds - 1
        report.row(
            f"{tool}: phases add up",
            (timeline.clock == "device" and len(timeline.steps) == 40 and abs(apart) <= MAX_APART) if bench.gpu else None,
            values={"wall": seconds, "phases": total, "clock": timeline.clock},
            result=f"{len(timeline.steps)} steps by the {timeline.clock}'s clock: {percent(apart, 2)} from the wall time",
            expected=f"± {MAX_APART:.0%}",
        )
        _, seconds, launching = _timed(tool, model, optimizer, [batch] * AHEAD, bench)
        share = launching / seconds
        report.row(
            f"{tool}: the host runs ahead",
            share <= MAX_HOST_SHARE if bench.gpu else None,
            values={"share": share},
            result=f"the host had launched {AHEAD} steps in {share:.0%} of their time",
            expected=f"≤ {MAX_HOST_SHARE:.0%}",
        )
    if bench.gpu:
        _refused(report, model, optimizer, batch)


def _timed(
    tool: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], bench: Bench
) -> tuple[wb.Timeline, float, float]:
    """The timeline of a loop; its wall time from sync to sync; and the time after which its last step had been launched."""
    timer, watched = wb.StepTimer(), wb.watch(batches, model=model, optimizer=optimizer)
    bench.sync()
    start = time.perf_counter()
    launched = _train_marked(model, optimizer, timer, batches) if tool == "StepTimer" else _train(model, optimizer, watched)
    bench.sync()
    end = time.perf_counter()
    return (timer if tool == "StepTimer" else watched).timeline, end - start, launched - start


def _refused(report: Report, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Let PyTorch raise at each synchronisation, such as .item(); it does not see a wait for an event, which the row above shows."""
    timer, text = wb.StepTimer(), "nothing synchronised"
    torch.cuda.set_sync_debug_mode("error")
    try:
        _train_marked(model, optimizer, timer, [batch] * 10)
        _train(model, optimizer, wb.watch([batch] * 10, model=model, optimizer=optimizer))
    except RuntimeError as error:
        text = last_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report.row("no synchronisation inside a step", text == "nothing synchronised", result=text, expected="none")
