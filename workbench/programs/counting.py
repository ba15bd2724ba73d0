"""Prints the parameters and samples of tasks as JSON: `python -m workbench.programs.counting TASK…`."""

import json
import sys
from typing import Any

import torch

from workbench.runs.task import Task, TaskError, resolve
from workbench.train.trainer import build_model


def count_task(name: str) -> dict[str, int | None]:
    """Parameters of a task's model (shared ones once), and samples of its dataset (None = a stream, which has no length).

    Raises:
        TaskError: the task cannot be found or built.
    """
    task = resolve(name)
    dataset: Any = task.dataset()
    try:
        samples = len(dataset)
    except TypeError:
        samples = None
    return {"parameters": sum(weight.numel() for weight in _model(task).parameters()), "samples": samples}


def _model(task: Task) -> torch.nn.Module:
    """The model, on the meta device where it can be built there: a large one need not fit in memory."""
    try:
        with torch.device("meta"):
            return build_model(task)
    except TaskError:
        raise
    except Exception:  # it looks at the numbers of its weights
        return build_model(task)


def main() -> None:
    """Count all tasks that the command line names; print the counts, or an error."""
    try:
        print(json.dumps({name: count_task(name) for name in sys.argv[1:]}))
    except Exception as error:
        print(json.dumps({"error": str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main()
