"""Stepping: where the phases of a user's own step begin, for a Recorder; found by hooks, while the step stays as it is."""

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from workbench.measure import interrupts
from workbench.measure.hooks import Patch
from workbench.measure.storages import Recorder
from workbench.memory.log import Mark

RESTING = ("data", "between", "optimizer", "end")
"""Phases after which a module's forward begins a new one."""


class Stepping:
    """Marks a recorder's phases while a step runs.

    Forward begins with the first call of a module, and goes on until backward begins, loss included; a step that calls no module before its
    backward is all forward. The optimizer's phase is the Recorder's own affair.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._phase = ""
        self._depth = 0
        self._running = False
        self._began = 0, 0  # number of records and of the last mark when the batch was there
        self._thread = get_ident()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, modules' calls and backwards are seen."""
        handle = register_module_forward_pre_hook(self._called)
        patch = Patch(torch.autograd, "backward", self._wrap)
        try:
            yield
        finally:
            patch.remove()
            handle.remove()

    def step(self, number: int, fetch: Callable[[], Any], begin: Callable[[], None], step: Callable[[Any], Any]) -> None:
        """Fetch a batch and take one step with it.

        Args:
            number: of the step, from 0.
            fetch: gives the batch.
            begin: called when the batch is there.
            step: takes the batch.
        """
        recorder = self._recorder
        recorder.step = number
        self._mark("data")
        with interrupts.at_once():  # a loader may hang
            batch = fetch()  # without the recorder, which a worker that is forked here would inherit
        take_in(recorder, batch)
        self._began = len(recorder.log.records), len(recorder.log.marks) - 1
        begin()
        try:
            with recorder:
                self._running = True  # now: entering may try out a backward of its own
                step(batch)
        finally:
            self._running = False
        self._was_forward()
        self._mark("end")

    def _mark(self, phase: str) -> None:
        self._phase = phase
        self._recorder.mark(phase)

    def _called(self, _module: nn.Module, _args: Any) -> None:
        if self._running and self._phase in RESTING and not self._depth and get_ident() == self._thread:
            self._mark("forward")

    def _was_forward(self) -> None:
        """Where no module has been called: what has happened since the batch was there was forward."""
        if self._phase != "data":
            return
        first, marked = self._began
        log = self._recorder.log
        log.marks[marked] = Mark("forward", *log.marks[marked][1:])
        for record in log.records[first:]:
            if record.phase == "data":
                record.phase = "forward"

    def _wrap(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self._running or self._depth or get_ident() != self._thread:  # reentrant checkpointing calls it from within
                return backward(*args, **kwargs)
            self._depth += 1
            self._was_forward()
            self._mark("backward")
            try:
                return backward(*args, **kwargs)
            finally:
                self._depth -= 1
                self._mark("between")
                self._recorder.micro += 1

        return marked


def take_in(recorder: Recorder, batch: Any) -> None:
    """Recognise the tensors of a batch."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            recorder.track(leaf, "input")
