"""Traces of several ranks: who waits for whom, found in runs made by hand in which that is known."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.traced import data, event, launched, op, step, write
from workbench import plot
from workbench.traces.analysis.arrivals import Arrivals
from workbench.traces.analysis.captured import Captured
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.stragglers import RankParts, Stragglers
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet

matplotlib.use("Agg")

EXCHANGE = 50
"""Microseconds that each all-reduce takes when all are there."""
Own = Mapping[str, Sequence[int]]
"""Microseconds of each step that a rank spends waiting for data, computing, in Python."""


def world(folder: Path, ranks: Sequence[Own], *, clocks: Sequence[float] | None = None, named: bool = False) -> list[Path]:
    """Files of a synchronous training: every rank does its own work, then all leave an all-reduce together.

    Args:
        folder: for the files.
        ranks: what each does by itself.
        clocks: what the clock of each is ahead of the first one's.
        named: the ranks are in the names of the files, and not in them.
    """
    events: list[list[Any]] = [[] for _ in ranks]
    at = 1e6
    for number in range(len(ranks[0]["compute"])):
        arrived = []
        for rank, own in enumerate(ranks):
            wait, compute, host = (own.get(part, [0] * 99)[number] for part in ("data_wait", "compute", "host"))
            events[rank] += [data(at, wait), op("aten::mm", at + wait, compute)]
            arrived.append(at + wait + compute + host)
        end = max(arrived) + EXCHANGE
        for rank, came in enumerate(arrived):
            events[rank] += [step(7 + number, at, end - at), event("gloo:all_reduce", "user_annotation", came, end - came, lane=9)]
        at = end
    paths = []
    for rank, found in enumerate(events):
        ahead = clocks[rank] if clocks else 0.0
        moved = [{**one, "ts": one["ts"] + ahead} for one in found]
        about = {} if named else {"distributedInfo": {"rank": rank, "world_size": len(ranks)}}
        paths.append(write(folder / f"host_rank{rank}.{rank + 1}.pt.trace.json.gz", moved, **about))
    return paths


def even(steps: int = 5, **more: int) -> Own:
    return {part: [length] * steps for part, length in ({"data_wait": 100, "compute": 500} | more).items()}


TIMES = st.lists(st.integers(100, 3000), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.fixed_dictionaries({"data_wait": TIMES, "compute": TIMES}), min_size=2, max_size=4))
def test_waits_are_what_was_waited(tmp_path_factory: pytest.TempPathFactory, ranks: list[Own]) -> None:
    found = TraceSet.load(world(tmp_path_factory.mktemp("w"), ranks))
    own = np.array([np.add(one["data_wait"], one["compute"]) for one in ranks]) / 1e6
    late, parts, came = found.stragglers(), found.breakdown(), found.arrivals()
    expected = own.max(axis=0) - own
    for row in late.rows:
        assert row.waits == pytest.approx(expected[row.rank].mean(), abs=1e-8)
        assert row.collectives == pytest.approx(row.waits + EXCHANGE / 1e6, abs=1e-8)
    assert sum(row.last for row in late.rows) == late.steps == 4
    assert sum(row.held_up for row in late.rows) == pytest.approx(late.lost, abs=1e-9)
    assert late.seconds <= late.lost + 1e-9
    for rank in late.ranks:  # nobody is blamed who waits more than somebody who is not
        assert late.rows[rank].waits <= min((row.waits for row in late.rows if row.rank not in late.ranks), default=np.inf)
    assert parts.values("data_wait") == pytest.approx(np.array([one["data_wait"] for one in ranks]) / 1e6, abs=1e-8)
    assert came.shared
    assert came.rows[0].skew == pytest.approx((own.max(axis=0) - own.min(axis=0)).mean(), abs=1e-8)
    assert came.rows[0].exchange == pytest.approx(EXCHANGE / 1e6, abs=1e-8)
    for result, kind in ((late, Stragglers), (parts, RankParts), (came, Arrivals)):
        assert kind.from_json(json.loads(json.dumps(result.to_json()))) == result  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("part", "word"), [("data_wait", "its loader is slower"), ("compute", "aten::mm"), ("host", "Python or the operating")]
)
@pytest.mark.parametrize("who", [0, 2])
def test_a_straggler_and_why(tmp_path: Path, part: str, word: str, who: int) -> None:
    ranks = [even() for _ in range(3)]
    ranks[who] = even(**{part: dict(even()).get(part, [0])[0] + 400})
    found = TraceSet.load(world(tmp_path, ranks)).stragglers()
    assert (found.rank, found.ranks, found.phase) == (who, (who,), part)
    assert found.seconds == pytest.approx(400e-6)
    assert found.excess[part] == pytest.approx(400e-6)
    assert found.share == pytest.approx(400 / 1050)
    assert word in found.why
    assert found.verdict == f"rank {who}: the others wait 400 µs a step, 38 % of its time"
    told = TraceSet.load(tmp_path).explain()
    assert told.verdict == "straggler"
    assert not any("waiting for a slower rank" in one for one in told.cannot)
    assert sum(told.shares.values()) == pytest.approx(1)


def test_operators_that_are_called_more_often(tmp_path: Path) -> None:
    paths = world(tmp_path, [even(), even(compute=900)])
    raw = Trace.load(paths[1])
    assert raw.rank == 1
    (detail,) = TraceSet.load(paths).stragglers().details
    assert detail == "aten::mm +400 µs (called as often)"


def test_collectives_are_no_reason_for_computing(tmp_path: Path) -> None:
    """The slow rank is in `c10d::allreduce_` for longer, too, and that is not why its own work takes longer."""
    paths = world(tmp_path, [even(), even(compute=900)])
    events = json.loads(gzip.decompress(paths[1].read_bytes()))
    calls = [{**one, "name": "c10d::allreduce_", "ts": one["ts"] + 1} for one in events["traceEvents"] if one["name"] == "aten::mm"]
    calls = [{**one, "tid": 5, "pid": 5} for one in calls]
    write(paths[1], [*events["traceEvents"], *calls], distributedInfo=events["distributedInfo"])
    found = TraceSet.load(paths)
    assert found[1].per_step()["c10d::allreduce_"][0] == pytest.approx(900e-6)
    assert found.stragglers().details == ("aten::mm +400 µs (called as often)",)


def test_a_straggler_is_one_by_what_is_said_of_it(tmp_path: Path) -> None:
    """In the median step it costs more than 5 %, and in the mean, which the sentence has, less: it is not named."""
    late = [40, 40, 40, 0, 0]
    found = TraceSet.load(world(tmp_path, [even(), {"data_wait": [100] * 5, "compute": [500 + one for one in late]}])).stragglers()
    assert found.lost / (650 + 24) < 0.05 < 40 / 690
    assert found.ranks == ()


def test_what_the_profiler_costs_is_said_once(tmp_path: Path) -> None:
    for rank, path in enumerate(world(tmp_path, [even(), even()])):
        captured = Captured(path=path, traced=2.0 + rank, plain=1.0, compared=4, notes=["both", f"only {rank}"])
        Captured.beside(path).write_text(json.dumps(captured.to_json()))
    notes = TraceSet.load(tmp_path).breakdown().notes
    assert [note for note in notes if "slows" in note] == [
        "rank 1: the profiler slows these steps down by 200 %: small operators look more expensive than they are"
    ]
    assert "both" in notes
    assert {"rank 0: only 0", "rank 1: only 1"} <= set(notes)


def test_two_slow_ranks_of_four(tmp_path: Path) -> None:
    found = TraceSet.load(world(tmp_path, [even(), even(compute=900), even(), even(compute=905)])).stragglers()
    assert found.ranks == (1, 3)
    assert found.rank == 3
    assert found.verdict.startswith("ranks 1, 3: the others wait 405 µs")


def test_one_that_is_faster_than_the_others_holds_nobody_up(tmp_path: Path) -> None:
    found = TraceSet.load(world(tmp_path, [even(), even(), even(compute=100)])).stragglers()
    assert found.ranks == ()
    assert found.rank is None
    assert found.lost == 0


def test_ranks_that_take_turns(tmp_path: Path) -> None:
    slow, fast = [900, 500, 900, 500], [500, 900, 500, 900]
    found = TraceSet.load(world(tmp_path, [{"compute": slow}, {"compute": fast}]))
    late = found.stragglers()
    assert late.ranks == ()
    assert (late.lost, late.seconds) == (pytest.approx(400e-6), 0)
    assert "no rank in particular: they take turns in coming last, which costs 400 µs a step" in str(late)
    assert "they take turns" in found.explain().why


def test_the_last_of_many_ranks_in_one_step(tmp_path: Path) -> None:
    """One came first, and most waited less than half as long: no rank was named, and they were said to take turns in one step."""
    ranks = [{"compute": [own]} for own in (100, 1300, 1300, 1350, 1400, 2000)]
    found = TraceSet.load(world(tmp_path, ranks))
    late = found.stragglers()
    assert late.ranks == (5,)
    assert late.verdict == "rank 5: the others wait 700 µs a step, 34 % of its time"
    assert found.explain().verdict == "straggler"
    (tmp_path / "even").mkdir()
    early = TraceSet.load(world(tmp_path / "even", [{"compute": [own]} for own in (100, 1995, 1990, 2000, 2000, 2000)])).stragglers()
    assert early.ranks == ()
    assert early.verdict.startswith("none: ")


def test_waiting_is_told_from_exchanging(tmp_path: Path) -> None:
    """Ranks that take turns in coming late were advised to send fewer bytes, where the exchange took 50 of 850 µs."""
    slow, fast = [900, 100, 900, 100], [100, 900, 100, 900]
    found = TraceSet.load(world(tmp_path, [{"compute": slow}, {"compute": fast}]))
    told, met = found.explain(), found.arrivals()
    assert (met.exchanging, met.waiting) == (pytest.approx(200e-6), pytest.approx(3200e-6))
    assert told.verdict == "communication-bound"
    assert "of all collectives the exchange takes 200 µs, and waiting for the last rank 3.20 ms" in told.why
    assert "fewer bytes would not help" in told.next
    (tmp_path / "even").mkdir()
    exchange = TraceSet.load(world(tmp_path / "even", [even(compute=5, data_wait=0), even(compute=5, data_wait=0)])).explain()
    assert exchange.verdict == "communication-bound"
    assert "larger buckets" in exchange.next


def test_one_bad_step_makes_no_straggler(tmp_path: Path) -> None:
    found = TraceSet.load(world(tmp_path, [even(), {"data_wait": [100] * 5, "compute": [500, 500, 9000, 500, 500]}])).stragglers()
    assert found.ranks == ()


def test_equal_ranks(tmp_path: Path) -> None:
    found = TraceSet.load(world(tmp_path, [even(), even(compute=505)]))
    assert found.stragglers().verdict == "none: waiting for the last rank costs 5.00 µs a step, 0.8 %"
    assert found.explain().verdict == "input-bound"  # as each rank says


def test_clocks_of_different_machines_are_aligned(tmp_path: Path) -> None:
    ranks = [even(), even(compute=700), even(compute=900)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = TraceSet.load(world(tmp_path / "a", ranks)).arrivals()
    other = TraceSet.load(world(tmp_path / "b", ranks, clocks=[0, 5e6, -3e4])).arrivals()
    assert (one.shared, other.shared) == (True, False)
    assert other.rows[0].skew == pytest.approx(one.rows[0].skew) == pytest.approx(400e-6)
    assert other.rows[0].last == {2: 5}
    assert "aligned" in str(other)
    hosts = write(tmp_path / "rank0.json", [step(1, 0, 10)], host_name="here", distributedInfo={"rank": 0, "world_size": 1})
    assert Trace.load(hosts).host == "here"
    assert "agree within 0 s" in str(one)


def test_of_a_device(tmp_path: Path) -> None:
    paths = []
    for rank, lag in enumerate((0, 30)):
        found = []
        for number, at in enumerate((0, 200, 400, 600)):
            found += [
                step(number, at, 190),
                *launched("sgemm", at + 2, at + 20, 60 + lag, 10 * number),
                *launched("ncclDevKernel_AllReduce_Sum_f32", at + 4, at + 80 + lag, 60 - lag, 10 * number + 1),
            ]
        paths.append(write(tmp_path / f"r{rank}.json", found, distributedInfo={"rank": rank, "world_size": 2}))
    found_set = TraceSet.load(paths)
    late = found_set.stragglers()
    assert (late.rank, late.phase, late.steps) == (1, "compute", 3)
    assert late.seconds == pytest.approx(30e-6)
    assert late.details == ("sgemm +30.0 µs (called as often)",)
    assert found_set.arrivals().rows[0].name == "ncclDevKernel_AllReduce_Sum_f32"


# --- a set


def test_a_set(tmp_path: Path) -> None:
    paths = world(tmp_path, [even(), even(compute=900)])
    found = Trace.load(tmp_path)
    assert isinstance(found, TraceSet)
    assert found.ranks == (0, 1)
    assert list(found) == [0, 1]
    assert len(found) == 2
    assert found[1].path == paths[1]
    assert found.world_size == 2
    assert found.slowdown is None
    assert found.notes == ()
    with pytest.raises(KeyError, match="no trace of rank 2: there are those of 0, 1"):
        found[2]
    assert repr(found) == "TraceSet(ranks=[0, 1])"
    for shown in (found, found.breakdown(), found.stragglers(), found.arrivals(), found.explain()):
        assert str(shown)
        assert "<table" in shown._repr_html_()
        assert len(shown.to_frame())
    assert "spread" in str(found.breakdown())
    assert found.breakdown().spread("compute") == pytest.approx(400e-6)
    assert TraceSet.load(reversed(paths)).ranks == (0, 1)
    assert wb.TraceSet is TraceSet


def test_ranks_by_name(tmp_path: Path) -> None:
    world(tmp_path, [even(), even()], named=True)
    found = TraceSet.load(tmp_path)
    assert (found.ranks, found.world_size) == ((0, 1), None)
    alone = TraceSet.load(tmp_path / "host_rank1.2.pt.trace.json.gz")
    assert alone.ranks == (1,)
    assert alone.stragglers().verdict == "one rank has a trace: waiting shows only in traces of several"
    assert alone.explain().verdict == alone[1].explain().verdict


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    paths = world(tmp_path, [even() for _ in range(4)])
    assert TraceSet.load([paths[0], paths[2]]).notes == ("2 of 4 ranks have no trace here: 1, 3",)
    assert "have no trace here" in str(TraceSet.load([paths[0], paths[2]]).stragglers())


def test_files_of_several_jobs(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [world(tmp_path / "a", [even(), even()])[0], world(tmp_path / "b", [even()] * 3)[1]]
    assert TraceSet.load(paths).notes == ("the files are of jobs with 2, 3 ranks: are they of one run?",)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "names none"),
        (["nothing"], "nothing"),
        (["."], "has no traces: such files end in .json or .json.gz, and have traceEvents"),
        (["rank0.json", "rank0b.json"], "two traces of rank 0: rank0.json and rank0b.json"),
        (["rank0.json", "other.json"], "other.json does not say of which rank it is"),
    ],
)
def test_no_set(tmp_path: Path, names: list[str], said: str) -> None:
    for name in ("rank0.json", "rank0b.json", "other.json"):
        write(tmp_path / name, [step(1, 0, 10)])
    folder = tmp_path / "empty"
    folder.mkdir()
    given: Any = folder if names == ["."] else [tmp_path / name for name in names]
    with pytest.raises(TraceError, match=said):
        TraceSet.load(given)
    with pytest.raises(TraceError, match="at least one is needed"):
        TraceSet.of([])


def test_steps_that_not_all_have(tmp_path: Path) -> None:
    a = write(tmp_path / "rank0.json", [step(n, 100 * n, 100) for n in (1, 2, 3)])
    b = write(tmp_path / "rank1.json", [step(n, 100 * n, 100) for n in (2, 3, 4)])
    parts = TraceSet.load([a, b]).breakdown()
    assert parts.steps == (2, 3)
    assert "of up to 3 steps 2 are in all traces" in parts.caption
    assert "no collective shows in these traces" in str(TraceSet.load([a, b]).stragglers())
    with pytest.raises(ValueError, match="no part 'data'"):
        parts.mean(0, "data")
    with pytest.raises(ValueError, match="no rank 5"):
        parts.mean(5)


def test_files_without_marks(tmp_path: Path) -> None:
    def updates(count: int) -> list[dict[str, Any]]:
        return [event("Optimizer.step#SGD.step", "user_annotation", 100 * n, 10) for n in range(count)]

    paths = [write(tmp_path / f"rank{rank}.json", updates(4 + rank)) for rank in (0, 1)]
    parts = TraceSet.load(paths).breakdown()
    assert len(parts.steps) == 3
    assert "the last steps of each are taken for the same ones" in parts.caption


def test_collectives_that_do_not_match(tmp_path: Path) -> None:
    def rank(calls: int) -> list[dict[str, Any]]:
        return [step(1, 0, 1000)] + [event("gloo:all_reduce", "user_annotation", 100 * n, 50, lane=9) for n in range(calls)]

    paths = [write(tmp_path / f"rank{calls}.json", rank(calls)) for calls in (1, 2)]
    found = TraceSet.load(paths).arrivals()
    assert found.rows == ()
    assert "2 collectives are not on every rank as often" in str(found)
    assert found.apart is None


# --- the picture


def test_bars_per_rank(tmp_path: Path) -> None:
    found = TraceSet.load(world(tmp_path, [even(), even(data_wait=500)]))
    ax = found.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1 (straggler)"]
    widths = np.array([[bar.get_width() for bar in container] for container in ax.containers])
    assert widths.sum(axis=0) == pytest.approx([found.breakdown().mean(rank) * 1e3 for rank in (0, 1)], rel=1e-6)
    assert plot.ranks(found.breakdown(), ax) is ax
    empty = TraceSet.load([write(tmp_path / f"rank{n}.json", [step(n, 0, 10)]) for n in (0, 1)]).breakdown()
    with pytest.raises(ValueError, match="has no step that all ranks have"):
        plot.ranks(RankParts(ranks=empty.ranks, steps=(), breakdowns=()))
