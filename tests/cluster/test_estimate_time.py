"""`estimate_time`: the arithmetic of parts and intervals, what is refused, and dry runs against a roofline by hand and real steps."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_call import CollectiveCall
from workbench.cluster.analysis.operator_time import BEST_PRODUCT, KERNEL, SHARES, UNALIGNED, Operator
from workbench.cluster.analysis.plan.ranges import LAUNCH, OTHER_LAUNCH, SLOWEST_LAUNCH
from workbench.cluster.analysis.step_time import (
    CACHED,
    CPU,
    FARTHEST,
    OTHER,
    SAME,
    SHORTEST,
    EstimateTimeError,
    StepTime,
    checked_calibration,
    distance,
    measured_seconds,
)
from workbench.cluster.analysis.traffic import Traffic
from workbench.core import units
from workbench.core.device import Device
from workbench.core.statistics import Interval
from workbench.memory.estimate.roofline_time import Roofline
from workbench.runs.spec import ScriptSpec
from workbench.traces.analysis import operators

H100 = Device.named("H100")
MM = Operator(name="aten.mm", phase="forward", dtype="bf16", flops=1e13, bytes=1e8, calls=30)
ADD = Operator(name="aten.add", phase="backward", dtype="bf16", flops=0, bytes=1e9, calls=40)
ADAM = Operator(name="aten._fused_adamw_", phase="update", dtype="fp32", flops=0, bytes=1e10, calls=1)


def step(*operators: Operator, **changes: Any) -> StepTime:
    return StepTime(**{"title": "gpt", "device": H100, "operators": operators or (MM, ADD, ADAM), "samples": 16, **changes})


def test_parts_are_rates_times_sizes_and_add_up() -> None:
    found = step(exposed=Interval(low=0.01, mid=0.02, high=0.03))
    parts = found.parts
    best = BEST_PRODUCT["H100-SXM"] / SHARES["products"].high
    assert parts["products"] == pytest.approx(30 * 1e13 / (989.4e12 * SHARES["products"].mid * best))
    assert parts["memory"] == pytest.approx(40 * 1e9 / (3.35e12 * SHARES["memory"].mid))
    assert parts["update"] == pytest.approx(1e10 / (3.35e12 * SHARES["update"].mid))
    assert (parts["launch gaps"], parts["exposed communication"]) == (0, 0.02)
    assert sum(parts.values()) == pytest.approx(found.seconds.mid)
    assert found.seconds.low < found.seconds.mid < found.seconds.high
    assert found.samples_per_sec.mid == pytest.approx(16 / found.seconds.mid)
    assert found.mfu.mid == pytest.approx(30 * 1e13 / 989.4e12 / found.seconds.mid)
    assert found.mfu.high < 1


def test_many_small_operators_wait_for_the_host() -> None:
    small = Operator(name="aten.add", phase="forward", dtype="bf16", flops=0, bytes=1e3, calls=1000)
    found = step(MM, small)
    assert found.parts["memory"] == pytest.approx(1000 * KERNEL)
    only = step(dataclasses.replace(MM, flops=1e6, calls=1), small)
    assert only.seconds.mid == pytest.approx(1001 * LAUNCH.mid)
    assert (only.seconds.low, only.seconds.high) == (pytest.approx(1001 * LAUNCH.low), pytest.approx(1001 * LAUNCH.high))
    pace = "the host's launches set the pace: a faster GPU does not help"
    assert pace in str(only)
    assert pace not in str(step(MM))


def test_a_step_longer_than_its_slowest_kernels_teaches_what_the_host_takes_and_nothing_of_the_kernels() -> None:
    """By hand: 1,000 operators of 20 ms in all, which the host could launch within 12 ms, but the step took 40."""
    kernels = dataclasses.replace(ADD, bytes=2e-2 * 3.35e12 * SHARES["memory"].mid / 1000, calls=1000)
    known = step(kernels).calibrate(0.04).calibration
    assert known is not None
    assert (known.host_bound, known.factor, known.host) == (True, 1.0, pytest.approx(4e-5))
    assert step(calibration=known, title="other").seconds.mid == step().seconds.mid  # its few kernels are no slower than before
    many = step(dataclasses.replace(MM, flops=1e6, bytes=1e3, calls=500), calibration=known, title="many").seconds
    expected = [500 * 4e-5 * OTHER_LAUNCH[end] for end in ("low", "mid", "high")]
    assert [many.low, many.mid, many.high] == pytest.approx(expected)
    deeper = step(*[dataclasses.replace(MM, flops=1e6, bytes=1e3, calls=500)] * 2, calibration=known).seconds  # of the same name
    assert deeper.low < deeper.mid < deeper.high
    slower = step(kernels).calibrate(1001 * SLOWEST_LAUNCH).calibration
    assert slower is not None
    assert not slower.host_bound  # no host is so slow


def test_a_slow_host_is_as_slow_for_other_batches_whether_or_not_it_is_the_launching() -> None:
    """Otherwise twice the batch would be faster than what was measured."""
    tiny = dataclasses.replace(MM, flops=1e6, bytes=1e3, calls=500)
    seconds = 500 * 1.1 * SLOWEST_LAUNCH
    known = step(tiny).calibrate(seconds)
    assert known.calibration is not None
    assert "the measured step waited for something else, too" in known.notes[-1]
    assert not step(tiny).calibrate(0.9 * 500 * SLOWEST_LAUNCH).notes
    for more in (1, 1.01, 2, 4):
        larger = step(dataclasses.replace(tiny, flops=1e6 * more), calibration=known.calibration)
        assert larger.seconds.mid == pytest.approx(seconds)


def test_another_step_of_a_wait_that_neither_kernels_nor_launches_explain_may_wait_as_long_or_in_proportion() -> None:
    """By hand: 1,001 operators of about 20 ms at the datasheet's rates; 80 ms more are slow kernels, or a wait for data."""
    kernels = dataclasses.replace(ADD, bytes=2e-2 * 3.35e12 * SHARES["memory"].mid / 1000, calls=1000)
    twice = dataclasses.replace(kernels, bytes=2 * kernels.bytes)
    fast, usual = step(kernels).seconds, step(twice).seconds
    host = step(twice, calibration=step(kernels).calibrate(1000 * SLOWEST_LAUNCH).calibration, title="twice").seconds
    known = step(kernels).calibrate(0.101)
    larger = checked_calibration(step(twice, samples=32, title="twice"), known.calibration)
    assert known.seconds.high < 1.1 * 0.101  # it is the very step
    assert larger.seconds.mid == pytest.approx(0.101 * usual.mid / fast.mid)
    assert larger.seconds.low < usual.mid + 0.101 - fast.mid < host.high  # 1 ms more does not change what is told altogether
    smaller = checked_calibration(step(dataclasses.replace(kernels, bytes=kernels.bytes / 2), title="half"), known.calibration).seconds
    assert smaller.low < 0.5 * 0.101 < 0.09 < smaller.high
    assert "waited for something else, too, such as data, or its kernels" in known.notes[-1]
    assert larger.notes == known.notes
    assert not step(kernels).calibrate(0.02).notes


def test_seconds_that_no_step_can_take_are_refused() -> None:
    """280 kernels that move 154 MB, in 10 µs or in eleven days."""
    bare = step(dataclasses.replace(ADD, bytes=154e6 / 280, calls=280), dataclasses.replace(MM, flops=1e6, bytes=0, calls=1))
    low, high = bare.possible
    assert low == pytest.approx(281 * SHORTEST)
    assert bare.calibrate(1.01 * low).seconds.mid == pytest.approx(1.01 * low)
    assert bare.calibrate(0.99 * high).seconds.mid == pytest.approx(0.99 * high)
    with pytest.raises(EstimateTimeError, match=r"10\.0 µs: a step of gpt on H100-SXM may take 281 µs … .*its 281 operators.*synchronize"):
        bare.calibrate(1e-5)
    with pytest.raises(EstimateTimeError, match=r"Is it seconds, not milliseconds; one step, not an epoch"):
        bare.calibrate(1e6)
    moved = step(ADD, dataclasses.replace(MM, flops=1e6))
    assert moved.possible[0] == pytest.approx((40 * 1e9 + 30 * 1e8) / (CACHED * H100.bandwidth))
    assert dataclasses.replace(moved, compiled=True).possible[0] == 0
    here = dataclasses.replace(bare, device=CPU)
    assert here.calibrate(0.1).seconds.mid == pytest.approx(0.1)
    with pytest.raises(EstimateTimeError, match="may take"):
        here.calibrate(1e6)


def test_a_pipeline_idles_as_its_bubble_says_and_not_in_the_update() -> None:
    """By hand: of (p - 1) / m over the time of forward and backward."""
    plain, found = step(), step(bubble=3 / 8)
    passes = plain.parts["products"] + plain.parts["memory"]
    assert found.parts["pipeline idle"] == pytest.approx(3 / 8 * passes)
    assert found.seconds.mid == pytest.approx(sum(plain.parts.values()) + 3 / 8 * passes) == pytest.approx(sum(found.parts.values()))
    assert found.seconds.low < found.seconds.mid < found.seconds.high
    assert "pipeline idle" not in plain.parts
    known = found.calibrate(1.3 * found.seconds.mid)
    assert known.seconds.mid == pytest.approx(1.3 * found.seconds.mid)
    assert known.parts["pipeline idle"] == pytest.approx(1.3 * found.parts["pipeline idle"])
    assert known.calibration is not None
    more = checked_calibration(step(bubble=3 / 16), known.calibration)  # of twice as many micro-batches: less of the step is idle
    assert more.seconds.mid < known.seconds.mid
    sent = dataclasses.replace(trafficked(bubble=0.5), calibration=None).with_exposed()
    assert sent.calibrate(3.0).seconds.mid == pytest.approx(3.0)


@given(st.floats(1e9, 1e16), st.floats(1e3, 1e12), st.integers(1, 500))
def test_ends_enclose_the_middle_whatever_the_sizes(flops: float, moved: float, calls: int) -> None:
    found = step(dataclasses.replace(MM, flops=flops, bytes=moved, calls=calls), ADD)
    assert 0 < found.seconds.low <= found.seconds.mid <= found.seconds.high
    assert sum(found.mix.values()) == pytest.approx(1)
    assert found.mfu.high <= SHARES["products"].high + 1e-9


def test_a_measured_step_sets_the_level_and_narrows_the_interval() -> None:
    bare = step()
    known = bare.calibrate(1.2 * bare.seconds.mid)
    assert known.seconds.mid == pytest.approx(1.2 * bare.seconds.mid)
    assert known.seconds.high == pytest.approx(known.seconds.mid * (1 + SAME))
    assert known.calibration is not None
    other = checked_calibration(step(title="longer", operators=(MM, MM, ADD, ADD, ADAM)), known.calibration)
    assert other.seconds.mid == pytest.approx(1.2 * step(MM, MM, ADD, ADD, ADAM).seconds.mid)
    away = distance(other.mix, bare.mix)
    assert other.seconds.high / other.seconds.mid == pytest.approx(1 + OTHER + away)
    assert "calibrated on gpt" in str(other)
    with pytest.raises(EstimateTimeError, match=r"is of H100-SXM, and the step is for A100-80GB: measure one step there"):
        checked_calibration(step(device=Device.named("A100-80GB")), known.calibration)
    far = step(dataclasses.replace(ADD, calls=1e5), title="sums")
    assert distance(far.mix, bare.mix) > FARTHEST
    with pytest.raises(EstimateTimeError, match=r"other kinds of operators than gpt.*Measure one step of a program like it on H100-SXM"):
        checked_calibration(far, known.calibration)


def test_a_step_at_the_pace_of_the_host_says_nothing_of_the_kernels() -> None:
    small = step(dataclasses.replace(MM, flops=1e6, calls=1), dataclasses.replace(ADD, bytes=1e3, calls=1000), title="small")
    for seconds in (0.5 * small.seconds.mid, 2 * small.seconds.mid, 10 * small.seconds.mid):
        known = small.calibrate(seconds)
        assert known.seconds.mid == pytest.approx(seconds)
        assert known.calibration is not None
        assert known.calibration.factor <= 1
    large = step(title="large")
    assert dataclasses.replace(large, calibration=known.calibration).computing() == large.computing()
    assert dataclasses.replace(large, calibration=known.calibration).seconds.high >= large.seconds.high


def test_a_program_of_the_same_name_and_other_work_is_another_one() -> None:
    known = step().calibrate(2.0)
    longer = dataclasses.replace(known, operators=tuple(dataclasses.replace(one, calls=2 * one.calls) for one in known.operators))
    assert longer.seconds.high / longer.seconds.mid == pytest.approx(1 + OTHER)


@given(st.floats(0.01, 0.99), st.integers(1, 5000))
def test_a_calibrated_step_takes_what_was_measured(part: float, calls: int) -> None:
    found = step(dataclasses.replace(MM, flops=1e6, calls=1), dataclasses.replace(ADD, bytes=1e3, calls=calls))
    low, high = found.possible
    seconds = low ** (1 - part) * high**part
    assert found.calibrate(seconds).seconds.mid == pytest.approx(seconds)


def test_the_level_of_a_compiled_step_is_not_that_of_an_eager_one() -> None:
    eager, compiled = step(), step(compiled=True, title="compiled gpt")
    known = eager.calibrate(2.0).calibration, compiled.calibrate(1.0).calibration
    assert all(known)
    with pytest.raises(EstimateTimeError, match=r"calibration= is of an eager step, and compiled gpt is compiled.*Measure a compiled step"):
        checked_calibration(compiled, known[0])  # type: ignore[arg-type]
    with pytest.raises(
        EstimateTimeError, match=r"calibration= is of a compiled step, and gpt is eager.*compile='none'|Measure an eager step"
    ):
        checked_calibration(eager, known[1])  # type: ignore[arg-type]
    run = SimpleNamespace(timelines=[SimpleNamespace(median=lambda: 2.0)], spec=wb.RunSpec(task="text-gpt", compile="model"))
    with pytest.raises(EstimateTimeError, match=r"measured= is of a compiled step, and gpt is eager"):
        eager.calibrate(run)
    assert compiled.calibrate(run).seconds.mid == pytest.approx(2.0)


def trafficked(**changes: Any) -> StepTime:
    """With two gradients of 40 GB among 8 ranks, which take a third of a second."""
    call = CollectiveCall(kind="all_reduce", size=40 * 10**9, ranks=8, phase="backward")
    sent = Traffic(calls=(call, call), world_size=8, parameters=10**10, title="gpt").on("DGX-H100")
    return step(traffic=sent, links=Interval(low=0.7, mid=0.85, high=1.0), **changes).with_exposed()


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_a_slower_device_hides_more(times: float) -> None:
    """What is exposed follows from the measured pace, and the parts still add up to what was measured."""
    bare = trafficked()
    assert 0 < bare.exposed.low <= bare.exposed.mid <= bare.exposed.high
    known = bare.calibrate(times * bare.seconds.mid)
    assert known.seconds.mid == pytest.approx(times * bare.seconds.mid, rel=1e-6)
    assert sum(known.parts.values()) == pytest.approx(known.seconds.mid)
    if times > 1:
        assert known.exposed.mid < bare.exposed.mid
    elif times < 1:
        assert known.exposed.mid > bare.exposed.mid
    computing = sum(known.computing().values()) + known.gaps()
    assert known.exposed.mid == pytest.approx(known.hidden_behind("mid", computing), rel=1e-6, abs=1e-9)
    assert known.calibration is not None
    other = checked_calibration(trafficked(title="other"), known.calibration)
    assert other.exposed.mid == pytest.approx(known.exposed.mid, rel=1e-6, abs=1e-9)
    with pytest.raises(EstimateTimeError, match=r"the communication alone is predicted to take"):
        bare.calibrate(0.31)


def test_parameters_that_are_averaged_now_and_then_wait_for_the_link_as_often() -> None:
    each = CollectiveCall(kind="all_reduce", size=8 * 10**6, ranks=8, phase="optimizer")
    eighth = dataclasses.replace(each, size=10**6, every=8)
    where = Cluster.named("DGX-H100")
    assert eighth.seconds(where) == pytest.approx(each.seconds(where) / 8)
    assert eighth.seconds(where) < dataclasses.replace(each, size=10**6).seconds(where)  # which pays the latency in each step
    assert (8 * eighth.sent, CollectiveCall.from_json(eighth.to_json())) == (each.sent, eighth)


def traced(seconds: float, device: bool = True, **kinds: float) -> Any:
    """A trace of two steps, with so many seconds of some operators in each."""
    names = {"products": "aten::mm", "memory": "aten::add_", "attention": "aten::_scaled_dot_product_flash_attention"}
    rows = [SimpleNamespace(name=names[kind], device_seconds=2 * own * device, self_seconds=2 * own) for kind, own in kinds.items()]
    rows += [SimpleNamespace(name=name, device_seconds=9.0 * device, self_seconds=9.0) for name in ("c10d::allreduce_", "Optimizer.step#A")]
    nothing: Any = None
    return SimpleNamespace(windows=(), seconds=2 * seconds, steps=(1, 2), columns=rows, kinds=nothing, host_steps=nothing)


@pytest.fixture
def _rows_of_made_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "ops", lambda columns, *_: SimpleNamespace(rows=columns))


@pytest.mark.usefixtures("_rows_of_made_traces")
def test_a_trace_sets_a_level_for_each_kind() -> None:
    bare = step()
    parts = bare.computing()
    rest = parts["memory"] + parts["update"]
    slow = traced(1.5 * parts["products"] + 3 * rest, products=1.5 * parts["products"], memory=3 * rest)
    known = bare.calibrate(slow)
    assert known.calibration is not None
    assert known.calibration.factors == pytest.approx({"products": 1.5, "memory": 3.0, "update": 3.0})
    assert known.seconds.mid == pytest.approx(slow.seconds / 2)
    wide = step(MM, dataclasses.replace(ADD, calls=4000), title="wide")  # most of it elementwise: too far for one level
    assert distance(wide.mix, bare.mix) > 0.4
    assert checked_calibration(wide, known.calibration).computing()["memory"] == pytest.approx(3 * wide.computing()["memory"])
    assert StepTime.from_json(known.to_json()) == known
    idle = bare.calibrate(traced(2 * sum(parts.values()), products=parts["products"], memory=rest))
    assert idle.parts["launch gaps"] == pytest.approx(sum(parts.values()), rel=1e-6)
    assert idle.calibration is not None
    assert idle.calibration.factors == pytest.approx({"products": 1, "memory": 1, "update": 1})
    at_once = bare.calibrate(traced(0.9 * sum(parts.values()), products=parts["products"], memory=rest))
    assert at_once.seconds.mid == pytest.approx(0.9 * sum(parts.values()))


@pytest.mark.usefixtures("_rows_of_made_traces")
def test_of_several_ranks_the_one_that_computes_longest_sets_the_level() -> None:
    bare = step()
    fast, slow = (traced(2.0, products=factor * 0.5, memory=factor * 0.2) for factor in (1.0, 1.6))
    for several in ({0: fast, 1: slow}, [slow, fast], (fast, slow)):
        assert bare.calibrate(several) == bare.calibrate(slow) != bare.calibrate(fast)
    for wrong, words in (
        ({0: fast, 3: 1.5}, r"measured=\{3: 1.5\} is not a Trace\. For several ranks give one trace each"),
        ([fast, "slow"], r"measured=\{1: 'slow'\} is not a Trace"),
        ({}, "measured= has no traces"),
    ):
        with pytest.raises(EstimateTimeError, match=words):
            bare.calibrate(wrong)


@pytest.mark.usefixtures("_rows_of_made_traces")
def test_a_trace_that_does_not_tell_kinds_apart_sets_one_level() -> None:
    bare = step()
    known = bare.calibrate(traced(2.0, products=1.0))
    assert known.calibration is not None
    assert known.calibration.factors == {}
    assert known.seconds.mid == pytest.approx(2.0)
    here = dataclasses.replace(bare, device=CPU)
    host = here.calibrate(traced(2e4, device=False, products=0.9e4, memory=0.3e4))
    assert host.seconds.mid == pytest.approx(2e4)
    assert host.computing()["products"] == pytest.approx(1.5e4)


def test_more_than_the_peak_is_refused_with_the_reason() -> None:
    with pytest.raises(EstimateTimeError, match=r"would be 303 % of the dense peak of H100-SXM.*synchronize"):
        step().calibrate(0.1)
    for wrong in (0, -1.0, math.inf, "fast", True, None):
        with pytest.raises(EstimateTimeError, match=r"expected seconds of a step above 0, a Run, or a Trace"):
            measured_seconds(wrong)


def test_it_shows_itself_and_comes_back_from_json() -> None:
    found = step(notes=("does not fit",)).calibrate(1.0)
    assert StepTime.from_json(found.to_json()) == found
    for words in ("matrix products", "launch gaps", "does not fit", "of the peak", "predicted"):
        assert words in str(found)
    assert "<table>" in found._repr_html_()
    frame = found.to_frame()
    assert frame["seconds"].sum() == pytest.approx(sum(found.computing().values()))
    assert repr(found) == "StepTime('gpt' on 1 × H100-SXM: 1.00 s)"
    assert found.plot().get_xlabel() == "predicted time of a step (ms)"


def gpt() -> Any:
    from torch import nn

    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 1000))


def batch(samples: int = 4) -> Any:
    tokens = torch.zeros(samples, 64, dtype=torch.long)
    return tokens, tokens


def loss(model: Any, given: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(given[0]).flatten(0, 1), given[1].flatten())


def test_operators_are_those_of_the_step_and_what_cannot_be_known_is_refused() -> None:
    options: dict[str, Any] = {"loss": loss, "precision": "amp_bf16"}
    found = wb.estimate_time(gpt, batch(), device="H100", optimizer="adamw(fused=True)", **options)
    tokens, layers = 4 * 64, 2 * (4 * 128**2 + 2 * 128 * 512)
    by_hand = 6 * tokens * (layers + 128 * 1000) + 12 * 2 * tokens * 64 * 128
    assert found.flops == pytest.approx(by_hand, rel=0.1)
    fused = [one for one in found.operators if "fused_adam" in one.name]
    assert {one.phase for one in fused} == {"update"}
    assert {one.phase for one in found.operators} == {"forward", "backward", "update"}
    assert found.seconds.mid >= sum(one.calls for one in found.operators) * LAUNCH.mid * 0.999  # it is tiny: the host sets the pace
    twice = wb.estimate_time(gpt, batch(8), device="H100", optimizer="adamw(fused=True)", **options)
    assert twice.flops == pytest.approx(2 * found.flops)
    for changes, words in (
        ({"device": "cuda"}, r"is any GPU.*give a name"),
        ({"device": "cpu"}, r"CPUs have no datasheet.*measured="),
        ({"compile": "model"}, r"Measure one compiled step on H100-SXM"),
        ({"device": "H10"}, r"device='H10': unknown device.*did you mean|device='H10': unknown device.*H100"),
        ({"device": "V100"}, r"datasheet of V100-32GB has fp16, fp32 only"),
        ({"measured": 1.0, "calibration": found.calibrate(found.seconds.mid).calibration}, r"give one of them"),
        ({"world_size": 2}, r"2 ranks exchange messages.*give cluster="),
        ({"world_size": 2, "cluster": "DGX-A100"}, r"device= is H100-SXM, and the nodes of cluster=DGX-A100 have A100.*name the cluster"),
    ):
        with pytest.raises(EstimateTimeError, match=words):
            wb.estimate_time(gpt, batch(), **{"device": "H100", **options, **changes})
    many = wb.estimate_time(gpt, batch(), device="H100", cluster="DGX-H100", world_size=8, parallel="ddp", **options)
    assert many.samples == 8 * found.samples
    assert many.exposed.low <= many.exposed.mid <= many.exposed.high
    assert many.exposed.high > 0


def test_the_slowest_stage_of_a_pipeline_sets_the_pace() -> None:
    """Of two stages the second has the head, and so more than half of the work."""
    known: dict[str, Any] = {"task": "text-gpt", "micro_batch": 2, "accumulation": 4}
    whole = wb.estimate_time(wb.RunSpec(**known), device="H100")
    spec = wb.RunSpec(**known, nproc_per_node=2, pipeline_parallel=2)
    found = wb.estimate_time(spec, device="H100", cluster="DGX-H100")
    assert 0.5 < found.flops / whole.flops < 0.75
    assert found.bubble == 1 / 4
    assert found.parts["pipeline idle"] == pytest.approx(found.idle())
    assert found.samples == whole.samples
    rank = wb.estimate_time(spec, device="H100", cluster="DGX-H100", rank=0)
    assert rank.flops <= found.flops
    assert wb.estimate_time(spec, device="H100", cluster="DGX-H100", pipeline_schedule="zero_bubble").bubble == 0


def test_a_causal_mask_halves_what_fused_kernels_compute_and_not_what_single_products_do() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(torch.nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal, self.weight = causal, torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            heads = self.weight(x).view(2, 64, 4, 4).transpose(1, 2).repeat(1, 1, 1, 2)
            return scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal)

    def counted(causal: bool) -> float:
        options: dict[str, Any] = {"loss": lambda model, x: model(x).sum(), "precision": "amp_bf16"}
        found = wb.estimate_time(lambda: Attention(causal), torch.zeros(2, 64, 16), device="A100-80GB", **options)
        products = [one for one in found.operators if one.flops and "attention" in one.name]
        return sum(one.flops * one.calls for one in products or [one for one in found.operators if "bmm" in one.name])

    whole = 7 * 2 * (2 * 4) * 64 * 64 * 8  # two products forward and five backward
    assert counted(False) == whole
    assert counted(True) == pytest.approx(whole * 65 / 128)
    with sdpa_kernel(SDPBackend.MATH):
        assert counted(True) == counted(False) == pytest.approx(whole * 6 / 7)  # nothing is made again


def test_products_in_16_bits_reach_at_most_what_a_search_over_shapes_reached_on_the_gpu() -> None:
    high = SHARES["products"].high
    assert all(Device.known(name) and 0.7 < best < 0.9 for name, best in BEST_PRODUCT.items())
    for name, reached in (("H100-SXM", 0.803), ("A100-80GB", 0.869), ("L40", high)):
        device = Device.named(name)
        assert MM.flops * MM.calls / MM.seconds(device, high) == pytest.approx(reached * device.flops_per_sec["bf16"])
    wide = dataclasses.replace(MM, dtype="fp32")
    assert wide.flops * wide.calls / wide.seconds(H100, high) == pytest.approx(high * 66.9e12)


def test_products_whose_rows_do_not_start_at_16_bytes_are_as_slow_as_their_loads_and_it_says_what_padding_saves() -> None:
    """By hand: an H100 and a GPU of capability 6.1 issue half as many instructions as their FP32 peak has FLOP/s, an A100 as many."""
    odd = dataclasses.replace(MM, stride=50_257)
    assert odd.seconds(H100, SHARES["products"].mid) == pytest.approx(30 * 1e13 / (UNALIGNED * 66.9e12 / 2))
    assert odd.seconds(Device.named("A100-40GB"), SHARES["products"].mid) == pytest.approx(30 * 1e13 / (UNALIGNED * 19.5e12))
    pascal = dataclasses.replace(H100, capability=(6, 1))
    assert odd.seconds(pascal, SHARES["products"].mid) == odd.seconds(H100, SHARES["products"].mid)
    even = dataclasses.replace(MM, stride=50_258)  # loads have two elements
    assert even.seconds(H100, 0.65) == pytest.approx(odd.seconds(H100, 0.65) / 2)
    assert odd.seconds(CPU, 0.65) == MM.seconds(CPU, 0.65)
    found = step(odd, ADD, ADAM)
    saved = units.seconds(found.seconds.mid - step().seconds.mid)
    words = (
        "30 matrix products have a side that is not a multiple of 8 (such as 50,257), but tensor cores need multiples of 8 to run fast: "
    )
    words += f"padded to 50,304.* about {saved} less"
    assert re.search(words.replace("(", r"\(").replace(")", r"\)"), str(found))
    assert "padded" not in str(step())
    assert step(MM, dataclasses.replace(odd, calls=1e-3)).alignment is None  # not worth it
    assert StepTime.from_json(found.to_json()) == found


@pytest.mark.parametrize(("columns", "odd"), [(333, 333), (336, 0)])
def test_each_product_of_a_layer_with_an_odd_side_is_slow(columns: int, odd: int) -> None:
    """Its result forward, and the result's gradient in both products of the backward."""

    def total(model: Any, x: Any) -> Any:
        return model(x).sum()

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, columns))

    found = wb.estimate_time(model, torch.zeros(32, 64), device="H100", loss=total, precision="amp_bf16")
    assert sorted(one.stride for one in found.operators for _ in range(int(one.calls)) if one.flops) == [0, 0] + 3 * [odd]
    single = wb.estimate_time(model, torch.zeros(32, 64), device="H100", loss=total)
    assert not any(one.stride for one in single.operators)  # only products in 16 bits are judged, not those of TF32
    assert not any("zeros_like" in one.name for one in found.operators if one.phase == "update")  # in the first step only


def test_what_each_step_makes_without_gradients_counts_and_what_the_optimizer_makes_once_does_not() -> None:
    def total(model: Any, x: Any) -> Any:
        return model(x).sum() + torch.no_grad()(torch.zeros_like)(model.weight).sum()

    found = wb.estimate_time(lambda: torch.nn.Linear(64, 64, bias=False), torch.zeros(32, 64), device="H100", loss=total)
    made = [one for one in found.operators if one.name == "aten.zeros_like" and one.phase == "forward"]
    assert [(one.calls, one.bytes) for one in made] == [(1, 4 * 64 * 64)]


def test_bytes_of_operators_that_only_write_or_touch_a_part() -> None:
    """In tensors of 4 MiB: a part of 1/64, and its indices of 8 bytes for rows of 4 KiB."""

    def moved(run: Any) -> dict[str, float]:
        with Roofline(H100) as floor, torch.no_grad():
            run()
        return {call.name.partition(".")[2]: call.bytes / 2**22 for call in floor.calls if call.bytes}

    x, y, rows, part = torch.rand(1024, 1024), torch.rand(1024, 1024), torch.arange(16), torch.rand(16, 1024)
    for fill in ("bernoulli_", "uniform_", "normal_", "exponential_"):
        assert moved(getattr(x.clone(), fill)) == {fill: 1}
    assert moved(lambda: torch._foreach_zero_([x, y])) == {"_foreach_zero_": 2}
    assert moved(lambda: torch._foreach_copy_([x, y], [y, x])) == {"_foreach_copy_": 4}
    index, wide = 128 / 2**22, torch.zeros(16, 1024, dtype=torch.long)
    assert moved(lambda: x.index_put_((rows,), part)) == {"index_put_": 2 / 64 + index}
    assert moved(lambda: x.index_put_((rows,), part, True)) == {"index_put_": 3 / 64 + index}
    assert moved(lambda: x.index_add_(0, rows, part)) == {"index_add_": 3 / 64 + index}
    assert moved(lambda: x.scatter_(0, wide, part)) == {"scatter_": 4 / 64}
    assert moved(lambda: x.scatter_add(0, wide, part)) == {"scatter_add": 2 + 5 / 64}
    tall, across = torch.rand(65536, 16), torch.rand(16, 65536)
    assert moved(lambda: tall.log_softmax(0)) == moved(lambda: across.log_softmax(1)) == {"_log_softmax": 4}
    assert moved(lambda: tall.log_softmax(1)) == moved(lambda: across.log_softmax(0)) == {"_log_softmax": 2}
    images, norm = torch.rand(4, 16, 128, 128), torch.nn.BatchNorm2d(16)
    assert round(max(moved(lambda: norm(images)).values()), 2) == 3
    assert round(max(moved(lambda: norm.eval()(images)).values()), 2) == 2


def test_bytes_are_those_of_each_kernel_that_an_operator_runs() -> None:
    """In tensors of 4 MiB, by torch's CUDA sources."""
    x, mask, weight = torch.rand(1024, 1024, requires_grad=True), torch.ones(1024, dtype=torch.bool), torch.ones(1024, requires_grad=True)
    long, lists = torch.rand(16, 65536), [torch.rand(1024, 1024), torch.rand(1024, 1024)]
    targets = torch.zeros(16, dtype=torch.long)
    with Roofline(H100) as floor:
        torch.empty(1024, 1024)
        lists[0].max().item()
        x.softmax(-1).backward(lists[1])
        x.masked_fill(mask, 0.0)
        torch.nn.functional.layer_norm(x, (1024,), weight).backward(lists[1])
        torch.nn.functional.nll_loss(long.log_softmax(-1), targets)
        with torch.no_grad():
            torch._foreach_add_(lists[:1], lists[1:])
            lists[0].to(torch.bfloat16).float()
            lists[0].t().clone(memory_format=torch.contiguous_format)
    moved = {call.name.partition(".")[2]: (round(call.bytes / 2**22, 2), call.elements / 2**20) for call in floor.calls}
    expected = {"empty": (0, 0), "_local_scalar_dense": (0, 0), "_softmax": (2, 0), "_softmax_backward_data": (6, 0)}
    expected |= {"masked_fill": (4, 1), "native_layer_norm_backward": (5, 0), "_log_softmax": (4, 0), "nll_loss_forward": (0, 0)}
    expected |= {"_foreach_add_": (3, 0), "clone": (2, 1)}
    assert {name: moved[name] for name in expected} == expected
    copies = [call.elements for call in floor.calls if call.name == "aten._to_copy"]
    assert copies == [0, 2**20]  # to 16 bits there is a kernel that moves 16 bytes at a time


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Any]:
    return partial(_recorded, tmp_path)


def _recorded(path: Path, device: str = "cpu", seconds: float = 0.02, samples: int | None = None, **knobs: Any) -> Any:
    """A run of a spec whose steps took so long on a device."""
    spec = wb.RunSpec(**{"task": "text-gpt", "micro_batch": 4, "device": "auto", **knobs})
    steps = [SimpleNamespace(samples=samples or spec.micro_batch * spec.accumulation)]
    path = path / str(len(list(path.iterdir())))
    path.mkdir()
    (path / "rank0.jsonl").write_text(json.dumps({"rank": 0, "device": device}) + "\n")
    return SimpleNamespace(spec=spec, path=path, timelines=[SimpleNamespace(median=lambda: seconds, steps=steps)])


def test_a_run_of_something_else_is_refused_with_the_difference(recorded: Callable[..., Any]) -> None:
    script = recorded()
    script.spec = ScriptSpec(script="train.py")
    spec = wb.RunSpec(task="text-gpt", micro_batch=4)
    for run, device, words in (
        (recorded(), "H100", r"is a run on cpu, and the step is for H100-SXM: measure it there"),
        (recorded("NVIDIA A100-SXM4-80GB"), "H100", r"is a run on NVIDIA A100-SXM4-80GB, and the step is for H100-SXM"),
        (recorded("NVIDIA H100 80GB HBM3"), "cpu", r"is a run on NVIDIA H100 80GB HBM3, and the step is for cpu"),
        (recorded(task="clipart-resnet"), "cpu", r"is a run of clipart-resnet, and the step is of text-gpt"),
        (recorded(threads=2), "cpu", r"is a run with threads=2, and the step has threads=1"),
        (script, "cpu", r"is a run of train\.py, and the step"),
    ):
        with pytest.raises(EstimateTimeError, match=words):
            wb.estimate_time(spec, device=device, measured=run)
    trace = SimpleNamespace(windows=(), devices=("NVIDIA A100-SXM4-80GB",), seconds=1.0, steps=())
    with pytest.raises(EstimateTimeError, match=r"is a trace on NVIDIA A100-SXM4-80GB, and the step is for H100-SXM"):
        wb.estimate_time(spec, device="H100", measured=trace)
    of_cpu = SimpleNamespace(windows=(), devices=(), seconds=0.06, steps=(), kinds=SimpleNamespace(device=False))
    for traces in (of_cpu, [of_cpu], {0: of_cpu}):
        with pytest.raises(EstimateTimeError, match=r"measured= is a trace on cpu, and the step is for H100-SXM: measure it there"):
            wb.estimate_time(spec, device="H100", measured=traces)
    with pytest.raises(EstimateTimeError, match=r"is of a compiled step"):
        wb.estimate_time(spec, device="cpu", measured=recorded(compile="model"))
    with pytest.raises(EstimateTimeError, match=r"train\.py with 4 samples in a step of a rank, and the step has 3"):
        wb.estimate_time(gpt, batch(3), loss=loss, device="cpu", measured=script)
    assert wb.estimate_time(gpt, batch(4), loss=loss, device="cpu", measured=script).seconds.mid == pytest.approx(0.02)


def test_a_calibration_that_is_none_is_refused_in_a_line() -> None:
    spec = wb.RunSpec(task="text-gpt", micro_batch=4)
    known = wb.estimate_time(spec, device="cpu", measured=0.02)
    for wrong, words in (
        (known, r"calibration= is an estimate itself: give its \.calibration"),
        (dataclasses.replace(known, calibration=None), r"give that of one with measured=, since this one has none"),
        (0.02, r"calibration=0\.02: expected the \.calibration of an estimate with measured="),
    ):
        with pytest.raises(EstimateTimeError, match=rf"{words}$"):
            wb.estimate_time(spec, device="cpu", calibration=wrong)  # type: ignore[arg-type]


def test_a_run_of_another_batch_sets_the_level_as_a_calibration_does_and_a_note_says_so(recorded: Callable[..., Any]) -> None:
    spec = wb.RunSpec(task="text-gpt", micro_batch=2)
    own = wb.estimate_time(spec, device="cpu", measured=recorded(micro_batch=2, num_workers=2, steps=5))
    assert own.seconds.high == pytest.approx(own.seconds.mid * (1 + SAME))
    assert not own.notes
    other = wb.estimate_time(spec, device="cpu", measured=recorded(seconds=0.04))
    known = wb.estimate_time(spec.replace(micro_batch=4), device="cpu", measured=0.04).calibration
    assert other.seconds == wb.estimate_time(spec, device="cpu", calibration=known).seconds
    assert other.seconds.high > other.seconds.mid * (1 + OTHER)
    assert "a run with micro_batch=4 (here 2)" in other.notes[-1]
    chosen = wb.estimate_time(spec, device="cpu", measured=recorded(seconds=0.04, micro_batch="auto", samples=4))
    assert chosen.seconds == other.seconds


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("forked_ranks")
def test_a_cpu_step_follows_from_another_that_was_measured(tmp_path: Path) -> None:
    """Twice the batch and another length, from one run of the sample GPT on this machine."""
    spec = wb.RunSpec(task="text-gpt", micro_batch=8, steps=12, nproc_per_node=1)

    def run(of: wb.RunSpec) -> wb.Run:
        return wb.launch(of, runs_dir=tmp_path).wait()

    first = run(spec)
    known = wb.estimate_time(spec, device="cpu", measured=first)
    assert known.seconds.mid == pytest.approx(first.timelines[0].median())
    assert known.device == CPU
    other = spec.replace(micro_batch=32)
    said, took = wb.estimate_time(other, device="cpu", calibration=known.calibration).seconds, run(other).timelines[0].median()
    assert 0.5 < said.mid / took < 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_operators_of_the_loss_without_gradients_are_of_the_forward(accumulation: int) -> None:
    """42,465 calls of a detector's suppression of boxes, in its loss, stood in the row of the optimizer's update."""

    def sorting(model: Any, given: Any) -> Any:
        out = model(given[0])
        with torch.no_grad():
            for scores in out:
                scores.argsort()
        return out.sum()

    options: dict[str, Any] = {"loss": sorting, "optimizer": "adamw", "accumulation": accumulation, "clip_grad_norm": 1.0}
    found = wb.estimate_time(lambda: torch.nn.Linear(8, 64), (torch.zeros(4, 8),), device="H100", **options)
    assert {one.phase for one in found.operators if "sort" in one.name} == {"forward"}
    assert {one.phase for one in found.operators if "foreach" in one.name} == {"update"}
    assert {one.phase for one in found.operators if one.name == "aten.addmm"} == {"forward"}


class Lookahead(torch.optim.SGD):
    """Steps an optimizer of its own, and then draws slow weights after the fast ones (Zhang et al. 2019)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]
        self.inner = torch.optim.SGD([each for group in self.param_groups for each in group["params"]], lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for slow, fast in zip(self.slow, self.inner.param_groups[0]["params"], strict=True):
            slow.lerp_(fast, 0.5)


def test_what_an_optimizer_does_after_the_step_of_another_is_of_the_update() -> None:
    """The inner step ended the outer one, whose own operators were counted as part of the forward."""
    model = torch.nn.Linear(8, 8)
    optimizer = Lookahead(model.parameters())
    with Roofline(H100) as floor:
        for _ in range(2):
            model(torch.zeros(4, 8)).sum().backward()
            optimizer.step()
    assert {call.phase for call in floor.calls if call.name == "aten.lerp_"} == {"update"}
    assert {call.phase for call in floor.calls if call.name == "aten.addmm"} == {"forward"}
