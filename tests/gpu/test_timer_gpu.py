"""The timer on a GPU: phases by CUDA events add up to the step, nothing waits for the device inside a step, copies are seen."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.harness.device_clock import DeviceClock
from workbench.timeline.timeline import Timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here"),
]

SIZE = 4096


@pytest.fixture(scope="module")
def step() -> Callable[[torch.Tensor], None]:
    """Long kernels, and few: they take the device far longer than the host, and ten steps of them fit into its queue."""
    weights = [torch.randn(SIZE, SIZE, device="cuda", requires_grad=True) for _ in range(4)]

    def run(x: torch.Tensor) -> None:
        for _ in range(2):
            for weight in weights:
                x = (x @ weight) / SIZE**0.5
        x.sum().backward()

    run(torch.randn(SIZE, SIZE, device="cuda"))
    torch.cuda.synchronize()
    return run


def test_the_phases_add_up_to_the_time_of_the_device(step: Callable[[torch.Tensor], None]) -> None:
    x, timer = torch.randn(SIZE, SIZE, device="cuda"), wb.StepTimer()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in timer.batches(range(20)):
        with timer("forward"):
            step(x)
        with timer("optimizer"):
            y = x * 2
    end.record()
    timeline = timer.timeline
    end.synchronize()
    del y
    assert timeline.clock == "device"
    assert len(timeline.steps) == 20
    assert sum(one.seconds for one in timeline.steps) == pytest.approx(begin.elapsed_time(end) / 1e3, rel=0.01)
    assert timeline.share("forward") > 0.9


def test_nothing_waits_for_the_device_inside_a_step(step: Callable[[torch.Tensor], None]) -> None:
    x, timer, host = torch.randn(SIZE, SIZE, device="cuda"), wb.StepTimer(), []
    for _ in timer.batches(range(10)):
        start = time.perf_counter()
        with timer("forward"):
            step(x)
        with timer("optimizer"):
            pass
        host.append(time.perf_counter() - start)
    began = time.perf_counter()
    timeline = timer.timeline  # this waits
    waited = time.perf_counter() - began
    device = timeline.median()
    assert sorted(host)[len(host) // 2] < 0.5 * device, "the host took as long as the device: something synchronised"
    assert waited > device


def watched_run(batches: int) -> Timeline:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(batches):
            yield torch.ones(2048, SIZE)  # pageable, 32 MiB

    watched = wb.watch(loader(), model=model, optimizer=optimizer)
    for x in watched:
        optimizer.zero_grad()
        model(x.to("cuda")).sum().backward()
        optimizer.step()
    return watched.timeline


def test_watch_sees_copies_and_all_phases() -> None:
    timeline = watched_run(12)
    assert timeline.clock == "device"
    assert len(timeline.steps) == 12
    for phase in ("h2d", "forward", "backward", "optimizer"):
        assert timeline.median(phase) > 0, phase
    copied = 2048 * SIZE * 4
    assert 0.5e9 < copied / timeline.median("h2d") < 200e9  # bytes per second of a PCIe or NVLink-C2C host link
    assert torch.Tensor.to is torch._C.TensorBase.to
    assert timeline.notes == ()


def test_a_graph_capture_inside_the_loop_is_not_disturbed() -> None:
    x, timer = torch.ones(1024, device="cuda"), wb.StepTimer()
    graph = torch.cuda.CUDAGraph()
    for number in timer.batches(range(8)):
        if number == 3:
            with timer("other"), torch.cuda.graph(graph), timer("forward"):
                y = x * 2
        if number > 3:
            with timer("forward"):
                graph.replay()
        with timer("optimizer"):
            x.add_(1)
    assert len(timer.timeline.steps) == 8
    assert torch.equal(y, (x - 1) * 2)


def test_a_model_on_the_cpu_is_timed_by_the_host_clock() -> None:
    torch.ones(1, device="cuda")
    model = nn.Linear(4, 1)
    watched = wb.watch([torch.ones(2, 4)] * 3, model=model)
    for x in watched:
        model(x).sum().backward()
    assert watched.timeline.clock == "host"


def test_a_device_clock_tells_steps_apart_and_sees_other_streams(step: Callable[[torch.Tensor], None]) -> None:
    x, device = torch.randn(SIZE, SIZE, device="cuda"), torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    began, clock = time.perf_counter(), DeviceClock(device)
    for _ in range(10):
        step(x)
        clock.mark()
    steps, whole = clock.read()
    wall = time.perf_counter() - began
    assert len(steps) == 10
    assert sum(steps) == pytest.approx(whole)
    assert whole == pytest.approx(wall, rel=0.05)
    assert max(steps) < 1.5 * min(steps)

    clock, side = DeviceClock(device), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(10):
            step(x)
    clock.mark()
    steps, whole = clock.read()
    assert steps == []
    assert whole == pytest.approx(wall, rel=0.2)
