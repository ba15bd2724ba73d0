"""Deterministic algorithms: makes torch refuse or replace operators whose result differs from call to call, and undoes that."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What cuBLAS has to know before its first use. Source: NVIDIA, cuBLAS, "Results Reproducibility"."""
_before: list[dict[str, Any]] = []
"""How torch was set up before the first `set_deterministic(True)` of this process."""


def set_deterministic(on: bool) -> None:
    """Use deterministic algorithms alone; False = as torch was set up before this function was called with True.

    An operator that has none raises a RuntimeError which names it.
    """
    cudnn = torch.backends.cudnn
    if on:
        if not _before:
            mode = torch.get_deterministic_debug_mode()
            _before.append({"mode": mode, "deterministic": cudnn.deterministic, "benchmark": cudnn.benchmark})
        for name, value in CUBLAS.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
    elif _before:
        before = _before.pop()
        torch.set_deterministic_debug_mode(before["mode"])
        cudnn.deterministic, cudnn.benchmark = before["deterministic"], before["benchmark"]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch uses deterministic algorithms alone."""
    set_deterministic(True)
    try:
        yield
    finally:
        set_deterministic(False)
