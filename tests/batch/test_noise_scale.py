"""The noise scale from two norms per step: unbiased, its interval is right as often as it says, and it says how many steps it takes."""

import json
import math
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot

from workbench.batch.analysis.noise_scale import NoiseScale, noise_scale_of_ranks
from workbench.batch.analysis.noise_scale_estimator import (
    ENOUGH,
    NoiseScaleError,
    NoiseSteps,
    Numbers,
    block_length,
    blocks,
    fieller_interval,
    relative_error,
    transient_length,
)

matplotlib.use("Agg")
TRUTH = 100.0
WEIGHTS = 20


def signal(seed: int = 0) -> Numbers:
    """A true gradient with |G|² = 0.01; the noise of a sample has tr Σ = 1."""
    direction = np.random.default_rng(seed).standard_normal(WEIGHTS)
    return direction * 0.1 / np.linalg.norm(direction)


def drawn(rng: np.random.Generator, *, groups: int, micro_batch: int, steps: int, size: Any = 1.0) -> list[tuple[float, float]]:
    """The two norms of steps of normal noise; gradients of step t are `size[t]` times as large."""
    spread = 1 / np.sqrt(1 + np.arange(WEIGHTS))
    spread /= np.linalg.norm(spread)
    gradients = signal() + rng.standard_normal((steps, groups, WEIGHTS)) * spread / math.sqrt(micro_batch)
    gradients = gradients * np.broadcast_to(size, steps)[:, None, None]
    return list(zip(np.square(gradients).sum(2).mean(1).tolist(), np.square(gradients.mean(1)).sum(1).tolist(), strict=True))


def made(seed: int = 0, *, groups: int = 4, micro_batch: int = 64, steps: int = 300, **more: Any) -> NoiseScale:
    pairs = drawn(np.random.default_rng(seed), groups=groups, micro_batch=micro_batch, steps=steps)
    return NoiseScale.of(pairs, micro_batch=micro_batch, groups=groups, **more)


def test_the_estimates_are_unbiased() -> None:
    """By arithmetic: over all ways to draw two groups of one out of three samples, the means are the truth."""
    samples = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
    mean = samples.mean(0)
    trace, squares = float(np.square(samples - mean).sum(1).mean()), float(mean @ mean)
    pairs = [(float((a @ a + b @ b) / 2), float(((a + b) / 2) @ ((a + b) / 2))) for a in samples for b in samples]
    found = NoiseScale.of(pairs, micro_batch=1, groups=2)
    assert found.trace == pytest.approx(trace)
    assert found.squares == pytest.approx(squares)
    assert found.b_simple == pytest.approx(trace / squares)
    dealt = [pair for place, pair in enumerate(pairs) if place % 4]  # never the same sample twice in a step
    found = NoiseScale.of(dealt, micro_batch=1, groups=2, dataset_size=3)
    assert found.trace == pytest.approx(trace)
    assert found.squares == pytest.approx(squares)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-6, 1e6), st.integers(0, 5))
def test_the_unit_of_the_loss_does_not_matter(factor: float, seed: int) -> None:
    pairs = drawn(np.random.default_rng(seed), groups=2, micro_batch=32, steps=40)
    one = NoiseScale.of(pairs, micro_batch=32, groups=2)
    other = NoiseScale.of([(factor * small, factor * big) for small, big in pairs], micro_batch=32, groups=2)
    assert other.b_simple == pytest.approx(one.b_simple, rel=1e-6)
    assert (other.low, other.high) == pytest.approx((one.low, one.high), rel=1e-6)
    assert other.steps_needed == pytest.approx(one.steps_needed, abs=1)
    assert other.trace == pytest.approx(factor * one.trace, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 1000), st.integers(2, 9))
def test_without_noise_it_is_zero_and_without_signal_it_is_unknown(micro_batch: int, groups: int) -> None:
    found = NoiseScale.of([(2.0, 2.0)] * 5, micro_batch=micro_batch, groups=groups)
    assert found.b_simple == 0
    assert found.squares == pytest.approx(2.0)
    lost = NoiseScale.of([(2.0, 1.9 / groups), (1.0, 0.9 / groups), (1.5, 1.0 / groups)], micro_batch=micro_batch, groups=groups)
    assert math.isinf(lost.b_simple)
    assert math.isinf(lost.high)
    assert not lost.enough
    assert lost.steps_needed > 0
    assert "still unknown" in str(lost)


@pytest.mark.parametrize(("groups", "micro_batch", "steps"), [(2, 8, 30), (2, 8, 200), (2, 64, 100), (4, 64, 20), (8, 128, 10)], ids=str)
def test_nine_in_ten_intervals_hold_the_truth(groups: int, micro_batch: int, steps: int) -> None:
    """Also where the signal is hardly known, so that many have no upper end."""
    rng, trials = np.random.default_rng(groups * micro_batch), 200
    found = []
    for _ in range(trials):
        pairs = drawn(rng, groups=groups, micro_batch=micro_batch, steps=steps)
        norms = NoiseSteps.of(pairs, micro_batch=micro_batch, groups=groups, level=0.9, dataset_size=None)
        found.append(norms.window(norms.start, steps))
    held = sum(one.low <= TRUTH <= one.high for one in found)
    assert 0.85 * trials <= held <= 0.97 * trials
    if micro_batch == 8 and steps == 30:
        assert any(math.isinf(one.high) for one in found)


def test_what_is_enough_is_within_ten_percent() -> None:
    """Also where it is only just enough."""
    rng, good = np.random.default_rng(5), []
    for steps in (20, 40, 80, 120):
        for _ in range(40):
            pairs = drawn(rng, groups=4, micro_batch=64, steps=steps)
            found = NoiseScale.of(pairs, micro_batch=64, groups=4)
            if found.enough:
                good.append(found.b_simple)
    assert len(good) >= 20
    assert sum(abs(one / TRUTH - 1) > 0.1 for one in good) <= 0.08 * len(good)
    few = NoiseScale.of([(1.01, 1.0)] * 10, micro_batch=64, groups=4)
    assert (few.enough, few.steps_needed) == (False, 10)


def test_steps_that_resemble_their_neighbours_make_longer_blocks() -> None:
    """Correlated noise: an interval that took steps as independent would be far too narrow."""
    rng, held, naive = np.random.default_rng(0), 0, 0
    for _ in range(100):
        noise = rng.standard_normal((2, 600))
        for step in range(1, 600):
            noise[:, step] = 0.9 * noise[:, step - 1] + math.sqrt(1 - 0.81) * noise[:, step]
        trace, squares = 10 + noise[0], 1 + 0.1 * noise[1]
        length = block_length(trace, squares)
        low, high = fieller_interval(blocks(trace, length), blocks(squares, length), 0.9)
        held += low <= 10 <= high
        low, high = fieller_interval(trace, squares, 0.9)
        naive += low <= 10 <= high
    assert held >= 78
    assert naive <= 50
    assert block_length(*rng.standard_normal((2, 600)) + 10) <= 2


def test_blocks_keep_every_step() -> None:
    values = np.arange(10.0)
    assert blocks(values, 1).tolist() == values.tolist()
    assert blocks(values, 3).tolist() == [1.5, 5.0, 8.0]


@pytest.mark.parametrize("micro_batch", [32, 128])
def test_the_promised_number_of_steps_is_right(micro_batch: int) -> None:
    """Promised after 60 steps: with that many, half the interval's width is what counts as enough."""
    rng = np.random.default_rng(3)
    promises = []
    for _ in range(30):
        found = NoiseScale.of(drawn(rng, groups=4, micro_batch=micro_batch, steps=60), micro_batch=micro_batch, groups=4)
        promises.append(found.steps + found.steps_needed if found.steps_needed else 60 * (found.relative_error / ENOUGH) ** 2)
        assert math.isfinite(found.high)
    promised = round(float(np.median(promises)))
    widths = [
        NoiseScale.of(drawn(rng, groups=4, micro_batch=micro_batch, steps=promised), micro_batch=micro_batch, groups=4).relative_error
        for _ in range(30)
    ]
    assert 1 / 1.5 <= (float(np.median(widths)) / ENOUGH) ** 2 <= 1.5


def test_larger_groups_take_fewer_steps() -> None:
    short = made(groups=2, micro_batch=8, steps=400)
    predicted = short.steps_with(micro_batch=128)
    long = made(groups=2, micro_batch=128, steps=400)
    needed = 400 * (long.relative_error / ENOUGH) ** 2
    assert predicted < short.steps + short.steps_needed
    assert 0.4 <= predicted / needed <= 2.5
    assert "larger ones help more than more steps" in str(short)
    assert short.steps_with(groups=8) < short.steps_with(groups=2)
    with pytest.raises(NoiseScaleError, match="2 groups are allowed"):
        short.steps_with(groups=1)


def test_a_beginning_with_larger_gradients_is_left_out() -> None:
    size = np.where(np.arange(200) < 30, 20.0, 1.0)
    pairs = drawn(np.random.default_rng(1), groups=4, micro_batch=64, steps=200, size=size)
    found = NoiseScale.of(pairs, micro_batch=64, groups=4)
    assert 30 <= found.left_out <= 60
    assert found.steps == 200 - found.left_out
    assert found.squares == pytest.approx(0.01, rel=0.5)
    assert "gradients still changed in size" in str(found)
    assert made().left_out == 0
    assert transient_length(np.full(10, 2.0)) == 0


def test_it_is_followed_over_the_training() -> None:
    """The noise doubles half-way."""
    rng = np.random.default_rng(2)
    first, second = (drawn(rng, groups=4, micro_batch=size, steps=200) for size in (256, 64))
    found = NoiseScale.of([*first, *second], micro_batch=256, groups=4)
    values = [block.b_simple for block in found.over_time]
    assert next(block.first for block in found.over_time) == 1
    assert found.over_time[-1].last == 400
    assert max(values[:5]) < min(values[5:])
    assert values[-1] / values[0] == pytest.approx(4, rel=0.3)
    assert "it moves while training goes on" in str(found)
    assert "it moves" not in str(made(steps=400))
    frame = found.to_frame()
    assert list(frame["b_simple"]) == values
    assert len(frame) == len(values)


def test_it_narrows_while_it_runs() -> None:
    found = made()
    running = found.running(points=10)
    assert [block.last for block in running] == list(range(30, 301, 30))
    assert (running[-1].b_simple, running[-1].low, running[-1].high) == (found.b_simple, found.low, found.high)
    assert running[0].high - running[0].low > 1.5 * (running[-1].high - running[-1].low)


def test_it_goes_through_json() -> None:
    for found in (
        made(dataset_size=5000, optimizer={"name": "sgd", "lr": 0.1}, notes=["as measured"]),
        NoiseScale.of([(2.0, 0.9), (1.0, 0.45), (math.nan, 1.0)], micro_batch=2, groups=2),
    ):
        assert NoiseScale.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_what_it_says() -> None:
    found = made()
    assert found.enough
    assert found.steps_needed == 0
    assert found.word == "enough steps"
    assert "300 steps of 4 groups of 64 samples" in str(found)
    assert "enough steps" in found.summary
    assert "enough steps" in repr(found)
    assert "<table>" in found._repr_html_()
    short = made(steps=20, micro_batch=16, groups=2)
    assert not short.enough
    assert "more steps needed" in short.word
    assert short.relative_error > ENOUGH


def test_steps_without_numbers_are_left_out() -> None:
    pairs = drawn(np.random.default_rng(0), groups=4, micro_batch=64, steps=100)
    spoiled = [(math.inf, math.inf), (math.nan, 1.0), *pairs, (0.0, 0.0)]
    found = NoiseScale.of(spoiled, micro_batch=64, groups=4)
    assert found.b_simple == NoiseScale.of(pairs, micro_batch=64, groups=4).b_simple
    assert "3 of 103 steps left out" in str(found)
    assert found.over_time[0].first == 3


@pytest.mark.parametrize(
    ("pairs", "more", "message"),
    [
        ([(2.0, 1.0)] * 5, {"groups": 1}, "a step needs 2 or more: several ranks, or accumulation"),
        ([(2.0, 1.0)], {}, "1 step to go by: at least 2"),
        ([], {}, "0 steps to go by"),
        ([(math.nan, math.nan)] * 5, {}, "none of 5 steps has gradients that are numbers above 0: the loss is NaN"),
        ([(2.0, 1.0)] * 5, {"micro_batch": 0}, "micro_batch=0: a whole number"),
        ([(2.0, 1.0)] * 5, {"dataset_size": 1}, "of one sample there is no noise"),
        ([(2.0, 1.0)] * 5, {"level": 90}, "a share between 0 and 1"),
    ],
)
def test_what_cannot_be_estimated(pairs: list[tuple[float, float]], more: dict[str, Any], message: str) -> None:
    with pytest.raises(NoiseScaleError, match=message):
        NoiseScale.of(pairs, **{"micro_batch": 8, "groups": 2, **more})


def test_fieller_at_its_edges() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(50)
    assert fieller_interval(noise, noise[::-1], 0.9) == (0.0, math.inf)  # neither is known to be above 0
    low, high = fieller_interval(noise + 10, noise[::-1] * 10, 0.9)
    assert 0 < low < math.inf
    assert high == math.inf
    assert fieller_interval(np.full(5, 6.0), np.full(5, 2.0), 0.9) == (3.0, 3.0)
    assert relative_error(np.full(5, 6.0), -np.ones(5)) == math.inf
    low, high = fieller_interval(rng.standard_normal(50), 10 + noise, 0.9)
    assert low == 0
    assert 0 < high < 1


def rows(rank: int, pairs: list[tuple[float | None, float | None]], **more: Any) -> list[dict[str, Any]]:
    head = {
        "rank": rank,
        "world_size": 2,
        "micro_batch": 8,
        "accumulation": 3,
        "every": 1,
        "dataset_size": None,
        "optimizer": {"name": "sgd"},
        **more,
    }
    return [head, *({"step": step + 1, "small": small, "big": big} for step, (small, big) in enumerate(pairs))]


def test_the_files_of_ranks_are_put_together() -> None:
    found = noise_scale_of_ranks([rows(0, [(2.0, 0.5), (4.0, 1.0), (1.0, 1.0)]), rows(1, [(4.0, 0.5), (2.0, 2.0)])])
    assert found.pairs == ((3.0, 1.0), (3.0, 3.0))  # the third is not written everywhere yet
    assert found.groups == 6
    assert found.micro_batch == 8
    assert found.optimizer == {"name": "sgd"}
    found = noise_scale_of_ranks([rows(0, [(2.0, 0.5), (4.0, 1.0), (None, None)]), rows(1, [(4.0, 0.5), (2.0, 2.0), (1.0, 1.0)])])
    assert found.steps == 2
    assert "1 steps left out: their micro-batches were split" in str(found)
    with pytest.raises(NoiseScaleError, match="1 ranks have written gradient norms so far, and all are needed"):
        noise_scale_of_ranks([rows(0, [(2.0, 0.5)] * 3)])
    with pytest.raises(NoiseScaleError, match="0 ranks have written"):
        noise_scale_of_ranks([])


def test_the_picture() -> None:
    found = made()
    ax = found.plot()
    estimate = next(line for line in ax.get_lines() if line.get_label() == "estimate so far")
    assert np.asarray(estimate.get_ydata())[-1] == pytest.approx(found.b_simple)
    windows = next(line for line in ax.get_lines() if line.get_label() == "windowed estimate")
    assert len(np.asarray(windows.get_xdata())) == len(found.over_time)
    assert any("enough, from step" in text.get_text() for text in ax.texts)
    assert ax.get_ylabel() == "noise scale (samples)"
    assert ax.get_xlabel() == "optimizer step"
    unsure = made(groups=2, micro_batch=4, steps=30).plot(pyplot.subplots()[1])
    assert not unsure.texts
    assert math.isfinite(unsure.get_ylim()[1])
    lost = NoiseScale.of([(2.0, 0.9), (1.0, 0.45), (1.5, 0.5)], micro_batch=2, groups=2)
    assert math.isfinite(lost.plot().get_ylim()[1])
    pyplot.close("all")
