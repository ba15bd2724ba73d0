"""What noise_scale does while a launch runs: when it ends early, what it says, and what it returns after an interrupt."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.batch import api
from workbench.batch.api import MIN_NOISE_STEPS, NOISE_LOOK
from workbench.core.checks import check_budget
from workbench.core.progress import Waiting


class Measuring:
    """A run that measures a step in each second of a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
        self.now, self.enough, self.stopped_at, self.left_out = 100.0, enough, 0.0, 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    @property
    def noise_scale(self) -> Any:
        steps = int(self.now - 100)
        if steps < 2:
            raise ValueError("too few steps yet")
        return SimpleNamespace(steps=steps, enough=steps >= self.enough, summary=f"noise scale {steps}")

    @property
    def progress(self) -> tuple[int, int]:
        return int(self.now - 100) + self.left_out, 200

    def stop(self) -> None:
        self.stopped_at = self.now - 100

    def watched(self, budget_s: float | None, *, early: bool = True, seconds: int = 300) -> api._NoiseWatcher:
        line = Waiting("noise_scale", budget_s)
        watch = api._NoiseWatcher(self, line, 200, early)  # type: ignore[arg-type]
        for _ in range(seconds):
            self.now += NOISE_LOOK
            watch.tick()
        return watch


def test_it_ends_when_the_estimate_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Measuring(monkeypatch, enough=80)
    watch = run.watched(None)
    assert (run.stopped_at, watch.stopped) == (80, "80 steps were enough")
    early = Measuring(monkeypatch, enough=3)
    early.watched(None)
    assert early.stopped_at == MIN_NOISE_STEPS  # few steps agree by chance
    told = Measuring(monkeypatch, enough=80)
    assert told.watched(None, early=False).stopped == ""


def test_at_the_end_of_its_budget_it_returns_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Measuring(monkeypatch, enough=1000)
    watch = run.watched(60)
    assert (run.stopped_at, watch.steps) == (60, 60)
    assert watch.stopped.startswith("the budget was spent after 60 of 200 steps: a larger budget_s=")


def test_the_line_counts_the_steps_that_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Waiting, "say", lambda _, now, known="": said.append(now))
    run = Measuring(monkeypatch, enough=1000)
    run.left_out = 5  # while the scale changed
    watch = run.watched(60)
    assert said[-1] == "step 65 of 200, the last 60 count"
    assert watch.stopped.startswith("the budget was spent after 65 of 200 steps")


@pytest.mark.parametrize("budget", [0, -1.0, "long"])
def test_what_is_no_budget(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget_s"):
        check_budget(budget)
