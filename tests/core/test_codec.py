"""JSON by type hints: values survive the way there and back, and malformed input raises an error that names it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.codec import NOT_STORED, JsonDataclass, OrInf, OrMinusInf, fields_from_json, fields_to_json, from_json, to_json


@dataclass(frozen=True, slots=True)
class Plain:
    """A dataclass without the mixin."""

    name: str
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed(JsonDataclass):
    """Its file calls `size` "bytes" and has a version."""

    size: int

    def to_json(self) -> dict[str, Any]:
        return {"version": 2, "bytes": fields_to_json(self)["size"]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Renamed":
        return fields_from_json(cls, {"size": value["bytes"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything(JsonDataclass):
    """A field of every kind."""

    count: int
    rate: float
    high: OrInf = math.inf
    low: OrMinusInf = -math.inf
    maybe: float | None = None
    sure: bool = False
    text: str = ""
    kind: Literal["strong", "weak"] = "weak"
    parts: Mapping[str, Plain] = field(default_factory=dict)
    by_rank: Mapping[int, tuple[OrInf, ...]] = field(default_factory=dict)
    pair: tuple[str, int] = ("", 0)
    many: Sequence[int] = ()
    names: list[str] = field(default_factory=list)
    renamed: Renamed | None = None
    either: str | Plain = ""
    path: Path = Path("a/b")
    anything: Any = None
    derived: int = field(init=False, default=7)
    helper: Any = field(default=None, metadata=NOT_STORED, compare=False)


def texts() -> st.SearchStrategy[str]:
    return st.text(max_size=5)


numbers = st.floats(allow_nan=False, allow_infinity=False)
plains = st.builds(Plain, name=texts(), rates=st.lists(numbers, max_size=3).map(tuple))
everything = st.builds(
    Everything,
    count=st.integers(),
    rate=numbers,
    high=st.just(math.inf) | numbers,
    low=st.just(-math.inf) | numbers,
    maybe=st.none() | numbers,
    sure=st.booleans(),
    text=texts(),
    kind=st.sampled_from(["strong", "weak"]),
    parts=st.dictionaries(texts(), plains, max_size=2),
    by_rank=st.dictionaries(st.integers(), st.lists(numbers | st.just(math.inf), max_size=2).map(tuple), max_size=2),
    pair=st.tuples(texts(), st.integers()),
    many=st.lists(st.integers(), max_size=3).map(tuple),
    names=st.lists(texts(), max_size=2),
    renamed=st.none() | st.builds(Renamed, size=st.integers()),
    either=texts() | plains,
    path=st.sampled_from([Path("a/b"), Path("/c")]),
    anything=st.none() | st.booleans() | st.lists(st.integers(), max_size=2),
)


@given(everything)
def test_a_value_comes_back_from_its_json(value: Everything) -> None:
    text = json.dumps(value.to_json(), allow_nan=False)
    assert Everything.from_json(json.loads(text)) == value
    assert from_json(Everything, json.loads(text)) == value
    assert json.dumps(Everything.from_json(json.loads(text)).to_json()) == text


def test_fields_stand_in_their_order_without_those_that_are_not_stored() -> None:
    value = Everything(count=1, rate=math.nan, helper=print, renamed=Renamed(size=3), by_rank={0: (math.inf, 1.0)})
    made = value.to_json()
    assert list(made) == [name for name in Everything.__dataclass_fields__ if name not in ("derived", "helper")]
    assert (made["rate"], made["high"], made["low"], made["by_rank"], made["path"]) == (None, None, None, {"0": [None, 1.0]}, "a/b")
    assert made["renamed"] == {"version": 2, "bytes": 3}
    back = Everything.from_json(made)
    assert math.isnan(back.rate)
    assert (back.high, back.low, back.by_rank) == (math.inf, -math.inf, {0: (math.inf, 1.0)})


def test_fields_that_an_older_file_lacks_take_their_default() -> None:
    assert Everything.from_json({"count": 1, "rate": 2}) == Everything(count=1, rate=2.0)


def test_hints_without_a_dataclass() -> None:
    assert from_json(tuple[float, ...], [1.0, 2]) == (1.0, 2)
    assert from_json(Mapping[str, Plain], {"a": {"name": "x"}}) == {"a": Plain("x")}
    assert from_json(dict, {"a": 1}) == {"a": 1}
    assert to_json({"a": Plain("x", (math.inf,))}) == {"a": {"name": "x", "rates": [None]}}


def test_numpy_becomes_plain_numbers() -> None:
    made = to_json({"array": np.array([[1, 2]]), "count": np.int64(3), "rate": np.float32(0.5), "nan": np.float32("nan")})
    assert json.dumps(made, allow_nan=False) == '{"array": [[1, 2]], "count": 3, "rate": 0.5, "nan": null}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, "Everything.count: expected a whole number, got '3'"),
        ({"count": True}, "Everything.count: expected a whole number, got True"),
        ({"count": None}, "Everything.count: expected a whole number, got null"),
        ({"rate": "fast"}, "Everything.rate: expected a number, got 'fast'"),
        ({"rate": False}, "Everything.rate: expected a number, got False"),
        ({"maybe": []}, "Everything.maybe: expected a number, got []"),
        ({"sure": 1}, "Everything.sure: expected true or false, got 1"),
        ({"text": 1}, "Everything.text: expected text, got 1"),
        ({"kind": "linear"}, "Everything.kind: expected 'strong' or 'weak', got 'linear'"),
        ({"parts": []}, "Everything.parts: expected an object, got []"),
        ({"parts": {"a": {}}}, "Plain: field 'name' is missing"),
        ({"parts": {"a": {"name": "x", "rates": [1, "2"]}}}, "Plain.rates[1]: expected a number, got '2'"),
        ({"by_rank": {"first": []}}, "Everything.by_rank: expected a whole number as key, got 'first'"),
        ({"by_rank": {"0": 1}}, "Everything.by_rank['0']: expected a list, got 1"),
        ({"pair": ["a"]}, "Everything.pair: expected a list of 2, got ['a']"),
        ({"many": "12"}, "Everything.many: expected a list, got '12'"),
        ({"either": 1}, "Everything.either: expected text, got 1; or Plain: expected an object with its fields, got 1"),
        ({"path": 1}, "Everything.path: expected text, got 1"),
        ({"helper": 1}, "Everything: unknown field 'helper'"),
        ({"speed": 1}, "Everything: unknown field 'speed'; its fields are count, rate, high,"),
        ({"text": ["x" * 100]}, f"Everything.text: expected text, got ['{'x' * 75}…"),
    ],
)
def test_malformed_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Everything.from_json({"count": 1, "rate": 1.0, **change})


def test_a_missing_field_and_another_value_are_named() -> None:
    with pytest.raises(ValueError, match=r"^Everything: field 'rate' is missing$"):
        Everything.from_json({"count": 1})
    with pytest.raises(ValueError, match=r"^Everything: expected an object with its fields, got \[1\]$"):
        from_json(Everything, [1])


def test_what_json_does_not_have_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="set cannot be written as JSON"):
        to_json({"a": {1}})
    with pytest.raises(TypeError, match="set cannot be read from JSON"):
        from_json(set[int], [1])
