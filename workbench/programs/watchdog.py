"""Finds out who holds up a run: collects what its ranks write about themselves, and judges it.

The guard of a run starts `python -m workbench.programs.watchdog RUN_DIR report` when a rank makes no progress. It ends when all ranks do
again, or with the run.
"""

import contextlib
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.system_load import cpu_of_process, descendants, waited_for_core
from workbench.runs import hang
from workbench.runs.hang import Hang
from workbench.runs.rank_watchdog import DUMP_SIGNAL, QUIET
from workbench.runs.restarts import present_spec

PAUSE = 0.4
"""Seconds between two looks."""
ANSWER = 2.0
"""Seconds in which a rank that was asked for its stacks answers; then a signal asks it again."""
WINDOW = 5.0
"""Seconds over which a rank that does not answer is judged to use its CPU or to wait for a core."""
BUSY = 0.2
"""Share of these seconds. A thread that waits for Python's lock looks for it 200 times a second, which takes some hundredths."""
IDLE = 6.0
"""Seconds without a report after which nobody is in need of a watchdog."""


class Watchdog:
    """What is known of the ranks of a run that makes no progress."""

    def __init__(self, run_dir: Path, on_hang: str, *, usage: "Callable[[int], tuple[float, float, float]] | None" = None) -> None:
        self._run_dir, self._folder, self._on_hang = run_dir, run_dir / run_directory.HANG, on_hang
        info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
        self._id, spec = info["id"], present_spec(info)
        self._stop = self._folder / run_directory.STOP
        self._several = spec.get("nnodes", 1) > 1
        self._world_size = spec.get("nproc_per_node", 1) * spec.get("nnodes", 1)
        self._asked = time.monotonic()
        self._silent: dict[int, tuple[str, str]] = {}
        self._workers: dict[int, tuple[str, str]] = {}
        self._usage = usage or _usage
        self._used: dict[int, deque[tuple[float, float, float]]] = {}
        self._named: Hang | None = None
        self._numbers: Any = None

    def run(self) -> None:
        """Look until there is progress again."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / run_directory.ASK).touch()
        last = time.monotonic()
        try:
            while time.monotonic() - last < IDLE and not self._stop.exists():  # ranks of a run that is being ended do not hang
                reports = self._reports()
                if any(report["quiet"] >= QUIET for report in reports.values()):
                    last = time.monotonic()
                if self.look(reports):
                    return
                time.sleep(PAUSE)
        finally:
            (self._folder / run_directory.ASK).unlink(missing_ok=True)

    def look(self, reports: dict[int, Any]) -> bool:
        """Judge what the ranks have written; True = the run is to be stopped."""
        now = time.time()
        numbers = {rank: (report["steps"], report["numbers"], report.get("messages")) for rank, report in reports.items()}
        if self._named is not None and (any(self._numbers.get(rank, number) != number for rank, number in numbers.items()) or not reports):
            self._named = replace(self._named, over=now - self._named.since)
            self._named.write(self._run_dir)
            self._named, self._silent, self._workers = None, {}, {}
        processes = dict(self._ranks())
        missing = set(range(self._world_size)) - reports.keys()
        ended = set() if self._several else missing - processes.keys()
        self._used = {rank: self._used.get(rank, deque(maxlen=round(WINDOW / PAUSE))) for rank in missing & processes.keys()}
        for rank, used in self._used.items():
            used.append(self._usage(processes[rank]))
        for rank in sorted(missing & processes.keys() - self._silent.keys()):
            if time.monotonic() - self._asked > ANSWER and any(report["quiet"] >= hang.FLOOR for report in reports.values()):
                self._silent[rank] = self._ask(rank, processes[rank])
        self._silent = {rank: said for rank, said in self._silent.items() if rank in missing}
        known: dict[str, Any] = {"ended": ended, "silent": self._silent, "busy": {r: _busy(used) for r, used in self._used.items()}}
        found = hang.judge(reports, self._world_size, **known, workers=self._workers)
        if found is None:
            return False
        if self._named is None and found.rank is not None and "loader" in found.doing and found.rank in processes:
            self._workers |= self._ask_workers(found.rank, processes[found.rank])
            found = hang.judge(reports, self._world_size, **known, workers=self._workers) or found
        if self._named is None or (found.rank, found.line) != (self._named.rank, self._named.line):
            self._named, self._numbers = found, numbers
            found.write(self._run_dir)
            print(f"workbench: {found}", flush=True)
        if self._on_hang == "stop" and found.seconds >= max(hang.STOP, 2 * hang.USUAL * found.usual):
            self._named = replace(found, stopped=True)
            self._named.write(self._run_dir)
            self._stop.touch()
            return True
        return False

    def _reports(self) -> dict[int, Any]:
        """What the ranks have just written."""
        reports = {}
        for path in self._folder.glob("rank*.json"):
            with contextlib.suppress(run_directory.DamagedRunError, OSError, KeyError, TypeError):
                report = run_directory.read_json(path)
                if abs(time.time() - float(report["time"])) < hang.FRESH:
                    reports[int(report["rank"])] = report
        return reports

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """(rank, pid) of the ranks on this machine: processes of this run with a RANK, whose parent has none."""
        marked: dict[int, tuple[int, int]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError):
                entries = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if f"{run_directory.ENV_RUN_ID}={self._id}".encode() in entries:
                    ranks = [int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")]
                    state, parent = _stat(int(name))
                    if ranks and state != "Z":
                        marked[int(name)] = ranks[0], parent
        yield from ((rank, pid) for pid, (rank, parent) in marked.items() if parent not in marked)

    def _ask(self, rank: int, pid: int) -> tuple[str, str]:
        """What a rank does that does not answer, and its stacks."""
        if _stat(pid)[0] in "tT":
            return "is stopped (SIGSTOP, or a debugger)", ""
        stack = self._dump(rank, pid)
        return "is in C code that holds Python's lock, so that no thread of it runs", stack

    def _ask_workers(self, rank: int, pid: int) -> dict[int, tuple[str, str]]:
        """The line and stack of a worker of a rank's loader, if one says so."""
        for child in itertools.islice(descendants(pid), 1, None):
            stack = self._dump(rank, child)
            if "/torch/utils/data/_utils/" in stack:
                fetching = [frame for frame in hang.frames_of_dump(stack) if "/torch/utils/data/_utils/fetch.py" in frame[0]]
                if fetching:
                    return {rank: (hang.place_in_dump(stack), stack)}
        return {}

    def _dump(self, rank: int, pid: int) -> str:
        """The stacks that faulthandler prints in a process upon our signal: into the stderr of its rank."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught is None or not int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1:
                return ""  # it would end the process
            logs = [path for path, number in run_directory.log_files(self._run_dir) if number == rank and path.name == "stderr.log"]
            before = logs[-1].stat().st_size
            os.kill(pid, DUMP_SIGNAL)
            time.sleep(0.3)
            with open(logs[-1], encoding="utf-8", errors="replace") as file:
                file.seek(before)
                return file.read(100_000).rstrip()
        return ""


def _usage(pid: int) -> tuple[float, float, float]:
    """The time, the CPU time of a process so far, and for how long its main thread was ready and waited for a core; all in seconds."""
    return time.monotonic(), cpu_of_process(pid), waited_for_core(pid) or 0.0


def _busy(used: deque[tuple[float, float, float]]) -> str:
    """Does a process wait for a core, or use its CPU? "" = neither. Until that is known, it counts as waiting for a core."""
    seconds, cpu, waited = (last - first for first, last in zip(used[0], used[-1], strict=True))
    if seconds < 2 * PAUSE or waited >= BUSY * seconds:
        return hang.WAITS_FOR_A_CORE
    return hang.USES_CPU if cpu >= BUSY * seconds else ""


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process."""
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)


def main() -> None:
    """Watch a run that makes no progress."""
    Watchdog(Path(sys.argv[1]), sys.argv[2]).run()


if __name__ == "__main__":
    main()
