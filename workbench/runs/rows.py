"""Reads the JSON lines of a run as they grow. A damaged row is left out and counted, and the others stand, as in a damaged trace."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from workbench.core import run_directory, units
from workbench.core.checks import is_number, is_whole
from workbench.core.codec import JsonDataclass
from workbench.core.run_directory import METRIC_KEYS, METRICS, short
from workbench.runs.rank_ends import MANY_RANKS, SAMPLED, RankEnds
from workbench.runs.rank_steps import RankMeans, RankSteps
from workbench.timeline.analysis.alarm_events import AlarmEvent
from workbench.timeline.reading import rank_notes
from workbench.timeline.timeline import LEFT_OUT, WARNING, Timeline

PARTS = {
    "weights": "the weights before the step",
    "buffers": "the module's buffers before the step",
    "optimizer": "the optimizer's state",
    "schedule": "the learning-rate schedule",
    "scaler": "the gradient scaler",
    "ema": "the averaged weights",
    "compression": "what PowerSGD keeps between two steps",
    "samples": "the order of the samples",
    "batch": "the content of the batch",
    "random": "the random numbers of the training process",
    "loss": "the loss",
    "own gradients": "the gradients of the rank's own samples",
    "gradients": "the reduced gradients",
}
"""What a step depends on and computes, in this order: of several parts that differ in a step, the first is the cause."""

FIRST_BYTES = 1 << 16
"""Of a rank's file: in them is what it says beside its steps when it begins."""


def said_by(run_dir: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank has written at the beginning of its file, beside its steps; empty if it has no file."""
    try:
        with open(run_dir / run_directory.rank_file(rank), "rb") as file:
            rows = [run_directory.parse_row(line) or {} for line in file.read(FIRST_BYTES).split(b"\n")]
    except OSError:
        return {}
    return {name: value for row in rows if "step" not in row for name, value in row.items()}


class Rows:
    """The sound rows of one file, as they come.

    Attributes:
        anew: has the last read begun anew, because the file was replaced (a run that went on from a checkpoint)?
    """

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], str] = lambda row: "") -> None:
        """Read nothing yet."""
        self.anew = False
        self._tail, self._check = run_directory.LineTail(path), check
        self._left_out, self._first = 0, ""

    def read(self) -> list[dict[str, Any]]:
        """The sound rows that are new."""
        new = self._tail.read(salvage=True)
        self.anew = self._tail.anew
        if self.anew:
            self._left_out, self._first = 0, ""
        sound = []
        for row in new:
            if why := self._check(row):
                self.leave_out(f"{why}: {short(row, 80)}")
            else:
                sound.append(row)
        return sound

    def leave_out(self, why: str) -> None:
        """Count a damaged row."""
        self._left_out += 1
        self._first = self._first or why

    @property
    def note(self) -> str:
        """What was left out; "" for nothing."""
        count = self._left_out + self._tail.damaged
        if not count:
            return ""
        rows = "1 damaged row is left out" if count == 1 else f"{count} damaged rows are left out, the first"
        return f"{self._tail.path.name}: {rows}: {self._tail.first_damage or self._first}"


class RunRows:
    """The files of rows of one run; each call reads only what is new."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[str, tuple[Rows, list[dict[str, Any]]]] = {}
        self._timelines: dict[str, tuple[int, Timeline]] = {}
        self._steps: dict[str, RankSteps] = {}
        self._plain: dict[str, tuple[RankMeans, Timeline]] = {}
        self._ends: dict[str, RankEnds] = {}

    def read(self, name: str) -> list[dict[str, Any]]:
        """All sound rows of a file."""
        if name not in self._files:
            self._files[name] = Rows(self._run_dir / name, *([check_metric] if name == METRICS else [])), []
        file, rows = self._files[name]
        new = file.read()
        if file.anew:  # the run went on from a checkpoint, and what came after that is taken again
            rows.clear()
            self._timelines.pop(name, None)
        rows += new
        return rows

    def timeline(self, name: str) -> Timeline:
        """The timeline of a rank's file; the same object until there are more rows."""
        if (steps := self._plain_steps(name)) is not None:
            means, same = self._plain.get(name, (None, None))
            if same is None or means is not steps.means:
                same = steps.timeline()
                self._plain[name] = steps.means, same
            return same
        rows = self.read(name)
        count, timeline = self._timelines.get(name, (-1, None))
        if timeline is None or count != len(rows):
            timeline = Timeline.from_lines(rows, rank=run_directory.rank_of(name) or 0)
            self._timelines[name] = len(rows), timeline
        return timeline

    def rank_notes(self, world_size: int) -> tuple[list[str], list[str]]:
        """Notes on the training itself, and on rows of the ranks' files that were left out."""
        names = self.ranks
        sampled = len(names) > MANY_RANKS and not all(self._end(name).complete for name in names)
        other_rows = [self._end(name).other_rows if len(names) > MANY_RANKS else self._other_rows(name) for name in names]
        training = training_notes(
            {run_directory.rank_of(name) or 0: rows for name, rows in zip(names, other_rows, strict=True)}, world_size
        )
        notes = [(name, note) for name, rank in zip(names, self._means(names), strict=True) for note in rank.notes]
        left_out = [f"{name}: {note.removeprefix(LEFT_OUT)}" for name, note in notes if note.startswith(LEFT_OUT)]
        return [*training, *([SAMPLED.format(len(names))] if sampled else [])], left_out

    def _other_rows(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The rows of a rank's file that are no steps."""
        if ends := self._whole(name):
            return ends.other_rows
        steps = self._plain_steps(name)
        return [row for row in self.read(name) if "step" not in row] if steps is None else steps.other_rows

    @property
    def other_rows(self) -> dict[int, Sequence[Mapping[str, Any]]]:
        """Rank → the rows of its file that are no steps."""
        return {run_directory.rank_of(name) or 0: self._other_rows(name) for name in self.ranks}

    def _end(self, name: str) -> RankEnds:
        return self._ends.setdefault(name, RankEnds(self._run_dir / name)).read()

    def _whole(self, name: str) -> RankEnds | None:
        """The ends of a long file that say what the whole of it comes to; None for one of which each step is read already."""
        return None if name in self._steps else self._ends.setdefault(name, RankEnds(self._run_dir / name)).whole()

    @property
    def ranks(self) -> list[str]:
        """The files of the ranks that have written, by rank."""
        try:
            numbers = [rank for name in os.listdir(self._run_dir) if (rank := run_directory.rank_of(name)) is not None]
        except FileNotFoundError:
            return []
        return [run_directory.rank_file(number) for number in sorted(numbers)]

    @property
    def timelines(self) -> "Sequence[Timeline]":
        """The timeline of each rank: a list, or of very many ranks what reads a rank when it is asked for."""
        names = self.ranks
        return Timelines(self, names) if len(names) > MANY_RANKS else [self.timeline(name) for name in names]

    @property
    def all_means(self) -> list[RankMeans]:
        """`means` of each rank; of very many, those of their last steps."""
        return self._means(self.ranks)

    def _means(self, names: Sequence[str]) -> list[RankMeans]:
        return [self._end(name).means if len(names) > MANY_RANKS else self.means(name) for name in names]

    def means(self, name: str) -> RankMeans:
        """What the steps of a rank's file come to; without an object of each step where all rows are sound, and without reading it whole
        where it says what they come to.
        """
        if ends := self._whole(name):
            return ends.means
        steps = self._plain_steps(name)
        return RankMeans.of(self.timeline(name)) if steps is None else steps.means

    def _plain_steps(self, name: str) -> RankSteps | None:
        steps = self._steps.setdefault(name, RankSteps(self._run_dir / name))
        return steps if steps.read() else None

    @property
    def notes(self) -> list[str]:
        """What was left out of the files that were read."""
        return [file.note for _, (file, _) in sorted(self._files.items()) if file.note]


class Timelines(Sequence[Timeline]):
    """The timelines of a run of very many ranks, by rank. The file of a rank is read when its timeline is asked for."""

    def __init__(self, files: RunRows, names: Sequence[str]) -> None:
        self._files, self._names = files, names

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, place: int) -> Timeline: ...
    @overload
    def __getitem__(self, place: slice) -> "Timelines": ...
    def __getitem__(self, place: int | slice) -> "Timeline | Timelines":
        names = self._names[place]
        return self._files.timeline(names) if isinstance(names, str) else Timelines(self._files, names)

    def __repr__(self) -> str:
        return f"<the timelines of {len(self):,} ranks, each read on request>"


def check_metric(row: Mapping[str, Any]) -> str:
    """What is wrong with a row of METRICS: its step is a whole number, all else a number. A loss, or a figure, may be NaN or infinite."""
    if not is_whole(row.get("step"), least=0, most=2**53):
        return "it has no step number"
    if not is_whole(row.get("steps", 0), least=0, most=2**53) and row["steps"] is not None:
        return "steps is not a whole number"
    for name, least in (("lr", -1e300), ("samples", 0), ("seconds", 0)):
        if row.get(name) is not None and not is_number(row[name], least=least, most=1e300):
            return f"{name} is not a number" + " from 0 on" * (not least)
    for name in row.keys() - (METRIC_KEYS - {"loss"}):
        value = row[name]
        if value is not None and not isinstance(value, float) and not is_number(value, least=-1e300, most=1e300):
            return f"{name} is not a number"
    return ""


def slowest(row: Mapping[str, Any]) -> float:
    """Seconds of the slowest rank in a row of EVALUATIONS; 0 where they are not known."""
    seconds = row.get("seconds")
    return max([float(each) for each in seconds if is_number(each, least=0, most=1e12)] if isinstance(seconds, list) else [], default=0.0)


def losses_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) of the rows of METRICS that have one."""
    return [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]


def loss_note(losses: Sequence[tuple[int, float]]) -> str:
    """A note on losses that are NaN or infinite, by step; "" where there is none."""
    bad = [step for step, loss in losses if not math.isfinite(loss)]
    if not bad:
        return ""
    later = sum(step >= bad[0] for step, _ in losses)
    if len(bad) == len(losses):
        when = "from the first step on"
    else:
        when = f"from step {bad[0]} on" if later == len(bad) else f"in {len(bad)} of {len(losses)} steps, first in step {bad[0]}"
    help_ = "a smaller learning rate, a warm-up, clip_grad_norm=1.0, or for fp16 precision='amp_bf16' may help"
    return f"the loss is NaN or infinite {when}: {help_}" + "; check the data, too" * (len(bad) == len(losses))


def busy_note(run_dir: Path) -> str:
    """A note on a machine with more processes that wanted a core, when the run began, than it has cores; "" = it had none."""
    info: dict[str, Any] = {}
    with contextlib.suppress(run_directory.DamagedRunError):
        info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
    machine = state if isinstance(state := info.get("machine"), Mapping) else {}
    load, cores = machine.get("load"), machine.get("cores", info.get("cores"))  # a load counts the whole machine, not our share of it
    if not is_number(load, least=0, most=1e6) or not is_number(cores, least=1, most=1e6) or load <= cores:
        return ""
    return f"the machine was busy in the minute before it began (load {load:.1f}, {units.several(int(cores), 'core')}): its times may vary"


def threads_note(run_dir: Path) -> str:
    """A note on a run whose `threads` were set to more than its machine has cores for; "" = they were not."""
    info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
    spec, cores = info["spec"], info.get("cores")
    threads, ranks = spec.get("threads", 1), spec.get("nproc_per_node", 1)
    if not is_number(cores, least=1, most=1e6) or threads == 1 or threads * ranks <= cores:
        return ""
    of_ranks = f" in each of {ranks} ranks" if ranks > 1 else ""
    return f"threads={threads}{of_ranks} on {units.several(int(cores), 'core')}: threads that wait for a core make the steps slower"


def resume_notes(rows: Sequence[Mapping[str, Any]], run_dir: Path, nnodes: int = 1) -> list[str]:
    """Notes on signals that ended a run, and on what was passed over, or has changed, when it went on.

    Args:
        rows: rows of the file RESUMES.
        run_dir: whether its last attempt was ended by a signal is seen there.
        nnodes: machines of the run; one of several does not go on in its own directory.
    """
    notes = []
    present = len(rows) if (run_dir / run_directory.PREEMPTED).exists() else 0
    for number, row in enumerate(rows, 1):
        passed_over = row.get("passed_over")
        if isinstance(passed_over, Mapping) and passed_over:
            each = "; ".join(f"{name}, {why!s:.200}" for name, why in passed_over.items())
            notes.append(f"it resumed from step {row.get('step')}, because a later checkpoint could not be used: {each}")
        if row.get("ended_by"):
            step, kept = row.get("step"), row.get("goes_on_from", row.get("step"))
            if number != present:
                notes.append(f"{row['ended_by']!s:.20} ended an earlier attempt after step {step}")
                continue
            call = "wb.launch(resume=run) goes on"
            if nnodes > 1:
                call = "a new run, wb.launch(run.spec.replace(nnodes=…, accumulation=…), resume=run), goes on"
            how = f"with a checkpoint: {call}"
            if kept != step:
                how = f"without a sound checkpoint: {f'{call} from step {kept}' if kept else 'there is none before it, so it begins anew'}"
            notes.append(f"{row['ended_by']!s:.20} ended it after step {step}, {how}")
            continue
        more = row.get("notes")
        notes += [f"when it resumed from step {row.get('step')}: {note}" for note in (more if isinstance(more, list) else [])]
    return notes


def training_notes(other_rows: Mapping[int, Sequence[Mapping[str, Any]]], world_size: int) -> list[str]:
    """Notes on the training itself: warnings of ranks, and what a comparison of what they read shows."""
    warnings: dict[str, list[int]] = {}
    alarms: dict[str, AlarmEvent] = {}
    reads: dict[int, Mapping[str, Any]] = {}
    for rank, rows in other_rows.items():
        for row in rows:
            note = row.get("note")
            if isinstance(note, str) and note.startswith(WARNING):
                warnings.setdefault(note.removeprefix(WARNING), []).append(rank)
            if alarm := AlarmEvent.of_row(row.get("alarm")):
                alarms[alarm.words(world_size)] = alarm
            if isinstance(read := row.get("reads"), Mapping) and all(isinstance(read.get(name, ""), str) for name in ("first", "data")):
                reads[rank] = read
    return [*rank_notes(reads, world_size), *_each_once(list(warnings), alarms, world_size)]


def _each_once(warnings: Sequence[str], alarms: Mapping[str, AlarmEvent], world_size: int) -> list[str]:
    """Warnings, of which the alarms of several ranks about one event are one, with the figures of the first of them."""
    found: dict[str, set[int]] = {}
    for text in warnings:
        alarm = alarms.get(text)
        same = (kept for kept in found if alarm and kept in alarms and alarms[kept].same_event(alarm) and alarm.rank not in found[kept])
        found.setdefault(next(same, text), set()).update({alarm.rank} if alarm else ())
    notes = []
    for text, ranks in found.items():
        several = "all ranks" if len(ranks) == world_size else f"ranks {', '.join(map(str, sorted(ranks)))}"
        notes.append(text.replace(f" on rank {alarms[text].rank}", f" on {several}", 1) if len(ranks) > 1 else text)
    return notes


_DIGESTS = re.compile(r"rank(\d+)-(\d+)\.jsonl")


def digest_files(run_dir: Path) -> list[tuple[int, int, Path]]:
    """(attempt, rank, file) of the files with digests of a run's steps, by attempt, from 1, and rank."""
    named = ((_DIGESTS.fullmatch(file.name), file) for file in (run_dir / run_directory.FINGERPRINTS).glob("rank*-*.jsonl"))
    return sorted((int(match[2]), int(match[1]), file) for match, file in named if match)


def digest_rows(run_dir: Path, attempt: int | Literal["all", "last"] = "all") -> dict[tuple[int, int], dict[str, Any]]:
    """(step, rank) → the row with the digests of what that rank had, and computed, in the step.

    Args:
        run_dir: run directory of the run.
        attempt: the number of one, from 1; "last" = the last of each rank; "all" = where a step was taken several times, as it was last.
    """
    files = digest_files(run_dir)
    last = {rank: number for number, rank, _ in files}
    rows = dict[tuple[int, int], dict[str, Any]]()
    for number, rank, file in files:
        if attempt == "all" or number == (last[rank] if attempt == "last" else attempt):
            rows.update(((int(row["step"]), rank), row) for row in run_directory.LineTail(file).read(salvage=True))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(JsonDataclass):
    """Where a resumed training differs first from the undisturbed one."""

    step: int
    """The step, from 1; one more than the last where only what the training ends with differs."""
    rank: int
    """The lowest rank that differs in it."""
    part: str
    """A key of `PARTS`."""
    kills: int
    """Kills before it. 0 = the two trainings differ before the first kill: the training itself is not repeatable."""


def first_difference(undisturbed: Path, interrupted: Path, ranks: int) -> Difference | None:
    """Where the fingerprints of two run directories differ first: by the attempt of the second, then by step, part and rank."""
    expected = digest_rows(undisturbed, 1)
    for attempt in range(1, 1 + max((number for number, rank, _ in digest_files(interrupted) if not rank), default=0)):
        rows = {key: row for key, row in digest_rows(interrupted, attempt).items() if key[1] < ranks}
        if differences := list(_differing(expected, rows)):
            step, place, rank = min(differences)
            return Difference(step=step, rank=rank, part=list(PARTS)[place], kills=attempt - 1)
    return None


def _differing(
    expected: Mapping[tuple[int, int], Mapping[str, Any]], rows: Mapping[tuple[int, int], Mapping[str, Any]]
) -> Iterator[tuple[int, int, int]]:
    """(step, place in PARTS, rank) of what is not as it was."""
    for (step, rank), row in rows.items():
        before = expected.get((step, rank), {}).get("parts", {})
        yield from ((step, place, rank) for place, part in enumerate(PARTS) if row["parts"].get(part) != before.get(part))


def unrecorded(run_dirs: Sequence[Path], steps: int, ranks: int) -> list[str]:
    """The parts of PARTS that some rank of the first attempts of runs did not record in some step, so that none can be compared.

    Args:
        run_dirs: run directories of the runs that are compared.
        steps: number of steps that each has taken.
        ranks: number of ranks of each.
    """
    rows = [digest_rows(run_dir, 1) for run_dir in run_dirs]
    each = [of.get((step, rank), {"parts": {}})["parts"] for of in rows for step in range(1, steps + 1) for rank in range(ranks)]
    return [part for part in PARTS if any(part not in parts for parts in each)]
