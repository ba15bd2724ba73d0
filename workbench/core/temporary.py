"""Gives the processes of a run a temporary folder for multiprocessing, which the run's guard deletes, even after they were killed."""

import contextlib
import multiprocessing.process
import os
import stat
import tempfile
from pathlib import Path

from workbench.core import run_directory


def multiprocessing_folder(run_id: str, machine: str = "0") -> Path:
    """Where multiprocessing puts its sockets; the guard knows it by the same name."""
    return Path(tempfile.gettempdir(), f"pymp-{run_id[:12]}-{machine}")


def use_multiprocessing_folder() -> None:
    """Let multiprocessing, here and in children, use the folder of the run that this process belongs to; outside of a run it has its own.

    By default each process makes a folder, and one that is killed, as a loader's worker may be, leaves it behind.
    """
    if run_id := os.environ.get(run_directory.ENV_RUN_ID):
        folder = multiprocessing_folder(run_id, os.environ.get(run_directory.ENV_MACHINE, "0"))
        if folder.parent != Path(tempfile.gettempdir()):  # a variable that leads elsewhere
            return
        with contextlib.suppress(OSError):  # then each makes its own
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                multiprocessing.process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
