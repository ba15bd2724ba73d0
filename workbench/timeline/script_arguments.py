"""Replaces arguments that an unedited script gives to its DataLoaders, its optimizer and DDP, as the launch asks for."""

import contextlib
import inspect
import json
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from workbench.core import run_directory
from workbench.core.package import users_line
from workbench.timeline import hooks
from workbench.timeline.reading import is_stream, may_split

OF_LOADER = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
OF_DDP = ("bucket_cap_mb",)
OF_OPTIMIZER = ("optimizer",)
IMPLEMENTATIONS = ("fused", "foreach")
"""Of torch's optimizers: names of the arguments that choose one; the values of "optimizer"."""
WITHOUT_WORKERS: Mapping[str, Any] = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None}
"""What a DataLoader takes that has no workers."""


class ScriptArguments:
    """Wraps the constructors of torch's DataLoader, optimizers and DistributedDataParallel until it is closed."""

    def __init__(self, data_loader: type, data_parallel: type, optimizers: Iterable[type] = ()) -> None:
        """Read what is asked for; what is no JSON object of these arguments changes nothing. The script's own processes do not see it."""
        asked: Any = None
        with contextlib.suppress(ValueError):
            asked = json.loads(os.environ.pop(run_directory.ENV_ARGUMENTS, "null"))
        asked = asked if isinstance(asked, dict) else {}
        self.loader = {name: asked[name] for name in OF_LOADER if name in asked}
        self.ddp = {name: asked[name] for name in OF_DDP if name in asked}
        self.optimizer = asked["optimizer"] if asked.get("optimizer") in IMPLEMENTATIONS else ""
        self.replaced: set[str] = set()
        """The arguments that an object was made with in place of the script's."""
        self.without_workers: set[str] = set()
        """Those that only workers take, and that a loader did not get because it has none."""
        self.places: dict[str, str] = {}
        """The line that makes the DistributedDataParallel, as "ddp"."""
        self._undo = contextlib.ExitStack()
        self._undo.callback(hooks.Patch(data_parallel, "__init__", self._wrap_ddp).remove)
        if self.loader:
            self._undo.callback(hooks.Patch(data_loader, "__init__", self._wrap_loader).remove)
        for kind in optimizers if self.optimizer else ():
            if {*IMPLEMENTATIONS} <= inspect.signature(kind.__init__).parameters.keys():  # type: ignore[misc]
                self._undo.callback(hooks.Patch(kind, "__init__", self._wrap_optimizer).remove)

    def close(self) -> None:
        """Leave the constructors as they were."""
        self._undo.close()

    def say_of(self, optimizer: Any) -> dict[str, Any]:
        """What a row of the rank's file says after the first step of an optimizer: what was replaced, and what could not be."""
        base: Any = next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch."))
        own_step = inspect.unwrap(type(optimizer).step) is not inspect.unwrap(base.step)
        if self.optimizer and not own_step and all(group.get(self.optimizer) for group in optimizer.param_groups):
            self.replaced.add("optimizer")
        used = next((name for name in IMPLEMENTATIONS if optimizer.param_groups[0].get(name)), "")
        named = f"{type(optimizer).__name__}{f'({used})' * bool(used)}"
        return {"replaced": sorted(self.replaced), "without_workers": sorted(self.without_workers), "optimizer": named}

    def _wrap_optimizer(self, make: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(make)

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            given.arguments |= {name: True if name == self.optimizer else None for name in IMPLEMENTATIONS}
            make(*given.args, **given.kwargs)

        return made

    def _wrap_ddp(self, make: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(make)

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> None:
            self.places["ddp"] = users_line(sys._getframe(1))
            given = signature.bind(*args, **kwargs)
            given.arguments |= self.ddp
            make(*given.args, **given.kwargs)
            self.replaced |= self.ddp.keys()

        return made

    def _wrap_loader(self, make: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(make)

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            given.arguments |= self.loader
            if not given.arguments.get("num_workers"):
                given.arguments |= {name: value for name, value in WITHOUT_WORKERS.items() if name in given.arguments}
            make(*given.args, **given.kwargs)
            got = {name for name, value in self.loader.items() if given.arguments[name] == value}
            self.replaced |= got
            self.without_workers |= self.loader.keys() - got

        return made


def _plain(value: Any) -> Any:
    """An option as JSON can have it: a number or a flag of NumPy as one of Python; None if it is neither."""
    if value is None or isinstance(value, bool | int):
        return value
    with contextlib.suppress(TypeError):
        return operator.index(value)
    return bool(value) if type(value).__name__.startswith("bool") else None


def described(loader: Any) -> dict[str, Any]:
    """What a row of the rank's file says of a DataLoader: its options, what its workers do with a stream, and its batches per epoch."""
    given = {name: _plain(getattr(loader, name, None)) for name in (*OF_LOADER, "batch_size")}
    stream = ("split" if may_split(loader) else "unknown") if is_stream(loader) else ""
    epoch = None
    if not stream:
        with contextlib.suppress(Exception):  # a sampler of the user's own may have no length, or fail to tell it
            epoch = len(loader)
    return {**given, "stream": stream, "epoch": epoch}
