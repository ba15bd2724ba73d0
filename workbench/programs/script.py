"""Runs an unedited training script as `__main__` in a rank, and records the error if it fails.

    python -m workbench.programs.script [--watch [--profile JSON]] SCRIPT ARGS…

The script sees what plain Python would show it: `sys.argv`, `sys.path[0]`, `__file__`, `__name__`, and a `__main__` that spawned processes
find again. An error is recorded where it leaves the script, or earlier: when the script tears its process group down on the way out
(`try/finally: destroy_process_group()`), which is what makes the other ranks fail and torchrun blame one of them.
Torch is not imported here; the script's own import of it is what gets the teardown watched.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core import run_directory
from workbench.core.temporary import use_multiprocessing_folder
from workbench.runs import failure, rank_watchdog
from workbench.runs.profile import Profile

if TYPE_CHECKING:
    from workbench.runs.out_of_memory import Held


_TEARDOWN_HOME = "torch.distributed.distributed_c10d"
REST = 0.1
"""Seconds between the end of a script and that of Python: a thread of gloo that frees the last tensor of a reduction while Python shuts
down aborts the process ("terminate called without an active exception"), and a script that went well would count as failed."""


class _TeardownWatch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """When torch's process groups are imported, make their teardown record the error that is in flight."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TEARDOWN_HOME:
            return None
        sys.meta_path.remove(self)  # once, and out of the way of the search that follows
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def recording(*args: object, **kwargs: object) -> object:
            if (error := sys.exception()) is not None:
                failure.record(error)
            return destroy(*args, **kwargs)

        module.destroy_process_group = recording  # type: ignore[attr-defined]


def _hold_renames() -> None:
    """Where a proof asks for it, note what this process renames in the folder of checkpoints, or stop before it does.

    Processes that it forks, or that multiprocessing starts anew, do the same.
    """
    run_dir = os.environ.get(run_directory.ENV_RUN_DIR, "")
    asked, renamed = (os.path.join(run_dir, name) for name in (run_directory.HOLD, run_directory.RENAMED))

    def hold(event: str, given: tuple[Any, ...]) -> None:
        if event == "os.rename":
            with contextlib.suppress(OSError, TypeError, ValueError):
                path = os.path.realpath(os.fsdecode(given[0]))
                if path.startswith(folder):
                    with open(renamed, "a") as names:
                        names.write(f"{path.removeprefix(folder)}\n")
                    with open(asked) as file:
                        if file.read().endswith("now"):
                            os.kill(os.getpid(), signal.SIGSTOP)

    with contextlib.suppress(OSError):
        with open(asked) as file:
            folder = file.readline().rstrip("\n") + os.sep
        sys.addaudithook(hold)
        from multiprocessing import spawn  # here: a rank that nobody holds imports nothing that its script does not

        prepare: Any = spawn.get_preparation_data
        spawn.get_preparation_data = lambda name: {**prepare(name), "workbench": _HoldsToo()}


class _HoldsToo:
    """Makes a process hold its renames that unpickles this."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return importlib.import_module(getattr(__spec__, "name", __name__))._hold_renames, ()


def run(script: str, args: Sequence[str]) -> None:
    """Run `script` as `__main__`; what escapes it is recorded and goes on as it came."""
    sys.argv[:] = [script, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __cached__=None)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    sys.modules["__main__"] = main
    sys.excepthook = lambda kind, error, frames: sys.__excepthook__(kind, _as_from(script, error), error.__traceback__)
    process = os.getpid()
    try:
        with io.open_code(script) as file:
            code = compile(file.read(), script, "exec", dont_inherit=True)
        exec(code, main.__dict__)
        if _TEARDOWN_HOME in sys.modules:
            time.sleep(REST)
        ended: BaseException | None = None
    except BaseException as error:
        ended = _as_from(script, error)
        raise
    finally:
        if os.getpid() == process:  # a child that the script forked does not speak for its rank
            failure.conclude(ended, held=_held)


def _held(error: BaseException) -> "Held":
    """What this process held; torch is loaded already where its memory ran out."""
    from workbench.memory.measure.at_oom import held

    return held(error)


def _as_from(script: str, error: BaseException) -> BaseException:
    """The error with the frames above the script, which are ours, taken off its traceback."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return error.with_traceback(frames)


def main() -> None:
    """Read the command line, prepare what it asks for, and run the script."""
    words = sys.argv[1:]
    use_multiprocessing_folder()
    sys.meta_path.insert(0, _TeardownWatch())  # before anything imports torch
    if words[0] == "--watch":
        words.pop(0)
        borders = None
        if words[0] == "--profile":
            from workbench.traces.measure.profiled_script import StepBoundaries

            profile = Profile.of(json.loads(words[1]))
            borders = functools.partial(StepBoundaries, profile) if profile else None
            del words[:2]
        from workbench.timeline import watch_script

        watch_script.install(borders)
        fingerprints = Path(os.environ.get(run_directory.ENV_RUN_DIR, ""), run_directory.FINGERPRINTS)
        if os.environ.get("RANK", "0") == "0" and fingerprints.is_dir():
            from workbench.train.fingerprints import follow_script

            follow_script(fingerprints)
    rank_watchdog.start()
    failure.reserve_memory()
    _hold_renames()
    run(words[0], words[1:])


if __name__ == "__main__":
    main()
