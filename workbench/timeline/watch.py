"""watch(): measures the phases of a training loop by hooks on its model and optimizer, so that the loop is not edited."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.core.checks import objects
from workbench.core.synonyms import accept_synonyms
from workbench.timeline import hooks, watch_script
from workbench.timeline.analysis.alarm_events import AlarmEvent
from workbench.timeline.loops import MeasuredBatches, check_loader
from workbench.timeline.marks import BACKWARD, FORWARD, MarkRecorder, new_recorder
from workbench.timeline.reading import FirstBatches
from workbench.timeline.recording import Recording
from workbench.timeline.timeline import Timeline

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


@accept_synonyms
def watch(
    loader: Iterable[T],
    *,
    model: "torch.nn.Module | Sequence[torch.nn.Module] | None" = None,
    optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
    alarm: bool | str = False,
) -> "Watch[T]":
    """Watch a training loop: `for batch in wb.watch(loader, model=model, optimizer=optimizer):`, and nothing else changes.

    `data_wait` is the time blocked in `next(loader)`; `forward` lasts from the call of the model to the start of backward (so it includes
    the loss); `backward` is `loss.backward()`; `optimizer` is `optimizer.step()`; `h2d` is the copies to a CUDA device; `other` is the
    rest. A step ends at the first `next(loader)` after an optimizer step. Batches without an optimizer step (as in an evaluation loop) are
    not steps. Hooks and wrappers exist only while the loop runs, however it ends. A watched loop inside another one has its own timeline;
    in the outer loop its time is `other`.

    Args:
        loader: a DataLoader or any iterable of batches.
        model: the module that the loop calls (under DDP or DataParallel: the wrapper), or several.
        optimizer: the optimizer, or several. Without an optimizer, each batch counts as a step.
        alarm: True = report on stderr, in the notes and in the run directory when a phase, the throughput or the memory has changed
            permanently, or when the loss on which backward is called has risen permanently, and since which step. A separate thread does
            this. Changes that it still holds back are reported when the loop ends; the summary of all comes at exit or with `close()`.
            "experiments": it may then also time a small computation, which shows whether the machine became slower. "trace": if
            something became slower, it may also trace a few steps, at most three times, into the folder `alarms` of the run directory.

    Returns:
        An iterable of the loader's batches; its `.timeline` grows with every pass, `.alarms` are the changes so far, and `.close()` ends
        the alarm and the rank's file. In a notebook, whose process goes on, call it after the last loop.

    Raises:
        ValueError: the loader is not an iterable, the model not a module, or the optimizer not an optimizer.
    """
    return Watch(loader, model=model, optimizer=optimizer, alarm=alarm, load=True)


class Watch(MeasuredBatches[T]):
    """The batches of a watched loader; every `for` over it is one pass."""

    def __init__(
        self,
        loader: Iterable[T],
        *,
        model: "torch.nn.Module | Sequence[torch.nn.Module] | None" = None,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
        recorder: Callable[[], MarkRecorder] | None = None,
        alarm: bool | str = False,
        load: bool = False,
    ) -> None:
        """See `watch`; `recorder`, for tests, makes the mark recorder of a pass in place of a real clock. `load`: see `Recording`."""
        import torch

        check_loader(loader, "wb.watch")
        super().__init__(loader)
        self._models: list[torch.nn.Module] = objects(
            "wb.watch(…, model=…)", model, torch.nn.Module, what="the module that your loop calls"
        )
        inner = [_inner(wrapped) for wrapped in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])]
        self._optimizers: list[torch.optim.Optimizer] = objects(
            "wb.watch(…, optimizer=…)", None if optimizer is None else inner, torch.optim.Optimizer, what="a torch.optim.Optimizer"
        )
        watch_script.stop_for_own_timer()
        notes, expected = [], {BACKWARD: "backward was never called: a backward through torch.autograd.grad, if any, is in other"}
        if self._models:
            expected[FORWARD] = "the watched model was never called: its time is in other. Give wb.watch the module that the loop calls"
        else:
            notes.append("forward is in other: wb.watch was not given a model=")
        if not self._optimizers:
            notes.append("the optimizer's time is in other, and every batch counts as a step: wb.watch was not given an optimizer=")
        self._recording = Recording(
            recorder=recorder or self._make_recorder,
            steps_by="optimizer" if self._optimizers else "batch",
            notes=notes,
            expected=expected,
            alarm=alarm,
            load=load,
        )

        self._first_batches = FirstBatches(warn=self._recording.warn, say=self._recording.say, steps=itertools.count().__next__)

    def __iter__(self) -> Iterator[T]:
        batches = self._first_batches.of(self._loader) if self._optimizers else self._loader
        return self._recording.open().run(hooks.OPEN_LOOPS, batches, self._watching(), sized_by=self._loader)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._recording.end_pass)
            undo.enter_context(hooks.marked_functions())
            for model in self._models:
                undo.callback(hooks.on_model(model).remove)
            for optimizer in self._optimizers:  # copies and checkpoints of an optimizer leave its hooks behind
                undo.callback(optimizer.register_step_pre_hook(hooks.optimizer_begins).remove)
                undo.callback(optimizer.register_step_post_hook(hooks.optimizer_ends).remove)
            yield

    @property
    def timeline(self) -> Timeline:
        """The steps so far, of all passes, without the one that is under way."""
        return self._recording.timeline

    @property
    def alarms(self) -> "tuple[AlarmEvent, ...]":
        """What has changed so far, with `alarm=True`."""
        return self._recording.alarm_events

    def close(self) -> None:
        """Tell the changes that are still held back, print the summary of all, and close the rank's file, if there is one.

        Needed only where the process goes on, as in a notebook: it happens at exit, too. A later pass begins a new alarm.
        """
        self._recording.close()

    def _make_recorder(self) -> MarkRecorder:
        weight = next((p for model in self._models for p in model.parameters()), None)
        device = None if weight is None else weight.device
        self._recording.note_device(str(device or "cpu"))
        return new_recorder(device)

    def __repr__(self) -> str:
        return "wb.watch(…)"

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()


def _inner(optimizer: Any) -> Any:
    """The optimizer in a wrapper that has no hooks of its own (Accelerate's)."""
    while hasattr(optimizer, "optimizer") and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer = optimizer.optimizer
    return optimizer
