"""The twin of DDP: torch's own reducer beside the closed form."""

import json
import math
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import workbench as wb
from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import CostError, Link, all_reduce
from workbench.cluster.analysis.links import Sweep
from workbench.cluster.analysis.twin_run import TwinLayer, TwinRun, closed_form, seconds_on

NET = Link(latency=2e-6, bandwidth=2e9)
LAYERS = [TwinLayer(size=2**18, forward=0.002, backward=0.004) for _ in range(16)]


@pytest.mark.parametrize(("ranks", "cap"), [(2, 1), (8, 1), (1024, 1), (1024, 0.25), (1024, None), (100_000, 2)])
def test_the_reducer_agrees_with_the_closed_form(ranks: int, cap: float | None) -> None:
    twin = wb.ddp_twin(LAYERS, NET, world_size=ranks, bucket_cap_mb=cap)
    assert twin.ratio == pytest.approx(1)
    assert twin.exposed == pytest.approx(twin.closed.exposed)
    assert [one.start for one in twin.buckets] == pytest.approx(list(twin.closed.starts))
    assert [one.end for one in twin.buckets] == pytest.approx(list(twin.closed.ends))
    assert (twin.forward, twin.backward) == (pytest.approx(0.032), pytest.approx(0.064))
    assert sum(one.size for one in twin.buckets) == 16 * 2**18


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 2**17), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8),
    st.sampled_from((None, 0.05, 0.5)),
    st.floats(1e6, 1e10),
)
def test_whatever_the_layers(layers: list[tuple[int, float, float]], cap: float | None, bandwidth: float) -> None:
    made = [TwinLayer(size=4 * count, forward=forward, backward=backward) for count, forward, backward in layers]
    twin = wb.ddp_twin(made, Link(latency=1e-5, bandwidth=bandwidth), ranks=64, bucket_cap_mb=cap)
    assert twin.ratio == pytest.approx(1)
    assert [one.size for one in twin.buckets] == pytest.approx(
        [sum(made[p].size for p in group) for group in _groups(made, None if cap is None else int(cap * 2**20))]
    )
    for one, other in zip(twin.buckets, twin.buckets[1:], strict=False):
        assert one.ready <= one.start <= one.end <= other.start


def _groups(layers: list[TwinLayer], cap: int | None) -> list[list[int]]:
    from workbench.cluster.analysis.iteration import buckets

    return buckets([one.size for one in layers], cap)


def test_in_real_time_threads_sleep_and_nothing_is_faster_than_asked_for() -> None:
    twin = wb.ddp_twin(LAYERS[:4], Link(latency=0, bandwidth=1e8), ranks=64, bucket_cap_mb=0.25, real=1.0, steps=3)
    asked = wb.ddp_twin(LAYERS[:4], Link(latency=0, bandwidth=1e8), ranks=64, bucket_cap_mb=0.25)
    assert twin.step >= asked.step * 0.999  # a sleep ends late, never early; how late is this machine's affair
    assert twin.closed.backward == pytest.approx(twin.backward)
    assert len(twin.buckets) == 4
    for one in twin.buckets:
        assert one.end - one.start >= all_reduce(one.size, 64, Link(latency=0, bandwidth=1e8)) * 0.999
    assert "real time" in str(twin)


def test_a_module_computes_at_a_steady_pace() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    twin = wb.ddp_twin(model, Cluster.named("DGX-H100"), ranks=64, forward=0.01, backward=0.02, bucket_cap_mb=0.5)
    assert twin.ratio == pytest.approx(1)
    assert [one.size for one in twin.buckets] == [2**19] * 4
    assert [one.ready for one in twin.buckets] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert twin.title == "Sequential"


def test_smaller_buckets_hide_more_until_latency_counts() -> None:
    slow = Link(latency=0, bandwidth=5e8)
    large, small = (wb.ddp_twin(LAYERS, slow, ranks=8, bucket_cap_mb=cap).exposed for cap in (25, 0.25))
    assert small < large
    late = Link(latency=1e-3, bandwidth=1e12)
    large, small = (wb.ddp_twin(LAYERS, late, ranks=8, bucket_cap_mb=cap).exposed for cap in (25, 0.25))
    assert small > large


def test_every_kind_of_network() -> None:
    sweep = Sweep(points=[(2**20, 60e-6), (2**24, 150e-6)], ranks=8)
    assert seconds_on(sweep, 8)(2**20) == pytest.approx(60e-6)
    assert seconds_on(NET, 8)(1e6) == all_reduce(1e6, 8, NET)
    assert seconds_on(lambda size: size, 8)(3) == 3
    with pytest.raises(CostError, match="a Link, a Sweep, a Cluster or its name, or a function"):
        seconds_on(3, 8)  # type: ignore[arg-type]
    with pytest.raises(CostError, match="not whole nodes"):
        seconds_on(Cluster.named("DGX-H100"), 9)
    assert seconds_on("dgx-h100", 64)(1e9) == Cluster.named("DGX-H100").all_reduce(1e9, 64)
    with pytest.raises(CostError, match="unknown cluster 'DGX-H10': did you mean"):
        seconds_on("DGX-H10", 64)


@pytest.mark.parametrize("answer", [math.nan, math.inf, -1.0, "x", None])
@pytest.mark.parametrize("real", [None, 0.1])
def test_a_network_of_ones_own_that_answers_nonsense(answer: Any, real: float | None) -> None:
    with pytest.raises(CostError, match=rf"network\([\d,]+\) returned {answer!r}: expected seconds of at least 0"):
        wb.ddp_twin(LAYERS, lambda size: answer, ranks=8, real=real)
    assert not dist.is_initialized()


def test_it_can_be_kept_and_drawn() -> None:
    twin = wb.ddp_twin(LAYERS[:4], NET, ranks=8, bucket_cap_mb=0.25)
    assert TwinRun.from_json(json.loads(json.dumps(twin.to_json()))) == twin
    assert len(twin.to_frame()) == len(twin.buckets)
    assert "virtual clock" in twin._repr_html_()
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = twin.plot()
    assert len(ax.get_yticklabels()) == 1 + len(twin.buckets)
    pyplot.close(ax.figure)


def test_the_closed_form_by_hand() -> None:
    layers = [TwinLayer(size=400, forward=0, backward=1.0), TwinLayer(size=400, forward=0, backward=2.0)]
    found = closed_form(layers, lambda size: size / 200, cap=400)
    assert found.ends == (4.0, 6.0)
    assert found.exposed == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 1}, "world_size=1: expected at least 2"),
        ({"ranks": 0}, "0 ranks"),
        ({"model": []}, "a list of TwinLayer"),
        ({"model": 3}, "a list of TwinLayer, or a torch.nn.Module"),
        ({"model": nn.Linear(2, 2)}, "forward=None, backward=None"),
        ({"model": nn.ReLU(), "forward": 1, "backward": 1}, "no parameter that requires a gradient"),
        ({"forward": 1.0}, "go with a module"),
        ({"real": 0}, "real=0: a number above 0"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1"),
        ({"steps": 0}, "steps=0"),
        ({"model": [TwinLayer(size=2**31, forward=0, backward=0)]}, "Try fewer layers"),
    ],
)
def test_errors_say_what_to_try(change: dict[str, Any], message: str) -> None:
    given_ = {"model": LAYERS, "ranks": 8, **change}
    with pytest.raises(CostError, match=message):
        wb.ddp_twin(given_.pop("model"), NET, **given_)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("size", "seconds"), [(3, 0.0), (0, 0.0), (8, -1.0)])
def test_what_a_layer_cannot_be(size: int, seconds: float) -> None:
    with pytest.raises(CostError):
        TwinLayer(size=size, forward=0.0, backward=seconds)
