"""Replaces arguments that an unedited script gives to its DataLoaders and to DistributedDataParallel, as the launch asks for."""

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from workbench.core import run_directory
from workbench.core.package import users_line
from workbench.timeline import hooks

OF_LOADER = ("num_workers", "prefetch_factor", "persistent_workers")
OF_DDP = ("bucket_cap_mb",)
WITHOUT_WORKERS: Mapping[str, Any] = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None}
"""What a DataLoader takes that has no workers."""


class ScriptArguments:
    """Wraps the constructors of torch's DataLoader and DistributedDataParallel until it is closed."""

    def __init__(self, data_loader: type, data_parallel: type) -> None:
        """Read what is asked for; what is no JSON object of these arguments changes nothing. The script's own processes do not see it."""
        asked: Any = None
        with contextlib.suppress(ValueError):
            asked = json.loads(os.environ.pop(run_directory.ENV_ARGUMENTS, "null"))
        asked = asked if isinstance(asked, dict) else {}
        self.loader = {name: asked[name] for name in OF_LOADER if name in asked}
        self.ddp = {name: asked[name] for name in OF_DDP if name in asked}
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

    def close(self) -> None:
        """Leave the constructors as they were."""
        self._undo.close()

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
