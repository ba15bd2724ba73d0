"""Scratch of sums on a GPU, as `Reduce.cuh` sizes it; the 128 MiB were measured on an H100 with the allocator's history."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import workbench as wb
from workbench.memory.estimate.cuda import reductions
from workbench.memory.estimate.cuda.emulation import emulate_cuda
from workbench.memory.estimate.cuda.reductions import MAX_INDEXED_BYTES, PROCESSORS, processors_of, scratch_of_sum

H100 = PROCESSORS[9, 0]


def test_the_gradient_of_a_wide_bias_takes_what_was_measured() -> None:
    assert scratch_of_sum((4096, 4096), (4096, 1), [0], processors=H100) == 2**27
    assert scratch_of_sum((4096, 4096), (4096, 1), [0], processors=H100, size=2) == 2**27  # of bf16, summed in fp32


@pytest.mark.parametrize(
    ("shape", "strides", "axes"),
    [
        ((4096, 4096), (4096, 1), [1]),  # each row by itself: neighbours are summed
        ((32, 4096), (4096, 1), [0]),  # few rows
        ((64, 100_000), (100_000, 1), [0]),  # so many outputs that all processors are busy
        ((1, 4096), (4096, 1), [0]),  # nothing to sum
        ((), (), []),
    ],
)
def test_where_blocks_finish_their_outputs_alone_nothing_is_taken(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: list[int]
) -> None:
    assert scratch_of_sum(shape, strides, axes, processors=H100) == 0


def test_a_single_output_needs_a_few_bytes() -> None:
    assert 0 < scratch_of_sum((2**24,), (1,), [0], processors=H100) < 2**16


def test_leading_axes_count_as_one() -> None:
    """A batch of sequences, as `nn.Linear` sums it: the axes lie behind one another."""
    flat = scratch_of_sum((8192, 1024), (1024, 1), [0], processors=H100)
    assert scratch_of_sum((16, 512, 1024), (512 * 1024, 1024, 1), [0, 1], processors=H100) == flat > 0


def test_inputs_beyond_32_bits_are_summed_in_parts() -> None:
    rows = MAX_INDEXED_BYTES // (4096 * 4)
    whole = scratch_of_sum((rows, 4096), (4096, 1), [0], processors=H100)
    assert scratch_of_sum((2 * rows, 4096), (4096, 1), [0], processors=H100) == whole


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(PROCESSORS)))
def test_scratch_is_a_whole_number_of_partial_sums(rows: int, columns: int, size: int, capability: tuple[int, int]) -> None:
    taken = scratch_of_sum((rows, columns), (columns, 1), [0], processors=PROCESSORS[capability], size=size)
    assert taken >= 0
    assert taken % (4 * columns) == 0


def test_a_capability_that_is_not_listed_takes_the_one_before() -> None:
    assert processors_of((8, 7)) == PROCESSORS[8, 6]
    assert processors_of((6, 0)) == PROCESSORS[7, 0]
    assert processors_of((13, 0)) == PROCESSORS[12, 0]


def test_a_sum_over_all_axes_may_say_so() -> None:
    """`dim=None` is an argument of these operators, and not the lack of one."""
    with emulate_cuda(None):
        assert torch.ones(4, 8).sum(dim=None) == 32
        assert torch.ones(4, 8).mean(dim=None, keepdim=True).shape == (1, 1)
        assert torch.ones(4, 8).sum(dim=(), keepdim=True).shape == (1, 1)
        assert torch.ones(()).sum(dim=0) == 1


def test_an_estimate_for_a_gpu_has_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.ReLU())), nn.Linear(2048, 8))

    def estimate() -> wb.MemoryBreakdown:
        return wb.estimate_memory(
            model, torch.zeros(8192, 2048), loss=lambda module, batch: module(batch).sum(), optimizer="sgd(lr=0.1)", device="H100"
        )

    with_scratch = estimate()
    monkeypatch.setattr(reductions, "install", lambda *_: None)
    scratch = scratch_of_sum((8192, 2048), (2048, 1), [0], processors=H100)
    weights = 4 * 2048 * 2048  # the peak moves to a sum, where there is one gradient of activations less, and one of weights more
    assert with_scratch.total - estimate().total == pytest.approx(scratch - 4 * 8192 * 2048 + weights, rel=0.1)
    assert "backward" in (with_scratch.peak_moment or "")
