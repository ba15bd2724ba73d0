"""Says where the user's cache is, and writes its files, readable by the user only, in one step."""

import os
import platform
import tempfile
from pathlib import Path

ENV_CACHE = "WORKBENCH_CACHE"


def cache_folder() -> Path:
    """Where the workbench keeps what it has measured: $WORKBENCH_CACHE, else a folder in the user's cache."""
    own = os.environ.get(ENV_CACHE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "workbench")


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
        file.write(text)
    os.replace(file.name, path)
