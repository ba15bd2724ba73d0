"""The pictures of a diagnosis, by their artists: where bars and marks are, what the words say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure

from tests.slow_loader import SPEC, diagnosis, evidence
from workbench import plot
from workbench.core import units
from workbench.core.display import colors
from workbench.core.statistics import Interval
from workbench.core.vocabulary import PARTS
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.loader_model import APART, CurvePoint, LoaderCurve, LoaderModel
from workbench.diagnosis.analysis.proof import Ladder, Proof, Rung
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.plot import UNKNOWN


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


def proof_of(remedy: Remedy, mid: float, baseline: float = 640.0) -> Proof:
    return Proof(remedy=remedy, measured=Interval(low=mid - 0.1, mid=mid, high=mid + 0.1), baseline=baseline)


def bars(ax: Axes) -> dict[str, Any]:
    """Name → the pieces of that colour, one per bar."""
    return {container.get_label(): container for container in ax.containers if hasattr(container, "patches")}


def lengths(ax: Axes) -> list[float]:
    """Of each whole bar."""
    return [sum(piece.get_width() for piece in row) for row in zip(*bars(ax).values(), strict=True)]


def marks(ax: Axes) -> list[tuple[str, float, list[float]]]:
    """(label, place, [low, high]) of each diamond."""
    found = []
    for container in ax.containers:
        if not hasattr(container, "patches"):
            line, _, (whiskers,) = container.lines
            (segment,) = whiskers.get_segments()
            found.append((container.get_label(), line.get_xdata()[0], sorted(segment[:, 0].tolist())))
    return found


def labels(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> set[str]:
    found = ax.get_legend()
    assert found is not None
    return {text.get_text() for text in found.get_texts()}


# --- diagnosis


def test_the_step_is_a_bar_of_its_parts_and_each_remedy_a_bar_as_long_as_it_promises(ax: Axes) -> None:
    result = diagnosis()
    plot.diagnosis(result, ax=ax)
    assert labels(ax) == ["as it is", *(one.name for one in result.remedies)]
    now = result.parts
    first = {name: container[0].get_width() for name, container in bars(ax).items()}
    assert {part: 1e3 * now.seconds(part) for part in PARTS if part in first} == pytest.approx(
        {p: w for p, w in first.items() if p in PARTS}
    )
    assert lengths(ax) == pytest.approx([1e3 * now.step, *(1e3 * now.step / one.speedup for one in result.remedies)])
    assert ax.get_xlabel() == "step time, measured; hatched: predicted with one remedy (ms)"


def test_parts_have_their_colours_and_what_is_not_there_has_no_key(ax: Axes) -> None:
    plot.diagnosis(diagnosis(), ax=ax)
    for part, container in bars(ax).items():
        if part in PARTS:
            assert to_hex(container[0].get_facecolor()) == colors.PARTS[part]
    assert {"data_wait", "compute", "optimizer", UNKNOWN, "predicted"} <= legend(ax)
    assert not {"communication", "straggler", "stalls", "measured"} & legend(ax)


def test_a_prediction_is_hatched_a_measurement_solid_and_both_have_their_interval(ax: Axes) -> None:
    result = diagnosis()
    plot.diagnosis(result, ax=ax)
    pieces = bars(ax)["compute"]
    assert not pieces[0].get_hatch()
    assert all(piece.get_hatch() for piece in pieces[1:])
    best, step = result.remedies[0], 1e3 * result.parts.step
    name, place, reach = marks(ax)[0]
    assert name == "predicted"
    assert place == pytest.approx(step / best.speedup)
    assert reach == pytest.approx([step / best.high, step / best.low])


def test_the_parts_of_a_remedy_in_words_are_unknown(ax: Axes) -> None:
    result = diagnosis()
    plot.diagnosis(result, ax=ax)
    (number,) = [i for i, one in enumerate(result.remedies, 1) if not one.change]
    pieces = {name: container[number].get_width() for name, container in bars(ax).items()}
    assert {name for name, width in pieces.items() if width} == {UNKNOWN}
    assert "100 %" not in texts(ax)
    assert any(text.startswith("up to ") for text in texts(ax))


def test_a_remedy_that_changes_the_batch_is_drawn_per_as_many_samples_as_now(ax: Axes) -> None:
    result = diagnosis()
    larger = replace(result.remedies[0], name="micro_batch=64", change={"micro_batch": 64}, speedup=1.25, low=1.2, high=1.3)
    result.remedies = (larger,)
    plot.diagnosis(result, ax=ax)
    assert lengths(ax) == pytest.approx([50, 40], rel=1e-3)
    assert ax.get_xlabel().startswith("time for the samples of one step, measured")


def test_a_proof_stands_beside_its_prediction(ax: Axes) -> None:
    result = diagnosis()
    best = result.remedies[0]
    result.proofs += [proof_of(best, 1.5), proof_of(best, 2.0)]
    plot.diagnosis(result, ax=ax)
    found = {name: (place, reach) for name, place, reach in marks(ax)[:2]}
    assert found["measured"][0] == pytest.approx(25, rel=1e-3)  # the last proof counts
    assert found["measured"][1] == pytest.approx([50 / 2.1, 50 / 1.9], rel=1e-3)
    assert f"{units.times(best.speedup)}  ·  measured 2.00×" in texts(ax)
    assert "measured" in legend(ax)


def test_a_step_without_remedies_is_drawn_without_each_part(ax: Axes) -> None:
    """Such a picture had one bar and was half empty."""
    result = diagnosis()
    result.remedies = ()
    saved = {"optimizer": Interval(low=0.05, mid=0.1, high=0.2), "data_wait": Interval(low=0.3, mid=0.4, high=1.0)}
    little = {"host": Interval(low=0.0, mid=0.001, high=0.004)}
    result.judgement = replace(result.judgement, shares=saved | little)
    plot.diagnosis(result, ax=ax)
    assert labels(ax) == ["as it is", "without data_wait", "without optimizer"]
    assert ax.get_xlabel() == "step time, measured; hatched: predicted without one part (ms)"
    step = 1e3 * result.parts.step
    assert lengths(ax) == pytest.approx([step, 0.6 * step, 0.9 * step])
    assert bars(ax)["data_wait"][1].get_width() == 0
    assert bars(ax)["optimizer"][2].get_width() == 0
    assert marks(ax)[0] == ("predicted", pytest.approx(0.6 * step), pytest.approx([0.0, 0.7 * step]))
    assert texts(ax)[-2:] == ["up to 1.67×", "up to 1.11×"]
    assert "predicted" in legend(ax)


def test_a_step_of_which_no_part_matters_is_one_bar(ax: Axes) -> None:
    result = diagnosis()
    result.remedies, result.judgement = (), replace(result.judgement, shares={})
    plot.diagnosis(result, ax=ax)
    assert labels(ax) == ["as it is"]
    assert ax.get_xlabel() == "step time, measured (ms)"
    assert "predicted" not in legend(ax)


def test_shares_stand_beside_marks_and_not_under_them(ax: Axes) -> None:
    result = diagnosis()
    (best, *_), step = result.remedies, result.parts.step
    wide = replace(best, speedup=2.0, low=1.0, high=4.0)  # its mark covers the bar from half of its length on
    result.remedies = (wide, replace(wide, high=40.0))  # and nearly all of the bar
    plot.diagnosis(result, ax=ax)
    shares = [(text.get_position()[0], text.get_position()[1]) for text in ax.texts if text.get_text().endswith(" %")]
    assert all(place < 1e3 * step / 4 for place, row in shares if row == 1)
    assert any(row == 1 for _, row in shares)
    assert not [row for _, row in shares if row == 2]


def test_a_diagnosis_shows_itself_by_its_picture_and_one_without_a_step_is_refused(ax: Axes) -> None:
    assert diagnosis().plot(ax=ax) is ax
    with pytest.raises(ValueError, match="has no step to draw: not a second of it is known"):
        plot.diagnosis(Diagnosis(evidence=Evidence(step=0.0), judgement=diagnosis().judgement))


# --- ladder, proof


def ladder(*gains: float, **fields: Any) -> Ladder:
    """One rung per gain, each from where the last one that helped ended."""
    rungs, now = [], 100.0
    remedy = diagnosis().remedies[0]
    for number, gain in enumerate(gains, 1):
        proof = proof_of(replace(remedy, name=f"knob={number}"), gain, baseline=now)
        now = now * gain if proof.gained else now
        rungs.append(Rung(verdict="input-bound", cause="dataset code", proof=proof, samples_per_sec=now))
    return Ladder(start=100.0, rungs=tuple(rungs), **fields)


def test_a_ladder_shows_what_was_there_and_what_each_rung_added(ax: Axes) -> None:
    plot.ladder(ladder(2.0, 1.5), ax=ax)
    assert labels(ax) == ["start", "knob=1\nagainst input-bound", "knob=2\nagainst input-bound"]
    found = bars(ax)
    assert [piece.get_width() for piece in found["before"]] == pytest.approx([100, 100, 200])
    assert [piece.get_width() for piece in found["added, measured"]] == pytest.approx([0, 100, 100])
    assert [piece.get_x() for piece in found["added, measured"]] == pytest.approx([100, 100, 200])
    assert texts(ax) == ["100 samples/s", "2.00×  ·  200 samples/s", "1.50×  ·  300 samples/s"]
    best = diagnosis().remedies[0]
    assert [place for _, place, _ in marks(ax)] == pytest.approx([100 * best.speedup, 200 * best.speedup])
    assert ax.get_xlabel() == "throughput (samples/s)"


def test_a_rung_that_did_not_help_is_an_empty_frame(ax: Axes) -> None:
    plot.ladder(ladder(0.9, 2.0), ax=ax)
    before, added = bars(ax)["before"], bars(ax)["added, measured"]
    assert before[1].get_width() == pytest.approx(90)
    assert before[1].get_facecolor()[3] == 0
    assert before[2].get_facecolor()[3] > 0
    assert [piece.get_width() for piece in added] == pytest.approx([0, 0, 100])
    assert texts(ax)[1] == "0.900×: dropped"


def test_a_remedy_that_failed_in_its_proof_has_a_row_without_a_bar(ax: Axes) -> None:
    nothing = Interval(low=float("nan"), mid=float("nan"), high=float("nan"))
    broken = ladder(2.0).rungs[0]
    broken = replace(broken, proof=replace(broken.proof, measured=nothing), samples_per_sec=100.0)
    plot.ladder(Ladder(start=100.0, rungs=(broken,)), ax=ax)
    assert texts(ax)[1] == "failed: dropped"
    assert bars(ax)["before"][1].get_width() == 0


def test_a_ladder_without_rungs_is_its_start_and_one_without_a_start_is_refused(ax: Axes) -> None:
    ladder().plot(ax=ax)
    assert labels(ax) == ["start"]
    with pytest.raises(ValueError, match="no throughput to draw"):
        plot.ladder(Ladder(start=float("nan")))


def test_a_proof_is_two_bars_with_their_intervals(ax: Axes) -> None:
    proof = proof_of(diagnosis().remedies[0], 2.0)
    assert proof.plot(ax=ax) is ax
    assert labels(ax) == ["predicted", "measured"]
    assert [piece.get_width() for piece in ax.patches] == pytest.approx([proof.remedy.speedup, 2.0])
    assert marks(ax)[1][2] == pytest.approx([1.9, 2.1])
    assert texts(ax)[1].startswith("2.00×: it helps; the prediction was")
    assert ax.get_xlabel() == "throughput with num_workers=2 over that without"


def test_a_proof_that_could_not_be_run_has_no_bar_of_what_was_measured(ax: Axes) -> None:
    proof_of(diagnosis().remedies[0], float("nan")).plot(ax=ax)
    assert labels(ax) == ["predicted", "measured"]
    assert texts(ax)[1] == "failed"
    assert [piece.get_width() for piece in ax.patches][1:] == [0]
    assert len(marks(ax)) == 1


# --- loader curve


def curve(binds: Sequence[str] = ("in turn", "workers", "workers", "cores"), **fields: Any) -> LoaderCurve:
    points = tuple(
        CurvePoint(num_workers=i, loader=0.03 / (i or 1), step=0.02 + 0.03 / (i + 1), binds=term) for i, term in enumerate(binds)
    )
    return LoaderCurve(**{"points": points, "recommended": 2, "compute": 0.02, "current": 0, **fields})


def test_the_curve_has_a_line_of_steps_one_of_the_loader_and_the_floor_below_them(ax: Axes) -> None:
    plot.loader_curve(curve(), ax=ax)
    found = {line.get_label(): line for line in ax.get_lines()}
    assert list(found["step"].get_ydata()) == pytest.approx([50, 35, 30, 27.5])
    assert list(found["loader alone, per batch"].get_ydata()) == pytest.approx([30, 30, 15, 10])
    assert list(found["step without loading"].get_ydata()) == pytest.approx([20, 20])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("num_workers of each rank", "predicted (ms)")
    assert legend(ax) == {"step", "loader alone, per batch", "step without loading"}


def test_measurements_stand_beside_the_prediction_and_each_line_has_its_own_marker(ax: Axes) -> None:
    """Printed in grey, step and loader looked alike."""
    measured = curve().with_measured(step={0: 0.052, 2: 0.031}, loader={1: 0.029})
    assert measured.plot(ax=ax) is ax
    found = {line.get_label(): line for line in ax.get_lines()}
    assert list(found["step, measured"].get_xdata()) == [0, 2]
    assert list(found["step, measured"].get_ydata()) == pytest.approx([52, 31])
    assert list(found["loader alone, measured"].get_xdata()) == [1]
    assert ax.get_ylabel() == "predicted and measured (ms)"
    assert ax.get_xlabel().endswith(APART)
    names = ("step, predicted", "step, measured", "loader alone, per batch, predicted", "loader alone, measured")
    assert [found[name].get_marker() for name in names] == ["o", "o", "^", "^"]
    assert [to_hex(found[name].get_markerfacecolor()) == "#ffffff" for name in names] == [True, False, True, False]


def test_the_curve_says_what_holds_the_step_and_what_is_recommended(ax: Axes) -> None:
    plot.loader_curve(curve(), ax=ax)
    words = {text.get_text(): text.get_position() for text in ax.texts}
    assert set(words) == {"load,\nthen train", "workers", "cores", "now", "recommended"}
    places = {text.get_text(): text.xy[0] for text in ax.texts}  # type: ignore[attr-defined]
    assert (places["workers"], places["cores"], places["recommended"], places["now"]) == (1.5, 3, 2, 0)
    plot.loader_curve(curve(current=2), ax=(other := Figure().subplots()))
    assert "now, recommended" in texts(other)


def test_a_curve_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a curve of no points"):
        plot.loader_curve(curve(()))


def test_the_pictures_need_no_spec_and_change_nothing_of_the_result(ax: Axes) -> None:
    result = Diagnosis.of(evidence())
    before = result.to_json()
    plot.diagnosis(result, ax=ax)
    assert result.to_json() == before
    assert diagnosis(SPEC).to_json()["spec"] is not None


def test_the_contour_of_unprepared_data_has_the_claim_in_bold_and_the_measured_step() -> None:
    raw = LoaderModel(cpu=0.012, worker_cpu=0.014, handover=0.0005, compute=0.020, cores=2)
    ready = LoaderModel(cpu=0.0005, worker_cpu=0.004, handover=0.0005, compute=0.020, cores=2)
    ax = plot.unprepared(raw, ready)
    (contours,) = (one for one in ax.collections if isinstance(one, QuadContourSet))
    widths = dict(zip(contours.levels, contours.get_linewidths(), strict=True))
    assert widths[7] > 2 * widths[2]
    (point,) = (line for line in ax.get_lines() if line.get_label() == "measured here")
    assert (point.get_xdata()[0], point.get_ydata()[0]) == pytest.approx((20, 12))
    assert ax.get_xlabel() == "training on a batch (ms)"
    ends = np.concatenate([ax.transData.transform(path.vertices) for path in contours.get_paths()])
    for label in contours.labelTexts:  # the gaps of the lines are as wide as the words
        place = ax.transData.transform(label.get_position())
        assert np.linalg.norm(ends - place, axis=1).min() < 0.05 * ax.bbox.width, label.get_text()


def test_nothing_to_prepare_is_said() -> None:
    with pytest.raises(ValueError, match="both have to be measured"):
        plot.unprepared(LoaderModel(cpu=0.0, compute=0.02), LoaderModel(cpu=0.0, compute=0.02))
