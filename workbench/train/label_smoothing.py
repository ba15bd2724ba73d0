"""Smooths the labels of a task whose loss calls torch's cross entropy, without a change to the task."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from workbench.runs.task import TaskError

_POSITION = 7
"""Of `label_smoothing` among the arguments of `cross_entropy`."""


class LabelSmoothing(TorchFunctionMode):
    """Inside, each `cross_entropy` without a label smoothing of its own gets one, also that of `nn.CrossEntropyLoss` and in a model."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self._smoothing, self._calls = smoothing, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function is cross_entropy:
            self._calls += 1
            if len(args) <= _POSITION and not options.get("label_smoothing"):
                options["label_smoothing"] = self._smoothing
        return function(*args, **options)

    def check(self) -> None:
        """Check that a loss has been smoothed.

        Raises:
            TaskError: none has called `cross_entropy`.
        """
        if not self._calls:
            raise TaskError(
                f"label_smoothing={self._smoothing}: the task's loss does not call torch.nn.functional.cross_entropy, whose labels it "
                "smooths; leave label_smoothing out, or smooth the labels in the task's loss"
            )
