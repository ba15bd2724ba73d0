"""Runs of very many ranks: what is read to open, summarise, show and compare them, and what it says."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.conftest import STEP, HandMade
from workbench.core import run_directory
from workbench.core.vocabulary import PHASES
from workbench.runs.page import run_text
from workbench.runs.panel import html as faces
from workbench.runs.panel.follow import Follower
from workbench.runs.rank_ends import HEAD, MANY_RANKS, TAIL, RankEnds, extremes
from workbench.runs.rank_steps import RankMeans
from workbench.runs.rows import RunRows
from workbench.timeline import rank_log
from workbench.timeline.timeline import WARNING, Timeline

Make = Callable[..., HandMade]
RANKS, STEPS = 1024, 600
SLOW, FULL = 700, 31


def spec(ranks: int) -> dict[str, Any]:
    return wb.RunSpec(task="clipart-resnet", nproc_per_node=8, nnodes=ranks // 8, steps=STEPS).to_json()


def lines(steps: int = STEPS, **changes: Any) -> str:
    head = {"rank": 0, "world_size": 2, "clock": "host"}
    return "".join(json.dumps(row) + "\n" for row in [head, *({"step": number, **STEP, **changes} for number in range(steps))])


@pytest.fixture
def very_many(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[HandMade, "Reads"]:
    """A run of 1,024 ranks: links to few files of steps without a first row, one slow rank, and one that takes more memory."""
    made = by_hand(spec=spec(RANKS)).losses(20).ended("finished")
    usual = lines().partition("\n")[2]
    for rank, text in {0: usual, SLOW: lines(forward=0.5).partition("\n")[2], FULL: lines(memory=2**30).partition("\n")[2]}.items():
        (made.path / run_directory.rank_file(rank)).write_text(text)
    for rank in range(RANKS):
        file = made.path / run_directory.rank_file(rank)
        if not file.exists():
            os.link(made.path / run_directory.rank_file(0), file)
    return made, Reads(monkeypatch)


class Reads:
    """The bytes that are read of files of ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, int] = {}
        self.whole: set[str] = set()
        """Files of which more than the ends were read at a time."""
        for module in ("workbench.core.run_directory", "workbench.runs.rank_ends"):
            monkeypatch.setattr(f"{module}.open", self._open, raising=False)

    def _open(self, path: Any, *arguments: Any) -> Any:
        file = open(path, *arguments)  # noqa: SIM115 (closed by who has opened it)
        read, name, before = file.read, Path(path).name, self.of.get(Path(path).name, 0)

        def counted(*size: int) -> Any:
            data = read(*size)
            self.of[name] = self.of.get(name, 0) + len(data)
            if self.of[name] - before > HEAD + TAIL:
                self.whole.add(name)
            return data

        class Counted:
            fileno, seek, read = file.fileno, file.seek, staticmethod(counted)
            __enter__, __exit__ = (lambda _: Counted()), (lambda *_: file.close())

        return Counted()

    @property
    def ranks(self) -> dict[str, int]:
        """Bytes by file of a rank."""
        return {name: size for name, size in self.of.items() if run_directory.rank_of(name) is not None}


def whole(reads: Reads) -> list[str]:
    return sorted(reads.whole & reads.ranks.keys())


def test_the_ends_are_read_at_once_and_the_rest_when_asked(very_many: tuple[HandMade, Reads]) -> None:
    made, reads = very_many
    run = wb.Run.load(made.path)
    assert reads.ranks == {}
    summary = run.summary
    assert len(reads.ranks) == RANKS
    assert whole(reads) == []
    first = run.rank_means[0]
    assert (first.steps, first.count > 50, first.left_out + first.count) == (STEPS, True, STEPS)
    assert [round(rank.mean("forward"), 9) for rank in run.rank_means[SLOW - 1 : SLOW + 2]] == [0.01, 0.5, 0.01]
    assert [rank.rank for rank in run.rank_means] == list(range(RANKS))
    assert run.samples_per_sec == pytest.approx(1023 * 8 / 0.065 + 8 / 0.555)
    assert "figures of 1,024 ranks are means of the last steps" in summary
    before = dict(reads.of)
    assert run.summary == summary
    assert reads.of == before  # nothing has changed
    timelines = run.timelines
    assert (len(timelines), len(timelines[10:20]), whole(reads)) == (RANKS, 10, [])
    assert (timelines[SLOW].mean("forward"), timelines[SLOW].rank) == (0.5, SLOW)
    assert timelines[SLOW].count == STEPS - 10
    assert timelines[10:20][1].rank == 11
    assert whole(reads) == ["rank11.jsonl", f"rank{SLOW}.jsonl"]
    assert repr(timelines) == "<the timelines of 1,024 ranks, each read on request>"


def test_panel_report_and_comparison_read_no_file_whole_but_those_at_the_extremes(very_many: tuple[HandMade, Reads]) -> None:
    made, reads = very_many
    run = wb.Run.load(made.path)
    assert extremes(run.rank_means) == [0, FULL, SLOW]
    now = Follower(run).snapshot()
    assert (len(now.ranks), now.memory, now.done) == (RANKS, 2**30, STEPS)
    bars = faces.phases(now)
    assert bars.count('class="wb-row"') == 3
    assert f"rank {SLOW}" in bars
    assert "3 of 1,024 ranks: the first, and those with the extreme values" in bars
    assert faces.static(run, now).count("<tr>") == 4
    other = wb.Run.load(made.path)
    compared = wb.compare(run, other)
    assert compared.seconds() == pytest.approx([run.rank_means[0].mean()] * 2, rel=0.05)
    assert whole(reads) == []
    assert compared.speedup == 1.0
    assert whole(reads) == [f"rank{SLOW}.jsonl"]
    assert run_text(run).count("measured on rank") == 3
    assert whole(reads) == ["rank0.jsonl", f"rank{FULL}.jsonl", f"rank{SLOW}.jsonl"]


def test_a_live_panel_looks_at_very_many_ranks_seldom(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand(spec=spec(MANY_RANKS + 8)).alive()
    follower = Follower(wb.Run.load(made.path))
    assert follower.snapshot().ranks == ()
    made.steps(20, rank=5)
    assert follower.snapshot().ranks == ()
    monkeypatch.setattr("workbench.runs.panel.follow.ENDS_EVERY", 0)
    assert [(rank.rank, rank.steps) for rank in follower.snapshot().ranks] == [(5, 20)]
    made.steps(20, rank=6).ended("finished")
    assert [rank.rank for rank in follower.snapshot().ranks] == [5, 6]


@pytest.mark.parametrize(
    ("text", "steps", "count"),
    [
        ("", 0, 0),
        (lines(20), 20, 16),
        (lines(20) + '{"step": 20, "forw', 20, 16),
        (lines(2000), 2000, None),
        (lines(2000) + '{"step": 2000, "forw', 2000, None),
        (lines(2000) + "broken\n", 2000, None),
        (lines(20) + '{"profiled": [5, 9]}\n', 20, 11),
    ],
)
def test_the_ends_of_a_file(tmp_path: Path, text: str, steps: int, count: int | None) -> None:
    path = tmp_path / "rank3.jsonl"
    path.write_text(text.replace('"rank": 0', '"rank": 3'))
    means = RankEnds(path).read().means
    assert (means.rank, means.steps, means.left_out + means.count) == (3, steps, steps - 5 * ("profiled" in text))
    assert means.count == count if count is not None else 50 < means.count < 200
    if means.count:
        assert means.mean("backward") == pytest.approx(STEP["backward"])
    if len(text) < HEAD + TAIL:
        expected = RankMeans.of(Timeline.from_lines([json.loads(line) for line in text.splitlines() if line.endswith("}")], rank=3))
        assert (means.count, means.left_out) == (expected.count, expected.left_out)


def test_ends_follow_their_file_and_keep_warnings(tmp_path: Path) -> None:
    path = tmp_path / "rank1.jsonl"
    ends = RankEnds(path)
    assert (ends.read().means.steps, ends.read().means.rank) == (0, 1)
    with open(path, "w") as file:
        file.write(lines(5) + json.dumps({"note": f"{WARNING}cold"}) + "\n")
        file.flush()
        assert ends.read().means.steps == 5
        file.writelines(json.dumps({"step": number, **STEP}) + "\n" for number in range(5, 3000))
    assert ends.read().means.steps == 3000
    assert {"note": f"{WARNING}cold"} in ends.other_rows
    run_directory.keep_rows(path, lambda row: row.get("step", 0) < 1000)
    assert ends.read().means.steps == 1000


def test_up_to_128_ranks_all_stand_for_themselves() -> None:
    nothing = RankMeans.of(Timeline())
    assert extremes([nothing] * MANY_RANKS) == list(range(MANY_RANKS))
    assert extremes([nothing] * 200) == [0]
    assert len(PHASES) == 6


def test_the_rank_of_a_file_without_its_first_row_is_that_of_its_name(by_hand: Make) -> None:
    made = by_hand(spec=spec(16)).ended("finished")
    for rank, more in ((2, ""), (11, '{"profiled": [1, 2]}\n')):  # read into columns, and row by row
        (made.path / run_directory.rank_file(rank)).write_text(lines(20).partition("\n")[2] + more)
    run = wb.Run.load(made.path)
    assert [timeline.rank for timeline in run.timelines] == [rank.rank for rank in run.rank_means] == [2, 11]
    files = [made.path / run_directory.rank_file(rank) for rank in (2, 11, 300)]  # the last is not there yet
    assert [RankEnds(path).read().means.rank for path in files] == [2, 11, 300]


def test_a_growing_run_is_read_once(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, reads = by_hand().alive(), Reads(monkeypatch)
    run = wb.Run.load(made.path)
    writers = [run_directory.LineWriter(made.path / name) for name in ("rank0.jsonl", "rank1.jsonl", "metrics.jsonl")]
    for look in range(20):
        for writer in writers[:2]:
            writer.write({"step": number, **STEP} for number in range(50 * look, 50 * look + 50))
        writers[2].write({"step": number, "loss": 1.0, "samples": 16, "seconds": 1.0} for number in range(50 * look, 50 * look + 50))
        assert run.summary.startswith(f"running · {50 * look + 49} ")
        if look == 10:  # from here on rank 1 is read row by row, and once more
            writers[1].write([{"profiled": [3, 4]}])
    sizes = {name: (made.path / name).stat().st_size for name in ("rank0.jsonl", "rank1.jsonl", "metrics.jsonl")}
    assert {name: reads.of[name] for name in ("rank0.jsonl", "metrics.jsonl")} == {
        name: sizes[name] for name in ("rank0.jsonl", "metrics.jsonl")
    }
    assert reads.of["rank1.jsonl"] < 1.7 * sizes["rank1.jsonl"]


ROWS = st.lists(st.tuples(*[st.integers(0, 10**9)] * 6, st.sampled_from([8, 8, 32, None])), min_size=1, max_size=60)


class Written:
    """A file as a rank writes it: steps at each flush, and other rows between them."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workbench.timeline.rank_log.INTERVAL", 3600)
        self.clock, self.device, self.notes, self.new = "host", None, (), list[Any]()
        self.path = path
        self.log = rank_log.attach(path, self)

    def harvest(self) -> list[Any]:
        new, self.new = self.new, []
        return new

    def close(self) -> None:
        self.log.detach(self)

    def steps(self, rows: list[Any]) -> "Written":
        self.new = rows
        self.log.flush()
        return self


def check_whole(path: Path) -> RankMeans:
    """The ends say what all rows come to."""
    ends = RankEnds(path).whole()
    assert ends
    rows = run_directory.LineTail(path).read()
    expected, means = RankMeans.of(Timeline.from_lines(rows)), ends.means
    assert (means.steps, means.left_out, means.count, means.memory) == (expected.steps, expected.left_out, expected.count, expected.memory)
    assert means.notes == expected.notes
    for phase in (None, *PHASES):
        assert means.mean(phase) == pytest.approx(expected.mean(phase), rel=1e-12, nan_ok=True)
    assert means.samples_per_sec == pytest.approx(expected.samples_per_sec, rel=1e-12, nan_ok=True)
    assert list(ends.other_rows) == [row for row in rows if "step" not in row]
    return means


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(flushes=st.lists(ROWS, min_size=3, max_size=5), last=ROWS)
def test_the_ends_of_a_long_file_say_what_all_its_steps_come_to(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, flushes: list[Any], last: list[Any]
) -> None:
    written = Written(tmp_path_factory.mktemp("run") / "rank0.jsonl", monkeypatch)
    written.log.say({"reads": {"first": "a", "data": "b"}})
    for rows in flushes:
        written.steps(rows * 5)
    written.log.say({"note": f"{WARNING}at the end"})
    written.steps(last[:20])
    written.close()
    if written.path.stat().st_size > HEAD + TAIL:
        check_whole(written.path)


def test_totals_that_are_not_those_of_all_rows_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(10**6, 0, 10**7, 2 * 10**7, 10**6, 10**5, 8)] * 300
    between = Written(tmp_path / "rank0.jsonl", monkeypatch).steps(steps)
    between.log.say({"note": f"{WARNING}in the middle"})
    between.steps(steps).close()
    assert not RankEnds(between.path).whole()
    assert RunRows(tmp_path).rank_notes(1)[0] == ["in the middle"]

    profiled = Written(tmp_path / "rank1.jsonl", monkeypatch).steps(steps)
    profiled.log.say({"profiled": [200, 210]})
    profiled.steps(steps[:30]).close()
    assert not RankEnds(profiled.path).whole()

    path = tmp_path / "rank2.jsonl"
    Written(path, monkeypatch).steps(steps).close()
    check_whole(path)
    with open(path, "a") as file:  # another process, which wrote no totals
        file.writelines(json.dumps({"step": number, **STEP}) + "\n" for number in range(300, 320))
    assert check_whole(path).steps == 320
    Written(path, monkeypatch).steps(steps).close()  # this one again, which knows nothing of those
    assert not RankEnds(path).whole()
    assert RunRows(tmp_path).means(path.name).steps == 620


@pytest.mark.parametrize(
    "change",
    [
        {"at": 0}, {"at": "0"}, {"at": None},
        {"steps": -1}, {"steps": 2.5}, {"steps": 5}, {"steps": "9"}, {"rows": None}, {"rows": 7}, {"phases": []}, {"phases": 5},
        {"phases": [1, 1, 1, 1, 1, "x"]}, {"phases": [1, 1, 1, 1, 1, -1]}, {"samples": None}, {"timed": 1e300}, {"memory": []},
    ],
)  # fmt: skip
def test_damaged_totals_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    written = Written(tmp_path / "rank0.jsonl", monkeypatch).steps([(10**6, 0, 10**7, 10**7, 10**6, 10**5, 8)] * 300)
    written.close()
    *lines, last = written.path.read_text().splitlines()
    row = json.loads(last)
    written.path.write_text("\n".join([*lines, json.dumps({**row, "totals": {**row["totals"], **change}})]) + "\n")
    assert not RankEnds(written.path).whole()
    assert RunRows(tmp_path).means("rank0.jsonl").steps == 300


def test_a_panel_and_a_summary_of_long_files_read_their_ends(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand().losses(20)
    for rank in range(2):
        path = made.path / run_directory.rank_file(rank)
        path.unlink(missing_ok=True)
        Written(path, monkeypatch).steps([((rank + 1) * 10**6, 0, 10**7, 10**7, 10**6, 10**5, 8)] * 3000).close()
    made.ended("finished")
    reads, run = Reads(monkeypatch), wb.Run.load(made.path)
    now = Follower(run).snapshot()
    assert [(rank.rank, rank.steps, round(rank.phases[0], 9)) for rank in now.ranks] == [(0, 3000, 0.001), (1, 3000, 0.002)]
    assert [rank.mean("data_wait") for rank in run.rank_means] == pytest.approx([0.001, 0.002])
    assert run.summary
    assert whole(reads) == []
    assert [timeline.count for timeline in run.timelines] == [2990, 2990]


def test_what_was_read_of_long_files_stands_after_they_are_deleted(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand().alive()
    path = made.path / run_directory.rank_file(0)
    Written(path, monkeypatch).steps([(10**6, 0, 10**7, 10**7, 10**6, 10**5, 8)] * 3000).close()
    follower = Follower(wb.Run.load(made.path))
    assert [rank.steps for rank in follower.snapshot().ranks] == [3000]
    path.unlink()
    assert [rank.steps for rank in follower.snapshot().ranks] == [3000]


def test_a_panel_of_very_many_ranks_with_totals_does_not_call_its_means_those_of_the_last_steps(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = by_hand(spec=spec(MANY_RANKS + 8)).ended("finished")
    first = made.path / run_directory.rank_file(0)
    Written(first, monkeypatch).steps([(10**6, 0, 10**7, 10**7, 10**6, 10**5, 8)] * 3000).close()
    for rank in range(1, MANY_RANKS + 8):
        os.link(first, made.path / run_directory.rank_file(rank))
    run = wb.Run.load(made.path)
    assert "means of the last steps" not in run.summary
    assert "means of the last steps" not in " ".join(Follower(run).snapshot().notes)
    assert run.rank_means[7].count == 2990


def test_slow_steps_write_totals_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path / "rank0.jsonl", monkeypatch)
    for _ in range(300):  # a step at each flush
        written.steps([(10**6, 0, 10**8, 10**9, 10**6, 10**5, 8)])
    written.close()
    lines = written.path.read_text().splitlines()
    assert 5 <= sum("totals" in line for line in lines) <= 15
    check_whole(written.path)
