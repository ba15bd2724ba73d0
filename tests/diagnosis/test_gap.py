"""The gap between N × one rank and N ranks, on made measurements whose parts are known."""

import contextlib
import itertools
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.planted_gap import planted
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap import UNEXPLAINED, Gap, gap_of
from workbench.diagnosis.analysis.gap_evidence import GapBlock, GapEvidence, Tail, expected_largest, ranks_with_rare_steps, seconds_of
from workbench.diagnosis.analysis.gap_forecast import link_of, predict_gap
from workbench.diagnosis.analysis.gap_remedies import remedies_for_gap
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.diagnosis.measure.gap import _Arms, typical_rank
from workbench.harness import ablations
from workbench.harness.blocks import StepTimes

CAUSES = [
    ("slow rank", {"slow": 0.006}),
    ("uneven data", {"data": 0.006}),
    ("uneven data", {"longer_samples": 0.006}),
    ("uneven steps", {"uneven": 0.012}),
    ("rare long steps", {"pauses": 0.4}),
    ("large gradients", {"reduction": 0.008, "buckets": 1}),
    ("many reductions", {"reduction": 0.008, "buckets": 60}),
    ("memory", {"sharing": 0.006}),
    ("cores", {"waits": 0.006}),
    ("loaders", {"loaders": 0.006}),
    ("epochs", {"start": 0.2, "steps_per_pass": 20.0}),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("cause", "what"), CAUSES, ids=[f"{cause}-{'-'.join(what)}" for cause, what in CAUSES])
def test_a_planted_cause_is_named_and_the_parts_add_up(cause: str, what: dict[str, float], ranks: int) -> None:
    gap = gap_of(planted(ranks=ranks, rounds=12, **what))
    assert gap.cause == cause
    assert gap.linear.mid + sum(part.seconds.mid for part in gap.parts) == pytest.approx(gap.step.mid)
    assert gap.residual <= (0.2 if cause == "uneven steps" else 0.1)  # its steps differ by half: a dozen rounds leave some chance
    assert gap[cause].low > 0


def test_rare_long_steps_count_by_their_mean() -> None:
    """A rank that paused for 0.5 s in one step of 25 was called close to linear: medians over rounds had left its pauses out."""
    evidence = planted(rounds=12, pauses=0.5)
    gap = gap_of(evidence)
    assert gap["rare long steps"].mid == pytest.approx(0.5 / 25, rel=0.3)
    assert 0.5 / 25 in gap["rare long steps"]
    assert gap["rare long steps"].width > 0.01, "there are few"
    assert abs(gap["slow rank"].mid) < 0.001
    assert ranks_with_rare_steps(evidence) == [1]
    assert "now and then on rank 1, " in next(remedy.what for remedy in remedies_for_gap(evidence, gap, None) if remedy.scope == "cause")
    assert predict_gap(evidence, 8)["rare long steps"].mid > gap["rare long steps"].mid
    alone = evidence.blocks[0].steps[0]
    paused = replace(evidence.blocks[0], steps=((*alone[:-1], 0.6), *evidence.blocks[0].steps[1:]))
    lucky = replace(planted(rounds=3), blocks=(paused, *planted(rounds=3).blocks[1:]))
    assert gap_of(lucky)["rare long steps"].mid < 0, "of N ranks, none was seen to pause"
    assert predict_gap(lucky, 8)["rare long steps"].mid == 0
    assert predict_gap(lucky, 8).step.mid > 0
    assert "rare long steps" not in [part.cause for part in gap_of(planted()).parts]
    often = gap_of(planted(rounds=12, uneven=0.06))  # in a third of the steps
    assert often["rare long steps"].mid == 0
    assert often.cause == "uneven steps"


def test_a_smaller_micro_batch_counts_at_the_same_global_batch_alone() -> None:
    evidence = planted(ranks=4, large=0.026)
    assert gap_of(evidence).cause == ""
    gap = gap_of(evidence, "global_batch")
    assert gap.cause == "micro-batch"
    assert gap["micro-batch"].mid == pytest.approx(0.020 - 0.026 / 4, rel=0.05)
    assert gap.linear.mid < gap_of(evidence).linear.mid


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_healthy_training_is_not_blamed(ranks: int, seed: int) -> None:
    gap = gap_of(planted(ranks=ranks, noise=0.01, seed=seed))
    assert gap.cause == ""
    assert gap.efficiency > 0.95


def test_reductions_are_not_blamed_where_others_had_the_cores_that_they_wait_for() -> None:
    busy = {"ranks": 4, "reduction": 0.004, "buckets": 1, "cores": 2.0, "wanted": 0.5}
    assert gap_of(planted(**busy, foreign=0.0)).cause == "large gradients"
    gap = gap_of(planted(**busy, foreign=1.8))
    assert gap.cause == ""
    reduced = sum(gap[cause].low for cause in ("many reductions", "large gradients"))
    assert reduced == pytest.approx(0.004 * 0.1, rel=0.2)
    assert gap_of(planted(**busy | {"reduction": 0.060}, foreign=1.8)).cause == "large gradients", "that much is beyond what others took"


@pytest.mark.parametrize(
    ("wanted", "own"),
    [(1.0, 0.0), (1.78, 0.08 / 1.08), (4.0, 2.3 / 3.3), (None, 2.3 / 3.3)],
    ids=["they fit", "they hardly fit", "too many", "too many threads"],
)
def test_waits_for_a_core_are_shared_out_among_ranks_and_other_processes(wanted: float | None, own: float) -> None:
    """Ranks that want 1.78 of 2 cores were blamed for all waits, though others took one of the two."""
    crowd = {"waits": 0.012, "cores": 2.0, "wanted": wanted, "threads": 2}
    gap = gap_of(planted(**crowd, foreign=1.0))
    assert gap["other processes"].mid == pytest.approx(0.012 * (1 - own), rel=0.01)
    assert gap["cores"].mid == pytest.approx(0.012 * own, rel=0.05, abs=2e-4)
    assert gap.cause == ("cores" if own > 0.5 else "")
    alone = gap_of(planted(**crowd, foreign=0.1))
    assert alone["cores"].mid == pytest.approx(0.012, rel=0.05)
    assert "other processes" not in {part.cause for part in alone.parts}


def test_the_interval_of_a_prediction_holds_that_of_the_process_it_is_made_from() -> None:
    """Of one process alone five answers within two minutes were apart by 2.3 times, with intervals of 1 %."""
    for rounds, waits, foreign in ((1, 0.0, 0.0), (3, 0.0, 0.0), (1, 0.1, 1.7)):
        evidence = planted(ranks=1, rounds=rounds, cores=2.0, noise=0.0)
        hit = [replace(b, steps=(tuple(s + waits for s in b.steps[0]),), delays=((waits,) * len(b.steps[0]),)) for b in evidence.blocks]
        evidence = replace(evidence, blocks=tuple(hit), foreign=foreign)
        base = gap_of(evidence).linear
        assert base.mid == pytest.approx(0.022 + waits, rel=0.02)
        error = math.hypot(0.05 * base.mid / math.sqrt(rounds), waits)
        assert base.high - base.mid == pytest.approx(error, rel=0.05)
        step = predict_gap(evidence, 8).step
        assert step.high - step.mid >= 0.99 * error
        assert 0 < step.low <= step.mid / (1 + 0.9 * error / base.mid)
    rows = WhyNotLinear(evidence=planted(ranks=1, rounds=1)).worth([1, 8]).rows
    assert all("–" not in str(row[2]) for row in rows)


def test_what_nothing_accounts_for_is_said_and_not_blamed_on_a_part() -> None:
    gap = gap_of(planted(unexplained=0.008))
    assert gap.cause == UNEXPLAINED
    assert gap.residual > 0.8


def test_the_amount_of_two_parts_is_right() -> None:
    gap = gap_of(planted(ranks=4, slow=0.005, reduction=0.004, buckets=1))
    assert gap["slow rank"].mid == pytest.approx(0.005, rel=0.1)
    assert gap["large gradients"].mid + gap["many reductions"].mid == pytest.approx(0.004, rel=0.15)
    assert gap.cost("slow rank", 128) + gap.cost("large gradients", 128) < 128 * (1 / gap.linear.mid - 1 / gap.step.mid)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0, 0.02), min_size=8, max_size=8),
    st.integers(2, 5),
    st.integers(1, 4),
    st.sampled_from(["micro_batch", "global_batch"]),
)
def test_parts_always_add_up_to_the_step(values: list[float], ranks: int, rounds: int, same: str) -> None:
    names = ("sharing", "loaders", "slow", "data", "longer_samples", "uneven", "reduction", "waits")
    gap = gap_of(planted(ranks=ranks, rounds=rounds, seed=rounds, **dict(zip(names, values, strict=True))), same)
    assert gap.linear.mid + math.fsum(part.seconds.mid for part in gap.parts) == pytest.approx(gap.step.mid)
    lost = math.fsum(gap.cost(part.cause, 64.0) for part in gap.parts)
    assert lost == pytest.approx(64 * (1 / gap.linear.mid - 1 / gap.step.mid), abs=1e-6)
    assert all(part.seconds.low <= part.seconds.mid <= part.seconds.high for part in gap.parts)


def test_waits_for_a_core_are_kept_out_of_all_other_parts() -> None:
    """What other processes take of the machine disturbs some blocks and not others."""
    quiet, disturbed = planted(slow=0.006), planted(slow=0.006)
    hit = [
        GapBlock(arm=b.arm, steps=tuple(tuple(s + 0.01 * (i % 3) for s in row) for row in b.steps),
                 delays=tuple(tuple(d + 0.01 * (i % 3) for d in row) for row in b.delays))
        for i, b in enumerate(disturbed.blocks)
    ]  # fmt: skip
    busy = GapEvidence(blocks=tuple(hit), world_size=2, samples=64.0, cores=2.0, foreign=1.0, steps_per_pass=100.0)
    gap, still = gap_of(busy), gap_of(quiet)
    assert gap["slow rank"].mid == pytest.approx(still["slow rank"].mid)
    assert gap.cause == "slow rank"
    assert gap["cores"].mid == 0.0  # it has another name, since it is no property of the training
    assert "other processes" in {part.cause for part in gap.parts}


def test_waits_for_a_core_while_a_loader_starts_are_those_of_the_start() -> None:
    """Four ranks with a worker each on two cores: nan is the step with a start, whose seconds by the clock hold its waits already."""
    steps, delays = (1.0, math.nan, 1.0, 1.0), (0.1, 30.0, 0.1, 0.1)
    block = GapBlock(arm="all", steps=(steps, steps), delays=(delays, (0.0,) * 4))
    assert block.waits == pytest.approx(0.1)
    assert block.joint == pytest.approx(0.9)


def test_a_block_knows_what_waiting_for_each_other_costs() -> None:
    block = GapBlock(arm="strangers", steps=((1.0, 3.0) * 4, (3.0, 1.0) * 4), delays=((0.0,) * 8, (0.0,) * 8))
    assert block.means == [2.0, 2.0]
    assert block.pace == 3.0
    assert GapBlock(arm="one", steps=((1.0, math.nan, 3.0), ())).mean(0) == 2.0
    assert math.isnan(GapBlock(arm="one", steps=((1.0,), ())).mean(1))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.integers(1, 64))
def test_the_expected_largest_lies_between_mean_and_maximum_and_grows(values: list[float], ranks: int) -> None:
    mean = sum(values) / len(values)
    now, more = expected_largest(values, ranks), expected_largest(values, 2 * ranks)
    assert mean * (1 - 1e-9) <= now * (1 + 1e-9)
    assert now <= more * (1 + 1e-9) <= max(values) * (1 + 1e-8)


def test_an_answer_needs_a_complete_round() -> None:
    with pytest.raises(ValueError, match="larger budget_s"):
        gap_of(GapEvidence(blocks=(), world_size=2))
    with pytest.raises(ValueError, match="micro_batch"):
        gap_of(planted(), "batch")


def test_more_ranks_are_predicted_from_several_and_from_one() -> None:
    evidence = planted(reduction=0.006, buckets=40, uneven=0.006, start=0.05, steps_per_pass=200.0)
    gaps = [predict_gap(evidence, ranks) for ranks in (4, 16, 64)]
    assert all(gap.predicted and all(part.predicted for part in gap.parts) for gap in gaps)
    for gap, more in itertools.pairwise(gaps):
        for cause in ("many reductions", "uneven steps", "epochs"):
            assert more[cause].mid > gap[cause].mid > 0
        assert more.efficiency < gap.efficiency
    alone = planted(ranks=1, start=0.05, steps_per_pass=400.0)
    link = Gradients(size=0, buckets=1, latency=3e-4, per_byte=1e-9)
    few, many = (predict_gap(alone, ranks, link=link) for ranks in (2, 8))
    assert many["epochs"].mid > few["epochs"].mid > 0
    assert many["cores"].mid == 0, "from one rank as from several: each has the cores that a measured one has"
    assert many["large gradients"].high >= few["large gradients"].high > 0
    with pytest.raises(ValueError, match="ranks=1"):
        predict_gap(evidence, 1)


def test_the_rank_that_runs_alone_has_neither_slow_data_nor_a_slow_device() -> None:
    def steps(wait: float, call: float) -> StepTimes:
        names = {"waits": wait, "calls": call, "delays": 0.0, "gcs": 0.0}
        return StepTimes(**{name: array("d", [seconds] * 4) for name, seconds in names.items()})

    fed, slow_data = steps(0.001, 0.020), steps(0.011, 0.020)
    cached, quicker, slow_device = steps(0.0, 0.020), steps(0.0, 0.0199), steps(0.0, 0.030)
    assert typical_rank([quicker, cached], [slow_data, fed]) == 1, "with cached batches the first is a little quicker by chance"
    assert typical_rank([cached, quicker], [fed, slow_data]) == 0
    assert typical_rank([slow_device, cached], [fed, fed]) == 1
    assert typical_rank([cached, cached, slow_device, cached], [slow_data, fed, fed, fed]) == 1


def test_what_is_left_without_some_parts() -> None:
    gap = gap_of(planted(ranks=4, slow=0.005, reduction=0.004, buckets=1))
    left = gap.without(["slow rank", "large gradients"])
    assert left.step.mid == pytest.approx(gap.step.mid - gap["slow rank"].mid - gap["large gradients"].mid)
    assert left.linear.mid + math.fsum(part.seconds.mid for part in left.parts) == pytest.approx(left.step.mid)
    assert left.step.low <= left.step.mid <= left.step.high
    assert left.predicted
    assert gap.without([]).step.mid == gap.step.mid
    gain = gap.gain(["slow rank", "large gradients"])
    assert gain.mid == pytest.approx(gap.step.mid / left.step.mid)
    assert gain.low <= gain.mid <= gain.high
    with pytest.raises(ValueError, match="the parts of this gap are cores, memory"):
        gap.without(["slow ranks"])


def test_another_link_changes_what_is_reduced_and_nothing_else() -> None:
    tail = Tail(first=0.002, backward=0.004, after=0.004, silent=0.0)
    evidence = planted(ranks=4, reduction=0.004, buckets=12, tail=tail)  # by itself 7.6 ms
    link = link_of(evidence)
    assert link is not None
    gap = gap_of(evidence)
    same = predict_gap(evidence, 4, link=link)
    for cause in ("many reductions", "large gradients", "memory", "uneven steps"):
        assert same[cause].mid == pytest.approx(gap[cause].mid, abs=2e-4)
    halved = predict_gap(evidence, 4, link=replace(link, latency=link.latency / 2, per_byte=link.per_byte / 2))
    slower = predict_gap(evidence, 4, link=replace(link, per_byte=10 * link.per_byte))
    reduced = [sum(gap_[cause].mid for cause in ("many reductions", "large gradients")) for gap_ in (halved, same, slower)]
    assert reduced == pytest.approx([0.0038 - 0.9 * 0.0038, 0.004, 43.6e-3 - 0.0036], abs=5e-4), "the backward hides 3.6 of its 4 ms"
    assert slower["memory"] == same["memory"]
    assert predict_gap(evidence, 64, link=link)["large gradients"].mid > same["large gradients"].mid
    assert link_of(planted(ranks=1)) is None


def test_the_moments_of_gradients_are_those_of_planted_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that hooks put forward: 3 s to the first gradient, 2 s to the last, then 1 s to the optimizer, and 4 s more of reduction."""
    now, reducing = [0.0], [True]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @contextlib.contextmanager
    def without(_: object) -> Iterator[None]:
        reducing[0] = False
        yield
        reducing[0] = True

    def later(seconds: float) -> None:
        now[0] += seconds

    def step(batch: torch.Tensor) -> None:
        later(3.0)
        model(batch).sum().backward()
        later(5.0 if reducing[0] else 1.0)
        optimizer.step()

    model[0].weight.register_post_accumulate_grad_hook(lambda _: later(2.0))  # in the layer that backward comes to last
    model[0].bias.requires_grad_(False)
    monkeypatch.setattr(ablations, "without_reduction", without)
    bench: Any = SimpleNamespace(clock=lambda: now[0], warm=lambda batches: [step(batch) for batch in batches])
    bench.peers = SimpleNamespace(gather=lambda row: [row, [9.0, 9.0, 9.0]], barrier=lambda: None)  # another rank waits longer
    feed: Any = SimpleNamespace(wait_until_full=lambda _: None)
    arms = _Arms(bench, feed, [model], 1)
    arms.cached.hold([torch.ones(4, 2)])
    assert arms.tail() == Tail(first=3.0, backward=2.0, after=5.0, silent=1.0)
    arms.models = [nn.Linear(2, 2)]
    assert arms.tail() is None, "these weights get no gradient"
    arms.meter.close()


def test_evidence_and_gap_are_written_and_read_back() -> None:
    evidence = planted(slow=0.006)
    copy = GapEvidence.from_json(json.loads(json.dumps(evidence.to_json())))
    assert copy == evidence
    assert seconds_of(copy) == seconds_of(evidence)
    gap = gap_of(evidence)
    assert Gap.from_json(json.loads(json.dumps(gap.to_json()))) == gap


@settings(max_examples=25, deadline=None)
@given(
    foreign=st.floats(0, 3),
    waits=st.floats(0, 0.05),
    sharing=st.floats(-0.005, 0.05),
    uneven=st.floats(0, 0.2),
    reduction=st.floats(0, 0.05),
    rounds=st.integers(1, 4),
    script=st.booleans(),
)
def test_no_load_makes_seconds_negative_or_turns_intervals_around(foreign: float, script: bool, **parts: Any) -> None:
    """Other processes take up to three times the cores, as a meter that errs may say."""
    cores, size = 2.0, 4 * 10**6
    gradients = Gradients(size=size, buckets=8, latency=3e-4, per_byte=1e-9)
    evidence = replace(planted(cores=cores, foreign=foreign * cores, gradients=gradients, **parts), script=script)
    if script:  # a launch gives the seconds of the backward as well
        longer = {"all": 0.012 + parts["reduction"]}
        evidence = replace(evidence, blocks=tuple(replace(b, backward=(longer.get(b.arm, 0.012),) * 2) for b in evidence.blocks))
    gap = gap_of(evidence)
    for each in (gap, gap_of(evidence, "global_batch"), predict_gap(evidence, 8), gap.without([part.cause for part in gap.parts[:1]])):
        for ends in (each.linear, each.step):
            assert 0 < ends.low <= ends.mid <= ends.high < math.inf
        assert all(part.seconds.low <= part.seconds.mid <= part.seconds.high for part in each.parts)
    for remedy in remedies_for_gap(evidence, gap, None):
        assert 0 < remedy.low <= remedy.speedup <= remedy.high
    for row in WhyNotLinear(evidence=evidence).worth([1, 2, 4, 8]).rows:
        assert "-" not in str(row[2])
