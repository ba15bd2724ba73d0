"""Scaling curves as they are measured: points, repeats, what is left out and why; from runs that may differ in one knob only."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import HandMade
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, SpecError
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit
from workbench.scaling.analysis.curve.point import CurveError, ScalingPoint
from workbench.timeline.timeline import Step, Timeline

PLAYBOOK = [(8, 8 * 40149.94), (16, 16 * 37609.69), (32, 32 * 35367.61), (64, 64 * 31112.23)]
SPEC = RunSpec(task="text-gpt", micro_batch=8, steps=20, device="cpu")
Made = Callable[..., HandMade]


def run(by_hand: Made, spec: RunSpec | ScriptSpec, rate: float = 1.0, **info: Any) -> Run:
    """A run whose every rank is `rate` times as fast as the usual step by hand."""
    made = by_hand(spec=spec.to_json(), **info)
    for rank in range(spec.nproc_per_node):
        made.steps(20, rank, data_wait=0.0, forward=0.01 / rate, backward=0.02 / rate, optimizer=0.0, other=0.0)
    return Run.load(made.ended("finished").path)


# --- by hand


def test_speedup_and_efficiency_are_relative_to_the_smallest_point() -> None:
    curve = ScalingCurve(PLAYBOOK)
    assert curve.world_sizes == [8, 16, 32, 64]
    assert curve.speedup[-1] == pytest.approx(8 * 31112.23 / 40149.94)
    assert curve.efficiency == pytest.approx([1, 0.93673, 0.88089, 0.77490], abs=1e-5)
    assert curve.base is not None
    assert curve.base.world_size == 8


@given(st.permutations(PLAYBOOK))
def test_order_is_irrelevant(points: list[tuple[int, float]]) -> None:
    assert ScalingCurve(points) == ScalingCurve(PLAYBOOK)


@given(st.lists(st.floats(90, 110), min_size=2, max_size=12))
@settings(max_examples=30)
def test_repeats_make_one_point_inside_its_interval(rates: list[float]) -> None:
    (point,) = ScalingCurve([(4, rate) for rate in rates]).points
    assert point.rates == tuple(sorted(rates))
    assert min(rates) * 0.999 <= point.samples_per_sec <= max(rates) * 1.001
    assert point.low <= point.samples_per_sec <= point.high
    assert point.per_process == pytest.approx(point.samples_per_sec / 4)


def test_the_interval_of_repeats_is_student_s() -> None:
    point = ScalingPoint(world_size=1, rates=(math.exp(-0.1), 1.0, math.exp(0.1)))
    assert point.spread == pytest.approx(0.1)
    assert point.high == pytest.approx(math.exp(2.920 * 0.1 / math.sqrt(3)))
    single = ScalingPoint(world_size=1, rates=(1.0,))
    assert math.isnan(single.low)
    assert single.spread is None


@pytest.mark.parametrize(("count", "quantile"), [(6, 2.015), (8, 1.895), (9, 1.860), (10, 1.833), (11, 1.812), (31, 1.697)])
def test_more_repeats_have_the_quantiles_of_the_tables(count: int, quantile: float) -> None:
    rates = tuple(math.exp((-1) ** i * 0.01 * (i < count - count % 2)) for i in range(count))
    point = ScalingPoint(world_size=1, rates=rates)
    assert point.spread is not None
    assert math.log(point.high / point.samples_per_sec) == pytest.approx(quantile * point.spread / math.sqrt(count), rel=1e-3)


def test_oversubscribed_points_are_labelled_and_left_out() -> None:
    curve = ScalingCurve([(1, 100), (2, 190), (4, 200)], slots=2)
    assert [point.oversubscribed for point in curve.points] == [False, False, True]
    assert [point.world_size for point in curve.usable] == [1, 2]
    assert "oversubscribed: no scaling" in str(curve)
    by_itself = ScalingCurve([(1, 100), ScalingPoint(world_size=4, rates=(200.0,), oversubscribed=True)])
    assert len(by_itself.usable) == 1


def test_a_failed_point_is_kept_and_shown() -> None:
    curve = ScalingCurve([(1, 100), ScalingPoint(world_size=2, failed="out of memory"), (4, 370)])
    assert math.isnan(curve.samples_per_sec[1])
    assert [point.world_size for point in curve.usable] == [1, 4]
    assert "failed: out of memory" in str(curve)
    half = ScalingCurve([(2, 190), ScalingPoint(world_size=2, failed="node lost")])
    assert half.points[0].usable
    assert "a repeat failed: node lost" in str(half)


def test_faces_agree_and_json_is_exact() -> None:
    curve = ScalingCurve([(1, 100, 0.0), (2, 190, 0.04), (2, 192, 0.06), ScalingPoint(world_size=8, failed="x")], kind="strong", slots=4)
    again = ScalingCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again == curve
    assert str(again) == str(curve)
    for cell in curve.table.rows[1]:
        assert str(cell) in curve._repr_html_()
    frame = curve.to_frame()
    assert list(frame["world_size"]) == [1, 2, 8]
    assert frame["exposed"][1] in (0.04, 0.06)
    assert frame["oversubscribed"][2]
    assert repr(curve) == "ScalingCurve(strong, 1, 2, 8 processes)"
    assert len(curve) == 3


def test_what_is_counted_stands_beside_every_rate() -> None:
    curve = ScalingCurve([(1, 100.0), (1, 101.0), (2, 190.0)], unit="tokens")
    again = ScalingCurve.from_json(json.loads(json.dumps(curve.to_json())))
    fit = CurveFit.from_json(json.loads(json.dumps(curve.fit().to_json())))
    for text in (str(again), str(fit), str(fit.predict(4)), repr(fit.predict(4)), fit.plot().get_ylabel()):
        assert "tokens/s" in text
        assert "samples/s" not in text
    assert "samples/s" in str(ScalingCurve([(1, 100.0), (2, 190.0)]).fit().predict(4))


def test_numbers_of_numpy_become_plain() -> None:
    plain = ScalingCurve([(1, 100, 0.25), (2, 190.5)], slots=4)
    points: list[Any] = [(np.int64(1), np.int32(100), np.float32(0.25)), (np.float64(2), np.float32(190.5))]
    found = ScalingCurve(points, slots=np.int64(4))  # type: ignore[arg-type]
    assert found == plain
    assert json.dumps(found.to_json()) == json.dumps(plain.to_json())
    assert ScalingCurve(np.array([[1, 100], [2, 190.5]])) == ScalingCurve([(1, 100), (2, 190.5)])  # type: ignore[arg-type]


def test_a_frame_makes_a_curve() -> None:
    curve = ScalingCurve([(1, 100, 0.1), (2, 190), ScalingPoint(world_size=4, failed="out of memory"), (8, 200)], slots=4)
    again = ScalingCurve(curve.to_frame())
    assert again.samples_per_sec == pytest.approx(curve.samples_per_sec, nan_ok=True)
    for name in ("world_size", "exposed", "oversubscribed", "failed"):
        assert [getattr(point, name) for point in again.points] == [getattr(point, name) for point in curve.points]
    assert ScalingCurve([{"world_size": 1, "samples_per_sec": 100}, (2, 190)]) == ScalingCurve([(1, 100), (2, 190)])


@pytest.mark.parametrize(
    ("points", "options", "said"),
    [
        ([], {}, "a curve of no points"),
        ([(4, 100, 0.1, 3)], {}, r"point 0, .* give \(world_size, samples_per_sec\).*repeats are several rows"),
        (
            [(1, [100, 101])],
            {},
            r"point 0, \(1, \[100, 101\]\): give one throughput per row; repeats are several rows: \(1, 100\), \(1, 101\)",
        ),
        ([(1, 9), {"world_size": 2, "samples_per_sec": (5, 6)}], {}, r"point 1, .*several rows: \(2, 5\), \(2, 6\)"),
        ([7], {}, "point 0, 7"),
        ([{"n": 4, "samples_per_sec": 1}], {}, r"point 0, \{'n': 4.*a mapping with these names"),
        ([{"world_size": 4, "samples_per_sec": math.nan}], {}, "nan samples/s with 4 processes"),
        ([(4, 100, "half")], {}, "exposed='half' with 4 processes: the share"),
        ("1,2", {}, "a list of"),
        (3, {}, "a list of"),
        ([(0, 100)], {}, "0 processes: a whole number of at least 1"),
        ([(1.5, 100)], {}, "1.5 processes"),
        ([(True, 100)], {}, "True processes"),
        ([(4, 0)], {}, "0 samples/s with 4 processes: a finite number above 0"),
        ([(4, math.nan)], {}, "nan samples/s"),
        ([(4, "fast")], {}, "'fast' samples/s"),
        ([(4, 100, 7.0)], {}, "exposed=7.0 with 4 processes: the share"),
        ([(4, 100), (4, 900)], {}, "the points of 4 processes contradict each other: 100 and 900"),
        ([(4, 100)], {"kind": "wek"}, "kind='wek': allowed are"),
        ([(4, 100)], {"slots": 0}, "0 processes"),
        ([(4, 100)], {"unit": ""}, "unit='': a word for what is counted"),
    ],
)
def test_bad_points(points: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CurveError, match=said):
        ScalingCurve(points, **options)


# --- from runs


def test_runs_of_one_micro_batch_are_weak_scaling(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(nproc_per_node=n), rate) for n, rate in ((2, 0.9), (1, 1.0), (1, 1.1))]
    curve = ScalingCurve.from_runs(runs, slots=2, exposed={2: 0.08})
    assert curve.kind == "weak"
    assert [len(point.rates) for point in curve.points] == [2, 1]
    assert curve.samples_per_sec == pytest.approx([8 / 0.03 * math.sqrt(1.1), 2 * 8 / 0.03 * 0.9])
    assert curve.points[1].exposed == 0.08


def test_runs_of_one_global_batch_are_strong_scaling(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(nproc_per_node=n, micro_batch=8 // n)) for n in (1, 2, 4)]
    assert ScalingCurve.from_runs(runs, slots=4).kind == "strong"


def test_more_ranks_than_cores_of_the_runs_machine(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(nproc_per_node=n), cores=2) for n in (1, 2, 4)]
    curve = ScalingCurve.from_runs(runs)
    assert curve.slots == 2
    assert [point.oversubscribed for point in curve.points] == [False, False, True]


def test_cores_that_no_run_knows_of(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(nproc_per_node=n)) for n in (1, 2)]
    curve = ScalingCurve.from_runs(runs)
    assert curve.slots is None
    assert "how many cores there were is not known" in str(curve)


def test_a_failed_run_stays_on_the_curve(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC), run(by_hand, SPEC.replace(nproc_per_node=2))]
    lost = by_hand(spec=SPEC.replace(nproc_per_node=4).to_json()).ended("failed")
    unwatched = by_hand(spec=SPEC.replace(nproc_per_node=8).to_json()).ended("finished")
    curve = ScalingCurve.from_runs([*runs, Run.load(lost.path), Run.load(unwatched.path)], slots=8)
    assert curve.world_sizes == [1, 2, 4, 8]
    assert curve.points[2].failed
    assert "no measured step" in curve.points[3].failed
    assert len(curve.usable) == 2


@pytest.mark.parametrize(
    ("changes", "info", "said"),
    [
        ({"precision": "amp_bf16"}, {}, "the runs differ in precision, 'fp32' and 'amp_bf16'"),
        ({"seed": 1, "lr": 0.1}, {}, r"the runs differ in lr \(and in seed\)"),
        ({"micro_batch": 5}, {}, "differ in micro_batch.*for strong scaling"),
        ({}, {"host": "elsewhere"}, "the runs differ in host"),
        ({}, {"versions": {"torch": "1.0"}}, "the runs differ in torch, None and '1.0'"),
    ],
)
def test_runs_that_differ_in_more_are_refused(by_hand: Made, changes: dict[str, Any], info: dict[str, Any], said: str) -> None:
    runs = [run(by_hand, SPEC), run(by_hand, SPEC.replace(nproc_per_node=2, **changes), **info)]
    with pytest.raises(CurveError, match=said):
        ScalingCurve.from_runs(runs)


def test_what_is_no_run_is_refused(by_hand: Made) -> None:
    alive = Run.load(by_hand(spec=SPEC.to_json()).alive().path)
    script = run(by_hand, ScriptSpec(script="train.py", watch=True))
    for runs, said in (
        ([], "got no runs"),
        (["runs/1"], "got a str"),
        ([alive], "still runs"),
        ([run(by_hand, SPEC), script], "a task and a script"),
    ):
        with pytest.raises(CurveError, match=said):
            ScalingCurve.from_runs(runs)  # type: ignore[arg-type]
    with pytest.raises(CurveError, match="exposed has an entry for 7 processes"):
        ScalingCurve.from_runs([run(by_hand, SPEC)], exposed={7: 0.1})


# --- over any knob


def test_runs_that_differ_in_any_one_knob_make_a_curve(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(micro_batch=n), rate, cores=2) for n, rate in ((16, 1.5), (8, 1.0), (8, 1.1))]
    curve = ScalingCurve.from_runs(runs, over="micro_batch", exposed={16: 0.1})
    assert curve.values == [8, 16]
    assert [len(point.rates) for point in curve.points] == [2, 1]
    assert curve.points[1].exposed == 0.1
    assert curve.best == 16
    assert repr(curve) == "ScalingCurve(micro_batch: 8, 16)"
    for words in ("Throughput by micro_batch", "speedup: over micro_batch=8"):
        assert words in str(curve)
    assert ScalingCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve
    assert list(curve.to_frame()["value"]) == [8, 16]


def test_values_that_are_texts_keep_their_order(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(precision=name)) for name in ("fp32", "amp_bf16")]
    assert ScalingCurve.from_runs(runs, over="precision", slots=2).values == ["fp32", "amp_bf16"]
    assert ScalingCurve.from_runs(runs[:1], over="gc", slots=2).values == ["True"]


def test_a_curve_over_a_knob_names_other_differences_and_has_no_law(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(micro_batch=n)) for n in (8, 16)]
    with pytest.raises(CurveError, match="differ in seed, 0 and 1: a curve is of runs that differ in micro_batch alone"):
        ScalingCurve.from_runs([*runs, run(by_hand, SPEC.replace(seed=1))], over="micro_batch")
    with pytest.raises(CurveError, match="differ in micro_batch, 8 and 16: a curve is of runs that differ in threads alone"):
        ScalingCurve.from_runs(runs, over="threads")
    with pytest.raises(CurveError, match="exposed has an entry for micro_batch=7, and no run has it"):
        ScalingCurve.from_runs(runs, over="micro_batch", exposed={7: 0.1})
    with pytest.raises(SpecError, match="no knob 'batch'"):
        ScalingCurve.from_runs(runs, over="batch")
    with pytest.raises(CurveError, match=r"a curve over micro_batch has no law .* measured value is 8"):
        ScalingCurve.from_runs(runs, over="micro_batch").fit()


def test_threads_count_where_cores_do(by_hand: Made) -> None:
    runs = [run(by_hand, SPEC.replace(nproc_per_node=n, threads=2), cores=4) for n in (1, 2, 3)]
    assert [point.oversubscribed for point in ScalingCurve.from_runs(runs).points] == [False, False, True]


def test_repeats_of_one_spec_may_lie_far_apart_and_say_so(by_hand: Made) -> None:
    curve = ScalingCurve.from_runs([run(by_hand, SPEC, rate) for rate in (1.0, 2.5)], slots=2)
    assert "repeats lie more than a factor of 2 apart" in str(curve)
    assert curve.points[0].usable


def test_who_is_late_before_the_reduction_keeps_the_others_waiting(by_hand: Made) -> None:
    made = by_hand(spec=SPEC.replace(nproc_per_node=2).to_json())
    for rank, wait in enumerate((0.0, 0.02)):  # the other one's backward is longer by what it waits
        made.steps(20, rank, data_wait=wait, forward=0.01, backward=0.05 - wait, optimizer=0.0, other=0.0)
    late = Run.load(made.ended("finished").path)
    (point,) = ScalingCurve.from_runs([late], slots=2).points
    assert point.straggling == pytest.approx(0.01 / 0.06)
    (alone,) = ScalingCurve.from_runs([run(by_hand, SPEC)], slots=2).points
    assert alone.straggling is None
    assert "17 %" in str(ScalingCurve([point]))


def test_cpu_seconds_per_sample_are_those_of_all_processes() -> None:
    steps = tuple(
        Step(index=i, phases=(0.1,) * 6, samples=4, cpu=cpu) for i, cpu in enumerate((None, 1.0, None, None, 2.0, None, 5.0, None))
    )
    assert Timeline(steps=steps, warmup=2).cpu_per_sample == pytest.approx(4.0 / 20)  # from the last step of the warm-up on
    assert math.isnan(Timeline(steps=steps[:4]).cpu_per_sample)
    again = Timeline.from_json(json.loads(json.dumps(Timeline(steps=steps).to_json())))
    assert again.steps == steps
