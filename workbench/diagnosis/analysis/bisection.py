"""Bisection: which commit of a range made a training slower, larger or worse, found by short trainings of some of them."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.brief import fitted, short, three
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.owner_search import MINE, MOST, Decision, Guess, Rerun, effect, effects
from workbench.diagnosis.analysis.what_changed import QUANTITIES, USUAL, over

KINDS: Mapping[str, str] = {
    "commit": "one commit, or one of several that do not run, brings it",
    "nothing": "the bad commit is no worse than the good one",
    "cannot run": "the good or the bad commit does not run",
    "unclear": "the trainings vary too much to say",
}
"""Kind of verdict → what it means."""
NO_CHANGE = 0.01
"""An effect whose interval lies within this is none. Chosen: trainings that were never changed differ by about as much."""
STILL_NONE = 0.05
"""The same after as many trainings as are allowed. Chosen: the interval is then ± 3 % with the usual spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(JsonDataclass):
    """A commit of the range."""

    id: str
    """Its full id."""
    subject: str
    """Its short id and the first line of its message; empty = it was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection(display.Shown, JsonDataclass):
    """A range of commits, the trainings of some of them, and the first bad one."""

    of: str
    """"time", "memory" or "loss"."""
    good: Commit
    """The commit that all others are compared with."""
    commits: tuple[Commit, ...]
    """Those after it, oldest first; the last is the bad one."""
    reruns: tuple[Rerun, ...]
    """The trainings, in order; `changes` has the id of the commit, and is empty for the good one."""
    kind: str
    """A key of `KINDS`."""
    first_bad: tuple[str, ...] = ()
    """The id of the first bad commit; of several, where those before it do not run."""
    why: str = ""
    """What stands in the way of a verdict, in words."""
    steps: int = 0
    """Steps of each training."""
    seconds: float = 0.0
    """How long the trainings took."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""

    def ratio(self, commit: str) -> Interval | None:
        """What a commit gives over what the good one gives; None = not measured."""
        seen = effect(self.reruns, (commit,), USUAL[self.of])
        return seen and seen.of(math.exp)

    @property
    def in_doubt(self) -> tuple[str, ...]:
        """Ids of the commits among which the first bad one is, as far as the trainings tell."""
        return in_doubt(self.reruns, [commit.id for commit in self.commits], USUAL[self.of])

    @property
    def _tried(self) -> list[Commit]:
        names = {name for rerun in self.reruns for name in rerun.changes}
        return [commit for commit in self.commits if commit.id in names]

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        what = QUANTITIES[self.of]
        whole = self.ratio(self.commits[-1].id)
        if self.kind == "commit":
            assert whole
            said = f"The {what} became {over(whole.mid)} that of the good commit"
            named = [commit.subject or commit.id[:10] for commit in self.commits if commit.id in self.first_bad]
            if len(named) > 1:
                return f"{said} with one of {len(named)} commits, of which only the last runs: {'; '.join(named)}."
            place = [commit.id for commit in self.commits].index(self.first_bad[0])
            before = self.ratio(self.commits[place - 1].id) if place else Interval(low=1, mid=1, high=1)
            here = self.ratio(self.first_bad[0])
            step = f" ({over(before.mid)} before it, {over(here.mid)} with it)" if before and here else ""
            return f"{said} with {named[0]}{step}."
        if self.kind == "nothing":
            ends = f" ({whole.low:.3g} to {whole.high:.3g} of the good one)" if whole else ""
            return f"Nothing to find: the {what} of the bad commit is that of the good one{ends}; if it once was not, it was the machine."
        doubtful = self.in_doubt
        ends = f"{doubtful[0][:10]} to {doubtful[-1][:10]}" if len(doubtful) > 1 else doubtful[0][:10]
        among = f" {len(doubtful)} of {len(self.commits)} commits are still in doubt: {ends}." if self.kind == "unclear" else ""
        return f"No commit is named: {self.why}.{among}"

    @property
    def table(self) -> display.Table:
        """A row per commit that was tried, oldest first, and the verdict."""
        failed = next((rerun.error for rerun in self.reruns if rerun.error and not rerun.changes), "")
        ran = sum(not rerun.changes and not rerun.error for rerun in self.reruns)
        rows = [(self.good.subject, str(ran), "1×" if ran else units.MISSING, f"does not run: {failed}" if failed else "good")]
        counts = effects(self.reruns)
        whole = self.ratio(self.commits[-1].id)
        for commit in self._tried:
            seen = self.ratio(commit.id)
            error = next((rerun.error for rerun in self.reruns if rerun.error and rerun.changes == (commit.id,)), "")
            word = f"does not run: {error}" if error else "first bad" if commit.id in self.first_bad else ""
            if not word and seen and whole:
                word = "bad" if abs(math.log(seen.mid)) > MINE * abs(math.log(whole.mid)) else "good"
            ratio = f"{units.times(seen.mid)} ({seen.low:.3g} to {seen.high:.3g})" if seen else units.MISSING
            rows.append((commit.subject, str(len(counts.get((commit.id,), ()))), ratio, word))
        made, commits = units.several(len(self.reruns), "training"), units.several(len(self.commits), "commit")
        last = f"{made} of {self.steps} steps in {units.seconds(self.seconds)}, {commits}"
        return display.Table(
            columns=("commit", "trainings", f"{QUANTITIES[self.of]} beside the good one", ""),
            rows=rows,
            title="Which commit it was",
            note="\n".join([self.verdict, last, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per training: the commit and what it gave."""
        rows = [{"commit": (rerun.changes or (self.good.id,))[0], "value": rerun.value, "error": rerun.error} for rerun in self.reruns]
        return display.frame(rows, columns=["commit", "value", "error"])

    plot = display.plot_method("bisection")

    def brief(self) -> dict[str, Any]:
        """The answer for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text, the newest commits first."""
        value = {
            "verdict": short(self.verdict, 400),
            "kind": self.kind,
            "of": self.of,
            "first_bad": [*self.first_bad[:8]],
            "commits": len(self.commits),
            "trainings": len(self.reruns),
            "tried": [[short(commit.subject, 60), (seen := self.ratio(commit.id)) and three(seen, 5)] for commit in reversed(self._tried)],
            "notes": [short(note, 120) for note in self.notes],
        }
        return fitted(value, "notes", "tried")

    def __repr__(self) -> str:
        return f"Bisection(of={self.of!r}, kind={self.kind!r}, first_bad={tuple(commit[:10] for commit in self.first_bad)!r})"


def decide(reruns: Sequence[Rerun], commits: Sequence[str], usual: float) -> Decision:
    """Which commit to train next, always beside the good one, or which is the first bad one.

    Args:
        reruns: the trainings so far, in order.
        commits: ids of those after the good one, oldest first; the last is bad.
        usual: standard deviation of the ratio of two equal trainings, as known beforehand.

    Returns:
        A decision of kind "measure", "owner" (the first bad commit, or those among which it is), "nothing", "cannot run" or "unclear".
    """
    failed = {rerun.changes: rerun.error for rerun in reruns if rerun.error}
    counts = {changes: len(values) for changes, values in effects(reruns).items()}
    bad = (commits[-1],)
    for changes, name in (((), "good"), (bad, "bad")):
        if changes in failed:
            return Decision(kind="cannot run", why=f"the {name} commit does not run: {failed[changes]}")
    whole = effect(reruns, bad, usual)
    if whole is None or whole.low <= 0 <= whole.high:
        if whole and whole.low > -NO_CHANGE and whole.high < NO_CHANGE:
            return Decision(kind="nothing")
        if counts.get(bad, 0) >= MOST:
            if whole and max(-whole.low, whole.high) < STILL_NONE:
                return Decision(kind="nothing")
            return Decision(kind="unclear", why=f"after {MOST} trainings the bad commit may be as good as the good one, or not")
        return Decision(kind="measure", measure=(bad,))
    low, high, middle = _narrowed(reruns, commits, usual, whole)
    if middle is None:
        return Decision(kind="owner", owner=tuple(commits[low + 1 : high + 1]))
    if counts.get((commits[middle],), 0) >= MOST:
        return Decision(kind="unclear", why=f"{MOST} trainings of {commits[middle][:10]} lie between good and bad")
    return Decision(kind="measure", measure=((commits[middle],),))


def one_commit(reruns: Sequence[Rerun], commits: Sequence[str], usual: float) -> Guess:
    """The first bad commit is each of those in doubt, as likely; it brings what the bad commit brought, a third if that did not run yet."""
    whole, doubtful = effect(reruns, (commits[-1],), usual), in_doubt(reruns, commits, usual)
    brings = whole.mid if whole else math.log(4 / 3)

    def guess(chance: random.Random) -> Callable[[tuple[str, ...]], float]:
        first = commits.index(chance.choice(doubtful))
        return lambda changes: brings if commits.index(changes[0]) >= first else 0.0

    return guess


def in_doubt(reruns: Sequence[Rerun], commits: Sequence[str], usual: float) -> tuple[str, ...]:
    """The commits among which the first bad one is, as far as the trainings tell; arguments as those of `decide`."""
    whole = effect(reruns, (commits[-1],), usual)
    if whole is None or whole.low <= 0 <= whole.high:
        return tuple(commits)
    low, high, _ = _narrowed(reruns, commits, usual, whole)
    return tuple(commits[low + 1 : high + 1])


def _narrowed(reruns: Sequence[Rerun], commits: Sequence[str], usual: float, whole: Interval) -> tuple[int, int, int | None]:
    """Places of the last commit that is known to be good (-1 = the good one itself), of the first that is known to be bad, and of the one
    that is to be decided next (None = all between them are, or do not run).
    """
    failed = {rerun.changes for rerun in reruns if rerun.error}
    sign, limit = math.copysign(1.0, whole.mid), MINE * abs(whole.mid)
    low, high = -1, len(commits) - 1
    while trained := [place for place in range(low + 1, high) if (commits[place],) not in failed]:
        middle = min(trained, key=lambda place: abs(2 * place - low - high))
        seen = effect(reruns, (commits[middle],), usual)
        ends = sorted((sign * seen.low, sign * seen.high)) if seen else [-math.inf, math.inf]
        if ends[0] > limit:
            high = middle
        elif ends[1] < limit:
            low = middle
        else:
            return low, high, middle
    return low, high, None
