"""Which changes would have fitted, of runs whose memory ran out: a real one on this machine, and recorded ones of GPUs."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.__main__ import main
from workbench.core import run_directory, units
from workbench.memory.analysis.fit import NOT_CERTAIN
from workbench.memory.analysis.whatif import needed
from workbench.memory.ladder import memory_ladder
from workbench.memory.max_micro_batch import max_micro_batch
from workbench.memory.would_fit import Room, available_memory, would_fit
from workbench.runs.out_of_memory import HOST, Held, OutOfMemory
from workbench.runs.spec import ScriptSpec

TASK = f"{Path(__file__).parents[1] / 'scripts' / 'limited_task.py'}:wide"
MIB, GIB = 2**20, 2**30
SPEC = wb.RunSpec(task=TASK, device="auto", micro_batch=8192, nproc_per_node=1, steps=2)
"""Needs some 2 GiB."""
Make = Callable[..., Any]
ladder, max_batch = (sys.modules[function.__module__] for function in (memory_ladder, max_micro_batch))


@pytest.fixture(scope="module", autouse=True)
def each_step_is_estimated_once() -> Iterator[None]:
    """The same changes of the same spec are tried in most tests, on devices with less or more memory."""
    made = dict[str, Any]()

    def once(make: Callable[..., Any]) -> Callable[..., Any]:
        def known(*args: Any, **options: Any) -> Any:
            asked = f"{make.__name__} {args} {sorted(options.items())}"
            assert " at 0x" not in asked, f"{asked} may stand for another object later"
            if asked not in made:
                made[asked] = make(*args, **options)
            return made[asked]

        return known

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (ladder, "timed_estimate"),
            (ladder, "estimate_memory"),
            (max_batch, "estimate_memory"),
            (max_batch, "batch_family"),
        ):
            patch.setattr(module, name, once(getattr(module, name)))
        yield


def said(capacity: str = "1.50 GiB", beside: str = "") -> str:
    return (
        f"OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of {capacity} of which 9.38 MiB "
        f"is free. {beside}Including non-PyTorch memory, this process has 1.20 GiB memory in use. Of the allocated memory 800.00 MiB is "
        "allocated by PyTorch, and 34.62 MiB is reserved by PyTorch but unallocated."
    )


def died(by_hand: Make, message: str, *, spec: wb.RunSpec = SPEC, gpu: str = "", kind: str = "out-of-memory", **outcome: Any) -> wb.Run:
    """The directory of a run that left this message."""
    made = by_hand(spec=spec.to_json())
    (made.path / run_directory.ERRORS).mkdir()
    found = OutOfMemory.parse(message)
    record = {"rank": 0, "time_ns": 1, "kind": kind, "message": message, "traceback": "", "consequence": False}
    run_directory.write_json(made.path / run_directory.ERRORS / "rank0.json", {**record, "memory": found and found.to_json()})
    if gpu:
        writer = run_directory.LineWriter(made.path / run_directory.rank_file(0))
        writer.write([{"rank": 0, "world_size": 1, "clock": "device", "pid": 1, "device": gpu}])
        writer.close()
    return wb.Run.load(made.ended("failed", **outcome).path)


# --- a real one


@pytest.mark.slow
def test_a_real_one_and_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # address space that threads set aside counts under this limit
    spec = wb.RunSpec(task=TASK, device="cpu", micro_batch=4096, steps=2, num_workers=0)
    run = wb.launch(spec, runs_dir=tmp_path / "runs").wait()
    assert run.error is not None
    assert run.error.kind == "out-of-memory"
    assert "wb.would_fit(run)" in str(run.error)
    found = wb.would_fit(run, margin=0.2)
    assert found.expected
    assert found.ladder.fits
    assert 200 * MIB < found.room.bytes < 600 * MIB
    assert needed(found.start) > 768 * MIB
    assert 512 <= int(found.largest) < 4096
    for word in ("held in tensors", "It would have fitted with", "What makes it fit main memory"):
        assert word in str(found)
    cured = wb.launch(spec.replace(**found.changes), runs_dir=tmp_path / "runs").wait()
    assert cured.ok, cured.error


# --- recorded ones


def test_a_gpu_by_its_error_alone(by_hand: Make) -> None:
    run = died(by_hand, said())
    found = would_fit(run)
    assert found.room == Room(bytes=round(1.5 * GIB), source="GPU 0 has 1.50 GiB")
    assert found.start.device == "cuda"
    assert found.ladder.capacity == int(0.95 * 1.5 * GIB) >= needed(found.ladder.end)
    assert found.changes
    changed = wb.estimate_memory(SPEC.replace(**found.changes), device="cuda")
    assert needed(changed) == needed(found.ladder.end)
    assert 0 < int(found.largest) < SPEC.micro_batch
    assert needed(found.largest.breakdown) <= found.ladder.capacity < needed(found.largest.next)
    text = str(found)
    assert found.word.endswith(f"micro_batch={int(found.largest)} is the largest that fits, instead of 8192; {NOT_CERTAIN}")
    surer = replace(found, largest=replace(found.largest, surely=1024))
    assert surer.word.endswith(f"; {NOT_CERTAIN}, but up to micro_batch=1024 is certain to fit")
    assert f"It would have fitted with {units.knobs(found.changes)}{found.ladder.doubt}. With" in found.word
    for word in ("by-hand: predicted need", "there was 1.50 GiB (GPU 0 has 1.50 GiB)", "instead of 8192", "time not predicted"):
        assert word in text
    assert repr(found).startswith("WouldFit('by-hand', ")
    assert "<table>" in found._repr_html_()
    assert len(found.to_frame()) == 1 + len(found.ladder.rungs)


def test_a_gpu_that_the_run_has_named_has_a_roofline(by_hand: Make) -> None:
    found = would_fit(died(by_hand, said(), gpu="NVIDIA GeForce RTX 4090").path)
    assert found.start.device == found.ladder.device == "RTX-4090"
    assert found.ladder.fits
    assert found.ladder.slowdown > 0
    assert "time not predicted" not in str(found)


def test_others_on_the_gpu_count_and_the_terminal_says_it_all(by_hand: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = died(by_hand, said("8.00 GiB", "Process 7 has 6.50 GiB memory in use. "))
    assert main(["report", str(run.path), "--would-fit"]) == 0
    shown = capsys.readouterr().out
    for word in ("Tried to allocate 128.00 MiB", "wb.would_fit(run)", "there was 1.50 GiB", "of which other processes had 6.50 GiB"):
        assert word in shown


def test_what_should_have_fitted(by_hand: Make) -> None:
    found = would_fit(died(by_hand, said("79.10 GiB"), gpu="an unknown one"))
    assert not found.expected
    assert found.changes == {}
    assert "By that it should have fitted: something grew" in str(found)
    assert int(found.largest) == SPEC.micro_batch  # the whole dataset


def test_nothing_would_have_fitted(by_hand: Make) -> None:
    found = would_fit(died(by_hand, said("300.00 MiB"), spec=SPEC.replace(precision="amp_bf16", optimizer="fused", micro_batch=1)))
    assert not found.ladder.fits
    assert "Nothing tried would have made it fit" in found.word
    assert "not even one sample fits" in found.word


def test_a_kill_by_the_kernel(by_hand: Make) -> None:
    made = by_hand(spec=SPEC.replace(device="cpu", nproc_per_node=2).to_json())
    (made.path / run_directory.ERRORS).mkdir()
    (made.path / run_directory.LAUNCHER_LOG).write_text("[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\n")
    run = wb.Run.load(made.ended("failed", returncode=1, oom_kills=1, memory_limit=2 * GIB).path)
    assert run.error is not None
    assert run.error.kind == "killed"
    assert "wb.would_fit(run)" in str(run.error)
    found = would_fit(run)
    assert found.room.bytes == GIB
    assert found.start.device == "cpu"
    assert "a limit of 2.00 GiB, shared by 2 ranks" in str(found)
    assert found.ladder.fits


# --- what is refused


def test_the_wrong_runs(by_hand: Make) -> None:
    with pytest.raises(ValueError, match=r"would_fit\(int\): expected a run whose memory ran out, or the path of its directory\.$"):
        would_fit(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Of a spec: wb\.max_micro_batch\(spec, …\)"):
        would_fit(SPEC)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"A model that has not run: wb\.memory_ladder\(build, device, batch=batch\)"):
        would_fit(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"it is finished\. Of others: wb\.max_micro_batch"):
        would_fit(by_hand().ended("finished").path)
    with pytest.raises(ValueError, match=r"Of others: wb\.estimate_memory\(model, batch, …\)"):
        would_fit(by_hand(spec=ScriptSpec(script="/a/train.py").to_json()).ended("finished").path)
    with pytest.raises(ValueError, match="it failed of something else: ValueError: boom"):
        would_fit(died(by_hand, "ValueError: boom", kind="exception"))
    with pytest.raises(ValueError, match="main memory ran out, and its steps were on a GPU"):
        would_fit(died(by_hand, "MemoryError", gpu="NVIDIA H200"))
    with pytest.raises(ValueError, match="main memory ran out, and nobody noted how much there was"):
        would_fit(died(by_hand, "MemoryError"))
    with pytest.raises(ValueError, match="neither the error nor the run says how much it has"):
        would_fit(died(by_hand, "RuntimeError: CUDA error: out of memory"))
    with pytest.raises(ValueError, match="margin"):
        would_fit(died(by_hand, said()), margin=2)


def test_the_limit_that_the_guard_noted(by_hand: Make) -> None:
    run = died(by_hand, "MemoryError", spec=SPEC.replace(device="cpu"), memory_limit=GIB)
    assert would_fit(run).room.bytes == GIB


def test_a_script_is_refused_and_not_advised(by_hand: Make, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    run = died(by_hand, said(), spec=ScriptSpec(script=str(script)))
    assert "would_fit" not in str(run.error)
    with pytest.raises(ValueError, match="it ran a script"):
        would_fit(run)


def test_a_batch_that_was_chosen_is_refused_and_not_advised(by_hand: Make) -> None:
    run = died(by_hand, said(), spec=SPEC.replace(micro_batch="auto"))
    assert "would_fit" not in str(run.error)
    with pytest.raises(ValueError, match="its micro_batch was chosen when it started"):
        would_fit(run)


def test_in_the_terminal_it_is_said_in_a_line(by_hand: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(died(by_hand, "ValueError: boom", kind="exception").path), "--would-fit"]) == 2
    assert "it failed of something else" in capsys.readouterr().err


# --- how much there was


def test_the_head_room_of_pytorch_s_own_limit() -> None:
    reason = OutOfMemory(device="GPU 0", capacity=8 * GIB, allowed=2 * GIB, allocated=GIB, unallocated=0, this_process=GIB + 100 * MIB)
    assert available_memory(reason, ranks=1).bytes == 2 * GIB + 100 * MIB
    assert available_memory(OutOfMemory(device="the GPU", allowed=GIB), ranks=1).bytes == GIB
    assert available_memory(OutOfMemory(device="the GPU"), ranks=1, gpu=GIB).bytes == GIB


def test_what_was_left_is_shared() -> None:
    reason = OutOfMemory(device=HOST, held=Held(groups={"parameters": GIB}, available=GIB), capacity=64 * GIB)
    assert available_memory(reason, ranks=1).bytes == 2 * GIB
    assert available_memory(reason, ranks=4).bytes == GIB + GIB // 4
    assert available_memory(OutOfMemory(device=HOST), ranks=4, limit=8 * GIB).bytes == 2 * GIB


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "8 GiB"])
def test_a_capacity_that_is_none(capacity: Any) -> None:
    with pytest.raises(ValueError, match="bytes per rank"):
        memory_ladder(SPEC, "cpu", capacity=capacity)
    with pytest.raises(ValueError, match="bytes per rank"):
        max_micro_batch(SPEC, "cuda", capacity=capacity)


def test_a_ladder_on_a_cpu_takes_the_fewest_changes() -> None:
    ladder = memory_ladder(SPEC.replace(device="cpu"), "cpu", capacity=GIB)
    assert ladder.fits
    assert len(ladder.rungs) == 1
    assert ladder.start.reserved is None
