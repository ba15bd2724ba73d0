"""The arithmetic of the range test: published rules, their spread, the race, and its words where no rule has an answer."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import plot
from workbench.batch.analysis.lr_race import (
    CANDIDATE_SPACING,
    INTERPOLATED,
    MAX_APART,
    MAX_GAP,
    OutOfBatches,
    conclude,
    first_candidates,
    interpolate,
    neighbours,
    race,
    ranking,
    untried,
    winner,
)
from workbench.batch.analysis.lr_range import (
    RULES,
    Candidate,
    LrFound,
    LrSweep,
    RuleSuggestion,
    check_options,
    ema,
    geometric,
    lightning,
    minimum,
    slide,
    steep,
    suggestions,
    suggestions_over_seeds,
    valley,
)

matplotlib.use("Agg")


def curve(seed: int = 0, *, noise: float = 0.02, best: float = 0.1, count: int = 100, scale: float = 1.0) -> LrSweep:
    """A sweep whose loss falls until `best` and then explodes."""
    random = np.random.default_rng(seed)
    lrs = geometric(1e-4 * scale, 10 * scale, count)
    losses = []
    for lr in lrs:
        x = math.log10(lr / scale / best)
        losses.append(2.3 - 1.5 / (1 + math.exp(-3 * (x + 0.5))) + math.exp(4 * (x - 1)) + noise * random.standard_normal())
        if losses[-1] > 9:
            break
    return LrSweep(lrs=lrs[: len(losses)], losses=tuple(losses), planned=count, seed=seed, stopped="diverged")


def flat(value: float = 2.0) -> LrSweep:
    lrs = geometric(1e-4, 10, 100)
    return LrSweep(lrs=lrs, losses=(value,) * 100)


def hill(best: float, *, start: float = 2.0) -> Callable[[float, int], float]:
    """A race whose loss is a parabola over log η, and diverges far above its lowest point."""
    return lambda lr, number: math.inf if lr > 30 * best else start - 1 + 0.2 * math.log(lr / best) ** 2


finite = st.floats(-10, 10, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=50))
def test_the_smoothed_loss_lies_between_the_losses(values: list[float]) -> None:
    smoothed = ema(values)
    assert smoothed[0] == pytest.approx(values[0])
    assert all(min(values) - 1e-9 <= one <= max(values) + 1e-9 for one in smoothed)


def test_smoothing_is_fastais() -> None:
    values, beta, mean = [3.0, 1.0, 2.0, 5.0], 0.98, 0.0
    for k, (value, ours) in enumerate(zip(values, ema(values), strict=True), 1):
        mean = beta * mean + (1 - beta) * value
        assert ours == pytest.approx(mean / (1 - beta**k))


@given(st.integers(0, 50), st.sampled_from([2.0**k for k in range(-8, 9)]))
def test_suggestions_scale_with_the_learning_rates(seed: int, factor: float) -> None:
    sweep = curve(seed)
    other = suggestions(replace(sweep, lrs=tuple(factor * lr for lr in sweep.lrs)))
    for rule, lr in suggestions(sweep).items():
        assert lr is not None
        assert other[rule] == pytest.approx(factor * lr)


@given(st.integers(0, 50))
def test_suggestions_lie_within_the_sweep(seed: int) -> None:
    sweep = curve(seed, noise=0.3)
    assert all(lr is None or sweep.lrs[0] / 10 <= lr <= sweep.lrs[-1] for lr in suggestions(sweep).values())


@given(st.lists(st.floats(0.1, 5), min_size=20, max_size=60, unique=True))
def test_the_rules_against_numpy(losses: list[float]) -> None:
    lrs = geometric(1e-5, 1, len(losses))
    values, at = np.array(losses), np.array(lrs)
    assert minimum(lrs, losses) == lrs[values.argmin()] / 10
    slopes = np.diff(values) / np.diff(np.log(at))
    assert slopes[lrs.index(steep(lrs, losses))] == pytest.approx(slopes.min())
    slopes = np.gradient(values, at)
    assert slopes[lrs.index(lightning(lrs, losses))] == pytest.approx(slopes.min())
    slopes = np.gradient(values)
    assert slopes[lrs.index(RULES["torch-lr-finder"](lrs, losses) or 0)] == pytest.approx(slopes.min())


def test_the_valley_is_found() -> None:
    losses = [5.0] * 10 + [5 - 0.2 * k for k in range(21)] + [9.0] * 5
    lrs = geometric(1e-3, 1, len(losses))
    place = lrs.index(valley(lrs, losses))
    assert 15 <= place <= 21  # the middle of the fall from 9 to 30


def test_slide_cannot_tell_on_few_points() -> None:
    assert slide(geometric(0.1, 1, 10), [1.0] * 10) is None


def test_spread_over_seeds() -> None:
    sweeps = [curve(seed, best=best) for seed, best in enumerate((0.05, 0.1, 0.2))]
    by_rule = {one.rule: one for one in suggestions_over_seeds(sweeps)}
    low, high = (suggestions(sweeps[place])["minimum/10"] for place in (0, 2))
    assert (by_rule["minimum/10"].low, by_rule["minimum/10"].high, by_rule["minimum/10"].seeds) == (low, high, 3)
    assert list(by_rule) == list(RULES)
    spread = by_rule["minimum/10"].spread
    assert spread is not None
    assert 2 < spread < 8


def test_a_constant_loss_cannot_tell() -> None:
    found = conclude([flat(), flat()])
    assert found.lr is None
    assert found.changes() == {}
    assert "cannot tell: the loss is 2 in every step" in found.why
    assert all(one.lr is None for one in found.suggestions)
    assert "no learning rate: cannot tell" in str(found)
    assert repr(found) == "LrFound(–)"


def test_a_loss_that_never_falls_is_said() -> None:
    random = np.random.default_rng(1)
    lrs = geometric(1e-4, 10, 100)
    sweeps = [LrSweep(lrs=lrs, losses=tuple(2.3 + 0.1 * random.standard_normal(100)), seed=seed) for seed in range(5)]
    found = conclude(sweeps)
    assert found.lr is None
    assert "never falls by more than its noise in 5 of 5 sweeps" in found.why
    assert len(found.sweeps) == 5  # what was learnt
    assert found.suggestions


def test_without_a_race_nothing_is_verified() -> None:
    found = conclude([curve(seed) for seed in range(3)])
    assert not found.verified
    assert found.lr == next(one.lr for one in found.suggestions if one.rule == "minimum/10")
    assert "no race has verified it" in found.why
    assert repr(found).endswith("not verified)")
    known = [one for one in found.suggestions if one.lr is not None]
    assert (found.low, found.high) == (min(one.low or 0 for one in known), max(one.high or 0 for one in known))
    assert "the range is that of all" in found.why


def test_one_sweep_whose_rules_lie_far_apart_determines_nothing() -> None:
    """It said "0.0523 (0.0523 … 0.0523)" though the rules went from 0.00119 to 0.142; 0.002 did better."""
    far = next(found for seed in range(99) if (found := conclude([curve(seed, noise=0.3, count=30)])).lr is None and found.low)
    assert far.why.startswith("not found in this time: after one sweep the rules suggest ")
    assert (far.low or 0) * MAX_APART < (far.high or 0)
    assert far.changes() == {}
    assert far.summary.startswith("no learning rate: not found in this time")
    near = next(found for seed in range(99) if (found := conclude([curve(seed, noise=0.001, count=100)])).lr)
    assert (near.low or 0) < (near.high or 0)


@given(st.floats(1e-4, 10))
def test_a_race_finds_the_lowest_point(best: float) -> None:
    rules = (RuleSuggestion(rule="minimum/10", lr=0.03, low=0.03, high=0.03, seeds=5), RuleSuggestion(rule="steep", lr=0.05))
    ran = race(first_candidates(rules), hill(best))
    assert [one.lr for one in ran] == sorted(one.lr for one in ran)
    found = winner(ran, 2.0)
    if 1e-3 < best < 8:  # the field grows where the best stands at its end
        assert best / 1.6 <= found.lr <= best * CANDIDATE_SPACING**0.5
    assert ranking(ran)[0].mean(1) == min(one.mean(1) for one in ran if len(one.scores) == len(ranking(ran)[0].scores))


DETECTOR = {
    "steep": 0.00174,
    "minimum/10": 2.16,
    "valley": 0.171,
    "slide": 3.19,
    "lightning": 0.00174,
    "torch-lr-finder": 0.0152,
}
"""Suggestions for a small detector with batch norm and AdamW, whose sweeps explode only at 40. The best rate is about 0.015."""


def plateau(lr: float, number: int = 0) -> float:
    """Loss of a race of that detector, about: lowest at 0.015, and above 0.2 a plateau that goes up and down."""
    if lr > 20:
        return 4.0
    basin = 0.0018 + 0.006 * math.log10(lr / 0.015) ** 2 * (6 if lr < 0.015 else 1)
    return min(basin, 0.0185 + 0.004 * math.sin(5 * math.log(lr)))


@pytest.mark.parametrize("left_out", [(), ("torch-lr-finder",), ("torch-lr-finder", "valley")])
def test_the_best_candidate_is_surrounded_though_suggestions_lie_far_apart(left_out: tuple[str, ...]) -> None:
    """It answered 0.28, and another time 6.83: between 0.00174 and 0.28 there was no candidate, though one rule suggested 0.0152."""
    rules = [RuleSuggestion(rule=rule, lr=lr) for rule, lr in DETECTOR.items() if rule not in left_out]
    ran = race(first_candidates(rules), plateau)
    assert all(min(abs(math.log(one.lr / (rule.lr or 0))) for one in ran) < math.log(CANDIDATE_SPACING) / 2 for rule in rules)
    found = winner(ran, 0.776)
    assert 0.015 / CANDIDATE_SPACING < found.lr < 0.015 * CANDIDATE_SPACING
    assert not untried(ran, found)
    sweeps = [LrSweep(lrs=geometric(1e-3, 10, 50), losses=tuple(plateau(lr) for lr in geometric(1e-3, 10, 50)))]
    answer = conclude(sweeps, ran)
    assert answer.low is not None
    assert answer.high is not None
    assert answer.high < 0.2  # it was 38: nine tenths of the fall from 0.776 is what the whole plateau has
    assert "Not tried" not in answer.why


@given(st.floats(1e-4, 10), st.lists(st.floats(1e-5, 30), min_size=6, max_size=6))
def test_a_candidate_without_near_neighbours_is_said(best: float, lrs: list[float]) -> None:
    rules = [RuleSuggestion(rule=rule, lr=lr) for rule, lr in zip(RULES, lrs, strict=True)]
    first = first_candidates(rules)
    ran = race(first, hill(best))
    found = winner(ran, 2.0)
    below, above = neighbours(ran, found)
    near = below is not None and above is not None and above.lr <= found.lr * MAX_GAP * 1.001 and found.lr <= below.lr * MAX_GAP * 1.001
    assert near or untried(ran, found).startswith(". Not tried: learning rates ")
    if first[0].lr / 5 < best < first[-1].lr * 5:  # within the candidates, or a little beyond
        assert near
        assert best / 1.6 <= found.lr <= best * CANDIDATE_SPACING**0.75


def test_what_was_not_tried() -> None:
    row = [Candidate(lr=lr, name="", scores=(1.0,)) for lr in (0.001, 0.1, 0.2, 10.0)]
    assert untried(row, row[1]) == ". Not tried: learning rates between 0.001 and 0.1, where a better one may be"
    assert untried(row, row[2]) == ". Not tried: learning rates between 0.2 and 10, where a better one may be"
    assert untried(row, row[3]) == ". Not tried: learning rates between 0.2 and 10 and above 10, where a better one may be"


def test_all_candidates_diverge() -> None:
    rules = (RuleSuggestion(rule="minimum/10", lr=0.03),)
    ran = race(first_candidates(rules), lambda lr, number: math.inf)
    found = conclude([curve(seed) for seed in range(3)], ran, race_steps=80)
    assert found.lr is None
    assert "none of 4 candidates from" in found.why
    assert LrFound.from_json(found.to_json()) == found


def test_a_race_that_is_broken_off_keeps_its_scores() -> None:
    count = itertools.count()

    def run(lr: float, number: int) -> float:
        if next(count) == 5:
            raise OutOfBatches
        return 1.0 + lr

    ran = race(first_candidates((RuleSuggestion(rule="minimum/10", lr=0.03),)), run)
    assert len(ran) == 5
    assert all(len(one.scores) == 1 for one in ran)
    found = conclude([curve(seed) for seed in range(3)], ran, race_steps=80)
    assert found.why.endswith("over 1 round. Not tried: learning rates below 0.00533, where a better one may be")


def test_every_rule_takes_part_where_it_stands_apart() -> None:
    def names(lr: float, rule: str) -> set[str]:
        return {one.name for one in first_candidates((RuleSuggestion(rule="minimum/10", lr=0.1), RuleSuggestion(rule=rule, lr=lr)))}

    for rule in RULES.keys() - {"minimum/10"}:
        assert rule in names(0.001, rule)
        assert rule not in names(0.101, rule)
    assert first_candidates((RuleSuggestion(rule="minimum/10", lr=None),)) == ()


def test_the_vertex_of_a_parabola() -> None:
    three = [Candidate(lr=lr, name="", scores=(hill(0.15)(lr, 0),)) for lr in (0.056, 0.1, 0.178)]
    assert interpolate(three, three[1]) == pytest.approx(math.sqrt(0.1 * 0.178) / 1.25)  # half-way to the neighbour at most
    assert interpolate(three, three[0]) is None
    assert interpolate([replace(three[0], scores=(math.inf,)), *three[1:]], three[1]) is None


def test_the_one_between_has_to_be_as_good() -> None:
    best = Candidate(lr=0.1, name="minimum/10", scores=(1.0, 1.0, 1.0))
    for score, name in ((1.005, INTERPOLATED), (1.1, "minimum/10")):
        assert winner([best, Candidate(lr=0.08, name=INTERPOLATED, scores=(score,) * 3)], 2.0).name == name


def raced() -> LrFound:
    sweeps = [curve(seed) for seed in range(5)]
    return conclude(
        sweeps, race(first_candidates(suggestions_over_seeds(sweeps)), hill(0.2)), race_steps=80, batch=32, steps=1800, notes=("a note",)
    )


def test_what_was_found_shows_itself() -> None:
    found = raced()
    assert found.verified
    assert found.lr is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.lr <= found.high
    assert found.changes() == {"lr": found.lr}
    text = str(found)
    for word in ("learning rate", "minimum/10", "lightning", "Race over 80 steps", "a note", "median and range over 5 seeds"):
        assert word in text
    assert "<table>" in found._repr_html_()
    frame = found.to_frame()
    assert set(frame["kind"]) == {"rule", "race"}
    assert len(frame) == len(RULES) + len(found.race)


def test_json_and_back() -> None:
    import json

    found = raced()
    assert LrFound.from_json(json.loads(json.dumps(found.to_json()))) == found
    broken = replace(flat(), losses=(*(2.0,) * 99, math.inf), stopped="not finite")
    assert LrSweep.from_json(json.loads(json.dumps(broken.to_json()))) == broken


def test_picture() -> None:
    found = raced()
    ax = found.plot()
    labels = ax.get_legend_handles_labels()[1]
    assert {"median", "rules", "about as good", f"chosen: {found.lr:.3g}"} <= set(labels)
    lines: dict[Any, Any] = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines["race: loss over 80 steps"].get_xdata()) == [one.lr for one in found.race if math.isfinite(one.mean(1))]
    assert {text.get_text() for text in ax.texts} == set(RULES)
    assert ax.get_xscale() == "log"
    assert plot.lr_range(conclude([flat()]), ax=matplotlib.figure.Figure().subplots()).get_xlabel() == "learning rate"
    with pytest.raises(ValueError, match="no sweeps to draw"):
        plot.lr_range(LrFound(lr=None))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 0}, "low=0: a learning rate above 0"),
        ({"high": "1"}, "high='1'"),
        ({"low": 0.1, "high": 0.2}, "at least ten times low"),
        ({"sweeps": 0}, "sweeps=0: a whole number of at least 1"),
        ({"iterations": 10}, "iterations=10: a whole number of at least 30"),
        ({"race_steps": -1}, "race_steps=-1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    known: dict[str, Any] = {"low": None, "high": None, "sweeps": 5, "iterations": 100, "race_steps": 80}
    with pytest.raises(ValueError, match=words):
        check_options(**known | options)


@pytest.mark.parametrize(("lrs", "losses"), [((0.1,), ()), ((), ()), ((0.2, 0.1), (1.0, 1.0)), ((0.0, 0.1), (1.0, 1.0))])
def test_sweeps_that_cannot_be(lrs: Sequence[float], losses: Sequence[float]) -> None:
    with pytest.raises(ValueError, match="a sweep"):
        LrSweep(lrs=tuple(lrs), losses=tuple(losses))
