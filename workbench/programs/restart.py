"""Decides how a run goes on after a failure: `python -m workbench.programs.restart RUN_DIR`, which its guard starts.

NEXT in the run directory holds the outcome of the attempt that failed, and is replaced by what the guard starts next. The exit status is 0
where the run goes on, with all its ranks or with those that are left, and 1 where it does not; then nothing of it was changed.
"""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.runs import entrypoints
from workbench.runs.failure import Failure
from workbench.runs.launch import environment
from workbench.runs.launch.resume import archive_attempt
from workbench.runs.restarts import RESHAPED, present_spec, restarts_of, with_fewer
from workbench.runs.root_cause import first_failure, lost_ranks
from workbench.runs.spec import RunSpec, spec_from_json

FROM_OUTSIDE = ("killed", "crash", "hang", "timeout", "launcher")
"""Kinds of failures that need not come again: all others are errors of a program, which come again at the same step."""


def decide(run_dir: Path, outcome: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of RESTARTS for what is done about a failure; None = the run has ended."""
    info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
    elastic, spec = info["elastic"], spec_from_json(info["spec"])
    assert isinstance(spec, RunSpec)
    path = run_dir / run_directory.RESTARTS
    rows = [row for row in run_directory.LineTail(path).read() if "why" in row] if path.exists() else []
    failure = first_failure(run_dir, outcome) or Failure.of_launcher("the run failed")
    reached, before = _steps(run_dir), present_spec(info)["nproc_per_node"]
    again = reached <= (rows[-1]["reached"] if rows else 0)
    if len(rows) >= elastic["max_restarts"] or (again and failure.kind not in FROM_OUTSIDE):
        return None
    lost = lost_ranks(run_dir, outcome, failure)
    where = "" if failure.rank is None else f"rank {failure.rank}: "
    row = {"number": len(rows) + 1, "of": elastic["max_restarts"], "lost": list(lost), "why": where + failure.message.splitlines()[0][:300]}
    row |= {"before": before, "ranks": before, "reached": reached, "lost_at": _when(outcome, lost)}
    if not lost or elastic["min_ranks"] is None:
        return row
    fewer, why = with_fewer(spec, before - len(lost), elastic["min_ranks"])
    if fewer is None:
        least = f"min_ranks={elastic['min_ranks']}"
        reason = "; ".join(why) or f"{before - len(lost)} of its {before} ranks are left, and {least}"
        print(f"workbench: the run does not go on with fewer ranks: {reason}", flush=True)
        return None
    changes = {name: getattr(fewer, name) for name in RESHAPED}
    return row | {"ranks": fewer.nproc_per_node, "passed_over": why, **{name: changes[name] for name in RESHAPED[1:]}, "layout": changes}


def _steps(run_dir: Path) -> int:
    """Steps that rank 0 has taken."""
    rows = run_directory.LineTail(run_dir / run_directory.rank_file(0)).read()
    return max((row["step"] + 1 for row in rows if isinstance(row.get("step"), int)), default=0)


def _when(outcome: Mapping[str, Any], lost: tuple[int, ...]) -> float:
    """When a rank was lost, by the wall clock; now where nobody saw it."""
    deaths = {int(rank): time_ns for rank, time_ns in (outcome.get("exits") or {}).items()}
    seen = [deaths[rank] for rank in lost if rank in deaths]
    return time.time() - (max(0.0, (time.monotonic_ns() - min(seen)) / 1e9) if seen else 0.0)


def go_on(run_dir: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Put the run directory into the state from which the next attempt starts; returns what the guard starts."""
    archive_attempt(run_dir, copy_log=True)
    info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
    spec = spec_from_json(info["spec"])
    if row.get("layout"):
        info["layout"] = row["layout"]
    nproc = present_spec(info)["nproc_per_node"]
    program = entrypoints.spec_entrypoint(spec, run_dir)
    shutdown = environment.shutdown_s(info["spec"])
    info["command"] = environment.torchrun(nproc, run_dir / run_directory.LOGS, program, info["id"], shutdown=shutdown)
    run_directory.write_json(run_dir / run_directory.RUN_JSON, info)
    writer = run_directory.LineWriter(run_dir / run_directory.RESTARTS)
    writer.write([{name: value for name, value in row.items() if name != "layout"}])
    writer.close()
    return {"command": info["command"], "nproc": nproc}


def main() -> int:
    """Judge the failure in NEXT, and say what comes next there; returns the exit status."""
    run_dir = Path(sys.argv[1])
    file = run_dir / run_directory.NEXT
    row = None
    with contextlib.suppress(run_directory.DamagedRunError):
        row = decide(run_dir, run_directory.read_json(file))
    if row is None:
        file.unlink(missing_ok=True)
        return 1
    file.write_text(json.dumps(go_on(run_dir, row)))
    print(f"workbench: {restarts_of([row])[0]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
