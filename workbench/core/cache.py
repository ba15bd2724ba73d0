"""Says where the user's cache is, and writes its files, readable by the user only, in one step."""

import contextlib
import functools
import os
import platform
import stat
import tempfile
from pathlib import Path

from workbench.core.checks import folder_in_environment

ENV_CACHE = "WORKBENCH_CACHE"
_VARIABLES = {ENV_CACHE: "", "XDG_CACHE_HOME": "workbench"}
"""Variable → the folder below the one that it names."""


def cache_folder() -> Path:
    """Where the workbench keeps what it has measured: $WORKBENCH_CACHE, else a folder in the user's cache.

    A variable that names no absolute path is ignored; `ignored_variables` says so.
    """
    for name, below in _VARIABLES.items():
        with contextlib.suppress(ValueError):
            if folder := folder_in_environment(name):
                return folder / below
    try:
        return Path.home() / ".cache" / "workbench"
    except RuntimeError:  # no HOME, and a user whom the system does not know, as in a container
        return _temporary_folder()


def ignored_variables() -> list[str]:
    """What is wrong with the variables that say where the cache is, and so does not count."""
    problems = []
    for name in _VARIABLES:
        try:
            folder_in_environment(name)
        except ValueError as error:
            problems.append(f"{error}. Until then it is ignored")
    return problems


def _temporary_folder() -> Path:
    """This user's folder among the temporary files; one of this process where somebody else has that name."""
    folder = Path(tempfile.gettempdir(), f"workbench-{os.geteuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return folder
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="workbench-"))


def host_name() -> str:
    """The name of this machine, fit for the name of a file: a home may be shared by several machines."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in platform.node()) or "here"


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read; whoever reads it meanwhile gets the old text or the new.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:  # mode 0600
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
