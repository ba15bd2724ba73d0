"""Fits of scaling curves: laws are found again exactly, units and order do not matter, the naive line stands beside every prediction."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.scaling.analysis.curve import fit as curve_fit
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveFit, CurveForecast
from workbench.scaling.analysis.curve.forms import BUBBLE, COMMUNICATION, LINEAR, NAIVE, OVERLAP, SHARDED, Data, How, Kind, at, forms
from workbench.scaling.analysis.curve.point import CurveError, ScalingPoint

SIZES = (1, 2, 4, 8, 16)
positive = st.floats(0.5, 2)
small = st.floats(0, 0.05)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_fit, "DRAWS", 40)


def of_law(time: Callable[[float], float], sizes: tuple[int, ...] = SIZES, kind: Kind = "weak") -> ScalingCurve:
    """The curve of a law: seconds per sample and process."""
    return ScalingCurve([(n, n / time(n)) for n in sizes], kind=kind)


def by_form(curve: ScalingCurve, name: str, n: int) -> float:
    (form,) = [one for one in forms(curve.kind) if one.name == name]
    return at(form.fit(curve_fit.data_of(curve.usable, curve_fit.ASSUMED_NOISE)), n)


# --- each law is found again


@given(positive, small)
@settings(max_examples=30, deadline=None)
def test_laws_of_weak_scaling_are_recovered(a: float, b: float) -> None:
    laws: dict[str, Callable[[float], float]] = {
        LINEAR: lambda n: a + b * (n - 1),
        "logarithm": lambda n: a + b * math.log2(n),
        "power law": lambda n: a * n**b,
        "USL": lambda n: a + b * (n - 1) + b / 10 * n * (n - 1),
    }
    for name, time in laws.items():
        assert by_form(of_law(time), name, 64) == pytest.approx(64 / time(64), rel=1e-6), name


@given(positive, small)
@settings(max_examples=30, deadline=None)
def test_laws_of_strong_scaling_are_recovered(a: float, c: float) -> None:
    laws: dict[str, Callable[[float], float]] = {LINEAR: lambda n: a / n + c, "logarithm": lambda n: a / n + c * math.log2(n)}
    for name, step in laws.items():
        curve = ScalingCurve([(n, 1 / step(n)) for n in SIZES], kind="strong")
        assert by_form(curve, name, 64) == pytest.approx(1 / step(64), rel=1e-6), name


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_communication_that_was_measured_is_all_that_is_extrapolated(kind: Kind) -> None:
    def waiting(n: float) -> float:
        return (0.1 * (1 - 1 / n) + 0.001 * (n - 1)) * (n if kind == "strong" else 1)

    points = [(n, n / (1 + waiting(n)), waiting(n) / (1 + waiting(n))) for n in SIZES]
    assert by_form(ScalingCurve(points, kind=kind), COMMUNICATION, 64) == pytest.approx(64 / (1 + waiting(64)), rel=1e-6)
    assert COMMUNICATION in ScalingCurve(points, kind=kind).fit().predict(64).by_form
    assert COMMUNICATION not in of_law(lambda n: 1.0).fit().predict(64).by_form


def test_perfect_scaling_is_foretold_as_such() -> None:
    found = of_law(lambda n: 0.5).fit().predict(1024)
    assert found.mid == pytest.approx(2048)
    assert found.naive == pytest.approx(2048)
    assert found.efficiency == pytest.approx(1)


def test_an_outlier_moves_the_robust_fit_less_than_least_squares_would() -> None:
    sizes = np.array([1.0, 2, 4, 8, 16, 32])
    times = 1 + 0.01 * (sizes - 1)
    times[3] *= 1.25
    (form,) = [one for one in forms("weak") if one.name == LINEAR]
    robust, plain = (at(form.fit(Data(sizes=sizes, times=times, exposed=np.full(6, math.nan), noise=noise)), 64) for noise in (0.01, 10.0))
    truth = 64 / 1.63
    assert abs(robust / truth - 1) < 0.5 * abs(plain / truth - 1)


@given(st.lists(st.floats(0.8, 1.25), min_size=2, max_size=6), st.integers(5, 12))
@settings(max_examples=25, deadline=None)
def test_no_law_lets_a_process_gain_from_company(times: list[float], power: int) -> None:
    curve = ScalingCurve([(2**i, 2**i / time) for i, time in enumerate(times)])
    data = curve_fit.data_of(curve.usable, 0.02)
    for form in forms("weak"):
        if form.fits(data):
            law = form.fit(data)
            assert at(law, 2**power) <= 2 * at(law, 2 ** (power - 1)) * (1 + 1e-9)


# --- the ensemble


@given(st.floats(1e-3, 1e9))
@settings(max_examples=15, deadline=None)
def test_units_do_not_matter(scale: float) -> None:
    points = [(8, 40150.0), (16, 75220.0), (32, 141470.0)]
    one, other = (ScalingCurve([(n, factor * rate) for n, rate in points]).fit().predict(64) for factor in (1, scale))
    for name in ("low", "mid", "high", "naive", "linear"):
        assert getattr(other, name) == pytest.approx(scale * getattr(one, name), rel=1e-6), name
    assert other.efficiency == pytest.approx(one.efficiency)


@given(st.permutations([(1, 100.0), (2, 190.0), (2, 194.0), (4, 360.0), (8, 650.0)]))
@settings(max_examples=10, deadline=None)
def test_order_is_irrelevant(points: list[tuple[int, float]]) -> None:
    assert ScalingCurve(points).fit().predict(32) == ScalingCurve(sorted(points)).fit().predict(32)


@given(st.floats(0, 0.1), st.floats(0, 0.1), st.integers(0, 4))
@settings(max_examples=25, deadline=None)
def test_the_middle_lies_inside_and_the_naive_line_is_the_last_point(b: float, c: float, doublings: int) -> None:
    curve = of_law(lambda n: 1 + b * math.log2(n) + c * (n - 1), SIZES[:4])
    n = 8 * 2**doublings
    found = curve.fit().predict(n)
    assert found.low <= found.mid <= found.high
    assert found.mid in found
    assert found.naive == pytest.approx(n * curve.points[-1].per_process)
    assert found.linear <= found.naive * 1.05  # it need not pass through the last point
    assert found.extrapolation == n / 8


def test_the_interval_grows_with_the_distance() -> None:
    fit = of_law(lambda n: 1 + 0.05 * math.log2(n)).fit()
    widths = [fit.predict(n).width for n in (16, 64, 256, 1024)]
    assert widths == sorted(widths)


def test_each_law_is_scored_on_the_last_point_by_the_others() -> None:
    fit = of_law(lambda n: 1 + 0.02 * (n - 1)).fit()
    errors = {one.form.name: one.error for one in fit.fitted}
    assert errors[LINEAR] == pytest.approx(0, abs=1e-9)
    assert errors[NAIVE] == pytest.approx(1.30 / 1.14 - 1)  # the times of 16 and of 8 processes
    assert fit.best is not None
    assert abs(fit.best.error) < 1e-9
    weights = {one.form.name: one.weight for one in fit.fitted}
    assert sum(weights.values()) == pytest.approx(1)
    assert weights[LINEAR] > 5 * weights[NAIVE]


def test_two_points_try_no_law_and_say_so() -> None:
    fit = ScalingCurve([(1, 100), (2, 190)]).fit()
    assert fit.best is None
    assert [one.weight for one in fit.fitted] == pytest.approx([1 / len(fit.fitted)] * len(fit.fitted))
    assert any("none could be tried" in note for note in fit.predict(4).notes)


@pytest.mark.parametrize(
    ("last", "said", "rises"),
    [(190, "4 of ", False), (200, "every law passes", False), (202, "no law passes", False), (210, "no law passes", True)],
)
def test_what_is_said_of_two_points_is_true(last: float, said: str, rises: bool) -> None:
    fit = ScalingCurve([(1, 100), (2, last)]).fit()
    notes = fit.predict(4).notes
    assert any(note.startswith(f"two points: {said}".replace("4 of ", "3 of 4 laws pass")) for note in notes)
    assert any("rises with their number" in note for note in notes) is rises


def test_where_the_noise_is_from_is_said() -> None:
    curve = ScalingCurve([(1, 100), (2, 190), (4, 360)])
    assumed, told = curve.fit(), curve.fit(noise=0.01)
    assert "assumed: no point was measured twice" in str(assumed)
    assert "(as given)" in str(told)
    for fit in (assumed, told, curve.fit(noise=np.float32(0.01))):  # type: ignore[arg-type]
        again = CurveFit.from_json(json.loads(json.dumps(fit.to_json())))
        assert (again.noise, again.noise_source) == (fit.noise, fit.noise_source)
    for size in (4, 16):
        assert any("the noise is an assumption" in one for one in assumed.predict(size).narrow)
        assert not any("the noise is an assumption" in one for one in told.predict(size).narrow)


def test_the_formulas_are_of_the_kind() -> None:
    weak, strong = (of_law(lambda n: 1 + 0.01 * n, kind=kind).fit() for kind in ("weak", "strong"))
    assert "time per sample and process" in str(weak)
    assert "a + b log₂ n" in str(weak)
    assert "time per sample and process" not in str(strong)
    assert all(words in str(strong) for words in ("time of a step", "a/n + c", "a/n + b log₂ n", "a nᵇ/n", "n(n−1))/n"))
    (form,) = [one for one in forms("strong") if one.name == COMMUNICATION]
    assert form.words.startswith("compute/n + b(1−1/n) + c(n−1)")


def test_numbers_of_numpy_are_taken() -> None:
    fit = ScalingCurve([(1, 100), (2, 190)]).fit()
    assert fit.predict(np.int64(4)) == fit.predict(4)  # type: ignore[arg-type]
    assert json.dumps(fit.predict(np.int64(4)).to_json())  # type: ignore[arg-type]


def test_noise_is_what_repeats_tell() -> None:
    points = [(n, n * 100 * factor) for n in (1, 2, 4) for factor in (0.97, 1.0, 1.03)]
    fit = ScalingCurve(points).fit()
    assert fit.measured_noise
    assert fit.noise == pytest.approx(0.03, rel=0.01)
    assert ScalingCurve([(1, 100), (1, 100), (2, 200)]).fit().noise == curve_fit.MIN_NOISE
    assert not ScalingCurve([(1, 100), (2, 200)]).fit().measured_noise
    quiet, loud = (ScalingCurve([(1, 100), (2, 200), (4, 400)]).fit(noise=noise).predict(8).width for noise in (0.01, 0.05))
    assert loud > 3 * quiet


def test_oversubscribed_and_failed_points_are_not_fitted() -> None:
    curve = ScalingCurve([(1, 100), (2, 190), (4, 10)], slots=2)
    assert curve.fit().predict(8).naive == pytest.approx(8 * 95)


def test_a_prediction_says_what_would_narrow_it() -> None:
    steep = ScalingCurve([(8, 40150), (16, 75220), (32, 141470)]).fit()
    advice = steep.predict(256).narrow
    assert advice[0].startswith("measure 64 processes: the laws lie")
    assert any("exposed communication" in one for one in advice)
    assert any("repeat" in one for one in advice)
    assert not any("processes: the laws" in one for one in steep.predict(64).narrow)  # that would be to measure what is asked
    half = ScalingCurve([(1, 100, 0.0), (2, 190, 0.05)]).fit().predict(8)
    assert any("two or more numbers of processes" in one for one in half.narrow)
    two = ScalingCurve([(1, 100), (2, 190)]).fit().predict(4)
    assert two.narrow[0].startswith("measure a third number of processes")
    inside = ScalingCurve([(n, n * 100 * f) for n in (1, 2, 4) for f in (0.99, 1.01)]).fit().predict(4)
    assert inside.narrow == ()
    flat = ScalingCurve([(n, n * 100 * f) for n in (1, 2, 4) for f in (0.99, 1.01)]).fit().predict(8).narrow
    assert any("noise is most of the interval" in one for one in flat)


def test_far_predictions_and_rising_curves_are_warned_about() -> None:
    fit = ScalingCurve([(8, 8 * 63147), (16, 16 * 68551), (32, 32 * 67971)]).fit()
    assert any("far outside" in note for note in fit.predict(256).notes)
    assert any("rises" in note for note in fit.predict(64).notes)
    assert not any("far outside" in note for note in fit.predict(64).notes)
    on_two = ScalingCurve([(1, 100), (2, 190)], slots=2).fit()
    for fit in (on_two, CurveFit.from_json(json.loads(json.dumps(on_two.to_json())))):
        assert "assumes machines with a core (or GPU) for each of 4 processes; the measured one has 2" in fit.predict(4).notes
        assert not any("for machines" in note for note in fit.predict(2).notes)
    per_process = ScalingCurve([(8, 40150), (16, 37610), (32, 35370)]).fit()
    assert any("if these are rates per process" in note for note in per_process.predict(64).notes)


def test_faces_and_json() -> None:
    fit = of_law(lambda n: 1 + 0.02 * (n - 1)).fit()
    again = CurveFit.from_json(json.loads(json.dumps(fit.to_json())))
    found = fit.predict(64)
    assert again.predict(64) == found
    assert CurveForecast.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "naive: as the last point" in str(found)
    assert "assumed: no point was measured twice" in fit._repr_html_()
    assert list(found.to_frame()["world_size"]) == [64]
    assert len(fit.to_frame()) == len(fit.fitted)
    assert str(found.table.rows[0][1]) in found._repr_html_()
    assert repr(found).startswith("CurveForecast(64, low=")
    assert repr(fit) == "CurveFit(weak, 5 points, 5 laws)"
    measured = ScalingCurve([(1, 100), (1, 102), (2, 190)]).fit()
    assert CurveFit.from_json(measured.to_json()).measured_noise


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: ScalingCurve([(4, 100)]).fit(), r"a curve of one point \(4 processes.*Measure 8 processes as well"),
        (
            lambda: ScalingCurve(
                [(4, 100)], notes=("the budget of 1 min was spent after 1 of 6 trainings: resume='runs/x' goes on",)
            ).fit(),
            "the curve has 1 so far: the budget of 1 min was spent after 1 of 6 trainings: resume='runs/x' goes on$",
        ),
        (lambda: ScalingCurve([(4, 100), (8, 200)], slots=2).fit(), "no usable point"),
        (lambda: ScalingCurve([(1, 100), (2, 190), (4, 1000)]).fit(), "contradict each other: 2 processes reach 190"),
        (lambda: ScalingCurve([(1, 100), (2, 190)]).fit(level=90), "level=90: a fraction"),
        (lambda: ScalingCurve([(1, 100), (2, 190)]).fit(noise=-1), "noise=-1: a fraction"),
        (lambda: ScalingCurve([(1, 100), (2, 190)]).fit().predict(0), "0 processes: a whole number of at least 1"),
        (lambda: ScalingCurve([(1, 100), (2, 190)]).fit().predict(2.5), "2.5 processes"),  # type: ignore[arg-type]
    ],
)
def test_clear_errors(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(CurveError, match=said):
        ask()


# --- laws with a mechanism


@given(st.integers(1, 64), st.integers(1, 4), st.floats(1e-3, 10))
@settings(max_examples=30)
def test_a_pipeline_s_bubble_is_foretold_from_its_micro_batches(micro_batches: int, chunks: int, seconds: float) -> None:
    m = micro_batches * chunks
    points = [(n, n / (seconds * (1 + (n - 1) / m))) for n in (2, 4, 8)]
    fit = ScalingCurve(points, grows=How(pipeline=m)).fit()
    said = fit.predict(32).by_form[BUBBLE]
    assert said == pytest.approx(32 / (seconds * (1 + 31 / m)))
    assert fit.best is not None
    assert abs({one.form.name: one.error for one in fit.fitted}[BUBBLE]) < 1e-9
    assert CurveFit.from_json(fit.to_json()).predict(32) == fit.predict(32)
    assert BUBBLE not in ScalingCurve(points).fit().predict(32).by_form


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_weights_that_are_gathered_bound_the_step_or_do_not(kind: Kind) -> None:
    def t(n: float, compute: float, gather: float, late: float) -> float:
        per_step = n if kind == "strong" else 1
        return max(compute, per_step * gather * (1 - 1 / n)) + per_step * late * (n - 1)

    for compute, gather in ((1.0, 0.1), (0.2, 1.0)):
        points = [(n, n / t(n, compute, gather, 0.001)) for n in (1, 2, 4, 8, 16)]
        said = ScalingCurve(points, kind=kind, grows=How(sharded=True)).fit().predict(32).by_form[SHARDED]
        if kind == "weak" or gather > compute:
            assert said == pytest.approx(32 / t(32, compute, gather, 0.001), rel=1e-6)


def test_what_buckets_hide_comes_out_when_there_is_more_to_send() -> None:
    def t(n: int) -> tuple[float, float]:
        sent = 0.2 * (1 - 1 / n) + 0.01 * (n - 1)
        out = max(0.0, sent - 0.15)
        return 1 + out, out / (1 + out)

    points = [(n, n / t(n)[0], t(n)[1]) for n in (1, 2, 4, 8, 16)]
    fit = ScalingCurve(points).fit()
    assert fit.predict(64).by_form[OVERLAP] == pytest.approx(64 / t(64)[0], rel=1e-6)
    few = ScalingCurve(points[:4]).fit()
    assert OVERLAP not in few.predict(64).by_form  # two points on which something shows: not enough for three numbers


@pytest.mark.parametrize(("options", "said"), [({"pipeline": 0}, "pipeline=0: the micro-batches"), ({"sharded": 1}, "sharded=1: True or")])
def test_what_processes_do_is_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CurveError, match=said):
        How(**options)


def test_more_that_do_less_are_explained_by_what_is_known() -> None:
    slower = [ScalingPoint(world_size=n, rates=(rate,), of_one_spec=True) for n, rate in ((1, 100.0), (2, 60.0))]
    assert "costs more than they bring" in str(ScalingCurve(slower).fit().predict(4))
    assert "multiply them by their number" in str(ScalingCurve([(1, 100), (2, 60)]).fit().predict(4))


def test_a_number_too_large_to_read_is_said_with_a_prefix() -> None:
    fit = ScalingCurve([(1, 100.0), (2, 190.0), (4, 350.0)]).fit()
    shown = [str(fit.predict(size)).splitlines()[0] for size in (999_999, 12_000_000, 10**30)]
    assert shown == ["999,999 processes", "12.0 M processes", "1.00e+30 processes"]
    assert "000,000" not in str(fit.predict(10**30))
