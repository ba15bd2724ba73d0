"""`python -m workbench.programs.start MODULE …`: how torchrun starts a rank of a launch that runs a program of this package.

300,000 objects come with torch and live as long as the process. Python's cyclic garbage collector goes over them several times while they
are made, again during the training, and when the process ends: a quarter of what a short run takes. Here they are made while it rests, and
are left out of its later runs (`gc.freeze`); what a task makes is not. A script of the user's runs as it is, and a pod's `alone` by itself.
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
