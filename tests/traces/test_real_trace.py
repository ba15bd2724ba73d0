"""Every answer of one real trace of this CPU, against what torch itself counts."""

import gzip
import json
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import workbench as wb
from workbench.traces.analysis.trace import Trace


class Block(torch.nn.Module):
    """A bit of everything that has FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = torch.nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.up(self.grow(x))
        heads = self.mix(seen)
        with sdpa_kernel(SDPBackend.MATH):  # the only one on a CPU that torch's counter knows
            return scaled_dot_product_attention(heads, heads, heads) @ seen.transpose(-1, -2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, int]:
    """The trace, and the FLOPs of a step as torch counts them."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    batch = torch.randn(2, 4, 8, 8)
    with FlopCounterMode(display=False) as counter:
        net(batch).square().mean().backward()
    into = tmp_path_factory.mktemp("real")
    trace = wb.trace(train, [batch] * 3, steps=3, into=into, memory=True, flops=True, stacks=True)
    return trace, counter.get_total_flops()


def test_flops_as_torch_counts_them(taken: tuple[Trace, int]) -> None:
    trace, flops = taken
    found = trace.mfu()
    assert found.flops == pytest.approx(flops)
    assert found.value is None
    assert found.flops_per_sec is not None
    assert found.flops_per_sec > 0
    points = trace.roofline().points
    assert {"aten::convolution", "aten::convolution_backward", "aten::bmm"} <= {one.name for one in points}
    assert all(one.dtype == "fp32" and one.bytes for one in points if one.matrix)


def test_modules_of_the_net(taken: tuple[Trace, int]) -> None:
    found = {one.path: one for one in taken[0].modules().rows}
    assert {one.rpartition("/")[2].partition("_")[0] for one in found} == {"Net", "Block", "Conv2d", "ConvTranspose2d", "Linear"}
    net = found["Net_0"]
    assert net.calls == 1
    assert len([one for one in found.values() if one.depth == 1]) == 2
    below = [one for one in found.values() if one.depth == 1]
    assert net.total_seconds == pytest.approx(net.self_seconds + sum(one.total_seconds for one in below))
    assert all(one.backward_seconds is not None and one.backward_seconds > 0 for one in found.values())


def test_no_time_counts_twice(taken: tuple[Trace, int]) -> None:
    trace, _ = taken
    step = trace.breakdown().mean()
    for found in (trace.flame(), trace.flame(stacks=True)):
        assert sum(one.seconds for one in found.nodes if one.parent < 0) == pytest.approx(sum(one.self_seconds for one in found.nodes))
        assert sum(one.seconds for one in found.nodes if one.parent < 0) <= step * (1 + 1e-9)
        assert max(one.start + one.seconds for one in found.nodes) <= step * (1 + 1e-9)
    assert 0 < trace.idle().seconds < step
    found = trace.critical()
    assert sum(one.alone for one in found.rows) + found.nothing == pytest.approx(step)
    assert all(0 <= one.alone <= one.busy for one in found.rows)


def test_the_path_is_the_step(taken: tuple[Trace, int]) -> None:
    """One thread does everything, so the path is all that it does: operators, the loader and Python between."""
    trace, _ = taken
    found = trace.critical_path()
    assert sum(one.seconds for one in found.parts) == pytest.approx(trace.breakdown().mean())
    assert {one.part for one in found.parts} <= {"compute", "data_wait", "python"}
    assert found.share("compute") > 0.05
    names = {one.name: one for one in found.rows}
    assert names["aten::mm"].on_path == pytest.approx(1)


def test_what_follows_what(taken: tuple[Trace, int]) -> None:
    trace, _ = taken
    found = trace.sequences("aten::linear", length=2)
    assert found.rows[0].names[0] == "aten::linear"
    assert found.rows[0].count == 6, "two layers in each of three steps"
    consecutive = trace.sequences()
    assert consecutive.rows
    assert sum(one.share for one in consecutive.rows) <= 1
    assert all(one.count >= 2 and one.gaps >= 0 for one in consecutive.rows)


def test_memory_as_the_file_has_it(taken: tuple[Trace, int]) -> None:
    trace, _ = taken
    told = [one["args"] for one in json.loads(gzip.decompress(trace.path.read_bytes()))["traceEvents"] if one["name"] == "[memory]"]
    (found,) = trace.memory_curve().devices
    assert found.peak == max(one["Total Allocated"] for one in told)
    assert found.requests == len(told)
    assert sum(one.bytes for one in found.holders) == found.peak
    assert found.step in {one.index for one in trace.steps}


def test_what_a_cpu_does_not_have(taken: tuple[Trace, int]) -> None:
    trace, _ = taken
    assert "nothing is launched" in str(trace.launches())
    assert trace.idle().streams == ()
    assert "no kernels" in str(trace.kernels())
    assert "no copies" in str(trace.copies())


def test_from_the_cache(taken: tuple[Trace, int]) -> None:
    trace, _ = taken
    for again in (Trace.load(trace.path, cache=True), Trace.load(trace.path, cache=True)):
        answers: list[Any] = [(one.modules(), one.flame(), one.roofline(), one.memory_curve()) for one in (trace, again)]
        assert answers[0] == answers[1]
