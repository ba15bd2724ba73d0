"""What the figures of evaluations decide: when a training ends early (`RunSpec.stop_when`), and which checkpoint is the best."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.runs.combinations import figure_in
from workbench.runs.training_knobs import BETTER, SpecError, parse_best, parse_stop
from workbench.train.ranks import Ranks


class EarlyStop:
    """Asked after each evaluation, on every rank. It keeps nothing itself: the run directory has the evaluations, also in a resumed run."""

    def __init__(self, knob: str, ranks: Ranks, run_dir: Path, warn: Callable[[str], None] = print) -> None:
        """`warn` is called on rank 0: once if the evaluations have no such figure, so that none ends the training; and when one does."""
        self._figure, self._options = parse_stop(knob)
        self._ranks, self._path, self._warn = ranks, run_dir / run_directory.EVALUATIONS, warn
        self._noted = False

    def after(self, step: int) -> bool:
        """Is the training to end after this step, if it was evaluated? All ranks call it, and get the same answer."""
        stop = self._ranks.rank == 0 and self._is_over(step)
        return self._ranks.share(f"stop {step}", b"1" if stop else b"")[0] == b"1" if self._ranks.world_size > 1 else stop

    def _is_over(self, step: int) -> bool:
        evaluated = [row for row in run_directory.LineTail(self._path).read() if row["step"] <= step]
        if not evaluated or evaluated[-1]["step"] != step:
            return False
        rows = [row["figures"] for row in evaluated]
        if not (name := figure_in(rows[-1], self._figure)):
            if not self._noted:
                self._warn(f"stop_when: {_lacking(self._figure, rows[-1])}, so no evaluation ends the training")
            self._noted = True
            return False
        sign = -1 if self._options["best"] == "max" else 1
        best, waited = float("inf"), 0
        for row in rows:
            value = sign * row[name] if name in row else float("inf")
            better = value < best - self._options["by"]
            best, waited = (value, 0) if better else (best, waited + 1)
        if waited < self._options["patience"]:
            return False
        why = f"{name} was {sign * best:.4g} at best and has not become better in {waited} evaluations"
        self._warn(f"stop_when ended the training after step {step}: {why}")
        return True


class BestFigure:
    """Judges the checkpoints after evaluations, on rank 0."""

    def __init__(self, knob: str | None, warn: Callable[[str], None] = print) -> None:
        """
        Args:
            knob: `RunSpec.best`; None = the first figure of `BETTER` that the evaluations have.
            warn: called once if they do not have it: then no checkpoint is the best.
        """
        self._knob, self._warn, self._noted = knob, warn, False
        self._found: str | None = None  # once for all evaluations, so that figures of one kind are compared

    def of(self, figures: Mapping[str, float]) -> float | None:
        """The figure by which a checkpoint after an evaluation is judged, smaller is better; None = it is not, as on other ranks."""
        if self._found is None:
            self._found = self._knob or next((name for name in BETTER if figure_in(figures, name)), None)
        figure, direction = parse_best(self._found)
        if name := figure_in(figures, figure):
            return (-1 if direction == "max" else 1) * figures[name]
        if figures and self._knob and not self._noted:
            self._warn(f"best: {_lacking(figure, figures)}, so no checkpoint is the best")
            self._noted = True
        return None


def lost_best(knob: str | None, state: Mapping[str, Any]) -> str:
    """What it means that the best checkpoint, as a checkpoint names it, was not chosen by `RunSpec.best`; "" = it was, or there is none."""
    if not state.get("best"):
        return ""
    was: Any = "something else"
    with contextlib.suppress(LookupError, TypeError, AttributeError, SpecError):
        was = state["spec"].get("best")
        if parse_best(was) == parse_best(knob):
            return ""
    return (
        f"its best checkpoint so far, of step {state['best'][1]}, was chosen with best={was!r:.80}; from here on the best is chosen with "
        f"best={knob!r} among the evaluations to come, and that file is deleted when it is old"
    )


def _lacking(figure: str, figures: Mapping[str, float]) -> str:
    return f"the evaluation has no figure {figure!r}; it has {', '.join(figures)}"
