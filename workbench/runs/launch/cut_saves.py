"""Kills a script as if while it wrote a file: cuts the file that it has written last, before it has done anything else, and kills it.

For saves that are too short to be caught, and those of child processes: what a kill in the middle of such a write leaves is a first part
of the file, and what the folder held besides. Linux tells which file of a folder was closed after writing (inotify), by whichever process.
Ranks that are held (`workbench.programs.script`), and processes that they fork or start by multiprocessing, stop before they rename
something in the folder, so that a file that is renamed at once can be cut, too. What other programs rename at once cannot; it is noted.
"""

import contextlib
import ctypes
import os
import random
import re
import select
import signal
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from workbench.core import run_directory
from workbench.runs.guards import ranks_of
from workbench.runs.run import Run

_CLOSED, _MOVED, _CREATED, _DELETED = 0x8, 0x40 | 0x80, 0x100, 0x200
_AWAY = 0x40
_EVENT = struct.Struct("iIII")
_MOST = 1 << 28
"""Bytes of a file that is read to find out whether it was only appended to: a longer one is taken to be a save."""


AT_ONCE = 0.05
"""Seconds after it was seen to be closed within which a file is renamed too soon to be cut, unless who renames it is held."""
NAMED = 8
"""Files that a message names at most."""
_NUMBER = re.compile(r"\d+|[0-9a-f]{8,}|tmp\w{8}")
"""In the name of a file what differs from save to save."""


class ClosedFiles:
    """The files of a folder, and of those in it, that are closed after writing; those that only grow are logs, and left out.

    Attributes:
        last: the file that was closed last; "" = none yet.
        is_latest: nothing else has happened in the folder since.
        renamed: each file that was renamed at once, by itself or with a folder: what was renamed.
    """

    def __init__(self, folder: Path, is_log: Callable[[str], bool] = lambda name: False) -> None:
        """From now on; what happens to a file whose name `is_log` is nothing."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._add, self._folder, self._folders, self._is_log = libc.inotify_add_watch, folder, dict[int, Path](), is_log
        self._events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1: no further watcher of files is allowed")
        self._poll = select.poll()  # select.select refuses descriptors above 1024
        self._poll.register(self._events, select.POLLIN)
        self._content, self.last, self.is_latest = dict[str, tuple[int, int]](), "", False
        self._closed, self.renamed = dict[str, float](), dict[str, str]()
        self._watch(folder)

    def close(self) -> None:
        """No more of them."""
        os.close(self._events)

    def _watch(self, folder: Path) -> None:
        """Watch a folder and those below it; one that is watched already, as it was renamed, gets its new name."""
        number = self._add(self._events, os.fsencode(folder), _CLOSED | _MOVED | _CREATED | _DELETED)
        if number < 0:
            return
        self._folders[number] = folder
        with contextlib.suppress(OSError):  # removed or renamed meanwhile
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    self._watch(path)

    def look(self, patience: float = 0.0) -> list[str]:
        """Those that were closed since the last look, in their order; it waits so many seconds for one."""
        self._poll.poll(1000 * patience)
        names = []
        for number, mask, name in self._read():
            path = self._folders[number] / name
            relative, now = path.relative_to(self._folder).as_posix(), time.monotonic()
            if self._is_log(relative):
                continue
            self.is_latest = bool(mask & _CLOSED) and not self._grew(path)
            if self.is_latest:
                self.last, self._closed[relative] = relative, now
                names.append(relative)
            elif mask & _AWAY:
                moved = [each for each in self._closed if f"{each}/".startswith(f"{relative}/")]
                self.renamed |= {each: relative for each in moved if now - self._closed.pop(each) < AT_ONCE}
            elif mask & (_CREATED | _MOVED) and path.is_dir() and not path.is_symlink():
                self._watch(path)
        return names

    def _read(self) -> Iterator[tuple[int, int, str]]:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._events, 1 << 16):
                at = 0
                while at < len(data):
                    number, mask, _, length = _EVENT.unpack_from(data, at)
                    at += _EVENT.size + length
                    if number in self._folders:
                        yield number, mask, os.fsdecode(data[at - length : at].rstrip(b"\0"))

    def _grew(self, path: Path) -> bool:
        """Has a file what it had, and something behind it? Then it is a log."""
        try:
            if path.stat().st_size > _MOST:
                return False
            data = path.read_bytes()
        except OSError:  # renamed meanwhile
            return False
        size, checksum = self._content.get(str(path), (0, 0))
        self._content[str(path)] = len(data), zlib.crc32(data)
        return 0 < size <= len(data) and zlib.crc32(data[:size]) == checksum


def hold_renames(run: Run, folder: Path, *, now: bool = False) -> None:
    """Tell the ranks of a run, before they start, to note what they rename in a folder; with `now`, to stop before they rename."""
    part = run_directory.part_of(run.path / run_directory.HOLD)
    part.write_text(f"{folder.resolve()}\n{'now' * now}")
    part.replace(run.path / run_directory.HOLD)


def renamed_by_others(run: Run, closed: ClosedFiles) -> set[str]:
    """Files that were renamed at once, by processes that `hold_renames` does not hold."""
    path = run.path / run_directory.RENAMED
    known = set(path.read_text().splitlines()) if path.exists() else set()
    return {name for name, moved in closed.renamed.items() if moved not in known}


def cut(run: Run, folder: Path, closed: ClosedFiles, chosen: random.Random) -> str | None:
    """Kill a run with the file that it has closed last cut in two; None = it has done something else since, and lives.

    A rank that was held where it renames a file is killed there in any case, with the file as it is if something else was done since it
    was closed.
    """
    with _stopped(run.id) as (pids, held):
        closed.look()
        file = folder / closed.last
        is_whole = closed.is_latest and file.is_file() and not file.is_symlink()
        if not pids or not closed.last or not (is_whole or held):
            return None
        if is_whole:
            os.truncate(file, chosen.randrange(max(1, file.stat().st_size)))
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    return closed.last


@contextlib.contextmanager
def _stopped(run_id: str) -> Iterator[tuple[list[int], bool]]:
    """The ranks of a run and their child processes, stopped, and whether one of them had stopped by itself."""
    pids = [pid for each in ranks_of(run_id).values() for pid in each]
    held = is_held(run_id)
    try:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGSTOP)
        limit = time.monotonic() + 1.0
        while not all(_state_of(pid) in "TtZX" for pid in pids) and time.monotonic() < limit:
            time.sleep(0.001)
        yield pids, held
    finally:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)


def is_held(run_id: str) -> bool:
    """Has a rank of a run, or a child process of one, stopped by itself?"""
    return any(_state_of(pid) == "T" for each in ranks_of(run_id).values() for pid in each)


def state_of(pid: int) -> str:
    """A letter for what a process does: T = it is stopped.

    Raises:
        OSError: it has ended.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _state_of(pid: int) -> str:
    try:
        return state_of(pid)
    except OSError:
        return "X"


def not_cut(files: Sequence[str]) -> str:
    """Which saves no kill could cut, and why."""
    return (
        f"no kill came while {', '.join(files[:NAMED])} was written: another program renames it as soon as it is written. Only a rank, and "
        "what it starts by fork or multiprocessing, can be stopped before that: let one of these rename it, or leave during_save out"
    )


def never_cut(uncut: Collection[str], writing: Collection[str]) -> tuple[str, ...]:
    """Those of the files that no kill has met, nor one of the same name but for numbers; one of each such name."""
    met = {_NUMBER.sub("", name) for name in writing}
    return tuple({_NUMBER.sub("", name): name for name in sorted(uncut) if _NUMBER.sub("", name) not in met}.values())
