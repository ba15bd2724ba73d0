"""Answers to the exercises: `check.biggest(run, answer)` says right or wrong, and why."""

from workbench import Run
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
    """Exercise 3: is the faster run still waiting for data (answer "data"), or is it computing (answer "compute")?"""
    wait = sum(t.share("data_wait") for t in after.timelines) / len(after.timelines)
    was = sum(t.share("data_wait") for t in before.timelines) / len(before.timelines)
    truth = "data" if wait > 0.5 else "compute"
    because = f"waiting fell from {was:.0%} to {wait:.0%} of the step."
    _say(answer, answer == truth, because, "compare the two bars: which colour is longest now?")
