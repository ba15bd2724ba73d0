"""`python -m workbench.train.start MODULE …`: what torchrun starts where a launch runs a program of this package rather than a script.

Half a million objects come with torch and live as long as the process. Python's cyclic garbage collector goes over them several times while
they are made, again and again during the training, and when the process ends: a quarter of what a short run takes. Here they are made while
it rests, and are left out of all its later runs (`gc.freeze`); what a task makes is not. A script of the user's is run as it is.
"""

import gc
import importlib
import sys


def main() -> None:
    """Import a module, and call its `main`, which finds its arguments in `sys.argv`."""
    gc.disable()
    del sys.argv[0]
    program = importlib.import_module(sys.argv[0])
    importlib.import_module("torch._dynamo")  # the first optimizer and DistributedDataParallel load it
    gc.freeze()
    gc.enable()
    program.main()


if __name__ == "__main__":
    main()
