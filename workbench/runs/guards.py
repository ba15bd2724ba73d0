"""Finds the guard of a run among the processes of this machine. Process ids in the run directory are not trusted."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from workbench.core.run_directory import ENV_RUN_ID, LOCK, NODES, is_locked

guards: dict[str, "subprocess.Popen[bytes]"] = {}
"""Run id → the guard that this process has started, whose stdin it holds open. When this process ends, however it ends, the pipes end and
the guards stop their runs."""
_APPEARS, _TICK = 2.0, 0.05
"""Seconds within which the guard of a new run appears; and seconds between two checks."""
_PROGRAM = "guard.py {"
"""Before the configuration, which is the last word of a guard's command."""


def find_guard(launch_dir: Path, run_id: str | None) -> int | None:
    """The id of the process that guards a run on this machine; None = there is none, or it is in another container.

    Args:
        launch_dir: of the launch, without links; it may have been deleted.
        run_id: of the run; None = of whichever runs in that directory.
    """
    found = list[tuple[int, int]]()
    for pid, config in _guards():
        if run_id in (None, config.get("id")) and os.path.realpath(str(config.get("run_dir"))) == str(launch_dir):
            node = config.get("node")
            with contextlib.suppress(OSError, ValueError, TypeError):
                if os.getsid(pid) == pid:  # the keeper, which passes signals on to the guard
                    found.append((int(node["rank"]) if isinstance(node, dict) else 0, pid))
    return min(found)[1] if found else None  # those of further machines end with that of the first one


def is_guarded(launch_dir: Path) -> bool:
    """Does the guard of a launch live, on any of its machines?"""
    return is_locked(launch_dir / LOCK) or any(map(is_locked, launch_dir.glob(f"{NODES}/*/{LOCK}")))


def ranks_of(run_id: str) -> dict[int, list[int]]:
    """Rank → its live processes on this machine that carry the run's id, eldest first: the rank, then its workers and what it started."""
    ranks: dict[int, list[int]] = {}
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))) if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError):  # ended while we looked, or another user's
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty of a zombie
            if f"{ENV_RUN_ID}={run_id}".encode() in environ and pid != os.getpid():
                for entry in environ:
                    if entry.startswith(b"RANK="):
                        ranks.setdefault(int(entry[5:]), []).append(pid)
    return ranks


def end_guard(find: Callable[[], int | None], runs: Callable[[], bool], timeout: float) -> Literal["ended", "none", "late"]:
    """Tell a guard to stop its run, and wait for both.

    Returns:
        "ended"; "none": there was no guard; "late": it takes longer.
    """
    began, last = time.monotonic(), None
    while runs():
        guard, waited = find(), time.monotonic() - began
        if guard is not None and last is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's process may look like a guard
                os.kill(guard, signal.SIGTERM)
        if guard is None and (last is None and waited > min(_APPEARS, timeout)):
            return "none"
        if waited > timeout:
            return "late"
        last = guard or last
        time.sleep(_TICK)
    return "ended"


def _guards() -> Iterator[tuple[int, dict[str, Any]]]:
    """Every process that runs as a guard, with its configuration."""
    for pid, command in _commands():
        _, program, rest = command.partition(_PROGRAM)
        if program:
            with contextlib.suppress(ValueError, RecursionError):
                config = json.loads("{" + rest)
                if isinstance(config, dict):
                    yield pid, config


def _commands() -> Iterator[tuple[int, str]]:
    """Every process that we may see, with its command in a line."""
    if sys.platform != "linux":
        table = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=False).stdout
        for line in table.splitlines():
            pid, _, command = line.strip().partition(" ")
            yield int(pid), command
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended while we looked
            yield int(name), Path(f"/proc/{name}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
