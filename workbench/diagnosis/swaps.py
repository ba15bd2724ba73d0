"""Lists how two runs differ, and how each difference can be put from one run into a training of the other, where possible."""

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from workbench.core import run_directory, units
from workbench.core.checks import is_number
from workbench.diagnosis.analysis.what_changed import RunDifference
from workbench.diagnosis.rerun import Arm, Change, Code, is_option, place_of_option, surroundings_of
from workbench.runs.compare import SHOWN, differences, provenance, read_or_none, several_of, text, variables_of
from workbench.runs.launch import environment, worktrees
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec, Spec, SpecError

CODE = "code"
"""The name of the change of all code."""
OF_RERUNS = ("steps", "watch", "profile", "kind")
"""Fields of a spec that a short training sets by itself."""
MAY_BE_LEFT = ("versions", "data", "code", "git", "environment")
"""Sections whose differences a training of today has only if something put them back."""
OF_THE_MACHINE = ("host", "cores", "GPUs", "boot", "platform", "cpu", "cpu capability", "device")
"""What of "environment" is the machine itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Swaps:
    """Two runs as trainings of today."""

    base: Arm
    """Run A."""
    changes: tuple[Change, ...]
    """What of run B can be put into it, the most suspect first."""
    differences: tuple[RunDifference, ...]
    """All in which the two differ; what can be tried first."""
    notes: tuple[str, ...]
    """What the reader should know."""
    code: tuple[str, ...] = ()
    """The first files in which the code differs, each with the line if it is one, and how many more there are."""
    not_recorded: tuple[str, ...] = ()
    """What these two did not record, though runs can."""


def swaps_of(a: Run, b: Run, also: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]], *, ask_git: bool = True) -> Swaps:
    """The differences of run A, which is repeated, and of B; `also`: a further one → the variables with which A and B have it.

    `ask_git` is False for runs of others: git executes what the settings of a repository name.
    """
    infos = [run_directory.read_json(run.path / run_directory.RUN_JSON) for run in (a, b)]
    kept = variables_of((a, b))
    folder, variables, python = surroundings_of(infos[0], a.spec, kept[0], tuple(provenance(a)[CODE]))
    _, _, other = surroundings_of(infos[1], b.spec, kept[1])
    notes: list[str] = []
    rows: list[RunDifference] = []
    changes: list[Change] = []

    def add(section: str, name: str, values: tuple[Any, Any], change: Change | None, why_not: str = "") -> None:
        if change and change.name not in [each.name for each in changes]:
            changes.append(change)
        texts = [text(value) for value in values]
        named = change.name if change else ""
        rows.append(RunDifference(section=section, name=name, a=texts[0], b=texts[1], change=named, why_not=why_not))

    for group in knob_groups(a.spec, b.spec):
        mine, theirs = a.spec.to_json(), b.spec.to_json()
        options = {name: differing_options(mine[name], theirs[name]) if name == "args" else {} for name in group}
        named = ", ".join(part for name in group for part in (options[name] or (name,)))
        if len(options.get("args", ())) == len(group) == 1:
            named = next(f"{flag} ({then} → {later})" for flag, (then, later) in options["args"].items())
        change = Change(name=named, knobs={name: theirs[name] for name in group})
        if group == ["args"] and (single := option_changes(a.spec, b.spec, options["args"])):  # type: ignore[arg-type]
            for flag, pair in options["args"].items():
                add("spec", flag, pair, single[flag])
            continue
        for name in group:
            pairs: Mapping[str, tuple[Any, Any]] = options[name] or {name: (mine[name], theirs[name])}
            for what, pair in pairs.items():
                add("spec", what, pair, change)
    if kept[0] is not None and kept[1] is not None:
        for name in sorted({*kept[0], *kept[1]}):
            recorded = (kept[0].get(name) or None, kept[1].get(name) or None)
            if recorded[0] != recorded[1]:
                add("variables", name, recorded, Change(name=name, variables={name: recorded[1]}))
    else:
        notes.append("environment variables: a run of an earlier version recorded none, so none is tried")
    for name, (then, later) in also.items():
        variables |= dict(then)
        given = [" ".join(f"{key}={value}" for key, value in each.items()) for each in (then, later)]
        add("given", name, (given[0], given[1]), Change(name=name, variables=dict(later)))
    if python and other and python != other:
        there = Path(other).exists() and Path(python).exists()
        add("environment", "python", (python, other), Change(name="python", python=other) if there else None, "" if there else "it is gone")
    code, of_code, why_not = _code(a, b, infos, ask_git)
    if not of_code and why_not:
        notes.append(f"code: {why_not}")
    of_files = code, of_code.code if of_code else None
    lines = _changed_code((a, b), Path(a.spec.script).parent if isinstance(a.spec, ScriptSpec) else folder, of_files) if ask_git else ()
    for name, run in zip("AB", (a, b), strict=True):
        uncommitted = provenance(run)["git"].get("uncommitted") or ()
        if may_matter := [file for file in uncommitted if not _is_documentation(file)]:
            notes.append(f"not committed in run {name}: {several_of(may_matter)}")
    for section, name, values in differences((a, b)):
        if section in ("git", CODE):
            if name != "branch":
                add(section, name, tuple(value[:10] if name == "commit" and value else value for value in values), of_code, why_not)
        elif section in ("versions", "data", "environment"):
            add(section, name, (values[0], values[1]), None, "cannot be put back alone")
    rows += _load(infos)
    tried = [each for each in rows if each.change]
    return Swaps(
        base=Arm(a.spec, code or Code(folder, folder), variables, python if python and Path(python).exists() else None),
        changes=tuple(changes),
        differences=(*tried, *(each for each in rows if not each.change)),
        notes=tuple(notes),
        code=lines,
        not_recorded=_not_recorded((a, b), kept),
    )


def _not_recorded(runs: Sequence[Run], kept: Sequence[Mapping[str, str] | None]) -> tuple[str, ...]:
    """What two runs did not both record, though it may differ."""
    written = [read_or_none(run.path / run_directory.ENVIRONMENT) for run in runs]
    missing = {name for name in ("variables", "code", "versions", "data") if not all(name in each for each in written)}
    variables = "an environment variable" if None in kept else "an environment variable that only an imported file names"
    words = {"code": "the imported code", "variables": variables, "versions": "a package other than torch and numpy", "data": "the data"}
    return tuple(text for name, text in words.items() if name in missing or (name == "variables" and None in kept))


def knob_groups(a: Spec, b: Spec) -> list[list[str]]:
    """The knobs in which two specs differ; those that only go together are in one group. ValueError: a task beside a script."""
    if type(a) is not type(b):
        raise ValueError("a task beside a script: they are not two runs of one training; compare two runs of the same kind")
    mine, theirs = a.to_json(), b.to_json()
    groups = [[name] for name in mine if name not in OF_RERUNS and mine[name] != theirs[name]]

    def valid(names: Sequence[str]) -> bool:
        try:
            a.replace(**{name: theirs[name] for name in names})
        except SpecError:
            return False
        return True

    while (odd := next((group for group in groups if not valid(group)), None)) and len(groups) > 1:
        others = [group for group in groups if group is not odd]
        with_odd = next((group for group in others if valid([*odd, *group])), others[0])
        groups = [[*odd, *with_odd] if group is odd else group for group in groups if group is not with_odd]
    return groups


def option_changes(a: ScriptSpec, b: ScriptSpec, differing: Mapping[str, tuple[str, str]]) -> dict[str, Change]:
    """A change for each of several differing options; none where their values cannot be told from other arguments without the script."""
    if len(differing) < 2 or not all(map(is_option, differing)):
        return {}
    changes, whole = dict[str, Change](), a
    for flag, (then, later) in differing.items():
        words = b.args[place_of_option(b.args, flag)]
        changes[flag] = Change(name=f"{flag} ({then} → {later})", option=flag, words=words)
        whole = changes[flag].of(whole)  # type: ignore[assignment]
    return changes if sorted(whole.args) == sorted(b.args) else {}


def differing_options(a: Sequence[str], b: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The options of a script in which its arguments differ, each with both values; "none" = it is not given.

    Empty: only their order does, as far as can be told without the script.

    >>> differing_options(["--lr", "0.1", "--amp"], ["--lr=0.1", "data", "--slow", "decode"])
    {'--amp': ('given', 'none'), 'argument 1': ('none', 'data'), '--slow': ('none', 'decode')}
    """
    sides = []
    for words in (a, b):
        options: dict[str, str] = {}
        flag = ""
        for word in map(str, words):
            if is_option(word):
                flag, _, value = word.partition("=")
                options[flag] = value or "given"
                flag = "" if value else flag
            elif flag:
                options[flag] = word if options[flag] == "given" else f"{options[flag]} {word}"
            else:
                options[f"argument {1 + sum(name.startswith('argument') for name in options)}"] = word
        sides.append(options)
    both = [sorted((sides[0][name].split(), sides[1][name].split()), key=len) for name in sides[0].keys() & sides[1].keys()]
    moved = all(short == long[: len(short)] for short, long in both)
    if moved and sorted(map(str, a)) == sorted(map(str, b)):  # such as an argument that stands behind an option's value now
        return {}
    return {name: pair for name in sides[0] | sides[1] if len({*(pair := (sides[0].get(name, "none"), sides[1].get(name, "none")))}) > 1}


def _code(a: Run, b: Run, infos: Sequence[Mapping[str, Any]], ask_git: bool) -> tuple[Code | None, Change | None, str]:
    """The code of run A, the change to that of run B, and why there is none where the two differ."""
    sides, whys, states = [], [], []
    for run, info in zip((a, b), infos, strict=True):
        state = provenance(run)["git"]
        code, why = _code_of(run, info, state, ask_git)
        sides.append(code)
        whys.append(why)
        states.append({name: state.get(name) for name in ("commit", "dirty", "changes")})
    alike = states[0] == states[1] and infos[0].get("cwd") == infos[1].get("cwd")
    if alike and not any(section == CODE for section, _, _ in differences((a, b))):
        unknown = isinstance(a.spec, ScriptSpec) and not (states[0]["commit"] or (provenance(a)[CODE] and provenance(b)[CODE]))
        return sides[0], None, "without git, and since these runs did not record what the script imports, it may have changed" * unknown
    if alike and states[0]["commit"]:
        return sides[0], None, "the commit is the same, and git does not track what changed"
    if sides[0] and sides[1] and sides[0] != sides[1]:
        return sides[0], Change(name=CODE, code=sides[1]), ""
    if sides[0] == sides[1]:
        return sides[0], None, "the runs were in no git repository, so the folder has one of the two versions at most"
    return sides[0] or sides[1], None, f"that of run {'A' if sides[0] is None else 'B'} cannot be had: {whys[0] or whys[1]}"


def _code_of(run: Run, info: Mapping[str, Any], state: Mapping[str, Any], ask_git: bool) -> tuple[Code | None, str]:
    """The code that a run had, or why it cannot be had."""
    folder = Path(info.get("cwd") or ".")
    source = Path(run.spec.script).parent if isinstance(run.spec, ScriptSpec) else folder
    if not folder.is_dir():
        return None, f"its folder {folder} is gone"
    commit = state.get("commit")
    if not commit or (ask_git and worktrees.is_as_recorded(source, dict(state))):
        return Code(folder, source), ""
    names, used = state.get("uncommitted") or [], provenance(run)[CODE]
    try:
        commit = worktrees.commit_of(source, str(commit)) if ask_git else str(commit)
        may_matter = [name for name in names if not _is_harmless(source, name, commit, used, ask_git)]
    except (worktrees.GitError, OSError) as error:
        return None, str(error)
    if state.get("dirty") and (may_matter or not names or len(names) >= environment.UNCOMMITTED):
        others = ", perhaps others" * (len(names) >= environment.UNCOMMITTED)
        where = f" in {several_of(may_matter or names)}{others}" if names else ", in files that it did not record"
        return None, f"it had changes that were not committed{where}"
    return Code(folder, source, commit), ""


def _is_harmless(source: Path, name: str, commit: str, used: Mapping[str, Any], ask_git: bool) -> bool:
    """Is a file of the repository documentation, or a symbolic link to data elsewhere that a checkout of the commit gets as well?

    Data is a binary file, or a folder with none of the files that the run imported, `used`. GitError, OSError: it cannot be told.
    """
    if _is_documentation(name):
        return True
    top = next((folder for folder in (source.absolute(), *source.absolute().parents) if (folder / ".git").exists()), None)
    if top is None or not used or not (link := top / name).is_symlink() or Path(os.path.realpath(link)).is_relative_to(top.resolve()):
        return False
    if link.is_file():
        with link.open("rb") as file:
            data = b"\0" in file.read(8000)  # so git tells binary from text
    else:
        parts = [PurePath(each).parts for each in used]
        data = link.is_dir() and not any(link.joinpath(*each[i:]).exists() for each in parts for i in range(len(each)))
    return data and not (ask_git and worktrees.git(top, "ls-tree", "-z", commit, "--", name))


def _is_documentation(name: str) -> bool:
    path = PurePath(name)
    return path.suffix in (".md", ".rst", ".ipynb") or (path.suffix == ".txt" and not {"doc", "docs"}.isdisjoint(path.parts[:-1]))


def _changed_code(runs: Sequence[Run], folder: Path, code: tuple[Code | None, Code | None]) -> tuple[str, ...]:
    """The first files in which the code of two runs differs, and how many more there are; `code`: that of A and the change to that of B."""
    commits = [str(provenance(run)["git"].get("commit")) for run in runs]
    here = [bool(code[1] and each and each.commit is None) for each in code]  # where the code is that of the folder, as it is now
    if all(here) or (commits[0] == commits[1] and not code[1]):
        return ()
    used = [name for section, name, _ in differences(runs) if section == CODE]
    try:
        sides = [worktrees.commit_of(folder, commit) for commit in commits]
        if any(here):
            files = worktrees.changes(folder, sides[here[0]], reverse=here[0], first=used)
        else:
            files = worktrees.changes(folder, *sides, first=used)
    except worktrees.GitError:
        return ()
    return (*files[:SHOWN], *[f"{len(files) - SHOWN} more"] * (len(files) > SHOWN))


def _load_of(info: Mapping[str, Any]) -> dict[str, Any]:
    return dict(info["machine"]) if isinstance(info.get("machine"), Mapping) else {}


def _load(infos: Sequence[Mapping[str, Any]]) -> list[RunDifference]:
    """How busy the machine was when each began, and its clock, where they differ much."""
    states = [_load_of(info) for info in infos]
    rows = []
    for name, word, least in (("load", "processes that want a core", 0.5), ("MHz", "clock of the cores in MHz", 200)):
        values = [state.get(name) for state in states]
        if all(isinstance(value, int | float) for value in values) and abs(values[1] - values[0]) >= least:  # type: ignore[operator]
            rows.append(RunDifference(section="environment", name=word, a=f"{values[0]:g}", b=f"{values[1]:g}", why_not="the machine"))
    return rows


def load_note(runs: Sequence[Run]) -> str:
    """The load of the machine when each run began, and how busy its cores were while it ran, as far as that was recorded."""
    texts = []
    for name, run in zip("AB", runs, strict=True):
        load = _load_of(run_directory.read_json(run.path / run_directory.RUN_JSON)).get("load")
        busy = [row["cpu"] for row in run.usage if is_number(row.get("cpu"), least=0, most=1)]
        began = f"{load:.1f}" if is_number(load, least=0) else "not recorded"
        cores = units.percent(statistics.fmean(busy)) if busy else "not recorded"
        texts.append(f"when {name} began, its load was {began}; while {name} ran, the busy share of its cores was {cores}")
    return f"the machine: {'; '.join(texts)} (each run's own work included)"


def lost(recorded: tuple[Run, Run], today: Sequence[Run], differences_: Sequence[RunDifference]) -> tuple[str, ...]:
    """What differed between two runs, and does not between their trainings of today; with one training all that differed.

    `differences_` are those of the runs, with what can be tried. Of changes that were not committed, files that a run imported are named
    by their digests, and the others where the code could not be put back.
    """
    then = {(section, name): values for section, name, values in differences(recorded) if section in MAY_BE_LEFT}
    now = {(section, name) for section, name, _ in differences(today)} if len(today) > 1 else set()
    left = {key: values for key, values in then.items() if key not in now and not (key[0] == "environment" and key[1] in OF_THE_MACHINE)}
    texts = [_arrow(section, name, values) for (section, name), values in left.items() if section != "git" or name == "commit"]
    for each in differences_:
        if (each.section, each.name) == ("environment", "python") and not each.change:
            texts.append(f"python ({each.a} → {each.b})")
    if any(each.section == "git" and not each.change for each in differences_) and not {("git", "dirty"), ("git", "changes")}.isdisjoint(
        left
    ):
        files = [name for run in recorded for name in provenance(run)["git"].get("uncommitted") or ()]
        others = [name for name in dict.fromkeys(files) if not any(name.endswith(code) for section, code in left if section == CODE)]
        if others or not files:
            texts.append(f"changes that were not committed{f' ({several_of(others)})' if others else ''}")
    return tuple(texts)


def brought(without: Run, with_it: Run) -> tuple[str, ...]:
    """In what a training with a change differs from one without, beside the change: packages, data, code."""
    return tuple(_arrow(section, name, values) for section, name, values in differences((without, with_it)) if section in MAY_BE_LEFT[:3])


def _arrow(section: str, name: str, values: Sequence[Any]) -> str:
    where = {"versions": "", "git": "git ", CODE: "the code of ", "data": "the data's ", "environment": ""}[section]
    return f"{where}{name} ({text(values[0])} → {text(values[1])})"
