"""Proves the resume of a script: kills it at random moments, launches it again, and compares what it writes at its end."""

import ast
import contextlib
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import late
from workbench.core.brief import Briefed
from workbench.core.checks import nearest
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.progress import left_by
from workbench.core.run_directory import FINGERPRINTS, OUT, LineTail
from workbench.core.units import seconds, several
from workbench.runs.launch.cut_saves import hold_renames, never_cut, not_cut
from workbench.runs.launch.kill_script import LATEST, Due, Watched, is_log, kill_steps, watch
from workbench.runs.launch.launch import launch
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.run import Run

SHOWN = 8
"""Entries that are shown at most."""
WHOLE = (
    "Write each checkpoint under a temporary name and rename it once all of it is written (os.replace), or go on from the last one that is "
    "whole"
)
"""What to do about a save that a kill can cut in two."""
ITEMS = {
    "weights": "the weights that the step updates",
    "samples": "the samples (sampler, position in the data, a save between two micro-batches)",
    "random": "the random numbers (RNG of torch)",
    "others": "the random numbers of numpy or Python (RNG)",
    "optimizer": "the optimizer's state",
    "schedule": "the learning rate (schedule, or another option of the optimizer)",
    "modules": "other weights or buffers (of another optimizer or module, frozen ones, of BatchNorm)",
    "gradients": "the gradients (an attribute or a count that no checkpoint has, another generator, the gradient scaler; with several "
    "ranks also what another draws or reads, or the order of a reduction)",
}
"""What an optimizer step depends on, as `follow_script` records it: what differs may follow from what comes before it."""
_SAVED = ("samples", "random", "others", "optimizer", "schedule")
"""Items that a checkpoint saves beside the weights."""
_SHORT = {item: words.partition(" (")[0] for item, words in ITEMS.items()}
_MOMENT = ("epoch", "global_step", "step", "iteration")
"""Entries that say after how much training a result was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(JsonDataclass):
    """An entry of the result that differs."""

    name: str
    """Its keys, with dots between them: `model.0.weight`."""
    difference: str
    """In what: "missing", a largest difference, or both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResumeProof(Briefed, display.Shown):
    """Whether a script that is killed and launched again writes bit for bit the same result as an undisturbed one."""

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
    """Those of the last launch, which ran to the end: fewer, if it went on from a checkpoint. A launch after the last step may take one."""
    asked: int = 0
    """Kills that were to be; fewer came where the script ended before."""
    writing: tuple[str, ...] = ()
    """The file of the folder that was being written at each kill; "" = none was."""
    uncut: tuple[str, ...] = ()
    """Files that another program renames as soon as they are written: with `during_save` they should be cut, and could not be."""
    failed: str = ""
    """The error of the launch after the last kill, which failed by itself; "" = it ran to its end. Then nothing was compared."""
    first: str = ""
    """What differs in the first optimizer step after a kill that differs, with what is equal there, or else in their number; "" = nothing
    does, or none was seen."""
    equal_steps: int = 0
    """Optimizer steps after a kill that are the undisturbed script's in all that is recorded of them, before the first that differs."""
    as_bytes: bool = False
    """Could no entries be read, so that the result was compared as one text of bytes?"""
    seconds: float
    """How long the undisturbed script took."""
    undisturbed: str
    """Folder of the script that was not killed."""
    interrupted: str
    """Folder of the one that was."""

    @property
    def began_again(self) -> bool:
        """Whether the last launch trained all steps, as if it had found no checkpoint; False if `steps` <= 1, which do not tell."""
        return 1 < self.steps <= self.last_steps

    @property
    def too_late(self) -> bool:
        """Whether there was no kill, or at most a step or two were left to train afterwards, so that an equal result proves too little.

        False where `steps` <= 1.
        """
        return self.steps > 1 and (not self.kills or self.last_steps <= 1)

    @property
    def exact(self) -> bool:
        """Whether the result is bit for bit the same, and the steps show that the script continued from a checkpoint.

        False if `steps` <= 1, or if a save could not be cut.
        """
        proved = self.steps > 1 and not self.began_again and not self.too_late and not self.uncut
        return proved and not self.failed and not self.differing

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        after = f"after {several(len(self.kills), 'kill')}" if self.kills else "after another launch"
        if len(self.kills) < self.asked:
            after += f" (the script ended before kill {len(self.kills) + 1} of {self.asked})"
        torn = next((f"kill {number} came while {name} was written" for number, name in enumerate(self.writing, 1) if name), "")
        if self.failed:
            todo = "Without a kill it ran to its end: see that it can load what it has saved"
            if self.writing[-1]:
                todo = (
                    f"It takes what was half written for a checkpoint, since its save is not atomic. {WHOLE}. Until then, delete what is "
                    "half written before it is launched again"
                )
            return f"Not resumed: launched again after {several(len(self.kills), 'kill')}{self._when()}, it failed: {self.failed}. {todo}"
        if self.began_again:
            equal = "differs as well" if self.differing else "is equal because the script is deterministic, which says nothing of a resume"
            why = f"The script does not load what it saves into {OUT}: see that it loads"
            if torn:
                why = f"Either the script does not load what it saves into {OUT}, or it dropped it, as {torn}. {WHOLE}"
            elif self.kills:
                why = (
                    f"Either the script does not load what it saves into {OUT}, or no checkpoint was complete by then"
                    f"{self._when()}: see that it loads, or let it write checkpoints more often"
                )
            again = f"it began again at step 1 and trained all steps ({self.last_steps:,} measured)"
            return f"Not resumed: {after} {again}; the result {equal}. {why}"
        if self.too_late and not self.differing:
            left = "at most a step or two were left to train after the kills"
            if not self.kills:
                left = "the script ended before it could be killed"
            took = f"the undisturbed script took {several(self.steps, 'step')}, and the last launch {several(self.last_steps, 'step')}"
            todo = f"and {not_cut(self.uncut)}" if self.uncut else "let the script train longer, or write its first checkpoint earlier"
            return f"Not proved: {left}{self._when(f'{took}, as measured')}, so an equal result says too little of a resume: {todo}"
        if not self.differing:
            every = "the only entry of the result is" if self.entries == 1 else f"all {self.entries:,} entries of the result are"
            equal = f"{after} {every} bit for bit as in the undisturbed script"
            if self.uncut:
                return f"Not proved: {equal}{self._when()}, but {not_cut(self.uncut)}"
            if not self.exact:
                known = f"{'only one' if self.steps else 'no'} optimizer step of torch was measured in the undisturbed script"
                return (
                    f"Equal, but a resume is not proved: {equal}{self._when(known)}. A seeded script that begins again writes the same: "
                    "see in what it printed that it loads its checkpoint"
                )
            took = f"the last launch took {several(self.last_steps, 'step')}, the undisturbed script {self.steps:,}, as measured"
            return f"Exact: {equal}{self._when(took)}."
        many = f"{len(self.differing):,} of {self.entries:,} entries of the result differ{'s' * (len(self.differing) == 1)}"
        if self.entries == 1:
            many = "the only entry of the result differs"
        if not self.repeatable:
            return (
                f"Not repeatable: {many}, also where nothing is killed, so no checkpoint can make the results equal. Seed all "
                "generators (torch, numpy, random, the workers of loaders) at the start of the script"
            )
        counts = ", ".join(f"{each.name} {each.difference}" for each in self.differing if each.name in _MOMENT)
        if counts:
            return (
                f"Not compared: the result of the undisturbed script and that {after} are of different moments: {counts}. Without a kill "
                "the script writes the same twice. Name a file that each launch writes at its end: with a monitor, Lightning's "
                "ModelCheckpoint(save_last=True) may leave last.ckpt at an earlier epoch, trainer.save_checkpoint after fit does not. If "
                "it is written at the end, the script does not restore its counts"
            )
        lacks = self.first or f". No optimizer step shows what its checkpoint lacks: it may be {', '.join(_SHORT[item] for item in _SAVED)}"
        if self.equal_steps and not self.first:
            seen = f"the {self.equal_steps:,} steps after the resume that were compared are equal in {', '.join(_SHORT.values())}"
            if self.as_bytes:
                return (
                    f"Not compared: {after} the bytes of the result differ, and it is no file of torch.save or safetensors, whose entries "
                    f"can be read; {seen}. Let the script write what is to be compared with torch.save"
                )
            names = ", ".join(f"{entry.name} ({entry.difference})" for entry in sorted(self.differing, key=_telling)[:3])
            lacks = (
                f": {names}{' …' * (len(self.differing) > 3)}. But {seen}, so its checkpoint lacks what they did not use, or only the "
                "result has: a gradient scaler, averaged weights (EMA), a count"
            )
        return (
            f"Not exact: {many} {after}{lacks}. Without a kill the script writes the same twice"
            + f". Or it went on from a part of a checkpoint: {torn}. {WHOLE}" * bool(torn)
        )

    def _when(self, *more: str) -> str:
        """In parentheses: each kill, "3.10 s after its launch, at least 8 steps into it" (the last may not be written yet), and `more`."""
        into = [f", at least {several(step, 'step')} into it" if step else "" for step in self.killed_at or (0,) * len(self.kills)]
        if self.writing:
            into = [text + f", while it wrote {file}" * bool(file) for text, file in zip(into, self.writing, strict=True)]
        told = [f"{seconds(after)} after its launch{steps}" for after, steps in zip(self.kills, into, strict=True)]
        return f" ({'killed ' * bool(told)}{'; '.join([*told, *more])})"

    @property
    def table(self) -> display.Table:
        """The entries that differ, and the verdict; first entries of a schedule or of random numbers, then of the optimizer."""
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
    key, _, rest = entry.name.lower().partition(".")
    return 1 if "opt" in key else 0 if not rest or re.search("sched|random|rng|generator|sampler|scaler", key) else 2


def prove_script_resume(
    script: str | os.PathLike[str],
    *,
    args: Sequence[str],
    result: str,
    folder: Path,
    kills: int,
    during_save: bool,
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

    cut, attempts = False, list[Path]()

    def follow(name: str, what: str, due: Due, chosen: random.Random | None = None) -> tuple[Run, Watched]:
        """Launch it and see what it writes, until it has ended or is killed; whatever interrupts that, such as Ctrl-C, stops it."""
        out = folder / name
        out.mkdir(parents=True, exist_ok=True)
        given = [arg.replace(OUT, str(out)) for arg in args]

        def told(writes: int, steps: int) -> object:
            return say(f"{what}: {_so_far(writes, steps, '' if (out / result).exists() else result)}")

        name = f"{Path(script).stem}-{name}"
        run = launch(script, args=given, timeout=timeout, runs_dir=folder, name=name, **{"watch": True} | launched)
        try:
            (run.path / FINGERPRINTS).mkdir()
            attempts.append(run.path)
            if during_save:
                hold_renames(run, out)
            return run, watch(run, out, due, chosen, say=told)
        except BaseException as why:
            run.stop()
            if isinstance(why, KeyboardInterrupt):
                why.add_note(left_by(run.path))
            raise

    def to_the_end(name: str, what: str) -> tuple[Run, Watched]:
        run, seen = follow(name, what, Due(saves=int(during_save)))  # it looks as often as where it kills
        return ended(run, again=name == "interrupted"), seen

    def ended(run: Run, again: bool) -> Run:
        """The run at its end; raise if it did not end well, unless it was launched again after a kill and failed."""
        run.wait()
        return run if again and done and run.state == "failed" else run.wait(check=True)

    undisturbed, watched = to_the_end("undisturbed", "the undisturbed script")
    expected, total = _entries_of(folder / "undisturbed", result), undisturbed.progress[0]
    if len(watched.writes) < 2:  # the last is the result
        out = folder / "undisturbed"
        logs = sorted({str(path.relative_to(out)) for path in out.rglob("*") if is_log(path.name)} | watched.logs)
        but = f" but logs ({', '.join(logs[:SHOWN])})" if logs else ""
        raise LaunchError(
            f"{script} wrote nothing{but} into {OUT} ({out}) before its end, so there is no checkpoint to go on from: let it train "
            "longer, or write checkpoints more often"
        )
    saves, closes = ([step for step in steps if total < 2 or step < LATEST * total] for steps in (watched.saves, watched.closes))
    cut = during_save and not saves  # they are too short to be caught, or a child process writes
    if cut and not closes:
        raise LaunchError(
            f"during_save=True, but {script} was not seen writing a file into {OUT} in the first {LATEST:.0%} of its steps: it writes "
            "elsewhere and renames files, which no kill cuts in two; or it writes later; leave during_save out"
        )
    chosen, left = random.Random(seed), len(watched.writes)
    tries, done = kill_steps(watched.writes, total, kills, chosen), list[float]()
    for tried, at in enumerate(tries, 1):
        shutil.rmtree(folder / "interrupted", ignore_errors=True)
        attempts.clear()
        done, steps, writing = [], list[int](), list[str]()
        last: Run | None = None
        while len(done) < kills and left > 1:
            number = f"kill {len(done) + 1} of {kills}"
            if at:
                looks = sum(max(at[len(done)], sum(steps)) <= step for step in (closes if cut else saves))
                save = chosen.randint(1, max(1, looks // tried)) if during_save else 0
                due = Due(steps=max(1, at[len(done)] - sum(steps)), saves=save, logs=watched.logs, cut=cut)
                what = f"{number} comes after {several(due.steps, 'step')} of this launch{', during a save' * during_save}"
            else:
                least = max(1, left // 3) if len(done) == kills - 1 else 1  # so that there is a whole checkpoint before the last kill
                due = Due(writes=chosen.randint(least, max(least, left - 2)), saves=int(during_save), logs=watched.logs, cut=cut)
                what = f"{number} comes once it has written {several(due.writes, 'time')}"
            run, seen = follow("interrupted", what, due, chosen)
            if seen.killed:
                done.append(seen.killed)
                steps.append(run.progress[0])
                writing.append(seen.writing)
                left -= len(seen.writes) * (not at)
            elif done or at:
                last = ended(run, again=True)
                break
            else:  # it was seen to write less often than undisturbed, which a busy machine decides: once more, from the start
                left = min(due.writes, len(seen.writes))
                shutil.rmtree(folder / "interrupted")
                attempts.clear()
        if not done and not at:
            todo = f"let it train longer, or write checkpoints more often into {OUT}"
            todo = not_cut(uncut) if (uncut := never_cut(watched.uncut, ())) else todo
            raise LaunchError(f"{script} ended before it could be killed, each time: {todo}")
        again = tried < len(tries) and not (last and last.error)
        if again and (len(done) < kills or sum(steps) >= total):  # the kills came too late
            continue
        if last is None or not done:
            last, _ = to_the_end("interrupted", "the resumed script")
        if not again or last.error or last.progress[0] > 1:
            break
    assert last is not None
    message = (last.error.message.strip() or "without a message") if last.error else "\n"
    failed = message.splitlines()[0].replace(str(folder / "interrupted"), OUT)[:300]
    differing = () if failed else _differing(expected, folder / "interrupted", result)
    repeatable, first, equal = True, "", 0
    if differing:
        first, equal = _first_difference(undisturbed.path, attempts)
        to_the_end("again", "the undisturbed script once more")
        repeatable = not _differing(expected, folder / "again", result)
    return ScriptResumeProof(
        entries=len(expected),
        differing=differing,
        repeatable=repeatable,
        kills=tuple(done),
        killed_at=tuple(steps),
        steps=total,
        last_steps=last.progress[0],
        asked=kills,
        writing=tuple(writing),
        uncut=never_cut(watched.uncut, writing),
        failed=failed,
        first=first,
        equal_steps=equal,
        as_bytes=isinstance(expected.get(Path(result).name), bytes),
        seconds=undisturbed.seconds,
        undisturbed=str(folder / "undisturbed"),
        interrupted=str(folder / "interrupted"),
    )


def _so_far(writes: int, steps: int, lacks: str) -> str:
    """What a script has done, in words; `lacks`: the result, if it is not there yet."""
    trained = f"training, {several(steps, 'step')} so far" if steps else "training"
    if not writes:
        return f"{trained}; no file written yet"
    return f"{trained}; it has written {several(writes, 'time')}" + f", {lacks} not yet" * bool(lacks)


def check_given(script: str | os.PathLike[str], args: Any, result: Any) -> str:
    """The result's path in the folder of checkpoints; raise if it, or what the script needs, is missing in what was given.

    Raises:
        ValueError: so it is.
    """
    result, name = os.fspath(result) if isinstance(result, os.PathLike) else result, os.fspath(script)
    if not (result and isinstance(result, str) and args) or isinstance(args, str | os.PathLike):
        raise ValueError(
            f"prove_resume({name!r}): a script needs args=, a list with {OUT}, the folder of checkpoints, and result=, "
            f'the file in it that is compared: prove_resume("train.py", args=["--out", "{OUT}"], result="last.pt")'
        )
    if not any(OUT in str(arg) for arg in args):
        raise ValueError(
            f"prove_resume({name!r}): only {OUT} is missing in args={list(args)!r}: it stands for the folder of checkpoints, which "
            f'prove_resume creates, as in args=["--out", "{OUT}"]'
        )
    inside: str = result.removeprefix(f"{OUT}/")
    if Path(inside).is_absolute() or ".." in Path(inside).parts:
        raise ValueError(f'result={inside!r}: a file inside of {OUT} is expected, such as "last.pt"')
    return inside


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
    places = sorted({str(place) for place in (out, out.resolve())}, key=len, reverse=True)  # Lightning saves them; one may be in the other

    def named(value: Any) -> Any:
        for place in places:
            if isinstance(value, str | bytes):
                value = value.replace(place, OUT) if isinstance(value, str) else value.replace(place.encode(), OUT.encode())
        return value

    return {named(name): named(value) for name, value in late.load("entries_of")(out / result).items()}


def _first_difference(undisturbed: Path, attempts: Sequence[Path]) -> tuple[str, int]:
    """Where a launch first took another step than the undisturbed script, from the same weights: see `ScriptResumeProof.first`.

    Also the number of steps of resumed launches before that which are the same.
    """
    equal = 0
    expected, fresh, *resumed = map(_trained, (undisturbed, *attempts))
    places = {row["weights"]: number for number, row in reversed([*enumerate(expected)])}
    same = [item for item in ITEMS if not fresh or fresh[0].get(item) == expected[0].get(item)]  # both began anew: a seed may lack
    for rows in filter(None, resumed):
        begin = places.get(rows[0]["weights"], 0)
        for passed, (row, other) in enumerate(zip(rows, expected[begin:], strict=False)):
            parted = [item for item in same if row.get(item) != other.get(item)]
            anew = [item for item in parted if row.get(item) == expected[0].get(item)]
            parted.sort(key=lambda item: item not in ("random", "others") or item not in anew)  # the order of the samples may be drawn
            if parted:
                either = parted[0] == "samples" and "samples" not in anew  # drawn numbers may change them; another place draws others
                causes = [item for item in ("random", "others", "samples") if item in parted] if either else parted[:1]
                when = f"after {several(passed, 'equal step')} of the resumed script" if passed else "the first after the resume"
                how = " (as at the start)" * (parted[0] in anew)
                later = ", ".join(_SHORT[item] for item in parted if item not in causes)
                more = f"; different there too, perhaps as a consequence: {later}" * bool(later)
                others = ", ".join(_SHORT[item] for item in same if item not in parted) or "nothing"
                where = f"different in step {begin + passed + 1}, {when}{how}{more}. Equal there: {others}"
                return f", first {', or '.join(ITEMS[item] for item in causes)}: {where}", equal
            equal += 1
    number = ""
    if resumed and resumed[-1] and len(resumed[-1]) != (left := len(expected) - places.get(resumed[-1][0]["weights"], 0)):
        number = (
            f". Its steps are right, but not their number: from the same weights on, the resumed script took "
            f"{several(len(resumed[-1]), 'optimizer step')}, and the undisturbed one {left:,}. See at which step it continues, and "
            "where it ends; a gradient scaler that is not restored skips other steps, too"
        )
    return number, equal


def _trained(launch: Path) -> list[Any]:
    """The rows of a launch from its first training step on: before that, torch's `get_state_dict` takes one to create the states."""
    rows = [*LineTail(launch / FINGERPRINTS / "rank0-1.jsonl").read()]
    return rows[next((number for number, row in enumerate(rows) if "samples" in row), 0) :]


def _differing(expected: Mapping[str, Any], out: Path, result: str) -> tuple[Entry, ...]:
    each = late.load("differences")(expected, _entries_of(out, result))
    return tuple(Entry(name=name, difference=difference) for name, difference in each)
