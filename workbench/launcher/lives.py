"""Lives: of a run that goes on from a checkpoint, what its processes said in each earlier one, in a folder `attempts/<n>` each."""

import contextlib
import os
import shutil
from pathlib import Path

from workbench import rundir

ATTEMPTS = "attempts"
"""Folder of the folders."""
_SAID = (rundir.NODES, rundir.LOGS, rundir.ERRORS, rundir.LAUNCHER_LOG)


def lives(path: Path) -> int:
    """Earlier lives of a run; the number of the next folder, whichever of those before were deleted."""
    return max((int(folder.name) + 1 for folder in (path / ATTEMPTS).glob("*") if folder.name.isdecimal()), default=0)


def put_away(path: Path, number: int | None = None) -> None:
    """What processes said in an earlier life moves to `attempts/<n>`; steps, metrics and checkpoints stay, cut to whole lines.

    Args:
        path: of the run.
        number: of that life; None = what `lives` says.
    """
    old = path / ATTEMPTS / str(lives(path) if number is None else number)
    old.mkdir(parents=True)
    for name in _SAID:
        if (path / name).exists():
            shutil.move(path / name, old / name)
    for name in (rundir.ERRORS, rundir.LOGS):
        (path / name).mkdir()
    for rows in path.glob("*.jsonl"):
        before = rows.stat()
        rundir.cut_to_whole_lines(rows)
        os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))  # when its rank wrote last


def bring_back(path: Path, number: int) -> None:
    """What was put away, wholly or in part, takes its place again.

    Args:
        path: of the run.
        number: of the life that did not begin: what `lives` said before.
    """
    old = path / ATTEMPTS / str(number)
    if not old.exists():
        return
    for said in list(old.iterdir()):
        new = path / said.name
        if new.is_dir():
            shutil.rmtree(new)
        shutil.move(said, new)
    old.rmdir()
    with contextlib.suppress(OSError):  # there are others
        old.parent.rmdir()
