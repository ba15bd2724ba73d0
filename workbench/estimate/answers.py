"""Answers: what a dry run says where a program asks a tensor for its value, which it has not."""

from typing import Any

import torch
from torch import Tensor

TRUE = ("all", "isfinite", "eq", "ge", "le", "lt", "isclose", "logical_and", "bitwise_and")
"""Questions by the operator that asks them: "are all …", "is it finite", "is it equal". What is asserted is true, masks mask nothing."""


def name_of(func: Any) -> str:
    """`aten.all.dim` → "all"."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func)


class Answers:
    """Answers to `.item()`, `bool(tensor)` and the like.

    Every number is 1, so sizes that are computed from it are small, and every question for something unusual (is anything not a number, is
    anything above, did any gradient overflow) is answered no: the step is an ordinary one.

    Attributes:
        asked: how often a value was asked for.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._truth: dict[int, bool] = {}  # address of a storage of truth values → what they say
        self._zeros: set[int] = set()  # addresses of storages of flags that are zero unless something is wrong

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, in sentences."""
        if not self.asked:
            return ()
        times = "once" if self.asked == 1 else f"{self.asked} times"
        return (f"the program asked for the value of a tensor {times} (.item(), bool()): answered 1, and no to what is unusual",)

    def of(self, tensor: Any, *, count: bool = True) -> Any:
        """The value of a fake tensor with one element.

        Args:
            tensor: asked for its value.
            count: it is worth a note: the answer may decide what memory is needed.
        """
        if tensor.constant is not None:  # such as torch.tensor(3)
            return tensor.constant.item()
        self.asked += count
        address = tensor.untyped_storage()._cdata
        if tensor.dtype == torch.bool:
            return self._truth.get(address, False)
        one = 0 if address in self._zeros else 1
        return float(one) if tensor.dtype.is_floating_point else one

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Are two tensors equal? If they can be."""
        self.asked += 1
        return one.shape == other.shape

    def learn(self, name: str, args: Any, out: Any) -> None:
        """See an operator that was run, and remember what it says of its result."""
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            self._zeros.add(args[1].untyped_storage()._cdata)  # found_inf of a GradScaler
        elif isinstance(out, Tensor) and out.dtype == torch.bool:
            self._truth[out.untyped_storage()._cdata] = self._says(name, args)

    def _says(self, name: str, args: Any) -> bool:
        if name in ("logical_not", "bitwise_not"):
            return not self._truth.get(args[0].untyped_storage()._cdata, False)
        return name in TRUE
