"""What the figures of evaluations decide: when a training ends early (`RunSpec.stop_when`), and which checkpoint is the best."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.runs.task import TaskError
from workbench.runs.training_knobs import SpecError, parse_best, parse_stop
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
            except TaskError as error:
                why = str(error)
        return bool(_agreed(self._ranks, f"stop {step}", stop, why))

    def _is_over(self, step: int) -> bool:
        evaluated = [row for row in run_directory.LineTail(self._path).read() if row["step"] <= step]
        if not evaluated or evaluated[-1]["step"] != step:
            return False
        rows = [row["figures"] for row in evaluated]
        if not (name := _name_in(rows[-1], self._figure)):
            raise TaskError(f"stop_when: the evaluation has no figure {self._figure!r}; it has {', '.join(rows[-1])}")
        sign = -1 if self._options["best"] == "max" else 1
        best, waited = float("inf"), 0
        for row in rows:
            value = sign * row[name] if name in row else float("inf")
            better = value < best - self._options["by"]
            best, waited = (value, 0) if better else (best, waited + 1)
        if waited < self._options["patience"]:
            return False
        print(
            f"step {step}: {name} was {sign * best:.4g} at best and has not become better in {waited} evaluations: the training ends",
            flush=True,
        )
        return True


def best_figure(knob: str | None, ranks: Ranks, figures: Mapping[str, float], step: int) -> float | None:
    """The figure by which the checkpoint after an evaluation is judged, smaller is better; None on other ranks than 0.

    All ranks call it after an evaluation.

    Args:
        knob: `RunSpec.best`; where it is None, and the evaluation has no validation loss, no checkpoint is the best.
        ranks: this process among the others.
        figures: of the evaluation; empty on other ranks than 0.
        step: after so many steps.

    Raises:
        TaskError: the evaluation has no such figure.
    """
    (figure, direction), why = parse_best(knob), ""
    name = _name_in(figures, figure)
    if knob and not ranks.rank and not name:
        why = f"best={knob!r}: the evaluation has no figure {figure!r}; it has {', '.join(figures)}"
    if knob:
        _agreed(ranks, f"best {step}", None, why)
    return (-1 if direction == "max" else 1) * figures[name] if name else None


def is_judged_by(knob: str | None, state: Mapping[str, Any]) -> bool:
    """Is the best checkpoint that a checkpoint's content names the best by this figure (`RunSpec.best`)?"""
    try:
        return parse_best(state["spec"].get("best")) == parse_best(knob)
    except (LookupError, TypeError, AttributeError, SpecError):
        return False


def _name_in(figures: Mapping[str, float], name: str) -> str:
    """What a figure is called there: the loss of an evaluation may have a prefix; "" = there is none."""
    return next((each for each in (name, name.removeprefix("validation_"), f"validation_{name}") if each in figures), "")


def _agreed(ranks: Ranks, topic: str, answer: Any, why: str) -> Any:
    """The answer of rank 0 on all ranks, or its error, so that none waits for a rank that failed."""
    if ranks.world_size > 1:
        answer, why = json.loads(ranks.share(topic, json.dumps([answer, why]).encode())[0])
    if why:
        raise TaskError(why)
    return answer
