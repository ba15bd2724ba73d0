"""Training programs that others have published, in the order of their source, to be run on fake tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.core.gc import collected_before
from workbench.memory.analysis.caching_allocator import CachingAllocator
from workbench.memory.analysis.non_pytorch import cublas_workspace
from workbench.memory.analysis.replay import Replay
from workbench.memory.estimate import building
from workbench.memory.estimate.dry_run import DryRun, Gpu, dry_run, kept_state

AMPERE = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A program and what it took."""

    measured: dict[str, float]
    """"allocated", "reserved" → bytes."""
    source: str
    program: Callable[[DryRun], None]
    capability: tuple[int, int] = AMPERE
    precision: torch.dtype | None = None
    steady: bool = False
    """The last cycle's peak was measured, not the whole run's."""

    def predicted(self) -> dict[str, int]:
        """What we say: bytes."""
        gpu = Gpu(precision=self.precision, capability=self.capability, workspace=cublas_workspace(self.capability))
        with collected_before(), kept_state(), dry_run(gpu) as run, run.recorder.hooks():
            self.program(run)
        log = run.recorder.log
        steps, allocator = Replay(log, 512).steps, CachingAllocator().run(log.events)
        return {"allocated": steps[max(steps)] if self.steady else allocator.peak_allocated, "reserved": allocator.peak_reserved}


def training(
    build: Callable[[], nn.Module],
    batch: Callable[[], Any],
    forward: Callable[[nn.Module, Any], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    clear_before_backward: bool = False,
) -> Callable[[DryRun], None]:
    """Three steps of a loop that holds its last batch and output until the next ones are there.

    Args:
        build: makes the model.
        batch: makes a batch.
        forward: (model, batch) → loss and what else is kept.
        optimizer: of the parameters.
        accumulation: micro-batches per step.
        autocast: under autocast of this type; of fp16, with a GradScaler.
        dtype: of the model.
        clear_before_backward: gradients are cleared between forward and backward, not after the step.
    """

    def program(run: DryRun) -> None:
        recorder = run.recorder
        with recorder.pause():  # what builds the model takes no memory of the GPU
            model = building.build(build)
            model = (model.to(dtype) if dtype else model).train()
        run.model(model)
        recorder.attach(model)
        stepping = optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
        for recorder.step in range(3):
            for left in reversed(range(accumulation)):
                recorder.mark("data")
                given = run.batch(batch())
                recorder.mark("forward")
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    kept = forward(model, given)
                if clear_before_backward and left == accumulation - 1:
                    stepping.zero_grad()
                recorder.mark("backward")
                scaler.scale(kept[0]).backward()
                recorder.mark("between")
            recorder.mark("optimizer")
            scaler.step(stepping)
            scaler.update()
            recorder.mark("end")
            if not clear_before_backward:
                stepping.zero_grad()

    return program


def cycles(
    make: Callable[[], tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]], backward_only: bool = False
) -> Callable[[DryRun], None]:
    """Forward and backward of a module four times, gradients adding up and the graph retained, as Liger-Kernel measures."""

    def program(run: DryRun) -> None:
        x, function = make()
        out = function(x) if backward_only else None
        gradient = None if out is None else torch.randn_like(out)
        for run.recorder.step in range(4):
            run.recorder.mark("forward")
            once = function(x) if out is None else out
            given = torch.randn_like(once) if gradient is None else gradient
            run.recorder.mark("backward")
            once.backward(given, retain_graph=True)
            del once, given

    return program
