"""The frame of a program that torchrun starts once per rank to find something out: read the order, join, do it, write, leave together."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import failure, rundir
from workbench.measure.blocks import StepFailed
from workbench.measure.holding import held
from workbench.spec import RunSpec
from workbench.task import Task, resolve
from workbench.train.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a rank is to do."""

    run_dir: Path
    info: Mapping[str, Any]
    """What run.json says."""
    spec: RunSpec
    task: Task
    ranks: Ranks

    @property
    def order(self) -> Mapping[str, Any]:
        """The "experiment" of run.json."""
        order: Mapping[str, Any] = self.info["experiment"]
        return order


def carry_out(do: Callable[[Assignment], Mapping[str, Any]], *, name: str, about: str | None, arguments: Sequence[str] | None) -> None:
    """Do what run.json says; whatever goes wrong is recorded before anything is torn down.

    Args:
        do: gives what this rank writes: what goes into JSON by file, below the run directory.
        name: of the program, for its help.
        about: the same.
        arguments: the command line; None = that of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help='directory with a run.json that has an "experiment"')
    run_dir = parser.parse_args(arguments).run_dir
    try:
        info = rundir.read_json(run_dir / rundir.RUN_JSON)
        spec = RunSpec.from_json(info["spec"])
        task = resolve(spec.task)  # before the group: a wrong name needs no peers to be found
        ranks = Ranks.join(spec)
        for file, found in do(Assignment(run_dir=run_dir, info=info, spec=spec, task=task, ranks=ranks)).items():
            (run_dir / file).parent.mkdir(exist_ok=True)
            rundir.write_json(run_dir / file, found)
        ranks.agree(True)  # nobody leaves while another writes
    except BaseException as error:
        failure.record(error.error if isinstance(error, StepFailed) else error, run_dir=run_dir, held=held)
        raise
    Ranks.leave()
