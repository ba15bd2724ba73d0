"""`python -m workbench.train RUN_DIR [RUN_DIR…]`: trains the specs that these run directories hold. torchrun starts one per rank."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from workbench.batch.measure.noise_log import NoiseLog
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.programs.sweep import train_all
from workbench.runs import failure
from workbench.runs.spec import RunSpec, SpecError, spec_from_json
from workbench.runs.task import resolve
from workbench.train.loop import train
from workbench.train.ranks import Ranks


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; whatever goes wrong is recorded before anything is torn down, so that the rank at fault can be told from its victims."""
    parser = argparse.ArgumentParser(prog="python -m workbench.train", description=__doc__)
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directory with a run.json")
    run_dirs = parser.parse_args(arguments).run_dirs
    try:
        specs = [read_spec(run_dir) for run_dir in run_dirs]
        if len(specs) == 1:
            task = resolve(specs[0].task)  # before the group: a wrong name needs no peers to be found
            ranks = Ranks.join(specs[0])
            train(specs[0], task, ranks, run_dirs[0], held=held, noise_log=NoiseLog)
            ranks.agree(True)  # nobody leaves while rank 0 evaluates
        else:
            train_all(specs, run_dirs, Ranks.join(specs[0]))
    except BaseException as error:
        failure.record(error, run_dir=Path(os.environ.get(run_directory.ENV_RUN_DIR) or run_dirs[0]), held=held)
        raise
    Ranks.leave()


def read_spec(run_dir: Path) -> RunSpec:
    """The spec of a run directory.

    Raises:
        DamagedRunError: it has no run.json that can be read.
        SpecError: it is the spec of a script, or holds what this workbench does not know.
    """
    spec = spec_from_json(run_directory.read_json(run_dir / run_directory.RUN_JSON)["spec"])
    if not isinstance(spec, RunSpec):
        raise SpecError(f"{run_dir} holds the spec of a script: python -m workbench.programs.script runs those")
    return spec


if __name__ == "__main__":
    main()
