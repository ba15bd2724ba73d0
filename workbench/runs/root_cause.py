"""first_failure: finds the rank that failed first, and why.

torchrun's own "Root Cause" often names a victim: it keeps whole seconds, and the rank at fault is slow to leave when it tears the process
group down first (`try/finally: destroy_process_group()`), while its peers die at once of "Connection closed by peer". So every rank leaves
a record on the monotonic clock before it tears anything down, the guard notes when each rank died, and an error that is only the
consequence of another rank's comes last.

A rank that skips a collective meets the others in the next, and where sizes differ, gloo ends one that gets too much: it may be any.
"""

import contextlib
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core import run_directory
from workbench.core.package import is_users
from workbench.runs.errors import LESS_MEMORY, is_consequence, symptom_of
from workbench.runs.failure import Failure, frames_in
from workbench.runs.hang import WRAPPERS, Hang, grouped, usual_follower

if TYPE_CHECKING:
    from workbench.runs.out_of_memory import OutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspect:
    tier: int
    """0: failed by itself. 1: died without a record, and nobody knows when. 2: a consequence. 3: ended by torchrun."""
    time_ns: float
    """On the monotonic clock; inf = not known."""
    failure: Failure


_ENDED_BY_TORCHRUN = 1_000_000_000
"""Nanoseconds after the first record: a rank that dies later without a record was ended by torchrun, as are all ranks of a failed run."""


def first_failure(run_dir: Path, outcome: Mapping[str, Any]) -> Failure | None:
    """The rank that held up the others until the end, else the rank that failed first, and why.

    By the ranks' records, the guard's times of death, torchrun's table of exit codes, and what the watchdog saw.

    Args:
        run_dir: run directory of the launch.
        outcome: run.json's `outcome`, or {"state": "lost"} where the guard could not write one.

    Returns:
        None for a run that finished or was stopped on purpose.
    """
    if outcome["state"] in ("finished", "stopped"):
        return None
    failure, hang = _first_failure(run_dir, outcome), Hang.load(run_dir)
    return hang.failure if hang is not None and hang.explains(failure) else failure


def lost_ranks(run_dir: Path, outcome: Mapping[str, Any], first: Failure | None) -> tuple[int, ...]:
    """The ranks that ended by themselves or were killed: that of the first failure, and those that a signal ended at that time."""
    lost, deaths = {first.rank} if first and first.rank is not None else set(), outcome.get("exits") or {}
    moment = min((time_ns for rank, time_ns in deaths.items() if int(rank) in lost), default=None)
    for rank, code in _exit_codes(run_dir).items():
        when = {int(number): time_ns for number, time_ns in deaths.items()}.get(rank)
        together = moment is not None and when is not None and abs(when - moment) < _ENDED_BY_TORCHRUN
        if together and -code in (signal.SIGKILL, *_OF_ITS_OWN) and -code != signal.SIGABRT:
            lost.add(rank)
    return tuple(sorted(lost))


def _first_failure(run_dir: Path, outcome: Mapping[str, Any]) -> Failure:
    """The rank that failed first, and why."""
    state = outcome["state"]
    records = _records(run_dir)
    clocks = outcome.get("clocks") or {}  # of ranks on other machines, whose monotonic clocks began at another time
    records = [record | {"time_ns": record["time_ns"] + clocks.get(str(record["rank"]), 0)} for record in records]
    if stopped_ns := outcome.get("stopped_ns"):  # errors of ranks that are being stopped are not the cause
        records = [record for record in records if record["time_ns"] < stopped_ns]
    suspects = [_from_record(record) for record in records]
    number, when = _signal_to_torchrun(run_dir, outcome)
    if number:  # torchrun passes it on to all ranks: only an error from before counts
        before = [record for record in records if record["written"] < when - _CLOCK_TICK and record["message"] != _INTERRUPT]
        suspects = [suspect for suspect in map(_from_record, before) if suspect.tier == 0]
    elif state != "failed":
        suspects = [suspect for suspect in suspects if suspect.tier == 0]
    else:
        deaths = {int(rank): time_ns for rank, time_ns in (outcome.get("exits") or {}).items()}
        late = min((suspect.time_ns + _ENDED_BY_TORCHRUN for suspect in suspects), default=float("inf"))
        codes = _exit_codes(run_dir)
        recorded = {record["rank"] for record in records}
        first = min((time_ns for rank, time_ns in deaths.items() if rank in codes or rank in recorded), default=0)
        suspects += [
            _from_death(_death(run_dir, rank, code, outcome), code, deaths.get(rank), late, first)
            for rank, code in codes.items()
            if rank not in recorded
        ]
        suspects += _early_leavers(suspects, deaths)
        lost = _lost_machine(suspects, outcome)
        if lost is not None:
            return lost
    if not suspects:
        return _of_the_launch(run_dir, outcome)
    suspects.sort(key=lambda suspect: (suspect.tier, suspect.time_ns, suspect.failure.kind == "killed"))
    histories = {record["rank"]: history for record in records if (history := _history(record.get("collectives")))}
    return different_collectives([suspect.failure for suspect in suspects], histories)


_RECORD: Mapping[str, Any] = {
    "rank": int,
    "time_ns": int,
    "kind": str,
    "message": str,
    "traceback": str | None,
    "consequence": bool,
    "memory": dict | None,
}
"""Type of each value of a rank's record."""


def _records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of the ranks. One that is damaged is left out: how that rank ended, its exit code says."""
    records = []
    for path in sorted((run_dir / run_directory.ERRORS).glob("rank*.json")):
        with contextlib.suppress(run_directory.DamagedRunError, OSError):
            record = run_directory.read_json(path)
            if all(isinstance(record.get(name), kind) for name, kind in _RECORD.items()):
                with contextlib.suppress(ValueError, LookupError, TypeError):  # of what it says of memory, or a missing traceback
                    _from_record(record)
                    records.append(record | {"written": path.stat().st_mtime})
    return records


_INTERRUPT = "KeyboardInterrupt"
_CLOCK_TICK = 0.01
"""Seconds by which the time at which a file was written may be too early: the kernel takes it from its last tick."""
_OF_ITS_OWN = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
"""Signals that a process gets for what it does itself; all others are sent from outside."""
_SENT = "A user or another program sent it: kill, a batch system at a time limit or for another job, or a machine that shuts down."


def _signal_to_torchrun(run_dir: Path, outcome: Mapping[str, Any]) -> tuple[int, float]:
    """The signal from outside that ended torchrun itself, and when it came, by the wall clock; 0 = none did.

    On several machines guards end torchrun, where another machine has failed: there nothing is said.
    """
    if outcome["state"] not in ("failed", "lost") or outcome.get("stopped_ns") or outcome.get("nodes"):
        return 0, 0.0
    log = _log_of_torchrun(run_dir)
    code = outcome.get("returncode") or 0
    received = re.search(r"(?:\w(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(\.\d+) [^\n]*)?Received (?:Signals\.)?(\w+) death signal", log)
    raised = re.search(r"SignalException: Process \d+ got signal: (?:Signals\.)?(\w+)", log)
    if received or raised:
        text = received[7] if received else raised[1] if raised else ""
        number = int(text) if text.isdecimal() else int(getattr(signal, text, 0))
        when = 0.0
        if received and received[1]:
            year = time.localtime((run_dir / run_directory.RUN_JSON).stat().st_mtime).tm_year
            month, day, hour, minute, second = map(int, received.groups()[:5])
            when = time.mktime((year, month, day, hour, minute, second, 0, 0, -1)) + float(received[6])
        return number, when
    if code < 0:
        return -code, 0.0
    return (signal.SIGINT, 0.0) if re.search(r"^KeyboardInterrupt\s*\Z", log, re.MULTILINE) else (0, 0.0)


def _log_of_torchrun(run_dir: Path) -> str:
    """What torchrun printed, on all machines."""
    text = ""
    for path in run_directory.launcher_logs(run_dir):
        with contextlib.suppress(OSError):
            text += path.read_text(encoding="utf-8", errors="replace")
    return text


def _from_record(record: Mapping[str, Any]) -> _Suspect:
    if record["message"] == _INTERRUPT:
        why = Failure(
            rank=record["rank"],
            kind="killed",
            message="was ended from outside by SIGINT (KeyboardInterrupt)",
            traceback=record["traceback"],
            hint=_SENT,
        )
        return _Suspect(tier=0, time_ns=record["time_ns"], failure=why)
    symptom = symptom_of(record["message"])
    hint = symptom.hint if symptom else None
    failure = Failure(hint=hint, memory=record.get("memory"), **{name: record[name] for name in ("rank", "kind", "message", "traceback")})
    return _Suspect(tier=2 if record["consequence"] else 0, time_ns=record["time_ns"], failure=failure)


def _from_death(failure: Failure, code: int, time_ns: int | None, late: float, first: int) -> _Suspect:
    """Of a rank's end: torchrun ended it if it died after `late`; none before `first`, when the first one died that did not end well.

    A guard that waits for a core sees deaths late, and all of that time at once: then at `first`.
    """
    by_torchrun = time_ns > first and (code == -signal.SIGTERM or time_ns > late) if time_ns is not None else code == -signal.SIGTERM
    waited = code == -signal.SIGABRT and is_consequence(failure.message)  # NCCL's watchdog ends the ranks that wait for another one
    tier = 3 if by_torchrun else 2 if waited else 1 if time_ns is None else 0
    return _Suspect(tier=tier, time_ns=float("inf") if time_ns is None else time_ns, failure=failure)


def _early_leavers(suspects: list[_Suspect], deaths: Mapping[int, int]) -> list[_Suspect]:
    """Ranks that ended without an error before others failed because they were gone.

    The guard may see such an end after the other has raised its error, but before that one has ended: torchrun has ended none until then.
    """
    victim = min((suspect for suspect in suspects if suspect.tier == 2), key=lambda suspect: suspect.time_ns, default=None)
    if victim is None or any(suspect.tier < 2 for suspect in suspects):
        return []
    blamed = {suspect.failure.rank for suspect in suspects}
    until = max(victim.time_ns, deaths.get(victim.failure.rank if victim.failure.rank is not None else -1, 0))
    message = f"ended without an error while others still needed it: rank {victim.failure.rank} got {victim.failure.message}"
    return [
        _Suspect(
            tier=0,
            time_ns=time_ns,
            failure=Failure(rank=rank, kind="exit", message=message, traceback=victim.failure.traceback, hint=_SAME_BRANCHES),
        )
        for rank, time_ns in deaths.items()
        if rank not in blamed and time_ns < until
    ]


def _lost_machine(suspects: list[_Suspect], outcome: Mapping[str, Any]) -> Failure | None:
    """The machine that stopped sending heartbeats, or never joined, where no rank failed by itself."""
    nodes = {rank: node for rank, node in (outcome.get("nodes") or {}).items() if node.get("state") in ("silent", "absent")}
    if not nodes or any(suspect.tier < 2 for suspect in suspects):
        return None
    rank, node = next(iter(nodes.items()))
    if node["state"] == "absent":
        return None  # torchrun has said so, with the time it waited
    victim = min(suspects, key=lambda suspect: (suspect.tier, suspect.time_ns), default=None)
    effect = f"; rank {victim.failure.rank} got {victim.failure.message.splitlines()[0]}" if victim else ""
    return Failure(
        rank=None,
        kind="node",
        message=f"machine {rank} ({node.get('name')}) died or was cut off: its guard has not been heard of any more{effect}",
        traceback=victim.failure.traceback if victim else None,
        hint="Is it up, and does it reach the shared file system? With checkpoint_every=, max_restarts= and min_ranks= a run goes on with "
        "the machines that are left; a job of Slurm on others: Slurm(requeue=True).",
    )


_SAME_BRANCHES = "All ranks must take the same number of steps: do they all get as many batches, and does none call sys.exit or os._exit?"


_WAITED = (
    "It waited for something that another rank did not do: do all ranks take the same branches, and equally many steps? Did one wait "
    "for its data, or run out of memory? run.logs(rank) shows how far each came."
)
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*?(?=before timing out|$)")
_THROWN = re.compile(r"^\s*what\(\):\s+(.*\S)")
"""What NCCL's watchdog writes before it ends the process, and C++ about an exception that nobody caught."""


def _exit_codes(run_dir: Path) -> dict[int, int]:
    """Exit codes of the ranks that did not end well (a signal as its negative number), from the table that torchrun prints last."""
    text = _log_of_torchrun(run_dir)
    return {int(rank): int(code) for rank, code in re.findall(r"rank\s*: (\d+) \(local.*?exitcode\s*: (-?\d+)", text, re.DOTALL)}


def _death(run_dir: Path, rank: int, code: int, outcome: Mapping[str, Any]) -> Failure:
    """How a rank ended that left no record."""
    hint = memory = None
    files = [path for path, number in run_directory.log_files(run_dir) if number == rank and path.name == "stderr.log"]
    lines = run_directory.TextTail(files[-1]).read(last=True) if files else []
    match -code:
        case signal.SIGABRT if watchdog := next(filter(None, map(_WATCHDOG.search, lines)), None):
            kind, message, hint = "timeout", f"was ended by NCCL's watchdog: {watchdog[0].strip()}", _WAITED
        case signal.SIGABRT if thrown := next(filter(None, map(_THROWN.search, lines)), None):
            symptom = symptom_of(thrown[1])
            kind, message = symptom.kind if symptom else "crash", f"crashed (SIGABRT): {thrown[1]}"
            hint = symptom.hint if symptom else "The stack of every thread is at the end of its stderr."
        case signal.SIGKILL if outcome.get("oom_kills") or outcome.get("kernel"):
            kind, message, hint = "killed", "was killed by the kernel because memory ran out (SIGKILL)", LESS_MEMORY
            memory = _last_seen(run_dir, rank, outcome)
        case signal.SIGKILL:
            kind, message = "killed", "was killed (SIGKILL)"
            hint = (
                _NOT_FOR_MEMORY if outcome.get("oom_kills") == 0 else f"It is not known by whom; most often memory ran out. {LESS_MEMORY}"
            )
        case number if number > 0 and number not in _OF_ITS_OWN:
            kind, message, hint = "killed", f"was ended from outside by {_name_of(number)}", _SENT
        case number if number > 0:
            kind, message, hint = "crash", f"crashed ({_name_of(number)})", "The stack of every thread is at the end of its stderr."
        case _:
            kind, message = "exit", f"ended with exit code {code}, without an exception"
    shown = [*takewhile(lambda line: not line.startswith("Current thread's C stack"), lines)][-20:]  # Python 3.14 prints that one last
    return Failure(rank=rank, kind=kind, message=message, traceback="\n".join(shown) or None, hint=hint, memory=memory)


def _name_of(number: int) -> str:
    """The name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


_NOT_FOR_MEMORY = "The kernel killed no process for want of memory: a user or another program sent the signal."


def _last_seen(run_dir: Path, rank: int, outcome: Mapping[str, Any]) -> "OutOfMemory":
    """Memory of a rank that the kernel killed when memory ran out: by the kernel's message, or the rank's last report."""
    from workbench.runs.out_of_memory import HOST, OutOfMemory, kernel_kills

    rows: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, OSError):
        rows = run_directory.LineTail(run_dir / run_directory.rank_file(rank)).read()
    pid = next((int(row["pid"]) for row in rows if row.get("pid")), -1)
    killed = kernel_kills(outcome.get("kernel") or ())
    resident = killed.get(pid) or (sum(killed.values()) if len(killed) == 1 else None)
    reported = max((row["memory"] for row in rows if row.get("memory")), default=None)
    return OutOfMemory(device=HOST, capacity=outcome.get("memory_limit"), this_process=resident or reported)


def _of_the_launch(run_dir: Path, outcome: Mapping[str, Any]) -> Failure:
    """The failure of a run that no rank caused, but the time limit, the launching process, the guard or torchrun."""
    kind, text, hint = "launcher", None, None
    lines = [line for path in run_directory.launcher_logs(run_dir) for line in run_directory.TextTail(path).read(last=True)]
    match outcome["state"]:
        case "timeout":
            limit = run_directory.read_json(run_dir / run_directory.RUN_JSON).get("timeout")
            kind, message = "timeout", "stopped at its time limit" + (f", timeout={limit:g} s" if limit else "")
            hint = "Allow more time; if a rank hangs, run.logs() shows how far each one came."
        case "abandoned":
            message, hint = (
                "stopped because the process that launched it ended",
                "A run lives as long as the kernel or script that launched it.",
            )
            if left := outcome.get("cause"):
                name = (outcome.get("nodes") or {}).get(str(left), {}).get("name")
                message = f"stopped because workbench join ended on machine {left}" + (f" ({name})" if name else "")
                hint = "A machine stays in a run as long as the workbench join that brought it in."
        case "lost":
            who = "rank 0" if run_directory.read_json(run_dir / run_directory.RUN_JSON).get("alone") else "its guard"
            message, text = f"{who} was killed, so nobody saw how it ended", "\n".join(lines[-30:]) or None
        case _:
            code, text = outcome.get("returncode"), "\n".join(lines[-30:]) or None
            errors = [line.strip() for line in lines if re.match(r"\s*[\w.]*(Error|Exception)\b.*:", line)]
            number, _ = _signal_to_torchrun(run_dir, outcome)
            if number:
                hint = _SENT if number not in _OF_ITS_OWN else None
                how = f"was ended from outside by {_name_of(number)}" if hint else f"crashed ({_name_of(number)})"
                return Failure(rank=None, kind=kind, message=f"torchrun {how}", traceback=text, hint=hint)
            message = f"torchrun ended with exit code {code}" + (f": {errors[-1]}" if errors else "")
            if symptom := symptom_of(message):
                kind, hint = symptom.kind, symptom.hint
            absent = [f"{rank}" for rank, node in (outcome.get("nodes") or {}).items() if node["state"] == "absent"]
            if absent:
                wait = (run_directory.read_json(run_dir / run_directory.RUN_JSON).get("rendezvous") or {}).get("timeout")
                within = f" within {wait:g} s (rdzv_timeout)" if wait else ""
                kind, message = "rendezvous", f"machine {', '.join(absent)} did not come{within}"
                hint = (
                    f"On each further machine: workbench join {run_dir}. Do they see that folder, and reach the endpoint's host and port?"
                )
    return Failure(rank=None, kind=kind, message=message, traceback=text, hint=hint)


_MISMATCH = re.compile(r"Received data size doesn't match expected size|Detected mismatch between collectives on ranks")
"""In messages of gloo, and of torch with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
_SAME_ORDER = (
    "All ranks must call the same collectives in the same order: look for a branch around one of these lines, such as `if rank == 0:`."
)


def different_collectives(failures: Sequence[Failure], histories: Mapping[int, Sequence[tuple[str, str]]]) -> Failure:
    """The first of the ranks' failures. If it is that ranks called different collectives, it names the line of each, and who is off course.

    `histories` are the ranks' last collectives and the lines that called them, the one in which the rank failed last.
    """
    first, each = failures[0], {failure.rank: failure for failure in failures if failure.rank is not None}
    calls = {rank: call for rank, failure in sorted(each.items()) if (call := _place(failure, histories.get(rank, ())))}
    if not _MISMATCH.search(first.message) or len(calls) < 2:
        return first
    rank, why = _off_course(calls, {rank: history for rank, history in histories.items() if rank in calls})
    of_one_line, silent = len({line for _, line in calls.values()}) == 1, " or ".join(map(str, sorted(each.keys() - calls.keys())))
    sizes = ", or gave one tensors of different sizes" * (of_one_line and not silent)
    crashed = {rank: call for rank, call in calls.items() if each[rank].kind == "crash"}
    others = {rank: call for rank, call in calls.items() if rank not in crashed}
    places = [place.with_verb("crashed", "crashed") for place in grouped(crashed)] + [
        place.with_verb("was", "were") for place in grouped(others)
    ]
    message = f"{why}the ranks were in different collectives{sizes}: {'; '.join(places)}"
    if of_one_line and silent:
        message += f"; probably rank {silent}, which ended without saying where, was in another"
    hint = f"{_SAME_ORDER} Rank {first.rank} failed first: {first.message.splitlines()[0]}"
    return replace(first, rank=rank, message=message, traceback=(first if rank is None else each[rank]).traceback, hint=hint)


def _history(rows: Any) -> list[tuple[str, str]]:
    """The collectives of a record with the user's lines, up to the first that had not ended, in which the rank was; [] if it is damaged."""
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
        at = next((at for at, row in enumerate(rows) if row["pending"]), len(rows))
        lines = [[f"{Path(file).name}:{number}" for file, number, _ in row["frames"] if is_users(file)] for row in rows[: at + 1]]
        words = (f"{row['op']} ({', '.join(map(str, row['sizes'][:3]))} {row['dtype']})" for row in rows)
        return [(what, line[0] if line else "") for what, line in zip(words, lines, strict=False)]
    return []


def _place(failure: Failure, history: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The collective in which a rank failed and the user's line; None = not known. A history without lines gives the sizes."""
    last, call = history[-1] if history else ("", ""), _call(failure)
    if last[1]:
        return last
    return (last[0], call[1]) if call and last[0].startswith(f"{call[0]} (") else call


def _call(failure: Failure) -> tuple[str, str] | None:
    """The call in which a rank failed and the user's line, by its traceback; None = not known."""
    frames = frames_in(failure.traceback)
    at = max((at for at, (file, _, _) in enumerate(frames) if is_users(file)), default=None)
    if at is None:
        return None
    return next(
        (name for _, _, name in frames[at + 1 :] if name not in WRAPPERS), "a collective"
    ), f"{Path(frames[at][0]).name}:{frames[at][1]}"


_ROUNDS_OF_SIZES = 2
"""Rounds in which a collective must have followed before its size alone says that a rank is not in it: sizes may vary."""


def _off_course(calls: Mapping[int, tuple[str, str]], histories: Mapping[int, Sequence[tuple[str, str]]]) -> tuple[int | None, str]:
    """The rank that is not in the collective that was due by the ranks' histories, else not in that of most, and what it did.

    A history without lines tells by kinds and sizes whether its rank is in the collective that was due.
    """
    lines = {rank: line for rank, (_, line) in calls.items()}
    due: set[str] = set()
    counts: list[int] = []
    astray: dict[int, tuple[str, int]] = {}
    for rank, history in histories.items():
        (what, line), count = usual_follower(history) or (("", ""), 0)
        if count and (line or what == history[-1][0]):
            due.add(line or lines[rank])
            counts.append(count)
        elif count >= _ROUNDS_OF_SIZES:
            astray[rank] = what, count
    rounds, by_lines = min(counts, default=0), any(line for history in histories.values() for _, line in history)
    if not astray and (not due or (len(due) > 1 and not by_lines)):
        most, times = Counter(lines.values()).most_common(1)[0]
        due, rounds, why = {most} if times > 1 else set(), 0, f"in which {times} ranks were"
    odd = {rank for rank, line in lines.items() if due and line not in due} | set(astray)
    if len(odd) != 1 or len(due) > 1 or not (due or astray):
        return None, ""
    (rank,) = odd
    earlier = [call for history in histories.values() for call in history[:-1]]
    if rank in astray:
        expected, rounds = astray[rank]
        was = histories[rank][-1][0]
        did = f"skipped {expected}," if was in [what for what, _ in earlier] else f"called {was}, at {lines[rank]}, in place of {expected},"
    else:
        (expected,) = due
        if not by_lines:
            did = f"called the collective at {lines[rank]} in place of the one at {expected},"
        elif lines[rank] in [line for _, line in earlier]:
            did = f"skipped the collective at {expected},"
        else:
            did = f"called one that others did not, at {lines[rank]}, in place of {expected},"
    if rounds:
        why = f"which came next in {f'{rounds} earlier rounds' if rounds > 1 else 'an earlier round'}"
    return rank, f"probably {did} {why}; "
