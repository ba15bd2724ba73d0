"""Checks commits out into folders of their own, for as long as something runs there; the user's checkout is not touched."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.runs.launch.environment import git_state

GIT_SECONDS = 120.0
"""The most that a command of git may take."""
LONGEST_LINE = 80
"""Letters of a line of code that are shown."""
EXAMINED = 5
"""Files of which more than the name is said."""
_NOT_LINKED = ("__pycache__", ".pyc", ".git", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints")


class GitError(ValueError):
    """A command of git failed, or there is no repository."""


def git(folder: Path, *words: str) -> str:
    """What a command of git prints.

    Raises:
        GitError: it failed, with git's own words.
    """
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", *words]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=GIT_SECONDS, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {words[0]} in {folder}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["failed"]
        raise GitError(f"git {' '.join(words[:2])} in {folder}: {said[-1]}")
    return done.stdout


def top_of(folder: Path) -> Path | None:
    """The top folder of the repository that a folder is in; None = it is in none."""
    with contextlib.suppress(GitError):
        return Path(git(folder, "rev-parse", "--show-toplevel").strip())
    return None


def commit_of(folder: Path, revision: str) -> str:
    """The id of a commit.

    Raises:
        GitError: there is no such commit here.
    """
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except GitError:
        raise GitError(
            f"{revision!r} is not a commit of the repository of {folder}; expected a branch, tag or id that git log shows"
        ) from None


def commits_between(folder: Path, good: str, bad: str) -> list[str]:
    """The ids of the commits after `good` up to `bad`, oldest first, along first parents.

    Raises:
        GitError: one of them does not exist, or `good` is not before `bad`.
    """
    first, last = commit_of(folder, good), commit_of(folder, bad)
    try:
        git(folder, "merge-base", "--is-ancestor", first, last)
    except GitError:
        raise GitError(f"good={good!r} is not an ancestor of bad={bad!r}: expected an older commit of the same history") from None
    return git(folder, "rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()


def changes(folder: Path, *commits: str, reverse: bool = False, first: Collection[str] = ()) -> list[str]:
    """The files that differ between two commits, or between one and the working tree; the first few with the line, or how many lines.

    `reverse` exchanges the two sides. Files whose names end as those in `first` do come first.

    Raises:
        GitError: there is no such commit.
    """
    words = ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", *["-R"] * reverse]
    found: list[str] = []
    rows = [row.split("\t", 2) for row in git(folder, *words, "--numstat", "-z", *commits, "--").split("\0") if row]
    for added, removed, name in sorted(rows, key=lambda row: not row[2].endswith(tuple(first))):
        if len(found) < EXAMINED and {added, removed} <= {"0", "1"}:
            lines = git(folder, *words, "--unified=0", *commits, "--", f":(top,literal){name}").split("\n")
            name += _line_that_differs(lines)
        elif len(found) < EXAMINED and "-" not in (added, removed):
            name += f" (+{added} −{removed} lines)"
        found.append(name)
    return found


def _line_that_differs(diff: list[str]) -> str:
    """The one line of a file that a diff changes, before and after, with its place; empty = there is none, or the file is new or gone."""
    place = next((at for at, line in enumerate(diff) if line.startswith("@@ ")), None)
    if place is None or any(line.startswith(("new file", "deleted file")) for line in diff[:place]):
        return ""
    texts = {line[0]: line[1:].strip()[:LONGEST_LINE] for line in diff[place + 1 :] if line[:1] in ("-", "+")}
    old, new = re.findall(r"[-+](\d+)", diff[place])[:2]
    return f" line {new if '+' in texts else old} ({texts.get('-') or 'nothing'} → {texts.get('+') or 'nothing'})"


def subject_of(folder: Path, commit: str) -> str:
    """The first line of a commit's message, with its short id."""
    return git(folder, "log", "-1", "--format=%h %s", commit).strip()


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit in a folder."""

    top: Path
    """Of the repository from which it comes."""
    folder: Path
    """Where the commit is."""

    def path(self, path: Path) -> Path:
        """Where a path of the repository is in the checkout; a path elsewhere is returned as it is."""
        return self.folder / path.relative_to(self.top) if path.is_absolute() and path.is_relative_to(self.top) else path

    def search_path(self, before: str | None) -> str:
        """PYTHONPATH with what this process, or the variable, imports from the repository taken from the checkout."""
        listed = [entry for entry in (before or "").split(os.pathsep) if entry]
        inside = [entry for entry in [*sys.path, str(self.top / "src")] if entry and self._is_source(Path(entry))]
        return os.pathsep.join(dict.fromkeys(str(self.path(Path(entry))) for entry in [*listed, *inside]))

    def _is_source(self, path: Path) -> bool:
        return path.is_absolute() and path.is_relative_to(self.top) and path.is_dir() and "site-packages" not in path.parts


@contextlib.contextmanager
def checkout(top: Path, commit: str) -> Iterator[Checkout]:
    """Inside, a commit is in a folder of its own, with links to what git does not track, such as data; at the end it is gone.

    Raises:
        GitError: git cannot make it.
    """
    folder = Path(tempfile.mkdtemp(prefix="workbench-commit-"))
    try:
        git(top, "worktree", "add", "--detach", "--force", str(folder / "tree"), commit)
        _link_untracked(top, folder / "tree")
        yield Checkout(top, folder / "tree")
    finally:
        with contextlib.suppress(GitError):
            git(top, "worktree", "remove", "--force", "--force", str(folder / "tree"))
        shutil.rmtree(folder, ignore_errors=True)  # links are removed, not what they lead to


def _link_untracked(top: Path, folder: Path) -> None:
    """Link what git does not track in a checkout, and its symbolic links, which lead to data, where the commit has none of the name."""
    listed = git(top, "ls-files", "--others", "--directory", "-z").split("\0")
    listed += [line.partition("\t")[2] for line in git(top, "ls-files", "--stage", "-z").split("\0") if line.startswith("120000 ")]
    for name in listed:
        path = name.rstrip("/")
        if not path or any(part.endswith(_NOT_LINKED) for part in Path(path).parts):
            continue
        place = folder / path
        if not place.exists() and not place.is_symlink():
            with contextlib.suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(top / path)


def is_as_recorded(folder: Path, state: dict[str, object]) -> bool:
    """Is the code in a folder now what `git_state` said of it then?"""
    now = git_state(folder) or {}
    return all(now.get(name) == state.get(name) for name in ("commit", "dirty", "changes"))
