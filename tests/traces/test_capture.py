"""Traces of runs: launched with a profile, found beside the run, with marks of its steps and what they cost; and every way it can fail."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.conftest import HandMade
from tests.forked import Forks
from tests.traced import on_cpu, write
from workbench.core import run_directory
from workbench.core.vocabulary import PHASES
from workbench.runs.launch import environment
from workbench.runs.profile import Profile
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec, SpecError, check_profile, spec_from_json
from workbench.timeline.loops import Loop as OtherLoop
from workbench.timeline.marks import new_recorder
from workbench.timeline.steps import StepRules
from workbench.timeline.timeline import Step, Timeline
from workbench.traces import api
from workbench.traces.analysis.captured import Captured
from workbench.traces.analysis.loading import TRACES
from workbench.traces.analysis.reading import TraceError
from workbench.traces.measure.profiled_run import RunProfiler, hurry_together
from workbench.traces.measure.profiled_script import StepBoundaries
from workbench.traces.measure.profiler import keep_cupti_for_graphs, plain_profiler, why_no_profiler, without_kineto_lines

TOYS = Path(__file__).parents[1] / "toy_tasks.py"
LATE = RunSpec(task=f"{TOYS}:late_data_on_rank_1", micro_batch=4, nproc_per_node=2, device="cpu")
SCRIPT = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(3):
    for batch in DataLoader(torch.ones(40, 8), batch_size=4):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for batch in DataLoader(torch.ones(8, 8), batch_size=4):
            model(batch)
"""


# --- what is asked for


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (3, Profile(steps=3)),
        ({"steps": 2, "ranks": "all", "stacks": True}, Profile(steps=2, ranks="all", stacks=True)),
        ({"ranks": [1, 0]}, Profile(ranks=(0, 1))),
        ({"ranks": 1}, Profile(ranks=(1,))),
        (Profile(wait=0), Profile(wait=0)),
    ],
)
def test_a_profile_survives_json(given: Any, kept: Profile | None) -> None:
    for spec in (RunSpec(task="a:b", profile=given), ScriptSpec(script="a.py", watch=True, profile=given)):
        assert spec.profile == kept
        assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec
        assert isinstance(hash(spec), int)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (True, "allowed are a number of steps, a mapping .* or None; try profile=5"),
        (False, "try profile=None"),
        ("all", "allowed are a number of steps"),
        (0, "steps=0: a whole number of at least 1"),
        ({"step": 3}, "'step' is none of steps, ranks, wait, shapes, stacks, memory, flops; did you mean 'steps'"),
        ({"ranks": "some"}, "ranks='some': \"all\" is allowed, or a list of ranks"),
        ({"ranks": []}, "at least one is needed"),
        ({"ranks": [0, 0]}, "each once"),
        ({"ranks": [-1]}, "-1 is not a rank"),
        ({"ranks": [True]}, "True is not a rank"),
        ({"wait": -1}, "wait=-1: a whole number of at least 0"),
        ({"stacks": 1}, "stacks=1: True or False"),
    ],
)
def test_no_profile(given: Any, said: str) -> None:
    with pytest.raises(SpecError, match=f"profile=.*{said}"):
        RunSpec(task="a:b", profile=given)


def test_a_script_has_to_be_watched() -> None:
    with pytest.raises(SpecError, match="profile of a script needs watch=True"):
        ScriptSpec(script="a.py", profile=3)


def test_where_the_window_lies() -> None:
    spec = RunSpec(task="a:b", num_workers=2, accumulation=2, profile=4, prefetch_factor=3)
    assert spec.queue == 3
    profile = spec.profile
    assert (profile.start(spec.queue), profile.first(spec.queue), profile.last(spec.queue)) == (5 + 2 * 3 + 4, 16, 19)
    assert profile.least(spec.queue) == 20  # counted from 0
    assert profile.good(spec.queue) == 25
    assert Profile(steps=3, wait=0).first(queue=99) == 1


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"steps": 12, "profile": 5}, r"needs 16 at least; try steps=22, or profile=\{\"steps\": 5, \"wait\": 6\}"),
        ({"steps": 5, "profile": 5}, "needs 16 at least; try steps=22$"),
        ({"steps": 20, "profile": {"wait": 15}}, "15 come before the profiler .* needs 21 at least; try steps=27$"),
        ({"steps": 40, "profile": 5, "num_workers": 8}, "needs 48 at least"),
        ({"profile": {"ranks": [0, 2]}, "nproc_per_node": 2}, r"profile of ranks \[0, 2\], but there are 2 ranks, counted from 0"),
        ({"profile": {"ranks": [1]}}, 'there is one rank, counted from 0: try "ranks": "all"'),
    ],
)
def test_a_run_that_cannot_be_traced_so_is_not_started(tmp_path: Path, knobs: dict[str, Any], said: str) -> None:
    spec = RunSpec(task=f"{TOYS}:numbers", **knobs)  # knobs may be turned one by one
    for start in (wb.launch, lambda spec, **where: wb.sweep(spec, seed=[0, 1], **where)):
        with pytest.raises(SpecError, match=said):
            start(spec, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    check_profile(spec.replace(profile=None))


# --- between steps, in this process


class Loop:
    """A small training, driven as the trainer drives one."""

    def __init__(self, folder: Path, profile: Profile, **about: Any) -> None:
        self.folder, self.left_out = folder, list[tuple[int, int]]()
        self.profiled = RunProfiler(profile, folder, lambda *steps: self.left_out.append(steps), **about)
        self.model, self.done = torch.nn.Linear(8, 8), 0

    def run(self, steps: int, begin: int = 0) -> None:
        self.profiled.step(begin)
        batches = self.profiled.batches(iter_for_ever())
        for done in range(begin + 1, begin + steps + 1):
            self.done = done
            self.model(next(batches)).sum().backward()
            self.profiled.step(done)
        self.profiled.close()

    @property
    def captured(self) -> Captured:
        (path,) = self.folder.glob("*.capture.json")
        return Captured.from_json(json.loads(path.read_text()), path)


def iter_for_ever() -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(4, 8)


def test_the_steps_that_are_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path / "traces", Profile(steps=3), steps=20)
    loop.run(20)
    trace = wb.Trace.load(tmp_path / "traces")
    assert [step.index for step in trace.steps] == [9, 10, 11]
    assert loop.left_out == [(7, 12)]
    assert loop.captured.compared == 6
    assert trace.slowdown is None or trace.slowdown == pytest.approx(loop.captured.traced / loop.captured.plain - 1)
    assert trace.breakdown().mean("data_wait") > 0
    assert sorted(path.suffix for path in (tmp_path / "traces").iterdir()) == [".gz", ".json"]
    assert capfd.readouterr().err == ""
    assert why_no_profiler() is None


def test_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Profile(steps=2, wait=0, memory=True, shapes=False), steps=3)
    loop.run(3)
    trace = wb.Trace.load(tmp_path)
    assert [step.index for step in trace.steps] == [1, 2]
    assert loop.left_out == [(0, 2)]
    assert trace.slowdown is None  # there is no step to compare with
    assert loop.captured.compared == 0


@pytest.mark.parametrize(
    ("asked", "traced", "left_out"),
    [(3, [4, 5], [(11, 17), (2, 6)]), (12, [13, 14], [(11, 17), (11, 15)]), (14, [13, 14], [(11, 17)]), (16, [13, 14, 15], [(11, 17)])],
    ids=["before", "as it begins", "one is traced", "three are"],
)
def test_a_trace_is_written_soon_when_the_budget_ends(
    tmp_path: Path, asked: int, traced: list[int], left_out: list[tuple[int, int]]
) -> None:
    loop = Loop(tmp_path, Profile(steps=4, wait=12), steps=30, hurry=lambda done: done >= asked)
    loop.run(25)
    trace = wb.Trace.load(tmp_path)
    assert [step.index for step in trace.steps] == traced
    assert loop.left_out == left_out
    assert f"{len(traced)} of 4 steps were traced: the budget ended" in trace.notes
    assert why_no_profiler() is None


def test_a_short_trace_that_is_hurried_is_whole(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Profile(steps=2, wait=12), steps=30, hurry=lambda done: done >= 3)
    loop.run(25)
    trace = wb.Trace.load(tmp_path)
    assert [step.index for step in trace.steps] == [4, 5]
    assert not [note for note in trace.notes if "were traced" in note]


def test_ranks_that_see_the_end_of_the_budget_at_different_steps_heed_it_after_the_same(tmp_path: Path) -> None:
    first, other = (hurry_together(tmp_path) for _ in range(2))
    assert not other(6)
    (tmp_path / run_directory.FINISH).touch()
    assert not any((first(6), first(7), other(7)))
    assert first(8)
    assert other(8)


def test_another_rank_only_leaves_steps_out(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "traces", Profile(steps=2, wait=1, ranks=(1,)), steps=9, rank=0)
    loop.run(9)
    assert loop.left_out == [(0, 4)]
    assert not (tmp_path / "traces").exists()


def test_a_training_goes_on_without_its_profiler(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path, Profile(steps=2, wait=2), steps=9)
    with without_kineto_lines(), torch.autograd.profiler.profile():
        loop.run(9)
    assert loop.captured.notes == ["rank 0 was not traced: no trace of the step: a profiler is running already, and torch has only one"]
    assert "rank 0 was not traced" in capfd.readouterr().err
    with pytest.raises(TraceError, match="has no traces"):
        wb.TraceSet.load(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loop = Loop(tmp_path / "file", Profile(steps=2, wait=2), steps=9)
    loop.run(9)
    assert why_no_profiler() is None


def test_a_run_that_goes_on_behind_the_window(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Profile(steps=2, wait=2), steps=20)
    loop.run(4, begin=4)
    assert loop.left_out == []
    assert loop.captured.notes == ["rank 0 was not traced: the run went on from step 4, and the profiler is started after 2"]


def test_a_run_that_goes_on_before_the_window(tmp_path: Path) -> None:
    """Marks in the file have the numbers of the run; what is left out, those of the rows, which its new process counts from 0."""
    loop = Loop(tmp_path, Profile(steps=2, wait=7), steps=20)
    loop.run(10, begin=4)
    assert [step.index for step in wb.Trace.load(tmp_path).steps] == [8, 9]
    assert loop.left_out == [(6 - 4, 10 - 4)]


@pytest.mark.parametrize("at", [5, 11], ids=["plain", "traced"])
def test_waiting_for_a_batch_is_no_slowdown(tmp_path: Path, at: int) -> None:
    loop = Loop(tmp_path, Profile(steps=4), steps=20)

    def batches() -> Iterator[torch.Tensor]:
        for number in itertools.count():
            time.sleep(1.5 * (number == at))
            yield torch.ones(4, 8)

    loop.profiled.step(0)
    given = loop.profiled.batches(batches())
    for done in range(1, 21):
        loop.model(next(given)).sum().backward()
        time.sleep(0.01)
        loop.profiled.step(done)
    assert loop.captured.compared == 8
    assert loop.captured.plain < 1
    assert loop.captured.traced < 1
    assert math.isnan(loop.captured.slowdown) or 0 <= loop.captured.slowdown < 20


def test_a_training_that_ends_in_the_window(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Profile(steps=5, wait=1), steps=20)
    loop.run(3)
    assert loop.captured.notes == ["rank 0 was not traced: the run ended after 3 steps, and the traced ones end after 7"]
    assert why_no_profiler() is None


def test_an_error_ends_the_profiler(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Profile(steps=5, wait=1), steps=20)

    def fails() -> None:
        with contextlib.closing(loop.profiled):
            for done in range(4):
                loop.profiled.step(done)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert why_no_profiler() is None
    assert not list(tmp_path.iterdir())  # the error is what is to be said


def test_the_steps_of_an_unedited_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    left_out: list[tuple[int, int]] = []
    borders = StepBoundaries(Profile(steps=2, wait=3), lambda *steps: left_out.append(steps))
    without_loader, training, validation = (
        OtherLoop(new_recorder("cpu"), StepRules()),
        OtherLoop(new_recorder("cpu"), StepRules()),
        OtherLoop(new_recorder("cpu"), StepRules()),
    )
    borders.reached(without_loader)  # no optimizer step was taken in it
    for _ in range(2):
        borders.stepped(without_loader)
        borders.reached(without_loader)
    for batch in borders.between(training, iter(range(5))):
        assert list(borders.between(validation, iter(range(2)))) == [0, 1]  # whose batches are no steps
        torch.ones(3).sum()
        borders.stepped(training)
        if batch == 3:
            break
    borders.begin(None)  # another loop: the one before was left in the middle, behind a whole step
    borders.close()
    trace = wb.Trace.load(tmp_path / run_directory.TRACES)
    assert [step.index for step in trace.steps] == [4, 5]
    assert left_out == [(2, 6)]


def test_a_script_that_leaves_its_last_loop_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step at which it does is one, and here the last of the traced ones."""
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    borders, training = StepBoundaries(Profile(steps=2, wait=3), lambda *steps: None), OtherLoop(new_recorder("cpu"), StepRules())
    borders.begin(None)
    for batch in borders.between(training, iter(range(9))):
        torch.ones(3).sum()
        borders.stepped(training)
        if batch == 5:
            break
    borders.close()
    assert [step.index for step in wb.Trace.load(tmp_path / run_directory.TRACES).steps] == [4, 5]


@pytest.mark.parametrize("text", ["", "[]", '{"traced": 1}', '{"traced": "x", "plain": 1, "compared": 1, "notes": []}'])
def test_what_lies_beside_a_trace_may_be_damaged(tmp_path: Path, text: str) -> None:
    Captured.beside(tmp_path / "a.pt.trace.json.gz").write_text(text)
    assert Captured.of(tmp_path / "a.pt.trace.json.gz") is None
    assert Captured.of(tmp_path / "b.pt.trace.json") is None


def test_captured_survives_json(tmp_path: Path) -> None:
    captured = Captured(path=tmp_path / "a.pt.trace.json", traced=0.03, plain=0.01, compared=4, notes=["said"])
    again = Captured.from_json(json.loads(json.dumps(captured.to_json())), captured.path)
    assert again == captured
    assert again.slowdown == pytest.approx(2)
    assert "by 200 %" in again.all_notes[-1]


@pytest.mark.parametrize(
    ("plain", "traced", "slowdown", "said"),
    [
        ([1.0, 1.0, 1.0, 90.0], [2.0, 2.0, 70.0], 1.0, "slows these steps down by 100 %"),
        ([1.0, 1.1, 0.9], [1.2, 1.2], 0.2, ""),
        ([1.0, 1.0, 3.0, 3.0], [9.0, 9.0], None, "half of the steps without it lie 50 % or more off their median"),
        ([1.0, 1.0, 1.0], [0.9], None, "the steps under it took no longer than those without"),
        ([1.0, 1.0], [2.0], None, "it takes 3 steps without it to compare with, and there are two"),
        ([1.0], [2.0], None, "and there is one"),
        ([], [2.0], None, ""),
        ([1.0], [], None, ""),
    ],
)
def test_what_a_profiler_costs(tmp_path: Path, plain: list[float], traced: list[float], slowdown: float | None, said: str) -> None:
    captured = Captured(path=tmp_path / "a.pt.trace.json")
    captured.compare(plain, traced)
    again = Captured.from_json(json.loads(json.dumps(captured.to_json())), captured.path)
    assert again.all_notes == captured.all_notes
    assert again.slowdown == pytest.approx(slowdown) if slowdown is not None else math.isnan(again.slowdown)
    assert said in " ".join(again.all_notes)
    assert bool(said) == bool(again.all_notes)


# --- steps under a profiler do not count


def test_a_timeline_leaves_profiled_steps_out() -> None:
    rows: list[dict[str, Any]] = [{"profiled": [3, 5]}, {"rank": 1, "clock": "host"}]
    for i in range(10):
        rows.append({"step": i, **dict.fromkeys(PHASES, 0.0), "forward": 9.0 if 3 <= i <= 5 else 1.0, "samples": 2})
    timeline = Timeline.from_lines(rows, warmup=1)
    assert timeline.profiled == (3, 4, 5)
    assert [step.index for step in timeline.measured] == [1, 2, 6, 7, 8, 9]
    assert timeline.samples_per_sec == 2.0
    assert "steps 3 to 5, which a profiler slowed down" in timeline.caption
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline
    assert timeline.without("forward").profiled == (3, 4, 5)
    assert "profiler" not in Timeline(steps=(Step(index=0, phases=(1.0,) * 6),), profiled=(3,)).caption


def test_processor_time_and_memory_leave_profiled_steps_out() -> None:
    """A step takes 2 s of a processor for 4 samples; a profiled one 50, and memory that stays."""
    cpu, memory, steps = 0.0, 100, list[Step]()
    for i in range(12):
        slowed = 5 <= i <= 8
        cpu, memory = cpu + (50.0 if slowed else 2.0), 900 if slowed else memory
        read = i % 2 == 0
        steps.append(Step(index=i, phases=(1.0,) * 6, samples=4, memory=memory if read else None, cpu=cpu if read else None))
    timeline = Timeline(steps=tuple(steps), warmup=1, profiled=(5, 6, 7, 8))
    assert timeline.cpu_per_sample == pytest.approx(0.5)
    assert timeline.memory == 100
    assert "(peak memory is as before them)" in timeline.caption
    assert dataclasses.replace(timeline, clock="device").memory == 900
    assert dataclasses.replace(timeline, profiled=()).memory == 900
    early = dataclasses.replace(timeline, profiled=tuple(range(9)))
    assert (early.memory, early.cpu_per_sample) == (900, pytest.approx(0.5))
    assert "(its memory is in the peak)" in early.caption
    assert math.isnan(dataclasses.replace(timeline, profiled=tuple(range(12))).cpu_per_sample)


def test_a_run_that_went_on_is_counted_on() -> None:
    """Its second process counts its rows from 0 again, and says of them which are profiled, before or among them."""
    one = dict.fromkeys(PHASES, 1.0)
    first: list[dict[str, Any]] = [{"profiled": [4, 6]}, {"rank": 0, "clock": "host"}, *({"step": i, **one} for i in range(5))]
    second: list[dict[str, Any]] = [{"profiled": [1, 2]}, {"rank": 0, "clock": "host"}, *({"step": i, **one} for i in range(4))]
    timeline = Timeline.from_lines([*first, *second], warmup=0)
    assert [step.index for step in timeline.steps] == list(range(9))
    assert [step.index for step in timeline.measured] == [0, 1, 2, 3, 5, 8]
    among = Timeline.from_lines([{"step": 0, **one}, {"profiled": [1, 2]}, *({"step": i, **one} for i in (1, 2, 3))], warmup=0)
    assert among.profiled == (1, 2)
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


# --- launched


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Run:
    spec = LATE.replace(steps=19, profile={"steps": 6, "ranks": "all", "wait": 6})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "torchrun", forks.torchrun)
        return wb.launch(spec, runs_dir=tmp_path_factory.mktemp("runs")).wait(check=True)


def test_the_files_of_a_run(run: Run) -> None:
    assert sorted(run.traces) == [0, 1]
    for rank, path in run.traces.items():
        assert path.parent == run.path / run_directory.TRACES
        told = json.loads(gzip.decompress(path.read_bytes()))
        assert told["distributedInfo"]["rank"] == rank
        marks = sorted({one["name"] for one in told["traceEvents"] if one["name"].startswith("ProfilerStep")})
        assert marks == [f"ProfilerStep#{step}" for step in (10, 11, 12, 7, 8, 9)]
    assert len(list((run.path / run_directory.TRACES).iterdir())) == 4


def test_what_the_traces_of_a_run_say(run: Run) -> None:
    found = wb.trace(run)
    assert isinstance(found, wb.TraceSet)
    for rank, path in run.traces.items():
        kept = Captured.of(path)
        assert kept is not None
        assert kept.compared == 5 + 5
        assert found[rank].slowdown is None or found[rank].slowdown == kept.slowdown >= 0
    late = found.stragglers()
    assert (late.rank, late.phase) == (1, "data_wait")
    assert late.seconds > 0.02
    assert found.explain().verdict == "straggler"
    assert "rank 1" in found.explain().why
    came = found.arrivals()
    assert came.shared  # Kineto's times of processes of one machine are those of one clock
    assert max(came.rows[0].last, key=lambda rank: came.rows[0].last[rank]) == 1
    assert came.rows[0].skew > 0.02


def test_profiled_steps_do_not_count_in_a_run(run: Run) -> None:
    for timeline in run.timelines:
        assert len(timeline.steps) == 19
        assert timeline.profiled == (5, 6, 7, 8, 9, 10, 11, 12, 13)
        assert not {step.index for step in timeline.measured} & set(timeline.profiled)


def test_the_profiler_plugin_of_tensorboard_reads_them(run: Run) -> None:
    theirs: dict[int, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        consts = pytest.importorskip("torch_tb_profiler.consts")
        from torch_tb_profiler.profiler.data import RunProfileData
        from torch_tb_profiler.profiler.event_parser import ProfileRole

        for rank, path in run.traces.items():
            match = consts.WORKER_PATTERN.match(path.name)
            assert match
            assert match[1].startswith(f"rank{rank}_")
            read = RunProfileData.parse(match[1], match[2][1:], str(path), str(path.parent))
            read.process()
            assert read.steps_names == ["7", "8", "9", "10", "11", "12"]
            assert (read.distributed_info["rank"], read.distributed_info["world_size"]) == (rank, 2)
            theirs[rank] = read.avg_costs.costs[ProfileRole.Communication] / 1e6
            ours = wb.trace(run)[rank].breakdown().mean("communication")
            assert ours <= 1.1 * theirs[rank] + 1e-3  # which counts what computing hides, too
    assert theirs[0] > theirs[1]
    names = [path.name for path in (run.path / run_directory.TRACES).iterdir() if consts.WORKER_PATTERN.match(path.name)]
    assert sorted(names) == sorted(path.name for path in run.traces.values())


def test_ctrl_c_in_a_launch_returns_what_was_written_and_says_so(
    tmp_path: Path, by_hand: Callable[..., HandMade], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(task=f"{TOYS}:numbers", device="cpu", nproc_per_node=2)
    hand = by_hand(spec=spec.replace(profile={"steps": 2, "wait": 2, "ranks": "all"}).to_json()).steps(6).ended("stopped")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "launch", lambda *_, **__: Run.load(hand.path))
    monkeypatch.setattr(api, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt, match="trace was stopped by Ctrl-C before it knew anything"):
        wb.trace(spec, ranks="all", steps=2, wait=2)
    Loop(hand.path / run_directory.TRACES, Profile(steps=2, wait=2)).run(6)
    traces = wb.trace(spec, ranks="all", steps=2, wait=2)
    assert list(traces) == [0]
    assert "stopped by Ctrl-C after 6 of 8 steps" in traces.notes


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_spec_is_traced_in_a_launch_of_its_own(tmp_path: Path) -> None:
    spec = RunSpec(task=f"{TOYS}:numbers", micro_batch=4, device="cpu", steps=1000, evaluate=True, warmup_steps=500)
    trace = wb.trace(spec, steps=2, wait=2, stacks=True, runs_dir=tmp_path)
    assert isinstance(trace, wb.Trace)
    assert [step.index for step in trace.steps] == [3, 4]
    assert any(label.category == "python_function" for label in trace.columns.labels)
    (folder,) = tmp_path.iterdir()
    run = Run.load(folder)
    assert run.progress == (8, 8)  # 2, one of warm-up, 2, one of rest, 2
    assert run.name == "toy_tasks-numbers trace"
    assert list(run.traces) == [0]
    trace = wb.trace(spec, steps=4, wait=10**6, budget_s=1.0, runs_dir=tmp_path)
    assert [step.index for step in trace.steps][-1] < 10**6
    assert "2 of 4 steps were traced: the budget ended" in trace.notes


@pytest.mark.usefixtures("forked_ranks")
def test_an_unedited_script_is_traced(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = wb.launch(script, watch=True, profile={"steps": 3, "wait": 8}, runs_dir=tmp_path / "runs").wait(check=True)
    trace = wb.trace(run)
    assert [step.index for step in trace.steps] == [9, 10, 11]
    kept = Captured.of(trace.path)
    assert kept is not None
    assert kept.compared == 6
    assert sum(row.count for row in trace.ops().rows if row.name == "Optimizer.step#SGD.step") == 3
    assert run.logs() == ""
    (timeline,) = run.timelines
    assert timeline.profiled == (7, 8, 9, 10, 11, 12)
    assert len(timeline.steps) == 30


# --- runs without traces


def written(path: Path, spec: RunSpec | ScriptSpec, state: str = "finished") -> Run:
    path.mkdir()
    info = {"format": 1, "id": "x", "name": "x", "created": 0.0, "host": "here", "launch_dir": ".", "spec": spec.to_json()}
    run_directory.write_json(path / run_directory.RUN_JSON, {**info, "outcome": {"state": state, "seconds": 1.0}})
    return Run.load(path)


def test_a_run_without_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no traces: it was launched without a profile: launch it with profile=5"):
        wb.trace(written(tmp_path / "a", RunSpec(task="a:b")))
    short = written(tmp_path / "b", ScriptSpec(script="a.py", watch=True, profile=3))
    assert short.traces == {}
    with pytest.raises(TraceError, match=r"it was finished after 0 steps, before the traced ones were over; that takes 12 at least"):
        wb.trace(short)
    (short.path / run_directory.TRACES).mkdir()
    captured = Captured(path=short.path / run_directory.TRACES / "rank0_x.1.pt.trace.json.gz", notes=["rank 0 was not traced: no room"])
    run_directory.write_json(Captured.beside(captured.path), captured.to_json())
    with pytest.raises(TraceError, match=r"has no traces: rank 0 was not traced: no room"):
        wb.trace(short)


def test_a_rank_without_its_trace(tmp_path: Path) -> None:
    """Of two that were asked for: the other's is in a set, and why there is none is said."""
    run = written(tmp_path / "a", RunSpec(task="a:b", nproc_per_node=2, profile={"ranks": "all"}))
    folder = run.path / run_directory.TRACES
    folder.mkdir()
    for rank, note in enumerate(("the queue was emptied", "rank 1 was not traced: the run ended after 3 steps")):
        captured = Captured(path=folder / f"rank{rank}_x.1.pt.trace.json.gz", notes=[note])
        run_directory.write_json(Captured.beside(captured.path), captured.to_json())
    write(folder / "rank0_x.1.pt.trace.json.gz", on_cpu(), distributedInfo={"rank": 0, "world_size": 2})
    found = wb.trace(run)
    assert isinstance(found, wb.TraceSet)
    assert found.ranks == (0,)
    assert found.notes == ("1 of 2 ranks have no trace here: 1", "rank 1 was not traced: the run ended after 3 steps")
    assert "the queue was emptied" in found.breakdown().notes
    loaded = wb.Trace.load(run.path)  # in the run's folder for them
    assert loaded.path.parent == folder
    assert TRACES == run_directory.TRACES


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loader": [1]}, "was given a loader, which only goes with a step"),
        ({"into": "x"}, "was given into=, which only goes with a step"),
        ({"model": 1}, "was given model="),
        ({"steps": 0}, r"trace\('a:b', …\): steps=0: a whole number of at least 1"),
        ({"ranks": "some"}, "ranks='some'"),
    ],
)
def test_what_a_spec_does_not_take(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wb.trace(RunSpec(task="a:b"), **given)


def test_what_a_run_and_a_step_do_not_take(tmp_path: Path) -> None:
    run = written(tmp_path / "a", RunSpec(task="a:b"))
    with pytest.raises(ValueError, match="was given ranks=, which only goes with a spec"):
        wb.trace(run, ranks=[0])
    with pytest.raises(ValueError, match=r"was given ranks=, which only goes with a spec: trace\(spec, …\)"):
        wb.trace(print, [1], ranks="all")
    with pytest.raises(ValueError, match="a task is traced by its spec"):
        wb.trace(ScriptSpec(script="a.py"))


def test_cupti_stays_where_a_program_has_captured_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.profiler sees to that for inductor's graphs only."""

    class Graph:
        pass

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"):
        monkeypatch.setenv(name, "as it was")
    graph = Graph()
    keep_cupti_for_graphs()
    assert os.environ["TEARDOWN_CUPTI"] == "as it was"  # nothing was done on a GPU
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with plain_profiler():
        pass
    assert (os.environ["TEARDOWN_CUPTI"], os.environ["DISABLE_CUPTI_LAZY_REINIT"]) == ("0", "1")
    del graph
    os.environ["TEARDOWN_CUPTI"] = "as it was"
    keep_cupti_for_graphs()
    assert os.environ["TEARDOWN_CUPTI"] == "as it was"
