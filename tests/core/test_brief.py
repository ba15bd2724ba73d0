"""Briefs: what is cut so that they stay small, and what is kept."""

import copy
import json
import math
from typing import Any

import workbench as wb
from workbench.core.brief import BRIEF_BYTES, fitted, number, short, three
from workbench.core.statistics import Interval
from workbench.runs.launch.prove_resume import Kill


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


def test_a_proof_has_a_brief_of_its_answer_and_its_fields() -> None:
    proof = wb.RepeatProof(steps=20, ranks=2, difference=None, first="runs/a", second="runs/b")
    brief = proof.brief()
    assert brief["answer"] == proof.verdict
    assert (brief["ok"], brief["steps"], brief["ranks"], brief["first"]) == (True, 20, 2, "runs/a")
    assert "difference" not in brief

    long = wb.RepeatProof(steps=20, ranks=2, difference=None, first="é" * 900, second="b" * 900)
    assert len(json.dumps(long.brief(), ensure_ascii=False).encode()) <= BRIEF_BYTES


def test_a_brief_of_many_kills_is_cut_at_its_end() -> None:
    kills = tuple(Kill(step=i, rank=0, resumed_from=i - 1, restart_s=0.1) for i in range(1, 200))
    proof = wb.ResumeProof(steps=200, ranks=1, kills=kills, difference=None, undisturbed="a", interrupted="b")
    brief = proof.brief()
    assert len(json.dumps(brief, ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert brief["kills"][0] == {"step": 1, "rank": 0, "resumed_from": 0, "restart_s": 0.1}
    assert len(brief["kills"]) + brief["left_out"] == 199
