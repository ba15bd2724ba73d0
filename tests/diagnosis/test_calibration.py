"""Calibration: proofs are kept, and they widen the interval of the next prediction of their kind."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.statistics import Interval
from workbench.diagnosis.analysis import calibration
from workbench.diagnosis.analysis.calibration import Calibration, calibration_file, keep
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.remedy import Remedy


def remedy(name: str = "num_workers=2", speedup: float = 1.5, **changes: Any) -> Remedy:
    known = {"name": name, "what": "More workers.", "speedup": speedup, "low": speedup - 0.05, "high": speedup + 0.05, "formula": "max"}
    return Remedy(**known | changes)


def proof(measured: float, predicted: Remedy | None = None) -> Proof:
    return Proof(remedy=predicted or remedy(), measured=Interval(low=measured - 0.01, mid=measured, high=measured + 0.01))


def kept(path: Path, *measured: float, of: Remedy | None = None) -> Calibration:
    for one in measured:
        assert keep(proof(one, of), path=path) is None
    return Calibration.load(path)


def test_intervals_hold_what_was_seen_before(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "proofs.jsonl"
    assert Calibration.load(file).rows == ()
    known = kept(file, 1.5, 1.2)
    assert known.adjust(remedy()) == remedy()  # two say nothing
    known = kept(file, 1.65)
    wide = known.adjust(remedy("num_workers=4", 3.0))
    assert (wide.low, wide.speedup, wide.high) == pytest.approx((2.4, 3.0, 3.3))
    assert "widened by what 3 earlier proofs" in wide.formula
    assert known.adjust(remedy("precision=amp_bf16")) == remedy("precision=amp_bf16")  # another kind
    assert known.adjust(remedy(ceiling=True)) == remedy(ceiling=True)  # no forecast


def test_a_proof_on_a_machine_whose_load_changed_spoils_no_later_range(tmp_path: Path) -> None:
    known = kept(tmp_path / "proofs", 1.45, 1.5, 1.55)
    before = known.adjust(remedy())
    kept(tmp_path / "proofs", 1.51, of=remedy(speedup=22.5))
    assert Calibration.load(tmp_path / "proofs").adjust(remedy()) == before


@given(st.lists(st.floats(0.2, 5), min_size=3, max_size=40), st.floats(0.5, 4))
def test_an_interval_is_never_narrowed_and_holds_nine_of_ten(measured: list[float], speedup: float) -> None:
    rows = tuple({"remedy": "num_workers=2", "predicted": 1.0, "measured": one} for one in measured)
    one = remedy(speedup=speedup)
    wide = Calibration(rows=rows).adjust(one)
    assert wide.low <= one.low <= one.speedup <= one.high <= wide.high
    latest = measured[-calibration.LATEST_PROOFS :]
    inside = sum(wide.low <= speedup * ratio * (1 + 1e-9) and speedup * ratio <= wide.high * (1 + 1e-9) for ratio in latest)
    assert inside >= calibration.COVERAGE * len(latest) - 1e-9


def test_ceilings_are_kept_and_not_counted(tmp_path: Path) -> None:
    known = kept(tmp_path / "proofs", 1.1, 1.1, 1.1, of=remedy(ceiling=True))
    assert len(known.rows) == 3
    assert known.errors("num_workers=2") == []


def test_only_the_latest_count(tmp_path: Path) -> None:
    known = kept(tmp_path / "proofs", *[0.5] * 5, *[1.5] * calibration.LATEST_PROOFS)
    assert known.errors("num_workers") == pytest.approx([0.0] * calibration.LATEST_PROOFS)


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "proofs"
    kept(file, 1.5)
    with file.open("a") as damaged:
        damaged.write('{"remedy": "num_workers=2", "predicted": 1.5, "measured": 0}\n{"half": \n[]\n3\n{"remedy": 1}\n')
    assert len(kept(file, 1.4).rows) == 2


def test_the_table_says_how_far_off_predictions_were(tmp_path: Path) -> None:
    known = kept(tmp_path / "proofs", 1.5, 1.2, 1.25)
    known = kept(tmp_path / "proofs", 1.0, of=remedy("precision=amp_bf16", 1.1))
    assert [list(row) for row in known.table.rows] == [["num_workers", 3, "20 %", "25 %"], ["precision", 1, "10 %", "10 %"]]
    assert list(known.to_frame()["measured"]) == [1.5, 1.2, 1.25, 1.0]


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    assert calibration_file().parent == tmp_path / "cache"
    assert keep(proof(1.5), task="text-gpt") is None
    assert json.loads(calibration_file().read_text())["task"] == "text-gpt"
    monkeypatch.delenv("WORKBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert calibration_file().parent == tmp_path / "xdg" / "workbench"


def test_a_place_that_cannot_be_written_is_said_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = keep(proof(1.5), path=tmp_path / "file" / "proofs")
    assert said is not None
    assert "cannot be written" in said


def test_the_errors_are_logarithms_of_ratios(tmp_path: Path) -> None:
    assert kept(tmp_path / "proofs", 3.0).errors("num_workers=8") == pytest.approx([math.log(2)])
