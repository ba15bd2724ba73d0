"""Ranges of predicted gains: their arithmetic, and how many proofs lie in them on cases that they were not fitted to."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made import World
from workbench.core.statistics import Interval
from workbench.core.system_load import Noise
from workbench.diagnosis.analysis.calibration import Calibration, keep
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.model_errors import KINDS, MODEL_ERRORS, kind_of, widened, with_model_error
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.runs.spec import KNOBS

RECORD = Path(__file__).with_name("proofs.jsonl")
"""What the formulas predict, with the noise of measurements only, and what was proved; `benchmarks/proofs.py --export` writes it."""
LEVEL = 0.85
"""Share of the recorded errors that a half-width covers. As the range also covers the noise, it contains more of the proofs. Chosen; the
proofs of cases that were left out lie inside as often as `MODEL_ERRORS` says."""
MIN_ERRORS = 5
"""With fewer errors of a kind, those of all kinds together are used."""
ratios = st.floats(1.0, 3.0)


def error_beside_noise(pair: Mapping[str, Any]) -> float:
    """The least `error` with which `widened` makes the range of a pair reach its proof.

    Args:
        pair: "low", "speedup" and "high" as predicted, with the noise of measurements only, and "proved".
    """
    error = math.log(pair["proved"] / pair["speedup"])
    noise = math.log(pair["high"] / pair["speedup"] if error > 0 else pair["speedup"] / pair["low"])
    return math.sqrt(max(0.0, error**2 - noise**2))


def fit_errors(pairs: Sequence[Mapping[str, Any]], level: float = LEVEL) -> dict[bool, dict[str, float]]:
    """`MODEL_ERRORS` of a record: the quantile of `error_beside_noise` by kind, separately for crowded machines.

    Args:
        pairs: as for `error_beside_noise`, and "remedy", "crowded".
        level: share of the errors that are covered. The quantile is that of a further proof: rank (n + 1) × level of n.
    """
    errors: dict[bool, dict[str, list[float]]] = {crowded: defaultdict(list) for crowded in (False, True)}
    for pair in pairs:
        errors[pair["crowded"]][kind_of(pair["remedy"])].append(error_beside_noise(pair))
    fitted: dict[bool, dict[str, float]] = {}
    for crowded, by_kind in errors.items():
        together = [error for some in by_kind.values() for error in some]
        fitted[crowded] = {
            kind: _quantile(by_kind[kind] if len(by_kind[kind]) >= MIN_ERRORS else together, level)
            for kind in sorted({*KINDS.values(), "training"})
        }
    return fitted


def _quantile(values: Sequence[float], level: float) -> float:
    """The value that a further one exceeds with probability 1 − level; 0 of none."""
    ordered = sorted(values)
    return ordered[min(math.ceil(level * (len(ordered) + 1)), len(ordered)) - 1] if ordered else 0.0


def pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()]


def holds(pair: dict[str, Any], errors: dict[bool, dict[str, float]]) -> bool:
    low, high = widened(pair["low"], pair["speedup"], pair["high"], errors[pair["crowded"]][kind_of(pair["remedy"])])
    return low <= pair["proved"] <= high


def remedy(name: str = "num_workers=4", low: float = 3.0, mid: float = 3.3, high: float = 3.6, ceiling: bool = False) -> Remedy:
    return Remedy(name=name, change={"num_workers": 4}, what="Do.", speedup=mid, low=low, high=high, formula="", ceiling=ceiling)


@given(ratios, st.floats(0.1, 9.0), ratios, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_range_grows_with_the_error_around_its_middle(below: float, mid: float, above: float, error: float, more: float) -> None:
    low, high = mid / below, mid * above
    ends, wider = widened(low, mid, high, error), widened(low, mid, high, error + more)
    slack = 1 + 1e-9
    assert wider[0] <= slack * ends[0] <= slack**2 * low <= slack**3 * mid
    assert slack**3 * wider[1] >= slack**2 * ends[1] >= slack * high >= mid
    assert math.log(mid / ends[0]) <= math.log(below) + error + 1e-9  # no wider than the sum of both


@given(ratios, st.floats(0.1, 9.0), ratios, st.floats(0.1, 9.0))
def test_the_least_error_reaches_the_proof(below: float, mid: float, above: float, proved: float) -> None:
    pair = {"low": mid / below, "speedup": mid, "high": mid * above, "proved": proved}
    low, high = widened(pair["low"], mid, pair["high"], error_beside_noise(pair) + 1e-6)
    assert low <= proved <= high


def test_what_has_no_upper_end_keeps_none() -> None:
    one = with_model_error(remedy(high=math.inf), crowded=False)
    assert one.high == math.inf
    assert one.low < 3.0
    ceiling = remedy(low=1.0, ceiling=True)
    assert with_model_error(ceiling, crowded=True) == ceiling


def test_every_knob_has_an_error() -> None:
    for crowded in (False, True):
        assert all(0 < MODEL_ERRORS[crowded][kind_of(name)] < 0.5 for name in KNOBS)
        assert MODEL_ERRORS[True][kind_of("threads=2")] > MODEL_ERRORS[False][kind_of("threads=2")]


def test_the_errors_are_those_of_the_record() -> None:
    for crowded, kinds in fit_errors(pairs()).items():
        assert MODEL_ERRORS[crowded] == pytest.approx(kinds, abs=0.011)


def test_ranges_hold_proofs_of_cases_that_they_were_not_fitted_to() -> None:
    record = pairs()
    assert len(record) >= 60
    for crowded in (False, True):
        some = [pair for pair in record if pair["crowded"] == crowded]
        held, by_kind = 0, dict[str, list[bool]]()
        for case in {pair["case"] for pair in some}:
            errors = fit_errors([pair for pair in record if pair["case"] != case])
            for pair in (pair for pair in some if pair["case"] == case):
                held += holds(pair, errors)
                by_kind.setdefault(kind_of(pair["remedy"]), []).append(holds(pair, errors))
        assert 0.8 <= held / len(some) <= 0.95
        assert all(sum(inside) / len(inside) >= 0.8 for inside in by_kind.values()), by_kind


def test_a_lower_bound_in_every_face(tmp_path: Path) -> None:
    proof = Proof(remedy=remedy(high=math.inf), measured=Interval(low=4.9, mid=5.1, high=5.3))
    assert proof.held
    assert (
        proof.summary
        == "num_workers=4: predicted 3.30× (at least 3.00×), measured 5.10× (4.90× … 5.30×): it helps; at least as much as predicted"
    )
    assert [row[-1] for row in proof.table.rows] == ["–", "5.30×"]
    assert Proof.from_json(json.loads(json.dumps(proof.to_json(), allow_nan=False))) == proof
    less = Proof(remedy=proof.remedy, measured=Interval(low=1.9, mid=2.0, high=2.1))
    assert (less.held, less.word) == (False, "it helps; less than predicted")
    assert next(text.get_text() for text in proof.plot().texts).startswith("3.30× (at least 3.00×)")
    assert keep(proof, path=tmp_path / "proofs.jsonl") is None
    assert len(Calibration.load(tmp_path / "proofs.jsonl").rows) == 1


def test_ranges_of_formulas_are_as_wide_as_the_step_scatters_on_a_busy_machine() -> None:
    """Once num_workers=1 was predicted to gain 2.15× (1.84 … 2.70) and measured 1.41×, while equal blocks took 0.2 to 0.9 s."""

    def width(noise: Noise, scatters: float) -> dict[str, float]:
        evidence = World(blocked=0.03, bf16=0.5, cores=2.0).evidence(noise=noise)
        base = evidence.arms["doubled"]
        moved = tuple((scale * one, scale * two) for scale, (one, two) in zip((1, 1 + scatters) * 4, base.pairs, strict=True))
        arms = {**evidence.arms, "doubled": dataclasses.replace(base, pairs=moved)}
        found = Diagnosis.of(dataclasses.replace(evidence, arms=arms)).remedies
        return {one.name.partition("=")[0]: one.high / one.low for one in found if not one.ceiling}

    busy, quiet = Noise(cores=2.0, foreign=1.5, spread=0.02), Noise(cores=2.0)
    steady, wild = width(busy, 0.0), width(busy, 3.0)
    assert wild["num_workers"] > 1.5 * steady["num_workers"]
    assert wild["precision"] == pytest.approx(steady["precision"]), "its experiment was compared with blocks beside it"
    assert width(quiet, 3.0)["num_workers"] == pytest.approx(width(quiet, 0.0)["num_workers"])
    few = Noise(cores=2.0, foreign=1.5)
    assert width(few, 3.0)["precision"] > 1.5 * width(few, 0.0)["precision"], "too few blocks to have a spread"
    shaken = width(Noise(cores=2.0, foreign=1.5, spread=0.8), 0.0)
    assert shaken["num_workers"] > 1.5 * steady["num_workers"]


def test_a_loader_curve_that_is_far_from_the_step_as_it_is_recommends_nothing() -> None:
    """Once the step was predicted at 200 ms and measured at 358 ms, with the note "now, recommended"; by hand, workers gained 4×."""
    evidence = World(blocked=0.03).evidence()
    fits = Diagnosis.of(evidence)
    assert fits.loader_curve is not None
    assert evidence.loading is not None
    assert "recommended" in str(fits.loader_curve)
    assert fits.loader_curve.doubt == ""
    slow = dataclasses.replace(evidence.loading, alone=0.008, blocked=0.007)
    alone = dataclasses.replace(evidence.arms["loader"], pairs=tuple((base, 0.008) for base, _ in evidence.arms["loader"].pairs))
    off = Diagnosis.of(dataclasses.replace(evidence, loading=slow, arms={**evidence.arms, "loader": alone}))
    curve = off.loader_curve
    assert curve is not None
    assert curve.doubt.startswith("the step as it is was measured at 50.")
    assert "the formula of the loader gives 27" in curve.doubt
    assert f"no number of workers is recommended: {curve.doubt}" in str(curve)
    assert curve.marks(0) == ["now"]
    assert "recommended: nothing" in repr(curve)
    workers = next(one for one in off.remedies if one.name.startswith("num_workers="))
    assert math.log(workers.speedup / workers.low) > 0.5
