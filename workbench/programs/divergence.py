"""Records the first steps of a spec on several ranks, as they are and in fp64, for `wb.diverge`.

torchrun starts `python -m workbench.programs.divergence RUN_DIR` once per rank. Rank 0 writes the recordings, `divergence.json`.
"""

from collections.abc import Sequence
from typing import Any

from workbench.core import run_directory
from workbench.diagnosis.measure.divergence_ranks import of_ranks, packed
from workbench.programs.experiment import Assignment, run_program
from workbench.runs.entrypoints import DIVERGENCE


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    run_program(measure, DIVERGENCE, __doc__, arguments)


def measure(assignment: Assignment) -> dict[str, Any]:
    """Both recordings; of that in fp64 the error, where the model has none."""
    given = assignment.spec, assignment.task, assignment.ranks, assignment.order["steps"]
    result: dict[str, Any] = {"plain": packed(of_ranks(*given, double=False)), "double": [], "error": ""}
    try:
        result["double"] = packed(of_ranks(*given, double=True))
    except Exception as error:  # a model that does not run in fp64 fails on all ranks
        result["error"] = f"{type(error).__name__}: {error}"
    return {run_directory.DIVERGENCE: result} if not assignment.ranks.rank else {}


if __name__ == "__main__":
    main()
