"""Answers to the exercises: `check.biggest(run, answer)` says right or wrong, and why."""

import math
from collections.abc import Mapping

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


def workers_needed(wait: float, training: float, answer: int | None) -> None:
    """Notebook 02, exercise 1: from how many workers on does training set the pace, if making a batch is all waiting?"""
    needed = math.ceil(wait / training)
    because = f"{needed} workers make a batch every {units.seconds(wait / needed)}."
    _say(answer, answer == needed, because, "how often do n workers hand over a batch?")


def shortest_step(loading: float, training: float, cores: int, answer: float | None) -> None:
    """Notebook 02, exercise 2: the shortest step in ms, if loading and training both compute, on so many cores."""
    best = 1e3 * max((loading + training) / cores, training)
    right = answer is not None and abs(answer - best) < 0.05 * best
    _say(answer, right, "all the work of a step, shared by the cores.", "add up all the work of one step; the cores share it.")


def culprit(guess: str | None, found: str) -> None:
    """Notebook 03: is the guess what the experiments found?"""
    _say(guess, guess == found, f"{found}.", f"the experiments say {found}.")


def saves_most(guess: str | None, totals: Mapping[str, int]) -> None:
    """Notebook 04: which of some changes leaves the least memory?"""
    least = min(totals, key=totals.__getitem__)
    because = f"{units.bytes_(totals[least])} are left with it."
    _say(guess, guess == least, because, "look at what is largest at the fullest moment, and at which change touches it.")
