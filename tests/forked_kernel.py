"""A Jupyter kernel in which launches have forks for ranks (`tests/forked.py`), in the place of torchrun and new processes.

python tests/forked_kernel.py -f CONNECTION_FILE    with the path of the orders in WORKBENCH_TEST_FORKS
"""

import functools
import json
import os
import sys
from pathlib import Path

NAME = "forks"
"""The kernel's, in a notebook."""
ORDERS = "WORKBENCH_TEST_FORKS"


def install(folder: Path) -> None:
    """Let Jupyter find the kernel, where JUPYTER_PATH has this folder."""
    (there := folder / "kernels" / NAME).mkdir(parents=True)
    command = [sys.executable, str(Path(__file__).resolve()), "-f", "{connection_file}"]
    (there / "kernel.json").write_text(json.dumps({"argv": command, "display_name": NAME, "language": "python"}))


def main() -> None:
    """Start the kernel, as `python -m ipykernel_launcher` does."""
    sys.path[0] = str(Path(__file__).parents[1])
    from tests.forked import torchrun
    from workbench.runs.launch import environment

    environment.torchrun = functools.partial(torchrun, os.environ[ORDERS])
    del sys.path[0]  # IPython puts the notebook's folder there
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
