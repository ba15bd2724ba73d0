"""Briefs: what is cut so that they stay small, and what is kept."""

import copy
import json
import math
from typing import Any

from workbench.core.brief import BRIEF_BYTES, fitted, number, short, three
from workbench.core.statistics import Interval


def test_the_longest_list_is_cut_at_its_end_and_the_last_one_only_when_the_others_are_empty() -> None:
    brief: dict[str, Any] = {
        "verdict": "é" * 100,
        "failed": ["x" * 300] * 9,
        "notes": ["ä" * 99] * 9,
        "tried": {str(i): i for i in range(99)},
    }
    cut = fitted(copy.deepcopy(brief), "failed", "notes", "tried", last="failed")
    assert len(json.dumps(cut, ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert (cut["verdict"], cut["notes"], cut["tried"]) == (brief["verdict"], [], {})
    assert 0 < len(cut["failed"]) < 9
    assert cut["left_out"] == 9 + 99 + 9 - len(cut["failed"])
    cut = fitted(brief | {"failed": ["x"]}, "failed", "notes", "tried", last="failed")
    assert len(json.dumps(cut, ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert list(cut["tried"])[:3] == ["0", "1", "2"]
    assert cut["notes"]


def test_what_fits_stays_as_it_is_and_what_cannot_fit_ends() -> None:
    assert fitted({"notes": ["a", "b"]}, "notes") == {"notes": ["a", "b"]}
    assert fitted({"verdict": "x" * 3000, "notes": ["a", "b"]}, "notes")["left_out"] == 2


def test_numbers_and_texts() -> None:
    assert (number(1.23456), number(math.inf), number(math.nan)) == (1.23, None, None)
    assert three(Interval(low=1, mid=2, high=math.inf)) == [1.0, 2.0, None]
    assert (short("abc", 3), short("abcd", 3)) == ("abc", "ab…")
