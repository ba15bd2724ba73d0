"""Starts another program, after loading torch and excluding its objects from garbage collection (`gc.freeze`).

torchrun, which itself starts this way, starts `python -m workbench.programs.start MODULE RUN_DIR …` once per rank, and
workers start so, too; only a user's script and `alone`, in a pod, do without.

Torch brings 250,000 objects that live as long as the process. Python's cyclic garbage collector walks over them several times while they
are made, again during the training, and when the process ends: a quarter of a short run. Here the collector is off while torch is loaded,
and leaves these objects out later (`gc.freeze`); those of a task are not left out.

torchrun computes nothing, so it does without what `import torch` registers for tensors without data: a quarter of its start.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.core import run_directory
from workbench.core.temporary import use_multiprocessing_folder
from workbench.runs import failure
from workbench.runs.entrypoints import CHOOSE_MICRO_BATCH, ESTIMATE_WORKER, TORCHRUN, WORKERS
from workbench.runs.spec import SHARDED

NOT_COMPUTED = "torch._meta_registrations"
"""Private to torch (2.6 to 2.13), which imports it last."""


class Later(ModuleType):
    """A module that is loaded when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def main() -> None:
    """Import a module, and call its `main`, which finds its arguments in `sys.argv`."""
    gc.disable()
    del sys.argv[0]
    if sys.argv[0] == TORCHRUN:
        sys.modules.setdefault(NOT_COMPUTED, Later(NOT_COMPUTED))
    try:
        program = importlib.import_module(sys.argv[0])
        if sys.argv[0] != TORCHRUN:
            use_multiprocessing_folder()
            for library in libraries(*sys.argv):
                importlib.import_module(library)
            from workbench.train import lazy_dynamo  # here, since it loads torch

            lazy_dynamo.defer()
    except BaseException as error:
        if sys.argv[0] not in (TORCHRUN, *WORKERS):  # torchrun is no rank, and a worker tells whoever started it, who may be one
            failure.record(error)
        raise
    gc.freeze()
    gc.enable()
    program.main()


def libraries(program: str, *run_dirs: str) -> Iterator[str]:
    """What else a program will load: for estimates and some trainings, further parts of torch."""
    spec: dict[str, Any]
    if program in (ESTIMATE_WORKER, CHOOSE_MICRO_BATCH):
        yield from ("torch._dynamo", "workbench.memory.api")
    for run_dir in run_dirs:
        with contextlib.suppress(run_directory.DamagedRunError, KeyError):  # the program says so
            spec = run_directory.read_json(Path(run_dir) / run_directory.RUN_JSON)["spec"]
            sharded, split = spec.get("parallel") in SHARDED, spec.get("tensor_parallel", 1) > 1
            if sharded or split or any(spec.get(knob, "none") != "none" for knob in ("checkpointing", "compile")):
                yield "torch._dynamo"
            if sharded:
                yield "torch.distributed.fsdp"
            if spec.get("expert_parallel", 1) > 1:
                yield "torch.distributed.tensor"
            if split:
                yield "torch.distributed.tensor.parallel"
            if spec.get("pipeline_parallel", 1) > 1:
                yield "torch.distributed.pipelining"
            if spec.get("parallel") == "zero1":
                yield "torch.distributed.optim"


if __name__ == "__main__":
    main()
