"""Collectives timed between real ranks, and what is made of them."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.cluster import api
from workbench.cluster.analysis.collective_cost import CostError, Link, collective_seconds
from workbench.cluster.analysis.links import LinkPoint, Links, Sweep
from workbench.cluster.analysis.plan.ranges import MEASURED_LINKS, link_share
from workbench.cluster.analysis.transformer import Transformer
from workbench.cluster.api import links_of
from workbench.cluster.measure.links import rounded
from workbench.core import run_directory
from workbench.programs.communication import as_links

SIZES = (2**12, 2**16, 2**20, 2**24)


def made(link: Link, ranks: int, kinds: tuple[str, ...] = ("all_reduce",), factors: tuple[float, ...] = (1.0,)) -> Links:
    points = [
        LinkPoint(kind=kind, size=size, seconds=tuple(factor * collective_seconds(kind, size, ranks, link) for factor in factors))
        for kind in kinds
        for size in SIZES
    ]
    return Links(points=tuple(points), ranks=ranks, backend="gloo", device="cpu")


@given(st.floats(1e-7, 1e-3), st.floats(1e7, 1e12), st.integers(2, 512))
def test_latency_and_bandwidth_come_back(latency: float, bandwidth: float, ranks: int) -> None:
    links = made(Link(latency=latency, bandwidth=bandwidth), ranks, ("all_reduce", "all_gather", "broadcast"))
    for kind in links.kinds:
        fitted = [collective_seconds(kind, size, ranks, links[kind].link) for size in SIZES]
        assert fitted == pytest.approx([point.median for point in links.points if point.kind == kind], rel=1e-3)
    assert Links.from_json(json.loads(json.dumps(links.to_json()))) == links


def test_intervals_hold_what_the_repeats_spread_around() -> None:
    link = Link(latency=1e-4, bandwidth=1e9)
    steady, noisy = made(link, 4, factors=(1.0,) * 9), made(link, 4, factors=(0.8, 0.9, 0.95, 1, 1, 1.02, 1.1, 1.2, 3.0))
    for links in (steady, noisy):
        (low, high), (slow, fast) = links.intervals()
        assert low * (1 - 1e-6) <= 1e-4 <= high * (1 + 1e-6)
        assert slow * (1 - 1e-6) <= 1e9 <= fast * (1 + 1e-6)
    (low, high), _ = noisy.intervals()
    assert high > low
    assert noisy.intervals() == noisy.intervals()


def test_the_median_does_not_mind_an_outlier() -> None:
    link = Link(latency=1e-4, bandwidth=1e9)
    assert made(link, 4, factors=(1, 1, 1, 50)).link.bandwidth == pytest.approx(1e9, rel=1e-3)


def test_the_interval_of_a_bandwidth_goes_with_the_link_into_a_plan() -> None:
    link = Link(latency=1e-4, bandwidth=1e9)
    noisy, once = made(link, 4, factors=(0.5, 0.7, 1, 1.6, 2.5)), made(link, 4)
    slow, fast = noisy.intervals()[1]
    assert slow < 0.9e9 < 1.05e9 < fast
    assert noisy.link.bandwidths == (slow, fast)
    assert once.link.bandwidths is None
    assert Sweep.from_json(json.loads(json.dumps(noisy["all_reduce"].to_json()))) == noisy["all_reduce"]
    for given_one in (noisy, noisy["all_reduce"], noisy.link):
        cluster = wb.Cluster.of("H100-SXM", gpus_per_node=8, intra=given_one, inter=link)
        assert link_share(cluster, "intra").low == pytest.approx(slow / cluster.intra.bandwidth)
        assert link_share(cluster, "intra").high == pytest.approx(fast / cluster.intra.bandwidth)
        assert wb.Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
        assert " … " in str(cluster)
    steady = wb.Cluster.of("H100-SXM", gpus_per_node=8, intra=once, inter=link)
    assert link_share(steady, "intra") == MEASURED_LINKS
    model = Transformer(layers=8, hidden=1024, vocabulary=32_000, sequence=1024)
    wide, narrow = (wb.plan(model, one, gpus=8, global_batch=8, sharing="ddp", tensor=1)[0].seconds for one in (cluster, steady))
    assert wide.low < narrow.low < narrow.high < wide.high
    with pytest.raises(CostError, match=r"bandwidths=\(2, 1\): expected \(low, high\)"):
        Link(latency=0, bandwidth=1, bandwidths=(2, 1))


def test_seconds_that_do_not_grow_are_said_in_the_table() -> None:
    links = Links(
        points=tuple(LinkPoint(kind="broadcast", size=size, seconds=(1 / size,)) for size in SIZES), ranks=2, backend="gloo", device="cpu"
    )
    with pytest.raises(CostError, match="do not grow"):
        links["broadcast"]
    assert "do not grow" in str(links)


def test_a_kind_that_was_not_measured() -> None:
    with pytest.raises(CostError, match="'reduce' was not measured: there are all_reduce"):
        made(Link(latency=0, bandwidth=1), 2)["reduce"]


@pytest.mark.usefixtures("forked_ranks")
def test_two_real_ranks(tmp_path: Path) -> None:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
    links = wb.measure_collectives(2, sizes=[4096, 1_000_001, 2**23], kinds=kinds, device="cpu", repeats=3, seconds=0.5, runs_dir=tmp_path)
    assert links.kinds == kinds
    assert links.ranks == 2
    assert [point.size for point in links.points[:3]] == [4096, 1_000_008, 2**23]  # what two ranks can share
    assert all(len(point.seconds) == 3 and min(point.seconds) > 0 for point in links.points)
    assert links["all_reduce"].seconds(2**23) == pytest.approx(statistics.median(links.points[2].seconds))
    (folder,) = tmp_path.iterdir()
    assert links_of(folder) == links == links_of(wb.Run.load(folder))
    shown = str(links)
    assert "bus bandwidth" in shown
    assert "no network of a cluster" in shown
    assert len(links.to_frame()) == 54
    measured = wb.Cluster.named("DGX-H100").with_links(intra=links.link)
    assert measured.measured_links == ("intra",)


def test_the_picture_has_a_colour_for_each_kind() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = made(Link(latency=1e-5, bandwidth=1e9), 8, ("all_reduce", "all_gather"), (0.9, 1.0, 1.1)).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["all_reduce", "all_gather", "measured", "predicted"]
    pyplot.close(ax.figure)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nproc_per_node": 1}, "nproc_per_node=1: a whole number of at least 2"),
        ({"nproc_per_node": True}, "nproc_per_node=True"),
        ({"sizes": [4096]}, "at least two different"),
        ({"sizes": [0, 4096]}, "at least two different"),
        ({"kinds": ["gather"]}, "a list of all_reduce"),
        ({"kinds": "all_reduce"}, "a list of"),
        ({"repeat": 0}, "repeat=0"),
        ({"seconds": 0}, "budget_s=0: seconds above 0"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "cpu", "backend": "nccl"}, "nccl reduces on GPUs only"),
    ],
)
def test_errors_say_what_to_try(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        wb.measure_collectives(**{"nproc_per_node": 2, "runs_dir": tmp_path, **change})
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.environment, "gpu_count", lambda: 4)
    with pytest.raises(CostError, match="this machine has 4 GPUs"):
        wb.measure_collectives(8, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_cores_are_said_to_be() -> None:
    class Ranks:
        world_size = 64
        device = type("Device", (), {"type": "cpu"})()

    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "gloo")
        links = as_links({"cores": 2, "host": "here"}, Ranks(), [])  # type: ignore[arg-type]
    assert "oversubscribed: 64 ranks on 2 cores" in links.notes[0]
    assert links.host == "here"


def test_a_run_of_another_kind_has_none(by_hand: Any) -> None:
    other = by_hand().ended("finished")
    with pytest.raises(run_directory.DamagedRunError, match=r"links\.json is missing"):
        links_of(other.path)


@given(st.integers(1, 2**30), st.integers(2, 1000))
def test_messages_that_all_ranks_can_share(size: int, ranks: int) -> None:
    assert size <= rounded(size, ranks) < size + 4 * ranks
    assert rounded(size, ranks) % (4 * ranks) == 0
