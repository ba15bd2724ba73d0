"""Says whose code a file is (the workbench's, Python's, an installed package's, the user's), and names files and lines for messages."""

import contextlib
import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType

from workbench.core.variables import named_variables

ROOT = Path(__file__).parents[__name__.count(".") - 1]
"""The folder of the package `workbench`."""
_OURS = f"{ROOT.as_posix()}/"


def is_workbench(path: str) -> bool:
    """Is this the path of a file of the workbench?"""
    return _posix(path).startswith(_OURS)


@functools.lru_cache(maxsize=4096)
def is_installed(path: str) -> bool:
    """Is this the path of a file of an installed package?

    >>> is_installed("/usr/lib/python3/dist-packages/numpy/__init__.py"), is_installed("/home/me/train.py")
    (True, False)
    """
    return "/site-packages/" in _posix(path) or "/dist-packages/" in _posix(path) or _posix(path).startswith(_folders("purelib", "platlib"))


@functools.lru_cache(maxsize=4096)
def is_standard(path: str) -> bool:
    """Is this the path of a file of Python's standard library, or of a module that is frozen into Python?"""
    return path.startswith("<frozen") or (_posix(path).startswith(_folders("stdlib", "platstdlib")) and not is_installed(path))


def is_users(path: str) -> bool:
    """Is this the path of a user's code? So is what is typed (`<stdin>`, a cell of a notebook).

    >>> is_users("/home/me/train.py"), is_users("<stdin>"), is_users(functools.__file__), is_users(__file__)
    (True, True, False, False)
    """
    return not (is_workbench(path) or is_installed(path) or is_standard(path))


def code_record(sources: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    """What a run keeps of its code: "code", a digest of each file by name, and "variables", those of this process that the files name."""
    digests = {name: hashlib.blake2b(text, digest_size=8).hexdigest() for name, text in sources.items()}
    return {"code": digests, "variables": named_variables(os.environ, sources.values())}


def imported_sources() -> dict[str, bytes]:
    """The content of each file of the user's that this process has imported, by its path below where it was found: "a.py", "a/b.py"."""
    depths, found = dict[Path, int](), {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.endswith(".py") and is_users(file):
            depths[Path(file)] = 1 + name.count(".") + (Path(file).stem == "__init__")
    for path, depth in depths.items():
        alike = [other.parts for other, its in depths.items() if other.parts[-its:] == path.parts[-depth:]]
        while sum(parts[-depth:] == path.parts[-depth:] for parts in alike) > 1:  # two folders have a file of this name
            depth += 1
        with contextlib.suppress(OSError):
            found["/".join(path.parts[-depth:])] = path.read_bytes()
    return dict(sorted(found.items()))


def near(path: str) -> str:
    """A path relative to the current folder, if it is in it or below; else as it is."""
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or a name such as <stdin>
        return str(Path(path).relative_to(Path.cwd()))
    return path


def users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's in a stack, as "train.py:41 main"; "" = there is none."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else line_of(frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno)


def line_of(code: CodeType, number: int) -> str:
    """A line of a function as text: "train.py:41 main", or "train.py:41" outside of functions."""
    return f"{Path(code.co_filename).name}:{number} {code.co_name}".removesuffix(" <module>")


def _posix(path: str) -> str:
    return path.replace("\\", "/")


@functools.cache
def _folders(*names: str) -> tuple[str, ...]:
    """Folders of this Python by their names in `sysconfig`, as they are written and without symbolic links."""
    paths = [Path(path) for name in names if (path := sysconfig.get_paths().get(name))]
    return tuple({f"{_posix(str(form))}/" for path in paths for form in (path, path.resolve())})
