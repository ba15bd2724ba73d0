"""Scratch memory that CUDA's sums and means take: where few outputs are summed over many rows, blocks write partial sums to global memory.

The largest case in training is the gradient of a bias, a sum over the rows of a batch: 128 MiB for 4,096 × 4,096 numbers on an H100.
Source: `setReduceConfig` and `gpu_reduce_kernel` in aten/src/ATen/native/cuda/Reduce.cuh (torch 2.11 and 2.13).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.memory.estimate.cuda.overrides import Overrides, temporary

MAX_THREADS, WARP = 512, 32
"""Of a block."""
VECTOR = 4
"""Numbers that a thread loads at once."""
MAX_VALUES, MIN_VALUES = 256, 16
"""Per thread: with more than the first, the input is split across blocks, down to the second."""
VALUES_PER_WARP_STEP = 16
MAX_INDEXED_BYTES = 2**31
"""Larger inputs are reduced in parts."""


@dataclass(frozen=True, slots=True)
class Processors:
    """What the launch of a reduction depends on."""

    count: int
    """Streaming multiprocessors."""
    threads: int
    """Resident threads of each, at most."""


PROCESSORS = {
    (7, 0): Processors(80, 2048),
    (7, 5): Processors(40, 1024),
    (8, 0): Processors(108, 2048),
    (8, 6): Processors(84, 1536),
    (8, 9): Processors(142, 1536),
    (9, 0): Processors(132, 2048),
    (10, 0): Processors(148, 2048),
    (12, 0): Processors(170, 1536),
}
"""By compute capability: the largest GPU of each (V100, T4, A100, RTX 3090 Ti, L40S, H100 SXM, B200, RTX 5090); threads from the table
"Technical specifications per compute capability" of the CUDA programming guide. Fewer processors may mean less scratch."""


def processors_of(capability: tuple[int, int]) -> Processors:
    """Those of the newest known capability that is not newer."""
    return PROCESSORS[max((known for known in PROCESSORS if known <= tuple(capability)), default=min(PROCESSORS))]


def _merged(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dimensions (size, stride) by rising stride, neighbours that lie behind one another as one."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def scratch_of_sum(
    shape: Sequence[int], strides: Sequence[int], axes: Sequence[int], *, processors: Processors, size: int = 4, accumulated: int = 4
) -> int:
    """Bytes of scratch that a sum over some axes takes; 0 where each block can finish its outputs alone.

    Args:
        shape: shape of the input.
        strides: strides of the input, in numbers.
        axes: that are summed over, from 0.
        processors: the GPU's multiprocessors and their limits.
        size: bytes of a number.
        accumulated: bytes of a number in which it is summed.

    >>> scratch_of_sum((4096, 4096), (4096, 1), [0], processors=PROCESSORS[9, 0]) // 2**20  # as measured on an H100
    128
    """
    if math.prod(shape) * size > MAX_INDEXED_BYTES:
        longest = max(range(len(shape)), key=lambda axis: shape[axis] * strides[axis])
        if shape[longest] < 2:
            return 0
        half = [-(-length // 2) if axis == longest else length for axis, length in enumerate(shape)]
        return scratch_of_sum(half, strides, axes, processors=processors, size=size, accumulated=accumulated)
    reduced = _merged([(shape[axis], strides[axis]) for axis in range(len(shape)) if axis in axes and shape[axis] > 1])
    kept = _merged([(shape[axis], strides[axis]) for axis in range(len(shape)) if axis not in axes and shape[axis] > 1])
    inputs, outputs = math.prod(length for length, _ in reduced), math.prod(length for length, _ in kept)
    if not reduced or not outputs:
        return 0
    along = not kept or reduced[0][1] < kept[0][1]  # are neighbours in memory summed?
    width, height = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    if (reduced[0][1] if along else kept[0][1]) == 1:
        if not along:
            vector = VECTOR
            for number in (kept[0][0], *(stride for _, stride in (*reduced, *kept[1:]))):
                while number % vector:
                    vector //= 2
            width //= vector
        elif width >= 128 and len(reduced) == 1:
            width //= VECTOR
    most = MAX_THREADS // vector
    across, down = (min(1 << (max(1, length).bit_length() - 1), most) for length in (width, height))
    block_width = min(across, WARP)
    block_height = min(down, most // block_width)
    block_width = min(across, most // block_height)
    step_input, step_output = (block_width, 1) if along else (1, block_width)
    if -(-inputs // step_input) < min(VALUES_PER_WARP_STEP * block_height, MAX_VALUES):
        return 0  # each row of a block has outputs of its own
    values = -(-inputs // (step_input * block_height))
    grid = -(-(outputs // vector) // step_output)
    target = processors.count * (processors.threads // (block_width * block_height))
    if values < MAX_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    return accumulated * outputs * blocks * (1 if along else block_width * vector) if blocks > 1 else 0


def install(overrides: Overrides, capability: tuple[int, int]) -> None:
    """Take the scratch of sums and means."""
    processors = processors_of(capability)

    def reducing(original: Callable[..., Any], input: Tensor, dim: Any, *args: Any, **kwargs: Any) -> Any:
        held = None
        if input.layout is torch.strided and input.is_floating_point():
            axes = range(input.dim()) if dim is None or dim == [] else [axis % max(1, input.dim()) for axis in dim]
            wide = 8 if input.dtype is torch.float64 else 4
            size = scratch_of_sum(input.shape, input.stride(), [*axes], processors=processors, size=input.element_size(), accumulated=wide)
            held = temporary(size, like=input, dtype=torch.uint8)  # also of no bytes: batches of all sizes then do the same
        result = original(input, dim, *args, **kwargs)
        del held
        return result

    for name in ("sum.dim_IntList", "mean.dim"):
        overrides.around(name, reducing)
