"""Smooths the labels of a task whose loss calls torch's cross entropy, without a change to the task."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from workbench.runs.task import TaskError

_TORCH, _NAME, _POSITION = torch._C._nn, "cross_entropy_loss", 5
"""The operator that each `cross_entropy` of torch calls, whoever imported it, and the place of `label_smoothing` among its arguments. (A
TorchFunctionMode sees the calls of `cross_entropy` too, and costs 7 µs for each other function of a model.)"""


class LabelSmoothing:
    """Smooths the labels of each `cross_entropy` without a label smoothing of its own, also of `nn.CrossEntropyLoss` and inside a model.

    What is compiled (torch.compile) is compiled anew: once when smoothing begins, and, by torch's own guards, where gradients are off.
    """

    def __init__(self, smoothing: float) -> None:
        self._smoothing, self._calls = smoothing, 0

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Inside, labels are smoothed.

        Raises:
            TaskError: nothing has called `cross_entropy`.
        """
        if not self._calls and "torch._dynamo" in sys.modules:  # graphs that were compiled before have labels that are not smoothed
            torch._dynamo.reset()
        usual = getattr(_TORCH, _NAME)

        def smoothed(*args: Any) -> Any:
            self._calls += 1
            given = list(args)
            given[_POSITION] = given[_POSITION] or self._smoothing
            return usual(*given)

        setattr(_TORCH, _NAME, smoothed)
        try:
            yield
        finally:
            setattr(_TORCH, _NAME, usual)
        if not self._calls:
            raise TaskError(
                f"label_smoothing={self._smoothing}: the task's loss does not call torch.nn.functional.cross_entropy, whose labels it "
                "smooths; leave label_smoothing out, or smooth the labels in the task's loss"
            )
