"""What a job of Slurm starts. A file of its own, that nobody imports: Python warns of a program that it has imported already.

python -m workbench.runs.launch.in_job begin RUN_DIR    at its start: prints where its machines meet
python -m workbench.runs.launch.in_job step RUN_DIR     in each machine's part of its step
"""

import sys
from pathlib import Path

from workbench.runs.launch import nodes


def main() -> None:
    """See the head of this file."""
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "begin":
        print(nodes.begin(path))
    else:
        nodes.step(path)


if __name__ == "__main__":
    main()
