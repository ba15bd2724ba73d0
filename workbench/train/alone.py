"""`torchrun … -m workbench.train.alone TASK RUNS [KNOB=VALUE…]`: trains a spec that nobody has launched, in a pod of Kubernetes.

Rank 0 makes the run directory in RUNS, named after torchrun's run id; the others find it there, or make one of their own where the folder
is not shared. There is no guard: the cluster ends what is left.
"""

import ast
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from workbench import rundir
from workbench.spec import RunSpec
from workbench.task import label
from workbench.train import __main__ as program


def main(words: list[str] | None = None) -> None:
    """Make the run directory, and train in it."""
    task, runs, *knobs = sys.argv[1:] if words is None else words
    ranks, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    spec = RunSpec(task=task, nproc_per_node=local, nnodes=ranks // local).replace(**dict(map(_knob, knobs)))
    number = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
    path = Path(runs) / f"{label(task)}-{number}".replace("/", "-")
    (path / rundir.ERRORS).mkdir(parents=True, exist_ok=True)
    info = {
        "format": rundir.FORMAT, "id": number, "name": label(task), "created": time.time(), "host": platform.node(), "spec": spec.to_json(),
        "launch_dir": ".", "timeout": None, "outcome": None,
    }  # fmt: skip
    if os.environ.get("RANK", "0") == "0" or not (path / rundir.RUN_JSON).exists():
        rundir.write_json(path / rundir.RUN_JSON, info)
    os.environ[rundir.ENV_RUN_DIR] = str(path)
    program.main([str(path)])


def _knob(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    main()
