"""Starts another program in a rank, after loading torch and excluding its objects from garbage collection (`gc.freeze`).

torchrun starts `python -m workbench.programs.start MODULE …` once per rank; only a user's script and `alone`, in a pod, start without it.

Torch brings 300,000 objects that live as long as the process. Python's cyclic garbage collector walks over them several times while they
are made, again during the training, and when the process ends: a quarter of a short run. Here the collector is off while torch is loaded,
and leaves these objects out later (`gc.freeze`); those of a task are not left out.
"""

import gc
import importlib
import sys

from workbench.runs import failure


def main() -> None:
    """Import a module, and call its `main`, which finds its arguments in `sys.argv`."""
    gc.disable()
    del sys.argv[0]
    try:
        program = importlib.import_module(sys.argv[0])
        import torch._dynamo  # noqa: F401  # the first optimizer and DistributedDataParallel load it
    except BaseException as error:
        failure.record(error)
        raise
    gc.freeze()
    gc.enable()
    program.main()


if __name__ == "__main__":
    main()
