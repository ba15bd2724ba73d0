"""Interpolates dry runs exactly along batch size, sequence length and image side, and keeps their results.

Two runs of one program make every storage a line, three a parabola (`memory.analysis.family`). Where the program changes on the way (a
kernel that sorts from some size on), the stretch is halved until its ends do the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.family import Family
from workbench.memory.analysis.log import MemoryLog
from workbench.memory.analysis.replay import Replay
from workbench.memory.estimator_process import AXES, Answer, Question

LEAST = 2
"""Smallest value that is interpolated; smaller ones get a run of their own, since programs treat 1 specially."""
SPLITS = 6
"""How often a stretch between runs is halved at most; then each value gets a run of its own."""
KEPT = 64
"""Estimates that are kept in memory; others are computed again from the runs."""
ROUNDED = 512
"""Bytes that CUDA rounds to; where a prediction is checked, peaks are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory of a configuration."""

    breakdown: MemoryBreakdown
    """The breakdown."""
    between: bool
    """Is it interpolated between runs, not from a run of its own?"""


class Curves:
    """Answers by question. `wanted` returns the question to answer next, `add` takes its answer; neither starts a process."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._lines: dict[tuple[str, str], dict[int, Answer]] = {}
        self._errors: dict[str, str] = {}
        self._families: dict[tuple[str, str, tuple[int, ...]], Family | None] = {}
        self._estimates: dict[str, Estimate] = {}

    def add(self, question: Question, answer: Answer) -> None:
        """Keep an answer, also for the sizes that its batch turned out to have."""
        for known in (question, replace(question, sequence=answer.sequence, image=answer.image)):
            self._answers[known.key] = answer
            for axis in AXES:
                value = known.along(axis)
                if value is not None and value >= LEAST and not answer.first:
                    self._lines.setdefault((axis, _rest(known, axis)), {})[value] = answer

    def fail(self, question: Question, message: str) -> None:
        """Keep that it cannot be estimated."""
        self._errors[question.key] = message

    def error(self, question: Question) -> str:
        """Why it cannot be estimated; empty = no error is known."""
        return self._errors.get(question.key, "")

    def answer(self, question: Question) -> Answer | None:
        """The answer of a run for this very question."""
        return self._answers.get(question.key)

    def knows(self, question: Question, axes: Sequence[str]) -> bool:
        """Is it known without another run: from one for it, or from runs on both sides along an axis?"""
        return question.key in self._answers or any(self.family(question, axis) for axis in axes)

    def estimate(self, question: Question, axes: Sequence[str], title: str) -> Estimate | None:
        """The memory of a configuration; None where it takes a run."""
        if question.key in self._estimates:
            return self._estimates[question.key]
        estimate = self._made(question, axes, title)
        if estimate:
            self._estimates[question.key] = estimate
            if len(self._estimates) > KEPT:
                del self._estimates[next(iter(self._estimates))]
        return estimate

    def _made(self, question: Question, axes: Sequence[str], title: str) -> Estimate | None:
        if answer := self.answer(question):
            where = {"device": answer.device, "rank": answer.rank, "world_size": answer.world_size}
            made = MemoryBreakdown.from_log(answer.log, kind="predicted", title=title, **where)  # type: ignore[arg-type]
            return Estimate(breakdown=made, between=False)
        for axis in axes:
            family, value = self.family(question, axis), question.along(axis)
            if family and value:
                near = next(iter(self._along(question, axis).values()))
                made = family.breakdown(value, title=title, device=near.device, rank=near.rank, world_size=near.world_size)
                return Estimate(breakdown=made, between=True)
        return None

    # --- between runs

    def family(self, question: Question, axis: str) -> Family | None:
        """The source of the memory at the question's place on an axis; None = a run is needed.

        All runs along the axis if they are one program and one polynomial; else those next to the place, if they are.
        """
        value, known = question.along(axis), self._along(question, axis)
        if value is None or len(known) < 2 or not min(known) <= value <= max(known) or value < LEAST:
            return None
        rest = _rest(question, axis)
        whole = self._family(rest, axis, tuple(sorted(known)), known)
        return whole or self._between(rest, axis, value, known)

    def _between(self, rest: str, axis: str, value: int, known: dict[int, Answer]) -> Family | None:
        """A family of the runs on both sides of a place, if it gives the peak of a third one, too."""
        lower, higher = max(x for x in known if x <= value), min(x for x in known if x >= value)
        if lower == higher:
            return None
        others = sorted((x for x in known if x not in (lower, higher)), key=lambda x: min(abs(x - lower), abs(x - higher)))
        for degree in (1, 2):
            ends = (lower, higher) if degree == 1 else (lower, higher, *others[:1])
            family = self._family(rest, axis, tuple(sorted(ends)), known)
            left = [x for x in others if x not in ends]
            logs = ((x, known[x].log) for x in left[:2])  # of runs that it was not made of
            if family and family.degree == degree and any(family.peak(x, ROUNDED) == Replay(log, ROUNDED).total.max() for x, log in logs):
                return family
        return None

    def _family(self, rest: str, axis: str, values: tuple[int, ...], known: dict[int, Answer]) -> Family | None:
        key = (rest, axis, values)
        if key not in self._families:
            self._families[key] = _fitted({x: known[x].log for x in values}, parabola=axis != "micro_batch")
        return self._families[key]

    def _along(self, question: Question, axis: str) -> dict[int, Answer]:
        """Place on an axis → the answer there, all else being equal."""
        return self._lines.get((axis, _rest(question, axis)), {})

    # --- what to ask

    def wanted(self, question: Question, stops: dict[str, Sequence[int]]) -> Question | None:
        """The next question to run, so that a configuration and then its neighbours along some axes are known; None = all are.

        Args:
            question: the configuration whose memory is asked for.
            stops: axis → the values on it that may be needed, in order; the first axes come first.
        """
        if self.error(question):
            return None
        if not self.knows(question, list(stops)):
            return question
        for axis, places in stops.items():
            if found := self._missing(question, axis, places):
                return found
        return None

    def _missing(self, question: Question, axis: str, places: Sequence[int]) -> Question | None:
        """A run that makes the curve through a place known, from the largest place on the axis to the smallest."""
        value = question.along(axis)
        inner = [x for x in places if x >= LEAST]
        if value is None or len(inner) < 2:
            return None
        ends = [inner[-1], inner[0]]
        if axis != "micro_batch":  # a parabola takes three, and one more to check it
            known = self.family(question, axis)
            ends += [inner[len(inner) // 2], *([inner[len(inner) // 4]] if known and known.degree > 1 else [])]
        for x in ends:
            if self._open(question.at(axis, x)):
                return question.at(axis, x)
        at = min(range(len(inner)), key=lambda place: abs(inner[place] - value))
        for neighbour in inner[max(0, at - 1) : at + 2]:
            beside = question.at(axis, neighbour)
            if not self.knows(beside, [axis]) and not self.error(beside) and len(self._along(question, axis)) < len(ends) + SPLITS:
                return question.at(axis, self._split(question, axis, neighbour, inner))
        return None

    def _open(self, question: Question) -> bool:
        return question.key not in self._answers and question.key not in self._errors

    def _split(self, question: Question, axis: str, value: int, places: Sequence[int]) -> int:
        """The middle of the stretch around a value that has no run."""
        tried = [x for x in places if not self._open(question.at(axis, x))]
        low, high = max((x for x in tried if x < value), default=0), min((x for x in tried if x > value), default=places[-1] + 1)
        inside = [x for x in places if low < x < high]
        return inside[len(inside) // 2]


def _rest(question: Question, axis: str) -> str:
    """Equal for questions that differ along an axis only."""
    return question.at(axis, 1).key


def _fitted(logs: Mapping[int, MemoryLog], *, parabola: bool) -> Family | None:
    """A family of the lowest degree that all logs agree on; None where they do not."""
    for degree in (1, 2) if parabola and len(logs) > 2 else (1,):
        try:
            return Family(logs, degree)
        except ValueError:
            continue
    return None
