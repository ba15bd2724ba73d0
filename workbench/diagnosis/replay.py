"""`replay`: repeats a step of a run that went wrong, with changes, and says what is to blame."""

import math
import os

from workbench.core import run_directory
from workbench.core.checks import whole_number
from workbench.core.progress import Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.diagnosis.analysis.step_replay import StepReplay, first_bad_step
from workbench.diagnosis.api import BUDGET, check_budget
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec


@accept_synonyms
def replay(run: Run | str | os.PathLike[str], step: int | None = None, *, budget_s: float = BUDGET) -> StepReplay:
    """Repeat a step of a run alone, with changes, and say whether data, learning rate or numerics are to blame for it.

    The run is repeated in this process from the nearest checkpoint before the step, or from its first step, with the same samples and
    random numbers. Then the step is taken as it was, in a higher precision, with a tenth of the learning rate, with the batch of a later
    step, and without each of its samples. Where the weights were bad already, the steps before it are looked at.

    Args:
        run: of a RunSpec, or its directory. Its task's code runs here.
        step: from 1; None = the first whose loss is not finite, or far above those before it.
        budget_s: seconds to spend at most.

    Raises:
        ValueError: it is the run of a script or shards its model, has no such step, or the step cannot be reached in time.
    """
    check_budget(budget_s)
    run = run if isinstance(run, Run) else Run.load(run)
    spec = run.spec
    if not isinstance(spec, RunSpec):
        raise ValueError(f"replay({run!r}): only the run of a task can be repeated, and this is one of a script")
    if spec.parallel != "ddp" or spec.tensor_parallel > 1:
        raise ValueError(
            f"replay({run!r}): a run that shards or splits its model (parallel={spec.parallel!r}) cannot be repeated in one process"
        )
    losses = {int(row["step"]): _number(row["loss"]) for row in run.metric_rows if "loss" in row and "lr" in row}
    if step is None:
        step = first_bad_step(losses)
        if step is None:
            raise ValueError(f"replay({run!r}): no loss stands out among its {len(losses)} steps: name one, replay(run, step)")
    whole_number("step", step, least=1, error=ValueError)
    if step > spec.steps or (losses and step > max(losses) + 1):
        raise ValueError(f"replay({run!r}, step={step}): it has taken {max(losses, default=0)} steps, counted from 1")
    from workbench.diagnosis.measure import step_replay as measure

    folder = run_directory.read_json(run.path / run_directory.RUN_JSON).get("cwd")
    with say_what_was_interrupted("replay"), Waiting("replay", budget_s) as line:
        return measure.replay(run.path, measure.named_task(spec, folder), step, losses, line.say, lambda: line.left)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
