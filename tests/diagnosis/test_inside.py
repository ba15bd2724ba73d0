"""Inside a step: what traces made by hand say, and what real steps are seen to do."""

import gc
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from workbench.diagnosis.analysis.evidence import Inside
from workbench.diagnosis.measure.inside import OWN_WAIT, Events, look, outermost, read_events, step_counts, waiting_of

US = 1000
"""Nanoseconds."""


def events_of(*rows: tuple[Any, ...], until: int = 1000) -> Events:
    """Rows are (name, start, end), or more: (…, category), (…, thread), (…, correlation); microseconds, from 0 to `until`."""
    full = []
    for name, start, end, *more in [*rows, ("window", 0, until, "user_annotation")]:
        kind, thread, correlation = [*more, *("cpu_op", 1, 0)[len(more) :]]
        full.append((name, kind, start * US, end * US, thread, correlation))
    return Events.of(full, window="window")


def trace(*rows: tuple[Any, ...], steps: int = 1, until: int = 1000, ranks: bool = False) -> Inside:
    """What a trace of such rows says."""
    return read_events(events_of(*rows, until=until), steps, ranks=ranks)


def us(seconds: float | None) -> float:
    assert seconds is not None
    return round(seconds * 1e6, 6)


def test_operators_are_counted_once_and_their_union_is_the_time_in_torch() -> None:
    inside = trace(
        ("aten::linear", 100, 200),
        ("aten::addmm", 110, 190),
        ("aten::relu", 250, 260),
        ("aten::sum", 150, 300, "cpu_op", 2),  # a thread beside it
        ("aten::mul", 900, 1100),  # beyond the end
        ("aten::mul", 2000, 2100),
        ("train", 0, 800, "user_annotation"),
        ("sum.py(3): f", 0, 900, "python_function"),
    )
    assert us(inside.step) == 1000
    assert us(inside.ops) == 200 + 100
    assert inside.op_count == 4
    assert us(inside.small_ops) == 10


def test_figures_are_per_step() -> None:
    inside = trace(("aten::mm", 100, 500), ("aten::mm", 600, 1000), ("aten::add", 1000, 1010), steps=2, until=2000)
    assert (us(inside.step), us(inside.ops), inside.op_count, us(inside.small_ops)) == (1000, 405, 1.5, 5)


def test_which_operators_are_short_is_told() -> None:
    rows = [("aten::mm", "cpu_op", 0, 30_000, 1, 0), ("window", "user_annotation", 0, 100_000, 1, 0)]
    events = Events.of(rows, window="window")
    assert [us(read_events(events, 1, short=short).small_ops) for short in (20e-6, 40e-6)] == [0, 30]


def test_backward_counts_but_not_what_python_does_in_it() -> None:
    node = "autograd::engine::evaluate_function: "
    inside = trace(
        (f"{node}AddmmBackward0", 100, 240),
        ("AddmmBackward0", 105, 190),
        ("aten::mm", 110, 180),  # the engine takes 5 before it, a hook 50 after it
        (f"{node}MyFunctionBackward", 300, 600),
        ("MyFunctionBackward", 301, 599),
        ("aten::mul", 400, 420),
        (f"{node}torch::autograd::AccumulateGrad", 700, 900),
        ("torch::autograd::AccumulateGrad", 705, 710),  # then a hook on the tensor
    )
    assert us(inside.ops) == (190 - 100) + 20 + (710 - 700)


def test_python_functions_and_compiled_regions() -> None:
    inside = trace(
        ("MyFunction", 0, 100),  # the forward of an autograd.Function
        ("aten::mul", 10, 20),
        ("Torch-Compiled Region: 0/0", 200, 300),
        ("CompiledFunctionBackward", 400, 450),
        ("TorchDynamo Cache Lookup", 500, 600),
    )
    assert us(inside.ops) == 10 + 100 + 50


def test_optimizer_and_syncs() -> None:
    inside = trace(
        ("Optimizer.step#AdamW.step", 100, 300, "user_annotation"),
        ("Optimizer.zero_grad#AdamW.zero_grad", 300, 310, "user_annotation"),
        ("aten::_local_scalar_dense", 150, 151),  # how a CPU optimizer reads its own counter
        ("aten::_local_scalar_dense", 400, 401),
        ("aten::_local_scalar_dense", 500, 501),
    )
    assert us(inside.optimizer) == 200
    assert us(inside.optimizer_ops) == 1
    assert us(inside.small_ops) == 2  # the optimizer's are its own
    assert inside.syncs == 2
    assert trace(("aten::mm", 0, 1)).optimizer is None


def test_python_in_the_optimizer_is_told_from_its_operators() -> None:
    inside = trace(
        ("Optimizer.step#AdamW.step", 100, 300, "user_annotation"),
        ("aten::lerp_", 50, 130),  # began before it, in another thread
        ("aten::mul_", 200, 250),
        ("aten::sqrt", 240, 260, "cpu_op", 2),
        ("aten::mm", 400, 500),
    )
    assert us(inside.optimizer_ops) == 30 + 60
    assert us(inside.ops) == 80 + 60 + 100
    assert trace(("aten::mm", 0, 1)).optimizer_ops is None


def test_collectives_are_exposed_where_nothing_else_runs() -> None:
    rows = [
        ("aten::mm", 100, 400),
        ("gloo:all_reduce", 300, 700, "user_annotation", 9),
        ("c10d::allreduce_", 690, 750),
        ("aten::mm", 720, 800),
    ]
    inside = trace(*rows, ranks=True)
    assert us(inside.ops) == 300 + 80
    assert us(inside.collectives) == 720 - 400
    assert trace(*rows).collectives is None
    assert trace(("aten::mm", 1, 2), ranks=True).collectives == 0


def test_on_a_gpu_kernels_and_copies_count_and_operators_do_not() -> None:
    inside = trace(
        ("aten::mm", 0, 900),
        ("Optimizer.step#SGD.step", 100, 200, "user_annotation"),
        ("Optimizer.step#SGD.step", 0, 900, "gpu_user_annotation", 7),
        ("sgemm_128x64", 100, 300, "kernel", 7),
        ("elementwise", 290, 305, "kernel", 8),
        ("Memcpy HtoD (Pinned -> Device)", 400, 450, "gpu_memcpy", 8),
        ("Memset (Device)", 450, 451, "gpu_memset", 8),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 440, 600, "kernel", 9),
        ("nccl:all_reduce", 0, 900, "user_annotation"),
        ("cudaLaunchKernel", 50, 60, "cuda_runtime"),
        ("cudaStreamSynchronize", 600, 700, "cuda_runtime"),
        ("cudaMemcpyAsync", 600, 700, "cuda_runtime"),
        ("aten::_local_scalar_dense", 590, 710),
        ranks=True,
    )
    assert us(inside.ops) == 205 + 51
    assert inside.op_count == 4
    assert inside.small_ops == 0
    assert us(inside.collectives) == 600 - 451
    assert us(inside.optimizer) == 100
    assert inside.syncs == 1


def test_short_kernels_that_keep_a_device_busy_are_not_the_hosts() -> None:
    """92 % busy with kernels of 9 µs: the launches were once taken for 93 % of the step."""
    launches = [("cudaLaunchKernel", 10 * i, 10 * i + 4, "cuda_runtime", 1, i + 1) for i in range(92)]
    kernels = [("elementwise", 20 + 10 * i, 30 + 10 * i, "kernel", 7, i + 1) for i in range(92)]
    inside = trace(*launches, *kernels)
    assert us(inside.ops) == 920
    assert inside.small_ops == 0
    assert us(inside.launching) == 2 * 4  # until the first kernel


def test_the_own_wait_and_waits_for_copies_are_no_syncs() -> None:
    def copy(at: int, name: str, number: int) -> list[tuple[Any, ...]]:
        return [
            ("cudaMemcpyAsync", at, at + 10, "cuda_runtime", 1, number),
            (name, at + 10, at + 40, "gpu_memcpy", 7, number),
            ("cudaStreamSynchronize", at + 10, at + 42, "cuda_runtime", 1, number + 100),
        ]

    to_device = copy(0, "Memcpy HtoD (Pageable -> Device)", 1)
    own = [(OWN_WAIT, 900, 1000, "user_annotation"), ("cudaDeviceSynchronize", 901, 999, "cuda_runtime", 1, 9)]
    inside = trace(*to_device, *copy(200, "Memcpy DtoH (Device -> Pageable)", 2), *own)
    assert inside.syncs == 1
    assert us(inside.waits) == 32 + 32 + 98
    assert us(inside.sync_idle) == 1000 - 240
    assert trace(*to_device, *own).syncs == 0
    assert trace(*to_device, *own).sync_idle == 0
    read = trace(*to_device, ("cudaLaunchKernel", 60, 65, "cuda_runtime", 1, 3), ("cudaStreamSynchronize", 70, 80, "cuda_runtime", 1, 4))
    assert read.syncs == 1  # of what came after the copy


@pytest.mark.parametrize("ahead", [0, 3, 40])
@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cudaDeviceSynchronize"])
def test_how_far_clocks_differ_is_measured_on_the_trace(name: str, ahead: int) -> None:
    """A wait ends after what it waited for: idle time is its own, however far the device's clock is ahead."""
    seen = trace(
        ("cudaLaunchKernel", 50, 60, "cuda_runtime", 1, 1),
        ("gemm", 60, 200 + ahead, "kernel", 7, 1),
        ("cudaMemcpyAsync", 100, 105, "cuda_runtime", 1, 2),
        ("Memcpy DtoH (Device -> Pageable)", 200 + ahead, 210 + ahead, "gpu_memcpy", 7, 2),
        (name, 110, 210, "cuda_runtime", 1, 3),
        ("cudaLaunchKernel", 500, 510, "cuda_runtime", 1, 4),
        ("gemm", 520, 1000, "kernel", 7, 4),
    )
    assert us(seen.sync_idle) == 520 - 210 - ahead


def test_work_that_nobody_waited_for_shows_no_difference_of_clocks() -> None:
    """Of another stream, of another thread, or far later."""

    def idle(*rows: tuple[Any, ...]) -> float:
        wait = ("cudaStreamSynchronize", 110, 210, "cuda_runtime", 1, 3)
        return us(trace(("gemm", 520, 1000, "kernel", 7, 4), wait, *rows).sync_idle)

    assert idle(("cudaLaunchKernel", 50, 60, "cuda_runtime", 1, 1), ("gemm", 60, 230, "kernel", 7, 1)) == 0
    copy = ("Memcpy DtoH (Device -> Pageable)", 60, 230, "gpu_memcpy", 7, 1)
    assert idle(("cudaMemcpyAsync", 50, 60, "cuda_runtime", 2, 1), copy) == 0
    assert idle(("cudaMemcpyAsync", 50, 60, "cuda_runtime", 1, 1), copy) == 520 - 230
    late = ("Memcpy DtoH (Device -> Pageable)", 60, 400, "gpu_memcpy", 7, 1)
    assert idle(("cudaMemcpyAsync", 50, 60, "cuda_runtime", 1, 1), late) == 0


def test_what_a_device_idles_is_told_apart() -> None:
    inside = trace(
        ("aten::mm", 0, 100),
        ("cudaLaunchKernel", 50, 60, "cuda_runtime", 1, 1),
        ("gemm", 60, 200, "kernel", 7, 1),
        ("cudaStreamSynchronize", 110, 203, "cuda_runtime", 1, 2),  # the clocks differ a little
        ("aten::mm", 500, 560),
        ("autograd::engine::evaluate_function: MmBackward0", 700, 800, "cpu_op", 2),
        ("gemm", 550, 600, "kernel", 7, 3),
        ("gemm", 790, 1000, "kernel", 7, 4),
        ("cudaGraphLaunch", 600, 610, "cuda_runtime", 1, 5),
    )
    assert us(inside.ops) == 140 + 50 + 210
    assert us(inside.sync_idle) == 550 - 200
    assert us(inside.launching) == 60 + 50 + 90 + 10
    assert us(inside.waits) == 93
    assert inside.syncs == 1
    assert inside.graphs == 1


def test_what_the_training_thread_waits_for_is_no_sleep() -> None:
    """Backward has a thread of its own on a device, and the other one is blocked meanwhile."""
    events = events_of(
        ("aten::mm", 0, 100),
        ("autograd::engine::evaluate_function: MmBackward0", 200, 300, "cpu_op", 2),
        ("aten::mm", 210, 290, "cpu_op", 2),
        ("aten::mm", 320, 500, "cpu_op", 2),
        ("aten::mul", 0, 1000, "cpu_op", 3),  # a thread of the user's
        ("aten::_foreach_add_", 500, 600),
        ("cudaStreamSynchronize", 700, 900, "cuda_runtime"),
    )
    waiting = waiting_of(events)
    assert (waiting.device, waiting.backward, waiting.unrecorded) == pytest.approx((0.2, 0.29, 0.31))
    step = 2.0
    assert waiting.asleep(0.29 * step, step, 1.0) == 0
    assert waiting.asleep(0.49 * step, step, 1.0) == pytest.approx(0.2 * step)
    assert waiting.asleep(0.49 * step, step, 0.0) == 0  # a thread that waits without polling is blocked as well
    assert waiting.asleep(0.9 * step, step, 1.0) == pytest.approx(0.31 * step)
    sleeps = waiting_of(events_of(("aten::mm", 0, 100), ("aten::mm", 700, 800, "cpu_op", 2)))
    assert sleeps.asleep(0.9, 1.0, 1.0) == pytest.approx(0.9)
    hook = events_of(
        ("autograd::engine::evaluate_function: A", 0, 9000, "cpu_op", 2),
        ("aten::mm", 10, 20, "cpu_op", 2),
        ("aten::mm", 8900, 8950, "cpu_op", 2),
        until=9000,
    )
    assert waiting_of(hook).backward < 0.07  # something sleeps in a hook of backward


def test_a_device_whose_work_was_not_recorded_is_not_read_as_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI gave nothing: the operators of the host are no work of the device."""
    rows = [("aten::mm", 0, 900), ("cudaLaunchKernel", 10, 20, "cuda_runtime", 1, 1), ("cudaLaunchKernel", 30, 40, "cuda_runtime", 1, 2)]
    monkeypatch.setattr("workbench.diagnosis.measure.inside._trace", lambda *_: (events_of(*rows), 0.001, 1, None))
    inside, why = look(lambda: None, traced=1, plain=2, synchronize=lambda: None)
    assert math.isnan(inside.ops)
    assert why is not None
    assert "2 launches per step were recorded, but no work of the device" in why
    assert not math.isnan(look(lambda: None, traced=1, plain=2)[0].ops)


def test_a_trace_without_its_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="no annotation 'window'"):
        Events.of([("aten::mm", "cpu_op", 0, 1, 1, 0)], window="window")
    with pytest.raises(ValueError, match="no annotation"):
        Events.of([], window="window")


class OldEvent:
    """An event of a torch that does not tell kinds."""

    def __init__(self, name: str, start: int, end: int, *, annotation: bool = False, cuda: bool = False) -> None:
        self._values = name, start, end, annotation, cuda

    def name(self) -> str:
        return self._values[0]

    def start_ns(self) -> int:
        return self._values[1]

    def duration_ns(self) -> int:
        return self._values[2] - self._values[1]

    def start_thread_id(self) -> int:
        return 1

    def correlation_id(self) -> int:
        return 0

    def is_user_annotation(self) -> bool:
        return self._values[3]

    def device_type(self) -> Any:
        kind = torch._C._autograd.DeviceType
        return kind.CUDA if self._values[4] else kind.CPU


def test_kinds_are_told_from_names_where_torch_does_not_tell_them() -> None:
    events = Events.recorded(
        [
            OldEvent("window", 0, 1000, annotation=True),
            OldEvent("aten::mm", 0, 900),
            OldEvent("cudaDeviceSynchronize", 800, 900),
            OldEvent("gemm", 100, 200, cuda=True),
            OldEvent("Memcpy DtoH", 200, 210, cuda=True),
            OldEvent("Optimizer.step#SGD.step", 0, 900, annotation=True, cuda=True),
        ],
        window="window",
    )
    inside = read_events(events, 1)
    assert round(inside.ops * 1e9) == 110
    assert inside.syncs == 1


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12)


@given(spans)
def test_outermost_spans_lie_in_no_other_one(pairs: list[tuple[int, int]]) -> None:
    kept = [tuple(span) for span in outermost(np.array(pairs, dtype=np.int64).reshape(-1, 2))]
    assert set(kept) <= set(pairs)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(kept))


# Real steps


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step_of(model: nn.Module, x: Tensor, *, before: Callable[[], object] = lambda: None) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        before()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def seen(step: Callable[[], None]) -> Inside:
    inside, why = look(step, traced=8, plain=20)
    assert why is None
    return inside


def host(inside: Inside) -> float:
    return 1 - inside.ops / inside.step


LARGE = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))


def test_a_healthy_step_is_in_operators() -> None:
    inside = seen(step_of(LARGE, torch.randn(256, 512)))
    assert host(inside) < 0.2
    assert inside.small_ops < 0.2 * inside.step
    assert inside.blocked < 0.2 * inside.step
    assert inside.collectives is None
    assert inside.syncs == 0
    assert 0 < inside.optimizer < 0.6 * inside.step  # type: ignore[operator]
    assert inside.cpu + inside.waiting > 0.5 * inside.step


def count(upto: int) -> None:
    total = 0
    for i in range(upto):
        total += i * i


def test_a_step_full_of_python_is_not() -> None:
    inside = seen(step_of(LARGE, torch.randn(8, 512), before=lambda: count(200_000)))
    assert host(inside) > 0.6
    assert inside.lines[0][0].endswith(" count")
    assert inside.lines[0][1] > 0.5
    assert inside.blocked < 0.2 * inside.step


def test_python_in_a_hook_of_backward_is_not_an_operator() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for weight in model.parameters():
        weight.register_hook(lambda gradient: count(20_000))
    assert host(seen(step_of(model, torch.randn(8, 64)))) > 0.6


def test_many_small_operators() -> None:
    """Looks at both models take turns. An interruption can only make the share of short operators smaller, so the largest share counts."""
    small = step_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))), torch.randn(2, 4))
    large = step_of(LARGE, torch.randn(256, 512))
    shares: tuple[list[float], list[float]] = [], []
    for _ in range(9):
        for step, found in zip((small, large), shares, strict=True):
            inside, why = look(step, traced=2, plain=2)
            assert why is None
            assert (inside.op_count > 150) == (step is small)
            found.append(inside.small_ops / (inside.ops - (inside.optimizer_ops or 0.0)))
    largest = [max(found) for found in shares]
    assert largest[0] > 0.4, shares
    assert largest[1] < 0.1 * largest[0], shares


def test_a_step_that_sleeps_is_blocked() -> None:
    inside = seen(step_of(LARGE, torch.randn(8, 512), before=lambda: time.sleep(0.01)))
    assert inside.blocked > 0.008
    assert inside.cpu < inside.step - 0.008


def test_syncs_are_counted() -> None:
    value = torch.ones(3)
    inside = seen(step_of(LARGE, torch.randn(8, 512), before=lambda: [value.sum().item() for _ in range(5)]))
    assert inside.syncs == 5


def test_the_garbage_collector_is_timed() -> None:
    gc.freeze()  # the tests' own objects would take a second each time
    try:
        tracked = [[i] for i in range(100_000)]
        inside = seen(step_of(LARGE, torch.randn(8, 512), before=gc.collect))
    finally:
        gc.unfreeze()
    assert len(tracked) == 100_000
    assert inside.gc > 0.2 * inside.step


@pytest.mark.parametrize(("traced", "plain"), [(3, 5), (1, 1), (2, 4)])
def test_the_number_of_calls_is_fixed(traced: int, plain: int) -> None:
    calls, step = [], step_of(LARGE, torch.randn(8, 512))
    look(lambda: (calls.append(0), step()), traced=traced, plain=plain)
    assert len(calls) == 2 * plain + traced + 1


def test_a_step_of_very_many_operators_is_traced_for_as_few_steps_as_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.diagnosis.measure.inside.MAX_EVENTS", 300)
    calls, model = [], nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    step = step_of(model, torch.randn(2, 4))
    inside, _ = look(lambda: (calls.append(0), step()), traced=6, plain=4)
    assert len(calls) == 2 * 4 + 6 + 1
    assert 60 < inside.op_count < 400
    assert 0 < inside.ops < inside.step


def test_without_the_profiler_the_rest_is_measured_and_it_is_said_why() -> None:
    calls, step = [], step_of(LARGE, torch.randn(8, 512), before=lambda: time.sleep(0.005))
    with torch.autograd.profiler.profile():
        inside, why = look(lambda: (calls.append(0), step()), traced=3, plain=4)
    assert why is not None
    assert "a profiler is running already" in why
    assert len(calls) == 2 * 4 + 3 + 1
    assert math.isnan(inside.ops)
    assert inside.step > inside.blocked > 0.004
    assert inside.lines


def test_a_step_that_raises_leaves_no_profiler_behind() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(0)
        if len(calls) > 3:
            raise RuntimeError("planted")

    for _ in range(2):
        calls.clear()
        with pytest.raises(RuntimeError, match="planted"):
            look(step, traced=4, plain=4)
    with torch.autograd.profiler.profile():
        pass


def test_the_device_is_waited_for_at_the_ends_only() -> None:
    waits: list[int] = []
    calls: list[int] = []
    look(lambda: calls.append(0), traced=4, plain=6, synchronize=lambda: waits.append(len(calls)))
    assert len(waits) < 12
    assert waits[-1] == len(calls)


def test_counts_fit_the_time() -> None:
    assert step_counts(0.01, budget_s=2.0) == (20, 75)
    assert step_counts(5.0, budget_s=2.0) == (2, 2)
    assert step_counts(1e-5, budget_s=2.0) == (20, 400)


SCRIPT = """
import os, sys, torch
from workbench.diagnosis.measure.inside import look
from workbench.traces.measure.profiler import without_kineto_lines
{first}
step = lambda: torch.ones(3).sum()
look(step, traced=2, plain=2); look(step, traced=2, plain=2)
with without_kineto_lines():
    os.write(2, b"kept\\n"); print("and this", file=sys.stderr, flush=True)
print("last", file=sys.stderr)
assert "KINETO_LOG_LEVEL" not in os.environ
"""


@pytest.mark.parametrize("first", ["", "with torch.autograd.profiler.profile(): pass"], ids=["first", "after another profiler"])
def test_kineto_is_not_heard_and_others_are(first: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(first=first)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    own = [line for line in done.stderr.splitlines() if not first or "SyncActivityProfilerHandler" not in line]
    assert own == ["kept", "and this", "last"]
    assert done.stderr.count("profiler_st") == (2 if first else 0)  # those of the other profiler


def test_a_process_without_stderr_can_look() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    code = "import os; os.close(2)\n" + SCRIPT.format(first="").split("with without")[0] + "\nprint('fine')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert done.stdout == "fine\n"


def test_the_line_is_named_where_python_runs_and_not_the_one_that_calls_torch() -> None:
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    x, texts = torch.randn(256, 128), {str(i): [*range(20)] for i in range(600)}

    def step() -> None:
        y = torch.relu(x @ x.T) @ x
        net(y).square().mean().backward()
        json.dumps(texts)

    def waits() -> None:
        net(x).square().mean().backward()
        time.sleep(0.003)

    source = Path(__file__).read_text().splitlines()

    def named(work: Callable[[], None]) -> list[str]:
        inside, _ = look(work, traced=2, plain=400)
        return [source[int(line.partition(":")[2].split()[0]) - 1] for line, _ in inside.lines]

    for work, words in ((step, "json.dumps"), (waits, "time.sleep")):
        seen = [named(work)]
        while len(seen) < 6 and not any(lines and words in lines[0] for lines in seen):  # looks are samples: some find nothing
            seen.append(named(work))
        assert any(lines and words in lines[0] for lines in seen), seen
