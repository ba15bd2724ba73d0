"""Answers: what a dry run says where a program asks a tensor for its value, which it has not."""

import operator
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.estimate.refusals import EstimateError

ENDLESS = 10_000
"""Answers at one place in one forward or backward, from which on it is taken for a loop that a value has to end."""
_OURS = ("torch", "workbench")
"""Packages that are not the program."""
TRUE = ("all", "isfinite", "eq", "ge", "le", "lt", "isclose", "logical_and", "bitwise_and")
"""Questions by the operator that asks them: "are all …", "is it finite", "is it equal". What is asserted is true, masks mask nothing."""
FALSE = ("any", "isnan", "isinf", "isposinf", "isneginf")
"""What is asked for because it is unusual."""
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "ne": operator.ne,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
"""Questions about a number that is given: answered with 1 for what is asked about, so that 1 is below a number of classes."""


def name_of(func: Any) -> str:
    """`aten.all.dim` → "all"."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func)


def _is_ours(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in _OURS)


class Answers:
    """Answers to `.item()`, `bool(tensor)` and the like.

    Every number is 1, so sizes that are computed from it are small, and every question for something unusual (is anything not a number, is
    anything above, did any gradient overflow) is answered no: the step is an ordinary one.

    Attributes:
        asked: how often a value was asked for.
        moment: tells the step and what is being done.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.moment: Callable[[], object] = lambda: None
        self._first = ""  # the place that asked first
        self._places: Counter[tuple[str, int]] = Counter()  # file and line → questions there at this moment
        self._last: object = None
        self._truth: dict[int, bool] = {}  # address of a storage of truth values → what they say
        self._zeros: dict[int, weakref.ref[Any]] = {}  # address → a storage of flags that are zero unless something is wrong

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, in sentences."""
        if not self.asked:
            return ()
        times = "once" if self.asked == 1 else f"{self.asked} times"
        where = f"; first in {self._first}" if self._first else ""
        return (f"the program asked for the value of a tensor {times} (.item(), bool()): answered 1, and no to what is unusual{where}",)

    def of(self, tensor: Any, *, count: bool = True) -> Any:
        """The value of a fake tensor with one element, of which nothing is known.

        Args:
            tensor: asked for its value.
            count: it is worth a note: the answer may decide what memory is needed.

        Raises:
            EstimateError: the program asks again and again.
        """
        if count:
            self._count()
        address = tensor.untyped_storage()._cdata
        if tensor.dtype == torch.bool:
            return self._truth.get(address, False)
        one = self._number(tensor)
        return float(one) if tensor.dtype.is_floating_point else one

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Are two tensors equal? If they can be."""
        self._count()
        return one.shape == other.shape

    def _count(self) -> None:
        self.asked += 1
        if (now := self.moment()) != self._last:
            self._last = now
            self._places.clear()
        frame: Any = sys._getframe(2)
        while frame is not None and _is_ours(str(frame.f_globals.get("__name__", ""))):
            frame = frame.f_back
        if frame is None:
            return
        place = frame.f_code.co_filename, frame.f_lineno
        self._first = self._first or f"{os.path.basename(place[0])}:{place[1]}"
        self._places[place] += 1
        if self._places[place] >= ENDLESS:
            raise EstimateError(
                f"{place[0]}:{place[1]} asked for the value of a tensor {ENDLESS} times in one step: values decide how often this runs, "
                "and a dry run has none. Give the loop an end that is counted, such as for _ in range(…), or measure it: "
                "wb.measure_memory(…)"
            )

    def learn(self, name: str, args: Any, out: Any) -> None:
        """See an operator that was run, and remember what it says of its result."""
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            self._is_zero(args[1])  # found_inf of a GradScaler
        elif isinstance(out, Tensor) and out.dtype == torch.bool and out.layout == torch.strided:
            address, says = out.untyped_storage()._cdata, self._says(name, args)
            if says is None:
                self._truth.pop(address, None)
            else:
                self._truth[address] = says
        elif name in ("sum", "count_nonzero") and self._known(args[0]) is False:
            self._is_zero(out)  # of those that are unusual there are none

    def _says(self, name: str, args: Any) -> bool | None:
        known = self._known(args[0]) if args else None
        if name in ("logical_not", "bitwise_not"):
            return not known
        if name in COMPARISONS and isinstance(args[1], int | float):
            return COMPARISONS[name](self._number(args[0]), args[1])
        if name in TRUE:
            return True if known is None or name != "all" else known
        return False if name in COMPARISONS or name in FALSE else known

    def _is_zero(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self._zeros[storage._cdata] = weakref.ref(storage)

    def _number(self, tensor: Any) -> int:
        """What numbers are."""
        found = self._zeros.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return 0 if found is not None and found() is not None else 1

    def _known(self, tensor: Any) -> bool | None:
        """What truth values say, where that has been seen."""
        strided = isinstance(tensor, Tensor) and tensor.dtype == torch.bool and tensor.layout == torch.strided
        return self._truth.get(tensor.untyped_storage()._cdata) if strided else None
