"""The layout of a trace's events, what a window on it shows, search, the operators of a part: no event and no nanosecond is lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traced import event, on_cpu, on_device, op, step, write
from workbench.traces.analysis.event_kinds import KINDS
from workbench.traces.analysis.layout import Layout, Tiles, lay_out, tiles
from workbench.traces.analysis.operators import Ranking
from workbench.traces.analysis.trace import Trace

CALLS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 60), st.integers(1, 3), st.sampled_from(["aten::a", "aten::b", "aten::mm"])),
    min_size=1,
    max_size=80,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def laid(folder: Path, calls: list[tuple[int, int, int, str]]) -> Layout:
    return lay_out(Trace.load(write(folder / "a.json", [op(name, start, length, lane=lane) for start, length, lane, name in calls])))


def in_order(found: Layout | Tiles) -> bool:
    """Rows from first to last, and in a row each after the other."""
    same = found.row[1:] == found.row[:-1]
    return bool(np.all(found.row[1:] >= found.row[:-1]) and np.all(found.start[1:][same] >= found.end[:-1][same]))


@given(calls=CALLS)
def test_every_event_has_a_place_and_none_lies_on_another(folder: Path, calls: list[tuple[int, int, int, str]]) -> None:
    found = laid(folder, calls)
    assert len(found) == len(calls)
    first = min(start for start, *_ in calls)
    wanted = sorted(((start - first) * 1000, (start - first + length) * 1000, name) for start, length, _, name in calls)
    names = [found.names[code] for code in found.name.tolist()]
    assert sorted(zip(found.start.tolist(), found.end.tolist(), names, strict=True)) == wanted
    assert in_order(found)
    assert [strip.first for strip in found.strips] == np.cumsum([0, *[strip.rows for strip in found.strips]])[:-1].tolist()
    assert sum(strip.events for strip in found.strips) == len(calls)
    assert [(found.row == row).sum() for row in range(found.rows)] == np.diff(found.edges).tolist()


@given(calls=CALLS, begin=st.integers(-10, 300), length=st.integers(1, 400), bins=st.integers(1, 50), most=st.integers(1, 60))
def test_tiles_lose_nothing(folder: Path, calls: list[tuple[int, int, int, str]], begin: int, length: int, bins: int, most: int) -> None:
    found = laid(folder, calls)
    start, end = begin * 1000, (begin + length) * 1000
    chosen = found.chosen(found.find("MM"))
    made = tiles(found, start, end, bins=bins, most=most, chosen=chosen)
    seen = (found.start < end) & ((found.end > start) | (found.start >= start))
    clipped = np.where(seen, np.minimum(found.end, end) - np.maximum(found.start, start), 0)
    assert made.count.sum() == seen.sum()
    assert made.busy.sum() == clipped.sum()
    assert made.lit.sum() == clipped[chosen].sum()
    assert made.chosen.sum() == (seen & chosen).sum()
    assert in_order(made)
    assert len(made) <= max(most, 3 * found.rows)
    for row in range(found.rows):
        assert made.busy[made.row == row].sum() == clipped[found.row == row].sum()
    assert np.all(made.count[made.end - made.start >= made.width] >= 1)
    assert np.all(made.busy <= made.end - made.start)
    assert np.all(found.row[made.place] == made.row)
    assert np.all(chosen[made.place] == (made.chosen > 0))


@given(calls=CALLS, row=st.integers(-1, 5), time=st.integers(0, 400))
def test_what_lies_under_a_pointer(folder: Path, calls: list[tuple[int, int, int, str]], row: int, time: int) -> None:
    found = laid(folder, calls)
    at = found.at(row, time * 1000 + 0.5)
    under = np.flatnonzero((found.row == row) & (found.start <= time * 1000) & (found.end > time * 1000))
    assert ([] if at is None else [at]) == under.tolist()


@given(calls=CALLS)
def test_matches_come_in_turn_and_all_of_them(folder: Path, calls: list[tuple[int, int, int, str]]) -> None:
    found = laid(folder, calls)
    mask = found.chosen(found.called(["aten::mm"]))
    for way in (1, -1):
        visited: list[int] = []
        place = found.following(mask, None, way)
        while place is not None and place not in visited:
            visited.append(place)
            place = found.following(mask, place, way)
        assert sorted(visited) == np.flatnonzero(mask).tolist()
        times = found.start[visited].tolist()
        assert times == sorted(times, reverse=way < 0)


def test_calls_lie_below_their_callers(tmp_path: Path) -> None:
    found = lay_out(Trace.load(write(tmp_path / "a.json", on_cpu())))
    main, gloo = found.strips
    assert (main.name, main.rows, main.device) == ("1 1", 3, False)
    assert (gloo.rows, gloo.events) == (1, 2)
    rows = {found.names[found.name[i]]: int(found.row[i]) for i in range(len(found))}
    assert rows["ProfilerStep#5"] == 0
    assert rows["aten::linear"] == 1
    assert rows["aten::addmm"] == rows["aten::stack"] == 2
    assert found.span == (0, 200_000)


def test_streams_of_a_device_come_first_and_the_copies_of_ranges_are_left_out(tmp_path: Path) -> None:
    found = lay_out(Trace.load(write(tmp_path / "a.json", on_device())))
    assert [strip.device for strip in found.strips] == [True, False]
    assert "## backward ##" not in {found.names[code] for code in found.name.tolist()}
    assert KINDS.index("communication") in found.kind.tolist()


def test_ranks_are_set_below_each_other_at_a_common_step(tmp_path: Path) -> None:
    early = Trace.load(write(tmp_path / "a.json", [step(1, 0, 100), step(2, 100, 100), op("aten::a", 110, 5)]))
    late = Trace.load(write(tmp_path / "b.json", [op("aten::a", 0, 5), step(2, 30, 50), step(3, 80, 50)]))
    found = lay_out({0: early, 1: late})
    assert [strip.rank for strip in found.strips] == [0, 1]
    marks = [int(found.start[i]) for i in range(len(found)) if found.names[found.name[i]] == "ProfilerStep#2"]
    assert marks == [100_000, 100_000]
    assert set(found.source.tolist()) == {0, 1}
    apart = lay_out({0: early, 1: Trace.load(write(tmp_path / "c.json", [step(9, 30, 50)]))})
    assert apart.span == (0, 200_000)


def test_search(tmp_path: Path) -> None:
    found = lay_out(Trace.load(write(tmp_path / "a.json", on_cpu())))
    assert [found.names[code] for code in found.find("LINEAR")] == ["aten::linear"]
    assert len(found.find("aten::")) == 3
    assert len(found.find("")) == len(found.find("  ")) == len(found.find("nobody")) == 0
    assert found.chosen(found.find("aten::linear")).sum() == 2
    assert found.following(found.chosen(found.find("nobody")), None) is None
    assert found.called(["aten::linear", "nobody"]).tolist() == found.find("aten::linear").tolist()


def test_a_page_gets_columns_and_each_name_once(tmp_path: Path) -> None:
    found = lay_out(Trace.load(write(tmp_path / "a.json", [op("aten::<b>", 10 * i, 5) for i in range(20)])))
    packed = tiles(found, 100_000, 200_000).packed(found)
    assert packed["names"] == ["aten::<b>"]
    assert packed["origin"] == 100_000
    assert np.frombuffer(packed["start"], "<f8").tolist() == [10_000 * i for i in range(10)]
    assert np.frombuffer(packed["busy"], "<f8").tolist() == [5_000] * 10
    assert set(np.frombuffer(packed["kind"], "<i4").tolist()) == {KINDS.index("operator")}
    assert tiles(found, 10**9, 10**9 + 5).packed(found)["names"] == []


def test_many_events_are_few_rectangles(tmp_path: Path) -> None:
    found = lay_out(Trace.load(write(tmp_path / "a.json", [op("aten::a", 10 * i, 5) for i in range(5_000)])))
    made = tiles(found, *found.span, bins=100)
    assert 90 <= len(made) <= 101
    assert made.count.sum() == 5_000
    assert len(tiles(found, *found.span, bins=5_000, most=50)) <= 50
    with pytest.raises(ValueError, match="has to end after it begins"):
        tiles(found, 5, 5)


def test_a_scene_without_events(tmp_path: Path) -> None:
    empty = lay_out(Trace.load(write(tmp_path / "a.json", [event("a", "gpu_user_annotation", 0, 5)])))
    assert (len(empty), empty.rows, empty.span) == (0, 0, (0, 1))
    assert len(tiles(empty, 0, 1)) == 0
    assert empty.at(0, 0) is None


@pytest.mark.parametrize("made", [on_cpu, on_device])
@pytest.mark.parametrize("which", ["operator", "kernel"])
def test_the_ranking_of_everything_is_that_of_the_trace(tmp_path: Path, made: Any, which: Any) -> None:
    trace = Trace.load(write(tmp_path / "a.json", made()))
    ranked = Ranking(trace.columns, trace.kinds).within(0, float("inf"), which)
    rows = trace.ops(which).rows
    assert [(one.name, one.count) for one in ranked] == [(one.name, one.count) for one in rows]
    assert [one.self_seconds for one in ranked] == pytest.approx([one.self_seconds for one in rows])
    assert [one.total_seconds for one in ranked] == pytest.approx([one.total_seconds for one in rows])
    assert [one.share for one in ranked] == pytest.approx([one.share for one in rows])


def test_the_ranking_of_a_part(tmp_path: Path) -> None:
    trace = Trace.load(write(tmp_path / "a.json", on_cpu()))
    ranking = Ranking(trace.columns, trace.kinds)
    one, both = ranking.within(0, 100_000), ranking.within(0, 200_000)
    assert [(row.name, 2 * row.count) for row in one] == [(row.name, row.count) for row in both]
    assert ranking.within(300_000, 400_000) == ()
    linear = [i for i, label in enumerate(trace.columns.label) if trace.columns.labels[label].name == "aten::linear"]
    assert ranking.own(linear[0]) == pytest.approx(10e-6)
