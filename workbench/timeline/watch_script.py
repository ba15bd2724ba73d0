"""Measures the phases of an unedited script, by hooks on the loaders, models and optimizers that it uses."""

import contextlib
import functools
import gc
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain, compress
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from workbench.core import gc as collector
from workbench.core.package import is_users, line_of, users_line
from workbench.core.synonyms import accept_synonyms
from workbench.timeline import hooks, rank_log
from workbench.timeline.loops import Loop
from workbench.timeline.marks import BACKWARD, DATA_WAIT, END_PHASE, FORWARD, IDLE, NEXT, MarkRecorder, new_recorder
from workbench.timeline.reading import FirstBatches
from workbench.timeline.recording import Recording
from workbench.timeline.script_arguments import ScriptArguments, described
from workbench.timeline.timeline import Pause, Timeline

if TYPE_CHECKING:
    import torch


SEARCH_AFTER = (1, 3, 30, 300)
"""After so many optimizer steps in a row without a forward, models are looked for once more; each number is used once. The script may have
gone on to another model, or call only a part of one, so the parts of those known are taken, too. (A search takes some 50 ms,
nearly all of it to list the 300,000 objects that live once torch is imported; the first one delays the first batch.)"""
LOOPS_OF = {"transformers.trainer": "transformers", "lightning.pytorch": "lightning", "pytorch_lightning": "lightning"}
"""How the name of the module begins that has a framework's training loop → the framework."""
SHORTEST_PAUSE, SHORTEST_CHECKPOINT = 1e-3, 1e-4
"""Seconds of an evaluation and of a checkpoint below which they are not noted."""
SAVERS = {
    "torch": "save",
    "torch.distributed.checkpoint": "save",
    "safetensors.torch": "save_file",
    "transformers.modeling_utils": "PreTrainedModel.save_pretrained",
    "transformers.trainer": "Trainer._save_checkpoint",
    "accelerate.accelerator": "Accelerator.save_state",
    "lightning.pytorch.trainer.trainer": "Trainer.save_checkpoint",
    "pytorch_lightning.trainer.trainer": "Trainer.save_checkpoint",
}
"""Module → what saves checkpoints there. Calls are timed once the module is loaded; of calls inside each other, the outermost counts."""
LEADER_RETIRES_AFTER = 10
"""After so many steps of other optimizers in a row, the one whose steps end the steps of a loop without loader is taken to be retired."""

_installed: "ScriptWatcher | None" = None


MakeTracedSteps = Callable[[Callable[[int, int], None]], Any]
"""Makes a `traces/measure/profiled_run.py:RunProfiler`, given the function to call with the steps that statistics leave out."""


def install(borders: MakeTracedSteps | None = None) -> "ScriptWatcher":
    """Watch whatever this process trains, into its rank's file of the run directory; a second call gives the first one's result.

    Args:
        borders: makes what traces some of the steps; None = none are traced.
    """
    global _installed
    if _installed is None:
        _installed = ScriptWatcher(borders)
    return _installed


def stop_for_own_timer() -> None:
    """Stop watching: the script measures itself (`wb.watch`, `StepTimer`), and that wins."""
    if _installed is not None:
        _installed.uninstall()


@accept_synonyms
@contextlib.contextmanager
def watching() -> Iterator["ScriptWatcher"]:
    """Watch a training whose loop you do not write yourself: `with wb.watching() as watched: trainer.train()`.

    Loaders, modules and optimizers are found as they are used, including those of Hugging Face's Trainer and of Lightning.
    `watched.timeline` has the steps, and `wb.diagnose(watched.timeline)` says what they spend their time on. A loop inside that measures
    itself, with `wb.watch` or a `StepTimer`, ends the watching. In a script that is launched with `watch=True`, the timeline covers the
    whole script.
    """
    if _installed is not None:
        yield _installed
        return
    watcher = install()
    try:
        yield watcher
    finally:
        if _installed is watcher:
            watcher.uninstall()


class ScriptWatcher:
    """Watches this process from outside, until it ends or measures itself.

    * Every pass over a DataLoader is a loop; loops that see no optimizer step (validation) give no steps.
    * Where no such pass is open, training is a `bare` loop, whose steps go from the end of one optimizer step to the end of the next.
    * Models are the modules with parameters that are part of no other module. They are found among the living objects: hooks on all modules
      would find them, too, but make `torch.compile` compile everything twice.
    """

    def __init__(self, borders: MakeTracedSteps | None = None) -> None:
        """Begin to watch; see `install`."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        expected = {
            DATA_WAIT: "no DataLoader was seen in the training loop: waiting for data, if any, is in other",
            FORWARD: "no module was called in the training loop: forward is in other",
            BACKWARD: "backward was never called: a backward through torch.autograd.grad, if any, is in other",
        }
        self._threads = torch.get_num_threads
        self._recording = Recording(recorder=self._make_recorder, steps_by="optimizer", expected=expected, load=True)
        self._steps = 0  # those of loops whose optimizer step was taken
        self._first_batches = FirstBatches(warn=self._recording.warn, say=self._recording.say, steps=lambda: self._steps)
        self._here = True  # False in a forked child
        # The lines that are known of each open loop; None = they are told
        self._places: weakref.WeakKeyDictionary[Loop, dict[str, str]] | None = weakref.WeakKeyDictionary()
        self._loaders = weakref.WeakKeyDictionary[Loop, dict[str, Any]]()
        self._bare: Loop | None = None
        self._leader: Callable[[], torch.optim.Optimizer | None] = lambda: None  # its steps end those of the bare loop
        self._strangers = 0  # steps of other optimizers since the leader's last
        self._models = weakref.WeakSet[torch.nn.Module]()
        self._trained = weakref.WeakSet[torch.nn.Module]()  # those that were in training mode at an optimizer step
        self._without_forward = 0  # optimizer steps since one was seen
        self._searches = [*SEARCH_AFTER]
        self._newest: Callable[[], Loop | None] = lambda: None
        self._pass: tuple[Loop | None, float, int] = None, 0.0, 0  # the loop with the last step, when its first one was, and steps before
        self._evaluation: tuple[float, int, str, int] | None = None  # when it began, after so many steps, where, and `id` of the model
        self._borders = borders(self._recording.leave_out) if borders else None
        self._undo = contextlib.ExitStack()
        if self._borders:
            self._undo.callback(self._borders.close)
        self._arguments = ScriptArguments(
            DataLoader, torch.nn.parallel.DistributedDataParallel, filter(lambda kind: isinstance(kind, type), vars(torch.optim).values())
        )
        self._undo.callback(self._arguments.close)
        self._undo.enter_context(hooks.marked_functions())
        self._undo.callback(hooks.Patch(DataLoader, "__iter__", self._wrap_iter).remove)
        self._undo.callback(hooks.Patch(torch.nn.Module, "eval", self._wrap_eval).remove)
        self._undo.callback(hooks.Patch(torch.nn.Module, "train", self._wrap_train).remove)
        with contextlib.suppress(Exception):  # whatever is wrong with it, the script will see that itself, if it uses it
            import safetensors.torch  # noqa: F401  # 2 ms: so that a script that imports the function itself has the one that is timed
        self._saves = False  # is a checkpoint being saved?
        self._savers = {**SAVERS}  # those that are not timed yet
        self._time_savers()
        self._undo.callback(register_optimizer_step_pre_hook(hooks.optimizer_begins).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._optimizer_ends).remove)

    @property
    def timeline(self) -> Timeline:
        """The steps so far."""
        return self._recording.timeline

    def __repr__(self) -> str:
        return "wb.watching()"

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()

    def uninstall(self) -> None:
        """Remove every hook, and write what is left."""
        global _installed
        _installed = None
        self._undo.close()
        self._end_bare()
        self._recording.close()

    def leave(self) -> None:
        """Record nothing: this is a forked child (a DataLoader worker)."""
        self._here = False

    # Loops

    def _wrap_iter(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @wraps(iterate)
        def watched(loader: object) -> Iterator[Any]:
            if not self._here or threading.current_thread() is not threading.main_thread():
                return iterate(loader)
            self._end_bare()
            if not self._models:
                self._find_models()
            evaluates = hooks.OPEN_LOOPS.top is not None and not all(map(_trains, self._trained))
            if evaluates:
                self._begin_evaluation(sys._getframe(1))
            if self._borders:
                self._borders.begin(loader)
            loop = self._recording.open()
            loop.evaluates, self._newest = evaluates, weakref.ref(loop)
            if self._places is not None:
                self._loaders[loop] = had = described(loader)
                self._places[loop] = {"loop": users_line(sys._getframe(1)), "dataset": _line_of_dataset(getattr(loader, "dataset", None))}
                self._places[loop]["workers"] = str(had["num_workers"] or "")
            loop.mark(NEXT)
            batches = iterate(loader)  # starts the workers now, as it would without us; the first batch may be asked for much later
            loop.mark(IDLE)
            measured = loop.run(hooks.OPEN_LOOPS, self._first_batches.of(loader, batches), sized_by=loader)
            return _Batches.of(self._borders.between(loop, measured) if self._borders else measured, batches)

        return watched

    def _begin_bare(self) -> None:
        if self._here and hooks.OPEN_LOOPS.top is None:
            self._bare = self._recording.open()
            hooks.OPEN_LOOPS.begin(self._bare)
            self._bare.border()

    def _end_bare(self) -> None:
        if self._bare:
            hooks.OPEN_LOOPS.end(self._bare)
            self._bare = None

    # Evaluations and checkpoints inside a training loop

    def _wrap_eval(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(evaluate)
        def noted(module: Any) -> Any:
            if module.training and self._is_watched(module):
                self._begin_evaluation(sys._getframe(1), module)
            return evaluate(module)

        return noted

    def _wrap_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def noted(module: Any, mode: bool = True) -> Any:
            if self._evaluation is not None and mode and self._evaluation[3] in (id(module), id(None)) and self._is_watched(module):
                self._end_evaluation()
            return train(module, mode)

        return noted

    def _is_watched(self, module: Any) -> bool:
        """Is it a model, or all that one has inside, as what DDP wraps?"""
        return any(module is model or [*model.children()] == [module] for model in self._models)

    def _begin_evaluation(self, frame: FrameType, module: Any = None) -> None:
        """An evaluation begins, if this is inside a training loop; it is over when the model trains again, at the latest at a step."""
        if self._here and self._steps and self._evaluation is None and get_ident() == hooks.OPEN_LOOPS.thread:
            self._evaluation = time.perf_counter(), self._steps, users_line(frame), id(module)
            if (newest := self._newest()) and newest.thread is None:  # Lightning makes the iterator first
                newest.evaluates = True

    def _end_evaluation(self) -> None:
        if self._evaluation is not None and self._here:
            (began, after, line, _), self._evaluation = self._evaluation, None
            self._evaluated(Pause("evaluation", time.perf_counter() - began, after, line))

    def _evaluated(self, pause: Pause) -> None:
        """Note an evaluation, if it is long beside a step: a training may evaluate in each step, to act before it learns."""
        _, began, before = self._pass
        usual = (time.perf_counter() - began - pause.seconds) / max(1, self._steps - before - 1)  # with the pauses before
        if pause.seconds >= max(SHORTEST_PAUSE, usual):
            self._recording.paused(pause)

    def _time_savers(self) -> None:
        """Time what saves checkpoints, in the modules that are loaded by now."""
        for module in [*self._savers.keys() & sys.modules.keys()]:
            *path, name = self._savers.pop(module).split(".")
            owner: Any = sys.modules[module]
            for part in path:
                owner = getattr(owner, part, None)
            if callable(getattr(owner, name, None)):
                self._undo.callback(hooks.Patch(owner, name, functools.partial(self._wrap_save, module)).remove)

    def _wrap_save(self, module: str, save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._saves or not (self._here and self._steps and get_ident() == hooks.OPEN_LOOPS.thread):
                return save(*args, **kwargs)
            began, evaluation, self._saves = time.perf_counter(), self._evaluation, True
            try:
                return save(*args, **kwargs)
            finally:
                self._saves, took = False, time.perf_counter() - began
                self._evaluation = evaluation and (evaluation[0] + took, *evaluation[1:])
                if took >= SHORTEST_CHECKPOINT:
                    self._recording.paused(Pause("checkpoint", took, self._steps, users_line(sys._getframe(1))))

        noted.__module__ = module  # where it is found by its name: it can be pickled meanwhile
        return noted

    # Optimizers

    def _optimizer_ends(self, optimizer: "torch.optim.Optimizer", _args: object, _kwargs: object, /) -> None:
        open_loops = hooks.OPEN_LOOPS
        if get_ident() != open_loops.thread and open_loops.top is not None:
            if open_loops.top is self._bare:
                self._strangers += 1
                if self._strangers >= LEADER_RETIRES_AFTER:  # training goes on in another thread
                    self._end_bare()
                    self._strangers, self._leader = 0, weakref.ref(optimizer)
                    self._begin_bare()
            return
        now = open_loops.now
        open_loops.marks.extend((now(), END_PHASE))
        if self._evaluation is not None:
            self._end_evaluation()
            self._trained = weakref.WeakSet(filter(_trains, self._models))  # not those that are frozen
        if (top := open_loops.top) is not None and not top.updated:  # of several optimizers, one ends the step
            if top is not self._pass[0]:
                self._pass = top, time.perf_counter(), self._steps
            top.updated = True
            self._steps += 1
            if self._savers and not self._steps & (self._steps - 1):  # after 1, 2, 4, 8 … steps
                self._time_savers()
        if self._places is not None and open_loops.top is not None:
            places = {
                **self._places.get(open_loops.top, {}),
                **self._arguments.places,
                "step": users_line(sys._getframe(1)),
                "framework": _framework(sys._getframe(1)),
            }
            self._recording.record_code()
            self._recording.say({"places": {name: line for name, line in places.items() if line}})
            if reduced := reduced_bytes(self._models):
                self._recording.say({"gradients": reduced})
            if loader := self._loaders.get(open_loops.top):
                self._recording.say({"loader": loader})
            self._recording.say({**self._arguments.say_of(optimizer), "threads": self._threads()})
            self._places, self._trained = None, weakref.WeakSet(filter(_trains, self._models))
        if self._borders:
            self._borders.stepped(open_loops.top)
        if open_loops.forward:
            open_loops.forward, self._without_forward = False, 0
        else:
            self._without_forward += 1
            if self._without_forward >= next(iter(self._searches), math.inf):
                del self._searches[0]
                self._find_models()
        if open_loops.top is None:  # the first step of a bare loop cannot be timed: nothing announced it
            self._leader = weakref.ref(optimizer)
            self._first_batches.without_loader()
            self._begin_bare()
        elif open_loops.top is self._bare:
            leader = self._leader()
            self._strangers = 0 if optimizer is leader else self._strangers + 1
            if leader is None or self._strangers >= LEADER_RETIRES_AFTER:
                self._leader, leader = weakref.ref(optimizer), optimizer
            if optimizer is leader:
                open_loops.read_ended()
                self._bare.border()
                if self._borders:
                    self._borders.reached(self._bare)

    # Models

    def _find_models(self) -> None:
        from torch.nn import Module

        kinds, more = set[type](), [Module]
        while more:
            kind = more.pop()
            more += [] if kind in kinds else type.__subclasses__(kind)
            kinds.add(kind)
        modules = _modules(gc.get_objects(), kinds)
        if not self._models and gc.get_freeze_count() and not any(map(_has_weights, modules)):
            modules = _modules(collector.live_objects(), kinds)  # only then: a program that freezes wants no pauses of the collector
        inner = {id(child) for module in modules if module not in self._models for child in module.children()}
        for module in modules:
            if id(module) not in inner and module not in self._models and _has_weights(module):
                self._models.add(module)
                self._recording.note_device(str(next(module.parameters()).device))
                self._undo.callback(hooks.on_model(module, self._forward_alone).remove)

    def _forward_alone(self) -> None:
        """A model is called, and no loop runs."""
        hooks.OPEN_LOOPS.forward = True
        if threading.current_thread() is threading.main_thread():  # another may serve, or fill a queue
            self._begin_bare()

    def _make_recorder(self) -> MarkRecorder:
        """By the clock of the device that the models are on; of several, the current one."""
        weights = (next(model.parameters(), None) for model in self._models)
        devices = {weight.device for weight in weights if weight is not None and weight.device.type == "cuda"}
        current = rank_log.current_device()
        return new_recorder(None if any(device.index == current for device in devices) else min(devices, key=str, default=None))


def reduced_bytes(models: Iterable[Any]) -> int:
    """Bytes of the gradients that DDP reduces in a step; 0 = none of the models is in DDP."""
    wrapped = [model for model in models if type(model).__name__ == "DistributedDataParallel"]
    return sum(weight.nbytes for model in wrapped for weight in model.parameters() if weight.grad is not None)


def _line_of_dataset(dataset: Any) -> str:
    """Where a dataset of the user's makes a sample, as "train.py:12 Pictures.__getitem__"; "" = it is a package's."""
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):  # a Subset, for example
        dataset = dataset.dataset
    for name in ("__getitems__", "__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None and is_users(code.co_filename):
            return line_of(code.replace(co_name=f"{type(dataset).__name__}.{name}"), code.co_firstlineno)
    return ""


def _framework(frame: FrameType | None) -> str:
    """The framework whose training loop the user's code has called; "" = the loop is the user's own."""
    inner = ""
    while frame is not None and not is_users(frame.f_code.co_filename):
        inner, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return next((name for module, name in LOOPS_OF.items() if inner.startswith(module)), "")


def _modules(objects: list[object], kinds: set[type]) -> list[Any]:
    """The modules among objects, by their classes: `isinstance` would call into proxies."""
    return [candidate for candidate in compress(objects, map(kinds.__contains__, map(type, objects))) if "_parameters" in vars(candidate)]


def _trains(module: Any) -> bool:
    """Is it in training mode? What only wraps a model, as DDP does, may stay so."""
    return module.training and any(part.training for part in [*module.children()] or [module])


def _has_weights(module: Any) -> bool:
    return next(module.parameters(), None) is not None


class _Batches(chain[Any]):
    """What an unedited script gets from `iter(loader)`: batches that are measured, and for all else the loader's own iterator.

    It is an `itertools.chain` because that passes batches on without a line of Python.
    """

    _own: Iterator[Any]

    @classmethod
    def of(cls, measured: Iterator[Any], own: Iterator[Any]) -> "_Batches":
        """The batches of `measured`, which come from `own`."""
        batches = cls(measured)
        batches._own = own
        return batches

    def __len__(self) -> int:
        return len(self._own)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)  # the script was written for that iterator, and may use anything of it


def _in_child() -> None:
    if _installed:
        _installed.leave()


os.register_at_fork(after_in_child=_in_child)
