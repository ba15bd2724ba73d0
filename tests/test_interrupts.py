"""Ctrl-C while torch calls Python: it comes at a moment at which it can, and leaves everything as it was."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.measure import interrupts

PROGRAM = """
import os, signal, sys, threading, torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import workbench as wb

model = lambda: nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)))
batch = torch.zeros(4, 8, 32)
usual = F.dropout, nn.Module._apply, nn.Module.to, torch.compile, torch._subclasses.FakeTensor
asked = {"precision": "amp_bf16"}, {"world_size": 2}, {"world_size": 2, "parallel": "fsdp"}
first = [wb.estimate_memory(model, batch, **knobs).total for knobs in asked]
came = 0
for turn in range(12):
    knobs = asked[turn % 3]
    timer = threading.Timer(0.03 + 0.06 * turn, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            wb.estimate_memory(model, batch, **knobs)
    except KeyboardInterrupt:
        came += 1
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert not dist.is_initialized() and not torch.is_autocast_enabled("cpu")
    assert usual == (F.dropout, nn.Module._apply, nn.Module.to, torch.compile, torch._subclasses.FakeTensor)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert [wb.estimate_memory(model, batch, **knobs).total for knobs in asked] == first
print("came", came)
"""


def test_an_estimate_is_interrupted_at_any_moment(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["came", "12"]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The interrupts that came through, to a handler of this test's own."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: found.append(number))
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def noted(name: str = "torch.nn") -> None:
    """The signal comes while code of a package runs."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    scope = {"handler": handler, "sys": sys, "__name__": name}
    exec("handler(2, sys._getframe())", scope)


def test_it_waits_for_a_moment_that_is_given(heard: list[int]) -> None:
    with interrupts.waiting():
        interrupts.here()
        noted()
        noted()
        assert not heard
        interrupts.here()
        assert heard == [2]
        interrupts.here()
    assert heard == [2]


def test_or_for_the_end(heard: list[int]) -> None:
    with interrupts.waiting():
        with interrupts.waiting():
            noted("workbench.estimate.dry")
        assert not heard
    assert heard == [2]


def test_code_of_the_users_own_is_left_at_once(heard: list[int]) -> None:
    with interrupts.waiting():
        noted("my_model")
        assert heard == [2]


def test_a_second_one_is_heard_when_nothing_came(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", 0.0)
    with interrupts.waiting():
        noted()
        noted()
        assert heard == [2]


def test_elsewhere_nothing_is_changed(heard: list[int]) -> None:
    handlers: list[object] = []

    def run() -> None:
        with interrupts.waiting():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.waiting():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
