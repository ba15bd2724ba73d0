"""Decides how a run goes on after a failure: `python -m workbench.programs.restart RUN_DIR [MACHINE]`, which its guard starts.

NEXT in the run directory holds the outcome of the attempt that failed, and is replaced by what the guard starts next. The exit status is 0
where the run goes on, with all its ranks or with those that are left, and 1 where it does not; then nothing of it was changed.

Of a run on several machines each guard starts it, with a NEXT in the machine's folder. Those that are left agree (`launch/regroup.py`), and
the first of them decides.
"""

import contextlib
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.run_directory import NEXT, NODE_JSON, NODES, RUN_JSON
from workbench.runs import entrypoints
from workbench.runs.failure import Failure
from workbench.runs.launch import environment, guard, nodes
from workbench.runs.launch.regroup import PAUSE, Agreement, LeftBehindError, NoAgreementError, read
from workbench.runs.launch.rendezvous import Rendezvous
from workbench.runs.launch.resume import archive_attempt
from workbench.runs.restarts import RESHAPED, present_spec, restarts_of, resume_with, with_fewer
from workbench.runs.root_cause import first_failure, lost_ranks
from workbench.runs.spec import RunSpec, spec_from_json

FROM_OUTSIDE = ("killed", "crash", "hang", "timeout", "launcher", "node")
"""Kinds of failures that need not come again: all others are errors of a program, which come again at the same step."""


def decide(run_dir: Path, outcome: Mapping[str, Any], lost: Mapping[int, str] | None = None) -> dict[str, Any] | str:
    """The row of RESTARTS for what is done about a failure; a text = the run has ended, and why.

    Args:
        lost: of a run on several machines those that are not left, each with what became of it; None = it is of one.
    """
    info = run_directory.read_json(run_dir / RUN_JSON)
    elastic, spec, present = info["elastic"], spec_from_json(info["spec"]), spec_from_json(present_spec(info))
    assert isinstance(spec, RunSpec)
    path = run_dir / run_directory.RESTARTS
    rows = [row for row in run_directory.LineTail(path).read() if "why" in row] if path.exists() else []
    failure = first_failure(run_dir, outcome) or Failure.of_launcher("the run failed")
    reached, before = _steps(run_dir), present.world_size
    again = reached <= (rows[-1]["reached"] if rows else 0)
    gone = lost_ranks(run_dir, outcome, failure)
    left = before - (len(gone) if lost is None else len(lost) * spec.nproc_per_node)  # of several, each that is left starts all its ranks
    where = "" if failure.rank is None else f"rank {failure.rank}: "
    why = where + failure.message.splitlines()[0][:300]
    if lost:
        there = [read(run_dir / NODES / str(machine) / NODE_JSON).get("ranks", {}).values() for machine in lost]
        gone = tuple(sorted(rank for ranks in there for rank in ranks))
        why = "; ".join(f"machine {machine} {how}" for machine, how in lost.items())
    to_type = f". A new run goes on with those that are left: {resume_with(spec, left // spec.nproc_per_node)}" if lost and left else ""
    if len(rows) >= elastic["max_restarts"]:
        return f"{why}; it was the last attempt, max_restarts={elastic['max_restarts']}{to_type}"
    if again and not lost and failure.kind not in FROM_OUTSIDE:
        return f"{why}; it would come again, as there was no further step since {'the last restart' if rows else 'the launch'}"
    row = {"number": len(rows) + 1, "of": elastic["max_restarts"], "lost": list(gone), "why": why}
    row |= {"before": before, "ranks": before, "reached": reached, "lost_at": _when(outcome, gone)}
    if left == before or (elastic["min_ranks"] is None and not lost):
        return row
    fewer, passed_over = with_fewer(spec, left, elastic["min_ranks"] or spec.world_size)
    if fewer is None:
        least = "without min_ranks it needs all" if elastic["min_ranks"] is None else f"min_ranks={elastic['min_ranks']}"
        reason = "; ".join(passed_over) or f"{left} of its {before} ranks are left, and {least}"
        return f"it does not go on with fewer ranks: {reason}{to_type}"
    changes = {name: getattr(fewer, name) for name in RESHAPED}
    share = {name: changes[name] for name in RESHAPED[2:]}
    return row | {"ranks": fewer.world_size, "passed_over": passed_over, **share, "layout": changes}


def _steps(run_dir: Path) -> int:
    """Steps that rank 0 has taken."""
    rows = run_directory.LineTail(run_dir / run_directory.rank_file(0)).read()
    return max((row["step"] + 1 for row in rows if isinstance(row.get("step"), int)), default=0)


def _when(outcome: Mapping[str, Any], lost: tuple[int, ...]) -> float:
    """When a rank was lost, by the wall clock; now where nobody saw it.

    The ranks of a machine that was lost are not seen: then when the first of the others ended, which lose their connections, or, where its
    silence was noticed, when that began.
    """
    deaths = {int(rank): time_ns for rank, time_ns in (outcome.get("exits") or {}).items()}
    seen = [deaths[rank] for rank in lost if rank in deaths]
    if lost and not seen and outcome.get("silence"):
        seen = list(deaths.values())
        if (stopped := outcome.get("stopped_ns")) and all(stopped <= time_ns for time_ns in seen):
            seen = [stopped - int(1e9 * outcome["silence"])]
    return time.time() - (max(0.0, (time.monotonic_ns() - min(seen)) / 1e9) if seen else 0.0)


def go_on(run_dir: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Put the run directory into the state from which the next attempt starts; returns what the guard starts."""
    archive_attempt(run_dir, copy_log=True)
    info = run_directory.read_json(run_dir / RUN_JSON)
    nproc = present_spec(info | {"layout": row.get("layout") or info.get("layout")})["nproc_per_node"]
    program = entrypoints.spec_entrypoint(spec_from_json(info["spec"]), run_dir)
    shutdown = environment.shutdown_s(info["spec"])
    command = environment.torchrun(nproc, run_dir / run_directory.LOGS, program, info["id"], shutdown=shutdown)
    _write(run_dir, info | {"command": command}, row)
    return {"command": command, "nproc": nproc}


def _write(run_dir: Path, info: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Write run.json and the row of RESTARTS."""
    writer = run_directory.LineWriter(run_dir / run_directory.RESTARTS)
    writer.write([{name: value for name, value in row.items() if name != "layout"}])
    writer.close()
    run_directory.write_json(run_dir / RUN_JSON, info | ({"layout": row["layout"]} if row.get("layout") else {}))


def regroup(run_dir: Path, machine: int) -> dict[str, Any] | str:
    """Agree with the other machines that are left; returns what the guard of this one starts, or why the run ends.

    Raises:
        LeftBehindError: it goes on without this machine.
        NoAgreementError: the machines did not agree in time.
    """
    folder, info = run_dir / NODES / str(machine), run_directory.read_json(run_dir / RUN_JSON)
    node, outcome, meeting = read(folder / NODE_JSON), run_directory.read_json(folder / NEXT), Rendezvous(**info["rendezvous"])

    def propose(ready: Sequence[int]) -> dict[str, Any]:
        found = {rank: read(run_dir / NODES / str(rank) / NODE_JSON) for rank in node["members"]}
        whole = guard.combine_outcomes(node | {"outcome": outcome}, {rank: found[rank] or None for rank in found if rank != machine})
        lost = {rank: whole["nodes"][rank] for rank in found if rank not in ready}
        said = {rank: f"({how['name']}) " * bool(how["name"]) + _BECAME.get(how["state"], _SILENT) for rank, how in lost.items()}
        row = decide(run_dir, whole | {"silence": node["silence"]}, said)
        if outcome["state"] == "stopped" and not lost:
            row = "a signal ended it, with a checkpoint"
        if lost.get(0, {}).get("state") == "abandoned":
            row = "the process that launched it has ended, on machine 0"
        if isinstance(row, str):
            return {"members": ready, "ends": row, "lost": lost}
        members = ready[: row["ranks"] // info["spec"]["nproc_per_node"]]
        return {"members": members, "ends": "", "row": row, "lost": lost, "endpoint": agreement.endpoint_of(members[0])}

    agreement = Agreement(run_dir, node, meeting.offered(), propose, time.monotonic())

    while True:
        while (plan := agreement.step(time.monotonic())) is None:
            time.sleep(PAUSE)
        mine = {name: node[name] for name in ("rank", "name", "silence")} | {name: plan[name] for name in ("members", "attempt", "lost")}
        if plan["ends"]:
            (folder / NEXT).write_text(json.dumps({"node": mine}))
            return str(plan["ends"])
        with contextlib.suppress(_GivenUpError):
            if machine == min(plan["members"]):
                archive_attempt(run_dir, copy_log=True, machines=plan["members"], check=partial(_check, agreement, plan["attempt"]))
                _check(agreement, plan["attempt"])
                _write(run_dir, info | {"attempt": plan["attempt"], "host": platform.node()}, plan["row"])
            break
    where = replace(meeting, nnodes=len(plan["members"]), endpoint=plan["endpoint"])
    print(f"workbench: {restarts_of([plan['row']])[0]}", flush=True)
    return nodes.of_attempt(run_dir, info, where, mine, f"{info['id']}-{plan['attempt']}")


class _GivenUpError(Exception):
    """The attempt that this machine prepares does not begin; the machines agree on another."""


def _check(agreement: Agreement, attempt: int) -> None:
    """Raise _GivenUpError if an attempt takes so long to prepare that it is given up; a plan that cannot be read is no such sign."""
    while agreement.step(time.monotonic()) is None:
        if agreement.attempt != attempt:
            raise _GivenUpError
        time.sleep(PAUSE)


_SILENT = "died or was cut off"
_BECAME = {"abandoned": "left, as its workbench join ended", "finished": "had finished", "absent": "never joined"}
"""What became of a machine, by the state of its part."""


def main() -> int:
    """Judge the failure in NEXT, and say what comes next there; returns the exit status."""
    run_dir, several = Path(sys.argv[1]), sys.argv[2:]
    file = Path(run_dir, *((NODES, *several) if several else ()), NEXT)
    answer: dict[str, Any] | str = ""
    try:
        if several:
            answer = regroup(run_dir, int(several[0]))
        elif isinstance(row := decide(run_dir, run_directory.read_json(file)), str):
            answer = row
            file.unlink()
            with contextlib.suppress(OSError), contextlib.closing(run_directory.LineWriter(run_dir / run_directory.RESTARTS)) as writer:
                writer.write([{"ends": row}])
        else:
            answer = go_on(run_dir, row)
            print(f"workbench: {restarts_of([row])[0]}", flush=True)
    except (LeftBehindError, NoAgreementError, run_directory.DamagedRunError) as error:
        answer = str(error)
        file.unlink(missing_ok=True)
    if isinstance(answer, str):
        if answer:  # a machine that was left behind says so itself
            print(f"workbench: the run does not go on: {answer}", flush=True)
        return 1
    file.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
