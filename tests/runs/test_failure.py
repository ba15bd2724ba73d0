"""Who failed first and why: from records made by hand, and from real launches in which rank 1 fails in every way there is."""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.conftest import HandMade
from tests.emulated_device import MIB, EmulatedDevice
from tests.forked import Forks
from workbench.core import run_directory
from workbench.core.package import ROOT
from workbench.memory.measure.at_oom import on_host
from workbench.runs import errors, failure
from workbench.runs.out_of_memory import HOST, Held, OutOfMemory
from workbench.runs.root_cause import first_failure
from workbench.runs.spec import SpecError
from workbench.runs.task import TaskError

SCRIPTS = Path(__file__).parents[1] / "scripts"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8839: Connection closed by peer"

# --- recording


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture
def rank2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """We are rank 2 of a run in tmp_path; returns where its record goes."""
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    return tmp_path / run_directory.ERRORS / "rank2.json"


LOST = {
    ConnectionResetError: "raise ConnectionResetError(104, 'Connection reset by peer')",
    ConnectionRefusedError: "raise ConnectionRefusedError(111, 'Connection refused by peer')",
    EOFError: "raise EOFError('Connection closed by peer')",
    FileNotFoundError: "raise FileNotFoundError(2, 'Connection closed by peer: no such socket')",
    RuntimeError: "raise RuntimeError('Connection closed by peer')",
}
"""Error → the line that raises it. In each message, "by peer" makes it look like the end of another rank."""


def lost_connection(*files: str, line: str = LOST[ConnectionResetError]) -> None:
    """Raise as if each of these files had called the next one."""
    inner: Callable[[], None] | None = None
    for file in reversed(files):
        namespace: dict[str, Any] = {"inner": inner}
        body = "inner()" if inner else line
        exec(compile(f"def call():\n    {body}", file, "exec"), namespace)
        inner = namespace["call"]
    assert inner
    inner()


@pytest.mark.parametrize(
    ("files", "of_a_worker"),
    [
        (("/x/torch/utils/data/dataloader.py", "/x/torch/multiprocessing/reductions.py", "/x/multiprocessing/connection.py"), True),
        (("/x/torch/utils/data/dataloader.py", "/home/me/dataset.py"), False),  # a dataset that reads from a server
        (("/home/me/train.py", "/x/torch/multiprocessing/reductions.py"), False),
    ],
)
def test_a_worker_that_ended_while_it_handed_over_a_batch_is_no_peer(rank2: Path, files: tuple[str, ...], of_a_worker: bool) -> None:
    with pytest.raises(ConnectionResetError) as caught:
        lost_connection(*files)
    failure.record(caught.value)
    record = run_directory.read_json(rank2)
    assert record["message"].endswith("(a worker of the DataLoader ended while it handed over a batch)") is of_a_worker
    assert record["consequence"] is not of_a_worker


@pytest.mark.parametrize("error", LOST)
def test_a_worker_that_ended_shows_itself_by_several_errors(rank2: Path, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        lost_connection("/x/torch/utils/data/dataloader.py", "/x/torch/multiprocessing/reductions.py", line=LOST[error])
    failure.record(caught.value)
    record = run_directory.read_json(rank2)
    assert record["consequence"] is ("a worker of the DataLoader ended" not in record["message"]) is (error is RuntimeError)


def test_a_variable_that_names_no_rank_hides_no_error(rank2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "../../x")
    failure.record(raised(ValueError("boom")))
    assert run_directory.read_json(rank2.with_name("rank0.json"))["message"] == "ValueError: boom"


def test_the_first_record_stays(rank2: Path) -> None:
    before = time.monotonic_ns()
    failure.record(raised(ValueError("boom")))
    failure.record(raised(ValueError("later")))
    record = run_directory.read_json(rank2)
    assert (record["rank"], record["kind"], record["message"], record["consequence"]) == (2, "exception", "ValueError: boom", False)
    assert before < record["time_ns"] < time.monotonic_ns()
    assert record["traceback"].startswith("Traceback")
    assert record["traceback"].endswith("ValueError: boom\n")
    assert [path.name for path in rank2.parent.iterdir()] == ["rank2.json"]


def test_an_error_of_ours_says_all_by_itself(rank2: Path) -> None:
    failure.record(TaskError("micro_batch=512 is more than the 256 samples"))
    assert run_directory.read_json(rank2)["traceback"] is None


def test_of_an_error_of_ours_what_led_to_it_has_a_traceback(rank2: Path) -> None:
    error = TaskError("build() raised KeyError: 'mine'")
    error.__cause__ = raised(KeyError("mine"))
    failure.record(error)
    record = run_directory.read_json(rank2)
    assert record["message"] == "TaskError: build() raised KeyError: 'mine'"
    assert record["traceback"].endswith("KeyError: 'mine'\n")
    assert "TaskError" not in record["traceback"]


def test_an_error_of_ours_that_a_line_of_the_users_asked_for_names_it(rank2: Path) -> None:
    with pytest.raises(SpecError) as asked:
        wb.RunSpec(task="text-gpt", micro_batch=0)
    failure.record(asked.value)
    assert "wb.RunSpec(task=" in run_directory.read_json(rank2)["traceback"]


def test_a_file_beside_the_package_is_the_users(rank2: Path) -> None:
    """Its path begins like the package's folder: it was taken for one of ours, and the traceback was lost."""
    path = f"{ROOT}_task.py"
    with pytest.raises(TaskError) as caught:
        exec(compile("raise error", path, "exec"), {"error": TaskError("no such task")})
    assert caught.value.__traceback__
    failure.record(caught.value.with_traceback(caught.value.__traceback__.tb_next))  # without the frame of this test, a user's anyway
    assert path in run_directory.read_json(rank2)["traceback"]


def test_where_a_record_goes(rank2: Path, tmp_path: Path) -> None:
    failure.record(raised(ValueError("boom")), run_dir=tmp_path / "..", rank=5)
    assert not rank2.exists()
    assert (tmp_path / ".." / run_directory.ERRORS / "rank5.json").exists()


def test_no_record_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_directory.ENV_RUN_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    failure.record(raised(ValueError("boom")))
    assert list(tmp_path.iterdir()) == []


def test_options_that_argparse_refuses_are_named(rank2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    with pytest.raises(SystemExit) as left:
        parser.parse_args([])
    assert failure.describe(left.value).startswith(
        "SystemExit: 2: the following arguments are required: --data (options of a script: launch("
    )
    failure.record(left.value)
    assert run_directory.read_json(rank2)["traceback"] == capsys.readouterr().err  # its usage and error, and no lines of argparse


@pytest.mark.parametrize(("code", "recorded"), [(None, False), (0, False), (3, True), ("no data", True)])
def test_sys_exit_is_an_error_only_with_a_code(rank2: Path, code: Any, recorded: bool) -> None:
    failure.record(raised(SystemExit(code)))
    assert rank2.exists() == recorded


def test_conclude(rank2: Path) -> None:
    failure.record(raised(ValueError("handled later")))
    failure.conclude(None)
    assert not rank2.exists()
    failure.conclude(raised(SystemExit(3)))
    failure.conclude(raised(ValueError("later")))
    assert run_directory.read_json(rank2)["message"] == "SystemExit: 3"


def test_a_record_fits_on_a_full_disk(rank2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reserve := rank2.parents[1] / run_directory.RESERVE).write_bytes(b"x")
    (rank2.parents[1] / run_directory.RUN_JSON).touch()
    write = run_directory.write_json

    def full_until_freed(path: Path, value: object) -> None:
        if reserve.exists():
            raise run_directory.DiskFullError(28, "no space")
        write(path, value)

    monkeypatch.setattr(run_directory, "write_json", full_until_freed)
    failure.record(raised(ValueError("boom")))
    assert run_directory.read_json(rank2)["message"] == "ValueError: boom"


# --- what a message tells


@pytest.mark.parametrize(
    ("message", "kind", "advice"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …", "out-of-memory", "micro_batch"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory", "out-of-memory", "micro_batch"),
        ("MemoryError", "out-of-memory", "micro_batch"),
        ("_ArrayMemoryError: Unable to allocate 8.00 EiB for an array with shape (2**60,)", "out-of-memory", "micro_batch"),
        (
            "DistBackendError: NCCL error in: …, invalid usage … Duplicate GPU detected : rank 1 and rank 0 both on …",
            "exception",
            "LOCAL_RANK",
        ),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "exception", "CUDA_LAUNCH_BLOCKING=1"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", "killed", "num_workers"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that …", "killed", "shm-size"),
        ("DistNetworkError: The server socket has failed to listen … EADDRINUSE", "address-in-use", "MASTER_PORT"),
        ("OSError: [Errno 98] Address already in use", "address-in-use", "MASTER_PORT"),
        ("TaskError: task='my.py:build': my.py does not import: ValueError: x", "task", None),
        ("DiskFullError: [Errno 28] no space to write runs/x", "disk-full", "runs_dir"),
        ("OSError: [Errno 28] No space left on device", "disk-full", "runs_dir"),
        ("RuntimeError: CUDA error: device-side assert triggered", "exception", "label"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "exception", "CUDA_LAUNCH_BLOCKING=1"),
        ("DistBackendError: [Rank 0] Watchdog caught collective operation timeout: …", "timeout", "branches"),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", "timeout", "branches"),
        ("ModuleNotFoundError: No module named 'timm'", "exception", "install"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration before …", "exception", "find_unused_parameters"),
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
            "your training graph has changed in this iteration … this is not compatible with static_graph set to True.",
            "exception",
            "static_graph=True promises",
        ),
        ("AttributeError: 'DistributedDataParallel' object has no attribute 'decode'", "exception", "into the model's forward"),
        (
            "RuntimeError: aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before …",
            "exception",
            "only inside of the model's forward",
        ),
        ("RuntimeError: setStorage: sizes [16, 32], strides [1, 16], … are out of bounds for storage of size 0", "exception", "penalty"),
        ("AssertionError: FSDP expects uniform original parameter dtype but got {torch.float32, …}", "exception", "view_as_real"),
    ],
)
def test_known_symptoms(message: str, kind: str, advice: str | None) -> None:
    symptom = errors.symptom_of(message)
    assert symptom is not None
    assert symptom.kind == kind
    assert symptom.kind in errors.KINDS
    assert advice in symptom.hint if advice and symptom.hint else advice is symptom.hint


FULL_DEVICES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …",
    "HIP out of memory. Tried to allocate 6.64 GiB.",
    "XPU out of memory. Tried to allocate 2.00 GiB.",
    "MPS backend out of memory (MPS allocated: 9.57 GiB, …)",
    "Invalid buffer size: 24.00 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call …",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "cudaErrorMemoryAllocation: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
]


@pytest.mark.parametrize("text", FULL_DEVICES)
def test_a_full_device_is_known_however_it_is_said(text: str) -> None:
    assert errors.is_out_of_memory(RuntimeError(text))
    symptom = errors.symptom_of(f"RuntimeError: {text}")
    assert symptom is not None
    assert symptom.kind == "out-of-memory"
    memory = OutOfMemory.parse(f"RuntimeError: {text}")
    assert memory is not None
    assert memory.device != HOST


def test_full_memory_as_an_exception() -> None:
    assert errors.is_out_of_memory(MemoryError())
    assert errors.is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"))
    assert errors.is_out_of_memory(type("OutOfMemoryError", (RuntimeError,), {})("whatever it says"))
    assert not errors.is_out_of_memory(ValueError("a step that ran into CUDA out of memory"))
    assert not errors.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not errors.is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    assert not errors.is_out_of_memory(RuntimeError("NCCL error …, unhandled cuda error …\nCuda failure 1 'invalid argument'"))


LIBRARIES = [
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`. If you keep seeing this error, you may …",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "GET was unable to find an engine to execute this computation",
]


@pytest.mark.parametrize("text", LIBRARIES)
def test_a_library_that_fails_on_a_full_gpu_has_probably_no_memory(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(memory=80 * 1024 * MIB).install(monkeypatch)
    error = RuntimeError(text)
    device.memory.allocate(40 * 1024 * MIB)
    assert not errors.is_out_of_memory(error), "half of it is free"
    assert failure.describe(error) == f"RuntimeError: {text}"
    device.memory.free(device.memory.allocate(1024 * MIB))
    device.memory.allocate(38 * 1024 * MIB + 924 * MIB)
    assert errors.is_out_of_memory(error)
    assert not on_host(error)
    failure.record(error, run_dir=tmp_path, rank=0)
    record = json.loads(next((tmp_path / "errors").iterdir()).read_text())
    assert record["kind"] == "out-of-memory"
    memory = OutOfMemory.from_json(record["memory"])
    assert (memory.device, memory.capacity, memory.free) == ("GPU 0", 80 * 1024 * MIB, 100 * MIB)
    assert (memory.allocated, memory.unallocated) == (78 * 1024 * MIB + 924 * MIB, 1024 * MIB)
    assert record["message"].startswith(f"RuntimeError: {text} (memory had probably run out: GPU 0 has")
    symptom = errors.symptom_of(record["message"])
    assert symptom is not None
    assert symptom.hint == errors.LESS_MEMORY


def test_a_library_that_fails_after_memory_ran_out_has_probably_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed first is freed by now."""
    EmulatedDevice(memory=80 * 1024 * MIB).install(monkeypatch)
    error = RuntimeError(LIBRARIES[0])
    error.__context__ = ValueError("no batch")
    error.__context__.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90.00 GiB.")
    assert errors.is_out_of_memory(error)
    assert not errors.is_out_of_memory(RuntimeError(LIBRARIES[0]))


def test_other_errors_on_a_full_gpu_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(memory=1024 * MIB).install(monkeypatch)
    device.memory.allocate(1000 * MIB)
    for text in ("CUDA error: device-side assert triggered", "cuDNN error: CUDNN_STATUS_BAD_PARAM", "shapes do not match"):
        assert not errors.is_out_of_memory(RuntimeError(text))
        assert failure.describe(RuntimeError(text)) == f"RuntimeError: {text}"
    assert "probably" not in failure.describe(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert not errors.is_out_of_memory(RuntimeError(LIBRARIES[0]))


def test_an_ordinary_message_is_no_symptom() -> None:
    assert errors.symptom_of("ValueError: boom") is None
    assert not errors.is_consequence("ValueError: boom")


@pytest.mark.parametrize(
    "message",
    [
        PEER,
        "RuntimeError: [/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is typically caused by …",
        "DistBackendError: NCCL error … ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "RuntimeError: DataLoader worker (pid 9771) is killed by signal: Terminated. ",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_consequences(message: str) -> None:
    assert errors.is_consequence(message)


# --- where it failed

IN_PYTHON = """Traceback (most recent call last):
  File "/home/me/train.py", line 40, in <module>
    main()
  File "/home/me/train.py", line 31, in main
    model(batch)
  File "/usr/lib/python3/dist-packages/torch/nn/modules/module.py", line 1518, in _call_impl
    return forward_call(*args, **kwargs)
ValueError: boom
"""
DUMPED = """Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/home/me/reader.py", line 3 in read

Current thread 0x00007e (most recent call first):
  File "/usr/lib/python3/dist-packages/numpy/core.py", line 7 in call
  File "/home/me/train.py", line 31 in main
  File "/home/me/train.py", line 40 in <module>
"""
WITH_C_STACK = f"""{DUMPED}
Current thread's C stack trace (most recent call first):
  Binary file "/usr/lib/libc.so.6", at +0x94a4d [0x7f2e4e694a4d]
  Binary file "/usr/bin/python3", at Py_BytesMain+0x29 [0x5d3a8d]
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (IN_PYTHON, "/home/me/train.py:31 in main"),
        (IN_PYTHON.replace(", in main", ", in <module>"), "/home/me/train.py:31"),
        (DUMPED, "/home/me/train.py:31 in main"),
        (WITH_C_STACK, "/home/me/train.py:31 in main"),  # of Python 3.14
        ("ValueError: boom", ""),
        (None, ""),
    ],
)
def test_the_users_line_at_which_a_rank_failed(text: str | None, place: str) -> None:
    why = failure.Failure(rank=1, kind="exception", message="ValueError: boom", traceback=text, hint="Look.")
    assert why.place == place
    assert str(why) == "\n".join(["rank 1: ValueError: boom", *([f"at {place}"] if place else []), "Look."])
    assert failure.Failure(rank=None, kind="launcher", message="x", traceback=text, hint=None).place == ""
    here = os.path.abspath("scripts/train.py")
    assert dataclasses.replace(why, traceback=(text or "").replace("/home/me/train.py", here)).place == place.replace("/home/me", "scripts")


def test_where_a_model_failed_the_line_of_the_loop_is_said_as_well() -> None:
    inside = IN_PYTHON.replace("ValueError: boom", '  File "/home/me/model.py", line 7, in forward\n    x.reshape(-1, 3)\nValueError: boom')
    why = failure.Failure(rank=0, kind="exception", message="ValueError: boom", traceback=inside, hint=None)
    assert str(why) == "rank 0: ValueError: boom\nat /home/me/model.py:7 in forward, called from /home/me/train.py:31"
    again = inside + "\nDuring handling of the above exception, another exception occurred:\n\n" + IN_PYTHON
    assert dataclasses.replace(why, traceback=again).caller == "", "the last error was raised by the loop itself"
    direct = inside.replace("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", "/home/me/train.py")
    assert dataclasses.replace(why, traceback=direct).caller == "", "no library is between"


def test_a_line_that_the_memory_names_already_is_not_said_twice() -> None:
    full = OutOfMemory.parse("CUDA out of memory. Tried to allocate 2.00 GiB.", Held(groups={}, line="train.py:31: model(batch)"))
    why = failure.Failure(rank=1, kind="out-of-memory", message="full", traceback=IN_PYTHON, hint=None, memory=full)
    assert str(why).count("train.py:31") == 1
    for other in (IN_PYTHON.replace("31", "3"), IN_PYTHON.replace("train.py", "work in progress/ain.py")):
        assert f"at {(at := dataclasses.replace(why, traceback=other)).place}" in str(at)  # another line, another file
    assert str(dataclasses.replace(why, traceback=IN_PYTHON.replace("/me/", "/work in progress/"))).count("train.py:31") == 1
    assert "at /home/me/train.py:31" in str(dataclasses.replace(why, memory=OutOfMemory(device=HOST)))


def test_a_failed_run_says_where_the_stderr_of_its_rank_is(by_hand: Callable[..., HandMade], monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand().log(1, "Look here\n", "stderr").log(0, "", "stderr")
    (made.path / run_directory.ERRORS).mkdir()
    recorded(made.path, 1, 1.0, "ValueError: boom")
    run = wb.Run.load(made.ended("failed", exits={}).path)
    assert run.error is not None
    printed = run.log_files()[1][0]
    assert str(run.error).endswith(f"what rank 1 printed: {printed}")
    assert str(run.error) in wb.report(run).__str__()
    monkeypatch.chdir(made.path)
    assert run.error.stderr == str(printed)
    assert str(run.error).endswith(f"what rank 1 printed: {printed.relative_to(made.path)}")  # from where it is read
    monkeypatch.setattr(run, "log_files", lambda: {1: [printed.with_name("gone") / "stderr.log"]})
    gone = run.error
    assert gone is not None
    assert (gone.message, gone.stderr) == ("ValueError: boom", None)  # deleted since it was listed
    recorded(made.path, 0, 0.5, "ValueError: first")
    assert "printed" not in str(wb.Run.load(made.path).error)  # nothing


# --- who was first


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for folder in (run_directory.ERRORS, run_directory.LOGS):
        (tmp_path / folder).mkdir()
    run_directory.write_json(tmp_path / run_directory.RUN_JSON, {"timeout": 30})
    (tmp_path / run_directory.LAUNCHER_LOG).write_text("")
    return tmp_path


def recorded(run_dir: Path, rank: int, seconds: float, message: str) -> None:
    value = {"rank": rank, "time_ns": int(seconds * 1e9), "kind": "exception", "message": message, "traceback": f"…\n{message}\n"}
    value["consequence"] = errors.is_consequence(message)
    (run_dir / run_directory.ERRORS / f"rank{rank}.json").write_text(json.dumps(value))


def table(run_dir: Path, **codes: int) -> None:
    """What torchrun prints last."""
    lines = [
        f"  rank      : {rank[1:]} (local_rank: {rank[1:]})\n  exitcode  : {code} (pid: 7) \n  error_file: <N/A>"
        for rank, code in codes.items()
    ]
    (run_dir / run_directory.LAUNCHER_LOG).write_text("Failures:\n" + "\n".join(lines))


def failed(**exits: float) -> dict[str, Any]:
    """An outcome with times of death in seconds."""
    return {"state": "failed", "returncode": 1, "exits": {rank[1:]: int(seconds * 1e9) for rank, seconds in exits.items()}, "oom_kills": 0}


def first(run_dir: Path, outcome: dict[str, Any]) -> tuple[int | None, str, str]:
    found = first_failure(run_dir, outcome)
    assert found is not None
    assert found.kind in errors.KINDS
    return found.rank, found.kind, found.message


def test_the_earlier_record_wins_and_a_consequence_comes_last(run_dir: Path) -> None:
    recorded(run_dir, 0, 1.0, PEER)
    recorded(run_dir, 1, 1.2, "ValueError: boom")
    recorded(run_dir, 2, 1.1, "ValueError: first")
    assert first(run_dir, failed()) == (2, "exception", "ValueError: first")


def test_a_silent_death_is_placed_in_time(run_dir: Path) -> None:
    recorded(run_dir, 0, 2.0, "RuntimeError: something unheard of because a peer is gone")
    table(run_dir, r0=1, r1=-9)
    assert first(run_dir, failed(r0=2.5, r1=1.9))[:2] == (1, "killed")
    assert first(run_dir, failed(r0=2.5, r1=2.1))[0] == 0
    assert first(run_dir, failed(r0=2.5))[0] == 0  # nobody saw when it died: a record is better evidence


def test_who_torchrun_ended_is_not_to_blame(run_dir: Path) -> None:
    recorded(run_dir, 0, 2.0, PEER)  # the true cause, if only in the words of a consequence
    table(run_dir, r0=1, r1=-15, r2=-9)
    assert first(run_dir, failed(r0=2.2, r1=2.3, r2=6.5))[0] == 0


def test_a_rank_that_somebody_ended_is_named_and_not_its_peer(run_dir: Path) -> None:
    recorded(run_dir, 0, 1.95, PEER)  # its peer is quicker to say so than the guard to see it
    table(run_dir, r0=1, r1=-15)
    assert first(run_dir, failed(r0=2.2, r1=2.0)) == (1, "killed", "was ended from outside by SIGTERM")
    assert first(run_dir, failed(r0=2.0, r1=2.0))[0] == 1  # seen at the same moment
    assert first(run_dir, failed(r0=3.4, r1=3.4))[0] == 1  # by a guard that waited for a core meanwhile
    assert first(run_dir, failed(r0=2.0, r1=2.2))[0] == 0  # then it was torchrun
    table(run_dir, r0=3, r1=-15)
    (run_dir / run_directory.ERRORS / "rank0.json").unlink()
    assert first(run_dir, failed(r0=2.0, r1=2.0))[0] == 0
    recorded(run_dir, 0, 1.0, "ValueError: boom")
    assert first(run_dir, failed(r0=2.2, r1=2.0))[0] == 0


def test_an_interrupted_rank_is_named_as_that(run_dir: Path) -> None:
    recorded(run_dir, 1, 2.0, "KeyboardInterrupt")
    recorded(run_dir, 0, 2.1, PEER)
    table(run_dir, r0=1, r1=-2)
    assert first(run_dir, failed(r0=2.3, r1=2.2)) == (1, "killed", "was ended from outside by SIGINT (KeyboardInterrupt)")


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (2, "SIGINT"), (1, "SIGHUP")])
@pytest.mark.parametrize("spelling", ["{0}", "Signals.{1}"])
def test_a_signal_to_torchrun_is_no_rank_s_doing(run_dir: Path, number: int, name: str, spelling: str) -> None:
    recorded(run_dir, 0, 2.0, "KeyboardInterrupt")
    recorded(run_dir, 1, 2.1, "RuntimeError: nobody has ever heard of this")
    text = spelling.format(number, name)
    now = time.strftime("%m%d %H:%M:%S", time.localtime(time.time() - 3600))
    log = run_dir / run_directory.LAUNCHER_LOG
    for line in (f"W{now}.123000 7 api.py:1] Received {text} death signal, shutting down workers\n", ""):
        log.write_text(f"{line}Traceback …\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: {text}\n")
        assert first(run_dir, failed(r0=2.3, r1=2.2)) == (None, "launcher", f"torchrun was ended from outside by {name}")
    now = time.strftime("%m%d %H:%M:%S", time.localtime(time.time() + 3600))  # an error from before is the reason
    log.write_text(f"W{now}.123000 7 api.py:1] Received {text} death signal, shutting down workers\n")
    assert first(run_dir, failed(r0=2.3, r1=2.2))[0] == 1
    log.write_text(f"Received {text} death signal")
    lost = (None, "launcher", "its guard was killed, so nobody saw how it ended")  # at the same time
    assert first(run_dir, {"state": "lost"}) == lost
    assert first_failure(run_dir, failed() | {"state": "stopped"}) is None
    assert first(run_dir, failed() | {"nodes": {"1": {"state": "failed", "name": "b"}}})[0] is not None  # a guard has ended it


@pytest.mark.parametrize(("written", "rank"), [(0.3, 1), (0.795, None), (0.9, None)])
def test_errors_and_a_signal_within_a_second_are_told_apart(run_dir: Path, written: float, rank: int | None) -> None:
    recorded(run_dir, 1, 2.1, "RuntimeError: nobody has ever heard of this")
    second = int(time.time()) - 100
    os.utime(run_dir / run_directory.ERRORS / "rank1.json", (second + written,) * 2)
    moment = time.strftime("%m%d %H:%M:%S", time.localtime(second))
    log = f"W{moment}.800000 7 api.py:1] Received Signals.SIGTERM death signal, shutting down workers\n"
    (run_dir / run_directory.LAUNCHER_LOG).write_text(log)
    assert first(run_dir, failed(r0=2.3, r1=2.2))[0] == rank


def test_a_torchrun_that_was_killed_leaves_no_culprit_among_the_ranks(run_dir: Path) -> None:
    recorded(run_dir, 0, 2.0, PEER)
    assert first(run_dir, failed(r0=2.1) | {"returncode": -9}) == (None, "launcher", "torchrun was ended from outside by SIGKILL")
    assert first(run_dir, failed(r0=2.1) | {"returncode": -11}) == (None, "launcher", "torchrun crashed (SIGSEGV)")
    (run_dir / run_directory.ERRORS / "rank0.json").unlink()
    (run_dir / run_directory.LAUNCHER_LOG).write_text("Traceback …\n  import torch\nKeyboardInterrupt\n")
    assert first(run_dir, failed()) == (None, "launcher", "torchrun was ended from outside by SIGINT")


def test_a_rank_that_left_early_without_an_error(run_dir: Path) -> None:
    recorded(run_dir, 0, 2.0, PEER)
    table(run_dir, r0=1)
    rank, kind, message = first(run_dir, failed(r1=1.5, r0=2.1))
    assert (rank, kind) == (1, "exit")
    assert message.startswith("ended without an error while others still needed it: rank 0 got RuntimeError: [gloo")
    assert first(run_dir, failed(r1=2.05, r0=2.1))[0] == 1  # the guard saw it after rank 0 had got its error
    assert first(run_dir, failed(r1=2.5, r0=2.1))[0] == 0


@pytest.mark.parametrize(
    ("code", "oom_kills", "kind", "message"),
    [
        (-9, 0, "killed", "was killed (SIGKILL)"),
        (-9, 1, "killed", "was killed by the kernel because memory ran out (SIGKILL)"),
        (-15, 0, "killed", "was ended from outside by SIGTERM"),
        (-2, 0, "killed", "was ended from outside by SIGINT"),
        (-11, 0, "crash", "crashed (SIGSEGV)"),
        (-6, 0, "crash", "crashed (SIGABRT)"),
        (-35, 0, "killed", "was ended from outside by signal 35"),
        (3, 0, "exit", "ended with exit code 3, without an exception"),
    ],
)
def test_how_a_silent_rank_died(run_dir: Path, code: int, oom_kills: int, kind: str, message: str) -> None:
    table(run_dir, r1=code)
    log = run_dir / run_directory.LOGS / "none" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {i}\n" for i in range(30)))
    assert first(run_dir, {**failed(r1=1.0), "oom_kills": oom_kills}) == (1, kind, message)
    found = first_failure(run_dir, failed())
    assert found is not None
    assert found.traceback == "\n".join(f"line {i}" for i in range(10, 30))
    with log.open("a") as file:
        file.write("\nCurrent thread's C stack trace (most recent call first):\n" + '  Binary file "/usr/bin/python3"\n' * 25)
    again = first_failure(run_dir, failed())
    assert again is not None
    assert str(again.traceback).splitlines() == [f"line {i}" for i in range(11, 30)]


@pytest.mark.parametrize(
    ("kills", "hint"), [(0, "The kernel killed no process for want of memory"), (None, "It is not known by whom; most often memory")]
)
def test_memory_is_blamed_for_a_kill_only_where_no_count_says_otherwise(run_dir: Path, kills: int | None, hint: str) -> None:
    table(run_dir, r1=-9)
    why = first_failure(run_dir, failed(r1=1.0) | {"oom_kills": kills})
    assert why
    assert why.hint
    assert why.hint.startswith(hint)


def test_a_damaged_record_is_left_out(run_dir: Path) -> None:
    recorded(run_dir, 0, 2.0, "ValueError: boom")
    sound = json.loads((run_dir / run_directory.ERRORS / "rank0.json").read_text())
    for text in ("{", "[]", "{}", '{"rank": 0, "time_ns": "x"}', json.dumps(sound | {"rank": 1, "time_ns": 1, "memory": {"x": 1}})):
        (run_dir / run_directory.ERRORS / "rank1.json").write_text(text)
        assert first(run_dir, failed()) == (0, "exception", "ValueError: boom")


WATCHDOG = (
    "[rank1]:[E1123 07:21:55.1 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, "
    "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: …\n"
)
REMOTE = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [Rank 1] Watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error …\n"
)
FULL = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory\nException raised from …\n"


@pytest.mark.parametrize(
    ("stderr", "kind", "message"),
    [
        (
            WATCHDOG,
            "timeout",
            "was ended by NCCL's watchdog: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE",
        ),
        (REMOTE, "crash", "crashed (SIGABRT): [Rank 1] Watchdog thread terminated with exception: NCCL error: remote process exited"),
        (FULL, "out-of-memory", "crashed (SIGABRT): CUDA error: out of memory"),
    ],
)
def test_an_abort_that_says_why(run_dir: Path, stderr: str, kind: str, message: str) -> None:
    table(run_dir, r1=-6)
    log = run_dir / run_directory.LOGS / "none" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"some warning\n{stderr}")
    found = first(run_dir, failed(r1=1.0))
    assert found[:2] == (1, kind)
    assert found[2].startswith(message)
    recorded(run_dir, 0, 2.0, "ValueError: boom")  # the other ranks waited for this one, however long it took to say so
    assert first(run_dir, failed(r0=2.1, r1=1.0))[0] == (1 if stderr is FULL else 0)


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        ({"state": "timeout", "stopped_ns": 1}, "timeout", "stopped at its time limit, timeout=30 s"),
        ({"state": "abandoned", "stopped_ns": 1}, "launcher", "stopped because the process that launched it ended"),
        ({"state": "lost"}, "launcher", "its guard was killed, so nobody saw how it ended"),
        ({"state": "failed", "returncode": -9}, "launcher", "torchrun was ended from outside by SIGKILL"),
        ({"state": "failed", "returncode": 2}, "address-in-use", "torchrun ended with exit code 2: DistNetworkError: … EADDRINUSE …"),
    ],
)
def test_no_rank_is_to_blame(run_dir: Path, outcome: dict[str, Any], kind: str, message: str) -> None:
    if outcome.get("returncode") == 2:
        (run_dir / run_directory.LAUNCHER_LOG).write_text("Traceback …\nDistNetworkError: … EADDRINUSE …\n")
    assert first(run_dir, outcome) == (None, kind, message)


def test_what_a_rank_says_when_it_is_stopped_is_not_why(run_dir: Path) -> None:
    recorded(run_dir, 0, 30.5, "SystemExit: 143")
    outcome = {"state": "timeout", "stopped_ns": int(30e9)}
    assert first(run_dir, outcome)[0] is None
    recorded(run_dir, 1, 3.0, "ValueError: boom")  # and then it hung
    assert first(run_dir, outcome) == (1, "exception", "ValueError: boom")


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_no_failure(run_dir: Path, state: str) -> None:
    recorded(run_dir, 0, 1.0, "ValueError: boom")
    assert first_failure(run_dir, {"state": state}) is None


def test_the_error_shows_the_traceback_of_the_rank() -> None:
    found = failure.Failure(rank=1, kind="exception", message="ValueError: boom", traceback="Traceback …\nValueError: boom\n", hint="Do.")
    error = failure.RunError(found)
    assert str(error) == "rank 1: ValueError: boom\nDo."
    assert error._render_traceback_() == ["Traceback …", "ValueError: boom", "", "RunError: rank 1: ValueError: boom", "Do."]
    ended = failure.RunError(failure.Failure(rank=None, kind="launcher", message="gone", traceback=None, hint=None))
    assert ended._render_traceback_() == ["RunError: gone"]


# --- real launches

WAYS = {
    "teardown": ("exception", "ValueError: boom"),
    "slow exit": ("exception", "ValueError: boom"),
    "sys.exit(3)": ("exit", "SystemExit: 3"),
    "os._exit(3)": ("exit", "ended with exit code 3, without an exception"),
    "segfault": ("crash", "crashed (SIGSEGV)"),
    "SIGKILL": ("killed", "was killed (SIGKILL)"),
}


@pytest.fixture
def launch_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], wb.Run]:
    """Launch two ranks of which the second fails in the given way: in a script that knows nothing of us, or in our own training program."""

    def start(way: str, style: str) -> wb.Run:
        monkeypatch.setenv("FAIL_HOW", way)
        if style == "script":
            return wb.launch(SCRIPTS / "failing.py", args=[way], nproc_per_node=2, runs_dir=tmp_path)
        task = f"{SCRIPTS / 'failing_task.py'}:build"
        return wb.launch(wb.RunSpec(task=task, device="cpu", nproc_per_node=2, micro_batch=4, steps=6), runs_dir=tmp_path)

    return start


def check_culprit(run: wb.Run, way: str) -> None:
    run.wait()
    assert run.error is not None
    assert (run.state, run.error.rank, run.error.kind, run.error.message) == ("failed", 1, *WAYS[way])


def test_the_right_rank_of_a_task_is_named(launch_failing: Callable[[str, str], wb.Run]) -> None:
    check_culprit(launch_failing("teardown", "task"), "teardown")


@pytest.mark.slow
def test_a_task_that_ends_its_rank_is_named(
    by_hand: Callable[..., HandMade], forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_HOW", "sys.exit(3)")
    spec = wb.RunSpec(task=f"{SCRIPTS / 'failing_task.py'}:build", device="cpu", nproc_per_node=2, micro_batch=4, steps=6)
    path = by_hand(spec=spec.to_json()).path
    assert forks.train(2, tmp_path, path).returncode
    assert first(path, failed()) == (1, *WAYS["sys.exit(3)"])


def test_a_watched_script_records_before_it_tears_down(tmp_path: Path) -> None:
    """Watching imports torch before the script does; the teardown must be watched all the same."""
    script = tmp_path / "slow_teardown.py"
    code = (
        (SCRIPTS / "failing.py")
        .read_text()
        .replace("        dist.destroy_process_group()", "        dist.destroy_process_group(); time.sleep(1)")
    )
    script.write_text(code)
    run = wb.launch(script, args=["teardown"], nproc_per_node=2, watch=True, runs_dir=tmp_path / "runs").wait()
    records = {rank: json.loads((run.path / "errors" / f"rank{rank}.json").read_text()) for rank in (0, 1)}
    assert records[1]["time_ns"] < records[0]["time_ns"]
    check_culprit(run, "teardown")


def test_the_right_rank_of_a_script_is_named(launch_failing: Callable[[str, str], wb.Run]) -> None:
    check_culprit(launch_failing("SIGKILL", "script"), "SIGKILL")


@pytest.mark.slow
def test_the_right_rank_of_a_script_is_named_whatever_the_way(launch_failing: Callable[[str, str], wb.Run]) -> None:
    """Those that no test before has tried, once. 20 trials of each, with torchrun's own verdict beside ours: benchmarks/culprits.py."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda way: check_culprit(launch_failing(way, "script"), way), WAYS.keys() - {"teardown", "SIGKILL"}))
