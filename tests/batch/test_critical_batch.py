"""Steps to a target, without training: the law and its intervals, what trials say, what is tried next, and time with a throughput."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import plot
from workbench.batch.analysis.critical_batch import CriticalBatch, Point
from workbench.batch.analysis.steps_to_target import TRIALS, StepsToTarget, TimeToTarget, rates_of
from workbench.batch.analysis.trials import TUNED, ExperimentPlan, Job, Target, Trial, TrialScheduler

LOSS = Target(name="loss", value=0.5, rises=False)
DIGITS = {2: 1128, 8: 315, 32: 125, 128: 85, 512: 75, 1400: 75}
"""Steps of a small perceptron, tuned at each batch."""


def law(batch: float, s_min: float = 70.0, b_crit: float = 28.0) -> float:
    return s_min * (1 + b_crit / batch)


# --- the law


@settings(max_examples=15, deadline=None)
@given(st.floats(5, 5000), st.floats(2, 3000), st.permutations([1, 8, 30, 100, 1000, 9000]))
def test_an_exact_law_is_found_in_whatever_order(s_min: float, b_crit: float, batches: list[int]) -> None:
    found = CriticalBatch.fit({batch: law(batch, s_min, b_crit) for batch in batches})
    assert found.s_min == pytest.approx(s_min, rel=1e-4)
    assert found.b_crit == pytest.approx(b_crit, rel=1e-4)
    assert found.b_crit_low <= found.b_crit <= found.b_crit_high
    assert found.s_min_low <= found.s_min <= found.s_min_high
    assert found == CriticalBatch.fit({batch: law(batch, s_min, b_crit) for batch in sorted(batches)})


def test_batches_in_another_unit() -> None:
    """The same batches counted in tokens: everything that is in samples grows with them, and nothing else."""
    one = CriticalBatch.fit(DIGITS)
    other = CriticalBatch.fit({64 * batch: steps for batch, steps in DIGITS.items()})
    for name in ("b_crit", "b_crit_low", "b_crit_high"):
        assert getattr(other, name) == pytest.approx(64 * getattr(one, name), rel=1e-5)
    assert other.s_min == pytest.approx(one.s_min, rel=1e-5)
    assert other.predict(6400).high == pytest.approx(one.predict(100).high, rel=1e-5)


def test_measured_steps() -> None:
    found = CriticalBatch.fit(DIGITS)
    assert found.s_min == pytest.approx(71, rel=0.02)
    assert found.b_crit == pytest.approx(28.4, rel=0.02)
    assert all(abs(found.steps(batch) / steps - 1) < 0.08 for batch, steps in DIGITS.items())
    small = CriticalBatch.fit({batch: DIGITS[batch] for batch in (2, 8, 32)})
    for batch in (128, 512, 1400):
        ahead = small.predict(batch)
        assert ahead.low < DIGITS[batch] < ahead.high
        assert abs(ahead.mid / DIGITS[batch] - 1) < 0.25
    assert small.b_crit_high - small.b_crit_low > found.b_crit_high - found.b_crit_low


def test_intervals_hold_what_they_promise() -> None:
    random, hits = np.random.default_rng(0), np.zeros(3)
    for _ in range(100):
        found = CriticalBatch.fit({batch: law(batch) * math.exp(0.08 * random.standard_normal()) for batch in (8, 16, 32, 64, 128)})
        ahead, measured = found.predict(1024), law(1024) * math.exp(0.08 * random.standard_normal())
        hits += [
            found.b_crit_low <= 28 <= found.b_crit_high,
            found.s_min_low <= 70 <= found.s_min_high,
            ahead.low <= measured <= ahead.high,
        ]
    assert (hits >= 85).all()


def test_a_run_that_was_given_up_says_more_than_none() -> None:
    points = [Point(batch=batch, steps=law(batch)) for batch in (2, 8, 32, 128)]
    plain = CriticalBatch.fit(points)
    known = CriticalBatch.fit([*points, Point(batch=512, steps=50, reached=False)])  # the law has 74 there: no news
    assert known.b_crit == pytest.approx(plain.b_crit, rel=1e-3)
    news = CriticalBatch.fit([*points, Point(batch=512, steps=150, reached=False)])
    assert news.s_min > 1.1 * plain.s_min
    assert news.scatter > plain.scatter
    as_if = CriticalBatch.fit([*points, Point(batch=512, steps=150)])
    assert news.steps(512) >= 0.9 * as_if.steps(512)


def test_points_that_cannot_tell() -> None:
    falling = CriticalBatch.fit({2: 100, 4: 50, 8: 25})
    assert falling.b_crit_high == math.inf
    assert "steps still fall in proportion at batch 8: measure larger ones" in str(falling)
    flat = CriticalBatch.fit({200: 100, 400: 100, 800: 100})
    assert flat.b_crit_low == 0
    assert "steps hardly fall from batch 200 on: measure smaller ones" in str(flat)
    fitted = CriticalBatch.fit(DIGITS)
    assert 0 < fitted.b_crit_low < fitted.b_crit_high < math.inf
    assert CriticalBatch.from_json(json.loads(json.dumps(falling.to_json()))) == falling
    assert len(falling.to_frame()) == 1


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({8: 100}, "two batches .* reached at batch 8 only: try a target that is easier"),
        ([Point(batch=8, steps=100, reached=False)] * 3, "reached at no batch"),
        ({8: 100, 16: -1}, "a batch and steps above 0 are allowed"),
    ],
)
def test_too_little_for_a_law(points: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CriticalBatch.fit(points)


@pytest.mark.parametrize("batch", [0, -3, math.inf, "8"])
def test_a_batch_that_is_none(batch: Any) -> None:
    with pytest.raises(ValueError, match="a batch in samples above 0"):
        CriticalBatch.fit(DIGITS).predict(batch)


# --- trials


def trial(batch: int, steps: float | None, **fields: Any) -> Trial:
    usual: dict[str, Any] = {"rule": TUNED, "lr": 0.1, "optimizer": "sgd", "seed": 0, "best": 0.5}
    ended = {"after": math.ceil(steps or 300), "outcome": "stopped" if steps is None else "reached"}
    return Trial(**{"batch": batch, "steps": steps, **usual, **ended, **fields})


def made(*trials: Trial, **fields: Any) -> StepsToTarget:
    usual: dict[str, Any] = {"task": "fashion-mlp", "target": LOSS, "base_batch": 32, "planned": len(trials)}
    return StepsToTarget(**{**usual, "trials": trials, **fields})


def test_seeds_make_a_mark() -> None:
    (mark,) = made(*(trial(8, steps, seed=seed) for seed, steps in enumerate([100.0, 400.0, 90.0]))).marks()
    assert (mark.steps, mark.low, mark.high, mark.reached, mark.samples) == (pytest.approx(100), 90, 400, True, pytest.approx(800))
    (two,) = made(trial(8, 100.0), trial(8, 400.0, seed=1)).marks()
    assert two.steps == pytest.approx(200)
    (half,) = made(trial(8, 100.0), trial(8, None, seed=1, after=400)).marks()
    assert not half.reached
    assert (half.text, half.high) == ("> 200", math.inf)
    (gone,) = made(trial(8, None, outcome="diverged", after=3)).marks()
    assert gone.text == "∞"


def test_the_best_at_each_batch() -> None:
    found = made(
        trial(8, 300.0, lr=0.1),
        trial(8, 310.0, lr=0.1, seed=1),
        trial(8, 250.0, lr=0.2),  # of one seed only: a search that went by
        trial(32, 400.0, rule="none"),
        trial(32, 150.0, lr=0.4),
        trial(128, None, rule="linear", lr=1.6, outcome="diverged"),
        trial(128, 90.0, rule="sqrt", lr=0.4),
    )
    assert [(mark.batch, round(mark.steps), mark.rule) for mark in found.marks()] == [(8, 305, TUNED), (32, 150, TUNED), (128, 90, "sqrt")]
    assert found.best(128).lr == 0.4
    assert [mark.batch for mark in found.marks(rule="none")] == [32]
    text = str(found)
    assert "linear" in text
    assert "∞" in text
    assert found._repr_html_().count("<tr>") == 1 + 4 + 1
    assert len(found.to_frame()) == 7
    assert StepsToTarget.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(ValueError, match="batches that were tried are 8, 32, 128"):
        found.best(64)
    with pytest.raises(ValueError, match="the rules that were tried are 'tuned', 'none', 'linear', 'sqrt'"):
        found.marks(rule="adam")
    with pytest.raises(ValueError, match="those that were tried are 'sgd'"):
        found.marks("adamw")


def test_batches_that_are_held_out() -> None:
    found = made(*(trial(batch, law(batch)) for batch in (4, 16, 64, 256))).fitted_to([16, 4, 64])
    assert found.errors() == {256: pytest.approx(0, abs=1e-4)}
    assert "78*" in str(found)
    assert [point.batch for point in found.fit().points] == [4, 16, 64]
    with pytest.raises(ValueError, match="5 was not tried; there are 4, 16, 64, 256"):
        found.fitted_to([5])


def test_a_target_that_was_never_reached() -> None:
    found = made(trial(8, None, after=4000, outcome="capped", best=0.61), trial(32, None, best=0.7))
    assert "loss 0.5 was never reached: nearest came batch 8 with loss 0.61 after 4,000 steps (lr 0.1); try a higher target" in str(found)
    with pytest.raises(ValueError, match=r"reached at no batch: .*; loss 0.5 was never reached"):
        found.fit()
    assert "not reached at batch 32" in str(made(trial(8, 100.0), trial(32, None)))
    rising = made(trial(8, None, best=0.7), trial(8, None, best=0.75, lr=0.3), target=Target(name="accuracy", value=0.8, rises=True))
    assert "with accuracy 0.75 after 300 steps (lr 0.3); try a lower target" in str(rising)


def test_the_direction_of_a_figure_is_said() -> None:
    """An accuracy below the untrained model's would have to fall: who meant it to rise has to see that."""
    falling = Target(name="accuracy", value=0.05, rises=False, start=0.1)
    said = (
        "accuracy 0.05 was never reached (taken as a figure that falls, as the untrained model has 0.1; "
        "a target for one that rises is above that)"
    )
    assert f"{said}: nearest came batch 8" in str(made(trial(8, None, best=0.08), target=falling))
    rising = Target(name="accuracy", value=0.8, rises=True, start=0.1)
    assert "(taken as a figure that rises, as the untrained model has 0.1;" in str(made(trial(8, None, best=0.7), target=rising))


def test_losses_that_are_no_numbers() -> None:
    at_once = [trial(batch, None, outcome="diverged", after=1, best=None) for batch in (8, 32)]
    assert "every trial's loss was not a number after the first step" in str(made(*at_once))
    later = trial(8, None, outcome="diverged", after=50, best=2.0)
    assert "every trial diverged; try a smaller learning rate" in str(made(later, at_once[0]))


def test_what_was_learnt_before_the_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"has no {TRIALS}: no directory of wb.steps_to_target"):
        StepsToTarget.of(tmp_path)
    order = dataclasses.replace(ORDER, rules=("linear",)).to_json()
    plan = {"kind": "plan", "order": order, "spec": {"task": "fashion-mlp"}, "names": {"": "sgd"}, "created": 10.0}
    rows = [
        plan,
        {"kind": "claim", "batch": 8},
        {"kind": "trial", **dataclasses.asdict(trial(8, 100.0, optimizer="")), "total": 5, "at": 12.5},
    ]
    (tmp_path / TRIALS).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tri')
    found = StepsToTarget.of(SimpleNamespace(path=tmp_path))
    assert (found.trials, found.seconds, found.rules, found.whole) == ((trial(8, 100.0),), 2.5, ("tuned", "linear"), False)
    assert "cut off after 1 of 5 trials" in str(found)
    (tmp_path / TRIALS).write_text("")
    with pytest.raises(ValueError, match="cut off before its first trial"):
        StepsToTarget.of(tmp_path)
    assert "no trial has ended yet" in str(made())


# --- what is tried next


ORDER = ExperimentPlan(
    target=LOSS,
    batches=(8, 32, 128, 512),
    rules=(),
    optimizers=("",),
    retune=(0.5, 1.0, 2.0),
    seeds=2,
    base_batch=32,
    patience=3.0,
    max_steps=10_000,
    probe=1024,
    budget_s=None,
    noise_scale=None,
    critical_batch=None,
)


def rates(order: ExperimentPlan, lr: float) -> dict[tuple[str, str, int], float]:
    rules = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
    places = itertools.product(order.optimizers, rules, {*order.batches, order.base_batch})
    return {(name, rule, batch): lr * (batch / order.base_batch) ** rules[rule] for name, rule, batch in places}


def simulated(order: ExperimentPlan, lr: float, *, best: float = 1.0, b_crit: float = 100.0) -> list[Trial]:
    """All that the agenda asks for, of a model whose best learning rate is the damped one, and which diverges at four times it."""
    agenda, done = TrialScheduler(order, rates(order, lr)), list[Trial]()
    while jobs := agenda.runnable(done):
        job = jobs[0]
        off = math.log2(job.lr * (1 + b_crit / job.batch) / best)
        steps = 100 * (1 + b_crit / job.batch) * (1 + 0.1 * off**2) * (1 + 0.01 * job.seed)
        limit = agenda.limit(job, done)
        given = dataclasses.asdict(job)
        if off > 2:
            done.append(Trial(**given, steps=None, after=5, outcome="diverged", best=2.0))
        elif steps > limit:
            done.append(Trial(**given, steps=None, after=limit, outcome="stopped", best=0.6))
        else:
            done.append(Trial(**given, steps=steps, after=math.ceil(steps), outcome="reached", best=0.5))
        assert len(done) < 500
    return done


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-3, 3.0), st.floats(0.05, 5.0), st.floats(5, 5000))
def test_a_search_finds_the_best_rate_wherever_it_starts(lr: float, best: float, b_crit: float) -> None:
    done = simulated(dataclasses.replace(ORDER, max_steps=10**6), lr * best, best=best, b_crit=b_crit)
    found = made(*done)
    reached = {mark.batch: mark for mark in found.marks()}
    for batch, mark in reached.items():
        if mark.batch != 32 or lr > 0.01:  # from far below it takes the neighbours to get there
            assert abs(math.log2(mark.lr * (1 + b_crit / batch) / best)) <= 2
    assert all(mark.reached and mark.seeds == 2 for mark in found.marks())


def test_one_process_or_several_ask_for_the_same() -> None:
    done = simulated(ORDER, 0.3)
    agenda = TrialScheduler(ORDER, rates(ORDER, 0.3))
    assert agenda.runnable(done) == []
    assert agenda.runnable(reversed(done)) == []
    assert len({(one.batch, one.rule, one.optimizer, one.lr, one.seed) for one in done}) == len(done)
    assert agenda.total(done) == len(done)
    assert agenda.total([]) == 4 * (3 + 1)  # three rates at each batch, and the other seed


def test_rules_are_not_tried_again_where_there_is_no_hope() -> None:
    order = dataclasses.replace(ORDER, rules=("linear", "none"), retune=(), seeds=3, batches=(32, 4096))
    done = simulated(order, 0.25)
    linear = [one for one in done if (one.rule, one.batch) == ("linear", 4096)]
    assert [one.outcome for one in linear] == ["diverged"]
    assert len([one for one in done if (one.rule, one.batch) == ("linear", 32)]) == 3
    whole = simulated(dataclasses.replace(order, patience=None), 0.25)
    assert len(whole) == 3 * 2 * 2


def test_how_many_trials_there_will_be() -> None:
    order = dataclasses.replace(ORDER, rules=("linear", "none"), retune=(), seeds=20, batches=(32, 64, 128, 256))
    agenda = TrialScheduler(order, rates(order, 0.1))
    assert agenda.total([]) == 4 * 2 * 20  # though only the first seeds can be begun
    first = [trial(32, 100.0, rule="none", optimizer="", seed=seed) for seed in range(3)]
    assert agenda.total(first) == 4 * 2 * 20
    assert agenda.total([*first, trial(64, None, rule="none", optimizer="", seed=0)]) == 4 * 2 * 20 - 19  # hopeless
    assert TrialScheduler(dataclasses.replace(order, patience=None), agenda.rates).total(first) == 4 * 2 * 20
    both = dataclasses.replace(order, retune=(0.5, 1.0, 2.0))
    assert TrialScheduler(both, rates(both, 0.1)).total([]) == 4 * 2 * 20 + 4 * (3 + 19)


def test_what_is_hopeless() -> None:
    agenda = TrialScheduler(ORDER, rates(ORDER, 0.1))

    def limit(batch: int, *done: Trial) -> int:
        return agenda.limit(Job(batch=batch, rule="none", optimizer="sgd", lr=0.1, seed=0), done)

    known = trial(32, 100.0)
    assert limit(32) == 10_000
    assert limit(32, known) == limit(512, known) == 300  # no more steps than a smaller batch
    assert limit(8, known) == 1200  # no more samples than a larger one
    assert limit(32, known, trial(128, 20.0), trial(32, None)) == 240
    assert limit(32, trial(32, 100.0, optimizer="lars")) == 10_000
    assert dataclasses.replace(ORDER, patience=None).patience is None
    assert ExperimentPlan.from_json(json.loads(json.dumps(ORDER.to_json()))) == ORDER


def test_the_moment_of_crossing() -> None:
    assert LOSS.crossing((100, 0.6), (104, 0.4)) == pytest.approx(102)
    assert Target(name="accuracy", value=0.8, rises=True).crossing((10, 0.7), (20, 0.9)) == pytest.approx(15)
    assert LOSS.met(0.5)
    assert not LOSS.met(math.nan)


# --- with a throughput


def test_the_best_batch_for_so_many_processes() -> None:
    """Two processes that are twice as fast want a larger batch than one where a step has a cost of its own."""
    found = made(*(trial(batch, law(batch)) for batch in (4, 16, 64, 256)))
    step = {(ranks, batch): 0.01 + 1e-3 * batch / ranks for ranks in (1, 2, 8) for batch in (8, 16, 32, 64, 128)}
    timed = found.time_to_target({key: key[1] / seconds for key, seconds in step.items()})
    for ranks in (1, 2, 8):
        times = {batch: law(batch) * step[ranks, batch] for batch in (8, 16, 32, 64, 128)}
        assert timed.best(ranks).batch == min(times, key=times.__getitem__)
        assert timed.best(ranks).seconds == pytest.approx(min(times.values()), rel=1e-3)
    assert timed.best(8).batch > timed.best(1).batch
    assert timed.best() == timed.best(8)
    assert all(row.low < row.seconds < row.high for row in timed.rows)
    assert str(timed).count(" *") == 3 + 1  # and in the note
    assert TimeToTarget.from_json(json.loads(json.dumps(timed.to_json()))) == timed
    assert len(timed.to_frame()) == 15
    with pytest.raises(ValueError, match="throughput is known of world_size 1, 2, 8"):
        timed.best(4)


def test_throughput_in_all_its_forms() -> None:
    run = SimpleNamespace(spec=SimpleNamespace(global_batch=64, world_size=2), samples_per_sec=1900.0)
    point = SimpleNamespace(batch=64, world_size=2, samples_per_sec=1900.0)
    forms: list[Any] = [
        {(2, 64): 1900.0},
        [run],
        run,
        SimpleNamespace(points=[point]),
        [dataclasses.asdict(rates_of({(2, 64): 1900.0})[0])],
    ]
    assert {rates_of(form)[0] for form in forms} == {rates_of({2: 1900.0}, 32)[0]}
    for wrong, said in (({}, "no throughput"), ({32: math.nan}, "did that run end well"), ([5], "has no batch"), (3.0, "has no batch")):
        with pytest.raises(ValueError, match=said):
            rates_of(wrong)


# --- the picture


def test_the_picture_shows_what_was_reached_and_what_was_not() -> None:
    trials = [trial(batch, law(batch) * (1 + seed / 10), seed=seed) for batch in (4, 16, 64, 256) for seed in (0, 1)]
    found = made(*trials, trial(256, None, rule="linear", outcome="diverged", lr=3.0), trial(64, None, rule="linear", lr=1.0))
    ax = found.fitted_to([4, 16, 64]).plot()
    labels = [str(line.get_label()) for line in ax.get_lines()]
    assert labels.count("_not reached") == 1
    diverged = next(line for line in ax.get_lines() if line.get_label() == "_diverged")
    heights = [line.get_window_extent().y1 for line in ax.get_lines() if line.get_label() in ("_mark", "_not reached", "law (90 %)")]
    assert diverged.get_window_extent().y0 > max(heights), "few steps until it diverged must not look like the best"
    assert labels.count("_held out") == 1
    assert labels.count("_mark") == 3
    shown = {text.get_text() for text in ax.get_legend().get_texts()}
    assert shown == {
        "tuned",
        "linear",
        "law (90 %)",
        "perfect scaling",
        "not reached by then",
        "diverged",
        "measured",
        "predicted",
        "not used for the fit",
    }
    tuned, linear = (next(line for line in ax.get_lines() if line.get_label() == label) for label in ("_held out", "_diverged"))
    assert tuned.get_xdata()[0] < 256 < linear.get_xdata()[0], "marks at one batch lie beside each other"
    assert ax.get_ylabel() == "steps to loss 0.5"
    curve = next(line for line in ax.get_lines() if line.get_label() == "law (90 %)")
    assert curve.get_ydata()[0] == pytest.approx(found.fitted_to([4, 16, 64]).fit().steps(4), rel=1e-6)
    assert curve.get_color() not in (tuned.get_color(), linear.get_color()), "it is of the best of both"
    assert plot.steps_to_target(found, samples=True).get_ylabel() == "samples to loss 0.5"
    with pytest.raises(ValueError, match="no trial has ended yet"):
        made().plot()


def test_a_picture_without_a_law_does_not_name_what_is_dashed() -> None:
    ax = made(trial(8, 100.0), trial(8, 60.0, seed=1)).plot()  # one batch makes no law
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["tuned", "measured"]


def test_the_pictures_of_the_law_and_of_time() -> None:
    ax = CriticalBatch.fit([*(Point(batch=b, steps=s) for b, s in DIGITS.items()), Point(batch=4096, steps=50, reached=False)]).plot()
    assert [line.get_marker() for line in ax.get_lines()].count("o") == 6
    assert [line.get_marker() for line in ax.get_lines()].count("^") == 1
    assert CriticalBatch.fit({2: 100, 4: 50, 8: 25}).plot().get_ylabel() == "steps to the target"  # b_crit beyond all points
    found = made(*(trial(batch, law(batch)) for batch in (4, 16, 64, 256)))
    timed = found.time_to_target({(ranks, batch): 1000 * ranks * batch / (batch + 20) for ranks in (1, 4) for batch in (8, 32, 128)})
    ax = timed.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["1 process", "4 processes", "shortest", "predicted"]
    rings = [line for line in ax.get_lines() if line.get_label() == "_best"]
    assert [ring.get_xdata()[0] for ring in rings] == [timed.best(1).batch, timed.best(4).batch]
