"""Steps read into columns: what they come to is what a Timeline of the same rows says, however the file grows or is damaged."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.core.vocabulary import PHASES
from workbench.runs.panel.follow import Follower
from workbench.runs.rank_steps import RankMeans, RankSteps
from workbench.runs.rows import RunRows
from workbench.runs.run import Run
from workbench.timeline.timeline import WARNING, Timeline

HEAD = {"rank": 3, "world_size": 4, "clock": "host", "pid": 1, "device": "cpu"}
NUMBERS = st.one_of(st.integers(0, 2**40), st.floats(0, 1e6), st.integers(0, 9).map(lambda n: n * 1e-9))
ROWS = st.one_of(
    st.builds(
        lambda step, phases, readings: {"step": step, **phases, **readings},
        st.integers(0, 30),
        st.dictionaries(st.sampled_from(PHASES), NUMBERS),
        st.dictionaries(st.sampled_from(["samples", "memory", "cpu", "more"]), st.one_of(st.none(), NUMBERS)),
    ),
    st.just({"note": "a word"}),
    st.just({"anything": 1}),
    st.just({**HEAD, "clock": "device"}),
)
DAMAGE = st.sampled_from(
    [
        '{"step": 1.0}', '{"step": 1e0}', '{"step": -1}', '{"step": true}', '{"step": null}', '{"step": "1"}',
        '{"step": 99999999999999999999}',
        '{"step": 1, "forward": null}', '{"step": 1, "forward": "1"}', '{"step": 1, "forward": -1e-9}', '{"step": 1, "forward": 1e400}',
        '{"step": 1, "forward": NaN}', '{"step": 1, "memory": Infinity}', '{"step": 1, "samples": true}', '{"step": 1, "cpu": [1]}',
        '{"step": 1, "memory": 9007199254740992}', '{"profiled": [1, 3]}', '{"profiled": [4, 1]}', "[1]", "5", "",
        "{", '{"step": 1}}', "\x00",
    ]
)  # fmt: skip


def compared(path: Path) -> tuple[RankMeans, RankMeans]:
    """What the two ways come to."""
    rows = run_directory.LineTail(path).read(salvage=True)
    return RunRows(path.parent).means(path.name), RankMeans.of(Timeline.from_lines(rows))


def check_same(one: RankMeans, other: RankMeans) -> None:
    assert (one.rank, one.clock, one.steps, one.left_out, one.count, one.memory) == (
        other.rank, other.clock, other.steps, other.left_out, other.count, other.memory
    )  # fmt: skip
    assert one.notes == other.notes
    for name in (None, *PHASES):
        assert one.mean(name) == pytest.approx(other.mean(name), rel=1e-12, nan_ok=True)
    assert one.share("forward") == pytest.approx(other.share("forward"), rel=1e-12, nan_ok=True)
    assert one.samples_per_sec == pytest.approx(other.samples_per_sec, rel=1e-12, nan_ok=True)


@given(rows=st.lists(ROWS, max_size=80), damage=st.lists(st.tuples(st.integers(0, 80), DAMAGE), max_size=2), grow=st.booleans())
def test_it_says_what_a_timeline_says(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], damage: list[tuple[int, str]], grow: bool
) -> None:
    path = tmp_path_factory.mktemp("run") / "rank3.jsonl"
    lines = [json.dumps(row) for row in [HEAD, *rows]]
    for place, line in damage:
        lines.insert(place, line)
    text = "".join(f"{line}\n" for line in lines)
    steps = RankSteps(path)
    if grow:  # in pieces that end within lines, too
        with open(path, "w") as file:
            for start in range(0, len(text), 37):
                file.write(text[start : start + 37])
                file.flush()
                if steps.read():
                    _ = steps.means
    path.write_text(text)
    means, expected = compared(path)
    check_same(means, expected)
    same = Timeline.from_lines(run_directory.LineTail(path).read(salvage=True))
    timeline = RunRows(path.parent).timeline(path.name)
    assert (timeline.steps, timeline.rank, timeline.clock, timeline.profiled, timeline.notes) == (
        same.steps, same.rank, same.clock, same.profiled, same.notes
    )  # fmt: skip
    if steps.plain and grow:
        steps.read()
        check_same(steps.means, expected)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "forward": 0.5, "samples": 8, **more}


def test_sound_files_are_read_into_columns_and_the_others_as_before(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in [HEAD, *map(step, range(100))])
    steps = RankSteps(path)
    assert steps.read()
    first = steps.means
    assert (first.steps, first.left_out, first.count, first.mean(), first.samples_per_sec) == (100, 10, 90, 0.5, 16.0)
    assert steps.read()
    assert steps.means is first  # nothing is new
    with open(path, "a") as file:
        file.write(json.dumps(step(100, memory=7)) + "\n" + json.dumps({"profiled": [1, 2]})[:5])
    assert steps.read()
    assert (steps.means.steps, steps.means.memory) == (101, 7)
    with open(path, "a") as file:
        file.write(json.dumps({"profiled": [1, 2]})[5:] + "\n")
    assert not steps.read()
    assert RunRows(tmp_path).means(path.name).count == 101 - 10


def test_a_row_too_deep_to_read_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps(step(0)) + "\n" + '{"a": ' + "[" * 100_000 + "\n" + json.dumps(step(1)) + "\n")
    files = RunRows(tmp_path)
    assert files.means(path.name).steps == 2
    assert "1 damaged row is left out" in files.notes[0]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    files = RunRows(tmp_path)
    path.write_text("".join(json.dumps(step(number)) + "\n" for number in range(60)))
    assert files.means(path.name).steps == 60
    before = files.timeline(path.name)
    assert files.timeline(path.name) is before
    run_directory.keep_rows(path, lambda row: row["step"] < 20)
    assert files.means(path.name).steps == len(files.timeline(path.name).steps) == 20
    assert math.isnan(RunRows(tmp_path).means("rank7.jsonl").mean())


def test_a_panel_goes_on_where_a_profiler_begins(by_hand: Callable[..., HandMade]) -> None:
    made = by_hand().alive().steps(60)
    follower = Follower(Run.load(made.path))
    with open(made.path / "rank0.jsonl", "a") as file:
        file.write(json.dumps({"note": f"{WARNING}it is cold"}) + "\n")
    before = follower.snapshot()
    assert before.notes == ("it is cold",)
    with open(made.path / "rank0.jsonl", "a") as file:
        file.write(json.dumps({"profiled": [60, 61]}) + "\n" + json.dumps(step(60)) + "\n")
    after = follower.snapshot()
    assert after.notes == ("it is cold",)
    assert [(rank.steps, rank.left_out) for rank in (*before.ranks, *after.ranks)] == [(60, 10), (61, 10)]
