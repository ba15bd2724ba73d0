"""Packing: every policy keeps what it promises, and the waste that is shown is the waste there is."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.data.analysis.packing import POLICIES, PackingPolicies, compare_packing, pack


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60), length=st.integers(1, 20), policy=st.sampled_from(sorted(POLICIES)))
def test_tokens_are_where_the_pieces_say(lengths: list[int], length: int, policy: str) -> None:
    documents = [[number * 1000 + token + 1 for token in range(size)] for number, size in enumerate(lengths)]
    packed = pack(lengths, length, policy)
    tokens, owners, places = packed.fill(documents)
    assert tokens.shape == (packed.rows, length)
    assert np.array_equal(owners >= 0, tokens > 0)
    here = owners >= 0
    assert np.array_equal(tokens[here], owners[here] * 1000 + places[here] + 1)
    assert len(np.unique(tokens[here])) == int(here.sum()) == sum(lengths) - packed.lost
    if here.size:
        assert packed.padding == pytest.approx(1 - here.mean())
    if policy == "pad":
        assert packed.lost == sum(max(0, size - length) for size in lengths)
        assert packed.cut == sum(size > length for size in lengths)
    else:
        assert packed.lost == 0
    if policy == "split":
        assert packed.rows == -(-sum(lengths) // length)
    if policy == "best fit":
        assert packed.cut == sum(size > length for size in lengths)  # no other is cut
        used = [int((row >= 0).sum()) for row in owners]
        assert all(one + other > length for one, other in itertools.combinations(used, 2))  # no two rows would fit into one


def test_policies_are_compared() -> None:
    rng = np.random.default_rng(0)
    found = compare_packing(rng.integers(10, 300, 400).tolist(), 256)
    assert found["pad"].padding > 0.3 > found["best fit"].padding
    assert found["split"].cut > 3 * found["best fit"].cut
    assert found["pad"].lost > 0 == found["split"].lost
    assert "best fit" in str(found)
    assert PackingPolicies.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert list(found.to_frame()["policy"]) == list(POLICIES)
    assert wb.data.pack([3, 4], 8).rows == 1
    with pytest.raises(ValueError, match=r"policy='greedy': allowed are 'pad', 'split', 'best fit'"):
        pack([3], 8, "greedy")
    with pytest.raises(ValueError, match=r"length=0: a whole number of at least 1"):
        pack([3], 0)
