"""Plans of a named trainer: what its versions wait for, ranges that hold all of them, and a measured step that says which it was."""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cluster.test_plans import BEST, GPT, LARGE, build, one, workload
from workbench.__main__ import main
from workbench.cluster.analysis.plan.ranges import EFFICIENCY, LAUNCH, MESSAGE, OTHER_LAYOUT, PlanError
from workbench.cluster.analysis.plan.timing import BUCKET, CHECK_MESSAGES, seconds
from workbench.cluster.analysis.plan.workload import TRAINERS, Version
from workbench.core.statistics import Interval

QUICK = dataclasses.replace(BEST, flops_per_sec=1e30)
EACH = CHECK_MESSAGES * MESSAGE.mid
NANOTRON = TRAINERS["nanotron"]
UNWAITING: dict[str, Any] = {"poll_interval": 0, "checked_collectives": False}


def slower(layout: Any, rates: Any = BEST, model: Any = GPT, **waits: Any) -> float:
    """Seconds that waiting costs."""
    without = workload(model)
    return float((seconds(dataclasses.replace(without, **waits), layout, rates, 8).total - seconds(without, layout, rates, 8).total)[0])


def plans(**changes: Any) -> Any:
    options: dict[str, Any] = {"cluster": "DGX-H100", "gpus": 16, "global_batch": 64, "chunks": 1, "checkpointing": "none"}
    return wb.plan(**{"model": GPT, "sharing": ["ddp", "zero1"], **options, **changes})


# --- waits


def test_every_checked_collective_of_split_layers_takes_messages_to_all_their_ranks() -> None:
    layout = one(16, tensor=8, pipeline=2, micro=2, batch=16)
    calls = 12 * 10 * (8 + 1)  # layers of a stage, 4 forward and 6 backward with gathered inputs, micro-batches and one that fills
    assert slower(layout, checked=True) == pytest.approx(EACH * (calls * 7 + 15))  # one rank holds all data; the norm is of 16 ranks
    whole = dataclasses.replace(workload(sequence_parallel=False), checked=True)
    assert whole.collectives == {"none": 4, "full": 6}
    assert workload().collectives == {"none": 10, "full": 14}


@pytest.mark.parametrize(
    ("sharing", "calls"),
    [("ddp", "buckets"), ("zero1", "twice"), ("zero2", "every micro-batch"), ("fsdp", "layers")],
)
def test_copies_check_each_bucket_or_layer(sharing: str, calls: str) -> None:
    buckets = 2 * GPT.parameters / BUCKET
    count = {"buckets": buckets, "twice": 2 * buckets, "every micro-batch": 5 * buckets, "layers": 3 * 4 * 24}[calls]
    cost = slower(one(16, micro=1, batch=64, sharing=sharing), checked=True)
    assert cost == pytest.approx(EACH * (15 * (count + 1) + 15))  # and the loss, and the norm


def test_a_hybrid_checks_within_and_between_nodes_and_torch_s_zero1_each_tensor() -> None:
    assert slower(one(16, batch=64, sharing="hsdp"), checked=True) == pytest.approx(EACH * (3 * 4 * 24 * 7 + 24 + 15 + 15))
    torchs = dataclasses.replace(workload(), broadcasts=300)
    layout = one(16, batch=64, sharing="zero1")
    cost = seconds(dataclasses.replace(torchs, checked=True), layout, BEST, 8).total - seconds(torchs, layout, BEST, 8).total
    assert cost[0] == pytest.approx(EACH * (15 * (2 * GPT.parameters / BUCKET + 300 + 1) + 15))


def test_a_trainer_that_is_checked_between_nodes_only() -> None:
    near, far = one(8, tensor=8, batch=8), one(16, tensor=8, batch=16)
    assert slower(near, checked=True) > 0
    assert slower(near, checked=True, checked_in_node=False) == 0
    assert slower(far, checked=True, checked_in_node=False) == slower(far, checked=True) > 0


@pytest.mark.parametrize(("stages", "sleeps"), [(2, 6), (3, 12), (4, 12), (8, 12)])
def test_every_stage_sleeps_for_each_message_of_its_boundaries(stages: int, sleeps: int) -> None:
    model = dataclasses.replace(GPT, tied=False)
    layout = one(stages, pipeline=stages, batch=64)
    filling = 6 * max(0, stages - 3)
    assert slower(layout, QUICK, model, poll=0.1, polled=6) == pytest.approx(0.1 * (64 * sleeps + filling), rel=0.01)
    assert slower(one(8, batch=64), QUICK, poll=0.1, polled=6) == 0  # without a pipeline


def test_what_is_computed_takes_whole_sleeps_and_the_bubble_stays() -> None:
    slow = dataclasses.replace(BEST, flops_per_sec=GPT.flops(1) / 4 / 0.9)  # of a stage 0.3 s forward and 0.6 s back
    model = dataclasses.replace(GPT, tied=False)
    layout = one(4, pipeline=4, batch=16)
    with_polling = slower(layout, slow, model, poll=0.25, polled=2) + float(seconds(workload(model), layout, slow, 8).total[0])
    each = 2 + 3 + 2  # whole sleeps of what it computes, and of two messages more, of which a stage in the middle has four
    assert with_polling == pytest.approx(0.25 * (16 * each + 1 * 5 + 2 * 3), rel=0.02)
    for poll in (0.001, 0.01, 0.1, 1.0):
        for stages in (2, 3, 8):
            assert slower(one(stages, pipeline=stages, batch=16), slow, model, poll=poll) > 0


def test_sleeps_are_fewer_or_more_at_the_ends_of_the_range() -> None:
    layout, model = one(8, pipeline=8, batch=64), dataclasses.replace(GPT, tied=False)
    few, mid, many = (slower(layout, dataclasses.replace(QUICK, late=late), model, poll=0.1, polled=6) for late in (-1, 0, 1))
    assert mid - few == pytest.approx(0.1 * 6 * 5, rel=0.01)
    assert many - mid == pytest.approx(0.1 * 2 * 64, rel=0.01)


# --- plans


def test_without_a_name_and_as_megatron_it_plans_the_same() -> None:
    assert plans().to_frame().equals(plans(trainer="megatron", loss_parallel=False).to_frame())
    assert plans().versions == ("without waits",)
    split, whole = (plans(tensor=8, pipeline=1, top=1, **named).best.bytes for named in ({"trainer": "megatron"}, {}))
    assert split < whole  # its loss is computed on split logits


def test_ranges_hold_all_versions_of_a_trainer_and_the_middle_is_their_geometric_mean() -> None:
    only: dict[str, Any] = {"trainer": "nanotron", "tensor": 2, "pipeline": 4, "sharing": "zero1", "top": 30}
    whole = plans(**only)
    single = [plans(**only, poll_interval=poll, checked_collectives=checked) for poll in (0, 0.1) for checked in (False, True)]
    assert whole.versions == (
        "without waits",
        "checked collectives",
        "polling every 100 ms",
        "polling every 100 ms and checked collectives",
    )
    assert [found.versions for found in single] == [(version,) for version in whole.versions]
    for plan in whole:
        same = [next(other for other in found if (other.layout, other.batch) == (plan.layout, plan.batch)) for found in single]
        assert plan.seconds.low == min(other.seconds.low for other in same) == same[0].seconds.low
        assert plan.seconds.high == max(other.seconds.high for other in same) == same[-1].seconds.high
        assert plan.seconds.mid == pytest.approx(statistics.geometric_mean(other.seconds.mid for other in same))
        assert sum(plan.parts.values()) == pytest.approx(plan.seconds.mid)
    times = [plan.seconds.mid for plan in whole if not plan.tight]
    assert times == sorted(times)
    assert "nanotron: without waits, or checked collectives, or polling every 100 ms, or" in str(whole)
    assert "measured=(plan, seconds)" in str(whole)
    assert "leave TORCH_DISTRIBUTED_DEBUG unset" in str(whole)
    assert "nanotron: " not in str(plans(**only, **UNWAITING))
    assert not single[0].best.broadcasts
    assert whole.best.trainer == "nanotron"


def test_only_what_a_trainer_can_do_is_planned() -> None:
    found = plans(trainer="nanotron", model=LARGE, gpus=64, chunks=None, sharing=None, checkpointing=None, top=40)
    assert {plan.sharing for plan in found} <= {"ddp", "zero1"}
    assert {plan.chunks for plan in found} == {1}
    assert max(plan.chunks for plan in plans(model=LARGE, gpus=64, chunks=None, top=40)) > 1
    with pytest.raises(PlanError, match="fits nowhere") as refused:
        plans(trainer="nanotron", model=LARGE, gpus=8, global_batch=8, sharing="ddp")
    assert "fsdp" not in str(refused.value)


def test_any_trainer_can_be_given_what_it_waits_for() -> None:
    usual = plans(pipeline=2, top=1).best
    polled = plans(pipeline=2, tensor=usual.tensor, top=1, poll_interval=0.05)
    assert polled.versions == ("polling every 50.0 ms",)
    assert polled.best.seconds.mid > usual.seconds.mid
    checked = plans(gpus=8, tensor=8, top=1, checked_collectives=True)
    assert checked.best.seconds.mid > plans(gpus=8, tensor=8, top=1).best.seconds.mid
    named = plans(gpus=8, tensor=8, top=1, trainer="nanotron")  # whose scripts check between nodes only
    assert named.best.seconds.mid == pytest.approx(plans(gpus=8, tensor=8, top=1, trainer="nanotron", **UNWAITING).best.seconds.mid)


def test_zero1_is_the_trainer_s() -> None:
    only: dict[str, Any] = {"sharing": "zero1", "tensor": 1, "pipeline": 1, "top": 1}
    theirs = plans(**only, trainer="nanotron")
    assert "zero1 is nanotron's here" in str(theirs)
    assert "Megatron" not in str(theirs)
    with pytest.raises(PlanError, match=r'zero1 is nanotron.*a RunSpec does not have it.*sharing="zero2"'):
        theirs.changes()
    program = NANOTRON.trains(dataclasses.replace(workload(), broadcasts=300, adding=12.0))
    assert (program.whole_reduction, program.slices, program.broadcasts, program.adding) == (True, 300.0, 0, 12.0)
    counted = NANOTRON.trains(workload())
    assert (counted.slices, counted.adding) == (6 * 24 + 2, 10.0)


def test_one_all_reduce_of_all_gradients_hides_behind_nothing() -> None:
    whole = dataclasses.replace(workload(), whole_reduction=True)
    found = seconds(whole, one(64, micro=1, batch=256, sharing="zero1"), BEST, 8)
    assert found.hidden[0] == pytest.approx(0, abs=1e-12)


def test_a_program_is_planned_with_a_trainer_too() -> None:
    batch = (torch.empty(8, 256, device="meta"), torch.zeros(8, dtype=torch.long, device="meta"))
    options: dict[str, Any] = {"batch": batch, "model": build, "global_batch": 16, "chunks": None, "sharing": "zero1", "top": 1}
    own, theirs, checked = (plans(**options, **changes) for changes in ({}, {"trainer": "nanotron"}, {"checked_collectives": True}))
    assert (own.best.broadcasts, theirs.best.broadcasts) == (True, False)
    assert checked.best.seconds.mid > own.best.seconds.mid
    assert own.best.changes()["parallel"] == "zero1"


# --- a measured step


@pytest.mark.parametrize("poll", [0.0, 0.1])
@pytest.mark.parametrize("checked", [False, True])
def test_a_measured_step_of_a_pipeline_with_split_layers_says_which_version_it_was(poll: float, checked: bool) -> None:
    only: dict[str, Any] = {"trainer": "nanotron", "model": LARGE, "tensor": 8, "pipeline": 4, "gpus": 64, "sharing": "zero1", "top": 30}
    waits: dict[str, Any] = {"poll_interval": poll, "checked_collectives": checked}
    usual = {plan.micro_batch: plan for plan in plans(**only)}[1]
    truth = plans(**only, **waits, efficiency=0.46)
    taken = {plan.micro_batch: plan for plan in truth}[1].seconds.mid
    after = plans(**only, measured=(usual, taken))
    assert set(truth.versions) <= set(after.versions)
    assert len(after.versions) <= 2 - (not checked and not poll)  # sleeps make whether collectives are checked hard to tell
    said = {plan.micro_batch: plan for plan in after}[1].seconds
    assert taken in said
    assert said.high / said.low < 0.5 * usual.seconds.high / usual.seconds.low
    if len(after.versions) == 1:
        assert said.mid == pytest.approx(taken, rel=0.011)


def test_a_step_without_a_pipeline_says_nothing_of_polling() -> None:
    only: dict[str, Any] = {"tensor": 8, "pipeline": 1, "top": 1, "trainer": "nanotron"}
    found = plans(**only).best
    low = plans(**only, **UNWAITING).best.seconds.mid
    after = plans(**only, measured=(found, low))
    assert {"without waits", "polling every 100 ms"} <= set(after.versions)
    assert "measured step implies" in str(after)


def test_without_a_trainer_a_measured_step_sets_the_level_and_leaves_what_layouts_differ_by() -> None:
    only: dict[str, Any] = {"pipeline": 1, "tensor": 1, "sharing": "zero1", "global_batch": 256}
    found = next(plan for plan in plans(**only) if plan.micro_batch == 16)  # whose launches take a tenth of its step
    slow = 1.4 * found.seconds.mid
    again = plans(**only, measured=(found, slow))
    after = next(plan for plan in again if plan.micro_batch == 16)
    assert after.seconds.mid == pytest.approx(slow, rel=0.011)
    assert after.efficiency == pytest.approx(found.implied_efficiency(slow), rel=0.05)
    assert 1 < after.seconds.high / after.seconds.low < 1.1 * OTHER_LAYOUT.high / OTHER_LAYOUT.low
    other = plans(**only, checkpointing="full", measured=(found, slow)).best  # of another kind
    assert other.checkpointing == "full"


def test_a_step_that_waits_for_the_host_sets_the_host_s_pace_and_not_that_of_kernels() -> None:
    only: dict[str, Any] = {"pipeline": 1, "tensor": 1, "sharing": "zero1", "global_batch": 256}
    before = {plan.micro_batch: plan for plan in plans(**only)}
    small, large = before[1], before[16]
    slow = 2.5 * small.seconds.mid
    after = {plan.micro_batch: plan for plan in plans(**only, measured=(small, slow))}
    assert after[1].seconds.mid == pytest.approx(slow, rel=0.011)
    assert after[2].seconds.mid < 0.6 * slow  # half as many launches
    assert after[16].seconds.mid == pytest.approx(large.seconds.mid, rel=0.05)
    assert after[1].seconds.high / after[1].seconds.low < 0.5 * small.seconds.high / small.seconds.low


def test_a_step_that_computes_leaves_open_how_slow_the_host_is() -> None:
    only: dict[str, Any] = {"pipeline": 1, "tensor": 1, "sharing": "zero1", "global_batch": 256}
    before = {plan.micro_batch: plan for plan in plans(**only)}
    after = {plan.micro_batch: plan for plan in plans(**only, measured=(before[16], before[16].seconds.mid))}
    assert after[1].seconds.high > 0.9 * before[1].seconds.high
    assert after[16].seconds.high < 0.95 * before[16].seconds.high
    limited = plans(**only, measured=(before[2], before[2].seconds.mid))  # with a slower host it had taken longer
    assert next(plan for plan in limited if plan.micro_batch == 1).seconds.high < 0.8 * after[1].seconds.high


def test_two_measured_steps_tell_kernels_from_messages_and_leave_the_version() -> None:
    only: dict[str, Any] = {"trainer": "nanotron", "model": LARGE, "gpus": 64, "sharing": "zero1", "top": 40}
    keys = [(plan.tensor, plan.pipeline, plan.micro_batch) for plan in plans(**only)]
    alone, split = next(key for key in keys if key[1] == 1), next(key for key in keys if min(key[:2]) > 1)
    other = next(key for key in keys if min(key[:2]) > 1 and key[:2] != split[:2])

    def by_key(**more: Any) -> Any:
        return {key: plans(**{**only, **dict(zip(("tensor", "pipeline"), key, strict=False)), **more}) for key in {alone, split, other}}

    def of(found: Any, key: tuple[int, int, int]) -> Any:
        return next(plan for plan in found[key] if plan.micro_batch == key[2])

    known, truth = by_key(), by_key(efficiency=0.42, poll_interval=0, checked_collectives=True)
    steps = [(of(known, key), of(truth, key).seconds.mid) for key in (alone, split)]
    one, both = by_key(measured=steps[0]), by_key(measured=steps)
    assert "best one of a layout on several nodes with both a pipeline and tensor parallelism" in str(one[other])
    assert "as 2 measured steps imply" in both[other].notes[1]
    assert both[other].versions == ("checked collectives",) != one[other].versions
    taken, said = of(truth, other).seconds.mid, of(both, other).seconds
    assert said.mid == pytest.approx(taken, rel=0.1)
    assert taken in said
    assert said.high / said.low < of(one, other).seconds.high / of(one, other).seconds.low


def test_steps_of_more_layouts_narrow_the_range_and_repeated_ones_do_not() -> None:
    only: dict[str, Any] = {"pipeline": 1, "tensor": 1, "sharing": "fsdp", "top": 8, "links": 0.8}
    found = plans(**only)
    steps = [(plan, 1.1 * plan.seconds.mid) for plan in found]
    assert len({plan.micro_batch for plan in found}) > 2
    widths = []
    for some in (steps[:1], steps[:1] * 2, steps[:2], steps[:3]):
        said = plans(**only, measured=some).best.seconds
        widths.append(math.log(said.high / said.low))
        assert said.mid == pytest.approx(1.1 * found.best.seconds.mid, rel=0.05)
    assert widths[1] == pytest.approx(widths[0], rel=0.01)
    assert widths[0] > widths[2] > widths[3] > 0.8 * widths[0]


def test_how_long_messages_take_stays_as_open_as_how_fast_kernels_are() -> None:
    version = Version(workload=workload(), efficiency=EFFICIENCY).at(0.3, -0.2, Interval(low=-1, mid=0, high=0.1))
    assert version.efficiency.low == pytest.approx(OTHER_LAYOUT.low * version.efficiency.mid)
    levels = math.log(version.efficiency.low / version.efficiency.mid) / math.log(EFFICIENCY.low / EFFICIENCY.mid)
    assert version.message.high / version.message.mid == pytest.approx((MESSAGE.high / MESSAGE.mid) ** levels)
    assert version.message.low < version.message.mid < MESSAGE.mid
    assert (version.host.low, version.host.mid) == pytest.approx((LAUNCH.low, LAUNCH.mid))
    assert version.host.high == pytest.approx(OTHER_LAYOUT.high * LAUNCH.mid)


def test_measured_steps_that_contradict_each_other() -> None:
    found = plans(pipeline=1, tensor=1, sharing="fsdp")
    steps = [(found[0], 0.7 * found[0].seconds.mid), (found[1], 3 * found[1].seconds.mid)]
    assert "so far from 32 … 60 %, or from each other, that the loader" in plans(measured=steps).notes[1]


def test_a_measured_step_that_no_level_makes_is_refused() -> None:
    only: dict[str, Any] = {"model": LARGE, "gpus": 64, "tensor": 8, "pipeline": 4, "sharing": "zero1", "top": 1}
    found = plans(**only).best
    for wrong in (1e-9, found.seconds.mid / 3, 20 * found.seconds.mid, 1e9):
        with pytest.raises(PlanError, match=r"may take .* 100 % … 11 % of the dense peak.*global batch of 64\?"):
            plans(**only, measured=(found, wrong))
    fastest, slowest = (plans(**only, efficiency=share, links=0.8).best.seconds.mid for share in (1.0, 0.111))
    for right in (1.001 * fastest, 0.999 * slowest):
        after = plans(**{**only, "top": 40}, measured=(found, right))
        same = next(plan for plan in after if plan.micro_batch == found.micro_batch)
        assert same.seconds.mid == pytest.approx(right, rel=0.02)
        assert "so far from 32 … 60 % that the loader" in after.notes[1]
        assert after.best.efficiency <= 1
        assert "… 100 % (predicted" in after.notes[0] or right == 0.999 * slowest  # no layout computes beyond the peak
    assert "so far from" not in str(plans(**only, measured=(found, 1.2 * found.seconds.mid)))
    some = plans(**only, trainer="nanotron").best
    words = r"\(without waits\); .* \(polling every 100 ms\); .* \(polling .* and checked collectives\) where kernels"
    for wrong in (0.1 * some.seconds.low, 10 * some.seconds.high):
        with pytest.raises(PlanError, match=words):
            plans(**only, trainer="nanotron", measured=(some, wrong))


def test_a_measured_step_in_the_range_of_its_plan_is_never_refused() -> None:
    only: dict[str, Any] = {"tensor": 1, "pipeline": 1, "sharing": "zero1"}
    found = plans(**only).best  # what the host launches limits it
    for taken in (found.seconds.low, found.seconds.high):
        after = plans(**only, measured=(found, taken))
        same = next(plan for plan in after if plan.micro_batch == found.micro_batch)
        assert same.seconds.mid == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": "megatorn"}, r"trainer='megatorn': allowed are 'megatron', 'nanotron'; did you mean \"megatron\"\?"),
        ({"poll_interval": -1}, "poll_interval=-1: seconds between two looks for a message.*such as 0.1"),
        ({"poll_interval": math.nan}, "poll_interval=nan"),
        ({"checked_collectives": 1}, "checked_collectives=1: allowed are True, False, and None"),
        ({"loss_parallel": "yes"}, "loss_parallel='yes': allowed are True, False, and None"),
        ({"trainer": "nanotron", "sharing": "fsdp"}, "sharing='fsdp': allowed are ddp, zero1$"),
        ({"trainer": "nanotron", "chunks": 2}, "chunks=2: pipelines of nanotron are not interleaved; allowed is 1"),
        ({"measured": 1.7}, r"measured=1.7: expected \(plan, seconds\), such as \(plans.best, 1.7\)"),
        ({"measured": (1.7, 2)}, r"measured=\(1.7, 2\): expected \(plan, seconds\)"),
        ({"measured": []}, r"measured=\[\]: expected \(plan, seconds\), such as \(plans.best, 1.7\), or a list of such pairs"),
        ({"measured": [1.7]}, r"measured=1.7: expected \(plan, seconds\), .* or a list of such pairs"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plans(**changes)


def test_measured_steps_that_are_refused() -> None:
    found = plans(trainer="nanotron", top=1).best
    for given in (0, math.nan, math.inf):
        with pytest.raises(PlanError, match=f"measured={given}: seconds of a step above 0 are allowed, such as 1.7$"):
            plans(measured=(found, given))
    with pytest.raises(PlanError, match=r"measured= and efficiency=0.4: the measured step says how fast kernels are"):
        plans(measured=(found, 1.0), efficiency=0.4)
    with pytest.raises(PlanError, match=r"on DGX-H100 in amp_bf16; expected one of .* on DGX-A100 in amp_bf16$"):
        plans(measured=(found, 1.0), cluster="DGX-A100")
    with pytest.raises(PlanError, match=r"nanotron has 4 versions that may take 1.0 s: try measured=\(plan, 1.0\)"):
        found.implied_efficiency(1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": LARGE}, "a plan of transformer of 24 × 2,048.* 8.67 TFLOP per sample.*; expected one of transformer of 80 × 8,192"),
        ({"model": dataclasses.replace(GPT, layers=23)}, "a plan of transformer of 24 × .*; expected one of transformer of 23 × "),
        ({"sequence": 2048}, "1,024 tokens.*; expected one of .*2,048 tokens"),
        ({"precision": "fp32"}, "on DGX-H100 in amp_bf16; expected one of .* in fp32$"),
    ],
)
def test_a_measured_step_is_of_a_plan_of_this_model(changes: dict[str, Any], words: str) -> None:
    found = plans(top=1).best
    with pytest.raises(PlanError, match=words):
        plans(**changes, measured=(found, found.seconds.mid))


def test_a_measured_step_is_of_a_plan_that_the_trainer_can_have() -> None:
    shared = plans(sharing="fsdp", tensor=1, pipeline=1, top=1).best
    interleaved = next(plan for plan in plans(model=LARGE, gpus=64, chunks=None, top=40) if plan.chunks > 1)
    for plan, model, words in (
        (shared, GPT, "nanotron has no dp 16 .fsdp.; expected a plan with trainer='nanotron'"),
        (interleaved, LARGE, "nanotron has no .* .v .*; expected a plan with trainer='nanotron'"),
    ):
        step: dict[str, Any] = {"model": model, "gpus": plan.gpus, "measured": (plan, plan.seconds.mid)}
        assert plans(**step, trainer="megatron").best.seconds.mid > 0
        with pytest.raises(PlanError, match=words):
            plans(**step, trainer="nanotron")
    scores = plans(fused_attention=False, checkpointing="selective", top=1).best
    with pytest.raises(PlanError, match="its checkpointing='selective' is not planned here, only none, full"):
        plans(measured=(scores, scores.seconds.mid))


def test_the_command_line_names_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 24, "hidden_size": 2048, "vocab_size": 50_000, "num_attention_heads": 16, "intermediate_size": 8192}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 1024, "hidden_act": "silu", **sizes}))
    words = ["plan", str(config), "--cluster", "DGX-H100", "--gpus", "16", "--global-batch", "64"]
    assert main([*words, "--trainer", "nanotron"]) == 0
    assert "nanotron: without waits, or checked collectives, or polling every 100 ms" in capsys.readouterr().out
    assert main([*words, "--trainer", "nanotron", "--poll-interval", "0", "--checked-collectives"]) == 0
    assert "nanotron: checked collectives. Neither wait has to be" in capsys.readouterr().out
    assert main([*words, "--trainer", "megatorn"]) == 2
    assert "did you mean" in capsys.readouterr().err
