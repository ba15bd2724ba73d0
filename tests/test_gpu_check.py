"""The GPU check, as far as it can be tested without a GPU: its arguments, what is kept between runs, its tables, its bars.

No test here pretends that there is a GPU: results are made up, and the parts themselves run where there is one (`make gpu-check`).
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import live_memory, loops, restore, runner, verdicts
from benchmarks.gpu_check.machine import Bench, headline
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.report import Report

FACTS = {"date": "2026-01-02", "python": "3.12.3", "cores": 16, "torch": "2.11.0", "cuda": "12.8"}
GPU = {**FACTS, "device": "A GPU", "capability": [9, 0], "memory": 80 * 2**30, "driver": "570.1"}


def report(folder: Path, part: str = "timer", version: str = "v1") -> Report:
    return Report(path=folder / f"{part}.json", part=part, title="A part", version=version)


# What was asked for


def test_parts_are_named_with_commas() -> None:
    assert program.arguments([]).names == list(PARTS)
    given = program.arguments(["--parts", "verdicts, timer", "--budget-s", "540", "--again"])
    assert (given.names, given.budget_s, given.again) == (["verdicts", "timer"], 540.0, True)


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.arguments(["--parts", "timer,verdict"])
    assert "no part verdict: there are timer," in capsys.readouterr().err


def test_every_part_has_a_module_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for part in PARTS.values():
        assert part.seconds < part.limit <= 600
        assert callable(part.module.run)
        assert part.name in listed


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "torch is not installed" in program.no_gpu({"date": "2026-01-02"})
    assert "no NVIDIA GPU" in program.no_gpu(FACTS | {"cuda": ""})
    assert not program.no_gpu(GPU)
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert program.main(["--out", str(tmp_path / "results")]) == program.NO_GPU == 2
    assert "nothing was checked" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_the_headline_names_the_machine() -> None:
    assert headline(GPU) == "A GPU (capability 9.0, 80.0 GiB), driver 570.1, torch 2.11.0, CUDA 12.8, Python 3.12.3, 16 cores, 2026-01-02"
    assert headline(FACTS).startswith("no GPU, torch 2.11.0")


# Reports


def test_rows_are_kept_as_they_come(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.row("first", True, values={"seconds": 0.5}, result="0.5 s", bar="≤ 1 s")
    made.row("second", None, result="a | b")
    kept = Report.load(made.path)
    assert kept is not None
    assert (kept.rows, kept.complete, kept.passed, kept.score) == (made.rows, False, False, (1, 1))
    assert list(kept.todo(["first", "second", "third"])) == ["third"]
    assert Report.load(tmp_path / "none.json") is None
    made.path.write_text("{}")
    assert Report.load(made.path) is None


def test_what_raises_is_a_wrong_row_and_the_next_one_follows(tmp_path: Path) -> None:
    made = report(tmp_path)
    with made.guard("bad"):
        raise ValueError("no such thing\nand more")
    made.row("good", True)
    made.complete = True
    assert [(row.name, row.ok) for row in made.rows] == [("bad", False), ("good", True)]
    assert made.rows[0].cells == {"result": "raised ValueError: no such thing"}
    assert not made.passed


def test_the_table_is_markdown(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.row("first", True, result="a | b", bar="≤ 1 s")
    made.row("second", False, step="2 ms")
    lines = made.markdown().splitlines()
    assert lines[0] == "### A part (`timer`): 1 of 2 right"
    assert lines[2:6] == [
        "|  | what | result | bar | step |",
        "| --- | --- | --- | --- | --- |",
        "| ✓ | first | a / b | ≤ 1 s |  |",
        "| ✗ | second |  |  | 2 ms |",
    ]
    assert "✗ Not complete" in made.markdown()
    made.complete = True
    assert "Not complete" not in made.markdown()


# Parts that have run


def test_a_complete_part_of_the_same_code_is_kept(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.row("first", True)
    part = PARTS["timer"]
    assert runner.finished(tmp_path, part, "v1") is None  # not complete
    assert [row.name for row in runner.prepared(tmp_path, part, "v1", {}, again=False).rows] == ["first"]
    assert runner.prepared(tmp_path, part, "v2", {}, again=False).rows == []
    made.complete = True
    made.save()
    assert runner.finished(tmp_path, part, "v1") is not None
    assert runner.finished(tmp_path, part, "v2") is None
    assert runner.prepared(tmp_path, part, "v1", {}, again=True).rows == []


def test_some_rows_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = report(tmp_path)
    for name in ("healthy, one", "healthy, two", "slow"):
        made.row(name, False)
    made.complete = True
    made.save()
    assert [row.name for row in runner.prepared(tmp_path, PARTS["timer"], "v1", {}, again=False, rows="two").rows] == [
        "healthy, one",
        "slow",
    ]
    ran: list[str] = []

    def run(made: Report, bench: Bench) -> None:
        for name in made.todo(["healthy, one", "healthy, two", "slow", "new"]):
            ran.append(name)
            made.row(name, True)

    monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.timer", SimpleNamespace(run=run))
    program.run_here("timer", tmp_path, "cpu", "two")
    program.run_here("timer", tmp_path, "cpu")
    assert ran == ["healthy, two", "new"]
    assert runner.finished(tmp_path, PARTS["timer"], "v1") is not None


def test_the_version_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.code_version("timer") == runner.code_version("timer")
    assert runner.code_version("timer") != runner.code_version("traces") != runner.code_version()


def test_all_parts_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[tuple[str, float]] = []

    def run_part(part: Part, folder: Path, report: Report, *, device: str, seconds: float, rows: str) -> Report:
        ran.append((part.name, seconds))
        report.row("a row", part.name != "oom")
        report.complete = part.name != "context"
        report.error = "" if report.complete else "ended after its time limit"
        report.save()
        return report

    monkeypatch.setattr(runner, "run_part", run_part)
    names = ["timer", "context", "oom"]
    reports = runner.run_all(names, tmp_path, GPU, device="cuda", again=False, budget_s=None)
    assert [name for name, _ in ran] == names
    assert [made.passed for made in reports] == [True, False, False]
    lines = runner.summary(reports, [*names, "traces"]).splitlines()[2:]
    assert lines[0].startswith("| ✓ | timer | 1 of 1 |")
    assert lines[1].startswith("| ✗ | context (ended after its time limit) | 1 of 1 |")
    assert lines[2].startswith("| ✗ | oom | 0 of 1 |")
    assert lines[3] == "| · | traces (not run) | – | – |"
    ran.clear()
    runner.run_all(names, tmp_path, GPU, device="cuda", again=False, budget_s=100)  # only what was cut off, within the budget
    assert ran == [("context", pytest.approx(100, abs=5))]
    ran.clear()
    assert runner.run_all(["traces"], tmp_path, GPU, device="cuda", again=False, budget_s=1) == []
    assert ran == []
    assert "No time was left for traces" in capsys.readouterr().out
    runner.run_all(["timer"], tmp_path, GPU, device="cuda", again=True, budget_s=None)
    assert ran == [("timer", PARTS["timer"].limit)]


@pytest.mark.parametrize("raises", [False, True])
def test_a_part_that_raises_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    def run(made: Report, bench: Bench) -> None:
        made.row("before", True)
        if raises:
            raise RuntimeError("the GPU is gone")

    monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.timer", SimpleNamespace(run=run))
    assert program.run_here("timer", tmp_path, "cpu") == int(raises)
    made = Report.load(tmp_path / "timer.json")
    assert made is not None
    assert (made.complete, made.error) == ((False, "RuntimeError: the GPU is gone") if raises else (True, ""))
    assert [row.name for row in made.rows] == ["before"]


# Bars


def test_what_is_right_follows_from_what_the_wall_clock_saved() -> None:
    sleeping, healthy, kernels = (loops.CASES[name] for name in ("loader sleeps", "healthy, loss read each step", "many small kernels"))
    right = verdicts.is_right
    assert right(sleeping, "input-bound", "storage", saved=0.5)
    assert not right(sleeping, "input-bound", "dataset code", saved=0.5)
    assert not right(sleeping, "compute-bound", "compute", saved=0.5)
    assert not right(sleeping, "input-bound", "storage", saved=0.02)
    assert right(sleeping, "compute-bound", "compute", saved=0.02)
    assert right(sleeping, "compute-bound", "compute", saved=0.2)
    assert right(sleeping, "input-bound", "storage", saved=0.2)
    assert right(healthy, "compute-bound", "anything", saved=0.0)
    assert not right(healthy, "stalled", "pause", saved=0.0)
    assert right(kernels, "host-bound", "launches", saved=0.0)
    assert verdicts.words(sleeping, 0.2) == "input-bound (storage) or compute-bound"


def test_what_has_changed_is_seen_bit_for_bit() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(2)
    before = {"weights": zero, "nan": nan, "calls": 3, "gone": None}
    assert restore.changed(before, {**before, "nan": nan.clone()}) == []
    after = {"weights": torch.tensor([0.0, -0.0]), "nan": nan, "calls": 3.0, "new": 1}
    assert restore.changed(before, after) == ["calls", "gone", "new", "weights"]


def test_what_lives_at_the_peak_is_read_from_the_allocators_history() -> None:
    stack = [
        {"name": "at::native::empty_cuda(…)", "filename": "??", "line": 0},
        {"name": "at::_ops::empty_memory_format::call(…)", "filename": "??", "line": 0},
        {"name": "void at::native::gpu_reduce_kernel<float, float, 4>(…)", "filename": "??", "line": 0},
        {"name": "at::_ops::mm::call(at::Tensor const&)", "filename": "??", "line": 0},
        {"name": "torch::autograd::generated::MmBackward0::apply(…)", "filename": "??", "line": 0},
        {"name": "step", "filename": "/here/train.py", "line": 7},
    ]
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 8 << 20, "frames": []},
        {"action": "alloc", "addr": 0, "size": 4 << 20, "frames": stack},
        {"action": "alloc", "addr": 1, "size": 2 << 20, "frames": stack[5:]},
        {"action": "alloc", "addr": 2, "size": 512, "frames": []},
        {"action": "free_requested", "addr": 1, "size": 2 << 20, "frames": []},
        {"action": "free_completed", "addr": 1, "size": 2 << 20, "frames": []},
        {"action": "free_completed", "addr": 9, "size": 2 << 20, "frames": []},
        {"action": "alloc", "addr": 3, "size": 1 << 20, "frames": []},
    ]
    assert live_memory.pieces(events) == [
        (4 << 20, "gpu_reduce_kernel < mm < MmBackward0 < train.py:7 step"),
        (2 << 20, "train.py:7 step"),
        (512, "1 small pieces"),
    ]


class Counting(Bench):
    """Notes when it synchronises, between the steps."""

    def __init__(self, calls: list[object]) -> None:
        super().__init__("cpu")
        object.__setattr__(self, "calls", calls)

    __slots__ = ("calls",)

    def sync(self) -> None:
        self.calls.append("sync")


def test_steps_are_timed_over_whole_passes() -> None:
    calls: list[object] = []
    seconds = Counting(calls).seconds_per_step(calls.append, [1, 2, 3, 4], at_least=1e-9)
    assert calls == [1, 2, 3, "sync", 1, 2, 3, 4, "sync"]  # three to warm up, then one whole pass
    assert seconds > 0


def test_short_passes_follow_each_other_without_a_synchronisation() -> None:
    """What begins late is hidden behind the device's work of the pass before, and a synchronisation there would show it in full."""
    calls: list[object] = []

    def step(batch: int) -> None:
        calls.append(batch)
        time.sleep(1e-3)

    Counting(calls).seconds_per_step(step, [1, 2], at_least=0.02)
    warm_up, first, between, passes, after = "".join(map(str, calls)).split("sync")
    assert (warm_up, first, between, after) == ("12", "12", "", "")
    assert passes == "12" * (len(passes) // 2)
    assert len(passes) > len("12")
