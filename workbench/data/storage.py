"""Reads ranges of files below a folder, on this machine or behind fsspec (S3 and others); nothing open is ever pickled.

`os.pread` has no position that forked workers would share, and each process opens descriptors of its own.
"""

import contextlib
import importlib.util
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.data.sample import UnsafeNameError

OPEN_FILES = 256
"""Descriptors that a process keeps open for one folder; the one that was used longest ago is closed for the next."""
ONE_READ = 1 << 30
"""Bytes of one system call; Linux reads at most 2 GiB - 4 KiB."""
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""Protocol → the package that fsspec needs for it."""
_fetched: ContextVar[Mapping[str, bytes | Exception]] = ContextVar("fetched", default={})  # noqa: B039 - never changed, only replaced


class MissingPackageError(ImportError):
    """An optional package is not installed."""


class DataMissingError(FileNotFoundError):
    """A file of a dataset is not where it should be."""


def need(package: str, what: str, *, extra: str = "formats") -> None:
    """Raise if an optional package is not installed; the message has the line that installs it.

    Raises:
        MissingPackageError: it is not there.
    """
    if importlib.util.find_spec(package) is None:
        instead = f", or pip install 'training-workbench[{extra}]' for all formats" if extra else ""
        raise MissingPackageError(f"{what} needs the package {package}, which is not installed. Try: pip install {package}{instead}")


@dataclass(frozen=True, slots=True)
class Range:
    """Some bytes of a file."""

    name: str
    """Relative to the folder; "" = the folder's path is a file itself."""
    offset: int
    length: int


class Storage:
    """The files below a path, which is a folder, a file, or a URL such as "s3://bucket/folder".

    Args:
        root: path or URL.
        options: for fsspec, such as {"endpoint_url": "http://127.0.0.1:5000"}.
    """

    def __init__(self, root: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.root = os.fspath(root).rstrip("/") or "/"
        self.options = dict(options or {})
        self.protocol, found, _ = self.root.partition("://")
        self.remote = bool(found) and self.protocol != "file"
        if found and not self.remote:
            self.root = self.root.removeprefix("file://")
        if self.remote:
            need("fsspec", f"reading {self.protocol}://")
            if self.protocol in PACKAGES:
                need(PACKAGES[self.protocol], f"reading {self.protocol}://", extra="formats" if self.protocol.startswith("s3") else "")
        self._open: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._made: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_made": {}}

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    @property
    def file_system(self) -> Any:
        """fsspec's file system, made anew in each process."""
        pid = os.getpid()
        if pid not in self._made:
            import fsspec

            self._made = {pid: fsspec.filesystem(self.protocol if self.remote else "file", **self.options)}
        return self._made[pid]

    def path(self, name: str = "") -> str:
        """Where a file is.

        Raises:
            UnsafeNameError: the name leads out of the folder.
        """
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise UnsafeNameError(f"{name!r:.90} leads out of {self.root}: names of files below that folder are allowed")
        return f"{self.root}/{name}" if name else self.root

    # --- what is there

    def is_file(self) -> bool:
        """Is the path a file?"""
        return bool(self.file_system.isfile(self.root)) if self.remote else os.path.isfile(self.root)

    def exists(self, name: str = "") -> bool:
        """Is there a file, or a folder?"""
        return bool(self.file_system.exists(self.path(name))) if self.remote else os.path.exists(self.path(name))

    def size(self, name: str = "") -> int:
        """Bytes of a file.

        Raises:
            DataMissingError: it is not there.
        """
        try:
            return int(self.file_system.size(self.path(name))) if self.remote else os.stat(self.path(name)).st_size
        except FileNotFoundError:
            raise self._missing(name) from None

    def files(self) -> list[tuple[str, int, bool]]:
        """(name, bytes, is a symbolic link) of all files below the folder, sorted by name. Links to folders are not entered."""
        if self.remote:
            below = self.file_system._strip_protocol(self.root).rstrip("/") + "/"
            found = self.file_system.find(self.root, detail=True)
            return sorted((path.removeprefix(below), int(about["size"]), False) for path, about in found.items())
        return sorted(self._below(""))

    def _below(self, folder: str) -> Iterator[tuple[str, int, bool]]:
        waiting = [folder]
        while waiting:
            folder = waiting.pop()
            with os.scandir(self.path(folder.rstrip("/"))) as entries:
                for entry in entries:
                    name = folder + entry.name
                    if entry.is_symlink():
                        yield name, 0, True
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{name}/")
                    elif stat.S_ISREG((status := entry.stat(follow_symlinks=False)).st_mode):  # neither pipes nor devices
                        yield name, status.st_size, False

    def link_inside(self, name: str) -> bool:
        """Does a symbolic link lead to a file below the folder?"""
        target = os.path.realpath(self.path(name))
        return target.startswith(os.path.realpath(self.root) + os.sep) and os.path.isfile(target)

    # --- reading

    def read(self, name: str = "", offset: int = 0, length: int = -1) -> bytes:
        """Bytes of a file: fewer than `length` where it ends before; -1 = all that follow.

        Raises:
            DataMissingError: it is not there.
        """
        if self.remote:
            if (whole := _fetched.get().get(self.path(name))) is not None:
                self.file_system  # noqa: B018 - made now: fsspec has one, with connections of its own, for each thread that asks for it
                if isinstance(whole, FileNotFoundError):
                    raise self._missing(name) from None
                if isinstance(whole, Exception):
                    raise whole
                return whole[offset : None if length < 0 else offset + length]
            try:
                data: bytes = self.file_system.cat_file(self.path(name), start=offset, end=None if length < 0 else offset + length)
            except FileNotFoundError:
                raise self._missing(name) from None
            return data
        descriptor = self.descriptor(name)
        if length < 0:
            length = max(0, os.fstat(descriptor).st_size - offset)
        data = os.pread(descriptor, min(length, ONE_READ), offset)
        if len(data) == length or not data:
            return data
        parts, done = [data], len(data)
        while done < length and (data := os.pread(descriptor, min(length - done, ONE_READ), offset + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    @contextlib.contextmanager
    def fetched(self, *names: str) -> Iterator[None]:
        """Inside, these small files of a server are read out of one round of requests, which wait together; what is missing, too."""
        missing = [path for name in names if (path := self.path(name)) not in _fetched.get()] if self.remote else []
        count, found = len(missing), list[Any]()
        try:
            found = self.file_system.cat_ranges(missing, [0] * count, [None] * count, on_error="return") if missing else []
        except FileNotFoundError:  # a file system that knows no on_error: each file is read by itself
            missing = []
        token = _fetched.set({**_fetched.get(), **dict(zip(missing, found, strict=True))})
        try:
            yield
        finally:
            _fetched.reset(token)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Several ranges; from a server all at once, so that they wait together.

        Raises:
            DataMissingError: a file is not there.
        """
        if not self.remote or len(ranges) == 1:
            return [self.read(part.name, part.offset, part.length) for part in ranges]
        wanted = [part for part in ranges if part.length > 0]
        found = iter(
            self.file_system.cat_ranges(
                [self.path(part.name) for part in wanted],
                [part.offset for part in wanted],
                [part.offset + part.length for part in wanted],
                on_error="return",
            )
            if wanted
            else ()
        )
        answers = []
        for part in ranges:
            data = next(found) if part.length > 0 else b""
            if isinstance(data, FileNotFoundError):
                raise self._missing(part.name) from None
            if isinstance(data, BaseException):
                raise data
            answers.append(bytes(data))
        return answers

    def descriptor(self, name: str = "") -> int:
        """A descriptor of a local file that this process has opened.

        Raises:
            DataMissingError: it is not there.
        """
        slot = (os.getpid(), name)
        if slot in self._open:
            if len(self._open) > OPEN_FILES // 2:
                self._open.move_to_end(slot)
            return self._open[slot]
        while len(self._open) >= OPEN_FILES:
            self._forget(*self._open.popitem(last=False))
        try:
            descriptor = self._open[slot] = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._missing(name) from None
        return descriptor

    def open(self, name: str = "") -> Any:
        """A file object for libraries that want one; the caller closes it."""
        if self.remote:
            return self.file_system.open(self.path(name), "rb")
        try:
            return open(self.path(name), "rb")
        except FileNotFoundError:
            raise self._missing(name) from None

    def close(self) -> None:
        """Close what this process has opened."""
        while self._open:
            self._forget(*self._open.popitem())
        self._made = {}

    @staticmethod
    def _forget(slot: tuple[int, str], descriptor: int) -> None:
        if slot[0] == os.getpid():  # what a parent opened stays open, for the parent: this process only has a copy of its table
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _missing(self, name: str) -> DataMissingError:
        where = self.path(name)
        above = "" if self.remote or Path(where).parent.is_dir() else f"; the folder {Path(where).parent} does not exist either"
        return DataMissingError(f"{where} is missing{above}: restore the file, or make the dataset again")
