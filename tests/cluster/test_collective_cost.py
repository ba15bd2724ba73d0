"""Costs: closed forms, exact where arithmetic allows, and against published figures."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_times import Layout, Rates, Work, gather_seconds, sharded_step, timed, work
from volumes import volume

from workbench.cluster.analysis.cluster import CLUSTERS, Cluster
from workbench.cluster.analysis.collective_cost import (
    CostError,
    Link,
    all_reduce,
    bus_factor,
    collective_seconds,
    hierarchical_all_reduce,
    non_negative_pair,
)
from workbench.cluster.analysis.iteration import CAP, FIRST, bubble, buckets, overlap
from workbench.cluster.analysis.links import Sweep
from workbench.cluster.analysis.transformer import Transformer
from workbench.core.device import Device

LINK = Link(latency=1e-5, bandwidth=1e9)
GPT3 = Transformer(layers=96, hidden=12288, vocabulary=51200, sequence=2048)
ranks_ = st.integers(1, 4096)
sizes_ = st.floats(0, 1e12)


# --- collectives


def test_a_ring_by_hand() -> None:
    assert all_reduce(8e9, 8, LINK) == pytest.approx(14e-5 + 2 * 7 / 8 * 8)
    assert collective_seconds("all_gather", 8e9, 8, LINK) == pytest.approx(7e-5 + 7)
    assert collective_seconds("all_to_all", 8e9, 8, LINK, "ring") == pytest.approx(7e-5 + 7)
    assert collective_seconds("broadcast", 8e9, 8, LINK) == pytest.approx(7e-5 + 8)
    assert all_reduce(8e9, 8, LINK, "tree") == pytest.approx(6e-5 + 14)
    assert collective_seconds("broadcast", 8e9, 6, LINK, "tree") == pytest.approx(3e-5 + 8)
    assert LINK.send(1e9) == pytest.approx(1 + 1e-5)


@given(sizes_, ranks_)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: float, ranks: int) -> None:
    for algorithm in ("ring", "tree"):
        halves = sum(collective_seconds(half, size, ranks, LINK, algorithm) for half in ("reduce_scatter", "all_gather"))
        assert all_reduce(size, ranks, LINK, algorithm) == pytest.approx(halves)


@given(sizes_, ranks_)
def test_more_ranks_and_more_bytes_are_never_faster(size: float, ranks: int) -> None:
    assert all_reduce(size, ranks + 1, LINK) >= all_reduce(size, ranks, LINK)
    assert all_reduce(2 * size, ranks, LINK) >= all_reduce(size, ranks, LINK)
    assert all_reduce(size, ranks, LINK, "tree") <= all_reduce(size, ranks, LINK) * (1 + 1e-12)
    assert all_reduce(size, 1, LINK) == 0


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 14 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("reduce", 1)],
)
def test_bus_factors_are_those_of_nccl_tests(collective: str, factor: float) -> None:
    assert bus_factor(collective, 8) == factor


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12), st.integers(2, 512))
def test_a_link_is_found_again_in_its_own_sweep(latency: float, bandwidth: float, ranks: int) -> None:
    link = Link(latency=latency, bandwidth=bandwidth)
    sizes = [latency * bandwidth * factor for factor in (0.1, 1, 10, 100)]
    for collective in ("all_reduce", "all_gather"):
        points = [(size, collective_seconds(collective, size, ranks, link)) for size in sizes]
        found = Link.from_sweep(points, ranks=ranks, collective=collective)
        assert found.latency == pytest.approx(latency, rel=1e-6)
        assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=6))
def test_the_non_negative_pair_is_the_best_there_is(rows: list[tuple[float, float, float]]) -> None:
    def off(x: float, y: float) -> float:
        return sum(((a * x + b * y) / seconds - 1) ** 2 for a, b, seconds in rows)

    x, y = non_negative_pair(rows)
    assert min(x, y) >= 0
    steps = (-0.01, 0.0, 0.01)
    near = [(x + dx, y + dy) for dx, dy in itertools.product(steps, steps) if x + dx >= 0 and y + dy >= 0]
    assert off(x, y) <= min(off(*pair) for pair in near) + 1e-9


ranks_of_sweeps = st.integers(2, 512)


@given(ranks_of_sweeps, ranks_of_sweeps)
def test_a_sweep_gives_its_points_and_what_its_link_says_elsewhere(ranks: int, others: int) -> None:
    points = [(size, 1.1 * all_reduce(size, ranks, LINK)) for size in (1e4, 1e6, 1e8)]
    sweep = Sweep(points=reversed(points), ranks=ranks)
    for size, seconds in points:
        assert sweep.seconds(size) == pytest.approx(seconds)
        assert sweep.seconds(size, others) == pytest.approx(1.1 * all_reduce(size, others, LINK), rel=1e-6)
    assert points[0][1] < sweep.seconds(3e5) < points[2][1]
    assert sweep.seconds(1e10) == pytest.approx(1.1 * all_reduce(1e10, ranks, LINK), rel=1e-6)


def test_a_sweep_shows_itself() -> None:
    sweep = Sweep(points=[(2**20, 1e-3), (2**24, 1e-2)], ranks=4, collective="all_gather")
    again = Sweep.from_json(json.loads(json.dumps(sweep.to_json())))
    assert again == sweep
    assert "all_gather of 4 ranks" in str(sweep)
    assert "1.00 MiB" in sweep._repr_html_()
    assert "hop" in str(sweep)
    assert "latency" in sweep.link._repr_html_() + str(sweep.link)
    assert Link.from_json(sweep.link.to_json()) == sweep.link


# --- hierarchy and clusters


@given(st.integers(1, 64), st.integers(1, 16), sizes_)
def test_a_hierarchy_of_one_level_is_a_ring(nodes: int, per_node: int, size: float) -> None:
    fast = Link(latency=1e-6, bandwidth=1e11)
    between = hierarchical_all_reduce(size, nodes=nodes, per_node=1, intra=fast, inter=LINK)
    inside = hierarchical_all_reduce(size, nodes=1, per_node=per_node, intra=fast, inter=LINK)
    assert between == pytest.approx(all_reduce(size, nodes, LINK))
    assert inside == pytest.approx(all_reduce(size, per_node, fast))
    if nodes > 1 and per_node > 1:
        both = hierarchical_all_reduce(size, nodes=nodes, per_node=per_node, intra=fast, inter=LINK)
        assert both <= all_reduce(size, nodes * per_node, LINK)  # one flat ring is held up by its slowest link
        assert max(between / per_node, inside) * 0.999 <= both <= between + inside


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_an_all_reduce_over_nodes_is_as_fast_as_a_published_one(nodes: int) -> None:
    """320 to 350 GB/s of bus bandwidth on 3 to 16 nodes of AWS p5 (The Smol Training Playbook), links at 80 % of their datasheets."""
    cluster, size = Cluster.named("DGX-H100"), 2**33
    intra, inter = (replace(link, bandwidth=0.8 * link.bandwidth) for link in (cluster.intra, cluster.inter))
    took = hierarchical_all_reduce(size, nodes=nodes, per_node=8, intra=intra, inter=inter)
    assert 320e9 <= bus_factor("all_reduce", 8 * nodes) * size / took <= 1.2 * 350e9


def test_the_catalogue_is_in_order() -> None:
    for cluster in CLUSTERS:
        assert Cluster.named(cluster.name.lower()) is cluster
        assert cluster.intra.bandwidth > cluster.inter.bandwidth
        assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
        assert "by datasheet" in str(cluster)
        assert str(cluster.table.rows[0][1]) in cluster._repr_html_()
    assert {"DGX-A100", "DGX-H100", "DGX-H200", "DGX-B200"} <= {cluster.name for cluster in CLUSTERS}


def test_a_cluster_of_one_s_own() -> None:
    mine = Cluster(name="mine", device=Device.named("L4"), gpus_per_node=2, intra=LINK, inter=LINK, source="lspci")
    assert mine.nodes(6) == 3
    assert mine.nodes(1) == 1
    measured = mine.with_links(inter=Link(latency=1e-4, bandwidth=1e8))
    assert (measured.measured, measured.measured_links) == (False, ("inter",))
    assert "links between nodes measured, inside a node at best, by datasheet" in str(measured)
    both = measured.with_links(intra=LINK)
    assert both.measured
    assert "links measured" in str(both)
    assert "links at best, by datasheet" in str(mine)
    assert all(Cluster.from_json(one.to_json()) == one for one in (mine, measured, both))
    older = {name: value for name, value in both.to_json().items() if name != "measured_links"} | {"measured": True}
    assert Cluster.from_json(older) == both
    with pytest.raises(CostError, match=r"measured_links=\('nvlink',\): expected some of"):
        replace(mine, measured_links=("nvlink",))
    assert measured.all_reduce(1e9, 4) > mine.all_reduce(1e9, 4)
    assert mine.all_reduce(1e9, 2) == all_reduce(1e9, 2, LINK)
    assert repr(mine) == "Cluster('mine')"


# --- overlap


def test_buckets_are_closed_by_the_gradient_that_fills_them() -> None:
    mib = 2**20
    assert buckets([25 * mib, 10 * mib, 20 * mib, mib, mib // 2, mib // 2]) == [[5, 4], [3, 2, 1], [0]]
    assert buckets([3, 3, 3, 3], cap=6) == [[3, 2], [1, 0]]
    assert buckets([]) == []
    assert FIRST < CAP


def test_overlap_by_hand() -> None:
    found = overlap([0.2, 0.6, 1.0], [0.5, 0.1, 0.4], backward=1.0)
    assert found.starts == (0.2, 0.7, 1.0)
    assert found.exposed == pytest.approx(0.4)
    assert found.communication == pytest.approx(1.0)
    assert found.hidden == pytest.approx(0.6)
    assert overlap([], [], 1.0).exposed == 0


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=30), st.floats(1e-3, 1), st.floats(0, 1e-8))
def test_what_is_exposed_lies_between_the_last_bucket_and_all(sizes: list[int], backward: float, per_byte: float) -> None:
    found = timed(sizes, backward, lambda size: size * per_byte)
    assert sorted(place for one in buckets(sizes) for place in one) == list(range(len(sizes)))
    assert found.communication == pytest.approx(sum(sizes) * per_byte)
    last = found.ends[-1] - found.starts[-1]
    assert last * (1 - 1e-9) - 1e-12 <= found.exposed <= found.communication * (1 + 1e-9) + 1e-12
    whole = timed(sizes, backward, lambda size: size * per_byte, cap=sum(sizes))
    assert whole.exposed == pytest.approx(whole.communication)  # one bucket hides nothing


# --- volumes and bubbles


def test_volumes_per_rank() -> None:
    share = 7 / 8
    assert volume(100, 8).total == pytest.approx(2 * 400 * share)
    assert volume(100, 8, "zero2").total == pytest.approx(2 * 400 * share)
    sharded = volume(100, 8, "fsdp", parameter_bytes=2)
    assert (sharded.gathered, sharded.reduced, sharded.returned) == pytest.approx((2 * 200 * share, 400 * share, 0))
    assert volume(100, 8, "zero3", parameter_bytes=2) == sharded
    assert volume(100, 1).total == 0


@given(st.integers(1, 64), st.floats(1, 1e12))
def test_hsdp_of_one_group_is_fsdp_and_of_groups_of_one_is_ddp(ranks: int, parameters: float) -> None:
    assert volume(parameters, ranks, "hsdp", shard_ranks=ranks).total == pytest.approx(volume(parameters, ranks, "fsdp").total)
    assert volume(parameters, ranks, "hsdp", shard_ranks=1).total == pytest.approx(volume(parameters, ranks, "ddp").total)


def test_bubbles() -> None:
    assert bubble(4, 8) == bubble(4, 8, "gpipe") == 3 / 8
    assert bubble(4, 8, "interleaved", chunks=2) == 3 / 16
    assert bubble(4, 8, "zb-h1") == 1 / 8
    assert bubble(4, 8, "zb-v") == bubble(1, 8) == 0


def test_a_sharded_step_is_the_longer_of_computing_and_sending() -> None:
    cluster = Cluster(name="mine", device=Device.named("L4"), gpus_per_node=4, intra=LINK, inter=LINK, source="")
    assert sharded_step(1e6, 1e9, 16, cluster) == 1e6
    assert sharded_step(1.0, 1e9, 1, cluster) == 1.0
    one_node = 3 / 4 * (2 * 2e9 + 4e9) / 1e9 + 3 * 3e-5
    assert sharded_step(1e-9, 1e9, 4, cluster) == pytest.approx(one_node)
    assert gather_seconds(1e9, 16, cluster) == pytest.approx(15 / 16 + 6e-5)  # inside: the cards of a node are together faster
    slow = cluster.with_links(inter=Link(latency=0, bandwidth=1e8))
    assert gather_seconds(1e9, 16, slow) == pytest.approx(3 / 4 * 1e9 / 4e8 + 3e-5)


# --- transformers


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"), [(48, 8192, 39.1), (80, 12288, 145.6), (105, 20480, 529.6), (128, 25600, 1008.0)]
)
def test_parameters_are_those_of_narayanan_s_table(layers: int, hidden: int, billions: float) -> None:
    model = Transformer(layers=layers, hidden=hidden, vocabulary=51200, sequence=2048)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_are_six_per_parameter_and_token_and_a_third_more_with_recomputation() -> None:
    tokens = 8 * GPT3.sequence
    assert GPT3.flops(8) == pytest.approx(6 * GPT3.parameters * tokens, rel=0.04)  # the rest is attention
    assert GPT3.flops(8, "full") / GPT3.flops(8) == pytest.approx(4 / 3, rel=0.01)
    assert GPT3.flops(8) < GPT3.flops(8, "selective") < GPT3.flops(8, "full")


def test_published_iterations_from_two_smaller_ones() -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, Table 5: seconds with everything, and with attention alone, computed again."""
    table = {  # layers, hidden, batch, micro-batch, stages, chunks: full, selective
        "22B": ((48, 6144, 4, 4, 1, 1), (1.42, 1.10)),
        "175B": ((96, 12288, 64, 1, 8, 3), (18.13, 13.75)),
        "530B": ((105, 20480, 280, 1, 35, 3), (49.05, 37.83)),
        "1T": ((128, 25600, 512, 1, 64, 1), (94.42, 71.49)),
    }
    for column, recompute in enumerate(("full", "selective")):
        found = {}
        for name, ((layers, hidden, batch, micro_batch, stages, chunks), _) in table.items():
            model = Transformer(layers=layers, hidden=hidden, vocabulary=51200, sequence=2048)
            layout = Layout(batch=batch, micro_batch=micro_batch, tensor=8, pipeline=stages, chunks=chunks)
            found[name] = work(model, layout, recompute)
        rates = Rates.calibrated([(found[name], table[name][1][column]) for name in ("22B", "175B")])
        for name in ("530B", "1T"):
            assert rates.seconds(found[name]) == pytest.approx(table[name][1][column], rel=0.04), (name, recompute)


@given(st.floats(1e12, 1e15), st.floats(1e9, 1e12))
def test_rates_are_found_again(flops: float, bandwidth: float) -> None:
    rates = Rates(flops_per_sec=flops, bandwidth=bandwidth)
    works = [Work(flops=flops * a, bytes=bandwidth * b, bubble=r) for a, b, r in ((1, 1, 0), (2, 1, 0.1), (1, 3, 0.3))]
    again = Rates.calibrated([(one, rates.seconds(one)) for one in works])
    assert again.flops_per_sec == pytest.approx(flops, rel=1e-6)
    assert again.bandwidth == pytest.approx(bandwidth, rel=1e-6)


def test_iterations_of_one_kind_tell_one_rate() -> None:
    rates = Rates.calibrated([(Work(flops=1.0, bytes=0.0, bubble=0.0), 2.0), (Work(flops=2.0, bytes=0.0, bubble=0.0), 4.0)])
    assert rates.flops_per_sec == pytest.approx(0.5)
    assert rates.bandwidth == math.inf


def test_utilization() -> None:
    layout = Layout(batch=64, tensor=8, pipeline=8, chunks=3)
    assert layout.gpus == 64
    # Table 5 itself: 175B, selective, 13.75 s: 51.4 % of 312 TFLOP/s
    assert GPT3.flops(layout.batch) / layout.gpus / 13.75 / 312e12 == pytest.approx(0.514, abs=0.005)
    assert GPT3.boundary_bytes(2) == 2 * 2048 * 12288 * 2


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: Link(latency=-1, bandwidth=1), "latency=-1: expected seconds of at least 0"),
        (lambda: Link(latency=0, bandwidth=0), "bandwidth=0: expected bytes per second above 0"),
        (lambda: all_reduce(1, 0, LINK), "0 ranks: expected a whole number of at least 1"),
        (lambda: all_reduce(-1, 2, LINK), "size=-1: expected bytes of at least 0"),
        (lambda: all_reduce(1, 2, LINK, "star"), "algorithm='star': allowed are \"ring\""),
        (lambda: bus_factor("scan", 2), "collective='scan': allowed are 'all_reduce'"),
        (lambda: Link.from_sweep([(1, 1)], ranks=2), "at least two different sizes"),
        (lambda: Link.from_sweep([(1, 1), (1e6, 1e-3)], ranks=2), "do not grow with the bytes"),
        (lambda: Link.from_sweep([(1, 1), (2, 2)], ranks=1), "1 ranks: expected a whole number of at least 2"),
        (lambda: Sweep(points=[(1, 1), (1, 2), (9, 9)], ranks=2), "a size twice"),
        (lambda: Sweep(points=[(1, 1), (9, 9)], ranks=2).seconds(0), "size=0: expected bytes above 0"),
        (lambda: hierarchical_all_reduce(1, nodes=0, per_node=8, intra=LINK, inter=LINK), "nodes: 0 ranks"),
        (lambda: overlap([1], [], 1), "1 times at which buckets are ready and 0"),
        (lambda: overlap([-1], [1], 1), "times below 0"),
        (lambda: buckets([1], cap=0), "cap=0"),
        (lambda: volume(1, 2, "ddpp"), "sharing='ddpp': allowed are 'ddp'"),
        (lambda: volume(0, 2), "parameters=0"),
        (lambda: volume(1, 6, "hsdp", shard_ranks=4), "shard_ranks=4 does not divide the 6 ranks"),
        (lambda: bubble(4, 8, "2f2b"), "schedule='2f2b': allowed are 'gpipe'"),
        (lambda: bubble(4, 8, chunks=2), 'only "interleaved"'),
        (lambda: bubble(4, 6, "interleaved", chunks=2), "6 is not a multiple"),
        (lambda: sharded_step(0, 1e9, 8, CLUSTERS[0]), "compute=0: expected seconds above 0"),
        (lambda: Transformer(layers=0, hidden=1, vocabulary=1, sequence=1), "layers=0"),
        (lambda: GPT3.flops(1, "some"), "recompute='some': allowed are 'none'"),
        (lambda: Layout(batch=6, micro_batch=4), "batch=6 is not a multiple"),
        (lambda: Layout(batch=0), "batch=0: expected a whole number"),
        (lambda: Rates.calibrated([]), "0 measured iterations: expected two or more"),
        (lambda: Cluster.named("DGX-H300"), "unknown cluster 'DGX-H300': did you mean 'DGX-H[12]00'"),
        (lambda: Cluster.named("DGX-H100").nodes(12), "12 GPUs are not whole nodes of 8: try 16"),
        (
            lambda: Cluster(name="x", device="H100", gpus_per_node=8, intra=LINK, inter=LINK, source=""),  # type: ignore[arg-type]
            "device='H100': expected a Device",
        ),
    ],
)
def test_clear_errors(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(CostError, match=said):
        ask()
