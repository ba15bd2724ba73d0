"""Reads torch's flight recorder: the last collectives of this process, with number, shapes, state and the lines that called them.

Sends and receives are counted here, since gloo does not record them. The only file that knows these private functions of torch, which move
between releases. It imports nothing: a rank that has not loaded `torch.distributed` has no collectives.
"""

import contextlib
import pickle
import sys
from collections.abc import Mapping
from typing import Any

BUFFER = 256
"""Collectives that a rank keeps, at some 0.5 kB each."""
KEPT = 40
"""Collectives, the last ones, that go into a report."""
NCCL = " (nccl)"
"""After the name of a process group: its collectives over NCCL, which are counted by themselves."""


def switched_on(torch_version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that switches the recorder on; none where the user has set one. torch 2.6 and 2.7 record NCCL only.

    >>> switched_on("2.13.0+cpu", {}), switched_on("2.6.0", {})
    ({'TORCH_FR_BUFFER_SIZE': '256'}, {'TORCH_NCCL_TRACE_BUFFER_SIZE': '256'})
    """
    names = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    old = torch_version.startswith(("2.6.", "2.7."))
    return {} if any(name in environ for name in names) else {names[old]: str(BUFFER)}


def _dump(*options: bool, strict: bool = False) -> dict[str, dict[str, Any]]:
    """What this process's recorders hold, by what marks their groups: torch built for CUDA has one for NCCL, and one for the others."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    dumped = {}
    for mark, name in (("", "_dump_fr_trace"), (NCCL, "_dump_nccl_trace")):
        with contextlib.nullcontext() if strict else contextlib.suppress(Exception):
            if dump := getattr(bindings, name, None):
                dumped[mark] = pickle.loads(dump(*options))
    return dumped


def why_missing() -> str:
    """Why collectives have no numbers here; "" where the recorder can be read."""
    if "torch._C._distributed_c10d" not in sys.modules:
        return "torch.distributed is not loaded"
    torch = sys.modules["torch"]
    try:
        return "" if _dump(False, False, False, strict=True) else f"torch {torch.__version__} has no flight recorder"
    except Exception as error:
        return f"the flight recorder of torch {torch.__version__} cannot be read: {type(error).__name__}: {error!s:.200}"


def numbers() -> dict[str, int]:
    """Process group, by its id in this process → collectives called so far. Takes some microseconds, and touches no process group."""
    try:
        dumped = _dump(False, False, False)
        return {
            f"{group}{mark}": int(state["last_enqueued_collective"])
            for mark, of_backend in dumped.items()
            for group, state in (of_backend.get("pg_status") or {}).items()
        }
    except Exception:  # another release of torch
        return {}


class _Counted:
    """A method of a class of torch, whose calls are counted as it is looked up: so the caller's stack gets no further frame."""

    calls = 0

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        _Counted.calls += instance is not None
        return self.method.__get__(instance, owner)


def messages() -> int:
    """Sends and receives that this process has called since this was first called with `torch.distributed` loaded, requests for them
    (`isend`, `irecv`) included; 0 where torch does not let them be counted.
    """
    group = getattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", None)
    with contextlib.suppress(Exception):  # torch.distributed is not loaded, or it is another release of torch
        for name in ("send", "recv", "recv_anysource"):
            if not isinstance(method := vars(group)[name], _Counted):
                setattr(group, name, _Counted(method))
    return _Counted.calls


def by_name(counts: Mapping[str, int]) -> dict[str, int]:
    """What `numbers` gives by the names of groups, which all ranks share; a group of which no call is recorded has its id in brackets."""
    names: dict[str, str] = {}
    with contextlib.suppress(Exception):
        for mark, of_backend in _dump(True, False, False).items():
            for entry in of_backend.get("entries") or []:
                name = str(entry["process_group"][0])
                names[f"{entry.get('pg_id', name)}{mark}"] = name + mark
    return {names.get(group, f"({group})"): count for group, count in counts.items()} if names else dict(counts)


def members() -> dict[str, list[int]]:
    """Process group → its ranks. For a rank that makes no progress: it holds the groups for a moment, while they could be destroyed."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = c10d._world  # type: ignore[union-attr]
        known = list(world.pg_group_ranks.items())  # those of other ranks have no name here
        groups = {str(world.pg_names[group]): sorted(map(int, ranks)) for group, ranks in known if group in world.pg_names}
        return {name + mark: ranks for mark in ("", NCCL) for name, ranks in groups.items()}
    except Exception:
        return {}


def last_collectives(most: int = KEPT) -> list[dict[str, Any]]:
    """The last collectives, oldest first: group, number (None: send or recv), op, sizes, dtype, pending, frames (file, line, function).

    There are no frames before `torch._inductor` is imported, as DDP's constructor does.
    """
    try:
        # for stacks torch asks for torch._inductor, which this thread would import if nobody had, perhaps while the training imports it too
        stacks = "_inductor" in vars(sys.modules.get("torch", sys))
        dumped = _dump(True, stacks, False)
        rows = [(entry, mark) for mark, of_backend in dumped.items() for entry in of_backend.get("entries") or []]
        rows.sort(key=lambda row: int(row[0].get("time_created_ns") or 0))  # stable, where torch gives no times
        return [_shortened(*row) for row in rows[-most:]]
    except Exception:
        return []


def _shortened(entry: Any, mark: str) -> dict[str, Any]:
    peer = bool(entry.get("is_p2p"))
    return {
        "group": f"{entry['process_group'][0]}{mark}",
        "number": None if peer else int(entry["collective_seq_id"]),
        "op": str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        "sizes": [list(map(int, size)) for size in entry["input_sizes"]][:8],
        "dtype": str(next(iter(entry.get("input_dtypes") or []), "")),
        "pending": not entry.get("retired") and entry.get("state") != "completed",
        "frames": [(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in (entry.get("frames") or [])[:40]],
    }
