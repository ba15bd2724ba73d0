"""Ends a training when a figure of its evaluations has not become better for some of them (`RunSpec.stop_when`)."""

import json
from pathlib import Path

from workbench.core import run_directory
from workbench.runs.task import TaskError
from workbench.runs.training_knobs import parse_stop
from workbench.train.ranks import Ranks


class EarlyStop:
    """Asked after each evaluation, on every rank. It keeps nothing itself: the run directory has the evaluations, also in a resumed run."""

    def __init__(self, knob: str, ranks: Ranks, run_dir: Path) -> None:
        self._figure, self._options = parse_stop(knob)
        self._ranks, self._path = ranks, run_dir / run_directory.EVALUATIONS

    def after(self, step: int) -> bool:
        """Is the training to end after this step, if it was evaluated? All ranks call it, and get the same answer.

        Raises:
            TaskError: the evaluation has no such figure.
        """
        stop, why = False, ""
        if self._ranks.rank == 0:
            try:
                stop = self._is_over(step)
            except TaskError as error:  # of all ranks: none is to wait for the decision of one that failed
                why = str(error)
        if self._ranks.world_size > 1:
            stop, why = json.loads(self._ranks.share(f"stop {step}", json.dumps([stop, why]).encode())[0])
        if why:
            raise TaskError(why)
        return stop

    def _is_over(self, step: int) -> bool:
        evaluated = [row for row in run_directory.LineTail(self._path).read() if row["step"] <= step]
        if not evaluated or evaluated[-1]["step"] != step:
            return False
        rows = [row["figures"] for row in evaluated]
        name = self._figure if self._figure in rows[-1] else self._figure.removeprefix("validation_")
        if name not in rows[-1]:
            raise TaskError(f"stop_when: the evaluation has no figure {self._figure!r}; it has {', '.join(rows[-1])}")
        sign = -1 if self._options["best"] == "max" else 1
        best, waited = float("inf"), 0
        for row in rows:
            value = sign * row.get(name, float("inf"))
            better = value < best - self._options["by"]
            best, waited = (value, 0) if better else (best, waited + 1)
        if waited < self._options["patience"]:
            return False
        print(
            f"step {step}: {name} was {sign * best:.4g} at best and has not become better in {waited} evaluations: the training ends",
            flush=True,
        )
        return True
