"""Reads what Linux control groups allow and use: the files of this process's group and of all above it, in version 2 or version 1.

`launcher.guard` reads them by itself: it runs as a file, without this package.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def control_groups(
    controller: str, in_version_2: Sequence[str], in_version_1: Sequence[str], *, root: Path = CGROUP, proc: Path = PROC
) -> list[tuple[str, ...]]:
    """What some files say, for each control group that has them all, from this process's own up to that of all.

    Args:
        controller: "cpu" or "memory".
        in_version_2: names of the files in version 2.
        in_version_1: names of those that say the same in version 1.
        root: where control groups are mounted.
        proc: where processes are.
    """
    found = []
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers  # version 2 has no controllers here, and one tree for all
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):  # inside a container the path may be that of the host, and not be there
            texts = tuple(text_of(folder / name) for name in (in_version_1 if controllers else in_version_2))
            if all(texts):
                found.append(texts)
            if folder == base:
                break
    return found


def text_of(path: Path) -> str:
    """What a file says; "" where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""
