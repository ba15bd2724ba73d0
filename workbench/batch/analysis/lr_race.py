"""The race of learning rates: who takes part, who goes on to the next round, who has won. Who runs it is told only what to run."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from workbench.batch.analysis.lr_found import NEAR, Candidate, LrFound, RuleSays, figure, says
from workbench.batch.analysis.lr_range import LrSweep

STEPS = 80
"""Of one round. On a Fashion-MNIST perceptron 40 are too few for a batch of 8, and 160 choose no better."""
APART = 10**0.25
"""Factor between neighbouring candidates."""
BELOW, ABOVE = 2, 5
"""Candidates below and above a tenth of the minimum's learning rate."""
SURVIVORS = 4
"""How many go on to the second round. In the third the best meets the one between."""
BETWEEN = "between"
"""Name of the candidate near the lowest point of a parabola through the best one and its neighbours."""
SAFER = 1.25
"""So much smaller than the parabola's lowest point it is: a race is short, and what wins it is a little too large for a long training. In
28 searches over the settings of `benchmarks/lr_finder.py` the lowest point needed up to 1.98 times the tuned steps, this at most 1.3."""
TIE = 0.02
"""Share of the loss's fall within which that one is preferred: the parabola has seen more than one candidate's noise."""
WIDER = 6
"""Most candidates that are added beyond an end of the field, because the one at that end was the best."""


class NoMore(Exception):
    """There are no batches left to go on with; what was learnt is kept."""


Runner = Callable[[float, int], float]
"""(learning rate, number of the round) → mean loss of the second half of the steps; infinite if it diverged."""


def field(rules: Sequence[RuleSays]) -> tuple[Candidate, ...]:
    """The first candidates: around a tenth of the minimum's learning rate, which varies least from seed to seed, and the steepest slope's.

    Neither is right everywhere: with SGD the former is up to 5 times too small, with Adam at small batches the latter diverges.
    """
    known = {one.rule: one.lr for one in rules}
    middle, steepest = known.get("minimum/10"), known.get("steep")
    if middle is None:
        return ()
    found = [Candidate(lr=middle * APART**k, name=_name(k)) for k in range(-BELOW, ABOVE + 1)]
    if steepest and all(abs(math.log(steepest / one.lr)) > math.log(APART) / 2 for one in found):
        found.append(Candidate(lr=steepest, name="steep"))
    return tuple(sorted(found, key=lambda one: one.lr))


def _name(k: int) -> str:
    return "minimum/10" if not k else f"minimum/10 × {APART**k:.2g}"


def race(candidates: Sequence[Candidate], run: Runner) -> tuple[Candidate, ...]:
    """Let all run the first round, the best the next ones. Where the best stands at an end of the field, the field grows there first.

    Args:
        candidates: at least one.
        run: takes the steps.

    Returns:
        All candidates with their scores, by learning rate; what a race has that `run` breaks off by NoMore.
    """
    known = {one.lr: one for one in candidates}

    def score(lr: float, number: int) -> None:
        known[lr] = replace(known[lr], scores=(*known[lr].scores, run(lr, number)))

    try:
        for lr in sorted(known):
            score(lr, 0)
        for _ in range(WIDER):
            best, ends = ranking(known.values())[0], (min(known), max(known))
            if best.lr not in ends or not math.isfinite(best.mean(1)):
                break
            lr = best.lr * APART if best.lr == ends[1] else best.lr / APART
            known[lr] = Candidate(lr=lr, name="beyond the end")
            score(lr, 0)
        for one in ranking(known.values())[:SURVIVORS]:
            score(one.lr, 1)
        best = ranking(known.values())[0]
        if between := vertex(known.values(), best):
            known[between] = Candidate(lr=between, name=BETWEEN)
            score(between, 0)
            score(between, 1)
            score(best.lr, 2)
            score(between, 2)
    except NoMore:
        pass
    return tuple(known[lr] for lr in sorted(known) if known[lr].scores)


def ranking(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best first: who ran more rounds goes before, and among those the lower mean loss."""
    return sorted(candidates, key=lambda one: (-len(one.scores), one.mean(len(one.scores))))


def vertex(candidates: Iterable[Candidate], best: Candidate) -> float | None:
    """A little (SAFER) below the lowest point of a parabola through the first scores of the best candidate and its neighbours, over log η.

    None where there are no neighbours that did not diverge, where the parabola opens downwards, or where it is the best one's place.
    """
    row = sorted(candidates, key=lambda one: one.lr)
    place = row.index(best)
    if not 0 < place < len(row) - 1:
        return None
    three = row[place - 1 : place + 2]
    (x, a), (y, b), (z, c) = [(math.log(one.lr / best.lr), one.scores[0]) for one in three]
    if not all(map(math.isfinite, (a, b, c))):
        return None
    left, right = (b - a) / (y - x), (c - b) / (z - y)
    curve = (right - left) / (z - x)
    if curve <= 0:
        return None
    lowest = min(max((x + y) / 2 - left / (2 * curve), x / 2), z / 2) - math.log(SAFER)
    return best.lr * math.exp(lowest) if abs(lowest) > _SAME else None


_SAME = 0.05
"""Logarithms that differ by less are one learning rate."""


def chosen(candidates: Sequence[Candidate], start: float) -> Candidate:
    """The winner of a race that began at a loss of `start`."""
    best = ranking(candidates)[0]
    between = next((one for one in candidates if one.name == BETWEEN), None)
    if between is None or len(between.scores) < len(best.scores):
        return best
    rounds = len(best.scores)
    return between if between.mean(rounds) <= best.mean(rounds) + TIE * max(0.0, start - best.mean(rounds)) else best


def judged(
    sweeps: Sequence[LrSweep], ran: Sequence[Candidate] = (), *, race_steps: int = STEPS, batch: int | None = None, steps: int = 0,
    notes: Sequence[str] = (),
) -> LrFound:  # fmt: skip
    """What came of sweeps and race.

    Args:
        sweeps: one per seed.
        ran: the candidates with their scores; none = there was no race.
        race_steps: of a round.
        batch: samples per step.
        steps: taken for all of it.
        notes: what a reader should know.
    """
    rules = says(sweeps)
    start = statistics.median(sweep.start for sweep in sweeps)
    found = LrFound(
        lr=None, suggestions=rules, race=tuple(ran), race_steps=race_steps, start=start, sweeps=tuple(sweeps), batch=batch, steps=steps,
        notes=tuple(notes),
    )  # fmt: skip
    if why := cannot_tell(sweeps):
        return replace(found, why=why)
    best = chosen(ran, start) if ran else None
    reached = best is not None and best.scores[0] < start - _ERRORS * _error(sweeps, race_steps)
    if not reached and (why := never_falls(sweeps, ran)):
        return replace(found, why=why)
    if best is None:
        rule = next(one for one in rules if one.rule == "minimum/10")
        why = "a tenth of the learning rate at the lowest loss, median over the seeds; no race has settled it"
        return replace(found, lr=rule.lr, low=rule.low, high=rule.high, why=why)
    first = best.scores[0]
    if not reached:
        low, high = ran[0].lr, ran[-1].lr
        return replace(
            found,
            why=f"over {race_steps} steps none of {len(ran)} candidates from {figure(low)} to {figure(high)} brought the loss below its "
            f"start, {start:.4g}, though it falls in the sweeps. Try a warm-up, gradient clipping, or low= and high= yourself",
        )
    near = [one.lr for one in ran if start - one.scores[0] >= NEAR * (start - first)]
    rounds = len(best.scores)
    how = "it lies between the best of them, and did as well" if best.name == BETWEEN else "it had the lowest loss"
    why = f"{len(ran)} candidates trained for {race_steps} steps each, over equal batches; {how} in {rounds} round{'s' * (rounds > 1)}"
    return replace(found, lr=best.lr, low=min(near), high=max(near), verified=True, why=why)


_ERRORS = 3.0
"""Standard errors by which the loss has to fall at least."""


def _error(sweeps: Sequence[LrSweep], race_steps: int) -> float:
    """Standard error of the difference between the mean loss of half a race and that at the start."""
    noise = statistics.median(sweep.noise for sweep in sweeps)
    before = sum(max(1, sweep.planned // 10) for sweep in sweeps)
    return noise * math.sqrt(1 / before + 1 / max(1, race_steps - race_steps // 2))


def cannot_tell(sweeps: Sequence[LrSweep]) -> str:
    """Why the sweeps allow no choice; empty = they do."""
    highest = max(sweep.lrs[-1] for sweep in sweeps)
    lowest = min(sweep.lrs[0] for sweep in sweeps)
    span = f"learning rates from {figure(lowest)} to {figure(highest)}"
    finite = [loss for sweep in sweeps for loss in sweep.losses if math.isfinite(loss)]
    if max(finite) - min(finite) <= 1e-12 * max(map(abs, finite)):
        return (
            f"cannot tell: the loss is {finite[0]:.4g} in every step, over {span}. Does the step train the model whose loss it returns? "
            "Are its parameters in the optimizer, with requires_grad, and is the loss not detached before backward()?"
        )
    if all(one.lr is None for one in says(sweeps)):
        return f"cannot tell: the sweeps are too short ({span}): try more iterations="
    return ""


def never_falls(sweeps: Sequence[LrSweep], ran: Sequence[Candidate]) -> str:
    """What to say if the loss falls in at most half of the sweeps; empty = it falls in more."""
    falling = sum(sweep.falls for sweep in sweeps)
    if 2 * falling <= len(sweeps):
        noise = statistics.median(sweep.noise for sweep in sweeps)
        start = statistics.median(sweep.start for sweep in sweeps)
        span = f"learning rates from {figure(min(one.lrs[0] for one in sweeps))} to {figure(max(one.lrs[-1] for one in sweeps))}"
        race = f", nor with any of {len(ran)} candidates of a race" if ran else ""
        return (
            f"cannot tell: the loss never falls by more than its noise in {len(sweeps) - falling} of {len(sweeps)} sweeps{race} ({span}; "
            f"it starts at {start:.4g} and varies by {noise:.2g} from batch to batch). Try more iterations= or a larger batch; else look "
            "whether labels belong to their inputs, and whether the model is trained already"
        )
    return ""
