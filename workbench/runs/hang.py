"""Judges whether a run hangs, and names who holds up whom, from what each rank wrote about itself (`rank_watchdog.py`).

A rank that waits in a collective waits for the members of its group that have not called it. Whoever is waited for and waits for nobody
holds up the others. Where ranks wait for each other, they have called different collectives.

How long the ranks must have been without progress depends on what that rank does: short where nothing can follow (it waits itself, or has
ended), longer where it sleeps or waits for something outside, and minutes where it works. Before its second step, modules, models and data
are loaded, and a slow start is no hang: a rank that sleeps there is named soon only if nobody does anything at all, by /proc.

A rank that cannot answer is in C code that holds Python's lock, or does not get a core. If it waits for a core, it works. In C code it may
compute or be stuck, and nothing tells the one from the other. So what it did before decides: a rank that has taken steps, each of which let
others answer, is named soon, whether it uses its CPU or not; before the second step, where modules and data are loaded, it has
SILENT_START; there and in an evaluation or a checkpoint it works if it uses its CPU.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.package import is_users
from workbench.runs import flight_recorder
from workbench.runs.failure import Failure
from workbench.runs.rank_watchdog import starting, waits_for_message

FLOOR = 8.0
"""Seconds without progress of any rank before which nothing is called a hang. Chosen: a stack is collected and judged within 15 s."""
USUAL = 3.0
"""No progress for so many times the longest usual gap between two signs of progress is out of the ordinary."""
PLANNED = 10.0
"""Seconds for a rank that is idle in an evaluation or a checkpoint."""
STARTING = 30.0
"""Seconds for a rank that is idle before its second step, by its stack and its CPU time."""
IDLE, IDLE_START = 7.0, 10.0
"""Seconds for which such a rank has done nothing at all by /proc (`IdleTime`), and seconds without progress: where no other rank works, for
which it may wait, it is named after these."""
SILENT_START = 60.0
"""Seconds for a rank that cannot answer and has not taken its second step."""
ALONE = 30.0
"""Seconds where no rank waits for another."""
IN_TRANSIT = 60.0
"""Seconds where all ranks are in the same collective, or wait for messages: these may be large, or the network slow."""
WORKING = 300.0
"""Seconds for a rank that works while others wait; for an evaluation that the spec planned (`evaluate=`), idle or not."""
STOP = 30.0
"""Seconds without progress after which `on_hang="stop"` ends a run, at least."""
FRESH = 12.0
"""Seconds for which a report of a rank counts. One that works writes again within 5 s."""

_PLANNED = re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|save|saving|checkpoint|checkpoints|ckpt|snapshot)(_|$)")
_WAITS = re.compile(
    r"\.(wait|item|tolist|cpu|numpy|synchronize|result)\(|\b(barrier|all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*)\("
)
USES_CPU, WAITS_FOR_A_CORE = "uses its CPU", "waits for a core"
"""What a rank does that cannot answer, as the kernel counts it."""
COLLECTS = "the evaluation, until all ranks have evaluated"
"""What a rank waits in that has evaluated its part."""
WRAPPERS = ("wrapper", "wrapped", "decorate_context", "_wrapped_call_impl", "_call_impl", "inner", "_fn")
"""Functions of torch that call what was called."""
Frame = tuple[str, int, str, str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Ranks that wait in the same place."""

    ranks: tuple[int, ...]
    what: str
    """What they wait in, such as `all_reduce number 412 ([20] Float), called by backward`."""
    line: str
    """The user's line, such as `train.py:61`."""

    def __str__(self) -> str:
        return self.with_verb("waits", "wait")

    def with_verb(self, one: str, more: str) -> str:
        """The sentence with another verb, for one rank and for more."""
        return f"{_ranks(self.ranks)} {one if len(self.ranks) == 1 else more} in {self.what}" + (f", {self.line}" if self.line else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Who holds up a run, where, and who waits for it."""

    rank: int | None
    """The rank that holds up the others; None = none of them (all are in the same collective)."""
    doing: str
    """What that rank does, such as `sleeps in validate()`."""
    line: str
    """The line where it does it, the user's if there is one, such as `train.py:88`."""
    waiting: tuple[Waiting, ...]
    """What the others wait in."""
    missing: tuple[int, ...] = ()
    """Ranks that have not called the collective in which that rank waits itself."""
    seconds: float
    """Seconds without progress when it was judged."""
    usual: float
    """The longest usual gap between two signs of progress, in seconds."""
    since: float
    """When the last progress was, by the wall clock."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stacks of all threads of each rank, innermost call last."""
    over: float | None = None
    """Seconds that it lasted, if the run went on by itself."""
    stopped: bool = False
    """Was the run ended because of it (`on_hang="stop"`)?"""

    @property
    def message(self) -> str:
        """Who holds up whom, in one sentence."""
        who = "no rank goes on" if self.rank is None else f"rank {self.rank}"
        text = f"{who} {self.doing}" if self.rank is not None else f"{who}: {self.doing}"
        text += f", {self.line}" if self.line else ""
        text += f", which {_ranks(self.missing)} {'has' if len(self.missing) == 1 else 'have'} not called" if self.missing else ""
        return text + (", while " + "; ".join(map(str, self.waiting)) if self.waiting else "")

    def __str__(self) -> str:
        if self.over is not None:
            return f"for {self.over:.0f} s no rank made progress, then the run went on: {self.message}"
        usual = f" (usually {self.usual:.1f} s at most)" if self.usual >= 0.05 else ""
        return f"hangs: no progress for {max(self.seconds, 0):.0f} s{usual}: {self.message}"

    @property
    def failure(self) -> Failure:
        """The same as the reason why a run failed."""
        return Failure(
            rank=self.rank, kind="hang", message=f"the run hung: {self.message}", traceback=self.stacks.get(self.rank or 0), hint=HINT
        )

    def explains(self, failure: Failure | None) -> bool:
        """Is this hang why the run failed? It is not where a rank failed by an error of its own."""
        return self.over is None and (self.stopped or failure is None or failure.kind == "timeout")

    @classmethod
    def load(cls, run_dir: Path) -> "Hang | None":
        """The last hang of a run; None where there was none, or what was written is damaged."""
        with contextlib.suppress(run_directory.DamagedRunError, OSError, KeyError, TypeError, ValueError, AttributeError):
            value = run_directory.read_json(run_dir / run_directory.HANG / run_directory.HANG_JSON)
            value["stacks"] = {int(rank): str(text) for rank, text in value["stacks"].items()}
            value["waiting"] = tuple(
                Waiting(ranks=tuple(map(int, row["ranks"])), what=str(row["what"]), line=str(row["line"])) for row in value["waiting"]
            )
            hang = cls(**value | {"missing": tuple(map(int, value["missing"]))})
            _ = str(hang), hang.failure  # what cannot be shown is damaged
            return hang
        return None

    def write(self, run_dir: Path) -> None:
        """Write it into the run directory."""
        run_directory.write_json(run_dir / run_directory.HANG / run_directory.HANG_JSON, asdict(self))


def hang_note(hang: Hang | None, lasting: bool) -> str:
    """A note on the last hang of a run; "" where there was none, or its error says it."""
    return str(hang) if hang is not None and (lasting or hang.over is not None) else ""


HINT = "The stacks of all threads of all ranks are in run.hang.stacks; how to read them: docs, How-to, My run hangs."


@dataclass(slots=True, kw_only=True)
class _Act:
    """What one rank does."""

    words: str
    line: str = ""
    works: bool = False
    certain: bool = False
    """It will not go on by itself, whatever it does."""
    patience: float = FLOOR
    """Seconds for a rank of which that is certain."""
    planned: bool = False
    """It evaluates, or writes a checkpoint, by the name of its function."""
    evaluates: bool = False
    """It is in an evaluation of the workbench's training, for which all ranks wait."""
    idle: float = 0.0
    """Seconds for which it, or a process of its own, has done nothing at all; 0 = it has, or it is not known."""
    waits: bool = False
    """It waits for other ranks."""
    collective: Mapping[str, Any] | None = None
    """In which collective, as far as that is known."""
    message: bool = False
    """It waits for a message to or from a single rank."""
    what: str = ""
    missing: tuple[int, ...] = ()


def judge(
    reports: Mapping[int, Mapping[str, Any]],
    world_size: int,
    *,
    ended: Iterable[int] = (),
    silent: Mapping[int, tuple[str, str]] | None = None,
    busy: Mapping[int, str] | None = None,
    workers: Mapping[int, tuple[str, str]] | None = None,
) -> Hang | None:
    """Does the run hang, and who holds up whom? None while that cannot be said.

    Args:
        reports: what each rank has written about itself just now.
        world_size: ranks of the run.
        ended: ranks whose process is gone.
        silent: ranks that cannot answer → what they do, and their stacks as faulthandler prints them.
        busy: of these, those that use their CPU → USES_CPU, and those that wait for a core → WAITS_FOR_A_CORE.
        workers: ranks → line and stack of a DataLoader's worker of theirs, where that was asked for.
    """
    silent, ended = silent or {}, set(ended)
    live = {rank: report for rank, report in reports.items() if rank not in ended and rank not in silent}
    if len(live) + len(ended) + len(silent) < world_size or not live:
        return None
    quiet, usual = min(report["quiet"] for report in live.values()), max(report["usual"] for report in live.values())
    if quiet < FLOOR:
        return None
    acts = {rank: _act(report, (workers or {}).get(rank)) for rank, report in live.items()}
    acts |= {rank: _Act(words="has ended: its process is gone", certain=True) for rank in ended}
    starting = any(map(_starting, live.values()))
    acts |= {rank: _silent(words, stack, (busy or {}).get(rank, ""), starting) for rank, (words, stack) in silent.items()}
    rank, patience, act = _culprit(acts, live)
    if quiet < max(patience, USUAL * usual):
        return None
    stacks = {number: _stack_text(report["threads"]) for number, report in live.items()}
    stacks |= {number: stack for number, (_, stack) in silent.items()}
    for number, (_, stack) in (workers or {}).items():
        stacks[number] = f"{stacks.get(number, '')}\n\nIn a worker of its loader:\n{stack}"
    return Hang(
        rank=rank,
        doing=act.words,
        line=act.line,
        waiting=grouped(
            {number: (other.what, other.line) for number, other in acts.items() if number != rank and other.waits and act.words}
        ),
        missing=act.missing,
        seconds=quiet,
        usual=usual,
        since=min(report["time"] - report["quiet"] for report in live.values()),
        stacks=dict(sorted(stacks.items())),
    )


def _culprit(acts: Mapping[int, _Act], live: Mapping[int, Mapping[str, Any]]) -> tuple[int | None, float, _Act]:
    """Who holds up the others, after how many seconds that is to be said, and what it does."""
    for_whom = {rank: _waits_for(rank, act, acts, live) for rank, act in acts.items()}
    awaited = Counter(other for others in for_whom.values() for other in others)
    free = [rank for rank in awaited if not for_whom[rank]]
    if free:
        rank = min(free, key=lambda rank: (acts[rank].works, -awaited[rank], rank))
        act = acts[rank]
        if act.certain or act.waits:
            return rank, act.patience, act
        if act.works:
            return rank, WORKING, act
        nothing_else = all(other.waits or other.certain or other.idle >= IDLE for other in acts.values())
        begins = IDLE_START if nothing_else else STARTING
        patience = WORKING if act.evaluates else begins if _starting(live[rank]) else PLANNED if act.planned else FLOOR
        return rank, patience, act
    if awaited:  # in a circle
        rank = _odd_one_out(acts, live, for_whom)
        acts[rank].missing = tuple(sorted(for_whom[rank]))
        return rank, FLOOR, acts[rank]
    if all(act.waits for act in acts.values()) and any(act.message for act in acts.values()):
        return None, _until_a_message_is_late(acts, live), _Act(words="they wait for each other's messages")
    if all(act.waits for act in acts.values()):
        known = all(act.collective for act in acts.values())  # else they may meet as yet
        return (
            None,
            IN_TRANSIT if known else float("inf"),
            _Act(words="all have called the same collective, which does not end (is the network up?)", what="all"),
        )
    rank = next((rank for rank, act in acts.items() if not act.works), min(acts))
    idle = not any(act.works for act in acts.values())
    return rank, max(ALONE, STARTING) if idle and not any(map(_starting, live.values())) else float("inf"), acts[rank]


def _until_a_message_is_late(acts: Mapping[int, _Act], live: Mapping[int, Mapping[str, Any]]) -> float:
    """Seconds for ranks that all wait, some for messages: few where all of them did nothing at all for a while, at the same time."""
    since = max(report["time"] - acts[rank].idle for rank, report in live.items())
    if min(report["time"] for report in live.values()) - since >= IDLE:
        return FLOOR
    return WORKING if any(act.works for act in acts.values()) else IN_TRANSIT


def _silent(words: str, stack: str, busy: str, starting: bool) -> _Act:
    """What a rank does that cannot answer; the module says how long it may."""
    act = _Act(words=words, line=place_in_dump(stack), certain=True)
    if words.startswith("is stopped"):
        return act
    planned, evaluates = _planned((file, name) for file, _, name in frames_of_dump(stack))
    act.works = busy == WAITS_FOR_A_CORE or (busy == USES_CPU and (starting or planned))
    if busy == WAITS_FOR_A_CORE:
        act.words = "does not get a core: other processes keep the machine busy"
    act.patience = WORKING if act.works or evaluates else SILENT_START if starting else PLANNED if planned else FLOOR
    return act


def _planned(frames: Iterable[tuple[str, str]]) -> tuple[bool, bool]:
    """By the files and functions of a stack: is it an evaluation or a checkpoint, and is it an evaluation of the workbench's training?"""
    frames = [*frames]
    evaluates = any(file.endswith("/workbench/train/validation.py") for file, _ in frames)
    return evaluates or any(_PLANNED.search(name.lower()) for _, name in frames), evaluates


def _starting(report: Mapping[str, Any]) -> bool:
    """Has this rank not taken its second step yet?"""
    return starting(report["steps"], report["numbers"])


def _waits_for(rank: int, act: _Act, acts: Mapping[int, _Act], live: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """The ranks that this one waits for."""
    if not act.waits:
        return set()
    called = act.collective
    if act.what == COLLECTS:  # rank 0 waits for all, the others for rank 0, and so for all
        return {other for other, theirs in acts.items() if other != rank and theirs.what != COLLECTS}
    if called is None or called["number"] is None:  # a store, a send, or a torch without a recorder
        return {other for other, theirs in acts.items() if other != rank and not theirs.waits}
    awaited, group = set(), called["group"]
    for other in set(live[rank]["groups"].get(group) or acts) - {rank}:
        if other not in live:
            awaited |= {other} & set(acts)
            continue
        report = live[other]
        if report["numbers"].get(group, 0) < called["number"]:
            awaited.add(other)
        else:
            same = next((row for row in report["collectives"] if row["group"] == group and row["number"] == called["number"]), None)
            alike = re.search("reduce|broadcast", called["op"])  # all ranks give the same
            given = [(row["sizes"], row["dtype"]) for row in (same, called) if row and alike and row["sizes"]]
            if same is not None and (same["op"] != called["op"] or given[1:] not in ([], given[:1])):
                awaited.add(other)
    return awaited


def _odd_one_out(acts: Mapping[int, _Act], live: Mapping[int, Mapping[str, Any]], for_whom: Mapping[int, set[int]]) -> int:
    """Of ranks that wait for each other, the one that took another branch: it does what fewest do, or what did not follow before."""
    places = Counter(act.what for rank, act in acts.items() if for_whom[rank])
    circle = [rank for rank in acts if for_whom[rank]]
    unusual = {rank for rank in circle if _unusual(live[rank], acts[rank].collective)}
    if len(unusual) == 1:
        return unusual.pop()
    some = [rank for rank in circle if places[acts[rank].what] == min(places.values())]
    return min(some, key=lambda rank: (rank not in unusual, not acts[rank].planned, -rank))


def _unusual(report: Mapping[str, Any], called: Mapping[str, Any] | None) -> bool:
    """Is this collective another than the one that followed the same predecessors before, in its group or in all groups together?"""
    if called is None or called["number"] is None:
        return False
    rows = [row for row in report["collectives"] if row["number"] is not None]
    for some in ([row for row in rows if row["group"] == called["group"]], rows):
        keys = [(row["group"], row["op"], row["sizes"], row["dtype"]) for row in some]
        if (usual := usual_follower(keys)) and usual[0] != keys[-1]:
            return True
    return False


def usual_follower(calls: Sequence[Any]) -> tuple[Any, int] | None:
    """What followed before on as many calls as came before the last one in this order, and how often; None = not always the same."""
    at = len(calls) - 1
    for length in range(min(at, 16), 0, -1):
        before = [place for place in range(length, at) if calls[place - length : place] == calls[at - length : at]]
        if len(before) > (length > 1):
            followers = [calls[place] for place in before]
            return (followers[0], len(before)) if followers.count(followers[0]) == len(followers) else None
    return None


def grouped(calls: Mapping[int, tuple[str, str]]) -> tuple[Waiting, ...]:
    """Rank → what it waits in, and the user's line, as one for the ranks that wait in the same place."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(calls.items()):
        places.setdefault(call, []).append(rank)
    return tuple(Waiting(ranks=tuple(ranks), what=what, line=line) for (what, line), ranks in places.items())


def _act(report: Mapping[str, Any], worker: tuple[str, str] | None) -> _Act:
    """What a rank does, by its stacks and its last collectives."""
    main: list[Frame] = next(([tuple(f) for f in thread["frames"]] for thread in report["threads"] if thread["main"]), [])
    user = next((frame for frame in main if frame[4]), None)
    place = user or next((frame for frame in main if "/workbench/" in frame[0] and "/programs/" not in frame[0]), None)
    line = f"{Path(place[0]).name}:{place[1]}" if place else ""
    inside = f" in {user[2]}()" if user and not user[2].startswith("<") else ""
    planned, evaluates = _planned((frame[0], frame[2]) for frame in main)
    names, files = [frame[2] for frame in main], [frame[0].replace("\\", "/") for frame in main]
    text = main[0][3] if main else ""
    act = _Act(words="", line=line, works=bool(report["works"]), planned=planned, evaluates=evaluates)
    in_torch = bool(files) and "/torch/" in files[0] and "/torch/utils/data/" not in files[0]
    act.message = waits_for_message(main)
    if not in_torch or act.message:  # else it may wait for a GPU
        act.idle = report.get("idle", 0.0)
    in_distributed = next((at for at, file in enumerate(files[:20]) if "/torch/distributed/" in file), None)
    pending = next((row for row in report["collectives"] if row["pending"] and row["number"] is not None), None)
    pending = pending or next((row for row in report["collectives"] if row["pending"]), None)
    if any(file.endswith("workbench/train/ranks.py") and name == "collect" for file, name in zip(files[:4], names[:4], strict=True)):
        act.waits, act.what, act.works = True, COLLECTS, False  # it polls, so no collective is pending, and it sleeps
        act.words = f"waits in {act.what}{inside}"
    elif any("importlib" in file for file in files[:20]):
        act.words, act.works = "loads a module", True
    elif any(file.endswith("torch/utils/data/dataloader.py") and name == "_next_data" for file, name in zip(files, names, strict=True)):
        act.words = "waits for its loader" + (f", whose worker is at {worker[0]}" if worker else "")
    elif "destroy_process_group" in names[:20]:
        act.words, act.certain = f"has ended its training, and is in destroy_process_group(){inside}", True
    elif pending and (in_torch or in_distributed is not None or _WAITS.search(text) or "/workbench/train/" in files[0]):
        act.waits, act.collective, act.what = True, pending, _words_of(pending, main)
        act.message = pending["number"] is None
        if frame := next((frame for frame in pending["frames"] if user and frame[0] == user[0]), None):
            act.line = f"{Path(frame[0]).name}:{frame[1]}"
        act.words = f"waits in {act.what}{inside}"
    elif in_distributed is not None or (files and files[0].endswith("workbench/train/ranks.py") and names[0] == "share"):
        inner = [name for name, file in zip(names, files, strict=True) if "/torch/distributed/" in file and name not in WRAPPERS]
        act.waits, act.what = True, inner[-1] if inner else "a message of all ranks (has it ended its loop?)"
        if said := report.get("message"):
            act.what = f"{said['op']} {'to' if said['op'] == 'send' else 'from'} rank {said['peer']}" + f" (tag {said['tag']})" * bool(
                said["tag"]
            )
        act.words = f"waits in {act.what}{inside}"
    elif act.message and report["groups"]:
        act.waits, act.what = True, "wait() of a request"
        act.words = f"waits in {act.what}{inside}"
    elif report["repeats"]:
        act.words, act.works, act.certain = f"repeats a loop{inside} without a change", False, False
    elif act.works:
        act.words = f"works{inside}"
    elif not user and main and any("_shutdown" in name or "_exit_function" in name for name in names):
        act.words, act.certain = "has left its script, and waits for a thread or a process of its own", True
    elif re.search(r"\b(flock|lockf)\(", text):
        act.words = f"waits for the lock of a file{inside}"
    elif "sleep(" in text:
        act.words = f"sleeps{inside}"
    elif any(file.endswith("/subprocess.py") for file in files[:4]):
        act.words = f"waits for a process that it started{inside}"
    elif any(file.endswith("/queue.py") or "/multiprocessing/queues.py" in file for file in files[:3]):
        act.words = f"waits for a queue{inside}"
    elif any(file.endswith("/threading.py") for file in files[:3]) or re.search(r"\.acquire\(|\.join\(|^with .*lock", text, re.IGNORECASE):
        act.words = f"waits for a lock or another thread{inside}"
    else:
        act.words = f"is stuck{inside}"
    return act


def _words_of(row: Mapping[str, Any], main: list[Frame]) -> str:
    """A collective with its number, shapes and caller."""
    op, shapes = row["op"], ", ".join(map(str, row["sizes"][:3])) + ", …" * (len(row["sizes"]) > 3)
    text = op if row["number"] is None else f"{op} number {row['number']}"
    group = row["group"].removesuffix(flight_recorder.NCCL)
    text += f" of group {group}" if group not in ("0", "default_pg") else ""
    text += f" ({shapes} {row['dtype']})" if shapes else ""
    users = {frame[:3] for frame in main if frame[4]}
    before, reached = [], False
    for frame in row["frames"] or [frame[:3] for frame in main]:
        if reached := tuple(frame) in users:
            break
        if "/workbench/timeline/" not in frame[0].replace("\\", "/"):  # its marks around a call are nobody's caller
            before.append(frame[2])
    caller = next((name for name in reversed(before) if name not in WRAPPERS), "") if reached else ""
    return text + (f", called by {caller}" if caller and not op.lstrip("_").startswith(caller.rstrip("_")) and caller != op else "")


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _stack_text(threads: Iterable[Mapping[str, Any]]) -> str:
    """The stacks of all threads as a traceback shows them, the main thread first."""
    parts = []
    for thread in threads:
        lines = [
            f'  File "{file}", line {line}, in {name}\n' + f"    {text}\n" * bool(text) for file, line, name, text, _ in thread["frames"]
        ]
        parts.append(f"Thread {thread['name']} (most recent call last):\n" + "".join(reversed(lines)))
    return "\n".join(parts).rstrip()


_DUMPED = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


def frames_of_dump(text: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of the main thread (or the only one) that faulthandler printed, innermost first."""
    threads = re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE)
    return [(match["file"], int(match["line"]), match["name"]) for match in _DUMPED.finditer(threads[-1])]


def place_in_dump(stack: str) -> str:
    """The user's line in stacks that faulthandler printed, such as `data.py:14 in __getitem__()`; "" = there is no stack."""
    frames = frames_of_dump(stack)
    frame = next((frame for frame in frames if is_users(frame[0])), frames[0] if frames else None)
    return f"{Path(frame[0]).name}:{frame[1]}" + (f" in {frame[2]}()" * (not frame[2].startswith("<"))) if frame else ""
