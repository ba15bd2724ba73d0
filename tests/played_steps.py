"""Steps without work: a clock that only tests move, and the times of steps written by hand."""

from array import array

from workbench.harness.blocks import StepTimes


class Clock:
    """Time that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def laps(*calls: float, wait: float = 0.0, fresh: tuple[int, ...] = ()) -> StepTimes:
    zeros = array("d", [0.0] * len(calls))
    return StepTimes(waits=array("d", [wait] * len(calls)), calls=array("d", calls), delays=zeros, gcs=zeros, fresh=fresh)
