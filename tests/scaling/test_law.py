"""Laws of scale: exact on exact points, honest on noisy ones, and what is refused or doubted."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.core import units
from workbench.scaling.analysis.law import identifiability
from workbench.scaling.analysis.law.fit import Columns, best, exponent, losses, misfit, optimum
from workbench.scaling.analysis.law.forecast import Allocation, Forecast, HeldOut
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.scaling.analysis.law.points import Points, PointsError, read_points

TRUE = (1.8, 480.0, 2100.0, 0.35, 0.37)
SIZES = (1e6, 3e6, 1e7, 3e7, 1e8)
AMOUNTS = (2e7, 6e7, 2e8, 6e8, 2e9)


def points(
    law: Any = TRUE, noise: float = 0.0, seed: int = 0, sizes: Any = SIZES, amounts: Any = AMOUNTS
) -> list[tuple[float, float, float]]:
    """Runs of every size on every amount of data, each off by a random factor."""
    rng = np.random.default_rng(seed)
    return [(n, d, float(losses(law, n, d)) * math.exp(rng.normal(0, noise))) for n, d in itertools.product(sizes, amounts)]


@pytest.fixture(scope="module")
def noisy() -> ScalingLaw:
    return ScalingLaw.fit(points(noise=0.004), draws=40)


# --- the fit


@settings(max_examples=15, deadline=None)
@given(
    e=st.floats(0.3, 3),
    size=st.floats(0.1, 2),
    data=st.floats(0.1, 2),
    alpha=st.floats(0.2, 0.9),
    beta=st.floats(0.2, 0.9),
    unit=st.sampled_from([1.0, 1e4]),
)
def test_exact_points_give_the_law_back(e: float, size: float, data: float, alpha: float, beta: float, unit: float) -> None:
    law = (e, size * (unit * 1e7) ** alpha, data * (unit * 2e8) ** beta, alpha, beta)
    rows = points(law, sizes=[unit * n for n in SIZES], amounts=[unit * d for d in AMOUNTS])
    found = ScalingLaw.fit(rows, draws=0)
    assert found.five == pytest.approx(law, rel=1e-3)
    assert max(map(abs, found.residuals)) < 1e-6


def test_the_gradient_is_that_of_the_misfit() -> None:
    columns = Columns.of(*zip(*points(noise=0.01), strict=True))
    at = np.array([0.1, -0.2, 0.5, 0.3, 0.6])
    value, slope = misfit(at, columns)
    for i, step in enumerate(np.eye(5) * 1e-7):
        assert (misfit(at + step, columns)[0] - value) / 1e-7 == pytest.approx(slope[i], rel=1e-3)


def test_it_is_a_sum_so_more_points_weigh_more() -> None:
    rows = points(noise=0.01)
    once, twice = Columns.of(*zip(*rows, strict=True)), Columns.of(*zip(*rows, *rows, strict=True))
    at = np.array([0.1, -0.2, 0.5, 0.3, 0.6])
    assert misfit(at, twice)[0] == pytest.approx(2 * misfit(at, once)[0])


def test_more_starts_find_nothing_better() -> None:
    columns = Columns.of(*zip(*points(noise=0.004, seed=5), strict=True))
    assert misfit(best(columns), columns)[0] == pytest.approx(misfit(best(columns, starts=64), columns)[0], rel=1e-6)


def test_one_run_that_went_wrong_does_not_move_it() -> None:
    rows = points(noise=0.001, seed=3)
    spoilt = [*rows[:7], (rows[7][0], rows[7][1], 1.3 * rows[7][2]), *rows[8:]]
    clean, robust = ScalingLaw.fit(rows, draws=0), ScalingLaw.fit(spoilt, draws=0)
    assert robust.five[3:] == pytest.approx(clean.five[3:], rel=0.05)
    assert robust.residuals[7] == pytest.approx(math.log(1.3), abs=0.01)


def test_the_same_points_give_the_same_law() -> None:
    assert ScalingLaw.fit(points(noise=0.01), draws=5) == ScalingLaw.fit(points(noise=0.01), draws=5)


# --- intervals


@pytest.mark.slow
def test_intervals_cover_the_truth() -> None:
    trials, covered, new = 14, np.zeros(7), 0
    for seed in range(trials):
        law = ScalingLaw.fit(points(noise=0.005, seed=seed), draws=24)
        bands = [*law.intervals.values(), law.exponent, law.allocation(6e18).parameters]
        truth = [*TRUE, exponent(TRUE), optimum(TRUE, 1e18)[0]]
        covered += [one in band for one, band in zip(truth, bands, strict=True)]
        luck = math.exp(np.random.default_rng(1000 + seed).normal(0, 0.005))
        new += float(losses(TRUE, 3e8, 6e9)) * luck in law.predict(3e8, 6e9).loss
    assert min(covered) >= 0.7 * trials  # of 90 %, less what chance allows in so few
    assert new >= 0.7 * trials


def test_more_noise_makes_wider_intervals(noisy: ScalingLaw) -> None:
    worse = ScalingLaw.fit(points(noise=0.02), draws=40)
    assert worse.exponent.high - worse.exponent.low > 2 * (noisy.exponent.high - noisy.exponent.low)
    tight, wide = noisy.predict(3e8, 6e9).loss, worse.predict(3e8, 6e9).loss
    assert wide.high - wide.low > 2 * (tight.high - tight.low)


def test_points_of_one_run_are_drawn_together() -> None:
    rows = [(*row, f"run {i // 5}") for i, row in enumerate(points(noise=0.004))]
    law = ScalingLaw.fit(rows, draws=20)
    assert law.by == "run"
    assert "drawings of runs" in str(law)
    assert ScalingLaw.fit(rows, draws=20, by="pairs").by == "pairs"


# --- what it says


@given(st.floats(1e18, 1e24), st.floats(0.5, 2).filter(lambda factor: abs(factor - 1) > 0.01))
def test_no_other_split_of_the_compute_is_better(flops: float, factor: float) -> None:
    n, d, loss = optimum(TRUE, flops / 6)
    assert n * d == pytest.approx(flops / 6)
    assert float(losses(TRUE, n * factor, d / factor)) > loss


def test_the_allocation_is_that_of_the_law(noisy: ScalingLaw) -> None:
    one = noisy.allocation(6e19)
    assert one.parameters.mid * one.tokens.mid * 6 == pytest.approx(6e19)
    assert one.tokens_per_parameter == pytest.approx(one.tokens.mid / one.parameters.mid)
    assert one.loss.mid == pytest.approx(noisy.predict(one.parameters.mid, one.tokens.mid).loss.mid)
    assert one.extrapolation == pytest.approx(6e19 / (6 * 1e8 * 2e9))
    assert one.parameters.low < one.parameters.mid < one.parameters.high
    eight = ScalingLaw.fit(points(), draws=0, flops_per=8)
    assert eight.allocation(8e19).parameters.mid == pytest.approx(optimum(eight.five, 1e19)[0])


def test_a_forecast_says_how_far_it_reaches_and_the_naive_line(noisy: ScalingLaw) -> None:
    near, far_off = noisy.predict(1e7, 2e8), noisy.predict(1e9, 2e11)
    assert near.extrapolation < 1
    assert not near.notes
    assert far_off.extrapolation == pytest.approx(1000)
    assert "far outside of what was measured" in far_off.notes[0]
    assert "10.0× the most parameters measured" in str(far_off)
    assert near.naive == far_off.naive == min(noisy.points.loss)
    assert far_off.loss.mid < far_off.naive


def test_held_out_runs_are_predicted_from_smaller_ones(noisy: ScalingLaw) -> None:
    found = noisy.held_out(0.2)
    assert found.fitted + len(found.measured) == 25
    assert all(one.flops > found.limit for one in found.forecasts)
    assert found.error < 0.01 < found.naive_error
    assert found.covered > 0.5
    assert noisy.held_out(flops=found.limit).measured == found.measured


def test_noise_free_runs_are_predicted_exactly() -> None:
    assert ScalingLaw.fit(points(), draws=5).held_out(0.1).error < 1e-6


def test_its_faces_agree(noisy: ScalingLaw) -> None:
    assert ScalingLaw.from_json(noisy.to_json()) == noisy
    forecast, allocation, held = noisy.predict(3e8, 6e9), noisy.allocation(1e20), noisy.held_out()
    assert Forecast.from_json(forecast.to_json()) == forecast
    assert Allocation.from_json(allocation.to_json()) == allocation
    assert HeldOut.from_json(held.to_json()) == held
    for one, rows in ((noisy, 25), (forecast, 1), (allocation, 3), (held, len(held.measured))):
        assert len(one.to_frame()) == rows
        assert "<table>" in one._repr_html_()
        assert "\n" not in repr(one)
    assert noisy.to_frame()["residual"].tolist() == list(noisy.residuals)


# --- doubt


def test_a_law_that_is_determined_says_so(noisy: ScalingLaw) -> None:
    assert noisy.enough
    assert "CANNOT TELL" not in str(noisy)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": (1e6, 1e8)}, "only 2 different numbers of parameters: alpha cannot be separated from E; 3 or more models"),
        ({"amounts": (2e7, 2e9)}, "only 2 different numbers of tokens: beta cannot be separated from E"),
        ({"sizes": (1e6, 2e6, 3e6)}, "parameters vary by a factor of 3 only: alpha cannot be determined; a factor of 4 or more"),
        ({"noise": 0.08}, "the exponent of the best size lies anywhere from"),
    ],
)
def test_what_cannot_be_told_is_said_with_every_answer(changes: dict[str, Any], said: str) -> None:
    law = ScalingLaw.fit(points(**{"noise": 0.004, **changes}), draws=20)
    assert not law.enough
    assert said in str(law)
    assert law.allocation(1e20).notes[0].startswith("cannot tell: ")
    assert law.predict(1e9, 1e10).notes[0].startswith("cannot tell: ")


FOUR = [(n, d) for n in np.geomspace(1e6, 1e8, 4) for d in np.geomspace(2e7, 2e9, 4)]


@pytest.mark.slow
def test_a_factor_without_effect_is_not_given_an_exponent() -> None:
    rng = np.random.default_rng(0)
    size = ScalingLaw.fit([(n, d, (1.7 + 410 / d**0.3) * math.exp(rng.normal(0, 0.003))) for n, d in FOUR], draws=10)
    assert not size.enough
    assert "from the fewest to the most parameters the loss falls by 0.5 %" in size.cannot_tell[0]
    assert size.allocation(2e18).notes[0].startswith("cannot tell: from the fewest")
    data = ScalingLaw.fit([(n, d, (1.7 + 410 / n**0.34) * math.exp(rng.normal(0, 0.003))) for n, d in FOUR], draws=5)
    assert "the most tokens the loss falls by" in data.cannot_tell[0]


def test_losses_that_are_all_the_same_say_nothing() -> None:
    law = ScalingLaw.fit([(n, d, 2.0) for n, d in FOUR], draws=5)
    assert len(law.cannot_tell) == 2
    assert "the loss falls by less than 0.1 %" in law.allocation(2e18).notes[0]


def test_an_exponent_cut_off_in_some_drawings_is_doubted(noisy: ScalingLaw) -> None:
    cut = tuple((*one[:3], 4.0, one[4]) if place < 4 else one for place, one in enumerate(noisy.draws))
    assert "alpha runs to the end of what is looked for in 4 of 40 drawings" in replace(noisy, draws=cut).cannot_tell[0]


def test_an_answer_far_from_all_sizes_is_said_loudly() -> None:
    rows = Points.of(points())
    assert identifiability.extrapolation_notes(1e8 * 20, 1e9, 5, rows) == (
        "far outside of what was measured (20.0× the most parameters measured): the interval knows only this form of law",
    )
    loud, quiet = identifiability.extrapolation_notes(1e6 / 2350, 1e7, 5, rows)
    assert "(1/2,350 of the fewest parameters measured)" in loud
    assert quiet == "0.500× the fewest tokens measured"
    assert identifiability.extrapolation_notes(1e7, 1e8, 5, rows) == ()


def test_without_drawings_there_are_no_ends() -> None:
    law = ScalingLaw.fit(points(noise=0.004), draws=0)
    for one in (law, law.predict(1e7, 1e9), law.allocation(1e18), law.held_out(0.2)):
        assert "inf" not in str(one)
        assert "inf" not in repr(one)
        json.dumps(one.to_json(), allow_nan=False)
        assert type(one).from_json(one.to_json()) == one
    assert law.predict(1e7, 1e9).to_json()["loss"]["low"] is None
    assert "no intervals" in law.held_out(0.2).summary


def test_large_losses_do_not_hide_the_exponents(noisy: ScalingLaw) -> None:
    large = replace(noisy, points=replace(noisy.points, loss=tuple(1e6 * one for one in noisy.points.loss)))
    shown = {row[0]: row[1] for row in large.table.rows}
    assert shown["E"] == "0"
    assert shown["alpha"] == f"{noisy.alpha:.4g}"
    assert shown["N_opt ∝ C^"] == f"{noisy.exponent.mid:.4g}"


def test_a_law_fitted_again_keeps_its_seed() -> None:
    law = ScalingLaw.fit(points(noise=0.004), draws=4, seed=7)
    assert law.refitted(law.points) == law
    assert ScalingLaw.from_json(law.to_json()).seed == 7


# --- what it is fitted to


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_files_that_a_spreadsheet_saves(tmp_path: Path, separator: str) -> None:
    lines = [separator.join(("parameters", "tokens", "loss"))]
    for n, d, loss in points():
        value = f"{loss:.6f}"
        lines.append(separator.join((f"{n:.0f}", f"{d:.0f}", value.replace(".", ",") if separator == ";" else value)))
    (tmp_path / "runs.csv").write_text("\r\n".join([*lines, separator * 2, ""]), encoding="utf-8-sig", newline="")
    assert read_points(tmp_path / "runs.csv").loss == tuple(round(loss, 6) for _, _, loss in points())


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("parameters,tokens,loss\n", encoding="utf-16")
    with pytest.raises(PointsError, match=r'runs.csv is not UTF-8 text: save it as "CSV UTF-8"'):
        read_points(tmp_path / "runs.csv")


def test_numbers_of_numpy_are_numbers() -> None:
    rows = points(noise=0.004)
    expected = ScalingLaw.fit(rows, draws=2)
    law = ScalingLaw.fit(np.array(rows), draws=np.int64(2), level=np.float64(0.9), flops_per=np.float32(6), seed=np.int32(0))  # type: ignore[arg-type]
    assert law == expected
    json.dumps(law.to_json(), allow_nan=False)
    json.dumps(law.predict(np.float32(1e7), np.int64(10**9)).to_json(), allow_nan=False)  # type: ignore[arg-type]
    with pytest.raises(PointsError, match=r"points=array\(3.\)"):
        read_points(np.array(3.0))


def test_points_come_from_frames_columns_rows_mappings_and_files(tmp_path: Path) -> None:
    rows = points()
    expected = ScalingLaw.fit(rows, draws=0)
    frame = pd.DataFrame(rows, columns=["parameters", "training_tokens", "loss"])
    frame["other"] = "x"
    frame.to_csv(tmp_path / "runs.csv", index=False)
    columns = {name: frame[name].tolist() for name in frame}
    for source in (
        frame,
        columns,
        frame.to_dict("records"),
        tmp_path / "runs.csv",
        str(tmp_path / "runs.csv"),
        expected.points,
        iter(rows),
    ):
        assert ScalingLaw.fit(source, draws=0) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (points()[:4], r"4 points were given, and the law .* has five numbers.*at least 5 .* better 15 .* 4 sizes × 4 amounts"),
        ([], r"0 points were given"),
        (points(sizes=[1e6]), r"all 5 points have the same number of parameters \(1,000,000\).*a smaller and a larger model"),
        (points(amounts=[1e6]), r"all 5 points have the same number of tokens .*shorter and longer runs"),
        ([(1e6, 1e7)] * 6, r"point 0, .*: give \(parameters, tokens, loss\)"),
        ([(1e6, 1e7, 3.0), (1e6, 1e7, math.nan)], r"point 1: loss=nan: a finite number above 0 is needed; a run that has diverged"),
        ([(1e6, 0, 3.0)], r"point 0: tokens=0: a finite number above 0"),
        ([("many", 1, 3.0)], r"point 0: parameters='many' is not a number"),
        ([3.0], r"point 0 is 3.0: give \(parameters, tokens, loss\)"),
        (3.0, r"points=3.0: rows of \(parameters, tokens, loss\), a DataFrame"),
        ({"parameters": [1], "token": [2], "loss": [3]}, r'the table has no column tokens \(is it "token"\? then rename it\): it has'),
        ({"parameters": [1, 2], "tokens": [2], "loss": [3]}, r"the columns differ in length: parameters 2, tokens 1, loss 1"),
        ([{"n": 1, "d": 2, "loss": 3}, {"n": 1}], r"a point lacks 'd': each needs n, d, loss"),
    ],
)
def test_points_that_give_no_law_are_refused(source: Any, said: str) -> None:
    with pytest.raises(PointsError, match=said):
        ScalingLaw.fit(source)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*runs\.csv: a CSV with columns"):
        ScalingLaw.fit(tmp_path / "runs.csv")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draws": -1}, r"draws=-1: a whole number"),
        ({"level": 90}, r"level=90: a number between 0 and 1"),
        ({"by": "seed"}, r"by='seed': allowed are 'pairs', 'run'"),
        ({"flops_per": 0}, r"flops_per=0: a finite number above 0"),
        ({"delta": math.nan}, r"delta=nan"),
        ({"seed": -1}, r"seed=-1: a whole number of at least 0"),
    ],
)
def test_options_that_are_not_allowed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PointsError, match=said):
        ScalingLaw.fit(points(), **options)


def test_questions_that_have_no_answer(noisy: ScalingLaw) -> None:
    with pytest.raises(PointsError, match=r"flops=-1: a finite number above 0"):
        noisy.allocation(-1)
    with pytest.raises(PointsError, match=r"tokens=0: a finite number above 0"):
        noisy.predict(1e6, 0)
    with pytest.raises(PointsError, match=r"0 of 25 runs have at most 1 FLOPs: at least 5 are needed for the fit.*the runs have 1.2e\+14"):
        noisy.held_out(flops=1)
    with pytest.raises(PointsError, match=r"25 of 25 runs"):
        noisy.held_out(1.0)


# --- pictures


def test_the_picture_shows_runs_sizes_and_the_frontier(noisy: ScalingLaw) -> None:
    held = noisy.held_out(0.2)
    small = noisy.refitted(noisy.points.where(one <= held.limit for one in noisy.compute))
    ax = wb.plot.scaling_law(small, held_out=held)
    seen, unseen = ax.collections[0], ax.collections[1]
    assert seen.get_offsets().shape == (held.fitted, 2)
    assert unseen.get_offsets()[:, 1].tolist() == pytest.approx(list(held.measured))
    assert unseen.get_facecolor().size > 0  # it was measured: solid, with a ring around it
    assert ax.collections[2].get_facecolor().size == 0
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [
        *(f"{n} parameters" for n in ("1.00 M", "3.00 M", "10.0 M", "30.0 M", "100 M")),
        "measured",
        "not seen by the fit",
        labels[-1],
    ]
    assert labels[-1] == "predicted best size for the compute (90 % band)"
    best_for_all = small.allocation(max(held.forecasts, key=lambda one: one.flops).flops)
    assert f"{units.count(best_for_all.parameters.mid)} parameters" in ax.texts[0].get_text()
    assert ax.get_ylim()[0] < best_for_all.loss.mid
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training compute (FLOPs)", "final loss")


def test_many_sizes_get_few_lines_and_rows_will_do() -> None:
    law = ScalingLaw.fit(points(sizes=np.geomspace(1e6, 1e8, 12).tolist()), draws=0)
    ax = law.plot(held_out=[(3e8, 6e9, 2.5)])
    assert len(ax.get_legend().get_texts()) == 6 + 3


def test_points_know_themselves() -> None:
    rows = Points.of(points())
    assert Points.from_json(rows.to_json()) == rows
    assert (len(rows), len(rows.sizes), rows.amounts[0]) == (25, 5, 2e7)
    assert rows.compute(6)[0] == 6 * 1e6 * 2e7
