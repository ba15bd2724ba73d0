"""Out of memory, explained: the wordings that torch has had, real ones on this machine, and the kernel's own kill."""

import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests.forked import Forks
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.runs import failure
from workbench.runs.failure import Failure
from workbench.runs.launch import guard
from workbench.runs.out_of_memory import HOST, Held, HeldBy, OutOfMemory, kernel_kills
from workbench.runs.root_cause import first_failure

TASKS = Path(__file__).parents[1] / "scripts" / "hungry_task.py"
GIB, MIB = 2**30, 2**20

SHARED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 MiB. GPU 0 has a total capacity of 47.27 GiB of which 9.38 MiB is "
    "free. Process 644963 has 5.59 MiB memory in use. Process 3053273 has 29.04 GiB memory in use. Process 3120922 has 14.74 GiB memory in "
    "use. Including non-PyTorch memory, this process has 3.14 GiB memory in use. Of the allocated memory 2.92 GiB is allocated by PyTorch, "
    "and 34.62 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
)
FRAGMENTED = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity of 19.92 GiB of which 6.22 GiB is "
    "free. Of the allocated memory 5.34 GiB is allocated by PyTorch, and 7.10 GiB is reserved by PyTorch but unallocated. If reserved but"
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 47.37 GiB of which 46.57 GiB is free. Including "
    "non-PyTorch memory, this process has 772.00 MiB memory in use. 800.55 MiB allowed; Of the allocated memory 245.48 MiB is allocated by "
    "PyTorch, and 16.52 MiB is reserved by PyTorch but unallocated."
)
GRAPHS = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 47.53 GiB of which 896.00 KiB is free. Process "
    "1686436 has 47.51 GiB memory in use. Of the allocated memory 47.00 GiB is allocated by PyTorch, with 46.22 GiB allocated in private "
    "pools (e.g., CUDA Graphs), and 149.10 MiB is reserved by PyTorch but unallocated."
)
MISSPELT = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes "
    "is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated."
)
LISTED = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 226.00 MiB (GPU 1; 2.00 GiB total capacity; 838.72 MiB already "
    "allocated; 122.43 MiB free; 944.00 MiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation."
)
CACHED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 25.00 MiB (GPU 0; 3.94 GiB total capacity; 3.14 GiB already allocated; 21.56 MiB "
    "free; 634.00 KiB cached)"
)
APPLE = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). Tried to "
    "allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit"
)
ON_HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "132426121216 bytes. Error code 12 (Cannot allocate memory)"
)


def parsed(message: str) -> OutOfMemory:
    found = OutOfMemory.parse(message)
    assert found is not None
    return found


# --- wordings


@pytest.mark.parametrize(
    ("message", "device", "expected"),
    [
        (
            SHARED,
            "GPU 0",
            {"asked": 42 * MIB, "capacity": 47.27 * GIB, "free": 9.38 * MIB, "allocated": 2.92 * GIB, "this_process": 3.14 * GIB},
        ),
        (
            FRAGMENTED,
            "GPU 0",
            {"asked": 6.64 * GIB, "allocated": 5.34 * GIB, "unallocated": 7.10 * GIB, "reserved": 12.44 * GIB, "others": None},
        ),
        (LIMITED, "GPU 0", {"allowed": 800.55 * MIB, "free": 46.57 * GIB, "outside": 510 * MIB, "others": 0}),
        (GRAPHS, "GPU 0", {"private_pools": 46.22 * GIB, "allocated": 47 * GIB, "free": 896 * 1024, "others": 0}),
        (MISSPELT, "GPU 0", {"capacity": 6 * GIB, "free": 0, "unallocated": 2.3 * GIB}),
        (LISTED, "GPU 1", {"capacity": 2 * GIB, "free": 122.43 * MIB, "allocated": 838.72 * MIB, "unallocated": 105.28 * MIB}),
        (CACHED, "GPU 0", {"asked": 25 * MIB, "unallocated": 634 * 1024}),
        (APPLE, "the GPU", {"allowed": 27.2 * GIB, "allocated": 9.57 * GIB, "outside": 17.35 * GIB}),
        (ON_HOST, HOST, {"asked": 132426121216, "capacity": None}),
        ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 1981808640 bytes.", HOST, {"asked": 1981808640}),
        ("MemoryError", HOST, {"asked": None}),
        ("MemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)", HOST, {"asked": 7.45 * GIB}),
        ("RuntimeError: CUDA error: out of memory", "the GPU", {"asked": None, "allocated": None, "reserved": None, "outside": None}),
        ("OutOfMemoryError: Allocation on device", "the GPU", {"asked": None}),
    ],
)
def test_wordings(message: str, device: str, expected: dict[str, float | None]) -> None:
    found = parsed(message)
    assert found.device == device
    for name, value in expected.items():
        assert getattr(found, name) == (None if value is None else pytest.approx(value, abs=2)), name


@pytest.mark.parametrize("message", ["ValueError: boom", "RuntimeError: CUDA error: device-side assert triggered", ""])
def test_other_errors(message: str) -> None:
    assert OutOfMemory.parse(message) is None


def test_line_breaks_do_not_matter() -> None:
    assert parsed(SHARED.replace(" ", "\n", 40)) == parsed(SHARED)


def shown(size: int) -> str:
    """Bytes as c10's `format_size` writes them."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size > scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"


SIZES = st.integers(0, 200 * GIB)


@given(
    asked=SIZES,
    capacity=SIZES,
    free=SIZES,
    allocated=SIZES,
    unallocated=SIZES,
    here=SIZES,
    there=st.dictionaries(st.integers(1, 10**7), SIZES, max_size=3),
)
def test_round_trip(asked: int, capacity: int, free: int, allocated: int, unallocated: int, here: int, there: dict[int, int]) -> None:
    others = "".join(f"Process {pid} has {shown(size)} memory in use. " for pid, size in there.items())
    message = (
        f"CUDA out of memory. Tried to allocate {shown(asked)}. GPU 3 has a total capacity of {shown(capacity)} of which "
        f"{shown(free)} is free. {others}Including non-PyTorch memory, this process has {shown(here)} memory in use. Of the allocated "
        f"memory {shown(allocated)} is allocated by PyTorch, and {shown(unallocated)} is reserved by PyTorch but unallocated."
    )
    found = parsed(message)
    given = {"asked": asked, "capacity": capacity, "free": free, "allocated": allocated, "unallocated": unallocated, "this_process": here}
    for name, size in given.items():
        unit = next((scale for scale in (GIB, MIB, 1024) if size > scale), 1)
        assert abs(getattr(found, name) - size) <= 0.005 * unit + 1, name
    assert found.processes.keys() == there.keys()
    assert OutOfMemory.from_json(found.to_json()) == found
    assert str(found)


# --- words


def test_fragmentation_is_told_from_a_full_device() -> None:
    assert parsed(FRAGMENTED).fragmented
    assert "Fragmentation: enough was kept for reuse" in str(parsed(FRAGMENTED))
    assert any("expandable_segments:True" in hint for hint in parsed(FRAGMENTED).hints)
    assert not parsed(SHARED).fragmented
    assert not any("expandable" in hint for hint in parsed(SHARED).hints)


def test_who_else_is_there() -> None:
    assert parsed(SHARED).others == pytest.approx((5.59 * MIB) + 43.78 * GIB, rel=1e-3)
    assert any("other processes" in hint for hint in parsed(SHARED).hints)
    assert parsed(GRAPHS).others == 0  # in a container this process is listed by the number that it has outside


def test_limits() -> None:
    assert any("set_per_process_memory_fraction" in hint for hint in parsed(LIMITED).hints)
    huge = parsed("CUDA out of memory. Tried to allocate 90.00 GiB. GPU 0 has a total capacity of 79.00 GiB of which 70.00 GiB is free.")
    assert any("is its shape what you meant?" in hint for hint in huge.hints)


def test_words() -> None:
    assert str(parsed(LISTED)).splitlines() == [
        "It asked for 226 MiB on GPU 1, where 122 MiB of 2.00 GiB was free.",
        "PyTorch held 839 MiB in tensors, and 105 MiB for reuse.",
    ]
    assert str(parsed(ON_HOST)) == "It asked for 123 GiB on the host."
    assert str(parsed("MemoryError")) == "It asked for more on the host than could be had."
    held_then = Held(
        groups={"parameters": MIB}, holders=(HeldBy(group="parameters", name="head", bytes=MIB),), module="head (Linear)", phase="forward"
    )
    told = str(OutOfMemory.parse(ON_HOST, held_then))
    assert told.endswith("It was in the forward of head (Linear), with parameters 1.00 MiB. The largest: head (parameters, 1.00 MiB).")


def test_the_kernel_names_whom_it_killed() -> None:
    assert kernel_kills(["Out of memory: Killed process 7 (python) anon-rss:4kB, file-rss:2kB, shmem-rss:1kB", "eth0: up"]) == {7: 7168}


# --- what was held


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("scale", torch.ones(256))
        self.checkpointed, self.greedy = checkpointed, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x).relu()
        if self.greedy:
            torch.empty(2**50)
        out: torch.Tensor = self.last(x)
        return out


@pytest.mark.parametrize(("checkpointed", "frozen"), [(False, False), (True, True)])
def test_held_at_that_moment(tmp_path: Path, forks: Forks, checkpointed: bool, frozen: bool) -> None:
    """In a process of its own: everything that lives is looked at, what other tests have left as well."""
    code = f"from tests.runs import test_out_of_memory; test_out_of_memory.check_held({checkpointed}, {frozen})"
    done = forks.run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def check_held(checkpointed: bool, frozen: bool) -> None:
    net = Net(checkpointed)
    model, batch = nn.Sequential(net), torch.randn(512, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(batch).sum().backward()
    optimizer.step()
    net.greedy = True
    if frozen:  # as programs do that want no pauses of the collector
        gc.freeze()
    with pytest.raises(RuntimeError) as raised:
        model(batch)
    found = held(raised.value)
    assert not gc.get_freeze_count()  # else what failed could never be freed
    weights = sum(weight.nbytes for weight in model.parameters())
    of_model = {one.name: one.bytes for one in found.holders if one.group == "parameters" and one.name.startswith("0.")}
    assert of_model == {"0.first": weights // 2, "0.last": weights // 2}
    assert found.groups["gradients"] >= weights
    assert found.groups["optimizer_states"] >= 2 * weights
    assert found.groups.get("activations", 0) >= (0 if checkpointed else 512 * 256 * 4)
    assert found.groups["buffers"] >= 1024
    assert (found.module, found.phase) == ("0 (Net)", "forward")
    assert found.line is not None
    assert "test_out_of_memory.py" in found.line
    assert found.available is not None
    assert Held.from_json(found.to_json()) == Held.from_json(Held.from_json(found.to_json()).to_json())


# --- real ones, in a run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_failure_explains_itself_and_survives_json(tmp_path: Path) -> None:
    try:
        torch.empty(2**50)
    except RuntimeError as error:
        failure.record(error, run_dir=tmp_path, rank=0, held=held)
    record = run_directory.read_json(tmp_path / run_directory.ERRORS / "rank0.json")
    assert record["kind"] == "out-of-memory"
    found = first_failure(tmp_path, {"state": "failed"})
    assert found is not None
    assert found.memory is not None
    assert found.memory.asked == 2**52
    assert found.memory.held is not None
    assert "It asked for 4,096 TiB on the host." in str(found)
    again = Failure(**{name: getattr(found, name) for name in ("rank", "kind", "message", "traceback", "hint")}, memory=record["memory"])
    assert again == found


def test_what_cannot_be_looked_at_does_not_cover_the_error(tmp_path: Path) -> None:
    def broken(error: BaseException) -> Held:
        raise MemoryError

    failure.record(MemoryError(), run_dir=tmp_path, rank=0, held=broken)
    record = run_directory.read_json(tmp_path / run_directory.ERRORS / "rank0.json")
    assert record["message"] == "MemoryError"
    assert record["memory"]["device"] == HOST


def test_a_rank_that_asks_for_too_much(runs: Path) -> None:
    spec = wb.RunSpec(task=f"{TASKS}:huge", device="cpu", micro_batch=4, nproc_per_node=2)
    from workbench.memory.api import measure_memory

    with pytest.raises(wb.RunError) as raised:
        measure_memory(spec, runs_dir=runs)
    found = raised.value.failure
    assert (found.rank, found.kind) == (1, "out-of-memory")
    assert found.memory is not None
    assert found.memory.held is not None
    assert found.memory.held.groups["optimizer_states"] > 0
    assert "the forward of" in str(found)
    assert "micro_batch" in str(found)


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))


def test_a_process_at_its_limit() -> None:
    code = (
        "import torch\nfrom workbench.memory.measure.at_oom import held\nfrom workbench.runs.out_of_memory import OutOfMemory\nkept = []\n"
        "try:\n    while True: kept.append(torch.empty(2**26))\n"
        "except RuntimeError as error:\n    print(OutOfMemory.parse(str(error), held(error)).to_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=limited, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = eval(done.stdout)
    assert value["asked"] == 2**28
    assert value["held"]["groups"]["other"] >= 2**28
    assert value["held"]["available"] < 2**28


def test_what_a_process_holds_is_listed_though_next_to_nothing_is_left(tmp_path: Path, forks: Forks) -> None:
    code = (
        "import pathlib, resource, sys, torch\nfrom workbench.memory.measure.at_oom import held\nfrom workbench.runs import failure\n"
        "failure.reserve_memory()\nkept = torch.empty(2**25)\n"
        "pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)\n"
        "try:\n    torch.empty(2**26)\n"
        "except RuntimeError as error:\n    failure.record(error, run_dir=pathlib.Path(sys.argv[1]), held=held)\n"
    )
    done = forks.run(tmp_path, "-c", code, tmp_path)
    assert done.returncode == 0, done.stderr
    memory = run_directory.read_json(tmp_path / run_directory.ERRORS / "rank0.json")["memory"]
    assert memory["held"]["groups"]["other"] >= 2**27
    assert memory["held"]["available"] <= 2**20, "without what was set aside"


def test_the_kernels_kill(tmp_path: Path) -> None:
    (tmp_path / run_directory.ERRORS).mkdir()
    (tmp_path / run_directory.LAUNCHER_LOG).write_text("[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\n")
    writer = run_directory.LineWriter(tmp_path / run_directory.rank_file(0))
    writer.write([{"rank": 0, "pid": 7}, {"step": 0, "memory": 3 * GIB}])
    writer.close()
    line = "Memory cgroup out of memory: Killed process 7 (python) total-vm:9kB, anon-rss:4194304kB, file-rss:0kB, shmem-rss:0kB"
    outcome = {"state": "failed", "returncode": 1, "exits": {"0": 1}, "oom_kills": 1, "memory_limit": 4 * GIB, "kernel": [line]}
    found = first_failure(tmp_path, outcome)
    assert found is not None
    assert found.memory is not None
    assert (found.kind, found.memory.this_process, found.memory.capacity) == ("killed", 4 * GIB, 4 * GIB)
    assert "which has 4.00 GiB.\nThis process had 4.00 GiB there." in str(found)
    found = first_failure(tmp_path, {**outcome, "kernel": []})
    assert found is not None
    assert found.memory is not None
    assert found.memory.this_process == 3 * GIB  # its last report


@pytest.mark.slow
def test_a_real_kill_by_hand(runs: Path) -> None:
    run = wb.launch(wb.RunSpec(task=f"{TASKS}:killed", device="cpu", micro_batch=4, steps=4), runs_dir=runs).wait()
    assert run.error is not None
    assert run.error.kind == "killed"
    assert "The kernel killed no process for want of memory" in str(run.error)
    outcome = run_directory.read_json(run.path / run_directory.RUN_JSON)["outcome"]
    assert outcome["kernel"] == []
    assert outcome["memory_limit"] >= 2**28


def test_the_guard_knows_its_limit() -> None:
    limit = guard.memory_limit()
    assert limit is not None
    assert limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.01
    assert guard.kernel_messages(since=1e12) == []
    assert signal.SIGKILL == 9
