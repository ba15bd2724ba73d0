"""Tournament of learning rates: all candidates train for a short while, and the best go on to further rounds.

The caller passes the function that trains (`Runner`). `conclude` makes an `LrFound` of sweeps and tournament.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from workbench.batch.analysis.lr_range import (
    AS_GOOD,
    AS_GOOD_LOSS,
    MIN_ERRORS,
    Candidate,
    LrFound,
    LrSweep,
    RuleSuggestion,
    lr_text,
    suggestions_over_seeds,
)
from workbench.core.units import several

STEPS = 80
"""Steps of a round. On a Fashion-MNIST perceptron 40 are too few for a batch of 8, and 160 choose no better."""
CANDIDATE_SPACING = 10**0.25
"""Ratio of neighbouring candidates near the best one."""
MAX_GAP = CANDIDATE_SPACING**1.5
"""Largest ratio of the best candidate to a neighbour. A wider gap gets a candidate in its middle, or the result says that nothing in it was
tried."""
COARSE = tuple(10 ** (k / 2) for k in range(-1, 3))
"""Multiples of a tenth of the minimum's learning rate that take part beside the suggestions of the rules."""
SURVIVORS = 4
"""Candidates of the second round. In the third the best meets the interpolated one."""
INTERPOLATED = "between"
"""Name of the candidate near the lowest point of a parabola through the best one and its neighbours."""
SAFETY = 1.25
"""The interpolated candidate is this many times below the parabola's lowest point: a race is short, and its winner is a little too large
for a long training. In 28 searches over the settings of `benchmarks/lr_finder.py` the lowest point needed up to 1.98 times the tuned steps,
this at most 1.3."""
TIE = 0.02
"""Share of the loss's fall within which the interpolated candidate is preferred: the parabola averages the noise of three."""
MAX_ADDED = 10
"""Most candidates that are added beside the best one. Eight close a gap of four decades on both sides of it."""
SAME_LOG = 0.05
"""Logarithms that differ by less are one learning rate."""

Runner = Callable[[float, int], float]
"""(learning rate, number of the round) → mean loss of the second half of the steps; infinite if it diverged."""


class OutOfBatches(Exception):
    """The loader has no batches left; the scores so far are kept."""


def first_candidates(rules: Sequence[RuleSuggestion]) -> tuple[Candidate, ...]:
    """Learning rates around a tenth of the minimum's, which varies least from seed to seed, and the suggestions of all other rules.

    None is right everywhere: with SGD a tenth of the minimum's is up to 5 times too small, with Adam at small batches the steepest slope's
    diverges, and where normalisation keeps the loss finite at any rate a tenth of the minimum's is a hundred times too large.
    """
    known = {rule.rule: rule.lr for rule in rules}
    middle = known.pop("minimum/10", None)
    if middle is None:
        return ()
    candidates = [Candidate(lr=middle * factor, name="minimum/10" if factor == 1 else f"minimum/10 × {factor:.2g}") for factor in COARSE]
    for rule, lr in known.items():
        if lr and all(abs(math.log(lr / candidate.lr)) > math.log(CANDIDATE_SPACING) / 2 for candidate in candidates):
            candidates.append(Candidate(lr=lr, name=rule))
    return tuple(sorted(candidates, key=lambda candidate: candidate.lr))


def race(candidates: Sequence[Candidate], run: Runner) -> tuple[Candidate, ...]:
    """Train all candidates for a round, then the best ones for more. Candidates are added until the best one has a near neighbour on
    either side.

    Args:
        candidates: at least one.
        run: trains a candidate for a round.

    Returns:
        All candidates with their scores, by learning rate; the scores so far if `run` raises OutOfBatches.
    """
    known = {candidate.lr: candidate for candidate in candidates}

    def score(lr: float, number: int) -> None:
        known[lr] = replace(known[lr], scores=(*known[lr].scores, run(lr, number)))

    def surround(rounds: int) -> None:
        """Add candidates beside the best one; they train for so many rounds."""
        while len(known) < len(candidates) + MAX_ADDED:
            best = ranking(known.values())[0]
            beside = next_candidate(known.values(), best)
            if beside is None or not math.isfinite(best.mean(rounds)):
                return
            known[beside.lr] = beside
            for number in range(rounds):
                score(beside.lr, number)

    try:
        for lr in sorted(known):
            score(lr, 0)
        surround(1)
        for survivor in ranking(known.values())[:SURVIVORS]:
            score(survivor.lr, 1)
        surround(2)
        best = ranking(known.values())[0]
        if between := interpolate(known.values(), best):
            known[between] = Candidate(lr=between, name=INTERPOLATED)
            score(between, 0)
            score(between, 1)
            score(best.lr, 2)
            score(between, 2)
    except OutOfBatches:
        pass
    return tuple(known[lr] for lr in sorted(known) if known[lr].scores)


def neighbours(candidates: Iterable[Candidate], best: Candidate) -> tuple[Candidate | None, Candidate | None]:
    """The candidates with the next smaller and the next larger learning rate; None = there is none."""
    row = sorted(candidates, key=lambda candidate: candidate.lr)
    place = row.index(best)
    return row[place - 1] if place else None, row[place + 1] if place + 1 < len(row) else None


def next_candidate(candidates: Iterable[Candidate], best: Candidate) -> Candidate | None:
    """A candidate beyond the end at which the best one is, or in the wider gap beside it; None = it has near neighbours."""
    below, above = neighbours(candidates, best)
    if below is None or above is None:
        lr = best.lr * CANDIDATE_SPACING if above is None else best.lr / CANDIDATE_SPACING
        return Candidate(lr=lr, name="beyond the end")
    wider = max(below, above, key=lambda candidate: abs(math.log(candidate.lr / best.lr)))
    if max(wider.lr / best.lr, best.lr / wider.lr) <= MAX_GAP:
        return None
    return Candidate(lr=math.sqrt(wider.lr * best.lr), name="in a gap")


def ranking(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best first: by the number of rounds, then by the mean loss."""
    return sorted(candidates, key=lambda candidate: (-len(candidate.scores), candidate.mean(len(candidate.scores))))


def interpolate(candidates: Iterable[Candidate], best: Candidate) -> float | None:
    """The learning rate a little (SAFETY) below the lowest point of a parabola through the first scores of the best candidate and its
    neighbours, over log η; None = a neighbour is missing or diverged, the parabola opens downwards, or its lowest point is the best one.
    """
    below, above = neighbours(candidates, best)
    if below is None or above is None:
        return None
    (x, a), (y, b), (z, c) = [(math.log(candidate.lr / best.lr), candidate.scores[0]) for candidate in (below, best, above)]
    if not all(map(math.isfinite, (a, b, c))):
        return None
    left, right = (b - a) / (y - x), (c - b) / (z - y)
    curvature = (right - left) / (z - x)
    if curvature <= 0:
        return None
    lowest = min(max((x + y) / 2 - left / (2 * curvature), x / 2), z / 2) - math.log(SAFETY)
    return best.lr * math.exp(lowest) if abs(lowest) > SAME_LOG else None


def winner(candidates: Sequence[Candidate], start: float) -> Candidate:
    """The winner of a race that began at a loss of `start`."""
    best = ranking(candidates)[0]
    between = next((candidate for candidate in candidates if candidate.name == INTERPOLATED), None)
    if between is None or len(between.scores) < len(best.scores):
        return best
    rounds = len(best.scores)
    return between if between.mean(rounds) <= best.mean(rounds) + TIE * max(0.0, start - best.mean(rounds)) else best


def conclude(
    sweeps: Sequence[LrSweep],
    ran: Sequence[Candidate] = (),
    *,
    race_steps: int = STEPS,
    batch: int | None = None,
    steps: int = 0,
    notes: Sequence[str] = (),
) -> LrFound:
    """The result of sweeps, one per seed, and of a race, if there was one; `steps` are those of the whole search."""
    rules = suggestions_over_seeds(sweeps)
    start = statistics.median(sweep.start for sweep in sweeps)
    result = LrFound(
        lr=None,
        suggestions=rules,
        race=tuple(ran),
        race_steps=race_steps,
        start=start,
        sweeps=tuple(sweeps),
        batch=batch,
        steps=steps,
        notes=tuple(notes),
    )
    if why := cannot_tell(sweeps):
        return replace(result, why=why)
    best = winner(ran, start) if ran else None
    fell = best is not None and best.scores[0] < start - MIN_ERRORS * _standard_error(sweeps, race_steps)
    if not fell and (why := never_falls(sweeps, ran)):
        return replace(result, why=why)
    if best is None:
        return _unverified(result)
    if not fell:
        why = (
            f"over {race_steps} steps none of {len(ran)} candidates from {lr_text(ran[0].lr)} to {lr_text(ran[-1].lr)} brought the loss "
            f"below its start, {start:.4g}, though it falls in the sweeps. Try a warm-up, gradient clipping, or set low= and high="
        )
        return replace(result, why=why)
    near = _as_good(ran, best, start)
    rounds = len(best.scores)
    how = "it is between the best candidates, and did as well" if best.name == INTERPOLATED else "it had the lowest mean loss"
    why = f"{len(ran)} candidates trained for {race_steps} steps each, over equal batches; {how} over {several(rounds, 'round')}"
    return replace(result, lr=best.lr, low=min(near), high=max(near), verified=True, why=why + untried(ran, best))


def _as_good(ran: Sequence[Candidate], best: Candidate, start: float) -> list[float]:
    """The learning rates of the candidates that did about as well as the best one in the first round."""
    goal = best.scores[0]
    worst = start - AS_GOOD * (start - goal)
    if goal > 0:
        worst = min(worst, AS_GOOD_LOSS * goal)
    return [candidate.lr for candidate in ran if candidate.scores[0] <= worst]


def untried(ran: Sequence[Candidate], best: Candidate) -> str:
    """Which learning rates next to the best one no candidate had, as the end of a sentence; empty = it has near neighbours."""
    below, above = neighbours(ran, best)
    missing = []
    if below is None:
        missing.append(f"below {lr_text(best.lr)}")
    elif best.lr / below.lr > MAX_GAP:
        missing.append(f"between {lr_text(below.lr)} and {lr_text(best.lr)}")
    if above is None:
        missing.append(f"above {lr_text(best.lr)}")
    elif above.lr / best.lr > MAX_GAP:
        missing.append(f"between {lr_text(best.lr)} and {lr_text(above.lr)}")
    return f". Not tried: learning rates {' and '.join(missing)}, where a better one may be" if missing else ""


MAX_APART = 30.0
"""Largest over smallest suggestion of the rules, from which on a single sweep without a race determines no learning rate. Chosen: one
sweep of 100 steps of a made curve with next to no noise gives 10 to 300, and one of 30 steps, or with noise, 15 to 1,900. With half, hardly
a single sweep has an answer; with twice, some have one that noise decides."""


def _unverified(result: LrFound) -> LrFound:
    """The result without a race: what a rule suggests, with the range of all rules; none where a single sweep leaves them far apart."""
    known = [rule for rule in result.suggestions if rule.low is not None and rule.high is not None]
    low, high = min(rule.low or 0.0 for rule in known), max(rule.high or 0.0 for rule in known)
    rule = next(rule for rule in result.suggestions if rule.rule == "minimum/10")
    if len(result.sweeps) == 1 and high > MAX_APART * low:
        why = (
            f"not found in this time: after one sweep the rules suggest {lr_text(low)} to {lr_text(high)}, and no race has compared them. "
            "Try a larger budget_s="
        )
        return replace(result, low=low, high=high, why=why)
    why = (
        "a tenth of the learning rate at the lowest loss, median over the seeds; no race has verified it, and the range is that of all "
        f"{len(known)} rules"
    )
    return replace(result, lr=rule.lr, low=low, high=high, why=why)


def _standard_error(sweeps: Sequence[LrSweep], race_steps: int) -> float:
    """Standard error of the difference between the mean loss of half a race and that at the start."""
    noise = statistics.median(sweep.noise for sweep in sweeps)
    before = sum(max(1, sweep.planned // 10) for sweep in sweeps)
    return noise * math.sqrt(1 / before + 1 / max(1, race_steps - race_steps // 2))


def cannot_tell(sweeps: Sequence[LrSweep]) -> str:
    """Why the sweeps allow no choice; empty = they do."""
    finite = [loss for sweep in sweeps for loss in sweep.losses if math.isfinite(loss)]
    if max(finite) - min(finite) <= 1e-12 * max(map(abs, finite)):
        return (
            f"cannot tell: the loss is {finite[0]:.4g} in every step, over {_range(sweeps)}. Does the step train the model whose loss it "
            "returns? Are its parameters in the optimizer, with requires_grad, and is the loss not detached before backward()?"
        )
    if all(rule.lr is None for rule in suggestions_over_seeds(sweeps)):
        return f"cannot tell: the sweeps are too short ({_range(sweeps)}): try more iterations="
    return ""


def never_falls(sweeps: Sequence[LrSweep], ran: Sequence[Candidate]) -> str:
    """Why there is no result if the loss falls in at most half of the sweeps; empty = it falls in more."""
    falling = sum(sweep.falls for sweep in sweeps)
    if 2 * falling > len(sweeps):
        return ""
    noise = statistics.median(sweep.noise for sweep in sweeps)
    start = statistics.median(sweep.start for sweep in sweeps)
    in_race = f", nor with any of {len(ran)} candidates of a race" if ran else ""
    return (
        f"cannot tell: the loss never falls by more than its noise in {len(sweeps) - falling} of {len(sweeps)} sweeps{in_race} "
        f"({_range(sweeps)}; it starts at {start:.4g} and varies by {noise:.2g} from batch to batch). Try more iterations= or a larger "
        "batch; else check that labels match their inputs, and that the model is not trained already"
    )


def _range(sweeps: Sequence[LrSweep]) -> str:
    low, high = min(sweep.lrs[0] for sweep in sweeps), max(sweep.lrs[-1] for sweep in sweeps)
    return f"learning rates from {lr_text(low)} to {lr_text(high)}"
