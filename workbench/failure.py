"""Failure: which rank failed first, why, and what to do about it.

torchrun's own "Root Cause" often names a victim: it keeps whole seconds, and the rank at fault is slow to leave when it tears the process
group down first (`try/finally: destroy_process_group()`), while its peers die at once of "Connection closed by peer". So every rank leaves
a record on the monotonic clock before it tears anything down, the guard notes when each rank died, and an error that is only the
consequence of another rank's comes last.
"""

import contextlib
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import rundir

KINDS = ("exception", "exit", "out-of-memory", "killed", "crash", "address-in-use", "task", "disk-full", "timeout", "launcher")

CONSEQUENCES = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Connection was likely closed|Broken pipe|connection was aborted"
    r"|remote process exited|remote server shutdown|recvValue failed|sendBytes failed|failed to recv, got 0 bytes|DistNetworkError"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclSystemError|Socket Timeout|SignalException",
    re.IGNORECASE,
)
"""Messages of ranks that fail because another one is gone (gloo, the TCP store, NCCL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run failed.

    >>> print(Failure(rank=1, kind="exception", message="ValueError: boom", traceback=None, hint="Look at the data."))
    rank 1: ValueError: boom
    Look at the data.
    """

    rank: int | None
    """The rank that failed first; None = none of them (the time limit, the launcher)."""
    kind: str
    """One of KINDS."""
    message: str
    """Type and text of the error, or how the process ended."""
    traceback: str | None
    """Its traceback; the last lines on its stderr, where it left no traceback."""
    hint: str | None
    """What to do, where that is known."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.message}" + (f"\n{self.hint}" if self.hint else "")


class RunError(RuntimeError):
    """A run did not finish well. In a notebook it shows the traceback of the rank at fault, not ours.

    Attributes:
        failure: which rank, and why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def _render_traceback_(self) -> list[str]:  # a hook of IPython
        before = (self.failure.traceback or "").splitlines()
        return [*before, *[""] * bool(before), *f"{type(self).__name__}: {self}".splitlines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Symptom:
    pattern: str
    """Found in "Type: message" by a case-sensitive search."""
    kind: str
    hint: str | None


_LESS_MEMORY = "Try a smaller micro_batch (with more accumulation the global batch stays), or precision='amp_bf16' on a GPU."
_SYMPTOMS = (
    _Symptom(
        pattern=r"Bus error|insufficient shared memory|unable to (open|write to|allocate) shared memory",
        kind="killed",
        hint="The shared memory in /dev/shm is too small for the loader's workers: fewer num_workers, or docker run --shm-size=2g.",
    ),
    _Symptom(
        pattern=r"DataLoader worker .* killed by signal: Killed",
        kind="killed",
        hint="A worker of the loader was killed, most often because memory ran out: try fewer num_workers or a smaller prefetch_factor.",
    ),
    _Symptom(
        pattern=r"OutOfMemoryError|(CUDA|HIP) out of memory|DefaultCPUAllocator|not enough memory|Cannot allocate memory|^MemoryError|bad_alloc",
        kind="out-of-memory",
        hint=_LESS_MEMORY,
    ),
    _Symptom(
        pattern=r"EADDRINUSE|[Aa]ddress already in use",
        kind="address-in-use",
        hint="Another process has that port. Leave MASTER_PORT to the launch, which finds a free one, or choose another.",
    ),
    _Symptom(pattern=r"^TaskError", kind="task", hint=None),  # its own message says what to try
    _Symptom(
        pattern=r"No space left on device|Disk quota exceeded|File too large|DiskFullError",
        kind="disk-full",
        hint="Make room, or start the run with runs_dir= on another disk.",
    ),
    _Symptom(
        pattern=r"device-side assert",
        kind="exception",
        hint="Most often a label or index outside its range: the same run with device='cpu' names the line.",
    ),
    _Symptom(
        pattern=r"illegal memory access|CUDA error|CUBLAS_STATUS",
        kind="exception",
        hint="GPU errors are reported late: the environment variable CUDA_LAUNCH_BLOCKING=1 makes the traceback exact.",
    ),
    _Symptom(
        pattern=r"[Tt]imed out|collective operation timeout|Socket Timeout|wait timeout",
        kind="timeout",
        hint="It waited for another rank that did not come: see run.logs() for where each one stood, and whether all take the same branches.",
    ),
    _Symptom(
        pattern=r"No module named",
        kind="exception",
        hint="The ranks run in the same Python as the process that launched them: install it there.",
    ),
    _Symptom(
        pattern=r"Expected to have finished reduction in the prior iteration",
        kind="exception",
        hint="Some parameters get no gradient in some steps: DistributedDataParallel(…, find_unused_parameters=True).",
    ),
)


def _symptom(message: str) -> _Symptom | None:
    return next((symptom for symptom in _SYMPTOMS if re.search(symptom.pattern, message)), None)


def record(error: BaseException, *, run_dir: Path | None = None, rank: int | None = None) -> None:
    """Leave this rank's error in the run directory. The first record of a rank stays; a clean `sys.exit()` is none.

    Args:
        error: what was raised. Call this before anything is torn down: peers fail as soon as a process group goes.
        run_dir: None = the one in the environment; where there is none either, nothing is written.
        rank: None = RANK of the environment, else 0.
    """
    now = time.monotonic_ns()
    launch_dir = os.environ.get(rundir.ENV_RUN_DIR)
    where = run_dir or (Path(launch_dir) if launch_dir else None)
    if where is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    path = where / rundir.ERRORS / f"rank{rank}.json"
    if path.exists():
        return
    message = describe(error)
    symptom = _symptom(message)
    value = {
        "rank": rank,
        "time_ns": now,
        "kind": symptom.kind if symptom else "exit" if isinstance(error, SystemExit) else "exception",
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
        "consequence": CONSEQUENCES.search(message) is not None,
    }
    try:
        path.parent.mkdir(exist_ok=True)
        rundir.write_json(path, value)
    except OSError:  # the disk is full: the launch has set some bytes aside for this moment
        with contextlib.suppress(OSError):  # what is raised must not be covered by what cannot be written
            rundir.free_reserve(Path(launch_dir) if launch_dir else where)
            rundir.write_json(path, value)


def describe(error: BaseException) -> str:
    """Type and text of an error; for `sys.exit(1)` in an `except` block, of what led to it.

    >>> describe(ValueError("boom"))
    'ValueError: boom'
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SystemExit) and (led_here := error.__cause__ or error.__context__):
        return f"{describe(led_here)} (then sys.exit({error.code!r}))"
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspect:
    tier: int
    """0: failed by itself. 1: died without a record, nobody knows when. 2: a consequence. 3: ended by torchrun."""
    time_ns: float
    """On the monotonic clock; inf = not known."""
    failure: Failure


_LATE = 1_000_000_000
"""A process that dies this long (in ns) after the first recorded error was ended by somebody: torchrun stops the others of a failed run."""


def first_failure(run_dir: Path, outcome: Mapping[str, Any]) -> Failure | None:
    """Who failed first: from the ranks' records, the guard's times of death and torchrun's table of exit codes.

    Args:
        run_dir: of the launch.
        outcome: run.json's `outcome`, or {"state": "lost"} where the guard could not write one.

    Returns:
        None for a run that finished or was stopped on purpose.
    """
    state = outcome["state"]
    if state in ("finished", "stopped"):
        return None
    oom_kills = outcome.get("oom_kills") or 0
    records = [rundir.read_json(path) for path in sorted((run_dir / rundir.ERRORS).glob("rank*.json"))]
    suspects = [_from_record(record) for record in records]
    if state == "failed":
        deaths = {int(rank): time_ns for rank, time_ns in (outcome.get("exits") or {}).items()}
        recorded = {record["rank"] for record in records}
        late = min((record["time_ns"] + _LATE for record in records), default=float("inf"))
        for rank, code in _exit_codes(run_dir).items():
            if rank not in recorded:
                suspects.append(_from_death(run_dir, rank, code, deaths.get(rank), late, oom_kills))
        if suspects and all(suspect.tier >= 2 for suspect in suspects):
            suspects += _early_leavers(run_dir, deaths, recorded, suspects)
    suspect = min(suspects, key=lambda s: (s.tier, s.time_ns), default=None)
    if suspect and (state == "failed" or suspect.tier < 2):
        return suspect.failure
    return _of_the_launch(run_dir, outcome)


def _from_record(record: Mapping[str, Any]) -> _Suspect:
    symptom = _symptom(record["message"])
    failure = Failure(
        rank=record["rank"],
        kind=record["kind"],
        message=record["message"],
        traceback=record["traceback"],
        hint=symptom.hint if symptom else None,
    )
    return _Suspect(tier=2 if record["consequence"] else 0, time_ns=record["time_ns"], failure=failure)


def _exit_codes(run_dir: Path) -> dict[int, int]:
    """Exit code of each rank that did not end well (minus the signal's number), from the table that torchrun prints last."""
    try:
        text = (run_dir / rundir.LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {int(rank): int(code) for rank, code in re.findall(r"rank\s*: (\d+) \(local.*?exitcode\s*: (-?\d+)", text, re.DOTALL)}


def _from_death(run_dir: Path, rank: int, code: int, time_ns: int | None, late: float, oom_kills: int) -> _Suspect:
    """A rank that died without a word."""
    if code == -signal.SIGTERM or (time_ns or 0) > late:
        tier = 3
    else:
        tier = 1 if time_ns is None else 0
    return _Suspect(tier=tier, time_ns=float("inf") if time_ns is None else time_ns, failure=_death(run_dir, rank, code, oom_kills))


def _death(run_dir: Path, rank: int, code: int, oom_kills: int) -> Failure:
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if code >= 0:
        kind, message, hint = "exit", f"ended with exit code {code}, without an exception", None
    elif code == -signal.SIGKILL and oom_kills:
        kind, message = "killed", "was killed by the kernel because memory ran out (SIGKILL; the control group counts it)"
        hint = _LESS_MEMORY.replace("micro_batch", "micro_batch, fewer num_workers", 1)
    elif code == -signal.SIGKILL:
        kind, message = "killed", "was killed (SIGKILL)"
        hint = "Most often main memory ran out (of the machine or of the container): try a smaller micro_batch or fewer num_workers."
    elif code == -signal.SIGTERM:
        kind, message, hint = "killed", "was ended (SIGTERM) by somebody", None
    else:
        kind, message = "crash", f"crashed ({name})"
        hint = f"The stack of every thread is on its stderr: run.logs({rank})."
        if code == -signal.SIGABRT:
            hint = f"Something below Python gave up, such as a CUDA assert or NCCL's watchdog: see run.logs({rank})."
    return Failure(rank=rank, kind=kind, message=message, traceback=_last_words(run_dir, rank), hint=hint)


def _early_leavers(run_dir: Path, deaths: Mapping[int, int], recorded: set[int], suspects: list[_Suspect]) -> list[_Suspect]:
    """Ranks that left with exit code 0 before the others fell over their absence."""
    first = min(suspect.time_ns for suspect in suspects)
    blamed = recorded | {suspect.failure.rank for suspect in suspects}
    return [
        _Suspect(tier=0, time_ns=time_ns, failure=_death(run_dir, rank, 0, 0))
        for rank, time_ns in deaths.items()
        if rank not in blamed and time_ns < first
    ]


def _last_words(run_dir: Path, rank: int, lines: int = 20) -> str | None:
    """The end of what a rank wrote on stderr."""
    found = sorted((run_dir / rundir.LOGS).glob(f"*/attempt_*/{rank}/stderr.log"))
    said = rundir.TextTail(found[-1]).read(last=True) if found else []
    return "\n".join(said[-lines:]) or None


def _of_the_launch(run_dir: Path, outcome: Mapping[str, Any]) -> Failure:
    """No rank is to blame: the time limit, the launching process, the guard or torchrun itself."""
    said = rundir.TextTail(run_dir / rundir.LAUNCHER_LOG).read(last=True)
    text = "\n".join(said[-30:]) or None
    match outcome["state"]:
        case "timeout":
            limit = rundir.read_json(run_dir / rundir.RUN_JSON).get("timeout")
            message = f"the run was stopped at its time limit, timeout={limit:g} s"
            return Failure(
                rank=None, kind="timeout", message=message, traceback=None, hint="Allow more time, or see run.logs() for a hang."
            )
        case "abandoned":
            message, hint = "the process that launched the run ended, and the run with it", "A run lives as long as its kernel or script."
        case "lost":
            message, hint = "the guard of the run was killed, so nobody saw its end", None
        case _:
            message, hint = _torchrun_end(outcome.get("returncode"), said), f"All of its output: {run_dir / rundir.LAUNCHER_LOG}"
            symptom = _symptom("\n".join(said))
            if symptom and symptom.kind in ("address-in-use", "disk-full", "out-of-memory"):
                return Failure(rank=None, kind=symptom.kind, message=message, traceback=text, hint=symptom.hint)
    return Failure(rank=None, kind="launcher", message=message, traceback=text, hint=hint)


def _torchrun_end(code: int | None, said: list[str]) -> str:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    errors = [line.strip() for line in said if re.match(r"\s*[\w.]*(Error|Exception|error)\b.*:", line)]
    return f"torchrun {how}" + (f": {errors[-1]}" if errors else "")
