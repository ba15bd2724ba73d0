"""Published formulas, against the numbers that their sources print."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_formulas import accelerate, deepspeed, korthikanti, zero

SHAPE = {"batch": 4, "sequence": 2048, "hidden": 1024, "heads": 16}
SBH = 4 * 2048 * 1024
SCORES = 5 * 16 * 2048**2 * 4


def layer(**changes: Any) -> float:
    return korthikanti(**{**SHAPE, **changes}).total


def test_a_layer_takes_34_sbh_and_the_scores() -> None:
    found = korthikanti(**SHAPE)
    assert found.total == 34 * SBH + SCORES == SBH * (34 + 5 * 16 * 2048 / 1024)
    assert found.terms == {"attention": 11 * SBH, "MLP": 19 * SBH, "layer norms": 4 * SBH, "scores": SCORES}
    assert layer(layers=12) == 12 * layer()


def test_the_rows_of_table_2() -> None:
    t = 8
    assert layer(tensor_parallel=t) == pytest.approx(SBH * (10 + 24 / t) + SCORES / t)
    assert layer(tensor_parallel=t, sequence_parallel=True) == pytest.approx(34 * SBH / t + SCORES / t)
    assert layer(tensor_parallel=t, recompute="selective") == pytest.approx(SBH * (10 + 24 / t))
    assert layer(tensor_parallel=t, sequence_parallel=True, recompute="selective") == pytest.approx(34 * SBH / t)
    assert layer(recompute="full") == 2 * SBH


def test_fused_attention_keeps_the_logsumexp_only() -> None:
    assert layer(fused_attention=True) == 34 * SBH + 4 * 16 * 4 * 2048


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch=0: a whole number from 1 on"),
        ({"recompute": "some"}, "recompute='some': one of 'none', 'selective', 'full'"),
        ({"sequence_parallel": True}, "give tensor_parallel=2 or more"),
    ],
)
def test_shapes_that_make_no_sense(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layer(**changes)


def test_zero_as_its_paper_prints() -> None:
    sizes = [zero(parameters=7_500_000_000, ranks=64, stage=stage).total / 1e9 for stage in range(4)]
    assert [round(size, 1) for size in sizes] == [120, 31.4, 16.6, 1.9]  # figure 1 of the paper


@given(parameters=st.integers(1, 10**12), ranks=st.integers(1, 4096))
def test_stages_save_more_and_more(parameters: int, ranks: int) -> None:
    totals = [zero(parameters=parameters, ranks=ranks, stage=stage).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert zero(parameters=parameters, stage=3).total == 16 * parameters


def test_deepspeed_as_its_pages_print() -> None:
    p, layer_ = 2851_000_000, 32_000_000
    gib = 2**30
    assert deepspeed(parameters=p, ranks=8, stage=2).total / gib == pytest.approx(15.93, abs=0.01)
    assert deepspeed(parameters=p, ranks=8, stage=2, offload=True).total / gib == pytest.approx(5.31, abs=0.01)
    assert deepspeed(parameters=p, ranks=8, stage=3, largest_layer=layer_).total / gib == pytest.approx(6.09, abs=0.02)
    assert deepspeed(parameters=p, ranks=8, stage=3, largest_layer=layer_, offload=True).total / gib == pytest.approx(0.12, abs=0.01)


def test_accelerate_is_four_times_the_weights() -> None:
    assert accelerate(parameters=1000).total == 16_000
    assert accelerate(parameters=1000, bytes_per_parameter=2).total == 8_000


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: zero(parameters=1, stage=4), "stage=4: ZeRO has the stages 1, 2 and 3"),
        (lambda: zero(parameters=0), "parameters=0: a whole number from 1 on"),
        (lambda: deepspeed(parameters=1, stage=1), "stage=1: DeepSpeed estimates stages 2 and 3"),
        (lambda: deepspeed(parameters=1, stage=3), "largest_layer=0: stage 3 gathers one layer at a time"),
        (lambda: accelerate(parameters=1, bytes_per_parameter=0), "bytes_per_parameter=0"),
    ],
)
def test_numbers_that_make_no_sense(made: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made()


def test_a_formula_shows_its_terms_its_source_and_where_it_holds() -> None:
    found = zero(parameters=10**9, ranks=8, stage=1)
    for face in (str(found), found._repr_html_()):
        for word in ("optimizer states", "sum", "arXiv 1910.02054", "no activations"):
            assert word in face
    assert found.to_frame()["bytes"].sum() == found.total
