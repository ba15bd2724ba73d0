"""What a ScalingExplorer may be asked: clear errors for the rest."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from workbench.checks import did_you_mean
from workbench.cost import Transformer
from workbench.planning import PlanError, plan

ITS_OWN = ("cluster", "global_batch", "samples", "price", "intensity")
"""What the explorer itself takes."""
_SET = ("model", "gpus", "most_gpus", "top", "batch", "steps", "electricity", "pue", "watts", "knobs")
"""Of `wb.plan`: what the explorer turns by itself, what it does not show, or what is not of a Transformer."""


def checked_options(target: Any, global_batch: object, options: Mapping[str, Any]) -> None:
    """Refuse what would be ignored.

    Args:
        target: that is explored.
        global_batch: as it was given.
        options: whatever else was.

    Raises:
        PlanError: a name that means nothing here, and what is allowed.
    """
    planned = isinstance(target, Transformer)
    if not planned and global_batch is not None:
        raise PlanError(f"global_batch={global_batch!r}: known for a model; a curve, and plans, have their own")
    of_plan = [name for name in inspect.signature(plan).parameters if planned and name not in (*_SET, *ITS_OWN)]
    allowed = [*(name for name in ITS_OWN if planned or name != "global_batch"), *of_plan]
    for name in options:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            what = "a model" if planned else f"a {type(target).__name__}"
            raise PlanError(f"ScalingExplorer has no option {name!r}: {hint}For {what} there are {', '.join(allowed)}")


def checked_number(name: str, value: Any, least: str, what: str) -> None:
    """Refuse what is no number, or none of that size.

    Args:
        name: of the argument.
        value: as given.
        least: "above 0" or "of at least 0".
        what: it is.

    Raises:
        PlanError: with what is wanted.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and least == "above 0"):
        raise PlanError(f"{name}={value!r}: a number {least} is wanted, {what}")
