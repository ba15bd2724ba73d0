"""Answers to the exercises: `check.biggest(run, answer)` says right or wrong, and why."""

from workbench import Run, units
from workbench.timeline import PHASES


def _say(answer: object, right: bool, because: str, hint: str) -> None:
    if answer is None:
        print("Your turn: put your answer in place of None and run the cell again.")
    else:
        print(f"Right: {because}" if right else f"Not yet: {hint}")


def biggest(run: Run, answer: str | None) -> None:
    """Exercise 1: which phase takes the largest share of the step?"""
    shares = {phase: sum(t.share(phase) for t in run.timelines) for phase in PHASES}
    largest = max(shares, key=shares.__getitem__)
    hint = f"look at the bar again; the phases are {', '.join(PHASES)}."
    _say(answer, answer == largest, f"{largest} is the longest part of the bar.", hint)


def ceiling(share: float, answer: float | None) -> None:
    """Exercise 2: if a phase has this share of the step, how much faster can removing all of it make the step?"""
    best = 1 / (1 - share)
    right = answer is not None and abs(answer - best) < 0.05 * best
    _say(answer, right, "1 / (1 - share).", "what is left of the step when the share is gone?")


def bound(before: Run, after: Run, answer: str | None) -> None:
    """Exercise 3: does loading (answer "data") or computing (answer "compute") set the pace of the second run?"""
    compute = max(t.without("data_wait").mean() for t in before.timelines)
    step = max(t.mean() for t in after.timelines)
    truth = "data" if step > 1.3 * compute else "compute"
    because = f"its step takes {units.seconds(step)}, and computing alone took {units.seconds(compute)}."
    _say(answer, answer == truth, because, "how long is its step, and how long did the first run compute?")
