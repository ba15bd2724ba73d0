"""Collectives of a module, counted dry: exactly those of two real ranks; their lint, their seconds, and what is refused."""

import functools
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from published_times import gather_seconds
from torch import Tensor, nn
from volumes import volume

import workbench as wb
from tests.forked import Forks
from tests.scripts.counted_ranks import BATCH, CASES, GPT, ODD, Skipping, gpt, gpt_loss
from workbench.cluster.analysis.cluster import CLUSTERS, Cluster
from workbench.cluster.analysis.collective_call import CollectiveCall, group_seconds, placed
from workbench.cluster.analysis.collective_cost import BUS_FACTORS, CostError, Link, all_reduce
from workbench.cluster.analysis.iteration import buckets
from workbench.cluster.analysis.traffic import Traffic, small_below
from workbench.cluster.estimate.collectives import common_prefix
from workbench.memory.estimate.fake_process_group import LazyChunks

X = torch.zeros(2, 8)
SCRIPT = Path(__file__).parents[1] / "scripts" / "counted_ranks.py"
H100 = Cluster.named("DGX-H100")


@functools.cache
def of_gpt(**knobs: Any) -> Traffic:
    """FSDP's on eight ranks, which several tests look at."""
    return wb.collectives(GPT, BATCH, world_size=8, parallel="fsdp", **knobs)


# --- exactness


@pytest.mark.slow
def test_counts_and_bytes_are_those_of_two_real_ranks(forks: Forks, tmp_path: Path) -> None:
    done = forks.ranks(2, tmp_path, SCRIPT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    traffics = {name: wb.collectives(task, batch, world_size=2, **knobs) for name, (task, batch, knobs) in CASES.items()}
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    truth = {row["case"]: Counter((kind, size) for kind, size in row["seen"]) for row in rows}
    assert truth.keys() == CASES.keys()
    for name, traffic in traffics.items():
        assert Counter((one.kind, one.size) for one in traffic) == truth[name], name


def test_ddp_sends_its_gradients_once() -> None:
    weights = [weight.numel() * 4 for weight in gpt().parameters()]
    traffic = wb.collectives(gpt, BATCH, loss=gpt_loss, world_size=64)
    assert traffic.size("all_reduce") == sum(weights) == traffic.size()
    assert traffic.sent() == pytest.approx(volume(sum(weights) / 4, 64).total)
    assert [one.waited for one in traffic] == [False] * (len(traffic) - 1) + [True]
    assert traffic.parameters == sum(weights) // 4


def test_buckets_are_those_of_the_closed_form() -> None:
    """Of a chain of layers, whose gradients come in reverse order."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(one, other, bias=False) for one, other in ((300, 400), (400, 500), (500, 600), (600, 700)))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    sizes = [weight.numel() * 4 for weight in Chain().parameters()]
    for cap in (None, 0.5, 2.0):
        traffic = wb.collectives(Chain, (torch.zeros(2, 300),), world_size=4, bucket_cap_mb=cap)
        expected = [sum(sizes[place] for place in one) for one in buckets(sizes, None if cap is None else int(cap * 2**20))]
        assert [one.size for one in traffic] == expected


def test_fsdp_gathers_twice_and_reduces_once_and_says_what_is_padding() -> None:
    weights = sum(weight.numel() for weight in gpt().parameters())
    traffic = wb.collectives(GPT, BATCH, world_size=16, parallel="fsdp", precision="amp_bf16")
    assert traffic.padding == 0
    assert traffic.size("all_gather") == 2 * 2 * weights
    assert traffic.size("reduce_scatter") == 4 * weights
    assert {one.module for one in traffic} == {"", "layers.0", "layers.1", "layers.2"}
    assert {one.axis for one in traffic} == {"shard"}
    odd = wb.collectives(ODD, BATCH, world_size=64, parallel="fsdp")
    rows = [weight.shape for weight in CASES["zero1"][0].model().parameters()]
    padded = sum(-(-shape[0] // 64) * 64 * shape[1:].numel() for shape in rows)
    assert odd.size("reduce_scatter") == 4 * padded
    assert odd.padding == pytest.approx(padded / sum(shape.numel() for shape in rows) - 1)


def test_a_copy_in_each_group_under_hsdp() -> None:
    traffic = wb.collectives(GPT, BATCH, world_size=64, parallel="hsdp", shard_ranks=8)
    gathers, between = traffic.of("all_gather"), traffic.of("all_reduce")
    assert {(one.ranks, one.stride, one.axis) for one in gathers} == {(8, 1, "shard")}
    assert {(one.ranks, one.stride, one.axis) for one in between} == {(8, 8, "replica")}
    assert 8 * traffic.size("all_reduce") == traffic.size("reduce_scatter")


def test_8192_ranks_and_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traffic = wb.collectives(model, (X,), world_size=8192, parallel="fsdp")
    assert traffic.world_size == traffic.calls[0].ranks == 8192
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.distributed.is_initialized()


def test_one_rank_sends_nothing_under_a_loop_of_ones_own() -> None:
    traffic = wb.collectives(nn.Linear(8, 8), (X,))
    assert len(traffic) == 0
    assert traffic.padding == 0
    assert traffic.lint == ()
    with pytest.raises(ValueError, match="nothing is sent"):
        traffic.plot()


def test_micro_batches() -> None:
    once, twice = of_gpt(), of_gpt(accumulation=2)
    assert twice.size("all_gather") == 2 * once.size("all_gather")
    assert twice.size("reduce_scatter") == once.size("reduce_scatter")
    assert {one.micro for one in twice.of("all_gather")} == {0, 1}


# --- lint


def kinds(traffic: Traffic) -> set[str]:
    return {one.kind for one in traffic.lint}


@pytest.mark.parametrize(
    ("schedule", "chunks", "batches"), [("gpipe", 1, 3), ("1f1b", 1, 3), ("interleaved(chunks=2)", 2, 3), ("zero_bubble", 2, 6)]
)
def test_stages_send_activations_on_and_gradients_back(schedule: str, chunks: int, batches: int) -> None:
    spec = wb.RunSpec(task="workbench.train.tasks:middle_gpt", device="cpu", micro_batch=2, nproc_per_node=6)
    traffic = wb.collectives(spec, pipeline_parallel=3, accumulation=batches, pipeline_schedule=schedule)
    size, between = 4 * 2 * 64 * 512, [call for call in traffic if call.kind in ("send", "recv")]
    assert {(call.size, call.axis, call.ranks, call.waited) for call in between} == {(size, "pipeline", 2, kind) for kind in (False, True)}
    assert {call.stride for call in between} <= {2, 4}  # ranks of a stage are neighbours; the last sends to the first
    sent = Counter((call.kind, call.phase, call.micro) for call in between)
    assert {micro for _, _, micro in sent} == set(range(batches))
    assert set(sent.values()) <= set(range(1, chunks + 1)), sent
    assert traffic.sent("send") == size * sum(count for (kind, _, _), count in sent.items() if kind == "send")
    assert traffic.sent("recv") == 0
    assert len(traffic.of("send")) == batches * 2 * chunks  # of a rank in the middle
    gradients = sum(call.size for call in traffic.of("all_reduce", axis="data"))
    assert 0.1 < gradients / (4 * traffic.parameters) < 0.5  # of its stages
    assert re.match(r"rank \d is shown: of the 3 ranks of a pipeline it sends most", traffic.notes[0])
    seconds = traffic.on(H100)
    assert seconds.seconds > len(between) * H100.intra.latency / 2  # six ranks are in one node
    assert not any("no formula" in note for note in seconds.notes)


def test_padding_is_found_with_its_module() -> None:
    traffic = wb.collectives(ODD, BATCH, world_size=512, parallel="fsdp")
    found = next(one for one in traffic.lint if one.kind == "padding")
    assert "512 ranks" in found.says
    assert "hsdp" in found.tries
    assert "padding" not in kinds(of_gpt())


def test_unused_parameters_are_found() -> None:
    spare = wb.collectives(Skipping, (X,), world_size=2)
    assert spare.unused == ("spare.weight", "spare.bias")
    assert "unused: 2 parameters got no gradient: spare.weight, spare.bias: DDP fails" in str(spare)
    looked = wb.collectives(Skipping, (X,), world_size=2, find_unused_parameters=True)
    assert "unused" not in kinds(looked)
    assert looked.size() == spare.size() + 4 * 72 + 4 * 4  # those of the spare layer, too, and what tells who was used
    static = wb.collectives(Skipping, (X,), world_size=2, static_graph=True)
    assert static.unused == spare.unused
    assert static.size() == 2 * spare.size() == 4 * sum(weight.numel() for weight in Skipping().parameters())
    assert "unused" not in kinds(static)
    assert "needless" not in kinds(wb.collectives(nn.Linear(8, 8), (X,), world_size=2, static_graph=True))
    gathered = wb.collectives(Skipping, (X,), world_size=2, parallel="fsdp")
    assert "gathered for nothing" in str(gathered)
    needless = wb.collectives(nn.Linear(8, 8), (X,), world_size=2, find_unused_parameters=True)
    assert "needless" in kinds(needless)


def test_small_ones_are_found() -> None:
    assert "small" in kinds(wb.collectives(ODD, BATCH, world_size=64, parallel="zero1"))
    assert "small" not in kinds(wb.collectives(lambda: nn.Linear(8, 8), (X,), world_size=64))  # one is not many
    assert small_below(2) == pytest.approx(700e3)
    assert small_below(1) == 0


class Split(nn.Module):
    """Layers of five products, each split over ranks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)  # so that gradients come this far
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Gated(nn.Module):
    """Two perceptrons with a gate each, where one product would do."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.ups = (nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(3)) for _ in range(2))
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(sum(F.silu(gate(x)) * up(x) for gate, up in zip(self.gates, self.ups, strict=True)))
        return y


def test_needless_all_reduces_of_split_layers_are_found() -> None:
    plan = {"layers.*.gates.*": "colwise", "layers.*.ups.*": "colwise", "layers.*.down": "rowwise"}
    task = wb.Task(model=Split, dataset=lambda: [torch.zeros(8)] * 4, loss=lambda model, batch: model(batch).sum(), tensor_parallel=plan)
    traffic = wb.collectives(task, micro_batch=2, world_size=4, tensor_parallel=4)
    assert {(one.axis, one.ranks, one.waited) for one in traffic.of(axis="tensor")} == {("tensor", 4, True)}
    assert traffic.blocks == 2
    found = next(one for one in traffic.lint if one.kind == "needless")
    assert "2 blocks" in found.says


def test_a_single_bucket_is_waited_for() -> None:
    traffic = wb.collectives(lambda: nn.Linear(512, 1024), (torch.zeros(2, 512),), world_size=8)
    assert "nothing can be computed during 100 % of the bytes" in str(traffic)


# --- what is refused


def test_errors_say_what_to_try() -> None:
    with pytest.raises(ValueError, match="nproc_per_node=0: a whole number of at least 1"):
        wb.collectives(gpt, BATCH, loss=gpt_loss, world_size=0)
    with pytest.raises(ValueError, match="1 to 8192 ranks are allowed"):
        wb.collectives(gpt, BATCH, loss=gpt_loss, world_size=10**6)
    with pytest.raises(ValueError, match=r"collectives\(Linear\): a model needs a batch"):
        wb.collectives(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"collectives\(3\): expected a RunSpec"):
        wb.collectives(3, (X,))
    with pytest.raises(ValueError, match="no knob 'paralel': did you mean 'parallel'"):
        wb.collectives(gpt, BATCH, paralel="fsdp")
    with pytest.raises(ValueError, match="tensor_parallel=2: the task has no plan"):
        wb.collectives(ODD, BATCH, world_size=4, tensor_parallel=2)
    with pytest.raises(ValueError, match="shard_ranks=3 does not divide"):
        wb.collectives(ODD, BATCH, world_size=4, parallel="hsdp", shard_ranks=3)


def test_a_constructor_that_reads_numbers_is_built_all_the_same() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = int(torch.tensor(8).item())
            self.scale = float(torch.linspace(0, 1, 3)[1])
            self.layer = nn.Linear(self.width, self.width)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) * self.scale
            return y

    assert wb.collectives(Reads, (X,), world_size=4).size() == 4 * 72


def test_a_model_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="does not accept the batch"):
        wb.collectives(nn.Linear(4, 4), (X,), world_size=2)
    assert not torch.distributed.is_initialized()


# --- the nouns


SENT = st.builds(
    CollectiveCall,
    kind=st.sampled_from(BUS_FACTORS),
    size=st.integers(0, 2**40),
    ranks=st.integers(1, 8192),
    stride=st.sampled_from((1, 2, 8, 64)),
    phase=st.sampled_from(("forward", "backward", "optimizer")),
    module=st.sampled_from(("", "a", "a.b", "c.1")),
    axis=st.sampled_from(("data", "shard", "replica", "tensor")),
    micro=st.integers(0, 3),
    waited=st.booleans(),
)


@given(st.lists(SENT, max_size=12))
def test_every_way_of_summing_gives_the_same(calls: list[CollectiveCall]) -> None:
    traffic = Traffic(calls=tuple(calls), world_size=8192, parameters=1)
    whole = sum(one.sent for one in calls)
    for rows in (traffic.rows, traffic.by_module(), traffic.by_module(1)):
        assert sum(row.sent for row in rows) == pytest.approx(whole)
        assert sum(row.count for row in rows) == len(calls)
    assert Traffic.from_json(json.loads(json.dumps(traffic.to_json()))) == traffic
    timed = traffic.on(H100)
    assert timed.waited <= timed.seconds * (1 + 1e-12)
    assert timed.waited * (1 - 1e-9) <= timed.exposed(forward=1e9, backward=1e9) + sum(
        seconds for one, seconds in zip(timed.calls, timed.each, strict=True) if one.phase == "backward" and one.axis == "data"
    )
    assert timed.exposed(forward=0, backward=0) == pytest.approx(timed.seconds)
    str(timed), str(traffic)


@given(SENT, st.sampled_from(CLUSTERS))
def test_seconds_of_a_group(one: CollectiveCall, cluster: Cluster) -> None:
    nodes, per_node = placed(cluster, one.ranks, one.stride)
    assert (nodes - 1) * per_node < one.ranks <= nodes * per_node
    seconds = one.seconds(cluster)
    assert 0 <= seconds <= min(one.seconds(cluster, "ring"), one.seconds(cluster, "tree")) * (1 + 1e-12)
    larger = group_seconds(one.kind, 2 * one.size, cluster, ranks=one.ranks, stride=one.stride)
    assert larger >= seconds


def test_groups_inside_a_node_and_over_nodes_are_those_of_the_closed_forms() -> None:
    assert group_seconds("all_reduce", 1e9, H100, ranks=8) == pytest.approx(
        min(all_reduce(1e9, 8, H100.intra), all_reduce(1e9, 8, H100.intra, "tree"))
    )
    assert group_seconds("all_reduce", 1e9, H100, ranks=64) == pytest.approx(H100.all_reduce(1e9, 64))
    assert group_seconds("all_gather", 1e9, H100, ranks=64, algorithm="ring") == pytest.approx(gather_seconds(1e9, 64, H100))
    between = Link(latency=H100.inter.latency, bandwidth=H100.inter.bandwidth)
    assert group_seconds("all_reduce", 1e9, H100, ranks=8, stride=8, algorithm="ring") == pytest.approx(all_reduce(1e9, 8, between))


def test_a_table_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = of_gpt()
    shown = str(traffic)
    assert "fsdp on 8 ranks" in shown
    assert "all_gather" in shown
    assert len(traffic.to_frame()) == len(traffic)
    timed = traffic.on("DGX-H100")
    assert timed.seconds > timed.waited > 0
    assert "by datasheet" in str(timed)
    assert len(timed.to_frame()) == len(traffic)
    with pytest.raises(CostError, match="unknown cluster"):
        traffic.on("DGX-H10")
    with pytest.raises(CostError, match="a Cluster or the name of one"):
        traffic.on(3)  # type: ignore[arg-type]
    with pytest.raises(CostError, match="algorithm='fast'"):
        traffic.on(H100, algorithm="fast")
    with pytest.raises(CostError, match="seconds of at least 0"):
        timed.exposed(forward=-1, backward=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "0 ranks"),
        ({"phase": "later"}, "phase='later'"),
        ({"size": -1}, "size=-1"),
        ({"needed": 101}, "needed=101"),
    ],
)
def test_what_a_collective_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CostError, match=message):
        CollectiveCall(**{"kind": "all_reduce", "size": 100, "ranks": 2, "phase": "forward", **change})


def test_a_kind_without_a_formula_takes_no_time_and_says_so() -> None:
    traffic = Traffic(calls=(CollectiveCall(kind="barrier", size=0, ranks=8, phase="forward"),), world_size=8, parameters=1)
    assert traffic.on(H100).seconds == 0
    assert "no formula for barrier" in str(traffic.on(H100))


@given(st.integers(1, 200), st.integers(1, 50))
def test_chunks_are_those_of_torch(size: int, count: int) -> None:
    tensor = torch.arange(size)
    usual = list(torch.chunk(tensor, count))
    usual += [tensor.new_empty(0)] * (count - len(usual))
    made = LazyChunks(tensor, count, 0)
    assert len(made) == count
    assert all(torch.equal(made[place], usual[place]) for place in range(count))
    with pytest.raises(IndexError):
        made[count]


def test_names_have_a_part_in_common() -> None:
    assert common_prefix(["layers.1.a", "layers.1.b"]) == "layers.1"
    assert common_prefix([]) == ""


def test_the_picture_has_a_bar_for_each_module() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = of_gpt().plot()
    assert [text.get_text() for text in ax.get_yticklabels()] == ["(model)", "layers.0", "layers.1", "layers.2"]
    assert "MiB" in ax.get_xlabel()
    pyplot.close(ax.figure)
