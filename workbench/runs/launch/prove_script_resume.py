"""Proves the resume of a script: kills it at random moments, launches it again, and compares what it writes at its end."""

import ast
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import late
from workbench.core.checks import nearest
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.units import seconds, several
from workbench.runs.guards import ranks_of
from workbench.runs.launch.launch import launch
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.run import ACTIVE, Run

OUT = "{out}"
"""Stands in a script's arguments for the folder where it keeps its checkpoints and writes its result."""
SHOWN = 8
"""Entries that are shown at most."""
_STATE = re.compile("sched|random|rng|generator|sampler|scaler|step|epoch")
"""In the first key of an entry that is neither of the model nor of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(JsonDataclass):
    """An entry of the result that differs."""

    name: str
    """Its keys, with dots between them: `model.0.weight`."""
    difference: str
    """In what: "missing", a largest difference, or both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResumeProof(JsonDataclass, display.Shown):
    """Whether a script that is killed and launched again writes bit for bit what an undisturbed one writes."""

    entries: int
    """Entries of the result: tensors, numbers, texts."""
    differing: tuple[Entry, ...]
    """Those that differ from the undisturbed result."""
    repeatable: bool
    """Does the script write the same when it is launched twice without a kill? Tried where something differs; else True."""
    kills: tuple[float, ...]
    """Seconds after its launch at which it was killed, each time."""
    killed_at: tuple[int, ...] = ()
    """Optimizer steps of that launch that were measured by then; 0 = none were."""
    steps: int = 0
    """Optimizer steps of the undisturbed script, as measured (the first of a loop without a DataLoader is not); 0 = none were."""
    last_steps: int = 0
    """Those of the last launch, which ran to the end: fewer, if it went on from a checkpoint."""
    asked: int = 0
    """Kills that were to be; fewer came where the script ended before."""
    seconds: float
    """How long the undisturbed script took."""
    undisturbed: str
    """Folder of the script that was not killed."""
    interrupted: str
    """Folder of the one that was."""

    @property
    def began_again(self) -> bool:
        """Did the last launch train all steps, as if it had found no checkpoint? False where no steps were seen."""
        return 0 < self.steps <= self.last_steps

    @property
    def exact(self) -> bool:
        """Is the result bit for bit the same, of a script that did not simply begin again?"""
        return not self.differing and not self.began_again

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        after = f"after {several(len(self.kills), 'kill')}"
        if len(self.kills) < self.asked:
            after += f" (the script ended before kill {len(self.kills) + 1} of {self.asked})"
        if self.began_again:
            equal = "differs as well" if self.differing else "is equal because the script is deterministic, which says nothing of a resume"
            return (
                f"Not resumed: {after} it began again at step 1 and trained all steps ({self.last_steps:,} measured); the result {equal}. "
                f"Either the script does not load what it saves into {OUT}, or no checkpoint was complete when it was killed "
                f"({self._killed}): see that it loads, or let it write checkpoints more often"
            )
        if self.exact:
            known = "whether it went on from a checkpoint or began again is not known, since no optimizer step of torch was measured"
            if self.steps:
                known = f"the last launch took {self.last_steps:,} of {self.steps:,} measured steps"
            return (
                f"Exact: {after} all {self.entries:,} entries of the result are bit for bit those of the undisturbed script "
                f"(killed {self._killed}; {known})."
            )
        many = f"{len(self.differing):,} of {self.entries:,} entries of the result differ"
        if not self.repeatable:
            return (
                f"Not repeatable: {many}, and they differ as well where nothing is killed, so no checkpoint can make them equal. Seed all "
                "generators (torch, numpy, random, the workers of loaders) at the start of the script"
            )
        return (
            f"Not exact: {many} {after}. Without a kill the script writes the same twice, so its checkpoint lacks "
            "something: usual are the states of random generators, the position in the data, the learning-rate schedule, the optimizer, "
            "the gradient scaler"
        )

    @property
    def _killed(self) -> str:
        """When it was killed, each time: "3.10 s after its launch, 8 measured steps into it"."""
        steps = self.killed_at or (0,) * len(self.kills)
        each = zip(self.kills, steps, strict=True)
        return "; ".join(f"{seconds(after)} after its launch{f', {step:,} measured steps into it' * bool(step)}" for after, step in each)

    @property
    def table(self) -> display.Table:
        """The entries that differ, and the verdict; first those of a schedule or of random numbers, then of the optimizer."""
        rows = [[entry.name, entry.difference] for entry in sorted(self.differing, key=_telling)[:SHOWN]]
        if len(self.differing) > SHOWN:
            rows.append([f"and {len(self.differing) - SHOWN:,} more", ""])
        return display.Table(columns=("entry", "difference"), rows=rows, title="Killed and launched again", note=self.verdict)

    def __str__(self) -> str:
        return str(self.table) if self.differing else self.verdict

    def _repr_html_(self) -> str:
        return self.table._repr_html_() if self.differing else f"<p>{display.escape(self.verdict)}</p>"

    def __repr__(self) -> str:
        return f"ScriptResumeProof(exact={self.exact}, entries={self.entries}, differing={len(self.differing)}, kills={len(self.kills)})"


def _telling(entry: Entry) -> int:
    """The smaller, the more an entry tells of the reason: weights that differ only follow from it."""
    key = entry.name.partition(".")[0].lower()
    return 1 if "opt" in key else 0 if _STATE.search(key) else 2


def prove_script_resume(
    script: str | os.PathLike[str],
    *,
    args: Sequence[str],
    result: str,
    folder: Path,
    kills: int,
    seed: int,
    timeout: float | None,
    say: Callable[[str], object] = str,
    **launched: Any,
) -> ScriptResumeProof:
    """See `prove_resume`; `launched` are arguments of `launch`.

    Raises:
        LaunchError: it cannot be launched or killed here, or did not write the result.
        RunError: it failed by itself.
    """
    if sys.platform != "linux":
        raise LaunchError("prove_resume with a script finds its ranks in /proc, which only Linux has; a RunSpec works here")

    def begin(name: str) -> Run:
        out = folder / name
        out.mkdir(parents=True, exist_ok=True)
        given = [arg.replace(OUT, str(out)) for arg in args]
        name = f"{Path(script).stem}-{name}"
        return launch(script, args=given, timeout=timeout, runs_dir=folder, name=name, **{"watch": True} | launched)

    def told(what: str, name: str) -> Callable[[int], object]:
        def writes_so_far(writes: int) -> None:
            lacks = f", but no {result}" if writes and not (folder / name / result).exists() else ""
            say(f"{what}, {several(writes, 'write') + ' so far' if writes else f'waiting for what it writes into {folder / name}'}{lacks}")

        return writes_so_far

    def to_the_end(name: str) -> tuple[Run, int]:
        run = begin(name)
        _, writes = _watched(run, folder / name, say=told(f"the {name} script", name))
        return run.wait(check=True), writes

    undisturbed, left = to_the_end("undisturbed")
    expected = _entries_of(folder / "undisturbed", result)
    chosen, done, steps = random.Random(seed), list[float](), list[int]()
    while len(done) < kills and left > 1:  # the last write is the result
        least = max(1, left // 3) if len(done) == kills - 1 else 1  # so that there is a whole checkpoint before the last kill
        run, after = begin("interrupted"), chosen.randint(least, max(least, left - 2))  # early enough for a busy machine
        what = f"kill {len(done) + 1} of {kills} comes after {several(after, 'write')}"
        killed, writes = _watched(run, folder / "interrupted", after, chosen, say=told(what, "interrupted"))
        if killed:
            done.append(killed)
            steps.append(run.progress[0])
            left -= writes
        elif done:
            break
        else:  # it was seen to write less often than undisturbed, which a busy machine decides: once more, from the start
            left = min(after, writes)
            shutil.rmtree(folder / "interrupted")
    if not done:
        raise LaunchError(
            f"{script} wrote nothing into {OUT} ({folder / 'undisturbed'}) before its end, so there is no checkpoint to go on from: "
            "let it train longer, or write checkpoints more often"
        )
    last, _ = to_the_end("interrupted")
    differing = _differing(expected, folder / "interrupted", result)
    repeatable = True
    if differing:
        to_the_end("again")
        repeatable = not _differing(expected, folder / "again", result)
    return ScriptResumeProof(
        entries=len(expected),
        differing=differing,
        repeatable=repeatable,
        kills=tuple(done),
        killed_at=tuple(steps),
        steps=undisturbed.progress[0],
        last_steps=last.progress[0],
        asked=kills,
        seconds=undisturbed.seconds,
        undisturbed=str(folder / "undisturbed"),
        interrupted=str(folder / "interrupted"),
    )


def check_named(script: str | os.PathLike[str], args: Sequence[str], result: str) -> None:
    """Raise if the script, not run yet, names no such file but another of nearly that name, and no part that it may compose the name of.

    Raises:
        ValueError: so it is.
    """
    name, text = Path(result).name, Path(script).expanduser().read_text(errors="replace")
    if name in text:
        return
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError, ValueError):  # it is launched, and fails with that
        tree = ast.parse(text)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    composed = any(len(part) > 2 and part in Path(name).stem for part in (*texts, *args)) or any(name in arg for arg in args)
    near = nearest(name, (Path(part).name for part in texts), cutoff=0.8)
    if near and not composed:
        why = f"{script} names no such file, but {near!r}: did you mean result={near!r}?"
        raise ValueError(f"result={result!r}: {why} If it does write {name}, say so in a comment there")


def _entries_of(out: Path, result: str) -> Mapping[str, Any]:
    if not (out / result).is_file():
        names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
        near = nearest(result, names) or (names[0] if len(names) == 1 else "")
        hint = f"did you mean result={near!r}? " * bool(near)
        raise LaunchError(
            f"the script wrote no {result} into {out}, which is kept and has {', '.join(names[:SHOWN]) or 'nothing'}: {hint}"
            f"Check result=, and {OUT} in args="
        )
    entries: Mapping[str, Any] = late.load("entries_of")(out / result)
    return entries


def _differing(expected: Mapping[str, Any], out: Path, result: str) -> tuple[Entry, ...]:
    each = late.load("differences")(expected, _entries_of(out, result))
    return tuple(Entry(name=name, difference=difference) for name, difference in each)


def _watched(
    run: Run, out: Path, kill_after: int | None = None, chosen: random.Random | None = None, *, say: Callable[[int], object] = int
) -> tuple[float, int]:
    """Count how often a script writes into its folder, until it ends or, after so many, is killed: a rank and a pause by `chosen`.

    Returns the seconds after which it was killed, 0 = it was not, and the writes. `say` is told the writes so far, again and again.
    """
    start, writes, before = time.monotonic(), 0, _written(out)
    times = [start]
    while run.state in ACTIVE:
        now = _written(out)
        if now != before:
            writes, before = writes + 1, now
            times.append(time.monotonic())
        say(writes)
        if chosen and kill_after is not None and writes >= kill_after:
            time.sleep(chosen.random() * (times[-1] - times[-2]))  # not always right after a write
            if ranks := [pids[0] for pids in ranks_of(run.id).values()]:
                os.kill(chosen.choice(ranks), signal.SIGKILL)
                after = time.monotonic() - start
                return (after, writes) if run.wait().state == "failed" else (0.0, writes)
        time.sleep(0.005)
    return 0.0, writes + (_written(out) != before)


def _written(out: Path) -> int:
    """When something in a folder was written last."""
    times = [0]
    for path in out.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            times.append(path.stat().st_mtime_ns)
    return max(times)
