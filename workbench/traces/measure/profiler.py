"""Checks whether torch's profiler can start here, and starts and ends it without Kineto's lines on stderr."""

import contextlib
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch


def why_no_profiler() -> str | None:
    """Why a step cannot be traced; None = it can."""
    autograd: Any = torch.autograd
    if not autograd.kineto_available():
        return "no trace of the step: this torch is built without Kineto"
    if autograd._profiler_enabled():
        return "no trace of the step: a profiler is running already, and torch has only one"
    try:
        with plain_profiler():
            pass
    except (RuntimeError, AssertionError) as error:
        return f"no trace of the step: torch's profiler does not start ({error})"
    return None


@contextlib.contextmanager
def plain_profiler() -> Iterator[Any]:
    """The profiler with nothing but operators and kernels."""
    keep_cupti_for_graphs()
    profiler: Any = torch.autograd.profiler
    profile = profiler.profile(use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None)
    with without_kineto_lines():
        profile.__enter__()
    try:
        yield profile
    finally:
        with without_kineto_lines():
            profile.__exit__(None, None, None)


def keep_cupti_for_graphs() -> None:
    """Have Kineto leave CUPTI in place after a trace if there are CUDA graphs: their next launch, or the next trace, crashes otherwise.

    torch.profiler does so where inductor makes the graphs, but not for those that a program captures itself. (CUDA 11, 12 up to 12.5.)
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    inductor: Any = sys.modules.get("torch._inductor.config")
    kind = torch.cuda.CUDAGraph
    if (inductor is not None and inductor.triton.cudagraphs) or any(issubclass(type(thing), kind) for thing in gc.get_objects()):
        os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
        os.environ["TEARDOWN_CUPTI"] = "0"


KINETO_LINE = re.compile(rb"(USDT|VERBOSE|INFO|WARNING|ERROR|STAGE):\d{4}-\d\d-\d\d .*\.(cpp|h|cu):\d+\] ")
"""What Kineto says on stderr when a trace begins and ends; a notebook would show it."""


@contextlib.contextmanager
def without_kineto_lines() -> Iterator[None]:
    """Keep Kineto's lines off stderr. It reads `KINETO_LOG_LEVEL` once, at its first trace in a process; after that only a filter helps.

    All else that is written to stderr meanwhile follows when the filter ends.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    try:
        own = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            del os.environ["KINETO_LOG_LEVEL"]
            file.seek(0)
            for line in file:
                if not KINETO_LINE.match(line):
                    os.write(2, line)
