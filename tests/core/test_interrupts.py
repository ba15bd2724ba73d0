"""Ctrl-C while torch calls Python: it comes at a moment at which it can, and leaves everything as it was."""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.forked import Forks
from workbench.core import interrupts
from workbench.harness import observe

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
turns = list(map(int, sys.argv[1:]))
for turn in turns:
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
assert came == len(turns)
"""


@pytest.mark.parametrize("turns", [range(3, 12, 5), pytest.param((0, 1, 2, 4, 6, 9, 11), marks=pytest.mark.slow)], ids=["some", "more"])
def test_an_estimate_is_interrupted_at_any_moment(tmp_path: Path, turns: Sequence[int], forks: Forks) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = forks.run(tmp_path, program, *map(str, turns))
    assert done.returncode == 0, done.stderr[-3000:]


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
    with interrupts.defer_interrupts():
        interrupts.deliver_interrupt()
        noted()
        noted()
        assert not heard
        interrupts.deliver_interrupt()
        assert heard == [2]
        interrupts.deliver_interrupt()
    assert heard == [2]


def test_or_for_the_end(heard: list[int]) -> None:
    with interrupts.defer_interrupts():
        with interrupts.defer_interrupts():
            noted("workbench.memory.estimate.dry_run")
        assert not heard
    assert heard == [2]


def test_what_waits_is_said_once(heard: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    with interrupts.defer_interrupts():
        noted("my_model")
        assert capsys.readouterr().err == ""  # it came
        noted()
        noted()
        said = capsys.readouterr().err
        assert said.startswith("interrupt noted: it comes after the module that is running; another one after 5 s")
        assert said.count("\n") == 1
    assert heard == [2, 2]


def test_a_stream_that_cannot_be_written_to_does_not_matter(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupts.defer_interrupts():
        monkeypatch.setattr(sys, "stderr", object())
        noted()
        monkeypatch.undo()
        assert not heard
    assert heard == [2]


def test_a_part_of_a_block_in_which_it_comes_at_once(heard: list[int]) -> None:
    with interrupts.allow_interrupts():
        pass  # nothing waits
    with interrupts.defer_interrupts():
        noted()
        with interrupts.allow_interrupts():
            assert heard == [2]
            noted("queue")
            assert heard == [2, 2]
            noted("weakref")  # a callback, from which no exception would come
            assert heard == [2, 2]
            with interrupts.defer_interrupts():  # such as an estimate within a loader
                interrupts.deliver_interrupt()
                noted("queue")
            assert heard == [2, 2, 2]
        assert heard == [2, 2, 2, 2]
        noted("queue")
        assert len(heard) == 4


def test_a_loader_that_hangs_is_left_at_once() -> None:
    net = torch.nn.Linear(2, 1)
    asked: list[float] = []

    def hanging() -> Iterator[torch.Tensor]:
        yield torch.zeros(1, 2)
        asked.append(time.monotonic())
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        queue.Queue[None]().get(timeout=20)

    found = wb.measure_memory(lambda batch: net(batch).sum().backward(), hanging(), model=net)
    assert any(note.startswith("stopped by Ctrl-C after 1 of 3 steps, in which the optimizer makes its states") for note in found.notes)
    assert time.monotonic() - asked[0] < 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_look_at_collectives_is_left_at_the_next_module() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    ran: list[object] = []
    for module in net:
        module.register_forward_hook(lambda module, *_: ran.append(module))
    net[2].register_forward_hook(lambda *_: noted("torch.nn.modules"))
    with pytest.raises(KeyboardInterrupt), observe.recorded_collectives():
        net(torch.zeros(1, 2))
    assert ran == list(net[:3])
    with observe.recorded_collectives():
        pass
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_count_of_collectives_is_left_at_the_next_module() -> None:
    ran: list[str] = []

    class Noting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noted()
            ran.append("to its end")
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        wb.collectives(lambda: torch.nn.Sequential(Noting(2, 2), torch.nn.Linear(2, 2)), torch.zeros(1, 2), world_size=2)
    assert ran == ["to its end"]


def interrupted_instead(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """What `signal.signal` does if an interrupt came just before: the handler that was there raises, and nothing is set."""
    real, calls = signal.signal, iter(range(100))

    def set_handler(number: int, handler: Any) -> Any:
        if next(calls) == turn:
            raise KeyboardInterrupt
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", set_handler)


def test_one_that_comes_before_the_block_has_its_handler_leaves_nothing(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        interrupted_instead(patch, 0)
        with interrupts.defer_interrupts():
            pytest.fail("the block has begun")
    with interrupts.defer_interrupts():
        noted()
        assert not heard  # later blocks are protected
    assert heard == [2]


def test_one_that_comes_as_the_handler_is_put_back_leaves_nothing(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), interrupts.defer_interrupts():
        interrupted_instead(patch, 0)
    noted()
    assert heard == [2]  # at once, by the handler that stayed
    signal.signal(signal.SIGINT, before)
    with interrupts.defer_interrupts():
        noted()
        assert heard == [2]
    assert heard == [2, 2]


def test_a_handler_that_the_block_sets_stays(heard: list[int]) -> None:
    found: list[int] = []
    with interrupts.defer_interrupts():
        noted()
        kept = signal.signal(signal.SIGINT, lambda number, _frame: found.append(number))
        noted()
    assert (heard, found) == ([2], [2])
    noted()
    assert found == [2, 2]
    signal.signal(signal.SIGINT, kept)  # that of a block which is over
    noted()
    assert heard == [2, 2]


def test_code_of_the_users_own_is_left_at_once(heard: list[int]) -> None:
    with interrupts.defer_interrupts():
        noted("my_model")
        assert heard == [2]


def test_a_second_one_is_heard_when_nothing_came(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", 0.0)
    with interrupts.defer_interrupts():
        noted()
        noted()
        assert heard == [2]


def test_elsewhere_nothing_is_changed(heard: list[int]) -> None:
    handlers: list[object] = []

    def run() -> None:
        with interrupts.defer_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.defer_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
