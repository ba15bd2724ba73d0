"""Restarts of a run that lost a rank: the checkpoints, how many there may be, how fewer ranks share the work, and what each restart took.

The guard of a run asks `programs/restart.py` after each failure, which judges by this file; rank 0 writes how long it took.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table
from workbench.core.units import several
from workbench.runs.spec import AUTO, RunSpec, Spec, SpecError

RESHAPED = ("nnodes", "nproc_per_node", "micro_batch", "accumulation")
"""Knobs that a restart with fewer ranks changes."""
WITH_WHAT_IS_LEFT = (
    "With the machines that are left a new run goes on from its last checkpoint: "
    "wb.launch(run.spec.replace(nnodes=…, accumulation=…), resume=run)"
)


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints in a run directory by step, without the parts of ranks, which are written before the file that names them.

    Raises:
        OSError: their folder cannot be listed, which does not mean that it is empty.
    """
    folder = run_dir / run_directory.CHECKPOINTS
    paths = list(folder.iterdir()) if folder.exists() else []
    return sorted((path for path in paths if re.fullmatch(r"step\d+\.pt", path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that the name of a checkpoint says."""
    return int(checkpoint.stem.removeprefix("step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(JsonDataclass):
    """One restart: who was lost, and how the run went on.

    >>> print(Restart(number=1, of=3, lost=(1,), why="rank 1: was killed (SIGKILL)", before=2, ranks=1, goes_on_from=20, seconds=4.25))
    restart 1 of 3: rank 1: was killed (SIGKILL); it goes on from step 20 with 1 rank of 2, and took its first step 4.25 s later
    """

    number: int
    """Its number, from 1."""
    of: int
    """Restarts that were allowed."""
    lost: tuple[int, ...]
    """Ranks that were lost, by their numbers before; empty = no rank, but torchrun itself."""
    why: str
    """The error of the rank that failed first, in a line."""
    before: int
    """Ranks before."""
    ranks: int
    """Ranks afterwards."""
    micro_batch: int | None = None
    """Samples of a micro-batch afterwards; None = as before."""
    accumulation: int | None = None
    """Micro-batches of a step afterwards; None = as before."""
    passed_over: tuple[str, ...] = ()
    """Numbers of ranks that were not possible, and why."""
    goes_on_from: int | None = None
    """Steps of the checkpoint that it went on from, 0 = it began anew; None = it has taken no step yet."""
    seconds: float | None = None
    """Seconds from the loss to the end of the first step afterwards; None = it has taken none yet."""

    def __str__(self) -> str:
        ranks = f"{several(self.ranks, 'rank')} of {self.before}" if self.ranks < self.before else several(self.ranks, "rank")
        share = f", micro_batch={self.micro_batch} and accumulation={self.accumulation}" if self.accumulation else ""
        where = "" if self.goes_on_from is None else f" from step {self.goes_on_from}" if self.goes_on_from else " from the beginning"
        took = "" if self.seconds is None else f", and took its first step {units.seconds(self.seconds)} later"
        left_out = f" ({'; '.join(self.passed_over)})" if self.passed_over else ""
        return f"restart {self.number} of {self.of}: {self.why}; it goes on{where} with {ranks}{share}{left_out}{took}"

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return table.frame([self.to_json()])


def check(spec: Spec, max_restarts: int, min_ranks: int | None, error: type[ValueError] = SpecError) -> None:
    """Check that a run can be restarted so.

    Raises:
        ValueError: it cannot, and what to try.
    """
    whole_number("max_restarts", max_restarts, least=0, error=error)
    if min_ranks is not None:
        whole_number("min_ranks", min_ranks, least=1, most=spec.world_size, error=error)
        if not max_restarts:
            raise error(f"min_ranks={min_ranks} without max_restarts: a run goes on with fewer ranks when it restarts; try max_restarts=3")
    if not max_restarts:
        return
    said = f"max_restarts={max_restarts}"
    if not isinstance(spec, RunSpec):
        raise error(
            f"{said} with a script, whose checkpoints are its own: after a failure launch it again, with the option that reads them"
        )
    if not spec.checkpoint_every:
        raise error(f"{said} without checkpoints: it would begin anew each time; try checkpoint_every=100")
    if min_ranks is not None and spec.micro_batch == AUTO:
        raise error(f'min_ranks={min_ranks} with micro_batch="auto": the ranks that are left have to share a known batch; give a number')
    if min_ranks is not None and spec.local_sgd != "none":
        raise error(f'min_ranks={min_ranks} with local_sgd="{spec.local_sgd}": each rank has parameters of its own; leave one of them out')
    if min_ranks is not None and spec.noise_scale:
        raise error(f"min_ranks={min_ranks} with noise_scale={spec.noise_scale}: it compares the ranks of all steps; leave one of them out")
    most = spec.world_size - (spec.nproc_per_node if spec.nnodes > 1 else 1)
    if min_ranks is not None and min_ranks <= most and (found := with_fewer(spec, most, min_ranks))[0] is None:
        fewer, _ = with_fewer(spec, min_ranks - 1, 1)
        instead = f"min_ranks={fewer.world_size}, or " if fewer else ""
        raise error(
            f"min_ranks={min_ranks}: the run could not go on with fewer ranks, since {'; '.join(found[1][:3])}; try {instead}no min_ranks: "
            "all ranks then start again"
        )


def with_fewer(spec: RunSpec, ranks: int, least: int) -> tuple[RunSpec | None, list[str]]:
    """A spec's layout for the ranks that are left, with the same samples in a step: the lost ranks' part is made up by accumulation.

    Args:
        spec: as it was launched; on several machines each keeps its number of ranks.
        ranks: number of ranks that are left.
        least: ranks that it may go on with, at least.

    Returns:
        The spec with most ranks that is possible (None: there is none), and why each larger number is not.

    >>> from workbench.runs.spec import RunSpec
    >>> spec, why = with_fewer(RunSpec(task="text-gpt", nproc_per_node=4, micro_batch=8), 3, 1)
    >>> spec.nproc_per_node, spec.accumulation, spec.global_batch, why
    (2, 2, 32, ['3 ranks cannot share the 32 samples of a step evenly'])
    """
    why = []
    each_machine = spec.nproc_per_node if spec.nnodes > 1 else 1
    for count in range(ranks, least - 1, -each_machine):
        if uneven := [name for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel") if count % getattr(spec, name)]:
            why.append(f"{uneven[0]}={getattr(spec, uneven[0])} does not divide {several(count, 'rank')}")
            continue
        each, rest = divmod(spec.global_batch, count // (spec.tensor_parallel * spec.pipeline_parallel))
        if rest:
            why.append(f"{several(count, 'rank')} cannot share the {spec.global_batch} samples of a step evenly")
            continue
        micro = next(size for size in range(min(spec.micro_batch, each), 0, -1) if each % size == 0)
        if 2 * micro < spec.micro_batch and micro < each:
            why.append(f"with {several(count, 'rank')} a micro-batch would have {micro} samples instead of {spec.micro_batch}")
            continue
        share = {"nnodes": count // each_machine} if spec.nnodes > 1 else {"nproc_per_node": count}
        try:
            return spec.replace(**share, micro_batch=micro, accumulation=each // micro), why
        except SpecError as error:
            why.append(f"with {several(count, 'rank')}: {error}")
    return None, why


def resume_with(spec: RunSpec, machines: int) -> str:
    """What to type so that a new run goes on with as many machines as are left, or with those of them that can share the work.

    >>> from workbench.runs.spec import RunSpec
    >>> resume_with(RunSpec(task="text-gpt", nnodes=3, micro_batch=8), 2)
    'wb.launch(run.spec.replace(nnodes=2, micro_batch=6, accumulation=2), resume=run)'
    """
    fewer, _ = with_fewer(spec, machines * spec.nproc_per_node, 1)
    changed = [name for name in RESHAPED if fewer and getattr(fewer, name) != getattr(spec, name)]
    changes = ", ".join(f"{name}={getattr(fewer, name)}" for name in changed) or "nnodes=…, accumulation=…"
    return f"wb.launch(run.spec.replace({changes}), resume=run)"


def present_spec(info: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a run.json with the ranks that it has now: fewer than it was launched with, where some were lost."""
    return {**info["spec"], **(info.get("layout") or {})}


def present_ranks(info: Mapping[str, Any]) -> int:
    """The ranks of a run that there are now, on all its machines."""
    spec = present_spec(info)
    return int(spec.get("nnodes", 1) * spec.get("nproc_per_node", 1))


def restarts_of(rows: Sequence[Mapping[str, Any]]) -> list[Restart]:
    """The restarts of a run, from the rows of RESTARTS: one when it was decided, another after its first step. Others are left out."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if isinstance(number := row.get("number"), int):
            found.setdefault(number, {}).update(row)
    restarts = []
    for row in found.values():
        try:
            known = {name: row[name] for name in Restart.__dataclass_fields__ if name in row}
            restarts.append(Restart.from_json(known))
        except (TypeError, ValueError):
            continue
    return restarts


def restart_notes(run_dir: Path, state: str) -> list[str]:
    """Each restart of a run, and, where it has failed, why there was no other."""
    rows = run_directory.LineTail(run_dir / run_directory.RESTARTS).read()
    why = rows[-1].get("ends") if rows and state == "failed" else None
    return [*map(str, restarts_of(rows)), *[f"there was no {'other ' * (len(rows) > 1)}restart: {why}"] * isinstance(why, str)]


def first_step(run_dir: Path, *, done: int, now: float) -> Restart | None:
    """Write that the first step after a restart was taken; None = this attempt is none, or the file says that it was written."""
    path = run_dir / run_directory.RESTARTS
    rows = run_directory.LineTail(path).read() if path.exists() else []
    if not rows or "lost_at" not in rows[-1]:
        return None
    if run_directory.read_json(run_dir / run_directory.RUN_JSON).get("begun", 0.0) > rows[-1]["lost_at"]:
        return None  # somebody resumed the run since: that is not this restart
    writer = run_directory.LineWriter(path)
    writer.write([{"number": rows[-1]["number"], "goes_on_from": done, "seconds": max(0.0, now - rows[-1]["lost_at"])}])
    writer.close()
    return restarts_of(run_directory.LineTail(path).read())[-1]
