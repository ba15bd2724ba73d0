"""Arguments are checked alike everywhere: what is in range is given back, all else is refused with what was given and what is allowed."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workbench.core.checks import (
    choice,
    did_you_mean,
    is_number,
    is_whole,
    near_script,
    nearest,
    number_in_environment,
    real_number,
    whole_number,
)

ODD = st.one_of(st.none(), st.booleans(), st.text(), st.binary(), st.lists(st.integers()), st.complex_numbers(), st.just(math.nan))
NAMES = st.lists(st.text(alphabet="abcdefgh_", min_size=1), min_size=1, unique=True)


class Refused(ValueError):
    pass


@given(st.integers(), st.integers(), st.integers())
def test_whole_numbers_in_the_range_are_given_back(value: int, least: int, most: int) -> None:
    assert is_whole(value, least=least, most=most) == (least <= value <= most)
    assert is_whole(value)
    if least <= value <= most:
        assert whole_number("n", value, least=least, most=most) == value
    else:
        with pytest.raises(Refused, match=rf"^n={value}: a whole number from {least} to {most} is allowed, or none$"):
            whole_number("n", value, least=least, most=most, also=", or none", error=Refused)


@given(st.one_of(ODD, st.floats()))
def test_what_is_no_whole_number(value: Any) -> None:
    assert not is_whole(value)
    with pytest.raises(ValueError, match="a whole number of at least 0 is allowed"):
        whole_number("n", value, least=0, numpy=True)


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_in_the_range_are_given_back(value: float, limit: float) -> None:
    assert is_number(value)
    assert is_number(value, above=limit) == (value > limit)
    assert is_number(value, least=limit) == (value >= limit)
    assert is_number(value, below=limit) == (value < limit)
    assert is_number(value, most=limit) == (value <= limit)
    if value > limit:
        assert real_number("x", value, above=limit) is value
    else:
        with pytest.raises(Refused) as raised:
            real_number("x", value, above=limit, what="seconds", error=Refused)
        assert str(raised.value) == f"x={value!r}: seconds above {limit} are allowed"


@given(ODD)
def test_what_is_no_number(value: Any) -> None:
    assert not is_number(value)
    for taken in (False, True):
        with pytest.raises(ValueError, match="a number is allowed"):
            real_number("x", value, numpy=taken)


def test_whole_numbers_that_are_too_large_for_a_float() -> None:
    assert is_number(10**400, above=0)
    assert not is_number(-(10**400), above=0)
    assert is_number(10**400, finite=False)
    assert real_number("x", 10**400, least=1) == 10**400


def test_infinity_counts_only_where_that_is_said() -> None:
    assert not is_number(math.inf)
    assert is_number(math.inf, above=0, finite=False)
    assert not is_number(-math.inf, above=0, finite=False)
    assert not is_number(-math.inf, least=0, finite=False)
    assert not is_number(math.inf, below=1, finite=False)
    assert is_number(-math.inf, finite=False)


@pytest.mark.parametrize("value", [numpy.int64(3), numpy.uint8(3)])
def test_numbers_of_numpy_where_they_are_wanted(value: Any) -> None:
    assert not is_whole(value)
    found = whole_number("n", value, least=1, numpy=True)
    assert (found, type(found)) == (3, int)
    real = real_number("x", numpy.float32(0.5), above=0, below=1, numpy=True)
    assert (real, type(real)) == (0.5, float)
    with pytest.raises(ValueError, match="a whole number"):
        whole_number("n", value, least=1)
    with pytest.raises(ValueError, match="a number"):
        real_number("x", numpy.float32(0.5))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "a number is"),
        ({"above": 0}, "a number above 0 is"),
        ({"least": 0}, "a number of at least 0 is"),
        ({"below": 1}, "a number below 1 is"),
        ({"above": 0, "below": 1}, "a number between 0 and 1 is"),
        ({"least": 0, "below": 1}, "a number from 0 to below 1 is"),
    ],
)
def test_ranges_in_words(limits: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=f"^x='1': {words} allowed$"):
        real_number("x", "1", **limits)


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(ValueError, match=r"^x='a{79}: a number is allowed$"):
        real_number("x", "a" * 10_000)


@given(NAMES, st.text(alphabet="abcdefgh_"))
def test_a_choice_is_one_of_the_names(names: list[str], word: str) -> None:
    for name in names:
        choice("way", name, names)
    assume(word not in names)
    with pytest.raises(Refused) as raised:
        choice("way", word, iter(names), error=Refused, also=", or none")
    said = str(raised.value)
    assert said.startswith(f"way={word!r:.80}: allowed are {', '.join(map(repr, names))}, or none")
    near = nearest(word, names)
    assert near is None or near in names
    assert said.endswith(f'; did you mean "{near}"?' if near else "or none")
    assert did_you_mean(word, names) == (f"did you mean {near!r}? " if near else "")


@given(ODD, NAMES)
def test_what_is_no_choice(value: Any, names: list[str]) -> None:
    assume(value not in names)
    with pytest.raises(ValueError, match="allowed are"):
        choice("way", value, names, meant={"x": names[0]})


def test_another_word_for_a_choice() -> None:
    with pytest.raises(ValueError, match='did you mean "cuda"'):
        choice("device", "gpu", ["cpu", "cuda"], meant={"gpu": "cuda"})


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "0x1", "1_0", "٣", "9" * 40, "../../x", "__import__('os')", "1\n2"])
def test_a_variable_that_holds_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RANK", text)
    with pytest.raises(ValueError, match=r"^the environment variable RANK is .* of at least 0 is allowed.* Try: unset RANK$"):
        number_in_environment("RANK", 0)


def test_a_variable_that_holds_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", 5), (" 3 ", 3), ("0", 0)):
        monkeypatch.setenv("RANK", text)
        assert number_in_environment("RANK", 5) == expected
    with pytest.raises(ValueError, match="of at least 1"):
        number_in_environment("RANK", 5, least=1)
    monkeypatch.delenv("RANK")
    assert number_in_environment("RANK", 5) == 5


def test_for_a_script_that_is_not_there_a_near_name_is_meant_and_else_all_are_named(tmp_path: Path) -> None:
    assert near_script(tmp_path / "train.py") == "the folder has no .py file"
    for name in ("strange.py", "my.py", "train_notes.md"):
        (tmp_path / name).touch()
    assert near_script(tmp_path / "train.yp") == "the folder has my.py, strange.py"
    (tmp_path / "train.py").touch()
    for named in ("train.yp", "trian.py", "train", "Train.py"):
        assert near_script(tmp_path / named) == f'did you mean "{tmp_path / "train.py"}"?', named
    for number in range(9):
        (tmp_path / f"other{number}.py").touch()
    assert near_script(tmp_path / "main.py").endswith("other5.py, other6.py and 4 more")
    assert near_script(tmp_path / "nowhere" / "train.py") == f"there is no folder {tmp_path / 'nowhere'}"


def test_a_suggestion_is_made_once() -> None:
    """Python's own traceback repeated it: "did you mean 'timelines'?. Did you mean: 'timelines'?"."""
    code = "from workbench.core.checks import NearestAttribute as N\nclass Run(N):\n    timelines = 1\nRun().timeline"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stderr
    assert said.splitlines()[-1].endswith("'Run' object has no attribute 'timeline': did you mean 'timelines'?")
