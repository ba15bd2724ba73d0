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


def uses_tf32(*, convolution: bool = False) -> bool:
    """Whether torch is set up to compute products of fp32 matrices in TF32 on a GPU that has it, or convolutions."""
    backend: Any = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    precision = getattr(getattr(backend, "conv", None) if convolution else backend, "fp32_precision", "none")
    if precision != "none":  # "none" = as the older way says
        return bool(precision == "tf32")
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # the two ways contradict each other
        return False


def has_tf32(device: torch.device) -> bool:
    """Whether a device can compute in TF32: NVIDIA's from Ampere on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= AMPERE


def set_tf32(on: bool) -> None:
    """Let products of fp32 matrices and convolutions run in TF32, or in strict fp32."""
    _set_products("high" if on else "highest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 calls it the older way; it is the one that all versions have
        torch.backends.cudnn.allow_tf32 = on
    if uses_tf32(convolution=True) and not on:  # by `torch.backends.fp32_precision`, which holds for what says nothing itself
        for part in ("conv", "rnn"):
            setattr(getattr(torch.backends.cudnn, part), "fp32_precision", "ieee")  # noqa: B010


def _set_products(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Inside, products of fp32 matrices run in TF32; afterwards torch is set up as before."""
    matmul: Any = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # was set in the newer way, for CPUs
            before = ""
    if before:
        _set_products("high")
    else:
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        if before:
            _set_products(before)
        if newer is not None:
            matmul.fp32_precision = newer
