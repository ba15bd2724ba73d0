"""Turns marks into steps by arithmetic on nanoseconds. Phases are neighbouring intervals, so they sum to a step's length exactly.

The marks from one NEXT to the next are an iteration of the loop. Almost all iterations have the same sequence of codes, so each sequence is
interpreted once and cached. Equal iterations in a row then cost only subtractions and additions.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, repeat
from typing import Literal

from workbench.core.vocabulary import PHASES
from workbench.timeline.marks import (
    AWAY,
    BACK,
    BACKWARD,
    BATCH,
    BORDER,
    DATA_WAIT,
    END,
    END_FORWARD,
    END_PHASE,
    FORWARD,
    H2D,
    IDLE,
    NEXT,
    OPTIMIZER,
    OTHER,
    OWN_BACKWARD,
)

LOSS, NO_STEP, CLOSURE_LOSS = 6, 7, 8
"""Columns beside the six phases. LOSS: time after forward, which belongs to forward if a backward follows. NO_STEP: time of no step.
CLOSURE_LOSS: as LOSS, in a closure that an optimizer calls."""

Row = tuple[int, int, int, int, int, int, int | None]
"""A finished step: nanoseconds per phase in the order of `core.vocabulary.PHASES`, and samples."""

StepsBy = Literal["optimizer", "batch", "undecided"]
"""What ends a step: the first `next()` after an optimizer step, every `next()`, or not known yet."""

UNDECIDED_BATCHES = 64
"""Batches without an optimizer step after which each batch counts as a step, since gradients are not accumulated over so many."""

_NEXT, _END = bytes([NEXT]), bytes([END])


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The meaning of the codes from one NEXT to the next."""

    columns: tuple[int, ...]
    """The column of the interval after each mark, beginning with the NEXT: a phase, or NO_STEP."""
    rows: Callable[[list[int], Iterable[int | None]], list[Row]]
    """Gives the rows of successive such iterations. Takes the times of all their marks and of the mark after them, and their samples."""
    batch: bool
    """Did the loader give a batch?"""
    updated: bool
    """Did an optimizer step begin?"""


@lru_cache(maxsize=1024)
def read_iteration(codes: bytes) -> Iteration:
    """Interpret the codes that follow a NEXT. A phase that no mark ends is over at the next `next()`."""
    columns = [DATA_WAIT]
    around: list[int] = []  # the phases that wait for a nested one to end
    batch = away = updated = False
    for code in codes:
        phase = columns[-1]
        if code == OWN_BACKWARD:
            columns, code = _settled(columns, OTHER), BACKWARD
        if code < END_PHASE and not away:
            if not batch and code != H2D:
                code = DATA_WAIT  # a model inside the loader's transforms does the loader's work
            if code in (BACKWARD, OPTIMIZER):
                columns = _settled(columns, FORWARD if code == BACKWARD else OTHER)
                phase = _WITHOUT_LOSS.get(phase, phase)
                updated |= code == OPTIMIZER
            around.append(phase)
            phase = code
        elif code in (END_PHASE, END_FORWARD) and not away:
            if phase == CLOSURE_LOSS:  # the optimizer ends, and there was no backward
                columns = _settled(columns, OTHER)
            phase = around.pop() if around else phase
            if code == END_FORWARD and phase == OTHER and not around:
                phase = LOSS
            elif code == END_FORWARD and phase == OPTIMIZER:
                phase = CLOSURE_LOSS
        elif code in (BATCH, BORDER):
            batch, phase = True, OTHER
            if code == BORDER:
                columns[-1] = OTHER
        elif code == AWAY:
            around.append(phase)
            away, phase = True, OTHER if batch else DATA_WAIT
        elif code == BACK:
            away, phase = False, around.pop() if around else OTHER
        elif code in (IDLE, END):
            phase = NO_STEP
        columns.append(phase)
    columns = _settled(columns, OTHER)
    if codes.endswith(_END):
        columns.pop()
    return Iteration(columns=tuple(columns), rows=_adder(columns), batch=batch, updated=updated)


_WITHOUT_LOSS = {LOSS: OTHER, CLOSURE_LOSS: OPTIMIZER}
"""The phase that goes on where no loss was computed."""


def _settled(columns: list[int], loss: int) -> list[int]:
    """Columns in which it is decided what followed forward: FORWARD, or OTHER than a loss."""
    return [(loss if loss == FORWARD else _WITHOUT_LOSS[column]) if column in _WITHOUT_LOSS else column for column in columns]


def _adder(columns: list[int]) -> Callable[[list[int], Iterable[int | None]], list[Row]]:
    """`Iteration.rows` as one expression, cheaper than loops: `[(b-a, 0, e-c, …, n) for a, b, c, … in zip(t[0::9], t[1::9], …)]`."""
    terms: dict[int, list[str]] = {phase: [] for phase in range(NO_STEP + 1)}
    for column, run in groupby(range(len(columns)), columns.__getitem__):
        first, *_, last = [*run] * 2
        terms[column].append(f"t{last + 1}-t{first}")
    # a chain of a thousand `+` nests too deep for the compiler
    sums = [f"sum(({','.join(some)}))" if len(some) > 9 else "+".join(some) or "0" for some in terms.values()]
    marks = range(len(columns) + 1)
    names, times = ", ".join(f"t{i}" for i in marks), ", ".join(f"t[{i}::{len(columns)}]" for i in marks)
    return eval(f"lambda t, sizes: [({', '.join(sums[: len(PHASES)])}, n) for {names}, n in zip({times}, sizes)]")  # type: ignore[no-any-return]


@dataclass(slots=True)
class StepRules:
    """Decides what ends a step. The loops of a timer share one of these."""

    steps_by: StepsBy = "undecided"
    """Becomes "optimizer" at the first optimizer step of an undecided timer."""
    left_out: int = 0
    """Batches that belong to no step, where only an optimizer step ends one: evaluation, or an unfinished accumulation."""


class StepBuilder:
    """Turns the marks of a loop into steps, as they arrive."""

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        self.ended = False
        """Was there an END?"""
        self._times: list[int] = []  # of the iteration that is under way
        self._codes = b""
        self._startup: Row | None = None  # time before the first batch, to be counted with it
        self._open: list[Row] = []  # batches of a step that is not over, or of a loop that has not shown whether it uses an optimizer
        self._each_batch = rules.steps_by == "batch"
        self._had_step = False

    def feed(self, times: list[int], codes: bytes, next_size: Callable[[], int | None]) -> list[Row]:
        """Add marks (nanoseconds and codes), and return the steps that they finish."""
        self._times += times
        self._codes += codes
        before, *iterations = self._codes.split(_NEXT)
        if not iterations:
            return []
        last, end, _ = iterations.pop().partition(_END)  # is under way, or has the END; what was open then may leave marks behind it
        last += end
        ns, start = self._times, len(before)
        rows: list[Row] = []
        for repeated, run in groupby(iterations):
            this, count = read_iteration(repeated), len([*run])
            stop = start + count * len(this.columns)
            done = this.rows(ns[start : stop + 1], [next_size() for _ in range(count)] if this.batch else repeat(0))
            start = stop
            if not this.batch:
                self._startup = done[-1]
            elif this.updated:
                self._add(done[0], True, rows)
                rows += done[1:]  # of one batch each
            else:
                for row in done:
                    self._add(row, False, rows)
        if end:
            this = read_iteration(last)
            if this.updated:  # cut short by a break or an exception, but with its optimizer step
                self._add(this.rows(ns[start:], [next_size()])[0], True, rows)
            self._end(rows, cut_off=int(this.batch and not this.updated))
        self._times, self._codes = ns[start:], self._codes[start:]
        self._had_step |= bool(rows)
        return rows

    def unfinished(self) -> Row | None:
        """The current step up to its last mark, without its samples; None if it has no optimizer step yet."""
        if self.ended or not self._codes.startswith(_NEXT) or not (this := read_iteration(self._codes[1:])).updated:
            return None
        row = this.rows([*self._times, self._times[-1]], [None])[0]
        return _sum([*filter(None, [self._startup]), *self._open, row])

    def _add(self, row: Row, updated: bool, rows: list[Row]) -> None:
        """Add a batch that is over: it ends a step, or the step goes on."""
        if self._startup:
            row, self._startup = _sum([self._startup, row]), None
        open_, rules = self._open, self._rules
        if updated:
            if rules.steps_by == "undecided":
                rules.steps_by = "optimizer"
            self._each_batch = rules.steps_by == "batch"
            rows.append(_sum([*open_, row]) if open_ else row)
            open_.clear()
            return
        open_.append(row)
        if self._each_batch or (rules.steps_by == "undecided" and len(open_) > UNDECIDED_BATCHES):
            self._each_batch = True
            rows += open_
            open_.clear()

    def _end(self, rows: list[Row], *, cut_off: int) -> None:
        """End the loop, in which `cut_off` batches were not finished."""
        if self._rules.steps_by != "optimizer":
            rows += self._open
        elif not (cut_off and (self._had_step or rows)):  # the batch at which a training loop was left does not count
            self._rules.left_out += len(self._open) + cut_off
        self._open.clear()
        self.ended = True


def _sum(rows: list[Row]) -> Row:
    *phases, samples = zip(*rows, strict=True)
    data_wait, h2d, forward, backward, optimizer, other = map(sum, phases)
    return data_wait, h2d, forward, backward, optimizer, other, None if None in samples else sum(samples)
