"""The last collectives of a process, and what is said where torch does not record them."""

import pickle
import subprocess
import sys
import types
from typing import Any

import pytest

from workbench.runs import flight_recorder

ENTRY = {
    "process_group": ("0", "default_pg"), "collective_seq_id": 11, "profiling_name": "gloo:all_reduce", "input_sizes": [[20]],
    "input_dtypes": ["Float"], "state": "scheduled", "retired": False, "is_p2p": False,
    "frames": [{"name": "backward", "filename": "/t/_tensor.py", "line": 623}],
}  # fmt: skip


def test_reads_what_torch_records_under_either_name_and_says_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    dumped = pickle.dumps({"pg_status": {"0": {"last_enqueued_collective": 11}}, "entries": [ENTRY]})
    for name, mark in (("_dump_fr_trace", ""), ("_dump_nccl_trace", flight_recorder.NCCL)):
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", types.SimpleNamespace(**{name: lambda *_: dumped}))
        assert flight_recorder.numbers() == {"0" + mark: 11}
        (row,) = flight_recorder.last_collectives()
        assert row["group"] == "0" + mark
        assert row["op"] == "all_reduce"
        assert row["pending"]
        assert row["frames"] == [("/t/_tensor.py", 623, "backward")]
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="9.9"))
    strange: dict[str, Any] = {"_dump_fr_trace": lambda *_: b"?"}
    for there, why in (({}, "torch 9.9 has no flight recorder"), (strange, "the flight recorder of torch 9.9 cannot be read")):
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", types.SimpleNamespace(**there))
        assert flight_recorder.numbers() == {}
        assert flight_recorder.last_collectives() == []
        assert why in flight_recorder.why_missing()


def test_nccl_has_a_recorder_of_its_own_beside_that_of_the_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch built for CUDA has both: the first holds nothing of NCCL (a GPU check found no collective at all)."""
    of_gloo = ENTRY | {"time_created_ns": 2}
    of_nccl = [ENTRY | {"profiling_name": "nccl:all_reduce", "collective_seq_id": number, "time_created_ns": number} for number in (1, 3)]
    gloo = pickle.dumps({"pg_status": {"0": {"last_enqueued_collective": 11}}, "entries": [of_gloo]})
    nccl = pickle.dumps({"pg_status": {"0": {"last_enqueued_collective": 3}}, "entries": of_nccl})
    both = types.SimpleNamespace(_dump_fr_trace=lambda *_: gloo, _dump_nccl_trace=lambda *_: nccl)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", both)
    assert flight_recorder.numbers() == {"0": 11, "0 (nccl)": 3}
    rows = flight_recorder.last_collectives()
    assert [(row["group"], row["number"]) for row in rows] == [("0 (nccl)", 1), ("0", 11), ("0 (nccl)", 3)]

    def aborted(*_: bool) -> bytes:
        raise RuntimeError("NCCL communicator was aborted")

    both._dump_nccl_trace = aborted
    assert flight_recorder.numbers() == {"0": 11}
    assert [row["group"] for row in flight_recorder.last_collectives()] == ["0"]
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="9.9"))
    assert "RuntimeError: NCCL communicator was aborted" in flight_recorder.why_missing()
    world = types.SimpleNamespace(pg_names={"a": "0"}, pg_group_ranks={"a": {1: 1, 0: 0}})
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", types.SimpleNamespace(_world=world))
    assert flight_recorder.members() == {"0": [0, 1], "0 (nccl)": [0, 1]}


def test_a_rank_outside_a_group_knows_its_own_groups_and_counts_them_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a group of other ranks under -100, without a name, and counts groups by an id of each process."""
    world = types.SimpleNamespace(pg_names={"a": "0", "c": "2"}, pg_group_ranks={"a": {0: 0, 1: 1, 2: 2}, -100: {0: 0, 1: 1}, "c": {2: 0}})
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", types.SimpleNamespace(_world=world))
    assert flight_recorder.members() == {"0": [0, 1, 2], "2": [2], "0 (nccl)": [0, 1, 2], "2 (nccl)": [2]}
    rows = [ENTRY | {"pg_id": 0}, ENTRY | {"pg_id": 1, "process_group": ("2", "undefined")}]
    dumped = pickle.dumps({"pg_status": {"1": {"last_enqueued_collective": 25}}, "entries": rows})
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", types.SimpleNamespace(_dump_fr_trace=lambda *_: dumped))
    assert flight_recorder.numbers() == {"1": 25}
    assert flight_recorder.by_name({"0": 100, "1": 25, "7": 3}) == {"0": 100, "2": 25, "(7)": 3}


def test_this_torch_has_a_recorder() -> None:
    import torch.distributed

    assert torch.distributed.is_available()
    assert flight_recorder.why_missing() == ""
    assert isinstance(flight_recorder.members(), dict)


RECORDED = """
import sys, torch, torch.distributed as dist
from workbench.runs import flight_recorder
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
(row,) = flight_recorder.last_collectives()
print(row["op"], len(row["frames"]) > 0, "torch._inductor" in sys.modules)
import torch._inductor
(row,) = flight_recorder.last_collectives()
print(row["op"], len(row["frames"]) > 0)
"""


def test_nothing_is_imported_to_read_the_last_collectives() -> None:
    """torch would import torch._inductor for stacks; in the thread of the watchdog, while the training imports it too, that ended ranks."""
    pytest.importorskip("torch")
    environ = {"TORCH_FR_BUFFER_SIZE": "16", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", RECORDED], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["all_reduce", "False", "False", "all_reduce", "True"], done.stderr


COUNTED = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from workbench.runs import flight_recorder
before = flight_recorder.messages()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
x, counts = torch.ones(3), [before]
dist.all_reduce(x)
counts.append(flight_recorder.messages())
dist.send(x, 1)
counts.append(flight_recorder.messages())
dist.recv(x, 1)
counts.append(flight_recorder.messages())
dist.group.WORLD.recv_anysource([x], 0)
counts.append(flight_recorder.messages())
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)]):
    work.wait()
print(*counts, flight_recorder.messages(), flight_recorder.messages())
"""


def test_counts_the_messages_that_torch_does_not_record() -> None:
    pytest.importorskip("torch")
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", COUNTED], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "0", "1", "2", "3", "5", "5"], done.stderr


def test_a_torch_whose_messages_cannot_be_counted_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder._Counted, "calls", 0)
    for bindings in (types.SimpleNamespace(), types.SimpleNamespace(ProcessGroup=int)):
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", bindings)
        assert flight_recorder.messages() == 0
