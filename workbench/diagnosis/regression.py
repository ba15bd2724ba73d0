"""`what_changed` and `bisect`: which difference between two runs, or which commit, made a training slower, larger or worse."""

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from workbench.core import units
from workbench.core.checks import check_budget, choice
from workbench.core.progress import INTERRUPTED, BudgetError, Waiting
from workbench.core.synonyms import accept_synonyms
from workbench.core.units import several
from workbench.diagnosis.analysis import bisection
from workbench.diagnosis.analysis.bisection import Bisection, Commit
from workbench.diagnosis.analysis.owner_search import (
    FAR,
    Changes,
    Decision,
    Rerun,
    decide,
    effect,
    one_owner,
    trainings_to_go,
)
from workbench.diagnosis.analysis.what_changed import QUANTITIES, USUAL, WhatChanged
from workbench.diagnosis.rerun import (
    FEWEST,
    LEAST,
    QUICK,
    Arm,
    Code,
    Measured,
    RerunError,
    Reruns,
    launch_seconds,
    measured,
    steps_of,
    within_noise,
)
from workbench.diagnosis.swaps import Swaps, brought, load_note, lost, swaps_of
from workbench.runs.launch import worktrees
from workbench.runs.launch.launch import check
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.resume import refuse_code_of_others
from workbench.runs.run import ACTIVE, Run
from workbench.runs.spec import RunSpec, ScriptSpec, SpecError
from workbench.runs.target import read_spec
from workbench.runs.task import TaskError

BUDGET = 60.0
"""Default of `budget_s` of `what_changed`: a dozen short launches, enough for a large effect; a small one takes twenty to sixty."""
BISECT_BUDGET = 1800.0
"""Default of `budget_s` of `bisect`. A minute would show no more than that the commits run: each of log2(n) commits is
trained several times, by turns with the good one. So it says beforehand how many that are, and what is known when it is stopped."""
SPARE = 1.3
"""How much more than the trainings that a simulated search needs a budget is to pay for: they vary."""
Measure = Callable[[Changes], float]
"""Makes a short training with some differences and says what it gave.

Raises `RerunError` where it does not run, and `BudgetError` where no time is left for it.
"""


@accept_synonyms
def what_changed(
    run_a: Run | str | os.PathLike[str],
    run_b: Run | str | os.PathLike[str],
    *,
    of: Literal["time", "memory", "loss"] = "time",
    budget_s: float = BUDGET,
    also: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] | None = None,
    rerun: bool = True,
    runs_dir: str | os.PathLike[str] | None = None,
) -> WhatChanged:
    """Find out why run B is slower than run A, needs more memory or has another loss, by applying B's differences to A one by one.

    First, the two runs are compared as recorded. Then run A is repeated in short trainings, alternately unchanged and with all of B's
    differences that can be applied: knobs, environment variables, the commit (in a separate folder), the interpreter. If the regression
    comes back, the differences are tried one by one, or half of them at a time if there are many. If it does not, the reason is the
    machine, or what could not be applied or was not recorded; the answer names both.

    Args:
        run_a: the good run, or its directory.
        run_b: the bad run, or its directory.
        of: what is compared: "time" (of a step on the slowest rank), "memory" (the peak of the fullest rank) or "loss".
        budget_s: approximate seconds for the trainings; the one that runs when they are over is stopped. What is known then, or at Ctrl-C,
            is returned, and `untried` lists the differences that were not tried alone. One minute is enough for effects of a third or more;
            small effects take ten.
        also: further differences: name → the environment variables of run A and those of run B. For example, `{"numpy": ({"PYTHONPATH":
            "/old"}, {"PYTHONPATH": "/new"})}` tries a package in two folders; data work the same way.
        rerun: False = only compare what was recorded, and execute nothing, not even git.
        runs_dir: where the trainings' run directories go; None = they are deleted.

    Raises:
        ValueError: a run still runs or did not record what is compared, one is a run of a task and the other of a script, or an unknown
            `of`.
    """
    choice("of", of, QUANTITIES, error=ValueError)
    check_budget(budget_s, limited=True)
    runs = (_ended(run_a), _ended(run_b))
    also = _checked(also or {})
    own = all(run.path.stat().st_uid == os.getuid() for run in runs)
    swaps = swaps_of(*runs, also, ask_git=rerun and own)
    _check_steps(runs, of)
    what = measured(runs, of)
    values = tuple(_value(run, name, what) for run, name in zip(runs, "AB", strict=True))
    result: dict[str, Any] = {
        "of": of,
        "per": what.per,
        "steps": what.steps,
        "runs": tuple(str(run.path) for run in runs),
        "statistic": what.statistic,
        "recorded": values,
        "change": what.change(runs),
        "differences": swaps.differences,
        "code": swaps.code,
        "notes": (*swaps.notes, *filter(None, [what.words(runs)]), *([load_note(runs)] if of == "time" and not rerun else [])),
    }
    change, least = result["change"], LEAST if of == "time" else USUAL[of]
    may_tell = rerun and own and swaps.changes and of != "loss"  # a training of the same seed repeats its chance
    if max(change.high, -change.low) < least or (within_noise(change, least) and not may_tell):
        return WhatChanged(**result, kind="nothing")
    if not rerun:
        return WhatChanged(**result, why="" if own else "another user's runs are not repeated")
    for run in runs:  # from here on, what the runs name is executed
        if run.path.stat().st_uid != os.getuid():
            text = f"{run.path} belongs to another user: trainings would execute what it names, as you"
            raise LaunchError(f"{text}; compare without them: what_changed(…, rerun=False), or copy it if you trust it")
        refuse_code_of_others(run)
    try:
        if isinstance(runs[0].spec, RunSpec) and swaps.base.code == Code(Path.cwd(), Path.cwd()):
            check(runs[0].spec)
    except (LaunchError, TaskError) as error:
        return WhatChanged(**result, kind="cannot run", why=f"run A does not run here: {str(error).splitlines()[0]}")
    return _experiment(result, swaps, runs, what, budget_s, runs_dir)


def _experiment(
    result: dict[str, Any], swaps: Swaps, runs: tuple[Run, Run], what: Measured, budget_s: float, runs_dir: str | os.PathLike[str] | None
) -> WhatChanged:
    of, named, last = result["of"], {change.name: change for change in swaps.changes}, dict[Changes, Run]()
    others = several(len(named), "difference") if named else "none"
    lasts = launch_seconds(runs[0], what.steps)
    about = f", about {units.seconds(lasts)}" if lasts > 0 else ""
    begin = f"run A as it was, beside it with {others} of run B, {what.steps} steps each{about}"
    with (
        Waiting("what_changed", budget_s, begin=begin) as line,
        Reruns(what, kind="what_changed", runs_dir=runs_dir, tick=line.tick, left=lambda: line.left) as made,
    ):

        def measure(changes: Changes) -> float:
            line.say(f"run A with {', '.join(changes)}" if changes else "run A as it was", known[0])
            value, last[changes] = made.measure(swaps.base.with_changes([named[name] for name in changes]), " ".join(changes) or "A")
            return value

        recorded, usual, change, known = result["recorded"], USUAL[of], result["change"], [begin]

        def judged(made: Sequence[Rerun]) -> Decision:
            if made:
                seen = effect(made, tuple(named), usual) if named else None
                brought = f", with all differences it is {units.times(math.exp(seen.mid))} that of run A" if seen else ""
                known[0] = f"{several(len(made), 'training')}{brought}"
            return decide(made, tuple(named), recorded, usual, change=change)

        def more(made: Sequence[Rerun], each: float) -> str:
            guess = one_owner(made, tuple(named), change.mid)

            def pure(them: Sequence[Rerun]) -> Decision:
                return decide(them, tuple(named), recorded, usual, change=change)

            to_go = trainings_to_go(made, pure, guess, usual, recorded=recorded[0])
            return enough(len(made), to_go, each if made else max(each, lasts))

        reruns, decision, notes = search(measure, judged, left=lambda: line.left, more=more)
        owner, whole = decision.owner, tuple(named)
        base, changed = last.get(()), last.get(owner or whole)
        brings = brought(base, changed) if owner and base and changed else ()
        machine = decision.kind in ("still", "over")
        left_over = lost(runs, [run for run in (base, last.get(whole)) if run], swaps.differences) if machine else ()
        seconds = sum(made.seconds)
    return WhatChanged(
        **{**result, "notes": (*result["notes"], *notes)},
        reruns=reruns,
        kind=decision.kind,
        owner=owner,
        together=decision.together,
        why=decision.why,
        brings=brings,
        left_over=left_over,
        not_recorded=swaps.not_recorded,
        seconds=seconds,
    )


@accept_synonyms
def bisect(
    target: RunSpec | str,
    *,
    good: str,
    bad: str = "HEAD",
    of: Literal["time", "memory", "loss"] = "time",
    steps: int | None = None,
    budget_s: float = BISECT_BUDGET,
    runs_dir: str | os.PathLike[str] | None = None,
    **knobs: Any,
) -> Bisection:
    """Find the commit that made a training slower, larger or worse, by short trainings of commits between a good one and a bad one.

    Each commit is checked out into a separate folder (`git worktree`, deleted at the end), with links to what git does not track, such as
    data: a task that writes into a linked folder writes into yours. Your tracked files are not touched. Trainings of a commit alternate
    with those of the good commit, as often as the noise requires. Of n commits, about log2(n) are tried. Commits that do not run are
    skipped.

    Args:
        target: a RunSpec or the name of a task, such as "train/task.py:build", which exists in every commit.
        good: an older commit without the regression, as git names it.
        bad: a newer commit with the regression.
        of: what is compared: the "time" of a step on the slowest rank, the peak "memory" of the fullest, or the "loss" after `steps`.
        steps: steps of each training; None = for "time" as many as take some seconds, otherwise the spec's own.
        budget_s: approximate seconds for all trainings; the one that runs when they are over is stopped. What is known then, or at Ctrl-C,
            is returned: `in_doubt` lists the commits that may be the first bad one.
        runs_dir: where the trainings' run directories go; None = they are deleted.
        **knobs: fields of the RunSpec to change.

    Raises:
        ValueError: not a RunSpec, the folder is not in a git repository, or the commits are not in one history.
        SpecError: no such knob.
    """
    choice("of", of, QUANTITIES, error=ValueError)
    check_budget(budget_s, limited=True)
    spec, folder = read_spec("bisect", target, because="which is trained at each commit").replace(**knobs), Path.cwd()
    if worktrees.top_of(folder) is None:
        raise worktrees.GitError(
            f"{folder} is not in a git repository: call bisect from within the repository whose commits are to be tried"
        )
    first, commits = worktrees.commit_of(folder, good), worktrees.commits_between(folder, good, bad)
    if not commits:
        raise worktrees.GitError(f"good={good!r} and bad={bad!r} are the same commit: expected an older and a newer one")
    notes: tuple[str, ...] = ()
    failed: tuple[Rerun, ...] = ()
    what = Measured(of=of, steps=steps or spec.steps, part=QUICK)
    known = [announced(len(commits))]
    with (
        Waiting("bisect", budget_s, begin=known[0]) as line,
        Reruns(what, kind="bisect", runs_dir=runs_dir, tick=line.tick, left=lambda: line.left) as made,
    ):

        def measure(changes: Changes) -> float:
            commit = changes[0] if changes else first
            line.say(f"commit {commit[:10]}", known[0])
            return made.measure(Arm(spec, Code(folder, folder, commit), {}, None), commit[:10])[0]

        if of == "time" and steps is None:
            made.measured = replace(what, steps=FEWEST)
            try:
                made.measured = replace(what, steps=steps_of(measure(())))
            except (RerunError, LaunchError, SpecError, TaskError) as error:
                failed = (Rerun(changes=(), value=math.nan, error=str(error).splitlines()[0]),)
            except KeyboardInterrupt:
                line.spend()
                notes = (INTERRUPTED,)
            except BudgetError:
                line.spend()
                notes = ("the first training of the good commit takes longer than the budget",)

        def judged(trained: Sequence[Rerun]) -> Decision:
            if trained:
                doubtful = len(bisection.in_doubt(trained, commits, USUAL[of]))
                known[0] = f"{several(len(trained), 'training')}, in doubt: {doubtful} of {several(len(commits), 'commit')}"
            return bisection.decide(trained, commits, USUAL[of])

        def more(made: Sequence[Rerun], each: float) -> str:
            guess = bisection.one_commit(made, commits, USUAL[of])
            return enough(len(made), trainings_to_go(made, lambda them: bisection.decide(them, commits, USUAL[of]), guess, USUAL[of]), each)

        if failed:  # it is compared with all others
            reruns, decision, ended = failed, judged(failed), tuple[str, ...]()
        else:
            reruns, decision, ended = search(measure, judged, left=lambda: line.left, more=more)
        ended = () if line.left == 0 and notes else ended  # which say already why nothing was tried
    named = {*decision.owner, first, commits[-1], *(name for rerun in reruns for name in rerun.changes)}
    named |= {commits[place - 1] for each in decision.owner if (place := commits.index(each))}
    listed = [Commit(id=each, subject=worktrees.subject_of(folder, each) if each in named else "") for each in (first, *commits)]
    return Bisection(
        of=of,
        good=listed[0],
        commits=tuple(listed[1:]),
        reruns=reruns,
        kind="commit" if decision.kind == "owner" else decision.kind,
        first_bad=decision.owner,
        why=decision.why,
        steps=made.measured.steps,
        seconds=sum(made.seconds),
        notes=(*notes, *ended),
    )


def announced(commits: int) -> str:
    """What a bisection of so many commits will take.

    >>> announced(23)
    '23 commits: 5 of them and the last are trained alternately with the good one, each several times'
    """
    tries = math.ceil(math.log2(commits))
    some = f"{tries} of them and the last are" if tries else "the last is"
    return f"{several(commits, 'commit')}: {some} trained alternately with the good one, each several times"


def search(
    measure: Measure,
    decide: Callable[[Sequence[Rerun]], Decision],
    *,
    left: Callable[[], float] = lambda: math.inf,
    more: Callable[[Sequence[Rerun], float], str] = lambda *_: "",
) -> tuple[tuple[Rerun, ...], Decision, tuple[str, ...]]:
    """Make trainings until it is clear what owns a regression, the budget is spent, or Ctrl-C comes.

    Args:
        measure: makes a training.
        decide: what follows from the trainings so far.
        left: seconds that are left of the budget.
        more: the trainings, and the seconds that one took on average (at least) → what to do where the budget ended the search, for a note.

    Returns:
        The trainings, what follows from them, and notes.
    """
    reruns, took = list[Rerun](), list[float]()
    begun = left()
    notes: tuple[str, ...] = ()
    try:
        while (decision := decide(reruns)).kind == "measure":
            wanted = decision.trainings(bool(reruns))
            each = statistics.fmean(took) if took and math.isfinite(begun) else 0.0
            if each * len(wanted) > left() >= 2 * each:  # some of them, and run A beside
                wanted = [*wanted[: int(left() / each) - 1], ()]
                wanted = wanted[:-1] if wanted[-2:] == [(), ()] else wanted
            if each * len(wanted) > left() or left() <= 0:
                notes = (f"the budget ended the search after {several(len(reruns), 'training')}{more(reruns, each)}",)
                break
            for changes in wanted:
                began = left()
                try:
                    reruns.append(Rerun(changes=changes, value=measure(changes)))
                except (RerunError, LaunchError, SpecError, TaskError) as error:
                    reruns.append(Rerun(changes=changes, value=math.nan, error=str(error).splitlines()[0]))
                    break
                finally:
                    took.append(began - left())
    except KeyboardInterrupt:
        notes = (f"{INTERRUPTED} after {several(len(reruns), 'training')}",)
        decision = decide(reruns)
    except BudgetError:
        notes = (f"the budget ended training {len(reruns) + 1}{more(reruns, max(statistics.fmean(took), took[-1]))}",)
        decision = decide(reruns)
    if decision.kind == "measure":
        few = f"{several(len(reruns), 'training')} {'are' if len(reruns) > 1 else 'is'} too few" if reruns else "no training has ended"
        decision = Decision(kind="unclear", why=few)
    return tuple(reruns), decision, notes


def enough(made: int, to_go: int | None, each: float) -> str:
    """Which budget suffices for a search that one ended, in words that follow what ended it.

    >>> enough(3, 6, 12.0)
    ', of 12.0 s each; about 6 more are likely to suffice: budget_s=150, --budget 150'
    >>> enough(3, None, 12.0)
    ', of 12.0 s each; as long as they vary so much, more of them would hardly tell: try again on a quieter machine'

    Args:
        made: trainings so far.
        to_go: how many more it is likely to take; None = more would not tell.
        each: seconds of a training.
    """
    if each <= 0:
        return ""  # it was stopped before
    took = f", of {units.seconds(each)} each" if made else f"; a training takes about {units.seconds(each)}"
    if to_go is None:
        return f"{took}; as long as they vary so much, more of them would hardly tell: try again on a quieter machine"
    seconds = SPARE * (made + to_go) * each
    digits = 10.0 ** max(0, math.floor(math.log10(seconds)) - 1)
    budget = math.ceil(seconds / digits) * digits
    more = f"about {to_go} more" if made else f"about {to_go} of them"
    likely = "likely to suffice" if to_go < FAR else "needed at least"
    return f"{took}; {more} are {likely}: budget_s={budget:.0f}, --budget {budget:.0f}"


def _ended(given: Run | str | os.PathLike[str]) -> Run:
    run = given if isinstance(given, Run) else Run.load(given)
    if run.state in ACTIVE:
        raise ValueError(f"what_changed: {run!r} still runs: wait for it, run.wait()")
    return run


def _checked(also: Mapping[str, Any]) -> Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]:
    for name, pair in also.items():
        sides = list(pair) if isinstance(pair, tuple | list) else []
        if len(sides) != 2 or not all(
            isinstance(side, Mapping) and all(isinstance(text, str) for both in side.items() for text in both) for side in sides
        ):
            raise ValueError(
                f"also={{{name!r}: {pair!r:.80}}}: expected the environment variables of run A and of run B, such as "
                f'{{{name!r}: ({{"PYTHONPATH": "/old"}}, {{"PYTHONPATH": "/new"}})}}'
            )
    return also


def _check_steps(runs: tuple[Run, Run], of: str) -> None:
    """Raise where a run has no measured step."""
    for run, name in zip(runs, "AB", strict=True):
        if of != "loss" and not any(rank.count for rank in run.rank_means):
            hint = "; a script's steps are measured with watch=True" if isinstance(run.spec, ScriptSpec) else ""
            raise ValueError(f"what_changed: run {name}, {run!r}, has no measured step ({run.state}){hint}")


def _value(run: Run, name: str, what: Measured) -> float:
    """What a run gave."""
    value = what.value(run, what.steps)
    if not all(0 < each < math.inf for each in (value, *what.blocks(run))):
        hint = {
            "loss": "wb.health(run) says since when, and only positive losses can be compared",
            "memory": "its ranks wrote none",
            "time": "it has no step",
        }[what.of]
        raise ValueError(f"what_changed: run {name}, {run!r}, has no {what.of} to compare: {hint}")
    return value
