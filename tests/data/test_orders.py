"""Orders of samples are permutations, computed position by position; shares of a mixture are exact."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.data.analysis.orders import TABLE, InBlocks, Mixed, Order, Shuffled, block_sizes, permute, uniforms


def whole(order: Order, seed: int = 0, epoch: int = 0) -> list[int]:
    return [int(index) for index in order.indices(np.arange(order.samples), seed, epoch)]


@settings(deadline=None)
@given(n=st.one_of(st.integers(1, 300), st.integers(TABLE - 2, TABLE + 2), st.integers(10_000, 70_000)), key=st.integers(0, 2**40))
def test_a_permutation_has_each_number_once(n: int, key: int) -> None:
    values = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(values), np.arange(n))
    some = np.arange(n)[:: max(1, n // 7)]
    assert np.array_equal(permute(some, n, key), values[some])  # each position by itself


@pytest.mark.parametrize("n", [5, 100, TABLE + 904])
def test_first_samples_are_uniform_over_seeds_and_neighbours_are_unrelated(n: int) -> None:
    """Chi-squared per degree of freedom lies within 5 deviations of 1; the mean step between neighbours is that of a random order."""
    draws = 20 * min(n, 100)
    hits = np.bincount([int(permute(np.arange(1), n, seed)[0]) * 100 // max(n, 100) for seed in range(draws)])
    cells = hits[hits > 0] if n < 100 else hits
    expected = draws / len(cells)
    assert abs(((cells - expected) ** 2 / expected).sum() / (len(cells) - 1) - 1) < 5 * np.sqrt(2 / (len(cells) - 1))
    if n > 1000:
        assert np.abs(np.diff(permute(np.arange(n), n, 3))).mean() == pytest.approx(n / 3, rel=0.05)


def test_orders_of_today_are_those_of_tomorrow() -> None:
    """A checkpoint is read by later versions: the numbers may never change."""
    assert permute(np.arange(6), 6, 1, 0).tolist() == [3, 4, 5, 0, 2, 1]
    assert permute(np.arange(4), 1_000_000, 1, 0).tolist() == [539925, 182530, 234264, 511314]
    assert np.round(uniforms([1], 3), 6).tolist() == [[0.566562, 0.745782, 0.971003]]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), window=st.integers(1, 9), seed=st.integers(0, 9))
def test_blocks_are_read_once_and_few_are_open(sizes: list[int], window: int, seed: int) -> None:
    order = InBlocks(sizes, window)
    indices = whole(order, seed, 2)
    assert sorted(indices) == list(range(sum(sizes)))
    bounds = np.cumsum(sizes)
    blocks = np.searchsorted(bounds, indices, side="right").tolist()
    first = {block: blocks.index(block) for block in set(blocks)}
    last = {block: len(blocks) - 1 - blocks[::-1].index(block) for block in set(blocks)}
    opened = [sum(first[block] <= place <= last[block] for block in first) for place in range(len(blocks))]
    assert max(opened) <= window
    half = np.arange(len(indices))[1::2]
    assert order.indices(half, seed, 2).tolist() == indices[1::2]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
    period=st.integers(100, 130),
    epoch=st.integers(0, 3),
)
def test_shares_of_a_mixture_are_exact_and_sources_are_gone_through(
    sizes: list[int], weights: list[float], period: int, epoch: int
) -> None:
    names = {f"s{k}": size for k, size in enumerate(sizes)}
    mixed = Mixed(names, dict(zip(names, weights, strict=False)), samples=period * 2 + 7, period=period)
    assert sum(mixed.counts.values()) == period
    total = sum(weights[: len(sizes)])
    assert all(abs(count - weight / total * period) < 1 for count, weight in zip(mixed.counts.values(), weights, strict=False))
    everything = [index for each in range(epoch + 1) for index in whole(mixed, 5, each)]  # epochs follow each other
    bounds = np.cumsum(sizes)
    sources = np.searchsorted(bounds, everything, side="right")
    for begin in range(0, len(everything) - period + 1, period):
        counted = Counter(sources[begin : begin + period].tolist())
        assert [counted[k] for k in range(len(sizes))] == list(mixed.counts.values())
    for k, size in enumerate(sizes):
        of_source = [index for index, source in zip(everything, sources, strict=True) if source == k]
        for begin in range(0, len(of_source) - size + 1, size):
            assert len(set(of_source[begin : begin + size])) == size  # all samples of a source, before one comes again


def test_other_seeds_and_epochs_are_other_orders() -> None:
    for order in (Shuffled(50), InBlocks([10] * 5, 2), Mixed({"a": 30, "b": 20}, {"a": 1, "b": 1}, 50, 10)):
        assert len({tuple(whole(order, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
        assert whole(order, 1, 2) == whole(order, 1, 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=\[3, 4\] have 7 samples, and the dataset has 8: give the samples of each shard"):
        block_sizes([3, 4], 8)
    with pytest.raises(ValueError, match=r"blocks=0: a whole number of at least 1"):
        block_sizes(0, 8)
    with pytest.raises(ValueError, match=r"weights are of a, and the sources are a, b: name each"):
        Mixed({"a": 3, "b": 4}, {"a": 1}, 10, 10)
    with pytest.raises(ValueError, match=r"weights\['b'\]=0: it has to be a number above 0; leave out"):
        Mixed({"a": 3, "b": 4}, {"a": 1, "b": 0}, 10, 10)
    with pytest.raises(ValueError, match=r"weights\['b'\] is 0.001 of all, less than a sample of 100: try period=400"):
        Mixed({"a": 3, "b": 4}, {"a": 999, "b": 1}, 10, 100)
    with pytest.raises(ValueError, match=r"samples of 'b'=0: a whole number of at least 1"):
        Mixed({"a": 3, "b": 0}, {"a": 1, "b": 1}, 10, 10)


def test_numbers_of_a_sample_are_its_own() -> None:
    together = uniforms([5, 6, 7], 4)
    assert np.array_equal(together[2], uniforms([7], 4)[0])
    many = uniforms(range(20_000), 2)
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many.T)[0, 1]) < 0.03
    assert 0 <= many.min() < many.max() < 1
