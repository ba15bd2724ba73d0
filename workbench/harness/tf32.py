"""TF32: whether fp32 products and convolutions run in it on a GPU, and how that is switched, in all versions of torch.

torch has two ways to say it, `allow_tf32` and, from 2.9 on, `fp32_precision`; after a use of the second, reading the first may raise.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

AMPERE = (8, 0)
"""Compute capability from which GPUs have TF32."""
_NEWER = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
"""The settings below torch.backends that have their own `fp32_precision`."""


def uses_tf32(*, convolution: bool = False) -> bool:
    """Whether torch is set up to compute products of fp32 matrices in TF32 on a GPU that has it, or convolutions."""
    precision = _newer().get("cudnn.conv" if convolution else "cuda.matmul", "none")
    if precision != "none":  # "none" = as the older way says
        return precision == "tf32"
    backend: Any = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # the two ways contradict each other
        return False


def has_tf32(device: torch.device) -> bool:
    """Whether a device can compute in TF32: NVIDIA's from Ampere on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= AMPERE


@contextlib.contextmanager
def tf32(on: bool = True) -> Iterator[None]:
    """Inside, products of fp32 matrices and convolutions run in TF32, or in strict fp32; afterwards torch is set up as before."""
    before = _setup()
    try:
        _switch(on)
        yield
    finally:
        _restore(before)


_own: list[dict[str, Any]] = []
"""How torch was set up before the first `set_tf32` of this process that changed it."""


def set_tf32(on: bool | None) -> None:
    """Run fp32 matrix products and convolutions in TF32 or in strict fp32; None = as before the first call of this function."""
    if on is not None:
        if not _own:
            _own.append(_setup())
        _switch(on)
    elif _own:
        _restore(_own.pop())


def _switch(on: bool) -> None:
    _set_older("high" if on else "highest", on)
    if uses_tf32(convolution=True) != on:  # by `torch.backends.fp32_precision`, which holds for what says nothing itself
        _set_newer({"cudnn.conv": "tf32" if on else "ieee", "cudnn.rnn": "tf32" if on else "ieee"})


def _setup() -> dict[str, Any]:
    """How torch is set up; None = torch's older settings cannot express it."""
    setup: dict[str, Any] = {"products": None, "convolutions": None, "newer": _newer()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(RuntimeError):
            setup["products"] = torch.get_float32_matmul_precision()
        with contextlib.suppress(RuntimeError):
            setup["convolutions"] = torch.backends.cudnn.allow_tf32
    return setup


def _restore(setup: dict[str, Any]) -> None:
    _set_older(setup["products"] or "highest", setup["convolutions"])
    _set_newer(setup["newer"])


def _set_older(products: str, convolutions: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 calls it the older way; it is the one that all versions have
        torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = convolutions


def _newer() -> dict[str, str]:
    """The settings of `fp32_precision`; empty before torch 2.9."""
    backends = {name: _backend(name) for name in _NEWER}
    return {name: backend.fp32_precision for name, backend in backends.items() if hasattr(backend, "fp32_precision")}


def _set_newer(settings: dict[str, str]) -> None:
    for name, precision in settings.items():
        if _backend(name).fp32_precision != precision:
            _backend(name).fp32_precision = precision


def _backend(name: str) -> Any:
    home, _, part = name.partition(".")
    return getattr(getattr(torch.backends, home), part, None)
