"""The batch planner without a browser: what its knobs make of a plan, what it says where that cannot be, and what it shows."""

import math
import re
import time
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.throughput import Throughput
from workbench.batch.batch_plan import batch_plan
from workbench.batch.panel import html as planner_html
from workbench.batch.panel.model import IMPOSSIBLE, PlannerInputs, TrainingCost, batches, planned
from workbench.batch.panel.planner import BatchPlanner
from workbench.runs.spec import RunSpec

PLAN = BatchPlan(micro_batch=32, world_size=2, lr=0.1, warmup_steps=20, optimizer="sgd(momentum=0.9)")
ADAM = BatchPlan(micro_batch=64, lr=0.001, optimizer="adam(betas=(0.9, 0.99))")
LAW = CriticalBatch.fit({16: 700, 32: 400, 64: 250, 128: 175, 256: 137.5})
CURVE = {32: 5000.0, 64: 8000.0, 128: 10000.0}


def turned(target: Any = PLAN, *, batch: int = 256, known: dict[str, Any] | None = None, **knobs: Any) -> BatchPlanner:
    """A planner with some knobs turned."""
    made = BatchPlanner(target, **(known or {}))
    made.batch.value = batch
    for name, value in knobs.items():
        getattr(made, name).value = value
    return made


def test_the_knobs_make_a_plan() -> None:
    made = turned(batch=512, processes=8, accumulation=2, rule="linear")
    assert made.result is not None
    assert (made.result.micro_batch, made.result.accumulation, made.result.world_size, made.result.lr) == (32, 2, 8, 0.8)
    assert made.result == PLAN.scaled_to(global_batch=512, world_size=8, micro_batch=32, rule="linear")
    assert made.spec is None


def test_where_they_stand_at_first_is_the_plan_itself() -> None:
    made = BatchPlanner(PLAN)
    assert made.result is not None
    assert made.result.changes() == PLAN.changes()
    assert made.found.light == "inside"


def test_the_noise_scale_damps_and_the_critical_batch_counts_where_it_is_smaller() -> None:
    noisy = turned(known={"noise_scale": 400}).result
    lawful = turned(known={"noise_scale": 400, "steps": LAW}).result
    assert noisy is not None
    assert lawful is not None
    assert noisy.lr == pytest.approx(0.1 * (1 + 400 / 64) / (1 + 400 / 256))
    assert lawful.lr == pytest.approx(0.1 * (1 + LAW.b_crit / 64) / (1 + LAW.b_crit / 256))


def test_adams_rule_turns_its_betas_and_says_where_they_end() -> None:
    made = turned(ADAM, known={"noise_scale": 1e6})
    assert made.result is not None
    assert made.result.lr == pytest.approx(0.002)
    assert "0.6, 0.96" in made.figures.value
    assert "was 0.9, 0.99" in made.figures.value
    made.batch.value, made.rule.value = 1024, "adam"
    assert made.found.light == "outside"
    assert "outside the rule" in made.light.value
    assert "sqrt instead of adam, which is not defined here" in made.light.value
    assert "wb-is-failed" in made.light.value


def test_steps_samples_and_time_to_the_target() -> None:
    made = turned(known={"steps": LAW, "throughput": CURVE}, batch=128, processes=2)
    after, before = made.found.after, made.found.before
    assert after.steps == pytest.approx(LAW.steps(128))
    assert after.samples == pytest.approx(128 * after.steps)
    assert after.seconds == pytest.approx(after.samples / 8000)
    assert before.seconds == pytest.approx(64 * LAW.steps(64) / 5000)
    for word in ("steps to target", "samples to target", "time to target", "8,000 samples/s"):
        assert word in made.figures.value


def test_more_processes_than_were_measured_are_taken_to_be_as_fast_and_that_is_said() -> None:
    more = turned(known={"throughput": CURVE}, processes=4)
    assert "4 are taken to be as fast, each (the naive line" in more.figures.value
    assert "the naive line" in more._repr_mimebundle_()["text/html"]
    assert "naive" not in turned(known={"throughput": CURVE}).figures.value
    assert "naive" not in turned(processes=4).figures.value


def test_without_a_law_they_are_ratios() -> None:
    made = turned(known={"noise_scale": 192.0, "throughput": CURVE}, batch=192 // 3 * 2)
    steps, seconds = made.found.gain
    assert steps == pytest.approx((1 + 192 / 128) / (1 + 192 / 64))
    assert seconds == pytest.approx(steps * 2 * 5000 / 8000)
    assert "steps to the same loss" in made.figures.value
    assert all(math.isnan(one) for one in turned().found.gain)
    assert "steps to" not in turned().figures.value


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"processes": 256, "accumulation": 2},
            r"a batch of 256 cannot be made by 256 processes × 2 micro-batches: .* change one of the three",
        ),
        ({"rule": "damped"}, "needs the noise"),
        ({"rule": "adam"}, "the optimizer is sgd: try linear or damped"),
    ],
)
def test_what_cannot_be_is_red_with_the_reason(knobs: dict[str, Any], said: str) -> None:
    made = turned(**knobs)
    assert made.result is None
    assert made.spec is None
    assert made.found.light == IMPOSSIBLE
    assert re.search(said, made.found.why)
    assert "wb-is-failed" in made.light.value
    assert made.figures.value == made.schedule.value == ""
    assert "impossible" in made._repr_mimebundle_()["text/html"]


def test_memory_and_the_dataset_are_limits() -> None:
    made = turned(known={"largest": 100})
    assert made.found.why == "128 samples at once do not fit, at most 100 do: accumulate 2 or more, or more processes"
    made.accumulation.value = 2
    assert made.result is not None
    small = BatchPlanner(PLAN, dataset_size=300)
    assert max(small.batch.options) == 256
    with pytest.raises(ValueError, match="a batch of 512 is above the dataset, which has 300 samples"):
        small.known.scaled(512, 2, 1, "none")


def test_the_ladder_shows_every_batch_with_its_light() -> None:
    made = turned(known={"noise_scale": 100}, rule="linear")
    lights = {batch: light for batch, light, _ in made.found.ladder}
    assert lights[64] == "inside"
    assert lights[16384] == "outside"
    assert made.ladder.value.count("wb-light-") == len(made.batch.options)
    assert made.ladder.value.count("outline:2px") == 1
    none = turned(rule="damped")
    assert none.ladder.value == ""


def test_a_spec_is_changed() -> None:
    spec = RunSpec(task="fashion-mlp", micro_batch=32, nproc_per_node=2, schedule="cosine", steps=400)
    made = turned(spec, batch=128, processes=4)
    assert made.plan.lr == 0.1
    assert made.spec is not None
    assert made.spec.changes(spec) == {
        name: (new, old) for name, (new, old) in {"nproc_per_node": (4, 2), "lr": (0.2, None), "warmup_steps": (20, 0)}.items()
    }
    assert made.known.dataset == 8000
    assert "warm-up: cut to 10 % of the run, which has 200 steps" in made.figures.value
    assert "20 steps" in made.figures.value
    assert "does not end" not in made.schedule.value
    long = BatchPlanner(spec.replace(warmup_steps=500))
    assert "the warm-up of 500 steps does not end in a run of 400" in long.schedule.value
    assert repr(made) == "BatchPlanner('fashion-mlp · 2 ranks · schedule=cosine')"


def test_a_proposed_plan_brings_what_it_was_made_from() -> None:
    spec = RunSpec(task="fashion-mlp", micro_batch=16, nproc_per_node=2)
    proposed = batch_plan(spec, noise_scale=100, throughput=CURVE)
    made = BatchPlanner(proposed)
    same = turned(spec, batch=proposed.global_batch, known={"noise_scale": 100}).result
    assert made.result is not None
    assert same is not None
    assert made.result.warmup_steps == same.warmup_steps == proposed.warmup_steps > 0
    assert same.reasons["warmup_steps"] == proposed.reasons["warmup_steps"]
    assert made.known.noise == 100
    assert made.known.throughput == proposed.throughput
    assert made.spec is not None


def test_the_schedule_is_the_one_that_training_takes() -> None:
    spec = RunSpec(task="fashion-mlp", micro_batch=32, warmup_steps=10, steps=100, schedule="cosine")
    made = BatchPlanner(spec)
    (old, new), samples = made._curves(made.found)
    assert samples == 3200
    assert old == new
    assert max(old) == 0.1
    assert old[0] == pytest.approx(0.01)
    assert old[-1] < 0.001


def test_it_follows_a_slider_quickly() -> None:
    made = BatchPlanner(PLAN, noise_scale=400, steps=LAW, throughput=CURVE)
    made.batch.value = 128  # torch is loaded for the schedule
    spent, usual = [], []
    for batch in (256, 512, 256, 512, 1024):
        began = time.thread_time()
        made.batch.value = batch
        spent.append(time.thread_time() - began)
        began = time.thread_time()
        sum(str(number).count("1") for number in range(100_000))  # how fast this machine runs Python
        usual.append(time.thread_time() - began)
    assert min(spent) < 4 * min(usual), (spent, usual)


def test_what_it_shows_survives_as_text() -> None:
    made = turned(known={"noise_scale": 400})
    bundle = made._repr_mimebundle_()
    assert bundle["text/plain"] == "BatchPlanner('32 × 1 × 2 = 64, lr=0.1')"
    for word in ("Batch planner", "at the edge of the rule", "warm-up", "Batch plan", "128 × 1 × 2"):
        assert word in bundle["text/html"]
    assert "<svg" not in bundle["text/html"]
    assert "id=" not in bundle["text/html"]


def test_html_is_escaped() -> None:
    found = planned(PlannerInputs(plan=PLAN), batch=64, ranks=2, accumulation=1, rule="auto")
    assert "<b>" not in planner_html.static("<b>", found, ([0.1], [0.1]), 64)


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (3, {}, r"BatchPlanner\(int\): a RunSpec or a BatchPlan is allowed"),
        (PLAN, {"noise_scale": -1}, "noise_scale=-1: samples above 0"),
        (PLAN, {"noise_scale": True}, "noise_scale=True: samples above 0"),
        (PLAN, {"steps": 5}, "steps=5: what wb.steps_to_target gave is allowed"),
        (PLAN, {"largest": 0}, "largest=0: a whole number of at least 1"),
        (PLAN, {"dataset_size": -5}, "dataset_size=-5: a whole number of at least 1"),
        (PLAN, {"dataset_size": 0}, "dataset_size=0: a whole number of at least 1"),
        (PLAN, {"throughput": "fast"}, "throughput='fast': allowed are"),
        (RunSpec(task="fashion-mlp", micro_batch="auto"), {}, 'micro_batch="auto" is chosen when a run starts'),
    ],
)
def test_what_it_does_not_take(target: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BatchPlanner(target, **options)


def test_a_noise_scale_that_is_infinite_says_nothing() -> None:
    assert BatchPlanner(PLAN, noise_scale=math.inf).known.noise is None


def test_places_and_outlooks() -> None:
    assert batches(PLAN)[:3] == [2, 4, 8]
    assert math.isnan(TrainingCost.of(PlannerInputs(plan=PLAN), PLAN).seconds)
    assert TrainingCost.of(PlannerInputs(plan=PLAN, throughput=Throughput.of(CURVE, world_size=2)), PLAN).rate == 5000
