"""Numbers to text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core import units

SIZES = st.floats(min_value=1e-9, max_value=3e3)


def back(text: str) -> float:
    """Read a time back into seconds."""
    number, unit = text.replace(",", "").split(" ", 1)
    if unit.startswith("min"):
        return 60 * float(number) + float(unit.split()[1])
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]


@given(SIZES)
def test_a_time_reads_back_within_its_three_digits(value: float) -> None:
    assert back(units.seconds(value)) == pytest.approx(value, rel=0.01)


@given(st.floats(min_value=1, max_value=1e15))
def test_bytes_read_back(value: float) -> None:
    number, unit = units.bytes_(value).replace(",", "").split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(number) * scale == pytest.approx(value, rel=0.01, abs=0.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9999, "1.00 s"),
        (59.96, "1 min 00 s"),
        (0.00099999, "1.00 ms"),
        (1e-9, "1.00 ns"),
        (3599.9, "1 h 00 min"),
        (-0.5, "-500 ms"),
        (119.7, "2 min 00 s"),
    ],
)
def test_the_borders_between_units(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize("face", [units.seconds, units.bytes_, units.count, units.rate, units.percent, units.times])
def test_missing_is_a_dash_and_never_zero(face) -> None:  # type: ignore[no-untyped-def]
    assert face(None) == face(math.nan) == "–"
    assert face(0.0) != "–"


def test_counts_and_shares() -> None:
    assert units.count(950) == "950"
    assert units.count(12_345) == "12.3 k"
    assert units.bytes_(-(2**20)) == "-1.00 MiB"
    assert units.percent(0.0995) == "10 %"
    assert units.percent(0.001) == "0.1 %"
    assert units.percent(1) == "100 %"
