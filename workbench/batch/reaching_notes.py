"""What trials that did not go well have to say, in words."""

from collections.abc import Sequence

from workbench import units
from workbench.batch.reaching_trial import Target, Trial


def notes_of(trials: Sequence[Trial], target: Target, planned: int) -> tuple[str, ...]:
    """The notes of an experiment, most important first.

    Args:
        trials: that are done.
        target: of all of them.
        planned: how many there were to be.
    """
    if not trials:
        return ("no trial has ended yet",)
    found = []
    if all(trial.at_once for trial in trials):
        found.append(
            "every trial's loss was not a number after the first step: nothing was learnt about batches. Look for infinities in the data, "
            'try a learning rate 100 times smaller (lr=), clip_grad_norm=1.0, or precision="fp32"'
        )
    elif not any(trial.steps is not None for trial in trials):
        found.append(_never(trials, target))
    elif missed := sorted({trial.batch for trial in trials} - {trial.batch for trial in trials if trial.steps is not None}):
        found.append(f"not reached at batch {', '.join(map(units.count, missed))}")
    if len(trials) < planned:
        found.append(f"cut off after {len(trials)} of {planned} trials: what was learnt so far")
    return tuple(found)


def _never(trials: Sequence[Trial], target: Target) -> str:
    near = min(trials, key=target.rank)
    never = f"{target} was never reached{_direction(target)}"
    if near.outcome == "diverged":
        return f"{never}: every trial diverged; try a smaller learning rate (lr=)"
    came = f"batch {units.count(near.batch)} with {target.name} {near.best:.4g} after {units.count(near.after)} steps (lr {near.lr:.3g})"
    other = "lower" if target.rises else "higher"
    return (
        f"{never}: nearest came {came}; try a {other} target, max_steps= above {units.count(near.after)}, or other learning rates (retune=)"
    )


def _direction(target: Target) -> str:
    """How a figure's target was understood: whoever meant the other direction finds it here."""
    if target.name == "loss" or target.start is None:
        return ""
    way, other, side = ("rises", "fall", "below") if target.rises else ("falls", "rise", "above")
    return f" (taken as one that {way}, as the untrained model has {target.start:.4g}; one that is to {other} lies {side} that)"
